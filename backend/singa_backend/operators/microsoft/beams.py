"""Beam search: the sequences that it goes on with, and the best that have ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import OperatorError

MOST = 128
"""The maximum number of beams."""


class Beams:
    """The best sequences of a search, and those that it goes on with.

    Attributes:
        sequences: the tokens of each beam, those of one batch entry in a row.
        sums: the sum of the log-probabilities of each beam.
        best: for each batch entry the sequences that have ended, with their scores, the best first.
        done: whether the search of a batch entry has ended.
    """

    def __init__(
        self, prompt: np.ndarray, beams: int, penalty: float, early: bool, ends: Sequence[int], pad: int, new_only: bool = False
    ) -> None:
        """Begin with a prompt.

        Args:
            prompt: the tokens of each batch entry.
            beams: their number for each batch entry.
            penalty: the power of the length by which the sum of a sequence that has ended is divided.
            early: whether a search ends when as many sequences have ended.
            ends: the tokens that end a sequence; a negative one occurs nowhere.
            pad: the token of a batch entry whose search has ended.
            new_only: as in transformers, the length is that of the new tokens, with the one that ends the sequence; as in
                onnxruntime otherwise, that of all tokens without it.
        """
        if not 1 <= beams <= MOST:
            raise OperatorError(f"num_beams must be in [1, {MOST}], got {beams}", code="SX404")
        self.batch, self.beams, self.penalty, self.early, self.pad = len(prompt), beams, penalty, early, pad
        self.ends, self.new_only, self.start = frozenset(e for e in ends if e >= 0), new_only, prompt.shape[1]
        self.sequences = prompt.repeat(beams, axis=0)
        self.sums = np.full((self.batch, beams), -1e9, np.float32)
        self.sums[:, 0] = 0
        self.best: list[list[tuple[np.float32, np.ndarray]]] = [[] for _ in prompt]
        self.done = np.zeros(self.batch, bool)

    def _keep(self, batch: int, total: np.float32, tokens: np.ndarray) -> None:
        """Take an ended sequence among the best ones of its batch entry, behind those of an equal score."""
        length = self.sequences.shape[1] + 1 - self.start if self.new_only else len(tokens)
        with np.errstate(over="ignore", under="ignore", divide="ignore"):  # a large penalty: -0 or -inf
            score = total / np.float32(np.float32(length) ** np.float32(self.penalty))
        best = self.best[batch]
        if len(best) == self.beams:
            if score <= best[-1][0]:
                return
            best.pop()
        place = sum(bool(kept >= score) for kept, _ in best)
        best.insert(place, (score, tokens))

    def advance(self, scores: np.ndarray, last: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Choose the next token of each beam, and the beam that it continues, by the sums of log-probabilities.

        last: whether each of the best sequences ends with this token.
        """
        length = self.sequences.shape[1]
        tokens, rows = (np.zeros((self.batch, self.beams), np.int32) for _ in range(2))
        sums = np.zeros_like(self.sums)
        size = scores.shape[1]
        every = scores.reshape(self.batch, -1)
        order = np.argsort(-every, axis=1, kind="stable")[:, : max(2, 1 + len(self.ends)) * self.beams]
        largest = np.take_along_axis(every, order, axis=1).ravel()
        for b, flat in enumerate(every):
            if self.done[b]:  # it goes on with padding, from the first beam of all
                tokens[b] = self.pad
                continue
            used = 0
            for place, k in enumerate(order[b]):
                beam, token = divmod(int(k), size)
                if token in self.ends or (last and place < self.beams):
                    if place < self.beams:
                        tail = [] if token in self.ends else [token]
                        self._keep(b, flat[k], np.append(self.sequences[b * self.beams + beam], tail).astype(np.int32))
                    if token in self.ends:
                        continue
                tokens[b, used], rows[b, used], sums[b, used] = token, b * self.beams + beam, flat[k]
                used += 1
                if used == self.beams:
                    break
            if used < self.beams:
                raise OperatorError(f"{self.beams} beams need as many tokens besides the end token", code="SX404")
            if self.new_only:
                self.done[b] = last or self._finished(b, sums[b, 0], length + 1 - self.start)
            else:  # as in onnxruntime, the largest of as many sums as are candidates, but from another place for b > 0
                self.done[b] = self._finished(b, largest[b * self.beams :][: 2 * self.beams].max(), length)
        self.sums = sums
        self.sequences = np.concatenate([self.sequences[rows.ravel()], tokens.reshape(-1, 1)], axis=1)
        return tokens.ravel(), rows.ravel()

    def _finished(self, batch: int, largest: np.float32, length: int) -> bool:
        """Whether no sequence of a batch entry can be better than those that have ended."""
        if len(self.best[batch]) < self.beams:
            return False
        possible = largest / np.float32(np.float32(length) ** np.float32(self.penalty))
        return self.early or not self.best[batch][-1][0] < possible

    def finish(self, count: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """The best `count` sequences of each batch entry, with padding up to `most` tokens, and their scores."""
        sequences = np.full((self.batch, count, most), self.pad, np.int32)
        scores = np.zeros((self.batch, count), np.float32)
        for b in range(self.batch):
            if not self.done[b]:
                for k in range(self.beams):
                    self._keep(b, self.sums[b, k], self.sequences[b * self.beams + k])
            for k, (score, tokens) in enumerate(self.best[b][:count]):
                sequences[b, k, : len(tokens)] = tokens
                scores[b, k] = score
        return sequences, scores
