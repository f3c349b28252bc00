"""Caches of keys and values whose rows are written at the length of each sequence, as floats or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._api import Op, V
from ._attention import op_range, op_size, wrong


@dataclass
class CacheRows:
    """Where each sequence of a batch is in the cache; values of shape (batch, 1).

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

    def written(self, op: Op, past: V, new: V) -> V:
        """Return the cache with the new rows; those after them are zero."""
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

    def unrolled(self, op: Op, past: V, window: int) -> V:
        """Return the cache of full length of one that keeps the last rows only; rows that it does not have are zero."""
        resident = _resident(op, self.past, op_size(op, past, 2), window)
        index = op.Sub(op_range(op, self.rows), op.Sub(self.past, resident))
        return _taken(op, past, index, op.And(op.GreaterOrEqual(index, 0), op.Less(index, resident)))

    def rolled(self, op: Op, present: V, capacity: V, window: int) -> V:
        """Return the last rows of a cache of full length, from row 0 on."""
        resident, row = _resident(op, self.length, capacity, window), op_range(op, capacity)
        return _taken(op, present, op.Add(row, op.Sub(self.length, resident)), op.Less(row, resident))

    def kept(self, op: Op, past: V, new: V, scale: V, bits: int, like: V) -> tuple[V, V]:
        """Return the cache with the new rows, and its values: quantized if there is a scale, otherwise in the dtype of `like`."""
        if scale is None:
            written = self.written(op, past, new)
            return op.cast(written, like), written
        written = self.written(op, past, quantized(op, new, scale, bits))
        return written, restored(op, written, scale, bits, new)


def _resident(op: Op, length: V, capacity: V, window: int) -> V:
    """Return how many of the last rows a cache has after `length` rows: when it is full, several leave it at once."""
    group = op.Sub(capacity, window - 1)
    over = op.Max(op.Sub(length, capacity), 0)
    return op.Sub(length, op.Mul(group, op.Div(op.Sub(op.Add(over, group), 1), group)))


def _taken(op: Op, x: V, index: V, inside: V) -> V:
    """Return rows of a cache for each sequence, and zeros."""
    safe = op.Max(op.Min(index, op.Sub(op_size(op, x, 2), 1)), 0)
    rows = op.GatherND(op.Transpose(x, perm=[0, 2, 1, 3]), op.Unsqueeze(safe, [2]), batch_dims=1)
    return op.Where(op.Unsqueeze(inside, [1, 3]), op.Transpose(rows, perm=[0, 2, 1, 3]), op.constant(0, op.dtype(x)))


def _half(bits: int) -> int:
    """Return half the number of integers of a quantized cache."""
    if bits not in (4, 8):
        raise wrong(f"kv_cache_bit_width must be 4 or 8 for a quantized cache, got {bits}")
    return 1 << (bits - 1)


def quantized(op: Op, x: V, scale: V, bits: int) -> V:
    """Return x / scale rounded to int8, or to pairs of 4 bits: the even features in the low ones, and 8 added."""
    half, scale = _half(bits), op.cast(scale, x)
    whole = op.Clip(op.Round(op.Div(x, scale)), -half, half - 1)
    if bits == 8:
        return op.Cast(whole, to=3)
    nibbles = op.Cast(op.Add(whole, half), to=7)
    low, high = (op.Slice(nibbles, [i], [2**62], [3], [2]) for i in range(2))
    return op.Cast(op.Add(low, op.Mul(high, 16)), to=2)


def restored(op: Op, x: V, scale: V, bits: int, like: V) -> V:
    """Return the values of a quantized cache."""
    scale = op.cast(scale, like)
    if bits == 8:
        return op.Mul(op.cast(x, like), scale)
    pairs = op.Cast(x, to=7)
    nibbles = op.Concat(op.Unsqueeze(op.Mod(pairs, 16), [4]), op.Unsqueeze(op.Div(pairs, 16), [4]), axis=4)
    return op.Mul(op.cast(op.Sub(op.Reshape(nibbles, [0, 0, 0, -1]), 8), like), scale)
