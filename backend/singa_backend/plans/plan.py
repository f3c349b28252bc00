"""A plan of a model: segments of bound calls, for fixed sizes or for those that it is bound to."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from .. import dtypes, limits
from ..errors import ResourceExhausted
from ..ir import graph as ir
from ..ir.sizes import LOWEST, OpenSize, Scope, Size, SizeSpace, now, settled
from ..kernels import onednn
from ..kernels.table import Options, is_finite
from ..kernels.values import Value
from ..machine import release_freed_memory
from ..runtime.executor import Executor, Visitor
from .answers import EXCEEDS, NOT_FINITE, OTHER_SIZES, UseDefinitions
from .caches import GrowingCaches
from .flat import Roles
from .open_sizes import OpenAxes
from .passed import Receivers
from .recompute import Homes
from .trace import (
    Continuation,
    DynamicCall,
    OpaqueValue,
    OtherSteps,
    PlanFacts,
    RunState,
    Segment,
    SharedValues,
    Tracer,
)
from .turns import Exclusive

_SMALL = 1 << 12

LARGE = 1 << 23
"""The bytes of an arena after whose trace freed memory is returned to the system."""

ALIKE = 4
"""The number of continuations with other assumptions about the sizes of a result from which each size has one of its own."""

SYMBOLS = 512
"""The number of sizes by name from which a plan with a further segment is made again."""

BRANCHES = 16
"""The number of continuations of a segment that are kept."""

Execute = Callable[[Segment, limits.Budget], None]
"""Runs the steps of a segment."""


class PlanOwner(Protocol):
    """What a plan asks the planner that keeps it; see `Planner`."""

    graph: ir.Graph
    roles: Roles
    executor: Executor
    options: Options
    shared: SharedValues
    dynamic: dict[ir.Node, DynamicCall]
    caches: dict[ir.Value, int]
    visit_body: Callable[[limits.Budget, Any], Visitor]
    open_axes: OpenAxes | None
    tracing: Any
    bound: int
    is_body: bool
    is_by_name: bool

    def bodies(self, node: ir.Node, constants: dict[ir.Value, Any]) -> Any:
        """The plans of a node's subgraphs, and the slots of the values that are their further inputs."""

    def budget(self) -> limits.Budget:
        """A budget of the limits that hold for a run that sets no others."""

    def fits(self, plan: Plan, budget: limits.Budget) -> bool:
        """Whether a plan is within the limits of a run."""

    def note_failure(self, reason: Exception) -> None:
        """Count why a plan for open sizes did not take the sizes of a run."""


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
        turn: what its runs take turns with.
        caches: the inputs that grow in the memory of the caller.
        space: the sizes that differ between runs; None if none does.
        places: of each symbol of the inputs, the inputs and axes that have it as size.
        is_outdated: whether a further segment needs numbers for sizes that have names: another plan is made.
        fixed: the inputs, axes and sizes that the plan assumes, besides the assumptions about symbols.
        pins: the symbols and quotients that are numbers in it.
        pattern: what all inputs that it may compute have in common.
    """

    def __init__(self, planner: PlanOwner, is_sized: bool = False) -> None:
        self.planner, self.is_sized = planner, is_sized
        self.state: RunState = RunState()
        self.facts = PlanFacts()
        self.turn = Exclusive()
        self.caches = GrowingCaches(planner.graph.inputs, planner.caches)
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

    def trace(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        """Make the plan by a run on these inputs.

        Args:
            inputs: the inputs.
            budget: of this run.

        Returns:
            The outputs; None if it needs finite inputs and they are not.
        """
        with self.turn.lock:
            try:
                outputs = self.turn.context.run(self._trace, inputs, budget)
            finally:
                self._release()
            if self.first.arena_bytes >= LARGE:  # the trace has used other memory, whose pieces the C library would keep
                release_freed_memory()
            return outputs

    def _trace(self, inputs: Sequence[Any], budget: limits.Budget) -> list[Any] | None:
        limits.enter(budget)
        while True:
            shapes = self._shapes(inputs)
            self.caches.begin(inputs, shapes, self.space, budget)
            tracer = self._tracer(budget)
            try:
                self.first = tracer.start(inputs, shapes)
            except OpenSize as reason:
                self.planner.note_failure(reason)
                if not self.caches.copy_all():  # sizes may have names if nothing grows
                    self._need_numbers()
            else:
                if (self.space is None or not self.space.found) and self.caches.have_grown(self.first.outputs):
                    break
            assert self.space is not None
            self.pins |= self.space.found
            self.space, self.facts = None, PlanFacts()
            budget.restart()
        if self.space is not None:
            self.space.seal()
        given = {id(e.buffer) for e in tracer.entries if isinstance(e, Value)}
        self.homes = {i: h for i, h in tracer.homes.items() if id(h.buffer) not in given}
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
        """Note that a trace needs numbers: for the results of the last call that have sizes by name, or for the inputs."""
        assert self.space is not None
        if self.space.scope.calls:
            self.space.scope.calls[-1].is_exact = True
        else:
            if self.planner.roles.is_step:  # so do all others
                self.planner.is_by_name, self.planner.open_axes = False, None
            self.space.found |= {name: self.space.values[place] for name, place in self.space.scope.symbols.items()}

    def _shapes(self, inputs: Sequence[Any]) -> Sequence[Sequence[Any] | None]:
        """The shapes of inputs with a symbol for each size that the model leaves open, and that is neither 0 nor 1."""
        self.places = []
        if self.planner.dynamic and self.planner.is_by_name:
            self.space = SizeSpace()
        if not self.is_sized or self.planner.open_axes is None:
            return ()
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
        values = [*sizes, *self.space.values[len(sizes) :]]
        try:
            if any(isinstance(c.rows, Size) for c in self.caches):
                self.space.set(values)
            self.caches.choose(inputs, budget, values)
            self.space.set(values)
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
            inputs: the inputs.  A step checks those that are not copied.
            passed: those of the latter that no step has checked: the steps of a trace do not.
        """
        if not self.facts.finite:
            return True
        targets = enumerate(zip(self.inputs, inputs, strict=True))
        return all(is_finite(x) for i, (t, x) in targets if t is not None or i in passed)

    def _tracer(self, budget: limits.Budget) -> Tracer:
        planner = self.planner
        planner.executor.check_file()
        self.state.visitor = Visitor(planner.executor, budget)
        self.state.bodies = planner.bodies
        self.state.visit_body = planner.visit_body
        made = Tracer(
            planner.graph,
            planner.roles,
            planner.options,
            planner.shared,
            self.state,
            planner.dynamic,
            self.facts,
            budget,
            self.caches,
            self.space,
        )
        roots = (made.live, *planner.shared.containers())
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
            if self.places and (self.caches or self.signature != [(type(x), x.shape, x.dtype) for x in inputs]):
                refused = context.run(self.bind, inputs, budget or self.planner.budget())
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
            self.planner.note_failure(other)
            before = before or (threads if parallel else 0)
            return OTHER_SIZES
        except BaseException:
            before = before or (threads if parallel else 0)  # the steps before the failed one may have set another number
            raise
        finally:
            self._release()
            lock.release()
            if before:
                onednn.set_threads(before)

    def _release(self) -> None:
        """Keep nothing of a run."""
        if self.state.forget():
            self.turn.context.run(limits.enter, None)
        self.caches.release()

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
        several, most = segment.next.get(key, []), budget.live_bytes - self.planner.executor.resident
        for n, one in enumerate(several):
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
                    self.planner.note_failure(other)
                    continue
                one.bound_for = (segment.version, *sizes)
            if one.arena_bytes > most:
                continue
            budget.admit_bytes(one.largest, "a tensor")
            if n:  # it is the first to be tried for the next results
                several.insert(0, several.pop(n))
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
        space, count = self.space, 0 if point.scope is None else len(point.scope.calls)
        if space is not None and len(space.values) > SYMBOLS:  # of segments that are forgotten, too
            self.is_outdated = True
            return None
        while True:
            tracer = self._tracer(budget)
            if space is not None:
                space.enter(Scope(space, point.scope))
            try:
                following = tracer.resume(point)
                break
            except OpenSize:
                assert space is not None
                self.is_outdated = len(space.scope.calls) == count
                self._need_numbers()
                if self.is_outdated:
                    return None
            finally:
                if space is not None:
                    space.seal()
        assert segment.check is not None
        while sum(map(len, segment.next.values())) >= BRANCHES:
            oldest = next(iter(segment.next))
            segment.next[oldest].pop()
            if not segment.next[oldest]:
                del segment.next[oldest]
        several = segment.next.setdefault(segment.check(), [])
        several.insert(0, following)
        if point.call is not None and len(several) > ALIKE:  # assumptions hold for few sizes: they are numbers from now on
            point.call.is_exact = True
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


def _is_texts(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == dtypes.STRING


def _sum_of(x: np.ndarray) -> Any:
    """A function that returns a number for the elements of an array in C order: finite only if they all are."""
    if x.dtype != np.float32 and x.dtype != np.float64:
        return lambda elements: math.nan
    return x.reshape(-1).dot if x.size <= _SMALL else np.add.reduce  # of more elements BLAS may use several threads
