"""TopK, ArgMax and ArgMin, Unique, ReverseSequence, CumSum and CumProd, NonMaxSuppression."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, operator
from ..ir.shapes import KnownShapes, Shape, Unsure
from ._api import Array
from ._common import axis_of
from ._flops import each_input, unknown
from .gather import given_back


@operator("TopK", 11, 24)
def top_k(xp: Xp, x: Array, k: Host[int], *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Array, Array]:
    """Return the k largest or smallest values and their indices; of equal values the lower index comes first.

    NaN is larger than every number, as in NumPy's sort.  sorted=0, which leaves the order undefined, returns the order of
    sorted=1.
    """
    axis = axis_of(axis, x.ndim)
    n = x.shape[axis]
    if not 0 <= k <= n:
        raise OperatorError(f"k must be in [0, {n}], the size of axis {axis}, got {k}", code="SX404")
    rows = xp.moveaxis(x, axis, -1)
    if 0 < k <= n // 8:  # sort only the selected values
        flat = rows.reshape(-1, n)
        chosen = _chosen(xp, flat, k, bool(largest))
        order = _sorted(xp, xp.take_along_axis(flat, chosen, axis=1), bool(largest))
        top = xp.take_along_axis(chosen, order, axis=1).reshape(*rows.shape[:-1], k)
    else:
        top = _sorted(xp, rows, bool(largest))[..., :k]
    top = xp.moveaxis(top, -1, axis).astype(np.int64)
    return xp.take_along_axis(x, top, axis=axis), top


top_k.flops(each_input(1))


@top_k.gradient
def top_k_gradient(op: Op, dy: V, ys: list[V], x: V, axis: int) -> V:
    return op.ScatterElements(op.zeros_like(x), ys[1], dy, axis=axis)


def _sorted(xp: Xp, x: Array, largest: bool) -> Array:
    """Return the sorting permutation along the last axis; equal values keep their order."""
    if largest:  # a stable sort of the reversed values, reversed
        return x.shape[-1] - 1 - xp.flip(xp.argsort(xp.flip(x, -1), axis=-1, kind="stable"), -1)
    return xp.argsort(x, axis=-1, kind="stable")


def _chosen(xp: Xp, x: Array, k: int, largest: bool) -> Array:
    """Return the positions of the k best values of each row, in ascending order; the first of those equal to the k-th best."""
    place = x.shape[1] - k if largest else k - 1
    least = xp.partition(x, place, axis=1)[:, place : place + 1]
    better, equal = (x > least if largest else x < least), x == least
    if x.dtype.kind == "f":
        nan, last = xp.isnan(x), xp.isnan(least)
        better, equal = better | (nan & ~last if largest else ~nan & last), equal | (nan & last)
    room = k - better.sum(axis=1, keepdims=True)
    return xp.nonzero(better | (equal & (xp.cumsum(equal, axis=1) <= room)))[1].reshape(-1, k)


@operator("TopK", 10)
def top_k_10(xp: Xp, x: Array, k: Host[int], *, axis: int = -1) -> tuple[Array, Array]:
    values, indices = top_k(xp, x, k, axis=axis)
    return values, indices


@top_k_10.decomposition
def top_k_10_decomposition(op: Op, x: V, k: V, axis: int) -> tuple[V, V]:
    y, i = op.TopK(x, k, axis=axis, outputs=2)
    return y, i


@operator("TopK", 1)
def top_k_1(xp: Xp, x: Array, *, axis: int = -1, k: int) -> tuple[Array, Array]:
    values, indices = top_k(xp, x, k, axis=axis)
    return values, indices


@top_k_1.decomposition
def top_k_1_decomposition(op: Op, x: V, axis: int, k: int) -> tuple[V, V]:
    y, i = op.TopK(x, [k], axis=axis, outputs=2)
    return y, i


def _arg(xp: Xp, x: Array, pick: str, axis: int, keepdims: int, last: int) -> Array:
    """Return the first or last index of the extremum along `axis`; NaN is the extremum, as in NumPy."""
    axis = axis_of(axis, x.ndim)
    if x.shape[axis] == 0:
        raise OperatorError(f"axis {axis} must not be empty, got shape {x.shape}", code="SX404")
    i = xp.place_of(x, pick, axis, bool(last))
    return xp.expand_dims(i, axis) if keepdims else i


def _arg_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, keep = known.shape(call.inputs[0]), known.attribute(call, "keepdims", 1)
    if shape is None:
        return None
    at = axis_of(known.attribute(call, "axis", 0), len(shape))
    if keep not in (0, 1):
        raise Unsure
    return tuple(1 if i == at else d for i, d in enumerate(shape) if keep or i != at)


@operator("ArgMax", 1, 11, 12, 13)
def arg_max(xp: Xp, x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    return _arg(xp, x, "max", axis, keepdims, select_last_index)


arg_max.flops(each_input(1))
arg_max.shapes(_arg_shapes)


@operator("ArgMin", 1, 11, 12, 13)
def arg_min(xp: Xp, x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    return _arg(xp, x, "min", axis, keepdims, select_last_index)


arg_min.flops(each_input(1))
arg_min.shapes(_arg_shapes)


# --- Unique ---------------------------------------------------------------------------------------------------------


def _groups(xp: Xp, order: Array, new: Array) -> tuple[Array, Array, Array]:
    """Return the first member of each group of equal elements, the group of each element, and the sizes of the groups.

    Args:
        xp: Array namespace.
        order: Stable sorting permutation.
        new: For each sorted element, whether it starts a group.
    """
    starts = xp.flatnonzero(new)
    inverse = xp.empty(order.shape, np.int64)
    inverse[order] = xp.cumsum(new, dtype=np.int64) - 1
    ends = xp.concatenate([starts[1:], xp.asarray(np.array([len(order)] if len(starts) else [], np.int64))])
    return order[starts], inverse, ends - starts


def _unique_values(xp: Xp, flat: Array) -> tuple[Array, Array, Array]:
    """Return the groups of equal values; all NaN are equal, as in NumPy."""
    order = xp.argsort(flat, kind="stable")
    s = flat[order]
    differs = s[1:] != s[:-1]
    if flat.dtype.kind in "fc":
        differs = differs & ~(xp.isnan(s[1:]) & xp.isnan(s[:-1]))
    return _groups(xp, order, xp.concatenate([xp.ones((min(1, len(s)),), bool), differs.astype(bool)]))


def _unique_rows(xp: Xp, codes: Array) -> tuple[Array, Array, Array]:
    """Return the groups of equal rows of an integer matrix, in lexicographic order."""
    n, columns = codes.shape
    order = xp.lexsort(xp.flip(codes.T, 0)) if columns else xp.arange(n)  # the last key of lexsort is the primary one
    s = codes[order]
    return _groups(xp, order, xp.concatenate([xp.ones((min(1, n),), bool), (s[1:] != s[:-1]).any(axis=1)]))


@operator("Unique", 11, 28, traits=("moves",))
def unique(xp: Xp, x: Array, *, axis: int | None = None, sorted: int = 1) -> tuple[Array, Array, Array, Array]:
    if axis is None:
        x, axis = x.reshape(-1), 0
        first, inverse, counts = _unique_values(xp, x)
    else:
        axis = axis_of(axis, x.ndim)
        moved = xp.moveaxis(x, axis, 0)
        # Values of any dtype, including NaN and strings, are compared by their ranks as integers.
        _, codes, _ = _unique_values(xp, moved.reshape(-1))
        first, inverse, counts = _unique_rows(xp, codes.reshape(x.shape[axis], x.size // max(1, x.shape[axis])))
    if not sorted:
        by_place = xp.argsort(first, kind="stable")
        inverse = xp.argsort(by_place, kind="stable")[inverse]
        first, counts = first[by_place], counts[by_place]
    return xp.take(x, first, axis=axis), first, inverse, counts


@unique.gradient
def unique_gradient(op: Op, dys: list[V], x: V, axis: int | None, sorted: int) -> V:
    """The gradient goes to the first of equal values, which is the selected one."""
    if dys[0] is None:
        return None
    first = op.Unique(x, axis=axis, sorted=sorted, outputs=2)[1]
    if axis is not None:
        return given_back(op, dys[0], x, first, axis)
    return op.Reshape(given_back(op, dys[0], op.Reshape(x, [-1]), first, 0), op.Shape(x), allowzero=1)


# --- along a sequence -----------------------------------------------------------------------------------------------


@operator("ReverseSequence", 10, 28, widen=False, traits=("moves",))
def reverse_sequence(xp: Xp, x: Array, sequence_lens: Host[np.ndarray], *, batch_axis: int = 1, time_axis: int = 0) -> Array:
    if x.ndim < 2 or {batch_axis, time_axis} != {0, 1}:
        raise OperatorError(
            f"batch_axis and time_axis must be the first two axes, got {batch_axis} and {time_axis} for shape {x.shape}",
            code="SX408",
        )
    batch, time = x.shape[batch_axis], x.shape[time_axis]
    if sequence_lens.shape != (batch,) or (sequence_lens < 0).any() or (sequence_lens > time).any():
        raise OperatorError(f"sequence_lens must have {batch} lengths in [0, {time}], got {sequence_lens.tolist()}", code="SX404")
    t, lens = np.arange(time), sequence_lens[:, None]
    source = xp.asarray(np.where(t < lens, lens - 1 - t, t))  # (batch, time)
    sample = xp.arange(batch)[:, None]
    return x[sample, source] if batch_axis == 0 else x[source.T, sample.T]


@reverse_sequence.gradient
def reverse_sequence_gradient(op: Op, dy: V, sequence_lens: V, batch_axis: int, time_axis: int) -> V:
    return op.ReverseSequence(dy, sequence_lens, batch_axis=batch_axis, time_axis=time_axis)


def _running(xp: Xp, x: Array, operation: str, axis: int, exclusive: int, reverse: int) -> Array:
    """Compute a running sum or product; an exclusive one starts with the neutral value and omits the last element."""
    axis = axis_of(axis, x.ndim)
    x = xp.flip(x, axis) if reverse else x
    if exclusive and x.shape[axis]:
        cut = (slice(None),) * axis
        neutral = (xp.zeros_like if operation == "cumsum" else xp.ones_like)(x[(*cut, slice(1))])
        x = xp.concatenate([neutral, x[(*cut, slice(-1))]], axis=axis)
    y = xp.running_sum(x, axis) if operation == "cumsum" else xp.cumprod(x, axis=axis, dtype=x.dtype)
    return xp.flip(y, axis) if reverse else y


@operator("CumSum", 11, 14, traits=("finite", "on_sizes"))
def cum_sum(xp: Xp, x: Array, axis: Host[int], *, exclusive: int = 0, reverse: int = 0) -> Array:
    return _running(xp, x, "cumsum", axis, exclusive, reverse)


cum_sum.flops(each_input(1))


@cum_sum.shapes
def cum_sum_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, axis = known.shape(call.inputs[0]), known.shape(call.inputs[1])
    if shape == () or (axis is not None and len(axis) > 1):
        raise Unsure
    return shape


@cum_sum.gradient
def cum_sum_gradient(op: Op, dy: V, axis: V, exclusive: int, reverse: int) -> V:
    return op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse)


@operator("CumProd", 26)
def cum_prod(xp: Xp, x: Array, axis: Host[int], *, exclusive: int = 0, reverse: int = 0) -> Array:
    return _running(xp, x, "cumprod", axis, exclusive, reverse)


@cum_prod.gradient
def cum_prod_gradient(op: Op, dy: V, y: V, x: V, axis: V, exclusive: int, reverse: int) -> V:
    """Before the first zero: the sum of dy y / x from there; at it: the same without that zero; after it: 0.

    Up to the second zero, that 0 is written as a product with the first one, because its gradient is not 0.
    """
    zero = op.Equal(x, 0)
    zeros = op.CumSum(op.cast(zero, x), axis, reverse=reverse)
    none, one = op.Equal(zeros, 0), op.Equal(zeros, 1)
    first, second = op.And(zero, one), op.And(zero, op.Equal(zeros, 2))
    filled, vanishing = op.Where(zero, 1, x), op.CumSum(op.Where(first, x, 0), axis, reverse=reverse)

    def behind(v: V) -> V:
        return op.CumSum(op.Mul(dy, v), axis, exclusive=exclusive, reverse=1 - reverse)

    def without(gone: V) -> V:
        return behind(op.CumProd(op.Where(gone, 1, x), axis, exclusive=exclusive, reverse=reverse))

    after = without(first)
    late = op.Where(second, without(op.Or(first, second)), op.Where(one, op.Div(after, filled), 0))
    return op.Where(none, op.Div(behind(y), filled), op.Where(first, after, op.Mul(vanishing, late)))


# --- NonMaxSuppression ----------------------------------------------------------------------------------------------


_TOGETHER = 64
"""The boxes that are compared at a time."""


def _overlaps(a: np.ndarray, b: np.ndarray, iou_threshold: float) -> Any:
    """Whether each box of `a` overlaps with each of `b` by more than the threshold; (5, n): low and high corners, and areas."""
    low0, low1, high0, high1, area = a[:, :, None]
    sides = np.minimum(high0, b[2]) - np.maximum(low0, b[0]), np.minimum(high1, b[3]) - np.maximum(low1, b[1])
    common = np.maximum(sides[0], 0) * np.maximum(sides[1], 0)
    return common / (area + b[4] - common) > iou_threshold  # without a common area that is 0 or NaN


def _survivors(sides: np.ndarray, order: np.ndarray, most: int, iou_threshold: float) -> list[int]:
    """Return the boxes, best first, whose overlap with every better selected box is at most the threshold."""
    out: list[int] = []
    for start in range(0, order.size, _TOGETHER):
        block = order[start : start + _TOGETHER]
        dropped = _overlaps(sides[:, out], sides[:, block], iou_threshold).any(axis=0)
        among = _overlaps(sides[:, block], sides[:, block], iou_threshold)
        for i, box in enumerate(block.tolist()):
            if len(out) >= most:
                return out
            if not dropped[i]:
                out.append(box)
                dropped |= among[i]
    return out


@operator("NonMaxSuppression", 10, 11, host=True)
def non_max_suppression(
    xp: Xp,
    boxes: Array,
    scores: Array,
    max_output_boxes_per_class: Host[int] = 0,
    iou_threshold: Host[float] = 0.0,
    score_threshold: Host[float] | None = None,
    *,
    center_point_box: int = 0,
) -> Array:
    if boxes.ndim != 3 or scores.ndim != 3 or boxes.shape != (scores.shape[0], scores.shape[2], 4):
        raise OperatorError(
            f"boxes must have shape (N, boxes, 4) and scores (N, classes, boxes), got {boxes.shape} and {scores.shape}",
            code="SX404",
        )
    if not 0 <= iou_threshold <= 1:
        raise OperatorError(f"iou_threshold must be in [0, 1], got {iou_threshold}", code="SX404")
    if center_point_box not in (0, 1):
        raise OperatorError(f"center_point_box must be 0 or 1, got {center_point_box}", code="SX404")
    from ..kernels.boxes import selected_boxes  # with the bits of what follows

    most = max_output_boxes_per_class
    rows = selected_boxes(boxes, scores, most, iou_threshold, score_threshold, center_point_box)
    if rows is not None:
        return rows
    a, b = boxes[..., :2], boxes[..., 2:]
    # Boxes are any two diagonal corners, or centres with width and height.
    low, high = (a - b / 2, a + b / 2) if center_point_box else (np.minimum(a, b), np.maximum(a, b))
    sides = np.concatenate([low, high, (high - low).prod(axis=-1, keepdims=True)], axis=-1).swapaxes(-1, -2)
    selected: list[tuple[int, int, int]] = []
    for i in limits.rounds(scores.shape[0] * scores.shape[1]):
        n, c = divmod(i, scores.shape[1])
        s = scores[n, c]
        order = np.argsort(-s, kind="stable")  # of equal scores the first box comes first
        if score_threshold is not None:
            order = order[s[order] >= score_threshold]
        selected += [(n, c, box) for box in _survivors(sides[n], order, most, iou_threshold)]
    return np.array(selected, np.int64).reshape(-1, 3)


non_max_suppression.flops(unknown)
