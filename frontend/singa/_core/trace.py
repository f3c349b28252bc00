"""A step recorded as one ONNX graph: while it is recorded, tensors hold symbols, and operators write nodes.

Each tensor from outside that a step reads becomes an input of the graph, bound to the tensor. Each tensor that it assigns
(parameters, optimizer states, running statistics, the random stream) becomes an output, which is written back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from onnx import TypeProto, helper

from singa_backend import dtypes
from singa_backend.errors import SonnxError
from singa_backend.interpreters.base import Example
from singa_backend.interpreters.builder import Symbol
from singa_backend.ir.graph import Node

from . import provenance
from .variable import Variable

if TYPE_CHECKING:
    from singa_backend.opsets.rule_bodies import ByKernel

_HELD = 64
"""The maximum number of elements of a tensor whose value is kept in an export: bounds, ratios, scales."""


class NotTraceable(SonnxError):
    """A step cannot become a graph: it reads a value in Python, or runs an operator that is written in Python."""

    default_code = "SX330"


class DynamicSize:
    """A size that differs between the runs of a recorded step: Python that depends on it needs a graph for each size.

    Whatever asks for its value is noted too: the program may handle the exception.

    Args:
        name: Of the size; None if it follows from others.
        step: The step that is being recorded.
    """

    __slots__ = ("__weakref__", "name", "step")

    def __init__(self, name: str | None, step: Trace | None = None) -> None:
        self.name, self.step = name, step

    def __eq__(self, other: object) -> bool:
        return (type(other) is DynamicSize and self.name is not None and self.name == other.name) or bool(self._refuse())

    def _refuse(self, *args: Any) -> Any:
        reason = f"the step reads a size in Python, {self.name or '?'}, that differs between its runs"
        if self.step is not None:
            self.step.refused = reason
        raise NotTraceable(reason)

    @property  # type: ignore[misc]  # that of object can be set
    def __class__(self) -> Any:  # what `isinstance` with another class reads
        if self.step is not None:
            self.step.refused = "the step asks in Python for the type of a size that differs between its runs"
        return DynamicSize

    __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __repr__ = __format__ = _refuse
    __index__ = __int__ = __float__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse


def reshaped(sizes: Sequence[Any], now: Sequence[Any], keeps: bool = True) -> list[Any]:
    """Sizes for Reshape: 0 (keep) for a `DynamicSize` that is at the same axis now, otherwise -1 for one of them.

    Args:
        sizes: The sizes that Python has written.
        now: Those of the input.
        keeps: Whether 0 keeps a size.
    """
    target: list[Any] = list(sizes)
    for i, d in enumerate(target):
        if type(d) is DynamicSize:
            same = keeps and i < len(now) and d.name is not None and d.name == now[i]
            target[i] = 0 if same else d if any(type(n) is not DynamicSize and n == -1 for n in target) else -1
    return target


class Trace:
    """A step that is being recorded.

    Args:
        opset: The opset of the graph.
        is_open: Whether sizes of the inputs have names, because they differ between runs of the graph.
        holds: Whether small tensors that are read keep their values: older opsets need some of them as attributes.
        by_kernel: Whether a kernel may compute the gradient of a call, which is then one node; None if rules write all of them.

    Attributes:
        writer: Writes the nodes.
        inputs: The tensors that the step reads, each with its symbol, in the order of first use.
        assigned: The tensors that it writes, in order, by their ids.
        invalidated: The ids of those whose old value gradients can no longer use.
        known: The tensors whose values were read in Python, by their ids: they are constants of the graph.
        settings: The settings that were read in Python and are part of the graph, each as (a function that reads it, its value).
        forward: The names of the nodes before the backward pass; None if there was none.
        gradients: The gradients that backward passes have returned.
        completions: What follows each run of the step, by the ids of the owners.
        refused: Why the step depends on a size that differs between its runs; "" if it does not.
    """

    def __init__(self, opset: int, holds: bool = False, by_kernel: ByKernel | None = None, is_open: bool = False) -> None:
        from singa_backend.opsets.rule_bodies import RuleBodies  # a program that only runs models records nothing
        from singa_backend.opsets.writer import OpsetWriter

        self.writer = OpsetWriter(opset)
        if by_kernel is not None:
            self.writer.bodies = RuleBodies(partial(OpsetWriter, opset), by_kernel)
        self._holds = holds
        self.is_open = is_open
        self.refused = ""
        self._shown: list[weakref.ref[DynamicSize]] = []
        self.inputs: list[tuple[Variable, Symbol]] = []
        self.assigned: dict[int, Variable] = {}
        self.invalidated: set[int] = set()
        self.known: dict[int, Variable] = {}
        self.settings: dict[int, tuple[Callable[[], Any], Any]] = {}
        self.forward: frozenset[str] | None = None
        self.gradients: list[Symbol] = []
        self.completions: dict[int, Callable[[Any], None]] = {}
        self._bound: dict[int, tuple[Variable, Symbol]] = {}
        self._kept: list[Any] = []  # what has an id above

    def shape(self, sizes: Sequence[Any] | None) -> tuple[Any, ...]:
        """The shape of a symbol as Python sees it.

        Args:
            sizes: The sizes; None for an unknown rank.

        Raises:
            NotTraceable: The rank is not known, and sizes have names.
        """
        if sizes is None and self.is_open:
            raise NotTraceable("the step reads the shape of a tensor in Python, whose rank is not known")
        seen = tuple(d if isinstance(d, int) or not self.is_open else DynamicSize(d, self) for d in sizes or ())
        self._shown += [weakref.ref(d) for d in seen if type(d) is DynamicSize]
        return seen

    def check_sizes(self) -> None:
        """Raise NotTraceable if Python has asked for the value of a size that differs, or keeps it after the step."""
        if not self.refused and any(shown() is not None for shown in self._shown):
            self.refused = "the step keeps a size that differs between its runs"
        if self.refused:
            raise NotTraceable(self.refused)

    def begin_backward(self) -> None:
        """Note that the backward pass begins here, unless it began before."""
        if self.forward is None:
            self.forward = frozenset(n.name for n in self.writer.builder.ir)

    def input(self, name: str, type: TypeProto, example: Example | None = None) -> Symbol:
        """An input of the graph, with a function that returns a value that it has in some step."""
        symbol = self.writer.input(name, type)
        if example is not None:
            self.writer.builder.examples[symbol.ir] = example
        return symbol

    def bind(self, tensor: Variable, name: str) -> Symbol:
        """Make a tensor an input of the graph, under a name."""
        symbol = self.input(name, type_of(tensor), value_of(tensor))
        if self._holds and tensor._data.size <= _HELD:
            symbol.frozen_value = tensor.device.backend.get(tensor._data)
        self.inputs.append((tensor, symbol))
        return self._bind(tensor, symbol)

    def binds(self, tensor: Variable) -> bool:
        """Whether the step has read the tensor, or given it a value."""
        return id(tensor) in self._bound

    def _bind(self, tensor: Variable, symbol: Symbol) -> Symbol:
        """Keep the symbol of a tensor, and the tensor: the id of one that is gone may become that of another one."""
        self._bound[id(tensor)] = tensor, symbol
        return symbol

    def value(self, tensor: Variable) -> Any:
        """The symbol of a tensor; a tensor that was created before the step becomes an input."""
        if id(tensor) in self._bound:
            return self._bound[id(tensor)][1]
        if isinstance(tensor._data, Symbol):
            return tensor._data
        if tensor._is_constant and tensor.name:  # a constant of a file keeps its name
            array = tensor.device.backend.get(tensor._data)
            return self._bind(tensor, self.writer.builder.initializer(tensor.name, array, fold=True))
        if tensor._is_constant:
            return self.writer.constant(tensor.device.backend.get(tensor._data))
        return self.bind(tensor, tensor.name or "state")

    def named(self, before: Node | None, tensors: Sequence[Variable | None], names: Sequence[str], node: str = "") -> None:
        """Rename the results of the nodes after `before` to the requested names."""
        symbols = [t._data if t is not None and isinstance(t._data, Symbol) else None for t in tensors]
        self.writer.builder.rename(before, symbols, names, node)

    def declared(self, tensor: Variable | None, type: TypeProto | None) -> None:
        """Use the type that a file declares for a result if inference does not know its rank."""
        symbol = tensor._data if tensor is not None else None
        if type is not None and isinstance(symbol, Symbol) and self.writer.shape(symbol) is None:
            symbol.type = type

    def assign(self, tensor: Variable, symbol: Symbol, invalidates_tape: bool = True) -> None:
        """Make a symbol the value of a tensor; it is written back after the graph has run."""
        if id(tensor) in self.known:
            raise NotTraceable(f"the step reads the values of {tensor.name or 'a tensor'} in Python, and changes them")
        tensor._is_constant = False  # a tensor that is written is not a constant
        if not isinstance(tensor._data, Symbol):
            self.value(tensor)
            self.assigned[id(tensor)] = tensor
            if invalidates_tape:
                self.invalidated.add(id(tensor))
        self._bind(tensor, symbol)

    def end(self) -> None:
        """Release the tensors that were kept while the step was recorded."""
        self._bound.clear()
        self._kept.clear()


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


def current() -> Trace | None:
    """The step that is being recorded, or None."""
    return _current.get()


def is_open() -> bool:
    """Whether a step is being recorded of which some sizes have names."""
    trace = _current.get()
    return trace is not None and trace.is_open


@contextlib.contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """The context in which a step is recorded, and every leaf that it reads is kept alive."""
    token = _current.set(trace)
    try:
        with provenance.retaining:
            yield trace
    finally:
        _current.reset(token)


def depends(owner: Any, ask: Callable[[], Any]) -> None:
    """Record a setting that the step reads in Python; if `ask` returns another value later, the step is recorded again."""
    trace = _current.get()
    if trace is not None and id(owner) not in trace.settings:
        trace.settings[id(owner)] = (ask, ask())
        trace._kept.append(owner)


def completes(owner: Any, done: Callable[[Any], None]) -> bool:
    """Note what follows each run of the step that is being recorded, once for each owner; return False if none is.

    Args:
        owner: What `done` changes.
        done: Called with the options of the step.
    """
    trace = _current.get()
    if trace is None:
        return False
    if id(owner) in trace.completions:
        raise NotTraceable("an optimizer that accumulates gradients is called twice in a step")
    trace.completions[id(owner)] = done
    trace._kept.append(owner)
    return True


def value(tensor: Variable) -> Any:
    """The value that operators compute with: the array of a tensor, or its symbol while a step is recorded."""
    trace = _current.get()
    return tensor._data if trace is None else trace.value(tensor)


def type_of(tensor: Variable, sizes: Sequence[int | str] | None = None) -> TypeProto:
    """The ONNX type of a tensor that has a value, with its sizes, or with other sizes and names."""
    return helper.make_tensor_type_proto(dtypes.onnx_code(tensor._data.dtype), tensor._data.shape if sizes is None else sizes)


def value_of(tensor: Variable) -> Example:
    """The value of a tensor outside the recorded step, as an example of its symbol."""
    return lambda: tensor.device.backend.get(tensor._data)


def alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes may be equal: a dynamic size may equal any size."""
    return len(a) == len(b) and all(m == n for m, n in zip(a, b, strict=True) if _is_number(m) and _is_number(n))


def _is_number(size: Any) -> bool:
    return type(size) is not DynamicSize and isinstance(size, int)


def assign(tensor: Variable, new: Any, invalidates_tape: bool = True) -> None:
    """Write a new value of the same shape and dtype into a tensor, in place; its provenance is dropped.

    Args:
        tensor: The tensor to change.
        new: The value: an array, or a symbol while a step is recorded.
        invalidates_tape: Whether gradients that need the old value must fail; False for running statistics.
    """
    trace = _current.get()
    if trace is not None:
        trace.assign(tensor, new, invalidates_tape)
    elif new is not tensor._data:
        tensor.device.backend.write(tensor._data, new)
        note_write(tensor, invalidates_tape)


def note_write(tensor: Variable, invalidates_tape: bool) -> None:
    """Note that a tensor's array has been written in place; its provenance is dropped.

    Args:
        tensor: The tensor.
        invalidates_tape: As for `assign`.
    """
    tensor._is_constant = False
    tensor._version += invalidates_tape
    provenance.forget(tensor)
    tensor._writes += 1  # after the write: a plan that another thread makes during it is of the values before
