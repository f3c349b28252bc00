"""Recorded steps of several ranks by plans: every form of exchange, repeated runs, and values of any size that are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import close, planner_of, steps_of

from singa import autograd, layer, opt
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend import limits
from singa_backend.collectives import Communicator, LocalGroup, SingleProcess
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Invalid, Options
from singa_backend.plans.answers import NOT_FINITE, REFUSED, Mismatch
from singa_backend.plans.flat import has_kernel_only
from singa_backend.plans.gradients import RefusedGradient
from singa_backend.plans.plan import Plan
from singa_backend.plans.planner import Planner
from singa_backend.session import NO_PLANS

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

F = np.float32
PLANS, DEFINITIONS = Options(), Options(level=0)


def sparse(dist: Any, loss: Any, **how: Any) -> None:
    dist.backward_and_sparse_update(loss, 500, **how)


FORMS: dict[str, Callable[[Any, Any], None]] = {
    "plain": lambda dist, loss: dist.backward_and_update(loss, 500),
    "one bucket": lambda dist, loss: dist.backward_and_update(loss),
    "half": lambda dist, loss: dist.backward_and_update_half(loss, 500, clipping=True, clip_Value=2.5, loss_scale=64),
    "partial": lambda dist, loss: dist.backward_and_partial_update(loss, 500),
    "largest": lambda dist, loss: sparse(dist, loss, spars=0.2, topK=True),
    "above": lambda dist, loss: sparse(dist, loss, spars=0.01),
    "dropped": lambda dist, loss: sparse(dist, loss, spars=0.01, corr=False),
}


class Net(Model):
    """A convolution with a pooling, whose gradients are kernels with hidden values, and two products."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.conv, self.pool, self.flat = layer.Conv2d(8, 3, padding=1), layer.MaxPool2d(2, 2), layer.Flatten()
        self.middle, self.last = layer.Linear(16), layer.Linear(3)
        self.form, self.optimizer = FORMS[form], opt.SGD()  # type: Any, Any

    def forward(self, x: Tensor) -> Tensor:
        y = self.flat(self.pool(autograd.relu(self.conv(x))))
        return self.last(autograd.tanh(self.middle(y)))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.form(self.optimizer, loss)
        return loss  # type: ignore[no-any-return]


chosen = threading.local()
"""`options`: of the steps that this thread, a rank, records."""


@pytest.fixture(autouse=True)
def options_of_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Model, "_plan_options", lambda self: chosen.options)
    yield
    chosen.options = PLANS


def batch(i: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The rows of a rank of a batch of 8."""
    rng = np.random.default_rng(i)
    x, t = rng.standard_normal((8, 2, 8, 8)).astype(F), rng.integers(0, 3, 8)
    rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
    return Tensor(data=x[rows]), Tensor(data=t[rows])


def trained(comm: Communicator, form: str, options: Options = PLANS, steps: int = 6, before: Any = None) -> tuple[Net, Any]:
    """A net after some steps on a rank, and its states, those of the optimizer and its last loss."""
    chosen.options = options
    net = Net(form)
    net.optimizer = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=comm)
    net.compile([batch(0, 0, 1)[0]], is_train=True, use_graph=True)
    rng = np.random.default_rng(5)
    net.set_params({n: (rng.standard_normal(p.shape) * 0.2).astype(F) for n, p in net.get_params().items()})
    for i in range(steps):
        if before is not None:
            before(net, i)
        loss = net(*batch(i, comm.rank, comm.size))
    named = {**net.get_params(), **net.optimizer.get_states(), "loss": loss}
    return net, {n: np.array(t.data) for n, t in named.items()}


def equal_on_all(found: list[tuple[Net, Any]]) -> None:
    """Fail unless all ranks have the same bits of the parameters."""
    for net, states in found[1:]:
        assert [n for n in net.get_params() if not np.array_equal(states[n], found[0][1][n])] == []


@pytest.mark.parametrize("form", FORMS)
def test_every_form_by_plans(form: str) -> None:
    """Two ranks by plans against two by definitions: parameters, states, residuals and the last loss."""
    found, other = (LocalGroup(2).run(lambda comm, o=o: trained(comm, form, o)) for o in (PLANS, DEFINITIONS))
    for (net, states), (by_definitions, expected) in zip(found, other, strict=True):
        assert [s._session.reason for s in steps_of(net)] == [None] * len(steps_of(net)) and steps_of(net)
        assert {s._session.reason for s in steps_of(by_definitions)} == {NO_PLANS}
        for name, e in expected.items():
            rest = name.startswith("residual.")  # what is below the threshold of sums that round at their own size
            close(states[name], e, 1e-2 if form == "half" else 5e-5 if rest else 1e-5, name)
    if form != "partial":  # whose ranks differ between averages
        equal_on_all(found)


@pytest.mark.parametrize("form", ["plain", "one bucket", "half", "largest", "above"])
def test_a_rank_by_plans_and_one_by_definitions(form: str) -> None:
    """They begin the same exchanges in the same order, and update alike where both compute the update in the same way."""
    found = LocalGroup(2).run(lambda comm: trained(comm, form, (PLANS, DEFINITIONS)[comm.rank]))
    for name in found[0][0].get_params():
        close(found[0][1][name], found[1][1][name], 1e-6, name)


@pytest.mark.parametrize("form", ["plain", "one bucket", "partial"])
def test_one_rank_equals_no_exchange(form: str) -> None:
    """To the bit, by plans."""
    net, alone = trained(SingleProcess(), form)
    chosen.options = PLANS
    own = Net(form)
    own.form, own.optimizer = (lambda o, loss: o(loss)), opt.SGD(lr=0.1, momentum=0.9)
    own.compile([batch(0, 0, 1)[0]], is_train=True, use_graph=True)
    rng = np.random.default_rng(5)
    own.set_params({n: (rng.standard_normal(p.shape) * 0.2).astype(F) for n, p in own.get_params().items()})
    for i in range(6):
        own(*batch(i, 0, 1))
    assert steps_of(own)[0]._session.reason is None is steps_of(net)[0]._session.reason
    assert [n for n, p in own.get_params().items() if not np.array_equal(p.data, alone[n])] == []


@pytest.mark.parametrize("form", ["above", "dropped"])
def test_the_number_of_values_that_are_sent_does_not_change_the_plan(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trace for each rank, although each step sends another number of values."""
    traces: list[int] = []
    trace = Planner._trace
    monkeypatch.setattr(Planner, "_trace", lambda self, *a: (traces.append(1) if self.exchanges else None, trace(self, *a))[1])
    sizes: set[int] = set()
    group = LocalGroup(2)
    gather = type(group.ranks[0]).all_gather
    monkeypatch.setattr(
        type(group.ranks[0]), "all_gather", lambda self, a, *n: (sizes.add(a.size) if n else None, gather(self, a, *n))[1]
    )
    found = group.run(lambda comm: trained(comm, form, steps=8))
    assert len(traces) == 2 and len(sizes) > 4, (traces, sizes)
    for net, _ in found:
        (plan,) = planner_of(steps_of(net)[0]).plans.values()
        assert len(plan.segments) == 1


# --- repeated runs


class Failing:
    """Makes the first trace of rank 0 fail after its last exchange has begun or ended, with an error that repeats the run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Callable[[Any, Planner], Exception]) -> None:
        self.count, self.begun, self.error = 0, 0, error
        trace = Plan.trace

        def failing(plan: Plan, inputs: Any, budget: limits.Budget, *more: Any) -> Any:
            made = trace(plan, inputs, budget, *more)
            if getattr(chosen, "fails", False) and plan.planner.exchanges:
                chosen.fails = False
                self.count, self.begun = self.count + 1, len(budget.exchanges.tickets)
                raise self.error(plan, plan.planner)
            return made

        monkeypatch.setattr(Plan, "trace", failing)


def refused(plan: Plan, planner: Planner) -> Exception:
    return RefusedGradient(next(c for c in planner.graph.nodes if has_kernel_only(c)), ("refused by the test",))


def moved(plan: Plan, planner: Planner) -> Exception:
    return Mismatch(next(c for c in planner.graph.nodes if c.is_("Tanh")))


def invalid(plan: Plan, planner: Planner) -> Exception:
    return Invalid("refused by the test")


@pytest.mark.parametrize("error", [refused, moved, invalid])
@pytest.mark.parametrize("form", ["plain", "half", "largest", "above"])
def test_a_run_that_is_repeated_exchanges_once(form: str, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 repeats its first recorded run, by another plan or by the definitions; rank 1 does not."""
    failing = Failing(monkeypatch, error)
    group = LocalGroup(2, timeout=60)
    starts = [0, 0]

    def work(comm: Communicator) -> Any:
        chosen.fails = comm.rank == 0
        made = trained(comm, form)
        starts[comm.rank] = comm.sent
        return made

    found = group.run(work)
    assert failing.count == 1 and failing.begun > 1
    expected = LocalGroup(2).run(lambda comm: trained(comm, form, DEFINITIONS))
    for (net, states), (_, other) in zip(found, expected, strict=True):
        for name in net.get_params():
            close(states[name], other[name], 1e-2 if form == "half" else 1e-5, name)
    assert form == "above" or starts[0] == starts[1]  # bytes: a repeated exchange would be sent again


def test_a_nan_reaches_all_ranks_as_by_definitions() -> None:
    """An input that is not finite is found before anything is sent."""

    def spoil(net: Net, i: int) -> None:
        if i == 2 and net.optimizer.global_rank == 0:
            for p in net.get_params().values():
                p.data[...] = np.nan

    found, other = (
        LocalGroup(2).run(lambda comm, o=o: trained(comm, "plain", o, steps=3, before=spoil)) for o in (PLANS, DEFINITIONS)
    )
    assert steps_of(found[0][0])[0]._session.reason in (NOT_FINITE, REFUSED)
    for (_, states), (_, expected) in zip(found, other, strict=True):
        for name, e in expected.items():
            assert np.array_equal(np.isnan(states[name]), np.isnan(e)), name
    assert np.isnan(found[1][1]["last.W"]).all()


def test_the_exchanges_of_a_run_continue() -> None:
    """A second attempt gets the tickets and results of the first, then begins further ones."""
    made, done, begun = limits.Exchanges(), [], []

    def start() -> int:
        begun.append(10 + len(begun))
        return begun[-1]

    def wait(ticket: int) -> str:
        done.append(ticket)
        return f"sum {ticket}"

    assert [made.begin(start), made.begin(start), made.end(10, wait)] == [10, 11, "sum 10"]
    made.at = 0
    assert [made.begin(start), made.end(10, wait), made.begin(start), made.begin(start), made.end(12, wait)] == [
        10, "sum 10", 11, 12, "sum 12",
    ]  # fmt: skip
    assert begun == [10, 11, 12] and done == [10, 12]
