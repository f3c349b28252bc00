"""The registry of tolerances: complete, the only source, applied to nodes, and shown with reasons."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # its dtypes are known to NumPy by name
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto, defs, parser
from onnx.backend.test.loader import load_model_tests
from tests.helpers.paths import PROJECT

from singa.cli import main
from singa_backend import debug
from singa_backend.comparison import tolerances, verdict
from singa_backend.comparison.tolerances import COMPARE, NARROW, OTHERS, RULES, USES, ErrorBound
from singa_backend.conform import cases
from singa_backend.ir.declaration import has_trait


def test_every_operator_of_onnx_has_one_rule() -> None:
    """An operator of a new onnx release is not judged by a rule that nobody chose."""
    count = Counter(name for r in RULES for name in r.operators)
    schemas = {tolerances.qualified(s.domain, s.name): s for s in defs.get_all_schemas_with_history() if s.domain != "ai.singa"}
    onnx_own = {n for n, s in schemas.items() if s.domain in ("", "ai.onnx.ml") or s.domain.startswith("ai.onnx.preview")}
    assert set(count) ^ onnx_own == set()
    assert max(count.values()) == 1
    random = {tolerances.qualified(s.domain, s.name) for s in schemas.values() if has_trait(s.domain, s.name, "random")}
    assert random == next(set(r.operators) for r in RULES if "RandomNormal" in r.operators)
    assert tolerances.rule("com.example", "Conv") is tolerances.UNLISTED is not tolerances.rule("", "Conv")


def test_every_entry_has_a_reason_and_a_dtype() -> None:
    assert all(len(r.reason) > 10 for r in (*RULES, tolerances.UNLISTED))
    for use in USES:
        assert use.where and use.formula and use.bounds
        for name, bound in use.bounds.items():
            assert len(bound.reason) > 10 and bound.rtol >= 0
            assert name in (NARROW, OTHERS) or np.dtype(name).name == name


# --- one source

NAMES = re.compile(r"rtol|atol|tolerances?|bound|near|narrow", re.IGNORECASE)
CALLS = {"isclose", "allclose", "strict", "official", "Tolerance", "ErrorBound", "Case", "StoredCase"}
NUMBER = re.compile(r"\d\.\d|\de-\d|\*\* ?-")
JUDGES = ("comparison", "conform", "debug", "engines", "_onnx", "_importers", "_codegen", "sonnx_pytest", "cli")
EXCEPTIONS = {
    "comparison/tolerances.py": "the registry",
    "conform/fuzz/strategies.py": "values that are drawn",
    "conform/fuzz/graphs/scope.py": "whether a drawn value has a promised property",
    "conform/fuzz/formulas.py": "the distribution of random values, not their difference from others",
    "debug/torch_module.py:parts": "whether a part of an operator has the value of the whole",
    "conform/gradients.py:_judged": "bends of a function, by which a kink is told from a wrong rule",
}


def small(node: ast.AST) -> bool:
    """Whether an expression has a number that may be a tolerance."""
    numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, float)]
    return any(0 < v <= 0.1 for v in numbers) or any(
        isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow) and isinstance(n.right, ast.UnaryOp) for n in ast.walk(node)
    )


def literals(tree: ast.Module, judges: bool) -> Iterator[tuple[int, str]]:
    """The lines with a literal tolerance, and the function around each."""
    nodes = list(ast.walk(tree))
    functions = [f for f in nodes if isinstance(f, ast.FunctionDef)]
    for node in nodes:
        found = False
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and judges:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = any(isinstance(t, ast.Name) and NAMES.fullmatch(t.id.split("_")[-1]) for t in targets) and small(node.value)
        elif isinstance(node, ast.arguments):
            given = [*zip(reversed([*node.posonlyargs, *node.args]), reversed(node.defaults), strict=False),
                     *zip(node.kwonlyargs, node.kw_defaults, strict=True)]  # fmt: skip
            found = any(d is not None and NAMES.fullmatch(a.arg) and small(d) for a, d in given)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
            option = any(w.startswith("--") and NAMES.search(w) for w in words)
            named = [k.value for k in node.keywords if k.arg and (NAMES.fullmatch(k.arg) or (option and k.arg == "default"))]
            found = any(map(small, named))
            found |= name in CALLS and any(map(small, node.args))
        elif isinstance(node, ast.Compare) and judges:
            found = any(isinstance(o, (ast.LtE, ast.GtE, ast.Lt, ast.Gt)) for o in node.ops) and small(node)
        if found:
            yield (
                min(n.lineno for n in ast.walk(node) if hasattr(n, "lineno")),
                next((f.name for f in functions if node in ast.walk(f)), ""),
            )


def test_literals_are_found() -> None:
    text = """
TOLERANCE = 1e-6
MY_RTOL: float = 2.0**-6
def f(x, rtol=1e-3, *, atol=1e-7): return np.allclose(x, 0, 1e-5)
def g(tolerance: float = 1e-4): return strict(a, b, rtol=1e-3)
option("--atol", default=1e-3)
error <= 1e-4 * size
x = Case(name, 1e-3, 1e-7)
fine = f(rtol=RTOL) + 0.5
"""
    assert len(list(literals(ast.parse(text), True))) == 9


def test_every_tolerance_comes_from_the_registry() -> None:
    """A literal outside the registry has no reason and is on no page."""
    found, used = [], set()
    for package in ("backend/singa_backend", "backend/sonnx_pytest", "frontend/singa"):
        for path in sorted((PROJECT / package).rglob("*.py")):
            name = path.relative_to(PROJECT / package).as_posix()
            text = path.read_text(encoding="utf-8")
            judges = any(part in JUDGES for part in path.relative_to(PROJECT).parts) and "recipes" not in path.parts
            for line, function in literals(ast.parse(text), judges) if NUMBER.search(text) else ():
                known = {name, f"{name}:{function}"} & EXCEPTIONS.keys()
                used |= known
                if not known:
                    found.append(f"{name}:{line}")
    assert found == []
    assert used == EXCEPTIONS.keys()


# --- cases keep ONNX's own tolerances


def test_a_case_has_the_tolerance_of_onnx_or_its_own() -> None:
    known = tolerances.CASES.bounds["float32"]
    found = load_model_tests(kind="simple")
    assert found and {(c.rtol, c.atol) for c in found} == {(known.rtol, known.atol)}
    own = cases._case(replace(found[0], rtol=0.5, atol=0.25), "simple")
    assert (own.rtol, own.atol) == (0.5, 0.25)


# --- in compare and bisect

ENGINE = """
import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

class LayerNormalization(OpRun):
    def _run(self, x, s, axis=-1, epsilon=1e-5, stash_type=1):
        d = x - x.mean(-1, keepdims=True)
        return ((d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon) * s * FACTOR).astype(x.dtype),)

class Tanh(OpRun):
    def _run(self, x):
        return ((np.tanh(x) * FACTOR).astype(x.dtype),)

def engine(*wrong):
    class Engine:
        @staticmethod
        def run_model(model, inputs, device="CPU", **options):
            session = ReferenceEvaluator(model, new_ops=list(wrong))
            return session.run(None, dict(zip(session.input_names, inputs)))
    return Engine

Norm, Curve = engine(LayerNormalization), engine(Tanh)
"""


def net(kind: str) -> ModelProto:
    """A net with an operator that computes in float32, and one that does not."""
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({kind}[n,8] x, {kind}[8] s) => ({kind}[n,8] z)'
        " { t = Tanh(x) y = LayerNormalization(t, s) z = Add(y, x) }"
    )


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def feeds(dtype: Any) -> dict[str, Any]:
    x = np.linspace(-2, 3, 24).reshape(3, 8)
    return {"x": x.astype(dtype), "s": np.linspace(1, 2, 8).astype(dtype)}


def wrong_by(place: Path, factor: str) -> str:
    """Write a vendor's engine, wrong by a factor; returns its module, whose name is new because engines are kept warm."""
    name = f"engine_{re.sub(r'[^0-9a-z]', '_', factor)}"
    (place / f"{name}.py").write_text(f"FACTOR = {factor}\n" + ENGINE)
    return name


@pytest.mark.parametrize(
    ("engine", "dtype", "factor", "found"),
    [
        ("Norm", "double", "1 + 1e-5", None),  # less than float32's tolerance, in which the operator computes
        ("Curve", "double", "1 + 1e-5", "Tanh"),  # more than float64's
        ("Norm", "double", "1 + 1e-2", "LayerNormalization"),
        ("Norm", "float", "1 + 1e-5", None),
        ("Curve", "float", "1 + 1e-5", None),
        ("Curve", "float", "1 + 1e-2", "Tanh"),
    ],
)
def test_the_tolerance_of_an_operator_is_applied_to_its_node(
    engine: str, dtype: str, factor: str, found: str | None, place: Path
) -> None:
    against = f"{wrong_by(place, factor)}:{engine}"
    repro = debug.bisect(net(dtype), feeds("f8" if dtype == "double" else "f4"), against=against, to="repro")
    assert (repro and repro.node.operator) == found
    if repro:
        assert repro.alone
        (apart,) = repro.differences.values()
        looser = dtype == "float" or found == "LayerNormalization"
        assert apart.tolerance is not None and apart.tolerance.rtol == COMPARE.bounds["float32" if looser else "float64"].rtol


def test_values_after_the_operator_have_its_tolerance_but_not_alone(place: Path) -> None:
    against = f"{wrong_by(place, '1 + 1e-5')}:Norm"
    single, double = COMPARE.bounds["float32"].rtol, COMPARE.bounds["float64"].rtol

    def rtols(**how: Any) -> list[float]:
        compared = debug.compare(net("double"), feeds("f8"), against=against, **how)
        assert compared.agrees
        return [row.difference.tolerance.rtol for row in compared.rows if row.difference.tolerance]

    assert rtols() == [double, single, single]
    assert rtols(local=True) == [double, single, double]
    strict = debug.compare(net("double"), feeds("f8"), against=against, rtol=double)
    assert strict.first and strict.first.operator == "LayerNormalization"
    assert all("rtol was given" in r.difference.tolerance.reason for r in strict.rows if r.difference.tolerance)


def test_another_model_widens_the_values_that_are_paired_with_its_own() -> None:
    plain = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (double[n,8] x, double[8] s) => (double[n,8] out)'
        " { t = Tanh(x) m = ReduceMean<axes=[-1]>(t) d = Sub(t, m) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q)"
        " e = Constant<value = double {0.00001}>() w = Add(v, e) r = Sqrt(w) n = Div(d, r) p = Mul(n, s) out = Add(p, x) }"
    )
    found = debug.compare(plain, feeds("f8"), against=net("double"), names={"p": "y"})
    assert found.agrees
    assert {r.value: "LayerNormalization" in (r.difference.tolerance or ErrorBound(0, "")).reason for r in found.rows} == {
        "t": False, "p": True, "out": True,
    }  # fmt: skip


def test_operators_in_graphs_and_functions_count() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "local": 1]>
        g (bool c, double[8] x, double[8] s) => (double[8] y, double[8] z, double[8] w) {
            y = local.outer(x, s)
            z = If(c) <then_branch = a () => (double[8] p) { p = local.inner(x, s) },
                       else_branch = b () => (double[8] q) { q = Neg(x) }>
            w = Neg(x)
        }
        <domain: "local", opset_import: ["": 17, "local": 1]> outer (a, b) => (r) { r = local.inner(a, b) }
        <domain: "local", opset_import: ["": 17]> inner (a, b) => (r) { r = LayerNormalization(a, b) }"""
    )
    one = frozenset({"LayerNormalization"})
    assert debug.ComparedModel(model).carried == {"y": one, "z": one}


# --- shown


def sonnx(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words])


def test_compare_and_bisect_print_the_tolerances_and_why(place: Path) -> None:
    onnx.save(net("double"), "net.onnx")
    engine = f"{wrong_by(place, '1 + 1e-5')}:Norm"
    words = ("net.onnx", "--random", 0, "--size", "n=2", "--against", engine)
    text = sonnx("compare", *words).output
    lines = [line for line in text.splitlines() if line.startswith("tolerance of double: ")]
    assert [re.search(r"rtol ([^,]*), atol [0-9.e-]+( to [0-9.e-]+)?( \(.*\))?$", x)[1] for x in lines] == ["1e-09", "0.0001"]  # type: ignore[index]
    assert "LayerNormalization computes in float32" in lines[1]
    document = json.loads(sonnx("compare", *words, "--json").output)
    assert [row["tolerance"]["rtol"] for row in document["rows"]] == [1e-9, 1e-4, 1e-4]
    assert all(row["tolerance"]["reason"] and row["tolerance"]["atol"] > 0 for row in document["rows"])
    found = sonnx("bisect", *words, "--rtol", "1e-7", "--to", "repro")
    assert found.exit_code == 1 and "tolerance of double: rtol 1e-07, atol " in found.output
    assert "(rtol was given; otherwise rtol 0.0001: LayerNormalization computes" in found.output
    document = json.loads(sonnx("bisect", *words, "--rtol", "1e-7", "--to", "repro", "--json").output)
    assert document["differences"]["y"]["tolerance"]["rtol"] == 1e-7


def test_integers_are_equal_unless_atol_is_given() -> None:
    a, b = np.array([5, 6]), np.array([5, 7])
    plain, given = debug.difference(a, b), debug.difference(a, b, debug.Tolerance(atol=1))
    assert not plain.agrees and given.agrees and given.tolerance and "atol was given" in given.tolerance.reason
    assert plain.tolerance == tolerances.EQUAL


@pytest.mark.parametrize(
    ("mine", "theirs", "apart"),
    [
        (np.array([2**62 + 99]), np.array([2**62]), 99),
        (np.array([2**63 - 1]), np.array([-(2**63)]), 2**64 - 1),
        (np.array([2**64 - 1], np.uint64), np.array([2**64 - 4], np.uint64), 3),
        (np.array([-128], np.int8), np.array([127], np.int8), 255),
        (np.array([True, False]), np.array([False, False]), 1),
    ],
)
def test_differences_of_integers_are_exact(mine: np.ndarray, theirs: np.ndarray, apart: int) -> None:
    assert debug.difference(mine, theirs).max_abs == float(apart)
    assert int(verdict.apart(mine, theirs)[0]) == apart
    if apart < 2**53:
        assert debug.difference(mine, theirs, debug.Tolerance(atol=apart)).agrees
        assert not debug.difference(mine, theirs, debug.Tolerance(atol=apart - 1)).agrees


def test_the_command_shows_all_entries() -> None:
    document = json.loads(sonnx("tolerances", "--json").output)
    assert [tuple(r["operators"]) for r in document["rules"]] == [r.operators for r in RULES]
    assert [len(u["bounds"]) for u in document["uses"]] == [len(u.bounds) for u in USES]
    text = sonnx("tolerances").output
    assert all(r.reason in text for r in RULES) and all(b.reason in text for u in USES for b in u.bounds.values())
    one = json.loads(sonnx("tolerances", "Attention", "--json").output)
    assert len(one["rules"]) == 1 and one["uses"][0]["bounds"]["float64"]["rtol"] == COMPARE.bounds["float32"].rtol
    assert json.loads(sonnx("tolerances", "ai.onnx.Attention", "--json").output) == one
    assert "did you mean 'Attention'?" in sonnx("tolerances", "Atention").output
