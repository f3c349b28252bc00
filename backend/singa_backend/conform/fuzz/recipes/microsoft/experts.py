"""Recipes of mixtures of experts."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe
from .normalization import drop_absent


@recipe("MoE", MICROSOFT)
def moe(d: Draw) -> None:
    e, h, i, n = d.whole(1, 4), d.whole(1, 5), d.whole(1, 4), d.whole(1, 4)
    kind = d.pick(["relu", "gelu", "silu", "swiglu", "swiglu", "swiglu", "identity", *["relu2", "geglu"] * d.chance(0.1)])
    fusion = d.pick([1, 1, 1, 1, 2, 0]) if kind == "swiglu" else d.pick([1, 2]) if kind == "geglu" else 0
    third = kind == "swiglu" and not fusion
    wide = 2 * i if fusion else i
    x = d.array(0, d.pick([(n, h), (1, n, h)]), "around")
    router = np.array([d.rng.permutation(e) for _ in range(n)]) / 2  # without ties
    d.put(x, router.astype(x.dtype), d.array(2, (e, wide, h), "around"), d.array(3, (e, wide), "around") if d.chance() else None)
    d.put(d.array(4, (e, h, i), "around"), d.array(5, (e, h), "around") if d.chance() else None)
    d.put(d.array(6, (e, i, h), "around") if third else None, d.array(7, (e, i), "around") if third and d.chance() else None)
    drop_absent(d)
    d.attributes |= {"activation_type": kind, "swiglu_fusion": fusion, "k": d.whole(1, e)}
    d.attr("normalize_routing_weights", [0, 1], 0)
    if kind == "swiglu":
        d.attr("activation_alpha", lambda: d.real(0.5, 2), 1.0)
        d.attr("activation_beta", lambda: d.real(0, 1), 0.0)
        d.attr("swiglu_limit", lambda: d.real(0.2, 2), None)
        d.attr("swiglu_limit_after_activation", [0, 0, 0, 1], 0)


@recipe("MoEGroupRouter", MICROSOFT)
def moe_group_router(d: Draw) -> None:
    full = d.chance(0.3)
    groups = 1 if full else d.whole(1, 3)
    e = groups * d.whole(1, 3)
    lead = d.shape(1, 2, 3, empty=0)
    values = d.rng.permutation(e * int(np.prod(lead))).reshape(*lead, e) / 4 - 2  # without ties
    if full and d.chance(0.3):
        d.put(d.array(0, (lead[0], 256), "around"), d.array(1, (e,), "around"), d.array(2, (e, 256), "around"))
    else:
        d.put(values.astype(d.dtype(0)), d.array(1, (e,), "around"))
    d.attributes |= {"n_group": groups, "topk_group": d.whole(1, groups), "top_k": d.whole(1, e)}
    d.attr("group_topk", [1, 2, 3], 2)
    d.attr("router_sentinel", lambda: d.real(-100, -50), -10000.0)
    d.outputs = ["", "scores", "weights"] if full else ["y"]
