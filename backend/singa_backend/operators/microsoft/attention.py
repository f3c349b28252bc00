"""Attention with the projection to queries, keys and values, of floats or of quantized values."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OperatorError, UnsupportedModel
from ._api import Array, Host, Ints, Op, V, Wanted, microsoft, not_declared
from ._attention import (
    check_bias,
    check_mask,
    length_with,
    op_appended,
    op_attend,
    op_join_heads,
    op_mask_bias,
    op_past_length,
    op_split_heads,
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


def _check_attended(
    width: int,
    input: Array,
    sizes: Sequence[int] | None,
    heads: int,
    mask: Array | None,
    past: Array | None,
    attention_bias: Array | None,
    used: Array | None,
    present: bool,
) -> None:
    """Raise OperatorError unless projected queries, keys and values of `width` values in all fit the other inputs."""
    hq, _, hv = (n // heads for n in _sizes(width, heads, sizes))
    batch, rows = input.shape[:2]
    if (past is not None or present) and hq != hv:
        raise wrong(f"keys and values in one cache must have equal sizes, got {hq} and {hv}")
    keys = length_with(past, (2, batch, heads, rows, hq), used)
    check_mask(mask, batch, rows, keys)
    check_bias(attention_bias, (batch, heads, rows, keys))


def _attended(
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
    """Return the result for projected queries, keys and values, side by side, and the cache if it is wanted."""
    if sizes:
        parts = op.Split(projected, list(sizes), axis=2, outputs=3)
    else:
        parts = op.Split(projected, axis=2, num_outputs=3, outputs=3)
    q, k, v = (op_split_heads(op, x, heads) for x in parts)
    length, both = op_past_length(op, past, used, 3), None
    if past is not None or present:
        new = op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)
        every, both = op_appended(op, past, new, used, 3)
        k, v = (op.Squeeze(x, [0]) for x in op.Split(every, axis=0, num_outputs=2, outputs=2))
    bias = op_mask_bias(op, mask, q, k, length, bool(causal), filter_value)
    y, _ = op_attend(op, q, k, v, op.add(bias, attention_bias), scale)
    return [op_join_heads(op, y), both]


@microsoft(
    "Attention",
    1,
    traits=("product", "linear"),
    weights={1: "the weights", 2: "the bias"},
    caches={4: 1},
)
def ms_attention(
    op: Op,
    input: V,
    weights: V,
    bias: V | None = None,
    mask_index: V | None = None,
    past: V | None = None,
    attention_bias: V | None = None,
    past_sequence_length: Host[V] | None = None,
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
) -> list[V]:
    """Return attention over the projected input, and the keys and values with their past, in one array."""
    _refuse_rotary(do_rotary)
    projected = op.MatMul(input, weights)
    projected = projected if bias is None else op.Add(projected, bias)
    used = op.Cast(op.Reshape(past_sequence_length, [1]), to=7) if past_present_share_buffer else None
    return _attended(
        op, projected, qkv_hidden_sizes, num_heads, mask_index, past, attention_bias, used, unidirectional,
        mask_filter_value, scale, len(wanted) > 1 and wanted[1],
    )  # fmt: skip


@ms_attention.accepts
def ms_attention_accepts(
    input: Array,
    weights: Array,
    mask_index: Array | None,
    past: Array | None,
    attention_bias: Array | None,
    past_sequence_length: Array | None,
    do_rotary: int,
    num_heads: int,
    past_present_share_buffer: int,
    qkv_hidden_sizes: Ints | None,
    wanted: Wanted,
) -> None:
    _refuse_rotary(do_rotary)
    if input.ndim != 3 or weights.ndim != 2 or input.shape[2] != weights.shape[0]:
        raise wrong(
            f"input and weights must have shapes (batch, length, hidden) and (hidden, all sizes), got {tuple(input.shape)} "
            f"and {tuple(weights.shape)}"
        )
    if past_present_share_buffer and past_sequence_length is None:
        raise OperatorError("past_present_share_buffer needs past_sequence_length", code="SX407")
    used = past_sequence_length if past_present_share_buffer else None
    present = len(wanted) > 1 and wanted[1]
    _check_attended(weights.shape[1], input, qkv_hidden_sizes, num_heads, mask_index, past, attention_bias, used, present)


ms_attention.shapes(of_projection)
ms_attention.flops(projected(4))


@microsoft("QAttention", 1, traits=("product",), caches={8: 1})
def q_attention(
    op: Op,
    input: V,
    weight: V,
    bias: V,
    input_scale: V,
    weight_scale: V,
    mask_index: V | None = None,
    input_zero_point: V | None = None,
    weight_zero_point: V | None = None,
    past: V | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
    wanted: Wanted,
) -> list[V]:
    """Return attention over the projection of quantized values, whose products are exact, and the cache."""
    _refuse_rotary(do_rotary)
    product = op.cast(op.MatMulInteger(input, weight, input_zero_point, weight_zero_point), bias)
    projected = op.Add(op.Mul(product, op.Mul(op.Reshape(input_scale, [1]), weight_scale)), bias)
    return _attended(
        op, projected, None, num_heads, mask_index, past, None, None, unidirectional, mask_filter_value, scale,
        len(wanted) > 1 and wanted[1],
    )  # fmt: skip


@q_attention.accepts
def q_attention_accepts(
    input: Array,
    weight: Array,
    input_scale: Array,
    mask_index: Array | None,
    past: Array | None,
    do_rotary: int,
    num_heads: int,
    wanted: Wanted,
) -> None:
    _refuse_rotary(do_rotary)
    if input.ndim != 3 or weight.ndim != 2 or input.shape[2] != weight.shape[0] or input_scale.size != 1:
        raise wrong(
            f"input, weight and input_scale must have shapes (batch, length, hidden), (hidden, 3 sizes) and (), got "
            f"{tuple(input.shape)}, {tuple(weight.shape)} and {tuple(input_scale.shape)}"
        )
    _check_attended(weight.shape[1], input, None, num_heads, mask_index, past, None, None, len(wanted) > 1 and wanted[1])


q_attention.shapes(of_projection)
q_attention.flops(projected(8))


not_declared(
    "It is a kernel of CUDA whose cache has the keys in blocks of 16 bytes; write Attention or MultiHeadAttention instead.",
    "DecoderMaskedSelfAttention",
)
