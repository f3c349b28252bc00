"""The pages name what there is: rooms and their order, tox environments, documents."""

from __future__ import annotations

import configparser
import re
from itertools import groupby
from pathlib import Path

import pytest
from tests.test_arrows import LAYERS

PROJECT = Path(__file__).parents[1]


def text(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("package", LAYERS)
def test_the_rooms_of_the_page_are_those_that_are_checked(package: str) -> None:
    section = text("docs/architecture.md").split(f"\n## `{package}`\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", section, re.MULTILINE)
    found = [
        {name for _, cell in lines for name in re.findall(r"`(\w+)(?:\.py|/)?`", cell)}
        for _, lines in groupby(rows, key=lambda row: int(row[0]))
    ]
    assert found == [set(line.split()) for line in LAYERS[package]]
    assert [int(n) for n, _ in rows] == sorted(int(n) for n, _ in rows)


def test_every_environment_of_tox_is_described() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read_string(text("tox.ini"))
    names = [s.partition(":")[2] for s in tox.sections() if s.startswith("testenv:")]
    assert len(names) > 20
    described = {n for line in re.findall(r"tox -e ([\w,-]+)", text("CONTRIBUTING.md")) for n in line.split(",")}
    assert [n for n in names if n not in described] == []


def test_every_page_is_linked_from_the_readme() -> None:
    pages = {p.name for p in (PROJECT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\]\(docs/([\w-]+\.md)", text("README.md"))) & pages


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    trees = re.findall(r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", text("docs/index.md"), re.DOTALL)
    listed = [name for tree in trees for name in tree.split()]
    docs = PROJECT / "docs"
    pages = {p.relative_to(docs).with_suffix("").as_posix() for p in [*docs.glob("*.md"), *docs.glob("getting-started/*.md")]}
    assert {name for name in listed if not name.startswith("made/")} == pages - {"index"}
    assert len(listed) == len(set(listed))


def test_links_between_pages_lead_to_files() -> None:
    broken = []
    for page in [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("docs/getting-started/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
