"""Five graphs written with sonnx; tests/frameworks/authored.py writes the same with spox and onnxscript."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import sonnx
from sonnx import Float, Int64, op

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
b = np.array([0.5, -0.5, 0.25, 0], np.float32)


@sonnx.graph(opset=21)
def linear(x: Float["N", 3]) -> Float["N", 4]:
    return x @ W + b


@sonnx.graph(opset=21)
def attention(q: Float["T", 4], k: Float["S", 4], v: Float["S", 4]) -> Float["T", 4]:
    scores = q @ op.Transpose(k, perm=[1, 0]) / 2.0
    return op.Softmax(scores, axis=-1) @ v


@sonnx.graph(opset=21)
def power(x: Float["N"], n: Int64[()]) -> Float["N"]:
    return op.Loop(n, None, x - (x - 1.0), body=lambda i, go, total: (go, total * x))


@sonnx.graph(opset=21)
def leaky(x: Float["N"]) -> Float["N"]:
    return op.If(op.ReduceSum(x, keepdims=0) > 0.0, then_branch=lambda: x * 2.0, else_branch=lambda: -x)


class Statistics(NamedTuple):
    mean: Float[3]
    variance: Float[3]
    largest: Int64["N"]


@sonnx.graph(opset=21)
def statistics(x: Float["N", 3]) -> Statistics:
    mean = op.ReduceMean(x, [0], keepdims=0)
    centred = x - mean
    return Statistics(mean, op.ReduceMean(centred * centred, [0], keepdims=0), op.ArgMax(x, axis=1, keepdims=0))


X = np.array([[1, 5, 2], [4, -1, 0.5]], np.float32)

FEEDS = {
    "linear": [X],
    "attention": [W.T[:2, :3] @ W, W, W[::-1].copy()],
    "power": [np.array([2, -3, 0.5], np.float32), np.array(3)],
    "leaky": [np.array([1, -3, 0.5], np.float32)],
    "statistics": [X],
}
"""Inputs of each graph."""


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def expected() -> dict[str, list[np.ndarray]]:
    """The outputs of the graphs for FEEDS, computed by NumPy."""
    (x,), (q, k, v), (p, n), (z,) = (FEEDS[name] for name in ("linear", "attention", "power", "leaky"))
    return {
        "linear": [x @ W + b],
        "attention": [softmax(q @ k.T / 2) @ v],
        "power": [p**n],
        "leaky": [2 * z if z.sum() > 0 else -z],
        "statistics": [X.mean(0), X.var(0), X.argmax(1)],
    }
