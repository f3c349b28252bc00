"""RoBERTa sequence classification (opset 9): whether a text is positive or negative.

    python examples/zoo/roberta.py "This film is so good" --model roberta-sequence-classification-9.onnx \\
        --vocab vocab.json --merges merges.txt

The text is split into byte-level BPE tokens between <s> and </s>, (1, n); the model returns the scores of the two classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from published import load, numbers, options, softmax, start
from text import add_vocabulary, bpe, input_of, require

from singa_backend.errors import InvalidInput

LABELS = ("negative", "positive")
LONGEST = 512
"""The largest number of tokens, <s> and </s> included."""


def tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text."""
    ids = tokenizer.encode(text).ids
    if not 2 < len(ids) <= LONGEST:
        raise InvalidInput(f"a text must have 1 to {LONGEST - 2} tokens, got {len(ids) - 2}", hint="classify its parts")
    return ids  # type: ignore[no-any-return]


def classify(rep: Any, ids: list[int]) -> np.ndarray:
    """Return the probabilities of the labels."""
    if len(rep.inputs) != 1:
        raise InvalidInput(f"the model must have one input, got {', '.join(map(str, rep.inputs))}")
    scores = rep.run([input_of(rep.inputs[0], ids)])[0]
    if scores.shape != (1, len(LABELS)):
        raise InvalidInput(f"the model must return {(1, len(LABELS))}, got {scores.shape}")
    return softmax(numbers(scores)[0])  # type: ignore[no-any-return]


def main() -> None:
    parser = options(__doc__, "roberta-sequence-classification-9.onnx")
    add_vocabulary(parser)
    parser.add_argument("--space", action="store_true", help="put a space before each text, as older tokenizers did")
    args = parser.parse_args()
    given = require(parser, args, "texts", "vocab", "merges")
    tokenizer = bpe(args.vocab, args.merges, args.space, ("<s>", "</s>")) if given else None
    rep = load(args)
    for text in args.texts:
        shares = classify(rep, tokens(tokenizer, text))
        best = int(shares.argmax())
        print(f"{LABELS[best]}  {shares[best]:.4f}  {text}")


if __name__ == "__main__":
    start(main)
