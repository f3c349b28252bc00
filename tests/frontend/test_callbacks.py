"""`singa.callbacks` in `Model.fit`: the best epoch, and the rows of steps and epochs."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from singa import autograd, layer, model, opt
from singa.callbacks import KeepBest, MetricsFile, TensorBoardEvents
from singa_backend import InvalidInput

F = np.float32


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = layer.Linear(3)
        self.optimizer = opt.SGD(lr=2.0, momentum=0.9)

    def forward(self, x: Any) -> Any:
        return self.fc(x)

    def train_one_batch(self, x: Any, t: Any) -> Any:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(14, 6)).astype(F), rng.integers(0, 3, 14)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_the_best_epoch_is_restored(metric: str) -> None:
    net, held = Net(), data(1)
    best, seen = KeepBest(net, metric), []
    net.fit(*data(0), epochs=6, batch_size=4, validation=held,
            callbacks=[best, lambda _: seen.append({n: np.array(t.data) for n, t in net.get_states().items()})])  # fmt: skip
    each = [v[metric] for v in net.history.validation]
    assert best.epoch == int(np.argmin(each) if metric == "loss" else np.argmax(each)) + 1 and best.value == each[best.epoch - 1]
    best.restore()
    assert all(np.array_equal(t.data, seen[best.epoch - 1][n]) for n, t in net.get_states().items())
    assert net.evaluate(*held)[metric] == pytest.approx(best.value)


def test_nan_is_worse_than_a_number() -> None:
    net, history = Net(), SimpleNamespace(validation=[])
    net.compile([model.Tensor(data=data(0)[0])], is_train=False)
    best, found = KeepBest(net, "loss"), []
    for value in (np.nan, 2.0, np.nan, 1.0, 1.0, 3.0):
        history.validation.append({"loss": value})
        best(history)
        found.append(best.epoch)
    assert found == [1, 2, 2, 4, 4, 4]
    with pytest.raises(InvalidInput, match="SX342"):
        KeepBest(net, "accuracy")(history)


def test_the_rows_are_those_of_the_history(tmp_path: Path) -> None:
    net, path = Net(), tmp_path / "run.csv"
    history = net.fit(*data(0), epochs=2, batch_size=4, validation=data(1), callbacks=[MetricsFile(path)])
    found = rows(path)
    assert [float(r["loss"]) for r in found if r["row"] == "step"] == history.losses
    assert [float(r["loss"]) for r in found if r["row"] == "epoch"] == history.epochs
    assert [float(r["validation_accuracy"]) for r in found if r["row"] == "epoch"] == [v["accuracy"] for v in history.validation]
    with pytest.raises(InvalidInput, match="SX395"):
        net.fit(*data(0), batch_size=4, callbacks=[MetricsFile(path)])
    assert rows(path) == found


def test_a_state_cuts_off_what_was_written_later(tmp_path: Path) -> None:
    table, history = MetricsFile(tmp_path / "run.csv"), SimpleNamespace(losses=[1.0, 0.5], epochs=[0.75], validation=[])
    table(history)
    point, kept = table.state_dict(), (tmp_path / "run.csv").read_bytes()
    history.losses.append(0.25)
    history.epochs.append(0.25)
    table(history)
    table.close()
    later = MetricsFile(tmp_path / "run.csv")
    later.load_state_dict(point)
    assert (tmp_path / "run.csv").read_bytes() != kept  # it is only compared
    later.begin(2)
    later.close()
    assert (tmp_path / "run.csv").read_bytes() == kept


def test_steps_are_written_when_they_are_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    history = SimpleNamespace(losses=[1.0], epochs=[], validation=[])
    progress = SimpleNamespace(steps=1, epoch=1, rate=0.1, history=history)
    for sink in (MetricsFile(tmp_path / "run.csv"), TensorBoardEvents(tmp_path / "runs")):
        history.epochs.clear()
        sink.on_step(progress)
        history.epochs.append(1.0)
        sink.on_epoch(progress)
        sink.close()
    assert [(r["row"], r["loss"], r["rate"]) for r in rows(tmp_path / "run.csv")] == [
        ("step", "1.0", "0.1"),
        ("epoch", "1.0", ""),
    ]
    assert len(list((tmp_path / "runs").iterdir())) == 1
