"""Recorded steps that take batches of any size, and steps whose Python depends on the size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from tests.helpers.recorded_steps import planner_of, steps_of

from singa import autograd, device, layer, opt, sonnx, tensor
from singa._core.tensor import Tensor
from singa._core.trace import DynamicSize, NotTraceable, reshaped
from singa._training.step import batched
from singa.model import Model
from singa_backend.ir.equality import same_graphs
from singa_backend.ir.reader import read
from singa_backend.kernels import onednn
from singa_backend.kernels.options import VARIABLE

F = np.float32
SIZES = (6, 6, 5, 6, 9, 2, 17, 5, 6, 1, 3, 9, 1, 6)


class Trained(Model):
    """A net that trains by the loss of its subclass."""

    optimizer: Any = None
    shape: tuple[int, ...] = (12,)

    def loss(self, y: Tensor, t: Tensor, x: Tensor) -> Tensor:
        return autograd.softmax_cross_entropy(y, t)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = self.loss(y, t, x)
        self.optimizer(loss)
        return y, loss


class Perceptron(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layer.Linear(16), layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(autograd.relu(self.first(x)))  # type: ignore[no-any-return]


class Convolutions(Trained):
    """Convolutions, whose kernels see numbers, statistics of the batch, and a Reshape that Python writes."""

    shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = layer.Conv2d(8, 3, padding=1), layer.BatchNorm2d(), layer.MaxPool2d(2, 2)
        self.last = layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(autograd.relu(self.norm(self.conv(x))))
        return self.last(autograd.reshape(y, (x.shape[0], -1)))  # type: ignore[no-any-return]


class Recurrent(Trained):
    shape = (5, 6)

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = layer.LSTM(6, 8), layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cells(autograd.transpose(x, (1, 0, 2)))
        y = y[0] if isinstance(y, (tuple, list)) else y
        return self.last(autograd.reshape(autograd.transpose(y, (1, 0, 2)), (x.shape[0], -1)))  # type: ignore[no-any-return]


class Attention(Trained):
    shape = (5, 8)

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.norm, self.last = layer.Linear(8), layer.Linear(8), layer.LayerNorm(), layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        scores = autograd.softmax(autograd.matmul(self.query(x), autograd.transpose(self.key(x), (0, 2, 1))), axis=-1)
        y = self.norm(autograd.add(x, autograd.matmul(scores, x)))
        return self.last(autograd.reduce_mean(y, axes=[1], keepdims=False))  # type: ignore[no-any-return]


class Dropped(Trained):
    """Drops values, whose random bits have the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = layer.Linear(16), layer.Dropout(0.4), layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(autograd.relu(self.first(x))))  # type: ignore[no-any-return]


class Sized(Perceptron):
    """Divides by the size of the batch, and drops a term for odd ones, in Python."""

    def loss(self, y: Tensor, t: Tensor, x: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(y, t)
        if x.shape[0] % 2:
            loss = loss + autograd.reduce_sum(y * y, axes=None, keepdims=False) * float(F(0.1 / x.shape[0]))
        return loss  # type: ignore[no-any-return]


def training(net: Trained, graph: bool, sizes: tuple[int, ...] = SIZES) -> list[np.ndarray]:
    """Train on batches of these sizes; the losses, and the parameters after that."""
    draws = np.random.default_rng(3)
    device.get_default_device().SetRandSeed(4)
    net.optimizer = opt.SGD(lr=0.05, momentum=0.9)
    examples = tensor.from_numpy(np.zeros((6, *net.shape), F))
    net.compile([examples], is_train=True, use_graph=graph, sequential=False)
    for name, p in sorted(net.get_params().items()):
        p.copy_from_numpy((np.random.default_rng(len(name)).standard_normal(p.shape) / 4).astype(F))
    losses = []
    for n in sizes:
        x = Tensor(data=draws.standard_normal((n, *net.shape)).astype(F))
        y, loss = net(x, Tensor(data=draws.integers(0, 4, n)))
        assert y.shape == (n, 4)
        losses.append(np.array(loss.data))
    return [*losses, *(np.array(p.data) for _, p in sorted(net.get_params().items()))]


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("kind", [Perceptron, Convolutions, Recurrent, Attention, Dropped])
def test_one_step_trains_on_batches_of_any_size(
    kind: Callable[[], Trained], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes what the tape does; a batch of one has its own step, because sizes of one broadcast."""
    monkeypatch.setenv(VARIABLE, threads)
    net = kind()
    for found, expected in zip(training(net, True), training(kind(), False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    steps = steps_of(net)
    assert len(steps) == 2
    if onednn.library() is not None:
        planners = [planner_of(step) for step in steps]
        assert all(step._session.reason is None for step in steps)
        assert max(p.bound for p in planners) >= 5 and all(p.forms <= 4 for p in planners), [p.failed for p in planners]


def test_python_that_depends_on_the_size_is_recorded_for_each() -> None:
    net = Sized()
    for found, expected in zip(training(net, True), training(Sized(), False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert len(steps_of(net)) == len(set(SIZES))


class Told(Perceptron):
    """Divides by a size that the program sets before each step, and not by that of a tensor."""

    size = 0

    def loss(self, y: Tensor, t: Tensor, x: Tensor) -> Tensor:
        return autograd.softmax_cross_entropy(y, t) * float(F(6 / self.size))  # type: ignore[no-any-return]

    def __call__(self, x: Tensor, t: Tensor) -> Any:
        self.size = x.shape[0]
        return super().__call__(x, t)


def test_a_size_that_python_follows_in_another_way_is_noticed() -> None:
    """The step of the second size is recorded too: its graph has another constant."""
    net = Told()
    for found, expected in zip(training(net, True), training(Told(), False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert len(steps_of(net)) == len(set(SIZES))


GRAPH = """<ir_version: 10, opset_import: ["" : 20]> g (float[n] x, bool c) => (float[n] y) <float[1] w = {2}> {
    a = Mul(x, w)
    b = Gelu<approximate = "tanh">(a)
    d = If(c) <then_branch = t () => (float[n] p) { p = Add(a, b) }, else_branch = e () => (float[n] q) { q = Sub(b, w) }>
    y = Neg(d)
}"""


def test_graphs_that_compute_the_same_are_equal() -> None:
    def graph(text: str) -> Any:
        return read(onnx.parser.parse_model(text))

    for name in "abdpq":  # names do not matter
        assert same_graphs(graph(GRAPH), graph(re.sub(rf"\b{name}\b", f"{name}2", GRAPH)))
    for before, after in (
        ("{2}", "{3}"), ('"tanh"', '"none"'), ("Add(a, b)", "Add(b, a)"), ("Sub(b, w)", "Sub(b, x)"), ("Mul(x, w)", "Mul(w, x)"),
        ("y = Neg(d)", "z = Neg(d) y = Neg(z)"), ("Neg(d)", "Abs(d)"), ("float[1] w = {2}", "double[1] w = {2}"),
        ("Sub(b, w)", "Sub(a, w)"), ("y = Neg(d)", "y = Neg(b)"), ("y = Neg(d)", "y = Clip(d)"),
    ):  # fmt: skip
        one, other = graph(GRAPH), graph(GRAPH.replace(before, after))
        assert before in GRAPH and not same_graphs(one, other) and not same_graphs(other, one), before


class Kept(Perceptron):
    """Keeps the size of a batch, for a program that prints it."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = x.shape[0]
        return super().forward(x)


class Handled(Perceptron):
    """Asks for the type of a size, or handles the exception, and scales the loss."""

    def loss(self, y: Tensor, t: Tensor, x: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(y, t)
        try:
            return loss * float(F(1 / x.shape[0]))  # type: ignore[no-any-return]
        except NotTraceable:
            return loss  # type: ignore[no-any-return]


class Asked(Perceptron):
    def loss(self, y: Tensor, t: Tensor, x: Tensor) -> Tensor:
        n = y.shape[0]
        return autograd.softmax_cross_entropy(y, t) * float(F(1 / n if isinstance(n, int) else 1))  # type: ignore[no-any-return]


class Named(Perceptron):
    def loss(self, y: Tensor, t: Tensor, x: Tensor) -> Tensor:
        return autograd.softmax_cross_entropy(y, t) * float(F(len(f"{x.shape}")))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Kept, Handled, Asked, Named])
def test_python_that_does_no_arithmetic_with_a_size(kind: Callable[[], Trained]) -> None:
    sizes = (6, 6, 5, 17, 6)
    net = kind()
    for found, expected in zip(training(net, True, sizes), training(kind(), False, sizes), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert len(steps_of(net)) == len(set(sizes)) and type(getattr(net, "count", 6)) is int


class Methods(Perceptron):
    """Uses a size for Reshape in every way that is known."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).reshape((x.shape[0], 2, 2))
        return tensor.reshape(autograd.reshape(y, [4, x.shape[0]]), (x.shape[0], 4))


class Counted(Perceptron):
    """Returns a number that the program sets before each step."""

    size = 0

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        return (*super().train_one_batch(x, t), self.size)


def test_sizes_for_reshape_and_results_that_are_no_tensors() -> None:
    sizes = (6, 6, 5, 17, 6)
    net = Methods()
    for found, expected in zip(training(net, True, sizes), training(Methods(), False, sizes), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert len(steps_of(net)) == 1
    x = tensor.from_numpy(np.zeros((3, 12), F))
    assert sonnx.to_onnx([x], [net.forward(x)]).graph.node
    counted = Counted()
    counted.optimizer = opt.SGD(lr=0.05)
    counted.compile([x], is_train=True, use_graph=True)
    for n in (6, 6, 5, 7, 6):
        counted.size = n
        assert counted(Tensor(data=np.zeros((n, 12), F)), Tensor(data=np.zeros(n, np.int64)))[2] == n


def test_an_absent_input_is_not_a_constant() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[n] x) => (float[n] y) <float w = {2}> { y = Clip(x, w, w) }"""
    both, one = (read(onnx.parser.parse_model(text.replace("(x, w,", inputs))) for inputs in ("(x, w,", "(x, ,"))
    assert same_graphs(both, both) and not same_graphs(both, one) and not same_graphs(one, both)


def test_the_bits_of_a_step_do_not_depend_on_the_sizes_before_it() -> None:
    """A training that is resumed with another batch continues as an unbroken one."""
    many, few = Convolutions(), Convolutions()
    training(many, True, (6, 6, 5, 9))
    training(few, True, (6, 6, 5))
    states = {n: np.array(t.data) for n, t in {**many.get_states(), **many.optimizer.get_states()}.items()}
    draws = np.random.default_rng(0)
    x, t = draws.standard_normal((7, *many.shape)).astype(F), draws.integers(0, 4, 7)
    found = []
    for net in (many, few):
        for name, value in {**net.get_states(), **net.optimizer.get_states()}.items():
            value.copy_from_numpy(states[name])
        loss = net(Tensor(data=x), Tensor(data=t))[1]
        found.append([loss.data.tobytes(), *(p.data.tobytes() for _, p in sorted(net.get_states().items()))])
    assert found[0] == found[1]


def test_an_argument_of_another_length_keeps_its_number() -> None:
    assert batched(((6, 3), (6,), (4, 6), ())) == (("batch", 3), ("batch",), (4, 6), ())
    assert batched(((1, 3), (1,))) == ((1, 3), (1,)) and batched(()) == ()


def test_python_can_do_little_with_a_size_that_differs() -> None:
    n, other = DynamicSize("batch"), DynamicSize(None)
    assert (n, 3) == (DynamicSize("batch"), 3)
    assert reshaped((n, 4, 16), ("batch", 64)) == [0, 4, 16]
    assert reshaped((4, n), ("batch", 64)) == [4, -1] and reshaped((2, other), (None, 64)) == [2, -1]
    for use in (
        lambda: n == 3, lambda: n != 3, lambda: n % 2, lambda: 1 / n, lambda: int(n), lambda: range(n), lambda: n > 3,
        lambda: bool(n), lambda: {n}, lambda: (n, 3) == (8, 3), lambda: [0] * n, lambda: np.zeros((n, 3)), lambda: other == other,
        lambda: 2**n, lambda: -n, lambda: 8 // n, lambda: str(n), lambda: f"{n}",
    ):  # fmt: skip
        with pytest.raises(NotTraceable, match="reads a size in Python"):
            use()
