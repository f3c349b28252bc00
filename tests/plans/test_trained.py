"""A training step on the CPU records primitive forms of an operator as one call, whose gradient one kernel computes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper, parser
from tests.helpers.recorded_steps import Recorded, agree, normal, planner_of, record, steps_of

from singa import autograd, opt, sonnx
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa._onnx.imported import Imported
from singa._onnx.tensor_runs import forward
from singa_backend.kernels import onednn
from singa_backend.kernels.table import GRADIENT, Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

RMS = "p = Pow(h, two) v = ReduceMean(p, axes) e = Add(v, epsilon) s = Sqrt(e)"
LAYER = "m = ReduceMean(h, axes) d = Sub(h, m) p = Pow(d, two) v = ReduceMean(p, axes) e = Add(v, epsilon) s = Sqrt(e)"
NORMS = {
    "RMSNormalization": f"{RMS} r = Reciprocal(s) n = Mul(h, r) z = Mul(n, w)",
    "RMSNormalization of a quotient": f"{RMS} n = Div(h, s) z = Mul(w, n)",
    "RMSNormalization with copies": f"{RMS} t = Identity(w) n = Div(h, s) c = Cast<to = 1>(n) z = Mul(c, t)",
    "LayerNormalization": f"{LAYER} q = Div(d, s) z = Mul(q, w)",
    "LayerNormalization with a shift": f"{LAYER} q = Div(d, s) n = Mul(q, w) z = Add(n, b)",
    "LayerNormalization without a scale": f"{LAYER} z = Div(d, s)",
}
GELU = "q = Div(h, root) f = Erf(q) t = Add(f, one) n = Mul(h, t) z = Mul(n, half)"
ACTIVATIONS = {
    "Gelu": GELU,
    "Gelu of a tanh": """q = Mul(h, h) c = Mul(q, h) k = Mul(c, cubic) t = Add(h, k) r = Mul(t, rate) f = Tanh(r)
        g = Add(f, one) n = Mul(h, g) z = Mul(n, half)""",
    "Swish": "f = Sigmoid(h) z = Mul(h, f)",
}
FORMS = {**NORMS, **ACTIVATIONS}
each = pytest.mark.parametrize("name", FORMS)
MIDDLES = {"Pow", "Sqrt", "Reciprocal", "Div", "Erf", "Tanh", "Sigmoid"}
"""Operators of which every form has one."""

ARRAYS = {
    "u": normal(33, 33) / 8, "w": np.abs(normal(33, seed=1)) + 1, "b": normal(33, seed=2), "axes": np.array([-1]),
    "two": 2.0, "epsilon": 1e-5, "root": 2**0.5, "one": 1.0, "half": 0.5, "cubic": 0.044715, "rate": (2 / np.pi) ** 0.5,
}  # fmt: skip


def file_of(body: str, *, outputs: Sequence[str] = ("y",), function: str = "", opset: int = 18, **changes: Any) -> ModelProto:
    """A model of x, of the sizes (n, 7, 33); its parameters are initializers, and its numbers Constants."""
    imports = f'"": {opset}' + (', "local": 1' if function else "")
    types = ", ".join(f"float[n, 7, k] {o}" for o in outputs)
    head = f"<ir_version: 9, opset_import: [{imports}]> net (float[n, 7, 33] x) => ({types})"
    model = parser.parse_model(f"{head} {{ {body} }} {function}")
    for name in sorted({i for node in model.graph.node for i in node.input} & ARRAYS.keys() | changes.keys()):
        value = (ARRAYS | changes)[name]
        if isinstance(value, np.ndarray):
            model.graph.initializer.append(numpy_helper.from_array(value, name))
        else:
            model.graph.node.insert(0, helper.make_node("Constant", [], [name], value_float=value))
    return model


def body_of(model: ModelProto) -> Any:
    """A step of a model: its outputs, and the gradients of the weighted sum of the first of them."""
    net = Imported(model)
    wide = net.moved(np.dtype(np.float64), None)

    def body(x: Tensor, weights: Tensor) -> list[Tensor]:
        mine = wide if op.dtype(x) == np.float64 else net
        ys = forward(mine, [x], training=True)
        pairs = autograd.backward(op.ReduceSum(op.Mul(ys[0], weights), keepdims=0))
        found = {id(v): g for v, g in pairs}
        return [*ys, *(found[id(v)] for v in (x, *mine.parameters.values()) if v.stores_grad)]

    return body


def check(body: str, joined: Sequence[str], **options: Any) -> Recorded:
    """Compare a step of a model with the definitions of its nodes in float64."""
    arrays = [normal(5, 7, 33) + 1, normal(5, 7, 33, seed=9)]
    return agree(body_of(file_of(body, **options)), arrays, [0], joined=joined, exact=True, tolerance=1e-5)


def recorded(step: Recorded) -> list[str]:
    """The operators of the nodes of a step."""
    return [node.op_type for node in step.step.graph.nodes]


@each
@pytest.mark.parametrize("after", ["y = Identity(z)", "y = Add(h, z)", "o = Cos(h) a = Add(o, z) y = Add(a, h)"])
def test_a_form(name: str, after: str) -> None:
    """Whatever else reads its input."""
    step = check(f"h = MatMul(x, u) {FORMS[name]} {after}", [name.split()[0]])
    assert step.in_training == ([name.split()[0]] if name in NORMS else []) and name.split()[0] in recorded(step)
    assert not MIDDLES & {c.op_type for c in step.planner.graph.nodes}


@pytest.mark.parametrize("opset", [13, 17])
def test_an_old_file(opset: int) -> None:
    """The axes of means are attributes, and the operators are newer than the file."""
    norm = FORMS["RMSNormalization"].replace("(p, axes)", "<axes = [-1]>(p)").replace("h", "x")
    check(f"{norm} h = Sin(z) f = Sigmoid(h) y = Mul(h, f)", ["RMSNormalization", "Swish"], opset=opset)


@each
def test_a_value_in_the_middle_that_is_used(name: str) -> None:
    """The parts stay, with their own gradients."""
    middle = "s" if name in NORMS else "f"
    own = {"Swish": ["Sigmoid"], "Gelu of a tanh": ["Tanh"]}.get(name, [])
    for outputs, last in (("y",), f"o = Abs({middle}) y = Add(z, o)"), (("y", middle), "y = Identity(z)"):
        assert name.split()[0] not in recorded(check(f"h = MatMul(x, u) {FORMS[name]} {last}", own, outputs=outputs))


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "another argument": ("Gelu", {"root": 1.5}), "another term": ("Gelu", {"one": 1.5}),
    "a trained factor": ("Gelu", {"half": normal(33)}), "another power": ("RMSNormalization", {"two": 4.0}),
    "another axis": ("RMSNormalization", {"axes": np.array([1])}),
    "a trained epsilon": ("RMSNormalization", {"epsilon": np.abs(normal(33))}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_a_form(name: str, changes: dict[str, Any]) -> None:
    assert name not in recorded(check(f"h = MatMul(x, u) {FORMS[name]} y = Identity(z)", [], **changes))


@pytest.mark.parametrize("name", ["RMSNormalization", "LayerNormalization"])
@pytest.mark.parametrize("scale", [ARRAYS["w"].reshape(1, 33), ARRAYS["w"][:7, None], np.ones(1, np.float32)], ids=np.shape)
def test_a_scale_that_the_operator_does_not_take(name: str, scale: np.ndarray) -> None:
    """The form without it is one call: a parameter is not read in another shape."""
    assert "Mul" in recorded(check(f"h = MatMul(x, u) {FORMS[name]} y = Identity(z)", [name], w=scale))[:5]


def test_a_form_whose_kernel_refuses() -> None:
    """No rows: the nodes run as the rule wrote them."""
    body = body_of(file_of(f"h = MatMul(x, u) {FORMS['RMSNormalization']} y = Add(h, z)"))
    step, other = (record(body, [normal(0, 7, 33)] * 2, [0], o) for o in (Options(), Options(level=0)))
    for actual, expected in zip(step.run(), other.run(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert not step.joined and "empty" in step.reasons["RMSNormalization"]


def test_forms_in_functions() -> None:
    """Functions are inlined; a parameter has the name of a constant in one."""
    numbers = " ".join(f"{n} = Constant <value = float {{{ARRAYS[n]}}}> ()" for n in ("root", "one", "half", "rate"))
    function = f'<opset_import: ["": 18], domain: "local"> Form (h) => (r) {{ {numbers} {GELU} r = Mul(z, rate) }}'
    check("h = Mul(x, rate) k = local.Form(h) y = local.Form(k)", ["Gelu"] * 2, function=function, rate=normal(33))


def test_requested_values() -> None:
    """Values in the middle of a form exist if a step requests them by name, or stops at them."""
    net = Imported(file_of(f"h = MatMul(x, u) {GELU} y = Identity(z)"))
    for options in {"aux_output": ["f"]}, {"last_layers": -4}:
        step = agree(lambda x, o=options: forward(net, [x], **o), [normal(5, 7, 33)], [0], joined=[], tolerance=1e-5)
        assert "Erf" in recorded(step)


# --- models


Fitted = type[sonnx.SONNXModel]


def trained(kind: Fitted, model: ModelProto, graph: bool) -> sonnx.SONNXModel:
    """A model in training, whose steps are recorded or not."""
    net = kind(model)
    net.set_optimizer(opt.SGD(0.5, momentum=0.9))
    net.train()
    net.graph(graph)
    return net


BATCHES = [(Tensor(data=normal(5, 7, 33, seed=n) + 1), Tensor(data=normal(5, 7, 33, seed=50 + n))) for n in range(8)]


def joined(net: sonnx.SONNXModel) -> list[str]:
    """The operators whose gradients kernels compute in the last recorded step."""
    return [c.op_type for c in planner_of(steps_of(net)[-1]).graph.nodes if c.domain == GRADIENT]


def alike(net: sonnx.SONNXModel, other: sonnx.SONNXModel) -> None:
    for name, t in net.get_states().items():
        np.testing.assert_allclose(t.data, other.get_states()[name].data, rtol=1e-5, atol=1e-5, err_msg=name)


def test_numbers_are_constants_until_they_change(mean_squares: Fitted) -> None:
    model = file_of(f"h = MatMul(x, u) {FORMS['RMSNormalization']} y = Add(h, z)", epsilon=np.array(1e-5, np.float32))
    net, other = (trained(mean_squares, model, g) for g in (True, False))
    for n, (x, target) in enumerate(BATCHES):
        for one in net, other:
            if n == 4:
                one.get_params()["epsilon"].copy_from_numpy(np.array(0.5, np.float32))
            elif n == 6:
                one.unfreeze("epsilon")
            one(x, target)
        if n == 3:
            assert joined(net) == ["RMSNormalization"]
    assert joined(net) == []  # the epsilon trains
    alike(net, other)


def test_numbers_that_nodes_compute() -> None:
    """A Cast of a number is a constant of the graph that is recorded, and its readers read it."""
    sizes = {"k": np.array([-1], np.int32), "i": np.array([7], np.int64), "j": np.array([33], np.int64)}
    form = FORMS["RMSNormalization"]
    check(
        f"h = MatMul (x, u) {form} last = Cast <to = 7> (k) sizes = Concat <axis = 0> (last, i, j) y = Reshape (z, sizes)",
        ["RMSNormalization"],
        **sizes,
    )


def test_nodes_that_follow_the_mode_of_the_model(mean_squares: Fitted) -> None:
    """Dropout drops, and BatchNormalization writes its statistics; one that reads a copy of them does not."""
    body = f"""k = BatchNormalization(x, ones, zeros, mean, variance) copied = Identity(mean)
        h = BatchNormalization(k, ones, zeros, copied, variance) {GELU} y = Dropout<seed = 3>(z, half)"""
    zeros, ones = np.zeros(7, np.float32), np.ones(7, np.float32)
    model = file_of(body, ones=ones, zeros=zeros, mean=zeros, variance=ones)
    net, other = (trained(mean_squares, model, g) for g in (True, False))
    for x, target in BATCHES[:4]:
        (y, _), (expected, _) = net(x, target), other(x, target)
        np.testing.assert_allclose(y.data, expected.data, rtol=1e-4, atol=1e-5)
        assert (np.asarray(y.data) == 0).mean() > 0.3
    assert "Gelu" in joined(net)
    alike(net, other)


def test_copies_and_files_of_a_trained_model(mean_squares: Fitted) -> None:
    """The fused nodes are in recorded steps only; a copy trains its own parameters."""
    net = trained(mean_squares, file_of(f"h = MatMul(x, u) {GELU} y = Identity(z)"), True)
    for x, target in BATCHES[:3]:
        net(x, target)
    assert joined(net) == ["Gelu"]
    assert "Erf" in [n.op_type for n in sonnx.export(net, [BATCHES[0][0]]).graph.node]
    other = copy.deepcopy(net)
    for one in other, net:
        for x, target in BATCHES[3:6]:
            one(x, target)
        assert joined(one) == ["Gelu"]
    alike(net, other)


@pytest.mark.parametrize(("opset", "gelu"), [(18, "Erf"), (20, "Gelu")])
def test_the_file_of_a_step(opset: int, gelu: str) -> None:
    """It calls an operator if its opset has it, and lists its gradient."""
    norm = f"{LAYER} k = Div(d, s) o = Mul(k, w)".replace("(h", "(x")
    model = file_of(f"{norm} h = MatMul(o, u) {GELU} y = Identity(z)")
    step = sonnx.to_training_onnx(model, "mse_loss", opt.SGD(0.5), opset=opset)
    forward = [n.op_type for n in step.graph.node][:20]
    assert {"LayerNormalization", gelu} <= {*forward} and not {"Pow", "Reciprocal"} & {*forward}
    x, target = (np.asarray(t.data) for t in BATCHES[0])
    rep, plain = sonnx.prepare(step), sonnx.prepare(step, optimize=0)
    for value, expected in zip(rep.run([x, target]), plain.run([x, target]), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert rep.profile([x, target]).gradients == 2
