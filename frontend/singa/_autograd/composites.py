"""Operators that ONNX expresses with several of its own; the public module is `autograd`.

y = autograd.var(x, axes=[1])
y = autograd.adaptive_avg_pool(x, (7, 7))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import node, random, tape
from .._core.tensor import Tensor
from .._core.tensor import op as recorder
from .formula import TensorOp, formula, known_shape, true

__all__: list[str] = ["fused_bias_add_scale_mask_softmax_dropout"]

# --- element by element -----------------------------------------------------------------------------------------------


@formula("Square")
def square(op: TensorOp, x: Any) -> Tensor:
    """The square, x^2.

    Element by element.  Source: ONNX Mul.

    Args:
        x: Tensor of a numeric dtype, any shape.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Mul(x, x)


@formula("Rsqrt")
def rsqrt(op: TensorOp, x: Any) -> Tensor:
    """The reciprocal of the square root, 1 / sqrt(x).

    Element by element.  Source: ONNX Sqrt and Reciprocal.

    Args:
        x: Tensor of a float dtype, any shape.

    Returns:
        Tensor of the shape and dtype of x; NaN below 0.
    """
    return op.Reciprocal(op.Sqrt(x))


@formula("QuickGelu")
def quick_gelu(op: TensorOp, x: Any) -> Tensor:
    """The fast approximation of the Gaussian error linear unit, x sigmoid(1.702 x).

    Element by element.  Source: ONNX Swish (opset 24 or later) with alpha 1.702.

    Args:
        x: Tensor of a float dtype, any shape.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Swish(x, alpha=1.702)


@formula("NotEqual")
def not_equal(op: TensorOp, a: Any, b: Any) -> Tensor:
    """Whether a and b differ; NaN differs from everything.

    Element by element.  It has no gradient.  Source: ONNX Equal and Not.

    Args:
        a: Tensor of any dtype and shape.
        b: Tensor of the dtype of a; the shapes broadcast.

    Returns:
        bool Tensor of the broadcast shape.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Not(op.Equal(a, b))


@formula("SquaredDifference")
def squared_difference(op: TensorOp, a: Any, b: Any) -> Tensor:
    """The squared difference, (a - b)^2.

    Element by element.  Source: ONNX Sub and Mul.

    Args:
        a: Tensor of a numeric dtype, any shape.
        b: Tensor of the dtype of a; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of a.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    d = op.Sub(a, b)
    return op.Mul(d, d)


@formula("FloorMod")
def floor_mod(op: TensorOp, a: Any, b: Any) -> Tensor:
    """The remainder of a / b with the sign of b, as Python's %: -7 by 3 is 2.

    Element by element.  Source: ONNX Mod for integers, which is exact; a - floor(a / b) b for floats, which is 0 if a / b rounds
    to an integer.

    Args:
        a: Tensor of a numeric dtype, any shape.
        b: Tensor of the dtype of a; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of a.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    if not dtypes.is_float(op.dtype(a)):
        return op.Mod(a, b)
    return op.Sub(a, op.Mul(op.Floor(op.Div(a, b)), b))


@formula("BiasAdd")
def bias_add(op: TensorOp, x: Any, b: Any, *, axis: int = 1) -> Tensor:
    """Add a vector to x along an axis.

    Source: ONNX Unsqueeze and Add.

    Args:
        x: Tensor of a numeric dtype, rank at least 1.
        b: Tensor of the dtype of x, shape (n,) for an axis of size n.
        axis: The axis, in [-rank, rank).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        InvalidInput: `axis` is not an axis of x.
        ValueError: The size of b is not that of the axis.
    """
    after = op.rank(x) - 1 - _axis(op, x, axis)
    return op.Add(x, op.Unsqueeze(b, list(range(1, 1 + after))) if after else b)


def _axis(op: TensorOp, x: Any, axis: int) -> int:
    rank: int = op.rank(x)
    if not -rank <= axis < rank:
        raise InvalidInput(f"axis must be in [{-rank}, {rank}), got {axis} for a tensor of shape {op.shape(x)}", code="SX333")
    return axis % rank


# --- parts and reductions ---------------------------------------------------------------------------------------------


@formula("Narrow")
def narrow(op: TensorOp, x: Any, *, axis: int, start: int, length: int) -> Tensor:
    """Select `length` consecutive indices of x along an axis, from `start`.

    Source: ONNX Slice.

    Args:
        x: Tensor of any dtype, rank at least 1.
        axis: The axis, in [-rank, rank).
        start: The first index; a negative one counts from the end.
        length: The number of indices; those beyond the end are left out.

    Returns:
        Tensor of the rank and dtype of x.
    """
    end = start + length
    return op.Slice(x, [start], [end if start >= 0 or end < 0 else np.iinfo(np.int64).max], [axis])


@formula("Var")
def var(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, unbiased: bool = True, keepdims: int = 1) -> Tensor:
    """The variance over some axes, or over all.

    Source: sum (x - mean x)^2 / n, for n elements, or / (n - 1) if it is unbiased.

    Args:
        x: Tensor of a float dtype, any shape.
        axes: The axes, in [-rank, rank); None for all.
        unbiased: Whether to divide by n - 1 (Bessel's correction).
        keepdims: Whether these axes remain, with size 1: 0 or 1.

    Returns:
        Tensor of the dtype of x; NaN for no elements, and for one element if it is unbiased.
    """
    return _variance(op, x, axes, unbiased, keepdims)


@formula("Std")
def std(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, unbiased: bool = True, keepdims: int = 1) -> Tensor:
    """The standard deviation over some axes, or over all: the square root of `var`.

    Source: sqrt(sum (x - mean x)^2 / n), for n elements, or / (n - 1) if it is unbiased.

    Args:
        x: Tensor of a float dtype, any shape.
        axes: The axes, in [-rank, rank); None for all.
        unbiased: Whether to divide by n - 1 (Bessel's correction).
        keepdims: Whether these axes remain, with size 1: 0 or 1.

    Returns:
        Tensor of the dtype of x; NaN for no elements, and for one element if it is unbiased.
    """
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
    """Average pooling over windows that divide each spatial axis as evenly as possible.

    Window i of m along an axis of size n covers the indices from floor(i n / m) to ceil((i + 1) n / m) - 1.  Source: PyTorch's
    adaptive_avg_pool, as ONNX GlobalAveragePool, AveragePool, or Slice, ReduceMean and Concat.

    Args:
        x: Tensor of a float dtype, shape (N, C, ...).
        output_size: The number of windows along each spatial axis, or one number for all; at least 1.

    Returns:
        Tensor of shape (N, C, *output_size), of the dtype of x.

    Raises:
        InvalidInput: `output_size` does not have one positive number for each spatial axis; or a spatial size is unknown or 0,
            unless all of `output_size` are 1.
    """
    return _adaptive(op, x, output_size, "Average")


@formula("AdaptiveMaxPool")
def adaptive_max_pool(op: TensorOp, x: Any, *, output_size: int | Sequence[int]) -> Tensor:
    """Max pooling over windows that divide each spatial axis as evenly as possible.

    The windows are those of `adaptive_avg_pool`.  Source: PyTorch's adaptive_max_pool, as ONNX GlobalMaxPool, MaxPool, or Slice,
    ReduceMax and Concat.

    Args:
        x: Tensor of a float dtype, shape (N, C, ...).
        output_size: The number of windows along each spatial axis, or one number for all; at least 1.

    Returns:
        Tensor of shape (N, C, *output_size), of the dtype of x.

    Raises:
        InvalidInput: `output_size` does not have one positive number for each spatial axis; or a spatial size is unknown or 0,
            unless all of `output_size` are 1.
    """
    return _adaptive(op, x, output_size, "Max")


def _adaptive(op: TensorOp, x: Tensor, output_size: int | Sequence[int], kind: str) -> Tensor:
    """One pooling if the sizes divide; otherwise reduce each window separately, axis by axis."""
    sizes = known_shape(op, x)[2:]
    parts = [output_size] * len(sizes) if isinstance(output_size, int) else list(output_size)
    if len(parts) != len(sizes) or not sizes or any(m < 1 for m in parts):
        what = f"output_size must be one positive number for each spatial axis, got {parts} for a tensor of shape {op.shape(x)}"
        raise InvalidInput(what, code="SX333")
    if all(m == 1 for m in parts):
        return op.call(f"Global{kind}Pool", (x,), {}, 1)[0]
    if not all(isinstance(n, int) and n for n in sizes):
        raise InvalidInput(
            f"the spatial sizes must be known and not 0 for output_size {parts}, got {sizes}",
            code="SX333",
            hint="fix the sizes: list only the batch axis in dynamic_axes",
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
    """The scores alpha Q K' and the values V of a self-attention, from one projection.

    Source: OneFlow's fused_self_attention_query_mul_key_and_value, as ONNX Reshape, Slice, Transpose and MatMul.

    Args:
        x: Tensor of a float dtype, shape (S, B, heads 3 head_size): for each head its query, key and value in this order.
        head_size: The size of a query, a key and a value.
        alpha: The factor of the scores.

    Returns:
        A tuple of two Tensors of the dtype of x: the scores, (B, heads, S, S), and the values, (B, heads, S, head_size).
    """
    parts = op.Reshape(x, [0, 0, -1, 3 * head_size])
    q, k, v = (op.Slice(parts, [i * head_size], [(i + 1) * head_size], [3]) for i in range(3))
    scores = op.MatMul(op.Transpose(q, perm=[1, 2, 0, 3]), op.Transpose(k, perm=[1, 2, 3, 0]))
    return op.Mul(scores, alpha), op.Transpose(v, perm=[1, 2, 0, 3])


def fused_bias_add_scale_mask_softmax_dropout(
    x: Tensor, bias: Tensor, mask: Tensor, fill: float = -10000.0, scale: float = 1.0, p: float = 0.1
) -> Any:
    """Softmax of masked, scaled scores with a bias, then dropout in training.

    Source: dropout(softmax(where(mask, scale (x + bias), fill))) over the last axis, OneFlow's function of this name.

    Args:
        x: Tensor of a float dtype, any shape.
        bias: Tensor of the dtype of x; its shape broadcasts to that of x.
        mask: Tensor of bool, or of numbers, of which those other than 0 count as true; its shape broadcasts to that of x.
        fill: The score where the mask is false.
        scale: The factor of x + bias.
        p: The probability that an element is dropped, in [0, 1).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        InvalidInput: `p` is not in [0, 1), or the inputs are on different devices.
        OperatorError: The dtypes of x and bias differ.
        ValueError: The shapes cannot be broadcast.
    """
    if not 0 <= p < 1:
        raise InvalidInput(f"p must be in [0, 1), got {p}", code="SX333")
    op, start = recorder, node.start_of_call()
    y = op.Softmax(op.Where(true(op, mask), op.Mul(op.Add(x, bias), scale), fill), axis=-1)
    made = random.dropout(y, p)[0] if tape.training and p else y
    node.end_of_call(start, (x, bias, mask), (made,))
    return made
