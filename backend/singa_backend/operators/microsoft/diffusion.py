"""Operators of diffusion models: norms of groups of channels, and sums with a bias and a residual."""

from __future__ import annotations

from ...errors import OperatorError
from .._flops import each_input
from ._api import Array, Op, V, microsoft
from .gates import single, swish_in


def _check_groups(x: Array, gamma: Array, beta: Array, activation: int, channels_last: int, groups: int) -> None:
    """Raise OperatorError unless x consists of images whose channels the groups divide."""
    channels = x.shape[-1 if channels_last else 1] if x.ndim == 4 else 0
    if activation not in (0, 1) or groups < 1 or not channels or channels % groups:
        what = f"groups {groups} must divide the channels of X {x.shape}, which has 4 axes, and activation be 0 or 1"
        raise OperatorError(f"{what}, got {activation}", code="SX404")
    if gamma.shape != (channels,) or beta.shape != (channels,):
        raise OperatorError(f"gamma and beta must have shape {(channels,)}, got {gamma.shape} and {beta.shape}", code="SX404")


def _normalized_in(op: Op, x: V, gamma: V, beta: V, activation: int, channels_last: int, epsilon: float, groups: int) -> V:
    """Return x normalized over each group of channels."""
    first, scale, bias = (single(op, v) for v in (x, gamma, beta))
    first = op.Transpose(first, perm=[0, 3, 1, 2]) if channels_last else first
    y = op.GroupNormalization(first, scale, bias, num_groups=groups, epsilon=epsilon)
    y = swish_in(op, y) if activation else y
    return op.cast(op.Transpose(y, perm=[0, 2, 3, 1]) if channels_last else y, x)


@microsoft("GroupNorm", 1, traits=("shape_of_first", "norm"), weights={1: "the scale", 2: "the bias"})
def group_norm(
    op: Op,
    x: V,
    gamma: V,
    beta: V,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> V:
    """Normalize each group of channels; with activation 1, return y * sigmoid(y)."""
    return _normalized_in(op, x, gamma, beta, activation, channels_last, epsilon, groups)


@group_norm.accepts
def group_norm_accepts(x: Array, gamma: Array, beta: Array, activation: int, channels_last: int, groups: int) -> None:
    _check_groups(x, gamma, beta, activation, channels_last, groups)


group_norm.flops(each_input(8))


@microsoft("SkipGroupNorm", 1, traits=("shape_of_first",), weights={1: "the scale", 2: "the bias"})
def skip_group_norm(
    op: Op,
    x: V,
    gamma: V,
    beta: V,
    skip: V,
    bias: V | None = None,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> tuple[V, V]:
    """Apply GroupNorm to x + skip + bias; returns also that sum.  skip may have one value for each sample and channel."""
    if op.rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2] if channels_last else [2, 3])
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias if channels_last else op.Unsqueeze(bias, [1, 2]))
    return _normalized_in(op, total, gamma, beta, activation, channels_last, epsilon, groups), total


@skip_group_norm.accepts
def skip_group_norm_accepts(
    x: Array, gamma: Array, beta: Array, skip: Array, bias: Array | None, activation: int, channels_last: int, groups: int
) -> None:
    axis = -1 if channels_last else 1
    n, c = x.shape[0], x.shape[axis] if x.ndim == 4 else -1
    spread = (n, 1, 1, c) if channels_last else (n, c, 1, 1)
    if skip.shape not in (x.shape, spread, (n, c)) or (bias is not None and bias.shape != (c,)):
        found = None if bias is None else bias.shape
        raise OperatorError(
            f"skip must have shape {x.shape}, {spread} or {(n, c)} and bias {(c,)}, got {skip.shape} and {found}", code="SX404"
        )
    _check_groups(x, gamma, beta, activation, channels_last, groups)


skip_group_norm.flops(each_input(10))


@microsoft("BiasSplitGelu", 1)
def bias_split_gelu(op: Op, x: V, bias: V) -> V:
    """Compute a * Gelu(b), where a and b are the halves of x + bias along the last axis."""
    left, right = op.Split(op.Add(x, bias), axis=2, num_outputs=2, outputs=2)
    return op.Mul(left, op.Gelu(right))


@bias_split_gelu.accepts
def bias_split_gelu_accepts(x: Array, bias: Array) -> None:
    if x.ndim != 3 or x.shape[2] % 2 or bias.shape != x.shape[2:]:
        raise OperatorError(f"X must have 3 axes, the last even, and bias its size, got {x.shape} and {bias.shape}", code="SX404")


@microsoft("BiasAdd", 1, traits=("shape_of_first",))
def bias_add(op: Op, x: V, bias: V, skip: V) -> V:
    """Compute x + bias + skip."""
    return op.Add(op.Add(x, bias), skip)


@bias_add.accepts
def bias_add_accepts(x: Array, bias: Array, skip: Array) -> None:
    if x.ndim != 3 or bias.shape != x.shape[2:] or skip.shape != x.shape:
        raise OperatorError(
            f"X and skip must have one shape of 3 axes, and bias their last, got {x.shape}, {skip.shape} and {bias.shape}",
            code="SX404",
        )
