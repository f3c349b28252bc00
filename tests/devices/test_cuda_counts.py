"""What runs do on an emulated CUDA device, against reports/cuda-counts.json: no count may rise unnoticed."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest
from tests.helpers.paths import PROJECT

pytestmark = pytest.mark.fakecuda
DOCUMENT = json.loads((PROJECT / "reports" / "cuda-counts.json").read_text(encoding="utf-8"))
REPORT, REAL, CASES = DOCUMENT["models"], DOCUMENT["real"], DOCUMENT["cases"]


@pytest.fixture(scope="module")
def counts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_counts", PROJECT / "benchmarks" / "cuda_counts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", REPORT)
def test_no_count_rises(counts: ModuleType, name: str) -> None:
    found = counts.measure(name)
    risen = {n: f"{REPORT[name][n]} -> {v}" for n, v in found.items() if v > REPORT[name][n]}
    assert not risen, f"{name}: {risen}; if this is intended, write the report again: tox -e cuda-counts -- --to reports"


def test_the_report_has_every_model_and_its_page(counts: ModuleType) -> None:
    assert list(REPORT) == list(counts.MODELS)
    assert list(REAL) == list(counts.REAL)
    assert (PROJECT / "reports" / "cuda-counts.md").read_text(encoding="utf-8") == counts.page(REPORT, REAL, CASES)


def test_no_count_rises_at_real_widths(counts: ModuleType) -> None:
    found = counts.null()
    assert list(found) == list(REAL)
    for name, row in found.items():
        risen = {n: f"{REAL[name][n]} -> {v}" for n, v in row.items() if n != "host_ms" and v > REAL[name][n]}
        assert not risen, f"{name}: {risen}; if this is intended, write the report again: tox -e cuda-counts -- --to reports"


@pytest.mark.parametrize(
    "name", ["BERT-base, 12 layers", "ResNet-50", "shapes that are computed", "LSTM, both directions, 5 steps"]
)
def test_a_run_reads_back_its_output_only(name: str) -> None:
    assert REPORT[name]["to_host"] == REPORT[name]["synchronizations"] == 1


@pytest.mark.parametrize("name", REAL)
def test_a_run_of_real_widths_is_one_launch(name: str) -> None:
    row = REAL[name]
    assert row["graphs"] == 1 and row["launches"] == row["products"] == row["memory_queries"] == 0
