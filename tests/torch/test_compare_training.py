"""benchmarks/compare_training.py with PyTorch: its nets, and a comparison of two of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
NAMES = ("compare_training", "compare_training_lanes", "compare_training_nets")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Import the modules as the command does: from their folder."""
    sys.path.insert(0, FOLDER)
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(FOLDER)


def test_nets(bench: Any) -> None:
    """Each net of the table takes its batch and scores its classes, with equal weights in each call and in its smooth form."""
    nets, lanes = bench.compare_training_nets, bench.compare_training_lanes
    assert set(nets.MAKE) == set(lanes.NETS)
    for name, row in lanes.NETS.items():
        net, smooth = nets.build(name), nets.build(name, smooth=True)
        x = torch.from_numpy(lanes.data(name)[0])
        with torch.no_grad():
            assert net(x[:2]).shape[1] == row.classes
        same, parts = dict(net.named_parameters()), {type(p) for p in smooth.modules()}
        assert all(torch.equal(p, same[n]) for n, p in smooth.named_parameters()) and net.training and smooth.training
        assert not parts & {*nets.SMOOTH, torch.nn.MaxPool2d} and row.kinks == (parts != {type(p) for p in net.modules()})


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_comparison(bench: Any, tmp_path: Path, name: str) -> None:
    """Losses agree with PyTorch's, and errors are those of float32."""
    comparison = bench.compare_training.Comparison(["sonnx", "eager", "channels last"], 1, 1, tmp_path, seconds=0.01)
    document = bench.compare_training.compare(comparison, [name], ["SGD", "AdamW"], None)
    assert bench.compare_training.problems(document) == []
    for row in document["rows"]:
        assert not row["failed"] and set(row["ms"]) == {"sonnx", "eager"} and row["untrained"] == []
        assert row["ratio"] == pytest.approx(row["ms"]["sonnx"] / row["ms"]["eager"], rel=1e-3)
        assert bench.compare_training.differences(row) < 1e-5
        assert all(0 < row["errors"]["itself"][lane]["gradients"] < 1e-5 for lane in ("sonnx", "eager"))
        assert set(row["errors"]) == ({"itself", "smooth"} if name == "mlp" else {"itself"})
