"""Operators of SINGA's API that are one ONNX operator or nearly so; the public module is `autograd`.

A "Source" line names the ONNX operator that defines a function; its newest version applies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import random, tape
from .._core.tape import Operator
from .._core.tensor import Tensor, dtype_of
from .._core.tensor import op as recorder
from .formula import TensorOp, formula, known_shape, true, whole

__all__: list[str] = ["Dropout", "add_all", "cat", "dropout"]

# --- one operator without attributes ----------------------------------------------------------------------------------

_FLOAT = "Tensor of a float dtype, any shape"
_NUMBER = "Tensor of a numeric dtype, any shape"
_ANY = "Tensor of any dtype and shape"
_NO_GRADIENT = "  It has no gradient."

# class: (function, ONNX operator, what the function computes, its input)
_UNARY = {
    "ReLU": ("relu", "Relu", "The rectified linear unit, max(0, x).", _NUMBER),
    "Sigmoid": ("sigmoid", "Sigmoid", "The logistic function, 1 / (1 + exp(-x)).", _FLOAT),
    "Tanh": ("tanh", "Tanh", "The hyperbolic tangent of x.", _FLOAT),
    "Sin": ("sin", "Sin", "The sine of x, which is in radians.", _FLOAT),
    "Sinh": ("sinh", "Sinh", "The hyperbolic sine of x.", _FLOAT),
    "Cos": ("cos", "Cos", "The cosine of x, which is in radians.", _FLOAT),
    "Cosh": ("cosh", "Cosh", "The hyperbolic cosine of x.", _FLOAT),
    "Tan": ("tan", "Tan", "The tangent of x, which is in radians.", _FLOAT),
    "Asin": ("asin", "Asin", "The inverse sine of x, in radians; NaN outside [-1, 1].", _FLOAT),
    "Asinh": ("asinh", "Asinh", "The inverse hyperbolic sine of x.", _FLOAT),
    "Acos": ("acos", "Acos", "The inverse cosine of x, in radians; NaN outside [-1, 1].", _FLOAT),
    "Acosh": ("acosh", "Acosh", "The inverse hyperbolic cosine of x; NaN below 1.", _FLOAT),
    "Atan": ("atan", "Atan", "The inverse tangent of x, in radians.", _FLOAT),
    "Atanh": ("atanh", "Atanh", "The inverse hyperbolic tangent of x; NaN outside [-1, 1].", _FLOAT),
    "Abs": ("abs", "Abs", "The absolute value of x.", _NUMBER),
    "Exp": ("exp", "Exp", "The exponential function, e to the power of x.", _FLOAT),
    "Log": ("log", "Log", "The natural logarithm of x; NaN below 0.", _FLOAT),
    "Sqrt": ("sqrt", "Sqrt", "The square root of x; NaN below 0.", _FLOAT),
    "Sign": ("sign", "Sign", "The sign of x: -1, 0 or 1." + _NO_GRADIENT, _NUMBER),
    "Ceil": ("ceil", "Ceil", "The smallest integer not below x." + _NO_GRADIENT, _FLOAT),
    "Floor": ("floor", "Floor", "The largest integer not above x." + _NO_GRADIENT, _FLOAT),
    "Reciprocal": ("reciprocal", "Reciprocal", "The reciprocal, 1 / x.", _FLOAT),
    "Negative": ("negative", "Neg", "The negative, -x.", _NUMBER),
    "Erf": ("erf", "Erf", "The error function of x.", _FLOAT),
    "SoftPlus": ("softplus", "Softplus", "The softplus function, log(1 + exp(x)).", _FLOAT),
    "SoftSign": ("softsign", "Softsign", "The softsign function, x / (1 + |x|).", _FLOAT),
    "Identity": ("identity", "Identity", "The input itself, x.", _ANY),
    "Rounde": ("rounde", "Round", "The integer nearest to x, halves to the even one." + _NO_GRADIENT, _FLOAT),
}
_BINARY = {
    "Add": ("add", "Add", "The sum, a + b.", _NUMBER),
    "Sub": ("sub", "Sub", "The difference, a - b.", _NUMBER),
    "Mul": ("mul", "Mul", "The product, a b.", _NUMBER),
    "Div": ("div", "Div", "The quotient, a / b; integers are truncated toward zero.", _NUMBER),
    "Pow": ("pow", "Pow", "The power, a to the power of b.", _NUMBER),
}
_COMPARISON = {
    "Less": ("less", "Less", "Whether a < b." + _NO_GRADIENT, _NUMBER),
    "Greater": ("greater", "Greater", "Whether a > b." + _NO_GRADIENT, _NUMBER),
    "Equal": ("equal", "Equal", "Whether a = b." + _NO_GRADIENT, _ANY),
}
_LOGICAL = {
    "And": ("_and", "And", "Whether a and b hold." + _NO_GRADIENT, _ANY),
    "Or": ("_or", "Or", "Whether a or b or both hold." + _NO_GRADIENT, _ANY),
    "Xor": ("_xor", "Xor", "Whether exactly one of a and b holds." + _NO_GRADIENT, _ANY),
}


def _declare_plain() -> None:
    """Declare the operators of the tables."""
    for name, (function, onnx, what, x) in _UNARY.items():
        _plain(name, function, onnx, what, {"x": f"{x}."}, "Tensor of the shape and dtype of x", _unary(onnx))
    for name, (function, onnx, what, x) in _BINARY.items():
        second = "a numeric dtype" if onnx == "Pow" else "the dtype of a"
        inputs = {"a": f"{x}.", "b": f"Tensor of {second}; the shapes broadcast."}
        _plain(name, function, onnx, what, inputs, "Tensor of the broadcast shape, of the dtype of a", _binary(onnx))
    for name, (function, onnx, what, x) in _COMPARISON.items():
        inputs = {"a": f"{x}.", "b": "Tensor of the dtype of a; the shapes broadcast."}
        _plain(name, function, onnx, what, inputs, "bool Tensor of the broadcast shape", _binary(onnx))
    for name, (function, onnx, what, _) in _LOGICAL.items():
        inputs = {
            "a": "Tensor of bool, or of numbers, of which those other than 0 count as true; any shape.",
            "b": "Tensor as a; the shapes broadcast.",
        }
        _plain(name, function, onnx, what, inputs, "bool Tensor of the broadcast shape", _logical(onnx))


def _unary(onnx: str) -> Callable[..., Tensor]:
    def body(op: TensorOp, x: Any) -> Tensor:
        return op.call(onnx, (x,), {}, 1)[0]

    return body


def _binary(onnx: str) -> Callable[..., Tensor]:
    def body(op: TensorOp, a: Any, b: Any) -> Tensor:
        return op.call(onnx, (a, b), {}, 1)[0]

    return body


def _logical(onnx: str) -> Callable[..., Tensor]:
    def body(op: TensorOp, a: Any, b: Any) -> Tensor:
        return op.call(onnx, (true(op, a), true(op, b)), {}, 1)[0]

    return body


def _plain(
    name: str, function: str, onnx: str, what: str, inputs: dict[str, str], output: str, body: Callable[..., Tensor]
) -> None:
    summary, _, rest = what.partition("  ")
    args = "".join(f"    {n}: {text}\n" for n, text in inputs.items())
    raises = "Raises:\n    ValueError: The shapes cannot be broadcast.\n" if "b" in inputs else ""
    body.__name__ = function
    body.__doc__ = (
        f"{summary}\n\nElement by element.{'  ' * bool(rest)}{rest}  Source: ONNX {onnx}.\n\n"
        f"Args:\n{args}\nReturns:\n    {output}.\n\n{raises}"
    )
    globals()[function] = formula(name)(body)


_declare_plain()


@formula("Not")
def _not(op: TensorOp, x: Any) -> Tensor:
    """Compute the logical negation of x.

    Element by element. It has no gradient. Source: ONNX Not.

    Args:
        x: Tensor of bool, or of numbers, of which those other than 0 count as true; any shape.

    Returns:
        bool Tensor of the shape of x.
    """
    return op.Not(true(op, x))


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


@formula("NonZero")
def nonzero(op: TensorOp, x: Any) -> Tensor:
    """The indices of the elements that are not zero.

    It has no gradient. Source: ONNX NonZero.

    Args:
        x: Tensor of any dtype and shape.

    Returns:
        int64 Tensor of shape (rank of x, number of those elements), in row-major order.
    """
    return op.NonZero(x)


@formula("Shape")
def shape(op: TensorOp, x: Any) -> Tensor:
    """The shape of x, as a Tensor.

    It has no gradient. Source: ONNX Shape.

    Args:
        x: Tensor of any dtype and shape.

    Returns:
        int64 Tensor of shape (rank of x,).
    """
    return op.Shape(x)


@formula("Round")
def round(op: TensorOp, x: Any) -> Tensor:
    """Round x to the nearest integer, halves away from zero.

    Element by element. It has no gradient.  `rounde` rounds halves to the even integer. Source: sign(x) floor(|x| + 0.5).

    Args:
        x: Tensor of a float dtype, any shape.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Mul(op.Sign(x), op.Floor(op.Add(op.Abs(x), 0.5)))


# --- activations ------------------------------------------------------------------------------------------------------


@formula("Elu")
def elu(op: TensorOp, x: Any, *, alpha: float = 1.0) -> Tensor:
    """The exponential linear unit: x if x > 0, otherwise alpha (exp(x) - 1).

    Element by element. Source: ONNX Elu.

    Args:
        x: Tensor of a float dtype, any shape.
        alpha: The factor of the negative part.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Elu(x, alpha=alpha)


@formula("SeLU")
def selu(op: TensorOp, x: Any, *, alpha: float = 1.67326, gamma: float = 1.0507) -> Tensor:
    """The scaled exponential linear unit: gamma x if x > 0, otherwise gamma alpha (exp(x) - 1).

    Element by element. Source: ONNX Selu.

    Args:
        x: Tensor of a float dtype, any shape.
        alpha: The factor of the negative part.
        gamma: The factor of the result.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Selu(x, alpha=alpha, gamma=gamma)


@formula("LeakyRelu")
def leakyrelu(op: TensorOp, x: Any, *, a: float = 0.01) -> Tensor:
    """The leaky rectified linear unit: x if x >= 0, otherwise a x.

    Element by element. Source: ONNX LeakyRelu.

    Args:
        x: Tensor of a float dtype, any shape.
        a: The slope of the negative part, ONNX's alpha.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.LeakyRelu(x, alpha=a)


@formula("HardSigmoid")
def hardsigmoid(op: TensorOp, x: Any, *, alpha: float = 0.2, gamma: float = 0.5) -> Tensor:
    """The hard sigmoid: max(0, min(1, alpha x + gamma)).

    Element by element. Source: ONNX HardSigmoid.

    Args:
        x: Tensor of a float dtype, any shape.
        alpha: The slope.
        gamma: The value at 0, ONNX's beta.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.HardSigmoid(x, alpha=alpha, beta=gamma)


@formula("PRelu")
def prelu(op: TensorOp, x: Any, slope: Any) -> Tensor:
    """The parametric rectified linear unit: x if x >= 0, otherwise slope x.

    Element by element. Source: ONNX PRelu.

    Args:
        x: Tensor of a float dtype, any shape.
        slope: Tensor of the dtype of x; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of x.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    wide, narrow = op.shape(x), op.shape(slope)
    if wide is not None and narrow is not None and not _broadcasts_to(narrow, wide):  # ONNX broadcasts the slope only
        x = op.Expand(x, op.Shape(slope))
    return op.PRelu(x, slope)


def _broadcasts_to(shape: Sequence[Any], wide: Sequence[Any]) -> bool:
    pairs = zip(reversed(shape), reversed(wide), strict=False)
    return len(shape) <= len(wide) and all(a in (1, b) for a, b in pairs)


@formula("Clip")
def clip(op: TensorOp, x: Any, *, min: float | None = None, max: float | None = None) -> Tensor:
    """Limit x to [min, max].

    Element by element. Source: ONNX Clip.

    Args:
        x: Tensor of a numeric dtype, any shape.
        min: The lower bound; None for no bound.
        max: The upper bound; None for no bound.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Clip(x, min, max)


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


# --- several tensors --------------------------------------------------------------------------------------------------


@formula("Sum")
def sum(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The sum of tensors, element by element.

    Source: ONNX Sum.

    Args:
        *l: One or more Tensors of one float dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Sum(*l)


@formula("Mean")
def mean(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The mean of tensors, element by element.

    Source: ONNX Mean.

    Args:
        *l: One or more Tensors of one float dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Mean(*l)


@formula("Max")
def max(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The maximum of tensors, element by element.

    Inputs that are equal share the gradient. Source: ONNX Max.

    Args:
        *l: One or more Tensors of one numeric dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Max(*l)


@formula("Min")
def min(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The minimum of tensors, element by element.

    Inputs that are equal share the gradient. Source: ONNX Min.

    Args:
        *l: One or more Tensors of one numeric dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Min(*l)


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


# --- shapes -----------------------------------------------------------------------------------------------------------


@formula("Reshape")
def reshape(op: TensorOp, x: Any, *, shape: Sequence[int]) -> Tensor:
    """Reshape x.

    Source: ONNX Reshape.

    Args:
        x: Tensor of any dtype and shape.
        shape: The new sizes, or an int64 Tensor of them.  0 keeps the size of x at that axis; one -1 is inferred.

    Returns:
        Tensor of the new shape, of the dtype of x.
    """
    return op.Reshape(x, shape if op.is_value(shape) else list(shape))


@formula("Flatten")
def flatten(op: TensorOp, x: Any, *, axis: int = 1, end_axis: int | None = None) -> Tensor:
    """Flatten x to a matrix, or merge several axes into one.

    Without `end_axis` the axes before `axis` become the rows and the others the columns. With it, the axes from `axis` to
    `end_axis` become one axis and the others remain. Source: ONNX Flatten, or ONNX Reshape with `end_axis`.

    Args:
        x: Tensor of any dtype and shape.
        axis: The first axis of the columns, in [-rank, rank]; with `end_axis` the first axis to merge, in [-rank, rank).
        end_axis: The last axis to merge, in [-rank, rank); None for a matrix.

    Returns:
        Tensor of rank 2, or with `end_axis` of rank - (end_axis - axis); of the dtype of x.

    Raises:
        InvalidInput: `axis` or `end_axis` is not an axis of x, or `end_axis` precedes `axis`.
    """
    if end_axis is None:
        return op.Flatten(x, axis=axis)
    rank = op.rank(x)
    first, last = (a + rank if a < 0 else a for a in (axis, end_axis))
    if not rank and axis in (0, -1) and end_axis in (0, -1):
        return op.Reshape(x, [1])
    if not 0 <= first <= last < rank:
        what = f"axis and end_axis must be axes of x in ascending order, got {axis} and {end_axis} for shape {op.shape(x)}"
        raise InvalidInput(what, code="SX333")
    sizes = known_shape(op, x)
    if 0 not in sizes and all(isinstance(n, int) for n in sizes[last + 1 :]):
        return op.Reshape(x, [*[0] * first, -1, *sizes[last + 1 :]])
    whole = op.ReduceProd(op.Shape(x, start=first, end=last + 1), [0], keepdims=1)
    parts = [op.Shape(x, start=0, end=first), whole, op.Shape(x, start=last + 1)]
    return op.Reshape(x, op.Concat(*parts, axis=0), allowzero=1)


@formula("Transpose")
def transpose(op: TensorOp, x: Any, *, shape: Sequence[int] | None = None) -> Tensor:
    """Permute the axes of x.

    Source: ONNX Transpose.

    Args:
        x: Tensor of any dtype and shape.
        shape: The axes of x in the order of the result, ONNX's perm; None to reverse them.

    Returns:
        Tensor of the dtype of x; its axis i is axis shape[i] of x.
    """
    return op.Transpose(x, perm=None if shape is None else list(shape))


@formula("Squeeze")
def squeeze(op: TensorOp, x: Any, *, axis: Any = ()) -> Tensor:
    """Remove axes of size 1.

    Source: ONNX Squeeze.

    Args:
        x: Tensor of any dtype and shape.
        axis: The axis to remove, or a sequence of axes; an empty sequence to remove every axis of size 1.

    Returns:
        Tensor without these axes, of the dtype of x.
    """
    axes = [axis] if isinstance(axis, int) else list(axis)
    return op.Squeeze(x, axes or None)


@formula("Unsqueeze")
def unsqueeze(op: TensorOp, x: Any, *, axis: Any) -> Tensor:
    """Insert axes of size 1.

    Source: ONNX Unsqueeze.

    Args:
        x: Tensor of any dtype and shape.
        axis: The position of the new axis in the result, or a sequence of positions.

    Returns:
        Tensor with these axes, of the dtype of x.
    """
    return op.Unsqueeze(x, [axis] if isinstance(axis, int) else list(axis))


@formula("Concat")
def _cat(op: TensorOp, *xs: Any, axis: int = 0) -> Tensor:
    """Concatenate tensors along an axis.

    Source: ONNX Concat.

    Args:
        *xs: One or more Tensors of one dtype, whose shapes differ at `axis` at most.
        axis: The axis, in [-rank, rank).

    Returns:
        Tensor whose size at `axis` is the sum of those of the inputs, of their dtype.
    """
    return op.Concat(*xs, axis=axis)


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


@formula("Split")
def split(
    op: TensorOp, x: Any, *, axis: int, parts: Sequence[int] | None = None, num_output: int | None = None
) -> tuple[Tensor, ...]:
    """Split x into parts along an axis.

    Source: ONNX Split.

    Args:
        x: Tensor of any dtype and shape.
        axis: The axis, in [-rank, rank).
        parts: The size of each part at `axis`; their sum is the size of x. None to split by `num_output`.
        num_output: The number of parts of equal size, of which the last may be smaller; used if `parts` is None.

    Returns:
        A tuple of Tensors of the dtype of x; the Tensor itself if there is one part.

    Raises:
        InvalidInput: Neither `parts` nor `num_output` is set, or `parts` is empty.
    """
    count = len(parts) if parts is not None else num_output
    if not count:
        what = f"parts or num_output must be at least one part, got parts={parts} and num_output={num_output}"
        raise InvalidInput(what, code="SX333")
    made = op.call(
        "Split",
        [x, None if parts is None else list(parts)],
        {"axis": axis, "num_outputs": None if parts is not None else count},
        count,
    )
    return tuple(made)


@formula("Slice")
def slice(
    op: TensorOp,
    x: Any,
    *,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """Slice x from `starts` to `ends` along some axes.

    Source: ONNX Slice.

    Args:
        x: Tensor of any dtype and shape.
        starts: The first index at each of the axes; a negative one counts from the end.
        ends: The index after the last one at each of the axes; clamped to the size.
        axes: The axes; None for the first `len(starts)`.
        steps: The step at each of the axes, negative to go backward; None for 1.

    Returns:
        Tensor of the rank and dtype of x.
    """
    return op.Slice(x, list(starts), list(ends), None if axes is None else list(axes), None if steps is None else list(steps))


@formula("Tile")
def tile(op: TensorOp, x: Any, *, repeats: Any) -> Tensor:
    """Repeat x along its axes.

    Source: ONNX Tile, after ONNX Unsqueeze if there are more numbers than axes.

    Args:
        x: Tensor of any dtype and shape.
        repeats: The number of repetitions at each axis, or an int for the last axis. Fewer numbers than axes apply to the last
            axes; more add axes before the first.

    Returns:
        Tensor of the dtype of x; each size is multiplied by its number of repetitions.
    """
    times = [repeats] if isinstance(repeats, int) else list(repeats)
    rank = op.rank(x)
    if len(times) > rank:
        x = op.Unsqueeze(x, list(range(len(times) - rank)))
    return op.Tile(x, [1] * (rank - len(times)) + times)


@formula("Expand")
def expand(op: TensorOp, x: Any, *, shape: Sequence[int]) -> Tensor:
    """Broadcast x with a shape.

    Source: ONNX Expand.

    Args:
        x: Tensor of any dtype and shape.
        shape: Sizes, or an int64 Tensor of them; a size of 1 keeps that of x.

    Returns:
        Tensor of the broadcast shape, of the dtype of x.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Expand(x, shape if op.is_value(shape) else list(shape))


@formula("Pad")
def pad(op: TensorOp, x: Any, *, mode: str = "constant", pads: Sequence[int], constant: float = 0.0) -> Tensor:
    """Pad x before and after each axis.

    Source: ONNX Pad.

    Args:
        x: Tensor of any dtype and shape.
        mode: "constant" (the default), "reflect", "edge" or "wrap".
        pads: The number of values to add: first before each axis, then after each axis; a negative number removes values.
        constant: The value to add in the mode "constant".

    Returns:
        Tensor of the rank and dtype of x.
    """
    return op.Pad(x, list(pads), constant if mode == "constant" else None, mode=mode)


@formula("UpSample")
def upsample(op: TensorOp, x: Any, *, mode: str, scales: Sequence[float]) -> Tensor:
    """Resize x by a factor for each axis.

    Source: ONNX Upsample-10, as ONNX Resize with asymmetric coordinates; "nearest" rounds down.

    Args:
        x: Tensor of a numeric dtype, any shape.
        mode: "nearest", "linear" or "cubic".
        scales: The factor for each axis.

    Returns:
        Tensor of the dtype of x; each size is floor(size * scale).
    """
    factors = op.constant([float(s) for s in scales], np.float32)
    return op.Resize(x, None, factors, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@formula("DepthToSpace")
def depth_to_space(op: TensorOp, x: Any, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move blocks of channels to the spatial axes.

    Source: ONNX DepthToSpace.

    Args:
        x: Tensor of any dtype, shape (N, C, H, W); C is a multiple of blocksize^2.
        blocksize: The number of rows and of columns of a block.
        mode: "DCR" (channels are (row, column, depth)) or "CRD" (channels are (depth, row, column)).

    Returns:
        Tensor of shape (N, C / blocksize^2, H blocksize, W blocksize), of the dtype of x.
    """
    return op.DepthToSpace(x, blocksize=blocksize, mode=mode)


@formula("SpaceToDepth")
def space_to_depth(op: TensorOp, x: Any, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move spatial blocks to the channels: the inverse of `depth_to_space` in the same mode.

    Source: ONNX SpaceToDepth for "DCR"; ONNX Reshape and Transpose for "CRD".

    Args:
        x: Tensor of any dtype, shape (N, C, H, W); H and W are multiples of blocksize.
        blocksize: The number of rows and of columns of a block.
        mode: "DCR" (channels are (row, column, depth)) or "CRD" (channels are (depth, row, column)).

    Returns:
        Tensor of shape (N, C blocksize^2, H / blocksize, W / blocksize), of the dtype of x.
    """
    if mode == "DCR":
        return op.SpaceToDepth(x, blocksize=blocksize)
    n, c, h, w = (op.Shape(x, start=i, end=i + 1) for i in range(4))
    b = [blocksize]
    parts = op.Reshape(x, op.Concat(n, c, op.Div(h, blocksize), b, op.Div(w, blocksize), b, axis=0), allowzero=1)
    moved = op.Transpose(parts, perm=[0, 1, 3, 5, 2, 4])
    return op.Reshape(
        moved, op.Concat(n, op.Mul(c, blocksize**2), op.Div(h, blocksize), op.Div(w, blocksize), axis=0), allowzero=1
    )


# --- indices -----------------------------------------------------------------------------------------------------------


@formula("Gather")
def gather(op: TensorOp, x: Any, *, axis: int, indices: Any) -> Tensor:
    """Gather the slices of x at some indices along an axis.

    Source: ONNX Gather. No gradient flows to `indices`.

    Args:
        x: Tensor of any dtype, rank at least 1.
        axis: The axis, in [-rank, rank).
        indices: A sequence of integers, or a Tensor of any shape, whose values are cast to int64; a negative index counts from
            the end.

    Returns:
        Tensor of the dtype of x; the axes of `indices` replace `axis`.

    Raises:
        OperatorError: An index is not in [-n, n) for an axis of size n.
    """
    return op.Gather(x, whole(op, indices), axis=axis)


@formula("ScatterElements")
def scatter_elements(op: TensorOp, x: Any, indices: Any, updates: Any, *, axis: int = 0) -> Tensor:
    """Replace some elements of x along an axis.

    Source: ONNX ScatterElements. No gradient flows to `indices`.

    Args:
        x: Tensor of any dtype, rank at least 1.
        indices: Tensor of the shape of `updates`, whose values are cast to int64: the position of each update along `axis`.
        updates: Tensor of the dtype and rank of x.
        axis: The axis, in [-rank, rank).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        OperatorError: An index is not in [-n, n) for an axis of size n.
    """
    return op.ScatterElements(x, whole(op, indices), updates, axis=axis)


@formula("Where", "x", "y", "condition")
def where(op: TensorOp, x: Any, y: Any, *, condition: Any) -> Tensor:
    """Select x where a condition holds, otherwise y.

    Element by element. Source: ONNX Where. No gradient flows to `condition`.

    Args:
        x: Tensor of any dtype and shape.
        y: Tensor of the dtype of x; the three shapes broadcast.
        condition: Tensor or array of bool, or of numbers, of which those other than 0 count as true.

    Returns:
        Tensor of the broadcast shape, of the dtype of x.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    condition = condition if op.is_value(condition) else op.constant(condition)
    return op.Where(true(op, condition), x, y)


@formula("OneHot", "axis", "indices", "depth", "values")
def onehot(op: TensorOp, indices: Any, *, axis: int, depth: Any, values: Any = (0.0, 1.0)) -> Tensor:
    """Encode indices as one-hot: values[1] at each index along a new axis, values[0] elsewhere.

    Source: ONNX OneHot. No gradient flows to `indices`.

    Args:
        axis: The position of the new axis in the result; -1 for the last.
        indices: Tensor of any shape, whose values are cast to int64; a negative index counts from `depth`, and one out of range
            has values[0] everywhere.
        depth: The size of the new axis: an integer, or an array of one.
        values: The values (off, on): a pair of numbers, used as float32, or a Tensor of shape (2,).

    Returns:
        Tensor of the shape of `indices` with the new axis, of the dtype of `values`.
    """
    values = values if op.is_value(values) else op.constant(values, np.float32)
    if np.size(depth) != 1:
        raise InvalidInput(f"depth must be one integer, got {depth!r}", code="SX333")
    return op.OneHot(whole(op, indices), op.constant(int(np.reshape(depth, ())), np.int64), values, axis=axis)


@formula("Embedding")
def embedding(op: TensorOp, x: Any, w: Any) -> Tensor:
    """Look up the rows of w at the indices x.

    Source: ONNX Gather along axis 0. No gradient flows to x.

    Args:
        x: Tensor of indices of any shape, whose values are cast to int64; a negative index counts from the end.
        w: Tensor of any dtype, shape (N, D), one row for each index.

    Returns:
        Tensor of the shape of x with the axis D appended, of the dtype of w.

    Raises:
        OperatorError: An index is not in [-N, N).
    """
    return op.Gather(w, whole(op, x), axis=0)


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
