"""Only a session chooses between a plan and the definitions; everything else asks one."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.test_arrows import FOLDERS, files

CHOOSERS = {"Executor", "Visitor", "Planner"}
"""The classes that run a graph."""

PRIVATE = {"_executor", "_planner"}

ENGINE = ("singa_backend.runtime", "singa_backend.plans", "singa_backend.session")

DEFINITIONS = {
    "singa_backend.conform.fuzz.graphs.answer": "the answer of the definitions, with which other engines are compared",
    "singa_backend.conform.fuzz.graphs.values": "inputs and perturbed inner values of the definitions",
    "singa_backend.conform.gradient_matrix.row": "gradients are judged by the definitions",
    "singa_backend.conform.gradients": "finite differences of the definitions",
    "singa_backend.conform.opset_matrix.judge": "every version is judged by its definition",
    "singa_backend.conform.opset_matrix.problems": "the outputs that a problem must have, by the definitions",
    "singa_backend.interpreters.builder": "below the plans: a graph of constants, once",
    "singa_backend.interpreters.eager": "below the plans: an operator with subgraphs, outside any model",
}
"""The modules outside the engine that run a graph by its definitions, always, and why."""


@cache
def choosers() -> dict[str, list[str]]:
    """The modules outside the engine that run a graph by themselves, with what they use for it."""
    found: dict[str, list[str]] = {}
    named = re.compile("|".join(sorted(CHOOSERS | PRIVATE)))
    for package in FOLDERS:
        for name, path in files(package).items():
            if name.startswith(ENGINE):
                continue
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if named.search(text) else ():
                used: list[str] = []
                if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] in ("executor", "planner"):
                    used = [alias.name for alias in node.names if alias.name in CHOOSERS]
                elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
                    used = [node.attr]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                    used = [a.value for a in node.args if isinstance(a, ast.Constant) and a.value in PRIVATE]
                if used:
                    found.setdefault(name, []).extend(used)
    return found


def test_only_a_session_chooses() -> None:
    assert choosers().keys() <= DEFINITIONS.keys(), {n: u for n, u in choosers().items() if n not in DEFINITIONS}


def test_the_uses_of_definitions_are_up_to_date() -> None:
    assert DEFINITIONS.keys() <= choosers().keys()
    assert all(set(used) == {"Executor"} for used in choosers().values())
