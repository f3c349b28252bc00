"""Functions that CuPy's namespace computes by few kernels, on an emulated device, against NumPy's."""

from __future__ import annotations

import itertools
from typing import Any

import fakecuda
import numpy as np
import pytest

from singa_backend.devices import namespaces
from singa_backend.devices.spatial import WindowPlaces
from singa_backend.ir.windows import Windows
from singa_backend.operators._windows import frames
from singa_backend.operators.philox import philox
from singa_backend.operators.pool import argmax_pool

pytestmark = pytest.mark.fakecuda
RNG = np.random.default_rng(0)
HOST = namespaces.numpy


@pytest.fixture
def xp(cupy: Any) -> Any:
    return namespaces.CupyNamespace()


def stored(cupy: Any, x: np.ndarray, transposed: bool) -> Any:
    """The array on the device, with its last two axes in this order in memory."""
    return cupy.asarray(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2) if transposed else cupy.asarray(x)


# the shapes, and the kernels that copy operands for each order of their memory: none, b, a, both transposed
PRODUCTS = [
    ((5, 6), (6, 7), (0, 0, 0, 0)),
    ((4, 5, 6), (6, 7), (0, 0, 1, 1)),  # one product: the rows of all samples must be at equal distances
    ((5, 6), (4, 6, 7), (0, 0, 0, 0)),
    ((2, 3, 5, 6), (2, 3, 6, 4), (0, 0, 0, 0)),
    ((1, 5, 6), (4, 6, 7), (0, 0, 0, 0)),
    ((2, 3, 5, 6), (1, 1, 6, 4), (0, 0, 1, 1)),
    ((3, 5, 6), (2, 3, 6, 4), (1, 1, 1, 1)),  # by groups: the filters of each sample
    ((2, 1, 5, 6), (1, 3, 6, 4), (2, 2, 2, 2)),
    ((2, 3, 1, 6), (2, 3, 6, 1), (0, 0, 0, 0)),
    ((2, 3, 5, 1), (2, 3, 1, 4), (0, 0, 0, 0)),
]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("left", "right", "copies"), PRODUCTS)
def test_a_product_of_stacks_is_one_call(xp: Any, cupy: Any, dtype: Any, left: Any, right: Any, copies: tuple[int, ...]) -> None:
    a, b = (RNG.standard_normal(s).astype(dtype) for s in (left, right))
    for k, most in enumerate(copies):
        there = stored(cupy, a, k >= 2), stored(cupy, b, k % 2 == 1)
        with fakecuda.counting() as during:
            y = xp.matmul(*there)
        assert (during["products"], during["to_host"]) == (1, 0) and during["launches"] <= most
        assert y.dtype == dtype
        near = 2e-3 if dtype == np.float16 else 1e-5  # sums of float16 are float32, and rounded once
        np.testing.assert_allclose(y.get(), a.astype(np.float64) @ b.astype(np.float64), rtol=near, atol=near)
    assert fakecuda.report() == []


EMPTY = [((6,), (3, 6, 2)), ((2, 5, 6), (6,)), ((2, 0, 6), (2, 6, 3)), ((2, 3, 0), (2, 0, 4)), ((1, 2, 4), (3, 4, 0))]


@pytest.mark.parametrize("shapes", EMPTY)
def test_vectors_and_empty_matrices(xp: Any, cupy: Any, shapes: Any) -> None:
    a, b = (RNG.standard_normal(s).astype(np.float32) for s in shapes)
    y = xp.matmul(cupy.asarray(a), cupy.asarray(b)).get()
    assert y.shape == (a @ b).shape
    np.testing.assert_allclose(y, a @ b, rtol=1e-5, atol=1e-5)


def test_a_product_is_written_into_columns(xp: Any, cupy: Any) -> None:
    a, b = (RNG.standard_normal(s).astype(np.float32) for s in ((3, 5, 6), (2, 3, 6, 8)))
    out = cupy.full((2, 3, 5, 20), 7, np.float32)
    xp.matmul(cupy.asarray(a), cupy.asarray(b), out=out[..., 4:12])
    np.testing.assert_allclose(out.get()[..., 4:12], a @ b, rtol=1e-5, atol=1e-5)
    assert (out.get()[..., :4] == 7).all() and (out.get()[..., 12:] == 7).all()


def test_heads_of_attention_are_read_where_they_are(xp: Any, cupy: Any) -> None:
    x = cupy.asarray(RNG.standard_normal((1, 7, 3, 8)).astype(np.float32))
    q, k = x.transpose(0, 2, 1, 3), x.transpose(0, 2, 3, 1)
    with fakecuda.counting() as during:
        y = xp.matmul(q, k)
    assert (during["launches"], during["products"]) == (0, 1)
    np.testing.assert_allclose(y.get(), q.get() @ k.get(), rtol=1e-5, atol=1e-5)


SPECIAL = np.array([np.nan, np.inf, -np.inf, -1, 0, 0.5, 3, -3, 9, -0.0])


@pytest.mark.parametrize("name", ["erf", "erfc"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_error_functions_are_one_kernel(xp: Any, cupy: Any, name: str, dtype: Any) -> None:
    x = SPECIAL.astype(dtype)
    there = cupy.asarray(x)
    with fakecuda.counting() as during:
        y = getattr(xp, name)(there)
    assert during["launches"] == (3 if dtype == np.float16 else 1) and y.dtype == dtype
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(y.get(), getattr(HOST, name)(x), rtol=1e-3 if dtype == np.float16 else 2e-6, atol=1e-44)


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (np.nan, 1), (0, np.nan), (2, -2)])
def test_clip_is_one_kernel(xp: Any, cupy: Any, low: float, high: float) -> None:
    x = SPECIAL.astype(np.float32)
    bounds = [np.float32(low), np.float32(high)]
    there = [cupy.asarray(v) for v in (x, *bounds)]
    with fakecuda.counting() as during:
        y = xp.clip(*there)
    assert during["launches"] == 1
    np.testing.assert_array_equal(y.get(), np.minimum(np.maximum(x, bounds[0]), bounds[1]))
    np.testing.assert_array_equal(xp.clip(there[0], low, high).get(), y.get())


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_is_three_kernels(xp: Any, cupy: Any, name: str, axis: int) -> None:
    x = RNG.standard_normal((3, 4, 5)).astype(np.float32)
    x[0, 0, 0], x[1], x[2, 0, 1] = np.nan, -np.inf, np.inf
    there = cupy.asarray(x)
    with fakecuda.counting() as during:
        y = getattr(xp, name)(there, axis)
    assert during["launches"] == 3
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(y.get(), getattr(HOST, name)(x, axis), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("axes", [(2,), (1, 2)])
@pytest.mark.parametrize("shift", [True, False])
def test_layer_normalization_is_three_kernels(xp: Any, cupy: Any, axes: tuple[int, ...], shift: bool) -> None:
    x, scale, b = (RNG.standard_normal(s).astype(np.float32) for s in ((3, 4, 5), (4, 5), (5,)))
    given = (scale, b if shift else None)
    there = [None if v is None else cupy.asarray(v) for v in (x, *given)]
    with fakecuda.counting() as during:
        found = xp.layer_normalized(there[0], axes, 1e-5, *there[1:], x.dtype)
    assert during["launches"] == 3
    for mine, wanted in zip(found, HOST.layer_normalized(x, axes, 1e-5, *given, x.dtype), strict=True):
        assert mine.dtype == wanted.dtype
        np.testing.assert_allclose(mine.get(), wanted, rtol=1e-5, atol=1e-6)


def test_batch_normalization(xp: Any, cupy: Any) -> None:
    x = RNG.standard_normal((4, 3, 5)).astype(np.float32)
    scale, b, mean, var = (RNG.random((3, 1)).astype(np.float32) for _ in range(4))
    there = [cupy.asarray(v) for v in (x, scale, b, mean, var)]
    with fakecuda.counting() as during:
        y = xp.standardized(there[0], there[3], there[4], 1e-5, there[1], there[2])
    assert during["launches"] == 1
    np.testing.assert_allclose(y.get(), HOST.standardized(x, mean, var, 1e-5, scale, b), rtol=1e-5, atol=1e-6)
    with fakecuda.counting() as during:
        found = xp.batch_normalized(there[0], (0, 2), 1e-5, *there[1:3])
    assert during["launches"] == 3
    for mine, wanted in zip(found, HOST.batch_normalized(x, (0, 2), 1e-5, scale, b), strict=True):
        np.testing.assert_allclose(mine.get(), wanted, rtol=1e-5, atol=1e-6)
    assert xp.blended(there[3], there[4], 0.9).get() == pytest.approx(mean * np.float32(0.9) + var * np.float32(0.1))


WINDOWS = [  # sizes, kernel, strides, dilations, begins, counts
    ((6,), (3,), (1,), (1,), (1,), (6,)),
    ((7, 5), (3, 2), (2, 1), (1, 2), (1, 0), (4, 3)),
    ((5, 5), (2, 2), (3, 3), (1, 1), (2, 2), (3, 3)),  # a window of padding
]


@pytest.mark.parametrize("sizes", WINDOWS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_windows_are_read_and_written_by_one_kernel(xp: Any, cupy: Any, sizes: Any, dtype: Any) -> None:
    cells, kernel, *rest = sizes
    at = WindowPlaces(kernel, *rest)
    reads = Windows(cells, kernel, *rest[:3], (9,) * len(cells), at.counts)
    x = RNG.standard_normal((2, 4, *cells)).astype(dtype)
    with fakecuda.counting() as during:
        found = xp.columns(cupy.asarray(x), at)
    assert during["launches"] == 1
    np.testing.assert_array_equal(found.get(), frames(HOST, x, reads)[(..., *(slice(n) for n in at.counts))])

    parts = RNG.standard_normal((2, 2, *kernel, 2, *at.counts)).astype(dtype)
    with fakecuda.counting() as during:
        found = xp.folded(cupy.asarray(parts), cells, at)
    assert during["launches"] == 1
    sums = np.zeros((2, 2, 2, *cells), dtype)
    for taps in itertools.product(*(reads.taps(axis) for axis in range(len(cells)))):
        offsets, here, there = zip(*taps, strict=True)
        sums[(..., *there)] += parts[(slice(None), slice(None), *offsets, slice(None), *here)]
    np.testing.assert_array_equal(found.get(), sums)
    assert fakecuda.report() == []


@pytest.mark.parametrize("sizes", WINDOWS)
def test_maxima_are_one_kernel(xp: Any, cupy: Any, sizes: Any) -> None:
    cells, kernel, *rest = sizes
    x = RNG.integers(0, 4, (2, 4, *cells)).astype(np.float32)
    x.reshape(-1)[::7] = np.nan
    x[0, 0] = -np.inf
    with fakecuda.counting() as during:
        y, index = xp.maxima(cupy.asarray(x), WindowPlaces(kernel, *rest), places=True)
    assert during["launches"] == 1
    wanted = argmax_pool(HOST, x, Windows(cells, kernel, *rest[:3], (9,) * len(cells), rest[3]))
    np.testing.assert_array_equal(y.get(), wanted[0])
    np.testing.assert_array_equal(index.get(), wanted[1])
    np.testing.assert_array_equal(xp.maxima(cupy.asarray(x), WindowPlaces(kernel, *rest), places=False)[0].get(), wanted[0])


def test_other_windows_are_left_to_the_definitions(xp: Any, cupy: Any) -> None:
    at = WindowPlaces((2,) * 3, (1,) * 3, (1,) * 3, (0,) * 3, (1,) * 3)
    assert xp.columns(cupy.zeros((1, 1, 2, 2, 2), np.float32), at) is None
    assert xp.maxima(cupy.zeros((1, 1, 2), np.int8), WindowPlaces((2,), (1,), (1,), (0,), (1,)), places=False) is None


def test_a_step_of_an_lstm_is_a_product_and_a_kernel(xp: Any, cupy: Any) -> None:
    projected, recurrent, c = (RNG.standard_normal(s).astype(np.float32) for s in ((3, 20), (3, 20), (3, 5)))
    with fakecuda.counting() as during:
        h, new = xp.lstm_cell(*(cupy.asarray(v) for v in (projected, recurrent, c)))
    assert during["launches"] == 1
    i, o, f, g = np.split((projected + recurrent).astype(np.float64), 4, 1)
    wanted = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
    np.testing.assert_allclose(new.get(), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(h.get(), np.tanh(wanted) / (1 + np.exp(-o)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integers_are_counted_by_all_threads(xp: Any, cupy: Any, dtype: Any) -> None:
    places, values = RNG.integers(0, 4, 500), RNG.integers(-3, 9, 500).astype(dtype)
    wanted = np.arange(6).astype(dtype)
    np.add.at(wanted, places, values)
    out = cupy.arange(6).astype(dtype)
    with fakecuda.order("both"), fakecuda.counting() as during:
        xp.scatter(out, (cupy.asarray(places),), cupy.asarray(values), "add")
    assert during["launches"] == 1
    np.testing.assert_array_equal(out.get(), wanted)
    np.testing.assert_array_equal(xp.bincount(cupy.asarray(places), minlength=6).get(), np.bincount(places, minlength=6))
    assert fakecuda.report() == []


@pytest.mark.parametrize("key", [(0, 0), (2**32 + 7, 3), (2**62 + 5, 2**40 + 1)])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5), (1023,)])
def test_words_of_philox_are_those_of_the_host(xp: Any, cupy: Any, key: tuple[int, int], shape: tuple[int, ...]) -> None:
    given = np.array(key, np.int64)
    there = cupy.asarray(given)
    with fakecuda.counting() as during:
        words = philox(xp, there, shape)
    assert during["launches"] == (0 not in shape) and during["to_host"] == 0
    expected = philox(HOST, given, shape)
    assert words.dtype == expected.dtype == np.uint32 and words.shape == shape
    np.testing.assert_array_equal(words.get(), expected)
