"""Training in several processes: `sonnx train --workers` starts itself under mpiexec.

The processes share a folder, in which the parent holds a pipe open: when it closes, also because the parent was killed, every
worker ends.  The parent kills a worker that cannot, because it is stopped: each holds a lock on a file of that folder, whose name
is its process number.  A message that several workers have is printed by the first of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ._common import LOST, REFUSED, err
from ._group import FOLDER
from ._interrupts import INTERRUPTED, TERMINATED

_THREADS = ("SONNX_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KNOWN = (0, 2, REFUSED, INTERRUPTED, TERMINATED)

_PIPE = "parent"

_GRACE = 10.0
"""Seconds after a signal in which workers without a checkpoint must end."""

_DEAF = 2.0
"""Seconds after the end of the pipe in which workers must end; the launcher waits for them without a limit."""

_held: list[int] = []
"""The file that is locked while this process runs."""


def run_workers(count: int, arguments: Sequence[str], checkpoint: Path | None) -> int:
    """Run `sonnx train` in several processes under mpiexec, which share the cores; return the exit code.

    A worker that dies ends the others. SIGINT, SIGTERM and SIGHUP are passed on to the workers, which write the checkpoint; a
    second signal ends them at once.

    Args:
        count: The number of processes.
        arguments: The arguments of the command.
        checkpoint: The checkpoint of the training, for the message if it ends early.

    Returns:
        The exit code of the workers; LOST if one was killed, 128 and its number after a signal.

    Raises:
        MissingDependency: mpi4py is not installed, or there is no mpiexec (SX700).
    """
    # -P: a folder of the user with the name of a package is not imported
    command = [_mpiexec(), "-n", str(count), sys.executable, "-P", "-m", "singa.cli", "train", *arguments]
    with (
        tempfile.TemporaryDirectory(prefix="sonnx-") as folder,
        _Leash(folder) as leash,
        _held_signals() as received,  # a terminal's Ctrl-C comes here only
    ):
        environment = {**_environment(count), FOLDER: folder}
        workers = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

        def pass_on(number: int) -> None:
            if not leash.pulled(number, None if checkpoint else _GRACE):
                workers.send_signal(signal.SIGTERM if number == _HANGUP else number)

        leash.kill_launcher = workers.kill
        received.to(pass_on)
        code = workers.wait()
    if code == LOST | REFUSED:  # mpiexec combines the codes: one worker has refused, the others have lost it
        return REFUSED
    if code in ((0, INTERRUPTED, TERMINATED) if leash.first else _KNOWN):
        return 128 + leash.first if code and leash.first else code
    what = "a worker was lost" if code == LOST else f"a worker died: mpiexec returned {code}"
    if leash.first:  # mpiexec returns the number of a signal that a worker did not handle
        what = "the workers were stopped"
    if checkpoint and checkpoint.exists():
        what += f"; {checkpoint} holds the last checkpoint: continue with the same command and --resume"
    elif checkpoint:
        what += f"; {checkpoint} is not written"
    err.print(what, markup=False, highlight=False, soft_wrap=True, style="yellow")
    return 128 + leash.first if leash.first else LOST


class _Leash:
    """A pipe that this process holds open, and at whose end the workers end.

    Args:
        folder: The folder of the parent and its workers.

    Attributes:
        first: The first signal that has arrived; 0 before it.
        kill_launcher: Ends the launcher, if it waits for a worker that is not known.
    """

    def __init__(self, folder: str) -> None:
        self._end = -1
        self.first = 0
        self.kill_launcher: Callable[[], None] = lambda: None
        self._folder = folder
        self._timers: list[threading.Timer] = []
        if hasattr(os, "mkfifo"):
            os.mkfifo(Path(folder, _PIPE), 0o600)
            self._end = os.open(Path(folder, _PIPE), os.O_RDWR)  # no worker inherits it

    def __enter__(self) -> _Leash:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._close()

    def release(self) -> None:
        """End the workers; kill those that have not ended after a while."""
        if self._close():
            self._after(_DEAF, self._kill)

    def _close(self) -> bool:
        end, self._end = self._end, -1
        if end >= 0:
            os.close(end)
        return end >= 0

    def _kill(self) -> None:
        import fcntl

        for path in Path(self._folder).iterdir():
            if path.name.isdecimal():
                with suppress(OSError), path.open() as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:  # it runs: the number is still its own
                        os.kill(int(path.name), signal.SIGKILL)
        self._after(_DEAF, self.kill_launcher)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def pulled(self, number: int, grace: float | None) -> bool:
        """Note a signal; return whether it is a further one, which ends the workers at once.

        Args:
            number: The signal.
            grace: Seconds after which the first signal ends them too; None for no limit.
        """
        if self.first:
            self.release()
            return True
        self.first = number
        if grace is not None:
            self._after(grace, self.release)
        return False


def end_with_parent() -> None:
    """In a worker: end this process when the parent has ended, however that came about."""
    folder = os.environ.get(FOLDER)
    if not folder or not hasattr(os, "mkfifo"):
        return
    import fcntl

    try:
        _held.append(os.open(Path(folder, str(os.getpid())), os.O_CREAT | os.O_WRONLY, 0o600))
        fcntl.flock(_held[-1], fcntl.LOCK_EX)
        pipe = os.open(Path(folder, _PIPE), os.O_RDONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):  # open, and empty
            if not os.read(pipe, 1):
                os._exit(TERMINATED)
    except OSError:  # the parent has removed it
        os._exit(TERMINATED)
    os.set_blocking(pipe, True)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True, name="sonnx-parent").start()


def _end_with(pipe: int) -> None:
    with suppress(OSError):
        os.read(pipe, 1)
    os._exit(TERMINATED)


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
    _mpiexec()


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
