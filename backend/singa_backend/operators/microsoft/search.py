"""Searches for tokens: they run a decoder, which is a subgraph, for one token after another.

The subgraphs have inputs and outputs of fixed names (see _search.Network); the scores are read on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...devices.namespaces import numpy
from ...errors import OperatorError
from ...ir.graph import Graph
from .._api import Run
from .._flops import unknown
from ..activation import softmax
from ._api import Array, Host, Wanted, Xp, microsoft
from ._search import EncoderDecoder, Gpt2, Network, TimeStamps, TokenRules, checked_lengths, lengths
from .beams import Beams

Choice = Callable[[np.ndarray], np.ndarray]
"""Scores of the next tokens -> the token of each sequence."""


def _continued(
    xp: Xp, run: Run, prompt: np.ndarray, mask: np.ndarray | None, most: int, rules: TokenRules,
    graphs: tuple[Graph | None, Graph], size: int, pad: int, choose: Choice,
) -> Array:  # fmt: skip
    """Append one token after another; one after the end token of a sequence is padding, as that token itself."""
    if prompt.ndim != 2:
        raise OperatorError(f"input_ids must be a matrix, got shape {prompt.shape}", code="SX404")
    checked_lengths(prompt.shape[1], most)
    decoder = Gpt2(Network(xp, run, {}, 1), graphs[0] or graphs[1], graphs[1], size, prompt)
    sequences = np.full((len(prompt), most), pad, np.int32)
    sequences[:, : prompt.shape[1]] = prompt
    ended = np.zeros(len(prompt), bool)
    tokens = ended.astype(np.int32)
    for length in lengths(prompt.shape[1], most):
        first = length == prompt.shape[1]
        scores = decoder.start(mask, pad, 1) if first else decoder.step(tokens, None)
        tokens = choose(rules.apply(scores, sequences[:, :length], first))
        ended |= tokens == rules.eos
        tokens = np.where(ended, pad, tokens).astype(np.int32)
        sequences[:, length] = tokens
        if ended.all():
            break
    return xp.from_host(sequences)


def _only_gpt2(name: str, model_type: int) -> None:
    if model_type != 0:
        raise OperatorError(f"{name} runs decoders of model_type 0 (as GPT-2) only, got {model_type}", code="SX404")


@microsoft("GreedySearch", 1, widen=False)
def greedy_search(
    xp: Xp,
    input_ids: Host[np.ndarray],
    max_length: Host[int],
    min_length: Host[int] = 0,
    repetition_penalty: Host[float] = 1.0,
    vocab_mask: Host[np.ndarray] | None = None,
    prefix_vocab_mask: Host[np.ndarray] | None = None,
    attention_mask: Host[np.ndarray] | None = None,
    *,
    decoder: Graph,
    decoder_start_token_id: int = -1,
    encoder: Graph | None = None,
    eos_token_id: int,
    init_decoder: Graph | None = None,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    vocab_size: int = -1,
    run: Run,
) -> Array:
    """Append the token of the largest score, until each sequence has ended or `max_length` is reached.

    The places after the end of all sequences, which onnxruntime leaves uninitialized, are padding.
    """
    _only_gpt2("GreedySearch", model_type)
    rules = TokenRules(len(input_ids), eos_token_id, repetition_penalty, no_repeat_ngram_size, vocab_mask, prefix_vocab_mask,
                  min_length)  # fmt: skip
    return _continued(xp, run, input_ids, attention_mask, max_length, rules, (init_decoder, decoder), vocab_size, pad_token_id,
                      lambda scores: scores.argmax(axis=1))  # fmt: skip


def uniform_numbers(seed: int) -> Callable[[], float]:
    """A source of numbers in [0, 1): two states of a multiplicative generator (16807, modulus 2^31 - 1) for each.

    It is what the C++ library of GCC does for its default engine, so the draws are those of onnxruntime's packages for Linux.
    """
    modulus, state = 2**31 - 1, seed % (2**31 - 1) or 1

    def state_after() -> int:
        nonlocal state
        state = state * 16807 % modulus
        return state - 1

    def number() -> float:
        low = state_after()
        return (low + state_after() * float(modulus - 1)) / float(modulus - 1) ** 2

    return number


def nucleus(scores: np.ndarray, top_p: float, filtered: float, keep: int, custom: bool) -> np.ndarray:
    """Set to `filtered` the scores of the tokens that are not among the most probable ones with the sum `top_p`.

    Args:
        scores: of the next tokens, float32.
        top_p: the sum of probabilities; the token that reaches it is kept.
        filtered: the score of a token that is not drawn.
        keep: how many tokens are kept at least; the custom form does not read it, and keeps one.
        custom: add from the most probable token on, not from the least one.
    """
    size, y = scores.shape[1], scores.copy()
    order = np.argsort(-scores if custom else scores, axis=1, kind="stable")
    sums = softmax(numpy, np.take_along_axis(scores, order, axis=1)).cumsum(axis=1, dtype=np.float32)
    if custom:
        row, place = np.nonzero(sums[:, : size - 1] > np.float32(top_p))
        place = place + 1
    else:
        row, place = np.nonzero(sums[:, : max(size - keep, 1)] <= np.float32(1) - np.float32(top_p))
    y[row, order[row, place]] = filtered
    return y


def drawn(scores: np.ndarray, number: Callable[[], float]) -> np.ndarray:
    """Draw a token of each row: the place of a number among the running sums of the probabilities."""
    tokens = []
    for row in scores:
        weights = np.where(np.isfinite(row), np.exp(row.astype(np.float64) - float(row.max())), 0)
        sums = weights.cumsum()
        tokens.append(min(int(np.searchsorted(sums, number() * sums[-1], side="right")), len(row) - 1))
    return np.array(tokens)


@microsoft("Sampling", 1, widen=False)
def sampling(
    xp: Xp,
    input_ids: Host[np.ndarray],
    max_length: Host[int],
    min_length: Host[int] = 0,
    repetition_penalty: Host[float] = 1.0,
    vocab_mask: Host[np.ndarray] | None = None,
    prefix_vocab_mask: Host[np.ndarray] | None = None,
    attention_mask: Host[np.ndarray] | None = None,
    presence_mask: Host[np.ndarray] | None = None,
    seed: Host[int] = 0,
    *,
    custom: int = 0,
    decoder: Graph,
    decoder_start_token_id: int = -1,
    encoder: Graph | None = None,
    eos_token_id: int,
    filter_value: float = -1e20,
    init_decoder: Graph | None = None,
    min_tokens_to_keep: int = 0,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    presence_penalty: float = 0.0,
    temperature: float = 1.0,
    top_p: float = 0.0,
    vocab_size: int = -1,
    run: Run,
) -> tuple[Array, Array]:
    """Draw tokens of the smallest set whose probabilities have the sum `top_p`; `seed` and the scores decide the draws.

    The second result, which onnxruntime's CPU kernel does not compute, are the filtered scores before the last draw.
    """
    _only_gpt2("Sampling", model_type)
    rules = TokenRules(len(input_ids), eos_token_id, repetition_penalty, no_repeat_ngram_size, vocab_mask, prefix_vocab_mask,
                  min_length, temperature, presence_mask, presence_penalty)  # fmt: skip
    number, last = uniform_numbers(seed), np.zeros((0, 0), np.float32)

    def choose(scores: np.ndarray) -> np.ndarray:
        nonlocal last
        if not 0 <= min_tokens_to_keep < scores.shape[1]:
            raise OperatorError(f"min_tokens_to_keep must be in [0, {scores.shape[1]}), got {min_tokens_to_keep}", code="SX404")
        last = nucleus(scores, top_p, filter_value, min_tokens_to_keep, bool(custom))
        return drawn(last, number)

    tokens = _continued(xp, run, input_ids, attention_mask, max_length, rules, (init_decoder, decoder), vocab_size, pad_token_id,
                        choose)  # fmt: skip
    return tokens, xp.from_host(last)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """The logarithms of the probabilities of each row."""
    moved = scores - scores.max(axis=1, keepdims=True)
    return np.asarray(moved - np.log(np.exp(moved).sum(axis=1, keepdims=True)))


def _network(
    xp: Xp, run: Run, model_type: int, graphs: tuple[Graph | None, Graph | None, Graph], ids: np.ndarray,
    begin: np.ndarray | None, start: int, size: int,
) -> Gpt2 | EncoderDecoder:  # fmt: skip
    """The runs of a decoder of this type; the prompt of one with an encoder is its start token, or `begin`."""
    encoder, first, decoder = graphs
    axes = 3 if model_type == 2 else 2
    if ids.ndim != axes:
        raise OperatorError(f"input_ids must have {axes} axes, got shape {ids.shape}", code="SX404")
    if model_type == 0:
        return Gpt2(Network(xp, run, {}, 1), first or decoder, decoder, size, ids)
    if model_type not in (1, 2) or encoder is None:
        raise OperatorError(
            f"model_type must be 0 (as GPT-2), or 1 (as T5) or 2 (as Whisper) with an encoder, got {model_type}", code="SX404"
        )
    if start < 0 and (begin is None or model_type == 1):
        raise OperatorError("decoder_start_token_id must be at least 0 for a decoder with an encoder", code="SX404")
    prompt = np.full((len(ids), 1), start, np.int32)
    if begin is not None and model_type == 2:
        prompt = begin
        if prompt.ndim != 2 or len(prompt) != len(ids):
            raise OperatorError(f"decoder_input_ids must have {len(ids)} rows, got shape {prompt.shape}", code="SX404")
    return EncoderDecoder(Network(xp, run, {}, 0), encoder, decoder, size, ids, prompt)


@microsoft("BeamSearch", 1, widen=False)
def beam_search(
    xp: Xp,
    input_ids: Host[np.ndarray],
    max_length: Host[int],
    min_length: Host[int] = 0,
    num_beams: Host[int] = 1,
    num_return_sequences: Host[int] = 1,
    length_penalty: Host[float] = 1.0,
    repetition_penalty: Host[float] = 1.0,
    vocab_mask: Host[np.ndarray] | None = None,
    prefix_vocab_mask: Host[np.ndarray] | None = None,
    attention_mask: Host[np.ndarray] | None = None,
    decoder_input_ids: Host[np.ndarray] | None = None,
    logits_processor: Host[int] = 0,
    *,
    decoder: Graph,
    decoder_start_token_id: int = -1,
    early_stopping: int = 0,
    encoder: Graph | None = None,
    eos_token_id: int,
    init_decoder: Graph | None = None,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    vocab_size: int = -1,
    run: Run,
    wanted: Wanted,
) -> tuple[Array | None, ...]:
    """Go on with the `num_beams` sequences of the largest sums of log-probabilities, and return the best that have ended.

    The score of a sequence is the sum over the power `length_penalty` of its length, the prompt included.
    """
    model = _network(xp, run, model_type, (encoder, init_decoder, decoder), input_ids, decoder_input_ids,
                     decoder_start_token_id, vocab_size)  # fmt: skip
    if model_type == 2 and logits_processor == 1:
        raise OperatorError(
            "logits_processor 1 needs the tokens of time stamps, which only WhisperBeamSearch names", code="SX404"
        )
    rules = TokenRules(len(model.prompt), eos_token_id, repetition_penalty, no_repeat_ngram_size, vocab_mask,
                  prefix_vocab_mask, min_length)  # fmt: skip
    beams = Beams(model.prompt, num_beams, length_penalty, bool(early_stopping), [eos_token_id], pad_token_id)
    return _beams_searched(xp, model, attention_mask, rules, beams, num_return_sequences, max_length, any(wanted[2:3]))


def _beams_searched(
    xp: Xp,
    model: Gpt2 | EncoderDecoder,
    mask: np.ndarray | None,
    rules: TokenRules,
    beams: Beams,
    count: int,
    most: int,
    kept: bool,
) -> tuple[Array | None, ...]:
    """Search; the best sequences, their scores, and the scores before each token if they are kept."""
    if not 1 <= count <= beams.beams:
        what = f"num_return_sequences must be in [1, num_beams], got {count}, and num_beams is {beams.beams}"
        raise OperatorError(what, code="SX404")
    start = model.prompt.shape[1]
    checked_lengths(start, most)
    steps: list[np.ndarray] = []
    tokens = rows = np.zeros(0, np.int32)
    for length in lengths(start, most):
        logits = model.start(mask, beams.pad, beams.beams) if length == start else model.step(tokens, rows)
        scores = rules.apply(log_softmax(logits), beams.sequences, length == start) + beams.sums.reshape(-1, 1)
        steps += [scores] if kept else []
        tokens, rows = beams.advance(scores)
        if beams.done.all():
            break
    sequences, final = beams.finish(count, most)
    shape = (most - start, beams.batch, beams.beams, logits.shape[1])
    return xp.from_host(sequences), xp.from_host(final), _stacked(xp, steps, shape)


@microsoft("WhisperBeamSearch", 1, widen=False)
def whisper_beam_search(
    xp: Xp,
    input_ids: Host[np.ndarray],
    max_length: Host[int],
    min_length: Host[int] = 0,
    num_beams: Host[int] = 1,
    num_return_sequences: Host[int] = 1,
    length_penalty: Host[float] = 1.0,
    repetition_penalty: Host[float] = 1.0,
    vocab_mask: Host[np.ndarray] | None = None,
    prefix_vocab_mask: Host[np.ndarray] | None = None,
    attention_mask: Host[np.ndarray] | None = None,
    decoder_input_ids: Host[np.ndarray] | None = None,
    logits_processor: Host[int] = 0,
    cross_qk_layer_head: Host[np.ndarray] | None = None,
    extra_decoding_ids: Host[np.ndarray] | None = None,
    temperature: Host[float] = 1.0,
    *,
    beginning_timestamp_token_id: int | None = None,
    decoder: Graph,
    decoder_output_cross_qk: int | None = None,
    decoder_start_token_id: int = -1,
    early_stopping: int = 0,
    encoder: Graph | None = None,
    eos_token_id: int,
    init_decoder: Graph | None = None,
    model_type: int = 2,
    no_repeat_ngram_size: int = 0,
    no_speech_token_id: int | None = None,
    no_timestamps_token_id: int | None = None,
    pad_token_id: int,
    start_of_lm_token_id: int | None = None,
    transcribe_token_id: int | None = None,
    translate_token_id: int | None = None,
    vocab_size: int = -1,
    run: Run,
    wanted: Wanted,
) -> tuple[Array | None, ...]:
    """As BeamSearch, for a decoder of Whisper: the log-probabilities are divided by `temperature`.

    logits_processor 1 applies the rules for time stamps. The products of the cross attention and the probability of no speech are
    not defined.
    """
    if any(wanted[3:]) or decoder_output_cross_qk:
        raise OperatorError(
            "the outputs cross_qk and non_speech_probs, which onnxruntime computes on CUDA only, are not defined", code="SX404"
        )
    if model_type != 2:
        raise OperatorError(f"model_type must be 2, got {model_type}", code="SX404")
    model = _network(xp, run, model_type, (encoder, None, decoder), input_ids, decoder_input_ids, decoder_start_token_id,
                     vocab_size)  # fmt: skip
    never = tuple(t for t in (no_timestamps_token_id, start_of_lm_token_id) if t is not None)
    begin = tuple(t for t in (decoder_start_token_id, translate_token_id, transcribe_token_id) if t is not None)
    first = -1 if beginning_timestamp_token_id is None else beginning_timestamp_token_id
    times = TimeStamps(eos_token_id, first, never, begin) if logits_processor == 1 else None
    rules = TokenRules(len(model.prompt), eos_token_id, repetition_penalty, no_repeat_ngram_size, vocab_mask, prefix_vocab_mask,
                  min_length, temperature, times=times)  # fmt: skip
    beams = Beams(model.prompt, num_beams, length_penalty, bool(early_stopping), [eos_token_id], pad_token_id)
    found = _beams_searched(xp, model, attention_mask, rules, beams, num_return_sequences, max_length, any(wanted[2:3]))
    return (*found, None, None)


def _stacked(xp: Xp, steps: list[np.ndarray], shape: tuple[int, ...]) -> Array | None:
    """The scores before each token, zeros after the end of all sequences; None if they were not kept."""
    if not steps:
        return None
    kept = np.zeros(shape, np.float32)
    kept[: len(steps)] = np.stack(steps).reshape(len(steps), *shape[1:])
    return xp.from_host(kept)


greedy_search.no_gradient("integer")
sampling.no_gradient("undefined")
beam_search.no_gradient("undefined")
whisper_beam_search.no_gradient("undefined")

for _search in (greedy_search, sampling, beam_search, whisper_beam_search):
    _search.flops(unknown)
