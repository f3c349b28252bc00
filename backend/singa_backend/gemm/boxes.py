"""Machine code that selects boxes by non-maximum suppression, as the definition of NonMaxSuppression does.

A unit is a class of a batch entry.  The keys of its candidates are sorted: the order of the score, descending, in the upper 32
bits, and the number of the box.  Each candidate is compared with 16 selected boxes at a time.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..elementwise.builder import LANES, Vector
from .frame import Code, FrameFunction, FrameLayout, module

F32 = np.dtype(np.float32)

SELECTED = FrameLayout(
    ("rows", "first", "classes", "count", "most", "limited", "least", "iou", "centers", "room"),
    ("boxes", "scores", "keys", "sorted", "digits", "sides", "total", "y"),
)
"""`rows` units from the number `first` on; of `count` boxes at most `most` are selected.

If `limited` is 1, boxes with scores below `least` are not candidates; `least` and `iou` are the bits of a float32.  If `centers`
is 1, the boxes are centers and sizes.  `keys` has room for `count` keys and LANES more, `sorted` for `count`, `digits` for
DIGITS numbers, and `sides` for low and high corners and areas of `room` boxes.  Rows (batch entry, class, box) are appended to
`y`, which has `total` then.
"""

FEW = 128
"""The keys that are sorted by comparing each with all of them."""

DIGITS = 1 << 10
"""The values of the four digits by which keys are sorted."""


def selecting() -> FrameFunction:
    """Selects the boxes of each unit."""
    return FrameFunction("selecting", SELECTED, lambda name: module(name, SELECTED, lambda k, a: a["rows"], _unit))


def _unit(k: Code, a: dict[str, str], i: str) -> None:
    row = k.plus(a["first"], i)
    count = _collect(k, a, k.at(a["scores"], k.times(k.times(row, a["count"]), F32.itemsize)))
    _select(k, a, row, _sorted(k, a, count), count)


def _variable(k: Code, value: str, kind: str = "i64") -> str:
    """Memory with a value that loops change."""
    place = k.place(kind)
    k.emit(f"store {kind} {value}, ptr {place}")
    return place


def _add(k: Code, place: str, number: str | int) -> str:
    """Add to an int64 in memory; return what it was."""
    before = k.number_at(place, 0)
    k.emit(f"store i64 {k.plus(before, number)}, ptr {place}")
    return before


def _float(k: Code, bits: str) -> str:
    return k.raw(f"bitcast i32 {k.raw(f'trunc i64 {bits} to i32')} to float")


def _mask(k: Code, lanes: Vector) -> str:
    """The bits of lanes as an int64."""
    return k.raw(f"zext i{LANES} {k.raw(f'bitcast <{LANES} x i1> {lanes.name} to i{LANES}')} to i64")


def _key(k: Code, keys: str, i: str) -> str:
    return k.at(keys, k.times(i, 8))


def _collect(k: Code, a: dict[str, str], scores: str) -> str:
    """Write the keys of the candidates; return their number."""
    k.declared.add("declare i64 @llvm.cttz.i64(i64, i1)")
    count, orders = _variable(k, "0"), k.place(f"<{LANES} x i32>")
    least, unlimited = k.splat(_float(k, a["least"]), "float"), k.splat(k.raw(f"icmp eq i64 {a['limited']}, 0"), "i1")
    whole = k.raw(f"and i64 {a['count']}, {-LANES}")

    def part(i: str, mask: Vector | None = None) -> None:
        s = k.load(k.at(scores, k.times(i, F32.itemsize)), F32, mask)
        bits = (-s + 0.0).bits()  # of zeros with any sign the same
        order = bits ^ (bits.two(31, "ashr") | 1 << 31)
        k.put(k.vector(-1, "i32").where(s.compare("uno", s), order), orders)  # NaNs are the last ones
        passing = (s >= least) | unlimited
        left = _variable(k, _mask(k, passing if mask is None else passing & mask))

        def one() -> None:
            bits = k.number_at(left, 0)
            lane = k.raw(f"call i64 @llvm.cttz.i64(i64 {bits}, i1 true)")
            k.emit(f"store i64 {k.raw(f'and i64 {bits}, {k.minus(bits, 1)}')}, ptr {left}")
            upper = k.raw(f"zext i32 {k.raw(f'load i32, ptr {k.at(orders, k.times(lane, 4))}')} to i64")
            key = k.raw(f"or i64 {k.raw(f'shl i64 {upper}, 32')}, {k.plus(i, lane)}")
            k.emit(f"store i64 {key}, ptr {_key(k, a['keys'], _add(k, count, 1))}")

        k.repeat(lambda: k.raw(f"icmp ne i64 {k.number_at(left, 0)}, 0"), one)

    k.loop(whole, LANES, part)
    part(whole, k.first(k.minus(a["count"], whole)))
    return k.number_at(count, 0)


def _sorted(k: Code, a: dict[str, str], count: str) -> str:
    """Sort keys; return where they are."""
    places = _variable(k, a["keys"], "ptr"), _variable(k, a["sorted"], "ptr")
    few = k.raw(f"icmp sle i64 {count}, {FEW}")
    with k.when(few):
        _sort_few(k, a, count)
        k.emit(f"store ptr {a['sorted']}, ptr {places[0]}")
    with k.when(k.raw(f"xor i1 {few}, true")):
        _sort_many(k, a, count, *places)
    return k.raw(f"load ptr, ptr {places[0]}")


def _sort_few(k: Code, a: dict[str, str], count: str) -> None:
    """Write each key to the place whose number is that of lower keys."""
    k.declared.add("declare i64 @llvm.ctpop.i64(i64)")
    k.write(k.vector(-1, "i64"), _key(k, a["keys"], count))

    def place(i: str) -> None:
        key, before = k.number_at(_key(k, a["keys"], i), 0), _variable(k, "0")
        wide = k.splat(key, "i64")

        def part(j: str) -> None:
            lower = k.of("i64", _key(k, a["keys"], j), 8).compare("lt", wide, unsigned=True)
            _add(k, before, k.raw(f"call i64 @llvm.ctpop.i64(i64 {_mask(k, lower)})"))

        k.loop(count, LANES, part)
        k.emit(f"store i64 {key}, ptr {_key(k, a['sorted'], k.number_at(before, 0))}")

    k.loop(count, 1, place)


def _sort_many(k: Code, a: dict[str, str], count: str, source: str, target: str) -> None:
    """Sort keys by the digits of their upper half, the lowest first; `source` has the address of the sorted ones then."""
    counts, each = a["digits"], DIGITS // 4
    zeros = f"store volatile <{LANES} x i64> zeroinitializer"  # LLVM calls memset for others
    k.loop(str(DIGITS), LANES, lambda i: k.emit(f"{zeros}, ptr {_key(k, counts, i)}, align 8"))

    def digit(key: str, shift: str) -> str:
        return k.raw(f"and i64 {k.raw(f'lshr i64 {key}, {shift}')}, {each - 1}")

    def counted(i: str) -> None:
        key = k.number_at(_key(k, a["keys"], i), 0)
        for n in range(4):
            _add(k, _key(k, counts, k.plus(digit(key, str(32 + 8 * n)), each * n)), 1)

    def turn(n: str) -> None:
        own, shift = _key(k, counts, k.times(n, each)), k.plus(k.times(n, 8), 32)
        before, after = (k.raw(f"load ptr, ptr {p}") for p in (source, target))
        first = k.number_at(_key(k, own, digit(k.number_at(before, 0), shift)), 0)
        with k.when(k.raw(f"icmp ne i64 {first}, {count}")):  # otherwise all digits are equal
            total = _variable(k, "0")

            def place(d: str) -> None:
                k.emit(f"store i64 {_add(k, total, k.number_at(_key(k, own, d), 0))}, ptr {_key(k, own, d)}")

            def move(i: str) -> None:
                key = k.number_at(_key(k, before, i), 0)
                k.emit(f"store i64 {key}, ptr {_key(k, after, _add(k, _key(k, own, digit(key, shift)), 1))}")

            k.loop(str(each), 1, place)
            k.loop(count, 1, move)
            k.emit(f"store ptr {after}, ptr {source}")
            k.emit(f"store ptr {before}, ptr {target}")

    k.loop(count, 1, counted)
    k.loop("4", 1, turn)


def _select(k: Code, a: dict[str, str], row: str, keys: str, count: str) -> None:
    """Append the boxes whose overlap with every box before them is at most `iou`."""
    entry, number = k.divided(row, a["classes"])
    boxes = k.at(a["boxes"], k.times(k.times(entry, a["count"]), 4 * F32.itemsize))
    y = k.at(a["y"], k.times(k.number_at(a["total"], 0), 24))
    sides = [k.at(a["sides"], k.times(k.times(a["room"], n), F32.itemsize)) for n in range(5)]
    iou, center = k.splat(_float(k, a["iou"]), "float"), k.raw(f"icmp eq i64 {a['centers']}, 1")
    at, selected = _variable(k, "0"), _variable(k, "0")

    def candidate() -> None:
        box = k.raw(f"and i64 {k.number_at(_key(k, keys, _add(k, at, 1)), 0)}, {(1 << 32) - 1}")
        own = _corners(k, k.at(boxes, k.times(box, 4 * F32.itemsize)), center)
        n, start = k.number_at(selected, 0), _variable(k, "0")
        overlaps = partial(_overlaps, k, sides, [k.splat(s, "float") for s in own], iou)
        hits = _variable(k, "0")

        def compare() -> None:
            k.emit(f"store i64 {_mask(k, overlaps(_add(k, start, LANES)))}, ptr {hits}")

        def goes_on() -> str:
            more, none = f"icmp slt i64 {k.number_at(start, 0)}, {n}", f"icmp eq i64 {k.number_at(hits, 0)}, 0"
            return k.raw(f"and i1 {k.raw(more)}, {k.raw(none)}")

        k.repeat(goes_on, compare)
        with k.when(k.raw(f"icmp eq i64 {k.number_at(hits, 0)}, 0")):
            with k.when(k.raw(f"icmp eq i64 {k.raw(f'and i64 {n}, {LANES - 1}')}, 0")):  # lanes without a box have no area
                k.write(k.vector(0, "float"), k.at(sides[4], k.times(n, F32.itemsize)))
            for side, value in zip(sides, own, strict=True):
                k.emit(f"store float {value}, ptr {k.at(side, k.times(n, F32.itemsize))}, align 4")
            for word, value in enumerate((entry, number, box)):
                k.emit(f"store i64 {value}, ptr {k.at(y, k.plus(k.times(n, 24), 8 * word))}")
            _add(k, selected, 1)

    def wanted() -> str:
        left, room = f"icmp slt i64 {k.number_at(at, 0)}, {count}", f"icmp slt i64 {k.number_at(selected, 0)}, {a['most']}"
        return k.raw(f"and i1 {k.raw(left)}, {k.raw(room)}")

    k.repeat(wanted, candidate)
    _add(k, a["total"], k.number_at(selected, 0))


def _corners(k: Code, box: str, center: str) -> list[str]:
    """The low corner of a box, the high one, and the area, which is not positive if a coordinate is a NaN."""
    p = [k.raw(f"load float, ptr {k.at(box, n * F32.itemsize)}, align 4") for n in range(4)]
    corners: list[list[str]] = [[], []]
    for x, y in (p[::2], p[1::2]):
        half = k.raw(f"fmul float {y}, 0.5")
        for ends, move, compare in zip(corners, ("fsub", "fadd"), ("olt", "ogt"), strict=True):
            moved, is_x = k.raw(f"{move} float {x}, {half}"), k.raw(f"fcmp {compare} float {x}, {y}")
            end = k.raw(f"select i1 {is_x}, float {x}, float {y}")
            ends.append(k.raw(f"select i1 {center}, float {moved}, float {end}"))
    low, high = corners
    width, height = (k.raw(f"fsub float {h}, {w}") for h, w in zip(high, low, strict=True))
    return [*low, *high, k.raw(f"fmul float {width}, {height}")]


def _overlaps(k: Code, sides: list[str], own: list[Vector], iou: Vector, i: str) -> Vector:
    """Whether a box overlaps by more than `iou` with each of the selected boxes from the i-th on."""
    low0, low1, high0, high1, area = (k.of("float", k.at(s, k.times(i, F32.itemsize)), 4) for s in sides)
    pairs = ((low0, high0, own[0], own[2]), (low1, high1, own[1], own[3]))
    lengths = [h.where(h < top, top) - w.where(w > low, low) for w, h, low, top in pairs]
    common = lengths[0].bound("gt", 0) * lengths[1].bound("gt", 0)
    return (common / (area + own[4] - common) > iou) & (area > 0)
