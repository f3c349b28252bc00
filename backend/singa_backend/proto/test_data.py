"""Read and write folders in the test_data_set layout of ONNX's test suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx import MapProto, ModelProto, OptionalProto, SequenceProto, TensorProto, TypeProto, numpy_helper

from .. import files


def data_set(folder: Path, model: ModelProto) -> tuple[list[Any], list[Any]]:
    """The inputs and outputs in a folder of the test_data_set layout (input_0.pb, ..., output_0.pb, ...)."""
    sides: list[list[Any]] = []
    for side, declared in (("input", model.graph.input), ("output", model.graph.output)):
        found = sorted(folder.glob(f"{side}_*.pb"), key=lambda p: int(p.stem.split("_")[1]))
        sides.append([value(p.read_bytes(), declared[i].type) for i, p in enumerate(found)])
    return sides[0], sides[1]


def write(folder: Path, model: ModelProto, parts: Mapping[str, bytes]) -> None:
    """Write model.onnx and test_data_set_0 to a folder, which is whole if it is new.

    Args:
        folder: the folder.
        model: the model.
        parts: the serialized inputs and outputs by their file names; other inputs and outputs are removed.
    """
    with files.staged_folder(folder) as stage:
        data = stage / "test_data_set_0"
        for name, content in parts.items():
            files.write_bytes(data / name, content)
        files.write_bytes(stage / "model.onnx", model.SerializeToString())
        data.mkdir(exist_ok=True)
        for old in data.glob("*put_*.pb"):
            if old.name not in parts:
                old.unlink()


def value(data: bytes, declared: TypeProto) -> Any:
    """A serialized tensor, sequence, map or optional, parsed by the declared type."""
    kind = declared.WhichOneof("value")
    if kind == "sequence_type":
        return [_map(v) if isinstance(v, dict) else v for v in numpy_helper.to_list(SequenceProto.FromString(data))]
    if kind == "map_type":
        return _map(numpy_helper.to_dict(MapProto.FromString(data)))
    if kind == "optional_type":
        optional = OptionalProto.FromString(data)
        # onnx 1.10 wrote an empty optional with an element type and without a value.
        return numpy_helper.to_optional(optional) if len(optional.ListFields()) > 1 + optional.HasField("name") else None
    return numpy_helper.to_array(TensorProto.FromString(data))


def _map(found: dict[Any, Any]) -> dict[Any, Any]:
    """A map in the form that ZipMap returns: str and Python numbers in place of onnx's bytes and arrays."""
    return {k.decode() if isinstance(k, bytes) else k: v.item() for k, v in found.items()}
