"""Instance and group normalization in training, and their gradients: each sample by its own statistics, on oneDNN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .float_products import require_any_bits
from .lowering import F32, channels_last, dense_desc, desc, emit, moves_of, require_gradient, threads_for
from .moments import LONG, emit_gradient, joined, summed, tiled
from .normalization import by_moments, moves_of_samples, require_channels, sample_desc
from .onednn import Attributes, Primitive, backward
from .table import Site, gradient, training
from .values import FINITE, Bound, Value, last_order

WIDE = 64
"""The channels from which oneDNN adds and multiplies a number for each of them as fast as it can."""

_FLAGS = dnn.USE_SCALE | dnn.USE_SHIFT


def _admit(site: Site, x: Value, scale: Value, b: Value | None = None) -> None:
    given = (scale,) if b is None else (scale, b)
    require_channels(site, x, *given)
    site.require(site.attributes["epsilon"] > 0, "epsilon is 0, and a variance may be")
    site.require_finite(x, *given)


def _forward(site: Site, x: Value) -> Primitive:
    """The normalization of a sample by its statistics."""
    md = sample_desc(x)
    with threads_for(x.size * 8):
        return dnn.batch_normalization(md, md, epsilon=site.attributes["epsilon"], flags=_FLAGS, prop="training")


def _new(site: Site, x: Value) -> tuple[Value, Value, Value]:
    """Space for the result, and for a mean and a variance of each sample and channel."""
    mean, var = (site.new(x.shape[:2], F32, None, FINITE) for _ in range(2))
    return site.new(x.shape, F32, last_order(x.ndim), FINITE), mean, var


@training("InstanceNormalization", 1, 6, 22)
def instance_normalization_training(site: Site, x: Value, scale: Value, b: Value) -> tuple[Value, ...]:
    """An instance normalization, which also returns the mean and the variance of each channel of each sample."""
    require_any_bits(site)
    _admit(site, x, scale, b)
    if math.prod(x.shape[2:]) >= LONG:
        return by_moments(site, x, scale, b, x.shape[1], "instance_normalization")
    made, md, vector = _forward(site, x), sample_desc(x), desc(scale)
    x = channels_last(site, x)
    y, mean, var = _new(site, x)
    arguments = {
        dnn.args.SRC: (md, x), dnn.args.DST: (md, y), dnn.args.MEAN: (vector, mean), dnn.args.VARIANCE: (vector, var),
        dnn.args.SCALE: (vector, scale), dnn.args.SHIFT: (vector, b),
    }  # fmt: skip
    moves = moves_of_samples(x, (dnn.args.SRC, dnn.args.DST), (dnn.args.MEAN, dnn.args.VARIANCE))
    emit(site, made, arguments, (y, mean, var), "instance_normalization", moves)
    return y, mean, var


def _takes(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return any(needs[:2])  # the gradient of the bias alone is a sum


@gradient("InstanceNormalization", 1, 6, 22, reads=("dy0", "x0", "x1", "h0", "h1"), takes=_takes, hidden=2)
def instance_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, mean: Value, var: Value
) -> tuple[Value, Value, Value]:
    """The gradients of an instance normalization for its input, scale and bias."""
    require_any_bits(site)
    _admit(site, x, scale)
    require_gradient(site, dy, x.shape)
    site.require_finite(dy)
    if math.prod(x.shape[2:]) >= LONG:
        return _by_given(site, x.shape[1], dy, x, scale, (mean, var))
    forward, md, epsilon = _forward(site, x), sample_desc(x), site.attributes["epsilon"]
    with threads_for(x.size * 8):
        made = backward.batch_normalization_backward(md, md, md, hint=forward, epsilon=epsilon, flags=_FLAGS)
    x, dy = channels_last(site, x), channels_last(site, dy)
    dx, dscales, dshifts = _new(site, x)
    vector = desc(scale)
    arguments = {
        dnn.args.SRC: (md, x), dnn.args.DIFF_DST: (md, dy), dnn.args.DIFF_SRC: (md, dx),
        dnn.args.MEAN: (vector, mean), dnn.args.VARIANCE: (vector, var), dnn.args.SCALE: (vector, scale),
        dnn.args.DIFF_SCALE: (vector, dscales), dnn.args.DIFF_SHIFT: (vector, dshifts),
    }  # fmt: skip
    vectors = (dnn.args.MEAN, dnn.args.VARIANCE, dnn.args.DIFF_SCALE, dnn.args.DIFF_SHIFT)
    moves = moves_of_samples(x, (dnn.args.SRC, dnn.args.DIFF_DST, dnn.args.DIFF_SRC), vectors)
    emit(site, made, arguments, (dx, dscales, dshifts), "batch_normalization gradient", moves)
    return dx, summed(site, dscales, 0), summed(site, dshifts, 0)


def _by_given(
    site: Site, groups: int, dy: Value, x: Value, scale: Value, moments: tuple[Value, Value]
) -> tuple[Value, Value, Value]:
    """The gradients for given statistics, then the part that passes the statistics."""
    x, dy = channels_last(site, x), channels_last(site, dy)
    dx = site.new(x.shape, F32, last_order(x.ndim), FINITE)
    parts = emit_gradient(site, dy, x, scale, moments, dx)
    subtract_statistics(site, groups, dx, x, scale, moments, parts)
    return dx, summed(site, parts[0], 0), summed(site, parts[1], 0)


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
    require_any_bits(site)
    groups = _groups(site, x)
    _admit(site, x, scale, b)
    return by_moments(site, x, scale, b, groups, "group_normalization")


@gradient("GroupNormalization", 18, 21, reads=("dy0", "x0", "x1", "h0", "h1"), takes=_takes, hidden=2)
def group_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, mean: Value, var: Value
) -> tuple[Value, Value, Value]:
    """The gradients of a group normalization for its input, scale and bias."""
    require_any_bits(site)
    groups = _groups(site, x)
    _admit(site, x, scale)
    require_gradient(site, dy, x.shape)
    site.require_finite(dy)
    return _by_given(site, groups, dy, x, scale, (mean, var))


def subtract_statistics(
    site: Site, groups: int, dx: Value, x: Value, scale: Value, moments: tuple[Value, Value], parts: tuple[Value, Value]
) -> None:
    """Subtract r (sum(scale dshift) + (x - mean) r sum(scale dscale)) / count, with sums over a group and r = 1 / deviation."""
    samples, channels = moments[0].shape
    epsilon, count = np.float32(site.attributes["epsilon"]), np.float32(-(x.size // samples // groups))
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
    write_affine(site, dx, x, moments[0], tilts, shifts)


def write_affine(site: Site, dx: Value, x: Value, mean: Value, tilt: Value, shift: Value, adds: bool = True) -> None:
    """Write (x - mean) tilt + shift to dx, or add it.

    Args:
        site: the place.
        dx: has the channels innermost in memory, without gaps.
        x: likewise.
        mean: (samples, channels); each sample has as many rows of x.
        tilt: likewise.
        shift: likewise.
        adds: whether to add.
    """
    samples, channels = mean.shape
    rows = x.size // samples // channels
    lanes = joined(rows, channels, WIDE)
    width = lanes * channels
    md, wide = dense_desc(F32, (1, width, rows // lanes, 1), last_order(4)), dense_desc(F32, (1, width, 1, 1))
    attributes = Attributes().append_binary("mul", wide).append_binary("add", wide)
    if adds:
        attributes.append_binary("add", md)
    with threads_for(x.size * 4):
        made = dnn.binary(md, wide, md, algorithm="sub", attributes=attributes)
    tensors = [dnn.args.SRC, dnn.args.DST, *[dnn.args.post_op(2)] * adds]
    vectors = (dnn.args.SRC_1, dnn.args.post_op(0), dnn.args.post_op(1))
    arguments = dict(zip(tensors, [(md, x), (md, dx), (md, dx)], strict=False))
    arguments |= {a: (wide, tiled(site, v, lanes, channels)) for a, v in zip(vectors, (mean, tilt, shift), strict=True)}
    steps = dict.fromkeys(tensors, rows * channels * F32.itemsize) | dict.fromkeys(vectors, width * F32.itemsize)
    emit(site, made, arguments, (dx,), "affine gradient", moves_of(range(samples), steps))
