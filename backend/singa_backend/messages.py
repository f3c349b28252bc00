"""What stands in ONNX's messages as they are, before anything is read: opsets, graphs within a node, names that it needs."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, NodeProto, OperatorSetIdProto

from .limits import check_nesting
from .operator import plain_domain

TRAINING_GRADIENT = ("ai.onnx.preview.training", "Gradient")


def imported(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """The opset of each domain that a model or a function imports."""
    return {plain_domain(entry.domain): int(entry.version) for entry in imports}


def graphs(node: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    return [g for a in node.attribute for g in ((a.g, *a.graphs) if a.HasField("g") else a.graphs)]


def reads(node: NodeProto, depth: int = 0) -> set[str]:
    """The names that a node reads, those that its graphs take from outside included, and what a Gradient differentiates.

    Raises ResourceExhausted where graphs lie too deep within each other.
    """
    names = {n for n in node.input if n}
    if (node.domain, node.op_type) == TRAINING_GRADIENT:
        names |= {a.s.decode("utf-8", "replace") for a in node.attribute if a.name == "y"}
    for graph in graphs(node):
        check_nesting(depth + 1)
        inner = {i.name for i in graph.input} | {n for p in graph.node for n in p.output}
        inner |= {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        used = {o.name for o in graph.output}
        for p in graph.node:
            used |= reads(p, depth + 1)
        names |= used - inner
    return names
