"""Complete a graph that was built, and write it as a ModelProto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import ModelProto, TensorProto, helper, numpy_helper

from ..errors import UnsupportedModel
from ..interpreters.builder import GraphBuilder
from ..ir.graph import Graph, Value
from ..ir.writer import graph_message
from ..proto import save
from ..proto.schemas import public_domain
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
) -> ModelProto:
    """The model of a graph, with the opsets that its nodes require and the function bodies of custom operators.

    Args:
        graph: the builder or writer of the graph.
        name: the name of the graph.
        outputs: the values of its outputs.
        names: the names of the outputs; None for those of the values.
        deferred: leave the data of large initializers in the builder's `arrays`, for `save.save` or `save.attach_data`.
    """
    if isinstance(graph, OpsetWriter):
        return model_of(graph, graph.builder.finish(graph.own(outputs, names), names, name), deferred=deferred)
    return model_of(graph, graph.finish(outputs, names, name), deferred=deferred)


def model_of(writer: GraphBuilder | OpsetWriter, graph: Graph, *, deferred: bool = False) -> ModelProto:
    """The model of a graph that a builder or writer has finished; `deferred` as in `to_model`."""
    builder = writer.builder if isinstance(writer, OpsetWriter) else writer
    calls, arrays = writer.functions if isinstance(writer, OpsetWriter) else None, builder.arrays

    def tensor(value: Value) -> TensorProto:
        return (save.without_data if value.name in arrays else numpy_helper.from_array)(value.constant, value.name)

    versions: dict[str, int] = {}
    for domain, version in graph.opsets.items():
        public = public_domain(domain)
        versions[public] = max(versions.get(public, 0), version)
    _check_names(graph)
    gradients = gradient_functions(graph)
    model = helper.make_model(
        graph_message(graph, tensor),
        opset_imports=[helper.make_opsetid(d, v) for d, v in versions.items()],
        functions=[*functions(graph, builder.imported), *(calls.forms.values() if calls is not None else ()), *gradients],
        producer_name="sonnx",
    )
    finish(model)
    if not deferred:
        save.attach_data(model.graph, arrays)
    return model


def _check_names(graph: Graph) -> None:
    """Raise UnsupportedModel (SX206) if two operators that only some models have would be one in a file."""
    domains: dict[tuple[str, str], str] = {}
    for node in graph.all_nodes():
        public = public_domain(node.domain)
        other = domains.setdefault((public, node.op_type), node.domain)
        if other != node.domain:
            text = f"a file must have one operator {public}.{node.op_type}, got those of {other!r} and {node.domain!r}"
            raise UnsupportedModel(text, code="SX206", operator=node.op_type)


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
