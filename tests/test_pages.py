"""The pages name what there is: rooms and their order, tox environments, documents."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from tests.test_arrows import LAYERS

PROJECT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```[^\n]*\n.*?^\1```$", re.MULTILINE | re.DOTALL)


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


PAGES = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("docs/getting-started/*.md"), *PROJECT.glob("reports/*.md")]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and MyST make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.add(next(s for s in [slug, *(f"{slug}-{i}" for i in range(1, 99))] if s not in found))
    return found


def test_links_between_pages_lead_to_files_and_headings() -> None:
    broken, count = [], 0
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        links = re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text) + re.findall(r"^\[[^\]]+\]: (?!\w+:)(\S+?)()$", text, re.MULTILINE)
        for target, anchor in links:
            path = (page.parent / target) if target else page
            count += 1
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []
    assert count > 140


def deprecated_names() -> set[str]:
    """What warns of its deprecation: the name of the function, class or module with the warning, and the keys of `old_names`."""
    found = set()
    for path in [*PROJECT.glob("backend/**/*.py"), *PROJECT.glob("frontend/**/*.py")]:
        source = path.read_text(encoding="utf-8")
        if "DeprecationWarning" not in source and "old_names(" not in source:
            continue
        tree = ast.parse(source)
        inside = {
            id(node): (scope, owner)
            for owner in ast.walk(tree)
            for scope in ast.iter_child_nodes(owner)
            if isinstance(scope, ast.FunctionDef)
            for node in ast.walk(scope)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if any(isinstance(a, ast.Name) and a.id == "DeprecationWarning" for a in call.args) and path.name != "deprecation.py":
                scope, owner = inside.get(id(call), (None, None))
                name = path.stem if scope is None else scope.name
                found.add(owner.name if name == "__init__" and isinstance(owner, ast.ClassDef) else name)
            if isinstance(call.func, ast.Name) and call.func.id == "old_names" and isinstance(call.args[1], ast.Dict):
                found |= {ast.literal_eval(key) for key in call.args[1].keys if key}
    return found


def test_the_page_of_compatibility_has_every_deprecated_name() -> None:
    section = text("docs/compatibility.md").split("\n| deprecated | use |\n")[1]
    rows = re.findall(r"^\| `([\w.]+)`", section, re.MULTILINE)
    assert {name.rpartition(".")[2] for name in rows} == deprecated_names()


def test_the_page_of_compatibility_has_the_versions_of_the_package() -> None:
    page = text("docs/compatibility.md")
    project = tomllib.loads(text("pyproject.toml"))["project"]
    python = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    least = {d.partition(">=")[0]: d.partition(">=")[2] for d in project["dependencies"]}
    assert f"| Python | {project['requires-python'].removeprefix('>=')} or newer | CPython {', '.join(python)} |" in page
    assert f"| onnx | {least['onnx']} or newer | {re.search(r'onnx==([0-9.]+)', text('tox.ini'))[1]} |" in page
    assert f"| NumPy | {least['numpy']} or newer |" in page
