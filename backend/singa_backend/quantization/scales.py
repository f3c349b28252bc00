"""Scales, zero points and integers, computed in the steps and precisions of onnxruntime's tools, so that they are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Scheme:
    """The scale and the zero point of a tensor, or of each of its channels along an axis."""

    scale: np.ndarray
    zero: np.ndarray
    axis: int | None = None

    def along(self, values: np.ndarray, rank: int) -> np.ndarray:
        """The scales or zero points in a shape that broadcasts against a tensor of the rank."""
        return values if self.axis is None else values.reshape([-1 if i == self.axis else 1 for i in range(rank)])

    def integers(self, x: np.ndarray) -> np.ndarray:
        """Quantize values: round half to even in float32, add the zero point, saturate."""
        info = np.iinfo(self.zero.dtype)
        with np.errstate(over="ignore"):
            steps = np.round(x.astype(np.float32) / self.along(self.scale, x.ndim))
        clipped = np.clip(steps + self.along(self.zero, x.ndim).astype(np.float32), info.min, info.max)
        return np.asarray(clipped.astype(self.zero.dtype)).reshape(x.shape)


def of_range(low: Any, high: Any, dtype: np.dtype[Any], symmetric: bool, reduced: bool = False) -> Scheme:
    """The scheme of a range of float32 values; 0 is in every range.  Reduced: half of the integers."""
    low, high = np.float64(min(np.float32(low), np.float32(0))), np.float64(max(np.float32(high), np.float32(0)))
    info = np.iinfo(dtype)
    least, most = int(info.min), int(info.max)
    if symmetric:
        high = max(-low, high)
        low = -high
        least = -most if dtype == np.int8 else least
    if reduced:
        least, most = (-64, 64) if dtype == np.int8 else (0, 127)
    scale = (high - low) / np.float64(most - least)
    if scale < _TINY:
        return Scheme(np.array(1.0, np.float32), np.array(0, dtype))
    zero = np.round((least + most) / 2.0) if symmetric else np.round(least - low / scale)
    return Scheme(np.array(scale, np.float32), np.array(zero, dtype))


def of_weight(w: np.ndarray, dtype: np.dtype[Any], symmetric: bool, axis: int | None, reduced: bool = False) -> Scheme:
    """The scheme of a constant tensor; with an axis, one scale for each channel."""
    if axis is None:
        return of_range(w.min(initial=0), w.max(initial=0), dtype, symmetric, reduced)
    rows = np.moveaxis(w, axis, 0).reshape(w.shape[axis], -1)
    each = [of_range(r.min(initial=0), r.max(initial=0), dtype, symmetric, reduced) for r in rows]
    return Scheme(np.array([s.scale for s in each], np.float32), np.array([s.zero for s in each], dtype), axis)


def bias_fits(w: Scheme, x_scale: np.ndarray, bias: np.ndarray) -> Scheme:
    """The scheme of a symmetric weight with scales so large that the int32 bias does not overflow."""
    if w.zero.any() or w.zero.dtype != np.int8:
        return w
    size = np.abs(bias.astype(np.float64))
    size = size.max(initial=0.0) if w.axis is None else size
    smallest = 1.0001 * (2.0 * size) / float(2 * np.iinfo(np.int32).max)
    now = x_scale.astype(np.float64) * w.scale.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wider = w.scale.astype(np.float64) * (smallest / now)
    small = (now < smallest) & (now > 0)
    return Scheme(np.where(small, wider, w.scale).astype(np.float32), w.zero, w.axis) if np.any(small) else w


def bias_integers(bias: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The bias in steps of the scale, as int32."""
    steps = np.round(bias.astype(np.float64) / scale.astype(np.float64))
    info = np.iinfo(np.int32)
    return np.asarray(np.clip(steps, info.min, info.max).astype(np.int32)).reshape(bias.shape)
