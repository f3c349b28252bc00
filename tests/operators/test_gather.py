"""Reading and writing by indices, against loops over coordinates."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

F = np.float32
RNG = np.random.default_rng(7)
WORDS = np.array([["a", "", "b"], ["\0c\0", "é", "a"]], object)
NUMBERS = np.array([[1, 0, 1], [0, 1, 1]])
MOVED = [WORDS, *(NUMBERS.astype(t) for t in (bool, np.uint8, np.int16, np.uint64, np.float16, np.float64, np.complex64)),
         NUMBERS.astype(ml_dtypes.bfloat16)]  # fmt: skip


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("x", MOVED, ids=lambda x: str(x.dtype))
def test_every_dtype_moves(check: Any, x: np.ndarray) -> None:
    flat = [x[i, j] for i in range(2) for j in range(3)]

    def made(values: list[Any], *shape: int) -> np.ndarray:
        y = np.empty(len(values), x.dtype)
        y[:] = values
        return y.reshape(shape)

    a, b, c, d, e, f = flat
    check("Gather", [x, ints(-1, 0)], [made([c, a, f, d], 2, 2)], opset=13, axis=1)
    check("Gather", [x.reshape(-1), np.array(3)], [made([d])], opset=13)
    check("GatherElements", [x, ints([0, 1, -1])], [made([a, e, f], 1, 3)], opset=13)
    check("GatherND", [x, ints([1, 0], [0, -1])], [made([d, c], 2)], opset=13)
    check("GatherND", [x, ints(1, 0)], [made([d])], opset=13)
    check("ScatterElements", [x, ints([1, 0, 0]), x[:1]], [made([a, b, c, a, e, f], 2, 3)], opset=18)
    check("ScatterND", [x, ints([0]), x[1:]], [made([d, e, f] * 2, 2, 3)], opset=18)
    check("Compress", [x, np.array([True, False, True])], [made([a, c, d, f], 2, 2)], opset=11, axis=1)
    check("NonZero", [x], [np.array([[i, j] for i in range(2) for j in range(3) if x[i, j]]).T], opset=13)


@pytest.mark.parametrize("opset", [1, 11, 13])
def test_gather(check: Any, fails: Any, opset: int) -> None:
    x = np.arange(24, dtype=np.int64).reshape(2, 3, 4) + 2**53
    i = ints([0, -1], [1, 1], [-3, 2])
    for axis in (1, -2):
        y = np.array([[[[x[n, k, m] for m in range(4)] for k in row] for row in i.tolist()] for n in range(2)])
        check("Gather", [x, i.astype(np.int32)], [y], opset=opset, axis=axis)
    check("Gather", [x, np.array(1)], [x[1]], opset=opset)
    check("Gather", [x, ints()], [x[:0]], opset=opset)
    check("Gather", [x[:, :0], ints()], [x[:, :0]], opset=opset, axis=1)
    check("Gather", [x[:, :0], ints(1)], [x[1:, :0]], opset=opset)
    for bad in (3, -4):
        fails("Gather", [x, ints(0, bad)], f"SX401.*index .* got {bad}", opset=opset, axis=1)
    fails("Gather", [x[:0], ints(0)], "SX401", opset=opset)
    fails("Gather", [x, ints(0)], "axis must be in .* got 3", opset=opset, axis=3)
    fails("Gather", [np.array(1, F), np.array(0)], "axis must be in .* got 0", opset=opset)


@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_gather_and_scatter_elements(check: Any, fails: Any, opset: int, axis: int) -> None:
    x = RNG.standard_normal((3, 4, 2))
    shape = [2, 3, 2]
    shape[axis] = min(2, x.shape[axis])
    i = np.argsort(RNG.random((3, 4, 2)), axis=axis)[tuple(slice(n) for n in shape)] - x.shape[axis] * RNG.integers(0, 2, shape)
    y, z, updates = np.zeros(shape), x.copy(), RNG.standard_normal(shape)
    for at in np.ndindex(*shape):
        there = list(at)
        there[axis] = i[at]
        y[at], z[tuple(there)] = x[tuple(there)], updates[at]
    check("GatherElements", [x, i], [y], opset=opset, axis=axis)
    check("ScatterElements", [x, i.astype(np.int32), updates], [z], opset=opset, axis=axis)
    if opset == 11:
        for old in (9, 11):
            check("Scatter", [x, i, updates], [z], opset=old, axis=axis)
    check("GatherElements", [x, i[:0]], [y[:0]], opset=opset, axis=axis)
    check("ScatterElements", [x, i[:0], updates[:0]], [x], opset=opset, axis=axis)
    for bad in (x.shape[axis], -x.shape[axis] - 1):
        wrong = np.full((1, 1, 1), bad)
        fails("GatherElements", [x, wrong], "SX401", opset=opset, axis=axis)
        fails("ScatterElements", [x, wrong, np.ones((1, 1, 1))], "SX401", opset=opset, axis=axis)


def test_elements_that_do_not_fit(fails: Any) -> None:
    x = np.zeros((2, 2), F)
    fails("GatherElements", [x, ints([0, 1, 0])], "rank of data and fit it", opset=13)
    fails("GatherElements", [x, ints(0)], "rank of data and fit it", opset=13)
    fails("ScatterElements", [x, ints([0, 1]), np.zeros((1, 1), F)], "updates and indices must have equal shapes", opset=13)
    fails("ScatterElements", [x, ints([0, 1, 0]), np.zeros((1, 3), F)], "rank of data and fit it", opset=13)


REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("opset", [16, 18])
@pytest.mark.parametrize("reduction", ["none", *REDUCTIONS])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.float16, ml_dtypes.bfloat16])
def test_scatters_accumulate(check: Any, fails: Any, opset: int, reduction: str, dtype: Any) -> None:
    """Indices that name one place twice meet there; without a reduction they may not."""
    x, updates = RNG.integers(1, 5, (3, 4)).astype(dtype), RNG.integers(1, 5, (2, 4)).astype(dtype)
    i = ints([0, 1, 2, -1], [1, 1, -1, 2]) if reduction == "none" else ints([0, 1, 2, -1], [0, -2, -1, 2])
    i[1, 1] = 0 if reduction == "none" else i[1, 1]
    i[1, 2:] = ints(0, 0) if reduction == "none" else i[1, 2:]
    if opset == 16 and reduction in ("max", "min"):
        fails("ScatterElements", [x, i, updates], "one of none, add, mul in version", opset=16, reduction=reduction)
        fails("ScatterND", [x, ints([0], [0]), updates], "one of none, add, mul in version", opset=16, reduction=reduction)
        return
    f = REDUCTIONS.get(reduction, lambda _, new: new)
    y = x.copy()
    for a, b in np.ndindex(2, 4):
        y[i[a, b], b] = f(y[i[a, b], b], updates[a, b])
    check("ScatterElements", [x, i, updates], [y], opset=opset, reduction=reduction)
    y = x.copy()
    rows = [2, -3] if reduction == "none" else [2, -1]
    for row, values in zip(rows, updates, strict=True):
        y[row] = f(y[row], values)
    check("ScatterND", [x, ints([rows[0]], [rows[1]]), updates], [y], opset=opset, reduction=reduction)


def test_half_sums_round_once(check: Any) -> None:
    """2048 + 1 is 2048 in float16, but 2048 + 64 is 2112."""
    x, ones, at = np.array([2048], np.float16), np.ones(64, np.float16), np.zeros((64, 1), np.int64)
    check("ScatterND", [x, at, ones], [np.array([2112], np.float16)], opset=18, reduction="add")
    check("ScatterElements", [x, at[:, 0], ones], [np.array([2112], np.float16)], opset=18, reduction="add")


def test_scatter_keeps_every_bit(check: Any) -> None:
    big = 2**53
    check("ScatterND", [ints(big, big), ints([1]), ints(1)], [ints(big, big + 1)], opset=16, reduction="add")
    check("ScatterElements", [ints(big + 1, 0), ints(1), ints(big + 3)], [ints(big + 1, big + 3)], opset=13)
    x = np.array([1, np.nan], F)
    check("ScatterElements", [x, ints(0, 1), np.array([np.nan, 1], F)], [np.full(2, np.nan, F)], opset=18, reduction="max")


@pytest.mark.parametrize("opset", [11, 12, 13])
def test_gather_nd(check: Any, fails: Any, opset: int) -> None:
    x = RNG.standard_normal((2, 3, 4))
    i = ints([[0, 2], [1, -1]], [[-2, 0], [1, 1]], [[0, 0], [0, 0]])
    y = np.array([[x[tuple(at)] for at in row] for row in i.tolist()])
    check("GatherND", [x, i], [y], opset=opset)
    check("GatherND", [x, ints(1, 2, 3)], [np.array(x[1, 2, 3])], opset=opset)
    check("GatherND", [x, np.zeros((0, 2), np.int64)], [np.zeros((0, 4))], opset=opset)
    for bad in ([2, 0], [0, 3], [-3, 0], [0, -4]):
        fails("GatherND", [x, ints(bad)], "SX401", opset=opset)
    fails("GatherND", [x, np.zeros((1, 4), np.int64)], "indices must match data", opset=opset)
    fails("GatherND", [x, np.zeros((1, 0), np.int64)], "indices must match data", opset=opset)


@pytest.mark.parametrize("opset", [12, 13])
@pytest.mark.parametrize("batch", [1, 2])
def test_gather_nd_in_batches(check: Any, fails: Any, opset: int, batch: int) -> None:
    x = RNG.standard_normal((2, 3, 4, 2))
    lead = x.shape[:batch]
    i = RNG.integers(-2, 2, (*lead, 5, 1))
    y = np.zeros((*lead, 5, *x.shape[batch + 1 :]))
    for at in np.ndindex(*lead, 5):
        y[at] = x[(*at[:batch], i[at][0])]
    check("GatherND", [x, i], [y], opset=opset, batch_dims=batch)
    check("GatherND", [x, i[..., 0, :]], [y[(slice(None),) * batch + (0,)]], opset=opset, batch_dims=batch)
    fails("GatherND", [x, i[:1]], "indices must match data", opset=opset, batch_dims=batch)


@pytest.mark.parametrize("opset", [11, 13, 16, 18])
def test_scatter_nd(check: Any, fails: Any, opset: int) -> None:
    x = RNG.standard_normal((3, 4, 2))
    y, updates = x.copy(), RNG.standard_normal((2, 1, 2))
    y[0, 3], y[2, 0] = updates[:, 0]
    check("ScatterND", [x, ints([[0, -1]], [[-1, 0]]), updates], [y], opset=opset)
    y = x.copy()
    y[1, 2, 0] = 9
    check("ScatterND", [x, ints(1, 2, 0), np.array(9.0)], [y], opset=opset)
    check("ScatterND", [x, np.zeros((0, 1), np.int64), np.zeros((0, 4, 2))], [x], opset=opset)
    check("ScatterND", [x[0, 0], np.zeros((1, 0), np.int64), np.ones((1, 2))], [np.ones(2)], opset=opset)
    for bad in ([3, 0], [0, 4], [-4, 0], [0, -5]):
        fails("ScatterND", [x, ints(bad), np.zeros((1, 2))], "SX401", opset=opset)
    fails("ScatterND", [x, ints([0]), np.zeros((1, 4, 1))], "updates must match data", opset=opset)
    fails("ScatterND", [x, ints([0, 0, 0, 0]), np.zeros(1)], "indices must match data", opset=opset)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.uint4,
              ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu, object],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(check: Any, dtype: Any, mode: str) -> None:
    past, update = np.array([["z", "p"][i % 2] for i in range(40)], object), np.array(["u"] * 24, object)
    if dtype is not object:
        past, update = np.array([[1, 2][i % 2] for i in range(40)]).astype(dtype), np.array([4] * 24).astype(dtype)
    past, update = past.reshape(2, 2, 5, 2), update.reshape(2, 2, 3, 2)
    start = ints(2, 0) if mode == "linear" else ints(4, 11)
    y = past.copy()
    for n, s in np.ndindex(2, 3):
        y[n, :, (start[n] + s) % 5] = update[n, :, s]
    check("TensorScatter", [past, update, start], [y], opset=24, mode=mode)
    flipped = [np.swapaxes(a, 1, 2) for a in (past, update, y)]
    check("TensorScatter", [flipped[0], flipped[1], start], [flipped[2]], opset=24, mode=mode, axis=1)
    y = past.copy()
    y[:, :, :3] = update
    check("TensorScatter", [past, update], [y], opset=24, mode=mode)
    check("TensorScatter", [past, update[:, :, :0], start], [past], opset=24, mode=mode)


def test_tensor_scatter_errors(fails: Any) -> None:
    past, update = np.zeros((2, 5, 3), F), np.zeros((2, 2, 3), F)
    fails("TensorScatter", [past, update, ints(4, 0)], "SX401", opset=24)
    fails("TensorScatter", [past, update, ints(0, -1)], "SX401", opset=24)
    fails("TensorScatter", [past, update, ints(0)], r"write_indices must have shape \(2,\)", opset=24)
    fails("TensorScatter", [past, update[:1]], "update must fit a cache", opset=24)
    fails("TensorScatter", [update, past], "update must fit a cache", opset=24)
    fails("TensorScatter", [past, past], "batch axis", opset=24, axis=0)
    fails("TensorScatter", [past, past], "mode must be linear or circular", opset=24, mode="ring")


@pytest.mark.parametrize("opset", [9, 11, 28])
def test_compress(check: Any, fails: Any, opset: int) -> None:
    x = np.array([[1, 2], [3, 4], [5, 6]], F)
    check("Compress", [x, np.array([False, True, True])], [x[1:]], opset=opset, axis=0)
    check("Compress", [x, np.array([True])], [x[:, :1]], opset=opset, axis=1)
    check("Compress", [x, np.array([False, True])], [x[:, 1:]], opset=opset, axis=-1)
    check("Compress", [x, np.array([False, True, False, True])], [np.array([2, 4], F)], opset=opset)
    check("Compress", [x, np.zeros(0, bool)], [np.zeros(0, F)], opset=opset)
    check("Compress", [x[:0], np.zeros(0, bool)], [x[:0]], opset=opset, axis=0)
    check("Compress", [x, np.array([True, False, False, False])], [x[:1]], opset=opset, axis=0)
    fails("Compress", [x, np.array([True, False, False, True])], "SX401", opset=opset, axis=0)
    fails("Compress", [x, np.ones((1, 1), bool)], "rank 1", opset=opset)


@pytest.mark.parametrize("opset", [9, 13])
def test_non_zero(check: Any, opset: int) -> None:
    x = np.array([[1, 0, np.nan], [-0.0, 5, 0]], F)
    check("NonZero", [x], [ints([0, 0, 1], [0, 2, 1])], opset=opset)
    check("NonZero", [np.zeros((2, 3), F)], [np.zeros((2, 0), np.int64)], opset=opset)
    check("NonZero", [np.zeros((0, 3), F)], [np.zeros((2, 0), np.int64)], opset=opset)
    check("NonZero", [np.array(7, F)], [np.zeros((0, 1), np.int64)], opset=opset)  # a scalar has no axes
    check("NonZero", [np.array(0, F)], [np.zeros((0, 0), np.int64)], opset=opset)
