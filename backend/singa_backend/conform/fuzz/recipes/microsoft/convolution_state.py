"""Recipes of causal convolutions with a state."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


@recipe("CausalConvWithState", MICROSOFT)
def causal_conv_with_state(d: Draw) -> None:
    n, length, k, last = d.whole(1, 2), d.whole(1, 5), d.whole(1, 4), d.chance(0.4)
    inner = d.shape(1, 2, 3, empty=0) if last else (d.whole(1, 4),)
    c, dilation = int(np.prod(inner)), d.attr("dilation", [1, 2, 3], 1)
    window = d.attr("state_window", [0, 0, 0, 0, 0, 1, 3], 0)
    history = (k - 1) * dilation
    d.put(d.array(0, (n, length, *inner) if last else (n, *inner, length), "around"), d.array(1, (c, 1, k), "around"))
    d.put(d.array(2, (c,), "around") if d.chance() else None)
    if d.chance(0.7):
        slot = (n, history, *inner) if last else (n, *inner, history)
        d.put(d.array(3, (window, *slot) if window else slot, "around"))
    elif d.inputs[-1] is None:
        d.inputs.pop()
    if last:
        d.attributes["channels_last"] = 1
    d.attr("activation", ["none", "silu", "swish"], "none")
    d.outputs = ["y", "present"]


@recipe("VarlenCausalConvWithState", MICROSOFT)
def varlen_causal_conv_with_state(d: Draw) -> None:
    batch, c, k = d.whole(1, 3), d.whole(1, 4), d.whole(1, 4)
    ends = np.cumsum([0, *d.wholes(1, 4, batch)])
    dilation, capacity = d.attr("dilation", [1, 2], 1), d.attr("state_update_capacity", [1, 2, 3], 0)
    d.put(d.array(0, (int(ends[-1]), c), "around"), d.array(1, (c, 1, k), "around"), d.ints(ends, np.int32))
    d.put(d.array(3, (c,), "around") if d.chance() else None, d.array(4, (batch, c, (k - 1) * dilation), "around"))
    if capacity:
        d.put(d.ints(d.wholes(0, 4, batch), np.int32))
    d.attr("activation", ["none", "silu", "swish"], "none")
    d.outputs = ["y", "final", *["update"] * (capacity > 0)]
