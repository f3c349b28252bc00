"""Batch normalization by its batch or by given statistics, and its gradient, on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .float_products import require_any_bits
from .group_norms import subtract_statistics, write_affine
from .lowering import channels_last, dense_desc, desc, emit, require_gradient, require_plain, threads_for
from .moments import LONG, emit_gradient, emit_moments
from .onednn import MemoryDesc, Primitive, backward
from .table import Site, gradient, training
from .values import FINITE, Bound, Value, last_order

_FLAGS = dnn.USE_SCALE | dnn.USE_SHIFT


def _takes(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    """In training, given statistics have no gradient here; otherwise, that of the input alone is one product."""
    return not any(needs[3:]) if attributes.get("training_mode") else any(n for i, n in enumerate(needs) if i in (1, 3, 4))


def _flags(site: Site) -> int:
    return _FLAGS if site.attributes["training_mode"] else _FLAGS | dnn.USE_GLOBAL_STATS


def _desc(site: Site, x: Value) -> MemoryDesc:
    """The description of the values, with the channels innermost in memory."""
    site.require(2 <= x.ndim <= 5, "the rank is not 2 to 5")
    site.require(site.attributes["epsilon"] > 0, "epsilon is 0, and a variance may be")
    return dense_desc(x.dtype, x.shape, last_order(x.ndim))


def _forward(site: Site, x: Value) -> Primitive:
    """The normalization; of many rows, by statistics that are computed before it."""
    md, epsilon = _desc(site, x), site.attributes["epsilon"]
    with threads_for(x.size * 8):
        if not site.attributes["training_mode"] or _long(x):
            return dnn.batch_normalization(md, md, epsilon=epsilon, flags=_FLAGS | dnn.USE_GLOBAL_STATS)
        return dnn.batch_normalization(md, md, epsilon=epsilon, flags=_FLAGS, prop="training")


def _long(x: Value) -> bool:
    return x.size // x.shape[1] >= LONG


def _row(v: Value) -> Value:
    """A vector as a matrix of one row."""
    return v.view((1, v.size), (v.size * v.dtype.itemsize, v.dtype.itemsize))


def _backward(site: Site, x: Value) -> Primitive:
    md, epsilon, flags = _desc(site, x), site.attributes["epsilon"], _flags(site)
    with threads_for(x.size * 8):
        hint = dnn.batch_normalization(md, md, epsilon=epsilon, flags=flags, prop="training")
        return backward.batch_normalization_backward(md, md, md, hint=hint, epsilon=epsilon, flags=flags)


def _laid_out(site: Site, x: Value) -> Value:
    x = channels_last(site, x) if x.ndim > 2 else x
    site.require(x.ndim > 2 or x.contiguous, "the features are not innermost in memory")
    return x


@training("BatchNormalization", 14, 15)
def batch_normalization_training(
    site: Site, x: Value, scale: Value, b: Value, mean: Value, var: Value
) -> tuple[Value | None, ...]:
    """A batch normalization, which returns the statistics that it uses after its outputs: of its batch, or those given."""
    require_any_bits(site)
    given = (scale, b, mean, var)
    require_plain(site, x, *given)
    site.require(all(v.shape == x.shape[1:2] and v.contiguous for v in given), "not one value for each channel")
    site.require_finite(x, *given)
    md, made, by_batch = _desc(site, x), _forward(site, x), bool(site.attributes["training_mode"])
    x = _laid_out(site, x)
    y = site.new(x.shape, x.dtype, last_order(x.ndim), FINITE)
    if by_batch:
        moments = [site.new(x.shape[1:2], x.dtype, None, FINITE) for _ in range(2)]
    else:
        moments = [v.view(v.shape, v.strides) for v in (mean, var)]
    computed = by_batch and _long(x)
    if computed:
        emit_moments(site, x, _row(moments[0]), _row(moments[1]), x.shape[1])
    arguments = {dnn.args.SRC: (md, x), dnn.args.DST: (md, y), dnn.args.SCALE: (desc(scale), scale)}
    arguments |= {dnn.args.SHIFT: (desc(b), b)}
    arguments |= {a: (desc(v), v) for a, v in zip((dnn.args.MEAN, dnn.args.VARIANCE), moments, strict=True)}
    emit(site, made, arguments, (y, *moments) if by_batch and not computed else (y,), "batch_normalization")
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


@gradient("BatchNormalization", 14, 15, reads=("dy0?", "dy1?", "dy2?", "x0", "x1", "h0", "h1"), takes=_takes, hidden=2)
def batch_normalization_gradient(
    site: Site, dy: Value | None, dmean: Value | None, dvar: Value | None, x: Value, scale: Value, mean: Value, var: Value
) -> tuple[Value | None, ...]:
    """The gradients for the inputs; those of the running statistics that are outputs pass the statistics of the batch."""
    require_any_bits(site)
    require_plain(site, x, scale, dmean, dvar)
    if dy is not None:
        require_gradient(site, dy, x.shape)
    site.require(all(v is None or (v.shape == mean.shape and v.contiguous) for v in (dmean, dvar)), "a gradient of another shape")
    site.require_finite(dy, dmean, dvar, x, scale)
    md = _desc(site, x)
    passed = None if dmean is dvar is None else _through_statistics(site, x, dmean, dvar)
    if dy is None:
        x = _laid_out(site, x)
        if passed is None:
            site.refuse("there is no gradient of a result")
        dx = site.new(x.shape, x.dtype, last_order(x.ndim), FINITE)
        tilt, shift = passed
        write_affine(site, dx, x, _row(mean), _row(tilt), _row(shift), adds=False)
        zeros = (site.shared_constant(("zeros", scale.size), lambda: np.zeros(scale.size, np.float32)) for _ in range(2))
        return dx, *zeros, None, None
    made = None if _long(x) else _backward(site, x)
    x, same = _laid_out(site, x), dy
    dy = _laid_out(site, dy)
    if dy is same and site.reusable(0):
        dx = dy.view(dy.shape, dy.strides)
    else:
        dx = site.new(x.shape, x.dtype, last_order(x.ndim), FINITE)
    if made is None:
        moments = (_row(mean), _row(var))
        parts = emit_gradient(site, dy, x, scale, moments, dx)
        if site.attributes["training_mode"]:
            subtract_statistics(site, x.shape[1], dx, x, scale, moments, parts)
        dscale, dshift = (p.view(scale.shape, scale.strides) for p in parts)
    else:
        dscale, dshift = (site.new(scale.shape, scale.dtype, None, FINITE) for _ in range(2))
        vector = desc(scale)
        arguments = {
            dnn.args.SRC: (md, x), dnn.args.DIFF_DST: (md, dy), dnn.args.DIFF_SRC: (md, dx), dnn.args.SCALE: (vector, scale),
            dnn.args.MEAN: (vector, mean), dnn.args.VARIANCE: (vector, var),
            dnn.args.DIFF_SCALE: (vector, dscale), dnn.args.DIFF_SHIFT: (vector, dshift),
        }  # fmt: skip
        emit(site, made, arguments, (dx, dscale, dshift), "batch_normalization gradient")
    if passed is not None:
        tilt, shift = passed
        write_affine(site, dx, x, _row(mean), _row(tilt), _row(shift))
    return dx, dscale, dshift, *_of_statistics(site, scale, var, dscale, dshift)


def _through_statistics(site: Site, x: Value, dmean: Value | None, dvar: Value | None) -> tuple[Value, Value]:
    """The factor of x - mean in the gradient of x, and a number, for each channel: what passes the running statistics."""
    site.require(site.attributes["training_mode"], "the statistics are given")
    taken = np.float32(1 - site.attributes["momentum"]) / np.float32(x.size // x.shape[1])
    tilt, shift = (site.new(x.shape[1:2], x.dtype, None, FINITE) for _ in range(2))

    def bind() -> Bound:
        return [
            (np.multiply, (0 if dvar is None else dvar.array, 2 * taken, tilt.array)),
            (np.multiply, (0 if dmean is None else dmean.array, taken, shift.array)),
        ]

    site.emit(bind, reads=(dmean, dvar), writes=(tilt, shift), kernel="numpy.running_statistic")
    return tilt, shift


def _of_statistics(site: Site, scale: Value, var: Value, dscale: Value, dshift: Value) -> tuple[Value | None, Value | None]:
    """The gradients of given statistics: -r scale dshift and -r^2 scale dscale / 2, with r = 1 / deviation."""
    if site.attributes["training_mode"] or not any(site.outputs[3:]):
        return None, None
    dmean, dvar = (site.new(scale.shape, scale.dtype, None, FINITE) for _ in range(2))
    epsilon = np.float32(site.attributes["epsilon"])

    def bind() -> Bound:
        mean, spread = dmean.array, dvar.array
        return [
            (np.add, (var.array, epsilon, spread)), (np.sqrt, (spread, mean)),
            (np.divide, (scale.array, spread, spread)), (np.multiply, (spread, dscale.array, spread)),
            (np.multiply, (spread, np.float32(-0.5), spread)),
            (np.divide, (scale.array, mean, mean)), (np.multiply, (mean, dshift.array, mean)), (np.negative, (mean, mean)),
        ]  # fmt: skip

    site.emit(bind, reads=(scale, var, dscale, dshift), writes=(dmean, dvar), kernel="numpy.statistics gradient")
    return dmean, dvar
