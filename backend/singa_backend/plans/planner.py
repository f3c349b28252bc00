"""Plans of a model: one for each combination of input shapes and dtypes, made at the first run with them and kept."""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..elementwise.later import QUEUE
from ..errors import ResourceExhausted
from ..ir import graph as ir
from ..ir.declaration import caches_of
from ..kernels import onednn
from ..kernels.table import Invalid, Options, is_finite
from ..kernels.values import Value
from ..machine import release_freed_memory
from ..runtime.executor import Executor, Visitor
from .exchanges import exchanges, only_sent
from .flat import NotFlat, Roles, flat, model_node
from .fusion import fuse
from .gradients import Gradients, RefusedGradient
from .open.caches import Receivers
from .recompute import Homes, Recomputing
from .trace import (
    Cache,
    Mismatch,
    NotOpen,
    OpaqueValue,
    PlanFacts,
    PlanTrace,
    RunState,
    Segment,
    SharedValues,
    Tracer,
)
from .updates import NotInPlace, place_last

PLANS = 16
"""The number of plans of a model that are kept."""

_SMALL = 1 << 12

NOVEL = 2
"""After this number of plans that later runs have not paid for, new shapes are computed by the definitions at first."""

REPEATS = 4
"""The number of runs with the same shapes, among the last shapes, after which these get a plan."""

PAYING = 16
"""The number of runs of plans that pay for one more whose shapes may not come again."""

OPENED = 4
"""The number of open plans that are kept: each takes inputs of one batch."""

LARGE = 1 << 23
"""The bytes of an arena after whose trace freed memory is returned to the system."""

BRANCHES = 16
"""The number of continuations of a segment that are kept."""


Execute = Callable[[Segment, limits.Budget], None]
"""Runs the steps of a segment."""


@dataclass(frozen=True)
class UseDefinitions:
    """The answer of plans that cannot compute a run.

    Attributes:
        reason: why; a clause without a full stop.
    """

    reason: str


NOT_FINITE = UseDefinitions("an input has a NaN or an infinity, and kernels of the plan need finite inputs")
EXCEEDS = UseDefinitions("the plan exceeds a limit of the run")
NEW_SHAPES = UseDefinitions("the shapes are new, and plans of other new shapes were not used again")
REFUSED = UseDefinitions("a kernel refused a value, and the definitions report the error or compute the result")
MOVING = UseDefinitions("sizes of results differ between runs of equal shapes")
MEMORY = UseDefinitions("the plan needs more memory than the limits permit")


class Exclusive:
    """What plans that share memory take turns with.

    Attributes:
        lock: is held during a run.
        context: of the runs.
    """

    def __init__(self) -> None:
        self.renew()
        _exclusives.add(self)

    def renew(self) -> None:
        """Make both; in a forked child another thread of the parent may have been in them."""
        self.lock = threading.Lock()
        self.context = Context()
        self.context.run(np.seterr, all="ignore")


class Plan:
    """A model at fixed input shapes: segments of bound calls.

    Everything that can be is decided when the plan is made.  The plan runs in a separate context, in which NumPy
    reports no floating-point errors: to enter it takes a tenth of the time of `np.errstate`.

    Attributes:
        first: the first segment.
        facts: what the trace found.
        inputs: the arrays that a run copies its inputs into; an OpaqueValue for an input that is not an array; None for one that
            is not copied.
        texts: the place and the value of each input of strings.
        signature: the type, the shape and the dtype of each input; None if one is not an array.
        admitted: limits which the plan is known not to exceed.
        sums: for each input that may hold a NaN, the function that returns the sum of its squares, and its elements.
        is_plain: whether it is one segment without definitions, on arrays.
        homes: where the values of the trace are, if memory is bounded.
        results_nbytes: what a run adds to the bytes that its budget counts, if it is plain.
        turn: what runs of plans that share memory take turns with.
        history: what an open plan can repeat; None if it cannot.
    """

    def __init__(self, planner: Planner, earlier: Plan | None = None) -> None:
        self.planner = planner
        self.state: RunState = RunState() if earlier is None else earlier.state
        self.facts: PlanFacts = (
            PlanFacts() if earlier is None else replace(earlier.facts, executions=0, definitions=0, wants=set())
        )
        self.turn: Exclusive = Exclusive() if earlier is None else earlier.turn
        self.history: PlanTrace | None = None
        self.first = Segment()
        self.inputs: list[Any] = []
        self.texts: list[tuple[int, OpaqueValue]] = []
        self.signature: list[tuple[type, tuple[int, ...], np.dtype[Any]]] | None = None
        self.admitted: limits.Limits | None = None
        self.sums: list[tuple[Any, np.ndarray]] = []
        self.is_plain = False
        self.results_nbytes = 0
        self.homes: Homes = {}

    def trace(self, inputs: Sequence[Any], budget: limits.Budget, earlier: Plan | None = None) -> list[Any] | None:
        """Make the plan by a run on these inputs.

        Args:
            inputs: the inputs.
            budget: of this run.
            earlier: a plan for other shapes; this one will be open.

        Returns:
            The outputs; None if it needs finite inputs and they are not.

        Raises:
            NotOpen: if there is an earlier plan, and a result depends on the shapes in more than its own shape.
        """
        with self.turn.lock:
            try:
                outputs = self.turn.context.run(self._trace, inputs, budget, earlier)
                if self.first.arena_bytes >= LARGE:  # the trace has used other memory, whose pieces the C library would keep
                    release_freed_memory()
                return outputs
            finally:
                if earlier is not None and earlier.history is not None:
                    for p in earlier.history.passed:  # which this plan shares
                        p.detach()

    def _trace(self, inputs: Sequence[Any], budget: limits.Budget, earlier: Plan | None) -> list[Any] | None:
        limits.enter(budget)
        tracer = self._tracer(budget)
        self.first = tracer.start(inputs, self.planner.is_open, None if earlier is None else earlier.history)
        self.history = tracer.history
        given = {id(e.buffer) for e in tracer.entries if isinstance(e, Value)}
        self.homes = {i: h for i, h in tracer.homes.items() if id(h.buffer) not in given}
        if earlier is not None and tracer.repeated < tracer.opened:
            raise NotOpen
        attached = (*self.first.passed, *self.first.replaced)
        passed = {p.index for p in attached}
        self.texts = [(i, e) for i, e in enumerate(tracer.entries) if type(e) is OpaqueValue and _is_texts(inputs[i])]
        others = passed | {i for i, _ in self.texts}
        self.inputs = [None if i in others else e.array if isinstance(e, Value) else e for i, e in enumerate(tracer.entries)]
        if not any(isinstance(e, OpaqueValue) for e in self.inputs):
            arrays = [e if isinstance(e, Value) else inputs[i] for i, e in enumerate(tracer.entries)]
            self.signature = [(np.ndarray, a.shape, a.dtype) for a in arrays]
            held = [a for a in self.inputs if a is not None]
            self.sums = [(_sum_of(a), a.ravel("K")) for a in held if a.dtype.kind not in "biu"]
            self.is_plain = self.first.check is None and not self.facts.definitions
            self.results_nbytes = limits.bytes_of(e.nbytes for e in self.first.outputs if isinstance(e, Value))
        outputs = tracer.segment.results() if self._are_fit(inputs, {p.index for p in attached if p.checked}) else None
        self.first.detach()
        for p in self.first.replaced:  # the outputs have its memory; the next run binds its steps to the arrays of the caller
            p.detach()
        return outputs

    def _are_fit(self, inputs: Sequence[Any], passed: Collection[int] = ()) -> bool:
        """Whether the inputs are finite, if the plan needs that.

        Args:
            inputs: the inputs.  A step checks caches, and those that are not copied.
            passed: those of the latter that no step has checked: the steps of a trace do not.
        """
        if not self.facts.finite:
            return True
        targets = enumerate(zip(self.inputs, inputs, strict=True))
        return all(is_finite(x) for i, (t, x) in targets if (t is not None or i in passed) and not isinstance(t, Cache))

    def _tracer(self, budget: limits.Budget) -> Tracer:
        planner = self.planner
        planner.executor.check_file()
        self.state.visitor = Visitor(planner.executor, budget)
        self.state.bodies = planner.bodies
        self.state.visit_body = partial(BodyVisitor, planner.executor)
        made = Tracer(
            planner.graph,
            planner.roles,
            planner.options,
            planner.shared,
            self.state,
            planner.dynamic,
            self.facts,
            budget,
            planner.caches,
        )
        roots = (made.live, made.segment.cells, *planner.shared.containers())
        if planner.is_body:
            budget.roots += roots
        else:
            budget.begin(planner.executor.resident, *roots, planner.executor.states)
        return made

    def run(
        self,
        inputs: Sequence[Any],
        budget: limits.Budget | None = None,
        execute: Execute | None = None,
        receivers: Receivers = (),
    ) -> list[Any] | None:
        """Run the plan on inputs of its shapes and dtypes.

        Args:
            inputs: the inputs.
            budget: of this run; None if there is neither a deadline nor a flag, and the limits are those of the planner.
            execute: runs the steps of a segment; None to run them as fast as possible.
            receivers: arrays of the caller in which large outputs are computed, if nothing prevents it.

        Returns:
            New arrays, or receivers; None if it needs finite inputs and they are not.
        """
        if self.planner.unused:
            self.planner.unused = max(self.planner.unused - 1 / PAYING, 0.0)
        plain = self.is_plain and budget is None and execute is None
        threads, parallel = self.planner.options.threads, self.facts.parallel
        before = onednn.exchange_threads(threads) if parallel else 0
        lock, context = self.turn.lock, self.turn.context
        lock.acquire()
        try:
            if plain:
                return context.run(self._plain, inputs, receivers)
            return context.run(self._run, inputs, budget or self.planner.budget(), execute)
        except BaseException:
            before = before or (threads if parallel else 0)  # the steps before the failed one may have set another number
            raise
        finally:
            lock.release()
            if before:
                onednn.set_threads(before)

    def _plain(self, inputs: Sequence[Any], receivers: Receivers) -> list[Any] | None:
        """A run of one segment without definitions.  For few arrays loops that count are faster than `zip` and comprehensions."""
        if self.texts:
            limits.enter(self.planner.budget())  # which counts the bytes of strings
            for i, text in self.texts:
                text.value = inputs[i]
        i = 0
        for target in self.inputs:
            if target is not None:
                target[...] = inputs[i]
            i += 1  # noqa: SIM113
        if self.facts.finite:
            for sum_of, elements in self.sums:
                if not math.isfinite(sum_of(elements)) and not is_finite(elements):
                    return None
        first = self.first
        try:
            if first.passed or first.replaced:
                first.attach(inputs, receivers if receivers and self._are_written(receivers, inputs) else ())
            if first.pace is not None:
                first.pace.run(first.flat)
            else:
                for function, arguments in first.flat:
                    function(*arguments)
            made = []
            for copy in first.copies:
                made.append(copy())
        finally:
            if first.passed:
                first.detach()
        return made

    def _are_written(self, receivers: Receivers, inputs: Sequence[Any]) -> bool:
        """Whether steps may write to arrays of the caller: all fit, and no input is read in their memory."""
        pairs = [(a, v) for a, v in zip(receivers, self.first.outputs, strict=True) if a is not None]
        read = [inputs[p.index] for p in self.first.passed if p.index >= 0]
        fit = all(isinstance(v, Value) and a.dtype == v.dtype and a.shape == v.shape for a, v in pairs)
        return fit and not any(np.may_share_memory(a, x) for a, _ in pairs for x in read)

    def _run(self, inputs: Sequence[Any], budget: limits.Budget, execute: Execute | None) -> list[Any] | None:
        limits.enter(budget)
        self.state.visitor = Visitor(self.planner.executor, budget)
        if self.first.cells:
            planner = self.planner
            budget.begin(planner.executor.resident, self.first.cells, *planner.shared.containers(), planner.executor.states)
        try:
            return self._run_segments(inputs, budget, execute)
        finally:
            self.first.detach()

    def _run_segments(self, inputs: Sequence[Any], budget: limits.Budget, execute: Execute | None) -> list[Any] | None:
        for target, x in zip(self.inputs, inputs, strict=True):
            if isinstance(target, OpaqueValue):
                target.value = x
            elif target is not None:
                target[...] = x
        for i, text in self.texts:
            text.value = inputs[i]
        if not self._are_fit(inputs):
            return None
        segment = self.first
        if segment.passed or segment.replaced:
            segment.attach(inputs)
        while True:
            if execute is not None:
                execute(segment, budget)
            elif segment.pace is not None:
                segment.pace.run(segment.flat, budget.watch if budget.watched else None)
            elif budget.watched:
                for function, arguments in segment.flat:
                    budget.watch()
                    function(*arguments)
            else:
                for function, arguments in segment.flat:
                    function(*arguments)
            if segment.check is None:
                return segment.results()
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
        return None if self.facts.finite and not all(map(is_finite, self.inputs)) else tracer.segment.results()

    @property
    def segments(self) -> list[Segment]:
        """All segments, each before those that follow it."""
        found, pending = [], [self.first]
        while pending:
            found.append(pending.pop())
            pending += found[-1].next.values()
        return found

    @property
    def results_bytes(self) -> int:
        """The bytes of the results that are not copied, whose memory is kept for the next run."""
        return sum(p.value.nbytes for s in self.segments for p in s.passed if p.index < 0)

    def forget_results(self) -> None:
        """Keep no memory for the next results."""
        for segment in self.segments:
            for p in segment.passed:
                p.memory = None

    @property
    def arena_bytes(self) -> int:
        """The bytes of all arenas."""
        return sum(s.arena_bytes for s in self.segments)


class BodyVisitor(Visitor):
    """Computes a Loop, a Scan or another operator with subgraphs, whose bodies run by separate plans.

    Attributes:
        bodies: for each body, its plans and the slots in the enclosing graph of the values that are its further inputs.
    """

    def __init__(self, executor: Executor, budget: limits.Budget, bodies: dict[int, tuple[Planner, tuple[int, ...]]]) -> None:
        super().__init__(executor, budget)
        self.bodies = bodies

    def _inner(self, node: ir.Node, graph: ir.Graph, inputs: Sequence[Any], outer: list[Any]) -> list[Any]:
        found, exchanged = self.bodies.get(id(graph)), self.budget.exchanges.at
        if found is not None:
            planner, slots = found
            outputs = planner.run_again([*inputs, *[outer[s] for s in slots]], self.budget)
            if outputs is not None:
                return outputs
        if found is not None and all(map(_is_plain, inputs)):
            self.budget.step()
            with self.budget.holding(inputs):
                found_outputs = planner.run([*inputs, *(outer[s] for s in slots)], self.budget)
            if not isinstance(found_outputs, UseDefinitions):
                for y in found_outputs:
                    self.budget.count_tensor(getattr(y, "nbytes", 0))
                return found_outputs
            self.budget.exchanges.at = exchanged
        return super()._inner(node, graph, inputs, outer)


class Planner:
    """The plans of a model on the CPU, or of a body of a Loop or Scan.

    Attributes:
        graph: the nodes of the model.
        roles: of its values.
        options: how the plans compute.
        is_body: whether the graph is the body of an operator.
        fused: the number of rewrites of each pass.
        limits: the bounds of a run that does not set its own.
        weights: a value that differs from later ones if an initializer has changed since.
        latest: the plan that was used last.
        unused: the number of plans that were made, less what later runs have paid for them.
        gradients: the gradients that one kernel computes, and why others are not.
        seen: the shapes of the last runs without a plan of them, and the number of these runs.
        shared: packed weights and folded constants, which all plans share.
        dynamic: the nodes of the model whose output shapes have differed between runs of one plan.
        caches: the inputs that only a Concat reads, whose result is an output and begins with them; with its axis.
        replaced: the place of the input that a result replaces in place, by the place of the result.
        recomputing: chooses the calls that run twice, so that their results need not be kept; None if all are kept.
        warned: whether a warning has reported that memory exceeds its bound.
        is_open: whether sizes may differ between runs, and an open plan may be made.
        opened: the open plans, one for each batch; the last was made last.
        closed: the axes in which no open plan can be made, as in `Opened.axes`: those of prompts, for example.
        exchanges: the number of calls that exchange values with other processes.
    """

    def __init__(
        self,
        graph: ir.Graph,
        executor: Executor,
        options: Options,
        captured: dict[ir.Value, Any] | None = None,
        allowed: limits.Limits | None = None,
        weights: Any = None,
        replaced: Mapping[int, int] | None = None,
    ) -> None:
        executor.check_file()  # the passes read weights
        held = dict(executor.states[id(graph)])
        states = {v: held[v.slot] for v in graph.initializers.values()}
        self.executor = executor
        self.options = options
        self.is_body = captured is not None
        self.limits = allowed or limits.Limits()
        self.weights = weights
        self.replaced = dict(replaced or {})
        self.latest: Plan | None = None
        self.gradients = Gradients(options.level > 1)
        self._read = partial(flat, graph, states, captured)
        self._is_step = graph.is_step
        self._renew()
        self.dynamic: set[ir.Node] = set()
        self.unused = 0.0
        self.warned = False
        self.seen: OrderedDict[Any, int] = OrderedDict()
        self.lock = threading.Lock()
        self.tracing = threading.RLock()  # a trace may change what the plans share
        _planners.add(self)

    def _renew(self) -> None:
        """Copy the graph of the model again, without plans."""
        self.graph = graph = self._read()
        self.roles = Roles(is_step=self._is_step)
        types = {  # the inputs of a body need not have the declared sizes
            v: (v.declared.dtype, None if self.is_body else v.declared.shape)
            for v in graph.inputs
            if v.declared is not None and v.declared.kind == "tensor"
        }
        before = exchanges(graph)
        self.gradients.take(graph, self.executor.place)
        self.fused = fuse(graph, self.options.level, types)
        self.exchanges = len(before)
        assert exchanges(graph) == before, "all processes must begin their exchanges in the same order"
        self.roles.only_sent = only_sent(graph) if before else frozenset()
        self.caches = _caches(graph)
        self.is_open = not self.is_body and any(s is None or not all(isinstance(d, int) for d in s) for _, s in types.values())
        if self.replaced:
            self.is_open = False
            numbers = [i for i, (_, s) in types.items() if s is not None and all(d == 1 for d in s)]
            place_last(graph, self.roles, self.replaced, numbers)
        self.recomputing: Recomputing | None = None
        self.opened: list[Opened] = []
        self.closed: set[tuple[tuple[int, int], ...]] = set()
        self.shared = SharedValues()
        self.plans: OrderedDict[Any, Plan] = OrderedDict()

    def bodies(self, node: ir.Node, constants: dict[ir.Value, Any]) -> dict[int, tuple[Planner, tuple[int, ...]]]:
        """The plans of a node's subgraphs, and the slots of the values that are their further inputs."""
        made = {}
        for graph in node.graphs:
            if id(graph) not in self.executor.states:
                continue
            slots = tuple(node.captures[v].slot for v in graph.captured if v not in constants)
            with suppress(NotFlat):
                made[id(graph)] = (Planner(graph, self.executor, self.options, constants, self.limits), slots)
        return made

    def budget(self) -> limits.Budget:
        """A budget of the limits that hold for a run that sets no others."""
        return limits.Budget(self.limits, memory=self.executor.device.memory)

    def find(self, key: list[Any]) -> Plan | None:
        """The plan for inputs of these types, shapes and dtypes that no check refuses; None if they must be checked."""
        plan = self.latest
        if plan is None or key != plan.signature:
            plan = self.plans.get(tuple(key))
            if plan is not None:
                self._used(tuple(key), plan)
            else:
                plan = self._open_plan(key)
                if plan is None:
                    return None
        return plan if plan.admitted is self.limits else None

    def run_again(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        """Run a body with the plan of its last run, and count what it does; None if it needs more than that.

        Args:
            inputs: the inputs.
            budget: of the run of the model.

        Returns:
            The outputs, which belong to the caller.
        """
        plan = self.latest
        if plan is None or not plan.is_plain or plan.texts or plan.admitted is not budget.limits or budget.watched:
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

    def run(self, inputs: Sequence[Any], budget: limits.Budget, execute: Execute | None = None) -> list[Any] | UseDefinitions:
        """Run the model with a plan.

        Args:
            inputs: the converted inputs in the order of the graph's.
            budget: of this run.
            execute: runs the steps of a segment; a profile measures them.

        Returns:
            The outputs, which belong to the caller; the reason if the definitions must run.
        """
        key = tuple((np.ndarray, x.shape, x.dtype) if isinstance(x, np.ndarray) else None for x in inputs)
        tries, exchanged = 0, budget.exchanges.at
        while tries < 8:
            tries += 1
            budget.exchanges.at = exchanged
            plan = self.plans.get(key)
            again = plan is not None and execute is None and bool(plan.facts.wants) and QUEUE.is_done(plan.facts.wants)
            try:
                if again:
                    self.plans.pop(key, None)
                    plan = self.latest = None
                if plan is None:
                    continues = self._continues(key)
                    times = REPEATS if execute is not None or again else self._times(key)
                    if times == 1 and self.is_open:
                        opened, outputs = self._run_open(key, inputs, budget)
                        if opened:
                            return NOT_FINITE if outputs is None else outputs
                    if self.unused + 1 > NOVEL and times < REPEATS and not continues:
                        return NEW_SHAPES
                    if self.exchanges and not all(is_finite(x) for x in inputs if _is_plain(x)):
                        return NOT_FINITE  # a trace finds it at its end, and other processes would have its results
                    plan = Plan(self)
                    outputs = self._trace(plan, inputs, budget)
                    self._keep(key, plan, budget, again)
                    return NOT_FINITE if outputs is None else outputs
                if plan.admitted is not budget.limits:
                    if not self._fits(plan, budget):
                        return EXCEEDS
                    if not plan.facts.wants:  # otherwise each run asks for the code
                        plan.admitted = budget.limits
                self._used(key, plan)
                if self.is_body:
                    budget.steps(plan.facts.executions)
                outputs = plan.run(inputs, budget, execute)
                return NOT_FINITE if outputs is None else outputs
            except Invalid:
                return REFUSED
            except RefusedGradient as refused:
                if refused.call.gradient is None:
                    return UseDefinitions(str(refused))
                tries -= 1  # each leaves fewer gradients to refuse
                self.gradients.refuse(refused)
                self._begin_again(budget)
            except NotInPlace:
                self.replaced = {}
                self._begin_again(budget)
            except Mismatch as found:
                self.dynamic.add(model_node(found.call))
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
                return MEMORY  # the definitions may need less
        return MOVING

    def _begin_again(self, budget: limits.Budget) -> None:
        """Make the graph of the plans again, in a run that has not returned anything."""
        with self.tracing:
            self._renew()
        self.latest = None
        budget.restart()

    def _keep(self, key: Any, plan: Plan, budget: limits.Budget, again: bool) -> None:
        is_new = key not in self.plans and not again  # another thread may have made it too
        self._used(key, plan)
        self._recompute(plan)
        if is_new and self.plans:  # without plans values are computed again, and the next run makes another one
            self.unused += 1
        budget.plan_is_kept()

    def _recompute(self, plan: Plan) -> None:
        """Let values be computed again if the arena of a plan exceeds its bound; the next run makes another plan."""
        bound, homes = self.options.activation_memory, plan.homes
        plan.homes = {}
        if bound is None or self.is_body or plan.first.check is not None or plan.first.arena_bytes <= bound:
            return
        if self.recomputing is None:
            self.recomputing = Recomputing(self.graph, self.roles)
        with self.tracing:
            changed = self.recomputing.fit(homes, plan.first.live_bytes, plan.first.arena_bytes, bound)
        if changed:
            with self.lock:
                self.plans.clear()
                self.latest = None
        elif not self.warned:
            self.warned = True
            what = f"a step needs {plan.first.arena_bytes:,} bytes, more than activation_memory={bound:,}"
            warnings.warn(f"{what}: no further values can be computed again", UserWarning, stacklevel=2)

    def _trace(self, plan: Plan, inputs: Sequence[Any], budget: limits.Budget, earlier: Plan | None = None) -> list[Any] | None:
        """Make a plan by a run; return the outputs."""
        before = onednn.exchange_threads(self.options.threads)
        try:
            with self.tracing, budget.clock(runs=earlier is not None):
                return plan.trace(inputs, budget, earlier)
        finally:
            if plan.facts.wants:
                QUEUE.start()
            if before:
                onednn.set_threads(before)

    def _run_open(self, key: Any, inputs: Sequence[Any], budget: limits.Budget) -> tuple[bool, list[Any] | None]:
        """Run with an open plan, which is made if none takes the inputs; return whether that was possible, and the outputs."""
        held, latest = self._open_plan(key), self.latest
        axes = () if latest is None else _grown(key, latest.signature)
        try:
            if held is not None and self._fits(held, budget):
                axes = next((o.axes for o in self.opened if o.plan is held), ())
                held.admitted = budget.limits
                return True, held.run(inputs, budget)
            makes = held is None and axes and axes not in self.closed
            if makes and latest is not None and latest.history is not None and self._fits(latest, budget):
                plan = Plan(self, latest)
                outputs = self._trace(plan, inputs, budget, latest)
                self.opened = [*self.opened[1 - OPENED :], Opened(plan, latest.signature, axes)]
                return True, outputs
        except (Mismatch, NotOpen):
            self.closed.add(axes)
            self.opened = [o for o in self.opened if o.axes != axes]
            budget.restart()
        return False, None

    def _continues(self, key: Any) -> bool:
        """Whether the shapes are those of the run before, longer: those of the next run may be longer again."""
        axes = _grown(key, next(reversed(self.seen), None)) if self.is_open else ()
        return bool(axes) and axes not in self.closed

    @property
    def open(self) -> Opened | None:
        """The open plan that was made last, if there is one."""
        return self.opened[-1] if self.opened else None

    def _open_plan(self, key: Any) -> Plan | None:
        """The open plan for inputs of these types, shapes and dtypes, if there is one."""
        return next((o.plan for o in reversed(self.opened) if o.takes(key)), None)

    def _times(self, key: Any) -> int:
        """The number of runs with these shapes, this one included.  A plan takes longer to make than the definitions to run."""
        with self.lock:
            self.seen[key] = times = self.seen.get(key, 0) + 1
            self.seen.move_to_end(key)
            while len(self.seen) > PLANS:
                self.seen.popitem(last=False)
        return times

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


def _caches(graph: ir.Graph) -> dict[ir.Value, int]:
    """The inputs of a graph whose elements one call reads, to append others; its result is an output.  With the axis.

    The call is a Concat, or of an operator that declares its caches.
    """
    outputs, given = Counter(graph.outputs), set(graph.inputs)
    grown: list[tuple[ir.Value | None, ir.Value | None, int]] = [
        (c.inputs[0], c.outputs[0], c.attributes["axis"]) for c in graph.nodes if c.is_("Concat") and len(c.inputs) > 1
    ]
    for call in graph.nodes:
        for i, o in caches_of(call.domain, call.op_type).items():
            if i < len(call.inputs) and o < len(call.outputs):
                grown.append((call.inputs[i], call.outputs[o], -2))

    def uses(value: ir.Value) -> int:
        return sum(not (isinstance(user, ir.Node) and user.is_("Shape")) for user, _ in value.uses)

    return {i: axis for i, o, axis in grown if i in given and i is not None and o is not None and uses(i) == 1 == outputs[o]}


def _grown(key: Any, other: Any) -> tuple[tuple[int, int], ...]:
    """The axes in which inputs differ from those of a plan, with the input.

    The past of generated text grows, and its mask; most steps of a plan do not depend on it.

    Returns:
        (input, axis) for each; none unless all lengths differ by the same number, in at most one axis of an input, and at
        least one input does not differ.
    """
    if other is None or len(key) != len(other):
        return ()
    axes: list[tuple[int, int]] = []
    differences: set[int] = set()
    for n, (new, old) in enumerate(zip(key, other, strict=True)):
        if new is None or new[2] == dtypes.STRING or new[2] != old[2] or len(new[1]) != len(old[1]):
            return ()
        found = [(axis, a - b) for axis, (a, b) in enumerate(zip(new[1], old[1], strict=True)) if a != b]
        if len(found) > 1:
            return ()
        axes += [(n, axis) for axis, _ in found]
        differences.update(d for _, d in found)
    return tuple(axes) if len(differences) == 1 and len(axes) < len(key) else ()


@dataclass(eq=False)
class Opened:
    """An open plan.

    Attributes:
        plan: the plan.
        signature: of the plan that it was made from.
        axes: the axes of inputs whose lengths may differ from it, all by the same number: (input, axis).
    """

    plan: Plan
    signature: Any
    axes: tuple[tuple[int, int], ...]

    def takes(self, key: Any) -> bool:
        """Whether the plan can run on inputs with these types, shapes and dtypes."""
        return _grown(key, self.signature) == self.axes


_planners: weakref.WeakSet[Planner] = weakref.WeakSet()
_exclusives: weakref.WeakSet[Exclusive] = weakref.WeakSet()


def _renew_locks() -> None:
    """After a fork: another thread of the parent may have held a lock, which nothing in the child would release."""
    for planner in list(_planners):
        planner.lock, planner.tracing = threading.Lock(), threading.RLock()
    for turn in list(_exclusives):
        turn.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _is_plain(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype != dtypes.STRING


def _is_texts(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == dtypes.STRING


def _sum_of(x: np.ndarray) -> Any:
    """A function that returns a number for the elements of an array in C order: finite only if they all are."""
    if x.dtype != np.float32 and x.dtype != np.float64:
        return lambda elements: math.nan
    return x.reshape(-1).dot if x.size <= _SMALL else np.add.reduce  # of more elements BLAS may use several threads
