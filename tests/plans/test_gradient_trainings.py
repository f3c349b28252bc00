"""Recorded trainings by gradient kernels: what a program changes between steps, errors, NaN, and equal bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import close, makers_come_first, steps_of

from singa import autograd, device, layer, opt
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.errors import SonnxError
from singa_backend.kernels import onednn
from singa_backend.kernels.table import GRADIENT, TRAINING, Options
from singa_backend.plans.answers import NOT_FINITE, REFUSED

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

F = np.float32


class Net(Model):
    """A normalized convolution, a sum of two others, a pooling, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = layer.Conv2d(8, 3, padding=1, bias=False), layer.BatchNorm2d()
        self.branch, self.short = layer.Conv2d(16, 3, padding=1), layer.Conv2d(16, 1)
        self.pool, self.flat, self.last = layer.MaxPool2d(2, 2), layer.Flatten(), layer.Linear(3)
        self.optimizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.norm(self.first(x)))
        y = autograd.relu(autograd.add(self.branch(y), self.short(y)))
        return self.last(self.flat(self.pool(y)))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


JOINED = ["Relu", "Conv", "Conv", "MaxPool", "Relu", "Conv", "BatchNormalization", "SoftmaxCrossEntropyLoss"]
"""The gradients of its operators that one call computes."""


def batch(i: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(i)
    return Tensor(data=rng.standard_normal((4, 3, 16, 16)).astype(F)), Tensor(data=rng.integers(0, 3, 4))


def net_of(options: Options, monkeypatch: pytest.MonkeyPatch) -> Net:
    """A net whose recorded steps compute with these options."""
    monkeypatch.setattr(Model, "_plan_options", lambda self: options)
    device.default_device.SetRandSeed(7)
    net = Net()
    net.optimizer = opt.SGD(lr=0.05, momentum=0.9)
    net.compile([batch()[0]], is_train=True, use_graph=True)
    return net


def state_of(net: Net) -> dict[str, np.ndarray]:
    return {n: np.array(t.data) for n, t in {**net.get_states(), **net.optimizer.get_states()}.items()}


def freeze(net: Net, i: int) -> None:
    if i == 2:
        net.freeze("branch.*")
    if i == 4:
        net.unfreeze("branch.*")


def rates(net: Net, i: int) -> None:
    if i == 2:
        net.optimizer.lr = 0.2
    if i == 4:
        net.optimizer.lr_value.set_value(0.01)


def loads(net: Net, i: int) -> None:
    """Return to the states of two steps ago."""
    if i == 2:
        net.kept = [{n: t.data.copy() for n, t in owner.get_states().items()} for owner in (net, net.optimizer)]
    if i == 4:
        net.set_states(net.kept[0])
        net.optimizer.set_states(net.kept[1])


def evaluations(net: Net, i: int) -> None:
    if i % 2:
        net.eval()
        net(batch()[0])
        net.train()


def nothing(net: Net, i: int) -> None:
    """No change."""


@pytest.mark.parametrize("change", [nothing, freeze, rates, loads, evaluations])
def test_trainings_with_changes_between_steps(change: Callable[[Net, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, states of the optimizer and running statistics after six steps, and each loss."""
    found = []
    for options in (Options(), Options(level=0)):
        net, losses = net_of(options, monkeypatch), []
        for i in range(6):
            change(net, i)
            losses.append(np.array(net(*batch(i)).data))
        reasons = [s._session.reason for s in steps_of(net)]
        assert all(reasons) if not options.level else not any(reasons)
        found.append({**state_of(net), "losses": np.array(losses)})
    for name, expected in found[1].items():
        close(found[0][name], expected, 2e-4, name)


def test_the_gradients_of_the_net_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of(Options(), monkeypatch)
    for i in range(3):
        net(*batch(i))
    (step,) = steps_of(net)
    planner = step._session._planner
    assert planner is not None and not planner.gradients.reasons
    makers_come_first(planner.graph)
    assert sorted(c.op_type for c in planner.graph.nodes if c.domain == GRADIENT) == sorted(JOINED)
    assert sorted(c.op_type for c in planner.graph.nodes if c.domain == TRAINING) == [
        "BatchNormalization",
        "MaxPool",
        "SoftmaxCrossEntropyLoss",
    ]


def test_arrays_that_are_held_over_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes into the array of a parameter, and into no other: arguments and earlier results keep their values."""
    net = net_of(Options(), monkeypatch)
    x, t = batch()
    net(x, t)
    results = [net(x, t) for _ in range(2)]
    held = [x.data, t.data, *(r.data for r in results)]
    parameter = net.first.W.data
    before, was = [a.copy() for a in held], parameter.copy()
    results.append(net(x, t))
    for a, b in zip(held, before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert parameter is net.first.W.data and (parameter != was).any()
    assert len({id(r.data) for r in results}) == 3


def test_an_error_leaves_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that does not exist: the definitions report it, and nothing is written."""
    net = net_of(Options(), monkeypatch)
    for i in range(3):
        net(*batch(i))
    before = state_of(net)
    x, _ = batch()
    with pytest.raises(SonnxError):
        net(x, Tensor(data=np.array([0, 1, 2, 7])))
    after = state_of(net)
    assert all(a.tobytes() == after[n].tobytes() for n, a in before.items())
    net(*batch(3))
    assert steps_of(net)[0]._session.reason is None


def test_a_nan_is_computed_by_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and later steps use the plan."""
    found = []
    for options in (Options(), Options(level=0)):
        net = net_of(options, monkeypatch)
        for i in range(2):
            net(*batch(i))
        start = [{n: t.data.copy() for n, t in owner.get_states().items()} for owner in (net, net.optimizer)]
        x, t = batch()
        x.data[1, 0, 3, 3] = np.nan
        loss = np.array(net(x, t).data)
        reason = steps_of(net)[0]._session.reason
        assert (reason in (NOT_FINITE, REFUSED)) if options.level else reason
        found.append((loss, np.array(net.first.W.data)))
        net.set_states(start[0])
        net.optimizer.set_states(start[1])
        assert np.isfinite(net(*batch()).data).all()
        assert (steps_of(net)[0]._session.reason is None) == bool(options.level)
    assert np.isnan(found[0][0]).all()
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "options", [Options(), Options(threads=2), Options(deterministic=True)], ids=["one thread", "two threads", "deterministic"]
)
def test_equal_bits_from_run_to_run(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two nets, whose plans are made one after the other."""
    found = []
    for _ in range(2):
        net = net_of(options, monkeypatch)
        for i in range(4):
            net(*batch(i))
        assert steps_of(net)[0]._session.reason is None
        found.append(state_of(net))
    assert all(a.tobytes() == found[1][n].tobytes() for n, a in found[0].items())
