"""Gated activations and norms of language models: a value is multiplied by a function of another one.

Where the schema names the steps whose results are rounded to T, so do the bodies; all else is float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ... import dtypes
from ...errors import OperatorError
from .._flops import each_input
from ..activation import sigmoid
from ._api import Array, Op, V, Wanted, Xp, microsoft

SINGLE = dtypes.onnx_code(np.float32)


def single(op: Op, x: V) -> V:
    """Return a narrow float as float32; others as they are."""
    return op.Cast(x, to=SINGLE) if op.dtype(x) in dtypes.NARROW_FLOATS else x


def swish_in(op: Op, x: V) -> V:
    """Return x * sigmoid(x)."""
    return op.Mul(x, op.Sigmoid(x))


def swiglu(
    xp: Xp,
    g: Array,
    u: Array,
    alpha: float,
    beta: float,
    limit: float | None,
    late: bool = False,
) -> Array:
    """Compute g sigmoid(alpha g) (u + beta); the limit bounds u, and g or, if `late`, its activation from above."""
    if limit is not None:
        g, u = g if late else xp.minimum(g, limit), xp.clip(u, -limit, limit)
    active = g * sigmoid(xp, alpha * g)
    active = xp.minimum(active, limit) if late and limit is not None else active
    return active * (u + beta if beta else u)


def swiglu_in(
    op: Op,
    g: V,
    u: V,
    alpha: float,
    beta: float,
    limit: float | None,
    late: bool = False,
    rounded: Callable[[V], V] | None = None,
) -> V:
    """`swiglu` in ONNX operators."""
    if limit is not None:
        g, u = g if late else op.Min(g, limit), op.Clip(u, -limit, limit)
    active = op.Mul(g, op.Sigmoid(op.Mul(g, alpha)))
    active = op.Min(active, limit) if late and limit is not None else active
    active = active if rounded is None else rounded(active)
    return op.Mul(active, op.Add(u, beta) if beta else u)


# --- activations ------------------------------------------------------------------------------------------------------


@microsoft("SwiGLU", 1, widen=False)
def ms_swiglu(
    op: Op,
    gate: V,
    up: V | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    round_activation: int = 0,
) -> V:
    """Compute g sigmoid(alpha g) (u + beta), where g is at most `limit` and u within it; one input holds both, g first."""
    target = gate
    if up is None:
        gate, up = op.Split(gate, axis=-1, num_outputs=2, outputs=2)
    g, u = single(op, gate), single(op, up)
    rounded = (lambda v: op.cast(op.cast(v, target), g)) if round_activation else None
    bound = limit if limit > 0 else None
    return op.cast(swiglu_in(op, g, u, activation_alpha, activation_beta, bound, rounded=rounded), target)


@ms_swiglu.accepts
def ms_swiglu_accepts(gate: Array, up: Array | None) -> None:
    if up is None:
        if not gate.ndim or gate.shape[-1] % 2:
            raise OperatorError(f"without up, the last axis of gate must be even, got shape {gate.shape}", code="SX404")
    elif gate.shape != up.shape:
        raise OperatorError(f"gate and up must have one shape, got {gate.shape} and {up.shape}", code="SX404")


@microsoft("ScaledSiLU", 1, widen=False, traits=("shape_of_first",))
def scaled_silu(op: Op, x: V, scale: V | None = None, *, alpha: float = 1.0) -> V:
    """Compute z * sigmoid(z), where z is scale * x, or alpha * x without a scale; z and the sigmoid are rounded."""
    factor = alpha if scale is None else op.cast(op.Reshape(single(op, scale), op.constant([], np.int64)), single(op, x))
    return swish_in(op, op.cast(op.Mul(single(op, x), factor), x))


@scaled_silu.accepts
def scaled_silu_accepts(scale: Array | None) -> None:
    if scale is not None and scale.size != 1:
        raise OperatorError(f"scale must hold one value, got shape {scale.shape}", code="SX404")


# --- norms ------------------------------------------------------------------------------------------------------------


def normalized_in(op: Op, x: V, epsilon: float) -> V:
    """Return x divided by its root mean square over the last axis."""
    return op.Div(x, op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), [-1], keepdims=1), epsilon)))


@microsoft("GatedRMSNorm", 1, traits=("shape_of_first", "norm"), weights={1: "the scale"})
def gated_rms_norm(op: Op, x: V, scale: V, gate: V, *, activation: str = "silu", epsilon: float = 1e-5) -> V:
    """Normalize groups of the last axis, each as large as the scale, and multiply them by silu(gate) or sigmoid(gate)."""
    shape, size = op.Shape(x), op.Shape(scale)
    groups = op.Concat(op.Shape(x, end=-1), op.Div(op.Shape(x, start=-1), size), size, axis=0)
    normal = op.Mul(normalized_in(op, op.Reshape(single(op, x), groups, allowzero=1), epsilon), single(op, scale))
    wide_gate = single(op, gate)
    factor = op.Sigmoid(wide_gate) if activation == "sigmoid" else swish_in(op, wide_gate)
    return op.cast(op.Mul(op.Reshape(normal, shape, allowzero=1), factor), x)


@gated_rms_norm.accepts
def gated_rms_norm_accepts(x: Array, scale: Array, gate: Array, activation: str) -> None:
    if activation not in ("silu", "swish", "sigmoid"):
        raise OperatorError(f"activation must be silu, swish or sigmoid, got {activation!r}", code="SX404")
    if gate.shape != x.shape or scale.ndim != 1 or not scale.size or not x.ndim or x.shape[-1] % scale.size:
        shapes = f"{x.shape}, {scale.shape} and {gate.shape}"
        raise OperatorError(f"gate must have the shape of X, and scale must divide its last axis, got {shapes}", code="SX404")


gated_rms_norm.flops(each_input(8))


# --- sums and gates ---------------------------------------------------------------------------------------------------


@microsoft("GatedAdd", 1, widen=False, traits=("shape_of_first",))
def gated_add(op: Op, x: V, y: V, gate: V, gate_weight: V | None = None) -> V:
    """Compute X + Y * gate with a gate for each row, or sigmoid(gate @ gate_weight); each step is rounded."""
    factor = gate if gate_weight is None else op.Sigmoid(op.MatMul(gate, gate_weight))
    return op.Add(x, op.Mul(y, factor))


@gated_add.accepts
def gated_add_accepts(x: Array, y: Array, gate: Array, gate_weight: Array | None) -> None:
    last = 1 if gate_weight is None else gate_weight.shape[0]
    if y.shape != x.shape or gate.shape != (*x.shape[:-1], last) or (gate_weight is not None and gate_weight.shape != (last, 1)):
        found = None if gate_weight is None else gate_weight.shape
        raise OperatorError(
            f"Y must have the shape of X {x.shape}, the gate one row for each of its rows, and gate_weight one column, got "
            f"{y.shape}, {gate.shape} and {found}",
            code="SX404",
        )


@microsoft("EngramGate", 1, traits=("shape_of_first",))
def engram_gate(
    op: Op,
    key: V,
    query: V,
    value: V,
    key_norm_scale: V,
    query_norm_scale: V,
    conv_norm_scale: V | None = None,
    *,
    epsilon: float = 1e-5,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Multiply the value by sigmoid(sign(s) sqrt(|s|)), where s is the product of the normalized key and query."""
    target = key
    k, q, v, ks, qs = (single(op, x) for x in (key, query, value, key_norm_scale, query_norm_scale))
    k, q = op.Mul(normalized_in(op, k, epsilon), ks), op.Mul(normalized_in(op, q, epsilon), qs)
    size = op.cast(op.Squeeze(op.Shape(k, start=3), [0]), k)
    score = op.Div(op.ReduceSum(op.Mul(k, q), [3], keepdims=1), op.Sqrt(size))
    root = op.Mul(op.Sign(score), op.Sqrt(op.Max(op.Abs(score), 1e-6)))
    y = op.Mul(op.Sigmoid(root), op.Unsqueeze(v, [2]))
    if len(wanted) < 2:
        return (op.cast(y, target),)
    if conv_norm_scale is None:
        raise OperatorError("gated_value_normed needs conv_norm_scale", code="SX407")
    normal = op.Mul(normalized_in(op, y, epsilon), single(op, conv_norm_scale))
    return op.cast(y, target), op.cast(normal, target)


@engram_gate.accepts
def engram_gate_accepts(
    key: Array,
    query: Array,
    value: Array,
    key_norm_scale: Array,
    query_norm_scale: Array,
    conv_norm_scale: Array | None,
) -> None:
    scales = [key_norm_scale.shape, query_norm_scale.shape] + ([] if conv_norm_scale is None else [conv_norm_scale.shape])
    b, s, *features = key.shape if key.ndim == 4 else (0, 0)
    if key.ndim != 4 or query.shape != key.shape or value.shape != (b, s, features[1]) or set(scales) != {tuple(features)}:
        raise OperatorError(
            f"key and query must have shape B x S x M x H, value B x S x H and the scales M x H, got {key.shape}, "
            f"{query.shape}, {value.shape} and {scales}",
            code="SX404",
        )


@microsoft("LinearAttentionGate", 1, traits=("shape_of_first",))
def linear_attention_gate(op: Op, a: V, dt_bias: V, decay_scale: V, b: V | None = None, *, wanted: Wanted) -> tuple[V, ...]:
    """Return decay_scale * softplus(a + dt_bias), and sigmoid(b)."""
    if len(wanted) > 1 and wanted[1] and b is None:
        raise OperatorError("the output beta needs the input b", code="SX407")
    decay = op.cast(op.Mul(op.Softplus(op.Add(single(op, a), dt_bias)), decay_scale), a)
    return (decay,) if b is None else (decay, op.cast(op.Sigmoid(single(op, b)), b))


@linear_attention_gate.accepts
def linear_attention_gate_accepts(a: Array, dt_bias: Array, decay_scale: Array, b: Array | None) -> None:
    for name, v in (("dt_bias", dt_bias), ("decay_scale", decay_scale)):
        if v.shape != a.shape[-1:]:
            raise OperatorError(f"{name} must have shape {a.shape[-1:]}, got {v.shape}", code="SX404")
    if b is not None and b.shape != a.shape:
        raise OperatorError(f"b must have the shape of a, {a.shape}, got {b.shape}", code="SX404")


@microsoft("RouterGateUpProj", 1, widen=False)
def router_gate_up_projection(
    op: Op,
    x: V,
    w: V,
    *,
    activation: str = "swiglu",
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    router_size: int,
) -> tuple[V, V]:
    """Compute X @ W; returns its first `router_size` columns, and SwiGLU of the others."""
    product = op.MatMul(x, w)
    rest = op.Slice(product, [router_size], [2**62], [-1])
    return op.Slice(product, [0], [router_size], [-1]), ms_swiglu(
        op, rest, None, activation_alpha=activation_alpha, activation_beta=activation_beta, limit=limit
    )


@router_gate_up_projection.accepts
def router_gate_up_projection_accepts(w: Array, activation: str, router_size: int) -> None:
    if activation != "swiglu":
        raise OperatorError(f"activation must be swiglu, got {activation!r}", code="SX404")
    if w.ndim != 2 or not 0 < router_size < w.shape[1] or (w.shape[1] - router_size) % 2:
        raise OperatorError(f"W must have router_size {router_size} + 2 n columns, got shape {w.shape}", code="SX404")
