"""Machine code of products with weights of 2, 4 and 8 bits in blocks, each with a scale, and perhaps with a zero point.

Weights are in tiles of 16 columns: for each 32 bits of a column, the words of all columns, so that a vector has the next 16, 8 or
4 values of each, lower bits first.  Scales, and zero points, are one for each block and column, in the same order.

**Integers**: a row of A is rounded to bytes by blocks (`rounding`).  The lower bits of the four bytes of a column are values, and
those above them after a shift: each time they are multiplied by four bytes of the row.  So the bytes of a row are in the order
0, 2, 4, 6, 1, 3, 5, 7 for 4 bits.  The sum of a block is exact, and is added times its scales in float32.

**Floats**: one row is multiplied as it is; for several, a part of the weights becomes floats, which are a factor for all rows.

All processors compute the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..elementwise.builder import LANES, Vector
from .dots import DOTS
from .frame import Code, FrameFunction, FrameLayout, module
from .tiles import TILES, Tile, by_rows, in_unit, units

LEAST = 1e-30
"""A smaller maximum of a block counts as this one: its inverse is finite."""

MAGIC = 1.5 * 2**23
"""A float32 plus this number has its integer in the lower bits."""

PANEL = 512
"""The rows of W that are floats at a time."""

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class FewBitsKind:
    """What decides on code.

    Attributes:
        bits: of a weight.
        deep: the rows of W that a step of the code reads: 16 for blocks of 16, otherwise 32.
        zeros: "" if the zero point is the middle, "bytes" or "floats".
        level: of the instructions, a key of `DOTS`.
        table: whether values are entries of a table of 16.
    """

    bits: int
    deep: int
    zeros: str
    level: str
    table: bool = False

    @property
    def values(self) -> int:
        """The values of a column in a vector."""
        return 32 // self.bits

    @property
    def words(self) -> int:
        """The vectors of a step."""
        return self.deep // self.values

    @property
    def middle(self) -> int:
        """The zero point without others."""
        return 1 << self.bits - 1

    @property
    def zero_bytes(self) -> int:
        """The bytes of the zero points of a block of a tile."""
        return {"": 0, "bytes": LANES, "floats": 4 * LANES}[self.zeros]


# --- the rows of A

ROUNDED = FrameLayout(("rows", "k", "blocks", "block", "stride"), ("x", "left", "sums", "scales"))
"""`x` has rows of k floats; `left` receives rows of `stride` bytes, `scales` and `sums` a number for each block."""


def rounding(values: int) -> FrameFunction:
    """Rounds rows to bytes, in the order for `values` values of a column in a vector."""

    def row(k: Code, a: dict[str, str], r: str) -> None:
        x, q = k.at(a["x"], k.times(k.times(r, a["k"]), 4)), k.at(a["left"], k.times(r, a["stride"]))
        first = k.times(r, a["blocks"])

        def block(b: str) -> None:
            start = k.times(b, a["block"])
            end, most = k.plus(start, a["block"]), k.kept(k.vector(0, "float"))

            def compare(i: str) -> None:
                k.put(_larger(k.get(most, "float"), k.call("fabs", _part(k, x, i, a["k"]))), most)

            k.loop(end, LANES, compare, start)
            largest = k.splat(_lanes(k, k.get(most, "float"), _larger), "float").bound("gt", LEAST)
            inverse, total = 127 / largest, k.kept(k.vector(0, "i32"))

            def write(i: str) -> None:
                whole = k.fma(_part(k, x, i, a["k"]), inverse, MAGIC).to("bitcast", "i32")
                numbers = whole.to("trunc", "i8")
                k.put(k.get(total, "i32") + numbers.to("sext", "i32"), total)
                k.write(k.shuffled(numbers, _bytes(values)), k.at(q, i), 1)

            k.loop(end, LANES, write, start)
            place = k.times(k.plus(first, b), 4)
            k.emit(f"store float {(largest / 127).lane(0)}, ptr {k.at(a['scales'], place)}, align 4")
            k.emit(f"store i32 {_lanes(k, k.get(total, 'i32'), Vector.__add__)}, ptr {k.at(a['sums'], place)}, align 4")

        k.loop(a["blocks"], 1, block)

    return FrameFunction(f"rounding {values}", ROUNDED, lambda name: module(name, ROUNDED, lambda k, a: a["rows"], row))


COPIED = FrameLayout(("rows", "k", "blocks", "block", "stride"), ("x", "left", "sums"))
"""`x` has rows of k floats, `left` receives them, then zeros, in rows of `stride` bytes, `sums` the sum of each block."""


def copying() -> FrameFunction:
    """Copies rows, and sums their blocks."""

    def row(k: Code, a: dict[str, str], r: str) -> None:
        x, y = k.at(a["x"], k.times(k.times(r, a["k"]), 4)), k.at(a["left"], k.times(r, a["stride"]))
        first = k.times(r, a["blocks"])

        def block(b: str) -> None:
            start, total = k.times(b, a["block"]), k.kept(k.vector(0, "float"))

            def write(i: str) -> None:
                v = _part(k, x, i, a["k"])
                k.write(v, k.at(y, k.times(i, 4)))
                k.put(k.get(total, "float") + v, total)

            k.loop(k.plus(start, a["block"]), LANES, write, start)
            place = k.at(a["sums"], k.times(k.plus(first, b), 4))
            k.emit(f"store float {_lanes(k, k.get(total, 'float'), Vector.__add__)}, ptr {place}, align 4")

        k.loop(a["blocks"], 1, block)

    return FrameFunction("copying", COPIED, lambda name: module(name, COPIED, lambda k, a: a["rows"], row))


def _part(k: Code, x: str, i: str, count: str) -> Vector:
    """The floats of a row from a place on; zeros after its end."""
    return k.load(k.at(x, k.times(i, 4)), F32, k.first(k.minus(count, i)))


def _bytes(values: int) -> list[int]:
    """The order of 16 bytes of a row."""
    parts = values // 4
    return [start + i + parts * b for start in range(0, LANES, values) for i in range(parts) for b in range(4)]


def _larger(a: Vector, b: Vector) -> Vector:
    return a.where(a > b, b)


def _lanes(k: Code, x: Vector, step: Callable[[Vector, Vector], Vector]) -> str:
    """All lanes combined, in halves."""
    half = LANES // 2
    while half:
        x = step(x, k.shuffled(x, [(i + half) % (2 * half) for i in range(LANES)]))
        half //= 2
    return x.lane(0)


# --- products

WEIGHTS = ("w", "factors", "zeros", "bias", "table")
"""Words, scales and zero points in tiles, a number for each column, and the entries of the table."""

INTEGERS = FrameLayout(("rows", "n", "blocks", "steps", "stride", "groups", "height"), ("left", "scales", "sums", *WEIGHTS, "y"))
FLOATS = FrameLayout(("rows", "n", "blocks", "steps", "groups", "height"), ("left", "sums", *WEIGHTS, "y"))
PANELS = FrameLayout(("rows", "n", "blocks", "steps", "stride", "groups", "height"), ("left", *WEIGHTS, "y"))


@dataclass(frozen=True)
class WeightTile:
    """A tile, and the addresses of what belongs to it.

    Attributes:
        result: the tile of the result.
        words: of its weights.
        factors: of its scales.
        zeros: of its zero points.
        bias: of its part of the bias.
    """

    result: Tile
    words: str
    factors: str
    zeros: str
    bias: str


class _ProductText:
    """The text of a product.

    Attributes:
        k: the text.
        kind: what decides on it.
        a: the arguments.
        step_bytes: the bytes of the weights of a step.
        block_bytes: those of a block.
    """

    def __init__(self, k: Code, kind: FewBitsKind, a: dict[str, str]) -> None:
        self.k, self.kind, self.a = k, kind, a
        self.step_bytes = kind.words * 4 * LANES
        self.block_bytes = k.times(a["steps"], self.step_bytes)

    def tiles(self, results: Sequence[Tile]) -> list[WeightTile]:
        """The weights of tiles."""
        k, a, tiles = self.k, self.a, []
        for t in results:
            blocks = k.times(t.number, a["blocks"])
            words, factors = k.at(a["w"], k.times(blocks, self.block_bytes)), k.at(a["factors"], k.times(blocks, 4 * LANES))
            zeros = k.at(a["zeros"], k.times(blocks, self.kind.zero_bytes))
            tiles.append(WeightTile(t, words, factors, zeros, k.at(a["bias"], k.times(t.column, 4))))
        return tiles

    def factors(self, tile: WeightTile, b: str) -> Vector:
        """The scales of a block."""
        return self.k.of("float", self.k.at(tile.factors, self.k.times(b, 4 * LANES)), 4)

    def zeros(self, tile: WeightTile, b: str) -> Vector | None:
        """The zero points of a block, int32 or floats; None for the middle."""
        k, kind = self.k, self.kind
        place = k.at(tile.zeros, k.times(b, kind.zero_bytes))
        if kind.zeros == "bytes":
            return k.of("i8", place).to("zext", "i32")
        return k.of("float", place, 4) if kind.zeros else None

    def offsets(self, tile: WeightTile, b: str) -> Vector | None:
        """The zero points of a block minus the middle, as floats."""
        zeros = self.zeros(tile, b)
        if zeros is None:
            return None
        return (zeros - self.kind.middle).to("sitofp", "float") if zeros.type == "i32" else zeros - self.kind.middle

    def field(self, words: Vector, i: int) -> Vector:
        """The values at a place of each word, minus the middle, as floats."""
        bits = self.kind.bits
        if self.kind.table or (bits == 4 and self.is_wide()):
            return self._entries(words if not i else words.two(bits * i, "lshr"))
        top = words if (i + 1) * bits == 32 else words.two(32 - (i + 1) * bits, "shl")
        return top.two(32 - bits, "ashr").to("sitofp", "float")

    def is_wide(self) -> bool:
        """Whether a vector is one of the processor."""
        return self.kind.level in ("avx512", "vnni")

    def _entries(self, places: Vector) -> Vector:
        """The entries of the table at the lowest four bits of each word."""
        k, table = self.k, self.a["table"]
        if self.is_wide():
            return self._permuted("avx512.permvar.sf.512", LANES, k.of("float", table, 4).name, places)
        if self.kind.level == "avx2":
            low, high = (
                self._permuted("avx2.permps", 8, k.raw(f"load <8 x float>, ptr {k.at(table, start)}, align 4"), places)
                for start in (0, 32)
            )
            return high.where((places & 8).compare("ne", 0), low)
        numbers = (places & 15).to("zext", "i64")
        full, where = f"<{LANES} x float>", k.raw(f"getelementptr float, ptr {table}, <{LANES} x i64> {numbers.name}")
        k.declared.add(f"declare {full} @llvm.masked.gather.v16f32.v16p0(<16 x ptr>, <16 x i1>, {full})")
        lanes = f"<16 x ptr> align 4 {where}, <16 x i1> splat (i1 true), {full} poison"
        return k.made(f"call {full} @llvm.masked.gather.v16f32.v16p0({lanes})", "float")

    def _permuted(self, name: str, lanes: int, entries: str, places: Vector) -> Vector:
        """The entries at the lowest bits of each word, by an instruction that has so many lanes."""
        k, full = self.k, f"<{lanes} x float>"
        k.declared.add(f"declare {full} @llvm.x86.{name}({full}, <{lanes} x i32>)")
        parts = [
            k.raw(f"call {full} @llvm.x86.{name}({full} {entries}, <{lanes} x i32> {part})") for part in k.split(places, lanes)
        ]
        return k.joined(parts, "float")


COUNTS = (4, 2, 1)
"""The numbers of rows that products of several rows of integers compute together."""


def integers(kind: FewBitsKind) -> FrameFunction:
    """Multiplies rounded rows by weights."""
    wide = TILES if kind.level == "vnni" else 1

    def unit(k: Code, a: dict[str, str], i: str) -> None:
        product = _ProductText(k, kind, a)

        def rows(tiles: Sequence[WeightTile], row: str, count: int) -> None:
            several = TILES if count == 1 else wide
            for start in range(0, TILES, several):
                _integer_rows(product, tiles[start : start + several], row, count)

        in_unit(k, a, 4, i, lambda t, first, end: by_rows(k, first, end, COUNTS, partial(rows, product.tiles(t))))

    return FrameFunction(f"integers {kind}", INTEGERS, lambda name: module(name, INTEGERS, units, unit))


def _integer_rows(product: _ProductText, tiles: Sequence[WeightTile], row: str, count: int) -> None:
    """Compute tiles of some rows."""
    k, kind, a = product.k, product.kind, product.a
    dots = DOTS[kind.level](k, kind.bits)
    rows = [k.plus(row, r) for r in range(count)]
    left = [k.at(a["left"], k.times(r, a["stride"])) for r in rows]
    scales, sums = ([k.at(a[name], k.times(k.times(r, a["blocks"]), 4)) for r in rows] for name in ("scales", "sums"))
    totals = [[k.kept(k.of("float", t.bias, 4)) for t in tiles] for _ in rows]

    def step(i: str, exact: list[list[str]]) -> None:
        """Add the sums of the rows of W that are together in 16 bits."""
        weights = [k.at(t.words, k.times(i, product.step_bytes)) for t in tiles]
        places = [[dots.begin() for _ in tiles] for _ in rows]

        def word(w: str) -> None:
            words = [k.of("i32", k.at(p, k.times(w, 4 * LANES)), 4) for p in weights]
            at = k.plus(k.times(i, kind.deep), k.times(w, kind.values))
            for plane in range(kind.values // 4):
                values = [w.two(kind.bits * plane, "lshr") if plane else w for w in words]
                columns = [dots.columns(v & _mask(kind.bits) if kind.bits < 8 else v) for v in values]
                for pointer, line in zip(left, places, strict=True):
                    four = dots.spread(k.at(pointer, k.plus(at, 4 * plane)))
                    for p, column in zip(line, columns, strict=True):
                        dots.add(p, column, four)

        if count == 1:
            for w in range(kind.words):
                word(str(w))
        else:  # a loop, so that the words are not all in registers
            k.loop(str(kind.words), 1, word)
        for line, more in zip(exact, places, strict=True):
            for p, found in zip(line, more, strict=True):
                k.put(k.get(p, "i32") + dots.sums(found), p)

    def block(b: str) -> None:
        exact = [[k.kept(k.vector(0, "i32")) for _ in tiles] for _ in rows]
        k.loop(k.times(k.plus(b, 1), a["steps"]), 1, lambda i: step(i, exact), k.times(b, a["steps"]))
        for v, t in enumerate(tiles):
            factors, zeros = product.factors(t, b), product.zeros(t, b)
            for r, line in enumerate(exact):
                at = k.times(b, 4)
                scale, total = k.everywhere("float", k.at(scales[r], at)), k.everywhere("i32", k.at(sums[r], at))
                value = _without_zeros(k, kind, k.get(line[v], "i32"), total, zeros, dots.middle)
                k.put(k.fma(value, factors * scale, k.get(totals[r][v], "float")), totals[r][v])

    k.loop(a["blocks"], 1, block)
    for r, line in zip(rows, totals, strict=True):
        for t, place in zip(tiles, line, strict=True):
            k.write(k.get(place, "float"), t.result.row(k, r))


def _mask(bits: int) -> int:
    return sum(((1 << bits) - 1) << 8 * i for i in range(4))


def _without_zeros(k: Code, kind: FewBitsKind, exact: Vector, sums: Vector, zeros: Vector | None, middle: int) -> Vector:
    """The sum of a block minus its zero points times the sum of the row, as floats."""
    if zeros is None or zeros.type == "i32":
        zeros = k.vector(kind.middle, "i32") if zeros is None else zeros
        return (exact - (zeros - middle) * sums).to("sitofp", "float")
    whole = exact + sums * middle if middle else exact
    return k.fma(-zeros, sums.to("sitofp", "float"), whole.to("sitofp", "float"))


def floats(kind: FewBitsKind) -> FrameFunction:
    """Multiplies one row of floats by weights, of which the middle is subtracted already."""

    def unit(k: Code, a: dict[str, str], i: str) -> None:
        product = _ProductText(k, kind, a)
        in_unit(k, a, 4, i, lambda tiles, first, end: _float_row(product, product.tiles(tiles)))

    return FrameFunction(f"floats {kind}", FLOATS, lambda name: module(name, FLOATS, units, unit))


def _float_row(product: _ProductText, tiles: Sequence[WeightTile]) -> None:
    """Compute tiles of the only row."""
    k, kind, a = product.k, product.kind, product.a
    totals = [k.kept(k.of("float", t.bias, 4)) for t in tiles]

    def step(i: str, parts: list[list[str]]) -> None:
        """Add the products with some rows of W to two sums of each tile."""
        for word in range(kind.words):
            at = k.plus(k.times(i, product.step_bytes), word * 4 * LANES)
            words = [k.of("i32", k.at(t.words, at), 4) for t in tiles]
            start = k.at(a["left"], k.times(k.plus(k.times(i, kind.deep), word * kind.values), 4))
            for value in range(kind.values):
                x = k.everywhere("float", k.at(start, 4 * value))
                for w, pair in zip(words, parts, strict=True):
                    p = pair[value % 2]
                    k.put(k.fma(product.field(w, value), x, k.get(p, "float")), p)

    def block(b: str) -> None:
        parts = [[k.kept(k.vector(0, "float")) for _ in range(2)] for _ in tiles]
        k.loop(k.times(k.plus(b, 1), a["steps"]), 1, lambda i: step(i, parts), k.times(b, a["steps"]))
        for t, (even, odd), place in zip(tiles, parts, totals, strict=True):
            total, offsets = k.get(even, "float") + k.get(odd, "float"), product.offsets(t, b)
            if offsets is not None:
                total = k.fma(-offsets, k.everywhere("float", k.at(a["sums"], k.times(b, 4))), total)
            k.put(k.fma(total, product.factors(t, b), k.get(place, "float")), place)

    k.loop(a["blocks"], 1, block)
    for t, place in zip(tiles, totals, strict=True):
        k.write(k.get(place, "float"), t.result.y)


FLOAT_COUNTS = (6, 3, 2, 1)
"""The numbers of rows that products of several rows of floats compute together."""


def panels(kind: FewBitsKind) -> FrameFunction:
    """Multiplies rows of floats by weights, of which the middle is subtracted already."""

    def unit(k: Code, a: dict[str, str], i: str) -> None:
        product = _ProductText(k, kind, a)
        in_unit(k, a, 4, i, lambda tiles, first, end: _by_panels(product, product.tiles(tiles), first, end))

    return FrameFunction(f"panels {kind}", PANELS, lambda name: module(name, PANELS, units, unit))


def _by_panels(product: _ProductText, tiles: Sequence[WeightTile], first: str, end: str) -> None:
    """Compute rows, of which a panel of weights is added at a time."""
    k, a, kind = product.k, product.a, product.kind
    wide = TILES if product.is_wide() else 1
    panel = k.place(f"[{PANEL * wide * LANES} x float]")
    deep = k.times(a["steps"], kind.deep)
    several = k.raw(f"udiv i64 {PANEL}, {deep}")

    def start(r: str) -> None:
        for t in tiles:
            k.write(k.of("float", t.bias, 4), t.result.row(k, r))

    def piece(b: str) -> None:
        last = k.least(k.plus(b, several), a["blocks"])
        depth, x = k.times(k.minus(last, b), deep), k.at(a["left"], k.times(k.times(b, deep), 4))
        for v in range(0, TILES, wide):
            together = tiles[v : v + wide]

            def expand(c: str, together: Sequence[WeightTile] = together) -> None:
                _expand(product, together, c, k.at(panel, k.times(k.minus(c, b), k.times(deep, 4 * wide * LANES))))

            def rows(row: str, count: int, together: Sequence[WeightTile] = together) -> None:
                _add_rows(product, together, panel, x, row, count, depth)

            k.loop(last, 1, expand, b)
            by_rows(k, first, end, FLOAT_COUNTS, rows)

    k.loop(end, 1, start, first)
    k.loop(a["blocks"], several, piece)


def _expand(product: _ProductText, tiles: Sequence[WeightTile], b: str, panel: str) -> None:
    """Write a block of the weights of tiles as floats."""
    k, kind = product.k, product.kind
    factors = [product.factors(t, b) for t in tiles]
    offsets = [product.offsets(t, b) for t in tiles]
    weights = [k.at(t.words, k.times(b, product.block_bytes)) for t in tiles]
    line = 4 * len(tiles) * LANES

    def word(i: str) -> None:
        start = k.at(panel, k.times(i, kind.values * line))
        for v, w in enumerate(weights):
            words = k.of("i32", k.at(w, k.times(i, 4 * LANES)), 4)
            for place in range(kind.values):
                values, offset = product.field(words, place), offsets[v]
                values = values if offset is None else values - offset
                k.write(values * factors[v], k.at(start, place * line + 4 * LANES * v), 64)

    k.loop(k.times(product.a["steps"], kind.words), 1, word)


def _add_rows(product: _ProductText, tiles: Sequence[WeightTile], panel: str, x: str, row: str, count: int, depth: str) -> None:
    """Add the products of rows and a panel to the result."""
    k, lanes = product.k, range(len(tiles))
    rows = [k.plus(row, r) for r in range(count)]
    left = [k.at(x, k.times(r, product.a["stride"])) for r in rows]
    totals = [[k.kept(k.of("float", t.result.row(k, r), 4)) for t in tiles] for r in rows]

    def one(i: str) -> None:
        at = k.at(panel, k.times(i, 4 * len(tiles) * LANES))
        right = [k.of("float", k.at(at, 4 * LANES * v), 64) for v in lanes]
        for pointer, line in zip(left, totals, strict=True):
            factor = k.everywhere("float", k.at(pointer, k.times(i, 4)))
            for v in lanes:
                k.put(k.fma(factor, right[v], k.get(line[v], "float")), line[v])

    k.loop(depth, 1, one)
    for r, line in zip(rows, totals, strict=True):
        for t, place in zip(tiles, line, strict=True):
            k.write(k.get(place, "float"), t.result.row(k, r))
