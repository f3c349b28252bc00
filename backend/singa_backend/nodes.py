"""Single operators by plans: the interpreter of the tape, which computes large nodes and their gradients with kernels.

A node that is computed eagerly is a graph of one call.  It has a session, which is kept for equal calls: those with the same
operator and attributes, and with inputs of the same dtypes, shapes and orders in memory.  The gradient of a call is one call of a
gradient kernel, if there is one, which reads what the forward call in training form returned besides its outputs.  Definitions
compute everything else: small nodes, which take less time without a plan, and nodes that every kernel refuses.

Sessions belong to a thread, so that threads do not wait for each other.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from . import limits
from .devices.device import Device
from .errors import SonnxError
from .interpreters.base import DifferentiatedCall
from .interpreters.eager import Eager
from .ir.declaration import declarations, newest_declaration
from .ir.gradient import GRADIENT
from .ir.graph import Graph, Node, Value
from .ir.versioned import VersionedOperator
from .kernels.options import options
from .kernels.table import TRAINING, gradient_kernel, gradient_kernels, kernels_of
from .kernels.values import dense, order_of
from .plans.answers import NOT_FINITE
from .proto.values import Value as Declared
from .session import Session


@dataclass(eq=False, slots=True)
class HeldNode:
    """What is kept for a node.

    Attributes:
        session: the session; None for a node that no kernel takes.
        arenas: the bytes of the memory of its plan's steps.
        results: the bytes that the plan keeps for its next results.
    """

    session: Session | None = None
    arenas: int = 0
    results: int = 0


SMALL = 1 << 13
"""The bytes of the inputs of a node up to which its definition is at least as fast as a plan."""

CHEAP = frozenset(("arithmetic", "broadcasting", "moves", "keeps_weights"))
"""The traits of operators whose definition is one pass of NumPy over the values."""

ENTRIES = 1024
"""The number of nodes whose sessions a thread keeps."""

ARENAS = 256 << 20
"""The bytes of the arenas that a thread keeps: beyond them, the plans that were used the longest time ago are dropped."""

RESULTS = 48 << 20
"""The bytes that a thread's plans keep for their next results, while nobody holds the last ones; further plans keep none."""

PASSING = (NOT_FINITE,)
"""The reasons for which a plan does not compute some inputs, but may compute others: the session is kept."""

VARIANTS = 16
"""The number of values of its scalars for which a node has plans: one that changes in every step is not a constant of a plan."""

NO_PLAN = HeldNode()
"""The entry of a node that no kernel takes."""


class TrainingOutputs(list[Any]):
    """The outputs of a call in training form, as a list; the values for its gradient kernel are apart from them.

    Attributes:
        hidden: the values that its gradient kernel reads.
    """

    hidden: tuple[Any, ...] = ()


class NodePlans(threading.local):
    """The sessions of a thread's nodes, by what they compute.

    Attributes:
        held: what is kept, by key; the node that was used the longest time ago is the first.
        variants: the number of values of the scalars of each node that has some.
        arenas: the bytes of all arenas.
        results: the bytes that plans keep for their next results.
    """

    def __init__(self) -> None:
        self.held: OrderedDict[Any, HeldNode] = OrderedDict()
        self.variants: Counter[Any] = Counter()
        self.arenas = self.results = 0

    def run(self, device: Device, key: Any, inputs: Sequence[np.ndarray], make: Callable[[], Graph]) -> list[Any] | None:
        """Compute a node by its plan.

        Args:
            device: the device.
            key: what the node computes, with the types and the order in memory of its inputs.
            inputs: the inputs.
            make: creates the graph of the node.

        Returns:
            The outputs; None if the definitions must compute it.
        """
        found = self.held.get(key)
        if found is None:
            return self._first(device, key, inputs, make)
        self.held.move_to_end(key)
        session = found.session
        if session is None:
            return None
        made = session.by_plan(inputs)
        if not found.results:
            session.forget_results()
        return made

    def _first(self, device: Device, key: Any, inputs: Sequence[np.ndarray], make: Callable[[], Graph]) -> list[Any] | None:
        """Make the plan of a node by a run on these inputs; None, as `run`, if there is no plan."""
        # the key without the values of scalars, which are constants of a plan
        without = tuple(tuple(v[:1] if _is_scalar(v) else v for v in part) if type(part) is Form else part for part in key)
        if without != key:
            if len(self.variants) > ENTRIES:
                self.variants.clear()
            self.variants[without] += 1
            if self.variants[without] > VARIANTS:
                return None
        session = Session(make(), device, options(optimize=1, ordered=True), limits.Limits())
        try:
            made = session.by_plan(inputs)
        except (SonnxError, MemoryError):  # the definition reports the error
            made = None
        self.held[key] = entry = NO_PLAN
        if made is not None or session.reason in PASSING:
            arenas, results = session.kept_bytes
            if arenas <= ARENAS:
                keeps = self.results + results <= RESULTS
                self.held[key] = entry = HeldNode(session, arenas, results if keeps else 0)
        self.arenas += entry.arenas
        self.results += entry.results
        while len(self.held) > ENTRIES or self.arenas > ARENAS:
            _, dropped = self.held.popitem(last=False)
            self.arenas -= dropped.arenas
            self.results -= dropped.results
        return made

    def clear(self) -> None:
        """Drop all sessions."""
        self.held.clear()
        self.variants.clear()
        self.arenas = self.results = 0


node_plans = NodePlans()
"""The sessions of the present thread's nodes."""


class PlannedEager(Eager):
    """Computes operators on a device: on the CPU large ones by plans of one node, others by the definitions.

    Attributes:
        trains: whether calls keep what their gradient kernels read.
    """

    def __init__(self, device: Device | None = None, opset: int | None = None, trains: bool = False) -> None:
        super().__init__(device, opset)
        self.trains = trains
        self._plans = self.device.type == "CPU"

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Any]:
        """The outputs of an operator, as `Evaluator.call_version`."""
        if self._plans:
            declaration = operator.declaration
            kernel = _forward_kernel(declaration.domain, declaration.name, operator.version)
            if kernel is not None and _is_large(inputs):
                made = self._by_plan(operator, inputs, attributes, wanted, kernel)
                if made is not None:
                    return made
        return super().call_version(operator, inputs, attributes, wanted)

    def _by_plan(
        self,
        operator: VersionedOperator,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        wanted: Sequence[bool],
        kernel: _Forward,
    ) -> list[Any] | None:
        """The outputs by a plan, in training form if a gradient kernel needs it; None if there is no plan."""
        if any(inputs[i] is not None for i in kernel.host if i < len(inputs)):
            return None
        if self.trains and kernel.hidden and self._has_gradient_kernel(operator, attributes):
            absent = (False,) * (len(operator.schema.outputs) - len(wanted))
            found = self._one(TRAINING, operator, inputs, attributes, (*wanted, *absent, *(True,) * kernel.hidden))
            if found is not None:
                outputs = TrainingOutputs(found[: len(wanted)])
                outputs.hidden = tuple(found[-kernel.hidden :])
                return outputs
        return self._one("", operator, inputs, attributes, wanted)

    def _has_gradient_kernel(self, operator: VersionedOperator, attributes: Mapping[str, Any]) -> bool:
        """Whether a gradient kernel may take a call: only such a call is one in training form, as batch statistics are."""
        kernel = gradient_kernels[operator.declaration.domain, operator.declaration.name]
        return kernel.takes(operator.arguments(attributes), (True,))

    def gradients_of(self, call: DifferentiatedCall) -> list[Any] | None:
        """The gradients of a call by one kernel."""
        operator, hidden = call.operator, call.hidden
        kernel = gradient_kernel(operator)
        if not self._plans or kernel is None or len(hidden) < kernel.hidden:
            return None
        reads = kernel.read(call.dys, call.inputs, call.outputs, hidden)
        if reads is None or not _is_large(reads) or not kernel.takes(operator.arguments(call.attributes), call.needs):
            return None
        return self._one(GRADIENT, operator, reads, call.attributes, call.needs)

    def _one(
        self,
        domain: str,
        operator: VersionedOperator,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        wanted: Sequence[bool],
    ) -> list[Any] | None:
        """The outputs of a node by a plan, None for those that are not wanted; None if there is no plan."""
        form, known = _form(inputs), _plain(attributes)
        if form is None or known is None:
            return None
        key = (domain, operator.declaration.domain, operator.declaration.name, operator.version, known, form, tuple(wanted))
        given = [x for x in inputs if x is not None and x.ndim]
        made = node_plans.run(self.device, key, given, lambda: _graph(domain, operator, attributes, inputs, wanted))
        if made is None:
            return None
        rest = iter(made)
        return [next(rest) if w else None for w in wanted]


class _Forward(NamedTuple):
    """What is known of the kernels of an operator.

    Attributes:
        host: the inputs that are read on the host: with one of them there is no plan, which would have to be for its values.
        hidden: the number of values that a call in training form returns besides its outputs; 0 if there is no such kernel.
    """

    host: tuple[int, ...]
    hidden: int


@cache
def _forward_kernel(domain: str, name: str, version: int) -> _Forward | None:
    """What is known of the kernels of an operator; None if its definition is as fast."""
    from .kernels.rows import reduces  # 20 ms, which a model that is only prepared does not need

    newest, declaration = newest_declaration(domain, name), declarations[domain, name][version]
    if newest is None or newest.traits & CHEAP or declaration.host:
        return None
    gradient = gradient_kernels.get((domain, name))
    hidden = 0
    if domain == "" and gradient is not None and version in gradient.versions and kernels_of(TRAINING, name, version):
        hidden = gradient.hidden
    faster = any(k.on == "onednn" for k in kernels_of(domain, name, version))
    faster |= reduces(domain, name) and "reduction" not in newest.traits
    if not hidden and not faster:
        return None
    return _Forward(tuple(i for i, declared in enumerate(declaration.inputs) if declared.host is not None), hidden)


def _is_large(values: Sequence[Any]) -> bool:
    """Whether the inputs of a node are arrays of more bytes than a definition computes faster."""
    total = 0
    for x in values:
        if x is not None:
            if type(x) is not np.ndarray:
                return False
            total += x.nbytes
    return total > SMALL


class Form(tuple[Any, ...]):
    """The inputs of a node, as a key: (shape, dtype, order in memory), or (dtype, bytes) of a scalar; None for an absent one."""

    __slots__ = ()


def _is_scalar(described: Any) -> bool:
    """Whether an element of a form describes a scalar."""
    return described is not None and len(described) == 2


def _form(values: Sequence[np.ndarray | None]) -> Form | None:
    """The dtypes, shapes and orders in memory of values, and the numbers that scalars hold, which are constants of the plan.

    None if one has other numbers than float32 and integers, or no elements.
    """
    made: list[Any] = []
    for x in values:
        if x is None:
            made.append(None)
            continue
        kind = x.dtype
        if (kind != np.float32 and kind.kind not in "biu") or not x.size:
            return None
        order = None
        if not x.ndim:
            made.append((kind.char, x.tobytes()))
            continue
        if not x.flags.c_contiguous:
            axes = order_of(x.strides)
            order = tuple(axes) if dense(x.shape, x.strides, x.itemsize, axes) else None
        made.append((x.shape, kind.char, order))
    return Form(made)


def _plain(attributes: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The attributes as a key; None if one is not a number, a string or a list of them."""
    made = []
    for name, value in attributes.items():
        if type(value) is list:
            value = tuple(value)
        if value is not None:
            if type(value) not in (int, float, str, bytes, bool, tuple):
                return None
            made.append((name, value))
    made.sort()
    return tuple(made)


def _graph(
    domain: str, operator: VersionedOperator, attributes: Mapping[str, Any], inputs: Sequence[Any], wanted: Sequence[bool]
) -> Graph:
    """The graph of one call.

    Args:
        domain: GRADIENT or TRAINING for a call of these kernels; "" for the operator itself.
        operator: the operator.
        attributes: its attributes.
        inputs: the inputs; None for an absent one.
        wanted: for each output, whether it is returned.
    """
    declaration = operator.declaration
    given = [None if x is None else Value(f"x{i}") for i, x in enumerate(inputs)]
    node = Node(
        op_type=declaration.name,
        inputs=[*given],
        outputs=[Value(f"y{i}") if w else None for i, w in enumerate(wanted)],
        attributes=operator.arguments(attributes),
        domain=domain or declaration.domain,
        name=declaration.name,
        opset=operator.version,
        given=frozenset(attributes),
        operator=operator,
    )
    graph = Graph(declaration.name)
    for value, x in zip(given, inputs, strict=True):
        if value is not None and x.ndim:
            value.declared = Declared(value.name, "tensor", x.dtype, x.shape)
            graph.add_input(value)
        elif value is not None:
            value.constant = x.copy()
            graph.add_initializer(value)
    graph.append(node)
    graph.set_outputs(node.results)
    graph.declared_outputs = tuple(Declared(v.name) for v in node.results)
    return graph
