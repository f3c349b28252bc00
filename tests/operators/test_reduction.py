"""Reductions: every version, both places of `axes`, empty sets, integers beyond 2**53, half precision."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

X = np.array([[[1.0, -2.0], [3.0, 4.0], [0.5, 6.0]]], np.float32)  # (1, 3, 2)
ATTRIBUTE = {"ReduceSum": (1, 11)}
INPUT = {
    "ReduceSum": (13, 18), "ReduceMax": (18, 20), "ReduceMin": (18, 20), "ReduceLogSum": (18, 28), "ReduceLogSumExp": (18, 28),
}  # fmt: skip

ALONG_1 = {  # over the three rows of X
    "ReduceSum": [4.5, 8.0],
    "ReduceMean": [1.5, 8 / 3],
    "ReduceProd": [1.5, -48.0],
    "ReduceMax": [3.0, 6.0],
    "ReduceMin": [0.5, -2.0],
    "ReduceL1": [4.5, 12.0],
    "ReduceL2": [math.sqrt(10.25), math.sqrt(56.0)],
    "ReduceSumSquare": [10.25, 56.0],
    "ReduceLogSum": [math.log(4.5), math.log(8.0)],
    "ReduceLogSumExp": [math.log(math.e + math.e**3 + math.e**0.5), math.log(math.e**-2 + math.e**4 + math.e**6)],
}
OVER_NONE = {
    "ReduceL1": abs(X), "ReduceL2": abs(X), "ReduceSumSquare": X * X, "ReduceLogSum": np.log(abs(X)),
}  # fmt: skip


@pytest.mark.parametrize("op", ALONG_1)
def test_axes_as_attribute(check: Any, op: str) -> None:
    y = np.array([ALONG_1[op]], np.float32)
    for opset in ATTRIBUTE.get(op, (1, 11, 12, 13)):
        check(op, [X], [y[:, None]], opset=opset, axes=[1])
        check(op, [X], [y], opset=opset, axes=[1], keepdims=0)
        check(op, [X], [y], opset=opset, axes=[-2], keepdims=0)
        check(op, [X], [y[0]], opset=opset, axes=[1, 0], keepdims=0)
        for x in (np.float32(3), X[:, :1, :1] + 2):  # rank 0; all of three axes
            check(op, [x], [np.float32(3)] if "Log" not in op and "Square" not in op else
                  [np.float32(9 if "Square" in op else 3 if "Exp" in op else math.log(3))], opset=opset, keepdims=0)  # fmt: skip


@pytest.mark.parametrize("op", ALONG_1)
def test_axes_as_input(check: Any, op: str) -> None:
    y = np.array([ALONG_1[op]], np.float32)
    x = abs(X) if op == "ReduceLogSum" else X
    for opset in INPUT.get(op, (18,)):
        check(op, [X, np.array([1])], [y[:, None]], opset=opset)
        check(op, [X, np.array([-2, 0])], [y[0]], opset=opset, keepdims=0)
        for empty in ([], [np.zeros(0, np.int64)]):
            check(op, [x, *empty], [OVER_NONE.get(op, x)], opset=opset, noop_with_empty_axes=1)
            check(op, [X[:, :, :1], *empty], [y[:, :1, None]], opset=opset)
        check(op, [X, np.array([1])], [y[:, None]], opset=opset, noop_with_empty_axes=1)


@pytest.mark.parametrize(
    ("op", "identity"),
    [("ReduceSum", 0), ("ReduceProd", 1), ("ReduceL1", 0), ("ReduceL2", 0), ("ReduceSumSquare", 0), ("ReduceMax", -np.inf),
     ("ReduceMin", np.inf), ("ReduceLogSum", -np.inf), ("ReduceLogSumExp", -np.inf), ("ReduceMean", np.nan)],
)  # fmt: skip
def test_of_nothing(check: Any, op: str, identity: float) -> None:
    x = np.zeros((2, 0, 3), np.float32)
    for dtype in (np.float32, np.float64, np.float16):
        check(op, [x.astype(dtype)], [np.full((2, 1, 3), identity, dtype)], opset=11, axes=[1])
        check(op, [x.astype(dtype), np.array([1])], [np.full((2, 3), identity, dtype)], opset=20, keepdims=0)
    check(op, [x], [np.float32(identity)], opset=11, keepdims=0)
    check(op, [x], [np.zeros((2, 0, 1), np.float32)], opset=11, axes=[2])
    check(op, [x, np.array([-1])], [np.zeros((2, 0), np.float32)], opset=20, keepdims=0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64, np.int8, np.uint8])
def test_bounds_of_no_integers(check: Any, dtype: Any) -> None:
    x, bounds = np.zeros((0, 2), dtype), np.iinfo(dtype)
    for opset in (12, 13):
        check("ReduceMax", [x], [np.full((1, 2), bounds.min, dtype)], opset=opset, axes=[0])
        check("ReduceMin", [x], [np.full((1, 2), bounds.max, dtype)], opset=opset, axes=[0])


def test_bounds_of_bool_and_bytes(check: Any) -> None:
    b = np.array([[True, False], [True, True]])
    check("ReduceMax", [b, np.array([1])], [np.array([True, True])], opset=20, keepdims=0)
    check("ReduceMin", [b, np.array([1])], [np.array([False, True])], opset=20, keepdims=0)
    check("ReduceMax", [b[:0], np.array([0])], [np.array([False, False])], opset=20, keepdims=0)
    check("ReduceMin", [b[:0], np.array([0])], [np.array([True, True])], opset=20, keepdims=0)
    for opset in (12, 13):
        check("ReduceMin", [np.array([3, -5, 127], np.int8)], [np.int8(-5)], opset=opset, keepdims=0)
        check("ReduceMin", [np.array([3, 250], np.uint8)], [np.array([3], np.uint8)], opset=opset)
        check("ReduceMax", [np.array([3, 250], np.uint8)], [np.array([250], np.uint8)], opset=opset)
        check("ReduceMin", [X], [np.array([[[-2.0], [3.0], [0.5]]], np.float32)], opset=opset, axes=[-1])


def test_integers_stay_exact(check: Any) -> None:
    big = 2**53 + 1
    x = np.array([big, 2, -4])
    for opset in (1, 11, 13):
        check("ReduceSum", [x], [np.int64(big - 2)], opset=opset, keepdims=0)
    check("ReduceMax", [x], [np.int64(big)], opset=13, keepdims=0)
    check("ReduceL1", [x], [np.int64(big + 6)], opset=13, keepdims=0)
    check("ReduceProd", [np.array([big, 3])], [np.int64(3 * big)], opset=13, keepdims=0)
    check("ReduceSumSquare", [np.array([2**30 + 1, 1])], [np.int64(2**60 + 2**31 + 2)], opset=13, keepdims=0)
    check("ReduceSum", [np.array([2**31 - 1, 1], np.int32)], [np.int32(-(2**31))], opset=13, keepdims=0)  # wraps


def test_integer_mean_truncates_and_does_not_overflow(check: Any) -> None:
    for dtype in (np.int32, np.int64):
        x = np.array([[-1, -2], [1, 2], [-3, -3], [7, 8], [-1, 0]], dtype)
        check("ReduceMean", [x], [np.array([-1, 1, -3, 7, 0], dtype)], opset=13, axes=[1], keepdims=0)
    top = 2**63 - 1
    check("ReduceMean", [np.array([top, top, top - 2])], [np.int64(top - 1)], opset=13, keepdims=0)
    check("ReduceMean", [np.array([-top - 1, -top])], [np.int64(-top)], opset=13, keepdims=0)
    check("ReduceMean", [np.array([2**64 - 1, 2**64 - 3], np.uint64)], [np.uint64(2**64 - 2)], opset=18, keepdims=0)
    check("ReduceMean", [np.full(70000, 2**31 - 1, np.int32)], [np.int32(2**31 - 1)], opset=13, keepdims=0)
    check("ReduceMean", [np.zeros((0, 0), np.int32)], [np.zeros(0, np.int32)], opset=13, axes=[0], keepdims=0)


def test_roots_and_logarithms_of_integers_truncate(check: Any) -> None:
    x = np.array([[3, 4], [5, 5], [-1, 0]], np.int32)
    check("ReduceL2", [x], [np.array([5, 7, 1], np.int32)], opset=11, axes=[1], keepdims=0)
    check("ReduceLogSumExp", [x], [np.array([4, 5, 0], np.int32)], opset=11, axes=[1], keepdims=0)
    check("ReduceLogSum", [x], [np.array([1, 2, -(2**31)], np.int32)], opset=11, axes=[1], keepdims=0)
    check("ReduceL2", [np.array([2**31, 2**31])], [np.int64(math.isqrt(2**63))], opset=18, keepdims=0)  # squares overflow


def test_log_sum_exp_is_stable(check: Any) -> None:
    inf, nan = np.inf, np.nan
    pairs = [[1000, 1000], [-1000, -1000], [inf, 1], [-inf, 1], [-inf, -inf], [nan, 1], [inf, -inf], [-0.7, -0.6863]]
    x = np.array(pairs, np.float32)
    log2 = math.log(2)
    last = math.log(math.exp(float(x[-1, 0])) + math.exp(float(x[-1, 1])))
    y = np.array([1000 + log2, -1000 + log2, inf, 1, -inf, nan, inf, last], np.float32)
    for opset in (1, 13, 18, 28):
        axes = [np.array([1])] if opset >= 18 else []
        check("ReduceLogSumExp", [x, *axes], [y], opset=opset, keepdims=0, atol=0, **({} if axes else {"axes": [1]}))


def test_narrow_floats_accumulate_in_float32(check: Any) -> None:
    x = np.ones(5000, np.float16)
    check("ReduceSum", [x], [np.float16(5000)], opset=13, keepdims=0)  # float16 alone would stop at 2048
    check("ReduceL2", [np.full(4, 300, np.float16)], [np.float16(600)], opset=18, keepdims=0)  # the square overflows float16
    check("ReduceMean", [np.ones(1000, ml_dtypes.bfloat16)], [np.asarray(1, ml_dtypes.bfloat16)], opset=18, keepdims=0)
    check("ReduceSum", [np.array([2.0**60, 1.0])], [np.float64(2.0**60)], opset=13, keepdims=0, rtol=0)
    check("ReduceSum", [np.array([2.0**40, 1.0])], [np.float64(2.0**40 + 1)], opset=13, keepdims=0, rtol=0)


def test_nan_wins(check: Any) -> None:
    x = np.array([1, np.nan, 3], np.float32)
    for op in ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum"):
        check(op, [x], [np.float32(np.nan)], opset=13, keepdims=0)


def test_errors(fails: Any) -> None:
    fails("ReduceSum", [X], "axis must be in .* got 3", opset=11, axes=[3])
    fails("ReduceSum", [X, np.array([-4])], "axis must be in .* got -4", opset=13)
    fails("ReduceMax", [X], "axes must be different", opset=13, axes=[1, -2])
    fails("ReduceSum", [np.float32(1)], "axis must be in .* got 0", opset=11, axes=[0])
    fails("ReduceMean", [np.zeros((0, 2), np.int64)], "mean of integers must have at least one value", opset=13)
