"""Losses of classification: the negative log likelihood, and the cross entropy of a softmax."""

from __future__ import annotations

from ..errors import OperatorError
from ..operator import Array, Xp, operator


@operator("NegativeLogLikelihoodLoss", 12, 13, 22)
def negative_log_likelihood_loss(
    xp: Xp, x: Array, target: Array, weight: Array | None = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Array:
    """-x[n, target[n], ...] times the weight of that class; a mean is over the weights that took part.

    A target equal to `ignore_index` loses nothing and weighs nothing; the mean of no targets is NaN.
    """
    if x.ndim < 2 or target.shape != (x.shape[0], *x.shape[2:]):
        raise OperatorError(f"scores of shape {x.shape} do not fit targets of shape {target.shape}", code="SX404")
    classes = x.shape[1]
    if weight is not None and weight.shape != (classes,):
        raise OperatorError(f"{classes} classes have weights of shape {weight.shape}", code="SX404")
    if reduction not in ("none", "sum", "mean"):
        raise OperatorError(f"reduction is {reduction!r}; it may be 'none', 'sum' or 'mean'", code="SX404")
    counted = xp.ones(target.shape, dtype=bool) if ignore_index is None else target != ignore_index
    index = xp.indices(xp.where(counted, target, 0), classes, negative=False)
    w = counted.astype(x.dtype) if weight is None else xp.where(counted, weight[index], 0)
    picked = xp.take_along_axis(x, xp.expand_dims(index, 1), axis=1).squeeze(1)
    loss = xp.where(counted, -picked * w, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / w.sum()


@operator("SoftmaxCrossEntropyLoss", 12, 13)
def softmax_cross_entropy_loss(
    xp: Xp, scores: Array, labels: Array, weights: Array | None = None, *,
    ignore_index: int | None = None, reduction: str = "mean",
) -> tuple[Array, Array]:  # fmt: skip
    """The loss, and the log-softmax of the scores along axis 1."""
    if scores.ndim < 2:
        raise OperatorError(f"scores have the shape (N, C, ...), not {scores.shape}", code="SX404")
    z = scores if scores.size == 0 else scores - scores.max(axis=1, keepdims=True)
    log_prob = z - xp.log(xp.exp(z).sum(axis=1, keepdims=True))
    loss = negative_log_likelihood_loss(xp, log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return loss, log_prob
