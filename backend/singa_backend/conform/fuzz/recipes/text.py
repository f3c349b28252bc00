"""Recipes of operators on strings."""

from __future__ import annotations

import numpy as np

from ..strategies import WORDS, Draw
from .registry import recipe


@recipe("StringNormalizer")
def string_normalizer(d: Draw) -> None:
    n = d.whole(1, 5)
    words = np.array([d.pick([w for w in WORDS if w.isascii()]) for _ in range(n)], object)
    d.put(words if d.chance(0.7) else words.reshape(1, n))
    d.attr("case_change_action", ["LOWER", "UPPER", "NONE"], "NONE")
    d.attr("is_case_sensitive", [0, 1], 0)
    d.attr("stopwords", [["a"], ["ab", "ABC"], ["zz", "1"]], None)


@recipe("StringSplit")
def string_split(d: Draw) -> None:
    shape = d.shape(0, 3)
    parts = ["a", "b c", " d ", "e,f", ",", "", "g,,h", "  i  j ", "kk-l"]
    d.put(np.array([d.pick(parts) for _ in range(int(np.prod(shape)))], object).reshape(shape))
    d.attr("delimiter", [",", "-", " ", ""], None)
    d.attr("maxsplit", [0, 1, 2], None)
    d.outputs = ["y", "z"]


@recipe("RegexFullMatch")
def regex_full_match(d: Draw) -> None:
    d.put(d.array(0, d.shape()))
    d.attributes["pattern"] = d.pick(["a+b*", "[A-Z].*", ".*", r"\d+", "(a|b|ab)+", r"\s*a\s*", "ß", ""])


@recipe("TfIdfVectorizer")
def tf_idf(d: Draw) -> None:
    grams = d.whole(1, 2)
    ones, twos = d.whole(1, 3), d.whole(1, 2)
    text = d.dtype(0).kind == "O"
    words = ["a", "b", "ab", "Abc", "zz"]
    singles = [int(i) for i in d.rng.permutation(5)[:ones]]
    doubles = sorted({(d.whole(0, 4), d.whole(0, 4)) for _ in range(twos)})
    pool = singles + [i for pair in doubles for i in pair]
    d.attributes["pool_strings" if text else "pool_int64s"] = [words[i] for i in pool] if text else pool
    n = len(singles) + len(doubles)
    d.attributes |= {
        "mode": d.pick(["TF", "IDF", "TFIDF"]), "ngram_counts": [0, len(singles)],
        "ngram_indexes": [int(i) for i in d.rng.permutation(n)], "min_gram_length": d.whole(1, grams), "max_gram_length": 2,
        "max_skip_count": d.whole(0, 2),
    }  # fmt: skip
    d.attr("weights", lambda: [d.real(0.5, 2) for _ in range(n)], None)
    shape = (d.whole(1, 6),) if d.chance() else (d.whole(1, 3), d.whole(1, 5))
    x = np.asarray(d.rng.integers(0, 5, shape))
    d.put(np.array([words[i] for i in x.reshape(-1)], object).reshape(shape) if text else x.astype(d.dtype(0)))
