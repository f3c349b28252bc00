"""Products of 8-bit integers by products of float32, for processors without exact products of integers: equally exact.

A sum of integers below 2^24 is exact in float32 in any order.  Weights whose sums may be larger are split into a multiple of 16
and a rest; the sum of both exact results is then rounded to float32 once, as in the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .convolution import ends, filters_of
from .integer_tails import INT8, INT32, SUM, Tail, create, result
from .lowering import (
    F32,
    channels_last,
    dense_desc,
    derived,
    desc,
    emit,
    ordered,
    packed,
    require_plain,
    spaced,
    threads_for,
    unset,
)
from .onednn import MemoryDesc, Primitive
from .quantization import dequantized
from .quantized import EXACT, as_matrix, conv_windows, factor_of, float_bias, reach_of, rounded, y_zero, zero_points
from .table import Site, kernel
from .values import Value, last_order, strides_of

RANK = 3
"""The place in the table: after the kernels for integers."""

Build = Callable[[MemoryDesc], Primitive]
Given = Callable[[Value], MemoryDesc]


def shifted(site: Site, x: Value, zero: Value | None) -> Value:
    """X minus its zero point, as float32."""
    site.require(zero is None or (zero.size == 1 and zero.ndim <= 1 and zero.dtype == x.dtype), "there are several zero points")
    return dequantized(site, x, site.constant(np.ones((), F32)), zero, None)


def halves(site: Site, w: Value, zero: Value | None, x: Value, x_zero: Value | None, axis: int) -> tuple[list[Value], np.ndarray]:
    """Weights minus their zero points as float32, or two parts of them; and the highest absolute sum of each channel."""
    site.require(w.constant and w.dtype in INT8, "the weights are not constant")
    offsets = zero_points(site, w, zero, axis).astype(np.int16)
    around = [1] * w.ndim
    around[axis] = offsets.size
    reach = reach_of(x_zero, x.dtype)
    rest = tuple(i for i in range(w.ndim) if i != axis)
    key = offsets.tobytes()

    def three() -> list[np.ndarray]:
        whole = w.read().astype(np.int16) - offsets.reshape(around)
        high = (whole + 8) & ~15
        return [whole, whole - high, high]

    def part(i: int) -> Value:
        made = derived(site, w, ("part", i, key), lambda: three()[i].astype(F32))
        made.key = None if w.key is None else (w.key, "part", i, key)
        return made

    def sums() -> list[np.ndarray]:
        return [np.abs(v).sum(rest, dtype=np.int64) for v in three()]

    whole, low, high = site.derived(w, ("part sums", axis, key), sums)
    if whole.max(initial=0) * reach <= EXACT:
        return [part(0)], whole * reach
    site.require(max(low.max(initial=0), high.max(initial=0) // 16) * reach <= EXACT, "a sum may exceed 2^28")
    return [part(1), part(2)], whole * reach


def multiplied(
    site: Site,
    parts: Sequence[Value],
    shape: Sequence[int],
    order: Sequence[int],
    arguments: dict[int, Any],
    build: Build,
    given: Given,
) -> list[Value]:
    """Add the steps that compute the float32 sums of each part."""
    made = []
    dst = dense_desc(F32, shape, order)
    for w in parts:
        md = given(w)
        one = build(md)
        layout = one.query("weights")
        y = site.new(shape, F32, order)
        weights = packed(site, w, md, layout)
        emit(site, one, {**arguments, dnn.args.WEIGHTS: (layout, weights), dnn.args.DST: (dst, y)}, (y,), "exact product")
        made.append(y)
    return made


def finished(
    site: Site, parts: Sequence[Value], start: Callable[[], Tail], shape: tuple[int, ...], order: tuple[int, ...] | None
) -> Value:
    """What follows the float32 sums, as post-ops of the addition of both parts."""
    y = parts[0]
    other = parts[1] if len(parts) > 1 else site.constant(np.zeros((1,) * y.ndim, F32))
    src, term = desc(y), desc(other)

    def build(tail: Tail) -> Primitive:
        site.require(tail.kind != SUM, "the sums are not followed by a factor")
        site.require(tail.target is None, "a sum of quantized values")
        dst = dense_desc(tail.dtype, y.shape, tail.order)
        return dnn.binary(src, term, dst, algorithm="add", attributes=tail.made.attributes)

    with threads_for(y.size * 4):
        made, tail = create(site, start, build)
    z, arguments = result(tail, shape, order)
    inner = z if z.ndim == y.ndim else z.view(y.shape, strides_of(y.shape, z.dtype.itemsize))
    arguments |= {dnn.args.SRC: (src, y), dnn.args.SRC_1: (term, other), dnn.args.DST: (desc(inner), inner)}
    emit(site, made, arguments, (inner,), "round")
    return z


def integers(site: Site, parts: Sequence[Value]) -> Value:
    """Exact float32 sums as int32."""
    site.require(len(parts) == 1, "a sum may exceed 2^24")
    y = parts[0]
    z = site.new(y.shape, INT32, sorted(range(y.ndim), key=lambda i: -y.strides[i]))
    site.emit(lambda: [(_copy_integers, (z.array, y.array))], reads=(y,), writes=(z,), kernel="numpy.copyto")
    return z


def _copy_integers(target: np.ndarray, source: np.ndarray) -> None:
    np.copyto(target, source, casting="unsafe")


def _convolution(site: Site, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None) -> tuple[list[Value], np.ndarray]:
    """The float32 sums of a convolution, and their bounds."""
    require_plain(site, x, w, dtypes=INT8)
    at, group = conv_windows(site, x, w), site.attributes.get("group", 1)
    parts, bound = halves(site, w, w_zero, x, x_zero, 0)
    real = shifted(site, channels_last(site, x), x_zero)
    shape, order = (x.shape[0], w.shape[0], *at.counts), last_order(x.ndim)
    src, dst = dense_desc(F32, x.shape, order), dense_desc(F32, shape, order)

    def build(md: MemoryDesc) -> Primitive:
        return dnn.convolution(
            src, unset(F32, md.shape), None, dst, strides=at.strides, dilations=[d - 1 for d in at.dilations],
            pads_begin=at.begins, pads_end=ends(at),
        )  # fmt: skip

    with threads_for(2 * math.prod(shape) * math.prod(w.shape[1:])):
        return multiplied(site, parts, shape, order, {dnn.args.SRC: (src, real)}, build, lambda w: filters_of(w, group)), bound


@kernel("QLinearConv", 10, on="onednn", rank=RANK)
def qlinear_conv_by_floats(
    site: Site, x: Value, xs: Value, xz: Value, w: Value, ws: Value, wz: Value, ys: Value, yz: Value, b: Value | None = None
) -> Value:
    """A convolution of integers in float32, times one float32 for each channel, rounded; with its followers."""
    factor, zero = factor_of(site, xs, ws, ys), y_zero(site, yz)
    site.require(factor.size in (1, w.shape[0]), "the scale of w does not fit")
    parts, bound = _convolution(site, x, w, xz, wz)
    bias = None if b is None else float_bias(site, b, w.shape[0], bound, factor)
    shape, order = parts[0].shape, tuple(last_order(x.ndim))

    def start() -> Tail:
        tail = Tail(site, shape, order, lambda v: v, 1, bound=bound, late=True)
        if bias is not None:
            tail.add(bias)
        tail.multiply(w, factor, ("factor", factor.tobytes()))
        tail.quantize(zero, yz.dtype)
        return tail

    return finished(site, parts, start, shape, order)


@kernel("ConvInteger", 10, on="onednn", rank=RANK)
def conv_integer_by_floats(site: Site, x: Value, w: Value, xz: Value | None = None, wz: Value | None = None) -> Value:
    """A convolution of integers in float32; with its followers."""
    parts, bound = _convolution(site, x, w, xz, wz)
    shape, order = parts[0].shape, tuple(last_order(x.ndim))
    if not site.followers or site.followers[0].name not in ("Cast", "Add"):
        return integers(site, parts)
    return finished(site, parts, lambda: Tail(site, shape, order, lambda v: v, 1, bound=bound, late=True), shape, order)


class _SplitProduct:
    """The float32 sums of a product with a constant matrix."""

    def __init__(self, site: Site, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> None:
        require_plain(site, a, b, dtypes=INT8)
        site.require(a.ndim >= 2 and b.ndim == 2 and a.shape[-1] == b.shape[0], "it is not a product with a constant matrix")
        parts, self.bound = halves(site, b, b_zero, a, a_zero, 1)
        self.site, self.shape = site, (*a.shape[:-1], b.shape[1])
        a = ordered(site, a, range(a.ndim))
        rows, inner = (math.prod(a.shape[:-1]), a.shape[-1]), (math.prod(a.shape[:-1]), b.shape[1])
        real = shifted(site, a.view(rows, strides_of(rows, 1)), a_zero)
        self.inner = inner
        src, dst = dense_desc(F32, rows), dense_desc(F32, inner)

        def build(md: MemoryDesc) -> Primitive:
            return dnn.matmul(src, spaced(md.shape), None, dst)

        with threads_for(2 * math.prod(inner) * rows[1]):
            self.parts = multiplied(site, parts, inner, (0, 1), {dnn.args.SRC: (src, real)}, build, desc)

    def fold(self, v: Value) -> Value | None:
        """A view of another operand as a matrix."""
        return as_matrix(v, self.shape, self.inner)

    def tail(self) -> Tail:
        """No post-ops."""
        return Tail(self.site, self.inner, (0, 1), self.fold, 1, bound=self.bound, late=True)


@kernel("MatMulInteger", 10, on="onednn", rank=RANK)
def matmul_integer_by_floats(site: Site, a: Value, b: Value, az: Value | None = None, bz: Value | None = None) -> Value:
    """A product of integers in float32; with its followers."""
    one = _SplitProduct(site, a, b, az, bz)
    if not site.followers or site.followers[0].name not in ("Cast", "Add"):
        made = integers(site, one.parts)
        return made.view(one.shape, strides_of(one.shape, 4))
    return finished(site, one.parts, one.tail, one.shape, None)


@kernel("QLinearMatMul", 10, 21, on="onednn", rank=RANK)
def qlinear_matmul_by_floats(
    site: Site, a: Value, sa: Value, za: Value, b: Value, sb: Value, zb: Value, ys: Value, yz: Value
) -> Value:
    """A product of integers in float32, times one float32 for each column, rounded; with its followers."""
    factor, zero = factor_of(site, sa, sb, ys), y_zero(site, yz)
    one = _SplitProduct(site, a, b, za, zb)
    site.require(factor.size in (1, b.shape[-1]), "the scale of b does not fit")

    return finished(site, one.parts, lambda: rounded(one.tail(), sb, factor, zero, yz.dtype), one.shape, None)
