"""The stage `capture` of `sonnx device-check`: whether CUDA graphs work with this driver, these libraries and CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ..backend import SingaBackend
from ..comparison.verdict import same_bits
from ..devices.device import Device, resolve
from . import device_models
from .device_check import CheckSetup, Wrong

REPLAYS = 100
"""How often each graph is launched."""

Array = Any  # of CuPy
_Work = Callable[[Array], Array]

_SIDE = 64  # of the square matrices on which everything is computed


class SmokeGraph:
    """A function of one array that is captured as a CUDA graph, which reads and writes fixed arrays.

    Attributes:
        x: the array that is read.
        y: the array that is written.

    Args:
        module: CuPy.
        work: the function.
        x: the first values of `x`, of the host; or an array of the device, which is then `x`.

    Raises:
        Exception: the capture was refused.
    """

    def __init__(self, module: Any, work: _Work, x: Any) -> None:
        self._stream, self._pool = module.cuda.Stream(non_blocking=True), module.cuda.MemoryPool()
        with self._stream, module.cuda.using_allocator(self._pool.malloc):
            self.x = module.asarray(x)
            work(self.x)  # compiles kernels and makes the handles of libraries, which a capture cannot do
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                self.y = work(self.x)
            except BaseException:
                with suppress(Exception):  # the capture is invalid
                    self._stream.end_capture()
                raise
            self._graph = self._stream.end_capture()

    def write(self, x: np.ndarray) -> None:
        """Replace the values of `x`."""
        self.x.set(x, stream=self._stream)

    def launch(self, stream: Any = None) -> None:
        """Launch the graph, on its own stream by default."""
        self._graph.launch(stream or self._stream)

    def read(self) -> np.ndarray:
        """The values of `y` on the host."""
        found: np.ndarray = self.y.get(stream=self._stream)
        return found


def smoke_works(device: Device) -> dict[str, tuple[_Work, bool]]:
    """What is captured: one function for each kind of work on a device.

    Args:
        device: the device.

    Returns:
        The functions by name, and whether it is wrong that a capture refuses one.
    """
    import cupy

    def copied(x: Array) -> Array:
        y = cupy.empty_like(x)
        y.data.copy_from_device_async(x.data, x.nbytes)
        return y

    def sums(x: Array) -> Array:
        return cupy.concatenate([x.sum().reshape(1), x.sum(axis=1)])

    return {
        "product": (lambda x: device.xp.matmul(x, x), True),
        "products of a stack": (lambda x: device.xp.matmul(x.reshape(4, 16, _SIDE), x.reshape(4, _SIDE, 16)), True),
        "chain": (lambda x: cupy.maximum((x + x) * x, 0), True),
        "reductions (cub)": (sums, True),
        "copy of the driver": (copied, True),
        "sort (thrust)": (lambda x: cupy.sort(x.ravel()), False),
        "transform (cuFFT)": (cupy.fft.fft, False),
    }


def inputs() -> list[np.ndarray]:
    """Three inputs of the functions of `smoke_works`."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((_SIDE, _SIDE)).astype(np.float32) for _ in range(3)]


def capture(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Capture functions and launch their graphs again and again, alone, in turn and on two streams, then run a model.

    Every result must have the bits of the function without a capture.  A capture that must fail must leave the device usable.
    """
    device = resolve(setup.device)
    with device.active():
        graphs = smoke(device, details)
        _in_turn(device, graphs, details)
        _on_two_streams(device, details)
        _failures(device, graphs, details)
    _model(setup.device, details)


def smoke(device: Device, details: dict[str, Any]) -> dict[str, SmokeGraph]:
    """Capture and replay each function of `smoke_works`.

    Args:
        device: the device.
        details: receives a line for each function.

    Returns:
        The graphs of those that were captured.

    Raises:
        Wrong: a function that must be captured was refused, or a replay has other bits.
    """
    import cupy

    details["replays"] = REPLAYS
    graphs, samples, wrong = {}, inputs(), []
    for name, (work, needed) in smoke_works(device).items():
        want = _uncaptured(cupy, work, samples)
        try:
            graph = SmokeGraph(cupy, work, samples[0])
        except Exception as error:
            details[name] = f"refused: {type(error).__name__}: {error}"
            wrong += [f"{name}: {details[name]}"] * needed
            continue
        late = next((i for i in range(REPLAYS) if not same_bits(_replayed(graph, samples[i % 3]), want[i % 3])), None)
        details[name] = "equal bits" if late is None else f"replay {late} has other bits"
        wrong += [] if late is None else [f"{name}: {details[name]}"]
        graphs[name] = graph
    if wrong:
        raise Wrong(f"work must be captured and replayed with equal bits, got {'; '.join(wrong)}")
    return graphs


def _uncaptured(cupy: Any, work: _Work, samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [work(cupy.asarray(x)).get() for x in samples]


def _replayed(graph: SmokeGraph, x: np.ndarray) -> np.ndarray:
    graph.write(x)
    graph.launch()
    return graph.read()


def _in_turn(device: Device, graphs: dict[str, SmokeGraph], details: dict[str, Any]) -> None:
    """Launch all graphs, which are alive together, before the results of any are read."""
    import cupy

    samples, works = inputs(), smoke_works(device)
    wants = {name: _uncaptured(cupy, works[name][0], samples) for name in graphs}
    for i in range(REPLAYS):
        for at, graph in enumerate(graphs.values()):
            graph.write(samples[(i + at) % 3])
            graph.launch()
        for at, (name, graph) in enumerate(graphs.items()):
            if not same_bits(graph.read(), wants[name][(i + at) % 3]):
                raise Wrong(f"{name}: round {i} of {len(graphs)} graphs in turn has other bits than the graph alone")
    details["graphs in turn"] = len(graphs)


def _on_two_streams(device: Device, details: dict[str, Any]) -> None:
    """Launch two graphs on two streams: the second reads what the first writes, and events order them."""
    import cupy

    works, samples = smoke_works(device), inputs()
    first, second = works["chain"][0], works["reductions (cub)"][0]
    want = _uncaptured(cupy, lambda x: second(first(x)), samples)
    writer = SmokeGraph(cupy, first, samples[0])
    _replayed(writer, samples[0])  # the second is called with what it writes
    reader = SmokeGraph(cupy, second, writer.y)
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for i in range(REPLAYS):
        with one:
            writer.x.set(samples[i % 3])
        writer.launch(one)
        two.wait_event(one.record())
        reader.launch(two)
        one.wait_event(two.record())  # the next launch writes what this one reads
        if not same_bits(reader.y.get(stream=two), want[i % 3]):
            raise Wrong(f"round {i} of two graphs on two streams, ordered by events, has other bits than without a capture")
    details["two streams"] = "equal bits"


def _failures(device: Device, graphs: dict[str, SmokeGraph], details: dict[str, Any]) -> None:
    """Do in captures what no capture may contain; the device and the other graphs must compute afterwards."""
    import cupy

    samples, works = inputs(), smoke_works(device)
    stream = cupy.cuda.get_current_stream
    forbidden: dict[str, _Work] = {
        "a read-back": lambda x: (x + x).get(),
        "a wait for the stream": lambda x: stream().synchronize() or x,
    }
    for what, work in forbidden.items():
        try:
            SmokeGraph(cupy, partial(_in_a_capture, cupy, work), samples[0])
        except Exception as error:
            details[f"{what} in a capture"] = f"refused: {type(error).__name__}"
        else:
            raise Wrong(f"{what} in a capture must be refused, got a graph")
        for name, graph in graphs.items():
            want = _uncaptured(cupy, works[name][0], samples)
            if not same_bits([_replayed(graph, x) for x in samples], want):
                raise Wrong(f"{name}: after {what} in a capture, a replay has other bits than a call")
    details["afterwards"] = "calls and replays have equal bits"


def _in_a_capture(cupy: Any, work: _Work, x: Array) -> Array:
    """Call a function only if the current stream is capturing: it may be called before."""
    return work(x) if cupy.cuda.get_current_stream().is_capturing() else x


def _model(name: str, details: dict[str, Any]) -> None:
    """Run a model as often, with three inputs in turn: the runs after the first are repeated, perhaps as graphs."""
    model, first = device_models.bert(layers=2, width=32, heads=4, length=8, words=50)
    rng = np.random.default_rng(0)
    samples = [first | {"input_ids": rng.integers(0, 50, first["input_ids"].shape)} for _ in range(3)]
    plain, rep = (SingaBackend.prepare(model, name, optimize=level) for level in (0, 2))
    want = [plain.run(x) for x in samples]
    for i in range(REPLAYS):
        if not same_bits([*rep.run(samples[i % 3])], [*want[i % 3]]):
            raise Wrong(f"run {i} of BERT with three inputs in turn must have the bits of a run with optimize=0")
    details["runs of a model"], details["bytes of its graphs"] = REPLAYS, rep._session.graph_bytes
