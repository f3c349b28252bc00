"""Attributes of com.microsoft that are counts: each integer one at values that are too large, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto
from tests.helpers import bounded
from tests.helpers.microsoft_nodes import body, feeds, lowered, model, ours

from singa_backend import Limits, SingaBackend
from singa_backend.conform.fuzz import generate
from singa_backend.conform.fuzz.recipes.microsoft.search import gpt2
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import MICROSOFT, load_domain, schemas

VALUES = (1 << 12, 1 << 27, 1 << 28, (1 << 31) - 1, (1 << 32) + 1, 1 << 62)
LIMITS: dict[str, Any] = {"tensor_bytes": 8 << 20, "live_bytes": 24 << 20, "iterations": 100_000, "executions": 1_000_000}
MEBIBYTES, SECONDS = 64.0, 10.0

load_domain(MICROSOFT)
OPERATORS = sorted(name for domain, name in declarations if domain == MICROSOFT)


def integers(name: str) -> list[str]:
    """The integer attributes of an operator."""
    kinds = (AttributeProto.INT, AttributeProto.INTS)
    attributes = schemas[MICROSOFT, name][1].attributes
    return [a for a, declared in attributes.items() if generate.attribute_type(declared) in kinds]


@lru_cache(1)
def drawn(name: str) -> generate.NodeCase:
    """A node of the operator that runs."""
    for index in range(40):
        case = generate.draw(7, 2 * index, f"^com.microsoft:{name}-1$")
        if case is not None:
            return case
    raise AssertionError(name)


def call(request: list[Any]) -> None:
    """Run the drawn node of an operator with one attribute changed."""
    name, attribute, value = request
    case = drawn(name)
    made = generate.model(case)
    del made.graph.value_info[:]
    for output in made.graph.output:
        output.ClearField("type")
    node = made.graph.node[0]
    numbers = next((list(a.ints) for a in node.attribute if a.name == attribute), [])
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend(kept)
    kind = generate.attribute_type(schemas[MICROSOFT, name][1].attributes[attribute])
    changed = AttributeProto(name=attribute, type=kind)
    if kind == AttributeProto.INT:
        changed.i = value
    else:
        changed.ints.extend([value, *numbers[1:]] if numbers else [value])
    node.attribute.append(changed)
    SingaBackend.prepare(made, limits=Limits(**LIMITS)).run(case.feeds)


@pytest.mark.skipif(not bounded.available, reason="the system does not show the memory of a process")
@pytest.mark.parametrize("part", range(4))
def test_large_counts_are_refused_or_computed_in_bounded_memory(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")  # the import of llvmlite takes memory
    cases = [[n, a, v] for n in OPERATORS[part::4] for a in integers(n) for v in VALUES]
    found = bounded.calls(call, cases)
    wrong = [
        (case, answer)
        for case, answer in zip(cases, found, strict=True)
        if not (answer["code"].startswith("SX") or not answer["code"])
        or answer["code"] == "SX601"  # more memory was requested than the child may have
        or answer["mebibytes"] > MEBIBYTES
        or answer["seconds"] > SECONDS
    ]
    assert not wrong, wrong[:10]


# --- counts in inputs and in texts, and bodies ------------------------------------------------------------------------


def ids(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int64).reshape(1, -1) % 7


def scores() -> np.ndarray:
    return np.zeros((1, 9), np.float32)


def beams(count: int) -> Any:
    one = [np.array([n], np.int32) for n in (9, 0, count, 1)]
    decoder = gpt2(np.random.default_rng(0), 9, 2, 2, 1)
    inputs = [np.ones((1, 2), np.int32), *one, np.ones(1, np.float32)]
    return ours("BeamSearch", inputs, decoder=decoder, eos_token_id=-1, pad_token_id=6)


def positions(query: int, key: int) -> Any:
    lengths = [np.array([n], np.int64) for n in (query, key)]
    made = model("RelativePositionBias", [np.ones((8, 1), np.float32), *lengths], max_distance=12)
    return SingaBackend.prepare(made, limits=Limits(**LIMITS)).run(feeds([np.ones((8, 1), np.float32), *lengths]))


def tokens(pattern: str, text: str) -> Any:
    return ours("Tokenizer", [np.array([text], object)], mark=0, mincharnum=1, pad_value="", **{pattern: _PATTERNS[pattern]})


_PATTERNS: dict[str, Any] = {"separators": [",|;"], "tokenexp": "a|b"}

NAMED: dict[str, tuple[str, Callable[[], Any]]] = {
    "2^27 beams": ("SX404", lambda: beams(1 << 27)),
    "positions of 2^13 queries and 2^15 keys": ("SX603", lambda: positions(1 << 13, 1 << 15)),
    "positions of 2^10 queries and keys": ("", lambda: positions(1 << 10, 1 << 10)),
    "the body of n-grams of 2^27": ("", lambda: body("NGramRepeatBlock", [ids(9), scores()], ngram_size=1 << 27)),
    "the file of n-grams of 2^28": ("", lambda: lowered("NGramRepeatBlock", [ids(9), scores()], ngram_size=1 << 28)),
    "100,000 separators": ("", lambda: tokens("separators", "a," * 100_000)),
    "100,000 tokens": ("", lambda: tokens("tokenexp", "ab" * 50_000)),
}


def named(name: str) -> None:
    NAMED[name][1]()


@pytest.mark.skipif(not bounded.available, reason="the system does not show the memory of a process")
def test_counts_in_inputs_and_texts_need_bounded_memory_and_time() -> None:
    pytest.importorskip("re2")
    for (name, (code, _)), answer in zip(NAMED.items(), bounded.calls(named, list(NAMED)), strict=True):
        assert answer["code"] == code and answer["mebibytes"] <= MEBIBYTES and answer["seconds"] <= SECONDS, (name, answer)


def test_the_body_of_n_grams_is_the_definition() -> None:
    random = np.random.default_rng(0)
    for length, size in ((9, 1), (9, 2), (9, 3), (9, 9), (9, 10), (3, 5), (1, 1)):
        inputs = [random.integers(0, 3, (2, length)), random.standard_normal((2, 4)).astype(np.float32)]
        expected = ours("NGramRepeatBlock", inputs, ngram_size=size)[0]
        np.testing.assert_array_equal(body("NGramRepeatBlock", inputs, ngram_size=size)[0], expected)
        for row, (text, y) in enumerate(zip(inputs[0].tolist(), expected, strict=True)):
            grams = [text[i : i + size] for i in range(length - size + 1)]
            blocked = {g[-1] for g in grams if size == 1 or g[:-1] == text[length - size + 1 :]}
            assert {t for t in range(4) if np.isneginf(y[t])} == blocked, (row, text, size)


def test_matches_that_are_empty() -> None:
    """An empty match ends a part, and the character after it is between the parts."""
    pytest.importorskip("re2")
    kind: dict[str, Any] = {"mark": 0, "mincharnum": 1, "pad_value": "-"}
    texts = np.array(["xaay", "aa", "xy", ""], object)
    assert ours("Tokenizer", [texts], tokenexp="a*", **kind)[0].tolist() == [["aa"], ["aa"], ["-"], ["-"]]
