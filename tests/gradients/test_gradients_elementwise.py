"""Gradients that generated points rarely test: by float32 scales, and of products and powers at zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_backend.autodiff.tape import Tape
from singa_backend.interpreters.eager import Eager

RNG = np.random.default_rng(0)
X = RNG.integers(-100, 100, (3, 5, 4)).astype(np.int8)
F = np.float32


def gradient(op_type: str, inputs: list[Any], by: int, dy: Any, **attributes: Any) -> Any:
    tape = Tape(Eager())
    values = [None if x is None else tape.variable(x, i == by) for i, x in enumerate(inputs)]
    (y,) = tape.call(op_type, values, attributes, 1)
    return tape.gradients([y], [dy], [values[by]])[0]


@pytest.mark.parametrize(("scale", "zero", "attributes"), [
    ((), False, {}), ((), True, {}), ((5,), True, {"axis": 1}), ((4,), False, {"axis": -1}),
    ((3, 3, 4), True, {"axis": 1, "block_size": 2}), ((3, 5, 2), False, {"axis": 2, "block_size": 2}),
])  # fmt: skip
def test_dequantize_linear_by_its_scale(scale: tuple[int, ...], zero: bool, attributes: dict[str, int]) -> None:
    """y = (x - zero) scale, so its slope by the scale is x - zero, summed over the elements that the scale multiplies."""
    s = RNG.uniform(0.1, 1, scale).astype(F)
    z = RNG.integers(-5, 5, scale).astype(np.int8) if zero else None
    dy = RNG.standard_normal(X.shape).astype(F)
    found = gradient("DequantizeLinear", [X, s, z], 1, dy, **attributes)

    def spread(v: Any) -> Any:
        axis, block = attributes.get("axis", 1) % 3, attributes.get("block_size", 0)
        if v.ndim == 1:
            return v.reshape([-1 if i == axis else 1 for i in range(3)])
        return v.repeat(block, axis)[tuple(slice(0, n) for n in X.shape)] if block else v

    steps = (X - (0 if z is None else spread(z).astype(int))) * dy
    want = np.zeros(scale)
    marks = np.broadcast_to(spread(np.arange(max(1, want.size)).reshape(scale)), X.shape)
    np.add.at(want.reshape(-1), marks.reshape(-1), steps.reshape(-1))
    assert found.dtype == F
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


def test_dequantize_linear_of_a_vector_by_its_scales() -> None:
    dy = np.array([1, -2, 0.5], F)
    found = gradient("DequantizeLinear", [np.int8([3, -4, 7]), np.ones(3, F), None], 1, dy, axis=0)
    np.testing.assert_array_equal(found, F([3, 8, 3.5]))


@pytest.mark.parametrize("values", [[2.0, 3.0, 4.0], [2.0, 0.0, 4.0], [0.0, 0.0, 4.0], [2.0, 0.0, 0.0]])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_running_products_with_zeros(values: list[float], exclusive: int, reverse: int) -> None:
    """By the definition: the product of all that are multiplied, but one."""
    x, dy = np.array(values), np.array([1.0, 10.0, 100.0])
    order = list(range(3))[:: -1 if reverse else 1]
    want = np.zeros(3)
    for place, i in enumerate(order):
        factors = order[: place + (0 if exclusive else 1)]
        for k in factors:
            want[k] += dy[i] * np.prod([x[j] for j in factors if j != k])
    found = gradient("CumProd", [x, np.array(0)], 0, dy, exclusive=exclusive, reverse=reverse)
    np.testing.assert_allclose(found, want)


@pytest.mark.parametrize(("base", "exponent", "by_base", "by_exponent"), [
    (0.0, 2.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (-2.0, 3.0, 12.0, np.nan), (2.0, 3.0, 12.0, 8 * np.log(2)),
])  # fmt: skip
def test_powers_at_their_edges(base: float, exponent: float, by_base: float, by_exponent: float) -> None:
    inputs = [np.array(base), np.array(exponent)]
    assert gradient("Pow", inputs, 0, np.array(1.0)) == by_base
    np.testing.assert_allclose(gradient("Pow", inputs, 1, np.array(1.0)), by_exponent)


def test_products_with_one_and_with_two_zeros() -> None:
    assert gradient("ReduceProd", [np.array([2.0, 0.0, 3.0])], 0, np.array([1.0])).tolist() == [0, 6, 0]
    assert gradient("ReduceProd", [np.array([2.0, 0.0, 0.0])], 0, np.array([1.0])).tolist() == [0, 0, 0]


def test_the_gradient_of_an_element_that_is_gathered_twice_is_a_sum() -> None:
    found = gradient("Gather", [np.zeros((3, 2)), np.array([0, 2, 0, -1])], 0, np.arange(8.0).reshape(4, 2), axis=0)
    assert found.tolist() == [[4, 6], [0, 0], [8, 10]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_mish_far_from_zero(dtype: Any) -> None:
    """Nothing overflows, and no difference of nearly equal numbers is multiplied by a large one."""
    x = np.concatenate([np.linspace(-700, 700, 1401), np.linspace(-25, 25, 2001)]).astype(dtype)
    z = x.astype(np.longdouble)
    y, e = np.logaddexp(0, z), np.exp(-np.logaddexp(0, z) * 2)
    want = np.tanh(y) + z * np.exp(-np.logaddexp(0, -z)) * 4 * e / (1 + e) ** 2
    error = np.abs(gradient("Mish", [x], 0, np.ones_like(x)) - want)
    assert (error <= 2 * np.finfo(dtype).eps).all()
