"""The time at which a call must end: what later calls need not make again is finished first, for at most a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

MAKING = 60.0
"""The seconds that making plans may take in addition to a deadline."""

SHORTEST = 1e-6
"""The shortest time limit, in seconds."""


class Deadline:
    """A clock that runs while a call computes, and stands while it makes plans, for at most `MAKING` seconds.

    Attributes:
        seconds: the time of the call.
        end: the time of `time.monotonic` at which it ends, if the clock never stands.
        runs: whether the clock runs.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.runs = True
        self._turned = self._spared = 0.0

    def remaining(self) -> float:
        """The seconds before the end; not above 0 if it has passed."""
        now = time.monotonic()
        return self.end - now + min(self._spared_until(now), MAKING)

    @contextmanager
    def clock(self, runs: bool) -> Iterator[None]:
        """A context in which the clock runs, or stands."""
        before = self._turn(runs)
        try:
            yield
        finally:
            self._turn(before)

    def count_spared(self) -> None:
        """Count the time in which the clock stood: nothing more is made."""
        if self.runs:
            self._spared = 0.0

    def _turn(self, runs: bool) -> bool:
        now, before = time.monotonic(), self.runs
        self._spared, self._turned, self.runs = self._spared_until(now), now, runs
        return before

    def _spared_until(self, now: float) -> float:
        return self._spared if self.runs else self._spared + now - self._turned
