"""Operators that onnxruntime reads in ONNX's main domain although ONNX does not define them there.

Most are experiments of the first releases, which onnxruntime drops at opset 10.
"""

from __future__ import annotations

from ._api import Array, Op, V, Xp, lax


@lax("Affine", 1, traits=("unary", "cannot_fail", "finite"))
def affine(xp: Xp, x: Array, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """Compute alpha * x + beta."""
    return alpha * x + beta


@affine.decomposition
def affine_body(op: Op, x: V, alpha: float, beta: float) -> V:
    return op.Add(op.Mul(x, alpha), beta)


@lax("Scale", 1, traits=("unary", "cannot_fail", "finite"))
def scale(xp: Xp, x: Array, *, scale: float = 1.0) -> Array:
    """Compute scale * x."""
    return scale * x


@scale.decomposition
def scale_body(op: Op, x: V, scale: float) -> V:
    return op.Mul(x, scale)
