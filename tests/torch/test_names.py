"""What has PyTorch's name or meaning, against PyTorch in float64, on the tape and as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from singa import autograd, layer, opt
from singa._core.tensor import Tensor, to_numpy
from singa.model import Model

STEPS = 6
RNG = np.random.default_rng(0)
X, Y, W, B = (RNG.normal(size=shape) for shape in ((8, 5), (8, 3), (5, 3), (3,)))

Start = Callable[[Any, Any], tuple[torch.optim.Optimizer, Any]]
"""The optimizer and the schedule of two parameters, W and b."""


class Net(Model):
    def __init__(self, optimizer: opt.Optimizer) -> None:
        super().__init__()
        self.fc = layer.Linear(3)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def ours(optimizer: opt.Optimizer, graph: bool) -> list[np.ndarray]:
    x, y = (Tensor(data=a, requires_grad=False) for a in (X, Y))
    net = Net(optimizer)
    net.compile([x], is_train=True, use_graph=graph)
    net.set_params({"fc.W": W, "fc.b": B})
    for _ in range(STEPS):
        net(x, y)
    assert net.not_traceable == ""
    return [to_numpy(net.fc.W), to_numpy(net.fc.b)]


def theirs(start: Start, clip: Callable[[Any], Any] = lambda ps: None) -> list[np.ndarray]:
    w, b = (torch.from_numpy(a.copy()).requires_grad_() for a in (W, B))
    optimizer, schedule = start(w, b)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(torch.from_numpy(X) @ w + b, torch.from_numpy(Y)).backward()
        clip([w, b])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [w.detach().numpy(), b.detach().numpy()]


def agree(make: Callable[[], opt.Optimizer], wanted: list[np.ndarray]) -> None:
    for graph in (False, True):
        for found, there in zip(ours(make(), graph), wanted, strict=True):
            np.testing.assert_allclose(found, there, rtol=1e-10, atol=1e-12)


def sgd(schedule: Callable[[Any], Any] = lambda o: None) -> Start:
    def start(w: Any, b: Any) -> Any:
        optimizer = torch.optim.SGD([w, b], 0.5)
        return optimizer, schedule(optimizer)

    return start


def test_adamw() -> None:
    wanted = theirs(lambda w, b: (torch.optim.AdamW([w, b], 0.05, weight_decay=0.3), None))
    agree(lambda: opt.AdamW(0.05, weight_decay=0.3, dtype=np.float64), wanted)


def test_groups() -> None:
    def make() -> opt.Optimizer:
        adam = opt.AdamW(0.05, weight_decay=0.3, dtype=np.float64)
        adam.set_group("*.b", lr=0.2, weight_decay=0)
        return adam

    groups: Start = lambda w, b: (  # noqa: E731
        torch.optim.AdamW([{"params": [w]}, {"params": [b], "lr": 0.2, "weight_decay": 0}], 0.05, weight_decay=0.3),
        None,
    )
    agree(make, theirs(groups))


@pytest.mark.parametrize(
    "bounds, clip",
    [
        ({"norm": 0.3}, lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.3)),
        ({"value": 0.1}, lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.1)),
    ],
)
def test_clipping(bounds: dict[str, float], clip: Callable[[Any], Any]) -> None:
    def make() -> opt.Optimizer:
        one = opt.SGD(0.5, dtype=np.float64)
        one.clip_gradients(**bounds)
        return one

    agree(make, theirs(sgd(), clip))


@pytest.mark.parametrize(
    "ours, schedule",
    [
        (opt.StepDecay(0.5, 2, 0.3), lambda o: lr_scheduler.StepLR(o, 2, 0.3)),
        (opt.MultiStepDecay(0.5, [2, 5], 0.3), lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3)),
        (opt.CosineDecay(0.5, 6, 0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 6, 0.1)),
        (opt.WarmUp(0.5, 3, 0.2), lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=3)),
        (
            opt.WarmUp(opt.CosineDecay(0.5, 4), 2, 0.2),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.2, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedules(ours: opt.DecayScheduler, schedule: Callable[[Any], Any]) -> None:
    agree(lambda: opt.SGD(ours, dtype=np.float64), theirs(sgd(schedule)))


@pytest.mark.parametrize("places", [(), (3,), (2, 3)])
@pytest.mark.parametrize("weight", [None, [0.5, 2.0, 0.1, 1.5]])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["classes", "ignored", "labels"])
def test_softmax_cross_entropy(places: tuple[int, ...], weight: Any, smoothing: float, kind: str) -> None:
    x, ignore = RNG.normal(size=(5, 4, *places)), -100 if kind == "ignored" else None
    t = RNG.random(x.shape) if kind == "labels" else RNG.integers(0, 4, (5, *places))
    if kind == "labels":
        t /= t.sum(1, keepdims=True)
    elif kind == "ignored":
        t.flat[0] = -100
    there = torch.from_numpy(x.copy()).requires_grad_()
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    wanted = torch.nn.functional.cross_entropy(there, torch.from_numpy(t), weights, label_smoothing=smoothing)
    wanted.backward()
    autograd.training = True
    here = Tensor(data=x, stores_grad=True)
    loss = autograd.softmax_cross_entropy(here, Tensor(data=t, requires_grad=False), weight, ignore, smoothing)
    ((_, g),) = autograd.backward(loss)
    autograd.training = False
    np.testing.assert_allclose(to_numpy(loss)[0], wanted.item(), rtol=1e-12)
    np.testing.assert_allclose(to_numpy(g), there.grad.numpy(), rtol=1e-10, atol=1e-14)
