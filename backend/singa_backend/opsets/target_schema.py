"""Whether the schema of a target opset has a call: its inputs, attributes, element types and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from onnx import TypeProto, helper

from .. import dtypes
from ..errors import UnsupportedModel
from ..interpreters.base import Subgraph
from ..ir.declaration import REQUIRED, Declaration, declarations
from ..proto.schemas import LAX, MICROSOFT, is_custom, lax, schemas, type_strings


class Unwritable(UnsupportedModel):
    """An opset cannot express a call of an operator.

    Attributes:
        operator: the operator.
        least: the minimum opset that can express the call; None if no opset can.
    """

    default_code = "SX206"
    least: int | None = None


class Parameter(NamedTuple):
    """An input of a schema.

    Attributes:
        name: its name.
        types: its type parameter.
        single: whether each call has it, and has it once.
        homogeneous: whether the values of its type parameter have one type.
    """

    name: str
    types: str
    single: bool
    homogeneous: bool


class SchemaParts(NamedTuple):
    """What is read of a schema at each call; reading it from the schema makes new objects.

    Attributes:
        inputs: the inputs.
        variadic: whether the last input takes any number of values.
        outputs: the type parameter of each output.
        attributes: the names of the attributes.
        allowed: the types of each type parameter.
        counts: the lowest number of inputs, and the highest number of outputs.
    """

    inputs: tuple[Parameter, ...]
    variadic: bool
    outputs: tuple[str, ...]
    attributes: frozenset[str]
    allowed: dict[str, frozenset[str]]
    counts: tuple[int, int]


@cache
def parts_of(schema: Any) -> SchemaParts:
    """The parts of a schema."""
    inputs = tuple(Parameter(p.name, p.type_str, p.option == p.option.Single, p.is_homogeneous) for p in schema.inputs)
    allowed = {n: frozenset(types) for n, types in type_strings(schema).items()}
    outputs = tuple(p.type_str for p in schema.outputs)
    counts = schema.min_input, schema.max_output
    variadic = bool(schema.inputs) and schema.inputs[-1].option == schema.inputs[-1].option.Variadic
    return SchemaParts(inputs, variadic, outputs, frozenset(schema.attributes), allowed, counts)


def check_call(schema: Any, types: Sequence[str | None], attributes: dict[str, Any], outputs: int) -> None:
    """Raise Unwritable if a version of an operator does not have these inputs, attributes, element types or outputs.

    types: of the inputs: "" if it is not known, None for an absent input.
    """
    parts = parts_of(schema)
    least, most = parts.counts
    if outputs > most:
        raise Unwritable(f"{_label(schema)} takes at most {most} outputs, got {outputs}", operator=schema.name)
    if len(types) < least:
        raise Unwritable(f"{_label(schema)} takes at least {least} inputs, got {len(types)}", operator=schema.name)
    _check_inputs(schema, parts, types)
    _check_target_dtype(schema, parts, attributes)
    for i, parameter in enumerate(parts.inputs):
        if parameter.single and (i >= len(types) or types[i] is None):
            raise Unwritable(f"{_label(schema)} requires {parameter.name}", operator=schema.name)
    unknown = sorted(attributes.keys() - parts.attributes)
    if unknown:
        raise Unwritable(f"{_label(schema)} has no attribute {', '.join(unknown)}", operator=schema.name)
    _check_graphs(schema, parts, attributes)


def _check_inputs(schema: Any, parts: SchemaParts, types: Sequence[str | None]) -> None:
    """Check the types of the inputs, and that inputs of one type parameter have one type."""
    bound: dict[str, str] = {}
    for i, has in enumerate(types):
        if has is None:
            continue
        if i >= len(parts.inputs) and not parts.variadic:
            most = len(parts.inputs)
            raise Unwritable(f"{_label(schema)} takes at most {most} inputs, got {len(types)}", operator=schema.name)
        parameter = parts.inputs[min(i, len(parts.inputs) - 1)]
        if has and has not in parts.allowed[parameter.types]:
            raise Unwritable(f"{_label(schema)} does not take {has} as {parameter.name}", operator=schema.name)
        if has and parameter.homogeneous and bound.setdefault(parameter.types, has) != has:
            first = bound[parameter.types]
            raise Unwritable(f"{_label(schema)} takes {parameter.name} as {first}, not {has}", operator=schema.name)


def _check_target_dtype(schema: Any, parts: SchemaParts, attributes: dict[str, Any]) -> None:
    """Check the dtype that an attribute requests of the result."""
    for key in ("to", "dtype", "value"):
        attribute = attributes.get(key)
        code = dtypes.onnx_code(attribute.dtype) if isinstance(attribute, np.ndarray) else attribute if key != "value" else 0
        if isinstance(code, int) and code:
            wanted = f"tensor({dtypes.onnx_name(dtypes.numpy_dtype(code))})"
            if not {wanted, f"seq({wanted})"} & parts.allowed[parts.outputs[0]]:
                raise Unwritable(f"{_label(schema)} does not return {wanted}", operator=schema.name)


def _check_graphs(schema: Any, parts: SchemaParts, attributes: dict[str, Any]) -> None:
    """Check the types of the outputs of graph attributes, which become results of the node."""
    for body in (v for v in attributes.values() if isinstance(v, Subgraph)):
        returns = parts.allowed[parts.outputs[-1]]
        for declared in body.graph.declared_outputs:
            has = type_string(declared.type)
            if has and has not in returns and f"seq({has})" not in returns:
                raise Unwritable(f"{_label(schema)} does not return {has}", operator=schema.name)


def check_results(schema: Any, types: Sequence[str]) -> None:
    """Check the types of the results of a node."""
    parts = parts_of(schema)
    for i, has in enumerate(types):
        if has and has not in parts.allowed[parts.outputs[min(i, len(parts.outputs) - 1)]]:
            raise Unwritable(f"{_label(schema)} does not return {has}", operator=schema.name)


def _label(schema: Any) -> str:
    return f"{schema.name}-{schema.since_version}"


def type_string(type: TypeProto | None) -> str:
    """ONNX's name of a type; "" if it is not known."""
    if type is None:
        return ""
    kind = type.WhichOneof("value")
    if kind == "tensor_type":
        code = type.tensor_type.elem_type
        return _tensor_string(code) if code else ""
    if kind == "sequence_type":
        inner = type_string(type.sequence_type.elem_type)
        return f"seq({inner})" if inner else ""
    if kind == "optional_type":
        inner = type_string(type.optional_type.elem_type)
        return f"optional({inner})" if inner else ""
    return ""


@cache
def _tensor_string(code: int) -> str:
    return f"tensor({dtypes.onnx_name(dtypes.numpy_dtype(code))})"


@cache
def other_defaults(name: str, version: int, newest_version: int) -> tuple[tuple[str, Any], ...]:
    """The defaults of the newest version that differ from those of a version to write."""
    theirs = schemas["", name][version].attributes
    found: list[tuple[str, Any]] = []
    for key, default in declarations["", name][newest_version].attributes.items():
        if key in theirs and default is not REQUIRED and default is not None:
            value = helper.get_attribute_value(theirs[key].default_value) if theirs[key].default_value.name else None
            if value is None or not same_value(value.decode() if isinstance(value, bytes) else value, default):
                found.append((key, default))
    return tuple(found)


@cache
def is_deprecated(name: str, version: int) -> bool:
    """Whether a version only says that the operator is no longer used."""
    return bool(schemas["", name][version].deprecated)


def same_value(a: Any, b: Any) -> bool:
    """Whether two attributes are equal, floats as float32."""
    if a is None or b is None:
        return a is b
    a, b = (list(v) if isinstance(v, (tuple, list, np.ndarray)) else v for v in (a, b))
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and np.float32(a) == np.float32(b))


def written_as_function(declaration: Declaration, version: int) -> bool:
    """Whether a custom operator is written as a node with a function body: one decomposition serves all calls."""
    schema = schemas[declaration.domain, declaration.name][version]
    allowed = type_strings(schema)
    return (
        is_custom(declaration.domain)
        and declaration.decomposition_rule is not None
        and not schema.attributes
        and all(len(allowed[p.type_str]) == 1 and p.option == p.option.Single for p in schema.inputs)
    )


def result_types(name: str, version: int) -> list[str]:
    """The type strings of the outputs of an operator of ONNX's domain."""
    return [parameter.type_str for parameter in schemas["", name][version].outputs]


def by_name(declaration: Declaration, values: Sequence[Any], given: dict[str, Any], outputs: int) -> dict[str, Any]:
    """The values of a call by the names that an adapter may have."""
    return {**declaration.bind(values, given), "outputs": outputs, "wanted": (True,) * outputs}


def in_place(declaration: Declaration, version: int, target: int, lowers: bool) -> bool:
    """Whether a custom operator is written as its decomposition: in place, for the attributes and types of the call.

    onnxruntime's own operators are kept, unless all are lowered or onnxruntime does not read them at the target opset.
    """
    if not is_custom(declaration.domain):
        return False
    if declaration.domain in (MICROSOFT, LAX):
        return lowers or (declaration.domain == LAX and target > lax[declaration.name])
    return declaration.decomposition_rule is not None and (lowers or not written_as_function(declaration, version))
