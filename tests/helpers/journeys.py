"""The recordings of docs/getting-started: they are read, run in an empty folder with an installed wheel, written and compared.

    python -m tests.helpers.journeys                    record all pages again; build and install the wheel of this checkout first
    python -m tests.helpers.journeys write-an-operator  record only docs/getting-started/write-an-operator.md

A page has two kinds of blocks. A block ```python whose first line is "# NAME.py" is a file. A block ```console has commands after
"$ " and below each one what it printed; "[exit code N]" follows a command that did not exit with 0.  A block ```sh
installs packages, and is not run.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

PROJECT = Path(__file__).parents[2]
NAMES = ("debug-a-model", "fine-tune-a-file", "from-singa", "test-a-backend", "write-an-operator")
PAGES = {name: PROJECT / "docs" / "getting-started" / f"{name}.md" for name in NAMES}
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# (\w+\.py)\n")
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"


@dataclass(frozen=True)
class Rule:
    """Places where two recordings may differ: the groups of `pattern` in a line.

    Attributes:
        pattern: the places; each group is one.
        why: the reason.
        pages: the pages that it holds for.
        rtol: each group is a number that may differ by this part of itself.
        below: each group is a number, in both recordings at most this; one for each group.
        text: each group is a text in which only these characters occur.
    """

    pattern: str
    why: str
    pages: tuple[str, ...]
    rtol: float | None = None
    below: tuple[float, ...] = ()
    text: str = ""

    def allows(self, group: int, recorded: str, found: str) -> bool:
        """Whether the group may be `found` where it was `recorded`."""
        if self.text:
            return set(found) <= set(self.text)
        a, b = float(recorded), float(found)
        if self.below:
            return max(abs(a), abs(b)) <= self.below[group]
        assert self.rtol is not None
        return math.isclose(a, b, rel_tol=self.rtol)


DATA = tomllib.loads((PROJECT / "tests" / "helpers" / "journeys.toml").read_text(encoding="utf-8"))
RULES = [Rule(**{k: tuple(v) if isinstance(v, list) else v for k, v in rule.items()}) for rule in DATA["varies"]]
HIDDEN = re.compile("|".join(rule["pattern"] for rule in DATA["hidden"]))


@dataclass(frozen=True)
class Step:
    """A command of a page and what it printed, or a file.

    Attributes:
        command: the command, or "" for a file.
        output: its lines, or the text of the file.
        line: its line in the page.
        name: the name of the file, or "".
    """

    command: str
    output: str
    line: int
    name: str = ""


def steps(text: str) -> Iterator[Step]:
    """The commands and the files of a page, in order."""
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2)) + 1
        if block[1] == "python":
            named = NAME.match(block[2])
            if not named:
                raise ValueError(f'line {line}: a program must begin with "# NAME.py"')
            yield Step("", block[2], line, named[1])
            continue
        parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", block[2], flags=re.MULTILINE)
        if parts[0]:
            raise ValueError(f"line {line}: a recording must begin with a command")
        for command, output in zip(parts[1::2], parts[2::2], strict=True):
            yield Step(command, output, line)
            line += command.count("\n") + 1 + output.count("\n")


def run(step: Step, folder: Path, python: Path) -> str:
    """What a step prints in the folder, with the interpreter and the commands of an environment; "" for a file."""
    if step.name:
        (folder / step.name).write_text(step.output, encoding="utf-8")
        return ""
    kept = {name: os.environ[name] for name in ("OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    env = {"PATH": os.pathsep.join([str(python.parent), os.defpath]), "HOME": str(folder), "LANG": "C.UTF-8", **kept}
    done = subprocess.run(
        step.command, shell=True, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, encoding="utf-8", timeout=280,
    )  # fmt: skip
    lines = [line.rstrip() for line in done.stdout.splitlines() if not HIDDEN.fullmatch(line)]
    while lines and not lines[-1]:
        lines.pop()
    if done.returncode:
        lines.append(f"[exit code {done.returncode}]")
    return "".join(f"{line}\n" for line in lines)


def same_line(recorded: str, found: str, page: str) -> bool:
    """Whether two lines are equal, but for what a rule of the page allows."""
    if recorded == found:
        return True
    places: list[tuple[int, int, int, int]] = []  # start, number of the rule, end, group
    for number, rule in enumerate(RULES):
        if page in rule.pages:
            for m in re.finditer(rule.pattern, recorded):
                places += [(m.start(g), number, m.end(g), g - 1) for g in range(1, len(m.groups()) + 1) if m[g]]
    at, pattern, used = 0, "", []
    for start, number, end, group in sorted(places):
        if start >= at:
            rule = RULES[number]
            pattern += _spaced(recorded[at:start]) + (f"([{rule.text}]+)" if rule.text else f"({NUMBER})")
            used.append((rule, group, recorded[start:end]))
            at = end
    matched = re.fullmatch(pattern + _spaced(recorded[at:]), found)
    return matched is not None and all(
        rule.allows(group, a, b) for (rule, group, a), b in zip(used, matched.groups(), strict=True)
    )


def _spaced(text: str) -> str:
    """A pattern of the text in which the width of a space between columns, or of a rule below them, may differ."""
    return re.sub(r"(?:\\ )+", r" +", re.sub("─+", "─+", re.escape(text)))


def difference(step: Step, found: str, page: str) -> str:
    """The first line in which an output differs from the recorded one, as a message; "" if none does."""
    recorded, now = step.output.splitlines(), found.splitlines()
    for a, b in zip(recorded, now, strict=False):
        if not same_line(a, b, page):
            return f"recorded: {a}\nnow:      {b}"
    if len(recorded) != len(now):
        return f"{len(recorded)} lines are recorded, now there are {len(now)}:\n{found}"
    return ""


def record(page: Path, python: Path) -> str:
    """Execute a page in an empty folder and return its text with what the commands print now."""
    text = page.read_text(encoding="utf-8")
    outputs: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(text):
            printed = run(step, Path(folder), python)
            outputs.append(step.output if step.name else f"$ {step.command}\n{printed}")
    made = iter(outputs)
    counted = {m.start(): (1 if m[1] == "python" else len(list(steps(m[0])))) for m in BLOCK.finditer(text)}
    return BLOCK.sub(lambda m: f"```{m[1]}\n{''.join(next(made) for _ in range(counted[m.start()]))}```", text)


def installed() -> Path | None:
    """This interpreter, if sonnx is installed in its environment from a wheel; None if it is a checkout."""
    files = {str(f) for f in distribution("sonnx").files or ()}
    return Path(sys.executable) if any(f.startswith("singa/") for f in files) else None


def install(folder: Path) -> Path:
    """Build the wheel of this checkout and install it in a new environment, whose dependencies are those of this one.

    Args:
        folder: an empty folder.

    Returns:
        The interpreter of the environment.
    """
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", *isolation, "-w", folder, PROJECT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    # The dependencies; .pth files are not read there, so that an editable installation stays out.
    (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    wheel = next(folder.glob("sonnx-*.whl"))
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--ignore-installed", wheel], check=True)
    return python


def main(names: list[str]) -> None:
    """Record the pages of these names again, or all."""
    with tempfile.TemporaryDirectory() as folder:
        python = installed() or install(Path(folder))
        for name in names or PAGES:
            PAGES[name].write_text(record(PAGES[name], python), encoding="utf-8")
            print(PAGES[name])


if __name__ == "__main__":
    main(sys.argv[1:])
