"""Kernels of onnxruntime's normalizations against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from singa_backend import OperatorError, SingaBackend

RANDOM = np.random.default_rng(0)
X, SKIP = (RANDOM.standard_normal((2, 16, 96)).astype(np.float32) for _ in range(2))
GAMMA, BETA, BIAS = (RANDOM.standard_normal(96).astype(np.float32) for _ in range(3))
CASES: dict[str, tuple[str, dict[str, np.ndarray], list[str]]] = {
    "skip": ("SkipLayerNormalization", {"skip": SKIP, "gamma": GAMMA, "beta": BETA, "bias": BIAS}, ["y", "", "", "sum"]),
    "skip, y only": ("SkipLayerNormalization", {"skip": SKIP, "gamma": GAMMA}, ["y"]),
    "simplified skip": ("SkipSimplifiedLayerNormalization", {"skip": SKIP, "gamma": GAMMA, "bias": BIAS}, ["y", "", "", "sum"]),
    "simplified skip, y only": ("SkipSimplifiedLayerNormalization", {"skip": SKIP, "gamma": GAMMA}, ["y"]),
    "simplified": ("SimplifiedLayerNormalization", {"gamma": GAMMA}, ["y"]),
}


def model(name: str, given: dict[str, np.ndarray], outputs: list[str], x: np.ndarray = X) -> Any:
    domain = "" if name == "SimplifiedLayerNormalization" else "com.microsoft"
    node = helper.make_node(name, ["x", *given], outputs, domain=domain, epsilon=1e-5)
    fed = [helper.make_tensor_value_info(n, 1, v.shape) for n, v in {"x": x, **given}.items() if v.ndim > 1]
    held = [helper.make_tensor(n, 1, v.shape, v.reshape(-1)) for n, v in given.items() if v.ndim == 1]
    after = helper.make_node("Tanh", ["y"], ["z"])
    results = [helper.make_tensor_value_info(n, 1, None) for n in ("z", *filter(None, outputs))]
    graph = helper.make_graph([node, after], "g", fed, results, held)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case: str) -> None:
    name, given, outputs = CASES[case]
    proto = model(name, given, outputs)
    feeds = {"x": X, **({"skip": SKIP} if "skip" in given else {})}
    expected = SingaBackend.run_model(proto, feeds, optimize=0)
    rep = SingaBackend.prepare(proto)
    for _ in range(3):
        found = rep.run(feeds)
        assert all(np.allclose(a, b, rtol=1e-4, atol=2e-6) for a, b in zip(found, expected, strict=True))
    assert all(s.kernel != "definition" for s in rep.profile(feeds).steps)
    assert np.array_equal(feeds["x"], X)


@pytest.mark.parametrize("shape", [(1, 1, 96), (96,), (2, 16, 1)])
def test_a_residual_of_another_shape_is_judged_by_the_definition(shape: tuple[int, ...]) -> None:
    given = {"skip": np.ones(shape, np.float32), "gamma": GAMMA}
    proto = model("SkipLayerNormalization", given, ["y"])
    feeds = {"x": X, **{n: v for n, v in given.items() if v.ndim > 1}}
    with pytest.raises(OperatorError):
        SingaBackend.prepare(proto).run(feeds)


def test_a_nan_is_that_of_the_definition() -> None:
    name, given, outputs = CASES["simplified skip"]
    proto, rep = model(name, given, outputs), SingaBackend.prepare(model(name, given, outputs))
    rep.run({"x": X, "skip": SKIP})
    wrong = X.copy()
    wrong[0, 3, 5] = np.nan
    feeds = {"x": wrong, "skip": SKIP}
    expected = SingaBackend.run_model(proto, feeds, optimize=0)
    assert all(np.allclose(a, b, rtol=1e-4, atol=2e-6, equal_nan=True) for a, b in zip(rep.run(feeds), expected, strict=True))
