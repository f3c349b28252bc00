"""The tape: operators, each recorded as the creator of its outputs; `backward.py` walks them from a loss to the leaves.

`Operator` is the base class of custom operators, and of `Node` in `node.py`, an ONNX operator.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.interpreters.base import DifferentiatedCall, Interpreter
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.versioned import VersionedOperator
from singa_backend.nodes import PlannedEager

from ..device import Device, default_device
from . import provenance, trace
from .variable import Counter, Variable, of

R = TypeVar("R")

_serial = itertools.count()
_operators = Counter()


# --- the mode ---------------------------------------------------------------------------------------------------------

_training: ContextVar[bool] = ContextVar("training")
_temporary: ContextVar[bool] = ContextVar("temporary", default=False)
_measuring: ContextVar[bool] = ContextVar("measuring", default=False)


class _Default:
    """The mode in which a thread starts: the last one that was set before its start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flag = False
        self._started: weakref.WeakKeyDictionary[threading.Thread, bool] = weakref.WeakKeyDictionary()

    def set(self, flag: bool) -> None:
        with self._lock:
            for thread in threading.enumerate():
                self._started.setdefault(thread, self._flag)
            self._started[threading.current_thread()] = self._flag = flag

    def get(self) -> bool:
        with self._lock:
            return self._started.get(threading.current_thread(), self._flag)


_default = _Default()


def _is_training() -> bool:
    flag = _training.get(None)
    if flag is None:
        flag = _default.get()
        _training.set(flag)
    return flag


def set_training(flag: bool) -> None:
    """Set the mode of this context only, not that of threads that start later."""
    _training.set(flag)


class ModeModule(ModuleType):
    """A module with `training` as a property: the mode of the context which reads or sets it."""

    @property
    def training(self) -> bool:
        """Whether operators are recorded on the tape in this thread.

        Setting it sets the mode of this thread (of this context, if a program uses `contextvars`), and the mode in which
        threads start later. Threads that already run keep their mode.
        """
        return _is_training()

    @training.setter
    def training(self, flag: bool) -> None:
        _training.set(bool(flag))
        if not _temporary.get():
            _default.set(bool(flag))


sys.modules[__name__].__class__ = ModeModule

training: bool
"""Whether operators are recorded on the tape in this context; setting it also sets the mode of threads that start later."""


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """The context that restores the mode on exit; changes of the mode in it do not affect threads that start in it."""
    before, outer = _is_training(), _temporary.get()
    _temporary.set(True)
    try:
        yield
    finally:
        _training.set(before)
        _temporary.set(outer)


@contextlib.contextmanager
def no_tape() -> Iterator[None]:
    """The context in which operators are not recorded on the tape: for updates of parameters, statistics, metrics.

    It applies to this thread; other threads keep their mode. Tensors created in it have no provenance: an export writes their
    values, not the operators that computed them.

    Yields:
        None.
    """
    before = _is_training()
    _training.set(False)
    try:
        with provenance.suspended:
            yield
    finally:
        _training.set(before)


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """The context in which a training step only computes its loss: `backward` yields nothing, and optimizers change nothing."""
    before = _measuring.get()
    _measuring.set(True)
    try:
        yield
    finally:
        _measuring.set(before)


def is_measuring() -> bool:
    """Whether this is in the context of `measuring`."""
    return _measuring.get()


_defines: ContextVar[bool] = ContextVar("defines", default=False)


@contextlib.contextmanager
def by_definitions() -> Iterator[None]:
    """The context in which each operator is computed by its definition, without kernels."""
    before = _defines.get()
    _defines.set(True)
    try:
        yield
    finally:
        _defines.set(before)


class _Anywhere(Eager):
    """The values that a graph captures: they may be on any device, and move to that of the tensors that the graph reads."""

    def example(self, x: Any) -> Any:
        return x if isinstance(x, (np.ndarray, list)) else x.get()

    def is_value(self, x: Any) -> bool:
        if isinstance(x, list):
            return super().is_value(x)
        return hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, np.generic)


_anywhere = _Anywhere()


@lru_cache(maxsize=64)
def _eager(device: Device) -> Eager:
    return Eager(device.backend)


@lru_cache(maxsize=64)
def _planned(device: Device, trains: bool) -> PlannedEager:
    return PlannedEager(device.backend, trains=trains)


def vocabulary(device: Device | None = None, trains: bool = False) -> Interpreter[Any]:
    """The interpreter that computes the values of tensors now: that of the device, or of the graph that is being recorded.

    Args:
        device: The device; None for the default one.
        trains: Whether the gradient of the call will be needed.
    """
    current = trace.current()
    if current is not None:
        return current.writer
    device = device or default_device
    if device.verbosity and device._times.measures:
        return _Timed(device, trains)
    return _eager(device) if _defines.get() else _planned(device, trains)


class _Timed(PlannedEager):
    """Computes operators, and measures them for `Device.PrintTimeProfiling`."""

    def __init__(self, device: Device, trains: bool) -> None:
        super().__init__(device.backend, trains=trains)
        self._place = device
        self._inside = False

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Any]:
        return self._measured(op_type, lambda: super(_Timed, self).call(op_type, inputs, attributes, outputs, domain))

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Any]:
        name = operator.declaration.name
        return self._measured(name, lambda: super(_Timed, self).call_version(operator, inputs, attributes, wanted))

    def gradients_of(self, call: DifferentiatedCall) -> list[Any] | None:
        name = call.operator.declaration.name
        return self._measured(name, lambda: super(_Timed, self).gradients_of(call))

    def _measured(self, name: str, compute: Callable[[], R]) -> R:
        if self._inside:
            return compute()
        self._inside, start = True, time.perf_counter()
        try:
            made = compute()
            self._place.Sync()
        finally:
            self._inside = False
        if made is not None:
            self._place._times.add(name, time.perf_counter() - start)
        return made


# --- operators --------------------------------------------------------------------------------------------------------


class Operator:
    """An operator on the tape, and the base class of custom operators.

    A subclass defines `forward(*arrays)` and `backward(*arrays)` on the values of tensors. Calling the operator on tensors
    returns a tuple of tensors. An operator stores the state of its last call only: create one for each call.

    Args:
        name: The name of the operator; None for its class and a number, such as "Scale#3".

    Attributes:
        op_count: The number of operators that this thread has numbered.
        serial: The number of the call; later calls have larger numbers.
        src: For each input (creator, id of the tensor, the tensor if it stores its gradient, otherwise None, whether it does).
        y_id2idx: The index of each output, by the id of its tensor.
        requires_grad: Whether gradients flow through the last call.

    Raises:
        InvalidInput: On a call: an input is not a Tensor (SX311), the inputs are on different devices (SX344), or an input is
            an output of this operator (SX371).
        NotTraceable: On a call while a step is recorded as a graph.
    """

    op_count = _operators
    """The number of operators that this thread has numbered."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name if name is not None else f"{type(self).__name__}#{_operators.next()}"
        self.serial = 0
        self.src: list[tuple[Operator, int, Any, bool]] = []
        self.y_id2idx: dict[int, int] = {}
        self.requires_grad = False
        self.inputs: list[Any] = []
        """The inputs that need a gradient; None for the others."""
        self.creators: list[Operator | None] = []
        """The creator of each input at the time of the call; a tensor that is filled later gets another one."""
        self.output_count = 1
        self.drops_gradient = False
        """Whether an input was computed from gradients that have no graph (`Variable._without_graph`)."""

    def __call__(self, *xs: Any) -> tuple[Any, ...]:
        """Compute on tensors; raises InvalidInput if an input is not a Tensor."""
        if trace.current() is not None:
            raise trace.NotTraceable(f"the operator {self.name} is written in Python and cannot become part of a graph")
        for x in xs:
            if not _is_tensor(x):
                raise InvalidInput(f"the inputs of {self.name} must be tensors, got a {type(x).__name__}", code="SX311")
        device = next((x.device for x in xs if not x._follows_device), default_device)
        for x in xs:
            _same_device(device, device if x._follows_device else x.device, self.name)
        values_here = [_value_on(device, x) for x in xs]
        with device.backend.active():
            results = self.forward(*values_here)
        values = results if isinstance(results, tuple) else (results,)
        ys = self.record(list(xs), values, device)
        types = tuple((getattr(v, "dtype", None), getattr(v, "shape", None)) for v in values)
        provenance.record(ys, type(self).__name__, lambda args, _: self(*args), xs, self, types)
        return ys

    def forward(self, *xs: Any) -> Any:
        """Compute the outputs; defined by subclasses.

        Args:
            *xs: The value of each input, an array on the device of the inputs.

        Returns:
            The output, an array; or a tuple of arrays.

        Raises:
            NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def backward(self, *dys: Any) -> Any:
        """Compute the gradients of the inputs from those of the outputs; defined by subclasses.

        Args:
            *dys: The gradient of each output, an array of its shape; the number 0 for an output that the loss does not use.

        Returns:
            The gradient of the input, an array of its shape; or a tuple with one for each input, None if it has none.

        Raises:
            NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define backward")

    def record(self, xs: Sequence[Variable | None], values: Sequence[Any], device: Device, flows: bool = True) -> tuple[Any, ...]:
        """Make tensors of the outputs; if gradients flow through the call, this operator becomes their creator.

        Args:
            xs: The inputs; None for one that is absent or not a Tensor.
            values: The value of each output; None for one that is absent.
            device: The device of the outputs.
            flows: Whether the operator has a gradient.

        Returns:
            The outputs as Tensors; None for one that is absent.

        Raises:
            InvalidInput: An input is an output of this operator (SX371).
        """
        self.serial = next(_serial)  # of the call: an operator may have been made before its inputs were
        self.requires_grad = flows and _is_training() and any(x is not None and x.requires_grad for x in xs)
        if self.requires_grad and any(x is not None and x._creator is self for x in xs):
            raise InvalidInput(
                f"an input of {self.name} must not be its own output: an operator stores the state of its last call only",
                code="SX371",
                hint="create an operator for each call",
            )
        ys = tuple(None if v is None else of(v, device, self.requires_grad) for v in values)
        self.output_count = len(ys)
        self.drops_gradient = flows and without_graph(xs)
        if not self.requires_grad:
            mark_without_graph(ys, self.drops_gradient)
        if self.requires_grad:
            self.inputs = [x if x is not None and x.requires_grad else None for x in xs]
            self.creators = [None if x is None else creator_of(x) for x in self.inputs]
            self.y_id2idx = {}
            self.src = [(creator_of(x), id(x), x if x.stores_grad else None, x.stores_grad) for x in xs if x is not None]
            for i, y in enumerate(ys):
                if y is not None:
                    y._creator = self
                self.y_id2idx[id(y)] = i
        return ys

    def place(self, y: Variable) -> int:
        """The index of an output.

        Args:
            y: A Tensor that the last call of this operator returned.

        Returns:
            Its index among the outputs.

        Raises:
            InvalidInput: The operator was called again after it returned `y` (SX371).
        """
        if id(y) not in self.y_id2idx:
            raise InvalidInput(
                f"{self.name} was called again; it stores its last call only",
                code="SX371",
                hint="create an operator for each call",
            )
        return self.y_id2idx[id(y)]

    def output_name(self, idx: int) -> str:
        """The name of an output.

        Args:
            idx: Its index.

        Returns:
            "{name}:{idx}"; for a Dummy, its name.
        """
        return f"{self.name}:{idx}"

    def grad_name(self, idx: int) -> str:
        """The name of the gradient of an output.

        Args:
            idx: The index of the output.

        Returns:
            "{name}_g:{idx}".
        """
        return f"{self.name}_g:{idx}"

    def get_params(self) -> dict[str, Any]:
        """The parameters of the operator that are not inputs; custom operators may override it.

        Returns:
            The parameters by name; empty by default.
        """
        return {}

    def _again(self, value: Any, index: int, device: Device) -> Any:
        """A Tensor for the value of an output, which may be on the tape although the first Tensor no longer exists."""
        made = of(value, device, True)
        made._creator = self
        self.y_id2idx[id(made)] = index
        return made

    def _backward_recorded(self, op: Interpreter[Any], dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        """The gradients as Tensors on the tape: `dys` are Tensors, `op` calls operators on Tensors."""
        if trace.current() is not None:
            raise trace.NotTraceable(f"the operator {self.name} is written in Python and cannot become part of a graph")
        values = self._backward([None if d is None else d._data for d in dys], needs, device)
        given = [*(x for x in self.inputs if x is not None), *(d for d in dys if d is not None)]
        return list(_Once(self).record(given, values, device))

    def _backward(self, dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        zeros = [np.float32(0) if dy is None else dy for dy in dys]
        with device.backend.active():
            result = self.backward(*zeros)
        grads = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(grads) != len(needs):
            raise InvalidInput(f"the backward of {self.name} must return {len(needs)} gradients, got {len(grads)}", code="SX312")
        return grads


Operation = Operator


class _Once(Operator):
    """The gradient of an operator that is written in Python: it cannot be differentiated again."""

    def __init__(self, of: Operator) -> None:
        super().__init__(f"the backward of {of.name}")
        self._of = of

    def _backward(self, dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        raise UnsupportedModel(
            f"the gradient of {self._of.name} cannot be differentiated: its backward is written in Python",
            code="SX205",
            operator=type(self._of).__name__,
            hint="write the operator in ONNX operators: its gradient then has a gradient too",
        )

    def _backward_recorded(self, op: Interpreter[Any], dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        return self._backward(dys, needs, device)


class Dummy(Operator):
    """The creator of a leaf, a tensor that is not the output of an operator.

    Args:
        tensor: The leaf.
        name: Its name; None for "Dummy#" and a number.
    """

    def __init__(self, tensor: Variable, name: str | None = None) -> None:
        super().__init__(name or None)
        self.y_id2idx = {id(tensor): 0}  # not the tensor: the two would keep each other alive

    def output_name(self, idx: int) -> str:
        return self.name

    def backward(self, *dys: Any) -> NoReturn:
        """Refuse: a leaf was not computed.

        Args:
            *dys: Not used.

        Raises:
            InvalidInput: Always (SX313).
        """
        raise InvalidInput(
            f"{self.name} was not recorded: it is a leaf, it has no gradient, or training mode was off during its computation",
            code="SX313",
            hint="set autograd.training = True before the computation",
        )


def creator_of(tensor: Variable) -> Operator:
    """The operator whose output a tensor is; a Dummy for a leaf."""
    if tensor._creator is None:
        tensor._creator = Dummy(tensor, tensor.name or None)
    creator: Operator = tensor._creator
    return creator


def is_leaf(tensor: Variable) -> bool:
    """Whether no operator on the tape produced a tensor."""
    return tensor._creator is None or isinstance(tensor._creator, Dummy)


# --- gradients without a graph: constants, whose use in another loss would drop a gradient


def without_graph(xs: Sequence[Variable | None]) -> bool:
    """Whether a value was computed from gradients that have no graph."""
    return any(x is not None and x._without_graph for x in xs)


def mark_without_graph(ys: Sequence[Variable | None], flag: bool = True) -> None:
    """Mark results that were computed from gradients without a graph; outside training they are constants on purpose."""
    if flag and _is_training():
        for y in ys:
            if y is not None and _is_float(y._data, y.device):
                y._without_graph = True


def _is_float(value: Any, device: Device) -> bool:
    try:
        return dtypes.is_float(vocabulary(device).dtype(value))
    except ValueError:
        return False


# --- devices: an operator runs on the device of its tensors, and constants follow them


def _same_device(a: Device, b: Device, where: str) -> None:
    if a is not b and str(a.backend) != str(b.backend):
        raise InvalidInput(
            f"the tensors of {where} must be on one device, got {a.backend} and {b.backend}",
            code="SX344",
            hint="move one: x.to_device(dev)",
        )


def _value_on(device: Device, x: Any) -> Any:
    """The value to compute with; constants, and arrays of the host, are moved to the device."""
    if not _is_tensor(x):
        if isinstance(x, (list, tuple)) and any(map(_is_tensor, x)):  # an array of their values has no gradient
            hint = "take one of them: a model from a file returns a list, net.forward(x)[0]"
            raise InvalidInput(f"an operand must be a tensor, got a {type(x).__name__} of tensors", code="SX311", hint=hint)
        return device.backend.put(x) if isinstance(x, np.ndarray) and trace.current() is None else x
    if x._follows_device and x.device is not device and trace.current() is None:
        return device.backend.put(x.device.backend.get(x._data))
    return trace.value(x)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Variable)
