"""Layers of images: convolutions, batch normalization and pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

from .._autograd import handles
from .._core import trace
from .._core.tensor import Tensor, op
from .base import Layer

Pair = int | Sequence[int]


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
