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
from dataclasses import astuple
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

from ._autograd import formulas, handles, indices, losses
from ._core import random, tape, trace
from ._core.tensor import Tensor, op
from ._layers.attention import MultiHeadAttention, TransformerEncoderLayer
from ._layers.base import Layer
from ._layers.norm import GroupNorm, LayerNorm, RMSNorm
from ._layers.recurrent import GRU, LSTM, RNN, CudnnRNN, RNN_Base

Pair = int | Sequence[int]

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


def _pair(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return (int(value), int(value))
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return (int(value[0]), int(value[1]))
    raise TypeError(f"{name} must be an integer or a pair of integers, got {value!r}")


def _window(padding: Any, pad_mode: str) -> dict[str, Any]:
    """The attributes of a window's padding, which is one number, (height, width), or (top, bottom, left, right)."""
    if pad_mode != "NOTSET":
        if pad_mode not in ("SAME_UPPER", "SAME_LOWER"):
            raise ValueError(f"pad_mode must be NOTSET, SAME_UPPER or SAME_LOWER, got {pad_mode!r}")
        return {"auto_pad": pad_mode}
    if isinstance(padding, (tuple, list)) and len(padding) == 4:
        top, bottom, left, right = (int(p) for p in padding)
        return {"pads": [top, left, bottom, right]}
    height, width = _pair("padding", padding)
    return {"pads": [height, width, height, width]}


class Conv2d(Layer):
    """Convolves images with learned filters (ONNX: Conv, followed by Relu with `activation="RELU"`).

    Parameters, in the floating-point dtype of the input: W of shape (out, in / group, kernel height, kernel width), drawn from
    N(0, sqrt(2 / (in / group * kernel height * kernel width + out))); b of shape (out,), zeros. Called as Conv2d(out, kernel) or,
    in old programs, as Conv2d(in, out, kernel[, stride[, padding]]), where `in` is ignored because it is inferred.

    Args:
        nb_kernels: Number of output channels.
        kernel_size: Size of the filters: an integer, or (height, width).
        *args: The rest of the legacy arguments: they shift `nb_kernels` and `kernel_size` by one, and add stride and padding.
        stride: Step between windows, in pixels: an integer, or (height, width).
        padding: Zeros around the image, in pixels: an integer, (height, width), or (top, bottom, left, right).
        dilation: Distance between filter elements, in pixels: an integer, or (height, width).
        group: Number of groups into which the channels are divided.
        bias: Whether b is added.
        pad_mode: "NOTSET" to use `padding`; "SAME_UPPER" or "SAME_LOWER" for an output of size ceil(input / stride).
        activation: "NOTSET", or "RELU" to apply a ReLU to the output.
        **kwargs: `cudnn_prefer` and `workspace_MB_limit` of old programs; ignored.

    Raises:
        TypeError: For too many positional arguments, unknown keywords, or sizes that are not one or two integers.
        ValueError: If `pad_mode` or `activation` is unknown.
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
                    f"arguments of Conv2d must be (out, kernel) or (in, out, kernel, stride, padding), got {2 + len(args)}"
                )
            stride = rest[0] if rest else stride
            padding = rest[1] if len(rest) > 1 else padding
        unknown = sorted(set(kwargs) - {"cudnn_prefer", "workspace_MB_limit"})
        if unknown:
            raise TypeError(f"Conv2d has no argument {unknown[0]!r}")
        if activation not in ("NOTSET", "RELU"):
            raise ValueError(f"activation must be NOTSET or RELU, got {activation!r}")
        self.nb_kernels = int(nb_kernels)
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.stride = _pair("stride", stride)
        self.dilation = _pair("dilation", dilation)
        self.padding, self.pad_mode = padding, pad_mode
        self.group, self.bias, self.activation = group, bias, activation
        self.attributes = _window(padding, pad_mode)
        pads = self.attributes.get("pads", (0, 0, 0, 0))
        self.handle = handles.ConvHandle(self.stride, tuple(pads), self.dilation, group, self.kernel_size)
        self.b: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
        """Create W and, with `bias`, b.

        Args:
            x: Input of shape (N, in, height, width).

        Raises:
            InvalidInput: If x does not have rank 4, or `group` does not divide the numbers of channels (SX325).
        """
        self.in_channels = _grouped(self, x)
        inner = self.in_channels // self.group
        std = math.sqrt(2.0 / (inner * math.prod(self.kernel_size) + self.nb_kernels))
        self._param("W", (self.nb_kernels, inner, *self.kernel_size), x, std=std)
        if self.bias:
            self._param("b", (self.nb_kernels,), x)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: Float input of shape (N, in, height, width).

        Returns:
            Output of shape (N, out, output height, output width), in the dtype of x.

        Raises:
            InvalidInput: If x does not have rank 4, or has another number of channels than W (SX325).
        """
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


class ConvTranspose2d(Layer):
    """Spreads each pixel over a window with learned filters: the transpose of a convolution (ONNX: ConvTranspose).

    Sizes of the output are (input - 1) * stride - padding at both ends + dilation * (kernel - 1) + output_padding + 1.
    Parameters, in the floating-point dtype of the input: W of shape (in, out / group, kernel height, kernel width), drawn from
    N(0, sqrt(2 / (in / group * kernel height * kernel width + out))); b of shape (out,), zeros.

    Args:
        nb_kernels: Number of output channels.
        kernel_size: Size of the filters: an integer, or (height, width).
        stride: Step between windows in the output, in pixels: an integer, or (height, width).
        padding: Pixels that are cut off around the output: an integer, (height, width), or (top, bottom, left, right).
        output_padding: Rows and columns that are added at the end: an integer, or (height, width), below stride or dilation.
        dilation: Distance between filter elements, in pixels: an integer, or (height, width).
        group: Number of groups into which the channels are divided.
        bias: Whether b is added.

    Raises:
        TypeError: If a size is not one or two integers.
    """

    W: Tensor

    def __init__(
        self,
        nb_kernels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Any = 0,
        output_padding: Pair = 0,
        dilation: Pair = 1,
        group: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.nb_kernels = int(nb_kernels)
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.stride, self.dilation = _pair("stride", stride), _pair("dilation", dilation)
        self.output_padding = _pair("output_padding", output_padding)
        self.padding, self.group, self.bias = padding, group, bias
        self.attributes = _window(padding, "NOTSET")
        self.b: Tensor | None = None

    def initialize(self, x: Tensor) -> None:
        """Create W and, with `bias`, b.

        Args:
            x: Input of shape (N, in, height, width).

        Raises:
            InvalidInput: If x does not have rank 4, or `group` does not divide the numbers of channels (SX325).
        """
        self.in_channels = _grouped(self, x)
        std = math.sqrt(2.0 / (self.in_channels // self.group * math.prod(self.kernel_size) + self.nb_kernels))
        self._param("W", (self.in_channels, self.nb_kernels // self.group, *self.kernel_size), x, std=std)
        if self.bias:
            self._param("b", (self.nb_kernels,), x)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: Float input of shape (N, in, height, width).

        Returns:
            Output of shape (N, out, output height, output width), in the dtype of x.

        Raises:
            InvalidInput: If x does not have rank 4, or has another number of channels than W (SX325).
        """
        _channels(self, _images(self, x), self.W.shape[0])
        self._follow(x)
        y: Tensor = op.ConvTranspose(
            x,
            self.W,
            self.b,
            kernel_shape=list(self.kernel_size),
            strides=list(self.stride),
            dilations=list(self.dilation),
            output_padding=list(self.output_padding),
            group=self.group,
            **self.attributes,
        )
        return y


def _images(layer: Layer, x: Tensor) -> Any:
    """The shape of images, or None if the graph leaves it open; raises InvalidInput for another rank."""
    shape = op.shape(x)
    if shape is not None and len(shape) != 4:
        what = f"inputs of {layer._path() or type(layer).__name__} must have shape (N, channels, height, width), got {shape}"
        raise InvalidInput(what, code="SX325")
    return shape


def _grouped(layer: Conv2d | ConvTranspose2d, x: Tensor) -> int:
    """The number of channels of images; raises InvalidInput if `group` does not divide the numbers of channels."""
    channels = int(_images(layer, x)[1])
    if channels % layer.group or layer.nb_kernels % layer.group:
        what = f"group must divide the numbers of channels {channels} and {layer.nb_kernels}, got {layer.group}"
        raise InvalidInput(f"{layer._path() or type(layer).__name__}: {what}", code="SX325")
    return channels


def _channels(layer: Layer, shape: Any, channels: int) -> None:
    if shape is not None and isinstance(shape[1], int) and shape[1] != channels:
        what = f"inputs of {layer._path() or type(layer).__name__} must have {channels} channels, got shape {shape}"
        raise InvalidInput(what, code="SX325")


class SeparableConv2d(Layer):
    """Convolves each channel separately (`depthwise_conv`), then combines the channels by 1 x 1 filters (`point_conv`).

    Called as SeparableConv2d(out, kernel) or, in old programs, as SeparableConv2d(in, out, kernel[, stride[, padding]]).

    Args:
        nb_kernels: Number of output channels.
        kernel_size: Size of the depthwise filters: an integer, or (height, width).
        *args: The rest of the legacy arguments: they shift `nb_kernels` and `kernel_size` by one, and add stride and padding.
        stride: Step of the depthwise convolution: an integer, or (height, width).
        padding: Padding of the depthwise convolution, as for Conv2d.
        bias: Whether both convolutions add a bias.
    """

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
        """Create both convolutions.

        Args:
            x: Input of shape (N, in, height, width).

        Raises:
            InvalidInput: If x does not have rank 4 (SX325).
        """
        channels = int(_images(self, x)[1])
        self.depthwise_conv = Conv2d(
            channels, self.kernel_size, stride=self.stride, padding=self.padding, group=channels, bias=self.bias
        )
        self.point_conv = Conv2d(self.nb_kernels, 1, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both convolutions.

        Args:
            x: Float input of shape (N, in, height, width).

        Returns:
            Output of shape (N, nb_kernels, output height, output width).

        Raises:
            InvalidInput: If x has another rank or number of channels than the weights (SX325).
        """
        y: Tensor = self.point_conv(self.depthwise_conv(x))
        return y


class BatchNorm2d(Layer):
    """Normalizes each channel: by the batch in training, otherwise by the running statistics (ONNX: BatchNormalization).

    y = scale * (x - mean) / sqrt(variance + epsilon) + bias, with the population variance. In training, a running statistic
    becomes (1 - momentum) * running + momentum * batch; ONNX's momentum is 1 - momentum. Parameters of shape (C,): scale, ones;
    bias, zeros. States of shape (C,): running_mean, zeros; running_var, ones.

    Args:
        *args: The legacy arguments: the number of channels, which is inferred, then `momentum`.
        momentum: Weight of the new batch in the running statistics.
        epsilon: Number added to the variance.
        unbiased: Whether the running variance uses the unbiased variance of the batch, n / (n - 1) times the population variance;
            if False, it uses the population variance, as ONNX does.

    Raises:
        TypeError: If there are more than two positional arguments.
    """

    scale: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, *args: Any, momentum: float = 0.9, epsilon: float = 1e-5, unbiased: bool = True) -> None:
        super().__init__()
        if len(args) > 2:
            raise TypeError(f"arguments of BatchNorm2d must be (channels, momentum), got {len(args)}")
        self.momentum = float(args[1]) if len(args) > 1 else momentum
        self.epsilon = epsilon
        self.handle = handles.BatchNormHandle(self.momentum, epsilon, unbiased)

    def initialize(self, x: Tensor) -> None:
        """Create the parameters and the running statistics.

        Args:
            x: Input of shape (N, C, ...).

        Raises:
            InvalidInput: If x has a rank below 2 (SX325).
        """
        self.channels = int(self._shape(x)[1])
        self._param("scale", (self.channels,), x, value=1.0)
        self._param("bias", (self.channels,), x)
        self._statistic("running_mean", (self.channels,), x, 0.0)
        self._statistic("running_var", (self.channels,), x, 1.0)

    def _shape(self, x: Tensor) -> Any:
        shape = op.shape(x)
        if shape is not None and len(shape) < 2:
            raise InvalidInput(f"inputs of BatchNorm2d must have shape (N, channels, ...), got {shape}", code="SX325")
        return shape

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x; in training, update the running statistics.

        Args:
            x: Float input of shape (N, C, ...).

        Returns:
            Output of the shape and dtype of x.

        Raises:
            InvalidInput: If x has a rank below 2 or another number of channels than the parameters (SX325).
        """
        _channels(self, self._shape(x), self.channels)
        self._follow(x)
        trace.depends(self, lambda: astuple(self.handle))
        return handles.batchnorm_2d(self.handle, x, self.scale, self.bias, self.running_mean, self.running_var)


# --- pooling ----------------------------------------------------------------------------------------------------------


class Pooling2d(Layer):
    """Computes the maximum or the mean of each window (ONNX: MaxPool or AveragePool); the mean excludes padding.

    Args:
        kernel_size: Size of the windows, in pixels: an integer, or (height, width).
        stride: Step between windows: an integer, or (height, width); the kernel size if None.
        padding: Padding around the image: an integer, (height, width), or (top, bottom, left, right).
        is_max: Whether the maximum is computed; otherwise the mean.
        pad_mode: "NOTSET" to use `padding`; "SAME_UPPER" or "SAME_LOWER" for an output of size ceil(input / stride).
        ceil_mode: Whether the last window may extend beyond the end: output sizes are rounded up.

    Raises:
        TypeError: If a size is not one or two integers.
        ValueError: If `pad_mode` is unknown.
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
        """Pool x.

        Args:
            x: Input of shape (N, C, height, width).

        Returns:
            Output of shape (N, C, output height, output width), in the dtype of x.

        Raises:
            InvalidInput: If x has a rank that the layer does not take (SX325).
        """
        _images(self, x)
        return self._pool(x, list(self.kernel_size), list(self.stride), self.attributes)

    def _pool(self, x: Tensor, kernel: list[int], strides: list[int], window: dict[str, Any]) -> Tensor:
        pool = op.MaxPool if self.is_max else op.AveragePool
        y: Tensor = pool(x, kernel_shape=kernel, strides=strides, **window)
        return y


class MaxPool2d(Pooling2d):
    """Computes the maximum of each window (ONNX: MaxPool); see Pooling2d.

    Args:
        kernel_size: Size of the windows, in pixels: an integer, or (height, width).
        stride: Step between windows: an integer, or (height, width); the kernel size if None.
        padding: Padding around the image: an integer, (height, width), or (top, bottom, left, right).
        pad_mode: "NOTSET", "SAME_UPPER" or "SAME_LOWER".
        ceil_mode: Whether output sizes are rounded up.
    """

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Any = 0, pad_mode: str = "NOTSET", ceil_mode: bool = False
    ) -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode, ceil_mode)


class AvgPool2d(Pooling2d):
    """Computes the mean of each window without its padding (ONNX: AveragePool); see Pooling2d.

    Args:
        kernel_size: Size of the windows, in pixels: an integer, or (height, width).
        stride: Step between windows: an integer, or (height, width); the kernel size if None.
        padding: Padding around the image: an integer, (height, width), or (top, bottom, left, right).
        pad_mode: "NOTSET", "SAME_UPPER" or "SAME_LOWER".
        ceil_mode: Whether output sizes are rounded up.
    """

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Any = 0, pad_mode: str = "NOTSET", ceil_mode: bool = False
    ) -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode, ceil_mode)


class _Pooling1d(Pooling2d):
    """Pools windows of (1, kernel_size) of (N, C, height, width), or of kernel_size of (N, C, width)."""

    def __init__(self, kernel_size: int, stride: int | None, padding: int, is_max: bool, pad_mode: str) -> None:
        stride = kernel_size if stride is None else stride
        super().__init__((1, kernel_size), (1, stride), (0, padding), is_max, pad_mode)
        self._window1 = {"pads": [padding, padding]} if pad_mode == "NOTSET" else self.attributes

    def forward(self, x: Tensor) -> Tensor:
        """Pool x along its last axis.

        Args:
            x: Input of shape (N, C, width) or (N, C, height, width).

        Returns:
            Output of shape (N, C, output width) or (N, C, height, output width), in the dtype of x.

        Raises:
            InvalidInput: If x has another rank (SX325).
        """
        if len(x.shape) == 3:
            return self._pool(x, [self.kernel_size[1]], [self.stride[1]], self._window1)
        return super().forward(x)


class MaxPool1d(_Pooling1d):
    """Computes the maximum of each window along the last axis (ONNX: MaxPool).

    Args:
        kernel_size: Size of the windows.
        stride: Step between windows; the kernel size if None.
        padding: Padding at each end.
        pad_mode: "NOTSET", "SAME_UPPER" or "SAME_LOWER".
    """

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode)


class AvgPool1d(_Pooling1d):
    """Computes the mean of each window along the last axis without padding (ONNX: AveragePool).

    Args:
        kernel_size: Size of the windows.
        stride: Step between windows; the kernel size if None.
        padding: Padding at each end.
        pad_mode: "NOTSET", "SAME_UPPER" or "SAME_LOWER".
    """

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode)


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
        return formulas.softmax(x)


class SoftMaxCrossEntropy(Layer):
    """Computes the mean over the rows of -sum((t / sum(t)) * log(softmax(x))); see `autograd.softmax_cross_entropy`.

    Args:
        weight: The weight of each class, a Tensor or sequence of shape (C,); None for equal weights.
        ignore_index: A class number that marks positions without a loss; None if there are none.
        label_smoothing: The share of the labels, in [0, 1], that is distributed equally over all classes.
    """

    def __init__(self, weight: Any = None, ignore_index: int | None = None, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.weight, self.ignore_index, self.label_smoothing = weight, ignore_index, label_smoothing

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            x: Scores (logits) of shape (N, C, d1, ...).
            t: Class numbers of shape (N, d1, ...), or probabilities of the classes, of the shape of x.

        Returns:
            The loss, of shape (1,).

        Raises:
            InvalidInput: If the shapes do not match (SX334), or a class number is outside [0, C) (SX335).
            ValueError: If label_smoothing is not in [0, 1].
        """
        trace.depends(self, lambda: (repr(self.weight), self.ignore_index, self.label_smoothing))
        return losses.softmax_cross_entropy(x, t, self.weight, self.ignore_index, self.label_smoothing)


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
    """Computes -sum(t * log(x + 1e-4) + (1 - t) * log(1.0001 - x)) / N."""

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
