"""Recipes of attention operators and rotary embeddings of onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


def trim(d: Draw) -> None:
    """Drop absent inputs at the end."""
    while d.inputs and d.inputs[-1] is None:
        d.inputs.pop()


def prefer(d: Draw, **types: type[Any]) -> None:
    """Mostly draw the types of onnxruntime's CPU kernel."""
    if d.chance(0.7):
        d.types |= {name: np.dtype(kind) for name, kind in types.items()}


def whole(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


@recipe("RotaryEmbedding MRotaryEmbedding", MICROSOFT)
def rotary(d: Draw) -> None:
    prefer(d, T=np.float32)
    b, t, h, size = d.whole(1, 2), d.whole(1, 4), d.whole(1, 3), d.pick([4, 8, 16])
    flat = d.chance()
    d.put(d.array(0, (b, t, h * size) if flat else (b, h, t, size), "tame"))
    half = size // 2
    if d.chance(0.3):
        d.attributes |= {"num_heads": h, "rotary_embedding_dim": half}
        half //= 2
    longest = d.whole(t + 1, 9)
    if d.schema.name == "MRotaryEmbedding":
        d.attributes |= {"num_heads": h} if flat else {}
        parts = sorted(d.wholes(0, half, 2))
        section = [parts[0], parts[1] - parts[0], half - parts[1]]
        d.attributes["mrope_section"] = section
        d.attr("mrope_layout", [0, 1], 0)
        ids = d.rng.integers(0, longest, (3, b, t))
    elif d.chance():
        ids = d.rng.integers(0, longest - t + 1, 1)
    else:
        ids = d.rng.integers(0, longest, (b, t))
    d.put(ids.astype(np.int64), d.array(2, (longest, half), "around"), d.array(3, (longest, half), "around"))
    d.attr("interleaved", [0, 1], 0)


@recipe("GemmaRotaryEmbedding", MICROSOFT)
def gemma_rotary(d: Draw) -> None:
    b, h, t, size = d.whole(1, 2), d.whole(1, 3), d.whole(1, 4), d.pick([2, 4])
    d.put(d.array(0, (b, t, size), "tame"), *(d.array(1, (b, h, t, size), "tame") for _ in range(4)))
    d.outputs = ["q", "k"]


def _lengths(d: Draw, b: int, s: int, most: int) -> np.ndarray:
    """Draw the lengths of sequences that end with `s` new rows; `most` is one of them."""
    lengths = np.asarray(d.rng.integers(s, most + 1, b))
    lengths[d.whole(0, b - 1)] = most
    return lengths


def _full(lengths: np.ndarray, window: int) -> list[int]:
    """Return the sizes of caches of a window that are full after these lengths: other rows are not specified."""
    sizes = range(window, window + 4)
    return [c for c in sizes if all(n >= c and (n - c) % (c - window + 1) == 0 for n in lengths.tolist())]


@recipe("GroupQueryAttention", MICROSOFT)
def group_query_attention(d: Draw) -> None:
    prefer(d, T=d.pick([np.float32, np.float16]))
    g, size, past = d.whole(1, 2), d.pick([8, 16, 32]), d.whole(0, 6)
    bits = d.pick([0, 0, 0, 0, 8, 4]) if past else 0
    d.types["T_CACHE"] = {0: d.dtype("T"), 8: np.dtype(np.int8), 4: np.dtype(np.uint8)}[bits]
    n = g * d.whole(1, 3)
    first = past == 0 or d.chance(0.3)
    b = d.whole(1, 3) if first or d.chance(0.7) else 1
    chunk = not first and past > 0 and d.chance(0.2)  # several rows for each sequence, with query_seqlens
    s = d.whole(1, 5) if first or chunk or b == 1 else 1
    total = s if first else d.whole(s, past + s)
    lengths = np.full(b, total) if first else _lengths(d, b, s, total)
    cache = total - s if d.chance() and s < total else total + d.whole(0, 2)
    window = d.pick([-1, 1, 2, 3])
    full = _full(lengths, window) if window > 0 and past > 0 and not bits and d.chance(0.4) else []
    if slides := bool(full):
        cache = d.pick(full)
        d.attributes["sliding_window_cache"] = 1
    packed = d.chance(0.3)
    d.put(d.array(0, (b, s, (n + 2 * g * packed) * size), "tame"))
    d.put(*(None if packed else d.array(i, (b, s, g * size), "tame") for i in (1, 2)))
    held = size // 2 if bits == 4 else size
    d.put(*(d.array(3, (b, g, cache, held), "tame" if bits == 0 else "any") if past and cache else None for _ in range(2)))
    d.put(whole(lengths - 1), whole(total))
    rotary = d.attr("do_rotary", [0, 1], 0) and size % 16 == 0
    d.attributes["do_rotary"] = int(rotary)
    half = size // 2 if size == 16 or d.chance(0.7) else size // 4
    longest = max(cache, total) + 2
    d.put(*(d.array(0, (longest, half), "around") if rotary else None for _ in range(2)))
    ids = np.asarray(lengths[:, None] - s + np.arange(s)[None])
    d.put((np.zeros_like(ids) if first else ids).astype(np.int64) if rotary and d.chance(0.3) else None)
    bias = (d.pick([1, b]), d.pick([1, n]), s, total)
    d.put(d.array(0, bias, "tame") if d.chance(0.3) else None, d.array(0, (n,), "tame") if d.chance(0.2) else None)
    sink = d.inputs[11] is not None
    if bits:
        kind = d.pick(["PER_TENSOR", "PER_CHANNEL"])
        d.attributes |= {"kv_cache_bit_width": bits, "k_quant_type": kind, "v_quant_type": kind}
        shape = (1,) if kind == "PER_TENSOR" else (1, g, 1, size)
        d.put(*(np.asarray(d.array(12, shape, "positive") / (16 if bits == 8 else 2), np.float32) for _ in range(2)))
    d.put(*[None] * (16 - len(d.inputs)), np.full(b, s, np.int32) if chunk and cache else None)
    trim(d)
    d.attributes |= {"num_heads": n, "kv_num_heads": g}
    if rotary:
        d.attr("rotary_interleaved", [0, 1], 0)
    if not chunk and not slides and d.chance(0.1):
        d.attributes["causal"] = 0
    elif slides or d.chance(0.7):
        d.attributes["local_window_size"] = window
    d.attr("softcap", [0.0, 2.0], 0.0)
    d.attr("smooth_softmax", [0, 1], -1) if not sink else None
    d.attr("scale", lambda: d.real(0.1, 1), None)
    d.outputs = ["y", "present_key", "present_value"]
    if d.chance(0.2) and not slides:
        d.attributes["qk_output"] = d.whole(1, 2)
        d.outputs.append("scores")


def _mask(d: Draw, b: int, s: int, keys: int, ranges: bool) -> np.ndarray | None:
    """Draw a padding mask in one of its forms; some key of each row is seen, unless mask_filter_value is small."""
    form = d.pick(["none", "none", "lengths", "keys", "rows", *(["ranges", "packed"] if ranges else [])])
    if form == "none" or not keys:
        return None
    ends = np.asarray(d.rng.integers(1, keys + 1, b))
    if form == "lengths":
        return whole(ends)
    if form == "ranges":
        return whole([*ends, *(d.whole(0, e - 1) for e in ends)])
    if form == "packed":
        sums = [0, *np.cumsum(ends)]
        return whole([*ends, *sums, *sums])
    mask = d.rng.integers(0, 2, (b, keys) if form == "keys" else (b, s, keys))
    if d.chance(0.3):
        d.attributes["mask_filter_value"] = d.pick([-1.0, -10.0])
    else:
        mask[..., d.whole(0, keys - 1)] = 1
    return whole(mask)


@recipe("MultiHeadAttention", MICROSOFT)
def multi_head_attention(d: Draw) -> None:
    prefer(d, T=np.float32)
    beams = d.pick([1, 1, 1, 2])
    b, n, s, size = beams * d.whole(1, 2), d.whole(1, 3), d.pick([1, d.whole(1, 4)]), d.pick([2, 4, 8])
    form = d.pick(["plain", "plain", "plain", "given", "packed", "packed keys"])
    keys = s if form == "packed" or d.chance() else d.whole(1, 5)
    wide = d.pick([size, size + 2]) if form == "plain" else size
    past = d.whole(0, 3) if form == "plain" and d.chance(0.4) else None
    used = d.whole(0, 2) if past and d.chance(0.3) else None
    if form == "packed":
        d.put(d.array(0, (b, s, n, 3, size), "tame"), None, None)
    elif form == "packed keys":
        d.put(d.array(0, (b, s, n * size), "tame"), d.array(0, (b, keys, n, 2, size), "tame"), None)
    elif form == "given":
        d.put(d.array(0, (b, s, n * size), "tame"), *(d.array(0, (b, n, keys, size), "tame") for _ in range(2)))
    else:
        wide = size if past is not None else wide
        d.put(*(d.array(0, (b, t, n * w), "tame") for t, w in ((s, size), (keys, size), (keys, wide))))
    d.put(d.array(0, (n * (2 * size + wide),), "tame") if d.chance(0.4) and not form.startswith("packed") else None)
    total = keys + (past or 0 if used is None else used)
    d.put(_mask(d, b, s, total, False))
    d.put(d.array(0, (d.pick([1, b]), d.pick([1, n]), s, total), "tame") if d.chance(0.3) else None)
    rows = (past or 0) if used is None else used + keys + d.whole(0, 2)
    d.put(*(None if past is None else d.array(0, (b, n, rows, size), "tame") for _ in range(2)))
    d.put(None if used is None else whole([used]))
    several = beams > 1 and past is not None
    d.put(whole(d.rng.integers(0, beams, (b // beams, beams, rows))) if several else None)
    trim(d)
    d.attributes["num_heads"] = n
    d.attr("scale", lambda: d.real(0.1, 1), None)
    d.attr("unidirectional", [0, 1], 0)
    if past is not None or d.chance(0.3):
        d.outputs = ["y", "present_key", "present_value"]
        if d.chance(0.3):
            d.types["QK"] = d.dtype("T")
            d.outputs.append("scores")


@recipe("DecoderMaskedMultiHeadAttention", MICROSOFT)
def decoder_masked(d: Draw) -> None:
    prefer(d, T=np.float32)
    beams = d.pick([1, 1, 2])
    b, n, size = d.whole(1, 2) * beams, d.whole(1, 3), d.pick([2, 4, 8])
    form = d.pick(["shared", "shared", "shared", "past", "given"])
    used, keys = d.whole(0, 4), d.whole(1, 4)
    rows = used + 1 + d.whole(0, 2) if form == "shared" else used
    total = keys if form == "given" else used + 1
    packed = form == "past" and d.chance(0.3)
    d.put(d.array(0, (b, 1, n * size * (3 if packed else 1)), "tame"))
    shape = (b, n, keys, size) if form == "given" else (b, 1, n * size)
    d.put(*(None if packed else d.array(0, shape, "tame") for _ in range(2)))
    mask = d.rng.integers(0, 2, (b, total))
    mask[:, 0] = 1
    d.put(whole(mask) if d.chance(0.4) else None)
    d.put(d.array(0, (d.pick([1, b]), d.pick([1, n]), 1, total), "tame") if d.chance(0.3) else None)
    d.put(*(None if form == "given" else d.array(0, (b, n, rows, size), "tame") for _ in range(2)))
    d.put(whole([used]) if form == "shared" else None)
    several = beams > 1 and form == "shared"
    d.put(whole([beams]) if several else None)
    d.put(whole(d.rng.integers(0, beams, (b // beams, beams, rows))) if several else None)
    d.put(d.array(0, (3 * n * size,), "tame") if d.chance(0.4) else None)
    d.attributes |= {"num_heads": n, "past_present_share_buffer": int(form == "shared")}
    d.attr("scale", lambda: d.real(0.1, 1), None)
    if form != "given":
        d.outputs = ["y", "present_key", "present_value"]
        if d.chance(0.3):
            d.types["QK"] = d.dtype("T")
            d.attributes["output_qk"] = 1
            d.outputs.append("scores")


@recipe("Attention", MICROSOFT)
def attention(d: Draw) -> None:
    prefer(d, T=np.float32)
    b, n, s, size, hidden = d.whole(1, 2), d.whole(1, 3), d.whole(1, 4), d.pick([2, 4, 8]), d.whole(1, 6)
    past = d.whole(0, 3) if d.chance(0.4) else None
    shared = bool(past) and d.chance(0.1)
    sizes = [n * size] * 3
    if d.chance(0.4):
        sizes[2] += 0 if past is not None else 2 * n
        d.attributes["qkv_hidden_sizes"] = sizes
    d.put(d.array(0, (b, s, hidden), "tame"), d.array(0, (hidden, sum(sizes)), "around"))
    d.put(d.array(0, (sum(sizes),), "tame") if d.chance(0.7) else None)
    total = s + (past or 0)
    d.put(_mask(d, b, s, total, True))
    rows = total + d.whole(0, 2) if shared else past or 0
    d.put(None if past is None else d.array(0, (2, b, n, rows, size), "tame"))
    bias = (d.pick([1, b]), d.pick([1, n]), s, total)
    d.put(d.array(0, bias, "tame") if d.chance(0.3 if past is None else 0.1) else None)
    d.put(whole([past]) if shared else None)
    trim(d)
    d.attributes["num_heads"] = n
    if shared:
        d.attributes["past_present_share_buffer"] = 1
    d.attr("scale", lambda: d.real(0.1, 1), None)
    d.attr("unidirectional", [0, 1], 0)
    if past is not None or (d.chance(0.3) and sizes[0] == sizes[2]):
        d.outputs = ["y", "present"]


@recipe("QAttention", MICROSOFT)
def q_attention(d: Draw) -> None:
    prefer(d, T1=np.uint8, T3=np.float32)
    b, n, s, size, hidden = d.whole(1, 2), d.whole(1, 3), d.whole(1, 4), d.pick([2, 4, 8]), d.whole(1, 6)
    past = d.whole(0, 3) if d.chance(0.4) else None
    width = 3 * n * size
    d.put(d.array(0, (b, s, hidden), "tame"), d.array(1, (hidden, width), "tame"), d.array(2, (width,), "tame"))
    columns = (width,) if d.chance(0.3) else ()
    scales = (d.array(3, (), "positive"), d.array(4, columns, "positive"))
    d.put(*(np.asarray(v.astype(np.float32) / 10).astype(v.dtype) for v in scales))
    d.put(_mask(d, b, s, s + (past or 0), True))
    d.put(d.array(0, (), "tame") if d.chance() else None, d.array(1, columns, "tame") if d.chance() else None)
    d.put(None if past is None else d.array(2, (2, b, n, past, size), "tame"))
    trim(d)
    d.attributes["num_heads"] = n
    d.attr("scale", lambda: d.real(0.1, 1), None)
    d.attr("unidirectional", [0, 1], 0)
    if past is not None or d.chance(0.3):
        d.outputs = ["y", "present"]


@recipe("SparseAttention", MICROSOFT)
def sparse_attention(d: Draw) -> None:
    g, size, block, layouts = d.whole(1, 2), d.pick([8, 16]), 16, d.whole(1, 2)
    n = g * d.whole(1, 2) * layouts
    first = d.chance(0.3)
    b = d.whole(1, 2) if first or d.chance(0.7) else 1
    s = d.whole(1, 20) if first or b == 1 else 1
    total = s if first else d.whole(s, 40)
    blocks = -(-total // block) + d.whole(0, 1)
    lengths = np.full(b, total) if first else _lengths(d, b, s, total)
    seen = [[[c for c in range(r + 1) if c == r or d.chance()] for r in range(blocks)] for _ in range(layouts)]
    columns = [[c for row in rows for c in row] for rows in seen]
    most = max(map(len, columns))
    packed = d.chance(0.3)
    d.put(d.array(0, (b, s, (n + 2 * g * packed) * size), "tame"))
    d.put(*(None if packed else d.array(0, (b, s, g * size), "tame") for _ in range(2)))
    d.put(*(d.array(0, (b, g, blocks * block, size), "tame") for _ in range(2)))
    d.put(whole([np.cumsum([0, *map(len, rows)]) for rows in seen]), whole([c + [-1] * (most - len(c)) for c in columns]))
    d.put(whole(total), whole(lengths))
    if d.attr("do_rotary", [0, 1], 0):
        d.put(*(d.array(0, (blocks * block, size // 2), "around") for _ in range(2)))
        d.attr("rotary_interleaved", [0, 1], 0)
    d.attributes |= {"num_heads": n, "kv_num_heads": g, "sparse_block_size": block}
    d.attr("scale", lambda: d.real(0.1, 1), None)
    d.outputs = ["y", "present_key", "present_value"]


def _padding(d: Draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw the places of tokens and padding, the lengths of the sequences, and the number of tokens."""
    b, s = d.whole(1, 3), d.whole(1, 4)
    lengths = np.asarray(d.rng.integers(1, s + 1, b))
    real = (np.arange(s) < lengths[:, None]).reshape(-1)
    places = np.concatenate([np.nonzero(real)[0], np.nonzero(~real)[0]])
    return whole(places.reshape(b, s)), whole(lengths), int(real.sum())


@recipe("RemovePadding RestorePadding", MICROSOFT)
def padding(d: Draw) -> None:
    places, lengths, tokens = _padding(d)
    hidden = d.whole(1, 4)
    if d.schema.name == "RestorePadding":
        d.put(d.array(0, (tokens, hidden)), places)
        return
    d.put(d.array(0, (*places.shape, hidden)), lengths)
    d.outputs = ["y", "token_offset", "cumulated_seq_len", "max_seq_len"]


@recipe("PackedAttention PackedMultiHeadAttention", MICROSOFT)
def packed_attention(d: Draw) -> None:
    places, lengths, tokens = _padding(d)
    (b, s), n, size = places.shape, d.whole(1, 3), d.pick([2, 4])
    sums = whole([0, *np.cumsum(lengths)])
    wide = size if d.chance() else size + 2
    if d.schema.name == "PackedAttention":
        hidden, sizes = d.whole(1, 5), [n * size, n * size, n * wide]
        d.put(*(d.array(0, shape, "around") for shape in ((tokens, hidden), (hidden, sum(sizes)), (sum(sizes),))))
        if wide != size or d.chance(0.3):
            d.attributes["qkv_hidden_sizes"] = sizes
    elif d.chance(0.4):
        d.put(d.array(0, (tokens, n, 3, size), "tame"), None, None)
        d.put(d.array(0, (3 * n * size,), "tame") if d.chance() else None)
    else:
        d.put(*(d.array(0, (tokens, n * w), "tame") for w in (size, size, wide)))
        d.put(d.array(0, (n * (2 * size + wide),), "tame") if d.chance() else None)
    d.put(places, sums)
    d.put(d.array(0, (d.pick([1, b]), d.pick([1, n]), s, s), "tame") if d.chance(0.3) else None)
    trim(d)
    d.attributes["num_heads"] = n
    d.attr("scale", lambda: d.real(0.1, 1), None)


@recipe("RelativePositionBias", MICROSOFT)
def relative_position_bias(d: Draw) -> None:
    length = d.whole(1, 12)
    d.put(d.array(0, (d.pick([4, 8, 16]), d.whole(1, 3)), "tame"), np.int64(length).reshape(1), np.int64(length).reshape(1))
    d.attributes["max_distance"] = d.whole(9, 16)
    d.attr("is_bidirectional", [0, 1], 0)


@recipe("GatedRelativePositionBias", MICROSOFT)
def gated_relative_position_bias(d: Draw) -> None:
    places, _, tokens = _padding(d)
    (b, s), n, size, width = places.shape, d.whole(1, 3), d.pick([2, 4]), 2 * d.whole(1, 3)
    packed = d.chance()
    d.put(d.array(0, (tokens, n * size) if packed else (b, s, n * size), "tame"))
    shapes = ((n * size,), (1, n, s, s), (size, width), (width,), (1, n, 1, 1))
    d.put(*(d.array(0, shape, "around") for shape in shapes))
    if packed:
        d.put(places)
    d.attributes["num_heads"] = n
