"""NaN and infinity in values of any kind: arrays of every float dtype, complex numbers, sequences, maps and optionals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import dtypes

BLOCK = 1 << 20
"""Elements that are counted at a time."""


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over the arrays of floats in a value on the host.

    Args:
        value: an array, a number, a list, a map or None.
        at: the text before each place.

    Yields:
        The place ("" for the value itself, "[2]" for an element of a list) and the array.
    """
    if isinstance(value, (list, tuple)):
        if value and all(type(v) is float for v in value):
            yield at, np.asarray(value)
            return
        for i, v in enumerate(value):
            yield from leaves(v, f"{at}[{i}]")
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from leaves(v, f"{at}[{k!r}]")
    elif isinstance(value, (np.ndarray, np.generic, float)):
        array = np.asarray(value)
        if dtypes.is_float(array.dtype) or array.dtype.kind == "c":
            yield at, array


def masks(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where an array of floats is NaN, and where it is NaN or infinite."""
    with np.errstate(all="ignore"):
        wide = array if array.dtype.kind in "fc" else array.astype(np.float32)
        return np.asarray(np.isnan(wide)), np.asarray(~np.isfinite(wide))


def counts(value: Any) -> tuple[int, int]:
    """Return the numbers of NaN and of infinite elements in a value on the host."""
    nan = inf = 0
    for _, array in leaves(value):
        flat = array.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            is_nan, bad = masks(flat[start : start + BLOCK])
            if bad.any():
                nan += int(is_nan.sum())
                inf += int((bad & ~is_nan).sum())
    return nan, inf


def has_nan(value: Any) -> bool:
    """Return whether a value on the host holds a NaN."""
    return counts(value)[0] > 0


def shared_nan(mine: Any, theirs: Any) -> int:
    """Return the number of elements that are NaN in both of two values of the same kind and shape."""
    pairs = zip(leaves(mine), leaves(theirs), strict=False)
    return sum(int((masks(a)[0] & masks(b)[0]).sum()) for (_, a), (_, b) in pairs if a.shape == b.shape)
