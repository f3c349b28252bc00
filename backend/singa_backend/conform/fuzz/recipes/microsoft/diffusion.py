"""Recipes of operators of diffusion models, and of fused dropouts."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe
from .normalization import drop_absent


@recipe("GroupNorm SkipGroupNorm", MICROSOFT)
def group_norm(d: Draw) -> None:
    groups, n, height, width = d.whole(1, 3), d.whole(1, 2), d.whole(2, 3), d.whole(1, 3)
    c = groups * d.whole(1, 3)
    d.attributes["groups"] = groups
    d.attr("activation", [0, 1])
    last = d.attr("channels_last", [0, 1], 1)
    shape = (n, height, width, c) if last else (n, c, height, width)
    d.put(d.array(0, shape, "tame"), d.array(1, (c,), "tame"), d.array(2, (c,), "tame"))
    if d.schema.name == "SkipGroupNorm":
        d.put(d.array(3, d.pick([shape, (n, 1, 1, c) if last else (n, c, 1, 1), (n, c)]), "tame"))
        d.put(*[d.array(4, (c,), "tame")] * d.chance())
        d.outputs = ["y", "sum"] if d.chance() else ["y"]
    d.attr("epsilon", lambda: d.real(1e-4, 1e-2), 1e-5)


@recipe("BiasSplitGelu", MICROSOFT)
def bias_split_gelu(d: Draw) -> None:
    shape = (*d.shape(2, 2), 2 * d.whole(1, 4))
    d.put(d.array(0, shape, "small"), d.array(1, shape[-1:], "tame"))


@recipe("BiasAdd", MICROSOFT)
def bias_add(d: Draw) -> None:
    shape = d.shape(3, 3)
    d.put(d.array(0, shape), d.array(1, shape[-1:]), d.array(2, shape))


@recipe("BiasDropout BitmaskDropout BitmaskBiasDropout", MICROSOFT)
def dropout(d: Draw) -> None:
    """Without training, or with ratio 0: nothing is dropped."""
    shape = d.shape(1)
    d.put(d.array(0, shape, "tame"))
    if d.schema.name != "BitmaskDropout":
        d.put(d.array(1, d.pick([shape, shape[-1:]]), "tame"), d.array(2, shape, "tame") if d.chance() else None)
    training = d.chance(0.4)
    if training or d.chance():
        d.put(np.array(0 if training else d.real(0, 0.9)).astype(d.dtype("T1")))
        d.put(np.array(training))
    drop_absent(d)
    d.attr("seed", [3], 0)
    d.outputs = ["y", "mask"] if d.chance() else ["y"]
