"""Faults planted in the use of CUDA graphs, each next to the use without it: the emulated driver reports every one that a driver
could see, and a replay with other inputs shows those that it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import parser

from singa_backend import SingaBackend
from singa_backend.devices import graphs, random_streams
from singa_backend.runtime import captured

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("clean")]
RNG = np.random.default_rng(0)
INPUTS = [RNG.standard_normal((3, 5)).astype(np.float32) for _ in range(3)]


@pytest.fixture
def clean() -> Iterator[None]:
    fakecuda.reset()
    yield
    fakecuda.reset()  # a fault stays on a device


class Captured:
    """Work on one array that is captured: its stream, its memory, its graph, its input and its output."""

    def __init__(self, cupy: Any, work: Callable[[Any], Any], *, private: bool = True) -> None:
        self.cupy, self.stream, self.pool = cupy, cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        self.x = cupy.asarray(INPUTS[0])
        work(self.x)  # the kernels are compiled
        cupy.cuda.Device().synchronize()
        allocator = self.pool.malloc if private else cupy.cuda.get_allocator()
        with self.stream, cupy.cuda.using_allocator(allocator):
            self.stream.begin_capture()
            self.y = work(self.x)
            self.graph = self.stream.end_capture()

    def run(self, value: np.ndarray) -> np.ndarray:
        """Copy an input in, launch, and read the output, all in order."""
        self.x[...] = self.cupy.asarray(value)
        self.graph.launch(self.cupy.cuda.Stream.null)
        return np.asarray(self.y.get())

    def start(self, stream: Any) -> None:
        """Launch, and do not wait."""
        self.graph.launch(stream)


def chain(x: Any) -> Any:
    """Three kernels; the results of the first two are temporary."""
    return (x * 2 + 1) * x


def after(cupy: Any, first: Any, second: Any) -> None:
    """Let a stream wait for another one."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(first)
    second.wait_event(event)


def two_streams(cupy: Any) -> tuple[Any, Any]:
    return cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)


@pytest.mark.parametrize("fault", [False, True])
def test_memory_is_freed_while_a_graph_lives(cupy: Any, fault: bool) -> None:
    """Without a memory of its own, what a graph needs between its nodes is freed when the capture ends."""
    captured = Captured(cupy, chain, private=not fault)
    if not fault:
        assert all(captured.run(x).tobytes() == chain(x).tobytes() for x in INPUTS)
        assert fakecuda.report() == []
        return
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="illegal memory access"):
        captured.start(captured.stream)
    assert any(
        line.startswith("a launch of a graph: an array of 60 bytes that") and "was freed" in line for line in fakecuda.report()
    )


@pytest.mark.parametrize("fault", [False, True])
def test_the_memory_of_a_graph_is_released_while_the_graph_lives(cupy: Any, fault: bool) -> None:
    captured = Captured(cupy, chain)
    value = captured.run(INPUTS[1])
    if fault:
        del captured.y
        captured.pool.free_all_blocks()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="illegal memory access"):
            captured.start(captured.stream)
        assert any("cupy_" in line and "uses was freed" in line for line in fakecuda.report())
        return
    assert captured.run(INPUTS[1]).tobytes() == value.tobytes() and fakecuda.report() == []


@pytest.mark.parametrize("fault", [False, True])
def test_an_input_is_written_during_a_replay(cupy: Any, fault: bool) -> None:
    captured, (one, other) = Captured(cupy, chain), two_streams(cupy)
    captured.start(one)
    if not fault:
        after(cupy, one, other)
    with other:
        captured.x.fill(3)
    cupy.cuda.Device().synchronize()
    assert any("writes an array that is being read on" in line for line in fakecuda.report()) == fault


@pytest.mark.parametrize("fault", [False, True])
def test_an_input_is_not_finished_when_a_replay_begins(cupy: Any, fault: bool) -> None:
    captured, (one, other) = Captured(cupy, chain), two_streams(cupy)
    with other:
        captured.x.fill(3)
    if not fault:
        after(cupy, other, one)
    captured.start(one)
    cupy.cuda.Device().synchronize()
    assert any("reads an array that" in line and "has not finished writing" in line for line in fakecuda.report()) == fault


@pytest.mark.parametrize("fault", [False, True])
def test_an_output_is_read_on_another_stream(cupy: Any, fault: bool) -> None:
    captured, (one, other) = Captured(cupy, chain), two_streams(cupy)
    cupy.exp(captured.x)
    cupy.cuda.Device().synchronize()
    captured.start(one)
    if not fault:
        after(cupy, one, other)
    with other:
        cupy.exp(captured.y)
    cupy.cuda.Device().synchronize()
    assert any("cupy_exp" in line and "has not finished writing" in line for line in fakecuda.report()) == fault


@pytest.mark.parametrize("fault", [False, True])
def test_a_graph_is_launched_twice_at_once(cupy: Any, fault: bool) -> None:
    captured, (one, other) = Captured(cupy, chain), two_streams(cupy)
    captured.start(one)
    captured.start(one)  # one stream orders its launches
    if not fault:
        after(cupy, one, other)
    with fakecuda.counting() as during:
        captured.start(other)
    cupy.cuda.Device().synchronize()
    assert any("a graph is launched on" in line and "that has not finished on" in line for line in fakecuda.report()) == fault
    assert during["unordered"] == int(fault) and during["graphs"] == 1


# ---- What a driver cannot see: numbers of the host, which a capture freezes


def differences(cupy: Any, work: Callable[[Any], Any]) -> int:
    """The number of inputs for which a replay differs from the work itself."""
    captured, count = Captured(cupy, work), 0
    for value in INPUTS:
        want = work(cupy.asarray(value)).get()
        count += captured.run(value).tobytes() != want.tobytes()
    assert fakecuda.report() == []
    return count


def steps() -> Callable[[Any], Any]:
    """Work that counts its runs on the host."""
    count = 0

    def work(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * np.float32(count)

    return work


def counted_on_the_device(cupy: Any) -> Callable[[Any], Any]:
    """The same with a number in the device's memory, which a replay reads."""
    count = cupy.zeros((), np.float32)

    def work(x: Any) -> Any:
        return x * (x.size + count)

    return work


@pytest.mark.parametrize("fault", [False, True])
def test_a_number_of_the_host_is_frozen(cupy: Any, fault: bool) -> None:
    work = steps() if fault else counted_on_the_device(cupy)
    assert (differences(cupy, work) > 0) == fault


@pytest.mark.parametrize("fault", [False, True])
def test_a_draw_is_replayed(cupy: Any, fault: bool) -> None:
    """A number that is drawn on the host becomes an argument of a kernel; one that the run copies in stays random."""
    rng = np.random.default_rng(0)
    drawn = cupy.zeros((), np.float32)

    def work(x: Any) -> Any:
        return x * (np.float32(rng.random()) if fault else drawn)

    captured, results = Captured(cupy, work), set()
    for _ in range(4):
        if not fault:
            drawn[...] = np.float32(rng.random())
        results.add(captured.run(INPUTS[1]).tobytes())
    assert len(results) == (1 if fault else 4)
    assert fakecuda.report() == []


# ---- Faults of this project's own code: what a session that launches graphs would do without a part of it


def net(text: str) -> Any:
    """A model that is prepared for CUDA."""
    return SingaBackend.prepare(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}'), "CUDA")


ADDED = "(float[3, 5] x) => (float[3, 5] z) { y = Mul(x, x) w = Softmax(y) z = Add(w, x) }"
DRAWN = "(float[3, 5] x) => (float[3, 5] z) { y = Add(x, x) w = RandomUniformLike(y) z = Add(w, y) }"


def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured with the memory of everybody."""

    @contextmanager
    def active(self: Any) -> Iterator[None]:
        with self._stream:
            yield

    monkeypatch.setattr(graphs.GraphMemory, "_active", active)


def without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not wait for the last one, which was on another stream."""

    def begin(self: Any) -> None:
        self._now = self._module.cuda.get_current_stream()

    monkeypatch.setattr(graphs.GraphMemory, "begin", begin)


def with_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws random numbers may be captured, and a copy from the host repeats the last one of its shape."""
    kept: dict[tuple[int, ...], Any] = {}

    def put(self: Any, module: Any, table: np.ndarray) -> Any:
        if table.shape not in kept or not module.cuda.get_current_stream().is_capturing():
            kept[table.shape] = module.asarray(table)
        return kept[table.shape].copy()

    monkeypatch.setattr(captured, "_OUTSIDE", {})
    monkeypatch.setattr(random_streams, "refuse_capture", lambda reason: None)
    monkeypatch.setattr(graphs.Tables, "put", put)


def without_copies_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that stay on the device are the memory of the graph."""
    monkeypatch.setattr(graphs, "new_copy", lambda module, x: x)


def runs(cupy: Any, text: str, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None] | None) -> list[Any]:
    """Five runs, the last two on two streams, whose outputs stay on the device."""
    if plant is not None:
        plant(monkeypatch)
    rep = net(text)
    there = [cupy.asarray(x) for x in INPUTS]
    cupy.cuda.Device().synchronize()
    outputs = [rep.run([there[0]], to_host=False)[0] for _ in range(3)]
    cupy.cuda.Device().synchronize()
    for x in there[1:]:
        with cupy.cuda.Stream(non_blocking=True):
            outputs += rep.run([x], to_host=False)
    cupy.cuda.Device().synchronize()
    return [y.get() for y in outputs]


WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str]]] = {
    "without memory": (without_memory, ["uses was freed"]),
    "without order": (without_order, ["a graph is launched on", "a copy on stream"]),
}
"""Faults, and what is reported of each."""


@pytest.mark.parametrize("name", ["nothing", *WRONG])
def test_reported_faults_of_captured_runs(cupy: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, lines = WRONG.get(name, (None, []))
    with pytest.raises(Exception, match="illegal memory access") if name == "without memory" else nullcontext():
        outputs = runs(cupy, ADDED, monkeypatch, plant)
    report = fakecuda.report()
    assert bool(report) == bool(lines)
    for text in lines:
        assert any(text in line for line in report), report
    if not lines:
        squares = [np.exp((x * x).astype(np.float64)) for x in [INPUTS[0]] * 3 + INPUTS[1:]]
        want = [s / s.sum(axis=-1, keepdims=True) + x for s, x in zip(squares, [INPUTS[0]] * 3 + INPUTS[1:], strict=True)]
        np.testing.assert_allclose(outputs, want, rtol=1e-5)


@pytest.mark.parametrize("fault", [False, True])
def test_draws_of_captured_runs(cupy: Any, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault:
        with_draws(monkeypatch)
    rep = net(DRAWN)
    outputs = {np.asarray(rep.run([INPUTS[0]])[0]).tobytes() for _ in range(8)}
    assert (len(outputs) < 8) == fault


@pytest.mark.parametrize("fault", [False, True])
def test_outputs_of_captured_runs_stay(cupy: Any, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault:
        without_copies_of_outputs(monkeypatch)
    outputs = runs(cupy, ADDED, monkeypatch, None)
    assert (outputs[3].tobytes() == outputs[4].tobytes()) == fault
