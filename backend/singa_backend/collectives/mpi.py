"""Communication over MPI, by mpi4py, for arrays on the host.

Operations are MPI's non-blocking collectives on a communicator of this module.  Python code proceeds while they run; MPI works on
them whenever it is called: `progress` is called during the backward pass.

A process that dies is noticed by `mpiexec`, which ends the others.  Everything else that could make a process wait forever ends
with a message: an uncaught exception aborts the group; a process that exits tells the others, whose operations fail; a process
that is stuck makes the operations of the others fail after `timeout` seconds, and the message names it.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import CommunicationError
from .local import no_progress

FAILED, INTERRUPTED = 1, 130
"""The exit codes of a group that ends by an uncaught exception, or by Ctrl-C."""

_SPIN = 0.002
"""Seconds for which a wait tests its operation without pause."""

_PAUSE = 50e-6
"""Seconds between two tests after that."""

_LOOK = 0.02
"""Seconds between two looks at the messages of other ranks."""

_LEAVES, _ASKS, _WAITS = range(3)
"""Kinds of messages: a rank exits, a rank asks where the others are, a rank answers."""

_ANSWERS = 1.0
"""Seconds in which ranks that wait answer a rank whose operation took too long."""


class MpiRank:
    """A process of an MPI job; a Communicator.

    The communicator of MPI is duplicated: operations of the program itself do not disturb those of the training.  If the group
    has several processes, an uncaught exception aborts all of them, from now on.

    Args:
        timeout: Seconds that an operation waits for the other processes.
        pieces: The most elements of one MPI operation; longer arrays are sent in pieces.
    """

    on_host = True

    def __init__(self, timeout: float = 300.0, pieces: int = 1 << 22) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.timeout, self.pieces = timeout, pieces
        self._world = MPI.COMM_WORLD.Dup()
        self._control = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._world.rank, self._world.size
        machine = self._world.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        self.local_rank = machine.rank
        machine.Free()
        self.sent = 0
        self._count = 0
        self._pending: list[MpiHandle] = []
        self._left: dict[int, int] = {}  # rank -> the number of operations that it started before it left
        self._answers: dict[int, int] = {}
        if self.size > 1:
            self._hook = sys.excepthook
            sys.excepthook = self._uncaught
            atexit.register(self._leave)

    def all_reduce(self, array: np.ndarray) -> MpiHandle:
        """Start the sum of an array over the ranks; see Communicator."""
        result = np.empty_like(array)
        kind, add = _sum_of(array.dtype)
        source, target = array.reshape(-1), result.reshape(-1)
        requests = [
            self._world.Iallreduce(_items(source[a:b], kind), _items(target[a:b], kind), add) for a, b in self._pieces(array.size)
        ]
        return self._started("all_reduce", array.nbytes, requests, (array, result), lambda: result)

    def all_gather(self, array: np.ndarray, sizes: Sequence[int] | None = None) -> MpiHandle:
        """Start the collection of the vectors of all ranks; see Communicator."""
        counts = [array.size] * self.size if sizes is None else list(sizes)
        ends = [int(n) for n in np.cumsum(counts)]
        starts = [end - n for end, n in zip(ends, counts, strict=True)]
        result = np.empty(ends[-1], array.dtype)
        kind = _item(array.dtype.itemsize)
        request = self._world.Iallgatherv(_items(array, kind), [result.view(np.uint8), (counts, starts), kind])
        parts = [result[a:b] for a, b in zip(starts, ends, strict=True)]
        return self._started("all_gather", array.nbytes, [request], (array, result), lambda: parts)

    def broadcast(self, array: np.ndarray, root: int) -> MpiHandle:
        """Start the copy of one rank's array to all ranks; see Communicator."""
        result = array.copy()
        flat, kind = result.reshape(-1), _item(array.dtype.itemsize)
        requests = [self._world.Ibcast(_items(flat[i:end], kind), root) for i, end in self._pieces(array.size)]
        return self._started("broadcast", array.nbytes, requests, (result,), lambda: result)

    def _pieces(self, size: int) -> list[tuple[int, int]]:
        return [(i, min(i + self.pieces, size)) for i in range(0, max(size, 1), self.pieces)]

    def progress(self) -> None:
        """Let operations that have been started proceed; it does not wait."""
        self._pending = [handle for handle in self._pending if not handle.ended()]

    def abort(self, code: int) -> None:
        """End all processes of the group at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(code)

    def _started(self, name: str, bytes_: int, requests: list[Any], keep: Any, result: Callable[[], Any]) -> MpiHandle:
        self._count += 1
        self.sent += bytes_
        self.progress()
        handle = MpiHandle(self, name, self._count, requests, keep, result)
        self._pending.append(handle)
        return handle

    def _look(self) -> None:
        """Read the messages of other ranks, and answer those that ask."""
        message = np.empty(2, np.int64)
        status = self.mpi.Status()
        while self._control.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            source = status.Get_source()
            self._control.Recv(message, source, status.Get_tag())
            kind, count = message.tolist()
            if kind == _LEAVES:
                self._left[source] = count
            elif kind == _ASKS:
                self._tell([source], _WAITS)
            else:
                self._answers[source] = count

    def _tell(self, ranks: Sequence[int], kind: int) -> None:
        message = np.array([kind, self._count], np.int64)
        self.mpi.Request.Waitall([self._control.Isend(message, r) for r in ranks])  # so small that MPI buffers it

    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def _late(self, number: int) -> list[int]:
        """Ask the other ranks where they are; return those that did not answer, or have not started operation `number`."""
        self._answers.clear()
        self._tell(self._others(), _ASKS)
        end = time.monotonic() + _ANSWERS
        while time.monotonic() < end and len(self._answers) < self.size - 1:
            self._look()
            time.sleep(_PAUSE)
        return [r for r in self._others() if self._answers.get(r, 0) < number]

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught exception, and end the group: the other ranks would wait for this one."""
        self._hook(kind, error, trace)
        print(f"rank {self.rank} of {self.size} ends the training: {kind.__name__}", file=sys.stderr)
        self.abort(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED)

    def _leave(self) -> None:
        """Tell the other ranks that this one exits, and wait for them: MPI ends all processes together."""
        if self.mpi.Is_finalized():
            return
        self._tell(self._others(), _LEAVES)
        request = self._control.Ibarrier()
        last = time.monotonic()
        while not request.Test():
            self._look()
            if time.monotonic() - last > self.timeout:
                print(no_progress("the end of the program", self.rank, self.timeout, ()), file=sys.stderr)
                self.abort(FAILED)
            time.sleep(_LOOK / 4)


class MpiHandle:
    """An operation of an MpiRank.

    Args:
        comm: The rank.
        name: The name of the operation.
        number: Its number in the order of this rank's operations.
        requests: Its requests.
        keep: The arrays that MPI reads and writes.
        result: Returns its result.
    """

    def __init__(self, comm: MpiRank, name: str, number: int, requests: list[Any], keep: Any, result: Callable[[], Any]) -> None:
        self.comm, self.name, self.number, self.requests, self.keep, self.result = comm, name, number, requests, keep, result

    def ended(self) -> bool:
        """Whether the operation has ended; lets it proceed."""
        try:
            self.requests = [r for r in self.requests if not r.Test()]
        except self.comm.mpi.Exception as error:
            raise CommunicationError(f"{self.name} of rank {self.comm.rank} has failed: {error}", code="SX950") from error
        return not self.requests

    def wait(self) -> Any:
        """Wait for the end of the operation; return its result."""
        comm = self.comm
        start = looked = time.monotonic()
        while not self.ended():
            now = time.monotonic()
            if now - start < _SPIN:
                continue
            if now - looked > _LOOK:
                looked = now
                comm._look()
                self._check(now - start)
            time.sleep(_PAUSE)
        self.keep = None
        return self.result()

    def _check(self, seconds: float) -> None:
        """Raise CommunicationError if the operation cannot end, or waits for too long."""
        comm = self.comm
        gone = [r for r, count in comm._left.items() if count < self.number]
        if gone:
            names = ", ".join(map(str, gone))
            raise CommunicationError(
                f"{self.name} of rank {comm.rank} cannot end: rank {names} has exited",
                code="SX950",
                hint="see the message of that rank; continue from the last checkpoint",
            )
        if seconds > comm.timeout:
            raise no_progress(self.name, comm.rank, comm.timeout, comm._late(self.number))


def _items(array: np.ndarray, kind: Any) -> Any:
    """A contiguous vector as MPI takes it; without a type of MPI, mpi4py finds it by the dtype."""
    return array if kind is None else [array.view(np.uint8), array.size, kind]


@cache
def _item(size: int) -> Any:
    """MPI's type of an item of `size` bytes, which it only moves."""
    from mpi4py import MPI

    return MPI.BYTE.Create_contiguous(size).Commit()


@cache
def _sum_of(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """MPI's type and sum of a dtype, None for the type of an array; for those that MPI does not have, the sum is NumPy's."""
    from mpi4py import MPI

    if dtype.kind in "iufc" and dtype != np.float16 and dtype.type.__module__ == "numpy":
        return None, MPI.SUM

    def add(source: Any, target: Any, _: Any) -> None:
        total = np.frombuffer(target, dtype)
        np.add(np.frombuffer(source, dtype), total, out=total)

    return _item(dtype.itemsize), MPI.Op.Create(add, commute=True)
