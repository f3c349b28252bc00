"""`sonnx generate`: the text, the JSON document, refusals, and characters that a terminal would obey."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.helpers.language_models import Decoder, script, write

from singa import sonnx
from singa.cli import main

TEXT = "caf\u00e9 \U0001f600\nend"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    write(folder / "gpt2", {"model": Decoder().model()}, tokenizer_config={"chat_template": template})
    write(folder / "story", {"model": script(list(TEXT.encode()))})
    write(folder / "escape", {"model": script(list(b"a\x1b[2Jb"))})
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, words)])


def test_the_text(place: Path) -> None:
    found = run(place / "story", "--prompt", "x")
    assert found.exit_code == 0 and found.output == TEXT + "\n"
    assert run(place / "story", "--prompt", "x", "--stop", "end", "--stop", "zzz").output == TEXT[:-3] + "\n"
    assert run(place / "story", "--prompt", "x", "--max-new-tokens", 4).output == "caf\n"
    assert run(place / "escape", "--prompt", "x").output == "a\\x1b[2Jb\n"  # it does not clear a terminal


def test_the_text_is_printed_as_it_is_made(place: Path) -> None:
    """The first line is readable before the command ends: the pipe has it when the rest is not written."""
    code = (
        "import os, sys\n"
        "from singa._generation.generator import Generator\n"
        "old = Generator.stream\n"
        "def stream(self, *a, **k):\n"
        "    for n, piece in enumerate(old(self, *a, **k)):\n"
        "        if n == 4:\n"
        "            os._exit(7)\n"
        "        yield piece\n"
        "Generator.stream = stream\n"
        "from singa.cli import main\n"
        "main()\n"
    )
    line = [sys.executable, "-c", code, "generate", str(place / "story"), "--prompt", "x"]
    done = subprocess.run(line, capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 7 and done.stdout.decode() == "caf\u00e9"


def test_the_document(place: Path) -> None:
    words = (
        place / "gpt2",
        "--prompt",
        "sea",
        "--prompt",
        "a",
        "--sequences",
        2,
        "--temperature",
        0.8,
        "--top-k",
        9,
        "--top-p",
        0.9,
    )
    found = run(*words, "--seed", 4, "--max-new-tokens", 6, "--json")
    document = json.loads(found.output)
    expected = sonnx.Generator(place / "gpt2").generate(
        ["sea", "a"], num_return_sequences=2, temperature=0.8, top_k=9, top_p=0.9, seed=4, max_new_tokens=6
    )
    assert [(t["prompt"], t["text"], tuple(t["tokens"]), t["end"]) for t in document["texts"]] == [
        (t.prompt, t.text, t.tokens, t.end) for t in expected.texts
    ]
    assert document["schema"] == "sonnx.generate" and document["seed"] == 4
    assert (document["prompt_tokens"], document["new_tokens"]) == (4, expected.new_tokens)
    assert min(document[f"{name}_seconds"] for name in ("load", "prompt", "decode")) > 0
    later = document["new_tokens"] - 4  # the first token of each sequence belongs to the prompt
    assert document["tokens_per_second"] == pytest.approx(later / document["decode_seconds"])


def test_several_texts_and_the_search(place: Path) -> None:
    found = run(
        place / "gpt2", "--prompt", "sea", "--prompt", "a", "--max-new-tokens", 3, "--greedy", "--repetition-penalty", 1.5
    )
    expected = sonnx.Generator(place / "gpt2").generate(["sea", "a"], max_new_tokens=3, repetition_penalty=1.5)
    for i, text in enumerate(expected.texts):
        assert f"[{i + 1}] prompt {i + 1}, {len(text.tokens)} tokens, ended by {text.end}\n" in found.output
    others = ("--no-repeat-ngram", 1, "--min-new-tokens", 8, "--max-length", 12)
    document = json.loads(run(place / "gpt2", "--prompt", "sea", *others, "--json").output)
    tokens = document["texts"][0]["tokens"]
    assert len(tokens) >= 8 and len(set(tokens)) == len(tokens) and len(tokens) <= 9


@pytest.mark.parametrize("penalty", [-100, -2, 0, 2, 100])
def test_the_length_penalty_has_the_range_of_the_keyword(penalty: int, place: Path) -> None:
    words = ("--prompt", "sea", "--beams", 3, "--max-new-tokens", 6, "--length-penalty", penalty, "--json")
    document = json.loads(run(place / "gpt2", *words).output)
    expected = sonnx.Generator(place / "gpt2").generate("sea", num_beams=3, max_new_tokens=6, length_penalty=penalty)
    assert [tuple(t["tokens"]) for t in document["texts"]] == [t.tokens for t in expected.texts]


@pytest.mark.parametrize("penalty", ["-101", "101"])
def test_a_length_penalty_beyond_its_range(penalty: str, place: Path) -> None:
    assert run(place / "gpt2", "--prompt", "sea", "--beams", 3, "--length-penalty", penalty).exit_code == 2


def test_a_chat_and_standard_input(place: Path) -> None:
    plain = run(place / "gpt2", "--prompt", "[system]Brief.[user]Hi", "--max-new-tokens", 5).output
    assert run(place / "gpt2", "--chat", "--system", "Brief.", "--prompt", "Hi", "--max-new-tokens", 5).output == plain
    words = ["generate", str(place / "gpt2"), "--prompt", "-", "--max-new-tokens", "5"]
    assert CliRunner().invoke(main, words, input="[system]Brief.[user]Hi").output == plain


@pytest.mark.parametrize(("words", "code", "message"), [
    (["story"], 2, "Missing option '--prompt'"),
    (["story", "--prompt", "x", "--system", "y"], 2, "--system needs --chat"),
    (["story", "--prompt", "x", "--chat"], 3, "SX391"),
    (["nowhere", "--prompt", "x"], 3, "SX374"),
    (["gpt2", "--prompt", "x", "--sequences", "2"], 3, "SX390"),
    (["gpt2", "--prompt", "x", "--temperature", "0", "--sample"], 3, "SX390"),
    (["gpt2", "--prompt", "x" * 600], 3, "SX390"),
    (["gpt2", "--prompt", "x", "--limit", "iterations=5", "--max-new-tokens", "6"], 3, "SX606"),
])  # fmt: skip
def test_refusals(words: list[str], code: int, message: str, place: Path) -> None:
    found = run(place / words[0], *words[1:])
    assert found.exit_code == code and message in found.output and not found.stdout
    if code == 3:
        assert json.loads(run(place / words[0], *words[1:], "--json").stdout)["code"] == message
