"""Gradients of a recorded step as one call each: bits, sizes, and the bodies if no kernel computes them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import planner_of, steps_of

from singa import autograd, device, layer, opt
from singa._core.tensor import Tensor
from singa._training import step as recording
from singa._training.step import Step
from singa.model import Model
from singa_backend import session
from singa_backend.ir.gradient import GRADIENT
from singa_backend.kernels import onednn
from singa_backend.kernels.options import VARIABLE
from singa_backend.kernels.table import gradient_kernels
from singa_backend.plans import gradients
from singa_backend.plans.answers import NOT_FINITE
from singa_backend.plans.planner import Planner

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


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have equal bits, and the kernels of gradients of usual ones."""
    monkeypatch.setenv(VARIABLE, "1")


def batch(n: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(n)
    return Tensor(data=rng.standard_normal((n, 3, 8, 8)).astype(F)), Tensor(data=rng.integers(0, 3, n))


def trained(sizes: tuple[int, ...] = (6, 6, 6, 5, 5, 4)) -> tuple[Net, list[bytes]]:
    """A net after a step of each of these batch sizes, and the losses."""
    device.default_device.SetRandSeed(7)
    net = Net()
    net.optimizer = opt.SGD(lr=0.05, momentum=0.9)
    net.compile([batch(6)[0]], is_train=True, use_graph=True)
    return net, [net(*batch(n)).data.tobytes() for n in sizes]


def bits(net: Net) -> dict[str, bytes]:
    return {n: t.data.tobytes() for n, t in {**net.get_states(), **net.optimizer.get_states()}.items()}


def calls(step: Step) -> list[Any]:
    return [n for n in step.graph.nodes if n.domain == GRADIENT]


def operator(node: Any) -> str:
    name: str = node.gradient.operator.declaration.name
    return name


def taken(step: Step) -> list[str]:
    assert step._session.reason is None
    return sorted(g.operator.declaration.name for g in planner_of(step).gradients.taken)


def by_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rules write the nodes of all gradients."""
    monkeypatch.setattr(recording, "may_compute", lambda call: False)


def test_kernels_compute_the_gradients_of_every_size_and_no_body_is_written() -> None:
    net, losses = trained()
    (step,) = steps_of(net)
    assert {"BatchNormalization", "Conv", "MaxPool", "Relu", "LSTM"} <= set(taken(step)) and planner_of(step).bound
    assert taken(step) == sorted(map(operator, calls(step)))
    assert all(n.function is None for n in calls(step)) and len(set(losses)) == len(losses)


def test_the_bodies_are_the_nodes_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions compute the same bits by the bodies as by the nodes that rules write at once."""
    found = []
    for writes in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(Planner, "run", lambda self, inputs, budget: NOT_FINITE)
            if writes:
                by_rules(patch)
            net, losses = trained((6, 6, 6, 5))
        steps = steps_of(net)
        assert all(step._session.reason is NOT_FINITE for step in steps) and any(calls(steps[0])) is not writes
        assert all(n.function is not None for step in steps for n in calls(step))
        found.append((losses, bits(net)))
    assert found[0] == found[1]


def test_a_plan_without_kernels_computes_the_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of each call are the nodes that the rule would have written at once: fused alike, they have the same bits."""
    found = []
    for writes in (False, True):
        with monkeypatch.context() as patch:
            if writes:
                by_rules(patch)
            patch.setattr(gradients, "_take", lambda graph, node: "of the test")
            net, losses = trained((6, 6, 6, 5))
        assert not any(map(taken, steps_of(net)))
        found.append((losses, bits(net)))
    assert found[0] == found[1]


@pytest.mark.parametrize("after", [False, True])
def test_a_refused_gradient_is_computed_by_its_body(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel declines before the step is recorded, or after it."""
    net, _ = trained((6, 6, 6) if after else (6,))
    known = gradient_kernels["", "Conv"]
    if after:
        net(*batch(4))  # the graph is that of all sizes
        steps_of(net)[0].forget_plan()
    with monkeypatch.context() as patch:
        patch.setitem(gradient_kernels, ("", "Conv"), known._replace(takes=lambda *a: False))
        for _ in range(2):
            net(*batch(5))
        (step,) = steps_of(net)
        assert "Conv" not in taken(step) and "MaxPool" in taken(step)
        assert any(operator(n) == "Conv" for n in calls(step)) is after
        assert any("no kernel takes its attributes" in why for why in planner_of(step).gradients.refused.values()) is after
    step.forget_plan()
    net(*batch(3))
    assert "Conv" in taken(steps_of(net)[-1]) and (steps_of(net)[-1] is step) is after


def test_the_graph_of_a_step_is_pickled_with_its_bodies() -> None:
    net, _ = trained((6, 6))
    graph = steps_of(net)[0].graph
    again = pickle.loads(pickle.dumps(graph))
    assert [n.op_type for n in again.all_nodes()] == [n.op_type for n in graph.all_nodes()]
    assert all(
        n.gradient.places == m.gradient.places and n.body()
        for n, m in zip((n for n in again.nodes if n.domain == GRADIENT), calls(steps_of(net)[0]), strict=True)
    )


@pytest.mark.parametrize("use", [lambda step: step.onnx, lambda step: pickle.dumps(step.graph)], ids=["file", "pickle"])
def test_definitions_run_after_the_bodies_were_written(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = trained((6, 6))
    use(steps_of(net)[0])
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "run", lambda self, inputs, budget: NOT_FINITE)
        assert np.isfinite(net(*batch(6)).data).all()


def test_plans_off(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = trained()
    monkeypatch.setattr(session.Session, "_refusal", lambda self: session.NO_PLANS)
    losses = [float(net(*batch(n)).data.item()) for n in (5, 4, 3)]
    assert all(step._session.reason is session.NO_PLANS for step in steps_of(net)[1:]) and np.isfinite(losses).all()


def test_a_profile_lists_every_gradient() -> None:
    net, _ = trained()
    (step,) = steps_of(net)
    found = step.profile(batch(5), {}, 1)
    assert {p.part for p in found.parts} >= {"forward", "backward", "update"}
    assert sorted(g.operator for g in found.gradient_calls if g.by == "kernel") == taken(step)
    assert {"Flatten", "Reshape", "Transpose"} & {g.operator for g in found.gradient_calls if g.by == "rule"}


def test_a_frozen_parameter_has_no_gradient() -> None:
    net, _ = trained()
    net.freeze("second.*")
    net(*batch(5))
    whole, frozen = (
        [n.gradient.places for n in calls(step) if operator(n) == "Conv"] for step in (steps_of(net)[0], steps_of(net)[-1])
    )
    assert sorted(whole) == [(0, 1, 2), (1,)] and sorted(frozen) == [(0,), (1,)]


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


@pytest.mark.parametrize(("kind", "steps"), [(Net, 1), (Branching, 4)])
def test_the_step_of_another_size_has_the_bits_of_one_recorded_first(
    kind: type[Net], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever plans of other sizes share with a new one, its step is that of a model that has no other plan."""
    monkeypatch.setitem(globals(), "Net", kind)
    (many, _), (few, _) = trained((6, 6, 6, 5, 4, 6, 5, 2)), trained((6,))
    assert len(steps_of(many)) == steps and not steps_of(few)
    states = {n: np.array(t.data) for n, t in {**many.get_states(), **many.optimizer.get_states()}.items()}
    found, expected = at(many, states), at(few, states)
    assert len(steps_of(few)) == 1 and steps_of(few)[0]._session.reason is None
    assert found == expected
    assert found != {n: v.tobytes() for n, v in states.items()}


@pytest.mark.parametrize(("kind", "count"), [(Net, 1), (Branching, 2)])
def test_sizes_in_turn_keep_their_steps_and_plans(kind: type[Net], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in epochs whose last batch is smaller."""
    monkeypatch.setitem(globals(), "Net", kind)
    net, _ = trained((6, 6, 6, 5))
    steps = steps_of(net)
    plans = [step._session._planner.latest for step in steps if step._session._planner is not None]
    for _ in range(3):
        net(*batch(6))
        net(*batch(5))
    assert steps_of(net) == steps and len(steps) == len(plans) == count
    assert plans == [step._session._planner.latest for step in steps if step._session._planner is not None]
