"""String operators: concatenation, splitting, normalization, matching and n-gram counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import MissingDependency, OperatorError
from ..ir.declaration import Ints, operator
from ._api import Array
from ._flops import unknown


def _strings(values: list[str], shape: tuple[int, ...]) -> np.ndarray:
    y = np.empty(len(values), object)
    y[:] = values
    return y.reshape(shape)


@operator("StringConcat", 20, host=True)
def string_concat(xp: Xp, x: Array, y: Array) -> Array:
    limits.admit_broadcast([x, y])
    (n, a), (m, b) = map(_measures, (x, y))
    limits.count_bytes(int(((n + m) * np.maximum(a, b) + limits.text_bytes("")).sum()))
    return np.asarray(x + y, object)


string_concat.flops(unknown)


def _measures(x: Array) -> tuple[np.ndarray, np.ndarray]:
    """The number of characters of each string, and the bytes of a character in it."""
    texts = x.reshape(-1).tolist()
    lengths = np.array([len(s) for s in texts], np.float64).reshape(x.shape)
    return lengths, np.array([limits.width(s) for s in texts], np.int8).reshape(x.shape)


def _parts(text: str, delimiter: str | None, most: int) -> int:
    """The number of parts of a split, which is computed without the parts."""
    found = text.count(delimiter) + 1 if delimiter else sum(1 for _ in re.finditer(r"\S+", text))
    return found if most < 0 else min(found, most + 1)


@operator("StringSplit", 20, host=True)
def string_split(xp: Xp, x: Array, *, delimiter: str | None = None, maxsplit: int | None = None) -> tuple[Array, Array]:
    """Split strings; without a delimiter, at runs of white space, ignoring white space at both ends."""
    most = -1 if maxsplit is None else maxsplit
    flat = x.reshape(-1).tolist()
    width = max((_parts(s, delimiter, most) for s in flat), default=0)
    limits.admit((*x.shape, width), object)
    limits.count_bytes(sum(limits.text_bytes(s) + _parts(s, delimiter, most) * limits.text_bytes("") for s in flat))
    parts: list[list[str]] = [(s if delimiter else s.strip()).split(delimiter or None, most) for s in flat]
    width = max(map(len, parts), default=0)
    y = _strings([s for p in parts for s in p + [""] * (width - len(p))], (*x.shape, width))
    return y, np.array([len(p) for p in parts], np.int64).reshape(x.shape)


string_split.flops(unknown)


@operator("StringNormalizer", 10, host=True)
def string_normalizer(
    xp: Xp,
    x: Array,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str | None = None,
    stopwords: tuple[str, ...] | None = None,
) -> Array:
    """Remove stop words, then change the case by Unicode's rules; the locale is ignored."""
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise OperatorError(f"x must have shape [C] or [1, C], got {x.shape}", code="SX404")
    changes: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    if case_change_action not in changes:
        raise OperatorError(f"case_change_action must be one of {', '.join(changes)}, got {case_change_action!r}", code="SX404")
    change, key = changes[case_change_action], str if is_case_sensitive else str.lower
    stops = {key(s) for s in stopwords or ()}
    limits.count_bytes(sum(map(limits.text_bytes, x.reshape(-1).tolist())))
    kept = [change(s) for s in x.reshape(-1).tolist() if key(s) not in stops] or [""]
    return _strings(kept, (1, len(kept)) if x.ndim == 2 else (len(kept),))


@operator("RegexFullMatch", 20, host=True)
def regex_full_match(xp: Xp, x: Array, *, pattern: str | None = None) -> Array:
    try:
        import re2
    except ImportError:
        message = "RegexFullMatch needs the package google-re2"
        raise MissingDependency(message, hint="pip install 'sonnx[text]'") from None
    if pattern is None:
        raise OperatorError("the attribute pattern must be present", code="SX404")
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True  # matching takes linear time, capturing groups does not
    try:
        expression = re2.compile(pattern, options)
    except re2.error as error:
        raise OperatorError(f"pattern must be valid RE2 syntax, got {pattern!r}: {error}", code="SX404") from None
    return np.array([expression.fullmatch(s) is not None for s in x.reshape(-1).tolist()], bool).reshape(x.shape)


regex_full_match.flops(unknown)


@operator("TfIdfVectorizer", 9, host=True)
def tf_idf_vectorizer(
    xp: Xp,
    x: Array,
    *,
    mode: str,
    ngram_indexes: Ints,
    ngram_counts: Ints,
    max_skip_count: int,
    min_gram_length: int,
    max_gram_length: int,
    weights: tuple[float, ...] | None = None,
    pool_int64s: Ints | None = None,
    pool_strings: tuple[str, ...] | None = None,
) -> Array:
    """Count, in Y[ngram_indexes[i]], n-gram i of the pool in each row, with up to max_skip_count items between its items."""
    if mode not in ("TF", "IDF", "TFIDF"):
        raise OperatorError(f"mode must be TF, IDF or TFIDF, got {mode!r}", code="SX404")
    if x.ndim not in (1, 2):
        raise OperatorError(f"x must have shape [C] or [N, C], got {x.shape}", code="SX404")
    if not 1 <= min_gram_length <= max_gram_length or max_skip_count < 0:
        rule = "1 <= min_gram_length <= max_gram_length and max_skip_count >= 0 must hold"
        raise OperatorError(f"{rule}, got {min_gram_length}, {max_gram_length} and {max_skip_count}", code="SX404")
    pool = pool_int64s or pool_strings or ()
    if x.size and bool(pool) and isinstance(pool[0], str) != (x.dtype == object):
        raise OperatorError(
            f"x and the pool must be both strings or both integers, got {x.dtype} and {type(pool[0]).__name__}", code="SX404"
        )
    if min(ngram_indexes, default=0) < 0 or len(weights or ngram_indexes) != len(ngram_indexes):
        raise OperatorError("ngram_indexes must not be negative, and must have as many values as weights", code="SX404")
    rows = x if x.ndim == 2 else x[None]
    limits.admit((len(rows), max(ngram_indexes, default=-1) + 1), np.float32)
    y = np.zeros((len(rows), max(ngram_indexes, default=-1) + 1), np.float32)
    scale = np.ones(len(ngram_indexes), np.float32) if weights is None or mode == "TF" else np.array(weights, np.float32)

    words = {w: i for i, w in enumerate(dict.fromkeys(pool))}
    codes = np.array([words.get(w, -1) for w in rows.reshape(-1).tolist()], np.int64).reshape(rows.shape)
    first = 0  # number of the pool's first n-gram of this length
    for length, (start, end) in enumerate(pairwise((*ngram_counts, len(pool))), 1):
        if not 0 <= start <= end <= len(pool) or (end - start) % length:
            raise OperatorError(
                f"ngram_counts must split a pool of {len(pool)} items into n-grams, got {ngram_counts}", code="SX404"
            )
        grams = np.array([words[w] for w in pool[start:end]], np.int64).reshape(-1, length)
        at = np.array(ngram_indexes[first : first + len(grams)], np.int64)
        if len(at) < len(grams):
            raise OperatorError(
                f"ngram_indexes must have a value for each n-gram of the pool, got {len(ngram_indexes)}", code="SX404"
            )
        if min_gram_length <= length <= max_gram_length and len(grams):
            count = _count(codes, grams, len(words), max_skip_count if length > 1 else 0)
            if mode == "IDF":
                count = np.minimum(count, 1)
            np.add.at(y.T, at, (count.astype(np.float32) * scale[first : first + len(grams)]).T)
        first += len(grams)
    return y[0] if x.ndim == 1 else y


tf_idf_vectorizer.no_gradient("zero")


def _count(codes: np.ndarray, grams: np.ndarray, size: int, skips: int) -> np.ndarray:
    """Count each n-gram in each row of codes below `size`; the distance of its items is fixed, 1 to skips + 1.

    Each prefix of an n-gram of the pool has a number; a longer one is found by the number of its prefix and its last item.
    """
    prefix, levels = grams[:, 0], []
    for item in grams.T[1:]:
        level, prefix = np.unique(prefix * size + item, return_inverse=True)
        levels.append(level)
    numbers = len(levels[-1]) if levels else size
    limits.admit((len(codes), numbers), np.int64)
    total = np.zeros((len(codes), numbers), np.int64)
    for skipped in limits.rounds(min(skips + 1, codes.shape[1])):
        distance = skipped + 1
        places = codes.shape[1] - (grams.shape[1] - 1) * distance
        if places <= 0:
            break
        found = codes[:, :places]
        for i, level in enumerate(levels, 1):
            item = codes[:, i * distance : i * distance + places]
            at = np.minimum(np.searchsorted(level, found * size + item), len(level) - 1)
            found = np.where((found >= 0) & (item >= 0) & (level[at] == found * size + item), at, -1)
        row, place = np.nonzero(found >= 0)
        np.add.at(total, (row, found[row, place]), 1)
    return total[:, prefix]
