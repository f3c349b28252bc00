"""Classification losses, against loops over every target."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

rng = np.random.default_rng(5)


def nll(x: np.ndarray, t: np.ndarray, w: np.ndarray | None, ignore: int | None, reduction: str) -> np.ndarray:
    loss, weights = np.zeros(t.shape), np.zeros(t.shape)
    for at in np.ndindex(t.shape):
        c = t[at]
        if c != ignore:
            weights[at] = 1 if w is None else w[c]
            loss[at] = -x[(at[0], c, *at[1:])] * weights[at]
    if reduction == "none":
        return loss
    with np.errstate(invalid="ignore"):
        return loss.sum() if reduction == "sum" else loss.sum() / weights.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4), (2, 3, 2, 3), (1, 2, 2, 1, 2), (3, 1)])
def test_losses(check: Any, shape: tuple[int, ...], reduction: str) -> None:
    x = rng.standard_normal(shape)
    t = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    w = rng.uniform(0.5, 2, shape[1])
    for weighted, ignore in itertools.product((False, True), (None, 0, -1)):
        target = np.where(rng.random(t.shape) < 0.4, ignore, t) if ignore is not None else t
        target = target.astype(rng.choice([np.int32, np.int64]))
        extra: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
        for opset, dtype, tol in (
            (12, np.float64, 1e-12), (13, np.float32, 1e-5), (22, np.float16, 5e-3), (22, ml_dtypes.bfloat16, 3e-2),
        ):  # fmt: skip
            given, weights = x.astype(dtype), [w.astype(dtype)] if weighted else []
            rounded = given.astype(float)
            wide = weights[0].astype(float) if weighted else None
            how = {"rtol": tol, "atol": tol, "reduction": reduction, **extra}
            y = nll(rounded, target, wide, ignore, reduction)
            check("NegativeLogLikelihoodLoss", [given, target, *weights], [np.asarray(y, dtype)], opset=opset, **how)
            log_prob = log_softmax(rounded)
            y = nll(log_prob, target, wide, ignore, reduction)
            both = [np.asarray(y, dtype), log_prob.astype(dtype)]
            for expected in (both, both[:1]):
                check("SoftmaxCrossEntropyLoss", [given, target, *weights], expected, opset=opset, **how)


def test_the_mean_is_the_default(check: Any) -> None:
    x = np.log(np.array([[0.5, 0.5], [0.25, 0.75]], np.float32))
    y = np.float32(-(np.log(0.5) + np.log(0.75)) / 2)
    for opset in (12, 13, 22):
        check("NegativeLogLikelihoodLoss", [x, np.array([0, 1])], [y], opset=opset)
        check("SoftmaxCrossEntropyLoss", [x, np.array([0, 1])], [y, x], opset=opset, rtol=1e-5)


def test_edges(check: Any) -> None:
    x = np.array([[-np.inf, -1], [np.nan, -2]], np.float32)
    t = np.array([0, 1])
    check("NegativeLogLikelihoodLoss", [x, t], [np.array([np.inf, 2], np.float32)], opset=13, reduction="none")
    check(
        "NegativeLogLikelihoodLoss",
        [x, np.array([7, 1])],
        [np.array([0, 2], np.float32)],
        opset=13,
        reduction="none",
        ignore_index=7,
    )
    check("NegativeLogLikelihoodLoss", [x, np.array([7, 7])], [np.float32(np.nan)], opset=13, ignore_index=7)  # a mean of nothing
    check("NegativeLogLikelihoodLoss", [x, np.array([7, 7])], [np.float32(0)], opset=13, ignore_index=7, reduction="sum")
    check("NegativeLogLikelihoodLoss", [x[:0], t[:0]], [np.zeros(0, np.float32)], opset=13, reduction="none")
    check("NegativeLogLikelihoodLoss", [x[:0], t[:0]], [np.float32(np.nan)], opset=13)
    check("SoftmaxCrossEntropyLoss", [x[:0], t[:0]], [np.float32(0), x[:0]], opset=13, reduction="sum")
    far = np.array([[1000, 0], [-1000, 0]], np.float32)
    log_prob = np.array([[0, -1000], [-1000, 0]], np.float32)
    check("SoftmaxCrossEntropyLoss", [far, t], [np.zeros(2, np.float32), log_prob], opset=13, reduction="none")


@pytest.mark.parametrize("op", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
def test_errors(fails: Any, op: str) -> None:
    x, t = np.zeros((2, 3), np.float32), np.array([0, 1])
    fails(op, [x, np.array([0, 3])], r"an index must be in \[0, 3\), got 3", opset=13)
    fails(op, [x, np.array([0, -1])], r"an index must be in .* got -1", opset=13)
    fails(op, [x, np.array([0, 3])], r"an index must be in .* got 3", opset=13, ignore_index=0)
    fails(op, [x, t[:1]], "scores must have shape .* for targets", opset=13)
    fails(op, [x, t, np.ones(2, np.float32)], r"weight must have shape \(3,\)", opset=13)
    fails(op, [x, t], "reduction must be .* got 'max'", opset=13, reduction="max")
