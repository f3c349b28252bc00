"""No public function accepts an argument and drops it: parameters that are never read are listed with a reason."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator

import numpy as np
import pytest
from tests.helpers.paths import HELPERS, PROJECT

from singa import autograd, tensor
from singa_backend.errors import InvalidInput

ROOT = PROJECT / "frontend" / "singa"
LISTED = tomllib.loads((HELPERS / "unused_parameters.toml").read_text())["parameters"]


def unread(source: str) -> Iterator[str]:
    """The public parameters that a module never reads, as "Class.method parameter"."""

    def visit(node: ast.AST, prefix: str) -> Iterator[str]:
        for n in getattr(node, "body", []):
            if isinstance(n, ast.ClassDef):
                if not n.name.startswith("_") and not any("Protocol" in ast.unparse(b) for b in n.bases):
                    yield from visit(n, f"{prefix}{n.name}.")
            elif isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
                not n.name.startswith("_") or n.name in ("__init__", "__call__")
            ):
                yield from (f"{prefix}{n.name} {p}" for p in dropped(n))

    yield from visit(ast.parse(source), "")


def dropped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    documented = ast.get_docstring(function) is not None
    body = function.body[documented:]
    refuses = bool(body) and all(isinstance(b, ast.Raise) for b in body)
    if refuses or any("overload" in ast.unparse(d) for d in function.decorator_list):
        return []
    read = {n.id for b in body for n in ast.walk(b) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    a = function.args
    passed = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return [p.arg for p in passed if p.arg not in read and p.arg not in ("self", "cls") and not p.arg.startswith("_")]


def test_every_parameter_is_read() -> None:
    """An entry whose parameter is read, or gone, is removed too."""
    found = {
        f"{path.relative_to(ROOT).as_posix()} {name}"
        for path in ROOT.rglob("*.py")
        if "cli" not in path.relative_to(ROOT).parts  # click passes every option by its name
        for name in unread(path.read_text())
    }
    assert found == set(LISTED) and all(len(why) > 5 for why in LISTED.values())


def test_the_search_finds_parameters() -> None:
    source = """
class A:
    def f(self, a, *b, c=1, **d):
        a = 2
        return c
    def g(self, _unused):
        raise NotImplementedError
    def _hidden(self, x): return 1
def h(x, y):
    def inner(): return x
    return inner
"""
    assert list(unread(source)) == ["A.f a", "A.f b", "A.f d", "h y"]


def test_a_ratio_in_the_place_of_the_seed_is_warned_of() -> None:
    x = tensor.Tensor(data=np.ones(4, np.float32))
    with pytest.warns(UserWarning, match=r"the first argument of Dropout is its seed; write ratio=0\.3") as seen:
        autograd.Dropout(0.3)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match=r"the second argument of dropout is its seed; write ratio=0\.3") as seen:
        autograd.dropout(x, 0.3)
    assert seen[0].filename == __file__ and len(seen) == 1
    with pytest.raises(InvalidInput, match=r"ratio must be in \[0, 1\), got 1"):
        autograd.Dropout(ratio=1)
