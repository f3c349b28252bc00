"""Each rule of `rewriting` on both graphs: a model, and the graph of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, checker, numpy_helper, parser

from singa_backend import prepare
from singa_backend.ir.graph import Graph, Value
from singa_backend.ir.reader import read
from singa_backend.passes import ModelEditor, optimize
from singa_backend.passes.rewriter import ModelRewriter
from singa_backend.plans.flat import flat
from singa_backend.plans.fusion import fuse

F = np.float32
RULES = {
    "identity": "remove_identity",
    "constants": "fold_constants",
    "channels": "fold_batch_normalization",
}
"""The name of a rule in plans, and that of its pass."""


def model(text: str, opset: int = 18, **weights: Any) -> ModelProto:
    """A model of ONNX's text; `weights` are initializers, Python floats of float32."""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    for name, value in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(value, F if isinstance(value, float) else None), name))
    return made


def of_plan(source: ModelProto, rule: str) -> Counter[str]:
    """The operators of the plan of a model after one rule."""
    plan = flat(read(source))
    fuse(plan, 2, declared(plan), [rule])
    return Counter(node.op_type for node in plan.nodes)


def declared(plan: Graph) -> dict[Value, Any]:
    """The declared types of the inputs."""
    return {v: (v.declared.dtype, v.declared.shape) for v in plan.inputs if v.declared}


def of_model(source: ModelProto, rule: str) -> Counter[str]:
    """The operators of a model after the pass of a rule; results do not change."""
    made = ModelProto()
    made.CopyFrom(source)
    report = optimize(made, [RULES[rule], "remove_dead"])
    assert not report.failures and report.settled
    checker.check_model(made, full_check=True)
    feeds = [np.random.default_rng(0).standard_normal([d.dim_value or 2 for d in i.type.tensor_type.shape.dim]).astype(F)
             for i in source.graph.input]  # fmt: skip
    for a, b in zip(prepare(source).run(feeds), prepare(made).run(feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return Counter(node.op_type for node in made.graph.node)


ONE = (
    "y = Identity(x)", "y = Dropout(x)", "y = Cast<to = 1>(x)", "y = CastLike(x, z)", "y = Concat<axis = 0>(x)", "y = Sum(x)",
    "y = Mean(x)", "y = Max(x)", "y = Min(x)", "y = Add(x, negative)", "y = Sub(x, zero)", "y = Mul(one, x)", "y = Div(x, one)",
    "y = Pow(x, one)", "y = Transpose<perm = [0, 1]>(x)", "y = Slice(x, starts, ends)", "y = Slice(x, starts, large)",
    "y = Expand(x, last)", "y = Reshape(x, rest)", "y = Reshape(x, copies)", "y = Flatten(x)",
    "a = Unsqueeze(x, starts) y = Squeeze(a, starts)",
    "y = Unsqueeze(x, none)", "y = Tile(x, ones)", "y = Pad(x, zeros)", "y = Split<num_outputs = 1>(x)", "y = Clip(x)",
    "a = Reshape(x, flat) y = Reshape(a, rest)", "y = Gather(x, rows)", "y = Gather<axis = -1>(x, columns)",
)  # fmt: skip
KEPT = (
    "y = Cast<to = 10>(x)", "y = Add(x, zero)", "y = Sub(one, x)", "y = Div(one, x)", "y = Mul(x, wide)", "y = Clip(x, zero)",
    "y = Slice(x, second, ends)", "y = Transpose(x)", "y = Expand(x, wider)", "y = Tile(x, twice)", "y = Reshape(x, flat)",
    "y = Gather<axis = 1>(x, rows)", "y = Gather(x, turned)", "y = Gather(x, matrix)",
)  # fmt: skip
VALUES = {
    "one": 1.0, "zero": 0.0, "negative": -0.0, "wide": np.ones((1, 2, 3), F), "starts": np.array([0]), "ends": np.array([2]),
    "large": np.array([2**31 - 1]), "last": np.array([3]), "rest": np.array([-1, 3]), "copies": np.array([0, 3]),
    "none": np.array([], np.int64), "ones": np.array([1, 1]), "zeros": np.array([0, 0, 0, 0]), "flat": np.array([6]),
    "wider": np.array([4, 1, 1]), "twice": np.array([1, 2]), "second": np.array([1]),
    "rows": np.array([0, 1]), "columns": np.array([0, 1, 2], np.int32), "turned": np.array([1, 0]), "matrix": np.array([[0, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("body", ONE)
@pytest.mark.parametrize("run", [of_plan, of_model])
def test_identity_removes_what_returns_its_input(run: Any, body: str) -> None:
    read_ = {n: v for n, v in VALUES.items() if n in body}
    source = model(f"g (float[2,3] x, float[2,3] z) => (float[2,3] w) {{ {body} w = Relu(y) }}", **read_)
    found = run(source, "identity")
    assert found in ({"Relu": 1}, {"Relu": 1, "Unsqueeze": 1}, {"Relu": 1, "Reshape": 1})


@pytest.mark.parametrize("body", KEPT)
@pytest.mark.parametrize("run", [of_plan, of_model])
def test_identity_keeps_what_changes_a_value(run: Any, body: str) -> None:
    read_ = {n: v for n, v in VALUES.items() if n in body}
    source = model(f"g (float[2,3] x) => (int64[n] w) {{ {body} w = Shape(y) }}", **read_)
    assert run(source, "identity").total() == 2


LINEAR = {
    "w": np.random.default_rng(1).standard_normal((4, 3, 1, 1)).astype(F), "s": np.full(4, 2, F), "t": np.arange(4, dtype=F),
    "m": np.ones(4, F), "v": np.full(4, 0.5, F), "k": np.full((4, 1, 1), 3, F), "u": np.ones((3, 4), F),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "operators"),
    [
        ("a = Conv(x, w) y = BatchNormalization(a, s, t, m, v)", ["Conv"]),
        ("a = Conv(x, w, t) b = Mul(a, k) y = Sub(b, k)", ["Conv"]),
        ("a = Conv(x, w) b = Relu(a) y = Mul(b, k)", ["Conv", "Relu", "Mul"]),
    ],
)
@pytest.mark.parametrize("run", [of_plan, of_model])
def test_channels_folds_into_the_weight(run: Any, body: str, operators: Sequence[str]) -> None:
    source = model(
        f"g (float[2,3,2,2] x) => (float[a,b,c,d] y) {{ {body} }}", **{n: a for n, a in LINEAR.items() if f" {n}" in body}
    )
    assert run(source, "channels") == Counter(operators)


def test_a_model_folds_into_products_of_convolutions_and_gemm_only() -> None:
    source = model("g (float[2,3] x) => (float[a,b] y) { a = MatMul(x, u) y = Mul(a, s) }", u=LINEAR["u"], s=LINEAR["s"])
    assert of_plan(source, "channels") == {"MatMul": 1}
    assert of_model(source, "channels") == {"MatMul": 1, "Mul": 1}


@pytest.mark.parametrize(("constants", "trains"), [(False, True), (True, False)])
def test_a_folded_weight_is_trainable_if_what_it_was_computed_from_is(constants: bool, trains: bool) -> None:
    source = model("g (float[2,3,2,2] x) => (float[a,b,c,d] y) { a = Conv(x, w) y = Mul(a, k) }", w=LINEAR["w"], k=LINEAR["k"])
    if constants:
        for tensor in reversed(source.graph.initializer):
            node = source.graph.node.add(op_type="Constant", output=[tensor.name])
            node.attribute.add(name="value", type=4).t.CopyFrom(tensor)
        del source.graph.initializer[:]
        nodes = [*source.graph.node[2:], *source.graph.node[:2]]
        copies = [type(n).FromString(n.SerializeToString()) for n in nodes]
        del source.graph.node[:]
        source.graph.node.extend(copies)
    optimize(source, ["fold_batch_normalization", "remove_dead"])
    assert bool(source.graph.initializer) == trains
    assert [n.op_type for n in source.graph.node if n.op_type != "Constant"] == ["Conv"]


def test_a_folded_node_keeps_name_and_comment() -> None:
    source = model("g (float[2,3,2,2] x) => (float[a,b,c,d] y) { a = Conv(x, w) y = Mul(a, k) }", w=LINEAR["w"], k=LINEAR["k"])
    source.graph.node[0].name, source.graph.node[0].doc_string = "first", "as exported"
    optimize(source, ["fold_batch_normalization"])
    (node,) = source.graph.node
    assert (node.name, node.doc_string, list(node.output)) == ("first", "as exported", ["y"])


@pytest.mark.parametrize(("opset", "attribute"), [(11, True), (13, False)])
def test_a_call_is_written_in_the_form_of_the_opset(opset: int, attribute: bool) -> None:
    source = model("g (float[2,3] x) => (float y) { y = Relu(x) }", opset, axes=np.array([0]))
    edit = ModelEditor(source)
    rewriter = ModelRewriter(edit, edit.main)
    (relu,) = rewriter.named("Relu")
    before = rewriter.call("Unsqueeze", [relu.inputs[0], edit.main.initializers["axes"]], [relu])
    assert rewriter.put(relu, before, rewriter.call("Relu", before.outputs, [relu], relu.outputs))
    edit.write()
    unsqueeze, relu_ = source.graph.node
    assert (len(unsqueeze.attribute), len(unsqueeze.input)) == ((1, 1) if attribute else (0, 2))
    assert list(relu_.output) == ["y"]


@pytest.mark.parametrize(("opset", "operator"), [(18, "Gelu"), (6, "Add")])
def test_put_refuses_what_the_opset_lacks(opset: int, operator: str) -> None:
    edit = ModelEditor(model("g (float[2,3] x) => (float y) { y = Relu(x) }", opset))
    rewriter = ModelRewriter(edit, edit.main)
    (relu,) = rewriter.named("Relu")
    inputs = relu.inputs * (1 if operator == "Gelu" else 2)
    assert not rewriter.put(relu, rewriter.call(operator, inputs, [relu], relu.outputs))
    assert edit.main.nodes == (relu,)


PAIRS = [
    ("a = Transpose<perm = [1, 0, 2]>(x) y = Transpose<perm = [0, 2, 1]>(a)", "transposes", ["Transpose"], 18),
    ("a = Pad(p, pads) y = Conv(a, w)", "padding", ["Conv"], 18),
    ("a = Pad<pads = [0,0,1,1,0,0,1,1]>(p) y = Conv<auto_pad = \"VALID\">(a, w)", "padding", ["Conv"], 10),
    ("a = Pad(p, sides) y = Conv(a, w)", "padding", ["Pad", "Conv"], 18),
    ("a = Reshape(x, flat) y = Reshape(a, rest)", "reshapes", ["Reshape"], 18),
    ("a = Reshape(x, split) y = Reshape(a, copies)", "reshapes", ["Reshape"], 18),
    ("a = Reshape<shape = [6, 4]>(x) y = Reshape<shape = [4, 6]>(a)", "reshapes", ["Reshape"], 4),
]  # fmt: skip
SIZES = {
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "sides": np.array([1, 0, 0, 0, 0, 0, 0, 0]), "flat": np.array([24]),
    "rest": np.array([4, -1]), "split": np.array([6, 4]), "copies": np.array([0, 2, -1]), "w": np.ones((4, 3, 1, 1), F),
}  # fmt: skip


@pytest.mark.parametrize(("body", "rule", "operators", "opset"), PAIRS)
def test_two_successive_calls_become_one(body: str, rule: str, operators: list[str], opset: int) -> None:
    read_ = {n: v for n, v in SIZES.items() if f" {n}" in body and f"{n} =" not in body}
    rank = 4 if "Conv" in body else 3 if "Transpose" in body or "copies" in body else 2
    text = f"g (float[2,3,4] x, float[2,3,2,2] p) => (float[{','.join('abcd'[:rank])}] y) {{ {body} }}"
    found = model(text, opset, **read_)
    graph = read(found)
    plan = flat(graph)
    fuse(plan, 2, declared(plan), [rule])
    assert [node.op_type for node in plan.nodes] == operators or opset < 5  # a plan leaves Reshapes by an attribute
    feeds = [np.arange(24, dtype=F).reshape(2, 3, 4), np.arange(24, dtype=F).reshape(2, 3, 2, 2)]
    before = prepare(found).run(feeds)
    optimize(found, ["remove_back_to_back"])
    checker.check_model(found, full_check=True)
    assert [n.op_type for n in found.graph.node] == operators
    np.testing.assert_array_equal(prepare(found).run(feeds)[0], before[0])


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("s = Shape(x) t = Gather(s, place) y = Unsqueeze(t, starts)", 0),
        ("s = Shape(x) y = Mul(s, s)", 0),
        ("s = Shape<start = -1>(x) t = Squeeze(s) u = Cast<to = 6>(t) v = Cast<to = 7>(u) y = Unsqueeze(v, starts)", 0),
        ("s = Shape(x) y = Concat<axis = 0>(s, last)", 0),
        ("s = Shape(x) y = Slice(s, starts, second)", 0),
        ("s = Size(x) y = Reshape(s, ones)", 0),
        ("s = Shape(n) y = Concat<axis = 0>(s, last)", 2),
    ],
)
def test_known_sizes_become_constants_in_both_graphs(body: str, left: int) -> None:
    values = {**VALUES, "place": np.array(1), "ones": np.array([1])}
    read_ = {n: v for n, v in values.items() if f"{n})" in body or f"{n}," in body}
    source = model(f"g (float[2,3] x, float[k,3] n) => (int64[a] z) {{ {body} z = Add(y, y) }}", **read_)
    graph = read(source)
    plan = flat(graph)
    fuse(plan, 2, declared(plan), ["sizes"])
    assert len(plan.nodes) in (left, left + 1)  # an output is a constant of a plan
    feeds = [np.ones((2, 3), F), np.ones((4, 3), F)]
    before = prepare(source).run(feeds)[0]
    optimize(source, ["simplify_shapes"])
    assert len(source.graph.node) == left + 1
    np.testing.assert_array_equal(prepare(source).run(feeds)[0], before)
