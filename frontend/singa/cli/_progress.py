"""The progress of a command on standard error, with the rate and the remaining time: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn
from rich.text import Text
from typing_extensions import override

from ._common import err

Step = Callable[..., None]
"""Counts a unit of work; `note=` is a few words shown at the end."""

INTERVAL = 30.0
"""Seconds after which a line is printed, if no tenth of the work ends earlier."""


def progress(total: int | None, what: str, *, unit: str = "", quiet: bool = False) -> AbstractContextManager[Step]:
    """Return a context whose function counts a unit of work, shown on standard error.

    The progress is a bar on a terminal, otherwise a line after each tenth of the work (after 100 units if the total is unknown)
    and after each half minute, and nothing if `quiet` (with --json).

    Args:
        total: The units of work; None if their number is not known.
        what: What is in progress.
        unit: The word for several units, shown in the rate: "12.3 cases/s".
        quiet: Show nothing.
    """
    if quiet:
        return nullcontext(lambda note="": None)
    pace = WorkRate(total, unit)
    return _Bar(what, pace) if err.is_terminal else nullcontext(Lines(what, pace))


class WorkRate:
    """Counts units of work, and describes their rate and the remaining time.

    Args:
        total: The units of work; None if their number is not known.
        unit: The word for several units.
        clock: Returns the seconds since some moment.
    """

    def __init__(self, total: int | None, unit: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.unit, self.clock, self.done = total, unit, clock, 0
        self.start = clock()

    def __str__(self) -> str:
        """Return the rate, and the remaining time or, at the end, the elapsed time; "" before the clock has moved."""
        elapsed = self.clock() - self.start
        if not self.done or elapsed <= 0:
            return ""
        rate = self.done / elapsed
        words = f"{rate:.3g}" if rate < 999.5 else f"{rate:,.0f}"
        words += f" {self.unit}/s" if self.unit else "/s"
        if self.total is None:
            return words
        left = (self.total - self.done) / rate
        return f"{words}, {seconds(left)} left" if self.done < self.total else f"{words}, {seconds(elapsed)} in all"


def seconds(count: float) -> str:
    """Return a time of at most two units: "8 s", "2 min 5 s", "3 h 10 min"; one below a second is "< 1 s"."""
    if count < 1:
        return "< 1 s"
    whole = round(count)
    if whole < 60:
        return f"{whole} s"
    size, large, small = (60, "min", "s") if whole < 3600 else (3600, "h", "min")
    count, rest = divmod(whole, size)
    rest = rest * 60 // size
    return f"{count} {large}" + (f" {rest} {small}" if rest else "")


class Lines:
    """Prints the progress as lines.

    Args:
        what: What is in progress.
        pace: Its pace.
    """

    def __init__(self, what: str, pace: WorkRate) -> None:
        self.what, self.pace, self.printed = what, pace, pace.start
        self.every = max(1, pace.total // 10) if pace.total else 100

    def __call__(self, note: str = "") -> None:
        pace = self.pace
        pace.done += 1
        now = pace.clock()
        if pace.done == pace.total or pace.done % self.every == 0 or now - self.printed >= INTERVAL:
            self.printed = now
            count = str(pace.done) if pace.total is None else f"{pace.done}/{pace.total}"
            err.print(f"{self.what}: " + ", ".join(filter(None, (count, str(pace), note))), highlight=False, soft_wrap=True)


class _Words(TextColumn):
    """Text that may have names from a model: what is in progress, or its pace."""

    @override
    def render(self, task: Task) -> Text:
        from singa_backend.rendering import printable

        return Text(printable(self.text_format.format(task=task)))


class _Bar(AbstractContextManager[Step]):
    def __init__(self, what: str, pace: WorkRate) -> None:
        columns = (_Words("{task.description}"), BarColumn(), MofNCompleteColumn(), _Words("{task.fields[pace]}"))
        self.bar = Progress(*columns, console=err, transient=True)
        self.what, self.pace = what, pace

    def __enter__(self) -> Step:
        self.bar.start()
        self.task = self.bar.add_task(self.what, total=self.pace.total, pace=self.pace)
        return self._step

    def _step(self, note: str = "") -> None:
        self.pace.done += 1
        self.bar.update(self.task, advance=1, description=f"{self.what}, {note}" if note else self.what)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
