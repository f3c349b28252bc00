"""Tokens as text that streams: whole characters, spaces, and texts that stop it; for tokenizers of bytes and of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.language_models import tokenizer

from singa._generation.tokens import BROKEN, Characters, TextTokenizer, TextWriter

WORDS = ["\u2581The", "\u2581sea", "\u2581is", "s", "\u2581deep", "."]


def words() -> str:
    """tokenizer.json as Llama's: words with a mark for the space, and bytes for what is not in the vocabulary."""
    vocabulary = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    vocabulary |= {w: len(vocabulary) + i for i, w in enumerate(WORDS)}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]  # fmt: skip
    model = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "added_tokens": [], "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", **model, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocabulary,
                  "merges": []},
    })  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "words"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, int]:
    """A tokenizer, and the token of byte 0."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        (folder / "tokenizer.json").write_text(tokenizer())
        import tests.helpers.language_models as models

        library = TextTokenizer(folder)
        assert library.encode("a", True) == [ord("a")] and models.BEGIN == 256
        return library, 0
    (folder / "tokenizer.json").write_text(words())
    return TextTokenizer(folder), 1


def pieces(library: TextTokenizer, tokens: list[int], before: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    writer = TextWriter(Characters(library.decode, before), stops)
    made = [writer.add(t) for t in tokens]
    made.append(writer.finish())
    assert "".join(made) == writer.text
    return made


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00" + BROKEN), max_size=12))
def test_a_text_streams_as_it_is_and_no_character_is_broken(kind: tuple[TextTokenizer, int], text: str) -> None:
    library, zero = kind
    made = pieces(library, [b + zero for b in text.encode()], [b + zero for b in b"before"])
    assert "".join(made) == text
    lengths = [len(c.encode()) for c in text]
    assert [i for i, p in enumerate(made) if p] == [sum(lengths[: i + 1]) - 1 for i in range(len(text))]  # each at its last byte


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=24))
def test_bytes_that_are_not_text(kind: tuple[TextTokenizer, int], data: bytes) -> None:
    """Any bytes end as what the tokenizer makes of all of them; an incomplete end is left out."""
    library, zero = kind
    tokens = [b + zero for b in data]
    found = "".join(pieces(library, tokens, []))
    whole = library.decode(tokens)
    if BROKEN not in whole:
        assert found == whole
    if zero == 0:  # of these tokenizers the text of a beginning is a beginning of the text
        assert found == whole.rstrip(BROKEN) or whole.startswith(found)


def test_long_runs_of_bytes_that_are_not_text_do_not_wait_for_their_end(kind: tuple[TextTokenizer, int]) -> None:
    library, zero = kind
    made = pieces(library, [0xFF + zero] * 50, [])
    assert len("".join(made[:-1])) >= 46


def test_spaces_of_words(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(words())
    library = TextTokenizer(tmp_path)
    first = 257
    assert library.decode([first, first + 1]) == "The sea" and library.decode([first + 1]) == "sea"
    assert pieces(library, [first + 1, first + 2, first + 5], [first]) == [" sea", " is", ".", ""]
    assert pieces(library, [first, first + 1, first + 3], []) == ["The", " sea", "s", ""]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three!", "ee"), "one two thr"),
        ("abab abc", ("abc",), "abab "),
        ("aaab", ("aab",), "a"),
        ("abc", ("abcd",), "abc"),
        ("one", ("e", "n"), "o"),
        ("x\u4f60y", ("\u4f60",), "x"),
        ("abcabd", ("abd", "cab"), "ab"),
        ("", ("a",), ""),
    ],
)
def test_texts_that_stop(kind: tuple[TextTokenizer, int], text: str, stops: tuple[str, ...], expected: str) -> None:
    library, zero = kind
    writer = TextWriter(Characters(library.decode, [ord("0") + zero]), stops)
    shown = ""
    for b in text.encode():
        shown += writer.add(b + zero)
        assert expected.startswith(shown)
        if writer.stopped:
            break
    shown += writer.finish()
    assert shown == writer.text == expected
    assert writer.stopped == any(s in text for s in stops)
