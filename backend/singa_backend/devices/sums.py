"""Sums of floats in stages: their rounding errors hardly grow with the number of terms.

NumPy adds the elements of axes that are contiguous in memory in pairs, but rows one after the other, so that rounding errors add
up.  Here rows are added in blocks, then the sums of the blocks (Higham, The accuracy of floating point summation, 1993).  Rows of
few elements are joined to wider ones, which NumPy adds up to 50 times faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of any namespace
Sizes = tuple[int, ...]

LONG = 128
"""The number of rows from which they are added in stages."""

BLOCK = 32
"""The rows of a block."""

WIDTH = 1024
"""The elements of rows that are joined."""

FLOATS = ("float32", "float64")

RUNNING = 1 << 12
"""The number of elements from which their running sums are computed in blocks."""

FEW = 8
"""Elements of a row up to which each is a column of its own."""

RUN = 1 << 9
"""The elements of a block of running sums."""


class Slab(NamedTuple):
    """A part of an array: some of the rows of matrices.

    Attributes:
        array: the number of the array.
        shape: its shape as matrices: (matrices, rows, elements of a row).
        rows: the first row, and the one after the last.
        view: the shape of the part.
    """

    array: int
    shape: Sizes
    rows: tuple[int, int]
    view: Sizes

    def of(self, arrays: Sequence[Array]) -> Array:
        """The view of the part."""
        return arrays[self.array].reshape(self.shape)[:, self.rows[0] : self.rows[1]].reshape(self.view)


@dataclass(eq=False, repr=False)
class Stages:
    """The sums over some axes of an array without gaps.

    Attributes:
        order: the axes of the array from the outermost in memory to the innermost.
        kept: those that are not summed, in this order; the result has them in this order in memory.
        sizes: the numbers of elements of the arrays for sums of blocks.
        steps: (part, axis, part of the sums), in order.  Array 0 is the one that is summed, transposed by `order`, 1 the result,
            and those from 2 are of `sizes`.
    """

    order: Sizes
    kept: Sizes
    sizes: list[int] = field(default_factory=list)
    steps: list[tuple[Slab, int, Slab]] = field(default_factory=list)

    def run(self, arrays: Sequence[Array]) -> Iterator[tuple[Array, int, Array]]:
        """(array, axis, sums) of each step."""
        return ((source.of(arrays), axis, target.of(arrays)) for source, axis, target in self.steps)

    def _new(self, elements: int) -> int:
        """The number of another array."""
        self.sizes.append(elements)
        return len(self.sizes) + 1

    def add_axes(self, groups: Sequence[tuple[int, bool]]) -> None:
        """Sum groups of axes, from the innermost; (elements, whether they are summed) of each."""
        sizes, source = [size for size, _ in groups], 0
        for at in reversed(range(len(groups))):
            if groups[at][1]:
                outer, rows, inner = math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])
                target = self._new(outer * inner) if any(flag for _, flag in groups[:at]) else 1
                self._add_rows((source, (outer, rows, inner), (0, rows)), Slab(target, (outer, 1, inner), (0, 1), (outer, inner)))
                source, sizes[at] = target, 1

    def _add_rows(self, source: tuple[int, Sizes, tuple[int, int]], target: Slab) -> None:
        """Sum rows of matrices: of the array with a number, as matrices of a shape, those from the first to the last."""
        array, shape, (first, last) = source
        outer, _, inner = shape
        rows = last - first
        lanes, height, blocks = _split(rows, inner)
        if not blocks:
            self.steps.append((Slab(array, shape, (first, last), (outer, rows, inner)), 1, target))
            return
        used, count, wide = blocks * height * lanes, blocks * lanes, lanes * inner
        all_sums = (outer, count + (used < rows), inner)
        sums = self._new(math.prod(all_sums))
        part = Slab(array, shape, (first, first + used), (outer, blocks, height, wide))
        self.steps.append((part, 2, Slab(sums, all_sums, (0, count), (outer, blocks, wide))))
        if used < rows:
            self._add_rows((array, shape, (first + used, last)), Slab(sums, all_sums, (count, count + 1), (outer, inner)))
        self._add_rows((sums, all_sums, (0, all_sums[1])), target)


GAPS = Stages((), ())
"""There are gaps in the memory of an array, repetitions, or it is in another direction."""


def _split(rows: int, inner: int) -> tuple[int, int, int]:
    """How rows are added: (rows that are joined, joined rows of a block, blocks); no blocks if they are few, or contiguous."""
    if inner == 1 or rows < LONG:
        return 0, 0, 0
    lanes = divisor(rows, max(1, min(WIDTH // inner, rows // 8)))
    height = rows // lanes
    if height > 2 * BLOCK:
        height = divisor(height, BLOCK)
    return lanes, height, rows // lanes // height


def divisor(n: int, most: int) -> int:
    """The largest divisor of n above half of `most`; `most` if there is none."""
    return next((d for d in range(most, most // 2, -1) if n % d == 0), most)


@lru_cache(maxsize=4096)
def stages(shape: Sizes, strides: Sizes, itemsize: int, axes: Sizes) -> Stages | None:
    """How to sum over axes of an array.

    Args:
        shape: of the array.
        strides: in bytes.
        itemsize: the bytes of an element.
        axes: those that are summed, from the front.

    Returns:
        The stages; None if NumPy's sum has no larger errors, `GAPS` if the array must be copied first.
    """
    if math.prod(shape[a] for a in axes) < LONG or 0 in shape:
        return None
    order = sorted(range(len(shape)), key=lambda a: (-abs(strides[a]), a))
    groups: list[tuple[int, bool]] = []
    before, gaps = 0, False
    for a in order:
        if shape[a] == 1:
            continue
        flag, joins = a in axes, strides[a] * shape[a] == before
        gaps |= strides[a] <= 0 or (bool(before) and not joins)
        if groups and joins and groups[-1][1] == flag:
            groups[-1] = (groups[-1][0] * shape[a], flag)
        else:
            groups.append((shape[a], flag))
        before = strides[a]
    repeated = any(strides[a] == 0 and shape[a] > 1 for a in axes)
    if math.prod(size for size, flag in groups[:-1] if flag) < LONG and not repeated:
        return None
    if gaps or before != itemsize:
        return GAPS
    made = Stages(tuple(order), tuple(a for a in order if a not in axes))
    made.add_axes(groups)
    return made


def total(xp: Any, x: Array, axes: Sizes, keepdims: bool) -> Array:
    """Return the sum over `axes`, which are counted from the front, in the dtype of x."""
    if not axes:
        return x
    how = stages(x.shape, x.strides, x.dtype.itemsize, axes) if x.dtype.name in FLOATS else None
    if how is GAPS:
        x = xp.ascontiguousarray(x)
        how = stages(x.shape, x.strides, x.dtype.itemsize, axes)
    if how is None:
        return x.sum(axis=axes, dtype=x.dtype, keepdims=keepdims)
    y = xp.empty(tuple(x.shape[a] for a in how.kept), x.dtype)
    for source, axis, target in how.run([x.transpose(how.order), y, *(xp.empty(n, x.dtype) for n in how.sizes)]):
        source.sum(axis=axis, dtype=x.dtype, out=target)
    if list(how.kept) != sorted(how.kept):
        y = y.transpose(sorted(range(y.ndim), key=how.kept.__getitem__))
    return y.reshape(tuple(1 if a in axes else n for a, n in enumerate(x.shape))) if keepdims else y


class Running(NamedTuple):
    """The sums of the elements up to each one along an axis: those of a block, and the sum of the blocks before it.

    Attributes:
        shape: of the array.
        axis: the axis, from the front.
        height: the elements of a block.
    """

    shape: Sizes
    axis: int
    height: int

    @classmethod
    def of(cls, shape: Sizes, axis: int) -> Running | None:
        """The running sums of an array; None if there are few along the axis, which are added one after the other."""
        return cls(shape, axis, divisor(shape[axis], RUN)) if shape[axis] >= RUNNING and 0 not in shape else None

    @property
    def ends(self) -> Sizes:
        """The shape of the sums of whole blocks."""
        return (*self.shape[: self.axis], self.shape[self.axis] // self.height, *self.shape[self.axis + 1 :])

    def calls(self, xp: Any, accumulate: Any, x: Array, y: Array, wide: Array, ends: Array) -> list[tuple[Any, tuple[Any, ...]]]:
        """The calls that write the running sums of x to y.

        Args:
            xp: the namespace.
            accumulate: its function of an array, an axis, a dtype and the array of the result.
            x: the array.
            y: the result; it may be in another order of memory.
            wide: room for `ends` in float64.
            ends: room for the sums up to the end of each block.
        """
        axis, rest = self.axis, self.shape[self.axis + 1 :]
        used, before = ends.shape[axis] * self.height, (slice(None),) * axis
        shape = (*ends.shape[: axis + 1], self.height, *rest)
        source, parts = (v[(*before, slice(used))].reshape(shape) for v in (x, y))
        last = parts[(*before, slice(None), -1)]
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (accumulate, (source, axis + 1, x.dtype, parts)),
            (accumulate, (last, axis, wide.dtype, wide)),
        ]
        calls.append((xp.copyto, (ends, wide, "same_kind")))
        few = math.prod(rest) <= FEW  # NumPy is slow if the innermost axis is short
        for at in np.ndindex(rest) if few else [(slice(None),) * len(rest)]:
            to = parts[(*before, slice(1, None), slice(None), *at)]
            calls.append((xp.add, (to, ends[(*before, slice(-1), None, *at)], to)))
        if used < self.shape[axis]:
            to = y[(*before, slice(used, None))]
            calls.append((accumulate, (x[(*before, slice(used, None))], axis, x.dtype, to)))
            calls.append((xp.add, (to, ends[(*before, slice(-1, None))], to)))
        return calls


def running(xp: Any, x: Array, axis: int) -> Array:
    """Return the sum of the elements up to each one along an axis, in the dtype of x."""
    how = Running.of(x.shape, axis) if x.dtype.name in FLOATS else None
    if how is None:
        return xp.cumsum(x, axis=axis, dtype=x.dtype)
    y = xp.empty(x.shape, x.dtype)
    for function, arguments in how.calls(xp, xp.cumsum, x, y, xp.empty(how.ends, np.float64), xp.empty(how.ends, x.dtype)):
        function(*arguments)
    return y
