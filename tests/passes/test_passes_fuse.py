"""The fusions of models: operators in place of their primitive forms, each result judged by onnxruntime."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser
from tests.helpers.paths import TESTS

from singa.cli import main
from singa_backend import InvalidInput, SingaBackend
from singa_backend.conform import foreign
from singa_backend.engines.oracle import Oracle
from singa_backend.passes import FUSIONS, PASSES, optimize

F = np.float32
RNG = np.random.default_rng(0)
MODELS = {m.name: m for m in foreign.stored(TESTS / "models")}
SHAPES = {"x": (2, 4, 6, 8), "q": (2, 3, 4, 6), "k": (2, 3, 5, 6), "v": (2, 3, 5, 6), "p": (2, 6, 1), "r": (2, 3, 6, 4)}
NUMBERS = {
    "e": 1e-5, "one": 1.0, "two": 2.0, "half": 0.5, "three": 3.0, "six": 6.0, "zero": 0.0, "twenty": 20.0, "tenth": 0.1,
    "root": math.sqrt(2), "c3": 0.044715, "c1": math.sqrt(2 / math.pi), "minus": -0.5,
}  # fmt: skip


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(F)


WEIGHTS = {
    "w": normal(8), "b": normal(1, 8), "cw": normal(4, 1, 1), "cb": normal(1, 4, 1, 1), "ax": np.array([-1]),
    "ones": np.ones(2, F), "zeros": np.zeros(2, F), "groups": np.array([0, 2, -1]), "back": np.array([2, 4, 6, 8]),
    "slope": normal(8), "mask": normal(4, 5), "freq": np.array([[[1, 0.1]]], F), "at1": np.array([1]),
}  # fmt: skip


def read(body: str, opset: int, *trained: str) -> ModelProto:
    """A model of ONNX's text; numbers are Constant nodes, or initializers if they are among `trained`."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    inputs = ", ".join(f"float[{','.join(map(str, SHAPES[n]))}] {n}" for n in SHAPES if n in words)
    nodes = " ".join(f"{n} = Constant <value_float = {v}> ()" for n, v in NUMBERS.items() if n in words and n not in trained)
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({inputs}) => (float[m,h,l,s] y) {{ {nodes} {body} }}'
    )
    for name, value in {**WEIGHTS, **{n: np.asarray(NUMBERS[n], F) for n in trained}}.items():
        if name in words:
            model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def ops(model: ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if n.op_type != "Constant"]


def judged(oracle: Oracle, model: ModelProto, **options: Any) -> list[str]:
    """Optimize with fusions; the results of onnxruntime before and after, and ours; the operators that are left."""
    options = {"parameters": ["w", "b", "cw", "cb", "slope"], **options}
    feeds = {v.name: normal(*(d.dim_value for d in v.type.tensor_type.shape.dim)) * 3 for v in model.graph.input}
    wanted = oracle.run(model.SerializeToString(), feeds, timeout=120)
    report = optimize(model, fuse=True, **options)
    assert not report.failures and report.settled, str(report)
    onnx.checker.check_model(model, full_check=True)
    ours = SingaBackend.prepare(model, optimize=0).run(feeds).to_dict()
    for got in (oracle.run(model.SerializeToString(), feeds, timeout=120), ours):
        assert foreign.error(got["y"], wanted["y"]) <= 1e-5
    assert optimize(model, fuse=True, **options).changes == 0
    return ops(model)


MEAN = "u = ReduceMean <axes = [{0}]> (x) d = Sub(x, u) q2 = Mul(d, d) v2 = ReduceMean <axes = [{0}]> (q2) a = Add(v2, e) "
NEW_MEAN = "u = ReduceMean(x, ax) d = Sub(x, u) q2 = Pow(d, two) v2 = ReduceMean(q2, ax) a = Add(v2, e) "
GROUP = "j = Reshape(x, groups) n = InstanceNormalization(j, ones, zeros) t = Reshape(n, back) "
SPLIT = "lo, hi = Split <axis = -1, num_outputs = 2> (r) n = Neg(hi) t = Concat <axis = -1> (n, lo) "
ANGLES = "f = Mul(p, freq) g = Concat <axis = -1> (f, f) h = Cos(g) i = Unsqueeze(h, at1) j = Sin(g) l = Unsqueeze(j, at1) "
SCORES = "t = Transpose <perm = [0, 1, 3, 2]> (k) m = MatMul(q, t) s = Mul(m, half) "

CASES = {
    "layer norm": (17, MEAN.format("-1") + "s = Sqrt(a) n = Div(d, s) m = Mul(n, w) y = Add(m, b)", ["LayerNormalization"]),
    "layer norm, opset 18": (18, NEW_MEAN + "i = Pow(a, minus) n = Mul(i, d) y = Mul(n, w)", ["LayerNormalization"]),
    "layer norm without scale": (17, MEAN.format("2, 3") + "s = Sqrt(a) y = Div(d, s)", ["LayerNormalization"]),
    "layer norm of Keras": (
        17, MEAN.format("-1") + "s = Sqrt(a) i = Reciprocal(s) g = Mul(i, w) h = Mul(x, g) j = Mul(u, g) l = Sub(b, j) "
        "y = Add(l, h)", ["LayerNormalization"],
    ),
    "layer norm of another axis": (
        17, MEAN.format("1") + "s = Sqrt(a) n = Div(d, s) m = Mul(n, cw) y = Add(m, cb)",
        ["Transpose", "LayerNormalization", "Transpose"],
    ),
    "instance norm": (
        13, MEAN.format("2, 3") + "s = Sqrt(a) n = Div(d, s) m = Mul(n, cw) y = Add(m, cb)", ["InstanceNormalization"],
    ),
    "rms norm": (
        23, "q2 = Mul(x, x) v2 = ReduceMean(q2, ax) a = Add(v2, e) s = Sqrt(a) n = Div(x, s) y = Mul(n, w)",
        ["RMSNormalization"],
    ),
    "group norm": (21, GROUP + "m = Mul(t, cw) y = Add(m, cb)", ["GroupNormalization"]),
    "gelu": (20, "u = Div(x, root) f = Erf(u) g = Add(f, one) h = Mul(x, g) y = Mul(h, half)", ["Gelu"]),
    "gelu of tanh": (
        20, "a = Mul(x, x) f = Mul(a, x) g = Mul(f, c3) h = Add(x, g) i = Mul(h, c1) j = Tanh(i) l = Add(j, one) "
        "m = Mul(l, half) y = Mul(x, m)", ["Gelu"],
    ),
    "swish": (24, "s = Sigmoid(x) y = Mul(x, s)", ["Swish"]),
    "hard swish": (14, "a = Add(x, three) f = Clip(a, zero, six) g = Div(f, six) y = Mul(x, g)", ["HardSwish"]),
    "hard sigmoid": (14, "a = Add(x, three) f = Clip(a, zero, six) y = Div(f, six)", ["HardSigmoid"]),
    "mish": (18, "s = Softplus(x) t = Tanh(s) y = Mul(x, t)", ["Mish"]),
    "leaky relu": (14, "m = Mul(x, tenth) y = Max(x, m)", ["LeakyRelu"]),
    "prelu": (16, "a = Relu(x) n = Neg(x) f = Relu(n) m = Mul(f, slope) y = Sub(a, m)", ["PRelu"]),
    "softplus": (14, "f = Greater(x, twenty) s = Softplus(x) y = Where(f, x, s)", ["Softplus"]),
    "rotary": (
        23, ANGLES + SPLIT + "a = Mul(r, i) d = Mul(t, l) y = Add(a, d)",
        ["Mul", "Concat", "Cos", "Unsqueeze", "Sin", "Unsqueeze", "Slice", "Squeeze", "Slice", "Squeeze", "RotaryEmbedding"],
    ),
    "attention": (23, SCORES + "z = Softmax <axis = -1> (s) y = MatMul(z, v)", ["Attention"]),
    "attention with a mask": (23, SCORES + "n = Add(s, mask) z = Softmax <axis = -1> (n) y = MatMul(z, v)", ["Attention"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_fusions(name: str, oracle: Oracle) -> None:
    opset, body, wanted = CASES[name]
    assert sorted(judged(oracle, read(body, opset))) == sorted(wanted)


@pytest.mark.parametrize(
    ("name", "opset"),
    [("layer norm", 16), ("gelu", 19), ("swish", 23), ("mish", 17), ("rms norm", 22), ("group norm", 20),
     ("rotary", 22), ("attention", 22)],
)  # fmt: skip
def test_an_opset_without_the_operator_keeps_its_form(name: str, opset: int) -> None:
    model = read(CASES[name][1], opset)
    wanted = ops(model)
    report = optimize(model, list(FUSIONS))
    assert not report.failures and not report.changes and ops(model) == wanted
    assert not any(n.op_type == "Constant" and n.output[0] not in NUMBERS for n in model.graph.node), "nothing is left behind"


def test_fusions_are_not_the_default() -> None:
    for opset, body, _ in CASES.values():
        model = read(body, opset)
        optimize(model)
        assert not {"LayerNormalization", "Gelu", "Attention"} & {*ops(model)}
    assert not PASSES.keys() & FUSIONS.keys()


def test_weights_stay_initializers(oracle: Oracle) -> None:
    model = read(CASES["layer norm"][1], 17)
    judged(oracle, model)
    (norm,) = (n for n in model.graph.node if n.op_type == "LayerNormalization")
    assert norm.input[1] == "w" and set(norm.input[1:]) <= {t.name for t in model.graph.initializer}
    plain = read(CASES["layer norm without scale"][1], 17)
    judged(oracle, plain)
    assert not plain.graph.initializer, "a scale of ones does not train: it is a Constant node"


@pytest.mark.parametrize(
    ("name", "number"),
    [("layer norm", "e"), ("gelu", "half"), ("hard sigmoid", "six"), ("leaky relu", "tenth"), ("softplus", "twenty"),
     ("attention", "half")],
)  # fmt: skip
def test_a_parameter_does_not_become_an_attribute(name: str, number: str, oracle: Oracle) -> None:
    """A float initializer may train, unless it is known that it does not."""
    opset, body, wanted = CASES[name]
    assert sorted(judged(oracle, read(body, opset, number), parameters=None)) != sorted(wanted)
    assert sorted(judged(oracle, read(body, opset, number), parameters=[number])) != sorted(wanted)
    assert sorted(judged(oracle, read(body, opset, number), parameters=[])) == sorted(wanted)


def test_parameters_are_not_left_out_or_split(oracle: Oracle) -> None:
    group = CASES["group norm"][1]
    assert "InstanceNormalization" in judged(oracle, read(group, 21), parameters=["ones"])
    norm = CASES["layer norm"][1].replace("Mul(n, w)", "Mul(n, tenth)")  # one number for all places
    assert judged(oracle, read(norm, 17, "tenth"), parameters=[]) == ["LayerNormalization"]
    assert judged(oracle, read(norm, 17, "tenth"), parameters=["tenth"]) == ["LayerNormalization", "Mul", "Add"]
    prelu = CASES["prelu"][1].replace("Sub(a, m)", "Add(a, m)")
    assert judged(oracle, read(prelu, 16), parameters=[]) == ["PRelu"]
    assert "PRelu" not in judged(oracle, read(prelu, 16), parameters=["slope"])


@pytest.mark.parametrize("name", MODELS)
def test_models_from_elsewhere(name: str, oracle: Oracle) -> None:
    original, model = onnx.load(MODELS[name].path), onnx.load(MODELS[name].path)
    report = optimize(model, fuse=True, parameters=[])
    assert not report.failures and report.settled
    onnx.checker.check_model(model, full_check=True)
    for inputs, _ in MODELS[name].data:
        before, after = (oracle.run(m.SerializeToString(), inputs, timeout=120) for m in (original, model))
        ours = SingaBackend.prepare(model, optimize=0).run(dict(inputs)).to_dict()
        for n, value in before.items():
            assert foreign.error(after[n], value) <= 1e-5 and foreign.error(ours[n], value) <= 1e-5


def test_functions_and_branches_are_fused(oracle: Oracle) -> None:
    then, other = "t () => (float[m,h,l,s] yes) { g = Sigmoid(f) yes = Mul(g, f) }", "o () => (float[m,h,l,s] no) { no = Neg(f) }"
    test = "f = local.silu(x) n = ReduceMax <keepdims = 0> (f) c = Greater(n, zero) "
    model = read(f"{test} y = If (c) <then_branch = {then}, else_branch = {other}>", 24)
    nodes = [onnx.helper.make_node("Sigmoid", ["p"], ["q"]), onnx.helper.make_node("Mul", ["p", "q"], ["r"])]
    model.functions.append(onnx.helper.make_function("local", "silu", ["p"], ["r"], nodes, [onnx.helper.make_opsetid("", 24)]))
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    judged(oracle, model)
    assert [n.op_type for n in model.functions[0].node] == ["Swish"]
    branch = next(a.g for n in model.graph.node if n.op_type == "If" for a in n.attribute if a.name == "then_branch")
    assert [n.op_type for n in branch.node] == ["Swish"]


# --- the command


def sonnx(*args: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


def test_command(tmp_path: Path) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(read(CASES["layer norm"][1], 17), source)
    assert sonnx("optimize", source, "-o", target).exit_code == 0
    assert "LayerNormalization" not in ops(onnx.load(target))
    found = sonnx("optimize", source, "-o", target, "--fuse", "--json")
    assert found.exit_code == 0, found.output
    assert {p["pass"]: p["changes"] for p in json.loads(found.output)["passes"]}["layer_norms"] == 1
    assert ops(onnx.load(target)) == ["LayerNormalization"]
    assert sonnx("optimize", source, "-o", target, "--pass", "layer_norms").exit_code == 0
    assert ops(onnx.load(target)) == ["LayerNormalization"]
    listed = sonnx("optimize", "--list", "--fuse").output
    assert [line.split()[0] for line in listed.splitlines()] == [*PASSES, *FUSIONS]


def test_the_command_knows_weights_by_their_roles(tmp_path: Path) -> None:
    """An epsilon is not a weight, although it is an initializer; a learned factor is one."""
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(read(CASES["layer norm"][1], 17, "e"), source)
    assert sonnx("optimize", source, "-o", target, "--fuse").exit_code == 0
    assert ops(onnx.load(target)) == ["LayerNormalization"]
    model = read(CASES["attention"][1], 23, "half")
    onnx.helper.set_model_props(model, {"sonnx.parameters": json.dumps(["half"])})
    onnx.save(model, source)
    assert sonnx("optimize", source, "-o", target, "--fuse").exit_code == 0
    assert "Attention" not in ops(onnx.load(target))


def test_an_unknown_fusion_is_refused() -> None:
    with pytest.raises(InvalidInput, match="layer_norms"):
        optimize(read(CASES["gelu"][1], 20), ["layer_norm"])
