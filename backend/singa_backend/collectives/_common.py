"""What communicators share: sums and pieces of arrays, and the errors of operations that cannot end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CommunicationError


def sum_of(arrays: list[Any]) -> Any:
    """Return the sum of the arrays of all ranks, added in the order of the ranks."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        np.add(total, array, out=total)
    return total


def pieces_of(size: int, most: int) -> list[tuple[int, int]]:
    """Return the begin and the end of each piece of a vector, of at most `most` elements; one empty piece if it is empty."""
    return [(begin, min(begin + most, size)) for begin in range(0, max(size, 1), most)]


def other_operation(rank: int, what: str) -> CommunicationError:
    """Return the error of ranks that have started different operations.

    Args:
        rank: The rank.
        what: Its operation.
    """
    return CommunicationError(
        f"rank {rank} has started {what}, and another rank another operation",
        code="SX952",
        hint="all ranks must take the same number of steps, and exchange the same tensors in one order",
    )


def no_progress(name: str, rank: int, timeout: float, missing: Sequence[int]) -> CommunicationError:
    """Return the error of an operation that did not end in time.

    Args:
        name: The name of the operation.
        rank: The rank that waits.
        timeout: Seconds.
        missing: The ranks that have not started it; empty if they are not known.
    """
    who = f"; waiting for rank {', '.join(map(str, missing))}" if missing else ""
    return CommunicationError(
        f"{name} of rank {rank} made no progress in {timeout:g} s{who}",
        code="SX950",
        hint="continue from the last checkpoint; pass a longer timeout if a step can take this long",
    )
