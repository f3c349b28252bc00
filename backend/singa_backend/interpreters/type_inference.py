"""Infer the output types of a node: ONNX's inference, completed by types that are known but that it does not return.

Nothing here calls onnx's C++, which a node of a file can crash: `shape_rules` infers the frequent operators, and the child
process of `proto.checker` all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from onnx import NodeProto, TypeProto, helper

from .. import dtypes
from ..ir.declaration import Declaration, declarations, newest_declaration
from ..proto.checker import Patience, infer_node
from ..proto.messages import graphs
from ..proto.schemas import is_custom, schema_version, schemas, type_strings
from ..proto.values import is_complete
from . import shape_rules


class Typed(Protocol):
    """A value of a graph whose type may be known."""

    name: str
    type: TypeProto | None
    value: np.ndarray | None


class TypeScope(Protocol):
    """What inference reads of the graph that is being built."""

    opset: int
    inputs: list[Any]
    captured: dict[str, Any]

    @property
    def patience(self) -> Patience: ...

    def type_of(self, x: Any) -> TypeProto | None: ...

    def dtype(self, x: Any) -> np.dtype[Any]: ...

    def shape(self, x: Any) -> tuple[int | str | None, ...] | None: ...

    def imported(self, domain: str) -> int: ...

    def scratch(self) -> Any: ...

    def contradicted(self, node: NodeProto, reason: str) -> None: ...


def output_types(scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The known types of a node's outputs by name; symbols: its inputs."""
    types = _inferred(scope, node, symbols)
    if any(n and n not in types for n in node.output):
        types = _bound(scope, node, symbols) | _of_states(scope, node, symbols) | types
    declaration = newest_declaration(node.domain, node.op_type)
    if declaration is not None:
        types |= _shape_of_first(scope, node, symbols, declaration)
        _complete_rank(scope, node, symbols, types, declaration)
    return types


def _of_states(scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The element types of the last states of a Loop or Scan, which are those of the first ones."""
    if node.domain or node.op_type not in ("Loop", "Scan"):
        return {}
    scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
    first = 2 if node.op_type == "Loop" else 1 if scope.opset < 9 else 0  # after M and cond, or the lengths of Scan-8
    states = symbols[first : len(symbols) - scanned]
    types = {n: s.type for n, s in zip(node.output, states, strict=False) if n and s is not None and s.type is not None}
    tensors = {n: t.tensor_type.elem_type for n, t in types.items() if t.WhichOneof("value") == "tensor_type"}
    return {n: helper.make_tensor_type_proto(code, None) for n, code in tensors.items() if code}


def _bound(scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The element types of the outputs that have only one, or share a type parameter with an input: known if inference fails."""
    version = schema_version(node.domain, node.op_type, scope.imported(node.domain))
    if version is None:
        return {}
    schema = schemas[node.domain, node.op_type][version]
    bound: dict[str, TypeProto] = {}
    for parameter, s in zip(schema.inputs, symbols, strict=False):
        if s is not None and s.type is not None and s.type.WhichOneof("value") == "tensor_type" and parameter.is_homogeneous:
            code = s.type.tensor_type.elem_type
            if code:
                bound.setdefault(parameter.type_str, helper.make_tensor_type_proto(code, None))
    formal = [schema.outputs[min(i, len(schema.outputs) - 1)] for i in range(len(node.output))]
    first = next(iter(bound.values()), None)
    if first is not None and dtypes.is_float(dtypes.numpy_dtype(first.tensor_type.elem_type)):
        for constraint in schema.type_constraints:  # an absent initial state has the type of the first input
            if all("float" in t or "double" in t for t in constraint.allowed_type_strs):
                bound.setdefault(constraint.type_param_str, first)
    allowed = type_strings(schema)
    for p in formal:
        only = dtypes.from_type_string(allowed[p.type_str][0]) if len(allowed[p.type_str]) == 1 else None
        if only is not None:
            bound.setdefault(p.type_str, helper.make_tensor_type_proto(dtypes.onnx_code(only), None))
    return {n: bound[p.type_str] for n, p in zip(node.output, formal, strict=True) if p.type_str in bound and p.is_homogeneous}


def _inferred(scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The types of a node's outputs, by ONNX's own inference."""
    version = schema_version(node.domain, node.op_type, scope.imported(node.domain))
    if version is None:
        return {}
    schema = schemas[node.domain, node.op_type][version]
    if is_custom(node.domain):
        return _of_custom(scope, node, symbols, version)
    known: dict[str, TypeProto] = {}
    for s in symbols:
        if s is not None:
            if s.type is None or not is_complete(s.type):
                return {}
            known[s.name] = s.type
    if not node.domain:
        values = [None if s is None else s.value for s in symbols]
        found = shape_rules.infer(schema, node, [None if s is None else s.type for s in symbols], values)
        if found is not None:
            return found
    data = {s.name: s.value for s in symbols if s is not None and s.value is not None}
    if graphs(node):
        outer = {n: scope.type_of(v) for n, v in list(scope.captured.items())} | {s.name: s.type for s in scope.inputs}
        known = {n: t for n, t in outer.items() if t is not None} | known
    answer = infer_node(node, version, known, data, scope.opset, scope.patience)
    if answer.contradiction:
        scope.contradicted(node, answer.contradiction)
    return answer.types


def _shape_of_first(
    scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None], declaration: Declaration
) -> dict[str, TypeProto]:
    """The type of a result that has the shape of the first input, which ONNX's inference does not return."""
    known = "shape_of_first" in declaration.traits or ("unary" in declaration.traits and is_custom(declaration.domain))
    if not known or not symbols or symbols[0] is None or symbols[0].type is None:
        return {}
    dtype = _fixed_dtype(declaration) or scope.dtype(symbols[0])
    return {node.output[0]: helper.make_tensor_type_proto(dtypes.onnx_code(dtype), scope.shape(symbols[0]))}


def _fixed_dtype(declaration: Declaration) -> np.dtype[Any] | None:
    """The dtype of the first output if the schema allows only one."""
    schema = schemas[declaration.domain, declaration.name][declaration.versions[-1]]
    allowed = type_strings(schema)[schema.outputs[0].type_str]
    return dtypes.from_type_string(allowed[0]) if len(allowed) == 1 else None


def _of_custom(scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None], version: int) -> dict[str, TypeProto]:
    """The output types of an operator that ONNX lacks: those of its decomposition."""
    declaration = declarations[node.domain, node.op_type][version]
    if declaration.decomposition_rule is None or graphs(node):
        return {}
    scratch = scope.scratch()
    inputs = [
        None if s is None else scratch.constant(s.value) if s.value is not None else scratch.input("x", s.type) for s in symbols
    ]
    attributes = {a.name: _decoded(helper.get_attribute_value(a)) for a in node.attribute}
    made = declaration.decompose(scratch, version, inputs, attributes, len(node.output))
    return {n: y.type for n, y in zip(node.output, made, strict=True) if y is not None and y.type is not None}


def _decoded(value: Any) -> Any:
    """An attribute with strings in place of bytes."""
    if isinstance(value, list):
        return [_decoded(v) for v in value]
    return value.decode() if isinstance(value, bytes) else value


def _complete_states(scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None], types: dict[str, TypeProto]) -> None:
    """The rank of each state of a Loop that the body keeps: then it is the same after any number of iterations."""
    body = next(a.g for a in node.attribute if a.name == "body")
    for name, s, start, end in zip(node.output, symbols[2:], body.input[2:], body.output[1:], strict=False):
        first = None if s is None else scope.shape(s)
        found = types.get(name)
        if first is None or found is None or found.WhichOneof("value") != "tensor_type" or found.tensor_type.HasField("shape"):
            continue
        if all(v.type.tensor_type.HasField("shape") and len(v.type.tensor_type.shape.dim) == len(first) for v in (start, end)):
            types[name] = helper.make_tensor_type_proto(found.tensor_type.elem_type, [None] * len(first))


def _complete_broadcast(
    scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None], types: dict[str, TypeProto], declaration: Declaration
) -> None:
    """The rank of a result to which all inputs are broadcast: the highest one."""
    dtype = _fixed_dtype(declaration)
    if dtype is not None:
        types.setdefault(node.output[0], helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None))
    shapes = [None if s is None else scope.shape(s) for s in symbols]
    if node.output[0] in types and None not in shapes:
        tensor = types[node.output[0]].tensor_type
        if not tensor.HasField("shape"):
            rank = max(len(shape) for shape in shapes if shape is not None)
            types[node.output[0]] = helper.make_tensor_type_proto(tensor.elem_type, [None] * rank)


def _complete_rank(
    scope: TypeScope, node: NodeProto, symbols: Sequence[Typed | None], types: dict[str, TypeProto], declaration: Declaration
) -> None:
    """Complete the rank of the result, which ONNX's inference does not return if a size is not known."""
    if (node.domain, node.op_type) == ("", "Loop"):
        _complete_states(scope, node, symbols, types)
        return
    kind = next((t for t in declaration.traits if t.startswith("rank_")), None)
    if kind == "rank_of_broadcast":
        _complete_broadcast(scope, node, symbols, types, declaration)
        return
    if kind is None or not symbols or symbols[0] is None or node.output[0] not in types:
        return
    found = types[node.output[0]]
    if found.WhichOneof("value") != "tensor_type" or found.tensor_type.HasField("shape"):
        return
    if kind == "rank_one":
        found.CopyFrom(helper.make_tensor_type_proto(found.tensor_type.elem_type, [None]))
        return
    first = scope.shape(symbols[0])
    vector = scope.shape(symbols[-1]) if symbols[-1] is not None and len(symbols) > 1 else first
    length = vector[0] if vector and isinstance(vector[0], int) else None
    ranks: list[int | None] = [None if first is None else len(first)] if kind != "rank_of_length" else []
    ranks += [length] if kind != "rank_of_first" else []
    if all(r is not None for r in ranks):
        elem = found.tensor_type.elem_type
        found.CopyFrom(helper.make_tensor_type_proto(elem, [None] * max(r for r in ranks if r is not None)))
