"""The options of a search: how they are read from a caller and from a folder, and which of them go together."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput, check_keywords
from singa_backend.io.documents import LARGEST, Document

from .config import ModelFolder

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


def _whole(low: int, high: int = LARGEST) -> Callable[[Document], int]:
    return lambda value: value.integer(low, high)


def _number(low: float, high: float, *, above: bool = False) -> Callable[[Document], float]:
    """The reader of a number; `above`: the minimum is excluded."""

    def read(value: Document) -> float:
        number = value.number(low, high)
        if above and number == low:
            raise value.wrong(f"above {low:g} and at most {high:g}")
        return number

    return read


def _list(read: Callable[[Document], Any], low: int = 0) -> Callable[[Document], tuple[Any, ...]]:
    """The reader of a list, for which one value may stand."""
    return lambda value: tuple(read(v) for v in (value.parts(low) if isinstance(value.value, list) else [value]))


def _text(value: Document) -> str:
    if not value.text():
        raise value.wrong("a text that is not empty")
    return value.value


def _biases(value: Document) -> tuple[tuple[tuple[int, ...], float], ...]:
    return tuple((_list(_whole(0), 1)(v[0]), v[1].number(-math.inf)) for v in value.parts() if v.parts(2, 2))


def _decay(value: Document) -> tuple[int, float]:
    start, factor = value.parts(2, 2)
    return start.integer(), factor.number(0.0, 1e6)


def _early(value: Document) -> bool | str:
    return "never" if value.value == "never" else value.flag()


_READERS: dict[str, Callable[[Document], Any]] = {
    "max_new_tokens": _whole(1), "max_length": _whole(1), "min_new_tokens": _whole(0), "min_length": _whole(0),
    "sample": Document.flag, "temperature": _number(0, 1e6), "top_k": _whole(0), "top_p": _number(0, 1),
    "min_p": _number(0, 1), "typical_p": _number(0, 1, above=True), "top_h": _number(0, 1, above=True),
    "epsilon_cutoff": _number(0, 1), "eta_cutoff": _number(0, 1),
    "repetition_penalty": _number(0, 1e6, above=True), "encoder_repetition_penalty": _number(0, 1e6, above=True),
    "no_repeat_ngram_size": _whole(0), "encoder_no_repeat_ngram_size": _whole(0),
    "bad_words_ids": lambda value: tuple(_list(_whole(0), 1)(v) for v in value.parts()), "sequence_bias": _biases,
    "suppress_tokens": _list(_whole(-1)), "begin_suppress_tokens": _list(_whole(-1)),
    "forced_bos_token_id": _whole(0), "forced_eos_token_id": _list(_whole(0)),
    "exponential_decay_length_penalty": _decay, "remove_invalid_values": Document.flag, "renormalize_logits": Document.flag,
    "num_return_sequences": _whole(1, SEQUENCES), "num_beams": _whole(1, BEAMS), "length_penalty": _number(-100, 100),
    "early_stopping": _early, "end_tokens": _list(_whole(0)), "stop": _list(_text), "seed": _whole(-1, (1 << 63) - 1),
}  # fmt: skip
"""How an option is read, of a caller or of a folder."""

_KEYS = {"sample": "do_sample", "stop": "stop_strings", "seed": "random_seed"}
"""The keys of a folder's configuration that differ from the options; the end tokens are read with the other tokens."""

_SAMPLING = {
    "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0,
}  # fmt: skip
"""The options of a search that samples, with the values that have no effect."""

_BEAMS = {"length_penalty": 1, "early_stopping": False}
"""The options of a beam search, with the values that have no effect."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (1,), "watermarking_config": (), "token_healing": (False,), "dola_layers": (), "penalty_alpha": (0,),
    "constraints": ([],), "force_words_ids": ([],), "forced_decoder_ids": ([],), "max_time": (),
}  # fmt: skip
"""Keys of a configuration that change tokens and are not supported, with the values that have no effect."""

_GROUPS = {"num_beam_groups": (1,), "diversity_penalty": (0,)}
"""Those of a beam search."""


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
    min_p: float | None = None
    typical_p: float | None = None
    top_h: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    encoder_repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool | None = None
    renormalize_logits: bool | None = None
    num_return_sequences: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    end_tokens: tuple[int, ...] | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], call: str) -> SearchOptions:
        """The options that a caller has passed as keywords; a single text or token may stand for a list of it."""
        check_keywords(call, given, [f.name for f in fields(cls)])
        values = Document({name: _plain(value) for name, value in given.items()}, call, OPTION)
        if values.maybe("seed", Document.integer, 0, (1 << 63) - 1) is None:
            values.value.pop("seed", None)
        return cls(**{name: read for name in given if (read := values.maybe(name, _READERS[name])) is not None})

    def completed(self, folder: ModelFolder) -> SearchOptions:
        """These options, with the folder's values for those that are None.

        The search samples if `sample` says so; if `sample` is None and the caller has passed an option of a search that samples,
        unless the temperature is 0; otherwise if the folder says so.
        """
        section = folder.search
        defaults = _defaults(folder)
        passed = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        sample = self.sample
        if self.temperature == 0:
            if sample:
                raise refused("temperature must be above 0 for a search that samples, got 0", "sample=False is the greedy search")
            sample = False
        if sample is None and not passed.keys().isdisjoint(_SAMPLING):
            sample = True
        if sample is None:
            sample = defaults.get("sample", False)
        if not {"max_new_tokens", "max_length"}.isdisjoint(passed):
            defaults.pop("max_new_tokens", None)
            defaults.pop("max_length", None)
        options = replace(self, **{**defaults, **passed, "sample": sample})
        if sample and options.temperature == 0:
            raise section["temperature"].wrong("above 0")
        options._check_effects(passed)
        options._check_beams(section)
        if (options.num_return_sequences or 1) > 1 and not sample and options.beams == 1:
            hint = "pass num_beams, sample=True, a temperature, top_k or top_p"
            raise refused(f"num_return_sequences must be 1 for a greedy search, got {options.num_return_sequences}", hint)
        if sample and options.seed is None:
            options = replace(options, seed=secrets.randbits(32))
        return options

    def _check_effects(self, passed: Mapping[str, Any]) -> None:
        """Raise InvalidInput for options of the caller that have no effect."""
        for neutral, used, hint in (
            (_SAMPLING, self.sample, "a search that samples: pass sample=True, or leave the option out"),
            (_BEAMS, self.beams > 1, "a beam search: pass num_beams, or leave the option out"),
        ):
            idle = [n for n, v in neutral.items() if passed.get(n, v) != v and (n, passed[n]) != ("temperature", 0)]
            if idle and not used:
                what = f"{idle[0]} must be absent from a search that it does not affect, got {passed[idle[0]]}"
                raise refused(what, f"it belongs to {hint}")

    @property
    def beams(self) -> int:
        """The number of sequences that the search follows for each prompt; 1 without a beam search."""
        return self.num_beams or 1

    def _check_beams(self, section: Document) -> None:
        """Raise InvalidInput for options that a beam search does not have."""
        if self.beams == 1:
            return
        _refuse_unsupported(section, _GROUPS)
        if self.early_stopping == "never":
            raise refused("early_stopping must be True, False or None, got 'never'")
        if self.sample:
            what = f"num_beams must be 1 for a search that samples, got {self.num_beams}"
            raise refused(what, "pass num_beams=1 or sample=False")
        if (self.num_return_sequences or 1) > self.beams:
            raise refused(f"num_return_sequences must be at most num_beams {self.beams}, got {self.num_return_sequences}")
        if self.stop:
            what = f"stop must be empty for a search with {self.beams} beams, got {list(self.stop)}"
            raise refused(what, "end_tokens end a sequence of a beam search; num_beams=1 searches with one")

    def lengths(self, prompt: int, folder: ModelFolder) -> tuple[int, int, str]:
        """The minimum and the maximum number of new tokens after a prompt of so many tokens, and why the maximum ends a text."""
        most = NEW_TOKENS if self.max_new_tokens is None and self.max_length is None else LARGEST
        if self.max_new_tokens is not None:
            most = self.max_new_tokens
        if self.max_length is not None:
            most = min(most, self.max_length - prompt)
        reason = "length"
        if folder.context is not None:
            if prompt >= folder.context:
                what = f"a prompt must be shorter than the {folder.context} tokens that the model can attend to, got {prompt}"
                raise refused(what, "shorten the prompt")
            if folder.context - prompt < most:
                most, reason = folder.context - prompt, "context"
        if most < 1:
            what = f"max_length must be above the {prompt} tokens of the prompt, got {self.max_length}"
            raise refused(what, "max_new_tokens counts the new tokens only")
        low = max(self.min_new_tokens or 0, (self.min_length or 0) - prompt)
        if low > most:
            raise refused(f"the minimum length must be at most the maximum, got {low} and {most} new tokens")
        return low, most, reason


def _plain(value: Any) -> Any:
    """The value of a caller in the types of JSON."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return math.inf if isinstance(value, int) and value > 1 << 63 else value


def _refuse_unsupported(section: Document, keys: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InvalidInput for keys of a configuration that would change the tokens."""
    for key, neutral in keys.items():
        value = section.get(key)
        if value is not None and value.value not in neutral:
            raise value.error("must not be set: it changes the tokens, and is not supported")


def _defaults(folder: ModelFolder) -> dict[str, Any]:
    """The options in the folder's configuration."""
    section = folder.search
    _refuse_unsupported(section, _UNSUPPORTED)
    options = {name: section.maybe(_KEYS.get(name, name), read) for name, read in _READERS.items() if name != "end_tokens"}
    if options["seed"] == -1:
        options["seed"] = None
    return {k: v for k, v in {**options, "end_tokens": folder.end}.items() if v is not None}
