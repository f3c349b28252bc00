"""onnxruntime's operators in written files: kept, lowered, or completed with their domain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

from singa import sonnx
from singa.cli import main
from singa_backend import InvalidModel, SingaBackend, UnsupportedModel
from singa_backend.engines.oracle import Oracle

X = np.linspace(-2, 2, 16, dtype=np.float32).reshape(2, 8)
B = np.linspace(0, 1, 8, dtype=np.float32)
NET = (
    '<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> g (float[2,8] x, float[8] b) => (float[2,8] y) '
    "{ h = com.microsoft.BiasGelu(x, b) y = com.microsoft.QuickGelu<alpha = 2.0>(h) }"
)


def run(model: Any) -> np.ndarray:
    return np.asarray(SingaBackend.run_model(model, {"x": X, "b": B})[0])


def calls(model: Any) -> list[tuple[str, str]]:
    return [(n.domain, n.op_type) for n in model.graph.node]


def test_a_conversion_keeps_onnxruntimes_operators() -> None:
    source = parser.parse_model(NET)
    kept = sonnx.convert(source, 18)
    assert calls(kept) == calls(source) and {o.domain for o in kept.opset_import} == {"", "com.microsoft"}
    assert np.array_equal(run(kept), run(source))


@pytest.mark.parametrize("opset", [9, 17, 23])
def test_a_lowered_file_has_only_onnxs_operators(opset: int) -> None:
    source = parser.parse_model(NET)
    lowered = sonnx.convert(source, opset, lower=True)
    assert {d for d, _ in calls(lowered)} == {""} and {o.domain for o in lowered.opset_import} == {""}
    onnx.checker.check_model(lowered, full_check=True)
    assert np.allclose(run(lowered), run(source), rtol=1e-6, atol=1e-7)


def test_a_lax_operator_is_kept_as_long_as_onnxruntime_reads_it() -> None:
    text = '<ir_version: 6, opset_import: ["": 9]> g (float[2,8] x, float[8] b) => (float[2,8] y) { y = Affine<alpha = 3.0>(x) }'
    source = parser.parse_model(text)
    assert calls(sonnx.convert(source, 9)) == [("", "Affine")]
    newer = sonnx.convert(source, 12)
    assert ("", "Affine") not in calls(newer) and np.array_equal(run(newer), run(source))


def test_the_command(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(NET), tmp_path / "a.onnx")
    done = CliRunner().invoke(main, ["lower", str(tmp_path / "a.onnx"), "-o", str(tmp_path / "b.onnx"), "--opset", "20"])
    assert done.exit_code == 0, done.output
    lowered = onnx.load(tmp_path / "b.onnx")
    assert {d for d, _ in calls(lowered)} == {""} and ("", "Gelu") in calls(lowered)


def test_what_has_no_body_is_named() -> None:
    missing = parser.parse_model(NET.replace("QuickGelu<alpha = 2.0>", "EPContext"))
    with pytest.raises(UnsupportedModel, match="EPContext"):
        sonnx.convert(missing, lower=True)


def test_sanitize_adds_domains(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(NET.replace("com.microsoft.", "").replace(', "com.microsoft": 1', "")), tmp_path / "a.onnx")
    done = CliRunner().invoke(main, ["sanitize", "--domains", str(tmp_path / "a.onnx"), "-o", str(tmp_path / "b.onnx")])
    assert done.exit_code == 0 and "2 nodes received a domain" in done.output, done.output
    found = onnx.load(tmp_path / "b.onnx")
    assert calls(found) == [("com.microsoft", "BiasGelu"), ("com.microsoft", "QuickGelu")]
    assert np.array_equal(run(found), run(parser.parse_model(NET)))


@pytest.mark.parametrize("opset", [17, 21])
def test_functions_are_bodies_by_form(opset: int) -> None:
    text = NET.replace("QuickGelu<alpha = 2.0>(h)", "QuickGelu<alpha = 2.0>(g)").replace(
        "y = ", "g = com.microsoft.QuickGelu<alpha = 1.5>(h) y = "
    )
    source = parser.parse_model(text)
    made = sonnx.convert(source, opset, functions=True)
    quick = [(f.name, f.overload) for f in made.functions if f.name.startswith("QuickGelu")]
    assert len(set(quick)) == 2 and len(made.functions) == 3
    assert all(bool(overload) == (made.ir_version >= 10) for _, overload in quick)
    onnx.checker.check_model(made, full_check=True)
    assert np.allclose(run(made), run(source), rtol=1e-6, atol=1e-7)
    for node in made.graph.node:  # a runtime without onnxruntime's operators runs the functions
        node.domain = "com.example"
    for function in made.functions:
        function.domain = "com.example"
    made.opset_import[1].domain = "com.example"
    assert np.allclose(run(made), run(source), rtol=1e-6, atol=1e-7)
    runtime = pytest.importorskip("onnxruntime", reason="the witness is an extra: pip install 'sonnx[oracle]'")
    assert runtime
    with Oracle("onnxruntime", optimise=False) as oracle:
        found = oracle.run(made.SerializeToString(), {"x": X, "b": B}, timeout=60)
    assert np.allclose(found["y"], run(source), rtol=1e-5, atol=1e-6)


def test_an_operator_that_onnx_defines_later_gets_the_domain_too(tmp_path: Path) -> None:
    """Attention of opset 23 and Gelu of opset 20 are other operators: a file of opset 17 means onnxruntime's."""
    text = """<ir_version: 10, opset_import: ["": %d]> g (float[1, 2, 8] x) => (float[1, 2, 8] y) {
        w = ConstantOfShape (s) b = ConstantOfShape (t) h = Attention <num_heads = 2> (x, w, b) y = Gelu (h) }"""
    made = parser.parse_model(text % 17)
    made.graph.initializer.extend([onnx.numpy_helper.from_array(np.array(v), n) for n, v in (("s", [8, 24]), ("t", [24]))])
    onnx.save(made, tmp_path / "a.onnx")
    with pytest.raises(InvalidModel, match=r"Attention, too: if it is meant, `sonnx sanitize --domains`"):
        sonnx.prepare(made)
    done = CliRunner().invoke(main, ["sanitize", str(tmp_path / "a.onnx"), "-o", str(tmp_path / "b.onnx"), "--domains"])
    assert done.exit_code == 0, done.output
    complete = onnx.load(tmp_path / "b.onnx")
    assert {d for d, k in calls(complete) if k in ("Attention", "Gelu")} == {"com.microsoft"}
    assert sonnx.prepare(complete).run([np.ones((1, 2, 8), np.float32)])[0].shape == (1, 2, 8)
    made.opset_import[0].version = 23
    onnx.save(made, tmp_path / "a.onnx")
    CliRunner().invoke(main, ["sanitize", str(tmp_path / "a.onnx"), "-o", str(tmp_path / "b.onnx"), "--domains"])
    assert {d for d, _ in calls(onnx.load(tmp_path / "b.onnx"))} == {""}
