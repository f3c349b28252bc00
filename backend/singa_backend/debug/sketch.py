"""Sketches of values for the alignment of two models: figures that do not depend on the layout, layouts, and further inputs.

Two values can be the same only if their sketches agree.  A sketch selects candidates; `arranged` verifies them by element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..comparison.difference import Tolerance, difference

_AXES = 5
"""The most axes, without those of size 1, whose permutations are tried."""

_PROBE = 64
"""Elements that are compared before all are."""


@dataclass(frozen=True)
class ValueLayout:
    """The arrangement of one model's value as the other model has it: a reshape, a permutation of axes, and a reshape.

    Attributes:
        split: the shape before the permutation.
        axes: the permutation.
        shape: the shape after it.
    """

    split: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def apply(self, value: np.ndarray) -> np.ndarray:
        """Return the value in this layout.

        Args:
            value: of the other model, with as many elements.

        Returns:
            An array of the shape `shape`.
        """
        return value.reshape(self.split).transpose(self.axes).reshape(self.shape)

    def __str__(self) -> str:
        """Return the layout in words."""
        plain = self.axes == tuple(range(len(self.axes)))
        return f"as {list(self.shape)}" if plain else f"with the axes {list(self.axes)} of {list(self.split)}"


def sketch(value: Any) -> np.ndarray | None:
    """The figures of a value: the sums of x, |x| and x², the maximum, the minimum, and how many elements are not finite.

    None for a value that is not a numeric array, or is empty.
    """
    if not isinstance(value, np.ndarray) or not value.size or not (value.dtype.kind in "fiub" or dtypes.is_float(value.dtype)):
        return None
    with np.errstate(all="ignore"):
        x = value.reshape(-1).astype(np.float64)
        total = x.sum()
        odd = 0
        if not np.isfinite(total):
            finite = np.isfinite(x)
            odd = int(x.size - finite.sum())
            x = x[finite] if odd else x / 2.0**64
            total = x.sum()
        if not x.size:
            return np.array([0.0, 0.0, 0.0, 0.0, 0.0, odd])
        return np.array([total, np.abs(x).sum(), x @ x, x.max(), x.min(), odd])


def arranged(mine: np.ndarray, theirs: np.ndarray, tolerance: Tolerance) -> tuple[ValueLayout | None] | None:
    """The layout in which `theirs` agrees with `mine` in every element, in a tuple, (None,) for equal shapes; otherwise None."""
    for layout in _layouts(mine.shape, theirs.shape):
        if agree(mine, theirs, layout, tolerance):
            return (layout,)
    return None


def agree(mine: np.ndarray, theirs: np.ndarray, layout: ValueLayout | None, tolerance: Tolerance) -> bool:
    """Whether two values agree in every element, with `theirs` in this layout."""
    if mine.dtype != theirs.dtype or mine.size != theirs.size:
        return False
    theirs = theirs if layout is None else layout.apply(theirs)
    if mine.shape != theirs.shape:
        return False
    if mine.size > 4 * _PROBE and (dtypes.is_float(mine.dtype)):
        step = mine.size // _PROBE
        a, b = (x.reshape(-1)[::step].astype(np.float64) for x in (mine, theirs))
        rtol, atol = tolerance.of(theirs)
        with np.errstate(all="ignore"):
            if (np.abs(a - b) > atol + rtol * np.abs(b)).any():
                return False
    return difference(mine, theirs, tolerance).agrees


def _layouts(mine: tuple[int, ...], theirs: tuple[int, ...]) -> Iterator[ValueLayout | None]:
    """The arrangements of a value of the shape `theirs` as one of the shape `mine`, the likeliest first."""
    plain = tuple(range(len(theirs)))
    yield None if mine == theirs else ValueLayout(theirs, plain, mine)
    a, b = (tuple(n for n in shape if n != 1) for shape in (mine, theirs))
    if not 1 < max(len(a), len(b)) <= _AXES:
        return
    for axes in itertools.permutations(range(len(b))):
        if axes != tuple(sorted(axes)) and _merges(tuple(b[i] for i in axes), a):
            yield ValueLayout(b, axes, mine)
    if len(a) > len(b):
        for axes in itertools.permutations(range(len(a))):
            split = tuple(a[i] for i in axes)
            if axes != tuple(sorted(axes)) and _merges(split, b):
                yield ValueLayout(split, tuple(int(i) for i in np.argsort(axes)), mine)


def _merges(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Whether joining neighboring axes of one shape leads to the other."""
    rest = list(fine)
    for size in coarse:
        have = 1
        while have < size and rest:
            have *= rest.pop(0)
        if have != size:
            return False
    return not rest


def further(inputs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Other inputs of the same dtypes and shapes: floats are permuted and scaled, other elements stay within those given."""
    generator = np.random.default_rng(seed)
    return {name: _redrawn(value, generator) for name, value in inputs.items()}


def _redrawn(value: Any, generator: np.random.Generator) -> Any:
    if not isinstance(value, np.ndarray) or not value.size:
        return value
    flat = generator.permutation(value.reshape(-1))
    if dtypes.is_float(value.dtype) or value.dtype.kind == "c":
        with np.errstate(all="ignore"):
            flat = (flat.astype(np.float64) * generator.uniform(0.5, 1.5, flat.size)).astype(value.dtype)
    elif value.dtype.kind in "iub" and len(np.unique(flat[:4096])) < 4:
        low, high = min(0, int(flat.min())), max(1, int(flat.max()))
        flat = generator.integers(low, high, flat.size, endpoint=True).astype(value.dtype)
    return flat.reshape(value.shape)
