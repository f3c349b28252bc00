"""Float constants of a file that train: they are named, and weights are not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser

from singa import autograd, opt, sonnx
from singa._core.tensor import Tensor
from singa._onnx.model import SONNXModel
from singa.cli import main
from singa_backend import ConstantTrainsWarning, InvalidInput
from singa_backend.conform import light_models

F = np.float32
TESTS = Path(__file__).parent
LOW = np.finfo(F).min
CAUSAL = np.where(np.tril(np.ones((4, 4))) > 0, 0, -np.inf)
W, B, ONES, ZEROS = np.linspace(-1, 1, 16).reshape(4, 4), np.linspace(0.1, 0.2, 4), np.ones(4), np.zeros(4)


def model(text: str, functions: str = "", x: str = "float[4, 4] x", **states: Any) -> ModelProto:
    made = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "local": 1]> g ({x}) => (float[4, 4] y) {{ {text} }} {functions}'
    )
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, F), n) for n, a in states.items())
    return made


ATTENTION = "q = MatMul(x, w) \n s = Mul(q, scale) \n m = Add(s, mask) \n y = Softmax<axis = -1>(m)"
IF = ("h = MatMul(x, w) \n s = ReduceSum<keepdims = 0>(x) \n z = Constant<value = float {0.0}>() \n c = Greater(s, z)"
      "\n y = If (c) <then_branch = t () => (float[4, 4] p) { p = Mul(h, mask) },"
      " else_branch = e () => (float[4, 4] q) { q = MatMul(h, v) }>")  # fmt: skip
FUNCTION = '<domain: "local", opset_import: ["": 21]> both (a, b, c) => (d) { e = MatMul(a, b) d = Add(e, c) }'

NAMED = {
    "a causal mask": (ATTENTION, {"w": W, "scale": 0.5, "mask": CAUSAL}, {"scale": "one number", "mask": "-inf"}),
    "a mask of large numbers": (ATTENTION, {"w": W, "scale": 0.5, "mask": np.where(CAUSAL < 0, LOW, 0)},
                                {"scale": "", "mask": "mask"}),
    "everything is hidden": ("m = Add(x, mask) \n y = MatMul(m, w)", {"w": W, "mask": np.full((4, 4), LOW)}, {"mask": "mask"}),
    "a mask of 0 and 1": ("h = MatMul(x, w) \n y = Mul(h, keep)", {"w": W, "keep": [1, 0, 1, 1]}, {"keep": "0 and 1"}),
    "one minus a mask": ("o = Sub(one, keep) \n h = MatMul(x, w) \n y = Mul(h, o)", {"w": W, "one": 1, "keep": [0, 1, 0, 0]},
                         {"one": "one number", "keep": "0 and 1"}),
    "a mask that is sliced and moved": (
        "i = Constant<value_ints = [0]>() \n j = Constant<value_ints = [4]>() \n k = Slice(mask, i, j) \n t = Transpose(k)"
        " \n h = Add(x, t) \n y = MatMul(h, w)", {"w": W, "mask": np.vstack([CAUSAL, CAUSAL])}, {"mask": "mask"}),
    "positions": ("p = Mul(positions, f) \n h = Add(x, p) \n y = MatMul(h, w)", {"w": W, "positions": np.arange(4), "f": B},
                  {"positions": "integers"}),
    "a one-hot table": ("i = Constant<value_ints = [0, 1, 1, 0]>() \n o = Gather(table, i) \n h = Add(x, o) \n y = MatMul(h, w)",
                        {"w": W, "table": np.eye(4)}, {"table": "0 and 1"}),
    "bounds": ("h = MatMul(x, w) \n y = Clip(h, low, high)", {"w": W, "low": 0, "high": 6},
               {"low": "one number", "high": "one number"}),
    "an epsilon": (
        "s = ReduceMean(x) \n v = Add(s, eps) \n r = Sqrt(v) \n d = Div(x, r) \n y = MatMul(d, w)", {"w": W, "eps": 1e-5},
        {"eps": "one number"}),
    "in a branch": (IF, {"w": W, "v": np.eye(4), "mask": [0, 1, 1, 1]}, {"mask": "0 and 1"}),
    "in a function": ("y = local.both(x, w, mask)", {"w": W, "mask": CAUSAL}, {"mask": "-inf"}),
}  # fmt: skip


def report(text: str, states: dict[str, Any]) -> Any:
    return sonnx.trainable_report(model(text, FUNCTION if "local." in text else "", **states))


@pytest.mark.parametrize("name", NAMED)
def test_what_an_exporter_never_trained_is_named(name: str) -> None:
    text, states, expected = NAMED[name]
    found = report(text, states)
    assert found.constants.keys() == expected.keys()
    assert all(part in found.constants[n] for n, part in expected.items())
    assert found.good and set(found.constants) <= set(found.trainable)  # they train, and the verdict stays
    assert all(f"looks like a constant: {n}" in str(found) for n in expected) and found.to_dict()["constants"] == found.constants


NORM = (
    "m = ReduceMean(x) \n c = Sub(x, m) \n v = Mul(c, c) \n e = ReduceMean(v) \n r = Sqrt(e) \n n = Div(c, r)"
    " \n g = Mul(n, gamma) \n h = Add(g, beta) \n y = MatMul(h, w)"
)
WEIGHTS = {
    "a fresh bias of zeros": ("h = MatMul(x, w) \n y = Add(h, b)", {"w": W, "b": ZEROS}),
    "a trained bias": ("h = MatMul(x, w) \n y = Add(b, h)", {"w": W, "b": B}),
    "a bias of one output": ("h = MatMul(x, u) \n o = Add(h, b) \n y = MatMul(o, v)",
                             {"u": B.reshape(4, 1), "b": [0], "v": B.reshape(1, 4)}),
    "a forget gate of ones": ("h = MatMul(x, w) \n t = Transpose(h) \n y = Add(t, b)", {"w": W, "b": [0, 0, 1, 1]}),
    "an identity": ("y = MatMul(x, w)", {"w": np.eye(4)}),
    "an identity that is transposed": ("t = Transpose(w) \n y = MatMul(x, t)", {"w": np.eye(4)}),
    "small integers": ("y = Gemm(x, w, b)", {"w": np.arange(16).reshape(4, 4), "b": np.arange(4)}),
    "batch normalization": ("h = BatchNormalization(x, g, b, m, v) \n y = MatMul(h, w)",
                            {"w": W, "g": ONES, "b": ZEROS, "m": ZEROS, "v": ONES}),
    "layer normalization": ("h = LayerNormalization(x, g, b) \n y = MatMul(h, w)", {"w": W, "g": ONES, "b": ZEROS}),
    "layer normalization in parts": (NORM, {"w": W, "gamma": ONES, "beta": ZEROS}),
    "one slope": ("h = PRelu(x, slope) \n y = MatMul(h, w)", {"w": W, "slope": [0.25]}),
    "in a function": ("y = local.both(x, w, b)", {"w": np.eye(4), "b": [0, 1, 1, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_not_named(name: str) -> None:
    text, states = WEIGHTS[name]
    found = report(text, states)
    assert found.constants == {}
    assert set(found.trainable) | set(found.statistics) == set(states)


def test_light_and_exported_models() -> None:
    """The published networks: nothing but single numbers, and none of them a weight."""
    for name in ("shufflenet", "squeezenet"):  # the small ones; the others have layers of the same kinds
        assert sonnx.trainable_report(light_models.model(name)).constants == {}
    for path in sorted((TESTS / "models").glob("*.onnx")):
        constants = sonnx.trainable_report(path).constants
        arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if t.name in constants}
        assert all(a.size == 1 for a in arrays.values())
        assert all(n.startswith(("val_", "min_val", "max_val")) for n in arrays), (path.name, list(arrays))
    assert set(sonnx.trainable_report(TESTS / "models" / "mobilenetv2-dynamo-18.onnx").constants) == {
        "min_val_cast",
        "max_val_cast",
    }


class Net(SONNXModel):
    def __init__(self, proto: Any) -> None:
        super().__init__(proto)
        self.optimizer = opt.SGD(0.01)

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        y = self.forward(x)[0]
        loss = autograd.mse_loss(y, t)
        self.optimizer(loss)
        return y, loss


def trained(net: Net, steps: int = 3) -> list[Any]:
    net.train()
    rng = np.random.default_rng(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            net(*(Tensor(data=rng.normal(size=(4, 4)).astype(F), requires_grad=False) for _ in range(2)))
    return [w.message for w in seen if isinstance(w.message, ConstantTrainsWarning)]


@pytest.mark.parametrize("graph", [False, True])
def test_the_first_step_names_them_once(graph: bool) -> None:
    text, states, _ = NAMED["a mask of 0 and 1"]
    net = Net(model(text, **states))
    net.graph(graph)
    (warning,) = trained(net)
    assert warning.parameters == ("keep",) and warning.code == "SX382"
    assert "keep (a mask of 0 and 1)" in str(warning) and "model.freeze('keep')" in str(warning)
    net.compile([Tensor(data=np.ones((4, 4), F))], is_train=True, use_graph=graph)
    assert trained(net) == []


def test_frozen_ones_and_those_without_a_gradient_are_not_named() -> None:
    text, states, _ = NAMED["bounds"]
    net = Net(model(text, **states))
    for name in sonnx.trainable_report(model(text, **states)).constants:
        net.freeze(name)
    before = {n: t.data.copy() for n, t in net.get_params().items()}
    assert trained(net) == []
    assert [n for n, t in net.get_params().items() if (t.data != before[n]).any()] == ["w"]

    class Head(Net):
        def forward(self, *xs: Any, **_: Any) -> Any:
            return super().forward(*xs, last_layers=0)

    assert trained(Head(model("h = MatMul(x, w) \n y = Mul(h, keep)", w=W, keep=[1, 0, 1, 1]))) == []


def test_many_are_named_in_part_and_a_name_is_not_a_pattern() -> None:
    text = "h0 = MatMul(x, w)" + "".join(f"\n h{i + 1} = Mul(h{i}, c{i})" for i in range(20)) + "\n y = Identity(h20)"
    (warning,) = trained(Net(model(text, w=W, **{f"c{i}": 1.0 for i in range(20)})))
    assert len(warning.parameters) == 20 and "and 12 more" in warning.message and "c9" not in warning.message
    made = model("h = MatMul(x, w) \n y = Mul(h, keep)", w=W, keep=[1, 0, 1, 1])
    made.graph.initializer[1].name = made.graph.node[1].input[1] = "keep[0]"
    net = Net(made)
    assert net.freeze("keep[0]") == ["keep[0]"] and trained(net) == []
    with pytest.raises(InvalidInput):
        net.freeze("keep[1]")


def test_a_training_step_as_a_file_names_them() -> None:
    text, states, _ = NAMED["a mask of 0 and 1"]
    with pytest.warns(ConstantTrainsWarning, match="keep"):
        sonnx.to_training_onnx(model(text, **states), "mse_loss")


def test_the_commands_name_them(tmp_path: Path) -> None:
    text, states, _ = NAMED["a mask of 0 and 1"]
    onnx.save(model(text, **states), tmp_path / "m.onnx")
    shown = CliRunner().invoke(main, ["check", str(tmp_path / "m.onnx"), "--train"])
    assert (
        shown.exit_code == 0
        and "looks like a constant: keep: a mask of 0 and 1" in shown.output
        and "--freeze NAME" in shown.output
    )
    np.savez(tmp_path / "d.npz", x=np.ones((8, 4), F), y=np.ones((8, 4), F))
    flags = ["--data", str(tmp_path / "d.npz"), "--loss", "mse_loss", "--batch-size", "4", "-o", str(tmp_path / "o.onnx")]
    with pytest.warns(ConstantTrainsWarning, match="keep"):
        assert CliRunner().invoke(main, ["train", str(tmp_path / "m.onnx"), *flags]).exit_code == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstantTrainsWarning)
        assert CliRunner().invoke(main, ["train", str(tmp_path / "m.onnx"), *flags, "--freeze", "keep"]).exit_code == 0
