"""Capture of streams by the emulated CUDA driver: what graphs execute, what they count, and what a capture refuses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fakecuda
import numpy as np
import pytest

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("clean")]
RNG = np.random.default_rng(0)
UNSUPPORTED, INVALIDATED, MERGE, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 900, 901, 902, 905, 906, 907, 908
ILLEGAL_STATE, INVALID_HANDLE = 401, 400


@pytest.fixture
def clean() -> Iterator[None]:
    fakecuda.reset()
    yield
    fakecuda.reset()


@pytest.fixture
def stream(cupy: Any) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def captured(cupy: Any, stream: Any, work: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """The graph of the work, after a run of it; its pool, and what the work returned."""
    work()
    cupy.cuda.Device().synchronize()
    pool = cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        result = work()
        return stream.end_capture(), pool, result


def status(cupy: Any, call: Callable[[], Any]) -> int:
    """The error of the runtime, which CuPy raises, or returns from a query."""
    try:
        returned = call()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return int(error.status)
    return int(returned or 0)


WORK: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "kernels": (lambda cupy, x: cupy.exp(x * 2 + 1), 3),
    "a copy": (lambda cupy, x: x.copy(), 1),
    "a memset": (lambda cupy, x: cupy.zeros(3, np.float32) + x[0, :3], 2),
    "cub, whole": (lambda cupy, x: x.sum(), 2),
    "cub, rows": (lambda cupy, x: x.max(axis=1), 1),
    "cub, a scan": (lambda cupy, x: cupy.cumsum(x), 3),
    "a reduction by a kernel": (lambda cupy, x: x.sum(axis=0), 1),
    "thrust, a sort": (lambda cupy, x: cupy.sort(x, axis=-1), 2),
    "thrust, an order": (lambda cupy, x: cupy.argsort(x, axis=-1), 2),
    "cuFFT": (lambda cupy, x: cupy.fft.rfft(x), 1),
}
"""Work on an array, and the number of its nodes."""


@pytest.mark.parametrize("name", WORK)
def test_a_graph_computes_from_what_its_arrays_contain_at_each_launch(cupy: Any, stream: Any, name: str) -> None:
    work, nodes = WORK[name]
    x = cupy.asarray(RNG.standard_normal((4, 8)).astype(np.float32))
    graph, _pool, result = captured(cupy, stream, lambda: work(cupy, x))
    assert fakecuda.nodes(graph) == nodes
    for _ in range(3):
        value = RNG.standard_normal((4, 8)).astype(np.float32)
        x[...] = cupy.asarray(value)
        want = work(cupy, cupy.asarray(value)).get()
        cupy.cuda.Device().synchronize()
        with fakecuda.counting() as during:
            graph.launch(stream)
            stream.synchronize()
        assert during == dict.fromkeys(fakecuda.NAMES, 0) | {"graphs": 1, "graph_nodes": nodes, "synchronizations": 1}
        assert result.get().tobytes() == want.tobytes()
    assert fakecuda.report() == []


def test_nothing_is_executed_while_a_stream_captures(cupy: Any, stream: Any) -> None:
    x = cupy.zeros(3, np.float32)
    cupy.cuda.Device().synchronize()
    with stream:
        x += 1
        stream.synchronize()
        with fakecuda.counting() as during:
            stream.begin_capture()
            assert stream.is_capturing()
            x += 1
            graph = stream.end_capture()
        assert not stream.is_capturing()
    assert not any(during.values())
    assert x.get().tolist() == [1, 1, 1]
    graph.upload(stream)
    graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()
    assert x.get().tolist() == [3, 3, 3] and fakecuda.report() == []


def test_a_graph_is_launched_on_any_stream(cupy: Any, stream: Any) -> None:
    x = cupy.zeros(3, np.float32)
    graph, _pool, _result = captured(cupy, stream, lambda: cupy.add(x, 1, out=x))
    cupy.cuda.Device().synchronize()
    graph.launch(cupy.cuda.Stream.null)
    cupy.cuda.Device().synchronize()
    graph.launch(cupy.cuda.Stream(non_blocking=True))
    cupy.cuda.Device().synchronize()
    assert x.get().tolist() == [3, 3, 3] and fakecuda.report() == []


def test_each_replay_is_checked(cupy: Any, stream: Any) -> None:
    """Bounds depend on an index that is in memory; threads race in every replay."""
    kernel = cupy.RawKernel('extern "C" __global__ void put(int* x, const int* i) { x[*i] = 1; }', "put")
    x, i = cupy.zeros(4, np.int32), cupy.zeros(1, np.int32)
    graph, _pool, _result = captured(cupy, stream, lambda: kernel((1,), (1,), (x, i)))
    graph.launch(stream)
    stream.synchronize()
    assert x.get().tolist() == [1, 0, 0, 0] and fakecuda.report() == []
    i[...] = 4
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    assert any("put): an access outside its arrays" in line for line in fakecuda.report())


def test_the_orders_of_threads_are_compared_at_each_replay(cupy: Any, stream: Any) -> None:
    kernel = cupy.RawKernel('extern "C" __global__ void last(int* x) { *x = threadIdx.x; }', "last")
    x = cupy.zeros(1, np.int32)
    graph, _pool, _result = captured(cupy, stream, lambda: kernel((1,), (2,), (x,)))
    assert fakecuda.report() == []
    with fakecuda.order("both"):
        for _ in range(2):
            graph.launch(stream)
            assert any("depends on the order of its threads" in line for line in fakecuda.report())


def test_a_number_is_no_array_even_if_it_is_an_address(cupy: Any, stream: Any) -> None:
    """The index in the parameters of CuPy's kernels is not set: it may be an address that was freed."""
    kernel = cupy.RawKernel('extern "C" __global__ void put(float* x, long long n) { x[0] = n != 0; }', "put")
    x, other = cupy.zeros(1, np.float32), cupy.zeros(5, np.float32)
    address = np.int64(other.data.ptr)
    graph, _pool, _result = captured(cupy, stream, lambda: kernel((1,), (1,), (x, address)))
    del other
    graph.launch(stream)
    stream.synchronize()
    assert x.get().tolist() == [1] and fakecuda.report() == []


# ---- cuBLAS


class Blas:
    """cuBLAS by ctypes, as an extension module calls it: CuPy refuses its own calls while a stream captures."""

    def __init__(self) -> None:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self.library = ctypes.CDLL(None)
        self.library = ctypes.CDLL("libcublas.so.13", handle=load_nvidia_dynamic_lib("cublas")._handle_uint)
        self.handle = ctypes.c_void_p()
        assert self.library.cublasCreate_v2(ctypes.byref(self.handle)) == 0

    def use(self, stream: Any, workspace: Any = None) -> None:
        assert self.library.cublasSetStream_v2(self.handle, ctypes.c_void_p(stream.ptr)) == 0
        if workspace is not None:
            address = ctypes.c_void_p(workspace.data.ptr)
            assert self.library.cublasSetWorkspace_v2(self.handle, address, ctypes.c_size_t(workspace.nbytes)) == 0

    def product(self, name: str, a: Any, b: Any, out: Any) -> int:
        """Multiply square float32 matrices, the first axis of which counts them; rows first, so that B' A' is computed."""
        count, n = a.shape[:2]
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        x, y, z = (ctypes.c_void_p(v.data.ptr) for v in (b, a, out))
        step, alpha, beta = ctypes.c_longlong(n * n), ctypes.byref(one), ctypes.byref(zero)
        head = (self.handle, 0, 0, n, n, n, alpha)
        if name == "cublasGemmEx":
            error = self.library.cublasGemmEx(*head, x, 0, n, y, 0, n, beta, z, 0, n, 68, -1)
        elif name == "cublasSgemmStridedBatched":
            error = self.library.cublasSgemmStridedBatched(*head, x, n, step, y, n, step, beta, z, n, step, count)
        else:
            tail = (x, 0, n, step, y, 0, n, step, beta, z, 0, n, step, count, 68, -1)
            error = self.library.cublasGemmStridedBatchedEx(*head, *tail)
        one.value = zero.value = np.nan  # a graph must have copies
        return int(error)


PRODUCTS = ["cublasGemmEx", "cublasSgemmStridedBatched", "cublasGemmStridedBatchedEx"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_nodes(cupy: Any, stream: Any, name: str) -> None:
    blas, shape = Blas(), (1 if name == "cublasGemmEx" else 3, 4, 4)
    a, b, out = cupy.zeros(shape, np.float32), cupy.zeros(shape, np.float32), cupy.zeros(shape, np.float32)
    workspace = cupy.empty(1024, np.uint8)
    cupy.cuda.Device().synchronize()
    blas.use(stream, workspace)
    stream.begin_capture()
    assert blas.product(name, a, b, out) == 0
    graph = stream.end_capture()
    assert fakecuda.nodes(graph) == 1
    for _ in range(2):
        x, y = (RNG.standard_normal(shape).astype(np.float32) for _ in range(2))
        a[...], b[...] = cupy.asarray(x), cupy.asarray(y)
        cupy.cuda.Device().synchronize()
        with fakecuda.counting() as during:
            graph.launch(stream)
        stream.synchronize()
        assert during["graph_nodes"] == 1 and during["products"] == 0
        np.testing.assert_allclose(out.get(), x @ y, rtol=1e-5, atol=1e-5)
    assert fakecuda.report() == []


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_handle_has_its_own_stream(cupy: Any, stream: Any, name: str) -> None:
    """The stream is a property of the handle: another handle, and the thread's current stream, do not change it."""
    mine, other = Blas(), Blas()
    a, b, out = (cupy.zeros((1, 2, 2), np.float32) for _ in range(3))
    cupy.cuda.Device().synchronize()
    mine.use(stream)
    other.use(cupy.cuda.Stream(non_blocking=True))
    assert mine.product(name, a, b, out) == 0
    out += 1  # on the default stream, which does not wait for the other one
    assert any(name in line and "has not finished writing on" in line for line in fakecuda.report())


def test_two_streams_share_no_workspace(cupy: Any, stream: Any) -> None:
    blas, workspace = Blas(), cupy.zeros(1024, np.uint8)
    arrays = [[cupy.zeros((1, 2, 2), np.float32) for _ in range(3)] for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for each, on in zip(arrays, (stream, cupy.cuda.Stream(non_blocking=True)), strict=True):
        blas.use(on, workspace)
        assert blas.product("cublasGemmEx", *each) == 0
    assert any("in its workspace, on" in line and "has not finished writing" in line for line in fakecuda.report())


def test_cupy_refuses_its_own_products_uploads_and_read_backs(cupy: Any, stream: Any) -> None:
    x = cupy.ones((4, 4), np.float32)
    x @ x
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(NotImplementedError):
            x @ x
        for call in (x.get, lambda: cupy.asarray(np.ones(3)), lambda: bool(x[0, 0])):
            with pytest.raises(RuntimeError, match="captur"):
                call()
        stream.end_capture()
    assert fakecuda.report() == []


def test_factorizations_are_refused(cupy: Any, stream: Any) -> None:
    x = cupy.asarray(np.eye(3))
    lu, info = x.copy(), cupy.zeros(1, np.int32)
    library = ctypes.CDLL("libcusolver.so.12")
    handle = ctypes.c_void_p()
    assert library.cusolverDnCreate(ctypes.byref(handle)) == 0
    cupy.cuda.Device().synchronize()
    assert library.cusolverDnSetStream(handle, ctypes.c_void_p(stream.ptr)) == 0
    stream.begin_capture()
    a, b = (ctypes.c_void_p(v.data.ptr) for v in (lu, info))
    assert library.cusolverDnDgetrf(handle, 3, 3, a, 3, None, None, b) != 0
    assert status(cupy, stream.end_capture) == INVALIDATED
    assert [line.partition(" while ")[0] for line in fakecuda.report()] == ["cusolverDnDgetrf"]


# ---- What a capture refuses


def memcpy(cupy: Any, to: int, source: int, stream: Any = None) -> Any:
    kind = cupy.cuda.runtime.memcpyDefault
    if stream is None:
        return cupy.cuda.runtime.memcpy(to, source, 4, kind)
    return cupy.cuda.runtime.memcpyAsync(to, source, 4, kind, stream.ptr)


class Case:
    """Arrays, pageable and pinned memory, and an event, for calls that a capture refuses."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self.cupy, self.stream, self.runtime = cupy, stream, cupy.cuda.runtime
        self.x, self.y = cupy.zeros(1, np.float32), cupy.zeros(1, np.float32)
        self.host = np.zeros(1, np.float32)
        self.pinned = cupy.cuda.alloc_pinned_memory(4)
        self.event = cupy.cuda.Event()
        self.event.record()
        cupy.cuda.Device().synchronize()

    def copy(self, to: int, source: int, *, later: bool = True) -> None:
        memcpy(self.cupy, to, source, self.stream if later else None)


REFUSED: dict[str, tuple[Callable[[Case], Any], int]] = {
    "a synchronous copy": (lambda c: c.copy(c.x.data.ptr, c.y.data.ptr, later=False), UNSUPPORTED),
    "a copy from pageable memory": (lambda c: c.copy(c.x.data.ptr, c.host.ctypes.data), UNSUPPORTED),
    "a copy to pageable memory": (lambda c: c.copy(c.host.ctypes.data, c.x.data.ptr), UNSUPPORTED),
    "a copy from pinned memory": (lambda c: c.copy(c.x.data.ptr, c.pinned.ptr), UNSUPPORTED),
    "a copy to pinned memory": (lambda c: c.copy(c.pinned.ptr, c.x.data.ptr), UNSUPPORTED),
    "a synchronization of the stream": (lambda c: c.runtime.streamSynchronize(c.stream.ptr), UNSUPPORTED),
    "a synchronization of the device": (lambda c: c.runtime.deviceSynchronize(), UNSUPPORTED),
    "a query of the stream": (lambda c: c.runtime.streamQuery(c.stream.ptr), UNSUPPORTED),
    "an allocation in the stream's order": (lambda c: c.runtime.mallocAsync(64, c.stream.ptr), UNSUPPORTED),
    "a wait for work that is not captured": (lambda c: c.stream.wait_event(c.event), ISOLATION),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_capture_refuses(cupy: Any, stream: Any, what: str) -> None:
    call, error = REFUSED[what]
    case = Case(cupy, stream)
    stream.begin_capture()
    assert status(cupy, lambda: call(case)) == error
    report = fakecuda.report()
    assert len(report) == 1 and report[0].startswith(f"{what} while stream ") and report[0].endswith(" captures")
    with stream, pytest.raises(cupy.cuda.driver.CUDADriverError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        case.x += 1  # no work is recorded any more
    with pytest.raises(RuntimeError, match="invalidated"):
        stream.is_capturing()
    assert status(cupy, stream.end_capture) == INVALIDATED
    assert not stream.is_capturing()
    with stream:
        case.x += 1  # the stream works again
    stream.synchronize()
    assert case.x.get().tolist() == [1]


EVENTS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "a query of an event": (lambda cupy, event: cupy.cuda.runtime.eventQuery(event.ptr), CAPTURED_EVENT),
    "a synchronization of an event": (lambda cupy, event: event.synchronize(), CAPTURED_EVENT),
    "a fork to": (lambda cupy, event: cupy.cuda.Stream(non_blocking=True).wait_event(event), UNSUPPORTED),
}


@pytest.mark.parametrize("what", EVENTS)
def test_events_of_a_capture(cupy: Any, stream: Any, what: str) -> None:
    call, error = EVENTS[what]
    event = cupy.cuda.Event()
    stream.begin_capture()
    event.record(stream)
    stream.wait_event(event)
    assert fakecuda.report() == []
    assert status(cupy, lambda: call(cupy, event)) == error
    assert any(line.startswith(what) for line in fakecuda.report())
    assert status(cupy, stream.end_capture) == INVALIDATED
    assert status(cupy, lambda: call(cupy, event)) == error  # it stays an event of the capture
    event.record(stream)
    stream.synchronize()
    event.synchronize()


def test_two_captures_are_not_merged(cupy: Any, stream: Any) -> None:
    event, other = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    other.begin_capture()
    event.record(stream)
    assert status(cupy, lambda: other.wait_event(event)) == MERGE
    assert status(cupy, other.end_capture) == INVALIDATED
    stream.end_capture()


def test_what_is_issued_on_another_stream_is_not_a_part_of_the_graph(cupy: Any, stream: Any) -> None:
    x, other = cupy.zeros(1, np.float32), cupy.cuda.Stream(non_blocking=True)
    x += 1
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    with other:
        x += 1
    x.fill(2)  # on the default stream
    graph = stream.end_capture()
    report = fakecuda.report()
    assert fakecuda.nodes(graph) == 0
    assert sum("is not a part of the graph" in line for line in report) == 2
    assert any("on the default stream while" in line for line in report)


def test_another_thread_works_while_a_stream_captures(cupy: Any, stream: Any) -> None:
    x = cupy.zeros(1, np.float32)
    cupy.cuda.Device().synchronize()

    def work() -> None:
        with cupy.cuda.Stream(non_blocking=True) as own:
            cupy.add(x, 1, out=x)
            own.synchronize()

    stream.begin_capture()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    stream.end_capture()
    assert x.get().tolist() == [1] and fakecuda.report() == []


def test_the_default_stream_waits_for_blocking_streams(cupy: Any) -> None:
    """Its use while a blocking stream captures invalidates the capture, whichever thread uses it."""
    x, stream = cupy.zeros(1, np.float32), cupy.cuda.Stream(non_blocking=False)
    x += 1
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"):
        x += 1
    assert status(cupy, cupy.cuda.Stream.null.is_capturing) == IMPLICIT
    assert status(cupy, stream.end_capture) == INVALIDATED


def test_the_beginning_and_the_end_of_a_capture(cupy: Any, stream: Any) -> None:
    runtime = cupy.cuda.runtime
    assert status(cupy, lambda: runtime.streamBeginCapture(0)) == UNSUPPORTED
    assert status(cupy, lambda: runtime.streamEndCapture(stream.ptr)) == ILLEGAL_STATE
    stream.begin_capture()
    assert status(cupy, stream.begin_capture) == ILLEGAL_STATE
    stream.end_capture()
    assert [line.rpartition(" stream ")[0] or line for line in fakecuda.report()] == [
        "a capture of the default stream", "the end of a capture that was not begun on", "a second capture of",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["Relaxed", "ThreadLocal", "Global"])
def test_relaxed_captures_permit_allocations(cupy: Any, stream: Any, mode: str) -> None:
    runtime = cupy.cuda.runtime
    event = cupy.cuda.Event()
    event.record()
    stream.begin_capture(getattr(runtime, f"streamCaptureMode{mode}"))
    if mode == "Relaxed":
        runtime.free(runtime.malloc(64))
        runtime.freeHost(runtime.hostAlloc(64, 0))
        runtime.eventQuery(event.ptr)
        stream.end_capture()
        assert fakecuda.report() == []
        return
    for call in (lambda: runtime.malloc(64), lambda: runtime.hostAlloc(64, 0), lambda: runtime.eventQuery(event.ptr)):
        assert status(cupy, call) == UNSUPPORTED
    errors: list[int] = []

    def end() -> None:
        errors.append(status(cupy, stream.end_capture))

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert errors == [WRONG_THREAD]
    assert status(cupy, stream.end_capture) == INVALIDATED


def test_graphs_that_do_not_exist(cupy: Any, stream: Any) -> None:
    runtime = cupy.cuda.runtime
    stream.begin_capture()
    graph = runtime.streamEndCapture(stream.ptr)
    executable = runtime.graphInstantiate(graph)
    runtime.graphDestroy(graph)
    runtime.graphLaunch(executable, stream.ptr)  # it does not need the graph
    runtime.graphExecDestroy(executable)
    assert fakecuda.report() == []
    assert status(cupy, lambda: runtime.graphLaunch(executable, stream.ptr)) == INVALID_HANDLE
    assert fakecuda.report() == ["a launch of a graph that was destroyed, or was never made"]


def test_a_stream_that_captures_launches_no_graph(cupy: Any, stream: Any) -> None:
    stream.begin_capture()
    graph = stream.end_capture()
    stream.begin_capture()
    assert status(cupy, lambda: graph.launch(stream)) == UNSUPPORTED
    assert status(cupy, stream.end_capture) == INVALIDATED


def test_a_stream_is_destroyed_while_it_captures(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    del stream
    assert any("is destroyed while it captures" in line for line in fakecuda.report())
