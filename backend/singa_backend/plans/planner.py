"""Plans of a model: one for each combination of input shapes and dtypes, made at the first run with them and kept."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
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
from .region import Region, TooManyCalls, region_of
from .trace import Facts, Loose, Mismatch, Segment, State, Tracer

PLANS = 16
"""The number of plans of a model that are kept."""

_SMALL = 1 << 12

NOVEL = 4
"""After this number of plans in a row that no second run has used, new shapes are computed by the definitions at first."""

BRANCHES = 16
"""The number of continuations of a segment that are kept."""


Execute = Callable[[Segment, limits.Budget], None]
"""Runs the steps of a segment."""


class Plan:
    """A model at fixed input shapes: segments of bound calls.

    Everything that can be is decided when the plan is made.  The plan runs in a context of its own, in which NumPy
    reports no floating-point errors: to enter it takes a tenth of the time of `np.errstate`.

    Attributes:
        first: the first segment.
        facts: what the trace found.
        inputs: the arrays that a run copies its inputs into; a Loose for an input that is not an array of numbers; None for
            one that is not copied.
        signature: the type, the shape and the dtype of each input; None if one is not an array of numbers.
        admitted: limits which the plan is known not to exceed.
        sums: for each input that may hold a NaN, the function that returns the sum of its squares, and its elements.
        is_plain: whether it is one segment without definitions, on arrays.
        results_nbytes: what a run adds to the bytes that its budget counts, if it is plain.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state = State()
        self.facts = Facts()
        self.first = Segment()
        self.inputs: list[Any] = []
        self.signature: list[tuple[type, tuple[int, ...], np.dtype[Any]]] | None = None
        self.admitted: limits.Limits | None = None
        self.sums: list[tuple[Any, np.ndarray]] = []
        self.is_plain = False
        self.results_nbytes = 0
        self.renew()

    def renew(self) -> None:
        """Make the lock and the context; in a forked child another thread of the parent may have been in them."""
        self.lock = threading.Lock()
        self.context = Context()
        self.context.run(np.seterr, all="ignore")

    def trace(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        """Make the plan by a run on these inputs; return the outputs, None if it needs finite inputs and they are not."""
        return self.context.run(self._trace, inputs, budget)

    def _trace(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        limits.enter(budget)
        tracer = self._tracer(budget)
        self.first = tracer.start(inputs)
        passed = {p.index for p in self.first.passed}
        self.inputs = [None if i in passed else e.array if isinstance(e, Value) else e for i, e in enumerate(tracer.entries)]
        if all(isinstance(e, Value) for e in tracer.entries):
            self.signature = [(np.ndarray, e.shape, e.dtype) for e in tracer.entries if isinstance(e, Value)]
            held = [a for a in self.inputs if a is not None]
            self.sums = [(_sum_of(a), a.reshape(-1)) for a in held if a.dtype.kind not in "biu"]
            self.is_plain = self.first.check is None and not self.facts.definitions
            self.results_nbytes = limits.bytes_of(e.nbytes for e in self.first.outputs if isinstance(e, Value))
        outputs = None if self.facts.finite and not all(map(finite, inputs)) else tracer.segment.results()
        self.first.detach()
        return outputs

    def _tracer(self, budget: limits.Budget) -> Tracer:
        planner = self.planner
        planner.executor.check_file()
        self.state.visitor = Visitor(planner.executor, budget)
        self.state.bodies = planner.bodies
        self.state.visit_body = partial(BodyVisitor, planner.executor)
        made = Tracer(planner.region, planner.options, planner.shared, self.state, planner.dynamic, self.facts, budget)
        roots = (made.live, planner.shared)
        if planner.is_body:
            budget.roots += roots
        else:
            budget.begin(planner.executor.resident, *roots, planner.executor.states)
        return made

    def run(self, inputs: Sequence[Any], budget: limits.Budget | None = None, execute: Execute | None = None) -> list[Any] | None:
        """Run the plan on inputs of its shapes and dtypes.

        Args:
            inputs: the inputs.
            budget: of this run; None if there is neither a deadline nor a flag, and the limits are those of the planner.
            execute: runs the steps of a segment; None to run them as fast as possible.

        Returns:
            New arrays; None if it needs finite inputs and they are not.
        """
        self.planner.unused = 0
        plain = self.is_plain and budget is None and execute is None
        threads, parallel = self.planner.options.threads, self.facts.parallel
        before = onednn.exchange_threads(threads) if parallel else 0
        lock = self.lock
        lock.acquire()
        try:
            if plain:
                return self.context.run(self._plain, inputs)
            return self.context.run(self._run, inputs, budget or self.planner.budget(), execute)
        except BaseException:
            before = before or (threads if parallel else 0)  # the steps before the failed one may have set another number
            raise
        finally:
            lock.release()
            if before:
                onednn.set_threads(before)

    def _plain(self, inputs: Sequence[Any]) -> list[Any] | None:
        """A run of one segment without definitions.  For few arrays loops that count are faster than `zip` and comprehensions."""
        i = 0
        for target in self.inputs:
            if target is not None:
                target[...] = inputs[i]
            i += 1  # noqa: SIM113
        if self.facts.finite:
            for sum_of, elements in self.sums:
                if not math.isfinite(sum_of(elements)) and not finite(elements):
                    return None
        first = self.first
        if first.passed:
            first.attach(inputs)
        for function, arguments in first.flat:
            function(*arguments)
        made = []
        for copy in first.copies:
            made.append(copy())
        if first.passed:
            first.detach()
        return made

    def _run(self, inputs: Sequence[Any], budget: limits.Budget, execute: Execute | None) -> list[Any] | None:
        limits.enter(budget)
        self.state.visitor = Visitor(self.planner.executor, budget)
        for target, x in zip(self.inputs, inputs, strict=True):
            if isinstance(target, Loose):
                target.value = x
            elif target is not None:
                target[...] = x
        if self.facts.finite and not all(finite(x) for t, x in zip(self.inputs, inputs, strict=True) if t is not None):
            return None
        segment = self.first
        if segment.passed:
            segment.attach(inputs)
        while True:
            if execute is not None:
                execute(segment, budget)
            elif budget.watched:
                for function, arguments in segment.flat:
                    budget.watch()
                    function(*arguments)
            else:
                for function, arguments in segment.flat:
                    function(*arguments)
            if segment.check is None:
                outputs = segment.results()
                segment.detach()
                return outputs
            key = segment.check()
            following = segment.next.get(key)
            if following is None:
                return self._continue(segment, key, budget)
            segment = following

    def _continue(self, segment: Segment, key: Any, budget: limits.Budget) -> list[Any] | None:
        """Trace a continuation of a segment; None if it needs finite inputs and they are not."""
        assert segment.point is not None
        limits.enter(budget)
        while len(segment.next) >= BRANCHES:
            del segment.next[next(iter(segment.next))]
        self.admitted = None
        with self.planner.tracing:
            tracer = self._tracer(budget)
            segment.next[key] = tracer.resume(segment.point)
        return None if self.facts.finite and not all(map(finite, self.inputs)) else tracer.segment.results()

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
            outputs = planner.run_again([*inputs, *[outer[s] for s in slots]], self.budget)
            if outputs is not None:
                return outputs
        if found is not None and all(map(_is_plain, inputs)):
            self.budget.step()
            with self.budget.holding(inputs):
                outputs = planner.run([*inputs, *(outer[s] for s in slots)], self.budget)
            if outputs is not None:
                for y in outputs:
                    self.budget.count_tensor(getattr(y, "nbytes", 0))
                return outputs
        return super()._inner(graph, inputs, outer)


class Planner:
    """The plans of a model on the CPU, or of a body of a Loop or Scan.

    Attributes:
        region: the calls of the model.
        options: how the plans compute.
        is_body: whether the graph is the body of an operator.
        fused: the number of rewrites of each pass.
        limits: the bounds of a run that does not set its own.
        latest: the plan that was used last.
        unused: the number of plans that were made since a plan was used again.
        seen: shapes with which the definitions have run.
        shared: packed weights and folded constants, which all plans share.
        dynamic: the ids of nodes whose output shapes have differed between runs of one plan.
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        options: Options,
        captured: dict[int, Any] | None = None,
        allowed: limits.Limits | None = None,
    ) -> None:
        names = dict(graph.state_slots)
        states = {names[slot]: value for slot, value in executor.states[id(graph)]}
        self.executor = executor
        self.options = options
        self.is_body = captured is not None
        self.limits = allowed or limits.Limits()
        self.latest: Plan | None = None
        self.region: Region = region_of(graph, states, captured)
        types = {  # the inputs of a body need not have the declared sizes
            i: (v.dtype, None if self.is_body else v.shape)
            for i, v in zip(self.region.inputs, graph.inputs, strict=False)
            if v.kind == "tensor"
        }
        self.fused = fuse(self.region, options.level, types)
        self.shared: dict[Any, Any] = {}
        self.dynamic: set[int] = set()
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        self.unused = 0
        self.seen: OrderedDict[Any, None] = OrderedDict()
        self.lock = threading.Lock()
        self.tracing = threading.RLock()  # a trace may add branches to the region
        _planners.add(self)

    def bodies(self, node: Node, constants: dict[int, Any]) -> dict[int, tuple[Planner, tuple[int, ...]]]:
        """The plans of a node's subgraphs, and the slots of the values that are their further inputs."""
        made = {}
        for graph in node.graphs:
            if id(graph) not in self.executor.states:
                continue
            slots = tuple(outer for outer, _ in graph.captured if outer not in constants)
            with suppress(TooManyCalls):
                made[id(graph)] = (Planner(graph, self.executor, self.options, constants, self.limits), slots)
        return made

    def budget(self) -> limits.Budget:
        """A budget of the limits that hold for a run that sets no others."""
        return limits.Budget(self.limits, memory=self.executor.device.memory)

    def ready(self, inputs: Any, names: Sequence[str]) -> tuple[Plan, Sequence[Any]] | None:
        """The plan for inputs whose checks can only succeed, as they did before; None if they must be checked.

        Args:
            inputs: as a user passes them: a dict, a list or one array.
            names: of the graph's inputs.

        Returns:
            The plan, and the inputs in order.
        """
        if self.limits.deadline is not None:
            return None
        kind = type(inputs)
        given = inputs
        if kind is dict:
            if len(inputs) != len(names):
                return None
            given = []
            for name in names:
                if name not in inputs:
                    return None
                given.append(inputs[name])
        elif kind is np.ndarray:
            given = (inputs,)
        elif kind is not list and kind is not tuple:
            return None
        key = []
        for x in given:
            if type(x) is not np.ndarray:
                return None
            key.append((np.ndarray, x.shape, x.dtype))
        plan = self.latest
        if plan is None or key != plan.signature:
            plan = self.plans.get(tuple(key))
            if plan is None:
                return None
            self._used(tuple(key), plan)
        return (plan, given) if plan.admitted is self.limits else None

    def run_again(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        """Run a body with the plan of its last run, and count what it does; None if it needs more than that.

        Args:
            inputs: the inputs.
            budget: of the run of the model.

        Returns:
            The outputs, which belong to the caller.
        """
        plan = self.latest
        if plan is None or not plan.is_plain or plan.admitted is not budget.limits or budget.watched:
            return None
        key = []
        for x in inputs:
            if type(x) is not np.ndarray:
                return None
            key.append((np.ndarray, x.shape, x.dtype))
        if key != plan.signature or plan.results_nbytes > budget.room - budget.made:
            return None
        outputs = plan.run(inputs)
        if outputs is not None:
            budget.steps(1 + plan.facts.executions)
            budget.made += plan.results_nbytes
        return outputs

    def run(self, inputs: Sequence[Any], budget: limits.Budget, execute: Execute | None = None) -> list[Any] | None:
        """Run the model with a plan; None if the definitions must run: limits that the plan exceeds, or NaN that it needs absent.

        Args:
            inputs: the converted inputs in the order of the graph's.
            budget: of this run.
            execute: runs the steps of a segment; a profile measures them.

        Returns:
            The outputs, which belong to the caller.
        """
        key = tuple((np.ndarray, x.shape, x.dtype) if _is_plain(x) else None for x in inputs)
        for _ in range(8):
            plan = self.plans.get(key)
            try:
                if plan is None:
                    if self.unused >= NOVEL and execute is None and self._is_novel(key):
                        return None
                    self.unused += 1
                    plan = Plan(self)
                    before = onednn.exchange_threads(self.options.threads)
                    try:
                        with self.tracing:
                            outputs = plan.trace(inputs, budget)
                    finally:
                        if before:
                            onednn.set_threads(before)
                    self._used(key, plan)
                    return outputs
                if plan.admitted is not budget.limits:
                    if not self._fits(plan, budget):
                        return None
                    plan.admitted = budget.limits
                self._used(key, plan)
                if self.is_body:
                    budget.steps(plan.facts.executions)
                return plan.run(inputs, budget, execute)
            except Invalid:
                return None
            except Mismatch as found:
                self.dynamic.add(id(found.call.node))
                self.plans.pop(key, None)
                self.latest = None
            except ResourceExhausted as error:
                if plan is not None and plan.first.flat:
                    raise
                if error.code not in ("SX603", "SX604") or self.is_body:
                    raise
                with self.tracing:
                    self.shared.clear()
                budget.restart()
                return None  # the definitions may need less
        return None

    def _is_novel(self, key: Any) -> bool:
        """Whether no run has had these shapes; they are noted.  A plan takes longer to make than the definitions to run."""
        with self.lock:
            novel = key not in self.seen
            self.seen[key] = None
            self.seen.move_to_end(key)
            while len(self.seen) > PLANS:
                self.seen.popitem(last=False)
        return novel

    def _used(self, key: Any, plan: Plan) -> None:
        """Keep a plan, and forget the one that was used least recently."""
        with self.lock:
            self.plans[key] = plan
            self.plans.move_to_end(key)
            while len(self.plans) > PLANS:
                self.plans.popitem(last=False)
            self.latest = plan

    def _fits(self, plan: Plan, budget: limits.Budget) -> bool:
        bounds, facts = budget.limits, plan.facts
        return (
            facts.largest <= budget.tensor_bytes
            and facts.executions <= budget.left
            and facts.rank <= bounds.rank
            and plan.first.arena_bytes + self.executor.resident <= budget.live_bytes
        )


_planners: weakref.WeakSet[Planner] = weakref.WeakSet()


def _renew_locks() -> None:
    """After a fork: another thread of the parent may have held a lock, which nothing in the child would release."""
    for planner in list(_planners):
        planner.lock, planner.tracing = threading.Lock(), threading.RLock()
        for plan in planner.plans.values():
            plan.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _is_plain(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype != dtypes.STRING


def _sum_of(x: np.ndarray) -> Any:
    """A function that returns a number for the elements of an array in C order: finite only if they all are."""
    if x.dtype != np.float32 and x.dtype != np.float64:
        return lambda elements: math.nan
    return x.reshape(-1).dot if x.size <= _SMALL else np.add.reduce  # of more elements BLAS may use several threads


def finite(x: Any) -> bool:
    """Whether an input holds no NaN and no infinity."""
    if not isinstance(x, np.ndarray) or x.dtype.kind in "biuOSU":
        return True
    wide = x if x.dtype.kind in "fc" and x.dtype.itemsize > 1 else x.astype(np.float32)
    return bool(np.isfinite(wide).all())
