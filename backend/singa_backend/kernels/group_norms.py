"""Instance and group normalization in training, and their gradients: each sample by its own statistics, on oneDNN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .lowering import F32, channels_last, dense_desc, desc, emit, require_gradient, threads_for
from .normalization import combine_moments, require_channels, sample_of
from .onednn import Attributes, MemoryDesc, Primitive, backward
from .table import Site, gradient, training
from .values import FINITE, Bound, Value, last_order

_FLAGS = dnn.USE_SCALE | dnn.USE_SHIFT
_GIVEN = _FLAGS | dnn.USE_GLOBAL_STATS

BLOCK = 1 << 16
"""Elements of the samples whose moments are combined at once, so that they stay in the cache."""


def _row(x: Value, n: int) -> Value:
    """A row of a matrix, as a vector."""
    return x.view(x.shape[1:], x.strides[1:], n * x.strides[0])


def _admit(site: Site, x: Value, scale: Value, b: Value | None = None) -> None:
    given = (scale,) if b is None else (scale, b)
    require_channels(site, x, *given)
    site.require(site.attributes["epsilon"] > 0, "epsilon is 0, and a variance may be")
    site.require_finite(x, *given)


def _sample_desc(x: Value) -> MemoryDesc:
    return dense_desc(x.dtype, (1, *x.shape[1:]), last_order(x.ndim))


def _forward(site: Site, x: Value, flags: int, prop: str = "training") -> Primitive:
    md = _sample_desc(x)
    with threads_for(x.size * 8):
        return dnn.batch_normalization(md, md, epsilon=site.attributes["epsilon"], flags=flags, prop=prop)


def _places(md: MemoryDesc, x: Value, y: Value, mean: Value, var: Value, n: int) -> dict[int, tuple[MemoryDesc, Value]]:
    """The arguments of the normalization of a sample, but for its scale and shift."""
    rows = {dnn.args.MEAN: _row(mean, n), dnn.args.VARIANCE: _row(var, n)}
    return {dnn.args.SRC: (md, sample_of(x, n)), dnn.args.DST: (md, sample_of(y, n))} | {a: (desc(v), v) for a, v in rows.items()}


def _new(site: Site, x: Value) -> tuple[Value, Value, Value]:
    """Space for the result, and for a mean and a variance of each sample and channel."""
    mean, var = (site.new(x.shape[:2], F32, None, FINITE) for _ in range(2))
    return site.new(x.shape, F32, last_order(x.ndim), FINITE), mean, var


@training("InstanceNormalization", 1, 6, 22)
def instance_normalization_training(site: Site, x: Value, scale: Value, b: Value) -> tuple[Value, ...]:
    """An instance normalization, which also returns the mean and the variance of each channel of each sample."""
    _admit(site, x, scale, b)
    made, md = _forward(site, x, _FLAGS), _sample_desc(x)
    x = channels_last(site, x)
    y, mean, var = _new(site, x)
    for n in range(x.shape[0]):
        arguments = _places(md, x, y, mean, var, n)
        writes = tuple(arguments[a][1] for a in (dnn.args.DST, dnn.args.MEAN, dnn.args.VARIANCE))
        arguments |= {dnn.args.SCALE: (desc(scale), scale), dnn.args.SHIFT: (desc(b), b)}
        emit(site, made, arguments, writes, "instance_normalization")
    return y, mean, var


def _takes(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return any(needs[:2])  # the gradient of the bias alone is a sum


@gradient("InstanceNormalization", 1, 6, 22, reads=("dy0", "x0", "x1", "h0", "h1"), takes=_takes, hidden=2)
def instance_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, mean: Value, var: Value
) -> tuple[Value, Value, Value]:
    """The gradients of an instance normalization for its input, scale and bias."""
    dx, _, parts = _backward(site, dy, x, scale, (mean, var), _FLAGS)
    return dx, *_summed(site, parts)


def _backward(
    site: Site, dy: Value, x: Value, scale: Value, moments: tuple[Value, Value], flags: int
) -> tuple[Value, Value, tuple[Value, Value]]:
    """The gradient of x, x in its memory order, and the gradients of scale and bias for each sample."""
    _admit(site, x, scale)
    require_gradient(site, dy, x.shape)
    site.require_finite(dy)
    forward, md, epsilon = _forward(site, x, flags), _sample_desc(x), site.attributes["epsilon"]
    with threads_for(x.size * 8):
        made = backward.batch_normalization_backward(md, md, md, hint=forward, epsilon=epsilon, flags=flags)
    x, dy = channels_last(site, x), channels_last(site, dy)
    dx, *parts = _new(site, x)
    vector = desc(scale)
    for n in range(x.shape[0]):
        (mean, var), (dscale, dshift) = ([_row(v, n) for v in pair] for pair in (moments, parts))
        one, given, to = (sample_of(v, n) for v in (x, dy, dx))
        arguments = {
            dnn.args.SRC: (md, one), dnn.args.DIFF_DST: (md, given), dnn.args.DIFF_SRC: (md, to),
            dnn.args.MEAN: (vector, mean), dnn.args.VARIANCE: (vector, var), dnn.args.SCALE: (vector, scale),
            dnn.args.DIFF_SCALE: (vector, dscale), dnn.args.DIFF_SHIFT: (vector, dshift),
        }  # fmt: skip
        emit(site, made, arguments, (to, dscale, dshift), "batch_normalization gradient")
    return dx, x, (parts[0], parts[1])


def _summed(site: Site, parts: tuple[Value, Value]) -> tuple[Value, Value]:
    """The sums over the samples."""
    dscale, dshift = (site.new(p.shape[1:], F32, None, FINITE) for p in parts)

    def bind() -> Bound:
        return [(np.add.reduce, (p.array, 0, None, y.array)) for p, y in zip(parts, (dscale, dshift), strict=True)]

    site.emit(bind, reads=parts, writes=(dscale, dshift), kernel="numpy.add.reduce")
    return dscale, dshift


# --- groups of channels


def _groups(site: Site, x: Value) -> int:
    groups: int = site.attributes["num_groups"]
    site.require(groups >= 1 and x.ndim > 2 and x.shape[1] % groups == 0, "the groups do not divide the channels")
    site.require(site.attributes.get("stash_type", 1) == 1, "the moments are not float32")
    site.require(site.version > 18 or groups == x.shape[1], "one scale for each group")
    return groups


@training("GroupNormalization", 18, 21)
def group_normalization_training(site: Site, x: Value, scale: Value, b: Value) -> tuple[Value, ...]:
    """A group normalization, which also returns the mean and the variance of the group of each channel of each sample."""
    groups = _groups(site, x)
    _admit(site, x, scale, b)
    first, second, md = _forward(site, x, 0), _forward(site, x, _GIVEN, "inference"), _sample_desc(x)
    x = channels_last(site, x)
    y, mean, var = _new(site, x)
    count, samples = max(1, BLOCK * x.shape[0] // x.size), range(x.shape[0])
    work = site.new((count * (x.shape[1] + 2 * groups),), F32, None, FINITE)
    for block in (samples[n : n + count] for n in samples[::count]):
        places = [_places(md, x, y, mean, var, n) for n in block]
        for arguments in places:
            writes = tuple(arguments[a][1] for a in (dnn.args.DST, dnn.args.MEAN, dnn.args.VARIANCE))
            emit(site, first, arguments, writes, "moments")
        rows = [v.view((len(block), *v.shape[1:]), v.strides, block[0] * v.strides[0]) for v in (mean, var)]
        combine_moments(site, groups * len(block), rows[0], rows[1], work)
        for arguments in places:
            arguments |= {dnn.args.SCALE: (desc(scale), scale), dnn.args.SHIFT: (desc(b), b)}
            emit(site, second, arguments, (arguments[dnn.args.DST][1],), "group_normalization")
    return y, mean, var


@gradient("GroupNormalization", 18, 21, reads=("dy0", "x0", "x1", "h0", "h1"), takes=_takes, hidden=2)
def group_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, mean: Value, var: Value
) -> tuple[Value, Value, Value]:
    """The gradients of a group normalization: for given statistics, then the part that passes the statistics."""
    groups = _groups(site, x)
    dx, x, parts = _backward(site, dy, x, scale, (mean, var), _GIVEN)
    _subtract_statistics(site, groups, dx, x, scale, (mean, var), parts)
    return dx, *_summed(site, parts)


def _subtract_statistics(
    site: Site, groups: int, dx: Value, x: Value, scale: Value, moments: tuple[Value, Value], parts: tuple[Value, Value]
) -> None:
    """Subtract r (sum(scale dshift) + (x - mean) r sum(scale dscale)) / count, with sums over a group and r = 1 / deviation."""
    samples, channels = x.shape[:2]
    epsilon, count = np.float32(site.attributes["epsilon"]), np.float32(-math.prod(x.shape[1:]) // groups)
    tilts, shifts = (site.new((samples, channels), F32, None, FINITE) for _ in range(2))

    def bind() -> Bound:
        var, dscale, dshift, tilt, shift = (v.array.reshape(samples, groups, -1) for v in (moments[1], *parts, tilts, shifts))
        given = scale.array.reshape(groups, -1)

        def run() -> None:
            inverse = 1 / np.sqrt(var + epsilon)
            for out, d, factor in (tilt, dscale, inverse * inverse), (shift, dshift, inverse):
                sums = np.add.reduce(d * given, 2, keepdims=True)
                np.divide(sums, count, sums)
                np.multiply(sums, factor, out)

        return [(run, ())]

    reads = (scale, moments[1], *parts)
    site.emit(bind, reads=reads, writes=(tilts, shifts), kernel="numpy.group gradient")
    rows = [(_row(moments[0], n), _row(tilts, n), _row(shifts, n)) for n in range(samples)]
    write_affine(site, [(sample_of(dx, n), sample_of(x, n), *row) for n, row in enumerate(rows)])


def write_affine(site: Site, parts: Sequence[tuple[Value, Value, Value, Value, Value]], adds: bool = True) -> None:
    """Write (x - mean) tilt + shift to each dx, or add it, with numbers for each channel.

    Args:
        site: the place.
        parts: (dx, x, mean, tilt, shift), alike; x and dx have the channels innermost in memory.
        adds: whether to add.
    """
    x = parts[0][1]
    md, wide = dense_desc(F32, x.shape, last_order(x.ndim)), dense_desc(F32, (1, x.shape[1], *[1] * (x.ndim - 2)))
    attributes = Attributes().append_binary("mul", wide).append_binary("add", wide)
    if adds:
        attributes.append_binary("add", md)
    with threads_for(x.size * len(parts) * 4):
        made = dnn.binary(md, wide, md, algorithm="sub", attributes=attributes)
    for dx, one, mean, tilt, shift in parts:
        arguments = {
            dnn.args.SRC: (md, one), dnn.args.SRC_1: (wide, mean), dnn.args.post_op(0): (wide, tilt),
            dnn.args.post_op(1): (wide, shift), dnn.args.DST: (md, dx), **({dnn.args.post_op(2): (md, dx)} if adds else {}),
        }  # fmt: skip
        emit(site, made, arguments, (dx,), "affine gradient")
