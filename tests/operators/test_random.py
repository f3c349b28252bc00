"""Random operators: their distributions at fixed seeds, their types, the streams behind them; Dropout in every version."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import AttributeProto, TensorProto, helper

from singa_backend import SingaBackend

N = 20000
TYPES = {
    TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64,
    TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}  # fmt: skip


@pytest.fixture(params=["CPU", "STRICT"])
def draw(request: pytest.FixtureRequest) -> Any:
    """draw(op, inputs, opset, **attributes) -> the first output"""

    def run(op: str, inputs: list[Any], opset: int, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"x{i}" for i in range(len(inputs))]
        node = helper.make_node(op, names, [f"y{i}" for i in range(outputs)])
        for name, value in attributes.items():
            kind = AttributeProto.INTS if isinstance(value, list) else None
            node.attribute.append(helper.make_attribute(name, value, attr_type=kind))
        results = SingaBackend.run_node(node, inputs, request.param, opset_version=opset)
        return results[0] if outputs == 1 else results

    return run


def distance(sample: np.ndarray, cdf: Any) -> float:
    """Kolmogorov and Smirnov's: how far the sample's distribution is from this one."""
    x = np.sort(sample.astype(np.float64).ravel())
    steps = np.arange(len(x) + 1) / len(x)
    y = np.array([cdf(v) for v in x])
    return float(max((y - steps[:-1]).max(), (steps[1:] - y).max()))


LIMIT = 1.95 / math.sqrt(N)  # one sample in a thousand lies farther


@pytest.mark.parametrize("opset", [1, 22])
def test_uniform(draw: Any, opset: int) -> None:
    for op, inputs, extra in (
        ("RandomUniform", [], {"shape": [N // 10, 10]}),
        ("RandomUniformLike", [np.zeros((N // 10, 10), np.float32)], {}),
    ):
        x = draw(op, inputs, opset, low=-1.0, high=3.0, seed=3.0, **extra)
        assert x.shape == (N // 10, 10) and x.dtype == np.float32
        assert x.min() >= -1 and x.max() <= 3
        assert distance(x, lambda v: (v + 1) / 4) < LIMIT
        unit = draw(op, inputs, opset, seed=4.0, **extra)
        assert distance(unit, lambda v: v) < LIMIT and unit.min() >= 0 and unit.max() <= 1


@pytest.mark.parametrize("opset", [1, 22])
def test_normal(draw: Any, opset: int) -> None:
    for op, inputs, extra in (
        ("RandomNormal", [], {"shape": [N]}),
        ("RandomNormalLike", [np.zeros(N, np.float64)], {"dtype": TensorProto.FLOAT}),
    ):
        x = draw(op, inputs, opset, mean=2.0, scale=3.0, seed=1.0, **extra)
        assert x.shape == (N,) and x.dtype == np.float32
        assert distance(x, lambda v: (1 + math.erf((v - 2) / 3 / math.sqrt(2))) / 2) < LIMIT
        plain = draw(op, inputs, opset, seed=2.0, **extra)
        assert distance(plain, lambda v: (1 + math.erf(v / math.sqrt(2))) / 2) < LIMIT


@pytest.mark.parametrize("op", ["RandomUniform", "RandomNormal"])
@pytest.mark.parametrize("opset", [1, 22])
def test_types_shapes_and_seeds(draw: Any, opset: int, op: str) -> None:
    for code, dtype in TYPES.items():
        if opset == 22 or code != TensorProto.BFLOAT16:
            x = draw(op, [], opset, shape=[2, 3], dtype=code, seed=9.0)
            assert x.dtype == dtype and x.shape == (2, 3)
            like = draw(op + "Like", [np.zeros((2, 3), dtype)], opset, seed=9.0)
            assert like.dtype == dtype
            np.testing.assert_array_equal(x, like)
            given = draw(op + "Like", [np.zeros((2, 3), np.int32)], opset, seed=9.0, dtype=code)
            np.testing.assert_array_equal(x, given)
    assert draw(op, [], opset, shape=[], seed=1.0).shape == ()
    assert draw(op, [], opset, shape=[2, 0], seed=1.0).shape == (2, 0)
    assert draw(op + "Like", [np.array([["a"], ["b"]], object)], opset, dtype=1).shape == (2, 1)

    def sample(**seed: float) -> bytes:
        return bytes(draw(op, [], opset, shape=[8], **seed).tobytes())

    seeds = [0.0, 1.0, -1.0, 0.25, 0.5, 1.5, 1e20, math.inf]
    assert len({sample(seed=s) for s in seeds}) == len(seeds)
    assert all(sample(seed=s) == sample(seed=s) for s in seeds)
    assert sample() != sample()


def test_a_whole_seed_is_that_of_random_state(draw: Any) -> None:
    stream = np.random.RandomState(5)
    np.testing.assert_array_equal(
        draw("RandomUniform", [], 22, shape=[4], seed=5.0, dtype=TensorProto.DOUBLE), stream.uniform(0, 1, 4)
    )
    stream = np.random.RandomState(5)
    np.testing.assert_array_equal(
        draw("RandomNormal", [], 22, shape=[4], seed=5.0, dtype=TensorProto.DOUBLE), stream.standard_normal(4)
    )


def test_errors_of_random_tensors(fails: Any) -> None:
    fails("RandomUniform", [], "bfloat16, got int64", opset=22, shape=[2], dtype=TensorProto.INT64)
    fails("RandomNormalLike", [np.zeros(2, np.int64)], "bfloat16, got int64", opset=22)
    fails("RandomNormal", [], "negative size", opset=1, shape=[-1])


@pytest.mark.parametrize("opset", [15, 22])
def test_bernoulli(draw: Any, opset: int) -> None:
    p = np.repeat([0.0, 0.1, 0.5, 0.9, 1.0], 4000).reshape(5, 4000)
    for dtype in (np.float64, np.float32, np.float16):
        y = draw("Bernoulli", [p.astype(dtype)], opset, seed=1.0)
        assert y.dtype == dtype and set(np.unique(y)) == {0, 1}
        mean = y.astype(np.float64).mean(1)
        assert mean[0] == 0 and mean[4] == 1
        assert np.all(abs(mean - p[:, 0]) <= 4 * np.sqrt(p[:, 0] * (1 - p[:, 0]) / 4000))
    bf = ml_dtypes.bfloat16
    for code, dtype in (
        (TensorProto.BOOL, bool),
        (TensorProto.INT8, np.int8),
        (TensorProto.UINT64, np.uint64),
        (TensorProto.BFLOAT16, bf),
    ):
        z = draw("Bernoulli", [p.astype(np.float32)], opset, seed=1.0, dtype=code)
        assert z.dtype == dtype
    assert (draw("Bernoulli", [p], opset) != draw("Bernoulli", [p], opset)).any()
    np.testing.assert_array_equal(draw("Bernoulli", [p], opset, seed=0.5), draw("Bernoulli", [p], opset, seed=0.5))
    assert draw("Bernoulli", [np.float32(1)], opset).shape == ()


@pytest.mark.parametrize("opset", [7, 22])
def test_multinomial(draw: Any, opset: int) -> None:
    p = np.array([[0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    with np.errstate(divide="ignore"):
        x = np.add(np.log(p), [[5], [-900], [0]])  # unnormalised
    for dtype in (np.float32, np.float64, np.float16):
        y = draw("Multinomial", [x.astype(dtype)], opset, sample_size=N, seed=2.0)
        assert y.shape == (3, N) and y.dtype == np.int32
        share = np.stack([(y == c).mean(1) for c in range(3)], 1)
        assert np.all(abs(share - p) <= 4 * np.sqrt(p * (1 - p) / N) + 2e-3 * (dtype == np.float16))
    z = draw("Multinomial", [x], opset, dtype=TensorProto.INT64)
    assert z.shape == (3, 1) and z.dtype == np.int64
    first, second = (draw("Multinomial", [x], opset, sample_size=9, seed=1.0) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert draw("Multinomial", [x[:0]], opset, sample_size=4).shape == (0, 4)


def test_errors_of_multinomial(fails: Any) -> None:
    fails("Multinomial", [np.full((1, 2), -np.inf)], "log-probability of row 0 must be finite", opset=22)
    fails("Multinomial", [np.array([[np.nan, 1.0]])], "log-probability of row 0 must be finite", opset=7)
    fails("Multinomial", [np.zeros((2, 0))], "log-probability of row 0 must be finite", opset=7)
    fails("Multinomial", [np.zeros(3)], "x must be a matrix", opset=7)
    fails("Multinomial", [np.zeros((1, 3))], "int32 or int64", opset=7, dtype=TensorProto.FLOAT)


X = np.random.default_rng(0).standard_normal((50, 40))


# No seed can be given before opset 12: six deviations happen once in 500 million runs.


@pytest.mark.parametrize("opset", [1, 6])
def test_dropout_trained_by_default_before_7(draw: Any, check: Any, opset: int) -> None:
    extra = {"consumed_inputs": [0]} if opset == 1 else {}
    for dtype in (np.float32, np.float64, np.float16):
        x = X.astype(dtype)
        y, mask = draw("Dropout", [x], opset, 2, ratio=0.25, **extra)
        assert mask.dtype == dtype and set(np.unique(mask)) == {0, 1}
        assert abs(mask.astype(float).mean() - 0.75) < 6 * math.sqrt(0.25 * 0.75 / X.size)
        np.testing.assert_allclose(y.astype(float), x.astype(float) * mask.astype(float) / 0.75, rtol=1e-3)
        assert (mask != draw("Dropout", [x], opset, 2, ratio=0.25, **extra)[1]).any()
        check("Dropout", [x], [x], opset=opset, is_test=1, ratio=0.25, **extra)
        check("Dropout", [x], [x, np.ones_like(x)], opset=opset, is_test=1, **extra)
    share = (draw("Dropout", [X], opset, **extra) == 0).mean()
    assert abs(share - 0.5) < 6 * 0.5 / math.sqrt(X.size)


def test_dropout_of_7_and_10_copies(check: Any) -> None:
    for dtype in (np.float32, np.float64, np.float16):
        x = X.astype(dtype)
        for opset, kind in ((7, dtype), (10, bool)):
            check("Dropout", [x], [x], opset=opset, ratio=0.9)
            check("Dropout", [x], [x, np.ones(x.shape, kind)], opset=opset)


@pytest.mark.parametrize("opset", [12, 13, 22])
def test_dropout(draw: Any, check: Any, opset: int) -> None:
    on, half = np.array(True), np.float32(0.25)
    for dtype in (np.float32, np.float64, np.float16):
        x = X.astype(dtype)
        mask = np.random.RandomState(3).uniform(0, 1, x.shape) >= 0.25
        check("Dropout", [x, half, on], [(x.astype(float) * mask / 0.75).astype(dtype), mask], opset=opset, seed=3, rtol=1e-5)
        all_of_it = [x, np.ones(x.shape, bool)]
        for inputs in ([x], [x, half], [x, half, ~on], [x, np.float64(0), on]):
            check("Dropout", inputs, all_of_it, opset=opset)
            check("Dropout", inputs, all_of_it[:1], opset=opset, seed=1)
        mask = np.random.RandomState(2**32 - 1).uniform(0, 1, x.shape) >= 0.5
        check("Dropout", [x, None, on], [(x.astype(float) * mask * 2).astype(dtype), mask], opset=opset, seed=-1)
    first, second = (draw("Dropout", [X, np.float64(0.5), on], opset, 2)[1] for _ in range(2))
    assert (first != second).any() and abs(first.mean() - 0.5) < 6 * 0.5 / math.sqrt(X.size)
    check("Dropout", [X[:0], half, on], [X[:0], np.ones((0, 40), bool)], opset=opset)


def test_dropout_of_float8(check: Any) -> None:
    x, ratio = np.array([1, -2, 3.5, 0.5]).astype(ml_dtypes.float8_e4m3fn), np.asarray(0.5, ml_dtypes.bfloat16)
    check("Dropout", [x], [x], opset=22)
    mask = np.random.RandomState(1).uniform(0, 1, 4) >= 0.5
    check("Dropout", [x, ratio, np.array(True)], [(x.astype(float) * mask * 2).astype(x.dtype), mask], opset=22, seed=1)


def test_errors_of_dropout(fails: Any) -> None:
    for ratio in (1.0, -0.5, math.nan):
        fails("Dropout", [X, np.float32(ratio), np.array(True)], r"ratio must be in \[0, 1\)", opset=13)
