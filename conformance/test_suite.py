"""ONNX's suite under the strict verdict, one test per case; exactly the cases of gaps.txt must fail.

The strict namespace runs in `tox -e report`, which fails for the same reasons.
"""

from __future__ import annotations

import json
from functools import cache

import pytest

from singa_backend import SingaBackend
from singa_backend.conform import cases, gaps, worker

NAMES = list(json.loads(cases.data_file("manifest.json").read_text())["cases"])
GAPS = gaps.read(cases.data_file("gaps.txt"))
GPU = pytest.param(
    "CUDA",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not SingaBackend.supports_device("CUDA"), reason="no CUDA device"),
    ],
)


@cache
def _cases() -> dict[str, cases.Case]:
    return {c.name: c for c in cases.load()}


@pytest.mark.row("I3")
def test_no_case_is_missing() -> None:
    assert cases.check_manifest(list(_cases().values()))


@pytest.mark.row("I3")
@pytest.mark.parametrize("device", ["CPU", GPU])
@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, device: str) -> None:
    result = worker.run_case(_cases()[name], SingaBackend, device)
    judged = gaps.judge([result], GAPS)
    assert not judged.unexpected, f"{result.strict}: {result.reason}{result.official_reason}"
    assert not judged.closed, f"these gaps pass now, delete their lines from gaps.txt: {judged.closed}"
