"""Machine code that gathers rows of a table with values of 2, 4 or 8 bits in blocks, as floats: (value - zero point) * scale.

Values and zero points are those of a file: lower bits first, each row from a byte on.  Only rows that an index names are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..elementwise.builder import LANES, Vector, type_of
from .frame import Code, FrameFunction, FrameLayout, module

UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True)
class RowsKind:
    """What decides on code.

    Attributes:
        bits: of a value in memory.
        zeros: whether blocks have zero points; otherwise `zero` is that of all.
        zero: the zero point without others.
        nibbles: "" if all bits are the value; "int4" or "uint4" if the lower four of a byte are.
        scale: "float32" or "float16", the dtype of scales and results.
        index: "int32" or "int64".
    """

    bits: int
    zeros: bool
    zero: int
    nibbles: str
    scale: str
    index: str

    def number(self, x: Vector) -> Vector:
        """The value of each lane, whose lower bits are in memory."""
        if self.nibbles == "int4":
            return ((x & 15) ^ 8) - 8
        return x & 15 if self.nibbles else x


GATHERED = FrameLayout(
    ("rows", "count", "size", "lines", "line", "pitch", "block", "blocks", "points"),
    ("index", "table", "scales", "zeros", "bad", "y"),
)
"""The results are `rows` times `lines` lines of `line` floats.  For each outer place, `count` indices choose from `size` slabs,
which have `lines` lines of `pitch` bytes, `blocks` scales and `points` bytes of zero points; an index out of range sets `bad`."""


def gathering(kind: RowsKind) -> FrameFunction:
    """Gathers rows."""
    dtype, index = np.dtype(kind.scale), np.dtype(kind.index)

    def unit(k: Code, a: dict[str, str], i: str) -> None:
        outer, at = k.divided(i, a["count"])
        number = k.raw(f"load {type_of(index)}, ptr {k.at(a['index'], k.times(at, index.itemsize))}, align {index.itemsize}")
        number = number if index.itemsize == 8 else k.raw(f"sext i32 {number} to i64")
        turned = k.raw(f"select i1 {k.raw(f'icmp slt i64 {number}, 0')}, i64 {k.plus(number, a['size'])}, i64 {number}")
        bad = k.raw(f"icmp uge i64 {turned}, {a['size']}")
        with k.when(bad):
            k.emit(f"store i64 1, ptr {a['bad']}")
        slab = k.plus(k.times(outer, a["size"]), k.raw(f"select i1 {bad}, i64 0, i64 {turned}"))

        def line(n: str) -> None:
            row, to = (k.plus(k.times(s, a["lines"]), n) for s in (slab, i))
            steps = {"table": a["pitch"], "scales": k.times(a["blocks"], dtype.itemsize), "zeros": a["points"]}
            places = {name: k.at(a[name], k.times(row, step)) for name, step in steps.items()}
            y = k.at(a["y"], k.times(k.times(to, a["line"]), dtype.itemsize))
            k.loop(a["blocks"], 1, lambda b: _block(k, kind, a, places, y, b))

        k.loop(a["lines"], 1, line)

    return FrameFunction(f"gathering {kind}", GATHERED, lambda name: module(name, GATHERED, lambda k, a: a["rows"], unit))


def _block(k: Code, kind: RowsKind, a: dict[str, str], places: dict[str, str], y: str, b: str) -> None:
    """Write a block of a line."""
    dtype, per = np.dtype(kind.scale), 8 // kind.bits
    scale = k.scalar(k.at(places["scales"], k.times(b, dtype.itemsize)), dtype)
    scale = scale if scale.type == "float" else scale.to("fpext", "float")
    zero = k.vector(kind.zero, "i32")
    if kind.zeros:
        place, part = k.divided(b, per)
        shift = k.splat(k.raw(f"trunc i64 {k.times(part, kind.bits)} to i32"), "i32")
        byte = k.scalar(k.at(places["zeros"], place), UINT8).to("zext", "i32")
        zero = kind.number(byte.two(shift, "lshr") & (1 << kind.bits) - 1)
    start = k.times(b, a["block"])
    end = k.least(k.plus(start, a["block"]), a["line"])
    whole = k.raw(f"and i64 {end}, {-LANES}")

    def part_of(i: str, left: str | None = None) -> None:
        """Write the values of a vector, or as many of them as are left."""
        at = k.at(places["table"], k.raw(f"udiv i64 {i}, {per}"))
        values = _values(k, kind.bits, at, left)
        floats = (kind.number(values) - zero).to("sitofp", "float") * scale
        floats = floats if dtype.itemsize == 4 else floats.to("fptrunc", "half")
        k.store(floats, k.at(y, k.times(i, dtype.itemsize)), dtype, None if left is None else k.first(left))

    k.loop(whole, LANES, part_of, start)
    left = k.minus(end, whole)
    with k.when(k.raw(f"icmp sgt i64 {left}, 0")):
        part_of(whole, left)


def _values(k: Code, bits: int, pointer: str, left: str | None) -> Vector:
    """The next 16 values, lower bits first; those after the last byte are zeros."""
    per = 8 // bits
    count, places = LANES // per, ", ".join(f"i32 {i // per}" for i in range(LANES))
    if left is None:
        kind = f"<{count} x i8>"
        packed = k.raw(f"load {kind}, ptr {pointer}, align 1")
        spread = k.made(f"shufflevector {kind} {packed}, {kind} poison, <{LANES} x i32> <{places}>", "i8")
    else:
        size = k.raw(f"udiv i64 {k.plus(left, per - 1)}, {per}")
        spread = k.shuffled(k.load(pointer, UINT8, k.first(size)), [i // per for i in range(LANES)])
    shifts = Vector(k, "<" + ", ".join(f"i32 {i % per * bits}" for i in range(LANES)) + ">", "i32")
    wide = spread.to("zext", "i32")
    return wide if bits == 8 else wide.two(shifts, "lshr") & (1 << bits) - 1
