"""Linear attention of onnxruntime: each token updates and reads a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

from ... import dtypes, limits
from ...errors import OperatorError
from ._api import Array, Op, V, microsoft, not_declared

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
    op: Op,
    query: V,
    key: V,
    value: V,
    past_state: V | None = None,
    decay: V | None = None,
    beta: V | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    state_window: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[V, V]:
    """Compute LinearAttention of opset 27, and the states after the last tokens.

    There may be more states than query heads, and fewer key heads than states: several states read one head then.  With
    `state_window`, the states before and after have a first axis of that size, whose last entry is the newest state.
    """
    decay, beta = needed(update_rule, decay, beta)
    size = op.Div(op.Shape(query, start=2), q_num_heads)
    key = _repeated(op, key, size, kv_num_heads)
    if kv_num_heads > q_num_heads:
        query = _repeated(op, query, size, kv_num_heads)
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


@ms_linear_attention.accepts
def ms_linear_attention_accepts(
    query: Array,
    key: Array,
    past_state: Array | None,
    decay: Array | None,
    beta: Array | None,
    kv_num_heads: int,
    q_num_heads: int,
    state_window: int,
    update_rule: str,
) -> None:
    needed(update_rule, decay, beta)
    if not 0 <= state_window <= 8 or query.ndim != 3:
        raise OperatorError(
            f"query must have 3 axes and state_window be in [0, 8], got {query.shape}, {state_window}", code="SX404"
        )
    if q_num_heads < 1 or kv_num_heads < 1:
        raise OperatorError(f"q_num_heads must be a multiple of kv_num_heads {kv_num_heads}, got {q_num_heads}", code="SX404")
    size = query.shape[2] // q_num_heads
    if size and key.ndim == 3 and 0 < key.shape[2] // size < kv_num_heads:
        _check_heads(key, key.shape[2] // size, kv_num_heads, "the key heads")
    if kv_num_heads > q_num_heads:
        _check_heads(query, q_num_heads, kv_num_heads, "q_num_heads")
    if past_state is not None and state_window and (past_state.ndim != 5 or past_state.shape[0] != state_window):
        raise OperatorError(f"past_state must have a first axis of {state_window}, got {past_state.shape}", code="SX404")


def _check_heads(x: Array, heads: int, wanted: int, name: str) -> None:
    """Raise OperatorError unless heads can be repeated so that there are `wanted`."""
    limits.admit((*x.shape[:2], wanted * (x.shape[2] // heads)), x.dtype)
    if wanted % heads or x.shape[2] % heads:
        raise OperatorError(f"kv_num_heads {wanted} must be a multiple of {name}, got {heads}", code="SX404")


def _repeated(op: Op, x: V, size: V, wanted: int) -> V:
    """Return B x T x (heads size) with each head repeated, so that there are `wanted`."""
    heads = op.Div(op.Shape(x, start=2), size)
    each = op.Reshape(x, op.Concat(op.Shape(x, end=2), heads, size, axis=0), allowzero=1)
    places = op.Div(op.Mul(op.Range(0, wanted, 1), heads), wanted)
    wide = op.Concat(op.Shape(x, end=2), op.Mul(size, wanted), axis=0)
    return op.Reshape(op.Gather(each, places, axis=2), wide, allowzero=1)


not_declared(
    "it copies between buffers that the caller binds to the output, on WebGPU only; compute the state by GatedDeltaNet",
    "GatedDeltaNetStateReplay",
)
not_declared(
    "it is one model's verification step for onnxruntime's CUDA kernel, with sizes that the kernel fixes; write the layer with "
    "CausalConvWithState and Scan",
    "Mamba2Verify",
)
