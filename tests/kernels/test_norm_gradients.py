"""Gradients of RMS, instance and group normalization in recorded steps equal those of the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import Recorded, compare, differentiated, normal, record

from singa._core.ops import op
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")


def refused(function: Callable[..., Any], arrays: list[np.ndarray]) -> Recorded:
    """A step whose gradient no kernel computes; its results are those of the definitions."""
    body, given = differentiated(function, arrays, [0, 1])
    steps = [record(body, given, [0, 1], o) for o in (Options(), Options(level=0))]
    for actual, expected in zip(*(s.run() for s in steps), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-3 if actual.dtype == np.float16 else 1e-5, atol=1e-3)
    assert not steps[0].joined
    return steps[0]


# --- RMS normalization

ROWS = [
    ((6, 8), -1), ((4, 5, 33), -1), ((4, 5, 33), 1), ((2, 3, 4, 16), -2), ((1, 5), -1), ((5, 1), -1), ((3, 70, 256), 2),
    ((7,), 0), ((3, 8192), 1),
]  # fmt: skip
"""The shape of x and the first axis that is normalized."""


@pytest.mark.parametrize("needs", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize(("shape", "axis"), ROWS, ids=str)
def test_rms_normalization(shape: tuple[int, ...], axis: int, needs: tuple[int, ...]) -> None:
    arrays = [normal(*shape), normal(*shape[axis:], seed=1)]
    epsilon = 1e-5 if shape[-1] > 1 else 1.0  # the gradient of one element is 0 but for the epsilon
    step = compare(
        lambda *v: op.RMSNormalization(*v, axis=axis, epsilon=epsilon),
        arrays,
        needs,
        joined=["RMSNormalization"],
        exact=True,
        tolerance=5e-6,
    )
    assert step.in_training == ["RMSNormalization"]
    assert step.planner.latest is not None and not step.planner.latest.facts.definitions


def test_rms_normalization_of_large_and_repeated_values() -> None:
    """Values far from 0, for which the gradient is a small difference, and two readers of the result."""

    def several(x: Any, scale: Any) -> list[Any]:
        y = op.RMSNormalization(x, scale, epsilon=1e-3)
        return [y, op.Mul(y, y), op.Neg(x)]

    compare(several, [normal(9, 40) + 10, normal(40, seed=1)], [0, 1], joined=["RMSNormalization"], exact=True, tolerance=2e-5)


def test_refused_rms_normalizations() -> None:
    step = refused(lambda *v: op.RMSNormalization(*v), [normal(2, 8200), normal(8200, seed=1)])
    assert "so long" in step.reasons["RMSNormalization"]
    step = refused(lambda *v: op.RMSNormalization(*v), [normal(2, 8).astype(np.float16), normal(8, seed=1).astype(np.float16)])
    assert "not float32" in step.reasons["RMSNormalization"]
    step = refused(lambda *v: op.RMSNormalization(*v, epsilon=0.0), [normal(2, 8), normal(8, seed=1)])
    assert "epsilon" in step.reasons["RMSNormalization"]
    step = refused(lambda *v: op.RMSNormalization(*v), [normal(0, 8), normal(8, seed=1)])
    assert "empty" in step.reasons["RMSNormalization"]
