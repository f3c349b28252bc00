"""Steps for further batch sizes defer the gradients that a kernel computes: bits, fallbacks, and what is never deferred."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.helpers.recorded_steps import steps_of

from singa import autograd, device, layer, opt
from singa._core.tensor import Tensor
from singa._training.step import Step
from singa.model import Model
from singa_backend import session
from singa_backend.interpreters.base import DifferentiatedCall
from singa_backend.ir.gradient_calls import DEFERRED
from singa_backend.ir.reader import read, resolve
from singa_backend.kernels import onednn
from singa_backend.kernels.table import gradient_kernels
from singa_backend.opsets.model import model_of
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.plans.flat import versioned
from singa_backend.plans.planner import NOT_FINITE, Planner

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

F = np.float32


class Net(Model):
    """Two convolutions, of which the second has a bias, a pooling, a recurrence and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = layer.Conv2d(8, 3, padding=1, bias=False), layer.BatchNorm2d()
        self.second, self.pool = layer.Conv2d(4, 3, padding=1), layer.MaxPool2d(2, 2)
        self.recurrent, self.last = layer.LSTM(16, 6), layer.Linear(3)
        self.optimizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.norm(self.first(x)))
        y = self.pool(autograd.relu(self.second(y)))
        y = autograd.transpose(autograd.reshape(y, (y.shape[0], 4, 16)), (1, 0, 2))
        y = self.recurrent(y)
        y = y[0] if isinstance(y, (tuple, list)) else y
        return self.last(autograd.reshape(autograd.transpose(y, (1, 0, 2)), (x.shape[0], -1)))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def batch(n: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(n)
    return Tensor(data=rng.standard_normal((n, 3, 8, 8)).astype(F)), Tensor(data=rng.integers(0, 3, n))


def trained(sizes: tuple[int, ...] = (6, 6, 6, 5, 5, 4), defers: bool = True) -> tuple[Net, list[bytes]]:
    """A net after a step of each of these batch sizes, and the losses."""
    device.default_device.SetRandSeed(7)
    net = Net()
    net.optimizer = opt.SGD(lr=0.05, momentum=0.9)
    net.compile([batch(6)[0]], is_train=True, use_graph=True, deterministic=True)
    if not defers:
        net._steps.deferrable.learn = lambda *a: None  # type: ignore[method-assign]
    return net, [net(*batch(n)).data.tobytes() for n in sizes]


def bits(net: Net) -> dict[str, bytes]:
    return {n: t.data.tobytes() for n, t in {**net.get_states(), **net.optimizer.get_states()}.items()}


def deferred(step: Step) -> list[str]:
    return [n.op_type for n in step._graph.nodes if n.domain == DEFERRED]


def joined(step: Step) -> list[str]:
    found = step._session.gradients
    assert found is not None and step._session.reason is None
    return sorted(found.known[i].op_type for i in found.taken)


def test_the_step_of_another_size_defers_gradients_and_has_the_same_bits() -> None:
    (net, losses), (plain, others) = trained(), trained(defers=False)
    first, *rest = steps_of(net)
    taken = {"BatchNormalization", "Conv", "MaxPool", "Relu", "LSTM"}
    assert not deferred(first) and taken <= set(joined(first)) and len(rest) == 2
    for step in rest:
        assert taken <= set(deferred(step)) and joined(step) == joined(first)
        assert len(step._graph.nodes) < len(first._graph.nodes) - 2 * len(deferred(step))
    assert not any(map(deferred, steps_of(plain)))
    assert (losses, bits(net)) == (others, bits(plain)) and len(set(losses)) == len(losses)


def test_the_graph_of_a_step_has_the_nodes_of_the_rules() -> None:
    (net, _), (plain, _) = trained(), trained(defers=False)
    step, other = steps_of(net)[1], steps_of(plain)[1]
    assert deferred(step) and step._session.reason is None
    assert sorted(n.op_type for n in step.graph.nodes) == sorted(n.op_type for n in other.graph.nodes)
    assert [(c.op_type, c.domain, len(c.outputs)) for c in step.graph.gradient_calls] == [
        (c.op_type, c.domain, len(c.outputs)) for c in other.graph.gradient_calls
    ]
    onnx.checker.check_model(step.onnx, full_check=True)
    assert len(read(step.onnx).gradient_calls) == len(step.graph.gradient_calls)
    again = [net(*batch(5)).data.tobytes(), net(*batch(4)).data.tobytes()]
    assert again == [plain(*batch(5)).data.tobytes(), plain(*batch(4)).data.tobytes()]
    assert joined(step) == joined(other) and bits(net) == bits(plain)


def test_definitions_compute_a_step_that_no_plan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an infinite input: the rules write their nodes, and the definitions are those of a step that deferred nothing."""
    found = []
    for defers in (True, False):
        net, _ = trained(defers=defers)
        with monkeypatch.context() as patch:
            patch.setattr(Planner, "run", lambda self, inputs, budget: NOT_FINITE)
            net(*batch(5))
        step = steps_of(net)[-1]
        assert step._session.reason is NOT_FINITE and not deferred(step)
        net(*batch(5))
        assert step._session.reason is None
        found.append(bits(net))
    assert found[0] == found[1]


@pytest.mark.parametrize("after", [0, 1])
def test_a_refused_gradient_is_written_by_its_rule(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel declines the sizes of the second step, or of the first run after it was recorded."""
    (net, _), (plain, _) = trained((6, 6, 6)), trained((6, 6, 6), defers=False)
    known = gradient_kernels["", "Conv"]
    for one in (net, plain):
        with monkeypatch.context() as patch:
            if after:
                one(*batch(5))
                for step in steps_of(one):
                    step.forget_plan()
            patch.setitem(gradient_kernels, ("", "Conv"), type(known)(**{**vars(known), "takes": lambda *a: False}))
            for _ in range(2):
                one(*batch(5))
            step = steps_of(one)[1]
            assert not deferred(step) and step._session.reason is None and "Conv" not in joined(step)
        one(*batch(3))
        assert "Conv" not in deferred(steps_of(one)[-1]) or after == 1
    assert bits(net) == bits(plain)


def test_plans_off_after_deferring(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = trained()
    monkeypatch.setattr(session.Session, "_refusal", lambda self: session.NO_PLANS)
    losses = [float(net(*batch(n)).data.item()) for n in (5, 4, 3)]
    assert not any(deferred(step) for step in steps_of(net)) and np.isfinite(losses).all()


def test_profile_lists_the_nodes_of_the_rules() -> None:
    net, _ = trained()
    step = steps_of(net)[1]
    assert deferred(step)
    found = step.profile(batch(5), {}, 1)
    assert not deferred(step) and {p.part for p in found.parts} >= {"forward", "backward", "update"}


def test_a_step_with_another_frozen_parameter_does_not_use_what_was_learned() -> None:
    (net, _), (plain, _) = trained(), trained(defers=False)
    for one in (net, plain):
        one.freeze("second.*")
        one(*batch(5))
        one(*batch(5))
    assert "MaxPool" in deferred(steps_of(net)[-1]) and bits(net) == bits(plain)
    assert deferred(steps_of(net)[-1]).count("Conv") < deferred(steps_of(net)[1]).count("Conv")


def test_equal_gradients_of_two_calls_are_not_deferred() -> None:
    """Two convolutions of one gradient share that of their biases, which one kernel computes for both."""

    class Both(Net):
        def __init__(self) -> None:
            super().__init__()
            self.short, self.flat = layer.Conv2d(4, 1), layer.Flatten()

        def forward(self, x: Tensor) -> Tensor:
            y = autograd.relu(self.norm(self.first(x)))
            return self.last(self.flat(autograd.relu(autograd.add(self.second(y), self.short(y)))))  # type: ignore[no-any-return]

    found = []
    for learns in (True, False):
        device.default_device.SetRandSeed(7)
        net = Both()
        net.optimizer = opt.SGD(lr=0.05)
        net.compile([batch(6)[0]], is_train=True, use_graph=True, deterministic=True)
        if not learns:
            net._steps.deferrable.learn = lambda *a: None  # type: ignore[method-assign]
        for n in (6, 6, 5, 5):
            net(*batch(n))
        found.append(bits(net))
        if learns:
            assert deferred(steps_of(net)[1]).count("Conv") == 1  # the first
    assert found[0] == found[1]


def test_a_file_cannot_have_deferred_nodes() -> None:
    writer = OpsetWriter(17)
    x = writer.input("x", onnx.helper.make_tensor_type_proto(1, [2]))
    relu = versioned("", "Relu")
    (y,) = writer.call("Relu", [x], {}, 1)
    (dx,) = writer.builder.defer(DifferentiatedCall(relu, {}, [x], [y], [x], ()), [True])
    graph = writer.builder.finish([dx])
    assert [n.domain for n in resolve(graph).nodes][-1] == DEFERRED
    with pytest.raises(Exception, match="no operator Relu"):
        read(model_of(writer, graph))


class Branching(Net):
    """A net whose step depends on the batch size in Python: it drops a term, and scales the loss."""

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        if x.shape[0] % 2:
            loss = loss + autograd.reduce_mean(y * y) * float(np.float32(1 / x.shape[0]))
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def at(net: Net, states: dict[str, np.ndarray]) -> dict[str, bytes]:
    """The bits after a step of a size that a model has not seen, from these states, and those of its loss."""
    everything = {**net.get_states(), **net.optimizer.get_states()}
    for name, value in states.items():
        everything[name].copy_from_numpy(value)
    loss = net(*batch(3))
    return {**bits(net), "loss": loss.data.tobytes()}


@pytest.mark.parametrize("kind", [Net, Branching])
def test_the_step_of_another_size_has_the_bits_of_one_recorded_first(kind: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever plans of other sizes share with a new one, its step is that of a model that has no other plan."""
    monkeypatch.setitem(globals(), "Net", kind)
    (many, _), (few, _) = trained((6, 6, 6, 5, 4, 6, 5, 2)), trained((6,))
    assert len(steps_of(many)) == 4 and not steps_of(few)
    states = {n: np.array(t.data) for n, t in {**many.get_states(), **many.optimizer.get_states()}.items()}
    found, expected = at(many, states), at(few, states)
    assert len(steps_of(few)) == 1 and steps_of(few)[0]._session.reason is None
    assert found == expected
    assert found != {n: v.tobytes() for n, v in states.items()}


def test_sizes_in_turn_keep_their_steps_and_plans() -> None:
    """As in epochs whose last batch is smaller."""
    net, _ = trained((6, 6, 6, 5))
    steps = steps_of(net)
    plans = [step._session._planner.latest for step in steps if step._session._planner is not None]
    for _ in range(3):
        net(*batch(6))
        net(*batch(5))
    assert steps_of(net) == steps and len(steps) == len(plans) == 2
    assert plans == [step._session._planner.latest for step in steps if step._session._planner is not None]
