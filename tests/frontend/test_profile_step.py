"""`Model.profile_step`: the parts of a training step, what computes each gradient, and a model that is as before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from singa import autograd, device, layer, opt
from singa._core.tensor import Tensor
from singa._core.trace import NotTraceable
from singa.model import Model
from singa_backend import InvalidInput, Profile
from singa_backend.kernels import onednn, rounding

F = np.float32
X = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(F)
T = np.array([0, 1, 2, 0])

needs_library = pytest.mark.skipif(onednn.library() is None, reason=f"oneDNN is not available: {onednn.missing()}")


class Net(Model):
    """A convolution, a norm with running statistics, a dropout that draws, and a product."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = layer.Conv2d(6, 3, padding=1), layer.BatchNorm2d(), layer.Dropout(0.3)
        self.flat, self.last = layer.Flatten(), layer.Linear(3)
        self.set_optimizer(optimizer)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.flat(self.drop(autograd.relu(self.norm(self.conv(x))))))

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss


def net(optimizer: Any = None, graph: bool = True) -> Net:
    device.default_device.SetRandSeed(3)
    made = Net(optimizer or opt.AdamW(lr=0.01))
    made.compile([Tensor(data=X)], is_train=True, use_graph=graph)
    return made


def step(model: Model) -> bytes:
    return np.asarray(model(Tensor(data=X), Tensor(data=T)).data).tobytes()


def everything(model: Net) -> dict[str, bytes]:
    held = {**model.get_states(), **{f"optimizer.{n}": t for n, t in model.optimizer.get_states().items()}}
    return {n: np.asarray(t.data).tobytes() for n, t in held.items()}


def consistent(found: Profile) -> None:
    assert [p.part for p in found.parts] == ["forward", "backward", "update", "reorders"]
    assert sum(p.share for p in found.parts) == pytest.approx(1)
    assert sum(p.seconds for p in found.parts) == pytest.approx(found.step_seconds)
    steps = Counter(s.part for s in found.steps)
    assert {p.part: p.steps for p in found.parts} == {p.part: steps[p.part] for p in found.parts}
    for part in found.parts:
        mine = [s for s in found.steps if s.part == part.part]
        fast = sum(s.seconds for s in mine if s.kernel != "definition")
        assert part.kernels == pytest.approx(fast / part.seconds if part.seconds else 1.0)
    assert {n.part for n in found.nodes} == {"forward", "backward", "update"}
    assert sum(g.seconds for g in found.gradient_calls) <= found.step_seconds * (1 + 1e-9)


def test_the_parts_and_the_gradients_of_a_step() -> None:
    found = net().profile_step(Tensor(data=X), Tensor(data=T), runs=2)
    consistent(found)
    assert found.by == "plan" and found.runs == 2 and found.arena_bytes >= found.live_bytes > 0
    nodes = {p: {n.operator for n in found.nodes if n.part == p} for p in ("forward", "backward", "update")}
    assert {"Conv", "BatchNormalization", "Relu", "SoftmaxCrossEntropyLoss"} <= nodes["forward"]
    assert (
        "Sqrt" in nodes["update"] and not {"Conv", "Relu", "SoftmaxCrossEntropyLoss"} & nodes["update"]
    )  # AdamW divides by a root
    assert nodes["backward"] & {"MatMul", "Gemm"}
    calls = {g.operator: g for g in found.gradient_calls}
    assert {"Conv", "Relu", "BatchNormalization", "SoftmaxCrossEntropyLoss"} <= set(calls)
    assert all(g.by in ("kernel", "rule", "refused") and bool(g.reason) >= (g.by != "kernel") for g in found.gradient_calls)
    assert calls["SoftmaxCrossEntropyLoss"].nodes == 1 and calls["SoftmaxCrossEntropyLoss"].kernels
    reads = sum(t.data.nbytes for t in net().get_params().values())
    assert found.weight_bytes >= 3 * reads  # parameters, and two states of each


@needs_library
def test_what_computes_a_gradient() -> None:
    found = net().profile_step(Tensor(data=X), Tensor(data=T), runs=1)
    calls = {g.operator: g for g in found.gradient_calls}
    assert calls["Conv"].by == "kernel" and any("conv by weights" in k for k in calls["Conv"].kernels)
    assert not calls["Conv"].reason and calls["Conv"].seconds > 0
    assert found.gradients == sum(g.by == "kernel" and not g.reason for g in found.gradient_calls)
    assert any(s.kernel.startswith(("reorder", "pack", "unpack")) for s in found.steps if s.part == "reorders")


@needs_library
def test_a_gradient_that_a_kernel_declines_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")  # oneDNN's kernel has no float64

    class Wide(Net):
        def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
            loss = autograd.reduce_mean(autograd.relu(autograd.mul(x, self.scale)), None, 0)
            self.optimizer(loss)
            return loss

    made = Wide(opt.SGD(lr=0.1))
    made.scale = Tensor(data=np.ones((1, 3, 1, 1)), requires_grad=True, stores_grad=True)
    found = made.profile_step(Tensor(data=X.astype(np.float64)), Tensor(data=T), runs=1)
    calls = {g.operator: g for g in found.gradient_calls}
    assert calls["Relu"].by == "refused" and "float64" in calls["Relu"].reason
    assert calls["Relu"].reason in found.refused_gradients.values()
    assert calls["Mul"].by == "rule" and "no kernel of the gradient of Mul" in calls["Mul"].reason


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tape"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_training_goes_on_as_without_a_profile(graph: bool, steps: int) -> None:
    plain, measured = (net(graph=graph) for _ in range(2))
    losses: list[list[bytes]] = []
    for model in (plain, measured):
        device.default_device.SetRandSeed(7)
        losses.append([step(model) for _ in range(steps)])
        before = everything(model)
        if model is measured:
            model.profile_step(Tensor(data=X), Tensor(data=T), runs=2)
            assert {n: b for n, b in everything(model).items() if n in before} == before
        losses[-1] += [step(model) for _ in range(3)]
    assert losses[0] == losses[1]
    assert everything(plain) == everything(measured)
    assert measured.graph_mode == graph and bool(any(measured._steps.values())) == graph


def test_definitions_and_a_loop_of_updates_have_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(Net):
        def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
            loss = autograd.softmax_cross_entropy(self.forward(x), t)
            for p, g in autograd.backward(loss):  # updates between gradients
                self.optimizer.apply(p.name, p, g)
            self.optimizer.step()
            return loss

    made = Single(opt.SGD(lr=0.1, momentum=0.9))
    made.compile([Tensor(data=X)], is_train=True)
    consistent(made.profile_step(Tensor(data=X), Tensor(data=T), runs=1))
    monkeypatch.setattr("singa_backend.session.Session._refusal", lambda _: _refused())
    found = made.profile_step(Tensor(data=X), Tensor(data=T), runs=1)
    consistent(found)
    assert found.by == "definitions" and {g.by for g in found.gradient_calls} == {"rule"}
    updates = {n.operator for n in found.nodes if n.part == "update" and n.seconds}
    assert updates <= {"Mul", "Add", "Sub", "Cast", "Reshape", "Squeeze", "CastLike"} and "Mul" in updates


def _refused() -> Any:
    from singa_backend.session import NO_PLANS

    return NO_PLANS


def test_the_precision_is_in_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    made = net()
    made.graph(True, precision="bf16")
    found = made.profile_step(Tensor(data=X), Tensor(data=T), runs=1)
    assert found.options["precision"] == "bf16" and bool(found.notes) == (rounding.rounding() == rounding.NONE)
    monkeypatch.setattr(rounding, "rounding", lambda: rounding.NONE)
    (note,) = made.profile_step(Tensor(data=X), Tensor(data=T), runs=1).notes
    assert "computed in float32" in note
    assert not net().profile_step(Tensor(data=X), Tensor(data=T), runs=1).notes


def test_what_cannot_be_profiled() -> None:
    class Reads(Net):
        def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
            loss = autograd.softmax_cross_entropy(self.forward(x), t)
            self.optimizer(loss)
            return float(loss.data.item()) and loss

    made = Reads(opt.SGD(lr=0.1))
    made.compile([Tensor(data=X)], is_train=True)
    before = everything(made)
    with pytest.raises(NotTraceable) as error:
        made.profile_step(Tensor(data=X), Tensor(data=T))
    assert error.value.code == "SX330"
    after = everything(made)
    assert {n: after[n] for n in before} == before
    for runs in (0, -1, 1.5, "2"):
        with pytest.raises(InvalidInput, match="runs"):
            net().profile_step(Tensor(data=X), Tensor(data=T), runs=runs)  # type: ignore[arg-type]
    assert made.training
