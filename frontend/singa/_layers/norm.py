"""Layers that normalize each sample by itself: the same in training and in inference."""

from __future__ import annotations

from typing import Any

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor, op
from .base import Layer


class LayerNorm(Layer):
    """y = scale (x - mean) / sqrt(variance + epsilon) + bias over the axes from `axis` on.

    scale: ones, bias: zeros, of the shape of those axes.  From opset 17 on one LayerNormalization.
    """

    scale: Tensor

    def __init__(self, axis: int = -1, epsilon: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.axis, self.epsilon, self.with_bias = axis, epsilon, bias
        self.bias: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
        shape = tuple(x.shape[self.axis :])
        if not shape or not -len(x.shape) <= self.axis < len(x.shape):
            raise InvalidInput(f"{type(self).__name__} over axes {self.axis} ... of shape {x.shape}", code="SX325")
        self._param("scale", shape, x, value=1.0)
        if self.with_bias:
            self._param("bias", shape, x)

    def forward(self, x: Tensor) -> Tensor:
        self._follow(x)
        return op.LayerNormalization(x, self.scale, self.bias, axis=self.axis, epsilon=self.epsilon)


class RMSNorm(LayerNorm):
    """y = scale x / sqrt(mean(x^2) + epsilon) over the axes from `axis` on: T5 calls it its layer norm.

    scale: ones.  From opset 23 on one RMSNormalization.
    """

    def __init__(self, axis: int = -1, epsilon: float = 1e-5) -> None:
        super().__init__(axis, epsilon, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self._follow(x)
        return op.RMSNormalization(x, self.scale, axis=self.axis, epsilon=self.epsilon)


class GroupNorm(Layer):
    """y = scale (x - mean) / sqrt(variance + epsilon) + bias for x (N, C, ...), over each of `groups` parts of the channels.

    scale: ones, bias: zeros, (C,).  From opset 21 on one GroupNormalization.
    """

    scale: Tensor
    bias: Tensor

    def __init__(self, groups: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.epsilon = groups, epsilon

    def initialize(self, x: Tensor) -> None:
        if len(x.shape) < 2 or x.shape[1] % self.groups:
            raise InvalidInput(f"GroupNorm({self.groups}) takes (N, C, ...), C a multiple of it; not {x.shape}", code="SX325")
        self._param("scale", (x.shape[1],), x, value=1.0)
        self._param("bias", (x.shape[1],), x)

    def forward(self, x: Tensor) -> Any:
        self._follow(x)
        return op.GroupNormalization(x, self.scale, self.bias, num_groups=self.groups, epsilon=self.epsilon)
