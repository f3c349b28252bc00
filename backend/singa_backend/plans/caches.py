"""Caches of generated text, which grow in place.

A model that generates text takes the keys and values of the past, appends those of the present, and returns both.  If the
caller passes such an output on as the next input, the next run writes after it in the same memory: in a plan the past and the
present are one buffer, whose steps along the outer axes have a size by name, the room that is left in the memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import dtypes, limits
from ..ir import graph as ir
from ..ir.declaration import caches_of
from ..ir.sizes import Size, SizeSpace, now, settled
from ..kernels.table import require_finite
from ..kernels.values import ALIGNMENT, Buffer, Value, address_of, aligned_start, strides_of
from .passed import Receivers, ZeroCopy

SPARE = 64
"""The minimum number of elements along the growing axis for which memory is reserved; a quarter of the cache if that is more."""


class CacheMemory(np.ndarray):
    """The memory of a cache, with room to grow along one axis.  It is the base of the arrays that show its contents.

    Attributes:
        axis: the axis that grows.
        used: the length of that axis in the longest array that shows the contents.
        claimed: the lengths from which a run extends the contents: only the first run that enters one may do so.
        finite: the length up to which the contents are known to be finite.
        sizes: the shape that the memory has room for.
        steps: the strides in bytes.
        start: the place of the first element in it, at an address that is a multiple of 64.
        address: that address.
    """

    axis: int
    used: int
    claimed: dict[int, object]
    finite: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    start: int
    address: int

    @classmethod
    def of(cls, sizes: Sequence[int], dtype: np.dtype[Any], axis: int) -> CacheMemory:
        """New memory for these sizes."""
        memory = cls(math.prod(sizes) * dtype.itemsize + ALIGNMENT, np.uint8)
        memory.axis, memory.used, memory.claimed, memory.finite, memory.sizes = axis, 0, {}, 0, tuple(sizes)
        memory.steps, memory.start = strides_of(sizes, dtype.itemsize), aligned_start(memory)
        memory.address = address_of(memory) + memory.start
        return memory

    @property
    def elements(self) -> np.ndarray:
        """The bytes that begin with the first element."""
        return self.view(np.ndarray)[self.start :]

    def shown(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """The array that shows the contents up to a length; it can be written."""
        return np.ndarray(shape, dtype, self, self.start, self.steps)

    def holds(self, x: np.ndarray) -> bool:
        """Whether an array shows all of the contents."""
        axis, shape = self.axis, x.shape
        same = len(shape) == len(self.sizes) and shape[axis] == self.used and x.strides == self.steps
        same = same and shape[:axis] == self.sizes[:axis] and shape[axis + 1 :] == self.sizes[axis + 1 :]
        return same and bool(x.__array_interface__["data"][0] == self.address)


def shows_cache(array: np.ndarray) -> bool:
    """Whether an array views the memory of a cache, which later runs extend; the caller may have made it writable."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, CacheMemory):
        base = base.base
    return isinstance(base, CacheMemory)


def room_for(length: int, rows: int) -> int:
    """The room for further elements in new memory for a cache.

    Args:
        length: of the cache, along the axis that grows.
        rows: the number of elements that are appended first.
    """
    return rows + max(SPARE, (length + rows) // 4)


@dataclass(eq=False)
class GrowingCache(ZeroCopy):
    """An input that grows in the memory of the caller, and the output that begins with it.

    Attributes:
        axis: the axis that grows.
        room: the elements for which there is room after those of the input.
        place_of_room: the place of the symbol of the room in the space of sizes.
        rows: the elements that are appended; 0 if none have been.
        present: the output.
        call: which appends.
        owner: the memory of the present run.
        length: that of the input of this run, which the run has claimed there.
    """

    axis: int = 0
    room: Any = None
    place_of_room: int = -1
    rows: Any = 0
    present: Value | None = None
    call: ir.Node | None = None
    owner: CacheMemory | None = None
    length: int = 0
    is_in_table: ClassVar[bool] = True

    @property
    def address(self) -> int:
        """That of the first element in this run."""
        assert self.owner is not None
        return self.owner.address

    def is_present(self, entry: Any) -> bool:
        """Whether an output shows the whole cache with what was appended, at the present sizes."""
        if self.present is None or not isinstance(entry, Value) or entry.buffer is not self.present.buffer:
            return False
        shown, whole = (settled((*v.shape, *v.strides, v.offset)) for v in (entry, self.present))
        return shown == whole

    def memory_of(self, x: np.ndarray) -> CacheMemory | None:
        """The memory whose contents an array shows, if it may grow there."""
        memory = x.base
        return memory if isinstance(memory, CacheMemory) and memory.axis == self.axis and memory.holds(x) else None

    def room_of(self, x: np.ndarray, least: int = 1) -> int:
        """The room after a cache, in its memory or in a copy: more than `least`, and than the elements that are appended."""
        rows, length, memory = max(int(now(self.rows)), least), int(x.shape[self.axis]), self.memory_of(x)
        if memory is not None:
            left = memory.sizes[self.axis] - length
            if left > rows:
                return left
        return room_for(length, rows)

    def choose_memory(self, x: np.ndarray, room: int, budget: limits.Budget) -> None:
        """Let this run use the memory of a cache, or a copy of it with room.

        Args:
            x: the cache.
            room: the elements for which there is room after it.
            budget: counts a copy.
        """
        axis, length, memory = self.axis, x.shape[self.axis], self.memory_of(x)
        sizes = (*x.shape[:axis], length + room, *x.shape[axis + 1 :])
        run = object()
        if memory is None or memory.sizes != sizes or memory.claimed.setdefault(length, run) is not run:
            budget.admit(sizes, x.itemsize)
            budget.count_tensor(math.prod(sizes) * x.itemsize)
            memory = CacheMemory.of(sizes, x.dtype, axis)
            memory.used, memory.claimed[length] = length, run
            np.copyto(memory.shown(x.shape, x.dtype), x)
        self.owner, self.length = memory, length
        self.value.buffer.memory = memory.elements

    def attach(self, inputs: Sequence[Any], receivers: Receivers = ()) -> None:
        """Let the steps that are bound next use the memory of this run."""
        assert self.owner is not None
        self.value.buffer.memory = self.owner.elements

    def require_finite(self) -> None:
        """Raise Invalid unless the elements that no run has checked are finite."""
        assert self.owner is not None
        length = now(self.value.shape[self.axis])
        if self.owner.finite < length:
            array = self.owner.shown(settled(self.value.shape), self.value.dtype)
            require_finite(array[(*[slice(None)] * self.axis, slice(self.owner.finite, length))])
            self.owner.finite = length

    def detach(self) -> None:
        """Keep no step that refers to the memory of a run."""
        self.value.buffer.memory = None

    def release(self) -> None:
        """Keep nothing of the memory of a run; another one may extend it if this one has returned nothing of it."""
        if self.owner is not None and self.owner.used == self.length:
            self.owner.claimed.pop(self.length, None)
        self.owner = self.value.buffer.memory = None

    def take(self, output: Value, once: bool = True) -> np.ndarray:
        """The output of this run.  It is read-only: a longer array may show the same memory.  Another view of it is copied."""
        if not self.is_present(output):
            return output.array.copy()
        assert self.owner is not None and self.present is not None
        shape = settled(self.present.shape)
        self.owner.used = shape[self.axis]
        shown = self.owner.shown(shape, self.present.dtype)
        shown.flags.writeable = False
        return shown


class GrowingCaches(list[GrowingCache]):
    """Those of a plan.

    Args:
        values: the inputs of the graph.
        axes: the axis along which an input may grow.
    """

    def __init__(self, values: Sequence[ir.Value], axes: Mapping[ir.Value, int]) -> None:
        super().__init__()
        self._values, self._axes = values, axes
        self._copied: set[int] = set()
        self._least = 1

    def begin(
        self, inputs: Sequence[Any], shapes: Sequence[Sequence[Any] | None], space: SizeSpace | None, budget: limits.Budget
    ) -> None:
        """Let inputs whose lengths have names, or are 0, have memory with room, for a trace.

        Args:
            inputs: the inputs.
            shapes: their shapes, with sizes by name.
            space: the sizes.
            budget: of the run.
        """
        self.release()
        self.clear()
        rooms: dict[Any, tuple[Size, int]] = {}
        for index, (v, x, shape) in enumerate(zip(self._values, inputs, shapes, strict=False)):
            axis = self._axes.get(v)
            if axis is None or index in self._copied or shape is None or not -x.ndim <= axis < x.ndim or x.dtype == dtypes.STRING:
                continue
            axis %= x.ndim
            length = shape[axis]
            if space is None or not (isinstance(length, Size) or length == 0):
                continue
            cache = GrowingCache(Value(Buffer(0, pinned=True), tuple(shape), (), x.dtype), index, axis=axis)
            of = length.terms if isinstance(length, Size) else ()
            if of not in rooms:
                # what is appended to an empty cache is a prompt, whose length is one of the sizes
                least = self._least if of else max(self._least, *space.values)
                rooms[of] = space.symbol(f"room after {v.name}", cache.room_of(x, least)), len(space.values) - 1
            cache.room, cache.place_of_room = rooms[of]
            sizes = (*shape[:axis], length + cache.room, *shape[axis + 1 :])
            cache.value.strides = strides_of(sizes, x.itemsize)
            cache.value.buffer.nbytes = math.prod(sizes) * x.itemsize
            cache.choose_memory(x, cache.room.now(), budget)
            self.append(cache)

    def copy_all(self) -> bool:
        """Let the next trace copy all caches; return whether there are any."""
        self._copied |= {c.index for c in self}
        return bool(self)

    def have_grown(self, outputs: Sequence[Any]) -> bool:
        """Whether all have grown in a trace with these outputs; if not, the next trace has more room, or copies the others."""
        copied = [c for c in self if not any(c.is_present(e) for e in outputs)]
        if short := [c for c in copied if c.call is None and now(c.rows)]:
            self._least = max(now(c.rows) for c in short)
        self._copied |= {c.index for c in copied if c not in short}
        return not copied

    def choose(self, inputs: Sequence[Any], budget: limits.Budget, values: list[int]) -> None:
        """Choose the memory of a run, and the rooms: caches of one length have the same.

        Args:
            inputs: the inputs.
            budget: of the run.
            values: those of the symbols, of which the rooms are set.
        """
        rooms: dict[int, int] = {}
        for cache in self:
            rooms[cache.place_of_room] = max(rooms.get(cache.place_of_room, 0), cache.room_of(inputs[cache.index]))
        for cache in self:
            cache.choose_memory(inputs[cache.index], rooms[cache.place_of_room], budget)
        for place, room in rooms.items():
            values[place] = room

    def release(self) -> None:
        """Keep nothing of the memory of a run."""
        for cache in self:
            cache.release()


def growing_caches(graph: ir.Graph) -> dict[ir.Value, int]:
    """The inputs of a graph whose elements one call reads, to append others; its result is an output.  With the axis.

    The call is a Concat, or of an operator that declares its caches.
    """
    outputs, inputs = Counter(graph.outputs), set(graph.inputs)
    grown: list[tuple[ir.Value | None, ir.Value | None, int]] = [
        (c.inputs[0], c.outputs[0], c.attributes["axis"]) for c in graph.nodes if c.is_("Concat") and len(c.inputs) > 1
    ]
    for call in graph.nodes:
        for i, o in caches_of(call.domain, call.op_type).items():
            if i < len(call.inputs) and o < len(call.outputs):
                grown.append((call.inputs[i], call.outputs[o], -2))

    def uses(value: ir.Value) -> int:
        return sum(not (isinstance(user, ir.Node) and user.is_("Shape")) for user, _ in value.uses)

    return {i: axis for i, o, axis in grown if i in inputs and i is not None and o is not None and uses(i) == 1 == outputs[o]}
