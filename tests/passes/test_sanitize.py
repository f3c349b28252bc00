"""`sonnx sanitize`: a cleaned model computes the same, and has no dead part, unnamed node or untyped value."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

from singa.cli import main
from singa_backend import SingaBackend


@pytest.mark.parametrize("external", [False, True])
def test_a_model_is_cleaned_and_computes_the_same(external: bool, tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x) => (float[n,4] y)'
        " <float[4] b = {1,-1,0.5,2}, float[4] c = {1,1,1,1}, float[4] lost = {9,9,9,9}> {"
        " k = Add(b, c) m = Mul(x, k) dead = Tanh(m) r = Relu(m) yes = Constant<value = bool {1}>() s = ReduceSum(x)"
        " q = Greater(s, s) i = If(q) <then_branch = t () => (float[n,4] u) { u = Neg(r) }, else_branch = e () => (float[n,4] v)"
        " { w = Abs(r) v = Exp(w) }> y = Sub(i, x) }"
    )
    model.graph.node[1].name = model.graph.node[3].name = "twice"
    path, made = tmp_path / "m.onnx", tmp_path / "clean.onnx"
    onnx.save(model, path, save_as_external_data=external, size_threshold=0, location="m.data")
    found = CliRunner().invoke(main, ["sanitize", str(path), "-o", str(made), "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    clean = onnx.load(made)
    onnx.checker.check_model(clean, full_check=True)
    nodes = list(clean.graph.node)
    names = [n.name for n in nodes]
    assert [n.op_type for n in nodes] == ["Mul", "Relu", "ReduceSum", "Greater", "If", "Sub"]
    assert all(names) and len(set(names)) == len(names) and names[0] == "twice" and names[1] != "twice"
    assert all(n.name for a in nodes[4].attribute for n in a.g.node)
    assert told["named"] == 5 + 3 and told["typed"] == 5 and told["note"] == ""
    assert {v.name for v in clean.graph.value_info} == {"m", "r", "s", "q", "i"}
    assert "lost" not in {t.name for t in clean.graph.initializer}
    x = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
    before, after = (SingaBackend.prepare(p, optimize=0).run([x])[0] for p in (path, made))
    assert np.array_equal(before, after)
    again = CliRunner().invoke(main, ["sanitize", str(made), "-o", str(made), "--json"])
    assert (json.loads(again.stdout)["named"], json.loads(again.stdout)["typed"]) == (0, 0)
