"""Read and write folders in the test_data_set layout of ONNX's test suite, and read the serialized values in them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from onnx import MapProto, ModelProto, OptionalProto, SequenceProto, TensorProto, TypeProto, ValueInfoProto

from .. import dtypes, limits
from ..errors import InvalidInput, InvalidModel
from ..io import files, places
from ..io.archives import read_bytes
from . import tensor_data

_FILE = re.compile(r"_([0-9]{1,9})\.pb")
_PART = re.compile(rf"(input|output){_FILE.pattern}")
_KEYS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


def data_set(folder: Path, model: ModelProto, *, by_name: bool = False) -> tuple[list[Any], list[Any]]:
    """The inputs and outputs in a folder of the test_data_set layout (input_0.pb, ..., output_0.pb, ...); raises InvalidInput.

    Args:
        folder: the folder.
        model: the model.
        by_name: whether the names in the files, if all are there, count before their numbers: in some published folders the
            files are in another order, and there are more of them.
    """
    graph = model.graph
    return _side(folder, "input", graph.input, by_name), _side(folder, "output", graph.output, by_name)


def _side(folder: Path, side: str, declared: Sequence[ValueInfoProto], by_name: bool) -> list[Any]:
    if not os.path.isdir(folder):
        raise InvalidInput(f"the test data must be in a folder, got {folder}", code="SX307")
    found: dict[int, Path] = {}
    for path in folder.glob(f"{side}_*.pb"):
        number = _FILE.fullmatch(path.name.removeprefix(side))
        if number is None or int(number[1]) in found:
            raise InvalidInput(f"a file of test data must be named {side}_0.pb, {side}_1.pb, ..., got {path}", code="SX307")
        found[int(number[1])] = path
    if by_name:
        named = {_name(found[i]): found[i] for i in sorted(found, reverse=True)}  # the first file of a name
        if {v.name for v in declared} <= named.keys():
            return [read_value(named[v.name], v.type) for v in declared]
    if sorted(found) != list(range(len(found))) or len(found) > len(declared):
        raise InvalidInput(
            f"{folder} must have {side}_0.pb to {side}_{len(declared) - 1}.pb for the {len(declared)} {side}s of the model, got "
            f"{len(found)} files: {', '.join(found[i].name for i in sorted(found)[:8])}",
            code="SX307",
        )
    return [read_value(found[i], declared[i].type) for i in range(len(found))]


def _name(path: Path) -> str:
    """The name of the tensor in a file; "" if it is not a tensor or has no name."""
    try:
        return TensorProto.FromString(read_bytes(path, "SX307")).name
    except DecodeError:  # reading its value reports it
        return ""


def read_value(path: Path, declared: TypeProto) -> Any:
    """The value in a .pb file, by the declared type (a tensor if it is not declared); raises InvalidInput."""
    data = read_bytes(path, "SX307")
    try:
        return value(data, declared)
    except InvalidModel as error:
        raise InvalidInput(f"{path}: {error.message}", code="SX307") from None


_MODEL, _DATA = "model.onnx", "test_data_set_0"
_MARK = b"sonnx test_data_set"
"""The producer that the beginning of a written model names; a later part of the message may name another one."""


def check_folder(folder: Path) -> None:
    """Refuse a folder to which `write` cannot write, or that has a model or data that `write` has not written.

    Args:
        folder: the folder, which may have other files.

    Raises:
        InvalidInput: a file cannot be written, or would replace another one (SX351).
    """
    places.check_folder_of(folder, [_MODEL], _MARK)
    data = folder / _DATA
    if not os.path.lexists(data):
        return
    if not _is_written(folder):
        error = FileExistsError(errno.EEXIST, "there are data that this program has not written; pass a new folder")
        raise places.refused(data, error)
    places.check_folder_of(data, filter(_PART.fullmatch, files.names_in(data)), b"")


def _is_written(folder: Path) -> bool:
    """Whether a folder has a model that `write` has written, and its data in a folder that is not a link."""
    return os.path.lexists(folder / _MODEL) and not os.path.islink(folder / _DATA)


def free_folder(folder: Path) -> Path:
    """Return a folder of this name, or with a number, to which `write` can write; raises InvalidInput (SX351).

    Args:
        folder: the preferred folder, whose name the user has not chosen.
    """
    try:
        check_folder(folder)
    except InvalidInput:
        return folder.with_name(places.free_name(folder.parent, folder.name))
    return folder


def write(folder: Path, model: ModelProto, parts: Mapping[str, bytes]) -> None:
    """Write model.onnx and test_data_set_0 to a folder, which is whole if it is new.

    Args:
        folder: the folder.
        model: the model.
        parts: the serialized inputs and outputs by their file names; other inputs and outputs are removed.

    Raises:
        InvalidInput: as `check_folder`; or a file cannot be written (SX351).
    """
    check_folder(folder)
    with files.staged_folder(folder) as stage:
        data = files.new_folder(stage / _DATA)
        mark = ModelProto(producer_name=_MARK.decode()).SerializeToString()
        files.write_bytes(stage / _MODEL, mark + model.SerializeToString(), mark=_MARK)
        for name, content in parts.items():
            files.write_bytes(data / name, content, mark=b"")
        for name in files.names_in(data):
            if _PART.fullmatch(name) and name not in parts:
                files.remove(data / name, b"")


def remove(folder: Path) -> None:
    """Remove what `write` has written, and its folders if they are empty; raises InvalidInput (SX351).

    Args:
        folder: the folder.
    """
    data = folder / _DATA
    if _is_written(folder) and files.remove(folder / _MODEL, _MARK):
        for name in filter(_PART.fullmatch, files.names_in(data)):
            files.remove(data / name, b"")
        for path in (data, folder):
            files.remove_empty(path)


def value(data: bytes, declared: TypeProto) -> Any:
    """A serialized tensor, sequence, map or optional, parsed by the declared type; raises InvalidModel."""
    kind = declared.WhichOneof("value")
    if kind == "sequence_type":
        found: Any = _sequence(_parsed(SequenceProto, data))
    elif kind == "map_type":
        found = _map(_parsed(MapProto, data))
    elif kind == "optional_type":
        found = _optional(_parsed(OptionalProto, data))
    else:
        return _tensor(_parsed(TensorProto, data))
    if not _is_of(found, declared):
        raise InvalidModel(f"the value is not of the declared type, {kind.replace('_type', '')}", code="SX104")
    return found


def _is_of(value: Any, declared: TypeProto) -> bool:
    """Whether a value is of a type's kind, and its elements too."""
    kind = declared.WhichOneof("value")
    if kind == "sequence_type":
        return isinstance(value, list) and all(_is_of(v, declared.sequence_type.elem_type) for v in value)
    if kind == "optional_type":
        return value is None or _is_of(value, declared.optional_type.elem_type)
    return isinstance(value, dict if kind == "map_type" else np.ndarray)


def _parsed(kind: Any, data: bytes) -> Any:
    made: Message = kind()
    try:
        made.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        raise InvalidModel(f"not a {kind.__name__}: {error}", code="SX104") from None
    return made


def _tensor(proto: TensorProto) -> np.ndarray:
    if proto.data_location == TensorProto.EXTERNAL:
        raise InvalidModel(f"the tensor {proto.name!r} refers to external data, which only a model may", code="SX105")
    array = tensor_data.tensor(proto, None)
    limits.current().count(array.nbytes)
    return array


def _sequence(proto: SequenceProto) -> list[Any]:
    kind = proto.elem_type
    parts: dict[int, tuple[Sequence[Any], Callable[[Any], Any]]] = {
        SequenceProto.TENSOR: (proto.tensor_values, _tensor),
        SequenceProto.SPARSE_TENSOR: (proto.sparse_tensor_values, lambda p: tensor_data.sparse(p, None)),
        SequenceProto.SEQUENCE: (proto.sequence_values, _sequence),
        SequenceProto.MAP: (proto.map_values, _map),
        SequenceProto.OPTIONAL: (proto.optional_values, _optional),
    }
    values, read = parts.get(kind, ((), _tensor))
    if len(values) != sum(len(found) for found, _ in parts.values()):
        raise InvalidModel(f"a sequence of element kind {kind} must hold its elements in one field", code="SX104")
    return [read(v) for v in values]


def _map(proto: MapProto) -> dict[Any, Any]:
    """A map in the form that ZipMap returns: the keys are str and ints, the values str and Python numbers."""
    texts = proto.key_type == TensorProto.STRING
    if not texts and (not dtypes.is_code(proto.key_type) or dtypes.numpy_dtype(proto.key_type).type not in _KEYS):
        raise InvalidModel(f"the keys of a map must be strings or integers, got the element type {proto.key_type}", code="SX104")
    try:
        keys = [k.decode() for k in proto.string_keys] if texts else list(proto.keys)
    except UnicodeDecodeError as error:
        raise InvalidModel(f"a key of a map is not UTF-8: {error}", code="SX104") from None
    values = [v.item() if isinstance(v, np.ndarray) and v.size == 1 else v for v in _sequence(proto.values)]
    if len(keys) != len(values) or len(set(keys)) != len(keys):
        raise InvalidModel(
            f"a map must have a value for each key, got {len(set(keys))} keys and {len(values)} values", code="SX104"
        )
    return dict(zip(keys, values, strict=True))


def _optional(proto: OptionalProto) -> Any:
    # onnx 1.10 wrote an empty optional with an element type and without a value.
    if len(proto.ListFields()) <= 1 + proto.HasField("name"):
        return None
    for kind, field, read in (
        (OptionalProto.TENSOR, "tensor_value", _tensor),
        (OptionalProto.SPARSE_TENSOR, "sparse_tensor_value", lambda p: tensor_data.sparse(p, None)),
        (OptionalProto.SEQUENCE, "sequence_value", _sequence),
        (OptionalProto.MAP, "map_value", _map),
        (OptionalProto.OPTIONAL, "optional_value", _optional),
    ):
        if proto.elem_type == kind and proto.HasField(field):
            return read(getattr(proto, field))
    raise InvalidModel(f"an optional of element kind {proto.elem_type} has no value of that kind", code="SX104")
