"""Machine code of exact products of 8-bit integers with constant weights of int8.

Weights are in tiles of 16 columns: for each four rows of W, the four bytes of each column.  Rows of A are copied in the form that
the code reads (`widening`): bytes for instructions that multiply bytes, otherwise int16 in the order 0, 2, 1, 3.  The zero point
of A, times the sums of the columns, is subtracted from the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..elementwise.builder import LANES, Vector
from .dots import WEIGHT_DOTS
from .frame import Code, FrameFunction, FrameLayout, module
from .tiles import TILES, Tile, by_rows, in_unit, units

DEEP = 16
"""The rows of W are padded with zeros to a multiple of this number."""

PAIRS = [i + p for i in range(0, LANES, 4) for p in (0, 2, 1, 3)]
"""The order of the int16 of a row."""

SHAPES = {"vnni": ((6, 2, 1), 2)}
"""The numbers of rows, and the tiles, that are computed together, where they are not `SHAPE`."""

SHAPE = (4, 2, 1), 1


@dataclass(frozen=True)
class IntegersKind:
    """What decides on code.

    Attributes:
        level: of the instructions, a key of `WEIGHT_DOTS`.
        signed: whether A is int8, not uint8.
        result: "sums" for int32; "uint8" or "int8" for sums times a factor for each column, rounded, plus a zero point.
        bias: whether a number is added to the sums of each column.
    """

    level: str
    signed: bool
    result: str = "sums"
    bias: bool = False

    @property
    def element(self) -> int:
        """The bytes of an element of a copied row."""
        return WEIGHT_DOTS[self.level].row_bytes // 4

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of A."""
        return np.dtype(np.int8 if self.signed else np.uint8)


WIDENED = FrameLayout(("rows", "k", "depth", "stride"), ("x", "left"))
"""`x` has rows of k bytes, `left` receives rows of `stride` bytes with `depth` elements, in each of which zeros follow."""


def widened(k: Code, kind: IntegersKind, v: Vector) -> Vector:
    """Bytes of A in the form that the code reads."""
    if kind.element == 2:
        return k.shuffled(v.to("sext" if kind.signed else "zext", "i16"), PAIRS)
    return v ^ 128 if kind.signed == (kind.level == "vnni") else v


def widening(kind: IntegersKind) -> FrameFunction:
    """Copies rows."""

    def row(k: Code, a: dict[str, str], r: str) -> None:
        x, left = k.at(a["x"], k.times(r, a["k"])), k.at(a["left"], k.times(r, a["stride"]))

        def part(i: str) -> None:
            v = k.load(k.at(x, i), kind.dtype, k.first(k.minus(a["k"], i)))
            k.write(widened(k, kind, v), k.at(left, k.times(i, kind.element)), 1)

        k.loop(a["depth"], LANES, part)

    return FrameFunction(
        f"widening {kind.level} {kind.signed}", WIDENED, lambda name: module(name, WIDENED, lambda k, a: a["rows"], row)
    )


PRODUCTS = FrameLayout(
    ("rows", "n", "depth", "stride", "groups", "height", "pitch"), ("left", "w", "sums", "zero", "bias", "factors", "shift", "y")
)
"""`sums`, `bias` and `factors` have a number for each column; `zero` is the zero point of A, `shift`, as float32, that of the
result."""


def integers(kind: IntegersKind) -> FrameFunction:
    """Multiplies copied rows by weights."""
    counts, wide = SHAPES.get(kind.level, SHAPE)

    def unit(k: Code, a: dict[str, str], i: str) -> None:
        zero = zero_point(k, kind, a, "i32") + _offset(kind)

        def rows(tiles: Sequence[Tile], row: str, count: int) -> None:
            several = TILES if count == 1 else wide
            for start in range(0, TILES, several):
                _rows(k, kind, a, zero, tiles[start : start + several], row, count)

        size = 4 if kind.result == "sums" else 1
        in_unit(k, a, size, i, lambda tiles, first, end: by_rows(k, first, end, counts, partial(rows, tiles)))

    return FrameFunction(f"integers {kind}", PRODUCTS, lambda name: module(name, PRODUCTS, units, unit))


def zero_point(k: Code, kind: IntegersKind, a: dict[str, str], integer: str) -> Vector:
    """The zero point of A in every lane."""
    byte = k.raw(f"load i8, ptr {a['zero']}, align 1")
    return k.splat(k.raw(f"{'sext' if kind.signed else 'zext'} i8 {byte} to {integer}"), integer)


def _offset(kind: IntegersKind) -> int:
    """What copied rows have added to A."""
    if kind.level == "vnni":
        return 128 if kind.signed else 0
    return -128 if kind.element == 1 and not kind.signed else 0


def _rows(k: Code, kind: IntegersKind, a: dict[str, str], zero: Vector, tiles: Sequence[Tile], row: str, count: int) -> None:
    """Compute tiles of some rows."""
    dots = WEIGHT_DOTS[kind.level](k, 8)
    left = [k.at(a["left"], k.times(k.plus(row, r), a["stride"])) for r in range(count)]
    words = [k.at(a["w"], k.times(k.times(t.number, a["depth"]), LANES)) for t in tiles]
    starts = [begun(k, kind, a, t.column) - k.of("i32", k.at(a["sums"], k.times(t.column, 4)), 4) * zero for t in tiles]
    places = [[dots.begin(s) for s in starts] for _ in left]

    def four(i: str) -> None:
        found = [k.of("i32", k.at(w, k.times(i, LANES)), 4) for w in words]
        at = k.times(i, kind.element)
        for plane in range(dots.planes):
            columns = [dots.columns_of(w, plane) for w in found]
            for pointer, line in zip(left, places, strict=True):
                bytes_ = dots.spread(k.at(pointer, k.plus(at, 4 * plane)))
                for p, column in zip(line, columns, strict=True):
                    dots.add(p, column, bytes_)

    def step(i: str) -> None:
        for part in range(0, 8, 4):
            four(k.plus(i, part))

    k.loop(a["depth"], 8, step)
    for r, line in enumerate(places):
        for t, p in zip(tiles, line, strict=True):
            k.write(finished(k, kind, a, dots.sums(p), t.column), t.row(k, k.plus(row, r)), 1)


def begun(k: Code, kind: IntegersKind, a: dict[str, str], column: str) -> Vector:
    """What the sums of 16 columns begin with."""
    return k.of("i32", k.at(a["bias"], k.times(column, 4)), 4) if kind.bias else k.vector(0, "i32")


def finished(k: Code, kind: IntegersKind, a: dict[str, str], sums: Vector, column: str) -> Vector:
    """The result of 16 columns: sums, or rounded values in their order."""
    if kind.result == "sums":
        return sums
    factors = k.of("float", k.at(a["factors"], k.times(column, 4)), 4)
    shift = k.everywhere("float", a["shift"])
    whole = k.call("rint", sums.to("sitofp", "float") * factors) + shift
    info = np.iinfo(kind.result)
    return whole.bound("gt", float(info.min)).bound("lt", float(info.max)).to("fptosi", "i32").to("trunc", "i8")
