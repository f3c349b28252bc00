"""Training in several processes: `sonnx train --workers` starts itself under mpiexec."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._common import LOST, REFUSED, err
from ._interrupts import INTERRUPTED, TERMINATED

_THREADS = ("SONNX_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KNOWN = (0, 2, REFUSED, INTERRUPTED, TERMINATED)


def run_workers(count: int, arguments: Sequence[str], checkpoint: Path | None) -> int:
    """Run `sonnx train` in several processes under mpiexec, which share the cores; return the exit code.

    A worker that dies ends the others. SIGINT and SIGTERM are passed on to the workers.

    Args:
        count: The number of processes.
        arguments: The arguments of the command.
        checkpoint: The checkpoint of the training, for the message if it ends early.

    Returns:
        The exit code of the workers, LOST if one was killed.

    Raises:
        MissingDependency: mpi4py is not installed, or there is no mpiexec (SX700).
    """
    # -P: a folder of the user with the name of a package is not imported
    command = [_mpiexec(), "-n", str(count), sys.executable, "-P", "-m", "singa.cli", "train", *arguments]
    with _held_signals() as received:  # a terminal's Ctrl-C comes here only
        workers = subprocess.Popen(command, env=_environment(count), stdin=subprocess.DEVNULL, start_new_session=True)
        received.to(workers.send_signal)
        code = workers.wait()
    if code == LOST | REFUSED:  # mpiexec combines the codes: one worker has refused, the others have lost it
        return REFUSED
    if code in _KNOWN:
        return code
    what = "a worker was lost" if code == LOST else f"a worker died: mpiexec returned {code}"
    if checkpoint and checkpoint.exists():
        what += f"; {checkpoint} holds the last checkpoint: continue with the same command and --resume"
    elif checkpoint:
        what += f"; {checkpoint} is not written"
    err.print(what, markup=False, highlight=False, soft_wrap=True, style="yellow")
    return LOST


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
    """The context in which SIGINT and SIGTERM are passed on; only the main thread can handle signals."""
    received = _Received()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {s: signal.signal(s, received.note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _mpiexec() -> str:
    """The launcher of the MPI library: that of this environment, otherwise that of the system."""
    from importlib.util import find_spec

    from singa_backend.errors import MissingDependency

    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    lacks = "mpi4py" if find_spec("mpi4py") is None else "" if found else "mpiexec"
    if found is None or lacks:
        raise MissingDependency(f"--workers needs {lacks}, which is not installed", hint="pip install 'sonnx[mpi]'")
    return found


def _environment(count: int) -> dict[str, str]:
    """The environment of the workers: each has an equal share of the cores, unless the user has set a number of threads."""
    from singa_backend.machine import usable_cores

    threads = str(max(1, usable_cores() // count))
    given: Any = os.environ
    shared = {name: threads for name in _THREADS if not any(n in given for n in _THREADS[:2])}
    return {**shared, **given, "SONNX_WORKERS": str(count)}  # so that no worker starts workers, whatever the launcher sets
