"""Activation functions of onnxruntime, with a bias added first, and on int8."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from .._common import axis_of, clamped
from .._shapes import multiplied
from ..activation import gelu, sigmoid, softmax
from ..normalization import layer_normalization
from ._api import Array, Op, V, Xp, microsoft


@microsoft("Gelu", 1, traits=("unary", "cannot_fail", "finite"))
def ms_gelu(xp: Xp, x: Array) -> Array:
    """Compute x times the normal distribution function."""
    return gelu(xp, x)


@ms_gelu.decomposition
def ms_gelu_body(op: Op, x: V) -> V:
    return op.Gelu(x)


@microsoft("BiasGelu", 1, traits=("cannot_fail", "finite", "shape_of_first"))
def bias_gelu(xp: Xp, a: Array, b: Array) -> Array:
    """Compute Gelu(a + b); b is a vector of the size of the last axis of a."""
    return gelu(xp, a + b)


@bias_gelu.decomposition
def bias_gelu_body(op: Op, a: V, b: V) -> V:
    return op.Gelu(op.Add(a, b))


@microsoft("FastGelu", 1, traits=("cannot_fail", "finite", "shape_of_first"))
def fast_gelu(xp: Xp, x: Array, bias: Array | None = None) -> Array:
    """Compute Gelu(x + bias) by the approximation with tanh."""
    return gelu(xp, x if bias is None else x + bias, approximate="tanh")


@fast_gelu.decomposition
def fast_gelu_body(op: Op, x: V, bias: V | None) -> V:
    return op.Gelu(x if bias is None else op.Add(x, bias), approximate="tanh")


@microsoft("QuickGelu", 1, traits=("unary", "cannot_fail", "finite"))
def quick_gelu(xp: Xp, x: Array, *, alpha: float = 1.702) -> Array:
    """Compute x * sigmoid(alpha * x)."""
    return x * sigmoid(xp, alpha * x)


@quick_gelu.decomposition
def quick_gelu_body(op: Op, x: V, alpha: float) -> V:
    return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))


@microsoft("GemmFastGelu", 1, traits=("product",), weights={1: "the weight"})
def gemm_fast_gelu(xp: Xp, x: Array, w: Array, bias: Array | None = None) -> Array:
    """Compute FastGelu(X @ W + bias)."""
    return gelu(xp, xp.matmul(x, w) if bias is None else xp.matmul(x, w) + bias, approximate="tanh")


gemm_fast_gelu.shapes(multiplied())


@gemm_fast_gelu.decomposition
def gemm_fast_gelu_body(op: Op, x: V, w: V, bias: V | None) -> V:
    return fast_gelu_body(op, op.MatMul(x, w), bias)


@microsoft("BiasSoftmax", 1, traits=("shape_of_first",))
def bias_softmax(xp: Xp, x: Array, bias: Array, *, axis: int = 1, is_inner_broadcast: int) -> Array:
    """Compute the softmax of x + bias over all axes from `axis` on; `is_inner_broadcast` says which axes of the bias are 1."""
    total = x + bias
    if total.shape != x.shape:
        raise OperatorError(f"bias must broadcast to the shape of data, {x.shape}, got {bias.shape}", code="SX404")
    start = axis_of(axis, x.ndim)
    y: Array = softmax(xp, total.reshape(*x.shape[:start], -1), axis=-1) if x.size else total
    return y.reshape(x.shape)


@bias_softmax.decomposition
def bias_softmax_body(op: Op, x: V, bias: V, axis: int) -> V:
    total, start = op.Add(x, bias), axis % op.rank(x)
    if start == op.rank(x) - 1:
        return op.Softmax(total, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(total, axis=start), axis=-1), op.Shape(x), allowzero=1)


# --- on int8 in the layouts of cublasLt -------------------------------------------------------------------------------

_ROWS = 1


@microsoft("QOrderedGelu", 1, traits=("shape_of_first",))
def q_ordered_gelu(
    xp: Xp, x: Array, scale_x: Array, scale_y: Array, *, order_X: int | None = None, order_Y: int | None = None
) -> Array:
    """Compute Gelu of int8 with scales; the layout does not matter, because each element is one of the result."""
    if None not in (order_X, order_Y) and order_X != order_Y:
        raise OperatorError(f"order_Y must be order_X {order_X}, got {order_Y}", code="SX404")
    return _rounded(xp, gelu(xp, x.astype(np.float32) * _one(scale_x, "scale_X")), _one(scale_y, "scale_Y"))


@q_ordered_gelu.decomposition
def q_ordered_gelu_body(op: Op, x: V, scale_x: V, scale_y: V) -> V:
    return _quantized_in(op, op.Gelu(_real_in(op, x, scale_x)), scale_y)


@microsoft("QOrderedLayerNormalization", 1, traits=("shape_of_first",))
def q_ordered_layer_normalization(
    xp: Xp,
    x: Array,
    scale_x: Array,
    scale: Array,
    b: Array | None,
    scale_y: Array,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    order_X: int = _ROWS,
    order_Y: int = _ROWS,
) -> Array:
    """Compute LayerNormalization of int8 with scales, in rows."""
    if (order_X, order_Y) != (_ROWS, _ROWS):
        raise OperatorError(f"order_X and order_Y must be {_ROWS}, rows, got {order_X} and {order_Y}", code="SX404")
    real = x.astype(np.float32) * _one(scale_x, "scale_X")
    y, *_ = layer_normalization(xp, real, scale, b, axis=axis, epsilon=epsilon)
    return _rounded(xp, y, _one(scale_y, "scale_Y"))


@q_ordered_layer_normalization.decomposition
def q_ordered_layer_normalization_body(
    op: Op, x: V, scale_x: V, scale: V, b: V | None, scale_y: V, axis: int, epsilon: float
) -> V:
    gamma, beta = op.Cast(scale, to=1), None if b is None else op.Cast(b, to=1)
    return _quantized_in(op, op.LayerNormalization(_real_in(op, x, scale_x), gamma, beta, axis=axis, epsilon=epsilon), scale_y)


def _one(scale: Array, name: str) -> Array:
    """Return a scale as a scalar."""
    if scale.size != 1:
        raise OperatorError(f"{name} must hold one value, got shape {scale.shape}", code="SX404")
    return scale.reshape(())


def _rounded(xp: Xp, y: Array, scale: Array) -> Array:
    """Return y / scale as int8, rounded half to even and saturated."""
    quantized: Array = clamped(xp, xp.rint(y / scale), -128, 127).astype(np.int8)
    return quantized


def _real_in(op: Op, x: V, scale: V) -> V:
    return op.DequantizeLinear(x, op.Reshape(scale, op.constant([], np.int64)))


def _quantized_in(op: Op, y: V, scale: V) -> V:
    return op.QuantizeLinear(y, op.Reshape(scale, op.constant([], np.int64)), op.constant(0, np.int8))
