"""Recipes of operators on tokens, strings and words."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


@recipe("NGramRepeatBlock", MICROSOFT)
def ngram_repeat_block(d: Draw) -> None:
    rows, count, tokens = d.whole(1, 3), d.whole(0, 9), d.whole(2, 6)
    d.attributes["ngram_size"] = d.whole(1, 3)
    d.put(d.rng.integers(0, min(tokens, d.whole(1, 3)), (rows, count)).astype(np.int64), d.array(1, (rows, tokens), "tame"))


@recipe("BifurcationDetector", MICROSOFT)
def bifurcation_detector(d: Draw) -> None:
    source, current = (d.rng.integers(0, 5, d.whole(1, 8)).astype(np.int64) for _ in range(2))
    start = d.whole(0, len(source))
    d.put(source, current, d.ints([start]))
    if d.chance(0.7):
        predicted = np.append(source[start:], d.whole(0, 5))
        d.put(np.where(d.rng.random(len(predicted)) < 0.2, 3, predicted).astype(np.int64))
    d.attr("min_ngram_size", [1, 2], 1)
    d.attr("max_ngram_size", [2, 3, 4], 3)
    d.outputs.append("suffix_match_idx")


@recipe("MurmurHash3", MICROSOFT)
def murmur_hash3(d: Draw) -> None:
    d.attributes["positive"] = int(d.dtype("T2") == np.uint32)
    d.attr("seed", lambda: d.whole(0, 2**31), 0)
    d.put(d.array(0, d.shape()))


@recipe("Tokenizer", MICROSOFT)
def tokenizer(d: Draw) -> None:
    texts = ["Hello World", "a,b;c d", "", "日本 ab", "aXYbXc", "  x  ", "abab 12", "é-è"]
    way = d.pick(["separators", "characters", "tokenexp"])
    if way == "tokenexp":
        d.attributes["tokenexp"] = d.pick([".", "[a-z]+", "a|ab", "a*", "[0-9]", "\\w+"])
    else:
        several = [[" "], [",", ";"], ["X", "XY"], ["XY", "X"], ["[,;] *", "-"], [" *"]]
        d.attributes["separators"] = d.pick(several) if way == "separators" else [""]
    characters = way == "characters" or d.attributes.get("tokenexp") == "."
    d.attributes["mincharnum"] = 1 if characters else d.pick([1, 1, 2, 3])
    d.attributes["mark"], d.attributes["pad_value"] = d.whole(0, 1), d.pick(["#", ""])
    shape = d.shape(1, 2)
    d.put(np.array([d.pick(texts) for _ in range(int(np.prod(shape)))], object).reshape(shape))


@recipe("WordConvEmbedding", MICROSOFT)
def word_conv_embedding(d: Draw) -> None:
    """No word is empty: onnxruntime leaves its row uninitialized."""
    words, width, filters, features, known = d.whole(1, 4), d.whole(2, 7), d.whole(1, 4), d.whole(1, 4), d.whole(2, 9)
    window = d.whole(1, width)
    lengths = d.rng.integers(1, width + 1, words)
    letters = d.rng.integers(1, known, (words, width))
    d.put(np.where(np.arange(width) < lengths[:, None], letters, 0).astype(np.int32))
    d.put(d.array(1, (filters, 1, window, features), "around"), d.array(2, (filters,), "around"))
    d.put(d.array(3, (known, features), "around"))
    for name, size in (("embedding_size", filters), ("conv_window_size", window), ("char_embedding_size", features)):
        d.attr(name, [size], None)


def _mapping(d: Draw, size: int, heads: int) -> None:
    dtype = d.dtype(0)
    d.attributes |= {"max_ngram_size": size, "n_head_per_ngram": heads, "pad_id": d.whole(0, 3)}
    d.put(d.rng.integers(-9 if d.chance(0.2) else 0, 10**6 if d.chance() else 20, size + d.whole(0, 1)).astype(dtype))
    d.put(d.rng.integers(1, 50, (size - 1) * heads).astype(dtype))


@recipe("NGramHashMapping", MICROSOFT)
def ngram_hash_mapping(d: Draw) -> None:
    size, heads, rows, count, dtype = d.whole(2, 4), d.whole(1, 3), d.whole(1, 3), d.whole(1, 6), d.dtype(0)
    d.put(d.rng.integers(0, d.pick([4, 10**6]), (rows, count)).astype(dtype))
    _mapping(d, size, heads)
    d.put(d.rng.integers(0, 4, (rows, size - 1)).astype(dtype) if d.chance() else None)
    d.put(d.rng.integers(0, 99, (size - 1) * heads).astype(dtype) if d.chance() else None)
    d.put(np.array(d.whole(0, 3), dtype) if d.chance() else None)
    d.put(np.sort(d.rng.integers(0, 3, (rows, count))).astype(np.int32) if d.chance() else None)
    d.attr("reset_on_eos", [0, 1], 0)
    if d.chance():
        d.outputs.append("present_ids")


@recipe("VarlenNGramHashMapping", MICROSOFT)
def varlen_ngram_hash_mapping(d: Draw) -> None:
    size, heads, rows, dtype = d.whole(2, 4), d.whole(1, 3), d.whole(1, 3), d.dtype(0)
    ends = np.cumsum([0, *d.wholes(1, 5, rows)])
    d.put(d.rng.integers(0, d.pick([4, 10**6]), ends[-1]).astype(dtype))
    _mapping(d, size, heads)
    d.put(ends.astype(np.int32))
    d.put(d.rng.integers(0, 4, (rows, size - 1)).astype(dtype) if d.chance() else None)
    d.put(d.rng.integers(0, 99, (size - 1) * heads).astype(dtype) if d.chance() else None)
    d.put(np.array(d.whole(0, 3), dtype) if d.chance() else None)
    segments = d.chance()
    d.put(d.rng.integers(0, 3, ends[-1]).astype(np.int32) if segments else None)
    past = segments and d.chance()
    d.put(d.rng.integers(0, 3, (rows, size - 1)).astype(np.int32) if past else None)
    captures = d.whole(1, 4) if d.chance() else 0
    if captures:
        d.attributes["state_update_capacity"] = captures
        d.put(d.rng.integers(0, 5, rows).astype(np.int32))
    d.attr("reset_on_eos", [0, 1], 0)
    d.outputs += ["present_ids", "present_segment_ids" if segments else "", *(["state_update"] if captures else [])]
    while not d.outputs[-1]:
        d.outputs.pop()
