"""Caches of keys and values whose rows are written at the length of each sequence, as floats or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._common import clamped
from ._api import Array, Op, V, Xp
from ._attention import op_range, op_size, wrong


@dataclass
class CacheRows:
    """Where each sequence of a batch is in the cache; arrays of shape (batch, 1), or values of an interpreter.

    Attributes:
        past: the rows before the new ones.
        new: the number of new rows.
        length: the number of rows afterwards, without padding.
        rows: the number of rows of the result.
    """

    past: Any
    new: Any
    length: Any
    rows: Any

    def written(self, xp: Xp, past: Array | None, new: Array) -> Array:
        """Return the cache with the new rows; those after them are zero."""
        batch, heads, length, size = new.shape
        out = xp.zeros((batch, heads, self.rows, size), new.dtype)
        row = xp.arange(self.rows)
        if past is not None:
            kept = xp.where((xp.arange(past.shape[2]) < self.past)[:, None, :, None], past, 0)
            out[:, :, : past.shape[2]] = kept
        index = row - self.past
        inside = (index >= 0) & (index < self.new)
        taken = xp.take_along_axis(new, xp.clip(index, 0, max(length - 1, 0))[:, None, :, None], axis=2) if length else out
        return xp.where(inside[:, None, :, None], taken, out)

    def op_written(self, op: Op, past: V, new: V) -> V:
        """As `written`, in ONNX's operators."""
        index = op.Sub(op_range(op, self.rows), self.past)
        last = op.Sub(op_size(op, new, 2), 1)
        safe = op.Unsqueeze(op.Max(op.Min(index, last), 0), [2])
        taken = op.Transpose(op.GatherND(op.Transpose(new, perm=[0, 2, 1, 3]), safe, batch_dims=1), perm=[0, 2, 1, 3])
        zero = op.constant(0, op.dtype(new))
        old = zero
        if past is not None:
            missing = op.Sub(self.rows, op_size(op, past, 2))
            padded = op.Pad(past, op.Concat([0] * 6, missing, [0], axis=0))
            old = op.Where(op.Unsqueeze(op.Less(index, 0), [1, 3]), padded, zero)
        inside = op.And(op.GreaterOrEqual(index, 0), op.Less(index, self.new))
        return op.Where(op.Unsqueeze(inside, [1, 3]), taken, old)

    def unrolled(self, xp: Xp, past: Array, window: int) -> Array:
        """Return the cache of full length of one that keeps the last rows only; rows that it does not have are zero."""
        if past.shape[2] < window:
            raise wrong(f"a sliding cache must have room for the {window} tokens of its window, got {past.shape[2]} rows")
        resident = _resident(self.past, past.shape[2], window)
        index = xp.arange(self.rows) - (self.past - resident)
        return _taken(xp, past, index, (index >= 0) & (index < resident))

    def rolled(self, xp: Xp, present: Array, capacity: int, window: int) -> Array:
        """Return the last rows of a cache of full length, from row 0 on."""
        resident, row = _resident(self.length, capacity, window), xp.arange(capacity)
        return _taken(xp, present, row + (self.length - resident), row < resident)

    def op_unrolled(self, op: Op, past: V, window: int) -> V:
        """As `unrolled`, in ONNX's operators."""
        resident = _op_resident(op, self.past, op_size(op, past, 2), window)
        index = op.Sub(op_range(op, self.rows), op.Sub(self.past, resident))
        return _op_taken(op, past, index, op.And(op.GreaterOrEqual(index, 0), op.Less(index, resident)))

    def op_rolled(self, op: Op, present: V, capacity: V, window: int) -> V:
        """As `rolled`, in ONNX's operators."""
        resident, row = _op_resident(op, self.length, capacity, window), op_range(op, capacity)
        return _op_taken(op, present, op.Add(row, op.Sub(self.length, resident)), op.Less(row, resident))

    def kept(self, xp: Xp, past: Array | None, new: Array, scale: Array | None, bits: int) -> tuple[Array, Array]:
        """Return the cache with the new rows, which is quantized if there is a scale, and its values."""
        if scale is None:
            written = self.written(xp, past, new)
            return written, written
        written = self.written(xp, past, quantized(xp, new, scale, bits))
        return written, restored(xp, written, scale, bits)

    def op_kept(self, op: Op, past: V, new: V, scale: V, bits: int) -> tuple[V, V]:
        """As `kept`, in ONNX's operators."""
        if scale is None:
            written = self.op_written(op, past, new)
            return written, written
        written = self.op_written(op, past, op_quantized(op, new, scale, bits))
        return written, op_restored(op, written, scale, bits, new)


def _resident(length: Any, capacity: int, window: int) -> Any:
    """Return how many of the last rows a cache has after `length` rows: when it is full, several leave it at once."""
    group = capacity - window + 1
    return length - group * (((length - capacity).clip(0) + group - 1) // group)


def _taken(xp: Xp, x: Array, index: Array, inside: Array) -> Array:
    """Return rows of a cache for each sequence, and zeros."""
    if not x.shape[2]:
        return xp.zeros((*x.shape[:2], index.shape[1], x.shape[3]), x.dtype)
    rows = xp.take_along_axis(x, xp.clip(index, 0, x.shape[2] - 1)[:, None, :, None], axis=2)
    return xp.where(inside[:, None, :, None], rows, xp.zeros((), x.dtype))


def _op_resident(op: Op, length: V, capacity: V, window: int) -> V:
    group = op.Sub(capacity, window - 1)
    over = op.Max(op.Sub(length, capacity), 0)
    return op.Sub(length, op.Mul(group, op.Div(op.Sub(op.Add(over, group), 1), group)))


def _op_taken(op: Op, x: V, index: V, inside: V) -> V:
    safe = op.Max(op.Min(index, op.Sub(op_size(op, x, 2), 1)), 0)
    rows = op.GatherND(op.Transpose(x, perm=[0, 2, 1, 3]), op.Unsqueeze(safe, [2]), batch_dims=1)
    return op.Where(op.Unsqueeze(inside, [1, 3]), op.Transpose(rows, perm=[0, 2, 1, 3]), op.constant(0, op.dtype(x)))


def _half(bits: int) -> int:
    """Return half the number of integers of a quantized cache."""
    if bits not in (4, 8):
        raise wrong(f"kv_cache_bit_width must be 4 or 8 for a quantized cache, got {bits}")
    return 1 << (bits - 1)


def quantized(xp: Xp, x: Array, scale: Array, bits: int) -> Array:
    """Return x / scale rounded to int8, or to pairs of 4 bits: the even features in the low ones, and 8 added."""
    half = _half(bits)
    whole = clamped(xp, xp.rint(x / scale), -half, half - 1)
    if bits == 8:
        return whole.astype(np.int8)
    nibbles = (whole + half).astype(np.uint8)
    return nibbles[..., 0::2] + nibbles[..., 1::2] * np.uint8(16)


def restored(xp: Xp, x: Array, scale: Array, bits: int) -> Array:
    """Return the values of a quantized cache."""
    if bits == 8:
        return x.astype(np.float32) * scale
    nibbles = xp.stack([x % 16, x // 16], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
    return (nibbles.astype(np.float32) - 8) * scale


def op_quantized(op: Op, x: V, scale: V, bits: int) -> V:
    """As `quantized`, in ONNX's operators."""
    half, scale = _half(bits), op.cast(scale, x)
    whole = op.Clip(op.Round(op.Div(x, scale)), -half, half - 1)
    if bits == 8:
        return op.Cast(whole, to=3)
    nibbles = op.Cast(op.Add(whole, half), to=7)
    low, high = (op.Slice(nibbles, [i], [2**62], [3], [2]) for i in range(2))
    return op.Cast(op.Add(low, op.Mul(high, 16)), to=2)


def op_restored(op: Op, x: V, scale: V, bits: int, like: V) -> V:
    """As `restored`, in ONNX's operators."""
    scale = op.cast(scale, like)
    if bits == 8:
        return op.Mul(op.cast(x, like), scale)
    pairs = op.Cast(x, to=7)
    nibbles = op.Concat(op.Unsqueeze(op.Mod(pairs, 16), [4]), op.Unsqueeze(op.Div(pairs, 16), [4]), axis=4)
    return op.Mul(op.cast(op.Sub(op.Reshape(nibbles, [0, 0, 0, -1]), 8), like), scale)
