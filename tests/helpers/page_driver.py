"""Run the blocks of a page as one program, for tests/docs/test_page_programs.py: python page_driver.py blocks.json PROJECT."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from singa.cli._main import main


def execute(words: list[str]) -> tuple[int, str, str]:
    """The exit code, the output and the standard error of a command; sonnx runs in this process, which saves its start."""
    if words[0] == "sonnx":
        done = CliRunner().invoke(main, words[1:])
        return done.exit_code, done.stdout, done.stderr + ("" if isinstance(done.exception, SystemExit) else repr(done.exception))
    if words[0] != "python":
        raise ValueError(f"no program {words[0]!r} is known here: tests/helpers/page_programs.toml needs the reason")
    child = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
    return child.returncode, child.stdout, child.stderr


def plain(text: str, varies: list[str]) -> list[str]:
    """The lines of an output, with # for what varies, and without the widths of columns."""
    for pattern in varies:
        text = re.sub(pattern, "#", text)
    lines = (re.sub(r"([━─=-])\1+", r"\1", " ".join(line.split())) for line in text.splitlines())
    return [line for line in lines if line]


def equal(shown: list[str], found: list[str]) -> bool:
    """Whether an output has the lines that the page shows; "..." are any lines."""
    parts = "\n".join(re.escape(line) if line != "..." else "(.*\n)*?.*" for line in shown)
    return re.fullmatch(parts, "\n".join(found)) is not None


def run_command(step: dict[str, Any], scope: dict[str, Any]) -> str | None:
    """Run a command and return what is wrong with it."""
    exec(compile(step["before"], f"before {step['line']}", "exec"), scope)
    line, _, file = step["line"].partition(" > ")
    code, output, error = execute(shlex.split(line))
    if file:
        Path(file).write_text(output, encoding="utf-8")
        output = ""
    if code != step["exit"]:
        return f"exit code {code} instead of {step['exit']}\n{output}{error}"
    if step["shown"] is not None:
        shown, found = plain(step["shown"], step["varies"]), plain(output, step["varies"])
        if not equal(shown, found):
            return "\n".join(["the page shows", *shown, "", "the output is", *found])
    return None


def run_python(text: str, name: str, scope: dict[str, Any]) -> str | None:
    """Run a block of Python, or write it to the file that its first line names, and return what is wrong with it."""
    if file := re.match(r"# (\w+\.py)\n", text):
        Path(file[1]).write_text(text, encoding="utf-8")
        return None
    if not text.startswith(">>>"):
        exec(compile(text, name, "exec"), scope)
        return None
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(text, scope, name, None, None), clear_globs=False)
    return "the values differ" if runner.summarize().failed else None


if __name__ == "__main__":
    scope: dict[str, Any] = {"__name__": "page", "PROJECT": Path(sys.argv[2])}
    with open(sys.argv[1], encoding="utf-8") as file:
        steps = json.load(file)
    for step in steps:
        problem = run_command(step, scope) if "line" in step else run_python(step["python"], step["name"], scope)
        if problem:
            sys.exit(f"{step['name']}: {step.get('line', '')}\n{problem}")
    print("complete")
