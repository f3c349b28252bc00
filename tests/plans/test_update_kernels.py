"""Every optimizer in recorded steps by plans, against the definitions; and the kernel that computes an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.recorded_steps import close, planner_of, steps_of

from singa import autograd, layer, opt
from singa._core.tensor import Tensor, op
from singa.model import Model
from singa_backend.kernels import expressions, onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

F = np.float32


def grouped(made: Any) -> Any:
    made.set_group("*.b", weight_decay=0)
    made.set_group("second.*", lr=opt.ExponentialDecay(0.05, 2, 0.5))
    return made


def clipped(made: Any, **bounds: float) -> Any:
    made.clip_gradients(**bounds)
    return made


class Lion(opt.Optimizer):
    """An optimizer of a program: the sign of a moving average."""

    kinds = ("m",)

    def __init__(self, lr: Any = 0.01) -> None:
        super().__init__(lr)

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        (m,) = states
        d = op.Sign(op.Add(op.Mul(m, 0.9), op.Mul(g, 0.1)))
        return op.Sub(p, op.Mul(d, self._value("lr", p))), op.Add(op.Mul(m, 0.99), op.Mul(g, 0.01))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: opt.SGD(0.1),
    "SGD, decay": lambda: opt.SGD(0.1, weight_decay=0.01),
    "momentum": lambda: opt.SGD(0.1, momentum=0.9),
    "dampening": lambda: opt.SGD(0.1, momentum=0.9, dampening=0.3, weight_decay=1e-3),
    "Nesterov": lambda: opt.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "a changing momentum": lambda: opt.SGD(0.1, momentum=opt.ExponentialDecay(0.9, 2, 0.5)),
    "RMSProp": lambda: opt.RMSProp(0.01, weight_decay=1e-3),
    "AdaGrad": lambda: opt.AdaGrad(0.05, weight_decay=1e-3),
    "Adam": lambda: opt.Adam(0.01, weight_decay=1e-3),
    "AdamW": lambda: opt.AdamW(0.01, weight_decay=0.1),
    "AdamW, no decay": lambda: opt.AdamW(0.01, weight_decay=0),
    "AdamW, rates": lambda: opt.AdamW(opt.WarmUp(opt.CosineDecay(0.05, 8), 3)),
    "changing betas": lambda: opt.Adam(0.01, beta_1=opt.ExponentialDecay(0.9, 2, 0.9), beta_2=opt.MultiStepDecay(0.99, [2], 0.9)),
    "steps": lambda: opt.SGD(opt.StepDecay(0.1, 2, 0.5), momentum=0.9),
    "groups": lambda: grouped(opt.AdamW(0.01)),
    "groups, momentum": lambda: grouped(opt.SGD(0.1, momentum=0.9, weight_decay=0.01)),
    "norm": lambda: clipped(opt.SGD(0.1, momentum=0.9), norm=0.05),
    "values": lambda: clipped(opt.Adam(0.01), value=1e-3),
    "both bounds": lambda: clipped(opt.AdamW(0.01), norm=0.05, value=0.01),
    "Lion": Lion,
}


class Net(Model):
    """Two products and a parameter that no step uses."""

    def __init__(self, optimizer: Any, dtype: Any = F) -> None:
        super().__init__()
        self.first, self.second, self.unused = layer.Linear(32), layer.Linear(3), layer.Linear(5)
        self.optimizer, self.dtype = optimizer, dtype

    def forward(self, x: Tensor) -> Tensor:
        if autograd.training is False:
            self.unused(x)
        return self.second(autograd.tanh(self.first(x)))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def trained(make: Callable[[], Any], options: Options, monkeypatch: pytest.MonkeyPatch, dtype: Any = F) -> tuple[Net, Any]:
    """A net after seven steps, and all its parameters and states."""
    monkeypatch.setattr(Model, "_plan_options", lambda self: options)
    rng = np.random.default_rng(0)
    net = Net(make(), dtype)
    x = rng.standard_normal((8, 24)).astype(dtype)
    net.compile([Tensor(data=x)], is_train=True, use_graph=True)
    net.set_params({n: (rng.standard_normal(p.shape) * 0.3).astype(F) for n, p in net.get_params().items()})
    if dtype != F:
        net.to(dtype=dtype)
    with pytest.warns(UserWarning, match="unused"):
        net(Tensor(data=x), Tensor(data=rng.integers(0, 3, 8)))
    for _ in range(6):
        net(Tensor(data=rng.standard_normal((8, 24)).astype(dtype)), Tensor(data=rng.integers(0, 3, 8)))
    named = {**net.get_params(), **net.optimizer.get_states()}
    return net, {n: np.array(t.data).astype(np.float64) for n, t in named.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and states after seven steps; a parameter without a gradient keeps every bit."""
    net, found = trained(OPTIMIZERS[name], Options(), monkeypatch)
    _, expected = trained(OPTIMIZERS[name], Options(level=0), monkeypatch)
    assert found.keys() == expected.keys()
    for n, e in expected.items():
        close(found[n], e, 2e-5, n)
    for n in ("unused.W", "unused.b"):
        assert np.array_equal(found[n], expected[n]) and not any(k.endswith(n) for k in net.optimizer.get_states())
    for step in steps_of(net):
        assert step._session.reason is None
        (plan,) = planner_of(step).plans.values()
        kernels = [s.kernel for s in plan.first.steps]
        assert "definition" not in [s.kernel for s in plan.first.steps if s.writes and s.writes[0].size > 1], kernels
        count = 8 if name == "Lion" else 4  # one for each parameter; Sign is not a part of an expression
        assert sum(k.endswith(".update") for k in kernels) == count, kernels


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["momentum", "AdamW", "both bounds"])
@pytest.mark.filterwarnings("ignore:.*stay.*")
def test_parameters_of_16_bits(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are updated in float32, and their states are float32."""
    net, found = trained(OPTIMIZERS[name], Options(), monkeypatch, np.dtype(dtype))
    _, expected = trained(OPTIMIZERS[name], Options(level=0), monkeypatch, np.dtype(dtype))
    assert net.first.W.data.dtype == dtype and [s._session.reason for s in steps_of(net)] == [None]
    assert {t.data.dtype for n, t in net.optimizer.get_states().items() if n != "step_counter"} == {np.dtype(F)}
    for n, e in expected.items():
        close(found[n], e, 2e-2, n)


# --- the kernel


def computed(function: Callable[..., Any], arrays: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, threads: int = 1) -> Any:
    """The results of a step with a gradient, whose expressions are an update, by a plan and by definitions."""
    from tests.helpers.recorded_steps import gradients_of, record

    def body(w: Tensor, *xs: Tensor) -> list[Tensor]:
        loss = op.ReduceSum(op.Mul(op.Relu(w), w), keepdims=0)
        return [*gradients_of(loss, [w]), *function(*xs)]

    given = [np.ones((2, 2), F), *arrays]
    plan, other = record(body, given, {0}, Options(threads=threads)), record(body, given, {0}, Options(level=0))
    monkeypatch.setattr(expressions, "BLOCK", 1 << 12)
    return plan, plan.run(), plan.run(), other.run()


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "sums": lambda x, y, s: [op.Add(op.Mul(x, 0.9), op.Mul(y, 0.1)), op.Sub(x, op.Mul(y, s))],
    "reversed": lambda x, y, s: [op.Sub(2.0, op.Mul(x, s)), op.Sub(op.Mul(y, s), op.Mul(x, y)), op.Sub(s, op.Add(x, 1.0))],
    "quotients": lambda x, y, s: [op.Div(op.Mul(x, s), op.Sqrt(op.Add(op.Mul(y, y), 1e-3))), op.Div(op.Sub(x, y), 3.0)],
    "shared": lambda x, y, s: [op.Add(a := op.Mul(x, y), op.Sqrt(op.Mul(a, a))), op.Div(a, s), op.Mul(op.Add(a, y), a)],
    "a result that is read": lambda x, y, s: [v := op.Add(op.Mul(x, s), y), op.Sub(y, op.Mul(v, 0.5)), op.Sqrt(op.Mul(v, v))],
    "extreme factors": lambda x, y, s: [op.Add(op.Mul(x, 1e-30), op.Mul(y, 2.0)), op.Add(op.Mul(x, 0.0), op.Mul(y, s))],
    "squares": lambda x, y, s: [op.Add(op.Mul(x, 0.999), op.Mul(op.Mul(y, y), 1e-3)), op.Mul(op.Add(y, y), s)],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [6, 1 << 12, (1 << 13) + 1, 3 * (1 << 12) + 5])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name: str, size: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block, in several, and with a shorter last one; the second run uses other memory."""
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal((1, size)).astype(F), rng.standard_normal((1, size)).astype(F), np.array([0.7], F)]
    plan, first, again, expected = computed(EXPRESSIONS[name], arrays, monkeypatch, threads)
    assert any(k.endswith(".update") for k in plan.kernels), plan.kernels
    for n, (a, b, e) in enumerate(zip(first, again, expected, strict=True)):
        close(a, e, 1e-6, f"result {n}")
        assert np.array_equal(a, b)


def test_values_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN, an infinity and a division by 0 have the results of the definitions."""
    x, y = np.array([[np.nan, np.inf, -np.inf, 0, 1, 0]], F), np.array([[1, 2, np.inf, 0, 0, 3]], F)

    def function(x: Tensor, y: Tensor, s: Tensor) -> list[Tensor]:
        return [op.Div(op.Mul(x, s), op.Sqrt(op.Mul(y, y))), op.Add(op.Mul(x, 0.9), op.Mul(y, s)), op.Sub(s, op.Mul(x, y))]

    _, first, again, expected = computed(function, [x, y, np.array([0.7], F)], monkeypatch)
    for a, b, e in zip(first[1:], again[1:], expected[1:], strict=True):
        assert (
            np.array_equal(np.isnan(a), np.isnan(e)) and np.allclose(a, e, equal_nan=True) and np.allclose(b, e, equal_nan=True)
        )


def test_what_the_kernel_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of two shapes are computed by other kernels, or the definitions."""
    x = np.linspace(1, 2, 6, dtype=F).reshape(2, 3)

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [z := op.Sqrt(op.Mul(y, y)), op.Add(op.Mul(x, z), x)]

    plan, first, again, expected = computed(function, [x, x[:1]], monkeypatch)
    assert not any(k.endswith(".update") for k in plan.kernels)
    for a, b, e in zip(first, again, expected, strict=True):
        close(a, e, 1e-6)
        close(b, e, 1e-6)


@pytest.mark.parametrize("kind", ["float64", "a row"])
def test_other_operands(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles, and an operand that is broadcast."""
    x = np.linspace(1, 2, 6, dtype=np.float64 if kind == "float64" else F).reshape(2, 3)
    y = x if kind == "float64" else x[:1]
    plan, first, again, expected = computed(lambda x, y: [op.Add(op.Mul(x, y), x)], [x, y], monkeypatch)
    assert any(k.endswith(".update") for k in plan.kernels)
    for a, b, e in zip(first, again, expected, strict=True):
        assert np.array_equal(a, e) or (close(a, e, 1e-6) is None)
        assert np.array_equal(a, b)
