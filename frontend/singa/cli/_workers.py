"""Training in several processes: `sonnx train --workers` starts itself as a job of MPI on this machine.

The processes end with the parent, also if it is killed.  They share a folder, so that a message that several of them have is
printed by the first.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from singa_backend.io.processes import Lifeline

from ._common import LOST, REFUSED, err
from ._group import FOLDER
from ._interrupts import INTERRUPTED, TERMINATED

_THREADS = ("SONNX_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_USAGE = 2
"""The exit code of click for a wrong command line."""

_GRACE = 10.0
"""Seconds after a signal in which workers without a checkpoint must end."""


def run_workers(count: int, arguments: Sequence[str], checkpoint: Path | None) -> int:
    """Run `sonnx train` in several processes, which share the cores; return the exit code.

    A worker that dies ends the others. SIGINT, SIGTERM and SIGHUP are passed on to the workers, which write the checkpoint; a
    second signal ends them at once.

    Args:
        count: The number of processes.
        arguments: The arguments of the command.
        checkpoint: The checkpoint of the training, for the message if it ends early.

    Returns:
        The exit code of the workers; LOST if one was killed, 128 and its number after a signal.
    """
    from singa_backend.collectives.local_job import LocalJob

    # -P: a folder of the user with the name of a package is not imported
    command = [sys.executable, "-P", "-m", "singa.cli", "train", *arguments]
    with (
        tempfile.TemporaryDirectory(prefix="sonnx-") as folder,
        _held_signals() as received,  # a terminal's Ctrl-C comes here only
    ):
        job = LocalJob(command, count, {**_environment(count), FOLDER: folder})
        first: list[int] = []

        def pass_on(number: int) -> None:
            if first:
                job.kill()
                return
            first.append(number)
            job.signal(signal.SIGTERM if number == _HANGUP else number)
            if checkpoint is None:
                timer = threading.Timer(_GRACE, job.kill)
                timer.daemon = True
                timer.start()

        try:
            received.to(pass_on)
            job.wait()
        finally:
            job.kill()
    code, why = _judged(job.codes)
    if first:
        why = "the workers were stopped" if why or len(job.codes) < count else ""
        code = 128 + first[0] if code or why else code
    if why:
        if checkpoint and os.path.exists(checkpoint):
            why += f"; {checkpoint} holds the last checkpoint: continue with the same command and --resume"
        elif checkpoint:
            why += f"; {checkpoint} is not written"
        err.print(why, markup=False, highlight=False, soft_wrap=True, style="yellow")
    return code


def _judged(codes: Sequence[int]) -> tuple[int, str]:
    """The exit code of a training by those of the workers that have ended by themselves, and what to print; "" if they have."""
    unknown = [c for c in codes if c not in (0, _USAGE, REFUSED, LOST, INTERRUPTED, TERMINATED)]
    if unknown:
        names = {-s: s.name for s in signal.Signals}
        return LOST, f"a worker died: {names.get(unknown[0], f'exit code {unknown[0]}')}"
    for code in (REFUSED, _USAGE):
        if code in codes:
            return code, ""
    if LOST in codes:
        return LOST, "a worker was lost"
    return max(codes, default=0), ""


def end_with_parent() -> None:
    """In a worker: end this process when the parent has ended, however that came about."""
    if handle := os.environ.pop(Lifeline.VARIABLE, ""):
        Lifeline.attach(int(handle))


_HANGUP = getattr(signal, "SIGHUP", None)


class _Received:
    """The signals for the workers; those that come before there are any are passed on then."""

    def __init__(self) -> None:
        self._early: list[int] = []
        self._pass_on: Callable[[int], None] = self._early.append

    def note(self, number: int, _: Any) -> None:
        self._pass_on(number)

    def to(self, pass_on: Callable[[int], None]) -> None:
        self._pass_on = pass_on
        for number in self._early:
            pass_on(number)


@contextmanager
def _held_signals() -> Iterator[_Received]:
    """The context in which signals are passed on; only the main thread can handle them.  Ignored ones stay so (nohup)."""
    received = _Received()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    known = [s for s in (signal.SIGINT, signal.SIGTERM, _HANGUP) if s is not None and signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, received.note) for s in known}
    try:
        yield received
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def check_launcher() -> None:
    """Raise MissingDependency if workers cannot be started."""
    from importlib.util import find_spec

    from singa_backend.errors import MissingDependency

    if find_spec("mpi4py") is None:
        raise MissingDependency("--workers needs mpi4py, which is not installed", hint="pip install 'sonnx[mpi]'")
    if sys.platform == "win32":
        raise MissingDependency("--workers needs a system with Unix sockets", hint="mpiexec -n 2 sonnx train ...")


def _environment(count: int) -> dict[str, str]:
    """The environment of the workers: each has an equal share of the cores, unless the user has set a number of threads."""
    from singa_backend.machine import usable_cores

    threads = str(max(1, usable_cores() // count))
    given: Any = os.environ
    shared = {name: threads for name in _THREADS if not any(n in given for n in _THREADS[:2])}
    return {**shared, **given, "SONNX_WORKERS": str(count)}  # so that no worker starts workers, whatever the launcher sets
