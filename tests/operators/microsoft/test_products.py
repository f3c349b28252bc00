"""Products, distances and inverses of com.microsoft: what drawn nodes do not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.microsoft_nodes import check_gradients, ours, theirs

import singa_backend
from singa_backend import OperatorError
from singa_backend.engines.oracle import Oracle

RNG = np.random.default_rng(2)


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def single(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_the_rows_stand_before_the_batch(oracle: Oracle) -> None:
    """transBatchA: A has its rows first, then the axes of the batch; with transA the summed axis stands there."""
    a, b = single(2, 3, 4, 5), single(3, 4, 5, 6)
    expected = np.matmul(np.moveaxis(a, 0, 2), b)
    inputs, given = [a, b], {"transBatchA": 1}
    np.testing.assert_allclose(ours("FusedMatMul", inputs, **given)[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(theirs(oracle, "FusedMatMul", inputs, **given)[0], expected, rtol=1e-5, atol=1e-5)
    turned = np.ascontiguousarray(np.swapaxes(a, 0, 3))
    both = {"transBatchA": 1, "transA": 1}
    np.testing.assert_allclose(ours("FusedMatMul", [turned, b], **both)[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(theirs(oracle, "FusedMatMul", [turned, b], **both)[0], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(OperatorError, match="need 3 axes or more, got 2") as caught:
        ours("FusedMatMul", [single(2, 3), single(3, 2)], transBatchA=1)
    assert caught.value.code == "SX404"


def test_onnxruntime_misreads_a_transposed_matrix_before_a_vector(oracle: Oracle) -> None:
    """Its result is that of the same memory without the transposition: the ledger has it as onnxruntime's."""
    a, b = single(5, 4), single(5)
    np.testing.assert_allclose(ours("FusedMatMul", [a, b], transA=1)[0], a.T @ b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(theirs(oracle, "FusedMatMul", [a, b], transA=1)[0], a.reshape(4, 5) @ b, rtol=1e-5, atol=1e-5)


def test_parameters_of_activations_have_no_defaults(oracle: Oracle) -> None:
    inputs = [single(2, 3), single(3, 2)]
    for given, message in (({"activation": "Selu", "activation_alpha": 1.0}, "Selu needs the attribute activation_gamma"),
                           ({"activation": "Gelu"}, "must be one of Celu, .*, got 'Gelu'")):  # fmt: skip
        with pytest.raises(OperatorError, match=message):
            ours("FusedGemm", inputs, **given)
        with pytest.raises(Exception, match=r"No attribute with name:'gamma'|unknown kernel type"):
            theirs(oracle, "FusedGemm", inputs, **given)
    product = inputs[0] @ inputs[1]
    np.testing.assert_allclose(ours("FusedGemm", inputs)[0], product, rtol=1e-6, atol=1e-6)  # without an activation


def sparse_product(dtype: Any, **attributes: Any) -> np.ndarray:
    """A product with a sparse input, which is fed as a dense array."""
    a = np.array([[1, 0, 2], [0, 0, 3], [4, 0, 0]], dtype)
    b = np.arange(9, dtype=dtype).reshape(3, 3)
    code = helper.np_dtype_to_tensor_dtype(a.dtype)
    node = helper.make_node("SparseToDenseMatMul", ["a", "b"], ["y"], domain="com.microsoft", **attributes)
    infos = [helper.make_sparse_tensor_value_info("a", code, [3, 3]), helper.make_tensor_value_info("b", code, [3, 3])]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", code, None)])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return np.asarray(singa_backend.prepare(made).run([a, b])[0])


def test_a_sparse_factor() -> None:
    """The numbers are those of onnxruntime 1.32; its alpha counts for float32 only."""
    plain = [[12, 15, 18], [18, 21, 24], [0, 4, 8]]
    assert sparse_product(np.float32).tolist() == plain
    assert sparse_product(np.float32, alpha=2.0).tolist() == [[2 * v for v in row] for row in plain]
    for dtype in (np.float64, np.int64, np.uint32):
        assert sparse_product(dtype, alpha=2.0).tolist() == plain
    assert sparse_product(np.float32, transA=1).tolist() == [[24, 29, 34], [0, 0, 0], [9, 14, 19]]
    assert sparse_product(np.float32, transA=1, transB=1).tolist() == [[8, 23, 38], [0, 0, 0], [3, 18, 33]]


def test_distances_of_close_points_are_exact() -> None:
    a = np.array([[1000.0, 1000.0]], np.float32)
    b = a + np.float32([0.25, 0])
    assert ours("CDist", [a, b], metric="euclidean")[0].tolist() == [[0.25]]
    with pytest.raises(OperatorError, match="metric must be euclidean or sqeuclidean, got 'cosine'"):
        ours("CDist", [a, b], metric="cosine")
    with pytest.raises(OperatorError, match="matrices with equal rows"):
        ours("CDist", [a, single(2, 3)])


def test_complex_products() -> None:
    a, b = drawn(3, 2), drawn(4, 3, 2)
    z, w = a[..., 0] + 1j * a[..., 1], b[..., 0] + 1j * b[..., 1]
    for name, expected in (("ComplexMul", z * w), ("ComplexMulConj", z * w.conj())):
        found = ours(name, [a, b])[0]
        np.testing.assert_allclose(found[..., 0] + 1j * found[..., 1], expected, rtol=1e-12)
    with pytest.raises(OperatorError, match="last axis must hold the real and the imaginary part"):
        ours("ComplexMul", [drawn(2, 3), drawn(2, 3)])


def test_inverses() -> None:
    x = drawn(2, 3, 3) + 4 * np.eye(3)
    np.testing.assert_allclose(ours("Inverse", [x])[0] @ x, np.tile(np.eye(3), (2, 1, 1)), atol=1e-12)
    with pytest.raises(OperatorError, match="square matrices"):
        ours("Inverse", [drawn(2, 3)])


@pytest.mark.parametrize(
    ("name", "inputs", "which", "attributes"),
    [("FusedMatMul", [drawn(2, 3, 4), drawn(3, 4, 2)], (0, 1), {"transBatchA": 1, "alpha": 0.5}),
     ("FusedMatMul", [drawn(3, 2), drawn(3)], (0, 1), {"transA": 1}),
     ("TransposeMatMul", [drawn(3, 2), drawn(4, 3)], (0, 1), {"transA": 1, "transB": 1}),
     ("FusedMatMulActivation", [drawn(2, 3), drawn(3, 2)], (0, 1), {"activation": "Tanh"}),
     ("FusedGemm", [drawn(2, 3), drawn(3, 2), drawn(2)], (0, 1, 2), {"activation": "Elu", "activation_alpha": 0.5, "beta": 2.0}),
     ("SparseToDenseMatMul", [drawn(2, 3), drawn(3, 2)], (1,), {}),
     ("CDist", [drawn(2, 3), drawn(4, 3)], (0, 1), {"metric": "euclidean"}),
     ("CDist", [drawn(2, 3), drawn(4, 3)], (0, 1), {}),
     ("Inverse", [drawn(2, 3, 3) + 4 * np.eye(3)], (0,), {}),
     ("ComplexMul", [drawn(3, 2), drawn(2, 3, 2)], (0, 1), {}),
     ("ComplexMulConj", [drawn(3, 2), drawn(2, 3, 2)], (0, 1), {})],
)  # fmt: skip
def test_gradients(name: str, inputs: list[Any], which: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check_gradients(name, inputs, which, **attributes)
