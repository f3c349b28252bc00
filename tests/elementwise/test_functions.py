"""Functions in machine code against wider arithmetic: the bounds of the table, over all exponents and at special values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.elementwise_frames import run, traced

from singa_backend.elementwise.compile import available
from singa_backend.elementwise.expression import FUNCTIONS
from singa_backend.elementwise.functions import BOUNDS, TWO_OVER_PI

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

POINTS = 60_000

DOMAINS = {"asin": (-1, 1), "acos": (-1, 1), "atanh": (-1, 1), "acosh": (1, 40), "log": (0, 8), "log1p": (-1, 8)}
"""The ranges in which half of the points are; elsewhere [-40, 40]."""

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e-310, 1e30, -1e30]


def bits(dtype: Any, rng: np.random.Generator, count: int) -> np.ndarray:
    """Values of all exponents."""
    word = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return rng.integers(0, 1 << 8 * word.itemsize, count, dtype=word).view(dtype)


def points(name: str, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(len(name))
    with np.errstate(over="ignore"):
        edges = np.array([*SPECIAL, np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal, np.finfo(dtype).tiny], dtype)
    low, high = DOMAINS.get(name, (-40, 40))
    near = rng.uniform(low, high, POINTS).astype(dtype)
    limits = rng.uniform(-760, 760, POINTS // 4).astype(dtype)
    turns = (rng.integers(-(1 << 20), 1 << 20, POINTS // 4) * (np.pi / 2)).astype(dtype)
    ones = 1 + (rng.uniform(-1, 1, POINTS // 4) * 2.0 ** rng.integers(-50, 0, POINTS // 4)).astype(dtype)
    return np.concatenate([edges, -edges, bits(dtype, rng, POINTS), near, limits, turns, ones, -ones])


def wider(dtype: Any) -> type:
    if dtype is np.float64 and np.finfo(np.longdouble).nmant < 60:
        pytest.skip("no real numbers are wider than float64 here")
    return np.float64 if dtype is np.float32 else np.longdouble


def check(name: str, dtype: Any, *arrays: np.ndarray) -> None:
    """The error in units in the last place is within the bound, and special values are equal."""
    function, wide = FUNCTIONS[name], wider(dtype)
    (y,) = run(
        traced(lambda xp, *a: function(*a), *((dtype, a.shape) for a in arrays)), arrays, [np.empty(arrays[0].shape, dtype)]
    )
    with np.errstate(all="ignore"):
        exact = function(*(a.astype(wide) for a in arrays))
        rounded = exact.astype(dtype)
        unit = np.spacing(np.minimum(np.abs(rounded), np.finfo(dtype).max)).astype(wide)
        error = np.abs(y.astype(wide) - exact) / unit
    same = (y == rounded) | (np.isnan(y) & np.isnan(rounded))
    error[same] = np.minimum(np.nan_to_num(error[same], posinf=0), 0.5)
    edge = np.isinf(y) != np.isinf(rounded)  # the rounding at the largest number
    error[edge] = np.abs(exact[edge] / np.finfo(dtype).max - 1) / np.finfo(dtype).eps
    worst = int(np.argmax(np.nan_to_num(error, nan=np.inf)))
    bound = BOUNDS[name][dtype is np.float64]
    assert not error[worst] > bound, f"{name}({[a[worst] for a in arrays]}) = {y[worst]}, not {exact[worst]}: {error[worst]} ULP"
    assert not np.isnan(error[worst]), f"{name}({[a[worst] for a in arrays]}) = {y[worst]}, not {exact[worst]}"
    zero = rounded == 0
    np.testing.assert_array_equal(np.signbit(y[zero & same]), np.signbit(rounded[zero & same]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", [n for n in BOUNDS if n != "pow"])
def test_function_is_within_its_bound(name: str, dtype: Any) -> None:
    check(name, dtype, points(name, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_power_is_within_its_bound(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    with np.errstate(over="ignore"):
        special = np.array([*SPECIAL, 5.0, -5.0, 0.25, 1e300, -1e300, 2.0**53, 2.0**53 + 2, np.finfo(dtype).max], dtype)
    x, y = (a.ravel() for a in np.meshgrid(special, special))
    base = np.abs(bits(dtype, rng, POINTS))
    with np.errstate(all="ignore"):
        fitting = (rng.uniform(-760, 760, POINTS) / np.log(base.astype(np.float64))).astype(dtype)
    near = (1 + rng.uniform(-1, 1, POINTS) * 2.0 ** rng.integers(-30, 0, POINTS)).astype(dtype)
    with np.errstate(all="ignore"):
        steep = (rng.uniform(-760, 760, POINTS) / np.log(near.astype(np.float64))).astype(dtype)
    whole = rng.integers(-30, 30, POINTS).astype(dtype)
    x = np.concatenate([x, base, near, rng.uniform(-30, 30, POINTS).astype(dtype)])
    y = np.concatenate([y, fitting, steep, whole])
    check("pow", dtype, x, y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_of_what_is_not_positive(dtype: Any) -> None:
    """They have a form of their own, for values and signs of all kinds, NaN of all bits included."""
    x = points("exp", dtype)
    word = f"u{x.itemsize}"
    quiet = (bits(dtype, np.random.default_rng(2), 1000).view(word) | np.array(np.nan, dtype).view(word)).view(dtype)
    x = np.concatenate([x, quiet])
    (y,) = run(traced(lambda xp, x: np.exp(-np.abs(x)), (dtype, (9,))), [x], [np.empty_like(x)])
    (z,) = run(traced(lambda xp, x: np.exp(x), (dtype, (9,))), [-np.abs(x)], [np.empty_like(x)])
    np.testing.assert_array_equal(y, z)
    assert np.isnan(y[np.isnan(x)]).all()


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_large_angles(name: str) -> None:
    """Also the float64 that is nearest to a multiple of pi / 2."""
    rng = np.random.default_rng(1)
    exponents = 2.0 ** rng.integers(26, 1023, POINTS)
    x = np.concatenate([[6381956970095103.0 * 2.0**797, 2.0**27, -(2.0**27), 2.0**1023], rng.uniform(-2, 2, POINTS) * exponents])
    check(name, np.float64, x)
    if name == "cos":
        (y,) = run(traced(lambda xp, x: np.cos(x), (np.float64, (1,))), [x[:1]], [np.empty(1)])
        assert y[0] == -4.68716592425462761112e-19


def test_bits_of_two_over_pi() -> None:
    """By Machin's formula in integers: independent of the script that made the table."""
    scale = 1 << 64 * len(TWO_OVER_PI) + 64

    def atan_inverse(n: int) -> int:
        term, total, k = scale // n, 0, 0
        while term:
            total += term // (2 * k + 1) * (-1) ** k
            term, k = term // (n * n), k + 1
        return total

    pi = 4 * (4 * atan_inverse(5) - atan_inverse(239))
    table = sum(w << 64 * i for i, w in enumerate(reversed(TWO_OVER_PI)))
    assert table == (2 * scale << 64 * (len(TWO_OVER_PI) - 1)) // pi
