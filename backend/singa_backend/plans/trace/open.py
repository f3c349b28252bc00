"""Open plans: the trace of a plan for some shapes, repeated for other shapes as far as its values are the same."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from ...errors import SonnxError
from ...ir import graph as ir
from ...ir.declaration import caches_of
from ...kernels import onednn
from ...kernels.table import Invalid
from ...kernels.values import Bound, OpaqueValue, PlanStep, Value
from ...proto.schemas import MICROSOFT
from ..answers import Mismatch
from ..flat import model_node
from ..open.caches import GrowingSpace, append
from ..open.products import OpenProduct
from .choose import Chooser
from .definitions import DefinitionStep, unshared
from .segment import Appended, Cache, Cell, Cells, Entry, Record


class NotOpen(Exception):
    """The plan for some shapes cannot be opened for others."""


class Opener(Chooser):
    """Traces a plan that is open: it repeats the steps of an earlier one, and computes the other items by definitions."""

    def _recorded(self, item: tuple[ir.Node, ...]) -> Record:
        """Compute an item, and note what was found.

        The values that it reads keep their places until then, even if its kernel reads copies of them, or nothing: definitions
        of an open plan may read them.
        """
        inner = {o for c in item for o in c.results}
        made = Record([(i, self._get(i)) for c in item for i in c.reads if i not in inner])
        for _, e in made.reads:
            if isinstance(e, Value):
                e.buffer.touch(max(len(self.segment.steps) - 1, 0))
        steps, buffers, executions, self.copied = len(self.segment.steps), len(self.buffers), self.facts.executions, []
        self._group(item)
        made.steps, made.copies = self.segment.steps[steps:], self.copied
        made.made = frozenset(self.buffers[buffers:])
        made.executions = self.facts.executions - executions
        made.results = {o: self.env[o] for o in inner if o in self.env}
        return made

    def _same_entry(self, held: Entry, i: ir.Value, x: Any, is_passed: bool) -> Entry:
        """The value of an input of an open plan: that of the earlier plan if it has the same shape."""
        if not isinstance(held, Value) or not isinstance(x, np.ndarray):
            raise NotOpen
        if held.shape == x.shape:
            if not is_passed:
                np.copyto(held.array, x)
            return held
        cell = Cache(x) if i in self.caches else Cell(x)
        self.segment.cells.append(cell)
        return cell

    def _repeat_or_open(self, item: tuple[ir.Node, ...], records: Sequence[Record]) -> None:
        """Use the steps of the earlier plan for an item, or compute it by definitions."""
        place = self.place
        self.place += 1
        record = records[place]
        buffers = {v.buffer for s in record.steps for v in s.reads}
        same = all(self._get(i) is e for i, e in record.reads) and self.stale.isdisjoint(buffers) and record.is_steady()
        if same:
            self.repeated += len(item)
            for step in record.steps:
                for function, arguments in step.bind():
                    function(*arguments)
            self.segment.steps += record.steps
            for i, e in record.results.items():
                self._set(i, e)
            for value, what, copy in record.copies:
                self.copies.setdefault(id(value), (value, {}))[1][what] = copy
            self.facts.executions += record.executions
            self.budget.steps(record.executions)
        else:
            self.opened += len(item)
            self._open(item, record)
        for call in item:
            self._used(call.reads)
        if self.unused:
            unused, self.unused = self.unused, Cells()
            unused.clear_values()
            self._record(PlanStep(lambda: [(unused.clear_values, ())], (), (), "release"))

    def _open(self, item: tuple[ir.Node, ...], record: Record) -> None:
        """Compute an item by definitions, in each run with the shapes that it meets.

        A result that had the same shape in the earlier plan takes its place, so that what reads it is as before: a run in which
        it has another shape, or is a constant with other contents, raises Mismatch.
        """
        for call in item:
            if call.is_("Concat") and isinstance(self._input(call, 0), Cache):
                self._grow(call)
            elif pasts := [i for i in caches_of(call.domain, call.op_type) if isinstance(self._input(call, i), Cache)]:
                if attends(call) and len(pasts) == 2:
                    self._attend(call)
                else:
                    self._extend(call, pasts)
            elif attends(call) and self._has_buffers(call):
                self._attend(call, buffers=True)
            else:
                self._open_call(call)
        written = {v.buffer for s in record.steps for v in s.writes}
        settled: list[tuple[ir.Node, Cell, Value]] = []
        for call in item:
            for o in call.results:
                cell, held = self.env.get(o), record.results.get(o)
                if not isinstance(cell, Cell) or not isinstance(held, Value) or not isinstance(cell.value, np.ndarray):
                    continue
                if (held.shape, held.dtype) != (cell.value.shape, cell.value.dtype):
                    continue
                if _same(cell.value, held) if held.constant else held.buffer in written:
                    settled.append((call, cell, held))
                    self.env[o] = held
        self.stale |= record.made - {held.buffer for _, _, held in settled}
        if not settled:
            return

        def bind() -> Bound:
            return [(_settle, (call, cell, held.array, held.constant)) for call, cell, held in settled]

        for function, arguments in bind():
            function(*arguments)
        self.segment.steps.append(PlanStep(bind, (), tuple(v for _, _, v in settled if not v.constant), "copy"))
        self.unused += [cell for _, cell, _ in settled]

    def _open_call(self, call: ir.Node) -> None:
        """Compute a call by its definition into values that are not in the arena."""
        cells = [None if o is None else Cell() for o in call.outputs]
        product = OpenProduct() if call.is_("MatMul") and onednn.library() is not None else None
        captured = self._captured(call)
        values = self._values(call)
        made = DefinitionStep(self.state, call, values, captured, None, product, [*cells])
        self._record(PlanStep(made.bind, _placed(values), (), "definition", call.origins, ("its shapes differ between runs",)))
        for function, arguments in made.bind():
            function(*arguments)
        self._set_cells(call, cells)
        self.budget.left += 1  # the visitor has counted it

    def _set_cells(self, call: ir.Node, cells: Sequence[Cell | None]) -> None:
        for o, cell in zip(call.outputs, cells, strict=False):
            if o is not None and cell is not None:
                self.segment.cells.append(cell)
                self._set(o, cell)
        self.facts.definitions += 1
        self._count(call)

    def _input(self, call: ir.Node, index: int) -> Entry | None:
        value = call.input(index)
        return None if value is None else self.env.get(value)

    def _extend(self, call: ir.Node, pasts: Sequence[int]) -> None:
        """Compute a call by its definition, whose concatenations to the past grow in its memory if there is room."""
        entries, state, facts, presents = self._values(call), self.state, self.facts, caches_of(call.domain, call.op_type)
        grown = {presents[i] for i in pasts}
        targets = [None if o is None else Appended() if n in grown else Cell() for n, o in enumerate(call.outputs)]
        placed = [e.array for e in entries if isinstance(e, Value)]

        def bind() -> Bound:
            sources = [e.array if isinstance(e, Value) else e for e in entries]

            def run() -> None:
                values = [s.value if isinstance(s, OpaqueValue) else s for s in sources]
                visitor = copy(state.visitor)
                visitor.xp = space = GrowingSpace(visitor.xp, [values[i] for i in pasts], facts.finite)
                try:
                    results = visitor.visit(model_node(call), values, [])
                except SonnxError:
                    if space.error is not None:
                        raise space.error from None
                    raise
                space.check_others()
                for target, result in zip(targets, results, strict=False):
                    if target is not None:
                        target.value = unshared(result, placed)

            return [(run, ())]

        origins = call.origins
        self._record(PlanStep(bind, _placed(entries), (), "definition", origins, ("the caches grow in place",)))
        for function, arguments in bind():
            function(*arguments)
        self._set_cells(call, targets)
        self.budget.left += 1  # the visitor has counted it

    def _grow(self, call: ir.Node) -> None:
        """Append to a cache, in its memory if there is room."""
        past, *more = call.reads
        cache, rest = self._get(past), [self._get(i) for i in more]
        target = Appended()
        state, axis, facts = self.state, self.caches[past], self.facts
        assert isinstance(cache, Cache)

        def bind() -> Bound:
            parts = [e if isinstance(e, OpaqueValue) else e.array for e in rest]

            def run() -> None:
                arrays = [p.value if isinstance(p, OpaqueValue) else p for p in parts]
                target.value = append(cache.value, arrays, axis, facts.finite, state.visitor.budget)

            return [(run, ())]

        self._record(PlanStep(bind, _placed(rest), (), "numpy.copyto", call.origins, ("grows in place",)))
        for function, arguments in bind():
            function(*arguments)
        self._set_cells(call, [target])

    def _has_buffers(self, call: ir.Node) -> bool:
        """Whether the caches of attention are buffers with room for the new rows."""
        from ...kernels.group_query import GroupQuery, checked  # few models have it

        values = [e.array if isinstance(e, Value) else e.value if isinstance(e, OpaqueValue) else e for e in self._values(call)]
        try:
            parts, past = checked(GroupQuery.of(call.attributes), values)
        except Invalid:
            return False
        return bool(past < parts[3].shape[2])

    def _attend(self, call: ir.Node, buffers: bool = False) -> None:
        """Compute attention with caches of keys and values, which grow in their memory if there is room; buffers are copied."""
        from ...kernels.group_query import GroupQuery, grow  # few models have it

        entries, state, facts = self._values(call), self.state, self.facts
        targets = [Cell(), *((Cell(), Cell()) if buffers else (Appended(), Appended()))][: len(call.outputs)]
        made = GroupQuery.of(call.attributes)

        def bind() -> Bound:
            sources = [e.array if isinstance(e, Value) else e for e in entries]

            def extend(cache: np.ndarray, rows: np.ndarray, past: int) -> np.ndarray:
                if past == cache.shape[2]:
                    return append(cache, [rows], 2, facts.finite, state.visitor.budget)
                state.visitor.budget.admit(cache.shape, cache.itemsize)
                end, copied = past + rows.shape[2], np.empty(cache.shape, cache.dtype)
                copied[:, :, :past], copied[:, :, past:end], copied[:, :, end:] = cache[:, :, :past], rows, 0
                return copied

            def run() -> None:
                values = [s.value if isinstance(s, OpaqueValue) else s for s in sources]
                state.visitor.budget.step()
                for target, result in zip(targets, grow(made, values, extend), strict=False):
                    target.value = result

            return [(run, ())]

        origins = call.origins
        note = "the caches are buffers, which are copied" if buffers else "the caches grow in place"
        self._record(PlanStep(bind, _placed(entries), (), "numpy.group_query", origins, (note,)))
        for function, arguments in bind():
            function(*arguments)
        self._set_cells(call, targets)
        self.budget.left += 1  # the visitor has counted it


def _placed(entries: Sequence[Entry | None]) -> tuple[Value, ...]:
    """The entries that have a place in memory; that of an output which is not copied differs between runs."""
    return tuple(e for e in entries if isinstance(e, Value))


def attends(call: ir.Node) -> bool:
    """Whether a call is attention with caches that can grow in place."""
    if (call.domain, call.op_type) != (MICROSOFT, "GroupQueryAttention") or len(call.inputs) < 5:
        return False
    from ...kernels.group_query import reason_against  # few models have it

    present = 1 + max(i for i, v in enumerate(call.inputs) if v is not None)
    return not reason_against(call.attributes, present, len(call.outputs))


def _same(array: np.ndarray, held: Value) -> bool:
    """Whether an array has the contents of a constant."""
    return array.tobytes() == held.array.tobytes()


def _settle(call: ir.Node, cell: OpaqueValue, target: np.ndarray, constant: bool) -> None:
    """Copy a result to its place; raise Mismatch if it has another shape, or is not the constant that was found there."""
    x = cell.value
    if not isinstance(x, np.ndarray) or x.shape != target.shape or x.dtype != target.dtype:
        raise Mismatch(call)
    if not constant:
        np.copyto(target, x)
    elif x.tobytes() != target.tobytes():
        raise Mismatch(call)
