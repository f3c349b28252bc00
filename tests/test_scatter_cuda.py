"""Scatter on an emulated CUDA device: NumPy's bits, in any order of threads, without a copy to the host."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakecuda
import ml_dtypes
import numpy as np
import pytest

from singa_backend.devices import namespaces
from singa_backend.devices.namespaces import numpy

pytestmark = pytest.mark.fakecuda
RNG = np.random.default_rng(0)
DTYPES = [np.dtype(t) for t in namespaces._TYPES]
MODES = ["none", "add", "mul", "max", "min"]


@pytest.fixture
def xp() -> Any:
    pytest.importorskip("cupy")
    return namespaces.CupyNamespace()


@pytest.fixture(autouse=True)
def both_orders() -> Iterator[None]:
    with fakecuda.order("both"):
        yield


def draw(dtype: np.dtype[Any], *shape: int) -> np.ndarray:
    """Numbers near and far, with both zeros, both infinities and NaN where there are any."""
    if dtype.kind in "iub":
        info = np.iinfo(dtype) if dtype.kind != "b" else None
        low, high = (info.min, info.max) if info else (0, 1)
        return RNG.integers(low, high, shape, np.int64 if low else np.uint64, endpoint=True).astype(dtype)
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        x = np.empty(shape, dtype)
        x.real, x.imag = draw(real, *shape), draw(real, *shape)
        return x
    x = RNG.standard_normal(shape) * 2.0 ** RNG.integers(-8, 8, shape)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan])
    return np.where(RNG.random(shape) < 0.15, RNG.choice(special, shape), x).astype(dtype)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits; the bits of a NaN have no meaning."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if want.dtype.kind == "c":
        assert_same_bits(got.real.copy(), want.real.copy())
        assert_same_bits(got.imag.copy(), want.imag.copy())
        return
    defined = want == want
    np.testing.assert_array_equal(got == got, defined)
    assert got[defined].tobytes() == want[defined].tobytes()


def compare(xp: Any, out: np.ndarray, index: tuple[np.ndarray, ...], values: np.ndarray, mode: str) -> None:
    """Scatter on the device and by NumPy; no value goes to the host."""
    there = xp.from_host(out)
    arguments = tuple(map(xp.from_host, index)), xp.from_host(values)
    with fakecuda.counting() as during:
        xp.scatter(there, *arguments, mode)
    assert (during["to_host"], during["to_device"]) == (0, 0)
    want = out.copy()
    with np.errstate(all="ignore"):
        numpy.scatter(want, index, values, mode)
    assert_same_bits(xp.to_host(there), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_mode(xp: Any, dtype: np.dtype[Any], mode: str) -> None:
    places = RNG.integers(0, 7, 301)
    compare(xp, draw(dtype, 9), (places,), draw(dtype, 301), mode)  # elements
    compare(xp, draw(dtype, 5, 3, 4), (places[:40].reshape(8, 5) % 5, places[40:45] % 3), draw(dtype, 8, 5, 4), mode)  # rows
