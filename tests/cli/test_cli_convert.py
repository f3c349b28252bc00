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
