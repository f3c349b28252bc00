"""Softmax and LogSoftmax."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from ..ir.versioned import versioned
from . import onednn as dnn
from .elementwise import FLOATS
from .expressions import ExpressionCall, compute, trace
from .lowering import F32, emit, threads_for
from .products import contiguous, described
from .sums import Sum
from .table import Site, kernel
from .values import FINITE, NAN, REACHED, Bound, Value, merged, strides_of

LONG = 1 << 15
"""The elements of a row from which NumPy adds them in pairs."""

COST = 12
"""FLOPs that take the time of one element."""


def rows_of(site: Site, x: Value, axis: int) -> Value:
    """A matrix without gaps: `axis` and later axes are the columns; of a copy if the memory does not permit a view."""
    for one in (x, None):
        one = one or contiguous(site, x)
        rows, columns = merged(one.shape[:axis], one.strides[:axis]), merged(one.shape[axis:], one.strides[axis:])
        width = (columns[0] if columns else 0) * x.dtype.itemsize
        if rows and columns and (columns[1] == x.dtype.itemsize or columns[0] == 1) and (rows[1] == width or rows[0] == 1):
            return one.view((rows[0], columns[0]), (rows[1], columns[1]))
    raise AssertionError


def softmax_in_place(site: Site, x: Value) -> None:
    """Add the step that replaces a value in C order by its softmax over the last axis."""

    def by_code() -> Value:
        terms, inputs = trace(site, [ExpressionCall(versioned("", "Softmax", 13), {"axis": -1}, (x,))])
        (y,) = compute(site, terms, inputs, "softmax", into={0: x}, engine="machine")
        site.require(y.buffer is x.buffer, "softmax is not computed in place")
        return y

    if site.attempt(by_code) is not None:
        return
    rows = x.view((x.size // x.shape[-1], x.shape[-1]), (x.shape[-1] * F32.itemsize, F32.itemsize))
    md = described(rows)
    with threads_for(COST * x.size):
        primitive = dnn.softmax(md, md, axis=1)
    emit(site, primitive, {dnn.args.SRC: (md, rows), dnn.args.DST: (md, rows)}, (rows,))


def softmax_of_rows(site: Site, z: Value, y: Value) -> Value:
    """Emit the step that sets `y` to the softmax of rows, computed in the dtype of `z`; return `y`.

    The exponential of the largest element is 1, so that no sum is 0.
    """
    if z.size <= _FEW:
        site.emit(lambda: [(_softmax_few, (z.array, y.array.reshape(-1)))], reads=(z,), writes=(y,), kernel="numpy.softmax")
        return y
    e, top = site.new(z.shape, z.dtype, finiteness=NAN), site.new((z.shape[0], 1), z.dtype, finiteness=NAN)
    narrow = 2 <= z.shape[1] <= _NARROW and z.shape[0] >= _ROWS
    ones = np.ones(z.shape[1], z.dtype) if z.shape[0] == 1 and z.shape[1] < LONG else None

    def bind() -> Bound:
        s, t, m = z.array, e.array, top.array
        if ones is not None:  # calls with a number and a vector are twice as fast as those that broadcast
            s, t, m = s.reshape(-1), t.reshape(-1), m.reshape(())
            return [
                (np.maximum.reduce, (s, 0, None, m)), (np.subtract, (s, m, t)), (np.exp, (t, t)),
                (t.dot, (ones, m)), (np.divide, (t, m, t)), (np.copyto, (y.array, e.array, "same_kind")),
            ]  # fmt: skip
        reduce = _across if narrow else _along
        return [
            *reduce(np.maximum, s, m), (np.subtract, (s, m, t)), (np.exp, (t, t)),
            *reduce(np.add, t, m), (np.divide, (t, m, y.array)),
        ]  # fmt: skip

    site.emit(bind, reads=(z,), writes=(e, top, y), kernel="numpy.softmax")
    return y


def _softmax_few(z: np.ndarray, y: np.ndarray) -> None:
    """The softmax of rows in numbers of Python; one NaN makes a row NaN."""
    i = 0
    for row in z.tolist():
        top = max(row)
        powers = [math.exp(v - top) for v in row]
        total = sum(powers)
        for power in powers:
            y[i] = power / total
            i += 1


_FEW = 12
"""The number of scores up to which their softmax is computed in numbers of Python."""

_NARROW, _ROWS = 12, 48
"""A matrix of at most this many columns and at least this many rows is reduced column by column."""


def _along(function: np.ufunc, x: np.ndarray, y: np.ndarray) -> Bound:
    """The call that reduces rows to a column."""
    return [(function.reduce, (x, 1, None, y, True))]


def _across(function: np.ufunc, x: np.ndarray, y: np.ndarray) -> Bound:
    """The calls that reduce rows to a column, a column at a time: a reduction of a few numbers costs more than their sum."""
    now = y[:, 0]
    return [
        (partial(function, x[:, i] if i > 1 else x[:, 0], x[:, 1] if i == 1 else now, out=now), ()) for i in range(1, x.shape[1])
    ]


def _axis(site: Site, x: Value) -> int:
    axis: int = site.attributes["axis"]
    site.require(-x.ndim <= axis < x.ndim, "the axis is out of range")
    return axis % x.ndim


def _flattened(site: Site, x: Value) -> int:
    axis: int = site.attributes["axis"]
    site.require(-x.ndim <= axis < max(x.ndim, 1), "the axis is out of range")
    return axis % max(x.ndim, 1)


def _computed(site: Site, x: Value, axes: tuple[int, ...]) -> Value:
    """The definition's functions over adjacent axes."""
    log = site.name == "LogSoftmax"
    site.require(x.dtype in FLOATS and x.size and x.ndim, "elements of other types, or none")
    finiteness = FINITE if x.finiteness == FINITE or (x.low == REACHED and not log) else NAN
    y = site.new(x.shape, x.dtype, finiteness=finiteness)
    if not log and math.prod(x.shape[axes[-1] + 1 :]) == 1:
        rows = rows_of(site, x, axes[0])
        softmax_of_rows(site, rows, y.view(rows.shape, strides_of(rows.shape, x.dtype.itemsize)))
        return y
    one = site.new([1 if i in axes else d for i, d in enumerate(x.shape)], x.dtype)
    total = Sum(x.shape, y.strides, x.dtype, axes)
    scratch = total.scratch(site, x.nbytes * log)

    def bind() -> Bound:
        z, s = y.array, one.array
        powers = np.ndarray(x.shape, x.dtype, scratch.memory) if log and scratch is not None else z
        return [
            (np.maximum.reduce, (x.array, axes, None, s, True)), (np.subtract, (x.array, s, z)), (np.exp, (z, powers)),
            *total.calls(powers, s.reshape([x.shape[a] for a in total.kept]), scratch, x.nbytes * log),
            *([(np.log, (s, s)), (np.subtract, (z, s, z))] if log else [(np.divide, (z, s, z))]),
        ]  # fmt: skip

    site.emit(bind, reads=(x,), writes=(y, one), kernel=f"numpy.{'log_' * log}softmax", scratch=scratch)
    return y


@kernel("Softmax", 13, on="numpy")
@kernel("LogSoftmax", 13, on="numpy")
def softmax(site: Site, x: Value) -> Value:
    return _computed(site, x, (_axis(site, x),))


@kernel("Softmax", 1, 11, on="numpy")
@kernel("LogSoftmax", 1, 11, on="numpy")
def softmax_rows(site: Site, x: Value) -> Value:
    return _computed(site, x, tuple(range(_flattened(site, x), x.ndim)))
