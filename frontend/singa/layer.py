"""Layers: operators with parameters, which are made when the layer first sees its inputs.

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
from dataclasses import astuple
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

from ._autograd import formulas, handles, losses
from ._core import random, tape, trace
from ._core.tensor import Tensor, op
from ._layers.base import Layer
from ._layers.norm import GroupNorm, LayerNorm, RMSNorm
from ._layers.recurrent import LSTM, RNN, CudnnRNN, RNN_Base

Pair = int | Sequence[int]

# --- with parameters --------------------------------------------------------------------------------------------------


class Linear(Layer):
    """y = x W + b.  x: (..., in).  W: (in, out) ~ N(0, sqrt(2 / (in + out))).  b: (out,), zeros.

    Linear(out), or as in old programs Linear(in, out[, bias]).
    Raises InvalidInput for inputs that contradict `in`, or the weights.
    """

    W: Tensor

    def __init__(self, out_features: int, *args: Any, bias: bool = True) -> None:
        super().__init__()
        if len(args) > 2:
            raise TypeError(f"Linear takes (out) or (in, out, bias), not {1 + len(args)} arguments")
        self.in_features: int | None = int(out_features) if args else None
        self.out_features = int(args[0]) if args else int(out_features)
        self.bias = bool(args[1]) if len(args) > 1 else bias
        self.b: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
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
        """The number of features; a name or None where a graph leaves it open."""
        shape = op.shape(x)
        if shape is None:
            return None
        if not shape:
            raise InvalidInput("Linear takes inputs of shape (..., features); it was given a number", code="SX325")
        return shape[-1]

    def _check(self, x: Tensor) -> None:
        features = self._features(x)
        if isinstance(features, int) and features != self.in_features:
            what = f"{self._path() or 'Linear'} takes inputs of {self.in_features} features; it was given shape {x.shape}"
            raise InvalidInput(what, code="SX325", hint=f"write Linear({self.out_features}): the number of inputs is inferred")

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        self._follow(x)
        if len(x.shape) == 2:
            return op.Gemm(x, self.W, self.b)
        y = op.MatMul(x, self.W)
        return y if self.b is None else op.Add(y, self.b)


class Gemm(Layer):
    """y = alpha * x' W' + beta * b, where ' transposes as transA and transB say.

    W: (out, in) if transB else (in, out), as Linear's.  b: (1, out), or `bias_shape`, zeros.
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
        self.in_features = int(x.shape[0 if self.transA else 1])
        shape = (self.nb_kernels, self.in_features) if self.transB else (self.in_features, self.nb_kernels)
        self._param("W", shape, x, std=math.sqrt(2.0 / max(1, self.in_features + self.nb_kernels)))
        if self.bias:
            self._param("b", self.bias_shape or (1, self.nb_kernels), x)

    def forward(self, x: Tensor) -> Tensor:
        self._follow(x)
        attributes: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta, "transA": self.transA, "transB": self.transB}
        y: Tensor = op.Gemm(x, self.W, self.b, **attributes)
        return y


class Embedding(Layer):
    """Rows of W by number.  x: integers (floats that hold them are taken too), any shape; y: (*x.shape, output_dim).

    W: (input_dim, output_dim) ~ N(0, 1), or U(-1, 1) with initializer="uniform".
    Raises InvalidInput for a number outside [-input_dim, input_dim).
    """

    W: Tensor

    def __init__(self, input_dim: int, output_dim: int, initializer: str = "gaussian") -> None:
        super().__init__()
        if initializer not in ("gaussian", "uniform"):
            raise ValueError(f"initializer is 'gaussian' or 'uniform', not {initializer!r}")
        self.input_dim, self.output_dim, self.initializer = input_dim, output_dim, initializer

    def initialize(self, x: Tensor) -> None:
        kind = {"std": 1.0} if self.initializer == "gaussian" else {"bound": 1.0}
        self._param("W", (self.input_dim, self.output_dim), Tensor((), x.device), **kind)

    def from_pretrained(self, W: Any, freeze: bool = True) -> None:
        """Take these weights, a Tensor or an array of shape (input_dim, output_dim); frozen, they do not train."""
        given = W if isinstance(W, Tensor) else Tensor(data=W)
        if tuple(given.shape) != (self.input_dim, self.output_dim):
            what = f"the embedding has shape {(self.input_dim, self.output_dim)}; weights of {given.shape} were given"
            raise InvalidInput(what, code="SX326")
        self._param("W", given.shape, given)
        self.set_params({"W": given})
        self.W.requires_grad = self.W.stores_grad = not freeze
        self.__dict__["_initialized"] = True

    def forward(self, x: Tensor) -> Tensor:
        self._follow(x)
        return formulas.embedding(x, self.W)


def _pair(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return (int(value), int(value))
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return (int(value[0]), int(value[1]))
    raise TypeError(f"{name} is an integer or two, not {value!r}")


def _window(padding: Any, pad_mode: str) -> dict[str, Any]:
    """The attributes of a window's padding: one number, (height, width), or (top, bottom, left, right)."""
    if pad_mode != "NOTSET":
        if pad_mode not in ("SAME_UPPER", "SAME_LOWER"):
            raise ValueError(f"pad_mode is NOTSET, SAME_UPPER or SAME_LOWER, not {pad_mode!r}")
        return {"auto_pad": pad_mode}
    if isinstance(padding, (tuple, list)) and len(padding) == 4:
        top, bottom, left, right = (int(p) for p in padding)
        return {"pads": [top, left, bottom, right]}
    height, width = _pair("padding", padding)
    return {"pads": [height, width, height, width]}


class Conv2d(Layer):
    """A convolution.  x: (N, in, height, width).  W: (out, in / group, *kernel) ~ N(0, sqrt(2 / (in / group * size + out))).

    Conv2d(out, kernel), or as in old programs Conv2d(in, out, kernel[, stride[, padding]]), where `in` is inferred anyway.
    padding: an integer, (height, width) or (top, bottom, left, right); or pad_mode "SAME_UPPER" or "SAME_LOWER".
    activation: "RELU" for a ReLU behind.  b: (out,), zeros.  cudnn_prefer, workspace_MB_limit: kept for old programs.
    """

    W: Tensor

    def __init__(
        self,
        nb_kernels: int,
        kernel_size: Pair,
        *args: Any,
        stride: Pair = 1,
        padding: Any = 0,
        dilation: Pair = 1,
        group: int = 1,
        bias: bool = True,
        pad_mode: str = "NOTSET",
        activation: str = "NOTSET",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if args:
            given: Any = kernel_size
            nb_kernels, kernel_size, *rest = given, *args
            if len(rest) > 2:
                raise TypeError(
                    f"Conv2d takes (out, kernel) or (in, out, kernel, stride, padding), not {2 + len(args)} arguments"
                )
            stride = rest[0] if rest else stride
            padding = rest[1] if len(rest) > 1 else padding
        unknown = sorted(set(kwargs) - {"cudnn_prefer", "workspace_MB_limit"})
        if unknown:
            raise TypeError(f"Conv2d has no argument {unknown[0]!r}")
        if activation not in ("NOTSET", "RELU"):
            raise ValueError(f"activation is NOTSET or RELU, not {activation!r}")
        self.nb_kernels = int(nb_kernels)
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.stride = _pair("stride", stride)
        self.dilation = _pair("dilation", dilation)
        self.padding, self.pad_mode = padding, pad_mode
        self.group, self.bias, self.activation = group, bias, activation
        self.attributes = _window(padding, pad_mode)
        pads = self.attributes.get("pads", (0, 0, 0, 0))
        self.handle = handles.ConvHandle(self.stride, tuple(pads), self.dilation, group)
        self.b: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
        self.in_channels = int(_images(self, x)[1])
        if self.in_channels % self.group or self.nb_kernels % self.group:
            what = f"{self.group} groups do not divide both {self.in_channels} and {self.nb_kernels} channels"
            raise InvalidInput(f"{self._path() or 'Conv2d'}: {what}", code="SX325")
        inner = self.in_channels // self.group
        std = math.sqrt(2.0 / (inner * math.prod(self.kernel_size) + self.nb_kernels))
        self._param("W", (self.nb_kernels, inner, *self.kernel_size), x, std=std)
        if self.bias:
            self._param("b", (self.nb_kernels,), x)

    def forward(self, x: Tensor) -> Tensor:
        _channels(self, _images(self, x), self.W.shape[1] * self.group)
        self._follow(x)
        y = op.Conv(
            x,
            self.W,
            self.b,
            kernel_shape=list(self.kernel_size),
            strides=list(self.stride),
            dilations=list(self.dilation),
            group=self.group,
            **self.attributes,
        )
        return op.Relu(y) if self.activation == "RELU" else y


def _images(layer: Layer, x: Tensor) -> Any:
    """The shape of images, None where a graph leaves it open; raises InvalidInput for another rank."""
    shape = op.shape(x)
    if shape is not None and len(shape) != 4:
        what = f"{layer._path() or type(layer).__name__} takes inputs of shape (N, channels, height, width); it was given {shape}"
        raise InvalidInput(what, code="SX325")
    return shape


def _channels(layer: Layer, shape: Any, channels: int) -> None:
    if shape is not None and isinstance(shape[1], int) and shape[1] != channels:
        what = f"{layer._path() or type(layer).__name__} takes {channels} channels; it was given shape {shape}"
        raise InvalidInput(what, code="SX325")


class SeparableConv2d(Layer):
    """A convolution of each channel alone (`depthwise_conv`), then one of 1 x 1 (`point_conv`)."""

    depthwise_conv: Conv2d

    def __init__(
        self, nb_kernels: int, kernel_size: Pair, *args: Any, stride: Pair = 1, padding: Any = 0, bias: bool = False
    ) -> None:
        super().__init__()
        if args:
            given: Any = kernel_size
            nb_kernels, kernel_size, *rest = given, *args
            stride = rest[0] if rest else stride
            padding = rest[1] if len(rest) > 1 else padding
        self.nb_kernels, self.kernel_size, self.stride, self.padding, self.bias = nb_kernels, kernel_size, stride, padding, bias

    def initialize(self, x: Tensor) -> None:
        channels = int(_images(self, x)[1])
        self.depthwise_conv = Conv2d(
            channels, self.kernel_size, stride=self.stride, padding=self.padding, group=channels, bias=self.bias
        )
        self.point_conv = Conv2d(self.nb_kernels, 1, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.point_conv(self.depthwise_conv(x))
        return y


class BatchNorm2d(Layer):
    """Batch normalization of (N, C, ...): in training by the batch, else by the running statistics.

    y = scale * (x - mean) / sqrt(variance + epsilon) + bias, with the population variance.  In training, running statistics
    become (1 - momentum) * running + momentum * batch, with the unbiased variance, or with unbiased=False that of the population,
    as ONNX has it; nothing is updated else.
    BatchNorm2d(), or as in old programs BatchNorm2d(channels[, momentum]).  scale, bias, running_mean, running_var: (C,).
    """

    scale: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, *args: Any, momentum: float = 0.9, epsilon: float = 1e-5, unbiased: bool = True) -> None:
        super().__init__()
        if len(args) > 2:
            raise TypeError(f"BatchNorm2d takes (channels, momentum), not {len(args)} arguments")
        self.momentum = float(args[1]) if len(args) > 1 else momentum
        self.epsilon = epsilon
        self.handle = handles.BatchNormHandle(self.momentum, epsilon, unbiased)

    def initialize(self, x: Tensor) -> None:
        self.channels = int(self._shape(x)[1])
        self._param("scale", (self.channels,), x, value=1.0)
        self._param("bias", (self.channels,), x)
        self._statistic("running_mean", (self.channels,), x, 0.0)
        self._statistic("running_var", (self.channels,), x, 1.0)

    def _shape(self, x: Tensor) -> Any:
        shape = op.shape(x)
        if shape is not None and len(shape) < 2:
            raise InvalidInput(f"BatchNorm2d takes inputs of shape (N, channels, ...); it was given {shape}", code="SX325")
        return shape

    def forward(self, x: Tensor) -> Tensor:
        _channels(self, self._shape(x), self.channels)
        self._follow(x)
        trace.depends(self, lambda: astuple(self.handle))
        return handles.batchnorm_2d(self.handle, x, self.scale, self.bias, self.running_mean, self.running_var)


# --- pooling ----------------------------------------------------------------------------------------------------------


class Pooling2d(Layer):
    """The greatest, or the mean, of each window of (N, C, height, width); the mean leaves padding out.

    stride: as the kernel where None.  padding and pad_mode: as Conv2d's.  ceil_mode: a last window may stick out at the end.
    """

    def __init__(
        self,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Any = 0,
        is_max: bool = True,
        pad_mode: str = "NOTSET",
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.stride = self.kernel_size if stride is None else _pair("stride", stride)
        self.padding, self.is_max, self.pad_mode, self.ceil_mode = padding, is_max, pad_mode, ceil_mode
        self.attributes = _window(padding, pad_mode)
        if ceil_mode:
            self.attributes["ceil_mode"] = 1
        pads = self.attributes.get("pads", (0, 0, 0, 0))
        self.handle = handles.PoolingHandle(self.kernel_size, self.stride, tuple(pads), is_max)

    def forward(self, x: Tensor) -> Tensor:
        _images(self, x)
        return self._pool(x, list(self.kernel_size), list(self.stride), self.attributes)

    def _pool(self, x: Tensor, kernel: list[int], strides: list[int], window: dict[str, Any]) -> Tensor:
        pool = op.MaxPool if self.is_max else op.AveragePool
        y: Tensor = pool(x, kernel_shape=kernel, strides=strides, **window)
        return y


class MaxPool2d(Pooling2d):
    """The greatest value of each window; see Pooling2d."""

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Any = 0, pad_mode: str = "NOTSET", ceil_mode: bool = False
    ) -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode, ceil_mode)


class AvgPool2d(Pooling2d):
    """The mean of each window without its padding; see Pooling2d."""

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Any = 0, pad_mode: str = "NOTSET", ceil_mode: bool = False
    ) -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode, ceil_mode)


class _Pooling1d(Pooling2d):
    """Windows of (1, kernel_size) on (N, C, height, width), or of kernel_size on (N, C, width)."""

    def __init__(self, kernel_size: int, stride: int | None, padding: int, is_max: bool, pad_mode: str) -> None:
        stride = kernel_size if stride is None else stride
        super().__init__((1, kernel_size), (1, stride), (0, padding), is_max, pad_mode)
        self._window1 = {"pads": [padding, padding]} if pad_mode == "NOTSET" else self.attributes

    def forward(self, x: Tensor) -> Tensor:
        if len(x.shape) == 3:
            return self._pool(x, [self.kernel_size[1]], [self.stride[1]], self._window1)
        return super().forward(x)


class MaxPool1d(_Pooling1d):
    """The greatest value of each window along the last axis; see Pooling2d."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode)


class AvgPool1d(_Pooling1d):
    """The mean of each window along the last axis; see Pooling2d."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode)


# --- without parameters -----------------------------------------------------------------------------------------------


class ReLU(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return op.Relu(x)


class Sigmoid(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return op.Sigmoid(x)


class Add(Layer):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return op.Add(a, b)


class Flatten(Layer):
    """(N, ...) to (N, product): two axes, divided at `axis`."""

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return op.Flatten(x, axis=self.axis)


class SoftMax(Layer):
    """Along the axes from 1 on, taken as one."""

    def forward(self, x: Tensor) -> Tensor:
        return formulas.softmax(x)


class SoftMaxCrossEntropy(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return losses.softmax_cross_entropy(x, t)


class MeanSquareError(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return losses.mse_loss(x, t)


class CrossEntropy(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return losses.cross_entropy(x, t)


class BinaryCrossEntropy(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return losses.binary_cross_entropy(x, t)


class Dropout(Layer):
    """In training, zeros in the share `ratio` of the places, and the others divided by 1 - ratio; else the input."""

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:
        trace.depends(self, lambda: self.ratio)
        return random.dropout(x, self.ratio)[0] if tape.training else x


class Cat(Layer):
    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        return op.Concat(*xs, axis=self.axis)


class Reshape(Layer):
    """To a shape in which 0 keeps a size and -1 stands for what is left."""

    def forward(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return op.Reshape(x, list(shape))


__all__ = [
    "LSTM", "RNN", "Add", "AvgPool1d", "AvgPool2d", "BatchNorm2d", "BinaryCrossEntropy", "Cat", "Conv2d", "CrossEntropy",
    "CudnnRNN", "Dropout", "Embedding", "Flatten", "Gemm", "GroupNorm", "Layer", "LayerNorm", "Linear", "MaxPool1d",
    "MaxPool2d", "MeanSquareError", "Pooling2d", "RMSNorm", "RNN_Base", "ReLU", "Reshape", "SeparableConv2d", "Sigmoid",
    "SoftMax", "SoftMaxCrossEntropy",
]  # fmt: skip
