"""Forty drawn nets are trained as by PyTorch at each level of instructions, with equal bits in each run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import drawn_trainings as drawn
from tests.helpers.drawn_trainings import DECAY, EPSILON, MOMENTUM, MOVING, Arrays, Drawn, Trained, bound, different, move_error
from torch.nn import functional

SEEDS = list(range(40))
THREADS = (1, 2)

RELATIVE = 8.0
"""An error may be this multiple of that of PyTorch in float32, if it is above `bound`; both are against PyTorch in float64."""


class Layers:
    """The parts of a drawn net by PyTorch."""

    add = staticmethod(torch.add)

    @staticmethod
    def conv(x: Any, w: Any, *b: Any, stride: int, padding: int, groups: int, dilation: int) -> Any:
        return functional.conv2d(x, w, *(b or [None]), stride, padding, dilation, groups)

    @staticmethod
    def transposed(x: Any, w: Any, b: Any, *, stride: int, padding: int, more: int) -> Any:
        return functional.conv_transpose2d(x, w, b, stride, padding, more)

    @staticmethod
    def batch_norm(x: Any, scale: Any, shift: Any, mean: Any, variance: Any) -> Any:
        return functional.batch_norm(x, mean, variance, scale, shift, True, MOVING, EPSILON)

    @staticmethod
    def instance_norm(x: Any, scale: Any, shift: Any) -> Any:
        return functional.instance_norm(x, weight=scale, bias=shift, eps=EPSILON)

    @staticmethod
    def group_norm(x: Any, scale: Any, shift: Any, *, groups: int) -> Any:
        return functional.group_norm(x, groups, scale, shift, EPSILON)

    @staticmethod
    def layer_norm(x: Any, scale: Any, shift: Any, *, axes: int) -> Any:
        return functional.layer_norm(x, x.shape[-axes:], scale, shift, EPSILON)

    @staticmethod
    def activation(x: Any, *, name: str) -> Any:
        function = {"LeakyRelu": functional.leaky_relu, "HardSwish": functional.hardswish}.get(name)
        return (function or getattr(functional, name.lower()))(x)

    @staticmethod
    def max_pool(x: Any, *, kernel: int, stride: int, padding: int) -> Any:
        return functional.max_pool2d(x, kernel, stride, padding)

    @staticmethod
    def average_pool(x: Any, *, kernel: int, stride: int, padding: int) -> Any:
        return functional.avg_pool2d(x, kernel, stride, padding)

    @staticmethod
    def mean_of_image(x: Any) -> Any:
        return x.mean((2, 3), keepdim=True)

    @staticmethod
    def mean_of_rows(x: Any) -> Any:
        return x.mean(1)

    @staticmethod
    def flatten(x: Any) -> Any:
        return x.flatten(1)

    @staticmethod
    def linear(x: Any, w: Any, b: Any) -> Any:
        return x @ w + b

    @staticmethod
    def attention(x: Any, w: Any, b: Any, out: Any, *, heads: int, causal: bool) -> Any:
        q, k, v = (p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in (x @ w + b).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return mixed.transpose(1, 2).flatten(2) @ out

    @staticmethod
    def lstm(x: Any, w: Any, r: Any, b: Any, *, hidden: int, directions: int) -> Any:
        return _recurred(torch.nn.LSTM, (0, 2, 3, 1), x, w, r, b, hidden, directions)  # ONNX: input, output, forget, cell

    @staticmethod
    def gru(x: Any, w: Any, r: Any, b: Any, *, hidden: int, directions: int) -> Any:
        return _recurred(torch.nn.GRU, (1, 0, 2), x, w, r, b, hidden, directions)  # ONNX: update, reset, hidden


def _recurred(kind: Any, order: tuple[int, ...], x: Any, w: Any, r: Any, b: Any, hidden: int, directions: int) -> Any:
    """The layer with ONNX's weights: PyTorch's gates have another order."""
    module = kind(x.shape[-1], hidden, batch_first=True, bidirectional=directions == 2)
    values = {}
    for i, end in zip(range(directions), ("", "_reverse"), strict=False):
        parts = {"weight_ih": w[i], "weight_hh": r[i], "bias_ih": b[i].chunk(2)[0], "bias_hh": b[i].chunk(2)[1]}
        for name, value in parts.items():
            gates = value.chunk(len(order))
            values[f"{name}_l0{end}"] = torch.cat([gates[g] for g in order])
    return torch.func.functional_call(module, values, (x,))[0]


def train(net: Drawn, dtype: torch.dtype) -> Arrays:
    """The losses and the states after PyTorch's training, by name."""
    weights = {n: torch.tensor(a, dtype=dtype, requires_grad=True) for n, a in net.weights.items()}
    states = {**weights, **{n: torch.tensor(a, dtype=dtype) for n, a in net.statistics.items()}}
    if net.adam:
        rule: Any = torch.optim.AdamW(weights.values(), net.rate, eps=drawn.ADAM_EPSILON, weight_decay=DECAY)
    else:
        rule = torch.optim.SGD(weights.values(), net.rate, momentum=MOMENTUM, weight_decay=DECAY)
    score: Callable[..., Any] = functional.cross_entropy if net.classifies else functional.mse_loss
    losses = []
    for x, t in net.batches:
        rule.zero_grad()
        target = torch.from_numpy(t)
        y = drawn.compute(Layers, net.parts, torch.tensor(x, dtype=dtype), states)
        loss = score(y, target if net.classifies else target.to(dtype))
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return {**{n: s.detach().numpy().copy() for n, s in states.items()}, "losses": np.array(losses)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Trained]]:
    """Two processes that train all nets at a level of instructions with a number of threads."""
    known: dict[tuple[str, int], list[Trained]] = {}

    def run(limit: str, threads: int) -> list[Trained]:
        if (limit, threads) not in known:
            folders = [tmp_path_factory.mktemp("states") for _ in range(2)]
            known[limit, threads] = [drawn.trained(SEEDS, folder, limit=limit, threads=threads) for folder in folders]
        return known[limit, threads]

    return run


@cache
def witness(seed: int) -> tuple[Drawn, Arrays, float]:
    """A net, its training by PyTorch in float64, and the bound of errors."""
    torch.set_num_threads(1)
    net = drawn.draw(seed)
    expected = train(net, torch.float64)
    return net, expected, max(bound(net), RELATIVE * move_error(train(net, torch.float32), expected, net))


@pytest.mark.parametrize(("limit", "threads", "seed"), list(product(drawn.levels(), THREADS, SEEDS)))
def test_level(limit: str, threads: int, seed: int, runs: Callable[[str, int], list[Trained]], record_property: Any) -> None:
    processes = runs(limit, threads)
    assert [p.ends.get(seed, "") for p in processes] == ["", ""]
    first, *others = [states for p in processes for states in p.states[seed]]
    net, expected, most = witness(seed)
    error = move_error(first, expected, net)
    record_property("level", [processes[0].level, threads, net.name, error])
    assert [different(first, other) for other in others] == [[], [], []]
    assert [p.reasons[seed] for p in processes] == [[], []]  # plans computed all recorded steps
    assert error <= most, net.name
