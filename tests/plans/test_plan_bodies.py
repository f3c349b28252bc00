"""Plans compute onnxruntime's own operators by the kernels of their bodies, which fuse with the nodes around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

from singa_backend import SingaBackend

X = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
B = np.linspace(-1, 1, 256, dtype=np.float32)


def model(body: str, dtype: str = "float") -> Any:
    head = '<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>'
    return parser.parse_model(f"{head} g ({dtype}[64,256] x, {dtype}[256] b) => ({dtype}[64,256] y) {{ {body} }}")


def both(proto: Any, *feeds: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
    rep = SingaBackend.prepare(proto)
    expected = SingaBackend.run_model(proto, list(feeds), optimize=0)[0]
    for _ in range(2):
        found = rep.run(list(feeds))[0]
    return np.asarray(found), np.asarray(expected), rep.profile(list(feeds))


def test_bodies_fuse_into_one_step_with_the_names_of_the_file() -> None:
    text = "h = com.microsoft.BiasGelu(x, b) q = com.microsoft.QuickGelu<alpha = 1.0>(h) y = com.microsoft.FastGelu(q)"
    found, expected, profile = both(model(text), X, B)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [s.operators for s in profile.steps] == [("BiasGelu", "QuickGelu", "FastGelu")]
    assert [n.operator for n in profile.nodes] == ["BiasGelu", "QuickGelu", "FastGelu"]


@pytest.mark.parametrize("repeat", [1, 3])
def test_equal_calls_are_separate_nodes_of_the_profile(repeat: int) -> None:
    text = "v0 = MatMul(x, w) " + " ".join(f"v{i + 1} = com.microsoft.BiasGelu(v{i}, b) " for i in range(repeat))
    proto = model(f"w = ConstantOfShape<value = float[1] {{0.01}}>(s) {text} y = Identity(v{repeat})".replace("(s)", "(sh)"))
    proto.graph.node.insert(0, parser.parse_graph("g () => (int64[2] sh) { sh = Constant<value_ints = [256, 256]>() }").node[0])
    found, expected, profile = both(proto, X, B)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert sum(n.operator == "BiasGelu" for n in profile.nodes) == repeat


def test_narrow_floats_are_rounded_once_by_the_definition() -> None:
    x, b = X.astype(np.float16), B.astype(np.float16)
    found, expected, _ = both(model("y = com.microsoft.BiasGelu(x, b)", "float16"), x, b)
    assert np.array_equal(found, expected)


def test_a_lax_operator() -> None:
    head = '<ir_version: 6, opset_import: ["": 9]>'
    proto = parser.parse_model(
        f"{head} g (float[64,256] x, float[256] b) => (float[64,256] y) {{ h = Affine<alpha = 2.0>(x) y = Add(h, b) }}"
    )
    found, expected, profile = both(proto, X, B)
    assert np.allclose(found, expected, rtol=1e-6) and {n.operator for n in profile.nodes} == {"Affine", "Add"}
