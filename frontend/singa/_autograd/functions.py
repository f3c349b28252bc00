"""Functions that programs know by one name, and that ONNX writes with several operators; `autograd` offers them.

y = autograd.var(x, axes=[1])
y = autograd.adaptive_avg_pool(x, (7, 7))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import random, tape
from .._core.tensor import Tensor
from .._core.tensor import op as recorder
from .formula import TensorOp, formula, known_shape, true

__all__: list[str] = ["fused_bias_add_scale_mask_softmax_dropout"]

# --- element by element -----------------------------------------------------------------------------------------------


@formula("Square")
def square(op: TensorOp, x: Any) -> Tensor:
    """x x"""
    return op.Mul(x, x)


@formula("Rsqrt")
def rsqrt(op: TensorOp, x: Any) -> Tensor:
    """1 / sqrt(x)"""
    return op.Reciprocal(op.Sqrt(x))


@formula("QuickGelu")
def quick_gelu(op: TensorOp, x: Any) -> Tensor:
    """x sigmoid(1.702 x), the fast stand-in for `Gelu`; from opset 24 on one Swish."""
    return op.Swish(x, alpha=1.702)


@formula("NotEqual")
def not_equal(op: TensorOp, a: Any, b: Any) -> Tensor:
    """Whether two elements differ; NaN differs from everything."""
    return op.Not(op.Equal(a, b))


@formula("SquaredDifference")
def squared_difference(op: TensorOp, a: Any, b: Any) -> Tensor:
    """(a - b)^2"""
    d = op.Sub(a, b)
    return op.Mul(d, d)


@formula("FloorMod")
def floor_mod(op: TensorOp, a: Any, b: Any) -> Tensor:
    """What is left of a after whole b's, with the sign of b, as Python's %: -7 by 3 leaves 2.

    Integers are exact.  Floats are a - floor(a / b) b: where a / b rounds to a whole number, nothing is left.
    """
    if not dtypes.is_float(op.dtype(a)):
        return op.Mod(a, b)
    return op.Sub(a, op.Mul(op.Floor(op.Div(a, b)), b))


@formula("BiasAdd")
def bias_add(op: TensorOp, x: Any, b: Any, *, axis: int = 1) -> Tensor:
    """x plus one number for each place along an axis; b: (size of the axis,)."""
    behind = op.rank(x) - 1 - _axis(op, x, axis)
    return op.Add(x, op.Unsqueeze(b, list(range(1, 1 + behind))) if behind else b)


def _axis(op: TensorOp, x: Any, axis: int) -> int:
    rank: int = op.rank(x)
    if not -rank <= axis < rank:
        raise InvalidInput(f"axis {axis} of a tensor of shape {op.shape(x)}", code="SX333")
    return axis % rank


# --- parts and reductions ---------------------------------------------------------------------------------------------


@formula("Narrow")
def narrow(op: TensorOp, x: Any, *, axis: int, start: int, length: int) -> Tensor:
    """`length` places along an axis, from `start` on; a negative start counts from the end."""
    end = start + length
    return op.Slice(x, [start], [end if start >= 0 or end < 0 else np.iinfo(np.int64).max], [axis])


@formula("Var")
def var(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, unbiased: bool = True, keepdims: int = 1) -> Tensor:
    """The variance over axes, or over all: the mean of the squares about the mean, with n - 1 for n where it is `unbiased`.

    NaN of no numbers, and of a single one where it is unbiased.
    """
    return _variance(op, x, axes, unbiased, keepdims)


@formula("Std")
def std(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, unbiased: bool = True, keepdims: int = 1) -> Tensor:
    """The square root of `var`."""
    return op.Sqrt(_variance(op, x, axes, unbiased, keepdims))


def _variance(op: TensorOp, x: Any, axes: Sequence[int] | None, unbiased: bool, keepdims: int) -> Tensor:
    named = None if axes is None else list(axes)
    d = op.Sub(x, op.ReduceMean(x, named, keepdims=1))
    squares = op.ReduceSum(op.Mul(d, d), named, keepdims=keepdims)
    n = op.Size(x) if named is None else op.ReduceProd(op.Gather(op.Shape(x), op.constant(named, np.int64)), keepdims=0)
    count = op.cast(n, x)
    return op.Div(squares, op.Relu(op.Sub(count, 1)) if unbiased else count)


# --- windows ----------------------------------------------------------------------------------------------------------


@formula("AdaptiveAvgPool")
def adaptive_avg_pool(op: TensorOp, x: Any, *, output_size: int | Sequence[int]) -> Tensor:
    """The mean of windows that divide each spatial axis of x (N, C, ...) as evenly as can be into `output_size` parts.

    Window i of m along n places goes from floor(i n / m) to ceil((i + 1) n / m).  Raises InvalidInput for sizes that are open,
    unless all parts are 1.
    """
    return _adaptive(op, x, output_size, "Average")


@formula("AdaptiveMaxPool")
def adaptive_max_pool(op: TensorOp, x: Any, *, output_size: int | Sequence[int]) -> Tensor:
    """The greatest of the windows of `adaptive_avg_pool`."""
    return _adaptive(op, x, output_size, "Max")


def _adaptive(op: TensorOp, x: Tensor, output_size: int | Sequence[int], kind: str) -> Tensor:
    """One pooling where the sizes divide; else, axis by axis, each window is reduced by itself."""
    sizes = known_shape(op, x)[2:]
    parts = [output_size] * len(sizes) if isinstance(output_size, int) else list(output_size)
    if len(parts) != len(sizes) or not sizes or any(m < 1 for m in parts):
        raise InvalidInput(f"parts {parts} for the spatial axes of a tensor of shape {op.shape(x)}", code="SX333")
    if all(m == 1 for m in parts):
        return op.call(f"Global{kind}Pool", (x,), {}, 1)[0]
    if not all(isinstance(n, int) and n for n in sizes):
        raise InvalidInput(
            f"windows by parts {parts} need sizes that are known and not 0; there are {sizes}",
            code="SX333",
            hint="fix them: leave only the batch in dynamic_axes",
        )
    if all(n % m == 0 for n, m in zip(sizes, parts, strict=True)):
        window = [n // m for n, m in zip(sizes, parts, strict=True)]
        return op.call(f"{kind}Pool", (x,), {"kernel_shape": window, "strides": window}, 1)[0]
    reduce = {"Average": "ReduceMean", "Max": "ReduceMax"}[kind]
    for axis, (n, m) in enumerate(zip(sizes, parts, strict=True), 2):
        windows = [op.Slice(x, [i * n // m], [-(-(i + 1) * n // m)], [axis]) for i in range(m)]
        x = op.Concat(*(op.call(reduce, (w, [axis]), {"keepdims": 1}, 1)[0] for w in windows), axis=axis)
    return x


# --- pieces of attention ----------------------------------------------------------------------------------------------


@formula("FusedSelfAttention")
def fused_self_attention_query_mul_key_and_value(
    op: TensorOp, x: Any, *, head_size: int, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """alpha Q K' and V of a self-attention, from one projection.

    x: (S, B, heads 3 head_size): for each head its query, key and value side by side.
    Gives (B, heads, S, S) and (B, heads, S, head_size).
    """
    parts = op.Reshape(x, [0, 0, -1, 3 * head_size])
    q, k, v = (op.Slice(parts, [i * head_size], [(i + 1) * head_size], [3]) for i in range(3))
    scores = op.MatMul(op.Transpose(q, perm=[1, 2, 0, 3]), op.Transpose(k, perm=[1, 2, 3, 0]))
    return op.Mul(scores, alpha), op.Transpose(v, perm=[1, 2, 0, 3])


def fused_bias_add_scale_mask_softmax_dropout(
    x: Tensor, bias: Tensor, mask: Tensor, fill: float = -10000.0, scale: float = 1.0, p: float = 0.1
) -> Any:
    """dropout(softmax(scale (x + bias) where the mask holds, else fill)) over the last axis; in inference without dropout.

    bias, mask: broadcast to x; a mask of numbers holds where they are not zero.  p: the share that is dropped.
    """
    if not 0 <= p < 1:
        raise InvalidInput(f"the share that is dropped lies in [0, 1); it is {p}", code="SX333")
    op = recorder
    y = op.Softmax(op.Where(true(op, mask), op.Mul(op.Add(x, bias), scale), fill), axis=-1)
    return random.dropout(y, p)[0] if tape.training and p else y
