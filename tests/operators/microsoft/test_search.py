"""Searches for tokens of com.microsoft: what drawn nodes do not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.microsoft_nodes import ours, theirs

from singa_backend import OperatorError
from singa_backend.conform.fuzz.recipes.microsoft.search import gpt2, with_encoder
from singa_backend.engines.oracle import EngineFailure, Oracle
from singa_backend.operators.microsoft.search import nucleus, uniform_numbers

I32, F = np.int32, np.float32
IDS = np.array([[6, 1, 2], [3, 4, 5]], I32)
PLAIN: dict[str, Any] = {"eos_token_id": -1, "pad_token_id": 6}


def one(value: float, dtype: Any = I32) -> np.ndarray:
    return np.array([value], dtype)


def decoder(size: int = 9, seed: int = 0) -> Any:
    return gpt2(np.random.default_rng(seed), size, 2, 2, 1)


def beams(count: int, most: int = 7) -> list[Any]:
    """The inputs of a beam search that returns as many sequences as it has beams."""
    return [IDS, one(most), one(0), one(count), one(count), one(1, F)]


def test_the_end_token_and_all_after_it_are_padding(oracle: Oracle) -> None:
    inputs = [IDS, one(12)]
    free = ours("GreedySearch", inputs, decoder=decoder(), **PLAIN)[0]
    end = int(free[0, 5])
    given = {**PLAIN, "eos_token_id": end, "decoder": decoder()}
    found = ours("GreedySearch", inputs, **given)[0]
    stop = 3 + int(np.flatnonzero(free[0, 3:] == end)[0])
    assert found[0].tolist() == free[0, :stop].tolist() + [6] * (12 - stop)
    expected = theirs(oracle, "GreedySearch", inputs, **given)[0]
    written = 1 + np.flatnonzero((found != 6).any(axis=0)).max()
    np.testing.assert_array_equal(found[:, :written], expected[:, :written])


def test_a_smaller_vocabulary_hides_the_last_logits() -> None:
    """onnxruntime reads the rows of the logits at wrong places then."""
    whole = ours("GreedySearch", [IDS, one(9), None, None, np.arange(9, dtype=I32) // 7 ^ 1], decoder=decoder(), **PLAIN)[0]
    assert ours("GreedySearch", [IDS, one(9)], decoder=decoder(), vocab_size=7, **PLAIN)[0].tolist() == whole.tolist()


def test_one_probable_token_is_the_greedy_one(oracle: Oracle) -> None:
    greedy = ours("GreedySearch", [IDS, one(12)], decoder=decoder(), **PLAIN)[0]
    for custom in (0, 1):
        given = {**PLAIN, "decoder": decoder(), "top_p": 1e-6, "custom": custom}
        for seed in (0, 7):
            inputs = [IDS, one(12), *[None] * 6, one(seed)]
            assert ours("Sampling", inputs, **given)[0].tolist() == greedy.tolist()
            assert theirs(oracle, "Sampling", inputs, **given)[0].tolist() == greedy.tolist()


def test_the_seed_decides_the_draws() -> None:
    given = {**PLAIN, "decoder": decoder(), "top_p": 1.0, "temperature": 8.0}
    first, again, other, none = (
        ours("Sampling", [IDS, one(20), *[None] * 6, seed], **given)[0].tolist() for seed in (one(5), one(5), one(6), None)
    )
    assert first == again != other
    assert none == ours("Sampling", [IDS, one(20), *[None] * 6, one(0)], **given)[0].tolist()


def test_uniform_numbers() -> None:
    """The first states after seed 1 are 16807 and 282475249."""
    number = uniform_numbers(1)()
    assert number == (16806 + 282475248 * (2.0**31 - 2)) / (2.0**31 - 2) ** 2
    assert uniform_numbers(0)() == number == uniform_numbers(2**31 - 1)()


@pytest.mark.parametrize("custom", [False, True])
def test_the_nucleus(custom: bool) -> None:
    scores = np.log(np.array([[0.1, 0.5, 0.15, 0.25]], F))
    kept = {p: np.flatnonzero(nucleus(scores, p, -np.inf, 0, custom)[0] > -np.inf).tolist() for p in (0.4, 0.6, 0.8, 0.95)}
    assert kept == {0.4: [1], 0.6: [1, 3], 0.8: [1, 2, 3], 0.95: [0, 1, 2, 3]}
    least = np.flatnonzero(nucleus(scores, 0.4, -np.inf, 2, False)[0] > -np.inf).tolist()
    assert least == [1, 3]


def test_draws_are_of_the_nucleus() -> None:
    """The filtered scores are those of the last draw."""
    for seed in range(8):
        inputs = [IDS, one(4), *[None] * 6, one(seed)]
        tokens, scores = ours("Sampling", inputs, ("y", "s"), decoder=decoder(), top_p=0.7, temperature=4.0, **PLAIN)
        assert (scores > -1e20).any(axis=1).all() and (scores <= -1e20).any()
        assert (scores[np.arange(2), tokens[:, -1]] > -1e20).all()


def test_the_penalty_of_present_tokens() -> None:
    """onnxruntime subtracts all penalties from the first score."""
    mask = np.zeros((2, 9), I32)
    mask[:, [1, 4]] = 1
    given = {**PLAIN, "decoder": decoder(), "top_p": 1.0}
    plain, less = (
        ours("Sampling", [IDS, one(4), *[None] * 5, mask], ("y", "s"), presence_penalty=p, **given)[1] for p in (0.0, 2.5)
    )
    np.testing.assert_allclose(plain - less, 2.5 * mask, atol=1e-5)


@pytest.mark.parametrize("early", [0, 1])
def test_scores_before_each_token(oracle: Oracle, early: int) -> None:
    """Also behind the end of one of two batch entries, which goes on from the first beam."""
    names = ("y", "scores", "steps")
    for end in range(9):
        given = {**PLAIN, "decoder": decoder(), "eos_token_id": end, "early_stopping": early}
        found = ours("BeamSearch", beams(2), names, **given)
        expected = theirs(oracle, "BeamSearch", beams(2), names, **given)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)
        done = np.flatnonzero((found[2] == 0).all(axis=(1, 2, 3)))
        used = done[0] if len(done) else len(found[2])
        np.testing.assert_allclose(found[2][:used], expected[2][:used], rtol=1e-5, atol=1e-5)


def test_one_beam_without_end_is_the_greedy_search() -> None:
    greedy = ours("GreedySearch", [IDS, one(9)], decoder=decoder(), **PLAIN)[0]
    assert ours("BeamSearch", beams(1, 9), decoder=decoder(), **PLAIN)[0][:, 0].tolist() == greedy.tolist()


def test_an_encoder_masks_padding_in_front_only(oracle: Oracle) -> None:
    encoder, decoder = with_encoder(np.random.default_rng(0), 9, 2, 2, False)
    given = {**PLAIN, "encoder": encoder, "decoder": decoder, "model_type": 1, "decoder_start_token_id": 3}
    ids = np.array([[6, 6, 2, 1], [3, 6, 5, 6]], I32)
    inputs = [ids, *beams(2)[1:]]
    found = ours("BeamSearch", inputs, ("y", "s"), **given)
    masked = ours("BeamSearch", [*inputs, *[None] * 3, np.array([[0, 0, 1, 1], [1, 1, 1, 1]], I32)], ("y", "s"), **given)
    np.testing.assert_array_equal(found[1], masked[1])
    expected = theirs(oracle, "BeamSearch", inputs, ("y", "s"), **given)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "inputs", "given", "message"),
    [("GreedySearch", [IDS, one(3)], {}, "max_length must be above the length of the prompt"),
     ("GreedySearch", [IDS[:, :0], one(3)], {}, "which must be at least 1"),
     ("GreedySearch", [IDS, one(6), None, one(0, F)], {}, "repetition_penalty must be above 0"),
     ("GreedySearch", [IDS, one(6), None, None, np.ones(4, I32)], {}, r"vocab_mask must have the shape \(9,\)"),
     ("GreedySearch", [IDS, one(6)], {"model_type": 1}, "model_type 0"),
     ("GreedySearch", [IDS, one(6)], {"vocab_size": 12}, "at least vocab_size 12"),
     ("Sampling", [IDS, one(6)], {"min_tokens_to_keep": 9}, r"min_tokens_to_keep must be in \[0, 9\)"),
     ("BeamSearch", beams(200), {}, r"num_beams must be in \[1, 128\]"),
     ("BeamSearch", [*beams(2)[:4], one(3), one(1, F)], {}, r"num_return_sequences must be in \[1, num_beams\], got 3"),
     ("BeamSearch", beams(2), {"model_type": 1}, "with an encoder")],
)  # fmt: skip
def test_what_is_refused(name: str, inputs: list[Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        ours(name, inputs, decoder=decoder(), **{**PLAIN, **given})


def test_onnxruntime_refuses_the_same(oracle: Oracle) -> None:
    for inputs in ([IDS, one(3)], [IDS, one(6), None, one(0, F)], [IDS, one(6), None, None, np.ones(4, I32)]):
        with pytest.raises(EngineFailure):
            theirs(oracle, "GreedySearch", inputs, decoder=decoder(), **PLAIN)


def test_other_outputs_of_whisper_and_time_stamps_without_tokens() -> None:
    encoder, decoder = with_encoder(np.random.default_rng(0), 9, 2, 2, True, speech=3)
    inputs = [np.ones((2, 3, 4), F), *beams(2)[1:], *[None] * 4, np.array([[1], [2]], I32)]
    given = {**PLAIN, "encoder": encoder, "decoder": decoder}
    with pytest.raises(OperatorError, match=r"beginning_timestamp_token_id must be in \(0, 9\) with logits_processor 1, got -1"):
        ours("WhisperBeamSearch", [*inputs, one(1)], **given)
    with pytest.raises(OperatorError, match="which only WhisperBeamSearch names"):
        ours("BeamSearch", [*inputs, one(1)], model_type=2, **given)
    with pytest.raises(OperatorError, match="cross_qk and non_speech_probs"):
        ours("WhisperBeamSearch", inputs, ("y", "s", "t", "", "p"), no_speech_token_id=1, **given)


def same(oracle: Oracle, name: str, inputs: list[Any], **given: Any) -> np.ndarray:
    """The sequences, which are those of onnxruntime, with their scores."""
    found, expected = ours(name, inputs, ("y", "s"), **given), theirs(oracle, name, inputs, ("y", "s"), **given)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)
    return found[0]


@pytest.mark.parametrize("past", ["past", "cache"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", [1, 2])
def test_a_decoder_of_open_length_reads_all_tokens(oracle: Oracle, kind: int, whole: bool, past: str) -> None:
    """As in onnxruntime, which also passes caches by their order, whatever their names are."""
    source = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(F) if kind == 2 else IDS
    inputs = [source, *beams(2)[1:]]
    sequences = []
    for tokens in (1, "s"):
        graphs = with_encoder(np.random.default_rng(3), 9, 2, 2, whole or kind == 2, 3 if kind == 2 else 0, tokens, past)
        given = {**PLAIN, "encoder": graphs[0], "decoder": graphs[1], "model_type": kind, "decoder_start_token_id": 3}
        sequences.append(same(oracle, "BeamSearch", inputs, **{**given, "eos_token_id": 1}))
    assert (sequences[0] != sequences[1]).any()


@pytest.mark.parametrize("seed", range(12))
def test_time_stamps_of_whisper(oracle: Oracle, seed: int) -> None:
    """They come in pairs, do not decrease, and the first is one of 51."""
    rng = np.random.default_rng(seed)
    first, size = int(rng.integers(8, 16)), int(rng.integers(20, 40)) + 60 * (seed % 3 == 0)
    encoder, decoder = with_encoder(rng, size, 2, 2, True, speech=3)
    start = rng.integers(0, first, (2, 1 + seed % 3)).astype(I32)
    start[0, -1] = first if seed % 4 == 0 else start[0, -1]
    names = ("no_timestamps", "start_of_lm", "translate", "transcribe", "decoder_start")
    tokens = {f"{n}_token_id": int(rng.integers(0, size)) for n in names}
    given = {"encoder": encoder, "decoder": decoder, "eos_token_id": first // 2, "pad_token_id": first // 2,
             "beginning_timestamp_token_id": first, "model_type": 2, **tokens}  # fmt: skip
    inputs = [rng.standard_normal((2, 3, 4)).astype(F), *beams(3, 12)[1:], *[None] * 4, start]
    plain = ours("WhisperBeamSearch", [*inputs, one(0)], ("y", "s"), **given)[0]
    assert (same(oracle, "WhisperBeamSearch", [*inputs, one(1), None, None, one(1 + seed % 2, F)], **given) != plain).any()
