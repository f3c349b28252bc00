"""Single operators by plans: the interpreter of the tape, which computes large nodes and their gradients with kernels.

A node that is computed eagerly is a graph of one call, and has a session of its own, which is kept for equal calls: the operator,
its attributes, and the dtypes, shapes and order in memory of its inputs.  The gradient of a call is one call of a gradient kernel,
if there is one, which reads what the forward call in training form returned besides its outputs.  Everything else is computed by
the definitions: small nodes, whose definition takes less time than a plan, and those that a kernel refuses.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from . import dtypes, limits
from .devices.device import Device
from .errors import SonnxError
from .interpreters.base import DifferentiatedCall
from .interpreters.eager import Eager
from .ir.declaration import REQUIRED, Declaration
from .ir.graph import ABSENT, Graph, Node
from .ir.versioned import VersionedOperator
from .kernels.options import options
from .kernels.table import GRADIENT, TRAINING, GradientKernel, gradient_kernels, kernels_of
from .kernels.values import dense, order_of
from .proto.values import Value
from .session import Session

SMALL = 1 << 13
"""The bytes of the inputs of a node up to which its definition is at least as fast as a plan."""

CHEAP = frozenset(("arithmetic", "broadcasting", "moves", "keeps_weights"))
"""The traits of operators whose definition is one pass of NumPy over the values."""

ENTRIES = 1024
"""The number of nodes whose sessions a thread keeps."""

MEMORY = 256 << 20
"""The bytes that the plans of a thread may keep; those that were used the longest time ago are dropped."""

REFUSED: Any = object()


class Made(list[Any]):
    """The outputs of a call in training form.

    Attributes:
        hidden: the values that its gradient kernel reads.
    """

    hidden: tuple[Any, ...] = ()


@dataclass(eq=False, slots=True)
class Planned:
    """A node with a session.

    Attributes:
        session: the session.
        nbytes: what its plan keeps.
    """

    session: Session
    nbytes: int = 0


class NodePlans(threading.local):
    """The sessions of a thread's nodes, by what they compute.

    Attributes:
        held: the sessions; REFUSED for a node that no kernel takes.
        nbytes: the bytes that their plans keep.
    """

    def __init__(self) -> None:
        self.held: OrderedDict[Any, Planned] = OrderedDict()
        self.nbytes = 0

    def run(self, device: Device, key: Any, inputs: Sequence[np.ndarray], make: Any) -> list[Any] | None:
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
        if found is REFUSED:
            return None
        if found is None:
            return self._first(device, key, inputs, make)
        self.held.move_to_end(key)
        return found.session.by_plan(inputs)

    def _first(self, device: Device, key: Any, inputs: Sequence[np.ndarray], make: Any) -> list[Any] | None:
        session = Session(make(), device, options(optimize=1, ordered=True), limits.Limits())
        try:
            made = session.by_plan(inputs)
        except (SonnxError, MemoryError):  # the definition reports the error
            made = None
        planned = Planned(session, session.plan_bytes)
        fits = made is not None and planned.nbytes <= MEMORY // 4
        self.held[key] = planned if fits else REFUSED
        self.nbytes += planned.nbytes if fits else 0
        while len(self.held) > ENTRIES or self.nbytes > MEMORY:
            _, dropped = self.held.popitem(last=False)
            self.nbytes -= 0 if dropped is REFUSED else dropped.nbytes
        return made

    def clear(self) -> None:
        """Drop all sessions."""
        self.held.clear()
        self.nbytes = 0


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
        form, known = _form(inputs), _plain(attributes)
        if form is None or known is None or any(inputs[i] is not None for i in kernel.host if i < len(inputs)):
            return None
        given = [x for x in inputs if x is not None]
        if self.trains and kernel.hidden:
            key = (TRAINING, operator.declaration.domain, operator.declaration.name, operator.version, known, form, tuple(wanted))
            found = node_plans.run(
                self.device, key, given, lambda: _graph(TRAINING, operator, attributes, inputs, [*wanted, *[True] * kernel.hidden])
            )
            if found is not None:
                return _training_form(found, wanted)
        key = ("", operator.declaration.domain, operator.declaration.name, operator.version, known, form, tuple(wanted))
        made = node_plans.run(self.device, key, given, lambda: _graph("", operator, attributes, inputs, wanted))
        return None if made is None else _spread(made, wanted)

    def gradients_by_kernel(self, call: DifferentiatedCall, needs: Sequence[bool], hidden: Sequence[Any]) -> list[Any] | None:
        if not self._plans:
            return None
        operator = call.operator
        declaration = operator.declaration
        kernel = gradient_kernels.get((declaration.domain, declaration.name))
        if kernel is None or operator.version not in kernel.versions or len(hidden) < kernel.hidden:
            return None
        reads = _reads(kernel, call, hidden)
        known = _plain(call.attributes)
        if reads is None or known is None or not _is_large(reads):
            return None
        form = _form(reads)
        if form is None or not kernel.takes(_with_defaults(declaration, call.attributes), needs):
            return None
        given = [x for x in reads if x is not None]
        key = (GRADIENT, declaration.domain, declaration.name, operator.version, known, form, tuple(needs))
        made = node_plans.run(
            self.device, key, given, lambda: _graph(GRADIENT, operator, call.attributes, reads, needs)
        )
        return None if made is None else _spread(made, needs)


@dataclass(frozen=True, slots=True)
class _Forward:
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
    from .ir.declaration import declarations, newest_declaration

    newest, declaration = newest_declaration(domain, name), declarations[domain, name][version]
    if newest is None or newest.traits & CHEAP or declaration.host:
        return None
    gradient = gradient_kernels.get((domain, name))
    trains = domain == "" and gradient is not None and version in gradient.versions and gradient.hidden
    hidden = gradient.hidden if trains and kernels_of(TRAINING, name, version) else 0
    if not hidden and not any(k.on == "onednn" for k in kernels_of(domain, name, version)):
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


def _form(values: Sequence[np.ndarray | None]) -> tuple[Any, ...] | None:
    """The dtypes, shapes and orders in memory of values; None if one has no float32 or integers, or no elements."""
    made: list[Any] = []
    for x in values:
        if x is None:
            made.append(None)
            continue
        kind = x.dtype
        if (kind != np.float32 and kind.kind not in "biu") or not x.size:
            return None
        order = None
        if not x.flags.c_contiguous:
            axes = order_of(x.strides)
            order = tuple(axes) if dense(x.shape, x.strides, x.itemsize, axes) else None
        made.append((x.shape, kind.char, order))
    return tuple(made)


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


def _with_defaults(declaration: Declaration, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a call as kernels expect them, defaults included."""
    known = {n: (None if v is REQUIRED else v) for n, v in declaration.attributes.items()}
    given = declaration.stored({n: v for n, v in attributes.items() if v is not None and n in known})
    return known | {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}


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
    given = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    made = [f"y{i}" if w else "" for i, w in enumerate(wanted)]
    slots = {name: slot for slot, name in enumerate(filter(None, (*given, *made)))}
    node = Node(
        name=declaration.name,
        op_type=declaration.name,
        domain=domain or declaration.domain,
        opset=operator.version,
        inputs=tuple(slots.get(n, ABSENT) for n in given),
        outputs=tuple(slots.get(n, ABSENT) for n in made),
        input_names=tuple(given),
        output_names=tuple(made),
        attributes=_with_defaults(declaration, attributes),
        given=frozenset(attributes),
        operator=operator,
    )
    types = [Value(n, "tensor", x.dtype, x.shape) for n, x in zip(given, inputs, strict=True) if n]
    return Graph(declaration.name, tuple(types), tuple(Value(n) for n in made if n), (node,), {}, slots)


def _spread(made: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """The results, with None for those that are not wanted."""
    rest = iter(made)
    return [next(rest) if w else None for w in wanted]


def _training_form(made: Sequence[Any], wanted: Sequence[bool]) -> Made:
    """The results of a call in training form: its outputs, and what its gradient kernel reads."""
    count = sum(wanted)
    outputs = Made(_spread(made[:count], wanted))
    outputs.hidden = tuple(made[count:])
    return outputs


def _reads(kernel: GradientKernel, call: DifferentiatedCall, hidden: Sequence[Any]) -> list[Any] | None:
    """The inputs of a gradient kernel; None if it needs one that there is not, or does not read a gradient."""
    groups = {"dy": call.dys, "x": call.inputs, "y": call.outputs, "h": hidden}
    made = []
    for what in kernel.reads:
        kind = what.rstrip("0123456789?")
        at, group = int(what[len(kind) :].rstrip("?")), groups[kind]
        value = group[at] if at < len(group) else None
        if value is not None and type(value) is not np.ndarray:
            return None
        if value is None and not what.endswith("?"):
            return None
        made.append(value)
    read = {int(what[2:].rstrip("?")) for what in kernel.reads if what.startswith("dy")}
    return None if any(dy is not None and i not in read for i, dy in enumerate(call.dys)) else made
