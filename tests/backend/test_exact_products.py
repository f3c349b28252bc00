"""Sums of 8-bit products that 16 bits do not hold: onnxruntime in a child process has those of the definitions everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa_backend import run_model
from singa_backend.engines.exact_products import FACTORS, with_unsigned_factors
from singa_backend.engines.oracle import Oracle

random = np.random.default_rng(0)
ROWS = random.integers(200, 256, (3, 8)).astype(np.uint8)
COLUMNS = (random.integers(100, 128, (8, 4)) * random.choice([-1, 1], (1, 4))).astype(np.int8)
IMAGE, WINDOW = ROWS.reshape(1, 3, 2, 4).repeat(2, 3), COLUMNS[:6].reshape(2, 3, 2, 2)
HALF, FINE, U, S = np.float32(0.5), np.full(4, 0.01, np.float32), np.uint8(3), np.int8(-2)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "MatMulInteger": ("y = MatMulInteger(a, b)", {"a": ROWS, "b": COLUMNS}),
    "MatMulInteger, zero points": ("y = MatMulInteger(a, b, u, s)", {"a": ROWS, "b": COLUMNS, "u": U, "s": S}),
    "ConvInteger": ("y = ConvInteger(a, b)", {"a": IMAGE, "b": WINDOW}),
    "QLinearMatMul": (
        "y = QLinearMatMul(a, h, u, b, f, s, g, u)",
        {"a": ROWS, "h": HALF, "u": U, "b": COLUMNS, "f": np.float32(0.01), "s": S, "g": np.float32(9)},
    ),
    "QLinearConv": (
        "y = QLinearConv(a, h, u, b, f, s, g, u)",
        {"a": IMAGE, "h": HALF, "u": U, "b": WINDOW, "f": np.float32(0.01), "s": S, "g": np.float32(9)},
    ),
    "MatMulIntegerToFloat": (
        "y = com.microsoft.MatMulIntegerToFloat(a, b, h, f)", {"a": ROWS, "b": COLUMNS, "h": HALF, "f": FINE},
    ),
    "DynamicQuantizeMatMul": (
        "y = com.microsoft.DynamicQuantizeMatMul(a, b, f)", {"a": ROWS.astype(np.float32), "b": COLUMNS, "f": FINE},
    ),
    "QGemm": (
        "y = com.microsoft.QGemm(a, h, u, b, f, s)",
        {"a": ROWS, "h": HALF, "u": U, "b": COLUMNS, "f": np.float32(0.01), "s": S},
    ),
}  # fmt: skip
KINDS = {"uint8": "uint8", "int8": "int8", "float32": "float", "int32": "int32"}


def product(text: str, values: dict[str, np.ndarray], constants: set[str]) -> ModelProto:
    sizes = {n: ",".join(map(str, np.shape(v))) for n, v in values.items()}
    ends = ", ".join(f"{KINDS[str(v.dtype)]}[{sizes[n]}] {n}" for n, v in values.items() if n not in constants)
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 21, "com.microsoft": 1]> g ({ends}) => (y) {{ {text} }}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(values[n]), n) for n in sorted(constants))
    return model


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    pytest.importorskip("onnxruntime")
    with Oracle("onnxruntime", optimise=False) as engine:
        yield engine


@pytest.mark.parametrize("constant", [False, True], ids=["inputs", "constants"])
@pytest.mark.parametrize("name", CASES)
def test_a_sum_of_16_bits_and_more(oracle: Oracle, name: str, constant: bool) -> None:
    text, values = CASES[name]
    scalars = {n for n in values if n not in "ab"}  # as some of onnxruntime's operators require
    model = product(text, values, scalars | ({"b"} if constant else set()))
    fed = {n: v for n, v in values.items() if n not in {t.name for t in model.graph.initializer}}
    expected = run_model(model, fed, optimize=0)[0]
    result = oracle.run(model.SerializeToString(), fed)["y"]
    assert result.dtype == expected.dtype
    if expected.dtype == np.float32:
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    else:
        np.testing.assert_array_equal(result, expected)
    assert with_unsigned_factors(model.SerializeToString()) != model.SerializeToString()


def test_other_products_stay_as_they_are() -> None:
    signed = product("y = MatMulInteger(a, b)", {"a": ROWS.view(np.int8), "b": COLUMNS}, set()).SerializeToString()
    unsigned = product("y = MatMulInteger(a, b)", {"a": ROWS, "b": COLUMNS.view(np.uint8)}, set()).SerializeToString()
    floats = product(
        "y = MatMul(a, b)", {"a": ROWS.astype(np.float32), "b": COLUMNS.astype(np.float32)}, set()
    ).SerializeToString()
    for model in signed, unsigned, floats:
        assert with_unsigned_factors(model) is model


def test_every_operator_has_a_case_here_or_next_to_its_definition() -> None:
    elsewhere = {"QAttention", "DynamicQuantizeLSTM"}  # tests/operators/microsoft/test_quantized.py
    assert {op for _, op in FACTORS} == elsewhere | {n.split(",")[0] for n in CASES}
