"""The values of a trace: where each is, how often it will still be read, and its memory until the segment is complete."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ... import dtypes, limits
from ...ir import graph as ir
from ...ir.sizes import SizeSpace, is_open, now, settled
from ...kernels.table import Options
from ...kernels.values import FINITE, Buffer, LazyBuffer, LazyConstant, OpaqueValue, Value, aligned, order_of, strides_of
from ...proto.tensor_data import release
from ..caches import GrowingCache
from ..contention import contention
from ..flat import Roles, model_node
from ..recompute import Home, Homes
from .segment import DynamicCall, Entry, PlanFacts, RunState, Segment, SharedValues


class TraceValues:
    """The values of a trace.

    Attributes:
        graph: the nodes that are traced.
        roles: of its values.
        caches: the inputs that may grow in the memory of the caller, by the id of their buffer.
        options: how plans compute.
        shared: what the plans of the graph share.
        state: what the steps share during a run.
        dynamic: the nodes of the model after whose calls a segment ends, and which sizes of their results differ.
        facts: what is known of the plan.
        budget: of the run that is the trace.
        env: the values that are still used.
        uses: the number of uses that are left.
        segment: the present segment.
        began: when its trace began.
        single: whether steps run on one thread, because other programs are expected to use cores.
        buffers: those that were made for the present segment.
        live: the memory that counts as live, by the id of its buffer or cell.
        entries: the inputs of the plan.
        copies: by the id of a value, the value and its copies in other memory orders.
        updates: the index of the first step that may replace an input; None before it.
        replaced: the inputs that results replace, by the id of their buffer.
        preferred: the values whose memory a result of the present calls should use.
        needs_finite: whether a step that replaces inputs needs finite ones.
        homes: where the values of calls are, if memory is bounded.
        ahead: the number of calls, from the next one of the present group, that machine code will compute when it is made.
        counts: whether calls are counted as executed: not those of a body.
        space: the sizes that differ between runs; None if none does.
        named: the constants of the segment that hold such sizes.
        exact: the calls of the segment whose kernels see numbers.
        begins: whether the segment is the first of the plan.
    """

    def __init__(
        self,
        graph: ir.Graph,
        roles: Roles,
        options: Options,
        shared: SharedValues,
        state: RunState,
        dynamic: dict[ir.Node, DynamicCall],
        facts: PlanFacts,
        budget: limits.Budget,
        caches: Sequence[GrowingCache] = (),
        space: SizeSpace | None = None,
    ) -> None:
        self.graph, self.roles = graph, roles
        self.caches = {id(c.value.buffer): c for c in caches}
        self.space = space
        self.named: list[Value] = []
        self.begins = True
        self.exact: list[Any] = []
        self.options = options
        self.shared = shared
        self.state = state
        self.dynamic = dynamic
        self.facts = facts
        self.budget = budget
        self.env: dict[ir.Value, Entry] = {}
        self.uses: Counter[ir.Value] = Counter()
        self.segment = Segment()
        self.began = time.perf_counter()
        self.single = options.adaptive and contention.expected(options.threads)
        self.buffers: list[Buffer] = []
        self.live: dict[int, Any] = {}
        self.entries: list[Entry] = []
        self.copies: dict[int, tuple[Value, dict[Any, Value]]] = {}
        self.updates: int | None = None
        self.replaced: dict[int, ir.Value] = {}
        self.preferred: set[ir.Value] = set()
        self.ahead = 0
        self.needs_finite = False
        self.homes: Homes = {}
        self.counts = True
        self._reasons: list[str] = []

    def is_dynamic(self, call: ir.Node) -> bool:
        """Whether a segment ends after a call of the model."""
        dynamic = self.dynamic.get(model_node(call))
        return dynamic is not None and not (dynamic.is_unnamed and (self.space is None or not self.space.names))

    def settling(self) -> AbstractContextManager[None]:
        """While present sizes may be read: steps run, or are bound, and are bound again for other sizes."""
        return nullcontext() if self.space is None else self.space.settling()

    def _get(self, i: ir.Value) -> Entry:
        entry = self.env.get(i)
        if entry is None:
            entry = self._constant(i.constant, i)
            self.env[i] = entry
        return entry

    def _values(self, call: ir.Node) -> list[Entry | None]:
        return [None if i is None else self._get(i) for i in call.inputs]

    def _constant(self, value: Any, key: Any = None) -> Entry:
        if not isinstance(value, (np.ndarray, LazyConstant)) or value.dtype == dtypes.STRING:
            return OpaqueValue(value)
        held = self.shared.constants.get(key) if key is not None else None
        if held is None or held[0] is not value:
            held = (value, Value.of(value, key))
            source = held[1].buffer.source if isinstance(held[1].buffer, LazyBuffer) else None
            if source is not None:  # views of one tensor of a file share its copy
                at = (source.__array_interface__["data"][0], source.nbytes)
                first = self.shared.mapped.setdefault(at, held[1])
                if first is not held[1]:
                    held[1].buffer = first.buffer
                    release(source)
            if key is not None:
                self.shared.constants[key] = held
        made = held[1]
        made.buffer.users += 1
        if key is None and made.buffer.memory is not None:
            self.live[id(made.buffer)] = made.buffer.memory
        self._admit(made.shape, made.dtype)
        return made

    def _entry(self, x: Any, shape: Sequence[Any] | None = None) -> Entry:
        """A new value that holds this one, whose shape may have sizes by name."""
        if not isinstance(x, np.ndarray) or x.dtype == dtypes.STRING:
            return OpaqueValue(x)
        order = order_of(x.strides) if self.options.ordered else None
        made = self.allocate(x.shape if shape is None else shape, x.dtype, order, FINITE)
        with self.settling():
            np.copyto(made.array, x)
        return made

    def grow(self, call: ir.Node, past: Value, axis: int, rows: Any) -> Value | None:
        """The present of a cache, in the memory of its past; None if it cannot grow there.

        Args:
            call: which appends.
            past: the cache.
            axis: the axis that grows.
            rows: the number of elements that are appended.
        """
        cache = self.caches.get(id(past.buffer))
        if cache is None or past is not cache.value or axis != cache.axis or cache.call not in (None, call):
            return None
        if cache.call is None:
            cache.rows = rows
            if not cache.room > rows:  # an assumption: a run with more rows has more room, or another plan
                return None
            shape = (*past.shape[:axis], past.shape[axis] + rows, *past.shape[axis + 1 :])
            self._admit(shape, past.dtype)
            cache.present = Value(past.buffer, shape, past.strides, past.dtype)
            cache.call = call
        return cache.present

    def allocate(self, shape: Sequence[int], dtype: np.dtype[Any], order: Sequence[int] | None, finiteness: int) -> Value:
        """A value in a new buffer."""
        shape = tuple(shape) if is_open(shape) else tuple(int(d) for d in shape)
        self._admit(shape, dtype)
        strides = strides_of(shape, dtype.itemsize, order)
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        return Value(self.buffer(nbytes), shape, strides, dtype, 0, False, finiteness)

    def _admit(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Check a tensor against the limits of this run, and note its size for those of other runs."""
        nbytes = math.prod(d or 1 for d in shape) * dtype.itemsize
        if is_open(shape):
            assert self.space is not None
            self.space.scope.tensors.add(nbytes)
        else:
            self.facts.largest_fixed = max(self.facts.largest_fixed, nbytes)
        self.budget.admit(settled(shape), dtype.itemsize)
        self.facts.largest = max(self.facts.largest, now(nbytes))
        self.facts.rank = max(self.facts.rank, len(shape))

    def buffer(self, nbytes: int) -> Buffer:
        """A new buffer with separate memory until the segment is complete."""
        self.budget.count_tensor(now(nbytes))
        made = Buffer(nbytes, aligned(now(nbytes)))
        assert made.memory is not None
        self.live[id(made)] = made.memory
        self.buffers.append(made)
        return made

    def _set(self, i: ir.Value, entry: Entry) -> None:
        self.env[i] = entry
        if isinstance(entry, Value):
            entry.buffer.users += 1
            if self.options.activation_memory and not entry.constant:
                self.homes[i] = Home(entry.buffer, now(entry.buffer.nbytes), settled(entry.shape))
        if not self.uses[i]:
            self._drop(i)

    def _used(self, values: Sequence[ir.Value]) -> None:
        """Count uses; release what is not read again."""
        for i in values:
            self.uses[i] -= 1
        for i in set(values):
            if self.uses[i] <= 0 and i in self.env:
                self._drop(i)

    def _drop(self, i: ir.Value) -> None:
        entry = self.env.pop(i)
        self.live.pop(id(entry), None)
        if isinstance(entry, Value):
            entry.buffer.users -= 1
            self._release(entry.buffer)
            for copy in self.copies.pop(id(entry), (entry, {}))[1].values():
                copy.buffer.users -= 1
                self._release(copy.buffer)

    def _release(self, buffer: Buffer) -> None:
        """Release the memory of a buffer that nothing uses."""
        if buffer.users <= 0 and not buffer.pinned:
            self.live.pop(id(buffer), None)
            buffer.memory = None

    def reusable(self, i: ir.Value, uses: int) -> bool:
        """Whether nothing reads the memory of a value after these uses of it."""
        entry = self.env.get(i)
        users = 1
        if self.updates is not None and isinstance(entry, Value):
            given = self.replaced.get(id(entry.buffer))
            if given == i:
                uses += 1  # what fills the buffer before each run
            elif given is not None:
                users = 2 if self.uses[given] == 1 else 0
            if self.preferred and i not in self.preferred:
                return False
        return (
            isinstance(entry, Value)
            and not entry.constant
            and not entry.buffer.pinned
            and self.uses[i] == uses
            and entry.buffer.users == users
            and all(s or d < 2 for s, d in zip(entry.strides, entry.shape, strict=True))
        )
