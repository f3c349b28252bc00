"""Linear attention of onnxruntime: each token updates and reads a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

from ... import dtypes
from ...errors import OperatorError
from ..linear_attention import linear_attention
from ._api import Array, Op, V, Xp, microsoft, not_declared

RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}
"""Update rule -> (the state decays, only the difference from the stored value is written)."""


def needed(update_rule: str, decay: Array | None, beta: Array | None) -> tuple[Array | None, Array | None]:
    """Return what a rule reads of the decay and beta, which may be given although it reads neither."""
    if update_rule not in RULES:
        raise OperatorError(f"update_rule must be one of {', '.join(RULES)}, got {update_rule!r}", code="SX404")
    decays, differs = RULES[update_rule]
    for name, value, reads in (("decay", decay, decays), ("beta", beta, differs)):
        if reads and value is None:
            raise OperatorError(f"update_rule {update_rule!r} requires {name}", code="SX407")
    return decay if decays else None, beta if differs else None


# --- LinearAttention --------------------------------------------------------------------------------------------------


@microsoft("LinearAttention", 1, widen=False, weights={0: "the query", 1: "the key", 2: "the value"})
def ms_linear_attention(
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
    state_window: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array]:
    """Compute LinearAttention of opset 27, and the states after the last tokens.

    There may be more states than query heads, and fewer key heads than states: several states read one head then.  With
    `state_window`, the states before and after have a first axis of that size, whose last entry is the newest state.
    """
    decay, beta = needed(update_rule, decay, beta)
    if not 0 <= state_window <= 8 or query.ndim != 3:
        raise OperatorError(
            f"query must have 3 axes and state_window be in [0, 8], got {query.shape}, {state_window}", code="SX404"
        )
    size = query.shape[2] // q_num_heads if q_num_heads > 0 else 0
    if size and key.ndim == 3 and 0 < key.shape[2] // size < kv_num_heads:
        key = _repeated(xp, key, key.shape[2] // size, kv_num_heads, "the key heads")
    if kv_num_heads > q_num_heads > 0:
        query = _repeated(xp, query, q_num_heads, kv_num_heads, "q_num_heads")
        q_num_heads = kv_num_heads
    state = past_state
    if state is not None and state_window:
        if state.ndim != 5 or state.shape[0] != state_window:
            raise OperatorError(f"past_state must have a first axis of {state_window}, got {state.shape}", code="SX404")
        state = state[-1]
    how = {"kv_num_heads": kv_num_heads, "q_num_heads": q_num_heads, "scale": scale, "update_rule": update_rule}
    tokens = (query, key, value, decay, beta)
    time = query.shape[1]
    outputs: list[Array] = []
    states: list[Array] = []
    for end in range(max(time - state_window + 1, 0), time + 1) if state_window else [time]:
        q, k, v, g, b = (None if x is None else x[:, sum(o.shape[1] for o in outputs) : end] for x in tokens)
        y, state = linear_attention(xp, q, k, v, state, g, b, **how)
        outputs.append(y)
        states.append(state)
    result = outputs[0] if len(outputs) == 1 else xp.concatenate(outputs, axis=1)
    if not state_window:
        return result, states[0]
    if len(states) > time and time < state_window:
        states = states[1:]  # the state before the first token is no slot
    return result, xp.stack([xp.zeros_like(states[0])] * (state_window - len(states)) + states)


def _repeated(xp: Xp, x: Array, heads: int, wanted: int, name: str) -> Array:
    """Return B x T x (heads size) with each head repeated, so that there are `wanted`."""
    if wanted % heads or x.shape[2] % heads:
        raise OperatorError(f"kv_num_heads {wanted} must be a multiple of {name}, got {heads}", code="SX404")
    each = xp.repeat(x.reshape(*x.shape[:2], heads, x.shape[2] // heads), wanted // heads, axis=2)
    return each.reshape(*x.shape[:2], -1)


def _repeated_in(op: Op, x: V, size: V, wanted: int) -> V:
    """`_repeated` in ONNX operators, of heads of this size."""
    heads = op.Div(op.Shape(x, start=2), size)
    each = op.Reshape(x, op.Concat(op.Shape(x, end=2), heads, size, axis=0), allowzero=1)
    places = op.Div(op.Mul(op.constant(list(range(wanted)), np.int64), heads), wanted)
    wide = op.Concat(op.Shape(x, end=2), op.Mul(size, wanted), axis=0)
    return op.Reshape(op.Gather(each, places, axis=2), wide, allowzero=1)


@ms_linear_attention.decomposition
def ms_linear_attention_body(
    op: Op,
    query: V,
    key: V,
    value: V,
    past_state: V | None,
    decay: V | None,
    beta: V | None,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float,
    state_window: int,
    update_rule: str,
) -> tuple[V, V]:
    """Tokens before the window, then one call for each token of the window; calls of tokens before the first are empty."""
    decay, beta = needed(update_rule, decay, beta)
    size = op.Div(op.Shape(query, start=2), q_num_heads)
    key = _repeated_in(op, key, size, kv_num_heads)
    if kv_num_heads > q_num_heads:
        query = _repeated_in(op, query, size, kv_num_heads)
        q_num_heads = kv_num_heads
    how: dict[str, Any] = {"kv_num_heads": kv_num_heads, "q_num_heads": q_num_heads, "scale": scale, "update_rule": update_rule}
    state = past_state

    def ranked(x: V, rank: int) -> V:
        """Return x with a rank, which inference may not know."""
        return op.with_type(x, helper.make_tensor_type_proto(dtypes.onnx_code(op.dtype(x)), [None] * rank))

    def call(tokens: Sequence[V | None], state: V | None) -> tuple[V, V]:
        q, k, v, g, b = tokens
        y, new = op.LinearAttention(q, k, v, state, g, b, outputs=2, **how)
        return ranked(y, 3), ranked(new, 4)

    tokens = (query, key, value, decay, beta)
    if not state_window:
        return call(tokens, state)
    state = None if state is None else op.Gather(state, state_window - 1, axis=0)
    time = op.Shape(query, start=1, end=2)
    outputs, slots, start = [], [], op.constant([0], np.int64)
    for j in range(state_window + 1):
        end = op.Max(op.Sub(time, state_window - j), 0)
        y, state = call([None if x is None else op.Slice(x, start, end, [1]) for x in tokens], state)
        outputs.append(y)
        if j:
            slots.append(op.Unsqueeze(op.Where(op.Greater(end, start), state, op.zeros_like(state)), [0]))
        start = end
    return op.Concat(*outputs, axis=1), op.Concat(*slots, axis=0)


not_declared(
    "it copies between buffers that the caller binds to the output, on WebGPU only; compute the state by GatedDeltaNet",
    "GatedDeltaNetStateReplay",
)
not_declared(
    "it is one model's verification step for onnxruntime's CUDA kernel, with sizes that the kernel fixes; write the layer with "
    "CausalConvWithState and Scan",
    "Mamba2Verify",
)
