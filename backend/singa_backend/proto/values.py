"""Declared inputs and outputs of a graph: name, kind, dtype, shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorShapeProto, TypeProto, ValueInfoProto

from .. import dtypes

OPEN, OPEN_NAMES = -1, ("?", "-1", "None")
"""Sizes and names that exporters write for an open size; ONNX's form is a dimension with neither.

Other dimensions with one name have one size, but a name such as "?" is written for each open size.
"""


@dataclass(frozen=True)
class Value:
    """A declared input or output of a graph.

    Attributes:
        name: its name.
        kind: "tensor", "sequence", "optional", "map", or "" if the model does not declare it.
        dtype: the dtype of a tensor, of the elements of a sequence or an optional, or of a map's values; None if undeclared.
        shape: for each dimension its size, the name of a symbolic size, or None if unknown; None if the rank is undeclared.
        type: the TypeProto of the declaration; None if there is none.
    """

    name: str
    kind: str = ""
    dtype: np.dtype[Any] | None = None
    shape: tuple[int | str | None, ...] | None = None
    type: TypeProto | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_proto(cls, info: ValueInfoProto) -> Value:
        """Create a Value from its declaration in a model.

        Args:
            info: the declaration.

        Returns:
            The value.

        Raises:
            InvalidModel: the element type is not one of ONNX's.
        """
        return cls.of(info.name, opened(info.type))

    @classmethod
    def of(cls, name: str, type: TypeProto | None) -> Value:
        """Create a Value from a type.

        Args:
            name: its name.
            type: its type; None if it is not known.

        Returns:
            The value.
        """
        return cls(name) if type is None else cls(name, *_type(type), type)

    def __str__(self) -> str:
        """Return the name and type, such as "x: float[n, 3]"."""
        dims = "" if self.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in self.shape) + "]"
        name = "?" if self.dtype is None else dtypes.onnx_name(self.dtype)
        return f"{self.name}: {name}{dims}" if self.kind in ("", "tensor") else f"{self.name}: {self.kind}({name}{dims})"


def _type(proto: TypeProto) -> tuple[str, np.dtype[Any] | None, tuple[int | str | None, ...] | None]:
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(proto, kind)
        shape = None
        if tensor.HasField("shape"):
            shape = sizes(tensor)
        return "tensor", dtypes.numpy_dtype(tensor.elem_type) if tensor.elem_type else None, shape
    if kind in ("sequence_type", "optional_type"):
        _, dtype, shape = _type(getattr(proto, kind).elem_type)
        return kind[:-5], dtype, shape
    if kind == "map_type":
        return "map", _type(proto.map_type.value_type)[1], None
    return "", None, None


def sizes(tensor: TypeProto.Tensor | TypeProto.SparseTensor) -> tuple[int | str | None, ...]:
    """The declared size of each dimension, the name of a symbolic size, or None if it is open."""
    return tuple(map(_size, tensor.shape.dim))


def _size(d: TensorShapeProto.Dimension) -> int | str | None:
    if _is_open(d):
        return None
    return d.dim_value if d.HasField("dim_value") else d.dim_param


def _is_open(d: TensorShapeProto.Dimension) -> bool:
    return d.dim_value == OPEN if d.HasField("dim_value") else d.dim_param in ("", *OPEN_NAMES)


def opened(type: TypeProto) -> TypeProto:
    """The type with ONNX's form of open sizes; itself if it has no other."""
    if not any(_is_open(d) and d.WhichOneof("value") for d in _dimensions(type)):
        return type
    copy = TypeProto()
    copy.CopyFrom(type)
    for d in _dimensions(copy):
        if _is_open(d):
            d.Clear()
    return copy


def _dimensions(type: TypeProto) -> Iterator[TensorShapeProto.Dimension]:
    kind = type.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        yield from getattr(type, kind).shape.dim
    elif kind in ("sequence_type", "optional_type"):
        yield from _dimensions(getattr(type, kind).elem_type)
    elif kind == "map_type":
        yield from _dimensions(type.map_type.value_type)


def declared_type(value: Value) -> TypeProto | None:
    """The declared type of a value; None if its kind or dtype is undeclared."""
    return None if value.dtype is None or value.kind == "" else value.type


def is_complete(type: TypeProto) -> bool:
    """Whether a type names its kind and its element types: onnx's inference reads them without a test."""
    kind = type.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        return bool(getattr(type, kind).elem_type)
    if kind in ("sequence_type", "optional_type"):
        return is_complete(getattr(type, kind).elem_type)
    return kind == "map_type" and type.map_type.key_type != 0 and is_complete(type.map_type.value_type)
