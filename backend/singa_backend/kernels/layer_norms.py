"""Normalizations over the last axes: LayerNormalization, RMSNormalization."""

from __future__ import annotations

import math

import numpy as np

from . import onednn as dnn
from .lowering import F32, derived, emit, threads_for
from .onednn import MemoryDesc
from .products import described
from .softmaxes import rows_of
from .table import Site, kernel, worst
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

    def emit(self, epsilon: float, flags: int, further: dict[int, tuple[MemoryDesc, Value]]) -> Value:
        """Add the step of oneDNN; return the result, in the memory of the input if nothing reads that again."""
        site, x, rows = self.site, self.x, self.rows
        md = described(rows)
        target = md if self.inside else MemoryDesc.of(F32, rows.shape)
        with threads_for(COST * x.size):
            primitive = dnn.layer_normalization(md, target, epsilon=epsilon, flags=flags)
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
        emit(site, primitive, arguments, (y,))
        return y


@kernel("LayerNormalization", 17, on="onednn")
def layer_normalization(site: Site, x: Value, scale: Value, b: Value | None = None) -> tuple[Value, ...]:
    site.require(not any(site.outputs[1:]), "the mean or the deviation is an output")
    rows = Rows(site, x, scale, b)
    return (rows.emit(rows.epsilon, dnn.USE_SCALE | (dnn.USE_SHIFT if b is not None else 0), {}),)


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
