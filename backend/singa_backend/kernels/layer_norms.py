"""Normalizations over the last axes, LayerNormalization and RMSNormalization, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .lowering import F32, derived, emit, require_gradient, threads_for
from .onednn import Attributes, MemoryDesc, backward
from .products import described
from .softmaxes import rows_of
from .table import Site, gradient, kernel, training, worst
from .values import ANY, FINITE, NAN, Bound, Value

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
        kept: whether the input is read later; None to ask the place about its first input.
    """

    def __init__(self, site: Site, x: Value, scale: Value, b: Value | None = None, kept: bool | None = None) -> None:
        site.require(x.dtype == F32 and site.attributes.get("stash_type", 1) == 1, "not float32")
        axis, self.epsilon = site.attributes.get("axis", -1), site.attributes["epsilon"]
        site.require(x.size and -x.ndim <= axis < x.ndim, "the axis is out of range, or the input is empty")
        site.require(self.epsilon > 0 and math.isfinite(self.epsilon), "without a positive epsilon")
        axis %= x.ndim
        self.site, self.x = site, x
        self.scale = _features(site, scale, x, axis)
        self.shift = None if b is None else _features(site, b, x, axis)
        self.rows = rows_of(site, x, axis)
        free = site.reusable(0) if kept is None else not kept
        self.inside = self.rows.buffer is x.buffer and free and scale is not x and b is not x
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


def layer_normalization_flags(b: Value | None) -> int:
    """The flags of oneDNN for a scale, and a shift if there is one."""
    return dnn.USE_SCALE | (dnn.USE_SHIFT if b is not None else 0)


@training("LayerNormalization", 17)
def layer_normalization_training(site: Site, x: Value, scale: Value, b: Value | None = None) -> tuple[Value | None, ...]:
    """A layer normalization, which returns the mean and the variance of each row after its outputs."""
    site.require(not any(site.outputs[1:3]), "the mean or the deviation is an output")
    rows = Rows(site, x, scale, b)
    site.require_finite(x, scale, b)
    rows.finiteness = FINITE
    count = rows.rows.shape[0]
    moments = tuple(site.new((count,), F32, None, FINITE) for _ in range(2))
    md = MemoryDesc.of(F32, (count,))
    further = {a: (md, v) for a, v in zip((dnn.args.MEAN, dnn.args.VARIANCE), moments, strict=True)}
    y = rows.emit(rows.epsilon, layer_normalization_flags(b), further, "training", moments)
    return (y, None, None, *moments)


def _takes(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return any(needs[:2])  # the gradient of the bias alone is a sum


@gradient("LayerNormalization", 17, reads=("dy0", "x0", "x1", "x2?", "h0", "h1"), takes=_takes, hidden=2)
def layer_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, b: Value | None, mean: Value, var: Value
) -> tuple[Value | None, ...]:
    """The gradients of a layer normalization for its input, scale and bias."""
    require_gradient(site, dy, x.shape)
    held = Rows(site, x, scale, b)
    site.require_finite(dy, x, scale, b)
    given = rows_of(site, dy, site.attributes["axis"] % x.ndim)
    source, md = described(held.rows), described(given)
    inside = given.buffer is dy.buffer and site.reusable(0) and all(v is not dy for v in (x, scale, b))
    target = md if inside else MemoryDesc.of(F32, given.shape)
    with threads_for(COST * x.size):
        plain = MemoryDesc.of(F32, given.shape)
        hint = dnn.layer_normalization(source, plain, epsilon=held.epsilon, flags=layer_normalization_flags(b), prop="training")
        made = backward.layer_normalization_backward(
            target, md, source, hint=hint, epsilon=held.epsilon, flags=layer_normalization_flags(b)
        )
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
def rms_normalization(site: Site, x: Value, scale: Value, kept: bool | None = None) -> Value:
    """A normalization by a mean of 0 and, as variance, the sum of squares; the count is part of the scale and of epsilon."""
    site.require(scale.constant, "the scale depends on the data")
    rows = Rows(site, x, scale, kept=kept)
    features = rows.rows.shape[1]
    factor = np.float32(math.sqrt(features))
    rows.scale = derived(site, scale, ("times", float(factor)), lambda: scale.array.reshape(-1) * factor)
    return rows.emit(rows.epsilon * features, _ROOTS, _about_zero(site, _squares(site, rows, 1)))


_ROOTS = dnn.USE_SCALE | dnn.USE_GLOBAL_STATS


def _squares(site: Site, rows: Rows, count: int) -> Value:
    """The sum of the squares of each row, over a count."""
    source = rows.rows
    site.require(source.shape[1] <= LONGEST, "a row is so long that NumPy would use its own threads")
    sums = site.new(source.shape[:1], F32, finiteness=FINITE)

    def bind() -> Bound:
        x, out = source.array, sums.array
        return [(np.vecdot, (x, x, out)), *([(np.divide, (out, np.float32(count), out))] if count > 1 else [])]

    site.emit(bind, reads=(source,), writes=(sums,), kernel="numpy.vecdot")
    return sums


def _about_zero(site: Site, variance: Value) -> dict[int, tuple[MemoryDesc, Value]]:
    """The statistics of rows whose mean counts as 0."""
    zeros = site.shared_constant(("zeros", variance.size), lambda: np.zeros(variance.size, np.float32))
    md = MemoryDesc.of(F32, variance.shape)
    return {dnn.args.MEAN: (md, zeros), dnn.args.VARIANCE: (md, variance)}


@training("RMSNormalization", 23)
def rms_normalization_training(site: Site, x: Value, scale: Value) -> tuple[Value, ...]:
    """An RMS normalization, which also returns the mean of the squares of each row."""
    rows = Rows(site, x, scale)
    site.require_finite(x, scale)
    rows.finiteness = FINITE
    squares = _squares(site, rows, rows.rows.shape[1])
    return rows.emit(rows.epsilon, _ROOTS, _about_zero(site, squares)), squares


@gradient("RMSNormalization", 23, reads=("dy0", "x0", "x1", "h0"), hidden=1)
def rms_normalization_gradient(site: Site, dy: Value, x: Value, scale: Value, squares: Value) -> tuple[Value, Value]:
    """The gradients for given squares, then the part of the first that passes the squares."""
    require_gradient(site, dy, x.shape)
    held = Rows(site, x, scale)
    site.require_finite(dy, x, scale)
    given = rows_of(site, dy, site.attributes["axis"] % x.ndim)
    source, md, target = described(held.rows), described(given), MemoryDesc.of(F32, given.shape)
    with threads_for(COST * x.size):
        hint = dnn.layer_normalization(source, target, epsilon=held.epsilon, flags=_ROOTS, prop="training")
        made = backward.layer_normalization_backward(target, md, source, hint=hint, epsilon=held.epsilon, flags=_ROOTS)
    dx, dscale = site.new(x.shape, F32, None, FINITE), site.new(scale.shape, F32, None, FINITE)
    rows = dx.view(given.shape, (given.shape[1] * F32.itemsize, F32.itemsize))
    features = MemoryDesc.of(F32, given.shape[1:])
    arguments: dict[int, tuple[MemoryDesc, Value]] = {
        dnn.args.SRC: (source, held.rows), dnn.args.DIFF_DST: (md, given), dnn.args.DIFF_SRC: (target, rows),
        dnn.args.SCALE: (features, held.scale), dnn.args.DIFF_SCALE: (features, dscale), **_about_zero(site, squares),
    }  # fmt: skip
    emit(site, made, arguments, (rows, dscale), "layer_normalization gradient")
    _subtract_squares(site, rows, held.rows, squares, held.epsilon)
    return dx, dscale


def _subtract_squares(site: Site, dx: Value, x: Value, squares: Value, epsilon: float) -> None:
    """Subtract from each row its x times sum(dx x) / (count (squares + epsilon)), the gradient that passes the squares."""
    count, features = x.shape
    factor = site.new((count,), F32, None, FINITE)

    def bind() -> Bound:
        to, rows, c, root = dx.array, x.array, factor.array, squares.array

        def run() -> None:
            np.add(root, np.float32(epsilon), c)
            np.multiply(c, np.float32(-features), c)
            np.divide(np.vecdot(to, rows), c, c)

        return [(run, ())]

    site.emit(bind, reads=(dx, x, squares), writes=(factor,), kernel="numpy.rms gradient")
    given, target, row = described(x), described(dx), MemoryDesc.of(F32, (count, 1))
    with threads_for(2 * x.size):
        made = dnn.binary(given, row, target, algorithm="mul", attributes=Attributes().append_binary("add", target))
    arguments = {
        dnn.args.SRC: (given, x),
        dnn.args.SRC_1: (row, factor),
        dnn.args.post_op(0): (target, dx),
        dnn.args.DST: (target, dx),
    }
    emit(site, made, arguments, (dx,), "rms gradient")
