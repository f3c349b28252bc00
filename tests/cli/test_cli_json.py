"""The JSON documents of the commands, and the lines that show a user what changed and where the results are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import parser

import singa.cli._common as common
from singa.cli import main
from singa.cli._main import COMMANDS


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y) { a = Identity(x) y = HardSwish(a) }'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    return "m.onnx"


def sonnx(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


DOCUMENTS = {
    "run m.onnx --random 0": "run",
    "check m.onnx": "check",
    "inspect m.onnx": "inspect",
    "doctor": "doctor",
    "device-check --stage smoke": "device-check",
    "device-check --device CPU": "error",
    "compare m.onnx --against reference": "compare",
    "bisect m.onnx --against reference": "bisect",
    "profile m.onnx --runs 1": "profile",
    "guard write m.onnx -o m.guard": "guard.write",
    "optimize m.onnx -o o.onnx": "optimize",
    "optimize --list": "optimize.passes",
    "convert m.onnx -o o.onnx --opset 13": "convert",
    "codegen m.onnx -o m.py": "codegen",
    "gradients ^Neg-13 --points 1 --oracle none": "gradients",
    "gradients --check --to nowhere": "gradients.check",
    "opsets --check --to nowhere": "opsets.check",
    "fuzz --only 3": "fuzz.case",
    "sweep . --task check -n 1": "sweep",
    "tolerances": "tolerances",
    "tolerances Gelu": "tolerances",
    "--version": "version",
    "run nothing.onnx": "error",
    "run": "error",
    "run m.onnx --random x": "error",
    "run m.onnx --nothing": "error",
    "nothing": "error",
    "tolerances Nothing": "error",
    "--nothing": "error",
}


@pytest.mark.parametrize("line", DOCUMENTS)
def test_every_document_names_its_schema(line: str, model: str) -> None:
    found = sonnx(*line.split(), "--json")
    document = json.loads(found.stdout)
    assert list(document)[:2] == ["schema", "schema_version"]
    assert (document["schema"], document["schema_version"]) == (f"sonnx.{DOCUMENTS[line]}", 1)
    if DOCUMENTS[line] == "error":
        assert found.exit_code == (3 if line == "run nothing.onnx" else 2) and document["message"] and not found.stderr


def test_documents_are_written_by_one_function() -> None:
    for path in Path(common.__file__).parent.glob("*.py"):
        if path.name not in ("_common.py", "_main.py"):
            assert not re.search(r"(echo|print|print_json)\(\s*json\.dumps", path.read_text()), path
    assert all("as_json" in {p.name for p in found.params} for n in COMMANDS if n != "completion" for found in [command(n)])


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def test_a_document_keeps_its_own_keys() -> None:
    with pytest.raises(ValueError, match="must not have the keys schema"):
        common.write_json({"schema": "mine"}, name="x")


def test_usage_errors_without_json_are_text(model: str) -> None:
    found = sonnx("run", model, "--nothing")
    assert found.exit_code == 2 and not found.stdout and "No such option" in found.stderr


def test_bisect_agrees_and_differs(model: str, tmp_path: Path) -> None:
    document = json.loads(sonnx("bisect", model, "--against", "reference", "--json").stdout)
    assert document["diverges"] is False and document["against"] == "reference"
    other = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y) { a = Identity(x) y = Neg(a) }'
    )
    onnx.save(other, tmp_path / "other.onnx")
    found = sonnx("bisect", model, "--against", "other.onnx", "--to", "r", "--json")
    assert found.exit_code == 1 and json.loads(found.stdout)["diverges"] is True


def test_run_without_inputs_offers_random_ones(model: str) -> None:
    found = sonnx("run", model)
    assert found.exit_code == 3 and "x: float[n, 3]" in found.stderr and "--random 0" in found.stderr
    assert "--random 0" in json.loads(sonnx("run", model, "--json").stdout)["hint"]


def test_run_needs_no_inputs_if_the_model_has_none(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g () => (float[1] y) { y = Constant<value_floats = [1.0]>() }'
    onnx.save(parser.parse_model(text), tmp_path / "c.onnx")
    assert sonnx("run", tmp_path / "c.onnx").exit_code == 0


def test_the_last_line_tells_where_the_results_are(model: str) -> None:
    assert sonnx("run", model, "--random", 0, "-o", "y.npz").output.splitlines()[-1] == "wrote y.npz"
    found = sonnx("conform", "--kind", "simple", "-k", "sign_model", "--results", "r.json", "--junit", "r.xml", "-n", 1)
    assert found.output.splitlines()[-2:] == ["wrote r.json", "wrote r.xml"]
    assert sonnx("gradients", "^Neg-13", "--points", 1, "--oracle", "none", "--to", "r").output.splitlines()[-2:] == [
        "wrote r/gradients.json",
        "wrote r/gradients.md",
    ]


@pytest.mark.parametrize("change", ["optimize", "convert"])
def test_changes_are_told_in_few_lines(change: str, tmp_path: Path) -> None:
    """Every node has an operator that opset 12 composes of others, and a copy that the passes remove."""
    ops = ["HardSwish", "Relu", "Neg", "Abs", "Exp", "Floor", "Ceil", "Sin", "Cos", "Tan", "Atan", "Sigmoid"]
    nodes = "".join(f"a{i} = Identity(b{i - 1}) b{i} = {op}(a{i})\n" for i, op in enumerate(ops, 1))
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[3] b0) => (float[3] b{len(ops)}) {{ {nodes} }}'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    args = [change, tmp_path / "m.onnx", "-o", tmp_path / "o.onnx", *(["--opset", 12] if change == "convert" else [])]
    short, whole = sonnx(*args).stdout.splitlines(), sonnx(*args, "-v").stdout.splitlines()
    assert 3 <= len(short) <= 12 and len(short) < len(whole)
    assert any("24 -> " in line for line in short) and any(
        line.split()[:1] == ["HardSwish"] or "Identity" in line for line in short
    )
