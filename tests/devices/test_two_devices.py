"""Constants are moved to the device of the other inputs: functions, losses and optimizers on one that converts no array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper
from tests.helpers import other_device

from singa import autograd, initializer, layer, opt, sonnx, tensor
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor, to_numpy
from singa.device import Device, default_device
from singa.model import Model
from singa.tape import Operator
from singa_backend.errors import InvalidInput

pytestmark = [*other_device.MARKS, pytest.mark.usefixtures("by_definitions")]  # bits are compared with those of the tape
F = np.float32
OTHER = Device(other_device.NAME)
X = np.random.default_rng(0).uniform(0.1, 0.9, (2, 4)).astype(F)
IDS = np.array([1, 0], np.int32)


@pytest.fixture(autouse=True)
def training() -> Any:
    tape.training = True
    yield
    tape.training = False


def on(device: Device, array: Any, **kwargs: Any) -> Tensor:
    return Tensor(data=array, device=device, **kwargs)


FUNCTIONS: dict[str, Any] = {
    "constant on the left": lambda x, ids: op.Sub(op.constant(2.0, F), x),
    "constant on the right": lambda x, ids: op.Mul(x, op.constant([1.0, 2.0, 3.0, 4.0], F)),
    "constant of constants": lambda x, ids: op.Add(op.Mul(op.constant(2.0, F), op.constant(3.0, F)), x),
    "array": lambda x, ids: op.Add(x, np.ones((1, 4), F)),
    "range": lambda x, ids: op.Mul(op.Cast(op.Range(0, 4, 1), to=1), x),
    "constant condition": lambda x, ids: autograd.where(x, autograd.exp(x), np.array([True, False, True, False])),
    "gather": lambda x, ids: autograd.gather(x, 1, [0, -1]),
    "gather by a tensor": lambda x, ids: autograd.gather(x, 0, ids),
    "embedding": lambda x, ids: autograd.embedding(ids, x),
    "onehot": lambda x, ids: autograd.mul(autograd.onehot(-1, ids, 4), x),
    "onehot of values": lambda x, ids: autograd.mul(autograd.onehot(-1, ids, 4, (0.5, 2.0)), x),
    "upsample": lambda x, ids: autograd.upsample(autograd.reshape(x, (1, 1, 2, 4)), "nearest", [1, 1, 2, 2]),
    "pad": lambda x, ids: autograd.pad(x, "constant", [0, 1, 1, 0], 3.0),
    "clip": lambda x, ids: autograd.clip(x, 0.2, 0.6),
    "tile": lambda x, ids: autograd.tile(x, [2, 3]),
    "expand": lambda x, ids: autograd.expand(x, (3, 2, 4)),
    "slice": lambda x, ids: autograd.slice(x, [1], [3], [1]),
    "split": lambda x, ids: autograd.split(x, 1, [1, 3])[1],
    "space to depth": lambda x, ids: autograd.space_to_depth(autograd.reshape(x, (1, 1, 2, 4)), 2, "CRD"),
    "softmax": lambda x, ids: autograd.softmax(x),
    "round": lambda x, ids: autograd.add(autograd.round(x), x),
    "mean of axes": lambda x, ids: autograd.reduce_mean(x, [1]),
    "pooling": lambda x, ids: autograd.globalaveragepool(autograd.reshape(x, (1, 2, 2, 2))),
    "cosine": lambda x, ids: autograd.cossim(x, autograd.exp(x)),
    "pow": lambda x, ids: x * 2 + 1 / x - x / 3 + (1 - x) + tensor.pow(x, 2.0),
    "dropout": lambda x, ids: autograd.dropout(x, ratio=0.5),
    "softmax_cross_entropy": lambda x, ids: autograd.softmax_cross_entropy(x, ids),
    "softmax_cross_entropy of labels": lambda x, ids: autograd.softmax_cross_entropy(x, op.OneHot(ids, 4, [0, 1])),
    "mse_loss": lambda x, ids: autograd.mse_loss(x, op.full_like(x, 0.5)),
    "cross_entropy": lambda x, ids: autograd.cross_entropy(x, op.full_like(x, 0.25)),
    "binary_cross_entropy": lambda x, ids: autograd.binary_cross_entropy(x, op.full_like(x, 1)),
    "ranking_loss": lambda x, ids: autograd.ranking_loss(x, autograd.exp(x)),
    "loss of a constant": lambda x, ids: autograd.mse_loss(x, op.constant(np.ones((2, 4), F))),
    "labels that are constant": lambda x, ids: autograd.softmax_cross_entropy(x, op.constant(IDS)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_on_the_device_of_its_tensors(name: str) -> None:
    found = []
    for dev in (default_device, OTHER):
        dev.SetRandSeed(3)
        x = on(dev, X, stores_grad=True)
        y = FUNCTIONS[name](x, on(dev, IDS, requires_grad=False))
        loss = op.ReduceSum(op.Mul(y, y), keepdims=0)
        (g,) = (g for p, g in autograd.backward(loss, 1.0) if p is x)
        assert y.device is dev and g.device is dev
        assert dev.backend.xp.isarray(y.data) and dev.backend.xp.isarray(g.data)
        found.append((to_numpy(y), to_numpy(g)))
    for a, b in zip(*found, strict=True):
        other_device.same(b, a)
    assert np.abs(found[0][1]).max() > 0


def test_a_start_gradient_may_be_an_array_or_a_tensor_of_the_host() -> None:
    x = on(OTHER, X, stores_grad=True)
    loss = op.ReduceSum(x, keepdims=0)
    for dy in (2.0, np.array(2.0, F), op.constant(2.0, F)):
        ((_, g),) = autograd.backward(loss, dy)
        assert (to_numpy(g) == 2).all()


def test_the_arrays_of_a_class_stay_on_their_device() -> None:
    """`forward` and `backward` of an operator's class, on raw values."""
    found = []
    for dev in (default_device, OTHER):
        rule = autograd.Clip(0.2, 0.6)
        y = rule.forward(dev.backend.put(X))
        found.append([dev.backend.get(y), *(dev.backend.get(rule.backward(*dy)) for dy in ((), (2.0,), (y,)))])
    for a, b in zip(*found, strict=True):
        other_device.same(b, a)
    assert set(found[1][2].reshape(-1).tolist()) == {0.0, 2.0}


def test_initial_values_are_created_on_the_device_of_the_tensor() -> None:
    for fill in (initializer.eye, initializer.orthogonal, initializer.he_normal, initializer.glorot_uniform):
        made = []
        for dev in (default_device, OTHER):
            dev.SetRandSeed(1)
            t = Tensor((3, 3), dev)
            fill(t)
            assert dev.backend.xp.isarray(t.data)
            made.append(to_numpy(t))
        other_device.same(made[1], made[0])


def test_two_devices_in_one_operator_are_an_error_that_names_both() -> None:
    for mix in (lambda a, b: op.Add(a, b), lambda a, b: autograd.mse_loss(a, b), lambda a, b: Twice()(a, b)):
        with pytest.raises(InvalidInput, match=f"must be on one device, got CPU and {other_device.NAME}") as caught:
            mix(on(default_device, X), on(OTHER, X))
        assert caught.value.code == "SX344" and "to_device" in caught.value.hint


def test_a_shape_may_be_on_the_host() -> None:
    y = op.Reshape(on(OTHER, X), on(default_device, np.array([4, 2]), requires_grad=False))
    assert y.shape == (4, 2) and y.device is OTHER


class Twice(Operator):
    """An operator in Python."""

    def forward(self, x: Any, c: Any) -> Any:
        return x * c

    def backward(self, dy: Any) -> Any:
        return dy, dy


def test_an_operator_of_a_user_gets_constants_on_its_device() -> None:
    (y,) = Twice()(op.constant(2.0, F), on(OTHER, X))
    assert y.device is OTHER
    np.testing.assert_array_equal(to_numpy(y), 2 * X)


def test_a_constant_that_is_written_is_not_a_constant() -> None:
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layer.Linear(2)
            self.optimizer = opt.SGD(lr=0.0)
            self.seen = op.constant(np.zeros(1, F))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)  # type: ignore[no-any-return]

        def train_one_batch(self, x: Tensor) -> Tensor:
            loss = op.ReduceMean(self.forward(x), keepdims=0)
            self.optimizer(loss)
            self.seen += 1.0
            return loss

    for graph in (False, True):
        m, x = Counting(), on(default_device, X, requires_grad=False)
        m.compile([x], is_train=True, use_graph=graph)
        for _ in range(4):
            m(x)
        assert to_numpy(m.seen).tolist() == [4.0]


class Net(Model):
    """Each kind of state: parameters, statistics, the random stream, an optimizer's."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.conv, self.bn, self.flat, self.fc = layer.Conv2d(2, 2), layer.BatchNorm2d(), layer.Flatten(), layer.Linear(3)
        self.optimizer = rule

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.dropout(autograd.relu(self.bn(self.conv(x))), ratio=0.25)
        return self.fc(self.flat(y))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


def steps(m: Any, x: Tensor, t: Tensor, graph: bool, count: int = 4) -> list[float]:
    m.compile([x], is_train=True, use_graph=graph)
    return [float(to_numpy(m(x, t)[1]).reshape(-1)[0]) for _ in range(count)]


RULES = [
    lambda: opt.SGD(opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9, nesterov=True, weight_decay=1e-3),
    lambda: opt.Adam(0.01),
    lambda: opt.RMSProp(0.01),
    opt.AdaGrad,
]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=["SGD", "Adam", "RMSProp", "AdaGrad"])
def test_a_model_trains_with_the_same_numbers(rule: Any, graph: bool) -> None:
    images, curves = np.random.default_rng(1).standard_normal((6, 1, 4, 4)).astype(F), []
    for dev in (default_device, OTHER):
        dev.SetRandSeed(5)
        m = Net(rule())
        curves.append(steps(m, on(dev, images, requires_grad=False), on(dev, np.arange(6, dtype=np.int32) % 3), graph))
        assert all(t.device is dev for t in (*m.get_states().values(), *m.optimizer.get_states().values()))
        assert not m.not_traceable
    other_device.same(curves[1], curves[0])


def test_an_imported_model_trains_with_the_same_numbers() -> None:
    """Its constants too: integers that a node reads, and floats of Constant nodes."""
    rng = np.random.default_rng(2)
    held = {"w": rng.standard_normal((4, 3)).astype(F), "shape": np.array([-1, 4], np.int64), "add": np.array([1], np.int64)}
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["m"]),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(0.5, F))),
        helper.make_node("Mul", ["m", "c"], ["s"]), helper.make_node("Dropout", ["s"], ["d"]),
        helper.make_node("Cast", ["add"], ["a"], to=1), helper.make_node("Add", ["d", "a"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", 1, ["N", 2, 2])], [helper.make_tensor_value_info("y", 1, ["N", 3])],
        [numpy_helper.from_array(a, n) for n, a in held.items()],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    class Imported(sonnx.SONNXModel):
        def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            (y,) = self.forward(x)
            loss = autograd.softmax_cross_entropy(y, t)
            self.optimizer(loss)
            return y, loss

    images, curves = rng.standard_normal((6, 2, 2)).astype(F), []
    for dev in (default_device, OTHER):
        for use_graph in (False, True):
            dev.SetRandSeed(5)
            m = Imported(proto, dev)
            m.optimizer = opt.SGD(0.1, momentum=0.9)
            labels = on(dev, np.arange(6, dtype=np.int32) % 3, requires_grad=False)
            curves.append(steps(m, on(dev, images, requires_grad=False), labels, use_graph))
            assert not m.not_traceable
    for c in curves[1:]:
        other_device.same(c, curves[0])
