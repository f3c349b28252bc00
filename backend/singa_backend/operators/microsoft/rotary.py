"""Positions encoded as rotations, in onnxruntime's forms: cos and sin are caches, read by position."""

from __future__ import annotations

import numpy as np

from ... import limits
from ..rotary import rotary_embedding as rotate
from ._api import Array, Op, V, Xp, microsoft, not_declared
from ._attention import op_newer, op_range, op_size, wrong


def _check_heads(x: Array, cos: Array, num_heads: int, dim: int) -> int:
    """Return the size of a head; raise OperatorError unless the input consists of heads."""
    if x.ndim == 4:
        return int(x.shape[3])
    if x.ndim != 3 or cos.ndim != 2 or (dim and not num_heads):
        raise wrong(
            f"the input must have 3 or 4 axes and the caches 2, got shapes {tuple(x.shape)} and {tuple(cos.shape)}",
            "rotary_embedding_dim needs num_heads",
        )
    size = x.shape[2] // num_heads if num_heads else 2 * cos.shape[1]
    if not size or x.shape[2] % size:
        raise wrong(f"the hidden size {x.shape[2]} must be a multiple of the head size {size}")
    return int(size)


def op_by_heads(op: Op, x: V, cos: V, num_heads: int) -> V:
    """Convert (batch, length, hidden) to (batch, heads, length, size); without num_heads the caches have all features."""
    if op.rank(x) == 4:
        return x
    sizes = [0, 0, num_heads, -1] if num_heads else op.Concat([0, 0, -1], op.Mul(op_size(op, cos, 1), 2), axis=0)
    return op.Transpose(op.Reshape(x, sizes), perm=[0, 2, 1, 3])


def op_as_given(op: Op, y: V, x: V) -> V:
    """Convert (batch, heads, length, size) back to the form of the input."""
    return y if op.rank(x) == 4 else op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.Shape(x), allowzero=1)


def op_turn(op: Op, x: V, cos: V, sin: V, position_ids: V, interleaved: int, dim: int) -> V:
    """Call ONNX's RotaryEmbedding on (batch, heads, length, size)."""
    return op_newer(op, rotate, 23, [x, cos, sin, position_ids], {"interleaved": interleaved, "rotary_embedding_dim": dim})[0]


def op_rotate(op: Op, x: V, cos: V, sin: V, position_ids: V, interleaved: int) -> V:
    """Rotate as many features of (batch, heads, length, size) as the caches have pairs."""
    known, of_x = op.shape(cos), op.shape(x)
    pairs, size = None if known is None else known[1], None if of_x is None else of_x[3]
    if isinstance(pairs, int):
        return op_turn(op, x, cos, sin, position_ids, interleaved, 0 if 2 * pairs == size else 2 * pairs)
    width = op.Mul(op_size(op, cos, 1), 2)
    turned = op_turn(op, op.Slice(x, [0], width, [3]), cos, sin, position_ids, interleaved, 0)
    return op.Concat(turned, op.Slice(x, width, [2**62], [3]), axis=3)


@microsoft("RotaryEmbedding", 1, traits=("shape_of_first",))
def ms_rotary_embedding(
    op: Op,
    input: V,
    position_ids: V,
    cos_cache: V,
    sin_cache: V,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
) -> V:
    """Rotate pairs of features; position_ids are the position of each token, or that of the first one.

    onnxruntime uses neither `scale` nor `is_packed_batching`.
    """
    x = op_by_heads(op, input, cos_cache, num_heads)
    if op.rank(position_ids) < 2:
        length = op_size(op, x, 2)
        ids = op.Add(op.Reshape(position_ids, [1, 1]), op_range(op, length))
        position_ids = op.Expand(ids, op.Concat(op_size(op, x, 0), length, axis=0))
    y = op_turn(op, x, cos_cache, sin_cache, position_ids, interleaved, rotary_embedding_dim)
    return op_as_given(op, y, input)


@ms_rotary_embedding.accepts
def ms_rotary_embedding_accepts(
    xp: Xp,
    input: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    num_heads: int,
    rotary_embedding_dim: int,
) -> None:
    _check_heads(input, cos_cache, num_heads, rotary_embedding_dim)
    length = input.shape[2 if input.ndim == 4 else 1]
    if cos_cache.ndim == sin_cache.ndim == 2 and cos_cache.shape[0] == sin_cache.shape[0] and length:
        one = position_ids.size == 1 and position_ids.ndim < 2
        xp.indices(position_ids, max(cos_cache.shape[0] - length + 1, 0) if one else cos_cache.shape[0], negative=False)


def _streams(section: tuple[int, ...], layout: int) -> np.ndarray:
    """Return for each pair of features which of the three positions rotates it."""
    if len(section) != 3 or min(section) < 0:
        raise wrong(f"mrope_section must have 3 sizes of at least 0, got {list(section)}")
    if layout not in (0, 1):
        raise wrong(f"mrope_layout must be 0 or 1, got {layout}")
    limits.check_entries(sum(section), "pairs of features in mrope_section")
    if layout == 0:
        return np.repeat(np.arange(3), section)
    streams = np.zeros(sum(section), np.int64)
    for which in (1, 2):
        streams[which : 3 * section[which] : 3] = which
    return streams


@microsoft("MRotaryEmbedding", 1, traits=("shape_of_first",))
def m_rotary_embedding(
    op: Op,
    input: V,
    position_ids: V,
    cos_cache: V,
    sin_cache: V,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    mrope_layout: int = 0,
    mrope_section: tuple[int, ...],
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
) -> V:
    """Rotate pairs of features, each by one of the three positions of a token: time, height and width."""
    x = op_by_heads(op, input, cos_cache, num_heads)
    streams = _streams(mrope_section, mrope_layout)
    first, second = op.constant(streams == 0), op.constant(streams == 1)

    def chosen(cache: V) -> V:
        t, h, w = op.Split(op.Gather(cache, position_ids, axis=0), axis=0, num_outputs=3, outputs=3)
        return op.Squeeze(op.Where(first, t, op.Where(second, h, w)), [0])

    cos, sin = chosen(cos_cache), chosen(sin_cache)
    y = op_turn(op, x, cos, sin, None, interleaved, rotary_embedding_dim)
    return op_as_given(op, y, input)


@m_rotary_embedding.accepts
def m_rotary_embedding_accepts(
    xp: Xp,
    input: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    mrope_layout: int,
    mrope_section: tuple[int, ...],
    num_heads: int,
    rotary_embedding_dim: int,
) -> None:
    _check_heads(input, cos_cache, num_heads, rotary_embedding_dim)
    pairs = len(_streams(mrope_section, mrope_layout))
    batch, length = input.shape[0], input.shape[2 if input.ndim == 4 else 1]
    if position_ids.shape != (3, batch, length) or cos_cache.shape != sin_cache.shape:
        raise wrong(
            f"position_ids must have shape (3, {batch}, {length}) and the caches one shape, got "
            f"{tuple(position_ids.shape)}, {tuple(cos_cache.shape)} and {tuple(sin_cache.shape)}"
        )
    if cos_cache.shape[1] != pairs:
        raise wrong(f"the sum of mrope_section must be {cos_cache.shape[1]}, the caches' size, got {list(mrope_section)}")
    xp.indices(position_ids, cos_cache.shape[0], negative=False)


@microsoft("GemmaRotaryEmbedding", 1)
def gemma_rotary_embedding(op: Op, emb: V, q: V, q_rot: V, k: V, k_rot: V) -> tuple[V, V]:
    """Compute x * cos(emb) + x_rot * sin(emb) for queries and keys; cos and sin are rounded to float16."""
    cos, sin = (op.cast(op.Unsqueeze(op.Cast(f(emb), to=10), [1]), q) for f in (op.Cos, op.Sin))
    return (
        op.Add(op.Mul(q, cos), op.Mul(q_rot, sin)),
        op.Add(op.Mul(k, cos), op.Mul(k_rot, sin)),
    )


not_declared(
    "It is a kernel of CUDA whose roundings to bfloat16 depend on the mode; write RMSNormalization and RotaryEmbedding instead.",
    "RMSNormRotary",
)
