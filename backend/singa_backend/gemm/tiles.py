"""Tiles of a result: 16 columns of some rows, of which groups are computed by units of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..elementwise.builder import LANES
from .frame import Code

TILES = 2
"""The tiles of a unit of work."""

HEIGHT = 192
"""The most rows of a unit of work."""


@dataclass(frozen=True)
class Tile:
    """The part of a tile that belongs to a unit.

    Attributes:
        number: of the tile.
        column: the first of its columns.
        y: the address of the first element of its first row.
        pitch: the bytes from there to the next row.
        first: the number of that row.
    """

    number: str
    column: str
    y: str
    pitch: str
    first: str

    def row(self, k: Code, row: str) -> str:
        """The address of a row."""
        return k.at(self.y, k.times(k.minus(row, self.first), self.pitch))


class RowsText(Protocol):
    """Writes the computation of a number of rows from one on."""

    def __call__(self, row: str, count: int) -> None:
        """Write it."""


def parts(k: Code, a: dict[str, str]) -> str:
    """The number of parts of the rows."""
    return k.raw(f"udiv i64 {k.minus(k.plus(a['rows'], a['height']), 1)}, {a['height']}")


def units(k: Code, a: dict[str, str]) -> str:
    """The number of units: groups of tiles for each part of the rows."""
    return k.times(parts(k, a), a["groups"])


def in_unit(k: Code, a: dict[str, str], size: int, unit: str, body: Callable[[list[Tile], str, str], None]) -> None:
    """Run a body for the tiles of a unit, the first of its rows, and the one after the last.

    The body writes whole tiles; what is beyond the last column is in temporary memory.

    Args:
        k: the text.
        a: the arguments, among them `y` with rows of `n` elements, which are `pitch` elements apart, if that is not `n`.
        size: the bytes of an element.
        unit: the number of the unit.
        body: writes the computation.
    """
    part, group = k.divided(unit, a["groups"])
    first = k.times(part, a["height"])
    end, tiles = k.least(k.plus(first, a["height"]), a["rows"]), []
    pitch_of_y = a.get("pitch", a["n"])

    def place(row: str, column: str) -> str:
        return k.at(a["y"], k.times(k.plus(k.times(row, pitch_of_y), column), size))

    for v in range(TILES):
        number = k.plus(k.times(group, TILES), v)
        column, room = k.times(number, LANES), k.place(f"[{HEIGHT * LANES * size} x i8]")
        whole = k.raw(f"icmp sle i64 {k.plus(column, LANES)}, {a['n']}")
        y = k.raw(f"select i1 {whole}, ptr {place(first, column)}, ptr {room}")
        pitch = k.raw(f"select i1 {whole}, i64 {k.times(pitch_of_y, size)}, i64 {size * LANES}")
        tiles.append(Tile(number, column, y, pitch, first))
    body(tiles, first, end)
    for t in tiles:
        left = k.minus(a["n"], t.column)
        with k.when(k.raw(f"icmp slt i64 {left}, {LANES}")):

            def copy(row: str, t: Tile = t, left: str = left) -> None:
                k.move(t.row(k, row), place(row, t.column), left, size)

            k.loop(end, 1, copy, first)


def by_rows(k: Code, first: str, end: str, counts: Sequence[int], body: RowsText) -> None:
    """Run a body for as many rows at a time as the first of some numbers, then the next; the last one is 1."""
    for count in counts:
        left = k.raw(f"urem i64 {k.minus(end, first)}, {count}")
        last = k.minus(end, left)
        k.loop(last, count, partial(body, count=count), first)
        first = last
