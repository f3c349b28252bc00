"""Updates in a trace: one step computes the elementwise calls whose results are outputs, or the chains that they form do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...ir import graph as ir
from ...ir.graph import ABSENT
from ...kernels.expressions import Operation, compute, trace
from ...kernels.table import Kernel, Refused
from ...kernels.values import Value
from ..chains import chains
from .choose import TraceSite
from .place import Placer

KERNEL = Kernel(compute, "numpy", 0, frozenset())
"""The kernel of updates, which is not in the table: it computes several outputs of several calls."""


class Updater(Placer):
    """Traces updates."""

    def _update(self, calls: Sequence[ir.Node]) -> None:
        """Compute the calls of an update; those of numbers, such as a rate, on their own."""
        positions: dict[ir.Value, int] = {}
        operations: list[Operation] = []
        rest: list[ir.Node] = []
        known = True
        for call in calls:
            operands: list[Value | int | None] = []
            for i in call.inputs:
                entry = None if i is None or i in positions else self._get(i)
                known &= i is None or i in positions or isinstance(entry, Value)
                operands.append(entry if isinstance(entry, Value) else None if i is None else positions.get(i, ABSENT))
            if all(v is None or (isinstance(v, Value) and v.size == 1) for v in operands):
                self._group((call,))
                continue
            assert call.operator is not None
            positions[call.results[0]] = len(operations)
            operations.append(Operation(call.operator, call.attributes, tuple(operands)))
            rest.append(call)
        if rest and not (known and self._as_one_step(rest, operations, positions)):
            for chain in chains(rest, self.graph.outputs):
                self._group(chain)

    def _replaceable(self, calls: Sequence[ir.Node], positions: dict[ir.Value, int]) -> dict[int, Value]:
        """The inputs that results of these calls replace, if only these calls read them from now on; by the result's position."""
        if self.updates is None:
            return {}
        times = Counter(i for c in calls for i in c.reads)
        found = {}
        for i, at in positions.items():
            given = self.roles.replaced.get(i)
            entry = None if given is None else self.env.get(given)
            if (
                given is not None
                and isinstance(entry, Value)
                and self.uses[given] == times[given] + 1
                and entry.buffer.users == 1
            ):
                found[at] = entry
        return found

    def _as_one_step(self, calls: Sequence[ir.Node], operations: Sequence[Operation], positions: dict[ir.Value, int]) -> bool:
        """Compute calls with one step; return whether it was possible."""
        results = [positions[i] for i in positions if self.uses[i] > sum(c.reads.count(i) for c in calls)]
        inputs = list({id(o): o for one in operations for o in one.operands if isinstance(o, Value)}.values())
        site = TraceSite(self, calls[-1], inputs, ())
        first_buffer, first_step = len(self.buffers), len(self.segment.steps)
        replaced = self._replaceable(calls, positions)
        try:
            terms, values = trace(site, operations)
            into = {n: replaced[at] for n, at in enumerate(results) if at in replaced}
            made = dict(zip(results, compute(site, [terms[at] for at in results], values, "update", into=into), strict=True))
            self._run_steps(site, KERNEL, calls)
        except Refused as refusal:
            self._reasons = [f"update: {refusal}"]
            self._forget(first_buffer, first_step)
            return False
        for value, what, copy in site.made:
            self.copies.setdefault(id(value), (value, {}))[1][what] = copy
            copy.buffer.users += 1
        self.copied += site.made
        for call in calls:
            (result,) = call.results
            at = positions[result]
            if at in made:
                made[at].buffer.touch(max(len(self.segment.steps) - 1, 0))
                self._set(result, made[at])
        self._used([i for call in calls for i in call.reads if i not in positions or positions[i] in made])
        for call in calls:
            self._count(call)
        for buffer in self.buffers[first_buffer:]:
            self._release(buffer)
        return True
