"""Pooling over regions of interest: RoiAlign interpolates between pixels, MaxRoiPool pools cells of pixels."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .. import limits
from ..devices.namespaces import Xp, host
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, operator
from ._api import Array
from ._common import length

# --- RoiAlign -------------------------------------------------------------------------------------------------------

_CHUNK = 1 << 22
"""Number of values sampled at a time on the host."""
_ARRAYS = 8
"""Approximate number of arrays of the samples that exist at once."""


def _bilinear(start: np.ndarray, extent: np.ndarray, bins: int, count: int, size: int) -> tuple[np.ndarray, ...]:
    """Return `count` places along one axis of each bin of each region: two indices, two weights, whether they count.

    Places up to one pixel beyond the border count, with the value of the border.
    """
    step = extent / bins / max(count, 1)
    at = start[:, None] + (np.arange(bins * count) + 0.5) * step[:, None]
    inside = (at >= -1) & (at <= size)
    at = np.clip(np.where(inside, at, 0), 0, size - 1)
    low = np.floor(at).astype(np.int64)
    t = at - low
    return low, np.minimum(low + 1, size - 1), 1 - t, t, inside


@operator("RoiAlign", 16, 22)
def roi_align(
    xp: Xp,
    x: Array,
    rois: Host[np.ndarray],
    batch_indices: Host[np.ndarray],
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    if mode not in ("avg", "max") or coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        both = f"{mode!r} and {coordinate_transformation_mode!r}"
        known = "avg or max and coordinate_transformation_mode half_pixel or output_half_pixel"
        raise OperatorError(f"mode must be {known}, got {both}", code="SX404")
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 4 or batch_indices.shape != rois.shape[:1]:
        shapes = f"{tuple(x.shape)}, {rois.shape} and {batch_indices.shape}"
        raise OperatorError(f"the inputs must have shapes N x C x H x W, R x 4 and R, got {shapes}", code="SX404")
    if output_height < 1 or output_width < 1 or sampling_ratio < 0:
        got = f"{output_height}, {output_width} and {sampling_ratio}"
        rule = "output_height and output_width must be at least 1 and sampling_ratio at least 0"
        raise OperatorError(f"{rule}, got {got}", code="SX404")
    n, c, height, width = x.shape
    outside = (batch_indices < 0) | (batch_indices >= n)
    if outside.any():
        raise OperatorError(f"a batch index must be in [0, {n}), got {batch_indices[outside][0]}", code="SX401")
    y = xp.zeros((len(rois), c, output_height, output_width), x.dtype)
    if y.size == 0 or x.size == 0:
        return y
    boxes = rois.astype(np.float64) * spatial_scale
    if not np.isfinite(boxes).all():
        raise OperatorError("regions of interest must be finite", code="SX404")
    aligned = coordinate_transformation_mode == "half_pixel"
    left, top = boxes[:, 0] - 0.5 * aligned, boxes[:, 1] - 0.5 * aligned
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    if not aligned:  # in this mode a region has at least one pixel
        wide, high = np.maximum(wide, 1), np.maximum(high, 1)
    if sampling_ratio:
        counts = np.full((len(rois), 2), sampling_ratio)
    else:
        needed = np.maximum(np.ceil(np.stack([high / output_height, wide / output_width], axis=1)), 0)
        limits.admit_bytes(int(needed.max(initial=0)), "the samples of a region")
        counts = needed.astype(np.int64)
    pixels = xp.moveaxis(x, 1, -1)
    for rows, columns in np.unique(counts, axis=0).tolist():
        if not rows or not columns:
            continue  # an empty region: nothing is sampled, and the average is 0
        limits.admit((output_height * rows, output_width * columns, c), np.float64)
        group = np.flatnonzero((counts == (rows, columns)).all(axis=1))
        each = c * rows * columns * output_height * output_width
        size = max(1, xp.block_elements(len(group) * each, _ARRAYS * x.dtype.itemsize, _CHUNK) // each)
        for some in (group[i : i + size] for i in limits.blocks(len(group), size)):
            down = _bilinear(top[some], high[some], output_height, rows, height)
            across = _bilinear(left[some], wide[some], output_width, columns, width)
            y[xp.asarray(some)] = _pool(xp, pixels, batch_indices[some], down, across, rows, columns, mode)
    return y


def _pool(
    xp: Xp,
    pixels: Array,
    batch: np.ndarray,
    down: tuple[np.ndarray, ...],
    across: tuple[np.ndarray, ...],
    rows: int,
    columns: int,
    mode: str,
) -> Array:
    """Compute the bins of some regions: R x C x vertical bins x horizontal bins.

    The specification of mode max is the maximum of the interpolated values; ONNX's test case has, in every release, the
    maximum of the four weighted pixels whose sum is an interpolated value.  Models were checked against the test case.
    """
    y0, y1, hy, ly, within = (xp.asarray(a[:, :, None]) for a in down)
    x0, x1, hx, lx, beside = (xp.asarray(a[:, None, :]) for a in across)
    image = xp.asarray(batch[:, None, None])
    terms = [
        pixels[image, i, j] * (v * w)[..., None].astype(pixels.dtype)
        for i, v in ((y0, hy), (y1, ly))
        for j, w in ((x0, hx), (x1, lx))
    ]
    if mode == "max":
        total = xp.maximum(xp.maximum(terms[0], terms[1]), xp.maximum(terms[2], terms[3]))
    else:
        total = terms[0] + terms[1] + terms[2] + terms[3]
    total = xp.where((within & beside)[..., None], total, 0)
    r, tall, broad, c = total.shape
    bins = total.reshape(r, tall // rows, rows, broad // columns, columns, c)
    return xp.moveaxis(bins.mean(axis=(2, 4)) if mode == "avg" else bins.max(axis=(2, 4)), -1, 1)


@roi_align.decomposition
def align_in_parts(
    op: Op,
    x: V,
    rois: V,
    batch_indices: V,
    coordinate_transformation_mode: str,
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> V:
    """An average is two matrix products: the weights of a place are the products of its row's and its column's weights."""
    aligned = coordinate_transformation_mode == "half_pixel"
    boxes = op.Mul(op.cast(rois, x), spatial_scale)
    image = op.Gather(x, batch_indices, axis=0)
    down = _axis(op, image, boxes, 1, output_height, aligned, sampling_ratio)
    across = _axis(op, image, boxes, 0, output_width, aligned, sampling_ratio)
    if mode == "avg":
        rows = op.Unsqueeze(down.averages(op), [1])
        columns = op.Unsqueeze(across.averages(op), [1])
        return op.MatMul(op.MatMul(rows, image), op.swap(columns))
    return _greatest(op, image, down, across)


class _Axis(NamedTuple):
    """The weights of the samples of each bin along an axis.

    Attributes:
        lower: R x bins x samples x size, the weight of the pixel at or before each sample.
        upper: R x bins x samples x size, the weight of the pixel after each sample.
        counts: R x 1 x samples, whether the region has this sample.
        total: R, the number of samples of the region.
    """

    lower: V
    upper: V
    counts: V
    total: V

    def averages(self, op: Op) -> V:
        """Return the mean weight of each pixel, R x bins x size; 0 without samples."""
        weights = op.Where(op.Unsqueeze(self.counts, [3]), op.Add(self.lower, self.upper), 0)
        return op.Div(op.ReduceSum(weights, [2], keepdims=0), op.Unsqueeze(op.Max(op.cast(self.total, weights), 1), [1, 2]))


def _axis(op: Op, image: V, boxes: V, axis: int, bins: int, aligned: bool, ratio: int) -> _Axis:
    start, end = (op.Gather(boxes, axis + k, axis=1) for k in (0, 2))
    size = length(op, image, 3 - axis)
    extent = op.Sub(end, start)
    if not aligned:
        extent = op.Max(extent, 1)
    width = op.Div(extent, bins)
    total = op.full_like(width, ratio) if ratio else op.Max(op.Ceil(width), 0)
    most = op.Cast(op.ReduceMax(op.Concat(total, op.constant([1], op.dtype(total)), axis=0), keepdims=0), to=7)
    sample = op.cast(op.Range(0, most, 1), start)
    step = op.Div(width, op.Max(total, 1))

    def per_region(v: V) -> V:
        return op.Unsqueeze(v, [1, 2])

    first = op.constant(host.arange(bins, dtype=np.float64)[:, None], op.dtype(start))
    number = op.Add(op.Mul(first, per_region(total)), op.Add(sample, 0.5))
    begin = op.Sub(start, 0.5) if aligned else start
    at = op.Add(per_region(begin), op.Mul(number, per_region(step)))
    top = op.cast(op.Sub(size, 1), at)
    inside = op.And(op.GreaterOrEqual(at, -1), op.LessOrEqual(at, op.Add(top, 1)))  # up to one pixel beyond counts as the border
    at = op.Min(op.Max(op.Where(inside, at, 0), 0), top)
    low = op.Floor(at)
    share = op.Sub(at, low)
    pixel = op.cast(op.Range(0, size, 1), at)
    weights = []
    for i, w in ((low, op.Sub(1, share)), (op.Min(op.Add(low, 1), top), share)):
        here = op.And(op.Equal(op.Unsqueeze(i, [3]), pixel), op.Unsqueeze(inside, [3]))
        weights.append(op.Where(here, op.Unsqueeze(w, [3]), 0))
    return _Axis(weights[0], weights[1], op.Less(sample, per_region(total)), total)


def _greatest(op: Op, image: V, down: _Axis, across: _Axis) -> V:
    """Return the maximum weighted pixel of each bin, without samples that a region does not have."""
    rows, columns = ([_flat(op, w) for w in (along.lower, along.upper)] for along in (down, across))
    best = op.Max(*(op.MatMul(op.MatMul(r, image), op.swap(c)) for r in rows for c in columns))
    bins = op.Concat(op.Shape(down.lower, start=1, end=3), op.Shape(across.lower, start=1, end=3), axis=0)
    best = op.Reshape(best, op.Concat(op.Shape(image, end=2), bins, axis=0), allowzero=1)
    has = op.And(op.Unsqueeze(down.counts, [1, 4, 5]), op.Unsqueeze(across.counts, [1, 2, 3]))
    best = op.ReduceMax(op.Where(has, best, op.constant(-np.inf, op.dtype(best))), [3, 5], keepdims=0)
    some = op.Greater(op.Mul(down.total, across.total), 0)
    return op.Where(op.Unsqueeze(some, [1, 2, 3]), best, 0)


def _flat(op: Op, weights: V) -> V:
    """Reshape to R x 1 x (bins x samples) x size: a row for each sample, with the weight of its pixel."""
    count = op.ReduceProd(op.Shape(weights, start=1, end=3), keepdims=1)
    shape = op.Concat(op.Shape(weights, end=1), [1], count, op.Shape(weights, start=3), axis=0)
    return op.Reshape(weights, shape, allowzero=1)


@operator("RoiAlign", 10)
def roi_align_10(
    xp: Xp,
    x: Array,
    rois: Host[np.ndarray],
    batch_indices: Host[np.ndarray],
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    """Before opset 16 coordinates are not shifted by half a pixel."""
    return roi_align(
        xp,
        x,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


@roi_align_10.decomposition
def roi_align_10_decomposition(
    op: Op,
    x: V,
    rois: V,
    batch_indices: V,
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> V:
    return op.RoiAlign(
        x,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


# --- MaxRoiPool ------------------------------------------------------------------------------------------------------


@operator("MaxRoiPool", 1, 22)
def max_roi_pool(xp: Xp, x: Array, rois: Host[np.ndarray], *, pooled_shape: Ints, spatial_scale: float = 1.0) -> Array:
    """Split each region (batch, x1, y1, x2, y2), ends included, into cells that share borders; an empty cell has value 0.

    Corners are rounded half away from zero, and a region has at least one cell.
    """
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 5 or len(pooled_shape) != 2 or min(pooled_shape) < 1:
        raise OperatorError(
            f"x must have shape N x C x H x W, rois R x 5, and pooled_shape 2 positive sizes, got {x.shape}, {rois.shape} and "
            f"{tuple(pooled_shape)}",
            code="SX404",
        )
    y = xp.zeros((len(rois), x.shape[1], *pooled_shape), dtype=x.dtype)
    scaled = rois[:, 1:].astype(np.float64) * spatial_scale
    if not np.isfinite(scaled).all() or not np.isfinite(rois[:, 0]).all():
        raise OperatorError("regions must be finite", code="SX404")
    corners = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int64)
    limits.check_rounds(len(rois) * math.prod(pooled_shape))
    for r, (x1, y1, x2, y2) in zip(limits.rounds(len(rois)), corners.tolist(), strict=True):
        batch = int(rois[r, 0])
        if not 0 <= batch < x.shape[0]:
            raise OperatorError(f"the batch index of region {r} must be in [0, {x.shape[0]}), got {batch}", code="SX401")
        across = roi_bins(x1, x2, pooled_shape[1], x.shape[3])
        for i, (top, bottom) in enumerate(roi_bins(y1, y2, pooled_shape[0], x.shape[2])):
            if top < bottom:
                rows = x[batch, :, top:bottom].max(axis=1)
                for j, (left, right) in enumerate(across):
                    if left < right:
                        y[r, :, i, j] = rows[:, left:right].max(axis=1)
    return y


def roi_bins(low: int, high: int, count: int, size: int) -> list[tuple[int, int]]:
    """Split [low, high] into `count` bins, each from the floor of its start to the ceiling of its end, clipped to the image."""
    length = max(high - low + 1, 1)
    ends = ((low + i * length // count, low - (-(i + 1) * length // count)) for i in range(count))
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in ends]


@max_roi_pool.decomposition
def max_roi_pool_decomposition(op: Op, x: V, rois: V, pooled_shape: Ints, spatial_scale: float) -> V:
    """Reduce rows, then columns; equal maxima share the gradient."""
    number = op.Cast(op.Gather(rois, 0, axis=1), to=7)
    scaled = op.Mul(op.cast(rois, x), spatial_scale)
    whole = op.Cast(op.Mul(op.Sign(scaled), op.Floor(op.Add(op.Abs(scaled), 0.5))), to=7)
    image = op.Gather(x, number, axis=0)
    lowest = op.constant(-np.inf, op.dtype(x))
    masks = []
    for axis, bins in enumerate(pooled_shape):
        low, high = (op.Unsqueeze(op.Gather(whole, k - axis, axis=1), [1]) for k in (2, 4))
        size = op.Max(op.Add(op.Sub(high, low), 1), 1)
        cell = op.constant(host.arange(bins, dtype=np.int64)[None])
        begin = op.Add(low, op.Div(op.Mul(cell, size), bins))
        end = op.Add(low, op.Div(op.Add(op.Mul(op.Add(cell, 1), size), bins - 1), bins))
        pixel = op.Range(0, length(op, x, axis + 2), 1)
        masks.append(op.And(op.GreaterOrEqual(pixel, op.Unsqueeze(begin, [2])), op.Less(pixel, op.Unsqueeze(end, [2]))))
    rows, columns = masks  # R x bins x size
    tall = op.ReduceMax(op.Where(op.Unsqueeze(rows, [1, 4]), op.Unsqueeze(image, [2]), lowest), [3], keepdims=0)
    best = op.ReduceMax(op.Where(op.Unsqueeze(columns, [1, 2]), op.Unsqueeze(tall, [3]), lowest), [4], keepdims=0)
    return op.Where(op.Equal(best, lowest), 0, best)
