"""`Model.to`: another dtype or device, for layers, for models from files and their graphs, and for optimizers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser

from singa import autograd, layer, opt, sonnx
from singa._core.tensor import Tensor, to_numpy
from singa._onnx.tensor_runs import forward
from singa.model import Model
from singa_backend import dtypes
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
Y = RNG.normal(size=(6, 2)).astype(np.float32)
W, B = RNG.normal(size=(4, 2)).astype(np.float32), np.zeros(2, np.float32)
LR = 0.05
WIDE = {"float16": 3e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-5}
"""The dtypes, and tolerances of float32 computations continued in them."""


class Net(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = layer.Linear(2)
        self.bn = layer.BatchNorm2d()  # never called: it has no parameters
        self.optimizer = opt.Adam(LR)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


FILE = """<ir_version: 9, opset_import: ["": 20]> g (float[N, 4] x) => (float[N, 2] y)
    <float[4, 2] W = {1, 1, 1, 1, 1, 1, 1, 1}, float[2] b = {0, 0}> { h = MatMul(x, W) y = Add(h, b) }"""


class Loaded(sonnx.SONNXModel):
    def __init__(self) -> None:
        proto = parser.parse_model(FILE)
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(W, "W"))
        super().__init__(proto)
        self.optimizer = opt.Adam(LR)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = autograd.mse_loss(self.forward(x)[0], y)
        self.optimizer(loss)
        return loss


def made(kind: Any, graph: bool = False) -> Any:
    m = kind()
    m.compile([Tensor(data=X)], is_train=True, use_graph=graph)
    if kind is Net:
        m.set_params({"fc.W": W, "fc.b": B})
    return m


def by_hand(steps: int) -> list[np.ndarray]:
    """Adam in float64."""
    p = [W.astype(np.float64), B.astype(np.float64)]
    m, v = [np.zeros_like(a) for a in p], [np.zeros_like(a) for a in p]
    for t in range(1, steps + 1):
        d = 2 * (X @ p[0] + p[1] - Y) / Y.size
        for i, g in enumerate((X.T @ d, d.sum(0))):
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g**2
            p[i] = p[i] - LR * (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8)
    return p


# --- training goes on


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", [Net, Loaded])
def test_training_continues_in_another_dtype(kind: Any, graph: bool, dtype: str) -> None:
    m = made(kind, graph)
    x, y = Tensor(data=X), Tensor(data=Y)
    for _ in range(3):
        m(x, y)
    before = m.get_params()
    assert m.to(dtype=dtype) is m
    wanted = np.dtype(dtype)
    assert all(a is b and a.data.dtype == wanted for a, b in zip(before.values(), m.get_params().values(), strict=True))
    x, y = Tensor(data=X.astype(wanted)), Tensor(data=Y.astype(wanted))
    for _ in range(3):
        loss = m(x, y)
    assert loss.data.dtype == wanted and m.not_traceable == "" and bool(m._steps) is graph
    states = {n: t.data.dtype for n, t in m.optimizer.get_states().items() if n != "step_counter"}
    assert set(states.values()) == {np.dtype("float64" if dtype == "float64" else "float32")} and len(states) == (
        6 if dtype in ("float16", "bfloat16") else 4
    )  # of halves a copy, too
    for t, expected in zip(m.get_params().values(), by_hand(6), strict=True):
        np.testing.assert_allclose(to_numpy(t).astype(np.float64), expected, rtol=WIDE[dtype], atol=WIDE[dtype])


@pytest.mark.parametrize("kind", [Net, Loaded])
@pytest.mark.parametrize("graph", [False, True])
def test_training_continues_on_another_device(kind: Any, graph: bool) -> None:
    m = made(kind, graph)
    x, y = Tensor(data=X), Tensor(data=Y)
    for device in ("CPU", "STRICT", "CPU"):
        m.to(device=device)
        place = next(iter(m.get_params().values())).device
        assert place.backend.type == device and all(t.device is place for t in m.get_states().values())
        for _ in range(2):
            m(x.clone().to_device(place), y.clone().to_device(place))
        assert all(t.device is place for t in m.optimizer.get_states().values())
    for t, expected in zip(m.get_params().values(), by_hand(6), strict=True):
        np.testing.assert_allclose(to_numpy(t), expected, rtol=1e-4, atol=1e-5)


def test_dtype_and_device_at_once_and_back() -> None:
    m = made(Loaded)
    m.to(dtype="float64", device="STRICT").to(dtype="float32", device="CPU")
    np.testing.assert_array_equal(m.predict(X), made(Loaded).predict(X))


# --- which tensors


def test_statistics_change_and_integers_stay() -> None:
    m = Net()
    m.forward = lambda x: m.bn(x)  # type: ignore[method-assign]
    m.compile([Tensor(data=X.reshape(6, 4, 1, 1))])
    m.fc.initialize(Tensor(data=X))
    m.count = Tensor(data=np.arange(3), requires_grad=False)
    m.to(dtype="float16")
    assert {n: t.data.dtype.name for n, t in m.get_states().items()} == {
        "fc.W": "float16", "fc.b": "float16", "bn.scale": "float16", "bn.bias": "float16", "bn.running_mean": "float16",
        "bn.running_var": "float16", "count": "int64",
    }  # fmt: skip


def test_a_file_within_a_model() -> None:
    class Outer(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Loaded()
            self.head = layer.Linear(3)
            self.tied = self.inner.get_params()["W"]

        def forward(self, x: Tensor) -> Any:
            return self.head(self.inner.forward(x)[0])

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = autograd.mse_loss(self.forward(x), y)
            self.inner.optimizer(loss)
            return loss

    m = Outer()
    x, y = Tensor(data=X), Tensor(data=np.ones((6, 3), np.float32))
    m.compile([x], is_train=True, use_graph=True)
    for _ in range(2):
        m(x, y)
    assert m._steps
    m.inner.to(dtype="float32")
    assert not m._steps  # its graphs contain the parameters of the inner model
    m.to(dtype="float64")
    assert m.tied is m.inner.get_params()["W"] and {t.data.dtype.name for t in m.get_states().values()} == {"float64"}
    assert m.predict(X.astype(np.float64)).dtype == np.float64


# --- the graph of a file

RICH = """<ir_version: 9, opset_import: ["": 18, "ai.onnx.ml": 3]>
g (float[1, 2, 4, 4] x, bool flag, int64 n) =>
(float[1, 2, a, b] y, float[k, 2] z, int64[r] shape, float[1, 2] last, float[2] scan)
<float[2, 2, 1, 1] W = {0.5, -1, 0.25, 2}, float[2] s = {1.5, 0.5}, float[2] b = {0, 1}, float[2] mean = {0.1, 0.2},
 float[2] var = {1, 2},
 float[4] scales = {1, 1, 2, 2}, float ratio = {0.5}, float[2, 2] M = {0.5, -1, 0.25, 2}>
{
    c = Conv(x, W)
    norm = BatchNormalization(c, s, b, mean, var)
    d = Dropout(norm, ratio)
    up = Resize<mode = "nearest">(d, , scales)
    eps = Constant<value_float = 0.001>()
    soft = Add(up, eps)
    y = If(flag) <
        then_branch = one () => (float[1, 2, p, q] t) { half = Constant<value = float {0.5}>() t = Mul(soft, half) },
        else_branch = two () => (float[1, 2, p, q] e) { e = Relu(soft) }
    >
    shape = Shape(y)
    pooled = ReduceMean<keepdims = 0>(norm, axes)
    axes = Constant<value_ints = [2, 3]>()
    go = Constant<value = bool {1}>()
    last, all = Loop(n, go, pooled) <
        body = step (int64 i, bool c0, float[1, 2] v) => (bool c1, float[1, 2] w, float[1, 2] out) {
            c1 = Identity(c0)
            i32 = Cast<to = 1>(i)
            m = MatMul(v, M)
            w = Add(m, i32)
            out = Identity(w)
        }
    >
    z0 = Squeeze(all, one_axis)
    one_axis = Constant<value_ints = [1]>()
    scaled = ai.onnx.ml.Scaler<offset = [1.0], scale = [2.0]>(z0)
    filled = ConstantOfShape(two_sizes)
    two_sizes = Constant<value_ints = [2]>()
    z = Sub(scaled, filled)
    scan = Cast<to = 1>(index)
    index = Range(zero, two, step1)
    zero = Constant<value_float = 0.0>()
    two = Constant<value_float = 2.0>()
    step1 = Constant<value_float = 1.0>()
}"""


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("dtype", WIDE)
def test_every_float_of_a_graph_changes(dtype: str, flag: bool) -> None:
    """In subgraphs, attributes and operators that take float32 only (Resize's scales, Scaler, Range) too."""
    feeds = [RNG.normal(size=(1, 2, 4, 4)).astype(np.float32), np.array(flag), np.array(3)]
    m = sonnx.SONNXModel(parser.parse_model(RICH))
    names, expected = list(m.get_states()), [to_numpy(t) for t in m.forward(*feeds)]
    m.to(dtype=dtype)
    assert list(m.get_states()) == names
    kept = {n: t.data.dtype.name for n, t in m.get_states().items()}
    assert kept.pop("scales") == "float32" and kept.pop("ratio") == dtype and set(kept.values()) == {dtype}
    tolerance = 10 * WIDE[dtype]
    for y, was in zip(m.forward(*feeds), expected, strict=True):
        assert y.data.dtype == (np.dtype(dtype) if was.dtype == np.float32 else was.dtype) and y.shape == was.shape
        np.testing.assert_allclose(to_numpy(y).astype(np.float64), was, rtol=tolerance, atol=tolerance)
    written = sonnx.export(m)
    onnx.checker.check_model(written, full_check=True)
    code = dtypes.onnx_code(np.dtype(dtype))
    found = {t.name: t.data_type for t in written.graph.initializer if dtypes.is_float(dtypes.numpy_dtype(t.data_type))}
    assert {n: c for n, c in found.items() if n in kept} == dict.fromkeys(kept, code)
    assert [v.type.tensor_type.elem_type for v in written.graph.output] == [code, code, TensorProto.INT64, code, code]


def test_onnxruntime_runs_the_exported_file() -> None:
    text = RICH.replace("scaled = ai.onnx.ml.Scaler<offset = [1.0], scale = [2.0]>(z0)", "scaled = Add(z0, z0)")
    proto = parser.parse_model(text.replace(', "ai.onnx.ml": 3', ""))
    x = RNG.normal(size=(1, 2, 4, 4)).astype(np.float16)
    m = sonnx.SONNXModel(proto).to(dtype="float16")
    ours = m.forward(x, np.array(True), np.array(3))
    written = sonnx.export(m)
    with Oracle("onnxruntime") as oracle:
        theirs = oracle.run(written.SerializeToString(), {"x": x, "flag": np.array(True), "n": np.array(3)})
    for v, y in zip(written.graph.output, ours, strict=True):
        assert theirs[v.name].dtype == y.data.dtype
        np.testing.assert_allclose(theirs[v.name].astype(np.float64), to_numpy(y).astype(np.float64), rtol=4e-3, atol=4e-3)


def test_copies_and_pickles_of_a_changed_model() -> None:
    m = made(Loaded).to(dtype="float16")
    m.get_params()["W"].set_value(0.25)
    expected = m.predict(X)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m.imported))):
        imported = getattr(other, "imported", other)
        assert imported["W"].data.dtype == np.float16
        np.testing.assert_array_equal(to_numpy(forward(imported, [Tensor(data=X)])[0]), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_that_follow_from_an_input_or_a_default(dtype: str) -> None:
    """Bernoulli-15 does not take bfloat16 but returns it, and SequenceEmpty makes a sequence of float32 by default."""
    bernoulli = "p = Sub(x, x) u = Bernoulli(p) y = Add(u, x)"
    sequence = """s = SequenceEmpty()
        out = Loop(n, t, s) <body = b (int64 i, bool c, seq(float[2]) a) => (bool d, seq(float[2]) e) {
            d = Identity(c) e = SequenceInsert(a, x) }>
        y = ConcatFromSequence<axis = 0>(out)"""
    for body in (bernoulli, sequence):
        text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[k] y)
            <bool t = {{1}}, int64 n = {{1}}> {{ {body} }}"""
        m = sonnx.SONNXModel(parser.parse_model(text)).to(dtype=dtype)
        (y,) = m.forward(np.array([1, 2], np.float32))
        assert y.data.dtype.name == dtype and to_numpy(y).tolist() == [1, 2]
        if (body, dtype) != (sequence, "bfloat16"):  # no opset has sequences of bfloat16
            onnx.checker.check_model(sonnx.export(m), full_check=True)


def test_a_parameter_that_no_node_reads_changes_too() -> None:
    text = """<ir_version: 9, opset_import: ["": 20]> g (float[2] x) => (float[2] y)
        <float[2] w = {1, 2}, float[2] extra = {3, 4}> { y = Add(x, w) }"""
    m = sonnx.SONNXModel(parser.parse_model(text))
    m.to(dtype="float16").to(dtype="bfloat16").to(dtype="float64")
    assert {n: (t.data.dtype.name, to_numpy(t).tolist()) for n, t in m.get_states().items()} == {
        "w": ("float64", [1, 2]),
        "extra": ("float64", [3, 4]),
    }


@pytest.mark.parametrize("text", [
    "c = Constant<value_floats = [1.0, 2.0, 3.0]>() y = Add(x, c)",
    "n = Constant<value_ints = [3]>() c = ConstantOfShape(n) y = Add(x, c)",
    "n = Constant<value_int = 3>() c = HannWindow(n) y = Add(x, c)",
])  # fmt: skip
def test_constants_of_a_file_without_weights_do_not_become_parameters(text: str) -> None:
    proto = parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> g (float[3] x) => (float[3] y) {{ {text} }}')
    m = sonnx.SONNXModel(proto)
    x, names = np.arange(3, dtype=np.float32), list(m.get_states())
    expected = to_numpy(m.forward(x)[0])
    for dtype in ("float16", "float64"):
        m.to(dtype=dtype)
        (y,) = m.forward(x)
        assert list(m.get_states()) == names and y.data.dtype == np.dtype(dtype)
        np.testing.assert_allclose(to_numpy(y), expected, rtol=1e-3)
    again = pickle.loads(pickle.dumps(m.imported))
    assert list(again.tensors()) == names
    np.testing.assert_array_equal(to_numpy(forward(again, [x])[0]), to_numpy(y))


def test_the_model_of_an_importer_follows() -> None:
    m = sonnx.from_onnx(parser.parse_model(FILE))
    m.to(dtype="float64")
    assert m.onnx_model is not None and {t.data_type for t in m.onnx_model.graph.initializer} == {TensorProto.DOUBLE}
    assert m.onnx_model.graph.input[0].type.tensor_type.elem_type == TensorProto.DOUBLE


# --- errors


@pytest.mark.parametrize("kind", [Net, Loaded])
@pytest.mark.parametrize(("dtype", "code"), [
    ("int64", "SX388"), (np.bool_, "SX388"), ("float8_e4m3fn", "SX388"), ("complex64", "SX388"), ("nonsense", "SX316"),
])  # fmt: skip
def test_dtypes_that_are_refused(kind: Any, dtype: Any, code: str) -> None:
    m = made(kind)
    with pytest.raises(InvalidInput) as error:
        m.to(dtype=dtype)
    assert error.value.code == code
    np.testing.assert_array_equal(to_numpy(next(iter(m.get_params().values()))), W)


@pytest.mark.parametrize("kind", [Net, Loaded])
def test_a_value_that_does_not_fit_changes_nothing(kind: Any) -> None:
    m = made(kind)
    first, last = m.get_params().values()
    last.set_value(1e6)
    with pytest.raises(InvalidInput, match=r"65504.*float16, got 1e\+06") as error:
        m.to(dtype="float16")
    assert error.value.code == "SX388" and "bfloat16" in error.value.hint
    assert first.data.dtype == last.data.dtype == np.float32
    m.to(dtype="bfloat16")
    last.set_value(np.inf)
    m.to(dtype="float16")
    assert np.isinf(to_numpy(last)).all()


def test_a_layer_without_parameters_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Net must have its parameters") as error:
        Net().to(dtype="float64")
    assert error.value.code == "SX388"
