"""Plans of a model: one for each combination of input shapes and dtypes, made at the first run with them and kept."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..errors import ResourceExhausted
from ..ir.graph import Graph, Node
from ..kernels import onednn
from ..kernels.table import Invalid, Options
from ..kernels.values import Value
from ..runtime.executor import Executor, Visitor
from .fusion import fuse
from .region import Region, region_of
from .trace import Facts, Loose, Mismatch, Segment, State, Tracer

PLANS = 16
"""The number of plans of a model that are kept."""

BRANCHES = 16
"""The number of continuations of a segment that are kept."""


class Plan:
    """A model at fixed input shapes: segments of bound calls.

    Attributes:
        first: the first segment.
        facts: what the trace found.
        inputs: the arrays that a run copies its inputs into; a Loose for an input that is not an array of numbers.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state = State()
        self.facts = Facts()
        self.first = Segment()
        self.inputs: list[Any] = []
        self.lock = threading.Lock()

    def trace(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any]:
        """Make the plan by a run on these inputs; return the outputs."""
        tracer = self._tracer(budget)
        self.first = tracer.start(inputs)
        self.inputs = [e.array if isinstance(e, Value) else e for e in tracer.entries]
        return _outputs(tracer.segment)

    def _tracer(self, budget: limits.Budget) -> Tracer:
        planner = self.planner
        self.state.visitor = Visitor(planner.executor, budget)
        self.state.bodies = planner.bodies
        self.state.visit_body = partial(BodyVisitor, planner.executor)
        made = Tracer(planner.region, planner.options, planner.shared, self.state, planner.dynamic, self.facts, budget)
        budget.begin(planner.executor.resident, made.live, planner.executor.states)
        return made

    def run(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any]:
        """Run the plan on inputs of its shapes and dtypes; return new arrays."""
        with self.lock:
            self.state.visitor = Visitor(self.planner.executor, budget)
            for target, x in zip(self.inputs, inputs, strict=True):
                if isinstance(target, Loose):
                    target.value = x
                else:
                    np.copyto(target, x)
            segment = self.first
            while True:
                if budget.watched:
                    for function, arguments in segment.flat:
                        budget.watch()
                        function(*arguments)
                else:
                    for function, arguments in segment.flat:
                        function(*arguments)
                if segment.check is None:
                    return _outputs(segment)
                key = segment.check()
                following = segment.next.get(key)
                if following is None:
                    return self._continue(segment, key, budget)
                segment = following

    def _continue(self, segment: Segment, key: Any, budget: limits.Budget) -> list[Any]:
        """Trace a continuation of a segment."""
        assert segment.point is not None
        while len(segment.next) >= BRANCHES:
            del segment.next[next(iter(segment.next))]
        with self.planner.tracing:
            tracer = self._tracer(budget)
            segment.next[key] = tracer.resume(segment.point)
        return _outputs(tracer.segment)

    @property
    def segments(self) -> list[Segment]:
        """All segments, each before those that follow it."""
        found, pending = [], [self.first]
        while pending:
            found.append(pending.pop())
            pending += found[-1].next.values()
        return found

    @property
    def arena_bytes(self) -> int:
        """The bytes of all arenas."""
        return sum(s.arena_bytes for s in self.segments)


def _outputs(segment: Segment) -> list[Any]:
    return [e.array.copy() if isinstance(e, Value) else _copied(e.value) for e in segment.outputs]


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return value.copy() if isinstance(value, (np.ndarray, dict)) else value


class BodyVisitor(Visitor):
    """Computes a Loop, a Scan or another operator with subgraphs, whose bodies run as plans of their own.

    Attributes:
        bodies: for each body, its plans and the slots in the enclosing graph of the values that are its further inputs.
    """

    def __init__(self, executor: Executor, budget: limits.Budget, bodies: dict[int, tuple[Planner, tuple[int, ...]]]) -> None:
        super().__init__(executor, budget)
        self.bodies = bodies

    def _inner(self, graph: Graph, inputs: Sequence[Any], outer: list[Any]) -> list[Any]:
        found = self.bodies.get(id(graph))
        if found is not None:
            planner, slots = found
            self.budget.step()
            with self.budget.holding(inputs):
                outputs = planner.run([*inputs, *(outer[s] for s in slots)], self.budget)
            if outputs is not None:
                return outputs
        return super()._inner(graph, inputs, outer)


class Planner:
    """The plans of a model on the CPU, or of a body of a Loop or Scan.

    Attributes:
        region: the calls of the model.
        options: how the plans compute.
        fused: the number of rewrites of each pass.
        shared: packed weights and folded constants, which all plans share.
        dynamic: the ids of nodes whose output shapes have differed between runs of one plan.
    """

    def __init__(self, graph: Graph, executor: Executor, options: Options, captured: dict[int, Any] | None = None) -> None:
        names = dict(graph.state_slots)
        states = {names[slot]: value for slot, value in executor.states[id(graph)]}
        self.executor = executor
        self.options = options
        self.region: Region = region_of(graph, states, captured)
        types = {i: (v.dtype, v.shape) for i, v in zip(self.region.inputs, graph.inputs, strict=False) if v.kind == "tensor"}
        self.fused = fuse(self.region, options.level, types)
        self.shared: dict[Any, Any] = {}
        self.dynamic: set[int] = set()
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        self.lock = threading.Lock()
        self.tracing = threading.RLock()  # a trace may add branches to the region
        _planners.add(self)

    def bodies(self, node: Node, constants: dict[int, Any]) -> dict[int, tuple[Planner, tuple[int, ...]]]:
        """The plans of a node's subgraphs, and the slots of the values that are their further inputs."""
        made = {}
        for graph in node.graphs:
            slots = tuple(outer for outer, _ in graph.captured if outer not in constants)
            made[id(graph)] = (Planner(graph, self.executor, self.options, constants), slots)
        return made

    def run(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        """Run the model with a plan; None if the definitions must run: limits that the plan exceeds, or NaN that it needs absent.

        Args:
            inputs: the converted inputs in the order of the graph's.
            budget: of this run.

        Returns:
            The outputs, which belong to the caller.
        """
        before = onednn.exchange_threads(self.options.threads)
        try:
            return self._run(inputs, budget)
        finally:
            if before:
                onednn.set_threads(before)

    def _run(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        key = tuple((x.shape, x.dtype) if _is_plain(x) else None for x in inputs)
        with limits.spend(budget), np.errstate(all="ignore"):
            for _ in range(8):
                plan = self.plans.get(key)
                try:
                    if plan is None:
                        plan = Plan(self)
                        with self.tracing:
                            outputs = plan.trace(inputs, budget)
                        self._keep(key, plan)
                        return None if plan.facts.finite and not all(map(_finite, inputs)) else outputs
                    if not self._fits(plan, budget) or (plan.facts.finite and not all(map(_finite, inputs))):
                        return None
                    return plan.run(inputs, budget)
                except Invalid:
                    return None
                except Mismatch as found:
                    self.dynamic.add(id(found.call.node))
                    self.plans.pop(key, None)
                except ResourceExhausted as error:
                    if plan is not None and plan.first.flat:
                        raise
                    if error.code in ("SX603", "SX604"):
                        return None  # the definitions may need less
                    raise
        return None

    def _keep(self, key: Any, plan: Plan) -> None:
        with self.lock:
            self.plans[key] = plan
            while len(self.plans) > PLANS:
                self.plans.popitem(last=False)

    def _fits(self, plan: Plan, budget: limits.Budget) -> bool:
        bounds, facts = budget.limits, plan.facts
        return (
            facts.largest <= budget.tensor_bytes
            and facts.executions <= bounds.executions
            and facts.rank <= bounds.rank
            and plan.first.arena_bytes + self.executor.resident <= budget.live_bytes
        )


_planners: weakref.WeakSet[Planner] = weakref.WeakSet()


def _renew_locks() -> None:
    """After a fork: another thread of the parent may have held a lock, which nothing in the child would release."""
    for planner in list(_planners):
        planner.lock, planner.tracing = threading.Lock(), threading.RLock()
        for plan in planner.plans.values():
            plan.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _is_plain(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype != dtypes.STRING


def _finite(x: Any) -> bool:
    """Whether an input holds no NaN and no infinity."""
    if not isinstance(x, np.ndarray) or x.dtype.kind in "biuOSU":
        return True
    if x.dtype == np.float32 or x.dtype == np.float64:
        flat = x.reshape(-1) if x.flags.c_contiguous else x.ravel()
        return bool(np.isfinite(np.dot(flat, flat))) or bool(np.isfinite(x).all())
    if x.dtype.kind == "c" or x.dtype == np.float16:
        return bool(np.isfinite(x).all())
    return bool(np.isfinite(x.astype(np.float32)).all())
