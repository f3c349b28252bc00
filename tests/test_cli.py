"""The command line as a person meets it: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

from singa.cli import main

X = np.array([[-1, 2, 3]], np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(
        parser.parse_model('<ir_version: 10, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }'), path
    )
    return path


def sonnx(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def test_run_random(model: Path) -> None:
    found = sonnx("run", model, "--random", 0, "--size", "n=2", "--json")
    (y,) = json.loads(found.output)["outputs"]
    assert found.exit_code == 0 and y["shape"] == [2, 3] and y["dtype"] == "float" and y["min"] >= 0
    assert sonnx("run", model, "--random", 0, "--size", "n=2", "--json").output == found.output


def test_run_shows_a_table(model: Path) -> None:
    assert "float[1, 3]" in sonnx("run", model, "--random", 1).output


@pytest.mark.parametrize("kind", ["npy", "npz", "pb", "inputs"])
def test_run_with_files(model: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"x.{'npz' if kind == 'inputs' else kind}"
    if kind == "npy":
        np.save(file, X)
    elif kind == "pb":
        file.write_bytes(numpy_helper.from_array(X).SerializeToString())
    else:
        np.savez(file, x=X)
    how = ["--inputs", file] if kind == "inputs" else ["--input", f"x={file}"]
    found = sonnx("run", model, *how, "--output", tmp_path / "y.npz")
    assert found.exit_code == 0, found.output
    np.testing.assert_array_equal(np.load(tmp_path / "y.npz")["y"], np.maximum(X, 0))


@pytest.mark.parametrize(("expected", "code"), [(np.maximum(X, 0), 0), (X, 1)])
def test_run_against_a_test_data_set(model: Path, tmp_path: Path, expected: np.ndarray, code: int) -> None:
    folder = tmp_path / "test_data_set_0"
    folder.mkdir()
    for name, array in (("input_0", X), ("output_0", expected)):
        (folder / f"{name}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
    found = sonnx("run", model, "--data", folder)
    assert found.exit_code == code and ("equal" if code == 0 else "differs") in found.output


def test_refusals_exit_with_3(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.astype(np.float64))
    found = sonnx("run", model, "--input", f"x={tmp_path / 'x.npy'}")
    assert found.exit_code == 3 and "x.astype(np.float32)" in found.stderr
    found = sonnx("run", tmp_path / "none.onnx", "--json")
    assert found.exit_code == 3 and json.loads(found.output)["error"] == "InvalidModel"
    assert sonnx("run", model, "--random", 0, "--device", "CUDA:77").exit_code == 3


def test_wrong_usage_exits_with_2(model: Path) -> None:
    assert sonnx("run", model, "--input", "x").exit_code == 2
    assert sonnx("conform", "--kind", "nothing").exit_code == 2
    assert sonnx("conform", "--report", "r", "-k", "x").exit_code == 2


@pytest.mark.parametrize("command", [("conform", "-k"), ("foreign", "-k"), ("fuzz", "-k"), ("gradients",), ("opsets",)])
def test_what_is_no_regular_expression_exits_with_2(command: tuple[str, ...]) -> None:
    found = sonnx(*command, "(")
    assert found.exit_code == 2 and "must be a regular expression, got '('" in found.stderr


def test_conform_and_report(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    found = sonnx(
        "conform", "--kind", "node", "-k", "^test_relu", "-n", 1, "--results", target, "--junit", tmp_path / "j.xml", "--json"
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["totals"]["strict"] == json.loads(found.output)["totals"]["cases"] > 0
    folder = tmp_path / "reports"
    assert sonnx("report", target, "--to", folder).exit_code == 0
    assert sonnx("report", target, "--to", folder, "--check").exit_code == 0
    (folder / "support.json").write_text(json.dumps(json.loads((folder / "support.json").read_text()) | {"onnx": "0"}))
    found = sonnx("report", target, "--to", folder, "--check", "--json")
    assert found.exit_code == 1 and "'onnx' differs" in json.loads(found.output)["stale"]


def test_conform_without_a_case_is_no_success() -> None:
    assert sonnx("conform", "--kind", "simple", "-k", "^there_is_no_such_case$").exit_code == 1


def test_conform_on_a_device_that_is_not_there() -> None:
    assert sonnx("conform", "--device", "CUDA:77", "-k", "^test_relu$").exit_code == 3
