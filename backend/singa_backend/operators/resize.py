"""Resizing, an axis at a time: where an output place lies in the input, and how the input is weighed around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..dtypes import NARROW_FLOATS
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, Version, operator
from ._api import Array
from ._common import axes_of

Floats = tuple[float, ...]
Kernel = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Span:
    """One axis to resize: `old` places become `new`.  The scale is up / down, so that sizes lose no bit by a division."""

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
        """The length before it is made whole: 4 places at scale 0.6 are 2.4 wide and 2 long."""
        return self.old * self.up / self.down

    def coordinates(self, mode: str) -> np.ndarray:
        """Where the output's places lie in the input."""
        x = np.arange(self.new, dtype=np.float64)
        last, middle = self.old - 1, (x + 0.5) * self.down / self.up
        if mode == "half_pixel":
            return middle - 0.5
        if mode == "pytorch_half_pixel":
            return middle - 0.5 if self.new > 1 else 0 * x
        if mode == "half_pixel_symmetric":
            return ((2 * x + 1 - self.new) * self.down / self.up + last) / 2  # the middles coincide
        if mode == "tf_half_pixel_for_nn":
            return middle
        if mode == "asymmetric":
            return x * self.down / self.up
        if mode == "align_corners":
            # By a scale the corner is that of the fractional length (ONNX's own cases); by sizes it is the last place.
            return x * last / ((self.width if self.down == 1 else self.new) - 1) if self.new > 1 else 0 * x
        if mode == "tf_crop_and_resize":
            if self.new == 1:
                return x + (self.start + self.end) / 2 * last
            return (self.start * (self.new - 1 - x) + self.end * x) * last / (self.new - 1)  # exact at both ends
        raise OperatorError(f"coordinate_transformation_mode {mode!r} is none of this version's", code="SX404")


def linear(t: np.ndarray) -> np.ndarray:
    y: np.ndarray = np.maximum(1 - np.abs(t), 0)
    return y


def cubic(a: float) -> Kernel:
    """Equation (4) of R. Keys, Cubic Convolution Interpolation for Digital Image Processing (1981)."""

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


def saturated(xp: Xp, y: Array, dtype: np.dtype[Any]) -> Array:
    """Floats cast to `dtype`: an integer type holds what fits it and drops fractions.

    5 * (2/3) + 5 * (1/3) may come out as 4.999...: what differs from a whole number by rounding alone is that number.
    """
    if dtype.kind not in "iu":
        return y.astype(dtype)
    whole = xp.rint(y)
    y = xp.where(xp.abs(y - whole) <= 1e-9 * xp.maximum(xp.abs(whole), 1), whole, xp.trunc(y))
    low, high = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
    held = xp.where((y > low) & (y < high), y, 0).astype(dtype)
    least, most = (xp.asarray(np.array(bound, dtype)) for bound in (np.iinfo(dtype).min, np.iinfo(dtype).max))
    return xp.where(y >= high, most, xp.where(y <= low, least, held))


def _nearest(xp: Xp, x: Array, span: Span, at: np.ndarray, rounding: Kernel) -> Array:
    index = np.clip(rounding(at), 0, span.old - 1).astype(np.int64)
    return xp.take(x, xp.asarray(index), axis=span.axis)


def _interpolate(
    xp: Xp, x: Array, span: Span, at: np.ndarray, kernel: Kernel, radius: int, shrink: float, exclude: bool
) -> Array:
    """The sum of the taps under a kernel of this radius; antialiasing stretches the kernel by 1 / shrink."""
    first = np.floor(at - radius / shrink) + 1
    reach = math.ceil(2 * radius / shrink)
    limits.admit((span.new, reach), np.float64)
    taps = first[:, None] + np.arange(reach)
    weights = kernel((taps - at[:, None]) * shrink)
    if exclude:
        inner = np.where((taps >= 0) & (taps < span.old), weights, 0.0)
        nothing = np.abs(inner.sum(axis=1, keepdims=True)) < 1e-9  # as for a cubic at -1: the border's value stays
        weights = np.where(nothing, weights, inner)
    if exclude or shrink != 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    index = np.clip(taps, 0, span.old - 1).astype(np.int64)
    shape = [1] * x.ndim
    shape[span.axis] = span.new
    y: Array = None
    for k in limits.rounds(reach):
        i, w = index[:, k], weights[:, k]
        if not w.any():
            continue
        weight = xp.asarray(w.reshape(shape).astype(x.real.dtype))
        term = xp.take(x, xp.asarray(i), axis=span.axis) * weight
        if not w.all():
            term = xp.where(weight == 0, 0, term)  # 0 * inf: a place without weight has no say
        y = term if y is None else y + term
    return y if y is not None else xp.zeros((*x.shape[: span.axis], span.new, *x.shape[span.axis + 1 :]), x.dtype)


def _resize(
    xp: Xp,
    x: Array,
    spans: Sequence[Span],
    mode: str,
    coordinates: str,
    rounding: Callable[[Span], Kernel],
    a: float = -0.75,
    exclude: bool = False,
    antialias: bool = False,
    extrapolation: float = 0.0,
) -> Array:
    """`x` resized along every span."""
    if mode not in ("nearest", "linear", "cubic"):
        raise OperatorError(f"mode {mode!r} was asked for; there are nearest, linear and cubic", code="SX404")
    dtype = x.dtype
    shape = list(x.shape)
    for span in spans:
        shape[span.axis] = span.new
    limits.admit(shape, dtype)
    if 0 in shape:
        return xp.zeros(tuple(shape), dtype)
    if x.size == 0:
        raise OperatorError(f"shape {tuple(x.shape)} has no values to make shape {tuple(shape)} of", code="SX404")
    crop = coordinates == "tf_crop_and_resize"
    active = [s for s in spans if s.new != s.old or s.scale != 1 or (crop and (s.start, s.end) != (0, 1))]
    if not active:
        return x
    y = x
    if mode != "nearest":
        if dtype.kind == "O":
            raise OperatorError(f"strings cannot be resized in mode {mode!r}", code="SX404")
        work = np.dtype(np.float32) if dtype in NARROW_FLOATS else dtype if dtype.kind in "fc" else np.dtype(np.float64)
        if work == np.float32 and (mode == "cubic" or antialias):
            work = np.dtype(np.float64)  # taps of both signs, or many: they cancel
        y = x.astype(work)
    inside: Array = None
    for span in active:
        limits.admit((span.new,), np.float64)
        at = span.coordinates(coordinates)
        if mode == "nearest":
            y = _nearest(xp, y, span, at, rounding(span))
        else:
            shrink = min(span.scale, 1.0) if antialias else 1.0
            kernel, radius = (linear, 1) if mode == "linear" else (cubic(a), 2)
            y = _interpolate(xp, y, span, at, kernel, radius, shrink, exclude)
        if crop:
            within = (at >= 0) & (at <= span.old - 1)
            if not within.all():
                view = [1] * x.ndim
                view[span.axis] = span.new
                mask = xp.asarray(within.reshape(view))
                inside = mask if inside is None else inside & mask
    if inside is not None:
        if dtype.kind == "O":
            raise OperatorError("strings have no extrapolation_value", code="SX404")
        y = xp.where(inside, y, xp.asarray(np.asarray(extrapolation).astype(y.dtype)))
    return y if y.dtype == dtype else saturated(xp, y, dtype)


def _scaled(axis: int, old: int, scale: float, roi: tuple[float, float] = (0.0, 1.0)) -> Span:
    """An axis resized by a factor: the product is a float32, as the scale is, and 10 at 0.7 is 7.

    The text lets a roi shorten the axis too; ONNX's shape inference, its cases and every engine do not, nor does this.
    """
    if not 0 < scale < math.inf:
        raise OperatorError(f"scale {scale} of axis {axis} is not above 0", code="SX404")
    new = math.floor(np.float32(old) * np.float32(scale))
    return Span(axis, old, new, scale, 1.0, *roi)


def _sized(axes: Ints, shape: Ints, sizes: Ints, policy: str, rois: Sequence[tuple[float, float]]) -> list[Span]:
    """Axes resized to lengths, which with a policy other than "stretch" bound one common scale."""
    if min(sizes, default=0) < 0:
        raise OperatorError(f"sizes {sizes} are negative", code="SX404")
    if policy not in ("stretch", "not_larger", "not_smaller"):
        raise OperatorError(f"keep_aspect_ratio_policy {policy!r} is not stretch, not_larger or not_smaller", code="SX404")
    pairs = [(size, shape[axis]) for size, axis in zip(sizes, axes, strict=True)]
    if policy == "stretch" or any(old == 0 for _, old in pairs):
        return [Span(axis, old, new, new, old, *roi) for axis, (new, old), roi in zip(axes, pairs, rois, strict=True)]
    pick = min if policy == "not_larger" else max
    up, down = pick(pairs, key=lambda pair: pair[0] / pair[1])
    # old * up / down, halves rounded up, in whole numbers.
    return [
        Span(axis, old, (2 * old * up + down) // (2 * down), up, down, *roi)
        for axis, (_, old), roi in zip(axes, pairs, rois, strict=True)
    ]


@operator("Resize", 11, 13, 18, 19, widen=False, traits=("rank_of_first",), settings=("roi", "scales"))
def resize(
    xp: Xp,
    x: Array,
    roi: Host[Floats] | None = None,
    scales: Host[Floats] | None = None,
    sizes: Host[Ints] | None = None,
    *,
    antialias: int = 0,
    axes: Ints | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    version: Version = 19,
) -> Array:
    """Resize-11 must be given scales and marks absent ones by an empty tensor; later versions may do so too.

    "tf_half_pixel_for_nn" left the text of version 13, but models of later opsets use it and it means one thing.
    """
    coordinates = coordinate_transformation_mode
    if coordinates == "half_pixel_symmetric" and version < 19:
        raise OperatorError(f"half_pixel_symmetric came with Resize-19; this is Resize-{version}", code="SX404")
    if nearest_mode not in ROUND:
        raise OperatorError(f"nearest_mode {nearest_mode!r} was asked for; there are {', '.join(ROUND)}", code="SX404")
    along = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    if not along:
        return x
    if bool(scales) == bool(sizes):
        raise OperatorError("Resize takes scales or sizes; the node gives " + ("both" if scales else "neither"), code="SX404")
    given = len(scales or sizes or ())
    if given != len(along):
        raise OperatorError(f"{given} {'scales' if scales else 'sizes'} were given for {len(along)} axes", code="SX404")
    rois = [(0.0, 1.0)] * len(along)
    if coordinates == "tf_crop_and_resize":
        if roi is None or len(roi) != 2 * len(along):
            count = f"{2 * len(along)} numbers; it has {len(roi or ())}"
            raise OperatorError(f"tf_crop_and_resize needs a roi of {count}", code="SX404")
        if not all(map(math.isfinite, roi)):
            raise OperatorError(f"the roi {roi} is not finite", code="SX404")
        rois = list(zip(roi[: len(along)], roi[len(along) :], strict=True))
    if scales:
        spans = [_scaled(axis, x.shape[axis], scale, r) for axis, scale, r in zip(along, scales, rois, strict=True)]
    else:
        spans = _sized(along, tuple(x.shape), sizes or (), keep_aspect_ratio_policy, rois)
    return _resize(
        xp,
        x,
        spans,
        mode,
        coordinates,
        lambda _: ROUND[nearest_mode],
        cubic_coeff_a,
        bool(exclude_outside),
        bool(antialias),
        extrapolation_value,
    )


@resize.gradient
def resize_gradient(
    op: Op,
    dy: V,
    x: V,
    roi: V,
    scales: V,
    sizes: V,
    antialias: int,
    axes: Ints | None,
    coordinate_transformation_mode: str,
    cubic_coeff_a: float,
    exclude_outside: int,
    keep_aspect_ratio_policy: str,
    mode: str,
    nearest_mode: str,
) -> V:
    """Each axis is multiplied by a matrix, which is what resizing makes of the identity; dy is multiplied by it from behind."""
    rank = op.rank(x)
    along = [a % rank for a in axes] if axes is not None else list(range(rank))
    cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    if sizes is not None and keep_aspect_ratio_policy != "stretch":

        def resized(identity: V, axes: list[int]) -> V:
            return op.Resize(
                identity,
                roi if cropped else None,
                None,
                sizes,
                axes=axes,
                antialias=antialias,
                cubic_coeff_a=cubic_coeff_a,
                exclude_outside=exclude_outside,
                coordinate_transformation_mode=coordinate_transformation_mode,
                keep_aspect_ratio_policy=keep_aspect_ratio_policy,
                mode=mode,
                nearest_mode=nearest_mode,
            )

        return _by_one_matrix(op, dy, x, along, resized)
    known = op.constant_value(scales) if sizes is None else None
    for i, axis in enumerate(along):
        old, new = (None if s is None else s[axis] for s in (op.shape(x), op.shape(dy)))
        if not cropped and isinstance(old, int) and old == new and (sizes is not None or (known is not None and known[i] == 1)):
            continue  # nothing happens along this axis
        size = op.Shape(x, start=axis, end=axis + 1)
        identity = op.EyeLike(op.Expand(op.constant(0, op.dtype(x)), op.Concat(size, size, axis=0)))
        both = op.Gather(roi, [i, i + len(along)], axis=0) if cropped else None
        matrix = op.Resize(
            identity,
            op.Concat(op.Slice(both, [0], [1]), [0.0], op.Slice(both, [1], [2]), [1.0], axis=0) if cropped else None,
            None if sizes is not None else op.Concat(op.Slice(scales, [i], [i + 1], [0]), [1.0], axis=0),
            None if sizes is None else op.Concat(op.Shape(dy, start=axis, end=axis + 1), size, axis=0),
            antialias=antialias,
            coordinate_transformation_mode=coordinate_transformation_mode,
            cubic_coeff_a=cubic_coeff_a,
            exclude_outside=exclude_outside,
            mode=mode,
            nearest_mode=nearest_mode,
        )
        dy = op.swap(op.MatMul(op.swap(dy, axis, -1), matrix), axis, -1)
    return dy


def _by_one_matrix(op: Op, dy: V, x: V, along: Sequence[int], resized: Callable[[V, list[int]], V]) -> V:
    """Where the axes share a scale: all of them as one axis, and the matrix of that."""
    rest = [a for a in range(op.rank(x)) if a not in along]
    olds = op.Gather(op.Shape(x), list(along), axis=0)
    count = op.ReduceProd(olds, keepdims=1)
    identity = op.EyeLike(op.Expand(op.constant(0, op.dtype(x)), op.Concat(count, count, axis=0)))
    matrix = resized(op.Reshape(identity, op.Concat(count, olds, axis=0), allowzero=1), list(range(1, 1 + len(along))))
    last = op.Transpose(dy, perm=[*rest, *along])
    kept = op.Gather(op.Shape(x), rest, axis=0) if rest else op.constant(np.zeros(0), np.int64)
    news = op.ReduceProd(op.Gather(op.Shape(dy), list(along), axis=0), keepdims=1)
    rows = op.Reshape(last, op.Concat(kept, news, axis=0), allowzero=1)
    back = op.MatMul(rows, op.swap(op.Reshape(matrix, op.Concat(count, news, axis=0), allowzero=1)))
    order = [*rest, *along]
    return op.Transpose(
        op.Reshape(back, op.Concat(kept, olds, axis=0), allowzero=1), perm=[order.index(a) for a in range(op.rank(x))]
    )


def _by_scales(xp: Xp, x: Array, scales: Sequence[float], mode: str, rounding: Callable[[Span], Kernel]) -> Array:
    if len(scales) != x.ndim:
        raise OperatorError(f"{len(scales)} scales were given for {x.ndim} axes", code="SX404")
    if mode not in ("nearest", "linear", "bilinear"):
        raise OperatorError(f"mode {mode!r} was asked for; there are nearest and linear", code="SX404")
    spans = [_scaled(axis, x.shape[axis], scale) for axis, scale in enumerate(scales)]
    return _resize(xp, x, spans, "nearest" if mode == "nearest" else "linear", "asymmetric", rounding)


@operator("Resize", 10, widen=False, settings=("scales",))
def resize_10(xp: Xp, x: Array, scales: Host[Floats], *, mode: str = "nearest") -> Array:
    """The text names no rule; ONNX's cases of that time divide by the scale, and round down to enlarge and up to shrink."""
    return _by_scales(xp, x, scales, mode, lambda span: np.floor if span.scale >= 1 else np.ceil)


@resize_10.decomposition
def resize_10_decomposition(op: Op, x: V, scales: V, mode: str) -> V:
    """What is enlarged rounds down, and then what is shrunk rounds up."""
    one = op.constant(1, op.dtype(scales))
    larger, smaller = op.Max(scales, one), op.Min(scales, one)
    if mode != "nearest":
        return _upsampled(op, x, scales, mode)
    y = _upsampled(op, x, larger, mode)
    return op.Resize(y, None, smaller, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="ceil")


def _upsampled(op: Op, x: V, scales: V, mode: str) -> V:
    return op.Resize(
        x,
        None,
        scales,
        mode="nearest" if mode == "nearest" else "linear",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


@operator("Upsample", 9, 10, widen=False, settings=("scales",))
def upsample(xp: Xp, x: Array, scales: Host[Floats], *, mode: str = "nearest") -> Array:
    if any(s < 1 for s in scales):
        raise OperatorError(f"Upsample's scales are 1 or more; they are {tuple(scales)}", code="SX404")
    return _by_scales(xp, x, scales, mode, lambda _: np.floor)


@upsample.decomposition
def upsample_decomposition(op: Op, x: V, scales: V, mode: str) -> V:
    return _upsampled(op, x, scales, mode)


@operator("Upsample", 7, widen=False)
def upsample_7(xp: Xp, x: Array, *, scales: Floats, mode: str = "nearest") -> Array:
    """Before opset 9 the scales were an attribute."""
    return upsample(xp, x, scales, mode=mode)


@upsample_7.decomposition
def upsample_7_decomposition(op: Op, x: V, scales: Floats, mode: str) -> V:
    return _upsampled(op, x, op.constant(scales, np.float32), mode)


@operator("Upsample", 1, widen=False)
def upsample_1(xp: Xp, x: Array, *, height_scale: float, width_scale: float, mode: str = "nearest") -> Array:
    """Before opset 7 the input was an image, N x C x H x W."""
    if x.ndim != 4:
        raise OperatorError(f"Upsample-1 takes 4 axes; there are {x.ndim}", code="SX404")
    return upsample(xp, x, (1.0, 1.0, height_scale, width_scale), mode=mode)


@upsample_1.decomposition
def upsample_1_decomposition(op: Op, x: V, height_scale: float, width_scale: float, mode: str) -> V:
    return _upsampled(op, x, op.constant([1, 1, height_scale, width_scale], np.float32), mode)
