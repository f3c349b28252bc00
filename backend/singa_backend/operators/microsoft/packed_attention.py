"""Attention over sequences without padding, the operators that remove and restore it, and biases by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ... import limits
from ._api import Array, Host, Ints, Op, V, Xp, microsoft, not_declared
from ._attention import (
    check_bias,
    check_match,
    heads_of,
    op_attend,
    op_join_heads,
    op_range,
    op_size,
    op_split_heads,
    wrong,
)
from ._attention_facts import of_projection


@microsoft("RemovePadding", 1, widen=False)
def remove_padding(xp: Xp, input: Array, sequence_token_count: Array) -> tuple[Array, ...]:
    """Return the tokens of all sequences, their places, then those of the padding, the sums of lengths, and the greatest."""
    if input.ndim != 3 or sequence_token_count.shape != input.shape[:1]:
        raise wrong(
            f"input and sequence_token_count must have shapes (batch, length, hidden) and (batch), got {tuple(input.shape)} and "
            f"{tuple(sequence_token_count.shape)}"
        )
    batch, length, hidden = input.shape
    real = (xp.arange(length) < sequence_token_count.reshape(batch, 1)).reshape(-1)
    places = xp.concatenate([xp.nonzero(real)[0], xp.nonzero(~real)[0]]).astype(np.int32)
    count = int(xp.to_host(real.sum()))
    sums = xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(sequence_token_count).astype(np.int32)])
    most = sequence_token_count.max(keepdims=True)
    return input.reshape(batch * length, hidden)[places[:count]], places.reshape(batch, length), sums, most


@remove_padding.decomposition
def remove_padding_body(op: Op, input: V, sequence_token_count: V) -> list[V]:
    places = op.Cast(op_range(op, op.Mul(op_size(op, input, 0), op_size(op, input, 1))), to=6)
    position = op.Cast(op_range(op, op_size(op, input, 1)), to=6)
    real = op.Reshape(op.Less(position, op.Unsqueeze(sequence_token_count, [1])), [-1])
    kept, padding = op.Compress(places, real), op.Compress(places, op.Not(real))
    offsets = op.Reshape(op.Concat(kept, padding, axis=0), op.Shape(input, end=2), allowzero=1)
    tokens = op.Gather(op.Reshape(input, op.Concat([-1], op_size(op, input, 2), axis=0)), kept, axis=0)
    sums = op.Concat(op.constant([0], np.int32), op.CumSum(sequence_token_count, 0), axis=0)
    return [tokens, offsets, sums, op.ReduceMax(sequence_token_count, [0], keepdims=1)]


@microsoft("RestorePadding", 1, widen=False)
def restore_padding(xp: Xp, input: Array, token_offset: Array) -> Array:
    """Put the tokens at their places among zeros."""
    _check_offsets(input.shape, token_offset)
    batch, length = token_offset.shape
    y = xp.zeros((batch * length, input.shape[1]), input.dtype)
    y[token_offset.reshape(-1)[: input.shape[0]]] = input
    return y.reshape(batch, length, input.shape[1])


def _check_offsets(tokens: Ints, token_offset: Array) -> None:
    """Raise OperatorError unless tokens of this shape have places in sequences."""
    if len(tokens) != 2 or token_offset.ndim != 2 or token_offset.size < tokens[0]:
        raise wrong(
            f"the tokens and token_offset must have shapes (tokens, hidden) and (batch, length), got {tokens} and "
            f"{tuple(token_offset.shape)}"
        )


@restore_padding.decomposition
def restore_padding_body(op: Op, input: V, token_offset: V) -> V:
    places = _op_places(op, input, token_offset)
    shape = op.Concat(op.Shape(token_offset), op_size(op, input, 1), axis=0)
    flat = op.Concat(op.Mul(op_size(op, token_offset, 0), op_size(op, token_offset, 1)), op_size(op, input, 1), axis=0)
    zeros = op.Expand(op.constant(0, op.dtype(input)), flat)
    return op.Reshape(op.ScatterND(zeros, op.Unsqueeze(places, [1]), input), shape, allowzero=1)


def _op_places(op: Op, tokens: V, token_offset: V) -> V:
    """Return the places of the tokens in the sequences with padding."""
    return op.Cast(op.Slice(op.Reshape(token_offset, [-1]), [0], op_size(op, tokens, 0), [0]), to=7)


def _check_packed(tokens: int, widths: Sequence[int], heads: int, token_offset: Array, bias: Array | None) -> None:
    """Raise OperatorError unless queries, keys and values of these widths have heads, and the other inputs fit them."""
    _check_offsets((tokens, widths[0]), token_offset)
    batch, length = token_offset.shape
    for width in widths:
        if heads < 1 or width % heads:
            raise wrong(
                f"tokens must have shape (batch, length, hidden) with a multiple of {heads} heads, got {(batch, length, width)}"
            )
    check_bias(bias, (batch, heads, length, length))
    q, k, v = ((batch, heads, length, width // heads) for width in widths)
    check_match(q, k, v)


def _packed(op: Op, parts: list[V], heads: int, token_offset: V, sums: V, bias: V, scale: float | None) -> V:
    """Return attention over the tokens of each sequence, for projected queries, keys and values of all tokens."""
    q, k, v = (op_split_heads(op, restore_padding_body(op, x, token_offset), heads) for x in parts)
    lengths = op.Unsqueeze(op.Sub(op.Slice(sums, [1], [2**62], [0]), op.Slice(sums, [0], [-1], [0])), [1, 2, 3])
    seen = op.Less(op.Cast(op_range(op, op_size(op, q, 2)), to=6), lengths)
    zero, never = op.constant(0, op.dtype(q)), op.constant(-np.inf, op.dtype(q))
    y, _ = op_attend(op, q, k, v, op.Where(seen, zero if bias is None else bias, never), scale)
    joined = op_join_heads(op, y)
    flat = op.Reshape(joined, op.Concat([-1], op_size(op, joined, 2), axis=0))
    return op.Gather(flat, _op_places(op, parts[0], token_offset), axis=0)


@microsoft("PackedAttention", 1, traits=("product", "linear"), weights={1: "the weights", 2: "the bias"})
def packed_attention(
    op: Op,
    input: V,
    weights: V,
    bias: V,
    token_offset: V,
    cumulative_sequence_length: V,
    attention_bias: V | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: Ints | None = None,
    scale: float | None = None,
) -> V:
    """Compute Attention for tokens without padding."""
    projected = op.Add(op.MatMul(input, weights), bias)
    if qkv_hidden_sizes:
        parts = op.Split(projected, list(qkv_hidden_sizes), axis=1, outputs=3)
    else:
        parts = op.Split(projected, axis=1, num_outputs=3, outputs=3)
    return _packed(op, list(parts), num_heads, token_offset, cumulative_sequence_length, attention_bias, scale)


@packed_attention.accepts
def packed_attention_accepts(
    input: Array,
    weights: Array,
    token_offset: Array,
    attention_bias: Array | None,
    num_heads: int,
    qkv_hidden_sizes: Ints | None,
) -> None:
    _check_offsets(input.shape, token_offset)
    width = weights.shape[-1]
    sizes = qkv_hidden_sizes or (width // 3,) * 3
    if len(sizes) != 3 or sum(sizes) != width:
        raise wrong(f"qkv_hidden_sizes must be 3 sizes whose sum is {width}, got {list(sizes)}")
    _check_packed(len(input), sizes, num_heads, token_offset, attention_bias)


packed_attention.shapes(of_projection)


@microsoft("PackedMultiHeadAttention", 1, traits=("product",), weights={0: "the query", 1: "the key", 2: "the value"})
def packed_multi_head_attention(
    op: Op,
    query: V,
    key: V | None = None,
    value: V | None = None,
    bias: V | None = None,
    token_offset: V | None = None,
    cumulative_sequence_length: V | None = None,
    attention_bias: V | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float | None = None,
) -> V:
    """Compute MultiHeadAttention for tokens without padding; queries (tokens, heads, 3, size) have keys and values too."""
    parts = [query, key, value]
    if op.rank(query) == 4:
        split = op.Split(query, axis=2, num_outputs=3, outputs=3)
        parts = [op.Reshape(p, [0, -1]) for p in split]
    if bias is not None:
        widths = op.Concat(*(op_size(op, p, 1) for p in parts), axis=0)
        parts = [op.Add(p, b) for p, b in zip(parts, op.Split(bias, widths, axis=0, outputs=3), strict=True)]
    return _packed(op, parts, num_heads, token_offset, cumulative_sequence_length, attention_bias, scale)


@packed_multi_head_attention.accepts
def packed_multi_head_attention_accepts(
    query: Array,
    key: Array | None,
    value: Array | None,
    token_offset: Array,
    attention_bias: Array | None,
    num_heads: int,
) -> None:
    if query.ndim == 4:
        widths = [query.shape[1] * query.shape[3]] * 3
    else:
        parts = [x for x in (query, key, value) if x is not None]
        if len(parts) < 3:
            raise wrong("key and value must be present, unless they are packed with the query")
        for x in parts:
            _check_offsets(x.shape, token_offset)
        widths = [x.shape[1] for x in parts]
    _check_packed(len(query), widths, num_heads, token_offset, attention_bias)


@microsoft("RelativePositionBias", 1)
def relative_position_bias(
    xp: Xp,
    bias_table: Array,
    query_length: Host[int],
    key_length: Host[int],
    *,
    is_bidirectional: int = 0,
    max_distance: int,
) -> Array:
    """Return the bias of T5 for each head, query and key, by buckets of their distance.

    bias_table has the shape (buckets, heads) but the elements of (heads, buckets).
    """
    buckets, heads = bias_table.shape
    sizes = max(query_length, 0), max(key_length, 0)
    limits.admit((heads, *sizes), bias_table.dtype)
    if 0 in sizes:
        return xp.zeros((1, heads, *sizes), bias_table.dtype)
    distance = np.arange(1 - query_length, key_length)  # those of the last query, then of the one before it, and so on
    first = np.zeros_like(distance)
    if is_bidirectional:
        buckets //= 2
        first = buckets * (distance > 0)
    distance = np.abs(distance)
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise wrong(f"max_distance must be more than a part of the buckets, {exact}, and this at least 1, got {max_distance}")
    both = np.stack([np.maximum(distance, exact), np.full_like(distance, max_distance)]).astype(np.float32)
    ratio = np.divide(*np.log(both / np.float32(exact)))
    far = np.minimum(exact + (ratio * np.float32(buckets - exact)).astype(np.int64), buckets - 1)
    index = xp.asarray(first + np.where(distance < exact, distance, far))
    return xp.windows(bias_table.reshape(heads, -1)[:, index], key_length, 1)[:, ::-1].copy()[None]


@relative_position_bias.decomposition
def relative_position_bias_body(
    op: Op, bias_table: V, query_length: V, key_length: V, is_bidirectional: int, max_distance: int
) -> V:
    buckets, heads = op_size(op, bias_table, 0), op_size(op, bias_table, 1)
    rows, columns = (op.Range(0, op.Squeeze(op.Reshape(n, [1]), [0]), 1) for n in (query_length, key_length))
    distance = op.Sub(columns, op.Unsqueeze(rows, [1]))
    size, first = buckets, op.constant([0], np.int64)
    if is_bidirectional:
        size = op.Div(buckets, 2)
        first = op.Where(op.Greater(distance, 0), size, 0)
    distance, exact = op.Abs(distance), op.Div(size, 2)
    half = op.Cast(exact, to=1)
    ratio = op.Div(
        op.Log(op.Div(op.Cast(op.Max(distance, exact), to=1), half)), op.Log(op.Div(op.constant(max_distance, np.float32), half))
    )
    far = op.Cast(op.Mul(ratio, op.Cast(op.Sub(size, exact), to=1)), to=7)
    far = op.Min(op.Add(exact, far), op.Sub(size, 1))
    index = op.Add(first, op.Where(op.Less(distance, exact), distance, far))
    table = op.Reshape(bias_table, op.Concat(heads, buckets, axis=0))
    return op.Unsqueeze(op.Gather(table, index, axis=1), [0])


@microsoft("GatedRelativePositionBias", 1)
def gated_relative_position_bias(
    op: Op,
    query_layer: V,
    query_bias: V,
    rel_pos: V,
    weight: V,
    bias: V,
    eco_a: V,
    token_offset: V | None = None,
    *,
    num_heads: int,
) -> V:
    """Return the relative position bias times gates that are computed from the queries; with token_offset they are packed."""
    query = op.Add(query_layer, query_bias)
    if token_offset is not None:
        query = restore_padding_body(op, query, token_offset)
    gates = op.Add(op.MatMul(op_split_heads(op, query, num_heads), weight), bias)
    gates = op.Sigmoid(op.ReduceSum(op.Reshape(gates, [0, 0, 0, 2, -1]), [4], keepdims=0))
    u, r = op.Split(gates, axis=3, num_outputs=2, outputs=2)
    return op.Mul(op.Add(op.Mul(u, op.Sub(op.Mul(r, eco_a), 1.0)), 2.0), rel_pos)


@gated_relative_position_bias.accepts
def gated_relative_position_bias_accepts(query_layer: Array, token_offset: Array | None, num_heads: int) -> None:
    if token_offset is not None:
        _check_offsets(query_layer.shape, token_offset)
    whole = query_layer if token_offset is None else query_layer[None]
    heads_of(whole, num_heads, "query_layer")


not_declared(
    "Its kernel is of CUDA, for one model; export the model without onnxruntime's GPU fusions.",
    "DecoderAttention",
    "LongformerAttention",
    "QOrderedAttention",
    "QOrderedLongformerAttention",
)
