"""Calls of onnxruntime's operators that the kernels of their bodies compute.

A body may compute with inputs that the definition refuses: it broadcasts them, for example.  A trace has the inputs, so it runs
the definition once.  If that accepts them and its decisions depend on shapes, dtypes and constants only, it accepts every run of
the plan, and the body computes the call from then on.  `ValueChecks` finds what else a definition reads.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...devices.namespaces import NumpyNamespace, numpy
from ...errors import OperatorError, ResourceExhausted, SonnxError
from ...ir.graph import ABSENT
from ...kernels.table import Invalid
from ...kernels.values import PlanStep, Value
from ..bodies import SETTING, Given, has_body, rounds_once
from ..fusion import fuse
from ..region import Region, RegionCall
from ..updates import NotInPlace
from .definitions import Definitions
from .items import items_of
from .segment import Entry

ON_VALUES = "its definition refuses some values, which its body need not"
"""The reason against a body whose definition may refuse another run."""


UNLIKE = "its body fails, or returns other shapes or types"
"""The reason against a body that does not compute what the definition has computed."""


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


Range = tuple[Value, int, int]
"""Indices that a run must check: the value, the lowest one and the size."""


class BodyTraces(Definitions):
    """Computes calls by their bodies."""

    @abstractmethod
    def _group(self, group: tuple[RegionCall, ...]) -> None:
        """Compute a chain of calls, with as few kernels as possible."""

    def _by_body(self, call: RegionCall) -> bool:
        """Compute a call by its body, now and in every run; False if there is none that returns what the definition does."""
        if not self.options.level or self.updates is not None or id(call.node) in self.dynamic or not has_body(call):
            return False
        inner = self._body_of(call)
        if inner is None or any(id(c.node) in self.dynamic for c in inner.calls):
            return False
        values = self._values(call)
        checks, results = self._checked(call, values)
        ranges = _ranges(checks, values)
        if ranges is None or not self._computed(call, inner, ranges, results):
            self.shared.kept.add(call)
            self._reasons = [ON_VALUES if ranges is None else UNLIKE]
            self._by_definition(call, results)
        elif any(isinstance(v, Value) and not v.constant and v.dtype.kind not in "biu" for v in values):
            self.facts.finite = True  # of infinities and NaN a body may make others than the definition
        return True

    def _body_of(self, call: RegionCall) -> Region | None:
        """The fused calls of a body; None if there is none for these inputs."""
        operator, values = call.node.operator, self._values(call)
        assert operator is not None
        if call in self.shared.kept or not all(v is None or isinstance(v, Value) for v in values):
            return None
        declared = operator.declaration.inputs
        for n, v in enumerate(values):
            if v is not None and declared[min(n, len(declared) - 1)].host and not (isinstance(v, Value) and v.constant):
                self._reasons.append(ON_VALUES)
                return None
        given = [_given(v) for v in values]
        if rounds_once(call, given):
            self._reasons.append(ROUNDS)
            return None
        key = (call, *given)
        if key not in self.shared.bodies:
            region = self.region
            inner = Region(constants=region.constants, names=region.names, size=region.size)
            outputs = self.shared.graphs.append(inner, call, given)
            region.size = inner.size
            if outputs is not None:
                inner.outputs = tuple(o for o, y in zip(outputs, call.outputs, strict=True) if y != ABSENT)
                types = {i: (g.dtype, g.shape) for i, g in zip(call.inputs, given, strict=True) if g is not None}
                fuse(inner, self.options.level, types)
                region.size = inner.size
                _forget_unread(inner)
            self.shared.bodies[key] = None if outputs is None else inner
        return self.shared.bodies[key]

    def _checked(self, call: RegionCall, values: Sequence[Entry | None]) -> tuple[ValueChecks, list[Any]]:
        """Run the definition; return the values on which it has decided, and its results."""
        checks, visitor = ValueChecks(), copy.copy(self.state.visitor)
        visitor.xp = checks
        results = visitor.visit(call.node, [v.array if isinstance(v, Value) else None for v in values], [])
        self.budget.left += 1  # counted with the call
        return checks, results

    def _computed(self, call: RegionCall, inner: Region, ranges: Sequence[Range], results: Sequence[Any]) -> bool:
        """Compute a call by its body; False, with the trace as it was, if the results are not those of the definition."""
        more = Counter(i for c in inner.calls for i in c.reads)
        more.update(inner.outputs)
        uses = {i: self.uses[i] for i in more}
        self.uses.update(more)
        step, buffer = len(self.segment.steps), len(self.buffers)
        self.counts = False
        if ranges:
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
        wanted = [r for r, o in zip(results, call.outputs, strict=False) if o != ABSENT]
        if not made or not all(map(_alike, made, wanted)):
            self._undo({o for c in inner.calls for o in c.outputs}, uses, buffer, step)
            return False
        for o, entry in zip([o for o in call.outputs if o != ABSENT], made, strict=True):
            self._set(o, entry)
        self._used(inner.outputs)
        self._used(call.reads)
        self._count(call)
        return True

    def _undo(self, ids: Iterable[int], uses: Mapping[int, int], first_buffer: int, first_step: int) -> None:
        """Forget the values with these ids, and the buffers, copies and steps since these; restore the counts of uses."""
        for i in ids:
            self.env.pop(i, None)
        for i, count in uses.items():
            self.uses[i] = count
        gone = set(self.buffers[first_buffer:])
        for _, copies in self.copies.values():
            for what in [w for w, c in copies.items() if c.buffer in gone]:
                del copies[what]
        self.copied = [c for c in self.copied if c[2].buffer not in gone]
        self._forget(first_buffer, first_step)

    @abstractmethod
    def _forget(self, first_buffer: int, first_step: int) -> None:
        """Release the buffers and the steps since these."""


def _forget_unread(region: Region) -> None:
    """Make the results absent that nothing reads: a kernel need not compute them."""
    read = {i for c in region.calls for i in c.reads}.union(region.outputs)
    for c in region.calls:
        c.outputs = tuple(o if o in read else ABSENT for o in c.outputs)


def _given(v: Entry | None) -> Given | None:
    if not isinstance(v, Value):
        return None
    fixed = v.shape if v.constant else (None,) * v.ndim
    return Given.of(v.dtype, fixed, v.array if v.constant and v.size <= SETTING else None)


def _alike(made: Entry, result: Any) -> bool:
    return isinstance(made, Value) and isinstance(result, np.ndarray) and (made.shape, made.dtype) == (result.shape, result.dtype)


def _ranges(checks: ValueChecks, values: Sequence[Entry | None]) -> list[Range] | None:
    """The indices that each run must check; None if a definition may refuse other values too."""
    if checks.reads:
        return None
    found: dict[tuple[int, int, int], Range] = {}
    given = [(n, v, v.array) for n, v in enumerate(values) if isinstance(v, Value)]
    for i, low, size in checks.ranges:
        if not i.size:
            continue
        whole = next(((n, v) for n, v, a in given if a.size == i.size and np.may_share_memory(a, i)), None)
        if whole is None:
            return None
        if not whole[1].constant:
            found[whole[0], low, size] = (whole[1], low, size)
    return [*found.values()]


def _range_step(ranges: Sequence[Range], call: RegionCall) -> PlanStep:
    def bind() -> Any:
        return [(_require_range, (v.array, low, size)) for v, low, size in ranges]

    return PlanStep(bind, tuple(v for v, _, _ in ranges), (), "numpy.range", call.origins or (call.node,))


def _require_range(indices: np.ndarray, low: int, size: int) -> None:
    if indices.min() < low or indices.max() >= size:
        raise Invalid("an index is out of range")
