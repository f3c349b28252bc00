"""Writes to states in a step: whatever the way and the source, graph mode has the bits of the tape and stays a graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from singa import autograd, device, layer, opt, tensor
from singa._core.tensor import Tensor, to_numpy
from singa.model import Model
from singa_backend.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

F = np.float32
Write = Callable[[Any, Any], None]
"""Called with the model and the hidden values (3, 4) of the step."""


def _rows(h: Any) -> Any:
    return h[0:2, :]


WRITES: dict[str, Write] = {
    "copy_data": lambda m, h: m.state.copy_data(h),
    "copy_from": lambda m, h: m.state.copy_from(h),
    "copy_from, of another shape": lambda m, h: m.state.copy_from(h.reshape((2, 6))),
    "copy_from, a part": lambda m, h: m.state.copy_from(_rows(h), 3),
    "copy_from, the last elements": lambda m, h: m.state.copy_from(_rows(h), 4),
    "copy_from, another dtype": lambda m, h: m.integers.copy_from(h * 10),
    "copy_from, a state": lambda m, h: (m.other.copy_from(m.state), m.state.copy_from(h))[0],
    "copy_from, a transpose": lambda m, h: m.state.copy_from(h.transpose().reshape((3, 4))),
    "copy_from, an array": lambda m, h: (m.state.copy_from(h), m.state.copy_from(np.full(3, 0.5, F), 2))[0],
    "copy_from_numpy": lambda m, h: (m.other.copy_from(m.state), m.state.copy_from_numpy(np.ones((3, 4), F)))[0],
    "copy_from_numpy after a read": lambda m, h: (m.other.copy_from(m.state * 2 + h), m.state.copy_from_numpy(np.ones(12, F)))[0],
    "copy_data_to_from": lambda m, h: tensor.copy_data_to_from(m.state, h.clone(), 5, 2, 6),
    "tensor.copy_from_numpy": lambda m, h: tensor.copy_from_numpy(m.other, np.ones((3, 4), F)),
    "set_value": lambda m, h: (m.other.copy_from(m.state), m.state.set_value(1.5), m.state.copy_from(h, 0))[0],
    "+=": lambda m, h: m.state.__iadd__(h * 0.5),
    "set_states": lambda m, h: m.norm.set_states({"running_mean": m.norm.running_mean * 0.5}),
    "a scalar": lambda m, h: m.norm.running_var.copy_from(tensor.sum(h, 0)),
}  # fmt: skip


class Net(Model):
    """A net whose step reads states of the step before, and writes them."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.first, self.norm, self.last = layer.Linear(4), layer.BatchNorm2d(), layer.Linear(2)
        self.state, self.other = (Tensor((3, 4), requires_grad=False, name=n) for n in ("state", "other"))
        self.integers = Tensor((12,), dtype=np.int32, requires_grad=False, name="integers")
        self.optimizer = opt.SGD(0.1, momentum=0.9)

    def forward(self, x: Tensor) -> Any:
        return self.norm(autograd.relu(self.first(x)))

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        h = self.forward(x)
        mixed = h + self.state * 0.1 + self.other * 0.01 + self.integers.as_type(F).reshape((3, 4)) * 0.01
        loss = autograd.mse_loss(self.last(mixed), t)
        self.optimizer(loss)
        self.write(self, h)
        return h, loss


def trained(write: Write, graph: bool) -> dict[str, Any]:
    device.default_device.SetRandSeed(0)
    net = Net(write)
    rng = np.random.default_rng(0)
    net.compile([Tensor(data=np.zeros((3, 5), F))], is_train=True, use_graph=graph)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "stays on the tape" among them
        for _ in range(5):
            x, t = rng.normal(size=(3, 5)).astype(F), rng.normal(size=(3, 2)).astype(F)
            losses.append(to_numpy(net(Tensor(data=x, requires_grad=False), Tensor(data=t, requires_grad=False))[1]))
    assert not net.not_traceable and any(net._steps.values()) == graph
    kept = {n: to_numpy(getattr(net, n)) for n in ("state", "other", "integers")}
    return {"losses": np.array(losses), **kept, **{n: to_numpy(p) for n, p in net.get_states().items()}}


@pytest.mark.parametrize("name", WRITES)
def test_the_graph_has_the_bits_of_the_tape(name: str) -> None:
    tape, graph = (trained(WRITES[name], g) for g in (False, True))
    assert name in ("set_states", "a scalar") or any(tape[n].any() for n in ("state", "other", "integers"))
    assert {n: v.tobytes() for n, v in tape.items()} == {n: v.tobytes() for n, v in graph.items()}


def test_a_value_that_the_step_reads_in_python_and_changes_stays_on_the_tape() -> None:
    """It would be a constant of the graph otherwise."""

    def write(net: Any, h: Any) -> None:
        factor = float(to_numpy(net.state).sum()) + 1.0
        net.state.copy_from(h * (1 / factor))

    made = {}
    for graph in (False, True):
        device.default_device.SetRandSeed(0)
        net = Net(write)
        net.compile([Tensor(data=np.zeros((3, 5), F))], is_train=True, use_graph=graph)
        rng = np.random.default_rng(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                x, t = rng.normal(size=(3, 5)).astype(F), rng.normal(size=(3, 2)).astype(F)
                net(Tensor(data=x, requires_grad=False), Tensor(data=t, requires_grad=False))
        assert ("reads the values of state" in net.not_traceable) == graph
        made[graph] = to_numpy(net.state).tobytes()
    assert made[False] == made[True]


def test_a_value_that_the_step_reads_in_python_may_change_between_steps() -> None:
    """It is a constant of the graph, which is recorded again."""
    changes: list[Callable[[Any], Any]] = [
        lambda net: None,
        lambda net: None,
        lambda net: net.other.set_value(2.0),
        lambda net: net.other.copy_from(np.full((3, 4), 3, F)),
        lambda net: setattr(net.other, "data", np.full((3, 4), 4, F)),
        lambda net: net.other.__iadd__(1.0),
        lambda net: None,
    ]
    made = {}
    for graph in (False, True):
        device.default_device.SetRandSeed(0)
        net = Net(lambda net, h: net.state.copy_from(h * float(to_numpy(net.other)[0, 0]) + net.other.clone()))
        x, t = Tensor(data=np.ones((3, 5), F), requires_grad=False), Tensor(data=np.ones((3, 2), F), requires_grad=False)
        net.compile([x], is_train=True, use_graph=graph)
        made[graph] = []
        for change in changes:
            change(net)
            net(x, t)
            made[graph].append(to_numpy(net.state).tobytes())
        assert not net.not_traceable and any(net._steps.values()) == graph
    assert made[False] == made[True] and len(set(made[True])) > 4


def test_a_recurrent_state_in_training_mode_has_no_gradient_into_earlier_steps() -> None:
    w = Tensor(data=np.full((1,), 0.5, F), stores_grad=True, name="w")
    h = Tensor(data=np.ones(1, F), requires_grad=False, name="h")
    autograd.training = True
    try:
        h.copy_data(h * w)
        assert h.is_dummy() and h.data.tolist() == [0.5]
        loss = tensor.sum(h * w, 0)
        ((p, g),) = autograd.backward(loss)
    finally:
        autograd.training = False
    assert p is w and g.data.tolist() == [0.5]  # the old h only


def test_the_number_of_elements_is_checked() -> None:
    x, y = Tensor((2, 3)), Tensor((4,))
    for write in (lambda: x.copy_data(y), lambda: x.copy_from(y), lambda: x.copy_from(y, 3), lambda: x.copy_from(x, 1)):
        with pytest.raises(InvalidInput) as caught:
            write()
        assert caught.value.code == "SX337"


VIEWS: dict[str, Any] = {
    "reshape": lambda x: autograd.reshape(x, (4,)), "identity": autograd.identity, "flatten": lambda x: autograd.flatten(x, 0),
    "transpose": lambda x: autograd.transpose(x, (1, 0)), "slice": lambda x: autograd.slice(x, [0], [1], [0]),
    "a view of a view": lambda x: autograd.reshape(autograd.transpose(x, (1, 0)), (4,)), "method": lambda x: x.reshape((1, 4)),
    "unsqueeze": lambda x: autograd.unsqueeze(x, 0), "index": lambda x: x[0:1, 0:2],
}  # fmt: skip
FILLS: dict[str, Any] = {
    "copy_data": lambda x: x.copy_data(Tensor(data=np.full(4, 9, F))), "set_value": lambda x: x.set_value(9.0),
    "copy_from_numpy": lambda x: x.copy_from_numpy(np.ones(4, F)), "uniform": lambda x: x.uniform(5, 6),
    "part": lambda x: x.copy_from(np.ones(3, F), 1), "+=": lambda x: x.__iadd__(3.0),
}  # fmt: skip


@pytest.mark.parametrize("needs", [False, True], ids=["data", "differentiable"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("fill", "produced"), [*((f, False) for f in FILLS), *((f, True) for f in list(FILLS)[:4])])
def test_a_write_does_not_reach_what_the_tape_has_read_through_a_view(fill: str, view: str, needs: bool, produced: bool) -> None:
    """The gradient with respect to w is the view of x at the time of the product; x is written before `backward`.

    A part of a tensor that an operator produced is not written (SX370).
    """
    values = np.arange(1, 5, dtype=F).reshape(2, 2)
    autograd.training = True
    try:
        x = Tensor(data=values.copy(), requires_grad=needs)
        if produced:
            x = autograd.mul(x, Tensor(data=np.ones((2, 2), F), stores_grad=True))
        read = VIEWS[view](x)
        before = to_numpy(read).copy()
        w = Tensor(data=np.ones(read.shape, F), stores_grad=True)
        loss = tensor.sum(autograd.mul(read, w))
        FILLS[fill](x)
        got = {id(p): to_numpy(g) for p, g in autograd.backward(loss)}
    finally:
        autograd.training = False
    np.testing.assert_array_equal(got[id(w)], before)
    np.testing.assert_array_equal(np.sort(before, None), np.sort(VIEWS[view](Tensor(data=values)).data, None))
    assert not np.array_equal(to_numpy(x), values)


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_states_of_a_recurrent_layer_written_before_the_gradient(kind: str) -> None:
    """A model of characters writes the states that the layer has read, then computes the gradient: as with separate states."""

    class Net(Model):
        def __init__(self, copies: bool) -> None:
            super().__init__()
            self.rnn = getattr(layer, kind)(3, 4)
            self.copies, self.optimizer = copies, opt.SGD(0.5)
            self.hx, self.cx = Tensor((2, 4)), Tensor((2, 4))

        def forward(self, xs: Any) -> Any:
            h, c = (self.hx, self.cx) if self.copies else (self.hx.clone(), self.cx.clone())
            ys, *states = self.rnn(xs, (h, c) if kind == "LSTM" else h)
            for mine, new in zip((self.hx, self.cx), states, strict=False):
                mine.copy_data(new)
            return ys[-1]

        def train_one_batch(self, xs: Any, t: Tensor) -> Any:
            loss = autograd.mse_loss(self.forward(xs), t)
            self.optimizer(loss)
            return loss, loss

    def run(copies: bool, graph: bool) -> list[dict[str, np.ndarray]]:
        device.default_device.SetRandSeed(1)
        net = Net(copies)
        net.train()
        net.graph(graph)
        rng, found = np.random.default_rng(0), []
        for _ in range(4):
            xs = [Tensor(data=rng.normal(size=(2, 3)).astype(F)) for _ in range(3)]
            net(xs, Tensor(data=np.ones((2, 4), F)))
            found.append({n: to_numpy(p).copy() for n, p in net.get_params().items() if n.startswith("rnn")})
        return found

    want = run(False, False)
    for graph in (False, True):
        for a, b in zip(want, run(True, graph), strict=True):
            assert a.keys() == b.keys() and len(a) >= 3
            for n in a:
                np.testing.assert_array_equal(a[n], b[n], err_msg=n)
