"""Quantized tensors of 8 bits: reals and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from ._api import Array, Op, V


def check_ones(*values: Array | None) -> None:
    """Raise OperatorError unless scales and zero points, in turn, hold one value each; None for an absent one."""
    for i, value in enumerate(values):
        if value is not None and value.size != 1:
            name = "the zero point" if i % 2 else "the scale"
            raise OperatorError(f"{name} must hold one value, got shape {tuple(value.shape)}", code="SX402")


def real(op: Op, x: V, scale: V, zero: V) -> V:
    """Return (x - zero) * scale in float32."""
    return op.DequantizeLinear(x, scale, zero)


def rounded(op: Op, y: V, scale: V, zero: V, dtype: np.dtype[Any]) -> V:
    """Return y / scale rounded to the nearest integer, to the even one of two, plus the zero point, saturated."""
    return op.QuantizeLinear(y, scale, op.constant(0, dtype) if zero is None else zero)


def spatial_last(rank: int) -> list[int]:
    """Return the permutation of N x C x D1 x ... to N x D1 x ... x C."""
    return [0, *range(2, rank), 1]


def spatial_first(rank: int) -> list[int]:
    """Return the permutation of N x D1 x ... x C to N x C x D1 x ...."""
    return [0, rank - 1, *range(1, rank - 1)]


def check_rank(rank: int, name: str = "X") -> None:
    """Raise OperatorError if there is no spatial axis."""
    if rank < 3:
        raise OperatorError(f"{name} must have a batch axis, a channel axis and spatial axes, got {rank} axes", code="SX404")
