"""Work on a CUDA device that is captured as CUDA graphs: a later run launches a graph in place of its kernels.

A capture executes nothing.  It keeps the kernels and copies that are issued on its stream, with their arguments: the addresses
of arrays, and numbers of the host.  So memory of a graph is a private pool, which lives as long as the graph, and what a run
would copy from the host, draw or read cannot be a part of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

Array = Any  # of CuPy

_TABLE, _TABLES = 1 << 20, 1 << 24
"""The bytes of one table and of all tables that a record keeps."""

_DEFAULTS, _OF_THREAD = (0, 1, 2), 2
"""The addresses of default streams, and of the one that each thread has separately."""

Graph = Any  # of CuPy


class NotCapturable(Exception):
    """Work that a graph cannot hold; the message is the reason."""


class Tables:
    """Arrays that operator bodies make on the host in every run, kept on the device by their contents."""

    def __init__(self) -> None:
        self._kept: dict[Any, Array] = {}
        self._plans: dict[Any, Any] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """The bytes of all tables."""
        return self._bytes

    def put(self, module: Any, table: np.ndarray) -> Array:
        """A new array of the device with the contents of one of the host.  During a capture, the device copies a kept one."""
        key = (table.dtype, table.shape, table.tobytes()) if table.nbytes <= _TABLE else None
        kept = self._kept.get(key)
        if kept is not None:
            return kept.copy("K")  # a body may write to it
        refuse_capture(f"copies {table.nbytes} bytes from the host that an earlier run did not copy")
        copied = module.asarray(table)
        if key is not None and self._bytes + table.nbytes <= _TABLES:
            self._kept[key] = copied.copy("K")
            self._bytes += table.nbytes
        return copied

    def plan(self, key: Any, make: Callable[[], Any]) -> Any:
        """A plan of cuFFT, which is made before a capture and lives as long as the graphs that use it."""
        if key not in self._plans:
            refuse_capture("needs a plan of cuFFT that an earlier run did not make")
            self._plans[key] = make()
        return self._plans[key]


CAPTURES = threading.RLock()
"""Held while a stream captures: a device refuses to be waited for then, whichever thread asks, and the capture is invalid."""

_tables: ContextVar[Tables | None] = ContextVar("tables", default=None)
_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def tables() -> Tables | None:
    """The tables of the run that is recorded or captured now."""
    return _tables.get()


@contextmanager
def keeping(kept: Tables) -> Iterator[None]:
    """A context in which copies from the host are kept."""
    token = _tables.set(kept)
    try:
        yield
    finally:
        _tables.reset(token)


def refuse_capture(reason: str) -> None:
    """Raise NotCapturable if a run is captured now: what follows differs between runs."""
    if _capturing.get():
        raise NotCapturable(reason)


def stream_owner(stream: Any) -> Any:
    """What identifies the current stream, and lives as long as it: its object, or the thread to which it belongs."""
    return threading.current_thread() if stream.ptr == _OF_THREAD else stream


def is_capturing(module: Any) -> bool:
    """Whether the caller captures the current stream: what he captures must not wait for other streams."""
    pointer = module.cuda.get_current_stream().ptr
    return pointer not in _DEFAULTS and bool(module.cuda.runtime.streamIsCapturing(pointer))


class _Pool:
    """A private pool of memory of the current device.

    CuPy's pools do not free the blocks that arrays have returned to them when they are deleted.  So a pool stays in `_pools`
    until all are returned, which may be after a collection has deleted this object.

    Attributes:
        memory: the pool of CuPy.
    """

    def __init__(self, module: Any) -> None:
        self._device, self.memory, self._key = module.cuda.Device(), module.cuda.MemoryPool(), object()
        _free()
        _pools[self._key] = self._device, self.memory, False

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may end
            _pools[self._key] = self._device, self.memory, True
            _free()

    @property
    def bytes(self) -> int:
        """The bytes of the pool."""
        with self._device:
            return int(self.memory.total_bytes())


_pools: dict[object, tuple[Any, Any, bool]] = {}
"""The device of each pool, the pool, and whether its owner was deleted."""


def _free() -> None:
    """Free the blocks of pools whose owners were deleted."""
    for key, (device, pool, ends) in list(_pools.items()):
        if ends:
            with device:
                pool.free_all_blocks()
                if not pool.total_bytes():
                    _pools.pop(key, None)


class GraphMemory:
    """The stream on which the graphs of one run are captured, and their memory; of the current device.

    Args:
        module: CuPy.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._last: Callable[[], Any] | None = None
        self._now: Any = None
        self._done = module.cuda.Event(disable_timing=True)
        self._stream = module.cuda.Stream(non_blocking=True)
        self._pool = _Pool(module)  # last, so that it is deleted last: the stream returns its workspace to it

    @property
    def bytes(self) -> int:
        """The bytes of the pool."""
        return self._pool.bytes

    @contextmanager
    def _active(self) -> Iterator[None]:
        with self._stream, self._module.cuda.using_allocator(self._pool.memory.malloc):
            yield

    def begin(self) -> None:
        """Let the work of the current stream wait for what was between the last `begin` and `end`, on whatever stream it was."""
        self._now = self._module.cuda.get_current_stream()
        owner = stream_owner(self._now)
        if self._last is None or self._last() is not owner:
            if self._last is not None:
                self._now.wait_event(self._done)
            self._last = weakref.ref(owner)

    def end(self) -> None:
        """Note the end of the work that the next `begin` waits for."""
        self._done.record(self._now)

    def launch(self, graph: Graph) -> None:
        """Launch a graph on the stream of the last `begin`."""
        graph.launch(self._now)

    def capture(self, work: Callable[[], object]) -> Graph:
        """Capture what a function issues.

        Args:
            work: the function.

        Returns:
            The graph, an object with `launch(stream)`.

        Raises:
            Exception: that of `work`, or the driver cannot make a graph; nothing was executed.
        """
        token = _capturing.set(True)
        try:
            with CAPTURES, self._active():
                self._stream.begin_capture()
                try:
                    work()
                except BaseException:
                    with suppress(Exception):  # the capture is invalid
                        self._stream.end_capture()
                    raise
                return self._stream.end_capture()
        finally:
            _capturing.reset(token)

    def place_for(self, x: Array) -> Array:
        """Memory of the pool for arrays of the shape, the strides and the dtype of one.

        Args:
            x: the array.

        Returns:
            An array whose elements are not set.

        Raises:
            NotCapturable: the elements of `x` are not next to each other.
        """
        strides, size = sorted(zip(x.strides, x.shape, strict=True)), x.itemsize
        for stride, length in strides:
            if length > 1 and stride != size:
                raise NotCapturable("reads an input with gaps between its elements")
            size *= length
        with self._active():
            memory = self._module.cuda.alloc(max(x.nbytes, 1))
        return self._module.ndarray(x.shape, x.dtype, memory, x.strides)


def assign(place: Array, x: Any) -> None:
    """Write an array of the host or of the device to a place of the same shape, strides and dtype."""
    if not place.nbytes:
        return
    if x.__class__ is np.ndarray:
        place.set(x)
    else:
        place.data.copy_from_device_async(x.data, place.nbytes)


def new_copy(module: Any, x: Array) -> Array:
    """A copy in new memory, by a copy on the device if the elements are next to each other."""
    if not x.flags.c_contiguous:
        return x.copy()
    copied = module.empty(x.shape, x.dtype)
    assign(copied, x)
    return copied


def assign_if(module: Any, flags: list[Array], clear: int, pairs: list[tuple[Array, Array]]) -> None:
    """Write arrays to places if all elements of `flags` are `clear`.

    Args:
        module: CuPy.
        flags: arrays of uint64.
        clear: the value.
        pairs: a place and an array each.
    """
    if not flags:
        for place, x in pairs:
            place[...] = x
        return
    is_clear = module.concatenate(flags).min() == np.uint64(clear)
    for place, x in pairs:
        _assign_if(module)(is_clear, x, place)


@cache
def _assign_if(module: Any) -> Any:
    return module.ElementwiseKernel("raw bool right, T x", "T y", "if (right[0]) y = x;", "sonnx_assign_if")
