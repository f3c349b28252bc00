"""Quantization, y = saturate(round(x / scale) + zero_point), and dequantization."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .. import dtypes
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Version, operator
from ..ir.shapes import KnownShapes, Unsure, same_shape
from ._api import Array
from ._common import axis_of, clamped
from .cast import limits, to_float8, to_tiny_float

_NARROW_INTS = dtypes.SUB_BYTE_INTS | {np.dtype(t) for t in (np.int8, np.uint8, np.int16, np.uint16)}
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def _fit(xp: Xp, name: str, v: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Reshape a scale or zero point (scalar, per axis or per block) to broadcast to a tensor of `shape`."""
    rank = len(shape)
    if block < 0:
        raise OperatorError(f"block_size must be at least 0, got {block}", code="SX404")
    if block and v.ndim == rank > 0:
        axis = axis_of(axis if rank > 1 else 0, rank)
        blocks = -(-shape[axis] // block)
        want = (*shape[:axis], blocks, *shape[axis + 1 :])
        if v.shape != want:
            raise OperatorError(
                f"{name} must have shape {want} for x {shape} in blocks of {block} on axis {axis}, got {v.shape}", code="SX404"
            )
        return xp.repeat(v, min(block, shape[axis]), axis=axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    if v.size == 1 and v.ndim <= 1:
        return v.reshape(())
    if v.ndim != 1:
        raise OperatorError(f"{name} must be a scalar or a vector without block_size, got shape {v.shape}", code="SX404")
    axis = axis_of(axis if rank > 1 else 0, rank)  # the default axis is 1, which does not exist for a vector
    if rank == 0 or v.shape[0] != shape[axis]:
        raise OperatorError(
            f"{name} must have one value for each entry of axis {axis} of x {shape}, got {v.shape[0]}", code="SX404"
        )
    return v.reshape(-1, *(1,) * (rank - axis - 1))


def _same_shape(scale: Array, zero_point: Array | None) -> None:
    if zero_point is not None and scale.shape != zero_point.shape and (scale.size, zero_point.size) != (1, 1):
        raise OperatorError(
            f"scale and zero point must have equal shapes, got {scale.shape} and {zero_point.shape}", code="SX404"
        )


def _scalar_only(scale: Array) -> None:
    if scale.size != 1:
        raise OperatorError(f"scale must be a scalar before opset 13, got shape {scale.shape}", code="SX404")


def _quotient(x: Array, scale: Array, precision: np.dtype[Any]) -> Array:
    """Compute x / scale as in `precision`, in a float type that NumPy supports."""
    if precision.kind == "i":  # integers up to 2^31 and their ties are exact in float64 only
        return x.astype(np.float64) / scale.astype(np.float64)
    if precision == _E8M0:  # division by powers of two is exact
        return x.astype(np.float32, copy=False) / scale.astype(np.float32, copy=False)
    if precision in dtypes.HALVES:
        q = x.astype(precision).astype(np.float32) / scale.astype(precision).astype(np.float32)
        return q.astype(precision).astype(np.float32)
    return x.astype(precision, copy=False) / scale.astype(precision, copy=False)


@operator("QuantizeLinear", 13, 19, 21, 23, 24, 25, 28, widen=False, traits=("epilogue", "keeps_weights"))
def quantize_linear(
    xp: Xp,
    x: Array,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    axis: int = 1,
    saturate: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    version: Version = 28,
) -> Array:
    target = np.dtype(np.uint8) if y_zero_point is None else np.dtype(y_zero_point.dtype)
    if output_dtype:
        asked = dtypes.numpy_dtype(output_dtype)
        if y_zero_point is not None and asked != target:
            both = f"{dtypes.onnx_name(asked)} and {dtypes.onnx_name(target)}"
            raise OperatorError(f"output_dtype must be the type of the zero point, got {both}", code="SX404")
        target = asked
    if target not in _NARROW_INTS | dtypes.FLOAT8 | dtypes.FLOAT6 | dtypes.FLOAT4 or target == _E8M0:
        raise OperatorError(f"the output must have a quantized type, got {dtypes.onnx_name(target)}", code="SX404")
    _same_shape(y_scale, y_zero_point)
    scale = _fit(xp, "y_scale", y_scale, x.shape, axis, block_size)
    q = _quotient(x, scale, dtypes.numpy_dtype(precision) if precision else np.dtype(y_scale.dtype))
    zero = None if y_zero_point is None else _fit(xp, "y_zero_point", y_zero_point, x.shape, axis, block_size).astype(q.dtype)
    if target in _NARROW_INTS:
        q = xp.rint(q) if zero is None else xp.rint(q) + zero
        q = clamped(xp, q, *limits(target))
        return q.astype(np.int32).astype(target) if target in dtypes.SUB_BYTE_INTS else q.astype(target)
    if zero is not None:
        q = q + zero
    return to_float8(xp, q, target, bool(saturate)) if target in dtypes.FLOAT8 else to_tiny_float(xp, q, target, version)


@quantize_linear.dtypes
def quantize_linear_dtypes(known: KnownShapes[Any], call: Any) -> np.dtype[Any] | None:
    zero_point, code = known.input(call, 2), known.attribute(call, "output_dtype")
    asked = dtypes.numpy_dtype(code) if code else None
    if zero_point is None:
        return asked or np.dtype(np.uint8)
    dtype = known.dtype(zero_point)
    if asked is not None and dtype is not None and asked != dtype:
        raise Unsure
    return dtype


quantize_linear.shapes(same_shape)
quantize_linear.no_gradient("zero")


@operator("QuantizeLinear", 10, widen=False)
def quantize_linear_10(xp: Xp, x: Array, y_scale: Array, y_zero_point: Array | None = None) -> Array:
    _scalar_only(y_scale)
    return quantize_linear(xp, x, y_scale, y_zero_point)


@quantize_linear_10.decomposition
def quantize_linear_10_decomposition(op: Op, x: V, y_scale: V, y_zero_point: V) -> V:
    return op.QuantizeLinear(x, y_scale, y_zero_point)


@operator("DequantizeLinear", 13, 19, 21, 23, 24, 25, 28, widen=False, traits=("finite", "epilogue", "keeps_weights"))
def dequantize_linear(
    xp: Xp,
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    """Compute (x - zero_point) * scale: an exact difference, a product in float32, rounded once to the output's type."""
    target = dtypes.numpy_dtype(output_dtype) if output_dtype else np.dtype(x_scale.dtype)
    if target not in (np.float32, *dtypes.HALVES):
        raise OperatorError(
            f"the output must be float, float16 or bfloat16, got {dtypes.onnx_name(target)}",
            code="SX404",
            hint="set output_dtype",
        )
    if x_zero_point is not None and x_zero_point.dtype != x.dtype:
        both = f"{dtypes.onnx_name(x.dtype)} and {dtypes.onnx_name(x_zero_point.dtype)}"
        raise OperatorError(f"x and its zero point must have one type, got {both}", code="SX404")
    _same_shape(x_scale, x_zero_point)
    scale = _fit(xp, "x_scale", x_scale, x.shape, axis, block_size).astype(np.float32)
    wide = np.dtype(np.float32) if x.dtype in dtypes.NARROW_FLOATS else np.dtype(np.int64 if x.dtype == np.int32 else np.int32)
    d = x.astype(wide)
    if x_zero_point is not None:
        d = d - _fit(xp, "x_zero_point", x_zero_point, x.shape, axis, block_size).astype(wide)
    return (d.astype(np.float32) * scale).astype(target)


@dequantize_linear.dtypes
def dequantize_linear_dtypes(known: KnownShapes[Any], call: Any) -> np.dtype[Any] | None:
    code = known.attribute(call, "output_dtype")
    return dtypes.numpy_dtype(code) if code else known.dtype(call.inputs[1])


dequantize_linear.shapes(same_shape)


@dequantize_linear.gradient
def dequantize_linear_gradient(op: Op, dy: V, x: V, x_scale: V, x_zero_point: V, axis: int, block_size: int) -> tuple[V, V]:
    """Only the scale has a gradient: x is quantized."""
    steps = op.DequantizeLinear(x, op.full_like(x_scale, 1), x_zero_point, axis=axis, block_size=block_size)
    d = op.Mul(op.cast(dy, steps), steps)
    if not op.rank(x_scale):
        return None, op.cast(op.ReduceSum(d, keepdims=0), x_scale)
    axis %= op.rank(x)
    if not block_size:
        others = op.axes_but(x, axis)  # none for a vector: a ReduceSum without axes would sum them all
        return None, op.cast(op.Reshape(op.ReduceSum(d, others, keepdims=0) if others else d, op.Shape(x_scale)), x_scale)
    # The last block may be smaller: pad it with zeros, then reshape blocks to a new axis.
    size, blocks = op.Shape(x, start=axis, end=axis + 1), op.Shape(x_scale, start=axis, end=axis + 1)
    more = op.Sub(op.Mul(blocks, block_size), size)
    full = op.Pad(d, op.Concat([0], more, axis=0), None, [axis])
    shape = op.Shape(x)
    parts = [op.Slice(shape, [0], [axis]), blocks, [block_size], op.Slice(shape, [axis + 1], [op.rank(x)])]
    return None, op.cast(op.ReduceSum(op.Reshape(full, op.Concat(*parts, axis=0), allowzero=1), [axis + 1], keepdims=0), x_scale)


@operator("DequantizeLinear", 10, widen=False)
def dequantize_linear_10(xp: Xp, x: Array, x_scale: Array, x_zero_point: Array | None = None) -> Array:
    _scalar_only(x_scale)
    return dequantize_linear(xp, x, x_scale, x_zero_point)


@dequantize_linear_10.decomposition
def dequantize_linear_10_decomposition(op: Op, x: V, x_scale: V, x_zero_point: V) -> V:
    return op.DequantizeLinear(x, x_scale, x_zero_point)


@operator("DynamicQuantizeLinear", 11, traits=("shape_of_first",))
def dynamic_quantize_linear(xp: Xp, x: Array) -> tuple[Array, Array, Array]:
    """Quantize to uint8 with a scale and zero point that map the range of x, extended to include 0, to [0, 255]."""
    if x.size == 0:
        raise OperatorError(f"x must not be empty, got shape {x.shape}", code="SX404")
    low, high = xp.minimum(x.min(), 0), xp.maximum(x.max(), 0)
    scale = (high - low) / x.dtype.type(255)
    zero = xp.rint(xp.fmin(xp.fmax(-low / scale, x.dtype.type(0)), x.dtype.type(255))).astype(np.uint8)
    return quantize_linear(xp, x, scale, zero), scale, zero


@dynamic_quantize_linear.decomposition
def dynamic_quantize_linear_decomposition(op: Op, x: V) -> tuple[V, V, V]:
    low, high = op.Min(op.ReduceMin(x, keepdims=0), 0), op.Max(op.ReduceMax(x, keepdims=0), 0)
    scale = op.Div(op.Sub(high, low), 255)
    zero = op.Cast(op.Clip(op.Round(op.Div(op.Neg(low), scale)), 0, 255), to=2)
    return op.QuantizeLinear(x, scale, zero), scale, zero
