"""Elementwise nodes in a row, which a device computes by one kernel: the values between them are in registers only.

`join` replaces such nodes of a graph by one `Joined` node, whatever their shapes: those of a run decide.
`JoinedPrograms.compute` returns None for inputs of other types, or values that are on the host; the nodes are then computed as
they are.  The results have the bits of the single nodes, whose rounding they keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import limits
from ..devices.device import Device
from ..errors import SonnxError
from ..ir.declaration import newest_declaration
from ..ir.graph import Node, Value
from ..ir.run_order import RunOrder

_NODES, _INPUTS = 32, 24
"""The maximum numbers of nodes and inputs of a joined node."""

_KEPT = 4096
"""The number of programs that an executor keeps: one for each joined node and combination of shapes."""

_ABSENT: Any = object()
"""In place of a program that was not looked for yet."""

_LARGE = 1 << 16
"""Results of at most this many elements are not checked against the limits before they are computed."""

_BOOL = np.dtype(np.bool_)
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

_NORMALIZED = "({0} - {3}) * ({1} / T(sqrt({4} + T({epsilon})))) + {2}"
"""BatchNormalization with given statistics, as fused.py computes it; the operators of one element declare their expression."""

_TESTS = frozenset({"Greater", "Less"})


def _expression(node: Node) -> str | None:
    """The expression of a node; None if it is not elementwise, or of an old version."""
    operator = node.operator
    if operator is None or node.domain not in ("", "ai.onnx") or not operator.is_modern:
        return None
    if min(node.input_slots, default=-1) < 0 or len(node.output_slots) != 1 or node.output_slots[0] < 0:
        return None
    if node.op_type == "BatchNormalization":
        if operator.version < 9 or node.attributes.get("training_mode"):
            return None
        epsilon = float(node.attributes.get("epsilon", 1e-5))
        return _NORMALIZED.replace("{epsilon}", repr(epsilon)) if math.isfinite(epsilon) else None
    declared = newest_declaration("", node.op_type)
    if declared is None or node.given or (node.op_type == "Clip" and len(node.input_slots) != 3):
        return None
    return declared.element or None


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
        if _expression(node) is None:
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
        checked: the shape of the results if it must be admitted first; None otherwise.
        text: what the kernel computes: y0, y1, ... of a0, a1, ...
        shape: the shape of the results.
        is_plain: whether all operands and results are floats, and no operand is brought to another shape.
    """

    kernel: Any
    reads: tuple[tuple[int, tuple[int, ...] | None], ...]
    writes: int
    checked: tuple[int, ...] | None
    text: str
    shape: tuple[int, ...]
    is_plain: bool


@dataclass(slots=True)
class JoinedProgram:
    """How a joined node is computed for inputs of some shapes and types.

    Attributes:
        dtype: the dtype of the floats.
        on_host: the members whose inputs are numbers of the host, and the indices of these.
        numbers: the indices of all numbers of the host.
        steps: the kernels.
        outputs: the index of each output.
    """

    dtype: np.dtype[Any]
    on_host: list[tuple[Node, tuple[int, ...]]]
    numbers: tuple[int, ...]
    steps: list[JoinedStep]
    outputs: tuple[int, ...]

    def values(self, inputs: Sequence[Any], visit: Visit) -> list[Any]:
        """The inputs, and what members compute on the host; numbers of the host as Python's."""
        found = list(inputs)
        for member, reads in self.on_host:
            found.append(visit(member, [found[i] for i in reads])[0])
        for i in self.numbers:
            found[i] = found[i].item()
        return found


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
                    limits.admit(step.checked, found.dtype)
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
            found = self._found[at] = self._program(node, at[1:])
        return found

    def _program(self, node: Joined, given: Sequence[Any]) -> JoinedProgram | None:
        """The kernels for inputs of these shapes and types; None if the nodes must be computed one after the other."""
        dtypes = {dtype for _, dtype, _ in given} - {_BOOL}
        if len(dtypes) != 1 or not dtypes <= set(_FLOATS):
            return None
        plan = _JoinedPlan(node, given)
        if not plan.read() or plan.on_host.intersection(node.output_slots):
            return None
        place = {s: i for i, s in enumerate(node.input_slots)}
        on_host = []
        for n in plan.numbers:
            on_host.append((n, tuple(place[s] for s in n.input_slots)))
            place[n.output_slots[0]] = len(place)
        steps: list[JoinedStep] = []
        for kernel in plan.kernels():
            made = self._step(plan, kernel, place)
            if made is None:
                return None
            steps.append(made)
        numbers = tuple(place[s] for s in plan.scalars)
        return JoinedProgram(dtypes.pop(), on_host, numbers, steps, tuple(place[s] for s in node.output_slots))

    def _step(self, plan: _JoinedPlan, members: Sequence[Node], place: dict[int, int]) -> JoinedStep | None:
        """The kernel of some members, whose results get the next places."""
        inside = {n.output_slots[0] for n in members}
        shape = plan.shapes[members[-1].output_slots[0]]
        operands: dict[tuple[int, tuple[int, ...] | None], str] = {}
        lines = []
        for n in members:
            args = []
            for i, slot in enumerate(n.input_slots):
                view = plan.views.get((id(n), i))
                args.append(f"v{slot}" if slot in inside else operands.setdefault((slot, view), f"a{len(operands)}"))
            kind = "bool" if plan.types[n.output_slots[0]] == _BOOL else "T"
            text = _expression(n)
            assert text is not None
            lines.append(f"const {kind} v{n.output_slots[0]} = {text.format(*args)};")
        arrays = [view or plan.shapes[s] for s, view in operands if s not in plan.scalars]
        has_dtype = any(s not in plan.scalars and plan.types[s] != _BOOL for s, _ in operands)  # an array decides what T is
        if not has_dtype or np.broadcast_shapes(*arrays) != shape:
            return None
        outputs = [n.output_slots[0] for n in members if plan.stored(n, inside)]
        results = []
        for i, slot in enumerate(outputs):
            lines.append(f"y{i} = v{slot};")
            results.append(f"{'bool' if plan.types[slot] == _BOOL else 'T'} y{i}")
        takes = [f"{'bool' if plan.types[s] == _BOOL else 'T'} {name}" for (s, _), name in operands.items()]
        for slot in outputs:
            place[slot] = len(place)
        size = math.prod(shape)
        grows = size > _LARGE and all(math.prod(a) < size for a in arrays)
        text = _numbered("\n".join(lines), members)
        kernel = self._xp.elementwise(", ".join(takes), ", ".join(results), text)
        reads = tuple((place[s], view) for s, view in operands)
        plain = all(t.startswith("T ") for t in (*takes, *results)) and not any(view for _, view in reads)
        return JoinedStep(kernel, reads, len(outputs), shape if grows else None, text, shape, plain)


def _numbered(text: str, members: Sequence[Node]) -> str:
    """A text in which values have numbers in their order, so that equal members of other nodes have an equal kernel."""
    numbers = {f"v{n.output_slots[0]}": f"t{i}" for i, n in enumerate(members)}
    for old, new in sorted(numbers.items(), key=lambda item: -len(item[0])):
        text = text.replace(old, new)
    return text


class _JoinedPlan:
    """The shapes and types of the values of a joined node, and its division into kernels.

    Attributes:
        shapes: of each slot.
        types: the dtype of each slot.
        scalars: the slots of numbers of the host.
        numbers: the members that compute some of them.
        views: the shape to which an input of a member is brought, by the id of the member and the number of the input.
    """

    def __init__(self, node: Joined, given: Sequence[Any]) -> None:
        self.node = node
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.types: dict[int, np.dtype[Any]] = {}
        self.scalars: set[int] = set()
        self.numbers: list[Node] = []
        self.views: dict[tuple[int, int], tuple[int, ...]] = {}
        self.on_host: set[int] = set()
        for slot, (shape, dtype, known) in zip(node.input_slots, given, strict=True):
            self.shapes[slot], self.types[slot] = shape, dtype
            if known is None:
                self.scalars.add(slot)
            if known is not False:
                self.on_host.add(slot)

    def read(self) -> bool:
        """Find the shapes and types of results; False if a member must be computed on the host, or fails."""
        for n in self.node.members:
            if self.scalars.issuperset(n.input_slots):
                self.numbers.append(n)
                self.scalars.add(n.output_slots[0])
                self.on_host.add(n.output_slots[0])
            elif self.on_host.issuperset(n.input_slots):
                return False
            types = [self.types[s] for s in n.input_slots]
            if n.op_type == "Where":
                if types[0] != _BOOL:
                    return False
                types = types[1:]
            if any(t == _BOOL or t != types[0] for t in types):
                return False
            shapes = [self.shapes[s] for s in n.input_slots]
            if n.op_type == "Clip" and any(shapes[1:]):
                return False
            if n.op_type == "BatchNormalization":
                if len(shapes[0]) < 2 or any(s != shapes[0][1:2] for s in shapes[1:]) or self.scalars & set(n.input_slots):
                    return False
                wide = (shapes[0][1], *(1,) * (len(shapes[0]) - 2))
                self.views |= {(id(n), i): wide for i in range(1, 5)}
                shapes = shapes[:1]
            try:
                self.shapes[n.output_slots[0]] = np.broadcast_shapes(*shapes)
            except ValueError:
                return False
            self.types[n.output_slots[0]] = _BOOL if n.op_type in _TESTS else types[0]
        return True

    def kernels(self) -> list[list[Node]]:
        """The members of each kernel: one that is read by one kernel only, and is stored in its shape or not at all, is in it.

        A result that is brought to another shape is stored by a kernel of its own.
        """
        readers: dict[int, list[Node]] = {}
        brought = set()
        for n in self.node.members:
            for i, s in enumerate(n.input_slots):
                readers.setdefault(s, []).append(n)
                if (id(n), i) in self.views:
                    brought.add(s)
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
            if kernel is None or slot in brought or (slot in outputs and self.shapes[slot] != shape_of[id(kernel)]):
                kernel = []
                made.append(kernel)
                shape_of[id(kernel)] = self.shapes[slot]
            kernel.insert(0, n)
            of[id(n)] = kernel
        return made[::-1]

    def stored(self, member: Node, inside: set[int]) -> bool:
        """Whether the result of a member is read outside its kernel."""
        slot = member.output_slots[0]
        return slot in self.node.output_slots or any(
            slot in n.input_slots for n in self.node.members if n.output_slots[0] not in inside
        )
