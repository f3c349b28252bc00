"""Write a graph at another opset."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto

from .. import dtypes
from ..autodiff.replay import replay, visit, with_declared_types
from ..errors import OperatorError
from ..ir.graph import Graph, Node
from ..proto.values import declared_type
from .model import to_model
from .target_schema import Unwritable
from .writer import UNWRITTEN, OpsetWriter


def convert(graph: Graph, opset: int, name: str = "", writer: OpsetWriter | None = None, *, deferred: bool = False) -> ModelProto:
    """Write a graph at another opset, with the same names.

    Weights are unchanged; computations on sizes and other integers may be folded.

    Args:
        graph: the graph.
        opset: the opset to write.
        name: the name of the new graph; "" for that of the old one.
        writer: a writer that collects what cannot be written; None to raise.
        deferred: leave the data of large weights in `writer.builder.arrays`.

    Raises:
        Unwritable: the opset cannot express a node.
    """
    writer = writer or OpsetWriter(opset)
    writer.builder.domains.update({d: v for d, v in graph.opsets.items() if d})  # other domains are unchanged
    inputs = [writer.input(v.name, declared_type(v)) for v in graph.declared_inputs]
    states = {n: writer.builder.initializer(n, a, fold=not dtypes.is_float(a.dtype)) for n, a in graph.states.items()}
    writer.builder.pin(v.name for v in graph.outputs)
    writer.builder.reserve(n for node in graph.nodes for n in node.output_names if n)
    outputs = replay(writer, graph, inputs, states, visitor=_named_visit)
    with_declared_types(outputs, graph.declared_outputs)
    return to_model(writer, name or graph.name or "main", outputs, [v.name for v in graph.outputs], deferred=deferred)


def _named_visit(writer: Any, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
    """Write a node with the names that its outputs have in the file; errors name the node.

    Equal nodes are not shared, because the outputs of each have other names.
    """
    builder, problems = writer.builder, [] if writer.problems is None else writer.problems
    before, noted = builder.ir.last, len(problems)
    builder.forget_calls()
    try:
        made = visit(writer, node, inputs, frame)
    except Unwritable as error:
        raise error.locate(node=node.name) from None
    except (ValueError, OperatorError):  # a value computed from a placeholder may lack a required type
        if not problems:
            raise
        made = builder.call(node.op_type, inputs, {}, len(node.outputs), UNWRITTEN)
    for problem in problems[noted:]:
        problem.locate(node=node.name)
    builder.rename(before, made, node.output_names, node.name)
    return made
