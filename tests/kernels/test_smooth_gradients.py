"""Gradients of layer normalization, softmaxes and smooth activations in recorded steps equal those of the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.plan_checks import same
from tests.helpers.recorded_steps import compare, differentiated, normal, record

from singa._core.ops import op
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

# --- layer normalization

ROWS = [
    ((6, 8), -1), ((4, 5, 33), -1), ((4, 5, 33), 1), ((2, 3, 4, 16), -2), ((1, 5), -1), ((5, 1), -1), ((3, 70, 256), 2),
]  # fmt: skip
"""The shape of x and the first axis that is normalized."""


def parameters(shape: tuple[int, ...], axis: int, biased: bool = True) -> list[np.ndarray]:
    return [normal(*shape[axis:], seed=1), *([normal(*shape[axis:], seed=2)] if biased else [])]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shape", "axis"), ROWS, ids=str)
def test_layer_normalization(shape: tuple[int, ...], axis: int, biased: bool) -> None:
    arrays = [normal(*shape), *parameters(shape, axis, biased)]
    step = compare(
        lambda *v: op.LayerNormalization(*v, axis=axis), arrays, range(len(arrays)), joined=["LayerNormalization"], exact=True,
        tolerance=5e-6,
    )  # fmt: skip
    assert step.in_training == ["LayerNormalization"]


@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_layer_normalization_with_frozen_parts(needs: tuple[int, ...]) -> None:
    arrays = [normal(6, 9, 16), *parameters((16,), 0)]
    joined = [] if needs == (2,) else ["LayerNormalization"]  # the gradient of the bias alone is a sum
    compare(op.LayerNormalization, arrays, needs, joined=joined, exact=True, tolerance=5e-6)


@pytest.mark.parametrize("shape", [(1, 16), (1, 1, 16), (16,)], ids=str)
def test_layer_normalization_with_a_scale_of_more_axes(shape: tuple[int, ...]) -> None:
    arrays = [normal(6, 9, 16), normal(*shape, seed=1), normal(16, seed=2)]
    compare(op.LayerNormalization, arrays, [0, 1, 2], joined=["LayerNormalization"], exact=True, tolerance=5e-6)


def test_layer_normalization_of_a_view() -> None:
    for perm in (1, 0, 2), (0, 2, 1), (2, 1, 0):
        arrays = [normal(16, 16, 16), *parameters((16,), 0)]
        compare(
            lambda x, *w, perm=perm: op.Transpose(op.LayerNormalization(op.Transpose(x, perm=perm), *w), perm=perm), arrays,
            [0, 1, 2], joined=["LayerNormalization"], exact=True, tolerance=5e-6,
        )  # fmt: skip


def test_layer_normalization_of_values_with_other_readers() -> None:
    """The input, the result and its gradient are read again: nothing may be overwritten."""

    def several(x: Any, *w: Any) -> list[Any]:
        z = op.Mul(x, 2.0)
        y = op.LayerNormalization(z, *w)
        return [op.LayerNormalization(op.Add(y, z), *w), y, z]

    arrays = [normal(6, 9, 16), *parameters((16,), 0)]
    compare(several, arrays, [0, 1, 2], joined=["LayerNormalization"] * 2, exact=True, tolerance=5e-6)


def test_outputs_of_layer_normalization_that_the_model_uses() -> None:
    """The rule computes the gradients of the mean and of the deviation."""
    arrays = [normal(6, 9, 16), *parameters((16,), 0)]
    compare(lambda *v: op.LayerNormalization(*v, outputs=3), arrays, [0, 1, 2], joined=[], tolerance=2e-5)


def test_layer_normalization_without_epsilon_is_refused() -> None:
    arrays = [normal(6, 9, 16), *parameters((16,), 0)]
    step = compare(
        lambda *v: op.LayerNormalization(*v, epsilon=0.0), arrays, [0, 1, 2], joined=[], exact=True, tolerance=2e-5
    )  # fmt: skip
    assert "without a positive epsilon" in step.reasons["LayerNormalization"]


# --- softmaxes


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 7), -1), ((5, 1), 1), ((70, 17), 1), ((2, 3, 8, 33), 3), ((4, 300), 1), ((2, 9, 1, 1), 1)], ids=str
)
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax(name: str, shape: tuple[int, ...], axis: int) -> None:
    for factor in 1, 5:
        x = normal(*shape) * np.float32(factor)
        compare(lambda x: getattr(op, name)(x, axis=axis), [x], [0], joined=[], exact=True, tolerance=5e-6)


@pytest.mark.parametrize(("shape", "axis"), [((4, 5, 6), 1), ((4, 5, 6), -3), ((2, 3, 8, 33), 1), ((3, 1, 2), 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_a_softmax_along_another_axis(name: str, dtype: Any, shape: tuple[int, ...], axis: int) -> None:
    x = normal(*shape).astype(dtype)
    compare(lambda x: getattr(op, name)(x, axis=axis), [x], [0], joined=[], exact=True, tolerance=5e-6)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_values_of_a_softmax_that_may_be_infinite(name: str) -> None:
    x = normal(3, 8)
    x[0, 2], x[1, :4] = -np.inf, -np.inf
    body, given = differentiated(lambda x: getattr(op, name)(x), [normal(3, 8)], [0])
    given[0] = x
    steps = [record(body, given, [0], o) for o in (Options(), Options(level=0))]
    with np.errstate(invalid="ignore"):
        for actual, expected in zip(*(s.run() for s in steps), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_of_values_with_other_readers(name: str) -> None:
    function = getattr(op, name)

    def several(x: Any) -> list[Any]:
        y = function(op.Transpose(x, perm=(1, 0, 2)))
        return [y, op.Mul(y, y), op.Transpose(function(op.Mul(y, x)), perm=(0, 2, 1))]

    compare(several, [normal(9, 9, 24)], [0], joined=[], exact=True, tolerance=5e-6)


@pytest.mark.parametrize("name", ["LayerNormalization", "Gelu", "Elu"])
def test_a_gradient_with_another_reader(name: str) -> None:
    """The gradient of the result is that of another summand too, which the kernel must not overwrite."""
    arrays = [normal(6, 9, 16), normal(6, 9, 16, seed=4), *(parameters((16,), 0) if name == "LayerNormalization" else [])]

    def body(x: Any, k: Any, *w: Any) -> Any:
        return op.Mul(op.Add(getattr(op, name)(x, *w), k), 2.0)

    compare(body, arrays, range(len(arrays)), joined=[name], exact=True, tolerance=5e-6)


# --- activations

FUNCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("LeakyRelu", {}), ("LeakyRelu", {"alpha": 0.3}), ("LeakyRelu", {"alpha": -0.3}), ("Elu", {}), ("Elu", {"alpha": 0.4}),
    ("HardSigmoid", {}), ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}), ("HardSwish", {}), ("Softplus", {}), ("Swish", {}),
    ("Swish", {"alpha": 1.7}), ("Mish", {}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}),
]  # fmt: skip

KINKS = [-3, 3, 0, -0.0, 2.5, -2.5, 1, -1, 0.5, -0.5, 20, -20, 88, -88, -17, -18, 100, -100, 1e-30, -1e-30]


@pytest.mark.parametrize("factor", [1, 6, 40])
@pytest.mark.parametrize(("name", "attributes"), FUNCTIONS, ids=str)
def test_activations(name: str, attributes: dict[str, Any], factor: int) -> None:
    """Also where the derivative jumps, and where exponentials overflow."""
    x = normal(4096) * np.float32(factor)
    x[: len(KINKS)] = KINKS
    for one in x, x.reshape(2, 8, 16, 16)[:, :7], x[:5]:
        compare(lambda x: getattr(op, name)(x, **attributes), [one], [0], joined=[name], exact=True, tolerance=1e-6)


# --- values that are not finite

CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str]] = {
    "layer norm": (lambda x, s, b: op.LayerNormalization(x, s, b), [(6, 16), (16,), (16,)], "LayerNormalization"),
    "elu": (lambda x: op.Elu(x), [(6, 16)], "Elu"),
    "gelu": (lambda x: op.Gelu(x), [(6, 16)], "Gelu"),
}


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", CASES)
def test_values_that_are_not_finite(case: str, number: float) -> None:
    """Such a run is left to the definitions, in each input and in the gradient of the result; the next one is by the plan."""
    function, shapes, name = CASES[case]
    arrays = [normal(*s, seed=n) for n, s in enumerate(shapes)]
    body, given = differentiated(function, arrays, range(len(arrays)))
    plan, exact = (record(body, given, range(len(arrays)), Options(level=n)) for n in (2, 0))
    plan.run()
    assert plan.joined == [name]
    for at in range(len(given)):
        changed = [a.copy() for a in given]
        changed[at].reshape(-1)[changed[at].size // 2] = number
        for now in changed, given:
            for r in plan, exact:
                r.set(now)
            for got, wanted in zip(plan.run(), exact.run(), strict=True):
                same(got, wanted)


@pytest.mark.parametrize("case", CASES)
def test_empty_values(case: str) -> None:
    function, shapes, _ = CASES[case]
    arrays = [normal(*((0, *s[1:]) if n == 0 else s), seed=n) for n, s in enumerate(shapes)]
    body, given = differentiated(function, arrays, range(len(arrays)))
    plan, exact = (record(body, given, range(len(arrays)), Options(level=n)) for n in (2, 0))
    for got, wanted in zip(plan.run(), exact.run(), strict=True):
        same(got, wanted)
