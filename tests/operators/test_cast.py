"""Cast, CastLike, BitCast: rounding, saturation, strings, and the versions without an official case."""

from __future__ import annotations

from typing import Any

import ml_dtypes as ml
import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

INF, NAN = np.inf, np.nan
E4, E4Z, E5, E5Z = ml.float8_e4m3fn, ml.float8_e4m3fnuz, ml.float8_e5m2, ml.float8_e5m2fnuz
CODES = {np.dtype(t): helper.np_dtype_to_tensor_dtype(np.dtype(t)) for t in (E4, E4Z, E5, E5Z)}


def strings(*values: str) -> np.ndarray:
    return np.array([*values, None], object)[:-1]


@pytest.mark.parametrize("name", ["FLOAT16", "DOUBLE", "INT8", "UINT64", "BOOL"])
def test_cast_1_names_the_type(check: Any, name: str) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(getattr(T, name))
    x = np.array([[0, 1.5, 100]], np.float32)
    check("Cast", [x], [np.array([[0, 1.5, 100]]).astype(dtype)], opset=1, to=name)


def test_cast_1_refuses_an_unknown_name(fails: Any) -> None:
    fails("Cast", [np.zeros(2, np.float32)], "FLAOT", opset=1, to="FLAOT")


@pytest.mark.parametrize("opset", [6, 9, 13, 19, 21, 23, 24, 25, 28])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 1)])
def test_cast_keeps_the_shape(check: Any, opset: int, shape: tuple[int, ...]) -> None:
    check("Cast", [np.full(shape, 200, np.int16)], [np.full(shape, -56, np.int8)], opset=opset, to=T.INT8)


def test_integers_lose_their_high_bits(check: Any) -> None:
    big = np.array([2**53 + 1, -(2**63), -1], np.int64)
    check("Cast", [big], [np.array([2**53 + 1, 2**63, 2**64 - 1], np.uint64)], opset=13, to=T.UINT64)
    check("Cast", [big], [np.array([1, 0, -1], np.int32)], opset=13, to=T.INT32)
    check("Cast", [np.array([200, -9, 300])], [np.array([-8, 7, -4], ml.int4)], opset=21, to=T.INT4)
    check("Cast", [np.array([200, -9, 7], np.int16)], [np.array([0, 3, 3], ml.uint2)], opset=25, to=T.UINT2)


def test_bool(check: Any) -> None:
    x = np.array([0, -0.0, NAN, INF, 0.25], np.float32)
    check("Cast", [x], [np.array([False, False, True, True, True])], opset=13, to=T.BOOL)
    check("Cast", [np.array([True, False])], [np.array([1, 0], E4)], opset=19, to=CODES[np.dtype(E4)])
    check("Cast", [np.array([0.0, 2], ml.bfloat16)], [np.array([False, True])], opset=13, to=T.BOOL)


def test_floats_are_cut_to_integers(check: Any) -> None:
    check("Cast", [np.array([1.9, -1.9, 2.5])], [np.array([1, -1, 2])], opset=13, to=T.INT64)
    check("Cast", [np.array([-1.9, 3.5], ml.bfloat16)], [np.array([-1, 3], np.int8)], opset=13, to=T.INT8)
    check("Cast", [np.array([1.5, 448], E4)], [np.array([1, 448])], opset=19, to=T.INT64)


def test_rounding_is_done_once(check: Any) -> None:
    """A little above a tie between two bfloat16 (float8): float32 would lose the little, and the tie would go down."""
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, -(1 + 2**-8 + 2**-40), 1 + 2**-8, 1e300, -0.0, 2.0**-150])
    y = np.array([1 + 2**-7, 1, -(1 + 2**-7), 1, INF, -0.0, 0], ml.bfloat16)
    check("Cast", [x], [y], opset=13, to=T.BFLOAT16)
    check("Cast", [np.array([1 + 2**-4 + 2**-40, 1 + 2**-4])], [np.array([1.125, 1], E4)], opset=19, to=T.FLOAT8E4M3FN)
    check("Cast", [np.array([1 + 2**-11 + 2**-40])], [np.array([1 + 2**-10], np.float16)], opset=13, to=T.FLOAT16)
    x = np.array([2**31 + 2**23 + 1, -(2**31 + 2**23 + 1), 2**62 + 2**54 + 1, 2**31 + 2**23])
    y = np.array([2**31 + 2**24, -(2**31 + 2**24), 2**62 + 2**55, 2**31], ml.bfloat16)
    check("Cast", [x], [y], opset=13, to=T.BFLOAT16)
    check("Cast", [np.array([2**63 + 2**55 + 1], np.uint64)], [np.array([2.0**63 + 2**56], ml.bfloat16)], opset=13, to=T.BFLOAT16)
    check("Cast", [np.array([65519, 65520])], [np.array([65504, INF], np.float16)], opset=13, to=T.FLOAT16)


@pytest.mark.parametrize("opset", [19, 21, 23, 24, 28])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml.bfloat16])
@pytest.mark.parametrize(("to", "top", "over"), [(E4, 448, NAN), (E4Z, 240, NAN), (E5, 57344, INF), (E5Z, 57344, NAN)])
def test_float8_tables(check: Any, to: Any, top: float, over: float, dtype: Any, opset: int) -> None:
    x = np.array([0, NAN, INF, -INF, 65000, -65000, 1.0625, 0.3], dtype)
    rest = [1, float(np.array(0.3, np.float32).astype(to))]
    check("Cast", [x], [np.array([0, NAN, top, -top, top, -top, *rest]).astype(to)], opset=opset, to=CODES[np.dtype(to)])
    y = np.array([0, NAN, over, -over, over, -over, *rest]).astype(to)
    check("Cast", [x], [y], opset=opset, to=CODES[np.dtype(to)], saturate=0)
    like = np.zeros(1, to)
    if opset < 28:
        check("CastLike", [x, like], [y], opset=opset, saturate=0)


def test_float8_zeros(check: Any) -> None:
    out = check("Cast", [np.array([-0.0], np.float32)], [np.array([-0.0], E5)], opset=19, to=T.FLOAT8E5M2)
    assert np.signbit(out[0].astype(np.float32)).all()
    out = check("Cast", [np.array([-0.0], np.float32)], [np.array([0.0], E5Z)], opset=19, to=T.FLOAT8E5M2FNUZ)
    assert not np.signbit(out[0].astype(np.float32)).any()
    check("Cast", [np.array([1000, -1000])], [np.array([448, -448], E4)], opset=19, to=T.FLOAT8E4M3FN)
    check("Cast", [np.array([INF], E5)], [np.array([57344], E5)], opset=19, to=T.FLOAT8E5M2)


def e8(*exponents: int | None) -> np.ndarray:
    """float8e8m0 by exponents; None is NaN."""
    return np.array([255 if e is None else e + 127 for e in exponents], np.uint8).view(ml.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_e8m0(check: Any, dtype: Any) -> None:
    x = np.array([0, 1, 1.1, 1.5, 1.4999, 1.75, 6, NAN, INF, 1.7e38 * 1.5, 2.0**-149], dtype)
    to = T.FLOAT8E8M0
    check("Cast", [x], [e8(-127, 0, 1, 1, 1, 1, 3, None, 127, 127, -127)], opset=24, to=to)
    check("Cast", [x], [e8(-127, 0, 0, 0, 0, 0, 2, None, 127, 127, -127)], opset=24, to=to, round_mode="down")
    check("Cast", [x], [e8(-127, 0, 0, 1, 0, 1, 3, None, 127, 127, -127)], opset=25, to=to, round_mode="nearest")
    check("Cast", [x], [e8(None, 0, 0, 1, 0, 1, 3, None, None, None, None)], opset=28, to=to, round_mode="nearest", saturate=0)
    check("CastLike", [x, e8(0)], [e8(None, 0, 1, 1, 1, 1, 3, None, None, None, None)], opset=24, saturate=0)
    check("Cast", [e8(-127, 3)], [np.array([2.0**-127, 8], np.float32)], opset=24, to=T.FLOAT)
    check("Cast", [np.array([2.0**-127 * 1.5, 2.0**-127])], [e8(-126, -127)], opset=24, to=to)


def test_e8m0_refuses_an_unknown_rounding(fails: Any) -> None:
    fails("Cast", [np.ones(1, np.float32)], "round_mode", opset=24, to=T.FLOAT8E8M0, round_mode="even")


def test_tiny_types(check: Any) -> None:
    x = np.array([0.24, 0.25, 0.75, 5, 7, -1e9, INF], np.float32)
    check("Cast", [x], [np.array([0, 0, 1, 4, 6, -6, 6], ml.float4_e2m1fn)], opset=24, to=T.FLOAT4E2M1)
    x = np.array([1.0625, 8, -0.06, 0.07])
    check("Cast", [x], [np.array([1, 7.5, 0, 0.125], ml.float6_e2m3fn)], opset=28, to=T.FLOAT6E2M3)
    check("Cast", [np.array([30, 1.125, -0.04])], [np.array([28, 1, -0.0625], ml.float6_e3m2fn)], opset=28, to=T.FLOAT6E3M2)
    check("Cast", [np.array([1.5, 7], ml.float6_e3m2fn)], [np.array([1.5, 7], np.float16)], opset=28, to=T.FLOAT16)
    check("Cast", [np.array([-8, 7], ml.int4)], [np.array([8, 7], ml.uint4)], opset=21, to=T.UINT4)
    check("Cast", [np.array([-2, 1], ml.int2)], [np.array([-2, 1])], opset=25, to=T.INT64)
    check("Cast", [np.array([NAN], np.float32)], [np.array([6], ml.float4_e2m1fn)], opset=23, to=T.FLOAT4E2M1)
    # Floats beyond int4 have no meaning in ONNX; its cases saturate until opset 23 and drop high bits from 24.
    x = np.array([-9, 9, 3], np.float32)
    check("Cast", [x], [np.array([-8, 7, 3], ml.int4)], opset=21, to=T.INT4)
    check("Cast", [x], [np.array([7, -7, 3], ml.int4)], opset=24, to=T.INT4)


def test_numbers_as_strings(check: Any) -> None:
    x = np.array([0.1, 1, -0.0, NAN, INF, -INF, 16777216, 1e-7], np.float32)
    y = strings("0.1", "1.0", "-0.0", "NaN", "INF", "-INF", "16777216.0", "0.0000001")
    check("Cast", [x], [y], opset=9, to=T.STRING)
    check("Cast", [np.array([0.1, 314.15926])], [strings("0.1", "314.15926")], opset=13, to=T.STRING)
    check("Cast", [np.array([0.1], np.float16)], [strings("0.1")], opset=13, to=T.STRING)
    check("Cast", [np.array([-(2**63), 2**53 + 1])], [strings("-9223372036854775808", "9007199254740993")], opset=13, to=T.STRING)
    check("Cast", [np.array([-8], ml.int4)], [strings("-8")], opset=21, to=T.STRING)
    check("Cast", [np.array([True, False])], [strings("1", "0")], opset=13, to=T.STRING)
    check("Cast", [np.array([1.5], E4)], [strings("1.5")], opset=19, to=T.STRING)
    check("Cast", [np.zeros((0, 2), np.float32)], [np.zeros((0, 2), object)], opset=9, to=T.STRING)
    check("Cast", [np.array("a", object)], [np.array("a", object)], opset=9, to=T.STRING)


def test_strings_as_numbers(check: Any) -> None:
    x = strings("3.14", "1000", "1e-5", "1E8", "+INF", "inf", "-Inf", "nAn", ".5", "5.", " 7 ")
    y = [3.14, 1000, 1e-5, 1e8, INF, INF, -INF, NAN, 0.5, 5, 7]
    check("Cast", [x], [np.array(y)], opset=9, to=T.DOUBLE)
    check("Cast", [x], [np.array(y, np.float32)], opset=13, to=T.FLOAT)
    check("Cast", [x[:3]], [np.array(y[:3], np.float64).astype(ml.bfloat16)], opset=13, to=T.BFLOAT16)
    check("Cast", [strings("-9223372036854775808", "9007199254740993", "100.5", "-2.7", "1e3")],
          [np.array([-(2**63), 2**53 + 1, 100, -2, 1000])], opset=13, to=T.INT64)  # fmt: skip
    check("Cast", [strings("18446744073709551615")], [np.array([2**64 - 1], np.uint64)], opset=13, to=T.UINT64)
    check("Cast", [strings("1", "0", "0.5")], [np.array([True, False, True])], opset=13, to=T.BOOL)
    check("Cast", [strings("500", "0.3")], [np.array([448, 0.3125], E4)], opset=19, to=T.FLOAT8E4M3FN)
    check("CastLike", [strings("-8"), np.zeros(1, ml.int4)], [np.array([-8], ml.int4)], opset=21)
    check("Cast", [np.zeros(0, object)], [np.zeros(0, np.int32)], opset=9, to=T.INT32)


@pytest.mark.parametrize(("text", "to"), [
    ("Hello", T.FLOAT), ("", T.FLOAT), ("1_0", T.INT64), ("0x10", T.INT64), ("NaN", T.INT64), ("300", T.UINT8), ("-1", T.UINT64),
    ("1e", T.DOUBLE),
])  # fmt: skip
def test_strings_that_are_no_numbers(fails: Any, text: str, to: int) -> None:
    fails("Cast", [strings(text)], "string", opset=13, to=to)


def test_cast_knows_no_complex_numbers(fails: Any) -> None:
    fails("Cast", [np.zeros(1, np.float32)], "complex", opset=13, to=T.COMPLEX64)


def test_cast_like(check: Any) -> None:
    for opset in (15, 19, 21, 23, 24, 25):
        check("CastLike", [np.array([1.5, -3]), np.zeros((0,), np.int8)], [np.array([1, -3], np.int8)], opset=opset)
    check("CastLike", [np.array([1.5]), np.array(["x"], object)], [strings("1.5")], opset=15)


@pytest.mark.parametrize(("x", "y"), [
    (np.array(1.0, np.float32), np.array(0x3F800000, np.int32)),
    (np.array([1.0, -2.0]), np.array([0x3FF0000000000000, 0xC000000000000000], np.uint64)),
    (np.array([1 + 2j], np.complex64), np.array([1 + 2j], np.complex64).view(np.int64)),
    (np.array([[1.0]], ml.bfloat16), np.array([[0x3F80]], np.uint16)),
    (np.array([1.5], np.float16), np.array([0x3E00], np.int16)),
    (np.array([True, False]), np.array([1, 0], np.int8)),
    (np.array([1, 0], np.uint8), np.array([True, False])),
    (np.array([-1, -8, 7], ml.int4), np.array([15, 8, 7], ml.uint4)),
    (np.array([15, 8, 7], ml.uint4), np.array([-1, -8, 7], ml.int4)),
    (np.array([1.5, -6], ml.float4_e2m1fn), np.array([3, 15], ml.uint4)),
    (np.array([3, -1], ml.int4), np.array([1.5, -6], ml.float4_e2m1fn)),
    (np.array([-2, -1, 1], ml.int2), np.array([2, 3, 1], ml.uint2)),
    (np.array([1.0], ml.float8_e8m0fnu), np.array([127], np.uint8)),
    (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.uint32)),
])  # fmt: skip
def test_bit_cast(check: Any, x: np.ndarray, y: np.ndarray) -> None:
    check("BitCast", [x], [y], opset=26, to=helper.np_dtype_to_tensor_dtype(y.dtype))


def test_bit_cast_refuses(fails: Any) -> None:
    fails("BitCast", [np.zeros(2, np.float32)], "32 bits.*64 bits", opset=26, to=T.INT64)
    fails("BitCast", [np.zeros(2, ml.int4)], "4 bits.*8 bits", opset=26, to=T.INT8)
    fails("BitCast", [np.array(["a"], object)], "strings", opset=26, to=T.INT64)
