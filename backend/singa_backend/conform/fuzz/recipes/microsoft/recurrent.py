"""Recipes of linear attention and of recurrent layers."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe
from .normalization import drop_absent


def negative(x: np.ndarray) -> np.ndarray:
    """Return -x, in its dtype."""
    return (-x.astype(np.float32)).astype(x.dtype)


@recipe("LinearAttention", MICROSOFT)
def linear_attention(d: Draw) -> None:
    b, t, few, size, wide = d.whole(1, 2), d.whole(1, 4), d.whole(1, 2), d.pick([2, 4]), d.pick([2, 4])
    many = few * d.whole(1, 2)
    heads, kv = (many, few) if d.chance(0.7) else (few, many)
    rule = d.attr("update_rule", ["linear", "gated", "delta", "gated_delta"], "gated_delta")
    d.attributes |= {"q_num_heads": heads, "kv_num_heads": kv}
    d.put(d.array(0, (b, t, heads * size), "around"), d.array(1, (b, t, kv * size), "around"))
    window = d.attr("state_window", [0, 0, 0, 0, 0, 1, 3, 6], 0)
    state = (b, kv, size, wide)
    d.put(d.array(2, (b, t, kv * wide), "around"))
    d.put(d.array(3, (window, *state) if window else state, "around") if d.chance(0.6) else None)
    unused = d.chance(0.1)
    d.put(negative(d.array(4, (b, t, kv * d.pick([1, size])), "unit")) if "gated" in rule or unused else None)
    d.put(d.array(5, (b, t, d.pick([kv, 1])), "unit") if "delta" in rule or unused else None)
    drop_absent(d)
    d.attr("scale", lambda: d.real(0.1, 1), 0.0)
    d.outputs = ["y", "present"]
