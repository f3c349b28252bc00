"""Layers: names, legacy arguments, start values, what they compute, statistics, and what goes wrong."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.helpers import other_device

from singa import autograd, layer, opt
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor, to_numpy
from singa._layers.base import Layer
from singa.device import Device, default_device
from singa.model import Model
from singa_backend.errors import InvalidInput, OperatorError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    default_device.SetRandSeed(1)
    tape.training = False
    yield
    tape.training = False


def tensor(*shape: int, dtype: Any = np.float64) -> Tensor:
    return Tensor(data=RNG.normal(size=shape).astype(dtype), requires_grad=False)


def values(made: Any) -> dict[str, Any]:
    return {n: t.data for n, t in made.get_states().items()}


# --- names


class Block(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(2, 3)
        self.bn = layer.BatchNorm2d()

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv1(x))  # type: ignore[no-any-return]


class Net(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(2, 3, padding=1)
        self.block1 = Block()
        self.register_layers(layer.Flatten(), layer.Linear(3))
        self.gain = Tensor(data=np.array([2.0]), stores_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.Linear_1(self.Flatten_0(self.block1(self.conv1(x))))
        return op.Mul(y, op.cast(self.gain, y))  # type: ignore[no-any-return]


PARAMS = ["gain", "conv1.W", "conv1.b", "block1.conv1.W", "block1.conv1.b", "block1.bn.scale", "block1.bn.bias",
          "Linear_1.W", "Linear_1.b"]  # fmt: skip
STATISTICS = ["block1.bn.running_mean", "block1.bn.running_var"]


def net() -> Net:
    made = Net()
    made.compile([tensor(2, 2, 6, 6)])
    return made


def test_names_are_paths() -> None:
    made = net()
    assert list(made.get_params()) == PARAMS
    assert set(made.get_states()) == {*PARAMS, *STATISTICS}
    assert all(t.name == n for n, t in made.get_states().items())
    assert list(made.block1.conv1.get_params()) == ["block1.conv1.W", "block1.conv1.b"]
    assert all(t.stores_grad and t.requires_grad for t in made.get_params().values())
    assert not any(made.get_states()[n].stores_grad or made.get_states()[n].requires_grad for n in STATISTICS)


def test_without_a_parent_names_are_short() -> None:
    made = layer.Linear(3)
    assert made.get_params() == {}
    made(tensor(2, 4))
    assert list(made.get_params()) == ["W", "b"]


def test_an_ordered_dict_names_layers() -> None:
    class Stack(Layer):
        def __init__(self) -> None:
            self.register_layers(OrderedDict(a=layer.Linear(3), b=layer.Linear(2)))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    made = Stack()
    made.forward(tensor(1, 2))
    assert list(made.get_params()) == ["a.W", "a.b", "b.W", "b.b"]


def test_freezing_keeps_parameters_listed() -> None:
    made = net()
    assert made.freeze("block1.*") == [n for n in PARAMS if n.startswith("block1.")]
    assert list(made.get_params()) == PARAMS and not made.block1.conv1.W.stores_grad
    made.unfreeze()
    assert made.block1.conv1.W.stores_grad


def test_a_layer_used_twice_is_listed_once() -> None:
    class Twice(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.a = layer.Linear(3)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    made = Twice()
    made(tensor(2, 3))
    assert list(made.get_params()) == ["a.W", "a.b"]


def test_a_layer_of_another_model_takes_the_new_name() -> None:
    old, new = net(), Block()
    new.body = old.block1
    assert set(new.get_params()) == {n.replace("block1", "body") for n in PARAMS if n.startswith("block1")}
    assert new.body.conv1.W.name == "body.conv1.W"


def test_attributes_can_be_replaced_and_deleted() -> None:
    made = net()
    made.conv1 = layer.Conv2d(2, 1)
    made.block1.bn = None
    del made.gain
    made.conv1(tensor(1, 2, 3, 3))
    assert set(made.get_params()) == {n for n in PARAMS if n != "gain" and ".bn." not in n}


def test_results_are_not_registered() -> None:
    class Keeps(Layer):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            self.seen = op.Mul(x, scale)
            return self.seen

    made = Keeps()
    made(tensor(2), scale=2.0)
    assert made.get_states() == {}


# --- values by name


def test_setting_values() -> None:
    a, b = net(), net()
    a.set_params({"gain": np.array([7])})
    before = b.conv1.W.data
    b.set_states(a.get_states())
    assert b.gain.data.tolist() == [7.0] and b.conv1.W.data is before
    assert all(np.array_equal(v, values(b)[n]) for n, v in values(a).items())
    b.block1.set_params({"conv1.b": np.ones(2)})
    b.block1.set_states({"block1.bn.running_mean": np.ones(2)})
    assert b.block1.conv1.b.data.tolist() == b.block1.bn.running_mean.data.tolist() == [1, 1]


def test_setting_what_is_not_there_changes_nothing() -> None:
    made = net()
    before = {n: v.copy() for n, v in values(made).items()}
    for bad in ({"gain": np.ones(1), "conv10.W": np.ones(1)}, {"gain": np.ones(1), "conv1.W": np.ones(3)},
                {"block1.bn.running_mean": np.ones(2)}):  # fmt: skip
        with pytest.raises(InvalidInput) as caught:
            made.set_params(bad)
        assert caught.value.code == "SX326"
    with pytest.raises(InvalidInput, match="layers create theirs when they first run"):
        Net().set_states({"conv1.W": np.ones(1)})
    assert all(np.array_equal(v, before[n]) for n, v in values(made).items())


# --- start values


@pytest.mark.parametrize("make, shape, std", [
    (lambda: layer.Linear(200), (2, 300), (2 / 500) ** 0.5),
    (lambda: layer.Gemm(200), (2, 300), (2 / 500) ** 0.5),
    (lambda: layer.Embedding(300, 200), (2,), 1.0),
    (lambda: layer.Embedding(300, 200, "uniform"), (2,), 3**-0.5),
    (lambda: layer.Conv2d(100, 3, group=2), (1, 40, 3, 3), (2 / (20 * 9 + 100)) ** 0.5),
    (lambda: layer.CudnnRNN(50), (2, 3, 60), (1 / 50 / 3) ** 0.5),
])  # fmt: skip
def test_start_values(make: Any, shape: tuple[int, ...], std: float) -> None:
    made = make()
    made(Tensor(shape, dtype=np.float64))
    w = values(made)["W"]
    assert abs(w.mean()) < 5 * std / w.size**0.5 and abs(w.std() / std - 1) < 0.03
    assert all(not v.any() for n, v in values(made).items() if n == "b")


def test_start_values_of_recurrent_layers() -> None:
    rnn, lstm = layer.RNN(100, 80), layer.LSTM(100, 80)
    rnn(tensor(2, 3, 100)), lstm(tensor(2, 3, 100))
    assert abs(values(rnn)["Wx"].std() - 1) < 0.05 and abs(values(rnn)["Wh"].std() - 1) < 0.05
    assert set(values(lstm)) == {f"{k}_{g}" for k in ("Wx", "Wh", "Bx", "Bh") for g in "ifog"}
    for name, v in values(lstm).items():
        assert abs(v.std() / 0.01 - 1) < 0.05 if name.startswith("W") else not v.any()


def test_seeds_make_start_values() -> None:
    drawn = []
    for seed in (1, 1, 2):
        default_device.SetRandSeed(seed)
        made = layer.Linear(3)
        made(tensor(1, 4))
        drawn.append(made.W.data)
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_weights_have_the_dtype_of_the_input(dtype: Any) -> None:
    x = tensor(2, 3, 4, 4, dtype=dtype)
    for made in (layer.Linear(2), layer.Conv2d(2, 3), layer.BatchNorm2d(), layer.SeparableConv2d(2, 3)):
        assert made(x).data.dtype == dtype
        assert all(v.dtype == dtype for v in values(made).values())


def test_what_is_assigned_before_the_first_forward_is_kept() -> None:
    """Assigned weights stay; layers create only those that are missing."""
    w, mean = RNG.normal(size=(3, 2, 3, 3)), RNG.normal(size=2)
    made = Net()
    made.conv1 = layer.Conv2d(3, 3, padding=1, bias=False)
    made.conv1.W = Tensor(data=w, stores_grad=True)
    made.block1.bn.running_mean = Tensor(data=mean, requires_grad=False)
    made.forward(tensor(2, 2, 6, 6))
    assert made.get_params()["conv1.W"].data is w and made.get_states()["block1.bn.running_mean"].data is mean
    assert {"block1.bn.scale", "block1.bn.bias"} <= set(made.get_params()) and "conv1.b" not in made.get_params()
    assert np.array_equal(made.block1.bn.running_var.data, np.ones(2))


def test_two_layers_share_a_weight() -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = layer.Linear(4, 4, bias=False), layer.Linear(4, 4, bias=False)
            self.up.W = self.down.W = Tensor(data=RNG.normal(size=(4, 4)), stores_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))  # type: ignore[no-any-return]

    made, x = Tied(), tensor(3, 4)
    w = made.up.W.data
    np.testing.assert_allclose(made.forward(x).data, x.data @ w @ w, rtol=1e-12)
    assert len(made.get_params()) == 1
    made.train()
    pairs = list(autograd.backward(autograd.mse_loss(made.forward(x), tensor(3, 4))))
    assert [p is made.down.W for p, _ in pairs] == [True]
    twin = copy.deepcopy(made)
    assert twin.up.W is twin.down.W and twin.up.W is not w


@pytest.mark.parametrize("make, name, x", [
    (lambda: layer.Linear(3, bias=False), "W", (2, 4)), (lambda: layer.Conv2d(3, 3), "b", (1, 2, 5, 5)),
    (layer.BatchNorm2d, "running_var", (2, 3)),
])  # fmt: skip
def test_an_assigned_weight_of_another_shape_is_refused(make: Any, name: str, x: tuple[int, ...]) -> None:
    made = make()
    setattr(made, name, Tensor(data=np.zeros((7, 1)), stores_grad=True))
    with pytest.raises(InvalidInput, match=rf"{name} must have shape .*, got \(7, 1\)") as found:
        made(tensor(*x))
    assert found.value.code == "SX326"


# --- what they compute


def test_linear() -> None:
    for make in (lambda: layer.Linear(4), lambda: layer.Linear(3, 4), lambda: layer.Linear(3, 4, True)):
        made = make()
        for shape in ((2, 3), (3,), (5, 2, 3), (0, 3)):
            x = tensor(*shape)
            np.testing.assert_allclose(made(x).data, x.data @ made.W.data + made.b.data, rtol=1e-12)
    for made in (layer.Linear(4, bias=False), layer.Linear(3, 4, False)):
        made(tensor(2, 3))
        assert list(made.get_params()) == ["W"] and made.b is None


def test_linear_refuses_inputs_that_contradict_it() -> None:
    with pytest.raises(InvalidInput, match="inputs of Linear must have 1000 features, got shape"):
        layer.Linear(1000, 3)(tensor(2, 512))
    made = layer.Linear(3)
    made(tensor(2, 4))
    for x in (tensor(2, 5), tensor()):
        with pytest.raises(InvalidInput):
            made(x)
    with pytest.raises(TypeError):
        layer.Linear(1, 2, True, 4)


def test_a_failed_first_call_leaves_the_layer_as_it_was() -> None:
    made = layer.Linear(3, 2)
    with pytest.raises(InvalidInput):
        made(tensor(1, 4))
    assert made(tensor(1, 3)).shape == (1, 2)


def test_gemm() -> None:
    x = tensor(2, 3)
    made = layer.Gemm(4, alpha=0.5, beta=2.0)
    made.forward(x)
    made.b.data[...] = 1
    assert made.W.shape == (4, 3) and made.b.shape == (1, 4)
    np.testing.assert_allclose(made(x).data, 0.5 * x.data @ made.W.data.T + 2)
    other = layer.Gemm(4, transA=True, transB=False, bias_shape=(4,))
    np.testing.assert_allclose(other(x).data, x.data.T @ other.W.data)
    assert other.W.shape == (2, 4) and other.b.shape == (4,)
    layer.Gemm(4, bias=False)(x)


def test_embedding() -> None:
    made = layer.Embedding(5, 3)
    for dtype in (np.int32, np.int64, np.float32, np.uint8):
        np.testing.assert_array_equal(made(Tensor(data=np.array([[1, 4]], dtype))).data, made.W.data[[[1, 4]]])
    with pytest.raises(OperatorError):
        made(Tensor(data=np.array([5])))
    w = RNG.normal(size=(5, 3)).astype(np.float32)
    given = layer.Embedding(5, 3)
    given.from_pretrained(Tensor(data=w))
    np.testing.assert_array_equal(given(Tensor(data=np.array([2]))).data, w[[2]])
    assert not given.W.stores_grad and list(given.get_params()) == ["W"]
    given.from_pretrained(w, freeze=False)
    assert given.W.stores_grad
    with pytest.raises(InvalidInput, match=r"shape \(5, 3\)"):
        given.from_pretrained(np.ones((3, 5)))
    with pytest.raises(ValueError):
        layer.Embedding(1, 1, "normal")


def conv(x: Any, w: Any, b: Any, stride: tuple[int, int], pads: tuple[int, int, int, int], dilation: int, group: int) -> Any:
    """By the definition; pads: top, bottom, left, right."""
    top, bottom, left, right = pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    n, out, inner = x.shape[0], w.shape[0], w.shape[1]
    height = (x.shape[2] - dilation * (w.shape[2] - 1) - 1) // stride[0] + 1
    width = (x.shape[3] - dilation * (w.shape[3] - 1) - 1) // stride[1] + 1
    y = np.empty((n, out, height, width))
    for o in range(out):
        channels = slice(o // (out // group) * inner, (o // (out // group) + 1) * inner)
        for i in range(height):
            for j in range(width):
                rows = slice(i * stride[0], i * stride[0] + dilation * (w.shape[2] - 1) + 1, dilation)
                columns = slice(j * stride[1], j * stride[1] + dilation * (w.shape[3] - 1) + 1, dilation)
                y[:, o, i, j] = (x[:, channels, rows, columns] * w[o]).sum((1, 2, 3)) + (0 if b is None else b[o])
    return y


@pytest.mark.parametrize("args, kwargs, stride, pads, dilation, group", [
    ((4, 3), {}, (1, 1), (0, 0, 0, 0), 1, 1),
    ((2, 4, 3), {}, (1, 1), (0, 0, 0, 0), 1, 1),
    ((2, 4, 3, 2, 1), {}, (2, 2), (1, 1, 1, 1), 1, 1),
    ((2, 4, (3, 2), (1, 2), (1, 0)), {}, (1, 2), (1, 1, 0, 0), 1, 1),
    ((4, (2, 3)), {"stride": (2, 1), "padding": (1, 2, 0, 3), "bias": False}, (2, 1), (1, 2, 0, 3), 1, 1),
    ((4, 2), {"dilation": 2, "group": 2}, (1, 1), (0, 0, 0, 0), 2, 2),
    ((4, 2), {"pad_mode": "SAME_UPPER", "cudnn_prefer": "fastest"}, (1, 1), (0, 1, 0, 1), 1, 1),
    ((4, 2), {"pad_mode": "SAME_LOWER", "workspace_MB_limit": 9}, (1, 1), (1, 0, 1, 0), 1, 1),
])  # fmt: skip
def test_conv2d(args: Any, kwargs: Any, stride: Any, pads: Any, dilation: int, group: int) -> None:
    x, made = tensor(2, 2, 6, 7), layer.Conv2d(*args, **kwargs)
    made(x)
    if made.b is not None:
        made.b.data[...] = RNG.normal(size=4)
    b = None if made.b is None else made.b.data
    expected = conv(x.data, made.W.data, b, stride, pads, dilation, group)
    np.testing.assert_allclose(made(x).data, expected, rtol=1e-10, atol=1e-12)
    if "pad_mode" not in kwargs:
        np.testing.assert_array_equal(autograd.conv2d(made.handle, x, made.W, made.b).data, made(x).data)
    relu = layer.Conv2d(*args, **kwargs, activation="RELU")
    relu(x)
    relu.set_params(made.get_params())
    np.testing.assert_allclose(relu(x).data, np.maximum(expected, 0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("args, kwargs, error", [
    ((4, 3), {"cudnn": 1}, TypeError), ((4, "3"), {}, TypeError), ((4, 3), {"stride": (1, 2, 3)}, TypeError),
    ((2, 4, 3, 1, 1, 1), {}, TypeError), ((4, 3), {"pad_mode": "SAME"}, ValueError), ((4, 3), {"activation": "TANH"}, ValueError),
    ((4, 3), {"padding": (1, 2, 3)}, TypeError),
])  # fmt: skip
def test_conv2d_refuses(args: Any, kwargs: Any, error: Any) -> None:
    with pytest.raises(error):
        layer.Conv2d(*args, **kwargs)


def test_conv2d_refuses_inputs() -> None:
    made = layer.Conv2d(4, 3)
    made(tensor(1, 2, 5, 5))
    with pytest.raises(InvalidInput, match="must have 2 channels"):
        made(tensor(1, 3, 5, 5))
    with pytest.raises(InvalidInput, match="N, channels, height, width"):
        made(tensor(2, 5, 5))
    with pytest.raises(InvalidInput, match="group must divide the numbers of channels"):
        layer.Conv2d(4, 3, group=4)(tensor(1, 2, 5, 5))


def test_separable_convolution() -> None:
    x, made = tensor(2, 3, 6, 6), layer.SeparableConv2d(4, 3, stride=2, padding=1, bias=True)
    y = made(x)
    assert list(made.get_params()) == ["depthwise_conv.W", "depthwise_conv.b", "point_conv.W", "point_conv.b"]
    middle = conv(x.data, made.depthwise_conv.W.data, None, (2, 2), (1, 1, 1, 1), 1, 3)
    np.testing.assert_allclose(y.data, np.einsum("nchw,oc->nohw", middle, made.point_conv.W.data[:, :, 0, 0]), rtol=1e-10)
    assert layer.SeparableConv2d(3, 4, 3, 2, 1)(x).shape == (2, 4, 3, 3)


@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (6, 3), (4, 3, 5), (1, 3)])
@pytest.mark.parametrize("make, m", [
    (layer.BatchNorm2d, 0.9), (lambda: layer.BatchNorm2d(3), 0.9), (lambda: layer.BatchNorm2d(3, 0.25), 0.25),
    (lambda: layer.BatchNorm2d(momentum=0.1, epsilon=0.5), 0.1), (lambda: layer.BatchNorm2d(unbiased=False), 0.9),
])  # fmt: skip
def test_batch_norm(shape: tuple[int, ...], make: Any, m: float) -> None:
    made = make()
    epsilon, one = (0.5 if m == 0.1 else 1e-5), int(made.handle.unbiased)
    made(tensor(*shape))
    made.set_params({"scale": RNG.normal(size=3), "bias": RNG.normal(size=3)})
    mean, variance = np.zeros(3), np.ones(3)
    wide = (slice(None), *[None] * (len(shape) - 2))

    def normal(x: Any, mean: Any, variance: Any) -> Any:
        y = (x - mean[wide]) / np.sqrt(variance[wide] + epsilon)
        return y * made.scale.data[wide] + made.bias.data[wide]

    axes = (0, *range(2, len(shape)))
    for _ in range(3):
        tape.training = True
        x = tensor(*shape)
        y = made(x)
        here, n = x.data.mean(axes), x.data.size // 3
        np.testing.assert_allclose(y.data, normal(x.data, here, x.data.var(axes)), rtol=1e-8, atol=1e-10)
        mean = (1 - m) * mean + m * here
        variance = (1 - m) * variance + m * x.data.var(axes) * n / max(n - one, 1)
        tape.training = False
        for _ in range(2):  # inference changes nothing
            np.testing.assert_allclose(made(x).data, normal(x.data, mean, variance), rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(made.running_mean.data, mean, rtol=1e-10)
        np.testing.assert_allclose(made.running_var.data, variance, rtol=1e-10)


def test_compile_does_not_touch_statistics() -> None:
    made = net()
    before = {n: v.copy() for n, v in values(made).items()}
    made.compile([tensor(2, 2, 6, 6)], is_train=True)
    assert all(np.array_equal(v, before[n]) for n, v in values(made).items())


def test_batch_norm_with_another_epsilon() -> None:
    x, made = tensor(4, 3, 2, 2), layer.BatchNorm2d(epsilon=0.5)
    np.testing.assert_allclose(made(x).data, x.data / np.sqrt(1.5), rtol=1e-10)
    tape.training = True
    centred = x.data - x.data.mean((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(made(x).data, centred / np.sqrt(x.data.var((0, 2, 3), keepdims=True) + 0.5), rtol=1e-8)


def test_batch_norm_refuses() -> None:
    made = layer.BatchNorm2d()
    made(tensor(2, 3))
    for x in (tensor(2, 4), tensor(3)):
        with pytest.raises(InvalidInput):
            made(x)


X = np.arange(24.0).reshape(1, 1, 4, 6)


@pytest.mark.parametrize("make, expected", [
    (lambda: layer.MaxPool2d(2), X[:, :, 1::2, 1::2]),
    (lambda: layer.Pooling2d(2), X[:, :, 1::2, 1::2]),
    (lambda: layer.Pooling2d((2, 2), is_max=False), X[:, :, ::2, ::2] + 3.5),
    (lambda: layer.MaxPool2d((1, 2), (1, 1)), X[:, :, :, 1:]),
    (lambda: layer.AvgPool2d(2, 2, padding=(1, 0)), np.array([[[[0.5, 2.5, 4.5], [9.5, 11.5, 13.5], [18.5, 20.5, 22.5]]]])),
    (lambda: layer.MaxPool2d(2, 1, pad_mode="SAME_UPPER"),
     np.pad(X, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=-1)[:, :, [[1], [2], [3], [3]], [1, 2, 3, 4, 5, 5]]),
    (lambda: layer.MaxPool2d(2, 2, padding=(0, 2, 1, 1)),
     np.array([[[[6, 8, 10, 11], [18, 20, 22, 23], [-np.inf] * 4]]])),
    (lambda: layer.MaxPool2d(3, 2, ceil_mode=True), np.array([[[[14, 16, 17], [20, 22, 23]]]])),
    (lambda: layer.AvgPool2d(3, 2, ceil_mode=True), np.array([[[[7, 9, 10.5], [16, 18, 19.5]]]])),
    (lambda: layer.MaxPool1d(2), X[:, :, :, 1::2]),
    (lambda: layer.AvgPool1d(3, 3), X[:, :, :, 1::3]),
])  # fmt: skip
def test_pooling(make: Any, expected: Any) -> None:
    made = make()
    np.testing.assert_allclose(made(Tensor(data=X)).data, expected)
    if made.pad_mode == "NOTSET" and not made.ceil_mode:
        np.testing.assert_allclose(autograd.pooling_2d(made.handle, Tensor(data=X)).data, expected)


def test_pooling_of_three_axes() -> None:
    np.testing.assert_array_equal(layer.MaxPool1d(2)(Tensor(data=X[:, 0])).data, X[:, 0, :, 1::2])
    np.testing.assert_allclose(layer.AvgPool1d(2, 2, 1)(Tensor(data=X[:, 0])).data[0, 0], [0, 1.5, 3.5, 5])
    with pytest.raises(InvalidInput):
        layer.MaxPool2d(2)(Tensor(data=X[0]))


def test_layers_without_parameters() -> None:
    x, t = tensor(3, 4), Tensor(data=np.array([0, 3, 1]))
    for made, result in (
        (layer.ReLU()(x), np.maximum(x.data, 0)),
        (layer.Sigmoid()(x), 1 / (1 + np.exp(-x.data))),
        (layer.Add()(x, x), 2 * x.data),
        (layer.Flatten()(tensor(2, 0, 3)), np.empty((2, 0))),
        (layer.Flatten(0)(x), x.data.reshape(1, 12)),
        (layer.SoftMax()(x), np.exp(x.data) / np.exp(x.data).sum(1, keepdims=True)),
        (layer.Dropout(0.4)(x), x.data),
        (layer.Cat()([x, x]), np.concatenate([x.data, x.data])),
        (layer.Cat(1)([x, x]), np.concatenate([x.data, x.data], 1)),
        (layer.Reshape()(x, (2, -1)), x.data.reshape(2, 6)),
        (layer.SoftMaxCrossEntropy()(x, t), autograd.softmax_cross_entropy(x, t).data),
        (layer.MeanSquareError()(x, x), np.zeros(1)),
        (layer.CrossEntropy()(layer.SoftMax()(x), layer.SoftMax()(x)), None),
        (layer.BinaryCrossEntropy()(layer.Sigmoid()(x), layer.Sigmoid()(x)), None),
    ):
        if result is None:
            assert made.shape == (1,) and made.data.item() > 0
        else:
            np.testing.assert_allclose(made.data, result, rtol=1e-6)


def test_dropout_drops_its_ratio() -> None:
    tape.training = True
    y = layer.Dropout(0.2)(Tensor(data=np.ones(10000, np.float32))).data
    assert abs((y == 0).mean() - 0.2) < 0.02
    np.testing.assert_allclose(y[y != 0], 1.25, rtol=1e-6)


# --- recurrent


def list_of(n: int, *shape: int) -> list[Tensor]:
    return [tensor(*shape) for _ in range(n)]


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_rnn(nonlinearity: str, bias: bool) -> None:
    made = layer.RNN(3, 4, nonlinearity=nonlinearity, bias=bias)
    xs, h0 = list_of(5, 2, 3), tensor(2, 4)
    made.initialize(xs, h0)
    made.set_params({n: RNG.normal(size=t.shape) for n, t in made.get_params().items()})
    assert list(made.get_params()) == ["Wx", "Wh", "b"][: 2 + bias]
    h, expected = h0, []
    for x in xs:
        h = made.step_forward(x, h, made.Wx, made.Wh, made.b if bias else None)
        expected.append(h.data)
    outs, last = made(xs, h0)
    assert isinstance(outs, list) and last.shape == (2, 4)
    np.testing.assert_allclose([y.data for y in outs], expected, rtol=1e-10)
    np.testing.assert_allclose(last.data, expected[-1], rtol=1e-10)
    y, _ = made(Tensor(data=np.stack([x.data for x in xs])), h0)
    np.testing.assert_allclose(y.data, expected, rtol=1e-10)
    (one,), _ = made(xs[:1], h0)
    np.testing.assert_allclose(one.data, expected[0], rtol=1e-10)


def test_lstm() -> None:
    made = layer.LSTM(3, 4)
    xs, h0, c0 = list_of(5, 2, 3), tensor(2, 4), tensor(2, 4)
    made.initialize(xs, (h0, c0))
    made.set_params({n: RNG.normal(size=t.shape) for n, t in made.get_params().items()})
    h, c, expected = h0, c0, []
    for x in xs:
        h, c = made.step_forward(x, h, c)
        expected.append(h.data)
    outs, hn, cn = made(xs, (h0, c0))
    np.testing.assert_allclose([y.data for y in outs], expected, rtol=1e-10)
    np.testing.assert_allclose(hn.data, h.data, rtol=1e-10)
    np.testing.assert_allclose(cn.data, c.data, rtol=1e-10)


@pytest.mark.parametrize("kind", [layer.RNN, layer.LSTM])
def test_layers_and_directions(kind: Any) -> None:
    """Two layers in both directions, against single layers of the same weights."""
    made = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    x = tensor(2, 5, 3)
    y, *last = made(x)
    assert y.shape == (2, 5, 8) and all(s.shape == (4, 2, 4) for s in last)
    made.set_params({n: RNG.normal(size=t.shape) for n, t in made.get_params().items()})
    y, h, *_ = made(x)
    below, ends = x.data.transpose(1, 0, 2), []
    for end in ("", "_l1"):
        sides = []
        for back in ("", "_reverse"):
            one = kind(below.shape[2], 4)
            one.initialize(Tensor(data=below))
            one.set_params({n: made.get_params()[f"{n}{end}{back}"] for n in one.get_params()})
            out, state, *_ = one(Tensor(data=np.ascontiguousarray(below[::-1] if back else below)))
            sides.append(out.data[::-1] if back else out.data)
            ends.append(state.data)
        below = np.concatenate(sides, 2)
    np.testing.assert_allclose(y.data, below.transpose(1, 0, 2), rtol=1e-9)
    np.testing.assert_allclose(h.data, ends, rtol=1e-9)


def test_recurrent_layers_refuse() -> None:
    with pytest.raises(ValueError):
        layer.RNN(2, 3, nonlinearity="sigmoid")
    with pytest.raises(ValueError):
        layer.LSTM(2, 3, nonlinearity="relu")
    with pytest.raises(ValueError, match="vanilla"):
        layer.CudnnRNN(3, rnn_mode="elman")
    made = layer.RNN(2, 3)
    made(list_of(2, 1, 2))
    for xs in ([], list_of(2, 1, 4)):
        with pytest.raises(InvalidInput):
            made(xs)


def cudnn(mode: str, x: Any, packed: Any, size: int, layers: int, directions: int, h0: Any) -> Any:
    """By the formulas; x: (time, N, input)."""
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    shapes = [s for i in range(layers) for _ in range(directions)
              for s in ((gates, size, x.shape[2] if i == 0 else size * directions), (gates, size, size))]  # fmt: skip
    shapes += [(gates, size)] * len(shapes)
    cuts = np.cumsum([int(np.prod(s)) for s in shapes])
    pieces = [p.reshape(s) for p, s in zip(np.split(packed, cuts[:-1]), shapes, strict=True)]
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    half = len(pieces) // 2
    for i in range(layers):
        sides = []
        for d in range(directions):
            k = 2 * (i * directions + d)
            w, r, bw, br = pieces[k], pieces[k + 1], pieces[half + k], pieces[half + k + 1]
            h, c, out = h0[i * directions + d], 0.0, []
            for xt in x[::-1] if d else x:
                a = [xt @ w[g].T + bw[g] for g in range(gates)]
                b = [h @ r[g].T + br[g] for g in range(gates)]
                if mode == "lstm":
                    c = sigmoid(a[1] + b[1]) * c + sigmoid(a[0] + b[0]) * np.tanh(a[2] + b[2])
                    h = sigmoid(a[3] + b[3]) * np.tanh(c)
                elif mode == "gru":
                    z = sigmoid(a[1] + b[1])
                    h = (1 - z) * np.tanh(a[2] + sigmoid(a[0] + b[0]) * b[2]) + z * h
                else:
                    h = np.maximum(a[0] + b[0], 0) if mode == "relu" else np.tanh(a[0] + b[0])
                out.append(h)
            sides.append(np.stack(out[::-1] if d else out))
        x = np.concatenate(sides, 2)
    return x


@pytest.mark.parametrize("mode", ["vanilla", "tanh", "relu", "lstm", "gru"])
@pytest.mark.parametrize("layers, both", [(1, False), (2, True)])
def test_cudnn_rnn(mode: str, layers: int, both: bool) -> None:
    made = layer.CudnnRNN(4, rnn_mode=mode, num_layers=layers, bidirectional=both)
    x, h0 = tensor(2, 5, 3), tensor(layers * (1 + both), 2, 4)
    made(x)
    assert list(made.get_params()) == ["W"]
    made.set_params({"W": 0.5 * RNG.normal(size=made.W.shape)})
    expected = cudnn(mode, x.data.transpose(1, 0, 2), made.W.data, 4, layers, 1 + both, h0.data).transpose(1, 0, 2)
    np.testing.assert_allclose(made(x, h0).data, expected, rtol=1e-9, atol=1e-12)
    made.return_sequences = False
    np.testing.assert_allclose(made(x, h0).data, expected[:, -1], rtol=1e-9, atol=1e-12)


def test_cudnn_rnn_without_bias_and_time_first() -> None:
    made = layer.CudnnRNN(4, bias=False, batch_first=False)
    x = tensor(5, 2, 3)
    made(x)
    assert made.W.shape == (4 * 4 * (3 + 4),)
    whole = np.concatenate([made.W.data, np.zeros(2 * 16)])
    np.testing.assert_allclose(made(x).data, cudnn("lstm", x.data, whole, 4, 1, 1, np.zeros((1, 2, 4))), rtol=1e-9, atol=1e-12)


def test_cudnn_rnn_masks_what_is_after_the_end() -> None:
    made = layer.CudnnRNN(4, use_mask=True)
    x, lengths = tensor(2, 5, 3), Tensor(data=np.array([5, 2]))
    y = made(x, seq_lengths=lengths).data
    assert not y[1, 2:].any() and y[1, :2].all()
    made.return_sequences = False
    np.testing.assert_array_equal(made(x, seq_lengths=lengths).data, [y[0, 4], y[1, 1]])
    with pytest.raises(InvalidInput, match="seq_lengths"):
        made(x)


@other_device.runs
@pytest.mark.parametrize("make, shape", [
    (lambda: layer.Linear(3), (2, 4)), (lambda: layer.Gemm(3), (2, 4)), (lambda: layer.Conv2d(3, 2), (1, 2, 3, 3)),
    (lambda: layer.Embedding(5, 2), (2,)), (layer.BatchNorm2d, (3, 2)), (lambda: layer.MaxPool2d(2), (1, 1, 4, 4)),
    (lambda: layer.RNN(3, 4, bidirectional=True), (2, 1, 3)), (lambda: layer.LSTM(3, 4, num_layers=2), (2, 1, 3)),
    (lambda: layer.CudnnRNN(4, rnn_mode="gru", return_sequences=False), (2, 2, 3)), (lambda: layer.Dropout(0.5), (50,)),
])  # fmt: skip
def test_another_device_has_the_same_numbers(make: Any, shape: tuple[int, ...]) -> None:
    found = []
    for dev in (default_device, Device(other_device.NAME)):
        dev.SetRandSeed(4)
        made, x = make(), Tensor(data=np.abs(np.random.default_rng(1).normal(size=shape)), device=dev)
        for tape.training in (False, True):
            y = made(x)
        found.append([to_numpy(y[0] if isinstance(y, tuple) else y), *map(to_numpy, made.get_states().values())])
        assert all(t.device is dev for t in made.get_states().values())
    for a, b in zip(*found, strict=True):
        other_device.same(b, a)


@other_device.runs
def test_parameters_follow_their_inputs() -> None:
    made, dev = layer.Linear(3), Device(other_device.NAME)
    x = tensor(2, 4)
    y = made(x)
    z = made(Tensor(data=x.data, device=dev))
    assert z.device is dev and made.W.device is dev
    other_device.same(to_numpy(z), y.data)


# --- gradients and graphs


class Whole(Model):
    """A body, then the mean of squares."""

    def __init__(self, body: Layer) -> None:
        super().__init__()
        self.body = body
        self.optimizer = opt.SGD(0.01, momentum=0.9, dtype=np.float64)

    def forward(self, *xs: Tensor) -> Tensor:
        y = self.body(*xs)
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]

    def loss(self, *xs: Tensor) -> Tensor:
        y = self.forward(*xs)
        return op.ReduceMean(op.Mul(y, y), keepdims=0)  # type: ignore[no-any-return]

    def train_one_batch(self, *xs: Tensor) -> Tensor:
        loss = self.loss(*xs)
        self.optimizer(loss)
        return loss


BODIES: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: layer.Linear(3), (4, 5)),
    (lambda: layer.Gemm(3), (4, 5)),
    (lambda: layer.Conv2d(4, 3, padding=(1, 0, 0, 1), stride=2, group=2, activation="RELU"), (2, 2, 5, 6)),
    (lambda: layer.SeparableConv2d(4, 3, bias=True), (2, 3, 5, 5)),
    (layer.BatchNorm2d, (4, 3, 2, 2)),
    (lambda: layer.RNN(3, 4, num_layers=2, bidirectional=True), (5, 2, 3)),
    (lambda: layer.LSTM(3, 4, num_layers=2, bidirectional=True), (5, 2, 3)),
    (lambda: layer.CudnnRNN(4), (2, 5, 3)),
    (lambda: layer.CudnnRNN(4, rnn_mode="gru"), (2, 5, 3)),
]


def whole(make: Any, shape: tuple[int, ...], graph: bool = False) -> tuple[Whole, Tensor]:
    default_device.SetRandSeed(3)
    made, x = Whole(make()), Tensor(data=np.random.default_rng(1).normal(size=shape), requires_grad=False)
    made.compile([x], is_train=True, use_graph=graph)
    rng = np.random.default_rng(2)
    made.set_params({n: rng.normal(size=t.shape) for n, t in made.get_params().items()})
    return made, x


@pytest.mark.parametrize("make, shape", BODIES)
def test_gradients_are_those_of_differences(make: Any, shape: tuple[int, ...]) -> None:
    made, x = whole(make, shape)
    grads = {p.name: g.data for p, g in autograd.backward(made.loss(x))}
    assert list(made.get_params()) and set(grads) == set(made.get_params())
    for name, t in made.get_params().items():
        flat = t.data.reshape(-1)
        for i in range(0, flat.size, max(1, flat.size // 5)):
            before, ends = flat[i], []
            for sign in (1, -1):
                flat[i] = before + sign * 1e-5
                ends.append(made.loss(x).data.item())
            flat[i] = before
            np.testing.assert_allclose(grads[name].reshape(-1)[i], (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("make, shape", BODIES)
def test_the_graph_has_the_numbers_of_the_tape(make: Any, shape: tuple[int, ...]) -> None:
    curves = []
    for graph in (False, True):
        made, x = whole(make, shape, graph)
        curves.append([made(x).data.item() for _ in range(4)] + [v.sum() for v in values(made).values()])
        assert not made.not_traceable
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-12)


class Dropping(Layer):
    """A recurrent net with dropout between its layers, and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.drop = layer.CudnnRNN(4, num_layers=2, dropout=0.5), layer.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.lstm(x))  # type: ignore[no-any-return]


def test_dropout_draws_the_same_in_the_graph() -> None:
    curves = []
    for graph in (False, True):
        made, x = whole(Dropping, (2, 5, 3), graph)
        curves.append([made(x).data.item() for _ in range(5)])
        made.eval()
        assert np.array_equal(made(x).data, made(x).data)
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-12)
    assert len(set(curves[0])) == 5


def test_a_layer_that_appears_in_a_later_step() -> None:
    """Parameters cannot be made while a step is recorded: such a step stays on the tape."""

    class Grows(Whole):
        count = 0

        def forward(self, *xs: Tensor) -> Tensor:
            self.count += 1
            y = super().forward(*xs)
            return self.late(y) if self.count > 2 else y  # type: ignore[no-any-return]

    made, x = Grows(layer.Linear(3)), tensor(2, 3)
    made.late = layer.Linear(3)
    made.compile([x], is_train=True, use_graph=True)
    made(x)
    with pytest.warns(UserWarning, match="the layer late creates its parameters"):
        made(x)
    assert "late.W" in made.get_params()
