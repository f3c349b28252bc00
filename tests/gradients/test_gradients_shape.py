"""Gradients of operators on shapes, indices, padding, sequences and signals, against values known by hand and differences."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from singa_backend import dtypes
from singa_backend.autodiff.replay import apply
from singa_backend.autodiff.support import no_gradient_reason
from singa_backend.autodiff.tape import Tape
from singa_backend.conform.gradients import judge, points
from singa_backend.devices.device import resolve
from singa_backend.interpreters.builder import GraphBuilder
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import declarations
from singa_backend.ir.reader import read
from singa_backend.ir.versioned import VersionedOperator
from singa_backend.opsets.model import to_model
from singa_backend.runtime.executor import Executor


def _value(x):
    """Numbers as an array, floats as float64; a list of arrays is a sequence."""
    if x is None or (isinstance(x, list) and x and isinstance(x[0], np.ndarray)):
        return x
    return np.asarray(x, np.float64 if np.asarray(x).dtype.kind == "f" else None)


def _is_float(x):
    return isinstance(x, list) or (x is not None and x.dtype in (np.float16, np.float32, np.float64))


def _leaf_type(x):
    if isinstance(x, list):
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(dtypes.onnx_code(x[0].dtype), None))
    return helper.make_tensor_type_proto(dtypes.onnx_code(x.dtype), [None] * x.ndim)


def _backward(op, op_type, xs, dy, attributes):
    tape = Tape(op)
    values = [None if x is None else tape.variable(x, _is_float(raw)) for x, raw in xs]
    y = tape.call(op_type, values, attributes, 1)
    return tape.gradients(y, [dy], values)


def gradients(op_type, inputs, dy=None, opset=26, **attributes):
    """The gradients of the inputs, computed at once; those of a graph with unknown sizes must be the same."""
    inputs = [_value(x) for x in inputs]
    op = Eager(opset=opset)
    if dy is None:
        dy = np.ones_like(op.call(op_type, inputs, attributes, 1)[0])
    elif not (isinstance(dy, list) and isinstance(dy[0], np.ndarray)):
        dy = np.asarray(dy, np.float64)
    eager = _backward(op, op_type, [(x, x) for x in inputs], dy, attributes)
    builder = GraphBuilder(opset)
    symbols = [None if x is None else builder.input(f"x{i}", _leaf_type(x)) for i, x in enumerate(inputs)]
    found = _backward(builder, op_type, list(zip(symbols, inputs, strict=True)), builder.input("dy", _leaf_type(dy)), attributes)
    assert [g is None for g in found] == [g is None for g in eager]
    graph = read(to_model(builder, "gradient", [g for g in found if g is not None]))
    made = Executor(graph, resolve("CPU")).run(graph, [*(x for x in inputs if x is not None), dy])
    for a, b in zip([g for g in eager if g is not None], made, strict=True):
        np.testing.assert_equal(len(a), len(b)) if isinstance(a, list) else np.testing.assert_allclose(a, b, rtol=1e-12)
    return eager


def differences(op_type, inputs, dy, k, opset=26, h=1e-5, **attributes):
    """The gradient of the input `k`, by central differences."""
    op, x = Eager(opset=opset), np.asarray(inputs[k], np.float64)
    grad = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        ends = []
        for step in (h, -h):
            moved = x.copy()
            moved[place] += step
            y = op.call(op_type, [moved if i == k else v for i, v in enumerate(inputs)], attributes, 1)[0]
            ends.append((y * dy).sum())
        grad[place] = (ends[0] - ends[1]) / (2 * h)
    return grad


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "dy", "wanted"),
    [
        ("Gather", [[1.0, 2, 3], [0, 0, -1]], {}, [1, 10, 100], [11, 0, 100]),
        ("Gather", [[1.0, 2, 3], np.array(-2)], {}, 5, [0, 5, 0]),
        ("GatherElements", [[[1.0, 2], [3, 4]], [[0, 0], [1, 0]]], {"axis": 1}, [[1, 2], [3, 4]], [[3, 0], [4, 3]]),
        ("GatherND", [[[1.0, 2], [3, 4]], [[1], [1]]], {"batch_dims": 1}, [1, 2], [[0, 1], [0, 2]]),
        ("GatherND", [[[1.0, 2], [3, 4]], [[1, -2], [1, 0]]], {}, [1, 2], [[0, 0], [3, 0]]),
        ("Compress", [[[1.0, 2], [3, 4]], [False, True]], {"axis": 1}, [[5], [6]], [[0, 5], [0, 6]]),
        ("Compress", [[[1.0, 2], [3, 4]], [False, True, True]], {}, [5, 6], [[0, 5], [6, 0]]),
        ("Slice", [[1.0, 2, 3, 4], [-3], [99]], {}, [1, 2, 3], [0, 1, 2, 3]),
        ("Slice", [[1.0, 2, 3, 4], [3], [1]], {}, np.zeros(0), [0, 0, 0, 0]),
        ("Slice", [[1.0, 2, 3, 4], [-9], [-2], [-1]], {}, [1, 2], [1, 2, 0, 0]),
        ("Slice", [[[1.0, 2], [3, 4]], [1, 0], [2, 1]], {}, [[5]], [[0, 0], [5, 0]]),
        ("Slice", [[1.0, 2, 3, 4], [-1], [-9], [0], [-2]], {}, [1, 2], [0, 2, 0, 1]),
        ("Tile", [[[1.0, 2]], [2, 2]], {}, [[1, 2, 3, 4], [5, 6, 7, 8]], [[16, 20]]),
        ("Tile", [[[1.0, 2]], [0, 2]], {}, np.zeros((0, 4)), [[0, 0]]),
        ("Expand", [[[1.0], [2]], [3, 1, 2]], {}, np.ones((3, 2, 2)), [[6], [6]]),
        ("Pad", [[1.0, 2, 3], [2, -1]], {}, [1, 2, 3, 4], [3, 4, 0]),
        ("Pad", [[1.0, 2, 3], [-5, 4]], {}, [1, 2], [0, 0, 0]),
        ("Pad", [[1.0, 2, 3], [1, 2]], {"mode": "edge"}, [1, 2, 3, 4, 5, 6], [3, 3, 15]),
        ("Pad", [[1.0, 2, 3], [1, 2]], {"mode": "reflect"}, [1, 2, 3, 4, 5, 6], [2 + 6, 1 + 3 + 5, 4]),
        ("Pad", [[1.0, 2, 3], [1, 2]], {"mode": "wrap"}, [1, 2, 3, 4, 5, 6], [2 + 5, 3 + 6, 4 + 1]),
        ("Pad", [[[1.0, 2]], [1, 0], None, [-1]], {"mode": "edge"}, [[1, 2, 3]], [[3, 3]]),
        ("CenterCropPad", [[1.0, 2, 3], [2]], {}, [1, 2], [1, 2, 0]),
        ("CenterCropPad", [[[1.0, 2]], [5]], {"axes": [-1]}, [[1, 2, 3, 4, 5]], [[2, 3]]),
        ("Einsum", [[[1.0, 2], [3, 4]]], {"equation": "ii->"}, 3, [[3, 0], [0, 3]]),
        ("Einsum", [[[1.0, 2], [3, 4]]], {"equation": "ii->i"}, [3, 4], [[3, 0], [0, 4]]),
        ("Einsum", [[[1.0, 2], [3, 4]]], {"equation": "ij->j"}, [3, 4], [[3, 4], [3, 4]]),
        ("Einsum", [[[1.0, 2], [3, 4]]], {"equation": "ji"}, [[1, 2], [3, 4]], [[1, 3], [2, 4]]),
        ("Det", [[[1.0, 2], [2, 4]]], {}, 1, [[4, -2], [-2, 1]]),  # singular
        ("Det", [[[7.0]]], {}, 3, [[3]]),
        ("Det", [np.zeros((2, 0, 0))], {}, [1, 1], np.zeros((2, 0, 0))),
        ("Transpose", [np.ones((2, 3))], {}, [[1, 2], [3, 4], [5, 6]], [[1, 3, 5], [2, 4, 6]]),
        ("Squeeze", [np.ones((1, 0, 1))], {}, np.ones(0), np.ones((1, 0, 1))),
        ("Reshape", [np.ones((0, 3)), [3, 0]], {"allowzero": 1}, np.ones((3, 0)), np.ones((0, 3))),
    ],
)  # fmt: skip
def test_the_first_input(op_type, inputs, attributes, dy, wanted):
    np.testing.assert_allclose(gradients(op_type, inputs, dy, **attributes)[0], wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("reduction", "x", "updates", "dx", "dupdates"),
    [
        ("none", [1.0, 2, 3], [5.0, 6, 7], [0, 0, 100], [1, 1, 10]),
        ("add", [1.0, 2, 3], [5.0, 6, 7], [1, 10, 100], [1, 1, 10]),
        ("mul", [1.0, 2, 3], [5.0, 6, 7], [30, 70, 100], [6, 5, 20]),
        ("mul", [1.0, 2, 3], [0.0, 6, 0], [0, 0, 100], [6, 0, 20]),  # the only 0 of a product
        ("mul", [0.0, 0, 3], [5.0, 0, 7], [0, 70, 100], [0, 0, 0]),
        ("max", [9.0, 2, 3], [9.0, 9, 7], [1 / 3, 0, 100], [1 / 3, 1 / 3, 10]),  # those that are equal share
        ("min", [9.0, 2, 3], [9.0, 9, 7], [1 / 3, 10, 100], [1 / 3, 1 / 3, 0]),
    ],
)
def test_scatter(reduction, x, updates, dx, dupdates):
    """Two updates go to the first place, one to the second, none to the third."""
    dy = [1, 10, 100]
    for op_type, indices in (("ScatterElements", np.array([0, 0, 1])), ("ScatterND", np.array([[0], [-3], [1]]))):
        grads = gradients(op_type, [x, indices, updates], dy, reduction=reduction)
        np.testing.assert_allclose(grads[0], dx, rtol=1e-12)
        np.testing.assert_allclose(grads[2], dupdates, rtol=1e-12)


def test_scatter_at_an_empty_index():
    """An index of length 0 selects all of x."""
    grads = gradients("ScatterND", [[1.0, 2], np.zeros((2, 0), np.int64), [[3.0, 4], [5, 6]]], [1, 10], reduction="add")
    np.testing.assert_array_equal(grads[0], [1, 10])
    np.testing.assert_array_equal(grads[2], [[1, 10], [1, 10]])


def test_a_frame_gives_its_constant_the_sum():
    grads = gradients("Pad", [[1.0, 2, 3], [2, -1], 7.0], [1, 2, 4, 8])
    np.testing.assert_array_equal(grads[0], [4, 8, 0])
    np.testing.assert_array_equal(grads[2], 3)


def test_tensor_scatter_overwrites():
    past, update = np.ones((2, 3, 1)), np.ones((2, 2, 1))
    dy = np.arange(6.0).reshape(2, 3, 1)
    grads = gradients("TensorScatter", [past, update, np.array([0, 2])], dy, mode="circular")
    np.testing.assert_array_equal(grads[0][..., 0], [[0, 0, 2], [0, 4, 0]])
    np.testing.assert_array_equal(grads[1][..., 0], [[0, 1], [5, 3]])


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("ij,jk->ik", [(2, 1), (3, 4)]), ("i,j->", [(2,), (3,)]),
        ("...ij,...jk->...ik", [(5, 1, 2, 3), (4, 3, 2)]), ("...ij,...jk->ik", [(5, 1, 2, 3), (4, 3, 2)]),
        ("a...b,b...->...a", [(2, 5, 3), (3, 4, 1)]), ("a...b,b->ab", [(2, 5, 3), (3,)]), ("b,a...b->ab", [(3,), (2, 5, 3)]),
        ("...ii,i->...i", [(2, 3, 3), (3,)]), ("iij,j->", [(3, 3, 2), (2,)]), ("iii->i", [(2, 2, 2)]), (",i->i", [(), (3,)]),
        ("ij,ij,j->i", [(2, 3), (2, 3), (3,)]), ("bhqd,bhkd->bhqk", [(2, 1, 3, 4), (2, 2, 5, 4)]), ("ij,k->i", [(0, 3), (2,)]),
        ("...,...", [(2, 3), (3,)]), ("i...->...", [(2, 3)]), ("i j -> j i", [(2, 3)]),
    ],
)  # fmt: skip
def test_einsum(equation, shapes):
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(s) for s in shapes]
    dy = rng.standard_normal(Eager().Einsum(*xs, equation=equation).shape)
    for k, grad in enumerate(gradients("Einsum", xs, dy, equation=equation)):
        np.testing.assert_allclose(grad, differences("Einsum", xs, dy, k, equation=equation), atol=1e-8)


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("n", [None, 1, 4, 5, 8])
@pytest.mark.parametrize(("parts", "inverse", "onesided"), [(1, 0, 0), (2, 0, 0), (1, 0, 1), (1, 1, 0), (2, 1, 0), (2, 1, 1)])
def test_fourier(opset, n, parts, inverse, onesided):
    """Of real and complex values, whole and half, cut and padded with zeros."""
    rng = np.random.default_rng(0)
    x, length = rng.standard_normal((2, 5, 3, parts)), None if n is None else np.array(n)
    at = {"axis": 1} if opset < 20 else {}
    inputs = [x, length] if at else [x, length, np.array(-3)]
    flags = {**at, "inverse": inverse, "onesided": onesided}
    dy = rng.standard_normal(Eager(opset=opset).call("DFT", inputs, flags, 1)[0].shape)
    grad = gradients("DFT", inputs, dy, opset=opset, **flags)[0]
    np.testing.assert_allclose(grad, differences("DFT", inputs, dy, 0, opset=opset, **flags), atol=1e-8)


@pytest.mark.parametrize("name", ["DFT", "STFT"])
def test_signals_at_drawn_points(name):
    """ONNX says that they have no gradient."""
    for version in declarations["", name]:
        drawn = list(points("", name, version, count=10, every=True))
        assert len(drawn) == 10
        for point in drawn:
            assert {f.verdict for f in judge(point)} == {"agree"}


def test_sequences():
    a, b = np.ones((2, 1)), np.full((2, 3), 2.0)
    grads = gradients("SequenceAt", [[a, b], np.array(-1)], 3 * b)
    assert [g.tolist() for g in grads[0]] == [(0 * a).tolist(), (3 * b).tolist()]
    grads = gradients("SequenceAt", [[a], np.array(0)], 3 * a)  # of one tensor
    assert [g.tolist() for g in grads[0]] == [(3 * a).tolist()]
    grads = gradients("SequenceErase", [[a, b], np.array(-2)], [3 * b])
    assert [g.tolist() for g in grads[0]] == [(0 * a).tolist(), (3 * b).tolist()]
    grads = gradients("SequenceErase", [[a, b]], [3 * a])
    assert [g.tolist() for g in grads[0]] == [(3 * a).tolist(), (0 * b).tolist()]
    grads = gradients("SequenceInsert", [[a, b], a, np.array(-1)], [a, 5 * a, b])
    assert [g.tolist() for g in grads[0]] == [a.tolist(), b.tolist()]
    assert grads[1].tolist() == (5 * a).tolist()
    dy = np.arange(8.0).reshape(2, 4)
    grads = gradients("ConcatFromSequence", [[a, b]], dy, axis=-1)
    assert [g.tolist() for g in grads[0]] == [dy[:, :1].tolist(), dy[:, 1:].tolist()]
    grads = gradients("ConcatFromSequence", [[a, 2 * a]], dy[:, :2].reshape(2, 1, 2), axis=-1, new_axis=1)
    assert [g.tolist() for g in grads[0]] == [[[0], [4]], [[1], [5]]]
    grads = gradients("SplitToSequence", [dy], [dy[0], dy[1]], keepdims=0)
    np.testing.assert_array_equal(grads[0], dy)
    grads = gradients("SplitToSequence", [dy, np.array(3)], [dy[:, :3], dy[:, 3:]], axis=-1)
    np.testing.assert_array_equal(grads[0], dy)


@pytest.mark.parametrize(
    ("op_type", "version", "inputs", "attributes", "outputs"),
    [
        ("Reshape", 1, [np.arange(6.0)], {"shape": (2, -1)}, 1),
        ("Flatten", 1, [np.ones((2, 3, 4))], {"axis": 2}, 1),
        ("Squeeze", 1, [np.ones((1, 2, 1))], {}, 1),
        ("Squeeze", 11, [np.ones((1, 2, 1))], {"axes": (-1,)}, 1),
        ("Squeeze", 11, [np.ones((1, 2, 1))], {"axes": ()}, 1),
        ("Unsqueeze", 1, [np.ones(2)], {"axes": (0, 2)}, 1),
        ("Unsqueeze", 11, [np.ones(2)], {"axes": (-1, 0)}, 1),
        ("Concat", 1, [np.ones((2, 1)), np.zeros((2, 2))], {}, 1),
        ("Split", 1, [np.arange(6.0), np.array([1.0, 5])], {}, 2),
        ("Split", 1, [np.arange(6.0)], {"split": (4, 2)}, 2),
        ("Split", 2, [np.arange(6.0)], {}, 3),
        ("Split", 11, [np.ones((2, 6))], {"axis": -1, "split": (4, 2)}, 2),
        ("Split", 13, [np.arange(6.0)], {}, 2),
        ("Split", 13, [np.arange(6.0), np.array([6, 0])], {}, 2),
        ("Tile", 1, [np.ones((2, 3)), np.array(2.0), np.array(1.0)], {}, 1),
        ("Slice", 1, [np.arange(12.0).reshape(3, 4)], {"starts": (1, 0), "ends": (-1, 99)}, 1),
        ("Slice", 1, [np.arange(12.0).reshape(3, 4)], {"starts": (-2,), "ends": (4,), "axes": (1,)}, 1),
        ("Pad", 1, [np.arange(3.0)], {"paddings": (1, 2), "value": 0.1}, 1),
        ("Pad", 2, [np.arange(3.0, dtype=np.float32)], {"pads": (1, -2), "value": 0.1}, 1),
        ("Pad", 2, [np.arange(3.0)], {"pads": (2, 2), "mode": "reflect", "value": 0.1}, 1),
        ("Scatter", 9, [np.arange(3.0), np.array([2]), np.array([9.0])], {}, 1),
        ("Scatter", 11, [np.arange(3.0), np.array([-1]), np.array([9.0])], {"axis": -1}, 1),
        ("Gemm", 1, [np.ones((2, 3)), np.ones((4, 3)), np.arange(4.0)], {"transB": 1, "broadcast": 1, "alpha": 2.0}, 1),
        ("Gemm", 6, [np.ones((2, 3)), np.ones((3, 2)), np.ones((2, 2))], {"beta": 0.5}, 1),
        ("OptionalHasElement", 15, [np.ones(2)], {}, 1),
        ("DFT", 17, [np.arange(12.0).reshape(1, 6, 2, 1)], {"onesided": 1}, 1),
        ("DFT", 17, [np.arange(12.0).reshape(1, 3, 4, 1), np.array(5)], {"axis": 2}, 1),
    ],
)  # fmt: skip
def test_old_versions_are_exact_compositions(op_type, version, inputs, attributes, outputs):
    declaration, op = declarations["", op_type][version], Eager(opset=26)
    attributes = declaration.stored(attributes)  # as a file holds them
    old = VersionedOperator(declaration, version).run(op.xp, inputs, attributes, (True,) * outputs)
    for new in (
        declaration.decompose(op, version, inputs, attributes, outputs),
        apply(op, VersionedOperator(declaration, version), inputs, attributes, outputs),
    ):
        for a, b in zip(old, new, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_a_short_transform_is_its_composition():
    rng = np.random.default_rng(0)
    signal, window = rng.standard_normal((2, 9, 1)), rng.standard_normal(4)
    for op in (Eager(opset=18), Eager()):
        for inputs in ([signal, np.array(2), window], [signal, np.array(3), None, np.array(5)], [signal, np.array(1)]):
            y = op.STFT(*inputs)
            np.testing.assert_allclose(declarations["", "STFT"][17].decompose(op, 17, inputs, {}, 1)[0], y, atol=1e-12)


def test_half_floats():
    """The rules hold constants of the dtype at hand."""
    x = np.ones((2, 2), np.float16)
    op = Eager()
    for op_type, inputs, attributes in (
        ("Pad", [x, np.array([1, 0, 0, 1]), np.float16(2).reshape(())], {}),
        ("Einsum", [x, x], {"equation": "ij,jk->ik"}),
        ("ScatterElements", [x, np.array([[0, 0]]), x[:1]], {"reduction": "mul"}),
        ("ScatterElements", [x, np.array([[0, 0]]), x[:1]], {"reduction": "max"}),
        ("Gemm", [x, x, x[:1]], {"beta": 0.5}),
        ("Slice", [x, np.array([1]), np.array([2])], {}),
    ):
        y = op.call(op_type, inputs, attributes, 1)[0]
        grads = _backward(op, op_type, [(v, v) for v in inputs], np.ones_like(y), attributes)
        assert all(g.dtype == np.float16 and g.shape == v.shape for v, g in zip(inputs, grads, strict=True) if g is not None)


def test_every_declaration_has_a_rule_or_a_reason():
    families = {"shape", "gather", "pad_slice", "blocks", "sequence", "linalg", "signal"}
    for of in declarations.values():
        for version, declaration in of.items():
            if declaration.body.__module__.rpartition(".")[2] in families:
                assert declaration.gradient_rule or declaration.decomposition_rule or no_gradient_reason(declaration, version), (
                    declaration
                )
                assert declaration is of[max(of)] or declaration.decomposition_rule, declaration
