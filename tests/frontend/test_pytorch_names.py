"""What PyTorch has and SINGA has not: on the tape and as a graph, against formulas in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from singa import autograd, layer, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor, to_numpy
from singa.model import Model
from singa_backend.backend import SingaBackend
from singa_backend.errors import InvalidInput

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 3))
Y = RNG.normal(size=(5, 2))
STEPS = 5


@pytest.fixture(autouse=True)
def training() -> Iterator[None]:
    tape.training = True
    yield
    tape.training = False


class Net(Model):
    def __init__(self, optimizer: opt.Optimizer | opt.DistOpt) -> None:
        super().__init__()
        self.fc = layer.Linear(2)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def train(optimizer: Any, graph: bool, dtype: Any = np.float64, steps: int = STEPS) -> tuple[Net, dict[str, np.ndarray]]:
    """The parameters after some steps from W = 1/2 and b = 1."""
    x, y = (Tensor(data=a.astype(dtype), requires_grad=False) for a in (X, Y))
    net = Net(optimizer)
    net.compile([x], is_train=True, use_graph=graph)
    net.set_params({"fc.W": np.full((3, 2), 0.5, dtype), "fc.b": np.ones(2, dtype)})
    for _ in range(steps):
        net(x, y)
    assert net.not_traceable == "" and (not graph or [len(s) for s in net._steps.values()] == [1])
    return net, {n: to_numpy(p).astype(np.float64) for n, p in net.get_params().items()}


def gradients(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    d = 2 * (X @ p["fc.W"] + p["fc.b"] - Y) / Y.size
    return {"fc.W": X.T @ d, "fc.b": d.sum(0)}


def expected(update: Callable[..., Any], clip: Callable[..., Any] = lambda g: g, steps: int = STEPS) -> dict[str, np.ndarray]:
    """The parameters after `update(name, p, g, state, t)`, in plain NumPy."""
    p = {"fc.W": np.full((3, 2), 0.5), "fc.b": np.ones(2)}
    states: dict[str, dict[str, Any]] = {n: {} for n in p}
    for t in range(steps):
        g = clip(gradients(p))
        p = {n: update(n, p[n], g[n], states[n], t) for n in p}
    return p


def agree(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rtol: float = 1e-12) -> None:
    assert set(found) == set(wanted)
    for n in wanted:
        np.testing.assert_allclose(found[n], wanted[n], rtol=rtol, atol=rtol)


def adamw(lr: float, decay: float) -> Callable[..., Any]:
    def update(name: str, p: Any, g: Any, state: dict[str, Any], t: int) -> Any:
        m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
        p = p * (1 - lr * decay)
        return p - lr * (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)

    return update


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-12), (np.float32, 2e-6)])
def test_adamw(graph: bool, dtype: Any, rtol: float) -> None:
    _, found = train(opt.AdamW(0.1, weight_decay=0.2, dtype=np.float64), graph, dtype)
    agree(found, expected(adamw(0.1, 0.2)), rtol)


@pytest.mark.parametrize("kind", ["SGD", "RMSProp", "AdaGrad", "Adam", "AdamW"])
def test_groups(kind: str) -> None:
    """A parameter of a group moves as with an optimizer that has the group's hyperparameters; the graph computes the same."""
    make = getattr(opt, kind)

    def grouped() -> opt.Optimizer:
        one: opt.Optimizer = make(lr=0.1, weight_decay=0.2, dtype=np.float64)
        one.set_group("*", lr=0.5)
        one.set_group("*.b", lr=opt.ExponentialDecay(0.05, 2, 0.5), weight_decay=0)
        one.set_group("fc.W", lr=0.02)
        return one

    w = train(make(lr=0.02, weight_decay=0.2, dtype=np.float64), False, steps=1)[1]
    b = train(make(lr=0.05, weight_decay=0, dtype=np.float64), False, steps=1)[1]
    agree(train(grouped(), False, steps=1)[1], {"fc.W": w["fc.W"], "fc.b": b["fc.b"]})
    agree(train(grouped(), True)[1], train(grouped(), False)[1], 0)


@pytest.mark.parametrize("graph", [False, True])
def test_groups_over_steps(graph: bool) -> None:
    sgd = opt.SGD(0.1, weight_decay=0.2, dtype=np.float64)
    sgd.set_group("*.b", lr=opt.ExponentialDecay(0.05, 2, 0.5), weight_decay=0)

    def update(name: str, p: Any, g: Any, state: Any, t: int) -> Any:
        return p - 0.05 * 0.5 ** (t / 2) * g if name == "fc.b" else p - 0.1 * (g + 0.2 * p)

    agree(train(sgd, graph)[1], expected(update))


def test_a_group_may_change_in_graph_mode() -> None:
    sgd = opt.SGD(0.1, dtype=np.float64)
    sgd.set_group("*.b", lr=0.5)
    net, before = train(sgd, True)
    sgd.set_group("*.b", lr=0)
    net(*(Tensor(data=a, requires_grad=False) for a in (X, Y)))
    after = {n: to_numpy(p) for n, p in net.get_params().items()}
    assert (after["fc.b"] == before["fc.b"]).all() and (after["fc.W"] != before["fc.W"]).all()


@pytest.mark.parametrize("graph", [False, True])
def test_a_group_that_matches_nothing(graph: bool) -> None:
    sgd = opt.SGD(0.1)
    sgd.set_group("fc.bias", lr=0.5)
    with pytest.raises(InvalidInput, match=r"'fc.bias'.*must match a parameter") as error:
        train(sgd, graph)
    assert error.value.code == "SX318" and "fc.b" in (error.value.hint or "")


def test_a_group_of_frozen_parameters_is_valid() -> None:
    sgd = opt.SGD(0.1)
    sgd.set_group("fc.b", lr=0.5)
    x, y = (Tensor(data=a, requires_grad=False) for a in (X, Y))
    net = Net(sgd)
    net.compile([x])
    net.freeze("fc.b")
    net(x, y)


def test_mistakes_in_groups() -> None:
    sgd = opt.SGD(0.1)
    with pytest.raises(ValueError, match="must set lr or weight_decay"):
        sgd.set_group("*")
    with pytest.raises(ValueError, match="at least 0, got -1"):
        sgd.set_group("*", weight_decay=-1)
    with pytest.raises(TypeError, match="lr must be a number or a DecayScheduler, got str"):
        sgd.set_group("*", lr="fast")
    assert sgd._groups == []

    class Plain(opt.Optimizer):
        pass

    with pytest.raises(ValueError, match="Plain must have the hyperparameter weight_decay"):
        Plain(0.1).set_group("*", weight_decay=1)


def by_norm(bound: float) -> Callable[..., Any]:
    def clip(g: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        total = math.sqrt(sum(float((v**2).sum()) for v in g.values()))
        return {n: v * min(1.0, bound / (total + 1e-6)) for n, v in g.items()}

    return clip


CLIPS: list[tuple[dict[str, float], Callable[..., Any]]] = [
    ({"norm": 0.1}, by_norm(0.1)),
    ({"norm": 1e4}, by_norm(1e4)),
    ({"value": 0.05}, lambda g: {n: np.clip(v, -0.05, 0.05) for n, v in g.items()}),
    ({"norm": 0.05, "value": 0.05}, lambda g: by_norm(0.05)({n: np.clip(v, -0.05, 0.05) for n, v in g.items()})),
]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("bounds, clip", CLIPS)
def test_clipping(bounds: dict[str, float], clip: Callable[..., Any], graph: bool) -> None:
    """The weight decay is added to the clipped gradients; data-parallel training clips the mean of the ranks."""
    sgd = opt.SGD(0.1, weight_decay=0.2, dtype=np.float64)
    sgd.clip_gradients(**bounds)
    wanted = expected(lambda name, p, g, state, t: p - 0.1 * (g + 0.2 * p), clip)
    agree(train(sgd, graph)[1], wanted)
    dist = opt.DistOpt(opt.SGD(0.1, weight_decay=0.2, dtype=np.float64))
    dist.opt.clip_gradients(**bounds)
    agree(train(dist, graph)[1], wanted)


def test_clipping_of_half_precision() -> None:
    """The norm is computed in float32: the square of 300 is infinite in float16."""
    p = Tensor(data=np.zeros(2, np.float16), stores_grad=True, name="p")
    sgd = opt.SGD(1.0)
    sgd.clip_gradients(norm=1.0)
    sgd._update_all([(p, Tensor(data=np.array([300, -400], np.float16)))])
    np.testing.assert_allclose(p.data.astype(np.float64), [-0.6, 0.8], rtol=1e-3)


def test_clipping_may_change_in_graph_mode() -> None:
    sgd = opt.SGD(0.1, dtype=np.float64)
    net, before = train(sgd, True)
    sgd.clip_gradients(value=1e-9)
    net(*(Tensor(data=a, requires_grad=False) for a in (X, Y)))
    for n, p in net.get_params().items():
        np.testing.assert_allclose(to_numpy(p), before[n], atol=1.1e-10)


def test_mistakes_in_clipping() -> None:
    sgd = opt.SGD(0.1)
    for bounds in ({"norm": 0.0}, {"value": -1.0}, {"norm": math.nan}):
        with pytest.raises(ValueError, match="must be positive"):
            sgd.clip_gradients(**bounds)
    sgd.clip_gradients(norm=1)
    p = Tensor(data=np.zeros(2), stores_grad=True, name="p")
    with pytest.raises(InvalidInput, match="must be applied together") as error:
        sgd.apply("p", p, Tensor(data=np.ones(2)))
    assert error.value.code == "SX329"
    sgd.clip_gradients(value=0.5)
    sgd.apply("p", p, Tensor(data=np.ones(2)))
    np.testing.assert_allclose(p.data, [-0.05, -0.05], rtol=1e-6)


SCHEDULES: list[tuple[opt.DecayScheduler, Callable[[int], float]]] = [
    (opt.StepDecay(0.5, 3, 0.1), lambda t: 0.5 * 0.1 ** (t // 3)),
    (opt.MultiStepDecay(0.5, [4, 2], 0.1), lambda t: 0.5 * 0.1 ** ((t >= 2) + (t >= 4))),
    (opt.CosineDecay(0.5, 4, 0.1), lambda t: 0.1 + 0.4 * (1 + math.cos(math.pi * min(t, 4) / 4)) / 2),
    (opt.WarmUp(0.5, 3), lambda t: 0.5 * min(t / 3, 1)),
    (opt.WarmUp(opt.CosineDecay(0.5, 3), 2, 0.25),
     lambda t: 0.5 * (0.25 + 0.75 * t / 2) if t < 2 else 0.5 * (1 + math.cos(math.pi * min(t - 2, 3) / 3)) / 2),
    (opt.WarmUp(opt.StepDecay(0.5, 2), 2), lambda t: 0.5 * t / 2 if t < 2 else 0.5 * 0.1 ** ((t - 2) // 2)),
]  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("schedule, formula", SCHEDULES, ids=lambda v: type(v).__name__)
def test_schedules(schedule: opt.DecayScheduler, formula: Callable[[int], float], graph: bool) -> None:
    sgd = opt.SGD(schedule, dtype=np.float64)
    rates = []
    x, y = (Tensor(data=a, requires_grad=False) for a in (X, Y))
    net = Net(sgd)
    net.compile([x], is_train=True, use_graph=graph)
    for _ in range(7):
        rates.append(float(to_numpy(sgd.lr_value)[0]))
        net(x, y)
    np.testing.assert_allclose(rates, [formula(t) for t in range(7)], rtol=1e-12, atol=1e-16)
    assert not graph or [len(s) for s in net._steps.values()] == [1]


def test_a_schedule_in_a_schedule_may_change_in_graph_mode() -> None:
    cosine = opt.CosineDecay(0.5, 8)
    sgd = opt.SGD(opt.WarmUp(cosine, 1), dtype=np.float64)
    net, _ = train(sgd, True)
    cosine.end_value = 0.3
    net(*(Tensor(data=a, requires_grad=False) for a in (X, Y)))
    wanted = 0.3 + 0.2 * (1 + math.cos(math.pi * 5 / 8)) / 2
    np.testing.assert_allclose(to_numpy(sgd.lr_value), [wanted], rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: opt.StepDecay(0.1, 0),
        lambda: opt.MultiStepDecay(0.1, []),
        lambda: opt.CosineDecay(0.1, -1),
        lambda: opt.WarmUp(0.1, 0),
        lambda: opt.WarmUp(0.1, 5, 1.5),
    ],
)
def test_mistakes_in_schedules(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


# --- losses -----------------------------------------------------------------------------------------------------------

CLASSES = 4
WEIGHT = np.array([0.5, 2.0, 0.0, 1.5])


def cross_entropy(x: np.ndarray, t: np.ndarray, weight: Any, ignore_index: Any, smoothing: float) -> float:
    """The loss of each position in a loop: rows of probabilities that are smoothed, weighted and averaged."""
    w = np.ones(CLASSES) if weight is None else np.asarray(weight)
    of_classes = t.ndim < x.ndim
    total = count = 0.0
    for at in np.ndindex(x.shape[0], *x.shape[2:]):
        z = x[(at[0], slice(None), *at[1:])]
        log = z - z.max() - math.log(sum(math.exp(v) for v in z - z.max()))
        if of_classes:
            k = int(t[at])
            if k == ignore_index:
                continue
            total -= (1 - smoothing) * w[k] * log[k] + smoothing / CLASSES * sum(w * log)
            count += w[k]
        else:
            row = t[(at[0], slice(None), *at[1:])]
            total -= sum(((1 - smoothing) * row / row.sum() + smoothing / CLASSES) * w * log)
            count += 1
    return total / count


def loss_cases() -> Iterator[Any]:
    for places in ((), (3,), (2, 3)):
        for weight in (None, WEIGHT):
            for smoothing in (0.0, 0.3):
                for kind in ("classes", "ignored", "negative", "labels"):
                    yield pytest.param(places, weight, smoothing, kind, id=f"{places}-{weight is not None}-{smoothing}-{kind}")


def loss_data(places: tuple[int, ...], kind: str) -> tuple[np.ndarray, np.ndarray, int | None]:
    rng = np.random.default_rng(len(places))
    x = rng.normal(size=(5, CLASSES, *places))
    if kind == "labels":
        return x, rng.random(x.shape), None
    t = rng.integers(0, CLASSES, (5, *places))
    t.flat[0], t.flat[1] = 1, 3
    ignore = {"classes": None, "ignored": 3, "negative": -100}[kind]
    if kind == "negative":
        t.flat[2] = -100
    return x, t, ignore


@pytest.mark.parametrize("places, weight, smoothing, kind", list(loss_cases()))
def test_softmax_cross_entropy(places: tuple[int, ...], weight: Any, smoothing: float, kind: str) -> None:
    """The value, and the gradient against central differences of the loop."""
    x, t, ignore = loss_data(places, kind)
    scores = Tensor(data=x, stores_grad=True, name="x")
    loss = autograd.softmax_cross_entropy(scores, Tensor(data=t, requires_grad=False), weight, ignore, smoothing)
    assert loss.shape == (1,)
    np.testing.assert_allclose(to_numpy(loss)[0], cross_entropy(x, t, weight, ignore, smoothing), rtol=1e-12)
    ((_, g),) = autograd.backward(loss)
    for at in [(0,) * x.ndim, (1, 3, *(0 for _ in places)), (4, 2, *(n - 1 for n in places))]:
        up, down = x.copy(), x.copy()
        up[at] += 1e-5
        down[at] -= 1e-5
        slope = (cross_entropy(up, t, weight, ignore, smoothing) - cross_entropy(down, t, weight, ignore, smoothing)) / 2e-5
        np.testing.assert_allclose(to_numpy(g)[at], slope, rtol=1e-6, atol=1e-9)


class Scores(Model):
    """Trains the scores themselves, with the layer of the loss."""

    def __init__(self, x: np.ndarray, loss: layer.Layer) -> None:
        super().__init__()
        self.x = Tensor(data=x.copy(), stores_grad=True)
        self.loss, self.optimizer = loss, opt.SGD(1.0, dtype=np.float64)

    def forward(self, t: Tensor) -> Tensor:
        return self.loss(self.x, t)  # type: ignore[no-any-return]

    def train_one_batch(self, t: Tensor) -> Tensor:
        loss = self.forward(t)
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize("kind", ["negative", "labels"])
@pytest.mark.parametrize("weight", [WEIGHT.tolist(), Tensor(data=WEIGHT, requires_grad=False)], ids=["list", "tensor"])
def test_the_loss_in_a_graph(kind: str, weight: Any) -> None:
    x, t, ignore = loss_data((3,), kind)
    curves = []
    for graph in (False, True):
        net = Scores(x, layer.SoftMaxCrossEntropy(weight, ignore, 0.1))
        target = Tensor(data=t, requires_grad=False)
        net.compile([target], is_train=True, use_graph=graph)
        curves.append([to_numpy(net(target))[0] for _ in range(4)])
        assert net.not_traceable == ""
    assert curves[0] == pytest.approx(curves[1], rel=1e-12) and curves[0][0] > curves[0][-1]
    np.testing.assert_allclose(curves[0][0], cross_entropy(x, t, WEIGHT, ignore, 0.1), rtol=1e-12)


def test_mistakes_in_losses() -> None:
    x, t = Tensor(data=np.zeros((2, 4, 3))), Tensor(data=np.zeros((2, 3), np.int64))
    for wanted, arguments in [
        ("one number for each class", (x, t, [1.0, 2.0])),
        ("must have one label for each row of x, shape", (x, Tensor(data=np.zeros((2, 2), np.int64)))),
        ("equal shapes", (x, Tensor(data=np.zeros(2, np.int64)))),
        ("must be used with class numbers", (x, x, None, 1)),
        (r"must have shape \(N, C, ...\)", (Tensor(data=np.zeros(2)), t)),
        (r"in \[0, 4\), got -1 to 0", (x, Tensor(data=np.array([[0, 0, 0], [0, -1, 3]])), None, 3)),
    ]:
        with pytest.raises(InvalidInput, match=wanted):
            autograd.softmax_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="label_smoothing must be in"):
        autograd.softmax_cross_entropy(x, t, label_smoothing=1.5)


# --- layers -----------------------------------------------------------------------------------------------------------


class One(Model):
    """One layer; a training step moves its first output towards zero."""

    def __init__(self, inner: layer.Layer, **arguments: Any) -> None:
        super().__init__()
        self.inner, self.arguments, self.optimizer = inner, arguments, opt.SGD(1e-3, dtype=np.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x, **self.arguments)
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor) -> Tensor:
        y = self.forward(x)
        loss = autograd.mse_loss(y, autograd.mul(y.detach(), Tensor(data=np.zeros(1), requires_grad=False)))
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def computes(make: Callable[[], layer.Layer], x: np.ndarray, formula: Callable[..., np.ndarray], **arguments: Any) -> None:
    """The layer against a formula of its parameters; the exported file; and four steps on the tape and in the graph."""
    rng = np.random.default_rng(1)
    values: dict[str, np.ndarray] = {}
    curves = []
    for graph in (False, True):
        net = One(make(), **arguments)
        given = Tensor(data=x, requires_grad=False)
        net.compile([given], is_train=False, use_graph=graph)
        values = values or {n: rng.normal(size=p.shape) for n, p in net.get_params().items()}
        net.set_params(values)
        wanted = formula({n.removeprefix("inner."): v for n, v in values.items()}, x)
        np.testing.assert_allclose(to_numpy(net(given)), wanted, rtol=1e-8)  # epsilon is a float32 in ONNX
        (from_file,) = SingaBackend.prepare(sonnx.to_onnx([given], net(given))).run([x])
        np.testing.assert_allclose(from_file, wanted, rtol=1e-8)
        net.train()
        curves.append([to_numpy(net(given))[0] for _ in range(4)])
        assert net.not_traceable == ""
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-12)  # machine code adds in another order
    assert curves[0][0] > curves[0][-1]


def sigmoid(x: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("both", [False, True])
def test_gru(both: bool) -> None:
    def one(p: dict[str, np.ndarray], x: np.ndarray, end: str) -> np.ndarray:
        h, made = np.zeros((2, 4)), []
        for v in x:
            a, b = ({g: u @ p[f"W{k}_{g}{end}"] + p[f"B{k}_{g}{end}"] for g in "rzn"} for k, u in (("x", v), ("h", h)))
            r, z = sigmoid(a["r"] + b["r"]), sigmoid(a["z"] + b["z"])
            h = (1 - z) * np.tanh(a["n"] + r * b["n"]) + z * h
            made.append(h)
        return np.stack(made)

    def formula(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        y = one(p, x, "")
        return np.concatenate([y, one(p, x[::-1], "_reverse")[::-1]], -1) if both else y

    computes(lambda: layer.GRU(3, 4, bidirectional=both), RNG.normal(size=(5, 2, 3)), formula)


def test_conv_transpose() -> None:
    """Stride 2, a border of 1 cut off, one more row and column at the end, and two groups."""

    def formula(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        y = np.zeros((2, 6, 2 * 3 + 2, 2 * 4 + 2))
        for n, c, i, j in np.ndindex(*x.shape):
            first = 3 * (c // 2)
            y[n, first : first + 3, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += x[n, c, i, j] * p["W"][c]
        return y[:, :, 1:-1, 1:-1] + p["b"][:, None, None]  # type: ignore[no-any-return]

    def make() -> layer.Layer:
        return layer.ConvTranspose2d(6, 3, stride=2, padding=1, output_padding=1, group=2)

    computes(make, RNG.normal(size=(2, 4, 3, 4)), formula)


def attend(p: dict[str, np.ndarray], x: np.ndarray, heads: int, allowed: np.ndarray) -> np.ndarray:
    """Attention in loops over samples, heads and queries; `allowed[n, i, j]`: whether query i attends to key j."""
    q, k, v = (x @ p[f"{n}.W"] + p[f"{n}.b"] for n in "qkv")
    size = q.shape[-1] // heads
    y = np.zeros_like(q)
    for n, h, i in np.ndindex(len(x), heads, x.shape[1]):
        part = slice(h * size, (h + 1) * size)
        weights = np.exp(k[n, :, part] @ q[n, i, part] / math.sqrt(size)) * allowed[n, i]
        y[n, i, part] = weights / weights.sum() @ v[n, :, part]
    return y @ p["out.W"] + p["out.b"]  # type: ignore[no-any-return]


CAUSAL = np.tril(np.ones((4, 4), bool))
PADDED = np.array([[False, False, False, True], [False, True, False, False]])


@pytest.mark.parametrize(
    "arguments, allowed",
    [
        ({}, np.ones((2, 4, 4), bool)),
        ({"is_causal": True}, np.stack([CAUSAL] * 2)),
        ({"attn_mask": ~CAUSAL}, np.stack([CAUSAL] * 2)),
        ({"key_padding_mask": PADDED, "is_causal": True}, CAUSAL & ~PADDED[:, None]),
    ],
)
def test_attention(arguments: dict[str, Any], allowed: np.ndarray) -> None:
    x = RNG.normal(size=(2, 4, 6)) / 3
    computes(lambda: layer.MultiHeadAttention(6, 3), x, lambda p, x: attend(p, x, 3, allowed), **arguments)


def test_attention_to_another_sequence() -> None:
    net = layer.MultiHeadAttention(6, 2, bias=False)
    query, key = (Tensor(data=RNG.normal(size=s), requires_grad=False) for s in ((2, 4, 5), (2, 3, 7)))
    y = net(query, key)
    assert y.shape == (2, 4, 6) and {n: p.shape[0] for n, p in net.get_params().items()} == {
        "q.W": 5, "k.W": 7, "v.W": 7, "out.W": 6
    }  # fmt: skip


@pytest.mark.parametrize("first, activation", [(False, "relu"), (True, "gelu")])
def test_encoder_layer(first: bool, activation: str) -> None:
    def formula(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        def norm(x: np.ndarray, name: str) -> Any:
            z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            return z * p[f"{name}.scale"] + p[f"{name}.bias"]

        def attention(x: np.ndarray) -> np.ndarray:
            inner = {n.removeprefix("attention."): v for n, v in p.items()}
            return attend(inner, x, 2, np.ones((2, 4, 4), bool))

        def dense(x: np.ndarray) -> Any:
            h = x @ p["linear1.W"] + p["linear1.b"]
            h = np.vectorize(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2)(h) if activation == "gelu" else np.maximum(h, 0)
            return h @ p["linear2.W"] + p["linear2.b"]

        if first:
            x = x + attention(norm(x, "norm1"))
            return x + dense(norm(x, "norm2"))  # type: ignore[no-any-return]
        x = norm(x + attention(x), "norm1")
        return norm(x + dense(x), "norm2")  # type: ignore[no-any-return]

    def make() -> layer.Layer:
        return layer.TransformerEncoderLayer(6, 2, 8, 0.0, activation, norm_first=first)

    computes(make, RNG.normal(size=(2, 4, 6)) / 3, formula)


def test_dropout_of_the_encoder_layer() -> None:
    net = layer.TransformerEncoderLayer(6, 2, 8, 0.5)
    x = Tensor(data=RNG.normal(size=(2, 4, 6)), requires_grad=False)
    assert (to_numpy(net(x)) != to_numpy(net(x))).any()
    tape.training = False
    assert (to_numpy(net(x)) == to_numpy(net(x))).all()


def test_mistakes_in_layers() -> None:
    for make, wanted in [
        (lambda: layer.MultiHeadAttention(6, 4), "multiple of num_heads, both at least 1, got 6 and 4"),
        (lambda: layer.TransformerEncoderLayer(6, 2, activation="tanh"), "must be 'relu' or 'gelu'"),
    ]:
        with pytest.raises(ValueError, match=wanted):
            make()  # type: ignore[no-untyped-call]
    flat = Tensor(data=np.zeros((2, 6)))
    for one in (layer.MultiHeadAttention(6, 2), layer.ConvTranspose2d(2, 3)):
        with pytest.raises(InvalidInput, match="must have shape") as error:
            one(flat)
        assert error.value.code == "SX325"
    with pytest.raises(InvalidInput, match="group must divide the numbers of channels 3 and 4"):
        layer.ConvTranspose2d(4, 3, group=2)(Tensor(data=np.zeros((1, 3, 2, 2))))


def test_a_training_step_as_a_file() -> None:
    """AdamW with a group, a warm-up and clipping: the file computes the step of the tape."""

    def make() -> opt.Optimizer:
        adam = opt.AdamW(opt.WarmUp(opt.CosineDecay(0.1, 4), 2, 0.5), dtype=np.float64)
        adam.set_group("*.b", lr=opt.StepDecay(0.05, 2), weight_decay=0)
        adam.clip_gradients(norm=0.1)
        return adam

    _, wanted = train(make(), False, steps=3)
    net, _ = train(make(), False, steps=0)
    step = sonnx.to_training_onnx(net, "mse_loss", net.optimizer, inputs=[Tensor(data=X, requires_grad=False)])
    rep, pairs = SingaBackend.prepare(step), sonnx.step_pairs(step)
    names = [o.name for o in step.graph.output]
    inputs = {i.name for i in step.graph.input} - set(pairs)
    states: dict[str, Any] = {}
    for _ in range(3):
        feeds = {n: Y if n == "target" else X for n in inputs}
        outputs = dict(zip(names, rep.run({**feeds, **states}), strict=True))
        states = {n: outputs[new] for n, new in pairs.items()}
    agree({n: states[n] for n in wanted}, wanted)


# --- tensors and models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(name: str, axis: Any, keepdims: bool) -> None:
    x = RNG.normal(size=(2, 3, 4))
    found = getattr(Tensor(data=x), name)(axis, keepdims)
    np.testing.assert_allclose(found.numpy(), getattr(x, name)(axis=axis, keepdims=keepdims), rtol=1e-13)


def test_argmax_numpy_and_item() -> None:
    x = np.array([[1.0, 5.0, 5.0], [7.0, 2.0, 7.0]])
    t = Tensor(data=x)
    assert t.argmax().item() == 3 and t.argmax(1).numpy().tolist() == [1, 0] and t.argmax(0, True).shape == (1, 3)
    t.numpy()[...] = 0
    assert (t.numpy() == x).all() and t.numpy().dtype == x.dtype and type(t.max().item()) is float
    with pytest.raises(InvalidInput, match=r"one element to become a number, got shape \(2, 3\)"):
        t.item()


def test_gradient_of_a_mean() -> None:
    t = Tensor(data=np.arange(6.0).reshape(2, 3), stores_grad=True, name="t")
    ((_, g),) = autograd.backward((t * t).mean())
    np.testing.assert_allclose(g.numpy(), t.numpy() / 3, rtol=1e-14)


def test_state_dict() -> None:
    net, values = train(opt.SGD(0.1, dtype=np.float64), False)
    assert [id(p) for p in net.parameters()] == [id(p) for p in net.get_params().values()]
    kept = {n: t.numpy() for n, t in net.state_dict().items()}
    other, _ = train(opt.SGD(0.1, dtype=np.float64), False, steps=0)
    other.load_state_dict(kept)
    agree({n: t.numpy() for n, t in other.state_dict().items()}, values, 0)
    for broken, wanted in [({"fc.W": kept["fc.W"]}, "got none for fc.b"), ({**kept, "x": 1}, "has no state 'x'")]:
        with pytest.raises(InvalidInput, match=wanted):
            other.load_state_dict(broken)
