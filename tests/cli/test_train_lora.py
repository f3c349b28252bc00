"""sonnx train --lora: what it writes, prints and refuses, and that a resumed training has equal bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

from singa import sonnx
from singa.cli import main
from singa_backend.adapters import Adapter, insert
from singa_backend.adapters.onnxruntime import read_onnx_adapter

TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 6] x) => (float[N, 3] y) {
    h = Gemm <transB = 1> (x, w1, b1) r = Tanh(h) k = MatMul(r, w2) l = Add(k, b2) y = MatMul(l, w3) }"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    model = parser.parse_model(TEXT)
    for name, shape in {"w1": (8, 6), "b1": (8,), "w2": (8, 5), "b2": (5,), "w3": (5, 3)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.5, shape).astype(np.float32), name))
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(24, 6)).astype(np.float32), y=rng.integers(0, 3, 24))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*options: str) -> Result:
    return CliRunner().invoke(main, ["train", "net.onnx", "--data", "data.npz", "--batch-size", "8", *options])


def test_the_adapter_and_the_merged_model(folder: Path) -> None:
    before = (folder / "net.onnx").read_bytes()
    options = ("--lora", "2", "--lora-alpha", "4", "--lora-bias", "lora_only", "--lr", "0.1", "--epochs", "2")
    first = train(*options, "-o", "a.safetensors")
    assert first.exit_code == 0, first.output
    assert "trained 67 of 170 parameters (39.41%)" in first.output
    assert train(*options, "-o", "merged.onnx").exit_code == 0
    assert (folder / "net.onnx").read_bytes() == before

    adapter = Adapter.load("a.safetensors")
    assert list(adapter.changes) == ["w1", "w2"] and set(adapter.values) == {"b1", "b2"}
    assert adapter.settings["rank"] == 2 and adapter.changes["w1"].scale == 2.0
    x = np.load("data.npz")["x"]
    base, merged = onnx.load("net.onnx"), onnx.load("merged.onnx")
    want = sonnx.prepare(insert(base, adapter)).run([x])[0]
    np.testing.assert_allclose(sonnx.prepare(merged).run([x])[0], want, rtol=1e-5, atol=1e-5)
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in base.graph.node]


def test_the_suffix_of_onnxruntime_names_its_form(folder: Path) -> None:
    options = ("--lora", "2", "--lora-alpha", "4", "--lora-bias", "lora_only", "--epochs", "1", "-o")
    assert train(*options, "a.safetensors").exit_code == 0 and train(*options, "a.onnx_adapter").exit_code == 0
    found, own = read_onnx_adapter("a.onnx_adapter", onnx.load("net.onnx")), Adapter.load("a.safetensors")
    assert list(found.changes) == list(own.changes) and set(found.values) == set(own.values)
    for name, change in own.changes.items():
        np.testing.assert_allclose(found.changes[name].b @ found.changes[name].a, 2 * change.b @ change.a, rtol=1e-6)
    refused = train("-o", "b.onnx_adapter")
    assert refused.exit_code == 2 and "it needs --lora RANK" in refused.output and not (folder / "b.onnx_adapter").exists()


def test_resume_has_equal_bits(folder: Path) -> None:
    options = ("--lora", "2", "--lora-dropout", "0.2", "--optimizer", "adamw", "--checkpoint")
    assert train(*options, "one.ckpt", "--epochs", "3", "-o", "one.safetensors").exit_code == 0
    assert train(*options, "two.ckpt", "--epochs", "1").exit_code == 0
    assert train(*options, "two.ckpt", "--epochs", "3", "--resume", "-o", "two.safetensors").exit_code == 0
    assert (folder / "one.safetensors").read_bytes() == (folder / "two.safetensors").read_bytes()
    other = train("--lora", "2", "--lora-dropout", "0.1", "--optimizer", "adamw", "--checkpoint", "two.ckpt", "--resume")
    assert "SX381" in other.output and "--lora-dropout was 0.2, got 0.1" in other.output


def test_counts_as_json(folder: Path) -> None:
    found = json.loads(train("--lora", "1", "--lora-target", "w2", "-o", "a.safetensors", "--json").stdout)
    assert (found["trained"], found["parameters"]) == (13, 129)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--lora-alpha", "2", "-o", "o.onnx"], "--lora-alpha needs --lora RANK"),
        (["-o", "o.safetensors"], "needs --lora RANK"),
        (["--lora", "2", "--lora-target", "w4*", "-o", "o.onnx"], "names like it are 'w3'"),
        (["--lora", "2", "--lora-dropout", "1", "-o", "o.onnx"], "--lora-dropout"),
    ],
)
def test_refused(folder: Path, options: list[str], text: str) -> None:
    found = train(*options)
    assert found.exit_code and text in " ".join(found.output.split())
    assert not (folder / "o.onnx").exists()
