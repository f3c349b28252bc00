"""What is at the path of a file that is to be written: the checks before anything is written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ..errors import InvalidInput

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""The flags that refuse a link, and do not wait for a pipe."""

StrPath: TypeAlias = str | os.PathLike[str]

HEAD = 4096
"""The bytes at the beginning of a file that have its mark."""

STANDARD_OUTPUT = Path("/dev/stdout")
"""The standard output as a target; also on systems that have no file of this name."""


def check(path: StrPath, *, parents: bool = False, keeps: Iterable[StrPath | None] = (), mark: bytes | None = None) -> None:
    """Refuse a file that cannot be written, before the work whose result it holds; nothing is created.

    Args:
        path: the file.
        parents: its folder will be created.
        keeps: files that are read and must remain, which the file must not be; None for none.
        mark: of a name that the user has not chosen; see Stage.

    Raises:
        InvalidInput: its folder does not exist or cannot be written, there is a folder of that name, it is one of the files to
            keep, or there is a file without the mark (SX351).
    """
    try:
        if mark is not None:
            check_own(Path(path), mark)
        found = status(Path(path))
        home = Path(os.path.realpath(path)).parent
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "there is a folder of that name")
        if found is not None and not (os.access(path, os.W_OK) or standard(found)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if found is None or (stat.S_ISREG(found.st_mode) and standard(found) is None):
            _check_home(_nearest(home) if parents else home)
        if found is not None and stat.S_ISREG(found.st_mode):
            for other in keeps:
                if other is not None and os.path.exists(other) and os.path.samefile(path, other):
                    raise FileExistsError(errno.EEXIST, "it would replace a file that is read here; write to another file")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise refused(path, error) from None


def check_folder(path: StrPath) -> None:
    """Refuse a folder in which no files can be written, or that cannot be created, before the work; nothing is created.

    Args:
        path: the folder.

    Raises:
        InvalidInput: there is a file of that name, or in place of a folder above it, or it is not writable (SX351).
    """
    try:
        _check_home(_nearest(Path(os.path.realpath(path))))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise refused(path, error) from None


def check_folder_of(path: StrPath, names: Iterable[str], mark: bytes) -> None:
    """Refuse a folder as `check_folder` does, or because it has other files of the names that will be written there.

    Args:
        path: the folder.
        names: the names.
        mark: of the files; see Stage.

    Raises:
        InvalidInput: a file cannot be written (SX351).
    """
    check_folder(path)
    for name in names:
        check(Path(path, name), parents=True, mark=mark)


def is_regular(path: StrPath) -> bool:
    """Whether a target is, or would be, a regular file, which has a folder for further files.

    Args:
        path: the target.

    Returns:
        False for a folder, a device, a pipe, and the file that is the standard output.
    """
    found = status(Path(path))
    return found is None or (stat.S_ISREG(found.st_mode) and standard(found) is None)


def refused(path: StrPath, error: OSError | ValueError) -> InvalidInput:
    """Return the error for a file that cannot be written.

    Args:
        path: the file.
        error: the system's error.

    Returns:
        The typed error, with the words of the system.
    """
    return InvalidInput(f"{os.fspath(path)} cannot be written: {getattr(error, 'strerror', None) or error}", code="SX351")


def free_name(folder: Path, name: str) -> str:
    """Return a name that no file of a folder has.

    Args:
        folder: the folder.
        name: the preferred name.

    Returns:
        The name; with a number before its last suffix if there is a file of that name.
    """
    stem, suffix = os.path.splitext(name)
    found, i = name, 0
    while os.path.lexists(folder / found):
        i += 1
        found = f"{stem}.{i}{suffix}"
    return found


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((p for p in (folder, *folder.parents) if os.path.lexists(p)), folder)


def _check_home(home: Path) -> None:
    """Raise OSError unless files can be created in a folder."""
    if not os.path.lexists(home):
        raise FileNotFoundError(errno.ENOENT, f"the folder {home} does not exist")
    if not os.path.isdir(home):
        raise NotADirectoryError(errno.ENOTDIR, f"{home} is not a folder")
    if not os.access(home, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"the folder {home} is not writable")


def check_own(path: Path, mark: bytes) -> None:
    """Raise FileExistsError unless there is nothing at a path, or an empty file, or a regular file with this mark."""
    try:
        if os.path.islink(path):
            raise FileExistsError(errno.EEXIST, "there is a link of that name, which is not followed")
        handle = os.open(path, os.O_RDONLY | NO_LINK)
    except (FileNotFoundError, NotADirectoryError):
        return
    except ValueError as error:  # a NUL, or what the file system cannot encode
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileExistsError(errno.EEXIST, "what has that name is not a regular file")
        head = os.read(handle, HEAD)
    finally:
        os.close(handle)
    if head and mark not in head:
        raise FileExistsError(errno.EEXIST, "there is a file of that name that this program has not written; move or remove it")


def status(path: Path) -> os.stat_result | None:
    """What the system tells of the file at a path; None if there is none."""
    try:
        return os.fstat(1) if path == STANDARD_OUTPUT else os.stat(path)
    except FileNotFoundError:
        return None
    except ValueError as error:  # a NUL, or what the file system cannot encode
        raise OSError(errno.EINVAL, str(error)) from None


def standard(found: os.stat_result) -> int | None:
    """The handle of standard output or standard error, if it is this file."""
    for handle in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), found):
                return handle
    return None
