"""Whether the schema of a target opset has a call: its inputs, attributes, element types and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TypeProto

from .. import dtypes
from ..errors import UnsupportedModel
from ..interpreters.base import Subgraph


class Unwritable(UnsupportedModel):
    """An opset cannot express a call of an operator.

    Attributes:
        operator: the operator.
        least: the minimum opset that can express the call; None if no opset can.
    """

    default_code = "SX206"
    least: int | None = None


def check_call(
    schema: Any, allowed: dict[str, list[str]], types: Sequence[str | None], attributes: dict[str, Any], outputs: int
) -> None:
    """Raise Unwritable if a version of an operator does not have these inputs, attributes, element types or outputs.

    allowed: the types of each type parameter.
    types: of the inputs: "" if it is not known, None for an absent input.
    """
    if outputs > schema.max_output:
        raise Unwritable(f"{_label(schema)} takes at most {schema.max_output} outputs, got {outputs}", operator=schema.name)
    if len(types) < schema.min_input:
        raise Unwritable(f"{_label(schema)} takes at least {schema.min_input} inputs, got {len(types)}", operator=schema.name)
    _check_inputs(schema, allowed, types)
    _check_target_dtype(schema, allowed, attributes)
    for i, parameter in enumerate(schema.inputs):
        if parameter.option == parameter.option.Single and (i >= len(types) or types[i] is None):
            raise Unwritable(f"{_label(schema)} requires {parameter.name}", operator=schema.name)
    unknown = sorted(set(attributes) - set(schema.attributes))
    if unknown:
        raise Unwritable(f"{_label(schema)} has no attribute {', '.join(unknown)}", operator=schema.name)
    _check_graphs(schema, allowed, attributes)


def _check_inputs(schema: Any, allowed: dict[str, list[str]], types: Sequence[str | None]) -> None:
    """Check the types of the inputs, and that inputs of one type parameter have one type."""
    bound: dict[str, str] = {}
    for i, has in enumerate(types):
        if has is None:
            continue
        if i >= len(schema.inputs) and not is_variadic(schema):
            most = len(schema.inputs)
            raise Unwritable(f"{_label(schema)} takes at most {most} inputs, got {len(types)}", operator=schema.name)
        parameter = schema.inputs[min(i, len(schema.inputs) - 1)]
        if has and has not in allowed[parameter.type_str]:
            raise Unwritable(f"{_label(schema)} does not take {has} as {parameter.name}", operator=schema.name)
        if has and parameter.is_homogeneous and bound.setdefault(parameter.type_str, has) != has:
            first = bound[parameter.type_str]
            raise Unwritable(f"{_label(schema)} takes {parameter.name} as {first}, not {has}", operator=schema.name)


def _check_target_dtype(schema: Any, allowed: dict[str, list[str]], attributes: dict[str, Any]) -> None:
    """Check the dtype that an attribute requests of the result."""
    for key in ("to", "dtype", "value"):
        attribute = attributes.get(key)
        code = dtypes.onnx_code(attribute.dtype) if isinstance(attribute, np.ndarray) else attribute if key != "value" else 0
        if isinstance(code, int) and code:
            wanted = f"tensor({dtypes.onnx_name(dtypes.numpy_dtype(code))})"
            if not {wanted, f"seq({wanted})"} & {*allowed[schema.outputs[0].type_str]}:
                raise Unwritable(f"{_label(schema)} does not return {wanted}", operator=schema.name)


def _check_graphs(schema: Any, allowed: dict[str, list[str]], attributes: dict[str, Any]) -> None:
    """Check the types of the outputs of graph attributes, which become results of the node."""
    returns = allowed[schema.outputs[-1].type_str]
    for body in (v for v in attributes.values() if isinstance(v, Subgraph)):
        for info in body.proto.output:
            has = type_string(info.type)
            if has and has not in returns and f"seq({has})" not in returns:
                raise Unwritable(f"{_label(schema)} does not return {has}", operator=schema.name)


def check_results(schema: Any, allowed: dict[str, list[str]], types: Sequence[str]) -> None:
    """Check the types of the results of a node."""
    for has, parameter in zip(types, [*schema.outputs, *[schema.outputs[-1]] * len(types)], strict=False):
        if has and has not in allowed[parameter.type_str]:
            raise Unwritable(f"{_label(schema)} does not return {has}", operator=schema.name)


def _label(schema: Any) -> str:
    return f"{schema.name}-{schema.since_version}"


def is_variadic(schema: Any) -> bool:
    return bool(schema.inputs) and schema.inputs[-1].option == schema.inputs[-1].option.Variadic


def type_string(type: TypeProto | None) -> str:
    """ONNX's name of a type; "" if it is not known."""
    if type is None:
        return ""
    kind = type.WhichOneof("value")
    if kind == "tensor_type":
        code = type.tensor_type.elem_type
        return f"tensor({dtypes.onnx_name(dtypes.numpy_dtype(code))})" if code else ""
    if kind == "sequence_type":
        inner = type_string(type.sequence_type.elem_type)
        return f"seq({inner})" if inner else ""
    if kind == "optional_type":
        inner = type_string(type.optional_type.elem_type)
        return f"optional({inner})" if inner else ""
    return ""
