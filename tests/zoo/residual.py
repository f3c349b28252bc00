"""ResNet18, ResNet50 with bottlenecks, ResNet100 for faces, and RepVGG in the form that trains and in the form that runs."""

from __future__ import annotations

import numpy as np

from singa import autograd, layer, model
from singa._core.tensor import Tensor, to_numpy

from .parts import Chain, ConvNorm, pooled, scaled


class Bottleneck(layer.Layer):
    """1 x 1 to fewer channels, 3 x 3 with the stride, 1 x 1 to four times as many, added to the input.

    The input is projected if size or width changes.
    """

    def __init__(self, channels: int, stride: int, project: bool) -> None:
        super().__init__()
        self.reduce = ConvNorm(channels)
        self.conv = ConvNorm(channels, 3, stride)
        self.expand = ConvNorm(4 * channels, activation=None)
        self.shortcut = ConvNorm(4 * channels, 1, stride, activation=None) if project else None
        self.add = layer.Add()

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(self.conv(self.reduce(x)))
        return autograd.relu(self.add(y, x if self.shortcut is None else self.shortcut(x)))  # type: ignore[no-any-return]


class ResNet50(model.Model):
    """He et al. 2015: stages of 3, 4, 6, 3 bottlenecks; each but the first halves the image.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    stages = ((64, 3), (128, 4), (256, 6), (512, 3))

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        self.stem = ConvNorm(scaled(64, width), 7, 2)
        self.pool = layer.MaxPool2d(3, 2, 1)
        for i, (channels, count) in enumerate(self.stages):
            blocks = [Bottleneck(scaled(channels, width), 2 if i and not k else 1, not k) for k in range(count)]
            setattr(self, f"stage{i + 1}", Chain(*blocks))
        self.fc = layer.Linear(classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        for i in range(len(self.stages)):
            x = getattr(self, f"stage{i + 1}")(x)
        return self.fc(pooled(x))  # type: ignore[no-any-return]


class Basic(layer.Layer):
    """Two convolutions of 3 x 3, the first with the stride, added to the input, which is projected if its form changes."""

    def __init__(self, channels: int, stride: int, project: bool) -> None:
        super().__init__()
        self.one, self.two = ConvNorm(channels, 3, stride), ConvNorm(channels, 3, activation=None)
        self.shortcut = ConvNorm(channels, 1, stride, activation=None) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        return autograd.relu(autograd.add(y, x if self.shortcut is None else self.shortcut(x)))  # type: ignore[no-any-return]


class ResNet18(model.Model):
    """He et al. 2015: four stages of two basic blocks.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        self.stem = ConvNorm(scaled(64, width), 7, 2)
        self.pool = layer.MaxPool2d(3, 2, 1)
        self.blocks = Chain(*(
            Basic(scaled(channels, width), 2 if i and not k else 1, bool(i and not k))
            for i, channels in enumerate((64, 128, 256, 512)) for k in range(2)
        ))  # fmt: skip
        self.fc = layer.Linear(classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(pooled(self.blocks(self.pool(self.stem(x)))))  # type: ignore[no-any-return]


class PRelu(layer.Layer):
    """max(x, 0) + slope * min(x, 0), with a slope for each channel."""

    def initialize(self, x: Tensor) -> None:
        self.slope = Tensor((x.shape[1], 1, 1), x.device, requires_grad=True, stores_grad=True).set_value(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return autograd.prelu(x, self.slope)  # type: ignore[no-any-return]


class Improved(layer.Layer):
    """Normalized, 3 x 3, normalized, PReLU, 3 x 3 with the stride, normalized; added to the input, projected by first units."""

    def __init__(self, channels: int, first: bool) -> None:
        super().__init__()
        stride = 2 if first else 1
        self.steps = Chain(layer.BatchNorm2d(), ConvNorm(channels, 3, activation=None), PRelu(),
                           ConvNorm(channels, 3, stride, activation=None))  # fmt: skip
        self.shortcut = ConvNorm(channels, 1, stride, activation=None) if first else None

    def forward(self, x: Tensor) -> Tensor:
        return autograd.add(self.steps(x), x if self.shortcut is None else self.shortcut(x))  # type: ignore[no-any-return]


class ArcFace(model.Model):
    """Deng et al. 2018, LResNet100E-IR: stages of 3, 13, 30, 3 units, and a vector for each face.

    x: (N, 3, S, S), S a multiple of 16, 0 to 255 with the default `offset` and `factor`.  y: (N, size).
    """

    stages = ((64, 3), (128, 13), (256, 30), (512, 3))

    def __init__(self, width: float = 1.0, size: int = 512, offset: float = 127.5, factor: float = 1 / 128) -> None:
        super().__init__()
        self.offset, self.factor = offset, factor
        self.stem = Chain(ConvNorm(scaled(64, width), 3, activation=None), PRelu())
        self.units = Chain(*(Improved(scaled(c, width), not k) for c, count in self.stages for k in range(count)))
        self.end = Chain(layer.BatchNorm2d(), layer.Dropout(0.4), layer.Flatten(), layer.Linear(size), layer.BatchNorm2d())

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.units(self.stem((x - self.offset) * self.factor)))  # type: ignore[no-any-return]


class RepBlock(layer.Layer):
    """relu of the sum of three branches, each normalized: 3 x 3, 1 x 1, and the input itself if its form stays."""

    def __init__(self, channels: int, stride: int, identity: bool, group: int = 1) -> None:
        super().__init__()
        self.dense = ConvNorm(channels, 3, stride, group=group, activation=None)
        self.point = ConvNorm(channels, 1, stride, group=group, activation=None)
        self.norm = layer.BatchNorm2d() if identity else None
        self.stride, self.group = stride, group

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.dense(x), self.point(x), *([] if self.norm is None else [self.norm(x)])]
        return autograd.relu(autograd.add_all(*branches))  # type: ignore[no-any-return]

    def fused(self) -> tuple[np.ndarray, np.ndarray]:
        """Kernel (channels, in / group, 3, 3) and bias (channels,) of the one convolution that does the same in inference."""
        kernels, biases = [], []
        for branch, padding in ((self.dense, 0), (self.point, 1)):
            kernel, bias = _folded(to_numpy(branch.conv.W), branch.norm)
            kernels.append(np.pad(kernel, [(0, 0), (0, 0), (padding, padding), (padding, padding)]))
            biases.append(bias)
        if self.norm is not None:
            channels, inner = kernels[0].shape[:2]
            one = np.zeros_like(kernels[0])
            one[np.arange(channels), np.arange(channels) % inner, 1, 1] = 1  # within its group
            kernel, bias = _folded(one, self.norm)
            kernels.append(kernel)
            biases.append(bias)
        return np.sum(kernels, axis=0, dtype=np.float32), np.sum(biases, axis=0, dtype=np.float32)


def _folded(kernel: np.ndarray, norm: layer.BatchNorm2d) -> tuple[np.ndarray, np.ndarray]:
    """A convolution and the normalization after it as one: its kernel, its bias."""
    scale, shift, mean, variance = (to_numpy(t) for t in (norm.scale, norm.bias, norm.running_mean, norm.running_var))
    factor = scale / np.sqrt(variance + norm.epsilon)
    return kernel * factor[:, None, None, None], shift - mean * factor


class RepVGG(model.Model):
    """Ding et al. 2021, A0: a stem and stages of 2, 4, 14, 1 blocks; the first block of each halves the image.

    deploy: the fused form, plain convolutions with ReLUs.  x: (N, 3, S, S), S a multiple of 32.  y: (N, classes).
    """

    stages = ((48, 2), (96, 4), (192, 14), (1280, 1))

    def __init__(self, width: float = 1.0, classes: int = 1000, deploy: bool = False) -> None:
        super().__init__()
        self.deploy, self.width, self.classes = deploy, width, classes
        self.blocks = []
        for channels, count in ((48, 1), *self.stages):
            for k in range(count):
                self.blocks.append(self._block(scaled(channels, width), 1 if k else 2, bool(k)))
        for i, block in enumerate(self.blocks):
            setattr(self, f"block{i}", block)
        self.fc = layer.Linear(classes)

    def _block(self, channels: int, stride: int, identity: bool) -> layer.Layer:
        if self.deploy:
            return layer.Conv2d(channels, 3, stride=stride, padding=1, activation="RELU")
        return RepBlock(channels, stride, identity)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.fc(pooled(x))  # type: ignore[no-any-return]

    def deployed(self, x: Tensor) -> RepVGG:
        """The fused form with these weights; x: a tensor like those to come."""
        made = RepVGG(self.width, self.classes, deploy=True)
        made.compile([x], is_train=False)
        for block, conv in zip(self.blocks, made.blocks, strict=True):
            kernel, bias = block.fused()
            conv.set_params({"W": kernel, "b": bias})
        made.fc.set_params({"W": self.fc.W, "b": self.fc.b})
        return made
