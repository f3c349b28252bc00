"""Rows gathered from tables with values of few bits: functions against the definition's formula, and operators against it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.helpers.gemm_frames import Frame
from tests.helpers.plan_checks import kernels_used

from singa_backend import SingaBackend
from singa_backend.dtypes import onnx_code
from singa_backend.elementwise.compile import LEVELS, available, target
from singa_backend.errors import OperatorError
from singa_backend.gemm.few_bits_rows import RowsKind, gathering

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

KERNEL = "machine.rows of few bits"

KINDS = [
    RowsKind(bits, zeros, 1 << bits - 1, "", scale, index)
    for bits in (2, 4, 8) for zeros in (False, True) for scale, index in (("float32", "int64"), ("float16", "int32"))
]  # fmt: skip


def fields(b: np.ndarray, bits: int) -> np.ndarray:
    """The values of bytes along the last axis, lower bits first."""
    return np.stack([b >> s & (1 << bits) - 1 for s in range(0, 8, bits)], -1).reshape(*b.shape[:-1], -1).astype(np.int32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_functions_have_the_bits_of_the_formula(limited: str, ended: Any, kind: RowsKind, threads: int) -> None:
    g = np.random.default_rng(0)
    for outer, size, lines, line, block in (1, 5, 1, 64, 16), (1, 3, 1, 136, 32), (2, 4, 3, 24, 16), (1, 2, 2, 8, 16):
        blocks, index = -(-line // block), np.array([0, -1, size - 1, -size, 1], kind.index)
        table = g.integers(0, 256, (outer, size, lines, line * kind.bits // 8), dtype=np.uint8)
        scales = g.uniform(-1, 1, (outer, size, lines, blocks)).astype(kind.scale)
        zeros = g.integers(0, 256, (outer, size, lines, -(-blocks * kind.bits // 8)), dtype=np.uint8)
        arrays = {
            "index": index, "table": table, "scales": scales, "zeros": zeros, "bad": np.zeros(1, np.int64),
            "y": np.zeros((outer, len(index), lines, line), kind.scale),
        }  # fmt: skip
        held = {name: ended(a) for name, a in arrays.items()}
        sizes = {"rows": outer * len(index), "count": len(index), "size": size, "lines": lines, "line": line, "block": block}
        sizes |= {"pitch": table.shape[-1], "blocks": blocks, "points": zeros.shape[-1]}
        Frame(gathering(kind), sizes, held, threads)()
        middle = fields(zeros, kind.bits)[..., :blocks] if kind.zeros else np.full(scales.shape, kind.zero)
        steps = (fields(table, kind.bits) - middle.repeat(block, -1)[..., :line]).astype(np.float32)
        exact = (steps * scales.astype(np.float32).repeat(block, -1)[..., :line]).astype(kind.scale)
        np.testing.assert_array_equal(held["y"], exact.take(index, 1))
        assert not held["bad"]


@pytest.mark.levels
def test_every_level_has_objects() -> None:
    for name in LEVELS:
        for kind in KINDS:
            assert target(name).object(gathering(kind).text("f"))


# Operators


Table = dict[str, np.ndarray]


def model(given: Table, dtype: Any, **attributes: Any) -> Any:
    """A node of a constant table."""
    names = ["data", "index", "scales", *(["zeros"] if "zeros" in given else [])]
    node = helper.make_node("GatherBlockQuantized", names, ["y"], domain="com.microsoft", **attributes)
    tensors = [
        helper.make_tensor(n, onnx_code(v.dtype), v.shape, v.reshape(-1) if v.itemsize > 1 else v.reshape(-1).astype(int))
        for n, v in given.items()
    ]
    y = helper.make_tensor_value_info("y", onnx_code(given["scales"].dtype), None)
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("index", dtype, None)], [y], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def drawn(shape: tuple[int, ...], dtype: Any, bits: int, block: int, zeros: bool, scale: Any = np.float32) -> Table:
    """A table whose rows have so many bytes, or values of 4 bits, with its scales and zero points."""
    g = np.random.default_rng(0)
    line = shape[-1] * (8 // bits if dtype == np.uint8 else 1)
    grain = (*shape[:-1], -(-line // block))
    points = (*grain[:-1], -(-grain[-1] * bits // 8)) if dtype == np.uint8 else grain
    low, high = {np.dtype(np.uint8): (0, 256), np.dtype(ml_dtypes.int4): (-8, 8)}.get(np.dtype(dtype), (0, 16))
    table, middle = (g.integers(low, high, s).astype(dtype) for s in (shape, points))
    given = {"data": table, "scales": g.uniform(0.5, 2, grain).astype(scale)}
    return given | ({"zeros": middle} if zeros else {})


CASES = [
    ((6, 32), np.uint8, 2, {}), ((6, 32), np.uint8, 4, {}), ((6, 40), np.uint8, 8, {}),
    ((5, 3, 12), np.uint8, 4, {"quantize_axis": 2}),
    ((6, 40), ml_dtypes.int4, 4, {"quantize_axis": -1}), ((6, 40), ml_dtypes.uint4, 4, {}),
    ((2, 5, 3, 24), ml_dtypes.int4, 4, {"gather_axis": 1, "quantize_axis": 3}),
]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [np.float32, np.float16])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "bits", "form"), CASES)
def test_operators_have_the_bits_of_the_definition(
    limited: str, shape: tuple[int, ...], dtype: Any, bits: int, form: dict[str, int], zeros: bool, scale: Any, threads: int
) -> None:
    made = model(drawn(shape, dtype, bits, 16, zeros, scale), TensorProto.INT64, bits=bits, block_size=16, **form)
    rep, definition = SingaBackend.prepare(made, threads=threads), SingaBackend.prepare(made, optimize=0)
    for index in ([[2, -1], [0, 4]], [[1, 1], [-2, 3]]):
        (y,), (want,) = (r.run([np.array(index)]) for r in (rep, definition))
        np.testing.assert_array_equal(y, want)
    assert kernels_used(rep) == [KERNEL]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_index_out_of_range_is_an_error_of_that_run(dtype: Any) -> None:
    made = model(drawn((6, 32), np.uint8, 4, 16, True), onnx_code(np.dtype(dtype)), bits=4, block_size=16)
    rep = SingaBackend.prepare(made, threads=1)
    (first,) = rep.run([np.array([5, 0], dtype)])
    for bad in (6, -7, 2**31 - 1):
        with pytest.raises(OperatorError, match="an index must be in"):
            rep.run([np.array([5, bad], dtype)])
        np.testing.assert_array_equal(rep.run([np.array([5, 0], dtype)])[0], first)
    assert kernels_used(rep) == [KERNEL]


def test_blocks_along_another_axis_are_declined() -> None:
    given = drawn((6, 32, 4), np.uint8, 4, 16, False)
    given["scales"] = np.random.default_rng(1).uniform(0.5, 2, (6, 2, 8)).astype(np.float32)
    made = model(given, TensorProto.INT64, bits=4, block_size=16, quantize_axis=1)
    rep, index = SingaBackend.prepare(made, threads=1), np.array([3, -1])
    np.testing.assert_array_equal(rep.run([index])[0], SingaBackend.prepare(made, optimize=0).run([index])[0])
    assert KERNEL not in kernels_used(rep)
