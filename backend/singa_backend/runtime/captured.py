"""Recorded runs on a CUDA device that are launched as CUDA graphs.

The first run that repeats a record captures its steps: as many as possible become one graph.  A step that reads values of the
device on the host, draws random numbers, exchanges with other processes or needs a value of the host that differs between runs
stays outside, and the graph ends before it.  Inputs are copied to static places before the launch.  The inputs that results
replace, the parameters of a training step, are not copied: the graph writes the results to them.

A run that is watched, observed or has other limits computes as if there were no graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from .. import limits
from ..devices import checks, graphs, packing
from ..devices.checks import Checks
from ..devices.device import Device
from ..devices.graphs import GraphMemory, NotCapturable
from ..errors import SonnxError
from ..ir.declaration import has_trait
from ..ir.graph import Node
from ..limits import Budget
from .recorded import RunRecord, result_type

_PARTS = 32
"""The maximum number of graphs, and of stretches between them, of one run."""

MOVES = 4
"""The number of runs in succession in which inputs that results replace may be other arrays than those of the graph before."""

_OUTSIDE = {
    "random": "draws random numbers",
    "exchanges": "exchanges with other processes",
}
"""The traits of operators that a graph cannot hold, with the reason."""


class RunVisitor(Protocol):
    """A run of an executor, as far as its steps need it.

    Attributes:
        checks: its checks; None if each is read at once.
        budget: its budget.
    """

    checks: Checks | None
    budget: Budget

    def visit(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        """Compute a node that decides."""

    def locate_checks(self, node: Node, inputs: list[Any]) -> None:
        """Note that the checks since the last call are those of a node."""

    def on_device(self, value: Any) -> Any:
        """A value as an output that stays on the device."""

    def finish(self, outputs: list[Any], to_host: bool) -> list[Any]:
        """The outputs of the main graph, after the checks."""


@dataclass
class _Part:
    """Steps that one graph computes, or that are issued in every run.

    Attributes:
        graph: the graph; None if the steps are issued.
        steps: the steps.
        fixed: the slots of results of issued steps that the graph reads, and the place of each.
        leaves: the values after the part of the slots that it has written.
        checks: the checks of the graph, if it has any.
        reason: why the steps are issued.
    """

    graph: Any
    steps: Sequence[Any]
    fixed: list[tuple[int, Any]]
    leaves: dict[int, Any]
    checks: Checks | None
    reason: str = ""


class CapturedRun:
    """A recorded run as graphs of a device.

    Args:
        device: the device.
        record: the record.
        inputs: the inputs of the run that captures, which it computes too.
        replaced: the place of the input that a result replaces, by the place of the result.

    Attributes:
        parts: the graphs, and the steps between them.
        admitted: the limits of a run that has met none of them.

    Raises:
        NotCapturable: an input has gaps, or two that results replace share memory.
    """

    def __init__(self, device: Device, record: RunRecord, inputs: Sequence[Any], replaced: Mapping[int, int]) -> None:
        self._device, self._replaced = device, replaced
        self._module, self._is_array = device.xp.module, device.xp.isarray
        self._lock = threading.Lock()
        self._runner = 0  # the thread that has the lock
        self.parts: list[_Part] = []
        self.admitted: limits.Limits | None = None
        self._is_full = False
        places, in_place = dict[int, Any](), [inputs[i] for i in replaced.values() if self._is_array(inputs[i])]
        self._in_place = [v if any(v is x for x in in_place) else None for v in inputs]
        """The inputs that results replace, which the graph reads and writes where they are; None for others."""
        _refuse_shared(in_place)
        self._places = places
        """Where the other inputs are copied to, by their places."""
        self._results: list[Any] = []
        self._flags: list[Checks] = []
        self._packed: Any = None
        self._updated: frozenset[int] = frozenset()
        self._memory = GraphMemory(self._module)  # last, so that what is in it is deleted before
        for at, value in enumerate(inputs):
            if self._is_array(value) and self._in_place[at] is None:
                places[at] = self._memory.place_for(value)
        self._expected = [
            (fixed, result_type(v) if self._is_array(v) else None, at in places and bool(places[at].flags.c_contiguous))
            for at, (v, fixed) in enumerate(zip(inputs, self._in_place, strict=True))
        ]
        """Of each input the array that results replace, the type, and whether it may be on the host."""
        self._bytes = record.tables.bytes

    @property
    def bytes(self) -> int:
        """The bytes that the graphs keep between runs."""
        return self._memory.bytes + self._bytes

    @property
    def is_whole(self) -> bool:
        """Whether one graph computes the run."""
        return len(self.parts) == 1 and self.parts[0].graph is not None

    @property
    def is_steady(self) -> bool:
        """Whether a run needs no visitor: one graph computes it, and all outputs are on the device."""
        return self.is_whole and all(map(self._is_array, self._results))

    def described(self) -> tuple[str, ...]:
        """What each part of the run is, in words."""
        counts = [(f"{n} step{'s' if n > 1 else ''}", part) for part in self.parts for n in (len(part.steps),)]
        return tuple(f"a graph of {n}" if part.graph is not None else f"{n} outside graphs: {part.reason}" for n, part in counts)

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """Whether inputs have the types of those of the graph; they may be on the host if they are copied."""
        if len(inputs) != len(self._expected):
            return False
        for x, (fixed, expected, takes_host) in zip(inputs, self._expected, strict=True):
            if x is fixed and x is not None:
                continue
            if expected is None:
                return False
            kind, shape, strides, dtype = expected
            if x.__class__ is kind:
                if x.shape != shape or x.strides != strides or x.dtype != dtype or x.device.id != self._device.device_id:
                    return False
                if fixed is not None and x.data.ptr != fixed.data.ptr:
                    return False
            elif not takes_host or x.__class__ is not np.ndarray or x.shape != shape or x.dtype != dtype:
                return False
        return True

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the inputs that results replace are those of the graph, among inputs of its types."""
        pairs = zip(inputs, self._in_place, strict=True)
        return all(fixed is None or x is fixed or x.data.ptr == fixed.data.ptr for x, fixed in pairs)

    def __enter__(self) -> None:
        """Begin a run, one at a time."""
        self._lock.acquire()
        try:
            self._memory.begin()
        except BaseException:
            self._lock.release()
            raise
        self._runner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        """End a run."""
        self._runner = 0
        try:
            self._memory.end()
        finally:
            self._lock.release()

    @property
    def is_nested(self) -> bool:
        """Whether this thread is within a run: an operator in Python runs its own model."""
        return self._runner == threading.get_ident()

    # --- capture

    def capture(
        self,
        record: RunRecord,
        visitor: RunVisitor,
        inputs: Sequence[Any],
        to_host: bool,
        begin: Callable[[Budget, Any], RunVisitor],
    ) -> list[Any]:
        """Capture the run, and compute it.

        Args:
            record: the record.
            visitor: of the run.
            inputs: its inputs.
            to_host: whether the outputs are copied to the host.
            begin: begins a run within the run, with a budget and a frame.

        Returns:
            The outputs, as `run` returns them.
        """
        frame, at = self._start(record, inputs), 0
        varying: set[int] = set()  # the slots of results of issued steps
        with self:
            self._copy_in(inputs)
            try:
                while at < len(record.steps):
                    stop, reason = at, f"follows {_PARTS} parts"
                    if len(self.parts) < _PARTS and not self._is_full:
                        stop, reason = self._graph_from(record, at, frame, varying, to_host, begin)
                    if stop > at:
                        self._memory.launch(self.parts[-1].graph)
                    at = stop
                    if reason:
                        at = stop + 1 if len(self.parts) < _PARTS and not self._is_full else len(record.steps)
                        self._issue_from(record, stop, at, reason, frame, visitor, varying)
                if not self.parts or self.parts[-1].graph is None:
                    self._close(record, frame)
            except _ResultDiffers as error:
                return self._decide(record, error.first, frame, visitor, to_host)
            return self._outputs(visitor, to_host)

    def _start(self, record: RunRecord, inputs: Sequence[Any]) -> list[Any]:
        """The values before the first step."""
        frame = record.start(inputs)
        for at, place in self._places.items():
            frame[record.graph.input_slots[at]] = place
        return frame

    @property
    def reason(self) -> str:
        """Why no part of the run is a graph; "" if one is."""
        if any(part.graph is not None for part in self.parts):
            return ""
        return self.parts[0].reason if self.parts else "computes nothing on the device"

    def _graph_from(
        self,
        record: RunRecord,
        first: int,
        frame: list[Any],
        varying: set[int],
        packs: bool,
        begin: Callable[[Budget, Any], RunVisitor],
    ) -> tuple[int, str]:
        """Capture as many steps as possible, from a number on; return the number of the next one, and why it must be issued."""
        stop, reason = first, ""
        while stop < len(record.steps) and not reason:
            reason = self._refusal(record, stop, frame, varying)
            stop += not reason
        while stop > first and not self._is_full:
            saved = list(frame)
            budget = Budget(record.limits, memory=self._device.memory)
            failed = self._try(record, first, stop, frame, varying, packs, begin(budget, frame))
            if failed is None:
                break
            frame[:] = saved
            stop, reason = failed
        return (first if self._is_full else stop), reason

    def _try(
        self,
        record: RunRecord,
        first: int,
        stop: int,
        frame: list[Any],
        varying: set[int],
        packs: bool,
        visitor: RunVisitor,
    ) -> tuple[int, str] | None:
        """Capture steps; return the number of the one that cannot be captured, and why."""
        now, part = first, _Part(None, record.steps[first:stop], [], {}, visitor.checks)

        def work() -> None:
            nonlocal now
            for now in range(first, stop):
                differs = record.issue(record.steps[now : now + 1], frame, visitor.visit, visitor.locate_checks, strict=True)
                if differs is not None:
                    raise NotCapturable("returned another type than in the recorded run")
            now = stop
            if stop == len(record.steps):
                self._close(record, frame, part, packs=packs)

        try:
            self._fix({s for i in range(first, stop) for s in record.reads[i] if s in varying}, part, frame)
            before = list(frame)
            with limits.spend(visitor.budget), checks.collected(visitor.checks), graphs.keeping(record.tables):
                part.graph = self._memory.capture(work)
        except Exception as error:
            self._is_full = now == stop or isinstance(error, MemoryError)  # not a step, but the graph cannot be made
            return now, _reason(error)
        part.leaves = {s: v for s, v in enumerate(frame) if v is not before[s]}
        varying.difference_update(s for s, _ in part.fixed)
        self.parts.append(part)
        if part.checks is not None and part.checks.added:
            self._flags.append(part.checks)
        else:
            part.checks = None
        return None

    def _fix(self, slots: set[int], part: _Part, frame: list[Any]) -> None:
        """Replace results of issued steps by static places."""
        for slot in sorted(slots):
            if frame[slot] is not None:
                place = self._memory.place_for(frame[slot])
                part.fixed.append((slot, place))
                graphs.assign(place, frame[slot])
                frame[slot] = place

    def _refusal(self, record: RunRecord, number: int, frame: list[Any], varying: set[int]) -> str:
        """Why a step cannot be captured, whatever it does; "" if it may be."""
        node: Node = record.graph.nodes[record.steps[number][-1]]
        for inner in (node, *(n for g in node.graphs for n in g.all_nodes())):
            for trait, reason in _OUTSIDE.items():
                if inner.operator is not None and has_trait(inner.domain, inner.op_type, trait):
                    return reason
        for slot in record.reads[number]:
            if slot in varying and frame[slot] is not None and not self._is_array(frame[slot]):
                return "reads a value of the host that may differ between runs"
        return ""

    def _issue_from(
        self, record: RunRecord, first: int, stop: int, reason: str, frame: list[Any], visitor: RunVisitor, varying: set[int]
    ) -> None:
        """Issue steps that cannot be captured, and note them as a part."""
        before, steps = list(frame), record.steps[first:stop]
        self._issue(record, steps, frame, visitor, self._flags)
        varying.update(s for s, v in enumerate(frame) if v is not before[s] and v is not None)
        if not self.parts or self.parts[-1].graph is not None:
            self.parts.append(_Part(None, (), [], {}, None, reason))
        part = self.parts[-1]
        part.steps = (*part.steps, *steps)
        if reason not in part.reason:
            part.reason += f"; {reason}"

    # --- runs

    def run(self, record: RunRecord, visitor: RunVisitor | None, inputs: Sequence[Any], to_host: bool) -> list[Any]:
        """Compute the run.

        Args:
            record: the record.
            visitor: of the run; None if `is_steady` is true.
            inputs: its inputs, for which `fits` is true.
            to_host: whether the outputs are copied to the host.

        Returns:
            The outputs, on the host or new arrays of the device; an input that a result replaces is returned itself.

        Raises:
            OperatorError: a check failed; no input was changed.
        """
        with self:
            self._copy_in(inputs)
            if self.is_whole:
                self._memory.launch(self.parts[0].graph)
                return self._outputs(visitor, to_host)
            assert visitor is not None
            frame, launched = self._start(record, inputs), list[Checks]()
            try:
                for part in self.parts:
                    if part.graph is None:
                        self._issue(record, part.steps, frame, visitor, launched)
                        continue
                    for slot, place in part.fixed:
                        if frame[slot] is not place:
                            graphs.assign(place, frame[slot])
                    self._memory.launch(part.graph)
                    for slot, value in part.leaves.items():
                        frame[slot] = value
                    launched += [] if part.checks is None else [part.checks]
                if self.parts[-1].graph is None:
                    self._close(record, frame)
            except _ResultDiffers as error:
                return self._decide(record, error.first, frame, visitor, to_host)
            return self._outputs(visitor, to_host)

    def _copy_in(self, inputs: Sequence[Any]) -> None:
        for at, place in self._places.items():
            graphs.assign(place, inputs[at])

    def _issue(
        self, record: RunRecord, steps: Sequence[Any], frame: list[Any], visitor: RunVisitor, launched: Sequence[Checks]
    ) -> None:
        """Issue steps; their checks are read at once, after those of the graphs before: an error is that of the first node."""
        added = 0 if visitor.checks is None else visitor.checks.added
        first = record.issue(steps, frame, visitor.visit, visitor.locate_checks)
        if first is not None or (visitor.checks is not None and visitor.checks.added > added):
            self._verify(launched)
            if visitor.checks is not None:
                visitor.checks.settle()
        if first is not None:
            raise _ResultDiffers(first)

    def _decide(self, record: RunRecord, first: int, frame: list[Any], visitor: RunVisitor, to_host: bool) -> list[Any]:
        """Let the nodes from a number on decide; return the outputs."""
        record.go_on(frame, visitor.visit, visitor.budget, first)
        outputs = visitor.finish([frame[s] for s in record.graph.output_slots], to_host)
        return outputs if to_host else [v if isinstance(v, np.ndarray) else self._device.copy(v) for v in outputs]

    def _close(self, record: RunRecord, frame: list[Any], part: _Part | None = None, *, packs: bool = False) -> None:
        """Compute what becomes of the results: those that replace inputs are written to them, others are packed for the host."""
        module = self._module
        values = [frame[s] for s in record.graph.output_slots]
        flags = list(self._flags)
        if part is not None and part.checks is not None and part.checks.added:
            flags.append(part.checks)
        pending = [f.pending for f in flags]
        updates = {}
        for o, i in self._replaced.items():
            place = self._in_place[i]
            if place is not None and self._is_array(values[o]) and result_type(values[o]) == result_type(place):
                updates[o] = place
        written = {x.data.mem.ptr for x in updates.values()}
        values = [
            v.copy() if self._is_array(v) and v.data.mem.ptr in written and v is not updates.get(o) else v
            for o, v in enumerate(values)
        ]
        pairs = [(place, values[o]) for o, place in updates.items() if values[o] is not place]
        graphs.assign_if(module, pending, checks.CLEAR, pairs)
        self._results = [updates.get(o, v) for o, v in enumerate(values)]
        self._updated = frozenset(updates)
        self._packed = None
        if packs:
            self._packed = packing.packed(self._device.xp, [*self._results, *pending])

    def _outputs(self, visitor: RunVisitor | None, to_host: bool) -> list[Any]:
        """The outputs, after all checks."""
        device, results, pending = self._device, self._results, [f.pending for f in self._flags]
        if to_host:
            values = [*results, *pending]
            bytes_ = packing.packed(device.xp, values) if self._packed is None else self._packed
            values = packing.unpacked(device.xp, bytes_, values, device.get)
            self._verify(self._flags, values[len(results) :])
            return [v.copy() if v is kept and isinstance(v, np.ndarray) else v for v, kept in zip(values, results, strict=False)]
        self._verify(self._flags)
        outputs: list[Any] = []
        for o, v in enumerate(results):
            if o in self._updated:
                outputs.append(v)
            elif self._is_array(v):
                outputs.append(graphs.new_copy(self._module, v))
            elif isinstance(v, list):
                outputs.append(device.copy(v))
            else:
                assert visitor is not None
                outputs.append(visitor.on_device(v))
        return outputs

    def _verify(self, flags: Sequence[Checks], read: Sequence[np.ndarray] | None = None) -> None:
        """Raise the error of the first check of graphs that failed."""
        if not flags:
            return
        read = self._device.get_all([f.pending for f in flags]) if read is None else read
        for own, found in zip(flags, read, strict=True):
            own.verify(found)


class _ResultDiffers(Exception):
    """A step between graphs had a result of another type.

    Attributes:
        first: the number of the first node that must decide.
    """

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


def _refuse_shared(arrays: Sequence[Any]) -> None:
    """Raise NotCapturable if a write to one of some arrays would change another."""
    spans = sorted((x.data.ptr, x.data.ptr + x.nbytes) for x in arrays if x.nbytes)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise NotCapturable("replaces inputs that share memory")


def _reason(error: BaseException) -> str:
    """Why work could not be captured, as a part of a sentence."""
    cause = error.__cause__ if isinstance(error, SonnxError) and error.__cause__ is not None else error
    if isinstance(cause, NotCapturable):
        return str(cause)
    if isinstance(cause, MemoryError):
        return "needs more memory than the device has"
    text = (str(cause).splitlines() or [""])[0]
    if "D2H" in text:  # CuPy's words
        return "reads values of the device on the host"
    if "H2D" in text:
        return "copies values from the host"
    return f"is not permitted in a capture ({type(cause).__name__}: {text[:120]})"
