"""Products of quantized tensors: exact integer sums, multiplied by the scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from ...ir.shapes import Dim, KnownShapes, Shape
from .._shapes import convolved, multiplied
from ..conv import qlinear_conv
from ..linalg import matmul, matmul_integer
from ..quantize import dynamic_quantize_linear
from ._api import Array, Ints, Op, V, Xp, microsoft
from ._eight_bits import checked_rank, one, rounded, rounded_body, spatial_first, spatial_last

# --- QGemm


@microsoft("QGemm", 1, traits=("product",), weights={1: "the scale of a factor", 4: "the scale of the weight"})
def qgemm(
    xp: Xp,
    a: Array,
    a_scale: Array,
    a_zero: Array,
    b: Array,
    b_scale: Array,
    b_zero: Array,
    c: Array | None = None,
    y_scale: Array | None = None,
    y_zero: Array | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """Compute alpha * ((A' - a's zero point) * (B' - b's zero point) + C) * a's scale * b's scale, a float without y_scale.

    C is an integer in units of the product.
    """
    if a.ndim != 2 or b.ndim != 2:
        raise OperatorError(f"A and B must be matrices, got shapes {a.shape} and {b.shape}", code="SX404")
    if y_scale is None and y_zero is not None:
        raise OperatorError("y_zero_point must be absent without y_scale", code="SX404")
    y = matmul_integer(xp, a.T if transA else a, b.T if transB else b, one("a_zero_point", a_zero), b_zero)
    if c is not None:
        y = y + c
    factor = np.float64(alpha) * one("a_scale", a_scale).astype(np.float64) * b_scale.astype(np.float64).reshape(-1)
    v = y.astype(np.float64) * factor
    if y_scale is None:
        return v.astype(np.float32)
    return rounded(xp, v, y_scale, y_zero, np.dtype(np.uint8) if y_zero is None else y_zero.dtype)


@qgemm.decomposition
def qgemm_body(
    op: Op,
    a: V,
    a_scale: V,
    a_zero: V,
    b: V,
    b_scale: V,
    b_zero: V,
    c: V,
    y_scale: V,
    y_zero: V,
    alpha: float,
    transA: int,
    transB: int,
) -> V:
    a, b = (op.Transpose(x, perm=[1, 0]) if turned else x for x, turned in ((a, transA), (b, transB)))
    y = op.MatMulInteger(a, b, a_zero, b_zero)
    y = op.Cast(y if c is None else op.Add(y, c), to=1)
    y = op.Mul(y, op.Mul(op.Mul(op.Reshape(a_scale, [-1]), alpha), op.Reshape(b_scale, [-1])))
    return y if y_scale is None else rounded_body(op, y, y_scale, y_zero, np.dtype(np.uint8))


@qgemm.shapes
def qgemm_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    def size(index: int, axis: int, turned: str) -> Dim:
        shape = known.shape(call.inputs[index])
        return shape[1 - axis if known.attribute(call, turned) else axis] if shape and len(shape) == 2 else known.fresh()

    return size(0, 0, "transA"), size(3, 1, "transB")


# --- integers times floats


@microsoft("MatMulIntegerToFloat", 1, traits=("product",), weights={2: "the scale of a factor", 3: "the scale of the weight"})
def matmul_integer_to_float(
    xp: Xp,
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    a_zero: Array | None = None,
    b_zero: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """Compute (A - a's zero point) * (B - b's zero point) * a's scale * b's scale + bias."""
    y = matmul_integer(xp, a, b, a_zero, b_zero).astype(np.float32) * (_flat(a_scale) * _flat(b_scale))
    return y if bias is None else y + bias


def _flat(scale: Array) -> Array:
    """Return one scale as a scalar."""
    return scale.reshape(()) if scale.size == 1 else scale


@matmul_integer_to_float.decomposition
def matmul_integer_to_float_body(op: Op, a: V, b: V, a_scale: V, b_scale: V, a_zero: V, b_zero: V, bias: V) -> V:
    y = op.Cast(op.MatMulInteger(a, b, a_zero, b_zero), to=1)
    y = op.Mul(y, op.Mul(*(op.Cast(s, to=1) if op.dtype(s) != np.float32 else s for s in (a_scale, b_scale))))
    return op.cast(y if bias is None else op.Add(y, op.Cast(bias, to=1) if op.dtype(bias) != np.float32 else bias), a_scale)


matmul_integer_to_float.shapes(multiplied())


@microsoft("DynamicQuantizeMatMul", 1, traits=("product",), weights={2: "the scale of the weight"})
def dynamic_quantize_matmul(
    xp: Xp, a: Array, b: Array, b_scale: Array, b_zero: Array | None = None, bias: Array | None = None
) -> Array:
    """Quantize A to uint8 by its range, as DynamicQuantizeLinear does, and compute MatMulIntegerToFloat."""
    q, scale, zero = dynamic_quantize_linear(xp, a)
    return matmul_integer_to_float(xp, q, b, scale, b_scale, zero, b_zero, bias)


@dynamic_quantize_matmul.decomposition
def dynamic_quantize_matmul_body(op: Op, a: V, b: V, b_scale: V, b_zero: V, bias: V) -> V:
    q, scale, zero = op.DynamicQuantizeLinear(a, outputs=3)
    return matmul_integer_to_float_body(op, q, b, scale, b_scale, zero, b_zero, bias)


dynamic_quantize_matmul.shapes(multiplied())


@microsoft("MatMulInteger16", 1, traits=("product",))
def matmul_integer16(xp: Xp, a: Array, b: Array) -> Array:
    """Return the products of 16-bit integers modulo 2^32, in uint32 if both are unsigned and in int32 if not."""
    wide = np.dtype(np.uint32 if a.dtype == b.dtype == np.uint16 else np.int32)
    return matmul(xp, a.astype(wide), b.astype(wide))


@matmul_integer16.decomposition
def matmul_integer16_body(op: Op, a: V, b: V) -> V:
    unsigned = op.dtype(a) == np.uint16 and op.dtype(b) == np.uint16
    return op.MatMul(*(op.Cast(x, to=12 if unsigned else 6) for x in (a, b)))


matmul_integer16.shapes(multiplied())

# --- QLinearConv


@microsoft("QLinearConv", 1, traits=("product",))
def ms_qlinear_conv(
    xp: Xp,
    x: Array,
    x_scale: Array,
    x_zero: Array,
    w: Array,
    w_scale: Array,
    w_zero: Array,
    y_scale: Array,
    y_zero: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    channels_last: int = 0,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Compute as ONNX's operator does; x and y may have their channels last."""
    rank = checked_rank(x.ndim)
    seen = x.transpose(spatial_first(rank)) if channels_last else x
    y = qlinear_conv(
        xp, seen, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b,
        auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return y.transpose(spatial_last(rank)) if channels_last else y


@ms_qlinear_conv.decomposition
def ms_qlinear_conv_body(
    op: Op,
    x: V,
    x_scale: V,
    x_zero: V,
    w: V,
    w_scale: V,
    w_zero: V,
    y_scale: V,
    y_zero: V,
    b: V,
    auto_pad: str,
    channels_last: int,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    rank = op.rank(w)
    seen = op.Transpose(x, perm=spatial_first(rank)) if channels_last else x
    y = op.QLinearConv(
        seen, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b,
        auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return op.Transpose(y, perm=spatial_last(rank)) if channels_last else y


@ms_qlinear_conv.shapes
def ms_qlinear_conv_shapes(known: KnownShapes[Any], call: Any) -> Shape | list[Shape | None] | None:
    return None if known.attribute(call, "channels_last", 0) else convolved(3)(known, call)
