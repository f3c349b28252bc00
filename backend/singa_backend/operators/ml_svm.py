"""Support vector machines of ai.onnx.ml, and the linear models that use their operators."""

from __future__ import annotations

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints, operator
from ._api import Array
from .ml_linear import ML, Floats, Strings, class_labels, matrix, matrix_in_parts, transform, transform_in_parts


def _kernel(xp: Xp, x: Array, s: Array, kind: str, params: Floats | None) -> Array:
    """Compute the kernel of each row of x with each row of s, [N, M]."""
    limits.admit((x.shape[0], s.shape[0]), np.float64)
    gamma, coef0, degree = (*(params or ()), 0.0, 0.0, 0.0)[:3]
    if kind == "LINEAR":
        return xp.matmul(x, s.T)
    if kind == "POLY":
        return (gamma * xp.matmul(x, s.T) + coef0) ** degree
    if kind == "SIGMOID":
        return xp.tanh(gamma * xp.matmul(x, s.T) + coef0)
    if kind == "RBF":
        distance = [((x - row) ** 2).sum(axis=1) for row in s]  # not x² - 2xs + s², which suffers from cancellation
        return xp.exp(-gamma * xp.stack(distance, axis=1))
    raise OperatorError(f"kernel_type must be LINEAR, POLY, RBF or SIGMOID, got {kind!r}", code="SX404")


def _rows(xp: Xp, name: str, values: Floats | None, count: int, features: int) -> Array:
    if count < 1 or len(values or ()) != count * features:
        raise OperatorError(f"{name} must have {count} rows of {features} values, got {len(values or ())} values", code="SX404")
    return xp.asarray(np.array(values, np.float64).reshape(count, features))


@operator("SVMRegressor", 1, domain=ML)
def svm_regressor(
    xp: Xp,
    x: Array,
    *,
    coefficients: Floats | None = None,
    support_vectors: Floats | None = None,
    n_supports: int = 0,
    rho: Floats | None = None,
    kernel_type: str = "LINEAR",
    kernel_params: Floats | None = None,
    one_class: int = 0,
    post_transform: str = "NONE",
) -> Array:
    """Without support vectors, the model is linear; with one_class, the result is 1 inside and -1 outside."""
    x = matrix(xp, x).astype(np.float64)
    if n_supports > 0:
        vectors = _rows(xp, "support_vectors", support_vectors, n_supports, x.shape[1])
        k = _kernel(xp, x, vectors, kernel_type, kernel_params)
        z = xp.matmul(k, _rows(xp, "coefficients", coefficients, 1, n_supports).T)
    else:
        z = xp.matmul(x, _rows(xp, "coefficients", coefficients, 1, x.shape[1]).T)
    if rho:
        z = z + rho[0]
    return xp.where(z > 0, 1.0, -1.0) if one_class else transform(xp, z, post_transform)


@svm_regressor.decomposition
def svm_regressor_decomposition(
    op: Op,
    x: V,
    coefficients: Floats,
    support_vectors: Floats | None,
    n_supports: int,
    rho: Floats | None,
    kernel_type: str,
    kernel_params: Floats | None,
    one_class: int,
    post_transform: str,
) -> V:
    x = op.Cast(matrix_in_parts(op, x), to=11)
    z = x
    if n_supports > 0:
        s = np.array(support_vectors, np.float64).reshape(n_supports, -1)
        gamma, coef0, degree = (*(kernel_params or ()), 0.0, 0.0, 0.0)[:3]
        if kernel_type == "RBF":
            apart = op.Sub(op.Unsqueeze(x, [1]), op.constant(s, np.float64))
            z = op.Exp(op.Mul(op.ReduceSum(op.Mul(apart, apart), [2], keepdims=0), -gamma))
        else:
            z = op.MatMul(x, op.constant(s.T, np.float64))
            if kernel_type != "LINEAR":
                z = op.Add(op.Mul(z, gamma), coef0)
                z = op.Pow(z, degree) if kernel_type == "POLY" else op.Tanh(z)
    z = op.MatMul(z, op.constant(np.array(coefficients, np.float64).reshape(-1, 1), np.float64))
    z = op.Add(z, rho[0]) if rho else z
    z = op.Where(op.Greater(z, 0), 1.0, op.constant(-1, np.float64)) if one_class else transform_in_parts(op, z, post_transform)
    return op.Cast(z, to=1)


@operator("SVMClassifier", 1, domain=ML, host=True)
def svm_classifier(
    xp: Xp,
    x: Array,
    *,
    classlabels_ints: Ints | None = None,
    classlabels_strings: Strings | None = None,
    coefficients: Floats | None = None,
    support_vectors: Floats | None = None,
    vectors_per_class: Ints | None = None,
    rho: Floats | None = None,
    prob_a: Floats | None = None,
    prob_b: Floats | None = None,
    kernel_type: str = "LINEAR",
    kernel_params: Floats | None = None,
    post_transform: str = "NONE",
) -> tuple[Array, Array]:
    """Select the class with most votes of the machines, one machine for each pair of classes.

    The scores are those of the pairs or, with prob_a and prob_b, the probabilities of the classes.  Without support
    vectors, there is a linear model for each class.
    """
    labels = class_labels(classlabels_ints, classlabels_strings)
    x = matrix(xp, x).astype(np.float64)
    machines = bool(vectors_per_class) and sum(vectors_per_class or ()) > 0
    if machines:
        sizes = np.array(vectors_per_class)
        if sizes.min() < 0:
            raise OperatorError(f"vectors_per_class must not be negative, got {tuple(vectors_per_class or ())}", code="SX404")
        classes, total = len(sizes), int(sizes.sum())
        vectors = _rows(xp, "support_vectors", support_vectors, total, x.shape[1])
        k = _kernel(xp, x, vectors, kernel_type, kernel_params)
        z = _pairs(k, _rows(xp, "coefficients", coefficients, classes - 1, total), sizes, rho)
        chosen = _votes(z, classes).argmax(axis=1)
    else:
        classes = max(1, len(labels) if labels is not None else 1)
        limits.admit((x.shape[0], classes), np.float64)
        z = xp.matmul(x, _rows(xp, "coefficients", coefficients, classes, x.shape[1]).T) + (rho[0] if rho else 0.0)
        chosen = z.argmax(axis=1)
    if labels is not None and len(labels) != classes:
        raise OperatorError(f"the number of labels must equal the {classes} classes, got {len(labels)}", code="SX404")
    names = np.arange(classes) if labels is None else labels
    if machines and prob_a:
        z = _probabilities(z, classes, prob_a, prob_b or ())
    elif z.shape[1] == 1 and classes == 2:
        z = np.concatenate([1 - z if post_transform == "PROBIT" else -z, z], axis=1)  # a probability, or a margin
    return names[chosen], transform(xp, z, post_transform).astype(np.float32)


def _pairs(k: np.ndarray, coefficients: np.ndarray, sizes: np.ndarray, rho: Floats | None) -> np.ndarray:
    """Return the decision of each pair of classes i < j, above 0 for i: [N, pairs]."""
    ends = np.cumsum(sizes)
    part = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    limits.admit((len(sizes), len(sizes)), np.int64)
    pairs = list(zip(*np.triu_indices(len(sizes), 1), strict=True))
    if len(rho or ()) < len(pairs):
        raise OperatorError(
            f"rho must have {len(pairs)} values, one for each pair of classes, got {len(rho or ())}", code="SX404"
        )
    limits.admit((len(k), len(pairs)), np.float64)
    z = np.empty((len(k), len(pairs)))
    for p, (i, j) in enumerate(pairs):
        first, second = (np.matmul(k[:, part[one]], coefficients[other, part[one]]) for one, other in ((i, j - 1), (j, i)))
        z[:, p] = first + second + (rho or ())[p]
    return z


def _votes(z: np.ndarray, classes: int) -> np.ndarray:
    first, second = np.triu_indices(classes, 1)
    votes = np.zeros((len(z), classes), np.int64)
    for p, won in enumerate((z > 0).T):
        votes[:, first[p]] += won
        votes[:, second[p]] += ~won
    return votes


def _probabilities(z: np.ndarray, classes: int, a: Floats, b: Floats) -> np.ndarray:
    """Compute Platt's sigmoid of each pair, then the class probabilities that fit best (Wu, Lin and Weng 2004)."""
    if not len(a) == len(b) == z.shape[1]:
        raise OperatorError(
            f"prob_a and prob_b must have {z.shape[1]} values, one for each pair, got {len(a)} and {len(b)}", code="SX404"
        )
    pair = np.clip(1 - transform(np, z * np.array(a) + np.array(b), "LOGISTIC"), 1e-7, 1 - 1e-7)
    limits.admit((len(z), classes, classes), np.float64)
    r = np.zeros((len(z), classes, classes))
    i, j = np.triu_indices(classes, 1)
    r[:, i, j], r[:, j, i] = pair, 1 - pair
    # Minimise p' q p over p with sum 1: q[t, t] = sum of r[j, t]², q[t, j] = -r[j, t] r[t, j].
    q = -r.transpose(0, 2, 1) * r
    q[:, range(classes), range(classes)] = (r * r).sum(axis=1)
    p = np.full((len(z), classes), 1 / classes)
    going = np.ones(len(z), bool)
    for _ in limits.rounds(max(100, classes)):
        qp = np.einsum("nij,nj->ni", q, p)
        pqp = (p * qp).sum(axis=1)
        going = going & (np.abs(qp - pqp[:, None]).max(axis=1) >= 0.005 / classes)
        if not going.any():
            break
        for t in limits.rounds(classes):
            step = np.where(going, (pqp - qp[:, t]) / q[:, t, t], 0)
            pqp = (pqp + step * (step * q[:, t, t] + 2 * qp[:, t])) / (1 + step) ** 2
            qp = (qp + step[:, None] * q[:, t, :]) / (1 + step[:, None])
            p[:, t] += step
            p /= 1 + step[:, None]
    return p
