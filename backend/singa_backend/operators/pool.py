"""Pooling: a window is a product of intervals, so one axis is pooled after another, a strided slice at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from .. import limits
from ..errors import OperatorError
from ..operator import Array, Host, Ints, Wanted, Xp, operator
from ._windows import Windows, spatial, windows


def slices(at: Windows, axis: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """`Windows.taps` as indices of an output and of an input whose axes before this spatial axis are taken whole."""
    before = (slice(None),) * (2 + axis)
    for _, here, there in at.taps(axis):
        yield (*before, here), (*before, there)


def pool(xp: Xp, x: Array, at: Windows, combine: Callable[..., Array], empty: float) -> Array:
    """Every window's cells combined two by two; a window of nothing but padding holds `empty`."""
    for axis, count in enumerate(at.counts):
        whole = slice(0, count)
        steps = sorted(slices(at, axis), key=lambda step: step[0][-1] != whole)  # what reaches every window comes first
        if steps and steps[0][0][-1] == whole:
            y = x[steps.pop(0)[1]].copy()
        else:
            y = xp.full((*x.shape[: 2 + axis], count, *x.shape[3 + axis :]), empty, dtype=x.dtype)
        for here, there in steps:
            combine(y[here], x[there], out=y[here])
        x = y
    return x


# --- mean -----------------------------------------------------------------------------------------------------------


def divisors(at: Windows, count_include_pad: int) -> np.ndarray:
    """How many cells each window averages.  What overhangs the padding (ceil_mode) never counts."""
    if count_include_pad:
        sizes = tuple(map(sum, zip(at.begins, at.sizes, at.ends, strict=True)))
        none = (0,) * len(sizes)
        at = Windows(sizes, at.kernel, at.strides, at.dilations, none, none, at.counts)
    limits.admit(at.counts, np.float64)
    total = np.ones((1,) * len(at.counts))
    for axis, count in enumerate(at.counts):
        cells = np.zeros(count)
        for _, here, _ in at.taps(axis):
            cells[here] += 1
        total = total * cells.reshape(-1, *(1,) * (len(at.counts) - axis - 1))
    return total


@operator("AveragePool", 1, 7, 10, 11, 19, 22)
def average_pool(xp: Xp, x: Array, *, kernel_shape: Ints, auto_pad: str = "NOTSET", ceil_mode: int = 0,
                 count_include_pad: int = 0, dilations: Ints | None = None, pads: Ints | None = None,
                 strides: Ints | None = None) -> Array:  # fmt: skip
    """The mean of each window's cells, without the padding unless count_include_pad (which came with 7)."""
    at = windows(spatial(x), kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    total = pool(xp, x, at, xp.add, 0)
    count = divisors(at, count_include_pad).astype(x.dtype)
    return total / (xp.asarray(count) if count.size == 0 or (count != count.flat[0]).any() else count.flat[0])


@operator("GlobalAveragePool", 1, 22)
def global_average_pool(xp: Xp, x: Array) -> Array:
    return x.mean(axis=tuple(range(2, 2 + len(spatial(x)))), keepdims=True)


# --- maximum --------------------------------------------------------------------------------------------------------


def lowest(dtype: np.dtype) -> float:
    """What never wins a maximum."""
    return -math.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)


def argmax_pool(xp: Xp, x: Array, at: Windows) -> tuple[Array, Array]:
    """The largest cell of each window, and its number in row-major order; of equals, and of NaN, the first counts.

    The number is -1 where a window holds nothing but padding.
    """
    index = xp.broadcast_to(xp.arange(math.prod(at.sizes), dtype=np.int64).reshape(1, 1, *at.sizes), x.shape)
    for axis in reversed(range(len(at.counts))):  # the last axis first: the first of equals in each row, then the first row
        shape = (*x.shape[: 2 + axis], at.counts[axis], *x.shape[3 + axis :])
        y, where = xp.full(shape, lowest(x.dtype), dtype=x.dtype), xp.full(shape, -1, dtype=np.int64)
        for here, there in slices(at, axis):
            better = ~(x[there] <= y[here]) & (y[here] == y[here])  # also a NaN that meets a number
            better |= (where[here] < 0) & (index[there] >= 0)
            xp.copyto(y[here], x[there], where=better)
            xp.copyto(where[here], index[there], where=better)
        x, index = y, where
    return x, index


def column_major(xp: Xp, index: Array, sizes: Ints) -> Array:
    """The same cells numbered in column-major order: the first coordinate runs fastest."""
    out, stride = xp.zeros_like(index), math.prod(sizes)
    for size in reversed(sizes):
        stride //= max(1, size)
        out, index = out + index % size * stride, index // size
    return out


@operator("MaxPool", 1, 8, 10, 11, 12, 22)
def max_pool(xp: Xp, x: Array, *, kernel_shape: Ints, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Ints | None = None,
             pads: Ints | None = None, storage_order: int = 0, strides: Ints | None = None,
             wanted: Wanted = (True,)) -> Array | tuple[Array, Array]:  # fmt: skip
    """The largest cell of each window (NaN where there is one); the padding never wins.

    Indices number the cells of the whole tensor, one plane after another; storage_order 1 numbers each plane by columns.
    """
    at = windows(spatial(x), kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    if storage_order not in (0, 1):
        raise OperatorError(f"storage_order {storage_order} is neither 0 (rows) nor 1 (columns)", code="SX404")
    if not any(wanted[1:]):
        return pool(xp, x, at, xp.maximum, lowest(x.dtype))
    y, index = argmax_pool(xp, x, at)
    planes = xp.arange(math.prod(x.shape[:2]), dtype=np.int64).reshape(*x.shape[:2], *(1,) * len(at.sizes))
    cell = column_major(xp, index, at.sizes) if storage_order else index
    return y, xp.where(index < 0, -1, cell + planes * math.prod(at.sizes))


@operator("GlobalMaxPool", 1, 22)
def global_max_pool(xp: Xp, x: Array) -> Array:
    return x.max(axis=tuple(range(2, 2 + len(spatial(x)))), keepdims=True)


@operator("MaxUnpool", 9, 11, 22)
def max_unpool(xp: Xp, x: Array, index: Array, output_shape: Host[Ints] | None = None, *, kernel_shape: Ints,
               pads: Ints | None = None, strides: Ints | None = None) -> Array:  # fmt: skip
    """Each cell goes back to where MaxPool found it; all else is 0.

    The indices number the cells of the tensor that kernel, strides and pads lead back to.  `output_shape` makes the pads
    instead, but pads only take away: what it asks for beyond stands as zeros behind (maxunpool_export_with_output_shape).
    """
    rank = len(spatial(x))
    if index.shape != x.shape:
        raise OperatorError(f"the indices have shape {index.shape}, the values {x.shape}", code="SX404")
    at = windows(kernel_shape, kernel_shape, strides, None if output_shape is not None else pads, None)
    full = tuple((size - 1) * s + k for size, s, k in zip(x.shape[2:], at.strides, at.kernel, strict=True))
    if output_shape is None:
        inner = shape = (*x.shape[:2], *(f - b - e for f, b, e in zip(full, at.begins, at.ends, strict=True)))
        if min(inner[2:]) < 0:
            raise OperatorError(f"pads {at.begins} and {at.ends} take away more than there is, {full}", code="SX404")
    else:
        shape = output_shape
        if len(shape) != x.ndim or shape[:2] != x.shape[:2] or min(shape[2:]) < 0:
            raise OperatorError(f"output_shape {shape} does not fit x of shape {x.shape}", code="SX404")
        inner = (*shape[:2], *map(min, shape[2:], full))
    y = xp.zeros(math.prod(inner), dtype=x.dtype)
    xp.scatter(y, (xp.indices(index.reshape(-1), y.size, negative=False),), x.reshape(-1))
    y = y.reshape(inner)
    if shape == inner:
        return y
    out = xp.zeros(shape, dtype=x.dtype)
    out[(..., *(slice(0, size) for size in inner[-rank:]))] = y
    return out


@operator("MaxRoiPool", 1, 22)
def max_roi_pool(xp: Xp, x: Array, rois: Host[np.ndarray], *, pooled_shape: Ints, spatial_scale: float = 1.0) -> Array:
    """Each region (batch, x1, y1, x2, y2), ends included, cut into cells that share their borders; an empty cell holds 0.

    Corners are rounded half away from zero, and a region has at least one cell.
    """
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 5 or len(pooled_shape) != 2 or min(pooled_shape) < 1:
        raise OperatorError(f"x must be N x C x H x W, rois R x 5, pooled_shape 2 sizes; there are {x.shape}, {rois.shape} and "
                            f"{tuple(pooled_shape)}", code="SX404")  # fmt: skip
    y = xp.zeros((len(rois), x.shape[1], *pooled_shape), dtype=x.dtype)
    scaled = rois[:, 1:].astype(np.float64) * spatial_scale
    if not np.isfinite(scaled).all() or not np.isfinite(rois[:, 0]).all():
        raise OperatorError("a region is not finite", code="SX404")
    corners = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int64)
    limits.check_rounds(len(rois) * math.prod(pooled_shape))
    for r, (x1, y1, x2, y2) in zip(limits.rounds(len(rois)), corners.tolist(), strict=True):
        batch = int(rois[r, 0])
        if not 0 <= batch < x.shape[0]:
            raise OperatorError(f"region {r} is of image {batch}; there are {x.shape[0]}", code="SX401")
        across = roi_bins(x1, x2, pooled_shape[1], x.shape[3])
        for i, (top, bottom) in enumerate(roi_bins(y1, y2, pooled_shape[0], x.shape[2])):
            if top < bottom:
                rows = x[batch, :, top:bottom].max(axis=1)
                for j, (left, right) in enumerate(across):
                    if left < right:
                        y[r, :, i, j] = rows[:, left:right].max(axis=1)
    return y


def roi_bins(low: int, high: int, count: int, size: int) -> list[tuple[int, int]]:
    """The interval [low, high] in `count` bins, each from the floor of its start to the ceiling of its end, within the image."""
    length = max(high - low + 1, 1)
    ends = ((low + i * length // count, low - (-(i + 1) * length // count)) for i in range(count))
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in ends]


# --- norms ----------------------------------------------------------------------------------------------------------


def powers(xp: Xp, x: Array, p: float) -> Array:
    """|x|**p; raises OperatorError for a p that makes no norm."""
    if not 0 < p < math.inf:
        raise OperatorError(f"p {p} makes no norm: it must be positive and finite", code="SX404")
    return xp.abs(x) if p == 1 else x * x if p == 2 else xp.abs(x) ** p


def root(xp: Xp, total: Array, p: float) -> Array:
    return total if p == 1 else xp.sqrt(total) if p == 2 else total ** (1 / p)


@operator("LpPool", 1, 2, 11, 18, 22)
def lp_pool(xp: Xp, x: Array, *, kernel_shape: Ints | None = None, auto_pad: str = "NOTSET", ceil_mode: int = 0,
            dilations: Ints | None = None, p: float = 2, pads: Ints | None = None,
            strides: Ints | None = None) -> Array:  # fmt: skip
    """The p-norm of each window, the padding being 0.  Version 1 lets kernel_shape be absent and does not say what that means."""
    if not kernel_shape:
        raise OperatorError("LpPool needs a kernel_shape", code="SX404")
    at = windows(spatial(x), kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    return root(xp, pool(xp, powers(xp, x, p), at, xp.add, 0), p)


@operator("GlobalLpPool", 1, 2, 22)
def global_lp_pool(xp: Xp, x: Array, *, p: float = 2) -> Array:
    """Version 1 has a float p; later ones an integer."""
    return root(xp, powers(xp, x, p).sum(axis=tuple(range(2, 2 + len(spatial(x)))), keepdims=True), p)
