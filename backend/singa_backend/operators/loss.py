"""Classification losses: NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss."""

from __future__ import annotations

from typing import Any

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ..ir.shapes import KnownShapes, Shape, Unsure, agree, same_size
from ._api import Array


@operator("NegativeLogLikelihoodLoss", 12, 13, 22, settings=("weight",))
def negative_log_likelihood_loss(
    xp: Xp, x: Array, target: Array, weight: Array | None = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Array:
    """Compute -x[n, target[n], ...] times the weight of the class; a mean is divided by the sum of these weights.

    A target equal to `ignore_index` has loss 0 and weight 0; the mean without targets is NaN.
    """
    if x.ndim < 2 or target.shape != (x.shape[0], *x.shape[2:]):
        raise OperatorError(
            f"scores must have shape (N, C, ...) for targets (N, ...), got {x.shape} and {target.shape}", code="SX404"
        )
    classes = x.shape[1]
    if weight is not None and weight.shape != (classes,):
        raise OperatorError(f"weight must have shape ({classes},), got {weight.shape}", code="SX404")
    if reduction not in ("none", "sum", "mean"):
        raise OperatorError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}", code="SX404")
    counted = xp.ones(target.shape, dtype=bool) if ignore_index is None else target != ignore_index
    index = xp.indices(xp.where(counted, target, 0), classes, negative=False)
    w = counted.astype(x.dtype) if weight is None else xp.where(counted, weight[index], 0)
    picked = xp.take_along_axis(x, xp.expand_dims(index, 1), axis=1).squeeze(1)
    loss = xp.where(counted, -picked * w, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / w.sum()


@negative_log_likelihood_loss.shapes
def loss_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None]:
    """The loss, and the logarithms of probabilities of SoftmaxCrossEntropyLoss."""
    scores, labels, weights = known.shape(call.inputs[0]), known.shape(call.inputs[1]), known.input(call, 2)
    each = None if weights is None else known.shape(weights)
    if scores is not None and (len(scores) < 2 or (each is not None and not agree(each, scores[1:2]))):
        raise Unsure
    if scores is not None and labels is not None:
        if not agree((scores[0], *scores[2:]), labels):
            raise Unsure
        labels = tuple(map(same_size, zip(labels, (scores[0], *scores[2:]), strict=True)))
    reduction = known.attribute(call, "reduction", "mean")
    if reduction not in ("none", "mean", "sum"):
        raise Unsure
    return [labels if reduction == "none" else (), scores]


@negative_log_likelihood_loss.gradient
def negative_log_likelihood_loss_gradient(
    op: Op, dy: V, x: V, target: V, weight: V, ignore_index: int | None, reduction: str
) -> V:
    return _likelihood(op, dy, x, target, weight, ignore_index, reduction)


def _likelihood(op: Op, dy: V, x: V, target: V, weight: V, ignore_index: int | None, reduction: str) -> V:
    """Return minus the weight of each target, at the position of its class; a mean of nothing has the gradient 0."""
    index = target
    if ignore_index is not None:
        ignored = op.Equal(target, ignore_index)
        index = op.Where(ignored, 0, target)
    w = op.Expand(op.constant(1, op.dtype(x)), op.Shape(target)) if weight is None else op.Gather(weight, index)
    if ignore_index is not None:
        w = op.Where(ignored, 0, w)
    if reduction == "mean":
        total = op.ReduceSum(w, keepdims=0)
        if weight is not None or ignore_index is not None:
            total = op.Where(op.Equal(total, 0), 1, total)
        dy = op.Div(dy, total)
    values = op.Neg(op.Mul(w, dy))
    return op.ScatterElements(op.zeros_like(x), op.Unsqueeze(index, [1]), op.Unsqueeze(values, [1]), axis=1)


@operator("SoftmaxCrossEntropyLoss", 12, 13, settings=("weights",))
def softmax_cross_entropy_loss(
    xp: Xp,
    scores: Array,
    labels: Array,
    weights: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Array, Array]:
    """Return the loss and the log-softmax of the scores along axis 1."""
    if scores.ndim < 2:
        raise OperatorError(f"scores must have shape (N, C, ...), got {scores.shape}", code="SX404")
    z = scores if scores.size == 0 else scores - scores.max(axis=1, keepdims=True)
    log_prob = z - xp.log(xp.sum_over(xp.exp(z), (1,), True))
    loss = negative_log_likelihood_loss(xp, log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return loss, log_prob


softmax_cross_entropy_loss.shapes(loss_shapes)


@softmax_cross_entropy_loss.gradient
def softmax_cross_entropy_loss_gradient(
    op: Op, dys: list[V], ys: list[V], scores: V, labels: V, weights: V, ignore_index: int | None, reduction: str
) -> V:
    log_prob = ys[1] if len(ys) > 1 else op.LogSoftmax(scores, axis=1)
    d = None if dys[0] is None else _likelihood(op, dys[0], log_prob, labels, weights, ignore_index, reduction)
    d = op.add(d, dys[1] if len(dys) > 1 else None)
    return op.Sub(d, op.Mul(op.Exp(log_prob), op.ReduceSum(d, [1], keepdims=1)))
