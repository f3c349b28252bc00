"""Reductions: sums, means, products, bounds and norms over some of the axes of a tensor.

Each has a step and two declarations: `axes` is an attribute up to opset 12 (ReduceSum) or 17 (the others) and an input
after that; an empty one may also mean "reduce nothing" (`noop_with_empty_axes`).  The elementwise function of a reduction
(abs, square, log) is applied in that case too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Declaration, Host, Ints, operator
from ._api import Array
from ._common import axes_of, other_factors
from ._flops import each_input

Step = Callable[[Xp, Array, Ints, bool], Array]  # (xp, x, axes from the front, keepdims) -> reduced


def _reduce(step: Step, xp: Xp, x: Array, axes: Sequence[int] | None, keepdims: int, noop: int = 0) -> Array:
    """Apply a step over `axes`; without axes, over all of them or, with `noop`, over none."""
    named = axes_of(axes, x.ndim) if axes else () if noop else tuple(range(x.ndim))
    return step(xp, x, named, bool(keepdims))


def _sum(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    return xp.sum_over(x, axes, keepdims)


def _prod(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    return x.prod(axis=axes, dtype=x.dtype, keepdims=keepdims) if axes else x


def _max(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    if x.size == 0:
        return _filled(xp, x, axes, keepdims, _bounds(x.dtype)[0])
    return x.max(axis=axes, keepdims=keepdims) if axes else x


def _min(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    if x.size == 0:
        return _filled(xp, x, axes, keepdims, _bounds(x.dtype)[1])
    return x.min(axis=axes, keepdims=keepdims) if axes else x


def _bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the minimum and the maximum of a dtype: the neutral values of Max and Min."""
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _filled(xp: Xp, x: Array, axes: Ints, keepdims: bool, value: Any) -> Array:
    """Return the reduction of an empty tensor: `value` in the remaining shape."""
    kept = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
    return xp.full(tuple(kept), value, dtype=x.dtype)


def _mean(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    if x.dtype.kind not in "iu":
        return xp.mean_over(x, axes, keepdims)
    if 0 in (x.shape[a] for a in axes) and 0 not in _shape(x.shape, axes):
        raise OperatorError(
            f"the mean of integers must have at least one value, got shape {x.shape} and axes {axes}", code="SX403"
        )
    # Exact if the sum would overflow: sum(x) = n * sum(x // n) + rest, and the rest, in [0, n * n), is right modulo 2**64.
    # Rounds towards zero, as Div does.
    z = x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)
    n = xp.count(z, axes)
    floor = _sum(xp, z // n, axes, keepdims)
    rest = _sum(xp, z, axes, keepdims) - floor * n
    floor, rest = floor + rest // n, rest % n
    return (floor + ((floor < 0) & (rest > 0)).astype(z.dtype)).astype(x.dtype)


def _wide(x: Array) -> Array:
    """Convert integers to float64, for roots and logarithms."""
    return x.astype(np.float64) if x.dtype.kind in "iu" else x


def _narrow(xp: Xp, y: Array, dtype: np.dtype[Any]) -> Array:
    """Convert back by truncation; undefined logarithms (of zero, of a negative sum) become the minimum integer."""
    if dtype.kind not in "iu":
        return y.astype(dtype, copy=False)
    return xp.cast(xp.where(xp.isfinite(y), y, np.iinfo(dtype).min), dtype)


def _l1(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    return _sum(xp, xp.abs(x), axes, keepdims)


def _sum_square(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    return _sum(xp, x * x, axes, keepdims)


def _l2(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    return _narrow(xp, xp.sqrt(_sum_square(xp, _wide(x), axes, keepdims)), x.dtype)


def _log_sum(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    return _narrow(xp, xp.log(_sum(xp, _wide(x), axes, keepdims)), x.dtype)


def _log_sum_exp(xp: Xp, x: Array, axes: Ints, keepdims: bool) -> Array:
    """Compute in float64, as ONNX defines it: near zero, the logarithm of a float32 sum is inaccurate."""
    z = x.astype(np.float64)
    top = _max(xp, z, axes, True)
    top = xp.where(xp.isfinite(top), top, 0)  # exp and log propagate infinities and NaN
    y = xp.log(_sum(xp, xp.exp(z - top), axes, True)) + top
    return _narrow(xp, y if keepdims else y.reshape(_shape(x.shape, axes)), x.dtype)


def _shape(shape: Ints, axes: Ints) -> Ints:
    return tuple(n for i, n in enumerate(shape) if i not in axes)


# --- axes as an attribute.  ONNX specifies negative ones in opset 11 or later; exporters wrote them before, and ONNX's
# shape inference has always accepted them.


@operator("ReduceSum", 1, 11)
def reduce_sum_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_sum, xp, x, axes, keepdims)


@operator("ReduceMean", 1, 11, 13)
def reduce_mean_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_mean, xp, x, axes, keepdims)


@operator("ReduceProd", 1, 11, 13)
def reduce_prod_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_prod, xp, x, axes, keepdims)


@operator("ReduceMax", 1, 11, 12, 13)
def reduce_max_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_max, xp, x, axes, keepdims)


@operator("ReduceMin", 1, 11, 12, 13)
def reduce_min_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_min, xp, x, axes, keepdims)


@operator("ReduceL1", 1, 11, 13)
def reduce_l1_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_l1, xp, x, axes, keepdims)


@operator("ReduceL2", 1, 11, 13)
def reduce_l2_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_l2, xp, x, axes, keepdims)


@operator("ReduceSumSquare", 1, 11, 13)
def reduce_sum_square_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_sum_square, xp, x, axes, keepdims)


@operator("ReduceLogSum", 1, 11, 13)
def reduce_log_sum_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_log_sum, xp, x, axes, keepdims)


@operator("ReduceLogSumExp", 1, 11, 13)
def reduce_log_sum_exp_1(xp: Xp, x: Array, *, axes: Ints | None = None, keepdims: int = 1) -> Array:
    return _reduce(_log_sum_exp, xp, x, axes, keepdims)


def _axes_as_input(old: Declaration) -> None:
    """Declare the decomposition of an old version into the newer one."""

    @old.decomposition
    def old_decomposition(op: Op, x: V, axes: Ints | None, keepdims: int) -> V:
        return getattr(op, old.name)(x, list(axes) if axes else None, keepdims=keepdims)


for _old in (
    reduce_sum_1,
    reduce_mean_1,
    reduce_prod_1,
    reduce_max_1,
    reduce_min_1,
    reduce_l1_1,
    reduce_l2_1,
    reduce_sum_square_1,
    reduce_log_sum_1,
    reduce_log_sum_exp_1,
):
    _axes_as_input(_old)


# --- axes as an input


@operator("ReduceSum", 13, traits=("reduction", "finite"))
def reduce_sum(xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    return _reduce(_sum, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_sum.flops(each_input(1))


@reduce_sum.gradient
def reduce_sum_gradient(op: Op, dy: V, x: V, axes: V, keepdims: int) -> V:
    return _spread(op, dy, x, axes, keepdims)


def _spread(op: Op, y: V, x: V, axes: V, keepdims: int) -> V:
    """Broadcast a reduced value to the shape of x."""
    if not keepdims and axes is not None:
        y = op.Unsqueeze(y, axes)
    return op.Expand(y, op.Shape(x))


@operator("ReduceMean", 18, traits=("reduction", "finite"))
def reduce_mean(xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    return _reduce(_mean, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_mean.flops(each_input(1))


@reduce_mean.gradient
def reduce_mean_gradient(op: Op, dy: V, x: V, y: V, axes: V, keepdims: int) -> V:
    count = op.Div(op.cast(op.Size(x), x), op.cast(op.Size(y), x))
    return _spread(op, op.Div(dy, count), x, axes, keepdims)


@operator("ReduceProd", 18, traits=("reduction",))
def reduce_prod(xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    return _reduce(_prod, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_prod.flops(each_input(1))


@reduce_prod.gradient
def reduce_prod_gradient(op: Op, dy: V, x: V, axes: V, keepdims: int, noop_with_empty_axes: int) -> V:
    """Multiply dy by the product of the others: with one zero only that zero has a gradient, with two none has."""
    zero = op.Equal(x, 0)
    product = op.ReduceProd(op.Where(zero, 1, x), axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)
    zeros, vanishing = (
        op.ReduceSum(v, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)
        for v in (op.cast(zero, x), op.Where(zero, x, 0))
    )
    return op.Mul(_spread(op, dy, x, axes, keepdims), other_factors(op, x, product, zeros, vanishing))


@operator("ReduceMax", 18, 20, traits=("reduction", "finite", "keeps_finite"))
def reduce_max(xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    return _reduce(_max, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_max.flops(each_input(1))


@reduce_max.gradient
def extreme_back(op: Op, dy: V, x: V, y: V, axes: V, keepdims: int, noop_with_empty_axes: int) -> V:
    """Divide the gradient equally among the elements that equal the extremum."""
    here = op.cast(op.Equal(x, _spread(op, y, x, axes, keepdims)), x)
    count = op.ReduceSum(here, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)
    return op.Mul(op.Div(_spread(op, dy, x, axes, keepdims), count), here)


@operator("ReduceMin", 18, 20, traits=("reduction", "finite", "keeps_finite"))
def reduce_min(xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    return _reduce(_min, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_min.flops(each_input(1))


reduce_min.gradient(extreme_back)


@operator("ReduceL1", 18, traits=("reduction", "finite"))
def reduce_l1(xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    return _reduce(_l1, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_l1.flops(each_input(1))


@reduce_l1.gradient
def reduce_l1_gradient(op: Op, dy: V, x: V, axes: V, keepdims: int) -> V:
    return op.Mul(_spread(op, dy, x, axes, keepdims), op.Sign(x))


@operator("ReduceL2", 18, traits=("reduction", "finite"))
def reduce_l2(xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
    return _reduce(_l2, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_l2.flops(each_input(1))


@reduce_l2.gradient
def reduce_l2_gradient(op: Op, dy: V, x: V, y: V, axes: V, keepdims: int) -> V:
    """The gradient at 0 is 0."""
    slope = op.Where(op.Equal(y, 0), 0, op.Div(dy, op.Where(op.Equal(y, 0), 1, y)))
    return op.Mul(_spread(op, slope, x, axes, keepdims), x)


@operator("ReduceSumSquare", 18, traits=("reduction", "finite"))
def reduce_sum_square(
    xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Array:
    return _reduce(_sum_square, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_sum_square.flops(each_input(1))


@reduce_sum_square.gradient
def reduce_sum_square_gradient(op: Op, dy: V, x: V, axes: V, keepdims: int) -> V:
    return op.Mul(_spread(op, op.Add(dy, dy), x, axes, keepdims), x)


@operator("ReduceLogSum", 18, 28, traits=("reduction",))
def reduce_log_sum(
    xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Array:
    return _reduce(_log_sum, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_log_sum.flops(each_input(1))


@reduce_log_sum.gradient
def reduce_log_sum_gradient(op: Op, dy: V, x: V, y: V, axes: V, keepdims: int) -> V:
    return _spread(op, op.Div(dy, op.Exp(y)), x, axes, keepdims)


@operator("ReduceLogSumExp", 18, 28, traits=("reduction",))
def reduce_log_sum_exp(
    xp: Xp, x: Array, axes: Host[Ints] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Array:
    return _reduce(_log_sum_exp, xp, x, axes, keepdims, noop_with_empty_axes)


reduce_log_sum_exp.flops(each_input(1))


@reduce_log_sum_exp.gradient
def reduce_log_sum_exp_gradient(op: Op, dy: V, x: V, y: V, axes: V, keepdims: int) -> V:
    weight = op.Exp(op.Sub(x, _spread(op, y, x, axes, keepdims)))
    return op.Mul(_spread(op, dy, x, axes, keepdims), weight)
