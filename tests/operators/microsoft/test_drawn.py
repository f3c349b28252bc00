"""Drawn nodes of onnxruntime's own operators, judged by onnxruntime in a child process and by their bodies."""

from __future__ import annotations

from collections import Counter

import pytest

from singa_backend.conform.cases import data_file
from singa_backend.conform.fuzz import ledger, run

COUNT, SEED, SELECT = 400, 0, "com.microsoft"


def test_drawn_nodes() -> None:
    pytest.importorskip("onnxruntime", reason="the main witness is an extra: pip install 'sonnx[oracle]'")
    found = run.run(range(COUNT), SEED, ledger.read(data_file("ledger.toml")), select=SELECT, processes=2)
    bad = [
        (r.index, r.status, r.describe, r.says[:300], [d.says for d in r.differences if not d.entry]) for r in found if not r.good
    ]
    assert not bad, f"sonnx fuzz --select {SELECT} --seed {SEED} --only INDEX shows the details: {bad}"
    count = Counter(r.status for r in found)
    assert count["agree"] + count["explained"] > 0.9 * COUNT, count
