"""The gradient rules on an emulated CUDA device: the first point of each version in float32, compared with the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import fakecuda
import numpy as np
import pytest
from tests.helpers.paths import PROJECT

from singa_backend.conform import gradients
from singa_backend.conform.gradient_matrix import MatrixRow
from singa_backend.conform.gradient_matrix.row import in_single
from singa_backend.devices.device import resolve

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("capturable_products")]
MATRIX = json.loads((PROJECT / "reports" / "gradients.json").read_text(encoding="utf-8"))
ROWS = {r.name: r.key for r in map(MatrixRow.from_dict, MATRIX["rows"]) if r.verdict == "checked"}
NEAR = 1e-5


def test_all_versions_are_run() -> None:
    assert len(ROWS) >= 494


@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    point = in_single(next(gradients.points(*ROWS[name], count=1)))
    on_device = replace(point, device=resolve("CUDA"))
    for run in (gradients.Point.eager, gradients.Point.through_graph):
        with fakecuda.order("both"):  # a race fails the test
            found = run(on_device)
        same(found, run(point))


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif expected is None:
        assert found is None
    else:
        assert isinstance(found, np.ndarray) and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        size = np.abs(expected[np.isfinite(expected)]).max(initial=1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=NEAR * size)
