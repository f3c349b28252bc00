"""The tape: operators, each recorded as the creator of its outputs; `backward.py` walks them from a loss to the leaves.

`Node` is an ONNX operator, recorded by the calls of `ops.py`; `Operator` is the base class of custom operators.
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
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
from onnx import helper

from singa_backend import dtypes
from singa_backend.autodiff.tape import gradients as rule_gradients
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.interpreters.base import Interpreter, Subgraph
from singa_backend.interpreters.builder import GraphBuilder
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import Declaration
from singa_backend.ir.versioned import VersionedOperator
from singa_backend.proto.messages import reads

from ..device import Device, default_device
from . import provenance, trace
from .variable import Counter, Variable, of

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


def vocabulary(device: Device | None = None) -> Interpreter[Any]:
    """The interpreter that computes the values of tensors now: that of the device, or of the graph that is being recorded."""
    current = trace.current()
    if current is not None:
        return current.writer
    device = device or default_device
    return _Timed(device) if device.verbosity and device._times.measures else _eager(device)


class _Timed(Eager):
    """Computes operators, and measures them for `Device.PrintTimeProfiling`."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.backend)
        self._place = device
        self._inside = False

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Any]:
        return self._measured(op_type, lambda: super(_Timed, self).call(op_type, inputs, attributes, outputs, domain))

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Any]:
        name = operator.declaration.name
        return self._measured(name, lambda: super(_Timed, self).call_version(operator, inputs, attributes, wanted))

    def _measured(self, name: str, compute: Callable[[], list[Any]]) -> list[Any]:
        if self._inside:
            return compute()
        self._inside, start = True, time.perf_counter()
        try:
            made = compute()
            self._place.Sync()
        finally:
            self._inside = False
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


class Node(Operator):
    """An ONNX operator on the tape; its gradient is computed by the gradient rule of its declaration.

    Only the values that the rule names are kept.

    Args:
        op_type: The name of the operator.
        domain: Its domain; "" for ONNX's own.
        declaration: The declaration of the operator in `singa_backend`.
        attributes: The attributes by name.
        opset: The opset of the domain.
        version: The schema version of the call; None for the last one of the declaration.
    """

    _span: FunctionCall | None = None
    """The call of a function that ends with this node; None if the function is this node only."""

    _dtypes: Sequence[Any] = ()
    """The dtype of each input; None for one that is not a Tensor."""

    _results: Sequence[tuple[Any, Any]] = ()
    """(dtype, shape) of each output."""

    def __init__(
        self,
        op_type: str,
        domain: str,
        declaration: Declaration,
        attributes: dict[str, Any],
        opset: int,
        version: int | None = None,
    ) -> None:
        super().__init__(f"{op_type}#{_operators.next()}")
        self.op_type, self.domain, self.opset, self.version = op_type, domain, opset, version
        self.declaration = declaration
        self.attributes = attributes
        self.node = ""
        self._values: list[Any] = []
        self._outputs: list[Any] = []
        self._read: list[tuple[weakref.ref[Variable], int] | None] = []

    def keep(self, values: Sequence[Any], outputs: Sequence[Any], tensors: Sequence[Variable | None] = ()) -> None:
        """Keep the inputs and outputs that the gradient rule names.

        Args:
            values: The value of each input.
            outputs: The value of each output.
            tensors: The tensors of the inputs, then those of the outputs. They must not change until the gradient is computed.
        """
        self._choose(values, outputs)
        self._dtypes = [None if t is None else getattr(v, "dtype", None) for t, v in zip(tensors, values, strict=False)]
        self._results = [(getattr(v, "dtype", None), getattr(v, "shape", ())) for v in outputs] if tensors else []
        kept = zip(tensors, (*self._values, *self._outputs), strict=False)
        self._read = [None if t is None or v is None or v is _Dropped else (weakref.ref(t), t._version) for t, v in kept]

    def _choose(self, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        rule = self.declaration.gradient_rule
        if rule is None:
            self._values, self._outputs = list(values), [None] * len(outputs)
            return
        named = [d.name for d in self.declaration.inputs]
        names = set(rule.names)
        last = len(named) - 1
        everything = trace.current() is not None or "captured" in names or any(d.variadic for d in self.declaration.inputs)
        self._values = [
            v if everything or named[min(i, last)] in names else (v if v is None else _Dropped) for i, v in enumerate(values)
        ]
        keeps = bool({"y", "ys"} & names) or len(outputs) > 1 or trace.current() is not None
        self._outputs = list(outputs) if keeps else [None] * len(outputs)

    def backward(self, *dys: Any) -> Any:
        """Compute the gradients of the inputs of the call on arrays.

        If a function of `autograd` ends with this node, they are those of the tensors passed to the function.

        Args:
            *dys: The gradient of each result: an array or a Tensor of its shape, or a number for all elements; 1 if there are
                none.

        Returns:
            An array; a tuple of arrays if there are several inputs, with None for one without a gradient and without the last
            ones that have none; None if none has one.

        Raises:
            InvalidInput: There are more gradients than results or a shape differs (SX373), a gradient is on another device
                (SX344), or a tensor that the gradient needs was changed (SX370).
            UnsupportedModel: The operator has no gradient for these inputs or attributes.
        """
        if trace.current() is not None:
            raise trace.NotTraceable(f"the backward of {self.name} on arrays cannot become part of a graph")
        if self._span is not None:
            return _unpacked(_span_gradients(self, self._span, dys))
        device = _device_of(self)
        given = _given([(self, i) for i in range(len(self._results))], dys, device).get(self, [])
        needs = [t is not None and dtypes.is_float(t) for t in self._dtypes]
        return _unpacked(self._backward(given, needs, device) if any(d is not None for d in given) else [])

    def _backward(self, dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        self._refuse_changed(dys, needs)
        return self._by_rule(vocabulary(device), self._values, self._outputs, dys, needs)

    def _backward_recorded(self, op: Interpreter[Any], dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        self._refuse_changed([None if d is None else d._data for d in dys], needs)
        values = [self._value_as_tensor(i, device) for i in range(len(self._values))]
        outputs = [None if y is None else self._again(y, i, device) for i, y in enumerate(self._outputs)]
        for y in outputs:
            if y is not None:
                y.requires_grad = _is_float(y._data, device)
        return self._by_rule(op, values, outputs, dys, needs)

    def _by_rule(
        self, op: Interpreter[Any], values: list[Any], outputs: list[Any], dys: list[Any], needs: list[bool]
    ) -> list[Any]:
        try:
            return rule_gradients(op, self.declaration, values, outputs, self.attributes, dys, needs, self.version)
        except UnsupportedModel as error:
            raise error.locate(node=self.node or self.name) from None

    def _value_as_tensor(self, i: int, device: Device) -> Any:
        """The Tensor of an input that was kept; for one that has another value now, a Tensor of the old value."""
        value, x, creator = self._values[i], self.inputs[i], self.creators[i]
        if value is None or value is _Dropped:
            return value
        if x is None or creator is None:
            return of(value, device, False)
        if x._creator is creator and trace.value(x) is value:
            return x
        if trace.current() is None and isinstance(creator, Dummy):
            raise InvalidInput(
                f"the storage of {x.name or creator.name} was replaced after {self.name} had read it, so that no gradient of its "
                "gradient reaches it",
                code="SX370",
                hint="compute the gradients before the update, or compute the loss again",
            )
        return creator._again(value, creator.place(x), device)

    def _refuse_changed(self, dys: list[Any], needs: list[bool]) -> None:
        """Raise InvalidInput (SX370) if a tensor whose old value the gradient needs was changed in place."""
        changed = {i: t for i, r in enumerate(self._read) if r and (t := r[0]()) is not None and t._version != r[1]}
        for i in sorted(changed.keys() & self._needed_values(dys, needs)) if changed else ():
            what = f"{changed[i].name or creator_of(changed[i]).name} was changed after {self.name} had read it"
            raise InvalidInput(
                f"{what}, and the gradient of {self.name} needs the old value",
                code="SX370",
                hint="compute the gradients of every loss before the update, or compute the loss again",
            )

    def _needed_values(self, dys: list[Any], needs: list[bool]) -> set[int]:
        """The indices of the inputs and outputs whose values the gradient needs; of the others it needs the shape at most."""
        values = [*self._values, *self._outputs]
        every = set(range(len(values)))
        if any(isinstance(v, Subgraph) for v in self.attributes.values()) or any(isinstance(v, list) for v in values):
            return every
        builder = GraphBuilder(self.opset)

        def symbol(v: Any) -> Any:
            if v is None or v is _Dropped:
                return v
            return builder.input("x", helper.make_tensor_type_proto(dtypes.onnx_code(v.dtype), v.shape))

        symbols, count = [symbol(v) for v in values], len(self._values)
        made = rule_gradients(
            builder,
            self.declaration,
            symbols[:count],
            symbols[count:],
            self.attributes,
            [symbol(d) for d in dys],
            needs,
            self.version,
        )
        graph = builder.proto("gradient", builder.finish([g for g in made if g is not None]))
        used = {n for node in graph.node for n in reads(node)}
        return {i for i in every if getattr(symbols[i], "name", None) in used}


_Dropped: Any = type("Dropped", (), {"__repr__": lambda self: "a value that the rule does not name"})()


# --- the gradients of one call, for `creator.backward(dy)`


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """The nodes that one call of a function recorded.

    Attributes:
        start: The serial number before the call.
        inputs: The id of each tensor passed to the function; None for an absent one.
        results: For each result its creator and its index among the outputs of that; None if it has no gradient.
    """

    start: int
    inputs: tuple[int | None, ...]
    results: tuple[tuple[weakref.ref[Node], int] | None, ...]


def start_of_call() -> int:
    """The serial number before a call of a function, for `end_of_call`."""
    return next(_serial)


def end_of_call(start: int, xs: Sequence[Any], ys: Sequence[Any]) -> None:
    """Make `creator.backward` of the results of a function compute the gradients of the function.

    Args:
        start: The number from `start_of_call`.
        xs: The tensors passed to the function; None for an absent one.
        ys: The results.
    """
    made = [y._creator if y is not None and isinstance(y._creator, Node) and y._creator.serial > start else None for y in ys]
    nodes = {n for n in made if n is not None}
    results = tuple(None if n is None else (weakref.ref(n), n.place(y)) for n, y in zip(made, ys, strict=True))
    ids = tuple(None if x is None else id(x) for x in xs)
    for node in nodes:
        same = [r[1] for r in results if r is not None] == list(range(len(results))) and len(nodes) == 1
        direct = same and [i for _, i, _, _ in node.src] == [i for i in ids if i is not None]
        node._span = None if direct else FunctionCall(start, ids, results)


def _span_gradients(node: Node, span: FunctionCall, dys: Sequence[Any]) -> list[Any]:
    """The gradients of the inputs of a function, from those of its results."""
    device = _device_of(node)
    ends = [None if r is None else (node if r[0]() is node else r[0](), r[1]) for r in span.results]
    found: dict[Any, list[Any]] = dict(_given(ends, dys, device))
    totals: dict[int, Any] = {}
    while found:
        here = max(found, key=lambda o: o.serial)  # every reader of its outputs has a larger number, and is done
        given = found.pop(here)
        needs = [
            x is not None and (id(x) in span.inputs or (c is not None and not isinstance(c, Dummy) and c.serial > span.start))
            for x, c in zip(here.inputs, here.creators, strict=True)
        ]
        if not any(needs) or all(d is None for d in given):
            continue
        for x, creator, g in zip(here.inputs, here.creators, here._backward(given, needs, device), strict=True):
            if g is None or x is None:
                continue
            if id(x) in span.inputs:
                totals[id(x)] = _eager(device).add(totals.get(id(x)), g)
            elif creator is not None:
                count = len(creator._results) if isinstance(creator, Node) else len(creator.y_id2idx)
                slots = found.setdefault(creator, [None] * count)
                slots[creator.place(x)] = _eager(device).add(slots[creator.place(x)], g)
    return [None if i is None else totals.pop(i, None) for i in span.inputs]


def _given(ends: Sequence[tuple[Any, int] | None], dys: Sequence[Any], device: Device) -> dict[Any, list[Any]]:
    """The gradients that a caller passed, as arrays by creator: one for each of its outputs."""
    if len(dys) > len(ends):
        raise InvalidInput(f"backward takes the gradient of each of the {len(ends)} results, got {len(dys)}", code="SX373")
    found: dict[Any, list[Any]] = {}
    for i, (end, dy) in enumerate(zip(ends, dys or (1.0,), strict=False)):
        if dy is None or end is None:
            continue
        creator, index = end
        if creator is None:
            raise InvalidInput(f"result {i} of the function no longer exists", code="SX373", hint="keep all its results")
        dtype, shape = creator._results[index]
        if _is_tensor(dy):
            _same_device(device, dy.device, f"the backward of {creator.name}")
            value = dy._data
        else:
            xp = device.backend.xp
            value = dy if xp.isarray(dy) else device.backend.put(np.asarray(dy))
        if value.shape != shape and value.size != 1:
            text = f"the gradient of result {i} of {creator.name} must have its shape {tuple(shape)}, got {tuple(value.shape)}"
            raise InvalidInput(text, code="SX373")
        value = device.backend.cast(value, dtype)
        if value.shape != shape:
            value = _eager(device).call("Expand", (value.reshape(()), np.asarray(shape, np.int64)), {}, 1)[0]
        found.setdefault(creator, [None] * len(creator._results))[index] = value
    return found


def _device_of(node: Node) -> Device:
    return next((x.device for x in node.inputs if x is not None), default_device)


def _unpacked(grads: Sequence[Any]) -> Any:
    """One gradient, or a tuple, without the last ones that are None."""
    last = max((i for i, g in enumerate(grads) if g is not None), default=-1)
    return tuple(grads[: last + 1]) if last > 0 else grads[0] if last == 0 else None


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
        return device.backend.put(x) if isinstance(x, np.ndarray) and trace.current() is None else x
    if x._follows_device and x.device is not device and trace.current() is None:
        return device.backend.put(x.device.backend.get(x._data))
    return trace.value(x)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Variable)
