"""Products, softmax, conversions, reductions and dropout; functions that take other arguments than their formula.

The public module is `autograd`. A "Source" line names the ONNX operator that defines a function; its newest version
applies.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import random, tape
from .._core.conversions import dtype_of
from .._core.tape import Operator
from .._core.tensor import Tensor
from .._core.tensor import op as recorder
from .elementwise import sum
from .formula import TensorOp, formula, whole
from .shapes import _cat

__all__: list[str] = ["Dropout", "add_all", "cat", "dropout"]


@formula("Matmul")
def matmul(op: TensorOp, a: Any, b: Any) -> Tensor:
    """The matrix product, a b.

    Source: ONNX MatMul, which is NumPy's `matmul`: axes before the last two broadcast, and a vector is a row on the left and a
    column on the right.

    Args:
        a: Tensor of a numeric dtype, shape (..., M, K) or (K,).
        b: Tensor of the dtype of a, shape (..., K, N) or (K,).

    Returns:
        Tensor of shape (..., M, N), without the axis of a vector; of the dtype of a.

    Raises:
        ValueError: The axes before the last two cannot be broadcast.
    """
    return op.MatMul(a, b)


@formula("SoftMax")
def softmax(op: TensorOp, x: Any, *, axis: int = 1) -> Tensor:
    """The softmax over all axes from `axis` to the last: exp(x) / sum exp(x).

    Source: ONNX Softmax-11, which normalizes the rows of `flatten(x, axis)`; Softmax-13 normalizes one axis.

    Args:
        x: Tensor of a float dtype, any shape.
        axis: The first axis to normalize over, in [-rank, rank].

    Returns:
        Tensor of the shape and dtype of x; the values of each row sum to 1.
    """
    return op.Reshape(op.Softmax(op.Flatten(x, axis=axis), axis=-1), op.Shape(x), allowzero=1)


@formula("Gemm")
def gemm(
    op: TensorOp, A: Any, B: Any, C: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Tensor:
    """The general matrix product: alpha A' B' + beta C.

    A' is A, or its transpose if transA is set; B' likewise. Source: ONNX Gemm.

    Args:
        A: Tensor of a numeric dtype, shape (M, K), or (K, M) if transA is set.
        B: Tensor of the dtype of A, shape (K, N), or (N, K) if transB is set.
        C: Tensor of the dtype of A whose shape broadcasts to (M, N); None for no summand.
        alpha: The factor of the product.
        beta: The factor of C.
        transA: Whether A is transposed, 0 or 1.
        transB: Whether B is transposed, 0 or 1.

    Returns:
        Tensor of shape (M, N), of the dtype of A.

    Raises:
        ValueError: The shape of C cannot be broadcast.
    """
    return op.Gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)


@formula("AddBias")
def add_bias(op: TensorOp, x: Any, b: Any, *, axis: int = 0) -> Tensor:
    """Add a vector to each row (axis 0) or to each column (axis 1) of a matrix.

    Source: ONNX Add, with ONNX Unsqueeze for columns.

    Args:
        x: Tensor of a numeric dtype, shape (M, N).
        b: Tensor of the dtype of x, shape (N,) for axis 0, (M,) for axis 1.
        axis: 0 to add b to each row, 1 to add it to each column.

    Returns:
        Tensor of shape (M, N), of the dtype of x.

    Raises:
        InvalidInput: `axis` is not 0 or 1.
        ValueError: The shapes cannot be broadcast.
    """
    if axis not in (0, 1):
        raise InvalidInput(f"axis must be 0 (rows) or 1 (columns), got {axis}", code="SX333")
    return op.Add(x, b if axis == 0 else op.Unsqueeze(b, [1]))


@formula("CosSim")
def cossim(op: TensorOp, a: Any, b: Any) -> Tensor:
    """The cosine similarity of the rows of two matrices.

    Source: sum(a b) / (|a| |b|) over axis 1, with the Euclidean norm; NaN for a row of zeros.

    Args:
        a: Tensor of a float dtype, shape (N, D).
        b: Tensor of the dtype and shape of a.

    Returns:
        Tensor of shape (N,), of the dtype of a.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    dot = op.ReduceSum(op.Mul(a, b), [1], keepdims=0)
    return op.Div(dot, op.Mul(op.ReduceL2(a, [1], keepdims=0), op.ReduceL2(b, [1], keepdims=0)))


# --- other names and arguments ----------------------------------------------------------------------------------------


def add_all(*xs: Tensor) -> Tensor:
    """The sum of tensors, element by element; the same as `sum`.

    Source: ONNX Sum.

    Args:
        *xs: One or more Tensors of one float dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        InvalidInput: An input is not a Tensor, or the inputs are on different devices.
        OperatorError: The dtypes of the inputs differ.
        TypeError: There are no inputs.
        ValueError: The shapes cannot be broadcast.
    """
    return sum(*xs)


def cat(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along an axis.

    Source: ONNX Concat.

    Args:
        xs: One or more Tensors of one dtype, whose shapes differ at `axis` at most.
        axis: The axis, in [-rank, rank).

    Returns:
        Tensor whose size at `axis` is the sum of those of the inputs, of their dtype.

    Raises:
        InvalidInput: An input is not a Tensor, or the inputs are on different devices.
        OperatorError: The dtypes of the inputs differ, the shapes differ at another axis, or `axis` is out of range.
    """
    return _cat(*xs, axis=axis)


# --- conversion, reduction --------------------------------------------------------------------------------------------


@formula("Cast")
def cast(op: TensorOp, x: Any, *, to: Any) -> Tensor:
    """Cast x to another dtype.

    Between float dtypes the gradient is cast back; other casts have no gradient. Source: ONNX Cast.

    Args:
        x: Tensor of any dtype and shape.
        to: A constant of `tensor` such as `tensor.float32`, "int" (int32), "float" (float32), or a NumPy dtype.

    Returns:
        Tensor of the shape of x, of the dtype `to`.

    Raises:
        InvalidInput: `to` is not a dtype, or ONNX does not have it.
    """
    return op.Cast(x, to=dtypes.onnx_code(dtype_of(to)))


@formula("ConstantOfShape")
def constant_of_shape(op: TensorOp, x: Any, *, value: float = 0) -> Tensor:
    """Make a tensor of a shape, filled with a value.

    It has no gradient. Source: ONNX ConstantOfShape.

    Args:
        x: Tensor of shape (rank,) with the sizes, which are cast to int64.
        value: The value of every element.

    Returns:
        Tensor of the shape x: float32 for a float, int64 for an int.
    """
    return op.ConstantOfShape(whole(op, x), value=np.array([value], np.float32 if isinstance(value, float) else np.int64))


@formula("ReduceSum")
def reduce_sum(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
    """The sum over some axes, or over all.

    Source: ONNX ReduceSum.

    Args:
        x: Tensor of a numeric dtype, any shape.
        axes: The axes, in [-rank, rank); None for all.
        keepdims: Whether these axes remain, with size 1: 0 or 1.

    Returns:
        Tensor of the dtype of x.
    """
    return op.ReduceSum(x, None if axes is None else list(axes), keepdims=keepdims)


@formula("ReduceMean")
def reduce_mean(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
    """The mean over some axes, or over all.

    Source: ONNX ReduceMean.

    Args:
        x: Tensor of a numeric dtype, any shape.
        axes: The axes, in [-rank, rank); None for all.
        keepdims: Whether these axes remain, with size 1: 0 or 1.

    Returns:
        Tensor of the dtype of x.
    """
    return op.ReduceMean(x, None if axes is None else list(axes), keepdims=keepdims)


@formula("GlobalAveragePool")
def globalaveragepool(op: TensorOp, x: Any, *, data_format: str = "channels_first") -> Tensor:
    """The mean over the spatial axes.

    Source: ONNX GlobalAveragePool, computed by ONNX ReduceMean.

    Args:
        x: Tensor of a float dtype, shape (N, C, ...), or (N, ..., C) for "channels_last".
        data_format: "channels_first" or "channels_last".

    Returns:
        Tensor of the dtype of x, in which the spatial axes have size 1.

    Raises:
        InvalidInput: `data_format` is another text.
    """
    if data_format not in ("channels_first", "channels_last"):
        raise InvalidInput(f"data_format must be 'channels_first' or 'channels_last', got {data_format!r}", code="SX333")
    rank = op.rank(x)
    return op.ReduceMean(x, list(range(2, rank) if data_format == "channels_first" else range(1, rank - 1)), keepdims=1)


# --- dropout ----------------------------------------------------------------------------------------------------------


class Dropout(Operator):
    """Dropout: in training x mask / (1 - ratio), in inference x.

    Calling the operator on a Tensor returns a tuple with the result, as `dropout` defines it.

    Args:
        seed: Ignored; kept for programs written for SINGA. A seed between 0 and 1 is warned of: it may be meant as the ratio.
        ratio: The probability that an element is dropped, in [0, 1).

    Raises:
        InvalidInput: `ratio` is not in [0, 1).
    """

    def __init__(self, seed: int = 0, ratio: float = 0.5) -> None:
        super().__init__()
        _check_dropout("Dropout", 0, seed, ratio)
        self.ratio = ratio

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Drop elements of a tensor in training mode.

        Args:
            *xs: One Tensor of a float dtype, any shape.

        Returns:
            A tuple with one Tensor of the shape and dtype of the input.
        """
        return (recorder.Identity(xs[0]) if not tape.training else random.dropout(xs[0], self.ratio)[0],)


def dropout(x: Tensor, seed: int = 0, ratio: float = 0.5) -> Tensor:
    """Dropout: in training x mask / (1 - ratio), in inference x.

    Each element of the mask is 0 with probability `ratio`, otherwise 1; it is drawn from the random stream of x's device, which
    `device.SetRandSeed` seeds. The gradient is dy mask / (1 - ratio). Source: ONNX Dropout.

    Args:
        x: Tensor of a float dtype, any shape.
        seed: Ignored; kept for programs written for SINGA, where it is the second argument.
        ratio: The probability that an element is dropped, in [0, 1).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        InvalidInput: `ratio` is not in [0, 1).
    """
    _check_dropout("dropout", 1, seed, ratio)
    return Dropout(0, ratio)(x)[0]


def _check_dropout(name: str, place: int, seed: float, ratio: float) -> None:
    """Warn the caller's caller of a seed that looks like a ratio; raise InvalidInput for a ratio out of range."""
    if isinstance(seed, float) and 0 < seed < 1:
        nth = ("first", "second")[place]
        warnings.warn(f"the {nth} argument of {name} is its seed; write ratio={seed}", UserWarning, stacklevel=3)
    if not 0 <= ratio < 1:
        raise InvalidInput(f"ratio must be in [0, 1), got {ratio}", code="SX333")
