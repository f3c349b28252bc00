"""SINGA's operators as functions and classes: values against NumPy, gradients against differences, losses, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from singa import autograd
from singa._core.tensor import Tensor
from singa_backend.errors import InvalidInput


@pytest.fixture(autouse=True)
def training() -> Any:
    autograd.training = True
    yield
    autograd.training = False


RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4)) * 0.4 + 1.5
Y = RNG.standard_normal((3, 4)) * 0.4 + 0.3
SQUARE = RNG.standard_normal((3, 3))
IMAGE = RNG.standard_normal((2, 4, 4, 6))


def leaf(a: Any, name: str = "x") -> Tensor:
    return Tensor(data=np.array(a), stores_grad=True, name=name)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "relu": (autograd.relu, lambda x: np.maximum(x, 0), (Y,)),
    "sigmoid": (autograd.sigmoid, sigmoid, (X,)),
    "tan": (autograd.tan, np.tan, (Y,)),
    "acosh": (autograd.acosh, np.arccosh, (X + 1,)),
    "softplus": (autograd.softplus, lambda x: np.log1p(np.exp(x)), (X,)),
    "softsign": (autograd.softsign, lambda x: x / (1 + np.abs(x)), (X,)),
    "leakyrelu": (lambda x: autograd.leakyrelu(x, 0.3), lambda x: np.where(x > 0, x, 0.3 * x), (Y,)),
    "elu": (lambda x: autograd.elu(x, 0.5), lambda x: np.where(x > 0, x, 0.5 * np.expm1(x)), (Y,)),
    "hardsigmoid": (autograd.hardsigmoid, lambda x: np.clip(0.2 * x + 0.5, 0, 1), (Y,)),
    "clip": (lambda x: autograd.clip(x, 0.1, 0.6), lambda x: np.clip(x, 0.1, 0.6), (Y,)),
    "softmax": (autograd.softmax, lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True), (X,)),
    "add": (autograd.add, np.add, (X, Y)),
    "div": (autograd.div, np.divide, (Y, X)),
    "pow": (autograd.pow, np.power, (X, Y)),
    "matmul": (autograd.matmul, np.matmul, (X, Y.T.copy())),
    "gemm": (lambda a, b, c: autograd.gemm(a, b, c, 0.5, 2.0, 0, 1), lambda a, b, c: 0.5 * a @ b.T + 2 * c, (X, Y, SQUARE)),
    "sum": (autograd.sum, lambda *xs: xs[0] + xs[1] + xs[2], (X, Y, X)),
    "mean": (autograd.mean, lambda *xs: (xs[0] + xs[1]) / 2, (X, Y)),
    "max": (autograd.max, np.maximum, (X, Y)),
    "add_bias": (lambda x, b: autograd.add_bias(x, b, 1), lambda x, b: x + b[:, None], (X, np.arange(3.0))),
    "cossim": (autograd.cossim, lambda a, b: (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1), (X, Y)),
    "reshape": (lambda x: autograd.reshape(x, [2, -1]), lambda x: x.reshape(2, -1), (X,)),
    "transpose": (lambda x: autograd.transpose(x, [1, 0]), np.transpose, (X,)),
    "unsqueeze": (lambda x: autograd.unsqueeze(x, [0, 2]), lambda x: x[None, :, None], (X,)),
    "cat": (lambda a, b: autograd.cat([a, b], 1), lambda a, b: np.concatenate([a, b], 1), (X, Y)),
    "slice": (lambda x: autograd.slice(x, [1], [4], [1], [2]), lambda x: x[:, 1:4:2], (X,)),
    "tile": (lambda x: autograd.tile(x, [2, 1]), lambda x: np.tile(x, (2, 1)), (X,)),
    "expand": (lambda x: autograd.expand(x, [2, 3, 4]), lambda x: np.broadcast_to(x, (2, 3, 4)), (X,)),
    "pad": (lambda x: autograd.pad(x, "reflect", [1, 0, 1, 2]), lambda x: np.pad(x, [(1, 1), (0, 2)], "reflect"), (X,)),
    "gather": (lambda x: autograd.gather(x, 1, [0, -1, 0]), lambda x: x[:, [0, -1, 0]], (X,)),
    "where": (lambda a, b: autograd.where(a, b, X > 1.5), lambda a, b: np.where(X > 1.5, a, b), (X, Y)),
    "reduce_mean": (lambda x: autograd.reduce_mean(x, [1], 0), lambda x: x.mean(1), (X,)),
    "globalaveragepool": (autograd.globalaveragepool, lambda x: x.mean((2, 3), keepdims=True), (IMAGE,)),
    "upsample": (lambda x: autograd.upsample(x, "nearest", [1, 1, 2, 3]), lambda x: x.repeat(2, 2).repeat(3, 3), (IMAGE,)),
    "space_to_depth": (lambda x: autograd.depth_to_space(autograd.space_to_depth(x, 2, "CRD"), 2, "CRD"), lambda x: x, (IMAGE,)),
    "embedding": (lambda w: autograd.embedding(Tensor(data=np.array([2.0, 0.0])), w), lambda w: w[[2, 0]], (X,)),
    "ranking_loss": (lambda a, b: autograd.ranking_loss(a, b, 0.5), lambda a, b: np.maximum(0, 0.5 - a + b).mean()[None], (X, Y)),
    "mse_loss": (lambda a, b: autograd.mse_loss(a, b), lambda a, b: np.mean((a - b) ** 2)[None], (X, Y)),
    "cross_entropy": (lambda x: autograd.cross_entropy(x, Tensor(data=Y)), lambda x: -(Y * np.log(x)).sum()[None] / 3, (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, against_formula: Any) -> None:
    function, want, arrays = CASES[name]
    against_formula(function, want, arrays, 1e-5, 1e-7)


def test_a_class_takes_the_options_and_gives_a_tuple() -> None:
    x = leaf(Y)
    assert np.array_equal(autograd.LeakyRelu(0.3)(x)[0].data, autograd.leakyrelu(x, 0.3).data)
    assert [p.shape for p in autograd.Split(1, [1, 3])(x)] == [(3, 1), (3, 3)]
    tanh = autograd.Tanh()
    y = tanh.forward(Y)
    np.testing.assert_allclose(tanh.backward(np.ones_like(y)), 1 - y * y)
    with pytest.raises(TypeError, match="does not take 'beta'"):
        autograd.LeakyRelu(beta=1)
    with pytest.raises(InvalidInput, match="every input of ReLU must be a Tensor, got ndarray"):
        autograd.relu(Y)


def test_rounding_and_comparisons_have_no_gradient() -> None:
    x = leaf(np.array([-2.5, -0.5, 0.5, 2.5]))
    assert autograd.round(x).data.tolist() == [-3, -1, 1, 3]
    assert autograd.rounde(x).data.tolist() == [-2, 0, 0, 2]
    assert not autograd.ceil(x).requires_grad
    assert not autograd.less(x, x).requires_grad
    assert autograd._not(x).data.tolist() == [False] * 4


SCORES = RNG.standard_normal((4, 3))


@pytest.mark.parametrize("labels", [
    np.array([0, 2, 1, 1]), np.array([[0], [2], [1], [1]], np.int32), np.array([0.0, 2.0, 1.0, 1.0]), np.eye(3)[[0, 2, 1, 1]],
    2 * np.eye(3)[[0, 2, 1, 1]],
])  # fmt: skip
def test_softmax_cross_entropy(labels: Any) -> None:
    x = leaf(SCORES)
    loss = autograd.softmax_cross_entropy(x, Tensor(data=labels, requires_grad=False))
    p = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)
    hot = np.eye(3)[[0, 2, 1, 1]]
    assert loss.shape == (1,)
    np.testing.assert_allclose(loss.data[0], -(hot * np.log(p)).sum() / 4)
    ((_, g),) = list(autograd.backward(loss))
    np.testing.assert_allclose(g.data, (p - hot) / 4, atol=1e-12)


@pytest.mark.parametrize(("labels", "code"), [
    (np.array([0, 1, 2, 3]), "SX335"), (np.array([0, -1, 2, 1]), "SX335"), (np.array([0.5, 1, 2, 1]), "SX335"),
    (np.array([0, 1]), "SX334"), (np.eye(4), "SX334"), (np.array([True] * 4), "SX335"),
])  # fmt: skip
def test_labels_that_cannot_be(labels: Any, code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        autograd.softmax_cross_entropy(leaf(SCORES), Tensor(data=labels, requires_grad=False))
    assert caught.value.code == code


def test_binary_cross_entropy() -> None:
    p, t = np.clip(sigmoid(SCORES), 0.1, 0.9), (SCORES > 0).astype(float)
    want = -(t * np.log(p) + (1 - t) * np.log(1 - p)).sum() / 4
    np.testing.assert_allclose(autograd.binary_cross_entropy(leaf(p), Tensor(data=t)).data, [want])


@pytest.mark.parametrize(("dtype", "most"), [(np.float64, 100), (np.float32, 80), (ml_dtypes.bfloat16, 80), (np.float16, 9)])
def test_the_slope_of_a_binary_cross_entropy_is_that_of_its_logit(dtype: Any, most: int) -> None:
    """sigmoid(z) - t, also where the prediction is wrong; 0 log 0 is 0, and probabilities of 0 and 1 are finite."""
    for z in (-most, -most / 6, -3.0, 0.5):
        x = leaf(np.array([[z]], dtype))
        loss = autograd.binary_cross_entropy(autograd.sigmoid(x), Tensor(data=np.ones((1, 1), dtype)))
        ((_, slope),) = autograd.backward(loss)
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(np.float64(slope.data), sigmoid(np.array([[z]])) - 1, rtol=8 * eps)
    for name in ("binary_cross_entropy", "cross_entropy"):
        x = leaf(np.array([[0, 1, 0, 1]], dtype))
        loss = getattr(autograd, name)(x, Tensor(data=np.array([[0, 1, 1, 0]], dtype)))
        ((_, slope),) = autograd.backward(loss)
        right = getattr(autograd, name)(leaf(np.array([[0, 1]], dtype)), Tensor(data=np.array([[0, 1]], dtype)))
        assert np.isfinite(np.float64(loss.data)).all() and np.isfinite(np.float64(slope.data)[0, :2]).all()
        assert right.data[0] == 0


def test_dropout_in_inference_is_the_identity_and_its_seed_is_not_its_ratio() -> None:
    autograd.training = False
    x = leaf(X)
    assert np.array_equal(autograd.dropout(x).data, X)
    with pytest.warns(UserWarning, match=r"write ratio=0\.3"):
        autograd.dropout(x, 0.3)
    with pytest.raises(InvalidInput, match=r"ratio must be in \[0, 1\), got 1\.0"):
        autograd.dropout(x, ratio=1.0)


def test_by_handle() -> None:
    x, w, b = leaf(IMAGE), leaf(RNG.standard_normal((3, 4, 3, 3)), "w"), leaf(np.ones(3), "b")
    handle = autograd.ConvHandle(pads=(1, 1, 1, 1))
    assert autograd.conv2d(handle, x, w, b).shape == (2, 3, 4, 6)
    assert autograd.conv2d(autograd.ConvHandle(), x, w, b, odd_padding=(0, 2, 0, 1)).shape == (2, 3, 4, 5)
    pooled = autograd.pooling_2d(autograd.PoolingHandle((2, 2), (2, 2)), x)
    np.testing.assert_array_equal(pooled.data, IMAGE.reshape(2, 4, 2, 2, 3, 2).max((3, 5)))
    mean, var = Tensor(data=np.zeros(4)), Tensor(data=np.ones(4))
    autograd.batchnorm_2d(autograd.BatchNormHandle(0.25), x, leaf(np.ones(4)), leaf(np.zeros(4)), mean, var)
    np.testing.assert_allclose(mean.data, 0.25 * IMAGE.mean((0, 2, 3)))
    np.testing.assert_allclose(var.data, 0.75 + 0.25 * IMAGE.transpose(1, 0, 2, 3).reshape(4, -1).var(1, ddof=1))


def test_broadcasting_is_undone_for_operators_of_users() -> None:
    assert autograd.axis_helper((2, 3, 4), (3, 1)) == (0, 2)
    assert autograd.back_broadcast((2, 3, 4), (3, 1), np.ones((2, 3, 4))).tolist() == [[8.0]] * 3


def test_layers_are_found_here_too() -> None:
    from singa import layer

    assert autograd.Linear is layer.Linear
    with pytest.raises(AttributeError):
        _ = autograd.Nonsense
