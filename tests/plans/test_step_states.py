"""What a recorded step does to tensors that are shared, held, frozen or changed between steps, by plans and by definitions."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import close, planner_of, steps_of

from singa import autograd, device, layer, opt
from singa._core.tensor import Tensor, op
from singa._training import step as recorded_step
from singa._training.interrupts import deferred
from singa.model import Model
from singa_backend.errors import SonnxError
from singa_backend.ir.gradient import GRADIENT
from singa_backend.kernels import onednn
from singa_backend.kernels.table import TRAINING, Options
from singa_backend.runtime.executor import Visitor

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

F = np.float32
PLANS, DEFINITIONS = Options(), Options(level=0)


class Net(Model):
    """A net of these layers and a forward function, with a step of an optimizer."""

    def __init__(self, forward: Callable[..., Any], optimizer: Any = None, **layers: Any) -> None:
        super().__init__()
        for name, one in layers.items():
            setattr(self, name, one)
        self.compute, self.optimizer = forward, optimizer or opt.SGD(0.1, momentum=0.9, weight_decay=1e-3)

    def forward(self, *xs: Tensor) -> Tensor:
        return self.compute(self, *xs)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def tied(net: Any, x: Tensor) -> Any:
    """A weight in two products, as the embedding and the last layer of a language model."""
    return op.MatMul(net.two(autograd.tanh(net.one(x))), op.Transpose(net.one.W, perm=[1, 0]))


def two_readers(net: Any, x: Tensor) -> Any:
    """A value that two branches and their sum read: its gradient has three parts."""
    y = autograd.relu(net.one(x))
    return autograd.add(autograd.add(autograd.tanh(y), net.two(y)), y)


def same_layer_twice(net: Any, x: Tensor) -> Any:
    return net.one(autograd.relu(net.one(x)))


def lstm_twice(net: Any, x: Tensor) -> Any:
    """Two runs of one LSTM, whose weights get two gradients in one plan."""
    y = net.lstm(x)
    return net.two(op.Add(y, net.lstm(op.Add(x, op.Mul(y, 0.5)))))


NETS: dict[str, tuple[Callable[[], Net], tuple[int, ...]]] = {
    "tied weights": (lambda: Net(tied, one=layer.Linear(8, bias=False), two=layer.Linear(8)), (4, 8)),
    "two readers": (lambda: Net(two_readers, one=layer.Linear(8), two=layer.Linear(8)), (4, 8)),
    "a layer twice": (lambda: Net(same_layer_twice, one=layer.Linear(8)), (4, 8)),
    "an LSTM twice": (lambda: Net(lstm_twice, lstm=layer.CudnnRNN(8), two=layer.Linear(8)), (5, 4, 8)),
}


def batch(shape: tuple[int, ...], i: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(i)
    return Tensor(data=rng.standard_normal(shape).astype(F)), Tensor(data=rng.standard_normal(shape).astype(F))


def built(name: str, options: Options, monkeypatch: pytest.MonkeyPatch, optimizer: Any = None) -> tuple[Net, tuple[int, ...]]:
    monkeypatch.setattr(Model, "_plan_options", lambda self: options)
    device.default_device.SetRandSeed(3)
    make, shape = NETS[name]
    net = make()
    if optimizer is not None:
        net.optimizer = optimizer
    net.compile([batch(shape, 0)[0]], is_train=True, use_graph=True)
    return net, shape


def states(net: Net) -> dict[str, np.ndarray]:
    named = {**net.get_states(), **net.optimizer.get_states()}
    return {n: np.array(t.data) for n, t in named.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def by_both(name: str, change: Callable[[Net, int], None], monkeypatch: pytest.MonkeyPatch, optimizer: Any = None) -> list[Net]:
    """Compare all states after each of seven steps, with a change before each."""
    found = []
    for options in (PLANS, DEFINITIONS):
        net, shape = built(name, options, monkeypatch, None if optimizer is None else optimizer())
        seen = []
        for i in range(7):
            change(net, i)
            loss = net(*batch(shape, i))
            seen.append({**states(net), "loss": np.array(loss.data)})
        reasons = [s._session.reason for s in steps_of(net)]
        assert reasons and (not any(reasons) if options is PLANS else all(reasons))
        found.append((net, seen))
    for i, (a, e) in enumerate(zip(found[0][1], found[1][1], strict=True)):
        assert a.keys() == e.keys()
        for n in e:
            close(a[n], e[n], 2e-5, f"{n} after step {i}")
    return [net for net, _ in found]


def nothing(net: Net, i: int) -> None:
    """No change."""


def freezes(net: Net, i: int) -> None:
    """The first parameter is frozen for two steps; its bits stay."""
    name, p = next(iter(net.get_params().items()))
    if i == 2:
        net.freeze(name)
        net.kept = p.data.copy()
    if i == 4:
        assert np.array_equal(p.data, net.kept)
        net.unfreeze(name)
    if i == 6:
        assert not np.array_equal(p.data, net.kept)


def rates(net: Net, i: int) -> None:
    if i == 3:
        net.optimizer.lr = 0.02
    if i == 5:
        net.optimizer.lr_value.set_value(0.2)


def loads(net: Net, i: int) -> None:
    """The states of the optimizer return to those of two steps ago, the parameters do not."""
    if i == 3:
        net.kept = {n: t.data.copy() for n, t in net.optimizer.get_states().items()}
    if i == 5:
        net.optimizer.set_states(net.kept)


def holds(net: Net, i: int) -> None:
    """An array of `.data` shows the present values, and a value that is written to it takes effect."""
    if i == 2:
        net.kept = [(p, p.data, p.data.copy()) for p in net.get_params().values()]
    if i > 2:
        for p, held, before in net.kept:
            assert held is p.data and not np.array_equal(held, before)
    if i == 4:
        for _, held, _ in net.kept:
            held *= 0.5
    if i == 5:
        state = next(t for n, t in net.optimizer.get_states().items() if n != "step_counter")
        state.data[...] = 0.25


@pytest.mark.parametrize("change", [nothing, freezes, rates, loads, holds])
@pytest.mark.parametrize("name", NETS)
def test_changes_between_steps(name: str, change: Callable[[Net, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    by_both(name, change, monkeypatch)


@pytest.mark.parametrize("name", NETS)
def test_with_adam(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_both(name, rates, monkeypatch, lambda: opt.AdamW(0.01))


def test_an_lstm_twice_has_two_gradients_in_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = by_both("an LSTM twice", nothing, monkeypatch)
    for step in steps_of(net):
        joined = [c.op_type for c in planner_of(step).graph.nodes if c.domain in (GRADIENT, TRAINING)]
        assert joined.count("LSTM") >= 2, (joined, planner_of(step).gradients.reasons)


def test_results_of_a_step_are_not_changed_by_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    net, shape = built("two readers", PLANS, monkeypatch)
    losses = [net(*batch(shape, i)) for i in range(6)]
    arrays = [t.data for t in losses]
    before = [a.copy() for a in arrays]
    for i in range(4):
        net(*batch(shape, i))
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))


# --- errors and interrupts


@pytest.mark.parametrize("options", [PLANS, DEFINITIONS], ids=["plans", "definitions"])
@pytest.mark.parametrize("place", [0, 3, -2])
def test_an_error_before_the_update_leaves_every_bit(place: int, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters and states; the next step computes as if there had been none."""
    net, shape = built("two readers", options, monkeypatch)
    for i in range(4):
        net(*batch(shape, i))
    before = states(net)
    (step,) = steps_of(net)
    if options is PLANS:
        (plan,) = planner_of(step).plans.values()
        flat, kept = plan.first.flat, list(plan.first.flat)
        assert plan.first.update is not None and plan.first.update < len(flat) - 4
        flat[place if place >= 0 else plan.first.update - 1] = (_fail, ())
        plan.first.pace = None
    else:
        visit, count = Visitor.visit, [0]

        def failing(self: Visitor, *args: Any) -> Any:
            count[0] += 1
            return _fail() if count[0] == (place if place >= 0 else 8) + 1 else visit(self, *args)

        monkeypatch.setattr(Visitor, "visit", failing)
    with pytest.raises(SonnxError, match="of the test"):
        net(*batch(shape, 9))
    assert same(states(net), before)
    if options is PLANS:
        flat[:] = kept
    else:
        monkeypatch.setattr(Visitor, "visit", visit)
    net(*batch(shape, 4))
    expected, _ = built("two readers", options, monkeypatch)
    for i in range(5):
        expected(*batch(shape, i))
    assert same(states(net), states(expected))


def _fail() -> None:
    raise SonnxError("an error of the test", code="SX330")


@pytest.mark.parametrize("options", [PLANS, DEFINITIONS], ids=["plans", "definitions"])
@pytest.mark.parametrize("write", [0, 1, 3])
def test_an_interrupt_while_states_are_written_is_raised_after_the_update(
    write: int, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, shape = built("two readers", options, monkeypatch)
    other, _ = built("two readers", options, monkeypatch)
    for i in range(4):
        net(*batch(shape, i))
        other(*batch(shape, i))
    assign, count = recorded_step.Step._assign, [0]

    def interrupted(*args: Any) -> None:
        if count[0] == write:
            signal.raise_signal(signal.SIGINT)
        count[0] += 1
        assign(*args)

    monkeypatch.setattr(recorded_step.Step, "_assign", interrupted)
    with pytest.raises(KeyboardInterrupt):
        net(*batch(shape, 4))
    assert count[0] > 4
    monkeypatch.setattr(recorded_step.Step, "_assign", assign)
    other(*batch(shape, 4))
    assert same(states(net), states(other))


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tape"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_time(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each, the states are those after a whole number of steps, which the counter has."""
    monkeypatch.setattr(Model, "_plan_options", lambda self: PLANS)
    net, shape = built("two readers", PLANS, monkeypatch, opt.Adam(1e-3))
    net.graph(graph)
    given = batch(shape, 0)
    for _ in range(3):
        net(*given)
    known = [states(net)]
    start = int(known[0]["step_counter"][0])
    interrupted, rng = 0, np.random.default_rng(0)
    done: list[dict[str, np.ndarray]] = []
    for _ in range(40):
        timer = threading.Timer(float(rng.uniform(0, 0.004)), lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            timer.start()
            for _ in range(500):  # Python ignores an interrupt that arrives in a destructor
                net(*given)
            timer.join()  # on a busy machine, the interrupt is after the last step
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        done.append(states(net))
    assert interrupted > 20
    last = max(int(s["step_counter"][0]) for s in done)
    reference, _ = built("two readers", PLANS, monkeypatch, opt.Adam(1e-3))
    reference.graph(graph)
    by_step = {}
    for _ in range(last):
        reference(*given)
        s = states(reference)
        by_step[int(s["step_counter"][0])] = s
    assert start in by_step and all(same(s, by_step[int(s["step_counter"][0])]) for s in done)


def test_signals_wait_and_are_raised_once() -> None:
    """Handlers are those of before; in another thread nothing changes."""
    handler = signal.getsignal(signal.SIGINT)
    seen = []
    with pytest.raises(KeyboardInterrupt), deferred():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        with deferred():
            signal.raise_signal(signal.SIGINT)
        seen.append("complete")
    assert seen == ["complete"] and signal.getsignal(signal.SIGINT) is handler

    def work() -> None:
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT) is handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["complete", True]
