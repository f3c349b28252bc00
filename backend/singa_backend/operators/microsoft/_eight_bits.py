"""Quantized tensors of 8 bits: reals and back, on arrays and in ONNX's operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import OperatorError
from .._common import clamped
from ._api import Array, Op, V, Xp


def one(name: str, value: Array) -> Array:
    """Return the one value of a scale or zero point as a scalar; raise OperatorError if it holds several."""
    if value.size != 1:
        raise OperatorError(f"{name} must hold one value, got shape {tuple(value.shape)}", code="SX402")
    return value.reshape(())


def real(x: Array, scale: Array, zero: Array | None) -> Array:
    """Return (x - zero) * scale in float64."""
    wide = x.astype(np.float64)
    if zero is not None:
        wide = wide - one("the zero point", zero).astype(np.float64)
    return wide * one("the scale", scale).astype(np.float64)


def rounded(xp: Xp, y: Array, scale: Array, zero: Array | None, dtype: np.dtype[Any]) -> Array:
    """Return y / scale rounded to the nearest integer, to the even one of two, plus the zero point, saturated."""
    q = xp.rint(y / one("the scale", scale).astype(np.float64))
    if zero is not None:
        q = q + one("the zero point", zero).astype(np.float64)
    bounds = np.iinfo(dtype)
    return clamped(xp, q, bounds.min, bounds.max).astype(dtype)


def real_body(op: Op, x: V, scale: V, zero: V) -> V:
    """Write `real`, in float32."""
    return op.DequantizeLinear(x, scale, zero)


def rounded_body(op: Op, y: V, scale: V, zero: V, dtype: np.dtype[Any]) -> V:
    """Write `rounded`."""
    return op.QuantizeLinear(y, scale, op.constant(0, dtype) if zero is None else zero)


def spatial_last(rank: int) -> list[int]:
    """Return the permutation of N x C x D1 x ... to N x D1 x ... x C."""
    return [0, *range(2, rank), 1]


def spatial_first(rank: int) -> list[int]:
    """Return the permutation of N x D1 x ... x C to N x C x D1 x ...."""
    return [0, rank - 1, *range(1, rank - 1)]


def checked_rank(rank: int, name: str = "X") -> int:
    """Return a rank; raise OperatorError if there is no spatial axis."""
    if rank < 3:
        raise OperatorError(f"{name} must have a batch axis, a channel axis and spatial axes, got {rank} axes", code="SX404")
    return rank


def count(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """Return the number of elements along some axes."""
    return math.prod(shape[a] for a in axes)
