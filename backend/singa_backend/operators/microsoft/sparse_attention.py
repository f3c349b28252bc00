"""Causal attention that sees blocks of keys, with a cache of keys and values."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ._api import Array, Host, Op, V, Xp, microsoft, not_declared
from ._attention import check_match, op_attend, op_join_heads, op_range, op_size, wrong
from ._attention_facts import of_groups
from ._cache import CacheRows
from .group_query_attention import one_length, parts_of, shapes_of
from .rotary import op_rotate


@microsoft("SparseAttention", 1, traits=("product",), weights={0: "the query", 1: "the key", 2: "the value"})
def sparse_attention(
    op: Op,
    query: V,
    key: V | None = None,
    value: V | None = None,
    past_key: V | None = None,
    past_value: V | None = None,
    block_row_indices: V | None = None,
    block_col_indices: V | None = None,
    total_sequence_length: Host[V] | None = None,
    key_total_sequence_lengths: V | None = None,
    cos_cache: V | None = None,
    sin_cache: V | None = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sparse_block_size: int,
) -> list[V]:
    """Return the result, and the caches with the new rows; the other rows are those of the past.

    The blocks that heads see are the layouts, in turn.  Results of padded queries of a first prompt are not specified.
    """
    q, k, v = parts_of(op, query, key, value, num_heads, kv_num_heads)
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
    present_key, present_value = (op.Where(fresh, cache.written(op, p, x), p) for p, x in ((past_key, k), (past_value, v)))
    seen = _seen(op, block_row_indices, block_col_indices, position, total, num_heads, sparse_block_size)
    bias = op.Where(seen, op.constant(0, op.dtype(q)), op.constant(-np.inf, op.dtype(q)))
    keys, values = (op.Slice(x, [0], total, [2]) for x in (present_key, present_value))
    y, _ = op_attend(op, q, keys, values, bias, scale)
    return [op_join_heads(op, y), present_key, present_value]


@sparse_attention.accepts
def sparse_attention_accepts(
    xp: Xp,
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    block_row_indices: Array,
    block_col_indices: Array,
    total_sequence_length: Array | None,
    key_total_sequence_lengths: Array | None,
    cos_cache: Array | None,
    sin_cache: Array | None,
    do_rotary: int,
    kv_num_heads: int,
    num_heads: int,
) -> None:
    """The lengths of the sequences are checked too."""
    if past_key is None or past_value is None or key_total_sequence_lengths is None:
        raise OperatorError("past_key, past_value and key_total_sequence_lengths are required", code="SX407")
    q, k, v = shapes_of(query, key, value, num_heads, kv_num_heads)
    batch, _, length, _ = q
    total = one_length(total_sequence_length)
    after = xp.to_host(key_total_sequence_lengths).reshape(-1).astype(np.int64)
    before = np.zeros_like(after) if length == total else after - length
    known = np.concatenate([before, after])
    if len(after) != batch or (known.size and (known.min() < 0 or known.max() > past_key.shape[2])):
        raise wrong(
            f"key_total_sequence_lengths must be {batch} lengths with the {length} new rows, at most {past_key.shape[2]}, got "
            f"{after.tolist()}"
        )
    if do_rotary and (cos_cache is None or sin_cache is None):
        raise OperatorError("do_rotary needs cos_cache and sin_cache", code="SX407")
    rows, columns = block_row_indices, block_col_indices
    if rows.ndim != 2 or columns.ndim != 2 or rows.shape[0] != columns.shape[0]:
        raise wrong(
            f"block_row_indices and block_col_indices must have shapes (layouts, blocks + 1) and (layouts, entries), got "
            f"{tuple(rows.shape)} and {tuple(columns.shape)}"
        )
    check_match(q, (*k[:2], total, k[3]), (*v[:2], total, v[3]))


sparse_attention.shapes(of_groups)


def _seen(op: Op, rows: V, columns: V, position: V, total: V, heads: int, size: int) -> V:
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
