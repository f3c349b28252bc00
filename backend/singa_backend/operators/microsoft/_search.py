"""Parts of the searches for tokens: the runs of a decoder with its caches, and what changes the scores of the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import limits
from ...devices import namespaces
from ...devices.namespaces import Xp
from ...errors import OperatorError
from ...ir.graph import Graph
from ...proto.values import Value
from .tokens import ngram_repeat_block

LOWEST = np.finfo(np.float32).min
"""The score of a token that is not allowed."""

LONGEST = 4096
"""The largest length that onnxruntime allows."""

_HIDDEN = "encoder_hidden_states"

_LATEST = 50
"""The number of the largest time stamp that may be the first one."""


@dataclass
class Network:
    """The subgraphs of a search, which take values by their names.

    Attributes:
        state: the values of the inputs by their names.
        rows: the axis of the sequences in the caches that a run extends.
        grown: the inputs that are such caches.
    """

    xp: Xp
    run: Callable[..., list[Any]]
    state: dict[str, Any]
    rows: int
    grown: set[str] = field(default_factory=set)

    def outputs(self, graph: Graph, links: Mapping[str, str]) -> dict[str, Any]:
        """Run a subgraph, and keep its caches: `links` has the input of the next run for each output."""
        missing = [v.name for v in graph.inputs if v.name not in self.state]
        if missing:
            known = ", ".join(self.state)
            raise OperatorError(f"the graph {graph.name!r} takes {missing[0]!r}, but the search has only {known}", code="SX407")
        made = self.run(graph, *(self.state[v.name] for v in graph.inputs))
        found = dict(zip((v.name for v in graph.outputs), made, strict=True))
        self.state |= {links[name]: value for name, value in found.items() if name in links}
        return found

    def scores(self, graph: Graph, links: Mapping[str, str], size: int) -> np.ndarray:
        """Run a subgraph; the logits after the last token of each sequence, of the first `size` tokens (all for -1)."""
        return self.last(graph, self.outputs(graph, links), size)

    def last(self, graph: Graph, found: Mapping[str, Any], size: int) -> np.ndarray:
        """The logits among these outputs, behind the last token of each sequence."""
        if "logits" not in found:
            raise OperatorError(f"the graph {graph.name!r} must have the output 'logits', got {', '.join(found)}", code="SX407")
        logits = self.xp.to_host(found["logits"])
        if logits.ndim != 3 or size > logits.shape[2]:
            raise OperatorError(
                f"logits must have 3 axes, the last of at least vocab_size {size}, got shape {logits.shape}", code="SX404"
            )
        return np.asarray(logits[:, -1, : size if size > 0 else None], np.float32)

    def put(self, name: str, value: np.ndarray) -> None:
        """Set an input from an array of the host."""
        self.state[name] = self.xp.from_host(np.ascontiguousarray(value))

    def select(self, rows: np.ndarray) -> None:
        """Let each sequence go on with the caches of another one."""
        if (rows == np.arange(len(rows))).all():
            return
        chosen = self.xp.from_host(rows)
        for name in self.grown:
            self.state[name] = self.xp.take(self.state[name], chosen, axis=self.rows)


def linked(presents: Sequence[Value], pasts: Sequence[Value]) -> dict[str, str]:
    """The input that an output is in the next run: past_X of present_X; by their order, as in onnxruntime, if names differ."""
    links = {v.name: f"past_{v.name.removeprefix('present_')}" for v in presents}
    if not set(links.values()) <= {v.name for v in pasts}:
        links = {present.name: past.name for present, past in zip(presents, pasts, strict=False)}
    return links


def empty_cache(xp: Xp, value: Value, rows: int, axis: int, length: int) -> Any:
    """A cache without tokens, of the declared heads and sizes.

    Args:
        xp: the namespace of the caches.
        value: the input of the subgraph.
        rows: the number of sequences.
        axis: the axis of the sequences.
        length: the axis of the tokens.
    """
    shape = [None if d is None or not isinstance(d, int) else d for d in value.shape or ()]
    if len(shape) > max(axis, length):
        shape[axis], shape[length] = rows, 0
    if not shape or None in shape or value.dtype is None:
        raise OperatorError(f"the input {value.name!r} must declare its number of heads and their size", code="SX404")
    return xp.zeros(tuple(shape), value.dtype)


def attended(ids: np.ndarray, mask: np.ndarray | None, pad: int, leading: bool = False) -> np.ndarray:
    """The attention mask: 1 for each token that is not padding, or not `leading` padding, unless a mask is given."""
    if mask is None:
        tokens = ids != pad
        return (np.logical_or.accumulate(tokens, axis=1) if leading else tokens).astype(np.int32)
    if mask.shape != ids.shape:
        raise OperatorError(f"attention_mask must have the shape of input_ids {ids.shape}, got {mask.shape}", code="SX404")
    return mask.astype(np.int32)


class Gpt2:
    """The runs of a decoder that takes input_ids, position_ids, attention_mask and past_0, past_1, ..."""

    def __init__(self, network: Network, first: Graph, decoder: Graph, size: int, prompt: np.ndarray) -> None:
        self.network, self.first, self.decoder, self.size, self.prompt = network, first, decoder, size, prompt
        pasts = [v for v in decoder.declared_inputs if v.name not in ("input_ids", "position_ids", "attention_mask")]
        self.links = linked([v for v in decoder.declared_outputs if v.name != "logits"], pasts)
        network.grown = {*self.links.values()}

    def start(self, mask: np.ndarray | None, pad: int, beams: int) -> np.ndarray:
        """Run the prompt for each beam: the scores of the tokens behind it."""
        net, ids = self.network, self.prompt
        tokens = ids != pad
        self.mask = attended(ids, mask, pad).repeat(beams, axis=0)
        places = np.where(tokens, tokens.cumsum(axis=1) - 1, 0).astype(np.int32)
        self.count = tokens.sum(axis=1, dtype=np.int32).repeat(beams)
        net.put("input_ids", ids.repeat(beams, axis=0))
        net.put("position_ids", places.repeat(beams, axis=0))
        net.put("attention_mask", self.mask)
        for value in self.first.declared_inputs:
            if value.name in net.grown:
                net.state[value.name] = empty_cache(net.xp, value, len(self.mask), 1, 3)
        return net.scores(self.first, self.links, self.size)

    def step(self, tokens: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        """Run one token of each sequence, with the caches of `rows`: the scores of the tokens behind it."""
        net = self.network
        if rows is not None:
            net.select(rows)
        self.mask = np.concatenate([self.mask, np.ones((len(self.mask), 1), np.int32)], axis=1)
        net.put("input_ids", tokens[:, None].astype(np.int32))
        net.put("position_ids", self.count[:, None])
        net.put("attention_mask", self.mask)
        self.count = self.count + 1
        return net.scores(self.decoder, self.links, self.size)


class EncoderDecoder:
    """The runs of an encoder, and of a decoder that takes input_ids and the caches of its own and of the encoder's tokens.

    A decoder takes the last token of each sequence if it declares one token, otherwise all tokens, as in onnxruntime.
    """

    def __init__(
        self, network: Network, encoder: Graph, decoder: Graph, size: int, source: np.ndarray, prompt: np.ndarray
    ) -> None:
        self.network, self.encoder, self.decoder, self.size = network, encoder, decoder, size
        self.source, self.prompt = source, prompt
        ids = next((v for v in decoder.declared_inputs if v.name == "input_ids"), None)
        self.whole = ids is not None and ids.shape is not None and len(ids.shape) == 2 and ids.shape[1] != 1
        pasts = [v for v in decoder.declared_inputs if v.name not in ("input_ids", "encoder_attention_mask", _HIDDEN)]
        own = [v for v in decoder.declared_outputs if v.name != "logits"]
        self.links = linked(own, pasts)
        network.grown = {*self.links.values()}
        first = any(v.name == "logits" for v in encoder.outputs)  # the encoder runs the first tokens
        others = pasts if first else [v for v in pasts if v.name not in network.grown]
        self.encoder_links = linked([v for v in encoder.declared_outputs if v.name not in ("logits", _HIDDEN)], others)

    def start(self, mask: np.ndarray | None, pad: int, beams: int) -> np.ndarray:
        """Run the encoder, which may run the decoder's first tokens too: the scores of the tokens behind them."""
        net = self.network
        net.put("encoder_input_ids", self.source)
        net.put("decoder_input_ids", self.prompt)
        if self.source.ndim == 2:
            net.put("encoder_attention_mask", attended(self.source, mask, pad, leading=True))
        self.sequences = self.prompt.repeat(beams, axis=0)
        found = net.outputs(self.encoder, self.encoder_links)
        net.state |= {name: found[name] for name in (_HIDDEN,) if name in found}
        net.state = {name: net.xp.repeat(value, beams, axis=0) for name, value in net.state.items()}
        if "logits" in found:
            return net.last(self.encoder, found, self.size).repeat(beams, axis=0)
        net.put("input_ids", self.sequences)
        for value in self.decoder.declared_inputs:
            if value.name in net.grown:
                net.state[value.name] = empty_cache(net.xp, value, len(self.sequences), 0, 2)
        return net.scores(self.decoder, self.links, self.size)

    def step(self, tokens: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        """Run one token of each sequence, with the caches of `rows`: the scores of the tokens behind it."""
        new = tokens[:, None].astype(np.int32)
        if rows is not None:
            self.network.select(rows)
            self.sequences = self.sequences[rows]
        self.sequences = np.concatenate([self.sequences, new], axis=1)
        self.network.put("input_ids", self.sequences if self.whole else new)
        return self.network.scores(self.decoder, self.links, self.size)


@dataclass(frozen=True)
class TimeStamps:
    """The rules for the time stamps of Whisper: they come in pairs, do not decrease, and begin early.

    Attributes:
        end: the token that ends a sequence; texts have smaller ones.
        first: the first time stamp; all larger tokens are time stamps.
        never: tokens that are not allowed.
        begin: tokens that are not allowed after the first time stamp and another token.
    """

    end: int
    first: int
    never: tuple[int, ...]
    begin: tuple[int, ...]

    def apply(self, scores: np.ndarray, sequences: np.ndarray) -> None:
        """Change the scores of the tokens that may follow these sequences, in place."""
        for row, tokens in zip(scores, sequences, strict=True):
            stamps = np.flatnonzero(tokens >= self.first)
            begun = int(stamps[0]) + 1 if len(stamps) else len(tokens)
            banned = self.never + (self.begin if len(tokens) > begun else ())
            row[[t for t in banned if 0 <= t < len(row)]] = LOWEST
            last = bool(tokens[-1] >= self.first)
            paired = len(tokens) <= begun or bool(tokens[-2] >= self.first)
            if last and paired:
                row[self.first :] = LOWEST
            elif last:
                row[: self.end] = LOWEST
            if len(stamps):
                row[self.first : tokens[stamps[-1]] + (not last or paired)] = LOWEST
            if len(tokens) == begun:
                row[self.first + _LATEST + 1 :] = LOWEST
            possible = row[self.first :][row[self.first :] > LOWEST]
            if len(possible) and np.logaddexp.reduce(possible) > row[: self.first].max():
                row[: self.first] = LOWEST


@dataclass
class TokenRules:
    """What changes the scores of the next tokens; `min_length` counts the tokens of the prompt."""

    batch: int
    eos: int
    repetition: float = 1.0
    ngram: int = 0
    vocab: np.ndarray | None = None
    prefix: np.ndarray | None = None
    min_length: int = 0
    temperature: float = 1.0
    presence: np.ndarray | None = None
    penalty: float = 0.0
    times: TimeStamps | None = None

    def check(self, size: int) -> None:
        """Raise if the masks do not fit the number of tokens."""
        if not self.repetition > 0:
            raise OperatorError(f"repetition_penalty must be above 0, got {self.repetition}", code="SX404")
        if self.times is not None and not 0 < self.times.first < size:
            what = f"beginning_timestamp_token_id must be in (0, {size}) with logits_processor 1, got {self.times.first}"
            raise OperatorError(what, code="SX404")
        forms = {"vocab_mask": (self.vocab, (size,)), "prefix_vocab_mask": (self.prefix, (self.batch, size)),
                 "presence_mask": (self.presence, (self.batch, size))}  # fmt: skip
        for name, (mask, shape) in forms.items():
            if mask is not None and mask.shape != shape:
                raise OperatorError(f"{name} must have the shape {shape}, got {mask.shape}", code="SX404")

    def apply(self, scores: np.ndarray, sequences: np.ndarray, first: bool) -> np.ndarray:
        """Change the scores of the tokens that may follow these sequences."""
        if first:
            self.check(scores.shape[1])
        if self.repetition != 1:
            seen = np.zeros(scores.shape, bool)
            row, place = np.nonzero((sequences >= 0) & (sequences < scores.shape[1]))
            seen[row, sequences[row, place]] = True
            factor = np.float32(self.repetition)
            scores = np.where(seen, np.where(scores < 0, scores * factor, scores / factor), scores)
        scores = scores.copy()
        if self.ngram > 0:
            blocked = ngram_repeat_block(namespaces.numpy, sequences, np.zeros_like(scores), ngram_size=self.ngram) < 0
            scores[blocked] = LOWEST
        if self.vocab is not None:
            scores[:, self.vocab == 0] = LOWEST
        if self.prefix is not None and first:
            scores[np.repeat(self.prefix == 0, len(scores) // self.batch, axis=0)] = LOWEST
        if sequences.shape[1] < self.min_length and 0 <= self.eos < scores.shape[1]:
            scores[:, self.eos] = LOWEST
        if self.temperature > 0 and self.temperature != 1:
            scores = scores / np.float32(self.temperature)
        if self.presence is not None:
            scores = scores - np.float32(self.penalty) * self.presence.astype(np.float32)
        if self.times is not None:
            self.times.apply(scores, sequences)
        return scores


def checked_lengths(length: int, most: int) -> None:
    """Raise if a search from a prompt of `length` tokens to `most` is not possible."""
    if length < 1 or not length < most <= LONGEST:
        raise OperatorError(
            f"max_length must be above the length of the prompt, which must be at least 1, and at most {LONGEST}, "
            f"got {most} for {length} tokens",
            code="SX404",
        )


def lengths(start: int, most: int) -> Iterator[int]:
    """The lengths before each token that a search appends."""
    return (start + i for i in limits.rounds(most - start))
