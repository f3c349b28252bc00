"""Losses of shape (1,), as formulas in ONNX operators; the public module is `autograd`.

loss = autograd.softmax_cross_entropy(scores, t=labels)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import trace
from .._core.tensor import Tensor
from .formula import TensorOp, formula, known_shape, whole

__all__: list[str] = []


@formula("SoftMaxCrossEntropy")
def softmax_cross_entropy(op: TensorOp, x: Any, *, t: Any) -> Tensor:
    """The softmax cross-entropy: the mean over rows of -sum (t / sum t) log softmax(x).

    Source: ONNX SoftmaxCrossEntropyLoss for class numbers, the formula for labels.  The gradient of x is
    (softmax(x) - t / sum t) / N.

    Args:
        x: Tensor of scores of a float dtype, shape (N, C).
        t: Tensor of class numbers, shape (N,) or (N, 1), integers of any numeric dtype in [0, C); or of one-hot or soft labels,
            shape (N, C).

    Returns:
        Tensor of shape (1,), of the dtype of x.

    Raises:
        InvalidInput: x is not a matrix (SX334), the shape of t does not fit (SX334), or a class number is not an integer in
            [0, C) (SX335).
    """
    _matrix(op, x, "the scores")
    if op.rank(t) == 1 or (op.rank(t) == 2 and known_shape(op, t)[1] == 1 != known_shape(op, x)[1]):
        _check_classes(op, x, t)
        ids = op.Reshape(whole(op, t), [-1])
        return op.Reshape(op.SoftmaxCrossEntropyLoss(x, ids), [1])
    _same_shape(op, x, t)
    t = op.cast(t, x)
    share = op.Div(t, op.ReduceSum(t, [1], keepdims=1))
    return _mean_over_rows(op, op.Neg(op.Mul(share, op.LogSoftmax(x, axis=1))), x)


@formula("MeanSquareError")
def mse_loss(op: TensorOp, x: Any, *, t: Any) -> Tensor:
    """The mean squared error: the mean of (x - t)^2 over all elements.

    Source: ONNX Sub, Mul and ReduceMean.

    Args:
        x: Tensor of a float dtype, any shape.
        t: Tensor of the shape of x, which is cast to the dtype of x.

    Returns:
        Tensor of shape (1,), of the dtype of x.

    Raises:
        InvalidInput: The shapes of x and t differ (SX334).
    """
    _same_shape(op, x, t)
    d = op.Sub(x, op.cast(t, x))
    return op.Reshape(op.ReduceMean(op.Mul(d, d), keepdims=0), [1])


@formula("CrossEntropy")
def cross_entropy(op: TensorOp, x: Any, *, t: Any) -> Tensor:
    """The cross-entropy of probabilities: the mean over rows of -sum t log x.

    Source: ONNX Log, Mul and ReduceSum.

    Args:
        x: Tensor of probabilities of a float dtype, shape (N, ...).
        t: Tensor of labels of the shape of x, which is cast to the dtype of x.

    Returns:
        Tensor of shape (1,), of the dtype of x.

    Raises:
        InvalidInput: The shapes of x and t differ (SX334).
    """
    _same_shape(op, x, t)
    return _mean_over_rows(op, op.Neg(op.Mul(op.cast(t, x), op.Log(x))), x)


@formula("BinaryCrossEntropy")
def binary_cross_entropy(op: TensorOp, x: Any, *, t: Any) -> Tensor:
    """The binary cross-entropy: the mean over rows of -sum [t log(x + 1e-4) + (1 - t) log(1.0001 - x)].

    Source: the formula of SINGA, in ONNX Log, Mul and ReduceSum; 1e-4 keeps the logarithms finite.

    Args:
        x: Tensor of probabilities of a float dtype, shape (N, ...).
        t: Tensor of labels of the shape of x, which is cast to the dtype of x.

    Returns:
        Tensor of shape (1,), of the dtype of x.

    Raises:
        InvalidInput: The shapes of x and t differ (SX334).
    """
    _same_shape(op, x, t)
    t = op.cast(t, x)
    each = op.Add(op.Mul(t, op.Log(op.Add(x, 1e-4))), op.Mul(op.Sub(1, t), op.Log(op.Sub(1.0001, x))))
    return _mean_over_rows(op, op.Neg(each), x)


@formula("RankingLoss")
def ranking_loss(op: TensorOp, pos: Any, neg: Any, *, M: float = 0.2) -> Tensor:
    """The ranking loss: the mean of max(0, M - pos + neg) over all elements.

    Source: ONNX Sub, Add, Relu and ReduceMean.

    Args:
        pos: Tensor of scores of a float dtype, any shape.
        neg: Tensor of scores of the dtype and shape of pos.
        M: The margin by which pos shall exceed neg.

    Returns:
        Tensor of shape (1,), of the dtype of pos.

    Raises:
        InvalidInput: The shapes differ (SX334).
    """
    if op.shape(pos) != op.shape(neg):
        raise InvalidInput(f"pos and neg must have one shape, got {op.shape(pos)} and {op.shape(neg)}", code="SX334")
    return op.Reshape(op.ReduceMean(op.Relu(op.Add(op.Sub(neg, pos), M)), keepdims=0), [1])


def _mean_over_rows(op: TensorOp, each: Any, x: Any) -> Tensor:
    rows = op.cast(op.Shape(x, start=0, end=1), x)
    return op.Div(op.Reshape(op.ReduceSum(each, keepdims=0), [1]), rows)


def _matrix(op: TensorOp, x: Any, what: str) -> None:
    if op.rank(x) != 2:
        raise InvalidInput(f"{what} must have shape (N, C), got shape {op.shape(x)}", code="SX334")


def _same_shape(op: TensorOp, x: Any, t: Any) -> None:
    """Raise InvalidInput if known sizes differ."""
    a, b = op.shape(x), op.shape(t)
    if a is not None and b is not None and not trace.alike(a, b):
        raise InvalidInput(f"x and t must have equal shapes, got {a} and {b}", code="SX334")


def _check_classes(op: TensorOp, x: Any, t: Any) -> None:
    rows, classes = known_shape(op, x)
    count = known_shape(op, t)[0]
    if isinstance(rows, int) and isinstance(count, int) and rows != count:
        raise InvalidInput(f"t must have one label for each row of x, got {count} labels for {rows} rows", code="SX334")
    if trace.current() is not None or not isinstance(t, Tensor):
        return
    values = np.asarray(t.device.backend.get(t.data)).reshape(-1)
    if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and (values != np.floor(values)).any()):
        what = f"class numbers must be integers, got {dtypes.onnx_name(values.dtype)} values such as {values[:3].tolist()}"
        raise InvalidInput(what, code="SX335")
    if values.size and not (values.min() >= 0 and values.max() < classes):
        what = f"class numbers must be in [0, {classes}), got {values.min()} to {values.max()}"
        raise InvalidInput(what, code="SX335", hint="class numbers start at 0")
