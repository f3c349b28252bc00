"""Types of values in graphs that are written in Python: `Float["N", 3]`, `SequenceType(Int64)`, `OptionalType(Float["N"])`."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
from onnx import TypeProto, helper

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.proto.values import sizes


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor: an element type and a shape.

    `Float["N", 3]` has a size that is only known in a run and one that is known now; `Float[()]` is a scalar, and `Float` and
    `Float[...]` have any rank.

    Attributes:
        dtype: the NumPy dtype of the elements; strings are objects.
        shape: the sizes: an int, the name of a size that differs from run to run, or None for one without a name; None if the
            rank is not known.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None = None

    def __getitem__(self, shape: int | str | EllipsisType | tuple[int | str | None, ...] | None) -> TensorType:
        if shape is Ellipsis:
            return TensorType(self.dtype)
        found: tuple[Any, ...] = shape if isinstance(shape, tuple) else (shape,)
        for size in found:
            if size is Ellipsis:
                raise _wrong(f"`...` means any rank and must be alone, got {found!r}")
            if isinstance(size, bool) or not (size is None or isinstance(size, (int, str, np.integer))):
                raise _wrong(f"a size must be an integer, a name or None, got {size!r}")
            if size == "" or (isinstance(size, (int, np.integer)) and size < 0):
                raise _wrong(f"a size must be 0 or greater, or a name, got {size!r}", "None is a size without a name")
        return TensorType(self.dtype, tuple(int(d) if isinstance(d, np.integer) else d for d in found))

    def __str__(self) -> str:
        name = dtypes.onnx_name(self.dtype)
        return name if self.shape is None else f"{name}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"

    def to_proto(self) -> TypeProto:
        """Return the type as ONNX's message.

        Returns:
            A new message.
        """
        return helper.make_tensor_type_proto(dtypes.onnx_code(self.dtype), self.shape)


@dataclass(frozen=True)
class SequenceType:
    """The type of a sequence of tensors.

    Attributes:
        element: the type of its elements.
    """

    element: TensorType

    def __post_init__(self) -> None:
        if not isinstance(self.element, TensorType):
            raise _wrong(f"the elements of a sequence must be tensors such as Float['N'], got {self.element!r}")

    def __str__(self) -> str:
        return f"seq({self.element})"

    def to_proto(self) -> TypeProto:
        """Return the type as ONNX's message.

        Returns:
            A new message.
        """
        return helper.make_sequence_type_proto(self.element.to_proto())


@dataclass(frozen=True)
class OptionalType:
    """The type of a value that may be absent: a tensor or a sequence.

    Attributes:
        element: the type of the value if it is there.
    """

    element: TensorType | SequenceType

    def __post_init__(self) -> None:
        if not isinstance(self.element, (TensorType, SequenceType)):
            raise _wrong(f"an optional value must be a tensor or a sequence, got {self.element!r}")

    def __str__(self) -> str:
        return f"optional({self.element})"

    def to_proto(self) -> TypeProto:
        """Return the type as ONNX's message.

        Returns:
            A new message.
        """
        return helper.make_optional_type_proto(self.element.to_proto())


ValueType: TypeAlias = TensorType | SequenceType | OptionalType


_KINDS: dict[type, str] = {TensorType: "a tensor", SequenceType: "a sequence", OptionalType: "an optional"}


def from_proto(type: TypeProto | None) -> ValueType | None:
    """The type of ONNX's message; None if it is not known, or is that of a map or sparse tensor."""
    kind = type.WhichOneof("value") if type is not None else None
    if type is None or kind not in ("tensor_type", "sequence_type", "optional_type"):
        return None
    if kind == "tensor_type":
        if not type.tensor_type.elem_type:
            return None
        shape = sizes(type.tensor_type) if type.tensor_type.HasField("shape") else None
        return TensorType(dtypes.numpy_dtype(type.tensor_type.elem_type), shape)
    element = from_proto(getattr(type, kind).elem_type)
    if kind == "sequence_type":
        return SequenceType(element) if isinstance(element, TensorType) else None
    return OptionalType(element) if isinstance(element, (TensorType, SequenceType)) else None


def difference(found: ValueType | None, wanted: ValueType) -> str:
    """The reason why a value cannot be of both types, such as "the element types differ"; "" if it can."""
    if found is None:
        return ""
    if type(found) is not type(wanted):
        return f"one is {_KINDS[type(wanted)]}, the other {_KINDS[type(found)]}"
    if isinstance(found, TensorType) and isinstance(wanted, TensorType):
        if found.dtype != wanted.dtype:
            return "the element types differ"
        if found.shape is None or wanted.shape is None:
            return ""
        if len(found.shape) != len(wanted.shape):
            return "the ranks differ"
        known = [(a, b) for a, b in zip(found.shape, wanted.shape, strict=True) if isinstance(a, int) and isinstance(b, int)]
        return "the sizes differ" if any(a != b for a, b in known) else ""
    assert not isinstance(found, TensorType) and not isinstance(wanted, TensorType)
    return difference(found.element, wanted.element)


def narrowed(found: ValueType | None, declared: ValueType) -> ValueType:
    """What is known of a value: the declared type, with the sizes that only `found` has."""
    if not isinstance(found, TensorType) or not isinstance(declared, TensorType) or found.shape is None:
        return declared
    if declared.shape is None:
        return found
    pairs = zip(found.shape, declared.shape, strict=True)
    return declared[tuple(a if isinstance(a, int) or b is None else b for a, b in pairs)]


def widened(a: ValueType, b: ValueType | None) -> ValueType:
    """The most specific type that has the values of both; raises InvalidInput (SX393) if their element types differ."""
    if isinstance(a, TensorType):
        if b is None:
            return TensorType(a.dtype)
        if isinstance(b, TensorType) and a.dtype == b.dtype:
            if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
                return TensorType(a.dtype)
            return a[tuple(m if m == n else None for m, n in zip(a.shape, b.shape, strict=True))]
    elif b is None:
        return a
    elif isinstance(a, SequenceType) and isinstance(b, SequenceType):
        made = widened(a.element, b.element)
        assert isinstance(made, TensorType)
        return SequenceType(made)
    elif isinstance(a, OptionalType) and isinstance(b, OptionalType):
        made = widened(a.element, b.element)
        assert not isinstance(made, OptionalType)
        return OptionalType(made)
    raise InvalidInput(f"a value of type {b} cannot replace one of type {a}", code="SX393", hint="cast it: op.Cast(x, to=...)")


def _wrong(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code="SX392", hint=hint)


def _of(name: str) -> TensorType:
    dtype = dtypes.from_type_string(f"tensor({name})")
    assert dtype is not None
    return TensorType(dtype)


Float = _of("float")
"""The type of float32 tensors: `Float["N", 3]`."""
Double = _of("double")
"""The type of float64 tensors."""
Float16 = _of("float16")
"""The type of float16 tensors."""
BFloat16 = _of("bfloat16")
"""The type of bfloat16 tensors."""
Int8 = _of("int8")
"""The type of int8 tensors."""
Int16 = _of("int16")
"""The type of int16 tensors."""
Int32 = _of("int32")
"""The type of int32 tensors."""
Int64 = _of("int64")
"""The type of int64 tensors."""
UInt8 = _of("uint8")
"""The type of uint8 tensors."""
UInt16 = _of("uint16")
"""The type of uint16 tensors."""
UInt32 = _of("uint32")
"""The type of uint32 tensors."""
UInt64 = _of("uint64")
"""The type of uint64 tensors."""
Int2 = _of("int2")
"""The type of tensors of 2-bit integers."""
Int4 = _of("int4")
"""The type of tensors of 4-bit integers."""
UInt2 = _of("uint2")
"""The type of tensors of unsigned 2-bit integers."""
UInt4 = _of("uint4")
"""The type of tensors of unsigned 4-bit integers."""
Bool = _of("bool")
"""The type of tensors of truth values."""
String = _of("string")
"""The type of tensors of strings."""
Complex64 = _of("complex64")
"""The type of complex64 tensors."""
Complex128 = _of("complex128")
"""The type of complex128 tensors."""
Float8E4M3FN = _of("float8e4m3fn")
"""The type of float8 tensors with 4 bits of exponent and no infinity."""
Float8E4M3FNUZ = _of("float8e4m3fnuz")
"""The type of float8 tensors with 4 bits of exponent, no infinity and no negative zero."""
Float8E5M2 = _of("float8e5m2")
"""The type of float8 tensors with 5 bits of exponent."""
Float8E5M2FNUZ = _of("float8e5m2fnuz")
"""The type of float8 tensors with 5 bits of exponent, no infinity and no negative zero."""
Float8E8M0 = _of("float8e8m0")
"""The type of tensors of powers of 2 in 8 bits."""
Float4E2M1 = _of("float4e2m1")
"""The type of float4 tensors."""
Float6E2M3 = _of("float6e2m3")
"""The type of float6 tensors with 2 bits of exponent."""
Float6E3M2 = _of("float6e3m2")
"""The type of float6 tensors with 3 bits of exponent."""
