"""Operators that move elements: views if strides can express them, otherwise one copy into the arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..devices import namespaces
from ..dtypes import numpy_dtype
from ..ir.sizes import at_least_zero, broadcast_sizes, is_open, now, settled
from ..ir.slices import slice_of
from ..proto.tensor_data import check_of
from .copies import joined, put
from .elementwise import BOOL, FLOATS, INTEGERS, NUMBERS, SIGNED, compute, number, order_of
from .table import Invalid, Site, kernel, worst
from .values import ANY, FINITE, NAN, Bound, LazyBuffer, Value, strides_of
from .views import axes_in, ints, numbers_of

RAISE_BYTES = 1 << 14
"""Up to this size NumPy checks the indices of a gather itself, which costs a copy of the result."""


VIEWED = 1 << 12
"""The highest number of constant indices that are looked at, for steps that are equal."""


def axis_in(site: Site, axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axes_in(site, (axis,), rank)[0]


# --- Slice, Split, Expand


@kernel("Slice", 10, 11, 13, on="view")
def slice_(site: Site, x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None) -> Value:
    first, last = ints(site, starts, "the start"), ints(site, ends, "the end")
    which = ints(site, axes, "axes") if axes is not None else tuple(range(len(first)))
    by = ints(site, steps, "the step") if steps is not None else (1,) * len(first)
    return _sliced(site, x, first, last, which, by)


@kernel("Slice", 1, on="view")
def slice_1(site: Site, x: Value) -> Value:
    first, last, axes = (site.attributes[n] for n in ("starts", "ends", "axes"))
    return _sliced(site, x, first, last, tuple(range(len(first))) if axes is None else axes, (1,) * len(first))


def _sliced(site: Site, x: Value, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]) -> Value:
    site.require(len(starts) == len(ends) == len(axes) == len(steps) and all(steps), "not a valid slice")
    which = axes_in(site, axes, x.ndim)
    if is_open((*x.shape, *starts, *ends)):
        site.require(all(isinstance(s, int) and s > 0 for s in steps), "a step is negative")
        return _part(x, dict(zip(which, zip(starts, ends, steps, strict=True), strict=True)))
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(which, starts, ends, steps, strict=True):
        found = slice_of(start, end, step, x.shape[axis])
        assert found is not None
        index[axis] = found
    return x.like(x.array[tuple(index)])


def _part(x: Value, slices: Mapping[int, tuple[Any, Any, int]]) -> Value:
    """The view of (start, end, positive step) along axes."""
    shape, strides, offset = list(x.shape), list(x.strides), 0
    for axis, (start, end, step) in slices.items():
        size = x.shape[axis]
        low, high = (n + size if n < 0 else n for n in (start, end))
        low, high = (at_least_zero(n) for n in (low, high))
        low, high = (size if n > size else n for n in (low, high))
        shape[axis], strides[axis] = at_least_zero((high - low + step - 1) // step), x.strides[axis] * step
        offset += low * x.strides[axis]
    return x.view(shape, strides, offset)


@kernel("Split", 2, 11, 13, 18, on="view")
def split(site: Site, x: Value, sizes: Value | None = None) -> tuple[Value | None, ...]:
    axis = axis_in(site, site.attributes["axis"], x.ndim)
    count, size = len(site.outputs), x.shape[axis]
    given = ints(site, sizes, "the sizes", most=sizes.size) if sizes is not None else site.attributes.get("split")
    parts = site.attributes.get("num_outputs")
    if parts is not None:
        site.require(given is None and parts == count, "num_outputs is not the number of outputs")
        part = -(-size // count)
        given = (*[part] * (count - 1), size - part * (count - 1))
    elif given is None:
        site.require(size % count == 0, "the parts are not equal")
        given = (size // count,) * count
    site.require(len(given) == count and min(given) >= 0 and sum(given) == size, "the sizes do not add up")
    made, start = [], 0
    for part, used in zip(given, site.outputs, strict=True):
        shape = (*x.shape[:axis], part, *x.shape[axis + 1 :])
        made.append(x.view(shape, x.strides, start * x.strides[axis]) if used else None)
        start += part
    return tuple(made)


@kernel("Expand", 8, 13, on="view")
def expand(site: Site, x: Value, shape: Value) -> Value:
    site.require(x.size, "the input is empty")
    try:
        wanted = broadcast_sizes(x.shape, ints(site, shape, "the shape"))
    except ValueError:
        site.refuse("the shapes do not broadcast")
    before = len(wanted) - x.ndim
    strides = [0 if d == 1 and n != 1 else s for d, s, n in zip(x.shape, x.strides, wanted[before:], strict=True)]
    return x.view(wanted, [0] * before + strides)


# --- gathers


@kernel("Gather", 1, 11, 13, on="view")
def gather_view(site: Site, x: Value, indices: Value) -> Value:
    """Constant indices with equal steps, or a single one."""
    site.require(indices.constant and indices.dtype in SIGNED, "the indices depend on the data")
    axis = axis_in(site, site.attributes["axis"], x.ndim)
    size, stride = x.shape[axis], x.strides[axis]
    site.require(indices.size <= VIEWED, "there are many indices")
    where = numbers_of(indices)
    site.require(where and all(-size <= i < size for i in {min(where), max(where)}), "an index is out of range")
    where = [i + size if i < 0 else i for i in where]
    site.require(indices.ndim < 2 or len(where) == 1, "the indices have several axes")
    steps = [b - a for a, b in pairwise(where)]
    site.require(all(s == steps[0] for s in steps), "the steps are not equal")
    step = stride * steps[0] if steps else x.dtype.itemsize
    shape = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
    return x.view(shape, x.strides[:axis] + (step,) * indices.ndim + x.strides[axis + 1 :], where[0] * stride)


def _from_front(i: np.ndarray, size: int) -> np.ndarray:
    """Indices counted from the front; raises Invalid if one is out of range."""
    if i.size and (i.min() < -size or i.max() >= size):
        raise Invalid("an index is out of range")
    return np.where(i < 0, i + size, i)


def _constant_places(site: Site, indices: Value, size: int) -> np.ndarray | None:
    """Constant indices counted from the front; None for others."""
    site.require(indices.dtype in SIGNED and indices.size, "the indices are empty or not signed")
    if not indices.constant or not isinstance(size, int) or indices.contents is not None:
        return None
    try:
        return np.ascontiguousarray(_from_front(indices.array, size), np.intp)
    except Invalid as error:
        site.refuse(str(error))


@kernel("Gather", 1, 11, 13, on="numpy")
def gather(site: Site, x: Value, indices: Value) -> Value:
    axis = axis_in(site, site.attributes["axis"], x.ndim)
    size = x.shape[axis]
    site.require(x.size, "the input is empty")
    y = site.new(x.shape[:axis] + indices.shape + x.shape[axis + 1 :], x.dtype, finiteness=x.finiteness)
    places = _constant_places(site, indices, size)
    source = x.buffer.source if isinstance(x.buffer, LazyBuffer) and axis == 0 and x.contiguous and y.contiguous else None
    nbytes = y.nbytes

    def bind() -> Bound:
        calls: list[Any] = []
        if source is None:
            take, out = x.array.take, y.array
        else:  # the rows of a table in a file are read there, as bytes that need not be aligned
            row = f"V{x.nbytes // size}"
            take = np.ndarray((size,), row, source, x.offset).take
            out = np.ndarray(settled(indices.shape), row, y.buffer.memory, now(y.offset))
            check = check_of(source)
            calls += [] if check is None else [(check, ())]
        i = indices.array
        if places is not None:
            return [*calls, (take, (places, axis, out, "clip"))]
        if now(nbytes) <= RAISE_BYTES:
            return [*calls, (_taken, (take, i, axis, out))]
        return [*calls, (_taken_checked, (take, i, i.view(f"u{i.dtype.itemsize}"), now(size), axis, out))]

    site.emit(bind, reads=(x, indices), writes=(y,), kernel="numpy.take")
    return y


def _taken(take: Callable[..., Any], i: np.ndarray, axis: int, y: np.ndarray) -> None:
    try:
        take(i, axis, y, "raise")
    except IndexError as error:
        raise Invalid(str(error)) from None


def _taken_checked(take: Callable[..., Any], i: np.ndarray, plain: np.ndarray, size: int, axis: int, y: np.ndarray) -> None:
    """`plain` has the bits of the indices without sign: a negative one is above every size."""
    take(i if np.maximum.reduce(plain, None) < size else _from_front(i, size), axis, y, "clip")


def _flat_elements(site: Site, x: Value, indices: Value) -> Callable[[], np.ndarray]:
    """The flat positions of GatherElements and ScatterElements in an array in C order, for the present indices."""
    axis = axis_in(site, site.attributes["axis"], x.ndim)
    shape, size = indices.shape, x.shape[axis]
    site.require(
        len(shape) == x.ndim and all(n <= d for k, (n, d) in enumerate(zip(shape, x.shape, strict=True)) if k != axis),
        "the shapes do not match",
    )
    steps = strides_of(x.shape, 1)
    base = np.zeros(shape, np.intp)
    for k, step in enumerate(steps):
        if k != axis:
            base += (np.arange(shape[k]) * step).reshape((-1,) + (1,) * (len(shape) - k - 1))
    places = _constant_places(site, indices, size)
    if places is not None:
        fixed = base + places * steps[axis]
        return lambda: fixed
    return lambda: base + _from_front(indices.array, size) * steps[axis]


def _flat_rows(site: Site, x: Value, indices: Value) -> tuple[int, Callable[[], np.ndarray]]:
    """The number of axes that GatherND and ScatterND index, and the positions of rows of an array in C order."""
    depth = indices.shape[-1] if indices.ndim else 0
    site.require(1 <= depth <= x.ndim and indices.dtype in SIGNED and indices.size, "the shapes do not match")
    sizes = x.shape[:depth]
    steps = strides_of(sizes, 1)

    def places() -> np.ndarray:
        i = indices.array
        total = _from_front(i[..., 0], sizes[0]) * steps[0]
        for k in range(1, depth):
            total = total + _from_front(i[..., k], sizes[k]) * steps[k]
        return np.ascontiguousarray(total, np.intp)

    if not indices.constant:
        return depth, places
    try:
        fixed = places()
    except Invalid as error:
        site.refuse(str(error))
    return depth, lambda: fixed


@kernel("GatherElements", 11, 13, on="numpy")
def gather_elements(site: Site, x: Value, indices: Value) -> Value:
    site.require(x.contiguous and x.size, "the input is not in C order")
    places = _flat_elements(site, x, indices)
    y = site.new(indices.shape, x.dtype, finiteness=x.finiteness)

    def bind() -> Bound:
        take, out = x.view((x.size,), (x.dtype.itemsize,)).array.take, y.array
        if indices.constant:
            return [(take, (places(), None, out, "clip"))]
        return [(lambda: take(places(), None, out, "clip"), ())]

    site.emit(bind, reads=(x, indices), writes=(y,), kernel="numpy.take")
    return y


@kernel("GatherND", 11, 12, 13, on="numpy")
def gather_nd(site: Site, x: Value, indices: Value) -> Value:
    site.require(x.contiguous and x.size and not site.attributes.get("batch_dims", 0), "batches, or not in C order")
    depth, places = _flat_rows(site, x, indices)
    y = site.new(indices.shape[:-1] + x.shape[depth:], x.dtype, finiteness=x.finiteness)

    def bind() -> Bound:
        take, out = _rows(x, depth).take, y.array
        if indices.constant:
            return [(take, (places(), 0, out, "clip"))]
        return [(lambda: take(places(), 0, out, "clip"), ())]

    site.emit(bind, reads=(x, indices), writes=(y,), kernel="numpy.take")
    return y


def _rows(x: Value, depth: int) -> np.ndarray:
    """A value in C order with its first axes as one."""
    shape = (math.prod(x.shape[:depth]), *x.shape[depth:])
    return x.view(shape, strides_of(shape, x.dtype.itemsize)).array


# --- scatters


def _target(site: Site, x: Value, updates: Value) -> tuple[Value, bool]:
    """The value that a scatter writes to: the input itself if it may be overwritten."""
    site.require(site.attributes.get("reduction", "none") == "none", "a reduction")
    site.require(x.dtype == updates.dtype and x.dtype in NUMBERS | {BOOL} and updates.size, f"elements of {x.dtype}")
    if x.contiguous and site.reusable(0):
        made = x.view(x.shape, x.strides)
        made.finiteness, made.low = worst(x, updates), ANY
        return made, True
    return site.new(x.shape, x.dtype, finiteness=worst(x, updates)), False


@kernel("ScatterElements", 11, 13, 16, 18, on="numpy")
def scatter_elements(site: Site, x: Value, indices: Value, updates: Value) -> Value:
    site.require(indices.shape == updates.shape and x.size, "the shapes do not match")
    places = _flat_elements(site, x, indices)
    y, same = _target(site, x, updates)

    def bind() -> Bound:
        flat, new = y.view((y.size,), (y.dtype.itemsize,)).array, updates.array
        return _written(y, x, same, flat, places, new, indices.constant)

    site.emit(bind, reads=(x, indices, updates), writes=(y,), kernel="numpy.scatter")
    return y


@kernel("ScatterND", 11, 13, 16, 18, on="numpy")
def scatter_nd(site: Site, x: Value, indices: Value, updates: Value) -> Value:
    depth, places = _flat_rows(site, x, indices)
    site.require(updates.shape == indices.shape[:-1] + x.shape[depth:] and x.size, "the shapes do not match")
    y, same = _target(site, x, updates)
    site.emit(
        lambda: _written(y, x, same, _rows(y, depth), places, updates.array, indices.constant),
        reads=(x, indices, updates),
        writes=(y,),
        kernel="numpy.scatter",
    )
    return y


@kernel("ScatterND", 16, 18, on="numpy")
def scatter_nd_add(site: Site, x: Value, indices: Value, updates: Value) -> Value:
    """The gradient of an embedding: slices are added to rows, in the order of the indices."""
    site.require(site.attributes.get("reduction", "none") == "add", "not a sum")
    site.require(x.dtype == updates.dtype and x.dtype in FLOATS, f"elements of {x.dtype}")
    depth, places = _flat_rows(site, x, indices)
    site.require(updates.shape == indices.shape[:-1] + x.shape[depth:] and x.size and updates.size, "the shapes do not match")
    known = worst(x, updates)
    y = site.new(x.shape, x.dtype, finiteness=known if known == FINITE else NAN)

    def bind() -> Bound:
        whole, source, rows = y.array, x.array, _rows(y, depth)
        new = updates.array

        def run() -> None:
            where = places().reshape(-1)
            np.copyto(whole, source)
            add_rows(rows, where, new.reshape(where.size, *rows.shape[1:]))

        return [(run, ())]

    site.emit(bind, reads=(x, indices, updates), writes=(y,), kernel="numpy.add_rows")
    return y


ROUNDS = 16
"""The number of times a row is added to together with others; rows that occur more often are then completed one by one."""


def add_rows(rows: np.ndarray, where: np.ndarray, new: np.ndarray) -> None:
    """Add new[i] to rows[where[i]], one after the other, as `np.add.at` does, which is slower.

    The first addend of each row is added at once, then the second of each that has one, and so on.
    """
    order = np.argsort(where, kind="stable")
    ordered = where[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(np.append(starts, where.size))
    for n in range(ROUNDS):
        chosen = order[starts + n]
        rows[where[chosen]] += new[chosen]
        further = counts > n + 1
        if not further.any():
            return
        starts, counts = starts[further], counts[further]
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        row = int(ordered[start])
        rows[row] = np.add.reduce(np.concatenate((rows[row][None], new[order[start + ROUNDS : start + count]])), axis=0)


def _written(
    y: Value, x: Value, same: bool, rows: np.ndarray, places: Callable[[], np.ndarray], new: np.ndarray, constant: bool
) -> Bound:
    """The calls of a scatter: positions that depend on the data are checked before anything is written."""
    if constant:
        return [*([] if same else [put(y.array, x.array)]), (rows.__setitem__, (places(), new))]
    whole, source = y.array, x.array

    def run() -> None:
        where = places()
        if not same:
            whole[...] = source
        rows[where] = new

    return [(run, ())]


# --- joined, repeated and padded


@kernel("Concat", 1, 4, 11, 13, on="numpy")
def concat(site: Site, *values: Value) -> Value:
    return joined(site, values, axis_in(site, site.attributes["axis"], values[0].ndim))


@kernel("Tile", 6, 13, on="numpy")
def tile(site: Site, x: Value, repeats: Value) -> Value:
    times = ints(site, repeats, "the repeats")
    site.require(len(times) == x.ndim and all(r > 0 for r in times) and x.size and 2 * x.ndim <= 64, "not valid repeats")
    y = site.new([r * d for r, d in zip(times, x.shape, strict=True)], x.dtype)
    whole = y.view(
        [n for r, d in zip(times, x.shape, strict=True) for n in (r, d)],
        [s for d, t in zip(x.shape, y.strides, strict=True) for s in (d * t, t)],
    )
    source = x.view([n for d in x.shape for n in (1, d)], [s for t in x.strides for s in (0, t)])
    site.emit(lambda: [put(whole.array, source.array)], reads=(x,), writes=(y,), kernel="numpy.copy")
    return y


@kernel("Pad", 11, 13, 18, 19, 21, 23, 24, 25, on="numpy")
def pad(site: Site, x: Value, pads: Value, value: Value | None = None, axes: Value | None = None) -> Value:
    site.require(value is None or (value.size == 1 and value.dtype == x.dtype), "the value is not a scalar")
    which = axes_in(site, ints(site, axes, "axes"), x.ndim) if axes is not None else range(x.ndim)
    return _padded(site, x, ints(site, pads, "the pads"), None if value is None else value.view((), ()), which)


@kernel("Pad", 2, on="numpy")
def pad_2(site: Site, x: Value) -> Value:
    value = site.constant(np.array(site.attributes["value"], x.dtype))
    return _padded(site, x, site.attributes["pads"], value, range(x.ndim))


def _padded(site: Site, x: Value, pads: Sequence[int], value: Value | None, axes: Sequence[int]) -> Value:
    site.require(len(pads) == 2 * len(axes) and x.dtype in NUMBERS | {BOOL}, "the pads do not match the axes")
    mode = site.attributes["mode"]
    site.require(mode != "wrap" or site.version >= 19, "wrap needs version 19")
    fronts, ends = [0] * x.ndim, [0] * x.ndim
    for axis, front, end in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        fronts[axis], ends[axis] = front, end
    kept = [(max(0, -f), d - max(0, -e)) for f, d, e in zip(fronts, x.shape, ends, strict=True)]
    site.require(all(low < high for low, high in kept), "the pads remove everything")
    inner = _part(x, {axis: (low, high, 1) for axis, (low, high) in enumerate(kept)})
    fronts, ends = [max(0, f) for f in fronts], [max(0, e) for e in ends]
    if not any(fronts) and not any(ends):
        return inner
    shape = [f + d + e for f, d, e in zip(fronts, inner.shape, ends, strict=True)]
    if mode in ("reflect", "wrap", "edge"):
        most = {"reflect": -1, "wrap": 0}.get(mode, math.inf)
        site.require(
            all(max(f, e) <= d + most or not max(f, e) for f, d, e in zip(fronts, inner.shape, ends, strict=True)), "long"
        )
    else:
        site.require(mode == "constant", "not a valid mode")
    y = site.new(shape, x.dtype, order_of(x), worst(x, value))

    def bind() -> Bound:
        out = y.array
        middle = [slice(f, f + d) for f, d in zip(fronts, inner.shape, strict=True)]
        calls = [put(out[tuple(middle)], inner.array)]
        fill = value.array if value is not None else number(0, x.dtype)
        for axis, (f, d, e) in enumerate(zip(fronts, inner.shape, ends, strict=True)):
            for here, there in _borders(mode, f, d, e):
                if mode == "constant":  # later axes whole, earlier ones without their borders
                    calls.append(put(out[(*middle[:axis], here)], fill))
                else:
                    before = (slice(None),) * axis
                    calls.append(put(out[(*before, here, *middle[axis + 1 :])], out[(*before, there, *middle[axis + 1 :])]))
        return calls

    site.emit(bind, reads=(x, value), writes=(y,), kernel="numpy.copy")
    return y


def _borders(mode: str, front: int, size: int, end: int) -> list[tuple[slice, slice]]:
    """The borders of a padded axis, and the places that they are copied from."""
    last = front + size
    found: list[tuple[slice, slice]] = []
    if front:
        sources = {
            "reflect": slice(2 * front, front, -1),
            "wrap": slice(last - front, last),
            "edge": slice(front, front + 1),
        }
        found.append((slice(0, front), sources.get(mode, slice(0))))
    if end:
        low = last - 2 - end
        sources = {
            "reflect": slice(last - 2, low if low >= 0 else None, -1),
            "wrap": slice(front, front + end),
            "edge": slice(last - 1, last),
        }
        found.append((slice(last, last + end), sources.get(mode, slice(0))))
    return found


@kernel("Trilu", 14, on="numpy")
def trilu(site: Site, x: Value, k: Value | None = None) -> Value:
    site.require(x.ndim >= 2 and x.dtype in NUMBERS | {BOOL}, f"elements of {x.dtype}")
    least = ints(site, k, "k") if k is not None else (0,)
    site.require(len(least) == 1, "k is not a scalar")
    diagonal = np.arange(x.shape[-1]) - np.arange(x.shape[-2])[:, None]
    kept = diagonal >= least[0] if site.attributes["upper"] else diagonal <= least[0]
    mask = site.constant(kept)

    def recipe(y: Any, a: Any, m: Any) -> Bound:
        return [(y.fill, (0,)), (np.copyto, (y, a, "same_kind", m))]

    return compute(site, (x, mask), x.dtype, recipe, "numpy.copyto", x.finiteness, overwrite=())


@kernel("OneHot", 11, 28, on="numpy")
def one_hot(site: Site, indices: Value, depth: Value, values: Value) -> Value:
    """A class c equals the indices c and c - depth."""
    count = ints(site, depth, "the depth")
    site.require(len(count) == 1 and count[0] > 0 and values.shape == (2,) and indices.dtype in SIGNED, "not valid")
    site.require(values.dtype in NUMBERS | {BOOL} and indices.size, f"elements of {values.dtype}")
    site.require(count[0] < np.iinfo(indices.dtype).max, "the classes exceed the type of the indices")
    axis = axis_in(site, site.attributes["axis"], indices.ndim + 1)
    shape = (*indices.shape[:axis], 1, *indices.shape[axis:])
    strides = (*indices.strides[:axis], 0, *indices.strides[axis:])
    classes = np.arange(count[0], dtype=indices.dtype).reshape((-1,) + (1,) * (indices.ndim - axis))
    low, high = site.constant(classes - indices.dtype.type(count[0])), site.constant(classes)
    off, on = (values.view((), (), k * values.strides[0]) for k in (0, 1))

    def recipe(y: Any, i: Any, a: Any, b: Any, no: Any, yes: Any, m: Any, n: Any) -> Bound:
        calls = [(np.equal, (i, a, m)), (np.equal, (i, b, n)), (np.logical_or, (m, n, m))]
        return [*calls, put(y, no), (np.copyto, (y, yes, "same_kind", m))]

    inputs = (indices.view(shape, strides), low, high, off, on)
    return compute(site, inputs, values.dtype, recipe, "numpy.onehot", values.finiteness, (BOOL, BOOL), ())


# --- conversions


@kernel("Cast", 6, 9, 13, 19, 21, 23, 24, 25, 28, on="view")
def cast_view(site: Site, x: Value) -> Value:
    return _unchanged(site, x, numpy_dtype(site.attributes["to"]))


@kernel("CastLike", 15, 19, 21, 23, 24, 25, on="view")
def cast_like_view(site: Site, x: Value, target: Value) -> Value:
    return _unchanged(site, x, target.dtype)


def _unchanged(site: Site, x: Value, dtype: np.dtype[Any]) -> Value:
    site.require(x.dtype == dtype and dtype in NUMBERS | {BOOL, np.dtype(np.float16)}, "the type changes")
    return x.view(x.shape, x.strides)


@kernel("Cast", 6, 9, 13, 19, 21, 23, 24, 25, 28, on="numpy")
def cast(site: Site, x: Value) -> Value:
    return _cast(site, x, numpy_dtype(site.attributes["to"]))


@kernel("CastLike", 15, 19, 21, 23, 24, 25, on="numpy")
def cast_like(site: Site, x: Value, target: Value) -> Value:
    return _cast(site, x, target.dtype)


def _cast(site: Site, x: Value, dtype: np.dtype[Any]) -> Value:
    plain = NUMBERS | {BOOL}
    half = np.dtype(np.float16)
    name = "numpy.cast"
    if x.dtype in plain and dtype == BOOL:
        zero = number(0, x.dtype)
        return compute(site, (x,), BOOL, lambda y, a: [(np.not_equal, (a, zero, y))], name, FINITE)
    if x.dtype in FLOATS and dtype in INTEGERS:
        info = np.iinfo(dtype)
        low, high = int(info.min), int(info.max)
        return compute(site, (x,), dtype, lambda y, a: [(_truncated, (y, a, low, high))], name, FINITE, overwrite=())
    widened = x.dtype == half and dtype in FLOATS
    narrowed = x.dtype == np.float32 and dtype == half
    site.require(widened or narrowed or (x.dtype in plain and dtype in plain), f"from {x.dtype} to {dtype}")
    return compute(site, (x,), dtype, lambda y, a: [(np.copyto, (y, a, "unsafe"))], name, x.finiteness, overwrite=())


def _truncated(y: np.ndarray, x: np.ndarray, low: int, high: int) -> None:
    """Floats as integers; those out of range, from `low` to `high`, as Cast defines it."""
    if x.size == 1:
        within = low <= float(x.item()) <= high
    else:
        within = not x.size or (low <= float(np.minimum.reduce(x, None)) and float(np.maximum.reduce(x, None)) <= high)
    if not within:
        y[...] = namespaces.numpy.cast(x, y.dtype)
        return
    np.copyto(y, x, "unsafe")
