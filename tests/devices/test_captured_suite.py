"""ONNX's node cases as CUDA graphs on an emulated device, against reports/cuda-counts.json."""

from __future__ import annotations

import json
import sys
from functools import cache

import fakecuda
import pytest
from tests.helpers.paths import PROJECT

from singa_backend.conform import cases

sys.path.insert(0, str(PROJECT / "benchmarks"))
import cuda_cases

pytestmark = pytest.mark.fakecuda
EXPECTED: dict[str, str] = json.loads((PROJECT / "reports" / "cuda-counts.json").read_text(encoding="utf-8"))["cases"]


@cache
def _cases() -> dict[str, cases.Case]:
    return {c.name: c for c in cases.load(("node",))}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_case_has_the_bits_of_runs_without_graphs(name: str) -> None:
    fakecuda.report()
    assert cuda_cases.outcome(_cases()[name]) == EXPECTED[name]
    assert fakecuda.report() == []


def test_the_report_has_every_case_and_most_are_one_graph() -> None:
    assert list(EXPECTED) == list(_cases())
    assert sum(not reason for reason in EXPECTED.values()) >= 1600
