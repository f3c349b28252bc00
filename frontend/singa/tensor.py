"""Tensors and SINGA's functions on them.

Functions that return a new Tensor compute with ONNX operators and are recorded on the tape if `autograd.training` is set.
Those that update a Tensor raise InvalidInput (SX370) if an operator on the tape produced it, because its gradient would be
wrong; `bernoulli`, `gaussian`, `uniform` and `copy_from_numpy` replace all values, so the Tensor becomes a leaf.

y = tensor.mult(tensor.from_numpy(array), w)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._core import tape
from ._core.conversions import (
    bool_,
    char,
    code_of,
    double,
    dtype_of,
    float16,
    float32,
    int32,
    int64,
    uchar,
)
from ._core.creation import (
    concatenate,
    contiguous,
    copy_data_to_from,
    copy_from_numpy,
    from_dlpack,
    from_numpy,
    from_raw_tensor,
    from_raw_tensors,
    ones,
    ones_like,
    product,
    random,
    repeat,
    reshape,
    sizeof,
    to_host,
    transpose,
    zeros,
    zeros_like,
)
from ._core.tensor import Tensor, as_float, binary, op, to_numpy

__all__ = [
    "PlaceHolder", "Tensor", "abs", "add", "add_column", "add_row", "average", "axpy", "bernoulli", "bool_", "ceil", "char",
    "code_of", "concatenate", "contiguous", "copy_data_to_from", "copy_from_numpy", "div", "double", "dtype_of", "einsum",
    "eltwise_mult", "eq", "exp", "float16", "float32", "from_dlpack", "from_numpy", "from_raw_tensor", "from_raw_tensors",
    "gaussian", "ge", "gt", "int32", "int64",
    "le", "log", "lt", "mult", "ones", "ones_like", "pow", "product", "random", "repeat", "reshape", "sigmoid", "sign", "sizeof",
    "softmax", "sqrt", "square", "sub", "sum", "sum_columns", "sum_rows", "tanh", "tensordot", "to_host", "to_numpy", "transpose",
    "uchar", "uniform", "zeros", "zeros_like",
]  # fmt: skip

PlaceHolder = Tensor


def _unary(op_type: str, summary: str, dtype: str = "a float dtype") -> Callable[[Tensor], Tensor]:
    """The function that calls an ONNX operator of one input, with its docstring."""

    def function(t: Tensor) -> Tensor:
        result: Tensor = op.call(op_type, (t,), {}, 1)[0]
        return result

    function.__name__ = function.__qualname__ = op_type.lower()
    function.__doc__ = (
        f"{summary}\n\nElement by element.  Source: ONNX {op_type}.\n\nArgs:\n    t: Tensor of {dtype}, any shape.\n\n"
        "Returns:\n    Tensor of the shape and dtype of t.\n"
    )
    return function


abs = _unary("Abs", "The absolute value of t.", "a numeric dtype")
exp = _unary("Exp", "The exponential function, e to the power of t.")
ceil = _unary("Ceil", "The smallest integer not below t.")
log = _unary("Log", "The natural logarithm of t; NaN below 0.")
sigmoid = _unary("Sigmoid", "The logistic function, 1 / (1 + exp(-t)).")
sign = _unary("Sign", "The sign of t: -1, 0 or 1.", "a numeric dtype")
sqrt = _unary("Sqrt", "The square root of t; NaN below 0.")
tanh = _unary("Tanh", "The hyperbolic tangent of t.")


def square(t: Tensor) -> Tensor:
    """The square of t.

    Element by element.  Source: ONNX Mul.

    Args:
        t: Tensor of a numeric dtype, any shape.

    Returns:
        Tensor of the shape and dtype of t.
    """
    return op.Mul(t, t)


def _into(value: Tensor, out: Tensor | None) -> Tensor:
    """The value, written into `out` if there is one."""
    if out is None:
        return value
    return out._with(value)


def sum(t: Tensor, axis: int | None = None, out: Tensor | None = None) -> Tensor:
    """The sum along an axis, or of all elements.

    Source: ONNX ReduceSum without the reduced axes.

    Args:
        t: Tensor of a numeric dtype, any shape.
        axis: The axis, in [-rank, rank); None for all.
        out: The Tensor to write the result into; None for a new one.

    Returns:
        Tensor of the dtype of t; of shape (1,) if `axis` is None.

    Raises:
        OperatorError: `axis` is out of range.
        ValueError: The shape of `out` does not fit.
        InvalidInput: An operator on the tape produced `out` (SX370).
    """
    total = op.ReduceSum(t, None if axis is None else [axis], keepdims=0)
    return _into(op.Reshape(total, [1]) if axis is None else total, out)


def pow(t: Tensor, x: Any, out: Tensor | None = None) -> Tensor:
    """The power, t to the power of x.

    Element by element.  Source: ONNX Pow.

    Args:
        t: Tensor of a numeric dtype, any shape.
        x: A number, or a Tensor of a numeric dtype; the shapes broadcast.
        out: The Tensor to write the result into; None for a new one.

    Returns:
        Tensor of the broadcast shape, of the dtype of t; or `out`.

    Raises:
        ValueError: The shapes cannot be broadcast.
        InvalidInput: An operator on the tape produced `out` (SX370).
    """
    return _into(op.Pow(t, x), out)


def average(t: Tensor, axis: int | None = None) -> Any:
    """The mean along an axis, or of all elements.

    Source: ONNX ReduceMean without the reduced axis.

    Args:
        t: Tensor of a numeric dtype, any shape.
        axis: The axis, in [-rank, rank); None for all.

    Returns:
        Tensor of the dtype of t; a Python float if `axis` is None, which is not recorded on the tape.

    Raises:
        OperatorError: `axis` is out of range.
    """
    if axis is None:
        return float(to_numpy(t).mean())
    return op.ReduceMean(t, [axis], keepdims=0)


def softmax(t: Tensor, out: Tensor | None = None) -> Tensor:
    """The softmax along the last axis: exp(t) / sum exp(t).

    Source: ONNX Softmax with axis -1.

    Args:
        t: Tensor of a float dtype, rank at least 1.
        out: The Tensor to write the result into; None for a new one.

    Returns:
        Tensor of the shape and dtype of t; or `out`.

    Raises:
        ValueError: The shape of `out` does not fit.
        InvalidInput: An operator on the tape produced `out` (SX370).
    """
    return _into(op.Softmax(t, axis=-1), out)


def lt(t: Tensor, x: Any) -> Any:
    """Compare element by element whether t < x.

    It has no gradient.  Source: ONNX Less.

    Args:
        t: Tensor of a numeric dtype, any shape.
        x: A number, an array, or a Tensor; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of t: 1 if the comparison holds, otherwise 0.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return t < x


def le(t: Tensor, x: Any) -> Any:
    """Compare element by element whether t <= x.

    It has no gradient.  Source: ONNX LessOrEqual.

    Args:
        t: Tensor of a numeric dtype, any shape.
        x: A number, an array, or a Tensor; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of t: 1 if the comparison holds, otherwise 0.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return t <= x


def gt(t: Tensor, x: Any) -> Any:
    """Compare element by element whether t > x.

    It has no gradient.  Source: ONNX Greater.

    Args:
        t: Tensor of a numeric dtype, any shape.
        x: A number, an array, or a Tensor; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of t: 1 if the comparison holds, otherwise 0.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return t > x


def ge(t: Tensor, x: Any) -> Any:
    """Compare element by element whether t >= x.

    It has no gradient.  Source: ONNX GreaterOrEqual.

    Args:
        t: Tensor of a numeric dtype, any shape.
        x: A number, an array, or a Tensor; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of t: 1 if the comparison holds, otherwise 0.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return t >= x


def eq(t: Tensor, x: Any) -> Any:
    """Compare element by element whether t == x.

    It has no gradient.  Source: ONNX Equal.

    Args:
        t: Tensor of a numeric dtype, any shape.
        x: A number, an array, or a Tensor; the shapes broadcast; None is never equal.

    Returns:
        Tensor of the broadcast shape, of the dtype of t: 1 if the comparison holds, otherwise 0.  False if x is None.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return t == x


def add(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    """The sum, lhs + rhs.

    Element by element; dtypes are promoted, an int32 tensor with a Python float to float32.  Source: ONNX Add.

    Args:
        lhs: A Tensor, an array or a number.
        rhs: A Tensor, an array or a number; the shapes broadcast.
        ret: The Tensor to write the result into; None for a new one.

    Returns:
        Tensor of the broadcast shape; or `ret`.

    Raises:
        ValueError: The shapes cannot be broadcast, or do not fit that of `ret`.
        InvalidInput: An operator on the tape produced `ret` (SX370), or the inputs are on different devices (SX344).
    """
    return _into(binary("Add", lhs, rhs), ret)


def sub(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    """The difference, lhs - rhs.

    Element by element; dtypes are promoted, an int32 tensor with a Python float to float32.  Source: ONNX Sub.

    Args:
        lhs: A Tensor, an array or a number.
        rhs: A Tensor, an array or a number; the shapes broadcast.
        ret: The Tensor to write the result into; None for a new one.

    Returns:
        Tensor of the broadcast shape; or `ret`.

    Raises:
        ValueError: The shapes cannot be broadcast, or do not fit that of `ret`.
        InvalidInput: An operator on the tape produced `ret` (SX370), or the inputs are on different devices (SX344).
    """
    return _into(binary("Sub", lhs, rhs), ret)


def eltwise_mult(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    """The product of elements, lhs rhs.

    Element by element; dtypes are promoted, an int32 tensor with a Python float to float32.  Source: ONNX Mul.

    Args:
        lhs: A Tensor, an array or a number.
        rhs: A Tensor, an array or a number; the shapes broadcast.
        ret: The Tensor to write the result into; None for a new one.

    Returns:
        Tensor of the broadcast shape; or `ret`.

    Raises:
        ValueError: The shapes cannot be broadcast, or do not fit that of `ret`.
        InvalidInput: An operator on the tape produced `ret` (SX370), or the inputs are on different devices (SX344).
    """
    return _into(binary("Mul", lhs, rhs), ret)


def div(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    """The quotient, lhs / rhs.

    Element by element; integers are cast to float32.  Source: ONNX Div.

    Args:
        lhs: A Tensor, an array or a number.
        rhs: A Tensor, an array or a number; the shapes broadcast.
        ret: The Tensor to write the result into; None for a new one.

    Returns:
        Tensor of the broadcast shape; or `ret`.

    Raises:
        ValueError: The shapes cannot be broadcast, or do not fit that of `ret`.
        InvalidInput: An operator on the tape produced `ret` (SX370), or the inputs are on different devices (SX344).
    """
    return _into(binary("Div", as_float(lhs), as_float(rhs)), ret)


def mult(A: Tensor, B: Tensor, C: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """The matrix product, alpha A B; with C, C = alpha A B + beta C.

    Source: ONNX MatMul, which is NumPy's `matmul`.

    Args:
        A: Tensor of a numeric dtype, shape (..., M, K) or (K,).
        B: Tensor of the dtype of A, shape (..., K, N) or (K,).
        C: The Tensor to write the result into, shape (..., M, N); None for a new one.
        alpha: The factor of the product.
        beta: The factor of C.

    Returns:
        Tensor of shape (..., M, N), of the dtype of A; or C.

    Raises:
        OperatorError: The shapes of A and B do not fit, or the dtypes differ.
        InvalidInput: An operator on the tape produced C (SX370), or the inputs are on different devices (SX344).
    """
    product_ = op.MatMul(A, B)
    if alpha != 1.0:
        product_ = op.Mul(product_, alpha)
    if C is None:
        return product_
    return C._with(op.Add(product_, op.Mul(C, beta)) if beta else product_)


def einsum(ops: str, *args: Tensor) -> Tensor:
    """The Einstein sum of tensors.

    Source: ONNX Einsum, which is NumPy's `einsum`.

    Args:
        ops: The equation, such as "ij,jk->ik".
        *args: The operands: Tensors of one numeric dtype.

    Returns:
        Tensor of the shape that the equation defines, of the dtype of the operands.

    Raises:
        OperatorError: The dtypes of the operands differ.
        ValueError: The equation is invalid or does not fit the shapes.
    """
    return op.Einsum(*args, equation=ops)


def tensordot(A: Tensor, B: Tensor, axes: Any = 2) -> Tensor:
    """The sum of products over axes of two tensors.

    Source: NumPy's `tensordot`, as ONNX Einsum.

    Args:
        A: Tensor of a numeric dtype, any shape.
        B: Tensor of the dtype of A, any shape; both have at most 26 axes together.
        axes: The number of last axes of A and first axes of B to sum over, or a pair: the axes of A and those of B, each a
            sequence or one int.

    Returns:
        Tensor with the other axes of A, then those of B; of the dtype of A.

    Raises:
        OperatorError: The dtypes differ.
        ValueError: The axes of A and of B differ in number or in size.
    """
    a, b = (
        (list(range(A.ndim() - axes, A.ndim())), list(range(axes)))
        if isinstance(axes, int)
        else ([v] if isinstance(v, int) else list(v) for v in axes)
    )
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    first = [next(letters) for _ in range(A.ndim())]
    second = [next(letters) for _ in range(B.ndim())]
    for i, j in zip(a, b, strict=True):
        second[j] = first[i]
    summed = {first[i] for i in a}
    kept = [c for c in (*first, *second) if c not in summed]
    return einsum(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", A, B)


def axpy(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    """Add a multiple of x to y in place: y += alpha x.

    Args:
        alpha: The factor.
        x: Tensor of the dtype of y; its shape broadcasts to that of y.
        y: The Tensor to change.

    Returns:
        y.

    Raises:
        OperatorError: The dtypes differ.
        ValueError: The shapes cannot be broadcast.
        InvalidInput: An operator on the tape produced y (SX370).
    """
    with tape.no_tape():
        value = op.Add(y, op.Mul(x, alpha))
    return y._with(value)


def bernoulli(p: float, t: Tensor) -> Tensor:
    """Fill a tensor in place with ones, with probability p, and zeros.

    Args:
        p: The probability of a one, in [0, 1].
        t: The Tensor to fill, from the random stream of its device.

    Returns:
        t.
    """
    return t.bernoulli(p)


def gaussian(mean: float, std: float, t: Tensor) -> Tensor:
    """Fill a tensor in place with normally distributed random numbers.

    Args:
        mean: The mean of the distribution.
        std: The standard deviation of the distribution.
        t: The Tensor to fill, from the random stream of its device.

    Returns:
        t.
    """
    return t.gaussian(mean, std)


def uniform(low: float, high: float, t: Tensor) -> Tensor:
    """Fill a tensor in place with uniformly distributed random numbers in [low, high).

    Args:
        low: The lower bound.
        high: The upper bound.
        t: The Tensor to fill, from the random stream of its device.

    Returns:
        t.
    """
    return t.uniform(low, high)


def add_column(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """Add a vector to each column of a matrix in place: M = alpha v + beta M.

    Args:
        alpha: The factor of v.
        v: Tensor of the dtype of M, with one element for each row of M.
        beta: The factor of M.
        M: The Tensor to change, a matrix.

    Returns:
        M.

    Raises:
        OperatorError: The dtypes differ.
        ValueError: The shapes cannot be broadcast.
        InvalidInput: An operator on the tape produced M (SX370).
    """
    return M._with(op.Add(op.Mul(op.Unsqueeze(v, [1]), alpha), op.Mul(M, beta)))


def add_row(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """Add a vector to each row of a matrix in place: M = alpha v + beta M.

    Args:
        alpha: The factor of v.
        v: Tensor of the dtype of M, with one element for each column of M.
        beta: The factor of M.
        M: The Tensor to change, a matrix.

    Returns:
        M.

    Raises:
        OperatorError: The dtypes differ.
        ValueError: The shapes cannot be broadcast.
        InvalidInput: An operator on the tape produced M (SX370).
    """
    return M._with(op.Add(op.Mul(v, alpha), op.Mul(M, beta)))


def sum_columns(M: Tensor) -> Tensor:
    """The sum of the columns of a matrix: one element for each row.

    Source: ONNX ReduceSum over axis 1.

    Args:
        M: Tensor of a numeric dtype, shape (M, N).

    Returns:
        Tensor of shape (M,), of the dtype of the matrix.

    Raises:
        OperatorError: The rank is below 2.
    """
    return op.ReduceSum(M, [1], keepdims=0)


def sum_rows(M: Tensor) -> Tensor:
    """The sum of the rows of a matrix: one element for each column.

    Source: ONNX ReduceSum over axis 0.

    Args:
        M: Tensor of a numeric dtype, shape (M, N).

    Returns:
        Tensor of shape (N,), of the dtype of the matrix.

    Raises:
        OperatorError: The rank is 0.
    """
    return op.ReduceSum(M, [0], keepdims=0)
