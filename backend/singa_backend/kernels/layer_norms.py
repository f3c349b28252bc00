"""Normalizations over the last axes, LayerNormalization and RMSNormalization, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.sums import divisor
from . import onednn as dnn
from .float_products import require_any_bits
from .lowering import F32, derived, emit, moves_of, require_gradient, threads_for
from .moments import emit_moments, summed
from .onednn import Attributes, MemoryDesc, backward
from .products import described
from .softmaxes import rows_of
from .table import Site, gradient, kernel, training, worst
from .values import ANY, FINITE, NAN, Bound, Value, strides_of

COST = 10
"""FLOPs that take the time of one element."""

LONGEST = 8192
"""Elements of a dot product that OpenBLAS computes in one thread."""

LONG = 1 << 17
"""The elements of a row from which sums by oneDNN, which adds those of each lane one after the other, are not exact enough."""

DEEP = 1 << 10
"""The rows that oneDNN adds one after the other for the gradients of scale and shift."""


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
        site.require(x.dtype == F32 and site.attributes.get("stash_type", 1) == 1, "not float32")
        axis, self.epsilon = site.attributes.get("axis", -1), site.attributes["epsilon"]
        site.require(x.size and -x.ndim <= axis < x.ndim, "the axis is out of range, or the input is empty")
        site.require(self.epsilon > 0 and math.isfinite(self.epsilon), "without a positive epsilon")
        axis %= x.ndim
        self.site, self.x = site, x
        self.scale = _features(site, scale, x, axis)
        self.shift = None if b is None else _features(site, b, x, axis)
        self.rows = rows_of(site, x, axis)
        self.inside = self.rows.buffer is x.buffer and site.reusable(0) and scale is not x and b is not x
        self.finiteness = FINITE if worst(x, scale, b) == FINITE else NAN

    def emit(self, epsilon: float, flags: int, moments: tuple[Value, ...] = ()) -> Value:
        """Add the step of oneDNN; return the result, in the memory of the input if nothing reads that again.

        Args:
            epsilon: is added to the variance.
            flags: of oneDNN.
            moments: the mean and the variance of each row; they are read with the flag USE_GLOBAL_STATS, and written otherwise.
        """
        site, x, rows = self.site, self.x, self.rows
        count = rows.shape[0]
        if rows.shape[1] >= LONG and not flags & dnn.USE_GLOBAL_STATS:
            moments = moments or tuple(site.new((count,), F32, None, self.finiteness) for _ in range(2))
            mean, var = (v.view((count, 1), (F32.itemsize, F32.itemsize)) for v in moments)
            emit_moments(site, rows, mean, var, 1)
            flags |= dnn.USE_GLOBAL_STATS
        written = () if flags & dnn.USE_GLOBAL_STATS else moments
        md = described(rows)
        target = md if self.inside else MemoryDesc.of(F32, rows.shape)
        with threads_for(COST * x.size):
            prop = "training" if written else "inference"
            primitive = dnn.layer_normalization(md, target, epsilon=epsilon, flags=flags, prop=prop)
        y = x.view(x.shape, x.strides) if self.inside else site.new(x.shape, F32)
        y.finiteness, y.low = self.finiteness, ANY
        arguments = {
            dnn.args.SRC: (md, rows),
            dnn.args.DST: (target, y),
            dnn.args.SCALE: (described(self.scale), self.scale),
        }
        for arg, v in zip((dnn.args.MEAN, dnn.args.VARIANCE), moments, strict=False):
            arguments[arg] = (MemoryDesc.of(F32, (count,)), v)
        if self.shift is not None:
            arguments[dnn.args.SHIFT] = (described(self.shift), self.shift)
        emit(site, primitive, arguments, (y, *written))
        return y


@kernel("LayerNormalization", 17, on="onednn")
def layer_normalization(site: Site, x: Value, scale: Value, b: Value | None = None) -> tuple[Value, ...]:
    site.require(not any(site.outputs[1:]), "the mean or the deviation is an output")
    rows = Rows(site, x, scale, b)
    return (rows.emit(rows.epsilon, layer_normalization_flags(b)),)


def layer_normalization_flags(b: Value | None) -> int:
    """The flags of oneDNN for a scale, and a shift if there is one."""
    return dnn.USE_SCALE | (dnn.USE_SHIFT if b is not None else 0)


@training("LayerNormalization", 17)
def layer_normalization_training(site: Site, x: Value, scale: Value, b: Value | None = None) -> tuple[Value | None, ...]:
    """A layer normalization, which returns the mean and the variance of each row after its outputs."""
    require_any_bits(site)
    site.require(not any(site.outputs[1:3]), "the mean or the deviation is an output")
    rows = Rows(site, x, scale, b)
    site.require_finite(x, scale, b)
    rows.finiteness = FINITE
    moments = tuple(site.new(rows.rows.shape[:1], F32, None, FINITE) for _ in range(2))
    return (rows.emit(rows.epsilon, layer_normalization_flags(b), moments), None, None, *moments)


def _takes(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return any(needs[:2])  # the gradient of the bias alone is a sum


@gradient("LayerNormalization", 17, reads=("dy0", "x0", "x1", "x2?", "h0", "h1"), takes=_takes, hidden=2)
def layer_normalization_gradient(
    site: Site, dy: Value, x: Value, scale: Value, b: Value | None, mean: Value, var: Value
) -> tuple[Value | None, ...]:
    """The gradients of a layer normalization for its input, scale and bias."""
    require_any_bits(site)
    require_gradient(site, dy, x.shape)
    held = Rows(site, x, scale, b)
    site.require_finite(dy, x, scale, b)
    given = rows_of(site, dy, site.attributes["axis"] % x.ndim)
    inside = given.buffer is dy.buffer and site.reusable(0) and all(v is not dy for v in (x, scale, b))
    dx = dy.view(dy.shape, dy.strides) if inside else site.new(x.shape, F32, None, FINITE)
    to = given if inside else _matrix(dx, given)
    dscale, dshift = _backward(site, held, given, to, layer_normalization_flags(b), (mean, var))
    return dx, _like(dscale, scale), _like(dshift, b)


def _matrix(x: Value, rows: Value) -> Value:
    """A value in C order as rows."""
    return x.view(rows.shape, strides_of(rows.shape, F32.itemsize))


def _backward(
    site: Site, held: Rows, dy: Value, dx: Value, flags: int, moments: tuple[Value, Value]
) -> tuple[Value, Value | None]:
    """Add the steps of the gradients, dx in rows among them; return those of scale and shift, which blocks of rows add up to."""
    count, features = dy.shape
    height = count if count < 2 * DEEP else divisor(count, DEEP)
    full = count // height
    parts = full + bool(count % height)
    results = {
        arg: site.new((parts, features), F32, None, FINITE)
        for arg, v in ((dnn.args.DIFF_SCALE, held.scale), (dnn.args.DIFF_SHIFT, held.shift))
        if v is not None
    }
    vector = MemoryDesc.of(F32, (features,))
    tensors = {dnn.args.SRC: held.rows, dnn.args.DIFF_DST: dy, dnn.args.DIFF_SRC: dx}
    given = dict(zip((dnn.args.MEAN, dnn.args.VARIANCE), moments, strict=True))
    for rows, places in (height, range(full)), (count % height, range(full, parts)):
        if not places:
            continue
        mds = {arg: described(v.view((rows, features), v.strides)) for arg, v in tensors.items()}
        source, md, target = mds.values()
        with threads_for(COST * rows * features):
            plain = MemoryDesc.of(F32, (rows, features))
            hint = dnn.layer_normalization(source, plain, epsilon=held.epsilon, flags=flags, prop="training")
            made = backward.layer_normalization_backward(target, md, source, hint=hint, epsilon=held.epsilon, flags=flags)
        arguments = {arg: (mds[arg], v) for arg, v in tensors.items()} | {dnn.args.SCALE: (vector, held.scale)}
        if held.shift is not None:
            arguments[dnn.args.SHIFT] = (vector, held.shift)
        arguments |= {arg: (MemoryDesc.of(F32, (rows,)), v) for arg, v in given.items()}
        arguments |= {arg: (vector, v) for arg, v in results.items()}
        width = features * F32.itemsize
        steps = (
            dict.fromkeys(tensors, height * width) | dict.fromkeys(given, height * F32.itemsize) | dict.fromkeys(results, width)
        )
        emit(site, made, arguments, (dx, *results.values()), "layer_normalization gradient", moves_of(places, steps))
    dscale, *dshift = (summed(site, v, 0) for v in results.values())
    return dscale, dshift[0] if dshift else None


def _like(dv: Value | None, v: Value | None) -> Value | None:
    """The gradient of a scale or shift in its shape."""
    return None if dv is None or v is None else dv.view(v.shape, strides_of(v.shape, F32.itemsize))


@kernel("RMSNormalization", 23, on="onednn")
def rms_normalization(site: Site, x: Value, scale: Value) -> Value:
    """A normalization by a mean of 0 and, as variance, the sum of squares; the count is part of the scale and of epsilon."""
    site.require(scale.constant, "the scale depends on the data")
    rows = Rows(site, x, scale)
    features = rows.rows.shape[1]
    factor = np.float32(math.sqrt(features))
    rows.scale = derived(site, scale, ("times", float(factor)), lambda: scale.array.reshape(-1) * factor)
    return rows.emit(rows.epsilon * features, _ROOTS, _about_zero(site, _squares(site, rows, 1)))


_ROOTS = dnn.USE_SCALE | dnn.USE_GLOBAL_STATS


def _squares(site: Site, rows: Rows, count: int) -> Value:
    """The sum of the squares of each row, over a count."""
    sums = _products(site, rows.rows, rows.rows)
    if count > 1:
        site.emit(
            lambda: [(np.divide, (sums.array, np.float32(count), sums.array))],
            reads=(sums,),
            writes=(sums,),
            kernel="numpy.divide",
        )
    return sums


def _products(site: Site, a: Value, b: Value) -> Value:
    """The product of each row of a with that of b: the sum of those of pieces, which BLAS computes in one thread."""
    count, features = a.shape
    width = features if features <= LONGEST else divisor(features, LONGEST)
    full = features // width
    parts = site.new((count, full + bool(features % width)), F32, None, FINITE)

    def bind() -> Bound:
        x, y, out = a.array, b.array, parts.array
        if width == features:
            return [(np.vecdot, (x, y, out[:, 0]))]
        used = full * width
        calls: list[Any] = [(np.vecdot, (*(v[:, :used].reshape(count, full, width) for v in (x, y)), out[:, :full]))]
        if used < features:
            calls.append((np.vecdot, (x[:, used:], y[:, used:], out[:, full])))
        return calls

    site.emit(bind, reads=(a, b), writes=(parts,), kernel="numpy.vecdot")
    return summed(site, parts, 1)


def _about_zero(site: Site, variance: Value) -> tuple[Value, Value]:
    """The statistics of rows whose mean counts as 0."""
    zeros = site.shared_constant(("zeros", variance.size), lambda: np.zeros(variance.size, np.float32))
    return zeros, variance


@training("RMSNormalization", 23)
def rms_normalization_training(site: Site, x: Value, scale: Value) -> tuple[Value, ...]:
    """An RMS normalization, which also returns the mean of the squares of each row."""
    require_any_bits(site)
    rows = Rows(site, x, scale)
    site.require_finite(x, scale)
    rows.finiteness = FINITE
    squares = _squares(site, rows, rows.rows.shape[1])
    return rows.emit(rows.epsilon, _ROOTS, _about_zero(site, squares)), squares


@gradient("RMSNormalization", 23, reads=("dy0", "x0", "x1", "h0"), hidden=1)
def rms_normalization_gradient(site: Site, dy: Value, x: Value, scale: Value, squares: Value) -> tuple[Value | None, ...]:
    """The gradients for given squares, then the part of the first that passes the squares."""
    require_any_bits(site)
    require_gradient(site, dy, x.shape)
    held = Rows(site, x, scale)
    site.require_finite(dy, x, scale)
    given = rows_of(site, dy, site.attributes["axis"] % x.ndim)
    dx = site.new(x.shape, F32, None, FINITE)
    rows = _matrix(dx, given)
    dscale, _ = _backward(site, held, given, rows, _ROOTS, _about_zero(site, squares))
    _subtract_squares(site, rows, held.rows, squares, held.epsilon)
    return dx, _like(dscale, scale)


def _subtract_squares(site: Site, dx: Value, x: Value, squares: Value, epsilon: float) -> None:
    """Subtract from each row its x times sum(dx x) / (count (squares + epsilon)), the gradient that passes the squares."""
    count, features = x.shape
    factor, products = site.new((count,), F32, None, FINITE), _products(site, dx, x)

    def bind() -> Bound:
        c = factor.array
        return [
            (np.add, (squares.array, np.float32(epsilon), c)), (np.multiply, (c, np.float32(-features), c)),
            (np.divide, (products.array, c, c)),
        ]  # fmt: skip

    site.emit(bind, reads=(products, squares), writes=(factor,), kernel="numpy.rms gradient")
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
