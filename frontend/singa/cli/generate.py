"""`sonnx generate`: continue a text by the model of a folder."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._common import (
    SEED,
    FiniteNumber,
    adapter_option,
    collected,
    device_option,
    echo,
    exit_codes,
    json_option,
    limit_option,
    plan_options,
    write_json,
)

if TYPE_CHECKING:
    from .._generation.generator import GeneratedTexts, Generator

_COUNT = click.IntRange(1, (1 << 31) - 1)
_COUNT0 = click.IntRange(0, (1 << 31) - 1)


@dataclass(frozen=True)
class SearchArguments:
    """The options of the search, by the names of the keywords of `Generator.generate`."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    num_return_sequences: int | None
    num_beams: int | None
    length_penalty: float | None
    stop: tuple[str, ...]
    seed: int | None

    def keywords(self) -> dict[str, Any]:
        """The keywords of those that were given."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) not in (None, ())}


_SEARCH = (
    click.option("--max-new-tokens", type=_COUNT, help="The maximum number of new tokens."),
    click.option("--max-length", type=_COUNT, help="The maximum number of tokens, with those of the prompt."),
    click.option("--min-new-tokens", type=_COUNT0, help="The number of new tokens before the text may end."),
    click.option("--sample/--greedy", default=None, help="Draw tokens, or take the most likely one."),
    click.option("--temperature", type=FiniteNumber(0, 1e6), help="Draw; logits are divided by it. 0: greedy."),
    click.option("--top-k", type=_COUNT0, help="Draw from the K most likely tokens; 0: from all."),
    click.option("--top-p", type=FiniteNumber(0, 1), help="Draw from the most likely tokens that sum to P."),
    click.option("--min-p", type=FiniteNumber(0, 1), help="Draw from tokens of at least P times the highest probability."),
    click.option(
        "--repetition-penalty", type=FiniteNumber(0, 1e6, min_open=True), help="Above 1: less likely to repeat a token."
    ),
    click.option("--no-repeat-ngram", "no_repeat_ngram_size", type=_COUNT0, help="Never repeat so many tokens in a row."),
    click.option("--sequences", "num_return_sequences", type=click.IntRange(1, 4096), help="Texts for each prompt."),
    click.option("--beams", "num_beams", type=click.IntRange(1, 128), help="Follow so many sequences for each prompt."),
    click.option("--length-penalty", type=FiniteNumber(-100, 100), help="The larger, the longer the texts of a beam search."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the text before this one (repeatable)."),
    click.option("--seed", type=SEED, help="The seed of the draws."),
)


@click.command("generate")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT", help="The text to continue (repeatable); - is standard input."
)
@click.option("--chat", is_flag=True, help="The prompt is a message of a user; the chat template of FOLDER makes the text.")
@click.option("--system", metavar="TEXT", help="With --chat: the message of the system in front of it.")
@collected("search", SearchArguments, _SEARCH)
@adapter_option
@device_option
@plan_options
@limit_option
@json_option
@exit_codes
def command(
    folder: Path, prompts: tuple[str, ...], chat: bool, system: str | None, search: SearchArguments,
    adapters: tuple[Path, ...], device: str, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Continue a text by the model, the tokenizer and the configuration in FOLDER, and print the new text as it is made.

    FOLDER is one of onnxruntime-genai, or of Optimum. What is not set has the value of its configuration. Nothing is downloaded.
    """
    if not prompts:
        raise click.UsageError("Missing option '--prompt'.")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    from .._generation.generator import Generator

    given = [sys.stdin.read() if p == "-" else p for p in prompts]
    generator = Generator(folder, device, adapter=adapters or None, **options)
    if chat:
        head = [] if system is None else [{"role": "system", "content": system}]
        given = [generator.chat_prompt([*head, {"role": "user", "content": p}]) for p in given]
    keywords = search.keywords() | {"special_tokens": not chat}
    if as_json:
        _write(generator, generator.generate(given, **keywords))
    elif len(given) == 1 and keywords.get("num_return_sequences", 1) == 1:
        _stream(generator, given[0], keywords)
    else:
        _tell(generator.generate(given, **keywords))


def _stream(generator: Generator, prompt: str, keywords: dict[str, Any]) -> None:
    """Print the text while it is made."""
    pieces = generator.stream(prompt, **keywords | {"num_return_sequences": 1})
    try:
        for piece in pieces:
            click.echo(_shown(piece), nl=False)
    finally:
        click.echo()


def _tell(found: GeneratedTexts) -> None:
    """Print several texts, each after a line with its number."""
    for i, text in enumerate(found.texts):
        echo(f"[{i + 1}] prompt {text.prompt + 1}, {len(text.tokens)} tokens, ended by {text.end}", style="bold")
        click.echo(_shown(text.text))


def _shown(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    from singa_backend.rendering import printable

    return printable(text, len(text), lines=True)


def _write(generator: Generator, found: GeneratedTexts) -> None:
    """Print the texts and the times as JSON."""
    write_json({**asdict(found), "load_seconds": generator.load_seconds})
