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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from . import autograd, tape, trace
from .device import Device
from .tape import Dummy, op
from .tensor import Tensor

Pair = int | Sequence[int]


class Layer:
    """The base class of layers: write `forward(*inputs)`, and `initialize(*inputs)` where there are parameters to make.

    A layer, or a leaf Tensor, that is assigned to an attribute is registered under the attribute's name: a Tensor that stores
    its gradient as a parameter, another as a state.  Full names are the attributes' path joined by dots; the outermost layer adds
    nothing.  `initialize` runs once, before the first forward, on its inputs.
    """

    sep = "."

    _layers: dict[str, Layer]
    _own: dict[str, Tensor]
    _trained: set[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        made.__dict__.update(_layers={}, _own={}, _trained=set(), _parent=None, _key="", _initialized=False, name="")
        return made

    def __init__(self) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "initialize" in cls.__dict__:
            setattr(cls, "initialize", _noted(cls.__dict__["initialize"]))  # noqa: B010
        if "forward" in cls.__dict__:
            setattr(cls, "forward", _readied(cls.__dict__["forward"]))  # noqa: B010

    def initialize(self, *input: Any) -> None:
        """Make the parameters for inputs such as these."""

    def forward(self, *input: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # --- what it consists of

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._layers and self._layers[name] is not value:
            del self._layers[name]
        if name in self._own and self._own[name] is not value:
            del self._own[name]
            self._trained.discard(name)
        object.__setattr__(self, name, value)
        if isinstance(value, Layer):
            self._adopt(name, value)
        elif isinstance(value, Tensor) and _is_leaf(value):
            self._own[name] = value
            if value.stores_grad:
                self._trained.add(name)
            if value.stores_grad or value.name.startswith("Dummy#"):
                value.name = self._path(name)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        self._layers.pop(name, None)
        self._own.pop(name, None)
        self._trained.discard(name)

    def _adopt(self, name: str, layer: Layer) -> None:
        again = layer.__dict__["_parent"] is self and layer.__dict__["_key"] in self._layers
        self._layers[name] = layer
        if not again:
            layer.__dict__.update(_parent=self, _key=name)
            layer._rename()

    def _rename(self) -> None:
        """The names of what is below, after this layer has got a parent."""
        self.__dict__["name"] = self._path()
        for name, t in self._own.items():
            if name in self._trained:
                t.name = self._path(name)
        for layer in self._layers.values():
            if layer.__dict__["_parent"] is self:
                layer._rename()

    def _path(self, *last: str) -> str:
        """The full name of this layer, or of something in it."""
        parts = list(last)
        layer: Any = self
        while layer is not None and layer.__dict__["_parent"] is not None:
            parts.insert(0, layer.__dict__["_key"])
            layer = layer.__dict__["_parent"]
        return self.sep.join(parts)

    def register_layers(self, *args: Any) -> None:
        """Register layers that stand in a list, as `<Class>_<index>`; or those of an OrderedDict, under its keys."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            items: Iterable[tuple[str, Any]] = args[0].items()
        else:
            items = [(f"{type(v).__name__}_{i}", v) for i, v in enumerate(args)]
        for name, value in items:
            if isinstance(value, Layer):
                setattr(self, name, value)

    # --- parameters and states

    def get_params(self) -> dict[str, Tensor]:
        """The parameters by full name, each once; those of layers that have not run yet do not exist."""
        own = {self._path(n): t for n, t in self._own.items() if n in self._trained}
        return self._with_layers(own, lambda layer: layer.get_params())

    def get_states(self) -> dict[str, Tensor]:
        """Parameters and running statistics by full name."""
        own = {self._path(n): t for n, t in self._own.items()}
        return self._with_layers(own, lambda layer: layer.get_states())

    def _with_layers(self, found: dict[str, Tensor], ask: Callable[[Layer], dict[str, Tensor]]) -> dict[str, Tensor]:
        seen = {id(t) for t in found.values()}
        for key, layer in self._layers.items():
            for name, t in ask(layer).items():
                if id(t) not in seen:
                    seen.add(id(t))
                    found[name if name not in found else f"{self._path(key)}{self.sep}{name}"] = t
        return found

    def set_params(self, parameters: Mapping[str, Any]) -> None:
        """Write values, Tensors or arrays, into parameters by name; the others stay as they are.

        Names are those of `get_params`, or relative to this layer.
        Raises InvalidInput for a name that there is not, or another shape: then nothing is changed.
        """
        self._write(self.get_params(), parameters, "parameter")

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Write values, Tensors or arrays, into parameters and running statistics by name, as `set_params` does."""
        self._write(self.get_states(), states, "state")

    def _write(self, mine: dict[str, Tensor], given: Mapping[str, Any], what: str) -> None:
        pairs: list[tuple[Tensor, Any]] = []
        for name, value in given.items():
            t = mine.get(name, mine.get(self._path(name)))
            if t is None:
                have = ", ".join(mine) or "none yet: call the layer, or compile the model, first"
                raise InvalidInput(f"{type(self).__name__} has no {what} {name!r}", code="SX326", hint=f"there are {have}")
            array = value.device.backend.get(value.data) if isinstance(value, Tensor) else np.asarray(value)
            if tuple(array.shape) != tuple(t.shape):
                raise InvalidInput(f"the {what} {name!r} has shape {t.shape}; {tuple(array.shape)} was given", code="SX326")
            pairs.append((t, array))
        for t, array in pairs:
            t.data[...] = t.device.backend.put(array.astype(op.dtype(t)))

    # --- for those who write layers

    def device_check(self, *inputs: Tensor) -> None:
        """Move tensors, in place, to the device of the first."""
        for t in inputs:
            if t.device is not inputs[0].device and t.device.backend != inputs[0].device.backend:
                t._data = inputs[0].device.backend.put(t.device.backend.get(t.data))
                t.device = inputs[0].device

    def dtype_check(self, *inputs: Tensor) -> None:
        """Cast tensors, in place, to the dtype of the first."""
        for t in inputs:
            if op.dtype(t) != op.dtype(inputs[0]):
                t._data = t.data.astype(op.dtype(inputs[0]))

    def _follow(self, x: Tensor) -> None:
        """Parameters live where the inputs do."""
        if any(t.device is not x.device for t in self._own.values()) and trace.current() is None:
            self.device_check(x, *self._own.values())

    def _param(
        self, name: str, shape: Sequence[int], x: Tensor, std: float = 0.0, bound: float = 0.0, value: float = 0.0
    ) -> None:
        """Make a parameter: normal with a deviation, uniform within a bound, or a value; its dtype is that of `x`, or float32."""
        t = _like(x, shape)
        t.stores_grad = t.requires_grad = True
        if not hasattr(t, "gaussian"):  # TODO remove
            generator = np.random.default_rng(len(name) + sum(shape))
            drawn = generator.normal(0, std, t.shape) if std else generator.uniform(-bound, bound, t.shape) if bound else value
            t.data[...] = np.asarray(drawn)
        elif std:
            t.gaussian(0.0, std)
        elif bound:
            t.uniform(-bound, bound)
        else:
            t.data[...] = value
        setattr(self, name, t)

    def _statistic(self, name: str, shape: Sequence[int], x: Tensor, value: float) -> None:
        t = _like(x, shape)
        t.data[...] = value
        setattr(self, name, t)
        t.name = self._path(name)


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    dtype = op.dtype(x)
    return Tensor(tuple(shape), x.device, dtype if dtypes.is_float(dtype) else np.float32, requires_grad=False)


def _is_leaf(t: Tensor) -> bool:
    """Whether a program made this tensor, and no operator."""
    return bool(t.name) and (t._creator is None or isinstance(t._creator, Dummy)) and not t._fixed


def _noted(initialize: Callable[..., None]) -> Callable[..., None]:
    @wraps(initialize)
    def wrapper(self: Layer, *args: Any, **kwargs: Any) -> None:
        if trace.current() is not None:
            raise trace.NotTraceable(f"the layer {self._path() or type(self).__name__} makes its parameters in this step")
        with tape.no_tape():
            initialize(self, *args, **kwargs)
        self.__dict__["_initialized"] = True

    return wrapper


def _readied(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(self: Layer, *args: Any, **kwargs: Any) -> Any:
        if not self._initialized:
            self.initialize(*args, **kwargs) if kwargs else self.initialize(*args)
            self.__dict__["_initialized"] = True
        return forward(self, *args, **kwargs)

    return wrapper


# --- with parameters --------------------------------------------------------------------------------------------------


class Linear(Layer):
    """y = x W + b.  x: (..., in).  W: (in, out) ~ N(0, sqrt(2 / (in + out))).  b: (out,), zeros.

    Linear(out), or as in old programs Linear(in, out[, bias]).
    Raises InvalidInput for inputs that contradict `in`, or the weights.
    """

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
        if not x.shape:
            raise InvalidInput("Linear takes inputs of shape (..., features); it was given a number", code="SX325")
        return x.shape[-1]

    def _check(self, x: Tensor) -> None:
        features = self._features(x)
        if isinstance(features, int) and features != self.in_features:
            what = f"{self._path() or 'Linear'} takes inputs of {self.in_features} features; it was given shape {x.shape}"
            raise InvalidInput(what, code="SX325", hint=f"write Linear({self.out_features}): the number of inputs is inferred")

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        self._follow(x)
        if len(x.shape) == 2:
            return op.Gemm(x, self.W, self.b)  # type: ignore[no-any-return]
        y = op.MatMul(x, self.W)
        return y if self.b is None else op.Add(y, self.b)  # type: ignore[no-any-return]

    W: Tensor


class Gemm(Layer):
    """y = alpha * x' W' + beta * b, where ' transposes as transA and transB say.

    W: (out, in) if transB else (in, out), as Linear's.  b: (1, out), or `bias_shape`, zeros.
    """

    W: Tensor

    def __init__(self, nb_kernels: int, alpha: float = 1.0, beta: float = 1.0, transA: bool = False, transB: bool = True,
                 bias: bool = True, bias_shape: Sequence[int] | None = None) -> None:  # fmt: skip
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
        attributes = {"alpha": self.alpha, "beta": self.beta, "transA": self.transA, "transB": self.transB}
        return op.Gemm(x, self.W, self.b, **attributes)  # type: ignore[no-any-return]


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
        index = op.Cast(x, to=dtypes.onnx_code(np.int64)) if dtypes.is_float(op.dtype(x)) else x
        if op.dtype(index) not in (np.int32, np.int64):
            index = op.Cast(index, to=dtypes.onnx_code(np.int64))
        return op.Gather(self.W, index, axis=0)  # type: ignore[no-any-return]


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

    def __init__(self, nb_kernels: int, kernel_size: Pair, *args: Any, stride: Pair = 1, padding: Any = 0, dilation: Pair = 1,
                 group: int = 1, bias: bool = True, pad_mode: str = "NOTSET", activation: str = "NOTSET",
                 **kwargs: Any) -> None:  # fmt: skip
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
        channels = _images(self, x)[1]
        if isinstance(channels, int) and channels != self.W.shape[1] * self.group:
            what = f"{self._path() or 'Conv2d'} takes {self.W.shape[1] * self.group} channels; it was given shape {x.shape}"
            raise InvalidInput(what, code="SX325")
        self._follow(x)
        y = op.Conv(
            x, self.W, self.b, kernel_shape=list(self.kernel_size), strides=list(self.stride), dilations=list(self.dilation),
            group=self.group, **self.attributes,
        )  # fmt: skip
        return op.Relu(y) if self.activation == "RELU" else y  # type: ignore[no-any-return]


def _images(layer: Layer, x: Tensor) -> tuple[Any, ...]:
    shape = x.shape
    if len(shape) != 4:
        what = f"{layer._path() or type(layer).__name__} takes inputs of shape (N, channels, height, width); it was given {shape}"
        raise InvalidInput(what, code="SX325")
    return shape


class SeparableConv2d(Layer):
    """A convolution of each channel alone (`depthwise_conv`), then one of 1 x 1 (`point_conv`)."""

    depthwise_conv: Conv2d

    def __init__(self, nb_kernels: int, kernel_size: Pair, *args: Any, stride: Pair = 1, padding: Any = 0,
                 bias: bool = False) -> None:  # fmt: skip
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
        return self.point_conv(self.depthwise_conv(x))  # type: ignore[no-any-return]


class BatchNorm2d(Layer):
    """Batch normalization of (N, C, ...): in training by the batch, else by the running statistics.

    y = scale * (x - mean) / sqrt(variance + 1e-5) + bias, with the population variance.  In training, running statistics become
    (1 - momentum) * running + momentum * batch, with the unbiased variance; nothing is updated else.
    BatchNorm2d(), or as in old programs BatchNorm2d(channels[, momentum]).  scale, bias, running_mean, running_var: (C,).
    """

    scale: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    epsilon = 1e-5

    def __init__(self, *args: Any, momentum: float = 0.9) -> None:
        super().__init__()
        if len(args) > 2:
            raise TypeError(f"BatchNorm2d takes (channels, momentum), not {len(args)} arguments")
        self.momentum = float(args[1]) if len(args) > 1 else momentum

    def initialize(self, x: Tensor) -> None:
        if len(x.shape) < 2:
            raise InvalidInput(f"BatchNorm2d takes inputs of shape (N, channels, ...); it was given {x.shape}", code="SX325")
        self.channels = int(x.shape[1])
        self._param("scale", (self.channels,), x, value=1.0)
        self._param("bias", (self.channels,), x)
        self._statistic("running_mean", (self.channels,), x, 0.0)
        self._statistic("running_var", (self.channels,), x, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if len(x.shape) < 2 or (isinstance(x.shape[1], int) and x.shape[1] != self.scale.shape[0]):
            what = f"{self._path() or 'BatchNorm2d'} takes {self.scale.shape[0]} channels; it was given shape {x.shape}"
            raise InvalidInput(what, code="SX325")
        self._follow(x)
        values = (x, self.scale, self.bias, self.running_mean, self.running_var)
        if not tape.training:
            return op.BatchNormalization(*values, epsilon=self.epsilon)  # type: ignore[no-any-return]
        y, mean, variance = op.BatchNormalization(*values, epsilon=self.epsilon, momentum=0.0, training_mode=1, outputs=3)
        with tape.no_tape():
            n = op.cast(op.Div(op.Size(x), op.Size(mean)), mean)
            unbiased = op.Mul(variance, op.Div(n, op.Max(op.Sub(n, 1), 1)))
            for running, batch in ((self.running_mean, mean), (self.running_var, unbiased)):
                new = op.Add(op.Mul(running, 1 - self.momentum), op.Mul(batch, self.momentum))
                trace.assign(running, op.cast(new, running).raw)
        return y  # type: ignore[no-any-return]


# --- pooling ----------------------------------------------------------------------------------------------------------


class Pooling2d(Layer):
    """The greatest, or the mean, of each window of (N, C, height, width); the mean leaves padding out.

    stride: as the kernel where None.  padding and pad_mode: as Conv2d's.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Any = 0, is_max: bool = True,
                 pad_mode: str = "NOTSET") -> None:  # fmt: skip
        super().__init__()
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.stride = self.kernel_size if stride is None else _pair("stride", stride)
        self.padding, self.is_max, self.pad_mode = padding, is_max, pad_mode
        self.attributes = _window(padding, pad_mode)

    def forward(self, x: Tensor) -> Tensor:
        _images(self, x)
        return self._pool(x, list(self.kernel_size), list(self.stride), self.attributes)

    def _pool(self, x: Tensor, kernel: list[int], strides: list[int], window: dict[str, Any]) -> Tensor:
        pool = op.MaxPool if self.is_max else op.AveragePool
        return pool(x, kernel_shape=kernel, strides=strides, **window)  # type: ignore[no-any-return]


class MaxPool2d(Pooling2d):
    """The greatest value of each window; see Pooling2d."""

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Any = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode)


class AvgPool2d(Pooling2d):
    """The mean of each window without its padding; see Pooling2d."""

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Any = 0, pad_mode: str = "NOTSET") -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode)


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


# --- recurrent --------------------------------------------------------------------------------------------------------


class RNN_Base(Layer):
    """What recurrent layers share: `num_layers` layers, the last one's outputs, both directions side by side.

    xs: a list of Tensors (N, input), one for each time; or a Tensor (time, N, input), with `batch_first` (N, time, input).
    Initial states: (N, hidden), or (num_layers * directions, N, hidden); zeros where None; the last ones come back likewise.
    Outputs: a list of Tensors (N, directions * hidden), or one Tensor as the input was.
    Parameters of further layers and of the backward direction end in `_l1`, `_reverse`, `_l1_reverse`.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, bias: bool, batch_first: bool, dropout: float,
                 bidirectional: bool) -> None:  # fmt: skip
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def step_forward(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no step_forward")

    def _suffixes(self) -> list[list[str]]:
        """The ends of the parameters' names, for each layer and direction."""
        ends = ["", "_reverse"][: self.directions]
        return [[(f"_l{i}" if i else "") + end for end in ends] for i in range(self.num_layers)]

    def _inputs(self, layer: int) -> int:
        return self.input_size if layer == 0 else self.hidden_size * self.directions

    def _joined(self, xs: Any) -> Tensor:
        """The inputs as (time, N, input)."""
        if not isinstance(xs, Tensor):
            if not xs:
                raise InvalidInput(f"{type(self).__name__} was given a sequence of no inputs", code="SX325")
            joined = op.Concat(*(op.Unsqueeze(x, [0]) for x in xs), axis=0)
        else:
            joined = op.Transpose(xs, perm=[1, 0, 2]) if self.batch_first else xs
        if isinstance(joined.shape[-1], int) and joined.shape[-1] != self.input_size:
            what = f"{self._path() or type(self).__name__} takes inputs of {self.input_size} features, not {joined.shape[-1]}"
            raise InvalidInput(what, code="SX325")
        return joined  # type: ignore[no-any-return]

    def _given_back(self, y: Tensor, xs: Any) -> Any:
        if isinstance(xs, Tensor):
            return op.Transpose(y, perm=[1, 0, 2]) if self.batch_first else y
        n = len(xs)
        parts = op.Split(y, axis=0, num_outputs=n, outputs=n)
        return [op.Squeeze(p, [0]) for p in (parts if n > 1 else [parts])]

    def _stacked(self, x: Tensor, states: Sequence[Tensor | None],
                 run: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run the layers: `run(layer, x, *states)` gives outputs (time, directions, N, hidden) and the last states."""
        flat = all(s is None or len(s.shape) == 2 for s in states) and self.num_layers * self.directions == 1
        wide = [None if s is None else op.Unsqueeze(s, [0]) if len(s.shape) == 2 else s for s in states]
        last: list[list[Tensor]] = [[] for _ in states]
        d = self.directions
        for i in range(self.num_layers):
            if i and self.dropout:
                x = autograd.dropout(x, ratio=self.dropout)
            here = [s if s is None or self.num_layers == 1 else op.Slice(s, [i * d], [(i + 1) * d], [0]) for s in wide]
            y, *ends = run(i, x, *here)
            for group, end in zip(last, ends, strict=True):
                group.append(end)
            x = op.Squeeze(y, [1]) if d == 1 else op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, d * self.hidden_size])
        joined = [g[0] if len(g) == 1 else op.Concat(*g, axis=0) for g in last]
        return x, [op.Squeeze(s, [0]) if flat else s for s in joined]

    def _common(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden_size, "direction": "bidirectional" if self.bidirectional else "forward"}


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """What the directions have, along a new first axis."""
    wide = [op.Unsqueeze(p, [0]) for p in parts]
    return wide[0] if len(wide) == 1 else op.Concat(*wide, axis=0)  # type: ignore[no-any-return]


class RNN(RNN_Base):
    """h = f(x Wx + h Wh + b), f = tanh or relu.  forward(xs, h0) gives (outputs, h).

    Wx: (input, hidden), Wh: (hidden, hidden) ~ N(0, 1).  b: (hidden,), zeros.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
                 batch_first: bool = False, dropout: float = 0, bidirectional: bool = False) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity is 'tanh' or 'relu', not {nonlinearity!r}")
        self.nonlinearity = nonlinearity

    def initialize(self, xs: Any, h0: Any = None) -> None:
        x = xs if isinstance(xs, Tensor) else xs[0]
        for i, ends in enumerate(self._suffixes()):
            for end in ends:
                self._param(f"Wx{end}", (self._inputs(i), self.hidden_size), x, std=1.0)
                self._param(f"Wh{end}", (self.hidden_size, self.hidden_size), x, std=1.0)
                if self.bias:
                    self._param(f"b{end}", (self.hidden_size,), x)

    def forward(self, xs: Any, h0: Tensor | None = None) -> tuple[Any, Tensor]:
        x = self._joined(xs)
        self._follow(x)
        y, (h,) = self._stacked(x, [h0], self._layer)
        return self._given_back(y, xs), h

    def _layer(self, i: int, x: Tensor, h: Tensor | None) -> tuple[Tensor, ...]:
        ends = self._suffixes()[i]
        w, r = (_beside([op.Transpose(getattr(self, kind + end), perm=[1, 0]) for end in ends]) for kind in ("Wx", "Wh"))
        b = None
        if self.bias:
            ones = [getattr(self, f"b{end}") for end in ends]
            b = _beside([op.Concat(v, op.full_like(v, 0), axis=0) for v in ones])
        activations = [self.nonlinearity.capitalize()] * self.directions
        return op.RNN(x, w, r, b, None, h, outputs=2, activations=activations, **self._common())  # type: ignore[no-any-return]

    def step_forward(self, x: Tensor, h: Tensor, Wx: Tensor, Wh: Tensor, b: Tensor | None) -> Tensor:
        """One time step."""
        y = op.Add(op.MatMul(h, Wh), op.MatMul(x, Wx))
        y = y if b is None else op.Add(y, b)
        return op.Tanh(y) if self.nonlinearity == "tanh" else op.Relu(y)  # type: ignore[no-any-return]


class LSTM(RNN_Base):
    """c = f * c + i * g, h = o * tanh(c), with gates i, f, o = sigmoid and g = tanh of x Wx + Bx + h Wh + Bh.

    forward(xs, (h0, c0)) gives (outputs, h, c).  Wx_*: (input, hidden), Wh_*: (hidden, hidden) ~ N(0, 0.01).
    Bx_*, Bh_*: (hidden,), zeros; each for i, f, o, g.
    """

    def __init__(self, input_size: int, hidden_size: int, nonlinearity: str = "tanh", num_layers: int = 1, bias: bool = True,
                 batch_first: bool = False, dropout: float = 0, bidirectional: bool = False) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        if nonlinearity != "tanh":
            raise ValueError(f"an LSTM's nonlinearity is 'tanh', not {nonlinearity!r}")
        self.nonlinearity = nonlinearity

    def initialize(self, xs: Any, h0_c0: Any = None) -> None:
        x = xs if isinstance(xs, Tensor) else xs[0]
        for i, ends in enumerate(self._suffixes()):
            for end in ends:
                for gate in "ifog":
                    self._param(f"Wx_{gate}{end}", (self._inputs(i), self.hidden_size), x, std=0.01)
                for gate in "ifog":
                    self._param(f"Wh_{gate}{end}", (self.hidden_size, self.hidden_size), x, std=0.01)
                for kind in ("Bx", "Bh") if self.bias else ():
                    for gate in "ifog":
                        self._param(f"{kind}_{gate}{end}", (self.hidden_size,), x)

    def forward(self, xs: Any, h0_c0: Any = None) -> tuple[Any, Tensor, Tensor]:
        h0, c0 = h0_c0 or (None, None)
        x = self._joined(xs)
        self._follow(x)
        y, (h, c) = self._stacked(x, [h0, c0], self._layer)
        return self._given_back(y, xs), h, c

    def _layer(self, i: int, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, ...]:
        ends = self._suffixes()[i]

        def gates(kind: str, end: str) -> Tensor:
            return op.Concat(*(getattr(self, f"{kind}_{gate}{end}") for gate in "iofg"), axis=-1)  # type: ignore[no-any-return]

        w, r = (_beside([op.Transpose(gates(kind, end), perm=[1, 0]) for end in ends]) for kind in ("Wx", "Wh"))
        b = _beside([op.Concat(gates("Bx", end), gates("Bh", end), axis=0) for end in ends]) if self.bias else None
        return op.LSTM(x, w, r, b, None, h, c, outputs=3, **self._common())  # type: ignore[no-any-return]

    def step_forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """One time step of the first layer."""
        made = {}
        for gate in "ifog":
            y = op.Add(op.MatMul(x, getattr(self, f"Wx_{gate}")), op.MatMul(h, getattr(self, f"Wh_{gate}")))
            if self.bias:
                y = op.Add(y, op.Add(getattr(self, f"Bx_{gate}"), getattr(self, f"Bh_{gate}")))
            made[gate] = op.Tanh(y) if gate == "g" else op.Sigmoid(y)
        c = op.Add(op.Mul(made["f"], c), op.Mul(made["i"], made["g"]))
        return op.Mul(made["o"], op.Tanh(c)), c


_MODES = {"vanilla": ("RNN", "r"), "tanh": ("RNN", "r"), "relu": ("RNN", "r"), "lstm": ("LSTM", "ifgo"), "gru": ("GRU", "rzn")}
"""The operator of each mode, and its gates in the order of the packed weights."""

_ORDER = {"RNN": "r", "LSTM": "iofg", "GRU": "zrn"}
"""The gates in ONNX's order."""


class CudnnRNN(RNN_Base):
    """Recurrent layers with all weights in one vector W ~ U(+-sqrt(1 / hidden)), packed as cuDNN packs them; on every device.

    x: (N, time, input) with `batch_first`, else (time, N, input).  rnn_mode: "vanilla" or "tanh", "relu", "lstm", "gru".
    forward(x, hx, cx, seq_lengths): hx, cx: (num_layers * directions, N, hidden).  With use_mask, seq_lengths is a Tensor (N,):
    outputs behind a sequence's end are 0.  y: all outputs, or with return_sequences=False the last one of each sequence.
    W holds, for each layer and direction, the input weights of all gates and the recurrent ones; then likewise their biases.
    """

    W: Tensor

    def __init__(self, hidden_size: int, activation: str = "tanh", num_layers: int = 1, bias: bool = True,
                 batch_first: bool = True, dropout: float = 0, bidirectional: bool = False, rnn_mode: str = "lstm",
                 use_mask: bool = False, return_sequences: bool = True) -> None:  # fmt: skip
        super().__init__(0, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        if rnn_mode not in _MODES:
            raise ValueError(f"rnn_mode is one of {', '.join(_MODES)}, not {rnn_mode!r}")
        self.activation, self.rnn_mode = activation, rnn_mode
        self.use_mask, self.return_sequences = use_mask, return_sequences

    def initialize(self, x: Tensor, hx: Any = None, cx: Any = None, seq_lengths: Any = None) -> None:
        self.input_size = int(x.shape[2])
        bound = math.sqrt(1.0 / self.hidden_size)
        self._param("W", (sum(rows * columns for rows, columns in self._pieces()),), x, bound=bound)

    def _pieces(self) -> list[tuple[int, int]]:
        """The shapes of the matrices in W in order, and then of the biases (as one column)."""
        rows, d = len(_MODES[self.rnn_mode][1]) * self.hidden_size, self.directions
        matrices = [(rows, n) for i in range(self.num_layers) for _ in range(d) for n in (self._inputs(i), self.hidden_size)]
        return matrices + ([(rows, 1)] * (2 * self.num_layers * d) if self.bias else [])

    def _unpacked(self) -> list[Tensor]:
        """The matrices and biases out of W, their gates in ONNX's order."""
        name, order = _MODES[self.rnn_mode]
        wanted = [order.index(gate) for gate in _ORDER[name]]
        found, begin = [], 0
        for rows, columns in self._pieces():
            piece = op.Slice(self.W, [begin], [begin + rows * columns], [0])
            begin += rows * columns
            matrix = op.Reshape(piece, [len(order), self.hidden_size, columns])
            found.append(op.Reshape(op.Gather(matrix, wanted, axis=0), [rows, columns]))
        return found

    def forward(self, x: Tensor, hx: Tensor | None = None, cx: Tensor | None = None,
                seq_lengths: Tensor | None = None) -> Tensor:  # fmt: skip
        if self.use_mask and seq_lengths is None:
            raise InvalidInput("with use_mask, seq_lengths is a Tensor of each sequence's length", code="SX325")
        self._follow(x)
        lengths = op.Cast(seq_lengths, to=dtypes.onnx_code(np.int32)) if self.use_mask else None
        pieces = self._unpacked()
        name, d = _MODES[self.rnn_mode][0], self.directions
        biases = pieces[2 * self.num_layers * d :]

        def run(i: int, x: Tensor, *states: Tensor | None) -> tuple[Tensor, ...]:
            here = range(2 * d * i, 2 * d * (i + 1), 2)
            w, r = _beside([pieces[k] for k in here]), _beside([pieces[k + 1] for k in here])
            b = None
            if self.bias:
                b = _beside([op.Squeeze(op.Concat(biases[k], biases[k + 1], axis=0), [1]) for k in here])
            more: dict[str, Any] = {}
            if name == "GRU":
                more["linear_before_reset"] = 1
            if self.rnn_mode == "relu":
                more["activations"] = ["Relu"] * d
            call = getattr(op, name)
            return call(x, w, r, b, lengths, *states, outputs=1 + len(states), **self._common(), **more)  # type: ignore[no-any-return]

        y, _ = self._stacked(self._joined(x), [hx, cx] if name == "LSTM" else [hx], run)
        if self.return_sequences:
            return op.Transpose(y, perm=[1, 0, 2]) if self.batch_first else y  # type: ignore[no-any-return]
        if lengths is None:
            return op.Gather(y, -1, axis=0)  # type: ignore[no-any-return]
        last = op.Unsqueeze(op.Sub(op.Cast(lengths, to=dtypes.onnx_code(np.int64)), 1), [1])
        return op.GatherND(op.Transpose(y, perm=[1, 0, 2]), last, batch_dims=1)  # type: ignore[no-any-return]


# --- without parameters -----------------------------------------------------------------------------------------------


class ReLU(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return op.Relu(x)  # type: ignore[no-any-return]


class Sigmoid(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return op.Sigmoid(x)  # type: ignore[no-any-return]


class Add(Layer):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return op.Add(a, b)  # type: ignore[no-any-return]


class Flatten(Layer):
    """(N, ...) to (N, product): two axes, divided at `axis`."""

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return op.Flatten(x, axis=self.axis)  # type: ignore[no-any-return]


class SoftMax(Layer):
    """Along the axes from 1 on, taken as one."""

    def forward(self, x: Tensor) -> Tensor:
        return autograd.softmax(x)


class SoftMaxCrossEntropy(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return autograd.softmax_cross_entropy(x, t)


class MeanSquareError(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return autograd.mse_loss(x, t)


class CrossEntropy(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return autograd.cross_entropy(x, t)


class BinaryCrossEntropy(Layer):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return autograd.binary_cross_entropy(x, t)


class Dropout(Layer):
    """In training, zeros in the share `ratio` of the places, and the others divided by 1 - ratio; else the input."""

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:
        return autograd.dropout(x, ratio=self.ratio)


class Cat(Layer):
    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        return op.Concat(*xs, axis=self.axis)  # type: ignore[no-any-return]


class Reshape(Layer):
    """To a shape in which 0 keeps a size and -1 stands for what is left."""

    def forward(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return op.Reshape(x, list(shape))  # type: ignore[no-any-return]


__all__ = [
    "LSTM", "RNN", "Add", "AvgPool1d", "AvgPool2d", "BatchNorm2d", "BinaryCrossEntropy", "Cat", "Conv2d", "CrossEntropy",
    "CudnnRNN", "Device", "Dropout", "Embedding", "Flatten", "Gemm", "Layer", "Linear", "MaxPool1d", "MaxPool2d",
    "MeanSquareError", "OrderedDict", "Pooling2d", "RNN_Base", "ReLU", "Reshape", "SeparableConv2d", "Sigmoid", "SoftMax",
    "SoftMaxCrossEntropy", "Tensor",
]  # fmt: skip
