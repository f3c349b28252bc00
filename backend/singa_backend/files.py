"""Tensors out of a model file, each length checked, external data read only from beneath the model's folder."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
from onnx import SparseTensorProto, TensorProto, numpy_helper

from . import dtypes
from .errors import InvalidModel

_BITS: dict[np.dtype[Any], int] = dict.fromkeys(dtypes.FLOAT4, 4) | {d: int(d.name.lstrip("uint")) for d in dtypes.SUB_BYTE_INTS}
_FIELDS: dict[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("float_data", 1), TensorProto.COMPLEX64: ("float_data", 2),
    TensorProto.DOUBLE: ("double_data", 1), TensorProto.COMPLEX128: ("double_data", 2),
    TensorProto.INT64: ("int64_data", 1), TensorProto.STRING: ("string_data", 1),
    TensorProto.UINT32: ("uint64_data", 1), TensorProto.UINT64: ("uint64_data", 1),
}  # fmt: skip


def byte_size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Bytes of a packed tensor of this dtype and shape: 4-bit values take half a byte each."""
    bits: int = _BITS.get(dtype, dtype.itemsize * 8)
    return (math.prod(shape) * bits + 7) // 8


def tensor(proto: TensorProto, folder: Path | None) -> np.ndarray:
    """The array of a TensorProto, strings as an object array of str.

    folder: the model's folder, beneath which external data may lie; None refuses external data.
    Raises InvalidModel when dims, type and data do not fit together.
    """
    name = proto.name or "(unnamed)"
    dims = tuple(proto.dims)
    if any(d < 0 for d in dims):
        raise InvalidModel(f"tensor {name!r} has a negative dimension: {dims}", code="SX104")
    if proto.data_type == TensorProto.UNDEFINED or proto.data_type not in TensorProto.DataType.values():
        raise InvalidModel(f"tensor {name!r} has the unknown element type {proto.data_type}", code="SX104")
    dtype = dtypes.numpy_dtype(proto.data_type)
    if proto.data_location == TensorProto.EXTERNAL:
        return _unpack(_external(proto, folder, byte_size(dtype, dims)), dtype, dims)
    if proto.HasField("raw_data"):
        need = byte_size(dtype, dims)
        if dtype == dtypes.STRING or len(proto.raw_data) != need:
            raise InvalidModel(f"tensor {name!r} {dtypes.onnx_name(dtype)}{list(dims)} needs {need} bytes; "
                               f"the file has {len(proto.raw_data)}", code="SX104")  # fmt: skip
        return _unpack(proto.raw_data, dtype, dims)
    field, per_value = _FIELDS.get(proto.data_type, ("int32_data", 1))
    have, need = len(getattr(proto, field)), math.prod(dims) * per_value
    if dtype in _BITS:
        need = byte_size(dtype, dims)
    if have != need:
        raise InvalidModel(f"tensor {name!r} {dtypes.onnx_name(dtype)}{list(dims)} needs {need} values in {field}; "
                           f"the file has {have}", code="SX104")  # fmt: skip
    try:
        array = np.asarray(numpy_helper.to_array(proto))
    except UnicodeDecodeError as error:
        raise InvalidModel(f"tensor {name!r} holds a string that is not UTF-8: {error}", code="SX104") from None
    return array.astype(object) if dtype == dtypes.STRING else array


def _unpack(data: Any, dtype: np.dtype[Any], dims: tuple[int, ...]) -> np.ndarray:
    bits = _BITS.get(dtype)
    if bits is None:
        return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(dims)
    count = math.prod(dims)
    packed = np.frombuffer(data, np.uint8)
    parts = np.stack([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1).reshape(-1)[:count]
    if dtype in dtypes.FLOAT4:
        return parts.view(dtype).reshape(dims)
    if dtype.name.startswith("int"):
        parts = ((parts ^ (1 << (bits - 1))).astype(np.int8) - (1 << (bits - 1))).astype(np.int8)
    return parts.astype(dtype).reshape(dims)


def sparse(proto: SparseTensorProto, folder: Path | None) -> np.ndarray:
    """The dense array of a SparseTensorProto, indices linear or by coordinates; raises InvalidModel."""
    name = proto.values.name or "(unnamed)"
    dims = tuple(proto.dims)
    if any(d < 0 for d in dims):
        raise InvalidModel(f"sparse tensor {name!r} has a negative dimension: {dims}", code="SX104")
    values, at = tensor(proto.values, folder), tensor(proto.indices, folder)
    flat = np.zeros(math.prod(dims), values.dtype)
    if values.ndim != 1 or at.shape[:1] != values.shape or at.ndim not in (1, 2) or (at.ndim == 2 and at.shape[1] != len(dims)):
        raise InvalidModel(f"sparse tensor {name!r}: values {values.shape} and indices {at.shape} do not fit dims {dims}",
                           code="SX104")  # fmt: skip
    try:
        linear = at if at.ndim == 1 else np.ravel_multi_index(tuple(at.T), dims)
        if linear.size and linear.min() < 0:
            raise IndexError("negative index")
        flat[linear] = values
    except (ValueError, IndexError) as error:
        raise InvalidModel(f"sparse tensor {name!r}: {error}", code="SX104") from None
    return flat.reshape(dims)


def _external(proto: TensorProto, folder: Path | None, size: int) -> bytes:
    """The bytes of external data: opened part by part beneath the folder, no links, lengths checked on the open file."""
    entries = {e.key: e.value for e in proto.external_data}
    name, location = proto.name, entries.get("location", "")
    if folder is None:
        raise InvalidModel(f"tensor {name!r} lies in the file {location!r}, and this model was given without its folder",
                           code="SX105", hint="prepare the model by its path")  # fmt: skip
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
    except ValueError as error:
        raise InvalidModel(f"tensor {name!r}: external data: {error}", code="SX105") from None
    if offset < 0 or length != size:
        raise InvalidModel(f"tensor {name!r}: external data at offset {offset}, {length} bytes, where {size} are needed",
                           code="SX105")  # fmt: skip
    parts = location.split("/")
    if not location or location.startswith("/") or "\\" in location or "\0" in location or {"..", "."} & set(parts):
        raise InvalidModel(f"tensor {name!r}: external data location {location!r} leaves the model's folder", code="SX105")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts:
                last = part is parts[-1]
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | (0 if last else os.O_DIRECTORY)
                inner = os.open(part, flags, dir_fd=handle)
                os.close(handle)
                handle = inner
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise InvalidModel(
                    f"tensor {name!r}: {location!r} is not a plain file of its own (a link, a device?)", code="SX105"
                )
            if offset + length > status.st_size:
                raise InvalidModel(f"tensor {name!r}: {location!r} has {status.st_size} bytes; {offset + length} are needed",
                                   code="SX105")  # fmt: skip
            with os.fdopen(os.dup(handle), "rb") as file:
                file.seek(offset)
                return file.read(length)
        finally:
            os.close(handle)
    except OSError as error:
        raise InvalidModel(f"tensor {name!r}: external data {location!r}: {error.strerror}", code="SX105") from None
