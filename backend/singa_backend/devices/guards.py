"""Wrap functions of an array module whose result may be larger than their arguments: they check the budget first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..limits import current

ResultSize = tuple[Sequence[int], int]
"""The size of a result: factors of its number of elements, such as its shape, and the bytes of one element."""

# Each function below has the parameters of NumPy functions, and returns the size of their result, or an upper bound.


def _of_shape(shape: Any, dtype: Any = float, *_: Any, **__: Any) -> ResultSize:
    return (shape if isinstance(shape, (tuple, list)) else (shape,)), np.dtype(dtype).itemsize


def _full(shape: Any, fill_value: Any, dtype: Any = None, **_: Any) -> ResultSize:
    return _of_shape(shape, getattr(fill_value, "dtype", float) if dtype is None else dtype)


def _arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None, **_: Any) -> ResultSize:
    first, last = (0, start) if stop is None else (start, stop)
    return (max(0, math.ceil((last - first) / step)),), 8 if dtype is None else np.dtype(dtype).itemsize


def _broadcast_to(x: Any, shape: Any, *_: Any, **__: Any) -> ResultSize:
    return _of_shape(shape, x.dtype)


def _joined(arrays: Sequence[Any], *_: Any, **__: Any) -> ResultSize:
    return (sum(a.size for a in arrays),), max((a.dtype.itemsize for a in arrays), default=0)


def _repeat(x: Any, repeats: Any, axis: int | None = None) -> ResultSize:
    return (x.size, repeats if isinstance(repeats, int) else int(np.sum(repeats))), x.dtype.itemsize


def _tile(x: Any, reps: int | Sequence[int]) -> ResultSize:
    return (x.size, *([reps] if isinstance(reps, int) else reps)), x.dtype.itemsize


def _take(x: Any, indices: Any, axis: int | None = None, **_: Any) -> ResultSize:
    rest = x.size if axis is None else x.size // (x.shape[axis] or 1)
    return (1 if axis is None else rest, getattr(indices, "size", 1)), x.dtype.itemsize


def _matmul(a: Any, b: Any, out: Any = None) -> ResultSize:
    if out is not None or a.ndim < 1 or b.ndim < 1:
        return (), 0
    rows, columns = a.shape[-2:-1], b.shape[-1:] if b.ndim > 1 else ()
    lead = a.shape[:-2] or b.shape[:-2]
    if a.ndim > 2 and b.ndim > 2:
        try:
            lead = np.broadcast_shapes(lead, b.shape[:-2])
        except ValueError:
            lead = ()
    return (*lead, *rows, *columns), max(a.dtype.itemsize, b.dtype.itemsize)


def _where(condition: Any, x: Any = None, y: Any = None) -> ResultSize:
    if x is None and y is None:
        return _nonzero(condition)
    arrays = [v for v in (condition, x, y) if getattr(v, "size", 1) > 1]
    if len(arrays) < 2:
        return (), 0
    try:
        shape = np.broadcast_shapes(*(v.shape for v in arrays))
    except ValueError:
        shape = ()
    return shape, max(v.dtype.itemsize for v in arrays)


def _eye(n: int, m: int | None = None, *_: Any, **__: Any) -> ResultSize:
    return (n, n if m is None else m), 8


def _bincount(x: Any, weights: Any = None, minlength: int = 0) -> ResultSize:  # callers give numbers below minlength
    return (minlength,), 8


def _nonzero(x: Any) -> ResultSize:
    budget, bound = current(), 8 * x.size * x.ndim
    fits = bound <= min(budget.tensor_bytes, budget.room - budget.made)  # then the elements need not be counted
    return (x.ndim, x.size if fits else int(getattr(x, "_a", x).astype(bool).sum())), 8


def _pad(x: Any, pad_width: Any, *_: Any, **__: Any) -> ResultSize:
    before_and_after = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    return tuple(n + a + b for n, (a, b) in zip(x.shape, before_and_after, strict=True)), x.dtype.itemsize


def _meshgrid(*xs: Any, **_: Any) -> ResultSize:
    return (len(xs), *(x.size for x in xs)), max((x.dtype.itemsize for x in xs), default=0)


SIZES: dict[str, Callable[..., ResultSize]] = {
    "zeros": _of_shape, "ones": _of_shape, "empty": _of_shape, "full": _full, "arange": _arange, "broadcast_to": _broadcast_to,
    "concatenate": _joined, "stack": _joined, "repeat": _repeat, "tile": _tile, "take": _take, "matmul": _matmul,
    "where": _where, "bincount": _bincount, "nonzero": _nonzero, "flatnonzero": _nonzero, "meshgrid": _meshgrid,
    "eye": _eye, "pad": _pad,
}  # fmt: skip
"""The functions that may return more than they take, with the size of their result."""


def guarded(name: str, function: Any) -> Any:
    """A function of an array module; if its result may be larger than its arguments, it checks the budget first."""
    size = SIZES.get(name)
    if size is None:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        current().admit(*size(*args, **kwargs))
        return function(*args, **kwargs)

    call.__name__ = name
    return call
