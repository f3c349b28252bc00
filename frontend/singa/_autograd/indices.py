"""Operators that select and replace elements by their indices; the public module is `autograd`.

A "Source" line names the ONNX operator that defines a function; its newest version applies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from .formula import TensorOp, formula, whole

__all__: list[str] = []


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
