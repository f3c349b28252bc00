"""A call as rules read it, and what rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import numpy as np
from onnx import NodeProto, TypeProto, defs

from ... import dtypes
from ...proto.schemas import type_strings

Dim: TypeAlias = "int | str | None"
Shape: TypeAlias = "tuple[Dim, ...] | None"
Type: TypeAlias = "tuple[int, Shape] | None"
"""The element type and the shape of an output; None if nothing is known of it."""

_MOST = (1 << 63) - 1
_VARIADIC = defs.OpSchema.FormalParameterOption.Variadic
_SINGLE = defs.OpSchema.FormalParameterOption.Single


class Unsure(Exception):
    """No rule covers a call."""


@dataclass(frozen=True)
class SchemaForm:
    """The part of a schema that a call must match."""

    infers: bool
    inputs: tuple[tuple[str, frozenset[int], bool, bool], ...]  # type parameter, element types, whether absent, whether repeated
    outputs: tuple[frozenset[int], ...]
    attributes: dict[str, int]
    required: frozenset[str]

    def returns(self, i: int) -> frozenset[int]:
        return self.outputs[min(i, len(self.outputs) - 1)]


@cache
def form_of(name: str, version: int, schema: defs.OpSchema) -> SchemaForm:
    allowed = type_strings(schema)

    def codes(type_str: str) -> frozenset[int]:
        found = [dtypes.from_type_string(t) for t in allowed[type_str]]
        return frozenset(dtypes.onnx_code(d) for d in found if d is not None)

    return SchemaForm(
        schema.has_type_and_shape_inference_function,
        tuple((p.type_str, codes(p.type_str), p.option != _SINGLE, p.option == _VARIADIC) for p in schema.inputs),
        tuple(codes(p.type_str) for p in schema.outputs),
        {n: int(cast(Any, a.type).value) for n, a in schema.attributes.items()},
        frozenset(n for n, a in schema.attributes.items() if a.required),
    )


class TypedCall:
    """One call, as rules read it: the element type, shape and known integers of each input, and the attributes."""

    def __init__(
        self,
        name: str,
        version: int,
        form: SchemaForm,
        node: NodeProto,
        inputs: Sequence[TypeProto | None],
        values: Sequence[np.ndarray | None],
    ) -> None:
        self.name, self.version, self.form, self.values = name, version, form, values
        self.outputs = len(node.output)
        self.attributes = {a.name: a for a in node.attribute}
        for n, a in self.attributes.items():
            if form.attributes.get(n) != a.type:
                raise Unsure
        if len(self.attributes) != len(node.attribute) or not form.required <= self.attributes.keys():
            raise Unsure
        self.codes: list[int] = []
        self.shapes: list[Shape] = []
        bound: dict[str, int] = {}
        parameters = form.inputs
        if len(inputs) > len(parameters) and not (parameters and parameters[-1][3]):
            raise Unsure
        for i, type in enumerate(inputs):
            parameter, allowed, optional, _ = parameters[min(i, len(parameters) - 1)]
            if type is None:
                if not optional:
                    raise Unsure
                self.codes.append(0)
                self.shapes.append(None)
                continue
            if type.WhichOneof("value") != "tensor_type":
                raise Unsure
            tensor = type.tensor_type
            code = tensor.elem_type
            if code not in allowed or bound.setdefault(parameter, code) != code:
                raise Unsure
            self.codes.append(code)
            self.shapes.append(_dims(tensor) if tensor.HasField("shape") else None)
        if any(not p[2] for p in parameters[len(inputs) :]):
            raise Unsure

    def has(self, i: int) -> bool:
        """Whether an input is there."""
        return i < len(self.codes) and self.codes[i] != 0

    def shape(self, i: int) -> tuple[Dim, ...]:
        """The shape of an input whose rank must be known."""
        found = self.shapes[i]
        if found is None:
            raise Unsure
        return found

    def integer(self, name: str, default: int) -> int:
        return self.attributes[name].i if name in self.attributes else default

    def integers(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.attributes[name].ints) if name in self.attributes else None

    def string(self, name: str, default: bytes) -> bytes:
        return self.attributes[name].s if name in self.attributes else default

    def known(self, i: int) -> tuple[int, ...] | None:
        """The known integers of a vector or scalar input; None if they are not known."""
        value = self.values[i] if i < len(self.values) else None
        if value is None:
            return None
        if value.dtype.kind not in "iu" or value.ndim > 1:
            raise Unsure
        return tuple(map(int, value.reshape(-1)))

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the start."""
        if not -rank <= axis < rank:
            raise Unsure
        return axis + rank if axis < 0 else axis

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """Different axes counted from the start."""
        found = [self.axis(a, rank) for a in axes]
        if len(set(found)) != len(found):
            raise Unsure
        return found


def _dims(tensor: TypeProto.Tensor) -> tuple[Dim, ...]:
    found: list[Dim] = []
    for d in tensor.shape.dim:
        if d.denotation or (d.HasField("dim_value") and d.dim_value < 0):
            raise Unsure
        found.append(d.dim_value if d.HasField("dim_value") else d.dim_param or None)
    return tuple(found)


def to_proto(type: Type, allowed: frozenset[int]) -> TypeProto:
    assert type is not None
    code, shape = type
    if code not in allowed:
        raise Unsure
    made = TypeProto()
    tensor = made.tensor_type
    tensor.elem_type = code
    if shape is not None:
        tensor.shape.SetInParent()
        add = tensor.shape.dim.add
        for d in shape:
            dim = add()
            if isinstance(d, str):
                dim.dim_param = d
            elif d is not None:
                if not 0 <= d <= _MOST:
                    raise Unsure
                dim.dim_value = d
    return made


Rule: TypeAlias = Callable[[TypedCall], Sequence[Type]]
RULES: dict[str, Rule] = {}


def covers(*names: str) -> Callable[[Rule], Rule]:
    def declare(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return declare


def may_be(shape: tuple[Dim, ...], other: tuple[Dim, ...]) -> bool:
    """Whether two shapes have one rank and no sizes that differ."""
    return len(shape) == len(other) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(shape, other, strict=True)
    )


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """The shape to which these broadcast; of sizes that are not known only the name is kept, if all have one name."""
    first = shapes[0]
    if all(s == first for s in shapes):
        return first
    rank = max(map(len, shapes))
    made: list[Dim] = []
    for i in range(rank):
        dims = [s[i - rank + len(s)] for s in shapes if i >= rank - len(s)]
        sizes = {d for d in dims if isinstance(d, int) and d != 1}
        if len(sizes) > 1:
            raise Unsure
        open_ = [d for d in dims if not isinstance(d, int)]
        made.append(sizes.pop() if sizes else 1 if not open_ else open_[0] if len(set(open_)) == 1 else None)
    return tuple(made)
