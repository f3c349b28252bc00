"""Two files of one net whose values have other names, and saved values: no node is blamed whose inputs were not compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import InvalidInput, SingaBackend, debug

NAMES, OTHERS = ("w", "v", "h", "r", "k"), ("p0", "p1", "t0", "t1", "t2")
X = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


def net(names: tuple[str, ...] = NAMES, *, last: str = "", middle: str = "Relu", opset: int = 17) -> ModelProto:
    """x -> Gemm -> middle -> Neg -> Gemm -> y, with weights of one seed."""
    w, v, h, r, k = names
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[2,4] x) => (float[2,3] y) {{'
        f" {h} = Gemm(x, {w}) {r} = {middle}({h}) {k} = Neg({r}) y = Gemm{last}({k}, {v}) }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in ((w, (4, 5)), (v, (5, 3))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return model


def sonnx(*words: object) -> Any:
    return CliRunner().invoke(main, [str(w) for w in words])


def test_a_node_whose_inputs_were_not_compared_is_not_the_cause() -> None:
    found = debug.compare(net(), X, against=net(OTHERS, last="<transA=0>", middle="Tanh"), align=False)
    assert [r.value for r in found.rows] == ["y"] and found.first is not None
    first = found.first
    assert (first.operator, first.inputs_agreed, first.unknown, first.among, first.notes) == ("Gemm", None, ["k"], 4, [])
    assert first.headline.startswith("first value that differs, of Gemm ") and "first diverging" not in first.headline
    assert "not compared: its input 'k'; one of 4 nodes is the cause" in str(first)


def test_pairs_narrow_the_cause_down_to_the_node() -> None:
    other = net(OTHERS, last="<transA=0>", middle="Tanh")
    near = debug.compare(net(), X, against=other, names={"h": "t0", "k": "t2"}, align=False).first
    assert near is not None and (near.operator, near.unknown, near.among) == ("Neg", ["r"], 2)
    exact = debug.compare(net(), X, against=other, names={"h": "t0", "r": "t1", "k": "t2"}, align=False).first
    assert exact is not None and exact.inputs_agreed and exact.headline.startswith("first diverging node: Relu ")
    assert exact.notes == ["the other model has Tanh 'Tanh_1' here"]


def test_compare_tells_what_was_and_what_was_not_compared(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "a.onnx")
    onnx.save(net(OTHERS, middle="Tanh"), tmp_path / "b.onnx")
    found = sonnx("compare", tmp_path / "a.onnx", "--against", tmp_path / "b.onnx", "--no-align")
    assert (
        "not compared: 3 nodes make values whose names the other model does not have: Gemm 'Gemm_0', Relu 'Relu_1', Neg"
        in found.stdout
    )
    assert "1 value compared, 1 differ" in found.stdout and "--map A=B" in found.stdout
    assert "first diverging node" not in found.stdout and "transA" not in found.stdout and found.exit_code == 1


@pytest.mark.parametrize("local", [False, True])
def test_bisect_writes_all_nodes_that_may_be_the_cause(local: bool, tmp_path: Path) -> None:
    other = net(OTHERS, middle="Tanh")
    found = debug.bisect(net(), X, against=other, names={"h": "t0"}, local=local, align=False, to=tmp_path / "r")
    assert found is not None and found.alone and found.node.inputs_agreed is None
    model = onnx.load(tmp_path / "r" / "model.onnx")
    assert [n.op_type for n in model.graph.node] == ["Relu", "Neg", "Gemm"] and [i.name for i in model.graph.input] == ["h"]
    expected = numpy_helper.to_array(onnx.load_tensor(tmp_path / "r" / "test_data_set_0" / "output_0.pb"))
    np.testing.assert_allclose(expected, SingaBackend.prepare(other).run(X)[0], rtol=1e-5)
    assert "model that is written has these 3 nodes" in found.node.notes[0]
    onnx.save(net(), tmp_path / "a.onnx")
    onnx.save(other, tmp_path / "b.onnx")
    told = sonnx("bisect", tmp_path / "a.onnx", "--against", tmp_path / "b.onnx", "--no-align", "--to", tmp_path / "s")
    assert told.stdout.startswith("first value that differs, of Gemm ") and "first diverging" not in told.stdout


def test_a_node_after_one_that_an_engine_refuses_is_the_cause_if_both_read_the_same(tmp_path: Path) -> None:
    """The values of this side replace those that the engine did not compute: the next node has the same inputs on both sides."""
    (tmp_path / "names_engine.py").write_text(
        "from onnx.reference import ReferenceEvaluator\n"
        "class Engine:\n"
        "    @staticmethod\n"
        "    def run_model(model, inputs, **_):\n"
        "        kinds = [n.op_type for n in model.graph.node]\n"
        "        if 'Relu' in kinds: raise ValueError('no Relu')\n"
        "        found = ReferenceEvaluator(model).run(None, dict(zip([i.name for i in model.graph.input], inputs)))\n"
        "        return tuple(v + 1 if 'Neg' in kinds and len(kinds) == 1 else v for v in found)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = debug.compare(net(), X, against="names_engine:Engine", budget=1)
    assert [n.operator for n in found.failed] == ["Relu"] and found.first is not None
    assert (found.first.operator, found.first.inputs_agreed) == ("Neg", True)


def test_saved_values_name_no_node_between_which_they_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "kept.npz", y=np.ones((2, 3), np.float32))
    found = debug.compare(net(), X, against=tmp_path / "kept.npz")
    assert found.first is not None and (found.first.inputs_agreed, found.first.among) == (None, 4)


# --- defaults of attributes -------------------------------------------------------------------------------------------


def subgraph(inner: str) -> ModelProto:
    return parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (bool c, float[2,2] x) => (float[2,2] y) {'
        f" y = If(c) <then_branch = a () => (float[2,2] p) {{ {inner} }}, else_branch = b () => (float[2,2] q)"
        " { q = Neg(x) }> }"
    )


def function(body: str, call: str = "local.F(x)") -> ModelProto:
    return parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17, "local": 1]> g (float[2,2] x) => (float[2,2] y) { y = ' + call + " }"
        ' <domain: "local", opset_import: ["": 17]> F <alpha: float = 0.5> (a) => (b) { ' + body + " }"
    )


EQUAL = {
    "unset": (net(), net(last="<transA=0, beta=1.0>")),
    "order": (net(last="<transA=0, alpha=2.0>"), net(last="<alpha=2.0>")),
    "subgraph": (subgraph("p = Softmax<axis=-1>(x)"), subgraph("p = Softmax(x)")),
    "function": (function("b = Elu<alpha=1.0>(a)"), function("b = Elu(a)")),
    "function's own": (function("b = Elu(a)", "local.F<alpha=0.5>(x)"), function("b = Elu(a)")),
}
UNEQUAL = {
    "unset": (net(), net(last="<alpha=2.0>"), "attribute 'alpha' is 1.0 (the default) and 2.0"),
    "other default": (
        parser.parse_model('<ir_version: 8, opset_import: ["": 11]> g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }'),
        parser.parse_model('<ir_version: 8, opset_import: ["": 13]> g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }'),
        "attribute 'axis' is 1 (the default) and -1 (the default)",
    ),
    "subgraph": (subgraph("p = Softmax<axis=0>(x)"), subgraph("p = Softmax(x)"), "attribute 'then_branch' is a graph of 1 nodes"),
    "function": (function("b = Elu<alpha=2.0>(a)"), function("b = Elu(a)"), "its body or signature differs"),
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL)
def test_an_attribute_that_is_not_set_has_its_default(case: str) -> None:
    first, second = EQUAL[case]
    assert debug.diff(first, second).equal, debug.diff(first, second).changes
    assert debug.diff(second, first).equal


@pytest.mark.parametrize("case", UNEQUAL)
def test_other_values_of_attributes_are_still_found(case: str) -> None:
    first, second, what = UNEQUAL[case]
    found = [c.what for c in debug.diff(first, second).changes if c.kind in ("node", "function")]
    assert len(found) == 1 and found[0].startswith(what), found


def test_an_attribute_that_one_version_lacks_is_not_a_difference_at_its_default() -> None:
    def cast(opset: int, more: str = "") -> ModelProto:
        return parser.parse_model(
            f'<ir_version: 9, opset_import: ["": {opset}]> g (float[2] x) => (int64[2] y) {{ y = Cast<to=7{more}>(x) }}'
        )

    assert [c.kind for c in debug.diff(cast(18), cast(19)).changes] == ["model"]
    assert [c.what for c in debug.diff(cast(18), cast(19, ", saturate=0")).changes if c.kind == "node"] == [
        "attribute 'saturate' is not set and 0"
    ]


def test_the_notes_of_a_culprit_know_the_defaults() -> None:
    other = net(last="<transA=0, alpha=2.0>")
    first = debug.compare(net(), X, against=other).first
    assert first is not None and first.inputs_agreed and first.notes == ["attribute 'alpha' is 1.0 (the default) and 2.0"]


def test_an_operator_that_is_not_known_keeps_its_attributes() -> None:
    node = helper.make_node("Odd", ["x"], ["z"], domain="com.example", beta=2)
    model = net()
    model.graph.node.append(node)
    assert list(debug.ComparedModel(model).attributes(node)) == ["beta"]


# --- inputs among saved values ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(net(), "net.onnx")
    run = sonnx("run", "net.onnx", "--random", 0, "--aux", "h", "--save-inputs", "in.npz", "--save-outputs", "out.npz")
    assert run.exit_code == 0, run.output
    return tmp_path


def test_saved_inputs_and_weights_are_accepted(saved: Path) -> None:
    weights = {t.name: numpy_helper.to_array(t) for t in net().graph.initializer}
    np.savez("all.npz", **np.load("in.npz"), **np.load("out.npz"), **weights)
    found = sonnx("compare", "net.onnx", "--inputs", "in.npz", "--against", "all.npz")
    assert found.exit_code == 0 and "2 values compared, 0 differ" in found.stdout, found.output
    assert sonnx("run", "net.onnx", "--inputs", "in.npz", "--against", "all.npz", "--aux", "h").exit_code == 0
    values = dict(np.load("out.npz"))
    np.savez("wrong.npz", **np.load("in.npz"), h=values["h"], y=values["y"] + 1)
    found = sonnx("compare", "net.onnx", "--inputs", "in.npz", "--against", "wrong.npz")
    assert found.exit_code == 1 and "2 values compared, 1 differ" in found.stdout


def test_saved_values_of_other_inputs_are_refused(saved: Path) -> None:
    np.savez("other.npz", x=np.load("in.npz")["x"] + 1, **np.load("out.npz"))
    for command in (("compare",), ("run", "--aux", "h")):
        found = sonnx(*command, "net.onnx", "--inputs", "in.npz", "--against", "other.npz")
        assert found.exit_code == 3, found.output
        assert "[SX320] the input 'x' in other.npz must be the one that the model is run with, got another" in found.stderr
    with pytest.raises(InvalidInput, match="has 'nowhere', which is not a value of the model"):
        np.savez("unknown.npz", nowhere=np.ones(1))
        debug.compare("net.onnx", X, against="unknown.npz")
