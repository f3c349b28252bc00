"""`sonnx.from_paddle`: layers of every form of inputs and outputs, both modes, and training against PaddlePaddle.

tox -e from-paddle     # PaddlePaddle is needed here and nowhere else
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional

from singa import opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa_backend.errors import InvalidInput

F = np.float32
X = np.sin(np.linspace(-1, 1, 2 * 4 * 8 * 8, dtype=F) * 9).reshape(2, 4, 8, 8)
SCALE = np.array([1.0, 2.0, 3.0], F)


class Block(nn.Layer):
    """A grouped convolution, batch norm, dropout, nested outputs; biases are zeros at first, statistics zeros and ones."""

    def __init__(self, rate: float = 0.4) -> None:
        super().__init__()
        paddle.seed(0)
        self.conv, self.norm = nn.Conv2D(4, 8, 3, groups=2), nn.BatchNorm2D(8, momentum=0.7)
        self.drop, self.middle, self.head = nn.Dropout(rate), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any, scale: Any = None) -> Any:
        y = self.drop(functional.relu(self.norm(self.conv(x)))).mean((2, 3))
        y = self.head(self.middle(y))
        y = y if scale is None else y * scale
        return {"z": y, "a": [y * 2.0, (y.sum(),)]}


def ours(model: Any, *inputs: Any) -> list[np.ndarray]:
    return [y.data for y in model.forward(*(Tensor(data=np.asarray(x), requires_grad=False) for x in inputs))]


def agree(found: Any, expected: Any) -> None:
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, np.asarray(e), rtol=1e-4, atol=1e-5)


def trained(model: Any) -> set[str]:
    return {n for n, p in model.get_params().items() if p.stores_grad}


@pytest.mark.parametrize("form", ["tensor", "array", "singa", "tuple", "dict"])
def test_every_form_of_inputs_and_nested_outputs_in_order(form: str) -> None:
    layer = Block()
    layer.eval()
    inputs: Any = {"tensor": paddle.to_tensor(X), "array": X, "singa": Tensor(data=X), "tuple": (X, paddle.to_tensor(SCALE)),
                   "dict": {"scale": SCALE, "x": X}}[form]  # fmt: skip
    feeds = [X, SCALE] if form in ("tuple", "dict") else [X]
    model = sonnx.from_paddle(layer, inputs)
    assert [v.name for v in model.imported.graph.inputs] == ["x", "scale"][: len(feeds)]  # a dict: the order of the arguments
    y = layer(*map(paddle.to_tensor, feeds))
    agree(ours(model, *feeds), [y["z"], y["a"][0], y["a"][1][0]])


def test_names_opset_and_open_sizes() -> None:
    model = sonnx.from_paddle(Block(), (X, SCALE), opset=14, input_names=["image", "by"], output_names=["p", "q", "r"],
                              dynamic_axes={"image": {0: "batch"}})  # fmt: skip
    graph = model.imported.graph
    assert [v.name for v in graph.inputs] == ["image", "by"] and [v.name for v in graph.outputs] == ["p", "q", "r"]
    assert [o.version for o in model.onnx_model.opset_import if not o.domain] == [14]
    assert ours(model, np.zeros((5, 4, 8, 8), F), SCALE)[0].shape == (5, 3)


@pytest.mark.parametrize("train", [False, True])
def test_the_layer_is_left_as_it_was(train: bool) -> None:
    layer = Block()
    layer.drop.eval()
    layer.head.weight.stop_gradient = True
    modes = [(part, part.training) for part in layer.sublayers(include_self=True)]
    states = {n: t.numpy().copy() for n, t in layer.state_dict().items()}
    model = sonnx.from_paddle(layer, X, train=train)
    assert [(part, part.training) for part in layer.sublayers(include_self=True)] == modes
    assert {n: t.tolist() for n, t in states.items()} == {n: t.numpy().tolist() for n, t in layer.state_dict().items()}
    assert not any("forward" in part.__dict__ for part, _ in modes) and layer.head.weight.stop_gradient
    assert trained(model) == {n for n, p in layer.named_parameters() if not p.stop_gradient}
    assert model.training is train and not tape.training


def test_train_keeps_dropout_and_batch_norm(mean_squares: Any) -> None:
    layer = Block()
    model = sonnx.from_paddle(layer, X, train=True, model_class=mean_squares)
    kinds = [n.op_type for n in model.imported.graph.nodes]
    assert kinds.count("Dropout") == 1 and kinds.count("BatchNormalization") == 1
    assert set(model.imported.statistics) == {"norm._mean", "norm._variance"}
    model.eval()
    layer.eval()
    agree(ours(model, X)[:1], [layer(paddle.to_tensor(X))["z"]])
    model.train()
    assert not np.array_equal(ours(model, X)[0], ours(model, X)[0])  # dropped at random


def test_training_and_statistics_against_paddle(mean_squares: Any) -> None:
    """Five steps of the same SGD, with a frozen layer: losses, parameters and running statistics."""
    layer = Block(rate=0.0)
    layer.middle.weight.stop_gradient = layer.middle.bias.stop_gradient = True
    still = layer.middle.weight.numpy().copy()
    model = sonnx.from_paddle(layer, X, train=True, model_class=mean_squares)
    model.optimizer = opt.SGD(lr=0.05)
    model.train()
    layer.train()
    sgd = paddle.optimizer.SGD(0.05, parameters=[p for p in layer.parameters() if not p.stop_gradient])
    t = np.array([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]], F)
    for _ in range(5):
        loss = functional.mse_loss(layer(paddle.to_tensor(X))["z"], paddle.to_tensor(t))
        loss.backward()
        sgd.step()
        sgd.clear_grad()
        found = model(Tensor(data=X), Tensor(data=t))[1]
        np.testing.assert_allclose(found.data.item(), float(loss), rtol=1e-4)
    for name, p in layer.named_parameters():
        np.testing.assert_allclose(model.get_states()[name].data, p.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(model.get_params()["middle.weight"].data, still)
    for name, s in model.imported.statistics.items():
        np.testing.assert_allclose(s.data, layer.state_dict()[name].numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


class Text(nn.Layer):
    """Words through an embedding and an LSTM, integers, and the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 5)

    def forward(self, ids: Any) -> Any:
        y = self.lstm(self.embed(ids))[0]
        return y, y.argmax(-1), ids


@pytest.mark.parametrize("train", [False, True])
def test_words_and_integers(train: bool) -> None:
    layer, ids = Text(), np.array([[1, 2, 3], [4, 5, 6]])
    model = sonnx.from_paddle(layer, ids, train=train)
    model.eval()
    agree(ours(model, ids), layer(paddle.to_tensor(ids)))


class Tied(nn.Layer):
    """An embedding that is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)

    def forward(self, ids: Any) -> Any:
        return paddle.matmul(self.embed(ids), self.embed.weight, transpose_y=True)


def test_tied_weights_stay_tied() -> None:
    model = sonnx.from_paddle(Tied(), np.array([[1, 2], [3, 4]]), train=True)
    assert trained(model) == {"embed.weight"}


class Noisy(nn.Layer):
    def forward(self, x: Any) -> Any:
        return x + paddle.nn.functional.dropout(paddle.ones_like(x), 0.5, training=True)


class Unexportable(nn.Layer):
    def forward(self, x: Any) -> Any:
        return paddle.linalg.svd(x)[1]


def test_what_differs_is_an_error_that_check_can_switch_off() -> None:
    with pytest.raises(
        sonnx.ExporterFailure, match=rf"PaddlePaddle {paddle.__version__}.*a model with other outputs.*'output_0'.*differs by"
    ) as e:
        sonnx.from_paddle(Noisy(), X)
    assert e.value.code == "SX911" and "check=False" in e.value.hint
    assert ours(sonnx.from_paddle(Noisy(), X, check=False), X)[0].shape == X.shape


def test_errors_of_the_exporter_name_it() -> None:
    layer = Unexportable()
    with pytest.raises(sonnx.ExporterFailure, match="could not export") as e:
        sonnx.from_paddle(layer, np.eye(3, dtype=F))
    assert (
        e.value.code == "SX910"
        and e.value.framework_version.startswith(paddle.__version__)
        and "unsupported operators" in e.value.reason
    )
    assert layer.training
    with pytest.raises(sonnx.ExporterFailure, match="could not export"):
        sonnx.from_paddle(Block(), np.ones((2, 3), F))  # the layer itself takes no such input


def test_arguments_that_are_refused() -> None:
    with pytest.raises(InvalidInput, match="input_names"):
        sonnx.from_paddle(Block(), X, input_names=["a", "b"])
    with pytest.raises(InvalidInput, match="dynamic_axes names 'image'"):
        sonnx.from_paddle(Block(), X, dynamic_axes={"image": {0: "n"}})
    with pytest.raises(InvalidInput, match="do not fit the layer"):
        sonnx.from_paddle(Block(), {"image": X})
    with pytest.raises(InvalidInput, match=r"must be a paddle\.nn\.Layer"):
        sonnx.from_paddle(paddle.tanh, X)
