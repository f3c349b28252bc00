"""A segment of a plan: steps that always run together; and what the segments of a plan share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import limits
from ...ir import graph as ir
from ...ir.sizes import LOWEST, Scope
from ...kernels import onednn
from ...kernels.table import KernelCache
from ...kernels.values import Bound, OpaqueValue, PlanStep, Value
from ...runtime.executor import Visitor
from ..bodies import Bodies
from ..contention import Pace, contention, single_step
from ..passed import Receivers, Replaced, ZeroCopy, unbound
from ..updates import require_apart
from .items import Item

Entry = Value | OpaqueValue


@dataclass(eq=False)
class DynamicCall:
    """A call of the model whose results have had other shapes or types than those of a trace: it ends a segment.

    Attributes:
        axes: the result and the axis of each size that differs between runs.
        is_exact: whether what follows needs numbers for these sizes.
        is_unnamed: whether they are only known not to follow from sizes by name: a plan for numbers need not end a segment.
    """

    axes: set[tuple[int, int]] = field(default_factory=set)
    is_exact: bool = False
    is_unnamed: bool = False

    def is_open(self, result: int, axis: int, size: int) -> bool:
        """Whether the size of an axis of a result has a name in what follows."""
        return not self.is_exact and size >= LOWEST and (result, axis) in self.axes

    def kind(self, result: int, entry: Entry) -> Any:
        """What a segment that follows depends on: the dtype of a result, and its shape, with None for each size by name."""
        value = entry.value if isinstance(entry, OpaqueValue) else entry
        if not isinstance(value, (Value, np.ndarray)):
            return result, type(value)
        return result, value.dtype, tuple(None if self.is_open(result, axis, d) else d for axis, d in enumerate(value.shape))

    def note(self, kinds: Any, others: Iterable[Any]) -> None:
        """Note in which sizes results differ from others of the same dtypes and ranks."""
        for other in others:
            for (n, *mine), (_, *its) in zip(kinds, other, strict=True):
                if len(mine) == len(its) == 2 and mine[0] == its[0] and len(mine[1]) == len(its[1]):
                    self.axes.update((n, axis) for axis, (a, b) in enumerate(zip(mine[1], its[1], strict=True)) if a != b)


EXACT = DynamicCall(is_exact=True)
"""What follows a dynamic call in a plan whose sizes are numbers."""


@dataclass(eq=False)
class OpenResults:
    """The results of a dynamic call at the beginning of a segment.

    Attributes:
        symbols: the place of the value of each symbol, and the results and axes that have it as size.
    """

    symbols: list[tuple[int, list[tuple[OpaqueValue, int]]]] = field(default_factory=list)

    def sizes(self) -> list[int] | None:
        """The present value of each symbol; None if sizes differ that have one."""
        sizes = []
        for _, ((cell, axis), *others) in self.symbols:
            sizes.append(size := cell.value.shape[axis])
            if any(c.value.shape[a] != size for c, a in others):
                return None
        return sizes


@dataclass(eq=False)
class Continuation:
    """Where a segment ended: what a continuation needs.

    Attributes:
        env: the live values.
        items: the work that is left.
        uses: the number of uses that are left.
        call: after which it ended; None for a branch.
        scope: what was known of sizes; None if all are numbers.
    """

    env: dict[ir.Value, Entry]
    items: list[Item]
    uses: Counter[ir.Value]
    call: DynamicCall | None = None
    scope: Scope | None = None


@dataclass(eq=False)
class Segment:
    """Steps that always run together.

    Attributes:
        steps: what was recorded.
        flat: the bound calls, in order.
        arena: their memory.
        arena_bytes: its size.
        live_bytes: the lower bound of that size.
        check: returns the key of the next segment, after the steps; None for the last one.
        next: the segments that follow, by key: several if they make other assumptions about sizes.
        point: the state after the steps, from which the trace of a new next segment continues.
        outputs: the outputs of the plan, for the last segment.
        copies: for each output the function that returns a copy.
        passed: the inputs and outputs that are not copied.
        moving: (index of the first call, step, number of calls) of the steps that use those of `passed`.
        replaced: the inputs that results replace in place.
        updating: the same of the steps that use only inputs of `replaced`.
        update: the index of the first call that may write to them; nothing after it refuses a value.
        pace: how fast it runs, if a run may use fewer threads; None if it may not, or no step uses several.
        binder: binds it again for other sizes; None if all are fixed.
        scope: what it assumes of sizes; None if all are fixed.
        results_before: those of the dynamic call before it.
        largest: the bytes of its largest tensor of the present sizes.
        version: the number of times that it was bound again.
        bound_for: the version of the segment before it, and the sizes of the results, when it was bound.
    """

    steps: list[PlanStep] = field(default_factory=list)
    flat: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    arena: np.ndarray | None = None
    arena_bytes: int = 0
    live_bytes: int = 0
    check: Callable[[], Any] | None = None
    next: dict[Any, list[Segment]] = field(default_factory=dict)
    point: Continuation | None = None
    outputs: tuple[Entry, ...] = ()
    copies: tuple[Callable[[], Any], ...] = ()
    passed: tuple[ZeroCopy, ...] = ()
    moving: tuple[tuple[int, PlanStep, int], ...] = ()
    replaced: tuple[Replaced, ...] = ()
    updating: tuple[tuple[int, PlanStep, int], ...] = ()
    update: int | None = None
    pace: Pace | None = None
    binder: Any = None
    scope: Scope | None = None
    results_before: OpenResults = field(default_factory=OpenResults)
    largest: int = 0
    version: int = 0
    bound_for: tuple[int, ...] = ()

    def attach(self, inputs: Sequence[Any], receivers: Receivers = ()) -> None:
        """Bind the steps that use inputs and outputs which are not copied to those of this run."""
        for p in self.passed:
            p.attach(inputs, receivers)
        if sum([p.moves(inputs) for p in self.replaced]):
            require_apart([p.array for p in self.replaced if p.array is not None])
            for start, step, _ in self.updating:
                self._replace(start, step.bind())
        for start, step, _ in self.moving:
            self._replace(start, step.bind())

    @contextmanager
    def present(self) -> Iterator[list[tuple[Callable[..., Any], tuple[Any, ...]]]]:
        """The calls in the form in which a run would begin now, on one thread or on several."""
        if self.pace is None or not contention.present:
            yield self.flat
        else:
            with onednn.using_threads(1):
                yield self.pace.single_steps(self.flat)

    def detach(self) -> None:
        """Keep nothing of the arrays of a run."""
        for p in self.passed:
            p.detach()
        for start, _, count in self.moving:
            self._replace(start, [(unbound, ())] * count)

    def _replace(self, start: int, pieces: Bound) -> None:
        self.flat[start : start + len(pieces)] = pieces
        if self.pace is not None and self.pace.steps is not None:
            self.pace.steps[start : start + len(pieces)] = [single_step(f, a) for f, a in pieces]

    def results(self) -> list[Any]:
        """The present outputs, copied."""
        return [copy() for copy in self.copies]


@dataclass(eq=False)
class SharedValues:
    """What the plans of a graph share.

    Attributes:
        kernels: packed weights and other things that kernels have made.
        constants: each constant that was used, and its value in a plan, by its key.
        mapped: the first value of each tensor of a mapped file, by address and size.
        folded: the results of calls whose inputs are all constants.
        branches: the calls of the branches of If, by the If and the condition.
        bodies: the calls of the bodies of onnxruntime's operators, by the call and its inputs; None for one without a body.
        graphs: makes these bodies.
        kept: the calls whose definitions compute them though there is a body.
    """

    kernels: KernelCache = field(default_factory=KernelCache)
    constants: dict[Hashable, tuple[Any, Value]] = field(default_factory=dict)
    mapped: dict[tuple[int, int], Value] = field(default_factory=dict)
    folded: dict[ir.Node, list[Any]] = field(default_factory=dict)
    branches: dict[tuple[ir.Node, bool], ir.Graph] = field(default_factory=dict)
    bodies: dict[tuple[Any, ...], ir.Graph | None] = field(default_factory=dict)
    graphs: Bodies = field(default_factory=Bodies)
    kept: set[ir.Node] = field(default_factory=set)

    def containers(self) -> tuple[dict[Any, Any], ...]:
        """All containers, whose values count as live."""
        return self.kernels.derived, self.kernels.constants, self.constants, self.mapped, self.folded, self.branches, self.bodies

    def clear(self) -> None:
        """Forget everything."""
        for container in self.containers():
            container.clear()


class RunState:
    """What the steps of a plan share during a run.

    Attributes:
        visitor: computes by definitions.
        bodies: makes the plans of a node's subgraphs.
        visit_body: makes the visitor of a node with such plans.
    """

    visitor: Visitor
    bodies: Callable[[ir.Node, dict[ir.Value, Any]], Any]
    visit_body: Callable[[limits.Budget, Any], Visitor]

    def forget(self) -> bool:
        """Keep nothing of a run, whose visitor has its values; return whether there was one."""
        return vars(self).pop("visitor", None) is not None

    def visit(self, node: ir.Node, inputs: list[Any], frame: Any, bodies: Any) -> list[Any]:
        """Compute a node by its definition; its subgraphs by plans."""
        visitor = self.visit_body(self.visitor.budget, bodies) if bodies else self.visitor
        return visitor.visit(node, inputs, frame)


@dataclass(eq=False)
class PlanFacts:
    """What is known of a plan when its trace is complete.

    Attributes:
        finite: whether a kernel needs finite inputs to agree with the definitions.
        executions: the nodes that the definitions would execute.
        largest: bytes of the largest tensor.
        rank: the highest rank.
        folded: the number of calls whose results depend on shapes only.
        definitions: the number of calls that their definitions compute.
        parallel: whether a step may use oneDNN, whose number of threads is that of its caller.
        wants: the keys of the machine code that steps would use, and that was not made when they were traced.
        largest_fixed: the bytes of the largest tensor whose size does not differ between runs.
    """

    finite: bool = False
    executions: int = 0
    largest: int = 0
    rank: int = 0
    folded: int = 0
    definitions: int = 0
    parallel: bool = False
    wants: set[str] = field(default_factory=set)
    largest_fixed: int = 0
