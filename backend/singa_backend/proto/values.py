"""Declared inputs and outputs of a graph: name, kind, dtype, shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TypeProto, ValueInfoProto

from .. import dtypes


@dataclass(frozen=True)
class Value:
    """A declared input or output of a graph.

    kind: "tensor", "sequence", "optional", "map" or "" where the file does not say.
    dtype: of a tensor, of the elements of a sequence or an optional, or of a map's values; None where the file does not say.
    shape: ints, names of unknown sizes, or None for a nameless one; None where the rank is unknown.
    type: all of that as the file says it.
    """

    name: str
    kind: str = ""
    dtype: np.dtype[Any] | None = None
    shape: tuple[int | str | None, ...] | None = None
    type: TypeProto | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_proto(cls, info: ValueInfoProto) -> Value:
        return cls(info.name, *_type(info.type), info.type)

    def __str__(self) -> str:
        dims = "" if self.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in self.shape) + "]"
        name = "?" if self.dtype is None else dtypes.onnx_name(self.dtype)
        return f"{self.name}: {name}{dims}" if self.kind in ("", "tensor") else f"{self.name}: {self.kind}({name}{dims})"


def _type(proto: TypeProto) -> tuple[str, np.dtype[Any] | None, tuple[int | str | None, ...] | None]:
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(proto, kind)
        shape = None
        if tensor.HasField("shape"):
            shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
        return "tensor", dtypes.numpy_dtype(tensor.elem_type) if tensor.elem_type else None, shape
    if kind in ("sequence_type", "optional_type"):
        _, dtype, shape = _type(getattr(proto, kind).elem_type)
        return kind[:-5], dtype, shape
    if kind == "map_type":
        return "map", _type(proto.map_type.value_type)[1], None
    return "", None, None


def declared_type(value: Value) -> TypeProto | None:
    """The type of a graph's input as far as the file says it."""
    return None if value.dtype is None or value.kind == "" else value.type
