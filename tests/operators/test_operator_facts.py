"""Facts of operators are declared with the operators: there are few tables of names elsewhere, and none needs a new operator."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnx import defs, numpy_helper, parser
from tests.helpers.paths import PROJECT
from tests.helpers.plan_checks import check, drawn, kernels_used

from singa_backend import SingaBackend, define_operator
from singa_backend.backend import SingaRep
from singa_backend.kernels import onednn
from singa_backend.kernels.options import Options

PACKAGES = (PROJECT / "backend" / "singa_backend", PROJECT / "frontend" / "singa")
ELSEWHERE = ("operators/", "conform/", "comparison/tolerances.py")
"""Where names of operators belong: their declarations, their tests, and how exact their results are."""
NAMES = frozenset(s.name for s in defs.get_all_schemas_with_history())
FEWEST = 5
"""The number of different operators from which on a list of names is a table."""
MOST_TABLES, MOST_MENTIONS = 22, 269
"""These limits may only fall: declare a fact of an operator as a trait instead of adding its name to a table."""

Literal = ast.Dict | ast.Set | ast.List | ast.Tuple


class Table(NamedTuple):
    """A display that names operators."""

    place: str
    names: frozenset[str]


def operators_in(expression: ast.expr) -> frozenset[str]:
    """The operators that the strings of an expression name; a string names operators if each of its words does."""
    found: set[str] = set()
    for node in ast.walk(expression):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            found.update(words if NAMES.issuperset(words) else ())
    return frozenset(found)


def candidates(tree: ast.AST) -> Iterator[ast.expr]:
    """The values of assignments, at module level and in functions and classes, and other outermost displays.

    A tuple that is assigned to several targets counts as several values; `__all__` lists what a module exports.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from node.value.elts
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if node.value is not None and not (isinstance(target, ast.Name) and target.id == "__all__"):
                yield node.value
        elif isinstance(node, Literal):
            yield node
        else:
            yield from candidates(node)


def tables_of(source: str, name: str) -> list[Table]:
    found = ((value, operators_in(value)) for value in candidates(ast.parse(source)))
    return [Table(f"{name}:{value.lineno}", names) for value, names in found if len(names) >= FEWEST]


@cache
def tables() -> tuple[Table, ...]:
    paths = [(p, p.relative_to(root).as_posix()) for root in PACKAGES for p in sorted(root.rglob("*.py"))]
    return tuple(t for p, name in paths if not name.startswith(ELSEWHERE) for t in tables_of(p.read_text(), name))


def test_few_tables_name_operators() -> None:
    """The limits fall with the tables: lower them when a table goes."""
    mentions = sum(len(t.names) for t in tables())
    lines = "\n".join(f"{len(t.names):3} {t.place}" for t in sorted(tables(), key=lambda t: -len(t.names)))
    assert len(tables()) <= MOST_TABLES and mentions <= MOST_MENTIONS, f"{len(tables())} tables, {mentions} mentions:\n{lines}"


@pytest.mark.parametrize(("source", "count"), [
    ("X = {'Add', 'Sub', 'Mul', 'Div', 'Pow'}", 1), ("X = names('Add Sub Mul', 'Div Pow')", 1),
    ("X = {'Add': 1, 'Sub': 2, 'Mul': 3, 'Div': 4, 'Pow': 5}", 1), ("X: Any = ('Add', 'Sub', 'Mul', 'Div', 'Pow')", 1),
    ("def f(x):\n    return x in ('Add', 'Sub', 'Mul', 'Div', 'Pow')", 1), ("class A:\n    x = 'Add Sub Mul Div Pow'", 1),
    ("X, Y = ('Add', 'Sub', 'Mul'), ('Div', 'Pow')", 0), ("X = {'Add', 'Sub', 'Mul', 'Div'}", 0),
    ("__all__ = ['Add', 'Sub', 'Mul', 'Div', 'Pow']", 0), ("X = 'the sum of Add Sub Mul Div Pow'", 0),
])  # fmt: skip
def test_what_a_table_is(source: str, count: int) -> None:
    assert len(tables_of(source, "file.py")) == count


# --- old versions


@pytest.mark.parametrize(("opset", "text", "fused"), [
    (5, "b = Clip <min = -0.5, max = 0.5> (a) y = Relu(b)", True), (6, "b = Clip <min = -0.5, max = 0.5> (a) y = Relu(b)", True),
    (6, "b = Sum(a, z) y = Relu(b)", True), (6, "b = Add(a, z) y = Relu(b)", False), (7, "b = Add(a, z) y = Relu(b)", True),
])  # fmt: skip
def test_only_versions_with_the_present_meaning_are_fused(opset: int, text: str, fused: bool) -> None:
    head = "g (float[2,4,9,9] x, float[2,4,9,9] z, float[4,4,3,3] w) => (float[2,4,9,9] y)"
    body = f"{{ a = Conv <pads = [1, 1, 1, 1]> (x, w) {text} }}"
    model = parser.parse_model(f'<ir_version: 3, opset_import: ["": {opset}]> {head} {body}')
    kernels = check(model, [drawn(0, x=(2, 4, 9, 9), z=(2, 4, 9, 9), w=(4, 4, 3, 3))])
    if onednn.library() is not None:
        assert kernels[-1].startswith("conv") == fused, kernels


# --- an operator without an entry


def softsquare(xp: Any, x: Any) -> Any:
    return x / (1 + x * x)


NET = """<ir_version: 10, opset_import: ["": 21, "com.example.facts": 1]>
g (float[2,4,9,9] x) => (float[2,5] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Relu(a)
    c = com.example.facts.Softsquare(b)
    d = Conv (c, w) e = Sigmoid(d) f = GlobalAveragePool(e) h = Flatten(f) i = MatMul(h, m) y = Add(i, s) }"""


@pytest.mark.parametrize("traits", [(), ("unary", "finite")])
def test_an_operator_needs_no_trait(traits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node is a step of the plan, the chains around it are fused, and the numbers are those of the definitions."""
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")
    rng = np.random.default_rng(0)
    model = parser.parse_model(NET)
    for name, shape in {"w": (4, 4, 3, 3), "m": (4, 5), "s": (5,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    made = define_operator(
        "Softsquare", domain="com.example.facts", inputs=["x: tensor(float)"], outputs=["y: tensor(float)"], traits=traits
    )(softsquare)
    rep = SingaBackend.prepare(model, operators=[made])
    exact, planned = (SingaRep(rep.graph, rep.device, options=o) for o in (Options(level=0), Options(threads=1)))
    feeds = [rng.standard_normal((2, 4, 9, 9)).astype(np.float32) for _ in range(3)]
    feeds[1][0, 0, 0, 0], feeds[2][1, 2, 3, 4] = np.nan, np.inf
    for x in (*feeds, feeds[0]):
        np.testing.assert_allclose(planned.run([x])[0], exact.run([x])[0], rtol=1e-5, atol=1e-5)
    kernels = kernels_used(planned)
    assert kernels.count("definition") == ("unary" not in traits)
    if onednn.library() is not None:  # of nine nodes: the Relu and the Add are in the steps before them
        # So is the Sigmoid, if its input is known to be finite; a definition reads a copy.
        assert len(kernels) == (7 if "finite" in traits else 8) - ("unary" in traits)
