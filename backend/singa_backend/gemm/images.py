"""Machine code that convolves each channel by itself or takes the maximum of windows.

Images have their channels innermost; a channel's filters are adjacent to those of the next channel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..elementwise.builder import LANES, Vector
from .copies import float_at
from .frame import Code, FrameFunction, FrameLayout, module

F32 = np.dtype(np.float32)

PIXELS = 4
"""The pixels of a row that are convolved together."""

DEPTHWISE = FrameLayout(
    (
        "rows", "row1", "count", "channels", "tap0", "tap1", "x_row0", "x_row1", "x_pixel", "x_tap0", "x_tap1",
        "y_row", "y_pixel", "top", "stride0", "size0", "left", "stride1", "size1", "first", "last",
    ),
    ("x", "w", "bias", "y"),
)  # fmt: skip
"""Rows of the result, and the size of the inner of their two axes; the pixels of a row, channels, the sizes of
the two axes of taps, and steps in bytes.

`w` has for each tap a number for each channel, `bias` one.  Windows may extend beyond the image, whose rows and columns are
`size0` and `size1`: what is beyond does not count.  The first window begins `top` rows and `left` columns before the image, each
one `stride0` rows or `stride1` columns after the one before it.  From column `first` of the result to before `last`, windows do
not extend beyond the left or the right.
"""


MAXIMA = FrameLayout(DEPTHWISE.numbers, ("x", "y"))
"""The same without `w` and `bias`."""


def depthwise() -> FrameFunction:
    """Convolves each channel: a result is one chain of fused multiplications and additions, from the bias on."""
    row = partial(_channels, _weighted)
    return FrameFunction("depthwise", DEPTHWISE, lambda name: module(name, DEPTHWISE, lambda k, a: a["rows"], row))


def maxima() -> FrameFunction:
    """The maximum of each window of a channel; a NaN stays."""
    row = partial(_channels, _maximum)
    return FrameFunction("maxima", MAXIMA, lambda name: module(name, MAXIMA, lambda k, a: a["rows"], row))


Tap = Callable[[Code, dict[str, str], str, str, "Vector | None"], Callable[[Vector, Vector], Vector]]
"""(code, arguments, channel, tap, mask) -> what adds an element of an image to what there is."""


def _weighted(k: Code, a: dict[str, str], c: str, t: str, mask: Vector | None) -> Callable[[Vector, Vector], Vector]:
    w = k.load(float_at(k, a["w"], k.plus(k.times(t, a["channels"]), c)), F32, mask)
    return lambda x, s: k.fma(x, w, s)


def _maximum(k: Code, a: dict[str, str], c: str, t: str, mask: Vector | None) -> Callable[[Vector, Vector], Vector]:
    return lambda x, s: x.where((x > s) | x.compare("uno", x), s)


def _channels(tap: Tap, k: Code, a: dict[str, str], r: str) -> None:
    """Compute a row of pixels."""
    image, row = k.divided(r, a["row1"])
    begin = k.minus(k.times(row, a["stride0"]), a["top"])
    before = k.plus(k.times(a["top"], a["x_tap0"]), k.times(a["left"], a["x_tap1"]))
    place = k.minus(k.plus(k.times(image, a["x_row0"]), k.times(row, a["x_row1"])), before)
    x, y = k.at(a["x"], place), k.at(a["y"], k.times(r, a["y_row"]))
    rows = k.most(k.minus("0", begin), 0), k.least(k.minus(a["size0"], begin), a["tap0"])
    whole = k.raw(f"and i64 {a['channels']}, {-LANES}")

    def vector(c: str, mask: Vector | None = None) -> None:
        bias = k.load(float_at(k, a["bias"], c), F32, mask) if "bias" in a else k.vector(-np.inf, "float")
        many = k.minus(a["last"], k.raw(f"urem i64 {k.minus(a['last'], a['first'])}, {PIXELS}"))
        pixels = partial(_pixels, tap, k, a, float_at(k, x, c), float_at(k, y, c), c, bias, mask, rows)
        k.loop(a["first"], 1, partial(pixels, 1))
        k.loop(many, PIXELS, partial(pixels, PIXELS), a["first"])
        k.loop(a["count"], 1, partial(pixels, 1), many)

    k.loop(whole, LANES, vector)
    left = k.minus(a["channels"], whole)
    with k.when(k.raw(f"icmp ne i64 {left}, 0")):
        vector(whole, k.first(left))


def _pixels(
    tap: Tap, k: Code, a: dict[str, str], x: str, y: str, c: str, bias: Vector, mask: Vector | None, rows: tuple[str, str],
    several: int, p: str,
) -> None:  # fmt: skip
    """Compute a vector of channels of some pixels, of which only one may have a window beyond the left or the right."""
    places = [k.at(x, k.times(k.plus(p, j), a["x_pixel"])) for j in range(several)]
    sums = [k.kept(bias) for _ in places]
    start, stop = "0", a["tap1"]
    if several == 1:
        begin = k.minus(k.times(p, a["stride1"]), a["left"])
        start, stop = k.most(k.minus("0", begin), 0), k.least(k.minus(a["size1"], begin), stop)

    def add(outer: str, inner: str) -> None:
        moved = k.plus(k.times(outer, a["x_tap0"]), k.times(inner, a["x_tap1"]))
        added = tap(k, a, c, k.plus(k.times(outer, a["tap1"]), inner), mask)
        for place, s in zip(places, sums, strict=True):
            k.put(added(k.load(k.at(place, moved), F32, mask), k.get(s, "float")), s)

    k.loop(rows[1], 1, lambda outer: k.loop(stop, 1, partial(add, outer), start), rows[0])
    for j, s in enumerate(sums):
        k.store(k.get(s, "float"), k.at(y, k.times(k.plus(p, j), a["y_pixel"])), F32, mask)
