"""How the next token is chosen: the options of a search, what they do to the logits, and the draw."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput, OperatorError, check_keywords
from singa_backend.io.documents import LARGEST, Document

from .config import FOLDER, ModelFolder

OPTION = "SX390"
"""The code of an option of a search that is out of its bounds or contradicts another one."""

SEQUENCES = 4096
"""The maximum number of sequences of one call."""

BEAMS = 128
"""The maximum number of beams."""

NEW_TOKENS = 256
"""The maximum number of new tokens if neither the caller nor the folder sets a length."""


def refused(text: str, hint: str = "") -> InvalidInput:
    """The error of an option."""
    return InvalidInput(text, code=OPTION, hint=hint)


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search, by the names of the keywords of `Generator.generate`; None: the folder's value.

    Lengths count the tokens of the decoder: those of the prompt and the new ones, or, after an encoder, the new ones.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    end_tokens: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check each option by itself."""
        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
            if value is not None and not (whole and low <= value <= high):
                raise refused(f"{name} must be an integer from {low} to {high}, got {value!r}")
        for name, open_low, most in _NUMBERS:
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_number(value) or not (value >= 0 and value <= most) or (open_low and value == 0):
                rule = f"a number {'above 0' if open_low else 'of at least 0'} and at most {most:g}"
                raise refused(f"{name} must be {rule}, got {value!r}")
        for name in ("sample", "early_stopping"):
            if (value := getattr(self, name)) is not None and not isinstance(value, bool):
                raise refused(f"{name} must be True, False or None, got {value!r}")
        penalty = self.length_penalty
        if penalty is not None and not (_is_number(penalty) and abs(penalty) <= 100):
            raise refused(f"length_penalty must be a number from -100 to 100, got {penalty!r}")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise refused(f"stop must hold texts that are not empty, got {list(self.stop)!r}")
        tokens = self.end_tokens or ()
        if not all(isinstance(t, (int, np.integer)) and 0 <= t <= LARGEST for t in tokens):
            raise refused(f"end_tokens must hold tokens, integers of at least 0, got {list(tokens)!r}")

    @classmethod
    def of(cls, given: Mapping[str, Any], call: str) -> SearchOptions:
        """The options that a caller has passed as keywords; a single text or token may stand for a list of it."""
        check_keywords(call, given, [f.name for f in fields(cls)])
        values = dict(given)
        stop, end = values.get("stop"), values.get("end_tokens")
        for name, value, single in (("stop", stop, str), ("end_tokens", end, (int, np.integer))):
            if value is None:
                values.pop(name, None)
            elif isinstance(value, single):
                values[name] = (value,)
            elif isinstance(value, (list, tuple)):
                values[name] = tuple(value)
            else:
                raise refused(f"{name} must be a list, got {value!r}")
        return cls(**values)

    def completed(self, folder: ModelFolder) -> SearchOptions:
        """These options, with the folder's values for those that are None.

        The search samples if `sample` says so; if `sample` is None and the caller has passed a temperature, `top_k` or `top_p`,
        unless the temperature is 0; otherwise if the folder says so.
        """
        section = folder.search
        found = _defaults(folder)
        sample = self.sample
        if sample is None and not all(v is None for v in (self.temperature, self.top_k, self.top_p)):
            sample = self.temperature != 0
        if sample is None:
            sample = section.maybe("do_sample", Document.flag) or False
        if self.temperature == 0:
            if self.sample:
                raise refused("temperature must be above 0 for a search that samples, got 0", "sample=False is the greedy search")
            sample = False
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None and f.name != "sample"}
        if not {"max_new_tokens", "max_length"}.isdisjoint(given):
            found.pop("max_new_tokens", None)
            found.pop("max_length", None)
        made = replace(self, **{**found, **given}, sample=sample)
        made._check_beams()
        if (made.num_return_sequences or 1) > 1 and not sample and made.beams == 1:
            hint = "pass num_beams, sample=True, a temperature, top_k or top_p"
            raise refused(f"num_return_sequences must be 1 for a greedy search, got {made.num_return_sequences}", hint)
        if sample and made.seed is None:
            made = replace(made, seed=secrets.randbits(32))
        return made

    @property
    def beams(self) -> int:
        """The number of sequences that the search follows for each prompt; 1 without a beam search."""
        return self.num_beams or 1

    def _check_beams(self) -> None:
        """Raise InvalidInput for options that a beam search does not have."""
        if self.beams == 1:
            return
        if self.sample:
            what = f"num_beams must be 1 for a search that samples, got {self.num_beams}"
            raise refused(what, "pass num_beams=1 or sample=False")
        if (self.num_return_sequences or 1) > self.beams:
            raise refused(f"num_return_sequences must be at most num_beams {self.beams}, got {self.num_return_sequences}")
        if self.stop:
            what = f"stop must be empty for a search with {self.beams} beams, got {list(self.stop)}"
            raise refused(what, "end_tokens end a sequence of a beam search; num_beams=1 searches with one")

    def lengths(self, prompt: int, folder: ModelFolder) -> tuple[int, int]:
        """The minimum and the maximum number of new tokens after a prompt of so many tokens."""
        most = NEW_TOKENS if self.max_new_tokens is None and self.max_length is None else LARGEST
        if self.max_new_tokens is not None:
            most = self.max_new_tokens
        if self.max_length is not None:
            most = min(most, self.max_length - prompt)
        if folder.context is not None:
            if prompt >= folder.context:
                what = f"a prompt must be shorter than the {folder.context} tokens that the model can attend to, got {prompt}"
                raise refused(what, "shorten the prompt")
            most = min(most, folder.context - prompt)
        if most < 1:
            what = f"max_length must be above the {prompt} tokens of the prompt, got {self.max_length}"
            raise refused(what, "max_new_tokens counts the new tokens only")
        low = max(self.min_new_tokens or 0, (self.min_length or 0) - prompt)
        if low > most:
            raise refused(f"the minimum length must be at most the maximum, got {low} and {most} new tokens")
        return low, most


_INTEGERS = (
    ("max_new_tokens", 1, LARGEST), ("max_length", 1, LARGEST), ("min_new_tokens", 0, LARGEST), ("min_length", 0, LARGEST),
    ("top_k", 0, LARGEST), ("no_repeat_ngram_size", 0, LARGEST), ("num_return_sequences", 1, SEQUENCES),
    ("num_beams", 1, BEAMS), ("seed", 0, (1 << 63) - 1),
)  # fmt: skip
"""Options that are integers, with their bounds."""

_NUMBERS = (("temperature", False, 1e6), ("top_p", True, 1.0), ("repetition_penalty", True, 1e6))
"""Options that are numbers, whether 0 is excluded, and their maximum."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.bool_, np.complexfloating))


def _defaults(folder: ModelFolder) -> dict[str, Any]:
    """The options in the folder's configuration."""
    section = folder.search
    found: dict[str, Any] = {
        "max_new_tokens": section.maybe("max_new_tokens", Document.integer, 1),
        "max_length": section.maybe("max_length", Document.integer, 1),
        "min_new_tokens": section.maybe("min_new_tokens", Document.integer),
        "min_length": section.maybe("min_length", Document.integer),
        "temperature": section.maybe("temperature", Document.number),
        "top_k": section.maybe("top_k", Document.integer),
        "top_p": section.maybe("top_p", Document.number, 0.0, 1.0),
        "repetition_penalty": section.maybe("repetition_penalty", Document.number),
        "no_repeat_ngram_size": section.maybe("no_repeat_ngram_size", Document.integer),
        "num_return_sequences": section.maybe("num_return_sequences", Document.integer, 1, SEQUENCES),
        "num_beams": section.maybe("num_beams", Document.integer, 1, BEAMS),
        "length_penalty": section.maybe("length_penalty", Document.number, -100.0),
    }
    several = (found["num_beams"] or 1) > 1
    if several or section.mapping().get("early_stopping") != "never":
        found["early_stopping"] = section.maybe("early_stopping", Document.flag)
    groups = section.maybe("num_beam_groups", Document.integer, 1) or 1
    if several and (groups > 1 or section.maybe("diversity_penalty", Document.number)):
        key = "num_beam_groups" if groups > 1 else "diversity_penalty"
        raise section[key].error("must not be set: groups of beams are not supported")
    for name in ("temperature", "top_p", "repetition_penalty"):
        if found[name] == 0:
            raise section[name].wrong("above 0")
    found["end_tokens"] = folder.end
    return {k: v for k, v in found.items() if v is not None}


class Sampler:
    """Chooses the next token of one sequence.

    Args:
        options: of the search, completed.
        end: the tokens that end the sequence.
        least: the number of new tokens before it may end.
        row: the number of the sequence: each has random numbers of its own.
        forced: the first new token; None for any.
    """

    def __init__(self, options: SearchOptions, end: Sequence[int], least: int, row: int, forced: int | None = None) -> None:
        self._options, self._end, self._least, self._forced = options, list(end), least, forced
        self._draw = np.random.default_rng([row, options.seed]) if options.sample and options.seed is not None else None

    def sums(self, logits: np.ndarray, sums: np.ndarray, sequences: np.ndarray, new: int) -> np.ndarray:
        """The sums of log-probabilities of beams with each next token, of shape (beams, tokens).

        Raises:
            OperatorError: a logit is NaN (SX410).
        """
        largest = logits.max(axis=1, keepdims=True)
        if not np.isfinite(largest).all():
            what = "the logit of the most likely token must be finite, got one that is not"
            raise OperatorError(what, code="SX410", hint="sonnx run --validate names the node")
        logs = logits - largest
        logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
        if self._forced is not None and new == 0:
            forced = np.full_like(logs, -np.inf)
            forced[:, self._first(self._forced, logits.shape[1])] = 0
            logs = forced
        else:
            logs = np.stack([self._allowed(row, tokens, new) for row, tokens in zip(logs, sequences.tolist(), strict=True)])
        found: np.ndarray = logs + sums.reshape(-1, 1)
        return found

    def choose(self, logits: np.ndarray, tokens: Sequence[int], new: int) -> int:
        """The next token.

        Args:
            logits: of every token, float32; they are not changed.
            tokens: those of the sequence so far.
            new: how many of them are new.

        Raises:
            OperatorError: no token has a finite logit, or one is NaN (SX410).
        """
        if self._forced is not None and new == 0:
            return self._first(self._forced, len(logits))
        scores = self._allowed(logits, tokens, new)
        best = int(np.argmax(scores))  # the index of a NaN, if there is one
        if not np.isfinite(scores[best]):
            what = f"the logit of the most likely token must be finite, got {scores[best]} for token {best}"
            raise OperatorError(what, code="SX410", hint="sonnx run --validate names the node")
        return best if self._draw is None else self._drawn(scores, self._draw.random())

    @staticmethod
    def _first(forced: int, words: int) -> int:
        """The first new token; raises InvalidInput if the model has fewer tokens."""
        if forced >= words:
            what = f"forced_bos_token_id must be a token of the model, an integer from 0 to {words - 1}, got {forced}"
            raise InvalidInput(what, code=FOLDER)
        return forced

    def _allowed(self, logits: np.ndarray, tokens: Sequence[int], new: int) -> np.ndarray:
        """The logits after the penalty, without tokens that must not follow."""
        chosen = self._options
        scores = logits.astype(np.float32, copy=True)
        penalty = chosen.repetition_penalty
        if penalty is not None and penalty != 1:
            seen = np.unique(np.asarray(tokens, np.int64))
            seen = seen[seen < len(scores)]
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        if chosen.no_repeat_ngram_size:
            scores[[t for t in repeated(tokens, chosen.no_repeat_ngram_size) if t < len(scores)]] = -np.inf
        if new < self._least:
            scores[[t for t in self._end if t < len(scores)]] = -np.inf
        return scores

    def _drawn(self, scores: np.ndarray, number: float) -> int:
        """The token at a number from 0 to 1 in the distribution of the scores."""
        chosen = self._options
        kept = most_likely(scores, chosen.temperature or 1.0, chosen.top_k or 0, 1.0 if chosen.top_p is None else chosen.top_p)
        ids, chances = kept
        at = int(np.searchsorted(np.cumsum(chances), number * chances.sum(), side="right"))
        return int(ids[min(at, len(ids) - 1)])


def repeated(tokens: Sequence[int], size: int) -> list[int]:
    """The tokens that would end a sequence of `size` tokens that has occurred before."""
    start = tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
    return [tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tuple(tokens[i : i + size - 1]) == start]


def most_likely(scores: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The tokens to draw from, the most likely first, and their probabilities among all that `top_k` keeps.

    Args:
        scores: of every token.
        temperature: what they are divided by.
        top_k: the number of tokens that are kept; 0 for all.  Of equal scores the lower token comes first.
        top_p: the fewest tokens are kept whose probabilities reach this sum.
    """
    scaled = scores.astype(np.float64) / temperature
    ids = np.arange(len(scaled))
    if 0 < top_k < len(scaled):  # to sort the others takes longer than the rest
        ids = np.flatnonzero(scaled >= np.partition(scaled, -top_k)[-top_k])
    ids = ids[np.argsort(-scaled[ids], kind="stable")][: top_k or None]
    chances = np.exp(scaled[ids] - scaled[ids[0]])
    chances /= chances.sum()
    if top_p < 1:
        before = np.cumsum(chances) - chances
        count = max(1, int(np.count_nonzero(before < top_p)))
        ids, chances = ids[:count], chances[:count]
    kept = chances > 0
    return ids[kept], chances[kept]
