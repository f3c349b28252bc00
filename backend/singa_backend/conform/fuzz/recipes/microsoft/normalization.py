"""Recipes of normalizations."""

from __future__ import annotations

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


def drop_absent(d: Draw) -> None:
    """Remove absent inputs at the end."""
    while d.inputs[-1] is None:
        d.inputs.pop()


@recipe("SkipLayerNormalization SkipSimplifiedLayerNormalization", MICROSOFT)
def skip_layer_normalization(d: Draw) -> None:
    b, s, h = d.whole(1, 3), d.whole(1, 3), d.whole(2, 6)
    x = (b, s, h) if d.chance(0.8) else (s, h)
    skip = x if len(x) == 2 or d.chance(0.7) else d.pick([(s, h), (1, s, h)])
    d.put(d.array(0, x, "tame"), d.array(1, skip, "tame"))
    for i in range(2, len(d.schema.inputs)):
        d.put(d.array(i, (h,), "tame") if i == 2 or d.chance() else None)
    drop_absent(d)
    d.outputs = d.pick([["y"], ["y", "", "", "sum"], ["y", "", "", "sum"], ["y", "mean"], ["y", "mean", "inv", "sum"]])
    d.attr("epsilon", lambda: d.real(1e-5, 1e-2), 1e-12)


@recipe("EmbedLayerNormalization", MICROSOFT)
def embed_layer_normalization(d: Draw) -> None:
    b, s, h, n = d.whole(1, 3), d.whole(1, 4), d.whole(2, 6), d.whole(4, 6)
    segments, rows = d.chance(), (b, s)

    def ids(shape: tuple[int, ...]) -> object:
        return d.ints(d.rng.integers(0, n, shape), d.dtype("T1"))

    d.put(ids(rows), ids(rows) if segments else None, d.array(2, (n, h), "tame"), d.array(3, (n, h), "tame"))
    d.put(d.array(4, (n, h), "tame") if segments else None, d.array(5, (h,), "tame"), d.array(6, (h,), "tame"))
    d.put(d.ints(d.rng.integers(0, 2, rows), d.dtype("T1")) if d.chance() else None)
    d.put(ids((b, s) if d.chance() else (1, s)) if d.chance() else None)
    drop_absent(d)
    d.outputs = d.pick([["y", "counts"], ["y", "counts"], ["y", "counts", "sum"], ["y", "", "sum"], ["y"]])
    d.attr("epsilon", lambda: d.real(1e-5, 1e-2), 1e-12)


@recipe("QEmbedLayerNormalization", MICROSOFT)
def quantized_embed_layer_normalization(d: Draw) -> None:
    b, s, h, n = d.whole(1, 3), d.whole(1, 4), d.whole(2, 6), d.whole(4, 6)
    segments = d.chance()

    def ids() -> object:
        return d.ints(d.rng.integers(0, n, (b, s)), d.dtype("T1"))

    shapes = [(n, h), (n, h), (n, h), (h,), (h,)]
    d.put(ids(), ids() if segments else None)
    d.put(*(d.array("T2", shape) if i != 2 or segments else None for i, shape in enumerate(shapes)))
    d.put(d.ints(d.rng.integers(0, 2, (b, s)), d.dtype("T1")) if d.chance() else None)
    d.put(*(d.array("T", (), "positive") if i != 2 or segments else None for i in range(5)))
    d.put(*(d.array("T2", ()) if i != 2 or segments else None for i in range(5)))
    d.outputs = ["y", "counts"]
    d.attr("epsilon", lambda: d.real(1e-5, 1e-2), 1e-12)
