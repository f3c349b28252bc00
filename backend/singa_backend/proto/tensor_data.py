"""Read tensors from a model file: every length is checked, and external data are read only from within the model's folder."""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import stat
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from onnx import SparseTensorProto, TensorProto, numpy_helper

from .. import dtypes, limits
from ..errors import InvalidModel
from .source import Identity

_BITS: dict[np.dtype[Any], int] = {
    **dict.fromkeys(dtypes.FLOAT4, 4), **dict.fromkeys(dtypes.FLOAT6, 6),
    **{d: int(d.name.lstrip("uint")) for d in dtypes.SUB_BYTE_INTS},
}  # fmt: skip
_FIELDS: dict[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("float_data", 1), TensorProto.COMPLEX64: ("float_data", 2),
    TensorProto.DOUBLE: ("double_data", 1), TensorProto.COMPLEX128: ("double_data", 2),
    TensorProto.INT64: ("int64_data", 1), TensorProto.STRING: ("string_data", 1),
    TensorProto.UINT32: ("uint64_data", 1), TensorProto.UINT64: ("uint64_data", 1),
}  # fmt: skip

MAPPED = 1 << 20
"""External data of at least this many bytes are mapped into memory, so that they are read when they are used."""


def byte_size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Bytes of a packed tensor of this dtype and shape: 4-bit values take half a byte each, 6-bit values three quarters."""
    bits: int = _BITS.get(dtype, dtype.itemsize * 8)
    return (math.prod(shape) * bits + 7) // 8


COPIED = 1 << 22
"""Bytes that are copied from a mapped file before its memory is released."""

INSIDE = f"\0{os.urandom(8).hex()}"
"""Is the location of data in the model's own file, in a message from which they were removed; no file can contain it."""


class MappedFile(mmap.mmap):
    """A file that is mapped into memory.

    Attributes:
        is_owned: whether somebody may write to it.
        state: that of a model file, whose data need not be aligned.
    """

    is_owned = False
    state: FileState | None = None


class FileState:
    """An open file, and its size and time of change."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = open(os.dup(file.fileno()), "rb")  # noqa: SIM115  # closed with the last reference
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raise InvalidModel if the file has changed since it was mapped: reading what was cut off would end the process."""
        if self._now() != self._before:
            raise InvalidModel(
                f"{self._path} was overwritten after the model was prepared from it",
                code="SX110",
                hint="prepare it again; replace files by renaming, or pass the bytes to prepare",
            )


class ModelFile:
    """A model file that is mapped into memory: its weights are read when they are used.

    Attributes:
        path: its path; None for bytes.
        data: its bytes.
    """

    path: Path | None
    data: MappedFile | memoryview

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.data = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._state = self.data.state = FileState(path, file)

    def check(self) -> None:
        """Raise InvalidModel if the file has changed since it was mapped."""
        self._state.check()

    def array(self, proto: TensorProto, dtype: np.dtype[Any], dims: tuple[int, ...]) -> np.ndarray:
        """The array of a tensor whose data are in this file; it cannot be written to, and need not be aligned."""
        entries = {e.key: e.value for e in proto.external_data}
        offset, length = int(entries.get("offset", "")), int(entries.get("length", ""))
        _require_bytes(proto, dtype, dims, length)
        if dtype in _BITS or sys.byteorder != "little":
            return _unpack(self.data[offset : offset + length], dtype, dims)
        return np.frombuffer(self.data, dtype, math.prod(dims), offset).reshape(dims)


class ModelBytes(ModelFile):
    """The bytes of a model in memory, in which its weights stay."""

    def __init__(self, data: bytes) -> None:
        self.path, self.data = None, memoryview(data)

    def check(self) -> None:
        """Bytes do not change."""


class Maps:
    """The files of external data that one model has mapped into memory.

    Bytes belong to the first tensor that names them, whose owner may write to them: the writes are private to this process.  A
    tensor that overlaps an earlier one is a view of a second map of the file, which cannot be written to.

    Attributes:
        read: the identity of every file of external data that was read, by its location.
    """

    def __init__(self) -> None:
        self.read: dict[str, Identity] = {}
        self._files: dict[tuple[int, int, int], MappedFile] = {}
        self._taken: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def note(self, proto: TensorProto, file: BinaryIO) -> None:
        """Note the file of a tensor's data."""
        location = next(e.value for e in proto.external_data if e.key == "location")
        now = Identity.of(os.fstat(file.fileno()))
        if self.read.setdefault(location, now) != now:
            raise InvalidModel(f"the external data {location!r} were changed while they were read", code="SX105")

    def array(self, file: BinaryIO, size: int, dtype: np.dtype[Any]) -> np.ndarray | None:
        """The data at the file's position; None if they are to be read: they are few and overlap nothing, or cannot be mapped."""
        status, begin = os.fstat(file.fileno()), file.tell()
        first = self._take((status.st_dev, status.st_ino), begin, begin + size)
        if not size or (first and size < MAPPED):
            return None
        access = mmap.ACCESS_COPY if first else mmap.ACCESS_READ
        key = (status.st_dev, status.st_ino, access)
        try:
            if key not in self._files:
                self._files[key] = MappedFile(file.fileno(), 0, access=access)
            array = np.frombuffer(self._files[key], dtype, size // dtype.itemsize, begin)
        except (OSError, ValueError, OverflowError):  # no address space, or the file has shrunk
            return None
        if not array.flags.aligned:
            return None
        array.flags.writeable = False
        return array

    def _take(self, file: tuple[int, int], begin: int, end: int) -> bool:
        """Note that a tensor has these bytes of a file; False if an earlier one has some of them."""
        begins, ends = self._taken.setdefault(file, ([], []))  # of separate ranges, in order
        at = bisect_right(ends, begin)
        if at < len(begins) and begins[at] < end:
            return False
        begins.insert(at, begin)
        ends.insert(at, end)
        return True


def tensor(proto: TensorProto, folder: Path | None, maps: Maps | None = None, within: ModelFile | None = None) -> np.ndarray:
    """The array of a TensorProto; strings are an object array of str.

    Args:
        proto: the tensor.
        folder: the model's folder, within which external data may be; None refuses external data.
        maps: the files of external data that are mapped into memory; None reads all data now.
        within: the model's file, if data were left in it.

    Raises:
        InvalidModel: dims, type and data do not match, or external data cannot be read.
        ResourceExhausted: the tensor exceeds a limit.
    """
    name = proto.name or "(unnamed)"
    dims = tuple(proto.dims)
    if any(d < 0 for d in dims):
        raise InvalidModel(f"tensor {name!r} has a negative dimension: {dims}", code="SX104")
    if not dtypes.is_code(proto.data_type):
        raise InvalidModel(f"tensor {name!r} has the unknown element type {proto.data_type}", code="SX104")
    dtype = dtypes.numpy_dtype(proto.data_type)
    limits.admit(dims, dtype)
    if proto.data_location == TensorProto.EXTERNAL:
        if within is not None and any(e.key == "location" and e.value == INSIDE for e in proto.external_data):
            return within.array(proto, dtype, dims)
        size = byte_size(dtype, dims)
        with opened(proto, folder, size) as file:
            if maps is not None:
                maps.note(proto, file)
            if maps is not None and dtype not in _BITS and sys.byteorder == "little":
                array = maps.array(file, size, dtype)
                if array is not None:
                    return array.reshape(dims)
            return _unpack(_read(file, proto, size), dtype, dims)
    if proto.HasField("raw_data"):
        data = proto.raw_data  # protobuf copies it at each access
        _require_bytes(proto, dtype, dims, len(data))
        return _unpack(data, dtype, dims)
    field, per_value = _FIELDS.get(proto.data_type, ("int32_data", 1))
    have, need = len(getattr(proto, field)), math.prod(dims) * per_value
    if dtype in _BITS and dtype not in dtypes.FLOAT6:  # 6-bit floats are packed in raw_data only
        need = byte_size(dtype, dims)
    if have != need:
        raise InvalidModel(
            f"tensor {name!r} {dtypes.onnx_name(dtype)}{list(dims)} must have {need} values in {field}, got {have}",
            code="SX104",
        )
    return _strings(proto, dims) if dtype == dtypes.STRING else np.asarray(numpy_helper.to_array(proto))


def _require_bytes(proto: TensorProto, dtype: np.dtype[Any], dims: tuple[int, ...], length: int) -> None:
    need = byte_size(dtype, dims)
    if dtype == dtypes.STRING or length != need:
        raise InvalidModel(
            f"tensor {proto.name or '(unnamed)'!r} {dtypes.onnx_name(dtype)}{list(dims)} must have {need} bytes, got {length}",
            code="SX104",
        )


def _strings(proto: TensorProto, dims: tuple[int, ...]) -> np.ndarray:
    """Strings as an object array: NumPy's own string type would allocate the length of the longest for each."""
    array = np.empty(len(proto.string_data), object)
    try:
        array[:] = [text.decode("utf-8") for text in proto.string_data]
    except UnicodeDecodeError as error:
        raise InvalidModel(f"tensor {proto.name!r} holds a string that is not UTF-8: {error}", code="SX104") from None
    return array.reshape(dims)


def _unpack(data: Any, dtype: np.dtype[Any], dims: tuple[int, ...]) -> np.ndarray:
    bits = _BITS.get(dtype)
    if bits is None:
        return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(dims)
    count = math.prod(dims)
    packed = np.frombuffer(data, np.uint8)
    if bits == 6:  # four in three bytes: one stream of bits, the lowest first
        stream = np.unpackbits(packed, count=6 * count, bitorder="little").reshape(count, 6)
        return np.packbits(stream, axis=1, bitorder="little").reshape(-1).view(dtype).reshape(dims)
    parts = np.stack([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1).reshape(-1)[:count]
    if dtype in dtypes.FLOAT4:
        return parts.view(dtype).reshape(dims)
    if dtype.name.startswith("int"):
        parts = ((parts ^ (1 << (bits - 1))).astype(np.int8) - (1 << (bits - 1))).astype(np.int8)
    return parts.astype(dtype).reshape(dims)


def sparse(proto: SparseTensorProto, folder: Path | None, maps: Maps | None = None) -> np.ndarray:
    """The dense array of a SparseTensorProto, whose indices are linear or coordinates; raises InvalidModel."""
    name = proto.values.name or "(unnamed)"
    dims = tuple(proto.dims)
    if any(d < 0 for d in dims):
        raise InvalidModel(f"sparse tensor {name!r} has a negative dimension: {dims}", code="SX104")
    values, at = tensor(proto.values, folder, maps), tensor(proto.indices, folder, maps)
    limits.admit(dims, values.dtype)
    flat = np.zeros(math.prod(dims), values.dtype)
    if values.ndim != 1 or at.shape[:1] != values.shape or at.ndim not in (1, 2) or (at.ndim == 2 and at.shape[1] != len(dims)):
        raise InvalidModel(
            f"sparse tensor {name!r}: values {values.shape} and indices {at.shape} do not match dims {dims}", code="SX104"
        )
    try:
        linear = at if at.ndim == 1 else np.ravel_multi_index(tuple(at.T), dims)
        if linear.size and linear.min() < 0:
            raise IndexError("negative index")
        flat[linear] = values
    except (ValueError, IndexError) as error:
        raise InvalidModel(f"sparse tensor {name!r}: {error}", code="SX104") from None
    return flat.reshape(dims)


def stored(array: np.ndarray) -> np.ndarray:
    """A copy of an array as a file keeps it: strings are str."""
    if array.dtype.kind in "OSU":
        return tensor(numpy_helper.from_array(array), None)
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def owned(array: Any) -> Any:
    """An array that its owner may write to: mapped data that belong to one tensor of one model, otherwise a copy."""
    file = _file_of(array)
    if file is not None and not _memory_of(array).readonly:
        file.is_owned = True
        view = array.view()
        view.flags.writeable = True
        return view
    return array.copy()


def _memory_of(array: Any) -> Any:
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base


def _file_of(array: Any) -> MappedFile | None:
    base = _memory_of(array)
    return base.obj if isinstance(base, memoryview) and isinstance(base.obj, MappedFile) else None


def is_mapped(array: np.ndarray) -> bool:
    """Whether an array is a part of a mapped model file, or of the bytes of a model: it need not be aligned."""
    memory, file = _memory_of(array), _file_of(array)
    return file.state is not None if file is not None else isinstance(memory, memoryview) and isinstance(memory.obj, bytes)


def check_of(array: np.ndarray) -> Callable[[], None] | None:
    """What checks, before an array is read, that its model file has not changed; None if it is not in one."""
    file = _file_of(array)
    return None if file is None or file.state is None else file.state.check


def release(array: np.ndarray) -> None:
    """Let the system reuse the memory of an array in a mapped file, which is read again if it is needed again."""
    file = _file_of(array)
    if file is None or file.is_owned or not hasattr(file, "madvise"):
        return
    start = array.__array_interface__["data"][0] - np.frombuffer(file, np.uint8, 1).ctypes.data
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    if array.flags.c_contiguous or array.flags.f_contiguous:
        file.madvise(mmap.MADV_DONTNEED, begin, start + array.nbytes - begin)


def copied(source: np.ndarray, target: np.ndarray | None = None) -> np.ndarray:
    """Copy a contiguous array of a mapped file, whose memory is released on the way, to a target or a new array."""
    made = np.empty(source.shape, source.dtype) if target is None else target
    flat, out = source.reshape(-1), made.reshape(-1)
    step = COPIED // source.itemsize
    for i in range(0, flat.size, step):
        np.copyto(out[i : i + step], flat[i : i + step])
        release(flat[i : i + step])
    return made


_REASONS = {
    errno.ELOOP: "it must be a plain file, not a link",
    errno.ENOTDIR: "a part of its path is a link, or not a folder",  # what the system reports for a linked folder, too
}
"""The system's errors whose own text does not describe external data: links are not followed."""


def read_external(proto: TensorProto, folder: Path | None, size: int) -> bytes:
    """The bytes of external data; see `opened`."""
    with opened(proto, folder, size) as file:
        return _read(file, proto, size)


def _read(file: BinaryIO, proto: TensorProto, size: int) -> bytes:
    try:
        data = file.read(size)
    except OSError as error:
        raise InvalidModel(f"the external data of tensor {proto.name!r}: {error.strerror}", code="SX105") from None
    if len(data) != size:
        raise InvalidModel(f"the external data of tensor {proto.name!r} shrank while they were read", code="SX105")
    return data


@contextmanager
def opened(proto: TensorProto, folder: Path | None, size: int) -> Iterator[BinaryIO]:
    """Open the file of a tensor's external data at their first byte.

    The path is opened part by part within the folder, links are refused, and lengths are checked.

    Args:
        proto: the tensor.
        folder: the model's folder; None refuses external data.
        size: the number of bytes that the tensor needs.

    Raises:
        InvalidModel: the data cannot be read.
    """
    entries = {e.key: e.value for e in proto.external_data}
    name, location = proto.name, entries.get("location", "")
    if not all(isinstance(text, str) for pair in entries.items() for text in pair):  # protobuf returns bytes then
        raise InvalidModel(f"tensor {name!r}: the entries of its external data are not UTF-8", code="SX105")
    if folder is None:
        raise InvalidModel(
            f"the data of tensor {name!r} are in the file {location!r}, and the model was passed without its folder",
            code="SX105",
            hint="prepare the model by its path",
        )
    numbers = [entries.get("offset", "0"), entries.get("length", str(size))]
    if not all(re.fullmatch("[0-9]{1,19}", n) for n in numbers):
        raise InvalidModel(
            f"tensor {name!r}: offset and length of external data must be non-negative integers, got {numbers}", code="SX105"
        )
    offset, length = map(int, numbers)
    if length != size:
        raise InvalidModel(
            f"tensor {name!r}: external data at offset {offset} must have {size} bytes, got {length}", code="SX105"
        )
    parts = location.split("/")
    if len(parts) > 64:
        raise InvalidModel(
            f"tensor {name!r}: an external data location must have at most 64 parts, got {len(parts)}", code="SX105"
        )
    if not location or location.startswith("/") or "\\" in location or "\0" in location or {"..", "."} & set(parts):
        raise InvalidModel(f"tensor {name!r}: external data location {location!r} is outside the model's folder", code="SX105")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for i, part in enumerate(parts, 1):
                last = i == len(parts)
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | (0 if last else os.O_DIRECTORY)
                inner = os.open(part, flags, dir_fd=handle)
                os.close(handle)
                handle = inner
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise InvalidModel(
                    f"tensor {name!r}: {location!r} must be a plain file with one name, not a link or a device", code="SX105"
                )
            if offset + length > status.st_size:
                raise InvalidModel(
                    f"tensor {name!r}: {location!r} must have at least {offset + length} bytes, got {status.st_size}",
                    code="SX105",
                )
            file = os.fdopen(os.dup(handle), "rb")
        finally:
            os.close(handle)
    except OSError as error:
        what = f"tensor {name!r}: external data {location!r}"
        limits.raise_shortage(what, error)
        raise InvalidModel(f"{what}: {_REASONS.get(error.errno or 0) or error.strerror}", code="SX105") from None
    with file:  # errors of the caller, who may write what it reads, are not those of this file
        file.seek(offset)
        yield file
