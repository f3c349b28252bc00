"""Whole files with operators that onnxruntime reads in ONNX's domain, and exports of files with its own operators."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

from singa import autograd, opt, sonnx, tensor
from singa_backend import InvalidModel, SingaBackend
from singa_backend.engines.oracle import Oracle
from singa_backend.proto.checker import require_valid

pytest.importorskip("onnxruntime", reason="the witness is an extra: pip install 'sonnx[oracle]'")

IMAGES = np.random.default_rng(0).standard_normal((2, 3, 10, 12)).astype(np.float32)
ROWS = np.random.default_rng(1).standard_normal((2, 4, 16)).astype(np.float32)
GAIN, SHIFT = (np.random.default_rng(n).standard_normal(16).astype(np.float32) for n in (2, 3))

EARLY = """<ir_version: 3, opset_import: ["": 8]>
early (float[2,3,10,12] x, int64[1] starts, int64[1] ends, int64[1] axes) => (float[2,3,4,7] y) {
    a = ImageScaler<bias = [0.5, -1.0, 2.0], scale = 0.25>(x)
    b = Crop<border = [1, 2, 3, 2]>(a)
    c = Affine<alpha = 1.5, beta = -0.25>(b)
    d = ScaledTanh<alpha = 1.7, beta = 0.6>(c)
    e = ParametricSoftplus<alpha = 0.9, beta = 2.0>(d)
    f = Scale<scale = 3.0>(e)
    y = DynamicSlice(f, starts, ends, axes)
}"""
NORMS = """<ir_version: 8, opset_import: ["": 14]>
norms (float[2,4,16] x, float[16] gain, float[16] shift) => (float[2,4,16] y, float[2,4,1] inverse) {
    a, m, i = LayerNormalization<axis = -1, epsilon = 1e-6>(x, gain, shift)
    b = Add(a, x)
    y, inverse = SimplifiedLayerNormalization<axis = -1, epsilon = 1e-5>(b, gain)
}"""
FILES: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "early": (EARLY, {"x": IMAGES, "starts": np.array([1]), "ends": np.array([5]), "axes": np.array([2])}),
    "norms": (NORMS, {"x": ROWS, "gain": GAIN, "shift": SHIFT}),
}


def near(found: Any, expected: Any) -> bool:
    return all(np.abs(np.asarray(a) - b).max() <= 1e-5 * np.abs(b).max() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", FILES)
def test_files_of_lax_operators(name: str, oracle: Oracle) -> None:
    """As onnxruntime: by a plan, by the definitions, and lowered, which onnxruntime runs too."""
    text, feeds = FILES[name]
    model = parser.parse_model(text)
    names = [y.name for y in model.graph.output]
    expected = [oracle.run(model.SerializeToString(), feeds, timeout=30)[n] for n in names]
    lowered = sonnx.convert(model, 23, lower=True)
    assert not {n.op_type for n in lowered.graph.node} & {"ImageScaler", "Affine", "DynamicSlice", "SimplifiedLayerNormalization"}
    assert near(SingaBackend.prepare(model).run(feeds), expected)
    assert near(SingaBackend.run_model(model, feeds, optimize=0), expected)
    assert near(SingaBackend.run_model(lowered, feeds), expected)
    there = oracle.run(lowered.SerializeToString(), feeds, timeout=30)
    assert near([there[n] for n in names], expected)


ATTENTION = (
    '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[2,4,16] x, float[16,48] w, float[48] b) '
    "=> (float[2,4,16] y) { y = com.microsoft.Attention<num_heads = 4, unidirectional = 1>(x, w, b) }"
)


@pytest.mark.parametrize("imported", [True, False], ids=["imported", "not imported"])
def test_attention_in_a_file_of_an_old_opset(imported: bool, oracle: Oracle) -> None:
    """The body of an operator is written for the newest opset; the types of its results in an older file come from it."""
    model = parser.parse_model(ATTENTION)
    if not imported:
        del model.opset_import[1]
    rng = np.random.default_rng(0)
    feeds = {"x": ROWS} | {n: rng.standard_normal(s).astype(np.float32) for n, s in (("w", (16, 48)), ("b", (48,)))}
    expected = [oracle.run(model.SerializeToString(), feeds, timeout=30)["y"]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model does not import com.microsoft")
        kept = sonnx.export(sonnx.SONNXModel(model))
        lowered = sonnx.export(sonnx.SONNXModel(model), lower=True)
    assert [(n.domain, n.op_type) for n in kept.graph.node] == [("com.microsoft", "Attention")]
    assert {n.domain for n in lowered.graph.node} == {""}
    for made in (kept, lowered):
        assert near(SingaBackend.run_model(made, feeds), expected)
        assert near([oracle.run(made.SerializeToString(), feeds, timeout=30)["y"]], expected)


@pytest.mark.parametrize("scale", [1 / 255, 0.003, 0.3, 1.5])
def test_qlinear_softmax_multiplies_by_an_integer(scale: float, oracle: Oracle) -> None:
    """onnxruntime uses the integer part of 1 / y_scale: 254 for the float32 that is next to 1/255."""
    text = (
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (uint8[64,5] x, float s, uint8 z, float t, uint8 o) => '
        "(uint8[64,5] y) { y = com.microsoft.QLinearSoftmax<opset = 13, axis = -1>(x, s, z, t, o) }"
    )
    model = parser.parse_model(text)
    x = np.random.default_rng(0).integers(0, 256, (64, 5)).astype(np.uint8)
    scales = {"s": np.float32(0.05), "z": np.uint8(3), "t": np.float32(scale), "o": np.uint8(0)}
    feeds = {"x": x} | {n: np.asarray(v) for n, v in scales.items()}
    expected = oracle.run(model.SerializeToString(), feeds, timeout=30)["y"]
    assert np.array_equal(SingaBackend.run_model(model, feeds)[0], expected)
    assert np.array_equal(SingaBackend.run_model(model, feeds, optimize=0)[0], expected)
    assert np.array_equal(SingaBackend.run_model(sonnx.convert(model, 21, lower=True), feeds)[0], expected)


def test_what_trains_in_a_file_of_few_bits() -> None:
    """The bias of a product of few bits and the weights of norms train; scales of the bits and rotations of positions do not."""
    text = (
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[2,4,32] x, int64[2,4] p) => (float[2,4,32] y) '
        "{ h = com.microsoft.MatMulNBits<K = 32, N = 32, bits = 4, block_size = 32>(x, w, s, , , b) "
        "r = com.microsoft.RotaryEmbedding<num_heads = 2>(h, p, c, d) "
        "y = com.microsoft.SkipSimplifiedLayerNormalization(r, x, gain) }"
    )
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(d) for n, d in (("s", (32, 1)), ("b", 32), ("c", (8, 8)), ("d", (8, 8)), ("gain", 32))}
    packed = rng.integers(0, 256, (32, 1, 16)).astype(np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(packed, "w"))
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), n) for n, v in weights.items())
    report = sonnx.trainable_report(model)
    assert set(report.trainable) == {"b", "gain"} and set(report.constants) == {"s", "c", "d"}
    assert report.constants["s"] == "it is the input scales of com.microsoft.MatMulNBits"


class Net(sonnx.SONNXModel):
    def train_one_batch(self, x: Any, t: Any) -> tuple[Any, Any]:
        y = self.forward(x)[0]
        loss = autograd.mse_loss(y, t)
        self.optimizer(loss)
        return y, loss


def test_a_file_with_such_an_operator_trains_and_is_written(tmp_path: Path) -> None:
    """SimplifiedLayerNormalization in ONNX's domain, as onnxruntime-genai's builder writes it in every decoder."""
    made = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 16] x) => (float[n, 3] y) {
        h = MatMul (x, w) k = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-5> (h, gain) y = MatMul (k, v) }""")
    weights = {"w": np.linspace(-1, 1, 256), "gain": np.linspace(1, 2, 16), "v": np.sin(np.arange(48))}
    shapes = {"w": (16, 16), "gain": (16,), "v": (16, 3)}
    for name, value in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(value.reshape(shapes[name]).astype(np.float32), name))
    report = sonnx.check(made)
    assert report.good and {u.operator: u.status for u in report.operators}["SimplifiedLayerNormalization"] == "supported"
    assert sonnx.trainable_report(made).reasons["gain"] == "it is a weight of SimplifiedLayerNormalization"

    net, x, t = Net(made), ROWS[0], np.ones((4, 3), np.float32)
    net.optimizer = opt.SGD(lr=0.01)
    net.train()
    losses = [tensor.to_numpy(net(tensor.Tensor(data=x), tensor.Tensor(data=t))[1]).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    tuned = sonnx.export(net, [tensor.Tensor(data=x)], tmp_path / "tuned.onnx")
    assert [n.op_type for n in tuned.graph.node] == ["MatMul", "SimplifiedLayerNormalization", "MatMul"]
    with Oracle("onnxruntime", optimise=False) as oracle:
        theirs = oracle.run((tmp_path / "tuned.onnx").read_bytes(), {"x": x}, timeout=60)["y"]
    np.testing.assert_allclose(SingaBackend.run_model(tuned, [x])[0], theirs, rtol=1e-4, atol=1e-5)
    assert [n.op_type for n in sonnx.convert(made, 18).graph.node] == [n.op_type for n in made.graph.node]
    tuned.graph.node[0].op_type = "Nothing"
    with pytest.raises(InvalidModel, match="Nothing"):
        require_valid(tuned)
