"""Graphs written with spox and onnxscript, against those written with sonnx. Run by `tox -e authoring`, which installs both."""

from __future__ import annotations

import re
from pathlib import Path

import onnx.printer
import pytest

pytest.importorskip("spox", reason="tox -e authoring installs it")
pytest.importorskip("onnxscript", reason="tox -e authoring installs it")

from tests.frameworks import authored

from singa import sonnx

PROJECT = Path(__file__).parents[2]


def test_the_stored_graphs_are_those_that_spox_and_onnxscript_write() -> None:
    made = {n: onnx.printer.to_text(m) + "\n" for n, m in authored.models().items()}
    there = {p.stem: p.read_text(encoding="utf-8") for p in (PROJECT / "tests" / "authored").glob("*.txt")}
    assert made == there, "python tests/frameworks/authored.py writes them again"


def test_the_blocks_of_the_page_write_the_same_graph() -> None:
    text = (PROJECT / "docs" / "authoring.md").read_text(encoding="utf-8").partition("\n## The same graph")[2]
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    chosen = {n: next(b for b in blocks if f"import {n}" in b or f"from {n}" in b) for n in ("spox", "onnxscript", "sonnx")}
    models = {}
    for name, block in chosen.items():
        scope: dict[str, object] = {"__name__": name}
        path = PROJECT / "build" / f"page_{name}.py"  # onnxscript reads the source of a function
        path.parent.mkdir(exist_ok=True)
        path.write_text(block, encoding="utf-8")
        exec(compile(block, str(path), "exec"), scope)
        models[name] = scope["model"]
    outputs = {n: sonnx.run_model(m, authored.INPUTS)[0].tolist() for n, m in models.items()}
    assert outputs["spox"] == outputs["onnxscript"] == outputs["sonnx"]
    assert outputs["sonnx"] == [8.0, -27.0]
