"""Calls of a plan that their definitions compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from ... import dtypes, limits
from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...ir.sizes import OpenSize, now, settled
from ...kernels.table import worst
from ...kernels.values import FINITE, NAN, Bound, OpaqueValue, PlanStep, Value
from ...kernels.work import flops
from ..answers import Mismatch
from ..flat import model_node
from ..updates import NotInPlace
from .by_name import inferred_shapes, unknown_axes
from .segment import DynamicCall, Entry, RunState
from .values import TraceValues


@dataclass(eq=False)
class DefinitionStep:
    """A call that its definition computes in every run.

    Attributes:
        state: of the plan.
        call: the call.
        inputs: its inputs.
        captured: the values that its bodies capture, with those of the bodies that stand for them.
        bodies: the plans of its subgraphs.
        outputs: where its results are kept; a result for a place in the arena must have the shape of the trace.
    """

    state: RunState
    call: ir.Node
    inputs: list[Entry | None]
    captured: list[tuple[ir.Value, Entry]]
    bodies: Any = None
    outputs: list[Entry | None] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        """All that it reads."""
        return [*(e for e in self.inputs if e is not None), *(e for _, e in self.captured)]

    def placed(self) -> list[np.ndarray]:
        """The arrays of the plan that it reads."""
        return [e.array for e in self.entries() if isinstance(e, Value)]

    def compute(self) -> list[Any]:
        """The present results of the definition."""
        node = model_node(self.call)
        frame = {node.captures[inner].slot: _content(entry) for inner, entry in self.captured}
        values = [None if e is None else _content(e) for e in self.inputs]
        with self.state.visitor.budget.clock(runs=True):
            return self.state.visit(node, values, frame, self.bodies)

    def bind(self) -> Bound:
        """The call of a run."""
        state, call, bodies = self.state, self.call, self.bodies
        node = model_node(call)
        sources = [e.array if isinstance(e, Value) else e for e in self.inputs]
        targets = [t.array if isinstance(t, Value) else t for t in self.outputs]
        is_fixed = not any(isinstance(s, OpaqueValue) for s in sources)
        captured = [(node.captures[inner].slot, e) for inner, e in self.captured]
        cells = [(slot, e) for slot, e in captured if isinstance(e, OpaqueValue)]
        frame = {slot: e.array if isinstance(e, Value) else None for slot, e in captured}
        placed = [a for a in (*sources, *frame.values()) if isinstance(a, np.ndarray)]

        def run() -> None:
            values = sources if is_fixed else [s.value if isinstance(s, OpaqueValue) else s for s in sources]
            for slot, cell in cells:
                frame[slot] = cell.value
            results = state.visit(node, values, frame, bodies)
            for target, result in zip(targets, results, strict=False):
                if target is None:
                    continue
                if isinstance(target, OpaqueValue):
                    target.value = unshared(result, placed)
                elif not isinstance(result, np.ndarray) or result.shape != target.shape or result.dtype != target.dtype:
                    raise Mismatch(call)
                else:
                    np.copyto(target, result)
            for slot, _ in cells:
                frame[slot] = None

        return [(run, ())]


class Definitions(TraceValues):
    """Computes calls by their definitions, now and in every run.

    Attributes:
        refuses_numbers: whether a kernel has declined the numbers that the sizes of a call have now.
    """

    refuses_numbers = False

    def _by_definition(self, call: ir.Node, results: Sequence[Any] | None = None) -> int:
        """Compute a call with its definition, now and in every run; `results` are the present ones, if they are known."""
        if self.updates is not None:
            raise NotInPlace("the definition of an operator, which may fail, makes a result that replaces an input")
        constants = {i: e.array for i, e in self._captured(call) if isinstance(e, Value) and e.constant and e.contents is None}
        bodies = self.state.bodies(model_node(call), constants) if self.options.level and call.bodies else None
        made = DefinitionStep(self.state, call, self._values(call), self._captured(call), bodies)
        dynamic = self.is_dynamic(call) or self._is_sent(call, made.inputs)
        with self.settling():
            present = made.compute() if results is None else results
            placed = made.placed()
        shapes = self._shapes_of(call, made.inputs, present)
        dynamic = dynamic or None in shapes
        for i, o, shape in zip(call.outputs, present, shapes, strict=False):
            if i is None:
                made.outputs.append(None)
            elif not dynamic and isinstance(o, np.ndarray) and o.dtype != dtypes.STRING:
                assert shape is not None
                value = self.allocate(shape, o.dtype, None, self._finiteness(call, made.inputs))
                with self.settling():
                    np.copyto(value.array, o)
                made.outputs.append(value)
            else:
                cell = OpaqueValue(unshared(o, placed))
                self.live[id(cell)] = cell.value
                self.budget.count_tensor(limits.size_of(cell.value))
                made.outputs.append(cell)
        reads = tuple(e for e in made.entries() if isinstance(e, Value))
        writes = tuple(m for m in made.outputs if isinstance(m, Value))
        self.facts.definitions += 1
        notes = self._reasons if self.counts else [f"{call.op_type} of the body", *self._reasons]
        step = PlanStep(made.bind, reads, writes, "definition", call.origins, tuple(notes))
        step.work = partial(flops_of, (call,), made.inputs, writes[0]) if writes else _unknown
        self._record(step)
        for i, m in zip(call.outputs, made.outputs, strict=False):
            if i is not None and m is not None:
                self._set(i, m)
        self._used(call.reads)
        if results is None:
            self.budget.left += 1  # the visitor has counted it
        self._count(call)
        return 1

    def _shapes_of(self, call: ir.Node, inputs: Sequence[Entry | None], results: Sequence[Any]) -> Sequence[Sequence[Any] | None]:
        """The shapes of results; a segment ends after a call with one that does not follow from those of the inputs."""
        shapes = self.result_shapes(call, results)
        is_empty = any(isinstance(o, np.ndarray) and not o.size for o in results)
        if self.refuses_numbers and is_empty and not any(0 in settled(e.shape) for e in inputs if isinstance(e, Value)):
            raise OpenSize(f"a result of {call.op_type} is empty")  # for other sizes a kernel may compute it
        if None in shapes:
            if self.roles.is_step:  # with a further segment it could not replace its inputs
                raise OpenSize(f"the sizes of results of {call.op_type} do not follow from those of its inputs")
            self.dynamic.setdefault(model_node(call), DynamicCall(is_unnamed=True))
        if self.is_dynamic(call):
            self.dynamic[model_node(call)].axes |= unknown_axes(call, self._values(call))
        return shapes

    def result_shapes(self, call: ir.Node, results: Sequence[Any]) -> list[Sequence[Any] | None]:
        """The shape of each result of a definition, if the inputs have sizes by name; None for one that is not known."""
        entries = [e for e in self._values(call) if isinstance(e, Value)]
        present: list[Sequence[Any] | None] = [o.shape if isinstance(o, np.ndarray) else () for o in results]
        if self.space is None or not any(e.is_open or e.contents is not None for e in entries):
            return present
        found = inferred_shapes(call, self._values(call))
        return [
            s if s is not None and settled(s) == p else None if isinstance(o, np.ndarray) else p
            for o, p, s in zip_longest(results, present, found[: len(results)])
        ]

    def _is_sent(self, call: ir.Node, inputs: Sequence[Entry | None]) -> bool:
        """Whether the sizes of the results may differ between runs, which no segment depends on."""
        sent = self.roles.only_sent.issuperset(call.results)
        return sent and (call.is_("NonZero") or any(isinstance(e, OpaqueValue) for e in inputs))

    def _captured(self, call: ir.Node) -> list[tuple[ir.Value, Entry]]:
        return [(inner, self._get(outer)) for inner, outer in call.captures.items()]

    def _finiteness(self, call: ir.Node, entries: Sequence[Entry | None]) -> int:
        if any(isinstance(e, OpaqueValue) for e in entries):
            return NAN  # what a sequence holds, or a string stands for, is not known
        values = [e for e in entries if isinstance(e, Value)]
        known = worst(*values)
        if has_trait(call.domain, call.op_type, "keeps_finite"):
            return known
        finite = known == FINITE and has_trait(call.domain, call.op_type, "finite") and all(v.size for v in values)
        return FINITE if finite else NAN

    def _record(self, step: PlanStep) -> None:
        index = len(self.segment.steps)
        for v in (*step.reads, *step.writes):
            v.buffer.touch(index)
        if step.scratch is not None:
            step.scratch.touch(index)
        self.segment.steps.append(step)

    def _count(self, call: ir.Node) -> None:
        """Count the nodes of a call as executed, as the definitions would; the calls of a body count as one."""
        if not self.counts:
            return
        count = max(len(call.origins), 1)
        self.facts.executions += count
        self.budget.steps(count)


def _unknown() -> None:
    """The work of a call is not known."""


def flops_of(calls: Sequence[ir.Node], inputs: Sequence[Entry | None], output: Value) -> int | None:
    """The work of a call and of those that follow it, each of which computes one number for each element."""
    first = calls[0]
    shapes = [settled(e.shape) if isinstance(e, Value) else None for e in inputs]
    own = flops(first.domain, first.op_type, first.attributes, shapes, settled(output.shape))
    return None if own is None else own + (len(calls) - 1) * now(output.size)


def _content(entry: Entry) -> Any:
    return entry.value if isinstance(entry, OpaqueValue) else entry.array


def unshared(result: Any, placed: Sequence[np.ndarray]) -> Any:
    """A result that has no memory of the arena, whose contents change during a run."""
    if isinstance(result, list):
        return [unshared(v, placed) for v in result]
    if isinstance(result, np.ndarray) and any(np.may_share_memory(result, p) for p in placed):
        return result.copy()
    return result
