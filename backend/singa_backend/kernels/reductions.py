"""Reductions as functions of NumPy that write into the arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..devices.sums import Running
from .elementwise import BOOL, FLOATS, NUMBERS, Rule, add_kernel, nan_of_infinite, number, order_of, same
from .movement import axis_in
from .sums import Sum
from .table import Site, kernel
from .values import FINITE, Bound, Value, strides_of
from .views import axes_in, ints

ATTRIBUTE = (1, 11, 13)
"""The versions whose axes are an attribute."""


def _axes(site: Site, x: Value, given: Value | None) -> tuple[int, ...]:
    """The axes of a reduction; refuses if nothing is reduced."""
    named = ints(site, given, "axes") if given is not None else site.attributes.get("axes")
    if named:
        return tuple(sorted(axes_in(site, named, x.ndim)))
    site.require(not site.attributes.get("noop_with_empty_axes", 0) and x.ndim, "nothing is reduced")
    return tuple(range(x.ndim))


def reduced(
    site: Site,
    x: Value,
    axes: tuple[int, ...],
    keep: bool,
    function: Any,
    rule: Rule,
    after: Callable[[Any, int], Bound] | None = None,
) -> Value:
    """Emit a reduction.

    Args:
        site: the place.
        x: the input.
        axes: those that are reduced, from the front.
        keep: whether they are kept with size 1.
        function: the ufunc that reduces.
        rule: the finiteness of the result.
        after: the calls that follow, on the result, with the number of elements that make one.
    """
    site.require(x.size, "the input is empty")
    adds, order = function is np.add, order_of(x)
    dense = strides_of(x.shape, x.dtype.itemsize, order)
    total = Sum(x.shape, dense, x.dtype, axes)
    copies = order is None and adds and total.nbytes  # without gaps it is summed in stages
    shape = [1 if i in axes else d for i, d in enumerate(x.shape) if keep or i not in axes]
    places = [a if keep else a - sum(b < a for b in axes) for a in total.kept]
    layout = None if places == sorted(places) or not adds else [*places, *(a for a in axes if keep)]
    y = site.new(shape, x.dtype, layout, FINITE if x.dtype.kind in "biu" else rule(x.finiteness))
    rest = [a for a in range(x.ndim) if a not in axes]
    bare = y.view([x.shape[a] for a in rest], [y.strides[a] for a in (rest if keep else range(len(rest)))])
    count = math.prod(x.shape[a] for a in axes)
    copied = x.nbytes if copies else 0
    scratch = total.scratch(site, copied)

    def bind() -> Bound:
        source, calls = x.array, list[Any]()
        if copies:
            assert scratch is not None
            source = np.ndarray(x.shape, x.dtype, scratch.memory, 0, dense)
            calls.append((np.copyto, (source, x.array)))
        if adds:
            calls += total.calls(source, bare.array, scratch, copied)
        else:
            calls.append((function.reduce, (source, axes, x.dtype, bare.array)))
        return [*calls, *(after(bare.array, count) if after is not None else ())]

    site.emit(bind, reads=(x,), writes=(y,), kernel=f"numpy.{function.__name__}", scratch=scratch)
    return y


def divided(y: Any, count: int) -> Bound:
    """The call that divides a sum by the number of its terms."""
    return [(np.divide, (y, number(count, y.dtype), y))]


KINDS: dict[str, tuple[Sequence[int], Any, frozenset[np.dtype[Any]], Rule]] = {
    "ReduceSum": ((1, 11, 13), np.add, NUMBERS, nan_of_infinite),
    "ReduceMean": ((*ATTRIBUTE, 18), np.add, FLOATS, nan_of_infinite),
    "ReduceProd": ((*ATTRIBUTE, 18), np.multiply, NUMBERS, nan_of_infinite),
    "ReduceMax": ((1, 11, 12, 13, 18, 20), np.maximum, NUMBERS | {BOOL}, same),
    "ReduceMin": ((1, 11, 12, 13, 18, 20), np.minimum, NUMBERS | {BOOL}, same),
}
"""The versions, the function, the dtypes, and the finiteness of the result."""


def _kernel(name: str) -> Callable[..., Value]:
    _, function, accepted, rule = KINDS[name]

    def body(site: Site, x: Value, axes: Value | None = None) -> Value:
        site.require(x.dtype in accepted, f"elements of {x.dtype}")
        after = divided if name == "ReduceMean" else None
        return reduced(site, x, _axes(site, x, axes), bool(site.attributes["keepdims"]), function, rule, after)

    return body


for _name, _row in KINDS.items():
    add_kernel(_name, _row[0], _kernel(_name))


@kernel("CumSum", 11, 14, on="numpy")
def cum_sum(site: Site, x: Value, axis: Value) -> Value:
    site.require(x.dtype in NUMBERS and not site.attributes["exclusive"] and x.size, f"exclusive, or elements of {x.dtype}")
    along = ints(site, axis, "the axis")
    site.require(len(along) == 1, "there are several axes")
    a = axis_in(site, along[0], x.ndim)
    y = site.new(x.shape, x.dtype, finiteness=nan_of_infinite(x.finiteness))
    backward = site.attributes["reverse"]
    how = Running.of(x.shape, a) if x.dtype in FLOATS else None
    rooms = [] if how is None else [site.new(how.ends, dtype, finiteness=y.finiteness) for dtype in (np.float64, x.dtype)]

    def bind() -> Bound:
        source, target = (np.flip(v.array, a) if backward else v.array for v in (x, y))
        if how is not None:
            return how.calls(np, np.add.accumulate, source, target, *(v.array for v in rooms))
        return [(np.add.accumulate, (source, a, x.dtype, target))]

    site.emit(bind, reads=(x,), writes=(y, *rooms), kernel="numpy.accumulate")
    return y
