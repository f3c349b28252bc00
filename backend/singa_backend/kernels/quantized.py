"""Products of 8-bit integers on oneDNN: exact sums, in code that uses VNNI or AMX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..ir.sizes import broadcast_sizes
from ..ir.windows import Windows, windows
from . import onednn as dnn
from .convolution import ends, filters_of, geometry
from .integer_tails import INT8, INT32, Tail, create, exact_bias, result, scalar
from .lowering import F32, channels_last, dense_desc, derived, emit, packed, require_plain, threads_for, unset
from .onednn import MemoryDesc, Primitive
from .table import Site, kernel
from .values import FINITE, Value, last_order, strides_of

LARGEST = 2**31 - 1

EXACT = 1 << 24
"""The lowest sum of integers that float32 may not hold."""

INEXACT = ("generic", "avx2", "avx512_core")
"""Instruction sets without exact products of 8-bit integers: sums of pairs saturate in 16 bits."""


def exact_int8() -> bool:
    """Whether oneDNN computes products of 8-bit integers exactly on this machine."""
    library = dnn.library()
    return library is not None and library.isa not in INEXACT


def factor_of(site: Site, x: Value, w: Value, y: Value) -> np.ndarray:
    """X * w / y in float32: scales that are the same in every run, that of w for each channel."""
    for v, name in ((x, "x"), (w, "w"), (y, "y")):
        site.require(v.constant and v.dtype == F32 and v.ndim <= 1, f"the scale of {name} is not a constant float32")
    site.require(x.size == 1 and y.size == 1, "a scale is not one value")
    with np.errstate(all="ignore"):
        made: np.ndarray = np.asarray(x.array.reshape(()) * w.array.reshape(-1) / y.array.reshape(()))
    site.require(np.isfinite(made).all(), "a scale is not finite")
    return made


def zero_points(site: Site, w: Value, zero: Value | None, axis: int) -> np.ndarray:
    """The constant zero points of weights as int32: one, or one for each channel of this axis."""
    if zero is None:
        return np.zeros(1, np.int32)
    site.require(zero.constant and zero.dtype == w.dtype and zero.ndim <= 1, "the zero point of w depends on the data")
    site.require(zero.size in (1, w.shape[axis]), "the zero point of w does not fit")
    return np.asarray(zero.array.reshape(-1).astype(np.int32))


def reach_of(zero: Value | None, dtype: np.dtype[Any]) -> int:
    """The largest absolute difference between an integer of this dtype and its zero point."""
    info, known = np.iinfo(dtype), 0 if zero is None else scalar(zero)
    return 255 if known is None else max(int(known) - info.min, info.max - int(known))


def centred(site: Site, w: Value, zero: Value | None, axis: int) -> tuple[Value, int]:
    """Weights as int8 whose zero point is one number for all, and that number; `axis` is that of the channels."""
    offsets = zero_points(site, w, zero, axis)
    offsets = offsets[:1] if (offsets == offsets[0]).all() else offsets
    if w.dtype == np.int8 and not offsets.any():
        return w, 0
    around = [1] * w.ndim
    around[axis] = offsets.size
    values = w.read().astype(np.int32) - offsets.reshape(around)
    if values.min() >= -128 and values.max() <= 127:
        return _constant(site, w, ("centred", offsets.tobytes()), values.astype(np.int8)), 0
    site.require(offsets.size == 1, "the weights minus their zero points exceed int8")
    if w.dtype == np.int8:
        return w, int(offsets[0])
    return _constant(site, w, "signed", (w.read() ^ np.uint8(128)).view(np.int8)), int(offsets[0]) - 128


def _constant(site: Site, w: Value, what: Any, array: np.ndarray) -> Value:
    made = derived(site, w, what, lambda: array)
    if w.key is not None:
        made.key = (w.key, what)
    return made


def bound_of(site: Site, w: Value, zero: int, x_zero: Value | None, dtype: np.dtype[Any], axis: int) -> np.ndarray:
    """The highest absolute sum of each channel; declines if int32 may overflow."""
    reach = reach_of(x_zero, dtype)
    rest = tuple(i for i in range(w.ndim) if i != axis)

    def make() -> np.ndarray:
        return np.asarray(np.abs(w.read() - np.int16(zero)).sum(rest, dtype=np.int64))

    sums: np.ndarray = site.derived(w, ("sums", zero, axis), make)
    raw = sums.max(initial=0) * max(reach, 255) + (w.size // w.shape[axis]) * 255 * abs(zero)
    site.require(raw < LARGEST, "int32 may overflow")
    return sums * reach


def with_zero(site: Site, arguments: dict[int, tuple[MemoryDesc, Value]], zero: Value | None, arg: int, offset: int = 0) -> None:
    """Give a primitive the zero point of an argument, as int32."""
    if zero is None:
        return
    md = MemoryDesc.of(np.int32, (1,))
    if zero.constant:
        wide = site.constant(np.array([int(zero.array.reshape(-1)[0]) + offset], np.int32))
    else:
        wide = site.new((1,), np.int32, finiteness=FINITE)
        narrow = zero.view((1,), (1,))

        def bind() -> Any:
            if offset:
                return [(np.add, (narrow.array, np.int32(offset), wide.array))]
            return [(np.copyto, (wide.array, narrow.array))]

        site.emit(bind, reads=(zero,), writes=(wide,), kernel="numpy zero point")
    arguments[dnn.args.zero_points(arg)] = (md, wide)


def zero_of(site: Site, zero: Value | None, x: Value, name: str) -> Value | None:
    """A zero point of one value; None for 0."""
    if zero is None:
        return None
    site.require(zero.size == 1 and zero.ndim <= 1 and zero.dtype == x.dtype, f"the zero point of {name} is not one value")
    return None if scalar(zero) == 0 else zero


def y_zero(site: Site, zero: Value) -> int:
    """The zero point of the result."""
    known = scalar(zero)
    site.require(known is not None and zero.dtype in INT8, "the zero point of y depends on the data")
    return int(known)


# --- convolutions


def conv_windows(site: Site, x: Value, w: Value) -> Windows:
    """The windows of a convolution of 8-bit integers; declines shapes that do not match."""
    site.require(x.dtype in INT8 and w.dtype in INT8 and x.size and w.size, "an input is not of 8 bits, or empty")
    a = site.attributes
    group = a.get("group", 1)
    site.require(3 <= x.ndim <= 5 and w.ndim == x.ndim, "the rank is not 3, 4 or 5")
    valid = group >= 1 and x.shape[1] == w.shape[1] * group and w.shape[0] % group == 0
    site.require(valid and tuple(a.get("kernel_shape") or w.shape[2:]) == w.shape[2:], "the shapes do not match")
    site.require(w.constant, "the weights are not constant")
    return geometry(
        site, windows, x.shape[2:], w.shape[2:], a.get("strides"), a.get("pads"), a.get("dilations"), a.get("auto_pad", "NOTSET")
    )


class Convolution:
    """The convolution of a call, with what follows it."""

    def __init__(self, site: Site, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None) -> None:
        require_plain(site, x, w, dtypes=INT8)
        self.at = conv_windows(site, x, w)
        self.site, self.x, self.group = site, x, site.attributes.get("group", 1)
        self.x_zero = zero_of(site, x_zero, x, "x")
        self.w, zero = centred(site, w, w_zero, 0)
        site.require(not zero, "the weights minus their zero points exceed int8")
        self.bound = bound_of(site, self.w, 0, self.x_zero, x.dtype, 0)
        self.shape = (x.shape[0], w.shape[0], *self.at.counts)
        self.order = tuple(last_order(x.ndim))

    def tail(self) -> Tail:
        """No post-ops."""
        return Tail(self.site, self.shape, self.order, lambda v: v, 1, bound=self.bound)

    def emit(self, start: Callable[[], Tail]) -> Value:
        """Add the steps; `start` returns the post-ops of the call itself."""
        site, x, w, at = self.site, self.x, self.w, self.at
        src = dense_desc(x.dtype, x.shape, self.order)
        given = filters_of(w, self.group)

        def build(tail: Tail) -> Primitive:
            attributes = tail.made.attributes
            if self.x_zero is not None:
                attributes.set_zero_points(dnn.args.SRC, 0)
            return dnn.convolution(
                src, unset(w.dtype, given.shape), tail.term, dense_desc(tail.dtype, self.shape, self.order), strides=at.strides,
                dilations=[d - 1 for d in at.dilations], pads_begin=at.begins, pads_end=ends(at), attributes=attributes,
            )  # fmt: skip

        with threads_for(math.prod(self.shape) * math.prod(w.shape[1:]) / 2):
            made, tail = create(site, start, build)
        x = channels_last(site, x)
        layout = made.query("weights")
        weights = packed(site, w, given, layout)
        y, arguments = result(tail, self.shape, self.order)
        arguments |= {
            dnn.args.SRC: (src, x),
            dnn.args.WEIGHTS: (layout, weights),
            dnn.args.DST: (dense_desc(y.dtype, self.shape, self.order), y),
        }
        if tail.bias is not None and tail.term is not None:
            arguments[dnn.args.BIAS] = (tail.term, tail.bias)
        with_zero(site, arguments, self.x_zero, dnn.args.SRC)
        emit(site, made, arguments, (y,), "conv")
        return y


@kernel("QLinearConv", 10, on="onednn")
def qlinear_conv(
    site: Site, x: Value, xs: Value, xz: Value, w: Value, ws: Value, wz: Value, ys: Value, yz: Value, b: Value | None = None
) -> Value:
    """A convolution of integers, times one float32 for each channel, rounded; with its followers."""
    one = Convolution(site, x, w, xz, wz)
    outputs = w.shape[0]
    factor, zero = factor_of(site, xs, ws, ys), y_zero(site, yz)
    site.require(factor.size in (1, outputs), "the scale of w does not fit")
    bias = None
    if b is not None:
        bias = float_bias(site, b, outputs, one.bound, factor)

    def start() -> Tail:
        tail = one.tail()
        if bias is not None:
            tail.add(bias)
        tail.multiply(w, factor, ("factor", factor.tobytes()))
        tail.quantize(zero, yz.dtype)
        return tail

    return one.emit(start)


def float_bias(site: Site, b: Value, outputs: int, bound: np.ndarray, factor: np.ndarray) -> Value:
    """The bias as float32; declines if the sum would be rounded twice."""
    site.require(b.constant and b.dtype == INT32 and b.shape == (outputs,), "the bias is not a constant int32 for each channel")
    site.require(exact_bias(bound, b.array, factor), "float32 cannot add the bias exactly")
    return derived(site, b, "float", lambda: b.array.astype(np.float32))


@kernel("ConvInteger", 10, on="onednn")
def conv_integer(site: Site, x: Value, w: Value, xz: Value | None = None, wz: Value | None = None) -> Value:
    """A convolution of integers with int32 results; with its followers."""
    one = Convolution(site, x, w, xz, wz)
    return one.emit(one.tail)


# --- matrix products


def as_matrix(v: Value, shape: tuple[int, ...], rows: tuple[int, ...]) -> Value | None:
    """A view of one row, or of a value of this shape, as the matrix that a product computes; None if there is none."""
    if v.size == v.shape[-1]:
        return v.view((1, v.shape[-1]), (v.strides[-1] * v.shape[-1], v.strides[-1]))
    if v.shape == shape and v.contiguous:
        return v.view(rows, strides_of(rows, v.dtype.itemsize))
    return None


class IntegerProduct:
    """The product of two batches of matrices, with what follows it."""

    def __init__(self, site: Site, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> None:
        require_plain(site, a, b, dtypes=INT8)
        site.require(a.ndim >= 2 and b.ndim >= 2 and a.shape[-1] == b.shape[-2], "the shapes do not match")
        self.site = site
        try:
            lead = broadcast_sizes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            site.refuse("the shapes do not match")
        site.require(max(a.ndim, b.ndim) <= 6, "there are more than 6 axes")
        self.shape = (*lead, a.shape[-2], b.shape[-1])
        self.a_zero = zero_of(site, a_zero, a, "a")
        k = a.shape[-1]
        self.b_zero, self.b_offset = None, 0
        if b.constant and b.ndim == 2:
            b, zero = centred(site, b, b_zero, 1)
            self.bound = bound_of(site, b, zero, self.a_zero, a.dtype, 1)
            self.b_zero = site.constant(np.array([zero], np.int32)) if zero else None
        else:
            self.b_zero = zero_of(site, b_zero, b, "b")
            if b.dtype == np.uint8:
                b, self.b_offset = signed(site, b), -128
                if self.b_zero is None:
                    self.b_zero = site.constant(np.zeros(1, np.int32))
                if scalar(self.b_zero) == 128:
                    self.b_zero = None
            site.require(k * 255 * 255 * 2 < LARGEST, "int32 may overflow")
            self.bound = np.full(b.shape[-1], k * 255 * 255)
        self.key = b.key
        self.folded = math.prod(b.shape[:-2]) == 1
        if self.folded:
            rows = _rows(a)
            a = a if rows is None else rows
            if rows is None:
                a = _rows(_contiguous(site, a)) or a
            b = b.view(b.shape[-2:], b.strides[-2:])
        rank = 2 if self.folded else len(self.shape)
        self.a, self.b = (_dense(site, v, rank) for v in (a, b))
        self.rank = rank

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape that the primitive computes."""
        return (math.prod(self.shape[:-1]), self.shape[-1]) if self.folded else self.shape

    def fold(self, v: Value) -> Value | None:
        """A view of another operand with the rank of the product; None if there is none."""
        return as_matrix(v, self.shape, self.inner) if self.folded else v

    def tail(self) -> Tail:
        """No post-ops."""
        return Tail(self.site, self.inner, tuple(range(self.rank)), self.fold, self.rank - 1, bound=self.bound)

    def emit(self, start: Callable[[], Tail]) -> Value:
        """Add the steps; `start` returns the post-ops of the call itself."""
        site, a, b = self.site, self.a, self.b
        src = MemoryDesc.of(a.dtype, a.shape, a.steps)
        given = MemoryDesc.of(b.dtype, b.shape, b.steps)
        constant = b.constant

        def build(tail: Tail) -> Primitive:
            attributes = tail.made.attributes
            a_zero = None if self._subtracts(tail) else self.a_zero
            for zero, arg in (a_zero, dnn.args.SRC), (self.b_zero, dnn.args.WEIGHTS):
                if zero is not None:
                    attributes.set_zero_points(arg, 0)
            weights = unset(b.dtype, b.shape) if constant else given
            return dnn.matmul(src, weights, tail.term, dense_desc(tail.dtype, self.inner), attributes)

        with threads_for(math.prod(self.inner) * a.shape[-1] / 2):
            made, tail = create(site, start, build)
        layout = made.query("weights")
        weights = packed(site, replace(b, key=self.key), given, layout) if constant else b
        y, arguments = result(tail, self.shape, None)
        inner = y.view(self.inner, strides_of(self.inner, y.dtype.itemsize))
        arguments |= {
            dnn.args.SRC: (src, a),
            dnn.args.WEIGHTS: (layout, weights),
            dnn.args.DST: (dense_desc(y.dtype, self.inner), inner),
        }
        if tail.bias is not None and tail.term is not None:
            arguments[dnn.args.BIAS] = (tail.term, tail.bias)
        subtracts = self._subtracts(tail)
        with_zero(site, arguments, None if subtracts else self.a_zero, dnn.args.SRC)
        with_zero(site, arguments, self.b_zero, dnn.args.WEIGHTS, self.b_offset)
        emit(site, made, arguments, (inner,), "matmul")
        if subtracts and self.a_zero is not None:
            zero, sums = self.a_zero, self.b.read().sum(axis=0, dtype=np.int32)
            site.emit(
                lambda: [(_subtract, (inner.array, zero.array, sums))],
                reads=(inner, zero), writes=(inner,), kernel="numpy.subtract",
            )  # fmt: skip
        return y

    def _subtracts(self, tail: Tail) -> bool:
        """Whether the zero point of A is subtracted after the primitive, which does so in float32: sums may exceed `EXACT`."""
        wide = self.a_zero is not None and self.b_zero is None and self.b.constant and self.b.ndim == 2
        return wide and tail.dtype == np.int32 and int(self.bound.max(initial=0)) >= EXACT and exact_int8()


def _subtract(y: np.ndarray, zero: np.ndarray, sums: np.ndarray) -> None:
    """Subtract a zero point times the sums of the weights of each column."""
    np.subtract(y, zero.reshape(()).astype(np.int32) * sums, out=y)


def signed(site: Site, b: Value) -> Value:
    """Values of uint8 minus 128, as int8 in the same order in memory."""
    order = sorted(range(b.ndim), key=lambda i: -b.strides[i])

    def make() -> Value:
        made = site.new(b.shape, np.int8, order, FINITE)
        site.emit(
            lambda: [(np.bitwise_xor, (b.array, np.uint8(128), made.array.view(np.uint8)))],
            reads=(b,), writes=(made,), kernel="numpy.bitwise_xor",
        )  # fmt: skip
        return made

    return site.kept(b, "signed", make)


def _rows(a: Value) -> Value | None:
    """All rows of a batch of matrices as one matrix; None if they are not evenly spaced."""
    steps = [(d, s) for d, s in zip(a.shape[:-1], a.strides[:-1], strict=True) if d != 1]
    for (_, outer), (size, inner) in pairwise(steps):
        if outer != size * inner:
            return None
    stride = steps[-1][1] if steps else a.shape[-1] * a.strides[-1]
    return a.view((math.prod(a.shape[:-1]), a.shape[-1]), (stride, a.strides[-1]))


def _contiguous(site: Site, x: Value) -> Value:
    def make() -> Value:
        y = site.new(x.shape, x.dtype, None, x.finiteness)
        site.emit(lambda: [(np.copyto, (y.array, x.array))], reads=(x,), writes=(y,), kernel="numpy.copyto")
        return y

    return site.kept(x, "contiguous", make)


def _dense(site: Site, x: Value, rank: int) -> Value:
    """A batch of matrices with this rank, and one dense axis of the last two."""
    size = x.dtype.itemsize
    if not any(x.strides[i] == size for i in (-2, -1)) or any(s < size for s in x.strides):
        x = _contiguous(site, x)
    strides = list(x.strides)
    follow = size
    for axis in reversed(range(x.ndim)):  # axes of size 1 as in C order
        if x.shape[axis] == 1:
            strides[axis] = follow
        follow = max(strides[axis] * x.shape[axis], follow)
    fill = rank - x.ndim
    return x.view((*[1] * fill, *x.shape), (*[follow] * fill, *strides))


@kernel("MatMulInteger", 10, on="onednn")
def matmul_integer(site: Site, a: Value, b: Value, az: Value | None = None, bz: Value | None = None) -> Value:
    """A product of integers with int32 results; with its followers."""
    one = IntegerProduct(site, a, b, az, bz)
    return one.emit(one.tail)


def rounded(tail: Tail, sb: Value, factor: np.ndarray, zero: int, dtype: np.dtype[Any]) -> Tail:
    """A tail that multiplies each column by its factor, which is derived from the scales of b, and quantizes the result."""
    tail.multiply(sb, factor, ("factor", tail.channels, factor.tobytes()))
    tail.quantize(zero, dtype)
    return tail


@kernel("QLinearMatMul", 10, 21, on="onednn")
def qlinear_matmul(site: Site, a: Value, sa: Value, za: Value, b: Value, sb: Value, zb: Value, ys: Value, yz: Value) -> Value:
    """A product of integers, times one float32 for each column, rounded; with its followers."""
    one = IntegerProduct(site, a, b, za, zb)
    factor, zero = factor_of(site, sa, sb, ys), y_zero(site, yz)
    site.require(factor.size in (1, b.shape[-1]), "the scale of b does not fit")

    return one.emit(lambda: rounded(one.tail(), sb, factor, zero, yz.dtype))
