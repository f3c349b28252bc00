"""Channels first and last: the same numbers in the other order, names kept, adjacent transposes removed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import checker, numpy_helper, parser
from tests.helpers.paths import TESTS

from singa import sonnx
from singa.cli import main
from singa_backend import SingaBackend
from singa_backend.errors import InvalidInput

F = np.float32
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def read(text: str, **weights: Any) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return model


def run(model: onnx.ModelProto, *inputs: Any) -> list[Any]:
    checker.check_model(model, full_check=True)
    return list(SingaBackend.run_model(model, list(inputs)))


def values(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(F)


@pytest.mark.row("I16")
def test_a_convolution_to_the_other_layout_and_back() -> None:
    text = "g (float[n,3,h,w] x) => (float[n,4,p,q] y) { a = Conv(x, k) y = Relu(a) }"
    plain, other, x = read(text, k=values(4, 3, 3, 3)), read(text, k=values(4, 3, 3, 3)), values(2, 3, 6, 7)
    sonnx.change_layout(other, "channels_last")
    assert [d.dim_param or d.dim_value for d in other.graph.input[0].type.tensor_type.shape.dim] == ["n", "h", "w", 3]
    (y,) = run(other, x.transpose(LAST))
    np.testing.assert_allclose(
        y.transpose(FIRST), run(plain, x)[0], rtol=1e-5, atol=1e-5
    )  # few channels are added in another order
    sonnx.change_layout(other, "channels_first")
    assert [n.op_type for n in other.graph.node] == ["Conv", "Relu"]
    np.testing.assert_array_equal(run(other, x)[0], run(plain, x)[0])


@pytest.mark.row("I16", "O2")
@pytest.mark.parametrize("path", sorted((TESTS / "frameworks" / "tensorflow").glob("*.onnx")), ids=lambda p: p.stem)
def test_nets_of_tensorflow_lose_their_transposes(path: Path) -> None:
    """TensorFlow has channels last and ONNX's convolutions have them first: in that layout the network needs fewer transposes."""
    plain, turned = onnx.load(path), onnx.load(path)
    images = [v for v in plain.graph.input if len(v.type.tensor_type.shape.dim) == 4]
    assert images
    x = values(*(d.dim_value or 2 for d in images[0].type.tensor_type.shape.dim))
    expected = run(plain, x)
    optimized = onnx.load(path)
    sonnx.optimize(optimized)
    sonnx.change_layout(turned, "channels_first")
    for got, wanted in zip(run(turned, x.transpose(FIRST)), expected, strict=True):
        got = got.transpose(LAST) if got.ndim == 4 else got
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    left = Counter(n.op_type for n in turned.graph.node)["Transpose"]
    assert left < max(1, Counter(n.op_type for n in optimized.graph.node)["Transpose"])


def test_what_inner_graphs_read() -> None:
    text = """g (bool c, float[1,2,3,4] x) => (float[1,2,3,4] y) {
        y = If(c) <then_branch = a () => (float[1,2,3,4] p) { p = Neg(x) },
                  else_branch = b () => (float[1,2,3,4] x2) { x2 = Exp(x) }> }"""
    plain, turned, x = read(text), read(text), values(1, 2, 3, 4)
    sonnx.change_layout(turned, "channels_last", ["x"], optimize=False)
    for c in (True, False):
        np.testing.assert_array_equal(run(turned, np.array(c), x.transpose(LAST))[0], run(plain, np.array(c), x)[0])


def test_three_and_five_axes_by_name() -> None:
    text = "g (float[2,3,4] x, float[1,2,3,4,5] z) => (float[2,3,4] y, float[1,2,3,4,5] q) { y = Relu(x) q = Neg(z) }"
    model, x, z = read(text), values(2, 3, 4), values(1, 2, 3, 4, 5)
    sonnx.change_layout(model, "channels_last", ["x", "z", "q"])
    y, q = run(model, x.transpose(0, 2, 1), z.transpose(0, 2, 3, 4, 1))
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(q, -z.transpose(0, 2, 3, 4, 1))


@pytest.mark.row("I16")
def test_weights() -> None:
    w = values(4, 3, 2, 5)
    turned = sonnx.transpose_layout(w, "OIHW", "HWIO")
    assert turned.shape == (2, 5, 3, 4) and turned[1, 2, 0, 3] == w[3, 0, 1, 2]
    for pair in (("OIHW", "HWIX"), ("OIH", "HIO"), ("OOHW", "HWOO")):
        with pytest.raises(InvalidInput, match="axes"):
            sonnx.transpose_layout(w, *pair)


@pytest.mark.parametrize(
    ("to", "names", "says"),
    [
        ("sideways", None, "one of channels_first, channels_last, got 'sideways'"),
        ("channels_last", ["z"], "must be inputs or outputs .*, got 'z'"), ("channels_last", ["s"], "rank"),
        ("channels_last", ["both"], "both an input and an output"),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(to: str, names: Any, says: str) -> None:
    model = read(
        "g (float[1,2,3,4] x, float[3] s, float[1,2,3,4] both) => (float[1,2,3,4] y, float[1,2,3,4] both) { y = Mul(x, x) }"
    )
    before = model.SerializeToString()
    with pytest.raises(InvalidInput, match=says):
        sonnx.change_layout(model, to, names)
    assert model.SerializeToString() == before


def test_the_command(tmp_path: Path) -> None:
    path, made = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(read("g (float[1,2,3,4] x) => (float[1,2,3,4] y) { y = Exp(x) }"), path)
    result = CliRunner().invoke(main, ["layout", str(path), "--to", "channels_last", "-o", str(made), "--json"])
    assert result.exit_code == 0 and json.loads(result.output)["operators"]["Transpose"] == {"before": 2, "after": 0}
    x = values(1, 3, 4, 2)
    np.testing.assert_allclose(run(onnx.load(made), x)[0], np.exp(x), rtol=1e-6)
    assert CliRunner().invoke(main, ["layout", str(path), "--to", "channels_last", "-o", str(made), "--name", "z"]).exit_code == 3
