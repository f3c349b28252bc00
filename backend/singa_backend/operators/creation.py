"""Creation of tensors: constants, ranges, identity matrices, triangles, one-hot rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, operator
from ..ir.shapes import KnownShapes, Shape, Unsure, open_shape
from ._api import Array
from ._common import axis_of, blank


@operator("Constant", 1, 9, 11, 12, 13, 19, 21, 23, 24, 25, host=True, widen=False, traits=("moves",))
def constant(
    xp: Xp,
    *,
    value: np.ndarray | None = None,
    sparse_value: np.ndarray | None = None,
    value_float: float | None = None,
    value_floats: tuple[float, ...] | None = None,
    value_int: int | None = None,
    value_ints: Ints | None = None,
    value_string: str | None = None,
    value_strings: tuple[str, ...] | None = None,
) -> Array:
    given: list[tuple[Any, Any]] = [
        (value, None), (sparse_value, None), (value_float, np.float32), (value_floats, np.float32), (value_int, np.int64),
        (value_ints, np.int64), (value_string, object), (value_strings, object),
    ]  # fmt: skip
    given = [(v, dtype) for v, dtype in given if v is not None]
    if len(given) != 1:
        raise OperatorError(f"Constant must have exactly one value, got {len(given)}", code="SX404")
    v, dtype = given[0]
    return v if dtype is None else np.array(v, dtype)


constant.no_gradient("constant")


@operator("ConstantOfShape", 9, 20, 21, 23, 24, 25, widen=False, traits=("moves",))
def constant_of_shape(xp: Xp, shape: Host[Ints], *, value: np.ndarray | None = None) -> Array:
    if any(d < 0 for d in shape):
        raise OperatorError(f"the shape must not have negative dimensions, got {shape}", code="SX404")
    if value is None:
        return xp.zeros(shape, np.float32)
    if value.size != 1:
        raise OperatorError(f"value must hold one element, got shape {value.shape}", code="SX404")
    y = xp.empty(shape, value.dtype)
    y[...] = xp.asarray(value.reshape(()))
    return y


@constant_of_shape.shapes
def constant_of_shape_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    target, lengths = known.sizes(call.inputs[0]), known.shape(call.inputs[0])
    if not isinstance(target, tuple):
        return None if lengths is None else open_shape(known, *lengths)
    if any(isinstance(d, int) and d < 0 for d in target):
        raise Unsure
    return target


@constant_of_shape.dtypes
def constant_of_shape_dtypes(known: KnownShapes[Any], call: Any) -> np.dtype[Any]:
    value = known.attribute(call, "value")
    return np.dtype(np.float32) if value is None else np.dtype(value.dtype)


constant_of_shape.no_gradient("constant")


@operator("EyeLike", 9, 22, widen=False, traits=("moves",))
def eye_like(xp: Xp, x: Array, *, dtype: int | None = None, k: int = 0) -> Array:
    if x.ndim != 2:
        raise OperatorError(f"EyeLike takes a matrix, got shape {x.shape}", code="SX404")
    made = np.dtype(x.dtype) if dtype is None else dtypes.numpy_dtype(dtype)
    if made.kind == "c" or made in dtypes.HOST_ONLY:
        raise OperatorError(f"dtype must be a type that EyeLike supports, got {dtypes.onnx_name(made)}", code="SX406")
    limits.admit(x.shape, np.int64)
    return xp.eye(*x.shape, k=k).astype(made) if made in dtypes.HALVES else xp.eye(*x.shape, k=k, dtype=made)


@eye_like.shapes
def eye_like_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = known.shape(call.inputs[0])
    if shape is not None and len(shape) != 2:
        raise Unsure
    return shape


@eye_like.dtypes
def eye_like_dtypes(known: KnownShapes[Any], call: Any) -> np.dtype[Any] | None:
    code = known.attribute(call, "dtype")
    return known.dtype(call.inputs[0]) if code is None else dtypes.numpy_dtype(code)


eye_like.no_gradient("constant")


@operator("Range", 11, 27, widen=False, traits=("moves",))
def range_(xp: Xp, start: Host[np.ndarray], limit: Host[np.ndarray], delta: Host[np.ndarray], *, stash_type: int = 1) -> Array:
    """Return start, start + delta, ... without the limit; the number of values is computed in integers or float64."""
    if not start.size == limit.size == delta.size == 1:
        raise OperatorError(
            f"start, limit and delta must be scalars, got shapes {start.shape}, {limit.shape} and {delta.shape}", code="SX404"
        )
    dtype = start.dtype
    whole = dtype.kind in "iu"
    a, b, step = (int(v.reshape(-1)[0]) if whole else float(v.reshape(-1)[0]) for v in (start, limit, delta))
    if step == 0:
        raise OperatorError("delta must not be 0", code="SX403" if whole else "SX404")
    if whole:
        count = max(-(-(b - a) // step), 0)
        i = xp.arange(count, dtype=np.int64)
        return (xp.asarray(np.int64(a)) + i * xp.asarray(np.int64(step))).astype(dtype)
    length = (b - a) / step
    if not math.isfinite(length):
        raise OperatorError(f"the number of steps must be finite, got a range from {a} to {b} by {step}", code="SX404")
    compute = np.dtype(np.float64)
    if dtype in dtypes.HALVES:
        compute = dtypes.numpy_dtype(stash_type)
        if compute not in (np.float32, np.float64):
            raise OperatorError(f"stash_type must be 1 (float) or 11 (double), got {stash_type}", code="SX404")
    i = xp.arange(max(math.ceil(length), 0)).astype(compute)
    return (a + i * step).astype(dtype)


@range_.shapes
def range_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    if any(known.shape(i) not in ((), None) for i in call.inputs) or all(known.constant(i) is not None for i in call.inputs):
        raise Unsure  # the length of constants is computed where they are folded
    return (known.fresh(),)


@range_.gradient
def range_gradient(op: Op, dy: V, start: V, delta: V) -> tuple[V, V, V]:
    """The limit determines the number of values, not the values: it has no gradient."""
    i = op.cast(op.Range(0, op.Squeeze(op.Shape(dy), [0]), 1), dy)
    dstart, ddelta = op.ReduceSum(dy, keepdims=0), op.ReduceSum(op.Mul(dy, i), keepdims=0)
    return op.Reshape(dstart, op.Shape(start)), None, op.Reshape(ddelta, op.Shape(delta))


@range_.decomposition
def range_decomposition(op: Op, start: V, limit: V, delta: V, stash_type: int) -> V:
    """Before opset 11: the positions of ones in a vector of the range's length."""
    dtype = op.dtype(start)
    whole = dtype.kind in "iu"
    code = TensorProto.INT64 if whole else stash_type if dtype in dtypes.HALVES else TensorProto.DOUBLE
    a, b, step = (op.Cast(op.Reshape(v, op.constant([], np.int64)), to=int(code)) for v in (start, limit, delta))
    way = op.Sub(b, a)
    count = op.Div(way, step)
    if whole:  # division truncates: add one if there is a remainder and the step leads to the limit
        left = op.Not(op.Equal(op.Mul(count, step), way))
        onward = op.Equal(*(op.Greater(op.Cast(v, to=int(TensorProto.DOUBLE)), 0.0) for v in (way, step)))
        count = op.Add(count, op.Cast(op.And(left, onward), to=int(TensorProto.INT64)))
    count = op.Relu(op.Ceil(op.Cast(count, to=int(TensorProto.DOUBLE))))
    ones = op.ConstantOfShape(op.Reshape(op.Cast(count, to=int(TensorProto.INT64)), [1]), value=np.ones(1, np.int64))
    i = op.Squeeze(op.NonZero(ones), [0])
    return op.Cast(op.Add(a, op.Mul(op.Cast(i, to=int(code)), step)), to=dtypes.onnx_code(dtype))


@operator("Trilu", 14, widen=False, traits=("moves",))
def trilu(xp: Xp, x: Array, k: Host[int] = 0, *, upper: int = 1) -> Array:
    if x.ndim < 2:
        raise OperatorError(f"Trilu takes matrices, got shape {x.shape}", code="SX404")
    diagonal = xp.arange(x.shape[-1]) - xp.arange(x.shape[-2])[:, None]
    kept = diagonal >= k if upper else diagonal <= k
    return xp.where(kept, x, blank(xp, (1,), x.dtype))


@trilu.shapes
def trilu_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, diagonal = known.shape(call.inputs[0]), known.input(call, 1)
    if (shape is not None and len(shape) < 2) or (diagonal is not None and known.shape(diagonal) not in ((), None)):
        raise Unsure
    return shape


@trilu.gradient
def trilu_gradient(op: Op, dy: V, k: V, upper: int) -> V:
    return op.Trilu(dy, k if op.is_value(k) else None, upper=upper)


def _one_hot(xp: Xp, i: Array, depth: int, values: Array, axis: int) -> Array:
    """Return `values[1]` where the position on a new axis of size `depth` equals the index, `values[0]` elsewhere."""
    if depth < 0:
        raise OperatorError(f"depth must be at least 0, got {depth}", code="SX404")
    if values.shape != (2,):
        raise OperatorError(f"values must be [off, on], got shape {values.shape}", code="SX404")
    axis = axis_of(axis, i.ndim + 1)
    limits.admit((*i.shape, depth), values.dtype)
    classes = xp.arange(depth).reshape((depth,) + (1,) * (i.ndim - axis))
    return xp.where(xp.expand_dims(i, axis) == classes, values[1:], values[:1])


def _classes(xp: Xp, indices: Array, depth: int) -> Array:
    """Convert indices of any dtype to int64; a value outside int64 is not a class."""
    if indices.dtype == np.uint64:
        indices = xp.where(indices < max(depth, 0), indices, xp.asarray(np.uint64(2**63 - 1)))
    return xp.cast(indices, np.int64)


@operator("OneHot", 11, 28, widen=False, traits=("moves",))
def one_hot(xp: Xp, indices: Array, depth: Host[int], values: Array, *, axis: int = -1) -> Array:
    i = _classes(xp, indices, depth)
    return _one_hot(xp, xp.where(i < 0, i + depth, i), depth, values, axis)


@one_hot.gradient
def one_hot_gradient(op: Op, dy: V, indices: V, depth: V, values: V, axis: int) -> tuple[V, V, V]:
    hot = op.OneHot(indices, depth, op.constant([0, 1], op.dtype(dy)), axis=axis)
    on = op.ReduceSum(op.Mul(dy, hot), keepdims=0)
    return None, None, op.Concat(op.Reshape(op.Sub(op.ReduceSum(dy, keepdims=0), on), [1]), op.Reshape(on, [1]), axis=0)


@operator("OneHot", 9, widen=False)
def one_hot_9(xp: Xp, indices: Array, depth: Host[int], values: Array, *, axis: int = -1) -> Array:
    """Before opset 11 a negative index is not a class."""
    return _one_hot(xp, _classes(xp, indices, depth), depth, values, axis)


@one_hot_9.decomposition
def one_hot_9_decomposition(op: Op, indices: V, depth: V, values: V, axis: int) -> V:
    """Replace a negative index by one that is not a class."""
    classes, i = op.Cast(op.Reshape(depth, [1]), to=7), op.Cast(indices, to=7)
    return op.OneHot(op.Where(op.Less(i, 0), op.Squeeze(classes, [0]), i), classes, values, axis=axis)
