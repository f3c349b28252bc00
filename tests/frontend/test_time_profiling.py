"""`SetVerbosity`, `SetSkipIteration` and `PrintTimeProfiling`, on the tape and as a graph."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

from singa import autograd, layer, opt, tensor
from singa.device import Device
from singa.model import Model
from singa.tensor import Tensor
from singa_backend import InvalidInput


class Net(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = layer.Linear(5), layer.ReLU(), layer.Linear(3)
        self.optimizer = opt.SGD(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss


def trained(dev: Device, steps: int, use_graph: bool, batch: int = 4) -> Net:
    x = tensor.from_numpy(np.random.default_rng(0).normal(size=(batch, 6)).astype(np.float32), dev)
    y = tensor.from_numpy(np.arange(batch, dtype=np.int32) % 3, dev)
    net = Net()
    net.compile([x], is_train=True, use_graph=use_graph)
    for _ in range(steps):
        net(x, y)
    return net


def printed(dev: Device, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    dev.PrintTimeProfiling()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "Time Profiling:"
    return lines


graph_mode = pytest.mark.parametrize("use_graph", [False, True], ids=["tape", "graph"])


@graph_mode
def test_the_times_of_both_passes(use_graph: bool, capsys: pytest.CaptureFixture[str]) -> None:
    dev = Device("CPU")
    dev.SetVerbosity(1)
    dev.SetSkipIteration(2)
    trained(dev, 4, use_graph)
    lines = printed(dev, capsys)
    found = dict(re.fullmatch(r"(\w+) Propagation Time : (\S+) sec", line).groups() for line in lines)
    assert set(found) == {"Forward", "Backward"} and all(float(t) > 0 for t in found.values())
    assert dev._times.steps == 2


@graph_mode
def test_the_times_of_operators(use_graph: bool, capsys: pytest.CaptureFixture[str]) -> None:
    dev = Device("CPU")
    dev.SetVerbosity(2)
    dev.SetSkipIteration(2)
    trained(dev, 4, use_graph)
    rows = [re.fullmatch(r"OP_ID(\d+)\. (\w+) : (\S+) sec", line) for line in printed(dev, capsys)]
    assert [int(r[1]) for r in rows] == list(range(len(rows)))
    names = [r[2] for r in rows]
    forward = [name for name, backward, _ in dev._times.rows if not backward]
    assert names == [name for name, _, _ in dev._times.rows]
    products = [n for n in names if n in ("MatMul", "Gemm")]
    assert len(products) >= 5 and "Relu" in forward and sum(n in ("MatMul", "Gemm") for n in forward) == 2
    assert [b for _, b, _ in dev._times.rows] == sorted(b for _, b, _ in dev._times.rows)


@graph_mode
def test_measuring_changes_no_result(use_graph: bool) -> None:
    plain, timed = Device("CPU", seed=3), Device("CPU", seed=3)
    timed.SetVerbosity(2)
    timed.SetSkipIteration(0)
    states = []
    for dev in (plain, timed):
        dev.SetRandSeed(5)
        states.append({n: tensor.to_numpy(t) for n, t in trained(dev, 4, use_graph).get_states().items()})
    assert states[0].keys() == states[1].keys() and states[0]
    for name, value in states[0].items():
        if use_graph:  # a step that is measured node by node runs by the definitions
            np.testing.assert_allclose(value, states[1][name], rtol=1e-4, atol=1e-6)
        else:
            assert value.tobytes() == states[1][name].tobytes()
    assert plain._times.steps == 0


def test_nothing_is_measured_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    dev = Device("CPU")
    trained(dev, 2, False)
    assert "SetVerbosity" in printed(dev, capsys)[0]
    dev.SetVerbosity(1)
    trained(dev, 3, False)
    assert "after the first 5" in printed(dev, capsys)[0]


def test_a_step_of_other_operators_starts_again() -> None:
    dev = Device("CPU")
    dev.SetVerbosity(2)
    dev.SetSkipIteration(0)
    net = trained(dev, 2, False)
    assert dev._times.steps == 2
    net.relu = layer.Tanh() if hasattr(layer, "Tanh") else autograd.tanh
    x, y = tensor.from_numpy(np.ones((4, 6), np.float32), dev), tensor.from_numpy(np.zeros(4, np.int32), dev)
    net(x, y)
    assert dev._times.steps == 1 and "Tanh" in {n for n, _, _ in dev._times.rows}


def test_a_step_that_fails_does_not_count() -> None:
    dev = Device("CPU")
    dev.SetVerbosity(2)
    dev.SetSkipIteration(0)
    net = trained(dev, 1, False)
    with pytest.raises(Exception, match="wrong"):
        net.train_one_batch = lambda *_: (_ for _ in ()).throw(ValueError("wrong"))  # type: ignore[method-assign]
        net(tensor.from_numpy(np.ones((4, 6), np.float32), dev), tensor.from_numpy(np.zeros(4, np.int32), dev))
    assert dev._times.steps == 1 and not dev._times.measures


def test_steps_in_other_threads_are_not_mixed() -> None:
    dev = Device("CPU")
    dev.SetVerbosity(2)
    dev.SetSkipIteration(0)
    alone = Device("CPU")
    alone.SetVerbosity(2)
    alone.SetSkipIteration(0)
    trained(alone, 1, False)
    threads = [threading.Thread(target=trained, args=(dev, 6, False)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [r[:2] for r in dev._times.rows] == [r[:2] for r in alone._times.rows]


@pytest.mark.parametrize("value", [-1, 1.5, "2", None, True])
def test_the_arguments_are_checked(value: Any) -> None:
    for method in (Device("CPU").SetVerbosity, Device("CPU").SetSkipIteration):
        with pytest.raises(InvalidInput, match="must be an integer of at least 0") as error:
            method(value)
        assert error.value.code == "SX309"
