"""Weights of few bits: unpacked, and dequantized by blocks, on arrays and in ONNX's operators."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ...devices.namespaces import host
from ...errors import OperatorError
from ._api import Array, Op, V, Xp
from .gates import single

WIDTHS = (2, 4, 8)
FLOAT, UINT8 = 1, 2


def check_form(bits: int, block_size: int, least: int = 16) -> None:
    """Raise OperatorError unless the bits of a weight and the size of its blocks are those of onnxruntime's kernels."""
    if bits not in WIDTHS:
        raise OperatorError(f"bits must be 2, 4 or 8, got {bits}", code="SX404")
    if block_size < least or block_size & (block_size - 1):
        raise OperatorError(f"block_size must be a power of 2 and at least {least}, got {block_size}", code="SX404")


def sized(name: str, value: Array, shape: tuple[int, ...]) -> Array:
    """Reshape `value`, which may be flattened; raise OperatorError if its number of elements is not that of `shape`."""
    count = int(np.prod(shape))
    if value.size != count:
        raise OperatorError(f"{name} must have shape {shape}, or {count} elements, got {tuple(value.shape)}", code="SX404")
    return value.reshape(shape)


def bytes_of(count: int, bits: int) -> int:
    """Return the bytes of one row of `count` values."""
    return -(-count * bits // 8)


# --- on arrays --------------------------------------------------------------------------------------------------------


def unpacked(xp: Xp, packed: Array, bits: int) -> Array:
    """Return the values of the bytes along the last axis, those of lower bits first, as uint8."""
    if bits == 8:
        return packed
    every = np.arange(256)[:, None] >> np.arange(0, 8, bits) & 2**bits - 1
    values = xp.take(xp.asarray(every.astype(np.uint8)), packed, axis=0)  # faster than shifts, whose last axis would be short
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def zero_points(xp: Xp, zero: Array | None, bits: int, shape: tuple[int, ...]) -> Array:
    """Return the zero points of blocks as floats that broadcast to `shape`, whose last axis counts the blocks of a row.

    Bytes are packed for each row; floats are not packed; the default is the middle of the range.
    """
    if zero is None:
        return xp.full((1,) * len(shape), 2 ** (bits - 1), dtype=np.float32)
    if zero.dtype != np.uint8:
        return sized("zero_points", zero, shape).astype(np.float32)
    packed = sized("zero_points", zero, (*shape[:-1], bytes_of(shape[-1], bits)))
    return unpacked(xp, packed, bits)[..., : shape[-1]].astype(np.float32)


def dequantized(xp: Xp, packed: Array, scales: Array, zero: Array, bits: int, block: int, k: int) -> Array:
    """Return (q - zero) * scale as ... x k; the values of `packed` are in blocks, or in rows of one block."""
    q = unpacked(xp, packed, bits).astype(np.float32)
    q = q.reshape(*scales.shape, block)
    w = (q - zero[..., None]) * scales[..., None]
    return w.reshape(*scales.shape[:-1], scales.shape[-1] * block)[..., :k]


# --- in ONNX's operators ----------------------------------------------------------------------------------------------


def known_bytes(op: Op, x: V) -> np.ndarray | None:
    """Return the bytes of a constant; None if they are not known while a graph is built."""
    return None if x is None else op.constant_value(x)


def has_blocks(op: Op) -> bool:
    """Whether DequantizeLinear has blocks and integers of 4 bits at the opset that is written."""
    return op.target is None or op.target >= 21


def narrow(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the values as a constant of DequantizeLinear: uint4, which is packed in files as here, or uint8."""
    values: Any = unpacked(host, packed, bits)
    return np.asarray(values.astype(ml_dtypes.uint4) if bits <= 4 else values)


def unpacked_body(op: Op, packed: V, bits: int) -> V:
    """Write `unpacked`.

    Opsets before 18 lack BitwiseAnd: a constant is written with a byte for each value, and other bits are shifted out of a byte.
    """
    if bits == 8:
        return packed
    shifts, old = np.arange(0, 8, bits), op.target is not None and op.target < 18
    if old and (values := known_bytes(op, packed)) is not None:
        return op.constant(unpacked(host, values, bits), np.uint8)
    each = op.Unsqueeze(packed, [-1])
    if old:
        high = op.BitShift(each, op.constant(8 - bits - shifts, np.uint8), direction="LEFT")
        values = op.BitShift(high, op.constant(8 - bits, np.uint8), direction="RIGHT")
    else:
        values = op.BitwiseAnd(op.BitShift(each, op.constant(shifts, np.uint8), direction="RIGHT"), 2**bits - 1)
    sizes = op.Concat(op.Shape(packed, end=-1), op.Mul(op.Shape(packed, start=-1), 8 // bits), axis=0)
    return op.Reshape(values, sizes, allowzero=1)


def zero_points_body(op: Op, zero: V, bits: int, shape: list[int]) -> V:
    """Write `zero_points`."""
    if zero is None:
        return op.constant(np.full((1,) * len(shape), 2 ** (bits - 1)), np.float32)
    if op.dtype(zero) != np.uint8:
        return op.Reshape(single(op, zero), shape)
    values = op.Reshape(unpacked_body(op, zero, bits), [*shape[:-1], bytes_of(shape[-1], bits) * 8 // bits])
    return op.Cast(op.Slice(values, [0], [shape[-1]], [-1]), to=FLOAT)


def dequantized_body(op: Op, packed: V, scales: V, zero: V, bits: int, block: int, k: int, rows: list[int]) -> V:
    """Write the weights as rows x k; `scales` has shape rows x blocks, `zero` is as in the node.

    Constants become those of DequantizeLinear, if their bytes are known, except before opset 21, which has no blocks.
    """
    blocks = -(-k // block)
    values, points = known_bytes(op, packed), known_bytes(op, zero)
    constant = zero is None or (points is not None and points.dtype == np.uint8)
    if constant and values is not None and has_blocks(op):
        count = int(np.prod(rows))
        q = narrow(values.reshape(count, -1), bits)[:, :k]
        if points is None:
            z = np.full((count, blocks), 2 ** (bits - 1), q.dtype)
        else:
            z = narrow(points.reshape(count, -1), bits)[:, :blocks]
        scales = scales if len(rows) == 1 else op.Reshape(scales, [count, blocks])
        w = op.DequantizeLinear(op.constant(q, q.dtype), scales, op.constant(z, q.dtype), axis=1, block_size=block)
        return w if len(rows) == 1 else op.Reshape(w, [*rows, k])
    q = op.Reshape(op.Cast(unpacked_body(op, packed, bits), to=FLOAT), [*rows, blocks, block])
    centred = op.Sub(q, op.Unsqueeze(zero_points_body(op, zero, bits, [*rows, blocks]), [-1]))
    w = op.Reshape(op.Mul(centred, op.Unsqueeze(scales, [-1])), [*rows, blocks * block])
    return op.Slice(w, [0], [k], [-1]) if k < blocks * block else w
