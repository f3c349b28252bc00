"""Reshapes of what another call has reshaped."""

from __future__ import annotations

import numpy as np

from .identity import VIEWS
from .view import C, GraphView, V, ints_of


def joined_reshapes(view: GraphView[V, C]) -> int:
    """For any calls of the form Reshape(f(x)), where f changes the shape only, replace them by Reshape(x)."""
    return sum(view.alive(call) and join_reshape(view, call) for call in view.named("Reshape"))


def join_reshape(view: GraphView[V, C], call: C) -> bool:
    """Let one Reshape to constant sizes read the value before it was reshaped; sizes that it copies (0) must be known."""
    before = view.made_by(call.inputs[0], *(VIEWS if view.is_valid else VIEWS[:1]))
    target = ints_of(view, call, "shape", 1)[1] if before is not None else None
    if before is None or target is None:
        return False
    if 0 not in target or view.attribute(call, "allowzero", 0):
        return view.put(call, view.again(call, [before.inputs[0], *call.inputs[1:]], call.outputs, [call]))
    between = view.shape(before.outputs[0]) or ()
    sizes = [between[i] if t == 0 and i < len(between) else t for i, t in enumerate(target)]
    if not all(isinstance(s, int) and s != 0 for s in sizes):
        return False
    shape = view.add_constant(np.array(sizes, np.int64))
    return view.put(call, view.call("Reshape", [before.inputs[0], shape], [call], call.outputs))
