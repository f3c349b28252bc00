"""The file of onnxruntime's adapters, `.onnx_adapter`: named tensors in FlatBuffers.

The root is a table (format version, adapter version, model version, parameters); a parameter is a table (name, sizes, element
type, bytes).  A table begins with the distance to its vtable, which has the place of each field; an offset counts from its place.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import dtypes
from ..errors import InvalidInput
from ..io.archives import read_bytes
from ..io.files import write_bytes
from ..io.places import StrPath
from ..limits import check_rank

FILE = "SX982"
"""The code of an error in a file."""

MAGIC = b"TORT"
_FORMAT = 1
_MOST = 1 << 31
"""FlatBuffers has offsets of 31 bits."""


def read_parameters(path: StrPath) -> dict[str, np.ndarray]:
    """Read the tensors of a file.

    Args:
        path: the path of the file.

    Returns:
        The tensors by name.

    Raises:
        InvalidInput: the file is damaged, is of a newer format, or is not an adapter of onnxruntime (SX982).
    """
    data = read_bytes(path, FILE)
    if data[4:8] != MAGIC:
        raise _damaged(path, "it does not begin as an adapter of onnxruntime")
    try:
        return _tensors(_Table(data, _offset(data, 0)))
    except (struct.error, ValueError, OverflowError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from None


def write_parameters(path: StrPath, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as a file that `onnxruntime.LoraAdapter` loads, whole or not at all.

    Args:
        path: the path of the file.
        tensors: the tensors by name.

    Raises:
        InvalidInput: they have 2 GiB or more, or one has no axis (SX982), or the file cannot be written (SX351).
    """
    write_bytes(path, flat_bytes(tensors), parents=False)


def flat_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of such a file.

    Args:
        tensors: the tensors by name.

    Returns:
        The content.

    Raises:
        InvalidInput: they have 2 GiB or more, or one has no axis (SX982).
    """
    scalar = next((n for n, x in tensors.items() if not x.ndim), None)
    if scalar is not None:
        raise InvalidInput(f"a tensor of an adapter of onnxruntime must have an axis, {scalar!r} has none", code=FILE)
    if sum(x.nbytes + len(n) + 128 for n, x in tensors.items()) >= _MOST:
        raise InvalidInput("an adapter of onnxruntime must have less than 2 GiB", code=FILE)
    out = bytearray(struct.pack("<I4s", 28, MAGIC))
    out += struct.pack("<6H", 12, 20, 4, 8, 12, 16)  # vtable: its size, that of the table, the places of four fields
    out += bytes(8)  # the table begins at 28
    out += struct.pack("<i3iI", 28 - 8, _FORMAT, 1, 1, 4)
    out += struct.pack("<I", len(tensors)) + bytes(4 * len(tensors))
    first = len(out) - 4 * len(tensors)
    for i, (name, array) in enumerate(tensors.items()):
        _pad(out, 4)
        vtable = len(out)
        out += struct.pack("<6H", 12, 20, 4, 8, 12, 16)
        table = len(out)
        struct.pack_into("<I", out, first + 4 * i, table - (first + 4 * i))
        out += struct.pack("<iIIiI", table - vtable, 0, 0, dtypes.onnx_code(array.dtype), 0)
        text = name.encode()
        for place, align, count, content in (
            (4, 4, len(text), text + b"\0"),
            (8, 8, array.ndim, struct.pack(f"<{array.ndim}q", *array.shape)),
            (16, 8, array.nbytes, np.ascontiguousarray(array).tobytes()),
        ):
            _pad(out, align, 4)
            struct.pack_into("<I", out, table + place, len(out) - (table + place))
            out += struct.pack("<I", count) + content
    _pad(out, 8)
    return bytes(out)


def _pad(out: bytearray, align: int, after: int = 0) -> None:
    """Add zeros until what follows `after` more bytes is aligned."""
    out += bytes(-(len(out) + after) % align)


class _Table:
    """A table in a file that is not trusted: every read is checked."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.vtable = at - int(struct.unpack_from("<i", data, at)[0])
        if self.vtable < 0:
            raise ValueError("a table lacks its vtable")
        self.size = int(struct.unpack_from("<H", data, self.vtable)[0])

    def place(self, field: int) -> int:
        """The place of a field; 0 if it is absent."""
        if 6 + 2 * field > self.size:
            return 0
        found = int(struct.unpack_from("<H", self.data, self.vtable + 4 + 2 * field)[0])
        return self.at + found if found else 0

    def integer(self, field: int) -> int:
        place = self.place(field)
        return int(struct.unpack_from("<i", self.data, place)[0]) if place else 0

    def vector(self, field: int, width: int) -> tuple[int, int]:
        """The begin and the number of elements of a vector of elements of this width."""
        place = self.place(field)
        if not place:
            return 0, 0
        at = _offset(self.data, place)
        count = int(struct.unpack_from("<I", self.data, at)[0])
        if at + 4 + count * width > len(self.data):
            raise ValueError("a vector ends beyond the file")
        return at + 4, count


def _offset(data: bytes, place: int) -> int:
    return place + int(struct.unpack_from("<I", data, place)[0])


def _tensors(root: _Table) -> dict[str, np.ndarray]:
    if root.integer(0) != _FORMAT:
        raise ValueError(f"its format is {root.integer(0)}, and {_FORMAT} is known")
    begin, count = root.vector(3, 4)
    found: dict[str, np.ndarray] = {}
    total = 0
    for place in range(begin, begin + 4 * count, 4):
        table = _Table(root.data, _offset(root.data, place))
        at, size = table.vector(0, 1)
        total += size
        _check_total(total, root.data)
        name = root.data[at : at + size].decode()
        at, rank = table.vector(1, 8)
        check_rank(rank)
        shape = struct.unpack_from(f"<{rank}q", root.data, at)
        code = table.integer(2)
        if not name or name in found or not dtypes.is_code(code):
            raise ValueError(f"parameter {name!r} is there twice, or has no name, or has the unknown type {code}")
        dtype: np.dtype[Any] = dtypes.numpy_dtype(code)
        at, size = table.vector(3, 1)
        total += size
        _check_total(total, root.data)
        if not dtypes.is_float(dtype) or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"parameter {name!r} must have floats for its sizes {list(shape)}, got {size} bytes")
        found[name] = (
            np.frombuffer(root.data, dtype, math.prod(shape), at).reshape(shape).copy() if size else np.zeros(shape, dtype)
        )
    return found


def _check_total(size: int, data: bytes) -> None:
    """Raise ValueError if parameters share their bytes, so that they are larger than the file."""
    if size > len(data):
        raise ValueError("its parameters are larger than the file")


def _damaged(path: StrPath, text: str) -> InvalidInput:
    hint = "onnxruntime.AdapterFormat and `sonnx adapter` write such files"
    return InvalidInput(f"{Path(path)} is not an adapter of onnxruntime, or is damaged: {text}", code=FILE, hint=hint)
