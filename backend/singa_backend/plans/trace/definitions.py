"""Calls of a plan that their definitions compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import dtypes, limits
from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ...kernels.table import worst
from ...kernels.values import FINITE, NAN, PlanStep, Value
from ...kernels.work import flops
from ..region import Call
from .segment import Entry, Mismatch, OpaqueValue
from .values import TraceValues


class Definitions(TraceValues):
    """Computes calls by their definitions, now and in every run."""

    def _by_definition(self, call: Call) -> int:
        """Compute a call with its definition, now and in every run."""
        entries = self._values(call)
        inner = [(outer, self._get(call.scope[outer])) for g in call.node.graphs for outer, _ in g.captured]
        frame: list[Any] = [None] * len(call.scope)

        def gather() -> list[Any]:
            for outer, entry in inner:
                frame[outer] = _content(entry)
            return [None if e is None else _content(e) for e in entries]

        constants = {outer: e.array for outer, e in inner if isinstance(e, Value) and e.constant}
        bodies = self.state.bodies(call.node, constants) if self.options.level and call.node.graphs else None
        outputs = self.state.visit(call.node, gather(), frame, bodies)
        made: list[Entry | None] = []
        dynamic = id(call.node) in self.dynamic
        for i, o in zip(call.outputs, outputs, strict=False):
            if i == ABSENT:
                made.append(None)
            elif not dynamic and isinstance(o, np.ndarray) and o.dtype != dtypes.STRING:
                value = self.allocate(o.shape, o.dtype, None, self._finiteness(call, entries))
                np.copyto(value.array, o)
                made.append(value)
            else:
                cell = OpaqueValue(_owned(o, [e.array for e in entries if isinstance(e, Value)]))
                self.live[id(cell)] = cell.value
                self.budget.count_tensor(limits.size_of(cell.value))
                made.append(cell)
        state, node = self.state, call.node

        loose = any(isinstance(e, OpaqueValue) for e in (*entries, *(e for _, e in inner)))

        def bind() -> Any:
            targets = [None if m is None else m if isinstance(m, OpaqueValue) else m.array for m in made]
            arrays = gather()
            given = list(frame)

            def run() -> None:
                values, around = (gather(), frame) if loose else (arrays, given)
                results = state.visit(node, values, around, bodies)
                for target, result in zip(targets, results, strict=False):
                    if target is None:
                        continue
                    if isinstance(target, OpaqueValue):
                        target.value = _owned(result, values)
                    elif not isinstance(result, np.ndarray) or result.shape != target.shape or result.dtype != target.dtype:
                        raise Mismatch(call)
                    else:
                        np.copyto(target, result)

            return [(run, ())]

        reads = tuple(e for e in (*entries, *(e for _, e in inner)) if isinstance(e, Value))
        writes = tuple(m for m in made if isinstance(m, Value))
        self.facts.definitions += 1
        step = PlanStep(bind, reads, writes, "definition", call.origins or (node,), tuple(self._reasons))
        step.flops = flops_of((call,), entries, writes[0]) if writes else None
        self._record(step)
        for i, m in zip(call.outputs, made, strict=False):
            if m is not None:
                self._set(i, m)
        self._used(call.reads)
        self.budget.left += 1  # the visitor has counted it
        self._count(call)
        return 1

    def _finiteness(self, call: Call, entries: Sequence[Entry | None]) -> int:
        if any(isinstance(e, OpaqueValue) for e in entries):
            return NAN  # what a sequence holds, or a string stands for, is not known
        known = worst(*(e for e in entries if isinstance(e, Value)))
        if has_trait(call.node.domain, call.name, "keeps_finite"):
            return known
        return FINITE if known == FINITE and has_trait(call.node.domain, call.name, "finite") else NAN

    def _record(self, step: PlanStep) -> None:
        index = len(self.segment.steps)
        for v in (*step.reads, *step.writes):
            v.buffer.touch(index)
        if step.scratch is not None:
            step.scratch.touch(index)
        self.segment.steps.append(step)

    def _count(self, call: Call) -> None:
        """Count the nodes of a call as executed, as the definitions would."""
        count = max(len(call.origins), 1)
        self.facts.executions += count
        self.budget.steps(count)


def flops_of(calls: Sequence[Call], inputs: Sequence[Entry | None], output: Value) -> int | None:
    """The work of a call and of those that follow it, each of which computes one number for each element."""
    first = calls[0]
    shapes = [e.shape if isinstance(e, Value) else None for e in inputs]
    own = flops(first.node.domain, first.name, first.attributes, shapes, output.shape)
    return None if own is None else own + (len(calls) - 1) * output.size


def _content(entry: Entry) -> Any:
    return entry.value if isinstance(entry, OpaqueValue) else entry.array


def _owned(value: Any, inputs: Sequence[Any]) -> Any:
    """A sequence in which arrays that are memory of the plan, the inputs and views, are copied."""
    if isinstance(value, list):
        return [_owned(v, inputs) for v in value]
    if isinstance(value, np.ndarray) and value.dtype != dtypes.STRING:
        return value.copy() if value.base is not None or any(value is x for x in inputs) else value
    return value
