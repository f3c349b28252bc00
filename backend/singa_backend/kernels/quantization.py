"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear, equal to the definitions bit for bit.

The definition divides, rounds half to even, and adds the zero point: so does a binary division with post-ops.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import numpy_dtype
from ..ir.sizes import broadcast_sizes
from . import onednn as dnn
from .elementwise import order_of
from .integer_tails import INT8, INT32, Tail, create, result, scalar
from .lowering import F32, dense_desc, emit, ordered, require_plain, threads_for
from .onednn import Attributes, MemoryDesc, Primitive
from .table import Site, kernel, worst
from .values import FINITE, NAN, Value, strides_of

VERSIONS = (10, 13, 19, 21, 23, 24, 25, 28)


def _axis(site: Site, x: Value, s: Value) -> int | None:
    """The axis along which a scale varies; None for one value."""
    site.require(not site.attributes.get("block_size"), "the scales are in blocks")
    if s.size == 1 and s.ndim <= 1:
        return None
    axis = site.attributes.get("axis", 1) if x.ndim > 1 else 0
    valid = site.version >= 13 and s.ndim == 1 and -x.ndim <= axis < x.ndim
    site.require(valid and s.shape[0] == x.shape[axis], "the scales do not fit")
    return int(axis) % x.ndim


def _flat(x: Value) -> Value:
    """A dense value as a vector in the order of its memory."""
    return x.view((x.size,), (x.dtype.itemsize,))


def _wide(v: Value, rank: int, axis: int | None) -> Value:
    """A view of a vector along an axis, or of one value, with this rank."""
    shape = [1] * rank
    if axis is not None:
        shape[axis] = v.size
    return v.view(shape, strides_of(shape, v.dtype.itemsize))


def _float(site: Site, zero: Value) -> Value:
    """A zero point as float32."""
    if zero.constant:
        return site.constant(zero.array.astype(np.float32))
    made = site.new(zero.shape, F32, finiteness=FINITE)
    site.emit(lambda: [(np.copyto, (made.array, zero.array))], reads=(zero,), writes=(made,), kernel="numpy zero point")
    return made


def quantized(site: Site, x: Value, s: Value, z: Value | None, dtype: np.dtype[Any], axis: int | None) -> Value:
    """Add the steps that quantize float32 values."""
    if dtype == np.int8:
        site.require(x.finiteness < NAN and not (s.constant and not s.array.all()), "the input may contain NaN, or a scale is 0")
        site.needs_finite()
    order = order_of(x)
    if order is None:
        order = list(range(x.ndim))
        x = ordered(site, x, order)
    y = site.new(x.shape, dtype, order, FINITE)
    if axis is None:
        source, target = _flat(x), _flat(y)
        md, out = dense_desc(F32, (x.size,)), dense_desc(dtype, (x.size,))
    else:
        source, target = x, y
        md, out = dense_desc(F32, x.shape, order), dense_desc(dtype, x.shape, order)
    rank = source.ndim
    divisor = _wide(s, rank, axis)
    attributes = Attributes()
    arguments = {dnn.args.SRC: (md, source), dnn.args.SRC_1: (dense_desc(F32, divisor.shape), divisor)}
    zero = scalar(z) if z is not None else 0
    if z is not None and zero != 0 and not (z.constant and not z.array.any()):
        attributes.append_eltwise("round")
        if zero is not None:
            attributes.append_eltwise("linear", 1.0, float(zero))
        else:
            offset = _wide(_float(site, z), rank, axis)
            arguments[dnn.args.post_op(1)] = (dense_desc(F32, offset.shape), offset)
            attributes.append_binary("add", arguments[dnn.args.post_op(1)][0])
    with threads_for(x.size * 4):
        made = dnn.binary(md, arguments[dnn.args.SRC_1][0], out, algorithm="div", attributes=attributes)
    emit(site, made, arguments | {dnn.args.DST: (out, target)}, (target,), "quantize")
    return y


@kernel("QuantizeLinear", *VERSIONS, on="onednn")
def quantize_linear(site: Site, x: Value, s: Value, z: Value | None = None) -> Value:
    """A division with post-ops."""
    require_plain(site, x)
    require_plain(site, s.view((s.size,), (4,)))
    a = site.attributes
    dtype = np.dtype(np.uint8) if z is None else z.dtype
    if a.get("output_dtype"):
        wanted = numpy_dtype(a["output_dtype"])
        site.require(z is None or wanted == dtype, "output_dtype is not the type of the zero point")
        dtype = wanted
    site.require(dtype in INT8, f"the quantized type is {dtype}")
    site.require(not a.get("precision") or numpy_dtype(a["precision"]) == F32, "the precision is not float32")
    site.require(z is None or z.shape == s.shape or (z.size == s.size == 1), "the zero point does not fit")
    return quantized(site, x, s, z, dtype, _axis(site, x, s))


def dequantized(site: Site, x: Value, s: Value, z: Value | None, axis: int | None) -> Value:
    """Add the steps that dequantize values to float32; `axis` is that of the scales, None for one."""
    none = z is None or (z.constant and not z.array.any())
    site.require(none or (axis is None and x.dtype != INT32), "there are several zero points")
    order = order_of(x)
    if order is None:
        order = list(range(x.ndim))
        x = ordered(site, x, order)
    attributes = Attributes().set_scales(dnn.args.SRC, 0 if axis is None else 1 << axis)
    y = site.new(x.shape, F32, order, FINITE if s.finiteness == FINITE else NAN)
    source, target = (_flat(x), _flat(y)) if axis is None else (x, y)
    order = order if axis is not None else [0]
    src, dst = dense_desc(x.dtype, source.shape, order), dense_desc(F32, source.shape, order)
    arguments = {
        dnn.args.SRC: (src, source),
        dnn.args.scales(dnn.args.SRC): (dense_desc(F32, (s.size,)), _wide(s, 1, None if axis is None else 0)),
    }
    if z is not None and not none:
        attributes.set_zero_points(dnn.args.SRC, 0)
        if z.constant:
            wide = site.constant(z.array.astype(np.int32).reshape(1))
        else:
            wide, narrow = site.new((1,), np.int32, finiteness=FINITE), z.view((1,), (z.dtype.itemsize,))
            site.emit(lambda: [(np.copyto, (wide.array, narrow.array))], reads=(z,), writes=(wide,), kernel="numpy zero point")
        arguments[dnn.args.zero_points(dnn.args.SRC)] = (MemoryDesc.of(np.int32, (1,)), wide)
    with threads_for(x.size * 4):
        made = dnn.reorder(src, dst, attributes=attributes)
    emit(site, made, arguments | {dnn.args.DST: (dst, target)}, (target,), "dequantize")
    return y


@kernel("DequantizeLinear", *VERSIONS, on="onednn")
def dequantize_linear(site: Site, x: Value, s: Value, z: Value | None = None) -> Value:
    """A reorder with a scale and a zero point: an exact difference and one product."""
    require_plain(site, x, dtypes=(*INT8, INT32))
    require_plain(site, s.view((s.size,), (4,)))
    a = site.attributes
    site.require(not a.get("output_dtype") or numpy_dtype(a["output_dtype"]) == F32, "the result is not float32")
    site.require(
        z is None or (z.dtype == x.dtype and (z.shape == s.shape or z.size == s.size == 1)), "the zero point does not fit"
    )
    axis = _axis(site, x, s)
    return dequantized(site, x, s, z, axis)


@kernel("DynamicQuantizeLinear", 11, on="onednn")
def dynamic_quantize_linear(site: Site, x: Value) -> tuple[Value, Value, Value]:
    """The range by NumPy, then a division with post-ops."""
    require_plain(site, x)
    site.require(x.finiteness == FINITE, "the input may be infinite")
    site.needs_finite()
    scale, zero = site.new((), F32, finiteness=FINITE), site.new((), np.uint8, finiteness=FINITE)

    def bind() -> Any:
        values, out, offset = x.array, scale.array, zero.array
        flat = values.transpose(np.argsort([-s for s in values.strides], kind="stable")).reshape(-1)
        n255, n0 = np.float32(255), np.float32(0)

        def run() -> None:
            low, high = np.minimum(flat.min(), n0), np.maximum(flat.max(), n0)
            step = (high - low) / n255
            out[...] = step
            with np.errstate(all="ignore"):
                offset[...] = np.rint(np.fmin(np.fmax(-low / step, n0), n255))

        return [(run, ())]

    site.require(order_of(x) is not None, "the input has gaps")
    site.emit(bind, reads=(x,), writes=(scale, zero), kernel="numpy range")
    y = quantized(site, x, scale, zero, np.dtype(np.uint8), None)
    return y, scale, zero


@kernel("Add", 7, 13, 14, on="onednn")
def add(site: Site, a: Value, b: Value) -> Value:
    """A sum that is quantized."""
    site.require(any(f.name == "QuantizeLinear" for f in site.followers), "the sum is not quantized")
    require_plain(site, a, b)
    if a.shape != broadcast_sizes(a.shape, b.shape):
        a, b = b, a
    order = order_of(a)
    site.require(order is not None, "the input has gaps")
    assert order is not None
    wide = b
    if b.shape == a.shape:
        wide = ordered(site, b, order)
        second = dense_desc(F32, a.shape, order)
    else:
        shape = (1,) * (a.ndim - b.ndim) + b.shape
        site.require(len(shape) == a.ndim and b.contiguous, "the shapes do not broadcast")
        site.require(all(d in (1, e) for d, e in zip(shape, a.shape, strict=True)), "the shapes do not broadcast")
        wide = b.view(shape, strides_of(shape, 4))
        second = dense_desc(F32, shape)
    src = dense_desc(F32, a.shape, order)

    def start() -> Tail:
        tail = Tail(site, a.shape, tuple(order), lambda v: v, 1, kind="float", dtype=F32)
        tail.made.finiteness = FINITE if worst(a, b) == FINITE else NAN
        return tail

    def build(tail: Tail) -> Primitive:
        site.require(tail.dtype in INT8, "the sum is not quantized")
        return dnn.binary(src, second, dense_desc(tail.dtype, a.shape, order), algorithm="add", attributes=tail.made.attributes)

    with threads_for(a.size * 4):
        made, tail = create(site, start, build)
    y, arguments = result(tail, a.shape, tuple(order))
    arguments |= {dnn.args.SRC: (src, a), dnn.args.SRC_1: (second, wide), dnn.args.DST: (dense_desc(y.dtype, a.shape, order), y)}
    emit(site, made, arguments, (y,), "add and quantize")
    return y


@kernel("Cast", 6, 9, 13, 19, 21, 23, 24, 25, 28, on="numpy", rank=1)
def lookup(site: Site, x: Value) -> Value:
    """A table of the 256 results of a function of one quantized value (Cast, Gather)."""
    f = site.followers[0] if site.followers else None
    site.require(f is not None and f.name == "Gather" and f.place == 1, "no table follows")
    assert f is not None
    table, order = f.inputs[0], order_of(x)
    site.require(
        table is not None and table.constant and table.shape == (256,) and table.dtype in INT8, "it is not a table of bytes"
    )
    site.require(
        x.dtype in INT8 and order is not None and numpy_dtype(site.attributes["to"]) == INT32, "it is not an index of bytes"
    )
    assert table is not None and order is not None
    entries = table.array.tobytes()
    site.absorb(1)
    y = site.new(x.shape, table.dtype, order, FINITE)

    def bind() -> Any:
        source, target = _bytes(x, order).data, _bytes(y, order).data

        def run() -> None:
            target[:] = bytes(source).translate(entries)

        return [(run, ())]

    site.emit(bind, reads=(x,), writes=(y,), kernel="bytes.translate")
    return y


def _bytes(x: Value, order: list[int]) -> np.ndarray:
    return x.array.transpose(order).reshape(-1).view(np.uint8)
