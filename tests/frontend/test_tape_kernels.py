"""Large nodes of the tape, and their gradients, by kernels: they agree with the definitions, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from singa import autograd, layer, opt
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa.device import resolve
from singa.model import Model
from singa_backend import nodes
from singa_backend.errors import InvalidInput, SonnxError
from singa_backend.kernels.table import GRADIENT, TRAINING
from singa_backend.nodes import node_plans

Arrays = list[np.ndarray]


@pytest.fixture(autouse=True)
def training() -> Iterator[None]:
    node_plans.clear()
    with tape.restored():
        tape.training = True
        yield
    node_plans.clear()


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def planned(domain: str = "") -> set[str]:
    """The operators that have a plan: of their gradients for GRADIENT, of calls in training form for TRAINING."""
    return {key[2] for key, entry in node_plans.held.items() if key[0] == domain and entry.session is not None}


def ends(function: Callable[..., Any], arrays: Arrays, dtype: Any = np.float32) -> Arrays:
    """The results of a function, and the gradients of a sum of all its elements, each with a weight of its own."""
    given = [Tensor(data=a.astype(dtype) if a.dtype == np.float32 else a, stores_grad=a.dtype == np.float32) for a in arrays]
    made = function(*given)
    ys = list(made) if isinstance(made, (tuple, list)) else [made]
    loss = None
    for i, y in enumerate(ys):
        weights = np.random.default_rng(7 + i).standard_normal(y.shape).astype(np.float32).astype(dtype)
        part = op.ReduceSum(op.Mul(y, Tensor(data=weights, requires_grad=False)), keepdims=0)
        loss = part if loss is None else op.Add(loss, part)
    found = autograd.gradients(loss)
    return [np.array(y.data) for y in ys] + [np.array(found[id(x)].data) for x in given if id(x) in found]


@dataclass(frozen=True)
class Case:
    """A function, and the operators whose calls and gradients kernels compute."""

    function: Callable[..., Any]
    arrays: Arrays
    calls: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    trains: frozenset[str] = frozenset()


def case(name: str, function: Callable[..., Any], *shapes: tuple[int, ...], **kinds: set[str]) -> Any:
    known = {kind: frozenset(names) for kind, names in kinds.items()}
    return pytest.param(Case(function, drawn(*shapes), **known), id=name)


def normalized(x: Any, scale: Any, b: Any) -> Any:
    mean, var = (Tensor(data=v, requires_grad=False) for v in (np.zeros(16, np.float32), np.ones(16, np.float32)))
    return op.BatchNormalization(x, scale, b, mean, var, training_mode=1, outputs=3)[0]


CASES = [
    case("conv", lambda x, w, b: op.Conv(x, w, b, pads=[1, 1, 1, 1]), (4, 8, 12, 12), (16, 8, 3, 3), (16,),
         calls={"Conv"}, gradients={"Conv"}),
    case("grouped conv", lambda x, w: op.Conv(x, w, group=4, strides=[2, 2]), (4, 8, 13, 13), (8, 2, 3, 3),
         calls={"Conv"}, gradients={"Conv"}),
    case("conv of a sequence", lambda x, w: op.Conv(x, w), (4, 8, 90), (16, 8, 5), calls={"Conv"}, gradients={"Conv"}),
    case("transposed conv", lambda x, w: op.ConvTranspose(x, w, strides=[2, 2]), (4, 8, 9, 9), (8, 16, 2, 2),
         calls={"ConvTranspose"}, gradients={"ConvTranspose"}),
    case("two convs", lambda x, v, w: op.Conv(op.Sigmoid(op.Conv(x, v)), w), (4, 8, 12, 12), (16, 8, 3, 3), (8, 16, 1, 1),
         calls={"Conv", "Sigmoid"}, gradients={"Conv", "Sigmoid"}),
    case("gemm", lambda x, w, b: op.Gemm(x, w, b, transB=1), (48, 64), (80, 64), (80,), calls={"Gemm"}),
    case("matmul", lambda x, y: op.MatMul(op.Transpose(x, perm=[0, 2, 1]), y), (6, 40, 30), (6, 40, 20), calls={"MatMul"}),
    case("max pooling", lambda x: op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2]), (4, 16, 12, 12),
         gradients={"MaxPool"}, trains={"MaxPool"}),
    case("average pooling", lambda x: op.AveragePool(x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]), (4, 16, 12, 12),
         calls={"AveragePool"}, gradients={"AveragePool"}),
    case("batch normalization", normalized, (4, 16, 12, 12), (16,), (16,),
         gradients={"BatchNormalization"}, trains={"BatchNormalization"}),
    case("layer normalization", lambda x, s, b: op.LayerNormalization(x, s, b), (40, 96), (96,), (96,),
         gradients={"LayerNormalization"}, trains={"LayerNormalization"}),
    case("softmax", lambda x: op.Softmax(x), (40, 96), calls={"Softmax"}),
    case("relu", lambda x: op.Relu(x), (40, 96), calls={"Relu"}, gradients={"Relu"}),
    case("tanh", lambda x: op.Tanh(x), (40, 96), calls={"Tanh"}, gradients={"Tanh"}),
    case("clip", lambda x: op.Clip(x, -0.5, 0.75), (40, 96), calls={"Clip"}, gradients={"Clip"}),
    case("lstm", lambda x, w, r, b: op.LSTM(x, w, r, b, hidden_size=16, outputs=3),
         (9, 8, 12), (1, 64, 12), (1, 64, 16), (1, 128), gradients={"LSTM"}, trains={"LSTM"}),
    case("gru", lambda x, w, r, b: op.GRU(x, w, r, b, hidden_size=16, outputs=2), (9, 8, 12), (1, 48, 12), (1, 48, 16), (1, 96),
         gradients={"GRU"}, trains={"GRU"}),
]  # fmt: skip


@pytest.mark.parametrize("given", CASES)
def test_results_and_gradients_are_those_of_the_definitions(given: Case) -> None:
    """Against the definitions in float64: the error is at most four times theirs in float32, or 1e-6 of the largest element."""
    with tape.by_definitions():
        exact, plain = ends(given.function, given.arrays, np.float64), ends(given.function, given.arrays)
    assert not node_plans.held
    for _ in range(2):  # the run that makes the plans, and one by them
        found = ends(given.function, given.arrays)
        assert len(found) == len(exact)
        for mine, theirs, right in zip(found, plain, exact, strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            largest = np.abs(right).max()
            error, usual = (np.abs(a - right).max() / largest for a in (mine, theirs))
            assert error <= max(4 * usual, 1e-6)
    assert given.calls <= planned() and given.gradients <= planned(GRADIENT) and given.trains <= planned(TRAINING)


def test_a_normalization_by_given_statistics_is_not_one_in_training() -> None:
    """The training kernel uses the statistics of the batch; it must not take a call that has its own."""
    shapes: list[Any] = [(8, 16, 9, 9), 16, 16, 16]
    x, scale, mean, var = (np.random.default_rng(n).random(s).astype(np.float32) + np.float32(0.5) for n, s in enumerate(shapes))

    def compute(*xs: Any) -> list[Any]:
        return ends(lambda x, s, m, v: op.BatchNormalization(x, s, m, m, v), [*xs])

    with tape.by_definitions():
        expected = compute(x, scale, mean, var)
    found = compute(x, scale, mean, var)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert "BatchNormalization" not in planned(TRAINING)


def test_a_gradient_of_a_gradient() -> None:
    def penalty(x: Any, w: Any) -> Any:
        y = op.ReduceSum(op.Sigmoid(op.Conv(x, w)), keepdims=0)
        dx = autograd.gradients(y, create_graph=True, inputs=[x])[id(x)]
        return op.ReduceSum(op.Mul(dx, dx), keepdims=0)

    arrays = drawn((2, 8, 14, 14), (8, 8, 3, 3))
    with tape.by_definitions():
        exact = ends(penalty, arrays, np.float64)
    found = ends(penalty, arrays)
    assert "Conv" in planned()
    for mine, right in zip(found, exact, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5 * np.abs(right).max())


def test_a_tensor_that_was_changed_is_refused() -> None:
    x, w = (Tensor(data=a, stores_grad=True, name=n) for a, n in zip(drawn((4, 8, 12, 12), (8, 8, 3, 3)), "xw", strict=True))
    loss = op.ReduceSum(op.Conv(x, w), keepdims=0)
    w.copy_from_numpy(np.zeros((8, 8, 3, 3), np.float32))
    with pytest.raises(InvalidInput, match="changed") as raised:
        autograd.gradients(loss)
    assert raised.value.code == "SX370"


def test_a_changed_value_that_the_rule_does_not_read_is_not_read_by_a_kernel() -> None:
    """The gradient for x needs the weights alone: the kernel would read both, and the definition computes it."""
    arrays = drawn((4, 8, 12, 12), (8, 8, 3, 3))
    x, w = Tensor(data=arrays[0], stores_grad=True), Tensor(data=arrays[1], requires_grad=False)
    loss = op.ReduceSum(op.Conv(x, w), keepdims=0)
    right = autograd.gradients(loss)[id(x)].data.copy()
    assert planned(GRADIENT) == {"Conv"}
    node_plans.clear()
    loss = op.ReduceSum(op.Conv(x, w), keepdims=0)
    x.copy_from_numpy(np.full((4, 8, 12, 12), np.nan, np.float32))
    found = autograd.gradients(loss)[id(x)].data
    assert not planned(GRADIENT)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def test_results_belong_to_the_caller() -> None:
    x, w = (Tensor(data=a, requires_grad=False) for a in drawn((8, 8, 40, 40), (16, 8, 3, 3)))
    first = op.Conv(x, w)
    before = first.data.copy()
    for _ in range(3):  # each large enough to be computed where it stays
        second = op.Conv(x, w)
        assert not np.shares_memory(first.data, second.data)
        second.data[...] = 0
    np.testing.assert_array_equal(first.data, before)
    assert first.data.nbytes >= 1 << 19


def test_values_with_the_channels_last_are_passed_on_without_a_copy() -> None:
    x, w = (Tensor(data=a, requires_grad=False) for a in drawn((4, 8, 12, 12), (8, 8, 3, 3)))
    y = op.Conv(x, w)
    assert y.data.transpose(0, 2, 3, 1).flags.c_contiguous
    z = op.Conv(op.Relu(y), w)
    with tape.by_definitions():
        right = op.Conv(op.Relu(op.Conv(x, w)), w)
    np.testing.assert_allclose(z.data, right.data, rtol=0, atol=1e-5 * np.abs(right.data).max())
    np.testing.assert_array_equal(op.Reshape(z, [4, -1]).data, np.ascontiguousarray(z.data).reshape(4, -1))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_computed_by_the_definition(bad: float) -> None:
    arrays = drawn((4, 8, 12, 12), (8, 8, 3, 3))
    ends(lambda x, w: op.Conv(x, w, pads=[1, 1, 1, 1]), arrays)
    assert planned() == {"Conv"}
    arrays[0][0, 0, 0, 0] = bad
    found = ends(lambda x, w: op.Conv(x, w, pads=[1, 1, 1, 1]), arrays)
    with tape.by_definitions():
        right = ends(lambda x, w: op.Conv(x, w, pads=[1, 1, 1, 1]), arrays)
    np.testing.assert_array_equal(found[0], right[0])
    assert not all(np.isfinite(a).all() for a in right)
    for mine, theirs in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)  # the gradient for x does not read x, and has a kernel


def test_an_invalid_call_has_the_error_of_the_definition() -> None:
    x, w = (Tensor(data=a, requires_grad=False) for a in drawn((4, 8, 12, 12), (8, 9, 3, 3)))
    texts = []
    for context in (tape.by_definitions, tape.restored):
        with context(), pytest.raises(SonnxError) as raised:
            op.Conv(x, w)
        texts.append((type(raised.value), str(raised.value)))
    assert texts[0] == texts[1]


def test_small_nodes_have_no_plans() -> None:
    ends(lambda x, w: op.Conv(x, w), drawn((1, 2, 5, 5), (2, 2, 3, 3)))
    assert not node_plans.held


def test_other_devices_have_no_plans() -> None:
    strict = resolve("STRICT")
    x, w = (Tensor(data=a, device=strict, stores_grad=True) for a in drawn((4, 8, 12, 12), (8, 8, 3, 3)))
    autograd.gradients(op.ReduceSum(op.Conv(x, w), keepdims=0))
    assert not node_plans.held


def test_the_numbers_of_scalars_are_constants_of_plans() -> None:
    (x,) = (Tensor(data=a, requires_grad=False) for a in drawn((40, 96)))
    for i in range(nodes.VARIANTS + 4):
        bound = np.float32(i / 10)
        np.testing.assert_array_equal(op.Clip(x, -bound, bound).data, np.clip(x.data, -bound, bound))
    assert len(node_plans.held) == nodes.VARIANTS


def test_the_number_of_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "ENTRIES", 3)
    for n in range(60, 70):
        (x,) = drawn((40, n))
        np.testing.assert_allclose(op.Tanh(Tensor(data=x, requires_grad=False)).data, np.tanh(x), atol=1e-6)
        assert len(node_plans.held) <= 3
    assert [key[5][0][0] for key in node_plans.held] == [(40, n) for n in range(67, 70)]
    assert node_plans.arenas == sum(entry.arenas for entry in node_plans.held.values()) > 0


def test_the_memory_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "RESULTS", 1 << 20)
    monkeypatch.setattr(nodes, "ARENAS", 1 << 17)
    for n in (700, 710, 720, 730):
        x, w = (Tensor(data=a, requires_grad=False) for a in drawn((256, n), (n, 600)))
        for _ in range(2):
            op.MatMul(x, w)
        assert node_plans.arenas <= 1 << 17 and node_plans.results <= 1 << 20
    entries = [e for e in node_plans.held.values() if e.session is not None]
    assert sum(e.results for e in entries) == node_plans.results == 256 * 600 * 4
    kept = [p.memory for e in entries for plan in e.session._planner.plans.values() for p in plan.first.passed if p.index < 0]
    assert sum(m is not None for m in kept) == 1


def test_threads_have_plans_of_their_own_and_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a set number of threads for each: otherwise it depends on what else uses the cores, and so do the bits."""
    monkeypatch.setenv("SONNX_NUM_THREADS", "2")
    arrays = drawn((4, 8, 24, 24), (16, 8, 3, 3))
    found: dict[int, list[Arrays]] = {}

    def work(i: int) -> None:
        tape.training = True
        found[i] = [ends(lambda x, w: op.Conv(x, w), arrays) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for runs in found.values():
        for run in runs:
            for a, b in zip(run, found[0][0], strict=True):
                np.testing.assert_array_equal(a, b)
    assert len(found) == 3


class Net(Model):
    """A small net whose nodes are large enough for plans."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = layer.Conv2d(8, 16, 3), layer.Linear(10)
        self.optimizer = opt.SGD(lr=0.01, momentum=0.9)

    def forward(self, x: Any) -> Any:
        return self.linear(autograd.flatten(autograd.relu(self.conv(x))))

    def train_one_batch(self, x: Any, t: Any) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss


def losses(graph: bool, steps: int = 6) -> list[float]:
    (x,) = drawn((8, 8, 12, 12))
    batch = Tensor(data=x, requires_grad=False), Tensor(data=np.arange(8) % 10, requires_grad=False)
    net = Net()
    net.compile([batch[0]], is_train=True, use_graph=graph)
    rng = np.random.default_rng(3)
    for p in net.get_params().values():
        p.copy_from_numpy(0.1 * rng.standard_normal(p.shape).astype(np.float32))
    node_plans.clear()
    net.train()
    return [float(net(*batch).data.item()) for _ in range(steps)]


def test_training_follows_the_definitions() -> None:
    with tape.by_definitions():
        right = losses(False)
    assert not node_plans.held
    found = losses(False)
    assert {"Conv", "Gemm"} & planned() and "Conv" in planned(GRADIENT)
    np.testing.assert_allclose(found, right, rtol=1e-5)
    assert found == losses(False)  # to the bit


def test_the_first_step_in_graph_mode_makes_no_plans_of_nodes() -> None:
    losses(True)
    assert not node_plans.held
