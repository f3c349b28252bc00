"""Activation functions of onnxruntime, with a bias added first."""

from __future__ import annotations

from ..activation import gelu, sigmoid
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
