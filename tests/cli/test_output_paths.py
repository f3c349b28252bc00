"""`-` as the path of a file that a command writes is standard output, for every such option of every command."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

from singa.cli import main
from singa.cli._common import OutputPath
from singa.cli._main import COMMANDS
from singa_backend.adapters import Adapter, LowRank
from singa_backend.debug import guards

READ = {
    "model", "adapter", "adapters", "first", "second", "runs", "folder", "file", "files", "archive", "data", "inputs",
    "validation", "times", "errors",
}  # fmt: skip
"""The parameters that name what a command reads."""


def paths() -> list[tuple[str, click.Parameter]]:
    found = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)  # type: ignore[attr-defined]  # a group
        assert command is not None
        found += [(name, p) for p in command.params if isinstance(p.type, click.Path)]
    return found


WRITTEN = [(name, p) for name, p in paths() if isinstance(p.type, OutputPath)]
ALONE = [(name, p) for name, p in WRITTEN if isinstance(p.type, OutputPath) and p.type.alone]
FILES = {(name, p.opts[0]) for name, p in WRITTEN if isinstance(p.type, OutputPath) and not p.type.alone}


def test_every_path_is_read_or_written() -> None:
    others = {(name, p.name) for name, p in paths() if not isinstance(p.type, OutputPath)}
    unknown = {(c, n) for c, n in others if not any(p.name == n and (p.type.exists or n in READ) for d, p in paths() if d == c)}
    assert not unknown, f"is this read or written? {unknown}"
    assert len(WRITTEN) >= 30


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "option"), ALONE, ids=[f"{c}-{p.name}" for c, p in ALONE])
def test_a_dash_is_refused_if_it_is_a_folder_or_has_other_files(
    command: str, option: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").touch()
    words = [command, *(["check"] if command == "guard" else []), "m.onnx", option.opts[0], "-"]
    if command in ("conform", "foreign", "fuzz", "gradients", "opsets", "device-check", "sweep"):
        words.remove("m.onnx")
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 2 and not found.stdout, found.output
    kind = "file" if option.type.file_okay else "folder"
    text = " ".join(found.stderr.split())
    assert f"must be a {kind}, got '-': {option.type.alone} (a {kind} of this name is ./-)" in text, text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx"]


# --- what is written --------------------------------------------------------------------------------------------------


def is_model(data: bytes) -> None:
    onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)


def is_page(data: bytes) -> None:
    assert data.startswith(b"<!doctype html>") and data.rstrip().endswith(b"</html>")


def is_archive(data: bytes) -> None:
    assert all(np.isfinite(a).all() for a in np.load(io.BytesIO(data)).values())


def is_json(data: bytes) -> None:
    assert isinstance(json.loads(data), dict)


def is_xml(data: bytes) -> None:
    assert ElementTree.fromstring(data.decode()).tag == "testsuite"


RUNS: dict[tuple[str, str], tuple[str, Callable[[bytes], None]]] = {
    ("compare", "--html"): ("m.onnx --against reference --random 0 --html -", is_page),
    ("conform", "--results"): ("-k ^test_relu$ -n 1 --results -", is_json),
    ("conform", "--junit"): ("-k ^test_relu$ -n 1 --junit -", is_xml),
    ("convert", "--output"): ("m.onnx --opset 13 -o -", is_model),
    ("lower", "--output"): ("m.onnx -o -", is_model),
    ("diff", "--html"): ("m.onnx m.onnx --html -", is_page),
    ("export", "--output"): ("net.py:build --no-run -o -", is_model),
    ("extract", "--output"): ("m.onnx --outputs h -o -", is_model),
    ("fuzz", "--results"): ("--count 2 -k ^Relu -n 1 --results -", is_json),
    ("guard", "--output"): ("write m.onnx -o -", is_json),
    ("guard", "--junit"): ("check m.guard --against sonnx --junit -", is_xml),
    ("inspect", "--html"): ("m.onnx --nodes --html -", is_page),
    ("layout", "--output"): ("images.onnx --to channels_last -o -", is_model),
    ("merge", "--output"): ("m.onnx a.safetensors -o -", is_model),
    ("optimize", "--output"): ("m.onnx -o -", is_model),
    ("profile", "--trace"): ("m.onnx --runs 1 --trace -", is_json),
    ("profile", "--html"): ("m.onnx --runs 1 --html -", is_page),
    ("quantize", "--output"): ("m.onnx --dynamic -o -", is_model),
    ("run", "--output"): ("m.onnx --random 0 -o -", is_archive),
    ("run", "--save-inputs"): ("m.onnx --random 0 --save-inputs -", is_archive),
    ("sanitize", "--output"): ("m.onnx -o -", is_model),
    ("sweep", "--junit"): (". -k ^m.onnx$ --task check -n 1 --junit -", is_xml),
    ("train", "--output"): ("m.onnx --data d.npz -o -", is_model),
    ("train", "--plot"): ("m.onnx --data d.npz -o o.onnx --plot -", is_page),
}
"""A run of each option, and what standard output must then hold."""

PROGRAM = """
from singa import layer, model, tensor

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.dense = layer.Linear(2)

    def forward(self, x):
        return self.dense(x)

def build():
    return Net(), [tensor.random((1, 3))]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of RUNS."""
    head = '<ir_version: 8, opset_import: ["": 17]>'
    dense = "g (float[N,2] x) => (float[N,3] s) <float[2,3] w = {1,2,3,4,5,6}> { h = Relu(x) s = MatMul(h, w) }"
    image = "g (float[1,2,4,4] x) => (float[1,2,4,4] y) { y = Relu(x) }"
    onnx.save(parser.parse_model(f"{head} {dense}"), tmp_path / "m.onnx")
    onnx.save(parser.parse_model(f"{head} {image}"), tmp_path / "images.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((4, 2), np.float32), y=np.zeros(4, np.int64))
    (tmp_path / "net.py").write_text(PROGRAM)
    change = LowRank(np.ones((1, 2), np.float32), np.ones((3, 1), np.float32), 1.0)
    Adapter({"w": change}, {}, "", {}).save(tmp_path / "a.safetensors")
    guards.write_guard(tmp_path / "m.onnx", tmp_path / "m.guard")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_runs_are_those_of_every_option() -> None:
    assert set(RUNS) == FILES


@pytest.mark.parametrize(("command", "option"), RUNS, ids=["".join(k) for k in RUNS])
def test_standard_output_has_the_file_alone(
    command: str, option: str, folder: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    words, judge = RUNS[command, option]
    before = sorted(p.name for p in folder.iterdir())
    found = CliRunner().invoke(main, [command, *shlex.split(words)])
    assert found.exit_code == 0, (found.output, found.exception)
    assert found.stdout == ""  # messages
    judge(capfdbinary.readouterr().out)  # the file, which is written to the handle
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".pyc" and p.name not in ("__pycache__", "o.onnx")) == before
    assert CliRunner().invoke(main, [command, *shlex.split(words), "--json"]).exit_code == 2
    assert not capfdbinary.readouterr().out


@pytest.mark.parametrize("command", sorted({c for c, _ in RUNS}))
def test_two_outputs_on_standard_output_are_refused(command: str, folder: Path) -> None:
    options = [o for c, o in RUNS if c == command]
    words = shlex.split(next(w for (c, _), (w, _) in RUNS.items() if c == command))
    for other, why in [*((o, "goes to standard output already") for o in options[1:]), ("--json", "both go to standard output")]:
        found = CliRunner().invoke(main, [command, *words, other, *["-"] * (other != "--json")])
        assert found.exit_code == 2, found.output
        assert why in " ".join(found.output.split())


def test_the_messages_go_to_standard_error(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    found = CliRunner().invoke(main, ["run", "m.onnx", "--random", "0", "-o", "-"])
    assert found.stderr.splitlines()[0].split()[:2] == ["output", "type"] and "wrote /dev/stdout" in found.stderr
    assert list(np.load(io.BytesIO(capfdbinary.readouterr().out))) == ["s"]


def test_a_pipe_carries_bytes(folder: Path) -> None:
    """As processes: a model from one command to a file, and a page through a pipe that is closed early."""
    program = f"{shlex.quote(sys.executable)} -m singa.cli"
    (folder / "old.txt").write_text("old\n")
    line = f"{program} optimize m.onnx -o - >> old.txt && {program} convert m.onnx --opset 13 -o - | cat > new.onnx"
    subprocess.run(line, shell=True, check=True, capture_output=True, env=os.environ)
    data = (folder / "old.txt").read_bytes()
    assert data.startswith(b"old\n")
    is_model(data.removeprefix(b"old\n"))
    assert onnx.load(folder / "new.onnx").opset_import[0].version == 13
    closed = f"{program} inspect m.onnx --html - | head -c 15"
    done = subprocess.run(closed, shell=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout == "<!doctype html>" and "Traceback" not in done.stderr


def test_a_compared_export_is_the_model_that_ran(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    found = CliRunner().invoke(main, ["export", "net.py:build", "--compare", "-o", "-"])
    assert found.exit_code == 0, (found.output, found.exception)
    is_model(capfdbinary.readouterr().out)


def test_weights_in_a_second_file_are_refused(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    found = CliRunner().invoke(main, ["convert", "m.onnx", "--external-data", "-o", "-"])
    assert found.exit_code == 3 and "nothing can be written next to it" in found.stderr
    assert not capfdbinary.readouterr().out


def test_several_processes_do_not_share_standard_output(folder: Path) -> None:
    found = CliRunner().invoke(main, ["train", "m.onnx", "--data", "d.npz", "-o", "-", "--workers", "2"])
    assert found.exit_code == 2 and "share standard output" in " ".join(found.stderr.split())


def test_a_file_of_this_name_can_be_written(folder: Path) -> None:
    assert CliRunner().invoke(main, ["inspect", "m.onnx", "--html", "./-"]).exit_code == 0
    assert Path("-").read_text().startswith("<!")
