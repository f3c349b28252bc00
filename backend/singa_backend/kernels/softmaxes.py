"""Softmax, LogSoftmax, and their gradients."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from ..ir.gradient import GRADIENT
from . import onednn as dnn
from .elementwise import FLOATS
from .lowering import F32, copy, emit, ordered, require_gradient, threads_for
from .onednn import MemoryDesc, backward
from .products import contiguous, described, merged
from .sums import Sum
from .table import Site, gradient, kernel, worst
from .values import ANY, FINITE, INFINITE, NAN, REACHED, Bound, Value, strides_of

LONG = 1 << 15
"""The elements of a row from which sums by oneDNN, which adds those of each lane one after the other, are not exact enough."""

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


def _softmax(site: Site, x: Value, first: int) -> Value:
    """Softmax over the axis `first` and the later ones."""
    site.require(x.dtype == F32 and x.size and x.ndim, "not float32, or empty")
    site.require(x.finiteness == FINITE or (x.finiteness == INFINITE and x.low), "the input may be infinite")
    site.needs_finite()
    rows = rows_of(site, x, first)
    inside = rows.buffer is x.buffer and site.reusable(0)
    md = described(rows)
    target = md if inside else MemoryDesc.of(F32, rows.shape)
    with threads_for(COST * x.size):
        primitive = dnn.softmax(md, target, axis=1)
    finiteness = FINITE if x.finiteness == FINITE or x.low == REACHED else NAN
    y = x.view(x.shape, x.strides) if inside else site.new(x.shape, F32, finiteness=finiteness)
    y.finiteness, y.low = finiteness, ANY
    flat = y.view(rows.shape, rows.strides if inside else strides_of(rows.shape, F32.itemsize))
    emit(site, primitive, {dnn.args.SRC: (md, rows), dnn.args.DST: (target, flat)}, (flat,))
    if rows.shape[1] >= LONG:
        sums = site.new((rows.shape[0], 1), F32, finiteness=finiteness)

        def bind() -> Bound:
            z, s = flat.array, sums.array
            return [(np.add.reduce, (z, 1, None, s, True)), (np.divide, (z, s, z))]

        site.emit(bind, reads=(flat,), writes=(flat, sums), kernel="numpy.softmax")
    return y


def softmax_in_place(site: Site, x: Value) -> None:
    """Add the step that replaces a value in C order by its softmax over the last axis."""
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


def _permuted(x: Value, perm: list[int]) -> Value:
    return x.view([x.shape[p] for p in perm], [x.strides[p] for p in perm])


def _axis(site: Site, x: Value) -> int:
    axis: int = site.attributes["axis"]
    site.require(-x.ndim <= axis < x.ndim, "the axis is out of range")
    return axis % x.ndim


def _flattened(site: Site, x: Value) -> int:
    axis: int = site.attributes["axis"]
    site.require(-x.ndim <= axis < max(x.ndim, 1), "the axis is out of range")
    return axis % max(x.ndim, 1)


@kernel("Softmax", 13, on="onednn")
def softmax(site: Site, x: Value) -> Value:
    axis = _axis(site, x)
    if math.prod(x.shape[axis + 1 :]) == 1:
        return _softmax(site, x, axis)
    perm = [*(i for i in range(x.ndim) if i != axis), axis]
    return _permuted(_softmax(site, _permuted(x, perm), x.ndim - 1), np.argsort(perm).tolist())


@kernel("Softmax", 1, 11, on="onednn")
def softmax_rows(site: Site, x: Value) -> Value:
    return _softmax(site, x, _flattened(site, x))


def _plain_softmax(site: Site, x: Value, first: int) -> Value:
    """The definition's functions, which take infinities and NaN."""
    site.require(x.dtype in FLOATS and x.size and x.ndim, "elements of other types, or none")
    rows = rows_of(site, x, first)
    y = site.new(x.shape, x.dtype, finiteness=FINITE if x.finiteness == FINITE else NAN)
    softmax_of_rows(site, rows, y.view(rows.shape, strides_of(rows.shape, x.dtype.itemsize)))
    return y


@kernel("Softmax", 13, on="numpy")
def softmax_plain(site: Site, x: Value) -> Value:
    axis = _axis(site, x)
    site.require(axis == x.ndim - 1, "not the last axis")
    return _plain_softmax(site, x, axis)


@kernel("Softmax", 1, 11, on="numpy")
def softmax_plain_rows(site: Site, x: Value) -> Value:
    return _plain_softmax(site, x, _flattened(site, x))


def _log_softmax(site: Site, x: Value, axes: int | tuple[int, ...]) -> Value:
    """The definition's functions; oneDNN's logarithm has errors of 4e-6, which are large against results near 0."""
    site.require(x.dtype in FLOATS and x.size and x.ndim, "elements of other types, or none")
    y = site.new(x.shape, x.dtype, finiteness=FINITE if x.finiteness == FINITE else NAN)
    one = site.new([1 if i in np.atleast_1d(axes) else d for i, d in enumerate(x.shape)], x.dtype)
    total = Sum(x.shape, y.strides, x.dtype, np.atleast_1d(axes).tolist())
    scratch = total.scratch(site, x.nbytes)

    def bind() -> Bound:
        assert scratch is not None
        source, z, t = x.array, y.array, np.ndarray(x.shape, x.dtype, scratch.memory)
        largest = one.array
        return [
            (np.maximum.reduce, (source, axes, None, largest, True)), (np.subtract, (source, largest, z)), (np.exp, (z, t)),
            *total.calls(t, largest.reshape([x.shape[a] for a in total.kept]), scratch, x.nbytes),
            (np.log, (largest, largest)), (np.subtract, (z, largest, z)),
        ]  # fmt: skip

    site.emit(bind, reads=(x,), writes=(y, one), kernel="numpy.log_softmax", scratch=scratch)
    return y


@kernel("LogSoftmax", 13, on="numpy")
def log_softmax(site: Site, x: Value) -> Value:
    return _log_softmax(site, x, _axis(site, x))


@kernel("LogSoftmax", 1, 11, on="numpy")
def log_softmax_rows(site: Site, x: Value) -> Value:
    return _log_softmax(site, x, tuple(range(_flattened(site, x), x.ndim)))


def _gradient(site: Site, dy: Value, y: Value, log: bool) -> Value:
    """The gradient of a softmax, or of its logarithm, from the result, in place of dy if nothing else reads it."""
    require_gradient(site, dy, y.shape)
    site.require(y.dtype == F32 and y.size, "not float32, or empty")
    site.require(worst(dy, y) == FINITE, "a value may be infinite")
    site.needs_finite()
    axis = _axis(site, y)
    if math.prod(y.shape[axis + 1 :]) != 1:
        site.require(
            y.strides[axis] == y.dtype.itemsize, "NumPy is faster for an axis that is not the last, nor innermost in memory"
        )
        perm = [*(i for i in range(y.ndim) if i != axis), axis]
        made = _rows_gradient(site, _permuted(dy, perm), _permuted(y, perm), y.ndim - 1, log)
        dx = _permuted(made, np.argsort(perm).tolist())
        if dy.strides[axis] == y.dtype.itemsize:
            return dx
        back = site.new(dy.shape, F32, sorted(range(dy.ndim), key=lambda i: (-dy.strides[i], i)))
        copy(site, dx, back)  # what reads it is laid out as what wrote dy
        return back
    return _rows_gradient(site, dy, y, axis, log)


def _rows_gradient(site: Site, dy: Value, y: Value, axis: int, log: bool) -> Value:
    """The gradient over the axes from one on."""
    results, rows = rows_of(site, y, axis), rows_of(site, dy, axis)
    inside = rows.buffer is dy.buffer and site.reusable(0) and rows.buffer is not results.buffer
    source, md = described(results), described(rows)
    target = md if inside else MemoryDesc.of(F32, rows.shape)
    with threads_for(COST * y.size):
        hint = dnn.softmax(source, source, axis=1, log=log, prop="training")
        made = backward.softmax_backward(target, md, source, hint=hint, axis=1, log=log)
    dx = dy.view(dy.shape, dy.strides) if inside else site.new(y.shape, F32)
    arguments = {dnn.args.DST: (source, results), dnn.args.DIFF_DST: (md, rows), dnn.args.DIFF_SRC: (target, dx)}
    emit(site, made, arguments, (dx,), "softmax gradient")
    return dx


@gradient("Softmax", 13, reads=("dy0", "y0"))
def softmax_gradient(site: Site, dy: Value, y: Value) -> Value:
    return _gradient(site, dy, y, log=False)


@gradient("LogSoftmax", 13, reads=("dy0", "y0"))
def log_softmax_gradient(site: Site, dy: Value, y: Value) -> Value:
    return _gradient(site, dy, y, log=True)


def _by_axis(site: Site, dy: Value, y: Value, log: bool) -> Value:
    """The gradient over any axis, by the functions of the rule."""
    site.require(y.dtype in FLOATS and dy.dtype == y.dtype and y.size and dy.shape == y.shape, "elements of other types, or none")
    axis = _axis(site, y)
    order = sorted(range(y.ndim), key=lambda i: (-y.strides[i], i))
    dy = ordered(site, dy, order)
    dx = site.new(y.shape, y.dtype, order)
    total = Sum(y.shape, dx.strides, y.dtype, (axis,))
    sums = site.new([1 if i == axis else d for i, d in enumerate(y.shape)], y.dtype, [*total.kept, axis])
    scratch = total.scratch(site)

    def bind() -> Bound:
        given, result, t, s = dy.array, y.array, dx.array, sums.array
        out = s.squeeze(axis)
        if log:
            added = total.calls(given, out, scratch)
            return [*added, (np.exp, (result, t)), (np.multiply, (t, s, t)), (np.subtract, (given, t, t))]
        added = total.calls(t, out, scratch)
        return [(np.multiply, (given, result, t)), *added, (np.subtract, (given, s, t)), (np.multiply, (result, t, t))]

    site.emit(bind, reads=(dy, y), writes=(dx, sums), kernel="numpy.softmax gradient", scratch=scratch)
    return dx


@kernel("Softmax", 13, on="numpy", domain=GRADIENT)
def softmax_gradient_by_axis(site: Site, dy: Value, y: Value) -> Value:
    return _by_axis(site, dy, y, log=False)


@kernel("LogSoftmax", 13, on="numpy", domain=GRADIENT)
def log_softmax_gradient_by_axis(site: Site, dy: Value, y: Value) -> Value:
    return _by_axis(site, dy, y, log=True)
