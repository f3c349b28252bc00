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
from tests.helpers.paths import PROJECT

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


def case(proto: ModelProto, *others: int, **feeds: np.ndarray) -> generate.GraphCase:
    return generate.GraphCase(0, 0, proto, feeds, others)


def verdict_on(one: generate.GraphCase, change: Any = None) -> judge.JudgedGraph:
    """The verdict without onnxruntime; `change` alters the answer before it is judged."""
    found = answer.answer(one, forms)
    if change:
        change(found)
    return judge.GraphJudge([], [], None, lambda request: None).judge(0, found)


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


def broken(found: answer.GraphAnswer) -> None:
    outputs = found.forms[1].outputs
    assert outputs is not None
    outputs[1] = outputs[1] + F(1e-3)


def raised(found: answer.GraphAnswer) -> None:
    found.forms[3].outputs, found.forms[3].foreign = None, "KeyError"


def lost(found: answer.GraphAnswer) -> None:
    found.forms[2].outputs, found.forms[2].refused = None, "[SX100] no"


def changed(found: answer.GraphAnswer) -> None:
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
    judge_alone = judge.GraphJudge([], [], None, lambda request: None)
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


def witnessed(one: generate.GraphCase, change: Any, known: Any = ()) -> judge.JudgedGraph:
    """The verdict with onnxruntime, after a change of what we answered."""
    pytest.importorskip("onnxruntime")
    with judge.session(0, [], known) as session:
        found = session.ask(one)
        change(found)
        return session.judge(0, found)


def test_the_first_node_that_differs_from_onnxruntime_is_found() -> None:
    def wrong(found: answer.GraphAnswer) -> None:
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
    assert "forms that agree" in one.output
    again = CliRunner().invoke(
        main, ["run", str(tmp_path / "graph/model.onnx"), "--data", str(tmp_path / "graph/test_data_set_0")]
    )
    assert again.exit_code == 0, again.output


def test_the_page_of_the_last_run_is_current() -> None:
    path = PROJECT / "reports" / "graphs.json"
    if not path.exists():
        pytest.skip("no run is committed")
    assert stale_page(load(path), path, summary.PAGES) == ""


# --- what it found

INNER = """g (bool c, float[1, 2] x) => (float[1, 2] y) { y = If (c) <
    then_branch = t () => (float[1, 2] a) { a = ai.onnx.ml.Normalizer <norm = "MAX"> (x) },
    else_branch = e () => (float[1, 2] b) { b = Neg(x) } > }"""


def test_domains_that_only_inner_graphs_use_are_imported() -> None:
    """A model written from nodes imports the domains of all nodes, not only of those of its main graph."""
    proto = model(INNER)
    feeds = {"c": np.array(True), "x": np.array([[1.0, 2.0]], F)}
    judged = verdict_on(case(proto, 16, 25, **feeds))
    assert judged.good and len(judged.forms) == 7, judged.differences
    again = sonnx.convert(model(INNER, ml=1), 16)
    assert {o.domain: o.version for o in again.opset_import} == {"": 16, "ai.onnx.ml": 1}


def test_export_records_operators_of_a_file_in_its_version_of_the_domain() -> None:
    text = 'g (string[2] x) => (int64[2] y) { y = ai.onnx.ml.LabelEncoder <classes_strings = ["a", "b"]> (x) }'
    proto = sonnx.export(sonnx.SONNXModel(model(text, ml=1)))
    assert {o.domain: o.version for o in proto.opset_import}["ai.onnx.ml"] == 1
    x = np.array(["b", "a"], object)
    assert SingaBackend.prepare(proto).run([x])[0].tolist() == [1, 0]


def test_a_program_drops_elements_and_returns_their_mask(tmp_path: Path) -> None:
    text = "g (float[1000] x) => (float[1000] y, bool[1000] m) { y, m = Dropout(x, r) }"
    program = codegen.generate(model(text, r=np.array(0.25, F)), "program")
    path, _ = program.write(tmp_path / "program.py")
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net, x = module.Model(), tensor.from_numpy(np.ones(1000, F))
    net.eval()
    y, m = net.forward(x)
    assert tensor.to_numpy(y).tolist() == [1.0] * 1000 and tensor.to_numpy(m).all()
    net.train()
    before = autograd.training
    autograd.training = True
    try:
        y, m = (tensor.to_numpy(v) for v in net.forward(x))
    finally:
        autograd.training = before
    assert 150 < np.count_nonzero(y == 0) < 350 and np.array_equal(y != 0, m)
    np.testing.assert_allclose(y[m], 1 / 0.75, rtol=1e-6)


@pytest.mark.parametrize("axis", [None, 1])
def test_an_input_that_is_absent_keeps_its_default_where_the_attribute_has_another(axis: int | None) -> None:
    """The axis of DFT is an input with the default -2 from opset 20 on, and an attribute with the default 1 before."""
    last = ", , axis" if axis is not None else ""
    proto = model(f"g (float[1, 2, 3, 4, 1] x) => (float[a, b, c, d, e] y) {{ y = DFT(x{last}) }}",
                  **({"axis": np.array(axis)} if axis is not None else {}))  # fmt: skip
    x = np.arange(24, dtype=F).reshape(1, 2, 3, 4, 1)
    (expected,) = SingaBackend.prepare(proto).run([x])
    np.testing.assert_allclose(SingaBackend.prepare(sonnx.convert(proto, 17)).run([x])[0], expected, rtol=1e-4, atol=1e-4)


def test_what_an_older_opset_cannot_express_is_a_typed_error() -> None:
    """Also if a rule needs an element type or a rank that inference does not know, or the operator needs more inputs there."""
    grid = model("g (float[n, r, s] theta, int64[k] size) => (float[a, b, c, d] y) { y = AffineGrid(theta, size) }")
    scan = model("""g (float[2, 3] x) => (float[3, 2] y) { y = Scan <num_scan_inputs = 1, scan_output_axes = [1],
        body = b (float[3] r) => (float[3] s) { s = Neg(r) }> (x) }""")
    top = model("g (float[3] x) => (float[0] v, int64[0] i) { v, i = TopK(x, k) }", k=np.array([0], np.int64))
    sample = model(
        'g (string[1, 1, 2, 2] x, float[1, 2, 2, 2] at) => (string[a, b, c, d] y) { y = GridSample <mode = "nearest"> (x, at) }'
    )
    for proto, opset in ((grid, 16), (scan, 8), (top, 9), (sample, 15)):
        with pytest.raises(UnsupportedModel) as caught:
            sonnx.convert(proto, opset)
        assert caught.value.code == "SX206"


def test_an_unknown_element_type_after_another_problem_is_part_of_the_same_error() -> None:
    text = """g (float[2, 3] x) => (float[2, 3] y) { y = Scan <num_scan_inputs = 1, body = b (float[3] r) => (float[3] s)
        { q = SequenceConstruct(r) t = SequenceAt(q, zero) c = CastLike(t, r) s = Relu(c) }> (x) }"""
    with pytest.raises(UnsupportedModel, match="cannot be written"):
        sonnx.convert(model(text, zero=np.array(0)), 8)


def test_inner_outputs_keep_a_declared_rank_that_inference_does_not_know() -> None:
    """onnxruntime refuses a Scan whose body does not declare the shapes of its outputs."""
    text = """g (float[2, 3] x, float[3] h, int64[k] shape) => (float[3] last, float[2, 1, 3] y) {
        last, y = Scan <num_scan_inputs = 1, body = b (float[3] a, float[3] r) => (float[3] a2, float[1, 3] s)
        { s = Reshape(r, shape) a2 = Add(a, r) }> (h, x) }"""
    written = sonnx.convert(model(text), 19)
    scan = next(n for n in written.graph.node if n.op_type == "Scan")
    body = next(a.g for a in scan.attribute if a.HasField("g"))
    assert all(o.type.tensor_type.HasField("shape") for o in body.output)


def test_an_optional_of_a_constant_is_not_a_constant() -> None:
    """Its value is a tensor, but its type is not; it was written only at the newest opset, whatever was requested."""
    text = """g (float[1] x) => (float[1] y) {
        c = Constant <value = float[1] {2.0}> () o = Optional(c) e = OptionalGetElement(o) y = Add(x, e) }"""
    proto = sonnx.convert(model(text, 16), 16)
    assert proto.opset_import[0].version == 16
    assert SingaBackend.prepare(proto).run([np.ones(1, F)])[0].tolist() == [3.0]


def test_the_mask_of_an_old_dropout_has_the_type_of_its_input() -> None:
    """Before opset 10, also where a model follows its own mode."""
    proto = model("g (float[2] x) => (float[2] y, float[2] m) { y, m = Dropout(x) }", 9)
    judged = verdict_on(case(proto, 12, x=np.ones(2, F)))
    assert [d.form for d in judged.differences if d.kind == "dtype"] == []
