"""A loss that becomes NaN or infinite in `fit` and in `sonnx train`: the error names the first node, and what it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from singa import autograd, layer, opt, sonnx
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa.cli import main
from singa.model import Model
from singa_backend.errors import InvalidInput

F = np.float32
RNG = np.random.default_rng(0)
X = np.abs(RNG.normal(size=(8, 3))).astype(F) + F(0.5)


def built(body: str) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 3] y) {{ {body} }}')
    model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=F), "w"))
    return model


def likelihood(y: Tensor, t: Tensor) -> Tensor:
    return op.Neg(op.ReduceSum(op.Mul(t, op.Log(y)), keepdims=0))


class Net(sonnx.SONNXModel):
    def __init__(self, body: str, loss: Any, rate: float, graph: bool) -> None:
        super().__init__(built(body))
        self.loss, self.optimizer = loss, opt.SGD(rate)
        self.graph(graph)

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        y = self.forward(x)[0]
        loss = self.loss(y, t)
        self.optimizer(loss)
        return y, loss


ONES, ZEROS = np.ones((8, 3), F), np.zeros((8, 3), F)
BAD = X.copy()
BAD[1, 2] = -1
CASES: dict[str, Any] = {
    "root of a negative number": (
        "[scores] h = MatMul(x, w) [root] y = Sqrt(h)",
        autograd.mse_loss,
        1e-3,
        (BAD, ONES),
        "Sqrt of -",
    ),
    "0 log 0": ("[scores] h = MatMul(x, w) [gate] y = Relu(h)", likelihood, 1e-3, (-X, ZEROS), "Log of 0"),
    "overflow": ("[scores] y = MatMul(x, w)", autograd.mse_loss, 1e25, (X, ZEROS), "if values have grown"),
    "0 / 0": ("[scores] h = MatMul(x, w) [ratio] y = Div(h, h)", autograd.mse_loss, 1e-3, (ZEROS, ONES), "Div 0 / 0"),
}
NAMED = {"root of a negative number": "Sqrt 'root' makes NaN", "0 log 0": "Log 'log' makes infinity",
         "overflow": "makes infinity", "0 / 0": "Div 'ratio' makes NaN"}  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_first_node_and_its_cause_are_named(case: str, graph: bool, micro: int) -> None:
    """After its update, with which the parameters are NaN; recorded steps too. The parameters stay as the step left them."""
    body, loss, rate, last, cause = CASES[case]
    net = Net(body, loss, rate, graph)
    net.optimizer.accumulate_gradients(micro)
    with pytest.raises(InvalidInput, match=r"\[SX343\]") as info:
        net.fit([(X, ONES)] * 3 * micro + [last] * micro)
    assert NAMED[case] in info.value.hint and cause in info.value.hint, info.value.hint
    assert np.isfinite(net.get_params()["w"].data).all() == (case == "0 log 0")  # the gradient of Relu is 0
    assert net.not_traceable == ""


def test_a_parameter_that_overflowed_is_named() -> None:
    """The loss of the step before was finite; its update was not."""
    net = Net("[scores] y = MatMul(x, w)", lambda y, t: op.ReduceSum(op.Mul(y, t), keepdims=0), 3e38, True)
    with pytest.raises(InvalidInput, match="SX343") as info:
        net.fit([(X, ONES)] * 4)
    assert "'w'" in info.value.hint and "if values have grown" in info.value.hint, info.value.hint


def test_a_model_of_layers_has_causes_too() -> None:
    class Layers(Model):
        def __init__(self) -> None:
            super().__init__()
            self.linear = layer.Linear(3)
            self.optimizer = opt.SGD(1e-3)

        def forward(self, x: Tensor) -> Tensor:
            return op.Log(op.Add(op.Mul(self.linear(x), 1e-3), x))

        def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
            loss = autograd.mse_loss(self.forward(x), t)
            self.optimizer(loss)
            return loss

    net = Layers()
    with pytest.raises(InvalidInput, match="SX343") as info:
        net.fit([(X, ONES), (BAD * 50, ONES)])
    assert "Log" in info.value.hint, info.value.hint
    tape.training = False


def test_the_command_names_the_node(tmp_path: Path) -> None:
    onnx.save(built("[scores] h = MatMul(x, w) [root] y = Sqrt(h)"), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.concatenate([X, BAD]), y=RNG.integers(0, 3, 16))
    line = ["train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--batch-size", 4, "-o", tmp_path / "o.onnx"]
    done = CliRunner().invoke(main, [str(a) for a in line])
    assert done.exit_code == 3 and "Sqrt 'root' makes NaN in 'y': Sqrt of -" in " ".join(done.output.split()), done.output
