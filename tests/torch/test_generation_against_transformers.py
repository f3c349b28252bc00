"""Options of a search and chat templates against transformers: scores, draws, prompts, and where a text stops."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.language_models import BEGIN, END, WORDS, script, write

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerationMixin

from singa import sonnx
from singa._generation.config import ModelFolder
from singa._generation.options import _GROUPS, _KEYS, _READERS, _UNSUPPORTED, SearchOptions
from singa._generation.processors import TOP_H, SequenceSpan
from singa._generation.search import Sampler, most_likely
from singa._generation.tokens import Characters, TextTokenizer, TextWriter
from singa_backend.io.documents import Document

SIZE = 40
"""The number of tokens of the drawn scores."""

CHANGES: dict[str, list[Any]] = {
    "sequence_bias": [
        [[[i, j, 3 + i], 1.0 + j] for i in (0, 1) for j in (0, 1)],
        [[[3], 2.5], [[4, 5], -3.0], [[5, 6, 7], 4.0], [[4, 6], 1.5]],
    ],
    "encoder_repetition_penalty": [1.7, 0.4],
    "repetition_penalty": [1.3, 0.6],
    "no_repeat_ngram_size": [1, 2, 3],
    "encoder_no_repeat_ngram_size": [1, 2, 3],
    "bad_words_ids": [[[3], [4, 5]], [[39], [2, 2], [1, 2, 3, 4]], [[0], [7]]],
    "min_new_tokens": [2, 5],
    "min_length": [3, 9],
    "forced_bos_token_id": [7],
    "forced_eos_token_id": [0, [0, 8]],
    "remove_invalid_values": [True],
    "exponential_decay_length_penalty": [[2, 1.3], [0, 1.01]],
    "suppress_tokens": [[3, 4, 39], [100, 5]],
    "begin_suppress_tokens": [[1, 2, 3]],
    "renormalize_logits": [True],
}
"""The keys of processors, with values."""

DRAWS: dict[str, list[Any]] = {
    "temperature": [0.3, 1.0, 2.5], "top_h": [0.2, 0.7], "top_k": [1, 4, 20, 100], "top_p": [0.0, 0.3, 0.9],
    "min_p": [0.05, 0.4, 1.0], "typical_p": [0.1, 0.8], "epsilon_cutoff": [0.01, 0.3], "eta_cutoff": [0.01, 0.3],
}  # fmt: skip
"""The keys of draws, with values."""

ENDS = [0, 8]


def options_of(config: dict[str, Any]) -> SearchOptions:
    """The options of a folder with this generation_config.json."""
    folder = ModelFolder(
        Path(), Path(), Document({"do_sample": False, **config}, "generation_config.json", "SX374"), end=tuple(ENDS)
    )
    return SearchOptions(seed=1).completed(folder)


def processors_of(config: dict[str, Any], tokens: int, source: torch.Tensor, most: int) -> Any:
    """The processors that transformers makes of the same configuration."""
    chosen = transformers.GenerationConfig(**config, eos_token_id=ENDS)
    chosen._eos_token_tensor, chosen.max_length = torch.tensor(ENDS), tokens + most
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False), _merge_criteria_processor_list=lambda made, _: made)
    return GenerationMixin._get_logits_processor(model, chosen, input_ids_seq_length=tokens, encoder_input_ids=source)


def cases(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Each value by itself, and drawn combinations."""
    single = [{k: v} for k, choices in values.items() for v in choices]
    draw = np.random.default_rng(0)
    mixed = []
    for _ in range(20):
        keys = [k for k in values if draw.random() < 0.4]
        mixed.append({k: values[k][draw.integers(len(values[k]))] for k in keys})
    return [*single, *mixed]


@pytest.mark.parametrize("config", cases(CHANGES), ids=lambda c: "-".join(c))
def test_scores_after_the_processors(config: dict[str, Any]) -> None:
    draw, options = np.random.default_rng(1), options_of(config)
    changed = False
    for start, new in [(1, 0), (1, 1), (1, 4), (3, 0), (3, 1), (6, 2), (6, 6), (6, 7)]:
        for _ in range(4):
            most = 8
            tokens = draw.integers(0, draw.choice([2, 9]), start + new).tolist()
            logits = draw.normal(0, 5, SIZE).astype(np.float32)
            if "remove_invalid_values" in config:
                logits[[2, 11, 12]] = np.nan, np.inf, -np.inf
            least = max(options.min_new_tokens or 0, (options.min_length or 0) - start)
            span = SequenceSpan(tuple(tokens[:start]), start, least, most, tuple(ENDS))
            found = Sampler(options, span, 0)._processed(logits.copy(), tokens, new)
            ids = torch.tensor([tokens])
            expected = processors_of(config, start, ids[:, :start], most)(ids, torch.tensor(logits[None])).numpy()[0]
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
            changed = changed or not np.array_equal(expected, logits)
    assert changed or not config


@pytest.mark.parametrize("config", cases(DRAWS), ids=lambda c: "-".join(c))
def test_the_tokens_of_draws_and_their_probabilities(config: dict[str, Any]) -> None:
    draw, options = np.random.default_rng(2), options_of({**config, "do_sample": True, "top_k": config.get("top_k", 0)})
    sampler = Sampler(options, SequenceSpan(), 0)
    for _ in range(20):
        logits = draw.normal(0, draw.choice([0.3, 2, 6]), 150).astype(np.float32)
        most = TOP_H if options.top_h is not None else options.top_k or 0
        ids, chances = most_likely(logits, options.temperature or 1.0, most, sampler._filters)
        tokens = torch.zeros((1, 3), dtype=torch.int64)
        made = processors_of({**config, "do_sample": True, "top_k": config.get("top_k", 0)}, 3, tokens, 8)
        expected = torch.softmax(made(tokens, torch.tensor(logits[None]).double()), -1).numpy()[0]
        found = np.zeros(150)
        found[ids] = chances / chances.sum()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-12)


WITHOUT_EFFECT = {
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "cache_config",
    "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile", "is_assistant", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "return_dict_in_generate", "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
}  # fmt: skip
"""Keys about caches, speed and what is returned, and of models that draft tokens for this one."""

TOKENS = {"bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"}


def test_every_key_of_transformers_is_supported_or_refused_or_without_effect() -> None:
    keys = {k for k in vars(transformers.GenerationConfig()) if not k.startswith("_")}
    read = {_KEYS.get(name, name) for name in _READERS} | TOKENS
    assert keys - read - set(_UNSUPPORTED) - set(_GROUPS) - WITHOUT_EFFECT == set()
    assert not (read | set(_UNSUPPORTED)) & WITHOUT_EFFECT


def test_the_defaults_that_transformers_writes_are_accepted(tmp_path: Path) -> None:
    transformers.GenerationConfig(temperature=1.0, guidance_scale=1.0).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert options_of(written).temperature == 1.0


# --- chat templates -------------------------------------------------------------------------------------------------------

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be \u00e9 <brief>"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "And?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"b": 1, "a": "\u00e9"}}}]
DOCUMENTS = [{"title": "A", "text": "One"}]

TEMPLATES = [
    "{% if tools is none %}none{% else %}{{ tools | tojson }}{% endif %}{% if documents is none %}none{% endif %}",
    "{% if tools is defined and tools is not none %}x{% endif %}{{ documents is defined }}{{ tools is defined }}",
    "{% if not tools %}{{ '-' }}{% else %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}",
    "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ sep_token }}{{ pad_token }}{{ cls_token }}{{ mask_token }}{{ image_token }}",
    "{{ messages | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    "{{ messages | tojson(indent='  ', separators=[' ,', ' : ']) }}{{ 'a<b' | tojson }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}",
    "{%- for m in messages %}\n  {%- generation %}\n{{ loop.index }}{% set x = 1 %}{% endgeneration -%}\n"
    "{{ x is defined }}{% endfor %}",
    "{{ enable_thinking is defined and enable_thinking }}{{ add_generation_prompt }}"
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {f"{n}_token": f"<{n}>" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    names["eos_token"] = "</s>"
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_specific_special_tokens": {"image_token": "<image>"}}
    return write(tmp_path_factory.mktemp("chat") / "folder", {"model": script(list(b"Yes"))}, tokenizer_config=config)


@pytest.mark.parametrize("arguments", [{}, {"tools": TOOLS}, {"documents": DOCUMENTS}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prompts_of_chat_templates(template: str, arguments: dict[str, Any], folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **arguments)
    assert sonnx.Generator(folder).chat_prompt(MESSAGES, **arguments) == expected


@pytest.mark.parametrize("files", [True, False], ids=["files", "list"])
def test_a_template_with_a_name_for_tools(files: bool, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if not files:
        config["chat_template"] = [{"name": "tool_use", "template": "with"}, {"name": "default", "template": "without"}]
    place = write(tmp_path / "folder", {"model": script(list(b"Yes"))}, tokenizer_config=config)
    if files:
        (place / "chat_template.jinja").write_text("without")
        (place / "additional_chat_templates").mkdir()
        (place / "additional_chat_templates" / "tool_use.jinja").write_text("with")
    tokenizer, generator = transformers.AutoTokenizer.from_pretrained(place), sonnx.Generator(place)
    for tools in (None, TOOLS):
        assert generator.chat_prompt(MESSAGES, tools=tools) == tokenizer.apply_chat_template(
            MESSAGES, tokenize=False, tools=tools
        )


# --- texts that stop ------------------------------------------------------------------------------------------------------

STOPS = ["</s>", "a</s>", "<s>b", "a<s></s>b", "ab", "</s", "<pad><pad>"]


@pytest.mark.parametrize("stop", STOPS)
def test_where_a_text_stops(stop: str, folder: Path) -> None:
    """At the token at which transformers stops, special tokens included."""
    library, draw = TextTokenizer(folder), np.random.default_rng(0)
    criterion = StopStringCriteria(transformers.AutoTokenizer.from_pretrained(folder), [stop])
    stopped = 0
    for _ in range(25):
        tokens = draw.choice([*b"ab<", BEGIN, END, WORDS - 2], 40).tolist()
        tokens[30:30] = list(b"</s")  # the text of a special token in several tokens is a text too
        writer = TextWriter(Characters(library.decode), [stop], library.special)
        found = next((i for i, t in enumerate(tokens) if (writer.add(t), writer.stopped)[1]), None)
        ends = (bool(criterion(torch.tensor([tokens[: i + 1]]), None)) for i in range(len(tokens)))
        expected = next((i for i, end in enumerate(ends) if end), None)
        assert found == expected
        stopped += found is not None
    assert stopped
