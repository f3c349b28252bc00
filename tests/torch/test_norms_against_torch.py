"""Trainings of nets with RMS, group and instance normalization against PyTorch, by the kernels of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.recorded_steps import steps_of
from torch import nn
from torch.nn import functional

from singa import autograd, layer, model, opt
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa_backend.kernels.table import GRADIENT

F = np.float32
RNG = np.random.default_rng(0)
STEPS = 20


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tape.training = False
    yield
    tape.training = False


class Rows(nn.Module):
    """A feed-forward block of Llama, with its norm in front and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.RMSNorm(33, eps=1e-5), nn.RMSNorm(33, eps=1e-5)
        self.gate, self.up, self.down = (nn.Linear(*s) for s in ((33, 50), (33, 50), (50, 33)))
        self.head = nn.Linear(33, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return self.head(self.last(x))


class Ours(model.Model):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        y = op.Reshape(self.forward(x), [-1, 4])
        loss = autograd.softmax_cross_entropy(y, labels)
        self.optimizer(loss)
        return y, loss


class OurRows(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = layer.RMSNorm(), layer.RMSNorm()
        self.gate, self.up, self.down, self.head = (layer.Linear(n) for n in (50, 50, 33, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gate = self.gate(h)
        x = op.Add(x, self.down(op.Mul(op.Mul(gate, op.Sigmoid(gate)), self.up(h))))
        return self.head(self.last(x))


class Images(nn.Module):
    """A residual block with a normalization of each kind in front of a convolution."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.norm1, self.norm2 = (
            nn.GroupNorm(3, 12) if kind == "group" else nn.InstanceNorm2d(12, affine=True) for _ in range(2)
        )
        self.head = nn.Linear(12 * 5 * 7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        h = self.first(functional.silu(self.norm1(x)))
        return self.head((x + self.second(functional.silu(self.norm2(h)))).flatten(1))


class OurImages(Ours):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stem, self.first, self.second = layer.Conv2d(12, 3), layer.Conv2d(12, 3, padding=1), layer.Conv2d(12, 3, padding=1)
        self.norm1, self.norm2 = layer.GroupNorm(3), layer.GroupNorm(3)  # of which instance normalization takes the parameters
        self.head = layer.Linear(4)

    def _normal(self, norm: Any, x: Tensor) -> Tensor:
        if self.kind == "group":
            y: Tensor = norm(x)
            return y
        if not norm._initialized:
            norm(x)
        return op.InstanceNormalization(x, norm.scale, norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self._normal(self.norm1, x)
        h = self.first(op.Mul(h, op.Sigmoid(h)))
        h = self._normal(self.norm2, h)
        x = op.Add(x, self.second(op.Mul(h, op.Sigmoid(h))))
        return self.head(op.Flatten(x))


def parameters(net: nn.Module) -> dict[str, np.ndarray]:
    """The parameters of PyTorch's net by the names of ours."""
    found = {}
    for name, p in net.named_parameters():
        array, (part, kind) = p.detach().numpy(), name.split(".")
        ours = "scale" if "norm" in part or part == "last" else "W"
        found[f"{part}.{ours if kind == 'weight' else 'bias' if ours == 'scale' else 'b'}"] = (
            array.T if ours == "W" and array.ndim == 2 else array
        )
    return found


CASES = {
    "RMSNormalization": (Rows, OurRows, (5, 7, 33)),
    "GroupNormalization": (lambda: Images("group"), lambda: OurImages("group"), (3, 3, 7, 9)),
    "InstanceNormalization": (lambda: Images("instance"), lambda: OurImages("instance"), (3, 3, 7, 9)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_trajectories(name: str) -> None:
    make, make_ours, shape = CASES[name]
    torch.manual_seed(0)
    theirs, ours = make(), make_ours()
    xs = RNG.normal(size=(STEPS, *shape)).astype(F)
    labels = RNG.integers(0, 4, (STEPS, 35 if len(shape) == 3 else 3))
    ours.set_optimizer(opt.SGD(0.02, momentum=0.9))
    ours.compile([Tensor(data=xs[0])], use_graph=True)
    ours.set_params({n: np.ascontiguousarray(a) for n, a in parameters(theirs).items()})
    ours.train()
    rule = torch.optim.SGD(theirs.parameters(), 0.02, momentum=0.9)
    for x, t in zip(xs, labels, strict=True):
        rule.zero_grad()
        loss = functional.cross_entropy(theirs(torch.from_numpy(x)).reshape(-1, 4), torch.from_numpy(t))
        loss.backward()
        rule.step()
        _, our_loss = ours(Tensor(data=x), Tensor(data=t))
        assert abs(float(our_loss.data.item()) - float(loss.detach())) < 1e-5
    for n, expected in parameters(theirs).items():
        np.testing.assert_allclose(ours.get_params()[n].data, expected, rtol=0, atol=1e-5, err_msg=n)
    (step,) = steps_of(ours)
    planner = step._session._planner
    assert planner is not None and not planner.gradients.reasons
    assert [c.op_type for c in planner.graph.nodes if c.domain == GRADIENT].count(name) == 2
