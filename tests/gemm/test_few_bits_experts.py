"""Mixtures of experts with weights of few bits against the definition and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.gemm.test_few_bits_rows import fields
from tests.helpers.plan_checks import kernels_used

from singa_backend import SingaBackend
from singa_backend.elementwise.compile import available
from singa_backend.errors import OperatorError

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

F32 = np.float32

EXPERTS, HIDDEN, INNER = 5, 96, 160

NAMES = ("x", "router", "w1", "s1", "b1", "w2", "s2", "b2", "w3", "s3", "b3", "z1", "z2", "z3", "shares")

PRODUCT = "machine.product of experts"


def drawn(
    bits: int = 4, block: int = 0, fusion: int = 0, *, bias: bool = False, zeros: bool = False, third: bool = False
) -> dict[str, Any]:
    """The constants of a node."""
    g, made = np.random.default_rng(bits + block), {}
    up = INNER * (2 if fusion else 1)
    for number, n, k in ((1, up, HIDDEN), (2, HIDDEN, INNER), (3, INNER, HIDDEN))[: 3 if third else 2]:
        count = k // block if block else 1
        made[f"w{number}"] = g.integers(0, 256, (EXPERTS, n, k * bits // 8), dtype=np.uint8)
        scales = g.uniform(0.5, 1.5, (EXPERTS, n, count)) / 2**bits / np.sqrt(k)
        made[f"s{number}"] = (scales if block else scales[..., 0]).astype(F32)
        if bias:
            made[f"b{number}"] = g.standard_normal((EXPERTS, n)).astype(F32)
        if zeros:
            shape = (EXPERTS, n, -(-count * bits // 8)) if block else (EXPERTS, -(-n * bits // 8))
            made[f"z{number}"] = g.integers(0, 256, shape, dtype=np.uint8)
    return made


def model(constants: dict[str, Any], *, shares: bool = False, **attributes: Any) -> Any:
    """A node with these constants."""
    given = {"x", "router", *constants, *(["shares"] if shares else [])}
    names = [n if n in given else "" for n in NAMES]
    while not names[-1]:
        names.pop()
    node = helper.make_node("QMoE", names, ["y"], domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "router", "shares") if n in given]
    tensors = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(rows: int, seed: int = 0, shares: bool = False) -> list[np.ndarray]:
    g = np.random.default_rng(seed)
    made = [g.standard_normal((rows, HIDDEN)).astype(F32), g.standard_normal((rows, EXPERTS)).astype(F32)]
    return [*made, g.uniform(0.1, 1, (rows, EXPERTS)).astype(F32)] if shares else made


def compare(made: Any, *runs: list[np.ndarray], threads: int = 1) -> list[str]:
    """Compare runs with the definition; return the kernels."""
    rep, definition = SingaBackend.prepare(made, threads=threads), SingaBackend.prepare(made, optimize=0)
    for inputs in (*runs, *runs):
        (y,), (want,) = (r.run(inputs) for r in (rep, definition))
        assert y.shape == want.shape
        np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * np.abs(want).max())
    return kernels_used(rep)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_forms_of_weights(limited: str, bits: int, block: int, zeros: bool, threads: int) -> None:
    form = {"block_size": block} if block else {}
    for rows in (1, 7, 40):
        made = model(drawn(bits, block, zeros=zeros, bias=True), k=2, activation_type="silu", expert_weight_bits=bits, **form)
        used = compare(made, feeds(rows), feeds(rows, 1), threads=threads)
        assert used.count(PRODUCT) == 2 and "definition" not in used


@pytest.mark.parametrize(
    ("kind", "fusion", "third"),
    [
        *((kind, 0, third) for kind in ("relu", "gelu", "silu", "identity") for third in (False, True)), ("swiglu", 1, False),
        ("swiglu", 2, False), ("swiglu", 0, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", [{}, {"swiglu_limit": 0.5}, {"swiglu_limit": 0.5, "swiglu_limit_after_activation": 1}])
def test_activations(kind: str, fusion: int, third: bool, limit: dict[str, Any]) -> None:
    form = {"k": 3, "activation_type": kind, "swiglu_fusion": fusion, "activation_alpha": 1.7, "activation_beta": 0.25, **limit}
    used = compare(model(drawn(4, 32, fusion, third=third), block_size=32, **form), feeds(9), feeds(9, 1))
    assert used.count(PRODUCT) == 2 + third and "definition" not in used


@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_routes(k: int, shares: bool, normalize: bool) -> None:
    """Also equal values of the router, an expert that has all rows, and values of minus infinity."""
    made = model(drawn(), shares=shares, k=k, activation_type="relu", normalize_routing_weights=normalize)
    runs = [feeds(6, seed, shares) for seed in range(4)]
    runs[1][1][:] = 0
    runs[2][1][:, 3] = 9
    runs[3][1][:, 1:4] = -np.inf
    assert PRODUCT in compare(made, *runs)


def test_results_are_those_of_float64() -> None:
    constants, (x, router) = drawn(), feeds(6)
    (y,) = SingaBackend.prepare(model(constants, k=2, activation_type="relu"), threads=1).run([x, router])
    first, second = (
        (fields(constants[f"w{i}"], 4).astype(float) - 8) * constants[f"s{i}"][..., None].astype(float) for i in (1, 2)
    )
    for row, (given, values) in enumerate(zip(x.astype(float), router.astype(float), strict=True)):
        chosen = np.argsort(-values)[:2]
        e = np.exp(values[chosen])
        exact = sum(s * second[i] @ np.maximum(first[i] @ given, 0) for i, s in zip(chosen, e / e.sum(), strict=True))
        np.testing.assert_allclose(y[row], exact, rtol=0, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("rows", [1, 300])
def test_bits_do_not_depend_on_the_run_or_on_threads(rows: int) -> None:
    made, inputs = model(drawn(8, 32), k=4, activation_type="relu", expert_weight_bits=8, block_size=32), feeds(rows)
    results = []
    for threads in (1, 2, 3):
        rep = SingaBackend.prepare(made, threads=threads)
        results += [rep.run(inputs)[0] for _ in range(2)]
    for y in results[1:]:
        np.testing.assert_array_equal(y, results[0])


def test_values_that_are_not_finite_are_those_of_the_definition() -> None:
    made, inputs = model(drawn(), k=2, activation_type="relu"), feeds(4)
    rep, definition = SingaBackend.prepare(made, threads=1), SingaBackend.prepare(made, optimize=0)
    rep.run(inputs)
    for value in (np.inf, np.nan):
        for place in (0, 1):
            bad = [v.copy() for v in inputs]
            bad[place][1, 2] = value
            (y,), (want,) = (r.run(bad) for r in (rep, definition))
            np.testing.assert_array_equal(np.isfinite(y), np.isfinite(want))


def test_weights_of_each_layer_have_their_own_bits() -> None:
    constants = drawn(4, 32) | {n: v for n, v in drawn(8, 32).items() if n.endswith("2")}
    made = model(constants, k=2, activation_type="silu", block_size=32, fc2_expert_weight_bits=8)
    assert PRODUCT in compare(made, feeds(3))


@pytest.mark.parametrize("change", [{"k": EXPERTS + 1}, {"block_size": 64}, {"activation_type": "tanh"}])
def test_what_the_definition_refuses_is_its_error(change: dict[str, Any]) -> None:
    rep = SingaBackend.prepare(model(drawn(), **{"k": 2, "activation_type": "relu"} | change))
    with pytest.raises(OperatorError):
        rep.run(feeds(2))
