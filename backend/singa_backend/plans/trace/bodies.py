"""Calls of onnxruntime's operators that the kernels of their bodies compute.

A body may compute with inputs that the operator refuses: it broadcasts them, for example.  A trace has the inputs, so it runs the
rule that says what a composition accepts, or the definition of another operator, once.  If that accepts them and its decisions
depend on shapes, dtypes and constants only, it accepts every run of the plan, and the body computes the call from then on.
`ValueChecks` finds what else is read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from ...devices.namespaces import NumpyNamespace, numpy
from ...errors import OperatorError, ResourceExhausted, SonnxError
from ...interpreters.given import SETTING, Given
from ...ir import graph as ir
from ...ir.sizes import settled
from ...kernels.table import Invalid
from ...kernels.values import Bound, PlanStep, Value
from ...runtime.executor import Visitor
from ..bodies import has_body, rounds_once
from ..flat import model_node
from ..fusion import fuse
from ..updates import NotInPlace
from .definitions import Definitions
from .exact import OtherSteps
from .items import items_of
from .segment import Entry

ON_VALUES = "its definition refuses some values, which its body need not"
"""The reason against a body whose definition may refuse another run."""


NO_BODY = "there is no body for these inputs, or its shapes depend on values"
"""The reason against a call whose decomposition does not apply."""
UNLIKE = "its body fails, or returns other shapes or types"
"""The reason against a body that does not compute what the definition has computed."""


OPEN = "its definition has accepted some sizes, and others may follow"
"""The reason against a body of an operator that is not a composition, if sizes differ between runs."""


ROUNDS = "its definition rounds narrow floats once, its body at each operator"
"""The reason against a body of narrow floats."""


class ValueChecks(NumpyNamespace):
    """NumPy that notes the values on which a definition decides.

    Definitions run on devices whose arrays have no implicit copy on the host, so they read values in no other way.

    Attributes:
        reads: whether the definition has read values, or refused some.
        ranges: the indices that it has checked, each with the lowest one and the size.
    """

    def __init__(self) -> None:
        self.__dict__.update(numpy.__dict__)
        self.reads = False
        self.ranges: list[tuple[np.ndarray, int, int]] = []

    def indices(self, i: np.ndarray, size: int, *, negative: bool = True) -> np.ndarray:
        """As `Namespace.indices`."""
        self.ranges.append((i, -size if negative else 0, size))
        made: np.ndarray = numpy.indices(i, size, negative=negative)
        return made

    def refuse(self, bad: np.ndarray, error: Callable[[], OperatorError]) -> None:
        """As `Namespace.refuse`."""
        self.reads = True
        numpy.refuse(bad, error)

    def largest(self, x: np.ndarray) -> int:
        """As `Namespace.largest`; what is returned does not depend on it."""
        return numpy.largest(x)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        """As `Namespace.to_host`."""
        self.reads = True
        return numpy.to_host(x)


class InputChecker(Visitor):
    """Checks the inputs of a composition; computes the definition of another operator."""

    def __init__(self, visitor: Visitor, checks: ValueChecks) -> None:
        super().__init__(visitor.executor, visitor.budget)
        self.xp = checks

    def _compute(self, node: ir.Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        operator = node.operator
        assert operator is not None
        if not operator.declaration.composes:
            return super()._compute(node, inputs, frame)
        return operator.compute(self.xp, inputs, self._attributes(node, operator, frame), 0, operator.declaration.check)


Range = tuple[Value, int, int]
"""Indices that a run must check: the value, the lowest one and the size."""


class BodyTraces(Definitions):
    """Computes calls by their bodies."""

    @abstractmethod
    def _group(self, group: tuple[ir.Node, ...]) -> None:
        """Compute a chain of calls, with as few kernels as possible."""

    def _by_body(self, call: ir.Node) -> bool:
        """Compute a call by its body, now and in every run; False if a body cannot compute it.

        The definition runs first: only if it accepts the inputs is a body written for them.
        """
        values = self._values(call)
        if not self._may_have_body(call, values):
            return False
        ranges, results = self._checked(call, values)
        inner = None if ranges is None else self._body_of(call, values)
        reasons = self._reasons  # of kernels that decline
        if inner is None or ranges is None:
            self._reasons = [*reasons, NO_BODY if ranges is not None else ON_VALUES]
            self.shared.kept.add(call)
            self._by_definition(call, results)
        elif not self._computed(call, inner, ranges, results):
            self._reasons = [*reasons, UNLIKE]
            self._by_definition(call, results)
        elif results is not None and any(isinstance(v, Value) and not v.constant and v.dtype.kind not in "biu" for v in values):
            self.facts.finite = True  # of infinities and NaN a body may make others than the definition
        return True

    def _may_have_body(self, call: ir.Node, values: Sequence[Entry | None]) -> bool:
        """Whether a body may compute a call with these inputs, if the definition accepts them; the reason against it is noted."""
        if not self.options.level or self.updates is not None or self.is_dynamic(call) or not has_body(call):
            return False
        if call in self.shared.kept or not all(v is None or isinstance(v, Value) for v in values):
            return False
        assert call.operator is not None
        opens = any(isinstance(v, Value) and (v.is_open or v.contents is not None) for v in values)
        if opens and not call.operator.declaration.composes:
            self._reasons.append(OPEN)
            return False
        declared = call.operator.declaration.inputs
        on_host = [v for n, v in enumerate(values) if declared[min(n, len(declared) - 1)].host]
        if any(isinstance(v, Value) and not (v.constant and v.contents is None) for v in on_host):
            self._reasons.append(ON_VALUES)
            return False
        if rounds_once(call, [_given(v) for v in values]):
            self._reasons.append(ROUNDS)
            return False
        return True

    def _body_of(self, call: ir.Node, values: Sequence[Entry | None]) -> ir.Graph | None:
        """The fused calls of a body; None if there is none for these inputs."""
        given = [_given(v) for v in values]
        key = (call, *given)
        if key not in self.shared.bodies:
            self.shared.bodies[key] = self._fused(call, given)
        found = self.shared.bodies[key]
        return None if found is None or any(map(self.is_dynamic, found.nodes)) else found

    def _fused(self, call: ir.Node, given: Sequence[Given | None]) -> ir.Graph | None:
        inner = ir.Graph()
        own = {v: v if v.constant is not None else ir.Value(v.name) for v in call.inputs if v is not None}
        made = self.shared.graphs.inlined(call, given, [None if v is None else own[v] for v in call.inputs])
        if made is None:
            return None
        nodes, outputs = made
        for node in nodes:
            inner.append(node)
        inner.set_outputs(o for o, y in zip(outputs, call.outputs, strict=True) if o is not None and y is not None)
        types = {own[v]: (g.dtype, g.shape) for v, g in zip(call.inputs, given, strict=True) if v is not None and g is not None}
        fuse(inner, self.options.level, types)
        for value, stands in own.items():  # no pass rewrites the body any more
            if stands is not value:
                stands.replace_all_uses_with(value)
        _forget_unread(inner)
        return inner

    def _checked(self, call: ir.Node, values: Sequence[Entry | None]) -> tuple[list[Range] | None, list[Any] | None]:
        """Check the inputs; return the indices that each run must check, None if other values are read, and the results.

        The definition has results; a composition has none.
        """
        assert call.operator is not None
        checks = ValueChecks()
        visitor = InputChecker(self.state.visitor, checks)
        with self.settling():
            arrays = [v.read() if isinstance(v, Value) else None for v in values]
        with self.budget.clock(runs=True):
            results = visitor.visit(model_node(call), arrays, [])
        self.budget.left += 1  # counted with the call
        ranges = None if checks.reads else _ranges(checks.ranges, values, arrays)
        return ranges, None if call.operator.declaration.composes else results

    def _computed(self, call: ir.Node, inner: ir.Graph, ranges: Sequence[Range], results: Sequence[Any] | None) -> bool:
        """Compute a call by its body; False, with the trace as it was, if that fails or the results are not these ones."""
        more = Counter(i for c in inner.nodes for i in c.reads)
        more.update(inner.outputs)
        uses = {i: self.uses[i] for i in more}
        self.uses.update(more)
        step, buffer = len(self.segment.steps), len(self.buffers)
        self.counts = False
        opened = [v for v in self._values(call) if isinstance(v, Value) and v.is_open]
        if opened:
            self._record(PlanStep(partial(self._bound_check, call, self._values(call)), (), (), "numpy.range", call.origins))
        elif ranges:
            self._record(_range_step(ranges, call))
        try:
            for item in items_of(inner):
                assert isinstance(item, tuple)
                self._group(item)
            made = [self._get(o) for o in inner.outputs]
        except (SonnxError, Invalid, NotInPlace) as error:
            if isinstance(error, ResourceExhausted):
                raise
            made = []
        finally:
            self.counts = True
        wanted = None if results is None else [r for r, o in zip(results, call.outputs, strict=False) if o is not None]
        if not made or (wanted is not None and not all(map(_alike, made, wanted))):
            self._undo({o for c in inner.nodes for o in c.results}, uses, buffer, step)
            return False
        for o, entry in zip(call.results, made, strict=True):
            self._set(o, entry)
        self._used(inner.outputs)
        self._used(call.reads)
        self._count(call)
        return True

    def _bound_check(self, call: ir.Node, values: Sequence[Entry | None]) -> Bound:
        """Check the present sizes as those of the trace; return the checks of the indices of a run."""
        checks = ValueChecks()
        zeros = [np.broadcast_to(np.zeros((), v.dtype), settled(v.shape)) if isinstance(v, Value) else None for v in values]
        known = [v.array if isinstance(v, Value) and v.constant else z for v, z in zip(values, zeros, strict=True)]
        self.state.visitor.budget.left += 1  # the call is counted when it runs
        try:
            InputChecker(self.state.visitor, checks).visit(model_node(call), known, [])
        except SonnxError as error:
            raise OtherSteps(f"{call.op_type} refuses the sizes: {error}") from None
        ranges = None if checks.reads else _ranges(checks.ranges, values, known)
        if ranges is None:
            raise OtherSteps(f"{call.op_type} reads values")
        return [(_require_range, (v.array, low, size)) for v, low, size in ranges]

    def _undo(self, values: Set[ir.Value], uses: Mapping[ir.Value, int], first_buffer: int, first_step: int) -> None:
        """Forget these values, and the buffers, copies and steps since these; restore the counts of uses."""
        for i in values:
            self.env.pop(i, None)
        for i, count in uses.items():
            self.uses[i] = count
        gone = set(self.buffers[first_buffer:])
        for _, copies in self.copies.values():
            for what in [w for w, c in copies.items() if c.buffer in gone]:
                del copies[what]
        for cache in self.caches.values():
            if cache.call is not None and not values.isdisjoint(cache.call.results):
                cache.call, cache.present, cache.rows = None, None, 0
        self._forget(first_buffer, first_step)

    @abstractmethod
    def _forget(self, first_buffer: int, first_step: int) -> None:
        """Release the buffers and the steps since these."""


def _forget_unread(graph: ir.Graph) -> None:
    """Make the results absent that nothing reads: a kernel need not compute them."""
    for node in graph.nodes:
        for i, o in enumerate(node.outputs):
            if o is not None and not o.is_used:
                node.return_(i, None)


def _given(v: Entry | None) -> Given | None:
    if not isinstance(v, Value):
        return None
    known = v.constant and v.contents is None
    fixed = v.shape if known else (None,) * v.ndim
    return Given.of(v.dtype, fixed, v.array if known and v.size <= SETTING else None)


def _alike(made: Entry, result: Any) -> bool:
    return isinstance(made, Value) and isinstance(result, np.ndarray) and (made.shape, made.dtype) == (result.shape, result.dtype)


def _ranges(
    checked: Sequence[tuple[np.ndarray, int, int]], values: Sequence[Entry | None], arrays: Sequence[np.ndarray | None]
) -> list[Range] | None:
    """The inputs that are indices, with the lowest one and the size; None if other values were checked."""
    found: dict[tuple[int, int, int], Range] = {}
    for i, low, size in checked:
        if not i.size:
            continue
        whole = [n for n, a in enumerate(arrays) if a is not None and a.size == i.size and np.may_share_memory(a, i)]
        value = values[whole[0]] if whole else None
        if not isinstance(value, Value):
            return None
        if not value.constant:
            found[whole[0], low, size] = (value, low, size)
    return [*found.values()]


def _range_step(ranges: Sequence[Range], call: ir.Node) -> PlanStep:
    def bind() -> Any:
        return [(_require_range, (v.array, low, size)) for v, low, size in ranges]

    return PlanStep(bind, tuple(v for v, _, _ in ranges), (), "numpy.range", call.origins)


def _require_range(indices: np.ndarray, low: int, size: int) -> None:
    if indices.min() < low or indices.max() >= size:
        raise Invalid("an index is out of range")
