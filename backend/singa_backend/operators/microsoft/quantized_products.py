"""Products of quantized tensors: exact integer sums, multiplied by the scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes
from ...errors import OperatorError
from ...ir.shapes import Dim, KnownShapes, Shape
from .._shapes import convolved, multiplied
from ..linalg import matmul_integer
from ..quantize import dynamic_quantize_linear
from ._api import Array, Ints, Op, V, Xp, microsoft
from ._eight_bits import check_ones, check_rank, rounded, spatial_first, spatial_last
from .gates import single

# --- QGemm


@microsoft("QGemm", 1, traits=("product",), weights={1: "the scale of a factor", 4: "the scale of the weight"})
def qgemm(
    op: Op,
    a: V,
    a_scale: V,
    a_zero: V,
    b: V,
    b_scale: V,
    b_zero: V,
    c: V | None = None,
    y_scale: V | None = None,
    y_zero: V | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> V:
    """Compute alpha * ((A' - a's zero point) * (B' - b's zero point) + C) * a's scale * b's scale, a float without y_scale.

    C is an integer in units of the product.
    """
    a, b = (op.Transpose(x, perm=[1, 0]) if turned else x for x, turned in ((a, transA), (b, transB)))
    y = op.MatMulInteger(a, b, a_zero, b_zero)
    y = op.Cast(y if c is None else op.Add(y, c), to=dtypes.onnx_code(op.dtype(a_scale)))
    y = op.Mul(y, op.Mul(op.Mul(op.Reshape(a_scale, [-1]), alpha), op.Reshape(b_scale, [-1])))
    return y if y_scale is None else rounded(op, y, y_scale, y_zero, np.dtype(np.uint8))


@qgemm.accepts
def qgemm_accepts(a: Array, a_scale: Array, a_zero: Array, b: Array, y_scale: Array | None, y_zero: Array | None) -> None:
    if a.ndim != 2 or b.ndim != 2:
        raise OperatorError(f"A and B must be matrices, got shapes {a.shape} and {b.shape}", code="SX404")
    if y_scale is None and y_zero is not None:
        raise OperatorError("y_zero_point must be absent without y_scale", code="SX404")
    for name, value in (("a_zero_point", a_zero), ("a_scale", a_scale)):
        if value.size != 1:
            raise OperatorError(f"{name} must hold one value, got shape {tuple(value.shape)}", code="SX402")
    check_ones(y_scale, y_zero)


@qgemm.shapes
def qgemm_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    def size(index: int, axis: int, turned: str) -> Dim:
        shape = known.shape(call.inputs[index])
        return shape[1 - axis if known.attribute(call, turned) else axis] if shape and len(shape) == 2 else known.fresh()

    return size(0, 0, "transA"), size(3, 1, "transB")


# --- integers times floats


@microsoft("MatMulIntegerToFloat", 1, traits=("product",), weights={2: "the scale of a factor", 3: "the scale of the weight"})
def matmul_integer_to_float(
    op: Op,
    a: V,
    b: V,
    a_scale: V,
    b_scale: V,
    a_zero: V | None = None,
    b_zero: V | None = None,
    bias: V | None = None,
) -> V:
    """Compute (A - a's zero point) * (B - b's zero point) * a's scale * b's scale + bias."""
    factor = op.Mul(single(op, a_scale), single(op, b_scale))
    y = op.Mul(op.Cast(op.MatMulInteger(a, b, a_zero, b_zero), to=dtypes.onnx_code(op.dtype(factor))), factor)
    return op.cast(y if bias is None else op.Add(y, single(op, bias)), a_scale)


matmul_integer_to_float.shapes(multiplied())


@microsoft("DynamicQuantizeMatMul", 1, traits=("product",), weights={2: "the scale of the weight"})
def dynamic_quantize_matmul(
    xp: Xp, a: Array, b: Array, b_scale: Array, b_zero: Array | None = None, bias: Array | None = None
) -> Array:
    """Quantize A to uint8 by its range, as DynamicQuantizeLinear does, and compute MatMulIntegerToFloat.

    The scale is not rounded to float32, as the output of DynamicQuantizeLinear is: its gradient is judged in float64.
    """
    q, scale, zero = dynamic_quantize_linear(xp, a)
    factor = scale * (b_scale.reshape(()) if b_scale.size == 1 else b_scale)
    y = matmul_integer(xp, q, b, zero, b_zero).astype(np.float32) * factor
    return y if bias is None else y + bias


@dynamic_quantize_matmul.decomposition
def dynamic_quantize_matmul_body(op: Op, a: V, b: V, b_scale: V, b_zero: V, bias: V) -> V:
    q, scale, zero = op.DynamicQuantizeLinear(a, outputs=3)
    return matmul_integer_to_float(op, q, b, scale, b_scale, zero, b_zero, bias)


dynamic_quantize_matmul.shapes(multiplied())


@microsoft("MatMulInteger16", 1, traits=("product",))
def matmul_integer16(op: Op, a: V, b: V) -> V:
    """Return the products of 16-bit integers modulo 2^32, in uint32 if both are unsigned and in int32 if not."""
    unsigned = op.dtype(a) == np.uint16 and op.dtype(b) == np.uint16
    return op.MatMul(*(op.Cast(x, to=12 if unsigned else 6) for x in (a, b)))


matmul_integer16.shapes(multiplied())

# --- QLinearConv


@microsoft("QLinearConv", 1, traits=("product",))
def ms_qlinear_conv(
    op: Op,
    x: V,
    x_scale: V,
    x_zero: V,
    w: V,
    w_scale: V,
    w_zero: V,
    y_scale: V,
    y_zero: V,
    b: V | None = None,
    *,
    auto_pad: str = "NOTSET",
    channels_last: int = 0,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> V:
    """Compute as ONNX's operator does; x and y may have their channels last."""
    rank = op.rank(w)
    seen = op.Transpose(x, perm=spatial_first(rank)) if channels_last else x
    y = op.QLinearConv(
        seen, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b,
        auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return op.Transpose(y, perm=spatial_last(rank)) if channels_last else y


@ms_qlinear_conv.accepts
def ms_qlinear_conv_accepts(x: Array) -> None:
    check_rank(x.ndim)


@ms_qlinear_conv.shapes
def ms_qlinear_conv_shapes(known: KnownShapes[Any], call: Any) -> Shape | list[Shape | None] | None:
    return None if known.attribute(call, "channels_last", 0) else convolved(3)(known, call)
