"""Generated models of one operator, and graphs of many, judged by independent witnesses; `sonnx fuzz` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from singa.cli._graph_forms import forms
from singa_backend.conform.cases import data_file
from singa_backend.conform.fuzz import ledger, run
from singa_backend.conform.fuzz.graphs import judge
from singa_backend.conform.fuzz.graphs import ledger as graphs_ledger

COUNT, SEED = 400, 0


def test_generated_models() -> None:
    pytest.importorskip("onnxruntime", reason="the main witness is an extra: pip install 'sonnx[oracle]'")
    found = run.run(range(COUNT), SEED, ledger.read(data_file("ledger.toml")), processes=2)
    bad = [
        (r.index, r.status, r.describe, r.says[:300], [d.says for d in r.differences if not d.entry]) for r in found if not r.good
    ]
    assert not bad, f"sonnx fuzz --seed {SEED} --only INDEX shows the details: {bad}"
    count = Counter(r.status for r in found)
    assert count["agree"] + count["explained"] > 0.9 * COUNT, count


GRAPHS = 20


def test_generated_graphs() -> None:
    """In every form, and with onnxruntime; they have each kind of inner graph, sequences, optionals and open sizes."""
    pytest.importorskip("onnxruntime", reason="the witness is an extra: pip install 'sonnx[oracle]'")
    entries, known = graphs_ledger.read(data_file("graphs.toml")), ledger.read(data_file("ledger.toml"))
    found = judge.run(range(GRAPHS), SEED, entries, known, forms=forms, processes=2)
    bad = [
        (r.index, r.status, r.describe, r.says[:300], [d.says for d in r.differences if not d.entry]) for r in found if not r.good
    ]
    assert not bad, f"sonnx fuzz --graphs 1 --seed {SEED} --only INDEX --write FOLDER reduces one: {bad}"
    assert sum(r.judged for r in found) > 5 * GRAPHS
    met = Counter(name for r in found for name in r.operators)
    assert all(met[name] for name in ("If", "Loop", "Scan", "SequenceConstruct", "Optional", "F0")), met
    assert all(sum(f.startswith(form) for r in found for f in r.forms) > GRAPHS / 2 for form in
               ("optimized", "convert", "export", "SONNXModel", "codegen"))  # fmt: skip
