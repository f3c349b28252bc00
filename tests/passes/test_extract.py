"""`sonnx extract`: a part of a model computes what the whole computes between the same values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto, parser

from singa.cli import main
from singa_backend import InvalidInput, SingaBackend, debug

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def net() -> ModelProto:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[n,4] x, float[n,4] k) => (float[n,4] y, float[n,4] z)'
        " <float[4,4] w = {0.5,-1,2,1, 1,0.5,-1,1, 2,1,1,-0.5, 1,1,0.5,1}, float[1,4] b = {1,-1,0.5,2}> {"
        " one = Constant<value = float[1] {3}>() m = MatMul(x, w) a = own.Twice(m) p = Add(a, b)"
        " yes = Constant<value = bool {1}>()"
        " c = If(yes) <then_branch = t () => (float[n,4] u) { u = Mul(p, one) }, else_branch = e () => (float[n,4] v)"
        " { v = Add(p, k) }> y = Tanh(c) z = Sub(k, one) }"
        ' <domain: "own", opset_import: ["": 17]> Twice (q) => (r) { r = Add(q, q) }'
    )
    model.metadata_props.add(key="author", value="a test")
    return model


def sonnx(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words])


@pytest.mark.parametrize("external", [False, True])
def test_a_part_computes_what_the_whole_computes(external: bool, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    path, part = tmp_path / "whole" / "net.onnx", tmp_path / "part.onnx"
    onnx.save(net(), path, save_as_external_data=external, size_threshold=0, location="net.data")
    found = sonnx("extract", path, "--inputs", "m", "--inputs", "k", "--outputs", "c", "-o", part, "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["inputs"] == ["m", "k"] and told["outputs"] == ["c"]
    whole = SingaBackend.prepare(path).run([X, X + 1], aux_output=["m", "c"])
    got = SingaBackend.prepare(part).run({"m": whole.to_dict()["m"], "k": X + 1})
    assert np.array_equal(got[0], whole.to_dict()["c"])
    written = onnx.load(part)
    onnx.checker.check_model(written, full_check=True)
    assert [n.op_type for n in written.graph.node] == ["Twice", "Add", "If"]
    assert {t.name for t in written.graph.initializer} == {"b", "one", "yes"}
    assert len(written.functions) == 1 and written.opset_import == net().opset_import and written.ir_version == 8
    assert written.metadata_props[0].value == "a test"
    assert [d.dim_param or d.dim_value for d in written.graph.input[0].type.tensor_type.shape.dim] == ["n", 4]


def test_inputs_and_outputs_are_those_of_the_model_by_default(tmp_path: Path) -> None:
    part = tmp_path / "part.onnx"
    debug.extract(net(), [], ["a"], part)
    assert [i.name for i in onnx.load(part).graph.input] == ["x"]
    debug.extract(net(), ["p", "k"], [], part)
    assert [o.name for o in onnx.load(part).graph.output] == ["y", "z"]
    debug.extract(net(), ["x", "w"], ["m"], part)  # a weight that becomes an input
    graph = onnx.load(part).graph
    assert [i.name for i in graph.input] == ["x", "w"] and not graph.initializer
    assert np.array_equal(SingaBackend.prepare(part).run({"x": X, "w": np.eye(4, dtype=np.float32)})[0], X)


@pytest.mark.parametrize("inputs, outputs, message", [
    ("mm", "c", "did you mean 'm'"), ("m,k", "cc", "did you mean 'c'"), ("m", "c", "also need the inputs 'k'"),
    ("m,m", "a", "listed twice"), ("m,k", "a", "do not depend on the input 'k'"), ("a", "a", "both an input and an output"),
    ("m", "w", "is an input or a weight"),
])  # fmt: skip
def test_what_cannot_be_extracted_is_refused(inputs: str, outputs: str, message: str, tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "net.onnx")
    found = sonnx("extract", tmp_path / "net.onnx", "--inputs", inputs, "--outputs", outputs, "-o", tmp_path / "part.onnx")
    assert found.exit_code == 3 and "SX368" in found.stderr and message in found.stderr, found.output
    assert not (tmp_path / "part.onnx").exists()


def test_a_node_with_an_input_among_its_outputs_is_refused(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[2] y) { a, b = Split(x) y = Add(a, b) }'
    )
    with pytest.raises(InvalidInput, match="list those among the inputs too"):
        debug.extract(model, ["a"], ["y"], tmp_path / "part.onnx")
    debug.extract(model, ["a", "b"], ["y"], tmp_path / "part.onnx")
