"""DistOpt on local ranks, which are threads: what each mode exchanges, computes and keeps, on the tape and as a graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sklearn.datasets import load_digits

from singa import autograd, device, layer, model, opt, singa_wrap, sonnx, tensor
from singa._core.ops import op
from singa._training.buckets import Buckets, partition_size
from singa._training.checkpoint import Checkpoint
from singa._training.fit import Position
from singa_backend.collectives import Communicator, LocalGroup, SingleProcess, communicator
from singa_backend.errors import CommunicationError, InvalidInput, MissingDependency, UnsupportedModel

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

F = np.float32
MODES: dict[str, dict[str, Any]] = {
    "plain": {}, "half": {}, "partialUpdate": {}, "sparseTopK": {"spars": 0.3}, "sparseThreshold": {"spars": 0.01},
}  # fmt: skip
modes = pytest.mark.parametrize("mode", MODES)
graphs = pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])
optimizers: dict[str, Callable[[], opt.Optimizer]] = {
    "sgd": lambda: opt.SGD(lr=opt.ExponentialDecay(0.1, 5, 0.5), momentum=0.9, weight_decay=1e-3),
    "adam": lambda: opt.Adam(lr=0.01),
}


class Net(model.Model):
    """Three layers without batch statistics, with `dist_option` as SINGA's documents have it."""

    def __init__(self, classes: int = 4, hidden: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.c = layer.Linear(hidden), layer.Linear(hidden), layer.Linear(classes)

    def forward(self, x: Any) -> Any:
        return self.c(autograd.tanh(self.b(autograd.relu(self.a(x)))))

    def train_one_batch(self, x: Any, y: Any, dist_option: str = "plain", threshold: Any = 100, spars: float = 0.05) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        step(self.optimizer, loss, dist_option, threshold, spars)
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def step(dist: Any, loss: Any, mode: str, threshold: Any, spars: float, corr: bool = True) -> None:
    if mode == "plain":
        dist.backward_and_update(loss, *([threshold] if hasattr(dist, "communicator") else []))
    elif mode == "half":
        dist.backward_and_update_half(loss, threshold)
    elif mode == "partialUpdate":
        dist.backward_and_partial_update(loss, threshold)
    else:
        dist.backward_and_sparse_update(loss, threshold, spars=spars, topK=mode == "sparseTopK", corr=corr)


RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((64, 8)).astype(F), RNG.integers(0, 4, 64).astype(np.int32)


def built(net: Net, x: Any, seed: int = 1) -> None:
    net.compile([tensor.Tensor(data=x, requires_grad=False)], is_train=True, use_graph=net.graph_mode)
    rng = np.random.default_rng(seed)
    net.set_params({n: (rng.standard_normal(p.shape) * 0.3).astype(F) for n, p in net.get_params().items()})


def trained(
    comm: Communicator | None,
    mode: str = "plain",
    graph: bool = False,
    rule: Callable[[], opt.Optimizer] = optimizers["sgd"],
    steps: int = 8,
    same_data: bool = False,
    after: Callable[[Any], None] | None = None,
    **how: Any,
) -> dict[str, np.ndarray]:
    """The parameters after some steps on a share of each batch of 16."""
    net = Net()
    dist = rule() if comm is None else opt.DistOpt(rule(), communicator=comm)
    net.set_optimizer(dist)
    net.graph(graph)
    built(net, X[:2])
    rank, size = (comm.rank, comm.size) if comm and not same_data else (0, 1)
    for i in range(steps):
        rows = slice(i % 4 * 16 + rank * 16 // size, i % 4 * 16 + (rank + 1) * 16 // size)
        batch = [tensor.Tensor(data=a[rows], requires_grad=False) for a in (X, Y)]
        net(*batch, mode, **{**MODES[mode], **how})
        if after:
            after(net)
    assert not net.not_traceable and any(net._steps.values()) == graph
    return {n: p.data.copy() for n, p in net.get_params().items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[n], b[n]) for n in a)


def furthest(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[n] - b[n]).max()) for n in a)


@graphs
@pytest.mark.parametrize("rule", optimizers)
def test_one_rank_equals_the_optimizer_alone(rule: str, graph: bool) -> None:
    """To the bit: all values are sent, in float32."""
    alone = trained(None, graph=graph, rule=optimizers[rule])
    for mode, how in (("plain", {}), ("sparseTopK", {"spars": 1.0}), ("sparseThreshold", {"spars": 0.0}), ("partialUpdate", {})):
        assert same(trained(SingleProcess(), mode, graph, optimizers[rule], **how), alone), mode


@graphs
def test_half_on_one_rank_rounds_the_gradients(graph: bool) -> None:
    class Rounded(opt.SGD):
        def rule(self, p: Any, g: Any, *states: Any) -> Any:
            return super().rule(p, tensor.Tensor(data=g.data.astype(np.float16).astype(F)), *states)

    got = trained(SingleProcess(), "half", graph, lambda: opt.SGD(lr=0.1, momentum=0.9))
    assert same(got, trained(None, rule=lambda: Rounded(lr=0.1, momentum=0.9)))


@graphs
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rule", optimizers)
def test_ranks_equal_one_process_on_the_whole_batch(rule: str, size: int, graph: bool) -> None:
    ranks = LocalGroup(size).run(lambda comm: trained(comm, graph=graph, rule=optimizers[rule]))
    assert all(same(r, ranks[0]) for r in ranks)
    assert furthest(ranks[0], trained(None, rule=optimizers[rule])) < 1e-5


@graphs
@modes
def test_ranks_with_equal_data_equal_one_rank(mode: str, graph: bool) -> None:
    ranks = LocalGroup(2).run(lambda comm: trained(comm, mode, graph, same_data=True))
    one = trained(SingleProcess(), mode, graph)
    assert all(furthest(r, one) < (1e-3 if mode == "half" else 1e-6) for r in ranks)


@graphs
@modes
def test_parameters_are_equal_on_all_ranks(mode: str, graph: bool) -> None:
    """After each call; in a partial update those of the partition that was averaged."""
    seen: list[list[dict[str, np.ndarray]]] = [[], [], []]

    def work(comm: Communicator) -> None:
        trained(
            comm, mode, graph, after=lambda net: seen[comm.rank].append({n: p.data.copy() for n, p in net.get_params().items()})
        )

    LocalGroup(3).run(work)
    names = list(seen[0][0])
    small = ["a.b", "b.b", "c.W", "c.b"]
    partitions = [["b.W"], ["a.W"], small] if mode == "partialUpdate" else [names]  # of more than 100 elements: alone, and first
    for i, states in enumerate(zip(*seen, strict=True)):
        equal = [n for n in names if all(np.array_equal(s[n], states[0][n]) for s in states)]
        assert sorted(equal) == sorted(partitions[i % len(partitions)])


def gradients(rank: int, i: int) -> np.ndarray:
    return np.random.default_rng([7, rank, i]).standard_normal((5, 40)).astype(F)


@pytest.mark.parametrize("topK", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_sent_is_kept(topK: bool, size: int) -> None:
    """sent + residual = gradient, per rank: the sum over the calls of what was sent and the change of e is that of g."""
    spars = 0.1 if topK else 1.2

    def work(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        dist = opt.DistOpt(communicator=comm)
        kept = tensor.Tensor(data=np.zeros((5, 40), F))
        total = np.zeros((5, 40), F)
        for i in range(4):
            g = gradients(comm.rank, i)
            v = g + kept.data
            before = kept.data.copy()
            t = tensor.Tensor(data=g.copy())
            dist.sparsification(t, kept, spars, topK)
            dist.wait()
            chosen = np.abs(v) >= (np.sort(np.abs(v).reshape(-1))[-20] if topK else spars)
            assert np.array_equal(kept.data, np.where(chosen, 0, v)) and chosen.sum() < 200
            np.testing.assert_allclose(np.where(chosen, v, 0) + kept.data - before, g, atol=1e-6)
            total += t.data
        return total, kept.data.copy()

    results = LocalGroup(size).run(work)
    given = sum(gradients(r, i) for r in range(size) for i in range(4))
    np.testing.assert_allclose(results[0][0] + sum(kept for _, kept in results), given, atol=1e-5)
    assert all(np.array_equal(total, results[0][0]) for total, _ in results)


def test_the_largest_values_are_chosen_by_magnitude() -> None:
    """Also below 1, where an integer part is 0; the share is exact."""
    for share, size in ((0.15, 100), (0.05, 40), (0.07, 100), (1e-9, 50)):
        dist = opt.DistOpt(communicator=SingleProcess())
        values = np.linspace(-0.9, 0.5, size).astype(F)
        t = tensor.Tensor(data=values.copy())
        dist.sparsification(t.data, None, share, True)
        dist.wait()
        count = math.ceil(Fraction(str(share)) * size)
        largest = np.argsort(-np.abs(values))[:count]
        assert set(np.flatnonzero(t.data)) == set(largest) and np.array_equal(t.data[largest], values[largest])


@pytest.mark.parametrize("topK", [True, False])
def test_dropped_values_are_not_kept(topK: bool) -> None:
    net, dist = Net(), opt.DistOpt(opt.SGD(lr=0.1), communicator=SingleProcess())
    net.set_optimizer(dist)
    built(net, X)
    out = autograd.softmax_cross_entropy(net.forward(tensor.Tensor(data=X)), tensor.Tensor(data=Y))
    dist.backward_and_sparse_update(out, spars=0.1, topK=topK, corr=False)
    assert not any("residual" in n for n in dist.get_states())


def test_a_nan_is_sent() -> None:
    for topK in (True, False):
        dist = opt.DistOpt(communicator=SingleProcess())
        t, kept = (tensor.Tensor(data=np.array(a, F)) for a in ([0.0, np.nan, 0.1], [0.0, 0.0, 0.0]))
        dist.sparsification(t, kept, 0.4 if topK else 0.5, topK)
        dist.wait()
        assert np.isnan(t.data[1]) and not np.isnan(kept.data).any()


ORDER = [64, 4, 256, 16, 128, 16]
"""Elements of the parameters of Net with 8 inputs, in the order of the backward pass."""

PARAMETERS = 8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4
"""Of Net with 8 inputs."""


@pytest.mark.parametrize("threshold", [1, 100, 10**6])
@modes
def test_bytes_that_are_sent(mode: str, threshold: int) -> None:
    """As the documents define the modes: float32 4 bytes, half 2, a partition of the parameters, k or nnz pairs of 8."""
    sent: list[int] = []
    steps = 4

    def work(comm: Communicator) -> None:
        trained(comm, mode, steps=1, threshold=threshold)  # the ranks compare their parameters in the first step
        first = comm.sent
        sizes: list[int] = []

        def watch(net: Net) -> None:
            sizes.append(comm.sent)

        trained(comm, mode, steps=1 + steps, threshold=threshold, after=watch)
        assert sizes[0] - first == first
        if comm.rank == 0:
            sent.append(sizes[-1] - sizes[0])

    LocalGroup(2).run(work)
    sizes = ORDER
    buckets = [[]] if threshold > 1000 else []
    if threshold == 1:
        buckets = [[n] for n in sizes]
    elif threshold == 100:
        buckets = [[256], [128], [4, 64, 16, 16]]
    else:
        buckets = [sizes]
    totals = [sum(b) for b in buckets]
    assert sum(totals) == PARAMETERS
    if mode == "sparseThreshold":
        assert 4 * steps * len(buckets) <= sent[0] <= steps * (8 * PARAMETERS + 4 * len(buckets))
        return
    expected = {
        "plain": steps * 4 * PARAMETERS,
        "half": steps * 2 * PARAMETERS,
        "sparseTopK": steps * 8 * sum(math.ceil(Fraction("0.3") * n) for n in totals),
        "partialUpdate": 4 * sum(totals[i % len(totals)] for i in range(1, 1 + steps)),  # the first call was not counted
    }
    assert sent[0] == expected[mode]


@graphs
@pytest.mark.parametrize("size", [2, 3])
def test_a_partial_update_never_sends_all(size: int, graph: bool) -> None:
    """By default: one partition of at least two in each step, and every parameter once in K steps, in a net of any size."""
    seen: list[int] = []

    def work(comm: Communicator) -> list[dict[str, np.ndarray]]:
        states: list[dict[str, np.ndarray]] = []
        sizes = [0]

        def watch(net: Net) -> None:
            states.append({n: p.data.copy() for n, p in net.get_params().items()})
            sizes.append(comm.sent)
            if comm.rank == 0:
                seen.append(sizes[-1] - sizes[-2])

        trained(comm, "partialUpdate", graph, threshold=None, after=watch)
        return states

    ranks = LocalGroup(size).run(work)
    partitions = [256, PARAMETERS - 256]  # b.W has more than half of the elements
    assert seen[1:] == [4 * partitions[i % 2] for i in range(1, 8)]
    for i in range(8):
        equal = {n for n in ranks[0][i] if all(np.array_equal(r[i][n], ranks[0][i][n]) for r in ranks)}
        assert equal == ({"b.W"} if i % 2 == 0 else set(ranks[0][i]) - {"b.W"})


@pytest.mark.parametrize(("sizes", "most"), [([5, 5], 5), ([1], 1), ([3, 3, 3], 6), ([0, 7], 7), ([2_000_000] * 4, 4_000_000)])
def test_the_partitions_by_default(sizes: list[int], most: int) -> None:
    """The largest partition; a net of one tensor has one."""
    pairs = [(t, t) for t in (tensor.Tensor(data=np.zeros(n, F), requires_grad=False) for n in sizes)]
    made = Buckets(partition_size(pairs))
    assert max(b.size for b in [b for p, g in pairs for b in made.add(p, g)] + made.rest()) == most


def test_threshold_bytes_count_the_values() -> None:
    """4 bytes for the number, and 8 for each value that is at least the threshold."""

    def work(comm: Communicator) -> int:
        dist = opt.DistOpt(communicator=comm)
        g = gradients(comm.rank, 0)
        t = tensor.Tensor(data=g.copy())
        dist.sparsification(t, None, 1.5, False)
        dist.wait()
        return comm.sent - 4 - 8 * int((np.abs(g) >= 1.5).sum())

    assert LocalGroup(2).run(work) == [0, 0]


@pytest.mark.parametrize("mode", ["plain", "half"])
def test_the_threshold_does_not_change_the_result(mode: str) -> None:
    results = [LocalGroup(2).run(lambda comm, t=t: trained(comm, mode, threshold=t))[0] for t in (0, 100, 10**7)]
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_arguments_may_change_between_calls() -> None:
    """The residual belongs to the parameter, whatever the buckets are."""

    def work(comm: Communicator) -> dict[str, np.ndarray]:
        net, dist = Net(), opt.DistOpt(opt.SGD(lr=0.1), communicator=comm)
        net.set_optimizer(dist)
        built(net, X)
        for threshold, spars, topK, corr in (
            (0, 0.1, True, True),
            (50, 0.5, True, False),
            (10**6, 0.01, False, True),
            (70, 1.0, True, True),
        ):
            loss = autograd.softmax_cross_entropy(net.forward(tensor.Tensor(data=X)), tensor.Tensor(data=Y))
            dist.backward_and_sparse_update(loss, threshold, spars, topK, corr)
        return {n: t.data.copy() for n, t in dist.get_states().items() if n.startswith("residual.")}

    for residuals in LocalGroup(2).run(work):
        assert len(residuals) == 6 and not any(r.any() for r in residuals.values())  # the last call has sent all


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 16).astype(F), data.target[order].astype(np.int32)


def accuracy(mode: str, seed: int) -> float:
    x, y = digits()
    held = slice(1200, None)

    def work(comm: Communicator) -> float:
        net, dist = Net(10, 32), opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=comm)
        net.set_optimizer(dist)
        built(net, x[:2], seed)
        net.graph(True)
        rng = np.random.default_rng(seed)
        how = {"sparseTopK": {"spars": 0.1}, "sparseThreshold": {"spars": 0.005}}.get(mode, {})
        for _ in range(12):
            order = rng.permutation(1200)
            for first in range(0, 1200, 60):
                rows = order[first : first + 60].reshape(2, -1)[comm.rank]
                batch = [tensor.Tensor(data=a[rows], requires_grad=False) for a in (x, y)]
                net(*batch, mode, threshold=1000, **how)
        scores = net.forward(tensor.Tensor(data=x[held])).data
        return float((scores.argmax(1) == y[held]).mean())

    return LocalGroup(2).run(work)[0]


def test_every_mode_learns() -> None:
    """The mean accuracy over two seeds is at most 1 % below that of float32."""
    means = {mode: float(np.mean([accuracy(mode, seed) for seed in range(2)])) for mode in MODES}
    assert means["plain"] > 0.9
    assert all(mean > means["plain"] - 0.01 for mean in means.values()), means


# --- primitives


def test_primitives_sum_in_place_after_wait() -> None:
    def work(comm: Communicator) -> None:
        dist = opt.DistOpt(communicator=comm)
        t = tensor.Tensor(data=np.full(3, comm.rank + 1.0, F))
        count = tensor.Tensor(data=np.array([comm.rank + 5], np.int32))
        half = tensor.Tensor(data=np.full(3, 40000.0, F))  # the sum is above the largest float16
        dist.all_reduce(t.data)
        dist.all_reduce(count)
        dist.all_reduce_half(half)
        assert t.data[0] == comm.rank + 1
        dist.wait()
        assert t.data.tolist() == [3, 3, 3] and count.data.tolist() == [11] and half.data.tolist() == [80000] * 3

    LocalGroup(2).run(work)


@pytest.mark.parametrize("half", [False, True])
def test_the_fused_buffer_is_written_from_its_beginning(half: bool) -> None:
    def work(comm: Communicator) -> None:
        dist = opt.DistOpt(communicator=comm)
        fused = dist.fused_all_reduce_half if half else dist.fused_all_reduce
        a, b, c = (tensor.Tensor(data=np.full(n, v, F)) for n, v in ((2, 1.0), (3, 2.0), (4, 9.0)))
        fused([c])
        dist.wait()
        assert c.data.tolist() == [9] * 4 and comm.sent == 0  # nothing was appended, nothing is sent
        fused([a], send=False)
        fused([b], send=False)
        a.data[...] = 7.0  # the buffer has copies
        fused([c])
        dist.wait()
        assert c.data.tolist() == [2, 2, 4, 4] and a.data.tolist() == [7, 7]
        fused([b], send=False)
        with pytest.raises(InvalidInput, match="at most the 3 elements"):
            fused([c])

    LocalGroup(2).run(work)


def test_update_divides_the_sum() -> None:
    def work(comm: Communicator) -> float:
        dist = opt.DistOpt(opt.SGD(lr=1.0), communicator=comm)
        p, g = tensor.Tensor(data=np.zeros(1, F), name="p"), tensor.Tensor(data=np.array([comm.rank + 1.0], F))
        dist.all_reduce(g)
        dist.wait()
        dist.update(p, g)
        dist.step()
        return float(p.data[0])

    assert LocalGroup(2).run(work) == [-1.5, -1.5]


def test_broadcast_params() -> None:
    def work(comm: Communicator) -> dict[str, np.ndarray]:
        net, dist = Net(), opt.DistOpt(communicator=comm)
        built(net, X, seed=comm.rank)
        dist.broadcast_params(net, root=1)
        t = tensor.Tensor(data=np.full(2, comm.rank, F))
        dist.broadcast_params([t])
        assert t.data.tolist() == [0, 0]
        with pytest.raises(InvalidInput, match="root must be a rank in"):
            dist.broadcast_params(net, root=3)
        return {n: p.data.copy() for n, p in net.get_params().items()}

    ranks = LocalGroup(3).run(work)
    net = Net()
    built(net, X, seed=1)
    assert all(same(r, {n: p.data for n, p in net.get_params().items()}) for r in ranks)


# --- states


@modes
def test_states_continue_to_the_bit(mode: str) -> None:
    def work(comm: Communicator, pause: bool) -> dict[str, np.ndarray]:
        def run(net: Net, steps: range) -> None:
            for i in steps:
                rows = slice(i % 4 * 16 + comm.rank * 8, i % 4 * 16 + comm.rank * 8 + 8)
                net(*(tensor.Tensor(data=a[rows], requires_grad=False) for a in (X, Y)), mode, **MODES[mode])

        def fresh() -> Net:
            net = Net()
            net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=comm))
            built(net, X)
            return net

        net = fresh()
        run(net, range(5))
        if pause:
            states = {n: t.data.copy() for n, t in net.get_states().items()}
            exchanged = {n: t.data.copy() for n, t in net.optimizer.get_states().items()}
            net = fresh()
            net.set_states(states)
            net.optimizer.set_states(exchanged)
        run(net, range(5, 9))
        return {n: p.data.copy() for n, p in net.get_params().items()}

    whole = LocalGroup(2).run(lambda comm: work(comm, False))
    assert all(same(a, b) for a, b in zip(whole, LocalGroup(2).run(lambda comm: work(comm, True)), strict=True))


@graphs
@modes
def test_states_can_be_set_back(mode: str, graph: bool) -> None:
    """Also those of a step before which there was no residual; recorded steps use them too."""
    net, dist = Net(), opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=SingleProcess())
    net.set_optimizer(dist)
    net.graph(graph)
    built(net, X[:2])

    def run() -> dict[str, np.ndarray]:
        for i in range(5):
            net(*(tensor.Tensor(data=a[i * 8 : i * 8 + 8], requires_grad=False) for a in (X, Y)), mode, **MODES[mode])
        return {n: p.data.copy() for n, p in net.get_params().items()}

    def copied() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        model, optimizer = ({n: t.data.copy() for n, t in o.get_states().items()} for o in (net, dist))
        return model, {n: a for n, a in optimizer.items() if not n.startswith("residual.") or run_once}

    for run_once in (False, True):  # back to the beginning; then to the point after the first steps
        before = copied()
        if not run_once:
            before[1].update({f"moments.{n}": np.zeros(p.shape, F) for n, p in net.get_params().items()})
        first = run()
        net.set_states(before[0])
        dist.set_states(before[1])
        assert same(first, run())


@pytest.mark.parametrize(("name", "value"), [
    ("residual.z", np.zeros(3, F)), ("residual.a.W", np.zeros(3, F)), ("residual.a.b", np.zeros(16, np.int64)),
    ("partial", np.array([-1])), ("partial", np.array([np.nan])), ("partial", np.array(["x"])),
])  # fmt: skip
def test_states_of_another_training_are_refused(name: str, value: Any) -> None:
    net, dist = Net(), opt.DistOpt(communicator=SingleProcess())
    net.set_optimizer(dist)
    built(net, X[:2])
    net(tensor.Tensor(data=X), tensor.Tensor(data=Y), "sparseTopK")
    states = {n: t.data.copy() for n, t in dist.get_states().items()}
    with pytest.raises(InvalidInput) as caught:
        dist.set_states({**states, "step_counter": np.array([9]), name: value})
    assert caught.value.code == "SX327" and dist.step_counter.data[0] == 1


def test_a_copy_is_independent() -> None:
    dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=SingleProcess())
    twin = copy.deepcopy(dist)
    p = tensor.Tensor(data=np.ones(2, F), name="p")
    twin.update(p, tensor.Tensor(data=np.ones(2, F)))
    twin.lr = 0.5
    twin.step()
    assert twin.communicator is dist.communicator and dist.lr_value.data[0] == F(0.1) and dist.step_counter.data[0] == 0
    assert "moments.p" in twin.get_states() and "moments.p" not in dist.get_states()
    with pytest.raises(InvalidInput, match="partial must have one element"):
        dist.set_states({**dist.get_states(), "partial": np.zeros(2, np.int64)})


# --- errors


@pytest.mark.parametrize(("call", "told"), [
    (lambda d, loss: d.backward_and_update(loss, -1), "threshold must be an integer of at least 0, got -1"),
    (lambda d, loss: d.backward_and_update(loss, 0.5), "threshold must be an integer"),
    (lambda d, loss: d.backward_and_update_half(loss, loss_scale=0), "loss_scale must be a number above 0, got 0"),
    (lambda d, loss: d.backward_and_update_half(loss, clipping=True, clip_Value=math.inf), "clip_Value must be a number above 0"),
    (lambda d, loss: d.backward_and_sparse_update(loss, spars=0.0, topK=True), r"spars must be in \(0, 1\] for topK, got 0.0"),
    (lambda d, loss: d.backward_and_sparse_update(loss, spars=1.5, topK=True), r"spars must be in \(0, 1\]"),
    (lambda d, loss: d.backward_and_sparse_update(loss, spars=-1.0), "spars must be a number of at least 0"),
    (lambda d, loss: d.all_reduce_half(tensor.Tensor(data=np.zeros(2))), "must be float32, got double"),
    (lambda d, loss: d.sparsification(tensor.Tensor(data=np.zeros(2, F)), np.zeros(3, F), 0.5, True), "the 2 elements"),
])  # fmt: skip
def test_arguments_that_are_refused(call: Callable[..., None], told: str) -> None:
    net, dist = Net(), opt.DistOpt(communicator=SingleProcess())
    net.set_optimizer(dist)
    built(net, X)
    before = {n: p.data.copy() for n, p in net.get_params().items()}
    loss = autograd.softmax_cross_entropy(net.forward(tensor.Tensor(data=X)), tensor.Tensor(data=Y))
    with pytest.raises(InvalidInput, match=told) as caught:
        call(dist, loss)
    assert caught.value.code == "SX386" and same(before, {n: p.data for n, p in net.get_params().items()})


@pytest.mark.parametrize(("made", "kind", "told"), [
    (lambda: opt.DistOpt(3), TypeError, "opt must be an Optimizer, got a int"),
    (lambda: opt.DistOpt(buffSize=0), InvalidInput, "buffSize must be an integer of at least 1"),
    (lambda: opt.DistOpt(engine="gloo"), InvalidInput, "engine must be one of mpi, nccl, single, got 'gloo'"),
    (lambda: opt.DistOpt(timeout=0), InvalidInput, "timeout must be above 0 s"),
    (lambda: opt.DistOpt(nccl_id=object(), local_rank=2, world_size=2), InvalidInput, r"local_rank must be in \[0, world_size\)"),
])  # fmt: skip
def test_constructions_that_are_refused(made: Callable[[], Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        made()


def test_half_precision_parameters_are_refused_by_name() -> None:
    p = tensor.Tensor(data=np.ones(2), name="weights", stores_grad=True)
    autograd.training = True
    try:
        loss = autograd.reduce_sum(p * p)
        with pytest.raises(InvalidInput, match="'weights' must be float32 for half precision, got double"):
            opt.DistOpt(communicator=SingleProcess()).backward_and_update_half(loss)
    finally:
        autograd.training = False


def test_ranks_with_other_models_are_told() -> None:
    def work(comm: Communicator) -> None:
        net, dist = Net(hidden=16 + comm.rank), opt.DistOpt(communicator=comm)
        net.set_optimizer(dist)
        built(net, X)
        net(tensor.Tensor(data=X), tensor.Tensor(data=Y))

    with pytest.raises(CommunicationError, match=r"the same gradients in one order, but rank . differs") as caught:
        LocalGroup(2).run(work)
    assert caught.value.code == "SX952"


def of(values: Any, name: str = "") -> tensor.Tensor:
    return tensor.Tensor(data=values, name=name, requires_grad=bool(name), stores_grad=bool(name))


@pytest.fixture
def training() -> Iterator[None]:
    autograd.training = True
    yield
    autograd.training = False


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("other", ["b", "", "ab"])
def test_a_rank_with_other_gradients_in_a_later_step_is_told(rank: int, other: str) -> None:
    """Gradients of one shape would be summed although they belong to different parameters."""

    def work(comm: Communicator) -> None:
        made = {n: of(np.ones(3, F), n) for n in "abc"}
        dist = opt.DistOpt(communicator=comm)
        for i in range(2):
            names = ("c" + other) if i and comm.rank == rank else "ca"
            dist(sum((autograd.reduce_sum(made[n] * of(np.full(3, 2.0, F))) for n in names[1:]), autograd.reduce_sum(made["c"])))

    with pytest.raises(CommunicationError) as caught:
        LocalGroup(2).run(work)
    assert caught.value.code in ("SX950", "SX952")


@graphs
@modes
def test_ranks_may_change_their_gradients_together(mode: str, graph: bool) -> None:
    def work(comm: Communicator | None) -> dict[str, np.ndarray]:
        net = Net()
        net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=comm or SingleProcess()))
        net.graph(graph)
        built(net, X[:2])
        for i in range(9):
            if i in (3, 6):
                net.freeze("a*" if i == 3 else "c*")
            net(tensor.Tensor(data=X), tensor.Tensor(data=Y), mode, threshold=20, **MODES[mode])
        return {n: p.data.copy() for n, p in net.get_params().items()}

    ranks = LocalGroup(2).run(work)
    assert furthest(ranks[0], work(None)) < 1e-3


@pytest.mark.parametrize("other", [lambda c: c.all_reduce(np.ones(5)), lambda c: c.all_reduce(np.ones(4, F)),
                                   lambda c: c.broadcast(np.ones(4), 0)])  # fmt: skip
def test_ranks_with_different_operations_are_told(other: Callable[[Any], Any]) -> None:
    def work(comm: Communicator) -> None:
        (other(comm) if comm.rank else comm.all_reduce(np.ones(4))).wait()

    with pytest.raises(CommunicationError, match=r"another rank another operation|has failed"):
        LocalGroup(2).run(work)


def test_local_ranks_forget_what_has_ended() -> None:
    group = LocalGroup(3)
    group.run(lambda comm: [comm.all_reduce(np.ones(4)).wait() for _ in range(5)])
    assert not group.given and not group.taken


@pytest.mark.usefixtures("training")
@modes
@pytest.mark.parametrize("dtype", [F, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_parameters_of_any_shape_and_dtype(dtype: Any, mode: str) -> None:
    """Scalars, and empty ones alone in a bucket; equal on all ranks."""
    if mode == "half" and dtype is not F:
        return

    def work(comm: Communicator) -> list[list[float]]:
        made = [of(np.ones(shape, dtype), f"p{i}") for i, shape in enumerate(((), (0,), (3,)))]
        dist = opt.DistOpt(opt.SGD(lr=0.25), communicator=comm)
        for _ in range(2):
            loss = sum(
                (autograd.reduce_sum(p * p) if p.shape else autograd.reshape(p * p, [1]) for p in made[1:]), made[0] * made[0]
            )
            step(dist, loss, mode, 0, 1.0 if mode == "sparseTopK" else 0.0)
        return [np.asarray(p.data, F).reshape(-1).tolist() for p in made]

    assert LocalGroup(2).run(work) == [[[0.25], [], [0.25] * 3]] * 2


@pytest.mark.usefixtures("training")
def test_sums_of_float16_gradients_do_not_overflow() -> None:
    def work(comm: Communicator) -> list[float]:
        p = of(np.zeros(2, np.float16), "p")
        opt.DistOpt(opt.SGD(lr=2.0**-12), communicator=comm)(autograd.reduce_sum(p * of(np.full(2, 40960, np.float16))))
        return p.data.tolist()

    assert LocalGroup(2).run(work) == [[-10.0, -10.0]] * 2


@modes
def test_modes_on_a_device(mode: str) -> None:
    """Arrays of a device are not read on the host by accident, also where the communicator takes them from it."""

    def work(comm: Communicator) -> dict[str, np.ndarray]:
        place, net = device.resolve("STRICT"), Net()
        net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=comm))
        net.compile([tensor.Tensor(data=X[:2], device=place, requires_grad=False)], is_train=True, use_graph=True)
        rng = np.random.default_rng(1)
        net.set_params({n: (rng.standard_normal(p.shape) * 0.3).astype(F) for n, p in net.get_params().items()})
        for _ in range(4):
            net(*(tensor.Tensor(data=a[:16], device=place, requires_grad=False) for a in (X, Y)), mode, **MODES[mode])
        return {n: place.backend.get(p.data) for n, p in net.get_params().items()}

    assert same(LocalGroup(2).run(work)[0], LocalGroup(2).run(work)[1])
    assert furthest(LocalGroup(2).run(work)[0], work(SingleProcess())) < 1e-3


def test_a_rank_that_does_not_come_is_named() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.all_reduce(np.ones(1)).wait()

    with pytest.raises(CommunicationError, match=r"made no progress in 0.2 s; waiting for rank 1"):
        LocalGroup(3, timeout=0.2).run(work)


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError
        comm.all_reduce(np.ones(1)).wait()

    with pytest.raises((ZeroDivisionError, CommunicationError)):
        LocalGroup(2).run(work)


def test_operations_that_do_not_exist_are_refused() -> None:
    for inputs, name, how in (([X], "AllReduceStart", {"communicator": 10**6}), ([X, np.int64(10**6)], "AllReduceDone", {})):
        with pytest.raises(CommunicationError, match=r"does not exist in this process|was not started") as caught:
            op.call(name, [tensor.Tensor(data=a) for a in inputs], how, 1, "ai.singa")
        assert caught.value.code == "SX951"


def test_a_step_with_exchanges_is_not_exported() -> None:
    net, dist = Net(), opt.DistOpt(communicator=SingleProcess())
    built(net, X)
    with pytest.raises(InvalidInput, match="all-reduce operators is not exported") as caught:
        sonnx.to_training_onnx(net, optimizer=dist, inputs=[tensor.Tensor(data=X)])
    assert "dist.opt" in caught.value.hint

    def work(communicator: Any) -> None:
        several = opt.DistOpt(communicator=communicator)

        def loss(y: Any, t: Any) -> Any:
            value = autograd.softmax_cross_entropy(y, t)
            shown = autograd.reduce_sum(y)
            several.all_reduce(shown)
            several.wait()
            return value + 0.0 * shown

        own = Net()
        built(own, X)
        with pytest.raises(UnsupportedModel, match="all-reduce operators is not exported"):
            sonnx.to_training_onnx(own, loss, inputs=[tensor.Tensor(data=X)], target=tensor.Tensor(data=Y))

    LocalGroup(2).run(work)
    sonnx.to_training_onnx(net, optimizer=dist.opt, inputs=[tensor.Tensor(data=X)])


def test_a_launched_program_without_mpi4py_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setattr("singa_backend.collectives.launch.find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match="a training in 3 processes needs mpi4py") as caught:
        communicator()
    assert "sonnx[mpi]" in caught.value.hint


def test_programs_recognise_distributed_optimizers() -> None:
    dist = opt.DistOpt()
    assert hasattr(dist, "communicator") and not hasattr(opt.SGD(), "communicator")
    assert (dist.world_size, dist.global_rank, dist.local_rank, dist.buffSize) == (1, 0, 0, 4194304)
    assert isinstance(dist.opt, opt.SGD) and isinstance(singa_wrap.USE_DIST, bool)
    if not device.get_num_gpus():
        with pytest.raises(Exception, match="NCCL needs"):
            singa_wrap.NcclIdHolder("nccl")


def test_buckets_follow_the_order_and_the_dtype() -> None:
    made = Buckets(10)
    tensors = [tensor.Tensor(data=np.zeros(n, d)) for n, d in ((4, F), (20, F), (3, float), (5, F), (2, F), (1, F))]
    full = [[b.sizes for b in made.add(t, t)] for t in tensors]
    assert full == [[], [[20]], [], [], [[4, 5, 2]], []] and [b.sizes for b in made.rest()] == [[3], [1]]


W = np.ones((8, 16), F)


@pytest.mark.parametrize(("name", "value"), [
    ("rank1.model.z", W), ("rank1.model.a.W", W.T), ("rank1.model.a.W", W.astype(int)), ("rank1.z", W),
    ("rank1.optimizer.moments.z", W), ("rank1.optimizer.residual.z", W), ("rank1.optimizer.residual.a.W", W.T),
    ("rank1.optimizer.partial", np.array([1, 2])), ("rank1.fit.random_state", np.ones(5)),
    ("rank1.fit.random_state", np.array([-1, 2])), ("optimizer.residual.z", W), ("optimizer.residual.a.W", W.T),
])  # fmt: skip
def test_checkpoints_with_other_states_of_ranks_are_refused(name: str, value: np.ndarray, tmp_path: Path) -> None:
    def made(comm: Communicator, path: Path) -> tuple[Net, Checkpoint]:
        net, dist = Net(), opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=comm)
        net.set_optimizer(dist)
        built(net, X[:2])
        return net, Checkpoint(path, net, dist, device.get_default_device(), {"--workers": "2", "--dist-option": "x"}, {}, comm)

    def write(comm: Communicator) -> None:
        net, checkpoint = made(comm, tmp_path / "whole")
        rows = slice(comm.rank * 8, comm.rank * 8 + 8)
        net(tensor.Tensor(data=X[rows]), tensor.Tensor(data=Y[rows]), "sparseTopK")
        place = Position(np.random.default_rng(0), batch=1, order=np.arange(64))
        place.history.losses.append(1.0)
        place.history.weights.append(16)
        checkpoint.write(place)

    LocalGroup(2).run(write)
    other = LocalGroup(2).ranks[1]
    net, checkpoint = made(other, tmp_path / "whole")
    assert checkpoint.read(64, 16).batch == 1
    extra = {**net.load_states(tmp_path / "whole"), name: tensor.Tensor(data=value, requires_grad=False)}
    net.save_states(tmp_path / "damaged", extra)
    with pytest.raises(InvalidInput) as caught:
        made(other, tmp_path / "damaged")[1].read(64, 16)
    assert caught.value.code in ("SX380", "SX381")
