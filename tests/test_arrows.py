"""Imports run down: every file imports files of its own room or of a lower layer, and no files import each other in a circle.

A room is a file or a folder directly in a package. Every import counts, also those in functions, under TYPE_CHECKING, of the
package itself, and `import_module` of a string.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tests.helpers.code_size import nodes_of

PROJECT = Path(__file__).parents[1]

LAYERS = {
    "singa_backend": [
        "rendering",
        "choices deadline deprecation domains errors machine",
        "dtypes limits",
        "io",
        "proto devices comparison",
        "ir collectives",
        "elementwise",
        "gemm",
        "rewriting runtime kernels",
        "interpreters passes",
        "adapters autodiff plans",
        "operators",
        "session",
        "opsets backend doctor inspection nodes",
        "engines quantization",
        "conform debug",
        "sweep",
        "files oracle",
        "_names",
        "_lazy",
    ],
    "singa": [
        "device",
        "_core",
        "_autograd",
        "_layers _training",
        "callbacks data image_tool initializer layer model opt quantization singa_wrap snapshot tape tensor utils",
        "_onnx autograd",
        "_codegen _generation _importers exporting",
        "codegen sonnx",
        "_lazy cli",
    ],
}
"""The rooms of each package, lowest first; those of one line do not import each other.  The package itself is above them.

`files` and `oracle` are modules that moved: they re-export names under the old path."""

FOLDERS = {"singa_backend": "backend", "singa": "frontend"}

packages = pytest.mark.parametrize("package", LAYERS)


@cache
def files(package: str) -> dict[str, Path]:
    """The path of every module of a package."""
    root = PROJECT / FOLDERS[package]
    found = {".".join(p.relative_to(root).with_suffix("").parts): p for p in (root / package).rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


@cache
def imports(package: str) -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports."""
    known = files(package)
    found = {name: set(_imported(package, path)) - {name} for name, path in known.items()}
    unknown = [f"{name} -> {n}" for name, targets in found.items() for n in targets - known.keys()]
    assert not unknown, f"imports of modules that do not exist: {unknown}"
    return found


def _imported(package: str, path: Path) -> Iterator[str]:
    own = path.relative_to(PROJECT / FOLDERS[package]).with_suffix("").parts
    for node in nodes_of(path):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = ".".join([*(own[: -node.level] if node.level else ()), *filter(None, [node.module])])
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in files(package) else base for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            text = _leading_text(node.args[0])
            level = len(text) - len(text.lstrip("."))
            names = [".".join([*(own[:-level] if level else ()), *filter(None, text.lstrip(".").split("."))])]
            if names[0] not in files(package) or names[0] == package:  # computed: every module that the file names may be meant
                names = [s for s in _strings(path) if s in files(package)]
        yield from (n for n in names if n == package or n.startswith(package + "."))


def _strings(path: Path) -> list[str]:
    """The strings of a file, in which a computed import finds its module."""
    return [n.value for n in nodes_of(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _leading_text(node: ast.expr) -> str:
    """The text of a string, or the part of an f-string before its first value."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def rooms(package: str) -> list[str]:
    return sorted({room(name) for name in files(package)} - {""})


def floors(package: str) -> dict[str, int]:
    """The layer of each room; the package itself is above them all."""
    lines = LAYERS[package]
    return {"": len(lines), **{name: i for i, line in enumerate(lines) for name in line.split()}}


@packages
def test_every_room_has_a_layer(package: str) -> None:
    missing = set(rooms(package)) - floors(package).keys()
    assert not missing, f"add {', '.join(sorted(missing))} of {package} to a line of LAYERS in {Path(__file__).name}"


@packages
def test_imports_run_down(package: str) -> None:
    floor = floors(package)
    up = [
        f"{name} -> {target}"
        for name, targets in imports(package).items()
        for target in targets
        if room(name) != room(target) and floor.get(room(target), 0) >= floor.get(room(name), len(floor))
    ]
    assert not up, "\n".join(sorted(up))


@packages
def test_no_files_import_each_other(package: str) -> None:
    try:
        TopologicalSorter(imports(package)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_backend_does_not_import_the_frontend() -> None:
    found = [p for p in files("singa_backend").values() for n in nodes_of(p)
             if (isinstance(n, ast.ImportFrom) and not n.level and (n.module or "").split(".")[0] == "singa")
             or (isinstance(n, ast.Import) and any(a.name.split(".")[0] == "singa" for a in n.names))]  # fmt: skip
    assert not found


@pytest.mark.parametrize(("package", "name"), [(p, r) for p in LAYERS for r in rooms(p)])
def test_a_room_can_be_imported_alone(package: str, name: str) -> None:
    """In a fresh process, in which the package itself has imported nothing."""
    folder = PROJECT / FOLDERS[package] / package
    code = (
        "import importlib, sys, types\n"
        f"package = sys.modules[{package!r}] = types.ModuleType({package!r})\n"
        f"package.__path__ = [{str(folder)!r}]\n"
        f"importlib.import_module({f'{package}.{name}'!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@packages
def test_the_init_of_a_folder_is_a_list_of_names(package: str) -> None:
    allowed = (
        ast.Import,
        ast.ImportFrom,
        ast.Expr,
        ast.Assign,
        ast.AnnAssign,
    )  # and `if TYPE_CHECKING`, for names found on first use
    found = [
        f"{path.relative_to(PROJECT)}:{node.lineno}"
        for path in files(package).values()
        if path.name == "__init__.py"
        for node in nodes_of(path)[0].body
        if not isinstance(node, allowed) and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    assert not found
