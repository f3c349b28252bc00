"""Strings and words: tokens of strings, hashes, embeddings of the characters of words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ... import dtypes, limits
from ...errors import MissingDependency, OperatorError
from ...ir.shapes import KnownShapes, Shape
from ...kernels.texts import same_in_python
from ._api import Array, Op, V, Xp, microsoft

START, END = "\x02", "\x03"

# --- hashes ------------------------------------------------------------------------------------------------------------

_ROUNDS = (np.uint32(0xCC9E2D51), np.uint32(0x1B873593), np.uint32(0xE6546B64))


def _turned(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _mixed(k: np.ndarray) -> np.ndarray:
    return _turned(k * _ROUNDS[0], 15) * _ROUNDS[1]


def _murmur(words: np.ndarray, tail: np.ndarray | None, size: int, seed: int) -> np.ndarray:
    """MurmurHash3_x86_32 of the rows of a matrix: whole words of 4 bytes, and the rest as a number or None."""
    h = np.full(len(words), seed & 0xFFFFFFFF, np.uint32)
    for column in words.T:
        h = _turned(h ^ _mixed(column), 13) * np.uint32(5) + _ROUNDS[2]
    if tail is not None:
        h = h ^ _mixed(tail)
    h = h ^ np.uint32(size)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _hashed_text(text: str, seed: int) -> int:
    data = text.encode()
    whole = len(data) // 4 * 4
    rest = int.from_bytes(data[whole:], "little")
    tail = np.array([rest], np.uint32) if len(data) > whole else None
    return int(_murmur(np.frombuffer(data[:whole], "<u4").reshape(1, -1), tail, len(data), seed)[0])


@microsoft("MurmurHash3", 1, host=True)
def murmur_hash3(xp: Xp, x: Array, *, positive: int = 1, seed: int = 0) -> Array:
    """Hash the bytes of each element by MurmurHash3_x86_32; uint32 if positive is 1, otherwise the same bits as int32."""
    if x.dtype == object:
        made = np.array([_hashed_text(s, seed) for s in x.reshape(-1).tolist()], np.uint32)
    else:
        words = np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"), copy=False).reshape(-1, 1).view("<u4")
        with np.errstate(over="ignore"):
            made = _murmur(words, None, x.dtype.itemsize, seed)
    made = made.reshape(x.shape)
    return made if positive == 1 else made.view(np.int32)


# --- tokens ------------------------------------------------------------------------------------------------------------


def _expressions(patterns: tuple[str, ...]) -> list[Any]:
    """Compile RE2 expressions, of which the longest match counts."""
    if all(map(same_in_python, patterns)):
        return [re.compile(pattern, re.ASCII) for pattern in patterns]
    try:
        import re2
    except ImportError:
        raise MissingDependency("Tokenizer needs the package google-re2", hint="pip install 'sonnx[text]'") from None
    options = re2.Options()
    options.log_errors = False
    options.longest_match = True
    made = []
    for pattern in patterns:
        try:
            made.append(re2.compile(pattern, options))
        except re2.error as error:
            raise OperatorError(f"a pattern must be valid RE2 syntax, got {pattern!r}: {error}", code="SX404") from None
    return made


def _found(expression: Any, text: str) -> Iterator[tuple[int, int]]:
    """The begin and the end of each match; after an empty one the search continues at the next character."""
    last = -1
    for match in expression.finditer(text):  # a search from a position would encode the whole text again
        start, end = match.span()
        if end > start or start > last:  # RE2 repeats an empty match that is not at the begin of its search
            yield start, end
            last = start if start == end else last


def _split(text: str, separators: list[Any], least: int) -> list[str]:
    """Split by one separator after the other; shorter tokens are left out after each."""
    row = [text]
    for separator in separators:
        parts = []
        for part in row:
            start = 0
            for first, end in _found(separator, part):
                parts.append(part[start:first])
                start = max(end, first + 1)
            parts.append(part[start:])
        row = [p for p in parts if len(p) >= least]
    return row


def _matches(text: str, expression: Any, least: int) -> list[str]:
    return [text[start:end] for start, end in _found(expression, text) if end - start >= least]


def _splitter(separators: tuple[str, ...] | None, tokenexp: str | None, least: int) -> Callable[[str], list[str]]:
    if separators is None and tokenexp is None:
        raise OperatorError("one of the attributes separators and tokenexp must be present", code="SX404")
    if least < 1:
        raise OperatorError(f"mincharnum must be at least 1, got {least}", code="SX404")
    if separators == ("",) or (separators is None and tokenexp == "."):
        if least > 1:
            raise OperatorError(f"mincharnum must be 1 if the tokens are characters, got {least}", code="SX404")
        return list
    if separators is not None:
        compiled = _expressions(separators)
        return lambda text: _split(text, compiled, least)
    one = _expressions((tokenexp or "",))[0]
    return lambda text: _matches(text, one, least)


@microsoft("Tokenizer", 1, host=True)
def tokenizer(
    xp: Xp,
    x: Array,
    *,
    mark: int,
    mincharnum: int,
    pad_value: str,
    separators: tuple[str, ...] | None = None,
    tokenexp: str | None = None,
) -> Array:
    """Split each string at separators, or into the matches of tokenexp; the tokens are a new last axis, which is padded.

    `mark` puts the characters 2 and 3 around the tokens of a string, unless there is no token at all.
    """
    if x.ndim not in (1, 2):
        raise OperatorError(f"X must have one or two axes, got shape {x.shape}", code="SX404")
    split = _splitter(separators, tokenexp, mincharnum)
    if not x.size:
        return np.empty((x.shape[0], 0)[: x.ndim] if x.ndim == 2 else (0,), object)
    rows = []
    for text in x.reshape(-1).tolist():
        rows.append(split(text))
        limits.count_bytes(sum(map(limits.text_bytes, rows[-1])))
    width = max(map(len, rows))
    if width and mark:
        rows, width = [[START, *row, END] for row in rows], width + 2
    limits.admit((*x.shape, width), object)
    y = np.full((len(rows), width), pad_value, object)
    for i, row in enumerate(rows):
        y[i, : len(row)] = row
    return y.reshape(*x.shape, width)


# --- words -------------------------------------------------------------------------------------------------------------


@microsoft("WordConvEmbedding", 1)
def word_conv_embedding(
    xp: Xp,
    sequence: Array,
    w: Array,
    b: Array,
    c: Array,
    *,
    char_embedding_size: int | None = None,
    conv_window_size: int | None = None,
    embedding_size: int | None = None,
) -> Array:
    """Convolve the embeddings C of the characters of each word by W; take the maximum of tanh over the windows of the word.

    A word ends at its first 0.  One that is shorter than a window has one window.
    """
    _checked_words(sequence, w, b, c, (embedding_size, conv_window_size, char_embedding_size))
    window = w.shape[2]
    ends = xp.concatenate([sequence == 0, xp.ones((len(sequence), 1), bool)], axis=1)
    lengths = xp.argmax(ends, axis=1)
    places = xp.indices(sequence, c.shape[0], negative=False)
    seen = xp.swapaxes(xp.windows(c[places], window, 1), 2, 3)  # words x windows x cells x features
    y = xp.tanh(xp.matmul(seen.reshape(*seen.shape[:2], -1), w.reshape(len(w), -1).T) + b)
    starts = xp.arange(y.shape[1])
    outside = starts > xp.maximum(lengths - window, 0)[:, None]
    y = xp.where(outside[..., None], -1, y).max(axis=1)
    return xp.where((lengths == 0)[:, None], 0, y)


def _checked_words(sequence: Array, w: Array, b: Array, c: Array, sizes: tuple[int | None, ...]) -> None:
    if sequence.ndim != 2 or w.ndim != 4 or w.shape[1] != 1 or c.ndim != 2 or w.shape[3] != c.shape[1] or b.shape != w.shape[:1]:
        raise OperatorError(
            f"Sequence must have 2 axes, W the shape (M, 1, k, E), B (M,) and C (V, E), got shapes {sequence.shape}, {w.shape}, "
            f"{b.shape} and {c.shape}",
            code="SX404",
        )
    if any(size not in (None, own) for size, own in zip(sizes, (w.shape[0], w.shape[2], w.shape[3]), strict=True)):
        raise OperatorError(f"the sizes of the attributes must be those of W, {w.shape}, got {sizes}", code="SX404")
    if not 0 < w.shape[2] <= sequence.shape[1]:
        raise OperatorError(f"a window must be at most {sequence.shape[1]} characters, got {w.shape[2]}", code="SX404")


@word_conv_embedding.shapes
def word_conv_embedding_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    words, w = known.shape(call.inputs[0]), known.shape(call.inputs[1])
    return (words[0], w[0]) if words and w else None


@word_conv_embedding.decomposition
def word_conv_embedding_body(op: Op, sequence: V, w: V, b: V, c: V) -> V:
    """A convolution over the characters as an image of one channel."""
    code = dtypes.onnx_code(np.int64)
    y = op.Squeeze(op.Conv(op.Unsqueeze(op.Gather(c, sequence), [1]), w, b), [3])
    ends = op.Concat(
        op.Equal(sequence, 0), op.Expand(op.constant(True), op.Concat(op.Shape(sequence, end=1), [1], axis=0)), axis=1
    )
    lengths = op.ArgMax(op.Cast(ends, to=dtypes.onnx_code(np.int32)), axis=1, keepdims=1)
    most = op.Max(op.Sub(lengths, op.Shape(w, start=2, end=3)), 0)
    starts = op.Range(0, op.Squeeze(op.Shape(y, start=2), [0]), 1)
    outside = op.Unsqueeze(op.Greater(op.Cast(starts, to=code), most), [1])
    best = op.ReduceMax(op.Where(outside, op.constant(-1.0, np.float32), op.Tanh(y)), [2], keepdims=0)
    return op.Where(op.Equal(lengths, 0), op.constant(0.0, np.float32), best)
