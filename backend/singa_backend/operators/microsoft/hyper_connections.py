"""Hyper-connections: several residual streams, which are mixed before and after each block of a language model.

Streams have shape ... x C x H; with num_branches, they are flattened to ... x (C H).
"""

from __future__ import annotations

from ...errors import OperatorError
from .._flops import each_input
from ..activation import sigmoid
from ._api import Array, Op, V, Wanted, Xp, microsoft
from .gates import normalized, normalized_in, rounding, scaled_silu, scaled_silu_body, single, wide


def _grouped(x: Array, branches: int) -> Array:
    """Return streams as ... x C x H."""
    if branches < 0 or x.ndim < (1 if branches else 2) or (branches and (x.shape[-1] % branches or not x.shape[-1])):
        raise OperatorError(f"streams of shape {x.shape} do not consist of {branches or 'C x H'} branches", code="SX404")
    return x.reshape(*x.shape[:-1], branches, x.shape[-1] // branches) if branches else x


def _grouped_in(op: Op, x: V, branches: int) -> V:
    """`_grouped` in ONNX operators."""
    if not branches:
        return x
    shape = op.Concat(op.Shape(x, end=-1), [branches], op.Div(op.Shape(x, start=-1), branches), axis=0)
    return op.Reshape(x, shape, allowzero=1)


def _gates(gate: Array, streams: Array, name: str, flat: bool = False) -> Array:
    """Return gates of grouped streams, one for each branch or feature, with the streams' number of axes."""
    *lead, c, h = streams.shape
    if gate.shape in ((*lead, c, 1), (*lead, c, h)):
        return gate
    if gate.shape == (*lead, c) or (flat and gate.shape == (*lead, c * h)):
        return gate.reshape(*lead, c, -1)
    raise OperatorError(f"{name} must have a gate for each branch or feature of {streams.shape}, got {gate.shape}", code="SX404")


def _gates_in(op: Op, gate: V, streams: V) -> V:
    """`_gates` in ONNX operators."""
    if op.rank(gate) == op.rank(streams):
        return gate
    c = op.Shape(streams, start=-2, end=-1)
    return op.Reshape(gate, op.Concat(op.Shape(gate, end=-1), c, op.Div(op.Shape(gate, start=-1), c), axis=0), allowzero=1)


@microsoft("BranchwiseRMSNorm", 1, traits=("shape_of_first", "norm"), weights={1: "the scale"})
def branchwise_rms_norm(xp: Xp, x: Array, scale: Array | None = None, *, epsilon: float = 1e-5, num_branches: int = 0) -> Array:
    """Divide each branch by its root mean square; the scale has shape (C H), C x H or H."""
    streams = _grouped(x, num_branches)
    c, h = streams.shape[-2:]
    y = normalized(xp, streams, epsilon)
    if scale is not None:
        if scale.shape not in ((c * h,), (c, h), (h,)):
            raise OperatorError(f"scale must have shape {(c * h,)}, {(c, h)} or {(h,)}, got {scale.shape}", code="SX404")
        y = y * (scale.reshape(c, h) if scale.size == c * h else scale)
    return y.reshape(x.shape)


branchwise_rms_norm.flops(each_input(8))


@branchwise_rms_norm.decomposition
def branchwise_rms_norm_body(op: Op, x: V, scale: V | None, epsilon: float, num_branches: int) -> V:
    streams = _grouped_in(op, single(op, x), num_branches)
    y = normalized_in(op, streams, epsilon)
    if scale is not None:
        rows = op.Reshape(single(op, scale), op.Concat([-1], op.Shape(streams, start=-1), axis=0))
        y = op.Mul(y, rows)
    return op.cast(op.Reshape(y, op.Shape(x), allowzero=1) if num_branches else y, x)


@microsoft("HyperConnectionPreMix", 1)
def hyper_connection_pre_mix(
    xp: Xp, streams: Array, pre_mix: Array, *, num_branches: int = 0, reduction_scale: float = 1.0
) -> Array:
    """Return the sum of the streams, each times its gates."""
    x = _grouped(streams, num_branches)
    return reduction_scale * (x * _gates(pre_mix, x, "pre_mix", flat=num_branches > 0)).sum(axis=-2)


@hyper_connection_pre_mix.decomposition
def hyper_connection_pre_mix_body(op: Op, streams: V, pre_mix: V, num_branches: int, reduction_scale: float) -> V:
    x = _grouped_in(op, single(op, streams), num_branches)
    mixed = op.ReduceSum(op.Mul(x, _gates_in(op, single(op, pre_mix), x)), [-2], keepdims=0)
    return op.cast(op.Mul(mixed, reduction_scale), streams)


@microsoft("HyperConnectionPostMix", 1, traits=("shape_of_first",))
def hyper_connection_post_mix(
    xp: Xp, streams: Array, block_output: Array, post_mix: Array, stream_mix: Array | None = None, *, num_branches: int = 0
) -> Array:
    """Mix the streams by the transposed `stream_mix`, and add the block's output times the gates of each."""
    x = _grouped(streams, num_branches)
    *lead, c, h = x.shape
    if block_output.shape != (*lead, h) or (stream_mix is not None and stream_mix.shape != (*lead, c, c)):
        found = None if stream_mix is None else stream_mix.shape
        raise OperatorError(
            f"block_output must have shape {(*lead, h)} and stream_mix {(*lead, c, c)}, got {block_output.shape} and {found}",
            code="SX404",
        )
    mixed = x if stream_mix is None else xp.matmul(xp.swapaxes(stream_mix, -2, -1), x)
    return (mixed + _gates(post_mix, x, "post_mix") * block_output[..., None, :]).reshape(streams.shape)


@hyper_connection_post_mix.decomposition
def hyper_connection_post_mix_body(
    op: Op, streams: V, block_output: V, post_mix: V, stream_mix: V | None, num_branches: int
) -> V:
    x = _grouped_in(op, single(op, streams), num_branches)
    mixed = x if stream_mix is None else op.MatMul(op.swap(single(op, stream_mix)), x)
    added = op.Mul(_gates_in(op, single(op, post_mix), x), op.Unsqueeze(single(op, block_output), [-2]))
    y = op.Add(mixed, added)
    return op.cast(op.Reshape(y, op.Shape(streams), allowzero=1) if num_branches else y, streams)


@microsoft("HyperConnectionLowRankMix", 1, widen=False, weights={1: "the scale"})
def hyper_connection_low_rank_mix(
    xp: Xp,
    streams: Array,
    norm_scale: Array,
    down_weight: Array,
    up_weight: Array,
    inject_weight: Array,
    prev_block_output: Array | None = None,
    prev_post_gate: Array | None = None,
    *,
    epsilon: float = 1e-5,
    gate_div: float = 1.0,
    gate_mul: float = 1.0,
    num_branches: int,
    reduction_scale: float = 1.0,
    silu_alpha: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Return the gated sum of the normalized streams, the gates of the block's output, and the streams; steps are rounded."""
    if (prev_block_output is None) != (prev_post_gate is None):
        raise OperatorError("prev_block_output and prev_post_gate must be present together", code="SX407")
    if num_branches < 1:
        raise OperatorError(f"num_branches must be at least 1, got {num_branches}", code="SX404")
    round_, flat = rounding(streams), wide(streams)
    if prev_block_output is not None and prev_post_gate is not None:
        flat = round_(
            hyper_connection_post_mix(xp, flat, wide(prev_block_output), wide(prev_post_gate), num_branches=num_branches)
        )
    scale = wide(norm_scale)
    hn = round_(branchwise_rms_norm(xp, flat, scale, epsilon=epsilon, num_branches=num_branches))
    down = round_(xp.matmul(hn, wide(down_weight))).astype(streams.dtype)
    hidden = wide(scaled_silu(xp, down, alpha=silu_alpha))
    gates = round_(sigmoid(xp, round_(xp.matmul(hidden, wide(up_weight)))))
    output = hyper_connection_pre_mix(xp, hn, gates, num_branches=num_branches, reduction_scale=reduction_scale)
    inject = round_(round_(xp.matmul(hn, wide(inject_weight))) / gate_div)
    post = round_(round_(sigmoid(xp, inject)) * gate_mul)
    return output.astype(streams.dtype), post.astype(streams.dtype), flat.astype(streams.dtype)


@hyper_connection_low_rank_mix.decomposition
def hyper_connection_low_rank_mix_body(
    op: Op,
    streams: V,
    norm_scale: V,
    down_weight: V,
    up_weight: V,
    inject_weight: V,
    prev_block_output: V | None,
    prev_post_gate: V | None,
    epsilon: float,
    gate_div: float,
    gate_mul: float,
    num_branches: int,
    reduction_scale: float,
    silu_alpha: float,
    wanted: Wanted,
) -> tuple[V, ...]:
    if prev_block_output is not None:
        streams = hyper_connection_post_mix_body(op, streams, prev_block_output, prev_post_gate, None, num_branches)
    hn = branchwise_rms_norm_body(op, streams, norm_scale, epsilon, num_branches)
    hidden = scaled_silu_body(op, op.MatMul(hn, down_weight), None, silu_alpha)
    gates = op.Sigmoid(op.MatMul(hidden, up_weight))
    output = hyper_connection_pre_mix_body(op, hn, gates, num_branches, reduction_scale)
    post = op.Mul(op.Sigmoid(op.Div(op.MatMul(hn, inject_weight), gate_div)), gate_mul)
    return output, post, op.Identity(streams)
