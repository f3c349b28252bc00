"""A model that is read for editing and written again: what no pass changed is the same to the last byte."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper, parser

from singa_backend.conform import cases
from singa_backend.errors import InvalidModel
from singa_backend.ir.structure import check_structure
from singa_backend.passes import ModelEditor, Node, Value

sys.path.append(str(Path(__file__).parents[1] / "hostile"))
import structure

TESTS = Path(__file__).parents[1]
FILES = [*(Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"), *TESTS.glob("m*/**/*.onnx")]


def content(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def rewritten(editor: ModelEditor) -> ModelProto:
    """The model after a write in which every node had lost its operator, its names, its attributes and its place."""
    for graph in editor.all_graphs():
        for node in graph.nodes:
            assert node.proto is not None
            node.proto.ClearField("op_type")
            del node.proto.input[:], node.proto.output[:]
        graph.proto.node.sort(key=lambda _: random.random())
    editor.write()
    return editor.model


def cases_() -> Iterator[tuple[str, bytes]]:
    yield from ((case.name, case.model) for case in cases.load(["node"]))
    yield from ((str(path), path.read_bytes()) for path in FILES)


def test_every_model_is_written_as_it_was() -> None:
    count = 0
    for name, data in cases_():
        model = ModelProto.FromString(data)
        before = content(model)
        assert content(rewritten(ModelEditor(model))) == before, name
        count += 1
    assert count > 1800


def test_damaged_models_are_refused_or_written_as_they_were() -> None:
    count = 0
    for index in range(1500):
        drawn = structure.draw(7, index)
        try:
            editor = ModelEditor(model := ModelProto.FromString(drawn.data))
        except InvalidModel:
            continue
        order = [[id(n.proto) for n in graph.nodes] for graph in editor.all_graphs()]
        if order == [[id(p) for p in graph.proto.node] for graph in editor.all_graphs()]:
            before = content(model)
            assert content(rewritten(editor)) == before, str(drawn)
            count += 1
    assert count > 600


TEXT = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    g (bool c, float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> {
      a = Add(x, w)
      y = If(c) <then_branch = t () => (float[2] p) { b = Mul(a, w) p = Neg(b) },
                 else_branch = e () => (float[2] q) { q = local.f(x) }>
    }
    <domain: "local", opset_import: ["" : 21]> f (u) => (v) { v = Abs(u) }"""


def _sparse(model: ModelProto) -> None:
    indices = numpy_helper.from_array(onnx.numpy_helper.np.array([1]), "")
    values = helper.make_tensor("s", TensorProto.FLOAT, [1], [2.0])
    model.graph.sparse_initializer.append(SparseTensorProto(values=values, indices=indices, dims=[2]))


def _map_type(model: ModelProto) -> None:
    kind = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.value_info.append(helper.make_value_info("b", kind))


def _unknown(model: ModelProto) -> None:
    for message in (model, model.graph, model.graph.node[0]):
        message.MergeFromString(b"\xfa\x3f\x03abc")  # field 1023


def _annotations(model: ModelProto) -> None:
    model.graph.value_info.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "a", "no value"))
    model.graph.quantization_annotation.add(tensor_name="a").quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")


def _texts(model: ModelProto) -> None:
    for message in (model, model.graph, model.graph.node[1], model.graph.node[1].attribute[0], model.functions[0]):
        message.doc_string = "kept"
    model.graph.node[0].metadata_props.add(key="k", value="v")
    model.graph.node[0].output.append("")
    model.graph.node[0].domain = "ai.onnx"


def _external(model: ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("checksum", "1"), ("other", "2")):
        tensor.external_data.add(key=key, value=value)


@pytest.mark.parametrize("change", [_sparse, _map_type, _unknown, _annotations, _texts, _external])
def test_what_no_pass_knows_is_kept(change: Callable[[ModelProto], None]) -> None:
    model = parser.parse_model(TEXT)
    change(model)
    before = content(model)
    assert content(rewritten(ModelEditor(model))) == before


def edited(text: str) -> tuple[ModelEditor, dict[str, Value]]:
    editor = ModelEditor(parser.parse_model(text))
    return editor, editor.main.values


def names(model: ModelProto) -> list[tuple[str, list[str], list[str]]]:
    return [(n.op_type, list(n.input), list(n.output)) for n in model.graph.node]


MAIN = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y, float[2] z) '


@pytest.mark.parametrize(
    ("body", "old", "new", "expected"),
    [
        ("{ a = Neg(x) b = Exp(a) y = Abs(b) z = Exp(y) }", "y", "b", [("Neg", "x", "a"), ("Exp", "a", "y"), ("Exp", "y", "z")]),
        ("{ y = Abs(x) z = Exp(y) }", "y", "x", [("Exp", "x", "z"), ("Identity", "x", "y")]),
        ("{ y = Abs(x) z = Exp(x) }", "y", "z", [("Exp", "x", "z"), ("Identity", "z", "y")]),
    ],
)
def test_an_output_keeps_its_declared_name(body: str, old: str, new: str, expected: list[tuple[str, str, str]]) -> None:
    editor, values = edited(MAIN + body)
    producer = values[old].producer
    assert producer is not None
    values[old].replace_all_uses_with(values[new])
    editor.main.remove(producer)
    editor.write()
    assert names(editor.model) == [(op, [x], [y]) for op, x, y in expected]


def test_two_outputs_that_exchange_their_values() -> None:
    editor, values = edited(MAIN + "{ y = Abs(x) z = Exp(y) }")
    editor.main.set_outputs([values["z"], values["y"]])
    editor.write()
    assert [o.name for o in editor.model.graph.output] == ["y", "z"]
    assert names(editor.model) == [("Abs", ["x"], ["z"]), ("Exp", ["z"], ["y"])]


def test_a_body_reads_the_value_that_replaces_another_one() -> None:
    editor, values = edited(TEXT)
    branch = values["y"].producer.bodies[0]  # type: ignore[union-attr]  # the If
    outer = editor.add(editor.main, "Neg", [values["x"]], before=values["y"].producer, like="b")
    assert outer.name == "b_1", "a name that a body defines is not free"
    values["a"].replace_all_uses_with(outer)
    assert branch.nodes[0].inputs[0] is not None and not values["a"].is_used
    editor.write()
    check_structure(ModelEditor(editor.model).main)
    (product, _) = editor.model.graph.node[2].attribute[0].g.node
    assert list(product.input) == ["b_1", "w"]


def test_a_branch_returns_a_value_of_the_graph_around_it() -> None:
    editor, values = edited(TEXT)
    branch = values["y"].producer.bodies[0]  # type: ignore[union-attr]  # the If
    branch.set_outputs([branch.capture(values["x"])])
    values["x"].replace_all_uses_with(values["w"])
    editor.write()
    assert editor.model.graph.node[1].attribute[0].g.output[0].name == "w"


def test_a_node_with_many_inputs() -> None:
    """Replacing an input takes constant time."""
    many = [f"x{i % 7}" for i in range(60_000)]
    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [1]) for i in range(7)]
    graph = helper.make_graph([helper.make_node("Sum", many, ["y"])], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    editor = ModelEditor(helper.make_model(graph))
    node, new = editor.main.nodes[0], Value("new")
    editor.main.insert(Node("Neg", [editor.main.inputs[0]], [new]), node)
    journal: Any = editor.record()
    for i in range(0, 60_000, 2):
        node.put(i, new)
    assert len(new.uses) == 30_000 and editor.main.inputs[1].users == {node: sum(i % 7 == 1 for i in range(1, 60_000, 2))}
    journal.undo()
    assert not new.uses and [v.name for v in node.inputs if v] == many
