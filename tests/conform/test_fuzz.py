"""Generated models: they are valid and repeatable, witnesses are independent, and every difference is found."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import helper, numpy_helper

from singa.cli import main
from singa_backend import SingaBackend, define_operator
from singa_backend.comparison import verdict
from singa_backend.comparison.tolerances import Allowance, rule
from singa_backend.conform.cases import ConformanceError, data_file
from singa_backend.conform.fuzz import compare, formulas, generate, ledger, recipes, run, strategies, summary, witnesses
from singa_backend.io.processes import Child
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import is_private
from singa_backend.proto.test_data import data_set

F = np.float32


def sonnx(*args: Any) -> Result:
    return CliRunner().invoke(main, ["fuzz", *(str(a) for a in args)])


def drawn(select: str, *, count: int = 400, wish: Any = lambda case: True) -> generate.NodeCase:
    """The first case of the selection for which `wish` is true."""
    return next(c for i in range(count) if (c := generate.draw(0, i, select)) is not None and wish(c))


# --- drawing


def test_every_operator_has_a_recipe() -> None:
    """Except for operators on maps, ImageDecoder and Gradient, which no other engine here implements, and those of ai.singa.

    Operators of one model, which other tests may have made, are not drawn.
    """
    others = {("ai.onnx.ml", "CastMap"), ("ai.onnx.ml", "DictVectorizer"), ("ai.onnx.preview.training", "Gradient")}
    known = {(domain, name) for domain, name in declarations if domain != "ai.singa" and not is_private(domain)}
    assert known - set(recipes.load() | recipes.load("com.microsoft")) == {("", "ImageDecoder"), *others}
    assert set(recipes.load() | recipes.load("com.microsoft")) <= set(declarations)


def test_cases_are_repeatable_and_alone() -> None:
    for index in (0, 7, 123, 4567):
        first, second = (generate.draw(3, index) for _ in range(2))
        assert first is not None and second is not None
        assert first.model == second.model and verdict.same_bits(list(first.inputs.values()), list(second.inputs.values()))
    assert generate.draw(3, 0) is not None and generate.draw(4, 0).model != generate.draw(3, 0).model  # type: ignore[union-attr]


def test_models_are_valid(tmp_path: Path) -> None:
    """By ONNX's checker, with strict inference; deprecated operators and contradictions of its own aside."""
    known = ("is deprecated in domain_version", "RMSNormalization", "op_type:Pow): Y has inconsistent type")
    for index in range(0, 1500, 10):
        case = generate.draw(1, index)
        if case is None:
            continue
        try:
            outputs: Any = SingaBackend.run_model(case.model, case.feeds)
        except Exception as error:
            pytest.fail(f"{index} {case.describe()}: {error}")
        generate.write(case, outputs, tmp_path)
        try:
            onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
        except Exception as error:
            assert any(k in str(error) for k in known) or "does not match" in str(error), case.describe()


def test_operators_of_one_model_do_not_change_the_draws() -> None:
    """Case i of a seed is the same whatever a program defined before."""
    before = generate.cells()

    @define_operator(domain="com.example.fuzz")
    def Own(xp: Any, x: float) -> float:  # type: ignore[valid-type]
        return x

    assert generate.cells() == before and any(d.startswith("com.example.fuzz") for d, _ in declarations)


def test_specials_edges_and_constants_are_drawn() -> None:
    seen: set[str] = set()
    held_inputs = 0
    for index in range(400):
        case = generate.draw(2, index, "^(Add|Max|Concat|Pad)-")
        if case is not None:
            seen |= case.flags
            held_inputs += bool(case.constants)
    assert {"nan", "inf", "minus_zero", "huge", "subnormal", "empty", "scalar", "int_min", "int_max", "beyond_float"} <= seen
    assert held_inputs > 20


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, ml_dtypes.int4, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, bool, object])
def test_any_dtype_can_be_drawn(dtype: Any) -> None:
    d = strategies.Draw(np.random.default_rng(0), onnx.defs.get_schema("Identity", 25), 25, {})
    x = d.array(np.dtype(dtype), (3, 4))
    assert x.dtype == dtype and x.shape == (3, 4)


def test_a_wrong_selection_is_refused() -> None:
    with pytest.raises(ConformanceError, match="matches"):
        generate.cells("^NoSuchOperator-")
    assert sonnx("-k", "^NoSuchOperator-").exit_code == 3
    assert sonnx("--write", "x").exit_code == 2


# --- comparing

PLAIN, SUM = rule("", "Identity"), rule("", "MatMul")


@pytest.mark.parametrize(
    ("actual", "expected", "rule", "kind"),
    [
        (np.ones(2, F), np.ones(2, F), PLAIN, ""),
        (np.ones(2, F), np.nextafter(np.ones(2, F), F(2)), PLAIN, "values"),
        (np.ones(2, F), np.nextafter(np.ones(2, F), F(2)), SUM, ""),
        (np.ones(2, F), np.ones(2, F) * F(1.001), SUM, "values"),
        (np.array([np.nan, np.inf], F), np.array([np.nan, np.inf], F), PLAIN, ""),
        (np.array([np.inf], F), np.array([-np.inf], F), SUM, "values"),
        (np.array([np.nan], F), np.array([0], F), SUM, "values"),
        (np.array([np.inf], np.float16), np.array([65504], np.float16), SUM, ""),
        (np.array([np.inf], np.float16), np.array([100], np.float16), SUM, "values"),
        (np.ones(2, F), np.ones(2, np.float64), PLAIN, "dtype"),
        (np.ones((2, 1), F), np.ones(2, F), PLAIN, "shape"),
        (np.array([2**60 + 1]), np.array([2**60]), SUM, "values"),
        (np.array([5]), np.array([6]), rule("", "QuantizeLinear"), ""),
        (np.array([5]), np.array([7]), rule("", "QuantizeLinear"), "values"),
        (np.array([2**62 + 1, -128]), np.array([2**62, -128]), rule("", "QuantizeLinear"), ""),
        (np.array([2**62 + 99]), np.array([2**62]), rule("", "QuantizeLinear"), "values"),
        (np.array([-128], np.int8), np.array([127], np.int8), rule("", "QuantizeLinear"), "values"),
        (np.array(["a"], object), np.array(["b"], object), PLAIN, "values"),
        ([np.ones(1, F)], [np.ones(1, F)], PLAIN, ""),
        ([np.ones(1, F)], [], PLAIN, "length"),
        ([np.ones(1, F)], np.ones(1, F), PLAIN, "kind"),
        (None, np.ones(1, F), PLAIN, "kind"),
        (np.array([1 + 2j]), np.array([1 + 3j]), PLAIN, "values"),
        (np.ones(1, ml_dtypes.bfloat16), np.ones(1, ml_dtypes.bfloat16) * ml_dtypes.bfloat16(1.05), SUM, ""),
        (np.ones(1, ml_dtypes.float8_e5m2), np.ones(1, ml_dtypes.float8_e5m2) * ml_dtypes.float8_e5m2(2), PLAIN, "values"),
    ],
)
def test_compare(actual: Any, expected: Any, rule: Allowance, kind: str) -> None:
    found = compare.compare([actual], [expected], rule, 1.0)
    assert found.kind == kind and bool(found.why) == bool(kind), found


def test_a_sum_may_lose_what_cancels_and_no_more() -> None:
    inputs = [np.array([[1e4, -1e4, 1e-3]], F), np.ones((3, 1), F)]
    scale = compare.magnitude(inputs, 1)
    assert scale == 1e4
    exact = np.array([[1e-3]], F)
    assert not compare.compare([exact + F(1e-3)], [exact], SUM, scale).why
    assert compare.compare([exact + F(1)], [exact], SUM, scale).why


# --- witnesses


def ask(case: generate.NodeCase, witness: str) -> list[Any]:
    """The answer of a plan whose model our executor runs instead of onnxruntime: it shows whether the plan keeps the results."""
    plan = next(p for p in witnesses.plans(case) if p.witness.startswith(witness))
    return plan.decode(SingaBackend.run_model(plan.model, plan.feeds).to_dict())


@pytest.mark.parametrize(
    ("select", "witness", "wish"),
    [
        ("^Add-14$", "onnxruntime", lambda c: c.types["T"].name == "bfloat16"),
        ("^Add-14$", "onnxruntime in another dtype", lambda c: c.types["T"].name == "float16"),
        ("^Add-14$", "onnxruntime in another dtype", lambda c: c.types["T"].name == "uint8" and "empty" not in c.flags),
        (
            "^Exp-13$",
            "onnxruntime in another dtype",
            lambda c: c.types["T"].name == "float64" and not c.flags,
        ),
        ("^Transpose-25$", "onnxruntime on numbered elements", lambda c: c.types["T"].name == "float8_e8m0fnu"),
        ("^Concat-13$", "onnxruntime on numbered elements", lambda c: c.types["T"].kind == "O"),
        ("^Pad-25$", "onnxruntime on numbered elements", lambda c: c.types["T"].kind == "c"),
        ("^SequenceInsert-", "onnxruntime on numbered elements", lambda c: c.types["T"].kind == "b"),
        ("^Relu-6$", "onnxruntime as version", lambda c: True),
        ("^Mul-1$", "onnxruntime as version", lambda c: len({v.shape for v in c.inputs.values()}) == 1 and not c.node.attribute),
        ("^Celu-28$", "onnxruntime as version 12", lambda c: c.types["T"] == F),
    ],
)
def test_an_equivalent_model_has_the_same_answer(select: str, witness: str, wish: Any) -> None:
    case = drawn(select, count=3000, wish=wish)
    ours = list(SingaBackend.run_model(case.model, case.feeds))
    found = compare.compare(ours, ask(case, witness), Allowance((), "", 2), 1.0, dtype=F)
    assert not found.why, (case.describe(), found)


def test_a_version_of_another_meaning_is_not_a_witness() -> None:
    for select, never in (("^Softmax-11$", 13), ("^PRelu-6$", 7), ("^GroupNormalization-18$", 21), ("^Clip-6$", 11)):
        case = drawn(select)
        asked = [p.witness for p in witnesses.plans(case)]
        assert f"onnxruntime as version {never}" not in asked


def test_bodies_and_formulas_are_independent_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault in the operator is found: the body consists of other operators, the formula of none."""
    case = drawn("^Softplus-22$", wish=lambda c: c.types["T"] == F and "empty" not in c.flags and "nan" not in c.flags)
    monkeypatch.setattr(declarations["", "Softplus"][22], "body", lambda xp, x: xp.maximum(x, 0))
    ours = list(SingaBackend.run_model(case.model, case.feeds, optimize=0))
    for outputs in (witnesses.body(case), formulas.value(case)):
        theirs = [np.asarray(v, F) for v in outputs]
        assert compare.compare(ours, theirs, rule("", "Softplus"), 1.0).kind == "values"


def test_what_is_drawn_by_chance_has_properties() -> None:
    case = drawn("^RandomUniform-22$", wish=lambda c: c.types["T"] == F)
    y = np.asarray(SingaBackend.run_model(case.model, {})[0])
    assert formulas.property_of(case, [y]) == ""
    assert formulas.property_of(case, [y + 100]) != ""
    assert formulas.property_of(drawn("^Add-14$"), [y]) is None


# --- judging


def answer(wrong: float = 0.0) -> run.CaseAnswer:
    case = drawn("^Exp-13$", wish=lambda c: c.types["T"] == F and c.inputs["x0"].size and "scalar" not in c.flags and not c.flags)
    ours = [np.exp(case.inputs["x0"]) * F(1 + wrong)]
    return run.CaseAnswer(case, ours, witnesses={"formula": [np.exp(case.inputs["x0"].astype(np.float64)).astype(F)]})


def entry(**more: Any) -> ledger.KnownDifference:
    return ledger.KnownDifference(**{"operator": "Exp", "blame": "specification", "why": "because"} | more)


@pytest.mark.parametrize(
    ("wrong", "entries", "status"),
    [
        (0.0, [], "agree"),
        (1e-2, [], "unexplained"),
        (1e-2, [entry()], "explained"),
        (1e-2, [entry(operator="Log")], "unexplained"),
        (1e-2, [entry(versions=(6,))], "unexplained"),
        (1e-2, [entry(when=("nan",))], "unexplained"),
        (1e-2, [entry(when=("!nan", "kind=values", "dtype.T=float32", "says=witness has"))], "explained"),
        (1e-2, [entry(witness="onnxruntime")], "unexplained"),
        (1e-5, [entry(blame="tolerance", bound=100.0)], "explained"),
        (1e-2, [entry(blame="tolerance", bound=100.0)], "unexplained"),
    ],
)
def test_judging(wrong: float, entries: list[ledger.KnownDifference], status: str) -> None:
    assert run.CaseJudge(entries, None).judge(0, answer(wrong)).status == status


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"ours": None, "refused": "no"}, "unexplained"),
        ({"foreign": "Traceback"}, "foreign"),
        ({"fault": "changed"}, "unexplained"),
    ],
)
def test_refusals_and_faults_are_judged(change: dict[str, Any], status: str) -> None:
    found = answer()
    for name, value in change.items():
        setattr(found, name, value)
    judged = run.CaseJudge([], None).judge(0, found)
    assert judged.status == status and not judged.good


def test_a_wrong_shape_is_seen_without_any_witness() -> None:
    found = answer()
    found.ours, found.witnesses = [np.zeros((9, 9, 9), F)], {}
    assert run.CaseJudge([], None).judge(0, found).differences[0].witness == "shape inference"


def test_deaths_and_hangs_of_ours_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Child(run._serve, 0, "^Abs-13$")
    try:
        assert isinstance(run._ask(ours, 0), run.CaseAnswer)
        assert ours.pid
        os.kill(ours.pid, signal.SIGKILL)
        assert str(run._ask(ours, 1)).startswith("died: exit code -9")
        assert isinstance(run._ask(ours, 1), run.CaseAnswer)
        monkeypatch.setattr(run, "TIMEOUT", 0.3)
        assert ours.pid
        os.kill(ours.pid, signal.SIGSTOP)
        hang = run._ask(ours, 2)
        assert str(hang).startswith("hang")
    finally:
        ours.close()
    judged = run.CaseJudge([], None).judge(2, hang)
    assert judged.status == "hang" and not judged.good


# --- the ledger


def test_the_ledger_blames_nobody_without_reason_and_never_us() -> None:
    entries = ledger.read(data_file("ledger.toml"))
    assert entries and all(e.blame != "ours" for e in entries)
    import re

    for e in entries:
        assert any(d == e.domain and re.fullmatch(e.operator, n) for d, n in recipes.load() | recipes.load("com.microsoft")), e
        assert e.blame != "tolerance" or e.bound > 1


@pytest.mark.parametrize(
    "text",
    [
        'operator = "Add"\nclass = "ours"\n',
        'operator = "Add"\nclass = "nobody"\nwhy = "x"\n',
        'operator = "Add"\nclass = "ours"\nwhy = "x"\nwen = ["nan"]\n',
        'operator = "Add"\nclass = "ours"\nwhy = "x"\nwhen = ["full_moon"]\n',
    ],
)
def test_the_ledger_is_checked(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger.toml"
    path.write_text("[[entry]]\n" + text)
    with pytest.raises(ConformanceError):
        ledger.read(path)


# --- the command, with the other engines


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    empty = tmp_path / "ledger.toml"
    empty.write_text("")
    arguments = ("--count", 12, "--seed", 5, "-k", "^NonZero-9$", "-n", 1, "--json")
    good = sonnx(*arguments, "--report", tmp_path / "reports")
    assert good.exit_code == 0, good.output
    totals = json.loads(good.output)["totals"]
    assert totals["explained"] > 0 and totals["agree"] > 0 and totals["by_class"] == {"onnxruntime": totals["explained"]}
    document = json.loads((tmp_path / "reports" / "fuzz.json").read_text())
    assert ["", "NonZero", 9, "tensor(int64)", "int64"] in document["cells"] and document["count"] == 12
    assert summary.markdown(document) == (tmp_path / "reports" / "fuzz.md").read_text()
    bad = sonnx(*arguments, "--ledger", empty)
    assert bad.exit_code == 1
    index = json.loads(bad.output)["bad"][0]["index"]
    one = sonnx("--seed", 5, "-k", "^NonZero-9$", "--only", index, "--ledger", empty, "--write", tmp_path / "case")
    assert one.exit_code == 1 and "not in the ledger" in one.output
    model = onnx.load(tmp_path / "case" / "model.onnx")
    inputs, outputs = data_set(tmp_path / "case" / "test_data_set_0", model)
    assert len(inputs) == 1 and len(outputs) == 1


# --- what it found


@pytest.mark.parametrize("dtype", [ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (2, 5), (0, 3)])
def test_six_bit_floats_are_packed_in_a_file(dtype: Any, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).uniform(-5, 5, shape).astype(dtype)
    held = numpy_helper.from_array(x, "x")
    graph = helper.make_graph([helper.make_node("CastLike", ["x", "f"], ["y"])], "g",
                              [helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, [])],
                              [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)], [held])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)])
    (y,) = SingaBackend.run_model(model, {"f": np.zeros((), F)})
    np.testing.assert_array_equal(y, x.astype(F))
