"""benchmarks/compare.py: its models, its peers in child processes, its figures and its report."""

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

from singa_backend import SingaBackend

NAMES = ("compare", "compare_models", "compare_peers")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Import the modules as the command does: from their folder."""
    sys.path.insert(0, str(PROJECT / "benchmarks"))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(PROJECT / "benchmarks"))


def _save(path: Path, op: str = "Gemm") -> None:
    w = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 8]) for n in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x", "w"], ["y"])], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def _measure(bench: Any, folder: Path, peers: list[str], report: Path | None = None, **settings: Any) -> Any:
    comparison = bench.compare.Comparison(peers, threads=1, rounds=2, seconds=0.005, **({"pythons": {}} | settings))
    return bench.compare.compare(comparison, folder, ["mlp"], [1, 8], report)


def test_it_measures_and_reports(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    _save(tmp_path / "mlp-b1.onnx")
    pythons = {"openvino": str(tmp_path / "no-interpreter")}
    document = _measure(bench, tmp_path, ["sonnx", "onnxruntime", "openvino", "reference"], tmp_path, pythons=pythons)
    (row,) = document["rows"]
    assert not row["failed"] and set(row["times_ms"]) == {"sonnx", "onnxruntime", "reference"}
    assert row["ratios"]["onnxruntime"] == pytest.approx(row["times_ms"]["sonnx"] / row["times_ms"]["onnxruntime"], rel=1e-2)
    assert row["difference"]["sonnx"] < 1e-5 and row["difference"]["reference"] < 1e-5
    assert "no-interpreter" in document["absent"]["openvino"] and document["missing"] == ["mlp-b8"]
    assert json.loads((tmp_path / "benchmark-compare.json").read_text("utf-8")) == document
    page = (tmp_path / "benchmark-compare.md").read_text("utf-8")
    assert "| mlp | 1 |" in page and "* absent: openvino:" in page and "* no file: mlp-b8" in page
    assert ">mlp, 1<" in (tmp_path / "benchmark-compare.svg").read_text("utf-8")
    assert bench.compare.problems(document) == []


def test_preparing_is_measured(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    _save(tmp_path / "mlp-b1.onnx")
    prepared = _measure(bench, tmp_path, ["sonnx", "onnxruntime"], prepare=True)["rows"][0]["prepare"]
    assert prepared["prepare"] > 0 and prepared["answer"] > 0 and set(prepared["memory"]) == {"sonnx", "onnxruntime"}


def test_a_failure_is_named_and_the_others_go_on(bench: Any, tmp_path: Path) -> None:
    _save(tmp_path / "mlp-b1.onnx", "NoSuchOperator")
    _save(tmp_path / "mlp-b8.onnx")
    document = _measure(bench, tmp_path, ["sonnx"])
    assert [set(r["times_ms"]) for r in document["rows"]] == [set(), {"sonnx"}]
    (problem,) = bench.compare.problems(document)
    assert "mlp, batch 1" in problem and "NoSuchOperator" in problem
    assert "* mlp, batch 1, sonnx: " in bench.compare.page(document)


def test_a_dead_peer_is_a_failure(bench: Any, tmp_path: Path) -> None:
    _save(tmp_path / "m.onnx")
    peer = bench.compare_peers.Peer("sonnx", 1)
    try:
        peer._process.kill()
        with pytest.raises(bench.compare_peers.Failure, match="ended with exit code -9"):
            peer.load(tmp_path / "m.onnx", "m", {})
    finally:
        peer.close()


def test_difference(bench: Any) -> None:
    difference = bench.compare.difference
    one = np.array([1.0, -4.0, math.inf, math.nan], np.float32)
    assert difference([one], [one.copy()]) == 0
    assert difference([one + np.float32(0.5)], [one]) == 0.125
    assert difference([one], [one[:3]]) == math.inf and difference([], [one]) == math.inf
    assert difference([np.array([math.nan])], [np.array([1.0])]) == math.inf
    assert difference([np.array([math.inf])], [np.array([1.0])]) == math.inf
    assert difference([np.array([3, 4], np.uint8)], [np.array([4, 4], np.uint8)]) == 0.25


def _row(ours: float, theirs: float, best: float, model: str = "mlp") -> dict[str, Any]:
    times = {"sonnx": ours, "onnxruntime": theirs, "openvino": best}
    ratios = {"onnxruntime": ours / theirs, "openvino": ours / best}
    row = {"model": model, "batch": 1, "times_ms": times, "best_ms": times, "ratios": ratios}
    return row | {"difference": {"sonnx": 1e-7}, "failed": {}}


def _document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": "m",
        "threads": 2,
        "rounds": 5,
        "versions": {"sonnx": "1"},
        "absent": {},
        "missing": [],
        "rows": list(rows),
    }


def test_joined_ratios_are_medians_of_ratios(bench: Any) -> None:
    parts = [_document(_row(1, 2, 4)), _document(_row(30, 20, 40), _row(1, 1, 1, "gru")), _document(_row(0.9, 1, 3))]
    joined = bench.compare.join(parts)
    gru, mlp = joined["rows"]
    assert (gru["model"], mlp["model"], mlp["runs"], gru["runs"]) == ("gru", "mlp", 3, 1)
    assert mlp["ratios"] == {"onnxruntime": 0.9, "openvino": 0.3} and bench.compare.best(mlp) == 0.9
    page = bench.compare.page(joined)
    assert "1 or 3 different times" in page and f"| Models, batch 1 | 2 | {math.sqrt(0.9):.3f} | 0 |" in page


def test_int8_is_compared_with_the_float_model_and_the_best_form(bench: Any) -> None:
    times = {"sonnx": 2.0, "onnxruntime": 20.0, "onnxruntime resnet50": 8.0, "onnxruntime resnet50-u8s8": 4.0}
    row = _row(1, 1, 1, "resnet50-s8s8") | {"times_ms": times, "ratios": bench.compare.ratios(times)}
    assert bench.compare._int8(row) == ["0.25", "0.50"] and bench.compare.best(row) == 0.1
    assert "| resnet50-s8s8 | 1 | 0.10 | 0.10 | 0.25 | 0.50 | 1.0e-07 |" in bench.compare.page(_document(row))


@pytest.mark.parametrize(("name", "count"), [("chain1000", 1000), ("shapes300", 300), ("mixed300", 300)])
def test_graphs_of_small_operators(bench: Any, tmp_path: Path, name: str, count: int) -> None:
    """They have the promised size, and sonnx agrees with onnx's reference."""
    bench.compare_models.build(tmp_path, name, 2)
    path = bench.compare_models.path_of(tmp_path, name, 2)
    model = onnx.load(path)
    assert count <= len(model.graph.node) < 1.1 * count
    feeds = bench.compare_models.inputs_of(path, name, 2)
    ours = SingaBackend.prepare(model).run(feeds)
    theirs = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    assert ours[0].std() > 1e-3 and bench.compare.difference(list(ours), theirs) < 1e-5


def test_a_light_model_at_another_batch(bench: Any, tmp_path: Path) -> None:
    bench.compare_models.build(tmp_path, "shufflenet", 2)
    path = bench.compare_models.path_of(tmp_path, "shufflenet", 2)
    model = onnx.load(path)
    kinds = {n.op_type for n in model.graph.node}
    assert not kinds & {"ConstantOfShape", "Unsqueeze", "Dropout"} and len(model.graph.input) == 1
    probabilities, logits = SingaBackend.prepare(model).run(bench.compare_models.inputs_of(path, "shufflenet", 2))
    assert probabilities.shape == logits.shape == (2, 1000) and not np.array_equal(logits[0], logits[1])


def test_other_outputs_are_named(bench: Any) -> None:
    """A float model must agree; int8 may differ by a step, and the page names it."""
    rows = [_row(1, 1, 1) | {"difference": {"sonnx": 0.5, "openvino": 0.25}}]
    rows += [_row(1, 1, 1, "bert-u8s8") | {"difference": {"sonnx": 0.125}}]
    (problem,) = bench.compare.problems(_document(*rows))
    assert problem == "mlp, batch 1: differs from onnxruntime by 5.0e-01 of the largest value"
    page = bench.compare.page(_document(*rows))
    for line in ("mlp, batch 1, sonnx: 5.0e-01", "mlp, batch 1, openvino: 2.5e-01", "bert-u8s8, batch 1, sonnx: 1.2e-01"):
        assert f"* {line}\n" in page


def test_held_out_models_are_fixed(bench: Any) -> None:
    held_out = {name for name, model in bench.compare_models.MODELS.items() if model.held_out}
    assert held_out == {"resnext", "mobilenetv3", "conformer", "crnn", "swin"}


@pytest.mark.skipif(not (PROJECT / "reports" / "benchmark-compare.json").exists(), reason="no comparison is published")
def test_the_published_page_is_what_its_figures_render_to(bench: Any) -> None:
    document = json.loads((PROJECT / "reports" / "benchmark-compare.json").read_text("utf-8"))
    assert document["rows"] and bench.compare.problems(document) == []
    for suffix, render in ((".md", bench.compare.page), (".svg", bench.compare.plot)):
        assert (PROJECT / "reports" / f"benchmark-compare{suffix}").read_text("utf-8") == render(document)
