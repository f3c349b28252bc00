"""Optimizers, losses and layers with PyTorch's name or meaning, against PyTorch in float64, on the tape and as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from singa import autograd, data, layer, opt
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


# --- layers: the parameters of PyTorch's in ours, the outputs, and the gradients of the inputs and of a parameter -------------


class One(Model):
    """One layer, and a fixed sum of its outputs as the loss."""

    def __init__(self, inner: layer.Layer, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.arguments, self.optimizer = inner, arguments, opt.SGD(0.1, dtype=np.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x, **self.arguments)
        return y[0] if isinstance(y, tuple) else y

    def train_one_batch(self, x: Tensor) -> Tensor:
        y = self.forward(x)
        loss = autograd.mse_loss(y, autograd.cos(y.detach()))
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def curves(
    inner: Callable[[], layer.Layer], states: dict[str, Any], there: Any, x: np.ndarray, call: Any, **arguments: Any
) -> None:
    """Five steps of SGD on both sides."""
    sgd, wanted = torch.optim.SGD(there.parameters(), 0.1), []
    for _ in range(5):
        sgd.zero_grad()
        y = call(torch.from_numpy(x))
        loss = ((y - torch.cos(y.detach())) ** 2).mean()
        loss.backward()
        sgd.step()
        wanted.append(loss.item())
    for graph in (False, True):
        net = One(inner(), arguments)
        net.compile([Tensor(data=x, requires_grad=False)], is_train=True, use_graph=graph)
        assert set(states) == {n.removeprefix("inner.") for n in net.get_params()}
        net.inner.set_params({f"inner.{n}": v for n, v in states.items()})
        found = [float(to_numpy(net(Tensor(data=x, requires_grad=False)))[0]) for _ in range(5)]
        assert net.not_traceable == ""
        np.testing.assert_allclose(found, wanted, rtol=1e-9)


def numbers(module: Any) -> dict[str, np.ndarray]:
    return {n: p.detach().numpy().copy() for n, p in module.named_parameters()}


@pytest.mark.parametrize("o", [
    {}, {"stride": 2, "padding": 1, "output_padding": 1}, {"stride": (2, 1), "dilation": (1, 2), "groups": 2, "bias": False},
])  # fmt: skip
def test_conv_transpose(o: dict[str, Any]) -> None:
    there = torch.nn.ConvTranspose2d(4, 6, 3, dtype=torch.float64, **o)
    states = {{"weight": "W", "bias": "b"}[n]: v for n, v in numbers(there).items()}
    o["group"] = o.pop("groups", 1)
    curves(lambda: layer.ConvTranspose2d(6, 3, **o), states, there, RNG.normal(size=(2, 4, 5, 6)), there)


@pytest.mark.parametrize("layers, both, bias", [(1, False, True), (2, True, True), (1, False, False)])
def test_gru(layers: int, both: bool, bias: bool) -> None:
    there = torch.nn.GRU(3, 4, layers, bias, batch_first=True, bidirectional=both, dtype=torch.float64)
    states = {}
    for name, v in numbers(there).items():
        kind, end = name.split("_l", 1)
        end = end.replace("0", "").replace("1", "_l1")
        for gate, part in zip("rzn", np.split(v, 3), strict=True):
            ours = {"weight_ih": "Wx", "weight_hh": "Wh", "bias_ih": "Bx", "bias_hh": "Bh"}[kind]
            states[f"{ours}_{gate}{end}"] = part.T.copy()
    x = RNG.normal(size=(2, 5, 3))
    curves(lambda: layer.GRU(3, 4, layers, bias, True, 0, both), states, there, x, lambda x: there(x)[0])


def attention_states(values: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    found = {}
    for n, kind in (("W", "weight"), ("b", "bias")):
        for name, part in zip("qkv", np.split(values[f"in_proj_{kind}"], 3), strict=True):
            found[f"{prefix}{name}.{n}"] = part.T.copy()
        found[f"{prefix}out.{n}"] = values[f"out_proj.{kind}"].T.copy()
    return found


PADDING = np.array([[False, False, False, True], [False, True, False, False]])
CAUSAL = np.triu(np.ones((4, 4), bool), 1)


@pytest.mark.parametrize("ours, theirs", [
    ({}, {}),
    ({"is_causal": True}, {"attn_mask": CAUSAL}),
    ({"attn_mask": CAUSAL}, {"attn_mask": CAUSAL}),
    ({"attn_mask": np.eye(4)}, {"attn_mask": np.eye(4)}),
    ({"key_padding_mask": PADDING}, {"key_padding_mask": PADDING}),
])  # fmt: skip
def test_attention(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    there = torch.nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    masks = {n: torch.from_numpy(m) for n, m in theirs.items()}
    states = attention_states(numbers(there))
    x = RNG.normal(size=(2, 4, 6))
    curves(lambda: layer.MultiHeadAttention(6, 3), states, there, x, lambda x: there(x, x, x, **masks)[0], **ours)


@pytest.mark.parametrize("o", [{}, {"norm_first": True, "activation": "gelu"}])
def test_encoder_layer(o: dict[str, Any]) -> None:
    there = torch.nn.TransformerEncoderLayer(6, 2, 10, 0.0, batch_first=True, dtype=torch.float64, **o)
    values = numbers(there)
    states = attention_states({n.removeprefix("self_attn."): v for n, v in values.items()}, "attention.")
    for n in ("linear1", "linear2"):
        states |= {f"{n}.W": values[f"{n}.weight"].T.copy(), f"{n}.b": values[f"{n}.bias"]}
    for n in ("norm1", "norm2"):
        states |= {f"{n}.{NORM[0]}": values[f"{n}.weight"], f"{n}.{NORM[1]}": values[f"{n}.bias"]}
    x = RNG.normal(size=(2, 4, 6))
    curves(lambda: layer.TransformerEncoderLayer(6, 2, 10, 0.0, **o), states, there, x, there)


NORM = ("scale", "bias")


@pytest.mark.parametrize(
    "name, theirs", [("sum", "sum"), ("mean", "mean"), ("max", "amax"), ("min", "amin"), ("argmax", "argmax")]
)
@pytest.mark.parametrize("axis, keep", [(0, False), (-1, True)])
def test_reductions(name: str, theirs: str, axis: int, keep: bool) -> None:
    x = RNG.normal(size=(2, 3, 4))
    wanted = getattr(torch.from_numpy(x), theirs)(axis, keep).numpy()
    np.testing.assert_allclose(getattr(Tensor(data=x), name)(axis, keep).numpy(), wanted, rtol=1e-13)


@pytest.mark.parametrize("drop_last", [False, True])
def test_loader_fit_evaluate_and_predict(drop_last: bool) -> None:
    torch.manual_seed(0)
    there = torch.nn.Linear(5, 3, dtype=torch.float64)
    net = Net(opt.SGD(0.125, momentum=0.9))
    net.compile([Tensor(data=X)])
    net.set_params({"fc.W": there.weight.detach().numpy().T, "fc.b": there.bias.detach().numpy()})
    samples = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    loader = torch.utils.data.DataLoader(samples, batch_size=3, drop_last=drop_last)
    sgd, losses = torch.optim.SGD(there.parameters(), 0.125, momentum=0.9), []
    for _ in range(3):
        for x, y in loader:
            sgd.zero_grad()
            loss = torch.nn.functional.mse_loss(there(x), y)
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    mine = data.ArrayLoader(X, Y, batch_size=3, drop_last=drop_last)
    assert len(mine) == len(loader)
    np.testing.assert_allclose(net.fit(mine, epochs=3).losses, losses, rtol=1e-12)
    with torch.no_grad():
        out = there(torch.from_numpy(X))
        np.testing.assert_allclose(net.predict(X, batch_size=3), out.numpy(), rtol=1e-12)
        wanted = torch.nn.functional.mse_loss(out, torch.from_numpy(Y)).item()
    assert net.evaluate(X, Y, batch_size=3)["loss"] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_to(name: str) -> None:
    """The same numbers; the sums of a product in another order."""
    torch.manual_seed(0)
    there = torch.nn.Linear(5, 3, dtype=torch.float64)
    net = Net(opt.SGD(0.1))
    net.compile([Tensor(data=X)])
    net.set_params({"fc.W": there.weight.detach().numpy().T, "fc.b": there.bias.detach().numpy()})
    kind = getattr(torch, name)
    there.to(dtype=kind)
    net.to(dtype=name)
    np.testing.assert_array_equal(to_numpy(net.fc.W).astype(np.float64), there.weight.detach().to(torch.float64).numpy().T)
    x = torch.from_numpy(X).to(kind)
    mine = net.predict(X.astype(to_numpy(net.fc.W).dtype))
    np.testing.assert_allclose(
        mine.astype(np.float64),
        there(x).detach().to(torch.float64).numpy(),
        rtol=4 * torch.finfo(kind).eps,
        atol=4 * torch.finfo(kind).eps,
    )
