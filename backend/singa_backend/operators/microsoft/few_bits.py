"""Products with weights of 2, 4 and 8 bits, and rows gathered from such a table.

A definition unpacks a part of the weights at a time and keeps none: a file's weights stay packed in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes, limits
from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape, valid_axes
from .._common import axis_of
from ._api import Array, Op, V, Xp, microsoft
from ._packed import (
    FLOAT,
    check_form,
    dequantized,
    dequantized_body,
    has_blocks,
    known_bytes,
    sized,
    unpacked,
    unpacked_body,
    zero_points,
    zero_points_body,
)
from .gates import single

PART = 1 << 20
"""Approximate number of weights that are unpacked at a time."""


def parts(n: int, k: int) -> list[slice]:
    """Return the rows of an n x k matrix in parts of about `PART` elements."""
    step = max(1, PART // max(1, k))
    return [slice(first, min(first + step, n)) for first in limits.blocks(n, step)]


def check_columns(a: Array, k: int) -> None:
    """Raise OperatorError unless the rows of `a` have k elements."""
    if a.ndim < 1 or a.shape[-1] != k:
        raise OperatorError(f"the last axis of A must have K = {k} elements, got shape {tuple(a.shape)}", code="SX404")


def columns_of(known: KnownShapes[Any], call: Any) -> Shape | None:
    """Return the shape of the first input with N as its last size."""
    shape = known.shape(call.inputs[0])
    return None if not shape else (*shape[:-1], known.attribute(call, "N"))


# --- MatMulNBits


@microsoft(
    "MatMulNBits", 1, traits=("product", "finite", "packed_weights"), weights={0: "the input", 2: "the scale", 5: "the bias"}
)
def matmul_nbits(
    xp: Xp,
    a: Array,
    b: Array,
    scales: Array,
    zero_point: Array | None = None,
    g_idx: Array | None = None,
    bias: Array | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Array:
    """Compute A * W' + bias, where W[n, k] = (q[n, k] - zero point) * scale, each for a block of a row.

    The computation is in float32 whatever `accuracy_level`.  With g_idx, the block of column k is g_idx[k].  Weights without
    elements are zeros.
    """
    check_form(bits, block_size)
    check_columns(a, K)
    if weight_prepacked:
        raise OperatorError("weights in the layout of one GPU cannot be read", code="SX404", hint="use the file before packing")
    y = xp.zeros((*a.shape[:-1], N), dtype=np.float32)
    blocks = -(-K // block_size)
    if b.size:
        b = sized("B", b, (N, blocks, block_size * bits // 8))
        scales = sized("scales", scales, (N, blocks))
        zeros = xp.broadcast_to(zero_points(xp, zero_point, bits, (N, blocks)), (N, blocks))
        group = None if g_idx is None else xp.indices(g_idx.reshape(-1)[:K], blocks, negative=False)
        left = a.reshape(-1, K)
        flat = y.reshape(-1, N)
        for rows in parts(N, K):
            if group is None:
                w = dequantized(xp, b[rows], scales[rows], zeros[rows], bits, block_size, K)
            else:
                q = unpacked(xp, b[rows], bits).reshape(rows.stop - rows.start, -1)[:, :K].astype(np.float32)
                w = (q - zeros[rows][:, group]) * scales[rows][:, group]
            flat[:, rows] = xp.matmul(left, w.T)
    return y if bias is None else y + sized("bias", bias, (N,))


@matmul_nbits.decomposition
def matmul_nbits_body(
    op: Op,
    a: V,
    b: V,
    scales: V,
    zero_point: V,
    g_idx: V,
    bias: V,
    K: int,
    N: int,
    block_size: int,
    bits: int,
) -> V:
    if 0 in (op.shape(b) or ()):
        y = op.Expand(op.constant(0, np.float32), op.Concat(op.Shape(a, end=-1), [N], axis=0))
    else:
        w = _weights_body(op, b, scales, zero_point, g_idx, K, N, block_size, bits)
        y = op.MatMul(single(op, a), op.Transpose(w, perm=[1, 0]))
    return op.cast(y if bias is None else op.Add(y, single(op, bias)), a)


def _weights_body(op: Op, b: V, scales: V, zero: V, g_idx: V, k: int, n: int, block: int, bits: int) -> V:
    """Write the weights as n x k in float32."""
    blocks = -(-k // block)
    scales = op.Reshape(single(op, scales), [n, blocks])
    if g_idx is None:
        return dequantized_body(op, b, scales, zero, bits, block, k, [n])
    group = op.Slice(op.Reshape(g_idx, [-1]), [0], [k])
    q = op.Slice(op.Reshape(op.Cast(unpacked_body(op, b, bits), to=FLOAT), [n, blocks * block]), [0], [k], [1])
    points = op.Expand(zero_points_body(op, zero, bits, [n, blocks]), [n, blocks])
    return op.Mul(op.Sub(q, op.Gather(points, group, axis=1)), op.Gather(scales, group, axis=1))


matmul_nbits.shapes(columns_of)


# --- MatMulBnb4


@microsoft("MatMulBnb4", 1, traits=("product", "finite", "packed_weights"), weights={0: "the input", 2: "the scale"})
def matmul_bnb4(
    xp: Xp,
    a: Array,
    b: Array,
    absmax: Array,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Array:
    """Compute A * W' (A * W without transB) with W of N x K: entries of a table of 16, times a scale for each block.

    The blocks run over the rows of W one after another; the high bits of a byte are the first value.
    """
    check_form(4, block_size)
    _check_type(quant_type)
    check_columns(a, K if transB else N)
    b = sized("B", b, (-(-N * K // 2),))
    absmax = sized("absmax", absmax, (-(-N * K // block_size),))
    table = xp.asarray(dtypes.FOUR_BIT_CODES[quant_type])
    left = a.reshape(-1, a.shape[-1])
    y = xp.zeros((left.shape[0], N if transB else K), dtype=np.float32)
    for rows in parts(N, K):
        at = xp.arange(rows.start * K, rows.stop * K)
        code = (b[at // 2] >> (4 - at % 2 * 4).astype(np.uint8)) & np.uint8(15)
        w = (table[code] * absmax[at // block_size]).reshape(-1, K)
        if transB:
            y[:, rows] = xp.matmul(left, w.T)
        else:
            y += xp.matmul(left[:, rows], w)
    return y.reshape(*a.shape[:-1], y.shape[1])


def _check_type(quant_type: int) -> None:
    if quant_type not in (0, 1):
        raise OperatorError(f"quant_type must be 0 (FP4) or 1 (NF4), got {quant_type}", code="SX404")


@matmul_bnb4.decomposition
def matmul_bnb4_body(op: Op, a: V, b: V, absmax: V, K: int, N: int, block_size: int, quant_type: int, transB: int) -> V:
    """The codes are padded to whole blocks."""
    _check_type(quant_type)
    blocks = -(-N * K // block_size)
    nibbles = op.BitwiseAnd(op.BitShift(op.Unsqueeze(b, [1]), op.constant([4, 0], np.uint8), direction="RIGHT"), 15)
    codes = op.Reshape(op.Cast(nibbles, to=7), [-1])
    missing = blocks * block_size - -(-N * K // 2) * 2
    codes = op.Pad(codes, [0, missing]) if missing else codes
    values = op.Gather(op.constant(dtypes.FOUR_BIT_CODES[quant_type], np.float32), op.Reshape(codes, [blocks, block_size]))
    w = op.Reshape(op.Mul(values, op.Reshape(single(op, absmax), [blocks, 1])), [-1])
    w = op.Reshape(op.Slice(w, [0], [N * K]), [N, K])
    return op.cast(op.MatMul(single(op, a), op.Transpose(w, perm=[1, 0]) if transB else w), a)


@matmul_bnb4.shapes
def matmul_bnb4_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = known.shape(call.inputs[0])
    return None if not shape else (*shape[:-1], known.attribute(call, "N" if known.attribute(call, "transB", 1) else "K"))


# --- GatherBlockQuantized


@microsoft("GatherBlockQuantized", 1, widen=False, traits=("finite",), weights={2: "the scale"})
def gather_block_quantized(
    op: Op,
    data: V,
    index: V,
    scales: V,
    zero_point: V | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> V:
    """Gather, then compute (q - zero point) * scale, each for a block of the quantized axis.

    Bytes are packed along the last axis, with the middle of the range as default zero point; int4 and uint4 have 0, and floats
    have none.
    """
    rank, dtype = op.rank(data), op.dtype(data)
    axis, along = axis_of(gather_axis, rank), axis_of(quantize_axis, rank)
    after = along + (op.rank(index) - 1 if along > axis else 0)
    if dtypes.is_float(dtype):
        values = op.Gather(op.Cast(data, to=FLOAT), index, axis=axis)
        scale = _scales_body(op, single(op, scales), data, index, axis)
        return op.cast(op.Mul(values, _spread_body(op, scale, values, after, block_size) if block_size else scale), scales)
    packed = dtype == np.uint8
    q = op.Gather(data if packed else _bytes_body(op, data), index, axis=axis)
    q = unpacked_body(op, q, bits) if packed else q
    grain = op.Gather(scales, index, axis=axis)
    if zero_point is None:
        z = op.Expand(op.constant(2 ** (bits - 1) if packed else 0, op.dtype(q)), op.Shape(grain))
    else:
        z = op.Gather(zero_point if packed else _bytes_body(op, zero_point), index, axis=axis)
        z = op.Slice(unpacked_body(op, z, bits), [0], op.Shape(grain, start=-1), [-1]) if packed else z
    if has_blocks(op) and op.dtype(grain) != np.float64:  # of which DequantizeLinear has none
        return op.DequantizeLinear(q, grain, z, axis=after, block_size=block_size)
    wide = single(op, grain)
    code = dtypes.onnx_code(op.dtype(wide))
    centred = op.Sub(op.Cast(q, to=code), _spread_body(op, op.Cast(z, to=code), q, after, block_size))
    return op.cast(op.Mul(centred, _spread_body(op, wide, q, after, block_size)), scales)


@gather_block_quantized.accepts
def gather_block_quantized_accepts(
    data: Array,
    scales: Array,
    zero_point: Array | None,
    bits: int,
    block_size: int,
    gather_axis: int,
    quantize_axis: int,
) -> None:
    axis, along = axis_of(gather_axis, data.ndim), axis_of(quantize_axis, data.ndim)
    floats, packed = dtypes.is_float(data.dtype), data.dtype == np.uint8
    if not (floats and block_size == 0):
        check_form(bits if packed else 4, block_size)
    if floats and zero_point is not None:
        raise OperatorError("zero_points must be absent for data of floats", code="SX404")
    if packed and axis != 0:
        raise OperatorError(f"gather_axis must be 0 for data of bytes, got {axis}", code="SX404")
    if axis == along:
        raise OperatorError(f"gather_axis and quantize_axis must differ, got {axis} for both", code="SX404")
    size = data.shape[along] * (8 // bits if packed and along == data.ndim - 1 else 1)
    grain = tuple(-(-size // (block_size or max(1, size))) if i == along else n for i, n in enumerate(data.shape))
    if packed and along != data.ndim - 1:
        grain = (*grain[:-1], grain[-1] * (8 // bits))
    if scales.ndim != data.ndim or any(n != g and not (floats and n == 1) for n, g in zip(scales.shape, grain, strict=True)):
        raise OperatorError(f"scales must have shape {grain}, got {tuple(scales.shape)}", code="SX404")


UINT8_OF = {np.dtype(np.uint8): 2, dtypes.numpy_dtype(21): 2, dtypes.numpy_dtype(22): 3}
"""The type code of a byte that holds each dtype of integers."""


def _bytes_body(op: Op, x: V) -> V:
    """Write integers of 4 bits as bytes: a file before opset 21 cannot hold them."""
    code = UINT8_OF[op.dtype(x)]
    values = None if has_blocks(op) else known_bytes(op, x)
    return op.Cast(x, to=code) if values is None else op.constant(values, dtypes.numpy_dtype(code))


def _scales_body(op: Op, scales: V, data: V, index: V, axis: int) -> V:
    """Write the scales of the gathered floats; a size of 1 may stand for all."""
    there = op.Shape(data, start=axis, end=axis + 1)
    sizes = op.Concat(op.constant([1] * axis, np.int64), there, op.constant([1] * (op.rank(data) - axis - 1), np.int64), axis=0)
    return op.Gather(op.Expand(scales, sizes), index, axis=axis)


def _spread_body(op: Op, x: V, values: V, axis: int, block: int) -> V:
    """Write the entry of its block for each of the values along an axis."""
    places = op.Div(op.Range(0, op.Squeeze(op.Shape(values, start=axis, end=axis + 1), [0]), 1), block)
    return op.Gather(x, places, axis=axis)


@gather_block_quantized.shapes
def gather_block_quantized_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    scales, index = known.shape(call.inputs[2]), known.shape(call.inputs[1])
    shape = known.shape(call.inputs[0])
    if shape is None or index is None or scales is None:
        return None
    found = valid_axes([known.attribute(call, "gather_axis", 0)], len(shape))
    if found is None:
        return None
    axis = found[0]
    return (*shape[:axis], *index, *shape[axis + 1 : -1], known.fresh()) if axis < len(shape) - 1 else (*shape[:axis], *index)
