"""Recipes of hyper-connections."""

from __future__ import annotations

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


def _streams(d: Draw) -> tuple[tuple[int, ...], int, int, bool]:
    """Draw streams; returns the axes before them, C, H, and whether they are flattened."""
    lead, c, h, flat = d.shape(0, 2, 3, empty=0), d.whole(1, 4), d.whole(1, 5), d.chance()
    d.put(d.array(0, (*lead, c * h) if flat else (*lead, c, h), "tame"))
    if flat:
        d.attributes["num_branches"] = c
    return lead, c, h, flat


@recipe("BranchwiseRMSNorm", MICROSOFT)
def branchwise_rms_norm(d: Draw) -> None:
    _, c, h, _ = _streams(d)
    if d.chance(0.7):
        d.put(d.array(1, d.pick([(c * h,), (c, h), (h,)]), "tame"))
    d.attr("epsilon", lambda: d.real(1e-5, 1e-2), 1e-5)


@recipe("HyperConnectionPreMix", MICROSOFT)
def pre_mix(d: Draw) -> None:
    lead, c, h, flat = _streams(d)
    d.put(d.array(1, (*lead, *d.pick([(c,), (c, 1), (c, h), *[(c * h,)] * flat])), "tame"))
    d.attr("reduction_scale", d.real, 1.0)


@recipe("HyperConnectionPostMix", MICROSOFT)
def post_mix(d: Draw) -> None:
    lead, c, h, _ = _streams(d)
    d.put(d.array(1, (*lead, h), "tame"), d.array(2, (*lead, *d.pick([(c,), (c, 1), (c, h)])), "tame"))
    if d.chance():
        d.put(d.array(3, (*lead, c, c), "tame"))


@recipe("HyperConnectionLowRankMix", MICROSOFT)
def low_rank_mix(d: Draw) -> None:
    lead, c, h, r = d.shape(1, 2, 3, empty=0), d.whole(1, 4), d.whole(1, 5), d.whole(1, 3)
    shapes = [(*lead, c * h), (c * h,), (c * h, r), (r, c * h), (c * h, c)]
    shapes += [(*lead, h), (*lead, c)] if d.chance() else []
    d.put(*(d.array(i, shape, "around") for i, shape in enumerate(shapes)))
    d.attributes["num_branches"] = c
    for name in ("silu_alpha", "gate_mul", "gate_div", "reduction_scale"):
        d.attr(name, lambda: d.real(0.5, 2), 1.0)
    d.outputs = ["y", "gate", "streams"] if d.chance() else ["y", "gate"]
