"""Activation functions of onnxruntime, with a bias added first, and on int8."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from .._common import axis_of, broadcast
from .._shapes import multiplied
from ._api import Array, Op, V, microsoft


@microsoft("Gelu", 1, traits=("unary", "cannot_fail", "finite"))
def ms_gelu(op: Op, x: V) -> V:
    """Compute x times the normal distribution function."""
    return op.Gelu(x)


@microsoft("BiasGelu", 1, traits=("cannot_fail", "finite", "shape_of_first"))
def bias_gelu(op: Op, a: V, b: V) -> V:
    """Compute Gelu(a + b); b is a vector of the size of the last axis of a."""
    return op.Gelu(op.Add(a, b))


@microsoft("FastGelu", 1, traits=("cannot_fail", "finite", "shape_of_first"))
def fast_gelu(op: Op, x: V, bias: V | None = None) -> V:
    """Compute Gelu(x + bias) by the approximation with tanh."""
    return op.Gelu(x if bias is None else op.Add(x, bias), approximate="tanh")


@microsoft("QuickGelu", 1, traits=("unary", "cannot_fail", "finite"))
def quick_gelu(op: Op, x: V, *, alpha: float = 1.702) -> V:
    """Compute x * sigmoid(alpha * x)."""
    return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))


@microsoft("GemmFastGelu", 1, traits=("product",), weights={1: "the weight"})
def gemm_fast_gelu(op: Op, x: V, w: V, bias: V | None = None) -> V:
    """Compute FastGelu(X @ W + bias)."""
    return fast_gelu(op, op.MatMul(x, w), bias)


gemm_fast_gelu.shapes(multiplied())


@microsoft("BiasSoftmax", 1, traits=("shape_of_first",))
def bias_softmax(op: Op, x: V, bias: V, *, axis: int = 1, is_inner_broadcast: int) -> V:
    """Compute the softmax of x + bias over all axes from `axis` on; `is_inner_broadcast` says which axes of the bias are 1."""
    total, start = op.Add(x, bias), axis % op.rank(x)
    if start == op.rank(x) - 1:
        return op.Softmax(total, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(total, axis=start), axis=-1), op.Shape(x), allowzero=1)


@bias_softmax.accepts
def bias_softmax_accepts(x: Array, bias: Array, axis: int) -> None:
    axis_of(axis, x.ndim)
    if broadcast(x, bias) != x.shape:
        raise OperatorError(f"bias must broadcast to the shape of data, {x.shape}, got {bias.shape}", code="SX404")


# --- on int8 in the layouts of cublasLt -------------------------------------------------------------------------------

_ROWS = 1


@microsoft("QOrderedGelu", 1, traits=("shape_of_first",))
def q_ordered_gelu(op: Op, x: V, scale_x: V, scale_y: V, *, order_X: int | None = None, order_Y: int | None = None) -> V:
    """Compute Gelu of int8 with scales; the layout does not matter, because each element is one of the result."""
    return _quantized_in(op, op.Gelu(_real_in(op, x, scale_x)), scale_y)


@q_ordered_gelu.accepts
def q_ordered_gelu_accepts(scale_x: Array, scale_y: Array, order_X: int | None, order_Y: int | None) -> None:
    if None not in (order_X, order_Y) and order_X != order_Y:
        raise OperatorError(f"order_Y must be order_X {order_X}, got {order_Y}", code="SX404")
    _check_scales(scale_x, scale_y)


@microsoft("QOrderedLayerNormalization", 1, traits=("shape_of_first",))
def q_ordered_layer_normalization(
    op: Op,
    x: V,
    scale_x: V,
    scale: V,
    b: V | None,
    scale_y: V,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    order_X: int = _ROWS,
    order_Y: int = _ROWS,
) -> V:
    """Compute LayerNormalization of int8 with scales, in rows."""
    gamma, beta = op.Cast(scale, to=1), None if b is None else op.Cast(b, to=1)
    return _quantized_in(op, op.LayerNormalization(_real_in(op, x, scale_x), gamma, beta, axis=axis, epsilon=epsilon), scale_y)


@q_ordered_layer_normalization.accepts
def q_ordered_layer_normalization_accepts(scale_x: Array, scale_y: Array, order_X: int, order_Y: int) -> None:
    if (order_X, order_Y) != (_ROWS, _ROWS):
        raise OperatorError(f"order_X and order_Y must be {_ROWS}, rows, got {order_X} and {order_Y}", code="SX404")
    _check_scales(scale_x, scale_y)


def _check_scales(scale_x: Array, scale_y: Array) -> None:
    """Raise OperatorError unless each scale holds one value."""
    for name, scale in (("scale_X", scale_x), ("scale_Y", scale_y)):
        if scale.size != 1:
            raise OperatorError(f"{name} must hold one value, got shape {scale.shape}", code="SX404")


def _real_in(op: Op, x: V, scale: V) -> V:
    return op.DequantizeLinear(x, op.Reshape(scale, op.constant([], np.int64)))


def _quantized_in(op: Op, y: V, scale: V) -> V:
    return op.QuantizeLinear(y, op.Reshape(scale, op.constant([], np.int64)), op.constant(0, np.int8))
