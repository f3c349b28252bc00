"""Facts about operators that passes need: which are deterministic, and integer lists (such as axes) in both their forms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir.graph import Node
from ..rewriting import constants
from .rewriter import ModelRewriter


def deterministic(rewriter: ModelRewriter, node: Node) -> bool:
    """Whether the node, subgraphs included, always returns the same for the same inputs; False if it is not known."""
    if not constants.deterministic(rewriter, node):
        return False
    inner = (ModelRewriter(rewriter.editor, graph) for body in node.bodies for graph in body.walk())
    return all(constants.deterministic(within, n) for within in inner for n in within.graph.nodes)


def get_ints(rewriter: ModelRewriter, node: Node, name: str, index: int, since: int) -> tuple[bool, tuple[int, ...] | None]:
    """Read a list of integers, an attribute before opset `since`, then an input: (whether the node has it, its value).

    (True, None): an input that is not constant.
    """
    if rewriter.opset < since:
        value = node.get(name)
        return value is not None, None if value is None else tuple(int(v) for v in value)
    return node.input(index) is not None, rewriter.ints(node.input(index))


def set_ints(
    rewriter: ModelRewriter, node: Node, name: str, index: int, since: int, values: Sequence[int], dtype: type = np.int64
) -> None:
    """Write such a list in the form that the opset requires."""
    if rewriter.opset < since:
        node.set(**{name: [int(v) for v in values]})
        return
    inputs = [*node.inputs, *[None] * (index + 1 - len(node.inputs))]
    inputs[index] = rewriter.editor.add_constant(rewriter.graph, np.asarray(values, dtype), name)
    node.read(inputs)


def axes_since(node: Node) -> int:
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
