"""Exact products of 8-bit integers by machine code: functions against integers of 64 bits, and operators against definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.helpers.gemm_frames import LIMITS, Frame, assembly
from tests.helpers.plan_checks import kernels_used

from singa_backend import SingaBackend
from singa_backend.elementwise.compile import available, level, target
from singa_backend.gemm.dots import WEIGHT_DOTS
from singa_backend.gemm.integers import DEEP, IntegersKind, integers, widening
from singa_backend.gemm.tiles import HEIGHT
from singa_backend.kernels.integer_products import packed_tiles
from singa_backend.kernels.quantized import exact_int8

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

DRAWS = ["drawn", "extreme"]


def drawn(how: str, dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Integers of all values, or the lowest and the highest only."""
    g, info = np.random.default_rng(seed), np.iinfo(dtype)
    if how == "extreme":
        return g.choice(np.array([info.min, info.max], dtype), shape)
    return g.integers(info.min, info.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("result", ["sums", "uint8", "int8"])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("how", DRAWS)
def test_functions_are_exact_and_stay_in_their_arrays(
    limited: str, ended: Any, how: str, signed: bool, result: str, threads: int
) -> None:
    kind = IntegersKind(limited, signed, result)
    dtype = np.dtype(np.int8 if signed else np.uint8)
    for m, n, k in (1, 1, 1), (2, 17, 33), (3, 31, 16), (7, 70, 301), (HEIGHT + 1, 40, 48):
        x, w, zero = drawn(how, dtype, (m, k)), drawn(how, np.int8, (k, n), 1), np.array([9], dtype)
        depth, columns = -(-k // DEEP) * DEEP, -(-n // 32) * 32
        sizes = {"rows": m, "n": n, "k": k, "depth": depth, "stride": depth * kind.element, "groups": columns // 32, "pitch": n}
        factors = np.linspace(1e-5, 1e-3, n).astype(np.float32)
        arrays = {
            "x": x, "left": np.zeros((m, depth * kind.element), np.uint8), "zero": zero, "shift": np.full(1, 3, np.float32),
            "w": packed_tiles(w[None], depth, columns).array, "sums": np.pad(w.sum(0, dtype=np.int32), (0, columns - n)),
            "factors": np.pad(factors, (0, columns - n)), "y": np.zeros((m, n), np.int32 if result == "sums" else result),
        }  # fmt: skip
        held = {name: ended(a) for name, a in arrays.items()}
        for function in widening(kind), integers(kind):
            Frame(function, {**sizes, "height": min(m, HEIGHT)}, held, threads)()
        exact = (x.astype(np.int64) - 9) @ w.astype(np.int64)
        if result != "sums":
            info = np.iinfo(result)
            exact = np.clip(np.rint(exact.astype(np.float32) * factors) + 3, info.min, info.max)
        np.testing.assert_array_equal(held["y"], exact)


@pytest.mark.levels
@pytest.mark.parametrize(
    ("name", "instruction"),
    [("avx2", "vpmaddwd"), ("vnni", "vpdpbusd"), ("aarch64", "saddlp"), ("dotprod", "sdot")],
)
def test_products_are_the_instructions_of_a_processor(name: str, instruction: str) -> None:
    text = assembly(integers(IntegersKind(name, False)), name)
    assert instruction in text and ("zmm" in text) == (name == "vnni")


@pytest.mark.levels
@pytest.mark.parametrize("name", WEIGHT_DOTS)
def test_every_level_has_objects(name: str) -> None:
    """They refer to nothing but themselves."""
    for signed in (False, True):
        for result in ("sums", "uint8"):
            kind = IntegersKind(name, signed, result)
            assert all(target(name).object(f.text("f")) for f in (widening(kind), integers(kind)))


# Operators


def model(nodes: list[Any], x: np.ndarray, constants: dict[str, Any], result: int) -> Any:
    """A model of x with open rows."""
    shape = [f"d{i}" for i in range(x.ndim - 1)] + [x.shape[-1]]
    given = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), shape)
    value = helper.make_tensor_value_info("y", result, None)
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "g", [given], [value], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def check(made: Any, feeds: list[np.ndarray]) -> list[str]:
    """Compare with the definition; return the kernels."""
    rep, definition = SingaBackend.prepare(made, threads=1), SingaBackend.prepare(made, optimize=0)
    for x in feeds:
        np.testing.assert_array_equal(rep.run([x])[0], definition.run([x])[0])
    return kernels_used(rep)


@pytest.mark.parametrize("zero", [0, 5])
@pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8)])
@pytest.mark.parametrize("shape", [(1, 70), (33, 70), (2, 3, 17, 64)])
def test_matmul_integer(inexact: None, limited: str, shape: Any, types: Any, zero: int) -> None:
    feeds = [drawn(how, types[0], shape, seed) for how, seed in (("drawn", 1), ("extreme", 2))]
    w = drawn("drawn", types[1], (shape[-1], 40)) // 2 + (64 if types[1] == np.uint8 else 0)
    constants = {"w": w, "az": np.array(zero, types[0]), "bz": np.array(128 if types[1] == np.uint8 else 0, types[1])}
    made = model([helper.make_node("MatMulInteger", ["x", "w", "az", "bz"], ["y"])], feeds[0], constants, TensorProto.INT32)
    assert check(made, feeds) == ["machine.copy of rows", "machine.product of 8-bit integers"]


@pytest.mark.parametrize("types", [(np.uint8, np.uint8), (np.int8, np.int8), (np.uint8, np.int8)])
@pytest.mark.parametrize("channels", [False, True])
def test_qlinear_matmul(inexact: None, limited: str, channels: bool, types: Any) -> None:
    feeds = [drawn("drawn", types[0], (17, 64), seed) for seed in range(2)]
    scale = np.linspace(1e-3, 3e-3, 33) if channels else np.array(2e-3)
    constants = {
        "sx": np.float32(0.1), "zx": np.array(9, types[0]), "w": drawn("drawn", np.int8, (64, 33)),
        "sw": scale.astype(np.float32), "zw": np.zeros(scale.shape, np.int8), "sy": np.float32(1.7), "zy": np.array(3, types[1]),
    }  # fmt: skip
    node = helper.make_node("QLinearMatMul", ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"], ["y"])
    made = model([node], feeds[0], constants, helper.np_dtype_to_tensor_dtype(np.dtype(types[1])))
    assert check(made, feeds) == ["machine.copy of rows", "machine.product of 8-bit integers"]


def test_a_zero_point_that_is_computed(inexact: None) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["y"]),
        helper.make_node("MatMulInteger", ["q", "v", "z"], ["u"]),
    ]
    g = np.random.default_rng(0)
    feeds = [(factor * g.uniform(-1, 3, (6, 40))).astype(np.float32) for factor in (1, 7)]
    constants = {name: drawn("drawn", np.int8, (40, 33), seed) for seed, name in enumerate("wv")}
    made = model(nodes, feeds[0], constants, TensorProto.INT32)
    made.graph.output.append(helper.make_tensor_value_info("u", TensorProto.INT32, None))
    kernels = check(made, feeds)
    assert kernels.count("machine.copy of rows") == 1 and kernels.count("machine.product of 8-bit integers") == 2


@pytest.mark.parametrize("change", ["weights", "offset", "overflow"])
def test_others_are_declined(inexact: None, change: str) -> None:
    """Weights that are inputs, whose zero point exceeds int8, or whose sums may exceed int32."""
    x = drawn("drawn", np.uint8, (3, 70_000 if change == "overflow" else 70))
    constants = {"w": np.full((x.shape[1], 8), -128, np.int8), "az": np.uint8(0), "bz": np.int8(0)}
    constants["w"][0] = 127
    if change == "offset":
        constants["bz"] = np.int8(100)
    made = model([helper.make_node("MatMulInteger", ["x", "w", "az", "bz"], ["y"])], x, constants, TensorProto.INT32)
    feeds: dict[str, Any] = {"x": x}
    if change == "weights":
        feeds["w"] = constants.pop("w")
        del made.graph.initializer[0]
        made.graph.input.append(helper.make_tensor_value_info("w", TensorProto.INT8, [70, 8]))
    rep, definition = SingaBackend.prepare(made, threads=1), SingaBackend.prepare(made, optimize=0)
    np.testing.assert_array_equal(rep.run(feeds)[0], definition.run(feeds)[0])
    assert not any("product of 8-bit" in k for k in kernels_used(rep))


@pytest.mark.skipif(not exact_int8(), reason="oneDNN has no exact products of 8-bit integers here")
def test_onednn_computes_what_it_computes_exactly() -> None:
    x, w = drawn("drawn", np.uint8, (17, 64)), drawn("drawn", np.int8, (64, 32))
    made = model([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], x, {"w": w}, TensorProto.INT32)
    assert not any("machine" in k for k in check(made, [x]))


def test_every_level_is_limited() -> None:
    assert level() in WEIGHT_DOTS and set(LIMITS) <= set(WEIGHT_DOTS)
