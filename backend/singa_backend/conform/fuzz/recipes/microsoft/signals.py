"""Recipes of transforms and of paths."""

from __future__ import annotations

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


@recipe("Rfft", MICROSOFT)
def rfft(d: Draw) -> None:
    n = d.attr("signal_ndim", [1, 2, 3], 1)
    d.put(d.array(0, (*d.shape(0, 1), *d.wholes(1, 4, n - 1), 2 * d.whole(1, 5)), "tame"))


@recipe("Irfft", MICROSOFT)
def irfft(d: Draw) -> None:
    n = d.attributes["signal_ndim"] = d.whole(1, 3)
    d.put(d.array(0, (*d.shape(0, 1), *d.wholes(1, 4, n - 1), d.whole(2, 6), 2), "tame"))


@recipe("DynamicTimeWarping", MICROSOFT)
def dynamic_time_warping(d: Draw) -> None:
    d.put(d.array(0, (*([1] * d.whole(0, 1)), d.whole(1, 7), d.whole(1, 7)), d.pick(["positive", "tame", "half"])))
