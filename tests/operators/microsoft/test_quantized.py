"""Quantized operators of onnxruntime, beyond drawn nodes: its traps, lowered files, gradients and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.microsoft_nodes import check_gradients, feeds, lowered, model, ours, theirs, there

import singa_backend
from singa_backend import OperatorError
from singa_backend.comparison import tolerances
from singa_backend.conform.fuzz import compare, generate
from singa_backend.engines.oracle import Oracle
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import MICROSOFT

RNG = np.random.default_rng(0)
F = np.float32

LOWERED = [
    "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MatMulBnb4",
    "MatMulFpQ4", "MatMulInteger16", "MatMulIntegerToFloat", "MatMulNBits", "MatMulNBitsMlp", "MatMulNBitsQLoRA",
    "MatMulNBitsQkv", "MulInteger", "NhwcMaxPool", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat",
    "QLinearConv", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid",
    "QLinearSoftmax", "QLinearWhere", "QMoE", "QuantizeLinear", "ReduceSumInteger",
]  # fmt: skip


# --- lowered files


def _fed(case: Any) -> bool:
    """Whether NumPy and onnxruntime share the dtypes of a case, whose outputs are all named."""
    return all(v.dtype.isbuiltin == 1 for v in case.inputs.values()) and all(case.node.output)


@pytest.mark.parametrize("name", LOWERED)
def test_the_lowered_node_is_the_definition_in_onnxruntime(oracle: Oracle, name: str) -> None:
    select, seen = f"^{MICROSOFT}:{name}-", 0
    for index in range(40):
        case = generate.draw(3, index, select)
        if case is None or not _fed(case) or seen == 4:
            continue
        inputs = [case.inputs[n] if n else None for n in case.node.input]
        attributes = {a.name: helper.get_attribute_value(a) for a in case.node.attribute}
        attributes = {n: v.decode() if isinstance(v, bytes) else v for n, v in attributes.items()}
        constants = [i for i, n in enumerate(case.node.input) if n in case.constants]
        names = case.node.output
        want = ours(name, inputs, len(names), constants, **attributes)
        made = lowered(name, inputs, len(names), constants, **attributes)
        assert not [n for n in made.graph.node if n.domain]
        found = there(oracle, made, feeds(inputs, constants))
        rule = tolerances.rule(MICROSOFT, name)
        halves = any(v.dtype == np.float16 for v in case.inputs.values())
        scale = compare.magnitude(list(case.inputs.values()), rule.power)
        says = compare.compare(want, found, rule, scale, 2.0 if halves else 1.0)
        assert not says.why, (index, case.describe(), says.why)
        seen += 1
    assert seen >= 2


# --- products


def test_the_bias_of_qgemm_is_added_before_alpha(oracle: Oracle) -> None:
    """C is in units of both scales: alpha multiplies it too."""
    a, b, c = RNG.integers(0, 9, (3, 4)).astype(np.uint8), RNG.integers(0, 9, (4, 2)).astype(np.uint8), np.int32([70, -30])
    za, zb = np.uint8(3), np.uint8(2)
    inputs = [a, F(0.5), za, b, F([0.25, 0.125]), np.uint8([2, 2]), c]
    (y,) = ours("QGemm", inputs, alpha=2.0)
    want = 2 * ((a.astype(int) - za) @ (b.astype(int) - zb) + c) * 0.5 * F([0.25, 0.125])
    assert y.dtype == F and np.array_equal(y, want)
    assert np.array_equal(theirs(oracle, "QGemm", inputs, alpha=2.0)[0], want)
    check_gradients("QGemm", inputs, [1, 4], alpha=2.0)


def test_products_of_16_bits_wrap(oracle: Oracle) -> None:
    a, b = np.full((1, 3), -32768, np.int16), np.full((3, 1), -32768, np.int16)
    (y,) = ours("MatMulInteger16", [a, b])
    assert y.dtype == np.int32 and y.item() == (3 * 2**30 + 2**31) % 2**32 - 2**31 == theirs(oracle, "MatMulInteger16", [a, b])[0]
    (z,) = ours("MatMulInteger16", [np.full((1, 3), 65535, np.uint16), np.full((3, 1), 65535, np.uint16)])
    assert z.dtype == np.uint32 and z.item() == 3 * 65535**2 % 2**32


def test_gradients_go_to_scales_and_bias() -> None:
    a, b = RNG.integers(0, 255, (2, 3, 4)).astype(np.uint8), RNG.integers(-128, 127, (4, 5)).astype(np.int8)
    scales, bias = RNG.uniform(0.01, 0.02, 5).astype(F), RNG.standard_normal(5).astype(F)
    inputs = [a, b, F(0.02), scales, np.uint8(100), None, bias]
    check_gradients("MatMulIntegerToFloat", inputs, [2, 3, 6], step=1e-3)
    x = RNG.standard_normal((3, 4)).astype(F)
    check_gradients("DynamicQuantizeMatMul", [x, b, scales, None, bias], [2, 4], step=1e-3)
    codes, zeros = RNG.integers(0, 255, (5, 3)).astype(np.uint8), np.arange(5, dtype=np.uint8)
    check_gradients("DequantizeLinear", [codes, scales, zeros], [1], step=1e-3, axis=0)


def lstm(steps: int = 3, batch: int = 2, width: int = 3, size: int = 4) -> tuple[list[Any], dict[str, Any]]:
    w, r = (RNG.integers(-128, 127, (1, n, 4 * size)).astype(np.int8) for n in (width, size))
    parts = [np.float32([0.01]), np.int8([0]), np.float32([0.02]), np.int8([3])]
    b = RNG.standard_normal((1, 8 * size)).astype(F)
    x = RNG.standard_normal((steps, batch, width)).astype(F)
    return [x, w, r, b, None, None, None, None, *parts], {"hidden_size": size}


def quantized(x: np.ndarray) -> np.ndarray:
    """Return x rounded to 256 values that span its range and 0."""
    low, high = min(0, x.min()), max(0, x.max())
    step = F((high - low) / 255) or F(1)
    zero = np.rint(-low / step)
    return (np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step


def test_the_state_of_an_lstm_is_quantized_for_the_whole_batch_at_each_step(oracle: Oracle) -> None:
    """onnxruntime's threads share a batch and quantize each part alone: it agrees where there is one sequence."""
    for batch in (1, 3):
        inputs, attributes = lstm(batch=batch)
        y, last, cell = ours("DynamicQuantizeLSTM", inputs, 3, **attributes)
        x, w, r, b = quantized(inputs[0]), inputs[1][0] * F(0.01), (inputs[2][0].astype(F) - 3) * F(0.02), inputs[3][0]
        h, c = np.zeros((batch, 4), F), np.zeros((batch, 4), F)
        for t in range(3):
            gates = x[t] @ w + quantized(h) @ r + b[:16] + b[16:]
            i, o, f = (1 / (1 + np.exp(-gates[:, k : k + 4])) for k in (0, 4, 8))
            c = f * c + i * np.tanh(gates[:, 12:])
            h = o * np.tanh(c)
            np.testing.assert_allclose(y[t, 0], h, atol=1e-5)
        np.testing.assert_allclose(last[0], h, atol=1e-5)
        np.testing.assert_allclose(cell[0], c, atol=1e-5)
        if batch == 1:
            np.testing.assert_allclose(theirs(oracle, "DynamicQuantizeLSTM", inputs, **attributes)[0], y, atol=1e-5)


def test_steps_after_the_longest_sequence_do_not_count_in_the_range(oracle: Oracle) -> None:
    inputs, attributes = lstm(batch=1)
    inputs[4] = np.int32([2])
    (y,) = ours("DynamicQuantizeLSTM", inputs, **attributes)
    inputs[0][2] = 1000
    assert np.array_equal(ours("DynamicQuantizeLSTM", inputs, **attributes)[0], y)
    np.testing.assert_allclose(theirs(oracle, "DynamicQuantizeLSTM", inputs, **attributes)[0], y, atol=1e-5)


# --- elements, axes, windows


@pytest.mark.parametrize("opset", [12, 13])
def test_the_axes_of_qlinear_softmax_depend_on_its_opset(oracle: Oracle, opset: int) -> None:
    x = RNG.integers(0, 255, (2, 3, 4)).astype(np.uint8)
    inputs, attributes = [x, F(0.02), np.uint8(7), F(1 / 256), np.uint8(0)], {"opset": opset, "axis": 1}
    (y,) = ours("QLinearSoftmax", inputs, **attributes)
    e = np.exp((x - 7.0) * 0.02)
    want = e / e.sum((1, 2) if opset < 13 else 1, keepdims=True) * 256
    assert np.abs(y - want).max() <= 0.51
    assert np.abs(theirs(oracle, "QLinearSoftmax", inputs, **attributes)[0].astype(int) - y).max() <= 1


def test_qlinear_where_rounds_both_sides(oracle: Oracle) -> None:
    x, y = np.int8([[4, -4]]), np.int8([[10], [20]])
    inputs = [np.array([[True, False]]), x, F(0.5), np.int8(0), y, F(0.25), np.int8(2), F(0.5), np.int8(1)]
    (z,) = ours("QLinearWhere", inputs)
    assert z.tolist() == [[5, 5], [5, 10]] == theirs(oracle, "QLinearWhere", inputs)[0].tolist()


def test_absent_zero_points_are_0() -> None:
    a, b = np.int8([1, 2]), np.int8([3, -4])
    assert ours("QLinearAdd", [a, F(1), None, b, F(2), None, F(0.5)])[0].tolist() == [14, -12]
    assert ours("MulInteger", [a, None, b, np.int8(1)])[0].tolist() == [2, -10]


def test_the_sum_of_integers_has_the_sign_of_its_data() -> None:
    for dtype, wide in ((np.uint8, np.uint32), (np.int8, np.int32)):
        (y,) = ours("ReduceSumInteger", [np.full((2, 3), 100, dtype)], axes=[-1], keepdims=0)
        assert y.dtype == wide and y.tolist() == [300, 300]


def test_channels_last() -> None:
    x = RNG.integers(0, 255, (1, 2, 4, 5)).astype(np.uint8)
    last = x.transpose(0, 2, 3, 1)
    rest, form = [F(0.1), np.uint8(3), F(0.2), np.uint8(1)], {"kernel_shape": [2, 3], "strides": [2, 1]}
    for name, at, channels in (("QLinearAveragePool", form, 1), ("QLinearGlobalAveragePool", {}, 1)):
        (want,) = ours(name, [x, *rest], **at)
        (found,) = ours(name, [last, *rest], **at | {"channels_last": channels})
        assert np.array_equal(found.transpose(0, 3, 1, 2), want)
    w = RNG.integers(-9, 9, (3, 2, 2, 2)).astype(np.int8)
    rest = [F(0.1), np.uint8(3), w, F(0.2), np.int8(0), F(0.5), np.uint8(9)]
    (want,) = ours("QLinearConv", [x, *rest])
    assert np.array_equal(ours("QLinearConv", [last, *rest], channels_last=1)[0].transpose(0, 3, 1, 2), want)
    (most,) = ours("NhwcMaxPool", [last], **form)
    assert most.shape == (1, 2, 3, 2) and most[0, 0, 0, 1] == x[0, 1, :2, :3].max()


def test_padding_is_not_negative(oracle: Oracle) -> None:
    """If the kernel is smaller than the stride, SAME_UPPER pads nothing; onnxruntime skips a cell, in MaxPool too."""
    x = np.uint8([10, 20, 30]).reshape(1, 3, 1)
    form = {"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_UPPER"}
    assert ours("NhwcMaxPool", [x], **form)[0].item() == 10
    assert theirs(oracle, "NhwcMaxPool", [x], **form)[0].item() == 20


def test_cells_beyond_the_padding_count(oracle: Oracle) -> None:
    """AveragePool since opset 19 averages the one cell of the last window, 90; this operator divides by the kernel's size."""
    x = np.uint8([10, 20, 30, 90]).reshape(1, 1, 4)
    inputs = [x, F(1), np.uint8(0), F(1), np.uint8(0)]
    form = {"kernel_shape": [3], "strides": [3], "ceil_mode": 1}
    for count, want in ((0, [20, 90]), (1, [20, 30])):
        (y,) = ours("QLinearAveragePool", inputs, **form | {"count_include_pad": count})
        assert y.reshape(-1).tolist() == want
        assert theirs(oracle, "QLinearAveragePool", inputs, **form | {"count_include_pad": count})[0].reshape(-1).tolist() == want
        (z,) = there(oracle, lowered("QLinearAveragePool", inputs, **form | {"count_include_pad": count}), feeds(inputs))
        assert z.reshape(-1).tolist() == want


def plans_and_definitions(name: str, inputs: list[Any], **attributes: Any) -> list[np.ndarray]:
    """The results of the definition, of the plan's first run, and of its next ones."""
    made = model(name, inputs, **attributes)
    runs = [singa_backend.prepare(made, optimize=level) for level in (0, 2)]
    return [rep.run(feeds(inputs))[0] for rep in runs for _ in range(3)]


def test_a_kernel_beyond_the_padded_input_counts_all_its_cells() -> None:
    """ceil_mode is not the only way: SAME or VALID windows of a short axis, and pads of less than the kernel."""
    x = RNG.integers(-99, 99, (1, 3, 2)).astype(np.int8)
    inputs = [x, F(1), np.int8(0), F(1), np.int8(0)]
    for attributes in ({"auto_pad": "VALID"}, {"auto_pad": "SAME_UPPER"}, {"pads": [0, 1]}):
        where = {"kernel_shape": [3], "strides": [2], "count_include_pad": 1, **attributes}
        for result in plans_and_definitions("QLinearAveragePool", inputs, **where):
            assert np.array_equal(result[..., :1], np.rint(x.sum(-1, keepdims=True) / 3)), attributes


def test_a_window_of_padding_alone_is_0() -> None:
    x = np.full((1, 1, 2), 9, np.int8)
    where = {"kernel_shape": [2], "strides": [2], "pads": [2, 0], "count_include_pad": 1}
    for result in plans_and_definitions("QLinearAveragePool", [x, F(1), np.int8(0), F(1), np.int8(5)], **where):
        assert result.tolist() == [[[5, 14]]]


def test_the_mean_of_nothing_is_the_lowest_integer() -> None:
    """The mean of no reals is NaN, which QuantizeLinear rounds to its lowest integer."""
    x, rest = np.zeros((2, 1, 0), np.int8), [F(0.5), np.int8(3), F(0.25), np.int8(-25)]
    for name, attributes in (("QLinearGlobalAveragePool", {}), ("QLinearReduceMean", {"axes": [2], "keepdims": 1})):
        for result in plans_and_definitions(name, [x, *rest], **attributes):
            assert result.tolist() == [[[-128]], [[-128]]], name


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "what"),
    [
        ("QLinearSigmoid", [np.int8([1]), F([1, 2]), None, F(1)], {}, "the scale must hold one value"),
        ("QLinearConcat", [F(1), np.int8(0), np.int8([1]), F(1)], {"axis": 0}, "in turn"),
        ("QLinearGlobalAveragePool", [np.int8([[1]]), F(1), np.int8(0), F(1), np.int8(0)], {}, "spatial axes"),
        ("QGemm", [np.int8([1]), F(1), np.int8(0), np.int8([[1]]), F(1), np.int8(0)], {}, "must be matrices"),
        ("QLinearReduceMean", [np.int8([1]), F(1), None, F(1)], {"axes": [1], "keepdims": 0}, "axis must be in"),
    ],
)
def test_what_is_refused(name: str, inputs: list[Any], attributes: dict[str, Any], what: str) -> None:
    with pytest.raises(OperatorError, match=what):
        ours(name, [None if x is None else np.asarray(x) for x in inputs], **attributes)


def test_every_lowered_operator_is_declared() -> None:
    own = ("few_bits", "few_bits_experts", "few_bits_forms", "quantized", "quantized_products", "quantized_recurrent")
    names = {d[1].name for (domain, _), d in declarations.items()
             if domain == MICROSOFT and d[1].body.__module__.rpartition(".")[2] in own}  # fmt: skip
    assert names - set(LOWERED) == {"MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight"}, "no input is fed as it is"
