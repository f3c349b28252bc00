"""Logic: every version of the operators on bools, of comparisons, of operators on bits, and of Where."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

Check = Callable[..., Any]

TRUTH = [("And", operator.and_), ("Or", operator.or_), ("Xor", operator.xor)]


@pytest.mark.parametrize(("op", "f"), TRUTH)
def test_truth(check: Check, fails: Check, op: str, f: Any) -> None:
    a, b = np.array([[True, True], [False, False]]), np.array([[True, False], [True, False]])
    for opset in (1, 7):
        check(op, [a, b], [f(a, b)], opset=opset)
    check(op, [a, b[0]], [f(a, b[0])], opset=1, broadcast=1)
    check(op, [a, a[:, 0].copy()], [f(a, a[:, :1])], opset=1, broadcast=1, axis=0)
    check(op, [a, np.array(True)], [f(a, True)], opset=1, broadcast=1)
    check(op, [a[:, :1], b[:1]], [f(a[:, :1], b[:1])], opset=7)
    fails(op, [a, b[0]], "shapes must be equal or broadcast=1", opset=1)


def test_not(check: Check) -> None:
    check("Not", [np.array([True, False])], [np.array([False, True])], opset=1)
    check("Not", [np.array(True)], [np.array(False)], opset=13)
    check("Not", [np.zeros((0, 2), bool)], [np.zeros((0, 2), bool)], opset=1)


def test_equal(check: Check) -> None:
    a, b = np.array([[2**53 + 1, 3], [-1, 0]]), np.array([2**53, 3])
    same = np.array([[False, True], [False, False]])
    for opset in (1, 7, 11, 13, 19):
        check("Equal", [a, a], [np.ones((2, 2), bool)], opset=opset)
    check("Equal", [a, b], [same], opset=1, broadcast=1)
    for opset in (7, 11, 13, 19):
        check("Equal", [a, b], [same], opset=opset)
    check("Equal", [a, np.array([3, 0])], [np.array([[False, True], [False, True]])], opset=1, broadcast=1, axis=0)
    check("Equal", [np.array([True, False]), np.array([True, True])], [np.array([True, False])], opset=1)
    x = np.array([np.nan, 0.0, 1])
    for opset in (11, 19):
        check("Equal", [x, np.array([np.nan, -0.0, 2])], [np.array([False, True, False])], opset=opset)
    check("Equal", [np.ones(1, ml_dtypes.bfloat16), np.ones(1, ml_dtypes.bfloat16)], [np.array([True])], opset=13)
    check("Equal", [np.uint64(2**64 - 1), np.uint64(2**64 - 2)], [np.array(False)], opset=11)


def test_equal_strings(check: Check) -> None:
    a, b = np.array([["a", "é"], ["", "b"]], object), np.array(["a", "b"], object)
    check("Equal", [a, b], [np.array([[True, False], [False, True]])], opset=19)
    check("Equal", [a[:0], b], [np.zeros((0, 2), bool)], opset=19)
    check("Equal", [np.array("x", object), np.array("x", object)], [np.array(True)], opset=19)


ORDER = [
    ("Greater", operator.gt, (1, 7, 9, 13)),
    ("Less", operator.lt, (1, 7, 9, 13)),
    ("GreaterOrEqual", operator.ge, (12, 16)),
    ("LessOrEqual", operator.le, (12, 16)),
]


@pytest.mark.parametrize(("op", "f", "opsets"), ORDER)
def test_order(check: Check, op: str, f: Any, opsets: tuple[int, ...]) -> None:
    a = np.array([[1, -0.0, np.nan, np.inf], [2, 0.0, 1, np.inf]])
    b = np.array([1, 0.0, 1, -np.inf])
    for opset in opsets:
        check(op, [a, a[::-1].copy()], [f(a, a[::-1])], opset=opset)
        if opset > 1:
            check(op, [a, b], [f(a, b)], opset=opset)
        if opset > 8:
            big = np.array([2**53, 2**53 + 1])
            check(op, [big, big[::-1].copy()], [f(big, big[::-1])], opset=opset)
            check(op, [np.array([1, 255], np.uint8), np.uint8(200)], [f(np.array([1, 255]), 200)], opset=opset)
    if opsets[0] == 1:
        check(op, [a, b], [f(a, b)], opset=1, broadcast=1)
        check(op, [a, a[:, 1].copy()], [f(a, a[:, 1:2])], opset=1, broadcast=1, axis=0)
    check(op, [a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)], [f(a, b)], opset=16)
    check(op, [a.astype(np.float16), np.float16(1)], [f(a, 1)], opset=opsets[-1])
    check(op, [a[:, :0], b[:1]], [np.zeros((2, 0), bool)], opset=opsets[-1])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64])
def test_bit_shift(check: Check, dtype: Any) -> None:
    """By Python's integers, which have as many bits as they need."""
    info = np.iinfo(dtype)
    signed = info.min < 0
    xs = [int(info.min), int(info.min) + 5, int(info.max), 1, 6] + ([-1, -6] if signed else [])
    inside = [0, 1, info.bits - 1]
    outside = [info.bits, int(info.max)] + ([-1, int(info.min)] if signed else [])
    x = np.array(xs, dtype)[:, None]
    for opset, ys in ((11, inside), (28, inside + outside)) if not signed else ((28, inside + outside),):
        left = [[_wrap(v << y, info) if 0 <= y < info.bits else 0 for y in ys] for v in xs]
        right = [[v >> y if 0 <= y < info.bits else -1 if v < 0 else 0 for y in ys] for v in xs]
        y = np.array(ys, dtype)
        check("BitShift", [x, y], [np.array(left, dtype)], opset=opset, direction="LEFT")
        check("BitShift", [x, y], [np.array(right, dtype)], opset=opset, direction="RIGHT")


def _wrap(value: int, info: Any) -> int:
    return (value - int(info.min)) % 2**info.bits + int(info.min)


def test_bit_shift_edges(check: Check, fails: Check) -> None:
    check("BitShift", [np.uint8(1), np.zeros((0, 2), np.uint8)], [np.zeros((0, 2), np.uint8)], opset=11, direction="LEFT")
    check("BitShift", [np.int8(-128), np.int8(2)], [np.int8(-32)], opset=28, direction="RIGHT")
    fails("BitShift", [np.uint8(1), np.uint8(1)], "must be 'LEFT' or 'RIGHT'", opset=11, direction="UP")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64])
def test_bitwise(check: Check, dtype: Any) -> None:
    info = np.iinfo(dtype)
    xs = [int(info.min), int(info.max), 0, 5, 12]
    a, b = np.array(xs, dtype)[:, None], np.array(xs, dtype)
    for op, f in [("BitwiseAnd", operator.and_), ("BitwiseOr", operator.or_), ("BitwiseXor", operator.xor)]:
        check(op, [a, b], [np.array([[f(x, y) for y in xs] for x in xs], dtype)], opset=18)
        check(op, [a, b[:0]], [np.zeros((5, 0), dtype)], opset=18)
    check("BitwiseNot", [b], [np.array([~x if info.min else int(info.max) - x for x in xs], dtype)], opset=18)
    check("BitwiseNot", [b[3]], [np.array(~5 if info.min else int(info.max) - 5, dtype)], opset=18)


def test_where(check: Check) -> None:
    c = np.array([[True], [False]])
    for opset in (9, 16):
        for dtype in (np.int8, np.uint64, np.float16, np.float32, np.float64, np.complex64, np.complex128):
            x, y = np.array([1, 2, 3], dtype), np.array(7, dtype)
            check("Where", [c, x, y], [np.array([[1, 2, 3], [7, 7, 7]], dtype)], opset=opset)
        check("Where", [c, np.array([2**53 + 1]), np.array([0])], [np.array([[2**53 + 1], [0]])], opset=opset)
        check("Where", [c, np.array([True]), np.array([False])], [c], opset=opset)
        x, y = np.array(["a", "bc"], object), np.array("", object)
        check("Where", [c, x, y], [np.array([["a", "bc"], ["", ""]], object)], opset=opset)
    check("Where", [c, np.array([1, 2], ml_dtypes.bfloat16), np.array([3], ml_dtypes.bfloat16)],
          [np.array([[1, 2], [3, 3]], ml_dtypes.bfloat16)], opset=16)  # fmt: skip
    check("Where", [np.array(True), np.float32(-0.0), np.float32(np.nan)], [np.float32(-0.0)], opset=9)
    check("Where", [c[:0], np.ones(3), np.ones(1)], [np.ones((0, 3))], opset=9)
