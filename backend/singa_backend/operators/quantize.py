"""ForwardGraph numbers and their quantized form: y = saturate(round(x / scale) + zero_point), and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .. import dtypes
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Version, operator
from ._api import Array
from ._common import axis_of
from .cast import limits, to_float8, to_tiny_float

_NARROW_INTS = dtypes.SUB_BYTE_INTS | {np.dtype(t) for t in (np.int8, np.uint8, np.int16, np.uint16)}
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def _fit(xp: Xp, name: str, v: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """A scale or a zero point, made to broadcast with a tensor of `shape`: scalar, per axis, or one value for each block."""
    rank = len(shape)
    if block < 0:
        raise OperatorError(f"block_size {block} is negative", code="SX404")
    if block and v.ndim == rank > 0:
        axis = axis_of(axis if rank > 1 else 0, rank)
        blocks = -(-shape[axis] // block)
        want = (*shape[:axis], blocks, *shape[axis + 1 :])
        if v.shape != want:
            raise OperatorError(f"{name} {v.shape} must be {want}: x {shape} in blocks of {block} on axis {axis}", code="SX404")
        return xp.repeat(v, min(block, shape[axis]), axis=axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    if v.size == 1 and v.ndim <= 1:
        return v.reshape(())
    if v.ndim != 1:
        raise OperatorError(f"{name} has shape {v.shape}; without block_size it is a scalar or a vector", code="SX404")
    axis = axis_of(axis if rank > 1 else 0, rank)  # the default axis is 1, which a vector does not have
    if rank == 0 or v.shape[0] != shape[axis]:
        raise OperatorError(f"{name} has {v.shape[0]} values; x {shape} has another length on axis {axis}", code="SX404")
    return v.reshape(-1, *(1,) * (rank - axis - 1))


def _same_shape(scale: Array, zero_point: Array | None) -> None:
    if zero_point is not None and scale.shape != zero_point.shape and (scale.size, zero_point.size) != (1, 1):
        raise OperatorError(f"scale {scale.shape} and zero point {zero_point.shape} differ in shape", code="SX404")


def _scalar_only(scale: Array) -> None:
    if scale.size != 1:
        raise OperatorError(f"scale has shape {scale.shape}: before opset 13 it is a scalar", code="SX404")


def _quotient(x: Array, scale: Array, precision: np.dtype[Any]) -> Array:
    """x / scale as `precision` has it, in a float that NumPy computes with."""
    if precision.kind == "i":  # a true quotient: integers to 2^31 and their ties are exact in float64 only
        return x.astype(np.float64) / scale.astype(np.float64)
    if precision == _E8M0:  # powers of two: dividing by them is exact
        return x.astype(np.float32, copy=False) / scale.astype(np.float32, copy=False)
    if precision in dtypes.HALVES:
        q = x.astype(precision).astype(np.float32) / scale.astype(precision).astype(np.float32)
        return q.astype(precision).astype(np.float32)
    return x.astype(precision, copy=False) / scale.astype(precision, copy=False)


@operator("QuantizeLinear", 13, 19, 21, 23, 24, 25, 28, widen=False)
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
            there = f"the zero point is {dtypes.onnx_name(target)}"
            raise OperatorError(f"output_dtype is {dtypes.onnx_name(asked)}, {there}", code="SX404")
        target = asked
    if target not in _NARROW_INTS | dtypes.FLOAT8 | dtypes.FLOAT6 | dtypes.FLOAT4 or target == _E8M0:
        raise OperatorError(f"x cannot be quantized to {dtypes.onnx_name(target)}", code="SX404")
    _same_shape(y_scale, y_zero_point)
    scale = _fit(xp, "y_scale", y_scale, x.shape, axis, block_size)
    q = _quotient(x, scale, dtypes.numpy_dtype(precision) if precision else np.dtype(y_scale.dtype))
    zero = None if y_zero_point is None else _fit(xp, "y_zero_point", y_zero_point, x.shape, axis, block_size).astype(q.dtype)
    if target in _NARROW_INTS:
        q = xp.rint(q) if zero is None else xp.rint(q) + zero
        info = limits(target)
        q = xp.fmin(xp.fmax(q, q.dtype.type(info[0])), q.dtype.type(info[1]))  # a NaN becomes the minimum
        return q.astype(np.int32).astype(target) if target in dtypes.SUB_BYTE_INTS else q.astype(target)
    if zero is not None:
        q = q + zero
    return to_float8(xp, q, target, bool(saturate)) if target in dtypes.FLOAT8 else to_tiny_float(xp, q, target, version)


quantize_linear.no_gradient("zero")


@operator("QuantizeLinear", 10, widen=False)
def quantize_linear_10(xp: Xp, x: Array, y_scale: Array, y_zero_point: Array | None = None) -> Array:
    _scalar_only(y_scale)
    return quantize_linear(xp, x, y_scale, y_zero_point)


@quantize_linear_10.decomposition
def quantize_linear_10_decomposition(op: Op, x: V, y_scale: V, y_zero_point: V) -> V:
    return op.QuantizeLinear(x, y_scale, y_zero_point)


@operator("DequantizeLinear", 13, 19, 21, 23, 24, 25, 28, widen=False)
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
    """y = (x - zero_point) * scale: the difference exact, the product in float32, rounded once to the output's type."""
    target = dtypes.numpy_dtype(output_dtype) if output_dtype else np.dtype(x_scale.dtype)
    if target not in (np.float32, *dtypes.HALVES):
        raise OperatorError(f"x cannot be dequantized to {dtypes.onnx_name(target)}", code="SX404", hint="set output_dtype")
    if x_zero_point is not None and x_zero_point.dtype != x.dtype:
        there = f"its zero point {dtypes.onnx_name(x_zero_point.dtype)}"
        raise OperatorError(f"x is {dtypes.onnx_name(x.dtype)}, {there}", code="SX404")
    _same_shape(x_scale, x_zero_point)
    scale = _fit(xp, "x_scale", x_scale, x.shape, axis, block_size).astype(np.float32)
    wide = np.dtype(np.float32) if x.dtype in dtypes.NARROW_FLOATS else np.dtype(np.int64 if x.dtype == np.int32 else np.int32)
    d = x.astype(wide)
    if x_zero_point is not None:
        d = d - _fit(xp, "x_zero_point", x_zero_point, x.shape, axis, block_size).astype(wide)
    return (d.astype(np.float32) * scale).astype(target)


@dequantize_linear.gradient
def dequantize_linear_gradient(op: Op, dy: V, x: V, x_scale: V, x_zero_point: V, axis: int, block_size: int) -> tuple[V, V]:
    """By the scale alone: x is quantized."""
    steps = op.DequantizeLinear(x, op.full_like(x_scale, 1), x_zero_point, axis=axis, block_size=block_size)
    d = op.Mul(op.cast(dy, steps), steps)
    if not op.rank(x_scale):
        return None, op.cast(op.ReduceSum(d, keepdims=0), x_scale)
    axis %= op.rank(x)
    if not block_size:
        return None, op.cast(op.Reshape(op.ReduceSum(d, op.axes_but(x, axis), keepdims=0), op.Shape(x_scale)), x_scale)
    # The last block may be smaller: it is filled up with zeros, and then each block is an axis of its own.
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


@operator("DynamicQuantizeLinear", 11)
def dynamic_quantize_linear(xp: Xp, x: Array) -> tuple[Array, Array, Array]:
    """To uint8, with a scale and a zero point that map x's range, 0 included, to [0, 255]."""
    if x.size == 0:
        raise OperatorError(f"an empty tensor {x.shape} has no range", code="SX404")
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
