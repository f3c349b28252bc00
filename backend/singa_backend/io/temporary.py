"""Temporary folders with a lock and a journal, in which `files` writes what it moves to its place later.

What a dead process left is recognized by two marks: the name, whose second half is computed from the first, and the first line of
the lock file, which has the number of the folder.  A folder without them is not touched: it is the user's, or a copy.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import SonnxError
from .places import NO_LINK

try:
    import fcntl
except ImportError:  # Windows: no lock tells whether an owner lives, so nothing is removed
    fcntl = None  # type: ignore[assignment]  # Windows does not have it

PREFIX = ".sonnx-"
"""The first characters of the names of temporary folders."""

_LOCK = "lock"
NEW = "new"
"""The folder, in a temporary folder, of the files that a commit moves."""


def _name(half: str) -> str:
    """The name of a temporary folder whose first half is this."""
    return f"{PREFIX}{half}{zlib.crc32(half.encode()):08x}"


def claim(home: Path) -> tuple[Path, int]:
    """A new temporary folder, and the handle of its lock."""
    for _ in range(100):
        top = home / _name(os.urandom(4).hex())
        try:
            os.mkdir(top, 0o700)
        except FileExistsError:
            continue
        lock = None
        try:
            lock = _lock(top, new=True)
            if lock is not None:
                os.write(lock, _mark(top))
                return top, lock
        except BaseException:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(top, ignore_errors=True)
            raise
        shutil.rmtree(top, ignore_errors=True)  # another process has it, and removes it
    raise OSError(errno.EAGAIN, f"no temporary folder in {home} could be locked")


def _mark(top: Path) -> bytes:
    """The first line of the lock of a folder."""
    return f"sonnx {os.lstat(top).st_ino}\n".encode()


def _lock(top: Path, *, new: bool) -> int | None:
    """The lock of a temporary folder; None if another process has it, or has removed the folder.

    new: create it; a file system without locks then counts as locked.
    """
    flags = os.O_RDWR | NO_LINK | (os.O_CREAT | os.O_EXCL if new else 0)
    try:
        handle = os.open(top / _LOCK, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif not new:
            raise BlockingIOError
        if os.path.samestat(os.lstat(top / _LOCK), os.fstat(handle)):  # it was not removed meanwhile
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        if new:
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
                _remove_dead(top)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether the name and the owner of a folder are those of a temporary folder of this user."""
    own = getattr(os, "geteuid", lambda: None)()
    named = entry.name == _name(entry.name.removeprefix(PREFIX)[:8])
    return named and entry.is_dir(follow_symlinks=False) and own in (None, entry.stat(follow_symlinks=False).st_uid)


def _remove_dead(top: Path) -> None:
    """Remove a temporary folder if its owner is dead; raises OSError."""
    inside = os.listdir(top)
    if not inside and fcntl is not None:  # its owner died, or is about to create the lock: then it takes another folder
        os.rmdir(top)
    lock = _lock(top, new=False) if _LOCK in inside else None
    if lock is None:
        return
    try:
        mark, size = _mark(top), os.fstat(lock).st_size
        if stat.S_ISREG(os.fstat(lock).st_mode) and os.pread(lock, len(mark), 0) == mark[:size]:
            if size >= len(mark):
                finish(top, lock)
            elif inside == [_LOCK]:  # its owner died while it wrote the mark
                _remove(top)
    finally:
        os.close(lock)


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
        os.ftruncate(lock, len(_mark(top)))  # first: a folder that is half removed must not be taken for a commit
    _remove(top)


def _remove(top: Path) -> None:
    """Remove a temporary folder, its mark last."""
    for path in top.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path)
    os.unlink(top / _LOCK)
    os.rmdir(top)


def write_journal(lock: int, journal: dict[str, Any]) -> None:
    """Write what a commit moves and removes after the mark, before it begins.

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
        text = file.read(1 << 24).partition(b"\n")[2]
    try:
        from .documents import parse_document  # only a journal of an interrupted program needs it

        journal = parse_document(text, "a journal", "SX351")
        placed, stale = ({_place(n): v.sequence() for n, v in journal[key].items()} for key in ("placed", "stale"))
        return _place(journal["main"].text()), placed, stale
    except (SonnxError, ValueError):  # incomplete: nothing was moved yet
        return None


def _place(name: str) -> str:
    """A name in a journal; raises ValueError if it leads out of the folder."""
    if not name or os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        raise ValueError(name)
    return name
