"""Operators on tokens: repeated n-grams, hashes of n-grams, tokens found again in a source."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ... import dtypes
from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape
from .._common import length
from ._api import Array, Op, V, Wanted, Xp, microsoft


@microsoft("NGramRepeatBlock", 1, widen=False)
def ngram_repeat_block(xp: Xp, input_ids: Array, scores: Array, *, ngram_size: int) -> Array:
    """Set to -infinity the score of each token that, after the last tokens, would repeat an n-gram of the sequence."""
    if ngram_size < 1:
        raise OperatorError(f"ngram_size must be at least 1, got {ngram_size}", code="SX404")
    if input_ids.ndim != 2 or scores.ndim != 2 or len(input_ids) != len(scores):
        raise OperatorError(
            f"input_ids and scores must be matrices of equal height, got shapes {input_ids.shape} and {scores.shape}",
            code="SX404",
        )
    if input_ids.shape[1] < ngram_size:
        return scores
    seen = xp.windows(input_ids, ngram_size, 1)
    tail = input_ids[:, None, input_ids.shape[1] - ngram_size + 1 :]
    row, place = xp.nonzero((seen[..., :-1] == tail).all(axis=2))
    token = xp.indices(seen[row, place, -1], scores.shape[1], negative=False)
    y = scores.copy()
    y[row, token] = -np.inf
    return y


@ngram_repeat_block.shapes
def ngram_repeat_block_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    return known.shape(call.inputs[1])


@ngram_repeat_block.decomposition
def ngram_repeat_block_body(op: Op, input_ids: V, scores: V, ngram_size: int) -> V:
    """Compare the tokens of all n-grams with the last ones, and scatter which last tokens are blocked."""
    count = length(op, input_ids, 1)
    before = op.Min(count, ngram_size - 1)  # a sequence that is shorter has no n-grams
    starts, offsets = op.Range(0, op.Max(op.Sub(count, ngram_size - 1), 0), 1), op.Range(0, before, 1)
    last = op.Gather(input_ids, op.Add(starts, ngram_size - 1), axis=1)
    seen = op.Gather(input_ids, op.Add(op.Unsqueeze(starts, [1]), offsets), axis=1)
    tail = op.Gather(input_ids, op.Add(op.Sub(count, before), offsets), axis=1)
    code = dtypes.onnx_code(np.int32)
    others = op.Cast(op.Not(op.Equal(seen, op.Unsqueeze(tail, [1]))), to=code)
    repeats = op.Equal(op.ReduceSum(others, [2], keepdims=0), 0)
    blank = op.ConstantOfShape(op.Shape(scores), value=np.zeros(1, np.int32))
    marks = op.Cast(repeats, to=code)
    blocked = op.ScatterElements(blank, op.Where(repeats, last, 0), marks, axis=1, reduction="max")
    return op.Where(op.Greater(blocked, 0), op.constant(-np.inf, np.float32), scores)


@microsoft("BifurcationDetector", 1, host=True)
def bifurcation_detector(
    xp: Xp,
    src_tokens: Array,
    cur_tokens: Array,
    prev_suffix_match_idx: Array,
    pred_tokens: Array | None = None,
    *,
    max_ngram_size: int = 3,
    min_ngram_size: int = 1,
) -> tuple[Array, Array]:
    """Append the predicted tokens up to the first that differs from the source, and find the place behind the last n-gram there.

    The source has to hold the n-gram once; the shortest such n-gram is taken.
    """
    source = src_tokens.reshape(-1)
    tokens = cur_tokens.reshape(-1)
    if pred_tokens is not None:
        start = int(prev_suffix_match_idx.reshape(-1)[0])
        if not 0 <= start <= len(source) or pred_tokens.size != len(source) + 1 - start:
            raise OperatorError(
                f"prev_suffix_match_idx must be in [0, {len(source)}] and pred_tokens hold one token more than the source has "
                f"from there on, got {start} and {pred_tokens.size} tokens",
                code="SX404",
            )
        predicted = pred_tokens.reshape(-1)
        differs = np.flatnonzero(predicted[:-1] != source[start:])
        equal = int(differs[0]) if len(differs) else len(predicted) - 1
        tokens = np.concatenate([tokens, predicted[: equal + 1]])
    found = -1
    for n in range(min_ngram_size, max_ngram_size + 1):
        if n < 1 or n > min(len(tokens), len(source)):
            break
        windows = np.lib.stride_tricks.sliding_window_view(source, n)
        places = np.flatnonzero((windows == tokens[len(tokens) - n :]).all(axis=1))
        if len(places) == 1:
            found = int(places[0]) + n
        if len(places) < 2:
            break
    return tokens, np.array([found], np.int64)


# --- hashes of n-grams -------------------------------------------------------------------------------------------------


def _checked(multipliers: Array, vocab_sizes: Array, max_ngram_size: int, n_head_per_ngram: int) -> None:
    heads = (max_ngram_size - 1) * n_head_per_ngram
    if max_ngram_size < 2 or n_head_per_ngram < 1:
        given = f"{max_ngram_size} and {n_head_per_ngram}"
        raise OperatorError(f"max_ngram_size must be at least 2 and n_head_per_ngram at least 1, got {given}", code="SX404")
    if multipliers.size < max_ngram_size or vocab_sizes.shape != (heads,):
        raise OperatorError(
            f"multipliers must hold {max_ngram_size} values or more and vocab_sizes {heads}, got shapes {multipliers.shape} and "
            f"{vocab_sizes.shape}",
            code="SX404",
        )


def _hashes(
    xp: Xp,
    history: Array,
    new: Array,
    multipliers: Array,
    vocab_sizes: Array,
    fill: Array,
    size: int,
    heads: int,
) -> Array:
    """The hashes of the n-grams that end at each token.

    Args:
        xp: Array namespace.
        history: The tokens behind size - 1 earlier ones, B x (size - 1 + S).
        new: Where the tokens before do not count, in the shape of `history`.
        multipliers: A factor for each distance.
        vocab_sizes: A divisor for each head.
        fill: The token in place of those that do not count.
        size: The length of the longest n-gram.
        heads: The number of heads of each length.
    """
    count = history.shape[1] - size + 1
    mixed = history[:, size - 1 :] * multipliers[0]
    cut = xp.zeros(mixed.shape, bool)
    made = []
    for k in range(1, size):
        cut = cut | new[:, size - k : size - k + count]
        shifted = xp.where(cut, fill, history[:, size - 1 - k : size - 1 - k + count])
        mixed = mixed ^ (shifted * multipliers[k])
        made.append(mixed[..., None] % vocab_sizes[(k - 1) * heads : k * heads])
    return xp.concatenate(made, axis=-1)


def _starts(xp: Xp, history: Array, segments: Array | None, eos: Array | None) -> Array:
    """Where a sequence starts again: after an end token, and where the segment changes."""
    new = xp.zeros(history.shape, bool)
    if eos is not None:
        new[:, 1:] |= history[:, :-1] == eos
    if segments is not None:
        behind = history.shape[1] - segments.shape[1]
        new[:, behind + 1 :] |= segments[:, 1:] != segments[:, :-1]
    return new


@microsoft("NGramHashMapping", 1)
def ngram_hash_mapping(
    xp: Xp,
    input_ids: Array,
    multipliers: Array,
    vocab_sizes: Array,
    past_ids: Array | None = None,
    head_offsets: Array | None = None,
    eos_token_id: Array | None = None,
    segment_ids: Array | None = None,
    *,
    max_ngram_size: int,
    n_head_per_ngram: int,
    pad_id: int,
    reset_on_eos: int = 0,
) -> tuple[Array, Array]:
    """Hash the n-grams that end at each token; return the hashes, and the tokens that the next call needs as past_ids.

    The hash of the tokens t0, t1, ..., the last one first, is (t0 * m0 ^ t1 * m1 ^ ...) modulo the size of each head.
    """
    _checked(multipliers, vocab_sizes, max_ngram_size, n_head_per_ngram)
    xp.refuse(vocab_sizes < 1, lambda: OperatorError("each of vocab_sizes must be positive", code="SX403"))
    before = max_ngram_size - 1
    fill = xp.asarray(np.array(pad_id, input_ids.dtype)) if eos_token_id is None else eos_token_id.reshape(())
    if past_ids is None:
        past_ids = xp.zeros((len(input_ids), before), dtype=input_ids.dtype) + fill
    history = xp.concatenate([past_ids, input_ids], axis=1)
    new = _starts(xp, history, segment_ids, fill if reset_on_eos and eos_token_id is not None else None)
    y = _hashes(xp, history, new, multipliers, vocab_sizes, fill, max_ngram_size, n_head_per_ngram)
    return (y if head_offsets is None else y + head_offsets), history[:, history.shape[1] - before :]


@ngram_hash_mapping.decomposition
def ngram_hash_mapping_body(
    op: Op,
    input_ids: V,
    multipliers: V,
    vocab_sizes: V,
    past_ids: V | None,
    head_offsets: V | None,
    eos_token_id: V | None,
    segment_ids: V | None,
    max_ngram_size: int,
    n_head_per_ngram: int,
    pad_id: int,
    reset_on_eos: int,
) -> tuple[V, V]:
    """One slice of the tokens for each distance, and of the places that start again."""
    before = max_ngram_size - 1
    fill = op.constant(pad_id, op.dtype(input_ids)) if eos_token_id is None else eos_token_id
    if past_ids is None:
        past_ids = op.Expand(fill, op.Concat(op.Shape(input_ids, end=1), [before], axis=0))
    tokens = op.Concat(past_ids, input_ids, axis=1)
    count = op.Shape(input_ids, start=1)

    def at(x: V, k: int) -> V:
        """The elements k places before each token."""
        return op.Slice(x, [before - k], op.Add(count, before - k), [1])

    ends = op.Equal(tokens, fill) if reset_on_eos and eos_token_id is not None else None
    if segment_ids is not None:
        changed = op.Not(op.Equal(op.Slice(segment_ids, [1], [2**62], [1]), op.Slice(segment_ids, [0], [-1], [1])))
        changed = op.Pad(op.Cast(changed, to=dtypes.onnx_code(np.int32)), op.constant([0, before + 1, 0, 0], np.int64))
        changed = op.Greater(op.Slice(changed, [0], op.Add(count, before), [1]), 0)
    mixed = op.Mul(input_ids, op.Slice(multipliers, [0], [1]))
    cut, made = None, []
    for k in range(1, max_ngram_size):
        token = at(tokens, k)
        cuts = [cut] if cut is not None else []
        cuts += [at(ends, k)] if ends is not None else []
        cuts += [at(changed, k - 1)] if segment_ids is not None else []
        for one in cuts:
            cut = one if cut is None or cut is one else op.Or(cut, one)
        if cut is not None:
            token = op.Where(cut, fill, token)
        mixed = op.BitwiseXor(mixed, op.Mul(token, op.Slice(multipliers, [k], [k + 1])))
        sizes = op.Slice(vocab_sizes, [(k - 1) * n_head_per_ngram], [k * n_head_per_ngram])
        made.append(op.Mod(op.Unsqueeze(mixed, [2]), sizes))
    y = op.Concat(*made, axis=2)
    return (y if head_offsets is None else op.Add(y, head_offsets)), op.Slice(tokens, [-before], [2**62], [1])


@microsoft("VarlenNGramHashMapping", 1, host=True)
def varlen_ngram_hash_mapping(
    xp: Xp,
    input_ids: Array,
    multipliers: Array,
    vocab_sizes: Array,
    cumulative_sequence_length: Array,
    past_ids: Array | None = None,
    head_offsets: Array | None = None,
    eos_token_id: Array | None = None,
    segment_ids: Array | None = None,
    past_segment_ids: Array | None = None,
    capture_count: Array | None = None,
    *,
    max_ngram_size: int,
    n_head_per_ngram: int,
    pad_id: int,
    reset_on_eos: int = 0,
    state_update_capacity: int = 0,
    wanted: Wanted,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Hash the n-grams of sequences of different lengths, which are packed behind each other.

    state_update has the last tokens behind each of the first capture_count tokens of a sequence.
    """
    _checked(multipliers, vocab_sizes, max_ngram_size, n_head_per_ngram)
    if (vocab_sizes < 1).any():
        raise OperatorError("each of vocab_sizes must be positive", code="SX403")
    ends = cumulative_sequence_length.tolist()
    if not ends or ends[0] or ends[-1] != len(input_ids) or any(a >= b for a, b in pairwise(ends)):
        raise OperatorError(
            f"cumulative_sequence_length must rise from 0 to the number of tokens {len(input_ids)}, got {ends}", code="SX404"
        )
    if (capture_count is not None) != (state_update_capacity > 0):
        raise OperatorError("capture_count must be present if state_update_capacity is positive, and only then", code="SX404")
    if segment_ids is None and (past_segment_ids is not None or wanted[2:3] == (True,)):
        raise OperatorError("past_segment_ids and present_segment_ids need segment_ids", code="SX404")
    batch, before = len(ends) - 1, max_ngram_size - 1
    fill = np.array(pad_id, input_ids.dtype) if eos_token_id is None else eos_token_id.reshape(())
    past = np.full((batch, before), fill, input_ids.dtype) if past_ids is None else past_ids
    states = np.full((batch, state_update_capacity, before), pad_id, input_ids.dtype)
    made, present, segments = [], [], []
    for i in range(batch):
        here = slice(ends[i], ends[i + 1])
        history = np.concatenate([past[i], input_ids[here]])[None]
        own = None
        if segment_ids is not None:
            own = segment_ids[here]
            earlier = np.full(before, own[0], own.dtype) if past_segment_ids is None else past_segment_ids[i]
            own = np.concatenate([earlier, own])[None]
            segments.append(own[0, own.shape[1] - before :])
        new = _starts(xp, history, own, fill if reset_on_eos and eos_token_id is not None else None)
        made.append(_hashes(xp, history, new, multipliers, vocab_sizes, fill, max_ngram_size, n_head_per_ngram)[0])
        present.append(history[0, history.shape[1] - before :])
        captured = 0 if capture_count is None else min(int(capture_count[i]), history.shape[1] - before, state_update_capacity)
        for j in range(captured):
            states[i, j] = history[0, j + 1 : j + 1 + before]
    y = np.concatenate(made) if made else np.zeros((0, vocab_sizes.size), input_ids.dtype)
    y = y if head_offsets is None else y + head_offsets
    shape = (batch, before)
    last = np.array(segments, np.int32).reshape(shape) if segment_ids is not None else None
    return y, np.array(present, input_ids.dtype).reshape(shape), last, states
