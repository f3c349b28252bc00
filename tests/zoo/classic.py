"""Nets without normalization: LeNet-5, AlexNet, VGG16 and VGG19 (configurations D and E), SqueezeNet 1.1, FER+ and sub-pixel."""

from __future__ import annotations

from singa import autograd, layer, model
from singa._core.tensor import Tensor

from .parts import Chain, pooled, scaled


class LeNet(model.Model):
    """LeCun et al. 1998: two convolutions with subsampling by the mean, a third one over what is left, two dense layers.

    x: (N, 1, 28, 28), padded by 2 to the 32 x 32 of the paper.  y: (N, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.c1 = layer.Conv2d(6, 5, padding=2)
        self.s2 = layer.AvgPool2d(2, 2)
        self.c3 = layer.Conv2d(16, 5)
        self.s4 = layer.AvgPool2d(2, 2)
        self.c5 = layer.Conv2d(120, 5)
        self.flatten = layer.Flatten()
        self.f6 = layer.Linear(84)
        self.output = layer.Linear(10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.s2(autograd.tanh(self.c1(x)))
        x = self.s4(autograd.tanh(self.c3(x)))
        x = self.flatten(autograd.tanh(self.c5(x)))
        return self.output(autograd.tanh(self.f6(x)))  # type: ignore[no-any-return]


class AlexNet(model.Model):
    """Krizhevsky 2014, one column: five convolutions, three poolings, three dense layers with dropout.

    x: (N, 3, S, S), S of 63 at least.  y: (N, classes).
    """

    def __init__(self, width: float = 1.0, classes: int = 1000, dense: int = 4096, ratio: float = 0.5) -> None:
        super().__init__()
        c = [scaled(n, width) for n in (64, 192, 384, 256, 256)]
        self.features = Chain(
            layer.Conv2d(c[0], 11, stride=4, padding=2, activation="RELU"), layer.MaxPool2d(3, 2),
            layer.Conv2d(c[1], 5, padding=2, activation="RELU"), layer.MaxPool2d(3, 2),
            layer.Conv2d(c[2], 3, padding=1, activation="RELU"), layer.Conv2d(c[3], 3, padding=1, activation="RELU"),
            layer.Conv2d(c[4], 3, padding=1, activation="RELU"), layer.MaxPool2d(3, 2),
        )  # fmt: skip
        self.classifier = Chain(
            layer.Flatten(), layer.Dropout(ratio), layer.Linear(dense), layer.ReLU(), layer.Dropout(ratio), layer.Linear(dense),
            layer.ReLU(), layer.Linear(classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))  # type: ignore[no-any-return]


class VGG16(model.Model):
    """Simonyan and Zisserman 2014, configuration D: 2, 2, 3, 3, 3 convolutions of 3 x 3, each stage ends in a pooling.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    stages = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))

    def __init__(self, width: float = 1.0, classes: int = 1000, dense: int = 4096, ratio: float = 0.5) -> None:
        super().__init__()
        steps: list[layer.Layer] = []
        for channels, count in self.stages:
            steps += [layer.Conv2d(scaled(channels, width), 3, padding=1, activation="RELU") for _ in range(count)]
            steps.append(layer.MaxPool2d(2, 2))
        self.features = Chain(*steps)
        self.flatten = layer.Flatten()
        self.fc6, self.fc7 = layer.Linear(dense), layer.Linear(dense)
        self.fc8 = layer.Linear(classes)
        self.drop6, self.drop7 = layer.Dropout(ratio), layer.Dropout(ratio)

    def forward(self, x: Tensor) -> Tensor:
        x = self.flatten(self.features(x))
        x = self.drop6(autograd.relu(self.fc6(x)))
        return self.fc8(self.drop7(autograd.relu(self.fc7(x))))  # type: ignore[no-any-return]


class VGG19(VGG16):
    """Configuration E: 2, 2, 4, 4, 4 convolutions."""

    stages = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


class FERPlus(model.Model):
    """Barsoum et al. 2016, the VGG13 of emotions: 2, 2, 3, 3 convolutions of 3 x 3, dropout after each pooling.

    x: (N, 1, 64, 64), 0 to 255 with the default `offset` and `factor`.  y: (N, 8).
    """

    stages = ((64, 2), (128, 2), (256, 3), (256, 3))

    def __init__(self, width: float = 1.0, dense: int = 1024, offset: float = 127.5, factor: float = 1 / 255) -> None:
        super().__init__()
        self.offset, self.factor = offset, factor
        steps: list[layer.Layer] = []
        for channels, count in self.stages:
            steps += [layer.Conv2d(scaled(channels, width), 3, padding=1, activation="RELU") for _ in range(count)]
            steps += [layer.MaxPool2d(2, 2), layer.Dropout(0.25)]
        self.features = Chain(*steps)
        self.classifier = Chain(
            layer.Flatten(), layer.Linear(dense), layer.ReLU(), layer.Dropout(0.5), layer.Linear(dense), layer.ReLU(),
            layer.Dropout(0.5), layer.Linear(8),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features((x - self.offset) * self.factor))  # type: ignore[no-any-return]


class SubPixel(model.Model):
    """Shi et al. 2016: four convolutions; the channels of the last become the pixels of blocks of `factor` x `factor`.

    x: (N, 1, H, W).  y: (N, 1, factor * H, factor * W).
    """

    def __init__(self, width: float = 1.0, factor: int = 3) -> None:
        super().__init__()
        c = [scaled(n, width) for n in (64, 64, 32)]
        self.convolutions = Chain(
            layer.Conv2d(c[0], 5, padding=2, activation="RELU"), layer.Conv2d(c[1], 3, padding=1, activation="RELU"),
            layer.Conv2d(c[2], 3, padding=1, activation="RELU"), layer.Conv2d(factor**2, 3, padding=1),
        )  # fmt: skip
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        r = self.factor
        x = autograd.reshape(self.convolutions(x), (n, 1, r, r, height, width))
        return autograd.reshape(autograd.transpose(x, (0, 1, 4, 2, 5, 3)), (n, 1, r * height, r * width))  # type: ignore[no-any-return]


class Fire(layer.Layer):
    """Squeezed by 1 x 1, then widened by 1 x 1 and 3 x 3 side by side."""

    def __init__(self, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = layer.Conv2d(squeeze, 1, activation="RELU")
        self.expand1 = layer.Conv2d(expand, 1, activation="RELU")
        self.expand3 = layer.Conv2d(expand, 3, padding=1, activation="RELU")
        self.cat = layer.Cat(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x)
        return self.cat([self.expand1(x), self.expand3(x)])  # type: ignore[no-any-return]


class SqueezeNet(model.Model):
    """Iandola et al. 2016, version 1.1: eight fire modules between poolings, and a convolution for a classifier.

    x: (N, 3, S, S), S of 17 at least.  y: (N, classes).
    """

    def __init__(self, width: float = 1.0, classes: int = 1000, ratio: float = 0.5, ceil_mode: bool = True) -> None:
        super().__init__()

        def pool() -> layer.MaxPool2d:
            return layer.MaxPool2d(3, 2, ceil_mode=ceil_mode)

        def fire(squeeze: int, expand: int) -> Fire:
            return Fire(scaled(squeeze, width), scaled(expand, width))

        self.features = Chain(
            layer.Conv2d(scaled(64, width), 3, stride=2, activation="RELU"), pool(),
            fire(16, 64), fire(16, 64), pool(),
            fire(32, 128), fire(32, 128), pool(),
            fire(48, 192), fire(48, 192), fire(64, 256), fire(64, 256),
        )  # fmt: skip
        self.drop = layer.Dropout(ratio)
        self.last = layer.Conv2d(classes, 1, activation="RELU")

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.last(self.drop(self.features(x))))
