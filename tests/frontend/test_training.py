"""ONNX's operators Adagrad, Adam and Momentum, against the same steps written with Python floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

DOMAIN = "ai.onnx.preview.training"
X, G, V, H = (np.array(v) for v in ([1.0, -2.0, 0.5], [0.25, 0.5, -1.0], [0.1, -0.2, 0.3], [0.5, 0.25, 2.0]))
X2, G2, V2, H2 = (np.array([[v]]) for v in (3.0, -0.5, 0.75, 1.5))
F = float(np.float32(0.1))  # attributes are float32


def run(check: Any, op: str, t: int, columns: list[tuple[np.ndarray, ...]], expected: Any, **attributes: Any) -> None:
    """Two tensors at once, and the first alone; learning rates in both types and shapes."""
    for dtype, rtol in ((np.float64, 1e-12), (np.float32, 1e-5)):
        for rate, step in ((np.float32(0.5), np.int64(t)), (np.array([0.5]), np.array([t]))):
            for n in (1, 2):
                inputs = [v.astype(dtype) for column in columns for v in column[:n]]
                results = [
                    [expected(*values) for values in zip(*(c[i].ravel().tolist() for c in columns), strict=True)]
                    for i in range(n)
                ]
                outputs = [np.array([r[k] for r in results[i]], dtype).reshape(columns[0][i].shape)
                           for k in range(len(results[0][0])) for i in range(n)]  # fmt: skip
                check(op, [rate, step, *inputs], outputs, opset=1, domain=DOMAIN, rtol=rtol, **attributes)


@pytest.mark.parametrize("t", [0, 1, 7])
def test_adagrad(check: Any, t: int) -> None:
    def step(x: float, g: float, h: float) -> tuple[float, ...]:
        g = F * x + g
        h = h + g * g
        return x - 0.5 / (1 + t * F) * g / (math.sqrt(h) + 0.25), h

    run(check, "Adagrad", t, [(X, X2), (G, G2), (H, H2)], step, norm_coefficient=0.1, decay_factor=0.1, epsilon=0.25)


@pytest.mark.parametrize("t", [0, 1, 7])
def test_adam(check: Any, t: int) -> None:
    def step(x: float, g: float, v: float, h: float) -> tuple[float, ...]:
        g = F * x + g
        v, h = 0.75 * v + 0.25 * g, 0.5 * h + 0.5 * g * g
        rate = 0.5 * math.sqrt(1 - 0.5**t) / (1 - 0.75**t) if t > 0 else 0.5
        return (1 - F) * (x - rate * v / (math.sqrt(h) + 0.25)), v, h

    run(check, "Adam", t, [(X, X2), (G, G2), (V, V2), (H, H2)], step, alpha=0.75, beta=0.5, epsilon=0.25,
        norm_coefficient=0.1, norm_coefficient_post=0.1)  # fmt: skip


@pytest.mark.parametrize("mode", ["standard", "nesterov"])
@pytest.mark.parametrize("t", [0, 1])
def test_momentum(check: Any, t: int, mode: str) -> None:
    def step(x: float, g: float, v: float) -> tuple[float, ...]:
        g = F * x + g
        v = 0.75 * v + (0.5 if t > 0 else 1) * g
        return x - 0.5 * (g + 0.75 * v if mode == "nesterov" else v), v

    run(check, "Momentum", t, [(X, X2), (G, G2), (V, V2)], step, alpha=0.75, beta=0.5, mode=mode, norm_coefficient=0.1)


def test_defaults(check: Any) -> None:
    one, zero = np.array([1.0]), np.array([0.0])
    rate, step = np.float64(0.1), np.int64(0)
    check("Adagrad", [rate, step, one, one, zero], [1 - 0.1 / (one + 1e-6), one], opset=1, domain=DOMAIN)
    v, h = 1 - float(np.float32(0.9)), 1 - float(np.float32(0.999))
    x = one - 0.1 * v / (math.sqrt(h) + 1e-6)
    check("Adam", [rate, step, one, one, zero, zero], [x, v * one, h * one], opset=1, domain=DOMAIN)


def test_errors(fails: Any) -> None:
    rate, step, x = np.float32(0.1), np.int64(0), np.ones(2, np.float32)
    fails("Adam", [rate, step, x, x, x], "multiple of 4, got 3", opset=1, domain=DOMAIN)
    fails(
        "Momentum",
        [rate, step, x, x, x],
        "mode must be .* got 'fast'",
        opset=1,
        domain=DOMAIN,
        alpha=0.9,
        beta=1.0,
        mode="fast",
        norm_coefficient=0.0,
    )
