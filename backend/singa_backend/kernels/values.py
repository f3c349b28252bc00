"""The values of a plan: arrays of known dtype, shape and strides in buffers whose place in memory is decided later.

While a plan is traced each buffer has separate memory, which is released after the last use.  When the trace is complete, the
arena assigns every buffer its place, and the steps are bound again.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..ir.sizes import Size, is_open, settled
from ..proto.tensor_data import COPIED, copied, is_mapped, release

ALIGNMENT = 64

LARGE = 1 << 16
"""Bytes from which a constant that has to be computed, or copied from a file, is not kept for those who need it once."""

FINITE, INFINITE, NAN = 0, 1, 2
"""What the elements of a value may be if no input of the run is a NaN or an infinity, and nothing overflows."""

ANY, LOW, REACHED = 0, 1, 2
"""Which infinities they may be: any; negative ones; negative ones, with a finite element in each row along the last axis.

A mask adds negative infinities to scores, and the softmax of a row with a finite element is finite.
"""


def address_of(memory: np.ndarray) -> int:
    """The address of the first byte of an array in C order; of memory that may be written in a quarter of the time of NumPy's."""
    given: Any = memory  # which NumPy's types do not describe as a buffer
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(given))
    except (TypeError, ValueError):  # read-only, or empty
        return int(memory.ctypes.data)


def aligned_start(raw: np.ndarray) -> int:
    """The number of bytes of memory before the first address that is a multiple of `ALIGNMENT`."""
    return -address_of(raw) % ALIGNMENT


def aligned(nbytes: int) -> np.ndarray:
    """New memory that begins at a multiple of 64 bytes."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = aligned_start(raw)
    return raw[start : start + nbytes]


def order_of(strides: Sequence[int]) -> list[int]:
    """The axes of an array from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda i: -strides[i])


@dataclass(eq=False)
class Buffer:
    """Bytes of a plan.

    Attributes:
        nbytes: their number.
        memory: where they are now; None before the trace and after the last use.
        pinned: whether the memory is not the arena's: constants, inputs of a continued plan.
        first: the index of the first step that uses it.
        last: the index of the last step that uses it.
        offset: the place in the arena.
        users: the number of live values in it.
    """

    nbytes: int
    memory: np.ndarray | None = None
    pinned: bool = False
    first: int = -1
    last: int = -1
    offset: int = 0
    users: int = 0

    def touch(self, step: int) -> None:
        """Note that a step uses it."""
        if self.first < 0:
            self.first = step
        self.last = max(self.last, step)

    def read(self) -> np.ndarray | None:
        """The bytes for a computation now; those of a constant that is not kept are dropped with the last reference."""
        return self.memory


class LazyBuffer(Buffer):
    """Bytes of a constant that are made when they are needed: `memory` keeps them, `read` does not.

    Attributes:
        source: the bytes in a file that is mapped into memory, which need not be aligned; None if they are computed.
    """

    def __init__(self, nbytes: int, make: Callable[[], np.ndarray], source: np.ndarray | None = None) -> None:
        self._make, self.source = make, source
        self._held: np.ndarray | None = None
        super().__init__(nbytes, pinned=True)

    @property
    def memory(self) -> np.ndarray | None:
        """Where the bytes are."""
        if self._held is None:
            self._held = self._make()
        return self._held

    @memory.setter
    def memory(self, memory: np.ndarray | None) -> None:
        self._held = memory

    def read(self) -> np.ndarray | None:
        if self._held is not None:
            return self._held
        return self._make() if self.source is None else self.source


@dataclass(frozen=True, eq=False)
class LazyConstant:
    """A constant array that is computed whenever it is needed, so that no memory is held between.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        fill: writes the elements into an array.
        bound: no magnitude of an element is larger; all are finite.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[np.ndarray], None]
    bound: float

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self) -> np.ndarray:
        """The elements, computed."""
        made = aligned(self.nbytes).view(self.dtype).reshape(self.shape)
        with np.errstate(all="ignore"):
            self.fill(made)
        return made

    def memory(self) -> np.ndarray:
        """The bytes of the elements, computed."""
        return self.array().reshape(-1).view(np.uint8)


@dataclass(eq=False)
class Value:
    """An array in a buffer.

    Attributes:
        buffer: the buffer.
        shape: its shape.
        strides: its strides in bytes.
        dtype: its dtype.
        offset: its first byte in the buffer.
        constant: whether its contents are the same in every run of the plan.
        finiteness: FINITE, INFINITE or NAN.
        key: identifies a constant of the graph, for what is derived from it; None for other values.
        low: ANY, LOW or REACHED: which infinities the finiteness permits.
        contents: the elements of a constant that holds sizes by name: a flat list of numbers and sizes; None for other values.
    """

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0
    constant: bool = False
    finiteness: int = FINITE
    key: Any = None
    low: int = ANY
    contents: list[Any] | None = None

    @classmethod
    def of(cls, given: np.ndarray | LazyConstant, key: Any = None) -> Value:
        """A constant."""
        if isinstance(given, LazyConstant):
            strides = strides_of(given.shape, given.dtype.itemsize)
            return cls(LazyBuffer(given.nbytes, given.memory), given.shape, strides, given.dtype, 0, True, FINITE, key)
        array: np.ndarray = given
        if not array.flags.c_contiguous and array.nbytes >= LARGE:
            order = sorted(range(array.ndim), key=lambda i: -array.strides[i])
            if dense(array.shape, array.strides, array.itemsize, order):  # a transposed view, which is not copied
                made = cls.of(array.transpose(order), key)
                made.shape, made.strides, made.low = array.shape, array.strides, min(made.low, LOW)
                return made
        array = np.ascontiguousarray(array).reshape(array.shape)
        memory = array.reshape(-1).view(np.uint8) if array.size else np.empty(ALIGNMENT, np.uint8)
        finiteness = FINITE
        if array.dtype.kind not in "biu" and array.size and not math.isfinite(bound_of(array)):
            with np.errstate(all="ignore"):
                plain = array.astype(np.float64) if array.dtype.kind not in "fc" else array
                finiteness = NAN if np.isnan(plain).any() else INFINITE if np.isinf(plain).any() else FINITE
        low = _low(array) if finiteness == INFINITE and array.dtype.kind == "f" else ANY
        if array.size and is_mapped(array):
            buffer: Buffer = LazyBuffer(memory.nbytes, partial(_copied, memory), memory)
        else:
            buffer = Buffer(memory.nbytes, memory, pinned=True)
        return cls(buffer, array.shape, array.strides, array.dtype, 0, True, finiteness, key, low)

    @property
    def array(self) -> np.ndarray:
        """The array, in the buffer's present memory."""
        if self.contents is not None:
            return np.array([int(n) for n in self.contents], self.dtype).reshape(self.shape)
        shape, strides = self.shape, self.strides
        d: Any
        for d in shape:
            if type(d) is Size:
                if d.space.settled:
                    shape, strides = settled(shape), settled(strides)
                break
        if 0 in shape:
            return np.empty(shape, self.dtype)
        return np.ndarray(shape, self.dtype, self.buffer.memory, self.offset, strides)

    def read(self) -> np.ndarray:
        """The array for a computation now, which does not keep a constant that is in a file or computed."""
        if self.contents is not None:
            return self.array
        return np.ndarray(self.shape, self.dtype, self.buffer.read(), self.offset, self.strides)

    @property
    def known(self) -> np.ndarray | None:
        """The contents of a constant; None for other values."""
        return self.array if self.constant else None

    @property
    def address(self) -> int:
        """The address of the first element in the buffer's present memory."""
        assert self.buffer.memory is not None
        return address_of(self.buffer.memory) + int(self.offset)

    @property
    def is_open(self) -> bool:
        """Whether its size differs between runs."""
        return is_open(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements are in C order without gaps."""
        return dense(self.shape, self.strides, self.dtype.itemsize, range(self.ndim))

    @property
    def is_dense(self) -> bool:
        """Whether the elements are without gaps, in any order of the axes."""
        return dense(self.shape, self.strides, self.dtype.itemsize, order_of(self.strides))

    @property
    def channels_last(self) -> bool:
        """Whether axis 1 is innermost: N, D1, ..., Dn, C in memory."""
        return self.ndim > 2 and dense(self.shape, self.strides, self.dtype.itemsize, last_order(self.ndim))

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides in elements."""
        size = self.dtype.itemsize
        return tuple(s // size for s in self.strides)

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Value:
        """A value of other shape and strides (bytes) in the same memory, `offset` bytes after this one's first element."""
        place, low = self.offset + offset, min(self.low, LOW)
        constant = self.constant and self.contents is None and not is_open(shape)
        return Value(self.buffer, tuple(shape), tuple(strides), self.dtype, place, constant, self.finiteness, low=low)

    def unnamed(self) -> Value:
        """A constant that holds sizes by name as a value that each run reads; any other value itself."""
        if self.contents is None:
            return self
        return Value(self.buffer, self.shape, self.strides, self.dtype, self.offset, False, self.finiteness)

    def like(self, array: np.ndarray) -> Value:
        """The value that is this view of `self.array`, whose memory exists while the plan is traced."""
        offset = array.__array_interface__["data"][0] - self.address if array.size else 0
        return self.view(array.shape, array.strides, offset)


def sum_finiteness(a: int, a_low: int, b: int, b_low: int) -> tuple[int, int]:
    """The finiteness of a sum, and which infinities it may hold, by those of its operands."""
    if a == b == FINITE:
        return FINITE, ANY
    if NAN in (a, b):
        return NAN, ANY
    if FINITE in (a, b):  # finite values leave the other's infinities where they are
        return INFINITE, a_low if b == FINITE else b_low
    low = min(a_low, b_low, LOW)
    return INFINITE if low else NAN, low


def _low(array: np.ndarray) -> int:
    """Which infinities an array holds."""
    if np.isposinf(array).any():
        return ANY
    return REACHED if array.ndim and not np.isneginf(array.max(-1)).any() else LOW


_BLOCK = 1 << 16


def _copied(source: np.ndarray) -> np.ndarray:
    return copied(source, aligned(source.nbytes))


def bound_of(array: np.ndarray | LazyConstant) -> float:
    """A number that no magnitude of an element exceeds; infinity or NaN if it is not known: an element may not be finite."""
    if isinstance(array, LazyConstant):
        return array.bound
    if array.dtype.kind != "f":
        return math.nan
    total = 0.0
    with np.errstate(all="ignore"):
        for part in _parts(array.reshape(-1), COPIED // array.itemsize):
            for block in [part] if part.flags.aligned else _parts(part, _BLOCK):  # NumPy copies it, here into the cache
                total += float(np.dot(block, block))
            release(part)
    return 1.01 * math.sqrt(total) if total >= 0 else math.nan


def _parts(flat: np.ndarray, size: int) -> list[np.ndarray]:
    return [flat[i : i + size] for i in range(0, flat.size, size)]


def dense(shape: Sequence[int], strides: Sequence[int], itemsize: int, order: Sequence[int] | range) -> bool:
    """Whether the axes in this order, outermost first, have the strides of an array without gaps."""
    expected = itemsize
    for axis in reversed(order):
        if shape[axis] != 1:
            if strides[axis] != expected:
                return False
            expected *= shape[axis]
    return True


def merged(shape: Sequence[int], strides: Sequence[int], repeats: bool = False) -> tuple[int, int] | None:
    """The size and the stride of one axis in place of these; None if they are uneven, or overlap and are not to be repeated."""
    size, stride = 1, 0
    for d, s in zip(reversed(shape), reversed(strides), strict=True):
        if d == 1:
            continue
        if size == 1:
            stride = s
        elif s != stride * size or not (s or repeats):
            return None
        size *= d
    return size, stride


def strides_of(shape: Sequence[int], itemsize: int, order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides in bytes of an array whose axes are in this order in memory, outermost first; C order by default."""
    strides = [0] * len(shape)
    step = itemsize
    for axis in reversed(range(len(shape)) if order is None else list(order)):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def last_order(ndim: int) -> list[int]:
    """The order of axes in memory with the channels last."""
    return [0, *range(2, ndim), 1]


@dataclass(eq=False)
class OpaqueValue:
    """A value that is not an array of numbers: strings, a sequence, a map, an empty optional.  It is kept as it is.

    Attributes:
        value: the value.
        fresh: whether each run sets another one, which nothing else holds, so that an output need not be copied.
    """

    value: Any = None
    fresh: bool = False


Bound = Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Functions and arguments that a run calls in order."""


@dataclass(eq=False)
class PlanStep:
    """A piece of work of a plan.

    Attributes:
        bind: returns the calls that do the work, on the present memory of the values.
        reads: the values that it reads.
        writes: the values that it writes.
        kernel: the name of the kernel, for reports.
        origins: the nodes that it computes.
        notes: for reports: the reason for a slower kernel, layouts.
        scratch: memory that is used within the step only.
        keeps: objects that the calls need.
        work: returns the floating point operations for the present sizes; None if they are not known.
        count: the number of bound calls.
    """

    bind: Callable[[], Bound]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    kernel: str
    origins: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    scratch: Buffer | None = None
    keeps: list[Any] = field(default_factory=list)
    work: Callable[[], int | None] = int
    count: int = 0
