"""Every block of Python in the README and the pages is executed, or tests/page_programs.toml has the reason why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[1]
DATA: dict[str, dict[str, Any]] = tomllib.loads((PROJECT / "tests" / "page_programs.toml").read_text(encoding="utf-8"))
BLOCK = re.compile(r"^( *)```(python|sh)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

PAGES = sorted(
    path.relative_to(PROJECT).as_posix()
    for path in [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("docs/getting-started/*.md")]
    if path.name != "CHANGELOG.md"
)

DRIVER = '''
"""Run the blocks of a page, [kind, text, name of the block], as one program; the commands of a shell in processes."""

import doctest
import json
import re
import shlex
import subprocess
import sys

from click.testing import CliRunner

from singa.cli._main import main


def command(words):
    """The exit code and the output of a command; sonnx runs in this process, which saves its start."""
    if words[0] == "sonnx":
        done = CliRunner().invoke(main, words[1:])
        return done.exit_code, f"{done.output}{done.exception or ''}"
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr
    raise ValueError(f"no program {words[0]!r} is known here")


scope = {"__name__": "page"}
for kind, text, name in json.load(open("blocks.json", encoding="utf-8")):
    if kind == "sh":
        for line in text.replace("\\\\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            expected = int((re.search(r"# exits with (\\d+)", line) or [0, 0])[1])
            code, output = command(words)
            if code != expected:
                sys.exit(f"{name}: {line}: exit code {code}\\n{output}")
    elif text.startswith(">>>"):
        runner = doctest.DocTestRunner()
        runner.run(doctest.DocTestParser().get_doctest(text, scope, name, None, None), clear_globs=False)
        if runner.summarize().failed:
            sys.exit(name)
    else:
        exec(compile(text, name, "exec"), scope)
print("complete")
'''


def blocks(page: str) -> list[tuple[str, str, str]]:
    """The kind, text and name of each block of Python and shell commands of a page."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    return [
        (found[2], textwrap.dedent(found[3]), f"{page}, line {text.count(chr(10), 0, found.start()) + 1}")
        for found in BLOCK.finditer(text)
    ]


def first_line(text: str) -> str:
    return text.partition("\n")[0].partition("  #")[0].rstrip()


def executed(page: str) -> list[tuple[str, str, str]]:
    """The blocks of a page that are run here."""
    entry = DATA.get(page, {})
    if "elsewhere" in entry:
        return []
    left = {line for line, _ in entry.get("left", ())}
    return [b for b in blocks(page) if (first_line(b[1]) not in left if b[0] == "python" else entry.get("shell"))]


@pytest.mark.parametrize("page", [page for page in PAGES if executed(page)])
def test_the_blocks_run(page: str, tmp_path: Path) -> None:
    program = [("python", DATA.get(page, {}).get("setup", ""), f"the setup of {page}"), *executed(page)]
    (tmp_path / "blocks.json").write_text(json.dumps(program), encoding="utf-8")
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    command = [sys.executable, "driver.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "complete" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


def test_every_entry_is_of_a_block_that_exists() -> None:
    for page, entry in DATA.items():
        assert page in PAGES, f"no page {page}"
        assert entry.keys() <= {"setup", "left", "elsewhere", "shell"}
        assert all(reason for _, reason in entry.get("left", ()))
        lines = [first_line(text) for kind, text, _ in blocks(page) if kind == "python"]
        assert [line for line, _ in entry.get("left", ()) if lines.count(line) != 1] == [], (
            f"not the first line of one block of {page}"
        )
        if "elsewhere" in entry:
            assert Path(page).name in (PROJECT / entry["elsewhere"]).read_text(encoding="utf-8")


def test_most_blocks_are_executed() -> None:
    python = {page: [b for b in blocks(page) if b[0] == "python"] for page in PAGES}
    assert all((PROJECT / page).read_text(encoding="utf-8").count("```python\n") == len(found) for page, found in python.items())
    left = sum(len(entry.get("left", ())) for entry in DATA.values())
    assert left < sum(map(len, python.values())) / 4
