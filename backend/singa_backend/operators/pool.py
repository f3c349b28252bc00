"""Pooling: a window is a product of intervals, so axes are pooled one after the other, a strided slice at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp, host
from ..devices.sums import BLOCK, LONG
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, Wanted, operator
from ..ir.windows import SAME, Windows, per_axis, windows
from ._api import Array
from ._flops import each_input, pooled
from ._shapes import pooled_shapes, pooled_to_one
from ._windows import before, cells, framed, places, spatial, unframed


def slices(at: Windows, axis: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield `Windows.taps` as indices of an output and of an input, with full slices for the axes before this one."""
    before = (slice(None),) * (2 + axis)
    for _, here, there in at.taps(axis):
        yield (*before, here), (*before, there)


def pool(xp: Xp, x: Array, at: Windows, combine: Callable[..., Array], empty: float) -> Array:
    """Combine the cells of each window pairwise; a window that contains only padding has the value `empty`."""
    for axis, count in enumerate(at.counts):
        whole = slice(0, count)
        steps = sorted(slices(at, axis), key=lambda step: step[0][-1] != whole)  # offsets that reach every window come first
        first, *groups = [steps] if len(steps) < LONG else [steps[i : i + BLOCK] for i in range(0, len(steps), BLOCK)]
        shape = (*x.shape[: 2 + axis], count, *x.shape[3 + axis :])
        y = _combined(xp, x, first, shape, combine, empty)
        for group in groups:  # rounding errors of so many terms would add up
            combine(y, _combined(xp, x, group, shape, combine, empty), out=y)
        x = y
    return x


def _combined(xp: Xp, x: Array, steps: Sequence[Any], shape: Ints, combine: Callable[..., Array], empty: float) -> Array:
    """Combine cells of each window along an axis, one after the other."""
    if steps and steps[0][0][-1] == slice(0, shape[len(steps[0][0]) - 1]):
        (_, there), *steps = steps
        y = x[there].copy()
    else:
        y = xp.full(shape, empty, dtype=x.dtype)
    for here, there in steps:
        combine(y[here], x[there], out=y[here])
    return y


# --- mean -----------------------------------------------------------------------------------------------------------


def divisors(at: Windows, count_include_pad: int) -> np.ndarray:
    """Return the number of cells that each window averages; cells beyond the padding (ceil_mode) do not count."""
    if count_include_pad:
        sizes = tuple(map(sum, zip(at.begins, at.sizes, at.ends, strict=True)))
        none = (0,) * len(sizes)
        at = Windows(sizes, at.kernel, at.strides, at.dilations, none, none, at.counts)
    limits.admit(at.counts, np.float64)
    total = np.ones((1,) * len(at.counts))
    for axis in range(len(at.counts)):
        total = total * at.cells(axis).reshape(-1, *(1,) * (len(at.counts) - axis - 1))
    return total


@operator("AveragePool", 1, 7, 10, 11, 19, 22, traits=("pools",))
def average_pool(
    xp: Xp,
    x: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Return the mean of each window's cells, without the padding unless count_include_pad (version 7 or later)."""
    at = windows(spatial(x), kernel_shape, strides, pads, dilations, auto_pad, ceil_mode, partial=True)
    total = pool(xp, x, at, xp.add, 0)
    count = divisors(at, count_include_pad).astype(x.dtype)
    return total / (xp.asarray(count) if count.size == 0 or (count != count.flat[0]).any() else count.flat[0])


average_pool.flops(pooled)
average_pool.shapes(pooled_shapes)


@average_pool.gradient
def average_pool_gradient(
    op: Op,
    dy: V,
    x: V,
    kernel_shape: Ints,
    auto_pad: str,
    count_include_pad: int,
    dilations: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    """The gradient of each cell is the sum of its shares of all windows that average it."""
    over = _Over(op, x, dy, kernel_shape, auto_pad, dilations, pads, strides)
    return over.back(op.Div(dy, over.sizes(count_include_pad)))


class _Over:
    """Windows over x in ONNX operators; each channel is a sample."""

    def __init__(
        self, op: Op, x: V, y: V, kernel: Ints, auto_pad: str, dilations: Ints | None, pads: Ints | None, strides: Ints | None
    ) -> None:
        rank = len(kernel)
        self.op, self.x, self.y, self.rank = op, x, y, rank
        self.strides, self.dilations = per_axis("strides", strides, rank), per_axis("dilations", dilations, rank)
        self.kernel_shape, self.kernel = kernel, op.constant(kernel, np.int64)
        self.begins = before(op, x, y, self.kernel, self.strides, self.dilations, pads, auto_pad)
        self.ones = op.constant(host.ones((1, 1, *kernel), np.float64), op.dtype(x))
        self.ends = op.constant(tuple(pads)[rank:] if pads and auto_pad not in ("VALID", *SAME) else (0,) * rank, np.int64)
        self.same = auto_pad in SAME

    def _alone(self, x: V) -> V:
        op = self.op
        return op.Reshape(x, op.Concat([-1, 1], cells(op, x), axis=0)) if op.rank(x) else x

    def sizes(self, count_include_pad: int) -> V:
        """Return the number of cells that each window averages, as 1 x 1 x ...; cells beyond the padding do not count."""
        op = self.op
        area = cells(op, self.x)
        begins = self.begins
        if count_include_pad and self.same:
            return op.constant(np.array(math.prod(self.kernel_shape)), op.dtype(self.x))
        if count_include_pad:
            area, begins = op.Add(op.Add(area, begins), self.ends), op.constant((0,) * self.rank, np.int64)
        ones = op.Expand(op.constant(1, op.dtype(self.x)), op.Concat([1, 1], area, axis=0))
        seen = framed(op, ones, self.y, self.kernel, self.strides, self.dilations, begins)
        return op.Conv(seen, self.ones, strides=self.strides, dilations=self.dilations)

    def back(self, dy: V) -> V:
        """Add the value of each window to the cells that it reads."""
        op = self.op
        z = op.ConvTranspose(self._alone(dy), self.ones, strides=self.strides, dilations=self.dilations)
        return op.Reshape(unframed(op, z, self.x, self.begins), op.Shape(self.x), allowzero=1)


@operator("GlobalAveragePool", 1, 22, traits=("pools", "finite"))
def global_average_pool(xp: Xp, x: Array) -> Array:
    """An axis without cells has the average 0 / 0; NumPy's mean would warn."""
    axes = tuple(range(2, 2 + len(spatial(x))))
    return xp.sum_over(x, axes, True) / xp.count(x, axes)


global_average_pool.flops(each_input(1))
global_average_pool.shapes(pooled_to_one)


@global_average_pool.gradient
def global_average_pool_gradient(op: Op, dy: V, x: V) -> V:
    count = op.ReduceProd(cells(op, x), keepdims=0)
    return op.Expand(op.Div(dy, op.cast(count, x)), op.Shape(x))


# --- maximum --------------------------------------------------------------------------------------------------------


def lowest(dtype: np.dtype) -> float:
    """Return the neutral value of the maximum."""
    return -math.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)


def argmax_pool(xp: Xp, x: Array, at: Windows) -> tuple[Array, Array]:
    """Return the maximum of each window and its row-major index; of equal cells, and of NaN, the first one counts.

    The index is -1 if a window contains only padding.
    """
    cells = math.prod(at.kernel)
    small = np.uint8 if cells <= 256 else np.int64
    code = xp.zeros((1,) * x.ndim, dtype=small)  # offset of the maximum in the kernel, row-major
    code = xp.broadcast_to(code, x.shape)
    nans = xp.may_hold_nan(x)
    inner = 1
    for axis in reversed(range(len(at.counts))):  # last axis first: the first of equals in each row, then the first row
        shape = (*x.shape[: 2 + axis], at.counts[axis], *x.shape[3 + axis :])
        y, best = xp.full(shape, lowest(x.dtype), dtype=x.dtype), xp.zeros(shape, dtype=small)
        whole, begun = (slice(None),) * (2 + axis), at.counts[axis]
        for j, here, there in at.taps(axis):  # later offsets have larger codes and reach windows that start earlier
            seen, mine = x[(*whole, there)], code[(*whole, there)] + small(j * inner)
            fresh = max(0, min(begun, here.stop) - here.start)  # windows that no previous offset reached
            new, old = (*whole, slice(here.start, here.start + fresh)), (*whole, slice(here.start + fresh, here.stop))
            y[new], best[new] = seen[(*whole, slice(0, fresh))], mine[(*whole, slice(0, fresh))]
            seen, mine = seen[(*whole, slice(fresh, None))], mine[(*whole, slice(fresh, None))]
            better = seen > y[old]
            if nans:
                better |= (seen != seen) & (y[old] == y[old])
            xp.maximum(y[old], seen, out=y[old])
            xp.maximum(best[old], mine * better, out=best[old])
            begun = min(begun, here.start)
        x, code, inner = y, best, inner * at.kernel[axis]
    return x, _numbered(xp, code, at)


def _numbered(xp: Xp, code: Array, at: Windows) -> Array:
    """Convert kernel offsets to cell indices: a table for window 0, plus the distance of each window from it."""
    limits.admit(at.kernel, np.int64)
    limits.admit(at.counts, np.int64)
    table, base, reached = np.zeros(1, np.int64), np.zeros((1,) * len(at.counts), np.int64), np.ones((1,) * len(at.counts), bool)
    for axis, count in enumerate(at.counts):
        stride = math.prod(at.sizes[axis + 1 :])
        table = (table[:, None] + np.arange(at.kernel[axis]) * at.dilations[axis] * stride).reshape(-1)
        column = (-1, *(1,) * (len(at.counts) - axis - 1))
        base = base + ((np.arange(count) * at.strides[axis] - at.begins[axis]) * stride).reshape(column)
        reached = reached & (at.cells(axis) > 0).reshape(column)
    index = xp.asarray(table)[code] + xp.asarray(base)
    return index if reached.all() else xp.where(xp.asarray(reached), index, -1)


def column_major(xp: Xp, index: Array, sizes: Ints) -> Array:
    """Convert row-major cell indices to column-major: the first coordinate varies fastest."""
    out, stride = xp.zeros_like(index), math.prod(sizes)
    for size in reversed(sizes):
        stride //= max(1, size)
        out, index = out + index % size * stride, index // size
    return out


@operator("MaxPool", 1, 8, 10, 11, 12, 22, traits=("pools", "elements_of_first"))
def max_pool(
    xp: Xp,
    x: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
    wanted: Wanted = (True,),
) -> Array | tuple[Array, Array]:
    """Return the maximum of each window (NaN if it contains one); padding does not count.

    Indices refer to the whole tensor, one plane after another; with storage_order=1, each plane is column-major.
    """
    at = windows(spatial(x), kernel_shape, strides, pads, dilations, auto_pad, ceil_mode, partial=True)
    if storage_order not in (0, 1):
        raise OperatorError(f"storage_order must be 0 (rows) or 1 (columns), got {storage_order}", code="SX404")
    made = xp.maxima(x, places(at), places=any(wanted[1:]))
    if not any(wanted[1:]):
        return pool(xp, x, at, xp.maximum, lowest(x.dtype)) if made is None else made[0]
    y, index = argmax_pool(xp, x, at) if made is None else made
    planes = xp.arange(math.prod(x.shape[:2]), dtype=np.int64).reshape(*x.shape[:2], *(1,) * len(at.sizes))
    cell = column_major(xp, index, at.sizes) if storage_order else index
    return y, xp.where(index < 0, -1, cell + planes * math.prod(at.sizes))


max_pool.flops(pooled)
max_pool.shapes(pooled_shapes)


@max_pool.gradient
def max_pool_gradient(
    op: Op,
    dys: list[V],
    ys: list[V],
    x: V,
    kernel_shape: Ints,
    auto_pad: str,
    ceil_mode: int,
    dilations: Ints | None,
    pads: Ints | None,
    storage_order: int,
    strides: Ints | None,
) -> V:
    """The gradient goes to the maximum of each window; of equal cells, to the first."""
    if dys[0] is None:
        return None
    index = (
        ys[1]
        if len(ys) > 1 and ys[1] is not None and not storage_order
        else op.MaxPool(
            x,
            kernel_shape=kernel_shape,
            auto_pad=auto_pad,
            ceil_mode=ceil_mode,
            dilations=dilations,
            pads=pads,
            strides=strides,
            outputs=2,
        )[1]
    )
    dy, rank = dys[0], len(kernel_shape)
    strides, dilations = per_axis("strides", strides, rank), per_axis("dilations", dilations, rank)
    close = max(dilations) == 1  # the cells of a window are adjacent
    if not close or any(p >= k for p, k in zip(pads or (), (*kernel_shape, *kernel_shape), strict=False)):
        nowhere = op.Less(index, 0)  # a window that contains only padding
        index, dy, once = op.Where(nowhere, 0, index), op.Where(nowhere, 0, dy), False
    else:  # windows without common cells write each cell once
        once = all(s >= k for s, k in zip(strides, kernel_shape, strict=True))
    flat = op.ConstantOfShape(op.Reshape(op.Size(x), [1]), value=np.zeros(1, op.dtype(x)))
    flat = op.ScatterElements(flat, op.Reshape(index, [-1]), op.Reshape(dy, [-1]), axis=0, reduction="none" if once else "add")
    return op.Reshape(flat, op.Shape(x), allowzero=1)


@operator("GlobalMaxPool", 1, 22, traits=("pools", "finite"))
def global_max_pool(xp: Xp, x: Array) -> Array:
    return x.max(axis=tuple(range(2, 2 + len(spatial(x)))), keepdims=True)


global_max_pool.flops(each_input(1))
global_max_pool.shapes(pooled_to_one)


@global_max_pool.gradient
def global_max_pool_gradient(op: Op, dy: V, x: V) -> V:
    """The gradient goes to the maximum; of equal cells, to the first."""
    rows = op.Reshape(x, op.Concat(op.Shape(x, end=2), [-1], axis=0))
    there = op.ArgMax(rows, axis=2, keepdims=1)
    values = op.Reshape(dy, op.Concat(op.Shape(x, end=2), [1], axis=0), allowzero=1)
    return op.Reshape(op.ScatterElements(op.zeros_like(rows), there, values, axis=2), op.Shape(x), allowzero=1)


@operator("MaxUnpool", 9, 11, 22, traits=("moves",))
def max_unpool(
    xp: Xp,
    x: Array,
    index: Array,
    output_shape: Host[Ints] | None = None,
    *,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Write each cell to the position where MaxPool found it; all other cells are 0.

    The indices refer to the tensor whose shape follows from kernel, strides and pads.  `output_shape` determines the pads
    instead, but pads only crop: cells beyond that shape are zeros at the end (maxunpool_export_with_output_shape).
    """
    rank = len(spatial(x))
    if index.shape != x.shape:
        raise OperatorError(f"indices and values must have equal shapes, got {index.shape} and {x.shape}", code="SX404")
    at = windows(kernel_shape, kernel_shape, strides, None if output_shape is not None else pads, None)
    steps = per_axis("strides", strides, rank)
    full = tuple((size - 1) * s + k for size, s, k in zip(x.shape[2:], steps, at.kernel, strict=True))
    if output_shape is None:
        inner = shape = (*x.shape[:2], *(f - b - e for f, b, e in zip(full, at.begins, at.ends, strict=True)))
        if min(inner[2:]) < 0:
            raise OperatorError(
                f"pads must not exceed the unpadded output shape {full}, got {at.begins} and {at.ends}", code="SX404"
            )
    else:
        shape = output_shape
        if len(shape) != x.ndim or shape[:2] != x.shape[:2] or min(shape[2:]) < 0:
            raise OperatorError(
                f"output_shape must have the batch and channels of x {x.shape} and no negative size, got {shape}", code="SX404"
            )
        inner = (*shape[:2], *map(min, shape[2:], full))
    y = xp.zeros(math.prod(inner), dtype=x.dtype)
    xp.scatter(y, (xp.indices(index.reshape(-1), y.size, negative=False),), x.reshape(-1))
    y = y.reshape(inner)
    if shape == inner:
        return y
    out = xp.zeros(shape, dtype=x.dtype)
    out[(..., *(slice(0, size) for size in inner[-rank:]))] = y
    return out


@max_unpool.gradient
def max_unpool_gradient(op: Op, dy: V, x: V, index: V, output_shape: V, kernel_shape: Ints, strides: Ints | None) -> V:
    """Gather dy at the position of each cell, within the unpadded shape if `output_shape` is present."""
    if output_shape is not None:
        rank = len(kernel_shape)
        strides = per_axis("strides", strides, rank)
        full = op.Add(op.Mul(op.Sub(cells(op, x), 1), list(strides)), list(kernel_shape))
        dy = op.Slice(dy, [0] * rank, full, list(range(2, 2 + rank)))
    taken = op.Gather(op.Reshape(dy, [-1]), op.Reshape(index, [-1]))
    return op.Reshape(taken, op.Shape(x), allowzero=1)


# --- norms ----------------------------------------------------------------------------------------------------------


def powers(xp: Xp, x: Array, p: float) -> Array:
    """Compute |x|**p; raise OperatorError unless p defines a norm."""
    if not 0 < p < math.inf:
        raise OperatorError(f"p must be positive and finite, got {p}", code="SX404")
    return xp.abs(x) if p == 1 else x * x if p == 2 else xp.abs(x) ** p


def root(xp: Xp, total: Array, p: float) -> Array:
    return total if p == 1 else xp.sqrt(total) if p == 2 else total ** (1 / p)


@operator("LpPool", 1, 2, 11, 18, 22, traits=("pools",))
def lp_pool(
    xp: Xp,
    x: Array,
    *,
    kernel_shape: Ints | None = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    p: float = 2,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Return the p-norm of each window, with padding 0.

    Version 1 allows an absent kernel_shape without defining it: an OperatorError here.
    """
    if not kernel_shape:
        raise OperatorError("kernel_shape must be present", code="SX404")
    at = windows(spatial(x), kernel_shape, strides, pads, dilations, auto_pad, ceil_mode, partial=True)
    return root(xp, pool(xp, powers(xp, x, p), at, xp.add, 0), p)


lp_pool.flops(pooled)
lp_pool.shapes(pooled_shapes)


@lp_pool.gradient
def lp_pool_gradient(
    op: Op,
    dy: V,
    y: V,
    x: V,
    kernel_shape: Ints,
    auto_pad: str,
    dilations: Ints | None,
    p: float,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    """The gradient is 0 where the norm is 0."""
    over = _Over(op, x, dy, kernel_shape, auto_pad, dilations, pads, strides)
    return _norm_back(op, over.back(_norm_share(op, dy, y, p)), x, p)


def _norm_share(op: Op, dy: V, y: V, p: float) -> V:
    """Compute dy y^(1-p)."""
    zero = op.Equal(y, 0)
    return op.Where(zero, 0, op.Mul(dy, op.Pow(op.Where(zero, 1, y), op.constant(1 - p, op.dtype(y)))))


def _norm_back(op: Op, share: V, x: V, p: float) -> V:
    """Compute share |x|^(p-1) sign(x)."""
    if p == 1:
        return op.Mul(share, op.Sign(x))
    power = x if p == 2 else op.Mul(op.Pow(op.Abs(x), op.constant(p - 1, op.dtype(x))), op.Sign(x))
    return op.Mul(share, power)


@operator("GlobalLpPool", 1, 2, 22, traits=("pools",))
def global_lp_pool(xp: Xp, x: Array, *, p: float = 2) -> Array:
    """Return the p-norm over all spatial axes; p is a float in version 1 and an integer in later versions."""
    return root(xp, xp.sum_over(powers(xp, x, p), tuple(range(2, 2 + len(spatial(x)))), True), p)


global_lp_pool.flops(each_input(1))


@global_lp_pool.gradient
def global_lp_pool_gradient(op: Op, dy: V, y: V, x: V, p: float) -> V:
    """The gradient is 0 where the norm is 0."""
    return _norm_back(op, op.Expand(_norm_share(op, dy, y, p), op.Shape(x)), x, p)
