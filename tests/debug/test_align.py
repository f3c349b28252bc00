"""Alignment of two models whose values have other names: what is matched, what a fault is called, and what is not compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import debug
from singa_backend.comparison.difference import Tolerance
from singa_backend.debug.align import scope_of
from singa_backend.debug.sketch import arranged, further

MODELS = Path(__file__).parents[1] / "models"
PAIRS = [("script-17", "dynamo-18"), ("dynamo-18", "script-17")]
NETS = ("bert", "gpt2", "mobilenetv2", "vit")


def inputs(net: str) -> list[np.ndarray]:
    with np.load(MODELS / f"{net}.npz") as arrays:
        return [arrays[k] for k in sorted(arrays.files) if k.startswith("x0_")]


def sonnx(*words: object) -> Any:
    return CliRunner().invoke(main, [str(w) for w in words])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_two_exports_of_one_net_agree(net: str, mine: str, theirs: str) -> None:
    found = debug.compare(MODELS / f"{net}-{mine}.onnx", inputs(net), against=MODELS / f"{net}-{theirs}.onnx")
    assert found.agrees and found.first is None and found.alignment is not None
    matched, nodes = found.alignment.matched, found.alignment.nodes
    assert found.alignment.draws == 3 and all(m >= 0.9 * n for m, n in zip(matched, nodes, strict=True))
    assert {r.value for r in found.rows} <= found.alignment.pairs.keys() and not found.alignment.culprits


def node_of(model: ModelProto, operator: str, which: int = 0) -> Any:
    return [n for n in model.graph.node if n.op_type == operator][which]


def set_attribute(node: Any, name: str, value: Any) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def weight(model: ModelProto) -> set[str]:
    node = node_of(model, "LayerNormalization", 2)
    tensor = next(t for t in model.graph.initializer if t.name == node.input[1])
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))
    return {node.output[0]}


def attribute(model: ModelProto) -> set[str]:
    node = node_of(model, "Softmax", 1)
    set_attribute(node, "axis", 1)
    return {node.output[0]}


def dropped(model: ModelProto) -> set[str]:
    node = node_of(model, "LayerNormalization", 1)
    readers = [n for n in model.graph.node if node.output[0] in n.input]
    for reader in readers:
        reader.input[:] = [node.input[0] if n == node.output[0] else n for n in reader.input]
    model.graph.node.remove(node)
    return {n.output[0] for n in readers}


def swapped(model: ModelProto) -> set[str]:
    node = node_of(model, "Add", -1)
    node.input[0] = node.input[1]
    return {node.output[0]}


@pytest.mark.parametrize("fault", [weight, attribute, dropped, swapped])
@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_a_planted_fault_is_named_across_exporters(fault: Any, mine: str, theirs: str) -> None:
    model = onnx.load(MODELS / f"gpt2-{mine}.onnx")
    wrong = fault(model)
    found = debug.compare(model, inputs("gpt2"), against=MODELS / f"gpt2-{theirs}.onnx")
    first = found.first
    assert first is not None and first.inputs_agreed and set(first.values) & wrong, (first, wrong)
    assert not found.agrees and any(" in the other model" in note for note in first.notes)


# --- small nets -----------------------------------------------------------------------------------------------------------

X = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}


def net(body: str, names: str = "wv", scale: float = 1.0) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[3,4] x) => (float[3,4] y) {{ {body} }}')
    rng = np.random.default_rng(0)
    for name in names:
        value = (rng.standard_normal((4, 4)) * (scale if name == names[-1] else 1)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


PLAIN = "a = MatMul(x, w) b = Tanh(a) c = MatMul(b, v) d = Sigmoid(c) y = Neg(d)"
OTHER = "p = MatMul(x, k) q = Tanh(p) i = Identity(q) r = MatMul(i, l) s = Sigmoid(r) y = Neg(s)"


def test_equal_values_of_other_names_are_paired() -> None:
    found = debug.compare(net(PLAIN), X, against=net(OTHER, "kl"))
    assert found.agrees and found.alignment is not None and not found.alignment.gaps
    assert {a: p.other for a, p in found.alignment.pairs.items()} == {
        "x": "x", "a": "p", "b": "q", "c": "r", "d": "s", "y": "y"
    }  # fmt: skip
    assert found.alignment.matched == (5, 6) and found.alignment.nodes == (5, 6)


def test_names_that_mean_other_values_are_not_paired() -> None:
    other = "c = MatMul(x, k) a = Tanh(c) b = MatMul(a, l) d = Sigmoid(b) y = Neg(d)"
    found = debug.compare(net(PLAIN), X, against=net(other, "kl"))
    assert found.agrees and found.alignment is not None
    assert {a: found.alignment.pairs[a].other for a in "abcd"} == {"a": "c", "b": "a", "c": "b", "d": "d"}
    assert not debug.compare(net(PLAIN), X, against=net(other, "kl"), align=False).agrees


def test_what_only_one_model_computes_is_not_a_difference() -> None:
    fused = "p = MatMul(x, k) q = Tanh(p) r = MatMul(q, l) s = Neg(r) e = Exp(s) t = Add(e, one) u = Div(one, t) y = Neg(u)"
    model = net(fused, "kl")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((), np.float32), "one"))
    found = debug.compare(model, X, against=net(PLAIN))
    assert found.agrees and found.alignment is not None
    assert [str(g) for g in found.alignment.gaps] == ["between r and u: 3 nodes unmatched"]


def test_a_layout_is_another_arrangement_of_equal_values() -> None:
    turned = "p = MatMul(x, k) t = Transpose<perm=[1,0]>(p) q = Tanh(t) u = Transpose<perm=[1,0]>(q) r = MatMul(u, l)"
    found = debug.compare(net(f"{turned} s = Sigmoid(r) y = Neg(s)", "kl"), X, against=net(PLAIN))
    assert found.agrees and found.alignment is not None and not found.alignment.gaps
    pair = found.alignment.pairs["q"]
    assert pair.other == "b" and pair.layout is not None and pair.layout.axes == (1, 0)


def test_a_fault_in_a_node_that_the_other_model_splits_names_all_nodes_that_may_be_it() -> None:
    whole = "p = Gemm(x, k, e) q = Tanh(p) r = MatMul(q, l) s = Sigmoid(r) y = Neg(s)"
    parts = "a0 = MatMul(x, w) a = Add(a0, e) b = Tanh(a) c = MatMul(b, v) d = Sigmoid(c) y = Neg(d)"
    models = net(parts), net(whole, "kl")
    for model in models:
        model.graph.initializer.append(numpy_helper.from_array(np.arange(4, dtype=np.float32), "e"))
    assert debug.compare(models[0], X, against=models[1]).agrees
    changed = numpy_helper.to_array(models[0].graph.initializer[0]).copy()
    changed[0] += 1
    models[0].graph.initializer[0].CopyFrom(numpy_helper.from_array(changed, "w"))
    first = debug.compare(models[0], X, against=models[1]).first
    assert first is not None and (first.operator, first.inputs_agreed, first.among) == ("Add", None, 2)


def test_two_faults_are_found_one_after_the_other() -> None:
    long = "a = MatMul(x, w) b = Tanh(a) c = Sigmoid(b) d = MatMul(c, v) e = Tanh(d) f = Sigmoid(e) y = Neg(f)"
    other = "k = MatMul(x, p) l = Sin(k) m = Sigmoid(l) n = MatMul(m, q) o = Tanh(n) r = Sigmoid(o) y = Exp(r)"
    found = debug.compare(net(long), X, against=net(other, "pq"))
    assert found.first is not None and found.first.inputs_agreed and found.first.values == ["b"]
    assert found.alignment is not None and found.alignment.culprits == {"b": "l"}


def test_the_user_s_pairs_are_kept() -> None:
    found = debug.compare(net(PLAIN), X, against=net(OTHER, "kl"), names={"a": "q"})
    assert found.first is not None and found.first.values == ["a"] and found.alignment is not None
    assert found.alignment.pairs["a"].how == "given"


def test_bisect_writes_the_node_across_names(tmp_path: Path) -> None:
    found = debug.bisect(net(PLAIN, scale=1.1), X, against=net(OTHER, "kl"), to=tmp_path)
    assert found is not None and found.alone and found.node.operator == "MatMul" and found.node.values == ["c"]
    assert [n.op_type for n in onnx.load(tmp_path / "model.onnx").graph.node] == ["MatMul"]


def test_the_command_tells_how_much_was_matched(tmp_path: Path) -> None:
    onnx.save(net(PLAIN), tmp_path / "a.onnx")
    onnx.save(net(OTHER, "kl"), tmp_path / "b.onnx")
    found = sonnx("compare", tmp_path / "a.onnx", "--against", tmp_path / "b.onnx")
    assert found.exit_code == 0, found.output
    assert "5 of 5 nodes matched with 6 of 6 nodes of the other model, on 3 draws of inputs" in found.stdout
    assert sonnx("compare", tmp_path / "a.onnx", "--against", tmp_path / "b.onnx", "--no-align").exit_code == 0


# --- nodes that only one model has, twice -----------------------------------------------------------------------------------

SCALED = """
    {0} = MatMul({x}, {w}) s{0} = Shape({0}) g{0} = Gather(s{0}, last) f{0} = Cast<to=1>(g{0}) r{0} = Pow(f{0}, half)
    t{0} = Div({0}, r{0}) q{0} = Tanh(t{0}) m{0} = Mul(q{0}, q{0}) n{0} = Mul(q{0}, m{0}) z{0} = Sigmoid(n{0})
"""
STORED = """
    {0} = MatMul({x}, {w}) t{0} = Div({0}, root) q{0} = Tanh(t{0}) n{0} = Pow(q{0}, three) z{0} = Sigmoid(n{0})
"""


def with_constants(body: str, names: str) -> ModelProto:
    model = net(body, names)
    for name, value in (("last", np.int64(1)), ("half", np.float32(0.5)), ("root", np.float32(2)), ("three", np.float32(3))):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    return model


def layers(one: str, names: str, inner: str, another: str | None = None) -> ModelProto:
    first = one.format(inner[0], x="x", w=names[0])
    second = (another or one).format(inner[1], x=f"z{inner[0]}", w=names[1])
    return with_constants(f"{first} {second} y = Neg(z{inner[1]})", names)


@pytest.mark.parametrize(("right", "wrong", "node"), [
    ("Pow(f{0}, half)", "Pow(half, f{0})", "rb"), ("Gather(s{0}, last)", "Gather<axis=0>(s{0}, zero)", "gb"),
    ("Div({0}, r{0})", "Div({0}, f{0})", "tb"), ("m{0} = Mul(q{0}, q{0})", "m{0} = Mul(q{0}, t{0})", "mb"),
    ("n{0} = Mul(q{0}, m{0})", "n{0} = Mul(t{0}, m{0})", "nb"), ("{0} = MatMul({x}, {w})", "{0} = MatMul({w}, {x})", "b"),
])  # fmt: skip
@pytest.mark.parametrize("first", [False, True])
def test_a_node_without_a_partner_is_judged_by_the_same_nodes_of_another_layer(
    right: str, wrong: str, node: str, first: bool, tmp_path: Path
) -> None:  # fmt: skip
    other = layers(STORED, "kl", "cd")
    assert debug.compare(layers(SCALED, "wv", "ab"), X, against=other).agrees
    changed = SCALED.replace(right, wrong).replace("MatMul({w}, {x})", "MatMul({x}, half4)")
    assert changed != SCALED
    model = layers(changed, "wv", "ba", SCALED) if first else layers(SCALED, "wv", "ab", changed)
    rng = np.random.default_rng(3)
    for name, value in (("zero", np.int64(0)), ("half4", rng.standard_normal((4, 4)).astype(np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    found = debug.compare(model, X, against=other)
    assert found.first is not None and found.first.inputs_agreed, found.first
    assert found.first.values == [node], found.first
    written = debug.bisect(model, X, against=other, to=tmp_path)
    assert written is not None and written.alone and written.node.values == [node]
    nodes = [o for n in onnx.load(tmp_path / "model.onnx").graph.node for o in n.output]
    assert node in nodes and len(nodes) < len(model.graph.node) // 2


def test_a_node_without_a_partner_and_without_another_layer_is_one_of_several() -> None:
    models = [with_constants(f"{one.format('a', x='x', w='w')} y = Neg(za)", "w") for one in (SCALED, STORED)]
    assert debug.compare(models[0], X, against=models[1]).agrees
    node = node_of(models[0], "Pow")
    node.input[0], node.input[1] = node.input[1], node.input[0]
    first = debug.compare(models[0], X, against=models[1]).first
    assert first is not None and first.inputs_agreed is None and first.operator == "Div" and first.among > 2 and not first.like


def with_layouts(body: str) -> ModelProto:
    model = net(body, "wv")
    rng = np.random.default_rng(5)
    bias = rng.standard_normal((4, 3)).astype(np.float32)
    for name, value in (("table", bias), ("bias", np.ascontiguousarray(bias.T)), ("zeros", np.zeros((3, 4), np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


TURNED = "a = MatMul(x, w) i = Identity(table) t = Transpose<perm=[1, 0]>(i) b = Add(a, t) c = Tanh(b) d = Sigmoid(c) y = Neg(d)"
READY = "p = MatMul(x, w) q = Add(p, bias) r = Tanh(q) s = Sigmoid(r) y = Neg(s)"


def test_a_constant_that_the_other_model_stores_in_another_layout_names_the_node_that_turns_it() -> None:
    models = with_layouts(TURNED), with_layouts(READY)
    assert debug.compare(models[0], X, against=models[1]).agrees
    node = node_of(models[0], "Transpose")
    node.op_type, node.input[:] = "Reshape", ["i", "shape"]  # 4 x 3 elements as 3 x 4: not turned
    del node.attribute[:]
    models[0].graph.initializer.append(numpy_helper.from_array(np.array([3, 4]), "shape"))
    first = debug.compare(models[0], X, against=models[1]).first
    assert first is not None and first.inputs_agreed and first.values == ["t"], first


def test_a_value_read_in_another_layout_names_the_node_that_turns_it() -> None:
    turned = (
        "a = MatMul(x, w) t = Transpose<perm=[1, 0]>(a) b = Tanh(t) m = Mul(b, b) n = Mul(b, m) u = Transpose<perm=[1, 0]>(n)"
    )
    other = turned.replace("m = Mul(b, b) n = Mul(b, m)", "n = Pow(b, three)")
    square = {"x": np.random.default_rng(2).standard_normal((4, 4)).astype(np.float32)}
    models = [with_constants(f"{body} z = Add(u, x) s = Sigmoid(z) y = Neg(s)", "wv") for body in (turned, other)]
    for model in models:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 4
    assert debug.compare(models[0], square, against=models[1]).agrees
    set_attribute(node_of(models[0], "Transpose"), "perm", [0, 1])
    first = debug.compare(models[0], square, against=models[1]).first
    assert first is not None and first.inputs_agreed and first.values == ["t"], first


def test_zeros_read_in_place_of_a_value_do_not_agree_with_the_zeros_of_the_other_model() -> None:
    body = (
        "a = MatMul(x, w) o = Identity(zeros) b = Add(a, o) t = Tanh({}) n = MatMul(t, v) s = Sigmoid(n) z = Add(s, b) y = Neg(z)"
    )
    other = with_layouts(body.format("b").replace("a =", "k =").replace("(a,", "(k,"))
    assert debug.compare(with_layouts(body.format("b")), X, against=other).agrees
    first = debug.compare(with_layouts(body.format("o")), X, against=other).first
    assert first is not None and first.inputs_agreed and first.values == ["t"], first


# --- parts ----------------------------------------------------------------------------------------------------------------


def test_layouts_are_found_and_verified() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    for y in (x.transpose(0, 2, 3, 1), x.reshape(6, 20), x.transpose(0, 2, 1, 3).reshape(2, 4, 15), x[None]):
        for a, b in ((x, y), (y, x)):
            found = arranged(a, b, Tolerance())
            assert found is not None and np.array_equal(found[0].apply(b) if found[0] else b, a)
    assert arranged(x, x[:, ::-1], Tolerance()) is None


def test_further_inputs_stay_valid() -> None:
    given = {"ids": np.array([[3, 9, 4, 7]]), "mask": np.ones((2, 8), bool), "x": np.ones((4, 4), np.float32), "s": ["a"]}
    made = further(given, 1)
    assert sorted(made["ids"][0]) == [3, 4, 7, 9] and made["mask"].dtype == bool and not (made["x"] == 1).all()
    assert made["s"] == ["a"] and further(given, 1)["x"].tobytes() == made["x"].tobytes()


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("/layers.0/feed/feed.2/MatMul", "layers.0.feed.2"),
        ("/blocks/blocks.0/body/body.5/Clip", "blocks.0.body.5"),
        ("Add_3", ""),
    ],
)
def test_the_scope_of_a_node(name: str, scope: str) -> None:
    model = net("y = Neg(x)", "")
    model.graph.node[0].name = name
    assert scope_of(debug.ComparedModel(model).graph.nodes[0]) == scope


def chain(count: int, prefix: str) -> ModelProto:
    """x -> (MatMul, Tanh, Mul, Add) * count / 4 -> y."""
    rng, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    for i in range(count // 4):
        names = [f"{prefix}{letter}{i}" for letter in "abcd"]
        weights.append(numpy_helper.from_array((rng.standard_normal((8, 8)) / 3).astype(np.float32), f"{prefix}w{i}"))
        nodes += [helper.make_node("MatMul", [x, f"{prefix}w{i}"], names[:1]), helper.make_node("Tanh", names[:1], names[1:2]),
                  helper.make_node("Mul", names[1:2] * 2, names[2:3]),
                  helper.make_node("Add", [names[2], x], names[3:])]  # fmt: skip
        x = names[3]
    nodes.append(helper.make_node("Tanh", [x], ["y"]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 8]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_chain_of_many_nodes_is_matched() -> None:
    x = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    found = debug.compare(chain(600, "m"), x, against=chain(600, "t"))
    assert (
        found.agrees
        and found.alignment is not None
        and found.alignment.matched == found.alignment.nodes
        and found.alignment.nodes[0] > 400
    )


# --- saved values ---------------------------------------------------------------------------------------------------------


def test_bisect_narrows_saved_values_to_the_region_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(net(PLAIN), "net.onnx")
    run = sonnx(
        "run", "net.onnx", "--random", 0, "--aux", "b", "--aux", "d", "--save-inputs", "in.npz", "--save-outputs", "out.npz"
    )
    assert run.exit_code == 0, run.output
    found = sonnx("bisect", "net.onnx", "--inputs", "in.npz", "--against", "out.npz")
    assert found.exit_code == 0 and "no node diverges" in found.stdout
    values = dict(np.load("out.npz"))
    np.savez("device.npz", **(values | {"d": values["d"] + 1, "y": values["y"] + 1}))
    found = sonnx("bisect", "net.onnx", "--inputs", "in.npz", "--against", "device.npz", "--to", "part")
    assert found.exit_code == 1 and "first value that differs, of Sigmoid" in found.stdout
    assert "one of 2 nodes is the cause" in found.stdout and "more values in the file narrow them down" in found.stdout
    part = onnx.load("part/model.onnx")
    assert [n.op_type for n in part.graph.node] == ["MatMul", "Sigmoid"] and [i.name for i in part.graph.input] == ["b"]
    fed = numpy_helper.to_array(onnx.load_tensor("part/test_data_set_0/input_0.pb"))
    np.testing.assert_array_equal(fed, values["b"])
    assert "reproduces alone: yes" in found.stdout


def test_without_pytorch_the_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from singa_backend import MissingDependency
    from singa_backend.debug import torch_module

    monkeypatch.setattr(torch_module, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="torch is not installed"):
        debug.compare(net(PLAIN), X, against="torch:nets:make")
