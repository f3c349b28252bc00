"""Slice and Pad against plain loops over coordinates."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

F = np.float32
X = np.arange(24, dtype=F).reshape(4, 6)
TOP, BOTTOM = 2**63 - 1, -(2**63)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def sliced(d: int, start: int, end: int, step: int) -> list[int]:
    """The positions that the text of Slice-13 names, counted one by one."""
    start, end = start + d * (start < 0), end + d * (end < 0)
    start = max(0, min(start, d if step > 0 else d - 1))
    end = max(0, min(end, d)) if step > 0 else max(-1, min(end, d - 1))
    out = []
    while d and (start < end if step > 0 else start > end):
        out.append(start)
        start += step
    return out


@pytest.mark.parametrize("opset", [10, 11, 13])
@pytest.mark.parametrize("step", [1, 2, -1, -2, 7, -7, TOP, BOTTOM])
def test_slices_of_one_axis(check: Any, opset: int, step: int) -> None:
    x = np.arange(5, dtype=np.int64) + 2**53
    for start in (0, 1, 4, 5, 9, -1, -5, -6, TOP, BOTTOM):
        for end in (0, 3, 5, -1, -6, TOP, BOTTOM):
            expected = x[sliced(5, start, end, step)]
            check("Slice", [x, ints(start), ints(end), ints(0), ints(step)], [expected], opset=opset)
    check("Slice", [x[:0], ints(3), ints(BOTTOM), ints(0), ints(step)], [x[:0]], opset=opset)


@pytest.mark.parametrize("opset", [10, 11, 13])
def test_slice(check: Any, fails: Any, opset: int) -> None:
    small = np.array([1], np.int32), np.array([2**31 - 1], np.int32)
    check("Slice", [X, *small], [X[1:]], opset=opset)
    check("Slice", [X, ints(1, 0), ints(-1, 5), None, ints(1, 2)], [X[1:3, [0, 2, 4]]], opset=opset)
    check("Slice", [X, ints(4, 1), ints(0, 3), ints(1, 0), ints(-2, 1)], [X[1:3][:, [4, 2]]], opset=opset)
    check("Slice", [X, ints(-2), ints(TOP), ints(-1)], [X[:, 4:]], opset=opset)
    check("Slice", [X, ints(), ints()], [X], opset=opset)
    check("Slice", [np.array(3, F), ints(), ints()], [np.array(3, F)], opset=opset)
    fails("Slice", [X, ints(0), ints(1), ints(0), ints(0)], "step", opset=opset)
    fails("Slice", [X, ints(0), ints(1), ints(2)], "axis must be in .* got 2", opset=opset)
    fails("Slice", [X, ints(0, 0), ints(1, 1), ints(0, -2)], "axes must be different", opset=opset)
    fails("Slice", [X, ints(0, 0), ints(1)], "must have equal lengths", opset=opset)


def test_slice_1_takes_attributes(check: Any) -> None:
    check("Slice", [X], [X[1:3, 2:]], opset=1, starts=[1, 2], ends=[-1, 1000])
    check("Slice", [X], [X[:, 4:]], opset=9, starts=[-2], ends=[TOP], axes=[1])
    check("Slice", [X], [X[:, :0]], opset=9, starts=[4], ends=[2], axes=[1])


# --- Pad


def padded(x: np.ndarray, pads: list[int], mode: str, value: Any = 0) -> np.ndarray:
    """Coordinate by coordinate: where a negative pad removed values, the rest is what the others are taken from."""
    fronts, ends = pads[: x.ndim], pads[x.ndim :]
    y = np.full([d + f + e for d, f, e in zip(x.shape, fronts, ends, strict=True)], value, x.dtype)
    for at in np.ndindex(*y.shape):
        source = []
        for p, d, f, e in zip(at, x.shape, fronts, ends, strict=True):
            low, high = max(0, -f), d - max(0, -e)
            p -= f
            while not low <= p < high and mode != "constant":
                if mode == "edge" or (mode == "reflect" and high - low == 1):
                    p = low if p < low else high - 1
                elif mode == "wrap":
                    p += (high - low) * (1 if p < low else -1)
                else:
                    p = 2 * low - p if p < low else 2 * (high - 1) - p
            source.append(p if low <= p < high else None)
        if None not in source:
            y[at] = x[tuple(source)]  # type: ignore[arg-type]
    return y


PADS = [[0, 0, 0, 0], [1, 2, 0, 3], [0, 9, 7, 0], [-1, 2, 0, -3], [2, -1, -1, 0], [-4, 0, 0, 0], [0, -5, 1, 11], [-1, 3, 2, -2]]


@pytest.mark.parametrize("opset", [2, 11, 13, 18, 19, 21, 23, 24, 25])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_pad(check: Any, fails: Any, opset: int, mode: str) -> None:
    for pads in PADS:
        inputs, options = ([X], {"pads": pads}) if opset == 2 else ([X, ints(*pads)], {})
        options |= {"opset": opset, "mode": mode}
        if mode == "wrap" and opset < 19:
            fails("Pad", inputs, "requires Pad-19 or later", **options)
        else:
            check("Pad", inputs, [padded(X, pads, mode)], **options)


def test_pad_1(check: Any, fails: Any) -> None:
    for mode in ("constant", "reflect", "edge"):
        check("Pad", [X], [padded(X, [1, 2, 0, 3], mode)], opset=1, paddings=[1, 2, 0, 3], mode=mode)
    check("Pad", [X], [padded(X, [0, 0, 2, 0], "constant", -1.5)], opset=1, paddings=[0, 0, 2, 0], value=-1.5)
    fails("Pad", [X], "negative", opset=1, paddings=[0, 0, -2, 0])


def test_pad_values(check: Any, fails: Any) -> None:
    check("Pad", [X], [padded(X, [0, 0, 2, 0], "constant", 2.5)], opset=2, pads=[0, 0, 2, 0], value=2.5)
    check("Pad", [X, ints(1, 0, 0, 0), np.array(7, F)], [padded(X, [1, 0, 0, 0], "constant", 7)], opset=11)
    check("Pad", [X, ints(1, 0, 0, 0), np.array([7], F)], [padded(X, [1, 0, 0, 0], "constant", 7)], opset=13)
    big = np.array([2**53 + 1], np.int64)
    check("Pad", [big, ints(1, 1), big[0]], [np.array([big[0]] * 3)], opset=13)
    words = np.array(["a", "b"], object)
    check("Pad", [words, ints(1, 1)], [np.array(["", "a", "b", ""], object)], opset=13)
    check("Pad", [words, ints(1, 0), np.array("x", object)], [np.array(["x", "a", "b"], object)], opset=13)
    check("Pad", [words, ints(1, 1)], [np.array(["b", "a", "b", "a"], object)], opset=13, mode="reflect")
    check("Pad", [np.array([True]), ints(1, 0)], [np.array([False, True])], opset=13)
    check("Pad", [np.array([1 + 2j]), ints(1, 0)], [np.array([0, 1 + 2j])], opset=13)
    for dtype, opset in ((ml_dtypes.bfloat16, 13), (ml_dtypes.float8_e5m2, 21), (ml_dtypes.int4, 21),
                         (ml_dtypes.float4_e2m1fn, 23), (ml_dtypes.int2, 25)):  # fmt: skip
        x, one = np.array([1, 0], dtype), np.array(1, dtype)
        check("Pad", [x, ints(1, 1)], [np.array([0, 1, 0, 0], dtype)], opset=opset)
        check("Pad", [x, ints(1, 1), one], [np.array([1, 1, 0, 1], dtype)], opset=opset)
        check("Pad", [x, ints(1, 1)], [np.array([1, 1, 0, 0], dtype)], opset=opset, mode="edge")


@pytest.mark.parametrize("opset", [18, 19, 25])
def test_pad_some_axes(check: Any, fails: Any, opset: int) -> None:
    check("Pad", [X, ints(1, 2), None, ints(-1)], [padded(X, [0, 1, 0, 2], "constant")], opset=opset)
    axes = np.array([1, 0], np.int32)
    check("Pad", [X, ints(1, 2, 3, 4), None, axes], [padded(X, [2, 1, 4, 3], "edge")], opset=opset, mode="edge")
    fails("Pad", [X, ints(1, 2, 3, 4), None, ints(1, -1)], "axes must be different", opset=opset)
    fails("Pad", [X, ints(1, 2), None, ints(2)], "axis must be in .* got 2", opset=opset)


def test_pad_edges(check: Any, fails: Any) -> None:
    one = np.array([5], F)
    check("Pad", [one, ints(2, 1)], [np.full(4, 5, F)], opset=13, mode="reflect")  # nothing to mirror at: the value stays
    check("Pad", [np.array(3, F), ints()], [np.array(3, F)], opset=13)
    check("Pad", [np.zeros((0, 2), F), ints(1, 0, 1, 0)], [np.zeros((2, 2), F)], opset=13)
    check("Pad", [np.zeros((0, 2), F), ints(0, 1, 0, 1)], [np.zeros((0, 4), F)], opset=13, mode="reflect")
    for mode in ("reflect", "edge"):
        fails("Pad", [np.zeros((0, 2), F), ints(1, 0, 0, 0)], "must not be empty in mode", opset=13, mode=mode)
    check("Pad", [np.arange(3, dtype=F), ints(-5, 4)], [np.zeros(2, F)], opset=13)
    fails("Pad", [np.arange(3, dtype=F), ints(-2, -2)], "remove more", opset=13)
    fails("Pad", [X, ints(1, 1)], "two values for each of 2 axes", opset=13)
    fails("Pad", [X, ints(0, 0, 0, 0), np.zeros(2, F)], "one value", opset=13)
    fails("Pad", [X, ints(0, 0, 1, 0)], "mode must be one of constant", opset=13, mode="mirror")
