"""Generated graphs: they are valid and repeatable, differences cannot hide, and what they found in this package is fixed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser

from singa import autograd, codegen, sonnx, tensor
from singa.cli import main
from singa.cli._graph_forms import forms
from singa_backend import SingaBackend, UnsupportedModel
from singa_backend.comparison import verdict
from singa_backend.conform.cases import ConformanceError, data_file
from singa_backend.conform.fuzz import ledger as operators
from singa_backend.conform.fuzz.graphs import answer, generate, judge, ledger, summary, values
from singa_backend.conform.results import load, stale_page

F = np.float32


def model(body: str, opset: int = 21, ml: int = 5, **constants: np.ndarray) -> ModelProto:
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": {ml}, "local": 1]> {body}')
    made.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return made


def case(proto: ModelProto, *others: int, **feeds: np.ndarray) -> generate.Case:
    return generate.Case(0, 0, proto, feeds, others)


def verdict_on(one: generate.Case, change: Any = None) -> judge.Judged:
    """The verdict without onnxruntime; `change` alters the answer before it is judged."""
    found = answer.answer(one, forms)
    if change:
        change(found)
    return judge.Judge([], [], None, lambda request: None).judge(0, found)


# --- the generator


def test_graphs_are_repeatable_alone_and_valid() -> None:
    for index in range(0, 40, 5):
        first, second = generate.draw(3, index), generate.draw(3, index)
        assert first.model == second.model and verdict.same_bits(list(first.feeds.values()), list(second.feeds.values()))
        onnx.checker.check_model(first.model)
        outputs = list(SingaBackend.prepare(first.model).run(first.feeds))
        assert len(outputs) == len(first.model.graph.output)
    assert generate.draw(3, 0).model != generate.draw(4, 0).model


def test_graphs_have_all_that_graphs_can_have() -> None:
    drawn = [generate.draw(5, i) for i in range(60)]
    names = {n.op_type for c in drawn for n in generate.every_node(c.model)}
    assert {"If", "Loop", "Scan", "SequenceConstruct", "Constant", "F0"} <= names and len(names) > 120
    sizes = [len(generate.every_node(c.model)) for c in drawn]
    assert sum(5 <= n <= 30 for n in sizes) > 45
    assert len({c.opset for c in drawn}) > 8
    inputs = [i for c in drawn for i in c.model.graph.input]
    assert any(d.dim_param for i in inputs for d in i.type.tensor_type.shape.dim)
    assert len({i.type.tensor_type.elem_type for i in inputs}) >= 6
    assert any(o.name in {i.name for i in c.model.graph.input} for c in drawn for o in c.model.graph.output)
    assert any(o.name in {t.name for t in c.model.graph.initializer} for c in drawn for o in c.model.graph.output)
    assert any(c.model.graph.initializer for c in drawn)


# --- how precisely a graph determines its results


def test_rounding_bounds_the_difference_and_no_more() -> None:
    proto = model("g (float[2] x) => (float[2] y) { e = Exp(x) y = Sub(e, w) }", w=np.exp(np.array([3, 3], F)))
    known = answer.known(case(proto, x=np.array([3.0, 1.0], F)))["y"]
    exact = known.value
    near, far = exact + np.array([1e-5, 1e-5], F), exact + np.array([1e-2, 1e-2], F)
    assert values.differs(near, known.runs, "y") == ("", "")  # what cancels in the subtraction
    assert values.differs(far, known.runs, "y")[0] == "values"


def test_values_that_rounding_may_change_are_not_kept() -> None:
    run = [np.array([1, 2]), np.array([1, 3])]
    assert not values.steady(run) and values.steady([run[0], run[0].copy()])
    assert not values.steady([np.array([np.nan], F)] * 2) and not values.steady([np.array([1e9], F)] * 2)
    assert not values.steady([np.array([1.0], F), np.array([1.1], F)])
    assert values.steady([[run[0]], [run[0]]]) and not values.steady([[run[0]], [run[0], run[0]]])


def test_exact_values_are_compared_exactly() -> None:
    x = np.array([1.0, 2.0], F)
    proto = model("g (float[2] x) => (float[2] y) { y = Identity(x) }")
    runs = answer.known(case(proto, x=x))["y"].runs
    assert values.differs(np.nextafter(x, F(9)), runs, "y")[0] == "values"
    assert values.differs(x.astype(np.float64), runs, "y")[0] == "dtype" and values.differs(x[:1], runs, "y")[0] == "shape"


# --- the verdict

SMALL = "g (float[2] x) => (float[2] y, float[2] z) { y = Tanh(x) z = Add(y, x) }"


def test_a_graph_whose_forms_agree() -> None:
    judged = verdict_on(case(model(SMALL), 13, 8, x=np.array([0.5, 1.0], F)))
    assert not judged.differences and judged.good
    assert judged.forms == ["optimized", "convert to 13", "convert to 8", "SONNXModel", "export", "export by example", "codegen"]


def broken(found: answer.Answer) -> None:
    outputs = found.forms[1].outputs
    assert outputs is not None
    outputs[1] = outputs[1] + F(1e-3)


def raised(found: answer.Answer) -> None:
    found.forms[3].outputs, found.forms[3].foreign = None, "KeyError"


def lost(found: answer.Answer) -> None:
    found.forms[2].outputs, found.forms[2].refused = None, "[SX100] no"


def changed(found: answer.Answer) -> None:
    found.fault = "an input was changed"


@pytest.mark.parametrize(
    ("change", "form", "kind"),
    [(broken, "convert to 13", "values"), (raised, "SONNXModel", "foreign"), (lost, "convert to 8", "refused")],
)
def test_a_form_that_differs_fails(change: Any, form: str, kind: str) -> None:
    judged = verdict_on(case(model(SMALL), 13, 8, x=np.array([0.5, 1.0], F)), change)
    assert judged.status == "unexplained" and not judged.good
    assert [(d.form, d.kind) for d in judged.differences] == [(form, kind)]


def test_a_fault_and_the_death_of_our_child_fail() -> None:
    one = case(model(SMALL), x=np.array([0.5, 1.0], F))
    assert verdict_on(one, changed).status == "unexplained"
    judge_alone = judge.Judge([], [], None, lambda request: None)
    assert judge_alone.judge(0, "died: exit code -11").status == "died"
    assert not judge_alone.judge(0, "hang: no answer").good


def test_the_ledger_explains_what_it_names_and_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "graphs.toml"
    path.write_text(
        '[[entry]]\noperator = "form"\nform = "convert.*"\nwhen = ["kind=values", "contains=Tanh"]\nclass = "ours"\nwhy = "x"'
    )
    entries = ledger.read(path)
    one = case(model(SMALL), x=np.array([0.5, 1.0], F))
    assert ledger.find(entries, one, "convert to 13", "form", "values", "") is not None
    assert ledger.find(entries, one, "export", "form", "values", "") is None
    assert ledger.find(entries, one, "convert to 13", "form", "shape", "") is None
    for text in ('operator = "form"\nclass = "ours"', 'operator = "form"\nclass = "ours"\nwhy = "x"\nwhen = ["moon"]'):
        path.write_text(f"[[entry]]\n{text}")
        with pytest.raises(ConformanceError):
            ledger.read(path)
    ledger.read(data_file("graphs.toml"))


def witnessed(one: generate.Case, change: Any, known: Any = ()) -> judge.Judged:
    """The verdict with onnxruntime, after a change of what we answered."""
    pytest.importorskip("onnxruntime")
    with judge.session(0, [], known) as session:
        found = session.ask(one)
        change(found)
        return session.judge(0, found)


def test_the_first_node_that_differs_from_onnxruntime_is_found() -> None:
    def wrong(found: answer.Answer) -> None:
        for name in ("y", "z"):
            found.known[name].runs = [v + F(0.25) for v in found.known[name].runs]
        found.ours = [found.known["y"].value, found.known["z"].value]
        found.forms = []

    judged = witnessed(case(model(SMALL), x=np.array([0.5, 1.0], F)), wrong)
    assert [(d.form, d.operator, d.kind) for d in judged.differences] == [("onnxruntime", "Tanh", "values")]
    assert judged.status == "unexplained"


def test_a_node_without_a_kernel_is_removed_and_the_others_are_judged() -> None:
    text = "g (double[1, 1, 2] x) => (double[1, 1, 1] y, double[1, 1, 1] z) { s = Tanh(x) y = GlobalLpPool(s) z = Neg(y) }"
    judged = witnessed(case(model(text), x=np.array([[[0.5, 1.0]]])), lambda found: None)
    assert judged.removed == [("GlobalLpPool", "no kernel")] and judged.judged == 2 and judged.status == "agree"


def test_the_ledger_of_operators_explains_nodes_within_graphs() -> None:
    text = """g (bool c) => (float[n] y) { y = If (c) <
        then_branch = t () => (float[k] a) { n = Constant <value = int64 {1}> () a = HannWindow <periodic = 0> (n) },
        else_branch = e () => (float[k] b) { b = Constant <value = float[1] {1.0}> () } > }"""
    one = case(model(text), c=np.array(True))
    judged = witnessed(one, lambda found: None, operators.read(data_file("ledger.toml")))
    assert judged.status == "explained" and judged.differences[0].operator == "If"
    assert witnessed(one, lambda found: None).status == "unexplained"


# --- the command


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run = CliRunner().invoke(main, ["fuzz", "--graphs", "3", "--seed", "7", "-n", "1", "--json", "--report", str(tmp_path)])
    document = load(tmp_path / "graphs.json")
    assert json.loads(run.output)["totals"]["graphs"] == 3 and document["totals"]["nodes"] >= 15
    assert stale_page(document, tmp_path / "graphs.json", summary.PAGES) == ""
    assert CliRunner().invoke(main, ["fuzz", "--graphs", "3", "-k", "Add"]).exit_code == 2
    one = CliRunner().invoke(main, ["fuzz", "--graphs", "1", "--seed", "7", "--only", "1", "--write", str(tmp_path / "graph")])
    assert "forms that agree" in one.output and (tmp_path / "graph" / "model.onnx").exists()


def test_the_page_of_the_last_run_is_current() -> None:
    path = Path(__file__).parents[1] / "reports" / "graphs.json"
    if not path.exists():
        pytest.skip("no run is committed")
    assert stale_page(load(path), path, summary.PAGES) == ""
