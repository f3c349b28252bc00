"""What blocks a gradient, before training: all of it at once, with reasons, in subgraphs and functions too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from tests.helpers.paths import MODELS

from singa import sonnx
from singa.cli import main
from singa_backend import InvalidInput
from singa_backend.autodiff.support import gradient_support
from singa_backend.ir.declaration import declarations

HEAD = '<ir_version: 8, opset_import: ["": 18, "local": 1]>'


def model(text: str, functions: str = "", **states: Any) -> ModelProto:
    """A model out of ONNX's text form; states: its initializers."""
    made = parser.parse_model(f"{HEAD} agraph {text} {functions}")
    for name, value in states.items():
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    return made


def report(*args: Any, **kwargs: Any) -> Any:
    states = {n: kwargs.pop(n) for n in list(kwargs) if n not in ("by", "outputs", "functions")}
    return sonnx.trainable_report(model(args[0], kwargs.pop("functions", ""), **states), **kwargs)


def test_everything_has_a_gradient() -> None:
    found = report("(float[2, 3] x) => (float[2, 4] y) { h = MatMul(x, w) y = Add(h, b) }", w=np.ones((3, 4)), b=np.ones(4))
    assert found.good and found.trainable == ["w", "b"] and not found.problems and not found.blocked
    assert "2 of 2 parameters get a gradient of y" in str(found)


def test_all_that_blocks_is_said_at_once() -> None:
    found = report("(float[3] x) => (float[3] y, int64 z) { a = Mul(x, w) f = Floor(a) z = ArgMax<keepdims = 0>(a)"
                   " r = Mul(x, v) g = Ceil(r) y = Add(f, g) }", w=np.ones(3), v=np.ones(3))  # fmt: skip
    assert not found.good and not found.trainable and list(found.blocked) == ["w", "v"]
    assert [p.operator for p in found.problems] == ["Floor", "ArgMax", "Ceil"]
    assert "Floor-13 has no gradient (zero)" in found.blocked["w"] and "ArgMax" in found.blocked["w"]
    assert "Ceil" in found.blocked["v"] and "Floor" not in found.blocked["v"]
    assert not found.fatal  # nothing raises; the gradients just end


def test_another_path_is_enough() -> None:
    found = report("(float[3] x) => (float[3] y) { a = Mul(x, w) f = Floor(a) y = Sub(a, f) }", w=np.ones(3))
    assert found.good and found.trainable == ["w"] and [p.operator for p in found.problems] == ["Floor"]


def test_what_no_output_needs() -> None:
    found = report("(float[3] x) => (float[3] y) { y = Mul(x, w) q = Floor(v) }", w=np.ones(3), v=np.ones(3))
    assert found.blocked == {"v": "no output depends on it"} and not found.problems


def test_only_these_outputs_and_names() -> None:
    text = "(float[3] x) => (float[3] y, float[3] z) { y = Mul(x, w) z = Round(v) }"
    assert not report(text, w=np.ones(3), v=np.ones(3)).good
    found = report(text, w=np.ones(3), v=np.ones(3), by=["x", "w"], outputs=["y"])
    assert found.good and found.trainable == ["x", "w"]
    with pytest.raises(InvalidInput, match="'q' is not a value"):
        report(text, w=np.ones(3), v=np.ones(3), by=["q"])


def test_an_integer_input_has_none() -> None:
    found = report("(int64[3] x) => (float[3] y) { f = Cast<to = 1>(x) y = Mul(f, w) }", w=np.ones(3), by=["x", "w"])
    assert found.trainable == ["w"] and found.blocked == {"x": "its dtype is int64, not a float type"}


def test_a_cast_to_integers_ends_it() -> None:
    found = report("(float[3] x) => (float[3] y) { a = Cast<to = 7>(w) f = Cast<to = 1>(a) y = Mul(f, x) }", w=np.ones(3))
    assert list(found.blocked) == ["w"]


def test_a_missing_rule_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    sin = declarations["", "Sin"][7]
    for part, value in (("gradient_rule", None), ("decomposition_rule", None), ("reason", "")):
        monkeypatch.setattr(sin, part, value)
    assert gradient_support("", "Sin", 7).kind == "missing"
    found = report("(float[3] x) => (float[3] y) { a = Mul(x, w) y = Sin(a) }", w=np.ones(3))
    assert not found.good and [p.code for p in found.fatal] == ["SX830"] and "Sin-7" in str(found)


def test_an_old_version_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "(float[2, 3] x) => (float[2, 3] y) { a = Mul(x, w) y = Sum(a, x) }"
    made = model(text, w=np.ones((2, 3)))
    del made.opset_import[:]
    made.opset_import.append(helper.make_opsetid("", 5))
    monkeypatch.setattr(declarations["", "Mul"][1], "decomposition_rule", None)
    monkeypatch.setattr(declarations["", "Mul"][1], "gradient_rule", object())
    found = sonnx.trainable_report(made)
    assert [p.code for p in found.fatal] == ["SX831"] and "Mul-1 has no decomposition for opset 18" in str(found)


def test_functions_are_seen_through() -> None:
    functions = '<domain: "local", opset_import: ["": 18]> twice (a, b) => (c, d) { c = Mul(a, a) d = Floor(b) }'
    text = "(float[3] x) => (float[3] y) { p, q = local.twice(w, v) y = Add(p, q) }"
    found = report(text, functions=functions, w=np.ones(3), v=np.ones(3))
    assert found.trainable == ["w"] and "Floor" in found.blocked["v"]
    assert found.problems[0].node.count("/") == 1  # the call, and the node within


def test_calls_of_one_function_are_apart() -> None:
    functions = '<domain: "local", opset_import: ["": 18]> double (a) => (b) { b = Add(a, a) }'
    text = "(float[3] x) => (float[3] y) { p = local.double(w) q = local.double(v) r = Floor(p) y = Add(r, q) }"
    found = report(text, functions=functions, w=np.ones(3), v=np.ones(3))
    assert found.trainable == ["v"] and list(found.blocked) == ["w"]


IF = """(bool c, float[3] x) => (float[3] y) {
    y = If (c) <then_branch = t () => (float[3] p) { p = Mul(x, w) }, else_branch = e () => (float[3] q) { q = Floor(v) }>
}"""
LOOP = """(int64 m, float[3] x) => (float[3] y, float[K, 3] z) {
    start = Mul(x, u)
    y, z = Loop (m, , start) <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t, float[3] o)
        { d = Identity(c) t = Mul(s, w) o = Floor(v) }>
}"""


def test_branches() -> None:
    found = report(IF, w=np.ones(3), v=np.ones(3))
    assert found.trainable == ["w"] and "Floor" in found.blocked["v"]


def test_loops() -> None:
    found = report(LOOP, w=np.ones(3), v=np.ones(3), u=np.ones(3))
    assert found.trainable == ["w", "u"] and "Floor" in found.blocked["v"]


def test_running_statistics_are_not_trained() -> None:
    text = "(float[2, 3] x) => (float[2, 3] y) { y = BatchNormalization(x, s, b, m, v) }"
    found = report(text, s=np.ones(3), b=np.ones(3), m=np.ones(3), v=np.ones(3))
    assert found.trainable == ["s", "b"] and found.statistics == ["m", "v"] and found.good


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.onnx")), ids=lambda p: p.stem)
def test_exported_models_train(path: Path) -> None:
    found = sonnx.trainable_report(path)
    lacking = sorted({f"{p.operator}-{p.version}" for p in found.fatal if p.code == "SX830"})
    if lacking:
        pytest.xfail(f"still without a rule: {', '.join(lacking)}")
    assert not found.blocked, str(found)
    assert found.trainable and not found.fatal, str(found)


def test_the_command(tmp_path: Path) -> None:
    made = model("(float[3] x) => (float[3] y) { a = Mul(x, w) y = Floor(a) }", w=np.ones(3))
    onnx.save(made, tmp_path / "model.onnx")

    def run(*args: str) -> Any:
        return CliRunner().invoke(main, ["check", str(tmp_path / "model.onnx"), *args])

    assert run().exit_code == 0
    shown = run("--train")
    assert shown.exit_code == 1 and "0 of 1 parameters get a gradient of y" in shown.output and "Floor-13" in shown.output
    found = json.loads(run("--train", "--json").stdout)["training"]
    assert list(found["blocked"]) == ["w"] and found["problems"][0]["code"] == "SX832" and not found["good"]


def test_sixteen_bit_parameters_train() -> None:
    made = model("(float16[3] x) => (float16[3] y) { y = Mul(x, w) }")
    made.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float16), "w"))
    assert made.graph.initializer[0].data_type == TensorProto.FLOAT16
    assert sonnx.trainable_report(made).good


def trained(text: str, **states: Any) -> Any:
    found = report(text, w=np.ones(3), **states)
    assert found.good and found.trainable == ["w"]
    return [p.operator for p in found.problems]


@pytest.mark.parametrize(
    "nodes",
    [
        "s = Shape(a) y = Reshape(b, s)",
        "n = Size(a) f = Cast<to = 1>(n) r = Sqrt(f) y = Div(b, r)",
        "n = NonZero(a) t = Transpose(n) g = GatherND(b, t) y = Mul(g, b)",
        "i = ArgMax(a) g = Gather(b, i) y = Mul(g, b)",
        "z = Greater(a, b) o = Not(z) y = Where(o, a, b)",
        "q = Cast<to = 7>(a) g = Gather(b, q) y = Mul(g, b)",
        "s = Shape(a) c = Slice(s, zero, one) d = Mul(c, c) y = Expand(b, d)",
        "k = IsNaN(a) y = Where(k, b, a)",
    ],
)
def test_the_arithmetic_of_shapes_indices_and_masks_is_not_listed(nodes: str) -> None:
    consts = "zero = Constant<value_ints = [0]>() one = Constant<value_ints = [1]>()"
    assert trained(f"(float[3] x) => (float[n] y) {{ {consts} a = Mul(x, w) b = Neg(a) {nodes} }}") == []


def test_an_integer_output_next_to_a_loss_is_not_listed() -> None:
    assert trained("(float[3] x) => (float[3] y, int64[1] z) { y = Mul(x, w) z = ArgMax(y) }") == []


@pytest.mark.parametrize(
    ("nodes", "listed"),
    [
        ("f = Floor(a) y = Sub(a, f)", ["Floor"]),
        ("q = Cast<to = 7>(a) f = Cast<to = 1>(q) y = Add(a, f)", ["Cast"]),
        ("q = Cast<to = 7>(a) p = Neg(q) f = Cast<to = 1>(p) g = Exp(f) y = Add(a, g)", ["Cast"]),
        ("z = Greater(a, x) f = Cast<to = 1>(z) y = Mul(a, f)", ["Greater"]),
        ("i = ArgMax(a) f = Cast<to = 1>(i) y = Mul(a, f)", ["ArgMax"]),
    ],
)
def test_a_value_that_is_computed_through_integers_is_listed(nodes: str, listed: list[str]) -> None:
    assert trained(f"(float[3] x) => (float[n] y) {{ a = Mul(x, w) {nodes} }}") == listed


def test_an_index_that_is_the_only_path_of_a_parameter_is_listed() -> None:
    found = report("(float[3] x) => (float[1] y) { a = Mul(x, w) i = ArgMax(a) y = Gather(x, i) }", w=np.ones(3))
    assert list(found.blocked) == ["w"] and [p.operator for p in found.problems] == ["ArgMax"]
    found = report("(float[3] x) => (float[3] y) { a = Mul(x, w) s = Shape(a) y = Reshape(x, s) }", w=np.ones(3))
    assert list(found.blocked) == ["w"] and [p.operator for p in found.problems] == ["Shape"]
