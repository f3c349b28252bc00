"""The fields of a tensor. What is below `tensor.py` reads and makes tensors by these alone; `tensor.py` adds the methods."""

from __future__ import annotations

import threading
from typing import Any, Self, TypeVar

from ..device import Device
from .provenance import Link

V = TypeVar("V", bound="type[Variable]")


class Counter(threading.local):
    """Numbers for names: every thread counts from 0, so that its names do not depend on what other threads do."""

    _count = 0

    def next(self) -> int:
        number = self._count
        self._count = number + 1
        return number

    def __get__(self, owner: object, kind: type) -> int:
        """As an attribute of a class, how many numbers this thread has drawn."""
        return self._count


class Variable:
    """A value on a device, and which operator made it."""

    _is_constant = False
    """Whether this is a constant of a model: part of a graph that is recorded, never an input of it."""

    _follows_device = False
    """Whether this was made of constants alone, by an operator: it follows the tensors that it meets to their device."""

    _origin: Link | None = None
    """Which operator made it, and as which of its results; None for a leaf."""

    _version = 0
    """How often it was changed in place: a tape asks whether what it read is still there."""

    device: Device
    requires_grad: bool
    stores_grad: bool
    name: str
    _creator: Any
    _data: Any

    @classmethod
    def _of(cls, value: Any, device: Device, requires_grad: bool) -> Self:
        """A tensor around a value that an operator has made."""
        made = cls.__new__(cls)
        made.device = device
        made.requires_grad = requires_grad
        made.stores_grad = False
        made.name = ""
        made._creator = None
        made._data = value
        return made


_class: type[Variable] = Variable


def made_by_operators(cls: V) -> V:
    """Declare the class of what operators return; `tensor.py` does so for `Tensor`."""
    global _class
    _class = cls
    return cls


def of(value: Any, device: Device, requires_grad: bool) -> Any:
    """A Tensor around a value that an operator has made."""
    return _class._of(value, device, requires_grad)
