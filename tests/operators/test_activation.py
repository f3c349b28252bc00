"""Activations: every version against its formula in high precision, and the tails, the empty, NaN and -0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

import singa_backend
from singa import sonnx

Check = Callable[..., Any]
INF, NAN = math.inf, math.nan


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else math.exp(x)


def _softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def _hard(x: float, a: float = 0.2, b: float = 0.5) -> float:
    return max(0.0, min(1.0, a * x + b))


def _shrink(x: float, bias: float = 0.0, lambd: float = 0.5) -> float:
    return x + bias if x < -lambd else x - bias if x > lambd else 0.0


POINTS = [-1e4, -100, -20, -5, -3, -1.5, -0.5, -1e-3, 0, 1e-3, 0.5, 1.5, 2, 3, 5, 20, 100, 1e4]
SELU = (1.67326319217681884765625, 1.05070102214813232421875)
f32 = lambda v: float(np.float32(v))  # noqa: E731

FORMULAS: list[tuple[str, tuple[int, ...], dict[str, Any], Callable[[float], float]]] = [
    ("Relu", (1, 6, 13, 14), {}, lambda x: max(0.0, x)),
    ("LeakyRelu", (1, 6, 16), {}, lambda x: x if x >= 0 else f32(0.01) * x),
    ("LeakyRelu", (1, 6, 16), {"alpha": 1.5}, lambda x: x if x >= 0 else 1.5 * x),
    ("LeakyRelu", (1, 6, 16), {"alpha": -0.5}, lambda x: x if x >= 0 else -0.5 * x),
    ("ThresholdedRelu", (10, 22), {}, lambda x: x if x > 1 else 0.0),
    ("ThresholdedRelu", (10, 22), {"alpha": -1.5}, lambda x: x if x > -1.5 else 0.0),
    ("HardSigmoid", (1, 6, 22), {}, lambda x: _hard(x, f32(0.2))),
    ("HardSigmoid", (1, 6, 22), {"alpha": 0.5, "beta": 0.625}, lambda x: _hard(x, 0.5, 0.625)),
    ("HardSwish", (14, 22), {}, lambda x: x * _hard(x, 1 / 6)),
    ("Elu", (1, 6, 22), {}, lambda x: x if x >= 0 else math.expm1(x)),
    ("Elu", (1, 6, 22), {"alpha": 2.0}, lambda x: x if x >= 0 else 2 * math.expm1(x)),
    ("Celu", (12, 28), {}, lambda x: max(0.0, x) + min(0.0, math.expm1(min(x, 0)))),
    ("Celu", (12, 28), {"alpha": 2.0}, lambda x: max(0.0, x) + min(0.0, 2 * math.expm1(min(x, 0) / 2))),
    ("Selu", (1,), {}, lambda x: f32(1.0507) * (x if x > 0 else f32(1.6732) * math.expm1(x))),
    ("Selu", (6, 22), {}, lambda x: SELU[1] * (x if x > 0 else SELU[0] * math.expm1(x))),
    ("Selu", (1, 6, 22), {"alpha": 2.0, "gamma": 3.0}, lambda x: 3 * (x if x > 0 else 2 * math.expm1(x))),
    ("Sigmoid", (1, 6, 13), {}, _sigmoid),
    ("Softplus", (1, 22), {}, _softplus),
    ("Softsign", (1, 22), {}, lambda x: x / (1 + abs(x))),
    ("Mish", (18, 22), {}, lambda x: x * math.tanh(_softplus(x))),
    ("Gelu", (20,), {}, lambda x: x / 2 * math.erfc(-x / math.sqrt(2))),
    ("Gelu", (20,), {"approximate": "tanh"}, lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))),
    ("Swish", (24,), {}, lambda x: x * _sigmoid(x)),
    ("Swish", (24,), {"alpha": -0.5}, lambda x: x * _sigmoid(-0.5 * x)),
    ("Shrink", (9,), {}, _shrink),
    ("Shrink", (9,), {"bias": 1.5, "lambd": 1.5}, lambda x: _shrink(x, 1.5, 1.5)),
]
HINTED = {"Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Sigmoid"}


@pytest.mark.parametrize(("op", "opsets", "attributes", "f"), FORMULAS, ids=[f"{f[0]}-{f[1][0]}-{len(f[2])}" for f in FORMULAS])
def test_formula(check: Check, op: str, opsets: tuple[int, ...], attributes: dict[str, Any], f: Any) -> None:
    """Relative accuracy, far into the tails: 1e-13 in float64, 1e-5 in float32 (its argument's rounding is in there)."""
    for opset in opsets:
        dtypes: list[Any] = [np.float64, np.float32]
        if (op, opset) != ("Celu", 12):
            dtypes += [np.float16] + ([ml_dtypes.bfloat16] if opset == opsets[-1] and opset not in (1, 9) else [])
        for dtype in dtypes[1:2] if (op, opset) == ("Celu", 12) else dtypes:
            x = np.array(POINTS, dtype).reshape(3, 1, 6)
            y = np.array([f(float(v)) for v in x.flat]).astype(dtype).reshape(x.shape)
            atol, rtol = {np.float64: (1e-300, 1e-13), np.float32: (1e-37, 1e-5)}.get(dtype, (1e-6, 1e-6))
            more = {"consumed_inputs": [0]} if opset == 1 and op in HINTED else {}
            check(op, [x], [y], opset=opset, rtol=rtol, atol=atol, **attributes, **more)
        x = np.array(1.5, np.float32)
        check(op, [x], [np.float32(f(1.5))], opset=opset, **attributes)
        check(op, [np.ones((2, 0), np.float32)], [np.ones((2, 0), np.float32)], opset=opset, **attributes)


@pytest.mark.parametrize(("op", "opset", "at_nan", "low", "high"), [
    ("Relu", 14, NAN, 0, INF), ("LeakyRelu", 16, NAN, -INF, INF), ("ThresholdedRelu", 22, 0, 0, INF),
    ("HardSigmoid", 22, NAN, 0, 1),
    ("Elu", 22, NAN, -1, INF), ("Celu", 12, NAN, -1, INF), ("Selu", 22, NAN, -SELU[0] * SELU[1], INF), ("Sigmoid", 13, NAN, 0, 1),
    ("Softplus", 22, NAN, 0, INF), ("Softsign", 22, NAN, NAN, NAN), ("Mish", 22, NAN, NAN, INF), ("Gelu", 20, NAN, NAN, INF),
    ("Swish", 24, NAN, NAN, INF), ("HardSwish", 22, NAN, NAN, INF), ("Shrink", 9, 0, -INF, INF),
])  # fmt: skip
def test_nan_and_infinities(check: Check, op: str, opset: int, at_nan: float, low: float, high: float) -> None:
    """The values of the formula, so that -inf * 0 and inf / inf are NaN; a comparison with NaN is false."""
    check(op, [np.array([NAN, -INF, INF], np.float32)], [np.array([at_nan, low, high], np.float32)], opset=opset)


@pytest.mark.parametrize("op", ["LeakyRelu", "Elu", "Selu", "Softsign", "Mish", "Gelu", "Swish"])
def test_negative_zero(check: Check, op: str) -> None:
    (y,) = check(op, [np.array([-0.0, 0.0])], [np.zeros(2)], opset=24)
    assert np.signbit(y).tolist() == [True, False]


def test_relu_of_integers(check: Check) -> None:
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        high = np.iinfo(dtype).max
        check("Relu", [np.array([np.iinfo(dtype).min, -1, 0, high], dtype)], [np.array([0, 0, 0, high], dtype)], opset=14)


def test_shrink_of_integers(check: Check) -> None:
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        x = np.array([-5, -2, -1, 0, 1, 2, 5], dtype)
        check("Shrink", [x], [np.array([-4, -1, 0, 0, 0, 1, 4], dtype)], opset=9, lambd=1.5, bias=1.0)
        check("Shrink", [x], [np.array([-3, 0, 0, 0, 0, 0, 3], dtype)], opset=9, lambd=1.5, bias=1.5)  # -3.5, truncated
        check("Shrink", [x], [x], opset=9)
    big = np.array([2**53 + 1, -(2**53) - 1])
    check("Shrink", [big], [np.array([2**53, -(2**53)])], opset=9, bias=1.0)
    check("Shrink", [np.array([0, 1, 9], np.uint8)], [np.array([0, 0, 7], np.uint8)], opset=9, lambd=2.0, bias=2.0)


def test_gelu_refuses(fails: Check) -> None:
    fails("Gelu", [np.float32(1)], "must be 'none' or 'tanh'", opset=20, approximate="sigmoid")


def test_swiglu(check: Check, fails: Check) -> None:
    a, b = np.array([[-2.0, 0.5], [0, 3]]), np.array([[1.0, -4], [2, 5]])
    y = np.array([[u * _sigmoid(u) * v for u, v in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)])
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        check("SwiGLU", [a.astype(dtype), b.astype(dtype)], [y.astype(dtype)], opset=28)
    check("SwiGLU", [a, b], [a * b / (1 + np.exp(-2 * a))], opset=28, alpha=2.0)
    fails("SwiGLU", [a, b[:1]], "must have equal shapes", opset=28)


# --- PRelu ------------------------------------------------------------------------------------------------------------


def _prelu(x: Any, slope: Any) -> Any:
    return np.maximum(x, 0) + slope * np.minimum(x, 0)


def test_prelu_legacy(check: Check, fails: Check) -> None:
    x = np.linspace(-3, 2, 24, dtype=np.float32).reshape(2, 3, 2, 2)
    slope = np.array([0.5, -1, 2], np.float32)
    for opset in (1, 6):
        check("PRelu", [x, slope], [_prelu(x, slope[:, None, None])], opset=opset)
        check("PRelu", [x, slope[:1]], [_prelu(x, slope[0])], opset=opset)
        check("PRelu", [x, slope[:, None, None]], [_prelu(x, slope[:, None, None])], opset=opset)
        check("PRelu", [x[:, :, 0, 0].copy(), slope], [_prelu(x[:, :, 0, 0], slope)], opset=opset)
        check("PRelu", [x, x], [_prelu(x, x)], opset=opset)
    check("PRelu", [x, slope], [_prelu(x, slope[:, None, None])], opset=1, consumed_inputs=[0, 0])
    fails("PRelu", [x, np.ones(4, np.float32)], "does not broadcast", opset=6)


def test_prelu(check: Check, fails: Check) -> None:
    x = np.linspace(-3, 2, 24, dtype=np.float32).reshape(2, 3, 4)
    for opset in (7, 9, 16):
        for slope in (np.full((3, 1), 0.25, np.float32), np.arange(4, dtype=np.float32), np.float32(-1), x):
            check("PRelu", [x, np.asarray(slope)], [_prelu(x, slope)], opset=opset)
        fails("PRelu", [x[0], x], "does not broadcast", opset=opset)
        fails("PRelu", [x, x[0, :, 0].copy()], "does not broadcast", opset=opset)
    big = np.array([-(2**53) - 1, 2**53 + 1])
    check("PRelu", [big, np.array(3)], [np.array([-3 * (2**53 + 1), 2**53 + 1])], opset=9)
    for dtype in (np.uint32, np.uint64, np.int32):
        check("PRelu", [np.array([1, 2], dtype), np.array(3, dtype)], [np.array([1, 2], dtype)], opset=9)
    check("PRelu", [np.array([NAN, -0.0]), np.array(3.0)], [np.array([NAN, -0.0])], opset=16)


# --- along an axis ----------------------------------------------------------------------------------------------------


def _rows(op: str, x: Any) -> Any:
    """Of a matrix, row by row, by Python's floats."""
    y = np.zeros(x.shape)
    for i, row in enumerate(x.astype(np.float64)):
        top = max(row)
        total = math.fsum(math.exp(v - top) for v in row)
        for j, v in enumerate(row):
            soft = math.exp(v - top) / total
            y[i, j] = {"Softmax": soft, "LogSoftmax": v - top - math.log(total), "Hardmax": float(j == list(row).index(top))}[op]
    return y


AXIS = ["Softmax", "LogSoftmax", "Hardmax"]
X = np.array([((i * 7919) % 31 - 15) / 4 for i in range(24)], np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("op", AXIS)
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1, -2, -3])
def test_axis(check: Check, op: str, axis: int | None) -> None:
    attributes = {} if axis is None else {"axis": axis}
    last = np.moveaxis(X, -1 if axis is None else axis, -1)
    y = np.moveaxis(_rows(op, last.reshape(-1, last.shape[-1])).reshape(last.shape), -1, -1 if axis is None else axis)
    check(op, [X], [y.astype(np.float32)], opset=13, **attributes)
    split = 1 if axis is None else axis % 3
    y = _rows(op, X.reshape(math.prod(X.shape[:split]), -1)).reshape(X.shape)
    for opset in (11,) if axis is not None and axis < 0 else (1, 11):
        check(op, [X], [y.astype(np.float32)], opset=opset, **attributes)


@pytest.mark.parametrize("op", AXIS)
def test_axis_edges(check: Check, fails: Check, op: str) -> None:
    for opset in (1, 11, 13):
        for shape in ((0, 3), (3, 0), (2, 0, 4)):
            check(op, [np.zeros(shape, np.float32)], [np.zeros(shape, np.float32)], opset=opset, axis=1)
        fails(op, [X], "axis must be in .* got 4", opset=opset, axis=4)
        one = 0 if op == "LogSoftmax" else 1
        check(op, [np.array([[7.0]])], [np.array([[one]], float)], opset=opset)
        x = X.astype(np.float16).reshape(6, 4)
        check(op, [x], [_rows(op, x).astype(np.float16)], opset=opset)
        check(op, [X.astype(np.float64).reshape(6, 4)], [_rows(op, X.reshape(6, 4))], opset=opset, rtol=1e-14)
    fails(op, [np.float32(1)], "axis", opset=13)
    fails(op, [X[:0]], "axis must be in .* got 3", opset=13, axis=3)
    x = X.astype(ml_dtypes.bfloat16).reshape(6, 4)
    check(op, [x], [_rows(op, x).astype(ml_dtypes.bfloat16)], opset=13)


def test_softmax_is_stable(check: Check) -> None:
    x = np.array([[1e4, 0, -1e4], [-1e4, -1e4, -1e4], [-INF, 0, 0], [NAN, 1, 2]], np.float32)
    third, half = 1 / 3, 0.5
    check("Softmax", [x], [np.array([[1, 0, 0], [third] * 3, [0, half, half], [NAN] * 3], np.float32)], opset=13)
    y = np.array([[0, -1e4, -2e4], [math.log(third)] * 3, [-INF, math.log(half), math.log(half)], [NAN] * 3], np.float32)
    check("LogSoftmax", [x], [y], opset=13)


def test_hardmax_takes_the_first(check: Check) -> None:
    x = np.array([[3, 1, 3], [0, 0, 0], [-INF, -INF, -1]], np.float32)
    y = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 1]], np.float32)
    check("Hardmax", [x], [y], opset=13)
    check("Hardmax", [x.T.copy()], [y.T], opset=13, axis=0)
    check("Hardmax", [x.reshape(1, 9)], [np.eye(1, 9, dtype=np.float32)], opset=11)


@pytest.mark.parametrize(
    ("name", "attributes"), [("Gelu", {"approximate": "none"}), ("Gelu", {"approximate": "tanh"}), ("HardSwish", {})]
)
def test_a_written_activation_keeps_the_digits_of_doubles(name, attributes):
    """ONNX's function bodies have constants of float32."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.DOUBLE, [64]) for n in "xy")
    graph = helper.make_graph([helper.make_node(name, ["x"], ["y"], **attributes)], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    values = np.linspace(-4, 4, 64)
    old = singa_backend.prepare(sonnx.convert(model, 12)).run([values])[0]
    np.testing.assert_allclose(old, singa_backend.prepare(model).run([values])[0], rtol=1e-11, atol=1e-15)
