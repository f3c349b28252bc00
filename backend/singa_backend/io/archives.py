"""Read arrays and zip archives from files that are not trusted.

    with open_archive(path, "SX307") as pack:        the members, by name
        pack.header("x.npy")                         the shape and dtype, before any data are read
        pack.array("x.npy")
    read_array(path, "SX307")                        a .npy file

Every byte that a file unpacks to is counted against the limits of the current call before it is unpacked: the size in the header
is checked first, then the stream is read in chunks up to that size.  Any damage is an InvalidInput with the code of the caller.
Nothing is unpickled, and member names are never used as paths.
"""

from __future__ import annotations

import io
import math
import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from .. import dtypes, limits
from ..errors import InvalidInput, ResourceExhausted, SonnxError

CHUNK = 1 << 18
"""The bytes that are unpacked at a time."""

HEADER = 10_000
"""The maximum length of the header of an array, which is NumPy's."""

DIRECTORY = 4 << 20
"""The maximum bytes of the directory of a zip archive: about 40,000 members."""

Header = tuple[tuple[int, ...], np.dtype[Any]]
"""The shape and the dtype of a stored array."""


@contextmanager
def typed(where: str, code: str, hint: str = "") -> Iterator[None]:
    """A context in which the errors of damaged data become InvalidInput: Python and NumPy raise any kind of exception for them.

    Args:
        where: the beginning of the message: the file, and the part of it.
        code: the code of the error.
        hint: its hint.

    Raises:
        InvalidInput: the body raised another exception.
        ResourceExhausted: too many files are open (SX612).
    """
    try:
        yield
    except SonnxError:
        raise
    except Exception as error:
        if isinstance(error, OSError):
            limits.raise_shortage(where, error)
        detail = (
            getattr(error, "strerror", None)
            or "it lacks " * isinstance(error, KeyError) + " ".join(str(error).split())[:300]
            or type(error).__name__
        )
        raise InvalidInput(f"{where}: {detail}", code=code, hint=hint) from None


@contextmanager
def open_file(path: str | os.PathLike[str], code: str) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a pipe, a device or a folder is refused at once.

    Args:
        path: the path of the file, which may be a link.
        code: the code of the error.

    Yields:
        The open file.

    Raises:
        InvalidInput: the path is not a regular file that can be read.
    """
    with typed(shown_path(path), code):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ValueError("must be a regular file, not a folder, a pipe or a device")
    with open(handle, "rb") as file:
        yield file


def read_bytes(path: str | os.PathLike[str], code: str, most: int | None = None) -> bytes:
    """Read a regular file.

    Args:
        path: the path of the file.
        code: the code of an error about the file.
        most: the maximum number of bytes; None for `Limits.model_bytes`.

    Returns:
        The bytes.

    Raises:
        InvalidInput: the path is not a regular file that can be read.
        ResourceExhausted: the file is larger.
    """
    budget = limits.current()
    with open_file(path, code) as file, typed(shown_path(path), code):
        size, most = os.fstat(file.fileno()).st_size, most or budget.limits.model_bytes
        check_size(size, most, shown_path(path))
        budget.admit_bytes(size, shown_path(path))
        return file.read(size)


def read_array(path: str | os.PathLike[str], code: str) -> np.ndarray:
    """Read a .npy file.

    Args:
        path: the path of the file.
        code: the code of an error about the file.

    Returns:
        The array, in native byte order.

    Raises:
        InvalidInput: the file is damaged, or does not hold numbers, bool or strings.
        ResourceExhausted: the array exceeds a limit.
    """
    with open_file(path, code) as file, typed(shown_path(path), code):
        return _array(file, os.fstat(file.fileno()).st_size)


class Archive:
    """The members of a zip archive, by name.

    Attributes:
        where: what the archive is, for messages.
        code: the code of errors about the archive.
        names: the names of the members, in order.
    """

    def __init__(self, file: BinaryIO, where: str, code: str) -> None:
        """Read the directory of an archive.

        Args:
            file: the archive, which stays open.
            where: what it is, for messages.
            code: the code of errors about it.

        Raises:
            InvalidInput: the archive is damaged; a member is encrypted, has an unknown method or a name that occurs twice.
        """
        self.where, self.code = where, code
        self._budget = limits.current()
        with typed(where, code):
            bounded, length = _Bounded(file), file.seek(0, os.SEEK_END)
            self._pack = zipfile.ZipFile(bounded)
            bounded.most = None
            self._members: dict[str, zipfile.ZipInfo] = {}
            for info in self._pack.infolist():
                if info.filename in self._members:
                    raise ValueError(f"the member {info.filename[:200]!r} occurs twice")
                if info.flag_bits & 0x41:
                    raise ValueError(f"the member {info.filename[:200]!r} is encrypted")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(
                        f"the member {info.filename[:200]!r} must be stored or deflated, got the method {info.compress_type}"
                    )
                end = info.header_offset + 30 + info.compress_size
                if end > length or (not info.compress_type and info.compress_size != info.file_size):
                    raise ValueError(f"the sizes of the member {info.filename[:200]!r} are wrong")
                self._members[info.filename] = info
        self.names = tuple(self._members)

    def size(self, name: str) -> int:
        """Return the unpacked size that the directory declares for a member.

        Args:
            name: the name of the member.

        Returns:
            The number of bytes.

        Raises:
            InvalidInput: there is no such member.
        """
        return int(self._info(name).file_size)

    def comment(self, name: str) -> str:
        """Return the comment of a member.

        Args:
            name: the name of the member.

        Returns:
            The comment; bytes that are not UTF-8 are replaced.

        Raises:
            InvalidInput: there is no such member.
        """
        return self._info(name).comment.decode("utf-8", "replace")

    def header(self, name: str, want: np.dtype[Any] | None = None) -> Header:
        """Read the shape and dtype of the array in a member; its data are not unpacked.

        Args:
            name: the name of the member.
            want: the expected dtype.  NumPy writes bfloat16 and floats of 8 bits as their bytes, a void dtype of the same width,
                which is read as `want` if that is one of them.

        Returns:
            The shape and the dtype.

        Raises:
            InvalidInput: there is no such member, or it is not an array of numbers, bool or strings.
        """
        with self._open(name) as stream:
            shape, dtype, _, _ = _header(stream, want)
            return shape, dtype if dtype in _AS_BYTES else dtype.newbyteorder("=")

    def array(self, name: str, want: np.dtype[Any] | None = None) -> np.ndarray:
        """Read the array in a member.

        Args:
            name: the name of the member.
            want: the expected dtype.  NumPy writes bfloat16 and floats of 8 bits as their bytes, a void dtype of the same width,
                which is read as `want` if that is one of them.

        Returns:
            The array, in native byte order.

        Raises:
            InvalidInput: there is no such member, or it is damaged, or not an array of numbers, bool or strings.
            ResourceExhausted: this array, or all that were read from the archive, exceed a limit.
        """
        with self._open(name) as stream, limits.spend(self._budget):
            array = _array(stream, self.size(name), want)
            self._budget.keep(array.nbytes)
            return array

    def read(self, name: str, most: int) -> bytearray:
        """Read the bytes of a member.

        Args:
            name: the name of the member.
            most: the maximum number of bytes.

        Returns:
            The bytes.

        Raises:
            InvalidInput: there is no such member, or it is damaged.
            ResourceExhausted: it is larger, or exceeds a limit.
        """
        size = self.size(name)
        check_size(size, most, f"{self.where}, {name}")
        self._budget.admit_bytes(size, f"{self.where}, {name}")
        with self._open(name) as stream:
            data = bytearray(size)
            _fill(stream, memoryview(data))
        self._budget.keep(size)
        return data

    def inner(self, name: str, most: int) -> Archive:
        """Open a member that is an archive.

        Args:
            name: the name of the member.
            most: the maximum number of its bytes.

        Returns:
            The archive.

        Raises:
            InvalidInput: there is no such member, or it or the archive in it is damaged.
            ResourceExhausted: it is larger, or exceeds a limit.
        """
        return Archive(io.BytesIO(self.read(name, most)), f"{self.where}, {name}", self.code)

    def _info(self, name: str) -> zipfile.ZipInfo:
        if name not in self._members:
            raise InvalidInput(f"{self.where}: it has no member {name!r}", code=self.code)
        return self._members[name]

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        info = self._info(name)
        with typed(f"{self.where}, {name[:200]!r}", self.code), self._pack.open(info) as stream:
            yield stream


@contextmanager
def open_archive(path: str | os.PathLike[str], code: str) -> Iterator[Archive]:
    """Open a zip archive.

    Args:
        path: the path of the file.
        code: the code of an error about it.

    Yields:
        The archive.

    Raises:
        InvalidInput: the file cannot be read, or is not an archive.
    """
    with open_file(path, code) as file:
        yield Archive(file, shown_path(path), code)


MEMBER = ".npy"
"""The suffix of the members of an .npz file."""

_AS_BYTES = (dtypes.HALVES | dtypes.FLOAT8) - {np.dtype(np.float16)}
"""The dtypes that NumPy writes as bytes, each of which is a value."""


class Arrays:
    """The arrays of an .npz file, by name.

    Attributes:
        where: what the file is, for messages.
        names: the names, in order.
    """

    def __init__(self, archive: Archive) -> None:
        """Check that each member of an archive is an array.

        Args:
            archive: the archive.

        Raises:
            InvalidInput: a member is not a .npy file.
        """
        self.where = archive.where
        self._archive = archive
        other = [n for n in archive.names if not n.endswith(MEMBER)]
        if other:
            raise InvalidInput(f"{archive.where}: the member {other[0][:200]!r} is not a .npy file", code=archive.code)
        self.names = tuple(n.removesuffix(MEMBER) for n in archive.names)

    def header(self, name: str, want: np.dtype[Any] | None = None) -> Header:
        """Read the shape and dtype of an array.

        Args:
            name: the name of the array.
            want: the expected dtype, as for `Archive.header`.

        Returns:
            The shape and the dtype.

        Raises:
            InvalidInput: there is no such array, or its header is damaged.
        """
        return self._archive.header(name + MEMBER, want)

    def __getitem__(self, name: str) -> np.ndarray:
        """Read an array; raises as `Archive.array`."""
        return self._archive.array(name + MEMBER)

    def array(self, name: str, want: np.dtype[Any] | None) -> np.ndarray:
        """Read an array.

        Args:
            name: the name of the array.
            want: the expected dtype, as for `Archive.header`.

        Returns:
            The array, in native byte order.

        Raises:
            InvalidInput: as for `Archive.array`.
            ResourceExhausted: as for `Archive.array`.
        """
        return self._archive.array(name + MEMBER, want)


@contextmanager
def open_arrays(path: str | os.PathLike[str], code: str) -> Iterator[Arrays]:
    """Open an .npz file; each array is read when it is indexed.

    Args:
        path: the path of the file.
        code: the code of an error about it.

    Yields:
        The arrays.

    Raises:
        InvalidInput: the file cannot be read, or is not an .npz file.
    """
    with open_file(path, code) as file:
        with typed(shown_path(path), code):
            start = file.read(4)
        if not start.startswith(b"PK"):
            hint = "np.savez(path, NAME=array) writes one; a column of a table is an array, too"
            raise InvalidInput(f"{shown_path(path)} must be an .npz file, which is a zip archive of arrays", code=code, hint=hint)
        yield Arrays(Archive(file, shown_path(path), code))


# --- streams ----------------------------------------------------------------------------------------------------------


class _Bounded:
    """A file whose reads are bounded, so that the directory of an archive cannot take any amount of memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.most: int | None = DIRECTORY
        self.file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if self.most is not None and size > self.most:
            raise ValueError(f"the directory of the archive has {size} bytes; the limit is {self.most}")
        return self.file.read(size)


def _header(stream: IO[bytes], want: np.dtype[Any] | None = None) -> tuple[tuple[int, ...], np.dtype[Any], bool, int]:
    """The shape, the dtype, whether the order is Fortran's, and the length of the header."""
    start = stream.read(12)
    if len(start) < 12 or start[:6] != b"\x93NUMPY":
        raise ValueError("not a .npy file")
    version = (start[6], start[7])
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"the version of a .npy file must be 1.0 or 2.0, got {version[0]}.{version[1]}")
    short = version == (1, 0)
    length = int.from_bytes(start[8 : 10 if short else 12], "little")
    if length > HEADER:
        raise ValueError(f"the header of an array must have at most {HEADER} bytes, got {length}")
    prefix = 10 if short else 12
    text = stream.read(length - (12 - prefix))
    read = np.lib.format.read_array_header_1_0 if short else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(io.BytesIO(start[8:] + text))
    if any(d < 0 for d in shape):
        raise ValueError(f"an array has a negative size: {shape}")
    if want in _AS_BYTES and dtype == np.dtype((np.void, want.itemsize)):
        dtype = want
        return tuple(map(int, shape)), dtype, bool(fortran), prefix + length
    plain = dtype.kind in "SU" or (dtype.kind in "biufc" and dtypes.known(dtype.newbyteorder("=")))
    if not plain or dtype.itemsize == 0:
        how = "; store texts as array.astype(str)" if dtype.kind == "O" else ""
        raise ValueError(f"an array must hold numbers, bool or strings, got the dtype {str(dtype)[:200]}{how}")
    return tuple(map(int, shape)), dtype, bool(fortran), prefix + length


def _array(stream: IO[bytes], size: int, want: np.dtype[Any] | None = None) -> np.ndarray:
    """The array in a stream of `size` bytes."""
    shape, dtype, fortran, used = _header(stream, want)
    limits.check_rank(len(shape))
    limits.admit(shape, dtype)
    count = math.prod(shape)
    if used + count * dtype.itemsize != size:
        raise ValueError(
            f"an array of {dtype!s}{list(shape)} must have {count * dtype.itemsize} bytes after its header, got {size - used}"
        )
    try:
        flat = np.empty(count, dtype)
    except MemoryError as error:
        raise ResourceExhausted(f"out of memory: {error}", code="SX601") from None
    raw = flat.view(np.uint8) if count else np.empty(0, np.uint8)
    _fill(stream, raw.data)
    _check_values(raw, dtype)
    if dtype not in _AS_BYTES and not dtype.isnative:
        flat = flat.byteswap(inplace=True).view(dtype.newbyteorder("="))
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _fill(stream: IO[bytes], into: memoryview) -> None:
    """Fill a buffer in chunks; the stream must end where the buffer does."""
    at = 0
    while at < len(into):
        piece = stream.read(min(CHUNK, len(into) - at))
        if not piece:
            raise EOFError(f"{len(into)} bytes are declared, and the data end after {at}")
        into[at : at + len(piece)] = piece
        at += len(piece)
    if stream.read(1):
        raise ValueError(f"{len(into)} bytes are declared, and more follow")


def _check_values(raw: np.ndarray, dtype: np.dtype[Any]) -> None:
    """Refuse bytes that are not values of the dtype."""
    if not raw.size:
        return
    if dtype.kind == "b" and raw.max() > 1:
        raise ValueError("a bool must be 0 or 1")
    if dtype.kind == "U":
        points = raw.view(dtype.str[0] + "u4")
        if ((points > 0x10FFFF) | ((points >= 0xD800) & (points < 0xE000))).any():
            raise ValueError("a string has a code point that is not Unicode's")


def check_size(size: int, most: int, what: str) -> None:
    """Raise ResourceExhausted (SX600) for what is larger than `most` bytes."""
    if size > most:
        raise ResourceExhausted(f"{what} has {limits.format_bytes(size)}; the limit is {limits.format_bytes(most)}", code="SX600")


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as messages have it."""
    return str(Path(os.fsdecode(path)))
