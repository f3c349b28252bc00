"""Normalizations of channels on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from . import onednn as dnn
from .lowering import F32, channels_last, dense_desc, derived, desc, emit, moves_of, require_plain, threads_for
from .moments import GIVEN, emit_moments, joined, tiled
from .onednn import MemoryDesc
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
    finiteness = worst(x, *given)
    if finiteness != FINITE or not (var.constant and (var.array + np.float32(epsilon) > 0).all()):
        finiteness = NAN
    relu = _takes_relu(site, finiteness)
    flags = dnn.USE_GLOBAL_STATS | dnn.USE_SCALE | dnn.USE_SHIFT | (dnn.FUSE_NORM_RELU if relu else 0)
    order = last_order(x.ndim) if x.ndim > 2 else [0, 1]
    md = dense_desc(x.dtype, x.shape, order)
    with threads_for(x.size * 4):
        made = dnn.batch_normalization(md, md, epsilon=epsilon, flags=flags)
    site.absorb(int(relu))
    before, x = x, channels_last(site, x) if x.ndim > 2 else x
    site.require(x.ndim > 2 or x.contiguous, "the features are not innermost in memory")
    if (x is before and site.reusable(0)) and not x.constant:
        y = x.view(x.shape, x.strides)
        y.finiteness = finiteness
    else:
        y = site.new(x.shape, x.dtype, order, finiteness)
    arguments = {dnn.args.SRC: (md, x), dnn.args.DST: (md, y)}
    for arg, v in zip((dnn.args.SCALE, dnn.args.SHIFT, dnn.args.MEAN, dnn.args.VARIANCE), given, strict=True):
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
        made = dnn.lrn(md, md, size=a["size"], alpha=a["alpha"], beta=a["beta"], k=a["bias"])
    x = channels_last(site, x)
    positive = a["alpha"] >= 0 and a["bias"] > 0
    y = site.new(x.shape, x.dtype, order, FINITE if x.finiteness == FINITE and positive else NAN)
    emit(site, made, {dnn.args.SRC: (md, x), dnn.args.DST: (md, y)}, (y,))
    return y


@kernel("GroupNormalization", 18, 21, on="onednn")
def group_normalization(site: Site, x: Value, scale: Value, b: Value) -> Value:
    """A normalization of groups of channels, with a Relu that follows."""
    groups = site.attributes["num_groups"]
    site.require(groups >= 1 and x.ndim > 2 and x.shape[1] % groups == 0, "the groups do not divide the channels")
    site.require(site.attributes.get("stash_type", 1) == 1, "the moments are not float32")
    each = x.shape[1] // groups
    if site.version == 18 and each > 1:  # one scale and one bias for each group
        site.require(scale.constant and b.constant and scale.shape == b.shape == (groups,), "not one constant for each group")
        scale, b = (derived(site, v, ("repeated", each), partial(np.repeat, v.array, each)) for v in (scale, b))
    require_channels(site, x, scale, b)
    return _with_relu(site, x, scale, b, groups, "group_normalization")


def _with_relu(site: Site, x: Value, scale: Value, b: Value, groups: int, name: str) -> Value:
    """`by_moments`, with a Relu that follows."""
    finiteness = _moments_of(site, x, scale, b)
    relu = _takes_relu(site, finiteness)
    y, _, _ = by_moments(site, x, scale, b, groups, name, finiteness, relu)
    site.absorb(int(relu))
    return y


def by_moments(
    site: Site, x: Value, scale: Value, b: Value, groups: int, name: str, finiteness: int = FINITE, relu: bool = False
) -> tuple[Value, Value, Value]:
    """A normalization of each sample by the moments of its groups of channels, which follow the result."""
    channels, rows = x.shape[1], math.prod(x.shape[2:])
    lanes = joined(rows, channels)
    md = dense_desc(F32, (1, lanes * channels, rows // lanes, 1), last_order(4))
    vector = dense_desc(F32, (lanes * channels,))
    with threads_for(x.size * 8):
        flags = GIVEN | (dnn.FUSE_NORM_RELU if relu else 0)
        made = dnn.batch_normalization(md, md, epsilon=site.attributes["epsilon"], flags=flags)
    x = channels_last(site, x)
    y = site.new(x.shape, x.dtype, last_order(x.ndim), finiteness)
    mean, var = (site.new(x.shape[:2], F32, None, finiteness) for _ in range(2))
    emit_moments(site, x, mean, var, groups)
    places = (dnn.args.MEAN, dnn.args.VARIANCE, dnn.args.SCALE, dnn.args.SHIFT)
    vectors = {a: (vector, tiled(site, v, lanes, channels)) for a, v in zip(places, (mean, var, scale, b), strict=True)}
    moves = moves_of_samples(x, (dnn.args.SRC, dnn.args.DST), places[:2], lanes)
    emit(site, made, {dnn.args.SRC: (md, x), dnn.args.DST: (md, y), **vectors}, (y,), name, moves)
    return y, mean, var


def sample_desc(x: Value) -> MemoryDesc:
    """The description of a sample with the channels innermost in memory."""
    return dense_desc(x.dtype, (1, *x.shape[1:]), last_order(x.ndim))


def moves_of_samples(x: Value, tensors: Sequence[int], vectors: Sequence[int] = (), lanes: int = 1) -> list[dict[int, int]]:
    """The places of the samples of x and other tensors without gaps, and of vectors with `lanes` numbers for each channel."""
    channels = x.shape[1] * F32.itemsize
    sample = math.prod(x.shape[2:]) * channels
    return moves_of(range(x.shape[0]), dict.fromkeys(tensors, sample) | dict.fromkeys(vectors, lanes * channels))


def require_channels(site: Site, x: Value, *given: Value) -> None:
    """Decline unless x has channels and other axes, and the others one value for each channel."""
    require_plain(site, x, *given)
    site.require(3 <= x.ndim <= 5, "the rank is not 3, 4 or 5")
    site.require(all(v.shape == x.shape[1:2] and v.contiguous for v in given), "not one value for each channel")


def _moments_of(site: Site, x: Value, *given: Value) -> int:
    """The finiteness of a normalization by the moments of x."""
    return FINITE if worst(x, *given) == FINITE and site.attributes["epsilon"] > 0 else NAN


def _takes_relu(site: Site, finiteness: int) -> bool:
    """Whether a Relu follows that the normalization may compute."""
    taken = bool(site.followers) and site.followers[0].name == "Relu" and finiteness == FINITE
    if taken:
        site.needs_finite()
    return taken


@kernel("PRelu", 7, 9, 16, on="onednn")
def prelu(site: Site, x: Value, slope: Value) -> Value:
    """Negative elements multiplied with slopes."""
    require_plain(site, x, slope)
    padded = (1,) * (x.ndim - slope.ndim) + slope.shape
    fits = len(padded) == x.ndim and all(d in (1, s) for d, s in zip(padded, x.shape, strict=True))
    site.require(fits and slope.contiguous, "the slope does not broadcast")
    site.require(x.size >= 1 << 14 and (x.channels_last or x.contiguous), "for small inputs")
    site.require(worst(x, slope) == FINITE, "the input may be infinite")
    site.needs_finite()
    wide, md = dense_desc(x.dtype, padded), desc(x)
    with threads_for(x.size * 4):
        made = dnn.prelu(md, wide, md)
    y = site.new(x.shape, x.dtype, last_order(x.ndim) if x.channels_last else None, FINITE)
    emit(site, made, {dnn.args.SRC: (md, x), dnn.args.WEIGHTS: (wide, slope), dnn.args.DST: (md, y)}, (y,))
    return y
