"""Functions of several ONNX operators, and layers that normalize: values, gradients, sizes that stay open, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from singa import autograd, layer, sonnx, tensor
from singa._core.tensor import Tensor
from singa_backend.errors import InvalidInput

RNG = np.random.default_rng(4)
X = RNG.standard_normal((3, 4)) * 2
Y = np.abs(RNG.standard_normal((3, 4))) + 0.3
IMAGES = RNG.standard_normal((2, 3, 5, 7))


@pytest.fixture(autouse=True)
def training() -> Iterator[None]:
    autograd.training = True
    yield
    autograd.training = False


def leaf(a: Any, name: str = "x") -> Tensor:
    return Tensor(data=np.array(a), stores_grad=True, name=name)


def adaptive(x: Any, sizes: tuple[int, int], how: Any) -> Any:
    """By its definition, one window after the other."""
    h, w = x.shape[2:]
    out = np.empty((*x.shape[:2], *sizes))
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            window = x[:, :, i * h // sizes[0] : -(-(i + 1) * h // sizes[0]), j * w // sizes[1] : -(-(j + 1) * w // sizes[1])]
            out[:, :, i, j] = how(window, axis=(2, 3))
    return out


def standard(x: Any, axes: Any) -> Any:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "square": (autograd.square, np.square, (X,)),
    "rsqrt": (autograd.rsqrt, lambda x: x**-0.5, (Y,)),
    "quick_gelu": (autograd.quick_gelu, lambda x: x / (1 + np.exp(-np.float64(np.float32(1.702)) * x)), (X,)),
    "squared_difference": (autograd.squared_difference, lambda a, b: (a - b) ** 2, (X, Y)),
    "floor_mod": (autograd.floor_mod, np.mod, (X, Y)),
    "bias_add": (lambda x, b: autograd.bias_add(x, b, -3), lambda x, b: x + b[:, None, None], (IMAGES, RNG.standard_normal(3))),
    "narrow": (lambda x: autograd.narrow(x, 1, -3, 2), lambda x: x[:, -3:-1], (X,)),
    "flatten": (lambda x: autograd.flatten(x, -3, -2), lambda x: x.reshape(2, 15, 7), (IMAGES,)),
    "var": (lambda x: autograd.var(x, [1]), lambda x: x.var(1, ddof=1, keepdims=True), (X,)),
    "var of all": (lambda x: autograd.var(x, unbiased=False, keepdims=0), np.var, (X,)),
    "std": (lambda x: autograd.std(x, [0, -1]), lambda x: x.std((0, 3), ddof=1, keepdims=True), (IMAGES,)),
    "adaptive mean": (lambda x: autograd.adaptive_avg_pool(x, (2, 3)), lambda x: adaptive(x, (2, 3), np.mean), (IMAGES,)),
    "adaptive mean of more": (lambda x: autograd.adaptive_avg_pool(x, 8), lambda x: adaptive(x, (8, 8), np.mean), (IMAGES,)),
    "adaptive mean of one": (lambda x: autograd.adaptive_avg_pool(x, 1), lambda x: x.mean((2, 3), keepdims=True), (IMAGES,)),
    "adaptive max": (lambda x: autograd.adaptive_max_pool(x, (3, 7)), lambda x: adaptive(x, (3, 7), np.max), (IMAGES,)),
    "layer norm": (lambda x: layer.LayerNorm(-2)(x), lambda x: standard(x, (2, 3)), (IMAGES,)),
    "rms norm": (lambda x: layer.RMSNorm()(x), lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5), (X,)),
    "group norm": (lambda x: layer.GroupNorm(2)(x), lambda x: standard(x.reshape(3, 2, 2), 2).reshape(3, 4), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, against_formula: Any) -> None:
    function, want, arrays = CASES[name]
    against_formula(function, want, arrays, 1e-4, 1e-6)


def test_norms_have_parameters() -> None:
    norm = layer.LayerNorm(axis=1)
    norm(leaf(X))
    assert {n: p.shape for n, p in norm.get_params().items()} == {"scale": (4,), "bias": (4,)}
    assert set(layer.LayerNorm(bias=False).get_params()) == set()
    grouped = layer.GroupNorm(3)
    grouped(leaf(IMAGES))
    assert grouped.scale.shape == (3,)
    for wrong in (layer.LayerNorm(axis=3), layer.GroupNorm(3)):
        with pytest.raises(InvalidInput, match=r"must be in the shape|a multiple"):
            wrong(leaf(X))


def test_variances_of_one_number_and_of_none() -> None:
    one = leaf([[3.0]])
    assert np.isnan(autograd.var(one, [1]).data).all() and autograd.var(one, [1], unbiased=False).data == 0
    none = leaf(np.zeros((2, 0)))
    assert np.isnan(autograd.var(none, [1]).data).all() and autograd.var(none, [0]).shape == (1, 0)


def test_axes_that_are_none() -> None:
    x = leaf(IMAGES)
    for wrong in (
        lambda: autograd.flatten(x, 2, 1),
        lambda: autograd.flatten(x, 0, 4),
        lambda: autograd.bias_add(x, leaf(np.ones(3)), 4),
        lambda: autograd.adaptive_avg_pool(x, (2, 2, 2)),
        lambda: autograd.adaptive_max_pool(x, 0),
    ):
        with pytest.raises(InvalidInput, match="shape"):
            wrong()
    assert autograd.flatten(leaf(3.0), 0, -1).shape == (1,)
    assert autograd.flatten(leaf(np.zeros((2, 0, 3))), 1, 2).shape == (2, 0)


def test_sizes_stay_open_in_an_export() -> None:
    x = leaf(IMAGES)
    autograd.training = False
    h = leaf(RNG.standard_normal((4, 2, 18)), "h")
    scores, values = autograd.fused_self_attention_query_mul_key_and_value(h, head_size=3, alpha=0.5)
    ys = [autograd.flatten(x, 1, 2), autograd.var(x, [0, 1]), autograd.adaptive_avg_pool(x, (2, 3)), scores, values]
    proto = sonnx.to_onnx([x, h], ys, dynamic_axes={"x": [0], "h": [0, 1]})
    bigger, longer = RNG.standard_normal((5, 3, 5, 7)), RNG.standard_normal((6, 1, 18))
    found = sonnx.prepare(proto).run([bigger, longer])
    x, h = tensor.from_numpy(bigger), tensor.from_numpy(longer)
    scores, values = autograd.fused_self_attention_query_mul_key_and_value(h, head_size=3, alpha=0.5)
    again = [autograd.flatten(x, 1, 2), autograd.var(x, [0, 1]), autograd.adaptive_avg_pool(x, (2, 3)), scores, values]
    for a, b in zip(found, again, strict=True):
        np.testing.assert_allclose(a, b.data, rtol=1e-12)


def test_a_masked_softmax_drops_in_training_only() -> None:
    x, bias, mask = leaf(X), leaf(np.zeros(4)), tensor.from_numpy(np.array([1.0, 1.0, 0.0, 1.0]))
    y = autograd.fused_bias_add_scale_mask_softmax_dropout(x, bias, mask, -1e9, 2.0, 0.5)
    autograd.training = False
    whole = autograd.fused_bias_add_scale_mask_softmax_dropout(x, bias, mask, -1e9, 2.0, 0.5)
    e = np.exp(2 * X) * [1, 1, 0, 1]
    np.testing.assert_allclose(whole.data, e / e.sum(1, keepdims=True), rtol=1e-12)
    kept = y.data != 0
    np.testing.assert_allclose(y.data[kept], 2 * whole.data[kept], rtol=1e-6)
    assert 0 < kept.sum() < kept.size - 3
    with pytest.raises(InvalidInput, match=r"p must be in \[0, 1\), got 1\.0"):
        autograd.fused_bias_add_scale_mask_softmax_dropout(x, bias, mask, p=1.0)
