"""Runs that repeat an earlier one on a device: what that run decided is kept, so that each step is one call.

The signature of a run has the shapes, strides and dtypes of its inputs on the device, and the values of those on the host.
The second run of a signature is recorded: where each node computes, its values on the host, the arguments of its body, the
kernels of joined nodes.  Later runs call the same bodies and kernels without deciding again.  A result is compared with that of
before; if it has another type, or if a step raises, the nodes from there on decide as in a first run, which reports the error.
Limits are kept: a run is repeated only if all that the recorded one made and executed is left of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..devices.device import Device
from ..devices.graphs import Tables
from ..ir.graph import Node
from ..ir.run_order import RunOrder
from ..ir.versioned import VersionedOperator
from ..limits import Budget
from .placement import SMALL

if TYPE_CHECKING:
    from .joined import Joined, JoinedProgram, Known

_KEPT = 16
"""The number of signatures that an executor remembers."""

_SEEN: Any = object()
"""In place of the record of a signature of one run."""

result_type = attrgetter("__class__", "shape", "strides", "dtype")
"""What stays the same of a result."""

Visit = Callable[[Node, list[Any], list[Any]], Sequence[Any]]
"""Computes a node with these inputs in a frame."""

CapturedRun: TypeAlias = Any
"""A run as graphs of the device (captured.py)."""

Locate = Callable[[Node, list[Any]], None]
"""Is called with a node that has added checks, and its inputs."""


def signature(xp: Any, inputs: Sequence[Any]) -> Any:
    """What decides how a run computes: the types of arrays on the device, and values on the host; None if it cannot be kept."""
    key: list[Any] = []
    array = xp.ndarray
    for v in inputs:
        if v.__class__ is array:
            key.append(result_type(v))
        elif v is None:
            key.append(None)
        elif v.__class__ is np.ndarray and v.size <= SMALL and v.dtype.kind in "biuf":
            key.append((v.shape, v.dtype, v.tobytes()))
        else:
            return None
    return tuple(key)


class RunRecords:
    """The records of an executor, by the signatures of the inputs.

    Attributes:
        owned: the ids of the arguments on the device that records keep.
        latest: the record whose graph has computed the last run, if it needs nothing else; None otherwise.
    """

    def __init__(self) -> None:
        self.owned: frozenset[int] = frozenset()
        self.latest: RunRecord | None = None
        self._found: dict[Any, Any] = {}  # a signature -> a RunRecord, _SEEN, or None if its runs differ

    def find(self, key: Any) -> tuple[RunRecord | None, bool]:
        """The record of a signature, and whether this run is the one to record."""
        found = self._found.get(key, self)
        if found is _SEEN:
            return None, True
        if found is not self:
            return found, False
        for old in list(self._found)[: max(0, len(self._found) - _KEPT + 1)]:
            if self._found.pop(old, None) is self.latest:  # another thread may have removed it
                self.latest = None
        self._found[key] = _SEEN
        return None, False

    def keep(self, key: Any, record: RunRecord | None) -> None:
        """Keep the record of a signature; None if its runs differ."""
        self._found[key], self.latest = record, None
        self.owned = frozenset(id(v) for r in self._all() for v in r.frame[r.graph.size :])

    def _all(self) -> list[RunRecord]:
        return [r for r in list(self._found.values()) if isinstance(r, RunRecord)]

    def described(self, key: Any = None) -> tuple[str, ...]:
        """What computes the runs of a signature, or else of the newest one, in words."""
        record = self._found.get(key) if key is not None else next(reversed(self._all()), None)
        captured = record.captured if isinstance(record, RunRecord) else None
        return () if captured is None else (f"no graph: {captured}",) if isinstance(captured, str) else captured.described()

    @property
    def graph_bytes(self) -> int:
        """The bytes that graphs of the device keep between runs."""
        return sum(r.captured.bytes for r in self._all() if r.captured is not None and not isinstance(r.captured, str))

    def forget_graphs(self, reason: str | None = None) -> None:
        """Free the graphs; None if later runs may capture again, or the reason why not."""
        self.latest = None
        for record in self._all():
            record.captured = reason


@dataclass(slots=True)
class _RepeatedCall:
    """What repeats a node, or a kernel of it.

    Attributes:
        call: the callable; None for a node that decides each time.
        reads: the slots of its arguments.
        writes: the slot of its result, or those of several.
        expected: the type of the result, or those of several; None if it cannot differ.
    """

    call: Callable[..., Any] | None
    reads: tuple[int, ...]
    writes: int | tuple[int, ...]
    expected: Any


class RunRecord:
    """How a graph computes inputs of one signature.

    Attributes:
        graph: the graph, which is walked from the step that differs.
        frame: the values before the first step: initializers, values on the host, and other arguments of bodies.
        steps: for each call: it, the getter of its arguments, whether there are several, the slots of its results, their types,
            the slots that are not used after the nodes before it, and after it, whether the node adds checks, and its number.
        reads: the slots that each step reads.
        counts: the number of a node and its executions, unless the node counts them.
        tables: what bodies copy from the host in every run.
        captured: the run as graphs of the device; the reason if there are none; None before the first run that repeats.
        moves: the number of captures after the first one, because inputs that results replace were other arrays.
        needed: the executions and the bytes of a run.
        limits: those of the recorded run.
        copied: the slots of outputs that are on the host and belong to the record.
        is_plain: whether no output is a map.
        differs: whether a run had a result of another type, or a body raised.
    """

    def __init__(
        self, graph: RunOrder, recorder: RunRecorder, budget: Budget, needed: tuple[int, int], *, is_plain: bool
    ) -> None:
        self.graph, self.frame, self.needed, self.limits = graph, recorder.frame, needed, budget.limits
        self.steps = tuple(recorder.steps)
        self.reads = tuple(recorder.reads)
        self.tables = recorder.tables
        self.captured: CapturedRun | str | None = None
        self.moves, self.is_plain, self.differs = 0, is_plain, False
        self.counts = tuple(recorder.counts)
        self._executions = sum(count for _, count in self.counts)
        self.copied = tuple(s for s in graph.output_slots if isinstance(self.frame[s], np.ndarray))
        for slot in self.copied:  # the recorded run returns them
            self.frame[slot] = self.frame[slot].copy()

    def fits(self, budget: Budget) -> bool:
        """Whether a run cannot meet a limit, and nothing watches it."""
        return self.is_like(budget) and budget.room - budget.made >= self.needed[1]

    def is_like(self, budget: Budget) -> bool:
        """Whether a run has the limits of the recorded one, of which memory alone may be too little, and nothing watches it."""
        same = budget.limits is self.limits or budget.limits == self.limits
        return same and not budget.watched and budget.left >= self.needed[0]

    def start(self, inputs: Sequence[Any]) -> list[Any]:
        """A new frame that holds these inputs."""
        frame = self.frame.copy()
        for slot, value in zip(self.graph.input_slots, inputs, strict=False):
            frame[slot] = value
        return frame

    def repeat(self, frame: list[Any], visit: Visit, budget: Budget, locate: Locate) -> None:
        """Compute every node.

        Args:
            frame: a frame of `start`.
            visit: computes a node that decides.
            budget: of the run.
            locate: is called with a node that has added checks, and its inputs.
        """
        self.count(budget)
        first = self.issue(self.steps, frame, visit, locate)
        if first is not None:
            self.go_on(frame, visit, budget, first)
        for slot in self.copied:
            frame[slot] = frame[slot].copy()

    def count(self, budget: Budget) -> None:
        """Count the executions of a run."""
        budget.steps(self._executions)

    def issue(self, steps: Sequence[Any], frame: list[Any], visit: Visit, locate: Locate, *, strict: bool = False) -> int | None:
        """Compute some steps.

        Args:
            steps: a part of `steps`.
            frame: the values.
            visit: as for `repeat`.
            locate: as for `repeat`.
            strict: whether exceptions of bodies pass.

        Returns:
            The number of the first node that must decide, because a result has another type or its body raised; None if no node
            must.
        """
        nodes, call, same = self.graph.nodes, None, True
        at: int = 0
        made: Any
        try:
            for call, get, several, writes, expected, died, dies, checks, at in steps:
                for slot in died:
                    frame[slot] = None
                if call is None:
                    made = visit(nodes[at], reads(frame, nodes[at]), frame)
                else:
                    made = call(*get(frame)) if several else call(get(frame))
                if writes.__class__ is int:
                    frame[writes] = made
                    same = expected is None or result_type(made) == expected
                else:
                    for slot, value in zip(writes, made):  # noqa: B905 (a body may return more)
                        if slot >= 0:
                            frame[slot] = value
                    value, same = None, expected is None or _are(made, expected)
                made = None  # the next call may need its memory
                if checks:
                    locate(nodes[at], reads(frame, nodes[at]))
                for slot in dies:
                    frame[slot] = None
                if not same:
                    return at + 1
        except Exception:
            if call is None or strict:  # the node has decided, and reported its error
                raise
            return at
        return None

    def go_on(self, frame: list[Any], visit: Visit, budget: Budget, first: int) -> None:
        """Let the nodes from a number on decide."""
        self.differs = True
        budget.left += sum(count for at, count in self.counts if at >= first)
        self.graph.walk(frame, visit, first)


def _nothing(frame: list[Any]) -> tuple[()]:
    """The arguments of a body without any."""
    return ()


def reads(frame: list[Any], node: Node) -> list[Any]:
    """The inputs of a node."""
    return [None if s < 0 else frame[s] for s in node.input_slots]


def _are(values: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether values have these types; None for one of any type."""
    if len(values) < len(expected):
        return False
    return all(e is None or (hasattr(v, "strides") and result_type(v) == e) for v, e in zip(values, expected, strict=False))


class BodyCall:
    """One call of a body.

    Attributes:
        given: the arguments as `VersionedOperator.compute` takes them.
        passed: the arguments of the body.
        result: what it returned.
        outputs: what became of it.
    """

    passed: Sequence[Any]
    result: Any
    outputs: Sequence[Any]

    def __init__(self, operator: VersionedOperator, given: Sequence[Any]) -> None:
        self.given = given
        self._body = operator.declaration.body

    def __call__(self, xp: Any, *arguments: Any, **attributes: Any) -> Any:
        """Call the body."""
        self.passed = arguments
        self.result = self._body(xp, *arguments, **attributes)
        return self.result

    def is_direct(self, array: Any, node: Node) -> bool:
        """Whether no array was converted before the call, and the results are used as they are."""
        several = isinstance(self.result, tuple)
        if not several and len(node.output_slots) != 1:
            return False
        made = self.result if several else (self.result,)
        if any(a is not b or a.__class__ is not array for a, b in zip(made, self.outputs, strict=True)):
            return False
        return all(a is b for a, b in zip(self.passed, self.given, strict=True) if a.__class__ is array)


class RunRecorder:
    """Collects what a run decides; slots after those of the graph hold arguments and results within joined nodes.

    Args:
        device: the device.
        graph: the graph that is walked.
        frame: its values before the run.
        given: the number of inputs of the run.
    """

    def __init__(self, device: Device, graph: RunOrder, frame: list[Any], given: int) -> None:
        self._xp = device.xp
        self._place = {id(n): at for at, n in enumerate(graph.nodes)}
        self.frame = list(frame)
        for slot in graph.input_slots[:given]:
            if not isinstance(self.frame[slot], np.ndarray):  # values on the host are a part of the signature
                self.frame[slot] = None
        self._fixed = {s for s, v in enumerate(self.frame) if v is not None}
        """The slots whose values are those of every run."""
        self._dies = graph.dies
        self._pending: list[int] = []
        self.steps: list[Any] = []
        self.reads: list[Sequence[int]] = []
        self.tables = Tables()
        self.counts: list[tuple[int, int]] = []
        self.copies = False
        self._noted: list[_RepeatedCall] | None = None

    def _keep(self, value: Any) -> int:
        """The slot of an argument of every run."""
        self.frame.append(value)
        self._fixed.add(len(self.frame) - 1)
        return len(self.frame) - 1

    def is_fixed(self, slot: int) -> bool:
        """Whether the value of a slot is that of every run."""
        return slot < 0 or slot in self._fixed

    def fix(self, node: Node, outputs: Sequence[Any]) -> None:
        """Note that a node has these results in every run."""
        for slot, value in zip(node.output_slots, outputs, strict=False):
            if slot >= 0:
                self.frame[slot] = value
                self._fixed.add(slot)
        self._noted = []

    def call(
        self, node: Node, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], called: BodyCall
    ) -> None:
        """Note that a node calls its body.

        Args:
            node: the node.
            operator: its operator.
            inputs: its values in the frame.
            attributes: the keyword arguments of the body.
            called: the call.
        """
        arguments, outputs = called.passed, called.outputs
        is_direct = called.is_direct(self._xp.ndarray, node)
        if not is_direct:
            arguments = called.given
        slots = self._arguments(node, inputs, arguments)
        if slots is None:
            return
        if is_direct:
            bound = operator.declaration.body
            single = not isinstance(called.result, tuple)
            writes: Any = node.output_slots[0] if single else node.output_slots
            expected: Any = result_type(called.result) if single else self._types(node, outputs)
            self._noted = [_RepeatedCall(partial(bound, self._xp, **attributes), slots, writes, expected)]
            return
        xp, wanted = self._xp, len(node.output_slots)

        def compute(*values: Any) -> list[Any]:
            return operator.compute(xp, values, attributes, wanted)

        self._noted = [_RepeatedCall(compute, slots, node.output_slots, self._types(node, outputs))]

    def _arguments(self, node: Node, inputs: Sequence[Any], arguments: Sequence[Any]) -> tuple[int, ...] | None:
        """The slots of the arguments of a body; None if one is neither a value on the device nor the same in every run."""
        slots = []
        for i, value in enumerate(arguments):
            slot = node.input_slots[i] if i < len(node.input_slots) else -1
            if self.is_fixed(slot):
                known = inputs[i] if i < len(inputs) else None
                self.copies |= value is not known and self._xp.isarray(value)
                slots.append(slot if slot >= 0 and value is known else self._keep(value))
            elif value is inputs[i] and self._xp.isarray(value):
                slots.append(slot)
            else:
                return None
        return tuple(slots)

    def _types(self, node: Node, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """What is expected of the results of a node."""
        return tuple(
            result_type(v) if s >= 0 and hasattr(v, "strides") else None for s, v in zip(node.output_slots, outputs, strict=False)
        )

    def kernels(self, node: Joined, inputs: Sequence[Any], program: JoinedProgram, values: Sequence[Any], known: Known) -> None:
        """Note the kernels of a joined node.

        Args:
            node: the node.
            inputs: its values in the frame.
            program: the kernels.
            values: the inputs and the numbers of the host, as the kernels take them.
            known: whether the values of an array of the device are known on the host.
        """
        for slot, value in zip(node.input_slots, inputs, strict=True):
            if (isinstance(value, np.ndarray) or known(value)) and slot not in self._fixed:
                return
        slots = [s if v is inputs[i] else self._keep(v) for i, (s, v) in enumerate(zip(node.input_slots, values, strict=False))]
        slots += [self._keep(v) for v in values[len(inputs) :]]
        results = dict(zip(program.outputs, node.output_slots, strict=True))
        calls = []
        for step in program.steps:
            takes = []
            for i, shape in step.reads:
                slot = slots[i]
                if shape is not None and slot in self._fixed:
                    slot = self._keep(self.frame[slot].reshape(shape))
                elif shape is not None:
                    calls.append(_RepeatedCall(methodcaller("reshape", shape), (slot,), self._inner(), None))
                    slot = len(self.frame) - 1
                takes.append(slot)
            made = tuple(results.get(len(slots) + k, -1) for k in range(step.writes))
            made = tuple(self._inner() if s < 0 else s for s in made)
            slots += made
            calls.append(_RepeatedCall(step.kernel, tuple(takes), made[0] if len(made) == 1 else made, None))
        self._noted = calls

    def _inner(self) -> int:
        """The slot of a value within a joined node."""
        self.frame.append(None)
        return len(self.frame) - 1

    def done(self, node: Node, outputs: Sequence[Any], count: int, *, checks: bool) -> None:
        """Record a node after it was computed, as it was noted; a node without a note decides each time.

        Args:
            node: the node.
            outputs: its results.
            count: the number of executions that it counted.
            checks: whether it has added checks.
        """
        at = self._place[id(node)]
        calls, self._noted = self._noted, None
        if calls is None:
            outer = (v.slot for v in node.captures.values())
            calls = [_RepeatedCall(None, (*node.input_slots, *outer), node.output_slots, self._types(node, outputs))]
            checks = False
        else:
            self.counts.append((at, count))
        ends = [s for s in self._dies[at] if s not in self._fixed]
        if not calls:
            self._pending += ends
            return
        inner = {
            s for c in calls for s in (c.writes if isinstance(c.writes, tuple) else (c.writes,)) if s not in node.output_slots
        }
        died, self._pending = tuple(self._pending), []
        for call in calls:
            last = call is calls[-1]
            get = itemgetter(*call.reads) if call.reads and call.call else _nothing
            several = len(call.reads) != 1
            dies = (*ends, *inner) if last else ()
            self.steps.append((call.call, get, several, call.writes, call.expected, died, dies, checks and last, at))
            self.reads.append(call.reads)
            died = ()
