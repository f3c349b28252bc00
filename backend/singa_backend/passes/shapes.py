"""`simplify_shapes`: replace shape arithmetic by constants if sizes are known, and use 0 and -1 in a Reshape for open sizes.

Shape(x) -> Gather(1) -> Unsqueeze -> Concat(.., -1) -> Reshape        x: [n, 12, 64]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir.graph import Node
from ..ir.shapes import Dim
from ..rewriting.sizes import sizes
from .rewriter import ModelRewriter


def simplify_shapes(rewriter: ModelRewriter) -> int:
    """Replace known sizes, and the shape inputs of Reshapes, by constants."""
    count = sizes(rewriter)
    return count + sum(_reshape(rewriter, node) for node in rewriter.named("Reshape") if rewriter.version(node) >= 5)


def _reshape(rewriter: ModelRewriter, node: Node) -> bool:
    """Write the target of a Reshape as a constant: 0 for the input's size at the same axis, -1 once.

    Only in models: a plan knows sizes by their names, and each of its runs has them as numbers.
    """
    shape = node.inputs[1]
    wanted = None if shape is None else rewriter.followed(shape)
    if not isinstance(wanted, tuple) or rewriter.is_constant(shape) or node.get("allowzero", 0):
        return False
    target = constant_target(wanted, rewriter.shape(node.inputs[0]))
    if target is None:
        return False
    node.read([node.inputs[0], rewriter.editor.add_constant(rewriter.graph, np.array(target, np.int64), "shape")])
    return True


def constant_target(wanted: Sequence[Dim], sizes: Sequence[Dim] | None) -> list[int] | None:
    """The target with 0 and -1 for open sizes; None if they cannot express it.

    Known sizes are written as they are.  An open size of the input's same axis is 0: [n, 12, 64] of an input [n, m, 64] is
    [0, 12, 64].  One other open size is -1, unless a 0 occurs too, because it may copy a size of zero.
    """
    target: list[int | None] = []
    for i, e in enumerate(wanted):
        own = sizes[i] if sizes is not None and i < len(sizes) else None
        target.append(e if isinstance(e, int) else 0 if e == own else None)
    if None in target and (target.count(None) > 1 or -1 in target or 0 in target):
        return None  # the size that 0 copies may be zero, and then -1 is undefined
    return [-1 if t is None else t for t in target]
