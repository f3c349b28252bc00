"""Functions of one number, in every version, against the standard library's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from singa_backend import SingaBackend
from singa_backend.devices import namespaces, strict

Check = Callable[..., Any]
INF, NAN = math.inf, math.nan

FUNCTIONS: list[tuple[str, tuple[int, ...], Callable[[float], float], list[float]]] = [
    ("Ceil", (1, 6, 13), math.ceil, [-1.5, -0.5, 0, 0.2, 7, 2.0**30]),
    ("Floor", (1, 6, 13), math.floor, [-1.5, -0.5, 0, 0.2, 7, 2.0**30]),
    ("Round", (11, 22), round, [-4.5, -2.5, -0.5, 0.5, 0.9, 1.5, 2.3, 2.5]),
    ("Sqrt", (1, 6, 13), math.sqrt, [0, 1e-8, 2, 9]),
    ("Exp", (1, 6, 13), math.exp, [-20, -1, 0, 1, 10]),
    ("Log", (1, 6, 13), math.log, [1e-3, 0.5, 1, 10]),
    ("Reciprocal", (1, 6, 13), lambda x: 1 / x, [-4, 0.5, 3]),
    ("Sin", (7, 22), math.sin, [-3, 0, 1, 10]),
    ("Cos", (7, 22), math.cos, [-3, 0, 1, 10]),
    ("Tan", (7, 22), math.tan, [-1.5, 0, 1, 3]),
    ("Asin", (7, 22), math.asin, [-1, -0.5, 0, 1]),
    ("Acos", (7, 22), math.acos, [-1, -0.5, 0, 1]),
    ("Atan", (7, 22), math.atan, [-100, -0.5, 0, 1]),
    ("Sinh", (9, 22), math.sinh, [-5, 0, 1e-4, 3]),
    ("Cosh", (9, 22), math.cosh, [-5, 0, 1e-4, 3]),
    ("Tanh", (1, 6, 13), math.tanh, [-20, -1, 1e-4, 3]),
    ("Asinh", (9, 22), math.asinh, [-100, 0, 1e-4, 3]),
    ("Acosh", (9, 22), math.acosh, [1, 1.5, 100]),
    ("Atanh", (9, 22), math.atanh, [-0.9, 0, 1e-4, 0.5]),
    ("Erf", (9, 13), math.erf, [-7, -2, -1e-3, 0, 0.3, 1, 3.9, 5]),
]


@pytest.mark.parametrize(("op", "opsets", "f", "points"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_function(check: Check, op: str, opsets: tuple[int, ...], f: Callable[[float], float], points: list[float]) -> None:
    for opset in opsets:
        narrow = [np.float16, np.float32, np.float64] + ([ml_dtypes.bfloat16] if opset == opsets[-1] else [])
        for dtype in narrow:
            x = np.array([p for p in points if abs(p) < 6e4], dtype)
            y = np.array([f(float(v)) for v in x]).astype(dtype)
            rtol = 1e-14 if dtype is np.float64 else 1e-6
            check(op, [x], [y], opset=opset, rtol=rtol, atol=1e-15 if dtype is np.float64 else 1e-7)
    x = np.array(points[0], np.float32)
    check(op, [x], [np.float32(f(float(x)))], opset=opsets[-1])
    check(op, [np.zeros((2, 0, 3))], [np.zeros((2, 0, 3))], opset=opsets[0])
    check(op, [np.array([NAN])], [np.array([NAN])], opset=opsets[0])


def test_legacy_hint(check: Check) -> None:
    for op in ("Ceil", "Exp", "Floor", "Log", "Reciprocal", "Sqrt", "Tanh"):
        check(op, [np.ones(2, np.float32)], [np.full(2, {"Exp": math.e, "Log": 0, "Tanh": math.tanh(1)}.get(op, 1), np.float32)],
              opset=1, consumed_inputs=[1])  # fmt: skip


@pytest.mark.parametrize(("op", "opset", "x", "y"), [
    ("Ceil", 13, [-0.5, -0.0, INF, -INF], [-0.0, -0.0, INF, -INF]),
    ("Floor", 13, [-0.0, INF, -INF], [-0.0, INF, -INF]),
    ("Round", 22, [-0.4, -0.0, INF, -INF], [-0.0, -0.0, INF, -INF]),
    ("Sqrt", 13, [-0.0, -1, INF], [-0.0, NAN, INF]),
    ("Exp", 13, [-INF, INF, 1000], [0, INF, INF]),
    ("Log", 13, [0, -0.0, -1, INF], [-INF, -INF, NAN, INF]),
    ("Reciprocal", 13, [0, -0.0, INF, -INF], [INF, -INF, 0, -0.0]),
    ("Sin", 22, [-0.0, INF], [-0.0, NAN]),
    ("Asin", 22, [-0.0, 2], [-0.0, NAN]),
    ("Acos", 22, [-1.5], [NAN]),
    ("Tanh", 13, [-0.0, INF, -INF], [-0.0, 1, -1]),
    ("Acosh", 22, [0.5, INF], [NAN, INF]),
    ("Atanh", 22, [-1, 1, 2, -0.0], [-INF, INF, NAN, -0.0]),
    ("Erf", 13, [-0.0, INF, -INF, 1e-300], [-0.0, 1, -1, 2e-300 / math.sqrt(math.pi)]),
])  # fmt: skip
def test_edges(check: Check, op: str, opset: int, x: list[float], y: list[float]) -> None:
    want = np.array(y)
    (got,) = check(op, [np.array(x)], [want], opset=opset, rtol=1e-15, atol=0)
    known = ~np.isnan(want)
    assert (np.signbit(got) == np.signbit(want))[known].all()


def test_erf_of_integers(check: Check) -> None:
    """Truncated; the values below 1 leave nothing."""
    for dtype in (np.int8, np.int64, np.uint8, np.uint64):
        check("Erf", [np.array([0, 1, 3, 100], dtype)], [np.array([0, 0, 0, 1], dtype)], opset=9)
    check("Erf", [np.array([-1, -100], np.int32)], [np.array([0, -1], np.int32)], opset=9)


@pytest.mark.parametrize("xp", [namespaces.numpy, strict.StrictNamespace()], ids=["numpy", "strict"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_error_function(xp: Any, dtype: Any) -> None:
    """Within 4 units in the last place everywhere; erfc too where x * x does not spoil the exponential."""
    x = np.concatenate([np.linspace(-7, 7, 9001), np.geomspace(1e-30, 1, 500), -np.geomspace(1e-30, 1, 500)]).astype(dtype)
    erf = np.array([math.erf(v) for v in x.tolist()])
    np.testing.assert_allclose(xp.to_host(xp.erf(xp.from_host(x))), erf.astype(dtype), rtol=4 * np.finfo(dtype).eps, atol=0)
    erfc = np.array([math.erfc(v) for v in x.tolist()])
    actual = xp.to_host(xp.erfc(xp.from_host(x)))
    assert actual.dtype == dtype
    assert (abs(actual - erfc) <= 4 * np.finfo(dtype).eps * np.maximum(1, x * x) * erfc).all()


def test_error_function_in_pieces() -> None:
    x = np.linspace(-3, 3, 30_000, dtype=np.float32).reshape(3, 100, 100)
    np.testing.assert_array_equal(namespaces.numpy.erf(x)[2, 50], namespaces.numpy.erf(x[2, 50]))
    np.testing.assert_array_equal(namespaces.numpy.erfc(x.T), namespaces.numpy.erfc(x).T)
    assert namespaces.numpy.erf(np.array([0.5], np.float16)).dtype == np.float16


FLOAT8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz]


def test_is_nan(check: Check) -> None:
    x, y = np.array([1, NAN, INF, -INF]), np.array([False, True, False, False])
    for opset in (9, 13, 20):
        for dtype in (np.float16, np.float32, np.float64):
            check("IsNaN", [x.astype(dtype)], [y], opset=opset)
    check("IsNaN", [x.astype(ml_dtypes.bfloat16)], [y], opset=13)
    check("IsNaN", [np.float32(NAN)], [np.array(True)], opset=20)


def test_is_inf(check: Check) -> None:
    x = np.array([1, NAN, INF, -INF])
    for opset, dtypes in ((10, (np.float32, np.float64)), (20, (np.float16, ml_dtypes.bfloat16))):
        for dtype in dtypes:
            z = x.astype(dtype)
            check("IsInf", [z], [np.array([False, False, True, True])], opset=opset)
            check("IsInf", [z], [np.array([False, False, True, False])], opset=opset, detect_negative=0)
            check("IsInf", [z], [np.array([False, False, False, True])], opset=opset, detect_positive=0)
            check("IsInf", [z], [np.zeros(4, bool)], opset=opset, detect_positive=0, detect_negative=0)
    check("IsInf", [np.zeros((0, 2))], [np.zeros((0, 2), bool)], opset=10, detect_positive=0)


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8(device: str, dtype: Any) -> None:
    x = np.array([1, NAN, INF, -INF]).astype(dtype)
    wide = x.astype(np.float64)  # the kinds without an infinity made NaN of it
    for op, expected in (("IsNaN", np.isnan(wide)), ("IsInf", np.isinf(wide))):
        node = helper.make_node(op, ["x"], ["y"])
        (y,) = SingaBackend.run_node(node, [x], device, opset_version=20)
        np.testing.assert_array_equal(y, expected)
