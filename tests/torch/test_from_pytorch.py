"""`sonnx.from_pytorch`: modules of every form of inputs and outputs, both exporters, both modes, and training afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from singa import opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa_backend.errors import InvalidInput

F = np.float32
BOTH = pytest.mark.parametrize("dynamo", [False, True], ids=["script", "dynamo"])


@pytest.fixture(autouse=True)
def _seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Same numbers in each test; in an empty folder, in which nothing may be left."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    yield
    assert os.listdir(tmp_path) == []


class Block(nn.Module):
    """A grouped convolution, batch norm, dropout by layer and by function, several nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.head = (
            nn.Conv2d(4, 8, 3, groups=2),
            nn.BatchNorm2d(8),
            nn.Dropout(0.4),
            nn.Linear(8, 3),
        )
        nn.init.uniform_(self.norm.running_mean, -0.2, 0.2)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, factor: float = 2.0) -> Any:
        y = self.drop(self.norm(self.conv(x)).relu()).mean((2, 3))
        y = functional.dropout(self.head(y), 0.3, self.training)
        y = y if scale is None else y * scale
        return {"z": y, "a": [y * factor, (y.sum(),)]}


X = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8).sin()
SCALE = torch.tensor([1.0, 2.0, 3.0])


def ours(model: Any, *inputs: Any) -> list[np.ndarray]:
    return [y.data for y in model.forward(*(Tensor(data=np.asarray(x), requires_grad=False) for x in inputs))]


@BOTH
@pytest.mark.parametrize("form", ["tensor", "array", "singa", "tuple", "dict", "nested"])
def test_every_form_of_inputs_and_nested_outputs_in_order(dynamo: bool, form: str) -> None:
    net = Block().eval()
    inputs: Any = {"tensor": X, "array": X.numpy(), "singa": Tensor(data=X.numpy()), "tuple": (X, SCALE),
                   "dict": {"scale": SCALE.numpy(), "x": X}, "nested": (X.numpy(), None, 5.0)}[form]  # fmt: skip
    two, factor = form in ("tuple", "dict"), 5.0 if form == "nested" else 2.0
    model = sonnx.from_pytorch(net, inputs, dynamo=dynamo)
    assert [v.name for v in model.imported.graph.inputs] == ["x", "scale"][: 1 + two]  # a dict takes the order of the arguments
    y = net(X, SCALE if two else None, factor)
    expected = [y["z"], y["a"][0], y["a"][1][0]]
    for a, e in zip(ours(model, *([X, SCALE] if two else [X])), expected, strict=True):
        np.testing.assert_allclose(a, e.detach().numpy(), rtol=1e-5, atol=1e-6)


@BOTH
def test_names_opset_and_open_sizes(dynamo: bool) -> None:
    model = sonnx.from_pytorch(
        Block(), (X, SCALE), dynamo=dynamo, opset=18, input_names=["image", "by"], output_names=["p", "q", "r"],
        dynamic_axes={"image": {0: "batch"}},
    )  # fmt: skip
    graph = model.imported.graph
    assert [v.name for v in graph.inputs] == ["image", "by"] and [v.name for v in graph.outputs] == ["p", "q", "r"]
    assert isinstance(graph.declared_inputs[0].shape[0], (str, type(None))) and tuple(graph.declared_inputs[0].shape[1:]) == (
        4,
        8,
        8,
    )
    assert [o.version for o in model.onnx_model.opset_import if not o.domain] == [18]
    assert ours(model, np.zeros((5, 4, 8, 8), F), SCALE)[0].shape == (5, 3)


@BOTH
@pytest.mark.parametrize("train", [False, True])
def test_the_module_is_left_as_it_was(dynamo: bool, train: bool) -> None:
    net = Block()
    net.drop.eval()
    net.head.weight.requires_grad = False
    before = [(m, m.training) for m in net.modules()]
    states = {n: t.clone() for n, t in net.state_dict().items()}
    model = sonnx.from_pytorch(net, X, dynamo=dynamo, train=train)
    assert [(m, m.training) for m in net.modules()] == before
    assert all(torch.equal(t, states[n]) for n, t in net.state_dict().items())
    assert not net.head.weight.requires_grad and net.conv.weight.requires_grad and torch.is_grad_enabled()
    assert not model.get_params()["head.weight"].stores_grad and model.get_params()["conv.weight"].stores_grad
    assert model.training is train and not tape.training


@BOTH
def test_train_keeps_dropout_and_batch_norm(dynamo: bool, mean_squares: Any) -> None:
    net = Block()
    model = sonnx.from_pytorch(net, X, dynamo=dynamo, train=True, model_class=mean_squares)
    kinds = [n.op_type for n in model.imported.graph.nodes]
    assert kinds.count("Dropout") == 2 and kinds.count("BatchNormalization") == 1
    trains = {n for n, p in model.get_params().items() if p.stores_grad}
    assert trains == {n for n, _ in net.named_parameters()}
    assert set(model.imported.statistics) == {"norm.running_mean", "norm.running_var"}
    model.eval()
    np.testing.assert_allclose(ours(model, X)[0], net.eval()(X)["z"].detach().numpy(), rtol=1e-5, atol=1e-6)
    model.train()
    assert not np.array_equal(ours(model, X)[0], ours(model, X)[0])  # dropped at random


@BOTH
def test_training_and_statistics_against_pytorch(dynamo: bool, mean_squares: Any) -> None:
    """Five steps of the same SGD: losses, parameters and running statistics; the variance of PyTorch's is the unbiased one."""
    net = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8, momentum=0.3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                        nn.Flatten(), nn.Linear(8, 3))  # fmt: skip
    net[0].bias.requires_grad = False  # frozen there, frozen here
    model = sonnx.from_pytorch(net, X, dynamo=dynamo, train=True, model_class=mean_squares)
    model.optimizer = opt.SGD(lr=0.05, momentum=0.9)
    sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.05, momentum=0.9)
    model.train()
    t = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]])
    before = net[0].bias.detach().clone().numpy()
    for _ in range(5):
        sgd.zero_grad()
        loss = functional.mse_loss(net(X), t)
        loss.backward()
        sgd.step()
        found = model(Tensor(data=X.numpy()), Tensor(data=t.numpy()))[1]
        np.testing.assert_allclose(found.data.item(), loss.item(), rtol=1e-4)
    for name, p in net.named_parameters():
        np.testing.assert_allclose(model.get_params()[name].data, p.detach().numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(model.get_params()["0.bias"].data, before)
    states = model.get_states()
    np.testing.assert_allclose(states["1.running_mean"].data, net[1].running_mean.numpy(), rtol=1e-4, atol=1e-6)
    n = 2 * 6 * 6
    unbiased = 0.7**5 + (states["1.running_var"].data - 0.7**5) * n / (n - 1)
    np.testing.assert_allclose(unbiased, net[1].running_var.numpy(), rtol=1e-4)


@BOTH
def test_fresh_weights_of_equal_values_stay_apart(dynamo: bool) -> None:
    """Zeros that add nothing, and equal values, are what optimisers of files merge and drop."""
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    for p in net.parameters():
        nn.init.zeros_(p) if p.ndim == 1 else nn.init.eye_(p)
    model = sonnx.from_pytorch(net, torch.ones(2, 4), dynamo=dynamo, train=True)
    assert {n for n, p in model.get_params().items() if p.stores_grad} == {n for n, _ in net.named_parameters()}


class Tied(nn.Module):
    """An embedding that is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(ids))


@BOTH
def test_tied_weights_stay_tied(dynamo: bool) -> None:
    net = Tied()
    model = sonnx.from_pytorch(net, torch.tensor([[1, 2], [3, 4]]), dynamo=dynamo, train=True)
    assert len(model.get_params()) == 1
    (weight,) = model.get_params().values()
    np.testing.assert_array_equal(weight.data, net.embed.weight.detach().numpy())


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dynamo: bool, dtype: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype)
    model = sonnx.from_pytorch(net, x, dynamo=dynamo)
    assert {str(p.data.dtype) for p in model.get_params().values()} == {str(dtype).removeprefix("torch.")}


class Inputs(nn.Module):
    """Three inputs of three dtypes, one in a list, and an output of integers."""

    def forward(self, x: torch.Tensor, more: list[torch.Tensor], mask: torch.Tensor) -> Any:
        return torch.where(mask, x, more[0]), more[1] + 1


def test_lists_of_inputs_and_integers() -> None:
    x, y, ids = torch.ones(2, 3), torch.zeros(2, 3), torch.arange(4)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    model = sonnx.from_pytorch(Inputs(), (x, [y, ids], mask), dynamo=True)
    first, second = ours(model, x, y, ids, mask)
    np.testing.assert_array_equal(first, mask.numpy().astype(F))
    np.testing.assert_array_equal(second, np.arange(1, 5))


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@BOTH
def test_what_differs_is_an_error_that_check_can_switch_off(dynamo: bool) -> None:
    with pytest.raises(
        sonnx.ExporterFailure,
        match=rf"PyTorch {torch.__version__.split('+')[0]}.*a model with other outputs.*output 0.*differs by",
    ) as e:
        sonnx.from_pytorch(Noisy(), X, dynamo=dynamo)
    assert e.value.code == "SX911" and e.value.framework == "PyTorch" and "check=False" in e.value.hint
    model = sonnx.from_pytorch(Noisy(), X, dynamo=dynamo, check=False)
    assert ours(model, X)[0].shape == tuple(X.shape)


class Unexportable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eig(x)[0].real


@BOTH
def test_errors_of_the_exporter_name_it(dynamo: bool) -> None:
    net = Unexportable().train()
    with pytest.raises(sonnx.ExporterFailure, match="could not export") as e:
        sonnx.from_pytorch(net, torch.eye(3), dynamo=dynamo)
    assert e.value.code == "SX910" and e.value.framework_version == torch.__version__ and "linalg_eig" in e.value.reason
    assert e.value.__cause__ is not None and f"dynamo={not dynamo}" in e.value.hint and net.training


def test_names_that_do_not_fit() -> None:
    with pytest.raises(InvalidInput, match="input_names"):
        sonnx.from_pytorch(Block(), X, input_names=["a", "b"])
    with pytest.raises(InvalidInput, match="output_names"):
        sonnx.from_pytorch(Block(), X, dynamo=False, output_names=["a", "a", "b"])
    with pytest.raises(InvalidInput, match="dynamic_axes names 'image'"):
        sonnx.from_pytorch(Block(), X, dynamic_axes={"image": {0: "n"}})


@BOTH
def test_an_lstm_and_attention(dynamo: bool) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.layer = (
                nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True),
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
            )

        def forward(self, x: torch.Tensor) -> Any:
            y, (h, c) = self.lstm(x)
            return self.layer(y), h, c

    model = sonnx.from_pytorch(Text(), torch.randn(3, 5, 6), dynamo=dynamo)
    assert len(model.imported.graph.outputs) == 3
