"""Models from other frameworks (tests/frameworks): against the framework's own outputs, against onnxruntime, and in training.

The error of an output is max|ours - theirs| / max|theirs|, infinite where dtype, shape or any integer differs; the bound is 1e-4.
The frameworks' own outputs are stored next to the models at two batch sizes, so that no framework is needed here.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from tests.helpers.paths import TESTS

from singa import autograd, opt, sonnx
from singa._core.tensor import Tensor
from singa_backend.conform import foreign
from singa_backend.engines.oracle import Oracle

FRAMEWORKS = TESTS / "frameworks"
TABLE = tomllib.loads((FRAMEWORKS / "rows.toml").read_text())
FOLDERS = list(TABLE["versions"])
STORED = {f"{folder}-{m.name}": m for folder in FOLDERS for m in foreign.stored(FRAMEWORKS / folder)}
F = np.float32


@pytest.mark.row("I10")
def test_the_table_is_complete() -> None:
    rows = TABLE["row"]
    assert Counter(r["framework"] for r in rows) == {"PyTorch": 16, "TensorFlow": 10, "PaddlePaddle": 25}
    assert len({(r["framework"], r["model"]) for r in rows}) == len(rows)
    assert all(r["files"] for r in rows) and all(e["files"] for e in TABLE["estimator"])
    listed = [f for r in (*rows, *TABLE["estimator"]) for f in r["files"]]
    there = sorted(p.relative_to(FRAMEWORKS).as_posix() for p in FRAMEWORKS.rglob("*.onnx"))
    assert sorted(listed) == there == sorted(f"{k.replace('-', '/', 1)}.onnx" for k in STORED)
    assert sum(p.stat().st_size for p in FRAMEWORKS.rglob("*") if p.is_file()) < 6_000_000


def test_both_exporters_of_pytorch_and_two_opsets_of_tensorflow() -> None:
    ends: dict[str, set[str]] = {}
    for row in TABLE["row"]:
        ends.setdefault(row["framework"], set()).add(" ".join(sorted(f.partition("-")[2] for f in row["files"])))
    assert ends.pop("PaddlePaddle") >= {"paddle2onnx-12.onnx"}
    assert ends == {"PyTorch": {"dynamo-18.onnx script-12.onnx"}, "TensorFlow": {"tf2onnx-11.onnx tf2onnx-17.onnx"}}


def test_what_was_changed_after_the_export_says_so() -> None:
    """Nothing among the 51 rows; of scikit-learn's estimators, those that read words."""
    assert not any("byhand" in f for r in TABLE["row"] for f in r["files"])
    changed = {e["model"] for e in TABLE["estimator"] if e.get("by_hand")}
    assert changed == {e["model"] for e in TABLE["estimator"] for f in e["files"] if "-byhand-" in f}
    assert changed == {"count_vectorizer", "tfidf_vectorizer"} and len(TABLE["estimator"]) >= 30


def test_what_stands_in_for_a_faulty_exporter_says_so() -> None:
    """Rows that only the older PaddlePaddle could write say what the newer one does to them."""
    for row in TABLE["row"]:
        older = [f for f in row["files"] if f.startswith("paddle26/")]
        assert ("note" in row) == bool(set(older) - {f.replace("/", "26/", 1) for f in row["files"]}), row


@pytest.mark.row("I10")
@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("name", STORED)
def test_beside_what_the_framework_computed(name: str, device: str) -> None:
    model = onnx.load(STORED[name].path)
    assert {len(next(iter(inputs.values()))) for inputs, _ in STORED[name].data} == {1, 3}
    for inputs, expected in STORED[name].data:
        found = foreign.compare_with_stored(name, model, inputs, expected, device=device)
        assert found.good, found.to_dict()


@pytest.mark.row("I10")
@pytest.mark.parametrize("name", STORED)
def test_every_value_beside_onnxruntime(name: str, oracle: Oracle) -> None:
    for inputs, _ in STORED[name].data:
        found = foreign.compare_with_onnxruntime(name, onnx.load(STORED[name].path), inputs, oracle)
        assert found.good, found.to_dict()


class Fitted(sonnx.SONNXModel):
    """An imported net with a loss of mean squared errors; scored: the indices of its float outputs, since others are labels."""

    rule: Any = None
    scored: Sequence[int] = (0,)

    def train_one_batch(self, x: Tensor, *ts: Tensor) -> Tensor:
        ys = self.forward(x)
        losses = [autograd.mse_loss(ys[i], t) for i, t in zip(self.scored, ts, strict=True)]
        loss = losses[0]
        for another in losses[1:]:
            loss = autograd.add(loss, another)
        self.rule(loss)
        return loss


ESTIMATORS = ("mlp_classifier", "mlp_regressor", "poisson_regressor", "scaler_pca")
"""Those of scikit-learn's that are written in operators with gradients; trees, support vectors and encoders are not."""


@pytest.mark.row("I11")
@pytest.mark.parametrize(
    "name", [n for n in STORED if not n.startswith("sklearn-") or n.removeprefix("sklearn-").startswith(ESTIMATORS)]
)
def test_it_trains_from_the_file(name: str) -> None:
    """Each row learns the scores of the one before it: the loss falls, and every kernel moves."""
    inputs, ys = STORED[name].data[1]
    m = Fitted(str(STORED[name].path))
    step = 1e-3 if m.imported.statistics else 3e-4  # where the exporter folded the batch norms, small steps go far
    m.rule = opt.Adam(lr=1e-2 if name.startswith("sklearn") else step)
    x = Tensor(data=next(iter(inputs.values())), requires_grad=False)
    m.scored = [i for i, y in enumerate(ys) if y.dtype == F]
    ts = [Tensor(data=np.roll(ys[i], 1, axis=0), requires_grad=False) for i in m.scored]
    before = {n: p.data.copy() for n, p in m.get_params().items() if p.data.ndim > 1 and p.stores_grad}
    m.train()
    m.graph(True)
    losses = [float(m(x, *ts).data[0]) for _ in range(16)]
    assert not m.not_traceable
    assert np.isfinite(losses).all() and losses[-1] < 0.95 * losses[0], losses
    assert [n for n, b in before.items() if np.array_equal(b, m.get_params()[n].data)] == []


@pytest.mark.parametrize("name", STORED)
def test_in_and_out_is_a_fixed_point(name: str) -> None:
    """A written file is written again byte for byte, and returns the outputs of the original file bit for bit."""
    path = STORED[name].path
    first = sonnx.SONNXModel(str(path))
    first.eval()
    once = sonnx.export(first)
    second = sonnx.SONNXModel(once)
    second.eval()
    assert sonnx.export(second).SerializeToString() == once.SerializeToString()
    reps = sonnx.prepare(str(path)), sonnx.prepare(once)
    for inputs, _ in STORED[name].data:
        for a, b in zip(*(rep.run(inputs) for rep in reps), strict=True):
            np.testing.assert_array_equal(a, b)
