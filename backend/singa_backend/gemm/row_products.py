"""Machine code of products of a few rows and a float32 matrix of each run, which is read where it is.

To make the tiles of gemm/floats.py of a matrix costs more than to multiply one row by it.  Either the columns of the matrix are
adjacent: then a vector has the sums of 16 of them, as there.  Or what a column has along the depth is adjacent: then the 16 lanes
of a vector add every sixteenth product, and are added to each other by halves.  The bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..elementwise.builder import LANES, Vector
from .copies import F32, float_at
from .floats import BLOCK
from .frame import Code, FrameFunction, FrameLayout, module

COLUMNS = 64
"""The columns of a unit of work."""

TOGETHER = 4
"""The vectors, or the columns, whose sums are computed together."""

ROW_PRODUCTS = FrameLayout(
    (
        "batches", "batch1", "rows", "depth", "n", "groups", "w_step", "x_row", "y_row",
        "x_batch0", "x_batch1", "w_batch0", "w_batch1", "y_batch0", "y_batch1",
    ),
    ("x", "w", "y"),
)  # fmt: skip
"""The number of products, and of the inner of their two axes; rows; products of a sum; columns, and groups of them; and steps in
bytes: that of W which is not one element, from a row to the next, and along the axes of products."""


def row_products(adjacent: bool) -> FrameFunction:
    """Multiplies rows; `adjacent`: whether the columns of W are adjacent, rather than what they have along the depth."""
    write = _columns if adjacent else _dots

    def unit(k: Code, a: dict[str, str], i: str) -> None:
        batch, group = k.divided(i, a["groups"])
        x, w, y = (k.at(a[v], k.moved(batch, a["batch1"], (a[f"{v}_batch0"], a[f"{v}_batch1"]))) for v in "xwy")
        column = k.times(group, COLUMNS)
        end = k.least(k.plus(column, COLUMNS), a["n"])

        def row(r: str) -> None:
            write(k, a, (k.at(x, k.times(r, a["x_row"])), w, k.at(y, k.times(r, a["y_row"]))), column, end)

        k.loop(a["rows"], 1, row)

    def text(name: str) -> str:
        return module(name, ROW_PRODUCTS, lambda k, a: k.times(a["batches"], a["groups"]), unit)

    return FrameFunction(f"row products {adjacent}", ROW_PRODUCTS, text)


def _in_turns(k: Code, start: str, end: str, each: int, body: Callable[[int, str], None]) -> None:
    """Run a body for `TOGETHER` parts of `each` numbers, as long as all of them are whole, and for single parts."""
    whole = k.minus(end, k.raw(f"urem i64 {k.minus(end, start)}, {TOGETHER * each}"))
    k.loop(whole, TOGETHER * each, partial(body, TOGETHER), start)
    k.loop(end, each, partial(body, 1), whole)


def _columns(k: Code, a: dict[str, str], pointers: tuple[str, str, str], first: str, end: str) -> None:
    """Write a row of columns that are adjacent in W."""
    x, w, y = pointers

    def tiles(count: int, column: str) -> None:
        mask = None if count > 1 else k.first(k.minus(end, column))
        totals = [k.kept(k.vector(0.0, "float")) for _ in range(count)]

        def chain(d: str) -> None:
            sums = [k.kept(k.vector(0.0, "float")) for _ in range(count)]

            def add(i: str) -> None:
                number, line = k.everywhere("float", float_at(k, x, i)), k.at(float_at(k, w, column), k.times(i, a["w_step"]))
                for t, s in enumerate(sums):
                    k.put(k.fma(number, k.load(k.at(line, t * 4 * LANES), F32, mask), k.get(s, "float")), s)

            k.loop(k.least(k.plus(d, BLOCK), a["depth"]), 1, add, d)
            for total, s in zip(totals, sums, strict=True):
                k.put(k.get(total, "float") + k.get(s, "float"), total)

        k.loop(a["depth"], BLOCK, chain)
        for t, total in enumerate(totals):
            k.store(k.get(total, "float"), k.at(float_at(k, y, column), t * 4 * LANES), F32, mask)

    _in_turns(k, first, end, LANES, tiles)


def _dots(k: Code, a: dict[str, str], pointers: tuple[str, str, str], first: str, end: str) -> None:
    """Write a row of columns, each of which is adjacent along the depth."""
    x, w, y = pointers
    whole = k.raw(f"and i64 {a['depth']}, {-LANES}")
    rest = k.minus(a["depth"], whole)
    mask = k.first(rest)

    def columns(count: int, column: str) -> None:
        lines = [k.at(w, k.times(k.plus(column, c), a["w_step"])) for c in range(count)]
        sums = [k.kept(k.vector(0.0, "float")) for _ in lines]

        def add(i: str, within: Vector | None = None) -> None:
            row = k.load(float_at(k, x, i), F32, within)
            for line, s in zip(lines, sums, strict=True):
                k.put(k.fma(row, k.load(float_at(k, line, i), F32, within), k.get(s, "float")), s)

        k.loop(whole, LANES, add)
        with k.when(k.raw(f"icmp ne i64 {rest}, 0")):
            add(whole, mask)
        for c, s in enumerate(sums):
            k.emit(f"store float {_total(k, k.get(s, 'float'))}, ptr {float_at(k, y, k.plus(column, c))}, align 4")

    _in_turns(k, first, end, 1, columns)


def _total(k: Code, x: Vector) -> str:
    """The sum of the lanes, by halves."""
    part, lanes = x.name, LANES
    while lanes > 1:
        half = lanes // 2
        low, high = (
            k.raw(
                f"shufflevector <{lanes} x float> {part}, <{lanes} x float> poison, "
                f"<{half} x i32> <{', '.join(f'i32 {start + i}' for i in range(half))}>"
            )
            for start in (0, half)
        )
        part, lanes = k.raw(f"fadd <{half} x float> {low}, {high}"), half
    return k.raw(f"extractelement <1 x float> {part}, i64 0")
