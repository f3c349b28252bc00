"""The pages agree with the project: rooms and their order, tox environments, paths, links, public and deprecated names."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest
from packaging.version import Version
from tests.docs.test_docstrings import MODULES, public_values
from tests.helpers.paths import PROJECT
from tests.test_arrows import FOLDERS, LAYERS

FENCE = re.compile(r"^( *)```[^\n]*\n.*?^\1```$", re.MULTILINE | re.DOTALL)


def text(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


ROOM = re.compile(r"^\* (\d+) `(\w+)(/|\.py)`: (.*(?:\n  .*)*)$", re.MULTILINE)
"""An entry of docs/architecture.md: the layer, the room, and its text."""


@pytest.mark.parametrize("package", LAYERS)
def test_the_rooms_of_the_page_are_those_that_are_checked(package: str) -> None:
    section = text("docs/architecture.md").split(f"\n## `{package}`\n")[1].split("\n## ")[0]
    entries = ROOM.findall(section)
    found = [{name for _, name, *_ in room} for _, room in groupby(entries, key=lambda entry: int(entry[0]))]
    assert found == [set(line.split()) for line in LAYERS[package]]
    layers = [int(layer) for layer, *_ in entries]
    assert sorted(set(layers)) == list(range(len(LAYERS[package]))) and layers == sorted(layers)
    root = PROJECT / FOLDERS[package] / package
    assert [name for _, name, kind, _ in entries if not (root / f"{name}{kind}").exists()] == []
    assert [name for _, name, _, words in entries if words.count("\n") > 2] == []
    assert section.count("\n* ") == len(entries)


def test_each_release_of_the_changelog_has_lists_of_single_lines() -> None:
    title, *releases = text("CHANGELOG.md").split("\n## ")
    assert title == "# Changelog\n" and releases
    for release in releases:
        name, *sections = release.strip("\n").split("\n### ")
        kinds = [section.partition("\n")[0] for section in sections]
        assert kinds and kinds == [kind for kind in ("Added", "Changed", "Fixed") if kind in kinds], name
        entries = [line for section in sections for line in section.splitlines()[1:] if line]
        assert [line for line in entries if not line.startswith("* ") or len(line) > 145] == []


def test_every_environment_of_tox_is_described() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read_string(text("tox.ini"))
    names = [s.partition(":")[2] for s in tox.sections() if s.startswith("testenv:")]
    assert len(names) > 20
    described = {n for line in re.findall(r"tox -e ([\w,-]+)", text("CONTRIBUTING.md")) for n in line.split(",")}
    assert [n for n in names if n not in described] == []


def test_the_oldest_environment_has_the_lower_bounds_of_the_project() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read_string(text("tox.ini"))
    pinned = {name: Version(v) for name, v in re.findall(r"^([\w.-]+)==(\S+)$", tox["testenv:oldest"]["deps"], re.MULTILINE)}
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = ("text", "image", "jit", "plot", "tensorboard", "generate", "lora", "oracle", "mpi")
    required = [*project["dependencies"], *(p for name in extras for p in project["optional-dependencies"][name])]
    lowest = {found[1]: Version(found[2]) for p in required if (found := re.fullmatch(r"([\w.-]+)(?:<[\d.]+,)?>=([\d.]+)", p))}
    assert pinned == lowest


def test_every_path_that_contributing_names_exists() -> None:
    """Each path whose first folder is one of the project, in the root, in backend/ or in frontend/; "*" stands for any name."""
    page = re.sub(r"\]\([^)]*\)|~/\S+", "", text("CONTRIBUTING.md"))  # links have a test of their own
    named = {n.rstrip(".") for n in re.findall(r"(?<![\w./<-])[\w.-]+/(?:[\w.*-]+/?)*", page)}
    roots = [PROJECT, PROJECT / "backend", PROJECT / "frontend"]
    ours = {n for n in named if any((root / n.partition("/")[0]).is_dir() for root in roots) and not n.startswith("build/")}
    assert len(ours) > 60
    assert sorted(n for n in ours if not any([*root.glob(n.rstrip("/"))] for root in roots)) == []
    loose = set(re.findall(r"`([\w-]+\.(?:py|toml|ini|md|txt))`", page))
    assert [n for n in loose if not (PROJECT / n).is_file()] == []


def test_contributing_shows_each_kind_of_change() -> None:
    """A row for each: a file to begin with, and a test or an example."""
    table = text("CONTRIBUTING.md").split("\n| to add | look in | shown by |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
    assert [kind for kind, *_ in rows] == [
        "an operator", "an operator of onnxruntime", "an operator version", "a kernel", "a fusion", "a gradient", "a device",
        "an optimizer", "a command", "an importer", "a report",
    ]  # fmt: skip
    for _, files, shown in rows:
        assert re.search(r"`(?:singa|singa_backend)/[\w/]+\.py`", files) and re.search(r"`tests/[\w/]+\.py`", shown)
    tests = (PROJECT / "tests" / "docs" / "test_extending.py").read_text(encoding="utf-8")
    names = {name for _, _, shown in rows for name in re.findall(r"`(\w+)` in `tests/docs/test_extending", shown)}
    assert names and all(f"class {n}(" in tests or f"def {n}(" in tests or f'click.command("{n}")' in tests for n in names)


def test_every_page_is_linked_from_the_readme_or_the_pages_of_features_and_commands() -> None:
    pages = {p.name for p in (PROJECT / "docs").glob("*.md")}
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", text("README.md")))
    for name in ("features.md", "command-line.md"):
        assert name in linked
        linked |= set(re.findall(r"\]\(([\w-]+\.md)", text(f"docs/{name}")))
    assert pages - linked == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    trees = re.findall(r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", text("docs/index.md"), re.DOTALL)
    listed = [name for tree in trees for name in tree.split()]
    docs = PROJECT / "docs"
    pages = {
        p.relative_to(docs).with_suffix("").as_posix() for p in [*docs.glob("*.md"), *docs.glob("[!_m]*/*.md")]
    }  # not docs/made
    assert {name for name in listed if not name.startswith("made/")} == pages - {"index"}
    assert len(listed) == len(set(listed))


PAGES = [p for folder in ("", "docs/", "docs/getting-started/", "reports/") for p in PROJECT.glob(f"{folder}*.md")]


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
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            path = (page.parent / target) if target else page
            count += 1
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []
    assert count > 140


def names_of(page: Path) -> set[str]:
    """The names of this project in a page: singa.tensor.Tensor, and those of `from singa.tensor import Tensor`."""
    content = page.read_text(encoding="utf-8")
    found = set(re.findall(r"(?<![\w./-])(singa(?:_backend)?(?:\.\w+)+)", content))
    for module, names in re.findall(r"^ *from (singa[\w.]*) import ([^\n(#]+)", content, re.MULTILINE):
        found |= {f"{module}.{name.partition(' as ')[0].strip()}" for name in names.split(",")}
    return found


def test_what_the_pages_name_is_in_the_reference() -> None:
    public = {*MODULES, *(f"{module}.{name}" for module in MODULES for name in public_values(import_module(module)))}
    internal = {"CONTRIBUTING.md", "CHANGELOG.md", "architecture.md", "compatibility.md"}  # these have internal or old names too
    pages = [page for page in PAGES if page.name not in internal and page.parent.name != "reports"]
    found = {(page.name, name) for page in pages for name in names_of(page)}
    assert len(found) > 50
    unknown = []
    for page, name in sorted(found):
        known = next((p for p in (name, name.rpartition(".")[0]) if p in public), None)  # a name, or a member of one
        if known is None or (known != name and known in MODULES):
            unknown.append(f"{page}: {name}")
        elif known != name:
            module, _, owner = known.rpartition(".")
            assert hasattr(getattr(import_module(module), owner), name.rpartition(".")[2]), name
    assert unknown == []


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
