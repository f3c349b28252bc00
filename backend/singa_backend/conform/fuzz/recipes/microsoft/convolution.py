"""Recipes of convolutions."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe
from ..windows import Window, _batch

PARAMETERS = {"Relu": 0, "Tanh": 0, "Sigmoid": 0, "HardSwish": 0, "LeakyRelu": 1, "Clip": 2, "HardSigmoid": 2}


def _drawn_activation(d: Draw) -> None:
    name = d.pick([None, *sorted(PARAMETERS)])
    if name:
        d.attributes["activation"] = name
    if name and PARAMETERS[name]:
        low = d.real(0.1, 0.4)
        d.attributes["activation_params"] = [low, low + 0.5][: PARAMETERS[name]]


@recipe("FusedConv NhwcFusedConv NhwcConv", MICROSOFT)
def fused_conv(d: Draw) -> None:
    """Z has the shape of the result: it is drawn only where that is computed from the pads."""
    last = d.schema.name.startswith("Nhwc")
    w = Window(d, kernel=False)
    group = d.attr("group", [1, 2, 3], 1)
    c, m, n = group * d.whole(1, 2), group * d.whole(1, 2), _batch(d)
    shape = (n, *w.image, c) if last else (n, c, *w.image)
    d.put(d.array(0, shape, "tame"), d.array(1, (m, c // group, *w.kernel), "tame"))
    d.put(d.array(2, (m,), "tame") if d.chance() else None)
    if d.has("activation"):
        if w.auto == "NOTSET" and d.chance():
            half = len(w.kernel)
            each = zip(w.image, w.kernel, w.strides, w.dilations, w.pads[:half], w.pads[half:], strict=True)
            sizes = [(i + a + b - ((k - 1) * t + 1)) // s + 1 for i, k, s, t, a, b in each]
            d.put(d.array(3, (n, *sizes, m) if last else (n, m, *sizes), "tame"))
        _drawn_activation(d)


@recipe("ConvTransposeWithDynamicPads", MICROSOFT)
def conv_transpose_with_dynamic_pads(d: Draw) -> None:
    w = Window(d, kernel=False, pads=False)
    group = d.attr("group", [1, 2], 1)
    c, m, n = group * d.whole(1, 2), d.whole(1, 2), len(w.kernel)
    if w.auto == "NOTSET":
        d.attr("output_padding", lambda: [d.whole(0, max(s, t) - 1) for s, t in zip(w.strides, w.dilations, strict=True)], None)
    image = tuple(d.whole(2, 4) for _ in w.kernel)
    pads = [d.whole(0, k - 1) for k in w.kernel * 2] if d.chance(0.8) else [0] * (2 * n)
    d.put(d.array(0, (d.whole(1, 2), c, *image), "tame"), d.array(1, (c, m, *w.kernel), "tame"), np.array(pads, np.int64))
    if d.chance():
        d.put(d.array(3, (m * group,), "tame"))
