"""Parts of onnxruntime's attention operators: heads, masks, and softmax(scores) V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...dtypes import float_info
from ...errors import OperatorError
from ...ir.declaration import Declaration, Ints
from ..attention import attention
from ._api import Array, Op, V
from .gates import single

# --- what is accepted -------------------------------------------------------------------------------------------------


def wrong(text: str, hint: str = "") -> OperatorError:
    """Return the error for inputs whose shapes or attributes do not match."""
    return OperatorError(text, code="SX404", hint=hint)


def heads_of(x: Array, heads: int, name: str) -> Ints:
    """Return the shape (batch, heads, length, size) of (batch, length, heads * size); raise OperatorError if it has no heads."""
    if x.ndim != 3 or heads < 1 or x.shape[2] % heads:
        raise wrong(f"{name} must have shape (batch, length, hidden) with a multiple of {heads} heads, got {tuple(x.shape)}")
    return x.shape[0], heads, x.shape[1], x.shape[2] // heads


def check_match(q: Ints, k: Ints, v: Ints) -> None:
    """Raise OperatorError unless queries, keys and values of these shapes match."""
    if k[:3] != v[:3] or k[0] != q[0] or k[3] != q[3] or not k[1] or q[1] % k[1]:
        raise wrong(f"queries, keys and values must match as (batch, heads, length, size), got {q}, {k} and {v}")


def check_bias(bias: Array | None, shape: Sequence[int]) -> None:
    """Raise OperatorError unless an attention bias has shape (batch or 1, heads or 1, queries, keys)."""
    if bias is None:
        return
    good = bias.ndim == 4 and tuple(bias.shape[2:]) == tuple(shape[2:])
    if not (good and all(n in (1, m) for n, m in zip(bias.shape[:2], shape[:2], strict=True))):
        raise wrong(
            f"attention_bias must have shape (batch or 1, heads or 1, queries, keys) of {tuple(shape)}, got {tuple(bias.shape)}"
        )


def check_mask(mask: Array | None, batch: int, rows: int, keys: int) -> None:
    """Raise OperatorError unless a mask has one of the shapes that `op_mask_bias` reads."""
    if mask is None or (mask.ndim == 1 and mask.shape[0] in (batch, 2 * batch, 3 * batch + 2)):
        return
    if mask.shape in ((batch, keys), (batch, rows, keys)):
        return
    hint = "masks of 4 axes are for GPUs only: onnxruntime's CPU kernel refuses them" if mask.ndim == 4 else ""
    raise wrong(
        f"the mask must have shape ({batch},), ({2 * batch},), ({batch}, {keys}) or ({batch}, {rows}, {keys}), "
        f"got {tuple(mask.shape)}",
        hint,
    )


def length_with(past: Array | None, new: Ints, used: Array | None) -> int:
    """Return the number of rows of a past and new ones; raise OperatorError if they do not fit.

    new: the shape of the new rows, on the second to last axis.
    used: the rows of the past that are in use, if it has more: the new rows follow those, and the cache keeps its size.
    """
    if past is None:
        return new[-2]
    if past.ndim != len(new) or past.shape[:-2] != new[:-2] or past.shape[-1] != new[-1]:
        lead = "2, " * (len(new) - 4)
        raise wrong(f"the past must have shape ({lead}batch, heads, length, size) as {new}, got {tuple(past.shape)}")
    if used is None:
        return int(past.shape[-2]) + new[-2]
    if used.size != 1:
        raise OperatorError(f"input 'past_sequence_length' must hold one value, got shape {used.shape}", code="SX402")
    kept, rows = int(used.reshape(-1)[0]), past.shape[-2]
    if kept < 0 or kept + new[-2] > rows:
        raise wrong(f"past_sequence_length and the new rows must fit a cache of {rows}, got {kept} and {new[-2]}")
    return kept + new[-2]


# --- as ONNX's operators ----------------------------------------------------------------------------------------------


def op_wide(op: Op, *values: V) -> list[V]:
    """Return narrow floats in float32, and other values as they are."""
    return [None if x is None else single(op, x) for x in values]


def op_like(op: Op, like: V, *values: V) -> list[V]:
    """Return values in the dtype of another one: the schema does not bind that of the scores."""
    return [None if x is None else op.cast(x, like) for x in values]


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
    """Return what a mask adds to the scores, broadcast to (batch, heads, rows, keys); None for nothing.

    mask: 0 or 1 of shape (batch, keys) or (batch, rows, keys); or key lengths, (batch); or their ends, then starts, (2 batch);
    or lengths, then the offsets that packed sequences have, (3 batch + 2).
    causal: replaces what the mask adds, except in the last row, which sees all keys.
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


def op_appended(op: Op, past: V, new: V, used: V, axis: int = 2) -> tuple[V, V]:
    """Return the keys or values with those of the past, along this axis, and the cache to return.

    used: the rows of the past that are in use, of shape (1), if it has more; the new rows follow those.
    """
    if past is None:
        return new, new
    if used is None:
        every = op.Concat(past, new, axis=axis)
        return every, every
    every = op.Concat(op.Slice(past, [0], used, [axis]), new, axis=axis)
    return every, op.Concat(every, op.Slice(past, op_size(op, every, axis), [2**62], [axis]), axis=axis)


def op_past_length(op: Op, past: V, used: V, axis: int = 2) -> V:
    """Return the number of keys before the new ones, of shape (1)."""
    if past is not None and used is not None:
        return used
    return op.constant([0], np.int64) if past is None else op_size(op, past, axis)
