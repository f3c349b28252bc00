"""Normalizations, against plain NumPy in float64, one version after the other."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

rng = np.random.default_rng(11)
EPS = float(np.float32(1e-5))


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


def batch_norm(x: np.ndarray, s: np.ndarray, b: np.ndarray, m: np.ndarray, v: np.ndarray, epsilon: float = EPS) -> np.ndarray:
    """One channel after the other."""
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        y[:, c] = (x[:, c] - m[c]) / np.sqrt(v[c] + epsilon) * s[c] + b[c]
    return y


def batch(*shape: int) -> tuple[np.ndarray, ...]:
    """x, scale, B, mean, var"""
    c = shape[1]
    return normal(*shape) * 3 + 1, normal(c), normal(c), normal(c), rng.uniform(0.5, 2, c)


def statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    columns = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    return columns.mean(1), ((columns - columns.mean(1)[:, None]) ** 2).mean(1)


def to(dtype: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    return [a.astype(dtype) for a in arrays]


@pytest.mark.parametrize("shape", [(2, 3), (4, 3, 2), (2, 3, 4, 5), (1, 2, 2, 2, 3), (0, 3, 2)])
@pytest.mark.parametrize("opset", [1, 6, 7, 9, 14, 15])
def test_batch_norm_inference(check: Any, opset: int, shape: tuple[int, ...]) -> None:
    given = batch(*shape)
    extra: dict[str, Any] = {"is_test": 1} if opset < 7 else {}
    extra |= {"consumed_inputs": [0, 0, 0, 1, 1]} if opset == 1 else {}
    y = batch_norm(*given)
    for dtype, rtol in ((np.float64, 1e-12), (np.float32, 1e-4), (np.float16, 5e-3)):
        check("BatchNormalization", to(dtype, *given), [y.astype(dtype)], opset=opset, rtol=rtol, atol=rtol, **extra)
    y = batch_norm(*given, epsilon=0.5)
    check(
        "BatchNormalization",
        to(np.float32, *given),
        [y.astype(np.float32)],
        opset=opset,
        rtol=1e-4,
        atol=1e-5,
        epsilon=0.5,
        **extra,
    )


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (2, 3, 4, 5)])
@pytest.mark.parametrize("opset", [1, 6, 7, 9, 14, 15])
def test_batch_norm_training(check: Any, opset: int, shape: tuple[int, ...]) -> None:
    x, s, b, m, v = given = batch(*shape)
    mean, var = statistics(x)
    momentum = float(np.float32(0.3))
    outputs = [batch_norm(x, s, b, mean, var), m * momentum + mean * (1 - momentum), v * momentum + var * (1 - momentum)]
    if opset < 14:
        outputs += [mean, var]
    extra: dict[str, Any] = {"training_mode": 1} if opset >= 14 else {}
    extra |= {"consumed_inputs": [0, 0, 0, 1, 1]} if opset == 1 else {}
    for dtype, rtol in ((np.float64, 1e-12), (np.float32, 1e-4)):
        check(
            "BatchNormalization", to(dtype, *given), to(dtype, *outputs), opset=opset, rtol=rtol, atol=rtol, momentum=0.3, **extra
        )
    if opset not in (7, 9):  # there one output means inference
        check(
            "BatchNormalization", to(np.float32, *given), to(np.float32, outputs[0]), opset=opset, rtol=1e-4, atol=1e-4, **extra
        )


def test_batch_norm_not_spatial(check: Any) -> None:
    """Each element of a sample has statistics of its own."""
    x, (s, b, m), v = normal(4, 2, 3), normal(3, 2, 3), rng.uniform(0.5, 2, (2, 3))
    y = (x - m) / np.sqrt(v + EPS) * s + b
    mean, var = x.mean(0), x.var(0)
    trained = (x - mean) / np.sqrt(var + EPS) * s + b
    f = np.float64
    for opset in (1, 6, 7):
        extra = {"consumed_inputs": [0]} if opset == 1 else {}
        test = {"is_test": 1} if opset < 7 else {}
        check("BatchNormalization", to(f, x, s, b, m, v), [y], opset=opset, rtol=1e-12, spatial=0, **extra, **test)
        out = [trained, m / 2 + mean / 2, v / 2 + var / 2, mean, var]
        check("BatchNormalization", to(f, x, s, b, m, v), out, opset=opset, rtol=1e-12, spatial=0, momentum=0.5, **extra)
    # Versions 1 and 6 call scale, B, mean and var one-dimensional of size C even here.
    c = [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0]), np.array([7.0, 8.0])]
    check("BatchNormalization", [x, *c], [batch_norm(x, *c)], opset=6, rtol=1e-12, spatial=0, is_test=1)


def test_batch_norm_of_one_axis(check: Any) -> None:
    x, one = np.array([1.0, 2, 6]), np.array([2.0])
    y = (x - 2) / np.sqrt(2 + EPS) * 2 + 2
    check("BatchNormalization", [x, one, one, one, one], [y], opset=9, rtol=1e-12)
    out = [(x - 3) / np.sqrt(14 / 3 + EPS) * 2 + 2, np.array([2.5]), np.array([1 + 7 / 3])]
    check("BatchNormalization", [x, one, one, one, one], out, opset=15, training_mode=1, momentum=0.5, rtol=1e-12)


def test_batch_norm_mixed_types(check: Any) -> None:
    x, s, b, m, v = batch(4, 3, 2)
    mean, var = statistics(x.astype(np.float16).astype(float))
    given = [x.astype(np.float16), s.astype(np.float32), b.astype(np.float32), m, v]
    out = [batch_norm(x, s, b, mean, var).astype(np.float16), m * 0.5 + mean * 0.5, v * 0.5 + var * 0.5]
    check("BatchNormalization", given, out, opset=15, training_mode=1, momentum=0.5, rtol=1e-5, atol=5e-3)
    bf = ml_dtypes.bfloat16
    y = batch_norm(x, s, b, m, v).astype(bf)
    check("BatchNormalization", to(bf, x, s, b, m, v), [y], opset=14, atol=0.1)


@pytest.mark.parametrize("training", [0, 1])
def test_batch_norm_of_doubles_with_narrow_statistics(check: Any, training: int) -> None:
    """The statistics are read as they are, and everything that comes of them is as exact as x."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((4, 2, 3))
    scale, b, mean, var = (rng.uniform(0.5, 2, 2).astype(np.float16) for _ in range(4))
    m, v = (x.mean((0, 2)), x.var((0, 2))) if training else (mean.astype(float), var.astype(float))
    y = (x - m[:, None]) / np.sqrt(v[:, None] + 1e-3) * scale.astype(float)[:, None] + b.astype(float)[:, None]
    statistics = [(mean * 0.9 + m * 0.1).astype(np.float16), (var * 0.9 + v * 0.1).astype(np.float16)] if training else []
    check("BatchNormalization", [x, scale, b, mean, var], [y, *statistics], opset=15, rtol=1e-12 if not training else 2e-3,
          epsilon=1e-3, training_mode=training)  # fmt: skip


def test_batch_norm_errors(fails: Any) -> None:
    x, *p = to(np.float32, *batch(2, 3, 4))
    for opset, extra in ((14, {}), (6, {"is_test": 1})):
        fails("BatchNormalization", [x, *p], "in training mode only", opset=opset, outputs=3, **extra)
    fails("BatchNormalization", [x, p[0][:2], *p[1:]], "scale must hold one value for each channel", opset=15)


def moments(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + EPS)


@pytest.mark.parametrize("opset", [1, 6, 22])
def test_instance_norm(check: Any, opset: int) -> None:
    x, s, b = normal(2, 3, 4, 5) + 2, normal(3), normal(3)
    y = moments(x, (2, 3)) * s[:, None, None] + b[:, None, None]
    extra = {"consumed_inputs": [0]} if opset == 1 else {}
    for dtype, tol in ((np.float64, 1e-10), (np.float32, 1e-4), (np.float16, 2e-2)):
        check("InstanceNormalization", to(dtype, x, s, b), [y.astype(dtype)], opset=opset, rtol=tol, atol=tol, **extra)
    z = moments(x[:, :, 0], (2,)) * s[:, None] + b[:, None]
    given = to(np.float32, x[:, :, 0], s, b)
    check("InstanceNormalization", given, [z.astype(np.float32)], opset=opset, rtol=1e-3, atol=1e-4, **extra)
    no_spread = to(np.float32, np.stack([b, b]))
    check("InstanceNormalization", to(np.float32, x[:, :, 0, 0], s, b), no_spread, opset=opset, **extra)


def test_group_norm(check: Any) -> None:
    x = normal(2, 6, 3, 2) * 2 + 1
    plain = moments(x.reshape(2, 3, -1), (2,)).reshape(x.shape)
    s, b = normal(6), normal(6)
    y = plain * s[:, None, None] + b[:, None, None]
    z = plain * s[:3].repeat(2)[:, None, None] + b[:3].repeat(2)[:, None, None]
    for dtype, tol in ((np.float64, 1e-10), (np.float32, 1e-4), (np.float16, 2e-2), (ml_dtypes.bfloat16, 5e-2)):
        check("GroupNormalization", to(dtype, x, s, b), [y.astype(dtype)], opset=21, num_groups=3, rtol=tol, atol=tol)
        check("GroupNormalization", to(dtype, x, s[:3], b[:3]), [z.astype(dtype)], opset=18, num_groups=3, rtol=tol, atol=tol)
    one = np.ones(6), np.zeros(6)
    for g, axes in ((1, (1, 2, 3)), (6, (2, 3))):
        check("GroupNormalization", [x, *one], [moments(x, axes)], opset=21, num_groups=g, rtol=1e-10)
    check(
        "GroupNormalization",
        [x[:, :, 0, 0], *one],
        [moments(x[:, :, 0, 0].reshape(2, 2, 3), (2,)).reshape(2, 6)],
        opset=21,
        num_groups=2,
    )


def test_group_norm_errors(fails: Any) -> None:
    x, one = np.ones((2, 6, 2), np.float32), np.ones(6, np.float32)
    fails("GroupNormalization", [x, one, one], "num_groups must divide the channels", opset=21, num_groups=4)
    fails("GroupNormalization", [x, one, one], "scale must hold one value for each channel", opset=18, num_groups=3)
    fails("GroupNormalization", [x, one, one], "stash_type must be a float type", opset=21, num_groups=3, stash_type=7)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_layer_norm(check: Any, axis: int) -> None:
    x = normal(2, 3, 4) * 2 + 1
    axes = tuple(range(axis % 3, 3))
    s, b = normal(*x.shape[axis % 3 :]), normal(*x.shape[axis % 3 :])
    mean = x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(x.var(axes, keepdims=True) + EPS)
    y = (x - mean) * inverse * s + b
    for dtype, tol in ((np.float64, 1e-6), (np.float32, 1e-4), (np.float16, 2e-2)):
        saved = to(np.float32, mean, inverse)
        check("LayerNormalization", to(dtype, x, s, b), [y.astype(dtype), *saved], opset=17, axis=axis, rtol=tol, atol=tol)
    check("LayerNormalization", [x, s], [y - b], opset=17, axis=axis, rtol=1e-10)  # doubles stay doubles
    bf = ml_dtypes.bfloat16
    out = [y.astype(bf), mean.astype(bf), inverse.astype(bf)]
    check("LayerNormalization", to(bf, x, s, b), out, opset=17, axis=axis, stash_type=16, atol=0.06)
    check("LayerNormalization", [x, np.array([2.0])], [(x - mean) * inverse * 2], opset=17, axis=axis, rtol=1e-10)


def test_rms_norm(check: Any) -> None:
    x, s = normal(2, 3, 4), normal(3, 4)
    y = x / np.sqrt((x * x).mean((1, 2), keepdims=True) + EPS) * s
    for dtype, tol in ((np.float64, 1e-10), (np.float32, 1e-5), (np.float16, 5e-3), (ml_dtypes.bfloat16, 3e-2)):
        check("RMSNormalization", to(dtype, x, s), [y.astype(dtype)], opset=23, axis=1, rtol=tol, atol=tol)
    check("RMSNormalization", [x.astype(np.float32), s.astype(np.float16)], [y.astype(np.float16)], opset=23, axis=-2, atol=2e-3)
    last = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    check("RMSNormalization", [x, np.ones(4)], [last], opset=23)
    check("RMSNormalization", [x.astype(np.float32), np.ones(4, np.float32)], to(np.float32, last), opset=23, stash_type=11)


def test_layer_errors(fails: Any) -> None:
    x, s = np.ones((2, 3), np.float32), np.ones((4, 2, 3), np.float32)
    fails("LayerNormalization", [x, s], "Scale of shape", opset=17)
    fails("LayerNormalization", [x, x, s], "B of shape", opset=17)
    fails("LayerNormalization", [x, x], "axis must be in .* got 2", opset=17, axis=2)
    fails("RMSNormalization", [x, s], "scale of shape", opset=23)


def test_mean_variance_norm(check: Any) -> None:
    x = normal(2, 3, 4, 5) * 2 + 3
    for opset in (9, 13):
        y = (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True)
        check("MeanVarianceNormalization", [x], [y], opset=opset, rtol=1e-7)
        check("MeanVarianceNormalization", [x.astype(np.float16)], [y.astype(np.float16)], opset=opset, atol=2e-3)
        y = (x[0] - x[0].mean(1, keepdims=True)) / x[0].std(1, keepdims=True)
        check("MeanVarianceNormalization", to(np.float32, x[0]), to(np.float32, y), opset=opset, axes=[1], rtol=1e-4, atol=1e-5)
        check("MeanVarianceNormalization", [np.full((2, 3), 0.1)], [np.zeros((2, 3))], opset=opset, axes=[0, -1], atol=1e-6)


@pytest.mark.parametrize("opset", [1, 22])
def test_lp_norm(check: Any, opset: int) -> None:
    x = np.array([[3, -4], [0, 0], [1, 0]], np.float32)
    check("LpNormalization", [x], [np.array([[0.6, -0.8], [0, 0], [1, 0]], np.float32)], opset=opset)
    check("LpNormalization", [x], [np.array([[3 / 7, -4 / 7], [0, 0], [1, 0]], np.float32)], opset=opset, p=1)
    check("LpNormalization", [x], [np.array([[0.75, -1], [0, 0], [0.25, 0]], np.float32)], opset=opset, p=1, axis=0)
    check("LpNormalization", [x[:, None]], [np.array([[[0.6, -0.8]], [[0, 0]], [[1, 0]]], np.float32)], opset=opset, axis=2)
    check("LpNormalization", [x.astype(np.float64)], [x / np.sqrt([[25.0], [1], [1]])], opset=opset, rtol=1e-14)
    check("LpNormalization", [np.array([300, -400], np.float16)], [np.array([0.6, -0.8], np.float16)], opset=opset)
    check("LpNormalization", [x[:0]], [x[:0]], opset=opset)
    check("LpNormalization", [np.array([np.nan, 1], np.float32)], [np.array([np.nan, np.nan], np.float32)], opset=opset)


def test_lp_norm_errors(fails: Any) -> None:
    fails("LpNormalization", [np.ones((2, 2), np.float32)], "p must be 1 or 2", opset=22, p=3)
    fails("LpNormalization", [np.ones((2, 2), np.float32)], "axis must be in .* got 2", opset=1, axis=2)


@pytest.mark.parametrize("opset", [1, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12])
def test_lrn(check: Any, opset: int, size: int) -> None:
    x = normal(2, 5, 3, 2)
    y = np.empty_like(x)
    alpha, beta, bias = float(np.float32(0.3)), 0.5, 2.0
    for c in range(5):
        low, high = max(0, c - (size - 1) // 2), min(4, c + -(-(size - 1) // 2))
        total = sum(x[:, i] ** 2 for i in range(low, high + 1))
        y[:, c] = x[:, c] / (bias + alpha / size * total) ** beta
    check("LRN", [x], [y], opset=opset, size=size, alpha=0.3, beta=0.5, bias=2.0, rtol=1e-12)
    check("LRN", [x[:, :, 0, 0]], [y[:, :, 0, 0]], opset=opset, size=size, alpha=0.3, beta=0.5, bias=2.0, rtol=1e-12)
    check("LRN", to(np.float16, x), to(np.float16, y), opset=opset, size=size, alpha=0.3, beta=0.5, bias=2.0, atol=2e-3)
    check("LRN", [x[:, :0]], [x[:, :0]], opset=opset, size=size)


def test_lrn_defaults(check: Any, fails: Any) -> None:
    x = np.full((1, 1, 2), 2, np.float32)
    check("LRN", [x], [x / np.float32((1 + 1e-4 / 3 * 4) ** 0.75)], opset=13, size=3)
    fails("LRN", [x], "size must be at least 1 .* got 0", opset=13, size=0)
