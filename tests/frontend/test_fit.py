"""`Model.fit`, `evaluate` and `predict`, and `data.ArrayLoader`, against loops written in NumPy."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser
from tests.helpers import other_device

from singa import autograd, data, layer, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor, to_numpy
from singa.cli import main
from singa.device import Device, default_device
from singa.model import Model
from singa_backend.errors import DeviceUnavailable, InvalidInput

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 3)).astype(np.float32)
Y = RNG.normal(size=(10, 2)).astype(np.float32)
LABELS = np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 1])
LR = 0.1


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tape.training = False
    yield
    tape.training = False


class Net(Model):
    """A regression: y = x W + b, dropped out in training."""

    def __init__(self, optimizer: Any = None, ratio: float = 0.0) -> None:
        super().__init__()
        self.fc = layer.Linear(2)
        self.optimizer = optimizer or opt.SGD(LR)
        self.ratio = ratio

    def forward(self, x: Tensor) -> Any:
        return autograd.dropout(self.fc(x), ratio=self.ratio) if self.ratio else self.fc(x)

    def loss(self, out: Tensor, y: Tensor) -> Any:
        return autograd.mse_loss(out, y)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


class Classes(Net):
    def loss(self, out: Tensor, y: Tensor) -> Any:
        return autograd.softmax_cross_entropy(out, y)


def made(kind: type[Net] = Net, graph: bool = False, **kwargs: Any) -> Net:
    net = kind(**kwargs)
    net.compile([Tensor(data=X[:4])], is_train=False, use_graph=graph)
    net.set_params({"fc.W": np.full((3, 2), 0.5, np.float32), "fc.b": np.ones(2, np.float32)})
    return net


def file() -> ModelProto:
    text = """<ir_version: 9, opset_import: ["": 20]>
        g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] W = {0.5, 0.5, 0.5, 0.5, 0.5, 0.5}, float[2] b = {1, 1}>
        { h = MatMul(x, W) y = Add(h, b) }"""
    return parser.parse_model(text)


class Loaded(sonnx.SONNXModel):
    def __init__(self, **_: Any) -> None:
        super().__init__(file())
        self.optimizer = opt.SGD(LR)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        (out,) = self.forward(x)
        loss = autograd.mse_loss(out, y)
        self.optimizer(loss)
        return out, loss


def by_hand(orders: list[np.ndarray], batch_size: int) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """The parameters and the losses of gradient descent, in float64."""
    w, b, losses = np.full((3, 2), 0.5), np.ones(2), []
    for order in orders:
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            x, y = X[rows].astype(np.float64), Y[rows].astype(np.float64)
            d = x @ w + b - y
            losses.append(float((d**2).mean()))
            w, b = w - LR * 2 * x.T @ d / d.size, b - LR * 2 * d.sum(0) / d.size
    return w, b, losses


def orders(epochs: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(len(X)) for _ in range(epochs)]


# --- fit


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_fit_is_gradient_descent_over_shuffled_batches(graph: bool, loaded: bool) -> None:
    net: Any = Loaded() if loaded else made()
    net.graph(graph)
    history = net.fit(X, Y, epochs=3, batch_size=4, seed=5)
    w, b, losses = by_hand(orders(3, 5), 4)
    found = [to_numpy(t) for t in net.get_params().values()]
    np.testing.assert_allclose(found[0], w, rtol=1e-5)
    np.testing.assert_allclose(found[1], b, rtol=1e-5)
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)
    sizes = [min(4, len(X) - first) for first in range(0, len(X), 4)]
    assert len(sizes) == 3 and len(set(sizes)) == 2
    np.testing.assert_allclose(history.epochs, np.reshape(losses, (3, 3)) @ sizes / len(X), rtol=1e-5)
    assert history.weights == sizes * 3
    assert net.history is history and not history.validation and net.not_traceable == ""


def test_forms_of_data_are_equal() -> None:
    loader = data.ArrayLoader(X, Y, batch_size=4)
    forms: list[tuple[Any, ...]] = [
        (loader,),
        ([(X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8)],),
        ([(Tensor(data=X[i : i + 4]), Tensor(data=Y[i : i + 4])) for i in (0, 4, 8)],),
    ]
    found = [made().fit(*form, epochs=2).losses for form in forms]
    np.testing.assert_allclose(found[0], by_hand([np.arange(10)] * 2, 4)[2], rtol=1e-5)
    assert found[1] == found[0] and found[2] == found[0]
    assert made().fit((X, Y), epochs=2, seed=1).losses == made().fit(X, Y, epochs=2, seed=1).losses


def test_the_modes_are_restored() -> None:
    for mode in (False, True):
        net = made()
        net.train(mode)
        net.fit(X, Y, validation=(X, Y))
        net.evaluate(X, Y)
        net.predict(X)
        assert net.training is mode and tape.training is mode


def test_validation_metrics_callbacks_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    net, seen = made(), []
    history = net.fit(
        X, Y, epochs=4, validation=(X, Y), metrics={"worst": lambda y, t: abs(y - t).max()}, verbose=True,
        callbacks=[lambda h: seen.append(len(h.validation)), lambda h: len(h.epochs) == 3],
    )  # fmt: skip
    assert seen == [1, 2, 3] and [sorted(v) for v in history.validation] == [["loss", "worst"]] * 3
    assert capsys.readouterr().out.splitlines()[0].startswith("epoch 1/4: loss ")


def test_patience_restores_the_best_epoch() -> None:
    """The validation targets move away from what is learned, so that the first epoch is the best."""
    net = made()
    states = []
    history = net.fit(X, X[:, :2] * 0 + 9, epochs=9, validation=(X, X[:, :2] * 0 - 9), patience=2,
                      callbacks=[lambda _: states.append(to_numpy(net.fc.W).copy())])  # fmt: skip
    losses = [v["loss"] for v in history.validation]
    assert len(losses) == 3 and losses == sorted(losses)
    np.testing.assert_array_equal(to_numpy(net.fc.W), states[0])


def test_an_interrupt_completes_the_step_and_keeps_the_history() -> None:
    net = made()
    step, count = net.train_one_batch, []

    def interrupted(x: Tensor, y: Tensor) -> Any:
        count.append(1)
        if len(count) == 4:
            signal.raise_signal(signal.SIGINT)
        return step(x, y)

    net.train_one_batch = interrupted  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        net.fit(X, Y, epochs=3, batch_size=4, seed=5)
    losses = by_hand(orders(2, 5), 4)[2]
    assert net.history is not None and signal.getsignal(signal.SIGINT) is before
    np.testing.assert_allclose(net.history.losses, losses[:4], rtol=1e-5)
    assert len(net.history.epochs) == 1


# --- evaluate and predict


@pytest.mark.parametrize("graph", [False, True])
def test_evaluate_changes_nothing(graph: bool) -> None:
    rule = opt.Adam(opt.ExponentialDecay(0.1, 2, 0.5))
    net = made(graph=graph, optimizer=rule)
    net.fit(X, Y, epochs=2)
    before = {n: to_numpy(t).copy() for n, t in {**net.get_states(), **rule.get_states(), "lr": rule.lr_value}.items()}
    found = net.evaluate(X, Y, batch_size=3)
    after = {**net.get_states(), **rule.get_states(), "lr": rule.lr_value}
    for name, was in before.items():
        np.testing.assert_array_equal(to_numpy(after[name]), was, name)
    d = X @ before["fc.W"] + before["fc.b"] - Y
    assert list(found) == ["loss"] and found["loss"] == pytest.approx((d**2).mean(), rel=1e-5)


def updates() -> dict[str, Any]:
    """Every way in which a step may update parameters."""

    def by_hand(o: Any, loss: Tensor) -> None:
        for p, g in autograd.backward(loss):
            o.apply(p.name, p, g)
        o.step()

    def written(o: Any, loss: Tensor) -> None:
        for p, g in autograd.backward(loss):
            p -= g

    sgd, dist = opt.SGD, lambda: opt.DistOpt(opt.SGD(0.1))
    return {
        "call": (sgd, lambda o, loss: o(loss)),
        "backward_and_update": (sgd, lambda o, loss: o.backward_and_update(loss)),
        "check_nan": (lambda: opt.SGD(0.1, check_nan=True), lambda o, loss: o(loss)),
        "by_hand": (sgd, by_hand),
        "written": (sgd, written),
        "dist": (dist, lambda o, loss: o(loss)),
        "half": (dist, lambda o, loss: o.backward_and_update_half(loss)),
        "partial": (dist, lambda o, loss: o.backward_and_partial_update(loss)),
        "sparse": (dist, lambda o, loss: o.backward_and_sparse_update(loss)),
    }


@pytest.mark.parametrize("way", updates())
def test_no_way_to_update_updates_in_evaluation(way: str) -> None:
    create, update = updates()[way]

    class Own(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = autograd.mse_loss(self.forward(x), y)
            update(self.optimizer, loss)
            return loss

    net: Any = made(Own, optimizer=create())
    kept = to_numpy(net.fc.W).copy()
    first = net.evaluate(X, Y)
    np.testing.assert_array_equal(to_numpy(net.fc.W), kept)
    assert not net.optimizer.step_counter.data.any()
    history = net.fit(X, Y, batch_size=10)
    assert history.losses[0] == pytest.approx(first["loss"], rel=1e-5)
    assert (to_numpy(net.fc.W) != kept).any()


def test_accuracy_of_class_numbers() -> None:
    net = made(Classes)
    net.set_params({"fc.W": RNG.normal(size=(3, 2)).astype(np.float32)})
    scores = net.predict(X)
    found = net.evaluate(X, LABELS, batch_size=3)
    p = np.exp(scores - scores.max(1, keepdims=True))
    expected = -np.log((p / p.sum(1, keepdims=True))[np.arange(10), LABELS]).mean()
    assert found == {"loss": pytest.approx(expected, rel=1e-5), "accuracy": (scores.argmax(1) == LABELS).mean()}


@pytest.mark.parametrize("loaded", [False, True])
def test_predict_is_in_order_and_without_dropout(loaded: bool) -> None:
    net: Any = Loaded() if loaded else made(ratio=0.5)
    expected = X @ np.full((3, 2), 0.5) + 1
    loader = data.ArrayLoader(X, Y, batch_size=4, shuffle=True, drop_last=True)
    state = loader.state_dict()
    for got in (net.predict(X, batch_size=3), net.predict(loader), net.predict([(X[:4], Y[:4]), (X[4:], Y[4:])])):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert loader.state_dict() == state


def test_predict_of_several_inputs_and_outputs() -> None:
    class Two(Model):
        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Any:
            return a + b, a * b

    for got in (Two().predict(X, X + 1, batch_size=4), Two().predict(data.ArrayLoader(X, X + 1, Y))):
        np.testing.assert_allclose(got[0], X + (X + 1))
        np.testing.assert_allclose(got[1], X * (X + 1))


# --- ArrayLoader


def rows(loader: data.ArrayLoader, most: int = 99) -> list[list[int]]:
    found = []
    for _, (i,) in zip(range(most), loader, strict=False):
        found.append(i.data.tolist())
    return found


def test_batches_of_a_loader() -> None:
    a, b = np.arange(10), np.arange(20.0).reshape(10, 2)
    loader = data.ArrayLoader(a, b, batch_size=4)
    assert len(loader) == 3 and [x.data.tolist() for x, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [y.data.dtype for _, y in loader] == [np.float64] * 3
    loader = data.ArrayLoader(a, batch_size=4, drop_last=True)
    assert len(loader) == 2 and rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_orders_follow_the_seed() -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        loader = data.ArrayLoader(np.arange(10), batch_size=4, shuffle=True, seed=seed)
        return [rows(loader), rows(loader)]

    one = epochs(1)
    assert one == epochs(1) != epochs(2) and one[0] != one[1]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(10)) for epoch in one)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("done", range(9))
def test_a_loader_continues_anywhere(done: int, shuffle: bool) -> None:
    """The state after any number of batches, through JSON."""

    def new() -> data.ArrayLoader:
        return data.ArrayLoader(np.arange(10), batch_size=4, shuffle=shuffle, seed=3)

    def epoch(loader: data.ArrayLoader, found: list[Any], most: int) -> None:
        for (i,) in loader:
            found.append(i.data.tolist())
            if len(found) == most:
                return

    whole: list[Any] = []
    loader = new()
    while len(whole) < 9:
        epoch(loader, whole, 9)
    first: list[Any] = []
    loader = new()
    while len(first) < done:
        epoch(loader, first, done)
    state = json.loads(json.dumps(loader.state_dict()))
    loader = new()
    loader.load_state_dict(state)
    while len(first) < 9:
        epoch(loader, first, 9)
    assert first == whole


def test_a_loop_that_was_left_begins_again() -> None:
    loader = data.ArrayLoader(np.arange(4), batch_size=2)
    assert rows(loader, 1) and rows(loader) == [[0, 1], [2, 3]]
    a, b = iter(loader), iter(loader)
    assert [next(a)[0].data.tolist(), next(b)[0].data.tolist(), next(a)[0].data.tolist()] == [[0, 1], [0, 1], [2, 3]]


def test_fit_continues_a_loader() -> None:
    whole = made().fit(data.ArrayLoader(X, Y, batch_size=4, shuffle=True, seed=2), epochs=2).losses
    net, loader = made(), data.ArrayLoader(X, Y, batch_size=4, shuffle=True, seed=2)
    net.train()
    first = []
    for batch in loader:
        first.append(float(net(*batch)[1]))
        if len(first) == 2:
            break
    again = data.ArrayLoader(X, Y, batch_size=4, shuffle=True)
    again.load_state_dict(loader.state_dict())
    assert first + net.fit(again, epochs=2).losses == whole


# --- errors


class NoLoss(Net):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        return self.forward(x)


CASES: dict[str, tuple[Any, str, str]] = {
    "lengths": (lambda: data.ArrayLoader(X, Y[:9]), "SX342", "10, 9"),
    "none": (lambda: data.ArrayLoader(), "SX342", "no array"),
    "empty": (lambda: data.ArrayLoader(X[:0]), "SX342", "at least 1, got arrays with 0"),
    "zero": (lambda: data.ArrayLoader(X, batch_size=0), "SX342", "batch_size must be an integer of at least 1, got 0"),
    "fraction": (lambda: data.ArrayLoader(X, batch_size=1.5), "SX342", "got 1.5"),  # type: ignore[arg-type]
    "bool": (lambda: data.ArrayLoader(X, batch_size=True), "SX342", "got True"),
    "drop all": (lambda: data.ArrayLoader(X, batch_size=11, drop_last=True), "SX342", "at most 10"),
    "no axis": (lambda: data.ArrayLoader(np.float32(1)), "SX342", "axis 0"),
    "objects": (lambda: data.ArrayLoader(np.array([None, {}])), "SX342", "dtype of ONNX"),
    "ragged": (lambda: data.ArrayLoader([[1], [1, 2]]), "SX342", "must be an array"),
    "state": (lambda: data.ArrayLoader(X).load_state_dict({"batch": 1}), "SX342", "KeyError"),
    "other state": (
        lambda: data.ArrayLoader(X).load_state_dict(data.ArrayLoader(X[:9]).state_dict()), "SX342", "samples 9",
    ),
    "state between batches": (
        lambda: data.ArrayLoader(X).load_state_dict({**data.ArrayLoader(X).state_dict(), "batch": 0.5}), "SX342", "TypeError",
    ),
    "seed of a loader": (lambda: data.ArrayLoader(X, seed=-1), "SX342", "seed must be an integer of at least 0, got -1"),
    "seed": (lambda: made().fit(X, Y, seed=1.5), "SX342", "got 1.5"),
    "no callback": (lambda: made().fit(X, Y, callbacks=[3]), "SX342", "or objects with on_step or on_epoch, got [3]"),
    "a callback": (lambda: made().fit(X, Y, callbacks=print), "SX342", "callbacks must be a list of functions"),
    "metrics": (lambda: made().fit(X, Y, metrics=[len]), "SX342", "metrics must be a dict of functions by name"),
    "a metric": (lambda: made().evaluate(X, Y, metrics={"n": 3}), "SX342", "metrics must be a dict of functions by name"),
    "a second loss": (lambda: made().evaluate(X, Y, metrics={"loss": lambda y, t: 0}), "SX342", "another name than the loss"),
    "several numbers": (lambda: made().evaluate(X, Y, metrics={"e": lambda y, t: y == t}), "SX342", "an array of shape (10, 2)"),
    "epochs": (lambda: made().fit(X, Y, epochs=0), "SX342", "epochs"),
    "patience": (lambda: made().fit(X, Y, patience=2), "SX342", "validation"),
    "generator": (lambda: made().fit(((x, y) for x, y in [(X, Y)]), epochs=2), "SX342", "data must be iterable 2 times"),
    "not data": (lambda: made().fit(3), "SX342", "a int"),
    "not a batch": (lambda: made().fit([X, Y]), "SX342", "a ndarray"),
    "batch_size": (lambda: made().fit(data.ArrayLoader(X, Y), batch_size=2), "SX342", "batch_size"),
    "no loss": (lambda: made(NoLoss).fit(X, Y), "SX387", "a loss of shape"),
    "no loss to evaluate": (lambda: made(NoLoss).evaluate(X, Y), "SX387", "a loss of shape"),
    "NaN": (lambda: made().fit(X * np.nan, Y), "SX343", "nan"),
    "infinity": (lambda: made().fit(X * np.inf, Y), "SX343", "nan"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_errors(case: str) -> None:
    call, code, text = CASES[case]
    with pytest.raises(InvalidInput) as error:
        call()
    assert error.value.code == code and text in error.value.message
    assert ("the data hold NaN" in (error.value.hint or "")) == (case == "NaN")


def test_a_device_of_a_loader_is_checked_at_once() -> None:
    with pytest.raises(DeviceUnavailable):
        data.ArrayLoader(X, device="ZZ")


def test_only_true_of_a_callback_ends_a_training() -> None:
    assert len(made().fit(X, Y, epochs=3, callbacks=[lambda h: h.losses[-1], lambda h: X]).epochs) == 3
    assert len(made().fit(X, Y, epochs=3, callbacks=[lambda h: np.float32(1) > 0]).epochs) == 1


@pytest.mark.parametrize("check", [False, True])
def test_the_parameters_after_a_nan_are_those_that_the_page_describes(check: bool) -> None:
    net = made()
    net.optimizer = opt.SGD(LR, check_nan=check)
    with pytest.raises(InvalidInput) as error:
        net.fit([(X, Y), (X * np.nan, Y)])
    assert error.value.code == ("SX328" if check else "SX343")
    assert all(np.isfinite(to_numpy(p)).all() for p in net.get_params().values()) == check


def test_outputs_that_cannot_be_joined() -> None:
    class Sums(Net):
        def forward(self, x: Tensor) -> Any:
            return autograd.reduce_sum(x, None, 1)

    net = Sums()
    assert net.predict(X, batch_size=10).shape == (1, 1)
    with pytest.raises(InvalidInput, match="along axis 0") as error:
        net.predict(X, batch_size=4)
    assert error.value.code == "SX387"
    with pytest.raises(NotImplementedError, match="train_one_batch"):
        sonnx.SONNXModel(file()).fit(X, Y)


# --- sonnx train


def trained(tmp_path: Path, *more: str) -> Any:
    onnx.save(file(), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    names = [str(tmp_path / n) for n in ("m.onnx", "data.npz", "o.onnx")]
    fixed = ["train", names[0], "--data", names[1], "-o", names[2], "--loss", "mse_loss", "--batch-size", "4", "--epochs", "3"]
    return CliRunner().invoke(main, [*fixed, *more])


def test_the_command_has_adamw_a_cosine_a_warm_up_and_clipping(tmp_path: Path) -> None:
    done = trained(tmp_path, "--optimizer", "adamw", "--lr", "0.1", "--schedule", "cosine", "--warmup", "3", "--clip-norm", "0.4")
    assert done.exit_code == 0, done.output
    p = [np.full((3, 2), 0.5), np.ones(2)]
    m, v, t = [np.zeros_like(a) for a in p], [np.zeros_like(a) for a in p], 0
    for order in orders(3, 0):
        for rows in np.split(order, [4, 8]):
            d = X[rows] @ p[0] + p[1] - Y[rows]
            gs = [2 * X[rows].T @ d / d.size, 2 * d.sum(0) / d.size]
            norm = np.sqrt(sum((g**2).sum() for g in gs))
            gs = [g * min(1.0, 0.4 / (norm + 1e-6)) for g in gs]
            lr = 0.1 * (t / 3 if t < 3 else (1 + np.cos(np.pi * (t - 3) / 6)) / 2)
            t += 1
            for i, g in enumerate(gs):
                m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g**2
                decayed = p[i] - lr * 0.01 * p[i]
                p[i] = decayed - lr * (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8)
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "o.onnx").graph.initializer}
    np.testing.assert_allclose(found["W"], p[0], rtol=1e-4)
    np.testing.assert_allclose(found["b"], p[1], rtol=1e-4)


def test_a_warm_up_of_all_steps_is_refused(tmp_path: Path) -> None:
    done = trained(tmp_path, "--warmup", "9")
    assert done.exit_code == 2 and "below the number of steps, 9" in done.output and not (tmp_path / "o.onnx").exists()


def test_a_checkpoint_refuses_another_precision_and_the_tape_has_none(tmp_path: Path) -> None:
    kept = str(tmp_path / "run.ckpt")
    assert trained(tmp_path, "--checkpoint", kept, "--precision", "bf16").exit_code == 0
    done = trained(tmp_path, "--checkpoint", kept, "--resume")
    assert done.exit_code == 3 and "--precision was bf16, got float32" in done.output
    assert trained(tmp_path, "--checkpoint", kept, "--resume", "--precision", "bf16").exit_code == 0
    done = trained(tmp_path, "--precision", "bf16", "--no-graph")
    assert done.exit_code == 2 and "no effect with --no-graph" in done.output


def test_a_checkpoint_refuses_another_schedule(tmp_path: Path) -> None:
    kept = str(tmp_path / "run.ckpt")
    assert trained(tmp_path, "--checkpoint", kept, "--clip-norm", "1").exit_code == 0
    done = trained(tmp_path, "--checkpoint", kept, "--resume", "--schedule", "cosine")
    assert done.exit_code == 3 and "SX381" in done.output
    assert "--schedule was constant, got cosine" in done.output and "--clip-norm was 1.0, got none" in done.output


def test_other_epochs_of_a_cosine_are_reported(tmp_path: Path) -> None:
    kept = str(tmp_path / "run.ckpt")
    assert trained(tmp_path, "--checkpoint", kept, "--schedule", "cosine").exit_code == 0
    done = trained(tmp_path, "--checkpoint", kept, "--resume", "--schedule", "cosine", "--epochs", "4")
    assert done.exit_code == 0 and "--epochs was 3, is 4" in done.output


@other_device.runs
@pytest.mark.usefixtures("by_definitions")  # bits are compared
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("kind", "target"), [(Net, Y), (Classes, LABELS)])
def test_another_device_has_the_same_history(kind: type[Net], target: np.ndarray, graph: bool) -> None:
    results = []
    for place in (default_device, Device(other_device.NAME)):
        net = kind(optimizer=opt.Adam(0.05))
        net.compile([Tensor(data=X[:4], device=place)], is_train=True, use_graph=graph)
        net.set_params({"fc.W": np.full((3, 2), 0.5, np.float32), "fc.b": np.ones(2, np.float32)})
        batches = data.ArrayLoader(X, target, batch_size=4, shuffle=True, seed=3)
        results.append((net.fit(batches, epochs=2).losses, net.evaluate(X, target)["loss"], net.predict(X)))
        assert str(net.fc.W.device.backend) == str(place.backend)
    for want, got in zip(*results, strict=True):
        other_device.same(got, want)


@pytest.mark.parametrize("wrong", [
    {"epochs": 0}, {"epochs": 1.5}, {"seed": -1}, {"batch_size": 0}, {"patience": 2}, {"callbacks": [3]},
    {"metrics": {"loss": len}}, {"validation": (X, Y[1:])},
], ids=str)  # fmt: skip
def test_a_refused_training_has_no_effect(wrong: dict[str, Any]) -> None:
    """No step, no other parameters, and the measurements of the training before."""
    net = Net()
    history = net.fit(X, Y, batch_size=4)
    before = {n: t.data.copy() for n, t in net.get_states().items()}
    with pytest.raises(InvalidInput):
        net.fit(X, Y, **{"batch_size": 4, **wrong})
    assert net.history is history and all(np.array_equal(before[n], t.data) for n, t in net.get_states().items())
