"""A step that runs as a graph follows what the program changes between steps: bit for bit the numbers of the tape."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from singa import autograd, device, layer, opt, quantization
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

F = np.float32
SIZES = (8, 8, 8, 5, 8, 8, 5, 5, 3, 8, 8)
Decay = opt.ExponentialDecay


class Net(Model):
    """Layers that draw, that gather statistics, and two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = layer.Linear(8), layer.BatchNorm2d(), layer.Dropout(0.3), layer.Linear(3)
        self.optimizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(autograd.relu(self.first(x)))))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def batches() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 5)).astype(F), rng.integers(0, 3, n)) for n in SIZES]


def trained(graph: bool, optimizer: opt.Optimizer, change: Callable[[Net, int], Net | None]) -> dict[str, Any]:
    """Every loss, state of the model and state of the optimizer after a training in which `change` is called before each step."""
    device.default_device.SetRandSeed(5)
    net = Net()
    net.optimizer = optimizer
    net.compile([Tensor(data=np.zeros((4, 5), F))], is_train=True, use_graph=graph)
    losses = []
    for i, (x, t) in enumerate(batches()):
        net = change(net, i) or net
        losses.append(net(Tensor(data=x), Tensor(data=t)).data)
    assert not net.not_traceable
    assert any(net._steps.values()) == graph
    return {
        "losses": np.concatenate(losses),
        **{n: t.data for n, t in {**net.get_states(), **net.optimizer.get_states()}.items()},
    }


def freeze(net: Net, i: int) -> None:
    if i == 2:
        net.freeze("first.*")
    if i == 5:
        net.unfreeze("first.W")
    if i == 7:
        net.last.b.requires_grad = False


def rates(net: Net, i: int) -> None:
    """A number, then a schedule, whose formula is then another, then what is written into the rate's own tensor."""
    if i == 3:
        net.optimizer.lr = 0.5
    if i == 5:
        net.optimizer.lr = Decay(0.1, 2, 0.5)
    if i == 7:
        net.optimizer.lr.decay_rate = 0.9
    if i == 9:
        net.optimizer.lr_value.set_value(0.03)


def hyperparameters(net: Net, i: int) -> None:
    if i == 3:
        net.optimizer.momentum = 0.2
    if i == 5:
        net.optimizer.weight_decay = 0.1
    if i == 6:
        net.optimizer.momentum = Decay(0.9, 2, 0.5)
    if i == 9:
        net.optimizer.momentum, net.optimizer.dampening = 0.1, 0.2


def layers(net: Net, i: int) -> None:
    if i == 4:
        net.drop.ratio = 0.6
    if i == 6:
        net.norm.handle.factor = 0.5


def modes(net: Net, i: int) -> None:
    if i % 2:
        net.eval()
        net(Tensor(data=batches()[0][0]))
        net.train()


def states(net: Net, i: int) -> None:
    """Back to where the training was three steps before."""
    if i == 4:
        net.kept = [{n: t.data.copy() for n, t in owner.get_states().items()} for owner in (net, net.optimizer)]
    if i == 7:
        net.set_states(net.kept[0])
        net.optimizer.set_states(net.kept[1])


def seeds(net: Net, i: int) -> None:
    if i in (5, 8):
        device.default_device.SetRandSeed(77)


def copies(net: Net, i: int) -> Net | None:
    return copy.deepcopy(net) if i == 5 else pickle.loads(pickle.dumps(net)) if i == 7 else None


@pytest.mark.parametrize(
    "change", [freeze, rates, hyperparameters, layers, modes, states, seeds, copies], ids=lambda f: f.__name__
)
def test_the_graph_follows(change: Callable[[Net, int], Net | None]) -> None:
    on_tape, as_graph = (trained(graph, opt.SGD(lr=0.1, momentum=0.9), change) for graph in (False, True))
    unchanged = trained(True, opt.SGD(lr=0.1, momentum=0.9), lambda net, i: None)
    assert on_tape.keys() == as_graph.keys()
    for name, value in on_tape.items():
        np.testing.assert_array_equal(value, as_graph[name], err_msg=name)
    differs = any(not np.array_equal(value, unchanged[name]) for name, value in as_graph.items())
    assert differs == (change not in (modes, copies))


class Recurrent(Model):
    """Layers whose settings may be assigned while they train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layer.BatchNorm2d()
        self.act = quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver(momentum=0.5))
        self.rnn = layer.RNN(5, 3, num_layers=2)
        self.optimizer = opt.SGD(lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.act(self.norm(x)).reshape([1, -1, 5]))[0]  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor) -> Tensor:
        y = self.forward(x)
        loss = autograd.mse_loss(y, autograd.identity(y) * 0.5)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [
    lambda net: setattr(net.act, "observing", False), lambda net: setattr(net.act.observer, "momentum", 0.9),
    lambda net: setattr(net.rnn, "dropout", 0.5), lambda net: setattr(net.norm.handle, "epsilon", 1.0),
    lambda net: setattr(net.norm.handle, "unbiased", False),
], ids=["observing", "momentum", "dropout", "epsilon", "unbiased"])  # fmt: skip
def test_the_graph_follows_the_settings_of_layers(change: Callable[[Recurrent], None]) -> None:
    def run(graph: bool, change: Callable[[Recurrent], None]) -> list[Any]:
        device.default_device.SetRandSeed(5)
        net, rng, found = Recurrent(), np.random.default_rng(0), []
        net.compile([Tensor(data=np.zeros((4, 5), F))], is_train=True, use_graph=graph)
        for i in range(7):
            if i == 4:
                change(net)
            loss = net(Tensor(data=rng.normal(scale=1 + i, size=(4, 5)).astype(F), requires_grad=False))
            found.append((float(loss), *(t.data.copy() for n, t in net.get_states().items() if "act" in n or "running" in n)))
        assert not net.not_traceable
        return [np.concatenate([np.ravel(v) for v in values]) for values in found]

    as_graph, unchanged = run(True, change), run(True, lambda net: None)
    np.testing.assert_allclose(as_graph, run(False, change), rtol=1e-4)
    assert not np.allclose(as_graph[-1], unchanged[-1], rtol=1e-3)


@pytest.mark.parametrize("graph", [False, True])
def test_a_loss_that_was_computed_before_a_step_has_no_gradients_after_it(graph: bool) -> None:
    net = Net()
    net.optimizer = opt.SGD(lr=0.1)
    net.compile([Tensor(data=np.zeros((4, 5), F))], is_train=True, use_graph=graph)
    x, t = (Tensor(data=v, requires_grad=False) for v in batches()[0])
    for _ in range(3):
        net(x, t)
    loss = autograd.softmax_cross_entropy(net.forward(x), t)
    assert len(autograd.gradients(loss)) == 6
    net.forward(x)  # the running statistics change, and no gradient asks for them
    assert len(autograd.gradients(loss)) == 6
    net(x, t)
    with pytest.raises(InvalidInput, match="was changed after"):
        autograd.gradients(loss)


class Coder(Model):
    """A step whose target may be its input, and whose weights of samples are an array."""

    def __init__(self) -> None:
        super().__init__()
        self.code = layer.Linear(5)
        self.optimizer = opt.SGD(lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor, weights: Any = 1.0) -> Tensor:
        loss = autograd.mse_loss(self.forward(x) * weights, t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def coded(graph: bool, calls: Callable[[Tensor, Tensor], list[tuple[Any, ...]]]) -> list[float]:
    device.default_device.SetRandSeed(1)
    rng = np.random.default_rng(1)
    x, t = (Tensor(data=rng.normal(size=(400, 5)).astype(F), requires_grad=False) for _ in range(2))
    net = Coder()
    net.compile([x], is_train=True, use_graph=graph)
    return [float(net(*args)) for args in calls(x, t)]


@pytest.mark.parametrize("alike", ["xxxtt", "tttxx"])
def test_a_step_whose_target_is_its_input_is_another_step(alike: str) -> None:
    def calls(x: Tensor, t: Tensor) -> list[tuple[Any, ...]]:
        return [(x, x if c == "x" else t) for c in alike]

    assert coded(True, calls) == coded(False, calls)


def test_arrays_among_the_arguments_count_by_their_values() -> None:
    """Their repr leaves out the middle of a long one."""

    def calls(x: Tensor, t: Tensor) -> list[tuple[Any, ...]]:
        weights = np.ones((6, 400, 5), F)
        weights[:, 150:250] = np.arange(6).reshape(-1, 1, 1)
        return [(x, t, w) for w in (*weights[:1], *weights[:1], *weights)]

    assert coded(True, calls) == coded(False, calls)


class Known(Net):
    """A model whose step also returns values that the recorded graph has as constants."""

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        return (
            super().train_one_batch(x, t),
            autograd.shape(x),
            autograd.identity(Tensor(data=np.arange(3, dtype=F), device=x.device)),
        )


@pytest.mark.parametrize("name", ["CPU", "STRICT"])
def test_results_that_are_written_to_are_not_the_constants_of_the_step(name: str) -> None:
    dev = device.Device(name)
    x = Tensor(data=np.ones((4, 3), F), device=dev)
    t = Tensor(data=np.zeros(4, np.int32), device=dev)
    net = Known()
    net.optimizer = opt.SGD(lr=0.1)
    net.compile([x], is_train=True, use_graph=True)
    for _ in range(3):
        *_, shape, values = net(x, t)
        assert shape.numpy().tolist() == [4, 3] and values.numpy().tolist() == [0, 1, 2]
        shape.set_value(9)
        values.set_value(9)
