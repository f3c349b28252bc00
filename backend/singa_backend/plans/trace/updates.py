"""Updates in a trace: one step computes the calls of an expression whose results are outputs, or the chains that they form do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...elementwise.compile import available
from ...ir import graph as ir
from ...ir.graph import ABSENT
from ...ir.sizes import OpenSize
from ...kernels.expressions import ExpressionCall, compute, trace
from ...kernels.frames import MISSING
from ...kernels.table import Kernel, Refused
from ...kernels.values import Value
from ..chains import chains, is_elementwise, is_expression
from .place import Placer
from .site import TraceSite

KERNEL = Kernel(compute, "numpy", 0, frozenset())
"""The kernel of updates, which is not in the table: it computes several outputs of several calls."""


class Updater(Placer):
    """Traces groups of elementwise calls, and updates."""

    def _group(self, group: tuple[ir.Node, ...], label: str = "") -> None:
        """Compute a chain of calls, or calls of an expression of which the last one or others return the results.

        Args:
            group: the calls.
            label: names the step in reports; by default the operators do.
        """
        self.ahead = 0
        joins = not available() or label
        if len(group) == 1 or self.options.level < 2 or not joins or not all(map(is_expression, group)):
            super()._group(group)
            return
        positions: dict[ir.Value, int] = {}
        operations: list[ExpressionCall] = []
        rest: list[ir.Node] = []
        known = True
        for call in group:
            operands: list[Value | int | None] = []
            for i in call.inputs:
                entry = None if i is None or i in positions else self._get(i)
                known &= i is None or i in positions or isinstance(entry, Value)
                operands.append(entry if isinstance(entry, Value) else None if i is None else positions.get(i, ABSENT))
            if all(v is None or (isinstance(v, Value) and (v.constant or v.size == 1)) for v in operands):
                super()._group((call,))  # a number, such as a rate, or a constant
                continue
            operands = [v.unnamed() if isinstance(v, Value) else v for v in operands]
            assert call.operator is not None
            positions[call.results[0]] = len(operations)
            operations.append(ExpressionCall(call.operator, call.attributes, tuple(operands)))
            rest.append(call)
        if rest and not (known and self._as_one_step(rest, operations, positions, label)):
            self._in_parts(tuple(rest))

    def _in_parts(self, calls: tuple[ir.Node, ...]) -> None:
        """Compute what is elementwise before the first reduction, and the rest; or chains."""
        plain = [*map(is_elementwise, calls), False].index(False)
        if 0 < plain < len(calls) and not self.ahead:
            self._group(calls[:plain])
            self._group(calls[plain:])
            return
        for chain in chains(calls, self._results(calls)):
            super()._group(chain)

    def _results(self, calls: Sequence[ir.Node]) -> list[ir.Value]:
        """The results of calls that others read."""
        times = Counter(i for c in calls for i in c.reads)
        return [o for c in calls for o in c.results if self.uses[o] > times[o]] or calls[-1].results

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

    def _as_one_step(
        self, calls: Sequence[ir.Node], operations: Sequence[ExpressionCall], positions: dict[ir.Value, int], label: str
    ) -> bool:
        """Compute calls with one step; return whether it was possible."""
        results = [positions[o] for o in self._results(calls)]
        times = Counter(i for c in calls for i in c.reads)
        free = {
            id(e) for i, n in times.items() if i not in positions and isinstance(e := self._get(i), Value) and self.reusable(i, n)
        }
        inputs = list({id(o): o for one in operations for o in one.operands if isinstance(o, Value)}.values())
        site = TraceSite(self, calls[-1], inputs, ())
        first_buffer, first_step = len(self.buffers), len(self.segment.steps)
        replaced = self._replaceable(calls, positions)
        try:
            terms, values = trace(site, operations)
            into = {n: replaced[at] for n, at in enumerate(results) if at in replaced}
            name = label or "+".join(c.op_type.lower() for c in calls)
            computed = compute(site, [terms[at] for at in results], values, name, lambda v: id(v) in free, into)
            made = dict(zip(results, computed, strict=True))
            if self._want(site) and not label:
                self.ahead = len(calls)
                site.refuse(MISSING)
            self._run_steps(site, KERNEL, calls)
        except (Refused, OpenSize) as refusal:
            self._reasons = [f"{KERNEL.name}: {refusal}"]
            self._forget(first_buffer, first_step)
            return False
        for value, what, copy in site.made:
            self.copies.setdefault(id(value), (value, {}))[1][what] = copy
            copy.buffer.users += 1
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
