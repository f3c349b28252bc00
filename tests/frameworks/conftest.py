"""For the tests of the importers: an empty folder, in which nothing may be left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder, scratch = tmp_path / "here", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    yield
    of_autograph = ("__autograph", "__pycache__")  # TensorFlow's, of every function that it traces
    left = [n for n in os.listdir(scratch) if not n.startswith(of_autograph)]
    assert os.listdir(folder) == [] and left == []
