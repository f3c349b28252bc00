"""The short run of measurements on a device (benchmarks/device_minutes.py), rehearsed on an emulated one."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers.paths import PROJECT

pytestmark = pytest.mark.fakecuda
SCRIPT = PROJECT / "benchmarks" / "device_minutes.py"


@pytest.fixture(scope="module")
def minutes() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("device_minutes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a value of JSON."""
    if isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, (int, float)):
        yield value


def test_each_item_of_a_rehearsal_measures_what_it_names(minutes: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=minutes.TOTAL + 60, check=False)
    text = (tmp_path / "device-minutes.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    assert [(line["item"], line["status"], line["reason"]) for line in lines] == [(n, "done", "") for n in minutes.ITEMS]
    assert [p.name for p in tmp_path.iterdir()] == ["device-minutes.jsonl"]
    assert all(math.isfinite(n) and n >= 0 for n in numbers(lines))
    found = {line["item"]: line["found"] for line in lines}
    assert found["versions"]["emulated"] is True and "environment" not in found["versions"]
    assert found["capture"]["afterwards"] == "calls and replays have equal bits" and found["capture"]["replays"] == 3
    assert found["primitives"]["product 32 x 16 x 8"]["error"] < 1e-6
    assert found["primitives"]["a node of a graph, µs"] > 0
    assert list(found["models"]) == list(minutes.REHEARSED)
    for model in found["models"].values():
        assert model["equal bits"] and model["error"] < 1e-5 and model["graphs"] == [["graph"]]
        assert model["bytes after three replays"]["device"] == model["bytes after all"]["device"]
        assert all(
            model[f"{how}, {where}, ms"] > 0 for how in ("uncaptured", "captured") for where in ("on the device", "to the host")
        )
    assert found["training"]["transformer"]["equal bits of states"] and found["training"]["transformer"]["states"] > 9
    if importlib.util.find_spec("torch") is None:
        assert {found[n]["PyTorch"] for n in ("versions", "PyTorch", "training", "compiled")} == {minutes.NO_TORCH}


def test_an_item_that_takes_too_long_costs_only_itself(minutes: ModuleType) -> None:
    line = minutes.run_item("models", True, 0.05)
    assert (line["status"], line["reason"], line["found"]) == ("deadline", "not finished within 0.05 s", {})


def test_an_item_that_fails_names_what_failed(minutes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "0")
    line = minutes.run_item("capture", True, 60.0)
    assert line["status"] == "failed" and "SX504" in line["reason"]


def test_the_items_fit_into_eight_minutes(minutes: ModuleType) -> None:
    assert sum(item.deadline for item in minutes.ITEMS.values()) <= minutes.TOTAL <= 480
