"""Facts about operators that passes need: which are deterministic, and integer lists (such as axes) in both their forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..proto.schemas import opset_of, schema_version
from ..rewriting import constants, transposes
from .graph import GraphEditor
from .index import NodeEditor
from .view import ModelView


def version(graph: GraphEditor, node: NodeEditor) -> int | None:
    """The schema version that a node of this graph calls; None if it is not an operator of ONNX."""
    if not node.plain:
        return None
    return schema_version(node.domain, node.op_type, opset_of(graph.opsets, node.domain))


def deterministic(graph: GraphEditor, node: NodeEditor) -> bool:
    """Whether the node, subgraphs included, always returns the same for the same inputs; False if it is not known."""
    return constants.deterministic(ModelView(graph), node) and all(deterministic(inner, n) for inner, n in _within(node))


def _within(node: NodeEditor) -> Iterator[tuple[GraphEditor, NodeEditor]]:
    for graph in node.graphs.values():
        for inner in graph.walk():
            yield from ((inner, n) for n in inner.nodes)


def get_ints(graph: GraphEditor, node: NodeEditor, name: str, index: int, since: int) -> tuple[bool, tuple[int, ...] | None]:
    """Read a list of integers, an attribute before opset `since`, then an input: (whether the node has it, its value).

    (True, None): an input that is not constant.
    """
    if graph.opset < since:
        value = node.get(name)
        return value is not None, None if value is None else tuple(int(v) for v in value)
    if not node.input(index):
        return False, None
    array = graph.constant(node.input(index), 1 << 16)
    return True, None if array is None or array.dtype.kind not in "iu" else tuple(int(v) for v in array.reshape(-1))


def set_ints(
    graph: GraphEditor, node: NodeEditor, name: str, index: int, since: int, values: Sequence[int], dtype: type = np.int64
) -> None:
    """Write such a list in the form that the opset requires."""
    if graph.opset < since:
        node.set(**{name: [int(v) for v in values]})
        return
    inputs = [*node.inputs, *[""] * (index + 1 - len(node.inputs))]
    inputs[index] = graph.add_constant(np.asarray(values, dtype), name)
    graph.rewire(node, inputs)


def axes_since(node: NodeEditor) -> int:
    """The opset from which the axes of a reduction, a Squeeze or an Unsqueeze are an input."""
    return 13 if node.op_type in ("ReduceSum", "Squeeze", "Unsqueeze") else 18


def inside(axes: Sequence[int] | None, rank: int | None) -> tuple[int, ...] | None:
    """Axes counted from the front; None if one is out of range, or negative while the rank is unknown."""
    if axes is None:
        return None
    if rank is None:
        return tuple(axes) if all(a >= 0 for a in axes) else None
    found = tuple(a + rank if a < 0 else a for a in axes)
    return found if all(0 <= a < rank for a in found) and len(set(found)) == len(found) else None


def permutation(graph: GraphEditor, node: NodeEditor) -> tuple[int, ...] | None:
    """The permutation of a Transpose of this graph; None if it is not known, or `perm` is not a permutation."""
    return transposes.permutation(ModelView(graph), node)
