"""Everything of CUDA:1 is on the device of ordinal 1, on emulated devices: models, tensors, layers, optimizers, files."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakecuda
import numpy as np
import pytest
from click.testing import CliRunner
from onnx import helper, parser

import singa_backend
from singa import autograd, initializer, layer, opt, sonnx, tensor
from singa._core.ops import op
from singa.cli import main
from singa.device import Device, create_cpu_device, create_cuda_gpu_on
from singa.model import Model
from singa.tape import Operator
from singa.tensor import Tensor, to_numpy
from singa_backend.devices import device as devices
from singa_backend.interpreters.eager import Eager

pytestmark = pytest.mark.fakecuda
F = np.float32
X = np.random.default_rng(0).uniform(0.1, 0.9, (2, 4)).astype(F)

MODEL = parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 2] y)
    <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[2] shape = {-1, 2}>
    { p = MatMul(x, w)  r = Reshape(p, shape)  y = Softmax(r) }""")

LOOP = parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21]> g (int64 n, float[4] x) => (float[4] y, float[m, 4] all)
    { keep = Constant<value = bool {1}>()
      y, all = Loop <body = step (int64 i, bool c, float[4] v) => (bool d, float[4] w, float[4] s)
        { d = Identity(c)  w = Add(v, x)  s = Identity(w) }> (n, keep, x) }""")


@pytest.fixture(autouse=True)
def only_ordinal_1() -> Iterator[None]:
    """Every allocation of a test is on device 1; `emulated_devices` finds accesses from one device to the other."""
    import cupy

    places = set()

    def allocate(size: int) -> Any:
        places.add(int(cupy.cuda.Device().id))
        assert places == {1}  # here, so that the traceback shows who forgot the device
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)

    assert devices.resolve("CUDA:1").device_id == 1 and cupy.cuda.Device().id == 0
    gc.collect()
    before = fakecuda.used(0)
    usual = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(allocate)
    yield
    cupy.cuda.set_allocator(usual)
    assert (places, int(cupy.cuda.Device().id)) == ({1}, 0)
    assert fakecuda.used(0) <= before  # what earlier tests left may be freed


@pytest.fixture
def gpu() -> Device:
    found = create_cuda_gpu_on(1)
    found.SetRandSeed(3)
    return found


def ordinals(value: Any) -> set[int]:
    """The ordinals of the devices of all arrays in a value."""
    if isinstance(value, Tensor):
        return ordinals(value.data)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return {i for v in value for i in ordinals(v)}
    return {int(value.device.id)} if hasattr(value, "__cuda_array_interface__") else set()


# --- the backend


@pytest.mark.parametrize("options", [{}, {"validate": True}, {"aux_output": ["p"]}])
def test_a_model(options: dict[str, Any]) -> None:
    rep = singa_backend.prepare(MODEL, "CUDA:1")
    np.testing.assert_allclose(rep.run([X], **options)[0], singa_backend.run_model(MODEL, [X])[0], rtol=1e-5)
    assert ordinals([v for held in rep._session.states.values() for _, v in held]) == {1}


def test_copies_of_a_model() -> None:
    rep = singa_backend.prepare(MODEL, "CUDA:1")
    changed = rep.with_states({"w": rep.device.put(np.ones((4, 2), F))})
    for made in (pickle.loads(pickle.dumps(rep)), copy.deepcopy(rep), pickle.loads(pickle.dumps(changed))):
        assert str(made.device) == "CUDA:1" and made.run([X])[0].shape == (2, 2)
        assert ordinals([v for held in made._session.states.values() for _, v in held]) == {1}


def test_a_loop_and_single_nodes() -> None:
    for a, b in zip(*(singa_backend.run_model(LOOP, [np.int64(3), X[0]], d) for d in ("CPU", "CUDA:1")), strict=True):
        np.testing.assert_array_equal(a, b)
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"])
    for a, b in zip(*(singa_backend.run_node(node, [X, np.array([2])], d) for d in ("CPU", "CUDA:1")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_eager_operators_and_their_gradients() -> None:
    device = devices.resolve("CUDA:1")
    eager = Eager(device)
    x = device.put(X)
    made = [
        eager.Add(x, x),
        eager.Gather(x, [0, 1]),
        eager.ReduceSum(x, [0]),
        eager.constant(X),
        eager.OneHot([1, 2], 4, [0.0, 1.0]),
    ]
    assert ordinals(made) == {1}
    assert ordinals([device.copy(x), device.cast(x, np.int32), device.put([X, X])]) == {1}
    np.testing.assert_array_equal(device.get(made[0]), X + X)


# --- tensors


def test_tensors(gpu: Device) -> None:
    t, u = Tensor(data=X, device=gpu), Tensor((2, 4), gpu)
    made = [
        t, u, t + u, 2 - t, t / 3.0, t > 0.5, t @ t.transpose(), t[0], t[:, 1:3], abs(t), tensor.sum(t, 0), tensor.softmax(t),
        t.clone(), t.contiguous(), t.transpose().contiguous(), copy.deepcopy(t), pickle.loads(pickle.dumps(t)),
        Tensor(data=X, device=gpu).to_type("int"), Tensor(data=X).to_device(gpu), t.repeat(2, 0),
    ]  # fmt: skip
    assert ordinals(made) == {1} and all(m.device is gpu for m in made)
    np.testing.assert_allclose(to_numpy(made[6]), X @ X.T, rtol=1e-6)
    assert "device=CUDA:1" in repr(t) and float(tensor.sum(t)) == pytest.approx(X.sum())


def test_writes_in_place(gpu: Device) -> None:
    t = Tensor(data=X.copy(), device=gpu)
    t += 1.0
    np.testing.assert_allclose(to_numpy(t), X + 1)
    t *= t
    t.set_value(3.0)
    t.copy_from_numpy(np.ones(2, F), offset=1)
    t.copy_data(Tensor(data=X))
    np.testing.assert_array_equal(to_numpy(t), X)
    autograd.training = True
    result = autograd.add(t, Tensor(data=X, device=gpu, stores_grad=True))
    result.set_value(2.0)
    turned = t.transpose()
    turned.copy_from_numpy(np.zeros((4, 2), F))
    t.reset_like(t)
    for draw in (lambda: t.gaussian(0.0, 1.0), lambda: t.uniform(0.0, 1.0), lambda: t.bernoulli(0.5)):
        draw()
    assert ordinals([t, turned, result]) == {1}


@pytest.mark.parametrize("fill", [initializer.eye, initializer.orthogonal, initializer.he_normal, initializer.glorot_uniform])
def test_initial_values(fill: Callable[[Tensor], Tensor], gpu: Device) -> None:
    t, same = Tensor((3, 3), gpu), Tensor((3, 3))
    same.device.SetRandSeed(3)
    fill(t)
    fill(same)
    np.testing.assert_allclose(to_numpy(t), to_numpy(same), atol=1e-6)


class Twice(Operator):
    """An operator in Python, which computes with arrays of CuPy."""

    def forward(self, x: Any) -> Any:
        return x * 2

    def backward(self, dy: Any) -> Any:
        return dy * 2


def test_an_operator_in_python_and_gradients(gpu: Device) -> None:
    autograd.training = True
    x = Tensor(data=X, device=gpu, stores_grad=True)
    (y,) = Twice()(x)
    z = autograd.mul(y, x)
    ((_, g),) = autograd.backward(op.ReduceSum(z, keepdims=0))
    assert ordinals([y, g]) == {1}
    np.testing.assert_allclose(to_numpy(g), 4 * X, rtol=1e-6)
    w = autograd.mul(x, x)
    found = w.creator.backward(gpu.backend.put(np.ones_like(X)))
    assert ordinals(list(found) if isinstance(found, tuple) else [found]) == {1}
    rule = autograd.Clip(0.2, 0.6)
    assert ordinals([rule.forward(gpu.backend.put(X)), rule.backward(2.0)]) == {1}


# --- training


class Net(Model):
    """Each kind of state: parameters, statistics, the random stream, an optimizer's."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.conv, self.bn, self.pool = layer.Conv2d(2, 2), layer.BatchNorm2d(), layer.MaxPool2d(2, 1)
        self.flat, self.fc, self.optimizer = layer.Flatten(), layer.Linear(3), rule

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.dropout(autograd.relu(self.bn(self.conv(x))), ratio=0.25)
        return self.fc(self.flat(self.pool(y)))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


IMAGES = np.random.default_rng(1).standard_normal((3, 1, 4, 4)).astype(F)
LABELS = np.arange(3, dtype=np.int32)


def trained(device: Device, rule: Any, graph: bool) -> tuple[Net, list[float]]:
    device.SetRandSeed(5)
    m = Net(rule())
    x, t = Tensor(data=IMAGES, device=device, requires_grad=False), Tensor(data=LABELS, device=device, requires_grad=False)
    m.compile([x], is_train=True, use_graph=graph)
    return m, [float(to_numpy(m(x, t)[1]).reshape(-1)[0]) for _ in range(3)]


RULES = {
    "SGD": lambda: opt.SGD(opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9, weight_decay=1e-3),
    "Adam": lambda: opt.Adam(0.01),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_training_and_its_files(rule: str, graph: bool, gpu: Device, tmp_path: Path) -> None:
    m, losses = trained(gpu, RULES[rule], graph)
    np.testing.assert_allclose(losses, trained(create_cpu_device(), RULES[rule], graph)[1], rtol=1e-5)
    x = Tensor(data=IMAGES, device=gpu, requires_grad=False)
    m.save_states(str(tmp_path / "states.zip"))
    kept = {n: to_numpy(t) for n, t in m.optimizer.get_states().items()}
    other, _ = trained(gpu, RULES[rule], graph)
    other.load_states(str(tmp_path / "states.zip"))
    other.optimizer.set_states(m.optimizer.get_states())
    for made in (m, other, pickle.loads(pickle.dumps(m)), copy.deepcopy(m)):
        made.eval()
        assert ordinals([made(x), made.get_states(), made.optimizer.get_states()]) == {1}
        np.testing.assert_array_equal(to_numpy(made(x)), to_numpy(m(x)))
        for n, t in made.optimizer.get_states().items():
            np.testing.assert_array_equal(to_numpy(t), kept[n])


def test_a_model_that_is_moved(gpu: Device) -> None:
    m, _ = trained(create_cpu_device(), RULES["Adam"], False)
    m.to(device="CUDA:1")
    x, t = Tensor(data=IMAGES, device=gpu, requires_grad=False), Tensor(data=LABELS, device=gpu, requires_grad=False)
    m(x, t)
    assert ordinals([m.get_states(), m.optimizer.get_states()]) == {1}
    assert all(p.device is gpu for p in m.get_states().values())


def test_a_model_from_a_file_and_a_file_from_a_model(gpu: Device, tmp_path: Path) -> None:
    m, _ = trained(gpu, RULES["SGD"], False)
    m.eval()
    x = Tensor(data=IMAGES, device=gpu, requires_grad=False)
    path = tmp_path / "net.onnx"
    sonnx.save(sonnx.to_onnx([x], m(x)), str(path))
    imported = sonnx.SONNXModel(path, device="CUDA:1")
    np.testing.assert_allclose(to_numpy(imported(x)[0]), to_numpy(m(x)), rtol=1e-5)
    assert ordinals(imported.get_states()) == {1}


def test_the_command_that_trains_and_resumes(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y)'
        "<float[4, 3] w = {1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0}, float[3] b = {0, 0, 0}> { p = MatMul(x, w) \n y = Add(p, b) }"
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((6, 4)).astype(F), y=np.arange(6) % 3)
    fixed = [str(tmp_path / "m.onnx"), "--data", str(tmp_path / "data.npz"), "--batch-size", "3", "--device", "CUDA:1"]
    fixed += ["--optimizer", "adam", "--checkpoint", str(tmp_path / "run.zip"), "-o", str(tmp_path / "out.onnx")]
    for more in (["--epochs", "1"], ["--epochs", "2", "--resume"]):
        done = CliRunner().invoke(main, ["train", *fixed, *more])
        assert done.exit_code == 0, done.output
