"""FlexAttention: attention whose scores and probabilities are modified by custom graphs."""

from __future__ import annotations

import numpy as np

from .. import limits
from ..autodiff.replay import run_subgraph
from ..devices.namespaces import Xp
from ..dtypes import onnx_code
from ..errors import OperatorError
from ..interpreters.base import Op, Subgraph, V
from ..ir.declaration import operator
from ..ir.graph import Graph
from ._api import Array, Run
from .attention import (
    by_kv_head,
    check_heads,
    composed_scores,
    for_each_query_head,
    precision,
    root_of_scale,
    rounding,
    softmax,
    wide,
)


@operator("FlexAttention", 1, domain="ai.onnx.preview", widen=False)
def flex_attention(
    xp: Xp,
    q: Array,
    k: Array,
    v: Array,
    *,
    prob_mod: Graph | None = None,
    scale: float | None = None,
    score_mod: Graph | None = None,
    softmax_precision: int | None = None,
    run: Run,
) -> Array:
    """Round the scores to Q's dtype; compute the rest in softmax_precision (default float32; double for double inputs)."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise OperatorError(f"Q, K and V must be 4-D, got shapes {q.shape}, {k.shape}, {v.shape}", code="SX404")
    check_heads(q, k, v)
    batch, heads, queries, size = q.shape
    kv_heads, half = k.shape[1], rounding(q.dtype)
    limits.admit((batch, heads, queries, k.shape[2]), np.float32)
    limits.admit((batch, heads, queries, v.shape[3]), np.float32)
    root_q, root_k = root_of_scale(scale, size, q.dtype)
    scores = half(xp.matmul(by_kv_head(half(wide(q) * root_q), kv_heads), half(wide(k) * root_k).swapaxes(-1, -2)))
    scores = scores.reshape(batch, heads, queries, k.shape[2])
    dtype = precision(softmax_precision, np.dtype(np.float64 if q.dtype == np.float64 else np.float32))

    def modified(x: Array, graph: Graph | None, name: str) -> Array:
        x = x.astype(dtype)
        if graph is None:
            return x
        outputs = run(graph, x)
        if len(outputs) != 1 or outputs[0].shape != x.shape:
            shapes = [y.shape for y in outputs]
            raise OperatorError(f"{name} must return one tensor of shape {x.shape}, got {shapes}", code="SX404")
        return outputs[0].astype(dtype)

    probs = softmax(xp, modified(scores, score_mod, "score_mod"), dtype)
    probs = modified(probs, prob_mod, "prob_mod")
    y = rounding(dtype)(xp.matmul(by_kv_head(wide(probs), kv_heads), wide(v.astype(dtype))))
    return y.astype(q.dtype).reshape(batch, heads, queries, v.shape[3])


@flex_attention.decomposition
def flex_attention_decomposition(
    op: Op,
    q: V,
    k: V,
    v: V,
    prob_mod: Subgraph | None,
    scale: float | None,
    score_mod: Subgraph | None,
    softmax_precision: int | None,
) -> V:
    scores = composed_scores(op, q, k, scale)
    dtype = precision(softmax_precision, np.dtype(np.float64 if op.dtype(q) == np.float64 else np.float32))
    code = onnx_code(dtype)

    def modified(x: V, body: Subgraph | None) -> V:
        x = op.Cast(x, to=code)
        return x if body is None else run_subgraph(op, body, [x, *body.captured])[0]

    probs = modified(op.Softmax(modified(scores, score_mod), axis=-1), prob_mod)
    return op.cast(op.MatMul(probs, op.Cast(for_each_query_head(op, v, q), to=code)), q)
