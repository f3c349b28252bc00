"""Normalizations of onnxruntime: of a sum with a residual, and RMSNormalization under the name of its first releases."""

from __future__ import annotations

import numpy as np

from ..elementwise.compile import available
from ..proto.schemas import LAX, MICROSOFT
from .layer_norms import Rows, layer_normalization_flags, rms_normalization
from .lowering import F32
from .table import Site, kernel, worst
from .values import Bound, Value


@kernel("SimplifiedLayerNormalization", 1, on="onednn", domain=LAX)
def simplified_layer_normalization(site: Site, x: Value, scale: Value) -> tuple[Value | None, ...]:
    _require_choice(site)
    site.require(not any(site.outputs[1:]), "the inverse root is an output")
    site.require(scale.ndim == x.ndim - site.attributes["axis"] % max(x.ndim, 1), "the scale has another rank")
    return (rms_normalization(site, x, scale), None)[: len(site.outputs)]


@kernel("SkipLayerNormalization", 1, on="onednn", domain=MICROSOFT)
def skip_layer_normalization(
    site: Site, x: Value, skip: Value, gamma: Value, beta: Value | None = None, bias: Value | None = None
) -> tuple[Value | None, ...]:
    total, kept = _total(site, x, skip, (gamma, beta, bias))
    rows = Rows(site, total, gamma, beta, kept)
    return (rows.emit(rows.epsilon, layer_normalization_flags(beta)), None, None, total)[: len(site.outputs)]


@kernel("SkipSimplifiedLayerNormalization", 1, on="onednn", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    site: Site, x: Value, skip: Value, gamma: Value, bias: Value | None = None
) -> tuple[Value | None, ...]:
    total, kept = _total(site, x, skip, (gamma, bias))
    return (rms_normalization(site, total, gamma, kept), None, None, total)[: len(site.outputs)]


def _require_choice(site: Site) -> None:
    """Decline in deterministic sessions if there is machine code: the rows of the body have equal bits on other processors."""
    site.require(not site.options.deterministic or available(), "machine code computes the body of a deterministic session")


def _total(site: Site, x: Value, skip: Value, vectors: tuple[Value | None, ...]) -> tuple[Value, bool]:
    """The sum of the input, the residual and the bias, which is the last of the vectors; and whether it is an output."""
    _require_choice(site)
    site.require(not any(site.outputs[1:3]), "the mean or the deviation is an output")
    site.require(x.dtype == skip.dtype == F32 and x.ndim == 3 and x.size, "not float32, not three axes, or empty")
    site.require(x.shape == skip.shape, "the residual has another shape")
    site.require(all(v is None or v.shape == x.shape[-1:] for v in vectors), "a vector has another size")
    bias = vectors[-1]
    kept = len(site.outputs) > 3 and site.outputs[3]
    total = site.new(x.shape, F32, finiteness=worst(x, skip, bias))

    def bind() -> Bound:
        out = total.array
        added = [(np.add, (x.array, skip.array, out))]
        return added if bias is None else [*added, (np.add, (out, bias.array, out))]

    site.emit(bind, reads=(x, skip, bias), writes=(total,), kernel="numpy.add")
    return total, kept


__all__ = ["simplified_layer_normalization", "skip_layer_normalization", "skip_simplified_layer_normalization"]
