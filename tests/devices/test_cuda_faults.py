"""Faults on purpose, each next to the same program without it: the emulated devices report every one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import helper, load_model_from_string
from tests.helpers.paths import PROJECT

from singa_backend import SingaBackend
from singa_backend.conform import cases
from singa_backend.devices import checks, namespaces

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("both_orders")]
N = 64


def kernel(cupy: Any, source: str) -> Any:
    return cupy.RawKernel(f'extern "C" __global__ void f{source}', "f")


def found(match: str, fault: bool) -> bool:
    """Whether the report is that of the fault; without one it must be empty."""
    report = fakecuda.report()
    return any(match in line for line in report) if fault else report == []


# ---- Streams


def two_streams(cupy: Any, second: Callable[[Any, Any], None], *, ordered: bool) -> None:
    """Write an array on one stream, and pass it to work on another, which an event orders after it or not."""
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x, y = cupy.zeros(N, np.float32), cupy.ones(N, np.float32)
    cupy.cuda.Device().synchronize()
    with one:
        x += 1
    if ordered:
        two.wait_event(one.record())
    with two:
        second(x, y)
    cupy.cuda.Device().synchronize()


def copy(x: Any, y: Any) -> None:
    y.data.copy_from_device_async(x.data, x.nbytes)


def read(x: Any, y: Any) -> None:
    y += x


def write(x: Any, y: Any) -> None:
    x[...] = y


def clear(x: Any, y: Any) -> None:
    x.data.memset_async(0, x.nbytes)


def product(x: Any, y: Any) -> None:
    x.reshape(8, 8) @ y.reshape(8, 8)


def sort(x: Any, y: Any) -> None:
    x.sort()


def read_back(x: Any, y: Any) -> None:
    x.get()


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("second", [copy, read, write, clear, product, sort, read_back])
def test_work_on_another_stream_without_an_event(cupy: Any, second: Callable[[Any, Any], None], fault: bool) -> None:
    two_streams(cupy, second, ordered=not fault)
    assert found("has not finished writing on stream", fault)


@pytest.mark.parametrize("fault", [False, True])
def test_an_array_is_written_while_another_stream_reads_it(cupy: Any, fault: bool) -> None:
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x, y = cupy.zeros(N, np.float32), cupy.ones(N, np.float32)
    cupy.cuda.Device().synchronize()
    with one:
        y += x
    if not fault:
        one.synchronize()
    with two:
        x += 1
    two.synchronize()
    assert found("writes an array that is being read", fault)


@pytest.mark.parametrize("fault", [False, True])
def test_a_stream_that_does_not_wait_for_the_default_stream(cupy: Any, fault: bool) -> None:
    x = cupy.zeros(N, np.float32)
    x += 1
    with cupy.cuda.Stream(non_blocking=fault):  # a blocking one waits
        x + 1
    cupy.cuda.Device().synchronize()
    assert found("has not finished writing on the default stream", fault)


@pytest.mark.parametrize("fault", [False, True])
def test_a_stream_is_destroyed_before_its_work_is_ordered(cupy: Any, fault: bool) -> None:
    x = cupy.zeros(N, np.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x += 1
    if not fault:
        stream.synchronize()
    del stream
    x + 1
    assert found("has not finished writing on stream", fault)


# ---- The host, which does not wait


def pinned(cupy: Any) -> np.ndarray:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * N), np.float32, N)


@pytest.mark.parametrize("fault", [False, True])
def test_the_host_reads_a_copy_that_is_not_finished(cupy: Any, fault: bool) -> None:
    there, here = cupy.ones(N, np.float32), pinned(cupy)
    stream = cupy.cuda.Stream()
    there.data.copy_to_host_async(here.ctypes.data, there.nbytes, stream)
    if not fault:
        stream.synchronize()
    assert (here == 1).all() != fault
    stream.synchronize()
    assert (here == 1).all() and found("", False)


@pytest.mark.parametrize("order", ["early", "late"])
@pytest.mark.parametrize("fault", [False, True])
def test_the_host_writes_what_is_being_copied(cupy: Any, fault: bool, order: str) -> None:
    """With the order "early" a fault has no effect, as on a device that was fast enough."""
    there, here = cupy.zeros(N, np.float32), pinned(cupy)
    stream = cupy.cuda.Stream()
    with fakecuda.copies(order):
        here[:] = 1
        there.data.copy_from_host_async(here.ctypes.data, there.nbytes, stream)
        if not fault:
            stream.synchronize()
        here[:] = 2
        stream.synchronize()
    assert (there.get() == (2 if fault and order == "late" else 1)).all()


@pytest.mark.parametrize("fault", [False, True])
def test_pinned_memory_is_released_before_its_copy(cupy: Any, fault: bool) -> None:
    there, stream = cupy.zeros(N, np.float32), cupy.cuda.Stream()
    address = cupy.cuda.runtime.hostAlloc(4 * N, 0)
    there.data.copy_from_host_async(address, 4 * N, stream)
    if not fault:
        stream.synchronize()
    cupy.cuda.runtime.freeHost(address)
    assert found("pinned memory was released before a copy from it was made", fault)


# ---- Launches


@pytest.mark.parametrize("fault", [False, True])
def test_a_host_pointer_in_a_launch(cupy: Any, fault: bool) -> None:
    x, here = cupy.zeros(N, np.float32), np.ones(N, np.float32)
    address = np.uint64(here.ctypes.data) if fault else x
    kernel(cupy, "(float* x, const float* y) { x[threadIdx.x] = y[threadIdx.x]; }")((1,), (N,), (x, address))
    assert found("parameter 2 is no address of a device's memory", fault)


@pytest.mark.parametrize("fault", [False, True])
def test_a_host_array_in_a_kernel_of_cupy(cupy: Any, fault: bool) -> None:
    """An array that CuPy believes to be on the device."""
    here = np.ones(N, np.float32)
    memory = cupy.cuda.UnownedMemory(here.ctypes.data, here.nbytes, here, 0)
    y = cupy.ndarray(N, np.float32, cupy.cuda.MemoryPointer(memory, 0)) if fault else cupy.ones(N, np.float32)
    y + 1
    assert found("is no address of a device's memory", fault)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(
    ("atomic", "plain"),
    [
        ("atomicAdd(x, 1)", "x[0] += 1"),
        ("atomicMax(x, i)", "if (x[0] < i) x[0] = i"),
        ("atomicOr(x, 1 << i % 32)", "x[0] |= 1 << i % 32"),
    ],
)
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_number_is_read_and_written_without_an_atomic(cupy: Any, atomic: str, plain: str, blocks: int, fault: bool) -> None:
    """The results are those of the atomic in every order of threads that run one after the other."""
    x = cupy.zeros(1, np.int32)
    source = f"(int* x) {{ int i = blockIdx.x * blockDim.x + threadIdx.x; {plain if fault else atomic}; }}"
    kernel(cupy, source)((blocks,), (N // blocks,), (x,))
    assert found("read and write the same number without an atomic", fault)


def test_numbers_that_a_barrier_orders_need_no_atomic(cupy: Any) -> None:
    source = """(int* x) {
        for (int step = blockDim.x / 2; step; step /= 2) {
            if (threadIdx.x < step) x[threadIdx.x] += x[threadIdx.x + step];
            __syncthreads();
        }
        if (threadIdx.x == 1) x[0] += 1;
    }"""
    x = cupy.ones(N, np.int32)
    kernel(cupy, source)((1,), (N,), (x,))
    assert (int(x[0].get()), fakecuda.report()) == (N + 1, [])


@pytest.mark.parametrize("fault", [False, True])
def test_a_flag_without_its_atomic(cupy: Any, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag of the indices of a run (checks.py) keeps the smallest wrong one."""
    made = cupy.ElementwiseKernel

    def changed(inputs: str, outputs: str, text: str, name: str) -> Any:
        plain = "if (flag < flags[number]) *const_cast<unsigned long long*>(&flags[number]) = flag;"
        first = text.index("atomicMin(")
        return made(inputs, outputs, text[:first] + plain + text[text.index("\n", first) :], name)

    checks._wrap.cache_clear()
    if fault:
        monkeypatch.setattr(cupy, "ElementwiseKernel", changed)
    try:
        with pytest.raises(Exception, match="an index must be in"):
            namespaces.CupyNamespace().indices(cupy.asarray([9, -9, 1, 12]), 4)
    finally:
        checks._wrap.cache_clear()
    assert found("without an atomic", fault)


@pytest.mark.parametrize("fault", [False, True])
def test_a_missing_barrier(cupy: Any, fault: bool) -> None:
    barrier = "" if fault else "__syncthreads();"
    source = f"(float* x) {{ __shared__ float s[64]; int i = threadIdx.x; s[i] = x[i]; {barrier} x[i] = s[63 - i]; }}"
    kernel(cupy, source)((1,), (N,), (cupy.arange(N, dtype=np.float32),))
    assert found("its result depends on the order of its threads", fault)


@pytest.mark.parametrize("fault", [False, True])
def test_an_index_one_too_far(cupy: Any, fault: bool) -> None:
    x = cupy.zeros(N, np.float32)
    kernel(cupy, "(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] = 1; }")((1,), (2 * N,), (x, np.int32(N + fault)))
    assert found("an access outside its arrays", fault)


@pytest.mark.parametrize("fault", [False, True])
def test_an_array_of_another_device(cupy: Any, fault: bool) -> None:
    with cupy.cuda.Device(int(fault)):
        x = cupy.zeros(N, np.float32)
    kernel(cupy, "(float* x) { x[threadIdx.x] = 1; }")((1,), (N,), (x,))
    assert found("device 0 was current, an array is on device 1", fault)


# ---- Read-backs of operators


def read_backs(node: Any, inputs: list[np.ndarray]) -> int:
    """The copies to the host of one run, but for that of its outputs."""
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(node.input, inputs, strict=True)
    ]
    outputs = [helper.make_empty_tensor_value_info(n) for n in node.output]
    model = helper.make_model(helper.make_graph([node], "g", values, outputs), opset_imports=[helper.make_opsetid("", 21)])
    model.ir_version = 10
    rep = SingaBackend.prepare(model, "CUDA")
    rep.run(inputs)
    with fakecuda.counting() as during:
        rep.run(inputs)
    return during["to_host"] - 1


READS = {
    "Compress": "the size of the result depends on values",
    "Loop": "the condition of each round, and the number of rounds",
    "NonZero": "the size of the result depends on values",
    "SequenceInsert": "each element of a sequence is an output",
    "SequenceMap": "each element of a sequence is an output",
    "SplitToSequence": "each element of a sequence is an output, and the sizes are an input",
    "Unique": "the size of the result depends on values",
}
"""The operators that read the device in the two first cases of ONNX's suite, but for the outputs; all others must not."""
UPLOADS = {
    "AveragePool": "the number of elements of each window",
    "Bernoulli": "random numbers are drawn by the CPU",
    "DeformConv": "the places of the kernel",
    "Pad": "the place of each element",
    "Resize": "the places and weights of each axis",
    "RoiAlign": "the places of the samples",
    "SequenceMap": "the elements of its sequences",
    "TreeEnsemble": "the tables of the trees, which are attributes",
    "Unique": "the places of the first of equal elements",
    "Upsample": "the places of each axis",
}
"""The operators whose run copies more than its inputs to the device; all others must not."""


@cache
def _models() -> dict[str, list[Any]]:
    """The two first cases of each operator that have one node."""
    found: dict[str, list[Any]] = {}
    for case in cases.load(("node",)):
        model = load_model_from_string(case.model)
        if len(model.graph.node) == 1 and len(kept := found.setdefault(model.graph.node[0].op_type, [])) < 2:
            kept.append((model, case.data[0][0]))
    return found


def _arrays(value: Any) -> int:
    return sum(map(_arrays, value)) if isinstance(value, list) else 1


@pytest.mark.parametrize("part", range(8))
def test_no_operator_reads_the_device(part: int) -> None:
    """A run reads the outputs and the flags of its checks, in one copy; it copies its inputs, and asks for no memory."""
    names = sorted(_models())[part::8]
    reads, uploads = set(), set()
    for name in names:
        for model, inputs in _models()[name]:
            rep = SingaBackend.prepare(model, "CUDA")
            with fakecuda.order("ascending"):
                rep.run(inputs)
                with fakecuda.counting() as during:
                    rep.run(inputs)
            if during["to_host"] > 1:
                reads.add(name)
            if during["to_device"] > _arrays(inputs):
                uploads.add(name)
            assert not during["memory_queries"], name
    assert reads == READS.keys() & set(names)
    assert uploads <= UPLOADS.keys(), uploads


def test_the_lists_of_operators_name_operators() -> None:
    assert READS.keys() | UPLOADS.keys() <= set(_models())


def test_the_documentation_names_the_operators_that_read_the_device() -> None:
    text = (PROJECT / "docs" / "gpu.md").read_text(encoding="utf-8")
    table = text.partition("## What a run reads from the device")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))) == set(READS)


@pytest.mark.parametrize("fault", [False, True])
def test_a_hidden_read_back_in_an_operator(cupy: Any, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = namespaces.CupyNamespace.erf

    def hidden(self: Any, x: Any) -> Any:
        if fault:
            float(x.reshape(-1)[0])
        return real(self, x)

    monkeypatch.setattr(namespaces.CupyNamespace, "erf", hidden)
    node = helper.make_node("Erf", ["x"], ["y"])
    assert read_backs(node, [np.ones((2, 5), np.float32)]) == int(fault)
