"""Machine code that copies elements of four bytes: along four axes, or as images with margins."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..elementwise.builder import LANES
from .frame import Code, FrameFunction, FrameLayout, module

F32 = np.dtype(np.float32)

COPY = FrameLayout(
    ("rows", "row1", "count", "width", "x_row0", "x_row1", "x_count", "x_width", "y_row0", "y_row1", "y_count"), ("x", "y")
)
"""Rows, and the size of the inner of their two axes; the places of a row, the elements of a place, and steps in bytes.  The
elements of a place of `y` are adjacent."""


def copies() -> FrameFunction:
    """Copies elements to another order in memory."""

    def row(k: Code, a: dict[str, str], r: str) -> None:
        x, y = (k.at(a[v], k.moved(r, a["row1"], (a[f"{v}_row0"], a[f"{v}_row1"]))) for v in "xy")
        _places(k, (x, y), a["count"], (a["x_count"], a["y_count"]), a["width"], a["x_width"])

    return FrameFunction("copies", COPY, lambda name: module(name, COPY, lambda k, a: a["rows"], row))


def _places(k: Code, pointers: tuple[str, str], count: str, steps: tuple[str, str], width: str, step: str) -> None:
    """Copy places, whose elements are `step` bytes apart in x: one by one if these are adjacent, otherwise 16 at a time."""

    def start(p: str) -> tuple[str, str]:
        x, y = (k.at(pointer, k.times(p, by)) for pointer, by in zip(pointers, steps, strict=True))
        return x, y

    def place(p: str) -> None:
        source, into = start(p)
        whole = k.raw(f"and i64 {width}, {-LANES}")
        k.loop(whole, LANES, lambda i: k.write(k.of("float", float_at(k, source, i), 4), float_at(k, into, i)))
        with k.when(k.raw(f"icmp slt i64 {whole}, {width}")):
            mask = k.first(k.minus(width, whole))
            k.store(k.load(float_at(k, source, whole), F32, mask), float_at(k, into, whole), F32, mask)

    def several(together: int, p: str) -> None:
        source, into = start(p)

        def element(c: str) -> None:
            here, there = k.at(source, k.times(c, step)), float_at(k, into, c)
            for j in range(together):
                number = k.raw(f"load i32, ptr {k.at(here, k.times(steps[0], j))}, align 4")
                k.emit(f"store i32 {number}, ptr {k.at(there, k.times(steps[1], j))}, align 4")

        k.loop(width, 1, element)

    adjacent = k.raw(f"icmp eq i64 {step}, {F32.itemsize}")
    with k.when(adjacent):
        k.loop(count, 1, place)
    with k.when(k.raw(f"xor i1 {adjacent}, true")):
        many = k.raw(f"and i64 {count}, {-LANES}")
        k.loop(many, LANES, partial(several, LANES))
        k.loop(count, 1, partial(several, 1), many)


MARGINS = FrameLayout(
    (
        "rows", "height", "top", "within", "every", "left", "count", "width", "gap", "right", "x_image", "x_row", "x_pixel",
        "x_width",
    ),
    ("x", "y"),
)  # fmt: skip
"""`y` has images of `height` rows.  From row `top` on, each row after `every` other ones is one of the `within` rows of an image
of `x`: `left` zeros, `count` pixels of `width` floats, which are `x_width` bytes apart in `x`, with `gap` zeros between pixels,
and `right` zeros.  Others are zero."""


def margins(around: float = 0.0) -> FrameFunction:
    """Copies images; `around` takes the place of zeros."""
    row = partial(_padded_row, around)
    return FrameFunction(f"margins {around}", MARGINS, lambda name: module(name, MARGINS, lambda k, a: a["rows"], row))


def _padded_row(around: float, k: Code, a: dict[str, str], r: str) -> None:
    gaps = k.times(k.minus(a["count"], 1), a["gap"])
    wide = k.plus(k.plus(k.plus(a["left"], a["right"]), k.times(a["count"], a["width"])), gaps)
    y = k.at(a["y"], k.times(k.times(r, wide), F32.itemsize))
    image, row = k.divided(r, a["height"])
    at = k.minus(row, a["top"])
    place, rest = k.raw(f"sdiv i64 {at}, {a['every']}"), k.raw(f"srem i64 {at}, {a['every']}")
    inside = k.raw(f"icmp ult i64 {place}, {a['within']}")
    for condition in (k.raw(f"icmp sge i64 {at}, 0"), k.raw(f"icmp eq i64 {rest}, 0")):
        inside = k.raw(f"and i1 {inside}, {condition}")

    def fill(start: str, count: str) -> None:
        into = k.at(y, k.times(start, F32.itemsize))
        k.loop(count, LANES, lambda i: k.store(k.vector(around, "float"), float_at(k, into, i), F32, k.first(k.minus(count, i))))

    def between(p: str) -> None:
        fill(k.plus(k.plus(a["left"], a["width"]), k.times(p, k.plus(a["width"], a["gap"]))), a["gap"])

    x = k.at(k.at(a["x"], k.times(image, a["x_image"])), k.times(place, a["x_row"]))
    with k.when(inside):
        fill("0", a["left"])
        pitch = k.times(k.plus(a["width"], a["gap"]), F32.itemsize)
        _places(k, (x, float_at(k, y, a["left"])), a["count"], (a["x_pixel"], pitch), a["width"], a["x_width"])
        with k.when(k.raw(f"icmp ne i64 {a['gap']}, 0")):
            k.loop(k.minus(a["count"], 1), 1, between)
        fill(k.minus(wide, a["right"]), a["right"])
    with k.when(k.raw(f"xor i1 {inside}, true")):
        fill("0", wide)


def float_at(k: Code, pointer: str, i: str) -> str:
    """The address of a float after another one."""
    return k.at(pointer, k.times(i, F32.itemsize))
