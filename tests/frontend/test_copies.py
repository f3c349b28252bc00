"""A deep copy shares nothing with its original: training one leaves the other as it was, bit by bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper
from tests.helpers import other_device

from singa import autograd, layer, opt, sonnx
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor, to_numpy
from singa._layers.base import Layer
from singa.device import Device, default_device
from singa.model import Model

pytestmark = other_device.MARKS
F = np.float32
OTHER = Device(other_device.NAME)
DEVICES = pytest.mark.parametrize("dev", [default_device, OTHER], ids=["CPU", other_device.NAME])
MODES = pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])


def data(dev: Device = default_device, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((6, 2, 4, 4)).astype(F)
    return (Tensor(data=x, device=dev, requires_grad=False),
            Tensor(data=np.arange(6, dtype=np.int32) % 3, device=dev, requires_grad=False))  # fmt: skip


class Step:
    """What makes a class of models trainable."""

    optimizer: Any
    forward: Callable[..., Any]

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


class Block(Layer):
    """Two dense layers that share one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(width, bias=False), layer.Linear(width)

    def initialize(self, x: Tensor) -> None:
        self.first(x), self.second(x)
        self.second.W = self.first.W

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))  # type: ignore[no-any-return]


class Net(Step, Model):
    """Statistics, a layer in a layer, tied weights, an optimizer with states and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.flat = layer.Conv2d(2, 2), layer.BatchNorm2d(), layer.Flatten()
        self.block, self.head = Block(18), layer.Linear(3)
        self.optimizer = opt.SGD(opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.flat(autograd.relu(self.bn(self.conv(x))))))  # type: ignore[no-any-return]


def proto() -> ModelProto:
    """One matrix for two nodes, BatchNormalization, integers, and a constant."""
    rng = np.random.default_rng(1)
    held = {"w": rng.standard_normal((16, 16)) / 4, "b": np.zeros(3), "v": rng.standard_normal((16, 3)) / 4,
            "scale": np.ones(2), "bias": np.zeros(2), "mean": np.zeros(2), "var": np.ones(2)}  # fmt: skip
    arrays = {**{n: a.astype(F) for n, a in held.items()}, "shape": np.array([-1, 16], np.int64)}
    nodes = [
        helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("ReduceMean", ["n"], ["r"], axes=[1]), helper.make_node("Reshape", ["r", "shape"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["m"]), helper.make_node("Tanh", ["m"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["k"]), helper.make_node("Gemm", ["k", "v", "b"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", 1, ["N", 2, 4, 4])], [helper.make_tensor_value_info("y", 1, ["N", 3])],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


class Imported(Step, sonnx.SONNXModel):
    """An imported net with a head whose weight is also kept under a name of the class."""

    def __init__(self, dev: Device) -> None:
        super().__init__(proto(), dev)
        self.head = layer.Linear(3)
        self.tied = self.imported.parameters["v"]
        self.optimizer = opt.Adam(0.01)

    def forward(self, *x: Any, **kwargs: Any) -> Tensor:
        return self.head(super().forward(*x, **kwargs)[0])  # type: ignore[no-any-return]


MAKERS = pytest.mark.parametrize("make", [lambda dev: Net(), Imported], ids=["layers", "imported"])


def bits(m: Any) -> dict[str, bytes]:
    every = {**m.get_states(), **{f"optimizer.{n}": t for n, t in m.optimizer.get_states().items()}}
    return {n: to_numpy(t).tobytes() for n, t in every.items()}


def train(m: Any, dev: Device, count: int = 3) -> list[float]:
    x, t = data(dev)
    return [float(to_numpy(m(x, t)[1]).reshape(-1)[0]) for _ in range(count)]


def apart(a: Any, b: Any) -> bool:
    """Whether no two states have one storage."""
    ours = {id(t._data) for m in (a, a.optimizer) for t in m.get_states().values()}
    theirs = {id(t._data) for m in (b, b.optimizer) for t in m.get_states().values()}
    return not ours & theirs


@pytest.mark.usefixtures("by_definitions")  # bits are compared
@DEVICES
@MODES
@MAKERS
def test_a_trained_model_and_its_copy_go_their_own_ways(make: Any, graph: bool, dev: Device) -> None:
    m = make(dev)
    m.compile([data(dev)[0]], is_train=True, use_graph=graph)
    train(m, dev)
    before = bits(m)
    twin = copy.deepcopy(m)
    assert bits(twin) == before and list(twin.get_params()) == list(m.get_params())
    assert [t.name for t in twin.get_states().values()] == [t.name for t in m.get_states().values()]
    assert (twin.training, twin.graph_mode, twin.not_traceable) == (m.training, m.graph_mode, "")
    assert apart(m, twin) and all(t.device is dev for t in twin.get_states().values())
    curve = train(twin, dev)
    assert bits(m) == before != bits(twin)
    assert train(m, dev) == curve and bits(m) == bits(twin)  # the copy stood where the original stood
    m.eval()
    twin.eval()
    np.testing.assert_array_equal(to_numpy(m(data(dev)[0])), to_numpy(twin(data(dev)[0])))


@MODES
@MAKERS
def test_a_copy_from_before_compile(make: Any, graph: bool) -> None:
    m = make(default_device)
    twin = copy.deepcopy(m)
    for each in (twin, m):
        default_device.SetRandSeed(3)
        each.compile([data()[0]], is_train=True, use_graph=graph)
    assert apart(m, twin) and list(m.get_params()) == list(twin.get_params()) and bits(m) == bits(twin)
    before = bits(m)
    curve = train(twin, default_device)
    assert bits(m) == before
    assert train(m, default_device) == curve


def test_tied_weights_stay_tied() -> None:
    m = Net()
    m.compile([data()[0]])
    twin = copy.deepcopy(m)
    assert twin.block.first.W is twin.block.second.W is not m.block.first.W
    assert list(twin.get_params()).count("block.first.W") == 1 and "block.second.W" not in twin.get_params()
    other = Imported(default_device)
    again = copy.deepcopy(other)
    assert again.tied is again.imported.parameters["v"] is not other.tied
    shared = Tensor(data=np.ones(3))
    a, b = copy.deepcopy([shared, shared.copy()])  # two tensors, one storage
    a.data[...] = 2
    assert b.data.tolist() == [2, 2, 2] and shared.data.tolist() == [1, 1, 1]


def test_an_imported_copy_computes_with_its_own_parameters() -> None:
    """Also without a tape, where the executor holds them."""
    m, x = Imported(default_device), data()[0]
    m.compile([x], is_train=False)
    before = to_numpy(m(x))
    twin = copy.deepcopy(m)
    twin.set_params({"w": np.zeros((16, 16))})
    assert np.array_equal(to_numpy(m(x)), before) and not np.array_equal(to_numpy(twin(x)), before)
    rep = sonnx.prepare(proto())
    other = copy.deepcopy(rep)
    rep.imported.parameters["w"].data[...] = 0
    (zero,), (same,) = rep.run([x.data]), other.run([x.data])
    assert not np.abs(zero).max() and np.abs(same).max() > 0


def test_frozen_parameters_are_frozen_in_the_copy() -> None:
    m = Imported(default_device)
    m.compile([data()[0]])
    m.freeze("w")
    twin = copy.deepcopy(m)
    train(twin, default_device)
    assert np.array_equal(twin.get_params()["w"].data, m.get_params()["w"].data)
    twin.unfreeze("w")
    train(twin, default_device)
    assert not np.array_equal(twin.get_params()["w"].data, m.get_params()["w"].data)
    assert not m.get_params()["w"].stores_grad


def test_a_layer_alone() -> None:
    x = Tensor(data=np.ones((2, 4), F))
    fresh = copy.deepcopy(layer.Linear(3))
    assert fresh(x).shape == (2, 3) and list(fresh.get_params()) == ["W", "b"]
    twin = copy.deepcopy(fresh)
    twin.W.set_value(0.0)
    assert np.abs(to_numpy(fresh.W)).max() > 0 and twin.W.name == "W"


def test_a_layer_out_of_a_model_leaves_the_model_behind() -> None:
    m = Net()
    m.compile([data()[0]])
    block = copy.deepcopy(m.block)
    assert block.__dict__["_parent"] is None
    assert list(block.get_params()) == list(m.block.get_params()) == ["block.first.W", "block.second.b"]
    block.set_params({"block.first.W": np.zeros((18, 18))})
    assert np.abs(to_numpy(m.block.first.W)).max() > 0
    other = Net()
    other.compile([data()[0]])
    other.extra = block  # a parent of its own gives it names of its own
    assert block.second.b.name == "extra.second.b" and "extra.second.b" in other.get_params()


def test_an_optimizer_alone_keeps_its_states() -> None:
    w, g = Tensor(data=np.ones(3, F), name="w", stores_grad=True), Tensor(data=np.ones(3, F))
    adam = opt.Adam(0.1)
    for _ in range(2):
        adam.update(w, g)
        adam.step()
    twin, other = copy.deepcopy(adam), copy.deepcopy(w)
    assert twin.m is twin._states["m"] and to_numpy(twin.step_counter).tolist() == [2]
    before = {n: to_numpy(t) for n, t in adam.get_states().items()}
    twin.update(other, g)
    twin.step()
    assert all(np.array_equal(to_numpy(t), before[n]) for n, t in adam.get_states().items())
    adam.update(w, g)
    np.testing.assert_array_equal(to_numpy(other), to_numpy(w))


def test_parameters_of_one_name_find_their_states_in_a_copy() -> None:
    """The states of the second of them go by another key, in whatever order the copy meets the two."""
    a, b, sgd = (*(Tensor(data=np.zeros(1, F), name="w", stores_grad=True) for _ in "ab"), opt.SGD(1.0, momentum=0.5))
    sgd.update(a, Tensor(data=np.full(1, 2, F)))
    sgd.update(b, Tensor(data=np.full(1, 8, F)))
    twin_a, twin_b, twin = copy.deepcopy((a, b, sgd))
    zero = Tensor(data=np.zeros(1, F))
    twin.update(twin_b, zero)
    twin.update(twin_a, zero)
    assert (to_numpy(twin_a).tolist(), to_numpy(twin_b).tolist()) == ([-3], [-12])


@DEVICES
def test_a_tensor(dev: Device) -> None:
    t = Tensor(data=np.arange(6, dtype=F).reshape(2, 3), device=dev, stores_grad=True, name="t")
    twin = copy.deepcopy(t)
    assert (twin.name, twin.device, twin.stores_grad, twin.requires_grad, twin.is_dummy()) == ("t", dev, True, True, True)
    twin += 1.0
    assert to_numpy(t).tolist() == [[0, 1, 2], [3, 4, 5]] and to_numpy(twin)[0, 0] == 1
    with_tape = Tensor(data=np.ones(2, F), device=dev, stores_grad=True)
    tape.training = True
    loss = op.ReduceSum(op.Mul(with_tape, with_tape), keepdims=0)
    leaf = copy.deepcopy(loss)  # the values, not the tape
    assert leaf.is_dummy() and float(leaf) == 2 and not loss.is_dummy()
    assert [p is with_tape for p, _ in autograd.backward(loss)] == [True]


@DEVICES
@pytest.mark.parametrize("dtype", [F, np.int64, np.bool_, ml_dtypes.bfloat16, object])
def test_a_tensor_in_a_pickle(dtype: Any, dev: Device) -> None:
    array = np.array(["a", "ü"], object) if dtype is object else np.array([1, 0]).astype(dtype)
    t = Tensor(data=array, device=dev, stores_grad=True, requires_grad=False, name="t")
    twin = pickle.loads(pickle.dumps(t))
    assert to_numpy(twin).dtype == array.dtype and to_numpy(twin).tolist() == array.tolist()
    assert (twin.name, twin.stores_grad, twin.requires_grad, twin.is_dummy()) == ("t", True, False, True)
    assert str(twin.device.backend) == str(dev.backend) and type(twin._data) is type(t._data)


def test_a_model_of_layers_in_a_pickle() -> None:
    m = Net()
    m.compile([data()[0]], use_graph=True)
    train(m, default_device)
    twin = pickle.loads(pickle.dumps(m))
    assert bits(twin) == bits(m) and twin.block.first.W is twin.block.second.W
    assert train(twin, default_device) == train(m, default_device) and bits(twin) == bits(m)
