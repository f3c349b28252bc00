"""Threads that wait for cores: how a plan notices that other programs use them, and runs on one thread until they are free.

The threads of a parallel step wait for each other without leaving their cores.  If another program has one of the cores, each
step takes a time slice of the scheduler, which is longer than most runs.  A run whose time exceeds what is usual therefore
continues on one thread, with the same memory and the same packed weights.  Runs use several threads as long as that saves time
on the whole; otherwise they use one, and now and then one of them tries several again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from .. import machine
from ..kernels import onednn
from ..kernels.frames import FrameAddress

EXCESS, SLACK = 1.5, 0.0005
"""As long as the time on one thread is not known, a run is too slow after EXCESS times the usual time and SLACK seconds."""

DOUBTS = 4
"""After this number of runs that were slower than is usual, but not than on one thread, the time on one is measured again."""

DRIFT = 1.02
"""By how much the usual time may grow from one run to the next: the clock of a processor changes."""

PATIENCE = 20
"""The number of runs on one thread after which the number of running threads is read again; that takes 10 microseconds."""

WAKE = 0.0005
"""The seconds that the first attempt may lose because threads that sleep must be woken."""

CHUNK = 50e-6
"""The seconds between two looks at the clock."""

COST, BURST, DEBT = 0.05, 0.025, 1.0
"""The part of the time of runs on one thread that attempts with several may cost; the seconds that they may cost at once; the
maximum of seconds to be saved up for the next attempt, unless one run takes longer."""

RETRY = 4
"""By what factor COST is higher after one slow run less: a disturbance that was short ends with the next attempt."""

BURST_RUNS = 50
"""The usual times that attempts may cost at once, if that is less than BURST: short runs give up after as many runs."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a step, and its arguments."""


class Contention:
    """What the runs of this process know of the cores.

    Attributes:
        lock: is held by the run that uses several threads: one at a time does.
        credit: the seconds that attempts with several threads may cost.  They grow by what several threads save, and by a part
            of the time of runs on one thread.
        present: whether threads wait for cores now, and runs use one thread: since the credit was below -WAKE, until it is 0.
        slow: the number of runs that were too slow.
        failures: the number of those since several threads have saved BURST.
        cost: the part of the time of runs on one thread that the next attempt may cost.
        doubted: whether no run has tried several threads since one was too slow.
        single_runs: the number of runs on one thread, and of those that continued on one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.credit, self.cost = BURST, COST
        self.slow = self.failures = self.single_runs = 0
        self.present = self.doubted = False

    def add(self, seconds: float, least: float = -math.inf) -> None:
        """Change the credit by what a run has saved, or lost if it is negative; not to less than `least`."""
        self.credit = max(min(self.credit + seconds, BURST), least)
        self.present = self.credit < (0.0 if self.present else -WAKE)
        if self.credit == BURST:
            self.failures, self.cost = 0, COST

    def lose(self, seconds: float, pace: Pace) -> None:
        """Change the credit by what a slow run has lost."""
        self.slow += 1
        self.failures += 1
        self.cost = max(COST, RETRY ** (1.0 - self.failures))
        self.doubted = True
        self.credit = min(self.credit, BURST_RUNS * pace.usual)
        self.add(-seconds, -max(DEBT, pace.alone))

    def expected(self, threads: int) -> bool:
        """Whether so many threads, including the caller, would wait for other programs now."""
        if machine.running() - 1 + threads > machine.cores():
            self.credit = min(self.credit, 0.0)
            return True
        return self.present

    def waits(self, pace: Pace) -> bool:
        """Whether a run uses one thread, although it may try several: more threads than cores are running already."""
        self.doubted = machine.running() > machine.cores()
        if self.doubted:
            self.present = True
            self.add(-PATIENCE * self.cost * (pace.alone or pace.usual))
        return self.doubted


contention = Contention()
"""What the runs of this process know of the cores."""


class Pace:
    """How fast the steps of a segment run.

    Args:
        threads: the number of threads of its parallel steps.
        seconds: the time of the first run, in which the steps were made.
        single: whether that run used one thread.

    Attributes:
        usual: the seconds of a run on several threads.
        alone: the seconds of the last run on one thread; 0 if there was none.
        size: the number of steps between two looks at the clock.
        sized: the seconds of the run for which that was computed.
        missing: whether the next run measures `alone`.
        doubts: the number of runs that were slower than is usual, but not than `alone`, since that was measured.
        steps: the steps of the segment on one thread; None before the first run that needs them.
    """

    __slots__ = ("alone", "doubts", "missing", "size", "sized", "steps", "threads", "usual")

    def __init__(self, threads: int, seconds: float, single: bool = False) -> None:
        self.threads = threads
        self.usual, self.alone, self.sized = seconds, 0.0, math.inf
        self.size = 1
        self.missing = single
        self.doubts = 0
        self.steps: list[Call] | None = None

    def run(self, flat: list[Call], watch: Callable[[], None] | None = None) -> None:
        """Run the steps of the segment.

        Args:
            flat: the steps on several threads.
            watch: is called before each step.
        """
        began = time.perf_counter()
        waits = contention.present or self.missing or (contention.doubted and contention.waits(self))
        if waits or not contention.lock.acquire(False):
            self._run_single(flat, 0, began, watch)
            return
        try:
            limit = began + (self.alone + CHUNK if self.alone else EXCESS * self.usual + SLACK)
            size, done = self.size, 0
            steps = iter(flat)
            while done < len(flat):
                for function, arguments in islice(steps, size):
                    if watch is not None:
                        watch()
                    function(*arguments)
                done += size
                now = time.perf_counter()
                if now > limit:
                    self._slow(flat, done, began, watch)
                    return
        finally:
            contention.lock.release()
        took = now - began
        if took > EXCESS * self.usual + SLACK:
            self.doubts += 1
            self.missing = self.doubts >= DOUBTS
        self.usual = min(took, DRIFT * self.usual)
        if self.alone:
            contention.add(self.alone - took)
        if took < 0.8 * self.sized:
            self.size, self.sized = max(1, math.ceil(len(flat) * CHUNK / took)), took

    def _slow(self, flat: list[Call], done: int, began: float, watch: Callable[[], None] | None) -> None:
        """Continue a run that was too slow on one thread."""
        self.missing = not self.alone
        began += self._run_single(flat, done, began, watch)
        lost = time.perf_counter() - began - (self.alone or self.usual)
        contention.lose(lost, self)

    def _run_single(self, flat: list[Call], done: int, began: float, watch: Callable[[], None] | None) -> float:
        """Run the steps from the one at `done` on one thread; return the seconds that it took to make them."""
        making = 0.0
        if self.steps is None:
            start = time.perf_counter()
            self.single_steps(flat)
            making = time.perf_counter() - start
        steps = self.single_steps(flat)
        contention.single_runs += 1
        onednn.set_threads(1)
        try:
            for function, arguments in islice(steps, done, None):
                if watch is not None:
                    watch()
                function(*arguments)
        finally:
            onednn.set_threads(self.threads)
        if not done:
            self.alone, self.missing, self.doubts = time.perf_counter() - began - making, False, 0
            contention.add(contention.cost * self.alone)
        return making

    def single_steps(self, flat: list[Call]) -> list[Call]:
        """The steps of the segment on one thread, made by the first call."""
        if self.steps is None:
            self.steps = [single_step(f, a) for f, a in flat]
        return self.steps


def single_step(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    """A step on one thread."""
    if onednn.sets_threads(function):
        return function, (1,)
    if arguments and isinstance(arguments[0], FrameAddress):
        return function, (arguments[0].single,)
    single = onednn.single_threaded(arguments) or arguments
    return onednn.execution(function, single), single


def _renew() -> None:
    """After a fork: another thread of the parent may have held the lock."""
    contention.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
