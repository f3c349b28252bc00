"""ONNX's own function bodies as graphs: the decomposition of one call of an operator into other operators."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from onnx import FunctionProto, NodeProto, TypeProto, helper

from ..interpreters.base import Subgraph
from ..interpreters.builder import attribute_proto
from ..ir.graph import Graph
from ..ir.reader import read
from ..proto.checker import function_body
from ..proto.schemas import newest, schemas


def function_of(name: str, version: int, given: dict[str, Any], types: tuple[bytes, ...], outputs: int) -> Graph | None:
    """ONNX's own function body of a call, as a graph; None if it has none."""
    if any(isinstance(v, Subgraph) for v in given.values()):
        return None
    node = helper.make_node(name, [f"x{i}" if t else "" for i, t in enumerate(types)], [f"y{i}" for i in range(outputs)])
    for key, value in given.items():
        node.attribute.append(attribute_proto("", name, newest(""), key, value))
    for key, attribute in schemas["", name][version].attributes.items():  # a body also refers to defaults
        if key not in given and attribute.default_value.name:
            node.attribute.append(attribute.default_value)
    return _body(name, version, node.SerializeToString(), types)


@lru_cache(maxsize=512)
def _body(name: str, version: int, node: bytes, types: tuple[bytes, ...]) -> Graph | None:
    schema: Any = schemas["", name][version]
    if schema.has_function:
        data = schema.get_function_with_opset_version(min(schema.function_opset_versions))
    elif schema.has_context_dependent_function:
        data = function_body(name, version, node, types)
        if data is None:  # some operators have a body for some types only
            return None
    else:
        return None
    function = FunctionProto.FromString(data) if isinstance(data, bytes) else data
    if not function.node:
        return None
    return _graph_of(function, node, types)


def _graph_of(function: FunctionProto, node: bytes, types: Iterable[bytes]) -> Graph | None:
    """The body with this node's attributes: read from a model whose only node calls it."""
    call = NodeProto.FromString(node)
    call.domain = "body"
    copy = FunctionProto()
    copy.CopyFrom(function)
    copy.domain, copy.name = "body", call.op_type
    made = {n for inner in copy.node for n in inner.output} | set(copy.input)
    here = [k for k, n in enumerate(copy.output[: len(call.output)]) if n in made]
    if here != list(range(len(call.output))):  # a body need not compute every optional output
        return None
    del copy.output[len(call.output) :]
    known = {*copy.attribute, *(a.name for a in copy.attribute_proto)}
    kept = [a for a in call.attribute if a.name in known]
    del call.attribute[:]
    call.attribute.extend(kept)
    infos = []
    for name, data in zip(call.input, types, strict=True):
        info = helper.make_empty_tensor_value_info(name)
        if data:
            info.type.CopyFrom(TypeProto.FromString(data))
        infos.append(info)
    graph = helper.make_graph(
        [call], "call", [i for i in infos if i.name], [helper.make_empty_tensor_value_info(n) for n in call.output]
    )
    imports = [
        helper.make_opsetid("body", 1),
        *([] if any(o.domain == "" for o in copy.opset_import) else [helper.make_opsetid("", 21)]),
    ]
    imports += [o for o in copy.opset_import if o.domain != "body"]
    model = helper.make_model(graph, functions=[copy], opset_imports=imports)
    return read(model).nodes[0].function
