"""What an import loads: commands and tools are imported when they are used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import click
import pytest
from tests.helpers.paths import PROJECT

import singa
import singa.cli
import singa_backend
from singa.cli._main import COMMANDS, main
from singa_backend.io import installation

VERSION = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
HEAVY = ("onnx.backend.test", "unittest", "unittest.mock", "asyncio", "numpy.testing", "numpy.f2py")


def loaded(code: str) -> set[str]:
    """The modules that a fresh process has loaded after this code."""
    text = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", ["import singa.sonnx", "import singa_backend", "from singa import autograd, layer, model, opt"])
def test_an_import_loads_no_test_tools(code: str) -> None:
    found = loaded(code)
    assert not found & set(HEAVY)
    assert not {m for m in found if m.startswith(("singa_backend.conform", "singa_backend.debug", "singa.cli", "rich", "click"))}


def test_operators_are_declared_when_a_model_needs_them() -> None:
    code = (
        "import sys\nfrom onnx import parser\nfrom singa_backend.ir.reader import read\n"
        "assert 'singa_backend.operators' not in sys.modules\n"
        'text = \'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "ai.singa": 1]> g (float[2,3] x, float[3] b) \'\n'
        "text += '=> (float[2,3] y) { h = com.microsoft.BiasGelu (x, b) y = Relu (h) }'\n"
        "assert all(n.operator for n in read(parser.parse_model(text)).nodes)"
    )
    assert {"singa_backend.operators", "singa_backend.operators.microsoft"} <= loaded(code)


def test_names_of_the_backend_are_found_on_first_use() -> None:
    code = (
        "import singa_backend, sys; assert 'numpy' not in sys.modules; assert {'prepare', 'Limits'} <= set(dir(singa_backend))\n"
    )
    found = loaded(
        code + "from singa_backend import *; assert prepare is singa_backend.prepare and singa_backend.limits.Limits is Limits"
    )
    assert "singa_backend.backend" in found
    with pytest.raises(AttributeError, match="nothing"):
        singa_backend.nothing  # noqa: B018


def test_help_loads_no_command() -> None:
    code = "from singa.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert {m for m in loaded(code) if m.startswith(("singa", "onnx", "numpy", "rich"))} == {
        "singa", "singa._lazy", "singa.cli", "singa.cli._interrupts", "singa.cli._main", "singa.cli._start",
    }  # fmt: skip


def test_signals_are_handled_before_anything_large_is_imported() -> None:
    """Ctrl-C in an import before `start` would print a traceback."""
    small = loaded("import signal, importlib.machinery")
    assert {m for m in loaded("import singa.cli._start") - small if not m.startswith("singa")} <= {"__future__"}


def test_every_command_has_a_line_of_help() -> None:
    folder = Path(singa.cli.__file__).parent
    assert set(COMMANDS) == {p.stem.replace("_", "-") for p in folder.glob("*.py") if not p.stem.startswith("_")}
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None and command.name == name and command.help
    assert main.get_command(context, "no-such-command") is None


def test_the_public_modules_are_attributes_of_the_package() -> None:
    for name in singa.__all__:
        assert getattr(singa, name) is import_module(f"singa.{name}")
    with pytest.raises(AttributeError, match="nothing"):
        singa.nothing  # noqa: B018


# --- the short name, and another package of the name singa ------------------------------------------------------------


def test_sonnx_is_a_module_of_its_own_name() -> None:
    code = "import sonnx, singa.sonnx; from sonnx import prepare; print(sonnx is singa.sonnx, prepare)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True <")
    assert "sonnx" in loaded("import sonnx") and singa.__version__ == VERSION


def test_the_version_of_a_checkout_is_that_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_installed)
    monkeypatch.setattr(installation, "PYPROJECT", PROJECT / "pyproject.toml")
    assert installation.version() == VERSION
    monkeypatch.setattr(installation, "PYPROJECT", tmp_path / "pyproject.toml")
    for text in ("", "[project]\n", '[project]\nname = "other"\nversion = "7.0"\n', "["):
        (tmp_path / "pyproject.toml").write_text(text)
        assert installation.version() == "unknown", text
    (tmp_path / "pyproject.toml").unlink()
    assert installation.version() == "unknown"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    assert installation.version() == "1.2.3"


OTHERS = {"first": "raise SystemError('its code ran')\n", "empty": "", "overwritten": "__version__ = '5.0.0'\n"}


@pytest.mark.parametrize("other", OTHERS)
def test_another_singa_is_reported(other: str, tmp_path: Path) -> None:
    """It precedes ours on the path, or its files replaced some of ours; the import does not run its code."""
    if other == "overwritten":
        shutil.copytree(Path(singa.__file__).parent, tmp_path / "singa", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "singa").mkdir(exist_ok=True)
    (tmp_path / "singa" / "__init__.py").write_text(OTHERS[other])
    code = (
        f"import sys, warnings; sys.path.insert(0, {str(tmp_path)!r})\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always'); import singa_backend\n"
        "print(*(w.message for w in told if w.category is RuntimeWarning))\n"
        "try: import sonnx\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    for line in lines:
        assert str(tmp_path / "singa") in line and "pip uninstall singa" in line


def test_our_own_singa_is_not_reported() -> None:
    code = (
        "import warnings; warnings.simplefilter('error', RuntimeWarning); import singa_backend, singa, sonnx; import singa.tensor"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
