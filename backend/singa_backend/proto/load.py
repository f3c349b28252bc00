"""Load a model, completely or without its large tensors.

`open_light` replaces the data of large tensors by references to their place in the file: a model of 500 MB takes a few hundred
kilobytes of memory, and each weight is read when it is needed.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, load_model_from_string, numpy_helper

from .. import limits
from ..errors import InvalidModel
from . import tensor_data
from .save import tensors

LONG = 1024
"""Tensors of more bytes than this stay in the file."""

MAPPED = 1 << 16
"""Tensors of more bytes than this are not copied from a model file that is mapped into memory."""

SMALL = 1 << 20
"""Model files of at most this many bytes are read completely."""

ModelSource: TypeAlias = ModelProto | bytes | bytearray | memoryview | str | os.PathLike[str]
"""A model: a ModelProto, its serialized bytes, or the path of its file."""

Rules = dict[int, Any]

# The field numbers of onnx.proto that lead from a ModelProto to its tensors.  An empty dict marks a TensorProto.
_TENSOR: Rules = {}
_GRAPH: Rules = {5: _TENSOR}  # initializer
_GRAPH[1] = {5: {5: _TENSOR, 6: _GRAPH}}  # node.attribute: t, g
_MODEL: Rules = {7: _GRAPH}
_OUTER: Rules = {7: {5: _TENSOR, 1: {5: {5: _TENSOR}}}}
"""The tensors of the outer graph only."""
_RAW_DATA = 9 << 3 | 2
"""The tag of TensorProto.raw_data."""


def open_light(model: ModelSource, *, small: int = SMALL) -> tuple[ModelProto, Path | None]:
    """Load a model as `load_model` does, but leave the large tensors of a file in the file.

    Args:
        model: a ModelProto, its bytes, or the path of its file.
        small: files of at most this many bytes are read completely.

    Returns:
        The ModelProto, and the folder of its external data (None if the model has no file).

    Raises:
        InvalidModel: the file cannot be opened, or is not an ONNX file.
        ResourceExhausted: the file is larger than `Limits.model_bytes`.
    """
    if not isinstance(model, (str, os.PathLike)):
        return load_model(model)
    path = Path(os.path.realpath(model))
    try:
        status = path.stat()
    except OSError:
        return load_model(model)  # raises the appropriate error
    limit = limits.current().limits.model_bytes
    if not small < status.st_size <= limit or status.st_nlink != 1:  # external data must not be in a file with a second name
        return load_model(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            proto = load_model_from_string(b"".join(_strip(data, 0, len(data), _MODEL, path.name)))
    except (
        OSError,
        ValueError,
        DecodeError,
        RecursionError,
    ):  # `load_model` reports the reason
        return load_model(path)
    return proto, path.parent


def map_model(model: ModelSource) -> tuple[ModelProto, Path | None, tensor_data.ModelFile | None]:
    """Load a model as `load_model` does, but leave the large tensors of its graph in the file, which is mapped into memory.

    Files of at most `SMALL` bytes, and subgraphs and functions, whose tensors definitions read in every run, are read completely.

    Args:
        model: a ModelProto, its bytes, or the path of its file.

    Returns:
        The ModelProto, the folder of its external data (None if the model has no file), and the file that `tensor` needs to
        read the tensors (None if all are in the ModelProto).

    Raises:
        InvalidModel: the file cannot be opened, or is not an ONNX file.
        ResourceExhausted: the file is larger than `Limits.model_bytes`.
    """
    if isinstance(model, (str, os.PathLike)) and hasattr(mmap.mmap, "madvise"):
        try:
            path = Path(model)
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and SMALL < status.st_size <= limits.current().limits.model_bytes:
                    found = tensor_data.ModelFile(path, file)
                    parts = _strip(found.data, 0, len(found.data), _OUTER, tensor_data.INSIDE, MAPPED)
                    proto = load_model_from_string(b"".join(parts))
                    tensor_data.release(np.frombuffer(found.data, np.uint8))
                    if proto.HasField("graph"):
                        return proto, path.resolve().parent, found
        except (OSError, ValueError, DecodeError, RecursionError):
            pass  # `load_model` reports the reason
    return *load_model(model), None


def _strip(data: mmap.mmap, at: int, end: int, rules: Rules, location: str, long: int = LONG) -> Iterator[bytes]:
    """The message in data[at:end], with references in place of the raw_data of its tensors of more than `long` bytes."""
    for tag, start, body, stop in _fields(data, at, end):
        inner = rules.get(tag >> 3) if tag & 7 == 2 else None
        if inner is None or stop - body <= long:
            yield data[start:stop]
            continue
        if inner is _TENSOR:
            rest = _tensor(data, body, stop, location, long)
        else:
            rest = b"".join(_strip(data, body, stop, inner, location, long))
        yield _write_varint(tag) + _write_varint(len(rest)) + rest


def _tensor(data: mmap.mmap, at: int, end: int, location: str, long: int) -> bytes:
    rest: list[bytes] = []
    raw: tuple[int, int] | None = None
    for tag, start, body, stop in _fields(data, at, end):
        if tag == _RAW_DATA and stop - body > long:
            raw = (body, stop - body)
        else:
            rest.append(data[start:stop])
    if raw is None:
        return b"".join(rest)
    proto = TensorProto.FromString(b"".join(rest))
    if proto.data_location == TensorProto.EXTERNAL:
        return b"".join(rest)
    proto.data_location = TensorProto.EXTERNAL
    del proto.external_data[:]
    for key, value in (("location", location), ("offset", str(raw[0])), ("length", str(raw[1]))):
        proto.external_data.add(key=key, value=value)
    return proto.SerializeToString()


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(tag, start, start of the content, end) of each field of the message in data[at:end]."""
    while at < end:
        start = at
        tag, body = _varint(data, at, end)
        wire = tag & 7
        if wire == 2:
            size, body = _varint(data, body, end)
            at = body + size
        elif wire == 0:
            _, at = _varint(data, body, end)
        elif wire in (1, 5):
            at = body + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field is longer than its message")
        yield tag, start, body, at


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number does not end")


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def embed(model: ModelProto, folder: Path | None) -> None:
    """Read all external data of a model into its message.

    Args:
        model: the model, which is changed.
        folder: the folder of its external data; None if it has none.

    Raises:
        InvalidModel: external data cannot be read.
        ResourceExhausted: a tensor, or all of them together, exceed a limit.
    """
    with limits.ensured() as budget:
        for tensor in tensors(model):
            if tensor.data_location == TensorProto.EXTERNAL:
                array = tensor_data.tensor(tensor, folder)
                budget.keep(array.nbytes)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def load_model(model: ModelSource) -> tuple[ModelProto, Path | None]:
    """Load a model; external data are not read.

    Args:
        model: a ModelProto, its bytes, or the path of its file.

    Returns:
        The ModelProto, and the folder of its external data (None if the model has no file).

    Raises:
        InvalidModel: the file cannot be opened, or is not an ONNX file.
        ResourceExhausted: the file is larger than `Limits.model_bytes`.
    """
    limit = limits.current().limits.model_bytes
    if isinstance(model, ModelProto):
        return model, None
    folder, place = None, ""
    data = model
    if isinstance(model, (str, os.PathLike)):
        data, folder = read_model_file(Path(model), limit)
        place = f"{os.fspath(model)}: "
    if not isinstance(data, (bytes, bytearray, memoryview)):
        hint = "pass its attribute `model`" if isinstance(getattr(model, "model", None), ModelProto) else ""
        text = f"a model must be a ModelProto, bytes or a path, got a {type(model).__name__}"
        raise InvalidModel(text, code="SX110", hint=hint)
    check_model_size(len(data), limit)
    try:
        proto = load_model_from_string(bytes(data))
    except DecodeError as error:
        raise InvalidModel(f"{place}not an ONNX file: {error}", code="SX110") from None
    if not proto.HasField("graph"):
        raise InvalidModel(f"{place}not an ONNX file: it has no graph", code="SX110")
    return proto, folder


def read_model_file(path: Path, limit: int) -> tuple[bytes, Path]:
    """Read a model file of at most `limit` bytes.

    The path may be a link, because the caller chose it.

    Args:
        path: the path of the file.
        limit: the maximum number of bytes.

    Returns:
        The bytes, and the folder of the file.

    Raises:
        InvalidModel: the file cannot be opened.
        ResourceExhausted: the file is larger than the limit.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe without a writer must not block
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidModel(f"{path} is not a plain file", code="SX110")
            check_model_size(status.st_size, limit)
            return file.read(status.st_size), path.resolve().parent
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, OSError):
            limits.raise_shortage(str(path), error)
        raise InvalidModel(f"{path}: {getattr(error, 'strerror', '') or error}", code="SX110") from None


def check_model_size(size: int, limit: int) -> None:
    """Check the size of a model file.

    Args:
        size: the bytes of the file.
        limit: the bytes that it may have.

    Raises:
        ResourceExhausted: the file is larger (SX610).
    """
    if size > limit:
        what = f"the model file has {limits.format_bytes(size)}; the limit is {limits.format_bytes(limit)}"
        raise limits.exhausted("model_bytes", "SX610", what)
