"""Texts: strings in lower case, their words, and counts of n-grams of words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from .. import limits
from ..proto.schemas import MICROSOFT
from .categories import Places
from .strings import Texts, is_texts, shape_of, texts_of
from .table import Invalid, Site, kernel
from .values import NAN, Bound, OpaqueValue, Value

_FEW = 64
"""The number of words up to which n-grams are counted in Python: a call of NumPy costs as much as ten words."""

_DENSE = 1 << 20
"""The largest table with a place for each pair of words, or of an n-gram and a word; larger ones are searched."""

_CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}

_CLASS = re.compile(r"\[(?:[A-Za-z0-9]-[A-Za-z0-9]|[A-Za-z0-9_ ]|\\w|\\d)+\]\+")
"""An expression of which RE2 and Python find the same matches: characters of a class of ASCII characters, as many as possible."""


def same_in_python(expression: str) -> bool:
    """Whether `re` with ASCII classes finds the matches that RE2 finds, so that no package is needed."""
    if not _CLASS.fullmatch(expression):
        return False
    try:
        re.compile(expression, re.ASCII)
    except re.error:
        return False
    return True


@kernel("StringNormalizer", 10, on="numpy", takes="opaque")
def string_normalizer(site: Site, x: Any) -> OpaqueValue:
    given = site.attributes
    site.require(is_texts(x), "the input is not an array of strings")
    rank = len(shape_of(x))
    site.require(rank == 1 or (rank == 2 and shape_of(x)[0] == 1), "x is not a row")
    case = given.get("case_change_action") or "NONE"
    site.require(case in _CASES, "the case is unknown")
    change, key = _CASES[case], str if given.get("is_case_sensitive") else str.lower
    stops = frozenset(key(s) for s in given.get("stopwords") or ())
    y = Texts()
    site.emit(lambda: [(_normalize, (x, y, rank, change, key, stops))], reads=(), writes=(), kernel="numpy.strings", keeps=(x, y))
    return y


def _normalize(x: OpaqueValue, y: Texts, rank: int, change: Any, key: Any, stops: frozenset[str]) -> None:
    shape, texts = shape_of(x), texts_of(x)
    if len(shape) != rank or (rank == 2 and shape[0] != 1):
        raise Invalid("an array of strings has another shape")
    limits.count_bytes(sum(map(limits.text_bytes, texts)))
    if stops:
        texts = [s for s in texts if key(s) not in stops]
    kept = list(map(change, texts)) or [""]
    y.set(kept, (1, len(kept)) if rank == 2 else (len(kept),))


@kernel("Tokenizer", 1, on="numpy", domain=MICROSOFT, takes="opaque")
def tokenizer(site: Site, x: Any) -> OpaqueValue:
    given = site.attributes
    least, expression, separators = given["mincharnum"], given.get("tokenexp"), given.get("separators")
    site.require(is_texts(x) and len(shape_of(x)) in (1, 2) and texts_of(x), "the input is not an array of strings, or empty")
    site.require(not given["mark"] and least >= 1, "the tokens are marked, or a number is not valid")
    if separators == ("",) or (separators is None and expression == "."):
        site.require(least == 1, "a character is too short")
        split: Callable[[str], list[str]] = list
    else:
        site.require(separators is None and expression and same_in_python(expression), "an expression that only RE2 knows")
        split = re.compile(expression or "", re.ASCII).findall
    y = Texts()
    site.emit(
        lambda: [(_tokens, (x, y, split, least, given["pad_value"]))], reads=(), writes=(), kernel="numpy.tokens", keeps=(x, y)
    )
    return y


def _tokens(x: OpaqueValue, y: Texts, split: Callable[[str], list[str]], least: int, pad: str) -> None:
    shape, texts = shape_of(x), texts_of(x)
    if len(shape) not in (1, 2) or not texts:
        raise Invalid("an array of strings has another shape")
    rows = list(map(split, texts))
    if least > 1:
        rows = [[t for t in row if len(t) >= least] for row in rows]
    width = max(map(len, rows))
    limits.admit((*shape, width), object)
    for row in rows:
        if len(row) < width:
            row += [pad] * (width - len(row))
    y.set(rows[0] if len(rows) == 1 else list(chain.from_iterable(rows)), (*shape, width))


# --- counts of n-grams


@dataclass(eq=False)
class Grams:
    """The n-grams of a pool.

    Attributes:
        words: the number of each word; `size` of others.
        size: the number of different words.
        levels: for each length above 1 the n-grams and their beginnings; a key is the number of the beginning that is one word
            shorter, times (size + 1), plus the last word.
        columns: by length, the column of each number; -1 if it is not counted.
        weights: the weight of each number, by length.
        width: the number of columns.
        few: by length, the column and the weight of each n-gram, a word or a tuple of words.
    """

    words: Places
    size: int
    levels: list[NGramLevel]
    columns: list[np.ndarray | None]
    weights: list[np.ndarray | None]
    width: int
    few: list[dict[Any, tuple[int, float]]]


@dataclass(eq=False)
class NGramLevel:
    """The beginnings of a length: their keys, and a table of the number of each key if it is small."""

    keys: np.ndarray
    table: np.ndarray | None

    def find(self, key: np.ndarray) -> np.ndarray:
        """The number of each key; the number of keys for others."""
        if self.table is not None:
            return self.table.take(key)
        at = np.minimum(self.keys.searchsorted(key), len(self.keys) - 1)
        return np.where(self.keys[at] == key, at, len(self.keys))


def _grams(site: Site) -> Grams:
    given = site.attributes
    pool: tuple[Any, ...] = given.get("pool_int64s") or given.get("pool_strings") or ()
    indexes, weights = given["ngram_indexes"], given.get("weights")
    names = list(dict.fromkeys(pool))
    numbers = {w: i for i, w in enumerate(names)}
    size = len(names)
    lengths: dict[int, np.ndarray] = {}
    first, firsts = 0, {}
    for length, (start, end) in enumerate(pairwise((*given["ngram_counts"], len(pool))), 1):
        site.require(0 <= start <= end <= len(pool) and not (end - start) % length, "the counts do not split the pool")
        lengths[length] = np.array([numbers[w] for w in pool[start:end]], np.int64).reshape(-1, length)
        firsts[length] = first
        first += len(lengths[length])
    site.require(first <= len(indexes) and len(weights or indexes) == len(indexes) and min(indexes, default=0) >= 0,
                 "a number of indexes is another")  # fmt: skip
    used = [n for n, g in lengths.items() if given["min_gram_length"] <= n <= given["max_gram_length"] and len(g)]
    longest = max(used, default=0)
    levels: list[NGramLevel] = []
    known: list[dict[tuple[int, ...], int]] = [{}, {(i,): i for i in range(size)}]
    for length in range(2, longest + 1):
        before = known[-1]
        starts = {tuple(g[:length]) for n in used if n >= length for g in lengths[n].tolist()}
        keys = sorted((before[s[:-1]] * (size + 1) + s[-1], s) for s in starts)
        known.append({s: i for i, (_, s) in enumerate(keys)})
        flat, span = np.array([k for k, _ in keys], np.int64), (len(before) + 1) * (size + 1)
        table = None
        if span <= _DENSE:
            table = np.full(span, len(flat), np.int32)
            table[flat] = np.arange(len(flat))
        levels.append(NGramLevel(flat, table))
    few: list[dict[Any, tuple[int, float]]] = []
    columns: list[np.ndarray | None] = []
    factors: list[np.ndarray | None] = []
    seen: list[int] = []
    for length in range(1, longest + 1):
        few.append({})
        if length not in used:
            columns.append(None)
            factors.append(None)
            continue
        at = np.full(len(known[length]) + 1, -1)
        factor = np.ones(len(at), np.float32)
        for i, g in enumerate(map(tuple, lengths[length].tolist()), firsts[length]):
            number = known[length][g]
            site.require(at[number] < 0, "an n-gram occurs twice in the pool")
            at[number] = indexes[i]
            if weights is not None and given["mode"] != "TF":
                factor[number] = weights[i]
            few[-1][names[g[0]] if length == 1 else tuple(names[w] for w in g)] = indexes[i], float(factor[number])
        seen += at[at >= 0].tolist()
        columns.append(at)
        factors.append(None if (factor == 1).all() else factor)
    site.require(given["mode"] != "IDF" or len(set(seen)) == len(seen), "n-grams share a column")
    return Grams(Places(names), size, levels, columns, factors, max(indexes, default=-1) + 1, few)


@kernel("TfIdfVectorizer", 9, on="numpy", takes="opaque")
def tf_idf_vectorizer(site: Site, x: Any) -> Value:
    given = site.attributes
    text = isinstance(x, OpaqueValue)
    if text:
        site.require(is_texts(x), "the input is not an array of strings")
    shape = shape_of(x) if text else x.shape
    site.require(text or x.dtype in (np.int32, np.int64), "elements of other types")
    site.require(len(shape) in (1, 2) and math.prod(shape) and given["mode"] in ("TF", "IDF", "TFIDF"), "x is not a matrix")
    site.require(
        1 <= given["min_gram_length"] <= given["max_gram_length"] and given["max_skip_count"] >= 0, "a length is not valid"
    )
    pool = given.get("pool_strings" if text else "pool_int64s")
    site.require(pool and not (given.get("pool_int64s") and text), "the pool has no n-grams of this type")
    grams = site.once("grams", lambda: _grams(site))
    rows = shape[0] if len(shape) == 2 else 1
    site.require(grams.width, "there are no columns")
    y = site.new((rows, grams.width)[2 - len(shape) :], np.float32, finiteness=NAN)

    def bind() -> Bound:
        out = y.array.reshape(rows, grams.width)
        if text:
            return [(_of_texts, (x, len(shape), grams, given["mode"] == "IDF", given["max_skip_count"], out))]
        return [(_of_numbers, (x.array, grams, given["mode"] == "IDF", given["max_skip_count"], out))]

    site.emit(bind, reads=() if text else (x,), writes=(y,), kernel="numpy.n-grams", keeps=(grams, x))
    return y


def _of_texts(x: OpaqueValue, rank: int, grams: Grams, once: bool, skips: int, y: np.ndarray) -> None:
    shape, texts = shape_of(x), texts_of(x)
    if len(shape) != rank or (rank == 2 and shape[0] != len(y)):
        raise Invalid("an array of strings has another shape")
    _of_items(texts, grams, once, skips, y)


def _of_numbers(x: np.ndarray, grams: Grams, once: bool, skips: int, y: np.ndarray) -> None:
    _of_items(x.reshape(-1).tolist(), grams, once, skips, y)


def _of_items(items: list[Any], grams: Grams, once: bool, skips: int, y: np.ndarray) -> None:
    """Count the n-grams of rows, whose words or numbers follow each other."""
    rows = len(y)
    width = len(items) // rows
    if len(items) <= _FEW:
        _count_few([items[i * width : (i + 1) * width] for i in range(rows)], grams, once, skips, y)
    else:
        _count(grams.words.of(items).reshape(rows, width), grams, once, skips, y)


def _count_few(rows: list[list[Any]], grams: Grams, once: bool, skips: int, y: np.ndarray) -> None:
    """`_count` for few words, in numbers of Python."""
    y.fill(0)
    for words, out in zip(rows, y, strict=True):
        sums: dict[int, float] = {}
        get = sums.get
        for length, known in enumerate(grams.few, 1):
            if not known:
                continue
            for distance in range(1, 2 if length == 1 else min(skips + 1, len(words)) + 1):
                if length == 1:
                    found = map(known.get, words)
                elif length == 2:
                    found = map(known.get, zip(words, words[distance:], strict=False))
                else:
                    found = map(known.get, zip(*[words[i * distance :] for i in range(length)], strict=False))
                for column, weight in filter(None, found):
                    sums[column] = weight if once else get(column, 0.0) + weight
        for column, total in sums.items():
            out[column] = total


def _count(codes: np.ndarray, grams: Grams, once: bool, skips: int, y: np.ndarray) -> None:
    """Add the weight of each n-gram that is found to its column: of all of them, or of one in each row.

    The items of an n-gram have one distance, 1 to skips + 1; one word is counted once.
    """
    y.fill(0)
    flat = y.reshape(-1)
    starts = np.arange(len(y))[:, None] * grams.width
    width = codes.shape[1]
    for distance in range(1, min(skips + 1, max(width, 1)) + 1):
        found = codes
        for length, (column, weight) in enumerate(zip(grams.columns, grams.weights, strict=True), 1):
            if length > 1:
                places = width - (length - 1) * distance
                if places <= 0:
                    break
                last = codes[:, (length - 1) * distance : (length - 1) * distance + places]
                found = grams.levels[length - 2].find(found[:, :places] * (grams.size + 1) + last)
            elif distance > 1:
                continue
            if column is None:
                continue
            to = column.take(found)
            there = np.flatnonzero(to >= 0)
            place = (to + starts).reshape(-1).take(there)
            add: Any = np.float32(1) if weight is None else weight.take(found.reshape(-1).take(there))
            if once:
                flat[place] = add
            else:
                np.add.at(flat, place, add)
