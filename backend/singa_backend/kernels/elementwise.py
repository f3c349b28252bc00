"""The frame of elementwise steps: where results are, and the fewest axes along which arrays are walked together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.sizes import broadcast_sizes
from .table import Site, kernel
from .values import ANY, FINITE, NAN, Bound, Value, dense, strides_of

FLOATS = frozenset(map(np.dtype, (np.float32, np.float64)))
SIGNED = frozenset(map(np.dtype, (np.int8, np.int16, np.int32, np.int64)))
UNSIGNED = frozenset(map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64)))
INTEGERS = SIGNED | UNSIGNED
NUMBERS = FLOATS | INTEGERS
BOOL = np.dtype(np.bool_)

BLOCK = 1 << 13
"""The elements of a piece of a large array that a chain of functions computes at a time, so that it stays in the cache."""

Recipe = Callable[..., Bound]
"""Called with the result's array, the inputs' and those of temporary values; returns the calls."""


# --- results


def order_of(x: Value) -> list[int] | None:
    """The axes of a value from the outermost in memory to the innermost; None if it has gaps, repetitions or negative strides."""
    order = sorted(range(x.ndim), key=lambda a: -x.strides[a])
    return order if dense(x.shape, x.strides, x.dtype.itemsize, order) else None


def broadcast(site: Site, inputs: Sequence[Value]) -> tuple[int, ...]:
    """The shape of an elementwise result."""
    first = inputs[0].shape
    if all(v.shape == first for v in inputs):
        return first
    try:
        return broadcast_sizes(*(v.shape for v in inputs))
    except ValueError:
        site.refuse("the shapes do not broadcast")


def result(
    site: Site,
    inputs: Sequence[Value | None],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    finiteness: int,
    places: Sequence[int],
) -> Value:
    """The value that an elementwise operator writes: one of the inputs in `places` if it may, otherwise in the same memory order.

    A result of one element is always a new value: in place, NumPy takes three times as long.
    """
    orders: list[list[int]] = []
    several = math.prod(shape) != 1
    for place, v in enumerate(inputs):
        if v is None or v.shape != shape:
            continue
        order = order_of(v)
        if order is None:
            continue
        if several and place in places and v.dtype == dtype and site.reusable(place):
            made = v.view(v.shape, v.strides)
            made.finiteness, made.low = finiteness, ANY
            return made
        orders.append(order)
    return site.new(shape, dtype, orders[0] if orders else None, finiteness)


def finiteness_of(dtype: np.dtype[Any], finiteness: int) -> int:
    """Integers and booleans are always finite."""
    return FINITE if dtype.kind in "biu" else finiteness


def number(value: float, dtype: np.dtype[Any]) -> np.ndarray:
    """A constant of an expression, as an array: NumPy converts a Python number at every call."""
    return np.array(value, dtype)


def compute(
    site: Site,
    inputs: Sequence[Value],
    dtype: np.dtype[Any],
    recipe: Recipe,
    name: str,
    finiteness: int,
    temporary: Sequence[np.dtype[Any]] = (),
    overwrite: Sequence[int] | None = None,
) -> Value:
    """Emit a step that computes an elementwise result.

    Args:
        site: the place.
        inputs: the inputs, which broadcast.
        dtype: of the result.
        recipe: returns the calls.
        name: of the kernel.
        finiteness: of the result.
        temporary: the dtypes of the arrays of the result's shape that the recipe needs.
        overwrite: the positions of inputs that the result may replace; by default all: the recipe must then write to the result
            in its last call only, or read no input after it has written to it.
    """
    shape = broadcast(site, inputs)
    y = result(
        site, inputs, shape, dtype, finiteness_of(dtype, finiteness), range(len(inputs)) if overwrite is None else overwrite
    )
    order = order_of(y)
    assert order is not None

    def bind(arrays: Sequence[np.ndarray], ys: Sequence[np.ndarray], registers: Sequence[np.ndarray]) -> Bound:
        return recipe(*ys, *arrays, *registers)

    emit_calls(site, [y], inputs, order, ArrayCalls(bind, temporary, bool(temporary)), name)
    return y


@dataclass(frozen=True)
class ArrayCalls:
    """Calls of NumPy on arrays of one shape.

    Attributes:
        bind: returns the calls for the arrays of the inputs, of the results, and temporary ones.
        temporary: the dtypes of the temporary arrays.
        in_pieces: whether a large result is computed in pieces that stay in the cache.
    """

    bind: Callable[[Sequence[np.ndarray], Sequence[np.ndarray], Sequence[np.ndarray]], Bound]
    temporary: Sequence[np.dtype[Any]]
    in_pieces: bool


def emit_calls(
    site: Site, ys: Sequence[Value], inputs: Sequence[Value], order: Sequence[int], calls: ArrayCalls, name: str
) -> None:
    """Emit the step of calls that compute results of one shape, to which the inputs broadcast.

    Args:
        site: the place.
        ys: the results.
        inputs: the inputs.
        order: of the axes of the results in memory.
        calls: the calls.
        name: of the step.
    """
    inputs, size = [stretched(site, v, ys[0].shape, order) for v in inputs], ys[0].size
    dims, steps = collapsed(ys[0].shape, order, [*ys, *inputs])
    count = min(size, BLOCK) if calls.in_pieces and len(dims) == 1 and size > 2 * BLOCK else size
    places = [0]
    for t in calls.temporary:
        places.append(places[-1] + -(-count * t.itemsize // 64) * 64)
    scratch = site.scratch(places[-1]) if places[-1] else None

    def bind() -> Bound:
        arrays: list[np.ndarray] = []
        views: dict[Any, np.ndarray] = {}  # NumPy is faster when the object is the same
        for v, strides in zip([*ys, *inputs], steps, strict=True):
            key = (id(v.buffer), v.offset, strides, v.dtype)
            if key not in views:
                views[key] = np.ndarray(dims if strides else (), v.dtype, v.buffer.memory, v.offset, strides)
            arrays.append(views[key])
        bound: list[Any] = []
        memory = None if scratch is None else scratch.memory
        for start in range(0, max(size, 1), count or 1):
            now, part = arrays, dims
            if count < size:
                stop = min(start + count, size)
                pieces = {id(a): a[start:stop] if a.ndim else a for a in arrays}
                now, part = [pieces[id(a)] for a in arrays], (stop - start,)
            registers = [np.ndarray(part, t, memory, p) for t, p in zip(calls.temporary, places, strict=False)]
            bound += calls.bind(now[len(ys) :], now[: len(ys)], registers)
        return bound

    site.emit(bind, reads=inputs, writes=ys, kernel=name, scratch=scratch)


SMALL = 1 << 12
"""Up to this number of elements a constant is repeated to the shape of the result: NumPy is three times as fast then."""


def stretched(site: Site, v: Value, shape: tuple[int, ...], order: Sequence[int]) -> Value:
    """A small constant, repeated to the shape and in the memory order of the result."""
    size = math.prod(shape)
    if not v.constant or not 1 < v.size < size <= SMALL:
        return v

    def make() -> Value:
        made = site.constant(np.broadcast_to(v.array, shape).transpose(order))
        return made.view(shape, strides_of(shape, v.dtype.itemsize, order))

    found: Value = site.derived(v, ("stretched", shape, tuple(order)), make)
    return found


def collapsed(
    shape: tuple[int, ...], order: Sequence[int], values: Sequence[Value]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The fewest axes by which all values can be walked together, outermost first, and their strides; none for one element."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis in order:
        if shape[axis] == 1:
            continue
        steps = []
        for v in values:
            own = axis - len(shape) + v.ndim
            steps.append(v.strides[own] if own >= 0 and v.shape[own] != 1 else 0)
        if axes and all(s == t * shape[axis] for s, t in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * shape[axis], tuple(steps))
        else:
            axes.append((shape[axis], tuple(steps)))
    single = [v.size == 1 and i > 0 for i, v in enumerate(values)]
    return tuple(d for d, _ in axes), [() if one else tuple(s[i] for _, s in axes) for i, one in enumerate(single)]


def add_kernel(name: str, versions: Sequence[int], body: Callable[..., Any], on: str = "numpy") -> None:
    """Add a body that serves several operators to the table, under the operator's name."""
    body.__name__ = name.lower()
    kernel(name, *versions, on=on)(body)


Rule = Callable[[int], int]
"""The finiteness of a result by that of the input."""


def same(h: int) -> int:
    """Infinities stay what they are."""
    return h


def nan_of_infinite(h: int) -> int:
    """An infinity becomes a NaN, or may meet another."""
    return NAN if h else FINITE


def generates(h: int) -> int:
    """Finite inputs may return a NaN."""
    return NAN
