"""A group of threads in one process, for tests and programs that simulate several ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CommunicationError
from ._common import no_progress, other_operation, sum_of


class LocalGroup:
    """A group whose ranks are threads of this process.

    Args:
        size: The number of ranks.
        timeout: Seconds that an operation waits for the other ranks.

    Attributes:
        ranks: The communicator of each rank.

    Example:
        >>> group = LocalGroup(2)
        >>> sums = group.run(lambda comm: comm.all_reduce(np.ones(3)).wait())
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        self.size = size
        self.arrived = threading.Condition()
        self.given: dict[int, dict[int, tuple[str, Any]]] = {}  # number -> rank -> the operation and its array
        self.taken: dict[int, int] = {}  # number -> the ranks that have the result
        self.failed = ""
        self.ranks = [LocalRank(self, rank, timeout) for rank in range(size)]

    def run(self, work: Callable[[LocalRank], Any]) -> list[Any]:
        """Run a function once in a thread for each rank.

        Args:
            work: Called with the communicator of the rank.

        Returns:
            The results by rank.

        Raises:
            BaseException: What the first failing rank raised; the other ranks stop waiting.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(comm: LocalRank) -> None:
            try:
                results[comm.rank] = work(comm)
            except BaseException as error:
                errors.append(error)
                self.fail(f"rank {comm.rank} has failed: {type(error).__name__}")

        threads = [threading.Thread(target=one, args=(comm,), daemon=True) for comm in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def fail(self, why: str) -> None:
        """End every wait of this group with an error.

        Args:
            why: The message of the error.
        """
        with self.arrived:
            self.failed = self.failed or why
            self.arrived.notify_all()


class LocalRank:
    """One rank of a LocalGroup; a Communicator.

    Args:
        group: The group.
        rank: The number of the rank.
        timeout: Seconds that an operation waits for the other ranks.
    """

    on_host = True

    def __init__(self, group: LocalGroup, rank: int, timeout: float) -> None:
        self.group, self.rank, self.size, self.local_rank = group, rank, group.size, rank
        self.timeout = timeout
        self.sent = 0
        self._count = 0

    def all_reduce(self, array: Any) -> LocalHandle:
        """Start the sum of an array over the ranks; see Communicator."""
        return self._start("all_reduce", array, sum_of)

    def all_gather(self, array: Any, sizes: Sequence[int] | None = None) -> LocalHandle:
        """Start the collection of the vectors of all ranks; see Communicator."""
        return self._start("all_gather", array, lambda arrays: [a.copy() for a in arrays])

    def broadcast(self, array: Any, root: int) -> LocalHandle:
        """Start the copy of one rank's array to all ranks; see Communicator."""
        return self._start("broadcast", array, lambda arrays: arrays[root].copy())

    def progress(self) -> None:
        """Do nothing: threads proceed by themselves."""

    def abort(self, code: int) -> None:
        """End every wait of the group with an error."""
        self.group.fail(f"rank {self.rank} has aborted with code {code}")

    def _start(self, name: str, array: Any, combine: Callable[[list[Any]], Any]) -> LocalHandle:
        self._count += 1
        self.sent += array.nbytes
        group = self.group
        with group.arrived:
            what = name if name == "all_gather" else f"{name} of {tuple(array.shape)}"
            group.given.setdefault(self._count, {})[self.rank] = (f"{what} {array.dtype}", array.copy())
            group.arrived.notify_all()
        return LocalHandle(self, name, self._count, combine)


class LocalHandle:
    """An operation of a LocalRank.

    Args:
        comm: The rank.
        name: The name of the operation.
        number: Its number in the order of this rank's operations.
        combine: Computes the result from the arrays of all ranks.
    """

    def __init__(self, comm: LocalRank, name: str, number: int, combine: Callable[[list[Any]], Any]) -> None:
        self.comm, self.name, self.number, self.combine = comm, name, number, combine

    def wait(self) -> Any:
        """Wait until every rank has started the operation; return its result."""
        comm, group = self.comm, self.comm.group
        deadline = time.monotonic() + comm.timeout
        with group.arrived:
            while len(group.given[self.number]) < group.size:
                if group.failed:
                    raise CommunicationError(f"{self.name} of rank {comm.rank} cannot end: {group.failed}", code="SX950")
                if not group.arrived.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    missing = sorted(set(range(group.size)) - set(group.given[self.number]))
                    raise no_progress(self.name, comm.rank, comm.timeout, missing)
            given = [group.given[self.number][rank] for rank in range(group.size)]
            group.taken[self.number] = group.taken.get(self.number, 0) + 1
            if group.taken[self.number] == group.size:
                del group.given[self.number], group.taken[self.number]
        if len({what for what, _ in given}) > 1:
            raise other_operation(comm.rank, given[comm.rank][0])
        return self.combine([array for _, array in given])
