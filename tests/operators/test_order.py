"""The largest, the distinct, the reversed, running totals, boxes: against sorts and loops of Python."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

F = np.float32
NAN, INF = math.nan, math.inf
RNG = np.random.default_rng(11)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("opset", [1, 10, 11, 24])
@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("largest", [1, 0])
def test_top_k(check: Any, fails: Any, opset: int, axis: int | None, largest: int) -> None:
    if opset < 11 and not largest:
        return
    options: dict[str, Any] = {"opset": opset} | ({} if axis is None else {"axis": axis}) | ({} if largest else {"largest": 0})
    axis = -1 if axis is None else axis
    dtypes = {1: [np.float16, np.float64], 10: [np.float32], 11: [np.int64, np.uint8], 24: [ml_dtypes.bfloat16, np.float32]}
    for dtype in dtypes[opset]:
        x = RNG.integers(0, 4, (3, 5, 4)).astype(dtype)  # many ties
        n = x.shape[axis]
        for k in (0, 2, n):
            lines = np.moveaxis(x, axis, -1)
            at = np.zeros((*lines.shape[:-1], k), np.int64)
            for row in np.ndindex(*lines.shape[:-1]):
                at[row] = sorted(range(n), key=lambda i: (-float(lines[row][i]) if largest else float(lines[row][i]), i))[:k]
            values = np.take_along_axis(lines, at, -1)
            inputs, given = ([x], {"k": k}) if opset == 1 else ([x, ints(k)], {})
            check("TopK", inputs, [np.moveaxis(values, -1, axis), np.moveaxis(at, -1, axis)], **options, **given)
        for k in (-1, n + 1):
            inputs, given = ([x], {"k": k}) if opset == 1 else ([x, ints(k)], {})
            fails("TopK", inputs, f"k must be in .* got {k}", outputs=2, **options, **given)


def test_top_k_values_that_sort_badly(check: Any, fails: Any) -> None:
    x = np.array([1, NAN, 3, NAN, -INF, INF], F)
    check("TopK", [x, ints(4)], [x[[1, 3, 5, 2]], ints(1, 3, 5, 2)], opset=11)
    check("TopK", [x, ints(5)], [x[[4, 0, 2, 5, 1]], ints(4, 0, 2, 5, 1)], opset=11, largest=0)
    check("TopK", [np.array([0.0, -0.0, 0.0], F), ints(2)], [np.zeros(2, F), ints(0, 1)], opset=11)
    big = ints(2**53, 2**53 + 1, -(2**63))
    check("TopK", [big, ints(1)], [big[1:2], ints(1)], opset=11)
    check("TopK", [big, ints(1)], [big[2:], ints(2)], opset=11, largest=0)
    check("TopK", [np.array([3, 255], np.uint8), ints(2)], [np.array([255, 3], np.uint8), ints(1, 0)], opset=11, sorted=0)
    check("TopK", [np.zeros((0, 2), F), ints(1)], [np.zeros((0, 1), F), np.zeros((0, 1), np.int64)], opset=11)
    fails("TopK", [np.array(1, F), ints(1)], "axis must be in .* got -1", outputs=2, opset=11)


@pytest.mark.parametrize("opset", [1, 11, 12, 13])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_arg(check: Any, fails: Any, op: str, opset: int) -> None:
    x = np.array([[2, 1, 2], [1, 3, 3]], F) * (1 if op == "ArgMax" else -1)
    check(op, [x], [ints([0, 1, 1])], opset=opset)
    check(op, [x], [ints(0, 1)], opset=opset, axis=1, keepdims=0)
    check(op, [x], [ints([0], [1])], opset=opset, axis=-1)
    check(op, [x.astype(np.int8)], [ints([0], [1])], opset=opset, axis=1)
    check(op, [x.astype(np.float16)], [ints([0], [1])], opset=opset, axis=1)
    check(op, [np.array([1, NAN, 5, NAN, -5], F)], [ints(1)], opset=opset)
    check(op, [np.array([0.0, -0.0], F)], [ints(0)], opset=opset)
    check(op, [np.zeros((2, 0), F)], [np.zeros((1, 0), np.int64)], opset=opset)
    big = ints(2**53, 2**53 + 1, 2**53)
    check(op, [big], [ints(1 if op == "ArgMax" else 0)], opset=opset)
    fails(op, [np.zeros((2, 0), F)], "must not be empty", opset=opset, axis=1)
    fails(op, [x], "axis must be in .* got 2", opset=opset, axis=2)
    if opset >= 12:
        check(op, [x], [ints([2], [2])], opset=opset, axis=1, select_last_index=1)
        check(op, [np.array([1, NAN, 5, NAN, -5], F)], [ints(3)], opset=opset, select_last_index=1)
        check(op, [big], [ints(1 if op == "ArgMax" else 2)], opset=opset, select_last_index=1)
    if opset == 13:
        check(op, [x.astype(ml_dtypes.bfloat16)], [ints(0, 1)], opset=opset, axis=1, keepdims=0)


# --- Unique


def uniques(keys: list[Any], ordered: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First places, numbers and counts of the groups of equal keys, by a dictionary."""
    first: dict[Any, int] = {}
    for i, key in enumerate(keys):
        first.setdefault(key, i)
    groups = sorted(first) if ordered else list(first)
    return ints(*(first[g] for g in groups)), ints(*map(groups.index, keys)), ints(*map(keys.count, groups))


@pytest.mark.parametrize("opset", [11, 28])
@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -2])
def test_unique(check: Any, opset: int, ordered: int, axis: int | None) -> None:
    options: dict[str, Any] = {"opset": opset, "sorted": ordered} | ({} if axis is None else {"axis": axis})
    base = RNG.integers(0, 2, (3, 2, 3))
    words = np.array(["b", "aa", "a"], object)[RNG.integers(0, 3, (3, 2, 3))]
    numbers = [base.astype(t) for t in (F, bool, np.float16, np.uint8)]
    for x in (*numbers, base + 2**53, base - 1j * base, words, numbers[0][:0]):
        if axis is None:
            lines, keys = x.reshape(-1), [(v.real, v.imag) if x.dtype.kind == "c" else v for v in x.reshape(-1).tolist()]
        else:
            lines = np.moveaxis(x, axis, 0)
            keys = [tuple((v.real, v.imag) if x.dtype.kind == "c" else v for v in row.reshape(-1).tolist()) for row in lines]
        first, inverse, counts = uniques(keys, ordered)
        y = lines[first] if axis is None else np.moveaxis(lines[first], 0, axis)
        check("Unique", [x], [y, first, inverse, counts], **options)


def test_unique_edges(check: Any, fails: Any) -> None:
    x = np.array([NAN, 1, NAN, -0.0, 0.0], F)  # all NaN are one, and so are the zeros
    check("Unique", [x], [np.array([0, 1, NAN], F), ints(3, 1, 0), ints(2, 1, 2, 0, 0), ints(2, 1, 2)], opset=11)
    check("Unique", [x], [x[[0, 1, 3]], ints(0, 1, 3), ints(0, 1, 0, 2, 2), ints(2, 1, 2)], opset=11, sorted=0)
    rows = np.array([[NAN, 1], [2, 1], [NAN, 1]], F)
    check("Unique", [rows], [rows[[1, 0]], ints(1, 0), ints(1, 0, 1), ints(1, 2)], opset=11, axis=0)
    check("Unique", [np.array(3, F)], [np.array([3], F), ints(0), ints(0), ints(1)], opset=11)
    check("Unique", [np.zeros((3, 0), F)], [np.zeros((1, 0), F), ints(0), ints(0, 0, 0), ints(3)], opset=11, axis=0)
    check("Unique", [np.zeros((0, 2), F)], [np.zeros((0, 2), F), ints(), ints(), ints()], opset=11, axis=0)
    check("Unique", [ints(3, 1, 3)], [ints(1, 3)], opset=11)
    check("Unique", [np.array([1, 1], ml_dtypes.bfloat16)], [np.array([1], ml_dtypes.bfloat16)], opset=28)
    fails("Unique", [rows], "axis must be in .* got 2", opset=11, axis=2)


# --- along a sequence


@pytest.mark.parametrize("opset", [10, 28])
@pytest.mark.parametrize("batch_axis", [0, 1])
def test_reverse_sequence(check: Any, fails: Any, opset: int, batch_axis: int) -> None:
    for x in (RNG.standard_normal((4, 4)), RNG.integers(0, 9, (4, 4, 3)), np.array([*"abcdefghijklmnop"], object).reshape(4, 4)):
        lens = [0, 1, 3, 4]
        y = x.copy()
        for b, t in np.ndindex(4, 4):
            if t < lens[b]:
                if batch_axis == 0:
                    y[b, t] = x[b, lens[b] - 1 - t]
                else:
                    y[t, b] = x[lens[b] - 1 - t, b]
        axes = {"batch_axis": batch_axis, "time_axis": 1 - batch_axis}
        check("ReverseSequence", [x, ints(*lens)], [y], opset=opset, **axes)
        for bad in ([0, 1, 3, 5], [-1, 1, 1, 1], [1, 1]):
            fails("ReverseSequence", [x, ints(*bad)], r"lengths in \[0, 4\]", opset=opset, **axes)
    fails(
        "ReverseSequence", [np.zeros((2, 2), F), ints(1, 1)], "must be the first two axes", opset=opset, batch_axis=1, time_axis=1
    )


@pytest.mark.parametrize(("op", "opset", "neutral"), [("CumSum", 11, 0), ("CumSum", 14, 0), ("CumProd", 26, 1)])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_totals(check: Any, op: str, opset: int, neutral: int, exclusive: int, reverse: int, axis: int) -> None:
    dtypes = [F, np.float64, np.int32, np.uint32, np.int64, np.uint64] + ([np.float16, ml_dtypes.bfloat16] if opset >= 14 else [])
    for dtype in dtypes:
        x = RNG.integers(1, 4, (2, 3, 4)).astype(dtype)
        y = x.copy()
        for at in np.ndindex(*x.shape):
            total = dtype(neutral)
            for i in range(x.shape[axis]):
                there = list(at)
                there[axis] = i
                before = i > at[axis] if reverse else i < at[axis]
                if before or (i == at[axis] and not exclusive):
                    total = total + x[tuple(there)] if op == "CumSum" else total * x[tuple(there)]
            y[at] = total
        check(op, [x, np.array(axis, np.int32)], [y], opset=opset, exclusive=exclusive, reverse=reverse)


def test_running_totals_edges(check: Any, fails: Any) -> None:
    big = ints(2**53, 1, 1)
    check("CumSum", [big, np.array(0)], [ints(2**53, 2**53 + 1, 2**53 + 2)], opset=14)
    check("CumSum", [ints(2**63 - 1, 1), np.array(0)], [ints(2**63 - 1, -(2**63))], opset=14)
    check("CumSum", [np.array([INF, 1], F), np.array(0)], [np.array([0, INF], F)], opset=14, exclusive=1)
    check("CumProd", [np.array([0, NAN, 2], F), np.array(0)], [np.array([1, 0, NAN], F)], opset=26, exclusive=1)
    check("CumSum", [np.zeros((2, 0), F), ints(1)], [np.zeros((2, 0), F)], opset=14, exclusive=1)
    thin = np.array([2048] + [1] * 64, np.float16)  # in float16 2048 + 1 is 2048; rounded once, the last sum is 2112
    check("CumSum", [thin, np.array(0)], [np.arange(2048, 2113).astype(np.float16)], opset=14)
    fails("CumSum", [big, np.array(1)], "axis must be in .* got 1", opset=14)
    fails("CumSum", [np.array(1, F), np.array(0)], "axis must be in .* got 0", opset=14)


# --- NonMaxSuppression


def survivors(boxes: np.ndarray, scores: np.ndarray, most: int, iou: float, least: float | None, center: int) -> np.ndarray:
    """Box by box, as the text tells it."""

    def overlap(a: np.ndarray, b: np.ndarray) -> float:
        sides, areas = [], [1.0, 1.0]
        for k in (0, 1):
            ends = []
            for j, box in enumerate((a, b)):
                p, q = (box[k] - box[k + 2] / 2, box[k] + box[k + 2] / 2) if center else (box[k], box[k + 2])
                ends.append((min(p, q), max(p, q)))
                areas[j] *= abs(q - p)
            sides.append(max(0, min(ends[0][1], ends[1][1]) - max(ends[0][0], ends[1][0])))
        common = sides[0] * sides[1]
        return common / (sum(areas) - common) if common else 0

    out = []
    for n, c in np.ndindex(scores.shape[:2]):
        kept: list[int] = []
        for i in sorted(range(scores.shape[2]), key=lambda i: (-scores[n, c, i], i)):
            good = least is None or scores[n, c, i] >= least
            if good and len(kept) < most and all(overlap(boxes[n, i], boxes[n, j]) <= iou for j in kept):
                kept.append(i)
        out += [(n, c, i) for i in kept]
    return np.array(out, np.int64).reshape(-1, 3)


@pytest.fixture(params=["wait", "off"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With machine code, and without."""
    monkeypatch.setenv("SONNX_MACHINE_CODE", request.param)


@pytest.mark.parametrize("opset", [10, 11])
@pytest.mark.parametrize("center", [0, 1])
def test_non_max_suppression(check: Any, code: None, opset: int, center: int) -> None:
    for _ in range(8):
        boxes = RNG.random((2, 12, 4)).astype(F)
        scores = (RNG.integers(0, 8, (2, 3, 12)) / 8).astype(F)  # ties, and scores at the threshold
        most, iou, least = int(RNG.integers(0, 12)), float(F(RNG.random() * 0.5)), 0.25
        options = {"opset": opset, "center_point_box": center}
        expected = survivors(boxes.astype(float), scores, most, iou, least, center)
        check("NonMaxSuppression", [boxes, scores, ints(most), np.array([iou], F), np.array([least], F)], [expected], **options)
        expected = survivors(boxes.astype(float), scores, most, 0, None, center)
        check("NonMaxSuppression", [boxes, scores, np.array(most)], [expected], **options)


@pytest.mark.parametrize("center", [0, 1])
def test_non_max_suppression_of_many(check: Any, code: None, center: int) -> None:
    """More boxes than are compared at a time, with equal scores; overlaps are never near the threshold but equal to it."""
    boxes, scores = RNG.integers(0, 12, (1, 150, 4)).astype(F), (RNG.integers(0, 20, (1, 2, 150)) / 20).astype(F)
    for most in (7, 40, 2**63 - 1):
        expected = survivors(boxes.astype(float), scores, most, 0.5, None, center)
        inputs = [boxes, scores, ints(most), np.array(0.5, F)]
        check("NonMaxSuppression", inputs, [expected], opset=11, center_point_box=center)
    assert 80 < len(expected) < 300


def test_non_max_suppression_of_special_numbers(check: Any, code: None) -> None:
    ends = [(0, 1), (0, NAN), (0, 1), (0, INF), (0, 1), (-3e38, 3e38), (0, 1)]
    boxes = np.array([[[low, 0, high, 1] for low, high in ends]], F)
    scores = np.array([[[-0.0, 5, NAN, -INF, 0, INF, 0.5]]], F)
    # The last one is NaN, and a box whose area is not finite overlaps nothing; -0.0 is 0.0.
    everything = [ints([0, 0, 5], [0, 0, 1], [0, 0, 6], [0, 0, 0], [0, 0, 4], [0, 0, 3], [0, 0, 2])]
    check("NonMaxSuppression", [boxes, scores, ints(9), np.array(1, F)], everything, opset=11)
    chosen = [ints([0, 0, 5], [0, 0, 1], [0, 0, 6], [0, 0, 3])]
    check("NonMaxSuppression", [boxes, scores, ints(9), np.array(0.5, F)], chosen, opset=11)
    numbers = [boxes, scores, ints(9), np.array(1, F)]
    check("NonMaxSuppression", [*numbers, np.array(0, F)], [everything[0][:5]], opset=11)
    check("NonMaxSuppression", [*numbers, np.array(-INF, F)], [everything[0][:6]], opset=11)
    check("NonMaxSuppression", [*numbers, np.array(NAN, F)], [np.zeros((0, 3), np.int64)], opset=11)


def test_non_max_suppression_edges(check: Any, code: None, fails: Any) -> None:
    boxes, scores = np.array([[[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]], F), np.array([[[1, 2, 3, 3]]], F)
    none = np.zeros((0, 3), np.int64)
    check("NonMaxSuppression", [boxes, scores], [none], opset=11)  # by default none is selected
    check("NonMaxSuppression", [boxes, scores, ints(-1)], [none], opset=11)
    # Corners in any order are one box; boxes without an area overlap nothing.
    check("NonMaxSuppression", [boxes, scores, ints(9)], [ints([0, 0, 2], [0, 0, 3], [0, 0, 1])], opset=11)
    half = np.array([[[0, 0, 1, 2], [0, 0, 1, 1]]], F)  # an overlap of exactly the threshold is kept
    check("NonMaxSuppression", [half, scores[:, :, :2], ints(9), np.array(0.5, F)], [ints([0, 0, 1], [0, 0, 0])], opset=11)
    check("NonMaxSuppression", [boxes[:, :0], scores[:, :, :0], ints(9)], [none], opset=11)
    fails("NonMaxSuppression", [boxes, scores[:, :, :2], ints(9)], r"must have shape \(N, boxes, 4\)", opset=11)
    fails("NonMaxSuppression", [boxes, scores, ints(9), np.array(1.5, F)], "iou_threshold must be in", opset=11)
    fails("NonMaxSuppression", [boxes, scores, ints(9)], "center_point_box must be 0 or 1", opset=11, center_point_box=2)
