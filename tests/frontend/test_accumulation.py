"""Gradient accumulation against one large batch, and against gradient descent in NumPy with float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from singa import autograd, layer, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa.cli import main
from singa.model import Model
from singa_backend.errors import InvalidInput

F = np.float32
RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(27, 6)).astype(F), RNG.integers(0, 4, 27)
graphs = pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])
RULES: dict[str, Callable[[], opt.Optimizer]] = {
    "sgd": lambda: opt.SGD(opt.CosineDecay(0.1, 20), momentum=0.9, weight_decay=1e-3),
    "adam": lambda: opt.Adam(0.01),
    "adamw": lambda: opt.AdamW(0.01),
    "rmsprop": lambda: opt.RMSProp(0.01),
    "adagrad": lambda: opt.AdaGrad(0.1),
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tape.training = False
    yield
    tape.training = False


class Net(Model):
    def __init__(self, rule: Any, norm: bool = False) -> None:
        super().__init__()
        self.a, self.norm, self.b = layer.Linear(16), layer.BatchNorm2d() if norm else None, layer.Linear(4)
        self.optimizer = rule

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(autograd.relu(self.norm(y) if self.norm else y))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss


def made(rule: opt.Optimizer, steps: int = 1, graph: bool = False, norm: bool = False, **options: Any) -> Net:
    rule.accumulate_gradients(steps)
    net = Net(rule, norm)
    net.compile([Tensor(data=X[:4])], use_graph=graph, **options)
    rng = np.random.default_rng(1)
    net.set_params({n: rng.normal(size=p.shape).astype(F) * F(0.4) for n, p in net.get_params().items()})
    return net


def values(net: Model) -> dict[str, np.ndarray]:
    return {n: np.array(t.data) for n, t in net.get_states().items()}


def furthest(a: Model, b: Model) -> float:
    there = values(b)
    return max(float(np.abs(v - there[n]).max()) for n, v in values(a).items())


@graphs
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_equal_the_large_batch(rule: str, clip: float | None, graph: bool) -> None:
    """27 samples in batches of 4: an epoch ends in an incomplete group, whose last batch is smaller."""
    whole, parts = made(RULES[rule](), graph=graph), made(RULES[rule](), 4, graph)
    for net in (whole, parts):
        net.optimizer.clip_gradients(norm=clip)
    losses = [
        whole.fit(X, LABELS, epochs=3, batch_size=16, seed=5).losses,
        parts.fit(X, LABELS, epochs=3, batch_size=4, seed=5).losses,
    ]
    assert len(losses[0]) == len(losses[1]) == 6 == int(parts.optimizer.step_counter)
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-6)
    assert furthest(whole, parts) < 1e-6
    assert float(parts.optimizer.lr_value) == float(whole.optimizer.lr_value)  # schedules count updates
    assert parts.not_traceable == "" and parts.optimizer.accumulated == 0


def test_the_mean_of_gradients_is_that_of_numpy() -> None:
    class Line(Net):
        def forward(self, x: Tensor) -> Any:
            return self.a(x)

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = autograd.mse_loss(self.forward(x), y)
            self.optimizer(loss)
            return loss

    net = Line(opt.SGD(0.1))
    net.optimizer.accumulate_gradients(3)
    net.compile([Tensor(data=X[:4])], use_graph=True)
    w, b = (np.asarray(net.get_params()[n].data, np.float64) for n in ("a.W", "a.b"))
    t = RNG.normal(size=(27, 16)).astype(F)
    net.fit([(X[i : i + 5], t[i : i + 5]) for i in range(0, 27, 5)], epochs=2)  # groups of 15 and 12 samples
    for first, last in [(0, 15), (15, 27)] * 2:
        d = X[first:last] @ w + b - t[first:last]
        w, b = w - 0.1 * 2 * X[first:last].T.astype(np.float64) @ d / d.size, b - 0.1 * 2 * d.sum(0) / d.size
    np.testing.assert_allclose(net.get_params()["a.W"].data, w, atol=1e-6)
    np.testing.assert_allclose(net.get_params()["a.b"].data, b, atol=1e-6)


@graphs
def test_a_loop_by_hand_updates_after_each_group(graph: bool) -> None:
    net = made(opt.SGD(0.1), 2, graph)
    x, t = Tensor(data=X[:4]), Tensor(data=LABELS[:4])
    changed = []
    for _ in range(6):
        before = values(net)
        net(x, t)
        changed.append(any(not np.array_equal(v, before[n]) for n, v in values(net).items()))
    assert changed == [False, True] * 3
    net(x, t)
    before = values(net)
    assert net.optimizer.accumulated == 1 and net.optimizer.flush() and not net.optimizer.flush()
    assert any(not np.array_equal(v, before[n]) for n, v in values(net).items())
    net(x, t)
    net.optimizer.discard_gradients()
    again = made(opt.SGD(0.1), 2, graph)
    again.set_states(net.get_states())
    for model in (net, again):
        model(x, t)
        model(x, t)
    assert furthest(net, again) < 1e-7


def test_a_model_has_one_graph_for_the_batches_and_one_for_the_updates() -> None:
    net = made(opt.AdamW(0.01), 4, graph=True)
    net.fit(X[:24], LABELS[:24], epochs=4, batch_size=4)
    assert [len(s) for s in net._steps.values()] == [1]
    assert [len(s) for s in net.optimizer._sums._updates.values()] == [1]  # also for the group of two
    net.optimizer.beta_1 = 0.8
    net.fit(X[:24], LABELS[:24], batch_size=4)
    assert [len(s) for s in net._steps.values()] == [1] and [len(s) for s in net.optimizer._sums._updates.values()] == [2]


def test_statistics_follow_each_micro_batch() -> None:
    once, parts = made(opt.SGD(0.0), norm=True), made(opt.SGD(0.0), 3, norm=True, graph=True)
    for net in (once, parts):
        net.fit(X, LABELS, batch_size=4, seed=2)
    assert furthest(once, parts) < 1e-6


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"activation_memory": 1 << 20}, {"deterministic": True}], ids=str)
def test_options_of_recorded_steps(options: dict[str, Any]) -> None:
    whole, parts = made(opt.SGD(0.1), graph=True, **options), made(opt.SGD(0.1), 4, graph=True, **options)
    whole.fit(X, LABELS, epochs=2, batch_size=16)
    parts.fit(X, LABELS, epochs=2, batch_size=4)
    assert furthest(whole, parts) < (1e-3 if "precision" in options else 1e-6)


@graphs
def test_frozen_parameters_stay(graph: bool) -> None:
    whole, parts = made(opt.AdamW(0.01), graph=graph), made(opt.AdamW(0.01), 4, graph)
    for net, size in ((whole, 16), (parts, 4)):
        net.freeze("a.*")
        net.fit(X, LABELS, batch_size=size)
        net.unfreeze("a.*")
        net.fit(X, LABELS, batch_size=size)
    assert furthest(whole, parts) < 1e-6


def test_half_precision_adds_in_float32() -> None:
    net = made(opt.SGD(0.1), 2)
    net.to(dtype="float16")
    net(Tensor(data=X[:4].astype(np.float16)), Tensor(data=LABELS[:4]))
    assert {t.data.dtype for t in net.optimizer._sums.tensors()} == {np.dtype(F)}


@graphs
def test_states_between_two_updates_continue_to_the_bit(graph: bool) -> None:
    batches = [(Tensor(data=X[i : i + 4]), Tensor(data=LABELS[i : i + 4])) for i in range(0, 24, 4)]
    whole = made(opt.Adam(0.01), 3, graph)
    for batch in batches[:4]:
        whole(*batch)
    states, rule = values(whole), {n: np.array(t.data) for n, t in whole.optimizer.get_states().items()}
    assert "gradient_counts" in rule and "gradient_sum.a.W" in rule
    resumed = made(opt.Adam(0.01), 3, graph)
    resumed.set_states(states)
    resumed.optimizer.set_states(rule)
    copied = copy.deepcopy(whole)
    for net in (whole, resumed, copied):
        net.train()
        for batch in batches[4:]:
            net(*batch)
    assert furthest(whole, resumed) == 0 == furthest(whole, copied)
    assert "gradient_counts" not in whole.optimizer.get_states()


def test_two_optimizers_of_a_step() -> None:
    class Both(Net):
        def __init__(self) -> None:
            super().__init__(opt.SGD(0.1))
            self.other = opt.SGD(0.1)

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = autograd.softmax_cross_entropy(self.forward(x), y)
            self.optimizer(loss)
            self.other(autograd.softmax_cross_entropy(self.forward(x), y))
            return loss

    found = []
    for steps, size in ((1, 16), (4, 4)):
        net = Both()
        net.optimizer.accumulate_gradients(steps)
        net.other.accumulate_gradients(steps)
        net.compile([Tensor(data=X[:4])], use_graph=True)
        rng = np.random.default_rng(1)
        net.set_params({n: rng.normal(size=p.shape).astype(F) for n, p in net.get_params().items()})
        assert len(net.fit(X, LABELS, batch_size=size).losses) == 2
        found.append((net, int(net.other.step_counter)))
    assert [n for _, n in found] == [2, 2]


def test_one_optimizer_that_is_called_twice_stays_on_the_tape() -> None:
    class Twice(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            for _ in range(2):
                loss = autograd.softmax_cross_entropy(self.forward(x), y)
                self.optimizer(loss)
            return loss

    net = Twice(opt.SGD(0.1))
    net.optimizer.accumulate_gradients(3)
    net.compile([Tensor(data=X[:4])], use_graph=True)
    with pytest.warns(UserWarning, match="called twice in a step"):
        for _ in range(3):
            net(Tensor(data=X[:4]), Tensor(data=LABELS[:4]))
    assert int(net.optimizer.step_counter) == 2 and net.optimizer.accumulated == 0


def test_an_error_in_a_group_leaves_no_gradients() -> None:
    net = made(opt.SGD(0.1), 3)
    before = values(net)
    with pytest.raises(InvalidInput):
        net.fit([(X[:4], LABELS[:4]), (X[:4], "x")])
    assert net.optimizer.accumulated == 0
    net.fit([(X[:4], LABELS[:4])])
    one = made(opt.SGD(0.1))
    one.fit([(X[:4], LABELS[:4])])
    assert furthest(net, one) == 0 and any(not np.array_equal(v, before[n]) for n, v in values(net).items())


def test_profiles_change_nothing() -> None:
    net = made(opt.SGD(0.1, momentum=0.9), 4, graph=True)
    x, t = Tensor(data=X[:4]), Tensor(data=LABELS[:4])
    for _ in range(5):
        net(x, t)
    before, rule = values(net), {n: np.array(v.data) for n, v in net.optimizer.get_states().items()}
    net.profile_step(x, t, runs=2)
    assert all(np.array_equal(v, before[n]) for n, v in values(net).items())
    assert net.optimizer.accumulated == 1
    assert all(np.array_equal(np.asarray(v.data), rule[n]) for n, v in net.optimizer.get_states().items())


def refused(steps: int) -> Net:
    return made(opt.SGD(0.1), steps)


CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "zero": (lambda: refused(0), "SX342", "steps must be an integer of at least 1, got 0"),
    "fraction": (lambda: opt.Adam().accumulate_gradients(1.5), "SX342", "got 1.5"),  # type: ignore[arg-type]
    "apply": (lambda: applied(refused(2)), "SX329", "must come from a call of the optimizer"),
    "call": (lambda: called(refused(2)), "SX329", "got a call of SGD.call"),
    "export": (
        lambda: sonnx.to_training_onnx(refused(2), optimizer=refused(2).optimizer), "SX322", "the gradients of 2 steps",
    ),
    "counts": (lambda: refused(2).optimizer.set_states({"gradient_counts": np.ones(2)}), "SX327", "three numbers"),
    "no counts": (lambda: refused(2).optimizer.set_states({"gradient_sum.a.W": np.ones(2)}), "SX327", "gradient_counts must"),
    "integers": (
        lambda: opt.SGD().set_states({"gradient_counts": np.ones(3), "gradient_sum.a.W": np.ones(2, int)}), "SX327", "floats",
    ),
    "loaded": (lambda: loaded().flush(), "SX327", "got loaded ones"),
}  # fmt: skip


def applied(net: Net) -> None:
    p = net.get_params()["a.W"]
    net.optimizer.apply("a.W", p, p)


def called(net: Net) -> None:
    with net._in_mode(True):
        net.optimizer.call(autograd.softmax_cross_entropy(net.forward(Tensor(data=X[:4])), Tensor(data=LABELS[:4])))


def loaded() -> opt.SGD:
    rule = opt.SGD(0.1)
    rule.accumulate_gradients(2)
    rule.set_states({"gradient_counts": np.array([1, 4, 1.0]), "gradient_sum.a.W": np.ones((6, 16), F)})
    return rule


@pytest.mark.parametrize("case", CASES)
def test_errors(case: str) -> None:
    call, code, text = CASES[case]
    with pytest.raises(InvalidInput) as error:
        call()
    assert error.value.code == code and text in error.value.message


# --- sonnx train --accumulate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 4] y)
        { h = MatMul(x, w1) r = Tanh(h) d = Dropout(r, ratio, training) y = MatMul(d, w2) }"""
    model = parser.parse_model(text)
    rng = np.random.default_rng(3)
    weights = {"w1": rng.normal(size=(6, 8)), "w2": rng.normal(size=(8, 4)), "ratio": np.float32(0.0)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, F), n) for n, a in weights.items())
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=X, y=LABELS)
    return tmp_path


def train(folder: Path, *more: str, code: int = 0) -> Any:
    fixed = ["train", str(folder / "m.onnx"), "--data", str(folder / "data.npz"), "--json", "--optimizer", "adamw"]
    done = CliRunner().invoke(main, [*fixed, *more])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if not code else done


def weights(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def test_the_command_equals_the_large_batch(folder: Path) -> None:
    common = ("--epochs", "3", "--schedule", "cosine", "--warmup", "2", "--clip-norm", "0.5")
    one = train(folder, *common, "--batch-size", "16", "-o", str(folder / "one.onnx"))
    four = train(folder, *common, "--batch-size", "4", "--accumulate", "4", "-o", str(folder / "four.onnx"))
    np.testing.assert_allclose(four["losses"], one["losses"], atol=1e-6)
    a, b = weights(folder / "one.onnx"), weights(folder / "four.onnx")
    assert all(np.allclose(a[n], b[n], atol=1e-5) for n in a)


@pytest.mark.parametrize("every", ["1", "3"])
def test_a_resumed_training_is_equal_to_the_bit(every: str, folder: Path) -> None:
    """A checkpoint is written at updates only, so that it holds no sums; the rest continues from it."""
    common = ("--batch-size", "4", "--accumulate", "3", "--checkpoint", str(folder / "c"), "--every", every)
    whole = train(folder, *common, "--epochs", "4", "-o", str(folder / "whole.onnx"))
    (folder / "c").unlink()
    train(folder, *common, "--epochs", "2")
    resumed = train(folder, *common, "--epochs", "4", "--resume", "-o", str(folder / "resumed.onnx"))
    assert whole["losses"] == resumed["losses"] and len(whole["losses"]) == 4 * 3
    assert (folder / "whole.onnx").read_bytes() == (folder / "resumed.onnx").read_bytes()
    done = train(folder, *common[:2], *common[4:], "--resume", code=3)
    assert "--accumulate was 3, got 1" in done.output
