"""The protocol of communicators, and the table of operations that have been started.

A communicator starts an operation and returns a handle at once; `wait` returns the result.  All ranks of a group start the same
operations in the same order.  An operation that does not finish within `timeout` seconds raises CommunicationError.

Graphs refer to a communicator by its number (`number_of`), and to an operation by its ticket.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import CommunicationError


class Handle(Protocol):
    """An operation that has been started."""

    def wait(self) -> Any:
        """Wait for the end of the operation.

        Returns:
            The result.

        Raises:
            CommunicationError: A process has ended, or made no progress within the timeout.
        """


class Communicator(Protocol):
    """A process of a group that trains together.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        local_rank: The number of processes with a lower rank on the same machine.
        timeout: Seconds that an operation waits for the other processes.
        on_host: Whether arrays must be NumPy's; otherwise arrays on the device of the training are not copied to the host.
        sent: Bytes that this process has passed to operations so far.
    """

    rank: int
    size: int
    local_rank: int
    timeout: float
    on_host: bool
    sent: int

    def all_reduce(self, array: Any) -> Handle:
        """Start the sum of an array over the ranks.

        Args:
            array: A contiguous array, of the same shape and dtype on every rank; it must not change until the end.

        Returns:
            A handle, whose result is a new array with the sum, equal bit for bit on every rank.
        """

    def all_gather(self, array: Any, sizes: Sequence[int] | None = None) -> Handle:
        """Start the collection of the vectors of all ranks.

        Args:
            array: A contiguous vector, of the same dtype on every rank; it must not change until the end.
            sizes: The length of each rank's vector; None if all have the same length.

        Returns:
            A handle, whose result is the list of vectors, by rank.
        """

    def broadcast(self, array: Any, root: int) -> Handle:
        """Start the copy of one rank's array to all ranks.

        Args:
            array: A contiguous array, of the same shape and dtype on every rank.
            root: The rank whose values are copied.

        Returns:
            A handle, whose result is an array with the values of `root`.
        """

    def progress(self) -> None:
        """Let operations that have been started proceed; it does not wait."""

    def abort(self, code: int) -> None:
        """End all processes of the group at once.

        Args:
            code: The exit code.
        """


_numbers = itertools.count(1)
_tickets = itertools.count(1)
_lock = threading.Lock()
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_started: dict[int, Handle] = {}


def number_of(communicator: Communicator) -> int:
    """Return the number of a communicator in this process, by which a graph refers to it."""
    with _lock:
        for number, known in _communicators.items():
            if known is communicator:
                return number
        number = next(_numbers)
        _communicators[number] = communicator
        return number


def numbered(number: int) -> Communicator:
    """Return the communicator of a number; raises CommunicationError if this process has none."""
    found = _communicators.get(number)
    if found is None:
        raise CommunicationError(
            f"communicator {number} does not exist in this process",
            code="SX951",
            hint="a recorded step runs only while the DistOpt that recorded it exists",
        )
    return found


def ticket_of(handle: Handle) -> int:
    """Store an operation that has been started; return its ticket."""
    with _lock:
        ticket = next(_tickets)
        _started[ticket] = handle
    return ticket


def wait_for(ticket: int) -> Any:
    """Wait for the operation of a ticket, and return its result; a ticket is valid once."""
    with _lock:
        handle = _started.pop(ticket, None)
    if handle is None:
        raise CommunicationError(f"operation {ticket} was not started, or has been waited for", code="SX951")
    return handle.wait()


class CompletedOperation:
    """The handle of an operation that has ended."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        """Return the result."""
        return self.result


def total(communicator: Communicator, values: np.ndarray) -> np.ndarray:
    """Return the sum of an array on the host over the ranks; waits."""
    return _to_host(communicator.all_reduce(values).wait())


def copied(communicator: Communicator, values: np.ndarray, root: int) -> np.ndarray:
    """Return the array on the host that one rank has; waits."""
    return _to_host(communicator.broadcast(values, root).wait())


def _to_host(array: Any) -> np.ndarray:
    host: np.ndarray = array if isinstance(array, np.ndarray) else array.get()
    return host
