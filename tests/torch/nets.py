"""Nets that PyTorch and singa train: a residual net, and those of tests/models/export.py; each with its loss in both."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

from singa import autograd
from singa import tensor as tensors
from singa._core.ops import op

_spec = importlib.util.spec_from_file_location("export", Path(__file__).parents[1] / "models" / "export.py")
assert _spec is not None and _spec.loader is not None
export = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(export)

BATCHES = 5
"""The number of batches, which the steps take in turn."""


class Residual(nn.Module):
    """ResNet's basic block: two convolutions of 3 x 3, added to the identity or to a projection."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), activation(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.activate = activation()
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(self.body(x) + self.shortcut(x))


class Resnet(nn.Module):
    """ResNet-18 for images of 3 x 32 x 32 at an eighth of its width: a stem and eight blocks.

    With a smooth activation: of some 10^5 values before its ReLUs, about one in each step is so near 0 that two correct
    programs in float32 see it on different sides, which moves a gradient by 1e-3.
    """

    def __init__(self, activation: Callable[[], nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), activation())
        widths = [8, 8, 16, 32, 64]
        self.blocks = nn.Sequential(
            *(Residual(widths[i] if first else widths[i + 1], widths[i + 1], 2 if first and i else 1, activation)
              for i in range(4) for first in (True, False))
        )  # fmt: skip
        self.classify = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class Case(NamedTuple):
    """A net, its batches of inputs and targets, and its loss in PyTorch (`theirs`) and in singa (`ours`).

    inputs: how many of a batch's arrays it takes; the others are targets.  kinks: whether float32 is shown and not judged.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[Any], tuple[Any, ...]]
    inputs: int
    theirs: Callable[..., Tensor]
    ours: Callable[..., Any]
    lr: float
    kinks: bool = False


def _floats(*shape: int) -> Callable[[Any], Any]:
    return lambda rng: rng.normal(size=shape)


def _ids(top: int, *shape: int) -> Callable[[Any], Any]:
    return lambda rng: rng.integers(0, top, shape)


def _all(*makers: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda rng: tuple(make(rng) for make in makers)


def _bert(rng: Any) -> tuple[Any, ...]:
    mask = (np.arange(9) < rng.integers(2, 10, (6, 1))).astype(np.int64)
    return _ids(60, 6, 9)(rng), _ids(2, 6, 9)(rng), mask, rng.normal(size=(6, 9, 32)), np.tanh(rng.normal(size=(6, 32)))


def _gpt_ours(t: Any, y: Any) -> Any:
    return autograd.softmax_cross_entropy(op.Reshape(y, [-1, 60]), op.Reshape(t, [-1]))


def _bert_ours(hidden: Any, pooled: Any, h: Any, p: Any) -> Any:
    return op.Add(autograd.mse_loss(h, hidden), autograd.mse_loss(p, pooled))


def cases() -> dict[str, Case]:
    cross, square = functional.cross_entropy, functional.mse_loss
    images = (_all(_floats(8, 3, 32, 32), _ids(10, 8)), 1, lambda t, y: cross(y, t),
              lambda t, y: autograd.softmax_cross_entropy(y, t))  # fmt: skip
    return {
        "resnet": Case(Resnet, *images, 0.01),
        "resnet-relu": Case(lambda: Resnet(nn.ReLU), *images, 0.01, kinks=True),
        "bert": Case(export.Bert, _bert, 3, lambda h, p, y: square(y[0], h) + square(y[1], p), _bert_ours, 0.05),
        "gpt2": Case(export.Gpt, _all(_ids(60, 6, 10), _ids(60, 6, 10)), 1,
                     lambda t, y: cross(y.reshape(-1, 60), t.reshape(-1)), _gpt_ours, 0.02),
        "lstm": Case(export.Lstm, _all(_ids(60, 6, 10), _ids(5, 6)), 1, lambda t, y: cross(y[0], t),
                     lambda t, *ys: autograd.softmax_cross_entropy(ys[0], t), 0.1),
        "unet": Case(export.Unet, _all(_floats(4, 3, 16, 16), lambda rng: rng.random((4, 2, 32, 32))), 1,
                     lambda t, y: square(y, t), lambda t, y: autograd.mse_loss(y, t), 0.05),
    }  # fmt: skip


def batches(case: Case, dtype: Any) -> list[tuple[Any, ...]]:
    """The same batches in every run; floats in one dtype."""
    rng = np.random.default_rng(7)
    made = [case.batch(rng) for _ in range(BATCHES)]
    return [tuple(a.astype(dtype) if a.dtype.kind == "f" else a for a in batch) for batch in made]


def start(case: Case, dtype: Any) -> nn.Module:
    """The net with its first weights, the same in every run."""
    torch.manual_seed(0)
    net = case.make()
    export._settle(net)
    return net.to(torch.float64 if dtype == np.float64 else torch.float32).train()


def to_onnx(net: nn.Module, example: tuple[Any, ...]) -> onnx.ModelProto:
    """As the exporter writes a net in training: batch norms are not folded, and every weight keeps its name."""
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, tuple(map(torch.from_numpy, example)), written, opset_version=17, dynamo=False, do_constant_folding=False,
            training=torch.onnx.TrainingMode.TRAINING,
        )  # fmt: skip
    return onnx.load_from_string(written.getvalue())


def wrap(array: Any) -> tensors.Tensor:
    return tensors.Tensor(data=array, requires_grad=False)
