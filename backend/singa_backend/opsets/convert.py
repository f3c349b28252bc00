"""Rewrite a graph at another opset."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto

from .. import dtypes
from ..autodiff.replay import replay, visit
from ..interpreters.builder import Symbol
from ..ir.graph import Graph, Node
from ..proto.values import declared_type
from .model import to_model
from .writer import UNWRITTEN, OpsetWriter, Unwritable, _has_rank


def convert(graph: Graph, opset: int, name: str = "", writer: OpsetWriter | None = None, *, deferred: bool = False) -> ModelProto:
    """A graph at another opset: every node in the form that the opset has, names kept; raises Unwritable.

    Weights stay as they are; sizes and other integers may be worked out.  writer: one that notes what cannot be written.
    deferred: leave the data of large weights in `writer.builder.arrays`.
    """
    writer = writer or OpsetWriter(opset)
    writer.builder.domains.update({d: v for d, v in graph.opsets.items() if d})  # other domains stay as they are
    inputs = [writer.input(v.name, declared_type(v)) for v in graph.inputs]
    states = {n: writer.builder.initializer(n, a, fold=not dtypes.is_float(a.dtype)) for n, a in graph.states.items()}
    writer.builder.reserve(n for node in graph.nodes for n in node.output_names if n)
    outputs = replay(writer, graph, inputs, states, visitor=_named_visit)
    for symbol, declared in zip(outputs, graph.outputs, strict=True):
        said = declared_type(declared)
        if said is not None and isinstance(symbol, Symbol) and not _has_rank(symbol.type):
            symbol.type = said
    return to_model(writer, name or graph.name or "main", outputs, [v.name for v in graph.outputs], deferred=deferred)


def _named_visit(writer: Any, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
    """Do what a node does, and give its results the names that they have in the file; errors name the node.

    Two nodes that do the same stay two: each has values that somebody may ask for by name.
    """
    builder, problems = writer.builder, [] if writer.problems is None else writer.problems
    before, noted = len(builder.nodes), len(problems)
    builder.forget_calls()
    try:
        made = visit(writer, node, inputs, frame)
    except Unwritable as error:
        raise error.locate(node=node.name) from None
    except ValueError:  # what hangs on a stand-in may lack the type that is asked for
        if not noted or node.operator is None:
            raise
        made = builder.call(node.operator.declaration.name, inputs, {}, len(node.outputs), UNWRITTEN)
    for problem in problems[noted:]:
        problem.locate(node=node.name)
    builder.rename(before, made, node.output_names, node.name)
    return made
