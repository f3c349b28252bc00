"""Resize and Upsample: by oneDNN if it has ONNX's coordinates, otherwise by indices or products with matrices made in advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import limits
from ..errors import OperatorError
from ..ir.sizes import Size, is_open, now, settled
from ..ir.spans import ROUND, Kernel, Span, cubic, linear, scaled, sized, taps_of
from . import onednn as dnn
from .copies import copied
from .lowering import F32, channels_last, dense_desc, emit, pinned, require_plain, threads_for
from .onednn import MemoryDesc
from .table import Site, kernel
from .values import FINITE, Value, dense, last_order, strides_of
from .views import axes_in, numbers_of

NEAREST = (F32, np.dtype(np.int8), np.dtype(np.uint8))
"""The dtypes that oneDNN resamples."""

REPEATED = 8
"""The places of an axis by which it is decided whether each is repeated."""


@kernel("Resize", 11, 13, 18, 19, on="onednn")
def resize(site: Site, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None) -> Value:
    """Resize by scales or sizes that are the same in every run."""
    a = site.attributes
    mode, coordinates = a["mode"], a["coordinate_transformation_mode"]
    known = [() if v is None else tuple(numbers_of(v)) for v in (scales, sizes) if v is None or v.constant]
    site.require(len(known) == 2 and bool(known[0]) != bool(known[1]), "the scales or sizes depend on the data")
    site.require(coordinates != "tf_crop_and_resize", "it crops")
    site.require(coordinates != "half_pixel_symmetric" or site.version >= 19, "not a mode of this version")
    site.require(a.get("nearest_mode", "floor") in ROUND and mode in ("nearest", "linear", "cubic"), "not a valid mode")
    axes = a.get("axes")
    along = tuple(range(x.ndim)) if axes is None else axes_in(site, axes, x.ndim)
    site.require(along and len(along) == len(known[0] or known[1]), "not one value for each axis")
    try:
        if known[0]:
            spans = [scaled(axis, x.shape[axis], scale) for axis, scale in zip(along, known[0], strict=True)]
        else:
            policy = a.get("keep_aspect_ratio_policy", "stretch")
            if is_open((*known[1], *x.shape)):
                site.require(policy == "stretch", "sizes by name have a common scale")
                spans = [Span(axis, x.shape[axis], new, new, x.shape[axis]) for axis, new in zip(along, known[1], strict=True)]
            else:
                spans = sized(along, x.shape, tuple(int(v) for v in known[1]), policy, [(0.0, 1.0)] * len(along))
        weigh: tuple[Kernel, int] | None = None
        if mode != "nearest":
            weigh = (linear, 1) if mode == "linear" else (cubic(a["cubic_coeff_a"]), 2)
        exclude, antialias = bool(a.get("exclude_outside", 0)), bool(a.get("antialias", 0))
        rounding = ROUND[a.get("nearest_mode", "floor")]
        return _resized(site, x, spans, coordinates, lambda _: rounding, weigh, exclude, antialias)
    except OperatorError as error:
        site.refuse(str(error))


@kernel("Resize", 10, on="onednn")
def resize_10(site: Site, x: Value, scales: Value) -> Value:
    """Resize by scales; nearest rounds down to enlarge and up to shrink."""
    return _by_scales(site, x, scales, lambda span: np.floor if span.scale >= 1 else np.ceil)


@kernel("Upsample", 9, 10, on="onednn")
def upsample(site: Site, x: Value, scales: Value) -> Value:
    """Enlarge by scales."""
    return _by_scales(site, x, scales, lambda _: np.floor, 1)


@kernel("Upsample", 7, on="onednn")
def upsample_7(site: Site, x: Value) -> Value:
    """Enlarge by scales that are an attribute."""
    return _by_scales(site, x, site.attributes["scales"], lambda _: np.floor, 1)


def _by_scales(
    site: Site, x: Value, scales: Value | Sequence[float], rounding: Callable[[Span], Kernel], least: float = 0
) -> Value:
    if isinstance(scales, Value):
        site.require(scales.constant, "the scales depend on the data")
        scales = scales.array.reshape(-1).tolist()
    mode = site.attributes["mode"]
    site.require(len(scales) == x.ndim and mode in ("nearest", "linear", "bilinear"), "not a valid mode or number of scales")
    site.require(all(least <= s < math.inf and s > 0 for s in scales), "not valid scales")
    spans = [scaled(axis, x.shape[axis], scale) for axis, scale in enumerate(scales)]
    return _resized(site, x, spans, "asymmetric", rounding, None if mode == "nearest" else (linear, 1))


def _resized(
    site: Site,
    x: Value,
    spans: Sequence[Span],
    coordinates: str,
    rounding: Callable[[Span], Kernel],
    weigh: tuple[Kernel, int] | None,
    exclude: bool = False,
    antialias: bool = False,
) -> Value:
    """Resize along each axis; `weigh` is the kernel of an interpolation and its radius."""
    active = [s for s in spans if s.new != s.old or s.up != s.down]
    shape = list(x.shape)
    for span in active:
        shape[span.axis] = span.new
    site.require(x.size and all(shape), "a tensor is empty")
    limits.admit(settled(shape), x.dtype)  # before the coordinates, which are as many as the cells of an axis
    if not active:
        return x.view(x.shape, x.strides)
    if is_open(d for s in active for d in (s.old, s.new)):
        site.require(weigh is None, "weights depend on sizes that differ between runs")
        for s in active:
            times = _times(s, coordinates, rounding)
            x = (_repeated(site, x, s, times) if times else None) or _taken(
                site, x, [s], [partial(_nearest, s, coordinates, rounding)]
            )
        return x
    places = [s.coordinates(coordinates) for s in active]
    if weigh is None:
        indices = [_nearest(s, coordinates, rounding) for s in active]
        if all(map(_is_nearest, active, indices)):
            made = _by_onednn(site, x, active, shape, "nearest")
            if made is not None:
                return made
        return _taken(site, x, active, [partial(np.asarray, i) for i in indices])
    require_plain(site, x)
    site.require(x.finiteness == FINITE, "the input may be infinite")
    site.needs_finite()  # a place with weight 0 does not count
    if weigh[0] is linear and not exclude and not antialias and all(map(_is_half_pixel, active, places)):
        made = _by_onednn(site, x, active, shape, "linear")
        if made is not None:
            return made
    for s, at in zip(active, places, strict=True):
        index, weights = taps_of(s, at, *weigh, min(s.scale, 1.0) if antialias else 1.0, exclude)
        matrix = np.zeros((s.new, s.old))
        np.add.at(matrix, (np.arange(s.new)[:, None], index), weights)
        x = _multiplied(site, x, s, matrix.astype(np.float32))
    return x


def _nearest(span: Span, coordinates: str, rounding: Callable[[Span], Kernel]) -> np.ndarray:
    """The places of an axis that are taken, for the present sizes."""
    up, down = (now(n) if isinstance(n, Size) else n for n in (span.up, span.down))
    s = replace(span, old=now(span.old), new=now(span.new), up=up, down=down)
    made: np.ndarray = np.clip(rounding(s)(s.coordinates(coordinates)), 0, s.old - 1).astype(np.int64)
    return made


def _times(span: Span, coordinates: str, rounding: Callable[[Span], Kernel]) -> int:
    """How often each place of an axis is repeated, whatever its size is; 0 if not all are repeated equally."""
    if coordinates not in ("asymmetric", "half_pixel") or isinstance(span.up, Size) or span.down != 1 or span.up % 1:
        return 0
    times = int(span.up)
    several = _nearest(replace(span, old=REPEATED, new=REPEATED * times), coordinates, rounding)
    return times * np.array_equal(several, np.arange(REPEATED * times) // times)


def _repeated(site: Site, x: Value, span: Span, times: int) -> Value | None:
    """Repeat each place of an axis; None if there is no machine code for it."""
    order, axis = _in_memory(site, x), span.axis
    y = site.new([*x.shape[:axis], span.new, *x.shape[axis + 1 :]], x.dtype, order, x.finiteness)
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    inner = x.view(shape, (*x.strides[: axis + 1], 0, *x.strides[axis + 1 :]))
    step = y.strides[axis]
    return y if copied(site, inner, y.view(shape, (*y.strides[:axis], times * step, step, *y.strides[axis + 1 :]))) else None


def _is_nearest(span: Span, index: np.ndarray) -> bool:
    """Whether oneDNN takes these places: those nearest to the centres, if none is half-way."""
    at = (np.arange(span.new) + 0.5) * span.old / span.new - 0.5
    return bool((np.abs(at - np.floor(at) - 0.5) > 1e-3).all() and (np.clip(np.rint(at), 0, span.old - 1) == index).all())


def _is_half_pixel(span: Span, at: np.ndarray) -> bool:
    """Whether the coordinates are those of oneDNN: the centres of places, by the ratio of the sizes."""
    return bool(np.abs(at - ((np.arange(span.new) + 0.5) * span.old / span.new - 0.5)).max() <= 1e-9 * span.old)


def _by_onednn(site: Site, x: Value, active: Sequence[Span], shape: Sequence[int], algorithm: str) -> Value | None:
    """Resize by a resampling of all axes; None if oneDNN has no fast code."""
    if not (3 <= x.ndim <= 5 and x.dtype in NEAREST and min(s.axis for s in active) >= 2) or dnn.library() is None:
        return None
    order = last_order(x.ndim)
    src, dst = dense_desc(x.dtype, x.shape, order), dense_desc(x.dtype, shape, order)
    try:
        with threads_for(math.prod(shape) * (8 if algorithm == "linear" else 2)):
            made = dnn.resampling(src, dst, algorithm=algorithm)
    except dnn.OneDnnError:
        return None
    require_plain(site, x, dtypes=NEAREST)
    x = channels_last(site, x)
    y = site.new(shape, x.dtype, order, x.finiteness)
    emit(site, made, {dnn.args.SRC: (src, x), dnn.args.DST: (dst, y)}, (y,))
    return y


def _in_memory(site: Site, x: Value) -> list[int]:
    """The axes of a value from the outermost in memory to the innermost; declines if there are gaps."""
    order = sorted(range(x.ndim), key=lambda a: (-x.strides[a], a)) if not x.contiguous else list(range(x.ndim))
    site.require(dense(x.shape, x.strides, x.dtype.itemsize, order), "the input has gaps in memory")
    return order


def _taken(site: Site, x: Value, active: Sequence[Span], indices: Sequence[Callable[[], np.ndarray]]) -> Value:
    """Take places along one axis after the other."""
    for span, index in zip(active, indices, strict=True):
        order = _in_memory(site, x)
        y = site.new([*x.shape[: span.axis], span.new, *x.shape[span.axis + 1 :]], x.dtype, order, x.finiteness)
        axis = order.index(span.axis)

        def bind(x: Value = x, y: Value = y, order: list[int] = order, axis: int = axis, index: Any = index) -> Any:
            return [(x.array.transpose(order).take, (index(), axis, y.array.transpose(order), "clip"))]

        site.emit(bind, reads=(x,), writes=(y,), kernel="numpy.take")
        x = y
    return x


def _multiplied(site: Site, x: Value, span: Span, matrix: np.ndarray) -> Value:
    """Multiply one axis with a matrix."""
    order = _in_memory(site, x)
    y = site.new([*x.shape[: span.axis], span.new, *x.shape[span.axis + 1 :]], F32, order, FINITE)
    axis = order.index(span.axis)
    sizes = [x.shape[a] for a in order]
    before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
    factor = pinned(np.ascontiguousarray(matrix).reshape(-1).view(np.uint8))
    old, new, work = span.old, span.new, 2 * before * after * span.old * span.new
    if after > 1:
        weights, src = _matrix((before, old, after)), _matrix((1, new, old))
        dst = _matrix((before, new, after))
        with threads_for(work):
            made = dnn.matmul(src, weights, None, dst)
        emit(site, made, {dnn.args.SRC: (src, factor), dnn.args.WEIGHTS: (weights, x), dnn.args.DST: (dst, y)}, (y,), "resize")
        return y
    src, dst = _matrix((before, old)), _matrix((before, new))
    weights = MemoryDesc.of(F32, (old, new), (1, old))
    with threads_for(work):
        made = dnn.matmul(src, weights, None, dst)
    emit(site, made, {dnn.args.SRC: (src, x), dnn.args.WEIGHTS: (weights, factor), dnn.args.DST: (dst, y)}, (y,), "resize")
    return y


def _matrix(shape: tuple[int, ...]) -> MemoryDesc:
    return MemoryDesc.of(F32, shape, [s // 4 for s in strides_of(shape, 4)])
