"""The gradient rules: each operator version says how it stands, the judge catches what is wrong, and a sample holds today."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from singa.cli import main
from singa_backend.autodiff.support import DIFFERENTIABLE, MISSING, REASONS, gradient_support
from singa_backend.autodiff.tape import Tape
from singa_backend.conform import gradient_matrix, gradients
from singa_backend.conform.cases import ConformanceError
from singa_backend.conform.fuzz import recipes
from singa_backend.conform.gradient_matrix import MatrixRow, ledger, page
from singa_backend.conform.gradient_matrix.row import needs_judging
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import OperatorRule, declarations
from singa_backend.proto.schemas import schemas

ROWS = gradient_matrix.listed()
MISSED = sorted({f"{r.operator}-{r.version}" for r in ROWS if r.kind == MISSING})
STILL_MISSING = 0
"""How many operators of ai.onnx may be without a rule."""


# --- what the declarations say


def test_every_version_is_listed_once() -> None:
    expected = {(d, n, v) for (d, n), versions in schemas.items() if d in gradient_matrix.DOMAINS for v in versions}
    assert {r.key for r in ROWS} == expected and len(ROWS) == len(expected)


def test_every_declaration_has_a_rule_a_composition_or_a_reason() -> None:
    entries = [e for e in gradient_matrix.read() if e.what == "missing"]
    named = {r.key for r in ROWS if r.kind == MISSING and any(e.covers(r, "missing") for e in entries)}
    unnamed = [f"{r.operator}-{r.version}" for r in ROWS if r.kind == MISSING and r.key not in named]
    assert not unnamed
    assert len({r.operator for r in ROWS if r.kind == MISSING and not r.domain}) <= STILL_MISSING, MISSED


def test_a_declaration_says_one_thing() -> None:
    for declaration in {id(d): d for versions in declarations.values() for d in versions.values()}.values():
        assert not (declaration.gradient_rule and declaration.reason), (
            f"{declaration} has a gradient and a reason why it has none"
        )
        kind = declaration.reason.partition(":")[0]
        assert not kind or kind in REASONS, f"{declaration}: {kind!r} is none of {', '.join(REASONS)}"


@pytest.mark.parametrize(
    ("name", "version", "kind", "how"),
    [("Add", 7, DIFFERENTIABLE, "rule"), ("Add", 6, DIFFERENTIABLE, "composition"), ("Floor", 13, "zero", ""),
     ("Not", 1, "integer", ""), ("If", 25, DIFFERENTIABLE, "rule")],
)  # fmt: skip
def test_standing(name: str, version: int, kind: str, how: str) -> None:
    found = gradient_support("", name, version)
    assert (found.kind, found.how) == (kind, how)


def test_what_is_not_declared_is_missing() -> None:
    assert gradient_support("", "Add", 99).kind == MISSING


# --- the judge catches


def _factor(rule: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(op: Any, **known: Any) -> Any:
        first, *rest = rule(op, **known)
        return (op.Mul(first, 1.001), *rest)

    return wrong


def _dropped(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, **known: (rule(op, **known)[0], None)


def _shape(rule: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(op: Any, **known: Any) -> Any:
        first, *rest = rule(op, **known)
        return (op.Unsqueeze(first, [0]), *rest)

    return wrong


def _graph(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Right at once and wrong as a graph, as a rule that asks what it must not ask."""

    def wrong(op: Any, **known: Any) -> Any:
        first, *rest = rule(op, **known)
        return (first if hasattr(op, "xp") else op.Mul(first, 2.0), *rest)

    return wrong


def _raises(rule: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(op: Any, **known: Any) -> Any:
        raise TypeError("planted")

    return wrong


PLANTED = {"a factor": (_factor, "wrong"), "a dropped term": (_dropped, "wrong"), "a shape": (_shape, "shape"),
           "a graph": (_graph, "graph"), "an error": (_raises, "planted")}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_the_judge_catches(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, says = PLANTED[what]
    declaration = declarations["", "Mul"][14]
    assert declaration.gradient_rule is not None
    rule = OperatorRule(plant(declaration.gradient_rule.function))
    rule.names = declaration.gradient_rule.names
    monkeypatch.setattr(declaration, "gradient_rule", rule)
    row = gradient_matrix.judged(_row("Mul", 14), count=5)
    assert row.verdict == "wrong" and row.wrong and says in " ".join(row.says), row
    assert not ledger.explain(row, [ledger.KnownDeviation("Mul", "few", "no excuse")])


def test_the_judge_catches_a_gradient_that_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    declaration = declarations["", "Sin"][22]
    monkeypatch.setattr(declaration, "gradient_rule", None)
    monkeypatch.setattr(declaration, "decomposition_rule", None)
    monkeypatch.setattr(declaration, "reason", "zero")
    row = gradient_matrix.judged(_row("Sin", 22), count=3)
    assert row.kind == "zero" and row.verdict == "wrong" and "no gradient was returned" in row.says[0]


def test_a_rule_in_sound_state_is_checked() -> None:
    row = gradient_matrix.judged(_row("Mul", 14), count=5)
    assert (row.verdict, row.agreed, row.wrong, row.graph) == ("checked", 5, 0, True) and row.worst < 1e-6


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("said", [0, 3])
def test_whether_the_graph_agrees_does_not_depend_on_messages(what: str, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only three messages are kept, and other messages may have the word; an error of the rule leaves nothing to compare."""
    declaration = declarations["", "Mul"][14]
    assert declaration.gradient_rule is not None
    rule = OperatorRule(PLANTED[what][0](declaration.gradient_rule.function))
    rule.names = declaration.gradient_rule.names
    calls = iter(range(10**6))
    sound = gradients.judge

    def late(point: Any, rng: Any) -> list[Any]:
        if next(calls) < said:
            return [gradients.PointResult("a", "wrong", detail="a subgraph was expected")]
        monkeypatch.setattr(declaration, "gradient_rule", rule)
        return sound(point, rng)

    monkeypatch.setattr(gradients, "judge", late)
    row = gradient_matrix.judged(_row("Mul", 14), count=5)
    expected = {"a graph": False, "an error": None if said == 0 else True}.get(what, True)
    assert row.wrong == 5 and len(row.says) == 3 and row.graph is expected, row


def test_a_graph_that_raises_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: Any) -> Any:
        raise TypeError("planted")

    monkeypatch.setattr(gradients.Point, "through_graph", raises)
    row = gradient_matrix.judged(_row("Mul", 14), count=2)
    assert row.verdict == "wrong" and row.graph is False and "the graph raises TypeError: planted" in row.says[0]


def test_the_points_of_a_seed_are_the_same() -> None:
    first, second, other = (list(gradients.points("", "Mul", 14, seed=s, count=3)) for s in (1, 1, 2))
    for p, q in zip(first, second, strict=True):
        assert p.opset == q.opset and all(np.array_equal(a, b) for a, b in zip(p.feeds, q.feeds, strict=True))
    assert any(a.shape != b.shape or (a != b).any() for p, q in zip(first, other, strict=True)
               for a, b in zip(p.feeds, q.feeds, strict=True))  # fmt: skip


@pytest.mark.parametrize("version", [12, 13, 22])
def test_no_point_depends_on_a_draw(version: int) -> None:
    """Two draws of a few elements can be equal, so the node of each point has a seed."""
    found = list(gradients.points("", "Dropout", version, count=40))
    assert len(found) == 40 and all(any(a.name == "seed" for a in p.case.node.attribute) for p in found)


def _row(name: str, version: int, domain: str = "") -> MatrixRow:
    return next(r for r in gradient_matrix.listed(rf"(^|:){name}-{version}$") if r.domain == domain)


# --- conventions at kinks and ties, as docs/gradients.md has them

KINKS: list[Any] = [
    ("Relu", ([0.0],), {}, [[0]]),
    ("Abs", ([0.0],), {}, [[0]]),
    ("LeakyRelu", ([0.0],), {"alpha": 0.5}, [[0.5]]),
    ("PRelu", ([0.0], [0.25]), {}, [[0.25], [0]]),
    ("Elu", ([0.0],), {"alpha": 0.5}, [[0.5]]),
    ("Celu", ([0.0],), {"alpha": 0.5}, [[1]]),
    ("Selu", ([0.0],), {"alpha": 2.0, "gamma": 3.0}, [[6]]),
    ("ThresholdedRelu", ([1.0],), {"alpha": 1.0}, [[0]]),
    ("Shrink", ([0.5, -0.5],), {"lambd": 0.5}, [[0, 0]]),
    ("HardSigmoid", ([-2.0, 2.0],), {"alpha": 0.25, "beta": 0.5}, [[0, 0]]),
    pytest.param(
        "HardSwish",
        ([-3.0, 3.0],),
        {},
        [[0, 1]],
    ),
    ("Clip", ([0.0, 1.0, 2.0], 0.0, 2.0), {}, [[1, 1, 1], 0, 0]),
    ("Clip", ([0.0, 2.0, 3.0], 0.0, 0.0), {}, [[1, 0, 0], 0, 2]),
    ("Max", ([1.0], [1.0]), {}, [[0.5], [0.5]]),
    ("Min", ([1.0], [1.0], [1.0], [1.0]), {}, [[0.25]] * 4),
    ("ReduceMax", ([1.0, 1.0, 0.0],), {}, [[0.5, 0.5, 0]]),
    ("ReduceMin", ([1.0, 1.0, 2.0],), {}, [[0.5, 0.5, 0]]),
    ("MaxPool", ([[[1.0, 1.0]]],), {"kernel_shape": [2]}, [[[[1, 0]]]]),
    ("GlobalMaxPool", ([[[1.0, 1.0]]],), {}, [[[[1, 0]]]]),
    ("ReduceL1", ([0.0, 1.0],), {}, [[0, 1]]),
    ("ReduceL2", ([0.0, 0.0],), {}, [[0, 0]]),
    ("Sqrt", ([0.0],), {}, [[np.inf]]),
    ("Sign", ([0.0],), {}, [None]),
    ("Round", ([0.5],), {}, [None]),
    ("Floor", ([1.0],), {}, [None]),
    ("Ceil", ([1.0],), {}, [None]),
    ("Hardmax", ([1.0, 1.0],), {}, [None]),
]


@pytest.mark.parametrize(("name", "inputs", "attributes", "expected"), KINKS, ids=lambda x: x if isinstance(x, str) else "")
def test_conventions(name: str, inputs: Any, attributes: dict[str, Any], expected: Any) -> None:
    tape = Tape(Eager())
    values = [tape.variable(np.asarray(x, float)) for x in inputs]
    y = getattr(tape, name)(*values, **attributes)
    found = tape.gradients([y], [np.ones_like(y.raw)], values)
    assert [None if g is None else g.tolist() for g in found] == expected


# --- every operator, a little


SAMPLED = [r for r in ROWS if (r.latest or r.operator == "Attention") and needs_judging(r)]


@pytest.mark.parametrize("row", SAMPLED, ids=lambda r: r.name)
def test_a_sample(row: MatrixRow) -> None:
    """Two points of the newest version; `sonnx gradients` takes 20 of every version."""
    found = gradient_matrix.judged(row, count=2)
    assert found.verdict in ("checked", "few", "zero", "constant"), found.says


def test_what_is_judged_has_points() -> None:
    known = recipes.load()
    without = {r.operator for r in ROWS if r.kind == DIFFERENTIABLE and (r.domain, r.operator) not in known}
    assert without <= {"ImageDecoder", "CastMap", "DictVectorizer"}


# --- the matrix


def sonnx(*args: Any) -> Any:
    return CliRunner().invoke(main, ["gradients", *(str(a) for a in args)])


def test_the_command_writes_and_merges(tmp_path: Path) -> None:
    first = sonnx("^Mul-14$", "--points", 2, "--oracle", "none", "--jobs", 1, "--to", tmp_path)
    assert first.exit_code == 0, first.output
    second = sonnx("^(Floor-13|Not-1)$", "--points", 2, "--oracle", "none", "--jobs", 1, "--to", tmp_path, "--json")
    assert second.exit_code == 0, second.output
    assert {r["operator"]: r["verdict"] for r in json.loads(second.stdout)["rows"]} == {"Floor": "zero", "Not": "integer"}
    document = json.loads((tmp_path / "gradients.json").read_text())
    assert document["totals"]["verdicts"] == {"checked": 1, "zero": 1, "integer": 1}
    text = (tmp_path / "gradients.md").read_text()
    assert text == page.markdown(document) and "| Mul | 14 | checked | rule | 2 |" in text


def test_a_matrix_of_other_declarations_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in gradient_matrix.stale(tmp_path)
    page.write(page.to_json(gradient_matrix.listed(), 20, 0, gradient_matrix.read()), tmp_path)
    assert gradient_matrix.stale(tmp_path) == ""
    assert sonnx("--check", "--to", tmp_path).exit_code == 0
    monkeypatch.setattr(declarations["", "Floor"][1], "reason", "undefined: for the test")
    assert "Floor-1: kind is 'zero' there and 'undefined' in the declaration" in gradient_matrix.stale(tmp_path)
    assert sonnx("--check", "--to", tmp_path).exit_code == 1
    monkeypatch.undo()
    (tmp_path / "gradients.md").write_text("by hand")
    assert "differs from the page rendered from gradients.json" in gradient_matrix.stale(tmp_path)
    (tmp_path / "gradients.json").write_text(json.dumps({**page.read(tmp_path), "rows": page.read(tmp_path)["rows"][1:]}))
    assert "is not listed" in gradient_matrix.stale(tmp_path)


def test_a_row_that_hangs_costs_one_row() -> None:
    found = list(gradient_matrix.run([_row("Mul", 14), _row("Mul", 13)], count=1000, oracle=None, jobs=1, timeout=0.01))
    assert [r.verdict for r in found] == ["timeout", "timeout"] and "not judged within" in found[0].says[0]
    assert not ledger.explain(found[0], gradient_matrix.read())


def test_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "gradients.toml"
    path.write_text('[[entry]]\noperator = "Mul"\nversions = [14]\nwhat = "differs"\nwhy = "it does"\n')
    (entry,) = ledger.read(path)
    row = _row("Mul", 14)
    row.witness = {"differs": 1}
    assert ledger.explain(row, [entry]) and row.explained == {"differs": "it does"}
    assert not ledger.explain(row, []) and not entry.covers(_row("Mul", 13), "differs")
    for bad in ('what = "wrong"\nwhy = "x"', 'what = "few"', 'what = "few"\nwhy = "x"\nwhen = 1'):
        path.write_text(f'[[entry]]\noperator = "Mul"\n{bad}\n')
        with pytest.raises(ConformanceError):
            ledger.read(path)


def test_wrong_usage() -> None:
    assert sonnx("(").exit_code == 2
    assert sonnx("NoSuchOperator").exit_code == 2
