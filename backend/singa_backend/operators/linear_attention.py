"""LinearAttention: each token updates and reads a state, instead of a score for each pair of tokens."""

from __future__ import annotations

import math

import numpy as np

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ._api import Array

_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}
"""Update rule -> (the state decays, only the difference from the stored value is written)."""


def _heads(x: Array, heads: int, name: str) -> Array:
    """Convert (batch, time, heads * size) to (batch, time, heads, size), in float32, or in float64 if x is float64."""
    if x.ndim != 3 or x.shape[2] % heads:
        raise OperatorError(f"{name} must have shape (batch, time, {heads} * size), got {x.shape}", code="SX404")
    wide = np.float64 if x.dtype == np.float64 else np.float32
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).astype(wide)


@operator("LinearAttention", 27, widen=False, weights={0: "the query", 1: "the key", 2: "the value"})
def linear_attention(
    xp: Xp,
    query: Array,
    key: Array,
    value: Array,
    past_state: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array]:
    """Compute the recurrence token by token, in float32 or float64; `chunk_size` is a hint for faster algorithms."""
    if update_rule not in _RULES:
        raise OperatorError(f"update_rule must be one of {', '.join(_RULES)}, got {update_rule!r}", code="SX404")
    for name, given, needed in zip(("decay", "beta"), (decay, beta), _RULES[update_rule], strict=True):
        if (given is not None) != needed:
            raise OperatorError(f"update_rule {update_rule!r} {'requires' if needed else 'does not take'} {name}", code="SX407")
    if min(q_num_heads, kv_num_heads) < 1 or q_num_heads % kv_num_heads:
        raise OperatorError(f"q_num_heads must be a multiple of kv_num_heads {kv_num_heads}, got {q_num_heads}", code="SX404")
    q, k, v = _heads(query, q_num_heads, "query"), _heads(key, kv_num_heads, "key"), _heads(value, kv_num_heads, "value")
    batch, time, heads, size = q.shape
    group, size_v = heads // kv_num_heads, v.shape[3]
    if k.shape != (batch, time, kv_num_heads, size) or v.shape[:3] != k.shape[:3]:
        raise OperatorError(
            f"query, key and value must match with {q_num_heads} and {kv_num_heads} heads, got shapes {query.shape}, "
            f"{key.shape} and {value.shape}",
            code="SX404",
        )
    shape = (batch, kv_num_heads, size, size_v)
    if past_state is not None and past_state.shape != shape:
        raise OperatorError(f"past_state must have shape {shape}, got {past_state.shape}", code="SX404")
    state = xp.zeros(shape, q.dtype) if past_state is None else past_state.astype(q.dtype)
    g = b = None
    if decay is not None:
        if decay.shape not in ((batch, time, kv_num_heads), (batch, time, kv_num_heads * size)):
            per = f"{kv_num_heads} or {kv_num_heads * size} values per token"
            raise OperatorError(f"decay must have {per}, got shape {decay.shape}", code="SX404")
        g = xp.exp(_heads(decay, kv_num_heads, "decay"))[..., None]
    if beta is not None:
        if beta.shape not in ((batch, time, kv_num_heads), (batch, time, 1)):
            raise OperatorError(f"beta must have 1 or {kv_num_heads} values per token, got shape {beta.shape}", code="SX404")
        b = beta.astype(q.dtype)[..., None]
    q = q.reshape(batch, time, kv_num_heads, group, size)
    out = xp.empty((batch, time, kv_num_heads, group, size_v), q.dtype)
    for t in limits.rounds(time):
        k_t, v_t = k[:, t], v[:, t]
        if g is not None:
            state = state * g[:, t]
        if b is not None:
            v_t = b[:, t] * (v_t - xp.matmul(k_t[..., None, :], state)[..., 0, :])
        state = state + k_t[..., :, None] * v_t[..., None, :]
        out[:, t] = xp.matmul(q[:, t], state)
    out = out * (scale or (1 / math.sqrt(size) if size else 1.0))
    y = out.reshape(batch, time, heads * size_v).astype(query.dtype)
    return y, state.astype((query if past_state is None else past_state).dtype)


@linear_attention.decomposition
def linear_attention_decomposition(
    op: Op,
    query: V,
    key: V,
    value: V,
    past_state: V,
    decay: V,
    beta: V,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float,
    update_rule: str,
) -> tuple[V, V]:
    """A Scan over the tokens with inputs (time, batch, heads, ...); narrow floats are computed in float32 and rounded once."""
    half, half_state = query, query if past_state is None else past_state
    if op.dtype(query) in dtypes.NARROW_FLOATS:
        query, key, value, past_state, decay, beta = (
            None if x is None else op.Cast(x, to=dtypes.onnx_code(np.float32))
            for x in (query, key, value, past_state, decay, beta)
        )

    def tokens(x: V, heads: int) -> V:
        shape = op.Concat(op.Shape(x, end=2), [heads], op.Div(op.Shape(x, start=2), heads), axis=0)
        return op.Transpose(op.Reshape(x, shape, allowzero=1), perm=[1, 0, 2, 3])

    group = q_num_heads // kv_num_heads
    q, k, v = tokens(query, q_num_heads), tokens(key, kv_num_heads), tokens(value, kv_num_heads)
    size = op.Shape(k, start=3)
    q = op.Reshape(q, op.Concat(op.Shape(q, end=2), [kv_num_heads, group], size, axis=0), allowzero=1)
    state = past_state
    if state is None:
        state = op.Expand(
            op.constant(0, op.dtype(query)),
            op.Concat(op.Shape(k, start=1, end=2), [kv_num_heads], size, op.Shape(v, start=3), axis=0),
        )
    xs = [q, k, v]
    if decay is not None:
        xs.append(op.Unsqueeze(op.Exp(tokens(decay, kv_num_heads)), [4]))
    if beta is not None:
        xs.append(op.Unsqueeze(op.Transpose(beta, perm=[1, 0, 2]), [3]))

    def step(inner: Op, state: V, q: V, k: V, v: V, *rest: V) -> list[V]:
        parts = iter(rest)
        if decay is not None:
            state = inner.Mul(state, next(parts))
        if beta is not None:
            seen = inner.Squeeze(inner.MatMul(inner.Unsqueeze(k, [2]), state), [2])
            v = inner.Mul(next(parts), inner.Sub(v, seen))
        state = inner.Add(state, inner.Mul(inner.Unsqueeze(k, [3]), inner.Unsqueeze(v, [2])))
        return [state, inner.MatMul(q, state)]

    graph = op.graph(step, [op.type(state), *(op.type(x, drop=[0]) for x in xs)])
    state, out = op.call("Scan", [state, *xs], {"body": graph, "num_scan_inputs": len(xs)}, 2)
    factor = op.constant(scale, op.dtype(query)) if scale else op.Reciprocal(op.Sqrt(op.cast(op.Squeeze(size, [0]), query)))
    out = op.Transpose(op.Mul(out, factor), perm=[1, 0, 2, 3, 4])
    width = op.Mul(op.Shape(v, start=3), q_num_heads)
    y = op.Reshape(out, op.Concat(op.Shape(query, end=2), width, axis=0), allowzero=1)
    return op.cast(y, half), op.cast(state, half_state)
