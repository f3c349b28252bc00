"""The fields of a tensor. Modules below `tensor.py` create and read tensors through these only; `tensor.py` adds the methods."""

from __future__ import annotations

import copy
import operator
import threading
import weakref
from typing import Any, Self, TypeVar

from singa_backend.errors import InvalidInput

from ..device import Device
from .provenance import Link

V = TypeVar("V", bound="type[Variable]")


class Counter(threading.local):
    """Numbers for names: every thread counts from 0, so that its names do not depend on other threads."""

    _count = 0

    def next(self) -> int:
        number = self._count
        self._count = number + 1
        return number

    def __get__(self, owner: object, kind: type) -> int:
        """The number of numbers that this thread has drawn, if the counter is an attribute of a class."""
        return self._count


class Member:
    """A tensor of a model from a file, in the pickle of a layer: it is found in the model, which has its values.

    Args:
        model: the model; `model[name]` is the tensor.
        name: its name.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._model = weakref.ref(model)
        self._name = name

    def stands_for(self, t: Variable) -> bool:
        """Whether the model exists and still has this tensor."""
        model = self._model()
        return model is not None and model[self._name] is t

    def is_fixed(self) -> bool:
        """Whether the tensor does not train by default: it is a constant of the file."""
        model = self._model()
        return model is not None and bool(model.is_fixed(self._name))

    def request(self) -> None:
        """Note that the program has included the tensor in training."""
        model = self._model()
        if model is not None:
            model.requested.add(self._name)

    def __reduce__(self) -> Any:
        return operator.getitem, (self._model(), self._name)


def linked(value: Any, within: tuple[int, ...] = ()) -> Any:
    """A value, or a list, tuple or dict of values, to pickle: members of models from files are replaced by their `Member`.

    Args:
        value: the value.
        within: the ids of the lists, tuples and dicts that it is in.
    """
    if isinstance(value, Variable):
        member = value._member
        return member if member is not None and member.stands_for(value) else value
    if not isinstance(value, (dict, list, tuple)) or id(value) in within:
        return value
    items = value.values() if isinstance(value, dict) else value
    replaced = [linked(v, (*within, id(value))) for v in items]
    if all(a is b for a, b in zip(replaced, items, strict=True)):
        return value
    if isinstance(value, tuple):
        return value._make(replaced) if hasattr(value, "_make") else type(value)(replaced)
    made = copy.copy(value)  # of its class, with its attributes
    for key, v in zip(value if isinstance(value, dict) else range(len(value)), replaced, strict=True):
        made[key] = v
    return made


class Variable:
    """A value on a device, and the operator that produced it."""

    _is_constant = False
    """Whether this is a constant of a model: it becomes part of a recorded graph, never an input of it."""

    _follows_device = False
    """Whether this was computed from constants only: it is moved to the device of the tensors that it is used with."""

    _origin: Link | None = None
    """The call that computed it, and the index among its results; None for a leaf."""

    _without_graph = False
    """Whether this is a gradient that was computed without a graph, or was computed from one: a constant for the tape."""

    _version = 0
    """The number of changes in place: the tape compares it to detect that a value it has read was changed."""

    _writes = 0
    """The number of writes to the storage: plans of a model hold copies of its weights."""

    _is_shared = False
    """Whether the storage has been returned by `data`: it may be written to at any time."""

    _member: Member | None = None
    """The model from a file that it is a parameter or a statistic of."""

    device: Device
    requires_grad: bool
    stores_grad: bool
    name: str
    _creator: Any
    _data: Any

    @classmethod
    def _of(cls, value: Any, device: Device, requires_grad: bool) -> Self:
        """Wrap the result of an operator."""
        made = cls.__new__(cls)
        made.device = device
        made.requires_grad = requires_grad
        made.stores_grad = False
        made.name = ""
        made._creator = None
        made._data = value
        return made


def required(x: Any) -> Any:
    """The argument; raises InvalidInput (SX311) unless it is a tensor."""
    if not isinstance(x, Variable):
        hint = "wrap it: Tensor(data=...)"
        raise InvalidInput(f"an argument must be a Tensor, got a {type(x).__name__}", code="SX311", hint=hint)
    return x


def tensor_list(what: str, xs: Any) -> None:
    """Raise InvalidInput (SX317) unless an argument is a list or tuple of tensors."""
    if not isinstance(xs, (list, tuple)):
        raise InvalidInput(f"{what} must be a list of tensors, got a {type(xs).__name__}", code="SX317")
    for x in xs:
        if not isinstance(x, Variable):
            raise InvalidInput(f"{what} must be a list of tensors, got a {type(x).__name__} in it", code="SX317")


_class: type[Variable] = Variable


def made_by_operators(cls: V) -> V:
    """Register the class that operators return; `tensor.py` does so for `Tensor`."""
    global _class
    _class = cls
    return cls


def of(value: Any, device: Device, requires_grad: bool) -> Any:
    """Wrap the result of an operator in a Tensor."""
    return _class._of(value, device, requires_grad)
