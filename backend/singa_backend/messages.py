"""What whoever edits ONNX's messages needs: the graphs within a node, the names in a graph, a name that is free."""

from __future__ import annotations

from onnx import GraphProto, NodeProto


def graphs(node: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    return [g for a in node.attribute for g in ((a.g, *a.graphs) if a.HasField("g") else a.graphs)]


def defined(graph: GraphProto) -> set[str]:
    """The names of the values that a graph has itself: inputs, initializers, what its nodes make."""
    held = (*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer))
    return {*(v.name for v in graph.input), *held, *(o for n in graph.node for o in n.output)}


def names(graph: GraphProto) -> set[str]:
    """The names of every value in a graph and the graphs within it."""
    return defined(graph).union(*(names(inner) for node in graph.node for inner in graphs(node)))


def unused(wish: str, taken: set[str]) -> str:
    """A name that is not taken, and is from now on: the wish itself where it is free."""
    name, i = wish, 0
    while name in taken:
        i += 1
        name = f"{wish}_{i}"
    taken.add(name)
    return name
