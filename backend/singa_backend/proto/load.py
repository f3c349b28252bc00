"""Load a model, completely or without its large tensors.

`open_light` replaces the data of large tensors by references to their place in the file: a model of 500 MB takes a few hundred
kilobytes of memory, and each weight is read when it is needed.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, load_model_from_string, numpy_helper

from .. import limits
from ..errors import InvalidModel
from . import tensor_data, wire
from .save import tensors

LONG = 1024
"""Tensors of more bytes than this stay in the file."""

MAPPED = 1 << 16
"""Tensors of more bytes than this are not copied from a model file that is mapped into memory."""

SMALL = 1 << 20
"""Model files of at most this many bytes are read completely."""

ModelSource: TypeAlias = ModelProto | bytes | bytearray | memoryview | str | os.PathLike[str]
"""A model: a ModelProto, its serialized bytes, or the path of its file."""


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
            proto = load_model_from_string(wire.light_bytes(data, wire.EVERY, path.name, LONG))
    except (OSError, ValueError, DecodeError, RecursionError):  # `load_model` reports the reason
        return load_model(path)
    return proto, path.parent


def map_model(model: ModelSource) -> tuple[ModelProto, Path | None, tensor_data.ModelFile | None]:
    """Load a model as `load_model` does, but leave the large tensors of its graph where they are.

    A file is mapped into memory.  Models of at most `SMALL` bytes, and subgraphs and functions, whose tensors definitions read in
    every run, are read completely.

    Args:
        model: a ModelProto, its bytes, or the path of its file.

    Returns:
        The ModelProto, the folder of its external data (None if the model has no file), and the file or bytes that `tensor`
        needs to read the tensors (None if all are in the ModelProto).

    Raises:
        InvalidModel: the file cannot be opened, or is not an ONNX file.
        ResourceExhausted: the file is larger than `Limits.model_bytes`.
    """
    try:
        if (found := _in_place(model)) is not None:
            proto = load_model_from_string(wire.light_bytes(found.data, wire.OUTER, tensor_data.INSIDE, MAPPED))
            tensor_data.release(np.frombuffer(found.data, np.uint8))
            if proto.HasField("graph"):
                return proto, None if found.path is None else found.path.resolve().parent, found
    except (OSError, ValueError, DecodeError, RecursionError):
        pass  # `load_model` reports the reason
    return *load_model(model), None


def _in_place(model: ModelSource) -> tensor_data.ModelFile | None:
    """The file or bytes of a model in which its tensors can stay."""
    limit = limits.current().limits.model_bytes
    if isinstance(model, bytes):
        return tensor_data.ModelBytes(model) if SMALL < len(model) <= limit else None
    if not isinstance(model, (str, os.PathLike)) or not hasattr(mmap.mmap, "madvise"):
        return None
    path = Path(model)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe without a writer must not block
        status = os.fstat(file.fileno())
        plain = stat.S_ISREG(status.st_mode) and SMALL < status.st_size <= limit
        return tensor_data.ModelFile(path, file) if plain else None


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
