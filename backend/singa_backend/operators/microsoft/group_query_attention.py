"""Attention with a cache of keys and values, whose heads are shared by groups of query heads.

A cache of `past` rows may have more rows than are in use: the length of each sequence says which row is written next, so that the
caller can pass a cache of the greatest length, and pass what it gets back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from ..normalization import rms_normalization
from ._api import Array, Host, Ints, Op, V, Xp, microsoft
from ._attention import (
    check_bias,
    check_match,
    heads_of,
    op_attend,
    op_join_heads,
    op_like,
    op_newer,
    op_range,
    op_size,
    op_split_heads,
    op_wide,
    wrong,
)
from ._attention_facts import attended, of_groups
from ._cache import CacheRows
from .rotary import op_rotate


def shapes_of(query: Array, key: Array | None, value: Array | None, heads: int, kv_heads: int) -> tuple[Ints, Ints, Ints]:
    """Return the shapes of queries, keys and values as (batch, heads, length, size); raise OperatorError if they are wrong."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise wrong(f"num_heads must be a multiple of kv_num_heads, got {heads} and {kv_heads}")
    if (key is None) != (value is None):
        raise OperatorError("key and value must be present together", code="SX407")
    if key is None or value is None:
        batch, _, length, size = heads_of(query, heads + 2 * kv_heads, "query, which has keys and values too,")
        return (batch, heads, length, size), (batch, kv_heads, length, size), (batch, kv_heads, length, size)
    return heads_of(query, heads, "query"), heads_of(key, kv_heads, "key"), heads_of(value, kv_heads, "value")


def parts_of(op: Op, query: V, key: V, value: V, heads: int, kv_heads: int) -> tuple[V, V, V]:
    """Return queries, keys and values as (batch, heads, length, size); without keys and values they are in `query`."""
    if key is None:
        parts = op_split_heads(op, query, heads + 2 * kv_heads)
        q, k, v = op.Split(parts, [heads, kv_heads, kv_heads], axis=1, outputs=3)
        return q, k, v
    return op_split_heads(op, query, heads), op_split_heads(op, key, kv_heads), op_split_heads(op, value, kv_heads)


def _normalized(op: Op, x: V, weight: V, epsilon: float) -> V:
    """Return the RMS norm of each head."""
    return op_newer(op, rms_normalization, 23, [x, weight], {"epsilon": epsilon})[0]


def _refuse(past_key: Any, past_value: Any, sliding: int, causal: int, window: int, query_seqlens: Any) -> None:
    """Raise an error for what has no definition here, or for attributes that exclude each other."""
    if (past_key is None) != (past_value is None):
        raise OperatorError("past_key and past_value must be present together", code="SX407")
    if sliding and (past_key is None or window < 1):
        raise OperatorError("sliding_window_cache needs past_key, past_value and local_window_size", code="SX407")
    if not causal and window != -1:
        raise wrong(f"local_window_size must be -1 if causal is 0, got {window}")
    if query_seqlens is not None and (past_key is None or not causal):
        raise OperatorError("query_seqlens needs past_key, past_value and causal = 1", code="SX407")


@microsoft(
    "GroupQueryAttention",
    1,
    widen=False,
    traits=("product",),
    weights={0: "the query", 1: "the key", 2: "the value"},
    caches={3: 1, 4: 2},
)
def group_query_attention(
    op: Op,
    query: V,
    key: V | None = None,
    value: V | None = None,
    past_key: V | None = None,
    past_value: V | None = None,
    seqlens_k: V | None = None,
    total_sequence_length: Host[V] | None = None,
    cos_cache: V | None = None,
    sin_cache: V | None = None,
    position_ids: V | None = None,
    attention_bias: V | None = None,
    head_sink: V | None = None,
    k_scale: V | None = None,
    v_scale: V | None = None,
    q_norm_weight: V | None = None,
    k_norm_weight: V | None = None,
    query_seqlens: V | None = None,
    *,
    causal: int = 1,
    do_rotary: int = 0,
    k_norm_epsilon: float | None = None,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    q_norm_epsilon: float | None = None,
    qk_norm_epsilon: float = 9.999999974752427e-07,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sliding_window_cache: int = 0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> list[V]:
    """Return the result, the caches with the new keys and values, and the scores after the step that qk_output selects.

    Results of padded queries, beyond the length of their sequence, are not specified.
    """
    k_scale = None if k_quant_type == "NONE" else k_scale
    v_scale = None if v_quant_type == "NONE" else v_scale
    _refuse(past_key, past_value, sliding_window_cache, causal, local_window_size, query_seqlens)
    target = query
    query, key, value, past_key, past_value = op_wide(op, query, key, value, past_key, past_value)
    cos_cache, sin_cache, attention_bias, head_sink = op_wide(op, cos_cache, sin_cache, attention_bias, head_sink)
    q, k, v = parts_of(op, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None:
        q = _normalized(op, q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)
        k = _normalized(op, k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)
    total = op.Cast(op.Reshape(total_sequence_length, [1]), to=7)
    capacity = None if past_key is None else op_size(op, past_key, 2)
    rows = total if capacity is None or sliding_window_cache else op.Max(total, capacity)
    cache, first = _rows(op, rows, seqlens_k, query_seqlens, total, op_size(op, q, 2))
    if sliding_window_cache:
        past_key, past_value = (cache.unrolled(op, x, local_window_size) for x in (past_key, past_value))
    position = op.Add(cache.past, op_range(op, op_size(op, q, 2)))
    if do_rotary:
        ids = _positions(op, cache, position, position_ids, first)
        q, k = (op_rotate(op, x, cos_cache, sin_cache, ids, rotary_interleaved) for x in (q, k))
    present_key, keys = cache.kept(op, past_key, k, k_scale, kv_cache_bit_width, target)
    present_value, values = cache.kept(op, past_value, v, v_scale, kv_cache_bit_width, target)
    seen = _visible(op, cache, position, total, causal, local_window_size)
    never, zero = op.constant(-np.inf, op.dtype(q)), op.constant(0, op.dtype(q))
    bias = op.Where(seen, zero if attention_bias is None else attention_bias, never)
    keys, values = (op.Slice(x, [0], total, [2]) for x in (keys, values))
    if head_sink is not None or smooth_softmax == 1:
        keys, values, bias = _with_sink(op, q, keys, values, bias, head_sink)
    y, shown = op_attend(op, q, keys, values, bias, scale, softcap, mode=qk_output + 1)
    shown = op.Where(seen, op.Slice(shown, [0], total, [3]), zero) if qk_output else None
    if sliding_window_cache:
        present_key, present_value = (cache.rolled(op, x, capacity, local_window_size) for x in (present_key, present_value))
    return [op.cast(op_join_heads(op, y), target), present_key, present_value, *op_like(op, target, shown)]


@group_query_attention.accepts
def group_query_attention_accepts(
    xp: Xp,
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array | None,
    total_sequence_length: Array | None,
    cos_cache: Array | None,
    sin_cache: Array | None,
    attention_bias: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    query_seqlens: Array | None,
    causal: int,
    do_rotary: int,
    k_quant_type: str,
    kv_num_heads: int,
    local_window_size: int,
    num_heads: int,
    sliding_window_cache: int,
    v_quant_type: str,
) -> None:
    """The lengths of the sequences are checked too."""
    _refuse(past_key, past_value, sliding_window_cache, causal, local_window_size, query_seqlens)
    q, k, v = shapes_of(query, key, value, num_heads, kv_num_heads)
    total = one_length(total_sequence_length)
    capacity = 0 if past_key is None else past_key.shape[2]
    most = total if sliding_window_cache else capacity
    batch, _, length, _ = q
    if k[2] != length or seqlens_k is None or seqlens_k.size != batch:
        raise wrong(
            f"keys must have the length {length} of the queries and seqlens_k the size {batch}, got {k[2]} and shape "
            f"{None if seqlens_k is None else tuple(seqlens_k.shape)}"
        )
    if total < length:
        raise wrong(f"total_sequence_length must be at least {length}, the length of the queries, got {total}")
    after = xp.to_host(seqlens_k).reshape(batch).astype(np.int64) + 1
    new = np.full(batch, length) if query_seqlens is None else xp.to_host(query_seqlens).reshape(batch).astype(np.int64)
    before = np.zeros_like(after) if length == total and query_seqlens is None else after - new
    rows = max(total, most)
    known = np.concatenate([before, after])
    if known.size and (known.min() < 0 or known.max() > rows or before.max() > most):
        raise wrong(
            f"seqlens_k must name lengths (less 1) from the {length} new rows to {rows}, and the rows before in the past, got "
            f"{(after - 1).tolist()}"
        )
    for past in (past_key, past_value) if sliding_window_cache else ():
        if past is not None and past.shape[2] < local_window_size:
            rows = past.shape[2]
            raise wrong(f"a sliding cache must have room for the {local_window_size} tokens of its window, got {rows} rows")
    if do_rotary and (cos_cache is None or sin_cache is None):
        raise OperatorError("do_rotary needs cos_cache and sin_cache", code="SX407")
    if (k_quant_type != "NONE" and k_scale is None) or (v_quant_type != "NONE" and v_scale is None):
        raise OperatorError("a quantized cache needs k_scale and v_scale", code="SX407")
    check_bias(attention_bias, (*q[:3], total))
    check_match(q, (*k[:2], total, k[3]), (*v[:2], total, v[3]))


def one_length(total_sequence_length: Array | None) -> int:
    """Return total_sequence_length; raise OperatorError if it holds several values."""
    if total_sequence_length is None:
        return 0
    if total_sequence_length.size != 1:
        shape = total_sequence_length.shape
        raise OperatorError(f"input 'total_sequence_length' must hold one value, got shape {shape}", code="SX402")
    return int(total_sequence_length.reshape(-1)[0])


group_query_attention.shapes(of_groups)
group_query_attention.flops(attended(1, 3))


def _positions(op: Op, cache: CacheRows, position: V, given: V, first: V) -> V:
    """Return the positions for the rotation: of a first prompt, position_ids has only that of the first query."""
    if given is None:
        known = op.Less(position, cache.length)
        return op.Where(known if first is None else op.Or(known, first), position, 1)
    return (
        given if first is None else op.Where(first, op.Add(op.Reshape(op.Slice(given, [0, 0], [1, 1]), [1, 1]), position), given)
    )


def _with_sink(op: Op, q: V, keys: V, values: V, bias: V, sink: V) -> tuple[V, V, V]:
    """Append a key and a value of 0, whose score is the sink."""
    keys, values = (op.Pad(x, [0, 0, 0, 0, 0, 0, 1, 0]) for x in (keys, values))
    if sink is None:
        return keys, values, op.Pad(bias, [0, 0, 0, 0, 0, 0, 0, 1])
    lead = op.Shape(q, end=3)
    bias = op.Expand(bias, op.Concat(lead, [1], axis=0))
    column = op.Expand(op.Reshape(sink, [1, -1, 1, 1]), op.Concat(lead, [1], axis=0))
    return keys, values, op.Concat(bias, column, axis=3)


def _rows(op: Op, rows: V, seqlens_k: V, query_seqlens: V, total: V, length: V) -> tuple[CacheRows, V]:
    """Return where each sequence is in the cache, and whether this is the first prompt, which ignores the past."""
    after = op.Add(op.Cast(op.Reshape(seqlens_k, [-1, 1]), to=7), 1)
    if query_seqlens is not None:
        new = op.Cast(op.Reshape(query_seqlens, [-1, 1]), to=7)
        return CacheRows(op.Sub(after, new), new, after, rows), None
    first = op.Equal(total, length)
    return CacheRows(op.Where(first, 0, op.Sub(after, length)), length, after, rows), first


def _visible(op: Op, cache: CacheRows, position: V, keys: V, causal: int, window: int) -> V:
    """Return where a query sees a key, of shape (batch, 1, queries, keys)."""
    key, row = op_range(op, keys), op.Unsqueeze(position, [2])
    seen = op.Less(key, op.Unsqueeze(cache.length, [2]))
    if causal:
        written = op.Unsqueeze(op.Add(cache.past, cache.new), [2])
        seen = op.And(op.LessOrEqual(key, row), op.Less(key, written))
    if window > 0:
        seen = op.And(seen, op.Greater(key, op.Sub(row, window)))
    return op.Unsqueeze(seen, [1])
