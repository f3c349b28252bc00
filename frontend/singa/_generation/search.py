"""How the next token is chosen: the scores after the options of a search, and the draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from singa_backend.errors import OperatorError

from .options import SearchOptions
from .processors import TOP_H, Filter, SequenceSpan, filters, log_softmax, processors


class Sampler:
    """Chooses the next token of one sequence.

    Args:
        options: of the search, completed.
        span: of the sequence.
        row: the number of the sequence: each has random numbers of its own.
    """

    def __init__(self, options: SearchOptions, span: SequenceSpan, row: int) -> None:
        self._options = options
        self._processors = list(processors(options, span))
        self._filters = list(filters(options))
        self._draw = np.random.default_rng([row, options.seed]) if options.sample and options.seed is not None else None

    def sums(self, logits: np.ndarray, sums: np.ndarray, sequences: np.ndarray, new: int) -> np.ndarray:
        """The sums of log-probabilities of beams with each next token, of shape (beams, tokens).

        Raises:
            OperatorError: a logit is NaN (SX410).
        """
        if not self._options.remove_invalid_values and not np.isfinite(logits.max(axis=1)).all():
            what = "the logit of the most likely token must be finite, got one that is not"
            raise OperatorError(what, code="SX410", hint="sonnx run --validate names the node")
        logs = log_softmax(logits)
        rows = [self._processed(row, tokens, new) for row, tokens in zip(logs, sequences.tolist(), strict=True)]
        totals: np.ndarray = np.stack(rows) + sums.reshape(-1, 1)
        return totals

    def choose(self, logits: np.ndarray, tokens: Sequence[int], new: int) -> int:
        """The next token.

        Args:
            logits: of every token, float32; they are not changed.
            tokens: those of the sequence so far.
            new: how many of them are new.

        Raises:
            OperatorError: no token has a finite logit, or one is NaN (SX410).
        """
        scores = self._processed(logits.astype(np.float32, copy=True), tokens, new)
        best = int(np.argmax(scores))  # the index of a NaN, if there is one
        if not np.isfinite(scores[best]):
            what = f"the logit of the most likely token must be finite, got {scores[best]} for token {best}"
            raise OperatorError(what, code="SX410", hint="sonnx run --validate names the node")
        return best if self._draw is None else self._drawn(scores, self._draw.random())

    def _processed(self, scores: np.ndarray, tokens: Sequence[int], new: int) -> np.ndarray:
        """The scores after the processors, which may change them in place."""
        for process in self._processors:
            scores = process(scores, tokens, new)
        return scores

    def _drawn(self, scores: np.ndarray, number: float) -> int:
        """The token at a number from 0 to 1 in the distribution of the scores."""
        chosen = self._options
        most = TOP_H if chosen.top_h is not None else chosen.top_k or 0
        ids, chances = most_likely(scores, chosen.temperature or 1.0, most, self._filters)
        at = int(np.searchsorted(np.cumsum(chances), number * chances.sum(), side="right"))
        return int(ids[min(at, len(ids) - 1)])


def most_likely(
    scores: np.ndarray, temperature: float, most: int, filters: Sequence[Filter] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens to draw from, the most likely first, and their probabilities among the `most` most likely ones.

    Args:
        scores: of every token.
        temperature: what they are divided by.
        most: the number of tokens among which the filters choose; 0 for all.  Of equal scores the lower token comes first.
        filters: choose the tokens one after the other, by the probabilities among those that are left.
    """
    scaled = scores.astype(np.float64) / temperature
    ids = np.arange(len(scaled))
    if 0 < most < len(scaled):  # to sort the others takes longer than the rest
        ids = np.flatnonzero(scaled >= np.partition(scaled, -most)[-most])
    ids = ids[np.argsort(-scaled[ids], kind="stable")][: most or None]
    chances = np.exp(scaled[ids] - scaled[ids[0]])
    ids, chances = ids[chances > 0], chances[chances > 0]
    chances /= chances.sum()
    for choose in filters:
        kept = choose(chances / chances.sum())
        ids, chances = ids[kept], chances[kept]
    return ids, chances
