"""The types that a call of an operator takes and returns, as the schema of its version binds them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from onnx import AttributeProto, defs

from .. import dtypes
from ..proto.schemas import type_strings

_SINGLE, _VARIADIC = defs.OpSchema.FormalParameterOption.Single, defs.OpSchema.FormalParameterOption.Variadic


class FormalParameter(NamedTuple):
    """An input or output.

    Attributes:
        name: its name.
        bound: the only dtype, or the name of a type that several parameters share; None if its type is its own.
        codes: the element types of tensors that it may be.
        required: whether it must not be absent.
        repeats: whether it stands for any number of values.
    """

    name: str
    bound: np.dtype[Any] | str | None
    codes: frozenset[int]
    required: bool
    repeats: bool


class Signature(NamedTuple):
    """The inputs, the outputs and the attributes of one version of an operator.

    Attributes:
        inputs: the inputs.
        outputs: the outputs.
        attributes: the type of each attribute, a code of AttributeProto.
        required: the attributes that must not be absent.
        defaults: the attributes that have a default.
        counts: the lowest and the highest number of inputs, and those of outputs.
    """

    inputs: tuple[FormalParameter, ...]
    outputs: tuple[FormalParameter, ...]
    attributes: dict[str, int]
    required: frozenset[str]
    defaults: dict[str, AttributeProto]
    counts: tuple[tuple[int, int], tuple[int, int]]


def parameter(parameters: Sequence[FormalParameter], i: int) -> FormalParameter | None:
    """The parameter of an input or output by its index; None if there is none."""
    if i < len(parameters):
        return parameters[i]
    return parameters[-1] if parameters and parameters[-1].repeats else None


@cache
def signature_of(schema: defs.OpSchema) -> Signature:
    """The signature of a schema."""
    allowed = type_strings(schema)

    def read(formal: Any) -> FormalParameter:
        names = allowed[formal.type_str]
        tensors = [dtypes.from_type_string(n) for n in names]
        bound = None if not formal.is_homogeneous else tensors[0] if len(names) == 1 else formal.type_str
        codes = frozenset(dtypes.onnx_code(d) for d in tensors if d is not None)
        return FormalParameter(formal.name, bound, codes, formal.option == _SINGLE, formal.option == _VARIADIC)

    return Signature(
        tuple(map(read, schema.inputs)),
        tuple(map(read, schema.outputs)),
        {n: int(cast(Any, a.type).value) for n, a in schema.attributes.items()},
        frozenset(n for n, a in schema.attributes.items() if a.required),
        {n: a.default_value for n, a in schema.attributes.items() if a.default_value.name},
        ((schema.min_input, schema.max_input), (schema.min_output, schema.max_output)),
    )
