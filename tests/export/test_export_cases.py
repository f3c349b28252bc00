"""Cases of exports that others got wrong: forms by opset, axes, integers below zero, NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from singa import autograd, layer, sonnx, tensor
from singa._core.ops import op
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import UnsupportedModel

F = np.float32


def drawn(*shape: int) -> tensor.Tensor:
    return named(np.random.default_rng(0).standard_normal(shape).astype(F))


def named(array: Any, name: str = "x") -> tensor.Tensor:
    t = tensor.from_numpy(array)
    t.name = name
    return t


def written(xs: Any, y: tensor.Tensor, opset: int | None = None) -> onnx.ModelProto:
    return sonnx.to_onnx(xs if isinstance(xs, list) else [xs], [y], opset=opset)  # type: ignore[no-any-return]


def run(oracle: Oracle, proto: onnx.ModelProto, *xs: tensor.Tensor) -> Any:
    return next(iter(oracle.run(proto.SerializeToString(), {x.name: x.data for x in xs}).values()))


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


@pytest.mark.row("E4")
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 6.0)])
def test_clip_by_attributes_and_by_inputs(low: float, high: float, oracle: Oracle) -> None:
    x = drawn(3, 4)
    y = autograd.clip(op.Mul(x, 9.0), low, high)
    for opset in (10, 11, 18):
        proto = written(x, y, opset)
        node = proto.graph.node[-1]
        assert node.op_type == "Clip" and (len(node.input), attributes(node)) == (
            (1, {"min": low, "max": high}) if opset == 10 else (3, {}))  # fmt: skip
        assert all(node.input)
        np.testing.assert_array_equal(run(oracle, proto, x), np.clip(x.data * F(9), F(low), F(high)))


@pytest.mark.row("E4")
@pytest.mark.parametrize(("axes", "shape"), [((0, -1), (120,)), ((1, 2), (2, 12, 5)), ((0, 2), (24, 5)), ((-1, 3), (2, 3, 4, 5))])
def test_a_range_of_axes_becomes_one(axes: tuple[int, int], shape: tuple[int, ...], oracle: Oracle) -> None:
    x = drawn(2, 3, 4, 5)
    y = autograd.flatten(x, *axes)
    for opset in (7, 18):
        proto = written(x, y, opset)
        assert [n.op_type for n in proto.graph.node] == ["Reshape"]
        np.testing.assert_array_equal(run(oracle, proto, x), x.data.reshape(shape))


@pytest.mark.row("E4")
def test_axes_are_inputs_from_opset_13_on(oracle: Oracle) -> None:
    """An axis of size 1 that is not named stays."""
    x = drawn(1, 2, 3, 4)
    total = autograd.reduce_sum(x, [1], keepdims=1)
    y = drawn(1, 1, 3)
    squeezed = autograd.squeeze(y, [0])
    for opset in (11, 13):
        for t, made, want in ((x, total, x.data.sum(1, keepdims=True)), (y, squeezed, y.data[0])):
            proto = written(t, made, opset)
            node = proto.graph.node[-1]
            assert len(node.input) == (2 if opset == 13 else 1) and ("axes" in attributes(node)) == (opset == 11)
            found = run(oracle, proto, t)
            assert found.shape == want.shape
            np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.row("E4", "E5")
def test_what_came_later_is_composed_or_names_the_least_opset_or_raises_it(oracle: Oracle) -> None:
    """A range of numbers has been one operator since opset 11, and is composed before; there is no such way to round."""
    stop = named(np.array(5, np.int64))
    numbers = op.Range(0, stop, 1)
    for opset in (7, 10, 11, None):
        proto = written(stop, numbers, opset)
        assert proto.opset_import[0].version == (opset or 18)
        assert ("Range" in {n.op_type for n in proto.graph.node}) == (opset is None or opset >= 11)
        assert run(oracle, proto, stop).tolist() == [0, 1, 2, 3, 4]
    x = drawn(3)
    with pytest.raises(UnsupportedModel, match=r"Round.*the minimum opset is 11"):
        written(x, autograd.rounde(x), 10)
    bits = named(np.array([1, 2], np.uint8))
    assert written(bits, op.BitwiseNot(op.BitCast(bits, to=3))).opset_import[0].version == 26


@pytest.mark.row("E9")
def test_the_variance_of_a_sample(oracle: Oracle) -> None:
    """At opsets before and after the reductions changed."""
    x = drawn(2, 3, 4, 5)
    y = autograd.var(x, axes=[1])
    want = x.data.astype(np.float64).var(1, ddof=1, keepdims=True)
    for opset in (7, 10, 12, 13, 17, 18, 26):
        np.testing.assert_allclose(run(oracle, written(x, y, opset), x), want, rtol=2e-6)


@pytest.mark.row("E9")
def test_a_remainder_has_the_sign_of_the_divisor(oracle: Oracle) -> None:
    a, b = named(np.array([-7, 7, -1]), "a"), named(np.array(3), "b")
    for opset in (10, 13, 18):
        assert run(oracle, written([a, b], autograd.floor_mod(a, b), opset), a, b).tolist() == [2, 1, 2]
    a, b = named(np.array([-7.5, 7.5, -1]), "a"), named(np.array(-3.0), "b")
    assert run(oracle, written([a, b], autograd.floor_mod(a, b), 7), a, b).tolist() == [-1.5, -1.5, -1.0]


@pytest.mark.row("E9")
@pytest.mark.parametrize("opset", [7, 9, 11, 12, 18])
def test_nan_is_neither_greater_nor_equal(opset: int, oracle: Oracle) -> None:
    """It is not the contrary of less."""
    values = np.array([np.nan, 0, -1, np.inf, -np.inf, 1e-40], F)
    x, y = named(values, "x"), named(np.array([0, 0, 0, np.inf, np.nan, 0], F), "y")
    for made, want in ((op.GreaterOrEqual(x, y), np.greater_equal), (op.LessOrEqual(x, y), np.less_equal),
                       (op.Equal(x, y), np.equal), (autograd.not_equal(x, y), np.not_equal)):  # fmt: skip
        assert run(oracle, written([x, y], made, opset), x, y).tolist() == want(x.data, y.data).tolist()


@pytest.mark.row("E9")
@pytest.mark.parametrize("opset", [7, 11, 12, 13, 18])
def test_the_place_of_the_greatest_and_the_least(opset: int, oracle: Oracle) -> None:
    """The first of several, or the last from opset 12 on."""
    x = named(np.array([[1, 5, 5], [-2, -2, 7]], F))
    assert run(oracle, written(x, op.ArgMax(x, axis=-1, keepdims=0), opset), x).tolist() == [1, 2]
    assert run(oracle, written(x, op.ArgMin(x, axis=1), opset), x).tolist() == [[0], [0]]
    last = op.ArgMax(x, axis=1, select_last_index=1, keepdims=0)
    if opset >= 12:
        assert run(oracle, written(x, last, opset), x).tolist() == [2, 2]
    else:
        with pytest.raises(UnsupportedModel, match="the minimum opset is 12"):
            written(x, last, opset)


@pytest.mark.row("E9")
@pytest.mark.parametrize("opset", [7, 13, 22, 23])
def test_root_mean_squares_in_onnxs_operators_alone(opset: int, oracle: Oracle) -> None:
    x = drawn(2, 3, 4)
    norm = layer.RMSNorm(axis=-2, epsilon=1e-6)
    norm(x)
    norm.scale.copy_from_numpy(np.arange(1, 13, dtype=F).reshape(3, 4))
    y = norm(x)
    proto = written(x, y, opset)
    assert {o.domain for o in proto.opset_import} == {""} and ("RMSNormalization" in {n.op_type for n in proto.graph.node}) == (
        opset >= 23
    )
    wide = x.data.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean((1, 2), keepdims=True) + 1e-6) * norm.scale.data
    np.testing.assert_allclose(run(oracle, proto, x), want, rtol=2e-6)


@pytest.mark.row("E4")
def test_a_slice_by_attributes(oracle: Oracle) -> None:
    x = drawn(4, 5)
    proto = written(x, autograd.slice(x, [1, -3], [4, 99], [0, 1]), 9)
    (node,) = proto.graph.node
    assert len(node.input) == 1 and attributes(node) == {"starts": [1, -3], "ends": [4, 99], "axes": [0, 1]}
    np.testing.assert_array_equal(run(oracle, proto, x), x.data[1:4, -3:])
    with pytest.raises(UnsupportedModel, match="the minimum opset is 10"):
        written(x, autograd.slice(x, [0], [5], [0], [2]), 9)


@pytest.mark.parametrize("name", ["min", "max"])
def test_the_extremes_broadcast_at_opset_7_too(name: str, oracle: Oracle) -> None:
    """By ones, for zeros and infinities and signs of zero stay what they are."""
    a = named(np.array([[1.0, -np.inf], [np.inf, -0.0]], F), "a")
    b, c = named(np.array([-0.0, 3.0], F), "b"), named(np.array(2.5, F), "c")
    y = getattr(autograd, name)(a, b, c)
    found = run(oracle, written([a, b, c], y, 7), a, b, c)
    np.testing.assert_array_equal(found, y.data)
    nan = named(np.array([np.nan, 1.0], F), "b")
    again = sonnx.prepare(written([a, nan, c], getattr(autograd, name)(a, nan, c), 7)).run([a.data, nan.data, c.data])[0]
    assert np.isnan(again[:, 0]).all() and not np.isnan(again[:, 1]).any()


def test_an_exponent_of_another_type_at_opset_7(oracle: Oracle) -> None:
    x = named(np.array([1.5, -2.0, 0.0]))
    for exponent in (3.0, np.array(2, np.int64)):
        y = op.Pow(x, exponent)
        np.testing.assert_allclose(run(oracle, written(x, y, 7), x), x.data ** float(exponent))
    halves = named(np.array([2, 3], F))
    wide = named(np.array([1 / 3, 0.5]), "e")
    with pytest.raises(UnsupportedModel, match="the minimum opset is 12"):
        written([halves, wide], op.Pow(halves, wide), 11)
