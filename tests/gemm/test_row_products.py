"""Products of a few rows and a matrix that is read where it is: against sums in float64, on memory with an end, at all levels."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.helpers.gemm_frames import OTHERS, Frame, assembly

from singa_backend import SingaBackend
from singa_backend.elementwise.compile import LEVELS, available, target
from singa_backend.gemm.row_products import ROW_PRODUCTS, row_products

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

SHAPES = [(1, 1, 1), (1, 16, 64), (2, 17, 63), (4, 15, 65), (1, 513, 16), (3, 1100, 70), (1, 64, 200), (2, 5, 300)]
"""Rows, the depth, columns."""


def product(ended: Any, adjacent: bool, shape: tuple[int, int, int], gap: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """The results of 2 x 3 products, and what they should be; `gap` elements are between the rows of W."""
    rows, depth, n = shape
    g = np.random.default_rng([rows, depth, n])
    x = g.standard_normal((2, 3, rows, depth)).astype(np.float32)
    wide = g.standard_normal((2, 3, depth, n + gap) if adjacent else (2, 3, n, depth + gap)).astype(np.float32)
    w = wide[..., :n] if adjacent else wide[..., :depth].swapaxes(-1, -2)
    arrays = {"x": x, "w": wide, "y": np.full((2, 3, rows, n), np.nan, np.float32)}
    held = {name: ended(a) for name, a in arrays.items()}
    sizes = {
        "batches": 6, "batch1": 3, "rows": rows, "depth": depth, "n": n, "groups": -(-n // 64),
        "w_step": wide.strides[-2], "x_row": x.strides[-2], "y_row": held["y"].strides[-2],
    }  # fmt: skip
    for name, a in (("x", x), ("w", wide), ("y", held["y"])):
        sizes |= {f"{name}_batch0": a.strides[0], f"{name}_batch1": a.strides[1]}
    assert sizes.keys() == set(ROW_PRODUCTS.numbers)
    Frame(row_products(adjacent), sizes, held, threads)()
    return held["y"], np.matmul(x.astype(np.float64), w)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adjacent", [True, False])
def test_products_in_their_memory(limited: str, ended: Any, adjacent: bool, shape: tuple[int, int, int], gap: int) -> None:
    y, expected = product(ended, adjacent, shape, gap, 1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-7 * shape[1] ** 0.5 * max(float(np.abs(expected).max()), 1))
    np.testing.assert_array_equal(product(ended, adjacent, shape, gap, 2)[0], y)


@pytest.mark.parametrize("adjacent", [True, False])
def test_bits_are_those_of_each_level(limited: str, ended: Any, adjacent: bool) -> None:
    digest = hashlib.sha256(b"".join(product(ended, adjacent, shape, 1, 1)[0].tobytes() for shape in SHAPES)).hexdigest()
    assert digest[:16] == {True: "71bb7e95e4949fe9", False: "0cf8efe16e421324"}[adjacent]


def test_every_level_has_objects() -> None:
    for adjacent in (True, False):
        assert all(target(name).object(row_products(adjacent).text("f")) for name in LEVELS)
        assert not any(word in assembly(row_products(adjacent), name) for name in OTHERS for word in ("memset", "chkstk"))


def model(nodes: list[Any], inputs: dict[str, list[Any]], rank: int) -> Any:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [value("y", TensorProto.FLOAT, [f"y{i}" for i in range(rank)])],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("transposed", [True, False])
def test_few_rows_read_a_matrix_where_it_is(rows: int, transposed: bool) -> None:
    """Heads of keys and of values whose number differs between runs; what follows the product is computed too."""
    node = helper.make_node
    nodes = [node("Transpose", ["b"], ["c"], perm=[0, 1, 3, 2])] if transposed else []
    nodes += [node("MatMul", ["a", "c" if transposed else "b"], ["m"]), node("Add", ["m", "d"], ["y"])]
    shapes = {
        "a": [1, 2, rows, 24 if transposed else "n"], "b": [1, 2, "n", 24], "d": [1, 1, rows, "n" if transposed else 24]
    }  # fmt: skip
    proto = model(nodes, shapes, 4)
    rep, definition = SingaBackend.prepare(proto), SingaBackend.prepare(proto, optimize=0)
    g = np.random.default_rng(rows)
    for n in (7, 70, 8, 300, 7):
        feeds = {k: g.standard_normal([n if d == "n" else d for d in s]).astype(np.float32) for k, s in shapes.items()}
        np.testing.assert_allclose(rep.run(feeds)[0], definition.run(feeds)[0], rtol=1e-4, atol=1e-4)
    kernels = {s.kernel for s in rep.profile(feeds).steps}
    assert ("machine.rows" in kernels) == (rows <= 4) and ("machine.pack" in kernels) == (rows > 4)
