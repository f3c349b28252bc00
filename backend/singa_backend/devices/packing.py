"""Arrays of a device that one copy brings to the host: they are packed into one array of bytes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

Array = Any  # of CuPy

_AT_ONCE = 1 << 24
"""The maximum number of bytes of a packed array."""


def packed(xp: Any, values: Sequence[Any]) -> Array | None:
    """The arrays among some values in one; None if there are not several, or if they are large together."""
    arrays, ends = _parts(xp, values)
    if len(arrays) < 2 or ends[-1] > _AT_ONCE:
        return None
    bytes_ = xp.module.empty(ends[-1], np.uint8)  # not a tensor of the model: no limit applies
    for a, start in zip(arrays, ends, strict=False):
        _part(bytes_, start, a)[...] = a
    return bytes_


def unpacked(xp: Any, bytes_: Array | None, values: Sequence[Any], get: Callable[[Any], Any]) -> list[Any]:
    """Values on the host.

    Args:
        xp: the namespace of the device.
        bytes_: the result of `packed` for arrays of the same types.
        values: the values.
        get: copies one value to the host.

    Returns:
        The values; those of a packed array share no memory.
    """
    if bytes_ is None:
        return [get(v) for v in values]
    arrays, ends = _parts(xp, values)
    there = xp.to_host(bytes_)
    copied = iter([_part(there, start, a).copy() for a, start in zip(arrays, ends, strict=False)])
    return [next(copied) if xp.isarray(v) else get(v) for v in values]


def _parts(xp: Any, values: Sequence[Any]) -> tuple[list[Array], list[int]]:
    """The arrays among values, and where each begins in a packed array; then the end."""
    arrays = [v for v in values if xp.isarray(v)]
    return arrays, list(accumulate((-(-a.nbytes // 16) * 16 for a in arrays), initial=0))


def _part(bytes_: Any, start: int, like: Any) -> Any:
    """The part of an array of bytes that begins at `start`, as an array of the dtype and the shape of another."""
    return bytes_[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
