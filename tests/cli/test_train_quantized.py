"""`sonnx train` of quantized files: parameters whose values are rounded on the way to the output are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

from singa import sonnx
from singa.cli import main
from singa_backend.inspection.trainable import rounded

F = np.float32
RNG = np.random.default_rng(0)
FLOAT = "{ h = MatMul(x, w) \n r = Relu(h) \n k = LayerNormalization(r, s) \n m = MatMul(k, u) \n y = Add(m, b) }"
HALF = "{ h = MatMul(x, w) \n r = Relu(h) \n q = QuantizeLinear(r, sc, z) \n k = DequantizeLinear(q, sc, z) \n y = MatMul(k, u) }"
FORMS = {
    "to uint8 by default": HALF.replace(", z)", ")"),
    "to int8": HALF,
    "moved between": HALF.replace("k = Dequant", "t = Transpose(q) \n c = Transpose(t) \n k = Dequant").replace(
        "r(q, sc", "r(c, sc"
    ),
    "dynamic": "{ h = MatMul(x, w) \n r = Relu(h) \n q, a, z = DynamicQuantizeLinear(r) \n k = DequantizeLinear(q, a, z) \n"
    "y = MatMul(k, u) }",
    "as float8": "{ h = MatMul(x, w) \n q = Cast<to = 17>(h) \n k = Cast<to = 1>(q) \n y = MatMul(k, u) }",
    "next to itself": HALF.replace("y = MatMul(k, u)", "p = Add(k, h) \n y = MatMul(p, u)"),
}  # fmt: skip


def written(folder: Path, body: str, name: str = "m") -> Path:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y)'
        f"<float sc = {{0.02}}, {'int8 z = {0}' if ', z)' in body and 'Dynamic' not in body else 'int8 unused = {0}'}> {body}"
    )
    shapes = {"w": (6, 8), "s": (8,), "u": (8, 3), "b": (3,)}
    used = {v for n in model.graph.node for v in n.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(RNG.normal(size=s).astype(F), n) for n, s in shapes.items() if n in used
    )
    onnx.save(model, folder / f"{name}.onnx")
    x = RNG.normal(size=(40, 6)).astype(F)
    np.savez(folder / "d.npz", x=x, y=RNG.integers(0, 3, 40))
    return folder / f"{name}.onnx"


def train(model: Path, *given: Any) -> Result:
    line = ["train", model, "--data", model.parent / "d.npz", "-o", model.parent / "o.onnx", *given]
    return CliRunner().invoke(main, [str(a) for a in line])


@pytest.mark.parametrize("form", FORMS)
def test_parameters_before_a_rounding_are_refused_by_name(tmp_path: Path, form: str) -> None:
    model = written(tmp_path, FORMS[form])
    done = train(model)
    assert done.exit_code == 3 and "[SX399]" in done.output and "got w: node" in " ".join(done.output.split()), done.output
    assert not (tmp_path / "o.onnx").exists()
    done = train(model, "--freeze", "w")
    assert done.exit_code == 0, done.output
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer} for p in (model, tmp_path / "o.onnx")
    )
    assert np.array_equal(before["w"], after["w"]) and not np.array_equal(before["u"], after["u"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_models_of_the_command_quantize_are_refused(tmp_path: Path, dynamic: bool) -> None:
    """What is left to train before a rounding, and adapters."""
    source = written(tmp_path, FLOAT)
    x = np.load(tmp_path / "d.npz")["x"]
    model = tmp_path / "q.onnx"
    onnx.save(sonnx.quantize(str(source), **({"dynamic": True} if dynamic else {"data": {"x": x}})), model)
    done = train(model, *(() if dynamic else ("--lora", 2)))
    assert done.exit_code == 3 and "[SX399]" in done.output, done.output


def test_weights_that_are_quantized_do_not_stop_what_comes_before_them(tmp_path: Path) -> None:
    """Integers of a file are not rounded: adapters next to them, and parameters before them, train."""
    source = written(tmp_path, FLOAT)
    assert train(source, "--lora", 2, "--qlora", "int8").exit_code == 0
    body = "{ h = MatMul(x, w) \n k = DequantizeLinear(c, sc) \n y = MatMul(h, k) }"
    model = onnx.load(written(tmp_path, body))
    model.graph.initializer.append(numpy_helper.from_array(RNG.integers(-9, 9, (8, 3)).astype(np.int8), "c"))
    onnx.save(model, tmp_path / "m.onnx")
    done = train(tmp_path / "m.onnx")
    assert done.exit_code == 0, done.output


def test_integers_that_only_choose_values_are_no_rounding(tmp_path: Path) -> None:
    body = "{ h = MatMul(x, w) \n j = Cast<to = 2>(h) \n k = Cast<to = 7>(j) \n n = Sub(k, k) \n a = Gather(u, n)"
    model = onnx.load(written(tmp_path, f"{body} \n c = ReduceSum(a, ax) \n d = MatMul(h, u) \n y = Add(c, d) }}"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "ax"))
    net = sonnx.SONNXModel(model)
    assert rounded(net.imported.graph, ["w", "u"]) == {}
