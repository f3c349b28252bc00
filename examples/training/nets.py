"""Random nets with the structure of the published ones, which replace a file: `width` scales the channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx

from singa import autograd, device, layer, sonnx, tensor
from singa.model import Model

Act = Callable[[Any], Any]


def exported(net: Model, inputs: dict[str, np.ndarray], seed: int) -> onnx.ModelProto:
    """The net as an ONNX model of open batch size."""
    device.get_default_device().SetRandSeed(seed)
    xs = [tensor.Tensor(data=a, requires_grad=False, name=n) for n, a in inputs.items()]
    net.compile(xs, is_train=False)
    return sonnx.export(net, xs, dynamic_axes={n: {0: "N"} for n in inputs})


def image(size: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros((2, 3, size, size), np.float32)}


class Chain(layer.Layer):
    """Layers and functions in a row."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.steps = steps
        self.register_layers(*steps)

    def forward(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return x


def conv(channels: int, kernel: int, stride: int = 1, group: int = 1, act: Act | None = None) -> list[Any]:
    """Convolution and normalization, and an activation."""
    made = layer.Conv2d(channels, kernel, stride=stride, padding=kernel // 2, group=group, bias=False)
    return [made, layer.BatchNorm2d(), *[act] * (act is not None)]


class Residual(layer.Layer):
    """A block of ResNet: two convolutions of 3 x 3, or three (1, 3, 1) of which the last is four times as wide.

    v1 normalizes after each convolution, and activates after the sum; v2 normalizes and activates before each convolution.
    """

    def __init__(self, channels: int, stride: int, deep: bool, project: bool, version: int) -> None:
        super().__init__()
        wide = 4 * channels if deep else channels
        plan = [(channels, 1, 1), (channels, 3, stride), (wide, 1, 1)] if deep else [(channels, 3, stride), (channels, 3, 1)]
        self.version = version
        steps: list[Any] = []
        for i, (c, kernel, s) in enumerate(plan):
            act = autograd.relu if i < len(plan) - 1 else None
            if version == 1:
                steps += conv(c, kernel, s, act=act)
            else:
                one = layer.Conv2d(c, kernel, stride=s, padding=kernel // 2, bias=False)
                steps += [*[layer.BatchNorm2d(), autograd.relu] * bool(i), one]
        self.first = layer.BatchNorm2d() if version == 2 else None
        self.body = Chain(*steps)
        shortcut = conv(wide, 1, stride)
        self.shortcut = Chain(*shortcut[: 1 if version == 2 else 2]) if project else None

    def forward(self, x: Any) -> Any:
        if self.version == 2:
            y = autograd.relu(self.first(x))
            return autograd.add(self.body(y), x if self.shortcut is None else self.shortcut(y))
        return autograd.relu(autograd.add(self.body(x), x if self.shortcut is None else self.shortcut(x)))


class ResNet(Model):
    """He et al. 2015 and 2016."""

    stages: ClassVar = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

    def __init__(self, depth: int, width: float, classes: int, version: int = 1) -> None:
        super().__init__()
        deep = depth >= 50
        steps: list[Any] = [*conv(scaled(64, width), 7, 2, act=autograd.relu), layer.MaxPool2d(3, 2, 1)]
        for i, count in enumerate(self.stages[depth]):
            for k in range(count):
                project = not k and (deep or i > 0)
                steps.append(Residual(scaled(64 * 2**i, width), 2 if i and not k else 1, deep, project, version))
        if version == 2:
            steps += [layer.BatchNorm2d(), autograd.relu]
        self.body = Chain(*steps, autograd.globalaveragepool, autograd.flatten)
        self.fc = layer.Linear(classes)

    def forward(self, x: Any) -> Any:
        return self.fc(self.body(x))


class VGG(Model):
    """Simonyan and Zisserman 2014; `norm` for the form with batch normalization."""

    stages: ClassVar = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}

    def __init__(self, depth: int, width: float, classes: int, norm: bool) -> None:
        super().__init__()
        steps: list[Any] = []
        for channels, count in zip((64, 128, 256, 512, 512), self.stages[depth], strict=True):
            for _ in range(count):
                made = layer.Conv2d(scaled(channels, width), 3, padding=1)
                steps += [made, layer.BatchNorm2d(), autograd.relu] if norm else [made, autograd.relu]
            steps.append(layer.MaxPool2d(2, 2))
        for _ in range(2):
            steps += [layer.Linear(scaled(4096, width)), autograd.relu, layer.Dropout(0.5)]
        steps.insert(-6, autograd.flatten)
        self.body = Chain(*steps)
        self.fc = layer.Linear(classes)

    def forward(self, x: Any) -> Any:
        return self.fc(self.body(x))


class Inverted(layer.Layer):
    """A block of MobileNetV2: widened, convolved channel by channel, narrowed."""

    def __init__(self, channels_in: int, factor: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels_in * factor
        steps = conv(wide, 1, act=relu6) if factor > 1 else []
        self.body = Chain(*steps, *conv(wide, 3, stride, wide, relu6), *conv(channels, 1))
        self.adds = stride == 1 and channels_in == channels

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        return autograd.add(x, y) if self.adds else y


class MobileNetV2(Model):
    """Sandler et al. 2018."""

    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, width: float, classes: int) -> None:
        super().__init__()
        last = scaled(32, width)
        steps: list[Any] = conv(last, 3, 2, act=relu6)
        for factor, channels, count, stride in self.stages:
            for k in range(count):
                steps.append(Inverted(last, factor, scaled(channels, width), 1 if k else stride))
                last = scaled(channels, width)
        steps += conv(scaled(1280, width), 1, act=relu6)
        self.body = Chain(*steps, autograd.globalaveragepool, autograd.flatten, layer.Dropout(0.2))
        self.fc = layer.Linear(classes)

    def forward(self, x: Any) -> Any:
        return self.fc(self.body(x))


class Encoder(layer.Layer):
    """A layer of BERT: attention to the words of the mask, and two dense layers; each is added and normalized."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.q, self.k, self.v, self.out = (layer.Linear(size) for _ in range(4))
        self.wide, self.narrow = layer.Linear(4 * size), layer.Linear(size)
        self.norm1, self.norm2 = layer.LayerNorm(), layer.LayerNorm()

    def forward(self, x: Any, bias: Any) -> Any:
        length = x.shape[1]

        def heads(y: Any, order: Sequence[int] = (0, 2, 1, 3)) -> Any:
            return autograd.transpose(autograd.reshape(y, (0, length, self.heads, self.size // self.heads)), order)

        scores = autograd.matmul(heads(self.q(x)), heads(self.k(x), (0, 2, 3, 1))) / math.sqrt(self.size / self.heads)
        y = autograd.matmul(autograd.softmax(scores + bias, axis=-1), heads(self.v(x)))
        y = autograd.reshape(autograd.transpose(y, (0, 2, 1, 3)), (0, length, self.size))
        x = self.norm1(x + self.out(y))
        y = self.wide(x)
        y = 0.5 * y * (1.0 + autograd.erf(y / math.sqrt(2)))
        return self.norm2(x + self.narrow(y))


class BERT(Model):
    """Devlin et al. 2018: embeddings of words, places and segments, encoders, and the pooled first word."""

    def __init__(self, words: int, length: int, size: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words, self.kinds = layer.Embedding(words, size), layer.Embedding(2, size)
        self.places = layer.Embedding(length, size)
        self.norm = layer.LayerNorm()
        self.layers = [Encoder(size, heads) for _ in range(layers)]
        self.register_layers(*self.layers)
        self.pool = layer.Linear(size)

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        places = tensor.from_numpy(np.arange(input_ids.shape[1])[None])
        x = self.norm(self.words(input_ids) + self.kinds(token_type_ids) + self.places(places))
        bias = (1.0 - autograd.unsqueeze(autograd.cast(attention_mask, tensor.float32), [1, 2])) * -10000.0
        for encoder in self.layers:
            x = encoder(x, bias)
        return autograd.tanh(self.pool(autograd.squeeze(autograd.slice(x, [0], [1], [1]), 1)))


def scaled(channels: int, width: float) -> int:
    return max(2, 2 * round(channels * width / 2))


def relu6(x: Any) -> Any:
    return autograd.clip(x, 0.0, 6.0)
