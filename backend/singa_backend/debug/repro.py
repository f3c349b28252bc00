"""Writes a part of a model as files that any runtime can run: a model and a data set in ONNX's test_data_set layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import MapProto, ModelProto, SequenceProto, TensorProto, numpy_helper

from ..comparison import verdict
from ..ir.graph import Node
from ..proto import test_data
from ..proto.load import embed
from .model import ComparedModel


def write(
    folder: Path,
    source: ComparedModel,
    calls: Sequence[Node],
    values: Mapping[str, Any],
    outputs: Sequence[str],
    results: Mapping[str, Any],
) -> ModelProto:
    """Write model.onnx and test_data_set_0 to `folder`; returns the model with its weights.

    Args:
        folder: which is created.
        source: the whole model.
        calls: the nodes to write.
        values: the inputs by name; other weights stay initializers.
        outputs: the outputs of the model.
        results: the expected outputs by name; if some outputs have no result, the model has only those that have.
    """
    outputs = [n for n in outputs if n in results] or outputs
    model = source.part(calls, values, outputs, results)
    embed(model, source.folder)
    if not all(output.HasField("type") for output in model.graph.output):
        inferred = ComparedModel(model).types
        for output in model.graph.output:
            if not output.HasField("type"):
                output.type.CopyFrom(inferred.get(output.name) or source.types.get(output.name, output.type))
    parts = {}
    for i, declared in enumerate(model.graph.input):
        if declared.name in values:  # before IR version 4 the initializers follow them
            parts[f"input_{i}.pb"] = serialized(values[declared.name], declared.name)
    for i, name in enumerate(outputs):
        if name in results:
            parts[f"output_{i}.pb"] = serialized(results[name], name)
    test_data.write(folder, model, parts)
    return model


def serialized(value: Any, name: str) -> bytes:
    """A value of any kind as the content of a .pb file."""
    if isinstance(value, np.ndarray):
        return numpy_helper.from_array(value, name).SerializeToString()
    if isinstance(value, dict):
        return _map(value, name).SerializeToString()
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return SequenceProto(name=name, elem_type=SequenceProto.MAP, map_values=map(_map, value)).SerializeToString()
    if isinstance(value, list):
        return numpy_helper.from_list(value, name).SerializeToString()
    return numpy_helper.from_optional(value, name).SerializeToString()


def _map(value: dict[Any, Any], name: str = "") -> MapProto:
    """Create a MapProto; onnx's own from_dict does not accept strings as keys."""
    proto = MapProto(name=name, values=numpy_helper.from_list([verdict.element(v) for v in value.values()]))
    if any(isinstance(key, str) for key in value):
        proto.key_type, proto.string_keys[:] = TensorProto.STRING, [str(key).encode() for key in value]
    else:
        proto.key_type, proto.keys[:] = TensorProto.INT64, map(int, value)
    return proto


def read(folder: Path) -> tuple[ComparedModel, dict[str, Any], dict[str, Any]]:
    """Read the files of `write`: the model, its inputs and its expected outputs by name."""
    source = ComparedModel(folder / "model.onnx")
    graph = source.proto.graph
    inputs, outputs = test_data.data_set(folder / "test_data_set_0", source.proto)
    names = [o.name for o in graph.output]
    return source, dict(zip((i.name for i in graph.input), inputs, strict=False)), dict(zip(names, outputs, strict=False))


def folder_for(to: str | Path | None, source: ComparedModel, what: str) -> Path:
    """The folder of the files of `write`.

    Args:
        to: the folder that the user has chosen; None to name it after the model and `what`, in the current folder: it is new,
            or was written by `write`.
        source: the whole model.
        what: what is written, such as the name of a node.
    """
    if to is not None:
        return Path(to)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", what).strip("._")[:80] or "node"
    return test_data.free_folder(Path(f"{source.path.stem if source.path else 'model'}-{name}"))
