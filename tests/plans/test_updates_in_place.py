"""Parameters and states that a recorded step replaces in their own arrays, and when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import planner_of, steps_of

from singa import autograd, layer, opt
from singa._core.tensor import Tensor, op
from singa.model import Model
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Options
from singa_backend.plans.updates import NotInPlace, require_apart

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

F = np.float32
PLANS, DEFINITIONS = Options(), Options(level=0)


class Net(Model):
    """Two products, and a step that a function may extend."""

    def __init__(self, optimizer: Any, more: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.one, self.two, self.optimizer, self.more = layer.Linear(96), layer.Linear(96), optimizer, more

    def forward(self, x: Tensor) -> Any:
        return self.two(autograd.tanh(self.one(x)))

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        loss = autograd.mse_loss(self.forward(x), t)
        before = None if self.more is None else self.more(self, loss)
        self.optimizer(loss)
        return loss, before


def batch(i: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(i)
    return tuple(Tensor(data=rng.standard_normal((32, 96)).astype(F)) for _ in range(2))  # type: ignore[return-value]


def built(options: Options, monkeypatch: pytest.MonkeyPatch, make: Any = None, more: Any = None) -> Net:
    monkeypatch.setattr(Model, "_plan_options", lambda self: options)
    net = Net((make or (lambda: opt.AdamW(0.01)))(), more)
    net.compile([batch(0)[0]], is_train=True, use_graph=True)
    rng = np.random.default_rng(5)
    net.set_params({n: (rng.standard_normal(p.shape) * 0.1).astype(F) for n, p in net.get_params().items()})
    return net


def everything(net: Net) -> dict[str, Any]:
    return {**net.get_params(), **net.optimizer.get_states()}


def agree(a: Net, b: Net) -> None:
    for (n, x), y in zip(everything(a).items(), everything(b).values(), strict=True):
        np.testing.assert_allclose(np.asarray(x.data), np.asarray(y.data), rtol=2e-4, atol=2e-6, err_msg=n)


def segment(net: Net) -> Any:
    (plan,) = planner_of(steps_of(net)[0]).plans.values()
    return plan.first


OPTIMIZERS = [
    lambda: opt.SGD(0.1), lambda: opt.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01), lambda: opt.AdamW(0.01),
    lambda: opt.RMSProp(0.01), lambda: opt.AdaGrad(0.01),
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["SGD", "Nesterov", "AdamW", "RMSProp", "AdaGrad"])
def test_arrays_stay_and_no_array_is_copied(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter and state keeps its array; only single numbers, such as the counter of steps, are copied."""
    nets = [built(o, monkeypatch, make) for o in (PLANS, DEFINITIONS)]
    monkeypatch.setattr(Model, "_plan_options", lambda self: PLANS)
    for i in range(2):
        nets[0](*batch(i))
    held = {n: t.data for n, t in everything(nets[0]).items()}
    for i in range(2, 6):
        nets[0](*batch(i))
    monkeypatch.setattr(Model, "_plan_options", lambda self: DEFINITIONS)
    for i in range(6):
        nets[1](*batch(i))
    agree(*nets)
    assert all(t.data is held[n] for n, t in everything(nets[0]).items())
    first = segment(nets[0])
    assert len(first.replaced) >= 4 and first.update is not None
    assert all(v.size == 1 for s in first.steps if s.kernel == "copy" for v in s.writes)
    assert len({p.index for p in first.replaced}) == len(first.replaced)


def test_the_values_of_before_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that shows a parameter of before the update keeps those values."""

    def more(net: Any, loss: Tensor) -> Any:
        return op.Reshape(net.one.W, [-1])

    nets = [built(o, monkeypatch, more=more) for o in (PLANS, DEFINITIONS)]
    for i in range(5):
        before = np.array(nets[0].one.W.data)
        monkeypatch.setattr(Model, "_plan_options", lambda self: PLANS)
        _, shown = nets[0](*batch(i))
        assert np.array_equal(np.asarray(shown.data), before.reshape(-1)), i
        monkeypatch.setattr(Model, "_plan_options", lambda self: DEFINITIONS)
        nets[1](*batch(i))
    agree(*nets)


def test_another_array_is_used_from_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are bound to the array of a parameter: another one replaces it, and the first one keeps its values."""
    nets = [built(o, monkeypatch) for o in (PLANS, DEFINITIONS)]
    for net, options in zip(nets, (PLANS, DEFINITIONS), strict=True):
        monkeypatch.setattr(Model, "_plan_options", lambda self, o=options: o)
        for i in range(6):
            if i == 3:
                old, kept = net.one.W.data, np.array(net.one.W.data)
                net.one.W._data = np.array(old) * F(0.5)
            net(*batch(i))
        assert np.array_equal(old, kept) and net.one.W.data is not old
    agree(*nets)


def test_arrays_that_share_memory_are_not_replaced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parameters in one array: the update of each reads what was there before, as by the definitions."""
    nets = [built(o, monkeypatch, lambda: opt.SGD(0.1)) for o in (PLANS, DEFINITIONS)]
    for net, options in zip(nets, (PLANS, DEFINITIONS), strict=True):
        monkeypatch.setattr(Model, "_plan_options", lambda self, o=options: o)
        for i in range(6):
            if i == 3:
                net.two.W._data = net.one.W._data
            net(*batch(i))
        assert steps_of(net)[0]._session.reason is None or options is DEFINITIONS
    assert not segment(nets[0]).replaced
    agree(*nets)


@pytest.mark.parametrize("arrays", [
    lambda a: [a[:6], a[5:]], lambda a: [a, a], lambda a: [a[::2]], lambda a: [np.broadcast_to(a[:1], 3)],
])  # fmt: skip
def test_what_cannot_be_replaced(arrays: Any) -> None:
    a = np.zeros(10, F)
    with pytest.raises(NotInPlace):
        require_apart(arrays(a))
    require_apart([a[:5], a[5:], np.zeros(0, F)])


def test_a_thousand_steps_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the process, in pages, after many steps; NumPy's own bookkeeping may take some."""
    net = built(PLANS, monkeypatch)
    given = batch(0)
    for _ in range(50):
        net(*given)

    def pages() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1])

    before = pages()
    for _ in range(1000):
        net(*given)
    assert pages() - before < 512  # 2 MiB; a leak of one parameter a step would take 9,000 pages
