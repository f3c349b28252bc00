"""Temporary folders with a lock and a journal, in which `files` writes what it moves to its place later."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: no lock tells whether an owner lives, so nothing is removed
    fcntl = None  # type: ignore[assignment]  # Windows does not have it

PREFIX = ".sonnx-"
"""The first characters of the names of temporary folders."""

_LOCK = "lock"
NEW = "new"
"""The folder, in a temporary folder, of the files that a commit moves."""


def claim(home: Path) -> tuple[Path, int]:
    """A new temporary folder, and the handle of its lock."""
    for _ in range(100):
        top = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
        try:
            lock = _acquire(top, sure=False)
        except BaseException:
            shutil.rmtree(top, ignore_errors=True)
            raise
        if lock is not None:
            return top, lock
        shutil.rmtree(top, ignore_errors=True)  # another process has it, and removes it
    raise OSError(errno.EAGAIN, f"no temporary folder in {home} could be locked")


def _acquire(top: Path, *, sure: bool) -> int | None:
    """The lock of a temporary folder; None if another process has it, or has removed the folder.

    sure: whether a file system without locks counts as locked.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(top / _LOCK, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif sure:
            raise BlockingIOError
        if os.path.samestat(os.stat(top / _LOCK), os.fstat(handle)):  # it was not removed meanwhile
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        if not sure:
            return handle
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def clean(home: Path) -> None:
    """Remove what dead processes of this user left in a folder."""
    with suppress(OSError):
        with os.scandir(home) as entries:
            found = [Path(e.path) for e in entries if e.name.startswith(PREFIX) and _is_ours(e)]
        for top in found:
            with suppress(OSError):
                lock = _acquire(top, sure=True)
                if lock is not None:
                    try:
                        finish(top, lock)
                    finally:
                        os.close(lock)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    own = getattr(os, "geteuid", lambda: None)()
    return entry.is_dir(follow_symlinks=False) and own in (None, entry.stat(follow_symlinks=False).st_uid)


def finish(top: Path, lock: int) -> None:
    """Undo a commit that did not reach its target, or complete one that did; then remove the temporary folder."""
    journal = _read_journal(lock)
    if journal is not None:
        main, placed, stale = journal  # the target is moved last: if it is still in NEW, the commit is undone
        for name, known in (placed if os.path.lexists(top / NEW / main) else stale).items():
            path = top.parent / name
            with suppress(FileNotFoundError):
                if identity(path) == known:  # otherwise it is another file
                    os.unlink(path)
        os.ftruncate(lock, 0)  # first: a folder that is half removed must not be taken for a commit
    shutil.rmtree(top)


def write_journal(lock: int, journal: dict[str, Any]) -> None:
    """Write what a commit moves and removes, before it begins.

    journal: "main", the name of the target; "placed", the files that an undone commit removes, and "stale", those that a complete
    one removes, each as name -> `identity`.
    """
    data = memoryview(json.dumps(journal).encode())
    while data:
        data = data[os.write(lock, data) :]
    os.fsync(lock)


def identity(path: Path) -> list[int]:
    """What tells a file from a later one of the same name."""
    found = os.lstat(path)
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _read_journal(lock: int) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """What a commit moves and removes; None if it has not begun."""
    os.lseek(lock, 0, os.SEEK_SET)
    with open(os.dup(lock), "rb") as file:
        text = file.read(1 << 24)
    try:
        found = json.loads(text)
        main, placed, stale = found["main"], dict(found["placed"]), dict(found["stale"])
    except (ValueError, TypeError, KeyError, RecursionError):  # incomplete: nothing was moved yet
        return None
    names = [main, *placed, *stale]
    if not all(isinstance(n, str) and n and not os.path.isabs(n) and ".." not in Path(n).parts for n in names):
        return None
    return main, placed, stale
