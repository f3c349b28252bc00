"""Attention with a cache of keys and values, whose heads are shared by groups of query heads.

A cache of `past` rows may have more rows than are in use: the length of each sequence says which row is written next, so that the
caller can pass a cache of the greatest length, and pass what it gets back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from ..normalization import rms_normalization
from ..rotary import rotary_embedding as rotate
from ._api import Array, Host, Op, V, Xp, microsoft
from ._attention import (
    attend,
    check_bias,
    join_heads,
    op_attend,
    op_join_heads,
    op_newer,
    op_range,
    op_size,
    op_split_heads,
    split_heads,
    wides,
    wrong,
)
from ._attention_facts import attended, of_groups
from ._cache import CacheRows
from .rotary import op_rotate


def parts_of(query: Array, key: Array | None, value: Array | None, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """Return queries, keys and values as (batch, heads, length, size); without keys and values they are in `query`."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise wrong(f"num_heads must be a multiple of kv_num_heads, got {heads} and {kv_heads}")
    if (key is None) != (value is None):
        raise OperatorError("key and value must be present together", code="SX407")
    if key is None or value is None:
        all_heads = split_heads(query, heads + 2 * kv_heads, "query, which has keys and values too,")
        return all_heads[:, :heads], all_heads[:, heads : heads + kv_heads], all_heads[:, heads + kv_heads :]
    return split_heads(query, heads, "query"), split_heads(key, kv_heads, "key"), split_heads(value, kv_heads, "value")


def op_parts(op: Op, query: V, key: V, value: V, heads: int, kv_heads: int) -> tuple[V, V, V]:
    if key is None:
        parts = op_split_heads(op, query, heads + 2 * kv_heads)
        q, k, v = op.Split(parts, [heads, kv_heads, kv_heads], axis=1, outputs=3)
        return q, k, v
    return op_split_heads(op, query, heads), op_split_heads(op, key, kv_heads), op_split_heads(op, value, kv_heads)


def _rms(xp: Xp, x: Array, weight: Array, epsilon: float) -> Array:
    return x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def _scale(kind: str, scale: Array | None) -> Array | None:
    """Return the scale of a quantized cache; None for a cache of floats."""
    if kind != "NONE" and scale is None:
        raise OperatorError("a quantized cache needs k_scale and v_scale", code="SX407")
    return None if kind == "NONE" else scale


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
    xp: Xp,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    seqlens_k: Array | None = None,
    total_sequence_length: Host[int] = 0,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    query_seqlens: Array | None = None,
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
) -> tuple[Array | None, ...]:
    """Return the result, the caches with the new keys and values, and the scores after the step that qk_output selects.

    Results of padded queries, beyond the length of their sequence, are not specified.
    """
    _refuse(past_key, past_value, sliding_window_cache, causal, local_window_size, query_seqlens)
    dtype = query.dtype
    query, key, value, past_key, past_value = wides(query, key, value, past_key, past_value)
    cos_cache, sin_cache, attention_bias, head_sink = wides(cos_cache, sin_cache, attention_bias, head_sink)
    q, k, v = parts_of(query, key, value, num_heads, kv_num_heads)
    capacity = 0 if past_key is None else past_key.shape[2]
    most = total_sequence_length if sliding_window_cache else capacity
    cache, first = _rows(xp, most, seqlens_k, query_seqlens, total_sequence_length, (q.shape[0], q.shape[2], k.shape[2]))
    if sliding_window_cache:
        past_key, past_value = (cache.unrolled(xp, x, local_window_size) for x in (past_key, past_value))
    if q_norm_weight is not None and k_norm_weight is not None:
        q = _rms(xp, q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)
        k = _rms(xp, k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)
    position = cache.past + xp.arange(q.shape[2])
    if do_rotary:
        ids = xp.where(position < cache.length, position, position if first else 1)
        if position_ids is not None:
            ids = position_ids.reshape(-1)[:1] + position if first else position_ids
        q, k = turned(xp, (q, k), cos_cache, sin_cache, ids, rotary_interleaved)
    present_key, keys = cache.kept(xp, past_key, k, _scale(k_quant_type, k_scale), kv_cache_bit_width)
    present_value, values = cache.kept(xp, past_value, v, _scale(v_quant_type, v_scale), kv_cache_bit_width)
    bias = _visible(xp, cache, position, total_sequence_length, causal, local_window_size, q.dtype)
    check_bias(attention_bias, (*q.shape[:3], total_sequence_length))
    bias = bias if attention_bias is None else bias + attention_bias
    sink = xp.zeros(num_heads, q.dtype) if smooth_softmax == 1 and head_sink is None else head_sink
    keys, values = (x[:, :, :total_sequence_length] for x in (keys, values))
    y, scores, weights = attend(xp, q, keys, values, bias, scale, softcap, sink)
    shown = (None, xp.where(bias == -xp.inf, 0, scores + bias), weights)[qk_output]
    if sliding_window_cache:
        present_key, present_value = (cache.rolled(xp, x, capacity, local_window_size) for x in (present_key, present_value))
    found = (join_heads(y), present_key, present_value, shown)
    return tuple(x if x is None or x.dtype.kind != "f" else x.astype(dtype) for x in found)


group_query_attention.shapes(of_groups)
group_query_attention.flops(attended(1, 3))


@group_query_attention.decomposition
def group_query_attention_body(
    op: Op,
    query: V,
    key: V,
    value: V,
    past_key: V,
    past_value: V,
    seqlens_k: V,
    total_sequence_length: V,
    cos_cache: V,
    sin_cache: V,
    position_ids: V,
    attention_bias: V,
    head_sink: V,
    k_scale: V,
    v_scale: V,
    q_norm_weight: V,
    k_norm_weight: V,
    query_seqlens: V,
    causal: int,
    do_rotary: int,
    k_norm_epsilon: float | None,
    k_quant_type: str,
    kv_cache_bit_width: int,
    kv_num_heads: int,
    local_window_size: int,
    num_heads: int,
    q_norm_epsilon: float | None,
    qk_norm_epsilon: float,
    qk_output: int,
    rotary_interleaved: int,
    scale: float | None,
    sliding_window_cache: int,
    smooth_softmax: int,
    softcap: float,
    v_quant_type: str,
) -> list[V]:
    k_scale = None if k_quant_type == "NONE" else k_scale
    v_scale = None if v_quant_type == "NONE" else v_scale
    _refuse(past_key, past_value, sliding_window_cache, causal, local_window_size, query_seqlens)
    q, k, v = op_parts(op, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None:
        q = op_newer(op, rms_normalization, 23, [q, q_norm_weight], {"epsilon": q_norm_epsilon or qk_norm_epsilon})[0]
        k = op_newer(op, rms_normalization, 23, [k, k_norm_weight], {"epsilon": k_norm_epsilon or qk_norm_epsilon})[0]
    total = op.Cast(op.Reshape(total_sequence_length, [1]), to=7)
    capacity = None if past_key is None else op_size(op, past_key, 2)
    rows = total if capacity is None or sliding_window_cache else op.Max(total, capacity)
    cache, first = _op_rows(op, rows, seqlens_k, query_seqlens, total, op_size(op, q, 2))
    if sliding_window_cache:
        past_key, past_value = (cache.op_unrolled(op, x, local_window_size) for x in (past_key, past_value))
    position = op.Add(cache.past, op_range(op, op_size(op, q, 2)))
    if do_rotary:
        ids = _op_positions(op, cache, position, position_ids, first)
        q, k = (op_rotate(op, x, cos_cache, sin_cache, ids, rotary_interleaved) for x in (q, k))
    present_key, keys = cache.op_kept(op, past_key, k, k_scale, kv_cache_bit_width)
    present_value, values = cache.op_kept(op, past_value, v, v_scale, kv_cache_bit_width)
    seen = _op_visible(op, cache, position, total, causal, local_window_size)
    never, zero = op.constant(-np.inf, op.dtype(q)), op.constant(0, op.dtype(q))
    bias = op.Where(seen, zero if attention_bias is None else attention_bias, never)
    keys, values = (op.Slice(x, [0], total, [2]) for x in (keys, values))
    if head_sink is not None or smooth_softmax == 1:
        keys, values, bias = _op_with_sink(op, q, keys, values, bias, head_sink)
    y, shown = op_attend(op, q, keys, values, bias, scale, softcap, mode=qk_output + 1)
    shown = op.Where(seen, op.Slice(shown, [0], total, [3]), zero) if qk_output else None
    if sliding_window_cache:
        present_key, present_value = (cache.op_rolled(op, x, capacity, local_window_size) for x in (present_key, present_value))
    return [op_join_heads(op, y), present_key, present_value, shown]


def _op_positions(op: Op, cache: CacheRows, position: V, given: V, first: V) -> V:
    """Return the positions for the rotation: of a first prompt, position_ids has only that of the first query."""
    if given is None:
        known = op.Less(position, cache.length)
        return op.Where(known if first is None else op.Or(known, first), position, 1)
    return (
        given if first is None else op.Where(first, op.Add(op.Reshape(op.Slice(given, [0, 0], [1, 1]), [1, 1]), position), given)
    )


def _op_with_sink(op: Op, q: V, keys: V, values: V, bias: V, sink: V) -> tuple[V, V, V]:
    """Append a key and a value of 0, whose score is the sink."""
    keys, values = (op.Pad(x, [0, 0, 0, 0, 0, 0, 1, 0]) for x in (keys, values))
    if sink is None:
        return keys, values, op.Pad(bias, [0, 0, 0, 0, 0, 0, 0, 1])
    lead = op.Shape(q, end=3)
    bias = op.Expand(bias, op.Concat(lead, [1], axis=0))
    column = op.Expand(op.Reshape(sink, [1, -1, 1, 1]), op.Concat(lead, [1], axis=0))
    return keys, values, op.Concat(bias, column, axis=3)


def _rows(
    xp: Xp, most: int, seqlens_k: Array | None, query_seqlens: Array | None, total: int, sizes: tuple[int, int, int]
) -> tuple[CacheRows, bool]:
    """Return where each sequence is in the cache, and whether this is the first prompt, which ignores the past."""
    batch, length, new_length = sizes
    if new_length != length or seqlens_k is None or seqlens_k.size != batch:
        raise wrong(
            f"keys must have the length {length} of the queries and seqlens_k the size {batch}, got {new_length} and shape "
            f"{None if seqlens_k is None else tuple(seqlens_k.shape)}"
        )
    if total < length:
        raise wrong(f"total_sequence_length must be at least {length}, the length of the queries, got {total}")
    first = length == total and query_seqlens is None
    after = seqlens_k.reshape(batch, 1).astype(np.int64) + 1
    new = xp.full((batch, 1), length) if query_seqlens is None else query_seqlens.reshape(batch, 1).astype(np.int64)
    before = xp.zeros_like(after) if first else after - new
    rows = max(total, most)
    known = xp.to_host(xp.concatenate([before, after], axis=1))
    if known.size and (known.min() < 0 or known.max() > rows or known[:, 0].max() > most):
        raise wrong(
            f"seqlens_k must name lengths (less 1) from the {length} new rows to {rows}, and the rows before in the past, got "
            f"{(known[:, 1] - 1).tolist()}"
        )
    return CacheRows(before, new, after, rows), first


def _op_rows(op: Op, rows: V, seqlens_k: V, query_seqlens: V, total: V, length: V) -> tuple[CacheRows, V]:
    after = op.Add(op.Cast(op.Reshape(seqlens_k, [-1, 1]), to=7), 1)
    if query_seqlens is not None:
        new = op.Cast(op.Reshape(query_seqlens, [-1, 1]), to=7)
        return CacheRows(op.Sub(after, new), new, after, rows), None
    first = op.Equal(total, length)
    return CacheRows(op.Where(first, 0, op.Sub(after, length)), length, after, rows), first


def turned(xp: Xp, parts: Any, cos: Array | None, sin: Array | None, ids: Array, interleaved: int) -> Any:
    if cos is None or sin is None:
        raise OperatorError("do_rotary needs cos_cache and sin_cache", code="SX407")
    turn = {"interleaved": interleaved, "rotary_embedding_dim": 2 * cos.shape[1]}
    return (rotate(xp, x, cos, sin, ids, **turn) for x in parts)


def _visible(xp: Xp, cache: CacheRows, position: Array, keys: int, causal: int, window: int, dtype: Any) -> Array:
    """Return 0 where a query sees a key, and -inf elsewhere, of shape (batch, 1, queries, keys)."""
    key = xp.arange(keys)
    seen = key < cache.length[:, :, None]
    row = position[:, :, None]
    if causal:
        seen = (key <= row) & (key < cache.past[:, :, None] + cache.new[:, :, None])
    if window > 0:
        seen = seen & (key > row - window)
    return xp.where(seen, 0, -xp.inf).astype(dtype)[:, None]


def _op_visible(op: Op, cache: CacheRows, position: V, keys: V, causal: int, window: int) -> V:
    key, row = op_range(op, keys), op.Unsqueeze(position, [2])
    seen = op.Less(key, op.Unsqueeze(cache.length, [2]))
    if causal:
        written = op.Unsqueeze(op.Add(cache.past, cache.new), [2])
        seen = op.And(op.LessOrEqual(key, row), op.Less(key, written))
    if window > 0:
        seen = op.And(seen, op.Greater(key, op.Sub(row, window)))
    return op.Unsqueeze(seen, [1])
