"""Gradients of gradients: against differences, on the tape, in a recorded step and in a file; and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

from singa import autograd, layer, opt, sonnx, tensor
from singa._core import tape
from singa._core.backward import _walk
from singa._core.tensor import Tensor, op
from singa.model import Model
from singa_backend import SingaBackend, dtypes
from singa_backend.autodiff.replay import replay
from singa_backend.conform import gradients
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.interpreters.base import BOOL, INT
from singa_backend.interpreters.eager import Eager

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

SAMPLE = [("", "Conv", 22), ("", "MaxPool", 22), ("", "BatchNormalization", 15), ("", "LayerNormalization", 17),
          ("", "Softmax", 13), ("", "Attention", 25), ("", "Gelu", 20), ("", "Einsum", 28), ("", "LSTM", 22), ("", "Loop", 25),
          ("", "If", 25), ("", "Scan", 25), ("", "SequenceMap", 17), ("", "LinearAttention", 27), ("", "Resize", 19),
          ("", "ReduceL2", 18), ("", "MatMul", 13), ("", "Gather", 13),
          ("", "ConvTranspose", 22), ("", "MeanVarianceNormalization", 13), ("ai.onnx.ml", "Normalizer", 1)]  # fmt: skip
"""A sample of operators for every run; `sonnx gradients --second` judges every version."""


@pytest.fixture(autouse=True)
def training() -> Any:
    with tape.restored():
        autograd.training = True
        yield


@pytest.mark.parametrize("key", SAMPLE, ids=lambda k: k[1])
def test_the_gradient_of_a_rule_is_that_of_differences(key: tuple[str, str, int]) -> None:
    agreed = 0
    for i, point in enumerate(gradients.points(*key, seed=2, count=2)):
        second = point.second(np.random.default_rng(i))
        assert second is not None
        found = gradients.judge(second, np.random.default_rng(i))
        assert all(f.verdict in ("agree", "kink") for f in found), [(point.case.describe(), f) for f in found]
        agreed += any(f.verdict == "agree" for f in found)
        single = gradients._returns_single(*key[:2])  # tensors have its dtypes, not float64
        if not single and not any(isinstance(x, list) for x in (*point.feeds, *point.dys)):
            _same_on_the_tape(point, second)
    assert agreed


def _same_on_the_tape(point: gradients.Point, second: gradients.Point) -> None:
    """Tensors differentiate the gradient as the rules do on arrays."""
    xs = [Tensor(data=np.array(x), requires_grad=i in point.asked) for i, x in enumerate(point.feeds)]
    results = replay(op, point.graph, xs)
    wanted = [xs[i] for i in point.asked]
    first = _gradients(_dot(results, point.dys), wanted, create_graph=True)
    made = [(g, d) for g, d in zip((g for g in first if g is not None), second.dys, strict=True) if g.requires_grad]
    further = _gradients(_dot(*zip(*made, strict=True)), wanted) if made else [None] * len(wanted)
    expected = second.eager()[: len(wanted)]
    for x, ours, theirs in zip(wanted, further, expected, strict=True):
        zero = np.zeros_like(x.data)
        np.testing.assert_allclose(
            zero if ours is None else ours.data, zero if theirs is None else theirs, rtol=1e-8, atol=1e-10, equal_nan=True
        )


def _gradients(loss: Tensor, wanted: list[Tensor], create_graph: bool = False) -> list[Any]:
    found = {id(x): g for x, g in _walk(loss, None, create_graph, {id(x) for x in wanted})}
    return [found.get(id(x)) for x in wanted]


def _dot(values: Any, weights: Any) -> Any:
    total: Any = None
    for y, d in zip(values, weights, strict=True):
        if d is not None and y.requires_grad:
            part = op.Cast(op.ReduceSum(op.Mul(y, op.constant(d)), None, keepdims=0), to=11)
            total = part if total is None else op.Add(total, part)
    return total


# --- points at which a rule has a convention, or divides by what may be 0


def factors(x: Any) -> Any:
    """Some values become 0: rows without a zero, with one, and with several."""
    floats = isinstance(x, np.ndarray) and x.dtype == np.float64
    return np.where(np.arange(x.size).reshape(x.shape) % 3 == 1, 0.0, x) if floats else x


@pytest.mark.parametrize(
    "key", [("", "ReduceProd", 18), ("", "CumProd", 26), ("", "ScatterElements", 18), ("", "ScatterND", 18)], ids=lambda k: k[1]
)
def test_the_second_gradient_of_a_product_with_zeros(key: tuple[str, str, int]) -> None:
    """A product is a polynomial: differences are right at zeros too."""
    agreed = 0
    for i, point in enumerate(gradients.points(*key, seed=4, count=12)):
        product = any(a.name == "reduction" and a.s == b"mul" for a in point.case.node.attribute)
        if "Scatter" in key[1] and not product:
            continue
        point.feeds = [factors(x) for x in point.feeds]
        second = point.second(np.random.default_rng(i))
        assert second is not None
        found = gradients.judge(second, np.random.default_rng(i))
        assert all(f.verdict == "agree" for f in found), [(point.case.describe(), f) for f in found]
        agreed += 1
    assert agreed


def _second_of(function: Callable[[Tensor], Tensor], x: np.ndarray) -> Any:
    """The second derivatives of the sum of a function of each element."""
    leaf = Tensor(data=np.array(x), requires_grad=True)
    (first,) = _gradients(total(function(leaf)), [leaf], create_graph=True)
    return _gradients(total(first), [leaf])[0].data


@pytest.mark.parametrize(
    ("name", "attributes", "below"),
    [("Elu", {"alpha": 0.5}, 0.5), ("Celu", {"alpha": 0.5}, 2.0), ("Selu", {"alpha": 0.5, "gamma": 2.0}, 1.0)],
)
def test_the_second_gradient_at_the_bend_is_0(name: str, attributes: dict[str, float], below: float) -> None:
    small = -(2.0**-40)
    found = _second_of(lambda x: getattr(op, name)(x, **attributes), np.array([small, 0.0, 1.0]))
    np.testing.assert_allclose(found, [below, 0.0, 0.0], rtol=1e-9)


@pytest.mark.parametrize(("n", "expected"), [(0.0, [0.0, 0.0]), (1.0, [0.0, 0.0]), (2.0, [2.0, 2.0]), (3.0, [0.0, 12.0])])
def test_the_second_gradient_of_a_power_at_0(n: float, expected: list[float]) -> None:
    found = _second_of(lambda x: op.Add(op.Pow(x, n), op.Mul(op.Mul(x, x), 0.0)), np.array([0.0, 2.0]))
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_second_gradient_of_a_constant_channel_is_finite(dtype: Any) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 2, 2)).astype(dtype)
    x[:, 1] = 0.5
    leaf = Tensor(data=x, requires_grad=True)
    y = op.MeanVarianceNormalization(leaf)
    (first,) = _gradients(total(op.Mul(y, op.constant(np.cos(np.arange(x.size)).reshape(x.shape).astype(dtype)))), [leaf], True)
    found = _gradients(total(op.Mul(first, op.Sin(first.detach()))), [leaf])[0].data
    assert np.isfinite(found).all() and found[:, 0].any() and not found[:, 1].any()


# --- sequences without an element, and loops without an iteration


def test_an_empty_sequence_has_its_element_type() -> None:
    """A sequence that operators made empty is a value with a type, as that of SequenceEmpty is."""
    here = Eager(opset=21)
    x = np.arange(3.0)
    one = here.SequenceConstruct(x)
    empty = here.SequenceErase(one)
    inserting = here.graph(lambda o, i, go, s: [o.Identity(go), o.SequenceInsert(s, x)], [INT, BOOL, here.type(empty)])
    branch = here.graph(lambda o: [o.SequenceErase(o.SequenceConstruct(x))], [])
    made = {
        "SequenceErase": empty,
        "Identity": here.Identity(empty),
        "SplitToSequence": here.SplitToSequence(x[:0]),
        "SequenceMap": here.SequenceMap(empty, body=here.graph(lambda o, v: [o.Exp(v)], [element_type(np.float64)])),
        "Loop": here.Loop(here.constant(0), here.constant(True), empty, body=inserting),
        "If": here.If(here.constant(True), then_branch=branch, else_branch=branch),
    }
    for name, value in made.items():
        assert value == [] and here.is_value(value) and here.dtype(value) == np.float64, name
        np.testing.assert_array_equal(here.SequenceAt(here.SequenceInsert(value, x), 0), x)


def element_type(dtype: Any) -> Any:
    return helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None)


def test_the_gradient_of_a_scan_without_elements_has_the_shape_of_its_input() -> None:
    h, x = (Tensor(data=np.ones(s), requires_grad=True) for s in ((3,), (0, 3)))
    body = op.graph(lambda o, s, e: [o.Add(s, e), o.Mul(s, e)], [op.type(h), op.type(x, drop=[0])])
    last, scanned = op.Scan(h, x, body=body, num_scan_inputs=1, outputs=2)
    first = _gradients(op.Add(total(last), total(op.Mul(scanned, scanned))), [h, x], create_graph=True)
    assert [g.shape for g in first] == [(3,), (0, 3)]
    np.testing.assert_array_equal(first[0].data, np.ones(3))
    second = _gradients(op.Add(total(op.Mul(first[0], h)), total(first[1])), [h, x])
    assert second[1] is None or second[1].shape == (0, 3)


# --- penalties in a loss


class Critic(Model):
    """A critic with a gradient penalty, as in WGAN-GP; every layer is smooth, or bends at single points."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(3, 3, padding=1)
        self.norm = layer.BatchNorm2d()
        self.pool = layer.MaxPool2d(2, 2)
        self.flat = layer.Flatten()
        self.fc1, self.fc2 = layer.Linear(5), layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        h = autograd.tanh(self.norm(self.conv(x)))
        return self.fc2(autograd.sigmoid(self.fc1(self.flat(self.pool(h)))))  # type: ignore[no-any-return]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = (x + y) * 0.5
        mixed.requires_grad = True
        score = op.ReduceSum(self.forward(mixed), None, keepdims=0)
        g = autograd.gradients(score, create_graph=True, inputs=[mixed])[id(mixed)]
        norm = op.Sqrt(op.ReduceSum(op.Mul(g, g), [1, 2, 3], keepdims=0))
        distance = op.ReduceMean(op.Sub(self.forward(x), self.forward(y)), None, keepdims=0)
        return distance + op.ReduceMean(op.Mul(norm - 1.0, norm - 1.0), None, keepdims=0)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(x, y)
        self.optimizer(loss)
        return loss


def batch(dtype: Any = np.float32) -> list[Tensor]:
    rng = np.random.default_rng(1)
    return [Tensor(data=rng.standard_normal((4, 1, 4, 4)).astype(dtype), requires_grad=False) for _ in range(2)]


def critic(graph: bool, dtype: Any = np.float32) -> Critic:
    net = Critic()
    net.optimizer = opt.Adam(lr=0.01)
    net.compile(batch(dtype)[:1], is_train=True, use_graph=graph)
    rng = np.random.default_rng(2)
    net.set_params({n: (0.5 * rng.standard_normal(p.shape)).astype(dtype) for n, p in net.get_params().items()})
    return net


def test_a_penalty_against_differences() -> None:
    net, xs = critic(False, np.float64), batch(np.float64)
    found = {p.name: g.data for p, g in autograd.backward(net.loss(*xs))}
    for name, p in net.get_params().items():
        direction = np.random.default_rng(3).standard_normal(p.shape)
        start, values = p.data.copy(), []
        for t in (-1e-5, 1e-5):
            p.data[...] = start + t * direction
            values.append(net.loss(*xs).data.item())
        p.data[...] = start
        slope = float((found[name] * direction).sum())
        assert slope == pytest.approx((values[1] - values[0]) / 2e-5, rel=1e-5, abs=1e-8), name


def test_a_recorded_step_has_the_bits_of_the_tape() -> None:
    tape, graph = critic(False), critic(True)
    for _ in range(4):
        assert tape(*batch()).data.tobytes() == graph(*batch()).data.tobytes()
    assert graph.not_traceable == ""
    for name, p in tape.get_params().items():
        assert p.data.tobytes() == graph.get_params()[name].data.tobytes()


def file_of(net: Critic) -> Any:
    return sonnx.export(net, batch()[:1])


class FromFile(sonnx.SONNXModel):
    """The critic as a file, with the same loss."""

    loss, train_one_batch = Critic.loss, Critic.train_one_batch

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]  # type: ignore[no-any-return]


def test_a_file_trains_with_a_penalty() -> None:
    net = critic(False)
    proto = file_of(net)
    made = []
    for graph in (False, True):
        again = FromFile(proto)
        again.optimizer = opt.Adam(lr=0.01)
        again.train()
        again.graph(graph)
        for _ in range(3):
            again(*batch())
        assert again.not_traceable == ""
        made.append({n: p.data for n, p in again.get_params().items()})
    for _ in range(3):
        net(*batch())
    for name, p in net.get_params().items():
        np.testing.assert_array_equal(made[0][name], made[1][name])
        np.testing.assert_allclose(made[0][name], p.data, rtol=1e-5, atol=1e-6)


def test_a_step_as_a_file_has_the_penalty() -> None:
    """The loss of to_training_onnx may use gradients too: here those of the parameters."""
    net, x = critic(False), batch()[0]
    target = Tensor(data=np.zeros((4, 1), np.float32), requires_grad=False)

    def loss(out: Tensor, goal: Tensor) -> Tensor:
        d = op.Sub(out, goal)
        plain = op.ReduceMean(op.Mul(d, d), None, keepdims=0)
        for g in autograd.gradients(plain, create_graph=True, inputs=list(net.get_params().values())).values():
            plain = plain + op.ReduceSum(op.Mul(g, g), None, keepdims=0)
        return plain  # type: ignore[no-any-return]

    step = sonnx.to_training_onnx(net, loss, opt.SGD(lr=0.1), inputs=[x], target=target)
    names = [o.name for o in step.graph.output]
    made = dict(zip(names, SingaBackend.prepare(step, optimize=0).run([x.data, target.data]), strict=True))
    net.train()
    opt.SGD(lr=0.1)(loss(net.forward(x), target))
    for name, p in net.get_params().items():
        np.testing.assert_array_equal(made["next:" + name], p.data)


def test_a_third_derivative() -> None:
    x = Tensor(data=np.array([0.3, -0.7]), stores_grad=True)
    y = op.ReduceSum(op.Mul(op.Mul(x, x), op.Mul(x, op.Tanh(x))), None, keepdims=0)
    for _ in range(2):
        y = op.ReduceSum(autograd.gradients(y, create_graph=True)[id(x)], None, keepdims=0)
    found = autograd.gradients(y)[id(x)].data
    t = np.tanh(x.data)
    d1, v = 1 - t**2, x.data
    d2, d3 = -2 * t * d1, d1 * (6 * t**2 - 2)
    np.testing.assert_allclose(found, 6 * t + 18 * v * d1 + 9 * v**2 * d2 + v**3 * d3, rtol=1e-10)


def test_a_product_with_the_hessian() -> None:
    """The gradient of `dy` flows too: u with y = <f'(x), u> has the gradient f'(x)."""
    x, u = Tensor(data=np.array([1.0, 2.0])), Tensor(data=np.array([3.0]))
    y = op.ReduceSum(op.Mul(op.Mul(x, x), x), None, keepdims=1)
    g = autograd.gradients(y, u, create_graph=True, inputs=[x])[id(x)]
    both = autograd.gradients(op.ReduceSum(g, None, keepdims=0), inputs=[x, u])
    np.testing.assert_allclose(both[id(x)].data, 6 * x.data * 3)
    np.testing.assert_allclose(both[id(u)].data, [(3 * x.data**2).sum()])


# --- a gradient is never dropped silently


def start() -> tuple[Tensor, Tensor, Tensor]:
    """A parameter, a loss, and the gradient without a graph."""
    w = Tensor(data=np.array([1.0, 2.0]), stores_grad=True, name="w")
    loss = op.ReduceSum(op.Mul(op.Mul(w, w), w), None, keepdims=0)
    return w, loss, autograd.gradients(loss)[id(w)]


def total(x: Tensor) -> Tensor:
    return op.ReduceSum(x, None, keepdims=0)  # type: ignore[no-any-return]


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda g: g,
    "its square": lambda g: op.Mul(g, g),
    "a method": lambda g: tensor.square(g),
    "a formula": lambda g: autograd.sigmoid(g),
    "a clone": lambda g: g.clone(),
    "a copy": lambda g: g.copy(),
    "contiguous": lambda g: g.contiguous(),
    "an index": lambda g: g[0],
    "another dtype": lambda g: op.Cast(g, to=1),
    "a graph": lambda g: op.If(
        op.constant(np.array(True)),
        then_branch=op.graph(lambda o: [o.Mul(g, g)], []),
        else_branch=op.graph(lambda o: [o.Exp(g)], []),
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_gradient_without_a_graph_is_refused_in_a_loss(use: Callable[[Tensor], Tensor]) -> None:
    _, loss, g = start()
    used = op.CastLike(total(use(g)), loss)
    for further in (op.Add(loss, used), op.Mul(loss, used), used):
        with pytest.raises(InvalidInput, match="create_graph=True") as error:
            autograd.gradients(further)
        assert error.value.code == "SX383"


CONSTANTS: dict[str, Callable[[Tensor], Any]] = {
    "detached": lambda g: g.detach(),
    "its sign": lambda g: op.Sign(g),
    "its place": lambda g: op.Cast(op.ArgMax(g), to=11),
    "a number": lambda g: float(total(g)),
    "an array": lambda g: Tensor(data=tensor.to_numpy(g), requires_grad=False),
}


@pytest.mark.parametrize("use", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_is_accepted(use: Callable[[Tensor], Any]) -> None:
    w, loss, g = start()
    found = autograd.gradients(total(op.Mul(w, use(g))) + loss)
    assert list(found) == [id(w)]


def test_updates_by_hand() -> None:
    w, _, g = start()
    w -= g * 0.1
    np.testing.assert_allclose(w.data, np.array([1.0, 2.0]) - 0.1 * 3 * np.array([1.0, 4.0]))
    assert id(w) in autograd.gradients(total(op.Mul(w, w)))
    with tape.no_tape():
        average = op.Mul(g, op.constant(0.5))
    assert id(w) in autograd.gradients(total(op.Mul(w, average)))


def test_a_recorded_step_refuses_it_too() -> None:
    class Net(Model):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layer.Linear(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)  # type: ignore[no-any-return]

        def train_one_batch(self, x: Tensor) -> Tensor:
            loss = total(op.Mul(self.forward(x), self.forward(x)))
            for _, g in autograd.backward(loss):
                loss = loss + total(op.Mul(g, g))
            opt.SGD(0.1)(loss)
            return loss

    net = Net()
    x = Tensor(data=np.ones((2, 3), np.float32), requires_grad=False)
    net.compile([x], is_train=True, use_graph=True)
    with pytest.raises(InvalidInput, match="SX383"):
        net(x)


class Weighted(Model):
    """The step takes a gradient as an argument, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = layer.Linear(2)
        self.optimizer = opt.SGD(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, by: Tensor) -> Tensor:
        loss = total(op.Mul(self.forward(x), self.forward(x)))
        found = autograd.gradients(loss)
        self.optimizer(loss + total(op.Mul(by, self.fc.W)))
        return found[id(self.fc.W)]


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_that_steps_take_and_return_have_no_graph(graph: bool) -> None:
    net = Weighted()
    x, ones = (Tensor(data=np.ones(s, np.float32), requires_grad=False) for s in ((2, 3), (3, 2)))
    net.compile([x], is_train=True, use_graph=graph)
    for _ in range(3):
        g = net(x, ones)
    assert any(net._steps.values()) == graph
    for _ in range(2):
        with pytest.raises(InvalidInput, match="SX383"):
            net(x, g)
    net(x, g.detach())
    with pytest.raises(InvalidInput, match="SX383"):
        autograd.backward(total(op.Mul(net.fc.W, g))).__next__()


class Cube(autograd.Operator):
    def forward(self, x: Any) -> Any:
        self.x = x
        return x**3

    def backward(self, dy: Any) -> Any:
        return dy * 3 * self.x**2


def test_an_operator_in_python_is_refused_by_name() -> None:
    w = Tensor(data=np.array([1.0, 2.0]), stores_grad=True)
    v = Tensor(data=np.array([3.0]), stores_grad=True)
    (y,) = Cube("Cube#7")(w)
    g = autograd.gradients(total(y) + total(op.Mul(v, v)), create_graph=True)
    np.testing.assert_allclose(g[id(w)].data, [3.0, 12.0])
    with pytest.raises(UnsupportedModel, match=re.escape("the gradient of Cube#7 cannot be differentiated")) as error:
        autograd.gradients(total(g[id(w)]))
    assert error.value.code == "SX205"
    np.testing.assert_allclose(autograd.gradients(total(g[id(v)]))[id(v)].data, [2.0])  # which does not pass it


def test_the_inputs_of_gradients() -> None:
    w = Tensor(data=np.array([1.0, 2.0]), stores_grad=True)
    x, other = Tensor(data=np.array([3.0, 4.0])), Tensor(data=np.array([5.0]), name="other")
    h = op.Mul(w, x)
    found = autograd.gradients(total(op.Mul(h, h)), inputs=[x, h])
    np.testing.assert_allclose(found[id(h)].data, 2 * h.data)
    np.testing.assert_allclose(found[id(x)].data, 2 * h.data * w.data)
    with pytest.raises(InvalidInput, match="does not depend on other") as error:
        autograd.gradients(total(h), inputs=[other])
    assert error.value.code == "SX379"


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_loss_may_be_among_the_inputs(create_graph: bool) -> None:
    x = Tensor(data=np.array([1.0, 2.0], np.float32), requires_grad=True)
    autograd.training = True
    try:
        y = op.ReduceSum(x * x, None, keepdims=0)
        found = autograd.gradients(y, 3.0, create_graph=create_graph, inputs=[y, x])
    finally:
        autograd.training = False
    assert (found[id(y)].data.tolist(), found[id(x)].data.tolist()) == (3.0, [6.0, 12.0])


def test_a_changed_parameter_is_refused() -> None:
    w = Tensor(data=np.array([1.0, 2.0]), stores_grad=True)
    y = total(op.Mul(op.Mul(w, w), w))
    w.data = np.array([3.0, 4.0])
    with pytest.raises(InvalidInput, match=r"storage of .* was replaced") as error:
        autograd.gradients(y, create_graph=True)
    assert error.value.code == "SX370"
