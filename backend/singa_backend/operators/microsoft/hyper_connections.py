"""Hyper-connections: several residual streams, which are mixed before and after each block of a language model.

Streams have shape ... x C x H; with num_branches, they are flattened to ... x (C H).
"""

from __future__ import annotations

from ...errors import OperatorError
from .._flops import each_input
from ._api import Array, Op, V, Wanted, microsoft
from .gates import normalized_in, scaled_silu, single


def _checked(x: Array, branches: int) -> tuple[int, ...]:
    """Return the shape of streams as ... x C x H; raise OperatorError if they do not consist of branches."""
    if branches < 0 or x.ndim < (1 if branches else 2) or (branches and (x.shape[-1] % branches or not x.shape[-1])):
        raise OperatorError(f"streams of shape {x.shape} do not consist of {branches or 'C x H'} branches", code="SX404")
    return (*x.shape[:-1], branches, x.shape[-1] // branches) if branches else x.shape


def _grouped(op: Op, x: V, branches: int) -> V:
    """Return streams as ... x C x H."""
    if not branches:
        return x
    shape = op.Concat(op.Shape(x, end=-1), [branches], op.Div(op.Shape(x, start=-1), branches), axis=0)
    return op.Reshape(x, shape, allowzero=1)


def _check_gates(gate: Array, shape: tuple[int, ...], name: str, flat: bool = False) -> None:
    """Raise OperatorError unless gates of streams of this shape are one for each branch or feature."""
    *lead, c, h = shape
    if gate.shape not in ((*lead, c, 1), shape, (*lead, c)) and not (flat and gate.shape == (*lead, c * h)):
        raise OperatorError(f"{name} must have a gate for each branch or feature of {shape}, got {gate.shape}", code="SX404")


def _gates(op: Op, gate: V, streams: V) -> V:
    """Return gates of grouped streams, one for each branch or feature, with the streams' number of axes."""
    if op.rank(gate) == op.rank(streams):
        return gate
    c = op.Shape(streams, start=-2, end=-1)
    return op.Reshape(gate, op.Concat(op.Shape(gate, end=-1), c, op.Div(op.Shape(gate, start=-1), c), axis=0), allowzero=1)


@microsoft("BranchwiseRMSNorm", 1, traits=("shape_of_first", "norm"), weights={1: "the scale"})
def branchwise_rms_norm(op: Op, x: V, scale: V | None = None, *, epsilon: float = 1e-5, num_branches: int = 0) -> V:
    """Divide each branch by its root mean square; the scale has shape (C H), C x H or H."""
    streams = _grouped(op, single(op, x), num_branches)
    y = normalized_in(op, streams, epsilon)
    if scale is not None:
        rows = op.Reshape(single(op, scale), op.Concat([-1], op.Shape(streams, start=-1), axis=0))
        y = op.Mul(y, rows)
    return op.cast(op.Reshape(y, op.Shape(x), allowzero=1) if num_branches else y, x)


@branchwise_rms_norm.accepts
def branchwise_rms_norm_accepts(x: Array, scale: Array | None, num_branches: int) -> None:
    c, h = _checked(x, num_branches)[-2:]
    if scale is not None and scale.shape not in ((c * h,), (c, h), (h,)):
        raise OperatorError(f"scale must have shape {(c * h,)}, {(c, h)} or {(h,)}, got {scale.shape}", code="SX404")


branchwise_rms_norm.flops(each_input(8))


@microsoft("HyperConnectionPreMix", 1)
def hyper_connection_pre_mix(op: Op, streams: V, pre_mix: V, *, num_branches: int = 0, reduction_scale: float = 1.0) -> V:
    """Return the sum of the streams, each times its gates."""
    x = _grouped(op, single(op, streams), num_branches)
    mixed = op.ReduceSum(op.Mul(x, _gates(op, single(op, pre_mix), x)), [-2], keepdims=0)
    return op.cast(op.Mul(mixed, reduction_scale), streams)


@hyper_connection_pre_mix.accepts
def hyper_connection_pre_mix_accepts(streams: Array, pre_mix: Array, num_branches: int) -> None:
    _check_gates(pre_mix, _checked(streams, num_branches), "pre_mix", flat=num_branches > 0)


@microsoft("HyperConnectionPostMix", 1, traits=("shape_of_first",))
def hyper_connection_post_mix(
    op: Op, streams: V, block_output: V, post_mix: V, stream_mix: V | None = None, *, num_branches: int = 0
) -> V:
    """Mix the streams by the transposed `stream_mix`, and add the block's output times the gates of each."""
    x = _grouped(op, single(op, streams), num_branches)
    mixed = x if stream_mix is None else op.MatMul(op.swap(single(op, stream_mix)), x)
    added = op.Mul(_gates(op, single(op, post_mix), x), op.Unsqueeze(single(op, block_output), [-2]))
    y = op.Add(mixed, added)
    return op.cast(op.Reshape(y, op.Shape(streams), allowzero=1) if num_branches else y, streams)


@hyper_connection_post_mix.accepts
def hyper_connection_post_mix_accepts(
    streams: Array, block_output: Array, post_mix: Array, stream_mix: Array | None, num_branches: int
) -> None:
    shape = _checked(streams, num_branches)
    *lead, c, h = shape
    if block_output.shape != (*lead, h) or (stream_mix is not None and stream_mix.shape != (*lead, c, c)):
        found = None if stream_mix is None else stream_mix.shape
        raise OperatorError(
            f"block_output must have shape {(*lead, h)} and stream_mix {(*lead, c, c)}, got {block_output.shape} and {found}",
            code="SX404",
        )
    _check_gates(post_mix, shape, "post_mix")


@microsoft("HyperConnectionLowRankMix", 1, widen=False, weights={1: "the scale"})
def hyper_connection_low_rank_mix(
    op: Op,
    streams: V,
    norm_scale: V,
    down_weight: V,
    up_weight: V,
    inject_weight: V,
    prev_block_output: V | None = None,
    prev_post_gate: V | None = None,
    *,
    epsilon: float = 1e-5,
    gate_div: float = 1.0,
    gate_mul: float = 1.0,
    num_branches: int,
    reduction_scale: float = 1.0,
    silu_alpha: float = 1.0,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Return the gated sum of the normalized streams, the gates of the block's output, and the streams; steps are rounded."""
    if prev_block_output is not None:
        streams = hyper_connection_post_mix(op, streams, prev_block_output, prev_post_gate, num_branches=num_branches)
    hn = branchwise_rms_norm(op, streams, norm_scale, epsilon=epsilon, num_branches=num_branches)
    hidden = scaled_silu(op, op.MatMul(hn, down_weight), alpha=silu_alpha)
    gates = op.Sigmoid(op.MatMul(hidden, up_weight))
    output = hyper_connection_pre_mix(op, hn, gates, num_branches=num_branches, reduction_scale=reduction_scale)
    post = op.Mul(op.Sigmoid(op.Div(op.MatMul(hn, inject_weight), gate_div)), gate_mul)
    return output, post, op.Identity(streams)


@hyper_connection_low_rank_mix.accepts
def hyper_connection_low_rank_mix_accepts(
    streams: Array,
    norm_scale: Array,
    prev_block_output: Array | None,
    prev_post_gate: Array | None,
    num_branches: int,
) -> None:
    if (prev_block_output is None) != (prev_post_gate is None):
        raise OperatorError("prev_block_output and prev_post_gate must be present together", code="SX407")
    if num_branches < 1:
        raise OperatorError(f"num_branches must be at least 1, got {num_branches}", code="SX404")
    if prev_block_output is not None and prev_post_gate is not None:
        hyper_connection_post_mix_accepts(streams, prev_block_output, prev_post_gate, None, num_branches)
    branchwise_rms_norm_accepts(streams, norm_scale, num_branches)
