"""Linear models of ai.onnx.ml, and the score transforms that all its classifiers and regressors share."""

from __future__ import annotations

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints, operator
from ._api import Array

ML = "ai.onnx.ml"
Floats = tuple[float, ...]
Strings = tuple[str, ...]
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def transform(xp: Xp, z: Array, name: str) -> Array:
    """Apply a post_transform to `z` [N, E]."""
    if name == "NONE":
        return z
    if name == "LOGISTIC":
        e = xp.exp(-xp.abs(z))  # does not overflow
        return xp.where(z < 0, e, 1) / (1 + e)
    if name == "PROBIT":
        return _probit(xp, z)
    if name not in TRANSFORMS:
        raise OperatorError(f"post_transform must be one of {', '.join(TRANSFORMS)}, got {name!r}", code="SX404")
    if z.size == 0:
        return z
    top = z.max(axis=1, keepdims=True)
    e = xp.exp(z - top)
    if name == "SOFTMAX_ZERO":  # scores of 0 stay 0
        e = xp.where(xp.abs(z) > 1e-7, e, z * xp.exp(-top))
    total = e.sum(axis=1, keepdims=True)
    return xp.where(total == 0, np.float32(0.5).astype(z.dtype), e / total)


def transform_in_parts(op: Op, z: V, name: str) -> V:
    """`transform` in ONNX operators."""
    if name == "NONE":
        return z
    if name == "LOGISTIC":
        return op.Sigmoid(z)
    if name == "PROBIT":
        x = op.Sub(op.Mul(z, 2), 1)
        log = op.Log(op.Mul(op.Sub(1, x), op.Add(1, x)))
        v = op.Add(op.Div(log, 2), 2 / (np.pi * 0.147))
        return op.Mul(op.Sign(x), op.Sqrt(op.Mul(op.Sub(op.Sqrt(op.Sub(op.Mul(v, v), op.Div(log, 0.147))), v), 2)))
    if name == "SOFTMAX":
        return op.Softmax(z, axis=1)
    top = op.ReduceMax(z, [1], keepdims=1)
    e = op.Where(op.Greater(op.Abs(z), 1e-7), op.Exp(op.Sub(z, top)), op.Mul(z, op.Exp(op.Neg(top))))
    total = op.ReduceSum(e, [1], keepdims=1)
    return op.Where(op.Equal(total, 0), 0.5, op.Div(e, total))


def _probit(xp: Xp, p: Array) -> Array:
    """Compute the inverse normal distribution function by Winitzki's approximation of the inverse erf with a = 0.147.

    ONNX does not specify a formula; its reference and onnxruntime use this one, which is accurate to three digits.
    """
    x = 2 * p - 1
    log = xp.log((1 - x) * (1 + x))
    v = 2 / (np.pi * 0.147) + log / 2
    return xp.sign(x) * xp.sqrt(2 * (xp.sqrt(v * v - log / 0.147) - v))


def matrix(xp: Xp, x: Array) -> Array:
    """Convert `x`, [N, F] or [F] as one row, to the float type to compute in."""
    if x.ndim not in (1, 2):
        raise OperatorError(f"x must have shape [N, F] or [F], got {x.shape}", code="SX404")
    x = x.reshape(1, -1) if x.ndim == 1 else x
    return x if x.dtype.kind == "f" else x.astype(np.float64)


def matrix_in_parts(op: Op, x: V) -> V:
    """`matrix` in ONNX operators."""
    x = op.Unsqueeze(x, [0]) if op.rank(x) == 1 else x
    return x if op.dtype(x).kind == "f" else op.Cast(x, to=11)


def class_labels(ints: Ints | None, strings: Strings | None) -> np.ndarray | None:
    """Return the labels of a classifier as an array; None if it does not have any."""
    if ints and strings:
        raise OperatorError("class labels must be either integers or strings, got both", code="SX404")
    if strings:
        return np.array(strings, object)
    return np.array(ints, np.int64) if ints else None


def _scores(xp: Xp, x: Array, coefficients: Floats, intercepts: Floats | None, count: int) -> Array:
    x = matrix(xp, x)
    if len(coefficients) != count * x.shape[1]:
        raise OperatorError(
            f"coefficients must have {count} rows of {x.shape[1]} features, got {len(coefficients)} values", code="SX404"
        )
    if intercepts and len(intercepts) != count:
        raise OperatorError(f"intercepts must have {count} values, one for each score, got {len(intercepts)}", code="SX404")
    limits.admit((x.shape[0], count), x.dtype)
    z = xp.matmul(x, xp.asarray(np.array(coefficients, x.dtype).reshape(count, -1)).T)
    return z + xp.asarray(np.array(intercepts, x.dtype)) if intercepts else z


def _scores_in_parts(op: Op, x: V, coefficients: Floats, intercepts: Floats | None, count: int) -> V:
    x = matrix_in_parts(op, x)
    z = op.MatMul(x, op.constant(np.array(coefficients).reshape(count, -1).T, op.dtype(x)))
    return op.Add(z, list(intercepts)) if intercepts else z


@operator("LinearClassifier", 1, domain=ML, host=True)
def linear_classifier(
    xp: Xp,
    x: Array,
    *,
    coefficients: Floats,
    intercepts: Floats | None = None,
    multi_class: int = 0,
    post_transform: str = "NONE",
    classlabels_ints: Ints | None = None,
    classlabels_strings: Strings | None = None,
) -> tuple[Array, Array]:
    """Select the class by the scores before the transform; a single score for two classes decides by its sign."""
    labels = class_labels(classlabels_ints, classlabels_strings)
    z = _scores(xp, x, coefficients, intercepts, len(intercepts or ()) or max(len(coefficients) // max(x.shape[-1], 1), 1))
    scores = z.shape[1]
    if scores == 1 and (labels is None or len(labels) == 2):
        names = np.array([0, 1], np.int64) if labels is None else labels
        y = names[(z[:, 0] > 0).astype(np.int64)]
        if labels is not None:
            # The score of the other class: 1 - z without a transform or for a probability, -z for a margin.
            z = xp.concatenate([1 - z if post_transform in ("NONE", "PROBIT") else -z, z], axis=1)
        return y, transform(xp, z, post_transform)
    if labels is None or len(labels) != scores:
        raise OperatorError(
            f"the number of class labels must equal the {scores} scores, got {0 if labels is None else len(labels)}", code="SX404"
        )
    return labels[z.argmax(axis=1)], transform(xp, z, post_transform)


@linear_classifier.decomposition
def linear_classifier_decomposition(
    op: Op,
    x: V,
    coefficients: Floats,
    intercepts: Floats | None,
    post_transform: str,
    classlabels_ints: Ints | None,
    classlabels_strings: Strings | None,
) -> tuple[V, V]:
    labels = class_labels(classlabels_ints, classlabels_strings)
    # The number of scores is that of the intercepts or of the labels; without both it is one.
    count = len(intercepts or ()) or (1 if labels is None else len(labels))
    z = _scores_in_parts(op, x, coefficients, intercepts, count)
    if count == 1 and (labels is None or len(labels) == 2):
        names = np.array([0, 1], np.int64) if labels is None else labels
        y = op.Gather(op.constant(names), op.Cast(op.Greater(op.Squeeze(z, [1]), 0), to=7))
        if labels is not None:
            z = op.Concat(op.Sub(1, z) if post_transform in ("NONE", "PROBIT") else op.Neg(z), z, axis=1)
        return y, op.Cast(transform_in_parts(op, z, post_transform), to=1)
    y = op.Gather(op.constant(labels), op.ArgMax(z, axis=1, keepdims=0))
    return y, op.Cast(transform_in_parts(op, z, post_transform), to=1)


@operator("LinearRegressor", 1, domain=ML)
def linear_regressor(
    xp: Xp,
    x: Array,
    *,
    coefficients: Floats | None = None,
    intercepts: Floats | None = None,
    post_transform: str = "NONE",
    targets: int = 1,
) -> Array:
    return transform(xp, _scores(xp, x, coefficients or (), intercepts, targets), post_transform)


@linear_regressor.decomposition
def linear_regressor_decomposition(
    op: Op, x: V, coefficients: Floats | None, intercepts: Floats | None, post_transform: str, targets: int
) -> V:
    return transform_in_parts(op, _scores_in_parts(op, x, coefficients or (), intercepts, targets), post_transform)
