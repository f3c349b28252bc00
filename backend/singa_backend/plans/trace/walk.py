"""The tracer: runs the calls of a graph once, chooses a kernel for each, and records the steps as a plan.

The first run of a plan is its trace: every value exists, so shapes, dtypes and host inputs are those of this run.  What
depends on shapes only is a constant of the plan.  A value whose shape depends on data ends a segment of the plan; a later run
with another shape continues with another segment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ...ir import graph as ir
from ...ir.sizes import OpenSize, Scope
from ...kernels.values import NAN, OpaqueValue, PlanStep, Value
from ..answers import Mismatch
from ..flat import NotFlat, branches_fit, flat, model_node, read_from
from ..fusion import fuse
from ..updates import NotInPlace
from .items import Branch, CopyIn, Item, Rename, Update, UpdateBegin, items_of
from .segment import EXACT, Continuation, DynamicCall, Entry, Segment
from .updates import Updater


class Tracer(Updater):
    """Traces a segment of a plan, and those that follow it."""

    def start(self, inputs: Sequence[Any], shapes: Sequence[Sequence[Any] | None] = ()) -> Segment:
        """Trace the graph on these inputs; return the first segment.

        Args:
            inputs: the inputs.
            shapes: those of the inputs, with sizes by name.
        """
        growing = {c.index: c.value for c in self.caches.values()}
        for index, (i, x) in enumerate(zip(self.graph.inputs, inputs, strict=True)):
            entry = growing.get(index) or self._entry(x, shapes[index] if shapes else None)
            self.env[i] = entry
            self.entries.append(entry)
            if isinstance(entry, Value):
                entry.buffer.users += 1
                entry.buffer.touch(0)
        self.uses = Counter(i for call in self.graph.nodes for i in call.reads)
        self.uses.update(self.graph.outputs)
        self.uses.update(self.graph.inputs)  # the buffers of inputs are written before each run
        return self._walk(items_of(self.graph, self.roles, self.options.level > 1))

    def resume(self, point: Continuation) -> Segment:
        """Trace what follows a segment."""
        self.env, self.uses, self.begins = dict(point.env), Counter(point.uses), False
        for entry in self.env.values():
            if isinstance(entry, Value):
                entry.buffer.users += 1
        return self._walk(list(point.items))

    def _walk(self, items: list[Item]) -> Segment:
        first = self.segment
        pending = items[::-1]
        while pending:
            item = pending.pop()
            if isinstance(item, Rename):
                for before, after in zip(item.sources, item.targets, strict=True):
                    self._set(after, self._get(before))
                self._used(item.sources)
            elif isinstance(item, CopyIn):
                self._adopt(item.values, item.call)
            elif isinstance(item, UpdateBegin):
                self._begin_updates(self.segment is first)
            elif isinstance(item, Branch):
                pending += self._select(item, pending)[::-1]
            elif isinstance(item, Update):
                self._group(item.calls, "update")
            else:
                end = next((n for n, c in enumerate(item, 1) if self._ends_segment(c)), len(item))
                item, rest = item[:end], item[end:]
                pending += [rest] if rest else []
                self._group(item)
                for call in filter(self._ends_segment, item[:-1]):  # what follows it has not seen its result by name
                    raise Mismatch(call, is_unnamed=True)
                if self._ends_segment(item[-1]):
                    self._split_after(item[-1], pending)
        self.segment.outputs = tuple(self._result(i) for i in self.graph.outputs)
        self._finish(self.segment is first and bool(self.entries))
        return first

    def _ends_segment(self, call: ir.Node) -> bool:
        """Whether the results of a call differ in shape or type between runs, and what follows depends on that."""
        return self.is_dynamic(call) and not self.roles.only_sent.issuperset(call.results)

    def _begin_updates(self, whole: bool) -> None:
        """What follows may replace inputs: in place only if the plan has no other segment, after which another one could fail."""
        if not whole:
            raise NotInPlace("sizes or branches depend on values")
        self.updates = len(self.segment.steps)
        entries = dict(zip(self.graph.inputs, self.entries, strict=True))
        for i in self.roles.replaced.values():
            entry = entries[i]
            if not isinstance(entry, Value) or not entry.contiguous:
                raise NotInPlace("an input is not an array of numbers")
            self.replaced[id(entry.buffer)] = i

    def _result(self, i: ir.Value) -> Entry:
        """An output of the plan: the input that it replaces, if it does."""
        made = self._get(i)
        if self.updates is None or i not in self.roles.replaced:
            return made
        of = self.roles.replaced[i]
        given = self._get(of)
        if not isinstance(made, Value) or not isinstance(given, Value):
            raise NotInPlace("a result is not an array of numbers")
        if (made.shape, made.dtype) != (given.shape, given.dtype):
            raise NotInPlace("a result has another shape or dtype than the input that it replaces")
        held = self.replaced.get(id(made.buffer))
        inside = held == of and (made.offset, made.strides) == (given.offset, given.strides)
        if held is not None and not inside:
            raise NotInPlace("a result is in the memory of another input")
        if given.buffer.users != 1 + inside:
            raise NotInPlace("another result shows an input that is replaced")
        if not inside:
            with self.settling():
                np.copyto(given.array, made.array)
            origins = i.producer.origins if i.producer is not None else ()
            self._record(PlanStep(lambda: [(np.copyto, (given.array, made.array))], (made,), (given,), "copy", origins))
        return given

    def _split_after(self, call: ir.Node, pending: list[Item]) -> None:
        """End the segment after a call whose results differ in shape or type."""
        dynamic, results = EXACT if self.space is None else self.dynamic[model_node(call)], tuple(call.results)
        cells = {n: self.env[i] for n, i in enumerate(results) if i in self.env}
        self._split(pending, CopyIn(results, call), partial(_kinds, cells, dynamic), dynamic)

    def _split(self, pending: list[Item], then: Item, key: Callable[[], Any], call: DynamicCall | None = None) -> None:
        """End the segment here; the next one begins with `then`."""
        if self.updates is not None:
            raise NotInPlace("the size of a result that replaces an input depends on values")
        if self.caches:
            raise OpenSize("a plan of several segments copies its inputs")
        done = self.segment
        for entry in self.env.values():
            if isinstance(entry, Value) and not entry.buffer.pinned:
                entry.buffer.touch(len(done.steps))
        self._finish()
        pending.append(then)
        following = Segment()
        done.point = Continuation(dict(self.env), pending[::-1], Counter(self.uses), call, self.segment.scope)
        done.check, done.next[key()] = key, [following]
        if self.space is not None:
            self.space.enter(Scope(self.space, self.space.scope))
        self.segment, self.buffers, self.began = following, [], time.perf_counter()
        self.named, self.exact = [], []
        self.begins = False
        self.copies.clear()

    def _adopt(self, values: Sequence[ir.Value], call: ir.Node) -> None:
        names: dict[int, tuple[Any, list[tuple[OpaqueValue, int]]]] = {}
        for n, i in enumerate(values):
            cell = self.env.get(i)
            if isinstance(cell, OpaqueValue) and isinstance(cell.value, np.ndarray) and cell.value.dtype != dtypes.STRING:
                shape = self._named_sizes(call, n, i.name, cell, names)
                made = self.allocate(shape, cell.value.dtype, None, NAN)
                with self.settling():
                    np.copyto(made.array, cell.value)

                def bind(cell: OpaqueValue = cell, made: Value = made) -> Any:
                    target = made.array
                    return [(lambda: np.copyto(target, cell.value), ())]

                self._record(PlanStep(bind, (), (made,), "copy", call.origins))
                self.env[i] = made
                made.buffer.users += 1

    def _named_sizes(self, call: ir.Node, n: int, name: str, cell: OpaqueValue, names: dict[int, Any]) -> list[Any]:
        """The shape of a result of a dynamic call; equal sizes that differ between runs have one name.

        Args:
            call: the call.
            n: the number of the result.
            name: of the result.
            cell: holds it.
            names: the sizes of the call that have names, with the results and axes that have each.
        """
        dynamic, space = self.dynamic[model_node(call)], self.space
        shape: list[Any] = list(cell.value.shape)
        for axis, size in enumerate(shape):
            if space is None or not dynamic.is_open(n, axis, size):
                continue
            if size not in names:
                names[size] = space.symbol(f"{name}[{axis}]", size), []
                self.segment.results_before.symbols.append((len(space.values) - 1, names[size][1]))
                space.scope.calls += [dynamic] * (dynamic not in space.scope.calls)
            shape[axis], places = names[size]
            places.append((cell, axis))
        return shape

    def _select(self, item: Branch, pending: list[Item]) -> list[Item]:
        """The work of the branch that an If takes."""
        call = item.call
        condition = None if call.inputs[0] is None else self._get(call.inputs[0])
        with self.settling():
            array = condition.array if isinstance(condition, Value) and condition.contents is None else None
        same = branches_fit(call)
        if not isinstance(condition, Value) or array is None or array.size != 1 or array.dtype != np.bool_ or not same:
            return [(call,)]  # the definition reports the error
        if not item.chosen and not condition.constant:
            self._split(pending, Branch(call, True), lambda: bool(condition.array.reshape(-1)[0]))
            return []
        try:
            return self._branch(call, bool(array.reshape(-1)[0]))
        except NotFlat:
            return [(call,)]

    def _branch(self, call: ir.Node, taken: bool) -> list[Item]:
        inner = self.shared.branches.get((call, taken))
        if inner is None:
            graph: ir.Graph = call.attributes["then_branch" if taken else "else_branch"]
            outer = {v: call.captures[v] for v in graph.captured}
            inner = flat(graph, captured={v: o for v, o in outer.items() if o.constant is not None})
            fuse(inner, self.options.level)
            read_from(inner, (o for o in outer.values() if o.constant is None))
            self.shared.branches[call, taken] = inner
        for c in inner.nodes:
            self.uses.update(c.reads)
        self.uses.update(inner.outputs)
        self._used(call.reads)
        pairs = [(s, o) for s, o in zip(inner.outputs, call.outputs, strict=False) if o is not None]
        return [*items_of(inner), Rename(tuple(s for s, _ in pairs), tuple(o for _, o in pairs))]


def _kinds(entries: Mapping[int, Entry], call: DynamicCall) -> Any:
    return tuple(call.kind(n, e) for n, e in entries.items())
