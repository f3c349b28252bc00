"""Recognizes arrays that training does not produce by their values: masks, integers, tables of cosines, grids, frequencies.

At most `LIMIT` elements of an array are looked at, in blocks, and at most 64 rows and columns of a table: a file that is mapped
is not read as a whole.
"""

from __future__ import annotations

import math

import numpy as np

LARGE = -1e4
"""Masks add this number, or a lower one, to what they hide."""

FAINT = -50.0
"""A number up to this one is a mask if it is the only one besides 0."""

LIMIT = 1 << 16
"""The maximum number of elements that are looked at."""

_SAMPLE, _BLOCK, _ROWS = 256, 4096, 64
"""The elements that are looked at first, those of a block, and the rows and columns of a table."""

_NEAR = 2e-3
"""The error of a sine, relative to its amplitude."""

MASK = "a mask of 0, 1 and -inf or a number below -1e+04"
ONE, BINARY, INTEGERS, UNIFORM = "one number", "a mask of 0 and 1", "integers", "the same number everywhere"
WAVES = "a table of sines or cosines"
GRID = "a grid of numbers in equal steps"


def kind(array: np.ndarray) -> str:
    """What the values are, in words; "" for values that a training may have made."""
    if array.size <= 1:
        return ONE if array.size else UNIFORM
    flat = array.reshape(-1)
    if _plain(flat[:_SAMPLE].astype(np.float64)):  # not so for most weights
        found = _plain(_blocks(flat).astype(np.float64))
        if found:
            return found
    part = array if array.size <= LIMIT else _corner(array)
    return WAVES if is_waves(part) else GRID if _is_grid(part) else ""


def _blocks(flat: np.ndarray) -> np.ndarray:
    """All elements, or evenly spread blocks of them."""
    if flat.size <= LIMIT:
        return flat
    starts = np.linspace(0, flat.size - _BLOCK, LIMIT // _BLOCK).astype(np.int64)
    return np.concatenate([flat[s : s + _BLOCK] for s in starts])


def _corner(array: np.ndarray) -> np.ndarray:
    """The first elements along each axis."""
    return array[(slice(64),) * (array.ndim - 1) + (slice(1024),)]


def _plain(values: np.ndarray) -> str:
    """The kind of values that are one or two numbers, or integers; "" for others."""
    low = values <= LARGE
    if (low | (values == 0) | (values == 1)).all():
        if low.any():
            return MASK
        return BINARY if values.min() != values.max() else UNIFORM
    first = values[0]
    if (values == first).all():
        return UNIFORM
    if not np.isfinite(values).all():
        return ""
    if values.min() <= FAINT and ((values == 0) | (values == values.min())).all():
        return MASK
    return INTEGERS if (values == np.rint(values)).all() else ""


def is_waves(array: np.ndarray) -> bool:
    """Whether the columns of a table, along its first or its last axis, are sines of several frequencies.

    A sine at equal steps obeys y[n + 1] + y[n - 1] = 2 cos(w) y[n], regardless of its phase and amplitude.
    """
    table = array.reshape([n for n in array.shape if n != 1])
    if table.ndim < 2:
        return False
    for rows in (table.reshape(table.shape[0], -1), table.reshape(-1, table.shape[-1]).T, _inner(table)):
        if rows is not None and rows.shape[0] >= 5 and _may_be_sines(rows) and _are_sines(_part(rows)):
            return True
    return False


def _may_be_sines(rows: np.ndarray) -> bool:
    """A quick test of a few columns, which almost all weights fail."""
    t = rows[:16, :: max(1, rows.shape[1] // 8)].astype(np.float64)
    middle, around = t[1:-1], t[2:] + t[:-2]
    turned = np.abs(around[1:] * middle[:-1] - around[:-1] * middle[1:])
    with np.errstate(invalid="ignore"):
        return bool((turned <= 4 * _NEAR * np.abs(t).max() ** 2).mean() >= 0.25)


def _inner(table: np.ndarray) -> np.ndarray | None:
    """The last but one axis as rows, if it is not the first."""
    return np.moveaxis(table, -2, 0).reshape(table.shape[-2], -1) if table.ndim > 2 and table.size <= LIMIT else None


def _part(rows: np.ndarray) -> np.ndarray:
    return rows[:_ROWS, :: max(1, rows.shape[1] // _ROWS)].astype(np.float64)


def _are_sines(t: np.ndarray) -> bool:
    if t.shape[0] < 5 or not np.isfinite(t).all():
        return False
    size = np.abs(t).max(0)
    t = t[:, np.ptp(t, axis=0) > 1e-3 * np.maximum(size, 1e-30)]
    if t.shape[1] < 2:
        return False
    size, middle, around = np.abs(t).max(0), t[1:-1], t[2:] + t[:-2]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.abs(middle) > 0.05 * size, around / middle, np.nan)
    known = ~np.isnan(ratio).all(0)
    factors = np.zeros(t.shape[1])
    factors[known] = np.nanmedian(ratio[:, known], axis=0)
    share = (np.abs(around - factors * middle) <= _NEAR * size).mean(0)
    waves = (share >= 0.5) & (np.abs(factors) <= 2 + _NEAR)
    return bool(waves.mean() >= 0.6 and waves.any() and np.ptp(factors[waves]) > 0.01)


def _is_grid(array: np.ndarray) -> bool:
    """Whether an array of several axes has equal steps along one of the last two axes, or repeats a row with them."""
    table = array.reshape([n for n in array.shape if n != 1])
    if table.ndim < 2 or table.size < 8:
        return False
    for axis in (-1, -2):
        lines = np.moveaxis(table, axis, 0)
        lines = _part(lines.reshape(lines.shape[0], -1))
        if lines.shape[0] >= 4 and np.isfinite(lines).all():
            steps = np.diff(lines, n=2, axis=0)
            if np.ptp(lines) > 0 and np.abs(steps).max() <= 1e-5 * np.abs(lines).max() and np.ptp(lines, axis=0).max() > 0:
                return True
    return False


def is_frequencies(array: np.ndarray) -> bool:
    """Whether a vector is positive, and falls or rises strictly: frequencies of sines."""
    if sum(n != 1 for n in array.shape) != 1 or array.size < 2 or array.size > LIMIT:
        return False
    values = array.reshape(-1).astype(np.float64)
    steps = np.diff(values)
    return bool((values > 0).all() and ((steps < 0).all() or (steps > 0).all()))


def is_counting(array: np.ndarray) -> bool:
    """Whether the values are 0, 1, 2, ..."""
    return 4 <= array.size <= LIMIT and bool((array.reshape(-1) == np.arange(array.size)).all())


def root(value: float) -> str:
    """How a number follows from an integer of 2 or more: as its root, or one over it; "" if it does not."""
    if not math.isfinite(value) or value == 0:
        return ""
    size = abs(value)
    for power, above, below in ((1, "{}", "1/{}"), (2, "sqrt({})", "1/sqrt({})"), (4, "{}**0.25", "1/{}**0.25")):
        for x, text in ((size**power if size < 1e4 else math.inf, above), (size**-power if size > 1e-4 else math.inf, below)):
            if x < 1e6 and round(x) >= 2 and abs(x - round(x)) <= 2e-6 * power * x:
                return text.format(round(x))
    return ""
