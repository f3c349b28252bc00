"""sonnx train --qlora: the same bits as a quantized file that is trained with --lora."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser
from tests.helpers.onnxruntime_adapters import in_child

from singa import sonnx
from singa.cli import main
from singa_backend.adapters import Adapter, base_digest

pytest.importorskip("safetensors")

NET = """<ir_version: 9, opset_import: ["" : 17]> g (float[n,32] x) => (float[n,4] y) {
    h = MatMul(x, w)
    r = Relu(h)
    y = Gemm<transB=1>(r, v, b) }"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    model = parser.parse_model(NET)
    held = {"w": (32, 48), "v": (4, 48), "b": (4,)}
    model.graph.initializer.extend(
        numpy_helper.from_array((rng.standard_normal(s) / 4).astype(np.float32), n) for n, s in held.items()
    )
    sonnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=rng.standard_normal((48, 32)).astype(np.float32), y=rng.integers(0, 4, 48))
    return tmp_path


def invoke(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done.output


def train(files: Path, model: str, *options: object, code: int = 0) -> str:
    common = ["--data", files / "d.npz", "--batch-size", 16, "--lr", 0.1, "--optimizer", "adam"]
    return invoke("train", files / model, *common, *options, code=code)


@pytest.mark.parametrize(("option", "form"), [(["--qlora"], "int4"), (["--qlora", "nf4"], "nf4")])
def test_it_is_quantize_and_lora(option: list[str], form: str, files: Path) -> None:
    before = (files / "m.onnx").read_bytes()
    told = train(files, "m.onnx", "--lora", 4, *option, "--epochs", 2, "-o", files / "one.safetensors")
    assert f"sonnx quantize MODEL --weight-only {form} -o QUANTIZED" in told
    assert (files / "m.onnx").read_bytes() == before
    invoke("quantize", files / "m.onnx", "--weight-only", form, "-o", files / "q.onnx")
    train(files, "q.onnx", "--lora", 4, "--epochs", 2, "-o", files / "two.safetensors")
    assert (files / "one.safetensors").read_bytes() == (files / "two.safetensors").read_bytes()
    found = Adapter.load(files / "one.safetensors")
    assert found.base == base_digest(onnx.load(files / "q.onnx")) and np.abs(next(iter(found.changes.values())).b).max() > 0


def test_the_model_that_is_written_has_both(files: Path) -> None:
    pytest.importorskip("onnxruntime")
    for name in ("t.safetensors", "t.onnx"):
        train(files, "m.onnx", "--lora", 4, "--qlora", "int8", "-o", files / name)
    invoke("quantize", files / "m.onnx", "--weight-only", "int8", "-o", files / "q.onnx")
    with np.load(files / "d.npz") as data:
        x = data["x"]
    expected = sonnx.prepare(files / "q.onnx", adapter=files / "t.safetensors").run([x])[0]
    found = onnx.load(files / "t.onnx")
    assert {n.op_type for n in found.graph.node} >= {"MatMulNBits"}
    np.testing.assert_allclose(in_child(("run", found.SerializeToString(), {"x": x}))[0][0], expected, rtol=1e-5, atol=1e-5)


def test_it_resumes_to_the_bit(files: Path) -> None:
    options = ["--lora", 4, "--qlora", "nf4", "--checkpoint", files / "c.ckpt"]
    train(files, "m.onnx", *options, "--epochs", 1)
    train(files, "m.onnx", *options, "--epochs", 2, "--resume", "-o", files / "one.safetensors")
    train(files, "m.onnx", "--lora", 4, "--qlora", "nf4", "--epochs", 2, "-o", files / "two.safetensors")
    assert (files / "one.safetensors").read_bytes() == (files / "two.safetensors").read_bytes()
    other = [*options[:3], "int4", *options[4:]]
    assert "SX381" in train(files, "m.onnx", *other, "--epochs", 3, "--resume", code=3)


def test_refusals(files: Path) -> None:
    assert "--qlora needs --lora RANK" in train(files, "m.onnx", "--qlora", "-o", files / "o.onnx", code=2)
    assert "is not one of" in train(files, "m.onnx", "--lora", 2, "--qlora", "int3", "-o", files / "o.onnx", code=2)
    text = '<ir_version: 9, opset_import: ["" : 17]> g (float[n,32] x) => (float[n,4] y) { y = MatMul(x, w) }'
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((32, 4)), "w"))
    model.graph.input[0].type.tensor_type.elem_type = model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    sonnx.save(model, files / "f64.onnx")
    assert "SX397" in train(files, "f64.onnx", "--lora", 2, "--qlora", "-o", files / "o.onnx", code=3)
