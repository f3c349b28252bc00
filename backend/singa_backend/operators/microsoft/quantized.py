"""Operators on quantized tensors: y = saturate(round(f((x - x zero point) * x scale) / y scale) + y zero point).

A definition computes f in float64, and onnxruntime in float32, in integers or by tables: near a tie they differ by one step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape
from ...ir.windows import windows
from .. import pool as pools
from .._common import axes_of, axis_of, rows
from .._shapes import windowed
from .._windows import spatial
from ..quantize import dequantize_linear, quantize_linear
from ._api import Array, Ints, Op, V, Xp, microsoft
from ._eight_bits import checked_rank, count, one, real, real_body, rounded, rounded_body, spatial_first, spatial_last

# --- QuantizeLinear, DequantizeLinear


@microsoft("QuantizeLinear", 1, widen=False, traits=("shape_of_first",))
def ms_quantize(xp: Xp, x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int | None = None) -> Array:
    """Compute as ONNX's operator does; the axis of several scales is 1 by default."""
    return quantize_linear(xp, x, y_scale, y_zero_point, axis=1 if axis is None else axis)


@ms_quantize.decomposition
def ms_quantize_body(op: Op, x: V, y_scale: V, y_zero_point: V, axis: int | None) -> V:
    return op.QuantizeLinear(x, y_scale, y_zero_point, axis=1 if axis is None else axis)


@microsoft("DequantizeLinear", 1, widen=False, traits=("shape_of_first", "finite"))
def ms_dequantize(xp: Xp, x: Array, x_scale: Array, x_zero_point: Array | None = None, *, axis: int | None = None) -> Array:
    """Compute as ONNX's operator does; the axis of several scales is 1 by default."""
    return dequantize_linear(xp, x, x_scale, x_zero_point, axis=1 if axis is None else axis)


@ms_dequantize.decomposition
def ms_dequantize_body(op: Op, x: V, x_scale: V, x_zero_point: V, axis: int | None) -> V:
    return op.DequantizeLinear(x, x_scale, x_zero_point, axis=1 if axis is None else axis)


# --- of elements


@microsoft("QLinearAdd", 1)
def qlinear_add(
    xp: Xp,
    a: Array,
    a_scale: Array,
    a_zero: Array | None,
    b: Array,
    b_scale: Array,
    b_zero: Array | None,
    c_scale: Array,
    c_zero: Array | None = None,
) -> Array:
    """Add the reals, which broadcast."""
    return rounded(xp, real(a, a_scale, a_zero) + real(b, b_scale, b_zero), c_scale, c_zero, a.dtype)


@qlinear_add.decomposition
def qlinear_add_body(op: Op, a: V, a_scale: V, a_zero: V, b: V, b_scale: V, b_zero: V, c_scale: V, c_zero: V) -> V:
    y = op.Add(real_body(op, a, a_scale, a_zero), real_body(op, b, b_scale, b_zero))
    return rounded_body(op, y, c_scale, c_zero, op.dtype(a))


@microsoft("QLinearMul", 1)
def qlinear_mul(
    xp: Xp,
    a: Array,
    a_scale: Array,
    a_zero: Array | None,
    b: Array,
    b_scale: Array,
    b_zero: Array | None,
    c_scale: Array,
    c_zero: Array | None = None,
) -> Array:
    """Multiply the reals, which broadcast."""
    return rounded(xp, real(a, a_scale, a_zero) * real(b, b_scale, b_zero), c_scale, c_zero, a.dtype)


@qlinear_mul.decomposition
def qlinear_mul_body(op: Op, a: V, a_scale: V, a_zero: V, b: V, b_scale: V, b_zero: V, c_scale: V, c_zero: V) -> V:
    y = op.Mul(real_body(op, a, a_scale, a_zero), real_body(op, b, b_scale, b_zero))
    return rounded_body(op, y, c_scale, c_zero, op.dtype(a))


@microsoft("QLinearSigmoid", 1, traits=("shape_of_first",))
def qlinear_sigmoid(xp: Xp, x: Array, x_scale: Array, x_zero: Array | None, y_scale: Array, y_zero: Array | None = None) -> Array:
    """Compute 1 / (1 + exp(-x)) of the reals."""
    return rounded(xp, 1 / (1 + xp.exp(-real(x, x_scale, x_zero))), y_scale, y_zero, x.dtype)


@qlinear_sigmoid.decomposition
def qlinear_sigmoid_body(op: Op, x: V, x_scale: V, x_zero: V, y_scale: V, y_zero: V) -> V:
    return rounded_body(op, op.Sigmoid(real_body(op, x, x_scale, x_zero)), y_scale, y_zero, op.dtype(x))


@microsoft("QLinearLeakyRelu", 1, traits=("shape_of_first",))
def qlinear_leaky_relu(
    xp: Xp,
    x: Array,
    x_scale: Array,
    x_zero: Array | None,
    y_scale: Array,
    y_zero: Array | None = None,
    *,
    alpha: float = 0.01,
) -> Array:
    """Multiply negative reals by alpha."""
    v = real(x, x_scale, x_zero)
    return rounded(xp, xp.where(v < 0, alpha * v, v), y_scale, y_zero, x.dtype)


@qlinear_leaky_relu.decomposition
def qlinear_leaky_relu_body(op: Op, x: V, x_scale: V, x_zero: V, y_scale: V, y_zero: V, alpha: float) -> V:
    return rounded_body(op, op.LeakyRelu(real_body(op, x, x_scale, x_zero), alpha=alpha), y_scale, y_zero, op.dtype(x))


@microsoft("QLinearWhere", 1)
def qlinear_where(
    xp: Xp,
    condition: Array,
    x: Array,
    x_scale: Array,
    x_zero: Array,
    y: Array,
    y_scale: Array,
    y_zero: Array,
    z_scale: Array,
    z_zero: Array,
) -> Array:
    """Select reals of x or y, which broadcast."""
    return rounded(xp, xp.where(condition, real(x, x_scale, x_zero), real(y, y_scale, y_zero)), z_scale, z_zero, x.dtype)


@qlinear_where.decomposition
def qlinear_where_body(
    op: Op, condition: V, x: V, x_scale: V, x_zero: V, y: V, y_scale: V, y_zero: V, z_scale: V, z_zero: V
) -> V:
    z = op.Where(condition, real_body(op, x, x_scale, x_zero), real_body(op, y, y_scale, y_zero))
    return rounded_body(op, z, z_scale, z_zero, op.dtype(x))


@microsoft("MulInteger", 1)
def mul_integer(xp: Xp, a: Array, a_zero: Array | None, b: Array, b_zero: Array | None = None) -> Array:
    """Compute (a - a's zero point) * (b - b's zero point), which broadcast, in int32."""
    left, right = a.astype(np.int32), b.astype(np.int32)
    left = left if a_zero is None else left - a_zero.astype(np.int32)
    return left * (right if b_zero is None else right - b_zero.astype(np.int32))


@mul_integer.decomposition
def mul_integer_body(op: Op, a: V, a_zero: V, b: V, b_zero: V) -> V:
    def centred(x: V, zero: V) -> V:
        wide = op.Cast(x, to=6)
        return wide if zero is None else op.Sub(wide, op.Cast(zero, to=6))

    return op.Mul(centred(a, a_zero), centred(b, b_zero))


# --- along an axis


@microsoft("QLinearConcat", 1)
def qlinear_concat(xp: Xp, y_scale: Array, y_zero: Array, *inputs: Array, axis: int) -> Array:
    """Join the reals of tensors, each of which is followed by its scale and zero point."""
    if not inputs or len(inputs) % 3:
        raise OperatorError(f"inputs must be tensors, scales and zero points in turn, got {len(inputs)}", code="SX404")
    reals = [real(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return rounded(xp, xp.concatenate(reals, axis=axis_of(axis, reals[0].ndim)), y_scale, y_zero, y_zero.dtype)


@qlinear_concat.decomposition
def qlinear_concat_body(op: Op, y_scale: V, y_zero: V, inputs: list[V], axis: int) -> V:
    reals = [real_body(op, *inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return rounded_body(op, op.Concat(*reals, axis=axis), y_scale, y_zero, op.dtype(y_zero))


@qlinear_concat.shapes
def qlinear_concat_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shapes = [known.shape(x) for x in call.inputs[2::3]]
    first = shapes[0] if shapes else None
    axis = known.attribute(call, "axis")
    if first is None or any(s is None or len(s) != len(first) for s in shapes) or not -len(first) <= axis < len(first):
        return None
    sizes = [s[axis] for s in shapes if s is not None]
    whole = [n for n in sizes if isinstance(n, int)]
    joined = sum(whole) if len(whole) == len(sizes) else known.fresh()
    return tuple(joined if i == axis % len(first) else n for i, n in enumerate(first))


@microsoft("QLinearSoftmax", 1, traits=("shape_of_first",))
def qlinear_softmax(
    xp: Xp, x: Array, x_scale: Array, x_zero: Array | None, y_scale: Array, y_zero: Array, *, opset: int, axis: int = -1
) -> Array:
    """Compute the softmax of reals along an axis; if `opset` is below 13, over `axis` and all later ones.

    onnxruntime multiplies by the integer part of 1 / y_scale: by 254 for the usual scale, which is 1/255 in float32.
    """
    along = axis_of(axis, x.ndim)
    v = real(x, x_scale, x_zero)
    if x.size:
        v = rows(v, along) if opset < 13 else v
        along = 1 if opset < 13 else along
        e = xp.exp(v - v.max(axis=along, keepdims=True))
        v = (e / e.sum(axis=along, keepdims=True)).reshape(x.shape)
    steps = xp.floor(1 / one("the scale", y_scale))
    return rounded(xp, v * steps.astype(np.float64), xp.ones((), np.float32), y_zero, x.dtype)


@qlinear_softmax.decomposition
def qlinear_softmax_body(op: Op, x: V, x_scale: V, x_zero: V, y_scale: V, y_zero: V, opset: int, axis: int) -> V:
    v = real_body(op, x, x_scale, x_zero)
    if opset < 13:
        y = op.Reshape(op.Softmax(op.Flatten(v, axis=axis_of(axis, op.rank(x))), axis=-1), op.Shape(x), allowzero=1)
    else:
        y = op.Softmax(v, axis=axis)
    steps = op.Floor(op.Reciprocal(y_scale))
    return rounded_body(op, op.Mul(y, steps), op.constant(1, np.float32), y_zero, op.dtype(x))


@microsoft("QLinearReduceMean", 1)
def qlinear_reduce_mean(
    xp: Xp,
    data: Array,
    data_scale: Array,
    data_zero: Array | None,
    reduced_scale: Array,
    reduced_zero: Array | None = None,
    *,
    axes: Ints,
    keepdims: int,
) -> Array:
    """Compute the mean of reals over some axes; that of no reals is NaN, which becomes the lowest integer."""
    along = axes_of(axes, data.ndim)
    total = real(data, data_scale, data_zero).sum(axis=along, keepdims=bool(keepdims))
    return rounded(xp, total / np.float64(count(data.shape, along)), reduced_scale, reduced_zero, data.dtype)


@qlinear_reduce_mean.decomposition
def qlinear_reduce_mean_body(
    op: Op, data: V, data_scale: V, data_zero: V, reduced_scale: V, reduced_zero: V, axes: Ints, keepdims: int
) -> V:
    mean = op.ReduceMean(real_body(op, data, data_scale, data_zero), list(axes), keepdims=keepdims)
    return rounded_body(op, mean, reduced_scale, reduced_zero, op.dtype(data))


@microsoft("ReduceSumInteger", 1)
def reduce_sum_integer(xp: Xp, data: Array, *, axes: Ints, keepdims: int) -> Array:
    """Return the sums over some axes, in uint32 or int32 as the data are unsigned or not."""
    wide = np.dtype(np.uint32 if data.dtype == np.uint8 else np.int32)
    return data.sum(axis=axes_of(axes, data.ndim), keepdims=bool(keepdims), dtype=wide)


@reduce_sum_integer.decomposition
def reduce_sum_integer_body(op: Op, data: V, axes: Ints, keepdims: int) -> V:
    """The sums are modulo 2^32 in int32, which engines add; uint32 has the same bits."""
    y = op.ReduceSum(op.Cast(data, to=6), list(axes), keepdims=keepdims)
    return op.Cast(y, to=12) if op.dtype(data) == np.uint8 else y


# --- windows


@microsoft("QLinearGlobalAveragePool", 1)
def qlinear_global_average_pool(
    xp: Xp, x: Array, x_scale: Array, x_zero: Array, y_scale: Array, y_zero: Array, *, channels_last: int = 0
) -> Array:
    """Compute the mean of reals over the spatial axes; that of no reals is NaN, which becomes the lowest integer."""
    axes = tuple(range(1, checked_rank(x.ndim) - 1)) if channels_last else tuple(range(2, checked_rank(x.ndim)))
    total = real(x, x_scale, x_zero).sum(axis=axes, keepdims=True)
    return rounded(xp, total / np.float64(count(x.shape, axes)), y_scale, y_zero, x.dtype)


@qlinear_global_average_pool.decomposition
def qlinear_global_average_pool_body(op: Op, x: V, x_scale: V, x_zero: V, y_scale: V, y_zero: V, channels_last: int) -> V:
    rank = op.rank(x)
    axes = list(range(1, rank - 1) if channels_last else range(2, rank))
    return rounded_body(op, op.ReduceMean(real_body(op, x, x_scale, x_zero), axes, keepdims=1), y_scale, y_zero, op.dtype(x))


@qlinear_global_average_pool.shapes
def global_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = known.shape(call.inputs[0])
    if shape is None or len(shape) < 3:
        return None
    ones = (1,) * (len(shape) - 2)
    return (shape[0], *ones, shape[-1]) if known.attribute(call, "channels_last", 0) else (*shape[:2], *ones)


@microsoft("QLinearAveragePool", 1)
def qlinear_average_pool(
    xp: Xp,
    x: Array,
    x_scale: Array,
    x_zero: Array | None,
    y_scale: Array,
    y_zero: Array | None = None,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Compute the mean of reals in each window, as AveragePool does; with count_include_pad, of all cells of the kernel.

    AveragePool does not count cells beyond the padding, which ceil_mode and large kernels reach.
    """
    rank = checked_rank(x.ndim)
    v = real(x, x_scale, x_zero)
    v = v.transpose(spatial_first(rank)) if channels_last else v
    at = windows(spatial(v), kernel_shape, strides, pads, None, auto_pad, ceil_mode, partial=True)
    cells = math.prod(at.kernel) if count_include_pad else xp.asarray(pools.divisors(at, 0))
    y = pools.pool(xp, v, at, xp.add, 0) / cells
    return rounded(xp, y.transpose(spatial_last(rank)) if channels_last else y, y_scale, y_zero, x.dtype)


@qlinear_average_pool.decomposition
def qlinear_average_pool_body(
    op: Op,
    x: V,
    x_scale: V,
    x_zero: V,
    y_scale: V,
    y_zero: V,
    kernel_shape: Ints,
    auto_pad: str,
    ceil_mode: int,
    channels_last: int,
    count_include_pad: int,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    rank = op.rank(x)
    v = real_body(op, x, x_scale, x_zero)
    v = op.Transpose(v, perm=spatial_first(rank)) if channels_last else v
    window = {"kernel_shape": kernel_shape, "auto_pad": auto_pad, "ceil_mode": ceil_mode, "pads": pads, "strides": strides}
    y = op.call("AveragePool", [v], window, 1)[0]
    if count_include_pad:
        ones = op.Expand(op.constant(1, np.float32), op.Shape(v))
        cells = op.call("LpPool", [ones], {**window, "p": 1}, 1)[0]
        y = op.Where(op.Equal(cells, 0.0), 0.0, y)  # the mean of a window of padding alone is NaN
        y = op.Div(op.Mul(y, cells), float(math.prod(kernel_shape)))
    y = op.Transpose(y, perm=spatial_last(rank)) if channels_last else y
    return rounded_body(op, y, y_scale, y_zero, op.dtype(x))


@microsoft("NhwcMaxPool", 1, traits=("elements_of_first",))
def nhwc_max_pool(
    xp: Xp,
    x: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Return the maximum of each window; the channels are the last axis."""
    rank = checked_rank(x.ndim)
    v = x.transpose(spatial_first(rank))
    at = windows(spatial(v), kernel_shape, strides, pads, dilations, auto_pad, ceil_mode, partial=True)
    return pools.pool(xp, v, at, xp.maximum, pools.lowest(x.dtype)).transpose(spatial_last(rank))


@nhwc_max_pool.decomposition
def nhwc_max_pool_body(
    op: Op,
    x: V,
    kernel_shape: Ints,
    auto_pad: str,
    ceil_mode: int,
    dilations: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    rank = op.rank(x)
    y = op.MaxPool(
        op.Transpose(x, perm=spatial_first(rank)),
        kernel_shape=kernel_shape,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        pads=pads,
        strides=strides,
    )
    return op.Transpose(y, perm=spatial_last(rank))


class _ChannelsLast:
    """What is known of a call whose first input has its channels last, as if it had them first."""

    def __init__(self, known: KnownShapes[Any]) -> None:
        self.known = known

    def shape(self, value: Any) -> Shape | None:
        shape = self.known.shape(value)
        return None if shape is None or len(shape) < 3 else (shape[0], shape[-1], *shape[1:-1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.known, name)


def pooled_last(known: KnownShapes[Any], call: Any) -> Shape | None:
    """Return the shape of a pooling whose channels are the last axis, or by its attribute `channels_last`."""
    shape, kernel = known.shape(call.inputs[0]), known.attribute(call, "kernel_shape")
    if shape is None or len(shape) < 3 or len(kernel) != len(shape) - 2:
        return None
    if not known.attribute(call, "channels_last", 1):
        return windowed(known, call, shape[1], kernel, partial=True)
    first: Any = _ChannelsLast(known)
    n, c, *sizes = windowed(first, call, shape[-1], kernel, partial=True)
    return (n, *sizes, c)


nhwc_max_pool.shapes(pooled_last)
qlinear_average_pool.shapes(pooled_last)
