"""Operators that are declared by a body only: their computation on arrays is derived from it."""

from __future__ import annotations

import numpy as np
import pytest

from singa_backend import OperatorError, SingaBackend
from singa_backend.devices.namespaces import numpy
from singa_backend.interpreters.eager import Eager
from singa_backend.interpreters.evaluate import BodyEvaluator
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import MICROSOFT, load_domain

load_domain(MICROSOFT)
RANDOM = np.random.default_rng(0)


def call(name: str, *inputs: np.ndarray, outputs: int = 1, **attributes: object) -> list[np.ndarray]:
    return Eager().call(name, inputs, attributes, outputs, MICROSOFT)


def test_narrow_floats_are_widened_once_and_rounded_once() -> None:
    x = RANDOM.standard_normal((3, 5)).astype(np.float16)
    wide = x.astype(np.float32)
    alpha = np.float32(1.702)
    (y,) = call("QuickGelu", x)
    assert y.dtype == np.float16 and np.array_equal(y, (wide / (1 + np.exp(-alpha * wide))).astype(np.float16))


def test_inputs_and_defaults_are_those_of_the_body() -> None:
    declaration = declarations[MICROSOFT, "QLinearConcat"][1]
    assert declaration.composes and [i.name for i in declaration.inputs] == ["y_scale", "y_zero", "inputs"]
    assert declaration.inputs[-1].variadic and "axis" in declaration.attributes and not declaration.services
    assert declarations[MICROSOFT, "SkipLayerNormalization"][1].services == {"wanted": "wanted"}


def test_a_variadic_input_reaches_the_body_and_the_rule() -> None:
    one, zero, x = np.array(1, np.float32), np.zeros((), np.uint8), np.arange(4, dtype=np.uint8)
    (y,) = call("QLinearConcat", one, zero, x, one, zero, x[:2], one, zero, axis=0)
    assert np.array_equal(y, [0, 1, 2, 3, 0, 1])
    with pytest.raises(OperatorError, match="in turn, got 2"):
        call("QLinearConcat", one, zero, x, one, axis=0)


def test_what_is_refused_is_refused_before_the_body_runs() -> None:
    x, bias = np.zeros((2, 3), np.float32), np.zeros((4, 1, 3), np.float32)  # Add would broadcast them
    with pytest.raises(OperatorError, match="bias must broadcast to the shape of data") as refused:
        call("BiasSoftmax", x, bias, axis=1, is_inner_broadcast=1)
    assert refused.value.code == "SX404"


def test_numbers_of_a_body_are_not_written() -> None:
    """An array for a number serves later calls, so a result that views it is read-only."""
    op = BodyEvaluator(numpy)
    first, second = (op.Reshape([1, 2, 3, 4], [2, 2]) for _ in range(2))
    assert np.array_equal(first, [[1, 2], [3, 4]]) and not first.flags.writeable and not second.flags.writeable
    assert op.Add(np.ones(2, np.float64), 1).dtype == np.float64 and op.Add(np.ones(2, np.int32), 1).dtype == np.int32


def test_accepts_belongs_to_a_composition_and_is_declared_once() -> None:
    for name in ("CDist", "BiasSoftmax"):
        with pytest.raises(ValueError, match="must be a composition without another rule"):
            declarations[MICROSOFT, name][1].accepts(lambda: None)


def test_a_plan_keeps_what_a_composition_computes_of_odd_values() -> None:
    from onnx import parser

    text = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g (float[4,8] x, float[8] b) => (float[4,8] y) '
    model = parser.parse_model(text + "{ y = com.microsoft.BiasGelu(x, b) }")
    x, b = RANDOM.standard_normal((4, 8)).astype(np.float32), np.zeros(8, np.float32)
    x[0, :3] = np.nan, np.inf, -np.inf
    found, expected = (SingaBackend.prepare(model, optimize=level).run([x, b])[0] for level in (2, 0))
    assert np.allclose(found, expected, equal_nan=True)
