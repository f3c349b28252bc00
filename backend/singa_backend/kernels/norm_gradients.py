"""Batch normalization in training, and its gradient, on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .lowering import channels_last, dense_desc, desc, emit, require_gradient, require_plain, threads_for
from .onednn import MemoryDesc, Primitive, backward
from .table import Site, gradient, training
from .values import FINITE, Bound, Value, last_order

_FLAGS = dnn.USE_SCALE | dnn.USE_SHIFT


def _in_training(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return bool(attributes.get("training_mode")) and not any(needs[3:])


def _primitives(site: Site, x: Value) -> tuple[MemoryDesc, Primitive, Primitive]:
    """The description of the values, the normalization and its gradient."""
    site.require(2 <= x.ndim <= 5, "the rank is not 2 to 5")
    md = dense_desc(x.dtype, x.shape, last_order(x.ndim) if x.ndim > 2 else [0, 1])
    epsilon = site.attributes["epsilon"]
    site.require(epsilon > 0, "epsilon is 0, and a variance may be")
    with threads_for(x.size * 8):
        forward = dnn.batch_normalization(md, md, epsilon=epsilon, flags=_FLAGS, prop="training")
        return md, forward, backward.batch_normalization_backward(md, md, md, hint=forward, epsilon=epsilon, flags=_FLAGS)


def _laid_out(site: Site, x: Value) -> Value:
    x = channels_last(site, x) if x.ndim > 2 else x
    site.require(x.ndim > 2 or x.contiguous, "the features are not innermost in memory")
    return x


@training("BatchNormalization", 14, 15)
def batch_normalization_training(
    site: Site, x: Value, scale: Value, b: Value, mean: Value, var: Value
) -> tuple[Value | None, ...]:
    """A batch normalization by the statistics of its batch, which it returns after its outputs."""
    given = (scale, b, mean, var)
    require_plain(site, x, *given)
    site.require(all(v.shape == x.shape[1:2] and v.contiguous for v in given), "not one value for each channel")
    site.require_finite(x, *given)
    md, made, _ = _primitives(site, x)
    x = _laid_out(site, x)
    order = last_order(x.ndim) if x.ndim > 2 else None
    y = site.new(x.shape, x.dtype, order, FINITE)
    moments = [site.new(x.shape[1:2], x.dtype, None, FINITE) for _ in range(2)]
    arguments = {dnn.args.SRC: (md, x), dnn.args.DST: (md, y), dnn.args.SCALE: (desc(scale), scale)}
    arguments |= {dnn.args.SHIFT: (desc(b), b)}
    arguments |= {a: (desc(v), v) for a, v in zip((dnn.args.MEAN, dnn.args.VARIANCE), moments, strict=True)}
    emit(site, made, arguments, (y, *moments), "batch_normalization")
    running = [
        _running(site, old, new) if wanted else None
        for old, new, wanted in zip((mean, var), moments, site.outputs[1:3], strict=True)
    ]
    return (y, *running, *moments)


def _running(site: Site, old: Value, new: Value) -> Value:
    """A running statistic after this batch."""
    y = site.new(old.shape, old.dtype, None, FINITE)
    keep = np.float32(site.attributes["momentum"])
    take = np.float32(1 - site.attributes["momentum"])
    part = site.new(old.shape, old.dtype, None, FINITE)

    def bind() -> Bound:
        out, rest = y.array, part.array
        return [(np.multiply, (old.array, keep, out)), (np.multiply, (new.array, take, rest)), (np.add, (out, rest, out))]

    site.emit(bind, reads=(old, new), writes=(y, part), kernel="numpy.running_statistic")
    return y


@gradient("BatchNormalization", 14, 15, reads=("dy0", "x0", "x1", "h0", "h1"), takes=_in_training, hidden=2)
def batch_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, mean: Value, var: Value
) -> tuple[Value | None, ...]:
    """The gradients of a batch normalization for its input, scale and bias."""
    require_plain(site, x, scale)
    require_gradient(site, dy, x.shape)
    site.require_finite(dy, x, scale)
    md, _, made = _primitives(site, x)
    x = _laid_out(site, x)
    same = dy
    dy = _laid_out(site, dy)
    if dy is same and site.reusable(0):
        dx = dy.view(dy.shape, dy.strides)
    else:
        dx = site.new(x.shape, x.dtype, last_order(x.ndim) if x.ndim > 2 else None, FINITE)
    dscale, dshift = (site.new(scale.shape, scale.dtype, None, FINITE) for _ in range(2))
    vector = desc(scale)
    arguments = {
        dnn.args.SRC: (md, x), dnn.args.DIFF_DST: (md, dy), dnn.args.DIFF_SRC: (md, dx), dnn.args.SCALE: (vector, scale),
        dnn.args.MEAN: (vector, mean), dnn.args.VARIANCE: (vector, var),
        dnn.args.DIFF_SCALE: (vector, dscale), dnn.args.DIFF_SHIFT: (vector, dshift),
    }  # fmt: skip
    emit(site, made, arguments, (dx, dscale, dshift), "batch_normalization gradient")
    return dx, dscale, dshift, None, None
