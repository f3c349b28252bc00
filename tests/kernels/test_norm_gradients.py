"""Gradients of RMS, instance, group and batch normalization in recorded steps equal those of the definitions."""

from __future__ import annotations

import math
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


def epsilon_of(shape: tuple[int, ...], few: int = 2) -> float:
    """A large one for so few elements that the gradient is 0 but for the epsilon."""
    return 1.0 if math.prod(shape) <= few else 1e-5


# --- RMS normalization

ROWS = [
    ((6, 8), -1), ((4, 5, 33), -1), ((4, 5, 33), 1), ((2, 3, 4, 16), -2), ((1, 5), -1), ((5, 1), -1), ((3, 70, 256), 2),
    ((7,), 0), ((3, 8192), 1), ((2, 8200), 1),
]  # fmt: skip
"""The shape of x and the first axis that is normalized."""


@pytest.mark.parametrize("needs", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize(("shape", "axis"), ROWS, ids=str)
def test_rms_normalization(shape: tuple[int, ...], axis: int, needs: tuple[int, ...]) -> None:
    arrays = [normal(*shape), normal(*shape[axis:], seed=1)]
    epsilon = epsilon_of(shape[axis:], 1)
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
    step = refused(lambda *v: op.RMSNormalization(*v), [normal(2, 8).astype(np.float16), normal(8, seed=1).astype(np.float16)])
    assert "not float32" in step.reasons["RMSNormalization"]
    step = refused(lambda *v: op.RMSNormalization(*v, epsilon=0.0), [normal(2, 8), normal(8, seed=1)])
    assert "epsilon" in step.reasons["RMSNormalization"]
    step = refused(lambda *v: op.RMSNormalization(*v), [normal(0, 8), normal(8, seed=1)])
    assert "empty" in step.reasons["RMSNormalization"]


# --- instance and group normalization

SAMPLES = [
    ((2, 3, 9), 3),
    ((3, 4, 5, 6), 2),
    ((2, 16, 6, 7), 4),
    ((1, 33, 4, 5), 11),
    ((2, 6, 3, 4, 3), 1),
    ((2, 8, 70, 65), 4),
    ((5, 4, 2), 4),
]
"""The shape of x and the number of groups."""

NEEDS = [(0, 1, 2), (0,), (1,), (1, 2)]


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SAMPLES, ids=str)
def test_instance_normalization(shape: tuple[int, ...], groups: int, needs: tuple[int, ...]) -> None:
    arrays = [normal(*shape), normal(shape[1], seed=1), normal(shape[1], seed=2)]
    epsilon = epsilon_of(shape[2:])
    step = compare(
        lambda *v: op.InstanceNormalization(*v, epsilon=epsilon), arrays, needs, joined=["InstanceNormalization"], exact=True,
        tolerance=1e-5,
    )  # fmt: skip
    assert step.in_training == ["InstanceNormalization"]
    assert step.planner.latest is not None and not step.planner.latest.facts.definitions


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SAMPLES, ids=str)
def test_group_normalization(shape: tuple[int, ...], groups: int, needs: tuple[int, ...]) -> None:
    arrays = [normal(*shape) + 2, normal(shape[1], seed=1), normal(shape[1], seed=2)]
    epsilon = epsilon_of((shape[1] // groups, *shape[2:]))
    step = compare(
        lambda *v: op.GroupNormalization(*v, num_groups=groups, epsilon=epsilon), arrays, needs, joined=["GroupNormalization"],
        exact=True, tolerance=1e-5,
    )  # fmt: skip
    assert step.in_training == ["GroupNormalization"]
    assert step.planner.latest is not None and not step.planner.latest.facts.definitions


@pytest.mark.parametrize("name", ["InstanceNormalization", "GroupNormalization"])
def test_gradients_of_only_a_bias_are_left_to_the_rule(name: str) -> None:
    arrays = [normal(2, 4, 5, 6), normal(4, seed=1), normal(4, seed=2)]
    attributes = {"num_groups": 2} if name == "GroupNormalization" else {}
    step = compare(lambda *v: getattr(op, name)(*v, **attributes), arrays, [2], joined=[])
    assert not step.in_training and not step.reasons


def test_results_of_a_group_normalization_with_other_readers() -> None:
    def several(x: Any, scale: Any, b: Any) -> list[Any]:
        y = op.GroupNormalization(op.Neg(x), scale, b, num_groups=2)
        return [y, op.Mul(y, y), op.Relu(y), op.Neg(x)]

    arrays = [normal(3, 8, 5, 6), normal(8, seed=1), normal(8, seed=2)]
    compare(several, arrays, [0, 1, 2], joined=["GroupNormalization", "Relu"], tolerance=1e-5)


@pytest.mark.parametrize("name", ["InstanceNormalization", "GroupNormalization"])
def test_refused_normalizations_of_samples(name: str) -> None:
    for shape, dtype, attributes, reason in (
        ((2, 4, 3), np.float16, {}, "the dtype is float16"),
        ((2, 4, 3), np.float32, {"epsilon": 0.0}, "epsilon is 0"),
        ((2, 4, 3, 2, 2, 2), np.float32, {}, "the rank is not 3, 4 or 5"),
        ((0, 4, 3), np.float32, {}, "empty"),
    ):
        arrays = [normal(*shape).astype(dtype), *(normal(4, seed=n).astype(dtype) for n in (1, 2))]
        given = {"num_groups": 2, **attributes} if name == "GroupNormalization" else attributes
        step = refused(lambda *v, g=given: getattr(op, name)(*v, **g), arrays)
        assert reason in step.reasons[name], step.reasons


# --- batch normalization by given statistics, and gradients of running statistics

BATCHES = [(4, 3, 5, 6), (3, 16, 9), (5, 7), (2, 33, 4, 5, 3), (1, 1, 2)]


def batch(shape: tuple[int, ...]) -> list[np.ndarray]:
    mean, var = normal(shape[1], seed=3), np.abs(normal(shape[1], seed=4)) + np.float32(0.5)
    return [normal(*shape) + 2, normal(shape[1], seed=1), normal(shape[1], seed=2), mean, var]


@pytest.mark.parametrize("needs", [(0, 1, 2, 3, 4), (0, 1, 2), (1,), (0, 3), (4,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_batch_normalization_by_given_statistics(shape: tuple[int, ...], needs: tuple[int, ...]) -> None:
    step = compare(
        lambda *v: op.BatchNormalization(*v, epsilon=1e-3), batch(shape), needs, joined=["BatchNormalization"], exact=True,
        tolerance=1e-5,
    )  # fmt: skip
    assert step.in_training == ["BatchNormalization"]
    assert step.planner.latest is not None and not step.planner.latest.facts.definitions


@pytest.mark.parametrize("which", [(0, 1, 2), (1, 2), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("shape", BATCHES[:-1], ids=str)
def test_gradients_that_pass_running_statistics(shape: tuple[int, ...], which: tuple[int, ...]) -> None:
    def several(*v: Any) -> list[Any]:
        ys = op.BatchNormalization(*v, momentum=0.3, training_mode=1, outputs=3)
        return [ys[i] for i in which]

    needs = [0, 1, 2] if 0 in which else [0]
    step = compare(several, batch(shape), needs, joined=["BatchNormalization"], exact=True, tolerance=1e-5)
    assert step.planner.latest is not None and not step.planner.latest.facts.definitions


@pytest.mark.parametrize("needs", [(0,), (2,), (0, 2)], ids=str)
def test_a_product_with_given_statistics_is_left_to_the_rule(needs: tuple[int, ...]) -> None:
    step = compare(lambda *v: op.BatchNormalization(*v), batch((4, 3, 5, 6)), needs, joined=[], exact=True, tolerance=1e-5)
    assert not step.in_training and not step.reasons


# --- values that may be infinite


NORMS: dict[str, dict[str, Any]] = {
    "LayerNormalization": {}, "RMSNormalization": {}, "InstanceNormalization": {}, "GroupNormalization": {"num_groups": 2},
    "BatchNormalization": {"training_mode": 1},
}  # fmt: skip


def quotient_normalized(name: str) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """A normalization of x / d, which may be infinite, and its arguments."""
    sizes = (6,) if name in ("LayerNormalization", "RMSNormalization") else (4,)
    count = {"RMSNormalization": 1, "BatchNormalization": 4}.get(name, 2)
    parameters = [np.abs(normal(*sizes, seed=2 + n)) + 1 for n in range(count)]
    arrays = [normal(3, 4, 5, 6), np.abs(normal(3, 4, 5, 6, seed=1)) + 1, *parameters]
    return lambda x, d, *v: _first(getattr(op, name)(op.Div(x, d), *v, **NORMS[name])), arrays


def _first(y: Any) -> Any:
    return y[0] if isinstance(y, (tuple, list)) else y


@pytest.mark.parametrize("name", list(NORMS))
def test_normalizations_of_values_that_may_be_infinite(name: str) -> None:
    """The kernel computes the gradient of finite ones; others are left to the definitions, whose NaN they have."""
    function, arrays = quotient_normalized(name)
    step = compare(function, arrays, [0, 2], joined=[name], exact=True, tolerance=1e-5)
    body, given = differentiated(function, arrays, [0, 2])
    other = record(body, given, [0, 2], Options(level=0))
    for value in (np.inf, np.nan):
        given[0][0, 0, 0, 0], given[1][2, 3, 4, 5] = value, 0
        with np.errstate(all="ignore"):
            for r in (step, other):
                r.set(given)
            for actual, expected in zip(step.run(), other.run(), strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
