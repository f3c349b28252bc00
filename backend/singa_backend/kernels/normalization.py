"""Normalizations of channels on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

import numpy as np

from . import onednn
from .lowering import channels_last, dense_desc, desc, emit, require_plain, threads_for
from .onednn import DST, FUSE_NORM_RELU, MEAN, SCALE, SHIFT, SRC, USE_GLOBAL_STATS, USE_SCALE, USE_SHIFT, VARIANCE
from .table import Site, kernel, worst
from .values import FINITE, NAN, Value, last_order


@kernel("BatchNormalization", 1, 6, 7, 9, 14, 15, on="onednn")
def batch_normalization(site: Site, x: Value, scale: Value, b: Value, mean: Value, var: Value) -> Value:
    """A batch normalization by given statistics, with a Relu that follows."""
    given = (scale, b, mean, var)
    require_plain(site, x, *given)
    a = site.attributes
    site.require(not any(site.outputs[1:]) and not a.get("training_mode", 0) and a.get("spatial", 1), "it is training")
    site.require(site.version > 6 or a.get("is_test", 0), "it is training")
    site.require(2 <= x.ndim <= 5, "the rank is not 2 to 5")
    site.require(all(v.shape == x.shape[1:2] and v.contiguous for v in given), "not one value for each channel")
    epsilon = a["epsilon"]
    hazard = worst(x, *given)
    if hazard != FINITE or not (var.constant and (var.array + np.float32(epsilon) > 0).all()):
        hazard = NAN
    relu = bool(site.followers) and site.followers[0].name == "Relu" and hazard == FINITE
    flags = USE_GLOBAL_STATS | USE_SCALE | USE_SHIFT | (FUSE_NORM_RELU if relu else 0)
    order = last_order(x.ndim) if x.ndim > 2 else [0, 1]
    md = dense_desc(x.dtype, x.shape, order)
    with threads_for(x.size * 4):
        made = onednn.batch_normalization(md, md, epsilon=epsilon, flags=flags)
    if relu:
        site.needs_finite()
        site.absorb(1)
    before, x = x, channels_last(site, x) if x.ndim > 2 else x
    site.require(x.ndim > 2 or x.contiguous, "the features are not innermost in memory")
    if (x is before and site.reusable(0)) and not x.constant:
        y = x.view(x.shape, x.strides)
        y.hazard = hazard
    else:
        y = site.new(x.shape, x.dtype, order, hazard)
    arguments = {SRC: (md, x), DST: (md, y)}
    for arg, v in zip((SCALE, SHIFT, MEAN, VARIANCE), given, strict=True):
        arguments[arg] = (desc(v), v)
    emit(site, made, arguments, (y,))
    return y


@kernel("LRN", 1, 13, on="onednn")
def lrn(site: Site, x: Value) -> Value:
    """A normalization by the squares of neighbouring channels."""
    require_plain(site, x)
    a = site.attributes
    site.require(3 <= x.ndim <= 5 and a["size"] >= 1, "the rank is not 3, 4 or 5")
    site.require(a["size"] % 2, "the window is not symmetric")
    order = last_order(x.ndim)
    md = dense_desc(x.dtype, x.shape, order)
    with threads_for(x.size * 16):
        made = onednn.lrn(md, md, size=a["size"], alpha=a["alpha"], beta=a["beta"], k=a["bias"])
    x = channels_last(site, x)
    positive = a["alpha"] >= 0 and a["bias"] > 0
    y = site.new(x.shape, x.dtype, order, FINITE if x.hazard == FINITE and positive else NAN)
    emit(site, made, {SRC: (md, x), DST: (md, y)}, (y,))
    return y
