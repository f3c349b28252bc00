"""The emulated CUDA devices themselves: what they compute, count and refuse, and the faults that they find."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakecuda
import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.fakecuda
RNG = np.random.default_rng(0)


@pytest.fixture(params=["ascending", "descending"])
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    with fakecuda.order(request.param):
        yield request.param


def kernel(cupy: Any, source: str, name: str = "f") -> Any:
    return cupy.RawKernel(f'extern "C" __global__ void {name}' + source, name)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "int64", "uint32", "bool"])
def test_elementwise_reduction_and_scan(cupy: Any, dtype: str, order: str) -> None:
    x = RNG.uniform(-3, 3, (5, 70)).astype(dtype)
    y = cupy.asarray(x)
    np.testing.assert_allclose((y + y).get(), x + x, rtol=1e-3)
    np.testing.assert_allclose(y.sum(axis=1).get(), x.sum(axis=1), rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(y.T[3:].get(), x.T[3:])
    if dtype != "bool":
        np.testing.assert_allclose(cupy.cumsum(y, axis=1).get(), np.cumsum(x, axis=1), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (4, 3))])
def test_products(cupy: Any, dtype: str, shapes: Any) -> None:
    a, b = (RNG.uniform(-1, 1, s).astype(dtype) for s in shapes)
    tolerance = 5e-3 if dtype == "float16" else 1e-5
    np.testing.assert_allclose((cupy.asarray(a) @ cupy.asarray(b)).get(), a @ b, rtol=tolerance, atol=tolerance)
    if b.ndim == 2:
        c = cupy.asarray(b)
        np.testing.assert_allclose((c.T @ c).get(), b.T @ b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2, 7, 12, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_transforms(cupy: Any, size: int, dtype: str) -> None:
    x = RNG.standard_normal((3, size)).astype(dtype)
    y = cupy.asarray(x)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(cupy.fft.rfft(y).get(), np.fft.rfft(x), **tolerance)
    np.testing.assert_allclose(cupy.fft.irfft(cupy.fft.rfft(y), size).get(), x, **tolerance)
    np.testing.assert_allclose(cupy.fft.fft(y, axis=0).get(), np.fft.fft(x, axis=0), **tolerance)
    np.testing.assert_allclose(cupy.fft.ifft2(y + 1j * y).get(), np.fft.ifft2(x + 1j * x), **tolerance)


def test_sorts_and_determinants(cupy: Any) -> None:
    x = RNG.integers(0, 5, (4, 30)).astype(np.float32)
    y = cupy.asarray(x)
    np.testing.assert_array_equal(cupy.sort(y, axis=-1).get(), np.sort(x, axis=-1))
    np.testing.assert_array_equal(cupy.argsort(y, axis=-1).get(), np.argsort(x, axis=-1, kind="stable"))
    np.testing.assert_array_equal(cupy.lexsort(y).get(), np.lexsort(x))
    m = RNG.standard_normal((2, 4, 4))
    np.testing.assert_allclose(cupy.linalg.det(cupy.asarray(m)).get(), np.linalg.det(m), rtol=1e-10)


@pytest.mark.parametrize("threads", [1, 31, 32, 96, 1024])
def test_threads_wait_for_each_other(cupy: Any, threads: int, order: str) -> None:
    source = """(int* x) {
        extern __shared__ int s[];
        int i = threadIdx.x;
        s[i] = x[i];
        __syncthreads();
        x[i] = s[(i + 1) % blockDim.x];
    }"""
    rotate = kernel(cupy, source)
    x = cupy.arange(threads, dtype=np.int32)
    rotate((1,), (threads,), (x,), shared_mem=4 * threads)
    np.testing.assert_array_equal(x.get(), np.roll(np.arange(threads), -1))


def test_shuffles_and_votes(cupy: Any, order: str) -> None:
    source = """(int* x, unsigned* votes) {
        int i = threadIdx.x, sum = i;
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        unsigned vote = __ballot_sync(~0u, i % 3 == 0);
        x[i] = sum + __shfl_down_sync(~0u, i, 1) - __shfl_up_sync(~0u, i, 2) + __shfl_sync(~0u, i, 5, 8);
        if (i % 32 == 0) votes[i / 32] = vote;
    }"""
    x, votes = cupy.empty(64, np.int32), cupy.empty(2, np.uint32)
    kernel(cupy, source)((1,), (64,), (x, votes))
    want = []
    for i in range(64):
        first, lane = i // 32 * 32, i % 32
        down = i + 1 if lane < 31 else i
        up = i - 2 if lane >= 2 else i
        want.append(sum(range(first, first + 32)) + down - up + i // 8 * 8 + 5)
    np.testing.assert_array_equal(x.get(), want)
    np.testing.assert_array_equal(votes.get(), [sum((32 * w + i) % 3 == 0 and 1 << i for i in range(32)) for w in range(2)])


def test_atomics_in_blocks(cupy: Any, order: str) -> None:
    source = """(const int* x, int* out, float* sum, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) { atomicAdd(out, x[i]); atomicMax(out + 1, x[i]); atomicMin(out + 2, x[i]); atomicAdd(sum, 1.0f); }
    }"""
    x = RNG.integers(-100, 100, 1000).astype(np.int32)
    out, total = cupy.zeros(3, np.int32), cupy.zeros(1, np.float32)
    kernel(cupy, source)((8,), (128,), (cupy.asarray(x), out, total, np.int32(1000)))
    assert out.get().tolist() == [x.sum(), x.max(), x.min()]
    assert total.get()[0] == 1000


def test_templates(cupy: Any) -> None:
    module = cupy.RawModule(
        code="template <class T> __global__ void twice(T* x) { x[threadIdx.x] *= 2; }",
        options=("-std=c++17",),
        name_expressions=["twice<float>", "twice<long long>"],
    )
    for expression, dtype in (("twice<float>", np.float32), ("twice<long long>", np.int64)):
        x = cupy.arange(4, dtype=dtype)
        module.get_function(expression)((1,), (4,), (x,))
        assert x.get().tolist() == [0, 2, 4, 6]


def test_the_source_of_a_kernel_that_is_wrong_is_reported(cupy: Any) -> None:
    with pytest.raises(cupy.cuda.compiler.CompileException, match="nonsense"):
        kernel(cupy, "(int* x) { nonsense; }")((1,), (1,), (cupy.zeros(1, np.int32),))


# ---- Subnormal numbers, which CuPy's option -ftz=true flushes to zeros of their signs in float32

SMALL = np.array([1e-40, -1e-40, 0.5, -0.0, 2e-38, np.nan, 1.0, -np.inf], np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    """Float32 or complex64 numbers as the device's kernels read and write them."""
    parts = x.view(np.float32)
    return np.where(np.abs(parts) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), parts), parts).view(x.dtype)


@pytest.mark.parametrize(
    "name",
    ["negative", "absolute", "sqrt", "exp", "log", "expm1", "log1p", "tanh", "floor", "ceil", "trunc", "rint", "square", "sign"],
)
def test_functions_of_one_subnormal_number(cupy: Any, name: str) -> None:
    with np.errstate(all="ignore"):
        want = flushed(getattr(np, name)(flushed(SMALL)))
    found = getattr(cupy, name)(cupy.asarray(SMALL)).get()
    np.testing.assert_allclose(found, want, rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(found[:5]), np.signbit(want[:5]))
    assert not ((found != 0) & (np.abs(found) < np.finfo(np.float32).tiny)).any()


@pytest.mark.parametrize(
    "name", ["add", "subtract", "multiply", "divide", "maximum", "minimum", "greater", "equal", "fmod", "hypot"]
)
def test_functions_of_two_subnormal_numbers(cupy: Any, name: str) -> None:
    a, b = (v.ravel() for v in np.meshgrid(SMALL[:5], np.float32([3e-40, -1e-39, 0.25, 2e-38, 1.0])))
    with np.errstate(all="ignore"):
        want = getattr(np, name)(flushed(a), flushed(b))
    want = flushed(want) if want.dtype == np.float32 else want
    found = getattr(cupy, name)(cupy.asarray(a), cupy.asarray(b)).get()
    if name in ("maximum", "minimum"):  # of zeros of both signs either may be the result
        found, want = found + np.float32(0), want + np.float32(0)
    np.testing.assert_array_equal(found, want)
    assert name == "hypot" or found.tobytes() == want.tobytes() or np.isnan(want).any()


def test_subnormal_numbers_in_sums_casts_and_copies(cupy: Any) -> None:
    x = cupy.asarray(SMALL[:2])
    assert x.copy().get().tobytes() == x[::-1][::-1].get().tobytes() == SMALL[:2].tobytes()  # bits are moved
    terms = cupy.asarray(np.full((1000, 2), 1e-40, np.float32))
    assert terms.sum(axis=0).get().tolist() == [0, 0]  # by CuPy's own kernel
    np.testing.assert_allclose(terms.sum().get(), 2e-37, rtol=1e-4)  # by cub's, which was compiled without the option
    assert x.astype(np.float64).get().tolist() == [0, 0]
    small = np.array([1e-40, 1e-310, 1e-30])
    assert cupy.asarray(small).astype(np.float32).get().tolist() == [0, 0, np.float32(1e-30)]
    z = cupy.asarray(np.complex64([1e-40 + 1j]))
    assert (z + z).get().tolist() == [2j]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_keep_their_subnormal_numbers(cupy: Any, dtype: str) -> None:
    x = np.array([1, -3, 5], dtype) * np.finfo(dtype).smallest_subnormal
    y = cupy.asarray(x)
    for found, want in ((y + y, x + x), (-y, -x), (y.sum(), x.sum()), (cupy.maximum(y, -y), np.abs(x)), (y * 1, x)):
        assert found.get().tobytes() == want.tobytes()
    if dtype == "float64":  # in a kernel that computes with float32 numbers too
        assert (y + cupy.asarray(np.float32(1e-40))).get().tobytes() == x.tobytes()


def test_a_kernel_without_the_option_keeps_them(cupy: Any) -> None:
    from fakecuda import compiler

    source = 'extern "C" __global__ void f(float* x) { x[0] = x[0] + x[1]; }'
    images = [compiler.compile_kernels(source, options)[0] for options in ((), ("-ftz=true",), ("-ftz=true", "--ftz=false"))]
    assert images[0] == images[2] != images[1]
    results = []
    for image in images[:2]:
        module, x = cupy.cuda.function.Module(), cupy.asarray(np.float32([1e-40, 2e-40]))
        module.load(image)
        module.get_function("f")((1,), (1,), (x,))
        results.append(float(x.get()[0]))
    assert results == [float(np.float32(1e-40) + np.float32(2e-40)), 0]


# ---- What is counted


def test_counts(cupy: Any) -> None:
    x = np.ones((8, 8), np.float32)
    with fakecuda.counting() as during:
        y = cupy.asarray(x)
        z = y @ y
        z.get()
    assert (during["to_device"], during["to_device_bytes"]) == (1, 256)
    assert (during["to_host"], during["to_host_bytes"]) == (1, 256)
    assert (during["products"], during["launches"], during["foreign"]) == (1, 0, 0)
    with fakecuda.counting() as during:
        (y + z).sum()
    assert (during["launches"], during["to_host"], during["to_device"]) == (3, 0, 0)  # cub reduces by two


def test_memory_is_counted_and_limited(cupy: Any) -> None:
    gc.collect()  # arrays of other tests
    before = fakecuda.used(0)
    x = cupy.empty(1000, np.uint8)
    assert fakecuda.used(0) == before + 1000
    free, total = cupy.cuda.runtime.memGetInfo()
    assert total - free == fakecuda.used(0)
    del x
    assert fakecuda.used(0) == before
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(1 << 40, np.uint8)


def test_new_memory_contains_no_zeros(cupy: Any) -> None:
    assert set(cupy.empty(100, np.uint8).get().tolist()) == {0xCD}


# ---- What is found


@pytest.mark.parametrize(("bound", "found"), [("i < n", False), ("i <= n", True)])
@pytest.mark.parametrize("access", ["x[i] = 1", "if (x[i] == 3) x[0] = 1"])
def test_an_index_one_too_far(cupy: Any, bound: str, found: bool, access: str) -> None:
    f = kernel(cupy, f"(float* x, int n) {{ int i = threadIdx.x; if ({bound}) {{ {access}; }} }}")
    x = cupy.zeros(10, np.float32)
    f((1,), (32,), (x, np.int32(10)))  # as on a device, the launch succeeds
    if not found:
        x.get()
        return
    with pytest.raises(Exception, match="illegal memory access"):
        x.get()
    with pytest.raises(Exception, match="illegal memory access"):  # and it lasts
        cupy.zeros(3)
    assert fakecuda.report() == ["(f): an access outside its arrays, past the end of one"]
    fakecuda.reset()


def test_dynamic_shared_memory_has_an_end(cupy: Any) -> None:
    f = kernel(cupy, "(int* x) { extern __shared__ int s[]; s[threadIdx.x] = 1; x[0] = s[0]; }")
    x = cupy.zeros(1, np.int32)
    f((1,), (32,), (x,), shared_mem=4 * 31)
    with pytest.raises(Exception, match="illegal memory access"):
        x.get()
    assert fakecuda.report() == ["(f): an access outside its arrays"]
    fakecuda.reset()


@pytest.mark.parametrize("barrier", ["__syncthreads();", ""])
def test_a_missing_barrier(cupy: Any, barrier: str) -> None:
    source = f"(float* x) {{ __shared__ float s[64]; int i = threadIdx.x; s[i] = x[i]; {barrier} x[i] = s[63 - i]; }}"
    x = cupy.arange(64, dtype=np.float32)
    with fakecuda.order("both"):
        kernel(cupy, source)((1,), (64,), (x,))
    assert fakecuda.report() == ([] if barrier else ["(f): its result depends on the order of its threads"])


def test_a_missing_barrier_of_one_block_that_reads_what_the_first_run_left(cupy: Any) -> None:
    source = (
        "(const int* x, int* y) { __shared__ int s[64]; s[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = s[63 - threadIdx.x]; }"
    )
    f = kernel(cupy, source)
    x, y = cupy.arange(64, dtype=np.int32), cupy.zeros(64, np.int32)
    f((1,), (64,), (x, y))
    assert 0xCDCDCDCD in y.get().view(np.uint32)  # shared memory of fixed size is new in every block


def test_a_write_before_an_array(cupy: Any) -> None:
    x = cupy.zeros(10, np.float32)
    kernel(cupy, "(float* x) { x[-1] = 1; }")((1,), (1,), (x,))
    del x
    assert fakecuda.report() == ["the memory before an array of 40 bytes was written"]


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint64, np.float16, np.float64])
def test_extremes_of_every_type(cupy: Any, dtype: Any) -> None:
    a, b = (RNG.integers(0, 100, 50).astype(dtype) for _ in range(2))
    assert cupy.maximum(cupy.asarray(a), cupy.asarray(b)).get().tolist() == np.maximum(a, b).tolist()
    assert cupy.asarray(a).min().get() == a.min()
    source = "(const {0}* x, {0}* y) {{ y[0] = max(x[0], x[1]); y[1] = min(x[0], x[1]); }}"
    names = {np.bool_: "bool", np.int8: "signed char", np.uint8: "unsigned char", np.int16: "short", np.uint16: "unsigned short"}
    if dtype in names:
        y = cupy.zeros(2, dtype)
        kernel(cupy, source.format(names[dtype]))((1,), (1,), (cupy.asarray(a), y))
        assert y.get().tolist() == [a[:2].max(), a[:2].min()]


def test_unordered_sums_are_found(cupy: Any) -> None:
    f = kernel(cupy, "(const float* x, float* sum) { atomicAdd(sum, x[threadIdx.x]); }")
    with fakecuda.order("both"):
        f((1,), (4,), (cupy.asarray(np.float32([1, 1e8, -1e8, 2])), cupy.zeros(1, np.float32)))
    assert fakecuda.report() == ["(f): its result depends on the order of its threads"]


def test_barriers_that_not_all_threads_reach(cupy: Any) -> None:
    f = kernel(cupy, "(int* x) { if (threadIdx.x < 3) __syncthreads(); else __syncwarp(); x[0] = 1; }")
    x = cupy.zeros(1, np.int32)
    f((1,), (40,), (x,))
    with pytest.raises(Exception, match="launch failure"):
        x.get()
    assert fakecuda.report() == ["(f): threads wait for each other at different barriers"]
    fakecuda.reset()


def test_a_division_by_zero(cupy: Any) -> None:
    f = kernel(cupy, "(int* x, int n) { x[0] = 5 / n; }")
    f((1,), (1,), (cupy.zeros(1, np.int32), np.int32(0)))
    assert fakecuda.report() == ["(f): an integer was divided by zero; a device's result is undefined"]
    fakecuda.reset()


def test_a_forgotten_device(cupy: Any) -> None:
    gc.collect()  # arrays of other tests
    before = fakecuda.used(1)
    with cupy.cuda.Device(1):
        x = cupy.arange(3, dtype=np.float32)
        x + x
        assert (fakecuda.used(1) - before, fakecuda.report()) == (12, [])
        y = cupy.eye(3, dtype=np.float32)
    with fakecuda.counting() as during, pytest.warns(cupy._util.PerformanceWarning):
        x + x
    assert during["foreign"] == 1  # the operand; the result is on device 0
    assert all("device 0 was current" in line for line in fakecuda.report())
    with fakecuda.counting() as during:
        y @ y
    assert during["foreign"] >= 1
    assert any(line.startswith("cublas") for line in fakecuda.report())


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda x, y: y.__setitem__(..., x), "a copy"),
        (lambda x, y: y.fill(0), "a memset"),
        (lambda x, y: y.sort(), "thrust::sort"),
    ],
)
def test_a_forgotten_device_where_no_kernel_runs(cupy: Any, use: Callable[[Any, Any], None], what: str) -> None:
    with cupy.cuda.Device(1):
        x, y = cupy.arange(6.0), cupy.ones(6)
        use(x, y)
        assert fakecuda.report() == []
    with fakecuda.counting() as during:
        use(x, y)
    assert during["foreign"] == 1
    assert fakecuda.report() == [f"{what}: device 0 was current, an array is on device 1"]


def test_copies_between_devices_are_counted(cupy: Any) -> None:
    x = cupy.arange(10, dtype=np.float32)
    with fakecuda.counting() as during, cupy.cuda.Device(1):
        y = cupy.asarray(x)
    assert (during["between_devices"], during["between_devices_bytes"]) == (1, 40)
    assert int(y.device.id) == 1


@pytest.mark.parametrize("blocks, threads", [((1,), (1025,)), ((1, 70000), (1,)), ((1,), (1, 1, 65))])
def test_launches_that_a_device_refuses(cupy: Any, blocks: Any, threads: Any) -> None:
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_VALUE"):
        kernel(cupy, "(int* x) { x[0] = 1; }")(blocks, threads, (cupy.zeros(1, np.int32),))
    assert fakecuda.report() == ["(f): a launch that a device refuses"]


def test_a_function_without_a_stand_in_fails_by_name(cupy: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match=r"801|NotSupported|not supported"):
        cupy.cuda.runtime.deviceSetLimit(0, 1024)
    assert fakecuda.report() == ["cudaDeviceSetLimit: has no stand-in"]
    assert "cudaDeviceSetLimit has no stand-in" in capfd.readouterr().err


# ---- Reductions by cub, CuPy's default


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(7,), (3, 70), (2, 3, 1500)])
def test_reductions(cupy: Any, dtype: str, shape: tuple[int, ...]) -> None:
    x = (RNG.standard_normal(shape) * 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    wide = x.astype(np.float64 if x.dtype.kind in "fV" or dtype == "bfloat16" else x.dtype)
    for memory in (x, np.asfortranarray(x)):
        y = cupy.asarray(memory)
        for name in ("sum", "max", "min", "argmax", "any", "all"):
            for axis in (None, -1, 0):
                want = getattr(wide, name)(axis=axis)
                with fakecuda.order("both"):
                    found = getattr(y, name)(axis=axis).get()
                near = 1e-5 if dtype in ("float32", "float64", "complex64") else 0.05
                if x.dtype.kind in "iub" or name != "sum":
                    near = 0
                np.testing.assert_allclose(found.astype(np.complex128), want, rtol=near, atol=3 * near * np.sqrt(x.size))


def test_histograms(cupy: Any) -> None:
    x = RNG.standard_normal(200).astype(np.float32)
    found, edges = cupy.histogram(cupy.asarray(x), 5)
    want = np.histogram(x, 5)
    np.testing.assert_array_equal(found.get(), want[0])
    np.testing.assert_allclose(edges.get(), want[1], rtol=1e-6)


def test_reductions_take_the_paths_of_cub(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fakecuda import host

    calls = []
    monkeypatch.setattr(host, "_call", lambda name, *_: calls.append(name))
    x = cupy.ones((3, 70), np.float32)
    x.sum(), x.max(axis=1), x.sum(axis=0), cupy.cumsum(x)
    assert calls == ["cub::DeviceReduce", "cub::DeviceSegmentedReduce", "cub::DeviceScan"]
    assert cupy._core.get_reduction_accelerators() == cupy._core.get_routine_accelerators() == [1]


# ---- The null device


def test_the_null_device_counts_and_computes_nothing() -> None:
    code = """import cupy, fakecuda
x = cupy.ones((64, 64), "float32")
with fakecuda.counting() as during:
    ((x + x) @ x).sum(axis=1).get()
print([during[n] for n in ("launches", "products", "to_host", "kernel_bytes")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**fakecuda.environment(), "FAKECUDA_NULL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    square, row = 4 * 64 * 64, 4 * 64
    assert done.stdout.strip() == str([2, 1, 1, 2 * square + 3 * square + square + row]), done.stderr


NULL = """import ctypes, cupy, fakecuda
x, row = cupy.ones((64, 32), "float32"), cupy.ones((1, 32), "float32")
batch, one = cupy.ones((5, 64, 32), "float32"), cupy.ones((32, 16), "float32")
out, places = cupy.empty_like(x), cupy.zeros(7, "int64")
kernel = cupy.RawKernel('extern "C" __global__ void f(float* x, int n) {}', "f")
raw = cupy.ElementwiseKernel("raw T x, int32 n", "T y", "y = x[i % n]")
pool = cupy.cuda.MemoryPool()
def work():
    cupy.add(x, row, out=out)
    cupy.add(x[:, ::2], 1, out=out[:, ::2])
    out.fill(0)
    out[...] = x
    x.take(places, axis=0)
    raw(x, 5, cupy.empty(3, "float32"))
    kernel((1,), (32,), (x, 3))
    x.sum()
"""


def null(code: str) -> str:
    """What a script prints whose device is the null device."""
    environment = {**fakecuda.environment(), "FAKECUDA_NULL": "1"}
    done = subprocess.run([sys.executable, "-c", NULL + code], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_the_null_device_logs_the_bytes_of_arrays() -> None:
    code = "work()\nwith fakecuda.logging() as log: work()\nprint([(w.name, w.bytes) for w in log if not w.in_graph])"
    whole, row, taken = 4 * 64 * 32, 4 * 32, 4 * 7 * 32
    assert null(code) == str(
        [
            ("cupy_add__float32_float32_float32", whole + row + whole),  # the row is read once
            ("cupy_add__float32_float_float32", whole),  # every other column, read and written
            ("a memset", whole),
            ("a copy", 2 * whole),
            ("cupy_take", taken + 7 * 8 + taken),
            ("cupy_kernel", whole + 12),  # it indexes the array by itself
            ("f", whole),  # an address
            ("cub::DeviceReduce", whole + 4),
        ]
    ).replace("cupy_kernel", "kernel")


def test_the_null_device_logs_operations() -> None:
    code = """
with fakecuda.logging() as log: x @ one; cupy.matmul(batch, one); x[:1] @ one
print([(w.kernels, w.bytes, w.flops) for w in log if w.flops])"""
    products = [(1, 64, 32, 16), (5, 64, 32, 16), (1, 1, 32, 16)]
    assert null(code) == str([(1, 4 * b * (m * k + k * n + m * n), 2 * b * m * k * n) for b, m, k, n in products])


def test_the_null_device_counts_graphs() -> None:
    """What is a node of a graph is logged as it is without one, and a launch of the graph is not a launch of kernels."""
    code = """
stream = cupy.cuda.Stream(non_blocking=True)
work()
with fakecuda.logging() as before: work()
with stream, cupy.cuda.using_allocator(pool.malloc):
    stream.begin_capture()
    work()
    graph = stream.end_capture()
graph.launch(stream)
with fakecuda.counting() as counts, fakecuda.logging() as log: graph.launch(stream)
assert all(w.in_graph for w in log)
same = [w._replace(in_graph=True) for w in before] == log
kernels = sum(w.kernels for w in log)
assert same and kernels == fakecuda.nodes(graph) == counts["graph_nodes"]
print([counts[n] for n in ("launches", "on_device", "memsets", "graphs")])"""
    assert null(code) == "[0, 0, 0, 1]"


# ---- NVRTC


def test_nvrtc_compiles_and_refuses() -> None:
    from fakecuda import nvrtc

    right = 'extern "C" __global__ void f(float* x) { x[0] = __expf(x[1]); }'
    assert [nvrtc.compiled(right, ["-ftz=true"], [], a) for a in nvrtc.ARCHITECTURES] == [""] * 4
    assert "INFINITY" in nvrtc.compiled(right.replace("x[1]", "INFINITY"), [], [], "90")


def test_nvrtc_uses_the_headers_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are kept with the folders of the environment that wrote them, which may be another one, or gone."""
    from fakecuda import nvrtc

    built = type("", (), {"kernels": tmp_path / "kernels"})
    monkeypatch.setattr(nvrtc, "libraries", lambda: built)
    text = '#include <cupy/complex.cuh>\nextern "C" __global__ void f(complex<float>* x) { x[0] = x[1] * x[2]; }'

    def kept(folder: str, source: str = text) -> dict[str, Any]:
        headers = f"-I{folder}/lib/python3/site-packages/cupy/_core/include"
        parts = [f"{headers}/cupy/_cccl/{name}" for name in ("cub", "thrust", "libcudacxx")]
        return {"source": source, "options": [*parts, "--std=c++17", headers], "names": []}

    assert nvrtc.check(kept("/gone"), "80") == ("", True)
    assert nvrtc.check(kept("/other"), "80") == ("", False)
    assert nvrtc.check(kept("/other"), "90")[1]
    wrong, ran = nvrtc.check(kept("/gone", text.replace("x[2]", "z[2]")), "80")
    assert "z" in wrong and ran


# ---- Other machines, in processes of their own


@pytest.mark.parametrize(
    ("variables", "code", "printed"),
    [
        ({}, "print(cupy.cuda.runtime.getDeviceCount())", "2"),
        ({"FAKECUDA_DEVICES": "1"}, "print(cupy.cuda.runtime.getDeviceCount())", "1"),
        ({"FAKECUDA_DEVICES": "0"}, "cupy.zeros(1)", "cudaErrorNoDevice"),
        ({"FAKECUDA_DRIVER": "0"}, "cupy.zeros(1)", "cudaErrorInsufficientDriver"),
        ({"FAKECUDA_MEMORY_MIB": "1"}, "cupy.empty(2**21, 'uint8')", "OutOfMemoryError"),
        ({"FAKECUDA_WITHOUT": "nvrtc"}, "cupy.zeros(3) + 1", "lib"),
        ({"FAKECUDA_WITHOUT": "cublas"}, "cupy.eye(3) @ cupy.eye(3)", "cublas"),
    ],
)
def test_machines_that_lack_something(variables: dict[str, str], code: str, printed: str) -> None:
    environment = {**fakecuda.environment(), **variables}
    done = subprocess.run(
        [sys.executable, "-c", f"import cupy; {code}"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert printed in (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"PATH": ""}, "g++ is not installed"),
        ({"SONNX_FAKECUDA_CACHE": "/proc/none"}, "the cache /proc/none/"),
        ({"PYTHONPATH": "{folder}"}, "pyelftools is not installed"),
    ],
)
def test_what_is_absent_is_named(change: dict[str, str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "elftools.py").write_text("raise ImportError('absent')")
    changed = {n: v.format(folder=f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}") for n, v in change.items()}
    done = subprocess.run(
        [sys.executable, "-m", "fakecuda", "true"], env={**os.environ, **changed}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.startswith(f"fakecuda: {reason}")


@pytest.mark.parametrize("required", [False, True])
def test_without_the_devices_tests_are_skipped_by_name_unless_they_are_required(required: bool) -> None:
    environment = {n: v for n, v in os.environ.items() if n not in ("SONNX_REQUIRE_FAKECUDA", fakecuda.ENVIRONMENT)}
    environment |= {"PATH": "", **({"SONNX_REQUIRE_FAKECUDA": "1"} if required else {})}
    command = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "fakecuda", f"{__file__}::test_counts"]
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert "g++ is not installed" in done.stdout + done.stderr
    assert (done.returncode, "1 skipped" in done.stdout) == ((4, False) if required else (0, True))


def test_another_build_of_cupy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from fakecuda import build

    known = build._functions(build.module_file("cupy_backends.cuda.api.runtime"))
    assert len(known) > 300
    del known["cudaMemcpyAsync"]
    with pytest.raises(RuntimeError, match="has no cudaMemcpyAsync to redirect"):
        build._build_driver(tmp_path, ["g++", "-shared", "-fPIC", *(f"-I{f}" for f in build._include_folders())], known)
    monkeypatch.setattr(build, "CUPY", "99.0")
    build.libraries.cache_clear()
    with pytest.raises(fakecuda.Unavailable, match=r"made for CuPy 99\.0, installed is"):
        build.libraries()
    build.libraries.cache_clear()


def test_a_number_that_is_the_address_of_an_array_is_no_use_of_it(cupy: Any) -> None:
    """Words of structures that a kernel does not read, which CuPy leaves unset, may have any value too."""
    with cupy.cuda.Device(1):
        other = cupy.ones(3, np.float32)
    echo = cupy.ElementwiseKernel("uint64 word", "uint64 y", "y = word", "fake_echo")
    assert int(echo(np.uint64(other.data.ptr), size=1)[0]) == other.data.ptr
    assert fakecuda.report() == []
