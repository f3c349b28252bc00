"""What is published: the files of the wheel that tox has installed, its README, notices and bill of materials."""

from __future__ import annotations

import json
import os
import re
import tomllib
from importlib.metadata import distribution, metadata, version

import pytest
from tests.helpers.paths import PROJECT

SETTINGS = tomllib.loads((PROJECT / "pyproject.toml").read_text())
WHEEL = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]
INSTALLED = {str(f) for f in distribution("sonnx").files or () if "__pycache__" not in f.parts}
EDITABLE = not any(f.startswith("singa/") for f in INSTALLED)


def expected() -> set[str]:
    """The files of the wheel, by their places in it."""
    found = set()
    for source in map(PROJECT.joinpath, WHEEL["only-include"]):
        files = [source] if source.is_file() else [f for f in source.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
        found |= {f.relative_to(source.parent).as_posix() for f in files}
    for source, target in WHEEL["force-include"].items():
        path = PROJECT / source
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
        found |= {target if f == path else f"{target}/{f.relative_to(path).as_posix()}" for f in files}
    return found


@pytest.mark.skipif(EDITABLE and not os.environ.get("CI"), reason="this is an editable installation, not a wheel")
def test_the_wheel_has_every_file_and_no_other() -> None:
    rest = {f for f in INSTALLED if ".dist-info/" not in f and not f.startswith("..")}  # ../../../bin/sonnx
    assert rest == expected()
    assert any(f.endswith("py.typed") and f.startswith("singa_backend") for f in rest)
    assert any("licenses/LICENSE" in f for f in INSTALLED) and any(f.endswith("bin/sonnx") for f in INSTALLED)


def test_the_metadata() -> None:
    project = SETTINGS["project"]
    assert version("sonnx") == project["version"]
    assert f"version: {project['version']}" in (PROJECT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(project['version'])} \(", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["authors"] == [{"name": "sonnx developers"}]


def readme() -> str:
    """The README as an index shows it, by the settings of hatch-fancy-pypi-readme."""
    hook = SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    parts = [(PROJECT / part["path"]).read_text() if "path" in part else part["text"] for part in hook["fragments"]]
    text = "".join(parts)
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_the_readme_of_an_index_has_no_link_to_a_file() -> None:
    shown = readme()
    relative = r"\]\((?!https?://)|(?:src|href)=[\"'](?!https?://)"
    assert re.search(relative, (PROJECT / "README.md").read_text()) and re.findall(relative, shown) == []
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:md|html|txt|toml))`", shown))
    included = SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert len(named) > 15 and [n for n in named if not (PROJECT / n).is_file() or f"/{n.split('/')[0]}" not in included] == []


def test_the_picture_of_the_readme_is_small_and_an_index_names_it() -> None:
    text = (PROJECT / "README.md").read_text()
    [(description, file)] = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    data = (PROJECT / file).read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 150_000
    assert f"*{description}* (`{file}`)" in readme()


@pytest.mark.skipif(EDITABLE and not os.environ.get("CI"), reason="this is an editable installation, not a wheel")
def test_the_wheel_has_the_readme_the_notices_and_the_bill_of_materials() -> None:
    about = metadata("sonnx")
    assert str(about.get_payload()).strip() == readme().strip() and about["Description-Content-Type"] == "text/markdown"
    ends = {f.partition(".dist-info/")[2] for f in INSTALLED if ".dist-info/" in f}
    assert {"licenses/LICENSE", "licenses/THIRD-PARTY-NOTICES.md", "sboms/sonnx.cdx.json"} <= ends
    assert about["License-Expression"] == "Apache-2.0" and about.get_all("License-File") == ["LICENSE", "THIRD-PARTY-NOTICES.md"]


def test_the_bill_of_materials_and_the_notices_are_not_stale() -> None:
    """`tox -e notices` writes them from the same settings."""
    project = SETTINGS["project"]
    needs: dict[str, tuple[str, set[str]]] = {}
    for extra, texts in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for text in texts:
            name = re.split(r"[<>=!;\[ ]", text)[0]
            if name != "sonnx":
                needs.setdefault(name, (text, set()))[1].add(extra)
    bill = json.loads((PROJECT / "notices" / "sonnx.cdx.json").read_text())
    own = bill["metadata"]["component"]
    assert (own["name"], own["version"], bill["bomFormat"]) == ("sonnx", project["version"], "CycloneDX")
    assert {part["name"] for part in bill["components"]} == set(needs)
    rows = re.findall(r"^\| ([\w-]+) \| ([\w. -]+) \| (.*) \|$", (PROJECT / "THIRD-PARTY-NOTICES.md").read_text(), re.MULTILINE)
    licenses = {name: (text, set(re.findall("`(.*?)`", where))) for name, text, where in rows if name != "package"}
    assert set(licenses) == set(needs)
    for part in bill["components"]:
        need, extras = needs[part["name"]]
        extras = set() if "" in extras else extras
        about = {p["name"]: p["value"] for p in part["properties"]}
        [license] = part["licenses"]
        assert about["python:requirement"].replace('"', "'").replace(" ", "") == need.replace(" ", "")
        assert set(about.get("python:extras", "").split(",")) - {""} == extras == licenses[part["name"]][1]
        assert part["scope"] == ("optional" if extras else "required")
        text = license.get("expression") or license["license"].get("id") or license["license"]["name"]
        assert text == licenses[part["name"]][0]
