"""A new operator is declared in one place: running, differentiating, writing, fuzzing and reporting need its declaration only."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import ModelProto, checker, helper

from singa import sonnx
from singa._core import ops, tape
from singa._core.backward import backward
from singa._core.tensor import Tensor
from singa.cli import main
from singa_backend import SingaBackend, read
from singa_backend.conform import gradient_matrix, gradients, report
from singa_backend.conform.fuzz import generate, recipes, run, summary
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import UnsupportedModel
from singa_backend.interpreters.builder import GraphBuilder
from singa_backend.ir.declaration import declarations, has_trait
from singa_backend.opsets.convert import convert
from singa_backend.opsets.model import to_model
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.plans.flat import flat
from singa_backend.plans.fusion.rewriter import PlanRewriter
from singa_backend.proto.schemas import _newest, declare_schema, newest, schemas

DOMAIN = "test.operators"
NAMES = ["Hypot", "Noise", "Squareplus"]
FAMILY = '''
"""Operators that ONNX lacks."""

from __future__ import annotations

import numpy as np

from singa_backend.operators._api import Array, Op, V, Xp, operator
from singa_backend.proto.schemas import declare_schema

DOMAIN = "test.operators"
BROADCASTS = "This operator supports multidirectional (i.e., Numpy-style) broadcasting."

declare_schema("Squareplus", ["x: T"], ["y: T"], {"b": 4.0}, types={"T": ["float16", "float", "double"]}, domain=DOMAIN)
declare_schema("Hypot", ["x: tensor(float)", "y: tensor(float)"], ["z: tensor(float)"], types={}, doc=BROADCASTS, domain=DOMAIN)
declare_schema("Noise", ["x: tensor(float)"], ["y: tensor(float)"], {"seed": 0}, types={}, domain=DOMAIN)


@operator("Squareplus", 1, domain=DOMAIN, traits=("unary", "cannot_fail"))
def squareplus(xp: Xp, x: Array, *, b: float = 4.0) -> Array:
    return (x + xp.sqrt(x * x + b)) / 2


@squareplus.gradient
def squareplus_gradient(op: Op, dy: V, x: V, y: V) -> V:
    return op.Mul(dy, op.Div(y, op.Sub(op.Add(y, y), x)))


@squareplus.decomposition
def squareplus_decomposition(op: Op, x: V, b: float) -> V:
    return op.Mul(op.Add(x, op.Sqrt(op.Add(op.Mul(x, x), b))), 0.5)


@operator("Hypot", 1, domain=DOMAIN, traits=("broadcasting",))
def hypot(xp: Xp, x: Array, y: Array) -> Array:
    return xp.sqrt(x * x + y * y)


@hypot.decomposition
def hypot_decomposition(op: Op, x: V, y: V) -> V:
    return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))


@operator("Noise", 1, domain=DOMAIN, traits=("random", "shape_of_first"))
def noise(xp: Xp, x: Array, *, seed: int = 0) -> Array:
    return x + xp.asarray(np.random.default_rng().standard_normal(x.shape).astype(np.float32))


noise.no_gradient("random")
'''
X = np.array([[-3.0, -0.5, 0.0], [0.25, 2.0, 10.0]])


def squareplus(x: Any, b: float = 4.0) -> Any:
    return 0.5 * (x + np.sqrt(np.square(x) + b))


@pytest.fixture(scope="module", autouse=True)
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The family, imported from a file that is not part of the package; its operators go with it."""
    path = tmp_path_factory.mktemp("family") / "new_operators.py"
    path.write_text(FAMILY)
    spec = importlib.util.spec_from_file_location("new_operators", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["new_operators"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["new_operators"]
        for name in NAMES:
            declarations.pop((DOMAIN, name), None)
            schemas.pop((DOMAIN, name), None)
        _newest.pop(DOMAIN, None)
        assert newest(DOMAIN) == 0


def builder(opset: int, **types: tuple[Any, list[Any]]) -> tuple[GraphBuilder, list[Any]]:
    made = GraphBuilder(opset)
    return made, [made.input(n, helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(d)), s))
                  for n, (d, s) in types.items()]  # fmt: skip


def model(name: str, opset: int = 21, inputs: int = 1, dtype: Any = np.float32, **attributes: Any) -> ModelProto:
    """A model of one node, as a file from elsewhere would have it."""
    names = [f"x{i}" for i in range(inputs)]
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node(name, names, ["y"], name="node", domain=DOMAIN, **attributes)], "g",
        [helper.make_tensor_value_info(n, code, ["n", 3]) for n in names], [helper.make_tensor_value_info("y", code, ["n", 3])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("", opset)], ir_version=10)


def operators(proto: ModelProto) -> list[str]:
    return [f"{n.domain}:{n.op_type}" if n.domain else n.op_type for n in proto.graph.node]


# --- it runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_it_runs(device: str, dtype: Any) -> None:
    x = X.astype(dtype)
    for given in ({}, {"b": 1.0}):
        y = SingaBackend.run_model(model("Squareplus", dtype=dtype, **given), [x], device)[0]
        assert y.dtype == dtype
        np.testing.assert_allclose(y, squareplus(X, **given), rtol=2e-3 if dtype == np.float16 else 1e-6)


def test_two_inputs_are_broadcast(check: Any) -> None:
    x, y = np.array([[3.0], [5.0]], np.float32), np.array([4.0, 12.0], np.float32)
    check("Hypot", [x, y], [np.array([[5, 12.369317], [6.4031243, 13]], np.float32)], opset=1, domain=DOMAIN)


def test_a_model_is_checked_like_any_other() -> None:
    with pytest.raises(UnsupportedModel, match="Squareplusss"):
        SingaBackend.prepare(model("Squareplusss"))


def test_a_schema_of_onnx_is_not_declared_here() -> None:
    with pytest.raises(ValueError, match=r"must be a custom one, got 'ai\.onnx'"):
        declare_schema("Softmax", ["x: T"], ["y: T"], types={"T": ["float"]}, domain="")


# --- it differentiates ------------------------------------------------------------------------------------------------


def test_tensors_have_gradients() -> None:
    x = Tensor(data=X.copy(), stores_grad=True)
    tape.training = True
    y = ops.op.Squareplus(x, b=2.0, domain=DOMAIN)
    loss = ops.op.ReduceSum(ops.op.Mul(y, y))
    ((_, grad),) = backward(ops.op.Reshape(loss, [1]))

    def total(x: Any) -> float:
        return float((squareplus(x, 2.0) ** 2).sum())

    for place in np.ndindex(X.shape):
        step = np.zeros_like(X)
        step[place] = 1e-5
        slope = (total(X + step) - total(X - step)) / 2e-5
        assert abs(grad.data[place] - slope) <= 1e-7 * max(1, abs(slope))


@pytest.mark.parametrize("name", ["Squareplus", "Hypot"])
def test_the_rule_agrees_with_differences_and_its_graph(name: str) -> None:
    """By the judge of `sonnx gradients`: in float64, at points that its generator draws."""
    found = [f for p in gradients.points(DOMAIN, name, 1, count=10) for f in gradients.judge(p)]
    assert {f.verdict for f in found} <= {"agree", "kink"} and sum(f.verdict == "agree" for f in found) >= 10, found


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = declarations[DOMAIN, "Squareplus"][1].gradient_rule
    monkeypatch.setattr(rule, "function", lambda op, dy, x, y: op.Mul(dy, y))
    assert "wrong" in {f.verdict for p in gradients.points(DOMAIN, "Squareplus", 1, count=5) for f in gradients.judge(p)}


def test_the_command_lists_it_by_its_domain() -> None:
    listed = [r.name for r in gradient_matrix.listed(f"^{DOMAIN}:Squareplus-1$")]
    assert listed == [f"{DOMAIN}:Squareplus-1"]
    assert DOMAIN not in {r.domain for r in (*gradient_matrix.listed(), *gradient_matrix.listed("Squareplus"))}
    done = CliRunner().invoke(main, ["gradients", "ai.singa:Philox", "--to", "reports"])
    assert done.exit_code == 2 and "--to keeps rows of ONNX's operators and com.microsoft only" in done.output


# --- it is planned ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Squareplus", "Hypot", "Noise"])
def test_plans_know_its_type_by_its_schema_and_traits(name: str) -> None:
    graph = read(model(name, inputs=2 if name == "Hypot" else 1))
    plan = flat(graph)
    (x, *_), (y,) = plan.inputs, plan.outputs
    rewriter = PlanRewriter(plan, {v: (v.declared.dtype, v.declared.shape) for v in plan.inputs if v.declared})
    assert rewriter.dtype(y) == np.float32 and rewriter.shape(y) == rewriter.shape(x) == ("=n", 3)


# --- it is written ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [7, 13, 21, newest("")])
@pytest.mark.parametrize("name", ["Squareplus", "Hypot"])
def test_it_is_written_at_any_opset(name: str, opset: int) -> None:
    """With attributes as its decomposition; without them as a node whose function body is the decomposition."""
    count = 2 if name == "Hypot" else 1
    given = {} if name == "Hypot" else {"b": 1.0}
    source = model(name, inputs=count, **given)
    written = convert(read(source), opset)
    checker.check_model(written, full_check=True)
    functions = [(f.name, f.opset_import[0].version) for f in written.functions]
    if name == "Hypot":
        assert operators(written) == [f"{DOMAIN}:Hypot"] and functions == [("Hypot", opset)]
    else:
        assert operators(written) == ["Mul", "Add", "Sqrt", "Add", "Mul"] and functions == []
    assert {o.domain: o.version for o in written.opset_import}[""] == opset
    feeds = {f"x{i}": X.astype(np.float32) * (i + 1) for i in range(count)}
    want = SingaBackend.run_model(source, list(feeds.values()))[0]
    np.testing.assert_allclose(SingaBackend.run_model(written, list(feeds.values()))[0], want, rtol=1e-6)


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
@pytest.mark.parametrize("name", ["Squareplus", "Hypot"])
def test_what_is_written_runs_elsewhere(name: str, engine: str) -> None:
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")
    count = 2 if name == "Hypot" else 1
    written = convert(read(model(name, inputs=count)), 18)
    feeds = {f"x{i}": X.astype(np.float32) * (i + 1) for i in range(count)}
    with Oracle(engine) as oracle:
        theirs = oracle.run(written.SerializeToString(), feeds)["y"]
    want = np.hypot(*feeds.values()) if name == "Hypot" else squareplus(X)
    np.testing.assert_allclose(theirs, want, rtol=1e-5)


def test_tensors_are_exported() -> None:
    x = Tensor(data=X.astype(np.float32), requires_grad=False)
    tape.training = True
    y = ops.op.Add(ops.op.Squareplus(x, domain=DOMAIN), ops.op.Hypot(x, x, domain=DOMAIN))
    written = sonnx.to_onnx([x], [y])
    assert [f.name for f in written.functions] == ["Hypot"]
    np.testing.assert_allclose(
        SingaBackend.run_model(written, [x.data])[0], squareplus(X) + np.sqrt(2) * np.abs(X), rtol=1e-5, atol=1e-6
    )


def test_traits_serve_the_graph_that_is_built() -> None:
    """What is random is drawn twice, and without a decomposition it is a custom node whose type the traits know."""
    graph, (x,) = builder(21, x=(np.float32, ["n", 3]))
    made = [graph.call("Noise", [x], {}, 1, DOMAIN)[0] for _ in range(2)]
    same = [graph.call("Squareplus", [x], {}, 1, DOMAIN)[0] for _ in range(2)]
    assert made[0].name != made[1].name and same[0] is same[1]
    assert graph.shape(made[0]) == ("n", 3) == graph.shape(same[0]) and graph.dtype(made[0]) == np.float32
    written = to_model(graph, "g", [*made, same[0]])
    assert operators(written) == [f"{DOMAIN}:Noise"] * 2 + [f"{DOMAIN}:Squareplus"] and not written.functions
    writer = OpsetWriter(13)
    y = writer.call("Noise", [writer.input("x", helper.make_tensor_type_proto(1, [2]))], {}, 1, DOMAIN)
    assert operators(to_model(writer, "g", y)) == [f"{DOMAIN}:Noise"]
    assert has_trait(DOMAIN, "Noise", "random") and not has_trait("", "Noise", "random")


# --- it is fuzzed -----------------------------------------------------------------------------------------------------


def judged(name: str, count: int = 60) -> list[run.JudgedCase]:
    select, judge = f"^{DOMAIN}:{name}-1$", run.CaseJudge([], None)
    return [judge.judge(i, run.answer(3, i, select)) for i in range(count)]


def test_the_fuzzer_draws_it() -> None:
    assert {(DOMAIN, n) for n in NAMES} <= set(recipes.load())
    assert {c[4] for c in generate.cells(f"^{DOMAIN}:Squareplus")[0]} == {"float16", "float32", "float64"}
    cases = [c for i in range(200) if (c := generate.draw(0, i, "^test.operators:Hypot")) is not None]
    assert len({v.shape for c in cases for v in c.inputs.values()}) > 20
    assert any(len({v.shape for v in c.inputs.values()}) > 1 for c in cases), "shapes that broadcast"
    everything = {(d, n) for d, n, _ in generate.cells()[1]}
    assert {(DOMAIN, n) for n in NAMES} <= everything and ("ai.singa", "Philox") not in everything


@pytest.mark.parametrize("name", ["Squareplus", "Hypot"])
def test_the_decomposition_is_a_witness(name: str) -> None:
    found = judged(name)
    assert {j.status for j in found} == {"agree"}, [(j.describe, j.differences) for j in found if j.status != "agree"]
    assert {w for j in found for w in j.witnesses} == {"decomposition"}


def test_a_wrong_body_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations[DOMAIN, "Hypot"][1], "body", lambda xp, x, y: abs(x) + abs(y))
    assert "unexplained" in {j.status for j in judged("Hypot")}


def test_what_draws_has_no_witness() -> None:
    assert {j.status for j in judged("Noise", 20)} == {"unjudged"}


# --- it is reported ---------------------------------------------------------------------------------------------------


def test_it_is_a_row_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "fuzz.json").write_text(json.dumps(summary.to_json(judged("Squareplus"), 3)))
    totals = {"cases": 1, "strict": 1, "official": 1, "by_verdict": {}, "by_kind": {}}
    done = {"environment": {"device": "CPU", "onnx": "1.23.2"}, "manifest": "0" * 16, "totals": totals}
    done |= {"gaps": {}, "unexpected": [], "executed": []}
    built = report.build([done], tmp_path)
    row = next(r for r in built["rows"] if (r["domain"], r["operator"]) == (DOMAIN, "Squareplus"))
    assert row["declared"] and row["latest"] and row["version"] == 1
    assert row["fuzz"] == row["dtypes_allowed"] == {"T": ["float16", "float32", "float64"]}
    report.write(built, tmp_path)
    assert [line for line in (tmp_path / "support.md").read_text().splitlines() if "Squareplus" in line]
    assert report.stale(built, tmp_path) == ""
