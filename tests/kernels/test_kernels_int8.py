"""Int8 kernels against their definitions, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers import plan_checks
from tests.helpers.plan_checks import model_of

from singa_backend import SingaBackend
from singa_backend.elementwise.compile import VARIABLE, available
from singa_backend.kernels import onednn
from singa_backend.kernels.quantized import exact_int8
from singa_backend.kernels.table import Options

check = partial(plan_checks.check, options=Options(threads=1))
pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
node = helper.make_node
exact = exact_int8()

U8, S8 = np.uint8, np.int8
TIE = (np.float32(0.1), np.float32(0.2), np.float32(0.04))
"""Scales whose quotient x * w / y is almost 1/2: every other sum is a near tie."""


def drawn(seed: int, dtype: Any, shape: Any) -> np.ndarray:
    """Full-range integers."""
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max + 1, size=shape).astype(dtype)


def used_int8(kernels: list[str]) -> None:
    """Require products of integers, if this processor has exact ones."""
    assert not exact or any("vnni" in k or "amx" in k for k in kernels), kernels
    assert not exact or "definition" not in kernels, kernels


def spread(shape: Any, fan: int, channels: int | None, tie: bool) -> tuple[Any, Any, Any]:
    """Scales of x, w and y so that the result uses its range; with ties for small sums."""
    if tie:
        s = TIE
        return s[0], (s[1] if channels is None else np.full(channels, s[1], np.float32)), s[2]
    w = np.float32(1e-3) if channels is None else np.random.default_rng(5).uniform(0.5e-3, 2e-3, channels).astype(np.float32)
    return np.float32(0.1), w, np.float32(0.1 * 1e-3 * 70 * 128 * np.sqrt(fan) / 60)


CONVS = [
    ((2, 5, 9, 8), (7, 5, 3, 3), {}),
    ((1, 16, 7, 7), (32, 16, 1, 1), {}),
    ((1, 3, 17, 17), (8, 3, 7, 7), {"pads": [3, 3, 3, 3], "strides": [2, 2]}),
    ((1, 8, 12, 10), (8, 8, 3, 3), {"pads": [1, 0, 2, 1], "dilations": [2, 1]}),
    ((1, 16, 9, 9), (16, 1, 3, 3), {"group": 16, "pads": [1, 1, 1, 1]}),
    ((1, 12, 9, 9), (8, 3, 3, 3), {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((2, 6, 30), (5, 6, 4), {"pads": [2, 1]}),
    ((1, 4, 5, 6, 5), (3, 4, 2, 3, 2), {"pads": [1, 1, 1, 0, 0, 0]}),
]


@pytest.mark.parametrize("types", [(U8, S8, U8), (S8, S8, S8), (U8, U8, U8)])
@pytest.mark.parametrize(("x", "w", "attributes"), CONVS)
@pytest.mark.parametrize("how", ["plain", "channels", "tie", "bias tie"])
def test_qlinear_conv(x: Any, w: Any, attributes: Any, types: Any, how: str) -> None:
    kinds = dict(zip("xwy", types, strict=True))
    outputs, fan = w[0], int(np.prod(w[1:]))
    sx, sw, sy = spread(x, fan, outputs if how in ("channels", "bias tie") else None, "tie" in how)
    weights = drawn(1, kinds["w"], w)
    if kinds["w"] is U8 and how != "tie":
        wz = np.full(np.shape(sw), 128, U8)
    else:
        wz = np.zeros(np.shape(sw), kinds["w"])
        weights = weights // 2 if kinds["w"] is U8 else weights
    if "tie" in how:
        weights = np.where(drawn(2, U8, w) < 250, wz.reshape(-1)[0], weights)
    offsets = {U8: (7, 121), S8: (-128, -5)}
    xz, yz = (np.array(offsets[kinds[k]][i if how != "plain" else 1 - i], kinds[k]) for i, k in enumerate("xy"))
    constants = {"sx": sx, "xz": xz, "w": weights.astype(kinds["w"]), "sw": sw, "wz": wz, "sy": sy, "yz": yz}
    inputs = ["x", "sx", "xz", "w", "sw", "wz", "sy", "yz"]
    if "bias" in how or how == "channels":
        constants["b"] = np.random.default_rng(3).integers(-9999, 9999, outputs).astype(np.int32)
        inputs.append("b")
    model = model_of([node("QLinearConv", inputs, ["y"], **attributes)], {"x": drawn(0, types[0], x)}, ["y"], constants)
    used_int8(check(model, [{"x": drawn(s, types[0], x)} for s in (4, 5)]))


def test_the_bias_is_added_before_float32_loses_bits() -> None:
    """Large biases: the definition adds integers; a kernel that cannot do it exactly declines."""
    x = drawn(0, U8, (1, 64, 5, 5))
    for large in (2**24 - 1, 2**24 + 1, 2**31 - 1):
        constants = {
            "sx": np.float32(1), "xz": np.uint8(0), "w": drawn(1, S8, (4, 64, 1, 1)), "sw": np.float32(1),
            "wz": np.int8(0), "sy": np.float32(large / 100), "yz": np.uint8(3), "b": np.full(4, large, np.int32),
        }  # fmt: skip
        nodes = [node("QLinearConv", ["x", "sx", "xz", "w", "sw", "wz", "sy", "yz", "b"], ["y"])]
        check(model_of(nodes, {"x": x}, ["y"], constants), [{"x": x}])


@pytest.mark.parametrize("types", [(U8, S8), (S8, S8), (U8, U8), (S8, U8)])
@pytest.mark.parametrize("zeros", [(0, 0), (3, 0), (100, 7)])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("a", "b"), [((33, 70), (70, 40)), ((2, 3, 17, 64), (64, 33)), ((2, 3, 17, 64), (2, 3, 64, 40)), ((1, 600), (600, 20))]
)
def test_matmul_integer(a: Any, b: Any, types: Any, zeros: Any, constant: bool) -> None:
    feeds = [{"a": drawn(s, types[0], a), "b": drawn(s + 1, types[1], b)} for s in (0, 2)]
    constants: dict[str, Any] = {"az": np.array(zeros[0], types[0]), "bz": np.array(zeros[1], types[1])}
    if constant:
        constants["b"] = feeds[0]["b"]
        feeds = [{"a": f["a"]} for f in feeds]
    kernels = check(model_of([node("MatMulInteger", ["a", "b", "az", "bz"], ["y"])], feeds[0], ["y"], constants), feeds)
    used_int8(kernels)


@pytest.mark.parametrize("least", [-128, -127, -65, -64])
@pytest.mark.parametrize(("rows", "k"), [(2, 70), (33, 510), (33, 520), (1, 3072)])
def test_sums_of_pairs_that_exceed_16_bits(rows: int, k: int, least: int) -> None:
    """The extremes, of which float32 holds the sums or those of two parts."""
    g = np.random.default_rng(0)
    a = np.where(g.random((rows, k)) < 0.7, 255, drawn(0, U8, (rows, k))).astype(U8)
    w = g.choice(np.array([least, least, -1, 0, 1, min(-least, 127)], S8), (k, 40))
    w[:, 0], w[:, 1] = least, min(-least, 127)
    model = model_of([node("MatMulInteger", ["a", "w", "z"], ["y"])], {"a": a}, ["y"], {"w": w, "z": np.uint8(3)})
    (y,) = SingaBackend.prepare(model).run([a])
    np.testing.assert_array_equal(y, (a.astype(int) - 3) @ w.astype(int))
    kernels = check(model, [{"a": a}, {"a": a[:, ::-1].copy()}])
    used_int8(kernels)


@pytest.mark.parametrize("types", [(U8, S8, U8), (S8, S8, S8), (U8, U8, S8)])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("a", "b"), [((2, 17, 64), (64, 33)), ((2, 3, 17, 64), (2, 3, 64, 40))])
def test_qlinear_matmul(a: Any, b: Any, types: Any, tie: bool, channels: bool) -> None:
    columns = b[-1] if channels and len(b) == 2 else None
    sa, sb, sy = spread(a, a[-1], columns, tie)
    feeds = [{"a": drawn(s, types[0], a)} for s in (0, 2)]
    right = [drawn(s + 1, types[1], b) for s in (0, 2)]
    if tie:
        right = [np.where(r % 16, 0, r % 3).astype(types[1]) for r in right]
    constants: dict[str, Any] = {
        "sa": sa, "za": np.array(9, types[0]), "sb": sb, "zb": np.full(np.shape(sb), 0 if tie else 5, types[1]), "sy": sy,
        "yz": np.array(3, types[2]),
    }  # fmt: skip
    if len(b) == 2:
        constants["b"] = right[0]
    else:
        for f, r in zip(feeds, right, strict=True):
            f["b"] = r
    nodes = [node("QLinearMatMul", ["a", "sa", "za", "b", "sb", "zb", "sy", "yz"], ["y"])]
    used_int8(check(model_of(nodes, feeds[0], ["y"], constants), feeds))


@pytest.mark.parametrize("shape", [(1, 8, 2), (3, 8, 5)])
def test_qlinear_matmul_of_a_transposed_matrix(shape: tuple[int, int, int]) -> None:
    """Of one matrix, too, whose rows are innermost in memory."""
    feeds = [{"x": drawn(s, U8, shape)} for s in (1, 2)]
    held = {"w": drawn(3, S8, (8, 16)), "s": np.float32(0.01), "z": U8(128), "t": np.float32(1), "o": S8(0)}
    names = ["a", "s", "z", "w", "s", "o", "t", "z"]
    check(
        model_of([node("Transpose", ["x"], ["a"], perm=[0, 2, 1]), node("QLinearMatMul", names, ["y"])], feeds[0], ["y"], held),
        feeds,
    )


@pytest.mark.parametrize("types", [(U8, S8), (S8, S8)])
@pytest.mark.parametrize(("x", "w", "attributes"), CONVS)
def test_conv_integer(x: Any, w: Any, attributes: Any, types: Any) -> None:
    constants = {"w": drawn(1, types[1], w), "xz": np.array(3, types[0]), "wz": np.array(0, types[1])}
    nodes = [node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], **attributes)]
    feeds = [{"x": drawn(s, types[0], x)} for s in (4, 5)]
    used_int8(check(model_of(nodes, feeds[0], ["y"], constants), feeds))


@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("perm", [None, (0, 2, 1)])
@pytest.mark.parametrize("how", ["one", "zero", "axis", "zero axis", "run"])
def test_quantize_and_dequantize(dtype: Any, perm: Any, how: str) -> None:
    rng = np.random.default_rng(0)
    feeds = [
        {"x": np.concatenate([rng.normal(0, 9, (3, 30, 39)), np.arange(90).reshape(3, 30, 1) / 20], 2).astype(np.float32)}
        for _ in (0, 1)
    ]
    channels = 30 if perm is None else 40
    scales = np.float32(0.1) if "axis" not in how else rng.uniform(0.05, 0.2, channels).astype(np.float32)
    zeros = np.full(np.shape(scales), 5 if "zero" in how else 0, dtype)
    if how == "zero axis":
        zeros = rng.integers(0, 100, channels).astype(dtype)
    nodes = [node("Transpose", ["x"], ["t"], perm=perm)] if perm else [node("Identity", ["x"], ["t"])]
    nodes += [
        node("QuantizeLinear", ["t", "s", "z"], ["q"]),
        node("Neg", ["u"], ["n"]),
        node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    constants = {"s": scales, "z": zeros, "u": np.float32(1)}
    if how == "run":
        for f in feeds:
            f |= {"s": np.float32(0.3), "z": np.array(7, dtype)}
        constants = {"u": np.float32(1)}
    for f in feeds:
        f["x"][0, 0, :4] = (0.05, 0.15, 0.25, 1e30)
    kernels = check(model_of(nodes, feeds[0], ["q", "y"], constants, 21), feeds, tolerance=0)
    assert any(k.startswith("quantize jit") for k in kernels)
    assert how == "zero axis" or any(k.startswith("dequantize jit") for k in kernels)


@pytest.mark.parametrize("shape", [(5,), (5, 6), (2, 4, 1), (3, 16, 1, 1), (1, 4, 1), (2, 1, 5), (4, 3, 1, 2), (2, 3, 4, 1, 1)])
def test_quantize_along_every_axis(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    for axis, size in enumerate(shape):
        feeds = [{"x": rng.normal(0, 9, shape).astype(np.float32)} for _ in (0, 1)]
        held = {"s": rng.uniform(0.05, 0.2, size).astype(np.float32), "z": rng.integers(-20, 20, size).astype(S8)}
        nodes = [
            node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=axis - len(shape)),
            node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis),
        ]
        check(model_of(nodes, feeds[0], ["q", "y"], held, 21), feeds, tolerance=0)


def test_nan_and_infinity_are_quantized_as_by_the_definition() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1e38, 0.5, -0.0] * 8, np.float32)
    for dtype in (U8, S8):
        nodes = [node("QuantizeLinear", ["x", "s", "z"], ["y"])]
        model = model_of(nodes, {"x": x}, ["y"], {"s": np.float32(1e-3), "z": np.array(3, dtype)}, 21)
        check(model, [{"x": np.ones_like(x)}, {"x": x}])


@pytest.mark.parametrize(("code", "kernel"), [("off", "quantize jit"), ("wait", "machine.dynamicquantizelinear")])
@pytest.mark.parametrize("kind", ["normal", "zero", "positive", "negative"])
def test_dynamic_quantize_linear(monkeypatch: pytest.MonkeyPatch, kind: str, code: str, kernel: str) -> None:
    monkeypatch.setenv(VARIABLE, code)
    if code == "wait" and available():
        pytest.skip(available())
    rng = np.random.default_rng(1)
    x = {"normal": rng.normal(size=(5, 70)), "zero": np.zeros((5, 70)), "positive": rng.uniform(1, 2, (5, 70))}.get(kind)
    x = (-rng.uniform(1, 2, (5, 70)) if x is None else x).astype(np.float32)
    model = model_of([node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])], {"x": x}, ["y", "s", "z"])
    kernels = check(model, [{"x": x}, {"x": x * 2}, {"x": x[:, ::-1].copy()}], tolerance=0)
    assert any(k.startswith(kernel) for k in kernels)


SAMPLE = """
from tests.kernels import test_kernels_int8 as t
seen = []
t.used_int8 = seen.append
for types in ((t.U8, t.S8, t.U8), (t.S8, t.U8, t.S8)):
    for case in t.CONVS[:5]:
        t.test_qlinear_conv(*case, types, "bias tie")
        t.test_qlinear_conv(*case, types, "channels")
    t.test_matmul_integer((2, 3, 17, 64), (64, 33), types[:2], (100, 7), True)
    t.test_qlinear_matmul((2, 17, 64), (64, 33), types, False, True)
    t.test_qlinear_matmul((2, 17, 1664), (1664, 33), types, False, False)
    t.test_conv_integer(*t.CONVS[1], types)
print(t.exact, sorted({k.split()[0] for one in seen for k in one}))
"""


@pytest.mark.levels
@pytest.mark.parametrize(("limit", "int8"), [("AVX2_VNNI", None), ("AVX512_CORE", False), ("AVX2", False)])
def test_other_instruction_sets(limit: str, int8: bool | None) -> None:
    """Results are equal with every instruction set; those that saturate sums of pairs in 16 bits are not used for integers."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit}
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert not done.returncode, done.stderr
    found, _, kernels = done.stdout.partition(" ")
    assert int8 is None or found == str(int8)
    assert "definition" not in kernels
    assert found == "True" or "exact" in kernels
