"""What all runs in child processes share: how many there are, and results as they come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from typing import TypeVar

T = TypeVar("T")


def share_cores(asked: int | None, work: int) -> int:
    """As many processes as were asked for, or one per core, and no more than there is work; each computes on one core."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return max(1, min(asked or os.cpu_count() or 1, work))


def as_they_come(waiting: Sequence[Future[T]]) -> Iterator[T]:
    """The results; where whoever asks stops, what has not begun is called off."""
    try:
        for done in as_completed(waiting):
            yield done.result()
    finally:
        for future in waiting:
            future.cancel()
