"""What the models of the zoo share: layers in a row, and a convolution that is normalized and then bent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from singa import autograd, layer
from singa._core.ops import op
from singa._core.tensor import Tensor

Activation = Callable[[Tensor], Tensor]


def relu6(x: Tensor) -> Tensor:
    return autograd.clip(x, 0.0, 6.0)  # type: ignore[no-any-return]


def hardswish(x: Tensor) -> Tensor:
    return op.HardSwish(x)  # type: ignore[no-any-return]


def silu(x: Tensor) -> Tensor:
    return autograd.mul(x, autograd.sigmoid(x))  # type: ignore[no-any-return]


class Chain(layer.Layer):
    """Layers and functions in sequence; the layers are registered by class and place."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.steps = steps
        self.register_layers(*steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class ConvNorm(layer.Layer):
    """Convolution without a bias, batch normalization, activation; padded so that a stride of 1 keeps the size.

    x: (N, in, H, W); y: (N, channels, H / stride, W / stride).
    """

    def __init__(self, channels: int, kernel: Any = 1, stride: int = 1, padding: Any = None, group: int = 1,
                 activation: Activation | None = autograd.relu, epsilon: float = 1e-5) -> None:  # fmt: skip
        super().__init__()
        if padding is None:
            padding = tuple(k // 2 for k in kernel) if isinstance(kernel, Sequence) else kernel // 2
        self.conv = layer.Conv2d(channels, kernel, stride=stride, padding=padding, group=group, bias=False)
        self.norm = layer.BatchNorm2d(epsilon=epsilon)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return y if self.activation is None else self.activation(y)


def pooled(x: Tensor) -> Tensor:
    """The mean over the image: (N, C, H, W) to (N, C)."""
    return autograd.flatten(op.GlobalAveragePool(x))  # type: ignore[no-any-return]


def whole(channels: float, divisor: int = 8) -> int:
    """The multiple of `divisor` nearest to a width, never less than nine tenths of it (MobileNet's rule)."""
    found = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return found + divisor if found < 0.9 * channels else found


def scaled(channels: int, width: float, least: int = 2) -> int:
    """A width at a fraction, even, so that halves and groups of two exist."""
    return max(least, 2 * math.ceil(channels * width / 2))
