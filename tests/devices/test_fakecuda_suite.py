"""ONNX's suite on an emulated CUDA device, and the column of the report that was made on it."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import fakecuda
import onnx
import pytest
from tests.helpers.paths import PROJECT

from singa_backend import SingaBackend
from singa_backend.conform import cases, gaps, report, results, worker

REPORTS = PROJECT / "reports"
NAMES = list(json.loads(cases.data_file("manifest.json").read_text())["cases"])
GAPS = gaps.read(cases.data_file("gaps.txt"), "CUDA")
COLUMN = "CUDA, emulated"
LARGE = {"test_bvlc_alexnet", "test_densenet121", "test_inception_v2", "test_vgg19", "test_zfnet512"}
"""Nets that take 25 to 160 s here, and call no operator that other cases do not call; `tox -e cuda-report` runs them."""


@cache
def _cases() -> dict[str, cases.Case]:
    return {c.name: c for c in cases.load()}


@pytest.mark.fakecuda
@pytest.mark.row("I17")
@pytest.mark.usefixtures("capturable_products")
@pytest.mark.parametrize("name", [n for n in NAMES if n not in LARGE])
def test_case(name: str) -> None:
    """Each kernel of a case of few nodes runs in both orders of its threads: a race fails the test."""
    case = _cases()[name]
    with fakecuda.order("ascending" if case.kind == "real" else "both"):
        result = worker.run_case(case, SingaBackend, "CUDA")
    judged = gaps.judge([result], GAPS)
    assert not judged.unexpected, f"{result.strict}: {result.reason}{result.official_reason}"
    assert not judged.closed, f"these gaps pass now, delete their lines from gaps.txt: {judged.closed}"


@pytest.mark.fakecuda
@pytest.mark.parametrize("device", ["CUDA", "cuda", "cuda:1"])
def test_results_are_marked_however_the_device_is_written(device: str) -> None:
    assert results.emulated(device)
    run = results.environment(device)
    assert (run["device"], run["emulated"]) == (device.upper(), True)
    assert report.label({"environment": run}) == f"{device.upper()}, emulated"


@pytest.mark.fakecuda
def test_large_cases_call_no_operator_alone() -> None:
    called = {
        name: {(n.domain, n.op_type) for n in onnx.load_from_string(case.model).graph.node} for name, case in _cases().items()
    }
    assert called.keys() > LARGE
    rest = set().union(*(operators for name, operators in called.items() if name not in LARGE))
    assert all(called[name] <= rest for name in LARGE)


def _digest() -> str:
    manifest = json.loads(cases.data_file("manifest.json").read_text())
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.row("I17")
def test_the_column_of_the_report_is_what_the_cases_prove() -> None:
    """`test_case` proves the verdicts, except for LARGE; the column must have them, and the same executed cells as the CPU's."""
    built = json.loads((REPORTS / "support.json").read_text(encoding="utf-8"))
    assert built["environments"][COLUMN]["emulated"] is True and built["manifest"] == _digest()
    assert "CUDA" not in built["totals"]
    total = built["totals"][COLUMN]
    failed = {n for n in GAPS if not n.startswith("official:")}
    assert total["cases"] == len(NAMES) and total["strict"] == len(NAMES) - len(failed)
    assert built["gaps"][COLUMN] == {n: GAPS[n] for n in sorted(GAPS)} and built["unexpected"][COLUMN] == []
    for row in built["rows"]:
        here, there = (_executed(row["devices"][d], failed) for d in ("CPU", COLUMN))
        assert there == here, f"{row['operator']}-{row['version']}"


def _executed(cell: dict[str, Any], failed: set[str]) -> dict[str, Any]:
    """Return what a cell has executed, and its failures that are not gaps."""
    kept = {k: cell[k] for k in ("cases", "tested", "dtypes", "attributes", "names")}
    return kept | {"failed": set(cell["failed"]) - failed}
