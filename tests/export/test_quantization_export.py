"""Quantization: observers, rounding and gradients by their definitions; what is written is onnxruntime's own, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from singa import autograd, layer, model, opt, quantization, sonnx, tensor
from singa._core import tape
from singa._core.ops import op
from singa.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver, Observer
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput, UnsupportedModel

F = np.float32


def named(array: Any, name: str = "x") -> tensor.Tensor:
    t = tensor.from_numpy(array)
    t.name = name
    return t


def watched(observer: Observer, *batches: Any) -> FakeQuantize:
    made = FakeQuantize(observer)
    tape.training = True
    for b in batches:
        made(tensor.from_numpy(np.asarray(b, F)))
    tape.training = False
    return made


def by_definition(low: Any, high: Any, dtype: Any, symmetric: bool) -> tuple[Any, Any]:
    """Scale and zero point as the docstring of Observer has them, in float64."""
    info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    least, most = int(info.min), int(info.max)
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    if symmetric:
        half = (most - least) // 2
        return np.maximum(-low, high) / half, np.full(np.shape(low), most - half)
    scale = (high - low) / (most - least)
    return scale, np.clip(np.rint(least - low / scale), least, most)


SCHEMES = [(np.int8, True), (np.int8, False), (np.uint8, True), (np.uint8, False)]


def drawn(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    shape = [(7, 4), (2, 4, 3), (3, 4, 2, 5), (1, 4)][seed % 4]
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)
    return (x + (seed % 3 - 1) * np.abs(x).mean()).astype(F)


# --- E19: what is written, against onnxruntime


@pytest.mark.row("E19")
@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES, ids=lambda v: getattr(v, "__name__", f"symmetric={v}"))
@pytest.mark.parametrize(("axis", "opset"), [(None, 10), (1, 13)], ids=["tensor", "channel"])
@pytest.mark.parametrize("kind", [MinMaxObserver, MovingAverageMinMaxObserver])
def test_integers_and_values_are_onnxruntimes(kind: Any, axis: int | None, opset: int, dtype: Any, symmetric: bool,
                                              oracle: Oracle) -> None:  # fmt: skip
    """20 tensors a scheme: scale and zero point by the definition, integers and values equal to the bit, as constants."""
    for seed in range(20):
        observer = kind(dtype, symmetric, axis)
        quantize = watched(observer, drawn(seed))
        x = named(drawn(seed) * F(1.25))  # a part of it lies outside what was seen
        scale, zero = observer.scale_and_zero_point()
        axes = None if axis is None else tuple(a for a in range(drawn(seed).ndim) if a != axis)
        want_scale, want_zero = by_definition(drawn(seed).min(axes), drawn(seed).max(axes), dtype, symmetric)
        np.testing.assert_allclose(scale, want_scale, rtol=1e-6)
        assert scale.dtype == F and zero.dtype == dtype and (np.abs(zero.astype(int) - want_zero) <= 0).all()
        y = quantize(x)
        proto = sonnx.to_onnx([x], [y], opset=opset)
        assert [n.op_type for n in proto.graph.node] == ["Constant", "QuantizeLinear", "DequantizeLinear"]  # the scale first
        assert len(proto.graph.initializer) == 1 and proto.opset_import[0].version == opset
        integers = onnx.ModelProto.FromString(proto.SerializeToString())
        link = integers.graph.node[1].output[0]
        integers.graph.output.append(
            onnx.helper.make_tensor_value_info(link, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
        )
        found = list(oracle.run(integers.SerializeToString(), {"x": x.data}).values())
        np.testing.assert_array_equal(found[0], y.data)
        ours = op.QuantizeLinear(x, tensor.from_numpy(scale), tensor.from_numpy(zero), axis=1)
        assert found[1].dtype == dtype
        np.testing.assert_array_equal(found[1], ours.data)


@pytest.mark.row("E19")
def test_channels_need_opset_13_and_4_bits_opset_21() -> None:
    x = named(drawn(1))
    for observer, least in ((MinMaxObserver(axis=-2), 13), (MinMaxObserver(ml_dtypes.int4), 21), (MinMaxObserver(np.uint16), 21)):
        y = watched(observer, drawn(1))(x)
        with pytest.raises(UnsupportedModel, match=f"the minimum opset is {least}"):
            sonnx.to_onnx([x], [y], opset=least - 1)
        proto = sonnx.to_onnx([x], [y], opset=least)
        np.testing.assert_array_equal(sonnx.prepare(proto).run([x.data])[0], y.data)
    assert len(np.unique(y.data)) > 16  # 16 bits


class Net(model.Model):
    """A convolution whose filters and inputs are quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(4, 3, padding=1)
        self.act = FakeQuantize(MovingAverageMinMaxObserver(np.uint8, momentum=0.5))
        self.filters = FakeQuantize(MinMaxObserver(symmetric=True, axis=0))
        self.flat = layer.Flatten()
        self.fc = layer.Linear(3)
        self.optimizer = opt.SGD(lr=0.05)

    def forward(self, x: Any) -> Any:
        if not self.conv._initialized:
            self.conv(x)
        y = op.Conv(self.act(x), self.filters(self.conv.W), self.conv.b, pads=[1, 1, 1, 1])
        return self.fc(self.flat(autograd.relu(y)))

    def train_one_batch(self, x: Any, t: Any) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, t)
        self.optimizer(loss)
        return out, loss


def trained(use_graph: bool, steps: int = 6) -> tuple[Net, tensor.Tensor, list[float]]:
    rng = np.random.default_rng(3)
    xs = rng.standard_normal((steps, 4, 2, 6, 6)).astype(F)
    x, t = named(xs[0]), tensor.from_numpy(np.array([0, 1, 2, 1], np.int32))
    net = Net()
    net.compile([x], is_train=True, use_graph=use_graph)
    seeded = np.random.default_rng(5)
    for p in net.get_params().values():
        p.copy_from_numpy((seeded.standard_normal(p.shape) * 0.3).astype(F))
    losses = []
    for batch in xs:
        x.copy_from_numpy(batch)
        losses.append(float(net(x, t)[1]))
    return net, x, losses


@pytest.mark.row("E19")
def test_training_on_the_tape_and_as_a_graph_and_both_forms_of_export(oracle: Oracle) -> None:
    net, x, losses = trained(use_graph=False)
    same, _, graph_losses = trained(use_graph=True)
    np.testing.assert_allclose(losses, graph_losses, rtol=1e-5)
    for name, state in net.get_states().items():
        np.testing.assert_allclose(state.data, same.get_states()[name].data, rtol=1e-4, atol=1e-6, err_msg=name)
    net.eval()
    y = net.forward(x)
    inferring = sonnx.export(net, [x], opset=13)
    kinds = [n.op_type for n in inferring.graph.node]
    assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == 2 and "ReduceMin" not in kinds
    assert not any("observer" in t.name for t in inferring.graph.initializer)
    found = next(iter(oracle.run(inferring.SerializeToString(), {"x": x.data}).values()))
    np.testing.assert_allclose(found, y.data, rtol=1e-4, atol=1e-5)

    learning = sonnx.export(net, [x], opset=13, training=True)
    assert {"act.observer.low", "act.observer.high"} <= {t.name for t in learning.graph.initializer}
    low, high = (s.data.copy() for s in (net.act.observer.low, net.act.observer.high))
    found = next(iter(oracle.run(learning.SerializeToString(), {"x": x.data}).values()))
    net.train(True)
    tape.training = True
    np.testing.assert_allclose(found, net.forward(x).data, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(low, net.act.observer.low.data) or not np.array_equal(high, net.act.observer.high.data)


# --- observers


def test_min_max_keeps_the_extremes_and_passes_over_what_is_no_number() -> None:
    seen = watched(MinMaxObserver(), [1.0, 3.0], [-2.0, np.nan], [np.inf, -np.inf, 0.5]).observer
    assert seen.low.data == -2 and seen.high.data == 3 and seen.seen.data == 1


def test_a_moving_average_begins_with_the_first_batch() -> None:
    seen = watched(MovingAverageMinMaxObserver(momentum=0.75), [-4.0, 8.0], [-8.0, 4.0]).observer
    assert seen.low.data == -5 and seen.high.data == 7


def test_zero_has_an_integer_of_its_own() -> None:
    for batch in ([3.0, 5.0], [-7.0, -5.0], [0.0, 0.0], []):
        for dtype, symmetric in SCHEMES:
            y = watched(MinMaxObserver(dtype, symmetric), batch)(tensor.from_numpy(np.array([0.0, *batch], F)))
            assert y.data[0] == 0 and np.isfinite(y.data).all()


def test_extremes_of_float32_have_a_scale() -> None:
    big = np.array([-3e38, 3e38], F)
    np.testing.assert_allclose(watched(MinMaxObserver(), big)(tensor.from_numpy(big)).data, big, rtol=1e-2)


def test_a_range_that_is_frozen_stays() -> None:
    quantize = watched(MinMaxObserver(), [-1.0, 1.0])
    quantize.observing = False
    tape.training = True
    quantize(tensor.from_numpy(np.array([-9.0, 9.0], F)))
    assert quantize.observer.low.data == -1 and quantize.observer.high.data == 1


def test_states_are_those_of_the_model() -> None:
    net, _, _ = trained(use_graph=False, steps=1)
    assert {"act.observer.low", "act.observer.high", "filters.observer.low"} <= set(net.get_states())
    assert net.get_states()["filters.observer.low"].shape == (4,)
    assert not any("observer" in n for n in net.get_params())


def test_halves_and_doubles_come_back_as_they_are() -> None:
    quantize = watched(MinMaxObserver(), [-1.0, 1.0])
    for dtype in (np.float16, np.float64):
        y = quantize(tensor.from_numpy(np.linspace(-2, 2, 9).astype(dtype)))
        assert y.data.dtype == dtype
        np.testing.assert_allclose(y.data, np.clip(np.linspace(-2, 2, 9), -1, 1), atol=0.01)


def test_what_is_refused() -> None:
    x = tensor.from_numpy(np.ones((2, 3), F))
    untouched = FakeQuantize()(x)
    np.testing.assert_array_equal(untouched.data, x.data)
    with pytest.raises(InvalidInput, match="has not observed any values"):
        sonnx.to_onnx([x], [untouched])
    with pytest.raises(InvalidInput, match=r"must be one of .*, got float"):
        MinMaxObserver(np.float32)
    with pytest.raises(InvalidInput, match=r"axis of an observer must be in the shape .*, got 2"):
        watched(MinMaxObserver(axis=2), np.ones((2, 3)))
    with pytest.raises(InvalidInput, match="must have 3 channels, got 4"):
        watched(MinMaxObserver(axis=1), np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(InvalidInput, match="momentum of an observer must be in"):
        MovingAverageMinMaxObserver(momentum=1.0)


# --- gradients


@pytest.mark.parametrize("axis", [None, 1])
def test_gradients_pass_inside_and_stop_outside(axis: int | None) -> None:
    """As if nothing had been rounded: 1 where the rounded integer lies within the bounds, 0 where it was saturated."""
    quantize = watched(MinMaxObserver(symmetric=True, axis=axis), [[-1.27, 0.0], [0.0, 1.27]])
    quantize.observing = False
    values = np.array([[-1.28, -0.3], [1.2749, 0.004], [1.2801, -1.2851], [-1.29, np.nan], [np.inf, -np.inf]], F)
    w = tensor.Tensor(data=values, stores_grad=True, name="w")
    tape.training = True
    y = quantize(w)
    weights = np.arange(1, 11, dtype=F).reshape(5, 2)
    loss = op.Reshape(op.ReduceSum(op.Mul(op.Where(op.IsNaN(w), 0, y), tensor.from_numpy(weights))), [1])
    ((_, g),) = autograd.backward(loss)
    inside = np.array([[1, 1], [1, 1], [0, 0], [0, 0], [0, 0]], F)
    np.testing.assert_array_equal(g.data, inside * weights)
    tape.training = False
    np.testing.assert_array_equal(y.data, quantize(w).data)  # the same values as in inference


def test_the_function_takes_scales_as_they_are() -> None:
    scale, zero = tensor.from_numpy(np.array([0.5, 0.25], F)), tensor.from_numpy(np.array([0, 3], np.int8))
    x = np.array([[0.3, 0.3], [-70.0, 40.0]], F)
    y = quantization.fake_quantize(tensor.from_numpy(x), scale, zero, axis=-1)
    np.testing.assert_array_equal(y.data, np.array([[0.5, 0.25], [-64.0, 31.0]], F))
