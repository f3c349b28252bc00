"""The help of the command line: sections, examples that parse, completion and versions."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from singa.cli._examples import EXAMPLES
from singa.cli._main import COMMANDS, SECTIONS, main

FILES = ("model.onnx", "older.onnx", "digits.npz", "cpu.json", "x.npy", "net.py")


def test_help_has_each_command_in_one_section() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)
    text = CliRunner().invoke(main, ["--help"]).output
    places = [text.index(f"\n{title}:\n") for title in SECTIONS]
    assert places == sorted(places)
    for (title, names), start, end in zip(SECTIONS.items(), places, [*places[1:], len(text)], strict=True):
        assert re.findall(r"^  ([a-z-]+) ", text[start:end], re.MULTILINE) == list(names), title


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_two_examples_that_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in FILES:
        Path(file).write_text("")
    for folder in ("test_data_set_0", "models"):
        Path(folder).mkdir()
    text = CliRunner().invoke(main, [name, "--help"]).output
    examples = EXAMPLES[name]
    assert len(examples) == len(set(examples)) == 2
    for line in examples:
        assert f"  {line}\n" in text
        program, word, *args = shlex.split(re.split(" >>? ", line)[0])
        assert (program, word) == ("sonnx", name)
        command = main.get_command(click.Context(main), name)
        assert command is not None
        command.make_context(name, args)  # raises UsageError for an unknown option or a wrong value


def completed(words: str, current: int) -> list[str]:
    settings = {"_SONNX_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(current)}
    code = "from singa.cli import main; main(prog_name='sonnx')"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["completion", shell])
    assert found.exit_code == 0 and f"_SONNX_COMPLETE={shell}_complete" in found.output
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(found.output)
        subprocess.run([shell, "-n", str(path)], check=True)


def test_completion_completes_commands_and_options() -> None:
    assert completed("sonnx co", 1) == [f"plain,{n}" for n in ("codegen", "compare", "completion", "conform", "convert")]
    assert completed("sonnx run --val", 2) == ["plain,--validate"]


def test_version_names_the_libraries_and_loads_none() -> None:
    code = (
        "import sys\nfrom singa.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
        "assert not {'numpy', 'onnx', 'rich', 'cupy', 'singa_backend'} & set(sys.modules)"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["sonnx", "onnx", "NumPy", "oneDNN", "CuPy", "Python"]
    assert f"onnx {version('onnx')}" in lines and f"NumPy {version('numpy')}" in lines
    found = json.loads(CliRunner().invoke(main, ["--version", "--json"]).output)
    assert found["schema"] == "sonnx.version" and found["versions"]["onnx"] == version("onnx")


def test_onednn_of_a_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_ONEDNN", "off")
    assert "oneDNN SONNX_ONEDNN=off" in CliRunner().invoke(main, ["--version"]).output


@pytest.mark.parametrize("args", [[], ["--json", "run"], ["--nothing"]])
def test_usage_of_the_group(args: list[str]) -> None:
    found = CliRunner().invoke(main, args)
    assert found.exit_code in (0, 2) and "Usage: " in found.output + found.stderr
