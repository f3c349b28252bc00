"""Write a finished graph as a ModelProto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from ..errors import UnsupportedModel
from ..interpreters.builder import GraphBuilder
from ..proto import save
from ..proto.messages import graphs
from ..proto.schemas import is_private, newest, newest_taken, public_domain, schema_version
from .custom_functions import functions
from .rule_bodies import gradient_functions
from .writer import OpsetWriter


def to_model(
    graph: GraphBuilder | OpsetWriter,
    name: str,
    outputs: Sequence[Any],
    names: Sequence[str] | None = None,
    *,
    deferred: bool = False,
    functions_of_gradients: bool = True,
) -> ModelProto:
    """The model of a graph, with the opsets that its nodes require and the function bodies of custom operators.

    Args:
        graph: the builder or writer of the graph.
        name: the name of the graph.
        outputs: the values of its outputs.
        names: the names of the outputs; None for those of the values.
        functions_of_gradients: whether the gradients that are calls have functions; without them only this process reads it.
        deferred: leave the data of large initializers in the builder's `arrays`, for `save.save` or `save.attach_data`.
    """
    forms: list[FunctionProto] = []
    if isinstance(graph, OpsetWriter):
        builder, outputs = graph.builder, graph.own(outputs, names)
        forms = list(graph.functions.forms.values()) if graph.functions is not None else []
    else:
        builder = graph
    proto = builder.proto(name, builder.finish(outputs, names), deferred=True)
    bodies = [*functions(proto, builder.opset, builder.imported), *forms]
    if functions_of_gradients:
        bodies += gradient_functions(proto, builder)
    used: dict[str, set[str]] = {o.domain: set() for f in bodies for o in f.opset_import}
    for node in _nodes(proto):
        used.setdefault(node.domain, set()).add(node.op_type)
    imports = [helper.make_opsetid("", builder.opset)]
    for domain in sorted(used.keys() - {""}):
        imports.append(helper.make_opsetid(domain, builder.domains.get(domain) or _version(domain, used[domain])))
    model = helper.make_model(proto, opset_imports=imports, functions=bodies, producer_name="sonnx")
    if any(is_private(d) for d in used):
        _publish(model)
    finish(model)
    if not deferred:
        save.attach_data(model.graph, builder.arrays)
    return model


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for inner in graphs(node):
            yield from _nodes(inner)


def _publish(model: ModelProto) -> None:
    """Write the public domains of operators that only some models have; raises UnsupportedModel if two would be one (SX206)."""
    nodes = [*_nodes(model.graph), *(n for f in model.functions for n in f.node)]
    found: dict[tuple[str, str], str] = {}
    for node in nodes:
        public = public_domain(node.domain)
        if found.setdefault((public, node.op_type), node.domain) != node.domain:
            text = f"a file must have one operator {public}.{node.op_type}, got those of {found[public, node.op_type]!r} and "
            raise UnsupportedModel(f"{text}{node.domain!r}", code="SX206", operator=node.op_type)
    named: list[NodeProto | FunctionProto] = [*nodes, *model.functions]
    for one in named:
        one.domain = public_domain(one.domain)
    holders: list[ModelProto | FunctionProto] = [model, *model.functions]
    for holder in holders:
        versions: dict[str, int] = {}
        for entry in holder.opset_import:
            domain = public_domain(entry.domain)
            versions[domain] = max(versions.get(domain, 0), entry.version)
        del holder.opset_import[:]
        holder.opset_import.extend(helper.make_opsetid(d, v) for d, v in versions.items())


def _version(domain: str, names: Iterable[str]) -> int:
    """The opset of a domain that the model does not import yet: that of released runtimes if they have these operators."""
    taken, top = newest_taken(domain), newest(domain)
    same = all(schema_version(domain, n, taken) == schema_version(domain, n, top) for n in names)
    return (taken if same else top) or 1


def finish(model: ModelProto) -> None:
    """Set the minimum IR version of a model; before IR version 4 every initializer is also an input."""
    model.ir_version = minimum_ir_version(model)
    if model.ir_version < 4:
        there = {v.name for v in model.graph.input}
        model.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer if t.name not in there
        )


def minimum_ir_version(model: ModelProto) -> int:
    """The minimum IR version of a model's opsets, functions, and element types."""
    imports = [o for o in model.opset_import if o.domain in ("", "ai.onnx.ml")]
    version = max(helper.find_min_ir_version_for(imports, ignore_unknown=True), 8 if model.functions else 3)
    codes = {t.data_type for t in model.graph.initializer}
    codes |= {a.t.data_type for node in model.graph.node if node.op_type == "Constant" for a in node.attribute if a.HasField("t")}
    codes |= {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output) if v.type.HasField("tensor_type")}
    return max([version, *(_IR_OF_TYPE.get(c, 0) for c in codes)])


_IR_OF_TYPE: dict[int, int] = {
    TensorProto.BFLOAT16: 4, **dict.fromkeys((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ), 9), TensorProto.UINT4: 10, TensorProto.INT4: 10, TensorProto.FLOAT4E2M1: 11,
    TensorProto.FLOAT8E8M0: 12, TensorProto.UINT2: 13, TensorProto.INT2: 13,
}  # fmt: skip
"""The IR version that introduced an element type."""
