"""Workers whose parts of a batch differ, BatchNormalization over all of them, and accumulation: against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

from singa import autograd, layer, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa._training.fit import fit
from singa.model import Model
from singa_backend.collectives import Communicator, LocalGroup
from singa_backend.collectives.local import LocalRank
from singa_backend.errors import InvalidInput

F = np.float32
RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(21, 3, 5, 5)).astype(F), RNG.integers(0, 4, 21)
graphs = pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])
SIZES = [(1, 7), (1, 4), (2, 4), (3, 1)]
"""(micro-batches of an update, samples of a batch): 21 samples leave a smaller batch, and workers without samples."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tape.training = False
    yield
    tape.training = False


class Net(Model):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.a, self.norm, self.b = layer.Conv2d(4, 3), layer.BatchNorm2d() if norm else None, layer.Linear(4)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(autograd.flatten(autograd.relu(self.norm(y) if self.norm else y)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.update(loss)
        return out, loss


class Imported(sonnx.SONNXModel):
    """The same structure from a file, whose running variance is the population variance."""

    def __init__(self, norm: bool) -> None:
        text = """<ir_version: 9, opset_import: ["": 20]> g (float[N, 3, 5, 5] x) => (float[N, 4] y)
            { c = Conv(x, w) n = BatchNormalization(c, scale, bias, mean, var) r = Relu(n) f = Flatten(r) y = MatMul(f, v) }"""
        proto = parser.parse_model(text)
        rng = np.random.default_rng(3)
        states = {"w": rng.normal(size=(4, 3, 3, 3)), "v": rng.normal(size=(36, 4)), "scale": np.ones(4), "bias": np.zeros(4),
                  "mean": np.zeros(4), "var": np.ones(4)}  # fmt: skip
        proto.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(a * F(0.4) if a.ndim > 1 else a, F), n) for n, a in states.items()
        )
        super().__init__(proto)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        (out,) = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.update(loss)
        return out, loss


def call(rule: Any, mode: str) -> Callable[[Tensor], None]:
    if mode == "half":
        return lambda loss: rule.backward_and_update_half(loss, loss_scale=64.0)
    if mode == "partialUpdate":
        return lambda loss: rule.backward_and_partial_update(loss, threshold=1 << 20)  # one partition: averaged in each call
    if mode.startswith("sparse"):
        return lambda loss: rule.backward_and_sparse_update(
            loss, spars=1.0 if mode == "sparseTopK" else 0.0, topK=mode == "sparseTopK"
        )
    return rule


def trained(
    comm: Communicator | None, graph: bool, kind: Any = Net, norm: bool = False, steps: int = 1, size: int = 4,
    mode: str = "plain", momentum: float = 0.9,
) -> tuple[dict[str, np.ndarray], list[float]]:  # fmt: skip
    tape.training = False
    rule: Any = opt.SGD(0.05, momentum=momentum)
    rule.accumulate_gradients(steps)
    if comm is not None:
        rule = opt.DistOpt(rule, communicator=comm, sync_batch_norm=norm)
    net = kind(norm)
    net.optimizer, net.update = rule, call(rule, mode) if comm is not None else rule
    net.compile([Tensor(data=X[:4])], use_graph=graph)
    if kind is Net:
        rng = np.random.default_rng(1)
        net.set_params({n: rng.normal(size=p.shape).astype(F) * F(0.4) for n, p in net.get_params().items()})
    losses = fit(net, X, LABELS, epochs=2, batch_size=size, group=comm).losses
    assert net.not_traceable == ""
    return {n: np.array(t.data) for n, t in net.get_states().items()}, losses


@cache
def alone(graph: bool, kind: Any = Net, norm: bool = False, steps: int = 1, size: int = 4, momentum: float = 0.9) -> Any:
    """What one process trains, with which several numbers of workers and modes are compared."""
    return trained(None, graph, kind, norm, steps, size, momentum=momentum)


def differ(ranks: list[Any], one: Any) -> float:
    states = max(float(np.abs(one[0][n] - r[0][n]).max()) for r in ranks for n in one[0])
    return max(states, *(float(np.abs(np.array(one[1]) - r[1]).max()) for r in ranks))


@graphs
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("steps", "size"), SIZES)
def test_unequal_parts_equal_one_process(steps: int, size: int, count: int, graph: bool) -> None:
    ranks = LocalGroup(count).run(lambda comm: trained(comm, graph, steps=steps, size=size))
    assert differ(ranks, alone(graph, steps=steps, size=size)) < 1e-5


@graphs
@pytest.mark.parametrize("mode", ["half", "partialUpdate", "sparseTopK", "sparseThreshold"])
def test_every_mode_weights_the_parts(mode: str, graph: bool) -> None:
    """With settings at which the modes send everything; without momentum an average of parameters is one of gradients."""
    ranks = LocalGroup(3).run(lambda comm: trained(comm, graph, steps=2, mode=mode, momentum=0.0))
    assert differ(ranks, alone(graph, steps=2, momentum=0.0)) < (2e-3 if mode == "half" else 1e-5)


@graphs
@pytest.mark.parametrize("kind", [Net, Imported])
@pytest.mark.parametrize(("steps", "size"), SIZES)
def test_statistics_of_all_workers_equal_one_process(steps: int, size: int, kind: Any, graph: bool) -> None:
    """The parameters, the running statistics and the losses; a worker without samples has no part in the statistics."""
    ranks = LocalGroup(3).run(lambda comm: trained(comm, graph, kind, True, steps, size))
    assert differ(ranks, alone(graph, kind, True, steps, size)) < 1e-5


def test_statistics_are_those_of_each_worker_without_it() -> None:
    def work(comm: Communicator) -> np.ndarray:
        net = Net(True)
        net.optimizer = net.update = opt.DistOpt(opt.SGD(0.0), communicator=comm)  # type: ignore[assignment]
        net.compile([Tensor(data=X[:4])])
        net(Tensor(data=X[comm.rank * 4 : comm.rank * 4 + 4]), Tensor(data=LABELS[:4]))
        return np.array(net.get_states()["norm.running_mean"].data)

    first, second = LocalGroup(2).run(work)
    assert not np.allclose(first, second)


@pytest.mark.parametrize("kind", [Net, Imported])
def test_the_profile_is_that_of_the_step_with_all_statistics(kind: Any) -> None:
    """One exchange in each direction for a BatchNormalization, and one of the gradients; all else runs by kernels."""

    def work(comm: Communicator) -> list[tuple[str, bool]]:
        net = kind(True)
        net.optimizer = net.update = opt.DistOpt(opt.SGD(0.1), communicator=comm, sync_batch_norm=True)
        net.compile([Tensor(data=X[:4])], use_graph=True)
        found = net.profile_step(Tensor(data=X[:4]), Tensor(data=LABELS[:4]), runs=1)
        assert found.by == "plan", found.reason
        return [(n.operator, "definition" in n.kernels) for n in found.nodes]

    for nodes in LocalGroup(2).run(work):
        names = [operator for operator, _ in nodes]
        assert names.count("AllReduceDone") == names.count("AllReduceStart") == 3
        assert {operator for operator, defined in nodes if defined} <= {"AllReduceStart", "AllReduceDone"}


@graphs
def test_workers_exchange_nothing_before_the_update(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    reduce = LocalRank.all_reduce

    def counted(self: Any, x: Any) -> Any:
        sent.extend([1] * (self.rank == 0))
        return reduce(self, x)

    monkeypatch.setattr(LocalRank, "all_reduce", counted)
    seen: list[tuple[int, int]] = []

    def work(comm: Communicator) -> None:
        net = Net(False)
        rule = opt.SGD(0.1)
        rule.accumulate_gradients(4)
        net.optimizer = net.update = opt.DistOpt(rule, communicator=comm)  # type: ignore[assignment]
        net.compile([Tensor(data=X[:4])], use_graph=graph)
        for _ in range(12):
            before = len(sent)
            net(Tensor(data=X[:4]), Tensor(data=LABELS[:4]))
            if comm.rank == 0:
                seen.append((net.optimizer.accumulated, len(sent) - before))

    LocalGroup(2).run(work)
    assert [n for n, _ in seen] == [1, 2, 3, 0] * 3
    assert all((exchanges > 0) == (n == 0) for n, exchanges in seen)


def test_a_program_sets_its_parts() -> None:
    def work(comm: Communicator) -> dict[str, np.ndarray]:
        net, dist = Net(False), opt.DistOpt(opt.SGD(0.1), communicator=comm)
        net.optimizer = net.update = dist  # type: ignore[assignment]
        net.compile([Tensor(data=X[:4])])
        rng = np.random.default_rng(1)
        net.set_params({n: rng.normal(size=p.shape).astype(F) * F(0.4) for n, p in net.get_params().items()})
        rows = [slice(0, 5), slice(5, 7), slice(0, 1)][comm.rank]
        for _ in range(3):
            dist.set_share([5, 2, 0][comm.rank], 7)
            net(Tensor(data=X[rows]), Tensor(data=LABELS[rows]))
        return {n: np.array(t.data) for n, t in net.get_states().items()}

    ranks = LocalGroup(3).run(work)
    one = Net(False)
    one.optimizer = one.update = opt.SGD(0.1)  # type: ignore[assignment]
    one.compile([Tensor(data=X[:4])])
    rng = np.random.default_rng(1)
    one.set_params({n: rng.normal(size=p.shape).astype(F) * F(0.4) for n, p in one.get_params().items()})
    for _ in range(3):
        one(Tensor(data=X[:7]), Tensor(data=LABELS[:7]))
    assert all(np.allclose(r[n], t.data, atol=1e-6) for r in ranks for n, t in one.get_states().items())


@pytest.mark.parametrize(("rows", "total"), [(3, 2), (-1, 2), (0, 0)])
def test_parts_that_are_refused(rows: int, total: int) -> None:
    with pytest.raises(InvalidInput, match="rows must be in") as error:
        opt.DistOpt(communicator=LocalGroup(2).ranks[0]).set_share(rows, total)
    assert error.value.code == "SX386"
