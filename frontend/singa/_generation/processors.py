"""What the options of a search do to the scores of the next token: processors, and for draws filters, in transformers' order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from singa_backend.errors import InvalidInput

from .config import FOLDER
from .options import SearchOptions

Processor = Callable[[np.ndarray, Sequence[int], int], np.ndarray]
"""Returns new scores; takes those of every token, which it may change, the tokens so far, and the number of new ones."""

Filter = Callable[[np.ndarray], np.ndarray]
"""Returns which tokens to draw from, by their probabilities, the highest first."""

TOP_H = 100
"""The number of the most likely tokens among which `top_h` chooses, as in transformers."""


@dataclass(frozen=True)
class SequenceSpan:
    """What processors need to know about one sequence.

    Attributes:
        source: the tokens of the prompt.
        start: the number of tokens before the new ones; after an encoder these are not those of the prompt.
        least: the number of new tokens before it may end.
        most: the maximum number of new tokens.
        end: the tokens that end it.
    """

    source: tuple[int, ...] = ()
    start: int = 1
    least: int = 0
    most: int = 1 << 31
    end: tuple[int, ...] = ()


def processors(options: SearchOptions, span: SequenceSpan) -> Iterator[Processor]:
    """The processors of a sequence, in the order in which they run."""
    chosen = options
    if chosen.sequence_bias:
        yield _bias(chosen.sequence_bias, "sequence_bias")
    if (chosen.encoder_repetition_penalty or 1) != 1:
        inverse = 1 / (chosen.encoder_repetition_penalty or 1)
        yield lambda scores, tokens, new: _penalize(scores, span.source, inverse)
    if (penalty := chosen.repetition_penalty or 1) != 1:
        yield lambda scores, tokens, new: _penalize(scores, tokens, penalty)
    if size := chosen.no_repeat_ngram_size or 0:
        yield lambda scores, tokens, new: _exclude(scores, repeated(tokens, size))
    if wide := chosen.encoder_no_repeat_ngram_size or 0:
        yield lambda scores, tokens, new: _exclude(scores, repeated(tokens, wide, span.source))
    words = [(w, -np.inf) for w in chosen.bad_words_ids or () if len(w) > 1 or w[0] not in span.end]
    if words:
        yield _bias(words, "bad_words_ids")
    if span.least:
        yield lambda scores, tokens, new: _exclude(scores, span.end) if new < span.least else scores
    if (first := chosen.forced_bos_token_id) is not None and span.start == 1:
        yield lambda scores, tokens, new: scores if new else _force(scores, (first,), "forced_bos_token_id")
    if last := chosen.forced_eos_token_id:
        yield lambda scores, tokens, new: _force(scores, last, "forced_eos_token_id") if new == span.most - 1 else scores
    if chosen.remove_invalid_values:
        yield lambda scores, tokens, new: np.nan_to_num(scores, nan=0.0)
    if chosen.exponential_decay_length_penalty:
        yield _decay(*chosen.exponential_decay_length_penalty, span.end)
    if excluded := chosen.suppress_tokens:
        yield lambda scores, tokens, new: _exclude(scores, excluded)
    if begins := chosen.begin_suppress_tokens:
        at = int(span.start == 1 and chosen.forced_bos_token_id is not None)
        yield lambda scores, tokens, new: _exclude(scores, begins) if new == at else scores
    if chosen.renormalize_logits:
        yield lambda scores, tokens, new: log_softmax(scores)


def filters(options: SearchOptions) -> Iterator[Filter]:
    """The filters of a draw, in the order in which they run; `top_k` without `top_h` is the number of tokens that they see."""
    if (share := options.top_h) is not None:
        yield lambda p: _entropic(p, share)
    if top_k := options.top_k:
        yield lambda p: np.arange(len(p)) < top_k
    if (top_p := 1.0 if options.top_p is None else options.top_p) < 1:
        yield lambda p: np.cumsum(p) - p < max(top_p, 1e-300)
    if min_p := options.min_p:
        yield lambda p: p >= min_p * p[0]
    if (mass := 1.0 if options.typical_p is None else options.typical_p) < 1:
        yield lambda p: _typical(p, mass)
    if 0 < (epsilon := options.epsilon_cutoff or 0) < 1:
        yield lambda p: (p >= epsilon) | (p == p[0])
    if 0 < (eta := options.eta_cutoff or 0) < 1:
        yield lambda p: (p >= min(eta, np.sqrt(eta) * np.exp((p * np.log(p)).sum()))) | (p == p[0])


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """The logarithms of the probabilities, along the last axis."""
    with np.errstate(invalid="ignore", over="ignore"):
        logs: np.ndarray = scores - scores.max(axis=-1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
    return logs


def repeated(tokens: Sequence[int], size: int, source: Sequence[int] | None = None) -> list[int]:
    """The tokens that would end a sequence of `size` tokens that has occurred in `source`, by default in `tokens`."""
    source = tokens if source is None else source
    begin = tuple(tokens[len(tokens) - size + 1 :]) if len(tokens) >= size - 1 else None
    return [source[i + size - 1] for i in range(len(source) - size + 1) if tuple(source[i : i + size - 1]) == begin]


def _exclude(scores: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    scores[[t for t in tokens if 0 <= t < len(scores)]] = -np.inf
    return scores


def _penalize(scores: np.ndarray, tokens: Sequence[int], penalty: float) -> np.ndarray:
    seen = np.unique(np.asarray(tokens, np.int64))
    seen = seen[seen < len(scores)]
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def _checked(tokens: Iterable[int], scores: np.ndarray, option: str) -> None:
    """Raise InvalidInput if a token of an option is not one of the model."""
    far = max(tokens)
    if far >= len(scores):
        what = f"{option} must have tokens of the model, integers from 0 to {len(scores) - 1}, got {far}"
        raise InvalidInput(what, code=FOLDER)


def _force(scores: np.ndarray, tokens: Sequence[int], option: str) -> np.ndarray:
    _checked(tokens, scores, option)
    forced = np.full_like(scores, -np.inf)
    forced[list(tokens)] = 0
    return forced


def _bias(pairs: Sequence[tuple[tuple[int, ...], float]], option: str) -> Processor:
    """Add numbers to the last tokens of sequences whose other tokens are the last ones so far."""
    largest = [max(max(s) for s, _ in pairs)]

    def process(scores: np.ndarray, tokens: Sequence[int], new: int) -> np.ndarray:
        _checked(largest, scores, option)
        sums = np.zeros_like(scores)
        for sequence, bias in dict(pairs).items():
            begin = len(tokens) - len(sequence) + 1
            if begin >= 0 and tuple(tokens[begin:]) == sequence[:-1]:
                sums[sequence[-1]] += bias
        total: np.ndarray = scores + sums
        return total

    return process


def _decay(start: int, factor: float, end: Sequence[int]) -> Processor:
    """Raise the scores of the tokens that end a sequence by more with each new token beyond the first `start`."""

    def process(scores: np.ndarray, tokens: Sequence[int], new: int) -> np.ndarray:
        ends = [t for t in end if t < len(scores) and np.isfinite(scores[t])]
        if new > start:
            with np.errstate(over="ignore"):
                growth = min(np.float64(factor) ** (new - start), 1e30)
                scores[ends] += np.abs(scores[ends]) * np.float32(growth - 1)
        return scores

    return process


def _entropic(p: np.ndarray, share: float) -> np.ndarray:
    """The first token, and those up to which the entropy is at most a share of the whole."""
    sums = np.cumsum(-p * np.log(p))
    kept: np.ndarray = (sums <= sums[-1] * share) | (np.arange(len(p)) == 0)
    return kept


def _typical(p: np.ndarray, mass: float) -> np.ndarray:
    """The tokens whose information is closest to the entropy, until their probabilities reach `mass`."""
    information = -np.log(p)
    distance = np.abs(information - (p * information).sum())
    order = np.argsort(distance, kind="stable")
    last = min(int(np.count_nonzero(np.cumsum(p[order]) < mass)), len(p) - 1)
    kept: np.ndarray = distance <= distance[order[last]]
    return kept
