"""Gradient kernels: the gradients of recorded steps by oneDNN's backward primitives equal those of the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import agree, compare, differentiated, gradients_of, normal, record

from singa._core.ops import op
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

EXACT = (False, True)


def id_of(value: Any) -> str:
    return str(value).replace(" ", "") if isinstance(value, (dict, tuple)) else ""


CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 11), (5, 3, 3), {}),
    ((2, 16, 20), (16, 16, 3), {"pads": [1, 1]}),
    ((3, 4, 15), (6, 2, 4), {"group": 2, "strides": [2], "pads": [0, 3]}),
    ((2, 3, 8, 8), (5, 3, 3, 3), {}),
    ((1, 16, 9, 9), (32, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 17, 7, 9), (19, 17, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 1, 8, 8), (1, 1, 3, 3), {}),
    ((2, 3, 13, 12), (8, 3, 5, 3), {"strides": [2, 3], "pads": [2, 1, 2, 1]}),
    ((2, 3, 10, 10), (4, 3, 3, 3), {"strides": [2, 2]}),  # the last row and column are not read
    ((2, 8, 10, 10), (16, 8, 1, 1), {"strides": [2, 2]}),  # three of four cells are not read
    ((2, 8, 10, 10), (16, 8, 1, 1), {"strides": [3, 1]}),
    ((2, 4, 12, 12), (6, 4, 3, 3), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    ((2, 4, 9, 8), (6, 4, 3, 2), {"pads": [0, 1, 2, 0]}),
    ((2, 4, 9, 8), (6, 4, 3, 2), {"pads": [2, 0, 0, 1], "strides": [2, 1]}),
    ((2, 4, 9, 8), (6, 4, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((2, 4, 9, 8), (6, 4, 4, 3), {"auto_pad": "SAME_LOWER"}),
    ((2, 4, 9, 8), (6, 4, 4, 3), {"auto_pad": "VALID"}),
    ((2, 6, 7, 7), (6, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1]}),
    ((2, 16, 9, 9), (16, 1, 3, 3), {"group": 16, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 3, 7, 7), (6, 1, 3, 3), {"group": 3}),
    ((2, 6, 7, 7), (9, 2, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    ((2, 32, 6, 6), (32, 8, 3, 3), {"group": 4, "dilations": [2, 2], "pads": [2, 2, 2, 2]}),
    ((2, 3, 5, 5), (4, 3, 5, 5), {}),  # one window
    ((1, 3, 5, 6, 7), (4, 3, 3, 3, 3), {"pads": [1, 0, 1, 1, 1, 0]}),
    ((2, 4, 6, 6, 6), (4, 2, 2, 3, 2), {"group": 2, "strides": [2, 1, 2], "dilations": [1, 2, 1]}),
]  # fmt: skip
"""The shapes of x and of the filters, and attributes."""


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("x", "w", "attributes"), CONVS, ids=id_of)
def test_conv(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], bias: bool) -> None:
    arrays = [normal(*x), normal(*w, seed=1), *([normal(w[0], seed=2)] if bias else [])]
    compare(lambda *v: op.Conv(*v, **attributes), arrays, range(len(arrays)), joined=["Conv"], exact=bias)


TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 6), (3, 5, 3), {}),
    ((2, 4, 7), (4, 3, 3), {"group": 2, "strides": [2], "output_padding": [1]}),
    ((2, 3, 6, 5), (3, 5, 3, 3), {}),
    ((1, 16, 5, 5), (16, 16, 2, 2), {"strides": [2, 2]}),
    ((2, 17, 5, 4), (17, 9, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((2, 3, 6, 5), (3, 4, 3, 3), {"strides": [3, 2], "output_padding": [2, 1]}),
    ((2, 3, 6, 5), (3, 4, 3, 3), {"pads": [0, 1, 2, 0]}),
    ((2, 3, 6, 5), (3, 4, 3, 2), {"dilations": [2, 1], "pads": [1, 0, 1, 1]}),
    ((2, 6, 5, 5), (6, 1, 3, 3), {"group": 6, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 6, 5, 5), (6, 3, 3, 3), {"group": 2}),
    ((2, 3, 4, 4), (3, 4, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((2, 3, 4, 4), (3, 4, 3, 3), {"output_shape": [9, 8], "strides": [2, 2]}),
    ((1, 3, 3, 4, 3), (3, 4, 2, 3, 2), {"strides": [2, 1, 2], "output_padding": [1, 0, 0]}),
]  # fmt: skip


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("x", "w", "attributes"), TRANSPOSED, ids=id_of)
def test_conv_transpose(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], bias: bool) -> None:
    outputs = w[1] * attributes.get("group", 1)
    arrays = [normal(*x), normal(*w, seed=1), *([normal(outputs, seed=2)] if bias else [])]
    compare(
        lambda *v: op.ConvTranspose(*v, **attributes), arrays, range(len(arrays)), joined=["ConvTranspose"], exact=bias
    )  # fmt: skip


@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=id_of)
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_only_needed_gradients_are_computed(name: str, needs: tuple[int, ...]) -> None:
    """The first layer needs no gradient of its input, and frozen filters need none of theirs."""
    arrays = [normal(2, 6, 8, 8), normal(6, 6, 3, 3, seed=1), normal(6, seed=2)]
    step = compare(lambda *v: getattr(op, name)(*v, strides=[2, 2]), arrays, needs, joined=[name])
    used = [k for k in step.kernels if k.startswith(("conv by", "unpack gradient"))]
    assert any(k.startswith("conv by data") for k in used) == (0 in needs)
    assert any(k.startswith("conv by weights") for k in used) == (bool({1, 2} & set(needs)))


def ties(*shape: int, seed: int = 0) -> np.ndarray:
    """Integers from -2 to 2: most windows have several maxima."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


MAXIMA: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), {"kernel_shape": [3], "strides": [2]}),
    ((2, 3, 8, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((2, 16, 8, 8), {"kernel_shape": [3, 3]}),
    ((1, 17, 9, 7), {"kernel_shape": [3, 2], "strides": [1, 2]}),
    ((2, 3, 8, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 3, 8, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 1, 0]}),
    ((2, 3, 9, 9), {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 0], "ceil_mode": 1}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((2, 3, 5, 5), {"kernel_shape": [5, 5]}),
    ((1, 2, 20, 20), {"kernel_shape": [17, 17]}),  # 289 cells: more than a byte can number
    ((1, 3, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [2, 2, 1]}),
]  # fmt: skip
"""The shape of x, and attributes."""


@pytest.mark.parametrize("values", [ties, normal, lambda *shape: -np.abs(normal(*shape)) - 1], ids=["ties", "normal", "negative"])
@pytest.mark.parametrize(("shape", "attributes"), MAXIMA, ids=id_of)
def test_max_pool(shape: tuple[int, ...], attributes: dict[str, Any], values: Any) -> None:
    step = compare(lambda x: op.MaxPool(x, **attributes), [values(*shape)], [0], joined=["MaxPool"])
    assert step.in_training == ["MaxPool"]


def test_indices_of_maxima_that_the_model_uses_are_refused() -> None:
    x = ties(2, 3, 8, 8)
    step = compare(lambda x: op.MaxPool(x, kernel_shape=[3, 3], outputs=2), [x], [0], joined=[])
    assert "the indices are used" in step.reasons["MaxPool"]
    compare(lambda x: op.MaxPool(x, kernel_shape=[3, 3], storage_order=1), [x], [0], joined=[])


AVERAGES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), {"kernel_shape": [3], "strides": [2]}),
    ((2, 3, 8, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((2, 17, 8, 8), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ((2, 17, 8, 8), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [2, 0, 1, 1], "count_include_pad": 1}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [2, 0, 1, 1]}),
    ((2, 3, 9, 9), {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ((2, 3, 9, 9), {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "count_include_pad": 1}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER", "count_include_pad": 1}),
    ((1, 3, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [2, 2, 1]}),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "attributes"), AVERAGES, ids=id_of)
def test_average_pool(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    compare(lambda x: op.AveragePool(x, **attributes), [normal(*shape)], [0], joined=["AveragePool"], exact=True)


@pytest.mark.parametrize("name", ["MaxPool", "AveragePool"])
def test_dilated_windows_are_refused(name: str) -> None:
    """OneDNN computes them by its reference code, which is slower than the definitions."""
    step = compare(lambda x: getattr(op, name)(x, kernel_shape=[2, 2], dilations=[2, 3]), [normal(2, 3, 9, 9)], [0], joined=[])
    assert "slow reference code" in step.reasons[name]


def test_a_window_beyond_padding_that_counts_is_refused() -> None:
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "count_include_pad": 1, "pads": [1, 1, 0, 0]}
    step = compare(lambda x: op.AveragePool(x, **attributes), [normal(2, 3, 9, 8)], [0], joined=[])
    assert "beyond padding that counts" in step.reasons["AveragePool"]


NORMALIZED = [
    (6, 3), (8, 16), (5, 33), (4, 3, 7), (2, 16, 9), (4, 3, 5, 5), (2, 16, 6, 6), (3, 33, 4, 5), (1, 16, 3, 3), (2, 3, 3, 4, 3),
]  # fmt: skip


def statistics(channels: int) -> list[np.ndarray]:
    """Scale, bias, mean and variance."""
    return [*(normal(channels, seed=i) for i in (1, 2, 3)), np.abs(normal(channels, seed=4)) + np.float32(0.5)]


@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("shape", NORMALIZED, ids=id_of)
def test_batch_normalization_in_training(shape: tuple[int, ...], exact: bool) -> None:
    step = compare(
        lambda *v: op.BatchNormalization(*v, training_mode=1),
        [normal(*shape), *statistics(shape[1])], [0, 1, 2], joined=["BatchNormalization"], exact=exact, tolerance=1e-5,
    )  # fmt: skip
    assert step.in_training == ["BatchNormalization"]


@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (1, 2)], ids=id_of)
def test_batch_normalization_with_frozen_parts(needs: tuple[int, ...]) -> None:
    arrays = [normal(4, 5, 6, 6), *statistics(5)]
    compare(
        lambda *v: op.BatchNormalization(*v, training_mode=1), arrays, needs, joined=["BatchNormalization"], tolerance=1e-5
    )  # fmt: skip


def test_batch_normalization_without_epsilon_is_refused() -> None:
    arrays = [normal(4, 3, 5, 5), *statistics(3)]
    step = compare(
        lambda *v: op.BatchNormalization(*v, training_mode=1, epsilon=0.0), arrays, [0, 1, 2], joined=[], tolerance=1e-5
    )  # fmt: skip
    assert "epsilon is 0" in step.reasons["BatchNormalization"]


@pytest.mark.parametrize("shape", [(4096,), (64, 64), (8, 64, 8), (2, 8, 16, 17), (2, 2, 8, 8, 17)], ids=id_of)
@pytest.mark.parametrize("name", ["Relu", "Sigmoid", "Tanh"])
def test_functions_of_each_element(name: str, shape: tuple[int, ...]) -> None:
    """Of integers too: 0 is a kink of Relu."""
    for x in (normal(*shape), ties(*shape)):
        compare(getattr(op, name), [x], [0], joined=[name], exact=name != "Relu")


@pytest.mark.parametrize("name", ["Relu", "Sigmoid", "Tanh"])
def test_functions_of_few_elements(name: str) -> None:
    compare(getattr(op, name), [normal(2, 5)], [0], joined=[name], exact=name != "Relu")


@pytest.mark.parametrize("name", ["Relu", "Sigmoid", "Tanh"])
def test_broadcast_gradients(name: str) -> None:
    """The gradient of a mean is one number for all elements; here each row has its own."""
    for axes in ([1, 2, 3], [0], [1]):
        compare(
            lambda x, axes=axes: op.ReduceMean(getattr(op, name)(x), axes, keepdims=0), [normal(2, 8, 16, 17)], [0], joined=[name]
        )  # fmt: skip


@pytest.mark.parametrize("name", ["Relu", "Sigmoid", "Tanh"])
def test_results_with_other_readers(name: str) -> None:
    """The result, its square, and the argument, whose memory the gradient must not overwrite."""
    function = getattr(op, name)

    def several(x: Any) -> tuple[Any, ...]:
        y = function(x)
        return y, op.Mul(y, y), op.Neg(x)

    x = normal(2, 8, 16, 17)
    compare(several, [x], [0], joined=[name], tolerance=1e-5)
    compare(lambda x: function(function(x)), [x], [0], joined=[name] * 2, tolerance=1e-5)


@pytest.mark.parametrize("name", ["Relu", "Sigmoid", "Tanh"])
def test_a_gradient_that_is_the_result_or_the_argument(name: str) -> None:
    """Each is the other factor of the loss, x * y or y * y, whose gradient is in the memory of a value that is read again."""

    def body(x: Any) -> list[Any]:
        y = getattr(op, name)(x)
        return gradients_of(op.ReduceSum(op.Mul(op.Mul(y, y), x), keepdims=0), [x])

    agree(body, [normal(64, 65)], [0], joined=[name])


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    arrays = [normal(2, 3, 8, 8).astype(dtype), normal(4, 3, 3, 3, seed=1).astype(dtype)]
    body, given = differentiated(op.Conv, arrays, [0, 1])
    step = record(body, given, [0, 1], Options())
    step.run()
    assert not step.joined and f"the dtype is {np.dtype(dtype).name}" in step.reasons["Conv"]
