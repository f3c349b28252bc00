"""A group of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .communicator import CompletedOperation


class SingleProcess:
    """The communicator of a training in one process: sums are the arrays themselves.

    Args:
        timeout: Seconds; it has no effect.
    """

    on_host = False

    def __init__(self, timeout: float = 300.0) -> None:
        self.rank, self.size, self.local_rank = 0, 1, 0
        self.timeout = timeout
        self.sent = 0

    def all_reduce(self, array: Any) -> CompletedOperation:
        """Return the array as a result that is there at once.

        Args:
            array: An array.

        Returns:
            A handle that has ended, whose result is the array itself.
        """
        self.sent += array.nbytes
        return CompletedOperation(array)

    def all_gather(self, array: Any, sizes: Sequence[int] | None = None) -> CompletedOperation:
        """Return a list of the one vector as a result that is there at once.

        Args:
            array: A vector.
            sizes: The length of the vector; it has no effect.

        Returns:
            A handle that has ended, whose result is the list of the vector.
        """
        self.sent += array.nbytes
        return CompletedOperation([array])

    def broadcast(self, array: Any, root: int) -> CompletedOperation:
        """Return the array as a result that is there at once.

        Args:
            array: An array.
            root: 0, the only rank.

        Returns:
            A handle that has ended, whose result is the array itself.
        """
        self.sent += array.nbytes
        return CompletedOperation(array)

    def progress(self) -> None:
        """Do nothing."""

    def abort(self, code: int) -> None:
        """End this process.

        Args:
            code: The exit code.
        """
        raise SystemExit(code)
