"""Sums and means over axes, and the softmax; the public module is `autograd`.

A "Source" line names the ONNX operator that defines a function; its newest version applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from .formula import TensorOp, formula

__all__: list[str] = []


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
