"""Ten training programs on an emulated CUDA device, on the tape and as a graph: the losses of the CPU."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any, NamedTuple

import fakecuda
import numpy as np
import pytest
from tests.helpers.paths import TESTS

from singa import autograd, layer, opt, sonnx
from singa.device import Device, default_device
from singa.model import Model
from singa.tensor import Tensor

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("capturable_products")]
F = np.float32
STEPS = 4
NEAR = 1e-5
RNG = np.random.default_rng(0)


class Layers(Model):
    """Layers and functions, one after the other."""

    def __init__(self, *parts: Callable[[Tensor], Tensor], loss: Callable[..., Tensor] = autograd.softmax_cross_entropy) -> None:
        super().__init__()
        self.parts, self.loss = parts, loss
        for i, part in enumerate(parts):
            if isinstance(part, layer.Layer):
                setattr(self, f"part{i}", part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = self.loss(y, t)
        self.optimizer(loss)
        return y, loss


class Imported(sonnx.SONNXModel):
    """An ONNX file whose first output is trained under mean squares."""

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)[0]
        loss = autograd.mse_loss(y, t)
        self.optimizer(loss)
        return y, loss


class Program(NamedTuple):
    """A model, its optimizer and one batch."""

    model: Callable[[], Model]
    optimizer: Callable[[], opt.Optimizer]
    x: np.ndarray
    t: np.ndarray


def flat(x: Tensor) -> Tensor:
    return autograd.flatten(x)


def last(x: Tensor) -> Tensor:
    return autograd.reshape(x, (x.shape[0], -1))


def recurrent(mode: str, **options: Any) -> Layers:
    return Layers(layer.CudnnRNN(4, rnn_mode=mode, **options), last, layer.Linear(3))


def singa_cnn() -> Model:
    """The convolutional network of SINGA's programs, which also gets an option of its training."""
    net: Any = runpy.run_path(str(TESTS / "singa_programs" / "cnn" / "model" / "cnn.py"))["create_model"](
        num_classes=3, num_channels=1
    )
    step = type(net).train_one_batch
    type(net).train_one_batch = lambda self, x, t: step(self, x, t, "plain", None)
    return net  # type: ignore[no-any-return]


FLAT, IMAGES = RNG.normal(size=(6, 5)).astype(F), RNG.normal(size=(4, 1, 8, 8)).astype(F)
SERIES, IDS = RNG.normal(size=(3, 5, 4)).astype(F), RNG.integers(0, 7, (4, 5)).astype(np.int32)
IDS[0] = IDS[1]  # rows of the gradient that several words share


def labels(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32) % 3


PROGRAMS: dict[str, Program] = {
    "mlp": Program(
        lambda: Layers(layer.Linear(8), autograd.relu, layer.Dropout(0.2), layer.Linear(3)),
        lambda: opt.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3), FLAT, labels(6)),
    "cnn": Program(
        lambda: Layers(layer.Conv2d(1, 3, 3, padding=1), autograd.relu, layer.MaxPool2d(2, 2), flat, layer.Linear(3)),
        lambda: opt.SGD(lr=0.1, momentum=0.9, nesterov=True), IMAGES, labels(4)),
    "batch normalization": Program(
        lambda: Layers(layer.Conv2d(1, 3, 3, stride=2), layer.BatchNorm2d(3), autograd.relu, layer.AvgPool2d(2, 1), flat,
                       layer.Linear(3)),
        lambda: opt.Adam(lr=0.01), IMAGES, labels(4)),
    "lstm": Program(lambda: recurrent("lstm", bidirectional=True), lambda: opt.RMSProp(lr=0.01), SERIES, labels(3)),
    "gru": Program(lambda: recurrent("gru", batch_first=True), lambda: opt.AdaGrad(lr=0.1), SERIES, labels(3)),
    "transformer": Program(
        lambda: Layers(layer.Embedding(7, 4), layer.TransformerEncoderLayer(4, 2, 8, activation="gelu"), last, layer.Linear(3)),
        lambda: opt.AdamW(lr=0.01), IDS, labels(4)),
    "embedding": Program(
        lambda: Layers(layer.Embedding(7, 4), lambda x: autograd.reduce_mean(x, [1], 0), layer.Linear(3)),
        lambda: opt.SGD(lr=0.5), IDS, labels(4)),
    "autoencoder": Program(
        lambda: Layers(layer.Conv2d(1, 2, 3, stride=2, padding=1), autograd.tanh, layer.ConvTranspose2d(1, 2, 2),
                       autograd.sigmoid, loss=autograd.binary_cross_entropy),
        lambda: opt.Adam(lr=0.05), IMAGES, (IMAGES > 0).astype(F)),
    "file": Program(
        lambda: Imported(str(TESTS / "models" / "lstm-dynamo-18.onnx")), lambda: opt.SGD(lr=0.1), IDS.astype(np.int64),
        RNG.normal(size=(4, 5)).astype(F)),
    "singa": Program(singa_cnn, lambda: opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5),
                     RNG.normal(size=(2, 1, 28, 28)).astype(F), labels(2)),
}  # fmt: skip


def trained(program: Program, device: Device, graph: bool) -> list[float]:
    """The losses of a training."""
    device.SetRandSeed(3)
    net: Any = program.model()
    net.optimizer = program.optimizer()
    if isinstance(net, Imported):
        net.to(device=device)
    x, t = (Tensor(data=a, device=device, requires_grad=False) for a in (program.x, program.t))
    net.compile([x], is_train=True, use_graph=graph)
    losses = [net(x, t)[-1] for _ in range(STEPS)]
    assert all(v.device is device for v in (*losses, *net.get_states().values()))
    assert not graph or any(net._steps.values())
    return [float(v) for v in losses]


@pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_on_the_cpu(name: str, graph: bool) -> None:
    with fakecuda.order("both"):  # a race fails the test
        found = trained(PROGRAMS[name], Device("CUDA"), graph)
    expected = trained(PROGRAMS[name], default_device, graph)
    np.testing.assert_allclose(found, expected, rtol=NEAR)
    assert len(set(expected)) == STEPS
