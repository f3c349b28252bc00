"""QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear against loops over elements."""

from __future__ import annotations

from typing import Any

import ml_dtypes as ml
import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

INF, NAN = np.inf, np.nan
RANGES = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767), "uint4": (0, 15),
          "int4": (-8, 7), "uint2": (0, 3), "int2": (-2, 1)}  # fmt: skip
F = np.float32


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(np, name, None) or getattr(ml, name))


def quantized(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, dtype: Any) -> np.ndarray:
    """Element by element; scale and zero have x's shape."""
    y = np.empty(x.shape, np.int64)
    low, high = RANGES[np.dtype(dtype).name]
    for i in np.ndindex(x.shape):
        y[i] = min(max(int(np.rint(x[i] / scale[i])) + int(zero[i]), low), high)
    return y.astype(dtype)


@pytest.mark.parametrize(("opset", "name"), [
    (10, "uint8"), (10, "int8"), (13, "uint8"), (19, "int8"), *[(o, n) for o in (21, 23, 24) for n in list(RANGES)[:6]],
    *[(o, n) for o in (25, 28) for n in RANGES],
])  # fmt: skip
def test_per_tensor(check: Any, opset: int, name: str) -> None:
    dtype = dtype_of(name)
    x = np.array([0, 1, -1, 1.25, 1.5, 3.5, -2.5, 1e9, -1e9, INF, -INF], F)
    zero = np.array(1, dtype)
    full = np.full(x.shape, 0.5, F)
    y = quantized(np.clip(x, -1e6, 1e6), full, np.full(x.shape, 1), dtype)
    check("QuantizeLinear", [x, F(0.5), zero], [y], opset=opset)
    back = ((y.astype(F) - 1) * 0.5).astype(F)
    check("DequantizeLinear", [y, np.array(0.5, F), zero], [back], opset=opset)


@pytest.mark.parametrize("axis", [-3, -1, 0, 1, 2])
@pytest.mark.parametrize("opset", [13, 19, 21, 23, 24, 25, 28])
def test_per_axis(check: Any, opset: int, axis: int) -> None:
    x = np.linspace(-300, 300, 24).reshape(2, 3, 4).astype(F)
    n = x.shape[axis]
    scale, zero = np.array([0.5, 1, 2, 4][:n], F), np.array([0, 3, 128, 255][:n], np.uint8)
    spread = [n if i == axis % 3 else 1 for i in range(3)]
    wide = [np.broadcast_to(v.reshape(spread), x.shape) for v in (scale, zero)]
    y = quantized(x, wide[0], wide[1], np.uint8)
    check("QuantizeLinear", [x, scale, zero], [y], opset=opset, axis=axis)
    check("DequantizeLinear", [y, scale, zero], [(y.astype(F) - wide[1]) * wide[0]], opset=opset, axis=axis)


@pytest.mark.parametrize(("axis", "block"), [(0, 2), (1, 2), (-1, 3), (2, 5), (1, 1), (1, 7)])
@pytest.mark.parametrize("opset", [21, 23, 25, 28])
def test_blocked(check: Any, opset: int, axis: int, block: int) -> None:
    x = np.linspace(-20, 20, 60).reshape(3, 5, 4).astype(F)
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // block)
    scale = (1 + np.arange(np.prod(shape)).reshape(shape) % 3).astype(F)
    zero = (np.arange(np.prod(shape)).reshape(shape) % 5 - 2).astype(np.int8)
    at = [np.arange(n) for n in x.shape]
    at[axis] = at[axis] // block
    wide = [v[np.ix_(*at)] for v in (scale, zero)]
    y = quantized(x, wide[0], wide[1], np.int8)
    check("QuantizeLinear", [x, scale, zero], [y], opset=opset, axis=axis, block_size=block)
    check("DequantizeLinear", [y, scale, zero], [(y.astype(F) - wide[1]) * wide[0]], opset=opset, axis=axis, block_size=block)


def test_shapes(check: Any) -> None:
    one = np.array([2], F)
    check("QuantizeLinear", [np.array(5, F), one], [np.array(2, np.uint8)], opset=13)
    check("QuantizeLinear", [np.zeros((0, 3), F), np.ones(3, F)], [np.zeros((0, 3), np.uint8)], opset=21)
    check("QuantizeLinear", [np.array([2, 4, 9], F), np.array([1, 2, 3], F)], [np.array([2, 2, 3], np.uint8)], opset=21)
    x = np.array([2, 4, 9], F)
    check("QuantizeLinear", [x, np.array([1, 3], F)], [np.array([2, 4, 3], np.uint8)], opset=21, block_size=2)
    check("DequantizeLinear", [np.array(5, np.int8), one, np.array([1], np.int8)], [np.array(8, F)], opset=13)


def test_output_dtype(check: Any, fails: Any) -> None:
    x = np.array([1.5, 2.5, -300], F)
    check("QuantizeLinear", [x, F(1)], [np.array([2, 2, 0], np.uint8)], opset=21)
    check("QuantizeLinear", [x, F(1)], [np.array([2, 2, -300], np.int16)], opset=21, output_dtype=T.INT16)
    check("QuantizeLinear", [x, F(1), np.array(0, ml.int4)], [np.array([2, 2, -8], ml.int4)], opset=23, output_dtype=T.INT4)
    fails("QuantizeLinear", [x, F(1), np.array(0, np.int8)], "output_dtype", opset=21, output_dtype=T.INT16)
    fails("QuantizeLinear", [x, F(1)], "must have a quantized type", opset=21, output_dtype=T.INT64)
    half = [np.array([3], np.int8), F(0.1)]
    check("DequantizeLinear", half, [np.array([0.3], np.float16)], opset=23, output_dtype=T.FLOAT16)
    check("DequantizeLinear", [np.array([3], np.int8), np.array(0.5, ml.bfloat16)], [np.array([1.5], ml.bfloat16)], opset=19)


def test_precision_of_the_division(check: Any) -> None:
    """3.4999 / 1 is 3.5 as a float16 and rounds to 4; x is cast first, and scale names the type unless precision does."""
    x, one = np.array([3.4999, -2.4995], F), np.array(1, np.float16)
    check("QuantizeLinear", [x, one], [np.array([4, 0], np.uint8)], opset=23)
    check("QuantizeLinear", [x, one], [np.array([3, 0], np.uint8)], opset=23, precision=T.FLOAT)
    check("QuantizeLinear", [x, F(1)], [np.array([4, 0], np.uint8)], opset=23, precision=T.FLOAT16)
    check("QuantizeLinear", [x.astype(np.float16), one], [np.array([4, 0], np.uint8)], opset=19)
    ints = np.array([5, 7, 2**31 - 1, -9], np.int32)
    check("QuantizeLinear", [ints, F(2)], [np.array([2, 4, 255, 0], np.uint8)], opset=10)
    check("QuantizeLinear", [ints, np.int32(2)], [np.array([2, 4, 255, 0], np.uint8)], opset=19)
    x = np.array([2**24 + 1, 2**24 + 513], np.int32)
    check("QuantizeLinear", [x, np.int32(2**10)], [np.array([16384, 16385], np.uint16)], opset=23, output_dtype=T.UINT16)


@pytest.mark.parametrize(("dtype", "top", "over"), [
    (ml.float8_e4m3fn, 448, NAN), (ml.float8_e4m3fnuz, 240, NAN), (ml.float8_e5m2, 57344, INF), (ml.float8_e5m2fnuz, 57344, NAN),
])  # fmt: skip
@pytest.mark.parametrize("opset", [19, 21, 23, 24, 28])
def test_to_float8(check: Any, opset: int, dtype: Any, top: float, over: float) -> None:
    x, zero = np.array([1, -3.25, 1e6, -1e6, NAN], F), np.array(0, dtype)
    inside = np.array([0.5, -1.625], F).astype(dtype).astype(F).tolist()
    check("QuantizeLinear", [x, F(2), zero], [np.array([*inside, top, -top, NAN], F).astype(dtype)], opset=opset)
    check("QuantizeLinear", [x, F(2), zero], [np.array([*inside, over, -over, NAN], F).astype(dtype)], opset=opset, saturate=0)
    check("DequantizeLinear", [np.array([1, -2], dtype), F(3), zero], [np.array([3, -6], F)], opset=opset)


def test_tiny_floats(check: Any) -> None:
    x = np.array([1, -3, 100, 0.2], F)
    for opset in (23, 24, 25, 28):
        code = T.FLOAT4E2M1
        check("QuantizeLinear", [x, F(2)], [np.array([0.5, -1.5, 6, 0], ml.float4_e2m1fn)], opset=opset, output_dtype=code)
        check("DequantizeLinear", [np.array([1.5, -6], ml.float4_e2m1fn), F(2)], [np.array([3, -12], F)], opset=opset)
    for dtype, top in ((ml.float6_e2m3fn, 7.5), (ml.float6_e3m2fn, 28)):
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        check("QuantizeLinear", [x, F(2)], [np.array([0.5, -1.5, top, 0.125], dtype)], opset=28, output_dtype=code)
        check("DequantizeLinear", [np.array([1.5, -3], dtype), F(2), np.array(1, dtype)], [np.array([1, -8], F)], opset=28)


def test_e8m0_scales(check: Any, fails: Any) -> None:
    scale = np.array([0.5, 4], ml.float8_e8m0fnu)
    check("QuantizeLinear", [np.array([[1, 8]], F), scale], [np.array([[2, 2]], np.uint8)], opset=24)
    check("DequantizeLinear", [np.array([[3, -1]], np.int8), scale], [np.array([[1.5, -4]], F)], opset=24, output_dtype=T.FLOAT)
    fails("DequantizeLinear", [np.array([[3, -1]], np.int8), scale], "the output must be float, float16 or bfloat16", opset=24)


def test_int32_is_subtracted_exactly(check: Any) -> None:
    x, zero = np.array([2**31 - 1, -(2**31)], np.int32), np.array(2**31 - 8, np.int32)
    check("DequantizeLinear", [x, F(1), zero], [np.array([7, -(2.0**32)], F)], opset=10)
    check("DequantizeLinear", [np.array([65535], np.uint16), np.array(1, F)], [np.array([65535], F)], opset=21)


@pytest.mark.parametrize(("inputs", "match", "attributes"), [
    ([np.zeros((2, 3), F), np.ones(2, F)], "must have one value for each entry of axis 1", {}),
    ([np.zeros((2, 3), F), np.ones(3, F), np.zeros(2, np.uint8)], "scale and zero point must have equal shapes", {}),
    ([np.zeros((2, 3), F), np.ones(3, F)], "axis must be in .* got 2", {"axis": 2}),
    ([np.zeros((2, 3), F), np.ones((2, 3), F)], "without block_size", {}),
    ([np.zeros((2, 3), F), np.ones((2, 1), F)], "in blocks of 2", {"block_size": 2}),
    ([np.zeros((2, 3), F), np.ones((2, 2), F)], "block_size must be at least 0", {"block_size": -2}),
])  # fmt: skip
def test_what_does_not_fit(fails: Any, inputs: list[Any], match: str, attributes: dict[str, Any]) -> None:
    fails("QuantizeLinear", inputs, match, opset=21, **attributes)


def test_before_13_scales_are_scalar(fails: Any) -> None:
    fails("QuantizeLinear", [np.zeros((2, 3), F), np.ones(3, F)], "scalar", opset=10)
    fails("DequantizeLinear", [np.zeros((2, 3), np.int8), np.ones(3, F)], "scalar", opset=10)


@pytest.mark.parametrize("x", [np.array(v) for v in ([-1, 0, 2.5], [[3.0]], -4.0, [1, 5, 9.5], [-7.0, -1])])
def test_dynamic(check: Any, x: np.ndarray) -> None:
    low, high = F(min(x.min(), 0)), F(max(x.max(), 0))
    scale = (high - low) / F(255)
    zero = np.uint8(np.rint(-low / scale))
    full = [np.full(x.shape, v) for v in (scale, zero)]
    y = quantized(x.astype(F), full[0], full[1], np.uint8)
    check("DynamicQuantizeLinear", [x.astype(F)], [y, np.asarray(scale), np.asarray(zero)], opset=11)


def test_dynamic_edges(check: Any, fails: Any) -> None:
    zeros = [np.zeros(3, np.uint8), np.array(0, F), np.array(0, np.uint8)]
    check("DynamicQuantizeLinear", [np.zeros(3, F)], zeros, opset=11)
    fails("DynamicQuantizeLinear", [np.zeros((0,), F)], "empty", opset=11, outputs=3)
