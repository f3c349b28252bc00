"""`sonnx diff`: each kind of change between two models is found, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import debug


def net() -> ModelProto:
    return parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x) => (float[n,4] y)'
        " <float[4,4] w = {0.5,-1,2,1, 1,0.5,-1,1, 2,1,1,-0.5, 1,1,0.5,1}, float[4] b = {1,-1,0.5,2}> {"
        " m = MatMul(x, w) a = Add(m, b) r = LeakyRelu<alpha=0.1>(a) y = Softmax<axis=-1>(r) }"
    )


def weight(model: ModelProto) -> None:
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array([1, -1, 0.5, 3], np.float32), "b"))


def attribute(model: ModelProto) -> None:
    model.graph.node[2].attribute[0].f = 0.2


def unset(model: ModelProto) -> None:
    del model.graph.node[2].attribute[:]  # the default is 0.01


def operator(model: ModelProto) -> None:
    model.graph.node[2].CopyFrom(helper.make_node("Relu", ["a"], ["r"]))


def added(model: ModelProto) -> None:
    model.graph.node[3].input[0] = "s"
    model.graph.node.insert(3, helper.make_node("Tanh", ["r"], ["s"]))


def removed(model: ModelProto) -> None:
    del model.graph.node[2]
    model.graph.node[2].input[0] = "a"


def shape(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3


def opset(model: ModelProto) -> None:
    model.opset_import[0].version = 18


def swapped(model: ModelProto) -> None:
    model.graph.node[1].input[:] = ["b", "m"]


CASES: dict[Callable[[ModelProto], None], list[tuple[str, str, str]]] = {
    weight: [("weight", "b", "changed")], attribute: [("node", "LeakyRelu_2", "changed")],
    unset: [("node", "LeakyRelu_2", "changed")], operator: [("node", "LeakyRelu_2", "changed")] * 2,
    added: [("node", "Softmax_3", "changed"), ("node", "Tanh_3", "added")],
    removed: [("node", "LeakyRelu_2", "removed"), ("node", "Softmax_3", "changed")],
    shape: [("input", "x", "changed")], opset: [("model", "opset ai.onnx", "changed")],
    swapped: [("node", "Add_1", "changed")],
}  # fmt: skip


@pytest.mark.parametrize("change", CASES)
def test_each_change_is_found_and_nothing_else(change: Callable[[ModelProto], None], tmp_path: Path) -> None:
    first, second = net(), net()
    change(second)
    onnx.save(first, tmp_path / "a.onnx")
    onnx.save(second, tmp_path / "b.onnx")
    found = CliRunner().invoke(main, ["diff", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "--json"])
    told = json.loads(found.stdout)
    assert found.exit_code == 1 and not told["equal"], found.output
    # two changes of one node are two entries: its operator, and its attribute
    assert [(c["kind"], c["name"], c["how"]) for c in told["changes"]] == CASES[change], told


def test_other_names_of_values_and_weights_are_not_a_difference(tmp_path: Path) -> None:
    second = net()
    names = {n: f"new/{n}" for n in ("m", "a", "r", "w", "b")}
    for node in second.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    for tensor in second.graph.initializer:
        tensor.name = names[tensor.name]
    found = debug.diff(net(), second)
    assert found.equal and found.renamed == names
    for name in ("a.onnx", "b.onnx"):
        onnx.save(net(), tmp_path / name)
    same = CliRunner().invoke(main, ["diff", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")])
    assert same.exit_code == 0 and "the models are equal" in same.stdout
    second.graph.initializer[0].raw_data = second.graph.initializer[1].raw_data
    second.graph.initializer[0].ClearField("float_data")
    second.graph.initializer[0].float_data.extend([7.0] * 16)
    second.graph.initializer[0].ClearField("raw_data")
    assert [(c.kind, c.name) for c in debug.diff(net(), second).changes] == [("weight", "w")]
