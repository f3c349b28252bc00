"""Losses, of shape (1,), in ONNX's operators; `autograd` offers them.

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
    """The mean over rows of -sum (t / sum t) log softmax(x).

    x: (N, C) scores.  t: class numbers (N,), or one-hot or soft labels (N, C).
    Raises InvalidInput for labels of another shape, or class numbers outside [0, C).
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
    """The mean of (x - t)^2 over all elements; equal shapes."""
    _same_shape(op, x, t)
    d = op.Sub(x, op.cast(t, x))
    return op.Reshape(op.ReduceMean(op.Mul(d, d), keepdims=0), [1])


@formula("CrossEntropy")
def cross_entropy(op: TensorOp, x: Any, *, t: Any) -> Tensor:
    """-sum t log x over rows; x: (N, C) probabilities, t: labels of the same shape."""
    _same_shape(op, x, t)
    return _mean_over_rows(op, op.Neg(op.Mul(op.cast(t, x), op.Log(x))), x)


@formula("BinaryCrossEntropy")
def binary_cross_entropy(op: TensorOp, x: Any, *, t: Any) -> Tensor:
    """-sum [t log(x + 1e-4) + (1 - t) log(1.0001 - x)] over rows; x: probabilities, t: labels of the same shape."""
    _same_shape(op, x, t)
    t = op.cast(t, x)
    each = op.Add(op.Mul(t, op.Log(op.Add(x, 1e-4))), op.Mul(op.Sub(1, t), op.Log(op.Sub(1.0001, x))))
    return _mean_over_rows(op, op.Neg(each), x)


@formula("RankingLoss")
def ranking_loss(op: TensorOp, pos: Any, neg: Any, *, M: float = 0.2) -> Tensor:
    """The mean of max(0, M - pos + neg)."""
    return op.Reshape(op.ReduceMean(op.Relu(op.Add(op.Sub(neg, pos), M)), keepdims=0), [1])


def _mean_over_rows(op: TensorOp, each: Any, x: Any) -> Tensor:
    rows = op.cast(op.Shape(x, start=0, end=1), x)
    return op.Div(op.Reshape(op.ReduceSum(each, keepdims=0), [1]), rows)


def _matrix(op: TensorOp, x: Any, what: str) -> None:
    if op.rank(x) != 2:
        raise InvalidInput(f"{what} have shape {op.shape(x)}; a row for each sample is needed, (N, C)", code="SX334")


def _same_shape(op: TensorOp, x: Any, t: Any) -> None:
    """Raises InvalidInput where sizes that are known differ."""
    a, b = op.shape(x), op.shape(t)
    if a is not None and b is not None and not trace.alike(a, b):
        raise InvalidInput(f"the outputs have shape {a} and the targets {b}; they must be equal", code="SX334")


def _check_classes(op: TensorOp, x: Any, t: Any) -> None:
    rows, classes = known_shape(op, x)
    count = known_shape(op, t)[0]
    if isinstance(rows, int) and isinstance(count, int) and rows != count:
        raise InvalidInput(f"there are {rows} rows of scores and {count} labels", code="SX334")
    if trace.current() is not None or not isinstance(t, Tensor):
        return
    values = np.asarray(t.device.backend.get(t.data)).reshape(-1)
    if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and (values != np.floor(values)).any()):
        raise InvalidInput(
            f"class numbers are whole numbers, not {dtypes.onnx_name(values.dtype)} like {values[:3].tolist()}", code="SX335"
        )
    if values.size and not (values.min() >= 0 and values.max() < classes):
        what = f"the labels go from {values.min()} to {values.max()}; the scores have {classes} classes"
        raise InvalidInput(what, code="SX335", hint="class numbers begin at 0")
