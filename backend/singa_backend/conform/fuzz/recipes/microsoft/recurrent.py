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
    keys = d.pick([k for k in range(1, kv + 1) if kv % k == 0])
    d.put(d.array(0, (b, t, heads * size), "around"), d.array(1, (b, t, keys * size), "around"))
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


@recipe("GatedDeltaNet", MICROSOFT)
def gated_delta_net(d: Draw) -> None:
    b, few, size, wide = d.whole(1, 3), d.whole(1, 2), d.pick([2, 4]), d.pick([2, 3])
    heads, packed, ragged = few * d.whole(1, 2), d.chance(0.2), d.chance(0.4)
    lengths = d.wholes(1, 4, b) if ragged else [d.whole(1, 4)] * b
    total, four = sum(lengths), not ragged and d.chance(0.4)
    lead = (b, lengths[0]) if four else (total,)
    if packed:
        d.put(d.array(0, (*lead, 2 * few * size + heads * wide), "around"), None, None)
    else:
        d.put(d.array(0, (*lead, few, size), "around"), d.array(1, (*lead, few, size), "around"))
        d.put(d.array(2, (*lead, heads, wide), "around"))
    d.put(d.ints(np.cumsum([0, *lengths]), np.int32) if ragged else None)
    rule = d.attr("update_rule", ["linear", "gated", "delta", "gated_delta"], "gated_delta")
    keys = d.chance(0.3)
    gate = (
        d.attr("gate_activation", ["none", "none", "softplus", "qwen", "sigmoid", "kda"], "none") if "gated" in rule else "none"
    )
    raw = d.array(4, (*lead, heads, *[size] * keys), "unit")
    d.put(negative(raw) if "gated" in rule else None, d.array(5, (*lead, heads), "unit") if "delta" in rule else None)
    started = packed or not (ragged or four) or d.chance()
    d.put(d.array(6, (b, heads, wide, size), "around") if started else None)
    forms = [(heads,), *[(heads, size), (heads * size,)] * keys]
    d.put(*((d.array(7, (heads,), "around"), d.array(8, d.pick(forms), "around")) if gate != "none" else (None, None)))
    capacity = d.pick([0, 0, 0, 1, 2])
    if capacity:
        d.attributes["state_update_capacity"] = capacity
    d.put(d.ints(d.wholes(0, 4, b), np.int32) if capacity else None)
    d.put(d.ints([d.whole(0, 1)], np.int32) if capacity and d.chance(0.3) else None)
    drop_absent(d)
    d.attr("beta_activation", ["none", "sigmoid"], "none")
    d.attr("qk_l2_norm", [0, 1], 0)
    d.attr("scale", lambda: d.real(0.1, 1), 0.0)
    d.attr("gate_lower_bound", lambda: d.real(-4, -1), -5.0)
    d.outputs = ["y", "final", *["update"] * (capacity > 0)]


@recipe("AttnLSTM", MICROSOFT)
def attention_lstm(d: Draw) -> None:
    t, b, n, h = d.whole(1, 4), d.whole(1, 3), d.whole(1, 3), d.whole(1, 3)
    steps, depth, size = d.whole(1, 4), d.whole(1, 3), d.whole(1, 3)
    layer = d.whole(1, 3) if d.chance() else 0
    direction = d.attr("direction", ["forward", "reverse", "bidirectional"], "forward")
    dirs = 2 if direction == "bidirectional" else 1
    d.attributes["hidden_size"] = h
    d.put(d.array(0, (t, b, n), "around"))
    d.put(d.array(1, (dirs, 4 * h, n + (layer or depth)), "around"), d.array(2, (dirs, 4 * h, h), "around"))
    d.put(d.array(3, (dirs, 8 * h), "around") if d.chance() else None)
    d.put(d.ints(d.wholes(1, t, b), np.int32) if d.chance(0.4) else None)
    d.put(*(d.array(i, (dirs, b, h), "around") if d.chance() else None for i in (5, 6)))
    d.put(d.array(7, (dirs, 3 * h), "around") if d.chance(0.3) else None)
    d.put(d.array(8, (dirs, h, size), "around"), d.array(9, (dirs, depth, size), "around"), d.array(10, (dirs, size), "around"))
    d.put(d.array(11, (b, steps, depth), "around"), d.ints(d.wholes(1, steps, b), np.int32) if d.chance() else None)
    d.put(d.array(13, (dirs, depth + h, layer), "around") if layer else None)
    drop_absent(d)
    d.attr("input_forget", [0, 1], 0)
    d.attr("clip", lambda: d.real(0.5, 2), None)
    if d.chance(0.3):
        d.attributes["activations"] = [d.pick(["Sigmoid", "Tanh", "Relu"]) for _ in range(3 * dirs)]
    d.outputs = ["y", "y_h", "y_c"]
