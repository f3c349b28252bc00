"""Limits of length, complexity and size, and class names that occur once: a file, a function and a name can be read at once."""

from __future__ import annotations

import ast
from collections import defaultdict
from itertools import pairwise

from tests.helpers.code_size import code_lines, limits, measures, problems, product
from tests.helpers.paths import PROJECT

FILE = 1000
"""No file has as many lines."""

FUNCTION = 75
"""No function has more lines, with its docstring."""

TWICE = {
    "Device": "public in both packages: of the backend, and of SINGA's API",
    "Dropout": "public in singa: the operator of autograd, and the layer",
    "Node": "public in both packages: a node of a graph, and an operation on the tape",
    "Operator": "public in singa: the base class of operations on the tape, and a custom operator",
    "Options": "public in singa.exporting; that of the backend is in pickles of prepared models",
    "SingaBackend": "public in both packages: SINGA's sonnx has a backend of its own",
    "SingaRep": "public in both packages: SINGA's sonnx has a backend of its own",
    "Value": "public in singa_backend; of plans, and of graphs that are written in Python",
}
"""The names of classes that occur in two or more files, at most eight, each with the reason."""


SOURCE = '''"""A docstring
of two lines."""

# a comment
TEXT = """a text  # with no comment

of three lines"""  # with one
"documents TEXT"


def f(x):
    r"""One line."""

    return (  # the comment
        # between
        x
    )
'''


def test_code_lines_are_no_comments_and_no_docstrings() -> None:
    assert code_lines(SOURCE) == 3 + 1 + 3


def test_every_measure_is_at_its_limit() -> None:
    measured = measures()
    assert measured.keys() == limits().keys()
    assert not problems(measured)


def test_files_are_short() -> None:
    assert not {name for name, source in product().items() if source.text.count("\n") >= FILE}


def test_functions_are_short() -> None:
    found = {
        f"{name}:{node.name}"
        for name, (_, nodes) in product().items()
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno >= FUNCTION
    }
    assert not found


def test_a_class_name_occurs_once() -> None:
    files = defaultdict(set)
    for name, (_, nodes) in product().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                files[node.name].add(name)
    found = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    assert set(found) == set(TWICE) and len(TWICE) <= 8, found


def test_operators_multiply_matrices_by_the_namespace() -> None:
    """Other products of CuPy's arrays call cuBLAS in a way that a graph cannot capture."""
    found = [
        f"{name}:{node.lineno}"
        for name, (_, nodes) in product().items()
        if "/operators/" in name
        for node in nodes
        if (isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Attribute) and node.attr in {"dot", "vdot", "inner", "tensordot", "kron"})
    ]
    assert not found, f"xp.matmul computes these: {found}"


def test_a_text_follows_what_it_documents() -> None:
    """A string after an assignment is its documentation; a second one, or one apart, documents nothing."""
    apart = []
    for name, (_, nodes) in product().items():
        for node in nodes:
            body = node.body if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else []
            for before, statement in pairwise(body):
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    follows = isinstance(before, (ast.Assign, ast.AnnAssign)) and before.end_lineno == statement.lineno - 1
                    if isinstance(statement.value.value, str) and not follows:
                        apart.append(f"{name}:{statement.lineno}")
    assert not apart


def test_tests_are_in_folders() -> None:
    assert [p.name for p in (PROJECT / "tests").glob("test_*.py")] == ["test_arrows.py"]
