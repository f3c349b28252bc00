"""Parts of onnxruntime's attention operators: heads, masks, and softmax(scores) V, on arrays and as ONNX's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import limits
from ...dtypes import float_info
from ...errors import OperatorError
from ...ir.declaration import Declaration
from ..attention import attention, by_kv_head, wide
from ._api import Array, Op, V, Xp

# --- on arrays --------------------------------------------------------------------------------------------------------


def wrong(text: str, hint: str = "") -> OperatorError:
    """Return the error for inputs whose shapes or attributes do not match."""
    return OperatorError(text, code="SX404", hint=hint)


def wides(*values: Array | None) -> list[Any]:
    """Return narrow floats as float32, and other values as they are."""
    return [x if x is None else wide(x) for x in values]


def narrowed(dtype: Any, *values: Array | None) -> tuple[Any, ...]:
    """Return results in a dtype; those that have it are not copied, which lets a cache grow in its memory."""
    return tuple(x if x is None or x.dtype == dtype else x.astype(dtype) for x in values)


def split_heads(x: Array, heads: int, name: str) -> Array:
    """Convert (batch, length, heads * size) to (batch, heads, length, size)."""
    if x.ndim != 3 or heads < 1 or x.shape[2] % heads:
        raise wrong(f"{name} must have shape (batch, length, hidden) with a multiple of {heads} heads, got {tuple(x.shape)}")
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def join_heads(y: Array) -> Array:
    """Convert (batch, heads, length, size) to (batch, length, heads * size)."""
    batch, heads, length, size = y.shape
    return y.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


def attend(
    xp: Xp,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    scale: float | None,
    softcap: float = 0.0,
    sink: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return softmax(scores + bias) V, the scores without the bias, and the softmax; a row of -inf has the result 0.

    sink: for each head a score more in the denominator of the softmax, without a value.
    """
    (batch, heads, rows, size), (kv_heads, keys) = q.shape, k.shape[1:3]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != size or heads % kv_heads:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        raise wrong(f"queries, keys and values must match as (batch, heads, length, size), got {shapes}")
    limits.admit((batch, heads, rows, keys), np.float32)
    factor = scale or 1 / math.sqrt(max(size, 1))
    scores = xp.matmul(by_kv_head(q, kv_heads), k.swapaxes(-1, -2)).reshape(batch, heads, rows, keys) * factor
    if softcap:
        scores = softcap * xp.tanh(scores / softcap)
    biased = scores if bias is None else scores + bias
    most = biased.max(axis=-1, keepdims=True) if keys else xp.zeros((batch, heads, rows, 1), q.dtype)
    most = xp.where(most == -xp.inf, 0, most)
    more: Any = 0
    if sink is not None:
        sink = sink.reshape(-1, 1, 1)
        most = xp.maximum(most, sink)
        more = xp.exp(sink - most)
    e = xp.exp(biased - most)
    total = e.sum(axis=-1, keepdims=True) + more
    weights = e / xp.where(total == 0, 1, total)
    return xp.matmul(by_kv_head(weights, kv_heads), v).reshape(batch, heads, rows, v.shape[3]), scores, weights


def check_bias(bias: Array | None, shape: Sequence[int]) -> None:
    """Raise OperatorError unless an attention bias has shape (batch or 1, heads or 1, queries, keys)."""
    if bias is None:
        return
    good = bias.ndim == 4 and tuple(bias.shape[2:]) == tuple(shape[2:])
    if not (good and all(n in (1, m) for n, m in zip(bias.shape[:2], shape[:2], strict=True))):
        raise wrong(
            f"attention_bias must have shape (batch or 1, heads or 1, queries, keys) of {tuple(shape)}, got {tuple(bias.shape)}"
        )


def mask_bias(
    xp: Xp, mask: Array | None, batch: int, rows: int, past: int, keys: int, causal: bool, filter_value: float, dtype: Any
) -> Array | None:
    """Return what a mask adds to the scores, broadcast to (batch, heads, rows, keys).

    mask: 0 or 1 of shape (batch, keys) or (batch, rows, keys); or key lengths, (batch); or their ends, then starts, (2 batch);
    or lengths, then the offsets that packed sequences have, (3 batch + 2).
    causal: replaces what the mask adds, except in the last row, which sees all keys.
    """
    bias: Array | None = None
    if mask is not None:
        bias = xp.where(_seen(xp, mask, batch, rows, keys), 0, filter_value).astype(dtype)
    if causal and rows > 1:
        row, key = xp.arange(rows).reshape(rows, 1), xp.arange(keys)
        later = (key > row + past) & (row < rows - 1)
        bias = xp.where(later, float(np.finfo(dtype).min), xp.zeros((1, 1), dtype) if bias is None else bias).astype(dtype)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return bias


def _seen(xp: Xp, mask: Array, batch: int, rows: int, keys: int) -> Array:
    """Return whether a mask shows each key, of shape (batch, 1, rows or 1, keys)."""
    if mask.ndim == 1 and mask.shape[0] in (batch, 2 * batch, 3 * batch + 2):
        key = xp.arange(keys)
        seen = key < mask[:batch].reshape(batch, 1, 1, 1)
        if mask.shape[0] == 2 * batch:
            seen = seen & (key >= mask[batch:].reshape(batch, 1, 1, 1))
        return seen
    if mask.shape == (batch, keys):
        return (mask > 0).reshape(batch, 1, 1, keys)
    if mask.shape == (batch, rows, keys):
        return (mask > 0).reshape(batch, 1, rows, keys)
    hint = "masks of 4 axes are for GPUs only: onnxruntime's CPU kernel refuses them" if mask.ndim == 4 else ""
    raise wrong(
        f"the mask must have shape ({batch},), ({2 * batch},), ({batch}, {keys}) or ({batch}, {rows}, {keys}), "
        f"got {tuple(mask.shape)}",
        hint,
    )


def appended(xp: Xp, past: Array | None, new: Array, used: int | None) -> tuple[Array, Array]:
    """Return the keys or values with those of the past, and the cache to return; the rows are on the second to last axis.

    used: the rows of the past that are in use, if it has more: the new rows follow those, and the cache keeps its size.
    """
    if past is None:
        return new, new
    if past.ndim != new.ndim or past.shape[:-2] != new.shape[:-2] or past.shape[-1] != new.shape[-1]:
        lead = "2, " * (new.ndim - 4)
        shape = f"({lead}batch, heads, length, size) as {tuple(new.shape)}"
        raise wrong(f"the past must have shape {shape}, got {tuple(past.shape)}")
    if used is None:
        every = xp.concatenate([past, new], axis=-2)
        return every, every
    after = used + new.shape[-2]
    if used < 0 or after > past.shape[-2]:
        rows = past.shape[-2]
        raise wrong(f"past_sequence_length and the new rows must fit a cache of {rows}, got {used} and {new.shape[-2]}")
    every = xp.concatenate([past[..., :used, :], new], axis=-2)
    return every, xp.concatenate([every, past[..., after:, :]], axis=-2)


# --- as ONNX's operators ----------------------------------------------------------------------------------------------


def op_split_heads(op: Op, x: V, heads: int) -> V:
    """Convert (batch, length, heads * size) to (batch, heads, length, size)."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def op_join_heads(op: Op, y: V) -> V:
    """Convert (batch, heads, length, size) to (batch, length, heads * size)."""
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def op_size(op: Op, x: V, axis: int) -> V:
    """Return the size of an axis, of shape (1)."""
    return op.Shape(x, start=axis, end=axis + 1)


def op_range(op: Op, size: V) -> V:
    """Return 0, 1, ... below a size of shape (1)."""
    return op.Range(0, op.Squeeze(size, [0]), 1)


def op_newer(
    op: Op, declaration: Declaration, since: int, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int = 1
) -> list[V]:
    """Call an operator that ONNX has since this opset; before, its parts."""
    if op.opset < since:
        return declaration.decompose(op, max(declaration.versions), inputs, attributes, outputs)
    return list(op.call(declaration.name, inputs, attributes, outputs))


def op_attend(op: Op, q: V, k: V, v: V, bias: V, scale: float | None, softcap: float = 0.0, mode: int = 0) -> tuple[V, V]:
    """Return the result of attention on 4-D inputs, and the scores after the step that the mode selects."""
    attributes = {"scale": scale or None, "softcap": softcap, "qk_matmul_output_mode": mode}
    y, _, _, scores = op_newer(op, attention, 23, [q, k, v, bias, None, None], attributes, 4)
    return y, scores


def op_mask_bias(op: Op, mask: V, q: V, k: V, past: V, causal: bool, filter_value: float) -> V:
    """Return what a mask adds to the scores, as `mask_bias`; None for nothing.

    past: the number of keys before those of the first query, of shape (1).
    """
    dtype = op.dtype(q)
    zero = op.constant(0, dtype)
    filter_value = max(filter_value, float(float_info(dtype).min))
    rows, keys = op_size(op, q, 2), op_size(op, k, 2)
    bias = None if mask is None else op.Where(_op_seen(op, mask, q, keys), zero, op.constant(filter_value, dtype))
    if causal:
        row, key = op.Unsqueeze(op_range(op, rows), [1]), op_range(op, keys)
        later = op.And(op.Greater(key, op.Add(row, past)), op.Less(row, op.Sub(rows, 1)))
        lowest = op.constant(float(float_info(dtype).min), dtype)
        bias = op.Where(later, lowest, zero if bias is None else bias)
    return bias


def _op_seen(op: Op, mask: V, q: V, keys: V) -> V:
    rank = op.rank(mask)
    if rank == 2:
        return op.Greater(op.Unsqueeze(mask, [1, 2]), 0)
    if rank == 3:
        return op.Greater(op.Unsqueeze(mask, [1]), 0)
    if rank != 1:
        raise wrong(f"the mask must have 1, 2 or 3 axes, got {rank}")
    batch = op_size(op, q, 0)
    key = op.Cast(op_range(op, keys), to=6)
    ends = op.Unsqueeze(op.Slice(mask, [0], batch, [0]), [1, 2, 3])
    # The starts are those of a mask of 2 batch values; in any other none is after the first key.
    starts = op.Slice(op.Pad(mask, op.Concat([0], batch, axis=0), 0), batch, op.Mul(batch, 2), [0])
    two = op.Equal(op.Shape(mask), op.Mul(batch, 2))
    starts = op.Unsqueeze(op.Where(two, starts, 0), [1, 2, 3])
    return op.And(op.Less(key, ends), op.GreaterOrEqual(key, starts))


def op_appended(op: Op, past: V, new: V, used: V) -> tuple[V, V]:
    """As `appended`; `used` has shape (1), or is None."""
    if past is None:
        return new, new
    if used is None:
        every = op.Concat(past, new, axis=2)
        return every, every
    every = op.Concat(op.Slice(past, [0], used, [2]), new, axis=2)
    return every, op.Concat(every, op.Slice(past, op_size(op, every, 2), [2**62], [2]), axis=2)


def op_past_length(op: Op, past: V, used: V) -> V:
    """Return the number of keys before the new ones, of shape (1)."""
    if used is not None:
        return used
    return op.constant([0], np.int64) if past is None else op_size(op, past, 2)
