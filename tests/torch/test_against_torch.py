"""Training against PyTorch: the same first weights, by way of ONNX, and the same batches; 50 steps of SGD with momentum."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from singa import autograd, opt, sonnx
from singa._core.tensor import Tensor

_spec = importlib.util.spec_from_file_location("nets", Path(__file__).with_name("nets.py"))
assert _spec is not None and _spec.loader is not None
nets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nets)

STEPS, EVERY = 50, 10
GRADIENT, CURVE32, CURVE64 = 1e-4, 1e-4, 1e-8
"""The bounds: of gradients from identical states in float32, of the loss over 10 steps in float32, and over 50 in float64."""

CASES = nets.cases()


class Net(sonnx.SONNXModel):
    """The imported net with its loss."""

    def __init__(self, proto: Any, case: Any) -> None:
        super().__init__(proto)
        self.case = case
        self.optimizer = opt.SGD(case.lr, momentum=0.9, dtype=np.float64)

    def loss(self, *batch: Tensor) -> Tensor:
        inputs, targets = batch[: self.case.inputs], batch[self.case.inputs :]
        return self.case.ours(*targets, *self.forward(*inputs))  # type: ignore[no-any-return]

    def train_one_batch(self, *batch: Tensor) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer(loss)
        return loss


def theirs(case: Any, dtype: Any) -> tuple[Any, list[float], list[tuple[Any, dict[str, Any], dict[str, Any]]]]:
    """PyTorch's run: the exported net, the losses, and (batch, parameters, gradients) at every tenth step."""
    torch.set_num_threads(2)
    torch.backends.mkldnn.enabled = False  # deterministic, and float32 that is float32
    net, data = nets.start(case, dtype), nets.batches(case, dtype)
    proto = nets.to_onnx(net, data[0][: case.inputs])
    net = nets.start(case, dtype)
    sgd = torch.optim.SGD(net.parameters(), case.lr, momentum=0.9)
    losses, states = [], []
    for step in range(STEPS):
        batch = data[step % len(data)]
        there = [torch.from_numpy(a) for a in batch]
        sgd.zero_grad()
        loss = case.theirs(*there[case.inputs :], net(*there[: case.inputs]))
        loss.backward()
        if step % EVERY == EVERY - 1 or step == 0:
            values = {n: p.detach().numpy().copy() for n, p in net.named_parameters()}
            states.append((batch, values, {n: p.grad.numpy().copy() for n, p in net.named_parameters()}))
        sgd.step()
        losses.append(loss.item())
    return proto, losses, states


def ours(case: Any, dtype: Any, proto: Any, graph: bool) -> list[float]:
    net, data = Net(proto, case), nets.batches(case, dtype)
    net.compile([nets.wrap(a) for a in data[0][: case.inputs]], is_train=True, use_graph=graph)
    losses = [net(*map(nets.wrap, data[step % len(data)])).data.item() for step in range(STEPS)]
    assert net.not_traceable == ""
    return losses


def gradient_error(case: Any, proto: Any, states: Any) -> float:
    """The largest error of a parameter's gradient, relative to its norm, or to a thousandth of the whole gradient's: that of a
    bias before a normalisation is zero but for rounding."""
    worst = 0.0
    for batch, values, expected in states:
        net = Net(proto, case)
        net.train()
        names = list(net.get_params())
        assert set(names) == set(values), sorted(set(names) ^ set(values))
        net.set_params(values)
        found = {p.name: g.data for p, g in autograd.backward(net.loss(*map(nets.wrap, batch)))}
        assert set(found) == set(expected)
        whole = sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()) ** 0.5
        for name, g in expected.items():
            scale = max(float(np.linalg.norm(g.astype(np.float64))), 1e-3 * whole)
            worst = max(worst, float(np.linalg.norm(found[name].astype(np.float64) - g)) / scale)
    return worst


_RUNS: dict[Any, Any] = {}


@pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str, dtype: Any, graph: bool, record_property: Any) -> None:
    case = CASES[name]
    if (name, dtype) not in _RUNS:
        _RUNS[name, dtype] = theirs(case, dtype)
    proto, expected, states = _RUNS[name, dtype]
    found = ours(case, dtype, proto, graph)
    errors = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    first, whole = max(errors[:10]), max(errors)
    gradient = None if graph else gradient_error(case, proto, states)
    row = [name, np.dtype(dtype).name, "graph" if graph else "tape", f"{first:.1e}", f"{whole:.1e}",
           "" if gradient is None else f"{gradient:.1e}", f"{expected[0]:.3f} to {expected[-1]:.3f}"]  # fmt: skip
    record_property("row", row)
    assert sum(expected[-nets.BATCHES :]) < sum(expected[: nets.BATCHES])
    if dtype == np.float64:
        assert whole <= CURVE64
    elif not case.kinks:
        assert first <= CURVE32
    assert gradient is None or gradient <= GRADIENT or (case.kinks and dtype == np.float32)
