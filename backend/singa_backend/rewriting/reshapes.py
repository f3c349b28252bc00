"""Reshapes of what another call has reshaped."""

from __future__ import annotations

import numpy as np

from ..ir.graph import Node
from .identity import VIEWS
from .rewriter import Rewriter


def joined_reshapes(edit: Rewriter) -> int:
    """For any calls of the form Reshape(f(x)), where f changes the shape only, replace them by Reshape(x)."""
    return sum(call in edit.graph and join_reshape(edit, call) for call in edit.named("Reshape"))


def join_reshape(edit: Rewriter, call: Node) -> bool:
    """Let one Reshape to constant sizes read the value before it was reshaped; sizes that it copies (0) must be known."""
    before = edit.made_by(call.inputs[0], *(VIEWS if edit.is_valid else VIEWS[:1]))
    target = edit.listed(call, "shape", 1)[1] if before is not None else None
    if before is None or target is None:
        return False
    if 0 not in target or edit.attribute(call, "allowzero", 0):
        return edit.put(call, edit.again(call, [before.inputs[0], *call.inputs[1:]], call.outputs, [call]))
    between = edit.shape(before.outputs[0]) or ()
    sizes = [between[i] if t == 0 and i < len(between) else t for i, t in enumerate(target)]
    if not all(isinstance(s, int) and s != 0 for s in sizes):
        return False
    shape = edit.add_constant(np.array(sizes, np.int64))
    return edit.put(call, edit.call("Reshape", [before.inputs[0], shape], [call], call.outputs))
