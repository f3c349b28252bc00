"""Products with weights of few bits, beyond drawn nodes: onnxruntime's traps, written constants, gradients and memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto
from tests.helpers.microsoft_nodes import check_gradients, feeds, gradients, lowered, model, ours, theirs, there

import singa_backend
from singa import sonnx
from singa_backend import OperatorError
from singa_backend.engines.oracle import EngineFailure, Oracle

RNG = np.random.default_rng(0)
F = np.float32


def nbits(
    n: int = 5, k: int = 70, block: int = 32, bits: int = 4, zero: str = "packed", dtype: Any = F, bias: bool = True
) -> tuple[list[Any], dict[str, Any], np.ndarray]:
    """Inputs and attributes of a MatMulNBits, and its weights in float64."""
    blocks = -(-k // block)
    codes = RNG.integers(0, 2**bits, (n, blocks * block))
    b = packed(codes, bits).reshape(n, blocks, -1)
    scales = RNG.uniform(0.1, 0.5, (n, blocks)).astype(dtype)
    points = RNG.integers(0, 2**bits, (n, blocks)).astype(np.float64)
    z: Any = None
    if zero == "packed":
        z = packed(points.astype(int), bits)
    elif zero == "floats":
        points = points + 0.25
        z = points.astype(dtype)
    else:
        points[:] = 2 ** (bits - 1)
    wide = np.repeat(scales.astype(np.float64), block, 1), np.repeat(points, block, 1)
    w = ((codes - wide[1]) * wide[0])[:, :k]
    a = RNG.standard_normal((2, 3, k)).astype(dtype)
    inputs = [a, b, scales, z, None, RNG.standard_normal(n).astype(dtype) if bias else None]
    return inputs, {"K": k, "N": n, "bits": bits, "block_size": block}, w


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis, lower bits first; a row ends with a whole byte."""
    each = 8 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    parts = codes.reshape(*codes.shape[:-1], -1, each)
    return np.asarray((parts << (np.arange(each) * bits)).sum(-1)).astype(np.uint8)


# --- MatMulNBits


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero", ["none", "packed", "floats"])
def test_matmul_nbits_is_the_product_with_its_weights(bits: int, zero: str) -> None:
    inputs, attributes, w = nbits(bits=bits, zero=zero)
    (y,) = ours("MatMulNBits", inputs, **attributes)
    want = inputs[0].astype(np.float64) @ w.T + inputs[5]
    assert np.abs(y - want).max() <= 1e-5 * np.abs(want).max()


def test_level_4_errs_by_the_rounding_of_the_input(oracle: Oracle) -> None:
    """The definition computes in float32 whatever the level; onnxruntime rounds A to int8, relative to the largest of a block."""
    inputs, attributes, w = nbits(n=16, k=256, bias=False)
    exact = inputs[0].astype(np.float64) @ w.T
    size = np.sqrt((exact**2).mean())
    errors = []
    for level in (0, 4):
        attributes["accuracy_level"] = level
        (y,) = ours("MatMulNBits", inputs, **attributes)
        assert np.abs(y - exact).max() < 1e-5 * size
        (other,) = theirs(oracle, "MatMulNBits", inputs, constants=(1, 2, 3), **attributes)
        errors.append(np.sqrt(((other - exact) ** 2).mean()) / size)
    assert errors[0] < 1e-5 and 1e-3 < errors[1] < 2e-2, errors


def test_groups_choose_the_scale_and_the_zero_point_of_a_column() -> None:
    inputs, attributes, _ = nbits(k=64, bias=False)
    group = RNG.permutation(np.arange(64) // 32).astype(np.int32)
    inputs[4] = group
    (y,) = ours("MatMulNBits", inputs, **attributes)
    codes = np.stack([inputs[1] & 15, inputs[1] >> 4], -1).reshape(5, 64).astype(int)
    points = np.stack([inputs[3] & 15, inputs[3] >> 4], -1).reshape(5, 2).astype(int)
    w = (codes - points[:, group]) * inputs[2][:, group]
    np.testing.assert_allclose(y, inputs[0] @ w.T, rtol=1e-4, atol=1e-4)


def test_with_groups_onnxruntime_does_not_read_packed_zero_points(oracle: Oracle) -> None:
    """It computes as if they were absent, against its schema and its other kernels: a difference that is not followed."""
    inputs, attributes, _ = nbits(k=64, bias=False)
    inputs[4] = (np.arange(64) // 32).astype(np.int32)
    without = [*inputs[:3], None, *inputs[4:]]
    (other,) = theirs(oracle, "MatMulNBits", inputs, **attributes)
    np.testing.assert_allclose(other, ours("MatMulNBits", without, **attributes)[0], rtol=1e-4, atol=1e-4)
    assert np.abs(other - ours("MatMulNBits", inputs, **attributes)[0]).max() > 0.1


def test_weights_without_elements_are_zeros(oracle: Oracle) -> None:
    inputs, attributes, _ = nbits()
    inputs[1:4] = [np.zeros((5, 0, 16), np.uint8), np.zeros((5, 0), F), None]
    (y,) = ours("MatMulNBits", inputs, **attributes)
    assert np.array_equal(y, np.broadcast_to(inputs[5], y.shape))
    assert np.array_equal(
        y, singa_backend.prepare(lowered("MatMulNBits", inputs, constants=(1,), **attributes)).run(feeds(inputs, (1,)))[0]
    )
    assert np.array_equal(y, theirs(oracle, "MatMulNBits", inputs, **attributes)[0])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero", ["none", "packed", "floats"])
@pytest.mark.parametrize("constants", [(), (1, 3)])
def test_the_lowered_product(oracle: Oracle, bits: int, zero: str, constants: tuple[int, ...]) -> None:
    inputs, attributes, _ = nbits(bits=bits, zero=zero)
    made = lowered("MatMulNBits", inputs, constants=constants, **attributes)
    kinds = {n.op_type for n in made.graph.node}
    assert ("DequantizeLinear" in kinds) == (bool(constants) and zero != "floats"), kinds
    (want,) = ours("MatMulNBits", inputs, **attributes)
    for found in (singa_backend.prepare(made).run(feeds(inputs, constants)), there(oracle, made, feeds(inputs, constants))):
        np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-4)


OLDER = pytest.mark.parametrize("opset", [11, 17, 18, 20])
"""Opsets without blocks in DequantizeLinear, some of them without BitwiseAnd."""


@OLDER
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("constants", [(), (1, 2, 3, 4)])
def test_a_product_with_groups_is_lowered_at_older_opsets(
    oracle: Oracle, opset: int, bits: int, constants: tuple[int, ...]
) -> None:
    inputs, attributes, _ = nbits(k=64, bits=bits, bias=False)
    inputs[4] = group = RNG.permutation(np.arange(64) // 32).astype(np.int32)
    places = np.arange(0, 8, bits)
    codes, points = (((x[..., None] >> places) & 2**bits - 1).reshape(5, -1).astype(float) for x in (inputs[1], inputs[3]))
    w = (codes - points[:, :2][:, group]) * inputs[2][:, group]
    made = sonnx.convert(model("MatMulNBits", inputs, constants=constants, **attributes), opset, lower=True)
    assert {n.domain for n in made.graph.node} == {""} and made.opset_import[0].version == opset
    for found in (singa_backend.prepare(made).run(feeds(inputs, constants)), there(oracle, made, feeds(inputs, constants))):
        np.testing.assert_allclose(found[0], inputs[0] @ w.T, rtol=1e-4, atol=1e-4)


@OLDER
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape", "axis"),
    [(np.uint8, (6, 64), 1), (np.uint8, (6, 32, 4), 1), (ml_dtypes.int4, (6, 64), -1), (ml_dtypes.uint4, (6, 2, 32), 2)],
)
def test_a_table_is_lowered_at_older_opsets(
    oracle: Oracle, opset: int, zero: bool, dtype: Any, shape: tuple[int, ...], axis: int
) -> None:
    blocks = [n // 16 if i == axis % len(shape) else n for i, n in enumerate(shape)]
    codes, points = RNG.integers(0, 8, shape), RNG.integers(0, 8, blocks)
    data, z = (packed(c, 4) if dtype == np.uint8 else c.astype(dtype) for c in (codes, points))
    index, scales = np.array([[2, -1, 0]]), RNG.uniform(1, 2, blocks).astype(F)
    inputs, constants = [data, index, scales, z if zero else None], (0, 2, 3)
    node = model("GatherBlockQuantized", inputs, constants=constants, block_size=16, quantize_axis=axis)
    middle = points if zero else np.full(blocks, 8 if dtype == np.uint8 else 0)
    want = ((codes - np.repeat(middle, 16, axis)) * np.repeat(scales, 16, axis))[index]
    made = sonnx.convert(node, opset, lower=True)
    assert {n.domain for n in made.graph.node} == {""} and made.opset_import[0].version == opset
    for found in (singa_backend.prepare(made).run([index]), there(oracle, made, {"x1": index})):
        np.testing.assert_allclose(found[0], want, rtol=1e-6)


def test_constants_keep_their_bytes_in_the_lowered_file() -> None:
    """The low bits of a byte are the first value, as ONNX packs int4: only the type changes."""
    inputs, attributes, _ = nbits(k=64, zero="none", bias=False)
    made = lowered("MatMulNBits", inputs, constants=(1, 3), **attributes)
    (q,) = (t for t in made.graph.initializer if t.data_type == TensorProto.UINT4 and list(t.dims) == [5, 64])
    assert q.raw_data == inputs[1].tobytes()


@pytest.mark.parametrize("zero", ["none", "packed", "floats"])
def test_the_gradient_goes_to_the_input_the_scales_and_the_bias(zero: str) -> None:
    inputs, attributes, _ = nbits(zero=zero)
    check_gradients("MatMulNBits", inputs, [0, 2, 5], **attributes)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"bits": 3}, "bits must be 2, 4 or 8"),
        ({"block_size": 24}, "power of 2"),
        ({"block_size": 8}, "at least 16"),
        ({"K": 71}, "K = 71"),
        ({"N": 6}, "B must have shape"),
        ({"weight_prepacked": 1}, "one GPU"),
    ],
)
def test_what_is_refused(change: dict[str, int], what: str) -> None:
    inputs, attributes, _ = nbits(bias=False)
    with pytest.raises(OperatorError, match=what):
        ours("MatMulNBits", inputs, **attributes | change)


def test_the_definition_unpacks_a_part_of_the_weights_and_keeps_none() -> None:
    n, k = 8192, 1024
    b = RNG.integers(0, 256, (n, k // 32, 16)).astype(np.uint8)
    scales = RNG.uniform(0.1, 0.5, (n, k // 32)).astype(F)
    inputs = [np.ones((1, k), F), b, scales]
    rep = singa_backend.prepare(model("MatMulNBits", inputs, constants=(1, 2), K=k, N=n, block_size=32))
    rep.run({"x0": inputs[0]})
    tracemalloc.start()
    try:
        rep.run({"x0": inputs[0]})
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20 and most < 4 * n * k, (kept, most)  # the weights in float32 are 4 * n * k bytes


# --- MatMulBnb4, MatMulFpQ4, GatherBlockQuantized


def test_the_first_value_of_bnb4_is_in_the_high_bits() -> None:
    attributes = {"K": 2, "N": 1, "block_size": 16, "quant_type": 0}
    inputs = [np.eye(2, dtype=F), np.array([0x3C], np.uint8), np.array([6], F)]
    assert ours("MatMulBnb4", inputs, **attributes)[0].reshape(-1).tolist() == [6.0, -2.0]  # codes 3 (1.0) and 12 (-1/3)


def test_bnb4_without_trans_b() -> None:
    """W itself; onnxruntime's kernel multiplies by its transpose all the same (conformance/ledger.toml)."""
    b, absmax = RNG.integers(0, 256, 90).astype(np.uint8), RNG.uniform(1, 2, 12).astype(F)
    attributes = {"K": 36, "N": 5, "block_size": 16, "quant_type": 1}
    (turned,) = ours("MatMulBnb4", [np.eye(36, dtype=F), b, absmax], **attributes)
    a = RNG.standard_normal((3, 5)).astype(F)
    (y,) = ours("MatMulBnb4", [a, b, absmax], **attributes | {"transB": 0})
    np.testing.assert_allclose(y, a @ turned.T, rtol=1e-5, atol=1e-5)
    check_gradients("MatMulBnb4", [a, b, absmax], [0, 2], **attributes | {"transB": 0})


def test_bnb4_refuses_other_types() -> None:
    inputs = [np.ones((1, 2), F), np.zeros(1, np.uint8), np.ones(1, F)]
    with pytest.raises(OperatorError, match="quant_type must be 0"):
        ours("MatMulBnb4", inputs, K=2, N=1, block_size=16, quant_type=2)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_blob_of_fpq4(oracle: Oracle, kind: int) -> None:
    """The low bits of a block's 16 bytes are its first 16 values.  Type 2 is read as type 1, whatever the schema's text says."""
    codes, scale, zero = RNG.integers(0, 16, 32), -0.75, 3
    head = np.frombuffer(F(scale).tobytes(), np.uint8)
    data = (codes[:16] | codes[16:] << 4).astype(np.uint8)
    blob = np.concatenate([head, np.array([zero] if kind else [], np.uint8), data])
    inputs = [np.eye(32, dtype=F), blob, np.array([32, 1])]
    (y,) = ours("MatMulFpQ4", inputs, blk_quant_type=kind)
    assert np.array_equal(y[:, 0], (codes - (zero if kind else 8)) * scale)
    try:
        (expected,) = theirs(oracle, "MatMulFpQ4", inputs, constants=(1, 2), blk_quant_type=kind)
    except EngineFailure as failure:  # it has this operator on AVX-512 only
        assert "not yet supported on this hardware platform" in failure.reason
    else:
        assert np.array_equal(y, expected)


@pytest.mark.parametrize(("dtype", "default"), [(np.uint8, 8), (ml_dtypes.int4, 0), (ml_dtypes.uint4, 0)])
def test_default_zero_points_of_a_table(dtype: Any, default: int) -> None:
    codes = RNG.integers(0, 8, (3, 32))
    data = packed(codes, 4) if dtype == np.uint8 else codes.astype(dtype)
    index, scales = np.array([[2, -1, 0]]), RNG.uniform(1, 2, (3, 2)).astype(F)
    inputs, attributes = [data, index, scales], {"block_size": 16}
    (y,) = ours("GatherBlockQuantized", inputs, **attributes)
    np.testing.assert_array_equal(y, ((codes - default) * np.repeat(scales, 16, 1))[index].astype(F))
    if dtype == np.uint8:
        check_gradients("GatherBlockQuantized", inputs, [2], **attributes)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gather_axis": 1, "quantize_axis": 0}, "gather_axis must be 0"),
        ({"quantize_axis": 0}, "must differ"),
        ({"block_size": 8}, "power of 2 and at least 16"),
        ({"block_size": 64}, "scales must have shape"),
    ],
)
def test_tables_that_are_refused(change: dict[str, int], what: str) -> None:
    inputs = [np.zeros((3, 16), np.uint8), np.array([0]), np.ones((3, 2), F)]
    with pytest.raises(OperatorError, match=what):
        ours("GatherBlockQuantized", inputs, **{"block_size": 16} | change)


# --- projections, adapters, small floats


def test_the_joined_projections_are_their_parts() -> None:
    """MatMulNBitsMlp and MatMulNBitsQkv have no CPU kernel: the norm, then MatMulNBits for each weight."""
    one, attributes, _ = nbits(k=32, zero="none")
    two, _, _ = nbits(k=32, zero="none")
    a, skip, scale = (RNG.standard_normal(s).astype(F) for s in ((2, 32), (2, 32), (32,)))
    total = a + skip
    normed = (total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * scale).astype(F)
    gate, up = (ours("MatMulNBits", [normed, *v[1:]], **attributes)[0] for v in (one, two))
    parts = [one[1], one[2], one[5], two[1], two[2], two[5]]
    y, kept = ours("MatMulNBitsMlp", [a, skip, scale, *parts], 2, **attributes | {"activation": "silu"})
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(kept, total)
    form = {"K": 32, "Nq": 5, "Nkv": 5, "bits": 4, "block_size": 32, "epsilon": 1e-5}
    q, k, v, kept = ours("MatMulNBitsQkv", [a, skip, scale, *parts, *parts[:3]], 4, **form)
    for found, want in ((q, gate), (k, up), (v, gate), (kept, total)):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    check_gradients("MatMulNBitsMlp", [a, None, scale, *parts], [0, 2, 4, 5], step=2e-3, **attributes | {"activation": "silu"})


def test_the_sum_of_a_skip_needs_the_skip() -> None:
    one, attributes, _ = nbits(k=32, zero="none")
    parts = [one[1], one[2], None, one[1], one[2], None]
    with pytest.raises(OperatorError, match="needs the input skip"):
        ours("MatMulNBitsMlp", [one[0], None, None, *parts], 2, **attributes | {"activation": "silu"})
    with pytest.raises(OperatorError, match="activation must be silu"):
        ours("MatMulNBitsMlp", [one[0], None, None, *parts], **attributes | {"activation": "relu"})


def test_adapters_without_elements_add_nothing() -> None:
    base, attributes, _ = nbits(k=32, zero="none", bias=False)
    down, _, _ = nbits(n=3, k=32, bits=8, zero="none", bias=False)
    up, _, _ = nbits(n=5, k=3, bits=8, zero="none", bias=False)
    form = {n: attributes[n] for n in ("K", "N")}
    inputs = [base[0], base[1], base[2], down[1], down[2], up[1], up[2]]
    (whole,) = ours("MatMulNBitsQLoRA", inputs, **form)
    (plain,) = ours("MatMulNBits", base[:3], **attributes)
    (first,) = ours("MatMulNBits", [base[0], down[1], down[2]], K=32, N=3, bits=8, block_size=32)
    (second,) = ours("MatMulNBits", [first, up[1], up[2]], K=3, N=5, bits=8, block_size=32)
    np.testing.assert_allclose(whole, plain + second, rtol=1e-4, atol=1e-3)
    for i, empty in ((5, up[1][:0]), (3, down[1][:0])):
        (y,) = ours("MatMulNBitsQLoRA", [*inputs[:i], empty, *inputs[i + 1 :]], **form)
        np.testing.assert_array_equal(y, plain)


# --- QMoE


def moe(bits: int = 4, kind: str = "swiglu", fusion: int = 1, **attributes: Any) -> tuple[list[Any], dict[str, Any]]:
    experts, hidden, inner, each = 3, 16, 8, 8 // bits
    up = inner * (2 if fusion else 1)
    raw = [RNG.integers(0, 256, (experts, n, k // each)).astype(np.uint8) for n, k in ((up, hidden), (hidden, inner))]
    scales = [RNG.uniform(0.1, 0.2, (experts, n)).astype(F) * 16 / 2**bits for n in (up, hidden)]
    x, router = RNG.standard_normal((4, hidden)).astype(F), RNG.standard_normal((4, experts)).astype(F)
    form = {"k": 2, "activation_type": kind, "swiglu_fusion": fusion, "expert_weight_bits": bits}
    return [x, router, raw[0], scales[0], None, raw[1], scales[1]], form | attributes


@pytest.mark.parametrize("normalize", [0, 1])
def test_shares_of_experts_add_up_to_1_whatever_the_attribute_says(oracle: Oracle, normalize: int) -> None:
    """The CPU kernel of QMoE divides by the sum over the chosen experts, also where MoE does not."""
    inputs, attributes = moe(8, "identity", 0, normalize_routing_weights=normalize)
    (y,) = ours("QMoE", inputs, **attributes)
    w1, w2 = (((inputs[i].astype(float) - 128) * inputs[i + 1][..., None]) for i in (2, 5))
    want = np.zeros(y.shape)
    for t, (x, r) in enumerate(zip(inputs[0], inputs[1], strict=True)):
        top = np.argsort(-r)[:2]
        share = np.exp(r[top]) / np.exp(r[top]).sum()
        want[t] = sum(s * (w2[e] @ (w1[e] @ x)) for s, e in zip(share, top, strict=True))
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(theirs(oracle, "QMoE", inputs, **attributes)[0], want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("kind", "fusion"), [("swiglu", 1), ("swiglu", 2), ("silu", 0), ("gelu", 0), ("relu", 0)])
def test_gradients_of_experts_with_few_bits(kind: str, fusion: int) -> None:
    inputs, attributes = moe(kind=kind, fusion=fusion)
    check_gradients("QMoE", inputs, [0, 1, 3, 6], step=2e-3, rtol=2e-2, **attributes)


def test_the_lowered_experts(oracle: Oracle) -> None:
    inputs, attributes = moe(activation_alpha=1.702, activation_beta=1.0, swiglu_limit=1.5)
    made = lowered("QMoE", inputs, constants=(2, 5), **attributes)
    assert "DequantizeLinear" in {n.op_type for n in made.graph.node}
    (want,) = ours("QMoE", inputs, **attributes)
    for found in (singa_backend.prepare(made).run(feeds(inputs, (2, 5))), there(oracle, made, feeds(inputs, (2, 5)))):
        np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"quant_type": "fp8"}, "quant_type 'fp8'"),
        ({"weights_prepacked": 1}, "weights_prepacked"),
        ({"activation_type": "tanh", "swiglu_fusion": 0}, "activation_type must be one of"),
        ({"activation_type": "relu"}, "swiglu_fusion must be 0"),
        ({"swiglu_fusion": 0}, "needs the weights of fc3"),
        ({"k": 4}, "0 < k <= 3"),
        ({"block_size": 32}, "block_size must divide 16"),
    ],
)
def test_experts_that_are_refused(change: dict[str, Any], what: str) -> None:
    inputs, attributes = moe()
    if change == {"swiglu_fusion": 0}:
        inputs[5] = np.zeros((3, 16, 8), np.uint8)
    with pytest.raises(OperatorError, match=what):
        ours("QMoE", inputs, **attributes | change)


def test_weights_of_few_bits_have_no_gradient() -> None:
    inputs, attributes, _ = nbits(bias=False)
    y = ours("MatMulNBits", inputs, **attributes)[0]
    found = gradients("MatMulNBits", inputs, [np.ones_like(y)], [0, 3], **attributes)
    assert found[0] is not None and found[1] is None
