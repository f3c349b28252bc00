"""The contents of the wheel: every file of the packages and the data, and no other file; of the wheel that tox has installed."""

from __future__ import annotations

import os
import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
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
    assert project["authors"] == [{"name": "sonnx developers"}]
