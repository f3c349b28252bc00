"""Recipes of gated activations and norms."""

from __future__ import annotations

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


def _clamp(d: Draw) -> None:
    d.attr("activation_alpha", lambda: d.real(0.5, 2), 1.0)
    d.attr("activation_beta", lambda: d.real(0, 1), 0.0)
    d.attr("limit", lambda: d.real(0.5, 3), 0.0)


@recipe("SwiGLU", MICROSOFT)
def swiglu(d: Draw) -> None:
    shape = d.shape(1)
    d.put(d.array(0, shape if d.chance() else (*shape[:-1], 2 * shape[-1]), "tame"))
    if d.inputs[0].shape == shape and shape[-1]:
        d.put(d.array(1, shape, "tame"))
    elif d.inputs[0].shape == shape:
        d.put(d.array(1, shape))
    _clamp(d)
    d.attr("round_activation", [0, 1], 0)


@recipe("ScaledSiLU", MICROSOFT)
def scaled_silu(d: Draw) -> None:
    d.put(d.array(0, d.shape(1), "tame"))
    if d.chance():
        d.put(d.array(1, d.pick([(), (1,)]), "positive"))
    d.attr("alpha", lambda: d.real(0.2, 3), 1.0)


@recipe("GatedRMSNorm", MICROSOFT)
def gated_rms_norm(d: Draw) -> None:
    c, heads = d.whole(1, 5), d.whole(1, 3)
    shape = (*d.shape(1, 3, empty=0), c * heads)
    d.put(d.array(0, shape, "tame"), d.array(1, (c,), "tame"), d.array(2, shape, "tame"))
    d.attr("activation", ["silu", "swish", "sigmoid"], "silu")
    d.attr("epsilon", lambda: d.real(1e-5, 1e-2), 1e-5)


@recipe("GatedAdd", MICROSOFT)
def gated_add(d: Draw) -> None:
    shape = d.shape(1, empty=0)
    d.put(d.array(0, shape, "tame"), d.array(1, shape, "tame"))
    k = d.whole(1, 4) if d.chance(0.2) else 0
    d.put(d.array(2, (*shape[:-1], k or 1), "tame"))
    if k:
        d.put(d.array(3, (k, 1), "tame"))


@recipe("EngramGate", MICROSOFT)
def engram_gate(d: Draw) -> None:
    b, s, m, h = (d.whole(1, 4) for _ in range(4))
    d.put(d.array(0, (b, s, m, h), "tame"), d.array(1, (b, s, m, h), "tame"), d.array(2, (b, s, h), "tame"))
    d.put(d.array(3, (m, h), "tame"), d.array(4, (m, h), "tame"))
    if d.chance():
        d.put(d.array(5, (m, h), "tame"))
        d.outputs = ["y", "normal"]
    d.attr("epsilon", lambda: d.real(1e-5, 1e-2), 1e-5)


@recipe("LinearAttentionGate", MICROSOFT)
def linear_attention_gate(d: Draw) -> None:
    shape = d.shape(3, 3, empty=0)
    d.put(d.array(0, shape, "tame"), d.array(1, shape[-1:], "tame"), d.array(2, shape[-1:], "tame"))
    if d.chance(0.7):
        d.put(d.array(3, shape, "tame"))
        d.outputs = ["decay", "beta"]


@recipe("RouterGateUpProj", MICROSOFT)
def router_gate_up_projection(d: Draw) -> None:
    k, router, inner = d.whole(1, 5), d.whole(1, 4), d.whole(1, 4)
    d.put(d.array(0, (*d.shape(1, 2, empty=0), k), "around"), d.array(1, (k, router + 2 * inner), "around"))
    d.attributes["router_size"] = router
    _clamp(d)
    d.outputs = ["router", "active"]
