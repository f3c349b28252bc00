"""Communication over NCCL, through CuPy, for arrays on the GPUs of the processes.

Operations run on a separate stream, after the work that the current stream had when they were started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import DeviceUnavailable, InvalidInput, MissingDependency
from ._common import no_progress, pieces_of

_TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""NCCL's numbers of data types."""

_SUM = 0

_PAUSE = 50e-6
"""Seconds between two checks of an operation."""


def unique_id() -> tuple[int, ...]:
    """Create the id of a new group, which is passed to all its processes.

    Returns:
        The id, 128 integers.

    Raises:
        MissingDependency: CuPy or NCCL is not installed.
        DeviceUnavailable: There is no usable GPU.
    """
    cupy = _cupy()
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            raise DeviceUnavailable("NCCL needs a GPU, got a machine without one", hint="use MPI: mpiexec -n 2 python train.py")
        return tuple(cupy.cuda.nccl.get_unique_id())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceUnavailable(f"NCCL needs a GPU: {error}", hint="use MPI: mpiexec -n 2 python train.py") from error


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MissingDependency("NCCL needs CuPy", hint="pip install 'sonnx[nccl]'") from error
    if not cupy.cuda.nccl.available:
        raise MissingDependency("CuPy found no NCCL library", hint="pip install 'sonnx[nccl]'")
    return cupy


class NcclRank:
    """A process with a GPU, in a group of NCCL; a Communicator.  Creating it waits for the other processes.

    Its GPU is the one whose ordinal is `local_rank`.

    Args:
        id: The id of the group, by `unique_id`, equal in all processes.
        rank: The number of this process.
        size: The number of processes.
        local_rank: The number of processes with a lower rank on the same machine.
        timeout: Seconds that an operation waits for the other processes.
        pieces: The maximum number of elements of one operation of NCCL; longer arrays are sent in pieces.
    """

    on_host = False

    def __init__(
        self, id: Sequence[int], rank: int, size: int, local_rank: int, timeout: float = 300.0, pieces: int = 1 << 22
    ) -> None:
        self._cupy = _cupy()
        self._nccl = self._cupy.cuda.nccl
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.timeout, self.pieces = timeout, pieces
        self.sent = 0
        with self._gpu():
            self._group = self._nccl.NcclCommunicator(size, tuple(id), rank)
            self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def _gpu(self) -> Any:
        """A context in which the GPU of this process is CuPy's current one."""
        return self._cupy.cuda.Device(self.local_rank)

    def all_reduce(self, array: Any) -> NcclHandle:
        """Start the sum of an array over the ranks; see Communicator."""
        with self._gpu():
            array = self._cupy.asarray(array)
            result = self._cupy.empty_like(array)
        kind, item = _type(array.dtype), array.dtype.itemsize

        def send(stream: int) -> None:
            for a, b in pieces_of(array.size, self.pieces):
                skip = a * item
                self._group.allReduce(array.data.ptr + skip, result.data.ptr + skip, b - a, kind, _SUM, stream)

        return self._start("all_reduce", array, send, result)

    def all_gather(self, array: Any, sizes: Sequence[int] | None = None) -> NcclHandle:
        """Start the collection of the vectors of all ranks; see Communicator.

        NCCL's own operation needs equal lengths: each vector is broadcast by its rank, in one group of operations.
        """
        with self._gpu():
            array = self._cupy.asarray(array)
            counts = [array.size] * self.size if sizes is None else list(sizes)
            parts = [self._cupy.empty(n, array.dtype) for n in counts]
        kind = _type(array.dtype)

        def send(stream: int) -> None:
            self._nccl.groupStart()
            for root, part in enumerate(parts):
                self._copy(array if root == self.rank else part, part, kind, root, stream)
            self._nccl.groupEnd()

        return self._start("all_gather", array, send, parts)

    def broadcast(self, array: Any, root: int) -> NcclHandle:
        """Start the copy of one rank's array to all ranks; see Communicator."""
        with self._gpu():
            array = self._cupy.asarray(array)
            result = self._cupy.empty_like(array)
        kind = _type(array.dtype)
        return self._start("broadcast", array, lambda stream: self._copy(array, result, kind, root, stream), result)

    def _copy(self, source: Any, target: Any, kind: int, root: int, stream: int) -> None:
        """Copy an array of the rank `root` to the arrays of all ranks, in pieces."""
        item = target.dtype.itemsize
        for a, b in pieces_of(target.size, self.pieces):
            self._group.broadcast(source.data.ptr + a * item, target.data.ptr + a * item, b - a, kind, root, stream)

    def progress(self) -> None:
        """Do nothing: the GPU works by itself."""

    def abort(self, code: int) -> None:
        """End the operations of this process, and the process; those of the others then fail."""
        self._group.abort()
        raise SystemExit(code)

    def _start(self, name: str, array: Any, send: Callable[[int], None], result: Any) -> NcclHandle:
        self.sent += array.nbytes
        with self._gpu():
            ready = self._cupy.cuda.get_current_stream().record()
            self._stream.wait_event(ready)
            send(self._stream.ptr)
            return NcclHandle(self, name, self._stream.record(), (array, result), result)


class NcclHandle:
    """An operation of an NcclRank.

    Args:
        comm: The rank.
        name: The name of the operation.
        event: The event after it on its stream.
        keep: The arrays that NCCL reads and writes.
        result: Its result.
    """

    def __init__(self, comm: NcclRank, name: str, event: Any, keep: Any, result: Any) -> None:
        self.comm, self.name, self.event, self.keep, self.result = comm, name, event, keep, result

    def wait(self) -> Any:
        """Wait for the end of the operation; return its result.

        The host waits too: a process that waits on the GPU only would not notice that another one has died.
        """
        comm = self.comm
        start = time.monotonic()
        while not self.event.done:
            comm._group.check_async_error()
            if time.monotonic() - start > comm.timeout:
                comm._group.abort()
                raise no_progress(self.name, comm.rank, comm.timeout, ())
            time.sleep(_PAUSE)
        self.keep = None
        return self.result


def _type(dtype: np.dtype[Any]) -> int:
    if dtype.name not in _TYPES:
        raise InvalidInput(f"NCCL must be passed one of {', '.join(_TYPES)}, got {dtype.name}", code="SX386")
    return _TYPES[dtype.name]


__all__ = ("NcclRank", "unique_id")
