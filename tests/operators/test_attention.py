"""Attention, FlexAttention and LinearAttention against loops over heads, queries and keys."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, parser

F = np.float32
INF = math.inf
VERSIONS = [23, 24, 25]


def data(seed: int, *shapes: tuple[int, ...], dtype: Any = F) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(s).astype(dtype) for s in shapes]


def attend(q: Any, k: Any, v: Any, allowed: Any = None, bias: Any = None, scale: float | None = None, cap: float = 0.0) -> Any:
    """4-D attention one query at a time, in float64: Y, and the scores raw, capped, biased and as probabilities.

    allowed(b, h, i, j): whether query i may see key j.  bias[b, h, i, j] is added to the scores.
    """
    (batch, heads, queries, size), (_, kv_heads, keys, _) = q.shape, k.shape
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale = 1 / math.sqrt(size) if scale is None else scale
    y = np.zeros((batch, heads, queries, v.shape[3]))
    shown = np.zeros((4, batch, heads, queries, keys))
    for b, h, i in np.ndindex(batch, heads, queries):
        g = h * kv_heads // heads
        see = [allowed is None or allowed(b, h, i, j) for j in range(keys)]
        for j in range(keys):
            raw = scale * q[b, h, i] @ k[b, g, j]
            capped = cap * math.tanh(raw / cap) if cap else raw
            biased = (capped + (0 if bias is None else bias[b, h, i, j])) if see[j] else -INF
            shown[:3, b, h, i, j] = raw, capped, biased
        weights = np.exp(shown[2, b, h, i])
        if weights.sum() > 0:
            shown[3, b, h, i] = weights / weights.sum()
        y[b, h, i] = shown[3, b, h, i] @ v[b, g]
    return y, shown


def pack(x: np.ndarray) -> np.ndarray:
    """(batch, heads, length, size) as (batch, length, heads * size)."""
    return np.concatenate([x[:, h] for h in range(x.shape[1])], axis=-1)


TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("opset", VERSIONS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
def test_heads_in_both_layouts(check: Any, opset: int, heads: tuple[int, int]) -> None:
    h, g = heads
    q, k, v = data(0, (2, h, 3, 4), (2, g, 5, 4), (2, g, 5, 6))
    y = attend(q, k, v)[0].astype(F)
    check("Attention", [q, k, v], [y], opset=opset, **TOLERANCE)
    check("Attention", [pack(q), pack(k), pack(v)], [pack(y)], opset=opset, q_num_heads=h, kv_num_heads=g, **TOLERANCE)


@pytest.mark.parametrize("opset", VERSIONS)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores_that_are_shown(check: Any, opset: int, mode: int) -> None:
    q, k, v, bias = data(1, (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 2), (2, 2, 3, 5))
    y, shown = attend(q, k, v, lambda b, h, i, j: j <= i, bias, scale=0.75, cap=1.5)
    check("Attention", [q, k, v, bias], [y.astype(F), shown[mode].astype(F)], opset=opset, outputs=["y", "", "", "s"],
          is_causal=1, scale=0.75, softcap=1.5, qk_matmul_output_mode=mode, **TOLERANCE)  # fmt: skip


@pytest.mark.parametrize("opset", VERSIONS)
def test_negative_and_zero_scale(check: Any, opset: int) -> None:
    q, k, v = data(2, (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2))
    for scale in (-0.5, 0.0, 4.0):
        check("Attention", [q, k, v], [attend(q, k, v, scale=scale)[0].astype(F)], opset=opset, scale=scale, **TOLERANCE)


@pytest.mark.parametrize("opset", VERSIONS)
@pytest.mark.parametrize("shape", [(3, 7), (7,), (1, 7), (3, 1), (2, 1, 7), (2, 1, 3, 7), (1, 2, 1, 7), ()])
def test_masks_of_every_rank(check: Any, opset: int, shape: tuple[int, ...]) -> None:
    """A boolean mask forbids, a float one is added; the cache counts as keys, a 3-D mask is one per head."""
    if opset > 23 and shape[-1:] == (1,):
        return  # one column is a mask too short from 24 on
    q, k, v, pk, pv, added = data(3, (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3), (2, 2, 2, 4), (2, 2, 2, 3), shape)
    k2, v2 = np.concatenate([pk, k], 2), np.concatenate([pv, v], 2)
    whole = np.broadcast_to(added, (2, 2, 3, 7))
    for causal in (0, 1):
        ok = (lambda b, h, i, j: j <= i + 2) if causal else (lambda b, h, i, j: True)
        y = attend(q, k2, v2, ok, whole)[0]
        check("Attention", [q, k, v, added, pk, pv], [y.astype(F), k2, v2], opset=opset, is_causal=causal, **TOLERANCE)
        y = attend(q, k2, v2, lambda b, h, i, j, ok=ok: ok(b, h, i, j) and whole[b, h, i, j] > 0)[0]
        check("Attention", [q, k, v, added > 0, pk, pv], [y.astype(F), k2, v2], opset=opset, is_causal=causal, **TOLERANCE)


@pytest.mark.parametrize("opset", VERSIONS)
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, ml_dtypes.bfloat16])
def test_masks_of_other_types(check: Any, opset: int, dtype: Any) -> None:
    """A number of any type is added."""
    q, k, v = data(4, (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 3))
    mask = np.arange(15).reshape(3, 5).astype(dtype)
    y = attend(q, k, v, bias=np.broadcast_to(mask.astype(F), (1, 2, 3, 5)))[0].astype(F)
    check("Attention", [q, k, v, mask], [y], opset=opset, **TOLERANCE)


@pytest.mark.parametrize("opset", VERSIONS)
def test_nobody_to_see(check: Any, opset: int) -> None:
    """A query that may see no key gets zeros, whatever stands in the keys; the others are as ever."""
    q, k, v = data(5, (1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 2))
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 0, 1]], bool)
    y, shown = attend(q, k, v, lambda b, h, i, j: mask[i, j])
    assert not y[0, 0, 1].any()
    check("Attention", [q, k, v, mask], [y.astype(F), shown[3].astype(F)], opset=opset, outputs=["y", "", "", "s"],
          qk_matmul_output_mode=3, **TOLERANCE)  # fmt: skip
    added = np.where(mask, 0, -INF).astype(F)
    check("Attention", [q, k, v, added], [y.astype(F)], opset=opset, **TOLERANCE)
    both = attend(q, k, v, lambda b, h, i, j: mask[i, j] and j <= i)[0].astype(F)
    check("Attention", [q, k, v, mask], [both], opset=opset, is_causal=1, **TOLERANCE)
    q[0, 0, 1] = INF
    check("Attention", [q, k, v, mask], [y.astype(F)], opset=opset, **TOLERANCE)


def test_nan_is_not_hidden(check: Any) -> None:
    q, k, v = data(6, (1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 2))
    y = attend(q, k, v)[0].astype(F)
    q[0, 0, 0, 0] = y[0, 0, 0] = math.nan
    check("Attention", [q, k, v], [y], opset=24, **TOLERANCE)


@pytest.mark.parametrize("opset", [24, 25])
@pytest.mark.parametrize("causal", [0, 1])
def test_an_external_cache(check: Any, opset: int, causal: int) -> None:
    """The last query is at the last valid key of its sample; a short mask excludes the keys after it."""
    q, k, v, added = data(7, (4, 4, 3, 4), (4, 2, 6, 4), (4, 2, 6, 5), (3, 4))
    valid = np.int64([0, 2, 4, 3])
    bias = np.broadcast_to(np.pad(added, ((0, 0), (0, 2))), (4, 4, 3, 6))

    def ok(b: int, h: int, i: int, j: int) -> bool:
        return bool(j < valid[b] and j < 4 and (not causal or j <= i + valid[b] - 3))

    y = attend(q, k, v, ok, bias)[0].astype(F)
    check("Attention", [q, k, v, added, None, None, valid], [y], opset=opset, is_causal=causal, **TOLERANCE)
    y = attend(q, k, v, lambda b, h, i, j: ok(b, h, i, j) and added[i, j] > 0)[0].astype(F)
    check("Attention", [q, k, v, added > 0, None, None, valid], [y], opset=opset, is_causal=causal, **TOLERANCE)


@pytest.mark.parametrize("opset", [24, 25])
def test_one_column_is_a_short_mask(check: Any, opset: int) -> None:
    q, k, v = data(8, (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2))
    y = np.broadcast_to(v[:, :, :1], (1, 2, 3, 2))
    check("Attention", [q, k, v, np.ones((3, 1), bool)], [y], opset=opset, **TOLERANCE)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("left, right", [(-1, -1), (0, 0), (1, -1), (-1, 2), (2, 1)])
@pytest.mark.parametrize("cache", ["none", "past", "external"])
def test_windows(check: Any, causal: int, left: int, right: int, cache: str) -> None:
    q, k, v, pk, pv = data(9, (2, 2, 4, 3), (2, 2, 6, 3), (2, 2, 6, 2), (2, 2, 2, 3), (2, 2, 2, 2))
    valid = np.int64([6, 3])
    k2, v2 = (np.concatenate([pk, k], 2), np.concatenate([pv, v], 2)) if cache == "past" else (k, v)

    def ok(b: int, h: int, i: int, j: int) -> bool:
        p = i + {"none": 0, "past": 2, "external": int(valid[b]) - 4}[cache]
        return not (
            (causal and j > p) or (left >= 0 and j < p - left) or (right >= 0 and j > p + right)
            or (cache == "external" and j >= valid[b])
        )  # fmt: skip

    inputs = [q, k, v] + {"none": [], "past": [None, pk, pv], "external": [None, None, None, valid]}[cache]
    y = attend(q, k2, v2, ok)[0].astype(F)
    check("Attention", inputs, [y, k2, v2] if cache == "past" else [y], opset=25, is_causal=causal, left_window_size=left,
          right_window_size=right, **TOLERANCE)  # fmt: skip


@pytest.mark.parametrize("opset", VERSIONS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_types(check: Any, opset: int, dtype: Any) -> None:
    q, k, v, pk, pv = data(10, (1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 4), (1, 2, 2, 8), (1, 2, 2, 4), dtype=dtype)
    k2, v2 = np.concatenate([pk, k], 2), np.concatenate([pv, v], 2)
    y, shown = attend(q, k2, v2, lambda b, h, i, j: j <= i + 2)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == np.float64 else {"atol": 2e-2}
    for precision in ({}, {"softmax_precision": TensorProto.FLOAT}) if dtype != np.float64 else ({},):
        check("Attention", [q, k, v, None, pk, pv], [y.astype(dtype), k2, v2, shown[3].astype(dtype)], opset=opset, is_causal=1,
              qk_matmul_output_mode=3, **precision, **tolerance)  # fmt: skip


def test_softmax_precision_widens(check: Any) -> None:
    """In float16 the sum of 4000 equal weights rounds; the definition keeps float16 unless it is told otherwise."""
    q, k = np.zeros((1, 1, 1, 2), np.float16), np.zeros((1, 1, 3000, 2), np.float16)
    v = np.ones((1, 1, 3000, 1), np.float16)
    check("Attention", [q, k, v], [np.ones((1, 1, 1, 1), np.float16)], opset=24, softmax_precision=1)


def test_values_of_another_type(check: Any) -> None:
    q, k = data(11, (1, 2, 3, 4), (1, 2, 5, 4))
    (v,) = data(12, (1, 2, 5, 3), dtype=np.float64)
    check("Attention", [q, k, v], [attend(q, k, v)[0].astype(F), k, v], opset=24, **TOLERANCE)


def test_empty(check: Any) -> None:
    q, k, v = data(13, (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))
    none = np.zeros((2, 2, 3, 3), F)
    check("Attention", [q, k[:, :, :0], v[:, :, :0]], [none], opset=25)
    check("Attention", [q, k[:, :, :0], v[:, :, :0]], [none], opset=25, is_causal=1)
    check("Attention", [q[:, :, :0], k, v], [none[:, :, :0]], opset=25)
    check("Attention", [q[:0], k[:0], v[:0]], [none[:0]], opset=25)
    mean = np.broadcast_to(v.mean(2, keepdims=True), none.shape)
    check("Attention", [q[..., :0], k[..., :0], v], [mean], opset=25, **TOLERANCE)


def test_attention_refuses(fails: Any) -> None:
    q, k, v, p = data(14, (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3), (2, 2, 1, 4))
    flat = [pack(x) for x in (q, k, v)]
    for opset in VERSIONS:
        fails("Attention", flat, "q_num_heads must divide", opset=opset)
        fails("Attention", flat, "kv_num_heads must divide", opset=opset, q_num_heads=2, kv_num_heads=3)
        fails("Attention", [q, k, flat[2]], "all 3-D or all 4-D", opset=opset)
        fails("Attention", [q, k, v, None, p], "must be present together", opset=opset)
        fails("Attention", [q, k, v[:, :, :4]], "Q, K and V must match", opset=opset)
        fails("Attention", [q, k[:, :1], v[:, :1].repeat(3, 1)], "Q, K and V must match", opset=opset)
        fails("Attention", [q, k.repeat(2, 1)[:, :3], v.repeat(2, 1)[:, :3]], "Q, K and V must match", opset=opset)
        fails("Attention", [q, k, v, np.ones((4, 5), bool)], "does not broadcast", opset=opset)
        fails("Attention", [q, k, v, np.ones((3, 6), bool)], "attn_mask", opset=opset)
        fails("Attention", [q, k, v], "mode must be 0, 1, 2 or 3, got 4", opset=opset, qk_matmul_output_mode=4)
        fails("Attention", [q, k, v], "got 7", opset=opset, softmax_precision=7)
        fails("Attention", [q, k, v], "q_num_heads and kv_num_heads must match", opset=opset, q_num_heads=4)
    fails("Attention", [q, k, v, np.ones((3, 4), bool)], "must have 5 keys", opset=23)
    fails("Attention", [q, k, v, None, p, v[:, :, :1], np.int64([1, 1])], "must not be combined with past_key", opset=24)
    fails("Attention", [q, k, v, None, None, None, np.int64([1])], r"nonpad_kv_seqlen must have shape \(2,\)", opset=24)
    fails("Attention", [q, k, v], "window sizes must be at least -1", opset=25, left_window_size=-2)


# --- FlexAttention

PREVIEW = {"opset": 1, "domain": "ai.onnx.preview"}


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_flex(check: Any, heads: tuple[int, int]) -> None:
    q, k, v = data(20, (2, heads[0], 3, 4), (2, heads[1], 5, 4), (2, heads[1], 5, 6))
    check("FlexAttention", [q, k, v], [attend(q, k, v)[0].astype(F)], **PREVIEW, **TOLERANCE)
    check("FlexAttention", [q, k, v], [attend(q, k, v, scale=0.3)[0].astype(F)], scale=0.3, **PREVIEW, **TOLERANCE)


def test_flex_graphs(check: Any) -> None:
    q, k, v = data(21, (1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6))
    for kind, dtype in (("float", F), ("double", np.float64)):
        score = parser.parse_graph(f"""s ({kind}[a, b, c, d] x) => ({kind}[a, b, c, d] y)
            {{ two = Constant<value = {kind} {{2.0}}>() u = Div(x, two) t = Tanh(u) y = Mul(t, two) }}""")
        prob = parser.parse_graph(f"p ({kind}[a, b, c, d] x) => ({kind}[a, b, c, d] y) {{ y = Mul(x, x) }}")
        a, b, c = (x.astype(dtype) for x in (q, k, v))
        _, shown = attend(a, b, c, cap=2.0)
        y = (shown[3] ** 2) @ c.repeat(2, 1)
        check("FlexAttention", [a, b, c], [y.astype(dtype)], score_mod=score, prob_mod=prob, **PREVIEW, **TOLERANCE)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_flex_narrow(check: Any, dtype: Any) -> None:
    """The graphs see float32 unless another precision is named."""
    q, k, v = data(22, (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6), dtype=dtype)
    y = attend(q, k, v)[0].astype(dtype)
    for kind, precision in (("float", {}), ("float16", {"softmax_precision": 10}), ("double", {"softmax_precision": 11})):
        same = parser.parse_graph(f"s ({kind}[a, b, c, d] x) => ({kind}[a, b, c, d] y) {{ z = Add(x, x) y = Sub(z, x) }}")
        check("FlexAttention", [q, k, v], [y], score_mod=same, prob_mod=same, atol=2e-2, **precision, **PREVIEW)


def test_flex_refuses(fails: Any) -> None:
    q, k, v = data(23, (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6))
    less = parser.parse_graph("s (float[a, b, c, d] x) => (float[a, b, c] y) { y = ReduceSum<keepdims = 0>(x) }")
    fails("FlexAttention", [q, k, v], "score_mod must return one tensor of shape", score_mod=less, **PREVIEW)
    fails("FlexAttention", [q[0], k[0], v[0]], "Q, K and V must be 4-D", **PREVIEW)
    fails("FlexAttention", [q[:, :1], k, v], "Q, K and V must match", **PREVIEW)


# --- LinearAttention


def recur(q: Any, k: Any, v: Any, state: Any, g: Any, b: Any, scale: float | None = None) -> Any:
    """The recurrence on (batch, time, heads, size), token by token and head by head, in float64.

    g: log decay per key dimension or None.  b: rate per head or None.
    """
    batch, time, heads, size = q.shape
    kv = k.shape[2]
    scale = 1 / math.sqrt(size) if scale is None else scale
    s = state.astype(np.float64).copy()
    y = np.zeros((batch, time, heads, v.shape[3]))
    for n, t, h in np.ndindex(batch, time, kv):
        if g is not None:
            s[n, h] = np.diag(np.exp(g[n, t, h])) @ s[n, h]
        new = v[n, t, h].astype(np.float64)
        if b is not None:
            new = b[n, t, h] * (new - s[n, h].T @ k[n, t, h])
        s[n, h] += np.outer(k[n, t, h], new)
        for r in range(heads // kv):
            at = h * (heads // kv) + r
            y[n, t, at] = scale * (q[n, t, at] @ s[n, h])
    return y.reshape(batch, time, -1), s


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_linear(check: Any, rule: str, past: bool, shared: bool) -> None:
    """shared: one decay per head and one rate for all heads."""
    q, k, v, s = data(30, (2, 4, 6, 3), (2, 4, 2, 3), (2, 4, 2, 5), (2, 2, 3, 5))
    g, b = data(31, (2, 4, 2, 1 if shared else 3), (2, 4, 1 if shared else 2))
    g, b = -abs(g), 1 / (1 + np.exp(-b))
    decay, beta = (g if "gated" in rule else None), (b if "delta" in rule else None)
    y, final = recur(q, k, v, s if past else np.zeros_like(s), None if decay is None else np.broadcast_to(g, (2, 4, 2, 3)),
                     None if beta is None else np.broadcast_to(b, (2, 4, 2)), 0.7 if past else None)  # fmt: skip
    inputs = [flat(q), flat(k), flat(v), s if past else None, None if decay is None else flat(decay), beta]
    check("LinearAttention", inputs, [y.astype(F), final.astype(F)], opset=27, q_num_heads=6, kv_num_heads=2, update_rule=rule,
          rtol=1e-4, atol=1e-5, **({"scale": 0.7, "chunk_size": 3} if past else {}))  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_linear_narrow(check: Any, dtype: Any) -> None:
    """Everything is float32 inside; the state keeps its own type, and is of the query's where there was none."""
    q, k, v, g = data(31, (1, 5, 2, 4), (1, 5, 2, 4), (1, 5, 2, 3), (1, 5, 2, 4), dtype=dtype)
    (s,) = data(32, (1, 2, 4, 3))
    y, final = recur(*(x.astype(F) for x in (q, k, v)), s, g.astype(F), None)
    given = {"opset": 27, "q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated", "atol": 1e-3}
    check("LinearAttention", [flat(q), flat(k), flat(v), s, flat(g)], [y.astype(dtype), final.astype(F)], **given)
    y, final = recur(*(x.astype(F) for x in (q, k, v)), np.zeros_like(s), g.astype(F), None)
    check("LinearAttention", [flat(q), flat(k), flat(v), None, flat(g)], [y.astype(dtype), final.astype(dtype)], **given)


def test_linear_without_tokens(check: Any) -> None:
    none = np.zeros((2, 0, 4), F)
    (s,) = data(33, (2, 2, 2, 2))
    check("LinearAttention", [none, none, none, s], [none, s], opset=27, q_num_heads=2, kv_num_heads=2, update_rule="linear")


def test_linear_refuses(fails: Any) -> None:
    x, b = np.ones((1, 2, 4), F), np.ones((1, 2, 2), F)
    given = {"opset": 27, "outputs": 2, "q_num_heads": 2, "kv_num_heads": 2}
    fails("LinearAttention", [x, x, x], "'gated_delta' requires decay", **given)
    fails("LinearAttention", [x, x, x, None, x, b], "'linear' does not take decay", **given, update_rule="linear")
    fails("LinearAttention", [x, x, x, None, x], "'gated_delta' requires beta", **given)
    fails("LinearAttention", [x, x, x], "update_rule must be one of .* got 'square'", **given, update_rule="square")
    fails("LinearAttention", [x, x, x, b], "past_state must have shape", **given, update_rule="linear")
    fails("LinearAttention", [x, x, x, None, x[:, :1]], "decay must have 2 or 4", **given, update_rule="gated")
    fails("LinearAttention", [x, x, x, None, None, x], "beta must have 1 or 2 values", **given, update_rule="delta")
    fails(
        "LinearAttention",
        [x, x, x],
        "must be a multiple of kv_num_heads 4, got 2",
        **{**given, "kv_num_heads": 4},
        update_rule="linear",
    )
    fails("LinearAttention", [x, x, x[:, :1]], "query, key and value must match", **given, update_rule="linear")
    fails("LinearAttention", [x[0], x, x], "query must have shape", **given, update_rule="linear")
