"""Tensors out of nothing: every attribute of Constant, ranges, triangles, one-hot rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from singa_backend import InvalidModel

F = np.float32


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("opset", [1, 9, 11, 12, 13, 19, 21, 23, 24, 25])
def test_constant(check: Any, opset: int) -> None:
    for x in (np.array([[1.5, -2]], F), np.array(3, np.float64), np.zeros((0, 2), np.float16)):
        check("Constant", [], [x], opset=opset, value=numpy_helper.from_array(x))


@pytest.mark.parametrize("opset", [12, 13, 19, 21, 23, 24, 25])
def test_constant_of_python_values(check: Any, opset: int) -> None:
    check("Constant", [], [np.array(1.5, F)], opset=opset, value_float=1.5)
    check("Constant", [], [np.array([1.5, 2], F)], opset=opset, value_floats=[1.5, 2])
    check("Constant", [], [np.array(2**53 + 1)], opset=opset, value_int=2**53 + 1)
    check("Constant", [], [ints(1, -(2**63))], opset=opset, value_ints=[1, -(2**63)])
    check("Constant", [], [np.array("é", object)], opset=opset, value_string="é")
    check("Constant", [], [np.array(["a", ""], object)], opset=opset, value_strings=["a", ""])


@pytest.mark.parametrize("opset", [11, 12, 13, 25])
def test_sparse_constant(check: Any, opset: int) -> None:
    values = helper.make_tensor("v", TensorProto.FLOAT, [2], [5, 7])
    linear = helper.make_sparse_tensor(values, helper.make_tensor("i", TensorProto.INT64, [2], [1, 5]), [2, 3])
    pairs = helper.make_sparse_tensor(values, helper.make_tensor("i", TensorProto.INT64, [2, 2], [0, 1, 1, 2]), [2, 3])
    for sparse in (linear, pairs):
        check("Constant", [], [np.array([[0, 5, 0], [0, 0, 7]], F)], opset=opset, sparse_value=sparse)


@pytest.mark.parametrize(
    ("dtype", "opset"),
    [(np.bool_, 9), (np.complex64, 9), (object, 9), (ml_dtypes.bfloat16, 13), (ml_dtypes.float8_e4m3fnuz, 19),
     (ml_dtypes.uint4, 21), (ml_dtypes.float4_e2m1fn, 23), (ml_dtypes.float8_e8m0fnu, 24), (ml_dtypes.uint2, 25)],
)  # fmt: skip
def test_constant_dtypes(check: Any, dtype: Any, opset: int) -> None:
    x = np.array(["a", ""], object) if dtype is object else np.array([1, 1], dtype)
    check("Constant", [], [x], opset=opset, value=numpy_helper.from_array(x))


def test_constant_wants_one_value(fails: Any) -> None:
    fails("Constant", [], "must have exactly one value", opset=13, value_int=1, value_float=1.0)
    fails("Constant", [], "must have exactly one value", opset=13)
    fails("Constant", [], "requires the attribute 'value'", opset=9, error=InvalidModel)


@pytest.mark.parametrize("opset", [9, 20, 21, 23, 24, 25])
def test_constant_of_shape(check: Any, fails: Any, opset: int) -> None:
    check("ConstantOfShape", [ints(2, 3)], [np.zeros((2, 3), F)], opset=opset)
    check("ConstantOfShape", [ints()], [np.array(0, F)], opset=opset)
    check("ConstantOfShape", [ints(2, 0)], [np.zeros((2, 0), F)], opset=opset)
    for value in (np.array([2**53 + 1]), np.array([True]), np.array(-1.5, np.float16)):
        tensor = numpy_helper.from_array(value)
        check("ConstantOfShape", [ints(2)], [np.array([value.item()] * 2, value.dtype)], opset=opset, value=tensor)
    fails("ConstantOfShape", [ints(2, -1)], "negative", opset=opset)
    fails("ConstantOfShape", [ints(2)], "one element", opset=opset, value=numpy_helper.from_array(ints(1, 2)))


@pytest.mark.parametrize(
    ("dtype", "opset"), [(ml_dtypes.bfloat16, 20), (ml_dtypes.float8_e5m2, 20), (ml_dtypes.int4, 21),
                         (ml_dtypes.float4_e2m1fn, 23), (ml_dtypes.float8_e8m0fnu, 24), (ml_dtypes.int2, 25)],
)  # fmt: skip
def test_constant_of_shape_dtypes(check: Any, dtype: Any, opset: int) -> None:
    check("ConstantOfShape", [ints(3)], [np.ones(3, dtype)], opset=opset, value=numpy_helper.from_array(np.ones(1, dtype)))


@pytest.mark.parametrize("opset", [9, 22])
@pytest.mark.parametrize("k", [0, 1, -2, 9, -9, 2**62])
def test_eye_like(check: Any, opset: int, k: int) -> None:
    for dtype in (np.float16, np.int32, np.bool_, np.float64):
        y = np.array([[j == i + k for j in range(4)] for i in range(3)])
        check("EyeLike", [np.zeros((3, 4), dtype)], [y.astype(dtype)], opset=opset, k=k)
        check("EyeLike", [np.zeros((3, 4), dtype)], [y.astype(np.uint8)], opset=opset, k=k, dtype=TensorProto.UINT8)


def test_eye_like_edges(check: Any, fails: Any) -> None:
    check("EyeLike", [np.zeros((0, 2), F)], [np.zeros((0, 2), F)], opset=9)
    check("EyeLike", [np.zeros((1, 2), F)], [np.array([[1, 0]], ml_dtypes.bfloat16)], opset=22, dtype=TensorProto.BFLOAT16)
    fails("EyeLike", [np.zeros(3, F)], "takes a matrix", opset=9)
    fails("EyeLike", [np.zeros((3, 3), F)], "that EyeLike supports, got string", opset=9, dtype=TensorProto.STRING)


@pytest.mark.parametrize("opset", [11, 27])
def test_range(check: Any, fails: Any, opset: int) -> None:
    def go(a: Any, b: Any, step: Any, expected: list[Any], dtype: Any) -> None:
        check("Range", [np.array(v, dtype) for v in (a, b, step)], [np.array(expected, dtype)], opset=opset)

    for dtype in (np.int16, np.int32, np.int64, np.float32, np.float64):
        go(3, 9, 3, [3, 6], dtype)
        go(10, 4, -2, [10, 8, 6], dtype)
        go(3, 3, 1, [], dtype)
        go(5, 3, 1, [], dtype)
        go(-1, 6, 4, [-1, 3], dtype)
    go(2**53 + 1, 2**53 + 6, 2, [2**53 + 1, 2**53 + 3, 2**53 + 5], np.int64)
    go(-(2**63), 2**63 - 1, 2**62, [-(2**63), -(2**62), 0, 2**62], np.int64)
    go(-30000, 30000, 20000, [-30000, -10000, 10000], np.int16)  # the distance is more than int16 holds
    go(0.5, 2, 0.75, [0.5, 1.25], np.float64)
    third = [np.array(v) for v in (1 / 3, 1.9, 1 / 3)]
    check("Range", third, [np.array([i / 3 for i in range(1, 6)])], opset=opset, rtol=1e-15)
    # The float32 next to 0.3 is more than three times the one next to 0.1: there are four steps, the last one just below.
    go(0, 0.3, 0.1, [0, 0.1, 0.2, 0.3], np.float32)
    check("Range", [np.array([0], F), np.array([2], F), np.array([1], F)], [np.array([0, 1], F)], opset=opset)
    for bad in [(0, 1, 0), (0, np.nan, 1), (0, np.inf, 1)]:
        fails("Range", [np.array(v, F) for v in bad], "delta must not be 0|number of steps must be finite", opset=opset)
    fails("Range", [np.array(v) for v in (0, 1, 0)], "delta must not be 0", opset=opset)
    fails("Range", [ints(0, 1), np.array(3), np.array(1)], "must be scalars", opset=opset)


@pytest.mark.parametrize("stash_type", [1, 11])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_range_27_counts_in_the_stash_type(check: Any, dtype: Any, stash_type: int) -> None:
    """256 + 1 is 256 in bfloat16: each element is computed wide and rounded once."""
    inputs = [np.array(v, dtype) for v in (250, 264, 1)]
    check("Range", inputs, [np.arange(250, 264).astype(F).astype(dtype)], opset=27, stash_type=stash_type, rtol=0)


def test_range_27_stash_types(fails: Any) -> None:
    fails("Range", [np.array(v, np.float16) for v in (0, 1, 1)], "stash_type", opset=27, stash_type=TensorProto.INT32)


@pytest.mark.parametrize("k", [None, 0, 1, -1, 9, -9, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("upper", [0, 1])
def test_trilu(check: Any, k: int | None, upper: int) -> None:
    full = [np.full((3, 2), v) for v in (2**53 + 1, True, 1j)] + [np.full((3, 4), "a", object)]
    for x in (np.arange(1, 25, dtype=F).reshape(2, 3, 4), *full, np.ones((2, 2), ml_dtypes.bfloat16), np.zeros((0, 3), F)):
        y = x.copy()
        for at in np.ndindex(*x.shape):
            distance = at[-1] - at[-2]
            if distance < (k or 0) if upper else distance > (k or 0):
                y[at] = "" if x.dtype == object else 0
        check("Trilu", [x] if k is None else [x, np.array(k)], [y], opset=14, **({} if upper else {"upper": 0}))


def test_trilu_of_a_vector(fails: Any) -> None:
    fails("Trilu", [np.ones(3, F)], "takes matrices", opset=14)


@pytest.mark.parametrize("opset", [9, 11, 28])
@pytest.mark.parametrize("axis", [-1, 0, 1, 2, -3])
def test_one_hot(check: Any, opset: int, axis: int) -> None:
    for dtype in (np.int64, np.int8, np.float32, np.uint8, np.uint64):
        signed = np.dtype(dtype).kind != "u"
        i = np.array([[0, 2, 3], [1, -1 if signed else 255, -4 if signed else 7]]).astype(dtype)
        y = np.full((2, 3, 3), 5.0)
        for at in np.ndindex(2, 3):
            c = int(i[at]) + (3 if i[at] < 0 and opset >= 11 else 0)  # before opset 11 a negative index is no class
            if 0 <= c < 3:
                y[(*at, c)] = 7
        check("OneHot", [i, np.array(3), np.array([5.0, 7])], [np.moveaxis(y, -1, axis)], opset=opset, axis=axis)


def test_one_hot_edges(check: Any, fails: Any) -> None:
    off_on = np.array([0, 1], F)
    check("OneHot", [np.array(1), np.array([2]), off_on], [np.array([0, 1], F)], opset=11)
    check("OneHot", [ints(0), np.array(2.7, F), np.array(["n", "y"], object)], [np.array([["y", "n"]], object)], opset=11)
    check("OneHot", [np.array([1.9, -0.9, np.nan], F), np.array(2), off_on], [np.array([[0, 1], [1, 0], [0, 0]], F)], opset=11)
    check("OneHot", [np.array([2**64 - 1, 1], np.uint64), np.array(2), off_on], [np.array([[0, 0], [0, 1]], F)], opset=11)
    check("OneHot", [np.array([200], np.uint8), np.array(300), off_on], [np.eye(300, dtype=F)[[200]]], opset=11)
    check("OneHot", [ints(0), np.array(0), off_on], [np.zeros((1, 0), F)], opset=11)
    bf16 = np.array([0, 1], ml_dtypes.bfloat16)
    check("OneHot", [ints(1), np.array(2), bf16], [bf16[None]], opset=28)
    fails("OneHot", [ints(0), np.array(-1), off_on], "depth must be at least 0, got -1", opset=11)
    fails("OneHot", [ints(0), np.array(2), np.zeros(3, F)], "off, on", opset=11)
    fails("OneHot", [ints(0), np.array(2), off_on], "axis must be in .* got 2", opset=11, axis=2)
