"""Sampling at places between the pixels: grids, affine grids, regions of interest."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .. import limits
from ..dtypes import NARROW_FLOATS
from ..errors import OperatorError
from ..operator import Array, Host, Ints, Xp, operator
from .resize import saturated

# --- GridSample -----------------------------------------------------------------------------------------------------

_MODES = {"bilinear": "linear", "linear": "linear", "bicubic": "cubic", "cubic": "cubic", "nearest": "nearest"}


def _reflect(xp: Xp, x: Array, low: float, high: float) -> Array:
    """`x` reflected at the borders until it lies between them."""
    if low == high:
        return xp.where(xp.isnan(x), x, low)
    span = high - low
    at = xp.mod(x - low, 2 * span)
    return low + xp.where(at > span, 2 * span - at, at)


def _taps(xp: Xp, x: Array, size: int, mode: str, padding: str, align: bool) -> list[tuple[Array, Array, Array]]:
    """What an axis reads at coordinates `x`: indices, whether they are inside, and weights (None: 1)."""
    low, high = (0.0, size - 1.0) if align else (-0.5, size - 0.5)
    if mode == "nearest":
        x = xp.rint(x)
    if padding == "zeros":
        x = xp.clip(x, -3, size + 2)  # further off nothing is read either, and infinity keeps its weights finite
    elif padding == "border":
        x = xp.where((x < low) | (x > high), xp.clip(x, 0, size - 1), x)
    else:
        x = xp.where((x < low) | (x > high), _reflect(xp, x, low, high), x)
    floor = xp.floor(x)
    t = x - floor
    taps: list[tuple[Array, Array]]
    if mode == "nearest":
        taps = [(x, None)]
    elif mode == "linear":
        taps = [(floor, 1 - t), (floor + 1, t)]
    else:
        a = -0.75
        near, far = t + 1, 2 - t
        taps = [
            (floor - 1, ((a * near - 5 * a) * near + 8 * a) * near - 4 * a),
            (floor, ((a + 2) * t - (a + 3)) * t * t + 1),
            (floor + 1, ((a + 2) * (1 - t) - (a + 3)) * (1 - t) * (1 - t) + 1),
            (floor + 2, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a),
        ]
    out = []
    for i, weight in taps:
        if padding == "reflection":
            i = _reflect(xp, i, low, high)
        inside = (i >= 0) & (i <= size - 1)
        i = xp.clip(xp.where(xp.isnan(i), 0, i), 0, size - 1).astype(np.int64)
        out.append((i, inside if padding == "zeros" else None, weight))
    return out


@operator("GridSample", 20, 22, widen=False)
def grid_sample(
    xp: Xp, x: Array, grid: Array, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Array:
    """A location outside the borders is moved first (to the border, or reflected); then its neighbours are."""
    kind = _MODES.get(mode)
    if kind is None or padding_mode not in ("zeros", "border", "reflection"):
        raise OperatorError(f"GridSample has no mode {mode!r} with padding_mode {padding_mode!r}", code="SX404")
    rank = x.ndim - 2
    if rank < 1 or grid.ndim != x.ndim or grid.shape[-1] != rank or grid.shape[0] != x.shape[0]:
        raise OperatorError(f"a grid of shape {grid.shape} does not fit an input of shape {x.shape}", code="SX404")
    n, c, sizes, places = x.shape[0], x.shape[1], x.shape[2:], grid.shape[1:-1]
    dtype = x.dtype
    if dtype.kind == "O" and (kind != "nearest" or padding_mode == "zeros"):
        raise OperatorError("strings can be sampled by nearest only, and not padded with zeros", code="SX404")
    if 0 in sizes:
        if padding_mode != "zeros" and 0 not in (n, c, *places):
            raise OperatorError(f"an input of shape {x.shape} has no border", code="SX404")
        return xp.zeros((n, c, *places), dtype)
    grid = grid.astype(np.float32) if grid.dtype in NARROW_FLOATS else grid
    work = dtype
    if kind != "nearest":
        work = np.dtype(np.float32) if dtype in NARROW_FLOATS else dtype if dtype.kind in "fc" else np.dtype(np.float64)
    limits.admit((n, c, *places), work)
    axes = []
    for axis, size in enumerate(sizes):
        at = grid[..., rank - 1 - axis].reshape(n, -1)  # the grid names the innermost axis first
        at = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        axes.append(_taps(xp, at, size, kind, padding_mode, bool(align_corners)))
    pixels = xp.moveaxis(x.astype(work).reshape(n, c, math.prod(sizes)), 1, -1)
    batch = xp.arange(n)[:, None]
    y = None
    for _, taps in zip(limits.rounds(math.prod(map(len, axes))), itertools.product(*axes), strict=True):
        index, inside, weight = 0, None, None
        for (i, within, w), size in zip(taps, sizes, strict=True):
            index = index * size + i
            inside = within if inside is None else inside & within
            weight = w if weight is None else weight * w
        term = pixels[batch, index]
        if inside is not None:
            term = xp.where(inside[..., None], term, xp.zeros((), work))
        if weight is not None:
            term = term * weight.astype(pixels.real.dtype)[..., None]
        y = term if y is None else y + term
    y = xp.moveaxis(y, -1, 1).reshape(n, c, *places)
    return y if work == dtype else saturated(xp, y, dtype)


@operator("GridSample", 16, widen=False)
def grid_sample_16(
    xp: Xp, x: Array, grid: Array, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Array:
    """Before opset 20 there were images only."""
    if x.ndim != 4:
        raise OperatorError(f"GridSample-16 takes 4 axes; there are {x.ndim}", code="SX404")
    return grid_sample(xp, x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@operator("AffineGrid", 20)
def affine_grid(xp: Xp, theta: Array, size: Host[Ints], *, align_corners: int = 0) -> Array:
    """A single pixel, whose corners coincide, stands at 0 as in PyTorch, which the text names."""
    rank = len(size) - 2
    if rank not in (2, 3) or theta.ndim != 3 or theta.shape[0] != size[0] or theta.shape[1:] != (rank, rank + 1):
        raise OperatorError(f"theta of shape {theta.shape} does not fit size {size}", code="SX404")
    if min(size) < 0:
        raise OperatorError(f"size {size} is negative", code="SX404")
    lengths = size[2:]
    limits.admit((size[0], *lengths, rank + 1), np.float64)
    lines = []
    for length in lengths:
        steps = 2 * xp.arange(length, dtype=np.float64) + 1 - length
        lines.append(steps / max(length - 1, 1) if align_corners else steps / max(length, 1))
    # x runs along the last axis: its coordinate comes first.
    places = [*reversed(xp.meshgrid(*lines, indexing="ij")), xp.ones(lengths, np.float64)]
    homogeneous = xp.stack(places, axis=-1).reshape(-1, rank + 1)
    grid = homogeneous @ xp.swapaxes(theta.astype(np.float64), 1, 2)
    return grid.reshape(size[0], *lengths, rank).astype(theta.dtype)


# --- RoiAlign -------------------------------------------------------------------------------------------------------

_CHUNK = 1 << 22
"""How many values are sampled at a time."""


def _bilinear(start: np.ndarray, length: np.ndarray, bins: int, count: int, size: int) -> tuple[np.ndarray, ...]:
    """Along one axis: `count` places in each bin of each region, as two indices, two weights, and whether they count.

    One pixel beyond the border still counts, as the border.
    """
    step = length / bins / max(count, 1)
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
        raise OperatorError(f"RoiAlign has no mode {mode!r} with {coordinate_transformation_mode!r}", code="SX404")
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 4 or batch_indices.shape != rois.shape[:1]:
        shapes = f"{tuple(x.shape)}, {rois.shape} and {batch_indices.shape}"
        raise OperatorError(f"RoiAlign takes N x C x H x W, R x 4 and R; the shapes are {shapes}", code="SX404")
    if output_height < 1 or output_width < 1 or sampling_ratio < 0:
        raise OperatorError("output_height and output_width are 1 or more, sampling_ratio is 0 or more", code="SX404")
    n, c, height, width = x.shape
    outside = (batch_indices < 0) | (batch_indices >= n)
    if outside.any():
        raise OperatorError(f"batch index {batch_indices[outside][0]} is outside [0, {n})", code="SX401")
    y = xp.zeros((len(rois), c, output_height, output_width), x.dtype)
    if y.size == 0 or x.size == 0:
        return y
    boxes = rois.astype(np.float64) * spatial_scale
    if not np.isfinite(boxes).all():
        raise OperatorError("a region of interest is not finite", code="SX404")
    aligned = coordinate_transformation_mode == "half_pixel"
    left, top = boxes[:, 0] - 0.5 * aligned, boxes[:, 1] - 0.5 * aligned
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    if not aligned:  # then a region has at least one pixel
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
            continue  # a region without extent: nothing is sampled, and the average of nothing is 0
        limits.admit((output_height * rows, output_width * columns, c), np.float64)
        group = np.flatnonzero((counts == (rows, columns)).all(axis=1))
        size = max(1, _CHUNK // (c * rows * columns * output_height * output_width))
        for some in (group[i : i + size] for i in range(0, len(group), size)):
            down = _bilinear(top[some], high[some], output_height, rows, height)
            across = _bilinear(left[some], wide[some], output_width, columns, width)
            y[xp.asarray(some)] = _pool(xp, pixels, batch_indices[some], down, across, rows, columns, mode)
    return y


def _pool(
    xp: Xp, pixels: Array, batch: np.ndarray, down: tuple[np.ndarray, ...], across: tuple[np.ndarray, ...],
    rows: int, columns: int, mode: str,
) -> Array:  # fmt: skip
    """Bins of some regions: R x C x bins down x bins across.

    The text wants the greatest of the interpolated values; ONNX's case has held, in every release, the greatest of
    the four weighted pixels that would be added for one.  The case is what models were checked against.
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
    """Before opset 16 coordinates were not shifted by half a pixel."""
    return roi_align(
        xp, x, rois, batch_indices, coordinate_transformation_mode="output_half_pixel", mode=mode, output_height=output_height,
        output_width=output_width, sampling_ratio=sampling_ratio, spatial_scale=spatial_scale,
    )  # fmt: skip
