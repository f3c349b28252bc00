"""Scatter on an emulated CUDA device: NumPy's bits, in any order of threads, without a copy to the host."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakecuda
import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from singa_backend import SingaBackend
from singa_backend.devices import namespaces
from singa_backend.devices.namespaces import numpy

pytestmark = pytest.mark.fakecuda
RNG = np.random.default_rng(0)
DTYPES = [np.dtype(t) for t in namespaces._TYPES]
MODES = ["none", "add", "mul", "max", "min"]


@pytest.fixture
def xp() -> Any:
    pytest.importorskip("cupy")
    return namespaces.CupyNamespace()


@pytest.fixture(autouse=True)
def both_orders() -> Iterator[None]:
    with fakecuda.order("both"):
        yield


def draw(dtype: np.dtype[Any], *shape: int) -> np.ndarray:
    """Numbers near and far, with both zeros, both infinities, subnormals and NaN where there are any."""
    if dtype.kind in "iub":
        info = np.iinfo(dtype) if dtype.kind != "b" else None
        low, high = (info.min, info.max) if info else (0, 1)
        return RNG.integers(low, high, shape, np.int64 if low else np.uint64, endpoint=True).astype(dtype)
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        x = np.empty(shape, dtype)
        x.real, x.imag = draw(real, *shape), draw(real, *shape)
        return x
    x = RNG.standard_normal(shape) * 2.0 ** RNG.integers(-8, 8, shape)
    subnormal = {"float16": 6e-8, "float64": 1e-310}.get(dtype.name, 1e-40)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, subnormal, -3 * subnormal])
    return np.where(RNG.random(shape) < 0.2, RNG.choice(special, shape), x).astype(dtype)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits; the bits of a NaN have no meaning."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if want.dtype.kind == "c":
        assert_same_bits(got.real.copy(), want.real.copy())
        assert_same_bits(got.imag.copy(), want.imag.copy())
        return
    defined = want == want
    np.testing.assert_array_equal(got == got, defined)
    assert got[defined].tobytes() == want[defined].tobytes()


def compare(xp: Any, out: np.ndarray, index: tuple[np.ndarray, ...], values: np.ndarray, mode: str) -> None:
    """Scatter on the device and by NumPy; no value goes to the host."""
    there = xp.from_host(out)
    arguments = tuple(map(xp.from_host, index)), xp.from_host(values)
    with fakecuda.counting() as during:
        xp.scatter(there, *arguments, mode)
    assert (during["to_host"], during["to_device"]) == (0, 0)
    want = out.copy()
    with np.errstate(all="ignore"):
        numpy.scatter(want, index, values, mode)
    found = xp.to_host(there)
    if mode in ("max", "min"):  # NumPy leaves the sign of a zero to the processor
        found, want = (a + a.dtype.type(0) for a in (found, want))
    assert_same_bits(found, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_mode(xp: Any, dtype: np.dtype[Any], mode: str) -> None:
    places = RNG.integers(0, 7, 301)
    compare(xp, draw(dtype, 9), (places,), draw(dtype, 301), mode)  # elements
    compare(xp, draw(dtype, 5, 3, 4), (places[:40].reshape(8, 5) % 5, places[40:45] % 3), draw(dtype, 8, 5, 4), mode)  # rows


@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_layouts(xp: Any, mode: str) -> None:
    float32 = np.dtype(np.float32)
    places = RNG.integers(0, 4, 6)
    values = draw(float32, 6)
    compare(xp, draw(float32, 4, 5), (np.arange(2)[:, None], places.reshape(2, 3)), values.reshape(2, 3), mode)  # broadcast
    compare(xp, draw(float32, 4), (places.astype(np.int32),), values[:1], mode)  # and values
    compare(xp, np.asfortranarray(draw(float32, 4, 5)), (places, places), values, mode)
    compare(xp, draw(float32, 8, 5)[::2].T.copy("K"), (places, places % 4), values, mode)
    compare(xp, draw(float32, 4), (places[:0],), values[:0], mode)
    compare(xp, draw(float32, 4, 0), (places,), np.empty((6, 0), float32), mode)
    every_second = xp.from_host(np.zeros(8, float32))
    xp.scatter(every_second[::2], (xp.from_host(places),), xp.from_host(values), mode)
    want = np.zeros(8, float32)
    numpy.scatter(want[::2], (places,), values, mode)
    assert_same_bits(xp.to_host(every_second), want)


@pytest.mark.parametrize("dtype", ["float32", "complex64", ml_dtypes.bfloat16, "float16", "float64"], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_subnormal_numbers_are_kept(xp: Any, dtype: Any, mode: str) -> None:
    """CuPy's own kernels flush those of float32; every sum, product and comparison here has a subnormal operand or result."""
    dtype = np.dtype(dtype)
    scale = {"float16": 2.0**-20, "float64": 2.0**-1040}.get(dtype.name, 2.0**-133)
    small = (RNG.integers(-9, 9, (4, 30)) * scale).astype(dtype)
    if dtype.kind == "c":
        small = small + (1j * small[::-1]).astype(dtype)
    factors = RNG.uniform(0.3, 3, 30).astype(dtype) if mode == "mul" else small[1]
    compare(xp, small[0], (RNG.integers(0, 30, 30),), factors, mode)
    assert np.count_nonzero(small[0] + small[1])


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_does_not_exist_is_not_written(xp: Any, mode: str) -> None:
    """xp.indices raises for it; the memory of other arrays stays as it is whenever it does."""
    out = xp.from_host(np.ones((3, 2), np.float32))
    xp.scatter(out, (xp.from_host(np.array([3, -1, 1 << 40, -(1 << 40)])),), xp.from_host(np.zeros((4, 2), np.float32)), mode)
    assert (xp.to_host(out) == 1).all()


@pytest.mark.parametrize(("op", "mode"), [*itertools.product(["ScatterElements", "ScatterND"], MODES), ("MaxUnpool", "none")])
def test_the_tensors_of_operators_stay_on_the_device(op: str, mode: str) -> None:
    """What goes to the host is the output, and the minimum and maximum of the indices at the most."""
    x, updates = (RNG.standard_normal(shape).astype("f4") for shape in ((60, 50), (4, 50)))
    attributes: dict[str, Any] = {} if op == "MaxUnpool" else {"reduction": mode}
    if op == "ScatterElements":
        inputs = [x, RNG.integers(-60, 60, (4, 50)), updates]
    elif op == "ScatterND":
        inputs = [x, np.array([[3], [-1], [3], [59]]), updates]
    else:
        inputs, attributes["kernel_shape"] = [updates[None, None], RNG.integers(0, 255, (1, 1, 4, 50))], [2, 2]
    node = helper.make_node(op, [f"x{i}" for i in range(len(inputs))], ["y"], **attributes)
    with fakecuda.counting() as during:
        (there,) = SingaBackend.run_node(node, inputs, "CUDA")
    (here,) = SingaBackend.run_node(node, inputs)
    assert_same_bits(there, here)
    assert during["to_host_bytes"] <= here.nbytes + 32
    assert during["to_device_bytes"] <= sum(v.nbytes for v in inputs) + 16


def test_weights_of_bins_are_added_in_order(xp: Any) -> None:
    places, weights = RNG.integers(0, 5, 200), RNG.standard_normal(200) * 1e8 ** RNG.random(200)
    x = xp.from_host(places)
    with fakecuda.counting() as during:
        sums, counts = xp.bincount(x, weights=xp.from_host(weights), minlength=7), xp.bincount(x, minlength=7)
    assert during["to_host"] == 0
    assert_same_bits(xp.to_host(sums), np.bincount(places, weights, 7))
    assert_same_bits(xp.to_host(counts), np.bincount(places, minlength=7))


def test_scatter_on_the_second_device(xp: Any) -> None:
    with xp.cuda.Device(1), fakecuda.counting() as during:
        compare(xp, draw(np.dtype("f4"), 9), (RNG.integers(0, 7, 30),), draw(np.dtype("f4"), 30), "add")
    assert during["foreign"] == 0


# ---- Wrong on purpose: what the tests above would report


def scatter_some(xp: Any, mode: str = "add") -> list[str]:
    """Scatter duplicates, and return what is wrong: a report of the device, or other bits than NumPy's."""
    fakecuda.reset()
    wrong = []
    out, places, values = draw(np.dtype("f4"), 9), RNG.integers(0, 7, 301), RNG.standard_normal(301).astype("f4")
    try:
        compare(xp, out, (places,), values, mode)
    except AssertionError:
        wrong.append("bits")
    except xp.cuda.runtime.CUDARuntimeError as error:
        wrong.append(str(error))
    wrong += fakecuda.report()
    fakecuda.reset()
    return wrong


def mutate(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    monkeypatch.setattr(namespaces, "_TYPES", {np.dtype(np.float32): "float"})  # few kernels compile sooner
    source = namespaces.scatter_source()
    assert change(source) != source
    monkeypatch.setattr(namespaces, "scatter_source", lambda: change(source))


def test_nothing_is_wrong_before_a_change(xp: Any) -> None:
    assert scatter_some(xp) == scatter_some(xp, "none") == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("thread < n * inner", "thread <= n * inner"),  # a thread too many
        ("i < n && place", "place"),  # the end of the last group of equal rows
    ],
)
def test_an_index_one_too_far_is_found(xp: Any, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    mutate(monkeypatch, lambda source: source.replace(right, wrong))
    assert any("access outside" in line for line in scatter_some(xp))


def test_threads_that_write_the_same_element_are_found(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, lambda source: source.replace("if (begins && ", "if ("))
    assert any("depends on the order of its threads" in line for line in scatter_some(xp))


def test_another_order_of_sums_is_found(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xp.module, "argsort", lambda x: xp.lexsort(xp.stack([-xp.arange(x.size), x])))
    assert scatter_some(xp) == ["bits"]


def test_a_forgotten_device_is_found(xp: Any) -> None:
    """Arrays of device 1 while device 0 is current."""
    with xp.cuda.Device(1):
        out, places, values = (xp.from_host(x) for x in (np.zeros(9, "f4"), np.array([1, 1, 3]), np.ones(3, "f4")))
    with fakecuda.counting() as during:
        xp.scatter(out, (places,), values, "add")
    assert during["foreign"]
    assert any("scatter_float32_add" in line and "device 0 was current" in line for line in fakecuda.report())


WITHOUT_BARRIERS = """
from cupy.cuda import compiler
compile = compiler._compile_module_with_cache
def compile_without_barriers(source, *arguments, **options):
    return compile(source.replace("__syncthreads()", ""), *arguments, **options)
compiler._compile_module_with_cache = compile_without_barriers
"""
REDUCE = """
import fakecuda, numpy as np
from onnx import helper
from singa_backend import SingaBackend
node = helper.make_node("ReduceSum", ["x"], ["y"], axes=[0], keepdims=0)
x = np.random.default_rng(0).standard_normal((1000, 3)).astype("f4")
with fakecuda.order("both"):
    y, = SingaBackend.run_node(node, [x], "CUDA", opset_version=11)
print(abs(y - x.sum(0)).max() < 1e-3, fakecuda.report())
"""


@pytest.mark.parametrize("barriers", [True, False])
def test_a_missing_barrier_is_found(barriers: bool) -> None:
    """In a kernel of CuPy, when an operator uses it; ours have none."""
    code = REDUCE if barriers else WITHOUT_BARRIERS + REDUCE
    done = subprocess.run(
        [sys.executable, "-c", code], env=fakecuda.environment(), capture_output=True, text=True, timeout=120, check=False
    )
    right, report = done.stdout.split(maxsplit=1)
    assert (right, report.strip()) == ("True", "[]") if barriers else right == "False" or "order of its threads" in report


# ---- CUDA's own compiler, which needs no device


def nvrtc(output: str, options: list[str]) -> bytes:
    """What NVRTC compiles of the kernels: "CUBIN", or "PTX"."""
    toolkit = Path(importlib.util.find_spec("nvidia").submodule_search_locations[0]) / "cu13"  # type: ignore[union-attr, index]
    library = ctypes.CDLL(str(toolkit / "lib" / "libnvrtc.so.13"))
    options = [*options, f"-I{toolkit / 'include'}"]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = namespaces.scatter_source().encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"scatter.cu", 0, None, None) == 0
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options)))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    assert getattr(library, f"nvrtcGet{output}Size")(program, ctypes.byref(size)) == 0
    made = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{output}")(program, made) == 0
    assert library.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return made.raw


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_nvrtc_compiles_the_kernels(architecture: str) -> None:
    cubin = nvrtc("CUBIN", [*namespaces.COMPILED_WITH, f"--gpu-architecture={architecture}"])
    assert all(namespaces._kernel(dtype, mode).encode() in cubin for dtype in DTYPES for mode in MODES)


def test_no_product_is_fused_with_a_sum() -> None:
    """A product of complex numbers would have other bits than NumPy's; g++ fuses nothing, so the device's code is read."""
    architecture = "--gpu-architecture=compute_80"
    assert b"fma.rn.f64" in nvrtc("PTX", [architecture])
    assert b"fma.rn" not in nvrtc("PTX", [*namespaces.COMPILED_WITH, architecture])


ADDED = "-ftz=true"  # by CuPy, after our options


def test_no_instruction_flushes_subnormal_numbers() -> None:
    """CuPy's option would; the kernels are written in instructions that it does not change."""
    ptx = nvrtc("PTX", [*namespaces.COMPILED_WITH, ADDED, "--gpu-architecture=compute_80"])
    assert b".ftz" not in ptx
    assert all(name in ptx for name in (b"add.rn.f32", b"sub.rn.f32", b"mul.rn.f32", b"setp.ge.f32"))


def test_the_options_are_those_that_cupy_compiles_with(xp: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cupy.cuda import compiler

    seen: list[tuple[str, ...]] = []
    compile = compiler._compile_using_nvrtc_no_warning

    def watching(source: str, options: tuple[str, ...] = (), *arguments: Any) -> Any:
        seen.append(tuple(options))
        return compile(source, options, *arguments)

    monkeypatch.setattr(compiler, "_compile_using_nvrtc_no_warning", watching)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(namespaces, "_TYPES", {np.dtype(np.float32): "float"})
    code = namespaces.scatter_source() + f"// {tmp_path}\n"
    xp.module.RawModule(code=code, options=namespaces.COMPILED_WITH).get_function("scatter_float32_add")
    own = [o for o in seen if set(namespaces.COMPILED_WITH) <= set(o)]
    assert own and all(o[-1] == ADDED or ADDED in o for o in own)
