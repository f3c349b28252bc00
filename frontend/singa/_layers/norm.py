"""Layers that normalize each sample independently; they compute the same in training and in inference."""

from __future__ import annotations

from typing import Any

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor, op
from .base import Layer


class LayerNorm(Layer):
    """Computes scale * (x - mean) / sqrt(variance + epsilon) + bias over the axes `axis` and later (ONNX: LayerNormalization-17).

    Parameters, of the shape of those axes: scale, ones; bias, zeros. Exports to an opset below 17 decompose the operator.

    Args:
        axis: First normalized axis; negative values count from the end.
        epsilon: Number added to the variance.
        bias: Whether there is a bias.
    """

    scale: Tensor

    def __init__(self, axis: int = -1, epsilon: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.axis, self.epsilon, self.with_bias = axis, epsilon, bias
        self.bias: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
        """Create scale and, with `bias`, bias.

        Args:
            x: Input of any shape that has the axis.

        Raises:
            InvalidInput: If x does not have the axis (SX325).
        """
        shape = tuple(x.shape[self.axis :])
        if not shape or not -len(x.shape) <= self.axis < len(x.shape):
            raise InvalidInput(f"axis of {type(self).__name__} must be in the shape {x.shape}, got {self.axis}", code="SX325")
        self._param("scale", shape, x, value=1.0)
        if self.with_bias:
            self._param("bias", shape, x)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x.

        Args:
            x: Float input of any shape that ends in the shape of scale.

        Returns:
            Output of the shape and dtype of x.
        """
        self._follow(x)
        return op.LayerNormalization(x, self.scale, self.bias, axis=self.axis, epsilon=self.epsilon)


class RMSNorm(LayerNorm):
    """Computes scale * x / sqrt(mean(x^2) + epsilon) over the axes `axis` and later (ONNX: RMSNormalization-23).

    T5 calls this its layer norm. Parameter, of the shape of those axes: scale, ones.

    Args:
        axis: First normalized axis; negative values count from the end.
        epsilon: Number added to the mean of the squares.
    """

    def __init__(self, axis: int = -1, epsilon: float = 1e-5) -> None:
        super().__init__(axis, epsilon, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self._follow(x)
        return op.RMSNormalization(x, self.scale, axis=self.axis, epsilon=self.epsilon)


class GroupNorm(Layer):
    """Computes scale * (x - mean) / sqrt(variance + epsilon) + bias over groups of channels (ONNX: GroupNormalization-21).

    Parameters of shape (C,): scale, ones; bias, zeros. Exports to an opset below 21 decompose the operator.

    Args:
        groups: Number of groups; it must divide the number of channels.
        epsilon: Number added to the variance.
    """

    scale: Tensor
    bias: Tensor

    def __init__(self, groups: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.epsilon = groups, epsilon

    def initialize(self, x: Tensor) -> None:
        """Create scale and bias.

        Args:
            x: Input of shape (N, C, ...).

        Raises:
            InvalidInput: If x has a rank below 2, or `groups` does not divide C (SX325).
        """
        if len(x.shape) < 2 or x.shape[1] % self.groups:
            what = f"inputs of GroupNorm must have shape (N, C, ...) with C a multiple of {self.groups}, got {x.shape}"
            raise InvalidInput(what, code="SX325")
        self._param("scale", (x.shape[1],), x, value=1.0)
        self._param("bias", (x.shape[1],), x)

    def forward(self, x: Tensor) -> Any:
        """Normalize x.

        Args:
            x: Float input of shape (N, C, ...).

        Returns:
            Output of the shape and dtype of x.
        """
        self._follow(x)
        return op.GroupNormalization(x, self.scale, self.bias, num_groups=self.groups, epsilon=self.epsilon)
