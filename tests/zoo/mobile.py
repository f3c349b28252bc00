"""Nets for small machines: MobileNetV2, MobileNetV3 (small), ShuffleNet and ShuffleNetV2."""

from __future__ import annotations

import math

from singa import autograd, layer, model
from singa._core.ops import op
from singa._core.tensor import Tensor

from .parts import Activation, Chain, ConvNorm, hardswish, pooled, relu6, scaled, whole


class Squeeze(layer.Layer):
    """Squeeze and excitation: channels weighted by what the whole image holds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = layer.Conv2d(whole(channels / 4), 1, activation="RELU")
        self.expand = layer.Conv2d(channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.expand(self.reduce(autograd.globalaveragepool(x)))
        return autograd.mul(x, autograd.hardsigmoid(weights, 1 / 6, 0.5))  # type: ignore[no-any-return]


class Inverted(layer.Layer):
    """MobileNetV2's block: widen by 1 x 1, filter each channel, narrow by 1 x 1; added to the input if the shapes are equal."""

    def __init__(self, channels_in: int, wide: int, channels: int, kernel: int, stride: int, activation: Activation,
                 squeeze: bool = False, epsilon: float = 1e-5) -> None:  # fmt: skip
        super().__init__()
        steps: list[layer.Layer] = []
        if wide != channels_in:
            steps.append(ConvNorm(wide, activation=activation, epsilon=epsilon))
        steps.append(ConvNorm(wide, kernel, stride, group=wide, activation=activation, epsilon=epsilon))
        if squeeze:
            steps.append(Squeeze(wide))
        steps.append(ConvNorm(channels, activation=None, epsilon=epsilon))
        self.steps = Chain(*steps)
        self.adds = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.steps(x)
        return autograd.add(x, y) if self.adds else y  # type: ignore[no-any-return]


class MobileNetV2(model.Model):
    """Sandler et al. 2018: seventeen inverted residuals with ReLU6.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    """(expansion, channels, count, stride of the first)"""

    def __init__(self, width: float = 1.0, classes: int = 1000, ratio: float = 0.2, divisor: int = 8) -> None:
        super().__init__()
        last = whole(32 * width, divisor)
        self.stem = ConvNorm(last, 3, 2, activation=relu6)
        blocks = []
        for expansion, channels, count, stride in self.stages:
            channels = whole(channels * width, divisor)
            for k in range(count):
                blocks.append(Inverted(last, last * expansion, channels, 3, 1 if k else stride, relu6))
                last = channels
        self.blocks = Chain(*blocks)
        self.head = ConvNorm(whole(1280 * width, divisor), activation=relu6)
        self.drop = layer.Dropout(ratio)
        self.fc = layer.Linear(classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(pooled(self.head(self.blocks(self.stem(x))))))  # type: ignore[no-any-return]


class MobileNetV3(model.Model):
    """Howard et al. 2019, small: squeeze and excitation, and hard swish in the later half.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    stages = (
        (3, 16, 16, True, False, 2), (3, 72, 24, False, False, 2), (3, 88, 24, False, False, 1), (5, 96, 40, True, True, 2),
        (5, 240, 40, True, True, 1), (5, 240, 40, True, True, 1), (5, 120, 48, True, True, 1), (5, 144, 48, True, True, 1),
        (5, 288, 96, True, True, 2), (5, 576, 96, True, True, 1), (5, 576, 96, True, True, 1),
    )  # fmt: skip
    """(kernel, widened channels, channels, squeeze and excitation, hard swish, stride)"""

    def __init__(self, width: float = 1.0, classes: int = 1000, ratio: float = 0.2, divisor: int = 8) -> None:
        super().__init__()

        def wide(channels: int) -> int:
            return whole(channels * width, divisor)

        self.stem = ConvNorm(wide(16), 3, 2, activation=hardswish, epsilon=1e-3)
        last, blocks = wide(16), []
        for kernel, inner, channels, squeeze, hard, stride in self.stages:
            activation = hardswish if hard else autograd.relu
            blocks.append(Inverted(last, wide(inner), wide(channels), kernel, stride, activation, squeeze, 1e-3))
            last = wide(channels)
        self.blocks = Chain(*blocks)
        self.head = ConvNorm(wide(576), activation=hardswish, epsilon=1e-3)
        self.fc1 = layer.Linear(wide(1024))
        self.drop = layer.Dropout(ratio)
        self.fc2 = layer.Linear(classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(pooled(self.head(self.blocks(self.stem(x)))))
        return self.fc2(self.drop(hardswish(x)))  # type: ignore[no-any-return]


def shuffled(x: Tensor, groups: int = 2) -> Tensor:
    """The channels of the groups in turn: 0 1 2 | 3 4 5 becomes 0 3 1 4 2 5."""
    n, channels, height, width = x.shape
    x = autograd.reshape(x, (n, groups, channels // groups, height, width))
    return autograd.reshape(autograd.transpose(x, (0, 2, 1, 3, 4)), (n, channels, height, width))  # type: ignore[no-any-return]


class GroupUnit(layer.Layer):
    """1 x 1 in four groups, shuffled, each channel alone by 3 x 3, 1 x 1 in groups; added to the input.

    With a stride of 2 the channels are appended to the mean of the input.
    """

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.enter = ConvNorm(channels, group=4)
        self.leave = Chain(ConvNorm(channels, 3, stride, group=channels, activation=None),
                           ConvNorm(channels, group=4, activation=None))  # fmt: skip
        self.pool = layer.AvgPool2d(3, 2, 1) if stride == 2 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(shuffled(self.enter(x), 4))
        return autograd.relu(autograd.add(x, y) if self.pool is None else autograd.cat([self.pool(x), y], 1))  # type: ignore[no-any-return]


class ShuffleNetV1(model.Model):
    """Zhang et al. 2017, half as wide, with four groups, as the ONNX Model Zoo has it: it ends with a softmax.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        last = 4 * math.ceil(6 * width)
        self.stem = ConvNorm(last, 3, 2)
        self.pool = layer.MaxPool2d(3, 2, 1)
        units = []
        for channels, count in ((136, 4), (272, 8), (544, 4)):
            outputs = 4 * math.ceil(channels / 4 * width)
            units += [GroupUnit(outputs if k else outputs - last, 1 if k else 2) for k in range(count)]
            last = outputs
        self.units = Chain(*units)
        self.fc = layer.Linear(classes)

    def forward(self, x: Tensor) -> Tensor:
        return autograd.softmax(self.fc(pooled(self.units(self.pool(self.stem(x))))))  # type: ignore[no-any-return]


class ShuffleUnit(layer.Layer):
    """Half of the channels pass, the other half is convolved; then they are shuffled.  A stride of 2 convolves both halves."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        half = channels // 2
        self.stride, self.half = stride, half
        self.main = Chain(ConvNorm(half), layer.Conv2d(half, 3, stride=stride, padding=1, group=half, bias=False),
                          layer.BatchNorm2d(), ConvNorm(half))  # fmt: skip
        self.other: layer.Layer | None = None

    def initialize(self, x: Tensor) -> None:
        if self.stride == 2:  # as wide as the input, which is known only now
            n = x.shape[1]
            self.other = Chain(ConvNorm(n, 3, 2, group=n, activation=None), ConvNorm(self.half))

    def forward(self, x: Tensor) -> Tensor:
        if self.other is not None:
            return shuffled(autograd.cat([self.other(x), self.main(x)], 1))
        a, b = autograd.split(x, 1, num_output=2)
        return shuffled(autograd.cat([a, self.main(b)], 1))


class ShuffleNetV2(model.Model):
    """Ma et al. 2018, 1.0x: stages of 4, 8, 4 units.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    stages = ((116, 4), (232, 8), (464, 4))

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        self.stem = ConvNorm(scaled(24, width), 3, 2)
        self.pool = layer.MaxPool2d(3, 2, 1)
        units = [ShuffleUnit(scaled(c, width), 1 if k else 2) for c, count in self.stages for k in range(count)]
        self.units = Chain(*units)
        self.head = ConvNorm(scaled(1024, width))
        self.fc = layer.Linear(classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(op.ReduceMean(self.head(self.units(self.pool(self.stem(x)))), [2, 3], keepdims=0))  # type: ignore[no-any-return]
