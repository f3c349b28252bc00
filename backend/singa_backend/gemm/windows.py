"""Machine code of exact convolutions of 8-bit integers with the channels innermost.

`windows` copies the windows of an input into rows that `integers` multiplies: for each tap its channels, padded to a multiple of
4.  Cells of padding are A's zero point, so that what `integers` subtracts is exact.  If the channels of the taps along the last
axis are adjacent in memory, these taps are one.  What is beyond the channels of a tap may be anything: its weights are zero.
`depthwise` computes filters of one channel each.  Every size is a number of the frame.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ..elementwise.builder import LANES, Vector
from .frame import Code, FrameFunction, FrameLayout, module
from .integers import IntegersKind, begun, finished, widened, zero_point

AXES = "dhw"
"""The spatial axes; those that an input lacks have size 1."""

GEOMETRY = tuple(f"{what}_{axis}" for axis in AXES for what in ("count", "size", "kernel", "stride", "dilation", "begin"))
"""For each axis the windows, the cells, the taps, the distances of windows and of taps, and the padding before the first cell."""

WINDOWS = FrameLayout(("rows", "first", "stride", "place", "run", "cells", "cell", "total", *GEOMETRY), ("x", "zero", "left"))
"""`left` receives the windows from the one with the number `first` on, in rows of `stride` bytes, with `place` elements for each
tap: `run` bytes of so many `cells`, which are `cell` bytes apart.  `x` has `total` bytes."""


@dataclass(frozen=True)
class WindowTap:
    """A tap of a window.

    Attributes:
        number: of the tap.
        offset: the bytes from the first one of the input to that of its cell, which is not in the input if the cell is padding.
        inside: whether the cell is in the input along all axes but the last.
        column: the place of the cell along the last axis.
    """

    number: str
    offset: str
    inside: str
    column: str


def _is(k: Code, x: str, how: str, y: str | int) -> str:
    """A comparison of two numbers."""
    return k.raw(f"icmp {how} i64 {x}, {y}")


def _all(k: Code, *conditions: str) -> str:
    """Whether all conditions are true."""
    return reduce(lambda a, b: k.raw(f"and i1 {a}, {b}"), conditions)


@dataclass(frozen=True)
class Corner:
    """Where a window begins.

    Attributes:
        number: of the window.
        image: the number of its image.
        starts: the place of its first cell along each axis.
    """

    number: str
    image: str
    starts: dict[str, str]


def corner_of(k: Code, a: dict[str, str], window: str) -> Corner:
    """Where the window with a number begins."""
    starts, rest = {}, window
    for axis in reversed(AXES):
        rest, place = k.divided(rest, a["count_" + axis])
        starts[axis] = k.minus(k.times(place, a["stride_" + axis]), a["begin_" + axis])
    return Corner(window, rest, starts)


def each_tap(k: Code, a: dict[str, str], corner: Corner, body: Callable[[WindowTap], None]) -> None:
    """Run a body for each tap of a window."""

    def along(axes: str, number: str, cell: str, inside: str) -> None:
        axis = axes[0]

        def one(i: str) -> None:
            at = k.plus(corner.starts[axis], k.times(i, a["dilation_" + axis]))
            tap = k.plus(k.times(number, a["kernel_" + axis]), i)
            index = k.plus(k.times(cell, a["size_" + axis]), at)
            if axes[1:]:
                along(axes[1:], tap, index, _all(k, inside, _is(k, at, "ult", a["size_" + axis])))
            else:
                body(WindowTap(tap, k.times(index, a["cell"]), inside, at))

        k.loop(a["kernel_" + axis], 1, one)

    along(AXES, "0", corner.image, "true")


def windows(kind: IntegersKind) -> FrameFunction:
    """Copies windows."""

    def row(k: Code, a: dict[str, str], r: str) -> None:
        left = k.at(a["left"], k.times(r, a["stride"]))
        each_tap(k, a, corner_of(k, a, k.plus(a["first"], r)), lambda tap: _copy(k, kind, a, tap, left))

    return FrameFunction(
        f"windows {kind.level} {kind.signed}", WINDOWS, lambda name: module(name, WINDOWS, lambda k, a: a["rows"], row)
    )


def _copy(k: Code, kind: IntegersKind, a: dict[str, str], tap: WindowTap, left: str) -> None:
    """Copy the channels of a tap; byte by byte if there is padding or the input ends."""
    target = k.at(left, k.times(k.times(tap.number, a["place"]), kind.element))
    inside = k.raw(f"select i1 {tap.inside}, i64 {a['cells']}, i64 0")
    low = _between(k, k.minus("0", tap.column), a["cells"])
    high = k.least(_between(k, k.minus(a["size_w"], tap.column), a["cells"]), inside)
    begin, end = k.times(low, a["cell"]), k.least(k.times(high, a["cell"]), a["run"])
    last = k.plus(tap.offset, k.raw(f"and i64 {k.plus(a['run'], LANES - 1)}, -{LANES}"))
    whole = _all(k, _is(k, begin, "eq", "0"), _is(k, high, "eq", a["cells"]), _is(k, last, "sle", a["total"]))
    source = k.at(a["x"], tap.offset)

    def write(v: Vector, i: str) -> None:
        k.write(widened(k, kind, v), k.at(target, k.times(i, kind.element)), 1)

    with k.when(whole):
        k.loop(a["run"], LANES, lambda i: write(k.load(k.at(source, i), kind.dtype), i))
    with _otherwise(k, whole):
        k.loop(a["run"], LANES, lambda i: write(_some(k, a, source, i, begin, end), i))


def _between(k: Code, number: str, most: str) -> str:
    """A number, at least 0 and at most another one."""
    return k.least(k.raw(f"select i1 {_is(k, number, 'sgt', '0')}, i64 {number}, i64 0"), most)


def _otherwise(k: Code, condition: str) -> AbstractContextManager[None]:
    """Run what follows if a condition is false."""
    return k.when(k.raw(f"xor i1 {condition}, true"))


def _some(k: Code, a: dict[str, str], source: str, i: str, begin: str, end: str) -> Vector:
    """16 bytes from the one at i on, of which those from `begin` to `end` are read, and others are the zero point."""
    place = k.place(f"<{LANES} x i8>")

    def byte(lane: str) -> None:
        at = k.plus(i, lane)
        valid = _all(k, _is(k, at, "sge", begin), _is(k, at, "slt", end))
        pointer = k.raw(f"select i1 {valid}, ptr {k.at(source, at)}, ptr {a['zero']}")
        k.emit(f"store i8 {k.raw(f'load i8, ptr {pointer}, align 1')}, ptr {k.at(place, lane)}, align 1")

    k.loop(str(LANES), 1, byte)
    return k.get(place, "i8")


DEPTHWISE = FrameLayout(("rows", "cell", "total", *GEOMETRY), ("x", "w", "zero", "bias", "factors", "shift", "y"))
"""`x` and `y` have `cell` channels; `w` has int16, for each tap those of the channels, padded to a multiple of 16."""

TOGETHER = 4 * LANES
"""The channels that are filtered together, as far as there are so many."""


def depthwise(kind: IntegersKind) -> FrameFunction:
    """Filters each channel."""

    def row(k: Code, a: dict[str, str], r: str) -> None:
        corner = corner_of(k, a, r)
        rest = k.raw(f"and i64 {a['cell']}, {TOGETHER - 1}")
        some = k.minus(a["cell"], rest)
        k.loop(some, TOGETHER, lambda column: _filter(k, kind, a, corner, column, TOGETHER // LANES))
        k.loop(a["cell"], LANES, lambda column: _filter(k, kind, a, corner, column, 1), some)

    return FrameFunction(f"depthwise {kind}", DEPTHWISE, lambda name: module(name, DEPTHWISE, lambda k, a: a["rows"], row))


def _filter(k: Code, kind: IntegersKind, a: dict[str, str], corner: Corner, column: str, count: int) -> None:
    """Filter some blocks of 16 channels; one block may have fewer."""
    zero, pitch = zero_point(k, kind, a, "i16"), k.raw(f"and i64 {k.plus(a['cell'], LANES - 1)}, -{LANES}")
    columns = [k.plus(column, LANES * i) for i in range(count)]
    sums, left = [k.kept(begun(k, kind, a, c)) for c in columns], k.minus(a["cell"], column)

    def add(tap: WindowTap) -> None:
        with k.when(_all(k, tap.inside, _is(k, tap.column, "ult", a["size_w"]))):
            for c, total in zip(columns, sums, strict=True):
                at, place = k.plus(tap.offset, c), k.plus(k.times(tap.number, pitch), c)
                v = k.load(k.at(a["x"], at), kind.dtype) if count > 1 else _readable(k, kind, a, at, left)
                v = v.to("sext" if kind.signed else "zext", "i16") - zero
                v = v * k.of("i16", k.at(a["w"], k.times(place, 2)), 2)
                k.put(k.get(total, "i32") + v.to("sext", "i32"), total)

    each_tap(k, a, corner, add)
    size = 4 if kind.result == "sums" else 1
    for c, total in zip(columns, sums, strict=True):
        y = k.at(a["y"], k.times(k.plus(k.times(corner.number, a["cell"]), c), size))
        v, whole = finished(k, kind, a, k.get(total, "i32"), c), _is(k, left, "sge", LANES)
        with k.when(whole):
            k.write(v, y, 1)
        with _otherwise(k, whole):
            k.store(v, y, np.dtype(f"i{size}"), k.first(left))


def _readable(k: Code, kind: IntegersKind, a: dict[str, str], at: str, count: str) -> Vector:
    """16 bytes of the input, of which so many are read at least."""
    place, source = k.place(f"<{LANES} x i8>"), k.at(a["x"], at)
    whole = _is(k, k.plus(at, LANES), "sle", a["total"])
    with k.when(whole):
        k.put(k.load(source, kind.dtype), place)
    with _otherwise(k, whole):
        k.put(_some(k, a, source, "0", "0", count), place)
    return k.get(place, "i8")
