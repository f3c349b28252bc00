"""The names of the losses of commands and exports, and the label without a loss.  It imports nothing: commands start fast."""

CLASSES, NEXT_TOKEN, PROBABILITIES = "softmax_cross_entropy", "next_token_cross_entropy", "cross_entropy"
"""The losses that take class numbers: of scores, of the scores of tokens, and of probabilities."""

LOSSES = (CLASSES, NEXT_TOKEN, "mse_loss", PROBABILITIES, "binary_cross_entropy")
"""The losses that have names."""

LABELS = {CLASSES: 1, NEXT_TOKEN: 2}
"""The losses whose default target is class numbers, and how many axes of the output these have."""

IGNORED = -100
"""The label without a loss in next_token_cross_entropy, unless another one is chosen."""
