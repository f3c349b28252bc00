"""DenseNet121: every layer sees what all layers before it in its block made (Huang et al. 2016)."""

from __future__ import annotations

from singa import autograd, layer, model
from singa._core.ops import op
from singa._core.tensor import Tensor

from .parts import Chain, ConvNorm, scaled


class Norm(layer.Layer):
    """Batch normalization and ReLU, as they come before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layer.BatchNorm2d()

    def forward(self, x: Tensor) -> Tensor:
        return autograd.relu(self.norm(x))  # type: ignore[no-any-return]


class Growing(layer.Layer):
    """1 x 1 to four times the growth, 3 x 3 to the growth, appended to the input."""

    def __init__(self, growth: int) -> None:
        super().__init__()
        self.steps = Chain(Norm(), layer.Conv2d(4 * growth, 1, bias=False), Norm(),
                           layer.Conv2d(growth, 3, padding=1, bias=False))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return autograd.cat([x, self.steps(x)], 1)  # type: ignore[no-any-return]


class DenseNet121(model.Model):
    """Blocks of 6, 12, 24, 16 layers; between them the channels and the image are halved.

    x: (N, 3, S, S), S a multiple of 32.  y: (N, classes, 1, 1).
    """

    blocks = (6, 12, 24, 16)

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        growth, channels = scaled(32, width), scaled(64, width)
        steps: list[layer.Layer] = [ConvNorm(channels, 7, 2), layer.MaxPool2d(3, 2, 1)]
        for i, count in enumerate(self.blocks):
            steps += [Growing(growth) for _ in range(count)]
            channels += count * growth
            if i < len(self.blocks) - 1:
                channels //= 2
                steps += [Norm(), layer.Conv2d(channels, 1, bias=False), layer.AvgPool2d(2, 2)]
        self.features = Chain(*steps, Norm())
        self.last = layer.Conv2d(classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(op.GlobalAveragePool(self.features(x)))  # type: ignore[no-any-return]
