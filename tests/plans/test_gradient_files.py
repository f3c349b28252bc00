"""Files of training steps: gradients are functions, so that a prepared file computes them by kernels, or nodes on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
from onnx import ModelProto, parser

import singa_backend
from singa import opt, sonnx
from singa_backend.ir.gradient import GRADIENT

NET = """<ir_version: 10, opset_import: ["": %d]>
net (float[8, 3, 16, 16] x) => (float[8, 4] y) <float[4, 3, 3, 3] w = {%s}> {
    h = Conv <pads = [1, 1, 1, 1]> (x, w)
    a = Relu (h)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
    g = GlobalAveragePool (p)
    y = Flatten (g)
}"""

ATTENTION = """<ir_version: 10, opset_import: ["": 23]>
net (float[2, 4, 8] x) => (float[2, 4, 8] y) <float[8, 8] w> {
    k = MatMul (x, w)
    y = Attention <q_num_heads = 2, kv_num_heads = 2, softcap = 2.0> (x, k, x)
}"""

TAKEN = ["Conv", "MaxPool", "Relu", "SoftmaxCrossEntropyLoss"]
"""The operators of the net whose gradients have kernels."""


def written(opset: int = 21, **options: Any) -> ModelProto:
    weights = ", ".join(map(str, np.random.default_rng(0).standard_normal(108).round(3)))
    rule = opt.SGD(lr=0.1, momentum=0.9)
    net = parser.parse_model(NET % (opset, weights))
    return sonnx.to_training_onnx(net, "softmax_cross_entropy", rule, opset=opset, **options)


@pytest.fixture(scope="module")
def step() -> ModelProto:
    return written()


def feeds() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((8, 3, 16, 16)).astype(np.float32), "target": rng.integers(0, 4, 8)}


def agree(made: Any, expected: Any) -> None:
    for value, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [18, 20, 21, 23])
def test_a_file_runs_with_gradient_kernels(opset: int) -> None:
    """Before IR version 10, which opset 21 brings, functions have no overloads, and their names are numbered."""
    step = written(opset)
    onnx.checker.check_model(step, full_check=True)
    assert sorted(f.name.partition("_")[0] for f in step.functions) == TAKEN
    assert all(bool(f.overload) == (opset >= 21) for f in step.functions)
    rep, plain = sonnx.prepare(step), sonnx.prepare(step, optimize=0)
    for _ in range(2):
        made = rep.run(feeds())
    agree(made, plain.run(feeds()))
    profile = rep.profile(feeds())
    assert (profile.gradients, profile.refused_gradients) == (4, {})
    kernels = " ".join(s.kernel for s in profile.steps)
    assert all(k in kernels for k in ("conv by weights", "pooling gradient", "eltwise gradient", "loss_gradient"))


def test_a_file_without_functions_computes_the_same(step: ModelProto) -> None:
    """Also after another program has inlined the functions; its gradients are then computed by their nodes."""
    expected = sonnx.prepare(step, optimize=0).run(feeds())
    for other in (written(inline_gradients=True), onnx.inliner.inline_local_functions(step)):
        assert not other.functions and all(n.domain != GRADIENT for n in other.graph.node)
        onnx.checker.check_model(other, full_check=True)
        agree(sonnx.prepare(other).run(feeds()), expected)
        assert sonnx.prepare(other).profile(feeds()).gradients == 0


def test_a_file_of_an_earlier_version_trains(step: ModelProto) -> None:
    """It has the nodes of all gradients, and lists the calls in its metadata, which are ignored."""
    old = written(inline_gradients=True)
    old.metadata_props.add(
        key="sonnx.gradients", value='{"digest": "0", "calls": [["", "Conv", 11, {}, ["x"], ["y"], ["z"], [""]]]}'
    )
    agree(sonnx.prepare(old).run(feeds()), sonnx.prepare(step, optimize=0).run(feeds()))


def test_the_gradients_of_a_file_keep_their_operators(step: ModelProto, tmp_path: Path) -> None:
    onnx.save(step, tmp_path / "step.onnx")
    graph = singa_backend.read(onnx.load(tmp_path / "step.onnx"))
    found = {n.op_type.partition("_")[0]: n for n in graph.nodes if n.domain == GRADIENT}
    assert sorted(found) == TAKEN and all(n.function is not None for n in found.values())
    conv = found["Conv"]
    assert conv.gradient is not None and conv.gradient.places == (1,) and conv.gradient.operator.version == 11
    assert conv.gradient.attributes == {"pads": (1, 1, 1, 1)}


def test_a_call_within_a_rule() -> None:
    """The rule of Attention writes the gradients of its parts, of which that of Tanh is a call."""
    net = parser.parse_model(ATTENTION)
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    net.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    made = sonnx.to_training_onnx(net, "mse_loss", opt.SGD(lr=0.1))
    onnx.checker.check_model(made, full_check=True)
    rng = np.random.default_rng(1)
    given = {n: rng.standard_normal((2, 4, 8)).astype(np.float32) for n in ("x", "target")}
    rep = sonnx.prepare(made)
    agree(rep.run(given), sonnx.prepare(made, optimize=0).run(given))
    agree(rep.run(given), sonnx.prepare(onnx.inliner.inline_local_functions(made)).run(given))
    assert rep.profile(given).gradients == 1


def changed(step: ModelProto, name: str) -> tuple[ModelProto, Any, Any]:
    """A copy of a file, and the function and the node of a gradient in it."""
    copy = ModelProto.FromString(step.SerializeToString())
    function = next(f for f in copy.functions if f.name.startswith(f"{name}_"))
    return copy, function, next(n for n in copy.graph.node if n.domain == GRADIENT and n.op_type == function.name)


@pytest.mark.parametrize("how", ["operator", "inputs", "outputs"])
def test_a_function_of_another_form_is_a_function(step: ModelProto, how: str) -> None:
    """Whatever its name says, its body is computed."""
    copy, function, node = changed(step, "Relu")
    renamed = {"inputs": function.input, "outputs": function.output}.get(how, [])
    for old in list(renamed):
        for names in (renamed, *(n.input for n in function.node), *(n.output for n in function.node)):
            for i, n in enumerate(names):
                if n == old:
                    names[i] = f"z{old}"
    if how == "operator":
        function.name = node.op_type = "Nothing_14"
    graph = singa_backend.read(copy)
    assert sum(n.gradient is not None and n.domain == GRADIENT for n in graph.nodes) == 3
    agree(sonnx.prepare(copy).run(feeds()), sonnx.prepare(step, optimize=0).run(feeds()))


HOSTILE = """<ir_version: 10, opset_import: ["": 21, "ai.singa.gradient": 1]>
g (float[1, 1] x, float[4096, 1] big) => (float[1, 1] y, float[4096, 1] d) <float[1] w = {1}> {
    y = LayerNormalization (x, w)
    d = ai.singa.gradient.LayerNormalization_17 (big, big, w, y)
}
<domain: "ai.singa.gradient", opset_import: ["": 21]>
LayerNormalization_17 (dy0, x0, x1, y0) => (dx0) { dx0 = Mul (dy0, x0) }"""

ABSENT = """<ir_version: 10, opset_import: ["": 21, "ai.singa.gradient": 1]>
g (float[4] x) => (float[4] y, float d) <float r = {0.5}, bool t = {1}> {
    y, m = Dropout (x, r, t)
    d = ai.singa.gradient.Dropout_13 (x, "", x, r, t, y, m)
}
<domain: "ai.singa.gradient", opset_import: ["": 21]>
Dropout_13 (dy0, dy1, x0, x1, x2, y0, y1) => (dx1) { dx1 = Identity (x1) }"""

FURTHER = """<ir_version: 10, opset_import: ["": 21, "ai.singa.gradient": 1]>
g (float[4] x) => (float[4] d) { y = Relu (x)  d = ai.singa.gradient.Relu_14 (x, x, x, y) }
<domain: "ai.singa.gradient", opset_import: ["": 21]>
Relu_14 (dy0, x0, x1, y0) => (dx1) { dx1 = Mul (dy0, x1) }"""


@pytest.mark.parametrize("text", [HOSTILE, ABSENT, FURTHER], ids=["another call", "no gradient", "an input too many"])
def test_what_no_rule_writes_is_computed_by_the_body(text: str) -> None:
    """A gradient whose forward call is of other values, a gradient that no kernel returns, and an input that there is not."""
    model = parser.parse_model(text)
    given = {v.name: np.arange(1, 1 + v.type.tensor_type.shape.dim[0].dim_value, dtype=np.float32) for v in model.graph.input}
    given = {n: v.reshape(-1, 1) if text is HOSTILE else v for n, v in given.items()}
    rep = sonnx.prepare(model)
    expected = sonnx.prepare(model, optimize=0).run(given)[-1]
    for _ in range(2):
        np.testing.assert_array_equal(rep.run(given)[-1], expected)
    assert rep.profile(given).gradients == 0


def test_defaults_of_a_function() -> None:
    """An attribute that the call omits has the default of the function."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "ai.singa.gradient": 1]>
    g (float[2, 3] x) => (float[2, 3] d) { y = Softmax <axis = 0> (x)  d = ai.singa.gradient.Softmax_13 (x, x, y) }
    <domain: "ai.singa.gradient", opset_import: ["": 21]>
    Softmax_13 <axis: int = 0> (dy0, x0, y0) => (dx0) {
        p = Mul (dy0, y0)  a = Constant <value = int64[1] {0}> ()  s = ReduceSum (p, a)  c = Sub (dy0, s)  dx0 = Mul (y0, c)
    }""")
    given = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    agree(sonnx.prepare(model).run(given), sonnx.prepare(model, optimize=0).run(given))


def test_versions_of_an_old_file() -> None:
    """The gradient has the version of the model's node, and its forward call may be written as a newer one."""
    net = parser.parse_model(NET % (11, ", ".join(["0.5"] * 108)))
    rep = sonnx.prepare(sonnx.to_training_onnx(net, "softmax_cross_entropy", opt.SGD(lr=0.1)))
    rep.run(feeds())
    assert rep.profile(feeds()).gradients == len(TAKEN)


@pytest.mark.parametrize("options", [{}, {"inline_gradients": True}], ids=["functions", "nodes"])
def test_updates_of_a_file_without_gradients_by_kernels(options: dict[str, Any]) -> None:
    net = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    net (float[8, 4] x) => (float[8, 2] y) <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul (x, w) }""")
    made = sonnx.to_training_onnx(net, "mse_loss", opt.Adam(lr=0.1), **options)
    rep, rng = sonnx.prepare(made), np.random.default_rng(0)
    given = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (8, 4)), ("target", (8, 2)))}
    rep.run(given)
    assert any("update" in s.kernel for s in rep.profile(given).steps) and not made.functions


def test_a_profile_by_definitions(step: ModelProto) -> None:
    found = sonnx.prepare(step, optimize=0).profile(feeds())
    one = next(s for s in found.steps if any(n.startswith("Conv") for n in s.operators) and "gradient" in s.nodes[0])
    assert one.calls == 1 and one.seconds > 0


def test_an_attribute_of_another_type_is_an_error(step: ModelProto) -> None:
    copy, _, node = changed(step, "Conv")
    next(a for a in node.attribute if a.name == "pads").CopyFrom(onnx.helper.make_attribute("pads", "same"))
    with pytest.raises(singa_backend.InvalidModel, match="must be INTS"):
        singa_backend.read(copy)


def test_an_inference_file_has_no_gradients() -> None:
    exported = sonnx.export(sonnx.SONNXModel(parser.parse_model(NET % (21, ", ".join(["0.5"] * 108)))))
    assert not exported.functions and not any(e.key == "sonnx.gradients" for e in exported.metadata_props)
