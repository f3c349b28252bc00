"""`sonnx export` and `sonnx convert`: every option of the Python calls, as processes of their own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import checker
from tests.helpers.paths import TESTS

from singa import sonnx
from singa._onnx.export_options import Options
from singa.cli import main
from singa_backend.errors import InvalidInput

PROGRAM = """
import numpy as np
from singa import autograd, layer, model, tensor


class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.conv = layer.Conv2d(4, 3, padding=1)
        self.bn = layer.BatchNorm2d()
        self.drop = layer.Dropout(0.4)
        self.fc = layer.Linear(5)

    def forward(self, x):
        return self.fc(self.drop(autograd.flatten(autograd.relu(self.bn(self.conv(x))))))


def build():
    net = Net()
    x = tensor.from_numpy(np.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8))
    x.name = "x"
    net.compile([x], is_train=False)
    return net, [x]


made = build()[0]
nothing = 3
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def run(*args: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.mark.row("E21")
def test_export_check_and_inspect_as_processes(program: Path, tmp_path: Path) -> None:
    def sonnx_(*args: Any) -> str:
        command = [sys.executable, "-m", "singa.cli", *map(str, args)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout

    said = sonnx_("export", "net.py:build", "-o", "net.onnx", "--opset", 13, "--dynamic-axes", "x=0:batch", "--compare")
    assert said.count("agrees") == 8 and "DIFFERS" not in said
    assert json.loads(sonnx_("check", "net.onnx", "--json"))["problems"] == []
    assert "BatchNormalization" in sonnx_("inspect", "net.onnx")
    checker.check_model(str(tmp_path / "net.onnx"), full_check=True)


@pytest.mark.row("E1", "E21")
def test_every_option_of_python_is_one_of_the_command() -> None:
    names = {f.name for f in dataclasses.fields(Options)}
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in ("export", "convert")]
    export, convert = ({p.name for p in command.params} for command in commands if command is not None)
    assert names <= export
    assert names - convert == {"training", "input_names", "output_names", "dynamic_axes", "run"}


@pytest.mark.row("E1")
def test_every_option_of_the_command_has_its_effect(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.onnx"
    target = f"{program}:build"

    def made(*options: Any) -> onnx.ModelProto:
        for old in tmp_path.glob("made.onnx*"):
            old.unlink()
        result = run("export", target, "-o", path, *options)
        assert result.exit_code == 0, result.output
        return onnx.load(path)

    def sizes(v: Any) -> list[Any]:
        return [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]

    plain = made()
    assert plain.opset_import[0].version == 18 and not plain.metadata_props and not (tmp_path / "made.onnx.data").exists()
    assert made("--opset", 9).opset_import[0].version == 9
    assert {(o.domain, o.version) for o in made("--extra-opset", "my.domain", 3).opset_import} >= {("my.domain", 3)}
    assert [n.op_type for n in made("--training").graph.node].count("Dropout") == 1
    named = made("--input-name", "image", "--output-name", "score").graph
    assert (named.input[0].name, named.output[0].name) == ("image", "score")
    assert sizes(made("--dynamic-axes", "x=0:batch").graph.input[0]) == ["batch", 3, 8, 8]
    assert sizes(made("--shape", "x=5,3,8,8").graph.output[0]) == [5, 5]
    assert len(made("--keep-initializers-as-inputs").graph.input) == 1 + len(plain.graph.initializer)
    assert len(made("--optimize").graph.node) < len(plain.graph.node)
    made("--external-data")
    assert (tmp_path / "made.onnx.data").exists()
    labelled = made("--metadata", "author=nobody", "--metadata", "a=b=c", "--doc", "a net")
    assert {p.key: p.value for p in labelled.metadata_props} == {"author": "nobody", "a=b": "c"}
    assert labelled.doc_string == "a net"
    assert [o.domain for o in made("--no-check").opset_import] == [""]


@pytest.mark.parametrize("name", ["build", "Net", "made"])
def test_what_a_program_may_name(name: str, program: Path, tmp_path: Path) -> None:
    result = run("export", f"{program}:{name}", "-o", tmp_path / "o.onnx", "-i", "x=float32[2,3,8,8]", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["operations"]["Conv"] == 1
    assert onnx.load(tmp_path / "o.onnx").graph.input[0].name == "x"


def test_an_input_that_is_too_large_to_draw_is_refused(program: Path, tmp_path: Path) -> None:
    result = run("export", f"{program}:Net", "-o", tmp_path / "o.onnx", "-i", "x=float32[100000000,1000000]", "--json")
    assert result.exit_code == 3 and json.loads(result.output)["error"] == "ResourceExhausted"


def test_inputs_from_an_archive_of_a_model_in_a_module(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "in.npz", picture=np.zeros((1, 3, 8, 8), np.float32))
    result = run("export", "net:Net", "-o", "o.onnx", "--inputs", "in.npz")
    assert result.exit_code == 0, result.output
    assert onnx.load("o.onnx").graph.input[0].name == "picture"


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        ("net.py", 2, "must be PROGRAM:NAME"), ("net.py:Nothing", 3, "has no 'Nothing'"),
        ("net.py:nothing", 3, "must be a Model or return one"),
        ("none.py:Net", 3, "no file"), ("no_such_module_here:Net", 3, "no module"), ("net.py:Net", 3, "inputs"),
    ],
)  # fmt: skip
def test_what_is_refused(target: str, code: int, says: str, program: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("export", target, "-o", "o.onnx")
    assert result.exit_code == code and says in result.output, result.output
    assert not Path("o.onnx").exists()


@pytest.mark.parametrize("wrong", ["x=float32", "x=float99[2]", "x"])
def test_an_input_that_is_no_declaration(wrong: str, program: Path, tmp_path: Path) -> None:
    result = run("export", f"{program}:Net", "-o", tmp_path / "o.onnx", "-i", wrong)
    assert result.exit_code == 2 and "must be " in result.output and "got '" in result.output


@pytest.mark.row("E21")
def test_convert(program: Path, tmp_path: Path) -> None:
    made, path = tmp_path / "a.onnx", tmp_path / "b.onnx"
    assert run("export", f"{program}:build", "-o", made).exit_code == 0
    result = run("convert", made, "-o", path, "--opset", 8, "--shape", "x=7,3,8,8", "--json")
    assert result.exit_code == 0 and json.loads(result.output)["opset"] == 8
    x = np.random.default_rng(0).standard_normal((7, 3, 8, 8)).astype(np.float32)
    a = sonnx.prepare(sonnx.convert(str(made), shape_override={"x": [7, 3, 8, 8]})).run([x])[0]
    np.testing.assert_allclose(sonnx.prepare(str(path)).run([x])[0], a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "option", [{"training": True}, {"input_names": ["a"]}, {"output_names": ["a"]}, {"dynamic_axes": {"x": [0]}}]
)
def test_convert_says_what_it_does_not_do(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"convert does not take {next(iter(option))}"):
        sonnx.convert(next((TESTS / "models").glob("*.onnx")), **option)


def test_convert_names_what_the_opset_lacks(tmp_path: Path) -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Erf(x) }')
    onnx.save(model, tmp_path / "erf.onnx")
    result = run("convert", tmp_path / "erf.onnx", "-o", tmp_path / "old.onnx", "--opset", 8)
    assert result.exit_code == 3 and "the minimum opset is 9" in result.output.replace("\n", " ")
    assert not (tmp_path / "old.onnx").exists()


@pytest.mark.parametrize("option", ["--metadata k=1", "--shape x=1,3,8,8", "--dynamic-axes x=0"])
def test_a_name_that_occurs_twice(option: str, program: Path, tmp_path: Path) -> None:
    result = run("export", f"{program}:build", "-o", tmp_path / "o.onnx", *option.split(), *option.split())
    assert result.exit_code == 2 and "occurs twice" in result.output
