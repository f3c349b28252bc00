"""benchmarks/compare_training.py: our lane in a child process, its figures and its report; without PyTorch."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.helpers.paths import PROJECT

NAMES = ("compare_training", "compare_training_lanes", "compare_peers")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Import the modules as the command does: from their folder."""
    sys.path.insert(0, str(PROJECT / "benchmarks"))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(PROJECT / "benchmarks"))


W = (0.01 * np.random.default_rng(1).standard_normal((784, 10))).astype(np.float32)


def _save(path: Path) -> None:
    """Write one linear layer in place of the net "mlp"."""
    tensors = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(np.zeros(10, np.float32), "b")]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [128, size]) for n, size in (("x", 784), ("y", 10)))
    graph = helper.make_graph([helper.make_node("Gemm", ["x", "w", "b"], ["y"])], "g", [x], [y], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def _gradients(bench: Any) -> dict[str, np.ndarray]:
    """The gradients of the linear layer in float64, by the formula."""
    x, t = bench.compare_training_lanes.data("mlp")
    x = x.astype(np.float64)
    scores = np.exp(x @ W)
    d = (scores / scores.sum(1, keepdims=True) - np.eye(10)[t]) / len(t)
    return {"w": x.T @ d, "b": d.sum(0)}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_our_lane(bench: Any, tmp_path: Path, optimizer: str) -> None:
    """It trains, measures, and returns the gradients and parameters of one step from the first parameters."""
    _save(tmp_path / "mlp.onnx")
    lanes = bench.compare_training_lanes
    child = bench.compare_peers.Child(lanes.__file__, lanes.OURS, 1)
    try:
        found = child.ask("load", "mlp", optimizer, str(tmp_path / "mlp.onnx"))
        assert len(found["losses"]) == lanes.FIRST and found["losses"] == sorted(found["losses"], reverse=True)
        assert not found["memory"] or set(found["memory"]) == {"first", "step"}
        times = child.ask("turn", 1, 0.005)
        assert times and all(t > 0 for t in times)
        work = child.ask("work")
        assert work["by"] == "plan" and work["gradients"] >= 2 and 0 <= work["definitions"] <= 1
        ends = child.ask("ends", "mlp", optimizer, str(tmp_path / "mlp.onnx"), False)
    finally:
        child.close()
    gradients = _gradients(bench)
    size = {n: np.abs(g).max() for n, g in gradients.items()}
    assert all(np.abs(ends["gradients"][n] - g).max() < 1e-5 * size[n] for n, g in gradients.items())
    start, lr = {"w": W, "b": np.zeros(10)}, lanes.RATES[optimizer]
    for n, g in gradients.items():
        update = g if optimizer == lanes.SGD else lanes.DECAY * start[n] + g / (np.abs(g) + 1e-8)
        assert np.abs(ends["parameters"][n] - (start[n] - lr * update)).max() < 1e-6


def test_it_measures_and_reports(bench: Any, tmp_path: Path) -> None:
    """Without a lane of PyTorch there are times, but no ratio."""
    _save(tmp_path / "mlp.onnx")
    comparison = bench.compare_training.Comparison(["sonnx"], 1, 2, tmp_path, seconds=0.005)
    document = bench.compare_training.compare(comparison, ["mlp"], ["SGD"], tmp_path)
    (row,) = document["rows"]
    assert not row["failed"] and row["ms"]["sonnx"] > 0 and row["ratio"] is None and row["work"]["by"] == "plan"
    assert json.loads((tmp_path / "benchmark-training.json").read_text("utf-8")) == document
    assert "| mlp | 128 x 784 |" in (tmp_path / "benchmark-training.md").read_text("utf-8")
    assert bench.compare_training.problems(document) == []


def test_a_failure_is_named(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "mlp.onnx").write_bytes(b"not a model")
    comparison = bench.compare_training.Comparison(["sonnx"], 1, 1, tmp_path, seconds=0.005)
    document = bench.compare_training.compare(comparison, ["mlp"], ["AdamW"], None)
    (problem,) = bench.compare_training.problems(document)
    assert problem.startswith("mlp, AdamW: ") and "InvalidModel" in problem
    assert f"* mlp, AdamW, sonnx: {document['rows'][0]['failed']['sonnx']}" in bench.compare_training.page(document)


def test_errors_are_relative_to_each_gradient(bench: Any) -> None:
    exact = {"large": np.array([4.0, -8.0]), "small": np.array([1e-3]), "zero": np.array([1e-12]), "absent": np.array([1.0])}
    ours = {"large": np.array([4.0, -7.5]), "small": np.array([1.25e-3]), "zero": np.array([1e-9])}
    found = bench.compare_training.errors({"gradients": ours}, {"gradients": exact})
    assert found == {"gradients": pytest.approx(0.25)}


def _row(net: str = "mlp", optimizer: str = "SGD", ours: float = 2.0, **others: Any) -> dict[str, Any]:
    ms = {"sonnx": ours, "eager": 4.0, "channels last": 2.5}
    form = {lane: {"gradients": 1e-6, "parameters": 2e-6} for lane in ms}
    work = {"by": "plan", "reason": "", "definitions": 0.125, "slowest": {"Scan": 0.125}, "gradients": 7, "joined": 4,
            "refused": [["Conv", "only float32", 2]], "written": {"Add": 1}}  # fmt: skip
    row = {"net": net, "optimizer": optimizer, "ms": ms, "ratio": ours / 2.5, "failed": {}, "untrained": [], "work": work}
    row |= {"losses": {"sonnx": [2.0, 1.0], "eager": [2.0, 1.25]}, "memory": {"sonnx": {"first": 2**22, "step": 2**21}}}
    return row | {"errors": {"itself": form, "smooth": form}} | others


def _document(*rows: dict[str, Any], threads: int = 1) -> dict[str, Any]:
    shared = {"machine": "m", "versions": {"sonnx": "1"}, "absent": {}, "load": [0.5, 1.5], "turns": 7}
    return {**shared, "threads": threads, "rows": list(rows)}


def test_page(bench: Any) -> None:
    rows = [_row(), _row("cnn", ours=3.0), _row(optimizer="AdamW"), _row("gru", ours=10.0)]
    page = bench.compare_training.page(_document(*rows))
    for line in (
        "| mlp | 128 x 784 | 2 | 4 | 2.5 | 0.80 | 2 |  |",
        "| cnn | 64 x 1 x 28 x 28 | 3 | 4 | 2.5 | **1.20** | 2 |  |",
        f"| geometric mean | | | | | {math.sqrt(0.8 * 1.2):.3f} | | |",
        "## SGD with momentum, held out",
        "| gru | 32 x 32 | 10 | 4 | 2.5 | **4.00** | 2 |  |",
        "| geometric mean | | | | | 4.000 | | |",
        "| mlp | SGD | 87.5% | Scan 12.5% | 7 | 4 | 2 |",
        "* mlp: 2 of Conv: only float32 (SGD, AdamW)",
        "* cnn: 1 Add",
        "| mlp, smooth | AdamW | 1.0e-06 | 1.0e-06 | 1.0e-06 | 2.0e-06 | 2.0e-06 | 2.0e-06 |",
        "| mlp | SGD | 2, 1 | 2, 1.25 | 2.0e-01 |",
    ):
        assert f"{line}\n" in page, line
    assert "; one thread; CPU time;" in page and "was 0.5 at the start and 1.5 at the end" in page
    assert "; 2 threads; wall time;" in bench.compare_training.page(_document(_row(), threads=2))


def test_problems_are_named(bench: Any) -> None:
    """The error of a net with kinks is judged on its smooth form, next to the largest error of PyTorch."""

    def problems(**others: Any) -> list[str]:
        found: list[str] = bench.compare_training.problems(_document(_row(**others)))
        return found

    def errors(ours: float, form: str) -> dict[str, Any]:
        row = _row()["errors"]
        return {**row, form: {**row[form], "sonnx": {"gradients": ours, "parameters": 0.0}}}

    assert problems() == [] and problems(errors=errors(0.5, "itself")) == []
    (wrong,) = problems(errors=errors(1e-3, "smooth"))
    assert wrong == "mlp, SGD: the error of gradients is 1.0e-03, that of PyTorch 1.0e-06"
    assert problems(net="gru", errors=errors(math.nan, "itself")) == [
        "gru, SGD: the error of gradients is nan, that of PyTorch 1.0e-06"
    ]
    assert problems(untrained=["w"]) == ["mlp, SGD: not trained: w"]
    (wrong,) = problems(losses={"sonnx": [2.1], "eager": [2.0]})
    assert wrong == "mlp, SGD: the first loss is 2.1, that of PyTorch 2"


def test_data_fit_the_table(bench: Any) -> None:
    for name, net in bench.compare_training_lanes.NETS.items():
        x, t = bench.compare_training_lanes.data(name)
        assert (x.shape, t.shape) == (net.input, net.targets) and 0 <= t.min() <= t.max() < net.classes
        assert x.dtype == (np.int64 if net.words else np.float32)


def test_held_out_nets_are_fixed(bench: Any) -> None:
    held_out = {name for name, net in bench.compare_training_lanes.NETS.items() if net.held_out}
    assert held_out == {"resnext", "mobilenetv3", "gru", "vit", "convnext"}


def test_each_gradient_is_compared_with_the_larger_error_of_pytorch(bench: Any) -> None:
    exact = {"gradients": {"a": np.ones(4), "b": np.full(4, 2.0), "tiny": np.full(4, 1e-9)}}
    ours = {"gradients": {"a": np.ones(4) + 3e-6, "b": np.full(4, 2.0) + 1e-6, "tiny": np.ones(4)}}
    eager = {"gradients": {"a": np.ones(4) + 1e-6, "b": np.full(4, 2.0) + 1e-6, "tiny": np.zeros(4)}}
    last = {"gradients": {"a": np.ones(4), "b": np.full(4, 2.0) + 2e-6, "tiny": np.zeros(4)}}
    found = bench.compare_training.against_theirs(ours, [eager, last], exact)
    assert (found["count"], found["within"], found["name"]) == (2, 1, "a") and abs(found["largest"] - 3) < 1e-3
