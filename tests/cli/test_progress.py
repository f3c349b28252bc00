"""The progress of commands without a terminal: lines with the rate and the remaining time."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

from singa.cli import main
from singa.cli._progress import INTERVAL, Lines, WorkRate, seconds


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(total: int | None, times: list[float], capsys: pytest.CaptureFixture[str], note: str = "") -> list[str]:
    """What is printed if one unit ends at each of the times."""
    clock = Clock()
    step = Lines("work", WorkRate(total, "cases", clock))
    for moment in times:
        clock.now = 100.0 + moment
        step(note)
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.splitlines()


@pytest.mark.parametrize(("count", "text"), [
    (0.0, "< 1 s"), (0.99, "< 1 s"), (1.0, "1 s"), (59.4, "59 s"), (59.6, "1 min"), (60.0, "1 min"), (125.0, "2 min 5 s"),
    (3599.4, "59 min 59 s"), (3599.6, "1 h"), (3600.0, "1 h"), (11400.0, "3 h 10 min"), (90000.0, "25 h"),
])  # fmt: skip
def test_a_time_has_at_most_two_units(count: float, text: str) -> None:
    assert seconds(count) == text


def test_each_tenth_tells_the_rate_and_the_remaining_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(40, [0.5 * (i + 1) for i in range(40)], capsys, "0 not passed")
    assert found[0] == "work: 4/40, 2 cases/s, 18 s left, 0 not passed"
    assert found[4] == "work: 20/40, 2 cases/s, 10 s left, 0 not passed"
    assert found[-1] == "work: 40/40, 2 cases/s, 20 s in all, 0 not passed" and len(found) == 10


def test_slow_work_tells_its_progress_each_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(1000, [10.0, 20.0, 31.0, 32.0, 62.0], capsys)
    assert found == ["work: 3/1000, 0.0968 cases/s, 2 h 51 min left", "work: 5/1000, 0.0806 cases/s, 3 h 25 min left"]
    assert INTERVAL == 30


def test_without_a_total_there_is_a_rate_only(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(None, [0.001 * (i + 1) for i in range(250)], capsys)
    assert found == ["work: 100, 1,000 cases/s", "work: 200, 1,000 cases/s"]


def test_a_clock_that_has_not_moved_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(1, [0.0], capsys) == ["work: 1/1"]


def test_a_training_tells_its_steps(tmp_path: Path) -> None:
    graph = "g (float[N,2] x) => (float[N,3] s) <float[2,3] w = {1,2,3,4,5,6}> { s = MatMul(x, w) }"
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {graph}'), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((20, 2), np.float32), y=np.zeros(20, np.int64))
    words = ["train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--batch-size", 2, "-o", tmp_path / "o.onnx"]
    found = CliRunner().invoke(main, list(map(str, words)))
    assert found.exit_code == 0, found.output
    told = [line for line in found.stderr.splitlines() if line.startswith("training: ")]
    assert [line.split(",")[0] for line in told] == [f"training: {i}/10" for i in range(1, 11)]
    assert all(re.search(r", [\d.,e+]+ steps/s, (< 1|\d+) s (left|in all), ", line) for line in told), told
