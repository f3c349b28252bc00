"""`Generator`: text from a folder with a model, its configuration and its tokenizer."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from singa_backend.backend import SingaBackend, SingaRep, prepare_rewritten
from singa_backend.devices.device import DeviceLike
from singa_backend.errors import InvalidInput
from singa_backend.limits import Budget, Flag, Limits, exhausted, spend
from singa_backend.rendering import TEXT, printable

from .chat import ChatTemplate
from .config import read_folder, unfit
from .decoders import DecoderFile, Decoding, run_within, unsupported
from .last_rows import keep_last_row
from .options import SEQUENCES, SearchOptions, refused
from .processors import SequenceSpan
from .search import Sampler
from .tokens import TOKENIZER, Characters, TextTokenizer, TextWriter

if TYPE_CHECKING:
    from singa_backend.adapters.files import AdapterSource

Prompt = str | Sequence[int]
"""A prompt: a text, or its tokens."""


@dataclass(frozen=True)
class GeneratedText:
    """A sequence that continues a prompt.

    Attributes:
        prompt: the index of the prompt.
        text: the new text, without the text or the token that ended it; an incomplete character at the end is left out.
        tokens: the new tokens, without the one that ended the sequence.
        end: why it ended: "end" (a token that ends a sequence), "stop" (a text of `stop`), "length" (the maximum number of
            tokens) or "context" (the number of tokens that the model can attend to).
    """

    prompt: int
    text: str
    tokens: tuple[int, ...]
    end: str


@dataclass(frozen=True)
class GeneratedTexts:
    """The sequences of a call of `Generator.generate`, and its times.

    Attributes:
        texts: the sequences; those of one prompt follow each other.
        prompt_tokens: the number of tokens of all prompts.
        new_tokens: the number of new tokens, with those that ended a sequence.
        prompt_seconds: the time of the runs of the prompts, each with the choice of its first token.
        decode_seconds: the time of all later runs, and of the search.
        tokens_per_second: the number of tokens that later runs made, divided by their time; None without one.
        seed: the seed of the draws; None if the search is greedy.
    """

    texts: tuple[GeneratedText, ...]
    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    decode_seconds: float
    tokens_per_second: float | None
    seed: int | None


@dataclass(eq=False)
class _Row:
    """A sequence while it grows.

    Attributes:
        index: of the sequence.
        prompt: the index of its prompt.
        tokens: those that the decoder has read or will read: the prompt, and the new ones.
        start: the number of tokens before the new ones.
        sampler: chooses the next token.
        writer: its text.
        most: the maximum number of new tokens.
        reason: why that number ends it: "length" or "context".
        end: why it ended; "" before.
        ended: whether the last token is one that ends a sequence.
    """

    index: int
    prompt: int
    tokens: list[int]
    start: int
    sampler: Sampler
    writer: TextWriter
    most: int
    reason: str
    end: str = ""
    ended: bool = False

    @property
    def new(self) -> int:
        return len(self.tokens) - self.start

    def add(self, token: int, end: Sequence[int]) -> str:
        """Append a token; returns the text that is ready."""
        self.tokens.append(token)
        if token in end:
            self.end, self.ended = "end", True
            return self.writer.finish()
        piece = self.writer.add(token)
        if self.writer.stopped:
            self.end = "stop"
        elif self.new >= self.most:
            self.end = self.reason
            piece += self.writer.finish()
        return piece

    def result(self) -> GeneratedText:
        new = self.tokens[self.start : len(self.tokens) - self.ended]
        return GeneratedText(self.prompt, self.writer.text, tuple(new), self.end)


@dataclass(eq=False)
class _Clock:
    """The times of a call: `prompt` and `decode` in seconds, and the tokens that later runs made."""

    prompt: float = 0.0
    decode: float = 0.0
    tokens: int = 0


@dataclass(eq=False)
class _Call:
    """A call of `generate` or `stream`, after its arguments were checked."""

    options: SearchOptions
    rows: list[_Row]
    sources: list[list[int]]
    budget: Budget
    clock: _Clock = field(default_factory=_Clock)


class Generator:
    """Generates text by a folder with a model, its configuration and its tokenizer.

    The folder is one of onnxruntime-genai (genai_config.json) or of Optimum (config.json, and the files model.onnx,
    decoder_model_merged.onnx, or decoder_model.onnx and decoder_with_past_model.onnx; encoder_model.onnx for T5), with
    tokenizer.json.  Nothing is downloaded, and the paths in a configuration must be within the folder.

    Args:
        folder: the path of the folder.
        device: the device, as for `prepare`.
        adapter: an adapter of the decoder, or several, whose changes add: an `Adapter`, or the path of its file or folder.
        **options: other options of `prepare`, such as `threads`, `precision` and `limits`.

    Attributes:
        folder: the path of the folder.
        load_seconds: the time that it took to read the folder and to prepare the model.

    Raises:
        InvalidInput: the folder or its configuration is not usable (SX374), or its tokenizer (SX375), or an adapter cannot be
            read, or does not fit the decoder (SX970 to SX983).
        UnsupportedModel: the model is not a decoder of text (SX210), or has an operator that is not supported.
        InvalidModel: a model of the folder violates ONNX's rules.
        MissingDependency: the library tokenizers is not installed (SX700).
        UnknownKeyword: a keyword is not one of `prepare`.

    Example:
        generator = sonnx.Generator("llama-int4")
        print(generator.generate("The sea is", max_new_tokens=20).texts[0].text)
        for piece in generator.stream("The sea is", temperature=0.8, seed=1):
            print(piece, end="", flush=True)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: DeviceLike = "CPU",
        *,
        adapter: AdapterSource | Sequence[AdapterSource] | None = None,
        **options: Any,
    ) -> None:
        started = time.perf_counter()
        limits = options.get("limits") or Limits()
        with spend(Budget(limits, options.get("cancel"))):
            self._folder = read_folder(folder)
            SearchOptions().completed(self._folder)  # the defaults are read before the model
            self._tokenizer = TextTokenizer(self._folder.path)
        self.folder = self._folder.path
        self._limits = limits
        found = self._folder
        self._first = self._decoder(found.decoder, device, {"adapter": adapter, **options})
        self._later = self._first
        if found.continued is not None:
            self._later = self._decoder(found.continued, device, {"adapter": adapter, **options})
        places = [n for n in (self._folder.context, self._first.places, self._later.places) if n is not None]
        self._folder = replace(self._folder, context=min(places, default=None))
        self._encoder: SingaRep | None = None
        if found.encoder is not None:
            self._encoder = SingaBackend.prepare(found.encoder, device, **options)
            self._check_encoder(self._encoder, found.encoder.name)
        elif self._first.hidden:
            what = f"{found.decoder.name} needs the output of encoder_model.onnx"
            raise unfit(f"{found.path}/config.json: is_encoder_decoder must be true: {what}")
        self._chat: ChatTemplate | None = None
        self.load_seconds = time.perf_counter() - started

    def _decoder(self, path: Path, device: DeviceLike, options: Mapping[str, Any]) -> DecoderFile:
        """A decoder that computes the logits of the last token only."""
        logits = self._folder.names.logits
        rep = prepare_rewritten(path, device, lambda model, _: keep_last_row(model, logits), **options)
        for text in rep.graph.warnings:
            warnings.warn(printable(text, TEXT), UserWarning, stacklevel=3)
        return DecoderFile.of(rep, self._folder, path.name)

    def _check_encoder(self, rep: SingaRep, file: str) -> None:
        """Refuse an encoder whose inputs are not tokens and a mask."""
        others = [str(v) for v in rep.inputs if v.name not in ("input_ids", "attention_mask")]
        if others or not any(v.name == "input_ids" for v in rep.inputs):
            raise unsupported(
                f"{file} must have the inputs input_ids and attention_mask, and has {', '.join(map(str, rep.inputs))}"
            )
        if self._folder.start is None:
            raise unfit(f"{self._folder.path}/config.json: decoder_start_token_id must be a token, and is missing")

    # --- public

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        special_tokens: bool = True,
        cancel: Flag | None = None,
        **search: Any,
    ) -> GeneratedTexts:
        """Continue one prompt or several.

        Args:
            prompts: a text, a list of tokens, or a list of texts and lists of tokens.
            special_tokens: whether the tokenizer adds its special tokens to a text, such as one that begins it.
            cancel: a flag, such as a `threading.Event`; if it is set, the call ends before the next run.  The deadline of the
                limits bounds the whole call, from its begin.
            **search: the search.  Options that are absent or None have the values of the folder's configuration.
                `max_new_tokens` and `max_length` (with the prompt) bound the length, by default to 256 new tokens;
                `min_new_tokens` and `min_length` exclude the tokens that end a sequence before.  `sample=True` draws tokens,
                as do `temperature` above 0, `top_k`, `top_p`, `min_p`, `typical_p`, `top_h`, `epsilon_cutoff` and `eta_cutoff`;
                `sample=False` and `temperature=0` take the most likely one.  `seed` makes draws reproducible.
                As in transformers: `repetition_penalty`, `no_repeat_ngram_size`, `encoder_repetition_penalty`,
                `encoder_no_repeat_ngram_size`, `bad_words_ids`, `sequence_bias`, `suppress_tokens`, `begin_suppress_tokens`,
                `forced_bos_token_id`, `forced_eos_token_id`, `exponential_decay_length_penalty`, `remove_invalid_values` and
                `renormalize_logits`.
                `num_return_sequences`: the number of sequences for each prompt.  `num_beams`: the number of sequences that a beam
                search follows, with `length_penalty` and `early_stopping` as in transformers.  `end_tokens`: the tokens that end
                a sequence.
                `stop`: a text or a list of texts that end it; they may contain special tokens, such as "<|im_end|>".

        Returns:
            The sequences and their times.

        Raises:
            InvalidInput: a prompt is empty or has unknown tokens (SX375), or an option is out of its bounds or has no effect
                (SX390), or a token of the folder's configuration is not one of the model (SX374).
            UnknownKeyword: a keyword is not one of these.
            OperatorError: the model cannot compute with these tokens, or returns NaN (SX410).
            ResourceExhausted: a limit was reached, the deadline has passed (SX608), or the flag was set (SX609).
        """
        call = self._call(_listed(prompts), special_tokens, cancel, search, "generate")
        for _ in self._pieces(call):
            pass
        return _gathered(call)

    def stream(self, prompt: Prompt, *, special_tokens: bool = True, cancel: Flag | None = None, **search: Any) -> Iterator[str]:
        """Continue a prompt, and return the text in parts as it is made.

        A character that several tokens make up is returned whole, and a text that `stop` may begin with is held back until it
        is known not to be one.

        Args:
            prompt: a text, or a list of tokens.
            special_tokens: as for `generate`.
            cancel: as for `generate`; the time between two parts counts too.
            **search: as for `generate`, with one sequence.

        Returns:
            An iterator of texts that are not empty; together they are the text of `generate`.

        Raises:
            InvalidInput: as for `generate`; also if several sequences are requested (SX390).
            UnknownKeyword: as for `generate`.
            OperatorError: as for `generate`.
            ResourceExhausted: as for `generate`.
        """
        given = _listed(prompt) or [prompt]
        if len(given) > 1:
            raise refused(f"a stream continues one prompt, got {len(given)}: call generate, or stream for each")
        call = self._call(given, special_tokens, cancel, {"num_return_sequences": 1, **search}, "stream")
        if len(call.rows) > 1:
            raise refused(f"num_return_sequences must be 1 for a stream, got {len(call.rows)}")
        return (piece for _, piece in self._pieces(call) if piece)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation, by the chat template of the folder.

        The template runs in a sandbox of jinja2, in a child process with bounded memory and time.  The prompt contains the
        special tokens: pass it with `special_tokens=False`.

        Args:
            messages: dicts with the texts `role`, such as "user", and `content`, which a message with `tool_calls` may lack.
            tools: the tools that the model may call: dicts of their JSON schemas.  A folder with a template named "tool_use" uses
                it for them.
            documents: dicts of the documents that the answer may quote.
            **variables: other variables of the template, such as `enable_thinking=False`.

        Returns:
            The text, up to where the answer begins.

        Raises:
            InvalidInput: the folder has no template, or it refuses the messages, or a value is not one of JSON (SX391).
            ResourceExhausted: the template needs too much memory or time (SX600), or the deadline has passed (SX608).
            MissingDependency: jinja2 is not installed (SX700).
        """
        with spend(Budget(self._limits)):
            self._chat = self._chat or ChatTemplate(self.folder)
            return self._chat.text(messages, tools, documents, variables)

    # --- a call

    def _call(self, prompts: Sequence[Prompt], special: bool, cancel: Flag | None, search: Mapping[str, Any], name: str) -> _Call:
        """Check the arguments of a call; nothing has run yet."""
        folder = self._folder
        options = SearchOptions.of(search, name).completed(folder)
        count = options.num_return_sequences or 1
        wide = max(count, options.beams)
        if not prompts or len(prompts) * wide > SEQUENCES:
            raise refused(f"there must be 1 to {SEQUENCES} sequences, got {len(prompts) * wide}")
        if options.beams > 1 and 1 in (self._first.batch, self._later.batch):
            raise refused(f"num_beams must be 1 for a model whose batch is 1, got {options.beams}")
        size = folder.vocabulary
        if "end_tokens" in search and size is not None and (far := [t for t in options.end_tokens or () if t >= size]):
            raise refused(f"end_tokens must be tokens of the model, integers from 0 to {size - 1}, got {far[0]}")
        budget = Budget(self._limits, cancel)
        sources = [self._tokens(p, special) for p in prompts]
        end = tuple(map(int, options.end_tokens or ()))
        rows: list[_Row] = []
        for i, source in enumerate(sources):
            tokens = source if self._encoder is None else [folder.start or 0]
            low, most, reason = options.lengths(len(tokens), folder)
            if most > self._limits.iterations:
                what = f"{most} new tokens are requested; the limit is {self._limits.iterations} iterations"
                raise exhausted("iterations", "SX606", what)
            before = source if self._encoder is None else []
            span = SequenceSpan(tuple(source), len(tokens), low, most, end)
            for _ in range(count):
                sampler = Sampler(options, span, len(rows))
                writer = TextWriter(Characters(self._tokenizer.decode, before), options.stop or (), self._tokenizer.special)
                rows.append(_Row(len(rows), i, list(tokens), len(tokens), sampler, writer, most, reason))
        return _Call(options, rows, sources, budget)

    def _tokens(self, prompt: Prompt, special: bool) -> list[int]:
        """The tokens of a prompt."""
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt, special)
        else:
            tokens = [int(t) if isinstance(t, (int, np.integer)) and not isinstance(t, bool) else -1 for t in prompt]
        if not tokens and self._folder.begin is not None:
            tokens = [self._folder.begin]
        if not tokens:
            raise InvalidInput("a prompt must have at least one token, got none", code=TOKENIZER)
        size = self._folder.vocabulary
        wrong = next((t for t in tokens if t < 0 or (size is not None and t >= size)), None)
        if wrong is not None:
            rule = "an integer of at least 0" if size is None else f"an integer from 0 to {size - 1}"
            shown = wrong if wrong >= 0 else next(t for t, n in zip(prompt, tokens, strict=False) if n < 0)
            hint = "tokenizer.json must be the one of the model" if isinstance(prompt, str) else ""
            raise InvalidInput(f"a token of a prompt must be {rule}, got {shown!r}", code=TOKENIZER, hint=hint)
        return tokens

    def _pieces(self, call: _Call) -> Iterator[tuple[int, str]]:
        """Run a call; yields the text that becomes ready, with the number of its sequence."""
        if call.options.beams > 1:
            for prompt in range(len(call.sources)):
                yield from self._beamed(call, [r for r in call.rows if r.prompt == prompt])
        else:
            for rows in self._groups(call.rows):
                yield from self._grown(call, rows)
        if any(r.end == "context" for r in call.rows):
            what = f"a text ends where the model can attend to no more tokens, at {self._folder.context} with those of the prompt"
            warnings.warn(what, UserWarning, stacklevel=3)

    def _groups(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """The sequences that run together: of any length if they may be padded on the left, otherwise of one."""
        if self._first.batch > 1 or self._later.batch > 1:
            raise unsupported(f"the batch of a decoder must be 1 or any, got {max(self._first.batch, self._later.batch)}")
        if self._first.batch == 1 or self._later.batch == 1:
            yield from ([r] for r in rows)
        elif self._first.pads and self._later.pads:
            yield list(rows)
        else:
            for size in dict.fromkeys(len(r.tokens) for r in rows):
                yield [r for r in rows if len(r.tokens) == size]

    def _grown(self, call: _Call, rows: Sequence[_Row]) -> Iterator[tuple[int, str]]:
        """Run some sequences together until each has ended."""
        clock, started = call.clock, time.perf_counter()
        decoding, tokens = self._begun(call, rows)
        while True:
            logits = decoding.step(tokens)
            pieces = self._chosen(call, rows, logits)
            passed = time.perf_counter() - started
            if decoding.count == 1:
                clock.prompt += passed
            else:
                clock.decode += passed
                clock.tokens += len(pieces)
            yield from pieces
            if all(r.end for r in rows):
                return
            started = time.perf_counter()
            tokens = np.array([[self._folder.pad if r.end else r.tokens[-1]] for r in rows], np.int64)

    def _beamed(self, call: _Call, rows: Sequence[_Row]) -> Iterator[tuple[int, str]]:
        """Run the beam search of one prompt; `rows` receive its best sequences."""
        from singa_backend.operators.microsoft.beams import Beams

        clock, started, options, first = call.clock, time.perf_counter(), call.options, rows[0]
        end = tuple(map(int, options.end_tokens or ()))
        decoding, tokens = self._begun(call, [first] * options.beams)
        penalty = 1.0 if options.length_penalty is None else options.length_penalty
        prompt = np.array([first.tokens], np.int32)
        search = Beams(prompt, options.beams, penalty, options.early_stopping is True, end, self._folder.pad, new_only=True)
        while not search.done.all():
            sums = first.sampler.sums(decoding.step(tokens), search.sums, search.sequences, decoding.count - 1)
            chosen, sources = search.advance(sums, last=decoding.count == first.most)
            decoding.reorder(sources)
            tokens = chosen.reshape(-1, 1).astype(np.int64)
            if decoding.count == 1:
                clock.prompt += time.perf_counter() - started
                started = time.perf_counter()
            else:
                clock.tokens += 1
        for row, (_, found) in zip(rows, search.best[0], strict=False):
            text = "".join(row.add(int(t), ()) for t in found[row.start :])
            if not row.end:
                row.end, text = "end", text + row.writer.finish()
            yield row.index, text
        clock.decode += time.perf_counter() - started

    def _chosen(self, call: _Call, rows: Sequence[_Row], logits: np.ndarray) -> list[tuple[int, str]]:
        """Append a token to each sequence that has not ended."""
        end = tuple(map(int, call.options.end_tokens or ()))
        return [(r.index, r.add(r.sampler.choose(logits[i], r.tokens, r.new), end)) for i, r in enumerate(rows) if not r.end]

    def _begun(self, call: _Call, rows: Sequence[_Row]) -> tuple[Decoding, np.ndarray]:
        """The decoder before its first run, and the tokens of that run, padded on the left."""
        sources = [call.sources[r.prompt] for r in rows]
        hidden = None if self._encoder is None else self._encoded(self._encoder, sources, call.budget)
        longest = max(r.start for r in rows)
        tokens = np.full((len(rows), longest), self._folder.pad, np.int64)
        mask = np.zeros((len(rows), longest), np.int64)
        for i, r in enumerate(rows):
            tokens[i, longest - r.start :], mask[i, longest - r.start :] = r.tokens, 1
        most = longest + max(r.most for r in rows)
        shared = self._folder.shared and not self._later.packs
        return Decoding(self._first, self._later, mask, most, shared, call.budget, hidden), tokens

    def _encoded(self, encoder: SingaRep, sources: Sequence[Sequence[int]], budget: Budget) -> tuple[Any, np.ndarray]:
        """The output of the encoder and the mask of its tokens, which are padded on the right."""
        longest = max(map(len, sources))
        tokens = np.full((len(sources), longest), self._folder.pad, np.int64)
        mask = np.zeros((len(sources), longest), np.int64)
        for i, source in enumerate(sources):
            tokens[i, : len(source)], mask[i, : len(source)] = source, 1
        given = {"input_ids": tokens, "attention_mask": mask}
        feeds = {v.name: given[v.name].astype(v.dtype or np.int64) for v in encoder.inputs}
        return run_within(encoder, feeds, budget)[0], mask


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts: a text, or a list of integers, is one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)) or isinstance(prompts, bytes):
        raise refused(f"a prompt must be a text or a list of tokens, got a {type(prompts).__name__}")
    if len(prompts) and all(isinstance(p, (int, np.integer)) for p in prompts):
        return [cast(list[int], list(prompts))]
    for p in prompts:
        if not isinstance(p, (str, Sequence, np.ndarray)) or isinstance(p, bytes):
            rest = ": a token is an integer" if isinstance(p, (int, float, np.number)) else ""
            what = "a list of numbers" if rest else f"a {type(p).__name__}"
            raise refused(f"a prompt must be a text or a list of tokens, got {what}{rest}")
    return cast(list[Prompt], list(prompts))


def _gathered(call: _Call) -> GeneratedTexts:
    """The results of a call that has ended."""
    clock = call.clock
    return GeneratedTexts(
        tuple(r.result() for r in call.rows),
        sum(map(len, call.sources)),
        sum(r.new for r in call.rows),
        clock.prompt,
        clock.decode,
        clock.tokens / clock.decode if clock.tokens else None,
        call.options.seed if call.options.sample else None,
    )
