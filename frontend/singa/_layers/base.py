"""The base class of layers: what is assigned to it is registered, and has a name by its path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import random, tape, trace
from .._core.tape import Dummy
from .._core.tensor import Tensor, op


class Layer:
    """The base class of layers: write `forward(*inputs)`, and `initialize(*inputs)` where there are parameters to make.

    A layer, or a leaf Tensor, that is assigned to an attribute is registered under the attribute's name: a Tensor that stores
    its gradient as a parameter, another as a state.  Full names are the attributes' path joined by dots; the outermost layer adds
    nothing.  `initialize` runs once, before the first forward, on its inputs; what has been assigned by then, it keeps:
    `conv.W = Tensor(data=array, stores_grad=True)` is how weights from elsewhere come in, and how two layers share one.
    """

    sep = "."

    _layers: dict[str, Layer]
    _own: dict[str, Tensor]
    _trained: set[str]
    _initialized: bool

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A layer that shares nothing with this one: weights that are tied are tied in the copy, names and states stay.

        Of a layer within a model that layer alone is copied, without the model; its parameters keep their full names until
        it is assigned to a layer.
        """
        made = object.__new__(type(self))
        memo[id(self)] = made
        parent = self.__dict__["_parent"]
        whole = parent is None or id(parent) in memo
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo) if whole or name != "_parent" else None
        if not whole:
            made.__dict__["_key"] = self._path()
        return made

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
        while layer is not None:
            parts[:0] = [layer.__dict__["_key"]] * bool(layer.__dict__["_key"])
            layer = layer.__dict__["_parent"]
        return Layer.sep.join(parts)

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
                    found[name if name not in found else f"{self._path(key)}{Layer.sep}{name}"] = t
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
                hint = f"there are {', '.join(mine) or 'none'}; layers make theirs when they first run: compile the model first"
                raise InvalidInput(f"{type(self).__name__} has no {what} {name!r}", code="SX326", hint=hint)
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
        if self._given(name, shape):
            return
        t = _like(x, shape)
        t.stores_grad = t.requires_grad = True
        if std:
            trace.assign(t, random.normal(0.0, std, t.shape, t.device, op.dtype(t)).raw)
        elif bound:
            drawn = random.uniform(t.shape, t.device, op.dtype(t))
            trace.assign(t, op.Mul(op.Sub(drawn, 0.5), 2 * bound).raw)
        else:
            t.data[...] = value
        setattr(self, name, t)

    def _given(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the program has assigned this tensor before the first forward; raises InvalidInput for another shape."""
        if self._initialized or name not in self._own:
            return False
        if tuple(self._own[name].shape) != tuple(shape):
            what = f"{self._path(name)} was given shape {self._own[name].shape}; the inputs ask for {tuple(shape)}"
            raise InvalidInput(what, code="SX326")
        return True

    def _statistic(self, name: str, shape: Sequence[int], x: Tensor, value: float) -> None:
        if self._given(name, shape):
            return
        t = _like(x, shape)
        t.data[...] = value
        setattr(self, name, t)
        t.name = self._path(name)


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    dtype = op.dtype(x)
    return Tensor(tuple(shape), x.device, dtype if dtypes.is_float(dtype) else np.float32, requires_grad=False)


def _is_leaf(t: Tensor) -> bool:
    """Whether a program made this tensor, and no operator."""
    return bool(t.name) and (t._creator is None or isinstance(t._creator, Dummy)) and not t._is_constant


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
            if type(self).initialize is not Layer.initialize:
                self.initialize(*args, **kwargs)
            self.__dict__["_initialized"] = True
        return forward(self, *args, **kwargs)

    return wrapper
