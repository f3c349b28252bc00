"""The base class of layers: attributes that are layers or tensors are registered, and named by their path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.passes.change_dtype import fitted

from .._core import random, tape, trace
from .._core.conversions import values_for
from .._core.tape import Dummy
from .._core.tensor import Tensor, op
from .._core.variable import linked
from ..device import Device


class Layer:
    """The base class of layers: a subclass defines `forward(*inputs)`, and `initialize(*inputs)` if it has parameters.

    A layer or a leaf Tensor that is assigned to an attribute is registered under the attribute's name: a Tensor that stores its
    gradient as a parameter, another one as a state. A full name is the attributes' path joined by dots; the outermost layer adds
    nothing. `initialize` runs once, before the first `forward`, on the same inputs. It keeps tensors assigned before:
    `conv.W = Tensor(data=array, stores_grad=True)` loads existing weights, or shares those of another layer.
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
            setattr(cls, "initialize", _marks_initialized(cls.__dict__["initialize"]))  # noqa: B010
        if "forward" in cls.__dict__:
            setattr(cls, "forward", _initializes_first(cls.__dict__["forward"]))  # noqa: B010

    def initialize(self, *input: Any) -> None:
        """Create the parameters; called once, before the first `forward`. The default does nothing.

        Args:
            *input: The inputs of the first call, which determine shapes and dtypes.
        """

    def forward(self, *input: Any) -> Any:
        """Compute the outputs; defined by subclasses. Calling the layer calls `forward`.

        Args:
            *input: The inputs.

        Returns:
            The outputs.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A layer that shares nothing with this one; tied weights stay tied in the copy, and names and states are kept.

        If the layer is part of a model, only that layer is copied, without the model; its parameters keep their full names until
        it is assigned to a layer.
        """
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        parent = self.__dict__["_parent"]
        whole = parent is None or id(parent) in memo
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo) if whole or name != "_parent" else None
        if not whole:
            copied.__dict__["_key"] = self._path()
        return copied

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        copied.__dict__.update(self._copied_fields())
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: tensors of a model from a file are found in that model."""
        return {name: linked(value) for name, value in self._copied_fields().items()}

    def _copied_fields(self) -> dict[str, Any]:
        """The attributes that copies and pickles have."""
        return self.__dict__

    # --- registration

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._layers and self._layers[name] is not value:
            del self._layers[name]
        if name in self._own and self._own[name] is not value:
            del self._own[name]
            self._trained.discard(name)
        object.__setattr__(self, name, value)
        if isinstance(value, Layer):
            self._register(name, value)
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

    def _register(self, name: str, layer: Layer) -> None:
        again = layer.__dict__["_parent"] is self and layer.__dict__["_key"] in self._layers
        self._layers[name] = layer
        if not again:
            layer.__dict__.update(_parent=self, _key=name)
            layer._rename()

    def _rename(self) -> None:
        """Update the names in this layer after it was assigned to a parent."""
        self.__dict__["name"] = self._path()
        for name, t in self._own.items():
            if name in self._trained:
                t.name = self._path(name)
        for layer in self._layers.values():
            if layer.__dict__["_parent"] is self:
                layer._rename()

    def _path(self, *last: str) -> str:
        """The full name of this layer, or of a member of it."""
        parts = list(last)
        layer: Any = self
        while layer is not None:
            parts[:0] = [layer.__dict__["_key"]] * bool(layer.__dict__["_key"])
            layer = layer.__dict__["_parent"]
        return Layer.sep.join(parts)

    def register_layers(self, *args: Any) -> None:
        """Register layers that are not attributes, such as those of a list.

        Args:
            *args: Layers, which are named `<Class>_<index>`; or one mapping from name to layer, such as an OrderedDict.
        """
        if len(args) == 1 and isinstance(args[0], Mapping):
            items: Iterable[tuple[str, Any]] = args[0].items()
        else:
            items = [(f"{type(v).__name__}_{i}", v) for i, v in enumerate(args)]
        for name, value in items:
            if isinstance(value, Layer):
                setattr(self, name, value)

    # --- parameters and states

    def get_params(self) -> dict[str, Tensor]:
        """Collect the parameters of this layer and the layers in it.

        Returns:
            Parameters by full name, each tensor once. Layers that have not run yet have no parameters.
        """
        own = {self._path(n): t for n, t in self._own.items() if n in self._trained}
        return self._with_layers(own, lambda layer: layer.get_params())

    def get_states(self) -> dict[str, Tensor]:
        """Collect the parameters and the running statistics of this layer and the layers in it.

        Returns:
            Tensors by full name, each once.
        """
        own = {self._path(n): t for n, t in self._own.items()}
        return self._with_layers(own, lambda layer: layer.get_states())

    def _with_layers(self, found: dict[str, Tensor], ask: Callable[[Layer], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Add the tensors that `ask` returns for each layer in this one, each tensor once, under distinct names."""
        seen = {id(t) for t in found.values()}
        for key, layer in self._layers.items():
            for name, t in ask(layer).items():
                if id(t) not in seen:
                    seen.add(id(t))
                    found[name if name not in found else f"{self._path(key)}{Layer.sep}{name}"] = t
        return found

    def parameters(self) -> list[Tensor]:
        """Collect the parameters without their names.

        Returns:
            The values of `get_params`.
        """
        return list(self.get_params().values())

    def state_dict(self) -> dict[str, Tensor]:
        """Collect the states by name; another name of `get_states`.

        Returns:
            Tensors by full name, each once. They change with the layer: copy the values to keep them.
        """
        return self.get_states()

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Write values into all parameters and running statistics, in place.

        Args:
            states: Tensors or arrays by name, as `state_dict` returns them, one for each state.

        Raises:
            InvalidInput: If a state is missing, a name does not exist or a shape differs; then nothing is changed (SX326).
        """
        mine = self.get_states()
        missing = [n for n in mine if n not in states]
        if missing:
            what = f"the states must have a value for each state of {type(self).__name__}, got none for {', '.join(missing)}"
            raise InvalidInput(what, code="SX326", hint="set_states writes some of the states")
        self.set_states(states)

    def set_params(self, parameters: Mapping[str, Any]) -> None:
        """Write values into parameters, in place; other parameters are unchanged.

        Args:
            parameters: Tensors or arrays by name; names are those of `get_params`, or relative to this layer.

        Raises:
            InvalidInput: If a name does not exist, a shape differs (SX326), or a value is not an array; then nothing is changed.
        """
        self._write(self.get_params(), parameters, "parameter")

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Write values into parameters and running statistics, in place; others are unchanged.

        Args:
            states: Tensors or arrays by name; names are those of `get_states`, or relative to this layer.

        Raises:
            InvalidInput: If a name does not exist or a shape differs; then nothing is changed (SX326).
        """
        self._write(self.get_states(), states, "state")

    def _write(self, mine: dict[str, Tensor], given: Mapping[str, Any], what: str) -> None:
        """Write given values into tensors of these names, all or none."""
        pairs: list[tuple[Tensor, Any]] = []
        for name, value in given.items():
            t = mine.get(name, mine.get(self._path(name)))
            if t is None:
                hint = f"it has {', '.join(mine) or 'none'}; layers create theirs when they first run: compile the model first"
                raise InvalidInput(f"{type(self).__name__} has no {what} {name!r}", code="SX326", hint=hint)
            value = value if isinstance(value, Tensor) else values_for(op.dtype(t), value)
            if tuple(value.shape) != tuple(t.shape):
                raise InvalidInput(f"the {what} {name!r} must have shape {t.shape}, got {tuple(value.shape)}", code="SX326")
            pairs.append((t, value))
        for t, value in pairs:
            t.copy_from(value)

    def _moved(self, dtype: np.dtype[Any] | None, device: Device | None, seen: set[int]) -> list[Callable[[], None]]:
        """Compute the states in another dtype or on another device; the calls that are returned set them.

        Args:
            dtype: The dtype of floats; None for their own.
            device: The device; None for their own.
            seen: The ids of tensors and layers that are done.

        Raises:
            InvalidInput: A value does not fit in the dtype (SX388).
        """
        seen.add(id(self))
        calls: list[Callable[[], None]] = []
        for name, t in self._own.items():
            if id(t) not in seen and t._member is None:  # a member is changed with the model that it is of
                seen.add(id(t))
                calls.append(_move_of(self._path(name), t, dtype, device))
        for layer in self._layers.values():
            if id(layer) not in seen:
                calls += layer._moved(dtype, device, seen)
        return calls

    # --- for authors of layers

    def device_check(self, *inputs: Tensor) -> None:
        """Move tensors, in place, to the device of the first.

        Args:
            *inputs: The tensors.
        """
        for t in inputs:
            if t.device is not inputs[0].device and t.device.backend != inputs[0].device.backend:
                t._data = inputs[0].device.backend.put(t.device.backend.get(t.data))
                t.device = inputs[0].device

    def dtype_check(self, *inputs: Tensor) -> None:
        """Cast tensors, in place, to the dtype of the first.

        Args:
            *inputs: The tensors.
        """
        for t in inputs:
            if op.dtype(t) != op.dtype(inputs[0]):
                t._data = t.device.backend.cast(t.data, op.dtype(inputs[0]))

    def _follow(self, x: Tensor) -> None:
        """Move the parameters to the device of the inputs."""
        if any(t.device is not x.device for t in self._own.values()) and trace.current() is None:
            self.device_check(x, *self._own.values())

    def _param(
        self, name: str, shape: Sequence[int], x: Tensor, std: float = 0.0, bound: float = 0.0, value: float = 0.0
    ) -> None:
        """Create a parameter: N(0, std), U(-bound, bound) or a value, in the dtype of `x`, or float32 if that is not floating."""
        if self._is_assigned(name, shape):
            return
        t = _like(x, shape)
        t.stores_grad = t.requires_grad = True
        if std:
            trace.assign(t, random.normal(0.0, std, t.shape, t.device, op.dtype(t)).raw)
        elif bound:
            drawn = random.uniform(t.shape, t.device, op.dtype(t))
            trace.assign(t, op.Mul(op.Sub(drawn, 0.5), 2 * bound).raw)
        else:
            t.device.backend.write(t.data, value)
        setattr(self, name, t)

    def _is_assigned(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the program assigned this tensor before the first forward; raises InvalidInput for another shape."""
        if self._initialized or name not in self._own:
            return False
        if tuple(self._own[name].shape) != tuple(shape):
            what = f"{self._path(name)} must have shape {tuple(shape)} for these inputs, got {self._own[name].shape}"
            raise InvalidInput(what, code="SX326")
        return True

    def _statistic(self, name: str, shape: Sequence[int], x: Tensor, value: float) -> None:
        """Create a state without a gradient, such as a running mean; the dtype is chosen as in `_param`."""
        if self._is_assigned(name, shape):
            return
        t = _like(x, shape)
        t.device.backend.write(t.data, value)
        setattr(self, name, t)
        t.name = self._path(name)


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor on the device of x, in its dtype, or in float32 if that is not floating."""
    dtype = op.dtype(x)
    return Tensor(tuple(shape), x.device, dtype if dtypes.is_float(dtype) else np.float32, requires_grad=False)


def _move_of(name: str, t: Tensor, dtype: np.dtype[Any] | None, device: Device | None) -> Callable[[], None]:
    """The call that sets a tensor to its values in another dtype and on another device."""
    array, place = t.device.backend.get(t.data), device or t.device
    if dtype is not None and dtypes.is_float(array.dtype):
        array = fitted(array, dtype, f"the state {name!r}")

    def move() -> None:
        t.device = place
        t.data = place.backend.put(array)

    return move


def _is_leaf(t: Tensor) -> bool:
    """Whether the tensor was created by the program, not by an operator."""
    return bool(t.name) and (t._creator is None or isinstance(t._creator, Dummy)) and not t._is_constant


def _marks_initialized(initialize: Callable[..., None]) -> Callable[..., None]:
    """An `initialize` off the tape that marks its layer as initialized; refused while a step is recorded."""

    @wraps(initialize)
    def wrapper(self: Layer, *args: Any, **kwargs: Any) -> None:
        if trace.current() is not None:
            raise trace.NotTraceable(f"the layer {self._path() or type(self).__name__} creates its parameters in this step")
        with tape.no_tape():
            initialize(self, *args, **kwargs)
        self.__dict__["_initialized"] = True

    return wrapper


def _initializes_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A `forward` that calls `initialize` before the first call."""

    @wraps(forward)
    def wrapper(self: Layer, *args: Any, **kwargs: Any) -> Any:
        if not self._initialized:
            if type(self).initialize is not Layer.initialize:
                self.initialize(*args, **kwargs)
            self.__dict__["_initialized"] = True
        return forward(self, *args, **kwargs)

    return wrapper
