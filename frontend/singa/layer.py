"""Layers: operators with parameters, which are created when the layer first receives its inputs.

class Block(layer.Layer):
    def __init__(self):
        super().__init__()
        self.conv = layer.Conv2d(16, 3, padding=1)        registered: its weights are `conv.W` and `conv.b`
    def forward(self, x):
        return autograd.relu(self.conv(x))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from singa_backend.errors import InvalidInput

from ._autograd import indices, losses, reductions
from ._core import random, tape, trace
from ._core.tensor import Tensor, op
from ._layers.attention import MultiHeadAttention, TransformerEncoderLayer
from ._layers.base import Layer
from ._layers.images import (
    AvgPool1d,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    MaxPool1d,
    MaxPool2d,
    Pooling2d,
    SeparableConv2d,
)
from ._layers.norm import GroupNorm, LayerNorm, RMSNorm
from ._layers.recurrent import GRU, LSTM, RNN, CudnnRNN, RNN_Base

# --- with parameters --------------------------------------------------------------------------------------------------


class Linear(Layer):
    """Computes y = x W + b (ONNX: Gemm for x of rank 2, otherwise MatMul and Add).

    Parameters, in the floating-point dtype of the input: W of shape (in, out), drawn from N(0, sqrt(2 / (in + out))); b of shape
    (out,), zeros. Called as Linear(out) or, in old programs, as Linear(in, out[, bias]).

    Args:
        out_features: Size of the last axis of the output; the size of the last input axis if `args` are present.
        *args: The legacy arguments: the number of output features, then the value of `bias`.
        bias: Whether b is added.

    Raises:
        TypeError: If there are more than three positional arguments.
    """

    W: Tensor

    def __init__(self, out_features: int, *args: Any, bias: bool = True) -> None:
        super().__init__()
        if len(args) > 2:
            raise TypeError(f"arguments of Linear must be (out) or (in, out, bias), got {1 + len(args)}")
        self.in_features: int | None = int(out_features) if args else None
        self.out_features = int(args[0]) if args else int(out_features)
        self.bias = bool(args[1]) if len(args) > 1 else bias
        self.b: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
        """Create W and, with `bias`, b.

        Args:
            x: Input of shape (..., in).

        Raises:
            InvalidInput: If the number of features contradicts the legacy argument `in`, or x has rank 0 (SX325).
        """
        features = self._features(x)
        if self.in_features is None:
            self.in_features = int(features)
        self._check(x)
        self._param(
            "W", (self.in_features, self.out_features), x, std=math.sqrt(2.0 / max(1, self.in_features + self.out_features))
        )
        if self.bias:
            self._param("b", (self.out_features,), x)

    def _features(self, x: Tensor) -> Any:
        """The number of features; a name or None if the graph leaves it open."""
        shape = op.shape(x)
        if shape is None:
            return None
        if not shape:
            raise InvalidInput("inputs of Linear must have shape (..., features), got ()", code="SX325")
        return shape[-1]

    def _check(self, x: Tensor) -> None:
        features = self._features(x)
        if isinstance(features, int) and features != self.in_features:
            what = f"inputs of {self._path() or 'Linear'} must have {self.in_features} features, got shape {x.shape}"
            raise InvalidInput(what, code="SX325", hint=f"write Linear({self.out_features}): the number of inputs is inferred")

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: Float input of shape (..., in).

        Returns:
            Output of shape (..., out), in the dtype of x.

        Raises:
            InvalidInput: If the last axis of x does not have the size `in` (SX325).
        """
        self._check(x)
        self._follow(x)
        if len(x.shape) == 2:
            return op.Gemm(x, self.W, self.b)
        y = op.MatMul(x, self.W)
        return y if self.b is None else op.Add(y, self.b)


class Gemm(Layer):
    """Computes y = alpha * A B + beta * b (ONNX: Gemm), where A is x or its transpose, and B is W or its transpose.

    Parameters: W of shape (out, in) if `transB`, otherwise (in, out), drawn from N(0, sqrt(2 / (in + out))); b, zeros.

    Args:
        nb_kernels: Number of output features.
        alpha: Factor of the matrix product.
        beta: Factor of b.
        transA: Whether x is transposed.
        transB: Whether W is transposed.
        bias: Whether there is a b.
        bias_shape: Shape of b, which must broadcast to the output; (1, nb_kernels) if None.
    """

    W: Tensor

    def __init__(
        self,
        nb_kernels: int,
        alpha: float = 1.0,
        beta: float = 1.0,
        transA: bool = False,
        transB: bool = True,
        bias: bool = True,
        bias_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.nb_kernels = nb_kernels
        self.alpha, self.beta = alpha, beta
        self.transA, self.transB = int(transA), int(transB)
        self.bias = bias
        self.bias_shape = bias_shape
        self.b: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
        """Create W and, with `bias`, b.

        Args:
            x: Input of shape (N, in), or (in, N) with `transA`.
        """
        self.in_features = int(x.shape[0 if self.transA else 1])
        shape = (self.nb_kernels, self.in_features) if self.transB else (self.in_features, self.nb_kernels)
        self._param("W", shape, x, std=math.sqrt(2.0 / max(1, self.in_features + self.nb_kernels)))
        if self.bias:
            self._param("b", self.bias_shape or (1, self.nb_kernels), x)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: Float input of shape (N, in), or (in, N) with `transA`.

        Returns:
            Output of shape (N, nb_kernels).
        """
        self._follow(x)
        attributes: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta, "transA": self.transA, "transB": self.transB}
        y: Tensor = op.Gemm(x, self.W, self.b, **attributes)
        return y


class Embedding(Layer):
    """Selects rows of W by index (ONNX: Gather on axis 0).

    Parameter: W of shape (input_dim, output_dim), float32, or in the dtype of pretrained weights.

    Args:
        input_dim: Number of rows, that is, of different indices.
        output_dim: Size of a row.
        initializer: Distribution of the start values: "gaussian" for N(0, 1), or "uniform" for U(-1, 1).

    Raises:
        ValueError: If `initializer` is neither "gaussian" nor "uniform".
    """

    W: Tensor

    def __init__(self, input_dim: int, output_dim: int, initializer: str = "gaussian") -> None:
        super().__init__()
        if initializer not in ("gaussian", "uniform"):
            raise ValueError(f"initializer must be 'gaussian' or 'uniform', got {initializer!r}")
        self.input_dim, self.output_dim, self.initializer = input_dim, output_dim, initializer

    def initialize(self, x: Tensor) -> None:
        """Create W.

        Args:
            x: Indices; only their device is used.
        """
        kind = {"std": 1.0} if self.initializer == "gaussian" else {"bound": 1.0}
        self._param("W", (self.input_dim, self.output_dim), Tensor((), x.device), **kind)

    def from_pretrained(self, W: Any, freeze: bool = True) -> None:
        """Replace W by existing weights.

        Args:
            W: Tensor or array of shape (input_dim, output_dim).
            freeze: Whether the weights stay fixed in training.

        Raises:
            InvalidInput: If the shape is not (input_dim, output_dim) (SX326).
        """
        given = W if isinstance(W, Tensor) else Tensor(data=W)
        if tuple(given.shape) != (self.input_dim, self.output_dim):
            what = f"weights of the embedding must have shape {(self.input_dim, self.output_dim)}, got {given.shape}"
            raise InvalidInput(what, code="SX326")
        self._param("W", given.shape, given)
        self.set_params({"W": given})
        self.W.requires_grad = self.W.stores_grad = not freeze
        self.__dict__["_initialized"] = True

    def forward(self, x: Tensor) -> Tensor:
        """Select rows.

        Args:
            x: Indices in [-input_dim, input_dim), of any shape; integers, or floats with integral values.

        Returns:
            Rows of shape (*x.shape, output_dim), in the dtype of W.

        Raises:
            OperatorError: If an index is outside the range.
        """
        self._follow(x)
        return indices.embedding(x, self.W)


# --- without parameters -----------------------------------------------------------------------------------------------


class ReLU(Layer):
    """Computes max(x, 0) elementwise (ONNX: Relu)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function.

        Args:
            x: Input of any shape.

        Returns:
            Output of the shape and dtype of x.
        """
        return op.Relu(x)


class Sigmoid(Layer):
    """Computes 1 / (1 + exp(-x)) elementwise (ONNX: Sigmoid)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function.

        Args:
            x: Float input of any shape.

        Returns:
            Output of the shape and dtype of x.
        """
        return op.Sigmoid(x)


class Add(Layer):
    """Adds two tensors with broadcasting (ONNX: Add)."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Add two tensors.

        Args:
            a: First summand.
            b: Second summand, of a shape that broadcasts with that of `a`.

        Returns:
            The sum, in the broadcast shape.
        """
        return op.Add(a, b)


class Flatten(Layer):
    """Flattens a tensor to two axes (ONNX: Flatten).

    Args:
        axis: The axis at which the shape is divided: axes before it form the first output axis, the others the second.
    """

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Flatten x.

        Args:
            x: Input of any shape.

        Returns:
            Output of shape (d_0 * ... * d_(axis-1), d_axis * ... * d_(n-1)).
        """
        return op.Flatten(x, axis=self.axis)


class SoftMax(Layer):
    """Computes the softmax over all axes but the first, flattened to one (ONNX: Softmax of opset 12 with axis 1)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function.

        Args:
            x: Float input of shape (N, ...).

        Returns:
            Output of the shape and dtype of x; the elements of each row sum to 1.
        """
        return reductions.softmax(x)


class SoftMaxCrossEntropy(Layer):
    """Computes the mean over the rows of -sum((t / sum(t)) * log(softmax(x))); see `autograd.softmax_cross_entropy`.

    Args:
        weight: The weight of each class, a Tensor or sequence of shape (C,); None for equal weights.
        ignore_index: A class number that marks positions without a loss; None if there are none.
        label_smoothing: The share of the labels, in [0, 1], that is distributed equally over all classes.
        axis: The axis of the classes, 1 or -1; None for the one that the shape of class numbers leaves.
    """

    def __init__(
        self, weight: Any = None, ignore_index: int | None = None, label_smoothing: float = 0.0, axis: int | None = None
    ) -> None:
        super().__init__()
        self.weight, self.ignore_index, self.label_smoothing, self.axis = weight, ignore_index, label_smoothing, axis

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            x: Scores (logits) of shape (N, C, d1, ...), or (N, d1, ..., C).
            t: Class numbers of shape (N, d1, ...), or probabilities of the classes, of the shape of x.

        Returns:
            The loss, of shape (1,).

        Raises:
            InvalidInput: If the shapes do not match (SX334), or a class number is outside [0, C) (SX335).
            ValueError: If label_smoothing is not in [0, 1].
        """
        trace.depends(self, lambda: (repr(self.weight), self.ignore_index, self.label_smoothing, self.axis))
        return losses.softmax_cross_entropy(x, t, self.weight, self.ignore_index, self.label_smoothing, self.axis)


class MeanSquareError(Layer):
    """Computes the mean of (x - t)^2 over all elements."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            x: Predictions.
            t: Targets, of the shape of x.

        Returns:
            The loss, of shape (1,).

        Raises:
            InvalidInput: If the shapes do not match (SX334).
        """
        return losses.mse_loss(x, t)


class CrossEntropy(Layer):
    """Computes -sum(t * log(x)) / N."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            x: Probabilities of shape (N, C).
            t: Target probabilities, of the shape of x.

        Returns:
            The loss, of shape (1,).

        Raises:
            InvalidInput: If the shapes do not match (SX334).
        """
        return losses.cross_entropy(x, t)


class BinaryCrossEntropy(Layer):
    """Computes -sum(t * log(x) + (1 - t) * log(1 - x)) / N; the logarithms are finite at 0 and 1."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            x: Probabilities of shape (N, ...).
            t: Targets in [0, 1], of the shape of x.

        Returns:
            The loss, of shape (1,).

        Raises:
            InvalidInput: If the shapes do not match (SX334).
        """
        return losses.binary_cross_entropy(x, t)


class Dropout(Layer):
    """Sets elements to 0 with probability `ratio` and divides the others by 1 - ratio; only in training (ONNX: Dropout).

    Args:
        ratio: Probability that an element is set to 0, in [0, 1).
    """

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: Float input of any shape.

        Returns:
            Output of the shape and dtype of x; x itself outside training.
        """
        trace.depends(self, lambda: self.ratio)
        return random.dropout(x, self.ratio)[0] if tape.training else x


class Cat(Layer):
    """Concatenates tensors along an axis (ONNX: Concat).

    Args:
        axis: The axis.
    """

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors.

        Args:
            xs: Tensors whose shapes differ only along the axis.

        Returns:
            The concatenation.
        """
        return op.Concat(*xs, axis=self.axis)


class Reshape(Layer):
    """Changes the shape of a tensor (ONNX: Reshape)."""

    def forward(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshape x.

        Args:
            x: Input of any shape.
            shape: The new sizes: 0 keeps the size of the axis, and -1 is inferred from the others.

        Returns:
            Output of the new shape.
        """
        return op.Reshape(x, list(shape))


__all__ = [
    "GRU", "LSTM", "RNN", "Add", "AvgPool1d", "AvgPool2d", "BatchNorm2d", "BinaryCrossEntropy", "Cat", "Conv2d",
    "ConvTranspose2d", "CrossEntropy", "CudnnRNN", "Dropout", "Embedding", "Flatten", "Gemm", "GroupNorm", "Layer", "LayerNorm",
    "Linear", "MaxPool1d", "MaxPool2d", "MeanSquareError", "MultiHeadAttention", "Pooling2d", "RMSNorm", "RNN_Base", "ReLU",
    "Reshape", "SeparableConv2d", "Sigmoid", "SoftMax", "SoftMaxCrossEntropy", "TransformerEncoderLayer",
]  # fmt: skip
