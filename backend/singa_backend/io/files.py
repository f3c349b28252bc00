"""Writes every file of this project: it appears complete under its name, or not at all.

    write_text(path, text)
    with writing(path) as out:                  # a binary file, which takes its place at the end of the block
        out.write(data)
    with staged(path) as stage:                 # several files, of which `path` names the others
        stage.write("net.onnx.data", data)
        stage.write("net.onnx", model)          # moved last: a reader finds the old model with its data, or the new one
    with staged_folder(path) as folder:         # a folder, whole if it is new
        write_text(folder / "notes.txt", text)

New files are written to a temporary folder next to the target, `.sonnx-XXXXXXXX`, flushed to the disk, and moved.  Its owner
holds a lock on a file in it.  The kernel releases the lock when the owner dies, so the next write to the same folder removes what
dead processes left, and never what belongs to a live one, in this or another container or on another host that shares the locks.
Where a file system has no locks, nothing is removed.

The lock file is also a journal: while several files are moved, it names them, so that the next write can undo half a move.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ..errors import InvalidInput
from .temporary import NEW, claim, clean, finish, identity, write_journal

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES}

StrPath: TypeAlias = str | os.PathLike[str]

STANDARD_OUTPUT = Path("/dev/stdout")
"""The standard output as a target; also on systems that have no file of this name."""


class Stage:
    """New files on their way to their places next to a target.

    Links are resolved: the file that a link names is replaced.  What is not a regular file (a device, a pipe, the standard
    output) is never replaced: the new content is copied into it.

    Attributes:
        path: the target as it was passed.
        target: the target without links.
        folder: the folder of the new files.
        through: whether the target is not a regular file.

    Args:
        path: the target.  The other files go to its folder.
        parents: create the folder of the target.
        new: the target and the other files must not exist.
        overwrite: the other files may exist.  This is safe only if the target that is in place does not refer to them.

    Raises:
        OSError: the target cannot be written.
    """

    _lock = -1

    def __init__(self, path: StrPath, *, parents: bool = False, new: bool = False, overwrite: bool = False) -> None:
        self.path, self.new, self.overwrite, self._owner = Path(path), new, overwrite, os.getpid()
        found = _status(self.path)
        self.target = Path(os.path.realpath(path))
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "there is a folder of that name")
        self.through = found is not None and (not stat.S_ISREG(found.st_mode) or _standard(found) is not None)
        if found is not None and not (os.access(self.path, os.W_OK) or _standard(found)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if parents and not self.through:
            self.target.parent.mkdir(parents=True, exist_ok=True)
        self._stale: list[str] = []
        home = Path(tempfile.gettempdir()) if self.through else self.target.parent
        clean(home)
        self._top, self._lock = claim(home)
        try:
            self.folder = self._top / NEW
            self.folder.mkdir()
        except BaseException:
            self.close()
            raise

    def __truediv__(self, name: str) -> Path:
        """Return the path of a new file."""
        return self.folder / name

    def create(self, name: str) -> BinaryIO:
        """Create a file, which must be closed before `commit`.

        Args:
            name: its name.

        Returns:
            The file, open for reading and writing.
        """
        return open(self.folder / name, "x+b")

    def write(self, name: str, data: bytes | str) -> None:
        """Create a file with this content; text is written as UTF-8.

        Args:
            name: its name.
            data: the content.
        """
        with self.create(name) as out:
            out.write(data.encode() if isinstance(data, str) else data)

    def remove_later(self, name: str) -> None:
        """Remove a file next to the target when the new target is in place, which must not refer to it.

        Args:
            name: the name of the file.
        """
        self._stale.append(name)

    def commit(self) -> None:
        """Move the new files to their places, the target last.

        Raises:
            FileExistsError: a file that must be new exists.
            InvalidInput: the target is a device or a pipe, and there are other files (SX351).
            OSError: a file cannot be written or moved; what was in place still is.
        """
        main = self.folder / self.target.name
        parts = sorted(p for p in self.folder.rglob("*") if p != main and not p.is_dir())
        if self.through:
            if parts:
                raise InvalidInput(f"{self.path} is not a regular file: nothing can be written next to it", code="SX351")
            found = _status(self.path)
            handle = None if found is None else _standard(found)
            if handle is not None:  # after what was printed, which opening the file again would overwrite
                sys.stdout.flush()
            with main.open("rb") as source, open(self.path if handle is None else os.dup(handle), "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            return
        for part in (*parts, main):
            _sync(part, os.O_RDWR)
        home = self.target.parent
        placed = {str(p.relative_to(self.folder)): identity(p) for p in ((main, *parts) if self.new else parts)}
        stale = {n: identity(home / n) for n in self._stale if os.path.lexists(home / n)}
        if parts or stale or self.new:
            write_journal(self._lock, {"main": main.name, "placed": placed, "stale": stale})
        for part in parts:
            _move(part, home / part.relative_to(self.folder), self.overwrite)
        if parts:
            _sync_folder(home)
        _move(main, self.target, not self.new)
        _sync_folder(home)

    def close(self) -> None:
        """Remove the temporary folder, and what an incomplete `commit` has moved."""
        if self._lock >= 0 and self._owner == os.getpid():  # not in a process that its owner forked
            try:
                with suppress(OSError):  # the next write tries again
                    finish(self._top, self._lock)
            except BaseException:  # an interrupt; a second one leaves the rest to the next write
                with suppress(OSError):
                    finish(self._top, self._lock)
                raise
            finally:
                lock, self._lock = self._lock, -1  # first: an interrupt must not close twice what may be another file by then
                os.close(lock)

    def __del__(self) -> None:
        self.close()


@contextmanager
def staged(path: StrPath, *, parents: bool = False, new: bool = False, overwrite: bool = False) -> Iterator[Stage]:
    """Write several files that belong together: if the body succeeds they are moved into place, that of `path` last.

    Args:
        path: the file that refers to the others, or the only one.
        parents: create its folder.
        new: the files must not exist.
        overwrite: the other files may exist.  This is safe only if the file at `path` does not refer to them.

    Yields:
        The Stage, in whose folder the files are created.

    Raises:
        FileExistsError: a file exists, and `new` is set.
        InvalidInput: the files cannot be written (SX351); the old ones remain.
    """
    try:
        stage = Stage(path, parents=parents, new=new, overwrite=overwrite)
        try:
            yield stage
            stage.commit()
        finally:
            stage.close()
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            raise
        raise refused(path, error) from None


@contextmanager
def writing(path: StrPath, *, parents: bool = False, new: bool = False) -> Iterator[BinaryIO]:
    """Write a file: it takes its place when the body has succeeded.

    Args:
        path: the file.
        parents: create its folder.
        new: the file must not exist.

    Yields:
        A binary file, open for writing.

    Raises:
        FileExistsError: the file exists, and `new` is set.
        InvalidInput: the file cannot be written (SX351); an old one remains.
    """
    with staged(path, parents=parents, new=new) as stage, stage.create(stage.target.name) as out:
        yield out
        out.close()  # here, so that an error of the last write is raised before the file is moved


def write_copy(path: StrPath, source: StrPath) -> None:
    """Give a file a second name, under which it stays when it is replaced: a hard link, or a copy where there are none.

    Args:
        path: the second name; a file that has it is replaced.
        source: the file.

    Raises:
        InvalidInput: the file cannot be written (SX351); an old one remains.
    """
    with staged(path) as stage:
        copy = stage / stage.target.name
        try:
            os.link(source, copy)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copyfile(source, copy)


def write_bytes(path: StrPath, data: bytes, *, parents: bool = True) -> None:
    """Write a file.

    Args:
        path: the file.
        data: its content.
        parents: create its folder.

    Raises:
        InvalidInput: the file cannot be written (SX351); an old one remains.
    """
    with writing(path, parents=parents) as out:
        out.write(data)


def write_text(path: StrPath, text: str, *, parents: bool = True) -> None:
    """Write a file of text, in UTF-8, with the line ends of the text.

    Args:
        path: the file.
        text: its content.
        parents: create its folder.

    Raises:
        InvalidInput: the file cannot be written (SX351); an old one remains.
    """
    write_bytes(path, text.encode(), parents=parents)


def write_npz(target: StrPath | BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write arrays by any name for `np.load`, without pickling; equal arrays result in equal files.

    Arrays of `str` objects are written as arrays of text of one width.

    Args:
        target: a path, or a file that is open for writing.
        arrays: the arrays by name.

    Raises:
        InvalidInput: the file cannot be written (SX351): an old one remains; or an array holds other objects than strings, or
            strings that end in NUL.
    """
    if isinstance(target, (str, os.PathLike)):
        with writing(target) as out:
            write_npz(out, arrays)
        return
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True) as pack:
        for name, array in arrays.items():
            if "\0" in name:
                raise InvalidInput(f"the name of an array in an .npz file must not have a NUL, got {name!r}", code="SX307")
            info = zipfile.ZipInfo(f"{name}.npy")
            info.external_attr = 0o600 << 16
            with pack.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _without_objects(name, np.asanyarray(array)), allow_pickle=False)


@contextmanager
def staged_folder(path: StrPath) -> Iterator[Path]:
    """Write a folder: a new one appears when the body has succeeded; in one that exists, each file is written by itself.

    Args:
        path: the folder; the folders above it are created.

    Yields:
        The folder to write to.

    Raises:
        InvalidInput: the folder cannot be written (SX351).
    """
    try:
        found = _status(Path(path))
        target = Path(os.path.realpath(path))
        if found is not None and stat.S_ISDIR(found.st_mode):
            clean(target.parent)
            yield target
            return
        stage = Stage(target, parents=True)
        try:
            (stage / target.name).mkdir()
            yield stage / target.name
            _sync_folder(stage / target.name)
            os.rename(stage / target.name, target)
            _sync_folder(target.parent)
        finally:
            stage.close()
    except OSError as error:
        raise refused(path, error) from None


def check(path: StrPath, *, parents: bool = False, keeps: Iterable[StrPath | None] = ()) -> None:
    """Refuse a file that cannot be written, before the work whose result it holds; nothing is created.

    Args:
        path: the file.
        parents: its folder will be created.
        keeps: files that are read and must remain, which the file must not be; None for none.

    Raises:
        InvalidInput: its folder does not exist or cannot be written, there is a folder of that name, or it is one of the files to
            keep (SX351).
    """
    try:
        found = _status(Path(path))
        home = Path(os.path.realpath(path)).parent
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "there is a folder of that name")
        if found is not None and not (os.access(path, os.W_OK) or _standard(found)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if found is None or (stat.S_ISREG(found.st_mode) and _standard(found) is None):
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


def is_regular(path: StrPath) -> bool:
    """Whether a target is, or would be, a regular file, which has a folder for further files.

    Args:
        path: the target.

    Returns:
        False for a folder, a device, a pipe, and the file that is the standard output.
    """
    found = _status(Path(path))
    return found is None or (stat.S_ISREG(found.st_mode) and _standard(found) is None)


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


def _without_objects(name: str, array: np.ndarray) -> np.ndarray:
    """An array of `str` objects as one of text; any other array unchanged."""
    if array.dtype != object:
        return array
    texts = np.array(array.tolist(), str).reshape(array.shape)
    if texts.tolist() != array.tolist():
        what = f"array {name!r} cannot be written: .npz files keep no objects but strings, without NUL at their ends"
        raise InvalidInput(what, code="SX351")
    return texts


# --- parts of a stage -------------------------------------------------------------------------------------------------


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((p for p in (folder, *folder.parents) if os.path.lexists(p)), folder)


def _check_home(home: Path) -> None:
    """Raise OSError unless files can be created in a folder."""
    if not os.path.lexists(home):
        raise FileNotFoundError(errno.ENOENT, f"the folder {home} does not exist")
    if not home.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{home} is not a folder")
    if not os.access(home, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"the folder {home} is not writable")


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.fstat(1) if path == STANDARD_OUTPUT else os.stat(path)
    except FileNotFoundError:
        return None
    except ValueError as error:  # a NUL, or what the file system cannot encode
        raise OSError(errno.EINVAL, str(error)) from None


def _standard(found: os.stat_result) -> int | None:
    """The handle of standard output or standard error, if it is this file."""
    for handle in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), found):
                return handle
    return None


def _move(source: Path, target: Path, overwrite: bool) -> None:
    if overwrite:
        _keep_mode(target, source)
        os.replace(source, target)
        return
    try:
        os.link(source, target)  # fails if there is a file
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, f"there is a file {target.name} already") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, f"there is a file {target.name} already") from None
        os.rename(source, target)
    else:
        os.unlink(source)


def _keep_mode(old: Path, new: Path) -> None:
    """Give a new file the owner and the permissions of the one that it replaces."""
    found = _status(old)
    if found is not None:
        if (found.st_uid, found.st_gid) != (new.stat().st_uid, new.stat().st_gid):
            with suppress(OSError, AttributeError):  # permitted to few users
                os.chown(new, found.st_uid, found.st_gid)
        os.chmod(new, stat.S_IMODE(found.st_mode))


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    """Make renames in a folder last through a power failure, where the file system can."""
    if os.name == "nt":
        return
    try:
        _sync(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
