"""Training steps on a CUDA device, for the counts of cuda_counts.py: a small CNN, ResNet-18 and a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from singa import autograd, device, layer, model, opt
from singa.tensor import Tensor


class Trained(model.Model):
    """A model whose step returns its outputs and the loss, which stay on the device."""

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


class Cnn(Trained):
    """One convolution, one pooling and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.pool = layer.Conv2d(1, 4, 3, padding=1), layer.ReLU(), layer.MaxPool2d(2, 2)
        self.flatten, self.linear = layer.Flatten(), layer.Linear(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.flatten(self.pool(self.relu(self.conv(x)))))


class Normed(layer.Layer):
    """A convolution and a BatchNorm2d."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = layer.Conv2d(channels, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = layer.BatchNorm2d()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Basic(layer.Layer):
    """Two convolutions of 3 x 3 added to the input, which is projected if its shape changes."""

    def __init__(self, channels: int, stride: int, project: bool) -> None:
        super().__init__()
        self.one, self.two = Normed(channels, 3, stride), Normed(channels, 3, 1)
        self.short = Normed(channels, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(autograd.relu(self.one(x)))
        return autograd.relu(autograd.add(y, x if self.short is None else self.short(x)))


class ResNet18(Trained):
    """He et al. 2015: four stages of two basic blocks."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem, self.pool = Normed(width, 7, 2), layer.MaxPool2d(3, 2, 1)
        self.blocks = [Basic(width << i, 2 if i and not k else 1, bool(i) and not k) for i in range(4) for k in range(2)]
        for i, block in enumerate(self.blocks):
            setattr(self, f"block{i}", block)
        self.flatten, self.linear = layer.Flatten(), layer.Linear(classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(autograd.relu(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.linear(self.flatten(autograd.globalaveragepool(x)))


class Transformer(Trained):
    """Encoder layers on embedded words; a class for each word."""

    def __init__(self, words: int = 8000, width: int = 256, heads: int = 8, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.linear = layer.Embedding(words, width), layer.Linear(words)
        self.blocks = [layer.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu") for _ in range(layers)]
        for i, block in enumerate(self.blocks):
            setattr(self, f"block{i}", block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.linear(autograd.reshape(x, (-1, x.shape[-1])))


def steps(net: Trained, data: np.ndarray, rows: int, classes: int, *, graph: bool, soft: bool = False) -> Callable[[], Any]:
    """A training step with SGD and momentum, after two others: the graph is recorded.

    With `soft`, labels have a probability for each class: the first step, which is on the tape, reads no class numbers.
    """
    where = device.resolve("CUDA")
    x = Tensor(data=data, device=where, requires_grad=False)
    labels = np.random.default_rng(1).integers(0, classes, rows, np.int32)
    if soft:
        labels = np.eye(classes, dtype=np.float32)[:1].repeat(rows, 0)
    t = Tensor(data=labels, device=where, requires_grad=False)
    net.optimizer = opt.SGD(0.1, momentum=0.9)
    net.compile([x], is_train=True, use_graph=graph)

    def step() -> None:
        net(x, t)

    step()
    step()
    return step


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def texts(words: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, words, shape)


def cnn(*, graph: bool) -> Callable[[], Any]:
    """A step of the small CNN."""
    return steps(Cnn(), images(4, 1, 8, 8), 4, 5, graph=graph)


def resnet18(*, graph: bool) -> Callable[[], Any]:
    """A step of ResNet-18 of small widths, on two images."""
    return steps(ResNet18(8, 10), images(2, 3, 32, 32), 2, 10, graph=graph)


def transformer(*, graph: bool) -> Callable[[], Any]:
    """A step of a transformer of small widths with dropout, on two texts of five words."""
    return steps(Transformer(20, 8, 2, dropout=0.1), texts(20, 2, 5), 10, 20, graph=graph)


def wide_resnet18(*, batch: int) -> Callable[[], Any]:
    """A step of ResNet-18 as a graph, of real widths."""
    return steps(ResNet18(), images(batch, 3, 224, 224), batch, 1000, graph=True, soft=True)


def wide_transformer(*, batch: int, length: int = 128) -> Callable[[], Any]:
    """A step of the transformer as a graph, of real widths; without dropout, whose first step reads shapes from the device."""
    return steps(Transformer(), texts(8000, batch, length), batch * length, 8000, graph=True, soft=True)
