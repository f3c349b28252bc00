"""Every block of Python and every command in the README and the pages is executed, or page_programs.toml has the reason."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from tests.helpers.paths import HELPERS, PROJECT

from singa.cli._main import SECTIONS, main

DATA: dict[str, dict[str, Any]] = tomllib.loads((HELPERS / "page_programs.toml").read_text(encoding="utf-8"))
PROGRAMS: dict[str, str] = DATA.pop("programs")
BLOCK = re.compile(r"^( *)```(python|sh|console)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```([^\n]*)\n.*?^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|\s+)#\s.*")

PAGES = sorted(
    path.relative_to(PROJECT).as_posix()
    for path in [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("docs/getting-started/*.md")]
    if path.name != "CHANGELOG.md"
)


class Block(NamedTuple):
    kind: str
    text: str
    name: str


class Command(NamedTuple):
    line: str
    """Without its comment."""

    exit: int
    """Its exit code, after "# exits with"; otherwise 0."""

    shown: str | None
    """The output that the page shows."""


def blocks(page: str) -> list[Block]:
    """The blocks of Python and of commands of a page."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    return [
        Block(found[2], textwrap.dedent(found[3]), f"{page}, line {text.count(chr(10), 0, found.start()) + 1}")
        for found in BLOCK.finditer(text)
    ]


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block: its lines, or in a console those after a prompt, with the lines below them."""
    text = block.text.replace("\\\n", " ")
    parts = text.splitlines() if block.kind == "sh" else re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    for part in parts:
        line, _, shown = part.partition("\n")
        command = " ".join(COMMENT.sub("", line).split())
        if command:
            found = re.search(r"# exits with (\d+)", line)
            yield Command(command, int(found[1]) if found else 0, shown or None)


def lines_of(page: str) -> list[str]:
    """The commands of a page."""
    return [command.line for block in blocks(page) if block.kind != "python" for command in commands(block)]


def first_line(text: str) -> str:
    return text.partition("\n")[0].partition("  #")[0].rstrip()


def program(line: str) -> str:
    """The program that a command runs, without the variables before it."""
    return next(word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word))


def is_left(line: str, entry: dict[str, Any]) -> bool:
    return program(line) in PROGRAMS or any(line == left for left, _ in entry.get("left", ()))


def steps(page: str) -> Iterator[dict[str, Any]]:
    """What is run of a page, for the driver."""
    entry = DATA.get(page, {})
    if "elsewhere" in entry:
        return
    left = {line for line, _ in entry.get("left", ())}
    instead = {line: other for line, other, _ in entry.get("instead", ())}
    before = dict(entry.get("before", ()))
    exits = {line: code for line, code, _ in entry.get("exits", ())}
    for block in blocks(page):
        if block.kind == "python":
            if first_line(block.text) not in left:
                yield {"python": block.text, "name": block.name}
            continue
        for line, code, shown in commands(block):
            if not is_left(line, entry):
                yield {
                    "line": instead.get(line, line),
                    "exit": exits.get(line, code),
                    "shown": shown,
                    "varies": entry.get("varies", []),
                    "before": before.get(line, ""),
                    "name": block.name,
                }


@pytest.mark.parametrize("page", [page for page in PAGES if any(steps(page))])
def test_the_blocks_run(page: str, tmp_path: Path) -> None:
    setup = {"python": DATA.get(page, {}).get("setup", ""), "name": f"the setup of {page}"}
    (tmp_path / "blocks.json").write_text(json.dumps([setup, *steps(page)]), encoding="utf-8")
    shutil.copy(HELPERS / "page_driver.py", tmp_path)  # a program's folder is on its path: that of tests has a "torch"
    command = [sys.executable, "page_driver.py", "blocks.json", PROJECT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "complete" in done.stdout, done.stdout[-2000:] + done.stderr[-6000:]


def test_every_entry_is_of_a_block_that_exists() -> None:
    for page, entry in DATA.items():
        assert page in PAGES, f"no page {page}"
        assert entry.keys() <= {"setup", "left", "elsewhere", "instead", "exits", "before", "varies"}
        python = [first_line(b.text) for b in blocks(page) if b.kind == "python"]
        lines = lines_of(page)
        for *_, reason in (e for key in ("left", "instead", "exits") for e in entry.get(key, ())):
            files = re.findall(r"\b(?:tests|examples|docs)/[\w/.-]*\w", reason)
            assert reason and all((PROJECT / name).exists() for name in files), reason
        for line, *_ in entry.get("left", ()):
            assert python.count(line) + (line in lines) == 1, f"{page}: {line!r} is not a command, or the first line of one block"
            assert not line.startswith("python ") or (PROJECT / line.split()[1]).is_file(), f"{page}: {line}"
        others = [line for key in ("instead", "before", "exits") for line, *_ in entry.get(key, ())]
        assert [line for line in others if line not in lines or is_left(line, entry)] == [], f"not run: {page}"
        if "elsewhere" in entry:
            assert Path(page).stem in (PROJECT / entry["elsewhere"]).read_text(encoding="utf-8")
    used = {program(line) for page in PAGES for line in lines_of(page)}
    assert PROGRAMS.keys() <= used and all(PROGRAMS.values())


def test_most_blocks_are_executed() -> None:
    python = {page: [b for b in blocks(page) if b.kind == "python"] for page in PAGES}
    sonnx = [(page, line) for page in PAGES for line in lines_of(page) if program(line) == "sonnx"]
    left = [line for page, entry in DATA.items() for line, _ in entry.get("left", ())]
    blocks_left = [b.name for entry in python.values() for b in entry if first_line(b.text) in left]
    assert len(blocks_left) < sum(map(len, python.values())) / 4
    assert len(sonnx) > 60 and sum(is_left(line, DATA.get(page, {})) for page, line in sonnx) < len(sonnx) / 4


def test_every_block_has_a_kind() -> None:
    """A block that is neither Python nor commands, nor one of these, would not be looked at."""
    kinds = {found[1] for page in PAGES for found in FENCE.finditer((PROJECT / page).read_text(encoding="utf-8"))}
    assert kinds <= {"python", "sh", "console", "text", "{toctree}", "{raw} html", "{include} made/tolerances.inc"}
    for page in PAGES:
        text = (PROJECT / page).read_text(encoding="utf-8")
        assert len(blocks(page)) == len(re.findall(r"```(?:python|sh|console)\b", text))


def options(command: click.Command) -> set[str]:
    return {"--help", *(name for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-"))}


def test_every_command_that_a_page_names_has_its_options() -> None:
    """In the text too, where commands are not run: `sonnx train --workers 2`."""
    found = 0
    unknown = []
    for page in PAGES:
        text = (PROJECT / page).read_text(encoding="utf-8")
        spans = re.findall(r"`(sonnx [^`]+)`", re.sub(r"\s+", " ", FENCE.sub("", text)))
        for line in [*spans, *(line for line in lines_of(page) if program(line) == "sonnx")]:
            _, name, *words = shlex.split(line)
            if name.startswith("-"):
                known, words = options(main), [name, *words]
            else:
                command = main.get_command(click.Context(main), name)
                known = options(command) if command else set()
            wrong = {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)} - known
            found += 1
            if wrong or not known:
                unknown.append(f"{page}: {line}: {', '.join(wrong)}")
    assert unknown == []
    assert found > 150


def test_the_page_of_commands_has_each_in_its_group() -> None:
    text = (PROJECT / "docs" / "command-line.md").read_text(encoding="utf-8")
    found = {
        title: set(re.findall(r"^sonnx ([\w-]+)", section, re.MULTILINE))
        for title, section in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    }
    found.pop("Exit codes and JSON")
    for title, names in SECTIONS.items():
        assert found.pop(title) - {"check"} == set(names) - {"check"}, title  # "check" is used in two groups
    assert found == {}


def test_environments_of_tox_exist() -> None:
    text = (PROJECT / "tox.ini").read_text(encoding="utf-8")
    lines = [line for page in PAGES for line in lines_of(page)]
    named = {name for line in lines for names in re.findall(r"^tox -e (\S+)", line) for name in names.split(",")}
    assert len(named) > 20 and [n for n in named if f"[testenv:{n}]" not in text and not re.fullmatch(r"py\d+", n)] == []
