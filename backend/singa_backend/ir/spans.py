"""The axes of Resize and Upsample: their sizes, coordinates of output elements in the input, and interpolation weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .. import limits
from ..errors import OperatorError
from .declaration import Ints

Kernel = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Span:
    """One axis to resize; the scale is up / down, so that sizes are not rounded by a division.

    Attributes:
        axis: The axis.
        old: Size in the input.
        new: Size in the output.
        up: Numerator of the scale.
        down: Denominator of the scale.
        start: Start of the region of interest, relative to the axis.
        end: End of the region of interest, relative to the axis.
    """

    axis: int
    old: int
    new: int
    up: float
    down: float
    start: float = 0.0
    end: float = 1.0

    @property
    def scale(self) -> float:
        return self.up / self.down

    @property
    def width(self) -> float:
        """Size before rounding: 4 places at scale 0.6 have width 2.4 and size 2."""
        return self.old * self.up / self.down

    def coordinates(self, mode: str) -> np.ndarray:
        """Return the coordinates of the output's places in the input."""
        x = np.arange(self.new, dtype=np.float64)
        last, middle = self.old - 1, (x + 0.5) * self.down / self.up
        if mode == "half_pixel":
            return middle - 0.5
        if mode == "pytorch_half_pixel":
            return middle - 0.5 if self.new > 1 else 0 * x
        if mode == "half_pixel_symmetric":
            return ((2 * x + 1 - self.new) * self.down / self.up + last) / 2  # the centres coincide
        if mode == "tf_half_pixel_for_nn":
            return middle
        if mode == "asymmetric":
            return x * self.down / self.up
        if mode == "align_corners":
            # With scales, the corner is at the fractional width (ONNX's test cases); with sizes, it is the last place.
            return x * last / ((self.width if self.down == 1 else self.new) - 1) if self.new > 1 else 0 * x
        if mode == "tf_crop_and_resize":
            if self.new == 1:
                return x + (self.start + self.end) / 2 * last
            return (self.start * (self.new - 1 - x) + self.end * x) * last / (self.new - 1)  # exact at both ends
        raise OperatorError(f"coordinate_transformation_mode must be a mode of this version, got {mode!r}", code="SX404")


def linear(t: np.ndarray) -> np.ndarray:
    """The kernel of linear interpolation."""
    y: np.ndarray = np.maximum(1 - np.abs(t), 0)
    return y


def cubic(a: float) -> Kernel:
    """Return the kernel of equation (4) of R. Keys, Cubic Convolution Interpolation for Digital Image Processing (1981)."""

    def weigh(t: np.ndarray) -> np.ndarray:
        t = np.abs(t)
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        return np.where(t <= 1, near, np.where(t < 2, far, 0.0))

    return weigh


ROUND: dict[str, Kernel] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
"""How each `nearest_mode` rounds coordinates."""


def taps_of(
    span: Span, at: np.ndarray, kernel: Kernel, radius: int, shrink: float, exclude: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each place of the output, the places of the input under a kernel of this radius, and their weights.

    Args:
        span: The axis.
        at: The coordinates of the output's places in the input.
        kernel: The weight by distance.
        radius: The distance at which the weight is 0.
        shrink: Antialiasing stretches the kernel by 1 / shrink.
        exclude: Whether places beyond the border have the weight 0.
    """
    first = np.floor(at - radius / shrink) + 1
    reach = math.ceil(2 * radius / shrink)
    limits.admit((span.new, reach), np.float64)
    taps = first[:, None] + np.arange(reach)
    weights = kernel((taps - at[:, None]) * shrink)
    if exclude:
        inner = np.where((taps >= 0) & (taps < span.old), weights, 0.0)
        nothing = np.abs(inner.sum(axis=1, keepdims=True)) < 1e-9  # e.g. a cubic at -1: keep the value of the border
        weights = np.where(nothing, weights, inner)
    if exclude or shrink != 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(taps, 0, span.old - 1).astype(np.int64), weights


def scaled(axis: int, old: int, scale: float, roi: tuple[float, float] = (0.0, 1.0)) -> Span:
    """Return an axis resized by a factor: the product is in float32, like the scale, so that 10 at 0.7 is 7.

    By the specification a roi shortens the axis too; ONNX's shape inference, its test cases and every engine ignore
    that, and so does this function.
    """
    if not 0 < scale < math.inf:
        raise OperatorError(f"the scale of axis {axis} must be positive and finite, got {scale}", code="SX404")
    if not isinstance(old, int) and float(scale).is_integer() and old * int(scale) <= 1 << 24:  # the product is exact
        return Span(axis, old, old * int(scale), scale, 1.0, *roi)
    new = math.floor(np.float32(old) * np.float32(scale))
    return Span(axis, old, new, scale, 1.0, *roi)


POLICIES = ("stretch", "not_larger", "not_smaller")
"""The values of keep_aspect_ratio_policy."""


def sized(axes: Ints, shape: Ints, sizes: Ints, policy: str, rois: Sequence[tuple[float, float]]) -> list[Span]:
    """Return axes resized to sizes; with a policy other than "stretch", the sizes are bounds of a common scale."""
    if min(sizes, default=0) < 0:
        raise OperatorError(f"sizes must not be negative, got {sizes}", code="SX404")
    if policy not in POLICIES:
        raise OperatorError(f"keep_aspect_ratio_policy must be stretch, not_larger or not_smaller, got {policy!r}", code="SX404")
    pairs = [(size, shape[axis]) for size, axis in zip(sizes, axes, strict=True)]
    if policy == "stretch" or any(old == 0 for _, old in pairs):
        return [Span(axis, old, new, new, old, *roi) for axis, (new, old), roi in zip(axes, pairs, rois, strict=True)]
    pick = min if policy == "not_larger" else max
    up, down = pick(pairs, key=lambda pair: pair[0] / pair[1])
    # old * up / down, halves rounded up, in integers.
    return [
        Span(axis, old, (2 * old * up + down) // (2 * down), up, down, *roi)
        for axis, (_, old), roi in zip(axes, pairs, rois, strict=True)
    ]
