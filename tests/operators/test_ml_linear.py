"""LinearClassifier, LinearRegressor, and the transforms of scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

ML = {"opset": 1, "domain": "ai.onnx.ml"}
X = np.array([[1, 2], [-3, 0.5], [0, 0]], np.float32)
W, B = [0.1, -0.2, 0.3, 0.4, 0.5, -0.6], [0.1, 0.2, 0.0]
Z = np.array([[-0.2, 1.3, -0.7], [-0.3, -0.5, -1.8], [0.1, 0.2, 0.0]])


def transformed(z: np.ndarray, name: str) -> np.ndarray:
    """Row by row, by the formulas; a SOFTMAX_ZERO leaves scores of 0 alone."""
    rows = []
    for row in z.tolist():
        if name == "LOGISTIC":
            rows.append([1 / (1 + math.exp(-v)) for v in row])
        elif name == "NONE":
            rows.append(row)
        else:
            e = [0 if name == "SOFTMAX_ZERO" and abs(v) < 1e-6 else math.exp(v) for v in row]
            rows.append([v / sum(e) for v in e])
    return np.array(rows, np.float32)


@pytest.mark.parametrize("name", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_classifier(check: Any, name: str, dtype: Any) -> None:
    x = X.astype(dtype)
    expected = [np.array([6, 5, 6]), transformed(Z, name)]
    check("LinearClassifier", [x], expected, coefficients=W, intercepts=B, classlabels_ints=[5, 6, 7], post_transform=name,
          rtol=1e-5, **ML)  # fmt: skip
    expected[0] = np.array(["b", "a", "b"])
    check("LinearClassifier", [x], expected, coefficients=W, intercepts=B, classlabels_strings=["a", "b", "c"], multi_class=1,
          post_transform=name, rtol=1e-5, **ML)  # fmt: skip


def test_one_score_for_two_classes(check: Any) -> None:
    s = np.array([-0.2, -0.3, 0.1], np.float32)
    labels = np.array([5, 5, 6])
    attributes = {"coefficients": [0.1, -0.2], "intercepts": [0.1], "classlabels_ints": [5, 6], **ML}
    check("LinearClassifier", [X], [labels, np.stack([1 - s, s], 1)], rtol=1e-5, **attributes)
    pair = np.stack([-s, s], 1)
    for name in ("LOGISTIC", "SOFTMAX"):
        check("LinearClassifier", [X], [labels, transformed(pair, name)], post_transform=name, rtol=1e-5, **attributes)
    attributes.pop("classlabels_ints")
    check("LinearClassifier", [X], [np.array([0, 0, 1]), s[:, None]], rtol=1e-5, **attributes)


def test_shapes_and_integers(check: Any) -> None:
    names = {"classlabels_ints": [5, 6, 7], **ML}
    one = [np.array([6]), Z[:1].astype(np.float32)]
    check("LinearClassifier", [X[0]], one, coefficients=W, intercepts=B, rtol=1e-5, **names)
    none = [np.zeros(0, np.int64), np.zeros((0, 3), np.float32)]
    check("LinearClassifier", [X[:0]], none, coefficients=W, post_transform="SOFTMAX", **names)
    big = [np.array([7]), np.array([[0, 0, 2**24 + 1]], np.float32)]
    check("LinearClassifier", [np.array([[2**24 + 1, 0]])], big, coefficients=[0.0, 0, 0, 0, 1, 0], **names)
    y = np.array([[2**24 + 4]], np.float32)  # 2^24 + 3 is summed exactly, then rounded once
    check("LinearRegressor", [np.array([[2**24 + 1, 2]])], [y], coefficients=[1.0, 1], **ML)
    x, y = X.astype(np.float64)[0], np.array([[-0.2]], np.float32)
    check("LinearRegressor", [x], [y], coefficients=W[:2], intercepts=B[:1], **ML)


@pytest.mark.parametrize("name", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_regressor(check: Any, name: str) -> None:
    attributes = {"coefficients": W, "intercepts": B, "targets": 3, "post_transform": name, "rtol": 1e-5}
    check("LinearRegressor", [X], [transformed(Z, name)], **attributes, **ML)
    check("LinearRegressor", [X], [transformed(Z[:, :1], name)], coefficients=W[:2], intercepts=B[:1], post_transform=name,
          rtol=1e-5, **ML)  # fmt: skip


def test_probit(check: Any) -> None:
    """The quantiles of the normal distribution, to the three digits of Winitzki's formula."""
    p = np.array([[0.5], [0.8413447], [0.0227501], [0.975], [0], [1], [2]], np.float32)
    q = np.array([[0], [1], [-2], [1.959964], [-np.inf], [np.inf], [np.nan]], np.float32)
    check("LinearRegressor", [p], [q], coefficients=[1.0], post_transform="PROBIT", rtol=3e-3, **ML)


def test_large_scores(check: Any) -> None:
    x = np.array([[1000], [-1000]], np.float32)
    check("LinearRegressor", [x], [np.array([[1], [0]], np.float32)], coefficients=[1.0], post_transform="LOGISTIC", **ML)
    y = np.array([[1, 0], [0, 1]], np.float32)
    check("LinearRegressor", [x], [y], coefficients=[1.0, -1.0], targets=2, post_transform="SOFTMAX", **ML)


@pytest.mark.parametrize(("change", "match"), [
    ({"coefficients": W[:5]}, "coefficients"), ({"intercepts": B[:2]}, "coefficients"), ({"classlabels_ints": [1, 2]}, "labels"),
    ({"post_transform": "SOFTPLUS"}, "SOFTPLUS"), ({"classlabels_strings": ["a"]}, "both"),
])  # fmt: skip
def test_what_does_not_fit(fails: Any, change: dict[str, Any], match: str) -> None:
    attributes = {"coefficients": W, "intercepts": B, "classlabels_ints": [5, 6, 7], **change, **ML}
    fails("LinearClassifier", [X], match, outputs=2, **attributes)
    fails("LinearRegressor", [X[None]], "N, F", coefficients=W[:2], **ML)
