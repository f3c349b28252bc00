"""Products in bfloat16: the copies of factors in every memory order, next to products of rounded factors in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from singa_backend.backend import SingaBackend
from singa_backend.kernels import onednn, rounding, work
from singa_backend.kernels.rounding import COPIES, INTERNAL, NONE, without_bf16
from singa_backend.kernels.table import Options
from singa_backend.proto.schemas import newest

F = np.float32
BF16 = Options(precision="bf16")

copies = pytest.mark.skipif(rounding.rounding() != COPIES, reason="this machine does not multiply copies in bfloat16")


def rounded(a: np.ndarray) -> np.ndarray:
    return a.astype(ml_dtypes.bfloat16).astype(np.float64)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(F)


def run(
    nodes: list[Any], feeds: dict[str, np.ndarray], constants: dict[str, np.ndarray] | None = None, precision: str = "bf16"
) -> Any:
    """The output y, and the kernels."""
    held = constants or {}
    inputs = [helper.make_tensor_value_info(n, 1, a.shape) for n, a in feeds.items()]
    kept = [helper.make_tensor(n, 1, a.shape, a.tobytes(), raw=True) for n, a in held.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", 1, None)], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    rep = SingaBackend.prepare(model, precision=precision, threads=1)
    first = rep.run(feeds)[0]
    assert (rep.run(feeds)[0] == first).all()
    return first, [s.kernel for s in rep.profile(feeds, runs=1).steps]


PRODUCTS: list[tuple[tuple[int, ...], tuple[int, ...], list[int] | None, list[int] | None]] = [
    ((96, 64), (64, 80), None, None),
    ((64, 96), (64, 80), [1, 0], None),
    ((96, 64), (80, 64), None, [1, 0]),
    ((64, 96), (80, 64), [1, 0], [1, 0]),
    ((2, 3, 96, 64), (2, 3, 64, 80), None, None),
    ((2, 96, 3, 64), (2, 80, 3, 64), [0, 2, 1, 3], [0, 2, 3, 1]),
    ((4, 96, 64), (64, 80), None, None),
    ((3, 1, 96, 64), (2, 64, 80), None, None),
]


@copies
@pytest.mark.parametrize(("a", "b", "first", "second"), PRODUCTS, ids=str)
def test_the_factors_are_rounded_and_nothing_else(a: Any, b: Any, first: Any, second: Any) -> None:
    feeds = {"a": drawn(*a), "b": drawn(*b)}
    nodes, names = [], []
    values = []
    for name, order in (("a", first), ("b", second)):
        values.append(rounded(feeds[name]).transpose(order) if order else rounded(feeds[name]))
        names.append(f"{name}t" if order else name)
        if order:
            nodes.append(helper.make_node("Transpose", [name], [f"{name}t"], perm=order))
    y, kernels = run([*nodes, helper.make_node("MatMul", names, ["y"])], feeds)
    expected = np.matmul(*values)
    np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max())
    assert any("bf16" in k for k in kernels) and sum(k.startswith("round ") for k in kernels) == 2


@copies
def test_weights_are_rounded_once_and_followers_stay_in_float32() -> None:
    a, w, c = drawn(64, 96), drawn(96, 128), drawn(128)
    nodes = [helper.make_node("Gemm", ["a", "w", "c"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]
    y, kernels = run(nodes, {"a": a}, {"w": w, "c": c})
    expected = np.maximum(rounded(a) @ rounded(w) + c, 0)
    np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max())
    assert [k.split()[0] for k in kernels] == ["round", "matmul"] and "bf16" in kernels[1]


@copies
def test_attention_rounds_the_factors_of_both_products() -> None:
    q, k, v = drawn(2, 64, 128), drawn(2, 80, 128), drawn(2, 80, 128)
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=2, kv_num_heads=2)
    inputs = [helper.make_tensor_value_info(n, 1, a.shape) for n, a in (("q", q), ("k", k), ("v", v))]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", newest(""))])
    feeds = {"q": q, "k": k, "v": v}
    exact = SingaBackend.prepare(model, optimize=0).run(feeds)[0]
    rep = SingaBackend.prepare(model, precision="bf16", threads=1)
    y = rep.run(feeds)[0]
    assert 0 < np.abs(y - exact).max() <= 2**-7 * np.abs(exact).max()
    assert sum("bf16" in s.kernel for s in rep.profile(feeds, runs=1).steps if s.kernel.startswith("matmul")) == 2


def test_a_product_of_few_columns_is_not_worth_copies() -> None:
    a, b = drawn(4096, 64), drawn(64, 4)
    y, kernels = run([helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": a, "b": b})
    assert not any(k.startswith("round ") for k in kernels)
    if rounding.rounding() != INTERNAL:
        np.testing.assert_allclose(y, a @ b, atol=1e-5 * np.abs(a @ b).max())


class Library:
    """A library for other machines."""

    def __init__(self, isa: str) -> None:
        self.isa = isa


@pytest.mark.parametrize(("isa", "expected"), [
    ("avx512_core_amx", INTERNAL), ("avx512_core_amx_fp16", INTERNAL), ("avx512_core_bf16", COPIES), ("avx512_core_fp16", COPIES),
    ("avx512_core_vnni", NONE), ("avx2_vnni", NONE),
])  # fmt: skip
def test_the_instruction_set_decides(monkeypatch: pytest.MonkeyPatch, isa: str, expected: str) -> None:
    monkeypatch.setattr(onednn, "library", lambda: Library(isa))
    assert rounding.rounding() == expected
    assert bool(without_bf16(BF16)) == (expected == NONE) and not without_bf16(Options())
    if expected == NONE:
        assert isa in without_bf16(BF16)


def test_without_the_instructions_bits_are_those_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "rounding", lambda: NONE)
    monkeypatch.setattr("singa_backend.kernels.products.fpmath", lambda _: "strict")
    nodes, feeds = [helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": drawn(96, 64), "b": drawn(64, 80)}
    y, kernels = run(nodes, feeds)
    assert not any("bf16" in k or k.startswith("round") for k in kernels)
    assert y.tobytes() == run(nodes, feeds, precision="float32")[0].tobytes()


def test_the_rate_of_products_in_bfloat16_is_measured() -> None:
    found = work.rates(1, "bf16")
    assert found.precision == "bf16" and found.gflops > 0
