"""Write a model to a file, completely or not at all: to a temporary folder, checked there, and then moved to its place.

save(model, Path("out.onnx"), folder=Path("in"))     # the model's external data are in `in`; they are copied to out.onnx.data
save(model, Path("out.onnx"), arrays=arrays)         # tensors of `without_data` are written from memory, without a copy
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from .. import dtypes
from ..errors import InvalidInput, InvalidModel, SonnxError
from ..io import files, places
from . import tensor_data
from .messages import graphs

ALIGNED = 4096
"""Each tensor begins at a multiple of this offset, so that it can be mapped into memory."""

INLINE = 1 << 10
"""Tensors of fewer bytes stay in the model file: shape inference reads shapes from them."""

LARGEST = (1 << 31) - (1 << 20)
"""Maximum bytes of a model file; a larger model is written with external data."""

LARGE = 1 << 20
"""Arrays of at least this many bytes are not copied into their TensorProto until their destination is known."""

CHUNK = 1 << 22


def is_deferrable(array: np.ndarray) -> bool:
    """Whether the data of an array need not be copied until their destination is known."""
    dtype = array.dtype
    plain = dtype != dtypes.STRING and tensor_data.byte_size(dtype, array.shape) == array.nbytes and array.flags.c_contiguous
    return array.nbytes >= LARGE and plain and sys.byteorder == "little"


def without_data(array: np.ndarray, name: str) -> TensorProto:
    """The TensorProto of an array without the data, which `attach_data` and `save` take from their `arrays`."""
    code = dtypes.onnx_code(array.dtype)
    return TensorProto(name=name, data_type=code, dims=array.shape, data_location=TensorProto.EXTERNAL)


def attach_data(graph: GraphProto, arrays: Mapping[str, np.ndarray]) -> None:
    """Copy the data of large tensors into the message."""
    for tensor in graph.initializer:
        if _is_deferred(tensor, arrays):
            tensor.raw_data, tensor.data_location = arrays[tensor.name].tobytes(), TensorProto.DEFAULT


def _is_deferred(tensor: TensorProto, arrays: Mapping[str, np.ndarray]) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL and not tensor.external_data and tensor.name in arrays


def save(
    model: ModelProto,
    path: Path,
    *,
    folder: Path | None = None,
    check: bool = True,
    external: bool | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
    warnings: list[str] | None = None,
    verify: Callable[[Path], object] | None = None,
    source: ModelProto | None = None,
) -> list[Path]:
    """Write a model to `path`, and its external data, if it has any, to one file next to it; returns the written paths.

    The data go to `path`.data, or, if there is such a file, to `path`.1.data and so on: the model that is replaced may need that
    file until it is replaced.  Afterwards its file of data is removed, if it has such a name.

    Args:
        model: the model, which is changed: its external tensors refer to the new file.
        path: the file to write.
        folder: the folder of the external data of `model`.
        check: run onnx's checker, with full_check, before the file is moved to its place.
        external: whether weights are written to a separate file; None if they were before, or if one file cannot hold them.
        arrays: the data of the tensors that `without_data` returned.
        warnings: a list that receives what the checker could not check.
        verify: called with the complete file before it is moved to its place; after an error nothing of it is left.
        source: the model that was read, if `model` was computed from one: a fault that it has too is a warning.

    Raises:
        InvalidInput: the file cannot be written; the old one remains.
        InvalidModel: the checker refuses the model or does not answer; nothing was written.
    """
    arrays = arrays or {}
    outside = [t for t in tensors(model) if t.data_location == TensorProto.EXTERNAL and not _is_deferred(t, arrays)]
    with files.staged(path) as stage:
        size = model.ByteSize() + sum(arrays[t.name].nbytes for t in model.graph.initializer if _is_deferred(t, arrays))
        if stage.through and external is None:
            external = False  # there is no place next to a device
        size += sum(map(_size, outside)) if external is False else 0
        if external is False and size > LARGEST:
            raise InvalidInput(f"{size} bytes do not fit into one file", code="SX352", hint="pass external_data=True")
        name = stage.target.name
        written = [path]
        if external or (external is None and (outside or size > LARGEST)):
            taken = {e.value for t in outside for e in t.external_data if e.key == "location"}
            data = data_name(stage.target, taken)
            with stage.create(data) as out:
                _externalize(model, data, out, folder, arrays)
            written.append(path.parent / data)
        else:
            for tensor in outside:
                _embed(tensor, folder)
        if not stage.through:
            for old in old_data(stage.target) - set(locations(model)):
                stage.remove_later(old)
        attach_data(model.graph, arrays)
        stage.write(name, model.SerializeToString())
        if check:
            from .checker import require_valid  # starts a child process, which a reader does not need

            if (warning := require_valid(model, source)) and warnings is not None:
                warnings.append(warning)
        if verify is not None:
            verify(stage / name)
    return written


def data_name(target: Path, taken: Iterable[str] = ()) -> str:
    """The name of the external data of a model to be written: of no file in its folder.

    Args:
        target: the model's file.
        taken: further names that are in use.
    """
    i, name, used = 0, f"{target.name}.data", set(taken)
    while name in used or os.path.lexists(target.parent / name):
        i += 1
        name = f"{target.name}.{i}.data"
    return name


def old_data(target: Path) -> set[str]:
    """The names of the files of external data that a model in place refers to, and that were named after it by `data_name`."""
    pattern = re.compile(re.escape(target.name) + r"(\.[0-9]+)?\.data")
    try:
        if not any(pattern.fullmatch(name) for name in os.listdir(target.parent)):
            return set()
    except OSError:  # a folder that may be written to but not listed
        return set()
    return {name for name in locations_in_place(target) if pattern.fullmatch(name)}


def locations_in_place(target: Path) -> set[str]:
    """The files of external data that a model in place refers to; none if there is no model."""
    from ..io.archives import read_bytes  # it also reads archives

    try:
        return set(locations(ModelProto.FromString(read_bytes(target, "SX105")))) if places.is_regular(target) else set()
    except (OSError, SonnxError, DecodeError):
        return set()


def locations(model: ModelProto) -> Iterator[str]:
    """The files that hold external data of a model, as it names them."""
    for tensor in tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield from (e.value for e in tensor.external_data if e.key == "location")


def _externalize(model: ModelProto, name: str, out: BinaryIO, folder: Path | None, arrays: Mapping[str, np.ndarray]) -> None:
    """Move every tensor that is not small to one file of this name, in chunks."""
    for tensor in tensors(model):
        size = _size(tensor)
        if _is_deferred(tensor, arrays):
            _align(out)
            out.write(arrays[tensor.name].reshape(-1).view(np.uint8).data)
        elif tensor.data_location == TensorProto.EXTERNAL:
            if size < INLINE:
                _embed(tensor, folder)
                continue
            with tensor_data.opened(tensor, folder, size) as source:
                _copy(source, out, size, tensor.name)
        elif size >= INLINE and tensor.HasField("raw_data"):
            _align(out)
            out.write(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
        else:
            continue
        del tensor.external_data[:]
        for key, value in (("location", name), ("offset", out.tell() - size), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))


def _embed(tensor: TensorProto, folder: Path | None) -> None:
    """Move the data of a tensor from its file into the message."""
    raw = tensor_data.read_external(tensor, folder, _size(tensor))
    tensor.raw_data, tensor.data_location = raw, TensorProto.DEFAULT
    del tensor.external_data[:]


def _align(out: BinaryIO) -> None:
    out.write(b"\0" * (-out.tell() % ALIGNED))


def _copy(source: BinaryIO, out: BinaryIO, size: int, name: str) -> None:
    _align(out)
    left = size
    while left:
        try:
            piece = source.read(min(left, CHUNK))
        except OSError as error:
            raise InvalidModel(f"the external data of tensor {name!r}: {error.strerror}", code="SX105") from None
        if not piece:
            raise InvalidModel(f"the external data of tensor {name!r} shrank while they were read", code="SX105")
        out.write(piece)
        left -= len(piece)


def _size(tensor: TensorProto) -> int:
    """The bytes of a tensor's packed data; 0 if it has none (strings, unknown types)."""
    if not dtypes.is_code(tensor.data_type) or dtypes.numpy_dtype(tensor.data_type) == dtypes.STRING:
        return 0
    return (
        tensor_data.byte_size(dtypes.numpy_dtype(tensor.data_type), tuple(map(int, tensor.dims))) if math.prod(tensor.dims) else 0
    )


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initializers and attributes, those of subgraphs and functions included."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for a in node.attribute:
            if a.HasField("t"):
                yield a.t
            yield from a.tensors
        for graph in graphs(node):
            yield from _of_graph(graph)
