"""Attention of queries to keys and values that are projected before, with a bias, padding masks and caches."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ._api import Array, Host, Op, V, Xp, microsoft
from ._attention import (
    appended,
    attend,
    check_bias,
    join_heads,
    mask_bias,
    narrowed,
    op_appended,
    op_attend,
    op_join_heads,
    op_mask_bias,
    op_past_length,
    op_range,
    op_size,
    op_split_heads,
    split_heads,
    wides,
    wrong,
)
from ._attention_facts import attended, of_heads


def _heads(
    xp: Xp, query: Array, key: Array | None, value: Array | None, bias: Array | None, heads: int
) -> tuple[Array, Array, Array]:
    """Return queries, keys and values as (batch, heads, length, size), with the bias.

    Queries of 5 axes (batch, length, heads, 3, size) have the keys and values, and keys (batch, length, heads, 2, size) the
    values.  Keys and values that have 4 axes are those of another sequence, and have their bias.
    """
    given = key is not None and key.ndim == 4
    if query.ndim == 5:
        parts = [query[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3)]
    else:
        parts = [split_heads(query, heads, "query")]
        if key is not None and key.ndim == 5:
            parts += [key[:, :, :, i].transpose(0, 2, 1, 3) for i in range(2)]
        elif key is None or value is None or key.ndim != value.ndim:
            raise OperatorError("key and value must be present with equal ranks, unless they are packed", code="SX407")
        else:
            parts += [key, value] if given else [split_heads(key, heads, "key"), split_heads(value, heads, "value")]
    if parts[0].shape[1] != heads:
        raise wrong(f"packed inputs must have {heads} heads, got {parts[0].shape[1]}")
    if bias is None:
        return parts[0], parts[1], parts[2]
    width = parts[0].shape[1] * parts[0].shape[3]
    if bias.ndim != 1 or bias.shape[0] <= 2 * width or bias.shape[0] % heads:
        raise wrong(f"bias must be a vector of the sizes of queries, keys and values, got shape {tuple(bias.shape)}")
    of_part = [b.reshape(heads, 1, -1) for b in (bias[:width], bias[width : 2 * width], bias[2 * width :])]
    added = 1 if given else 3
    parts = [x + b if i < added else x for i, (x, b) in enumerate(zip(parts, of_part, strict=True))]
    return parts[0], parts[1], parts[2]


def _op_packed(op: Op, x: V, count: int) -> list[V]:
    """Split (batch, length, heads, count, size) into (batch, heads, length, size) each."""
    parts = op.Split(op.Transpose(x, perm=[3, 0, 2, 1, 4]), axis=0, num_outputs=count, outputs=count)
    return [op.Squeeze(p, [0]) for p in parts]


def _op_heads(op: Op, query: V, key: V, value: V, bias: V, heads: int) -> list[V]:
    """As `_heads`, in ONNX's operators."""
    given = key is not None and op.rank(key) == 4
    if op.rank(query) == 5:
        parts = _op_packed(op, query, 3)
    elif key is not None and op.rank(key) == 5:
        parts = [op_split_heads(op, query, heads), *_op_packed(op, key, 2)]
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


def _attended(
    xp: Xp,
    parts: tuple[Array, Array, Array],
    mask: Array | None,
    attention_bias: Array | None,
    pasts: tuple[Array | None, Array | None],
    used: int | None,
    causal: bool,
    filter_value: float,
    scale: float | None,
    indirection: Array | None = None,
) -> tuple[Array, ...]:
    """Return the result with the heads joined, the caches, and the scores with what the masks add.

    indirection: of which beam each row of the past is; it is read for one query.
    """
    if (pasts[0] is None) != (pasts[1] is None):
        raise OperatorError("past_key and past_value must be present together", code="SX407")
    q, new_k, new_v = parts
    used = None if pasts[0] is None else used
    (k, present_k), (v, present_v) = (appended(xp, p, x, used) for p, x in zip(pasts, (new_k, new_v), strict=True))
    if indirection is not None and q.shape[2] == 1:
        k, v = (
            x if p is None else appended(xp, _of_beams(xp, p[:, :, :used], indirection), x, None)[0]
            for p, x in zip(pasts, (new_k, new_v), strict=True)
        )
    (batch, heads, rows), keys = q.shape[:3], k.shape[2]
    bias = mask_bias(xp, mask, batch, rows, keys - new_k.shape[2], keys, causal, filter_value, q.dtype)
    check_bias(attention_bias, (batch, heads, rows, keys))
    if attention_bias is not None:
        bias = attention_bias if bias is None else bias + attention_bias
    y, scores, _ = attend(xp, q, k, v, bias, scale)
    return join_heads(y), present_k, present_v, scores if bias is None else scores + bias


def _op_attended(
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
    """As `_attended`, in ONNX's operators; `indirection` must be None for more than one query."""
    q, new_k, new_v = parts
    used = None if used is None or pasts[0] is None else op.Cast(op.Reshape(used, [1]), to=7)
    (k, present_k), (v, present_v) = (op_appended(op, p, x, used) for p, x in zip(pasts, (new_k, new_v), strict=True))
    if indirection is not None and pasts[0] is not None:
        rows = [p if used is None else op.Slice(p, [0], used, [2]) for p in pasts]
        chosen = [_op_of_beams(op, p, indirection) for p in rows]
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
    xp: Xp,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Host[int] | None = None,
    cache_indirection: Array | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Array, ...]:
    """Return the result, the keys and values with their past, and the scores before the softmax.

    With unidirectional, query i sees the keys up to i after the past, and the last query sees all keys: this is what onnxruntime
    does, also for keys of another length.  cache_indirection says of which beam each row of the past is; as onnxruntime, the
    operator reads it for one query and with past_sequence_length only.
    """
    dtype = query.dtype
    query, key, value, bias, attention_bias = wides(query, key, value, bias, attention_bias)
    past_key, past_value = wides(past_key, past_value)
    beams = None if past_sequence_length is None else cache_indirection
    parts = _heads(xp, query, key, value, bias, num_heads)
    pasts, causal = (past_key, past_value), bool(unidirectional)
    found = _attended(
        xp, parts, key_padding_mask, attention_bias, pasts, past_sequence_length, causal, mask_filter_value, scale, beams
    )
    return narrowed(dtype, *found)


multi_head_attention.shapes(of_heads)
multi_head_attention.flops(attended(1, 6))


@multi_head_attention.decomposition
def multi_head_attention_body(
    op: Op,
    query: V,
    key: V,
    value: V,
    bias: V,
    key_padding_mask: V,
    attention_bias: V,
    past_key: V,
    past_value: V,
    past_sequence_length: V,
    cache_indirection: V,
    mask_filter_value: float,
    num_heads: int,
    scale: float | None,
    unidirectional: int,
) -> list[V]:
    parts = _op_heads(op, query, key, value, bias, num_heads)
    pasts, causal, beams = (past_key, past_value), bool(unidirectional), None
    if cache_indirection is not None and past_sequence_length is not None:
        own = op.Unsqueeze(op.Cast(op_range(op, op_size(op, cache_indirection, 1)), to=6), [0, 2])
        beams = op.Where(op.Equal(op_size(op, query, 1), 1), cache_indirection, own)
    return _op_attended(
        op, parts, key_padding_mask, attention_bias, pasts, past_sequence_length, causal, mask_filter_value, scale, beams
    )


@microsoft(
    "DecoderMaskedMultiHeadAttention",
    1,
    widen=False,
    traits=("product",),
    weights={0: "the query", 1: "the key", 2: "the value"},
    caches={5: 1, 6: 2},
)
def decoder_masked_multi_head_attention(
    xp: Xp,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    mask_index: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Host[int] | None = None,
    beam_width: Host[int] | None = None,
    cache_indirection: Array | None = None,
    bias: Array | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
) -> tuple[Array, ...]:
    """Return the result of one query for each sequence, the caches, and the scores before the softmax.

    With past_present_share_buffer the past has rows that are not in use, and the new row is written after
    past_sequence_length rows.  cache_indirection says of which beam the past of each row is.
    """
    dtype = query.dtype
    query, key, value, bias, attention_bias = wides(query, key, value, bias, attention_bias)
    past_key, past_value = wides(past_key, past_value)
    if query.ndim != 3 or query.shape[1] != 1:
        raise wrong(f"query must have shape (batch, 1, hidden), got {tuple(query.shape)}")
    if key is None and value is None:
        query, key, value = (query[:, :, i * query.shape[2] // 3 : (i + 1) * query.shape[2] // 3] for i in range(3))
    parts = _heads(xp, query, key, value, bias, num_heads)
    used = past_sequence_length if past_present_share_buffer else None
    pasts, beams = (past_key, past_value), cache_indirection if (beam_width or 1) > 1 else None
    return narrowed(dtype, *_attended(xp, parts, mask_index, attention_bias, pasts, used, False, mask_filter_value, scale, beams))


def _of_beams(xp: Xp, past: Array, indirection: Array) -> Array:
    """Return for each sequence of a beam the past of those that it continues, row by row."""
    batch, _, length = past.shape[:3]
    if indirection.ndim != 3 or indirection.shape[0] * indirection.shape[1] != batch or indirection.shape[2] < length:
        shape = tuple(indirection.shape)
        raise wrong(
            f"cache_indirection must have shape (groups, beams, rows) for {batch} sequences and {length} rows, got {shape}"
        )
    groups, beams = indirection.shape[:2]
    first = xp.arange(groups).reshape(groups, 1, 1) * beams
    source = (indirection[:, :, :length] + first).reshape(batch, length)
    return past.transpose(0, 2, 1, 3)[source, xp.arange(source.shape[1])].transpose(0, 2, 1, 3)


decoder_masked_multi_head_attention.shapes(of_heads)
decoder_masked_multi_head_attention.flops(attended(1, 5))


@decoder_masked_multi_head_attention.decomposition
def decoder_masked_multi_head_attention_body(
    op: Op,
    query: V,
    key: V,
    value: V,
    mask_index: V,
    attention_bias: V,
    past_key: V,
    past_value: V,
    past_sequence_length: V,
    cache_indirection: V,
    bias: V,
    mask_filter_value: float,
    num_heads: int,
    past_present_share_buffer: int,
    scale: float | None,
) -> list[V]:
    if key is None:
        query, key, value = op.Split(query, axis=2, num_outputs=3, outputs=3)
    parts = _op_heads(op, query, key, value, bias, num_heads)
    used = past_sequence_length if past_present_share_buffer else None
    pasts = (past_key, past_value)
    return _op_attended(op, parts, mask_index, attention_bias, pasts, used, False, mask_filter_value, scale, cache_indirection)


def _op_of_beams(op: Op, past: V, indirection: V) -> V:
    """As `_of_beams`, in ONNX's operators."""
    length = op_size(op, past, 2)
    chosen = op.Cast(op.Slice(indirection, [0], length, [2]), to=7)
    group = op.Unsqueeze(op.Range(0, op.Squeeze(op_size(op, indirection, 0), [0]), 1), [1, 2])
    source = op.Add(chosen, op.Mul(group, op_size(op, indirection, 1)))
    source = op.Reshape(source, op.Concat(op_size(op, past, 0), length, axis=0), allowzero=1)
    row = op.Expand(op.Range(0, op.Squeeze(length, [0]), 1), op.Shape(source))
    index = op.Concat(op.Unsqueeze(source, [2]), op.Unsqueeze(row, [2]), axis=2)
    return op.Transpose(op.GatherND(op.Transpose(past, perm=[0, 2, 1, 3]), index), perm=[0, 2, 1, 3])
