"""Weight-only quantization: bits of onnxruntime's quantizers, equal results in both engines, nested graphs, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, helper, numpy_helper, parser
from tests.helpers.onnxruntime_adapters import in_child

from singa import sonnx
from singa.cli import main
from singa_backend import run_model
from singa_backend.dtypes import FOUR_BIT_CODES
from singa_backend.errors import InvalidInput
from singa_backend.quantization.few_bits import block_integers, float_codes

MS = "com.microsoft"


def model_of(text: str, opset: int = 17, **weights: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> {text}')
    for i, node in enumerate(model.graph.node):
        node.name = f"/{node.op_type.lower()}/{i}"
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return model


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def held(model: ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def weight_kinds(k: int, n: int) -> list[np.ndarray]:
    """Symmetric, positive, of very different sizes with columns of zeros."""
    rng = np.random.default_rng(k)
    spread = rng.standard_normal((k, n)) * np.exp(rng.standard_normal((k, n)) * 3)
    spread[:, : n // 2] = 0
    return [normal(k, n), np.abs(normal(k, n)) + np.float32(0.1), spread.astype(np.float32)]


@pytest.fixture(scope="module")
def theirs() -> dict[Any, Any]:
    pytest.importorskip("onnxruntime")
    jobs: dict[Any, Any] = {}
    for k, n in ((64, 48), (72, 33), (256, 1)):
        for i, w in enumerate(weight_kinds(k, n)):
            for block in (16, 32, 128):
                for bits in (2, 4, 8):
                    for symmetric in (False, True):
                        jobs[k, n, i, block, bits, symmetric] = ("integers", w, bits, block, symmetric)
                for form in (0, 1):
                    jobs[k, n, i, block, form] = ("codes", w, form, block)
    return dict(zip(jobs, in_child(*jobs.values()), strict=True))


def test_the_bits_are_those_of_onnxruntimes_quantizers(theirs: dict[Any, Any]) -> None:
    for key, expected in theirs.items():
        k, n, i, block, *rest = key
        w = weight_kinds(k, n)[i].T
        found: Any = (
            block_integers(w, rest[0], block, rest[1]) if len(rest) == 2 else float_codes(w, ("fp4", "nf4")[rest[0]], block)
        )
        for ours, other in zip(found, expected, strict=True):
            assert (ours is None) == (other is None), key
            if ours is not None:
                np.testing.assert_array_equal(ours, other, err_msg=str(key))


def test_nf4_takes_the_nearest_quantile() -> None:
    w = normal(1, 64)
    codes, absmax = float_codes(w, "nf4", 64)
    values = FOUR_BIT_CODES[1][np.stack([codes >> 4, codes & 15], 1).reshape(-1)] * absmax[0]
    nearest = np.abs(w[0][:, None] - FOUR_BIT_CODES[1] * absmax[0]).min(axis=1)
    np.testing.assert_allclose(np.abs(w[0] - values), nearest, rtol=1e-5, atol=1e-7)


NET = """g (float[n,64] x) => (float[n,8] y, float[n,1,8] z) {
    h = MatMul(x, w)
    t = Transpose<perm=[1,0]>(v)
    u = MatMul(h, t)
    r = Relu(u)
    y = Gemm<transB=1>(r, f, b)
    s = Unsqueeze(r, one)
    z = MatMul(s, g2) }"""


def net() -> ModelProto:
    return model_of(
        NET, w=normal(64, 40) / 8, v=normal(32, 40, seed=1) / 8, f=normal(8, 32, seed=2) / 8, b=normal(8, seed=3),
        g2=normal(32, 8, seed=4) / 8, one=np.array([1]),
    )  # fmt: skip


@pytest.mark.parametrize("form", ["int2", "int4", "int8", "nf4", "fp4"])
def test_both_engines_compute_the_same_and_near_the_floats(form: str) -> None:
    pytest.importorskip("onnxruntime")
    model, x = net(), normal(5, 64, seed=9)
    made = sonnx.quantize_weights(model, form)
    onnx.checker.check_model(made)
    kinds = {"MatMulBnb4"} if form in ("nf4", "fp4") else {"MatMulNBits"}
    assert {n.op_type for n in made.graph.node if n.domain == MS} == kinds
    assert [n.name for n in made.graph.node if n.domain == MS] == ["/matmul/0", "/matmul/2", "/gemm/4", "/matmul/6"]
    assert not {"w", "v", "f", "g2"} & set(held(made)) and "t" not in {o for n in made.graph.node for o in n.output}
    ours = run_model(made, [x])
    for a, b in zip(ours, in_child(("run", made.SerializeToString(), {"x": x}))[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    exact = run_model(model, [x])
    error = np.linalg.norm(ours[0] - exact[0]) / np.linalg.norm(exact[0])
    assert error < {"int2": 0.9, "int4": 0.2, "int8": 0.01, "nf4": 0.2, "fp4": 0.25}[form]


@pytest.mark.parametrize("opset", [7, 10, 13, 17, 20, 21])
def test_products_are_lowered_at_every_opset(opset: int, oracle: Any) -> None:
    """DequantizeLinear has blocks since opset 21; before it a weight is a byte, and the sums are the same."""
    w, x = normal(40, 6), normal(3, 40, seed=1)
    model = model_of("g (float[n,40] x) => (float[n,6] y) { y = MatMul(x, w) }", w=w)
    for form in ("int2", "int4", "int8"):
        for symmetric in (True, False):
            few = sonnx.quantize_weights(model, form, block_size=16, symmetric=symmetric)
            made = sonnx.convert(few, opset, lower=True)
            assert all(not node.domain for node in made.graph.node)
            for found in (run_model(made, [x])[0], oracle.run(made.SerializeToString(), {"x": x})["y"]):
                np.testing.assert_allclose(found, run_model(few, [x])[0], rtol=1e-4, atol=1e-5)


def test_a_gemm_keeps_its_bias_in_every_form() -> None:
    text = "g (float[n,64] x) => (float[n,8] y) { y = Gemm<beta={beta}>(x, w, b) }"
    for form in ("int8", "nf4"):
        for beta, b in ((1.0, normal(8)), (0.5, normal(8)), (0.0, normal(8)), (1.0, normal(1, 8)), (1.0, normal(1))):
            model = model_of(text.replace("{beta}", str(beta)), w=normal(64, 8), b=b)
            made = sonnx.quantize_weights(model, form)
            plain = model_of(text.replace("{beta}", "0.0"), w=normal(64, 8), b=b)
            x = normal(3, 64, seed=5)
            bare = run_model(sonnx.quantize_weights(plain, form), [x])[0]
            np.testing.assert_allclose(run_model(made, [x])[0], bare + np.float32(beta) * b, rtol=1e-5, atol=1e-5)


def test_products_in_loops_and_branches_are_quantized() -> None:
    body = parser.parse_graph(
        "body (int64 i, bool c, float[n,32] s) => (bool c2, float[n,32] s2) { c2 = Identity(c)  s2 = MatMul(s, w) }"
    )
    loop = helper.make_node("Loop", ["trips", "", "x"], ["y"], name="loop", body=body)
    model = model_of("g (float[n,32] x) => (float[n,32] y) { y = Identity(x) }", w=normal(32, 32) / 8, trips=np.array(3))
    model.graph.node[0].CopyFrom(loop)
    made = sonnx.quantize_weights(model, "int8")
    inner = made.graph.node[0].attribute[0].g
    assert [n.op_type for n in inner.node] == ["Identity", "MatMulNBits"]
    assert "w" not in held(made) and "w_Q8" in held(made)
    x = normal(2, 32)
    np.testing.assert_allclose(run_model(made, [x])[0], run_model(model, [x])[0], rtol=0.02, atol=0.02)
    np.testing.assert_allclose(in_child(("run", made.SerializeToString(), {"x": x}))[0][0], run_model(made, [x])[0], atol=1e-5)


def test_what_stays_float() -> None:
    text = """g (float[n,32] x, float[32,16] p) => (float[n,16] y) {
        h = MatMul(x, w)
        i = MatMul(h, w)
        k = MatMul(i, p)
        y = Add(k, w3) }"""
    model = model_of(text, w=normal(32, 32), w3=normal(16))
    made = sonnx.quantize_weights(model, exclude=["/matmul/1"])
    assert [n.op_type for n in made.graph.node] == ["MatMulNBits", "MatMul", "MatMul", "Add"]
    assert {"w", "w_Q4"} <= set(held(made)), "the second product still reads the matrix"
    both = sonnx.quantize_weights(model)
    assert [n.op_type for n in both.graph.node] == ["MatMulNBits", "MatMulNBits", "MatMul", "Add"]
    assert sum(name.startswith("w_Q4") for name in held(both)) == 1, "one matrix is quantized once"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"form": "int3"}, "form must be one of int2, int4, int8, fp4, nf4"),
        ({"block_size": 24}, "block_size must be a power of 2"),
        ({"block_size": True}, "block_size must be a power of 2"),
        ({"form": "nf4", "symmetric": True}, "symmetric is for integers"),
        ({"exclude": ["nothing"]}, "matches none"),
        ({"operators": ["Conv"]}, "operators must be one of Gemm, MatMul"),
        ({"exclude_operators": ["MatMul", "Gemm"]}, "no weights to quantize"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        sonnx.quantize_weights(net(), **options)
    assert caught.value.code == "SX397"


def test_the_command(tmp_path: Path) -> None:
    sonnx.save(net(), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=normal(16, 64))
    arguments = ["quantize", f"{tmp_path}/m.onnx", "--weight-only", "int8", "-o", f"{tmp_path}/q.onnx"]
    done = CliRunner().invoke(main, [*arguments, "--data", f"{tmp_path}/x.npz"])
    assert done.exit_code == 0, done.output
    assert "output 'y': SNR" in done.output
    made = onnx.load(tmp_path / "q.onnx")
    assert held(made).keys() == held(sonnx.quantize_weights(net(), "int8")).keys()
    for extra in (["--dynamic"], []):
        wrong = [a for a in arguments if extra or a not in ("--weight-only", "int8")] + (
            extra or ["--block-size", "32", "--dynamic"]
        )
        assert CliRunner().invoke(main, wrong).exit_code == 2
