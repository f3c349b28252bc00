"""Arithmetic: every version, legacy broadcasting, exact integers, and what division and powers do at their edges."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import floor, trunc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

Check = Callable[..., Any]

FOUR: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("Add", lambda a, b: a + b),
    ("Sub", lambda a, b: a - b),
    ("Mul", lambda a, b: a * b),
    ("Div", lambda a, b: a / b),
]
A = np.arange(1, 121, dtype=np.float32).reshape(2, 3, 4, 5)
LEGACY: list[tuple[tuple[int, ...], int | None, tuple[int, ...]]] = [
    ((), None, ()),
    ((1, 1), None, ()),
    ((5,), None, (5,)),
    ((4, 5), None, (4, 5)),
    ((3, 4), 1, (3, 4, 1)),
    ((2,), 0, (2, 1, 1, 1)),
    ((4,), -2, (4, 1)),
    ((5,), -1, (5,)),
    ((3, 1), 1, (3, 1, 1)),
]


@pytest.mark.parametrize(("op", "f"), FOUR)
@pytest.mark.parametrize("opset", [1, 6])
@pytest.mark.parametrize(("shape", "axis", "shaped"), LEGACY)
def test_legacy_broadcast(check: Check, op: str, f: Any, opset: int, shape: Any, axis: int | None, shaped: Any) -> None:
    b = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    more = {} if axis is None else {"axis": axis}
    check(op, [A, b], [f(A, b.reshape(shaped))], opset=opset, broadcast=1, **more)


@pytest.mark.parametrize(("op", "f"), FOUR)
def test_plain(check: Check, op: str, f: Any) -> None:
    a, b = np.array([[6.0, -0.5]]), np.array([[2.0, 4.0]])
    check(op, [a, b], [f(a, b)], opset=1, consumed_inputs=[0, 0])
    for opset in (6, 7, 13, 14):
        check(op, [a, b], [f(a, b)], opset=opset)
    check(op, [a, b.T], [f(a, b.T)], opset=7)
    check(op, [np.ones((0, 3), np.float32), np.ones((1,), np.float32)], [np.ones((0, 3), np.float32)], opset=14)
    check(op, [np.float32(6), np.float32(3)], [np.float32(f(6.0, 3.0))], opset=14)
    for narrow in (np.float16, ml_dtypes.bfloat16):
        check(op, [np.array([1, 3], narrow), np.array([8, 8], narrow)], [f(np.array([1, 3.0]), 8.0).astype(narrow)], opset=14)


def test_legacy_refuses(fails: Check) -> None:
    fails("Add", [A, A[0]], "shapes must be equal or broadcast=1", opset=6)
    fails("Add", [A, A[0, 0, 0, :1].copy()], "shapes must be equal or broadcast=1", opset=6)
    fails("Add", [A, A[..., :3]], "does not broadcast", opset=6, broadcast=1)
    fails("Add", [A, A[0, :, 0, 0]], "does not broadcast", opset=6, broadcast=1, axis=3)
    fails("Add", [A[0], A], "does not broadcast", opset=6, broadcast=1)
    fails("Add", [A, A[..., :3]], "broadcast", opset=14)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_integers_wrap_and_stay_exact(check: Check, dtype: Any) -> None:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    values = np.array([low, low + 1, high, high - 1, high // 3, 7, 1], dtype)
    for op, f in [("Add", lambda a, b: a + b), ("Sub", lambda a, b: a - b), ("Mul", lambda a, b: a * b)]:
        expected = [[_wrap(f(int(a), int(b)), dtype) for b in values] for a in values]
        check(op, [values[:, None], values], [np.array(expected, dtype)], opset=14)


def _wrap(value: int, dtype: Any) -> int:
    info = np.iinfo(dtype)
    return (value - int(info.min)) % 2**info.bits + int(info.min)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_integer_division(check: Check, dtype: Any) -> None:
    """Div truncates, Mod floors, fmod truncates; the minimum over -1 wraps."""
    info = np.iinfo(dtype)
    edges = {int(info.min), int(info.min) + 1, int(info.max), int(info.max) - 2}
    values = sorted(edges | {v for v in (-7, -3, -2, -1, 1, 2, 3, 7) if v >= info.min})
    a, b = np.array(values, dtype)[:, None], np.array([v for v in values if v], dtype)
    div = [[_wrap(trunc(Fraction(int(x), int(y))), dtype) for y in b] for x in a[:, 0]]
    mod = [[int(x) - floor(Fraction(int(x), int(y))) * int(y) for y in b] for x in a[:, 0]]
    fmod = [[int(x) - trunc(Fraction(int(x), int(y))) * int(y) for y in b] for x in a[:, 0]]
    check("Div", [a, b], [np.array(div, dtype)], opset=14)
    if info.bits >= 32:
        check("Div", [a, b], [np.array(div, dtype)], opset=7)
        check("Div", [a[:, :1], np.array(2, dtype)], [np.array(div, dtype)[:, b == 2]], opset=6, broadcast=1)
    for opset in (10, 13, 28):
        check("Mod", [a, b], [np.array(mod, dtype)], opset=opset)
        check("Mod", [a, b], [np.array(fmod, dtype)], opset=opset, fmod=1)


def test_division_by_zero(check: Check, fails: Check) -> None:
    zero = np.zeros(3, np.int64)
    for op in ("Div", "Mod"):
        fails(op, [np.ones(3, np.int64), zero], "SX403", opset=14)
        fails(op, [np.uint8(1), np.uint8(0)], "SX403", opset=14)
        check(op, [np.ones((0, 3), np.int64), zero], [np.ones((0, 3), np.int64)], opset=14)  # nothing is divided
    x = np.array([1, -1, 0, np.nan], np.float32)
    check("Div", [x, np.float32(0)], [np.array([np.inf, -np.inf, np.nan, np.nan], np.float32)], opset=14)


def test_float_mod(check: Check, fails: Check) -> None:
    inf, nan = np.inf, np.nan
    #            x, y, mod, fmod
    rows = [
        (5.5, 2, 1.5, 1.5), (-5.5, 2, 0.5, -1.5), (5.5, -2, -0.5, 1.5), (-5.5, -2, -1.5, -1.5),
        (0.0, -2, -0.0, 0.0), (-0.0, 2, 0.0, -0.0), (4, -2, -0.0, 0.0),
        (inf, 2, nan, nan), (-inf, inf, nan, nan), (1, 0, nan, nan), (0, 0, nan, nan), (nan, 1, nan, nan), (1, nan, nan, nan),
        (1, inf, 1, 1), (-1, inf, inf, -1), (1, -inf, -inf, 1), (-1, -inf, -1, -1),
    ]  # fmt: skip
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        x, y, mod, fmod = (np.array(column).astype(dtype) for column in zip(*rows, strict=True))
        (got,) = check("Mod", [x, y], [mod], opset=28)
        known = ~np.isnan(mod.astype(np.float32))
        assert (np.signbit(got.astype(np.float32)) == np.signbit(mod.astype(np.float32)))[known].all()
        for opset in (10, 13, 28) if dtype is not ml_dtypes.bfloat16 else (13, 28):
            check("Mod", [x, y], [fmod], opset=opset, fmod=1)
    fails("Mod", [np.float32(1), np.float32(1)], "fmod must be 0 or 1, got 2", opset=28, fmod=2)


def test_pow_floats(check: Check) -> None:
    x, y = np.array([2, 9, 0.25, 0, -8], np.float32), np.array([3, 0.5, -1, 0, 1 / 3], np.float32)
    z = np.array([8, 3, 4, 1, np.nan], np.float32)
    for opset in (1, 7, 12, 13, 15):
        check("Pow", [x, y], [z], opset=opset)
    check("Pow", [A, np.array([1, 2], np.float32)], [A ** np.array([1, 2]).reshape(2, 1, 1, 1).astype(np.float32)],
          opset=1, broadcast=1, axis=0, rtol=1e-5)  # fmt: skip
    x, y, z = np.array([3, 5], ml_dtypes.bfloat16), np.array([2, 1], np.int32), np.array([9, 5], ml_dtypes.bfloat16)
    check("Pow", [x, y], [z], opset=15)
    check("Pow", [np.float16(3), np.float64(2)], [np.float16(9)], opset=12)
    check("Pow", [np.array([2, 2]), np.array([0.5, 3], np.float32)], [np.array([1, 8])], opset=15)


def test_pow_of_a_float_to_an_integer_knows_odd_from_even(check: Check) -> None:
    odd = 2**53 + 1
    for dtype in (np.float32, np.float64):
        x = np.array([-1, -1, -0.0, -0.0, -np.inf, -2, np.nan], dtype)
        y = np.array([odd, odd - 1, -1, 1, 3, -3, 0])
        (z,) = check("Pow", [x, y], [np.array([-1, 1, -np.inf, -0.0, -np.inf, -0.125, 1], dtype)], opset=13)
        assert np.signbit(z[3])
    check("Pow", [np.float64(3), np.uint64(2)], [np.float64(9)], opset=13)


@pytest.mark.parametrize("exponent", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("base", [np.int32, np.int64])
def test_pow_integers(check: Check, base: Any, exponent: Any) -> None:
    x = np.array([0, 1, -1, 3, -7, 10, np.iinfo(base).min, np.iinfo(base).max], base)[:, None]
    y = np.array([0, 1, 2, 3, 38, 39, 127], exponent)
    z = np.array([[_wrap(int(a) ** int(b), base) for b in y] for a in x[:, 0]], base)
    check("Pow", [x, y], [z], opset=12)


def test_pow_integers_at_the_edges(check: Check, fails: Check) -> None:
    big = 2**53 + 1
    check("Pow", [np.int64(big), np.int64(1)], [np.int64(big)], opset=15)
    check("Pow", [np.int64(3), np.uint64(2**64 - 1)], [np.int64(_wrap(pow(3, 2**64 - 1, 2**64), np.int64))], opset=15)
    x, y = np.array([1, -1, -1, 2, -5], np.int32), np.array([-3, -3, -4, -1, -2], np.int64)
    check("Pow", [x, y], [np.array([1, -1, 1, 0, 0], np.int32)], opset=13)
    fails("Pow", [np.int32(0), np.int32(-1)], "SX403", opset=13)


def test_of_one_input(check: Check) -> None:
    x = np.array([-2.5, 0, 3, -np.inf], np.float32)
    for opset in (1, 6, 13):
        check("Neg", [x], [np.array([2.5, -0.0, -3, np.inf], np.float32)], opset=opset)
        check("Abs", [x], [np.array([2.5, 0, 3, np.inf], np.float32)], opset=opset)
    check("Abs", [x], [abs(x)], opset=1, consumed_inputs=[0])
    for opset in (9, 13):
        check("Sign", [np.append(x, np.float32(np.nan))], [np.array([-1, 0, 1, -1, np.nan], np.float32)], opset=opset)
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        x = np.array([low, high, -1, 0], dtype)
        check("Neg", [x], [np.array([low, low + 1, 1, 0], dtype)], opset=6)
        check("Abs", [x], [np.array([low, high, 1, 0], dtype)], opset=6)
        check("Sign", [x], [np.array([-1, 1, -1, 0], dtype)], opset=9)
    check("Sign", [np.array([0, 200], np.uint8)], [np.array([0, 1], np.uint8)], opset=13)
    check("Abs", [np.uint64(2**64 - 1)], [np.uint64(2**64 - 1)], opset=13)


VARIADIC: list[tuple[str, list[float]]] = [("Sum", [9, 3]), ("Mean", [3, 1]), ("Max", [6, 2]), ("Min", [1, 0])]


@pytest.mark.parametrize(("op", "expected"), VARIADIC)
def test_variadic(check: Check, fails: Check, op: str, expected: list[float]) -> None:
    xs = [np.array(v, np.float32) for v in ([1, 0], [2, 1], [6, 2])]
    want = np.array(expected, np.float32)
    check(op, xs, [want], opset=1, consumed_inputs=[0, 0, 0])
    for opset in (6, 8, 12, 13):
        check(op, xs, [want], opset=opset)
        check(op, xs[:1], xs[:1], opset=opset)
    fails(op, [xs[0], xs[0][:1]], "must be equal", opset=1)
    fails(op, [xs[0], xs[0][:1]], "must be equal", opset=6)
    check(op, [xs[0][:, None], xs[0][:0]], [np.ones((2, 0), np.float32)], opset=8)
    check(op, [x.astype(ml_dtypes.bfloat16) for x in xs], [want.astype(ml_dtypes.bfloat16)], opset=13)


def test_sum_and_mean_round_once(check: Check) -> None:
    small = [np.array([2048, 1], np.float16), np.array([1, 1], np.float16), np.array([1, 1], np.float16)]
    check("Sum", small, [np.array([2050, 3], np.float16)], opset=13, rtol=0)
    check("Mean", [np.array([60000], np.float16)] * 3, [np.array([60000], np.float16)], opset=13)


def test_max_min(check: Check) -> None:
    a, b = np.array([1, np.nan, 2], np.float64), np.array([np.nan, 1, 1], np.float64)
    for opset in (8, 12, 13):
        check("Max", [a, b], [np.array([np.nan, np.nan, 2])], opset=opset)
        check("Min", [a, b], [np.array([np.nan, np.nan, 1])], opset=opset)
    big = np.array([2**53, 2**53 + 1])
    check("Max", [big, big[::-1].copy()], [np.array([2**53 + 1] * 2)], opset=12)
    check("Min", [np.array([200, 3], np.uint8), np.uint8(100)], [np.array([100, 3], np.uint8)], opset=12)


def test_clip(check: Check, fails: Check) -> None:
    x = np.array([-np.inf, -2, -0.5, 3, np.nan, np.inf], np.float32)
    low, high = np.float32(-1), np.float32(2)
    both = np.array([-1, -1, -0.5, 2, np.nan, 2], np.float32)
    largest = np.finfo(np.float32).max
    check("Clip", [x], [both], opset=1, min=-1.0, max=2.0, consumed_inputs=[0])
    check("Clip", [x], [np.minimum(x, 2)], opset=1, max=2.0)
    check("Clip", [x], [x], opset=1)
    check("Clip", [x], [both], opset=6, min=-1.0, max=2.0)
    check("Clip", [x], [np.array([-largest, -2, -0.5, 3, np.nan, largest], np.float32)], opset=6)
    for opset in (11, 12, 13):
        check("Clip", [x, low, high], [both], opset=opset)
        check("Clip", [x, low], [np.maximum(x, low)], opset=opset)
        check("Clip", [x, None, high], [np.minimum(x, high)], opset=opset)
        check("Clip", [x], [x], opset=opset)
        check("Clip", [x[3], low[None], high[None]], [np.float32(2)], opset=opset)
    check("Clip", [x[1:4], high, low], [np.full(3, -1, np.float32)], opset=13)
    check("Clip", [np.array([2**53 + 1, -9]), np.int64(0), np.int64(2**60)], [np.array([2**53 + 1, 0])], opset=12)
    check("Clip", [np.array([7, 250], np.uint8), None, np.uint8(249)], [np.array([7, 249], np.uint8)], opset=12)
    check("Clip", [x[:0], low, high], [x[:0]], opset=13)
    fails("Clip", [x, np.zeros(2, np.float32)], "must be a scalar", opset=13)
