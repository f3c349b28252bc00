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
from ..ir.sizes import LOWEST, OpenSize, Scope, Size, SizeSpace, now, settled
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
from .open_sizes import OpenAxes, PlanForm, growing_caches, grown_axes
from .recompute import Homes, Recomputing
from .trace import (
    Cache,
    Continuation,
    DynamicCall,
    Mismatch,
    NotOpen,
    OpaqueValue,
    OtherSteps,
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


OTHER_SIZES = UseDefinitions("a plan assumes other sizes")
NOT_FINITE = UseDefinitions("an input has a NaN or an infinity, and kernels of the plan need finite inputs")
EXCEEDS = UseDefinitions("the plan exceeds a limit of the run")
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
        is_sized: whether it computes all sizes that the model leaves open.
        turn: what runs of plans that share memory take turns with.
        history: what an open plan can repeat; None if it cannot.
        space: the sizes that differ between runs; None if none does.
        places: of each symbol of the inputs, the inputs and axes that have it as size.
        is_outdated: whether a further segment needs numbers for sizes that have names: another plan is made.
        fixed: the inputs, axes and sizes that the plan assumes, besides the assumptions about symbols.
        pins: the symbols and quotients that are numbers in it.
        pattern: what all inputs that it may compute have in common.
    """

    def __init__(self, planner: Planner, earlier: Plan | None = None, is_sized: bool = False) -> None:
        self.planner, self.is_sized = planner, is_sized
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
        self._targets: list[Value | None] | None = None
        self.homes: Homes = {}
        self.space: SizeSpace | None = None
        self.places: list[list[tuple[int, int]]] = []
        self.is_outdated = False
        self.fixed: list[tuple[int, int, int]] = []
        self.pins: dict[str, int] = {}
        self.pattern: Any = None

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
        while True:
            shapes = self._shapes(inputs)
            tracer = self._tracer(budget)
            try:
                self.first = tracer.start(inputs, self.planner.is_open, None if earlier is None else earlier.history, shapes)
            except OpenSize as reason:
                self.planner.failed[str(reason)] += 1
                self._need_numbers()
            else:
                if self.space is None or not self.space.found:
                    break
            assert self.space is not None
            self.pins |= self.space.found
            self.space, self.facts = None, PlanFacts()
            budget.restart()
        if self.space is not None:
            self.space.seal()
        self.history = tracer.history
        given = {id(e.buffer) for e in tracer.entries if isinstance(e, Value)}
        self.homes = {i: h for i, h in tracer.homes.items() if id(h.buffer) not in given}
        if earlier is not None and tracer.repeated < tracer.opened:
            raise NotOpen
        self.entries = tracer.entries
        self._describe(inputs)
        attached = (*self.first.passed, *self.first.replaced)
        outputs = tracer.segment.results() if self._are_fit(inputs, {p.index for p in attached if p.checked}) else None
        self.first.detach()
        for p in self.first.replaced:  # the outputs have its memory; the next run binds its steps to the arrays of the caller
            p.detach()
        return outputs

    def _describe(self, inputs: Sequence[Any]) -> None:
        """Note how inputs of the present sizes are copied and checked."""
        entries = self.entries
        if self.signature is None and self._targets is not None:  # bound again: the same inputs are copied
            self.inputs = [None if e is None else e.array for e in self._targets]
            self.signature = [(np.ndarray, x.shape, x.dtype) for x in inputs]
            self.sums = [(_sum_of(a), a.ravel("K")) for a in self.inputs if a is not None and a.dtype.kind not in "biu"]
            return
        passed = {p.index for p in (*self.first.passed, *self.first.replaced)}
        self.texts = [(i, e) for i, e in enumerate(entries) if type(e) is OpaqueValue and _is_texts(inputs[i])]
        others = passed | {i for i, _ in self.texts}
        self.inputs = [None if i in others else e.array if isinstance(e, Value) else e for i, e in enumerate(entries)]
        if any(isinstance(e, OpaqueValue) for e in self.inputs):
            return
        arrays = [e if isinstance(e, Value) else inputs[i] for i, e in enumerate(entries)]
        self.signature = [(np.ndarray, settled(a.shape), a.dtype) for a in arrays]
        held = [a for a in self.inputs if a is not None]
        self.sums = [(_sum_of(a), a.ravel("K")) for a in held if a.dtype.kind not in "biu"]
        self._targets = [e if a is not None and isinstance(e, Value) else None for e, a in zip(entries, self.inputs, strict=True)]
        self.is_plain = self.first.check is None and not self.facts.definitions

    def _need_numbers(self) -> None:
        """Note that a trace needs numbers: for the results of calls, if some have sizes by name, otherwise for the inputs."""
        assert self.space is not None
        for call in self.space.scope.calls:
            call.is_exact = True
        if not self.space.scope.calls:
            self.space.found |= {name: self.space.values[place] for name, place in self.space.scope.symbols.items()}

    def _shapes(self, inputs: Sequence[Any]) -> Sequence[Sequence[Any] | None]:
        """The shapes of inputs with a symbol for each size that the model leaves open, and that is neither 0 nor 1."""
        self.places = []
        if self.planner.dynamic and self.planner.is_by_name:
            self.space = SizeSpace()
        if not self.is_sized:
            return ()
        assert self.planner.open_axes is not None
        space = SizeSpace(self.pins)
        made: list[list[Any] | None] = [list(x.shape) if isinstance(x, np.ndarray) else None for x in inputs]
        symbols: dict[str, tuple[Size, list[tuple[int, int]]]] = {}
        self.fixed = []
        for index, shape in enumerate(made):
            for axis, size in enumerate(shape or ()):
                name = self.planner.open_axes.name(index, axis, len(shape or ()))
                if name is None or size < LOWEST or shape is None:
                    continue
                while name in symbols and symbols[name][0].now() != size:  # inputs that disagree on a size of one name
                    name += "'"
                if self.pins.get(name) == size:
                    self.fixed.append((index, axis, size))
                    continue
                if name not in symbols:
                    symbols[name] = (space.symbol(name, size), [])
                symbols[name][1].append((index, axis))
                shape[axis] = symbols[name][0]
        if not symbols:
            return ()
        self.space, self.places = space, [places for _, places in symbols.values()]
        return made

    def bind(self, inputs: Sequence[Any], budget: limits.Budget) -> UseDefinitions | None:
        """Let the plan compute inputs of these sizes; return why it cannot."""
        assert self.space is not None
        sizes = []
        for (index, axis), *others in self.places:
            sizes.append(size := inputs[index].shape[axis])
            if size < LOWEST or any(inputs[i].shape[a] != size for i, a in others):
                return OTHER_SIZES
        if any(inputs[i].shape[a] != size for i, a, size in self.fixed):
            return OTHER_SIZES
        self.signature = self.admitted = None
        limits.enter(budget)
        self.state.visitor = Visitor(self.planner.executor, budget)
        self.space.set([*sizes, *self.space.values[len(sizes) :]])
        try:
            self._bind(self.first, budget)
            self.facts.largest = self.first.largest
        except ResourceExhausted:
            return EXCEEDS
        self._describe(inputs)
        self.first.detach()
        self.planner.bound += 1
        return None

    def _bind(self, segment: Segment, budget: limits.Budget) -> None:
        """Bind a segment to the present sizes; raises OtherSteps if the plan does not compute them."""
        assert self.space is not None and segment.scope is not None
        segment.version, segment.bound_for = segment.version + 1, ()
        self.space.scope = segment.scope
        segment.binder.emit_again()
        failing = segment.scope.failing()
        if failing is not None:
            raise OtherSteps(failing)
        (segment.largest,) = segment.scope.largest(self.space.values)
        budget.admit_bytes(segment.largest, "a tensor")
        segment.binder.bind(most=budget.live_bytes - self.planner.executor.resident)

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
            self.space,
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
    ) -> list[Any] | UseDefinitions:
        """Run the plan on inputs of its shapes and dtypes, or of other sizes if it can be bound to them.

        Args:
            inputs: the inputs.
            budget: of this run; None if there is neither a deadline nor a flag, and the limits are those of the planner.
            execute: runs the steps of a segment; None to run them as fast as possible.
            receivers: arrays of the caller in which large outputs are computed, if nothing prevents it.

        Returns:
            New arrays, or receivers; the reason if the plan cannot compute them.
        """
        plain = self.is_plain and budget is None and execute is None
        threads, parallel = self.planner.options.threads, self.facts.parallel
        before = onednn.exchange_threads(threads) if parallel else 0
        lock, context = self.turn.lock, self.turn.context
        lock.acquire()
        try:
            if self.places and self.signature != [(type(x), x.shape, x.dtype) for x in inputs]:
                allowed = budget or self.planner.budget()
                refused = context.run(self.bind, inputs, allowed)
                if refused is not None:
                    return refused
            if self.places and (self.admitted is None or (budget is not None and self.admitted is not budget.limits)):
                allowed = budget or self.planner.budget()
                if not self.planner.fits(self, allowed):
                    return EXCEEDS
                if not self.facts.wants:
                    self.admitted = allowed.limits
            if plain:
                outputs = context.run(self._plain, inputs, receivers)
            else:
                outputs = context.run(self._run, inputs, budget or self.planner.budget(), execute)
            return NOT_FINITE if outputs is None else outputs
        except OtherSteps as other:  # of the first segment, or of a later one
            self.planner.failed[str(other)] += 1
            before = before or (threads if parallel else 0)
            return OTHER_SIZES
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
            following = self._following(segment, key, budget)
            if following is None:
                return self._continue(segment, key, budget)
            segment = following

    def _following(self, segment: Segment, key: Any, budget: limits.Budget) -> Segment | None:
        """The segment that follows, bound to the present sizes; None if it must be traced."""
        for one in segment.next.get(key, ()):
            if one.scope is None:
                return one
            sizes = one.results_before.sizes()
            if sizes is None:
                continue
            if one.binder is not None and one.bound_for != (segment.version, *sizes):
                assert self.space is not None
                values = list(self.space.values)
                for (place, _), size in zip(one.results_before.symbols, sizes, strict=True):
                    values[place] = size
                self.space.set(values)
                try:
                    self._bind(one, budget)
                except OtherSteps as other:
                    self.planner.failed[str(other)] += 1
                    continue
                one.bound_for = (segment.version, *sizes)
            budget.admit_bytes(one.largest, "a tensor")
            return one
        return None

    def _continue(self, segment: Segment, key: Any, budget: limits.Budget) -> list[Any] | None:
        """Trace a continuation of a segment; None if it needs finite inputs and they are not."""
        point = segment.point
        assert point is not None
        limits.enter(budget)
        if point.call is not None and segment.scope is not None:
            point.call.note(key, segment.next)
        self.admitted = None
        with self.planner.tracing:
            tracer = self._trace_after(segment, point, budget)
            if tracer is None:
                raise OtherSteps("a further part of the plan needs numbers")
        return None if self.facts.finite and not all(map(is_finite, self.inputs)) else tracer.segment.results()

    def _trace_after(self, segment: Segment, point: Continuation, budget: limits.Budget) -> Tracer | None:
        """Trace what follows a segment; None if it needs numbers for the sizes of the segment, or of those before."""
        space = self.space
        while True:
            tracer = self._tracer(budget)
            if space is not None:
                space.enter(Scope(space, point.scope))
            try:
                following = tracer.resume(point)
                break
            except OpenSize:
                assert space is not None
                self._need_numbers()
                if point.call not in space.scope.calls:
                    self.is_outdated = True
                    return None
            finally:
                if space is not None:
                    space.seal()
        assert segment.check is not None
        while sum(map(len, segment.next.values())) >= BRANCHES:
            oldest = next(iter(segment.next))
            segment.next[oldest].pop(0)
            if not segment.next[oldest]:
                del segment.next[oldest]
        segment.next.setdefault(segment.check(), []).append(following)
        return tracer

    @property
    def results_nbytes(self) -> int:
        """What a run adds to the bytes that its budget counts, if it is plain."""
        return limits.bytes_of(now(e.nbytes) for e in self.first.outputs if isinstance(e, Value))

    @property
    def segments(self) -> list[Segment]:
        """All segments, each before those that follow it."""
        found, pending = [], [self.first]
        while pending:
            found.append(pending.pop())
            pending += [s for several in found[-1].next.values() for s in several]
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
        gradients: the gradients that one kernel computes, and why others are not.
        shared: packed weights and folded constants, which all plans share.
        dynamic: the nodes of the model whose output shapes have differed between runs of one plan, and how.
        caches: the inputs that only a Concat reads, whose result is an output and begins with them; with its axis.
        replaced: the place of the input that a result replaces in place, by the place of the result.
        recomputing: chooses the calls that run twice, so that their results need not be kept; None if all are kept.
        warned: whether a warning has reported that memory exceeds its bound.
        is_open: whether sizes may differ between runs, and an open plan may be made.
        is_by_name: whether plans may have sizes by name.
        open_axes: the axes of inputs whose sizes the model leaves open, and their names.
        forms: the number of plans for open sizes that were made.
        bound: the number of times that a plan was bound to other sizes.
        failed: why plans for open sizes did not take the sizes of a run, and how often.
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
        self.is_open = not self.is_body and any(s is None or not all(isinstance(d, int) for d in s) for _, s in types.values())
        self.is_by_name = not self.caches and not self.exchanges and self.options.activation_memory is None
        self.open_axes = OpenAxes(graph) if self.is_by_name else None
        self.is_open = bool(self.caches) and self.is_open
        if self.replaced:
            self.is_open = False
            numbers = [i for i, (_, s) in types.items() if s is not None and all(d == 1 for d in s)]
            place_last(graph, self.roles, self.replaced, numbers)
        self.recomputing: Recomputing | None = None
        self.opened: list[Opened] = []
        self.closed: set[tuple[tuple[int, int], ...]] = set()
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
                    self.plans.pop(key, None)
                    plan = self.latest = None
                if plan is None:
                    if self.is_open and execute is None and not again:
                        found = self._run_open(key, inputs, budget)
                        if found is not None:
                            return found
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
                self.plans.pop(key, None)
                self.latest = None
                budget.restart()
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
                self.dynamic.setdefault(model_node(found.call), DynamicCall())
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
        self._used(PlanForm(pattern, self.forms), plan)
        budget.plan_is_kept()
        return NOT_FINITE if outputs is None else outputs

    def _begin_again(self, budget: limits.Budget) -> None:
        """Make the graph of the plans again, in a run that has not returned anything."""
        with self.tracing:
            self._renew()
        self.latest = None
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

    def _run_open(self, key: Any, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | UseDefinitions | None:
        """Run with an open plan, which is made if none takes the inputs; None if that is not possible."""
        held, latest = self._open_plan(key), self.latest
        axes = () if latest is None else grown_axes(key, latest.signature)
        try:
            if held is not None and self.fits(held, budget):
                axes = next((o.axes for o in self.opened if o.plan is held), ())
                held.admitted = budget.limits
                return held.run(inputs, budget)
            makes = held is None and axes and axes not in self.closed
            if makes and latest is not None and latest.history is not None and self.fits(latest, budget):
                plan = Plan(self, latest)
                outputs = self._trace(plan, inputs, budget, latest)
                self.opened = [*self.opened[1 - OPENED :], Opened(plan, latest.signature, axes)]
                return NOT_FINITE if outputs is None else outputs
        except (Mismatch, NotOpen):
            self.closed.add(axes)
            self.opened = [o for o in self.opened if o.axes != axes]
            budget.restart()
        return None

    @property
    def open(self) -> Opened | None:
        """The open plan that was made last, if there is one."""
        return self.opened[-1] if self.opened else None

    def _open_plan(self, key: Any) -> Plan | None:
        """The open plan for inputs of these types, shapes and dtypes, if there is one."""
        return next((o.plan for o in reversed(self.opened) if o.takes(key)), None)

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
        return grown_axes(key, self.signature) == self.axes


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
