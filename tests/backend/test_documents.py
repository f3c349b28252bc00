"""The reader of JSON documents: types, ranges, depth, length, the path in each message; damaged documents of every kind."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.paths import PROJECT, TESTS

from singa_backend.errors import InvalidInput, ResourceExhausted, SonnxError
from singa_backend.io import documents
from singa_backend.io.documents import DEPTH, DOCUMENT, Document, parse_document, read_document


def parsed(text: str | bytes) -> Document:
    return parse_document(text, "d.json", "SX804", "a hint")


def refused(text: str | bytes, code: str = "SX804") -> str:
    with pytest.raises(SonnxError) as caught:
        parsed(text)
    assert caught.value.code == code
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), f"{'[0]' * DEPTH} must not be nested deeper than {DEPTH} lists and objects"),
        ('{"a": [{"b": 1, "b": 2}]}', "d.json: $.a[0] has the key 'b' twice"),
        ('{"a": [0, %s]}' % ("9" * 400), "d.json: $.a[1] must be a number of at most 40 digits"),
        ("9" * 5000, "d.json: "),
        ("[" * 10**5, "d.json: "),
        ('{"a": "x\\ud800"}', "d.json: $.a must be Unicode text without surrogates, got 'x\\ud800'"),
        ('{"a": {"\\ud800": 1}}', "d.json: $.a must have keys of Unicode text"),
        (b"\xff", "d.json: 'utf-8' codec"),
        ("", "d.json: Expecting value"),
    ],
)
def test_what_is_not_a_document(text: str | bytes, message: str) -> None:
    found = refused(text)
    assert message in found and found.encode()


def test_long_documents_are_refused() -> None:
    refused(b"[" + b"[]," * 10**6 + b"[]]", "SX600")
    refused(b" " * (DOCUMENT + 1), "SX600")
    with pytest.raises(ResourceExhausted):
        parse_document("[1, 2, 3]", "d", "SX804", values=2)


def test_depth_up_to_the_limit() -> None:
    assert len(json.dumps(parsed("[" * DEPTH + "]" * DEPTH).value)) == 2 * DEPTH


@pytest.mark.parametrize(
    "text", ["[" * 9999, '{"a":' * 9999, "[{}," * 500 + "[" * 500, "[" * 300 + "]" * 300, '[{"a":' * 200 + "1" + "}]" * 200]
)
def test_deep_documents_are_refused_before_they_are_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of recursion, finalizers fail that happen to run there."""
    monkeypatch.setattr(documents.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    assert "must not be nested deeper than 64" in refused(text)


@pytest.mark.parametrize(
    "text",
    ['["' + "[" * 9999 + '"]', '["' + '\\"[' * 999 + '"]', "[" + "[]," * 9999 + "[]]", '{"a": [' + '{"b": []},' * 999 + "1]}"],
)
def test_brackets_in_texts_and_next_to_each_other_are_not_deep(text: str) -> None:
    assert parsed(text).value == json.loads(text)


def test_a_text_without_an_end_is_read_once() -> None:
    refused("[" * 300 + '"' + '\\"' * 300_000 + "\\")


READS: list[tuple[str, Callable[[Document], Any], str]] = [
    ('{"a": [{"b": "x"}]}', lambda d: d["a"][0]["b"].integer(1, 9), "$.a[0].b must be an integer from 1 to 9, got 'x'"),
    ('{"a": true}', lambda d: d["a"].integer(), "$.a must be an integer from 0 to 2147483647, got true"),
    ('{"a": 1e300}', lambda d: d["a"].integer(), "$.a must be an integer from 0 to 2147483647, got 1e+300"),
    ('{"a": 1e999}', lambda d: d["a"].number(), "$.a must be a finite number of at least 0, got inf"),
    ('{"a": NaN}', lambda d: d["a"].number(-math.inf), "$.a must be a finite number, got nan"),
    ('{"a": 2}', lambda d: d["a"].number(0, 1), "$.a must be a finite number of at least 0 and at most 1, got 2"),
    ('{"a": 0}', lambda d: d["a"].flag(), "$.a must be true or false, got 0"),
    ('{"a b": []}', lambda d: d["a b"].text(), '$["a b"] must be a text, got a list'),
    ('{"a": "xyz"}', lambda d: d["a"].text(2), "$.a must be a text of at most 2 characters, got 3"),
    ('{"a": [0, {"s": "x"}]}', lambda d: d["a"][1]["s"].one_of(["p", "q"]), "$.a[1].s must be one of p, q, got 'x'"),
    ('{"a": {}}', lambda d: d["a"]["b"], "$.a.b is missing"),
    ('{"a": null}', lambda d: d["a"], "$.a must not be null"),
    ('{"a": [1]}', lambda d: d["a"][1], "$.a[1] is missing"),
    ('{"a": [1]}', lambda d: d["a"].parts(2, 2), "$.a must be a list of 2 values, got 1"),
    ("[1]", lambda d: d["a"], "$ must be an object, got a list"),
    ('{"a": "b"}', lambda d: d["a"][0], "$.a must be a list, got 'b'"),
    ('{"a": [{"b": 1}, {"b": "x"}]}', lambda d: d.matches({"a": [{"b": int}]}), "$.a[1].b must be an integer, got 'x'"),
    ('{"a": [["x", true]]}', lambda d: d.matches({"a": [[str, int]]}), "$.a[0][1] must be an integer, got true"),
    ('{"a": {}}', lambda d: d.matches({"a": {"b": str, "c?": int}}), "$.a.b is missing"),
    ('{"a": {"k": 1}}', lambda d: d.matches({"a": {"*": (str, type(None))}}), "$.a.k must be a text or null, got 1"),
    ('"%s"' % ("x" * 999), lambda d: d.integer(), "x'... (999 characters)"),
]


@pytest.mark.parametrize(("text", "read", "message"), READS)
def test_a_value_that_breaks_a_rule_is_named_by_its_path(text: str, read: Callable[[Document], Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(parsed(text))
    assert message in caught.value.message and caught.value.message.startswith("d.json: $")
    assert (caught.value.code, caught.value.hint) == ("SX804", "a hint")


def test_values_that_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text("\ufeff" + json.dumps({"a": [1.5, {}, 50.0, "ü", None, 10**39], "f": False}), encoding="utf-8")
    found = read_document(path, "SX804")
    a = found["a"]
    assert (a[0].number(), a[1].mapping(), a[2].integer(), a[3].text(), a.get(4), a[5].number()) == (1.5, {}, 50, "ü", None, 1e39)
    assert found["f"].flag() is False and found.maybe("g", Document.integer) is None and found.part("g").mapping() == {}
    assert found.matches({"a": list, "f": bool, "g?": str}) == found.value
    assert [part.path for part in a.parts()][:2] == ["$.a[0]", "$.a[1]"] and dict(found.items())["f"].path == "$.f"


READERS = {
    "backend/singa_backend/io/documents.py",
    "backend/singa_backend/devices/strict.py",
    "backend/singa_backend/operators/microsoft/_schemas.py",
    "frontend/singa/_generation/_template_child.py",
}
"""The reader, two modules that read data of this package, and a child process, which reads what this package sends it."""


def test_there_is_one_reader_of_documents() -> None:
    files = [p for folder in ("backend", "frontend") for p in (PROJECT / folder).rglob("*.py")]
    found = {p.relative_to(PROJECT).as_posix() for p in files if re.search(r"\bjson\.loads?\(|JSONDecoder", p.read_text())}
    assert found == READERS


# --- damaged documents ------------------------------------------------------------------------------------------------------

COUNT = int(os.environ.get("SONNX_HOSTILE_DOCUMENTS", "120"))
SEED = os.environ.get("SONNX_HOSTILE_SEED", "11")
KINDS = ("guards", "adapters", "peft_folders", "genai_folders", "results", "journals", "checkpoints")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux shows it")
def test_damaged_documents_are_read_or_refused() -> None:
    """Of every kind, in one process: no other error than a SonnxError, no hang, at most 256 MiB."""
    for package in ("tokenizers", "jinja2", "safetensors"):
        pytest.importorskip(package)
    command = [sys.executable, str(TESTS / "hostile" / "documents.py"), str(COUNT), SEED, *KINDS]
    path = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60 + COUNT * 10)
    assert found.returncode == 0, f"{found.stdout[-6000:]}\n{found.stderr[-3000:]}"
    seen = dict(re.findall(rf"^(\w+): {COUNT} drawn, 0 wrong, \d+ s: (.*)$", found.stdout, re.M))
    assert tuple(seen) == KINDS
    for name in set(KINDS) - {"journals"}:  # a damaged journal is as one that was not finished
        assert "'read'" in seen[name] and "'SX" in seen[name], seen
