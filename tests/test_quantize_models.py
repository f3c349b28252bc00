"""Post-training quantization: integers and scales of onnxruntime's tools, equal results in both engines, errors, accuracy."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa import sonnx
from singa_backend.engines.oracle import Oracle
from singa_backend.quantization.calibration import entropy_threshold

CHILD = Path(__file__).with_name("quantized_by_onnxruntime.py")


def built(text: str, **weights: Any) -> ModelProto:
    model = parser.parse_model(text)
    for i, node in enumerate(model.graph.node):
        node.name = f"/{node.op_type.lower()}/{i}"
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items())
    return model


def dyadic(seed: int, *shape: int, steps: int = 32) -> Any:
    """Multiples of 1/32: sums of products are exact in float32, so that all engines see the same ranges."""
    return (np.random.default_rng(seed).integers(1 - steps, steps, shape) / 32).astype(np.float32)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@cache
def net() -> ModelProto:
    return built(
        """<ir_version: 9, opset_import: ["": 17]> g (float[n,2,6,6] x) => (float[n,3] y) {
            c = Conv<pads=[1,1,1,1]>(x, w, b)
            r = Relu(c)
            e = Conv<pads=[1,1,1,1]>(r, w2, b2)
            s = Add(e, r)
            p = MaxPool<kernel_shape=[2,2],strides=[2,2]>(s)
            f = Flatten(p)
            y = Gemm<transB=1>(f, v, d) }""",
        w=dyadic(1, 4, 2, 3, 3), b=dyadic(2, 4), w2=dyadic(3, 4, 4, 3, 3), b2=dyadic(4, 4), v=dyadic(5, 3, 36), d=dyadic(6, 3),
    )  # fmt: skip


@cache
def transformer() -> ModelProto:
    square = {n: normal(i, 8, 8, scale=0.4) for i, n in enumerate(("wq", "wk", "wv", "wo"))}
    return built(
        """<ir_version: 9, opset_import: ["": 17]> g (float[n,5,8] x) => (float[n,5,8] y) {
            q = MatMul(x, wq)
            k = MatMul(x, wk)
            v = MatMul(x, wv)
            kt = Transpose<perm=[0,2,1]>(k)
            a = MatMul(q, kt)
            m = Mul(a, third)
            s = Softmax<axis=-1>(m)
            t = MatMul(s, v)
            o = MatMul(t, wo)
            h = Add(o, x)
            l = LayerNormalization(h, g, b)
            u = MatMul(l, w1)
            ub = Add(u, b1)
            z = Sigmoid(ub)
            d = MatMul(z, w2)
            y = Add(d, l) }""",
        third=np.float32(0.35), g=normal(5, 8, scale=0.1) + 1, b=normal(6, 8, scale=0.1), w1=normal(7, 8, 16, scale=0.4),
        b1=normal(8, 16, scale=0.1), w2=normal(9, 16, 8, scale=0.4), **square,
    )  # fmt: skip


IMAGES = {"x": dyadic(7, 24, 2, 6, 6)}
TEXTS = {"x": normal(8, 24, 5, 8)}

STATIC: list[dict[str, Any]] = [
    {"method": method, "per_channel": per_channel, **more}
    for method in ("minmax", "entropy", "percentile")
    for per_channel in (False, True)
    for more in ({}, {"activations": "uint8", "percentile": 99.0})
] + [
    {"activations": "uint8", "weights": "uint8"},
    {"activations": "uint8", "weights": "uint8", "symmetric_weights": True},
    {"symmetric_activations": True},
    {"activations": "uint8", "symmetric_activations": True},
    {"symmetric_weights": False},
    {"exclude": ("/conv/2", "/matmul/4"), "activations": "uint8"},
    {"operators": ("Conv", "MatMul"), "per_channel": True},
]  # fmt: skip
DYNAMIC: list[dict[str, Any]] = [{"weights": w, "per_channel": c} for w in ("uint8", "int8") for c in (False, True)]
NETS = {"net": (net, IMAGES), "transformer": (transformer, TEXTS)}
HISTOGRAMS = [np.bincount(np.clip((normal(i, 4000) * 90 + 512).astype(int), 0, 1023), minlength=1024) for i in range(3)]
EDGES = np.linspace(-4, 4, 1025).astype(np.float32)


def asked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose excluded nodes are in the net."""
    names = {n.name for n in NETS[name][0]().graph.node}
    return {**options, **({"exclude": tuple(e for e in options["exclude"] if e in names)} if "exclude" in options else {})}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """The models of onnxruntime's tools, from one child process."""
    jobs: dict[str, Any] = {}
    for name, (model, data) in NETS.items():
        bytes_ = model().SerializeToString()
        for options in STATIC:
            jobs[f"{name} {options}"] = (bytes_, data, asked(name, options))
        for options in DYNAMIC:
            jobs[f"{name} {options}"] = (bytes_, None, options)
    for i, counts in enumerate(HISTOGRAMS):
        jobs[f"threshold {i}"] = ("threshold", counts, EDGES, 128)
    sent = pickle.dumps(list(jobs.values()))
    done = subprocess.run([sys.executable, str(CHILD)], input=sent, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return dict(zip(jobs, pickle.loads(done.stdout), strict=True))


def parameters(model: ModelProto) -> dict[str, tuple[Any, Any, Any]]:
    """(integers or None, scale, zero point) of each quantized value, by the value's name."""
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale, zero = held[node.input[1]].squeeze(), held[node.input[2]].squeeze()
            if node.op_type == "QuantizeLinear":
                found[node.input[0].removesuffix("_QuantizeLinear_Input")] = (None, scale, zero)
            elif node.input[0] in held:
                found[node.input[0].removesuffix("_quantized")] = (held[node.input[0]], scale, zero)
    return found


@pytest.mark.parametrize("options", STATIC, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_static_integers_and_scales_are_those_of_onnxruntime(name: str, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    model, data = NETS[name]
    ours = sonnx.quantize(model(), data, **asked(name, options))
    mine, other = parameters(ours), parameters(onnx.load_from_string(theirs[f"{name} {options}"]))
    assert mine.keys() == other.keys()
    for value, (integers, scale, zero) in other.items():
        mine_integers, mine_scale, mine_zero = mine[value]
        assert mine_zero.dtype == zero.dtype and mine_scale.dtype == scale.dtype
        if name == "net":  # exact sums: no difference at all
            np.testing.assert_array_equal(mine_scale, scale, err_msg=value)
        np.testing.assert_allclose(mine_scale, scale, rtol=1e-5, err_msg=value)
        np.testing.assert_array_equal(mine_zero, zero, err_msg=value)
        assert (mine_integers is None) == (integers is None)
        if integers is not None and (name == "net" or integers.dtype != np.int32):
            np.testing.assert_array_equal(mine_integers, integers, err_msg=value)
        elif integers is not None:  # the scale of a bias has that of an activation in it
            assert np.abs(mine_integers.astype(np.int64) - integers).max() <= 1 + np.abs(integers).max() * 1e-5


@pytest.mark.parametrize("options", DYNAMIC, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_dynamic_integers_and_scales_are_those_of_onnxruntime(name: str, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    ours = sonnx.quantize(NETS[name][0](), dynamic=True, **options)
    other = onnx.load_from_string(theirs[f"{name} {options}"])

    def products(model: ModelProto) -> list[tuple[str, Any, Any]]:
        held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        integers = [n for n in model.graph.node if n.op_type in ("MatMulInteger", "ConvInteger")]
        return [(n.op_type, held[n.input[1]], held[n.input[3]]) for n in integers if n.input[1] in held]

    mine, expected = products(ours), products(other)
    assert len(mine) == len(expected) > 0
    for (kind, w, zero), (other_kind, other_w, other_zero) in zip(mine, expected, strict=True):
        assert kind == other_kind
        np.testing.assert_array_equal(w, other_w)
        np.testing.assert_array_equal(zero.squeeze(), other_zero.squeeze())
    held = [{t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (ours, other)]
    scales = [sorted(float(v) for n, a in h.items() if n.endswith("_scale") for v in a.reshape(-1)) for h in held]
    assert scales[0] == scales[1]


@pytest.mark.parametrize("i", range(len(HISTOGRAMS)))
def test_thresholds_of_entropy_are_those_of_onnxruntime(i: int, theirs: dict[str, Any]) -> None:
    low, high = entropy_threshold(HISTOGRAMS[i], EDGES, 128)
    assert (float(low), float(high)) == theirs[f"threshold {i}"]
    assert high < EDGES[-1]  # something was cut, so that the search was needed


@pytest.mark.parametrize("options", [{}, {"per_channel": True, "activations": "uint8"}, {"dynamic": True, "weights": "uint8"}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("name", NETS)
def test_results_are_equal_in_both_engines(name: str, options: dict[str, Any]) -> None:
    model, data = NETS[name]
    made = sonnx.quantize(model(), None if options.get("dynamic") else data, **options)
    onnx.checker.check_model(made, full_check=True)
    (mine,) = sonnx.run_model(made, data)
    with Oracle("onnxruntime", optimise=False) as oracle:
        (other,) = oracle.run(made.SerializeToString(), data).values()
    (exact,) = sonnx.run_model(model(), data)
    scale = float(np.abs(exact).max())
    step = scale / 100 if name == "transformer" else scale / 127 + 1e-6
    assert np.abs(mine - other).max() <= step
    assert 0 < np.abs(mine - exact).max() < scale / 5
