"""The stages of `sonnx device-check`: those of the backend, and those that train and use SINGA's API."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import parser

from singa import autograd, layer, opt, tensor
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa.device import Device
from singa.model import Model
from singa.sonnx import to_onnx
from singa_backend import SingaBackend
from singa_backend.comparison.verdict import same_bits
from singa_backend.conform import device_check_capture
from singa_backend.conform import device_check_load as load
from singa_backend.conform import device_check_stages as backend
from singa_backend.conform.device_check import CheckSetup, CheckStage, OneDevice, Wrong
from singa_backend.devices.device import device_count, resolve
from singa_backend.interpreters.eager import Eager

STEPS = 1000
"""The steps of the stage that watches the memory."""


# --- training programs --------------------------------------------------------------------------------------------------


class _Program(Model):
    """A model whose loss is cross entropy."""

    optimizer: opt.Optimizer

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


class Perceptron(_Program):
    """Two linear layers; SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(8), layer.Linear(3)
        self.optimizer = opt.SGD(lr=0.1, momentum=0.9)

    def forward(self, x: Tensor) -> Any:
        return self.second(autograd.relu(self.first(x)))


class Convolutions(_Program):
    """A convolution, normalization and pooling; Adam.

    The convolution has no bias: normalization makes its gradient 0 but for rounding, which Adam would enlarge.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(4, 3, padding=1, bias=False)
        self.norm, self.pool = layer.BatchNorm2d(), layer.MaxPool2d(2, 2)
        self.flat, self.out = layer.Flatten(), layer.Linear(3)
        self.optimizer = opt.Adam(lr=0.01)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.flat(self.pool(autograd.relu(self.norm(self.conv(x))))))


class Words(_Program):
    """An embedding, whose gradient adds to equal rows, and normalization; RMSProp."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = layer.Embedding(6, 5), layer.LayerNorm(), layer.Linear(3)
        self.optimizer = opt.RMSProp(lr=0.01)

    def forward(self, x: Tensor) -> Any:
        return self.out(op.ReduceMean(self.norm(self.table(x)), [1], keepdims=0))


_RNG = np.random.default_rng(0)
PROGRAMS: dict[type[_Program], np.ndarray] = {
    Perceptron: _RNG.standard_normal((4, 6)).astype(np.float32),
    Convolutions: _RNG.standard_normal((4, 2, 6, 6)).astype(np.float32),
    Words: np.array([[0, 1, 1, 1], [5, 0, 0, 2], [3, 3, 3, 3], [2, 1, 0, 5]], np.int32),
}
"""The programs and their inputs."""
_CLASSES = np.array([0, 1, 2, 1], np.int32)


def _compiled(program: type[_Program]) -> _Program:
    """The program with its parameters, on the CPU."""
    made = program()
    made.compile([tensor.from_numpy(PROGRAMS[program])], is_train=True)
    return made


def _on(start: _Program, device: str, graph: bool) -> tuple[_Program, Tensor, Tensor]:
    """A copy of a program on a device, and its batch."""
    model = copy.deepcopy(start).to(device=device)
    model.graph(graph)
    there = Device(*_parts(device))
    return model, tensor.from_numpy(PROGRAMS[type(start)], there), tensor.from_numpy(_CLASSES, there)


def _parts(device: str) -> tuple[str, int]:
    found = resolve(device)
    return found.type, found.device_id


def _trained(start: _Program, device: str, graph: bool, steps: int = 3) -> list[np.ndarray]:
    """The losses of some steps, and the parameters and states after them."""
    model, x, t = _on(start, device, graph)
    losses = [model(x, t)[1].numpy().reshape(()) for _ in range(steps)]
    return [*losses, *(v.numpy() for _, v in sorted(model.get_states().items()))]


def training(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Train three programs on the tape and as a graph; losses and states must be those of the CPU."""
    resolve(setup.device)
    for program in PROGRAMS:
        start = _compiled(program)
        for graph in (False, True):
            name = f"{program.__name__}, {'graph' if graph else 'tape'}"
            here, there = _trained(start, "CPU", graph), _trained(start, setup.device, graph)
            details[name] = [float(v) for v in there[:3]]
            if why := backend.unlike(there, here):
                raise Wrong(f"{name}: {why}")
            if not here[2] < here[0]:
                raise Wrong(f"{name}: the loss must decrease, got {[float(v) for v in here[:3]]}")


def determinism(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Run twice what sums in an order that a device may choose: forward passes, training and sums over equal indices."""
    resolve(setup.device)
    for program in PROGRAMS:
        start = _compiled(program)
        for graph in (False, True):
            runs = [_trained(start, setup.device, graph) for _ in range(2)]
            if not same_bits(*runs):
                raise Wrong(f"{program.__name__}, {'graph' if graph else 'tape'}: two trainings must have equal bits")
        model, x, _ = _on(start, setup.device, False)
        model.eval()
        if not same_bits(*(model(x).numpy() for _ in range(2))):
            raise Wrong(f"{program.__name__}: two forward passes must have equal bits")
        model.train()
    rng = np.random.default_rng(1)
    inputs = [np.zeros(7, np.float32), rng.integers(0, 7, 5000), (rng.standard_normal(5000) * 1e3).astype(np.float32)]
    device = resolve(setup.device)
    with device.active():
        interpreter = Eager(device)
        sums = [device.get(interpreter.ScatterElements(*map(device.put, inputs), reduction="add")) for _ in range(10)]
    if not all(same_bits(s, sums[0]) for s in sums):
        raise Wrong("10 sums of 5000 updates over 7 indices must have equal bits")
    details["programs"], details["scatter_runs"] = len(PROGRAMS), len(sums)


# --- two devices, memory ------------------------------------------------------------------------------------------------


def two_devices(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Run a model and train on each of the first two devices: equal bits, and every array on the device that was named."""
    kind = resolve(setup.device).type
    details["devices"] = device_count(kind)
    if details["devices"] < 2:
        raise OneDevice(f"the machine has one {kind} device: nothing was tested on a second one")
    start = _compiled(Perceptron)
    trained, ran = [], []
    model = parser.parse_model(backend.MODEL)
    for ordinal in (1, 0):
        name = f"{kind}:{ordinal}"
        there = resolve(name)
        x = tensor.from_numpy(np.ones(3, np.float32), Device(kind, ordinal))
        (y,) = SingaBackend.prepare(model, name).run([np.ones((2, 3), np.float32)], to_host=False)
        net, *batch = _on(start, name, True)
        _, loss = net(*batch)
        arrays = {
            "Device.put": there.put(np.ones(3, np.float32)),
            "a tensor": x.data,
            "the sum of two tensors": op.Add(x, x).data,
        }
        arrays |= {"an output of a model": y, "the loss of a training": loss.data}
        arrays |= {f"the state {n} of a training": t.data for n, t in net.get_states().items()}
        for what, value in arrays.items():
            place = int(value.device.id)
            if place != ordinal:
                raise Wrong(f"{what} of {name} must be on device {ordinal}, got device {place}")
        ran.append(there.get(y))
        trained.append(_trained(start, name, True))
    if not same_bits(*ran):
        raise Wrong("a model must return equal bits on both devices")
    if why := backend.unlike(*trained):
        raise Wrong(f"a training must return the same on both devices: {why}")


def memory(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Train for 1,000 steps as a graph: the memory in use must not change after the first hundred."""
    device = resolve(setup.device)
    model, x, t = _on(_compiled(Perceptron), setup.device, True)
    details["steps"], details["samples"] = STEPS, watched(lambda: model(x, t), device, STEPS)
    judge_memory(details["samples"])


def watched(step: Callable[[], Any], device: Any, steps: int) -> dict[str, list[int]]:
    """Repeat a step, and read the memory in use after each tenth of the steps.

    Args:
        step: The step.
        device: The device that it uses.
        steps: The number of steps.

    Returns:
        The bytes of CuPy's pool that are in use, those that it holds, and those in use on the device.
    """
    import cupy

    pool = cupy.get_default_memory_pool()
    samples: dict[str, list[int]] = {"pool_used": [], "pool_held": [], "device_used": []}
    for i in range(1, steps + 1):
        step()
        if i % (steps // 10) == 0:
            gc.collect()
            with device.active():
                cupy.cuda.Device().synchronize()
                free, total = cupy.cuda.runtime.memGetInfo()
                samples["pool_used"].append(int(pool.used_bytes()))
                samples["pool_held"].append(int(pool.total_bytes()))
            samples["device_used"].append(int(total - free))
    return samples


def judge_memory(samples: dict[str, list[int]]) -> None:
    """Raise Wrong if the memory in use grew after the first sample.

    The pool is judged if it is used: another process may use the device meanwhile.
    """
    for name in ("pool_used", "pool_held") if any(samples["pool_held"]) else ("device_used",):
        first, *_, last = samples[name]
        if last > first:
            raise Wrong(f"the memory in use must be constant, got {name} from {first} to {last} bytes")


# --- SINGA's API --------------------------------------------------------------------------------------------------------


def api(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Use tensors, the tape, states and files on the device, and compare with NumPy."""
    device = Device(*_parts(setup.device))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((4, 5)).astype(np.float32) for _ in range(2))
    x, y = tensor.from_numpy(a, device), tensor.from_numpy(b, device)
    checks: dict[str, tuple[Any, Any]] = {
        "+": (x + y, a + b),
        "-": (x - 2.0, a - 2),
        "*": (x * y, a * b),
        "/": (x / y, a / b),
        "@": (x @ tensor.transpose(y), a @ b.T),
        "[]": (x[1:3, 2:], a[1:3, 2:]),
        "<": (x < y, a < b),
        "sum": (x.sum(axis=1), a.sum(1)),
        "max": (x.max(axis=0), a.max(0)),
        "reshape": (x.reshape((5, 4)), a.reshape(5, 4)),
        "concatenate": (tensor.concatenate([x, y], 1), np.concatenate([a, b], 1)),
        "as_type": (x.as_type(np.float64), a.astype(np.float64)),
        "to_host": (tensor.to_host(x), a),
        "softmax": (tensor.softmax(x), np.exp(a) / np.exp(a).sum(1, keepdims=True)),
        "gradient": (_slope(a, device), 2 * a),
    }
    for name, (found, expected) in checks.items():
        if why := backend.unlike(found.numpy(), np.asarray(expected, found.numpy().dtype)):
            raise Wrong(f"{name}: {why}")
    drawn = [_drawn(device) for _ in range(2)]
    if not same_bits(*drawn) or not same_bits(drawn[0], _drawn(Device("CPU"))):
        raise Wrong("random numbers of one seed must be the same on the device and on the CPU")
    _files(setup)
    details["checks"] = [*checks, "random numbers", "save_states", "to_onnx"]


def _slope(a: np.ndarray, device: Device) -> Tensor:
    tape.training = True
    try:
        x = Tensor(data=a, device=device, stores_grad=True)
        loss = op.ReduceSum(op.Mul(x, x), keepdims=0)
        (_, slope), *_ = autograd.backward(loss)
        found: Tensor = slope
        return found
    finally:
        tape.training = False


def _drawn(device: Device) -> np.ndarray:
    device.SetRandSeed(7)
    found: np.ndarray = Tensor((3, 4), device).gaussian(0.0, 1.0).numpy()
    return found


def _files(setup: CheckSetup) -> None:
    """States and an exported model that leave the device and return."""
    model, x, t = _on(_compiled(Perceptron), setup.device, False)
    model(x, t)
    model.eval()
    y = model(x)
    expected = y.numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states.zip"
        model.save_states(str(path))
        again = _on(_compiled(Perceptron), setup.device, False)[0]
        again.load_states(str(path))
    again.eval()
    if not same_bits(again(x).numpy(), expected):
        raise Wrong("save_states, load_states: the outputs must have equal bits")
    found = SingaBackend.prepare(to_onnx([x], [y]), setup.device).run([PROGRAMS[Perceptron]])[0]
    if why := backend.unlike(found, expected):
        raise Wrong(f"to_onnx: {why}")


VERSIONS = "versions"
"""The stage that always runs: results without the names and versions of what was tested are worth nothing."""

STAGES = (
    CheckStage(VERSIONS, backend.versions, 60),
    CheckStage("smoke", backend.smoke, 120),
    CheckStage("kernels", backend.kernels, 240),
    CheckStage("products", backend.products, 120),
    CheckStage("traps", backend.traps, 120),
    CheckStage("suite", backend.suite, 240),
    CheckStage("gradients", backend.gradient, 120),
    CheckStage("training", training, 120),
    CheckStage("determinism", determinism, 120),
    CheckStage("devices", two_devices, 120),
    CheckStage("memory", memory, 120),
    CheckStage("out-of-memory", backend.out_of_memory, 120),
    CheckStage("api", api, 120),
    CheckStage("threads", load.threads, 120),
    CheckStage("capture", device_check_capture.capture, 120),
    CheckStage("sizes", load.sizes, 240),
    CheckStage("speed", load.speed, 240),
)
"""The stages, in their order, and the seconds that each may take."""
