"""`sonnx train` of a classifier that ends in Softmax, by class numbers, and --patience."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from singa import autograd
from singa._core.tensor import Tensor
from singa.cli import main
from singa_backend.errors import InvalidInput

F = np.float32
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 6)).astype(F), RNG.integers(0, 3, 48)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weight = RNG.normal(size=(6, 3)).astype(F)
    for name, body in (("scores", "y = MatMul(x, w)"), ("probabilities", "s = MatMul(x, w) \n y = Softmax(s)")):
        model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y) {{ {body} }}')
        model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        onnx.save(model, tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "d.npz", x=X[:32], y=Y[:32])
    np.savez(tmp_path / "v.npz", x=X[32:], y=Y[32:])
    return tmp_path


def train(folder: Path, model: str, *given: Any, code: int = 0) -> Any:
    line = ["train", folder / f"{model}.onnx", "--data", folder / "d.npz", "--batch-size", 8, "--json", *given]
    done = CliRunner().invoke(main, [str(a) for a in line])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if not code else done.output


def test_class_numbers_train_probabilities_as_scores(folder: Path) -> None:
    """The losses, the accuracy and the weights are those of a model without the Softmax and --loss softmax_cross_entropy."""
    run = ("--epochs", 3, "--lr", 0.1, "--validation", folder / "v.npz", "--keep-best", "accuracy")
    scores = train(folder, "scores", *run, "-o", folder / "a.onnx")
    found = train(folder, "probabilities", *run, "--loss", "cross_entropy", "-o", folder / "b.onnx")
    assert found["losses"] == pytest.approx(scores["losses"], rel=1e-5)
    assert found["accuracy"] == scores["accuracy"] and None not in found["accuracy"]
    assert found["best"] == scores["best"]
    a, b = (numpy_helper.to_array(onnx.load(folder / f"{n}.onnx").graph.initializer[0]) for n in "ab")
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_ignored_class_numbers(folder: Path) -> None:
    np.savez(folder / "d.npz", x=X[:32], y=np.where(np.arange(32) % 3, Y[:32], -1))
    run = ("--lr", 0.1, "--ignore-index", -1, "-o", folder / "o.onnx")
    scores, found = train(folder, "scores", *run), train(folder, "probabilities", *run, "--loss", "cross_entropy")
    assert found["losses"] == pytest.approx(scores["losses"], rel=1e-5)


def test_cross_entropy_takes_class_numbers() -> None:
    p = RNG.dirichlet(np.ones(4), (5, 3)).astype(F)
    t = RNG.integers(0, 4, (5, 3))
    wanted = -np.log(np.take_along_axis(p.astype(np.float64), t[..., None], -1)).mean()
    for x, axis in ((p, None), (p, -1), (np.ascontiguousarray(np.moveaxis(p, -1, 1)), 1)):
        assert float(autograd.cross_entropy(Tensor(data=x), Tensor(data=t), axis=axis).data[0]) == pytest.approx(wanted, rel=1e-6)
    rows = Tensor(data=p[:, 0].copy())
    hot = autograd.cross_entropy(rows, Tensor(data=np.eye(4, dtype=F)[t[:, 0]]))
    for numbers in (t[:, 0], t[:, :1]):
        assert float(autograd.cross_entropy(rows, Tensor(data=numbers.copy())).data[0]) == pytest.approx(
            float(hot.data[0]), rel=1e-6
        )
    with pytest.raises(InvalidInput, match="SX335"):
        autograd.cross_entropy(rows, Tensor(data=t[:, 0] + 4))


# --- --patience


def epochs(folder: Path) -> list[float]:
    with open(folder / "m.csv", newline="") as file:
        return [float(row["validation_loss"]) for row in csv.DictReader(file) if row["row"] == "epoch"]


def test_patience_ends_the_training_with_its_best_epoch(folder: Path) -> None:
    """Also if it was stopped and resumed; a finished one does not go on."""
    run = ("--epochs", 60, "--lr", 1.0, "--validation", folder / "v.npz", "--patience", 3)
    told = train(folder, "scores", *run, "-o", folder / "a.onnx", "--metrics", folder / "m.csv")
    seen = epochs(folder)
    best = int(np.argmin(seen)) + 1
    assert len(seen) == best + 3 < 60 and told["best"] == {
        "epoch": best,
        "metric": "loss",
        "value": pytest.approx(seen[best - 1]),
    }
    train(folder, "scores", "--epochs", best, *run[2:], "-o", folder / "b.onnx")
    assert (folder / "a.onnx").read_bytes() == (folder / "b.onnx").read_bytes()
    kept = ("--checkpoint", folder / "c.ckpt")
    train(folder, "scores", "--epochs", 2, *run[2:], *kept)
    for _ in range(2):
        again = train(folder, "scores", *run, *kept, "--resume", "-o", folder / "c.onnx")
        assert again == told and (folder / "c.onnx").read_bytes() == (folder / "a.onnx").read_bytes()


def test_patience_needs_a_validation(folder: Path) -> None:
    assert "--patience needs --validation" in train(folder, "scores", "--patience", 2, "-o", folder / "o.onnx", code=2)
