"""`-` as the path of something that a command writes is refused before any work, by every such option of every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

from singa.cli import main
from singa.cli._common import OUTPUT, OUTPUT_FOLDER, OUTPUT_PATH
from singa.cli._main import COMMANDS

OUTPUTS = (OUTPUT, OUTPUT_FOLDER, OUTPUT_PATH)

READ = {"model", "first", "second", "runs", "folder", "files", "archive", "data", "inputs", "validation", "times", "errors"}
"""The parameters that name what a command reads."""


def paths() -> list[tuple[str, click.Parameter]]:
    found = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)  # type: ignore[attr-defined]  # a group
        assert command is not None
        found += [(name, p) for p in command.params if isinstance(p.type, click.Path)]
    return found


WRITTEN = [(name, p) for name, p in paths() if p.type in OUTPUTS]


def test_every_path_is_read_or_refuses_a_dash() -> None:
    others = {(name, p.name) for name, p in paths() if p.type not in OUTPUTS}
    unknown = {(c, n) for c, n in others if not any(p.name == n and (p.type.exists or n in READ) for d, p in paths() if d == c)}
    assert not unknown, f"is this read or written? {unknown}"
    assert len(WRITTEN) >= 30


@pytest.mark.parametrize(("command", "option"), WRITTEN, ids=[f"{c}-{p.name}" for c, p in WRITTEN])
def test_a_dash_is_refused(command: str, option: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").touch()
    words = [command, "m.onnx", option.opts[0], "-"]
    if command in ("conform", "foreign", "fuzz", "gradients", "opsets", "device-check"):
        words.remove("m.onnx")
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 2, found.output
    text = " ".join(found.output.replace("│", " ").split())
    assert "got '-'" in text and "standard output" in text, text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx"]


def test_a_file_of_this_name_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(
        parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Neg(x) }'), "m.onnx"
    )
    assert CliRunner().invoke(main, ["inspect", "m.onnx", "--html", "./-"]).exit_code == 0
    assert Path("-").read_text().startswith("<!")
