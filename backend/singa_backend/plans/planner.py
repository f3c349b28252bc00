"""Plans of a model: one for each combination of input shapes and dtypes, made at the first run with them and kept."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..elementwise.later import QUEUE
from ..errors import ResourceExhausted
from ..ir import graph as ir
from ..kernels import onednn
from ..kernels.table import Invalid, Options, is_finite
from ..runtime.executor import Executor, Visitor
from .answers import EXCEEDS, MEMORY, MOVING, NOT_FINITE, OTHER_SIZES, REFUSED, Mismatch, UseDefinitions
from .caches import growing_caches
from .exchanges import exchanges, only_sent
from .flat import NotFlat, Roles, flat, model_node
from .fusion import fuse
from .gradients import Gradients, RefusedGradient
from .open_sizes import OpenAxes, PlanForm
from .plan import Execute, Plan
from .recompute import Recomputing
from .trace import DynamicCall, SharedValues
from .turns import exclusives
from .updates import NotInPlace, place_last

REASONS = 64
"""The number of reasons against plans that are counted, each for itself."""

PLANS = 16
"""The number of plans of a model that are kept."""


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
        gradients: the gradients that one kernel computes, and why others are not.
        shared: packed weights and folded constants, which all plans share.
        dynamic: the nodes of the model whose output shapes have differed between runs of one plan, and how.
        caches: the inputs that may grow in the memory of the caller, with the axis.
        replaced: the place of the input that a result replaces in place, by the place of the result.
        recomputing: chooses the calls that run twice, so that their results need not be kept; None if all are kept.
        warned: whether a warning has reported that memory exceeds its bound.
        is_by_name: whether plans may have sizes by name.
        open_axes: the axes of inputs whose sizes the model leaves open, and their names.
        forms: the number of plans for open sizes that were made.
        bound: the number of times that a plan was bound to other sizes.
        failed: why plans for open sizes did not take the sizes of a run, and how often.
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
        self.visit_body: Callable[[limits.Budget, Any], Visitor] = partial(BodyVisitor, executor)
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
        self.dynamic: dict[ir.Node, DynamicCall] = {}
        self.warned = False
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
        self.caches = growing_caches(graph)
        self.is_by_name = not self.exchanges and self.options.activation_memory is None
        self.open_axes = OpenAxes(graph) if self.is_by_name else None
        if self.replaced:
            numbers = [i for i, (_, s) in types.items() if s is not None and all(d == 1 for d in s)]
            place_last(graph, self.roles, self.replaced, numbers)
        self.recomputing: Recomputing | None = None
        self.shared = SharedValues()
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        self.forms = 0
        self.failed: Counter[str] = Counter()
        self.bound = 0

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
            axes = self.open_axes
            if plan is not None and axes is not None and plan.places and plan.pattern == axes.pattern(key):
                return None if plan.facts.wants else plan  # it tests the sizes when it is bound to them
            plan = self.plans.get(tuple(key))
            if plan is None:
                return None
            self._used(tuple(key), plan)
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
        if isinstance(outputs, UseDefinitions):
            return None
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
                if self.open_axes is not None:
                    found = self._run_sized(key, inputs, budget, execute)
                    if found is not None:
                        return found
                if again:
                    self._forget(key)
                    plan = None
                if plan is None:
                    if self.exchanges and not all(is_finite(x) for x in inputs if _is_plain(x)):
                        return NOT_FINITE  # a trace finds it at its end, and other processes would have its results
                    plan = Plan(self)
                    outputs = self._trace(plan, inputs, budget)
                    self._keep(key, plan, budget)
                    return NOT_FINITE if outputs is None else outputs
                if plan.admitted is not budget.limits:
                    if not self.fits(plan, budget):
                        return EXCEEDS
                    if not plan.facts.wants:  # otherwise each run asks for the code
                        plan.admitted = budget.limits
                self._used(key, plan)
                if self.is_body:
                    budget.steps(plan.facts.executions)
                results = plan.run(inputs, budget, execute)
                if results is not OTHER_SIZES:
                    return results
                self._forget(key, budget)
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
                self.dynamic.setdefault(model_node(found.call), DynamicCall()).is_unnamed &= found.is_unnamed
                self._forget(key)
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

    def _run_sized(
        self, key: Any, inputs: Sequence[Any], budget: limits.Budget, execute: Execute | None
    ) -> list[Any] | UseDefinitions | None:
        """Run with a plan for open sizes, which is made if none takes these; None if the sizes are not open."""
        assert self.open_axes is not None
        pattern = self.open_axes.pattern(key)
        if pattern is None or not any(None in shape for _, shape, _ in pattern):
            return None
        pins: dict[str, int] = {}
        forms: list[tuple[PlanForm, Plan]] = [
            (k, p) for k, p in list(self.plans.items()) if isinstance(k, PlanForm) and k.pattern == pattern
        ]
        for form, plan in reversed(forms):
            if plan.facts.wants and execute is None and QUEUE.is_done(plan.facts.wants):
                self.plans.pop(form, None)
                continue
            if not plan.places and plan.signature != list(key):
                continue
            found: list[Any] | UseDefinitions = OTHER_SIZES
            try:
                if not plan.is_outdated:
                    found = plan.run(inputs, budget, execute)
            except Mismatch:
                self.plans.pop(form, None)
                raise
            if found is OTHER_SIZES:
                budget.restart()
                if plan.space is not None and plan.is_outdated:
                    pins = plan.pins | plan.space.found
                    self.plans.pop(form, None)
                    break
                continue
            self._used(form, plan)
            return found
        plan = Plan(self, is_sized=True)
        plan.pins, plan.pattern = pins, pattern
        outputs = self._trace(plan, inputs, budget)
        self.forms += 1
        self._used(tuple(key) if self.open_axes is None else PlanForm(pattern, self.forms), plan)
        budget.plan_is_kept()
        return NOT_FINITE if outputs is None else outputs

    def _begin_again(self, budget: limits.Budget) -> None:
        """Make the graph of the plans again, in a run that has not returned anything."""
        with self.tracing:
            self._renew()
        self.latest = None
        budget.restart()

    def note_failure(self, reason: Exception) -> None:
        """Count why a plan for open sizes did not take the sizes of a run."""
        text = str(reason)
        self.failed[text if text in self.failed or len(self.failed) < REASONS else "other reasons"] += 1

    def _forget(self, key: Any, budget: limits.Budget | None = None) -> None:
        """Forget a plan; with a budget the run begins again."""
        self.plans.pop(key, None)
        self.latest = None
        if budget is not None:
            budget.restart()

    def _keep(self, key: Any, plan: Plan, budget: limits.Budget) -> None:
        self._used(key, plan)
        self._recompute(plan)
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

    def _trace(self, plan: Plan, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        """Make a plan by a run; return the outputs."""
        before = onednn.exchange_threads(self.options.threads)
        try:
            with self.tracing, budget.clock(runs=False):
                return plan.trace(inputs, budget)
        finally:
            if plan.facts.wants:
                QUEUE.start()
            if before:
                onednn.set_threads(before)

    def _used(self, key: Any, plan: Plan) -> None:
        """Keep a plan, and forget the one that was used least recently."""
        with self.lock:
            self.plans[key] = plan
            self.plans.move_to_end(key)
            while len(self.plans) > PLANS:
                self.plans.popitem(last=False)
            self.latest = plan

    def fits(self, plan: Plan, budget: limits.Budget) -> bool:
        """Whether a plan is within the limits of a run."""
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
    for turn in list(exclusives):
        turn.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _is_plain(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype != dtypes.STRING
