"""Mixtures of experts: a router selects the experts of each token, whose results are summed by its weights."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ..activation import sigmoid
from ._api import Array, Op, V, Wanted, Xp, microsoft, not_declared
from ._experts import ExpertActivation, combined, combined_in, halves, halves_in, routed, routed_in, top
from .gates import single

_ACTIVATIONS = ("relu", "gelu", "silu", "identity", "relu2", "swiglu", "geglu")


@microsoft(
    "MoE", 1, traits=("shape_of_first", "product"), weights={2: "the first weight", 4: "the second weight", 6: "the third weight"}
)
def moe(
    xp: Xp,
    x: Array,
    router_probs: Array,
    fc1: Array,
    fc1_bias: Array | None,
    fc2: Array,
    fc2_bias: Array | None = None,
    fc3: Array | None = None,
    fc3_bias: Array | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
) -> Array:
    """Sum fc2 act(fc1 x) of the k experts with the largest softmax of router_probs, weighted by it.

    With swiglu and geglu, fc1 holds gate and linear part, in turns (swiglu_fusion 1) or behind each other (2), or fc3 the latter.
    As in onnxruntime's CPU kernel, `use_sparse_mixer` changes nothing.
    """
    active = ExpertActivation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation)
    fusion = swiglu_fusion if active.gated else 0
    _check_experts(x, router_probs, fc1, fc2, fc3, active, k, fusion > 0)

    def expert(rows: Array, e: int) -> Array:
        first = xp.matmul(rows, fc1[e].T) + (0 if fc1_bias is None else fc1_bias[e])
        linear = None if fc3 is None else xp.matmul(rows, fc3[e].T) + (0 if fc3_bias is None else fc3_bias[e])
        first, linear = halves(first, fusion) if fusion else (first, linear)
        return xp.matmul(active(xp, first, linear), fc2[e].T) + (0 if fc2_bias is None else fc2_bias[e])

    routing = routed(xp, router_probs, None, k, bool(normalize_routing_weights))
    return combined(xp, x.reshape(-1, fc2.shape[1]), fc2.shape[0], routing, expert).reshape(x.shape)


def _check_experts(
    x: Array, router: Array, fc1: Array, fc2: Array, fc3: Array | None, active: ExpertActivation, k: int, fused: bool
) -> None:
    """Raise OperatorError for shapes and attributes that do not fit each other."""
    active.check(active.name, _ACTIVATIONS)
    experts, hidden, inner = fc2.shape if fc2.ndim == 3 else (0, 0, 0)
    first = (experts, (1 + fused) * inner, hidden)
    if x.ndim not in (2, 3) or x.shape[-1] != hidden or fc1.shape != first or router.shape != (x.size // max(hidden, 1), experts):
        shapes = f"{x.shape}, {router.shape}, {fc1.shape} and {fc2.shape}"
        raise OperatorError(
            f"input, router_probs, fc1 and fc2 must have shapes tokens x H, tokens x E, E x {'2 ' * fused}I x H and E x H x I, "
            f"got {shapes}",
            code="SX404",
        )
    if not 1 <= k <= experts or (fc3 is not None and (fused or fc3.shape != first)):
        raise OperatorError(f"k must be in [1, {experts}], and fc3 be absent or of shape {first}, got {k}", code="SX404")
    if active.gated and not fused and fc3 is None:
        raise OperatorError(f"{active.name} needs fc3, or swiglu_fusion 1 or 2", code="SX407")


def _projected_in(op: Op, x: V, w: V, b: V | None) -> V:
    """Return x @ w[e]' + b[e] for every expert e."""
    y = op.MatMul(x, op.swap(w))
    return y if b is None else op.Add(y, op.Unsqueeze(b, [1]))


@moe.decomposition
def moe_body(
    op: Op,
    x: V,
    router_probs: V,
    fc1: V,
    fc1_bias: V | None,
    fc2: V,
    fc2_bias: V | None,
    fc3: V | None,
    fc3_bias: V | None,
    activation_alpha: float,
    activation_beta: float,
    activation_type: str,
    k: int,
    normalize_routing_weights: int,
    swiglu_fusion: int,
    swiglu_limit: float | None,
    swiglu_limit_after_activation: int,
) -> V:
    """Every expert computes every token; the weights of those that are not selected are 0."""
    tokens = op.Reshape(x, op.Concat([-1], op.Shape(x, start=-1), axis=0)) if op.rank(x) > 2 else x
    first = _projected_in(op, tokens, fc1, fc1_bias)
    linear = None if fc3 is None else _projected_in(op, tokens, fc3, fc3_bias)
    active = ExpertActivation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation)
    if active.gated and swiglu_fusion:
        first, linear = halves_in(op, first, swiglu_fusion)
    second = _projected_in(op, active.body(op, first, linear), fc2, fc2_bias)
    shares = routed_in(op, router_probs, None, k, bool(normalize_routing_weights))
    return op.Reshape(combined_in(op, second, shares), op.Shape(x), allowzero=1)


# --- the router -------------------------------------------------------------------------------------------------------


@microsoft("MoEGroupRouter", 1)
def moe_group_router(
    xp: Xp,
    logits: Array,
    expert_bias: Array,
    projection_weight: Array | None = None,
    *,
    group_topk: int = 2,
    n_group: int = 1,
    router_sentinel: float = -10000.0,
    top_k: int,
    topk_group: int = 1,
    wanted: Wanted,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return log(sigmoid) of the experts selected by sigmoid + bias within the best groups; or both arrays for all experts."""
    if projection_weight is not None:
        logits = xp.matmul(logits, projection_weight.T)
    experts = logits.shape[-1] if logits.ndim else 0
    if expert_bias.shape != (experts,) or min(n_group, topk_group, group_topk) < 1 or experts % n_group or topk_group > n_group:
        raise OperatorError(
            f"expert_bias must have shape {(experts,)}, n_group {n_group} divide it, and topk_group be at most n_group, got "
            f"{expert_bias.shape} and {topk_group}",
            code="SX404",
        )
    if not 1 <= top_k <= experts:
        raise OperatorError(f"top_k must be in [1, {experts}], got {top_k}", code="SX404")
    s = sigmoid(xp, logits.reshape(-1, experts))
    biased = s + expert_bias
    if any(wanted[1:]):
        return None, biased, s
    groups = biased.reshape(-1, n_group, experts // n_group)
    best = -xp.sort(-groups, axis=2)[:, :, :group_topk].sum(axis=2)
    allowed = xp.zeros(best.shape, dtype=bool)
    xp.put_along_axis(allowed, top(xp, best, topk_group), True, axis=1)
    allowed = xp.repeat(allowed, experts // n_group, axis=1)
    chosen = xp.zeros(s.shape, dtype=bool)
    xp.put_along_axis(chosen, top(xp, xp.where(allowed, biased, -np.inf), top_k), True, axis=1)
    return xp.where(chosen & allowed, xp.log(xp.maximum(s, 1e-20)), router_sentinel), None, None


@moe_group_router.decomposition
def moe_group_router_body(
    op: Op,
    logits: V,
    expert_bias: V,
    projection_weight: V | None,
    group_topk: int,
    n_group: int,
    router_sentinel: float,
    top_k: int,
    topk_group: int,
    wanted: Wanted,
) -> tuple[V | None, ...]:
    target, wide = logits, single(op, logits)
    if projection_weight is not None:
        wide = op.MatMul(wide, op.swap(single(op, projection_weight)))
    s = op.Sigmoid(op.Reshape(wide, op.Concat([-1], op.Shape(expert_bias), axis=0)))
    biased = op.Add(s, expert_bias)
    if len(wanted) > 1:
        return None, biased, s
    each = op.Div(op.Shape(expert_bias), n_group)
    groups = op.Reshape(biased, op.Concat([-1, n_group], each, axis=0))
    best, _ = op.TopK(groups, op.Min(each, [group_topk]), axis=2, outputs=2)

    def marked(like: V, k: int) -> V:
        """Return 1 at the k largest of each row."""
        _, places = op.TopK(like, [k], axis=1, outputs=2)
        return op.ScatterElements(op.zeros_like(like), places, op.full_like(op.cast(places, like), 1), axis=1)

    of_groups = op.Unsqueeze(marked(op.ReduceSum(best, [2], keepdims=0), topk_group), [2])
    allowed = op.Greater(op.Reshape(op.Mul(op.full_like(groups, 1), of_groups), op.Shape(s)), 0)
    chosen = marked(op.Where(allowed, biased, -np.inf), top_k)
    found = op.Where(op.And(allowed, op.Greater(chosen, 0)), op.Log(op.Max(s, 1e-20)), router_sentinel)
    return (op.cast(found, target),)


not_declared(
    "its weights are packed for onnxruntime's CUDA kernels, in formats that only they read; export the model with MoE or QMoE",
    "MoEPacked",
)
