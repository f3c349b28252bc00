"""Attention: each query returns the mean of the values, weighted by the match of their keys with the query."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..dtypes import NARROW_FLOATS, numpy_dtype
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import WorkShape, operator
from ..ir.shapes import KnownShapes, Shape, Unsure
from ._api import Array
from ._common import length
from ._flops import size

Round = Callable[[Array], Array]


def rounding(dtype: np.dtype[Any]) -> Round:
    """Return a function that rounds float32 values to a narrow float and back; the identity for other dtypes."""
    if dtype in NARROW_FLOATS:
        return lambda x: x.astype(dtype).astype(np.float32)
    return lambda x: x


def wide(x: Array) -> Array:
    """Convert narrow floats to the dtype to compute in."""
    return x.astype(np.float32) if x.dtype in NARROW_FLOATS else x


def precision(code: int | None, default: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the attribute softmax_precision: float, float16, double or bfloat16."""
    if code is None:
        return default
    if code not in (1, 10, 11, 16):
        raise OperatorError(
            f"softmax_precision must be 1 (float), 10 (float16), 11 (double) or 16 (bfloat16), got {code}", code="SX404"
        )
    return numpy_dtype(code)


def softmax(xp: Xp, x: Array, dtype: np.dtype[Any]) -> Array:
    """Softmax over the last axis in the precision `dtype`; values are rounded to a narrow one after every step."""
    half = rounding(dtype)
    x = wide(x.astype(dtype))
    if x.shape[-1] == 0:
        return x
    e = half(xp.exp(half(x - x.max(axis=-1, keepdims=True))))
    return half(e / half(e.sum(axis=-1, keepdims=True)))


def by_kv_head(q: Array, kv_heads: int) -> Array:
    """Reshape queries so that heads that share a key head are adjacent: (batch, kv_heads, group * length, size)."""
    batch, heads, length, size = q.shape
    if kv_heads == heads:
        return q
    return q.reshape(batch, kv_heads, heads // kv_heads * length, size)


def check_heads(q: Array, k: Array, v: Array) -> None:
    """Raise OperatorError unless the shapes of 4-D queries, keys and values match."""
    (b, h, _, d), (bk, hk, t, dk), (bv, hv, tv, _) = q.shape, k.shape, v.shape
    if not (b == bk == bv and hk == hv and d == dk and t == tv) or (h % hk if hk else h):
        raise OperatorError(
            f"Q, K and V must match as (batch, heads, length, size), got {q.shape}, {k.shape} and {v.shape}",
            code="SX404",
            hint="K and V must have equal heads and lengths, Q and K equal sizes; the heads of Q must be a multiple of theirs",
        )


def root_of_scale(scale: float | None, size: int, dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the factors of Q and K: roots of the scale (default 1 / sqrt(size)), so that neither product overflows."""
    scale = (1 / math.sqrt(size) if size else 1.0) if scale is None else scale
    root = float(np.asarray(math.sqrt(abs(scale))).astype(dtype))
    return math.copysign(root, scale), root


def _heads(x: Array, heads: int | None, name: str) -> Array:
    """Convert (batch, length, heads * size) to (batch, heads, length, size)."""
    if not heads or heads < 1 or x.shape[2] % heads:
        raise OperatorError(f"{name} must divide the last axis of a 3-D input, got {heads} for shape {x.shape}", code="SX404")
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


@operator("Attention", 23, widen=False)
def attention_23(
    xp: Xp,
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Array, ...]:
    """Version 23 does not have short masks, an external cache or windows."""
    total = k.shape[-2] + (0 if past_key is None else past_key.shape[-2])
    if attn_mask is not None and attn_mask.ndim and attn_mask.shape[-1] not in (1, total):
        raise OperatorError(f"attn_mask must have {total} keys on its last axis, got shape {attn_mask.shape}", code="SX404")
    if attn_mask is not None and attn_mask.ndim and attn_mask.shape[-1] != total:  # one column for all keys
        attn_mask = xp.broadcast_to(attn_mask, (*attn_mask.shape[:-1], total))
    outputs: tuple[Array, ...] = attention(
        xp,
        q,
        k,
        v,
        attn_mask,
        past_key,
        past_value,
        is_causal=is_causal,
        kv_num_heads=kv_num_heads,
        q_num_heads=q_num_heads,
        qk_matmul_output_mode=qk_matmul_output_mode,
        scale=scale,
        softcap=softcap,
        softmax_precision=softmax_precision,
    )
    return outputs


@attention_23.decomposition
def attention_23_decomposition(
    op: Op,
    q: V,
    k: V,
    v: V,
    attn_mask: V,
    past_key: V,
    past_value: V,
    is_causal: int,
    kv_num_heads: int | None,
    q_num_heads: int | None,
    qk_matmul_output_mode: int,
    scale: float | None,
    softcap: float,
    softmax_precision: int | None,
    wanted: tuple[bool, ...],
) -> list[V]:
    """A mask with one column applies to all keys."""
    if attn_mask is not None and op.rank(attn_mask):
        keys = op.Shape(k, start=op.rank(k) - 2, end=op.rank(k) - 1)
        if past_key is not None:
            keys = op.Add(keys, op.Shape(past_key, start=2, end=3))
        attn_mask = op.Expand(
            attn_mask, op.Concat([1] * (op.rank(attn_mask) - 1), keys, axis=0) if op.rank(attn_mask) > 1 else keys
        )
    attributes = {"is_causal": is_causal, "kv_num_heads": kv_num_heads, "q_num_heads": q_num_heads, "scale": scale,
                  "qk_matmul_output_mode": qk_matmul_output_mode, "softcap": softcap, "left_window_size": -1,
                  "right_window_size": -1, "softmax_precision": softmax_precision}  # fmt: skip
    values = [q, k, v, attn_mask, past_key, past_value]
    if op.opset < 25:  # where Attention has no windows
        return attention.decompose(op, 25, values, attributes, len(wanted))
    return list(op.call("Attention", values, attributes, len(wanted)))


def _check(
    q: Array,
    k: Array,
    v: Array,
    past_key: Array | None,
    past_value: Array | None,
    nonpad_kv_seqlen: Array | None,
    mode: int,
    windows: tuple[int, int],
) -> None:
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        raise OperatorError(f"Q, K and V must be all 3-D or all 4-D, got shapes {q.shape}, {k.shape}, {v.shape}", code="SX404")
    if (past_key is None) != (past_value is None):
        raise OperatorError("past_key and past_value must be present together", code="SX407")
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise OperatorError(
            "nonpad_kv_seqlen (an external cache) must not be combined with past_key and past_value", code="SX407"
        )
    if mode not in (0, 1, 2, 3):
        raise OperatorError(f"qk_matmul_output_mode must be 0, 1, 2 or 3, got {mode}", code="SX404")
    if min(windows) < -1:
        raise OperatorError(f"window sizes must be at least -1, got {windows[0]} and {windows[1]}", code="SX404")


def _hidden(
    xp: Xp, queries: int, keys: int, offset: Any, is_causal: int, left: int, right: int, lengths: Array | None
) -> list[Array]:
    """Where a query does not see a key: after its position, outside its window, or beyond the keys of its sample."""
    position = xp.arange(queries, dtype=np.int64).reshape(queries, 1) + offset
    key = xp.arange(keys, dtype=np.int64)
    forbidden = [key > position] if is_causal else []
    forbidden += [key < position - left] if left >= 0 else []
    forbidden += [key > position + right] if right >= 0 else []
    forbidden += [key >= lengths.reshape(len(lengths), 1, 1, 1)] if lengths is not None else []
    return forbidden


@operator(
    "Attention",
    24,
    25,
    widen=False,
    traits=("product", "masks"),
    weights={0: "the query", 1: "the key", 2: "the value"},
    caches={4: 1, 5: 2},
)
def attention(
    xp: Xp,
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Array, ...]:
    """Return Y, the keys and values after their past, and the scores after the step that qk_matmul_output_mode selects.

    Narrow floats are rounded after every step, as in ONNX's function body.
    """
    _check(q, k, v, past_key, past_value, nonpad_kv_seqlen, qk_matmul_output_mode, (left_window_size, right_window_size))
    flat = q.ndim == 3
    if flat:
        q = _heads(q, q_num_heads, "q_num_heads")
        k, v = _heads(k, kv_num_heads, "kv_num_heads"), _heads(v, kv_num_heads, "kv_num_heads")
    elif q_num_heads not in (None, q.shape[1]) or kv_num_heads not in (None, k.shape[1]):
        raise OperatorError(
            f"q_num_heads and kv_num_heads must match Q {q.shape} and K {k.shape}, got {q_num_heads} and {kv_num_heads}",
            code="SX404",
        )
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k, v = xp.concatenate([past_key, k], 2), xp.concatenate([past_value, v], 2)
    check_heads(q, k, v)
    (batch, heads, queries, size), (keys, kv_heads) = q.shape, (k.shape[2], k.shape[1])
    shape = (batch, heads, queries, keys)
    half = rounding(q.dtype)
    limits.admit(shape, np.float32)
    limits.admit((batch, heads, queries, v.shape[3]), np.float32)

    root_q, root_k = root_of_scale(scale, size, q.dtype)
    scores = half(xp.matmul(by_kv_head(half(wide(q) * root_q), kv_heads), half(wide(k) * root_k).swapaxes(-1, -2))).reshape(shape)
    shown = scores
    if softcap:
        cap = float(np.asarray(softcap).astype(q.dtype))
        scores = half(half(xp.tanh(half(scores / cap))) * cap)
        shown = scores if qk_matmul_output_mode == 1 else shown

    offset: Any = past
    if nonpad_kv_seqlen is not None:
        if nonpad_kv_seqlen.shape != (batch,):
            raise OperatorError(f"nonpad_kv_seqlen must have shape ({batch},), got {nonpad_kv_seqlen.shape}", code="SX404")
        offset = nonpad_kv_seqlen.reshape(batch, 1, 1, 1) - queries
    bias = None if attn_mask is None else _bias(xp, attn_mask, shape, q.dtype)
    for where in _hidden(xp, queries, keys, offset, is_causal, left_window_size, right_window_size, nonpad_kv_seqlen):
        never = xp.where(where, -xp.inf, 0).astype(scores.dtype)
        bias = never if bias is None else bias + never
    if bias is not None:
        scores = half(scores + bias)
    shown = scores if qk_matmul_output_mode == 2 else shown

    weights = softmax(xp, scores, precision(softmax_precision, q.dtype)).astype(q.dtype)
    if bias is not None and keys:
        # The result of a query without visible keys is zero; its softmax is NaN.
        weights = xp.where(bias.max(axis=-1, keepdims=True) == -xp.inf, 0, weights).astype(q.dtype)
    shown = weights if qk_matmul_output_mode == 3 else shown
    y = xp.matmul(by_kv_head(wide(weights), kv_heads), wide(v)).astype(q.dtype).reshape(batch, heads, queries, v.shape[3])
    if flat:
        y = y.transpose(0, 2, 1, 3).reshape(batch, queries, heads * v.shape[3])
    return y, k, v, shown.astype(q.dtype)


@attention.flops
def attention_flops(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    keys = (inputs[1] or ())[-2]
    if len(inputs) > 4 and inputs[4] is not None:
        keys += inputs[4][-2]
    return 2 * keys * (size(inputs[0]) + math.prod(output))


@attention.shapes
def attention_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    q, v = known.shape(call.inputs[0]), known.shape(call.inputs[2])
    heads, of_v = known.attribute(call, "q_num_heads"), known.attribute(call, "kv_num_heads")
    if q is not None and (len(q), bool(heads), bool(of_v)) not in ((3, True, True), (4, False, False)):
        raise Unsure
    if q is None or v is None:
        return None
    if len(q) != len(v):
        raise Unsure
    if len(q) == 4:
        return [(*q[:3], v[3])]
    size = v[2] // of_v * heads if isinstance(v[2], int) else known.fresh()
    return [(*q[:2], size)]


@attention.decomposition
def attention_decomposition(
    op: Op,
    q: V,
    k: V,
    v: V,
    attn_mask: V,
    past_key: V,
    past_value: V,
    nonpad_kv_seqlen: V,
    is_causal: int,
    kv_num_heads: int | None,
    left_window_size: int,
    q_num_heads: int | None,
    qk_matmul_output_mode: int,
    right_window_size: int,
    scale: float | None,
    softcap: float,
    softmax_precision: int | None,
) -> tuple[V, ...]:
    flat = op.rank(q) == 3
    if flat:
        q, k, v = (_split_heads(op, x, n) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)))
    offset: V = op.constant(0, np.int64)
    if past_key is not None:
        offset = length(op, past_key, 2)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    dtype = op.dtype(q)
    scores = composed_scores(op, q, k, scale)
    shown = scores
    if softcap:
        scores = op.Mul(op.Tanh(op.Div(scores, softcap)), softcap)
        shown = scores if qk_matmul_output_mode == 1 else shown
    queries, keys = (length(op, x, 2) for x in (q, k))
    never = op.constant(-np.inf, dtype)
    bias = None if attn_mask is None else _composed_bias(op, attn_mask, keys, never)
    if nonpad_kv_seqlen is not None:
        lengths = op.Unsqueeze(nonpad_kv_seqlen, [1, 2, 3])
        offset = op.Sub(lengths, queries)
    position = op.Add(op.Unsqueeze(op.Range(0, queries, 1), [1]), offset)
    key = op.Range(0, keys, 1)
    forbidden = [op.Greater(key, position)] if is_causal else []
    forbidden += [op.Less(key, op.Sub(position, left_window_size))] if left_window_size >= 0 else []
    forbidden += [op.Greater(key, op.Add(position, right_window_size))] if right_window_size >= 0 else []
    forbidden += [op.GreaterOrEqual(key, lengths)] if nonpad_kv_seqlen is not None else []
    for where in forbidden:
        bias = op.add(bias, op.Where(where, never, op.constant(0, dtype)))
    nothing = None
    if bias is not None:
        scores = op.Add(scores, bias)
        nothing = op.Equal(op.ReduceMax(op.Expand(bias, op.Shape(scores)), [-1], keepdims=1), never)
    shown = scores if qk_matmul_output_mode == 2 else shown
    # The result of a query without visible keys is zero; it is masked out of the softmax, which would be NaN.
    safe = scores if nothing is None else op.Where(nothing, 0, scores)
    weights = op.cast(op.Softmax(safe if softmax_precision is None else op.Cast(safe, to=softmax_precision), axis=-1), q)
    weights = weights if nothing is None else op.Where(nothing, 0, weights)
    shown = weights if qk_matmul_output_mode == 3 else shown
    y = op.MatMul(weights, op.cast(for_each_query_head(op, v, q), q))
    if flat:
        y = op.Transpose(y, perm=[0, 2, 1, 3])
        y = op.Reshape(
            y, op.Concat(op.Shape(y, end=2), op.Mul(op.Shape(y, start=2, end=3), op.Shape(y, start=3)), axis=0), allowzero=1
        )
    return y, k, v, shown


def composed_scores(op: Op, q: V, k: V, scale: float | None) -> V:
    """Compute the scores: products of queries and keys, each multiplied by a root of the scale."""
    if scale is None:
        root_q: V = op.Reciprocal(op.Sqrt(op.Sqrt(op.cast(op.Squeeze(op.Shape(q, start=3), [0]), q))))
        root_k = root_q
    else:
        root_q, root_k = (op.constant(r, op.dtype(q)) for r in root_of_scale(scale, 1, op.dtype(q)))
    return op.MatMul(op.Mul(q, root_q), op.swap(for_each_query_head(op, op.Mul(k, root_k), q)))


def _split_heads(op: Op, x: V, heads: int | None) -> V:
    """Convert (batch, length, heads * size) to (batch, heads, length, size)."""
    shape = op.Concat(op.Shape(x, end=2), [heads], op.Div(op.Shape(x, start=2), heads), axis=0)
    return op.Transpose(op.Reshape(x, shape, allowzero=1), perm=[0, 2, 1, 3])


def for_each_query_head(op: Op, x: V, q: V) -> V:
    """Repeat each head of keys or values for each query head that shares it."""
    mine, theirs = (op.shape(v) for v in (x, q))
    if mine is not None and theirs is not None and isinstance(mine[1], int) and mine[1] == theirs[1]:
        return x
    batch, heads, rest = op.Shape(x, end=1), op.Shape(x, start=1, end=2), op.Shape(x, start=2)
    all_heads = op.Shape(q, start=1, end=2)
    shape = op.Concat(batch, heads, op.Div(all_heads, heads), rest, axis=0)
    return op.Reshape(op.Expand(op.Unsqueeze(x, [2]), shape), op.Concat(batch, all_heads, rest, axis=0), allowzero=1)


def _composed_bias(op: Op, mask: V, keys: V, never: V) -> V:
    """Return the bias of a mask on the scores; keys beyond a short mask are masked out."""
    bias = op.Where(mask, op.constant(0, op.dtype(never)), never) if op.dtype(mask) == np.bool_ else op.cast(mask, never)
    rank = op.rank(mask)
    if not rank:
        return bias
    missing = op.Unsqueeze(op.Sub(keys, op.Squeeze(op.Shape(mask, start=rank - 1), [0])), [0])
    return op.Pad(bias, op.Concat([0] * (2 * rank - 1), missing, axis=0), never)


def _bias(xp: Xp, mask: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the bias of a mask on the scores: -inf where a boolean mask is False and for keys beyond a short mask."""
    missing = shape[-1] - mask.shape[-1] if mask.ndim else 0
    lead = mask.shape[:-1] if mask.ndim else ()
    if missing < 0 or mask.ndim > 4 or any(m not in (1, s) for m, s in zip(lead[::-1], shape[-2::-1], strict=False)):
        raise OperatorError(
            f"attn_mask of shape {mask.shape} does not broadcast to (batch, heads, queries, keys) = {shape}", code="SX404"
        )
    bias = xp.where(mask, 0, -xp.inf).astype(dtype) if mask.dtype == np.bool_ else mask.astype(dtype)
    bias = wide(bias)
    if missing:
        bias = xp.concatenate([bias, xp.full((*lead, missing), -xp.inf, bias.dtype)], -1)
    return bias
