"""Activations."""

from __future__ import annotations

from ..operator import Array, Xp, operator
from ._common import axis_of, rows


@operator("Softmax", 13)
def softmax(xp: Xp, x: Array, *, axis: int = -1) -> Array:
    if x.size == 0:
        return x
    axis = axis_of(axis, x.ndim)
    e = xp.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@operator("Softmax", 1, 11)
def softmax_1(xp: Xp, x: Array, *, axis: int = 1) -> Array:
    """Before opset 13 the axes from `axis` on were one: rows of a matrix."""
    return softmax(xp, rows(x, axis), axis=-1).reshape(x.shape)


@operator("Relu", 1, 6, 13, 14)
def relu(xp: Xp, x: Array) -> Array:
    return xp.maximum(x, 0)
