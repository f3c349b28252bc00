"""`check` reports every problem at once and `inspect` shows what is there, of good, unsupported, broken and foreign files."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper, parser

from singa import sonnx
from singa.cli import main
from singa_backend import InvalidModel
from singa_backend.conform import cases
from singa_backend.inspection import checking, tables
from singa_backend.proto import checker

GOOD = """<ir_version: 10, opset_import: ["": 9], producer_name: "maker"> g (float[n, 3] x) => (float[n, 3] y)
    { u = Upsample <mode = "nearest"> (x, scales) t = MatMul(u, w) y = Relu(t) }"""
BAD = """<ir_version: 10, opset_import: ["": 17, "far.away": 1]> g (int32[3] x, float[3] f) => (int32[3] y)
    { a = Relu <slope = 1> (x) b = far.away.Thing(f) c = Relu(missing) d = Sofmax(f) y = LeakyRelu(x) }"""
NESTED = """<ir_version: 10, opset_import: ["": 17, "my": 1]> g (bool c, float[2] x) => (float[2] y)
    { t = my.twice(x)
      y = If (c) <then_branch = a () => (float[2] p) { p = Add(t, x) }, else_branch = b () => (float[2] q) { q = Neg(t) }> }
    <domain: "my", opset_import: ["": 17]> twice (v) => (w) { w = Add(v, v) }"""


def _good() -> onnx.ModelProto:
    model = parser.parse_model(GOOD)
    w = np.array([[1, 2, np.nan], [3, -4, 5], [np.inf, 7, 8]], np.float32)
    model.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.ones(2, np.float32), "scales")])
    return model


def _cli(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def _save(model: onnx.ModelProto | str, folder: Path) -> Path:
    path = folder / "m.onnx"
    onnx.save(parser.parse_model(model) if isinstance(model, str) else model, path)
    return path


# --- check


def test_check_of_a_good_model() -> None:
    report = sonnx.check(_good())
    assert report.good and report.valid and report.problems == []
    assert {(u.operator, u.version, u.status, u.nodes) for u in report.operators} == {
        ("Upsample", 9, "supported", 1), ("MatMul", 9, "supported", 1), ("Relu", 6, "supported", 1),
    }  # fmt: skip
    assert report.dtypes == ["float"] and report.opinion.valid


def test_every_problem_at_once() -> None:
    report = sonnx.check(parser.parse_model(BAD))
    said = [f"{p.code} {p}" for p in report.problems]
    for words in ("SX107 node 'Relu_0': Relu has no attribute 'slope'", "SX202 node 'Thing_1'", "'missing' is not defined",
                  "did you mean Softmax?", "SX107 node 'LeakyRelu_4': input 'X' (x) of LeakyRelu-16 must be of "):  # fmt: skip
        assert any(words in s for s in said), (words, said)
    assert any("LeakyRelu-16 must be of " in s and s.endswith(", got int32") for s in said), said
    assert not report.valid and not report.good
    status = {u.operator: u.status for u in report.operators}
    assert status == {"Relu": "supported", "Thing": "unsupported", "Sofmax": "unsupported", "LeakyRelu": "supported"}
    assert report.opinion.valid is False and report.opinion.message
    json.dumps(report.to_dict())


def test_valid_and_unsupported_differ() -> None:
    report = sonnx.check(parser.parse_model("""<ir_version: 10, opset_import: ["": 17, "far.away": 1]>
        g (float[3] f) => (float[3] y) { y = far.away.Thing(f) }"""))  # fmt: skip
    assert report.valid and not report.good and [p.code for p in report.problems] == ["SX202"]


def test_deprecated_operators_are_named() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 10]> g (float[2] x, float[1] s) => (float[n] y) { y = Upsample(x, s) }'
    )
    report = sonnx.check(model)
    assert [(u.operator, u.version, u.status) for u in report.operators] == [("Upsample", 10, "deprecated")]
    assert report.good and report.opinion.valid is False and "deprecated" in report.opinion.message


def test_one_problem_keeps_its_code() -> None:
    model = _good()
    model.graph.initializer[0].dims[0] = -3
    report = sonnx.check(model)
    assert [p.code for p in report.problems] == ["SX104"]


def test_check_names_nodes_in_training_mode() -> None:
    """A network that was exported without eval() has random results; so has a training step, whose mode is an input."""
    text = """<ir_version: 10, opset_import: ["": 17]> g (float[2, 3, 4] x, bool mode) => (float[2, 3, 4] y)
        <float[3] one, float[3] zero> {
        yes = Constant <value = bool {1}> () a = Dropout (x, , yes) b = Dropout (a) c = Dropout (b, , mode)
        y, m, v = BatchNormalization <training_mode = 1> (c, one, zero, zero, one) }"""
    made = parser.parse_model(text)
    made.graph.initializer.extend(numpy_helper.from_array(np.full(3, i, np.float32), n) for i, n in enumerate(("zero", "one")))
    first, second = sonnx.check(made).warnings
    assert first.startswith("1 Dropout nodes are in training mode and drop random elements") and "eval()" in first
    assert second.startswith("1 BatchNormalization nodes are in training mode")
    made.graph.node[0].attribute[0].t.raw_data = b"\0"
    del made.graph.node[0].attribute[0].t.int32_data[:]
    made.graph.node[4].attribute[0].i = 0
    del made.graph.node[4].output[1:]
    assert sonnx.check(made).warnings == ()


def test_check_never_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    from singa_backend.runtime.executor import Executor

    monkeypatch.setattr(Executor, "__init__", None)
    assert sonnx.check(_good()).good


def test_no_dtype_is_refused_that_the_suite_uses() -> None:
    """Our own type rule, over ONNX's own models."""
    wrong = []
    for case in cases.load(["simple", "pytorch-converted", "pytorch-operator", "real"]):
        model = onnx.load_model_from_string(case.model)
        inferred = onnx.shape_inference.infer_shapes(model)
        seen = tables.tables(inferred, None, checker.CheckerResult(), None, False)
        wrong += [(case.name, str(p)) for t, c in seen.calls() for p in checking._mistyped(t, c)]
    assert wrong == []


@pytest.mark.parametrize(("content", "code"), [(b"not onnx at all", 3), (b"", 3), (None, 3)])
def test_a_file_that_is_not_a_model_exits_with_3(tmp_path: Path, content: bytes | None, code: int) -> None:
    path = tmp_path / "x.onnx"
    if content is not None:
        path.write_bytes(content)
    for command in ("check", "inspect"):
        found = _cli(command, path, "--json")
        assert found.exit_code == code and json.loads(found.output)["code"] == "SX110"
    with pytest.raises(InvalidModel):
        sonnx.check(path)


def test_check_on_the_command_line(tmp_path: Path) -> None:
    found = _cli("check", _save(_good(), tmp_path))
    assert found.exit_code == 0 and "everything in it is supported" in found.output and "accepts the model" in found.output
    found = _cli("check", _save(BAD, tmp_path))
    assert found.exit_code == 1 and "[SX107]" in found.output and "not valid: " in found.output and "refuses" in found.output
    found = _cli("check", tmp_path / "m.onnx", "--json")
    assert found.exit_code == 1 and len(json.loads(found.output)["problems"]) >= 5
    old = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 10]> g (float[2] x, float[1] s) => (float[n] y) { y = Upsample(x, s) }'
    )
    assert _cli("check", _save(old, tmp_path)).exit_code == 0
    assert _cli("check", tmp_path / "m.onnx", "--strict").exit_code == 1


@pytest.mark.parametrize(("answer", "says"), [
    ("os._exit(7)", "exit code 7"), ("os.abort()", "SIGABRT"), ("time.sleep(60)", "no answer within"),
    ("raise ValueError('on purpose')", "exit code 1"),
])  # fmt: skip
def test_a_checker_that_dies_or_hangs_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, says: str
) -> None:
    (tmp_path / "dying_checker.py").write_text(
        f"import os, time\ndef serve():\n    def a(request):\n        {answer}\n    return a"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "dying_checker", raising=False)
    monkeypatch.setattr(checker, "process", checker.CheckerProcess(importlib.import_module("dying_checker").serve))
    found = checker.check_and_infer(_good(), 1.0)
    assert found.valid is None and says in found.message and says in found.inference
    report = sonnx.check(_good(), timeout=1.0)
    assert report.good and report.opinion.valid is None
    assert report.dtypes == ["float"]


# --- inspect


def test_inspect() -> None:
    seen = sonnx.inspect(_good(), stats=True)
    assert (seen.opsets, seen.producer, seen.parameters, seen.bytes) == ({"ai.onnx": 9}, "maker", 11, 44)
    assert [str(v) for v in seen.main.inputs] == ["x: float[n, 3]"]
    w = seen.main.states[0]
    assert w.stats == {"min": -4.0, "max": 8.0, "nan": 1, "inf": 1} and w.bytes == 36
    assert seen.operators() == {"Upsample-9": 1, "MatMul-9": 1, "Relu-6": 1}
    node = seen.main.nodes[0]
    assert (node.title, node.name, node.inputs, node.attributes) == (
        "Upsample-9",
        "Upsample_0",
        ["x", "scales"],
        {"mode": "'nearest'"},
    )


def test_subgraphs_and_functions() -> None:
    seen = sonnx.inspect(parser.parse_model(NESTED))
    assert [(g.path, g.depth, len(g.nodes)) for g in seen.graphs] == [
        ("", 0, 2), ("1.then_branch", 1, 1), ("1.else_branch", 1, 1), ("function:my.twice", 0, 1),
    ]  # fmt: skip
    call = seen.main.nodes[0]
    assert (call.status, call.title, call.graphs) == ("function", "my.twice", ["function:my.twice"])
    assert seen.graphs[1].shown("p") == "float[2]"
    page = json.loads(seen.html().partition('id="data">')[2].partition("</script>")[0])
    main_graph = page["graphs"][0]
    conditional = next(i for i, v in enumerate(main_graph["vertices"]) if v["t"].startswith("If"))
    assert {main_graph["vertices"][a]["t"] for a, b, *_ in main_graph["edges"] if b == conditional} == {"c", "x", "my.twice"}


def test_inspect_of_what_would_be_refused() -> None:
    seen = sonnx.inspect(parser.parse_model(BAD))
    assert [c.status for c in seen.main.nodes] == ["supported", "unsupported", "supported", "unsupported", "supported"]
    cyclic = helper.make_model(helper.make_graph(
        [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])], "g", [], []))  # fmt: skip
    assert sonnx.inspect(cyclic).html()
    model = _good()
    del model.graph.initializer[:]
    model.graph.initializer.append(TensorProto(name="w", data_type=99, dims=[-1, 2]))
    (state,) = sonnx.inspect(model, stats=True).main.states
    assert "error" in (state.stats or {})


def test_inspect_on_the_command_line(tmp_path: Path) -> None:
    path = _save(NESTED, tmp_path)
    found = _cli("inspect", path, "--nodes", "--html", tmp_path / "deep" / "g.html")
    assert found.exit_code == 0 and "then_branch of If_1" in found.output and re.search(r"\bp +float\[2\]", found.output)
    assert "my.twice" in (tmp_path / "deep" / "g.html").read_text()
    data = json.loads(_cli("inspect", path, "--json").output)
    assert (
        data["operators"] == {"Add-14": 2, "Neg-13": 1, "my.twice": 1, "If-16": 1}
        and data["graphs"][3]["title"] == "function my.twice"
    )
    found = _cli("inspect", _save(_good(), tmp_path), "--stats")
    assert found.exit_code == 0 and "float[3, 3]" in found.output and "-4" in found.output


@pytest.mark.parametrize("old", [b"node_name", b"value_name", b"own.domain", b"attribute_name"])
def test_names_that_are_not_utf8_are_shown_and_are_a_problem(old: bytes, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "own.domain": 1]> g (float[n] x) => (float[n] y)
        { [node_name] value_name = Relu(x) y = own.domain.Odd<attribute_name = 1>(value_name) }"""
    path = tmp_path / "model.onnx"
    data = parser.parse_model(text).SerializeToString()
    assert old in data
    path.write_bytes(data.replace(old, b"\xff" * len(old)))
    report, seen = sonnx.check(path), sonnx.inspect(path)
    assert "SX107" in {p.code for p in report.problems} and not report.good
    assert json.loads(json.dumps(report.to_dict()))["problems"]
    for shown in (json.dumps(seen.to_dict()), seen.html()):
        assert "\\ufffd" in shown or "\ufffd" in shown


def test_a_check_that_takes_too_long_is_a_problem() -> None:
    model = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { y = Relu(x) }')
    report = sonnx.check(model, timeout=1e-6)
    assert [p.code for p in report.problems] == ["SX608"] and not report.good
