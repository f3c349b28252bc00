"""Reductions of many elements are as exact as those of few: in float32, within 1e-6 of the largest value in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.helpers.recorded_steps import close, differentiated, record

from singa._core.ops import op
from singa_backend import SingaBackend
from singa_backend.devices.sums import running, total
from singa_backend.kernels.table import Options

LARGEST = 1e-6
F, Array = np.float32, np.ndarray
Shape = tuple[int, ...]


def drawn(*shape: int, seed: int = 0) -> Array:
    """Numbers of either sign whose mean is not 0, so that rounding errors of their sum add up."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape, F) + F(0.5)


def node(kind: str, inputs: Sequence[Array], version: int = 22, **attributes: Any) -> onnx.ModelProto:
    """A model of one node whose first input is the model's and the others are initializers."""
    names = [f"x{i}" for i in range(len(inputs))]
    graph = helper.make_graph(
        [helper.make_node(kind, names, ["y"], **attributes)], "g",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, inputs[0].shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(a, n) for a, n in zip(inputs[1:], names[1:], strict=True)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


def standardized(x: Array, axes: Shape, epsilon: float) -> Array:
    d = x - x.mean(axes, keepdims=True)
    return d / np.sqrt((d * d).mean(axes, keepdims=True) + epsilon)


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def spatial(x: Array) -> Shape:
    return tuple(range(2, x.ndim))


FORMULAS: list[tuple[str, dict[str, Any], tuple[int, ...], Callable[[Array], Array]]] = [
    ("ReduceSum", {}, (), lambda x: x.sum(tuple(range(x.ndim)), keepdims=True)),
    ("ReduceMean", {}, (), lambda x: x.mean(tuple(range(x.ndim)), keepdims=True)),
    ("ReduceMean", {}, (0,), lambda x: x.mean(0, keepdims=True)),
    ("ReduceMean", {}, (1,), lambda x: x.mean(1, keepdims=True)),
    ("ReduceSum", {}, (0, 2), lambda x: x.sum((0, 2), keepdims=True)),
    ("ReduceL1", {}, (0,), lambda x: np.abs(x).sum(0, keepdims=True)),
    ("ReduceL2", {}, (1, 2), lambda x: np.sqrt((x * x).sum((1, 2), keepdims=True))),
    ("ReduceSumSquare", {}, (0, 1), lambda x: (x * x).sum((0, 1), keepdims=True)),
    ("ReduceLogSumExp", {}, (0,), lambda x: np.log(np.exp(x).sum(0, keepdims=True))),
    ("GlobalAveragePool", {}, (), lambda x: x.mean(spatial(x), keepdims=True)),
    ("GlobalLpPool", {}, (), lambda x: np.sqrt((x * x).sum(spatial(x), keepdims=True))),
    ("Softmax", {"axis": 1}, (), lambda x: softmax(x, 1)),
    ("Softmax", {"axis": -1}, (), lambda x: softmax(x, -1)),
    ("LogSoftmax", {"axis": 1}, (), lambda x: np.log(softmax(x, 1))),
    ("MeanVarianceNormalization", {"axes": [0, 2]}, (), lambda x: standardized(x, (0, 2), 0)),
    ("LpNormalization", {"axis": 1}, (), lambda x: x / np.sqrt((x * x).sum(1, keepdims=True))),
]  # fmt: skip
"""An operator, its attributes, the axes that are its second input, and the formula."""

SHAPES = [(4100, 3, 301), (3, 260_000, 5), (2, 2, 1 << 20), (1, 5, 600_001)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "attributes", "axes", "formula"), FORMULAS, ids=lambda v: str(v) if isinstance(v, (str, tuple)) else ""
)
def test_formulas(kind: str, attributes: dict[str, Any], axes: Shape, formula: Callable[[Array], Array], shape: Shape) -> None:
    x = drawn(*shape)
    inputs, expected = [x, np.array(axes, np.int64)] if axes else [x], formula(x.astype(np.float64))
    for device in ("CPU", "STRICT"):
        rep = SingaBackend.prepare(node(kind, inputs, **attributes), device)
        for turn in ("first", "second"):
            close(rep.run([x])[0], expected, LARGEST, f"the {turn} run on {device}")


def image(size: int) -> list[Array]:
    channels = 3
    return [drawn(1, channels, size, size), *(drawn(channels, seed=s) for s in (1, 2))]


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
def test_instance_normalization_of_a_large_image(device: str) -> None:
    inputs = image(2048)
    x, scale, b = (v.astype(np.float64) for v in inputs)
    expected = standardized(x, (2, 3), 1e-5) * scale.reshape(3, 1, 1) + b.reshape(3, 1, 1)
    close(SingaBackend.prepare(node("InstanceNormalization", inputs), device).run(inputs[:1])[0], expected, LARGEST)


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("kind", ["ReduceMean", "GlobalAveragePool"])
def test_means_of_2_to_the_24_elements(kind: str, device: str) -> None:
    x = drawn(1, 1, 1 << 12, 1 << 12)
    close(SingaBackend.prepare(node(kind, [x]), device).run([x])[0].reshape(()), x.mean(dtype=np.float64), LARGEST)


@pytest.mark.parametrize("counts", [1, 0])
def test_average_pools_of_large_windows(counts: int) -> None:
    x, window = drawn(1, 3, 700, 900), (600, 500)
    sums = np.zeros((1, 3, 701, 901))
    sums[..., 1:, 1:] = x.astype(np.float64).cumsum(2).cumsum(3)
    (h, w), expected = window, sums
    expected = (sums[..., h:, w:] - sums[..., :-h, w:] - sums[..., h:, :-w] + sums[..., :-h, :-w]) / (h * w)
    y = SingaBackend.prepare(node("AveragePool", [x], kernel_shape=window, count_include_pad=counts)).run([x])[0]
    close(y, expected, LARGEST)


LONG = (1, 3, 1100, 1000)

TRAINED: dict[str, tuple[Callable[..., Any], list[Array], list[int]]] = {
    "InstanceNormalization": (op.InstanceNormalization, [drawn(*LONG), drawn(3), drawn(3)], [0, 1, 2]),
    "GroupNormalization": (
        lambda *v: op.GroupNormalization(*v, num_groups=2), [drawn(2, 4, 700, 700), drawn(4), drawn(4)], [0, 1, 2]
    ),
    "BatchNormalization": (
        lambda *v: op.BatchNormalization(*v, training_mode=1, outputs=3)[0],
        [drawn(3, 5, 600, 500), drawn(5), drawn(5), np.zeros(5, F), np.ones(5, F)],
        [0, 1, 2],
    ),
    "LayerNormalization of long rows": (op.LayerNormalization, [drawn(3, 300_007), drawn(300_007), drawn(300_007)], [0, 1, 2]),
    "LayerNormalization of many rows": (op.LayerNormalization, [drawn(100_003, 9), drawn(9), drawn(9)], [0, 1, 2]),
    "RMSNormalization": (op.RMSNormalization, [drawn(70_001, 24), drawn(24)], [0, 1]),
    "Softmax": (lambda v: op.Softmax(v, axis=1), [drawn(2, 200_001, 3)], [0]),
    "GlobalAveragePool": (op.GlobalAveragePool, [drawn(*LONG)], [0]),
    "ReduceMean": (op.ReduceMean, [drawn(1 << 20)], [0]),
    "Add of a bias": (op.Add, [drawn(400_001, 7), drawn(7)], [0, 1]),
    "Mul by a scale": (op.Mul, [drawn(4, 3, 500, 500), drawn(3, 1, 1)], [0, 1]),
    "PRelu": (op.PRelu, [drawn(4, 3, 500, 500), drawn(3, 1, 1)], [0, 1]),
    "Conv": (lambda *v: op.Conv(*v, pads=[1] * 4), [drawn(1, 2, 600, 600), drawn(4, 2, 3, 3), drawn(4)], [2]),
    "SoftmaxCrossEntropyLoss": (
        lambda x: op.SoftmaxCrossEntropyLoss(x, np.arange(300_001) % 5), [drawn(300_001, 5)], [0]
    ),
}  # fmt: skip
"""A function, its arguments and those that are trained."""


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str) -> None:
    function, arrays, needs = TRAINED[name]
    body, inputs = differentiated(function, arrays, needs)
    expected = record(body, [a.astype(np.float64) if a.dtype == F else a for a in inputs], needs, Options(level=0)).run()
    for level in (Options(), Options(level=0)):
        step = record(body, inputs, needs, level)
        for turn in ("first", "second"):
            for n, (a, e) in enumerate(zip(step.run(), expected, strict=True)):
                close(a, e, 2 * LARGEST, f"result {n} of the {turn} run")  # sums of terms of either sign


# --- the sums themselves


ORDERS: dict[str, Callable[[Array], Array]] = {
    "C": lambda x: x,
    "F": np.asfortranarray,
    "reversed": lambda x: x[::-1],
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "shape", [(129,), (128, 7), (5, 1000, 3), (1, 4099, 2, 2), (300, 300), (2, 131, 1), (7, 130, 11, 13)], ids=str
)
def test_sums_of_any_memory_order(shape: Shape, order: str) -> None:
    x = ORDERS[order](drawn(*shape))
    for bits in range(1, 1 << len(shape)):
        axes = tuple(a for a in range(len(shape)) if bits >> a & 1)
        for keep in (True, False):
            actual, expected = total(np, x, axes, keep), x.sum(axes, np.float64, keepdims=keep)
            assert actual.shape == expected.shape and actual.dtype == F
            largest = float(np.abs(x).sum(axes, np.float64).max())
            assert np.abs(actual - expected).max() <= LARGEST * largest, (axes, keep)


@pytest.mark.parametrize("shape", [(4096,), (5000, 3), (2, 4100, 40), (3, 1 << 16)], ids=str)
def test_running_sums(shape: Shape) -> None:
    x = drawn(*shape)
    for axis in range(len(shape)):
        close(running(np, x, axis), x.cumsum(axis, np.float64), LARGEST)


def test_sums_that_are_infinite_or_not_numbers_are_those_of_numpy() -> None:
    x = drawn(4099, 6)
    x[7, 0], x[8, 1], x[9, 2], x[10, 2] = np.inf, np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(total(np, x, (0,), False), x.sum(0), rtol=1e-5)


def test_float64_and_integers_keep_their_dtype() -> None:
    assert total(np, np.ones((500, 3)), (0,), False).dtype == np.float64
    x = np.full((500, 3), 1 << 40)
    assert total(np, x, (0,), False).tolist() == [500 << 40] * 3 and math.prod(x.shape) == 1500
