"""Child processes that may die or hang: each answers requests one at a time, and is restarted after a failure.

A child runs this file.  It imports a module and a function by name, never the user's script, so that a script needs no
`if __name__ == "__main__":`.  It ends when its parent ends, on Linux also if it is stuck or stopped (`Lifeline`).  A fork of the
parent has no share in its children: it starts others.

    def power(exponent):                      # at the top of an importable module
        return lambda base: base**exponent

    with Child(power, 2) as child:
        child.ask(3, timeout=10)              # 9; raises ChildFailure

    for position, answer in ask_all([3, 4], power, 2):
        ...                                   # `answer` is a result or a ChildFailure
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # Windows does not have it

T = TypeVar("T")
R = TypeVar("R")

START = 120.0
"""Seconds that a child may take to start; the time limit of a request begins when the child is ready."""

ENDED = 143
"""The exit code of a child whose parent has ended before it could begin."""

_POLL_INTERVAL = 0.5
"""Seconds between two checks that a silent child is alive: a process that it forked may hold its pipe open."""


class ChildFailure(Exception):
    """A child returned no answer.

    Attributes:
        how: "died" or "timeout".
        exit_code: the exit code of a child that died, negative for a signal; None otherwise.
        started: whether the child was ready before; False if it failed in `make` or in an import.
    """

    def __init__(self, how: str, message: str, exit_code: int | None = None, started: bool = True) -> None:
        super().__init__(message)
        self.how, self.exit_code, self.started = how, exit_code, started


class Lifeline:
    """A pipe that this process holds open, and at whose end the child that has the other end is killed.

    Attributes:
        theirs: the end for the child, which calls `Lifeline.attach`.
    """

    VARIABLE = "SONNX_LIFELINE"
    """The environment variable with the end of a child that is not a Child."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe()
        _lifelines.add(self)

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """A context that starts the child, and closes its end in this process."""
        try:
            yield
        finally:
            os.close(self.theirs)

    def close(self) -> None:
        """Close the pipe: the child is killed if it has not ended."""
        ours, self._ours = self._ours, -1
        if ours >= 0:
            os.close(ours)

    def __del__(self) -> None:
        self.close()

    @staticmethod
    def attach(handle: int) -> None:
        """In the child: end this process when the pipe is closed.

        Linux kills it, whatever it does; elsewhere a thread ends it, which needs the interpreter's lock.
        """
        os.set_inheritable(handle, False)
        with contextlib.suppress(OSError, AttributeError):  # not Linux
            fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(handle, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_ASYNC)
        threading.Thread(target=_end_with, args=(handle,), daemon=True, name="sonnx-parent").start()


def _end_with(handle: int) -> None:
    with contextlib.suppress(OSError):
        os.read(handle, 1)
    os._exit(ENDED)


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Child:
    """A child process that calls `make(*arguments)` once, and then the returned function once for each request.

    Args:
        make: a function at the top of a module that the child can import.  An exception in it or in the function that it returns
            ends the child, with the traceback on standard error.
        *arguments: the arguments of `make`.
        memory: the maximum size of the child's address space in bytes; None for no maximum.
        alone: whether the child loads the file of that module without its package, which takes less time; the module must not
            import anything of its package.
    """

    def __init__(
        self, make: Callable[..., Callable[[Any], Any]], *arguments: Any, memory: int | None = None, alone: bool = False
    ) -> None:
        if make.__module__ == "__main__" or "." in make.__qualname__:
            name = f"{make.__module__}.{make.__qualname__}"
            raise ValueError(f"the function of a Child must be at the top of a module that a child can import, got {name}")
        file = os.path.abspath(make.__code__.co_filename) if alone else ""
        self._setup = (memory, make.__module__, make.__qualname__, arguments, file, [] if alone else preloaded)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lifeline: Lifeline | None = None
        self._kill: Callable[[], object] | None = None
        self._ready = False
        self._waiting: list[Any] = []  # the request for a child that is not ready: it could not read a large one yet
        self._timeout = self._deadline = math.inf
        _children.add(self)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id; None before the first request and after a failure."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Kill the process; the next request starts another one."""
        if self._pipe is not None:
            self._pipe.close()
        if self._kill is not None:
            self._kill()
        if self._lifeline is not None:
            self._lifeline.close()
        self._process, self._pipe, self._lifeline, self._kill, self._ready = None, None, None, None, False

    def ask(self, request: Any, timeout: float | None = None) -> Any:
        """The answer to a request; raises ChildFailure if the child dies or does not answer in `timeout` seconds."""
        try:
            self.send(request, timeout)
            while not self.answered(_POLL_INTERVAL):
                pass
        except BaseException:  # an interrupt: a later request must not receive the answer to this one
            self.close()
            raise
        return self.answer

    def send(self, request: Any, timeout: float | None = None) -> None:
        """Send a request, to a new process if none is running; `answered` then reports when the answer has arrived."""
        if self._process is None:
            self._start()
        assert self._pipe is not None
        self.answer: Any = None
        self._timeout = math.inf if timeout is None else timeout
        self._deadline = time.monotonic() + (self._timeout if self._ready else START)
        self._waiting = [request]
        if self._ready:
            self._write()

    def _write(self) -> None:
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the child died; `answered` reports it
            self._pipe.send(self._waiting.pop())

    def answered(self, patience: float = 0.0) -> bool:
        """Wait up to `patience` seconds for the answer; True if it is in `self.answer`; raises ChildFailure."""
        assert self._pipe is not None and self._process is not None
        dead = not self.alive  # checked first: an answer that a child sent before it died is still in the pipe
        try:
            if self._pipe.poll(max(0.0, min(patience, self._deadline - time.monotonic()))):
                self.answer = self._pipe.recv()
                if self._ready:
                    return True
                self._ready, self._deadline = True, time.monotonic() + self._timeout
                self._write()
                return False
        except (EOFError, OSError):
            dead = True
        if dead:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            code, started = self._process.returncode, self._ready
            self.close()
            raise ChildFailure("died", f"exit code {code}", code, started)
        if time.monotonic() >= self._deadline:
            limit, started = self._timeout if self._ready else START, self._ready
            self.close()
            raise ChildFailure("timeout", f"no answer within {limit:g} s", None, started)
        return False

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        # The child imports this package and the module of `make` from the same places as this process.
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        handle = theirs.fileno()
        command = [sys.executable, "-P", os.path.abspath(__file__), str(handle)]
        lifeline = self._lifeline = None if sys.platform == "win32" else Lifeline()
        options: dict[str, Any] = {}
        if lifeline is not None:
            command.append(str(lifeline.theirs))
            options = {"pass_fds": [handle, lifeline.theirs]}
        if sys.platform == "win32":
            os.set_handle_inheritable(handle, True)
            options = {"startupinfo": subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]}), "close_fds": False}
        environment = _environment | dict(os.environ) | {"PYTHONPATH": path}
        with theirs, _uninterrupted(), lifeline.passed() if lifeline else contextlib.nullcontext():
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, **options)
        self._kill = weakref.finalize(self, _kill, self._process, os.getpid())  # also runs when the interpreter exits
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(self._setup)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block Ctrl-C, which a process that starts here inherits: it must not print a traceback before it can ignore it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() == parent:  # not in a fork of the parent
        process.kill()
        process.wait()


_children: weakref.WeakSet[Child] = weakref.WeakSet()

preloaded: list[str] = []
"""Modules that each child imports first, such as those that declare custom operators; not by a child that is `alone`."""

_environment: dict[str, str] = {}
"""Variables of the children that this process does not set itself."""


def _forget_children() -> None:
    """After a fork, close the copies of the pipes: a child must see that its parent has ended while the fork runs."""
    for child in list(_children):
        child.close()
    for lifeline in list(_lifelines):
        lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_children)


def share_cores(requested: int | None, work: int) -> int:
    """The number of children: as requested or one per core, at most one per item of work; each computes on one core."""
    from ..machine import usable_cores  # a child runs this file by itself

    _environment.update(OPENBLAS_NUM_THREADS="1", SONNX_NUM_THREADS="1")
    return max(1, min(requested or usable_cores(), work))


def share_work(
    items: Sequence[T],
    session: Callable[[], AbstractContextManager[Callable[[T], R]]],
    *,
    processes: int | None = None,
    progress: Callable[[R], None] | None = None,
    patience: float,
) -> list[R]:
    """Call a function for each item, in one thread for each core; each thread has a separate session.

    Args:
        items: the items.
        session: starts a session, such as child processes, and yields the function.
        processes: the number of threads; None for one per core.
        progress: called with each result as it arrives.
        patience: seconds that a thread may take to end its session after an interrupt.

    Returns:
        The results in the order of the items.

    Raises:
        BaseException: what a session raises first, or an interrupt.
    """
    todo: Iterator[tuple[int, T]] = iter(enumerate(items))
    results: dict[int, R] = {}
    lock, failures = threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            with session() as call:
                while not failures:
                    with lock:
                        entry = next(todo, None)
                    if entry is None:
                        return
                    at, item = entry
                    found = call(item)
                    with lock:
                        results[at] = found
                        if progress:
                            progress(found)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(share_cores(processes, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
    except BaseException as error:  # an interrupt: the threads end their sessions
        failures.append(error)
        for thread in threads:
            thread.join(patience)
        raise
    if failures:
        raise failures[0]
    return [results[i] for i in range(len(items))]


def ask_all(
    requests: Sequence[Any],
    make: Callable[..., Callable[[Any], Any]],
    *arguments: Any,
    jobs: int | None = None,
    timeout: float | None = None,
    memory: int | None = None,
) -> Generator[tuple[int, Any]]:
    """Yield the position and the answer of each request, in the order of arrival, from `jobs` children.

    If a child dies or hangs, its ChildFailure is the answer to its request, and another child replaces it.  A child that
    fails before it is ready ends the iteration with its ChildFailure: others would fail in the same way.  The children end when
    the iteration stops.

    Args:
        requests: the requests.
        make: the function that a child calls once; see `Child`.
        *arguments: the arguments of `make`.
        jobs: the number of children; None for one per core.
        timeout: seconds that a child may take for a request; None for no limit.
        memory: the maximum size of a child's address space in bytes; None for no maximum.
    """
    todo = iter(enumerate(requests))
    children = [Child(make, *arguments, memory=memory) for _ in range(share_cores(jobs, len(requests)))]
    busy: dict[Child, int] = {}
    try:
        for child, (position, request) in zip(children, todo, strict=False):
            child.send(request, timeout)
            busy[child] = position
        while busy:
            wait([child._pipe for child in busy if child._pipe], _POLL_INTERVAL)
            for child, position in list(busy.items()):
                try:
                    if not child.answered():
                        continue
                    answer = child.answer
                except ChildFailure as failure:
                    if not failure.started:
                        raise
                    answer = failure
                del busy[child]
                if (following := next(todo, None)) is not None:
                    busy[child], request = following
                    child.send(request, timeout)
                yield position, answer
    finally:
        for child in children:
            child.close()


# --- in the child process ---------------------------------------------------------------------------------------------


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    handle = int(sys.argv[1])
    if sys.platform == "win32":
        from multiprocessing.connection import PipeConnection

        pipe = PipeConnection(handle)
    else:
        os.set_inheritable(handle, False)
        pipe = Connection(handle)
    if len(sys.argv) > 2:
        Lifeline.attach(int(sys.argv[2]))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    memory, module, name, arguments, file, first = pickle.loads(requests.get())
    if memory:
        _bound(memory)
    for other in first:
        importlib.import_module(other)
    answer = getattr(_loaded(module, file), name)(*arguments)
    found = None
    while True:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended: `_read` ends this process
            pipe.send(found)
        found = answer(pickle.loads(requests.get()))


def _bound(memory: int) -> None:
    """Limit the address space, if the system supports it; a lower limit stays."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, ValueError, OSError):
        return


def _loaded(module: str, file: str) -> Any:
    """The module; from its file alone if there is one."""
    if not file:
        return importlib.import_module(module)
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(module.rpartition(".")[2], file)
    assert spec is not None and spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _read(pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    """Queue the parent's requests; end this process when the parent has closed the pipe or died."""
    try:
        while True:
            requests.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # no memory for the request: without this thread the process would wait forever
        os._exit(1)


if __name__ == "__main__":
    _main()
