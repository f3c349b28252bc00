"""Strings joined, split, normalised and matched, and n-grams counted."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from singa_backend import MissingDependency

F = np.float32


def strings(values: Any) -> np.ndarray:
    return np.array(values, dtype=str).astype(object)


def test_string_concat(check: Any) -> None:
    check("StringConcat", [strings([["a"], ["b"]]), strings(["x", "ü"])], [strings([["ax", "aü"], ["bx", "bü"]])], opset=20)
    check("StringConcat", [strings("a"), strings("")], [strings("a")], opset=20)
    check("StringConcat", [np.zeros((0, 1), object), strings(["x"])], [np.zeros((0, 1), object)], opset=20)


@pytest.mark.parametrize(("x", "attributes", "y", "z"), [
    (["a,b", ",c,,"], {"delimiter": ","}, [["a", "b", "", ""], ["", "c", "", ""]], [2, 4]),
    (["a,b", ",c,,"], {"delimiter": ",", "maxsplit": 1}, [["a", "b"], ["", "c,,"]], [2, 2]),
    (["a--b"], {"delimiter": "--"}, [["a", "b"]], [2]),
    (["  a \t b  ", "", "c"], {}, [["a", "b"], ["", ""], ["c", ""]], [2, 0, 1]),
    ([" a b  c "], {"delimiter": "", "maxsplit": 1}, [["a", "b  c"]], [2]),
    ([" a b "], {"maxsplit": 0}, [["a b"]], [1]),
    ([""], {"delimiter": ","}, [[""]], [1]),
    ("a b", {}, ["a", "b"], 2),
])  # fmt: skip
def test_string_split(check: Any, x: Any, attributes: dict[str, Any], y: Any, z: Any) -> None:
    check("StringSplit", [strings(x)], [strings(y), np.array(z, np.int64)], opset=20, **attributes)


def test_string_split_of_nothing(check: Any) -> None:
    check("StringSplit", [np.zeros((2, 0), object)], [np.zeros((2, 0, 0), object), np.zeros((2, 0), np.int64)], opset=20)
    check("StringSplit", [strings([" "])], [np.zeros((1, 0), object), np.zeros(1, np.int64)], opset=20)


@pytest.mark.parametrize(("attributes", "y"), [
    ({}, ["Monday", "tuesday", "MONDAY", "Ä"]),
    ({"stopwords": ["monday"]}, ["tuesday", "Ä"]),
    ({"stopwords": ["Monday"], "is_case_sensitive": 1}, ["tuesday", "MONDAY", "Ä"]),
    ({"stopwords": ["monday"], "is_case_sensitive": 1, "case_change_action": "LOWER"}, ["monday", "tuesday", "monday", "ä"]),
    ({"stopwords": ["TUESDAY"], "case_change_action": "UPPER", "locale": "de_DE"}, ["MONDAY", "MONDAY", "Ä"]),
    ({"stopwords": ["monday", "tuesday", "ä"]}, [""]),
])  # fmt: skip
def test_string_normalizer(check: Any, attributes: dict[str, Any], y: list[str]) -> None:
    x = strings(["Monday", "tuesday", "MONDAY", "Ä"])
    check("StringNormalizer", [x], [strings(y)], opset=10, **attributes)
    check("StringNormalizer", [x[None]], [strings([y])], opset=10, **attributes)


def test_string_normalizer_refuses(fails: Any) -> None:
    fails("StringNormalizer", [strings([["a"], ["b"]])], "C", opset=10)
    fails("StringNormalizer", [strings(["a"])], "NONE, LOWER, UPPER", opset=10, case_change_action="TITLE")


def test_regex_full_match(check: Any) -> None:
    pytest.importorskip("re2")
    x = strings([["www.google.com", "x www.google.com"], ["", "wwwXgoogleXcom"]])
    check("RegexFullMatch", [x], [np.array([[True, False], [False, True]])], opset=20, pattern=r"www.[\w.-]+|www.google.com")
    check("RegexFullMatch", [strings("")], [np.array(True)], opset=20, pattern="")
    check("RegexFullMatch", [strings(["äé"])], [np.array([True])], opset=20, pattern=r"\pL{2}")
    check("RegexFullMatch", [np.zeros((0, 2), object)], [np.zeros((0, 2), bool)], opset=20, pattern="a")


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1"])
def test_regex_refuses_what_re2_does_not_know(fails: Any, pattern: str) -> None:
    pytest.importorskip("re2")
    fails("RegexFullMatch", [strings(["a"])], "RE2", opset=20, pattern=pattern)


def test_regex_without_its_engine(fails: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    fails("RegexFullMatch", [strings(["a"])], r"sonnx\[text\]", opset=20, error=MissingDependency, pattern="a")


def counted(x: list[Any], pool: list[tuple[Any, ...]], skips: int, lengths: range) -> list[int]:
    """How often each n-gram of the pool stands in x, by the words of the specification."""
    out = []
    for gram in pool:
        n = 0
        for distance in range(1, (skips if len(gram) > 1 else 0) + 2):
            for start in range(len(x) - (len(gram) - 1) * distance):
                n += tuple(x[start + i * distance] for i in range(len(gram))) == gram
        out.append(n if len(gram) in lengths else 0)
    return out


@pytest.mark.parametrize("kind", [np.int32, np.int64, object])
@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("skips", [0, 1, 3])
def test_tf_idf(check: Any, kind: Any, mode: str, skips: int) -> None:
    rng = np.random.default_rng(skips)
    pool = [(1,), (3,), (1, 2), (2, 2), (7, 8), (1, 2, 1), (2, 1, 1)]
    x = rng.integers(0, 4, (3, 9))
    places, weights = [6, 0, 2, 1, 3, 8, 5], [0.5, 2, 1, 3, 4, 5, 0.25]
    flat = [i for gram in pool for i in gram]
    name = "pool_strings" if kind is object else "pool_int64s"
    for low, high in ((1, 3), (2, 2), (1, 2)):
        y = np.zeros((3, 9), F)
        for r, row in enumerate(x.tolist()):
            for i, n in enumerate(counted(row, pool, skips, range(low, high + 1))):
                y[r, places[i]] += {"TF": n, "IDF": min(n, 1) * weights[i], "TFIDF": n * weights[i]}[mode]
        attributes = {"mode": mode, "ngram_counts": [0, 2, 8], "ngram_indexes": places, "weights": weights,
                      "max_skip_count": skips, "min_gram_length": low, "max_gram_length": high,
                      name: [str(i) for i in flat] if kind is object else flat}  # fmt: skip
        given = strings(x) if kind is object else x.astype(kind)
        check("TfIdfVectorizer", [given], [y], opset=9, **attributes)
        check("TfIdfVectorizer", [given[0]], [y[0]], opset=9, **attributes)


BASE: dict[str, Any] = {"mode": "TF", "ngram_counts": [0, 1], "ngram_indexes": [0, 2], "max_skip_count": 0, "min_gram_length": 1,
                        "max_gram_length": 2, "pool_int64s": [5, 5, 6]}  # fmt: skip


def test_tf_idf_edges(check: Any) -> None:
    check("TfIdfVectorizer", [np.zeros(0, np.int64)], [np.zeros(3, F)], opset=9, **BASE)
    check("TfIdfVectorizer", [np.zeros((2, 0), np.int64)], [np.zeros((2, 3), F)], opset=9, **BASE)
    check("TfIdfVectorizer", [np.zeros((0, 4), np.int64)], [np.zeros((0, 3), F)], opset=9, **BASE)
    check("TfIdfVectorizer", [np.array([5, 6, 5])], [np.array([2, 0, 1], F)], opset=9, **{**BASE, "mode": "TFIDF"})
    big = {**BASE, "pool_int64s": [2**62 + 1, 5, 6]}
    check("TfIdfVectorizer", [np.array([2**62, 2**62 + 1])], [np.array([1, 0, 0], F)], opset=9, **big)


@pytest.mark.parametrize(("change", "match"), [
    ({"mode": "BM25"}, "TFIDF"), ({"ngram_counts": [0, 2]}, "ngram_counts"), ({"ngram_indexes": [0]}, "ngram_indexes"),
    ({"min_gram_length": 3}, "must hold, got 3, 2 and 0"), ({"max_skip_count": -1}, "must hold, got 1, 2 and -1"),
    ({"ngram_indexes": [0, -1]}, "ngram_indexes"),
])  # fmt: skip
def test_tf_idf_refuses(fails: Any, change: dict[str, Any], match: str) -> None:
    fails("TfIdfVectorizer", [np.array([5])], match, opset=9, **{**BASE, **change})
    fails("TfIdfVectorizer", [strings(["5"])], "pool", opset=9, **BASE)
