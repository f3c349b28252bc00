"""Normalizations of onnxruntime, with what its optimizer fuses before them: a residual, a bias, embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape
from .._flops import each_input
from ._api import Array, Op, V, Wanted, Xp, microsoft
from .gates import single


def _check_residual(x: Array, skip: Array, bias: Array | None, **vectors: Array | None) -> None:
    """Raise OperatorError unless skip has the last axes of x, and bias and the vectors its last one."""
    samples = (x.shape[1:], (1, *x.shape[1:])) if x.ndim == 3 else ()
    if x.ndim not in (2, 3) or skip.shape not in (x.shape, *samples):
        raise OperatorError(
            f"input must have 2 or 3 axes and skip its shape, or that of one sample, got {x.shape} and {skip.shape}", code="SX404"
        )
    _check_vectors(x.shape[-1:], bias=bias, **vectors)


def _check_vectors(shape: tuple[int, ...], **vectors: Array | None) -> None:
    """Raise OperatorError unless the vectors that are present have this shape."""
    for name, v in vectors.items():
        if v is not None and v.shape != shape:
            raise OperatorError(f"{name} must have shape {shape}, got {v.shape}", code="SX404")


def _residual_in(op: Op, x: V, skip: V, bias: V | None) -> V:
    """Return x + skip + bias."""
    total = op.Add(x, skip)
    return total if bias is None else op.Add(total, bias)


# --- with a residual --------------------------------------------------------------------------------------------------


@microsoft("SkipLayerNormalization", 1, traits=("shape_of_first",), weights={2: "the scale", 3: "the bias"})
def skip_layer_normalization(
    op: Op,
    x: V,
    skip: V,
    gamma: V,
    beta: V | None = None,
    bias: V | None = None,
    *,
    epsilon: float = 1e-12,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Normalize x + skip + bias; returns y, the mean, the inverse standard deviation and the sum."""
    total = _residual_in(op, x, skip, bias)
    made = op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon, outputs=min(len(wanted), 3))
    return (*(made if len(wanted) > 1 else [made]), *[total][: max(len(wanted) - 3, 0)])


@skip_layer_normalization.accepts
def skip_layer_normalization_accepts(x: Array, skip: Array, gamma: Array, beta: Array | None, bias: Array | None) -> None:
    _check_residual(x, skip, bias, gamma=gamma, beta=beta)


skip_layer_normalization.flops(each_input(10))


@microsoft("SkipSimplifiedLayerNormalization", 1, traits=("shape_of_first",), weights={2: "the scale"})
def skip_simplified_layer_normalization(
    op: Op, x: V, skip: V, gamma: V, bias: V | None = None, *, epsilon: float = 1e-12, wanted: Wanted
) -> tuple[V, ...]:
    """Divide x + skip + bias by its root mean square; returns y, zeros in place of a mean, the inverse root and the sum."""
    total = _residual_in(op, x, skip, bias)
    y = op.RMSNormalization(total, gamma, axis=-1, epsilon=epsilon)
    if not any(wanted[1:3]):
        return y, None, None, total
    inverse = _inverse_root(op, single(op, total), epsilon)
    return y, op.zeros_like(inverse), inverse, total


@skip_simplified_layer_normalization.accepts
def skip_simplified_layer_normalization_accepts(x: Array, skip: Array, gamma: Array, bias: Array | None) -> None:
    _check_residual(x, skip, bias, gamma=gamma)


skip_simplified_layer_normalization.flops(each_input(8))


def _inverse_root(op: Op, x: V, epsilon: float) -> V:
    """Return the inverse root of the mean square over the last axis."""
    return op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), [-1], keepdims=1), epsilon)))


# --- of embeddings ----------------------------------------------------------------------------------------------------


@microsoft("EmbedLayerNormalization", 1,
           weights={2: "the words", 3: "the positions", 4: "the segments", 5: "the scale", 6: "the bias"})  # fmt: skip
def embed_layer_normalization(
    op: Op,
    input_ids: V,
    segment_ids: V | None,
    word_embedding: V,
    position_embedding: V,
    segment_embedding: V | None,
    gamma: V,
    beta: V,
    mask: V | None = None,
    position_ids: V | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int | None = None,
) -> tuple[V, V, V]:
    """Normalize the sum of embeddings of words, positions and segments; returns also the sums of the mask, and the sum.

    The sums of the mask are the lengths of sequences that are padded on the right; without a mask they are 0.
    """
    if position_ids is None:
        position_ids = op.Unsqueeze(op.Range(0, op.Squeeze(op.Shape(input_ids, start=1, end=2), [0]), 1), [0])
    total = op.Add(op.Gather(word_embedding, input_ids), op.Gather(position_embedding, position_ids))
    if segment_ids is not None:
        total = op.Add(total, op.Gather(segment_embedding, segment_ids))
    y = op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)
    counted = op.ReduceSum(op.Mul(input_ids, 0) if mask is None else mask, [1], keepdims=0)
    return y, counted, total


@embed_layer_normalization.accepts
def embed_layer_normalization_accepts(
    xp: Xp,
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    gamma: Array,
    beta: Array,
    mask: Array | None,
    position_ids: Array | None,
) -> None:
    """Negative and too large ids are an error."""
    if input_ids.ndim != 2:
        raise OperatorError(f"input_ids must have shape batch x sequence, got {input_ids.shape}", code="SX404")
    if (segment_ids is None) != (segment_embedding is None):
        raise OperatorError("segment_ids and segment_embedding must be present together", code="SX407")
    sequence = input_ids.shape[1]
    if position_ids is None:
        if sequence > len(position_embedding):
            what = f"a sequence must have at most {len(position_embedding)} positions, the rows of position_embedding"
            raise OperatorError(f"{what}, got {sequence}", code="SX401")
    else:
        _same_ids(position_ids, input_ids, "position_ids", rows=True)
        xp.indices(position_ids, position_embedding.shape[0], negative=False)
    xp.indices(input_ids, word_embedding.shape[0], negative=False)
    if segment_ids is not None and segment_embedding is not None:
        _same_ids(segment_ids, input_ids, "segment_ids")
        xp.indices(segment_ids, segment_embedding.shape[0], negative=False)
    _check_vectors(word_embedding.shape[1:], gamma=gamma, beta=beta)
    if mask is not None:
        _same_ids(mask, input_ids, "mask")


@embed_layer_normalization.shapes
def embed_layer_normalization_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    ids, table = known.shape(call.inputs[0]), known.shape(call.inputs[2])
    if ids is None or table is None or len(ids) != 2 or len(table) != 2:
        return None
    made: list[Shape | None] = [(*ids, table[1]), ids[:1], (*ids, table[1])]
    return made[: len(call.outputs)]


def _same_ids(ids: Array, words: Array, name: str, rows: bool = False) -> None:
    """Raise OperatorError unless ids have the shape of the words', or with `rows` one row for all samples."""
    if ids.shape != words.shape and not (rows and ids.shape == (1, *words.shape[1:])):
        raise OperatorError(f"{name} must have shape {words.shape}, got {ids.shape}", code="SX404")


@microsoft("QEmbedLayerNormalization", 1)
def quantized_embed_layer_normalization(
    op: Op,
    input_ids: V,
    segment_ids: V | None,
    word_embedding: V,
    position_embedding: V,
    segment_embedding: V | None,
    gamma: V,
    beta: V,
    mask: V | None,
    word_embedding_scale: V,
    position_embedding_scale: V,
    segment_embedding_scale: V | None,
    gamma_scale: V,
    beta_scale: V,
    word_embedding_zero_point: V,
    position_embedding_zero_point: V,
    segment_embedding_zero_point: V | None,
    gamma_zero_point: V,
    beta_zero_point: V,
    *,
    epsilon: float = 1e-12,
) -> tuple[V, V]:
    """Compute EmbedLayerNormalization of tables of 8 bits, each with one scale and one zero point."""

    def real(q: V | None, scale: V | None, zero: V | None) -> V | None:
        if q is None:
            return None
        one_scale, one_zero = (op.Reshape(v, op.constant([], np.int64)) for v in (scale, zero))
        return op.Mul(op.Sub(op.cast(q, one_scale), op.cast(one_zero, one_scale)), one_scale)

    y, counted, _ = embed_layer_normalization(
        op,
        input_ids,
        segment_ids,
        real(word_embedding, word_embedding_scale, word_embedding_zero_point),
        real(position_embedding, position_embedding_scale, position_embedding_zero_point),
        real(segment_embedding, segment_embedding_scale, segment_embedding_zero_point),
        real(gamma, gamma_scale, gamma_zero_point),
        real(beta, beta_scale, beta_zero_point),
        mask,
        None,
        epsilon=epsilon,
    )
    return y, counted


@quantized_embed_layer_normalization.accepts
def quantized_embed_layer_normalization_accepts(
    xp: Xp,
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    gamma: Array,
    beta: Array,
    mask: Array | None,
    word_embedding_scale: Array,
    position_embedding_scale: Array,
    segment_embedding_scale: Array | None,
    gamma_scale: Array,
    beta_scale: Array,
    word_embedding_zero_point: Array,
    position_embedding_zero_point: Array,
    segment_embedding_zero_point: Array | None,
    gamma_zero_point: Array,
    beta_zero_point: Array,
) -> None:
    scales = [word_embedding_scale, position_embedding_scale, gamma_scale, beta_scale]
    zeros = [word_embedding_zero_point, position_embedding_zero_point, gamma_zero_point, beta_zero_point]
    if segment_embedding is not None:
        if segment_embedding_scale is None or segment_embedding_zero_point is None:
            raise OperatorError("a table of segments must have a scale and a zero point", code="SX407")
        scales, zeros = [*scales, segment_embedding_scale], [*zeros, segment_embedding_zero_point]
    for scale, zero in zip(scales, zeros, strict=True):
        if scale.size != 1 or zero.size != 1:
            raise OperatorError(
                f"a table must have one scale and one zero point, got shapes {scale.shape} and {zero.shape}", code="SX404"
            )
    tables = word_embedding, position_embedding, segment_embedding
    embed_layer_normalization_accepts(xp, input_ids, segment_ids, *tables, gamma, beta, mask, None)
