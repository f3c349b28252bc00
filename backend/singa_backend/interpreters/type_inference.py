"""The types of what a node gives: what ONNX's own inference says, and what it gives up although it is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper, shape_inference

from .. import dtypes
from ..ir.declaration import declarations
from ..proto.messages import graphs
from ..proto.schemas import SINGA_DOMAIN, schema_version, schemas


class Typed(Protocol):
    """A value of a graph whose type may be known."""

    name: str
    type: TypeProto | None
    value: np.ndarray | None


class Scope(Protocol):
    """What inference reads of the graph that is being built."""

    opset: int
    inputs: list[Any]
    captured: dict[str, Any]

    def type_of(self, x: Any) -> TypeProto | None: ...

    def dtype(self, x: Any) -> np.dtype[Any]: ...

    def shape(self, x: Any) -> tuple[int | str | None, ...] | None: ...

    def imported(self, domain: str) -> int: ...

    def scratch(self) -> Any: ...


_RANKS = {
    **dict.fromkeys(("Pad", "Slice", "Tile", "Conv", "ConvTranspose", "Resize", "GridSample"), "same"),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), "same"),
    "Reshape": "length", "ConstantOfShape": "length", "Expand": "larger", "Range": "vector",
    "GreaterOrEqual": "bool", "LessOrEqual": "bool",
}  # fmt: skip
"""The rank of a result: that of the first input, the length of the vector that says its shape, the larger of the two, or 1.

"bool": the larger of the inputs' ranks; of a comparison that is a function inference does not even say that it gives bools."""

_ALIKE = {
    ("ai.onnx.ml", "Scaler"): np.float32, ("ai.onnx.ml", "Normalizer"): np.float32, ("ai.onnx.ml", "Imputer"): None,
    ("ai.onnx.ml", "Binarizer"): None, ("", "MeanVarianceNormalization"): None, ("", "GroupNormalization"): None,
}  # fmt: skip
"""Operators whose result is shaped like the first input, and its dtype (None: that too); ONNX's inference is silent."""


def output_types(scope: Scope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The types of a node's outputs by their names, as far as they are known; symbols: its inputs."""
    types = _bound(scope, node, symbols) | _inferred(scope, node, symbols) | _alike(scope, node, symbols)
    _give_rank(scope, node, symbols, types)
    return types


def _bound(scope: Scope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The element types of the outputs that share a type parameter with an input: known also where inference gives up."""
    version = schema_version(node.domain, node.op_type, scope.imported(node.domain))
    if version is None:
        return {}
    schema = schemas[node.domain, node.op_type][version]
    bound: dict[str, TypeProto] = {}
    for parameter, s in zip(schema.inputs, symbols, strict=False):
        if s is not None and s.type is not None and s.type.WhichOneof("value") == "tensor_type" and parameter.is_homogeneous:
            code = s.type.tensor_type.elem_type
            bound.setdefault(parameter.type_str, helper.make_tensor_type_proto(code, None))
    formal = [schema.outputs[min(i, len(schema.outputs) - 1)] for i in range(len(node.output))]
    first = next(iter(bound.values()), None)
    if first is not None and dtypes.is_float(dtypes.numpy_dtype(first.tensor_type.elem_type)):
        for constraint in schema.type_constraints:  # a state without a past has the type of what it begins with
            if all("float" in t or "double" in t for t in constraint.allowed_type_strs):
                bound.setdefault(constraint.type_param_str, first)
    return {n: bound[p.type_str] for n, p in zip(node.output, formal, strict=True) if p.type_str in bound and p.is_homogeneous}


def _inferred(scope: Scope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The types of a node's outputs, by ONNX's own inference."""
    version = schema_version(node.domain, node.op_type, scope.imported(node.domain))
    if version is None:
        return {}
    schema = schemas[node.domain, node.op_type][version]
    if node.domain == SINGA_DOMAIN:
        return _of_private(scope, node, symbols)
    known: dict[str, TypeProto] = {}
    if graphs(node):
        for name, value in list(scope.captured.items()):
            type = scope.type_of(value)
            if type is not None:
                known[name] = type
        known.update({s.name: s.type for s in scope.inputs if s.type is not None})
    for s in symbols:
        if s is not None:
            if s.type is None:
                return {}
            known[s.name] = s.type
    data = {s.name: numpy_helper.from_array(s.value, s.name) for s in symbols if s is not None and s.value is not None}
    try:
        found = shape_inference.infer_node_outputs(
            schema, node, known, data, opset_imports=[helper.make_opsetid("", scope.opset)], ir_version=10
        )
    except Exception:  # inference is a help; what it cannot tell stays unknown
        return {}
    return dict(found)


def _alike(scope: Scope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The type of a result that is shaped like the first input."""
    key = (node.domain, node.op_type)
    if key not in _ALIKE or symbols[0] is None or symbols[0].type is None:
        return {}
    code = dtypes.onnx_code(_ALIKE[key] or scope.dtype(symbols[0]))
    return {node.output[0]: helper.make_tensor_type_proto(code, scope.shape(symbols[0]))}


def _of_private(scope: Scope, node: NodeProto, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The types of a private operator's outputs: those of its composition."""
    scratch = scope.scratch()
    inputs = [
        None if s is None else scratch.constant(s.value) if s.value is not None else scratch.input("x", s.type) for s in symbols
    ]
    made = declarations[SINGA_DOMAIN, node.op_type][1].decompose(scratch, 1, inputs, {}, len(node.output))
    return {n: y.type for n, y in zip(node.output, made, strict=True) if y.type is not None}


def _give_rank(scope: Scope, node: NodeProto, symbols: Sequence[Typed | None], types: dict[str, TypeProto]) -> None:
    """ONNX's inference gives up a rank where a size is not known; the rank is known all the same."""
    kind = None if node.domain else _RANKS.get(node.op_type)
    if kind == "bool":
        found = types.setdefault(node.output[0], helper.make_tensor_type_proto(TensorProto.BOOL, None))
        shapes = [None if s is None else scope.shape(s) for s in symbols]
        if None not in shapes and not found.tensor_type.HasField("shape"):
            rank = max(len(shape) for shape in shapes if shape is not None)
            found.CopyFrom(helper.make_tensor_type_proto(TensorProto.BOOL, [None] * rank))
        return
    if kind is None or not symbols or symbols[0] is None or node.output[0] not in types:
        return
    found = types[node.output[0]]
    if found.WhichOneof("value") != "tensor_type" or found.tensor_type.HasField("shape"):
        return
    if kind == "vector":
        found.CopyFrom(helper.make_tensor_type_proto(found.tensor_type.elem_type, [None]))
        return
    first = scope.shape(symbols[0])
    vector = scope.shape(symbols[-1]) if symbols[-1] is not None and len(symbols) > 1 else first
    length = vector[0] if vector and isinstance(vector[0], int) else None
    ranks: list[int | None] = [None if first is None else len(first)] if kind != "length" else []
    ranks += [length] if kind != "same" else []
    if all(r is not None for r in ranks):
        elem = found.tensor_type.elem_type
        found.CopyFrom(helper.make_tensor_type_proto(elem, [None] * max(r for r in ranks if r is not None)))
