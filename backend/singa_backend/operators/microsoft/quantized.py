"""Operators on quantized tensors: y = saturate(round(f((x - x zero point) * x scale) / y scale) + y zero point).

A definition computes f in float64, and onnxruntime in float32, in integers or by tables: near a tie they differ by one step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape
from .._common import axes_of, axis_of
from .._shapes import windowed
from ._api import Array, Ints, Op, V, microsoft
from ._eight_bits import check_ones, check_rank, real, rounded, spatial_first, spatial_last

# --- QuantizeLinear, DequantizeLinear


@microsoft("QuantizeLinear", 1, widen=False, traits=("shape_of_first",))
def ms_quantize(op: Op, x: V, y_scale: V, y_zero_point: V | None = None, *, axis: int | None = None) -> V:
    """Compute as ONNX's operator does; the axis of several scales is 1 by default."""
    return op.QuantizeLinear(x, y_scale, y_zero_point, axis=1 if axis is None else axis)


@microsoft("DequantizeLinear", 1, widen=False, traits=("shape_of_first", "finite"))
def ms_dequantize(op: Op, x: V, x_scale: V, x_zero_point: V | None = None, *, axis: int | None = None) -> V:
    """Compute as ONNX's operator does; the axis of several scales is 1 by default."""
    return op.DequantizeLinear(x, x_scale, x_zero_point, axis=1 if axis is None else axis)


# --- of elements


@microsoft("QLinearAdd", 1)
def qlinear_add(
    op: Op,
    a: V,
    a_scale: V,
    a_zero: V | None,
    b: V,
    b_scale: V,
    b_zero: V | None,
    c_scale: V,
    c_zero: V | None = None,
) -> V:
    """Add the reals, which broadcast."""
    y = op.Add(real(op, a, a_scale, a_zero), real(op, b, b_scale, b_zero))
    return rounded(op, y, c_scale, c_zero, op.dtype(a))


@qlinear_add.accepts
def two_quantized(a_scale: Array, a_zero: Array, b_scale: Array, b_zero: Array, c_scale: Array, c_zero: Array) -> None:
    check_ones(a_scale, a_zero, b_scale, b_zero, c_scale, c_zero)


@microsoft("QLinearMul", 1)
def qlinear_mul(
    op: Op,
    a: V,
    a_scale: V,
    a_zero: V | None,
    b: V,
    b_scale: V,
    b_zero: V | None,
    c_scale: V,
    c_zero: V | None = None,
) -> V:
    """Multiply the reals, which broadcast."""
    y = op.Mul(real(op, a, a_scale, a_zero), real(op, b, b_scale, b_zero))
    return rounded(op, y, c_scale, c_zero, op.dtype(a))


qlinear_mul.accepts(two_quantized)


@microsoft("QLinearSigmoid", 1, traits=("shape_of_first",))
def qlinear_sigmoid(op: Op, x: V, x_scale: V, x_zero: V | None, y_scale: V, y_zero: V | None = None) -> V:
    """Compute 1 / (1 + exp(-x)) of the reals."""
    return rounded(op, op.Sigmoid(real(op, x, x_scale, x_zero)), y_scale, y_zero, op.dtype(x))


@qlinear_sigmoid.accepts
def one_quantized(x_scale: Array, x_zero: Array, y_scale: Array, y_zero: Array) -> None:
    check_ones(x_scale, x_zero, y_scale, y_zero)


@microsoft("QLinearLeakyRelu", 1, traits=("shape_of_first",))
def qlinear_leaky_relu(
    op: Op,
    x: V,
    x_scale: V,
    x_zero: V | None,
    y_scale: V,
    y_zero: V | None = None,
    *,
    alpha: float = 0.01,
) -> V:
    """Multiply negative reals by alpha."""
    return rounded(op, op.LeakyRelu(real(op, x, x_scale, x_zero), alpha=alpha), y_scale, y_zero, op.dtype(x))


qlinear_leaky_relu.accepts(one_quantized)


@microsoft("QLinearWhere", 1)
def qlinear_where(
    op: Op,
    condition: V,
    x: V,
    x_scale: V,
    x_zero: V,
    y: V,
    y_scale: V,
    y_zero: V,
    z_scale: V,
    z_zero: V,
) -> V:
    """Select reals of x or y, which broadcast."""
    z = op.Where(condition, real(op, x, x_scale, x_zero), real(op, y, y_scale, y_zero))
    return rounded(op, z, z_scale, z_zero, op.dtype(x))


@qlinear_where.accepts
def qlinear_where_accepts(x_scale: Array, x_zero: Array, y_scale: Array, y_zero: Array, z_scale: Array, z_zero: Array) -> None:
    check_ones(x_scale, x_zero, y_scale, y_zero, z_scale, z_zero)


@microsoft("MulInteger", 1)
def mul_integer(op: Op, a: V, a_zero: V | None, b: V, b_zero: V | None = None) -> V:
    """Compute (a - a's zero point) * (b - b's zero point), which broadcast, in int32."""

    def centred(x: V, zero: V) -> V:
        wide = op.Cast(x, to=6)
        return wide if zero is None else op.Sub(wide, op.Cast(zero, to=6))

    return op.Mul(centred(a, a_zero), centred(b, b_zero))


# --- along an axis


@microsoft("QLinearConcat", 1)
def qlinear_concat(op: Op, y_scale: V, y_zero: V, *inputs: V, axis: int) -> V:
    """Join the reals of tensors, each of which is followed by its scale and zero point."""
    reals = [real(op, *inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return rounded(op, op.Concat(*reals, axis=axis), y_scale, y_zero, op.dtype(y_zero))


@qlinear_concat.accepts
def qlinear_concat_accepts(y_scale: Array, y_zero: Array, inputs: list[Array]) -> None:
    if not inputs or len(inputs) % 3:
        raise OperatorError(f"inputs must be tensors, scales and zero points in turn, got {len(inputs)}", code="SX404")
    scales_and_zeros = [v for i in range(0, len(inputs), 3) for v in inputs[i + 1 : i + 3]]
    check_ones(*scales_and_zeros, y_scale, y_zero)


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
def qlinear_softmax(op: Op, x: V, x_scale: V, x_zero: V | None, y_scale: V, y_zero: V, *, opset: int, axis: int = -1) -> V:
    """Compute the softmax of reals along an axis; if `opset` is below 13, over `axis` and all later ones.

    onnxruntime multiplies by the integer part of 1 / y_scale: by 254 for the usual scale, which is 1/255 in float32.
    """
    v = real(op, x, x_scale, x_zero)
    if opset < 13:
        y = op.Reshape(op.Softmax(op.Flatten(v, axis=axis_of(axis, op.rank(x))), axis=-1), op.Shape(x), allowzero=1)
    else:
        y = op.Softmax(v, axis=axis)
    steps = op.Floor(op.Reciprocal(y_scale))
    return rounded(op, op.Mul(y, steps), op.constant(1, np.float32), y_zero, op.dtype(x))


@qlinear_softmax.accepts
def qlinear_softmax_accepts(x: Array, x_scale: Array, x_zero: Array, y_scale: Array, y_zero: Array, axis: int) -> None:
    axis_of(axis, x.ndim)
    check_ones(x_scale, x_zero, y_scale, y_zero)


@microsoft("QLinearReduceMean", 1)
def qlinear_reduce_mean(
    op: Op,
    data: V,
    data_scale: V,
    data_zero: V | None,
    reduced_scale: V,
    reduced_zero: V | None = None,
    *,
    axes: Ints,
    keepdims: int,
) -> V:
    """Compute the mean of reals over some axes; that of no reals is NaN, which becomes the lowest integer."""
    mean = op.ReduceMean(real(op, data, data_scale, data_zero), list(axes), keepdims=keepdims)
    return rounded(op, mean, reduced_scale, reduced_zero, op.dtype(data))


@qlinear_reduce_mean.accepts
def qlinear_reduce_mean_accepts(
    data: Array, data_scale: Array, data_zero: Array, reduced_scale: Array, reduced_zero: Array, axes: Ints
) -> None:
    axes_of(axes, data.ndim)
    check_ones(data_scale, data_zero, reduced_scale, reduced_zero)


@microsoft("ReduceSumInteger", 1)
def reduce_sum_integer(op: Op, data: V, *, axes: Ints, keepdims: int) -> V:
    """Return the sums over some axes, in uint32 or int32 as the data are unsigned or not."""
    y = op.ReduceSum(op.Cast(data, to=6), list(axes), keepdims=keepdims)
    return op.Cast(y, to=12) if op.dtype(data) == np.uint8 else y


@reduce_sum_integer.accepts
def reduce_sum_integer_accepts(data: Array, axes: Ints) -> None:
    axes_of(axes, data.ndim)


# --- windows


@microsoft("QLinearGlobalAveragePool", 1)
def qlinear_global_average_pool(op: Op, x: V, x_scale: V, x_zero: V, y_scale: V, y_zero: V, *, channels_last: int = 0) -> V:
    """Compute the mean of reals over the spatial axes; that of no reals is NaN, which becomes the lowest integer."""
    rank = op.rank(x)
    axes = list(range(1, rank - 1) if channels_last else range(2, rank))
    return rounded(op, op.ReduceMean(real(op, x, x_scale, x_zero), axes, keepdims=1), y_scale, y_zero, op.dtype(x))


@qlinear_global_average_pool.accepts
def pooled_quantized(x: Array, x_scale: Array, x_zero: Array, y_scale: Array, y_zero: Array) -> None:
    check_rank(x.ndim)
    check_ones(x_scale, x_zero, y_scale, y_zero)


@qlinear_global_average_pool.shapes
def global_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = known.shape(call.inputs[0])
    if shape is None or len(shape) < 3:
        return None
    ones = (1,) * (len(shape) - 2)
    return (shape[0], *ones, shape[-1]) if known.attribute(call, "channels_last", 0) else (*shape[:2], *ones)


@microsoft("QLinearAveragePool", 1)
def qlinear_average_pool(
    op: Op,
    x: V,
    x_scale: V,
    x_zero: V | None,
    y_scale: V,
    y_zero: V | None = None,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> V:
    """Compute the mean of reals in each window, as AveragePool does; with count_include_pad, of all cells of the kernel.

    AveragePool does not count cells beyond the padding, which ceil_mode and large kernels reach.
    """
    rank = op.rank(x)
    v = real(op, x, x_scale, x_zero)
    v = op.Transpose(v, perm=spatial_first(rank)) if channels_last else v
    window = {"kernel_shape": kernel_shape, "auto_pad": auto_pad, "ceil_mode": ceil_mode, "pads": pads, "strides": strides}
    y = op.call("AveragePool", [v], window, 1)[0]
    if count_include_pad:
        ones = op.Expand(op.constant(1, np.float32), op.Shape(v))
        cells = op.call("LpPool", [ones], {**window, "p": 1}, 1)[0]
        y = op.Where(op.Equal(cells, 0.0), 0.0, y)  # the mean of a window of padding alone is NaN
        y = op.Div(op.Mul(y, cells), float(math.prod(kernel_shape)))
    y = op.Transpose(y, perm=spatial_last(rank)) if channels_last else y
    return rounded(op, y, y_scale, y_zero, op.dtype(x))


qlinear_average_pool.accepts(pooled_quantized)


@microsoft("NhwcMaxPool", 1, traits=("elements_of_first",))
def nhwc_max_pool(
    op: Op,
    x: V,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> V:
    """Return the maximum of each window; the channels are the last axis."""
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


@nhwc_max_pool.accepts
def nhwc_max_pool_accepts(x: Array) -> None:
    check_rank(x.ndim)


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
