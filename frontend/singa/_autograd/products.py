"""Products of matrices, the addition of a bias, and the cosine similarity; the public module is `autograd`.

A "Source" line names the ONNX operator that defines a function; its newest version applies.
"""

from __future__ import annotations

from typing import Any

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from .formula import TensorOp, formula

__all__: list[str] = []


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
