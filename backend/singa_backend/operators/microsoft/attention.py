"""Attention with the projection to queries, keys and values, of floats or of quantized values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import OperatorError, UnsupportedModel
from ._api import Array, Host, Ints, Op, V, Wanted, Xp, microsoft, not_declared
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
    op_split_heads,
    split_heads,
    wides,
    wrong,
)
from ._attention_facts import of_projection, projected


def _refuse_rotary(do_rotary: int) -> None:
    if do_rotary:
        raise UnsupportedModel(
            "Attention with do_rotary is not supported",
            code="SX202",
            hint="as onnxruntime's CPU kernel: write MultiHeadAttention and RotaryEmbedding instead",
        )


def _sizes(width: int, heads: int, sizes: Sequence[int] | None) -> tuple[int, int, int]:
    """Return the widths of queries, keys and values."""
    given = tuple(sizes) if sizes else (width // 3,) * 3
    if len(given) != 3 or sum(given) != width or given[0] != given[1] or heads < 1 or any(n % heads or n <= 0 for n in given):
        raise wrong(
            f"qkv_hidden_sizes must be 3 multiples of {heads} heads whose sum is {width}, the first two equal, got {given}",
            "without the attribute they are a third of the weights' columns each",
        )
    return given[0], given[1], given[2]


def _attended(
    xp: Xp,
    projected: Array,
    sizes: Sequence[int] | None,
    heads: int,
    mask: Array | None,
    past: Array | None,
    attention_bias: Array | None,
    used: int | None,
    causal: int,
    filter_value: float,
    scale: float | None,
    present: bool,
) -> tuple[Array, Array | None]:
    """Return the result for projected queries, keys and values, side by side, and the cache if it is wanted."""
    hq, hk, _ = _sizes(projected.shape[-1], heads, sizes)
    q = split_heads(projected[..., :hq], heads, "queries")
    k = split_heads(projected[..., hq : hq + hk], heads, "keys")
    v = split_heads(projected[..., hq + hk :], heads, "values")
    both = None
    if past is not None or present:
        if k.shape != v.shape:
            raise wrong(f"keys and values in one cache must have equal sizes, got {k.shape[3]} and {v.shape[3]}")
        every, both = appended(xp, past, xp.stack([k, v]), used)
        k, v = every[0], every[1]
    rows, keys = q.shape[2], k.shape[2]
    bias = mask_bias(xp, mask, q.shape[0], rows, keys - rows, keys, bool(causal), filter_value, q.dtype)
    check_bias(attention_bias, (*q.shape[:3], keys))
    if attention_bias is not None:
        bias = attention_bias if bias is None else bias + attention_bias
    y, _, _ = attend(xp, q, k, v, bias, scale)
    return join_heads(y), both if present else None


def _op_attended(
    op: Op,
    projected: V,
    sizes: Sequence[int] | None,
    heads: int,
    mask: V,
    past: V,
    attention_bias: V,
    used: V,
    causal: int,
    filter_value: float,
    scale: float | None,
    present: bool,
) -> list[V]:
    """As `_attended`, in ONNX's operators."""
    if sizes:
        parts = op.Split(projected, list(sizes), axis=2, outputs=3)
    else:
        parts = op.Split(projected, axis=2, num_outputs=3, outputs=3)
    q, k, v = (op_split_heads(op, x, heads) for x in parts)
    pasts: tuple[V, V] = (None, None)
    if past is not None:
        past_k, past_v = op.Split(past, axis=0, num_outputs=2, outputs=2)
        pasts = (op.Squeeze(past_k, [0]), op.Squeeze(past_v, [0]))
    (k, present_k), (v, present_v) = (op_appended(op, p, x, used) for p, x in zip(pasts, (k, v), strict=True))
    bias = op_mask_bias(op, mask, q, k, op_past_length(op, pasts[0], used), bool(causal), filter_value)
    y, _ = op_attend(op, q, k, v, op.add(bias, attention_bias), scale)
    both = op.Concat(op.Unsqueeze(present_k, [0]), op.Unsqueeze(present_v, [0]), axis=0) if present else None
    return [op_join_heads(op, y), both]


@microsoft(
    "Attention",
    1,
    widen=False,
    traits=("product", "linear"),
    weights={1: "the weights", 2: "the bias"},
    caches={4: 1},
)
def ms_attention(
    xp: Xp,
    input: Array,
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    past_sequence_length: Host[int] | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Ints | None = None,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
    wanted: Wanted,
) -> tuple[Array | None, ...]:
    """Return attention over the projected input, and the keys and values with their past, in one array."""
    _refuse_rotary(do_rotary)
    dtype = input.dtype
    input, weights, bias, past, attention_bias = wides(input, weights, bias, past, attention_bias)
    if input.ndim != 3 or weights.ndim != 2 or input.shape[2] != weights.shape[0]:
        raise wrong(
            f"input and weights must have shapes (batch, length, hidden) and (hidden, all sizes), got {tuple(input.shape)} "
            f"and {tuple(weights.shape)}"
        )
    projected = xp.matmul(input, weights)
    projected = projected if bias is None else projected + bias
    used = _used(past_present_share_buffer, past_sequence_length)
    found = _attended(
        xp, projected, qkv_hidden_sizes, num_heads, mask_index, past, attention_bias, used, unidirectional,
        mask_filter_value, scale, len(wanted) > 1 and wanted[1],
    )  # fmt: skip
    return narrowed(dtype, *found)


def _used(share: int, length: int | None) -> int | None:
    """Return the rows of the past that are in use, if it is a cache with more."""
    if share and length is None:
        raise OperatorError("past_present_share_buffer needs past_sequence_length", code="SX407")
    return length if share else None


ms_attention.shapes(of_projection)
ms_attention.flops(projected(4))


@ms_attention.decomposition
def ms_attention_body(
    op: Op,
    input: V,
    weights: V,
    bias: V,
    mask_index: V,
    past: V,
    attention_bias: V,
    past_sequence_length: V,
    do_rotary: int,
    mask_filter_value: float,
    num_heads: int,
    past_present_share_buffer: int,
    qkv_hidden_sizes: Ints | None,
    scale: float | None,
    unidirectional: int,
    wanted: tuple[bool, ...],
) -> list[V]:
    _refuse_rotary(do_rotary)
    projected = op.MatMul(input, weights)
    projected = projected if bias is None else op.Add(projected, bias)
    used = op.Cast(op.Reshape(past_sequence_length, [1]), to=7) if past_present_share_buffer else None
    return _op_attended(
        op, projected, qkv_hidden_sizes, num_heads, mask_index, past, attention_bias, used, unidirectional,
        mask_filter_value, scale, len(wanted) > 1,
    )  # fmt: skip


@microsoft("QAttention", 1, widen=False, traits=("product",), caches={8: 1})
def q_attention(
    xp: Xp,
    input: Array,
    weight: Array,
    bias: Array,
    input_scale: Array,
    weight_scale: Array,
    mask_index: Array | None = None,
    input_zero_point: Array | None = None,
    weight_zero_point: Array | None = None,
    past: Array | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
    wanted: Wanted,
) -> tuple[Array | None, ...]:
    """Return attention over the projection of quantized values, whose products are exact, and the cache."""
    _refuse_rotary(do_rotary)
    dtype = bias.dtype
    bias, input_scale, weight_scale, past = wides(bias, input_scale, weight_scale, past)
    if input.ndim != 3 or weight.ndim != 2 or input.shape[2] != weight.shape[0] or input_scale.size != 1:
        raise wrong(
            f"input, weight and input_scale must have shapes (batch, length, hidden), (hidden, 3 sizes) and (), got "
            f"{tuple(input.shape)}, {tuple(weight.shape)} and {tuple(input_scale.shape)}"
        )
    x, w = (
        v.astype(np.int32) if z is None else v.astype(np.int32) - z.astype(np.int32)
        for v, z in ((input, input_zero_point), (weight, weight_zero_point))
    )
    product = xp.matmul(x.astype(np.float64), w.astype(np.float64)).astype(np.float32)
    projected = product * (input_scale.reshape(()) * weight_scale) + bias
    found = _attended(
        xp, projected, None, num_heads, mask_index, past, None, None, unidirectional, mask_filter_value, scale,
        len(wanted) > 1 and wanted[1],
    )  # fmt: skip
    return narrowed(dtype, *found)


q_attention.shapes(of_projection)
q_attention.flops(projected(8))


@q_attention.decomposition
def q_attention_body(
    op: Op,
    input: V,
    weight: V,
    bias: V,
    input_scale: V,
    weight_scale: V,
    mask_index: V,
    input_zero_point: V,
    weight_zero_point: V,
    past: V,
    do_rotary: int,
    mask_filter_value: float,
    num_heads: int,
    scale: float | None,
    unidirectional: int,
    wanted: tuple[bool, ...],
) -> list[V]:
    _refuse_rotary(do_rotary)
    product = op.cast(op.MatMulInteger(input, weight, input_zero_point, weight_zero_point), bias)
    projected = op.Add(op.Mul(product, op.Mul(op.Reshape(input_scale, [1]), weight_scale)), bias)
    return _op_attended(
        op, projected, None, num_heads, mask_index, past, None, None, unidirectional, mask_filter_value, scale, len(wanted) > 1
    )


not_declared(
    "It is a kernel of CUDA whose cache has the keys in blocks of 16 bytes; write Attention or MultiHeadAttention instead.",
    "DecoderMaskedSelfAttention",
)
