"""Optimizers: each update against the same formula on NumPy's arrays, states, schedules, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers import other_device

from singa import layer, opt
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor, to_numpy
from singa.device import Device, default_device
from singa.model import Model
from singa_backend.errors import InvalidInput, SonnxError

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

SHAPES = {"w": (3, 4), "b": (5,), "s": (), "e": (2, 0)}
STEPS = 6


@pytest.fixture(autouse=True)
def training() -> Iterator[None]:
    tape.training = True
    yield
    tape.training = False


def params(dtype: Any = np.float64) -> dict[str, Tensor]:
    rng = np.random.default_rng(1)
    return {n: Tensor(data=rng.normal(size=s).astype(dtype), name=n, stores_grad=True) for n, s in SHAPES.items()}


def run(optimizer: opt.Optimizer, rule: Callable[..., Any], dtype: Any = np.float64, rtol: float = 1e-14) -> None:
    """The optimizer against `rule(p, g, state, t)`, which changes `state` and returns the new value."""
    rng = np.random.default_rng(2)
    ps = params(dtype)
    expected = {n: p.data.astype(np.float64) for n, p in ps.items()}
    states: dict[str, dict[str, Any]] = {n: {} for n in ps}
    for t in range(STEPS):
        for n, p in ps.items():
            g = rng.normal(size=p.shape).astype(dtype)
            optimizer.apply(n, p, Tensor(data=g))
            expected[n] = rule(expected[n], g.astype(np.float64), states[n], t)
        optimizer.step()
    for n, p in ps.items():
        assert p.data.dtype == dtype and p.shape == SHAPES[n]
        np.testing.assert_allclose(p.data, expected[n], rtol=rtol, atol=rtol)
    assert optimizer.step_counter.data.tolist() == [STEPS]


D: dict[str, Any] = {"dtype": np.float64}


@pytest.mark.parametrize(
    "m, d, decay, nesterov", [(0, 0, 0, 0), (0.9, 0, 0, 0), (0.9, 0.5, 0.01, 0), (0.9, 0, 0.01, 1), (0, 0, 0.1, 0)]
)
@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-14), (np.float32, 2e-6)])
def test_sgd(m: float, d: float, decay: float, nesterov: bool, dtype: Any, rtol: float) -> None:
    def rule(p: Any, g: Any, state: dict[str, Any], t: int) -> Any:
        g = g + decay * p
        if not m:
            return p - 0.1 * g
        v = state["v"] = m * state.get("v", 0) + (1 - d) * g
        return p - 0.1 * (g + m * v if nesterov else v)

    run(opt.SGD(0.1, m, d, decay, bool(nesterov), np.float64), rule, dtype, rtol)


def test_rmsprop() -> None:
    def rule(p: Any, g: Any, state: dict[str, Any], t: int) -> Any:
        g = g + 0.01 * p
        r = state["r"] = 0.8 * state.get("r", 0) + (1 - 0.8) * g**2
        return p - 0.1 * g / np.sqrt(r + 1e-4)

    run(opt.RMSProp(0.1, 0.8, 1e-4, 0.01, **D), rule)


def test_adagrad() -> None:
    def rule(p: Any, g: Any, state: dict[str, Any], t: int) -> Any:
        g = g + 0.01 * p
        h = state["h"] = state.get("h", 0) + g**2
        return p - 0.1 * g / np.sqrt(h + 1e-4)

    run(opt.AdaGrad(0.1, 1e-4, 0.01, **D), rule)


@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-13), (np.float32, 2e-6), (np.float16, 5e-3), (ml_dtypes.bfloat16, 5e-2)])
def test_adam(dtype: Any, rtol: float) -> None:
    def rule(p: Any, g: Any, state: dict[str, Any], t: int) -> Any:
        g = g + 0.01 * p
        m = state["m"] = 0.8 * state.get("m", 0) + (1 - 0.8) * g
        v = state["v"] = 0.99 * state.get("v", 0) + (1 - 0.99) * g**2
        return p - 0.1 * (m / (1 - 0.8 ** (t + 1))) / (np.sqrt(v / (1 - 0.99 ** (t + 1))) + 1e-8)

    run(opt.Adam(0.1, 0.8, 0.99, 1e-8, 0.01, **D), rule, dtype, rtol)


def test_half_precision_keeps_its_states_in_float32() -> None:
    p = Tensor(data=np.zeros(2, np.float16), name="p")
    adam = opt.Adam()
    adam.apply("p", p, Tensor(data=np.zeros(2, np.float16)))
    assert adam.m["p"].data.dtype == np.float32 and p.data.tolist() == [0, 0]


@pytest.mark.parametrize("staircase", [False, True])
def test_every_hyperparameter_may_follow_a_schedule(staircase: bool) -> None:
    def at(init: float, t: int) -> float:
        return float(init * 0.5 ** (t // 4 if staircase else t / 4))

    def rule(p: Any, g: Any, state: dict[str, Any], t: int) -> Any:
        g = g + at(0.01, t) * p
        v = state["v"] = at(0.9, t) * state.get("v", 0) + (1 - at(0.5, t)) * g
        return p - at(0.1, t) * v

    values = [opt.ExponentialDecay(v, 4, 0.5, staircase) for v in (0.1, 0.9, 0.5, 0.01)]
    run(opt.SGD(*values, **D), rule)


def test_a_scheduler_of_ones_own() -> None:
    class Warmup(opt.DecayScheduler):
        def __call__(self, step: Tensor) -> Any:
            return op.Mul(op.Min(op.Div(op.Add(op.Cast(step, to=1), 1.0), 4.0), 1.0), self.init_value)

    sgd = opt.SGD(Warmup(0.5))
    seen = []
    for _ in range(5):
        seen.append(sgd.lr_value.data.tolist())
        sgd.step()
    assert seen == [[0.125], [0.25], [0.375], [0.5], [0.5]]


def test_a_subclass_of_constant_computes_its_values() -> None:
    class Doubling(opt.Constant):
        def call(self, step: Tensor) -> Any:
            return super().call(step) * op.Pow(2.0, op.Cast(step, to=1))

    sgd, seen = opt.SGD(Doubling(0.25), momentum=Doubling(0.0)), []
    for _ in range(3):
        seen.append(sgd.lr_value.data.tolist())
        sgd.step()
    assert seen == [[0.25], [0.5], [1.0]] and sgd.kinds == ("moments",)


def test_the_rate_can_be_set() -> None:
    sgd, p = opt.SGD(0.5), Tensor(data=np.ones(1), name="p")
    assert sgd.lr_value.shape == sgd.step_counter.shape == (1,)
    sgd.lr = 0.25
    sgd.update(p, Tensor(data=np.ones(1)))
    assert sgd.lr_value.data.tolist() == [0.25] and p.data.tolist() == [0.75]


@pytest.mark.parametrize("arguments", [{"momentum": -1}, {"weight_decay": -1}, {"nesterov": True},
                                       {"nesterov": True, "momentum": 0.9, "dampening": 0.1}])  # fmt: skip
def test_contradictions_are_value_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        opt.SGD(0.1, **arguments)


@pytest.mark.parametrize("kind", [opt.Adam, opt.RMSProp, opt.AdaGrad])
def test_weight_decay_is_not_negative(kind: Any) -> None:
    with pytest.raises(ValueError, match="weight_decay"):
        kind(weight_decay=-0.1)


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1]])
def test_a_hyperparameter_is_a_number_or_a_schedule(value: Any) -> None:
    with pytest.raises(TypeError, match="a number or a DecayScheduler"):
        opt.SGD(lr=value)
    with pytest.raises(TypeError, match="rho"):
        opt.RMSProp(rho=value)


def test_plain_optimizers_have_no_communicator() -> None:
    assert not hasattr(opt.SGD(), "communicator")


# --- whole steps


def loss_of(w: Tensor, x: Any = 2.0) -> Tensor:
    return op.ReduceSum(op.Mul(op.Mul(w, w), x), keepdims=0)  # type: ignore[no-any-return]


def test_calling_it_is_backward_update_and_step() -> None:
    for call in ("__call__", "backward_and_update"):
        w, sgd = Tensor(data=np.array([1.0, 2.0]), name="w", stores_grad=True), opt.SGD(0.25, dtype=np.float64)
        getattr(sgd, call)(loss_of(w))
        assert w.data.tolist() == [0.0, 0.0] and sgd.step_counter.data.tolist() == [1]


def test_storage_stays() -> None:
    w, sgd = Tensor(data=np.array([1.0]), name="w", stores_grad=True), opt.SGD(0.25)
    storage = w.data
    sgd(loss_of(w))
    assert w.data is storage


def test_parameters_of_one_name_have_states_of_their_own() -> None:
    a, b = (Tensor(data=np.ones(n), name="W", stores_grad=True) for n in (2, 3))
    adam = opt.Adam()
    adam(op.Add(loss_of(a), loss_of(b)))
    adam(op.Add(loss_of(a), loss_of(b)))
    assert {n: t.shape for n, t in adam.m.items()} in ({"W": (2,), "W#1": (3,)}, {"W": (3,), "W#1": (2,)})


def test_a_parameter_that_takes_the_name_of_one_that_is_gone_begins_anew() -> None:
    adam = opt.Adam()
    for _ in range(2):
        w = Tensor(data=np.ones(2), name="w", stores_grad=True)
        adam.apply("w", w, Tensor(data=np.ones(2)))
        np.testing.assert_allclose(adam.m["w"].data, 0.1)
        del w


def test_a_gradient_of_another_shape() -> None:
    w = Tensor(data=np.ones(2), name="w")
    with pytest.raises(InvalidInput, match=r"gradient of 'w' must have the parameter's shape .*, got \(3,\)"):
        opt.SGD().apply("w", w, Tensor(data=np.ones(3)))


# --- states


def trained(kind: Any, steps: int, states: Any = None) -> tuple[Any, dict[str, Any]]:
    optimizer = kind()
    ps = params()
    if states is not None:
        optimizer.set_states(states[0])
        for n, p in ps.items():
            p.data[...] = states[1][n]
    rng = np.random.default_rng(3)
    for t in range(STEPS):
        gs = {n: Tensor(data=rng.normal(size=p.shape)) for n, p in ps.items()}
        if (t < steps) == (states is None):
            for n, p in ps.items():
                optimizer.apply(n, p, gs[n])
            optimizer.step()
    return optimizer, {n: p.data for n, p in ps.items()}


KINDS = [
    lambda: opt.SGD(opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9), opt.Adam, opt.RMSProp, opt.AdaGrad, opt.SGD,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrays", [False, True])
def test_training_resumes_bit_for_bit(kind: Any, arrays: bool) -> None:
    whole, expected = trained(kind, STEPS)
    half, values = trained(kind, 3)
    states = {n: t.data if arrays else t for n, t in half.get_states().items()}
    again, found = trained(kind, 3, (states, values))
    assert all(np.array_equal(found[n], expected[n]) for n in SHAPES)
    assert all(np.array_equal(t.data, again.get_states()[n].data) for n, t in whole.get_states().items())
    assert again.lr_value.data == whole.lr_value.data


def test_names_of_states() -> None:
    adam, _ = trained(opt.Adam, 1)
    assert list(adam.get_states()) == ["step_counter", *(f"{k}.{n}" for k in "mv" for n in SHAPES)]
    sgd, _ = trained(lambda: opt.SGD(momentum=0.9), 1)
    assert set(sgd.get_states()) == {"step_counter", *(f"moments.{n}" for n in SHAPES)} and set(sgd.moments) == set(SHAPES)


def test_states_may_be_nested() -> None:
    sgd = opt.SGD(momentum=0.9)
    sgd.set_states({"step_counter": np.array([3]), "moments": {"w": np.ones(2)}})
    assert sgd.step_counter.data.tolist() == [3] and sgd.moments["w"].data.tolist() == [1, 1]


def test_states_of_another_model_or_optimizer() -> None:
    adam, _ = trained(opt.Adam, 1)
    states = adam.get_states()
    other = {n: t for n, t in states.items() if not n.endswith(".w")}
    before = {n: t.data.copy() for n, t in states.items()}
    with pytest.raises(InvalidInput, match=r"SGD has no state 'm\.w'"):
        opt.SGD(momentum=0.9).set_states(states)
    with pytest.raises(InvalidInput, match="missing: w"):
        adam.set_states(other)
    with pytest.raises(InvalidInput, match="unknown: q"):
        adam.set_states({**states, "v.q": np.ones(1), "m.q": np.ones(1)})
    with pytest.raises(InvalidInput, match=r"the state v.b must have shape .*, got \(6,\)"):
        adam.set_states({**states, "v.b": np.ones(6)})
    with pytest.raises(InvalidInput, match="step_counter must have one element"):
        adam.set_states({"step_counter": np.ones(2)})
    assert all(np.array_equal(before[n], t.data) for n, t in adam.get_states().items())


def test_loaded_states_are_checked_at_the_first_step() -> None:
    for states, message in (
        ({"moments.w": np.ones(3)}, "it belongs to another model"),
        ({"moments.q": np.ones(2)}, "got states of q"),
    ):
        w, sgd = Tensor(data=np.ones(2), name="w", stores_grad=True), opt.SGD(momentum=0.9)
        sgd.set_states(states)
        with pytest.raises(InvalidInput) as caught:
            sgd(loss_of(w))
        assert message in str(caught.value) and w.data.tolist() == [1, 1] and sgd.step_counter.data.tolist() == [0]


# --- as a part of a graph


class Net(Model):
    def __init__(self, optimizer: opt.Optimizer) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(4), layer.Linear(2)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.second(op.Tanh(self.first(x)))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        d = op.Sub(self.forward(x), t)
        loss: Tensor = op.ReduceMean(op.Mul(d, d), keepdims=0)
        self.optimizer(loss)
        return loss


def curve(kind: Any, graph: bool, change: float | None = None, dev: Device = default_device) -> list[float]:
    rng = np.random.default_rng(5)
    xs, ts = rng.normal(size=(10, 3, 5)).astype(np.float32), rng.normal(size=(10, 3, 2)).astype(np.float32)
    net = Net(kind())
    net.compile([Tensor(data=xs[0], device=dev)], is_train=True, use_graph=graph)
    net.set_params({n: rng.normal(size=p.shape) for n, p in net.get_params().items()})
    losses = []
    for i, (x, t) in enumerate(zip(xs, ts, strict=True)):
        if change is not None and i == 5:
            net.optimizer.lr = change
        losses.append(float(to_numpy(net(Tensor(data=x, device=dev), Tensor(data=t, device=dev)))))
    net.optimizer.set_states(net.optimizer.get_states())
    assert not net.not_traceable
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_has_the_numbers_of_the_tape(kind: Any) -> None:
    assert curve(kind, True) == curve(kind, False)


def test_a_rate_that_is_set_counts_in_the_graph() -> None:
    assert curve(opt.SGD, True, 0.01) == curve(opt.SGD, False, 0.01) != curve(opt.SGD, False)


@other_device.runs
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_another_device_has_the_same_numbers(kind: Any, graph: bool) -> None:
    other_device.same(curve(kind, graph, dev=Device(other_device.NAME)), curve(kind, graph))


# --- NaN


def test_nan_stops_and_is_located() -> None:
    w, sgd = Tensor(data=np.array([1.0, -1.0]), name="w", stores_grad=True), opt.SGD(check_nan=True)
    y = op.Log(op.Add(w, 0.0))
    with pytest.raises(InvalidInput) as caught:
        sgd(op.ReduceSum(op.Mul(op.Add(y, 1.0), y), keepdims=0))
    assert caught.value.code == "SX328" and "the first node that produced one is Log#" in str(caught.value)
    assert w.data.tolist() == [1, -1] and sgd.step_counter.data.tolist() == [0]


def test_nan_that_was_there_before() -> None:
    w, sgd = Tensor(data=np.array([np.nan]), name="w", stores_grad=True), opt.SGD(check_nan=True)
    with pytest.raises(InvalidInput, match="the tensor 'w' contained one before"):
        sgd(loss_of(w))
    v = Tensor(data=np.array([1.0]), name="v", stores_grad=True)
    with pytest.raises(InvalidInput, match=r"is Mul#\d+, with the inputs .*; an input without a gradient contained one before"):
        sgd(loss_of(v, np.nan))


def test_without_the_option_nan_passes() -> None:
    w = Tensor(data=np.array([np.nan]), name="w", stores_grad=True)
    opt.SGD()(loss_of(w))
    assert opt.first_nan(loss_of(w)) == "the tensor 'w' contained one before the step"
    assert opt.first_nan(loss_of(Tensor(data=np.ones(1), stores_grad=True))) == ""


def test_without_a_tape_there_is_a_clear_error() -> None:
    tape.training = False
    with pytest.raises(SonnxError, match="this tensor was not recorded: training mode was off"):
        opt.SGD()(loss_of(Tensor(data=np.ones(1), stores_grad=True)))


def test_hyperparameters_can_be_set() -> None:
    """v = 4, then 0.5 * 4 + 1; numbers that make no sense change nothing."""
    w = Tensor(data=np.array([1.0]), stores_grad=True, name="w")
    sgd = opt.SGD(lr=0.1, momentum=0.9)
    sgd.apply("w", w, Tensor(data=np.array([4.0])))
    sgd.momentum = 0.5
    sgd.apply("w", w, Tensor(data=np.array([1.0])))
    assert w.data[0] == pytest.approx(1 - 0.1 * 4 - 0.1 * 3)
    with pytest.raises(ValueError, match="must be at least 0"):
        sgd.momentum = -1
    assert sgd.momentum.init_value == 0.5
    with pytest.raises(ValueError, match="created without momentum"):
        opt.SGD(lr=0.1).momentum = 0.9
    with pytest.raises(TypeError, match="a number or a DecayScheduler"):
        sgd.weight_decay = "1e-4"
