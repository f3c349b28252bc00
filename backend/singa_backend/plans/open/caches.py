"""Large inputs and outputs of a plan that are not copied, and caches of generated text, which grow in place.

A model that generates text takes the keys and values of the past, appends those of the present, and returns both.  If the
caller passes such an output on as the next input, the next run writes after it in the same memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from ... import limits
from ...ir.sizes import now
from ...kernels.table import Invalid, require_finite
from ...kernels.values import ALIGNMENT, Value, aligned_start, order_of, strides_of

PASSED = 1 << 17
"""Bytes from which an input is read where it is, and an output computed where it stays: copies take longer than binding steps."""

Receivers = Sequence[np.ndarray | None]
"""The arrays of a caller for the outputs; None where it has none."""

PASSED_STEPS = 8
"""The highest number of steps that are bound in each run for such an array."""

SPARE = 64
"""The minimum number of elements along the growing axis for which memory is reserved; a quarter of the cache if that is more."""

UNSHARED = 2
"""What `sys.getrefcount` returns for memory that only a `ZeroCopy` refers to."""


def unbound() -> None:
    """Take the place of a call that is bound in each run, between the runs."""


@dataclass(eq=False)
class ZeroCopy:
    """A large input or output of a run that is not copied.

    Attributes:
        value: what the steps read or write.
        index: of the input; -1 for an output.
        array: that of the present run; None between runs.
        place: of the output.
        checked: whether a step checks that an input is finite, if the plan needs that.
        memory: of the last output: the next one uses it again if no array shows it any more, because the system takes longer to
            provide new pages than the step to write them.
    """

    value: Value
    index: int = -1
    array: np.ndarray | None = None
    memory: np.ndarray | None = None
    checked: bool = True
    place: int = -1

    def attach(self, inputs: Sequence[Any], receivers: Receivers = ()) -> None:
        """Let the steps that are bound next use the array of this run, for an output that of `receivers` if it can be written."""
        value = self.value
        if self.index >= 0:
            given = inputs[self.index]
            moved = np.ascontiguousarray(given if value.contiguous else np.transpose(given, order_of(value.strides)))
            self.array = np.ndarray(value.shape, value.dtype, moved, 0, value.strides)
            value.buffer.memory = moved.reshape(-1).view(np.uint8)
        elif receivers and self._receives(receiver := receivers[self.place]):
            self.array, value.buffer.memory = receiver, receiver.reshape(-1).view(np.uint8)
        else:
            needed = now(value.nbytes) + ALIGNMENT
            held = 0 if self.memory is None else self.memory.nbytes
            if not needed <= held <= 2 * needed or sys.getrefcount(self.memory) > UNSHARED:
                self.memory = np.empty(needed, np.uint8)
            assert self.memory is not None
            start = aligned_start(self.memory)
            self.array = np.ndarray(value.shape, value.dtype, self.memory, start, value.strides)
            value.buffer.memory = self.memory[start : start + needed - ALIGNMENT]

    def _receives(self, array: np.ndarray | None) -> TypeGuard[np.ndarray]:
        """Whether steps may write an array of the caller, which has the shape and dtype of the output."""
        return array is not None and self.value.contiguous and array.flags.c_contiguous and array.flags.aligned

    def require_finite(self) -> None:
        """Raise Invalid unless the input of this run is finite."""
        assert self.array is not None
        require_finite(self.array)

    def detach(self) -> None:
        """Keep nothing of the arrays of a run."""
        self.array = self.value.buffer.memory = None

    def take(self, once: bool = True) -> np.ndarray:
        """The output of this run.  That of a trace is in memory which nothing else uses after it.

        Args:
            once: whether this is the only output with the value; those of a trace are otherwise copies.
        """
        if self.array is not None:
            return self.array
        return self.value.array if once else self.value.array.copy("K")


@dataclass(eq=False)
class Replaced(ZeroCopy):
    """An input that a result replaces in place.  The steps stay bound to its array, which is usually the same in each run."""

    def moves(self, inputs: Sequence[Any]) -> bool:
        """Whether the array of this run is not that of the run before; the steps that are bound next use it."""
        given = inputs[self.index]
        if given is self.array:
            return False
        self.array = given
        self.value.buffer.memory = given.reshape(-1).view(np.uint8)
        return True


class CacheMemory(np.ndarray):
    """The memory of a cache, with room to grow along one axis.  It is the base of the arrays that show its contents.

    Attributes:
        axis: the axis that grows.
        used: the length of that axis in the longest array that shows the contents.
        claimed: the lengths from which the contents were extended: only the first thread that enters one may extend them.
        finite: the length up to which the contents are known to be finite.
        sizes: the shape that the memory has room for.
    """

    axis: int
    used: int
    claimed: dict[int, object]
    finite: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], dtype: np.dtype[Any], axis: int) -> CacheMemory:
        """New memory for these sizes."""
        made = cls(math.prod(sizes) * dtype.itemsize + ALIGNMENT, np.uint8)
        made.axis, made.used, made.claimed, made.finite, made.sizes = axis, 0, {}, 0, tuple(sizes)
        return made

    @property
    def elements(self) -> np.ndarray:
        """The bytes that begin with the first element: its address is a multiple of 64."""
        return self.view(np.ndarray)[aligned_start(self) :]

    def shown(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """The array that shows the contents up to a length; it can be written."""
        return np.ndarray(shape, dtype, self, aligned_start(self), strides_of(self.sizes, dtype.itemsize))

    def holds(self, x: np.ndarray) -> bool:
        """Whether an array shows all of the contents."""
        axis = self.axis
        same = x.shape == (*self.sizes[:axis], self.used, *self.sizes[axis + 1 :])
        return same and x.strides == strides_of(self.sizes, x.itemsize) and x.ctypes.data == self.elements.ctypes.data


def shows_cache(array: np.ndarray) -> bool:
    """Whether an array views the memory of a cache, which later runs extend; the caller may have made it writable."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, CacheMemory):
        base = base.base
    return isinstance(base, CacheMemory)


def roomy(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The sizes that memory for a cache of this shape has room for."""
    length = shape[axis]
    return (*shape[:axis], length + max(SPARE, length // 4), *shape[axis + 1 :])


def extend(x: np.ndarray, shape: tuple[int, ...], axis: int) -> tuple[np.ndarray, CacheMemory]:
    """An array of a larger shape that begins with the elements of another one: in the same memory if there is room after it.

    Args:
        x: the shorter array.
        shape: differs from that of x in the length of one axis.
        axis: that axis.

    Returns:
        The array, whose elements after those of x are not set, and its memory.
    """
    memory = x.base
    if isinstance(memory, CacheMemory) and memory.axis == axis and memory.sizes[axis] >= shape[axis]:
        caller = object()
        if memory.holds(x) and memory.claimed.setdefault(x.shape[axis], caller) is caller:
            memory.used = shape[axis]
            return memory.shown(shape, x.dtype), memory
    made = CacheMemory.of(roomy(shape, axis), x.dtype, axis)
    made.used = shape[axis]
    y = made.shown(shape, x.dtype)
    np.copyto(y[(*[slice(None)] * axis, slice(x.shape[axis]))], x)
    return y, made


def matches(x: np.ndarray, parts: Sequence[np.ndarray], axis: int) -> bool:
    """Whether arrays differ in the length of one axis only."""
    rest = (*x.shape[:axis], *x.shape[axis + 1 :])
    return all((*p.shape[:axis], *p.shape[axis + 1 :]) == rest and p.ndim == x.ndim and p.dtype == x.dtype for p in parts)


def append(x: np.ndarray, parts: Sequence[np.ndarray], axis: int, checked: bool, budget: limits.Budget | None) -> np.ndarray:
    """The concatenation of arrays: in the memory of the first if there is room after it.

    The result is read-only: a longer array may show the same memory.

    Args:
        x: the first array.
        parts: the others.
        axis: of the concatenation.
        checked: whether the elements of x must be finite; those that were checked before are not checked again.
        budget: of the run; None for a result that the caller counts.

    Raises:
        ResourceExhausted: if the result exceeds a limit.
        Invalid: if the shapes or types do not match, or elements are not finite.
    """
    axis %= max(x.ndim, 1)
    if not matches(x, parts, axis):
        raise Invalid("the shapes or types do not match")
    length = x.shape[axis]
    lead = (slice(None),) * axis
    shape = (*x.shape[:axis], length + sum(p.shape[axis] for p in parts), *x.shape[axis + 1 :])
    if budget is None:
        limits.admit(shape, x.dtype)
    else:
        budget.admit(shape, x.itemsize)
        budget.count_tensor(math.prod(shape) * x.itemsize)
    y, memory = extend(x, shape, axis)
    if checked and memory.finite < length:
        require_finite(y[(*lead, slice(memory.finite, length))])
        memory.finite = length
    for p in parts:
        y[(*lead, slice(length, length + p.shape[axis]))] = p
        length += p.shape[axis]
    y.flags.writeable = False
    return y


class GrowingSpace:
    """The namespace of a definition that appends to caches: a concatenation that begins with one extends it in its memory."""

    def __init__(self, xp: Any, caches: Sequence[Any], checked: bool) -> None:
        """Begin with the caches; `checked`: their elements must be finite."""
        self._xp, self._caches, self._checked = xp, list(caches), checked
        self.error: Invalid | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def concatenate(self, parts: Sequence[np.ndarray], axis: int = 0) -> Any:
        """As NumPy's."""
        x, *rest = parts
        place = next((n for n, c in enumerate(self._caches) if x is c), None)
        if place is None or not matches(x, rest, axis % x.ndim):
            return self._xp.concatenate(parts, axis=axis)
        del self._caches[place]
        try:
            return append(x, rest, axis, self._checked, None)
        except Invalid as error:  # the plan is left: it is not an error of the node
            self.error = error
            raise

    def check_others(self) -> None:
        """Raise Invalid if a cache to which nothing was appended is not finite."""
        for c in self._caches if self._checked else ():
            require_finite(c)


__all__ = [
    "PASSED", "PASSED_STEPS", "CacheMemory", "GrowingSpace", "Receivers", "Replaced", "ZeroCopy", "append", "shows_cache",
    "unbound",
]  # fmt: skip
