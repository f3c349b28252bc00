"""Attention of queries to keys and values that are projected before, with a bias, padding masks and caches."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ._api import Array, Host, Ints, Op, V, microsoft
from ._attention import (
    check_bias,
    check_mask,
    check_match,
    heads_of,
    length_with,
    op_appended,
    op_attend,
    op_join_heads,
    op_like,
    op_mask_bias,
    op_past_length,
    op_range,
    op_size,
    op_split_heads,
    op_wide,
    wrong,
)
from ._attention_facts import attended, of_heads


def _shapes_of(query: Array, key: Array | None, value: Array | None, bias: Array | None, heads: int) -> tuple[Ints, Ints, Ints]:
    """Return the shapes of queries, keys and values as (batch, heads, length, size); raise OperatorError if they are wrong.

    Queries of 5 axes (batch, length, heads, 3, size) have the keys and values, and keys (batch, length, heads, 2, size) the
    values.  Keys and values that have 4 axes are those of another sequence, and have their bias.
    """
    if query.ndim == 5:
        q = k = v = _packed_shape(query, 3)
    else:
        q = heads_of(query, heads, "query")
        if key is not None and key.ndim == 5:
            k = v = _packed_shape(key, 2)
        elif key is None or value is None or key.ndim != value.ndim:
            raise OperatorError("key and value must be present with equal ranks, unless they are packed", code="SX407")
        elif key.ndim == 4:
            k, v = key.shape, value.shape
        else:
            k, v = heads_of(key, heads, "key"), heads_of(value, heads, "value")
    if q[1] != heads:
        raise wrong(f"packed inputs must have {heads} heads, got {q[1]}")
    if bias is not None and (bias.ndim != 1 or bias.shape[0] <= 2 * q[1] * q[3] or bias.shape[0] % heads):
        raise wrong(f"bias must be a vector of the sizes of queries, keys and values, got shape {tuple(bias.shape)}")
    return q, k, v


def _packed_shape(x: Array, count: int) -> Ints:
    """Return the shape (batch, heads, length, size) of each part of (batch, length, heads, count, size)."""
    if x.shape[3] != count:
        raise wrong(f"packed inputs must have shape (batch, length, heads, {count}, size), got {tuple(x.shape)}")
    return x.shape[0], x.shape[2], x.shape[1], x.shape[4]


def _packed(op: Op, x: V, count: int) -> list[V]:
    """Split (batch, length, heads, count, size) into (batch, heads, length, size) each."""
    parts = op.Split(op.Transpose(x, perm=[3, 0, 2, 1, 4]), axis=0, num_outputs=count, outputs=count)
    return [op.Squeeze(p, [0]) for p in parts]


def _heads(op: Op, query: V, key: V, value: V, bias: V, heads: int) -> list[V]:
    """Return queries, keys and values as (batch, heads, length, size), with the bias."""
    given = key is not None and op.rank(key) == 4
    if op.rank(query) == 5:
        parts = _packed(op, query, 3)
    elif key is not None and op.rank(key) == 5:
        parts = [op_split_heads(op, query, heads), *_packed(op, key, 2)]
    else:
        parts = [op_split_heads(op, query, heads)]
        parts += [key, value] if given else [op_split_heads(op, x, heads) for x in (key, value)]
    if bias is None:
        return parts
    width = op.Mul(op_size(op, parts[0], 3), heads)
    ends = [op.constant([0], np.int64), width, op.Mul(width, 2), op.constant([2**62], np.int64)]
    added = 1 if given else 3
    for i in range(added):
        part = op.Slice(bias, ends[i], ends[i + 1], [0])
        parts[i] = op.Add(parts[i], op.Reshape(part, [heads, 1, -1]))
    return parts


def _check_attended(
    shapes: tuple[Ints, Ints, Ints],
    mask: Array | None,
    attention_bias: Array | None,
    pasts: tuple[Array | None, Array | None],
    used: Array | None,
    indirection: Array | None,
) -> None:
    """Raise OperatorError unless queries, keys and values of these shapes fit the other inputs."""
    if (pasts[0] is None) != (pasts[1] is None):
        raise OperatorError("past_key and past_value must be present together", code="SX407")
    q, k, v = shapes
    keys, values = (length_with(p, x, used) for p, x in zip(pasts, (k, v), strict=True))
    if indirection is not None and pasts[0] is not None and q[2] == 1:
        rows = keys - k[2]
        if indirection.ndim != 3 or indirection.shape[0] * indirection.shape[1] != q[0] or indirection.shape[2] < rows:
            shape = tuple(indirection.shape)
            what = f"cache_indirection must have shape (groups, beams, rows) for {q[0]} sequences and {rows} rows"
            raise wrong(f"{what}, got {shape}")
    check_mask(mask, q[0], q[2], keys)
    check_bias(attention_bias, (*q[:3], keys))
    check_match(q, (*k[:2], keys, k[3]), (*v[:2], values, v[3]))


def _attended(
    op: Op,
    parts: list[V],
    mask: V,
    attention_bias: V,
    pasts: tuple[V, V],
    used: V,
    causal: bool,
    filter_value: float,
    scale: float | None,
    indirection: V = None,
) -> list[V]:
    """Return the result with the heads joined, the caches, and the scores with what the masks add.

    indirection: of which beam each row of the past is; None for more than one query.
    """
    q, new_k, new_v = parts
    used = None if used is None or pasts[0] is None else op.Cast(op.Reshape(used, [1]), to=7)
    (k, present_k), (v, present_v) = (op_appended(op, p, x, used) for p, x in zip(pasts, (new_k, new_v), strict=True))
    if indirection is not None and pasts[0] is not None:
        rows = [p if used is None else op.Slice(p, [0], used, [2]) for p in pasts]
        chosen = [_of_beams(op, p, indirection) for p in rows]
        k, v = (op_appended(op, p, x, None)[0] for p, x in zip(chosen, (new_k, new_v), strict=True))
    bias = op_mask_bias(op, mask, q, k, op_past_length(op, pasts[0], used), causal, filter_value)
    y, scores = op_attend(op, q, k, v, op.add(bias, attention_bias), scale, mode=2)
    return [op_join_heads(op, y), present_k, present_v, scores]


@microsoft(
    "MultiHeadAttention",
    1,
    widen=False,
    traits=("product",),
    weights={0: "the query", 1: "the key", 2: "the value"},
    caches={6: 1, 7: 2},
)
def multi_head_attention(
    op: Op,
    query: V,
    key: V | None = None,
    value: V | None = None,
    bias: V | None = None,
    key_padding_mask: V | None = None,
    attention_bias: V | None = None,
    past_key: V | None = None,
    past_value: V | None = None,
    past_sequence_length: Host[V] | None = None,
    cache_indirection: V | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> list[V]:
    """Return the result, the keys and values with their past, and the scores before the softmax.

    With unidirectional, query i sees the keys up to i after the past, and the last query sees all keys: this is what onnxruntime
    does, also for keys of another length.  cache_indirection says of which beam each row of the past is; as onnxruntime, the
    operator reads it for one query and with past_sequence_length only.
    """
    target = query
    query, key, value, bias, attention_bias, past_key, past_value = op_wide(
        op, query, key, value, bias, attention_bias, past_key, past_value
    )
    parts = _heads(op, query, key, value, bias, num_heads)
    pasts, causal, beams = (past_key, past_value), bool(unidirectional), None
    if cache_indirection is not None and past_sequence_length is not None:
        beams = _beams_if(op, op.Equal(op_size(op, query, 1), 1), cache_indirection)
    found = _attended(
        op, parts, key_padding_mask, attention_bias, pasts, past_sequence_length, causal, mask_filter_value, scale, beams
    )
    return op_like(op, target, *found)


@multi_head_attention.accepts
def multi_head_attention_accepts(
    query: Array,
    key: Array | None,
    value: Array | None,
    bias: Array | None,
    key_padding_mask: Array | None,
    attention_bias: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    past_sequence_length: Array | None,
    cache_indirection: Array | None,
    num_heads: int,
) -> None:
    shapes, pasts = _shapes_of(query, key, value, bias, num_heads), (past_key, past_value)
    beams = None if past_sequence_length is None else cache_indirection
    _check_attended(shapes, key_padding_mask, attention_bias, pasts, past_sequence_length, beams)


multi_head_attention.shapes(of_heads)
multi_head_attention.flops(attended(1, 6))


@microsoft(
    "DecoderMaskedMultiHeadAttention",
    1,
    widen=False,
    traits=("product",),
    weights={0: "the query", 1: "the key", 2: "the value"},
    caches={5: 1, 6: 2},
)
def decoder_masked_multi_head_attention(
    op: Op,
    query: V,
    key: V | None = None,
    value: V | None = None,
    mask_index: V | None = None,
    attention_bias: V | None = None,
    past_key: V | None = None,
    past_value: V | None = None,
    past_sequence_length: Host[V] | None = None,
    beam_width: Host[V] | None = None,
    cache_indirection: V | None = None,
    bias: V | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
) -> list[V]:
    """Return the result of one query for each sequence, the caches, and the scores before the softmax.

    With past_present_share_buffer the past has rows that are not in use, and the new row is written after
    past_sequence_length rows.  cache_indirection says of which beam the past of each row is.
    """
    target = query
    query, key, value, bias, attention_bias, past_key, past_value = op_wide(
        op, query, key, value, bias, attention_bias, past_key, past_value
    )
    if key is None:
        query, key, value = op.Split(query, axis=2, num_outputs=3, outputs=3)
    parts = _heads(op, query, key, value, bias, num_heads)
    used = past_sequence_length if past_present_share_buffer else None
    pasts, beams = (past_key, past_value), None
    if cache_indirection is not None and beam_width is not None:
        beams = _beams_if(op, op.Greater(op.Reshape(beam_width, [1]), 1), cache_indirection)
    found = _attended(op, parts, mask_index, attention_bias, pasts, used, False, mask_filter_value, scale, beams)
    return op_like(op, target, *found)


@decoder_masked_multi_head_attention.accepts
def decoder_masked_multi_head_attention_accepts(
    query: Array,
    key: Array | None,
    value: Array | None,
    mask_index: Array | None,
    attention_bias: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    past_sequence_length: Array | None,
    beam_width: Array | None,
    cache_indirection: Array | None,
    bias: Array | None,
    num_heads: int,
    past_present_share_buffer: int,
) -> None:
    if query.ndim != 3 or query.shape[1] != 1:
        raise wrong(f"query must have shape (batch, 1, hidden), got {tuple(query.shape)}")
    if beam_width is not None and beam_width.size != 1:
        raise OperatorError(f"input 'beam_width' must hold one value, got shape {beam_width.shape}", code="SX402")
    if key is None and value is None:
        query = key = value = np.broadcast_to(np.empty(()), (*query.shape[:2], query.shape[2] // 3))
    shapes = _shapes_of(query, key, value, bias, num_heads)
    used = past_sequence_length if past_present_share_buffer else None
    beams = None if beam_width is None or beam_width.reshape(-1)[0] < 2 else cache_indirection
    _check_attended(shapes, mask_index, attention_bias, (past_key, past_value), used, beams)


decoder_masked_multi_head_attention.shapes(of_heads)
decoder_masked_multi_head_attention.flops(attended(1, 5))


def _of_beams(op: Op, past: V, indirection: V) -> V:
    """Return for each sequence of a beam the past of those that it continues, row by row."""
    length = op_size(op, past, 2)
    chosen = op.Cast(op.Slice(indirection, [0], length, [2]), to=7)
    group = op.Unsqueeze(op.Range(0, op.Squeeze(op_size(op, indirection, 0), [0]), 1), [1, 2])
    source = op.Add(chosen, op.Mul(group, op_size(op, indirection, 1)))
    source = op.Reshape(source, op.Concat(op_size(op, past, 0), length, axis=0), allowzero=1)
    row = op.Expand(op.Range(0, op.Squeeze(length, [0]), 1), op.Shape(source))
    index = op.Concat(op.Unsqueeze(source, [2]), op.Unsqueeze(row, [2]), axis=2)
    return op.Transpose(op.GatherND(op.Transpose(past, perm=[0, 2, 1, 3]), index), perm=[0, 2, 1, 3])


def _beams_if(op: Op, condition: V, indirection: V) -> V:
    """Return the indirection if the condition is true; otherwise that of sequences that continue themselves."""
    own = op.Unsqueeze(op.Cast(op_range(op, op_size(op, indirection, 1)), to=6), [0, 2])
    return op.Where(condition, indirection, own)
