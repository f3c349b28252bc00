"""The command line as a person meets it: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

from singa.cli import main
from singa.cli._main import COMMANDS
from singa_backend.io.archives import open_arrays

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


def test_run_shows_sequences_and_maps(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 17, "ai.onnx.ml": 1]> g (float[n, 2] x)
        => (seq(map(string, float)) maps, seq(float[n, 1]) parts) {
        maps = ai.onnx.ml.ZipMap <classlabels_strings = ["a", "b"]> (x)  parts = SplitToSequence <axis = 1> (x) }"""
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.array([[0.25, 0.75], [np.nan, -np.inf]], np.float32))
    found = sonnx("run", tmp_path / "m.onnx", "--inputs", tmp_path / "x.npz", "--json")
    maps, parts = json.loads(found.output)["outputs"]
    assert maps == {"name": "maps", "kind": "sequence", "length": 2, "first": ["{a: 0.25, b: 0.75}"], "min": 0.25, "max": 0.75,
                    "nan": 1, "inf": 1}  # fmt: skip
    assert parts == maps | {"name": "parts", "first": ["float[2, 1]", "float[2, 1]"]}
    assert "{a: 0.25, b: 0.75}" in sonnx("run", tmp_path / "m.onnx", "--inputs", tmp_path / "x.npz").output


def test_run_names_the_kind_of_file_that_it_reads(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("x\n1\n")
    found = sonnx("run", model, "--inputs", tmp_path / "x.csv")
    assert found.exit_code == 3 and "must be an .npz file" in found.output and "np.savez" in found.output
    np.savez(tmp_path / "x.npz", x=np.array([["a", None]], object))
    assert "array.astype(str)" in sonnx("run", model, "--inputs", tmp_path / "x.npz").output


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


SIGNED = {"merge --weight", "generate --length-penalty", "train --ignore-index"}
"""Options that take numbers of both signs: an adapter may be subtracted, long texts penalized, -100 marks no class."""


def numeric_options() -> list[Any]:
    commands = [(name, main.get_command(click.Context(main), name)) for name in COMMANDS]
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    return [
        pytest.param(p.type, f"{name} {p.opts[0]}" in SIGNED, id=f"{name} {p.opts[0]}")
        for name, c in commands
        if c
        for p in c.params
        if isinstance(p.type, kinds)
    ]


@pytest.mark.parametrize(("kind", "signed"), numeric_options())
def test_every_number_has_bounds(kind: click.ParamType, signed: bool) -> None:
    for text in ("nan", "inf", "-inf", "²", "", *(() if signed else ("-1", "-1e300", "-" + "9" * 30))):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--size", "foo=2"], "the symbolic sizes of the inputs are: n; got 'foo'"),
        (["--size", "n=²"], "a size must be NAME=SIZE, got 'n=²'"),
        (["--size", "n=2", "--size", "n=3"], "the size 'n' occurs twice"),
        (["--input", "y=y.npy"], "the inputs must be x: float[n, 3]; unknown: 'y'"),
    ],
)
def test_names_and_sizes_of_inputs_are_checked(options: list[str], what: str, model: Path) -> None:
    found = sonnx("run", model, "--random", 0, *options)
    assert found.exit_code == 3 and what in found.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "n=2", "-i", "x=x.npy"], ["-i", "x=a.npy", "-i", "x=b.npy"], ["--limit", "tensor_bytes=" + "9" * 400],
        ["--limit", "iterations=2.5"], ["--limit", "nodes=5", "--limit", "nodes=6"], ["--limit", "deadline=²"],
    ],
)  # fmt: skip
def test_options_that_would_have_no_effect_are_wrong_usage(options: list[str], model: Path) -> None:
    assert sonnx("run", model, *options).exit_code == 2


def test_limits_hold_while_files_are_read(model: Path, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((1000, 3), np.float32))
    found = sonnx("run", model, "--inputs", tmp_path / "x.npz", "--limit", "tensor_bytes=11KiB")
    assert found.exit_code == 3 and "[SX603]" in found.stderr and "2.9" not in found.stderr
    assert sonnx("run", model, "--inputs", tmp_path / "x.npz", "--limit", "tensor_bytes=12000").exit_code == 0


@pytest.mark.parametrize("name", ["file", "args", "allow_pickle", "a/b", "y.npy"])
def test_outputs_of_any_name_are_written(name: str, tmp_path: Path) -> None:
    node = onnx.helper.make_node("Relu", ["x"], [name])
    x, y = (onnx.helper.make_tensor_value_info(n, 1, [3]) for n in ("x", name))
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y]), ir_version=10), tmp_path / "m.onnx")
    found = sonnx("run", tmp_path / "m.onnx", "--random", 0, "-o", tmp_path / "out")
    assert found.exit_code == 0, found.output
    with open_arrays(tmp_path / "out", "SX307") as stored:  # the file has the name that was requested
        assert stored.names == (name,) and stored[name].shape == (3,)


@pytest.mark.parametrize("target", ["./", ".", "there", "none/y.npz"])
def test_a_target_that_is_not_a_file_is_refused_before_the_run(
    target: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())
    found = sonnx("run", model, "--random", 0, "-o", target)
    assert found.exit_code == 3 and "[SX351]" in found.stderr and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"environment": {}}', '{"environment": {"release": "1.6.0", "device": "CPU"}}']
)
def test_a_report_of_other_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    found = sonnx("report", tmp_path / "r.json", "--to", tmp_path / "to")
    assert found.exit_code == 3 and "[SX804]" in found.stderr and not (tmp_path / "to").exists()


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


def test_conform_takes_a_backend_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "vendor.py").write_text(
        "from onnx.reference import ReferenceEvaluator\n"
        "class Rep:\n"
        "    def __init__(self, model):\n        self.session = ReferenceEvaluator(model)\n"
        "    def run(self, inputs):\n"
        "        return self.session.run(None, dict(zip(self.session.input_names, inputs)))\n"
        "class Engine:\n    prepare = staticmethod(lambda model, device='CPU': Rep(model))\n"
        "class Other(Engine):\n    supports_device = staticmethod(lambda device: False)\n"
    )
    start = "import sys; sys.path.remove(''); from singa.cli import start; start()"  # as a console script, without this folder

    def run(backend: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", start, "conform", "--backend", backend, "-k", "^test_relu$", "-n", "1"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    assert run("vendor:Engine").returncode == 0
    for backend, message in {
        "vendor:Engin": "has no 'Engin'; did you mean 'Engine'?", "vendors:Engine": "No module named 'vendors'",
        "vendor:Rep": "neither prepare(model) nor run_model", "vendor:Other": "supports_device(device) returned False",
        "leaves:Engine": "SystemExit: 0",
    }.items():  # fmt: skip
        found = run(backend)
        assert found.returncode == 3 and message in found.stderr and "Traceback" not in found.stderr, found.stderr


def test_conform_on_a_device_that_is_not_there() -> None:
    assert sonnx("conform", "--device", "CUDA:77", "-k", "^test_relu$").exit_code == 3
