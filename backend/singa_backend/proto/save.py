"""Write a model to a file, completely or not at all: to a temporary folder, checked there, and then moved to its place.

save(model, Path("out.onnx"), folder=Path("in"))     # the model's external data are in `in`; they are copied to out.onnx.data
save(model, Path("out.onnx"), arrays=arrays)         # tensors of `defer_data` are written from memory, without a copy
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from .. import dtypes
from ..errors import InvalidInput, InvalidModel
from . import tensor_data
from .checker import require_valid
from .messages import graphs

ALIGNED = 4096
"""Each tensor begins at a multiple of this offset, so that it can be mapped into memory."""

INLINE = 1 << 10
"""Tensors of fewer bytes stay in the model file: shape inference reads shapes from them."""

LARGEST = (1 << 31) - (1 << 20)
"""Maximum bytes of a model file; a larger model is written with external data."""

DEFERRED = 1 << 20
"""Arrays of at least this many bytes are not copied into their TensorProto until their destination is known."""

CHUNK = 1 << 22


def defer_data(array: np.ndarray, name: str, arrays: dict[str, np.ndarray]) -> TensorProto:
    """The TensorProto of an array; that of a large one has no data: `arrays` keeps the array, for `attach_data` and `save`."""
    dtype = array.dtype
    plain = dtype != dtypes.STRING and tensor_data.byte_size(dtype, array.shape) == array.nbytes and array.flags.c_contiguous
    if array.nbytes < DEFERRED or not plain or sys.byteorder != "little":
        return numpy_helper.from_array(array, name)
    arrays[name] = array
    return TensorProto(name=name, data_type=dtypes.onnx_code(dtype), dims=array.shape, data_location=TensorProto.EXTERNAL)


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
) -> list[Path]:
    """Write a model to `path`, and its external data, if it has any, to one file next to it; returns the written paths.

    Args:
        model: the model, which is changed: its external tensors refer to the new file.
        path: the file to write.
        folder: the folder of the external data of `model`.
        check: run onnx's checker, with full_check, before the file is moved to its place.
        external: whether weights are written to a separate file; None if they were before, or if one file cannot hold them.
        arrays: the data of the tensors that `defer_data` returned.
        warnings: a list that receives what the checker could not check.
        verify: called with the complete file before it is moved to its place; an error leaves nothing behind.

    Raises:
        InvalidInput: the file cannot be written; no partial file remains.
        InvalidModel: the checker refuses the model or does not answer; nothing was written.
    """
    arrays = arrays or {}
    outside = [t for t in tensors(model) if t.data_location == TensorProto.EXTERNAL and not _is_deferred(t, arrays)]
    try:
        with staged(path) as stage:
            size = model.ByteSize() + sum(arrays[t.name].nbytes for t in model.graph.initializer if _is_deferred(t, arrays))
            if external is False and size > LARGEST:
                raise InvalidInput(f"{size} bytes do not fit into one file", code="SX352", hint="pass external_data=True")
            if external or (external is None and (outside or size > LARGEST)):
                taken = {e.value for t in outside for e in t.external_data if e.key == "location"}
                _externalize(model, stage / _free(f"{path.name}.data", taken), folder, arrays)
            attach_data(model.graph, arrays)
            (stage / path.name).write_bytes(model.SerializeToString())
            if check and (warning := require_valid(model)) and warnings is not None:
                warnings.append(warning)
            if verify is not None:
                verify(stage / path.name)
            written = [path.parent / part.name for part in _parts(stage, path)]
        return written[::-1]
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror or error}", code="SX351") from None


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A folder next to `path`; if the body succeeds, its files are moved next to `path`, the one of that name last.

    Raises OSError if a file cannot be moved; the folder is deleted in any case.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as name:
        stage = Path(name)
        yield stage
        parts = _parts(stage, path)
        if any((path.parent / part.name).is_dir() for part in parts):
            raise IsADirectoryError(None, "there is a folder of that name")
        for part in parts:
            os.replace(part, path.parent / part.name)


def _parts(stage: Path, path: Path) -> list[Path]:
    """The files of a stage, the model last: it refers to the data."""
    return sorted(stage.iterdir(), key=lambda part: part.name == path.name)


def _free(name: str, taken: set[str]) -> str:
    """A file name that the external data of the source model do not use: they may be in the same folder."""
    stem, i, found = name.removesuffix(".data"), 0, name
    while found in taken:
        i += 1
        found = f"{stem}.{i}.data"
    return found


def _externalize(model: ModelProto, target: Path, folder: Path | None, arrays: Mapping[str, np.ndarray]) -> None:
    """Move every tensor that is not small to one file, in chunks."""
    with target.open("wb") as out:
        for tensor in tensors(model):
            size = _size(tensor)
            if _is_deferred(tensor, arrays):
                _align(out)
                out.write(arrays[tensor.name].reshape(-1).view(np.uint8).data)
            elif tensor.data_location == TensorProto.EXTERNAL:
                with tensor_data.opened(tensor, folder, size) as source:
                    if size < INLINE:
                        raw = source.read(size)
                    else:
                        _copy(source, out, size, tensor.name)
                if size < INLINE:
                    tensor.raw_data, tensor.data_location = raw, TensorProto.DEFAULT
                    del tensor.external_data[:]
                    continue
            elif size >= INLINE and tensor.HasField("raw_data"):
                _align(out)
                out.write(tensor.raw_data)
                tensor.ClearField("raw_data")
                tensor.data_location = TensorProto.EXTERNAL
            else:
                continue
            del tensor.external_data[:]
            for key, value in (("location", target.name), ("offset", out.tell() - size), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))


def _align(out: BinaryIO) -> None:
    out.write(b"\0" * (-out.tell() % ALIGNED))


def _copy(source: BinaryIO, out: BinaryIO, size: int, name: str) -> None:
    _align(out)
    left = size
    while left:
        piece = source.read(min(left, CHUNK))
        if not piece:
            raise InvalidModel(f"the external data of tensor {name!r} shrank while they were read", code="SX105")
        out.write(piece)
        left -= len(piece)


def _size(tensor: TensorProto) -> int:
    """The bytes of a tensor's packed data; 0 if it has none (strings, unknown types)."""
    if not dtypes.is_known(tensor.data_type) or dtypes.numpy_dtype(tensor.data_type) == dtypes.STRING:
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
