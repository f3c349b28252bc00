"""Normalizations: subtract a mean, divide by a standard deviation or a norm, scale and shift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..devices.composed import mean as mean_of
from ..devices.composed import moments
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints, Version, Wanted, WorkShape, operator
from ..ir.shapes import Dim, KnownShapes, Shape, Unsure, agree
from ..ir.sizes import broadcast_sizes
from ._api import Array
from ._common import axes_of, axis_of
from ._flops import each_input, size


def fits(shape: Ints, to: Ints, what: str) -> None:
    """Raise OperatorError unless `shape` broadcasts to `to` without changing it."""
    try:
        if broadcast_sizes(shape, to) == tuple(to):
            return
    except ValueError:
        pass
    raise OperatorError(f"{what} of shape {tuple(shape)} does not broadcast to {tuple(to)}", code="SX404")


def _per_channel(v: Array, x: Array, what: str) -> Array:
    """Reshape `v`, one value for each channel (axis 1), to broadcast to x."""
    if x.ndim < 2:
        raise OperatorError(f"x must have at least two axes, got shape {x.shape}", code="SX404")
    if v.shape != x.shape[1:2]:
        raise OperatorError(f"{what} must hold one value for each channel of x {x.shape}, got shape {v.shape}", code="SX404")
    return v.reshape(-1, *[1] * (x.ndim - 2))


# --- over the batch


def _batch_norm(
    xp: Xp,
    x: Array,
    scale: Array,
    b: Array,
    mean: Array,
    var: Array,
    epsilon: float,
    momentum: float,
    training: bool,
    spatial: bool = True,
) -> tuple[Array, ...]:
    """Return y, the two running statistics and the two of this batch; without training, only y.

    With `spatial`, there is one statistic for each channel; otherwise one for each element of a sample.
    """
    widest = xp.result_type(x.dtype, scale.dtype, mean.dtype)  # x may be wider than the statistics: then the results are wide too
    scale, b, mean, var = (p.astype(widest, copy=False) for p in (scale, b, mean, var))
    if x.ndim == 1:  # N samples of one channel
        y, *statistics = _batch_norm(xp, x.reshape(-1, 1), scale, b, mean, var, epsilon, momentum, training)
        return y.reshape(-1), *statistics
    if spatial:
        axes = (0, *range(2, x.ndim))
        scale, b, m, v = (_per_channel(p, x, n) for p, n in ((scale, "scale"), (b, "B"), (mean, "mean"), (var, "var")))
    else:
        axes = (0,)
        scale, b, m, v = (_per_feature(p, x, n) for p, n in ((scale, "scale"), (b, "B"), (mean, "mean"), (var, "var")))
    if not training:
        return (xp.standardized(x, m, v, epsilon, scale, b),)
    y, now_mean, now_var = xp.batch_normalized(x, axes, epsilon, scale, b)
    now_mean, now_var = (s.reshape(s.shape[1:]) for s in (now_mean, now_var))
    new_mean, new_var = (xp.blended(old, now, momentum) for old, now in ((m, now_mean), (v, now_var)))
    shape = mean.shape if spatial else x.shape[1:]
    return y, *(s.reshape(shape) for s in (new_mean, new_var, now_mean, now_var))


def _per_feature(v: Array, x: Array, what: str) -> Array:
    """Reshape `v` to broadcast to a sample: it has the sample's size, or one value per channel as in versions 1 and 6."""
    if v.ndim == 1 and v.shape == x.shape[1:2]:
        return v.reshape(-1, *[1] * (x.ndim - 2))
    if v.size != math.prod(x.shape[1:]):
        raise OperatorError(f"{what} must match samples of shape {x.shape[1:]}, got shape {v.shape}", code="SX404")
    return v.reshape(x.shape[1:])


@operator("BatchNormalization", 14, 15, traits=("norm",), meaning_since=7, weights={1: "the scale", 2: "the bias"})
def batch_normalization(
    xp: Xp,
    x: Array,
    scale: Array,
    b: Array,
    input_mean: Array,
    input_var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    wanted: Wanted,
) -> tuple[Array, ...]:
    """Normalize a batch; batch and running variance are population variances."""
    _only_y(wanted, bool(training_mode), "training_mode=1")
    return _batch_norm(xp, x, scale, b, input_mean, input_var, epsilon, momentum, bool(training_mode))[:3]


batch_normalization.flops(each_input(2))


@batch_normalization.shapes
def batch_normalization_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None]:
    first, training = known.shape(call.inputs[0]), known.attribute(call, "training_mode")
    if training is not None and (training not in (0, 1) or (len(call.outputs) > 1 and not training)):
        raise Unsure
    channels: Dim | None = None if first is None else first[1] if len(first) > 1 else 1
    for i in call.inputs[1:5]:
        shape = known.shape(i)
        if shape is not None and len(shape) != 1 and known.attribute(call, "spatial", 1):
            raise Unsure
        if shape is not None and len(shape) == 1:
            if channels is not None and not agree(shape, (channels,)):
                raise Unsure
            channels = shape[0] if channels is None or isinstance(shape[0], int) else channels
    statistics = None if channels is None else (channels,)
    return [first, statistics, statistics]


@batch_normalization.gradient
def batch_normalization_gradient(
    op: Op, dys: list[V], x: V, scale: V, b: V, input_mean: V, input_var: V, epsilon: float, momentum: float, training_mode: int
) -> tuple[V, ...]:
    """In training, the gradient includes those of the batch statistics and of the running statistics that are outputs."""
    given = (x, scale, b, input_mean, input_var)
    dy = op.zeros_like(x) if dys[0] is None else dys[0]
    if op.rank(x) == 1:  # N samples of one channel
        x, dy = op.Unsqueeze(x, [1]), op.Unsqueeze(dy, [1])
    axes = op.axes_but(x, 1)
    wide = [1, -1, *[1] * (op.rank(x) - 2)]
    scale, mean, var = (op.Reshape(op.cast(v, x), wide) for v in (scale, input_mean, input_var))
    dmean = dvar = None
    if training_mode:
        mean = op.ReduceMean(x, axes, keepdims=1)
        centred = op.Sub(x, mean)
        var = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
    else:
        centred = op.Sub(x, mean)
    inverse = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    normal = op.Mul(centred, inverse)
    db = op.ReduceSum(dy, axes, keepdims=1)
    dscale = op.ReduceSum(op.Mul(dy, normal), axes, keepdims=1)
    slope = op.Mul(scale, inverse)
    if training_mode:
        count = op.Div(op.cast(op.Size(x), x), op.cast(op.Size(mean), x))
        dx = dy if dys[0] is None else op.Mul(slope, op.Sub(dy, op.Div(op.Add(db, op.Mul(normal, dscale)), count)))
        new_mean, new_var = (op.Reshape(op.cast(d, x), wide) if d is not None else None for d in (*dys[1:3], None, None)[:2])
        if new_mean is not None:
            dmean = op.Mul(new_mean, momentum)
            dx = op.Add(dx, op.Div(op.Mul(new_mean, 1 - momentum), count))
        if new_var is not None:
            dvar = op.Mul(new_var, momentum)
            dx = op.Add(dx, op.Div(op.Mul(op.Mul(new_var, 2 * (1 - momentum)), centred), count))
    else:
        dx = op.Mul(dy, slope)
        dmean = op.Neg(op.Mul(slope, db))
        dvar = op.Mul(op.Mul(op.Mul(scale, dscale), op.Mul(inverse, inverse)), -0.5)
    grads = (dx, dscale, db, dmean, dvar)
    return tuple(
        None if g is None else op.Reshape(op.cast(g, v), op.Shape(v), allowzero=1) for g, v in zip(grads, given, strict=True)
    )


@operator("BatchNormalization", 7, 9)
def batch_normalization_7(
    xp: Xp,
    x: Array,
    scale: Array,
    b: Array,
    mean: Array,
    var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    wanted: Wanted,
) -> tuple[Array, ...]:
    """Versions 7 and 9 have no attribute for the mode: a node with more outputs than y is in training mode."""
    return _batch_norm(xp, x, scale, b, mean, var, epsilon, momentum, any(wanted[1:]), bool(spatial))


@batch_normalization_7.decomposition
def batch_normalization_7_decomposition(
    op: Op, x: V, scale: V, b: V, mean: V, var: V, epsilon: float, momentum: float, spatial: int, wanted: tuple[bool, ...]
) -> tuple[V, ...]:
    return _normalized(op, x, (scale, b, mean, var), epsilon, momentum, any(wanted[1:]), bool(spatial))


def _normalized(
    op: Op, x: V, given: tuple[V, ...], epsilon: float, momentum: float, training: bool, spatial: bool
) -> tuple[V, ...]:
    """BatchNormalization of an old version, with its five outputs in training mode."""
    shape = op.Shape(x)
    if not spatial:  # each element of a sample becomes a channel
        if op.rank(given[0]) == 1 and op.rank(x) > 2:  # one value for each channel, or for each element
            elements = op.Reshape(op.ReduceProd(op.Slice(shape, [1], [op.rank(x)]), keepdims=1), [1])
            repeats = op.Div(elements, op.Size(given[0]))
            given = tuple(op.Reshape(op.Expand(op.Unsqueeze(v, [1]), op.Concat([1], repeats, axis=0)), [-1]) for v in given)
        flat = tuple(op.Reshape(v, [-1]) for v in given)
        x = op.Reshape(x, op.Concat(op.Slice(shape, [0], [1]), [-1], axis=0))
    else:
        flat = given
    like = given[2]
    if not training:
        y = op.BatchNormalization(x, *flat, epsilon=epsilon)
        return (op.Reshape(y, shape, allowzero=1),)
    y, new_mean, new_var = op.BatchNormalization(x, *flat, epsilon=epsilon, momentum=momentum, training_mode=1, outputs=3)
    axes = op.axes_but(x, 1)
    now = op.ReduceMean(x, axes, keepdims=1)
    centred = op.Sub(x, now)
    statistics = (
        new_mean,
        new_var,
        op.ReduceMean(x, axes, keepdims=0),
        op.ReduceMean(op.Mul(centred, centred), axes, keepdims=0),
    )
    return op.Reshape(y, shape, allowzero=1), *(op.Reshape(s, op.Shape(like), allowzero=1) for s in statistics)


@operator("BatchNormalization", 1, 6)
def batch_normalization_1(
    xp: Xp,
    x: Array,
    scale: Array,
    b: Array,
    mean: Array,
    var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    is_test: int = 0,
    spatial: int = 1,
    wanted: Wanted,
) -> tuple[Array, ...]:
    """Before opset 7 a node is in training mode by default."""
    _only_y(wanted, not is_test, "is_test=0")
    return _batch_norm(xp, x, scale, b, mean, var, epsilon, momentum, not is_test, bool(spatial))


@batch_normalization_1.decomposition
def batch_normalization_1_decomposition(
    op: Op, x: V, scale: V, b: V, mean: V, var: V, epsilon: float, momentum: float, is_test: int, spatial: int
) -> tuple[V, ...]:
    return _normalized(op, x, (scale, b, mean, var), epsilon, momentum, not is_test, bool(spatial))


def _only_y(wanted: tuple[bool, ...], training: bool, switch: str) -> None:
    if any(wanted[1:]) and not training:
        raise OperatorError(f"statistics must be outputs in training mode only ({switch})", code="SX404")


# --- over an instance, a group, the last axes


@operator("InstanceNormalization", 1, 6, 22, traits=("norm",), weights={1: "the scale", 2: "the bias"})
def instance_normalization(xp: Xp, x: Array, scale: Array, b: Array, *, epsilon: float = 1e-5) -> Array:
    scale, b = _per_channel(scale, x, "scale"), _per_channel(b, x, "B")
    d, _, var = moments(xp, x, tuple(range(2, x.ndim)))
    return d * (scale / xp.sqrt(var + epsilon)) + b


instance_normalization.flops(each_input(8))


@instance_normalization.shapes
def instance_normalization_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    first, *others = (known.shape(i) for i in call.inputs)
    if first is not None and (len(first) < 2 or not all(s is None or agree(s, (first[1],)) for s in others)):
        raise Unsure
    return first


@instance_normalization.decomposition
def instance_normalization_decomposition(op: Op, x: V, scale: V, b: V, epsilon: float) -> V:
    wide = [-1, *[1] * (op.rank(x) - 2)]
    y = _standard(op, x, list(range(2, op.rank(x))), epsilon)
    return op.Add(op.Mul(y, op.Reshape(scale, wide)), op.Reshape(b, wide))


def _standard(op: Op, x: V, axes: list[int], epsilon: float) -> V:
    """Return (x - mean) / sqrt(variance + epsilon)."""
    centred = op.Sub(x, op.ReduceMean(x, axes, keepdims=1)) if axes else op.Sub(x, x)
    var = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1) if axes else op.Mul(centred, centred)
    return op.Div(centred, op.Sqrt(op.Add(var, epsilon)))


@operator("GroupNormalization", 18, 21, traits=("shape_of_first", "norm"), weights={1: "the scale", 2: "the bias"})
def group_normalization(
    xp: Xp, x: Array, scale: Array, bias: Array, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1, version: Version
) -> Array:
    """Version 18 has one scale and one bias per group, version 21 one per channel."""
    if x.ndim < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise OperatorError(f"num_groups must divide the channels of x {x.shape}, got {num_groups}", code="SX404")
    groups = _stashed(xp, x, stash_type).reshape(x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups)
    d, _, var = moments(xp, groups, (2,))
    normal = (d / xp.sqrt(var + epsilon)).astype(x.dtype)
    if version == 18:
        y = normal * _per_channel(scale, groups, "scale") + _per_channel(bias, groups, "bias")
        return y.reshape(x.shape)
    return normal.reshape(x.shape) * _per_channel(scale, x, "scale") + _per_channel(bias, x, "bias")


group_normalization.flops(each_input(8))


@group_normalization.decomposition
def group_normalization_decomposition(op: Op, x: V, scale: V, bias: V, num_groups: int, epsilon: float, version: int) -> V:
    shape, rank = op.Shape(x), op.rank(x)
    channels = op.Div(op.Shape(x, start=1, end=2), num_groups)
    split = op.Concat(op.Shape(x, end=1), [num_groups], channels, op.Shape(x, start=2), axis=0)
    y = _standard(op, op.Reshape(x, split, allowzero=1), list(range(2, rank + 1)), epsilon)
    if version == 18:  # one scale and one bias per group
        wide = [-1, *[1] * (rank - 1)]
        return op.Reshape(op.Add(op.Mul(y, op.Reshape(scale, wide)), op.Reshape(bias, wide)), shape, allowzero=1)
    wide = [-1, *[1] * (rank - 2)]
    return op.Add(op.Mul(op.Reshape(y, shape, allowzero=1), op.Reshape(scale, wide)), op.Reshape(bias, wide))


def _stashed(xp: Xp, x: Array, stash_type: int) -> Array:
    """Convert x to the precision of the first stage: that of `stash_type`, or that of x if it is higher."""
    dtype = dtypes.numpy_dtype(stash_type)
    if not dtypes.is_float(dtype):
        raise OperatorError(f"stash_type must be a float type, got {dtypes.onnx_name(dtype)}", code="SX404")
    return x.astype(np.float64) if dtype == np.float64 and x.dtype != np.float64 else x


@operator("LayerNormalization", 17, traits=("shape_of_first", "norm"), weights={1: "the scale", 2: "the bias"})
def layer_normalization(
    xp: Xp, x: Array, scale: Array, b: Array | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array, Array]:
    """Return y, the mean and the inverse standard deviation; the last two in `stash_type`.

    The first stage is computed in at least the precision of `stash_type`: double stays double.
    """
    fits(scale.shape, x.shape, "Scale")
    if b is not None:
        fits(b.shape, x.shape, "B")
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    y, mean, inverse = xp.layer_normalized(_stashed(xp, x, stash_type), axes, epsilon, scale, b, x.dtype)
    stash: np.dtype[Any] = dtypes.numpy_dtype(stash_type)
    return y, mean.astype(stash, copy=mean is x), inverse.astype(stash, copy=False)


layer_normalization.flops(each_input(8))


@layer_normalization.gradient
def layer_normalization_gradient(op: Op, dys: list[V], x: V, scale: V, b: V, axis: int, epsilon: float) -> tuple[V, ...]:
    """The gradients of the outputs mean and inverse standard deviation are included."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    centred, mean, inverse = _centred(op, x, axes, epsilon)
    normal = op.Mul(centred, inverse)
    dy = op.zeros_like(x) if dys[0] is None else dys[0]
    dnormal = op.Mul(dy, scale)
    shift = op.ReduceMean(dnormal, axes, keepdims=1)
    tilt = op.ReduceMean(op.Mul(dnormal, normal), axes, keepdims=1)
    dx = op.Mul(inverse, op.Sub(op.Sub(dnormal, shift), op.Mul(normal, tilt)))
    count = op.Div(op.cast(op.Size(x), x), op.cast(op.Size(mean), x))
    if len(dys) > 1 and dys[1] is not None:
        dx = op.Add(dx, op.Div(op.cast(dys[1], x), count))
    if len(dys) > 2 and dys[2] is not None:  # d inverse = - inverse^2 normal dx / count
        dx = op.Sub(dx, op.Div(op.Mul(op.Mul(op.cast(dys[2], x), op.Mul(inverse, inverse)), normal), count))
    return dx, op.sum_to(op.Mul(dy, normal), scale), None if b is None else op.sum_to(dy, b)


@layer_normalization.decomposition
def layer_normalization_decomposition(op: Op, x: V, scale: V, b: V, axis: int, epsilon: float, stash_type: int) -> tuple[V, V, V]:
    """Compute the variance about the mean: E[x^2] - E[x]^2 in ONNX's function body cancels for values far from 0."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    centred, mean, inverse = _centred(op, _stashed_in(op, x, stash_type), axes, epsilon)
    y = op.Mul(op.cast(op.Mul(centred, inverse), x), scale)
    return y if b is None else op.Add(y, b), op.Cast(mean, to=stash_type), op.Cast(inverse, to=stash_type)


def _centred(op: Op, x: V, axes: list[int], epsilon: float) -> tuple[V, V, V]:
    """Return x minus its mean over `axes`, the mean, and the inverse standard deviation."""
    mean = op.ReduceMean(x, axes, keepdims=1)
    centred = op.Sub(x, mean)
    return centred, mean, op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1), epsilon)))


def _stashed_in(op: Op, x: V, stash_type: int) -> V:
    """`_stashed` in ONNX operators."""
    widest = max((np.dtype(op.dtype(x)), dtypes.numpy_dtype(stash_type)), key=lambda d: d.itemsize)
    return x if op.dtype(x) == widest else op.Cast(x, to=dtypes.onnx_code(widest))


@operator("RMSNormalization", 23, traits=("shape_of_first", "norm"), weights={1: "the scale"})
def rms_normalization(xp: Xp, x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Array:
    """The result has the dtype of `scale`."""
    fits(scale.shape, x.shape, "scale")
    z = _stashed(xp, x, stash_type)
    square = mean_of(xp, z * z, tuple(range(axis_of(axis, x.ndim), x.ndim)))
    return (z / xp.sqrt(square + epsilon)).astype(x.dtype) * scale


rms_normalization.flops(each_input(8))


@rms_normalization.gradient
def rms_normalization_gradient(op: Op, dy: V, x: V, scale: V, axis: int, epsilon: float) -> tuple[V, V]:
    axes = list(range(axis % op.rank(x), op.rank(x)))
    inverse = op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), axes, keepdims=1), epsilon)))
    normal = op.Mul(x, inverse)
    dnormal = op.Mul(op.cast(dy, x), op.cast(scale, x))
    dx = op.Mul(inverse, op.Sub(dnormal, op.Mul(normal, op.ReduceMean(op.Mul(dnormal, normal), axes, keepdims=1))))
    return dx, op.sum_to(op.Mul(dy, op.cast(normal, dy)), scale)


@rms_normalization.decomposition
def rms_normalization_decomposition(op: Op, x: V, scale: V, axis: int, epsilon: float, stash_type: int) -> V:
    axes = list(range(axis % op.rank(x), op.rank(x)))
    z = _stashed_in(op, x, stash_type)
    normal = op.Div(z, op.Sqrt(op.Add(op.ReduceMean(op.Mul(z, z), axes, keepdims=1), epsilon)))
    return op.Mul(op.cast(op.cast(normal, x), scale), scale)


@operator("MeanVarianceNormalization", 9, 13, traits=("shape_of_first",))
def mean_variance_normalization(xp: Xp, x: Array, *, axes: Ints = (0, 2, 3)) -> Array:
    """Normalize over `axes`; the 1e-9 is from ONNX's function body: a constant becomes zero."""
    d, _, var = moments(xp, x, axes_of(axes, x.ndim) if axes else tuple(range(x.ndim)))
    return d / (xp.sqrt(var) + 1e-9)


mean_variance_normalization.flops(each_input(8))


@mean_variance_normalization.gradient
def mean_variance_normalization_gradient(op: Op, dy: V, x: V, axes: Ints) -> V:
    """Where the standard deviation is 0, its gradient is omitted."""
    over = list(axes) or list(range(op.rank(x)))
    if not over:  # the mean of a scalar is itself
        return op.zeros_like(x)
    centred = op.Sub(x, op.ReduceMean(x, over, keepdims=1))
    var = op.ReduceMean(op.Mul(centred, centred), over, keepdims=1)
    flat = op.Equal(var, 0)
    deviation = op.Sqrt(op.Where(flat, 1, var))  # in place of 0, at which its own slope is infinite
    below = op.Add(deviation, 1e-9)
    tilt = op.Div(op.ReduceMean(op.Mul(dy, centred), over, keepdims=1), op.Mul(op.Mul(below, below), deviation))
    shifted = op.Sub(dy, op.ReduceMean(dy, over, keepdims=1))
    return op.Sub(op.Div(shifted, op.Where(flat, 1e-9, below)), op.Mul(centred, op.Where(flat, 0, tilt)))


# --- by a norm


@operator("LpNormalization", 1, 22, traits=("shape_of_first",))
def lp_normalization(xp: Xp, x: Array, *, axis: int = -1, p: int = 2) -> Array:
    """Divide x by its norm along an axis; the result is zero where the norm is zero."""
    if p not in (1, 2):
        raise OperatorError(f"p must be 1 or 2, got {p}", code="SX404")
    axis = axis_of(axis, x.ndim)
    norm = xp.sum_over(xp.abs(x), (axis,), True) if p == 1 else xp.sqrt(xp.sum_over(x * x, (axis,), True))
    return xp.where(norm == 0, 0, x / norm)


lp_normalization.flops(each_input(8))


@lp_normalization.gradient
def lp_normalization_gradient(op: Op, dy: V, x: V, y: V, axis: int, p: int) -> V:
    """The gradient is 0 where the norm is 0."""
    norm = op.ReduceL1(x, [axis], keepdims=1) if p == 1 else op.ReduceL2(x, [axis], keepdims=1)
    zero = op.Equal(norm, 0)
    along = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
    dx = op.Sub(dy, op.Mul(op.Sign(x) if p == 1 else y, along))
    return op.Where(zero, 0, op.Div(dx, op.Where(zero, 1, norm)))


@operator("LRN", 1, 13, traits=("shape_of_first",))
def lrn(xp: Xp, x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Array:
    """Sum squares over `size` channels around each; for an even size, one more after than before."""
    if x.ndim < 2 or size < 1:
        raise OperatorError(
            f"size must be at least 1 and x must have a channel axis, got {size} and shape {x.shape}", code="SX404"
        )
    channels = x.shape[1]
    square = x * x
    total = xp.zeros_like(x)
    behind, ahead = min((size - 1) // 2, channels), min(size // 2, channels)
    for i in limits.rounds(behind + ahead + 1):
        offset = i - behind
        into = slice(max(0, -offset), max(0, channels - max(0, offset)))
        source = slice(max(0, offset), max(0, channels - max(0, -offset)))
        total[:, into] += square[:, source]
    return x / (bias + (alpha / size) * total) ** beta


@lrn.flops
def lrn_flops(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    return size(inputs[0]) * (2 * int(attributes["size"]) + 3)


@lrn.gradient
def lrn_gradient(op: Op, dy: V, x: V, size: int, alpha: float, beta: float, bias: float) -> V:
    """Differentiate y = x s^-beta, where s is a sum of squares over neighbours; being a neighbour is symmetric."""
    s = op.Add(op.Mul(_neighbours(op, op.Mul(x, x), (size - 1) // 2, size // 2), alpha / size), bias)
    beta_ = op.constant(-beta, op.dtype(x))
    power = op.Pow(s, beta_)
    back = _neighbours(op, op.Div(op.Mul(op.Mul(dy, x), power), s), size // 2, (size - 1) // 2)
    return op.Sub(op.Mul(dy, power), op.Mul(op.Mul(x, back), 2 * alpha * beta / size))


def _neighbours(op: Op, x: V, before: int, after: int) -> V:
    """Return the sum over `before` channels before and `after` channels after each one."""
    rank = op.rank(x)
    total = op.CumSum(op.Pad(x, [0, before + 1, *[0] * (rank - 2), 0, after, *[0] * (rank - 2)]), 1)
    count = op.Shape(x, start=1, end=2)
    high = op.Slice(total, [before + after + 1], op.Add(count, before + after + 1), [1])
    return op.Sub(high, op.Slice(total, [0], count, [1]))
