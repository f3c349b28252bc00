"""The stages of `sonnx device-check` at the sizes of use: real widths, large arrays, threads and streams, speed.

On an emulated device the sizes are reduced: what it computes there is right or wrong, but says nothing of speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from onnx import parser

from ..backend import SingaBackend
from ..comparison import tolerances
from ..comparison.verdict import same_bits
from ..devices.device import Device, resolve
from ..interpreters.eager import Eager
from ..limits import Limits
from . import device_check_peers, device_models
from .device_check import CheckSetup, Wrong
from .device_check_peers import seconds

THREADS = 8
"""The threads of the stage `threads`."""


@dataclass(frozen=True)
class _Sizes:
    """What the stages compute.

    Attributes:
        models: The models, in the order in which they run.
        large: The elements of the largest array.
        terms: The terms of reductions.
        copy: The bytes of a copy.
        chain: The bytes of the arrays of a chain of operators, which take the device longer than the host takes for a run.
        side: The rows of a square product.
        launches: How many small kernels are launched.
    """

    models: dict[str, Callable[[], device_models.Built]]
    large: int
    terms: int
    copy: int
    chain: int
    side: int
    launches: int


_WHOLE = _Sizes(
    {
        "ResNet-50": device_models.resnet50,
        "BERT-base": device_models.bert,
        "GPT-2, one token": device_models.gpt2,
        "LSTM": device_models.lstm,
    },
    large=2**31 + 64,
    terms=10**7,
    copy=1 << 28,
    chain=1 << 29,
    side=4096,
    launches=2000,
)
_REDUCED = _Sizes(
    {
        "ResNet-50": partial(device_models.resnet50, width=4, size=32, classes=10),
        "BERT-base": partial(device_models.bert, layers=2, width=32, heads=4, length=8, words=50),
        "GPT-2, one token": partial(device_models.gpt2, layers=2, width=32, heads=4, past=8, words=50),
        "LSTM": partial(device_models.lstm, length=4, width=8, batch=2),
    },
    large=2**12 + 64,
    terms=20_000,
    copy=1 << 14,
    chain=1 << 14,
    side=32,
    launches=20,
)
_NO_LIMITS = Limits(tensor_bytes=1 << 62, live_bytes=1 << 62)

_MOST = tolerances.DEVICE.bound(np.dtype(np.float32)).rtol
"""The largest difference of float32 outputs, as a share of the largest one, and of sums, as a share of the magnitudes."""


def _sizes(device: Device) -> tuple[_Sizes, bool]:
    """The sizes for a device, and whether it is real."""
    real = device.type == "CUDA" and not _name(device).startswith("emulated")
    return (_WHOLE if real else _REDUCED), real


def _name(device: Device) -> str:
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(device.device_id)["name"].decode())


# --- sizes --------------------------------------------------------------------------------------------------------------


def sizes(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Compare models of real widths with the CPU, reductions of many terms with float64, and an array of 2**31 elements."""
    device = resolve(setup.device)
    chosen, real = _sizes(device)
    details["reduced"] = not real
    for name, build in chosen.models.items():
        model, inputs = build()
        there, here = (SingaBackend.prepare(model, d, limits=_NO_LIMITS).run(inputs) for d in (setup.device, "CPU"))
        details[name] = _distance(there, here)
        if details[name] > _MOST:
            raise Wrong(f"{name}: the outputs must be within {_MOST:g} of those of the CPU, got {details[name]:.3g}")
    _reductions(device, chosen.terms, details)
    _large(device, chosen.large, details)


def _distance(there: Sequence[Any], here: Sequence[Any]) -> float:
    """The largest difference of outputs, as a share of the largest magnitude of each."""
    shares = []
    for a, b in zip(there, here, strict=True):
        if np.shape(a) != np.shape(b) or not np.isfinite(a).all():
            return float("inf")
        shares.append(float(np.abs(np.asarray(a, np.float64) - b).max() / max(np.abs(b).max(), 1e-30)))
    return max(shares)


def _reductions(device: Device, terms: int, details: dict[str, Any]) -> None:
    """Reduce many terms, of whole arrays, rows and columns."""
    x = np.random.default_rng(0).uniform(-1, 1, terms // 100 * 100).astype(np.float32)
    with device.active():
        op = Eager(device)
        worst = 0.0
        for shape, axis in (((1, -1), 1), ((100, -1), 1), ((-1, 100), 0)):
            view = x.reshape(shape)
            there, axes = device.put(view), device.put(np.array([axis]))
            wide = view.astype(np.float64)
            size = np.abs(wide).sum(axis, keepdims=True)
            found = device.get(op.ReduceSum(there, axes))
            worst = max(worst, float((np.abs(found - wide.sum(axis, keepdims=True)) / size).max()))
            for name, reduce in (("ReduceMax", np.max), ("ReduceMin", np.min)):
                if not np.array_equal(device.get(getattr(op, name)(there, axes)), reduce(view, axis=axis, keepdims=True)):
                    raise Wrong(f"{name} of {view.shape} over axis {axis} must be exact")
            if not np.array_equal(device.get(op.ArgMax(there, axis=axis)), view.argmax(axis, keepdims=True)):
                raise Wrong(f"ArgMax of {view.shape} over axis {axis} must be the first maximum")
            if not same_bits(found, device.get(op.ReduceSum(there, axes))):
                raise Wrong(f"two sums of {view.shape} over axis {axis} must have equal bits")
    details["terms"], details["largest error of a sum, as a share of the magnitudes"] = x.size, worst
    if worst > _MOST:
        raise Wrong(f"a sum must be within {_MOST:g} of the magnitudes of its terms, got {worst:.3g}")


def _large(device: Device, elements: int, details: dict[str, Any]) -> None:
    """Compute with an array whose indices need more than 31 bits; the last elements are read."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (int64[1] n, int64[1] start) => (uint8[m] y, int64[k] count)
        <int64[1] end = {9223372036854775807}, int64[1] first = {0}> {
        zeros = ConstantOfShape <value: tensor = uint8[1] {7}> (n)
        twice = Add(zeros, zeros) y = Slice(twice, start, end, first) count = Shape(twice) }"""
    model = SingaBackend.prepare(parser.parse_model(text), str(device), limits=_NO_LIMITS)
    y, count = model.run([np.array([elements]), np.array([elements - 5])])
    details["elements of the largest array"] = elements
    if y.tolist() != [14] * 5 or count.tolist() != [elements]:
        raise Wrong(f"the last elements of an array of {elements} must be 14, got {y.tolist()} of {count.tolist()}")


# --- threads ------------------------------------------------------------------------------------------------------------


def threads(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Run one model from several threads, on another stream, and with arrays of PyTorch if it is installed."""
    device = resolve(setup.device)
    model, inputs = _REDUCED.models["BERT-base"]()
    rep = SingaBackend.prepare(model, setup.device)
    first = rep.run(inputs)
    start = threading.Barrier(THREADS)

    def run(_: int) -> list[Any]:
        start.wait()
        return [rep.run(inputs) for _ in range(3)]

    with ThreadPoolExecutor(THREADS) as pool:
        for results in pool.map(run, range(THREADS)):
            for result in results:
                if _differ(result, first):
                    raise Wrong(f"a run of one of {THREADS} threads must have the bits of a run alone")
    details["threads"], details["runs"] = THREADS, 3 * THREADS
    if device.type == "CUDA":
        _other_stream(device, rep, inputs, first)
        details["streams"] = "a run on another stream has the same bits"
        details["PyTorch"] = _with_torch(device)


def _differ(result: Any, first: Any) -> bool:
    """Whether the outputs of two runs differ in a bit."""
    return not same_bits([*result], [*first])


def _other_stream(device: Device, rep: Any, inputs: dict[str, np.ndarray], first: Sequence[Any]) -> None:
    """Run on a stream that does not wait for the default one, between events."""
    import cupy

    with device.active():
        placed = {n: device.put(x) for n, x in inputs.items()}
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with stream:
            outputs = rep.run(placed, to_host=False)
        stream.synchronize()
        if _differ([device.get(y) for y in outputs], first):
            raise Wrong("a run on another stream must have the bits of a run on the default stream")


def _with_torch(device: Device) -> str:
    """Pass a PyTorch array of the device, which its own stream computes, without a copy."""
    if find_spec("torch") is None:
        return "not installed"
    torch: Any = import_module("torch")

    if not torch.cuda.is_available():
        return "without CUDA"
    x = torch.arange(6, dtype=torch.float32, device=f"cuda:{device.device_id}").reshape(2, 3) * 2
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }'
    (y,) = SingaBackend.prepare(parser.parse_model(text), str(device)).run([x], to_host=False)
    back = torch.from_dlpack(y)
    if back.tolist() != (x + x).tolist():
        raise Wrong(f"the sum of a PyTorch array with itself must be {(x + x).tolist()}, got {back.tolist()}")
    return str(torch.__version__)


# --- speed --------------------------------------------------------------------------------------------------------------

_LEAST = {
    "chain as operators, GB/s": ("copy, GB/s", 0.6),
    "chain as a model, GB/s": ("copy, GB/s", 0.6),
    "copy, GB/s": ("roofline, GB/s", 0.1),
    "product, TFLOP/s": ("roofline, TFLOP/s", 0.1),
}
"""For each speed that is judged, the speed that it is compared with, and the least share of that one."""

PASSES = {"copy": 2, "chain as operators": 7, "chain as a model": 2}
"""How often the memory of one array is read or written: `Add(x, x)` reads `x` once, and the nodes of the model are one kernel."""

_CHAIN = """<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { a = Add(x, x) b = Mul(a, x) y = Relu(b) }"""

_CALLS = 10
"""The calls between two waits, where the host's time of a call must not count."""


def speed(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Record the speed of a copy, a chain of operators, a product, launches and models, and judge them by `_LEAST`.

    The copy is one of the driver, from the device to the device; it is what a chain can reach.  The roofline is the device's own:
    the bandwidth of its memory, and its cores, by the properties that CUDA reports.  An emulated device, or one that is not CUDA,
    is not judged.
    """
    device = resolve(setup.device)
    chosen, real = _sizes(device)
    details["judged"], details["passes"] = real, PASSES
    with device.active():
        rates = _primitives(device, chosen)
    details |= {name: round(value, 3) for name, value in rates.items()}
    for name, build in chosen.models.items():
        model, inputs = build()
        rep = SingaBackend.prepare(model, setup.device, limits=_NO_LIMITS)
        placed = {n: device.put(x) for n, x in inputs.items()}
        details[f"{name}, ms"] = round(1e3 * seconds(partial(rep.run, placed, to_host=False), partial(_wait, device)), 3)
    if not real:
        return
    details |= device_check_peers.measure(f"cuda:{device.device_id}", chosen.copy, chosen.chain, chosen.side, setup.deadline / 6)
    roofline = _roofline(device)
    details["roofline, GB/s"], details["roofline, TFLOP/s"] = (
        round(roofline["roofline, GB/s"]),
        round(roofline["roofline, TFLOP/s"], 1),
    )
    shares = {name: rates[name] / (rates | roofline)[of] for name, (of, _) in _LEAST.items()}
    details["least"] = {name: {"of": of, "share": least, "got": round(shares[name], 3)} for name, (of, least) in _LEAST.items()}
    if slow := [f"{n}: {shares[n]:.3g} of {of}" for n, (of, least) in _LEAST.items() if shares[n] < least]:
        raise Wrong(f"the speeds must be the shares in `least`, got {', '.join(slow)}")


def _wait(device: Device) -> None:
    if device.type == "CUDA":
        import cupy

        with device.active():
            cupy.cuda.Device().synchronize()


def _copy(device: Device, to: Any, x: Any) -> None:
    """Copy an array as the driver does: `copy` of CuPy is a kernel."""
    if device.type == "CUDA":
        to.data.copy_from_device_async(x.data, x.nbytes)
    else:
        device.write(to, x)


def _primitives(device: Device, chosen: _Sizes) -> dict[str, float]:
    op = Eager(device)
    copied, x = (device.put(np.ones(size // 4, np.float32)) for size in (chosen.copy, chosen.chain))
    one = device.put(np.ones(1, np.float32))
    a = device.put(np.ones((chosen.side, chosen.side), np.float32))
    # a graph, which `optimize=0` prevents, would copy x and y
    model = SingaBackend.prepare(parser.parse_model(_CHAIN), str(device), limits=_NO_LIMITS, optimize=0)
    moved: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (chosen.copy, partial(_copy, device, device.copy(copied), copied)),
        "chain as operators": (chosen.chain, lambda: op.Relu(op.Mul(op.Add(x, x), x))),
        "chain as a model": (chosen.chain, lambda: model.run([x], to_host=False)),
    }

    def launches() -> None:
        y = one
        for _ in range(chosen.launches):
            y = op.Add(y, one)

    wait = partial(_wait, device)
    rates = {f"{n}, GB/s": PASSES[n] * size / seconds(run, wait, _CALLS) / 1e9 for n, (size, run) in moved.items()}
    rates["product, TFLOP/s"] = 2 * chosen.side**3 / seconds(lambda: op.MatMul(a, a), wait, _CALLS) / 1e12
    return rates | {"operators, thousand/s": chosen.launches / seconds(launches, wait) / 1e3}


def _roofline(device: Device) -> dict[str, float]:
    """The GB/s of the memory and the TFLOP/s of float32 of a CUDA device, by its clocks and widths."""
    import cupy

    runtime = cupy.cuda.runtime
    names = ("ClockRate", "MemoryClockRate", "GlobalMemoryBusWidth", "MultiProcessorCount")
    clock, memory_clock, width, processors = (
        int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), device.device_id)) for name in names
    )
    cores = 64 if int(cupy.cuda.Device(device.device_id).compute_capability) < 80 else 128  # of a multiprocessor, at most
    return {
        "roofline, GB/s": 2 * memory_clock * 1e3 * width / 8 / 1e9,
        "roofline, TFLOP/s": 2 * cores * processors * clock * 1e3 / 1e12,
    }
