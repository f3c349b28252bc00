"""`sonnx convert` and `sonnx opsets` as a person meets them: what they write, what they say, how they exit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import parser
from tests.helpers.paths import PROJECT

from singa import sonnx as face
from singa.cli import main
from singa_backend import InvalidInput
from singa_backend.conform import opset_matrix as matrix
from singa_backend.conform.opset_matrix import page
from singa_backend.conform.opset_matrix import problems as drawing
from singa_backend.conform.opset_matrix.supported import how

REPORTS = PROJECT / "reports"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[n, 3] x) => (float[n, 3] y) { t = Gelu (x) y = Erf (t) }'
    onnx.save(parser.parse_model(text), path)
    return path


def sonnx(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def test_convert(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "old.onnx"
    found = sonnx("convert", model, "-o", target, "--opset", 9)
    assert found.exit_code == 0 and f"written to {target}" in found.output
    old = onnx.load(target)
    assert old.opset_import[0].version == 9 and "Gelu" not in {n.op_type for n in old.graph.node}
    x = np.array([[-1, 0, 2]], np.float32)
    (ours,), (theirs,) = (face.run_model(onnx.load(p), [x]) for p in (target, model))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


NET = """<ir_version: 9, opset_import: ["": 17]> g (float[n, 4] x, bool c) => (float[n, 4] y, float[n, 4] again, int64[2] s) {
    a = MatMul(x, w)  b = Add(a, v)  m = ReduceMean<axes=[-1]>(b)  d = Sub(b, m)  e = Exp(d)  t = Softmax(e)  s = Shape(t)
    y = If(c) <then_branch = p () => (float[n, 4] q) { q = MatMul(t, w) },
               else_branch = r () => (float[n, 4] u) { u = Add(t, x) }>
    again = Identity(x) }"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    made = parser.parse_model(NET)
    for name, shape in (("w", (4, 4)), ("v", (4,))):
        values = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(made, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kept", [(), ("Softmax", "Exp"), ("MatMul",), ("Add", "Sub", "ReduceMean")])
@pytest.mark.parametrize("condition", [True, False])
def test_other_floats(net: Path, tmp_path: Path, kept: tuple[str, ...], keep: bool, condition: bool, oracle: Any) -> None:
    options = [*(["--keep-io-types"] if keep else []), *(o for name in kept for o in ("--exclude-operator", name))]
    done = sonnx("convert", net, "-o", tmp_path / "half.onnx", "--dtype", "float16", *options)
    assert done.exit_code == 0, done.output
    made = onnx.load(tmp_path / "half.onnx")
    onnx.checker.check_model(made, full_check=True)
    outside = onnx.TensorProto.FLOAT if keep else onnx.TensorProto.FLOAT16
    assert {v.type.tensor_type.elem_type for v in (made.graph.input[0], *made.graph.output[:2])} == {outside}
    types = {t.name: t.data_type for t in made.graph.initializer}
    assert types["w"] == (onnx.TensorProto.FLOAT if "MatMul" in kept else onnx.TensorProto.FLOAT16)
    x, c = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32), np.array(condition)
    expected = face.run_model(onnx.load(net), [x, c])
    feeds = {"x": x if keep else x.astype(np.float16), "c": c}
    for found in (face.run_model(made, feeds), [*oracle.run(made.SerializeToString(), feeds).values()]):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours.astype(np.float64), theirs, rtol=1e-2, atol=1e-2)


def test_an_excluded_node_keeps_its_numbers(tmp_path: Path) -> None:
    """A mask of -1e9 does not fit in float16; between two excluded nodes nothing is rounded."""
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y) {
        a = Mul(x, big)  b = Div(a, big)  y = Neg(b) }"""
    made = parser.parse_model(text)
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e9, np.float32), "big"))
    for node in made.graph.node:
        node.name = f"/{node.op_type}"
    onnx.save(made, tmp_path / "m.onnx")
    refused = sonnx("convert", tmp_path / "m.onnx", "-o", tmp_path / "h.onnx", "--dtype", "float16")
    assert refused.exit_code == 3 and "SX388" in refused.output and "'big'" in refused.output
    options = ("--dtype", "float16", "--keep-io-types", "--exclude", "/(Mul|Div)")
    assert sonnx("convert", tmp_path / "m.onnx", "-o", tmp_path / "h.onnx", *options).exit_code == 0
    half = onnx.load(tmp_path / "h.onnx")
    assert [n.op_type for n in half.graph.node] == ["Mul", "Div", "Cast", "Neg", "Cast"]
    np.testing.assert_allclose(face.run_model(half, [np.ones((1, 4), np.float32)])[0], -1)


@pytest.mark.parametrize(("options", "says"), [
    (["--keep-io-types"], "need a dtype"),
    (["--dtype", "float16", "--exclude", "nothing"], "'nothing' matches none"),
    (["--dtype", "float16", "--exclude", "("], "must be regular expressions"),
    (["--dtype", "float16", "--exclude-operator", "Conv"], "must be operators of the model (Erf, Gelu), got 'Conv'"),
])  # fmt: skip
def test_choices_of_floats_that_do_not_exist(model: Path, tmp_path: Path, options: list[str], says: str) -> None:
    done = sonnx("convert", model, "-o", tmp_path / "o.onnx", *options)
    assert done.exit_code == 3 and says in " ".join(done.output.split()) and not (tmp_path / "o.onnx").exists()


def test_convert_says_all_that_cannot_be_written_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "old.onnx"
    found = sonnx("convert", model, "-o", target, "--opset", 8, "--json")
    assert found.exit_code == 3 and not target.exists()
    said = json.loads(found.output)
    assert said["code"] == "SX206" and "the minimum opset is 9" in found.output


def test_convert_leniently_reports_what_is_missing(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "old.onnx"
    found = sonnx("convert", model, "-o", target, "--opset", 8, "--lenient", "--json")
    said = json.loads(found.output)
    assert found.exit_code == 0 and target.exists() and said["unmapped"]["Erf"] == 1 and "Gelu" in said["operations"]


@pytest.mark.parametrize("opset", [6, 1000])
def test_convert_to_an_opset_that_is_not_written(model: Path, tmp_path: Path, opset: int) -> None:
    assert sonnx("convert", model, "-o", tmp_path / "old.onnx", "--opset", opset).exit_code == 2


def test_opsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "KINDS", ())  # the drawn models only: ONNX's cases take their time to load
    found = sonnx("opsets", "^Mish$", "--oracle", "none", "--jobs", 1, "--json")
    assert found.exit_code == 0, found.output
    said = json.loads(found.output)
    (row,) = said["rows"]
    assert (row["operator"], row["domain"], said["wrong"], said["contradictions"]) == ("Mish", "ai.onnx", {}, [])
    assert row["how"]["17"] == "composed" and row["how"]["18"] == "native"
    assert row["models"] and row["cells"]["18"][0] and not any(cell[2] for cell in row["cells"].values())


def test_opsets_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "KINDS", ())
    monkeypatch.setattr("singa.cli._common.find_spec", lambda name: None)
    found = sonnx("opsets", "^Mish$", "--jobs", 1)
    assert found.exit_code == 0 and "onnxruntime is not installed" in found.stderr and "sonnx[oracle]" in found.stderr
    assert "confirmed by onnxruntime: 0" in found.output


def test_opsets_is_used_wrongly(tmp_path: Path) -> None:
    assert sonnx("opsets", "^Nothing$").exit_code == 2
    assert sonnx("opsets", "(").exit_code == 2
    assert sonnx("opsets", "^Add$", "--to", tmp_path).exit_code == 2
    found = sonnx("opsets", "--check", "--to", tmp_path)
    assert found.exit_code == 1 and "opsets.json does not exist" in found.output


# --- what can be written


def test_supported_ops() -> None:
    newest = face.supported_ops(28)
    assert newest["", "Softmax"].how == "native" and newest["", "Scatter"].how == "composed"
    assert face.supported_ops(26)["", "BitCast"] and list(newest) == matrix.listed()
    with pytest.raises(InvalidInput, match=r"\[7, "):
        face.supported_ops(6)


@pytest.mark.parametrize(
    ("operator", "opset", "expected"),
    [(("", "Gelu"), 9, "composed"), (("", "Gelu"), 20, "native"), (("", "Erf"), 8, ""), (("", "Upsample"), 9, "native"),
     (("", "Upsample"), 10, "composed"), (("ai.onnx.ml", "Scaler"), 7, "native")],
)  # fmt: skip
def test_how_an_operator_is_written(operator: tuple[str, str], opset: int, expected: str) -> None:
    assert how(operator, opset) == expected


def test_the_report_is_what_the_writer_can_do() -> None:
    """The table of the page equals `supported_ops`, the models do not contradict it, and nothing was wrong."""
    document = page.read(REPORTS)
    assert page.contradictions(document) == [] and document["wrong"] == {} and document["skipped"] == {}
    assert document["totals"]["none"] == []
    assert (REPORTS / "opsets.md").read_text(encoding="utf-8") == page.markdown(document)
    rows = {(r["domain"], r["operator"]): r["how"] for r in document["rows"]}
    for opset in (20, 24, 28):  # all of them: sonnx opsets --check
        now = {(d or "ai.onnx", n): s.how for (d, n), s in face.supported_ops(opset).items()}
        assert {key: by_opset[str(opset)] for key, by_opset in rows.items()} == now


def test_a_report_that_is_stale_says_where(tmp_path: Path) -> None:
    document = page.read(REPORTS)
    document["rows"][0]["how"]["28"] = "composed"
    page.write(document, tmp_path)
    assert f"{document['rows'][0]['operator']} at opset 28 is 'composed' there" in page.stale(tmp_path)
    row = next(r for r in document["rows"] if r["operator"] == "Erf")
    row["cells"]["8"] = [1, 0, 0, 0]
    assert any(text.startswith("Erf at opset 8: written") for text in page.contradictions(document))
