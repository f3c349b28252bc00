"""Each pass by itself: what it takes away, what it must leave, both forms of what changed its form."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from tests.helpers.paths import TESTS

from singa._onnx.model import SONNXModel
from singa.cli import main
from singa_backend import InvalidInput, InvalidModel, OperatorError, SingaBackend, passes
from singa_backend.conform import foreign
from singa_backend.engines.oracle import Oracle
from singa_backend.passes import PASSES, Graph, ModelEditor, Pass, Value, optimize
from singa_backend.passes.shapes import constant_target

F, I = np.float32, np.int64  # noqa: E741
MODELS = {m.name: m for m in foreign.stored(TESTS / "models")}
X4 = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(F)


def read(text: str, opset: int = 17, ir: int = 8, **weights: Any) -> ModelProto:
    """A model of ONNX's text; `weights` are initializers."""
    model = parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items())
    return model


def ops(model: ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if n.op_type != "Constant"]


def run(model: ModelProto, *inputs: Any) -> list[np.ndarray]:
    return list(SingaBackend.prepare(model, optimize=0).run(list(inputs)))


def held(model: ModelProto, names: list[str] | None, *inputs: Any, rtol: float = 0.0, full: bool = True) -> list[str]:
    """Optimize; the same results to the bit (or `rtol`), the same names, nothing more to do; what operators are left."""
    before = run(model, *inputs)
    ends = [[v.name for v in values] for values in (model.graph.input, model.graph.output)]
    report = optimize(model, names)
    assert not report.failures and report.settled, str(report)
    onnx.checker.check_model(model, full_check=full)
    for a, b in zip(before, run(model, *inputs), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if rtol:
            np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol * float(np.abs(a).max(initial=0)))
        else:
            np.testing.assert_array_equal(b, a)
            assert a.dtype.kind != "f" or (np.signbit(a) == np.signbit(b)).all()
    assert ends == [[v.name for v in values] for values in (model.graph.input, model.graph.output)]
    assert optimize(model, names).changes == 0
    return ops(model)


# --- remove_identity


def alone(node: str, opset: int = 17, shape: str = "2,3,4,5", out: str = "", **weights: Any) -> ModelProto:
    """x -> Neg -> the node -> Abs -> y."""
    return read(f"g (float[{shape}] x) => (float[{out or shape}] y) {{ a = Neg(x) b = {node} y = Abs(b) }}", opset, **weights)


@pytest.mark.row("O4")
@pytest.mark.parametrize(
    ("node", "opset", "weights"),
    [
        ("Identity(a)", 17, {}),
        ("Dropout(a)", 7, {}),
        ("Dropout(a)", 10, {}),
        ("Dropout(a, r)", 13, {"r": F(0.5)}),
        ("Dropout(a, r, t)", 13, {"r": F(0.5), "t": np.bool_(False)}),
        ("Cast<to = 1>(a)", 13, {}),
        ("CastLike(a, x)", 15, {}),
        ("Transpose<perm = [0, 1, 2, 3]>(a)", 17, {}),
        ("Reshape(a, s)", 17, {"s": np.array([2, 3, 4, 5])}),
        ("Reshape(a, s)", 17, {"s": np.array([0, -1, 0, 5])}),
        ("Unsqueeze(a, s)", 13, {"s": np.zeros(0, I)}),
        ("Squeeze(a)", 13, {}),
        ("Expand(a, s)", 13, {"s": np.array([4, 1])}),
        ("Tile(a, s)", 13, {"s": np.ones(4, I)}),
        ("Pad<pads = [0, 0, 0, 0, 0, 0, 0, 0]>(a)", 10, {}),
        ("Pad(a, s)", 13, {"s": np.zeros(8, I)}),
        ("Slice<axes = [1], starts = [0], ends = [3]>(a)", 9, {}),
        ("Slice(a, s, e)", 13, {"s": np.zeros(2, I), "e": np.array([2, 2**63 - 1])}),
        ("Gather<axis = 2>(a, s)", 13, {"s": np.arange(4)}),
        ("Concat<axis = 1>(a)", 17, {}),
        ("Sum(a)", 17, {}),
        ("Split<axis = 1>(a)", 13, {}),
        ("Clip(a)", 13, {}),
        ("Mul(a, s)", 17, {"s": F(1)}),
        ("Mul(s, a)", 17, {"s": np.ones((3, 1, 1), F)}),
        ("Div(a, s)", 17, {"s": np.ones((1, 1), F)}),
        ("Sub(a, s)", 17, {"s": F(0.0)}),
        ("Add(a, s)", 17, {"s": F(-0.0)}),
    ],
)
def test_an_identity_goes(node: str, opset: int, weights: dict[str, Any]) -> None:
    x = X4.copy()
    x[0, 0, 0] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    assert held(alone(node, opset, **weights), ["remove_identity"], x) == ["Neg", "Abs"]


@pytest.mark.parametrize(
    ("node", "opset", "weights", "out"),
    [
        ("Dropout(a, r, t)", 13, {"r": F(0), "t": np.bool_(True)}, ""),
        ("Transpose<perm = [0, 1, 3, 2]>(a)", 17, {}, "2,3,5,4"),
        ("Reshape(a, s)", 17, {"s": np.array([3, 2, 4, 5])}, "3,2,4,5"),
        ("Expand(a, s)", 13, {"s": np.array([1, 2, 3, 4, 5])}, "1,2,3,4,5"),
        ("Pad(a, s)", 13, {"s": np.array([0, 0, 0, 0, 0, 0, 0, 1])}, "2,3,4,6"),
        ("Slice(a, s, e)", 13, {"s": np.array([0]), "e": np.array([1])}, "1,3,4,5"),
        ("Gather<axis = 1>(a, s)", 13, {"s": np.array([0, 2, 1])}, ""),
        ("Gather<axis = 1>(a, s)", 13, {"s": np.arange(2)}, "2,2,4,5"),
        ("Clip(a)", 6, {}, ""),  # its bounds have defaults, which an infinity does not pass
        ("Add(a, s)", 17, {"s": F(0.0)}, ""),  # -0.0 + 0.0 is 0.0
        ("Sub(a, s)", 17, {"s": F(-0.0)}, ""),
        ("Mul(a, s)", 17, {"s": F(0)}, ""),
        ("Mul(a, s)", 17, {"s": np.ones((1, 1, 1, 1, 1), F)}, "1,2,3,4,5"),
        ("Div(s, a)", 17, {"s": F(1)}, ""),
    ],
)
def test_what_only_looks_like_an_identity_stays(node: str, opset: int, weights: dict[str, Any], out: str) -> None:
    x = X4.copy()
    x[0, 0, 0] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    model = read(f"g (float[2,3,4,5] x) => (float[{out or '2,3,4,5'}] y) {{ a = Identity(x) y = {node} }}", opset, **weights)
    assert held(model, ["remove_identity"], x) == [node.split("(")[0].split("<")[0]]


@pytest.mark.row("O4")
def test_names_of_outputs_survive() -> None:
    x = np.array([1.0, -2.0], F)
    assert held(read("g (float[2] x) => (float[2] y) { a = Neg(x) y = Identity(a) }"), ["remove_identity"], x) == ["Neg"]
    model = read("g (float[2] x) => (float[2] y, float[2] z) { y = Identity(x) a = Neg(x) z = Identity(a) }")
    assert held(model, ["remove_identity"], x) == ["Identity", "Neg"], "between an input and an output it stays"
    model = read("g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x) z = Identity(y) }")
    assert held(model, ["remove_identity"], x) == ["Neg", "Identity"], "one value, two outputs"
    model = read("g (float[2] x) => (float[2] y) { y = Transpose<perm = [0]>(x) }")
    assert held(model, ["remove_identity"], x) == ["Identity"]


@pytest.mark.row("O4")
def test_values_that_subgraphs_capture_are_used() -> None:
    text = """g (bool c, float[2] x) => (float[2] y) {
        a = Neg(x) b = Identity(a) d = Exp(x)
        y = If(c) <then_branch = t () => (float[2] p) { q = Identity(b) p = Add(q, d) }, else_branch = e () => (float[2] r)
            { r = Identity(b) }>
    }"""
    for names in (None, ["remove_identity"], ["remove_dead"], ["merge_duplicates"]):
        model = read(text)
        for c in (True, False):
            assert np.asarray(run(model, np.array(c), np.array([1, 2], F))[0]).shape == (2,)
        held(model, names, np.array(True), np.array([1, 2], F))
        assert "Exp" in ops(model)
    assert [n.op_type for n in model.graph.node if n.op_type == "Identity"] == ["Identity"]


# --- remove_back_to_back


@pytest.mark.row("O6")
@pytest.mark.parametrize(
    ("nodes", "opset", "weights", "left"),
    [
        ("b = Transpose<perm = [0, 2, 1, 3]>(a) c = Transpose<perm = [0, 1, 3, 2]>(b)", 17, {}, ["Transpose"]),
        ("b = Transpose<perm = [2, 0, 1, 3]>(a) c = Transpose<perm = [1, 2, 0, 3]>(b)", 17, {}, []),
        ("b = Transpose(a) c = Transpose(b)", 17, {}, []),
        ("b = Reshape(a, s) c = Reshape(b, t)", 17, {"s": np.array([6, 20]), "t": np.array([24, -1])}, ["Reshape"]),
        ("b = Reshape(a, s) c = Reshape(b, t)", 17, {"s": np.array([6, 20]), "t": np.array([0, 4, 5])}, ["Reshape"]),
        ("b = Flatten<axis = 2>(a) c = Reshape(b, t)", 17, {"t": np.array([24, 5])}, ["Reshape"]),
        ("b = Unsqueeze<axes = [0, 2]>(a) c = Squeeze<axes = [0, 2]>(b)", 11, {}, []),
        ("b = Unsqueeze(a, s) c = Squeeze(b, s)", 13, {"s": np.array([0, 2])}, []),
        ("b = Unsqueeze(a, s) c = Squeeze(b, t)", 13, {"s": np.array([0, 2]), "t": np.array([-6, -4])}, []),
        ("b = Unsqueeze(a, s) c = Squeeze(b, t)", 13, {"s": np.array([0, 2]), "t": np.array([0])}, ["Unsqueeze", "Squeeze"]),
        ("b = Unsqueeze<axes = [1]>(a) c = Unsqueeze<axes = [0, 3]>(b)", 11, {}, ["Unsqueeze"]),
        ("b = Unsqueeze(a, s) c = Unsqueeze(b, t)", 13, {"s": np.array([-1]), "t": np.array([-2, 0])}, ["Unsqueeze"]),
        ("b = Cast<to = 11>(a) c = Cast<to = 1>(b)", 13, {}, ["Cast"]),
        ("b = Cast<to = 10>(a) c = Cast<to = 1>(b)", 13, {}, ["Cast", "Cast"]),  # float16 loses digits
        ("b = Cast<to = 7>(a) c = Cast<to = 1>(b)", 13, {}, ["Cast", "Cast"]),
        ("b = Relu(a) c = Relu(b)", 13, {}, ["Relu"]),
        ("b = Floor(a) c = Floor(b)", 13, {}, ["Floor"]),
        ("b = Neg(a) c = Neg(b)", 13, {}, []),
    ],
)
def test_back_to_back(nodes: str, opset: int, weights: dict[str, Any], left: list[str]) -> None:
    text = f"g (float[2,3,4,5] x) => (float y) {{ a = Exp(x) {nodes} y = Sqrt(c) }}"
    model = read(text, opset, **weights)
    rank = run(model, X4)[0].ndim
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank))
    assert held(model, ["remove_back_to_back", "remove_dead"], X4) == ["Exp", *left, "Sqrt"]


@pytest.mark.row("O2")
def test_two_transposes_compose_in_order() -> None:
    """(0,2,1,3) then (0,1,3,2) is (0,2,3,1)."""
    text = """g (float[2,3,4,5] x) => (float[2,4,5,3] y)
        { a = Transpose<perm = [0, 2, 1, 3]>(x) b = Transpose<perm = [0, 1, 3, 2]>(a) y = Relu(b) }"""
    for names in (None, ["optimize_transpose"]):
        model = read(text)
        assert sorted(held(model, names, X4)) == ["Relu", "Transpose"]
        (perm,) = [list(n.attribute[0].ints) for n in model.graph.node if n.op_type == "Transpose"]
        assert perm == [0, 2, 3, 1]


@pytest.mark.row("O2")
def test_transposes_that_undo_each_other_vanish() -> None:
    """ForwardGraph an input and an output of the graph an Identity stays."""
    text = """g (float[2,3,4,5] x) => (float[2,3,4,5] y)
        { a = Transpose<perm = [2, 0, 1, 3]>(x) b = Transpose<perm = [1, 2, 0, 3]>(a) y = Relu(b) }"""
    for names in (None, ["optimize_transpose"], ["remove_back_to_back"]):
        assert held(read(text), names, X4) == ["Relu"]
    assert held(read(text.replace("Relu", "Identity")), None, X4) == ["Identity"]


@pytest.mark.row("O6")
@pytest.mark.parametrize(
    ("kinds", "values", "left"),
    [
        ("int8 int64 int32", [-128, 127], 1),
        ("int32 double int32", [-(2**31), 2**31 - 1], 1),
        ("int64 double int64", [2**62 + 1, -1], 2),  # a double has 53 digits
        ("int64 int32 int64", [2**40, 5], 2),
        ("int32 double int8", [300, -300], 2),
        ("int32 int64 int8", [300, -300], 1),
        ("uint8 float16 float", [0, 255], 1),
        ("int16 bfloat16 float", [257, 1], 2),
        ("bool int64 float", [0, 1], 1),
        ("float16 float float16", [0.1, np.inf], 1),
        ("bfloat16 float16 float", [1e30, 1], 2),
        ("float16 double int32", [1.5, -2], 2),  # NaN has no integer
        ("float double float16", [1e-8, 70000], 1),
    ],
)
def test_casts_are_joined_only_where_no_value_changes(kinds: str, values: list[float], left: int) -> None:
    a, b, c = kinds.split()
    code = {k: TensorProto.DataType.Value(k.upper()) for k in (a, b, c)}
    text = f"g ({a}[2] x) => ({c}[2] y) {{ p = Identity(x) q = Cast<to = {code[b]}>(p) y = Cast<to = {code[c]}>(q) }}"
    x = np.array(values).astype(helper.tensor_dtype_to_np_dtype(code[a]))
    assert held(read(text), ["remove_back_to_back", "remove_dead"], x).count("Cast") == left


@pytest.mark.row("O6")
@pytest.mark.parametrize("opset", [10, 13])
@pytest.mark.parametrize(("mode", "value", "joined"), [("constant", 0.0, True), ("constant", 1.0, False), ("edge", 0.0, False)])
def test_a_pad_goes_into_the_conv(opset: int, mode: str, value: float, joined: bool) -> None:
    how, more = f'mode = "{mode}"', {}
    if opset == 10:
        how += f", pads = [0, 0, 1, 2, 0, 0, 0, 1], value = {value}"
    else:
        more = {"p": np.array([0, 0, 1, 2, 0, 0, 0, 1]), "c": F(value)}
    pad = f"Pad<{how}>(x{', p, c' if more else ''})"
    model = read(f"g (float[2,3,4,5] x) => (float[2,4,5,8] y) {{ a = {pad} y = Conv<pads = [1, 1, 1, 1]>(a, w) }}",
                 opset, w=np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(F), **more)  # fmt: skip
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [None] * 4))
    assert held(model, ["remove_back_to_back"], X4) == ([] if joined else ["Pad"]) + ["Conv"]


# --- merge_duplicates, remove_dead


@pytest.mark.row("O5")
def test_two_equal_convs_are_one() -> None:
    text = "g (float[1,1,4,4] x) => (float[1,1,2,2] y) { a = Conv(x, w) b = Conv(x, v) y = Add(a, b) }"
    w = np.arange(9, dtype=F).reshape(1, 1, 3, 3)
    x = np.ones((1, 1, 4, 4), F)
    model = read(text, w=w, v=w.copy())
    assert held(model, ["merge_duplicates"], x) == ["Conv", "Add"] and len(model.graph.initializer) == 1
    assert held(read(text, w=w, v=w + 1), ["merge_duplicates"], x) == ["Conv", "Conv", "Add"]
    other = text.replace("b = Conv(x, v)", "b = Conv<group = 1>(x, v)")
    assert held(read(other, w=w, v=w), ["merge_duplicates"], x) == ["Conv", "Conv", "Add"], "attributes count as they are written"


@pytest.mark.row("O3", "O5")
def test_random_numbers_are_neither_merged_nor_folded() -> None:
    text = """g (float[2] x) => (float[2] y, float[2] z) {
        a = RandomNormal<shape = [2], seed = 1.0>() b = RandomNormal<shape = [2], seed = 1.0>() c = RandomUniformLike(x)
        d = RandomUniformLike(x) e = Bernoulli(s) f = Dropout(s, r, t)
        g1 = Sum(a, b, c, d, e, f) y = Identity(g1) z = Neg(g1) }"""
    model = read(text, s=np.ones(2, F), r=F(0.5), t=np.bool_(True))
    optimize(model)
    random = ["Bernoulli", "Dropout", "RandomNormal", "RandomNormal", "RandomUniformLike", "RandomUniformLike"]
    assert [n for n in sorted(ops(model)) if n in random] == random


@pytest.mark.row("O5")
def test_two_outputs_of_the_graph_stay_two() -> None:
    x = np.array([1.0, -2.0], F)
    model = read("g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x) z = Neg(x) }")
    assert held(model, ["merge_duplicates"], x) == ["Neg", "Neg"]
    model = read("g (float[2] x) => (float[2] y, float[2] z) { a = Neg(x) y = Exp(a) z = Neg(x) }")
    assert held(model, ["merge_duplicates"], x) == ["Neg", "Exp"]


def test_dead_code_and_dead_weights_go() -> None:
    text = "g (float[2] x) => (float[2] y) { a = Exp(x) b = Mul(a, w) c, d = Split<axis = 0>(b) y = Neg(x) }"
    model = read(text, opset=11, w=np.ones(2, F))
    assert held(model, ["remove_dead"], np.ones(2, F)) == ["Neg"] and not model.graph.initializer
    listed = read("g (float[2] x, float[2] w) => (float[2] y) { y = Neg(x) }", w=np.ones(2, F))
    optimize(listed)
    assert len(listed.graph.initializer) == 1, "an input of the graph stays, and so does its default"


def test_dead_functions_go() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "f": 1]>
        g (float[2] x) => (float[2] y) { y = f.used(x) }
        <domain: "f", opset_import: ["": 17, "f": 1]> used (a) => (b) { c = Identity(a) d = Exp(a) b = f.inner(c) }
        <domain: "f", opset_import: ["": 17]> inner (a) => (b) { b = Neg(a) }
        <domain: "f", opset_import: ["": 17]> unused (a) => (b) { b = Abs(a) }""")
    held(model, None, np.array([1, -2], F))
    assert [f.name for f in model.functions] == ["used", "inner"]
    assert [n.op_type for n in model.functions[0].node] == ["inner"], "bodies of functions are rewritten too"


# --- fold_constants, simplify_shapes


@pytest.mark.row("O3")
def test_constants_fold_and_large_ones_do_not() -> None:
    text = "g (float[2] x) => (float[2] y, float[n, m] z) { a = Neg(w) b = Exp(a) y = Mul(x, b) z = ConstantOfShape(s) }"
    model = read(text, w=np.array([1, 2], F), s=np.array([2000, 2000]))
    assert held(model, ["fold_constants", "remove_dead"], np.ones(2, F)) == ["Mul", "ConstantOfShape"]
    assert sum(t.ByteSize() for t in model.graph.initializer) < 1000
    names = [t.name for t in model.graph.initializer]
    assert len(names) == len(set(names)) == 2


@pytest.mark.parametrize("opset", [7, 13, 22])
def test_what_constant_nodes_make_does_not_begin_to_train(opset: int) -> None:
    """A float initializer is something to train, and these are none; what a weight has part in stays one."""
    text = """g (float[2] x) => (float[2] y, float[2] z) {
        c = Constant <value = float[2] {1, 2}> () z = Neg(c) e = Exp(c) a = Mul(x, e) v = Neg(w) y = Mul(a, v) }"""
    model = read(text, opset=opset, w=np.array([3, 4], F))
    assert held(model, ["fold_constants", "remove_dead"], np.ones(2, F)) == ["Mul", "Mul"]
    (weight,) = model.graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(weight), [-3, -4])
    assert [n.output[0] for n in model.graph.node if n.op_type == "Constant"] == ["z", "e"]
    assert list(SONNXModel(model).get_params()) == [weight.name]


def test_a_large_weight_is_folded_in_its_place() -> None:
    model = read("g (float[2,1000] x) => (float[2,500] y) { t = Transpose(w) y = MatMul(x, t) }",
                 w=np.random.default_rng(0).standard_normal((500, 1000)).astype(F))  # fmt: skip
    assert held(model, None, np.ones((2, 1000), F), rtol=1e-5) == ["MatMul"]


def test_an_initializer_that_may_be_overridden_is_no_constant() -> None:
    text = "g (float[2] x, float[2] w) => (float[2] y) { a = Exp(w) y = Mul(x, a) }"
    model = read(text, w=np.ones(2, F))
    held(model, None, np.ones(2, F))
    assert ops(model) == ["Exp", "Mul"] and "1 initializers are inputs too" in optimize(model).notes[0]
    fed = SingaBackend.prepare(model).run({"x": np.ones(2, F), "w": np.zeros(2, F)})
    np.testing.assert_array_equal(fed[0], [1, 1])
    old = read(text, opset=8, ir=3, w=np.ones(2, F))
    optimize(old)
    assert ops(old) == ["Mul"], "before IR version 4 every initializer had to be listed"
    onnx.checker.check_model(old, full_check=True)


@pytest.mark.row("O3")
@pytest.mark.parametrize("opset", [9, 11, 13, 17])
@pytest.mark.parametrize("first", ["2", "n"])
def test_a_reshape_by_computed_sizes(opset: int, first: str) -> None:
    """Shape -> Gather -> Unsqueeze -> Concat -> Reshape becomes a Reshape by a constant: 2, or -1 and 0 for what is open."""
    axes = (lambda v: f"Unsqueeze({v}, z)") if opset >= 13 else (lambda v: f"Unsqueeze<axes = [0]>({v})")
    text = f"""g (float[{first},12,64] x) => (float[{first},3,4,64] y) {{
        s = Shape(x) a = Gather<axis = 0>(s, i) b = {axes("a")} t = Shape(x) c = Gather<axis = 0>(t, j) d = {axes("c")}
        e = Concat<axis = 0>(b, u, d) y = Reshape(x, e) }}"""
    weights = {"i": I(0), "j": I(-1), "u": np.array([3, 4])} | ({"z": np.array([0])} if opset >= 13 else {})
    x = np.arange(2 * 12 * 64, dtype=F).reshape(2, 12, 64)
    model = read(text, opset, **weights)
    assert held(model, ["simplify_shapes", "remove_dead"], x) == ["Reshape"]
    (target,) = [numpy_helper.to_array(t).tolist() for t in model.graph.initializer]
    assert target == ([2, 3, 4, 64] if first == "2" else [0, 3, 4, 64])
    if first == "n":
        assert run(model, np.zeros((0, 12, 64), F))[0].shape == (0, 3, 4, 64)


@pytest.mark.parametrize(
    ("wanted", "sizes", "expected"),
    [
        (["n", 12, 64], ["n", 768], [0, 12, 64]),
        ([12, "n"], ["n", 12], [12, -1]),
        (["n", "m", 8], ["n", "m", 2, 4], [0, 0, 8]),
        (["m", "n"], ["n", "m"], None),
        (["n", "k"], ["n", "m"], None),  # n may be 0, and then -1 says nothing
        (["u", 4], None, [-1, 4]),
        (["u", -1], None, None),
        (["u", 0], [1, 2], None),
    ],
)
def test_targets(wanted: list[Any], sizes: Any, expected: Any) -> None:
    assert constant_target(wanted, sizes) == expected


def test_what_is_wrong_is_left_to_fail_where_it_runs() -> None:
    """An index after the end of a shape, and a division of integers by zero."""
    text = "g (float[2,3] x) => (int64 y, int64 z) { s = Shape(x) y = Gather<axis = 0>(s, i) z = Div(j, k) }"
    model = read(text, i=I(2), j=I(1), k=I(0))
    report = optimize(model)
    assert not report.failures and ops(model)[-1] == "Div"
    with pytest.raises(OperatorError):
        run(model, np.ones((2, 3), F))


def test_what_the_file_says_of_inner_values_is_not_believed() -> None:
    """A state that grows from round to round, declared as if it did not; and claims about values that nothing holds."""
    text = """g (float[n] x, float[1] x1) => (float[9] z, int64[1] sizes) {
        a = Neg(x) s = Shape(a) z = Expand(one, s)
        last, sizes = Loop(three, , x1) <body = b (int64 i, bool c, float[1] t) => (bool c1, float[1] t1, int64[1] u) {
            c1 = Identity(c) t1 = Concat<axis = 0>(t, one) u = Shape(t) }> }"""
    model = read(text, one=np.ones(1, F), three=I(3))
    model.graph.value_info.append(helper.make_tensor_value_info("a", 1, [9]))
    x = [np.ones(4, F), np.zeros(1, F)]
    before = run(model, *x)
    assert before[0].shape == (4,) and before[1].reshape(-1).tolist() == [1, 2, 3]
    optimize(model)
    for a, b in zip(before, run(model, *x), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.row("O3")
def test_known_pieces_of_an_open_shape_fold() -> None:
    text = """g (float[n,3,8] x) => (int64 y) {
        s = Shape(x) a = Slice(s, one, three) b = Gather(a, zero) c = Mul(b, k) d = Cast<to = 1>(c) e = Sqrt(d)
        y = Cast<to = 7>(e) }"""
    model = read(text, one=np.array([1]), three=np.array([3]), zero=I(0), k=I(3))
    assert held(model, None, np.ones((5, 3, 8), F)) == [] and run(model, np.ones((5, 3, 8), F))[0] == 3


# --- fold_batch_normalization


def _norm(c: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {"s": rng.uniform(0.5, 2, c).astype(F), "b": rng.standard_normal(c).astype(F),
            "m": rng.standard_normal(c).astype(F), "v": rng.uniform(0.5, 2, c).astype(F)}  # fmt: skip


@pytest.mark.row("O6")
@pytest.mark.parametrize("opset", [7, 9, 14, 15])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("before", "x", "w"),
    [
        ("Conv<group = 3>(x, w{})", (2, 3, 4, 5), (6, 1, 3, 3)),
        ("Conv(x, w{})", (2, 3, 7), (6, 3, 2)),
        ("ConvTranspose<group = 2>(x, w{})", (2, 4, 4, 5), (4, 3, 2, 2)),
        ("Gemm<alpha = 0.5, beta = 2.0>(x, w{})", (4, 3), (3, 6)),
        ("Gemm<transB = 1>(x, w{})", (4, 3), (6, 3)),
    ],
)
def test_batch_normalization_goes_into_the_weights(opset: int, bias: bool, before: str, x: Any, w: Any) -> None:
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal(w).astype(F), **_norm(6)} | ({"c": rng.standard_normal(6).astype(F)} if bias else {})
    if "Gemm" in before and not bias and opset < 11:
        return  # there C was no option
    call = before.format(", c" if bias else "")
    model = read(f"g (float x) => (float y) {{ a = {call} n = BatchNormalization(a, s, b, m, v) y = Abs(n) }}", opset, **weights)
    data = rng.standard_normal(x).astype(F)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", 1, x))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [None] * len(x)))
    assert held(model, ["fold_batch_normalization", "remove_dead"], data, rtol=1e-5) == [
        before.split("(")[0].split("<")[0],
        "Abs",
    ]


@pytest.mark.parametrize("node", ["Mul(a, k)", "Add(k, a)", "Sub(a, k)", "Div(a, k)"])
@pytest.mark.parametrize(
    ("shape", "folds"), [((4, 1, 1), True), ((), True), ((1, 4, 1, 1), True), ((5,), False), ((2, 1, 1, 1), False)]
)
def test_factors_by_channel(node: str, shape: Any, folds: bool) -> None:
    rng = np.random.default_rng(3)
    k, w = rng.uniform(0.5, 2, shape).astype(F), rng.standard_normal((4, 3, 1, 1)).astype(F)
    model = read(f"g (float[2,3,4,5] x) => (float[2,4,4,5] y) {{ a = Conv(x, w) y = {node} }}", k=k, w=w)
    left = held(model, ["fold_batch_normalization"], X4, rtol=1e-5)
    assert left == (["Conv"] if folds else ["Conv", node[:3]])


def test_what_must_not_be_folded() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((6, 3, 1, 1)).astype(F)
    bn = "BatchNormalization(a, s, b, m, v)"
    seen = read(f"g (float[2,3,4,5] x) => (float[2,6,4,5] y, float[2,6,4,5] a) {{ a = Conv(x, w) y = {bn} }}", w=w, **_norm(6))
    assert held(seen, None, X4) == ["Conv", "BatchNormalization"], "the unscaled value is an output"
    broken = _norm(6) | {"v": np.full(6, -1, F)}
    bad = read(f"g (float[2,3,4,5] x) => (float[2,6,4,5] y) {{ a = Conv(x, w) y = {bn} }}", w=w, **broken)
    assert held(bad, None, X4) == ["Conv", "BatchNormalization"], "NaN in the factors"
    half = {n: a.astype(np.float16) for n, a in {"w": w, **_norm(6)}.items()}
    narrow = read(f"g (float16[2,3,4,5] x) => (float16[2,6,4,5] y) {{ a = Conv(x, w) y = {bn} }}", **half)
    assert held(narrow, None, X4.astype(np.float16)) == ["Conv", "BatchNormalization"], "float16 would round twice"


# --- optimize_transpose

TO, BACK = (0, 2, 3, 1), (0, 3, 1, 2)
_LAYOUT_FREE: list[tuple[str, int, dict[str, Any]]] = [
    *((f"{op}(a)", 13, {}) for op in ("Relu", "Tanh", "Neg", "Identity", "Sigmoid", "Erf", "Floor")),
    ("Cast<to = 11>(a)", 13, {}), ("Clip(a, k)", 13, {"k": F(0)}), ("LeakyRelu(a)", 13, {}), ("Clip<min = 0.0>(a)", 7, {}),
    *((f"{op}(a, k)", 13, {"k": np.arange(1, 4, dtype=F)}) for op in ("Add", "Sub", "Mul", "Div", "Max", "PRelu", "Pow")),
    ("Add(k, a)", 7, {"k": F(2)}), ("Add(a, a)", 7, {}), ("Sub(k, a)", 13, {"k": np.ones((4, 1, 3), F)}),
    ("Sum(a, k, a)", 8, {"k": np.ones((1, 4, 1, 1), F)}), ("Less(a, k)", 9, {"k": np.ones(3, F)}),
    ("Softmax<axis = 3>(a)", 13, {}), ("Softmax<axis = -2>(a)", 13, {}), ("LogSoftmax<axis = 1>(a)", 13, {}),
    ("Concat<axis = 3>(a, a)", 13, {}), ("Concat<axis = -3>(a, k)", 13, {"k": np.ones((2, 1, 5, 3), F)}),
    ("Pad<pads = [0, 1, 0, 2, 0, 0, 3, 1]>(a)", 10, {}), ("Pad(a, k)", 13, {"k": np.array([0, 1, 0, 2, 0, 0, 3, 1])}),
    ("Pad(a, k, , l)", 18, {"k": np.array([1, 2, 3, 0]), "l": np.array([3, -3])}),
    ("Slice<axes = [3, 1], starts = [1, 0], ends = [3, 2]>(a)", 9, {}),
    ("Slice(a, k, l)", 13, {"k": np.array([0, 1]), "l": np.array([1, 3])}),
    ("Slice(a, k, l, m, n)", 13, {n: np.array(v, np.int32) for n, v in zip("klmn", ([0], [9], [-1], [2]), strict=True)}),
    *((f"{op}<axes = [1, 2]>(a)", 12, {}) for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp")),
    ("ReduceMean<axes = [-1]>(a)", 13, {}), ("ReduceSum(a, k)", 13, {"k": np.array([-1, 1])}), ("ReduceMin(a)", 13, {}),
    ("ReduceProd(a, k)", 18, {"k": np.array([2])}), ("ArgMax<axis = 3>(a)", 13, {}), ("ArgMin<axis = -2>(a)", 11, {}),
    ("BatchNormalization(a, k, k, k, k)", 13, {"k": np.ones(4, F)}), ("CumSum(a, k)", 14, {"k": I(3)}),
    ("Tile(a, k)", 13, {"k": np.array([1, 2, 1, 3])}), ("Expand(a, k)", 13, {"k": np.array([4, 1, 3])}),
    ("Where(k, a, a)", 9, {"k": np.array([True, False, True])}), ("LpNormalization<axis = 3>(a)", 13, {}),
    ("QuantizeLinear(a, k, z)", 13, {"k": F(0.1), "z": np.uint8(3)}), ("Dropout(a)", 10, {}),
    ("Resize(a, k)", 10, {"k": np.array([1, 2, 2, 1], F)}), ("Upsample<scales = [1.0, 2.0, 3.0, 1.0]>(a)", 7, {}),
    ("Upsample(a, k)", 9, {"k": np.array([1, 2, 2, 1], F)}),
    ('Resize<mode = "linear">(a, , k)', 13, {"k": np.array([1, 2, 2, 1], F)}),
    ('Resize<mode = "linear">(a, , , k)', 13, {"k": np.array([2, 8, 3, 3])}),
    ("Resize<axes = [1, 2]>(a, , k)", 18, {"k": np.array([2, 0.5], F)}), ("Hardmax<axis = 3>(a)", 13, {}),
]  # fmt: skip


@pytest.mark.row("O2")
@pytest.mark.parametrize(("node", "opset", "weights"), _LAYOUT_FREE, ids=[f"{n}-{o}" for n, o, _ in _LAYOUT_FREE])
def test_what_does_not_care_for_layout(node: str, opset: int, weights: dict[str, Any]) -> None:
    """NCHW -> NHWC -> operator -> NCHW leaves no Transpose; a BatchNormalization keeps its channels."""
    to, back = ((3, 1, 2, 0), (3, 1, 2, 0)) if node.startswith("Batch") else (TO, BACK)
    weights = {n: np.ones(3, F) if node.startswith("Batch") else w for n, w in weights.items()}
    first, last = (f"Transpose<perm = {list(perm)}>" for perm in (to, back))
    text = f"g (float[2,3,4,5] x) => (float y) {{ a = {first}(x) b = {node} y = {last}(b) }}"
    model = read(text, opset, **weights)
    (y,) = run(model, X4)
    y_info = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(y.dtype), [None] * 4)
    model.graph.output[0].CopyFrom(y_info)
    sums = any(s in node for s in ("Softmax", "Reduce", "Lp", "Cum"))
    left = held(model, ["optimize_transpose"], X4, rtol=1e-5 if sums else 0)
    assert left.count("Transpose") == 0 and len(left) == 1


@pytest.mark.row("O2")
@pytest.mark.parametrize(("op", "since"), [("ReduceMean", 18), ("ReduceSum", 13), ("Squeeze", 13)])
@pytest.mark.parametrize("opset", [11, 18])
def test_axes_that_go_take_the_transpose_along(op: str, since: int, opset: int) -> None:
    """ReduceMean of [1, 2] in NHWC is that of [2, 3] in NCHW: what is left is in order."""
    shape = (2, 3, 1, 1) if op == "Squeeze" else (2, 3, 4, 5)
    keeps = "" if op == "Squeeze" else "keepdims = 0, "
    how = f"{op}<{keeps}axes = [1, 2]>(a)" if opset < since else f"{op}{'<keepdims = 0>' if keeps else ''}(a, k)"
    weights = {} if opset < since else {"k": np.array([-2, 1])}
    text = f"g (float[{','.join(map(str, shape))}] x) => (float[2,3] y) {{ a = Transpose<perm = [0, 2, 3, 1]>(x) y = {how} }}"
    model = read(text, opset, **weights)
    assert held(model, ["optimize_transpose"], np.ones(shape, F) * 3) == [op]


@pytest.mark.parametrize("outputs", [2, 3])
def test_split_and_branches(outputs: int) -> None:
    names = ["p", "q", "r"][:outputs]
    backs = " ".join(f"o{n} = Transpose<perm = [0, 3, 1, 2]>({n})" for n in names)
    text = f"""g (float[2,6,4,5] x) => ({", ".join(f"float[2,{6 // outputs},4,5] o{n}" for n in names)}) {{
        a = Transpose<perm = [0, 2, 3, 1]>(x) {", ".join(names)} = Split<axis = 3>(a) {backs} }}"""
    assert held(read(text, 11), ["optimize_transpose"], np.ones((2, 6, 4, 5), F)) == ["Split"]


@pytest.mark.row("O2")
def test_a_residual_block_in_the_other_layout() -> None:
    """Convs in NCHW, everything between them in NHWC, as one exporter writes it: only what the input needs is left."""
    text = """g (float[1,8,8,3] x) => (float[1,4] y) {
        a = Transpose<perm = [0,3,1,2]>(x) b = Conv<pads = [1,1,1,1]>(a, w0) c = Transpose<perm = [0,2,3,1]>(b)
        d = Add(c, k) e = Relu(d)
        f = Transpose<perm = [0,3,1,2]>(e) h = Conv<pads = [1,1,1,1]>(f, w1) i = Transpose<perm = [0,2,3,1]>(h)
        j = Sigmoid(i) l = Mul(i, j) m = Add(l, e) n = Relu(m)
        o = Transpose<perm = [0,3,1,2]>(n) p = Conv(o, w1) q = Transpose<perm = [0,2,3,1]>(p)
        y = ReduceMean<axes = [1, 2], keepdims = 0>(q) }"""
    rng = np.random.default_rng(0)
    weights = {"w0": rng.standard_normal((4, 3, 3, 3)), "w1": rng.standard_normal((4, 4, 3, 3)), "k": rng.standard_normal(4)}
    model = read(text, 13, **{n: w.astype(F) for n, w in weights.items()})
    left = held(model, ["optimize_transpose"], rng.standard_normal((1, 8, 8, 3)).astype(F), rtol=1e-5)
    assert left.count("Transpose") == 1 and left[0] == "Transpose"


@pytest.mark.row("O2")
def test_transposes_never_become_more() -> None:
    """Pushed through the Add, one would be two: it stays where it is."""
    text = """g (float[2,3,4] x, float[4,3,2] z) => (float[4,3,2] y, float[4,3,2] u, float[4,3,2] v) {
        a = Transpose(x) y = Add(a, z) u = Relu(a) v = Exp(a) }"""
    x, z = np.arange(24, dtype=F).reshape(2, 3, 4), np.ones((4, 3, 2), F)
    assert held(read(text), ["optimize_transpose"], x, z).count("Transpose") == 1


def test_shape_of_a_transposed_value() -> None:
    text = """g (float[2,3,n,5] x) => (int64[4] s, int64[2] t, int64 u, float[2,3,n,5] y) {
        a = Transpose<perm = [0,2,3,1]>(x) s = Shape(a) t = Shape<start = -3, end = -1>(a) u = Size(a)
        r = Relu(a) y = Transpose<perm = [0,3,1,2]>(r) }"""
    assert held(read(text), ["optimize_transpose"], X4).count("Transpose") == 0


def test_a_transpose_of_ones_is_a_reshape() -> None:
    text = """g (float[n,1,4,5] x) => (float[n,4,5,1] y, float[4,n,5,1] z) {
        y = Transpose<perm = [0,2,3,1]>(x) z = Transpose<perm = [2,0,3,1]>(x) }"""
    assert held(read(text), ["optimize_transpose"], X4[:, :1].copy()) == ["Reshape", "Transpose"]


# --- loops

LOOP = """g (float[2,3] x, float[2,3] w) => (float[2,3] last, float[k,3,2] y) {{
    last, y = Loop(n, {cond}, x) <body = b (int64 i, bool c, float[2,3] s) => (bool c1, float[2,3] s1, float[3,2] t) {{
        c1 = Identity(c) e = Exp(w) f = Mul(e, two) s1 = Add(s, f) t0 = Transpose<perm = [1, 0]>(s1) t = Identity(t0) }}>
}}"""


@pytest.mark.row("O7")
@pytest.mark.parametrize(("trips", "moves"), [(3, True), (0, False)])
def test_out_of_a_loop(trips: int, moves: bool) -> None:
    """What is the same in every round is computed before it, the Transpose of the scan output after it."""
    model = read(LOOP.format(cond=""), n=I(trips), two=F(2))
    x = np.arange(6, dtype=F).reshape(2, 3)
    held(model, ["remove_identity", "move_out_of_loops", "remove_dead"], x, x / 4)
    (loop,) = [n for n in model.graph.node if n.op_type == "Loop"]
    inside = Counter(n.op_type for n in loop.attribute[0].g.node)
    assert ("Transpose" in ops(model)) == moves == ("Transpose" not in inside)
    assert ("Mul" in ops(model)) == moves == ("Mul" not in inside)
    assert "Exp" in ops(model), "it cannot fail: it moves out of a loop that may not run, too"


@pytest.mark.row("O7")
def test_a_loop_that_may_not_run_keeps_what_may_fail() -> None:
    text = LOOP.replace("float[2,3] w)", "float[2,3] w, int64 n)").format(cond="")
    model = read(text, two=F(2))
    x = np.arange(6, dtype=F).reshape(2, 3)
    for n in (0, 2):
        held(model, None, x, x, I(n))
    (loop,) = [n for n in model.graph.node if n.op_type == "Loop"]
    assert {"Transpose", "Mul"} <= {n.op_type for n in loop.attribute[0].g.node}


@pytest.mark.row("O7")
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_out_of_a_scan(axis: int) -> None:
    text = f"""g (float[2,3] s, float[4,2,3] x, float[3] w) => (float last, float y) {{
        last, y = Scan<num_scan_inputs = 1, scan_output_axes = [{axis}], body = b (float[2,3] a, float[2,3] e)
            => (float[2,3] a1, float[3,2] t) {{ f = Exp(w) a1 = Add(a, e) h = Mul(a1, f) t = Transpose(h) }}>(s, x) }}"""
    model = read(text)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("last", 1, [2, 3]))
    model.graph.output[1].CopyFrom(helper.make_tensor_value_info("y", 1, [None] * 3))
    x = np.arange(24, dtype=F).reshape(4, 2, 3)
    held(model, None, x[0], x, np.ones(3, F))
    assert sorted(ops(model)) == ["Exp", "Scan", "Transpose"]


# --- the whole


@pytest.mark.row("O1")
def test_a_pass_by_name_runs_alone() -> None:
    model = read("g (float[2] x) => (float[2] y) { a = Identity(x) b = Neg(a) c = Neg(b) d = Neg(x) y = Exp(c) }")
    report = optimize(model, ["remove_identity"])
    assert [p.name for p in report.passes] == ["remove_identity"] and ops(model) == ["Neg", "Neg", "Neg", "Exp"]
    assert report.passes[0].operators == {"Identity": (1, 0)} and report.changes == 1
    assert "Identity -1 (1 -> 0)" in str(report)
    assert report.to_dict()["nodes"] == {"before": 5, "after": 4}


@pytest.mark.row("O1")
def test_an_unknown_pass_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"a pass must be one of remove_identity, .*, got 'remove_identiy'"):
        optimize(read("g (float[2] x) => (float[2] y) { y = Neg(x) }"), ["remove_identiy"])


@pytest.mark.row("O8")
@pytest.mark.parametrize("how", ["raises", "breaks", "cycle"])
def test_a_pass_that_fails_is_reported_and_undone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(edit: ModelEditor) -> int:
        first, *_, node = edit.main.nodes
        if how == "cycle":
            first.read([first.outputs[0]])
            return 1
        edit.main.remove(first)
        node.set(to=7)
        edit.add_constant(edit.main, np.ones(3, F))
        if how == "raises":
            raise RuntimeError("a fault")
        return 1

    monkeypatch.setitem(passes.PASSES, "bad", Pass("bad", "", bad))
    model = read("g (float[2] x) => (int64[2] y) { a = Neg(x) b = Identity(a) y = Cast<to = 7>(b) }")
    report = optimize(model, ["bad", "remove_identity"])
    (failure,) = report.failures
    assert failure.name == "bad" and "bad failed and was undone" in str(report)
    assert failure.error == ("RuntimeError" if how == "raises" else "InvalidModel")
    if how == "cycle":
        assert "Neg of 'a'" in failure.message
    assert ops(model) == ["Neg", "Cast"] and not model.graph.initializer, "the other pass ran on what there was"
    np.testing.assert_array_equal(run(model, np.array([1, 2], F))[0], [-1, -2])


@pytest.mark.row("E13")
def test_the_nodes_of_a_cycle_are_named() -> None:
    model = read("g (float[2] x) => (float[2] y) { a = Add(x, c) b = Neg(a) c = Exp(b) y = Neg(c) }")
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    with pytest.raises(InvalidModel, match="cycle") as caught:
        optimize(model)
    assert all(f"'node_{n}'" in str(caught.value) for n in "abc") and "node_y" not in str(caught.value)
    assert caught.value.code == "SX101"
    with pytest.raises(InvalidModel, match=r"'nothing'.*is not defined"):
        optimize(read("g (float[2] x) => (float[2] y) { y = Add(x, nothing) }"))
    with pytest.raises(InvalidModel, match="more than once"):
        optimize(read("g (float[2] x) => (float[2] y) { y = Neg(x) y = Exp(x) }"))


@pytest.mark.row("E13")
def test_the_order_of_nodes_is_kept_where_it_can_be() -> None:
    model = read("g (float[2] x) => (float[2] y) { y = Add(b, a) b = Exp(a) a = Neg(x) c = Abs(x) }")
    assert [n.results[0].name for n in ModelEditor(model).main.nodes] == ["a", "b", "y", "c"]


def test_a_gradient_keeps_its_graph() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
        g (float[2] x) => (float[2] d) { a = Identity(x) y = Mul(a, a)
        d = ai.onnx.preview.training.Gradient<xs = ["x"], y = "y">(x) }""")
    report = optimize(model)
    assert not report.changes and "Gradient" in report.notes[0] and len(model.graph.node) == 3


def test_names_that_hide_others_stop_everything() -> None:
    model = read("""g (bool c, float[2] x) => (float[2] y) { a = Identity(x)
        y = If(c) <then_branch = t () => (float[2] p) { a = Neg(x) p = Exp(a) }, else_branch = e () => (float[2] q)
            { q = Identity(x) }> }""")  # fmt: skip
    report = optimize(model)
    assert not report.changes and "'a'" in report.notes[0]


def test_a_name_that_is_no_text_is_refused() -> None:
    data = read("g (float[2] x) => (float[2] y) { zzzz = Neg(x) y = Exp(zzzz) }").SerializeToString()
    with pytest.raises(InvalidModel, match="not UTF-8"):
        optimize(ModelProto.FromString(data.replace(b"zzzz", b"zz\xffz")))


def test_a_scan_of_more_inputs_than_it_has() -> None:
    model = read("""g (float[2] x) => (float[2] y) { y = Scan<num_scan_inputs = 4611686018427387904,
        body = b (float a) => (float c) { c = Neg(a) }>(x) }""")
    assert not optimize(model).failures


@pytest.mark.row("O9")
def test_weights_are_neither_copied_nor_read() -> None:
    """A damaged large weight does not matter to who does not read it, and the message that holds it stays the same."""
    model = read("g (float[2,1024] x) => (float[2,1024] y) { a = Identity(x) b = MatMul(a, w) y = Identity(b) }",
                 w=np.zeros((1024, 1024), F))  # fmt: skip
    kept = model.graph.initializer[0]
    kept.raw_data = kept.raw_data[:-4]
    report = optimize(model)
    assert report.changes and ops(model) == ["MatMul"] and model.graph.initializer[0] is kept


@pytest.mark.row("O9")
def test_large_weights_cost_little_memory() -> None:
    """200 MB of weights: optimizing adds less than 20 MB to the most that the process ever held."""
    import resource

    model = read(
        "g (float[2,7000] x) => (float[2,7000] y) { a = Identity(x) b = MatMul(a, w) c = Transpose(b) y = Transpose(c) }"
    )
    model.graph.initializer.append(TensorProto(name="w", dims=[7000, 7000], data_type=1, raw_data=bytes(4 * 7000 * 7000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    optimize(model)
    assert ops(model) == ["MatMul"] and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


# --- models from elsewhere


@pytest.mark.parametrize("name", MODELS)
def test_models_from_elsewhere(name: str, oracle: Oracle) -> None:
    """Before and after: ours against ours, and the optimized model against onnxruntime on the first one."""
    original, model = onnx.load(MODELS[name].path), onnx.load(MODELS[name].path)
    report = optimize(model)
    assert not report.failures and report.settled and report.after.total() <= report.before.total()
    onnx.checker.check_model(model, full_check=True)
    assert [o.name for o in model.graph.output] == [o.name for o in original.graph.output]
    for inputs, _ in MODELS[name].data:
        before, after = (SingaBackend.prepare(m, optimize=0).run(dict(inputs)).to_dict() for m in (original, model))
        theirs = oracle.run(original.SerializeToString(), inputs, timeout=120)
        again = oracle.run(model.SerializeToString(), inputs, timeout=120)
        for n, value in before.items():
            assert foreign.error(after[n], value) <= 1e-5 and foreign.error(again[n], theirs[n]) <= 1e-5


# --- the command


def sonnx(*args: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model whose weights are in a file next to it: one to fold, one large, one small."""
    model = read("g (float[2,300] x) => (float[2,300] y) { a = Identity(x) b = MatMul(a, w) t = Neg(k) y = Mul(b, t) }",
                 w=np.random.default_rng(0).standard_normal((300, 300)).astype(F), k=np.full(1, 2, F))  # fmt: skip
    folder = tmp_path / "in"
    folder.mkdir()
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    return folder / "m.onnx"


@pytest.mark.row("O1")
def test_command(tmp_path: Path) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(read("g (float[2] x) => (float[2] y) { a = Identity(x) y = Neg(a) }"), source)
    found = sonnx("optimize", source, "-o", target)
    assert found.exit_code == 0 and "Identity -1 (1 -> 0)" in found.output and "2 -> 1 nodes" in found.output
    assert ops(onnx.load(target)) == ["Neg"]
    found = sonnx("optimize", source, "-o", source, "--pass", "remove_dead", "--json")
    document = json.loads(found.output)
    assert document["changes"] == 0 and [p["pass"] for p in document["passes"]] == ["remove_dead"]
    assert document["written"] == [str(source)] and sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "o.onnx"]
    listed = sonnx("optimize", "--list").output
    assert [line.split()[0] for line in listed.splitlines()] == list(PASSES)
    assert sonnx("optimize", source).exit_code == 2 and sonnx("optimize", source, "-o", "o", "--pass", "no").exit_code == 2


@pytest.mark.parametrize("place", ["elsewhere", "same folder", "same file"])
def test_command_with_external_data(external: Path, tmp_path: Path, place: str) -> None:
    target = {"elsewhere": tmp_path / "o.onnx", "same folder": external.parent / "o.onnx", "same file": external}[place]
    x = np.ones((2, 300), F)
    before = SingaBackend.prepare(external, optimize=0).run([x])[0]
    found = sonnx("optimize", external, "-o", target, "--json")
    assert found.exit_code == 0, found.output
    written = json.loads(found.output)["written"]
    assert len(written) == 2 and written[0] == str(target)
    model = onnx.load(target, load_external_data=False)
    assert ops(model) == ["MatMul", "Mul"]
    (entry,) = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data]
    assert entry["location"] == Path(written[1]).name and int(entry["offset"]) % 4096 == 0
    np.testing.assert_array_equal(SingaBackend.prepare(target, optimize=0).run([x])[0], before)
    onnx.checker.check_model(str(target), full_check=True)
    if place != "same file":
        np.testing.assert_array_equal(SingaBackend.prepare(external, optimize=0).run([x])[0], before)


@pytest.mark.parametrize("why", ["folder", "missing folder", "external data gone"])
def test_nothing_is_left_behind(external: Path, tmp_path: Path, why: str) -> None:
    target = tmp_path / "out" / "o.onnx"
    if why != "missing folder":
        target.parent.mkdir()
    if why == "folder":
        target.mkdir()
    if why == "external data gone":
        (external.parent / "m.onnx.data").unlink()
    found = sonnx("optimize", external, "-o", target, "--json")
    assert found.exit_code in (2, 3), found.output
    if target.parent.exists():
        assert [p.name for p in target.parent.iterdir()] == (["o.onnx"] if why == "folder" else [])


def test_a_failing_pass_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(edit: ModelEditor) -> int:
        raise RuntimeError("a fault")

    monkeypatch.setitem(passes.PASSES, "remove_dead", Pass("remove_dead", "", bad))
    onnx.save(read("g (float[2] x) => (float[2] y) { a = Identity(x) y = Neg(a) }"), tmp_path / "m.onnx")
    found = sonnx("optimize", tmp_path / "m.onnx", "-o", tmp_path / "o.onnx")
    assert found.exit_code == 1 and "a fault" in found.output and ops(onnx.load(tmp_path / "o.onnx")) == ["Neg"]


# --- changes that are undone ------------------------------------------------------------------------------------------


def _wide(rng: random.Random) -> ModelProto:
    """A drawn graph with nodes of 20 inputs, also in the branches of an If."""
    names, nodes = ["x", "y", "z"], []
    for i in range(rng.randint(4, 9)):
        kind = rng.choice(["Relu", "Relu", "Sum", "Add", "If"])
        inputs = [rng.choice(names) for _ in range({"Sum": rng.choice([3, 20]), "Add": 2}.get(kind, 1))]
        if kind == "If":
            inner, end = (
                helper.make_tensor_value_info(f"w{i}", 1, None),
                helper.make_tensor_value_info(rng.choice(names), 1, None),
            )
            wide = helper.make_node("Sum", [rng.choice(names) for _ in range(20)], [f"w{i}"])
            branches = {
                "then_branch": helper.make_graph([wide], "a", [], [inner]),
                "else_branch": helper.make_graph([], "b", [], [end]),
            }
            nodes.append(helper.make_node("If", ["c"], [f"v{i}"], **branches))
        else:
            nodes.append(helper.make_node(kind, inputs, [f"v{i}"]))
        names.append(f"v{i}")
    inputs = [
        *(helper.make_tensor_value_info(n, 1, [2]) for n in "xyz"),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    ends = [helper.make_tensor_value_info(n, 1, None) for n in sorted({names[-1], rng.choice(names[3:])})]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, ends), opset_imports=[helper.make_opsetid("", 17)])


def _state(graph: Graph) -> Any:
    nodes = [(n, n.op_type, list(n.inputs), list(n.outputs), dict(n.attributes), dict(n.captures)) for n in graph.nodes]
    values = {v for n in graph.nodes for v in (*n.reads, *n.results)}
    known = {v: (v.producer, v.graph, v.constant, set(v.uses)) for v in values}
    inner = [_state(body) for n in graph.nodes for body in n.bodies]
    return nodes, known, list(graph.inputs), list(graph.outputs), dict(graph.initializers), set(graph.captured), inner


@pytest.mark.parametrize("seed", range(200))
def test_changes_that_are_undone_leave_no_trace(seed: int) -> None:
    rng = random.Random(seed)
    editor = ModelEditor(_wide(rng))
    main = editor.main
    before, journal = _state(main), editor.record()
    for _ in range(rng.randint(1, 8)):
        node = rng.choice(main.nodes)
        match rng.choice(["bypass", "read", "add", "remove", "change", "constant", "return", "bodies"]):
            case "bypass":
                editor.bypass(node, rng.choice(node.reads))
            case "read":
                node.read([rng.choice([v, main.inputs[0]]) for v in node.inputs])
            case "add":
                editor.add(main, "Relu", [rng.choice(main.inputs)], before=node)
            case "remove" if not any(o.is_used for o in node.results):
                main.remove(node)
            case "change":
                node.change(op_type="Neg")
            case "constant":
                node.results[0].replace_all_uses_with(editor.add_constant(main, np.ones(2, F)))
            case "return":
                node.return_(0, Value("new"))
            case "bodies":
                for body in node.bodies:
                    body.nodes and body.nodes[0].put(0, body.capture(rng.choice(main.inputs)))
                    body.release_captured()
        if not main.nodes:
            break
    journal.undo()
    assert _state(main) == before


def test_a_trial_with_a_concat_of_many_inputs_is_undone() -> None:
    """Pushing the first Transpose removes two before the Concat and adds three others, which is not better."""
    more = ", ".join(f"x{i}" for i in range(18))
    text = f"""g (float[2,3,4] x, {", ".join(f"float[2,3,4] x{i}" for i in range(18))}) =>
        (float[40,3,4] y, float[2,4,3] d, float[2,4,3] e, float[2,4,3] f)
        {{ t = Transpose<perm = [0, 2, 1]>(x) a = Relu(t) b = Neg(t) p = Transpose<perm = [0, 2, 1]>(a)
          q = Transpose<perm = [0, 2, 1]>(b) y = Concat<axis = 0>(p, q, {more}) d = Abs(t) e = Sigmoid(t) f = Exp(t) }}"""
    held(read(text), ["optimize_transpose"], *[X4[:, :, :, 0]] * 19)
