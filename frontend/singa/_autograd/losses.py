"""Losses of shape (1,), as formulas in ONNX operators; the public module is `autograd`.

loss = autograd.softmax_cross_entropy(scores, t=labels)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.devices.checks import Checks, collected
from singa_backend.errors import InvalidInput

from .._core import trace
from .._core.tensor import Tensor
from .formula import TensorOp, formula, known_shape, whole
from .loss_names import IGNORED

__all__: list[str] = []


@formula("SoftMaxCrossEntropy")
def softmax_cross_entropy(
    op: TensorOp, x: Any, *, t: Any, weight: Any = None, ignore_index: int | None = None, label_smoothing: float = 0.0,
    axis: int | None = None,
) -> Tensor:  # fmt: skip
    """The softmax cross-entropy: the mean over rows of -sum (t / sum t) log softmax(x).

    Source: ONNX SoftmaxCrossEntropyLoss for class numbers, the formula for labels.  The gradient of x is
    (softmax(x) - t / sum t) / N.  With further axes, each position of x is a row. The options mean what those of PyTorch's
    cross_entropy mean: the mean over class numbers is divided by the sum of their weights, that over labels by their number.

    Args:
        x: Tensor of scores of a float dtype, shape (N, C, d1, ...), or (N, d1, ..., C) with `axis=-1`.
        t: Tensor of class numbers, shape (N, d1, ...), or (N, 1) for x of rank 2, integers of any numeric dtype in [0, C); or of
            one-hot or soft labels, of the shape of x.
        weight: The weight of each class, a Tensor or sequence of shape (C,); None for equal weights.
        ignore_index: A class number that marks positions without a loss, which may be outside [0, C); None if there are none.
            If all positions are without one, the loss is NaN, and its gradient 0.
        label_smoothing: The share of the labels, in [0, 1], that is distributed equally over all classes.
        axis: The axis of the classes, 1 or -1; None for the one that the shape of class numbers leaves, and for 1 with labels of
            the shape of x.  Scores of tokens, (N, T, C), have their classes along the last axis.

    Returns:
        Tensor of shape (1,), of the dtype of x.

    Raises:
        InvalidInput: x has a rank below 2, the shape of t or of weight does not fit, both axes fit and `axis` is None, or
            ignore_index is passed with labels (SX334); or a class number is not an integer in [0, C) (SX335).
        ValueError: label_smoothing is not in [0, 1], or axis is not one of these.
    """
    x, t = _classes_second(op, x, t, axis)
    return _mean_over_labels(op, x, t, weight, ignore_index, label_smoothing)


@formula("NextTokenCrossEntropy")
def next_token_cross_entropy(
    op: TensorOp, x: Any, *, t: Any, weight: Any = None, ignore_index: int = IGNORED, label_smoothing: float = 0.0
) -> Tensor:
    """The softmax cross-entropy of a language model: the scores at a token are those of the next one.

    The mean is over the tokens 1, ..., T - 1 of all sequences that are not ignored, as for the labels of a causal model of
    transformers.

    Args:
        x: Tensor of scores of a float dtype, shape (N, T, C).
        t: Tensor of the tokens themselves, which are not shifted, shape (N, T), integers of any numeric dtype in [0, C).
        weight: As for `softmax_cross_entropy`.
        ignore_index: The number that marks tokens without a loss, such as padding and prompts.
        label_smoothing: As for `softmax_cross_entropy`.

    Returns:
        Tensor of shape (1,), of the dtype of x.

    Raises:
        InvalidInput: x does not have rank 3, or the shape of t or of weight does not fit (SX334); or a token is not an integer
            in [0, C) (SX335).
        ValueError: label_smoothing is not in [0, 1].
    """
    if op.rank(x) != 3 or op.rank(t) != 2:
        what = f"the scores must have shape (N, T, C) and the tokens (N, T), got {op.shape(x)} and {op.shape(t)}"
        raise InvalidInput(what, code="SX334")
    ids = t if op.dtype(t).kind == "f" else op.Cast(t, to=dtypes.onnx_code(np.int64))  # a float is checked to be an integer
    first, rest = op.Slice(ids, [0], [1], [1]), op.Slice(ids, [1], [np.iinfo(np.int64).max], [1])
    x, ids = _classes_second(op, x, op.Concat(rest, op.full_like(first, ignore_index), axis=1), -1)
    return _mean_over_labels(op, x, ids, weight, ignore_index, label_smoothing)


def _classes_second(op: TensorOp, x: Any, t: Any, axis: int | None) -> tuple[Any, Any]:
    """Scores and targets with the classes along axis 1: positions of scores whose classes are along the last axis become rows."""
    rank = op.rank(x)
    if axis not in (None, 1, -1, rank - 1):
        raise ValueError(f"axis must be 1 or -1, got {axis!r}")
    if rank < 3 or axis == 1:
        return x, t
    sizes, labels = known_shape(op, x), known_shape(op, t)
    if axis is None:
        axes = class_axes(sizes, labels)
        if len(axes) == 2:
            what = f"the classes of scores {sizes} with class numbers {labels} may be along axis 1 or the last axis"
            hint = "pass axis=1, or axis=-1 for scores of tokens, (N, T, C); sonnx train has --class-axis"
            raise InvalidInput(what, code="SX334", hint=hint)
        if axes != [-1]:
            return x, t
    if not trace.alike(sizes if len(labels) == rank else sizes[:-1], labels):
        what = f"t must have a class number for each position of x, shape {sizes[:-1]}, or the shape of x, {sizes}, got {labels}"
        raise InvalidInput(what, code="SX334")
    rows = op.Reshape(x, op.Concat(op.constant([-1], np.int64), op.Shape(x, start=-1), axis=0))
    return rows, op.Reshape(t, [-1] if len(labels) < rank else op.Shape(rows))


def class_axes(scores: Sequence[Any], labels: Sequence[Any]) -> list[int]:
    """The axes, of 1 and -1, that the classes may have in scores with class numbers of these shapes.

    Sizes that are not known fit every size, but of two axes the one whose size is known is that of the classes.
    """
    if len(scores) < 3:
        return [1]
    fits = [a for a in (1, -1) if trace.alike((*scores[:a], *scores[a:][1:]), labels)]
    known = [a for a in fits if isinstance(scores[a], int)]
    return known if len(known) == 1 else fits


def _mean_over_labels(op: TensorOp, x: Any, t: Any, weight: Any, ignore_index: int | None, label_smoothing: float) -> Tensor:
    """The loss of scores whose classes are along axis 1."""
    if op.rank(x) < 2:
        raise InvalidInput(f"the scores must have shape (N, C, ...), got shape {op.shape(x)}", code="SX334")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing!r}")
    w = None if weight is None else _class_weights(op, x, weight)
    if _are_classes(op, x, t):
        return _of_numbers(op, x, t, ignore_index, lambda ids, ignore: _of_classes(op, x, ids, w, ignore, label_smoothing))
    _refuse_ignored(op, t, ignore_index)
    _same_shape(op, x, t)
    t = op.cast(t, x)
    share = op.Div(t, op.ReduceSum(t, [1], keepdims=1))
    if label_smoothing:
        classes = op.cast(op.Shape(x, start=1, end=2), x)
        share = op.Add(op.Mul(share, 1.0 - label_smoothing), op.Div(op.full_like(share, label_smoothing), classes))
    each = op.Mul(share, op.LogSoftmax(x, axis=1))
    each = op.Neg(each if w is None else op.Mul(each, _along_classes(op, w, x)))
    if op.rank(x) == 2:
        return _mean_over_rows(op, each, x)
    return op.Reshape(op.ReduceMean(op.ReduceSum(each, [1], keepdims=0), keepdims=0), [1])


def _refuse_ignored(op: TensorOp, t: Any, ignore_index: int | None) -> None:
    """Raise InvalidInput for an ignored class number with labels that are not class numbers."""
    if ignore_index is not None:
        what = f"ignore_index must be used with class numbers, got labels of shape {op.shape(t)}"
        raise InvalidInput(what, code="SX334", hint="pass class numbers, or leave such rows out")


def _are_classes(op: TensorOp, x: Any, t: Any) -> bool:
    """Whether targets are class numbers: a column (N, 1) too, unless there is one class."""
    column = op.rank(t) == op.rank(x) == 2 and known_shape(op, t)[1] == 1 != known_shape(op, x)[1]
    return column or op.rank(t) == op.rank(x) - 1


def _of_numbers(op: TensorOp, x: Any, t: Any, ignore_index: int | None, compute: Callable[[Any, dict[str, Any]], Any]) -> Tensor:
    """The loss for class numbers, after they were checked."""
    checked = _check_classes(op, x, t, ignore_index)
    ids = whole(op, t)
    ids = op.Reshape(ids, [-1]) if op.rank(x) == 2 else ids
    with collected(checked):  # the operator's own checks of the class numbers are not read
        return op.Reshape(compute(ids, {} if ignore_index is None else {"ignore_index": int(ignore_index)}), [1])


def _of_classes(op: TensorOp, x: Any, ids: Any, w: Any, ignore: dict[str, Any], smoothing: float) -> Any:
    """The loss of scores for class numbers, without axes."""
    ignore_index = ignore.get("ignore_index")
    if not smoothing:
        return op.SoftmaxCrossEntropyLoss(x, ids, w, **ignore)
    log = op.LogSoftmax(x, axis=1)
    exact = op.NegativeLogLikelihoodLoss(log, ids, w, **ignore)
    each = op.Neg(op.ReduceMean(log if w is None else op.Mul(log, _along_classes(op, w, x)), [1], keepdims=0))
    counts = op.full_like(each, 1)
    ignored = None if ignore_index is None else op.Equal(ids, ignore_index)
    if w is not None:
        counts = op.Gather(w, ids if ignored is None else op.Where(ignored, 0, ids))
    if ignored is not None:
        each, counts = op.Where(ignored, 0, each), op.Where(ignored, 0, counts)
    smooth = op.Div(op.ReduceSum(each, keepdims=0), op.ReduceSum(counts, keepdims=0))
    return op.Add(op.Mul(exact, 1.0 - smoothing), op.Mul(smooth, smoothing))


def _class_weights(op: TensorOp, x: Any, weight: Any) -> Any:
    """The weights in the dtype of x."""
    w = op.cast(weight if op.is_value(weight) else op.constant(np.asarray(weight, np.float64)), x)
    shape, classes = known_shape(op, w), known_shape(op, x)[1]
    if len(shape) != 1 or not trace.alike(shape, (classes,)):
        raise InvalidInput(f"weight must have one number for each class, shape ({classes},), got {shape}", code="SX334")
    return w


def _along_classes(op: TensorOp, w: Any, x: Any) -> Any:
    """The weights in a shape that broadcasts along axis 1 of x."""
    return op.Reshape(w, [-1] + [1] * (op.rank(x) - 2))


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
def cross_entropy(op: TensorOp, x: Any, *, t: Any, ignore_index: int | None = None, axis: int | None = None) -> Tensor:
    """The cross-entropy of probabilities: the mean over rows of -sum t log x.

    Source: ONNX Max, Log, Mul and ReduceSum, for class numbers NegativeLogLikelihoodLoss.  A probability below the smallest
    normal number of its dtype (1.2e-38) counts as it.

    Args:
        x: Tensor of probabilities of a float dtype, shape (N, ...).
        t: Tensor of labels of the shape of x, which is cast to the dtype of x; or of class numbers, as for
            `softmax_cross_entropy`, of which the mean is over all.
        ignore_index: A class number that marks positions without a loss; None if there are none.
        axis: The axis of the classes, as for `softmax_cross_entropy`.

    Returns:
        Tensor of shape (1,), of the dtype of x.

    Raises:
        InvalidInput: The shapes of x and t differ, or both axes fit class numbers and `axis` is None (SX334); or a class number
            is not an integer in [0, C) (SX335).
        ValueError: axis is not 1 or -1.
    """
    if _are_classes(op, x, t):
        x, t = _classes_second(op, x, t, axis)
        return _of_numbers(op, x, t, ignore_index, lambda ids, ignore: op.NegativeLogLikelihoodLoss(_log(op, x), ids, **ignore))
    _refuse_ignored(op, t, ignore_index)
    _same_shape(op, x, t)
    return _mean_over_rows(op, op.Neg(op.Mul(op.cast(t, x), _log(op, x))), x)


@formula("BinaryCrossEntropy")
def binary_cross_entropy(op: TensorOp, x: Any, *, t: Any) -> Tensor:
    """The binary cross-entropy: the mean over rows of -sum [t log x + (1 - t) log(1 - x)].

    Source: ONNX Max, Log, Mul and ReduceSum.  A probability below the smallest normal number of its dtype (1.2e-38) counts
    as it, which keeps the logarithms finite.  (SINGA adds 1e-4 to both: the gradient of a wrong prediction then vanishes.)

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
    each = op.Add(op.Mul(t, _log(op, x)), op.Mul(op.Sub(1, t), _log(op, op.Sub(1, x))))
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
    _same_shape(op, pos, neg, "pos and neg")
    return op.Reshape(op.ReduceMean(op.Relu(op.Add(op.Sub(neg, pos), M)), keepdims=0), [1])


def _log(op: TensorOp, p: Any) -> Any:
    """The logarithm of probabilities, finite at 0."""
    least = dtypes.float_info(op.dtype(p)).smallest_normal  # its reciprocal, a slope, is finite
    return op.Log(op.Max(p, float(least)))


def _mean_over_rows(op: TensorOp, each: Any, x: Any) -> Tensor:
    rows = op.cast(op.Shape(x, start=0, end=1), x)
    return op.Div(op.Reshape(op.ReduceSum(each, keepdims=0), [1]), rows)


def _same_shape(op: TensorOp, x: Any, t: Any, names: str = "x and t") -> None:
    """Raise InvalidInput if known sizes differ."""
    a, b = op.shape(x), op.shape(t)
    if a is not None and b is not None and not trace.alike(a, b):
        raise InvalidInput(f"{names} must have equal shapes, got {a} and {b}", code="SX334")


def _check_classes(op: TensorOp, x: Any, t: Any, ignore_index: int | None) -> Checks | None:
    """Raise InvalidInput if t does not have class numbers for x; in a recorded step, only the shape is checked.

    Returns the place of a device's further checks of the same values, which need not be read; None if each is read at once.
    """
    rows, classes, *places = known_shape(op, x)
    shape = known_shape(op, t)
    if not trace.alike((rows, *places), (shape[0], *shape[1:]) if places else shape[:1]):
        what = f"t must have one label for each row of x, shape {(rows, *places)}, got {shape}"
        hint = "the classes are along axis 1, or along the last axis of scores of tokens, (N, T, C)" if places else ""
        raise InvalidInput(what, code="SX334", hint=hint)
    if trace.current() is not None or not isinstance(t, Tensor):
        return None
    values = np.asarray(t.device.backend.get(t.data)).reshape(-1)
    if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and (values != np.floor(values)).any()):
        what = f"class numbers must be integers, got {dtypes.onnx_name(values.dtype)} values such as {values[:3].tolist()}"
        raise InvalidInput(what, code="SX335")
    values = values if ignore_index is None else values[values != ignore_index]
    if values.size and not (values.min() >= 0 and values.max() < classes):
        what = f"class numbers must be in [0, {classes}), got {values.min()} to {values.max()}"
        raise InvalidInput(what, code="SX335", hint="class numbers start at 0; ignore_index may mark positions without one")
    return t.device.backend.checks()
