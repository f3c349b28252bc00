"""Gradients of a gradient penalty, compared with PyTorch's double backward: a step of WGAN-GP, for several nets as ONNX files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from singa import autograd, opt, sonnx
from singa._core.tensor import Tensor, op

_spec = importlib.util.spec_from_file_location("nets", Path(__file__).with_name("nets.py"))
assert _spec is not None and _spec.loader is not None
nets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nets)

# Float attributes are those that float32 represents exactly, because ONNX stores them in float32.
BOUND = {np.float32: 1e-4, np.float64: 1e-10}


class Attend(nn.Module):
    """Softmax attention of two heads, then a score."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.score = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.reshape(-1, 5, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1)
        return self.score(self.out((weights @ v).transpose(1, 2).reshape(-1, 5, 8)).mean(1))


class Gelu(nn.Module):
    """Gelu in its tanh form."""

    def forward(self, x: Any) -> Any:
        return functional.gelu(x, approximate="tanh")


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.25), nn.Linear(16, 8), nn.Softplus(), nn.Linear(8, 1)), (4, 6)
    ),
    "conv-pool": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ELU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3, stride=2, padding=1), nn.Sigmoid(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 1),
        ),
        (4, 1, 8, 8),
    ),
    "layernorm": (lambda: nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12, eps=2**-17), nn.SiLU(), nn.Linear(12, 1)), (4, 6)),
    "attention": (Attend, (3, 5, 8)),
    "tanh-gelu": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8), Gelu(), nn.Linear(8, 1)),
        (4, 6),
    ),
    "batchnorm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps=2**-17), nn.Tanh(), nn.Linear(8, 1)), (5, 6)),
}  # fmt: skip


class Critic(sonnx.SONNXModel):
    """The loss of a critic in WGAN-GP."""

    def __init__(self, proto: Any) -> None:
        super().__init__(proto)
        self.optimizer = opt.SGD(0.05, dtype=np.float64)

    def loss(self, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        mixed = op.Add(op.Mul(share, real), op.Mul(1 - share, fake))
        mixed.requires_grad = True
        score = op.ReduceSum(self.forward(mixed)[0], None, keepdims=0)
        g = autograd.gradients(score, create_graph=True, inputs=[mixed])[id(mixed)]
        norm = op.Sqrt(op.ReduceSum(op.Mul(g, g), list(range(1, len(g.shape))), keepdims=0))
        distance = op.ReduceMean(op.Sub(self.forward(fake)[0], self.forward(real)[0]), None, keepdims=0)
        return distance + 10.0 * op.ReduceMean((norm - 1.0) * (norm - 1.0), None, keepdims=0)  # type: ignore[no-any-return]

    def train_one_batch(self, *batch: Tensor) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer(loss)
        return loss


def their_loss(net: nn.Module, real: Any, fake: Any, share: Any) -> Any:
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    (g,) = torch.autograd.grad(net(mixed).sum(), mixed, create_graph=True)
    norm = g.flatten(1).norm(dim=1)
    return (net(fake) - net(real)).mean() + 10 * ((norm - 1) ** 2).mean()


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", NETS)
def test_a_penalty_against_torch(name: str, dtype: Any) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    net = make().to(torch.float64 if dtype == np.float64 else torch.float32).train()
    rng = np.random.default_rng(1)
    batch = [rng.standard_normal(shape).astype(dtype) for _ in range(2)]
    batch.append(rng.random((shape[0], *[1] * (len(shape) - 1))).astype(dtype))
    proto = nets.to_onnx(net, (batch[0],))
    sgd = torch.optim.SGD(net.parameters(), 0.05)
    tape, graph = Critic(proto), Critic(proto)
    tape.train()
    graph.compile([nets.wrap(batch[0])], is_train=True, use_graph=True)
    for step in range(3):
        sgd.zero_grad()
        expected = their_loss(net, *map(torch.from_numpy, batch))
        expected.backward()
        tape.set_params({n: p.detach().numpy() for n, p in net.named_parameters()})
        found = {p.name: g.data for p, g in autograd.backward(tape.loss(*map(nets.wrap, batch)))}
        theirs = {n: p.grad.numpy() for n, p in net.named_parameters() if p.grad is not None}
        assert set(found) <= set(theirs)
        whole = sum(float((g.astype(np.float64) ** 2).sum()) for g in theirs.values()) ** 0.5
        for n, g in theirs.items():
            scale = max(float(np.linalg.norm(g.astype(np.float64))), 1e-3 * whole)
            ours = found.get(n, np.zeros_like(g))
            assert float(np.linalg.norm(ours.astype(np.float64) - g)) <= BOUND[dtype] * scale, (step, n)
        assert graph(*map(nets.wrap, batch)).data.item() == pytest.approx(expected.item(), rel=100 * BOUND[dtype])
        sgd.step()
    assert graph.not_traceable == ""
