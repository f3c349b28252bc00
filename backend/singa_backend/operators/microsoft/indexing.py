"""Operators that move, number or repeat values: most equal newer ones of ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from ... import dtypes, limits
from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape, valid_axes
from .._common import axis_of, length
from ..creation import range_shapes
from ..pad_slice import pad_shapes
from ._api import Array, Host, Op, V, Xp, microsoft


@microsoft("Trilu", 1, widen=False, traits=("moves", "shape_of_first"))
def ms_trilu(op: Op, x: V, k: Host[V] = 0, *, upper: int = 1) -> V:
    """Keep the upper or the lower triangle of each matrix, as Trilu-14."""
    return op.Trilu(x, k if op.is_value(k) else None, upper=upper)


@microsoft("GatherND", 1, widen=False, traits=("keeps_finite", "moves"))
def ms_gather_nd(op: Op, data: V, indices: V) -> V:
    """Gather slices, as GatherND-13 without axes of a batch."""
    return op.GatherND(data, indices if op.dtype(indices) == np.int64 else op.Cast(indices, to=dtypes.onnx_code(np.int64)))


@microsoft("Pad", 1, widen=False, traits=("keeps_finite", "moves"))
def ms_pad(op: Op, data: V, pads: Host[V], value: V | None = None, *, mode: str = "constant") -> V:
    """Pad as Pad-25; `pads` may have a first axis of 1."""
    return op.Pad(data, op.Reshape(pads, [-1]), None if value is None else _scalar(op, value), mode=mode)


@ms_pad.accepts
def ms_pad_accepts(value: Array | None) -> None:
    if value is not None and value.size != 1:
        raise OperatorError(f"constant_value must hold one value, got shape {value.shape}", code="SX404")


ms_pad.shapes(pad_shapes)


def _scalar(op: Op, x: V) -> V:
    return op.Reshape(x, op.constant([], np.int64))


@microsoft("Range", 1, widen=False, traits=("moves",))
def ms_range(op: Op, start: Host[V], limit: Host[V], delta: Host[V] | None = None) -> V:
    """Count from start to limit, as Range-27; an absent delta is 1."""
    step = op.constant(1, op.dtype(start)) if delta is None else _scalar(op, delta)
    return op.Range(_scalar(op, start), _scalar(op, limit), step)


ms_range.shapes(range_shapes)


@ms_range.accepts
def ms_range_accepts(start: Array, limit: Array, delta: Array | None) -> None:
    step = start if delta is None else delta
    if not start.size == limit.size == step.size == 1:
        shapes = f"{start.shape}, {limit.shape} and {() if delta is None else delta.shape}"
        raise OperatorError(f"start, limit and delta must be scalars, got shapes {shapes}", code="SX404")


@microsoft("ExpandDims", 1, widen=False, traits=("keeps_finite", "moves", "elements_of_first", "view"))
def expand_dims(op: Op, x: V, axis: Host[V]) -> V:
    """Insert an axis of size 1; a negative axis is counted in the result."""
    y = op.Unsqueeze(x, op.Reshape(op.Cast(axis, to=dtypes.onnx_code(np.int64)), [1]))
    shape = op.shape(x)
    if shape is None:
        return y
    return op.with_type(y, helper.make_tensor_type_proto(dtypes.onnx_code(op.dtype(x)), [None] * (len(shape) + 1)))


@expand_dims.accepts
def expand_dims_accepts(axis: Array) -> None:
    if axis.size != 1:
        raise OperatorError(f"input 'axis' must hold one value, got shape {axis.shape}", code="SX402")


@microsoft("UnfoldTensor", 1, widen=False, traits=("keeps_finite", "moves"))
def unfold_tensor(xp: Xp, x: Array, *, dim: int = -1, size: int, step: int = 1) -> Array:
    """Take windows of `size` elements along an axis, at distances of `step`; they are the last axis of the result."""
    axis = axis_of(dim, x.ndim)
    if not x.ndim or not 0 < size <= x.shape[axis] or step < 1:
        raise OperatorError(
            f"size must be in [1, {x.shape[axis] if x.ndim else 0}] and step at least 1, got {size} and {step}", code="SX404"
        )
    count = (x.shape[axis] - size) // step + 1
    limits.admit((*x.shape[:axis], count, *x.shape[axis + 1 :], size), x.dtype)
    seen = xp.windows(x, size, axis)
    return xp.ascontiguousarray(seen[(*(slice(None),) * axis, slice(None, None, step))])


@unfold_tensor.decomposition
def unfold_tensor_body(op: Op, x: V, dim: int, size: int, step: int) -> V:
    rank = op.rank(x)
    axis = dim % rank
    starts = op.Range(0, op.Sub(length(op, x, axis), size - 1), step)
    places = op.Add(op.Unsqueeze(starts, [1]), op.Range(0, size, 1))
    seen = op.Gather(x, places, axis=axis)
    return op.Transpose(seen, perm=[i for i in range(rank + 1) if i != axis + 1] + [axis + 1])


@unfold_tensor.shapes
def unfold_tensor_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, size, step = known.shape(call.inputs[0]), known.attribute(call, "size"), known.attribute(call, "step", 1)
    found = valid_axes([known.attribute(call, "dim", -1)], len(shape or ()))
    if shape is None or found is None or step < 1:
        return None
    axis = found[0]
    had = shape[axis]
    count = (had - size) // step + 1 if isinstance(had, int) else known.fresh()
    return (*shape[:axis], count, *shape[axis + 1 :], size)


@microsoft("Unique", 1, widen=False)
def ms_unique(op: Op, x: V) -> tuple[V, V, V]:
    """Return the different values in the order in which they occur, the place of each value in them, and how often it occurs.

    Each NaN differs from the others.
    """
    codes = x
    if dtypes.is_float(op.dtype(x)):
        same = op.Unique(x, outputs=3)[2]
        count = length(op, x, 0)
        codes = op.Where(op.IsNaN(x), op.Range(count, op.Add(count, count), 1), same)
    _, first, inverse, counts = op.Unique(codes, sorted=0, outputs=4)
    return op.Gather(x, first), inverse, counts


@ms_unique.accepts
def ms_unique_accepts(x: Array) -> None:
    if x.ndim != 1:
        raise OperatorError(f"x must be a vector, got shape {x.shape}", code="SX404")


@microsoft("SampleOp", 1, widen=False, traits=("unary", "cannot_fail", "moves"))
def sample_op(op: Op, x: V) -> V:
    """Return x: an example of onnxruntime's."""
    return op.Identity(x)


# --- without a CPU kernel ----------------------------------------------------------------------------------------------


@microsoft("TorchEmbedding", 1, widen=False, traits=("moves",), weights={0: "the table"})
def torch_embedding(op: Op, weight: V, indices: V, padding_idx: V | None = None, scale_grad_by_freq: V | None = None) -> V:
    """Gather rows; the last two inputs change the gradient only."""
    return op.Gather(weight, indices)


@torch_embedding.gradient
def torch_embedding_gradient(op: Op, dy: V, weight: V, indices: V, padding_idx: V | None, scale_grad_by_freq: V | None) -> V:
    """The row padding_idx has no gradient; scale_grad_by_freq divides by the number of times that a row is gathered."""
    places = op.Unsqueeze(indices, [-1])
    if scale_grad_by_freq is not None:
        rows = op.ConstantOfShape(op.Shape(weight, end=1), value=np.zeros(1, op.dtype(weight)))
        ones = op.ConstantOfShape(op.Shape(indices), value=np.ones(1, op.dtype(weight)))
        times = op.GatherND(op.ScatterND(rows, places, ones, reduction="add"), places)
        dy = op.Where(scale_grad_by_freq, op.Div(dy, op.Unsqueeze(times, [-1])), dy)
    if padding_idx is not None:
        count = length(op, weight, 0)
        padding = op.Equal(op.Mod(indices, count), op.Mod(_scalar(op, padding_idx), count))
        dy = op.Where(op.Unsqueeze(padding, [-1]), op.cast(op.constant(0.0, np.float32), dy), dy)
    return op.ScatterND(op.zeros_like(weight), places, dy, reduction="add")


@microsoft("IsAllFinite", 1)
def is_all_finite(xp: Xp, *xs: Array, isinf_only: int = 0, isnan_only: int = 0) -> Array:
    """Whether no value of all inputs is an infinity or NaN, or with one of the attributes, only the one of them."""
    if isinf_only and isnan_only:
        raise OperatorError("isinf_only and isnan_only must not both be set", code="SX404")
    found = xp.ones((), bool)
    for x in xs:
        good = ~xp.isnan(x) if isnan_only else ~xp.isinf(x) if isinf_only else xp.isfinite(x)
        found = found & good.all()
    return xp.asarray(found)


@is_all_finite.shapes
def is_all_finite_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    return ()


@is_all_finite.decomposition
def is_all_finite_body(op: Op, xs: list[V], isinf_only: int, isnan_only: int) -> V:
    count = op.constant(0, np.int64)
    for x in xs:
        bad = [test(x) for test, left_out in ((op.IsInf, isnan_only), (op.IsNaN, isinf_only)) if not left_out]
        for one in bad:
            count = op.Add(count, op.ReduceSum(op.Cast(one, to=dtypes.onnx_code(np.int64)), keepdims=0))
    return op.Equal(count, op.constant(0, np.int64))
