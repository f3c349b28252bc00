"""Normalizations over the last axes: LayerNormalization."""

from __future__ import annotations

import math

import numpy as np

from . import onednn
from .lowering import F32, emit, threads_for
from .onednn import DST, SCALE, SHIFT, SRC, USE_SCALE, USE_SHIFT, MemoryDesc
from .products import described
from .softmaxes import rows_of
from .table import Site, kernel, worst
from .values import FINITE, NAN, Value

COST = 10
"""FLOPs that take the time of one element."""


def _features(site: Site, v: Value, x: Value, axis: int) -> Value:
    """A scale or shift as one number for each feature."""
    lead = max(0, v.ndim - (x.ndim - axis))
    same = v.shape[lead:] == x.shape[axis:] and all(d == 1 for d in v.shape[:lead])
    site.require(same and v.dtype == F32, "one number for each feature is needed")
    if v.contiguous:
        return v.view((v.size,), (F32.itemsize,))
    y = site.new(v.shape, F32, hazard=v.hazard)
    site.emit(lambda: [(np.copyto, (y.array, v.array))], reads=(v,), writes=(y,), kernel="numpy.copyto")
    return y.view((v.size,), (F32.itemsize,))


@kernel("LayerNormalization", 17, on="onednn")
def layer_normalization(site: Site, x: Value, scale: Value, b: Value | None = None) -> tuple[Value, ...]:
    site.require(not any(site.outputs[1:]), "the mean or the deviation is an output")
    site.require(x.dtype == F32 and site.attributes["stash_type"] == 1, "not float32")
    axis, epsilon = site.attributes["axis"], site.attributes["epsilon"]
    site.require(x.size and -x.ndim <= axis < x.ndim, "the axis is out of range, or the input is empty")
    site.require(epsilon > 0 and math.isfinite(epsilon), "without a positive epsilon")
    axis %= x.ndim
    given = [(SCALE, _features(site, scale, x, axis))]
    if b is not None:
        given.append((SHIFT, _features(site, b, x, axis)))
    rows = rows_of(site, x, axis)
    inside = rows.buffer is x.buffer and site.reusable(0)
    md = described(rows)
    target = md if inside else MemoryDesc.of(F32, rows.shape)
    with threads_for(COST * x.size):
        primitive = onednn.layer_normalization(
            md, target, epsilon=epsilon, flags=USE_SCALE | (USE_SHIFT if b is not None else 0)
        )
    hazard = FINITE if worst(x, scale, b) == FINITE else NAN
    y = x.view(x.shape, x.strides) if inside else site.new(x.shape, F32, hazard=hazard)
    y.hazard = hazard
    arguments = {SRC: (md, rows), DST: (target, y)}
    arguments |= {arg: (MemoryDesc.of(F32, v.shape), v) for arg, v in given}
    emit(site, primitive, arguments, (y,))
    return (y,)
