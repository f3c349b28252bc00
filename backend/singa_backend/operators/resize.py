"""Resize and Upsample, one axis at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..dtypes import NARROW_FLOATS
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, Version, WorkShape, operator
from ..ir.shapes import KnownShapes, Shape, Unsure, agree
from ..ir.spans import POLICIES, ROUND, Kernel, Span, cubic, linear, scaled, sized, taps_of
from ._api import Array
from ._common import axes_of

Floats = tuple[float, ...]


def saturated(xp: Xp, y: Array, dtype: np.dtype[Any]) -> Array:
    """Cast floats to `dtype`; for an integer type, truncate and saturate.

    5 * (2/3) + 5 * (1/3) may be computed as 4.999...: a value that differs from an integer only by rounding is that integer.
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
    """Sum the taps under a kernel of this radius; antialiasing stretches the kernel by 1 / shrink."""
    index, weights = taps_of(span, at, kernel, radius, shrink, exclude)
    shape = [1] * x.ndim
    shape[span.axis] = span.new
    y: Array = None
    for k in limits.rounds(weights.shape[1]):
        i, w = index[:, k], weights[:, k]
        if not w.any():
            continue
        weight = xp.asarray(w.reshape(shape).astype(x.real.dtype))
        term = xp.take(x, xp.asarray(i), axis=span.axis) * weight
        if not w.all():
            term = xp.where(weight == 0, 0, term)  # 0 * inf: a place with weight 0 does not count
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
    """Resize `x` along each span."""
    if mode not in ("nearest", "linear", "cubic"):
        raise OperatorError(f"mode must be nearest, linear or cubic, got {mode!r}", code="SX404")
    dtype = x.dtype
    shape = list(x.shape)
    for span in spans:
        shape[span.axis] = span.new
    limits.admit(shape, dtype)
    if 0 in shape:
        return xp.zeros(tuple(shape), dtype)
    if x.size == 0:
        raise OperatorError(f"cannot resize an empty tensor of shape {tuple(x.shape)} to shape {tuple(shape)}", code="SX404")
    crop = coordinates == "tf_crop_and_resize"
    active = [s for s in spans if s.new != s.old or s.scale != 1 or (crop and (s.start, s.end) != (0, 1))]
    if not active:
        return x
    y = x
    if mode != "nearest":
        if dtype.kind == "O":
            raise OperatorError(f"mode must be nearest for strings, got {mode!r}", code="SX404")
        work = np.dtype(np.float32) if dtype in NARROW_FLOATS else dtype if dtype.kind in "fc" else np.dtype(np.float64)
        if work == np.float32 and (mode == "cubic" or antialias):
            work = np.dtype(np.float64)  # taps of both signs, or many, suffer from cancellation
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
            raise OperatorError("strings must not be extrapolated: extrapolation_value is a number", code="SX404")
        y = xp.where(inside, y, xp.asarray(np.asarray(extrapolation).astype(y.dtype)))
    return y if y.dtype == dtype else saturated(xp, y, dtype)


@operator("Resize", 11, 13, 18, 19, widen=False, traits=("finite",), settings=("roi", "scales"))
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
    """Resize; scales may be an empty tensor instead of absent, as Resize-11 requires.

    "tf_half_pixel_for_nn" is not part of version 13, but models of later opsets use it, and its meaning is unambiguous.
    """
    coordinates = coordinate_transformation_mode
    if coordinates == "half_pixel_symmetric" and version < 19:
        raise OperatorError(f"half_pixel_symmetric requires Resize-19 or later, got Resize-{version}", code="SX404")
    if nearest_mode not in ROUND:
        raise OperatorError(f"nearest_mode must be one of {', '.join(ROUND)}, got {nearest_mode!r}", code="SX404")
    along = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    if not along:
        return x
    if bool(scales) == bool(sizes):
        raise OperatorError(
            "exactly one of scales and sizes must be present, got " + ("both" if scales else "neither"), code="SX404"
        )
    given = len(scales or sizes or ())
    if given != len(along):
        raise OperatorError(
            f"{'scales' if scales else 'sizes'} must have {len(along)} values, one for each axis, got {given}", code="SX404"
        )
    rois = [(0.0, 1.0)] * len(along)
    if coordinates == "tf_crop_and_resize":
        if roi is None or len(roi) != 2 * len(along):
            count = f"{2 * len(along)} values, got {len(roi or ())}"
            raise OperatorError(f"the roi of tf_crop_and_resize must have {count}", code="SX404")
        if not all(map(math.isfinite, roi)):
            raise OperatorError(f"roi must be finite, got {roi}", code="SX404")
        rois = list(zip(roi[: len(along)], roi[len(along) :], strict=True))
    if scales:
        spans = [scaled(axis, x.shape[axis], scale, r) for axis, scale, r in zip(along, scales, rois, strict=True)]
    else:
        spans = sized(along, tuple(x.shape), sizes or (), keep_aspect_ratio_policy, rois)
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


@resize.flops
def resize_flops(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    mode = attributes.get("mode") or "nearest"
    mode = mode.decode() if isinstance(mode, bytes) else mode
    taps = {"nearest": 0, "linear": 2, "cubic": 4}.get(mode, 0)
    scaled = sum(a != b for a, b in zip(inputs[0] or (), output, strict=False))
    return math.prod(output) * 2 * taps * scaled


@resize.shapes
def resize_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, places = known.shape(call.inputs[0]), known.attribute(call, "axes")
    if shape is None:
        return None
    axes = range(len(shape)) if places is None else axes_of(places, len(shape))
    source, sizes = known.input(call, 1 if len(call.inputs) == 2 else 2), known.input(call, 3)
    scales, target = (None if v is None else known.constant(v) for v in (source, sizes))
    lengths = [known.shape(v) for v in (source, sizes) if v is not None]
    if any(v is None or (v != (0,) and not agree(v, (len(axes),))) for v in lengths):
        raise Unsure
    made = list(shape)
    for i, axis in enumerate(axes):
        size = made[axis]
        if target is not None:
            made[axis] = int(target[i])
        elif scales is not None and scales.size and isinstance(size, int):
            made[axis] = scaled(axis, size, float(scales[i])).new
        else:
            made[axis] = known.fresh()
    policy = known.attribute(call, "keep_aspect_ratio_policy", "stretch")
    if policy not in POLICIES or (target is not None and policy != "stretch"):
        raise Unsure
    return tuple(made)


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
    """Resizing an axis is a multiplication by a matrix, the resized identity; multiply dy by that matrix on the right."""
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
            continue  # this axis is unchanged
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
    """For axes with a common scale: flatten them to one axis and use its matrix."""
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
        raise OperatorError(f"scales must have {x.ndim} values, one for each axis, got {len(scales)}", code="SX404")
    if mode not in ("nearest", "linear", "bilinear"):
        raise OperatorError(f"mode must be nearest or linear, got {mode!r}", code="SX404")
    spans = [scaled(axis, x.shape[axis], scale) for axis, scale in enumerate(scales)]
    return _resize(xp, x, spans, "nearest" if mode == "nearest" else "linear", "asymmetric", rounding)


@operator("Resize", 10, widen=False, settings=("scales",))
def resize_10(xp: Xp, x: Array, scales: Host[Floats], *, mode: str = "nearest") -> Array:
    """Divide coordinates by the scale; round down to enlarge and up to shrink, as in the test cases (ONNX has no rule)."""
    return _by_scales(xp, x, scales, mode, lambda span: np.floor if span.scale >= 1 else np.ceil)


@resize_10.decomposition
def resize_10_decomposition(op: Op, x: V, scales: V, mode: str) -> V:
    """Enlarge with rounding down, then shrink with rounding up."""
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


@operator("Upsample", 9, 10, widen=False, settings=("scales",), traits=("finite", "moves"))
def upsample(xp: Xp, x: Array, scales: Host[Floats], *, mode: str = "nearest") -> Array:
    if any(s < 1 for s in scales):
        raise OperatorError(f"scales must be at least 1, got {tuple(scales)}", code="SX404")
    return _by_scales(xp, x, scales, mode, lambda _: np.floor)


@upsample.decomposition
def upsample_decomposition(op: Op, x: V, scales: V, mode: str) -> V:
    return _upsampled(op, x, scales, mode)


@operator("Upsample", 7, widen=False)
def upsample_7(xp: Xp, x: Array, *, scales: Floats, mode: str = "nearest") -> Array:
    """Before opset 9 the scales are an attribute."""
    return upsample(xp, x, scales, mode=mode)


@upsample_7.decomposition
def upsample_7_decomposition(op: Op, x: V, scales: Floats, mode: str) -> V:
    return _upsampled(op, x, op.constant(scales, np.float32), mode)


@operator("Upsample", 1, widen=False)
def upsample_1(xp: Xp, x: Array, *, height_scale: float, width_scale: float, mode: str = "nearest") -> Array:
    """Before opset 7 the input is an image, N x C x H x W."""
    if x.ndim != 4:
        raise OperatorError(f"Upsample-1 takes 4 axes, got {x.ndim}", code="SX404")
    return upsample(xp, x, (1.0, 1.0, height_scale, width_scale), mode=mode)


@upsample_1.decomposition
def upsample_1_decomposition(op: Op, x: V, height_scale: float, width_scale: float, mode: str) -> V:
    return _upsampled(op, x, op.constant([1, 1, height_scale, width_scale], np.float32), mode)
