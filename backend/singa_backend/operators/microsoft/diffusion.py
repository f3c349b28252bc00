"""Operators of diffusion models: norms of groups of channels, and sums with a bias and a residual."""

from __future__ import annotations

from ...devices.composed import moments
from ...errors import OperatorError
from .._flops import each_input
from ..activation import gelu, sigmoid
from ._api import Array, Op, V, Xp, microsoft
from .gates import single, swish_in


def _normalized(
    xp: Xp, x: Array, gamma: Array, beta: Array, activation: int, channels_last: int, epsilon: float, groups: int
) -> Array:
    """Return x normalized over each group of channels."""
    channels = x.shape[-1 if channels_last else 1] if x.ndim == 4 else 0
    if activation not in (0, 1) or groups < 1 or not channels or channels % groups:
        what = f"groups {groups} must divide the channels of X {x.shape}, which has 4 axes, and activation be 0 or 1"
        raise OperatorError(f"{what}, got {activation}", code="SX404")
    if gamma.shape != (channels,) or beta.shape != (channels,):
        raise OperatorError(f"gamma and beta must have shape {(channels,)}, got {gamma.shape} and {beta.shape}", code="SX404")
    first = xp.moveaxis(x, -1, 1) if channels_last else x
    parts = first.reshape(x.shape[0], groups, -1)
    centred, _, variance = moments(xp, parts, (2,))
    y = (centred / xp.sqrt(variance + epsilon)).reshape(first.shape) * gamma[:, None, None] + beta[:, None, None]
    y = y * sigmoid(xp, y) if activation else y
    return xp.moveaxis(y, 1, -1) if channels_last else y


def _normalized_in(op: Op, x: V, gamma: V, beta: V, activation: int, channels_last: int, epsilon: float, groups: int) -> V:
    """`_normalized` in ONNX operators."""
    first, scale, bias = (single(op, v) for v in (x, gamma, beta))
    first = op.Transpose(first, perm=[0, 3, 1, 2]) if channels_last else first
    y = op.GroupNormalization(first, scale, bias, num_groups=groups, epsilon=epsilon)
    y = swish_in(op, y) if activation else y
    return op.cast(op.Transpose(y, perm=[0, 2, 3, 1]) if channels_last else y, x)


@microsoft("GroupNorm", 1, traits=("shape_of_first", "norm"), weights={1: "the scale", 2: "the bias"})
def group_norm(
    xp: Xp,
    x: Array,
    gamma: Array,
    beta: Array,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> Array:
    """Normalize each group of channels; with activation 1, return y * sigmoid(y)."""
    return _normalized(xp, x, gamma, beta, activation, channels_last, epsilon, groups)


group_norm.flops(each_input(8))


@group_norm.decomposition
def group_norm_body(op: Op, x: V, gamma: V, beta: V, activation: int, channels_last: int, epsilon: float, groups: int) -> V:
    return _normalized_in(op, x, gamma, beta, activation, channels_last, epsilon, groups)


@microsoft("SkipGroupNorm", 1, traits=("shape_of_first",), weights={1: "the scale", 2: "the bias"})
def skip_group_norm(
    xp: Xp,
    x: Array,
    gamma: Array,
    beta: Array,
    skip: Array,
    bias: Array | None = None,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> tuple[Array, Array]:
    """Apply GroupNorm to x + skip + bias; returns also that sum.  skip may have one value for each sample and channel."""
    axis = -1 if channels_last else 1
    n, c = x.shape[0], x.shape[axis] if x.ndim == 4 else -1
    spread = (n, 1, 1, c) if channels_last else (n, c, 1, 1)
    if skip.shape not in (x.shape, spread, (n, c)) or (bias is not None and bias.shape != (c,)):
        found = None if bias is None else bias.shape
        raise OperatorError(
            f"skip must have shape {x.shape}, {spread} or {(n, c)} and bias {(c,)}, got {skip.shape} and {found}", code="SX404"
        )
    total = x + (skip if skip.ndim == 4 else skip.reshape(spread))
    if bias is not None:
        total = total + (bias if channels_last else bias[:, None, None])
    return _normalized(xp, total, gamma, beta, activation, channels_last, epsilon, groups), total


skip_group_norm.flops(each_input(10))


@skip_group_norm.decomposition
def skip_group_norm_body(
    op: Op,
    x: V,
    gamma: V,
    beta: V,
    skip: V,
    bias: V | None,
    activation: int,
    channels_last: int,
    epsilon: float,
    groups: int,
) -> tuple[V, V]:
    if op.rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2] if channels_last else [2, 3])
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias if channels_last else op.Unsqueeze(bias, [1, 2]))
    return _normalized_in(op, total, gamma, beta, activation, channels_last, epsilon, groups), total


@microsoft("BiasSplitGelu", 1)
def bias_split_gelu(xp: Xp, x: Array, bias: Array) -> Array:
    """Compute a * Gelu(b), where a and b are the halves of x + bias along the last axis."""
    if x.ndim != 3 or x.shape[2] % 2 or bias.shape != x.shape[2:]:
        raise OperatorError(f"X must have 3 axes, the last even, and bias its size, got {x.shape} and {bias.shape}", code="SX404")
    both, half = x + bias, x.shape[2] // 2
    return both[..., :half] * gelu(xp, both[..., half:])


@bias_split_gelu.decomposition
def bias_split_gelu_body(op: Op, x: V, bias: V) -> V:
    left, right = op.Split(op.Add(x, bias), axis=2, num_outputs=2, outputs=2)
    return op.Mul(left, op.Gelu(right))


@microsoft("BiasAdd", 1, traits=("shape_of_first",))
def bias_add(xp: Xp, x: Array, bias: Array, skip: Array) -> Array:
    """Compute x + bias + skip."""
    if x.ndim != 3 or bias.shape != x.shape[2:] or skip.shape != x.shape:
        raise OperatorError(
            f"X and skip must have one shape of 3 axes, and bias their last, got {x.shape}, {skip.shape} and {bias.shape}",
            code="SX404",
        )
    return x + bias + skip


@bias_add.decomposition
def bias_add_body(op: Op, x: V, bias: V, skip: V) -> V:
    return op.Add(op.Add(x, bias), skip)
