"""Communication over MPI, by mpi4py, for arrays on the host.

Operations are MPI's non-blocking collectives on a communicator of this module.  Python code proceeds while they run; MPI works on
them whenever it is called: `progress` is called during the backward pass.

A process that dies is noticed by `mpiexec`, which ends the others.  Everything else that could make a process wait forever ends
with a message: an uncaught exception aborts the group; a process that exits tells the others, whose operations fail; a process
that is stuck makes the operations of the others fail after `timeout` seconds, and the message names it.  MPI combines different
operations to wrong numbers: each is compared with those of the other ranks.

All communicators of a process share those of MPI: it has about two thousand, and frees them by a collective operation only.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import CommunicationError, MissingDependency
from ._common import no_progress, other_operation, pieces_of
from .environment import launched_size
from .local_job import use_shared_memory

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

_FORWARDED = 0.3
"""Seconds in which mpiexec forwards the output of a process; it drops the rest when the process aborts."""

_GRACE = 5.0
"""The maximum seconds that a rank whose operation has failed waits at its end for the others."""


class _Job:
    """The MPI job of this process, as all its communicators share it.

    The communicators of MPI are duplicated: operations of the program itself do not disturb those of the training.  If the group
    has several processes, an uncaught exception aborts all of them, from now on.

    Args:
        timeout: Seconds to wait for the other processes.
    """

    def __init__(self, timeout: float) -> None:
        self.mpi = MPI = _mpi(timeout)
        self.process = os.getpid()
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        if self.size < launched_size():
            raise MissingDependency(
                f"the launcher has started {launched_size()} processes, but the MPI library of mpi4py sees {self.size}: "
                f"{MPI.get_vendor()[0]} is not the launcher's",
                hint="start the program with the mpiexec of that library, such as the one of pip install 'sonnx[mpi]'",
            )
        self.timeout = timeout
        self.count = 0
        self.failed = False  # an operation has failed: the others may be stuck
        self.pending: list[MpiHandle] = []
        self.left: dict[int, int] = {}  # rank -> the number of operations that it started before it left
        self._answers: dict[int, int] = {}
        if self.size > 1:
            self._hook = sys.excepthook
            sys.excepthook = self._uncaught
        self._meet(timeout)
        self.world, self.control, self.checks = (MPI.COMM_WORLD.Dup() for _ in range(3))
        machine = self.world.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        self.local_rank = machine.rank
        machine.Free()
        if self.size > 1:
            atexit.register(self._leave)

    def _meet(self, timeout: float) -> None:
        """Wait until all ranks are here: MPI waits forever for a rank that ends before it creates a communicator."""
        request = self.mpi.COMM_WORLD.Ibarrier()
        end = time.monotonic() + timeout
        while not request.Test():
            if time.monotonic() > end:
                raise no_progress("the start", self.rank, timeout, ())
            time.sleep(_PAUSE)

    def look(self) -> None:
        """Read the messages of other ranks, and answer those that ask."""
        message = np.empty(2, np.int64)
        status = self.mpi.Status()
        while self.control.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            source = status.Get_source()
            self.control.Recv(message, source, status.Get_tag())
            kind, count = message.tolist()
            if kind == _LEAVES:
                self.left[source] = count
            elif kind == _ASKS:
                self._tell([source], _WAITS)
            else:
                self._answers[source] = count

    def _tell(self, ranks: Sequence[int], kind: int) -> None:
        message = np.array([kind, self.count], np.int64)
        self.mpi.Request.Waitall([self.control.Isend(message, r) for r in ranks])  # so small that MPI buffers it

    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def late(self, number: int) -> list[int]:
        """Ask the other ranks where they are; return those that did not answer, or have not started operation `number`."""
        self._answers.clear()
        self._tell(self._others(), _ASKS)
        end = time.monotonic() + _ANSWERS
        while time.monotonic() < end and len(self._answers) < self.size - 1:
            self.look()
            time.sleep(_PAUSE)
        return [r for r in self._others() if self._answers.get(r, 0) < number]

    def abort(self, code: int) -> None:
        """End all processes of the group at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_FORWARDED)
        self.mpi.COMM_WORLD.Abort(code)

    def progress(self) -> None:
        """Let operations that have been started proceed."""
        self.pending = [handle for handle in self.pending if not handle.ended()]

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught exception, and end the group: the other ranks would wait for this one."""
        self._hook(kind, error, trace)
        if os.getpid() != self.process:  # a fork of this rank
            return
        print(f"rank {self.rank} of {self.size} ends the training: {kind.__name__}", file=sys.stderr)
        self.abort(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED)

    def _leave(self) -> None:
        """Tell the other ranks that this one exits, and wait for them: MPI ends all processes together.

        Operations that have been started end first: MPI must not read or write arrays that Python has freed.  A rank that is
        still working, such as one that saves the model, is waited for without limit, unless an operation has failed.
        """
        if self.mpi.Is_finalized() or os.getpid() != self.process:
            return
        self._tell(self._others(), _LEAVES)
        request = self.control.Ibarrier()
        start, limit, told = time.monotonic(), min(self.timeout, _GRACE), False
        while not request.Test() or not all(handle.hopeless() for handle in self.pending):
            self.look()
            with suppress(CommunicationError):
                self.progress()
            waited = time.monotonic() - start
            if self.failed and waited > limit:
                print(f"rank {self.rank} ends the training: another rank does not end", file=sys.stderr)
                self.abort(FAILED)
            if waited > self.timeout and not told:
                told = True
                print(f"rank {self.rank} has ended, and waits for the end of the other ranks", file=sys.stderr)
            time.sleep(_LOOK / 4)


_jobs: list[_Job] = []
"""The job of this process, once it has a communicator."""


class MpiRank:
    """A process of an MPI job; a Communicator.

    Args:
        timeout: Seconds that an operation waits for the other processes.
        pieces: The maximum number of elements of one MPI operation; longer arrays are sent in pieces.

    Raises:
        CommunicationError: Another process does not create a communicator within the timeout.
    """

    on_host = True

    def __init__(self, timeout: float = 300.0, pieces: int = 1 << 22) -> None:
        if not _jobs:
            _jobs.append(_Job(timeout))
        self._job = _jobs[0]
        self._world = self._job.world
        self.timeout, self.pieces = timeout, pieces
        self.rank, self.size, self.local_rank = self._job.rank, self._job.size, self._job.local_rank
        self.sent = 0

    def all_reduce(self, array: np.ndarray) -> MpiHandle:
        """Start the sum of an array over the ranks; see Communicator."""
        result = np.empty_like(array)
        kind, add = _sum_of(array.dtype)
        source, target = array.reshape(-1), result.reshape(-1)
        requests = [
            self._world.Iallreduce(_items(source[a:b], kind), _items(target[a:b], kind), add)
            for a, b in pieces_of(array.size, self.pieces)
        ]
        return self._started("all_reduce", array, array.size, requests, (array, result), lambda: result)

    def all_gather(self, array: np.ndarray, sizes: Sequence[int] | None = None) -> MpiHandle:
        """Start the collection of the vectors of all ranks; see Communicator."""
        counts = [array.size] * self.size if sizes is None else list(sizes)
        ends = [int(n) for n in np.cumsum(counts)]
        starts = [end - n for end, n in zip(ends, counts, strict=True)]
        result = np.empty(ends[-1], array.dtype)
        kind = _item(array.dtype.itemsize)
        requests = []
        for a, b in pieces_of(max(counts), self.pieces):
            lengths = [max(0, min(n, b) - a) for n in counts]
            target = [result.view(np.uint8), (lengths, [start + a for start in starts]), kind]
            requests.append(self._world.Iallgatherv(_items(array[a:b], kind), target))
        parts = [result[a:b] for a, b in zip(starts, ends, strict=True)]
        return self._started("all_gather", array, counts, requests, (array, result), lambda: parts)

    def broadcast(self, array: np.ndarray, root: int) -> MpiHandle:
        """Start the copy of one rank's array to all ranks; see Communicator."""
        result = array.copy()
        flat, kind = result.reshape(-1), _item(array.dtype.itemsize)
        requests = [self._world.Ibcast(_items(flat[i:end], kind), root) for i, end in pieces_of(array.size, self.pieces)]
        return self._started("broadcast", array, f"{array.size} from rank {root}", requests, (result,), lambda: result)

    def progress(self) -> None:
        """Let operations that have been started proceed; it does not wait."""
        self._job.progress()

    def abort(self, code: int) -> None:
        """End all processes of the group at once."""
        self._job.abort(code)

    def _started(
        self, name: str, array: np.ndarray, counts: Any, requests: list[Any], keep: Any, result: Callable[[], Any]
    ) -> MpiHandle:
        self._job.count += 1
        self.sent += array.nbytes
        what = f"{name} of {counts} {array.dtype}"
        check = _Check(self._job, what) if self.size > 1 else None
        self.progress()
        handle = MpiHandle(self, name, self._job.count, requests, keep, result, check)
        self._job.pending.append(handle)
        return handle


class _Check:
    """Whether all ranks have started the same operation: MPI sums arrays of different sizes or dtypes without an error.

    Args:
        job: The job.
        what: The operation and its arguments, in words.
    """

    def __init__(self, job: _Job, what: str) -> None:
        self.what = what
        mine = zlib.crc32(what.encode())
        self._own, self._most = np.array([mine, -mine]), np.empty(2, np.int64)
        self._request = job.checks.Iallreduce(self._own, self._most, job.mpi.MAX)

    def ended(self) -> bool:
        ended: bool = self._request.Test()
        return ended

    def equal(self) -> bool:
        """Whether all ranks have the same operation, after the end of the check."""
        return np.array_equal(self._own, self._most)


class MpiHandle:
    """An operation of an MpiRank.

    Args:
        comm: The rank.
        name: The name of the operation.
        number: Its number in the order of this process's operations.
        requests: Its requests.
        keep: The arrays that MPI reads and writes.
        result: Returns its result.
        check: Whether the other ranks have started the same operation; None for one rank.
    """

    def __init__(
        self,
        comm: MpiRank,
        name: str,
        number: int,
        requests: list[Any],
        keep: Any,
        result: Callable[[], Any],
        check: _Check | None,
    ) -> None:
        self.comm, self.name, self.number, self.requests, self.keep, self.result = comm, name, number, requests, keep, result
        self.check = check

    def ended(self) -> bool:
        """Whether the operation has ended; lets it proceed."""
        job = self.comm._job
        try:
            checked = self.check is None or self.check.ended()
            self.requests = [r for r in self.requests if not r.Test()]
        except job.mpi.Exception as error:
            job.failed = True
            raise CommunicationError(f"{self.name} of rank {job.rank} has failed: {error}", code="SX950") from error
        return checked and not self.requests

    def wait(self) -> Any:
        """Wait for the end of the operation; return its result."""
        start = looked = time.monotonic()
        while not self.ended():
            self._compare()
            now = time.monotonic()
            if now - start < _SPIN:
                continue
            if now - looked > _LOOK:
                looked = now
                self.comm._job.look()
                self._possible(now - start)
            time.sleep(_PAUSE)
        self._compare()
        self.keep = None
        return self.result()

    def hopeless(self) -> bool:
        """Whether the operation cannot end: a rank has exited that did not start it."""
        return any(count < self.number for count in self.comm._job.left.values())

    def _compare(self) -> None:
        """Raise CommunicationError if the other ranks have started another operation."""
        if self.check is not None and self.check.ended() and not self.check.equal():
            self.comm._job.failed = True
            raise other_operation(self.comm.rank, self.check.what)

    def _possible(self, seconds: float) -> None:
        """Raise CommunicationError if the operation cannot end, or waits for too long."""
        comm, job = self.comm, self.comm._job
        if self.hopeless():
            names = ", ".join(str(r) for r, count in job.left.items() if count < self.number)
            job.failed = True
            raise CommunicationError(
                f"{self.name} of rank {comm.rank} cannot end: rank {names} has exited",
                code="SX950",
                hint="see the message of that rank; continue from the last checkpoint",
            )
        if seconds > comm.timeout:
            job.failed = True
            raise no_progress(self.name, comm.rank, comm.timeout, job.late(self.number))


def _mpi(timeout: float) -> Any:
    """Import MPI, without ports if all processes are on this machine.

    It waits for the other processes without limit: a timer of C ends this process if one of them is lost.
    """
    os.environ.update(use_shared_memory())
    if "mpi4py.MPI" not in sys.modules and launched_size() > 1 and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__)
        try:
            from mpi4py import MPI
        finally:
            faulthandler.cancel_dump_traceback_later()
    from mpi4py import MPI

    return MPI


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
