"""Normalizations over the last axes, LayerNormalization and RMSNormalization, and the gradient of the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .lowering import F32, derived, emit, require_gradient, threads_for
from .onednn import MemoryDesc, backward
from .products import described
from .softmaxes import rows_of
from .table import Site, gradient, kernel, training, worst
from .values import ANY, FINITE, NAN, Value

COST = 10
"""FLOPs that take the time of one element."""

LONGEST = 8192
"""Elements of a dot product that OpenBLAS computes in one thread."""


def _features(site: Site, v: Value, x: Value, axis: int) -> Value:
    """A scale or shift as one number for each feature."""
    lead = max(0, v.ndim - (x.ndim - axis))
    same = v.shape[lead:] == x.shape[axis:] and all(d == 1 for d in v.shape[:lead])
    site.require(same and v.dtype == F32, "one number for each feature is needed")
    if v.contiguous:
        return v.view((v.size,), (F32.itemsize,))
    y = site.new(v.shape, F32, finiteness=v.finiteness)
    site.emit(lambda: [(np.copyto, (y.array, v.array))], reads=(v,), writes=(y,), kernel="numpy.copyto")
    return y.view((v.size,), (F32.itemsize,))


class Rows:
    """The rows that a normalization computes apart, and the value that it writes.

    Args:
        site: the place.
        x: the input.
        scale: the factors.
        b: the terms.
    """

    def __init__(self, site: Site, x: Value, scale: Value, b: Value | None = None) -> None:
        site.require(x.dtype == F32 and site.attributes["stash_type"] == 1, "not float32")
        axis, self.epsilon = site.attributes["axis"], site.attributes["epsilon"]
        site.require(x.size and -x.ndim <= axis < x.ndim, "the axis is out of range, or the input is empty")
        site.require(self.epsilon > 0 and math.isfinite(self.epsilon), "without a positive epsilon")
        axis %= x.ndim
        self.site, self.x = site, x
        self.scale = _features(site, scale, x, axis)
        self.shift = None if b is None else _features(site, b, x, axis)
        self.rows = rows_of(site, x, axis)
        self.inside = self.rows.buffer is x.buffer and site.reusable(0) and scale is not x and b is not x
        self.finiteness = FINITE if worst(x, scale, b) == FINITE else NAN

    def emit(
        self,
        epsilon: float,
        flags: int,
        further: dict[int, tuple[MemoryDesc, Value]],
        prop: str = "inference",
        writes: tuple[Value, ...] = (),
    ) -> Value:
        """Add the step of oneDNN; return the result, in the memory of the input if nothing reads that again."""
        site, x, rows = self.site, self.x, self.rows
        md = described(rows)
        target = md if self.inside else MemoryDesc.of(F32, rows.shape)
        with threads_for(COST * x.size):
            primitive = dnn.layer_normalization(md, target, epsilon=epsilon, flags=flags, prop=prop)
        y = x.view(x.shape, x.strides) if self.inside else site.new(x.shape, F32)
        y.finiteness, y.low = self.finiteness, ANY
        arguments = {
            dnn.args.SRC: (md, rows),
            dnn.args.DST: (target, y),
            dnn.args.SCALE: (described(self.scale), self.scale),
            **further,
        }
        if self.shift is not None:
            arguments[dnn.args.SHIFT] = (described(self.shift), self.shift)
        emit(site, primitive, arguments, (y, *writes))
        return y


@kernel("LayerNormalization", 17, on="onednn")
def layer_normalization(site: Site, x: Value, scale: Value, b: Value | None = None) -> tuple[Value, ...]:
    site.require(not any(site.outputs[1:]), "the mean or the deviation is an output")
    rows = Rows(site, x, scale, b)
    return (rows.emit(rows.epsilon, dnn.USE_SCALE | (dnn.USE_SHIFT if b is not None else 0), {}),)


def _flags(b: Value | None) -> int:
    return dnn.USE_SCALE | (dnn.USE_SHIFT if b is not None else 0)


@training("LayerNormalization", 17)
def layer_normalization_training(site: Site, x: Value, scale: Value, b: Value | None = None) -> tuple[Value | None, ...]:
    """A layer normalization, which returns the mean and the variance of each row after its outputs."""
    site.require(not any(site.outputs[1:3]), "the mean or the deviation is an output")
    site.require(worst(x, scale, b) == FINITE, "a value may be infinite")
    site.needs_finite()
    rows = Rows(site, x, scale, b)
    count = rows.rows.shape[0]
    moments = tuple(site.new((count,), F32, None, FINITE) for _ in range(2))
    md = MemoryDesc.of(F32, (count,))
    further = {a: (md, v) for a, v in zip((dnn.args.MEAN, dnn.args.VARIANCE), moments, strict=True)}
    y = rows.emit(rows.epsilon, _flags(b), further, "training", moments)
    return (y, None, None, *moments)


def _takes(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return any(needs[:2])  # the gradient of the bias alone is a sum


@gradient("LayerNormalization", 17, reads=("dy0", "x0", "x1", "x2?", "h0", "h1"), takes=_takes, hidden=2)
def layer_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, b: Value | None, mean: Value, var: Value
) -> tuple[Value | None, ...]:
    """The gradients of a layer normalization for its input, scale and bias."""
    require_gradient(site, dy, x.shape)
    site.require(worst(dy, x, scale, b) == FINITE, "a value may be infinite")
    site.needs_finite()
    held = Rows(site, x, scale, b)
    given = rows_of(site, dy, site.attributes["axis"] % x.ndim)
    source, md = described(held.rows), described(given)
    inside = given.buffer is dy.buffer and site.reusable(0) and all(v is not dy for v in (x, scale, b))
    target = md if inside else MemoryDesc.of(F32, given.shape)
    with threads_for(COST * x.size):
        plain = MemoryDesc.of(F32, given.shape)
        hint = dnn.layer_normalization(source, plain, epsilon=held.epsilon, flags=_flags(b), prop="training")
        made = backward.layer_normalization_backward(target, md, source, hint=hint, epsilon=held.epsilon, flags=_flags(b))
    dx = dy.view(dy.shape, dy.strides) if inside else site.new(x.shape, F32, None, FINITE)
    dscale, dshift = (None if v is None else site.new(v.shape, F32, None, FINITE) for v in (scale, b))
    row, features = MemoryDesc.of(F32, mean.shape), MemoryDesc.of(F32, given.shape[1:])
    arguments: dict[int, tuple[MemoryDesc, Value]] = {
        dnn.args.SRC: (source, held.rows), dnn.args.DIFF_DST: (md, given), dnn.args.DIFF_SRC: (target, dx),
        dnn.args.SCALE: (features, held.scale), dnn.args.MEAN: (row, mean), dnn.args.VARIANCE: (row, var),
    }  # fmt: skip
    if held.shift is not None:
        arguments[dnn.args.SHIFT] = (features, held.shift)
    results = {dnn.args.DIFF_SCALE: dscale, dnn.args.DIFF_SHIFT: dshift}
    arguments |= {a: (features, v) for a, v in results.items() if v is not None}
    writes = tuple(v for v in (dx, dscale, dshift) if v is not None)
    emit(site, made, arguments, writes, "layer_normalization gradient")
    return dx, dscale, dshift


@kernel("RMSNormalization", 23, on="onednn")
def rms_normalization(site: Site, x: Value, scale: Value) -> Value:
    """A normalization by a mean of 0 and, as variance, the sum of squares; the count is part of the scale and of epsilon."""
    site.require(scale.constant, "the scale depends on the data")
    rows = Rows(site, x, scale)
    count, features = rows.rows.shape
    site.require(features <= LONGEST, "a row is so long that NumPy would use its own threads")
    factor = np.float32(math.sqrt(features))
    rows.scale = derived(site, scale, ("times", float(factor)), lambda: scale.array.reshape(-1) * factor)
    sums = site.new((count,), F32, finiteness=FINITE)
    site.emit(
        lambda: [(np.vecdot, (rows.rows.array, rows.rows.array, sums.array))],
        reads=(rows.rows,),
        writes=(sums,),
        kernel="numpy.vecdot",
    )
    zeros = site.shared_constant(("zeros", count), lambda: np.zeros(count, np.float32))
    statistics = MemoryDesc.of(F32, (count,))
    return rows.emit(
        rows.epsilon * features,
        dnn.USE_SCALE | dnn.USE_GLOBAL_STATS,
        {dnn.args.MEAN: (statistics, zeros), dnn.args.VARIANCE: (statistics, sums)},
    )
