"""A program of examples/zoo, run in this process as a user runs it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROGRAMS = Path(__file__).parents[2] / "examples" / "zoo"


class Done(NamedTuple):
    code: Any
    out: str
    err: str


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *options: Any) -> Done:
    """Run a program with these options."""
    monkeypatch.syspath_prepend(PROGRAMS)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
    return Done(ended.value.code, *capsys.readouterr())


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Import a module of the folder."""
    monkeypatch.syspath_prepend(PROGRAMS)
    return __import__(name)
