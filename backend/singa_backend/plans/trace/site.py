"""What a kernel sees of the place of a call in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...ir import graph as ir
from ...ir.sizes import now
from ...kernels.table import Follower, Made, Site, worst
from ...kernels.values import NAN, Buffer, OpaqueValue, Value
from .segment import Entry
from .values import TraceValues


class TraceSite(Site):
    """The place of a call in a trace."""

    def __init__(self, tracer: TraceValues, call: ir.Node, inputs: Sequence[Entry | None], followers: Sequence[Follower]) -> None:
        super().__init__()
        assert call.operator is not None
        self.tracer, self.call = tracer, call
        self.inputs = [v if isinstance(v, Value) else None for v in inputs]
        self.opaque = any(isinstance(v, OpaqueValue) for v in inputs)
        self.operator, self.name, self.version = call.operator, call.op_type, call.operator.version
        self.attributes = call.attributes
        self.outputs = tuple(o is not None for o in call.outputs)
        self.options, self.shared = tracer.options, tracer.shared.kernels
        self.followers = followers
        self.is_open = tracer.space is not None and bool(tracer.space.scope.symbols)
        self.trains = tracer.roles.is_step
        self.finite = False
        self.made: list[tuple[Value, Any, Value]] = []

    def kept(self, value: Value, what: Any, make: Callable[[], Value]) -> Value:
        """As of `Site`: later calls of the trace use it too."""
        found = self.tracer.copies.get(id(value), (value, {}))[1].get(what)
        found = next((c for v, w, c in self.made if v is value and w == what), found)
        if found is None:
            found = make()
            self.made.append((value, what, found))
        return found

    def is_finite(self, value: Value) -> bool:
        """Whether a value is finite now, whatever its size is."""
        with self.tracer.settling():
            return super().is_finite(value)

    def needs_finite(self) -> None:
        """Note that the kernel agrees with the definition for finite inputs only."""
        self.finite = True

    def known_finiteness(self) -> int:
        """The highest finiteness of the inputs."""
        return NAN if self.opaque else worst(*self.inputs, *(v for f in self.followers[: self.absorbed] for v in f.inputs))

    def new(self, shape: Sequence[int], dtype: Any, order: Sequence[int] | None = None, finiteness: int | None = None) -> Value:
        """A value in memory that the arena will place."""
        known = self.known_finiteness() if finiteness is None else finiteness
        return self.tracer.allocate(shape, np.dtype(dtype), order, known)

    def present(self, value: Value) -> np.ndarray:
        """The elements of a value now, whatever its size is."""
        with self.tracer.settling():
            return value.array

    def grown(self, cache: Value, axis: int, rows: Any) -> Value | None:
        """The value with a growing cache and further elements, in its memory."""
        return self.tracer.grow(self.call, cache, axis, rows)

    def scratch(self, nbytes: int) -> Buffer:
        """Memory that the arena will place."""
        return self.tracer.buffer(nbytes)

    def reusable(self, place: int) -> bool:
        """Whether no later call reads an input."""
        i = self.call.inputs[place]
        return i is not None and self.tracer.reusable(i, self._reads[i])

    @cached_property
    def _reads(self) -> Counter[ir.Value | None]:
        """How often the call reads each value."""
        return Counter(self.call.inputs)

    def constant(self, array: np.ndarray, key: Any = None) -> Value:
        """A value outside of the arena."""
        return Value.of(array, key)

    def number(self, size: Any, dtype: np.dtype[Any]) -> Value:
        """A constant, which is written whenever the size changes."""
        made = self.constant(np.array([now(size)], dtype))
        if not isinstance(size, int):
            made.contents = [size]
            self.tracer.named.append(made)
        return made

    def body(self) -> ir.Graph | None:
        """That of the call."""
        return self.call.body()

    def once(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """Kept for the call."""
        key, held = (self.call, what), self.shared.derived
        if key not in held:
            held[key] = make()
        found: Made = held[key]
        return found
