"""SVMClassifier and SVMRegressor against loops over rows, vectors and pairs of classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

ML = {"opset": 1, "domain": "ai.onnx.ml"}
F = np.float32
RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 3)).astype(F)
KERNELS = ["LINEAR", "POLY", "RBF", "SIGMOID"]
PARAMS = [0.5, 0.25, 2.0]


def kernel(a: np.ndarray, b: np.ndarray, kind: str) -> float:
    gamma, coef0, degree = PARAMS
    dot = float(a.astype(float) @ b)
    return {"LINEAR": dot, "POLY": (gamma * dot + coef0) ** degree, "SIGMOID": math.tanh(gamma * dot + coef0),
            "RBF": math.exp(-gamma * float(((a - b) ** 2).sum()))}[kind]  # fmt: skip


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F)


def flat(a: np.ndarray) -> list[float]:
    return [float(v) for v in a.reshape(-1)]


@pytest.mark.parametrize("kind", KERNELS)
def test_regressor(check: Any, kind: str) -> None:
    vectors, c = floats(4, 3), floats(4)
    z = np.array([[sum(float(c[m]) * kernel(row, vectors[m], kind) for m in range(4)) + 0.5] for row in X])
    given = {"support_vectors": flat(vectors), "coefficients": flat(c), "n_supports": 4, "rho": [0.5], "kernel_type": kind,
             "kernel_params": PARAMS, "rtol": 1e-5, **ML}  # fmt: skip
    check("SVMRegressor", [X], [z.astype(F)], **given)
    check("SVMRegressor", [X.astype(np.float64)], [z.astype(F)], **given)
    check("SVMRegressor", [X], [np.where(z > 0, 1, -1).astype(F)], one_class=1, **given)
    check("SVMRegressor", [X], [(1 / (1 + np.exp(-z))).astype(F)], post_transform="LOGISTIC", **given)
    check("SVMRegressor", [X[:0]], [z[:0].astype(F)], **given)


def test_linear_regressor(check: Any, fails: Any) -> None:
    check("SVMRegressor", [np.array([[1, 2]])], [np.array([[8.5]], F)], coefficients=[2.0, 3.0], rho=[0.5], **ML)
    check("SVMRegressor", [np.array([1, 2], F)], [np.array([[8]], F)], coefficients=[2.0, 3.0], **ML)
    fails("SVMRegressor", [np.array([[1, 2]])], "coefficients", coefficients=[2.0], **ML)
    fails("SVMRegressor", [np.array([[1.0]])], "COSINE", coefficients=[2.0], support_vectors=[1.0], n_supports=1,
          kernel_type="COSINE", **ML)  # fmt: skip


def machines(sizes: list[int], kind: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """A classifier's attributes, its decision for each row and pair, and the class with most votes."""
    n, classes = sum(sizes), len(sizes)
    vectors, c, rho = floats(n, 3), floats(classes - 1, n), floats(classes * (classes - 1) // 2)
    owner = [k for k, size in enumerate(sizes) for _ in range(size)]
    z, top = np.zeros((len(X), len(rho))), np.zeros(len(X), np.int64)
    for r, row in enumerate(X):
        votes, p = [0] * classes, 0
        for i in range(classes):
            for j in range(i + 1, classes):
                z[r, p] = rho[p]
                for m in range(n):
                    if owner[m] in (i, j):
                        z[r, p] += c[j - 1 if owner[m] == i else i, m] * kernel(row, vectors[m], kind)
                votes[i if z[r, p] > 0 else j] += 1
                p += 1
        top[r] = votes.index(max(votes))
    given = {"support_vectors": flat(vectors), "coefficients": flat(c), "vectors_per_class": sizes, "rho": flat(rho),
             "kernel_type": kind, "kernel_params": PARAMS, "rtol": 1e-5, **ML}  # fmt: skip
    return given, z, top


@pytest.mark.parametrize("kind", KERNELS)
def test_votes(check: Any, kind: str) -> None:
    given, z, top = machines([2, 3, 1], kind)
    check("SVMClassifier", [X], [top + 5, z.astype(F)], classlabels_ints=[5, 6, 7], **given)
    check("SVMClassifier", [X], [np.array(list("abc"))[top], z.astype(F)], classlabels_strings=list("abc"), **given)
    given, z, top = machines([1, 2], kind)
    check("SVMClassifier", [X], [top + 5, np.hstack([-z, z]).astype(F)], classlabels_ints=[5, 6], **given)
    s = 1 / (1 + np.exp(-np.hstack([-z, z])))
    check("SVMClassifier", [X], [top + 5, s.astype(F)], classlabels_ints=[5, 6], post_transform="LOGISTIC", **given)
    check("SVMClassifier", [X[:0]], [top[:0], np.zeros((0, 2), F)], classlabels_ints=[5, 6], **given)


@pytest.mark.parametrize("sizes", [[1, 2], [2, 1, 3], [1, 1, 2, 1]])
def test_probabilities(check: Any, sizes: list[int]) -> None:
    """They sum to 1, and minimise the disagreement with the pairs, up to the tolerance of 0.005 / classes."""
    given, z, top = machines(sizes, "RBF")
    classes = len(sizes)
    a, b = -np.abs(floats(z.shape[1])), floats(z.shape[1])
    r = 1 / (1 + np.exp(z * a + b))
    names = [10 * k for k in range(classes)]
    p = np.zeros((len(X), classes))
    for n in range(len(X)):
        pair = np.zeros((classes, classes))
        pair[np.triu_indices(classes, 1)] = r[n]
        pair += np.tril(1 - pair.T, -1)
        # The minimum of sum (pair[j, i] p[i] - pair[i, j] p[j])² with sum p = 1, by its linear equations.
        q = -pair * pair.T
        q[np.diag_indices(classes)] = (pair**2).sum(axis=0)
        system = np.block([[q, np.ones((classes, 1))], [np.ones((1, classes)), np.zeros((1, 1))]])
        p[n] = np.linalg.solve(system, [*[0] * classes, 1])[:classes]
    given["rtol"] = 1e-2
    given |= {"prob_a": flat(a), "prob_b": flat(b), "classlabels_ints": names}
    out = check("SVMClassifier", [X], [top * 10, p.astype(F)], atol=1e-2, **given)
    np.testing.assert_allclose(out[1].sum(axis=1), 1, rtol=1e-5)


def test_linear_classifier(check: Any, fails: Any) -> None:
    x = np.array([[1, 2], [3, -1]], F)
    z = np.array([[2.5, 1.5, 3.5], [-0.5, 3.5, 2.5]], F)
    given = {"coefficients": [0.0, 1, 1, 0, 1, 1], "rho": [0.5], **ML}
    y = np.array([7, 6])
    check("SVMClassifier", [x], [y, z], classlabels_ints=[5, 6, 7], **given)
    fails("SVMClassifier", [x], "coefficients", classlabels_ints=[5, 6], outputs=2, **given)


def test_what_does_not_fit(fails: Any) -> None:
    given, _, _ = machines([2, 3, 1], "RBF")
    given.pop("rtol")
    fails("SVMClassifier", [X], "labels", classlabels_ints=[5, 6], outputs=2, **given)
    fails("SVMClassifier", [X], "rho", classlabels_ints=[5, 6, 7], outputs=2, **{**given, "rho": [0.5]})
    fails("SVMClassifier", [X], "prob_a", classlabels_ints=[5, 6, 7], outputs=2, prob_a=[0.5], prob_b=[0.5], **given)
    fails("SVMClassifier", [X[:, :2]], "support_vectors", classlabels_ints=[5, 6, 7], outputs=2, **given)
