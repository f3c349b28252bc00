"""Models as a user writes them on `singa`: the structure of their papers at a small width, with seeded weights.

entry = ZOO["ResNet50"]
net, inputs = entry.built()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from singa._core.tensor import Tensor
from singa.model import Model

from . import classic, dense, inception, mobile, parts, residual, t5, yolo

__all__ = ["ZOO", "Entry", "classic", "dense", "inception", "mobile", "parts", "residual", "seeded", "t5", "yolo"]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    make: the model without parameters.  shapes: of one sample of each input, by name.
    words: the vocabulary of integer inputs, 0 where the inputs are images.
    least: the least opset that it is written in.  culprit: the operator that needs it, where that is not 7.
    """

    make: Callable[[], Model]
    shapes: dict[str, tuple[int, ...]]
    words: int = 0
    least: int = 7
    culprit: str = ""

    def arrays(self, batch: int = 2, seed: int = 0) -> list[Any]:
        """Inputs: images in [-1, 1), or words and masks, whose first place is always a word."""
        rng = np.random.default_rng(seed)
        made: list[Any] = []
        for name, shape in self.shapes.items():
            if not self.words:
                made.append(rng.uniform(-1, 1, (batch, *shape)).astype(np.float32))
                continue
            drawn = rng.integers(0, 2 if name == "mask" else self.words, (batch, *shape))
            if name == "mask":
                drawn[:, 0] = 1
            made.append(drawn)
        return made

    def tensors(self, batch: int = 2, seed: int = 0) -> list[Tensor]:
        arrays = self.arrays(batch, seed)
        return [Tensor(data=a, requires_grad=False, name=n) for n, a in zip(self.shapes, arrays, strict=True)]

    def built(self, seed: int = 0) -> tuple[Model, list[Tensor]]:
        """The model in inference with seeded weights and statistics, and inputs for it."""
        xs = self.tensors()
        net = self.make()
        net.compile(xs, is_train=False)
        seeded(net, seed)
        net.train()
        net.forward(*self.tensors(8, seed))  # statistics as training leaves them: else values grow from layer to layer
        net.eval()
        return net, xs


def seeded(net: Model, seed: int) -> None:
    """Weights such that values keep their size from layer to layer; scales and statistics differ from channel to channel."""
    rng = np.random.default_rng(seed)
    params = net.get_params()
    states: dict[str, Any] = {}
    for name, t in net.get_states().items():
        last = name.rpartition(".")[2]
        if name not in params:
            states[name] = rng.uniform(0.5, 1.5, t.shape) if last == "running_var" else rng.normal(0, 0.2, t.shape)
        elif last == "scale":
            states[name] = rng.uniform(0.8, 1.2, t.shape)
        elif t.ndim() == 1:
            states[name] = rng.normal(0, 0.1, t.shape)
        elif t.ndim() == 4:
            states[name] = rng.normal(0, np.sqrt(2 / np.prod(t.shape[1:])), t.shape)
        else:  # (in, out), and embeddings
            states[name] = rng.normal(0, 1 / np.sqrt(t.shape[0]), t.shape)
    net.set_states(states)


IMAGE = {"x": (3, 32, 32)}
WORDS = {"ids": (11,), "mask": (11,), "targets": (9,)}
SMALL = {"vocabulary": 40, "d": 16, "layers": 2, "heads": 2, "size": 6, "inner": 24, "buckets": 8, "farthest": 20}

ZOO = {
    "LeNet": Entry(classic.LeNet, {"x": (1, 28, 28)}),
    "AlexNet": Entry(lambda: classic.AlexNet(1 / 16, 10, 64), {"x": (3, 63, 63)}),
    "VGG16": Entry(lambda: classic.VGG16(1 / 16, 10, 64), IMAGE),
    "SqueezeNet": Entry(lambda: classic.SqueezeNet(1 / 4, 10), {"x": (3, 36, 36)}, 0, 10, "MaxPool"),
    "ResNet50": Entry(lambda: residual.ResNet50(1 / 16, 10), IMAGE),
    "RepVGG": Entry(lambda: residual.RepVGG(1 / 12, 10), IMAGE),
    "InceptionV3": Entry(lambda: inception.InceptionV3(1 / 16, 10), {"x": (3, 75, 75)}),
    "MobileNetV2": Entry(lambda: mobile.MobileNetV2(1 / 8, 10, divisor=2), IMAGE),
    "MobileNetV3": Entry(lambda: mobile.MobileNetV3(1 / 8, 10, divisor=2), IMAGE),
    "ShuffleNetV2": Entry(lambda: mobile.ShuffleNetV2(1 / 8, 10), IMAGE),
    "YOLOv5": Entry(lambda: yolo.YOLOv5(1 / 16, 0.33, 4), {"x": (3, 64, 64)}, 0, 10, "Resize"),
    "VGG19": Entry(lambda: classic.VGG19(1 / 16, 10, 64), IMAGE),
    "ResNet18": Entry(lambda: residual.ResNet18(1 / 16, 10), IMAGE),
    "DenseNet121": Entry(lambda: dense.DenseNet121(1 / 16, 10), IMAGE),
    "ShuffleNetV1": Entry(lambda: mobile.ShuffleNetV1(1 / 4, 10), IMAGE),
    "TinyYOLOv2": Entry(lambda: yolo.TinyYOLOv2(1 / 16, 4, 1.0), {"x": (3, 64, 64)}),
    "ArcFace": Entry(lambda: residual.ArcFace(1 / 32, 16, 0.0, 1.0), IMAGE),
    "FERPlus": Entry(lambda: classic.FERPlus(1 / 16, 64, 0.0, 1.0), {"x": (1, 64, 64)}),
    "SubPixel": Entry(lambda: classic.SubPixel(1 / 8), {"x": (1, 12, 10)}),
    "T5": Entry(lambda: t5.T5(**SMALL), WORDS, 40),
    "MT5": Entry(lambda: t5.MT5(**SMALL), WORDS, 40),
}
