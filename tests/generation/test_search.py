"""The search: what its options do to the logits, against their definitions, and the draws."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.language_models import END, WORDS, Decoder, write

from singa import sonnx
from singa._generation.options import SearchOptions
from singa._generation.processors import SequenceSpan, filters, repeated
from singa._generation.search import Sampler, most_likely
from singa_backend.backend import SingaRep

scores = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30).map(lambda v: np.array(v, np.float32))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return np.asarray(e / e.sum())


@settings(max_examples=300, deadline=None)
@given(scores, st.floats(0.1, 5), st.integers(0, 32), st.floats(0.01, 1))
@example(np.array([0, 0, 0, 0, 0, 0, 0, 0, 19], np.float32), 0.5, 0, 1 - 2**-53)
def test_the_kept_tokens_are_the_most_likely_ones(x: np.ndarray, temperature: float, top_k: int, top_p: float) -> None:
    ids, chances = most_likely(x, temperature, top_k, list(filters(SearchOptions(top_k=top_k, top_p=top_p))))
    order = np.lexsort((np.arange(len(x)), -x.astype(np.float64) / temperature))[: top_k or None]
    assert list(ids) == list(order[: len(ids)])
    every = softmax(x[order].astype(np.float64) / temperature)
    np.testing.assert_allclose(chances, every[: len(ids)], rtol=1e-9)
    assert chances.sum() >= min(top_p, 1) * (1 - 1e-9) or len(ids) == np.count_nonzero(every)
    assert len(ids) == 1 or chances[:-1].sum() < top_p * (1 + 1e-12)  # no smaller set reaches the sum, but by rounding


def test_draws_have_the_probabilities() -> None:
    """At numbers that are spread evenly, each token is drawn as often as its probability says."""
    x = np.array([1.0, 3.0, -2.0, 2.5], np.float32)
    sampler = Sampler(SearchOptions(sample=True, temperature=1.5, top_k=3, seed=0), SequenceSpan(), 0)
    drawn = np.bincount([sampler._drawn(x, (i + 0.5) / 10_000) for i in range(10_000)], minlength=4) / 10_000
    expected = softmax(np.where(x < 0, -np.inf, x / 1.5))
    np.testing.assert_allclose(drawn, expected, atol=2e-4)


def test_a_draw_at_the_ends_of_the_interval() -> None:
    sampler = Sampler(SearchOptions(sample=True, seed=0), SequenceSpan(), 0)
    x = np.array([-np.inf, 0.0, -np.inf, -800.0], np.float32)
    assert {sampler._drawn(x, n) for n in (0.0, 0.5, np.nextafter(1.0, 0))} == {1}


def penalised(x: np.ndarray, tokens: list[int], penalty: float) -> np.ndarray:
    return np.array([v if i not in tokens else (v / penalty if v > 0 else v * penalty) for i, v in enumerate(x)], np.float32)


@settings(max_examples=100, deadline=None)
@given(scores, st.data())
def test_the_penalty_the_ngrams_and_the_minimum(x: np.ndarray, data: Any) -> None:
    token = st.integers(0, len(x) - 1)
    tokens, size = data.draw(st.lists(token, min_size=1, max_size=12)), data.draw(st.integers(0, 3))
    penalty, least, new = data.draw(st.floats(0.5, 3)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    options = SearchOptions(repetition_penalty=penalty, no_repeat_ngram_size=size)
    found = Sampler(options, SequenceSpan(least=least, end=(0, 999)), 0)._processed(x.copy(), tokens, new)
    expected = penalised(x, tokens, penalty)
    for i in range(len(x)):
        grams = [tuple([*tokens, i][j : j + size]) for j in range(len(tokens) + 2 - size)] if size else []
        if (i == 0 and new < least) or (grams and grams[-1] in grams[:-1]):
            expected[i] = -np.inf
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_tokens_that_repeat() -> None:
    assert repeated([1, 2, 3, 1, 2], 3) == [3] and repeated([1, 2], 3) == [] and sorted(repeated([4, 5, 4], 1)) == [4, 4, 5]
    assert sorted(repeated([1, 2, 1, 3, 1], 2)) == [2, 3] and repeated([], 1) == []


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[sonnx.Generator, list[np.ndarray]]:
    """A generator, and the logits of its runs."""
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": Decoder().model()}))
    found: list[np.ndarray] = []
    run = SingaRep.run

    def watched(self: SingaRep, *args: Any, **more: Any) -> Any:
        outputs = run(self, *args, **more)
        found.append(outputs["logits"][:, -1])
        return outputs

    monkeypatch.setattr(SingaRep, "run", watched)
    return generator, found


def test_drawn_tokens_are_in_the_set(seen: tuple[sonnx.Generator, list[np.ndarray]]) -> None:
    generator, logits = seen
    drawn = generator.generate("a", max_new_tokens=40, top_k=3, temperature=3, seed=0, end_tokens=[]).texts[0].tokens
    ranks = [int((x[0] > x[0][t]).sum()) for x, t in zip(logits, drawn, strict=True)]
    assert max(ranks) == 2 and set(ranks) == {0, 1, 2}
    logits.clear()
    drawn = generator.generate("a", max_new_tokens=40, top_p=0.6, temperature=2, seed=0, end_tokens=[]).texts[0].tokens
    for x, t in zip(logits, drawn, strict=True):
        chances = softmax(x[0] / 2)
        assert chances[chances > chances[t]].sum() < 0.6
    assert any(int(x[0].argmax()) != t for x, t in zip(logits, drawn, strict=True))
    logits.clear()
    penalised_tokens = generator.generate("abc", max_new_tokens=30, repetition_penalty=1.7, end_tokens=[]).texts[0].tokens
    before = list(b"abc")
    for x, t in zip(logits, penalised_tokens, strict=True):
        assert t == int(penalised(x[0], before, 1.7).argmax())
        before.append(t)


def test_the_minimum_and_the_ngrams_of_a_text(seen: tuple[sonnx.Generator, list[np.ndarray]]) -> None:
    generator, _ = seen
    free = generator.generate("ab", max_new_tokens=300, end_tokens=[]).texts[0].tokens
    pairs = list(pairwise(free))
    assert len(set(pairs)) < len(pairs)  # without the option, pairs repeat
    bound = generator.generate("ab", max_new_tokens=300, end_tokens=[], no_repeat_ngram_size=2).texts[0].tokens
    pairs = list(pairwise(bound))
    assert len(set(pairs)) == len(pairs) == 299
    often = free[3]
    assert often not in generator.generate("ab", max_new_tokens=30, min_new_tokens=30, end_tokens=often).texts[0].tokens
    assert END < WORDS
