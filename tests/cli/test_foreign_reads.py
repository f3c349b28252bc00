"""What a command reads may be a pipe, a device, a folder or a sparse file of a tebibyte: it is refused at once, in little memory.

Generated from the commands: a parameter that names what is read must have a run here.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.cli.test_output_paths import WRITTEN, folder, paths  # noqa: F401  # a fixture
from tests.helpers import bounded

from singa.cli import main

READS = {
    ("adapter", "adapter"): "{} -o o.onnx_adapter",
    ("adapter", "model"): "a.safetensors --model {} -o o.onnx_adapter",
    ("bisect", "model"): "{} --against reference --random 0",
    ("bisect", "archive"): "m.onnx --against reference --inputs {}",
    ("bisect", "data"): "m.onnx --against reference --data {}",
    ("check", "model"): "{}",
    ("codegen", "model"): "{} -o o.py",
    ("compare", "model"): "{} --against sonnx --random 0",
    ("compare", "archive"): "m.onnx --against sonnx --inputs {}",
    ("compare", "data"): "m.onnx --against sonnx --data {}",
    ("convert", "model"): "{} --opset 13 -o o.onnx",
    ("diff", "first"): "{} m.onnx",
    ("diff", "second"): "m.onnx {}",
    ("export", "archive"): "net.py:build --inputs {} -o o.onnx",
    ("extract", "model"): "{} --outputs h -o o.onnx",
    ("foreign", "folder"): "{} --no-light",
    ("fuzz", "book"): "--count 1 -k ^Relu --ledger {}",
    ("generate", "folder"): "{} --prompt a",
    ("generate", "adapters"): "gpt2 --prompt a --adapter {}",
    ("guard", "file"): "check {} --against sonnx",
    ("guard", "archive"): "write m.onnx --inputs {} -o o.guard",
    ("guard", "data"): "write m.onnx --data {} -o o.guard",
    ("guard", "model"): "check m.guard --against sonnx --model {}",
    ("inspect", "model"): "{}",
    ("inspect", "profile"): "m.onnx --html o.html --profile {}",
    ("inspect", "comparison"): "m.onnx --html o.html --compare {}",
    ("layout", "model"): "{} --to channels_last -o o.onnx",
    ("lower", "model"): "{} -o o.onnx",
    ("merge", "model"): "{} a.safetensors -o o.onnx",
    ("merge", "adapters"): "m.onnx {} -o o.onnx",
    ("optimize", "model"): "{} -o o.onnx",
    ("profile", "model"): "{} --runs 1",
    ("profile", "archive"): "m.onnx --runs 1 --inputs {}",
    ("profile", "data"): "m.onnx --runs 1 --data {}",
    ("quantize", "model"): "{} --dynamic -o o.onnx",
    ("quantize", "data"): "m.onnx --data {} -o o.onnx",
    ("reduce", "model"): "{} --raises SX404 --random 0",
    ("reduce", "archive"): "m.onnx --raises SX404 --inputs {}",
    ("reduce", "data"): "m.onnx --raises SX404 --data {}",
    ("report", "runs"): "{} --to reports",
    ("run", "model"): "{} --random 0",
    ("run", "archive"): "m.onnx --inputs {}",
    ("run", "data"): "m.onnx --data {}",
    ("run", "adapters"): "m.onnx --random 0 --adapter {}",
    ("sanitize", "model"): "{} -o o.onnx",
    ("sweep", "folder"): "{} --task check -n 1",
    ("train", "model"): "{} --data d.npz -o o.onnx",
    ("train", "data"): "m.onnx --data {} -o o.onnx",
    ("train", "validation"): "m.onnx --data d.npz --validation {} -o o.onnx",
}
"""A run of each parameter that names what is read."""

MEBIBYTES, SECONDS = 64.0, 5.0


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS = {
    "pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir, "sparse": sparse,
    "loop": lambda path: path.symlink_to(path.name),
}  # fmt: skip
FOLDERS = {"data", "folder", "adapter", "adapters"}
"""Parameters that may name a folder: an empty one may be accepted."""


def refused(request: list[str]) -> None:
    """Run a command in a folder; raises AssertionError unless it ends with a message and the code of wrong input."""
    place, line = request
    os.chdir(place)
    done = CliRunner().invoke(main, shlex.split(line))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (1, 2, 3) and done.output.strip(), (done.exit_code, done.output)


def test_every_parameter_that_is_read_has_a_run() -> None:
    written = {(command, p.name) for command, p in WRITTEN}
    assert {(command, p.name) for command, p in paths()} - written == set(READS)


@pytest.mark.skipif(not bounded.available, reason="the system does not show the memory of a process")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_file_of_its_kind_is_refused_at_once(kind: str, folder: Path) -> None:  # noqa: F811  # the fixture
    cases, names = [], []
    for (command, parameter), line in READS.items():
        if kind == "folder" and parameter in FOLDERS:
            continue
        path = folder / f"{command}-{parameter}.{'safetensors' if 'adapter' in parameter else 'onnx'}"
        KINDS[kind](path)
        cases.append([str(folder), f"{command} {line.format(path)}"])
        names.append((command, parameter))
    answers = bounded.calls(refused, cases)
    wrong = [
        (name, answer)
        for name, answer in zip(names, answers, strict=True)
        if answer["code"] or answer["mebibytes"] > MEBIBYTES or answer["seconds"] > SECONDS
    ]
    assert not wrong, "\n".join(map(str, wrong))
