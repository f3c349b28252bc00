"""Gradients of onnxruntime's operators, as `sonnx gradients com.microsoft` judges them, others by formulas, and the report."""

from __future__ import annotations

import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from tests.helpers.microsoft_nodes import gradients

from singa.cli import main
from singa_backend.autodiff.support import DIFFERENTIABLE
from singa_backend.conform import gradient_matrix, microsoft
from singa_backend.conform.gradient_matrix import MatrixRow, ledger
from singa_backend.conform.gradient_matrix.row import needs_judging
from singa_backend.conform.results import load, publish, save
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import MICROSOFT, load_domain

load_domain(MICROSOFT)

ROWS = gradient_matrix.listed(MICROSOFT)
ENTRIES = gradient_matrix.read()
REPORTS = Path(__file__).parents[3] / "reports"


@pytest.mark.parametrize("row", [r for r in ROWS if needs_judging(r)], ids=lambda r: r.name)
def test_a_sample(row: MatrixRow) -> None:
    """Three points; `sonnx gradients com.microsoft` takes 20."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradient_matrix.judged(row, count=3)
    assert found.verdict in ("checked", "few", "zero", "constant"), found.says
    assert found.verdict != "few" or ledger.explain(found, ENTRIES), f"{found.agreed} points, {found.kinks} at kinks"


def test_each_operator_with_a_body_has_a_verdict() -> None:
    """None is left out: its outputs are integers, or it is judged."""
    for row in ROWS:
        if row.how:
            assert row.kind in (DIFFERENTIABLE, "integer", "zero", "constant", "undefined", "random"), row.name
            assert row.kind != DIFFERENTIABLE or needs_judging(row), row.name


# --- what differences cannot judge


def test_scales_of_dequantize_linear() -> None:
    x, zero = np.array([[1, -3], [7, 2]], np.int8), np.array([1, -1], np.int8)
    scale, dy = np.array([0.5, 0.25], np.float32), np.array([[1, 2], [3, 4]], np.float32)
    (found,) = gradients("DequantizeLinear", [x, scale, zero], [dy], [1], axis=0)
    assert found.tolist() == [(0 * 1 + -4 * 2), (8 * 3 + 3 * 4)]


def test_gemma_rotary_embedding() -> None:
    rng = np.random.default_rng(0)
    emb = rng.uniform(-2, 2, (1, 2, 4)).astype(np.float32)
    q, q_rot, k, k_rot, dq, dk = (rng.uniform(-1, 1, (1, 3, 2, 4)).astype(np.float16) for _ in range(6))
    found = gradients("GemmaRotaryEmbedding", [emb, q, q_rot, k, k_rot], [dq, dk], [0, 1, 2, 3, 4])
    wide = [v.astype(np.float64) for v in (emb[:, None], q, q_rot, k, k_rot, dq, dk)]
    e, q, q_rot, k, k_rot, dq, dk = wide
    angles = (-np.sin(e) * (dq * q + dk * k) + np.cos(e) * (dq * q_rot + dk * k_rot)).sum(axis=1)
    expected = [angles, dq * np.cos(e), dq * np.sin(e), dk * np.cos(e), dk * np.sin(e)]
    for mine, right in zip(found, expected, strict=True):
        assert np.allclose(mine, right, rtol=4e-3, atol=4e-3)


def test_a_row_of_padding_and_frequencies_of_torch_embedding() -> None:
    table, places = np.zeros((4, 2)), np.array([1, 3, 1, 2])
    dy = np.arange(8.0).reshape(4, 2)
    (plain,) = gradients("TorchEmbedding", [table, places], [dy], [0])
    assert plain.tolist() == [[0, 0], [4, 6], [6, 7], [2, 3]]
    (padded,) = gradients("TorchEmbedding", [table, places, np.array(-1), np.array(True)], [dy], [0])
    assert padded.tolist() == [[0, 0], [2, 3], [6, 7], [0, 0]]


def test_activations_that_are_rounded_to_8_bits_pass_gradients() -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.uniform(-1, 1, shape).astype(np.float16) for shape in ((2, 16), (2, 3)))
    w = rng.uniform(-1, 1, (3, 16)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full((3, 1), 0.5, np.float32)
    (found,) = gradients("MatMulBlockQuantizedFp8Weight", [x, w, scale, np.array(0.25, np.float32)], [dy], [0], block_size=16)
    assert np.allclose(found, dy.astype(np.float64) @ (w.astype(np.float64) * 0.5), rtol=0.07, atol=0.02)


# --- the report


def test_the_report_is_up_to_date() -> None:
    assert microsoft.stale(REPORTS) == "", "run tox -e microsoft and commit reports/microsoft.*"
    document = load(REPORTS / "microsoft.json")
    assert not document["drawn"]["bad"] and not document["gradients"]["unexplained"]
    t = document["totals"]
    assert (t["schemas"], t["with_cpu_kernel"], t["lax"], t["lax_defined"]) == (150, 86, 9, 9)
    assert t["defined_with_cpu_kernel"] >= 80 and document["drawn"]["count"] >= 2000
    assert {r["verdict"] for r in document["gradients"]["rows"]} <= {"checked", "few", "zero", "constant", "integer", "undefined"}


def test_a_report_of_other_declarations_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in microsoft.stale(tmp_path)
    document = load(REPORTS / "microsoft.json")
    publish(document, tmp_path / "microsoft.json", microsoft.PAGES)
    check = ["gradients", MICROSOFT, "--check", "--to", str(tmp_path)]
    assert CliRunner().invoke(main, check).exit_code == 0
    gelu = declarations[MICROSOFT, "Gelu"][1]
    monkeypatch.setattr(gelu, "decomposition_rule", None)
    monkeypatch.setattr(gelu, "gradient_rule", None)
    assert "Gelu differs from its declaration in body, gradient" in microsoft.stale(tmp_path)
    stale = CliRunner().invoke(main, check)
    assert stale.exit_code == 1 and "sonnx gradients com.microsoft" in stale.output
    monkeypatch.undo()
    rows = [r for r in document["drawn"]["operators"] if r["operator"] != "Gelu"]
    publish(document | {"drawn": document["drawn"] | {"operators": rows}}, tmp_path / "microsoft.json", microsoft.PAGES)
    assert "the part 'drawn' has no row of Gelu" in microsoft.stale(tmp_path)
    (tmp_path / "microsoft.md").write_text("by hand")
    save(document, tmp_path / "microsoft.json")
    assert "differs from the page rendered from microsoft.json" in microsoft.stale(tmp_path)


def test_the_commands_write_their_parts(tmp_path: Path) -> None:
    for select in ("com.microsoft:(Gelu|BiasGelu)-", "com.microsoft:CDist-"):
        options = ["--points", "2", "--oracle", "none", "--jobs", "1", "--to", str(tmp_path)]
        done = CliRunner().invoke(main, ["gradients", select, *options])
        assert done.exit_code == 0, done.output
    rows = load(tmp_path / "microsoft.json")["gradients"]["rows"]
    assert [(r["operator"], r["verdict"]) for r in rows] == [("BiasGelu", "checked"), ("CDist", "checked"), ("Gelu", "checked")]
    assert "| Gelu |" in (tmp_path / "microsoft.md").read_text()
    part = CliRunner().invoke(main, ["fuzz", "--select", "com.microsoft:Gelu-", "--count", "2", "--report", str(tmp_path)])
    assert part.exit_code == 2 and "use --select com.microsoft" in part.output
