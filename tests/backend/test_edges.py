"""Numbers at the edges of int32 and int64: no plan dies or differs from the definitions."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.helpers.paths import TESTS

from singa_backend.io.processes import Child

sys.path.append(str(TESTS / "hostile"))  # a worker imports the modules by their names
edges: Any = importlib.import_module("edges")
workers: Any = importlib.import_module("workers")

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="bounds memory as Linux does")

DRAWN = 300
"""The cases of the short draw; `tox -e fuzz-edges` draws 100,000."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Child]:
    with Child(workers.serve, "edges", memory=workers.MEMORY) as one:
        yield one


@pytest.mark.parametrize("name", edges.NAMED)
def test_a_window_with_a_large_number_equals_the_definition(name: str, worker: Child) -> None:
    answer = worker.ask((0, name), workers.SECONDS)
    assert answer["outcome"] == "ok", answer


def test_drawn_numbers_equal_the_definitions() -> None:
    wrong: list[str] = []
    seen = workers.run("edges", 3, 0, DRAWN, lambda index, answer: wrong.append(f"{index}: {json.dumps(answer)[:1500]}"))
    assert not wrong, "\n".join(wrong)
    assert seen["ok"] > DRAWN // 4 and seen["refused"] > DRAWN // 4


CELLS: dict[str, list[tuple[int, int, int]]] = {"Conv to 1 channel": []}  # all windows are padding
for _number in ("2^31 - 1", "2^32 + 1"):
    CELLS[f"Conv strides {_number}"] = [(0, j, j) for j in range(3)]
    CELLS[f"Conv dilations {_number}"] = [(row, 1, row) for row in range(5)]
    CELLS[f"Conv pads {_number}"] = [(1, j, j) for j in range(3)]
"""The rows of the output, of the kernel and of the input that nodes of `edges.NAMED` multiply."""


@pytest.mark.parametrize("name", CELLS)
def test_the_command_line_computes_a_convolution_with_a_large_number(name: str, tmp_path: Path) -> None:
    model = edges.draw(0, name).model
    onnx.save(model, tmp_path / "model.onnx")
    command = [
        sys.executable,
        "-m",
        "singa.cli",
        "run",
        "model.onnx",
        "--random",
        "0",
        "--save-inputs",
        "x.npz",
        "--output",
        "y.npz",
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    with np.load(tmp_path / "x.npz") as inputs, np.load(tmp_path / "y.npz") as outputs:
        x, y = inputs["x0"].astype(np.float64), outputs["y0"]
    w = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    expected = np.zeros(y.shape)
    for out, tap, row in CELLS[name]:
        for column in range(w.shape[3]):
            part = x[:, :, row, column : column + y.shape[3]]
            expected[:, :, out] += np.einsum("oc,ncw->now", w[:, :, tap, column], part)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-2)
