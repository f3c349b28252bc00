"""Causal attention that sees blocks of keys, with a cache of keys and values."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ._api import Array, Host, Op, V, Xp, microsoft, not_declared
from ._attention import attend, join_heads, op_attend, op_join_heads, op_range, op_size, wides, wrong
from ._attention_facts import of_groups
from ._cache import CacheRows
from .group_query_attention import op_parts, parts_of, turned
from .rotary import op_rotate


def _block_mask(xp: Xp, rows: Array, columns: Array) -> Array:
    """Return which blocks of keys each block of queries sees, (layouts, blocks, blocks), from their compressed rows."""
    if rows.ndim != 2 or columns.ndim != 2 or rows.shape[0] != columns.shape[0]:
        raise wrong(
            f"block_row_indices and block_col_indices must have shapes (layouts, blocks + 1) and (layouts, entries), got "
            f"{tuple(rows.shape)} and {tuple(columns.shape)}"
        )
    entry = xp.arange(columns.shape[1])
    in_row = (entry >= rows[:, :-1, None]) & (entry < rows[:, 1:, None])
    is_block = columns[:, :, None] == xp.arange(rows.shape[1] - 1)
    return xp.matmul(in_row.astype(np.float32), is_block.astype(np.float32)) > 0


@microsoft("SparseAttention", 1, widen=False, traits=("product",), weights={0: "the query", 1: "the key", 2: "the value"})
def sparse_attention(
    xp: Xp,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    block_row_indices: Array | None = None,
    block_col_indices: Array | None = None,
    total_sequence_length: Host[int] = 0,
    key_total_sequence_lengths: Array | None = None,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sparse_block_size: int,
) -> tuple[Array, ...]:
    """Return the result, and the caches with the new rows; the other rows are those of the past.

    The blocks that heads see are the layouts, in turn.  Results of padded queries of a first prompt are not specified.
    """
    dtype = query.dtype
    query, key, value, past_key, past_value = wides(query, key, value, past_key, past_value)
    cos_cache, sin_cache = wides(cos_cache, sin_cache)
    if past_key is None or past_value is None or key_total_sequence_lengths is None:
        raise OperatorError("past_key, past_value and key_total_sequence_lengths are required", code="SX407")
    q, k, v = parts_of(query, key, value, num_heads, kv_num_heads)
    batch, length = q.shape[0], q.shape[2]
    after = key_total_sequence_lengths.reshape(-1, 1).astype(np.int64)
    before = xp.zeros_like(after) if length == total_sequence_length else after - length
    known = xp.to_host(xp.concatenate([before, after], axis=1))
    if after.shape[0] != batch or (known.size and (known.min() < 0 or known.max() > past_key.shape[2])):
        raise wrong(
            f"key_total_sequence_lengths must be {batch} lengths with the {length} new rows, at most {past_key.shape[2]}, got "
            f"{known[:, 1].tolist()}"
        )
    position = before + xp.arange(length)
    if do_rotary:
        q, k = turned(xp, (q, k), cos_cache, sin_cache, position, rotary_interleaved)
    cache = CacheRows(before, length, after, past_key.shape[2])
    row = xp.arange(past_key.shape[2])
    fresh = ((row >= before) & (row < before + length))[:, None, :, None]
    present_key, present_value = (xp.where(fresh, cache.written(xp, p, x), p) for p, x in ((past_key, k), (past_value, v)))
    blocks = _block_mask(xp, block_row_indices, block_col_indices)
    key_row = xp.arange(total_sequence_length)
    seen = blocks[:, xp.minimum(position // sparse_block_size, blocks.shape[1] - 1)][..., key_row // sparse_block_size]
    seen = seen.transpose(1, 0, 2, 3)[:, xp.arange(num_heads) % blocks.shape[0]]
    seen = seen & (key_row <= position[:, :, None])[:, None]
    keys, values = (x[:, :, :total_sequence_length] for x in (present_key, present_value))
    y, _, _ = attend(xp, q, keys, values, xp.where(seen, 0, -xp.inf).astype(q.dtype), scale)
    return tuple(x.astype(dtype) for x in (join_heads(y), present_key, present_value))


sparse_attention.shapes(of_groups)


@sparse_attention.decomposition
def sparse_attention_body(
    op: Op,
    query: V,
    key: V,
    value: V,
    past_key: V,
    past_value: V,
    block_row_indices: V,
    block_col_indices: V,
    total_sequence_length: V,
    key_total_sequence_lengths: V,
    cos_cache: V,
    sin_cache: V,
    do_rotary: int,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int,
    scale: float | None,
    sparse_block_size: int,
) -> list[V]:
    q, k, v = op_parts(op, query, key, value, num_heads, kv_num_heads)
    length = op_size(op, q, 2)
    total = op.Cast(op.Reshape(total_sequence_length, [1]), to=7)
    after = op.Cast(op.Reshape(key_total_sequence_lengths, [-1, 1]), to=7)
    before = op.Where(op.Equal(length, total), 0, op.Sub(after, length))
    position = op.Add(before, op_range(op, length))
    if do_rotary:
        q, k = (op_rotate(op, x, cos_cache, sin_cache, position, rotary_interleaved) for x in (q, k))
    cache = CacheRows(before, length, after, op_size(op, past_key, 2))
    index = op.Sub(op_range(op, cache.rows), before)
    fresh = op.Unsqueeze(op.And(op.GreaterOrEqual(index, 0), op.Less(index, length)), [1, 3])
    present_key, present_value = (op.Where(fresh, cache.op_written(op, p, x), p) for p, x in ((past_key, k), (past_value, v)))
    seen = _op_seen(op, block_row_indices, block_col_indices, position, total, num_heads, sparse_block_size)
    bias = op.Where(seen, op.constant(0, op.dtype(q)), op.constant(-np.inf, op.dtype(q)))
    keys, values = (op.Slice(x, [0], total, [2]) for x in (present_key, present_value))
    y, _ = op_attend(op, q, keys, values, bias, scale)
    return [op_join_heads(op, y), present_key, present_value]


def _op_seen(op: Op, rows: V, columns: V, position: V, total: V, heads: int, size: int) -> V:
    """Return whether each query sees each key, (batch, heads, queries, keys)."""
    entry = op.Cast(op_range(op, op_size(op, columns, 1)), to=6)
    starts, ends = (op.Unsqueeze(op.Slice(rows, [a], [b], [1]), [2]) for a, b in ((0, -1), (1, 2**62)))
    in_row = op.And(op.GreaterOrEqual(entry, starts), op.Less(entry, ends))
    count = op.Sub(op_size(op, rows, 1), 1)
    block = op.Cast(op_range(op, count), to=6)
    is_block = op.Equal(op.Unsqueeze(columns, [2]), block)
    blocks = op.Greater(op.MatMul(op.Cast(in_row, to=1), op.Cast(is_block, to=1)), 0.0)
    key = op_range(op, total)
    of_query = op.Gather(blocks, op.Min(op.Div(position, size), op.Sub(count, 1)), axis=1)
    seen = op.Transpose(op.Gather(of_query, op.Div(key, size), axis=3), perm=[1, 0, 2, 3])
    layout = op.Mod(op.Range(0, heads, 1), op_size(op, blocks, 0))
    causal = op.Unsqueeze(op.LessOrEqual(key, op.Unsqueeze(position, [2])), [1])
    return op.And(op.Gather(seen, layout, axis=1), causal)


not_declared(
    "Its kernels are of GPUs, with caches in pages or an index of selected blocks; export the model with GroupQueryAttention.",
    "DynamicSparseAttention",
    "PackedSparseAttentionIndexer",
    "PackedSparseAttentionIndexerMerge",
    "PagedAttention",
    "SparseAttentionIndexer",
    "SparsePagedAttention",
)
