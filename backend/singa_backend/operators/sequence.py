"""Sequences and optionals: lists of tensors, and values that may be None.

A gradient that is a sequence is returned in a tuple: a list would be interpreted as the gradients of several inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TypeProto, helper

from .. import limits
from ..devices.namespaces import Xp
from ..dtypes import numpy_dtype, onnx_code, onnx_name
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, operator
from ._api import Array
from ._common import axis_of


def _one_dtype(tensors: Sequence[Array]) -> None:
    for x in tensors[1:]:
        if x.dtype != tensors[0].dtype:
            both = f"{onnx_name(tensors[0].dtype)} and {onnx_name(x.dtype)}"
            raise OperatorError(f"the tensors of a sequence must have one element type, got {both}", code="SX406")


def _place(position: int, last: int, length: int) -> int:
    """Return `position` counted from the front, in a sequence of `length` tensors; `last` is its maximum."""
    if not -length <= position <= last:
        raise OperatorError(f"position must be in [{-length}, {last}] for {length} tensors, got {position}", code="SX401")
    return position + length if position < 0 else position


@operator("SequenceConstruct", 11, widen=False)
def sequence_construct(xp: Xp, *inputs: Array) -> list[Array]:
    _one_dtype(inputs)
    return list(inputs)


@sequence_construct.gradient
def sequence_construct_gradient(op: Op, dy: V, inputs: list[V]) -> list[V]:
    return [op.SequenceAt(dy, i) for i in range(len(inputs))]


@operator("SequenceEmpty", 11, widen=False)
def sequence_empty(xp: Xp, *, dtype: int | None = None) -> list[Array]:
    numpy_dtype(1 if dtype is None else dtype)  # raises an error for a code that ONNX does not define
    return []


sequence_empty.no_gradient("constant")


@operator("SequenceAt", 11, widen=False)
def sequence_at(xp: Xp, input_sequence: list[Array], position: Host[int]) -> Array:
    return input_sequence[_place(position, len(input_sequence) - 1, len(input_sequence))]


@sequence_at.gradient
def sequence_at_gradient(op: Op, dy: V, input_sequence: V, position: V) -> tuple[V]:
    """Return zeros, with dy at the position."""
    zeros = op.zeros_like(input_sequence)
    length = op.SequenceLength(input_sequence)
    at = op.Where(op.Less(position, 0), op.Add(op.Cast(position, to=7), length), op.Cast(position, to=7))
    return (op.SequenceErase(op.SequenceInsert(zeros, dy, at), op.Add(at, 1)),)


@operator("SequenceInsert", 11, widen=False)
def sequence_insert(xp: Xp, input_sequence: list[Array], tensor: Array, position: Host[int] | None = None) -> list[Array]:
    """Insert a tensor; a negative position counts from the end of the old sequence: -1 inserts before its last tensor."""
    _one_dtype([*input_sequence[:1], tensor])
    n = len(input_sequence)
    at = n if position is None else _place(position, n, n)
    return [*input_sequence[:at], tensor, *input_sequence[at:]]


@sequence_insert.gradient
def sequence_insert_gradient(op: Op, dy: V, input_sequence: V, position: V) -> tuple[V, V]:
    """The position refers to the sequence without the new tensor."""
    length = op.SequenceLength(input_sequence)
    if position is None:
        at = length
    else:
        position = op.Cast(position, to=7)
        at = op.Where(op.Less(position, 0), op.Add(position, length), position)
    return op.SequenceErase(dy, at), op.SequenceAt(dy, at)


@operator("SequenceErase", 11, widen=False)
def sequence_erase(xp: Xp, input_sequence: list[Array], position: Host[int] | None = None) -> list[Array]:
    n = len(input_sequence)
    at = _place(-1 if position is None else position, n - 1, n)
    return [*input_sequence[:at], *input_sequence[at + 1 :]]


@sequence_erase.gradient
def sequence_erase_gradient(op: Op, dy: V, input_sequence: V, position: V) -> tuple[V]:
    """Insert zeros where the tensor was."""
    if position is None:
        return (op.SequenceInsert(dy, op.zeros_like(op.SequenceAt(input_sequence, -1))),)
    position = op.Cast(position, to=7)
    at = op.Where(op.Less(position, 0), op.Add(position, op.SequenceLength(input_sequence)), position)
    return (op.SequenceInsert(dy, op.zeros_like(op.SequenceAt(input_sequence, at)), at),)


@operator("SequenceLength", 11, widen=False)
def sequence_length(xp: Xp, input_sequence: list[Array]) -> Array:
    return xp.asarray(len(input_sequence), np.int64)


@operator("SplitToSequence", 11, 24, widen=False)
def split_to_sequence(
    xp: Xp, x: Array, split: Host[np.ndarray] | None = None, *, axis: int = 0, keepdims: int = 1
) -> list[Array]:
    """Split a tensor; a scalar `split` is the size of each part (the last one may be smaller), a vector lists all sizes.

    `keepdims` applies only without `split`: then each part has size 1.
    """
    if x.ndim == 0:
        raise OperatorError("x must have at least one axis, got a scalar", code="SX408")
    axis = axis_of(axis, x.ndim)
    size = x.shape[axis]
    if split is not None and split.ndim > 1:
        raise OperatorError(f"split must be a scalar or a vector, got shape {split.shape}", code="SX404")
    if split is not None and split.ndim == 1:
        sizes = [int(n) for n in split]
        if any(n < 0 for n in sizes) or sum(sizes) != size:
            raise OperatorError(
                f"the sizes of split must add up to the size {size} of axis {axis}, none negative, got {sizes}", code="SX404"
            )
    else:
        step = 1 if split is None else int(split)
        if step < 1:
            raise OperatorError(f"split must be at least 1, got {step}", code="SX404")
        limits.admit_bytes(-(-size // step) * 256, f"a sequence of {-(-size // step)} tensors")
        sizes = [min(step, size - start) for start in range(0, size, step)]
    before = (slice(None),) * axis
    if split is None and not keepdims:
        return [x[(*before, i, ...)] for i in range(size)]
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [x[(*before, slice(end - n, end))] for n, end in zip(sizes, ends, strict=True)]


@split_to_sequence.gradient
def split_to_sequence_gradient(op: Op, dy: V, split: V, axis: int, keepdims: int) -> V:
    return op.ConcatFromSequence(dy, axis=axis, new_axis=int(split is None and not keepdims))


@operator("ConcatFromSequence", 11, widen=False)
def concat_from_sequence(xp: Xp, input_sequence: list[Array], *, axis: int, new_axis: int = 0) -> Array:
    if not input_sequence:
        raise OperatorError("the sequence must not be empty", code="SX404")
    if new_axis not in (0, 1):
        raise OperatorError(f"new_axis must be 0 or 1, got {new_axis}", code="SX404")
    _one_dtype(input_sequence)
    rank = input_sequence[0].ndim
    if rank == 0 and not new_axis:
        raise OperatorError("tensors must have at least one axis unless new_axis=1, got scalars", code="SX408")
    shapes = {x.shape for x in input_sequence}
    axis = axis_of(axis, rank + new_axis)
    rest = {(len(s), *s[:axis], *s[axis + 1 - new_axis :]) for s in shapes}
    if len(rest) != 1:
        raise OperatorError(f"shapes must be equal except along axis {axis}, got {sorted(shapes)}", code="SX404")
    return xp.stack(input_sequence, axis) if new_axis else xp.concatenate(input_sequence, axis)


@concat_from_sequence.gradient
def concat_from_sequence_gradient(op: Op, dy: V, input_sequence: V, axis: int, new_axis: int) -> tuple[V]:
    if new_axis:
        return (op.SplitToSequence(dy, axis=axis, keepdims=0),)
    axis %= op.rank(dy)
    element = helper.make_tensor_type_proto(onnx_code(op.dtype(dy)), [None] * op.rank(dy))
    body = op.graph(lambda op, x: [op.Shape(x, start=axis, end=axis + 1)], [element])
    sizes = op.ConcatFromSequence(op.SequenceMap(input_sequence, body=body), axis=0)
    return (op.SplitToSequence(dy, sizes, axis=axis),)


# --- optionals: None is empty, any other value is its own element


@operator("Optional", 15, 28, widen=False)
def optional(xp: Xp, x: Any = None, *, type: TypeProto | None = None) -> Any:
    if x is None and type is None:
        raise OperatorError("an Optional must have an input, or the attribute 'type' for an absent one", code="SX404")
    return x


@optional.gradient
def optional_gradient(op: Op, dy: V) -> tuple[V]:
    """The gradient of an optional is that of its element."""
    return (dy,)


@operator("OptionalGetElement", 15, 18, 28, widen=False)
def optional_get_element(xp: Xp, x: Any) -> Any:
    """Return the element; in version 18 or later, the input may also be a tensor or a sequence."""
    if x is None:
        raise OperatorError("the optional must not be empty", code="SX404")
    return x


@optional_get_element.gradient
def optional_get_element_gradient(op: Op, dy: V) -> tuple[V]:
    return (dy,)


@operator("OptionalHasElement", 15, widen=False)
def optional_has_element_15(xp: Xp, x: Any) -> Array:
    return xp.asarray(x is not None)


@optional_has_element_15.decomposition
def optional_has_element_15_decomposition(op: Op, x: V) -> V:
    return op.OptionalHasElement(x)


@operator("OptionalHasElement", 18, 28, widen=False)
def optional_has_element(xp: Xp, x: Any = None) -> Array:
    return xp.asarray(x is not None)
