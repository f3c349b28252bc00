"""Kernels that compute nothing: the result is another view of the input's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ir.declaration import Ints
from ..ir.shapes import valid_axes
from ..ir.sizes import at_least_zero, now
from .lowering import copy
from .table import Site, kernel
from .values import FINITE, Value, last_order, strides_of

MOST_INTS = 128
"""Two numbers for each of 64 axes, which is what NumPy permits: more than any operator has but Split."""


def ints(site: Site, value: Value | None, name: str, most: int = MOST_INTS) -> tuple[int, ...]:
    """The integers of an input that is the same in every run; refuses more than `most`."""
    if value is None:
        return ()
    site.require(value.constant and value.dtype.kind in "iu", f"{name} depends on the data")
    site.require(value.size <= most, f"{name} has more than {most} numbers")
    return tuple(numbers_of(value))


def numbers_of(value: Value) -> list[Any]:
    """The elements of a constant: numbers, and sizes by name."""
    return value.contents if value.contents is not None else value.array.reshape(-1).tolist()


def axes_in(site: Site, axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front; refuses if one is out of range or repeated, or negative before opset 11."""
    site.require(site.version >= 11 or all(a >= 0 for a in axes), "a negative axis before opset 11")
    found = valid_axes(axes, rank)
    if found is None:
        site.refuse("an axis is out of range or repeated")
    return found


def reshaped(x: Value, shape: Sequence[int]) -> Value | None:
    """A view of other shape; None if a copy is needed."""
    if math.prod(shape) != x.size or not x.size:
        return None
    strides = reshaped_strides(x.shape, x.strides, shape, x.dtype.itemsize)
    return None if strides is None else x.view(shape, strides)


def reshaped_strides(shape: Sequence[Any], strides: Sequence[Any], wanted: Sequence[Any], itemsize: int) -> list[Any] | None:
    """The strides of a view of another shape with as many elements, of which there are some; None if the view does not exist."""
    old = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    made = [itemsize] * len(wanted)
    axes = [i for i, d in enumerate(wanted) if d != 1]
    first = start = 0
    while first < len(axes):
        # the fewest axes of both shapes, from these on, that have as many elements
        last, end, new, size = first + 1, start + 1, wanted[axes[first]], old[start][0]
        while new != size:
            if new < size:
                new, last = new * wanted[axes[last]], last + 1
            else:
                size, end = size * old[end][0], end + 1
        if any(old[i][1] != old[i + 1][0] * old[i + 1][1] for i in range(start, end - 1)):
            return None
        step = old[end - 1][1]
        for i in reversed(axes[first:last]):
            made[i] = step
            step = step * wanted[i]
        first, start = last, end
    return made


def copied(site: Site, x: Value, shape: Sequence[int]) -> Value:
    """A copy of another shape, in C order, or with the channels innermost in memory if they are in the input."""
    groups = merged(x.shape, shape)
    if groups is not None and 3 <= len(shape) <= 5:
        near = [min((x.strides[a] for a in g if x.shape[a] != 1), default=0) for g in groups]
        order = last_order(len(shape))
        wide = [a for a in order if shape[a] != 1]
        if wide == sorted(wide, key=lambda a: -near[a]):
            y = site.new(shape, x.dtype, order)
            strides = [0] * x.ndim
            for a, g in zip(y.strides, groups, strict=True):
                for axis in reversed(g):
                    strides[axis] = a
                    a *= x.shape[axis]
            copy(site, x, y.view(x.shape, strides))
            return y
    y = site.new(shape, x.dtype)
    copy(site, x, y.view(x.shape, strides_of(x.shape, x.dtype.itemsize)))
    return y


def merged(old: Sequence[int], new: Sequence[int]) -> list[list[int]] | None:
    """For each axis of a new shape, the consecutive axes of the old one that it consists of; None if an axis is divided."""
    groups: list[list[int]] = []
    axis = 0
    for size in new:
        group: list[int] = []
        count = 1
        while axis < len(old) and (count < size or not group):
            group.append(axis)
            count *= old[axis]
            axis += 1
        if count != size:
            return None
        groups.append(group)
    for rest in range(axis, len(old)):
        if old[rest] != 1:
            return None
        groups[-1].append(rest)
    return groups


def as_shape(site: Site, x: Value, shape: Sequence[int]) -> Value:
    """A view of other shape, or a copy if the memory order does not permit one."""
    site.require(x.size and math.prod(shape) == x.size, "the shape does not match or is empty")
    return reshaped(x, shape) or copied(site, x, shape)


@kernel("Reshape", 5, 13, 14, 19, 21, 23, 24, 25, on="view")
def reshape(site: Site, x: Value, shape: Value) -> Value:
    wanted = list(ints(site, shape, "the shape"))
    site.require(wanted.count(-1) <= 1 and all(d >= -1 for d in wanted) and shape.ndim == 1, "not a valid shape")
    for i, d in enumerate(wanted):
        if d == 0:
            site.require(not site.attributes.get("allowzero", 0) and i < x.ndim, "a size of 0")
            wanted[i] = x.shape[i]
    if -1 in wanted:
        rest = math.prod(d for d in wanted if d != -1)
        site.require(rest and x.size % rest == 0, "the sizes do not divide the input")
        wanted[wanted.index(-1)] = x.size // rest
    return as_shape(site, x, wanted)


@kernel("Flatten", 1, 9, 11, 13, 21, 23, 24, 25, on="view")
def flatten(site: Site, x: Value) -> Value:
    axis = site.attributes["axis"]
    least = 0 if site.version < 11 else -x.ndim
    site.require(least <= axis <= x.ndim, "the axis is out of range")
    axis = axis + x.ndim if axis < 0 else axis
    return as_shape(site, x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@kernel("Squeeze", 1, 11, 13, 21, 23, 24, 25, on="view")
def squeeze(site: Site, x: Value, axes: Value | None = None) -> Value:
    given: Ints | None = site.attributes.get("axes") if axes is None else ints(site, axes, "axes")
    site.require(site.version >= 11 or min(given or (0,)) >= 0, "a negative axis before opset 11")
    which = axes_in(site, given, x.ndim) if given is not None else tuple(i for i, d in enumerate(x.shape) if d == 1)
    site.require(all(x.shape[a] == 1 for a in which), "an axis is not of size 1")
    kept = [i for i in range(x.ndim) if i not in which]
    return x.view([x.shape[i] for i in kept], [x.strides[i] for i in kept])


@kernel("Unsqueeze", 1, 11, 13, 21, 23, 24, 25, on="view")
def unsqueeze(site: Site, x: Value, axes: Value | None = None) -> Value:
    given = site.attributes.get("axes") if axes is None else ints(site, axes, "axes")
    site.require(given is not None and (site.version >= 11 or min(given or (0,)) >= 0), "there are no axes, or a negative one")
    which = axes_in(site, given or (), x.ndim + len(given or ()))
    shape, strides = list(x.shape), list(x.strides)
    for a in sorted(which):
        shape.insert(a, 1)
        strides.insert(a, x.dtype.itemsize)
    return x.view(shape, strides)


@kernel("Transpose", 1, 13, 21, 23, 24, 25, on="view")
def transpose(site: Site, x: Value) -> Value:
    perm = site.attributes.get("perm")
    perm = tuple(reversed(range(x.ndim))) if perm is None else tuple(perm)
    site.require(sorted(perm) == list(range(x.ndim)), "perm is not a permutation")
    return x.view([x.shape[p] for p in perm], [x.strides[p] for p in perm])


@kernel("Identity", 1, 13, 14, 16, 19, 21, 23, 24, 25, on="view")
def identity(site: Site, x: Value) -> Value:
    return x.view(x.shape, x.strides)


@kernel("Dropout", 7, 10, 12, 13, 22, on="view")
def dropout(site: Site, x: Value, ratio: Value | None = None, training_mode: Value | None = None) -> Value:
    site.require(training_mode is None or (training_mode.constant and not training_mode.array.any()), "it is training")
    site.require(not any(site.outputs[1:]), "the mask is used")
    return x.view(x.shape, x.strides)


@kernel("Range", 11, 27, on="numpy", takes="sizes")
def range_of_sizes(site: Site, *bounds: Value) -> Value:
    """A range between integers that are the same whenever the sizes are."""
    site.require(all(v.constant and v.dtype.kind in "iu" and v.size == 1 for v in bounds), "a bound depends on the data")
    start, limit, delta = (numbers_of(v)[0] for v in bounds)
    site.require(delta == 1, "another step")
    y = site.new((at_least_zero(limit - start),), bounds[0].dtype, finiteness=FINITE)
    site.emit(
        lambda: [(np.copyto, (y.array, np.arange(now(start), now(limit), dtype=y.dtype)))],
        reads=(), writes=(y,), kernel="numpy.arange",
    )  # fmt: skip
    return y
