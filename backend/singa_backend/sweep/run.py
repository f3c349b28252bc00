"""The loop of a sweep: each request in a child process with limits, again if the child died, and stored when it is finished."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SonnxError
from ..io.processes import Child, ChildFailure, ask_all
from ..proto.source import forgotten_digests
from .files import content_of, key_of
from .results import SweepReport, SweepRow, SweepStore, sorted_rows
from .settings import SweepSettings
from .tasks import Answer, serve

OWN_DEATHS = 2
"""A file that kills its process so often has died."""

OUTSIDE_DEATHS = 5
"""A file whose process is killed by another process so often has died."""

_STARTS = 20
"""How often children that are killed while they start are replaced before a sweep gives up the files that are left."""

_CODE = "SX803"
"""The code of a file whose process was killed by another one: this is not stored, as it says nothing about the file."""

_IDLE = 60.0
"""Seconds after which a child of `sweep_one` that waits for a file is ended."""

_OUTSIDE = {-getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)}
"""The exit codes of a process that another one has ended, or that was out of memory."""


def _exhaustions(statistics: Path = Path("/proc/vmstat")) -> str:
    """How often this machine has ended a process because it was out of memory; "" if it does not count."""
    try:
        lines = statistics.read_text("ascii").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("oom_kill ")), "")


@dataclass
class _Deaths:
    """How often the process of a request died: by itself or because memory was exhausted, and by a signal of another process."""

    own: int = 0
    outside: int = 0
    last: str = ""
    memory: str = ""

    def count(self, failure: ChildFailure) -> None:
        """Count a death; raises SonnxError if the process could not start (SX803)."""
        now = _exhaustions()
        outside = failure.exit_code in _OUTSIDE and now == self.memory
        self.memory = now
        if not failure.started and not outside:
            raise _unstartable(failure)
        if outside:
            self.outside += 1
        else:
            self.own += 1
            self.last = _reason(failure.exit_code)

    @property
    def answer(self) -> Answer | None:
        """The final answer, once there were too many."""
        if self.own >= OWN_DEATHS:
            reason = f"its process died {OWN_DEATHS} times: {self.last}"
        elif self.outside >= OUTSIDE_DEATHS:
            return _without_result("died", f"its process was ended by another one {OUTSIDE_DEATHS} times", _CODE)
        else:
            return None
        return _without_result("died", reason)


def _reason(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _without_result(status: str, reason: str, code: str = "") -> Answer:
    return {"status": status, "reason": reason, "code": code, "facts": {}, "seconds": 0.0}


def _unstartable(failure: ChildFailure) -> SonnxError:
    return SonnxError(
        f"a child process of the sweep must be able to start, got {failure}", code=_CODE,
        hint="allow more memory, or see the traceback that the process has written",
    )  # fmt: skip


def settle_all(
    requests: Sequence[Any],
    task: str,
    settings: SweepSettings | None,
    *,
    processes: int | None = None,
    timeout: float | None = None,
    memory: int | None = None,
) -> Generator[tuple[int, Answer]]:
    """Yield the position and the answer of each request as it arrives, from child processes.

    A request whose child dies, or is out of memory, runs again after all others, alone in a new child.  If children are killed by
    another process again and again while they start, the requests that are left have died.

    Args:
        requests: what `serve(task, settings)` accepts.
        task: the task.
        settings: of the task.
        processes: the number of children; None for one per core.
        timeout: seconds for a request.
        memory: the maximum address space of a child in bytes.

    Raises:
        SonnxError: a child cannot start (SX803).
    """
    again: dict[int, _Deaths] = {}
    waiting, starts, memory_before = list(range(len(requests))), 0, _exhaustions()
    while waiting:
        left = dict.fromkeys(waiting)
        chosen = [requests[i] for i in waiting]
        answers = ask_all(chosen, serve, task, settings, jobs=processes, timeout=timeout, memory=memory)
        try:
            with closing(answers):
                for i, answer in answers:
                    at = waiting[i]
                    del left[at]
                    if isinstance(answer, ChildFailure) and answer.how == "timeout":
                        yield at, _without_result("timeout", str(answer))
                    elif isinstance(answer, ChildFailure):
                        again[at] = _Deaths(memory=memory_before)
                        again[at].count(answer)
                        memory_before = again[at].memory
                    elif answer["status"] == "memory":
                        again[at] = _Deaths(memory=memory_before)
                    else:
                        yield at, answer
        except ChildFailure as failure:  # a child ended while it started
            starts += 1
            if failure.exit_code not in _OUTSIDE:
                raise _unstartable(failure) from None
            if starts > _STARTS:
                reason = f"its process was ended by another one while it started: {_reason(failure.exit_code)}"
                yield from ((at, _without_result("died", reason, _CODE)) for at in (*left, *again))
                return
        waiting = list(left)
    for at, deaths in again.items():
        yield at, _settle(requests[at], task, settings, timeout, memory, deaths)


def _settle(
    request: Any, task: str, settings: SweepSettings | None, timeout: float | None, memory: int | None, deaths: _Deaths
) -> Answer:
    """The answer to a request, alone in a new child; and in others if it dies."""
    while (final := deaths.answer) is None:
        deaths.memory = _exhaustions()
        with Child(serve, task, settings, memory=memory) as child:
            try:
                return dict(child.ask(request, timeout))
            except ChildFailure as failure:
                if failure.how == "timeout":
                    return _without_result("timeout", str(failure))
                deaths.count(failure)
    return final


class Sweep:
    """A task on many files.

    Args:
        files: paths by name, as `find_files` returns them.
        settings: the task and its limits.
        results: a folder in which results are stored by content, engine and versions, and found again; None to store none.
        again: whether to run files again whose results are stored.

    Attributes:
        kept: the number of files whose results were found.

    Raises:
        InvalidInput: the folder cannot be written (SX351).

    Example:
        >>> found = Sweep(find_files("models", "compare"), SweepSettings("compare"), "results").run()
        >>> found.counts
    """

    def __init__(
        self,
        files: Mapping[str, str | os.PathLike[str]],
        settings: SweepSettings,
        results: str | os.PathLike[str] | None = None,
        *,
        again: bool = False,
    ) -> None:
        """Choose files and a task; nothing runs yet."""
        self.files = {name: Path(path) for name, path in files.items()}
        self.settings, self.again, self.kept = settings, again, 0
        self._store = SweepStore(Path(results)) if results is not None else None
        self._rows: dict[str, SweepRow] = {}

    @property
    def report(self) -> SweepReport:
        """The results so far: of all files after `run`, and of those that were finished if it was interrupted."""
        missing = [name for name in self.files if name not in self._rows]
        return SweepReport(self.settings, sorted_rows(self._rows.values()), missing)

    def run(self, processes: int | None = None, progress: Callable[..., None] | None = None) -> SweepReport:
        """Run all files whose results are not stored, files of equal content once.

        Args:
            processes: the number of child processes; None for one per core.
            progress: called with each file that has a result, with `note=` the counts.

        Returns:
            The report.

        Raises:
            SonnxError: a child process cannot start (SX803).
            InvalidInput: a result cannot be stored (SX351).
        """
        step = progress or (lambda **_: None)
        with forgotten_digests():
            self._run(processes, step)
        return self.report

    def _run(self, processes: int | None, step: Callable[..., None]) -> None:
        groups = self._groups(step)
        requests = [str(self.files[names[0]]) for names in groups.values()]
        keys = list(groups)
        s = self.settings
        answers = settle_all(requests, s.task, s, processes=processes, timeout=s.timeout, memory=s.memory)
        with closing(answers):
            try:
                for at, answer in answers:
                    names = groups[keys[at]]
                    key, answer = _stored(self._store, keys[at], answer, self.files[names[0]], s)
                    for name in names:
                        self._add(name, key, answer, step)
            except KeyboardInterrupt:
                self._add_stored(groups, step)
                raise

    def _add_stored(self, groups: Mapping[str, Sequence[str]], step: Callable[..., None]) -> None:
        """Add the rows of results that were stored when an interrupt arrived."""
        for key, names in groups.items():
            found = self._store.find(key, self.settings) if self._store and not self.again else None
            for name in names if found is not None else ():
                if found is not None and name not in self._rows:
                    self._add(name, key, found, step)

    def _groups(self, step: Callable[..., None]) -> dict[str, list[str]]:
        """The names of files without a result by their key; a file that cannot be read has its name as its key."""
        groups: dict[str, list[str]] = {}
        for name, path in self.files.items():
            key = _key(path, self.settings)
            found = self._store.find(key, self.settings) if self._store and key and not self.again else None
            if found is not None:
                self.kept += 1
                self._add(name, key, found, step)
            else:
                groups.setdefault(key or f"\0{name}", []).append(name)
        return groups

    def _add(self, name: str, key: str, answer: Answer, step: Callable[..., None]) -> None:
        self._rows[name] = SweepRow(name, key=key, **answer)
        counts = SweepReport(self.settings, list(self._rows.values()), []).counts
        step(note=", ".join(f"{n} {status}" for status, n in counts.items()))


def _key(path: Path, settings: SweepSettings) -> str:
    """The key of a file; "" if it cannot be read."""
    try:
        return key_of(content_of(path, settings.task), settings)
    except OSError:
        return ""


def _stored(store: SweepStore | None, key: str, answer: Answer, path: Path, settings: SweepSettings) -> tuple[str, Answer]:
    """Store an answer, unless the file was changed since its key was computed; returns the key and the answer of its row."""
    if key.startswith("\0") or not key:
        return "", answer
    if _key(path, settings) != key:
        return "", answer | {"status": "error", "reason": "the file was changed while it was swept", "facts": {}}
    if answer["code"] == _CODE:
        return "", answer
    if store is not None:
        store.keep(key, answer, settings)
    return key, answer


_idle: dict[SweepSettings, dict[Child, threading.Timer]] = {}
_lock = threading.Lock()
"""Children of `sweep_one` that wait for a file, with what will end them; the lock is for calls from several threads."""


def _end_idle(settings: SweepSettings, child: Child) -> None:
    """End a child that still waits."""
    with _lock:
        waiting = _idle.get(settings, {})
        idle = waiting.pop(child, None)
        if not waiting:
            _idle.pop(settings, None)
    if idle:
        child.close()


def _keep_idle(settings: SweepSettings, child: Child) -> None:
    """Let a child wait for the next file."""
    timer = threading.Timer(_IDLE, _end_idle, (settings, child))
    timer.daemon = True
    with _lock:
        _idle.setdefault(settings, {})[child] = timer
    timer.start()


def sweep_one(
    path: str | os.PathLike[str],
    task: str,
    *,
    results: str | os.PathLike[str] | None = None,
    name: str | None = None,
    against: str = "onnxruntime",
    seed: int = 0,
    timeout: float = 60.0,
    memory: int | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Run a task on one file, in a child process with limits: a function for a pool of processes, Dask or Ray.

    A file that kills its child twice has the status "died"; the process that calls this function goes on.  The child stays
    a minute for the next call.  If the result is stored, nothing runs.

    Args:
        path: the file.
        task: "check", "run", "compare" or "conform".
        results: the folder in which results are stored, which all workers share; None to store none.
        name: the name in the row; by default the path.
        against: the engine of "compare".
        seed: of drawn inputs.
        timeout: seconds.
        memory: the maximum address space of the child in bytes; None for no limit.
        again: whether to run the file if its result is stored.

    Returns:
        The row as plain data, as `SweepRow.to_dict` returns it.

    Raises:
        InvalidInput: an argument is unknown or out of range (SX309, SX992), or the result cannot be stored (SX351).
        MissingDependency: onnxruntime is needed and not installed.
        SonnxError: a child process cannot start (SX803).

    Example:
        >>> sweep_one("model.onnx", "compare", results="results")["status"]
        'passed'
    """
    settings = SweepSettings(task, against, seed, timeout, memory)
    store, place = SweepStore(Path(results)) if results is not None else None, Path(path)
    with forgotten_digests():
        shown, key = str(place) if name is None else name, _key(place, settings)
        found = store.find(key, settings) if store and key and not again else None
        if found is None:
            key, found = _stored(store, key, _in_idle_child(str(place), settings), place, settings)
    return SweepRow(shown, key=key, **found).to_dict()


def _in_idle_child(request: str, settings: SweepSettings) -> Answer:
    """The answer to a request, from a child that stays for the next one."""
    with _lock:
        waiting = _idle.get(settings)
        child, timer = waiting.popitem() if waiting else (None, None)
    if timer is not None:
        timer.cancel()
    child = child or Child(serve, settings.task, settings, memory=settings.memory)
    deaths = _Deaths(memory=_exhaustions())
    try:
        answer = dict(child.ask(request, settings.timeout))
        if answer["status"] != "memory":
            _keep_idle(settings, child)
            return answer
    except ChildFailure as failure:
        if failure.how == "timeout":
            return _without_result("timeout", str(failure))
        deaths.count(failure)
    child.close()
    return _settle(request, settings.task, settings, settings.timeout, settings.memory, deaths)
