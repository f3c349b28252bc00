"""Copies by machine code in plans whose sizes differ between runs: a binding of its step to other sizes is a part of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..elementwise.compile import available
from ..gemm.copies import COPY, copies
from ..ir.sizes import typical
from .elementwise import collapsed, order_of
from .machine_steps import emit_product
from .table import Site, worst
from .values import Value

ITEM = 4
"""The bytes of an element."""


def copied(site: Site, x: Value, y: Value) -> bool:
    """Emit the step that copies x to y, if the plan has open sizes and there is machine code for it.

    Args:
        site: the place.
        x: the source; a step of 0 repeats it.
        y: the target, of the same shape and dtype.

    Returns:
        Whether the step is emitted.
    """
    if not site.is_open or y.dtype.itemsize != ITEM or available():
        return False
    order = sorted(range(y.ndim), key=lambda a: -typical(y.strides[a]))
    shape, (into, of) = collapsed(y.shape, order, [y, x])
    axes = [*zip(shape, into, of, strict=True)] if of else []
    if not axes or not _is_item(axes[-1][1]) or len(axes) > 4:
        return False
    *outer, (width, _, step) = axes
    near = next((a for a in outer if _is_item(a[2])), outer[-1] if outer else (1, 0, 0))
    rest = [a for a in outer if a is not near]
    (_, y0, x0), (row1, y1, x1) = [*[(1, 0, 0)] * (2 - len(rest)), *rest]
    numbers = math.prod(a[0] for a in rest), row1, near[0], width, x0, x1, near[2], step, y0, y1, near[1]
    emit_product(site, copies(), dict(zip(COPY.numbers, numbers, strict=True)), {"x": x, "y": y}, ("y",), y.size, "copy")
    return True


def emit_copy(site: Site, x: Value, y: Value) -> None:
    """Emit the step that copies x to y, by machine code or by NumPy."""
    if not copied(site, x, y):
        site.emit(lambda: [(np.copyto, (y.array, x.array))], reads=(x,), writes=(y,), kernel="numpy.copyto")


def put(y: np.ndarray, x: np.ndarray) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call that copies an array into another; half the time of `np.copyto`."""
    return y.__setitem__, (..., x)


def joined(site: Site, values: Sequence[Value], axis: int) -> Value:
    """Values one after the other along an axis; in the memory of the first if it is a cache that can grow there."""
    first = values[0]
    rest = [(v.ndim, v.dtype, v.shape[:axis], v.shape[axis + 1 :]) for v in values]
    site.require(all(r == rest[0] for r in rest), "the shapes or types do not match")
    if len(values) == 1:
        return first.view(first.shape, first.strides)
    more = sum(v.shape[axis] for v in values[1:])
    shape = (*first.shape[:axis], first.shape[axis] + more, *first.shape[axis + 1 :])
    grown = site.grown(first, axis, more)
    y = grown or site.new(shape, first.dtype, order_of(max(values, key=lambda v: typical(v.size))))
    y.finiteness = worst(*values)
    parts, start = [], 0
    for n, v in enumerate(values):
        part = y.view(v.shape, y.strides, start * y.strides[axis])
        if v.size and not (grown and n == 0) and not copied(site, v, part):
            parts.append((part, v))
        start += v.shape[axis]
    if parts or not y.size:
        site.emit(lambda: [put(part.array, v.array) for part, v in parts], reads=values, writes=(y,), kernel="numpy.copy")
    return y


def _is_item(step: Any) -> bool:
    """Whether a step is known to be that to the next element."""
    return isinstance(step, int) and step == ITEM
