"""Communication between the processes of one machine over Unix sockets, for arrays on the host; no launcher is needed.

Rank 0 listens at the path that is the id of the group, and the others connect to it.  Each rank sends its arrays to rank 0, which
combines them in the order of the ranks, as `local` does, and sends the result to all.  Two threads for each connection send and
receive, so that operations proceed while Python computes, and a process that is stuck blocks no other.

A process that ends closes its connection: operations that it did not start fail at once.  An operation that takes longer than
the timeout asks rank 0 which ranks have not started it.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import CommunicationError, InvalidInput, MissingDependency, SonnxError
from ..io.documents import Document, parse_document
from ._common import no_progress, other_operation, sum_of

_PAUSE = 0.01
"""Seconds between two attempts to connect to rank 0."""

_ANSWERS = 1.0
"""Seconds in which rank 0 answers a rank whose operation took too long."""

_GRACE = 5.0
"""Maximum seconds for which a process that ends sends its queued messages."""

_HELLO = 5.0
"""Seconds in which a process that connects to rank 0 must name its rank."""

_LONGEST = 1 << 16
"""The maximum bytes of a header."""

_LENGTH = struct.Struct("!I")
"""The length of a header, which is sent before it."""

_BUFFER = 1 << 20
"""Size of the send buffer of a connection in bytes."""

Header = dict[str, Any]


def new_id() -> str:
    """Create the id of a new group, which is passed to all its processes: a path that no other group has.

    Returns:
        The path of the socket; nothing is created there.

    Raises:
        MissingDependency: The system has no Unix sockets (SX700).
    """
    if not hasattr(socket, "AF_UNIX"):
        raise MissingDependency("processes without a launcher need Unix sockets", hint="use MPI: mpiexec -n 2 python train.py")
    return str(Path(tempfile.gettempdir(), f"sonnx-{secrets.token_hex(16)}.socket"))


class SocketRank:
    """A process of a group on one machine; a Communicator.  Creating it waits for the other processes.

    Args:
        id: The id of the group, by `new_id`, equal in all processes.
        rank: The number of this process.
        size: The number of processes.
        timeout: Seconds that the start and an operation wait for the other processes.

    Raises:
        InvalidInput: Another process has the same rank (SX386), or the path of the id cannot be used (SX386).
        CommunicationError: A process does not come within the timeout (SX950), or has another number of processes (SX952).
    """

    on_host = True

    def __init__(self, id: str, rank: int, size: int, timeout: float = 300.0) -> None:
        self.rank, self.size, self.local_rank = rank, size, rank
        self.timeout = timeout
        self.sent = 0
        self.changed = threading.Condition()
        self.count = 0
        self.failed = False  # an operation has failed: the others may be stuck
        self._open: dict[int, SocketHandle] = {}
        self._gone = False  # rank 0 has ended
        self._late: dict[int, list[int]] = {}  # number -> the ranks that have not started that operation
        self._left: dict[int, int] = {}  # rank -> the number of operations that it started before it ended
        self._hub: _Hub | None = None
        if rank == 0:
            hub = self._hub = _Hub(size, self._arrived)
            hub.links = {r: _Link(c, *hub.callbacks(r)) for r, c in _gathered(id, size, timeout).items()}
            for link in hub.links.values():
                link.begin()
        else:
            self._link = _Link(_joined(id, rank, size, timeout), self._arrived, self._lost)
            self._link.begin()
        Finalize(None, self._leave, exitpriority=10)  # unlike atexit, it also runs in processes of multiprocessing

    def all_reduce(self, array: np.ndarray) -> SocketHandle:
        """Start the sum of an array over the ranks; see Communicator."""
        return self._start("all_reduce", array, f"all_reduce of {array.shape} {array.dtype}", lambda parts: parts[0], array.shape)

    def all_gather(self, array: np.ndarray, sizes: Sequence[int] | None = None) -> SocketHandle:
        """Start the collection of the vectors of all ranks; see Communicator."""
        what = f"all_gather of {array.dtype}" + (f" {array.shape}" if sizes is None else f" {list(sizes)}")
        return self._start("all_gather", array, what, list, (-1,))

    def broadcast(self, array: np.ndarray, root: int) -> SocketHandle:
        """Start the copy of one rank's array to all ranks; see Communicator."""
        what = f"broadcast of {array.shape} {array.dtype} from rank {root}"
        return self._start("broadcast", array, what, lambda parts: parts[0], array.shape, root)

    def progress(self) -> None:
        """Do nothing: threads send and receive."""

    def abort(self, code: int) -> NoReturn:
        """End all processes of the group at once.

        Args:
            code: The exit code.
        """
        if self._hub is not None:
            self._hub.abort(code)
        self._link.send({"kind": "abort", "code": code})
        self._link.flush(_GRACE)
        _end(code)

    def _start(
        self, name: str, array: np.ndarray, what: str, result: Callable[[Any], Any], shape: tuple[int, ...], root: int = -1
    ) -> SocketHandle:
        self.sent += array.nbytes
        with self.changed:
            self.count += 1
            handle = self._open[self.count] = SocketHandle(self, name, self.count, what, array.dtype, shape, result)
            if self._gone:
                self._abandon(handle)
        header = {"kind": "operation", "number": handle.number, "name": name, "what": what, "root": root}
        parts = [array.reshape(-1)] if root in (-1, self.rank) else []
        if self._hub is not None:
            if name != "all_reduce":  # sent to the others, perhaps after this rank has its result
                parts = [part.copy() for part in parts]
            self._hub.arrived(0, header, parts, array)
        else:
            self._link.send(header, parts)
        return handle

    def _arrived(self, header: Header, parts: Sequence[Any]) -> None:
        """Take a message of rank 0: a result, a failure, an answer, or the end."""
        if header["kind"] == "abort":
            _end(header["code"])
        with self.changed:
            handle = self._open.get(header.get("number", 0))
            if header["kind"] == "left":
                self._left[header["rank"]] = header["count"]
            elif header["kind"] == "late":
                self._late[header["number"]] = header["ranks"]
                if header["final"] and handle is not None:
                    self._abandon(handle)
            elif handle is not None:
                self._finish(handle, parts, header.get("exited", ()), header.get("different", False))
            self.changed.notify_all()

    def _lost(self) -> None:
        """End all open operations: rank 0 has ended."""
        with self.changed:
            self._gone = True
            for handle in list(self._open.values()):
                self._abandon(handle)
            self.changed.notify_all()

    def _abandon(self, handle: SocketHandle) -> None:
        """End an operation that rank 0 does not wait for any more: because of other ranks, if they are known."""
        handle.late = self._late.get(handle.number, ())
        self._finish(handle, exited=[r for r, count in self._left.items() if count < handle.number] or [0])

    def _finish(
        self, handle: SocketHandle, parts: Sequence[Any] = (), exited: Sequence[int] = (), different: bool = False
    ) -> None:
        handle.done, handle.parts, handle.exited, handle.different = True, parts, exited, different
        self.failed = self.failed or bool(exited) or different
        del self._open[handle.number]

    def late(self, handle: SocketHandle) -> Sequence[int]:
        """Return the ranks that have not started an operation; rank 0 if it does not answer."""
        self.failed = True
        if self._hub is not None:
            return self._hub.give_up(handle.number)
        self._link.send({"kind": "ask", "number": handle.number})
        with self.changed:
            self.changed.wait_for(lambda: handle.number in self._late or handle.done, _ANSWERS)
            return self._late.pop(handle.number, [0])

    def _leave(self) -> None:
        """Send what is left: operations that have been started end first, unless one has failed."""
        with self.changed:
            self.changed.wait_for(lambda: not self._open or self.failed, self.timeout)
        for link in self._hub.links.values() if self._hub is not None else (self._link,):
            link.flush(_GRACE)


class SocketHandle:
    """An operation of a SocketRank.

    Args:
        comm: The rank.
        name: The name of the operation.
        number: Its number in the order of this rank's operations.
        what: The operation and its arguments, in words.
        dtype: The dtype of the arrays.
        shape: The shape of each array of the result.
        result: Computes the result from these arrays.
    """

    def __init__(
        self,
        comm: SocketRank,
        name: str,
        number: int,
        what: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        result: Callable[[Any], Any],
    ) -> None:
        self.comm, self.name, self.number, self.what = comm, name, number, what
        self.dtype, self.shape, self.result = dtype, shape, result
        self.done, self.different = False, False
        self.exited: Sequence[int] = ()
        self.late: Sequence[int] = ()  # rank 0 waits for them no longer
        self.parts: Sequence[Any] = ()

    def wait(self) -> Any:
        """Wait for the end of the operation; return its result."""
        comm = self.comm
        with comm.changed:
            comm.changed.wait_for(lambda: self.done, comm.timeout)
        if self.late or not self.done:
            raise no_progress(self.name, comm.rank, comm.timeout, self.late or comm.late(self))
        if self.different:
            raise other_operation(comm.rank, self.what)
        if self.exited:
            raise CommunicationError(
                f"{self.name} of rank {comm.rank} cannot end: rank {', '.join(map(str, self.exited))} has exited",
                code="SX950",
                hint="see the message of that rank; continue from the last checkpoint",
            )
        parts, self.parts = self.parts, ()
        arrays = [np.frombuffer(part, self.dtype).reshape(self.shape) for part in parts]
        return self.result(arrays if comm.rank else [a.copy() for a in arrays])  # rank 0 may still send them to others


class _Hub:
    """The operations of all ranks, combined in the process of rank 0.

    Args:
        size: The number of ranks.
        own: Receives the messages for rank 0.
    """

    def __init__(self, size: int, own: Callable[[Header, Sequence[Any]], None]) -> None:
        self.size, self.own = size, own
        self.links: dict[int, _Link] = {}
        self._lock = threading.Lock()
        self._given: dict[int, dict[int, tuple[Header, Sequence[Any]]]] = {}  # number -> rank -> its message
        self._like: dict[int, np.ndarray] = {}  # number -> the array of rank 0
        self._counts = [0] * size  # the operations that each rank has started
        self._left: set[int] = set()

    def callbacks(self, rank: int) -> tuple[Callable[[Header, Sequence[Any]], None], Callable[[], None]]:
        """What the connection of a rank calls with a message, and at its end."""
        return lambda header, parts: self.arrived(rank, header, parts), lambda: self.lost(rank)

    def send(self, rank: int, header: Header, parts: Sequence[Any] = ()) -> None:
        """Send a message to a rank."""
        if rank:
            self.links[rank].send(header, parts)
        else:
            self.own(header, parts)

    def arrived(self, rank: int, header: Header, parts: Sequence[Any], like: np.ndarray | None = None) -> None:
        """Take a message of a rank."""
        if header["kind"] == "abort":
            self.abort(header["code"])
        number = header["number"]
        if header["kind"] == "ask":
            self.send(rank, {"kind": "late", "number": number, "ranks": self.late(number), "final": False})
            return
        with self._lock:
            self._counts[rank] = number
            given = self._given.setdefault(number, {})
            given[rank] = (header, parts)
            if like is not None:
                self._like[number] = like
            complete, exited = len(given) == self.size, sorted(self._left - given.keys())
            if complete:
                del self._given[number]
                like = self._like.pop(number)
        if complete and like is not None:
            self._combine(number, given, like)
        elif exited:
            self.send(rank, {"kind": "result", "number": number, "exited": exited})

    def _combine(self, number: int, given: dict[int, tuple[Header, Sequence[Any]]], like: np.ndarray) -> None:
        """Send the result of an operation to all ranks."""
        reply: Header = {"kind": "result", "number": number}
        first = given[0][0]
        result: list[Any] = []
        if len({header["what"] for header, _ in given.values()}) > 1:
            reply["different"] = True
        elif first["name"] == "all_reduce":
            result = [sum_of([np.frombuffer(_bytes(given[r][1][0]), like.dtype) for r in range(self.size)])]
        elif first["name"] == "broadcast":
            result = list(given[first["root"]][1])
        else:
            result = [given[r][1][0] for r in range(self.size)]
        for rank in reversed(range(self.size)):  # rank 0 last: it may end then
            self.send(rank, reply, [_bytes(part) for part in result])

    def lost(self, rank: int) -> None:
        """Note the end of a rank, and tell the others: what it did not start fails, also if rank 0 ends before it is started."""
        with self._lock:
            self._left.add(rank)
            count = self._counts[rank]
            waiting = [(n, r) for n, given in self._given.items() if rank not in given for r in given]
        self._tell({"kind": "left", "rank": rank, "count": count})
        for number, other in waiting:
            self.send(other, {"kind": "result", "number": number, "exited": [rank]})

    def _tell(self, header: Header) -> None:
        """Send a message to all other ranks."""
        for rank in self.links:
            self.send(rank, header)

    def late(self, number: int) -> list[int]:
        """The ranks that have not started an operation."""
        return [r for r, count in enumerate(self._counts) if count < number]

    def give_up(self, number: int) -> list[int]:
        """Tell all ranks which ones have not started an operation: rank 0 waits no longer, and may end."""
        found = self.late(number)
        self._tell({"kind": "late", "number": number, "ranks": found, "final": True})
        return found

    def abort(self, code: int) -> NoReturn:
        """End all processes of the group."""
        for link in self.links.values():
            link.send({"kind": "abort", "code": code})
        for link in self.links.values():
            link.flush(_ANSWERS)
        _end(code)


class _Link:
    """The connection to another process: messages are queued and sent by a thread, and received by another.

    Args:
        connection: The connection.
        arrived: Called with each message: a header, and arrays as bytes.
        lost: Called at the end of the connection.
    """

    def __init__(
        self, connection: socket.socket, arrived: Callable[[Header, Sequence[Any]], None], lost: Callable[[], None]
    ) -> None:
        self.connection, self._arrived, self._lost = connection, arrived, lost
        self._queue: queue.SimpleQueue[tuple[Header, Sequence[Any]] | threading.Event] = queue.SimpleQueue()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        _links.add(self)

    def begin(self) -> None:
        """Start the threads."""
        for work in (self._send, self._receive):
            threading.Thread(target=work, daemon=True, name="sonnx-exchange").start()

    def send(self, header: Header, parts: Sequence[Any] = ()) -> None:
        """Queue a message; its arrays must not change until it is sent."""
        self._queue.put((header, parts))

    def flush(self, limit: float) -> None:
        """Wait until all messages so far are sent, at most `limit` seconds."""
        sent = threading.Event()
        self._queue.put(sent)
        sent.wait(limit)

    def _send(self) -> None:
        open_ = True
        while True:
            message = self._queue.get()
            if isinstance(message, threading.Event):
                message.set()
            elif open_:
                try:
                    _write(self.connection, *message)
                except OSError:  # the other process has ended, which `_receive` reports
                    open_ = False

    def _receive(self) -> None:
        try:
            while True:
                self._arrived(*_read(self.connection))
        except (EOFError, OSError, ValueError, MemoryError, SonnxError):  # it has ended, or writes something else
            pass
        finally:
            self._lost()


_links: weakref.WeakSet[_Link] = weakref.WeakSet()


def _forget() -> None:
    """After a fork, close the copies of the connections: the other ranks must see the end of this one while the fork runs."""
    for link in list(_links):
        link.connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _write(connection: socket.socket, header: Header, parts: Sequence[Any] = ()) -> None:
    """Send a message: the length of the header, the header as JSON with the sizes of the vectors, and their bytes."""
    vectors = [_bytes(part) for part in parts]
    text = json.dumps(header | {"sizes": [len(v) for v in vectors]}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for vector in vectors:
        connection.sendall(vector)


def _read(connection: socket.socket) -> tuple[Header, list[bytearray]]:
    header = _header(connection)
    return header.mapping(), [_exactly(connection, size.integer(0, 1 << 62)) for size in header["sizes"].parts()]


def _header(connection: socket.socket) -> Document:
    """The beginning of a message; raises ValueError or SonnxError if a stranger has written it."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _LONGEST:
        raise ValueError(f"the length of a header must be at most {_LONGEST}, got {length}")
    header = parse_document(_exactly(connection, length), "a message of a worker", "SX950")
    header["kind"].text()
    return header


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """The next bytes; raises EOFError at the end of the connection."""
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return found


def _bytes(part: Any) -> Any:
    """The bytes of a vector; arrays of ml_dtypes do not have the buffer protocol."""
    return part.view(np.uint8) if isinstance(part, np.ndarray) else part


def _end(code: int) -> NoReturn:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- the start --------------------------------------------------------------------------------------------------------


def _gathered(id: str, size: int, timeout: float) -> dict[int, socket.socket]:
    """The connections of all other ranks, in the process of rank 0."""
    end = time.monotonic() + timeout
    found: dict[int, socket.socket] = {}
    if size == 1:
        return found
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(id)
        except OSError as error:
            text = f"rank 0 cannot listen at {id}: {error.strerror or error}"
            raise InvalidInput(text, code="SX386", hint="each process must have another local_rank") from None
        try:
            os.chmod(id, 0o600)  # before it listens: nobody else can connect
            listener.listen(size)
            while len(found) < size - 1:
                missing = [r for r in range(1, size) if r not in found]
                listener.settimeout(max(1e-6, end - time.monotonic()))
                try:
                    joined = listener.accept()[0]
                except TimeoutError:
                    raise no_progress("the start", 0, timeout, missing) from None
                _welcome(joined, found, size, end)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(id)
    for connection in found.values():
        with suppress(OSError):  # it has ended since, which its link will report
            _write(connection, {"kind": "start"})
    return found


def _welcome(joined: socket.socket, found: dict[int, socket.socket], size: int, end: float) -> None:
    """Take a process into the group; one whose arguments do not fit is told so, and one that is not of a group is ignored."""
    try:
        hello = _read_until(joined, min(end, time.monotonic() + _HELLO))
        if hello.get("kind") != "join" or not all(type(hello.get(n)) is int for n in ("rank", "size")):
            return
        refusal = ""
        if hello["size"] != size:
            refusal = (
                f"world_size must be equal in all processes, got {hello['size']} in rank {hello['rank']} and {size} in rank 0"
            )
        elif hello["rank"] in found:
            refusal = f"local_rank must differ in all processes, got {hello['rank']} twice"
        if not refusal:
            found[hello["rank"]] = joined
            return
        for connection in (joined, *found.values()):
            with suppress(OSError):
                _write(connection, {"kind": "refused", "why": refusal})
        raise CommunicationError(refusal, code="SX952")
    except (EOFError, OSError, ValueError, InvalidInput):  # it has ended, or writes something else
        return
    finally:
        if joined not in found.values():
            joined.close()


def _joined(id: str, rank: int, size: int, timeout: float) -> socket.socket:
    """The connection to rank 0, when all ranks have come."""
    end = time.monotonic() + timeout
    while True:
        connecting = socket.socket(socket.AF_UNIX)
        try:
            connecting.connect(id)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            connecting.close()
        except OSError as error:
            connecting.close()
            raise InvalidInput(f"rank {rank} cannot connect to {id}: {error.strerror or error}", code="SX386") from None
        if time.monotonic() > end:
            raise no_progress("the start", rank, timeout, [0])
        time.sleep(_PAUSE)
    try:
        _write(connecting, {"kind": "join", "rank": rank, "size": size})
        answer = _read_until(connecting, end + _ANSWERS)
        if answer["kind"] == "refused":
            raise CommunicationError(str(answer.get("why")), code="SX952")
        if answer["kind"] != "start":
            raise ValueError(f"the answer must be to start, got {answer['kind']!r:.80}")
    except BaseException as error:
        connecting.close()
        if isinstance(error, TimeoutError):
            raise no_progress("the start", rank, timeout, ()) from None
        if isinstance(error, (EOFError, OSError)):
            text = f"the start of rank {rank} cannot end: rank 0 has exited"
            raise CommunicationError(text, code="SX950", hint="see the message of that rank") from None
        if isinstance(error, (ValueError, InvalidInput, MemoryError)):
            text = f"the start of rank {rank} cannot end: what listens at {id} is not rank 0 of a group: {error}"
            raise CommunicationError(text, code="SX950", hint="each group needs an id of its own, by new_id()") from None
        raise
    return connecting


def _read_until(connection: socket.socket, end: float) -> Header:
    """The next message, without arrays; raises TimeoutError at the time `end`."""
    connection.settimeout(max(1e-6, end - time.monotonic()))
    header = _header(connection)
    connection.settimeout(None)
    return header.mapping()


__all__ = ("SocketRank", "new_id")
