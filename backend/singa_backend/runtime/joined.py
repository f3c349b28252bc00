"""Elementwise nodes in a row, which a device computes by one kernel: the values between them are in registers only.

`join` replaces such nodes of a graph by one `Joined` node, whatever their shapes: those of a run decide.
What a node computes is the expression that its definition leaves when it is traced (see `elementwise`).
`JoinedPrograms.compute` returns None for inputs of other types, or values that are on the host; the nodes are then computed as
they are.  The results have the bits of the single nodes, whose rounding they keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import limits
from ..devices.device import Device
from ..elementwise.cuda_form import CudaForm, NotWritten, cuda_form
from ..elementwise.expression import FREE, ExpressionTrace, Recorded, Term
from ..elementwise.trace import DTYPES, InputKind, substituted, traced
from ..errors import SonnxError
from ..ir.declaration import has_trait
from ..ir.graph import Node, Value
from ..ir.run_order import RunOrder
from ..ir.versioned import VersionedOperator

_NODES, _INPUTS = 32, 24
"""The maximum numbers of nodes and inputs of a joined node."""

_KEPT = 4096
"""The number of programs that an executor keeps: one for each joined node and combination of shapes."""

_ABSENT: Any = object()
"""In place of a program that was not looked for yet."""

_PROBES = tuple((f"tensor({name})", np.dtype(kind)) for name, kind in (("float", "f"), ("bool", "?"), ("int64", "q")))
"""The dtypes with which it is decided whether nodes are joined."""

_LARGE = 1 << 16
"""Results of at most this many elements are not checked against the limits before they are computed."""

_TRAITS = ("unary", "broadcasting", "norm")
"""The traits of operators that may be elementwise; a norm is if its statistics are given."""


def _traced(node: Node, kinds: tuple[InputKind, ...]) -> Term | None:
    """The expression of a node for inputs of these dtypes and shapes; None if no kernel computes it."""
    assert node.operator is not None
    found = traced(node.operator, node.attributes, kinds, device=True)
    if isinstance(found, str) or found.checks:
        return None
    try:
        cuda_form(found.results)
    except NotWritten:
        return None
    return found.results[0]


def _is_elementwise(node: Node) -> bool:
    """Whether a kernel computes a node for the first dtype that its operator takes, and there is something to compute."""
    operator = node.operator
    if operator is None or node.function is not None or node.captures or not node.input_slots or len(node.output_slots) != 1:
        return False
    if min((*node.input_slots, *node.output_slots), default=-1) < 0:
        return False
    if not any(has_trait(operator.declaration.domain, operator.declaration.name, trait) for trait in _TRAITS):
        return False
    for kinds in _probes(operator, len(node.input_slots)):
        try:
            term = _traced(node, kinds)
        except Exception:  # a body of a custom operator may require other shapes
            return False
        if term is None or term.op not in FREE:
            return term is not None
    return False


def _probes(operator: VersionedOperator, count: int) -> Iterator[tuple[InputKind, ...]]:
    """Inputs of one element: of each dtype of `_PROBES` that the first input takes, and the others if they take it."""
    parameters = operator.schema.inputs
    taken = [parameters[min(place, len(parameters) - 1)].types for place in range(count)]
    for first in _PROBES:
        dtypes = [next((d for name, d in (first, *_PROBES) if name in types), None) for types in taken]
        kinds = tuple(InputKind(d, (1,) if place else (1, 1)) for place, d in enumerate(dtypes) if d is not None)
        if first[0] in taken[0] and len(kinds) == count:
            yield kinds


@dataclass(eq=False)
class Joined(Node):
    """Nodes that are computed together.

    Attributes:
        members: the nodes, in an order in which they can run.
        dies: for each of them, the slots that are not used after it.
    """

    members: tuple[Node, ...] = ()
    dies: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self.members)

    def each(self, inputs: Sequence[Any], visit: Callable[[Node, list[Any]], Sequence[Any]]) -> list[Any]:
        """Compute one node after the other.

        Args:
            inputs: the inputs.
            visit: computes a node.

        Returns:
            The outputs.
        """
        values = dict(zip(self.input_slots, inputs, strict=True))
        for member, dies in zip(self.members, self.dies, strict=True):
            made = visit(member, [values[s] for s in member.input_slots])
            values[member.output_slots[0]] = made[0]
            for slot in dies:
                del values[slot]
        return [values[s] for s in self.output_slots]


class _OpenGroup:
    """Nodes that may be joined, until a node that is not elementwise reads one of their results."""

    def __init__(self) -> None:
        self.members: list[tuple[int, Node]] = []
        self.made: set[int] = set()
        self.reads: set[int] = set()

    def fits(self, others: Sequence[_OpenGroup], node: Node) -> bool:
        """Whether this group with these and a node is small enough."""
        groups = (self, *others)
        made = set().union(*(g.made for g in groups))
        reads = set(node.input_slots).union(*(g.reads for g in groups)) - made
        return sum(len(g.members) for g in groups) < _NODES and len(reads) <= _INPUTS

    def add(self, others: Sequence[_OpenGroup], at: int, node: Node) -> None:
        """Add the nodes of other groups, and a node that reads their results."""
        for g in others:
            self.members += g.members
            self.made |= g.made
            self.reads |= g.reads
        self.members.append((at, node))
        self.made.add(node.output_slots[0])
        self.reads = (self.reads | set(node.input_slots)) - self.made


def join(program: RunOrder) -> RunOrder:
    """Return a program in which elementwise nodes that read each other's results are joined.

    Args:
        program: the program.

    Returns:
        A program with the same slots; the same one if no nodes are joined.
    """
    groups: list[_OpenGroup] = []
    open_: dict[int, _OpenGroup] = {}  # slot -> the group that makes its value
    for at, node in enumerate(program.nodes):
        reads = (*node.input_slots, *(v.slot for v in node.captures.values()))
        near = list({id(g): g for s in reads if (g := open_.get(s)) is not None}.values())
        if not _is_elementwise(node):
            _close(open_, near)
            continue
        if near and near[0].fits(near[1:], node):
            group, *others = near
            for g in others:
                groups.remove(g)
        else:
            _close(open_, near)
            group, others = _OpenGroup(), []
            groups.append(group)
        group.add(others, at, node)
        open_.update(dict.fromkeys(group.made, group))
    groups = [g for g in groups if len(g.members) > 1]
    if not groups:
        return program
    last = {max(g.members, key=lambda m: m[0])[0]: g for g in groups}
    within = {at for g in groups for at, _ in g.members}
    used = uses(program)
    nodes = [
        node if at not in within else _joined(last[at], used)
        for at, node in enumerate(program.nodes)
        if at not in within or at in last
    ]
    return RunOrder(program.graph, nodes)


def _close(open_: dict[int, _OpenGroup], groups: Sequence[_OpenGroup]) -> None:
    for group in groups:
        for slot in group.made:
            del open_[slot]


def uses(program: RunOrder) -> dict[int, set[int]]:
    """The ids of the nodes that read each slot; that of the graph if it is an output."""
    found: dict[int, set[int]] = {slot: {id(program.graph)} for slot in program.output_slots}
    for node in program.nodes:
        for slot in (*node.input_slots, *(v.slot for v in node.captures.values())):
            found.setdefault(slot, set()).add(id(node))
    return found


def _joined(group: _OpenGroup, used: dict[int, set[int]]) -> Joined:
    """The node in place of a group."""
    members = [node for _, node in sorted(group.members, key=lambda m: m[0])]
    own = {id(n) for n in members}
    values: dict[int, Value] = {v.slot: v for n in members for v in (*n.inputs, *n.outputs) if v is not None}
    inputs = tuple(dict.fromkeys(s for n in members for s in n.input_slots if s not in group.made))
    outputs = tuple(
        n.output_slots[0] for n in members if used.get(n.output_slots[0], set()) - own or n.output_slots[0] not in used
    )
    last = {s: i for i, n in enumerate(members) for s in (*n.input_slots, *n.output_slots) if s not in outputs}
    dies = tuple(tuple(s for s, at in last.items() if at == i) for i in range(len(members)))
    first = members[0]
    return Joined(
        "+".join(n.op_type for n in members), [values[s] for s in inputs], [values[s] for s in outputs],
        domain=first.domain, name=first.name, opset=first.opset, members=tuple(members), dies=dies,
    )  # fmt: skip


@dataclass(slots=True)
class JoinedStep:
    """One kernel.

    Attributes:
        kernel: the kernel.
        reads: the operands: the index of a value, and the shape to which it is brought, None for its own.
        writes: the number of results, which become the next values.
        checked: the shape and the largest dtype of the results if they must be admitted first; None otherwise.
        text: what the kernel computes: y0, y1, ... of a0, a1, ...
        shape: the shape of the results.
        dtype: of all operands and results; None if they differ, or if an operand is brought to another shape.
    """

    kernel: Any
    reads: tuple[tuple[int, tuple[int, ...] | None], ...]
    writes: int
    checked: tuple[tuple[int, ...], np.dtype[Any]] | None
    text: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None


@dataclass(slots=True)
class JoinedProgram:
    """How a joined node is computed for inputs of some shapes and types.

    Attributes:
        on_host: the members whose inputs are numbers of the host, and the indices of these.
        numbers: the indices of all numbers of the host.
        constants: the numbers of expressions that are operands, which follow those of the host.
        steps: the kernels.
        outputs: the index of each output.
    """

    on_host: list[tuple[Node, tuple[int, ...]]]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    steps: list[JoinedStep]
    outputs: tuple[int, ...]

    def values(self, inputs: Sequence[Any], visit: Visit) -> list[Any]:
        """The inputs, and what members compute on the host; numbers of the host as Python's."""
        found = list(inputs)
        for member, reads in self.on_host:
            found.append(visit(member, [found[i] for i in reads])[0])
        for i in self.numbers:
            found[i] = found[i].item()
        return [*found, *self.constants]


Visit = Callable[[Node, list[Any]], Sequence[Any]]
"""Computes a node with these inputs."""

Known = Callable[[Any], bool]
"""Whether the values of an array of the device are known on the host."""


class JoinedPrograms:
    """The kernels of the joined nodes of an executor.

    Args:
        device: a device that has kernels.
    """

    def __init__(self, device: Device) -> None:
        self._xp = device.xp
        self._array = device.xp.ndarray
        self._found: dict[Any, Any] = {}  # a node, and its inputs -> a JoinedProgram, or None

    def compute(self, node: Joined, inputs: Sequence[Any], known: Known, visit: Visit) -> list[Any] | None:
        """Compute a joined node.

        Args:
            node: the node.
            inputs: its inputs.
            known: whether the values of an array of the device are known on the host.
            visit: computes a member whose inputs are all on the host.

        Returns:
            The outputs, on the device; None if the nodes must be computed one after the other.
        """
        found = self.found_for(node, inputs, known)
        if found is None:
            return None
        values = found.values(inputs, visit)
        try:
            for step in found.steps:
                if step.checked is not None:
                    limits.admit(*step.checked)
                made = step.kernel(*[values[i] if shape is None else values[i].reshape(shape) for i, shape in step.reads])
                if step.writes == 1:
                    values.append(made)
                else:
                    values.extend(made)
        except (SonnxError, MemoryError):  # the node that fails reports it
            return None
        return [values[i] for i in found.outputs]

    def single(self, node: Joined, inputs: Sequence[Any], known: Known, visit: Visit) -> tuple[JoinedStep, list[Any]] | None:
        """The only kernel of a joined node, with its operands; None if there are several."""
        found = self.found_for(node, inputs, known)
        if found is None or len(found.steps) != 1 or found.steps[0].checked is not None:
            return None
        values = found.values(inputs, visit)
        return found.steps[0], [values[i] for i, _ in found.steps[0].reads]

    def found_for(self, node: Joined, inputs: Sequence[Any], known: Known) -> JoinedProgram | None:
        """The kernels for these inputs."""
        array = self._array
        key: list[Any] = [node]
        for v in inputs:
            if v.__class__ is array:
                key.append((v.shape, v.dtype, known(v)))
            elif isinstance(v, np.ndarray) and v.size == 1:
                key.append((v.shape, v.dtype, None))
            else:
                return None
        at = tuple(key)
        found: JoinedProgram | None = self._found.get(at, _ABSENT)
        if found is _ABSENT:
            if len(self._found) >= _KEPT:
                self._found.clear()
            try:
                found = self._found[at] = self._program(node, at[1:])
            except SonnxError:  # such as a limit of this call: the node that fails reports it
                return None
        return found

    def _program(self, node: Joined, given: Sequence[Any]) -> JoinedProgram | None:
        """The kernels for inputs of these shapes and types; None if the nodes must be computed one after the other."""
        plan = _JoinedPlan(node, given)
        if not plan.read() or plan.on_host.intersection(node.output_slots):
            return None
        place: dict[Any, int] = {s: i for i, s in enumerate(node.input_slots)}
        on_host = []
        for n in plan.numbers:
            on_host.append((n, tuple(place[s] for s in n.input_slots)))
            place[n.output_slots[0]] = len(place)
        place |= {key: len(place) + i for i, key in enumerate(plan.constants)}
        steps: list[JoinedStep] = []
        for kernel in plan.kernels():
            made = self._step(plan, kernel, place)
            if made is None:
                return None
            steps.append(made)
        numbers = tuple(place[s] for s in plan.scalars)
        return JoinedProgram(on_host, numbers, tuple(plan.constants.values()), steps, tuple(place[s] for s in node.output_slots))

    def _step(self, plan: _JoinedPlan, members: Sequence[Node], place: dict[Any, int]) -> JoinedStep | None:
        """The kernel of some members, whose results get the next places."""
        form, sources, outputs = plan.form(members)
        shape, dtypes = plan.kinds[members[-1].output_slots[0]].shape, [plan.kinds[s].dtype for s in outputs]
        operands = list(zip(sources, form.leaves, strict=True))
        arrays = [t for s, t in operands if t.op != "const" and s not in plan.scalars]
        if not arrays or np.broadcast_shapes(*(t.shape for t in arrays)) != shape:
            return None
        for slot in outputs:
            place[slot] = len(place)
        reads = tuple((place[s], t.shape if t.op == "reshape" and s not in plan.scalars else None) for s, t in operands)
        takes = ", ".join(f"{t.dtype.name} a{i}" for i, t in enumerate(form.leaves))
        kernel = self._xp.elementwise(takes, ", ".join(f"{d.name} y{i}" for i, d in enumerate(dtypes)), form.text)
        size = math.prod(shape)
        grows = size > _LARGE and all(t.size < size for t in arrays)
        checked = (shape, max(dtypes, key=lambda d: d.itemsize)) if grows else None
        alike = not any(view for _, view in reads) and len({*dtypes, *(t.dtype for t in form.leaves)}) == 1
        return JoinedStep(kernel, reads, len(outputs), checked, form.text, shape, dtypes[0] if alike else None)


def _constant(t: Term) -> Any:
    """What equal numbers have in common."""
    return t.dtype, t.extra


class _JoinedPlan:
    """The expressions of the members of a joined node, and its division into kernels.

    Attributes:
        kinds: the dtype and the shape of each slot.
        scalars: the slots of numbers of the host.
        numbers: the members that compute some of them.
        terms: the expression of each member that a kernel computes, by the id of the member.
        brought: the slots whose values are brought to another shape.
        constants: the numbers of the expressions that are operands.
    """

    def __init__(self, node: Joined, given: Sequence[Any]) -> None:
        self.node = node
        self.kinds: dict[int, InputKind] = {}
        self.scalars: set[int] = set()
        self.numbers: list[Node] = []
        self.terms: dict[int, Term] = {}
        self.brought: set[int] = set()
        self.constants: dict[Any, Any] = {}
        self.on_host: set[int] = set()
        for slot, (shape, dtype, known) in zip(node.input_slots, given, strict=True):
            self.kinds[slot] = InputKind(dtype, shape)
            if known is None:
                self.scalars.add(slot)
            if known is not False:
                self.on_host.add(slot)

    def read(self) -> bool:
        """Find the expressions; False if a member must be computed on the host, or fails."""
        if any(k.dtype not in DTYPES for k in self.kinds.values()):
            return False
        for n in self.node.members:
            term = _traced(n, tuple(self.kinds[s] for s in n.input_slots))
            if term is None:
                return False
            leaves, slot = cuda_form([term]).leaves, n.output_slots[0]
            if self.on_host.issuperset(n.input_slots):
                if n.domain or term.size != 1 or any(t.size != 1 for t in leaves):
                    return False
                self.numbers.append(n)
                self.scalars.add(slot)
                self.on_host.add(slot)
            self.kinds[slot] = InputKind(term.dtype, term.shape)
            self.terms[id(n)] = term
            self.brought |= {n.input_slots[t.args[0].extra] for t in leaves if t.op == "reshape"}
            self.constants |= {_constant(t): t.number.item() for t in leaves if t.op == "const"}
        return True

    def kernels(self) -> list[list[Node]]:
        """The members of each kernel: one that is read by one kernel only, and is stored in its shape or not at all, is in it.

        A result that is brought to another shape is stored by a kernel of its own.
        """
        readers: dict[int, list[Node]] = {}
        for n in self.node.members:
            for s in n.input_slots:
                readers.setdefault(s, []).append(n)
        outputs = set(self.node.output_slots)
        of: dict[int, list[Node]] = {}  # id of a member -> the members of its kernel
        shape_of: dict[int, tuple[int, ...]] = {}  # id of that list -> the shape of its results
        made: list[list[Node]] = []
        for n in reversed(self.node.members):
            slot = n.output_slots[0]
            if slot in self.scalars:
                continue
            there = {id(of[id(r)]): of[id(r)] for r in readers.get(slot, ()) if id(r) in of}
            kernel = next(iter(there.values())) if len(there) == 1 else None
            if kernel is None or slot in self.brought or (slot in outputs and self.kinds[slot].shape != shape_of[id(kernel)]):
                kernel = []
                made.append(kernel)
                shape_of[id(kernel)] = self.kinds[slot].shape
            kernel.insert(0, n)
            of[id(n)] = kernel
        return made[::-1]

    def form(self, members: Sequence[Node]) -> tuple[CudaForm, list[Any], list[int]]:
        """What the kernel of some members computes, the slot or the constant of each operand, and the slots of the results."""
        whole = ExpressionTrace(device=True)
        values: dict[int, Recorded] = {}
        read: list[int] = []
        for n in members:
            for slot in n.input_slots:
                if slot not in values:
                    values[slot] = whole.input(self.kinds[slot].dtype, self.kinds[slot].shape)
                    read.append(slot)
            (values[n.output_slots[0]],) = substituted(whole, [self.terms[id(n)]], [values[s] for s in n.input_slots])
        inside = {n.output_slots[0] for n in members}
        outputs = [n.output_slots[0] for n in members if self._is_stored(n, inside)]
        form = cuda_form([values[s].term for s in outputs])
        inputs = [t.args[0] if t.op == "reshape" else t for t in form.leaves]
        return form, [_constant(t) if t.op == "const" else read[t.extra] for t in inputs], outputs

    def _is_stored(self, member: Node, inside: set[int]) -> bool:
        """Whether the result of a member is read outside its kernel."""
        slot = member.output_slots[0]
        return slot in self.node.output_slots or any(
            slot in n.input_slots for n in self.node.members if n.output_slots[0] not in inside
        )
