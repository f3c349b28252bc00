"""Moves weights that are Constant nodes of the branches of If to the initializers of a model, so that they can train.

names = lift_weights(model)              # in place: the new initializers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from .. import dtypes
from ..proto.messages import FreshNames
from ..proto.schemas import plain_domain


def lift_weights(model: ModelProto) -> list[str]:
    """Make initializers of the float Constants in the branches of If, **in place**, if the model has no float initializer.

    A file that computes in branches, such as one for each sampling rate, has its weights there. The constants keep their names,
    unless another value has the same one. Those of the bodies of Loop and Scan, outputs of a branch, and scalars stay.

    Args:
        model: the model to change; its tensors hold their data.

    Returns:
        The names of the new initializers; none if nothing was changed.
    """
    if any(_is_float(t) for t in model.graph.initializer):
        return []
    graphs = Counter(v for graph in _graphs(model.graph) for v in set(_names(graph)))
    names = FreshNames(set(graphs))
    lifted: list[str] = []
    for graph in list(_branches(model.graph)):
        ends = {o.name for o in graph.output}
        for at in reversed(range(len(graph.node))):
            node = graph.node[at]
            tensor = None if ends & set(node.output) else _weight(node)
            if tensor is None:
                continue
            old = node.output[0]
            tensor.name = old if graphs[old] == 1 else names.new(old)
            del graph.node[at]
            if tensor.name != old:
                graphs[old] -= 1
                _rename(graph, old, tensor.name)
            model.graph.initializer.append(tensor)
            lifted.append(tensor.name)
    return lifted


def has_branches(model: ModelProto) -> bool:
    """Return whether the main graph of a model has an If.

    Args:
        model: the model.

    Returns:
        True if a node of the main graph is an If of ONNX.
    """
    return any(True for _ in _branches(model.graph))


def _weight(node: NodeProto) -> TensorProto | None:
    """The value of a Constant of floats with axes; None for other nodes."""
    if node.op_type != "Constant" or plain_domain(node.domain):
        return None
    found = next((a.t for a in node.attribute if a.name == "value"), None)
    if found is None or not found.dims or not _is_float(found):
        return None
    return numpy_helper.from_array(numpy_helper.to_array(found))


def _is_float(tensor: TensorProto) -> bool:
    return dtypes.is_float(dtypes.numpy_dtype(tensor.data_type))


def _inner(node: NodeProto) -> list[GraphProto]:
    return [g for a in node.attribute for g in ([a.g] if a.HasField("g") else a.graphs)]


def _branches(graph: GraphProto) -> Iterator[GraphProto]:
    """The branches of If in a graph, and in its branches."""
    for node in graph.node:
        if node.op_type == "If" and not plain_domain(node.domain):
            for branch in _inner(node):
                yield branch
                yield from _branches(branch)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph, and all graphs in it."""
    yield graph
    for node in graph.node:
        for inner in _inner(node):
            yield from _graphs(inner)


def _names(graph: GraphProto) -> Iterator[str]:
    """The names that a graph defines."""
    for values in (graph.input, graph.initializer):
        yield from (v.name for v in values)
    for node in graph.node:
        yield from node.output


def _rename(graph: GraphProto, old: str, new: str) -> None:
    """Replace a value that a graph reads, also in the graphs in it."""
    for inner in _graphs(graph):
        for node in inner.node:
            node.input[:] = [new if v == old else v for v in node.input]
