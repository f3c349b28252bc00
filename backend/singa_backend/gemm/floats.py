"""Machine code of float32 products and convolutions.

A result is a bias plus the products of a row of A and a column of W.  The elements of A are found by steps in bytes: three along
the rows, two along the taps, and one along the depth.  So A may be a matrix in any order, or an image whose channels are
innermost: then the rows are pixels of the result, the taps those of the filters, and the depth is the channels of a group.

W is in tiles of 16 columns: for each tap and each place along the depth a vector of the columns.

A result is the sum, in the order of taps and depth, of chains of fused multiplications and additions, of which the first begins
with the bias.  Its bits depend on nothing else: not on the processor, the threads, or the other rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from ..elementwise.builder import LANES, Vector
from ..elementwise.machine_code import AXES, FIELDS
from .frame import Code, FrameFunction, FrameLayout, LinesText, module
from .tiles import HEIGHT, parts, units

BLOCK = 512
"""The products of a chain: chains are added to each other, so that the error hardly grows, and their part of W is in a cache."""

F32 = np.dtype(np.float32)

VECTOR = 4 * LANES
"""The bytes of a vector."""

UNROLLED = 24
"""The most additions of vectors in a turn of the innermost loop, so that all is in registers."""

ROWS = 6
"""The most rows that are computed together."""

FEW = 2
"""The rows up to which a division for each tap costs less than a loop over the outer axis of the taps."""

WIDE = {ROWS: 4, 4: 4, 2: 4, 1: 4}
"""The rows that are computed together, and the tiles, on processors with vectors of 16 lanes."""

NARROW = {ROWS: 1, 4: 1, 2: 2, 1: 4}
"""The same on others."""

SHORT = 27
"""The most products of a result for which there is code of its own, without loops over taps and depth."""

STEPS = ("x_row0", "x_row1", "x_row2", "x_tap0", "x_tap1", "x_depth")
"""The steps of A: along the outer, the middle and the inner axis of the rows, of the taps, and along the depth."""

BATCHES = ("batches", "batch1", "x_batch0", "x_batch1", "w_batch0", "w_batch1", "b_batch0", "b_batch1", "y_batch0", "y_batch1")
"""The number of products, the size of the inner of their two axes, and the steps of the operands along these."""

SIZES = ("rows", "row1", "row2", "taps", "tap1", "depth", "n", "pitch")
"""Rows, the sizes of their middle and inner axis; taps, the size of their inner axis; the depth; columns; bytes of a row of Y."""

WORK = ("groups", "span", "height", "tap_block", "depth_block", "adds", "relu")
"""Groups of tiles; tiles of a group; rows of a unit; taps, and places along the depth, that are added before the next rows;
whether products are added to what Y has, not to the bias; whether negative results become 0."""

AFTER = ("after", "leaves")
"""The address of a function of elementwise/machine_code.py that is called for each unit, and the number of its pointers, or 0."""

PRODUCTS = FrameLayout((*SIZES, *STEPS, *BATCHES, *WORK, *AFTER), ("x", "w", "bias", "y", "frame"))
"""`bias` has a number for each column of all tiles; `frame` is that of the function.

The steps in that frame are those along the rows, the outer and the inner axis of products, and the columns.
"""

LEAVES = 16
"""The most pointers of a function that is called."""


@dataclass(frozen=True)
class FloatsKind:
    """What decides on code.

    Attributes:
        wide: whether vectors have 16 lanes.
        taps: the sizes of the axes of the taps; none for any.
        depth: then the depth, whose elements are adjacent in A.
    """

    wide: bool
    taps: tuple[int, ...] = ()
    depth: int = 0

    @property
    def shapes(self) -> dict[int, int]:
        """The rows that are computed together, and the tiles."""
        if self.taps:  # few numbers, because the code of each kind is made when it is first used
            return dict.fromkeys((ROWS, 1), 1 + self.wide)
        return WIDE if self.wide else NARROW


W_STEPS = ("w_batch0", "w_batch1", "w_tap0", "w_tap1", "w_depth", "w_column")
"""The steps of W: along the axes of products, of the taps, along the depth, and from a column to the next."""

PACKED = FrameLayout(("batches", "batch1", "n", "tiles", "taps", "tap1", "depth", *W_STEPS), ("w", "tiled"))
"""The sizes and steps of W, and where its tiles are written."""


def packing(adjacent: bool) -> FrameFunction:
    """Writes the tiles of W, whose columns may be adjacent."""

    def tile(k: Code, a: dict[str, str], i: str) -> None:
        batch, number = k.divided(i, a["tiles"])
        column = k.times(number, LANES)
        left = k.minus(a["n"], column)
        mask, last = k.first(left), k.minus(k.least(left, LANES), 1)
        w = k.at(a["w"], k.moved(batch, a["batch1"], (a["w_batch0"], a["w_batch1"])))
        w = k.at(w, k.times(column, a["w_column"]))
        tiled = k.at(a["tiled"], k.times(k.times(i, k.times(a["taps"], a["depth"])), VECTOR))

        def tap(t: str) -> None:
            start = k.at(w, k.moved(t, a["tap1"], (a["w_tap0"], a["w_tap1"])))
            into = k.at(tiled, k.times(k.times(t, a["depth"]), VECTOR))

            def vector(d: str) -> None:
                place = k.at(start, k.times(d, a["w_depth"]))
                columns = k.load(place, F32, mask) if adjacent else k.gather(place, a["w_column"], F32, last)
                k.write(columns, k.at(into, k.times(d, VECTOR)))

            k.loop(a["depth"], 1, vector)

        k.loop(a["taps"], 1, tap)

    def units(k: Code, a: dict[str, str]) -> str:
        return k.times(a["batches"], a["tiles"])

    return FrameFunction(f"packing {adjacent}", PACKED, lambda name: module(name, PACKED, units, tile))


def floats(kind: FloatsKind) -> FrameFunction:
    """Multiplies."""
    return FrameFunction(f"floats {kind}", PRODUCTS, lambda name: module(name, PRODUCTS, _units, partial(_unit, kind)))


def _units(k: Code, a: dict[str, str]) -> str:
    """The number of units: those of each product."""
    return k.times(a["batches"], units(k, a))


@dataclass(frozen=True)
class _TileText:
    """A tile of a unit.

    Attributes:
        w: the address of its weights.
        bias: of its part of the bias.
        y: of its first row.
        pitch: the bytes from there to the next row.
    """

    w: str
    bias: str
    y: str
    pitch: str


class _UnitText:
    """The text of a unit.

    Attributes:
        k: the text.
        a: the arguments.
        x: the addresses of the rows of A, in memory.
        nothing: what changes no number that it is added to, in memory.
        first: the number of the first row.
    """

    def __init__(self, k: Code, a: dict[str, str], unit: str) -> None:
        self.k, self.a = k, a
        rest, group = k.divided(unit, a["groups"])
        batch, part = k.divided(rest, parts(k, a))
        self._batch = k.divided(batch, a["batch1"])
        operands = {"x": a["x"], "w": a["w"], "b": a["bias"], "y": a["y"]}
        x, self._w, self._bias, self._y = (self._moved(p, self._batch, f"{n}_batch") for n, p in operands.items())
        self.first = k.times(part, a["height"])
        self.end = k.least(k.plus(self.first, a["height"]), a["rows"])
        self._tile = k.times(group, a["span"])
        tiles = k.raw(f"udiv i64 {k.plus(a['n'], LANES - 1)}, {LANES}")
        self.tiles = k.least(k.minus(tiles, self._tile), a["span"])
        self._vectors = k.times(a["taps"], a["depth"])
        self._room = k.place(f"[{HEIGHT * VECTOR} x i8]")
        self.nothing = k.kept(k.vector(-0.0, "float"))
        self.x = k.place(f"[{HEIGHT} x ptr]")
        self._keep_rows(x)

    def _moved(self, pointer: str, places: Sequence[str], step: str) -> str:
        for i, place in enumerate(places):
            pointer = self.k.at(pointer, self.k.times(place, self.a[f"{step}{i}"]))
        return pointer

    def _keep_rows(self, x: str) -> None:
        """Write the addresses of the rows of A to memory."""
        k, a = self.k, self.a

        def line(number: str) -> Callable[[str, str], None]:
            start = self._moved(x, k.divided(number, a["row1"]), "x_row")

            def row(r: str, i: str) -> None:
                place = k.at(start, k.times(i, a["x_row2"]))
                k.emit(f"store ptr {place}, ptr {k.at(self.x, k.times(k.minus(r, self.first), 8))}")

            return row

        LinesText(k, self.first, self.end, a["row2"]).loop(line)

    def tile(self, number: str) -> _TileText:
        """A tile of the unit; what is beyond the last column is in temporary memory."""
        k, a, number = self.k, self.a, self.k.plus(self._tile, number)
        column = k.times(number, LANES)
        whole = k.raw(f"icmp sle i64 {k.plus(column, LANES)}, {a['n']}")
        y = k.raw(f"select i1 {whole}, ptr {self.place(self.first, column)}, ptr {self._room}")
        pitch = k.raw(f"select i1 {whole}, i64 {a['pitch']}, i64 {VECTOR}")
        w = k.at(self._w, k.times(k.times(number, self._vectors), VECTOR))
        return _TileText(w, k.at(self._bias, k.times(column, 4)), y, pitch)

    def place(self, row: str, column: str) -> str:
        """The address of an element of Y."""
        k = self.k
        return k.at(self._y, k.plus(k.times(row, self.a["pitch"]), k.times(column, 4)))

    def move(self, out: bool) -> None:
        """Copy what belongs to Y of a tile that is not whole from temporary memory, or there."""
        k = self.k
        column = k.times(k.minus(k.plus(self._tile, self.tiles), 1), LANES)
        left = k.minus(self.a["n"], column)
        mask = k.first(left)

        def copy(row: str) -> None:
            here, there = k.at(self._room, k.times(k.minus(row, self.first), VECTOR)), self.place(row, column)
            source, target = (here, there) if out else (there, here)
            k.store(k.load(source, F32, mask), target, F32, mask)

        with k.when(k.raw(f"icmp slt i64 {left}, {LANES}")):
            k.loop(self.end, 1, copy, self.first)

    def call_after(self) -> None:
        """Let a function change the part of Y."""
        k, a = self.k, self.a
        column = k.times(self._tile, LANES)
        frame = k.place(f"[{FIELDS + (AXES + 1) * LEAVES} x i64]")
        words = k.plus(k.times(a["leaves"], AXES + 1), FIELDS)

        def copy(i: str) -> None:
            at = k.times(i, 8)
            k.emit(f"store i64 {k.number_at(a['frame'], at)}, ptr {k.at(frame, at)}")

        def leaf(i: str) -> None:
            steps = k.times(k.plus(k.times(i, AXES), FIELDS), 8)
            place = k.times(k.plus(k.plus(i, k.times(a["leaves"], AXES)), FIELDS), 8)
            address = k.number_at(frame, place)
            for j, moved in enumerate((self.first, *self._batch, column)):
                address = k.plus(address, k.times(moved, k.number_at(frame, k.plus(steps, 8 * j))))
            k.emit(f"store i64 {address}, ptr {k.at(frame, place)}")

        with k.when(k.raw(f"icmp ne i64 {a['leaves']}, 0")):
            k.loop(words, 1, copy)
            columns = k.least(k.times(self.tiles, LANES), k.minus(a["n"], column))
            k.emit(f"store i64 {columns}, ptr {k.at(frame, 32)}")
            k.emit(f"store i64 {k.minus(self.end, self.first)}, ptr {k.at(frame, 40)}")
            k.loop(a["leaves"], 1, leaf)
            function = k.raw(f"inttoptr i64 {a['after']} to ptr")
            k.emit(f"call void {function}(ptr {frame})")


def _unit(kind: FloatsKind, k: Code, a: dict[str, str], i: str) -> None:
    unit = _UnitText(k, a, i)

    def taps(tap: str) -> None:
        k.loop(a["depth"], a["depth_block"], lambda depth: _block(kind, unit, tap, depth))

    with k.when(k.raw(f"icmp ne i64 {a['adds']}, 0")):
        unit.move(out=False)
    k.loop(a["taps"], a["tap_block"], taps)
    unit.move(out=True)
    unit.call_after()


class _ChainText:
    """What rows of a unit add together.

    Attributes:
        tap: the first tap.
        end: the one after the last.
        lines: these taps.
        depth: the first place along the depth.
        stop: the one after the last.
        begins: whether the sums begin with the bias.
        least: lower results become this number.
    """

    def __init__(self, k: Code, a: dict[str, str], tap: str, depth: str) -> None:
        self.tap, self.end = tap, k.least(k.plus(tap, a["tap_block"]), a["taps"])
        self.depth, self.stop = depth, k.least(k.plus(depth, a["depth_block"]), a["depth"])
        self.lines = LinesText(k, tap, self.end, a["tap1"])
        self.begins = k.raw(f"icmp eq i64 {k.plus(k.plus(tap, depth), a['adds'])}, 0")
        left = k.plus(k.minus(a["taps"], self.end), k.minus(a["depth"], self.stop))
        bounded = k.raw(f"icmp slt i64 {left}, {a['relu']}")
        self.least = k.splat(k.raw(f"select i1 {bounded}, float 0.0, float 0xFFF0000000000000"), "float")


def _block(kind: FloatsKind, unit: _UnitText, tap: str, depth: str) -> None:
    """Add some taps, or a part of one, to all tiles of the unit."""
    k, first, shapes = unit.k, unit.first, kind.shapes
    chain = _ChainText(k, unit.a, tap, depth)
    runs: list[tuple[int, int, str, str]] = []  # rows that are computed together, tiles, the first row and the end
    for count, wide in shapes.items():
        last = k.minus(unit.end, k.raw(f"urem i64 {k.minus(unit.end, first)}, {count}"))
        runs.append((count, wide, first, last))
        first = last

    def tiles(size: int, t: str) -> None:
        for count, wide, begin, end in runs:
            several = min(wide, size)

            def rows(v: str, several: int = several, count: int = count, begin: str = begin, end: str = end) -> None:
                together = [unit.tile(k.plus(v, i)) for i in range(several)]
                k.loop(end, count, lambda row: _rows(kind, unit, together, row, count, chain), begin)

            k.loop(k.plus(t, size), several, rows, t)

    most = max(shapes.values())
    whole = k.minus(unit.tiles, k.raw(f"urem i64 {unit.tiles}, {most}"))
    k.loop(whole, most, partial(tiles, most))
    k.loop(unit.tiles, 1, partial(tiles, 1), whole)


def _rows(kind: FloatsKind, unit: _UnitText, tiles: Sequence[_TileText], row: str, count: int, chain: _ChainText) -> None:
    """Add some taps to tiles of some rows."""
    k, a, begins = unit.k, unit.a, chain.begins
    numbers = [k.minus(k.plus(row, r), unit.first) for r in range(count)]
    xs = [k.raw(f"load ptr, ptr {k.at(unit.x, k.times(n, 8))}") for n in numbers]
    ys = [[k.at(t.y, k.times(n, t.pitch)) for t in tiles] for n in numbers]
    starts = [k.of("float", k.raw(f"select i1 {begins}, ptr {t.bias}, ptr {unit.nothing}"), 4) for t in tiles]
    if kind.taps:
        sums = _few(kind, k, a, xs, [t.w for t in tiles], starts)
    else:
        sums = _many(k, a, xs, [t.w for t in tiles], starts, chain)
    for line, into in zip(ys, sums, strict=True):
        for y, s in zip(line, into, strict=True):
            before = k.of("float", k.raw(f"select i1 {begins}, ptr {unit.nothing}, ptr {y}"), 4)
            k.write((s + before).bound("gt", chain.least), y)


def _few(kind: FloatsKind, k: Code, a: dict[str, str], xs: list[str], ws: list[str], starts: list[Vector]) -> list[list[Vector]]:
    """The sums of all taps, without a loop."""
    sums = [list(starts) for _ in xs]
    for n, (outer, inner) in enumerate(product(*map(range, kind.taps))):
        moved = k.plus(k.times(a["x_tap0"], outer), k.times(a["x_tap1"], inner))
        lines = [k.at(x, moved) for x in xs]
        for d in range(kind.depth):
            columns = [k.of("float", k.at(w, (n * kind.depth + d) * VECTOR), 4) for w in ws]
            for line, into in zip(lines, sums, strict=True):
                value = k.everywhere("float", k.at(line, d * F32.itemsize))
                into[:] = [k.fma(value, c, s) for c, s in zip(columns, into, strict=True)]
    return sums


def _many(
    k: Code, a: dict[str, str], xs: list[str], ws: list[str], starts: list[Vector], chain: _ChainText
) -> list[list[Vector]]:
    """The sums of the taps and the part of the depth of a chain."""
    sums = [[k.kept(start) for start in starts] for _ in xs]
    unrolled = max(u for u in (1, 2, 4) if u == 1 or u * len(xs) * len(ws) <= UNROLLED)
    whole = k.minus(chain.stop, k.raw(f"and i64 {k.minus(chain.stop, chain.depth)}, {unrolled - 1}"))

    def add(t: str, moved: str) -> None:
        lines = [k.at(x, moved) for x in xs]
        weights = [k.at(w, k.times(k.times(t, a["depth"]), VECTOR)) for w in ws]

        def step(d: str, several: int) -> None:
            for u in range(several):
                at = k.plus(d, u)
                columns = [k.of("float", k.at(w, k.times(at, VECTOR)), 4) for w in weights]
                place = k.times(at, a["x_depth"])
                for line, into in zip(lines, sums, strict=True):
                    value = k.everywhere("float", k.at(line, place))
                    for column, s in zip(columns, into, strict=True):
                        k.put(k.fma(value, column, k.get(s, "float")), s)

        k.loop(whole, unrolled, partial(step, several=unrolled), chain.depth)
        if unrolled > 1:
            k.loop(chain.stop, 1, partial(step, several=1), whole)

    def along(number: str) -> Callable[[str, str], None]:
        start = k.times(number, a["x_tap0"])
        return lambda t, i: add(t, k.plus(start, k.times(i, a["x_tap1"])))

    if len(xs) > FEW:
        chain.lines.loop(along)
    else:
        k.loop(chain.end, 1, lambda t: add(t, k.moved(t, a["tap1"], (a["x_tap0"], a["x_tap1"]))), chain.tap)
    return [[k.get(s, "float") for s in into] for into in sums]
