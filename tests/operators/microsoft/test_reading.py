"""Files that call onnxruntime's operators are read as onnxruntime reads them, or refused with a hint."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from onnx import parser

import singa_backend
from singa_backend import InvalidInput, UnsupportedModel, define_operator

X = np.linspace(-2, 2, 16, dtype=np.float32).reshape(2, 8)


def model(call: str, imports: str = '"": 17', outputs: str = "float[2,8] y") -> Any:
    return parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> g (float[2,8] x) => ({outputs}) {{ {call} }}")


def test_a_missing_import_is_assumed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="does not import com.microsoft.*version 1 is assumed"):
        rep = singa_backend.prepare(model("y = com.microsoft.QuickGelu<alpha = 2.0>(x)"))
    assert np.allclose(rep.run([X])[0], X / (1 + np.exp(-2 * X)), atol=1e-6)


def test_declarations_are_imported_by_the_first_file_that_names_the_domain() -> None:
    code = (
        "import sys, singa_backend; from onnx import parser\n"
        "name = 'singa_backend.operators.microsoft'\n"
        "assert name not in sys.modules\n"
        'head = \'<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> \'\n'
        "m = parser.parse_model(head + 'g (float[2] x) => (float[2] y) { y = com.microsoft.Gelu(x) }')\n"
        "singa_backend.prepare(m); assert name in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lax_operators_are_read_up_to_the_opset_at_which_onnxruntime_drops_them() -> None:
    rep = singa_backend.prepare(model("y = Affine<alpha = 2.0, beta = 1.0>(x)", '"": 9'))
    assert np.array_equal(rep.run([X])[0], 2 * X + 1)
    with pytest.raises(UnsupportedModel, match="no operator Affine") as caught:
        singa_backend.prepare(model("y = Affine(x)", '"": 10'))
    assert "up to opset 9 only" in caught.value.hint


def test_an_operator_without_its_domain_is_refused_with_a_hint() -> None:
    with pytest.raises(UnsupportedModel, match="no operator FastGelu") as caught:
        singa_backend.prepare(model("y = FastGelu(x)"))
    assert "com.microsoft" in caught.value.hint and "sanitize --domains" in caught.value.hint


@pytest.mark.parametrize(
    ("domain", "name", "word"),
    [
        ("com.microsoft", "GeluGrad", "onnxruntime-training"),
        ("com.microsoft", "Foo", "reports/microsoft.md"),
        ("com.microsoft.nchwc", "Conv", "extended"),
        ("com.ms.internal.nhwc", "Conv", "internal to onnxruntime"),
        ("ai.onnx.contrib", "BpeDecoder", "onnxruntime-extensions"),
        ("qonnx.custom_op.general", "Quant", "QDQ"),
        ("onnx.brevitas", "Quant", "QCDQ"),
        ("trt.plugins", "EfficientNMS_TRT", "TensorRT"),
        ("org.pytorch.aten", "ATen", "ATen fallback"),
        ("com.example", "Foo", "'com.example' is not one of ONNX's"),
    ],
)
def test_hints_by_domain(domain: str, name: str, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"no operator {name}") as caught:
        singa_backend.prepare(model(f"y = {domain}.{name}(x)", f'"": 17, "{domain}": 1'))
    assert word in caught.value.hint


@define_operator(domain="com.example", outputs=["y: T", "mean?: T", "total?: T"])
def Parts(xp: Any, x: T) -> Any:  # noqa: F821
    return x + 1, None, x.sum()


def test_optional_outputs_of_a_defined_operator() -> None:
    def prepared(call: str, outputs: str) -> list[Any]:
        return list(singa_backend.prepare(model(call, '"": 17, "com.example": 1', outputs), operators=[Parts]).run([X]))

    assert np.array_equal(prepared("y = com.example.Parts(x)", "float[2,8] y")[0], X + 1)
    y, total = prepared("y, , t = com.example.Parts(x)", "float[2,8] y, float t")
    assert np.array_equal(y, X + 1) and total == X.sum()


@pytest.mark.parametrize("outputs", [["y?: T"], ["y: T", "z?: T", "t: T"], ["*y: T"], []])
def test_outputs_that_cannot_be_optional(outputs: list[str]) -> None:
    def parts(xp: Any, x: "float") -> Any:  # noqa: UP037
        return x

    with pytest.raises(InvalidInput, match="one output or more"):
        define_operator("Parts2", domain="com.example", outputs=[o.replace("T", "float") for o in outputs])(parts)
