"""The stages of `sonnx device-check` that run models, operators and gradients; those that train are in singa.cli."""

from __future__ import annotations

import os
import platform
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module, metadata
from itertools import chain, product
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # its dtypes are known to NumPy by name
import numpy as np
from onnx import helper, load_model_from_string, parser

from ..backend import SingaBackend
from ..comparison import tolerances, verdict
from ..devices import cuda
from ..devices.device import resolve
from ..errors import SonnxError
from ..interpreters.eager import Eager
from ..io.processes import ChildFailure
from ..limits import Limits
from . import cases, gaps, gradient_matrix, gradients, worker
from .device_check import CheckSetup, Wrong
from .gradient_matrix.row import needs_judging

_SHOWN = 20
"""The number of cases that are named of those that failed."""


# --- versions -----------------------------------------------------------------------------------------------------------

PACKAGES = ("sonnx", "onnx", "numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "cupy")
LIBRARIES = ("nvrtc", "cublas", "cusolver", "cufft")
"""The libraries that CuPy opens when they are needed: without one of them some operators fail."""
VARIABLES = ("CUPY_", "CUDA_", "NVIDIA_", "SONNX_")


def versions(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Record the versions of everything and the places of CUDA's libraries, then ask for the device."""
    details["python"], details["system"] = platform.python_version(), platform.platform()
    details["packages"] = {p: v for p in PACKAGES if (v := _version(p))}
    if driver := _driver():
        details["driver"] = driver
    details["environment"] = {
        n: v for n, v in sorted(os.environ.items()) if n.startswith(VARIABLES) and not n.startswith("NVIDIA_REQUIRE_")
    }
    missing: list[str] = []
    try:
        import cupy
    except ImportError as error:
        details["cupy"] = f"{type(error).__name__}: {error}"
    else:
        details["cuda"] = {
            "driver": _asked(lambda: cupy.cuda.runtime.driverGetVersion()),
            "runtime": _asked(lambda: cupy.cuda.runtime.runtimeGetVersion()),
            "nvrtc": _asked(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion()))),
            "cublas": _asked(lambda: cupy.cuda.cublas.getVersion(cupy.cuda.Device().cublas_handle)),
        }
        details["libraries"] = {name: _asked(partial(_place, name)) for name in LIBRARIES}
        missing = [n for n, found in details["libraries"].items() if found.startswith(_NO)]
    device = resolve(setup.device)
    if device.type == "CUDA":
        details["devices"] = [_properties(cupy, i) for i in range(cupy.cuda.runtime.getDeviceCount())]
        details["name"] = details["devices"][device.device_id]["name"]
        details["emulated"] = details["name"].startswith("emulated")
    if missing:
        raise Wrong(f"CuPy must find the libraries of CUDA, {', '.join(missing)} not found; {cuda.install()}")


_NO = "not available: "


def _asked(ask: Callable[[], Any]) -> Any:
    """The answer to a question that a broken installation cannot answer."""
    try:
        return ask()
    except Exception as error:
        return f"{_NO}{type(error).__name__}: {error}"


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _driver() -> str:
    """The version of the NVIDIA driver on Linux; CUDA reports only the version of CUDA that the driver supports."""
    with suppress(OSError):
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
        return _driver_name(line)
    return ""


def _driver_name(line: str) -> str:
    """The name and the version in the first line of /proc/driver/nvidia/version, without where and when it was built."""
    found = re.match(r"(?:NVRM version:\s*)?(.*?\s\d+\.\d+(?:\.\d+)?)\b", line)
    return " ".join(found[1].split()) if found else line


def _place(name: str) -> str:
    pathfinder: Any = import_module("cuda.pathfinder")
    return str(pathfinder.load_nvidia_dynamic_lib(name).abs_path)


def _properties(cupy: Any, ordinal: int) -> dict[str, Any]:
    found = cupy.cuda.runtime.getDeviceProperties(ordinal)
    return {
        "name": found["name"].decode(),
        "compute_capability": f"{found['major']}.{found['minor']}",
        "memory": int(found["totalGlobalMem"]),
    }


# --- one kernel, products, traps ----------------------------------------------------------------------------------------

MODEL = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y)
    <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { p = MatMul(x, w) y = Relu(p) }"""
"""A model whose results are exact."""


def smoke(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Copy to the device and back, run one kernel and one product, and run a model."""
    device = resolve(setup.device)
    with device.active():
        for dtype in ("float32", "int64", "bool", "float16", "bfloat16"):
            x = np.arange(-3, 4).astype(dtype)
            if not verdict.same_bits(device.get(device.put(x)), x):
                raise Wrong(f"an array of {dtype} has other values after a copy to the device and back")
        op = Eager(device)
        m = np.arange(12.0, dtype=np.float32).reshape(3, 4)
        _equal("Add", device.get(op.Add(device.put(m), device.put(m))), m + m)
        _equal("MatMul", device.get(op.MatMul(device.put(m), device.put(m.T.copy()))), m @ m.T)
    rows = np.array([[1, 2, 3], [-1, 0, -1]], np.float32)
    _equal("a model", SingaBackend.prepare(parser.parse_model(MODEL), setup.device).run([rows])[0], [[22, 28], [0, 0]])
    details["copies"], details["device"] = 5, str(device)


def _equal(what: str, found: Any, expected: Any) -> None:
    if not np.array_equal(found, expected):
        raise Wrong(f"{what} must return {np.asarray(expected).tolist()}, got {np.asarray(found).tolist()}")


SHAPES = {
    "matrices": ((37, 64), (64, 29)),
    "aligned": ((128, 128), (128, 128)),
    "batch": ((3, 17, 33), (3, 33, 9)),
    "one for a batch": ((2, 3, 5, 16), (16, 7)),
    "broadcast": ((2, 1, 5, 8), (3, 8, 4)),
    "vector": ((40,), (40, 6)),
}
"""Shapes of the factors of products."""
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The step above 1 of each dtype."""


def products(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Compare matrix products of every float dtype, also of transposed arrays, with float64; float32 must not be rounded to TF32.

    The bound of an element is that of a sum in any order: the number of its terms times the rounding of the sums, which are
    float32 or wider, times the sum of the terms' magnitudes, and the rounding of the result.
    """
    device, rng = resolve(setup.device), np.random.default_rng(0)
    with device.active():
        op = Eager(device)
        worst: dict[str, float] = {}
        for dtype, (name, shapes), (left, right) in product(
            ("float16", "bfloat16", "float32", "float64"), SHAPES.items(), product((False, True), repeat=2)
        ):
            a, b = (rng.uniform(-1, 1, s).astype(dtype) for s in shapes)
            x, y = (_placed(device, v, turned) for v, turned in ((a, left), (b, right)))
            found = device.get(op.MatMul(x, y))
            where = f"{dtype}, {name}" + (", left factor transposed" * left) + (", right factor transposed" * right)
            if found.dtype != a.dtype:
                raise Wrong(f"the product ({where}) must be {dtype}, got {found.dtype}")
            wide = np.float64
            exact, size = a.astype(wide) @ b.astype(wide), np.abs(a.astype(wide)) @ np.abs(b.astype(wide))
            sums = _EPSILON["float64" if dtype == "float64" else "float32"]
            allowed = sums * a.shape[-1] * size + _EPSILON[dtype] * np.abs(exact)
            share = float((np.abs(found.astype(wide) - exact) / allowed).max())
            worst[dtype] = max(worst.get(dtype, 0.0), share)
            if not share <= 1:
                raise Wrong(f"the error of the product ({where}) must be within its bound, got {share:.3g} times the bound")
        details["largest error, as a share of the bound"] = {k: round(v, 4) for k, v in worst.items()}
        _integers(op, device, rng)
        _single_precision(op, device, rng)
        details["TF32"] = "off: a product with a permutation matrix has all 24 bits"


def _placed(device: Any, value: np.ndarray, turned: bool) -> Any:
    """The array on the device, in memory transposed if `turned`."""
    if not turned or value.ndim < 2:
        return device.put(value)
    return device.put(np.ascontiguousarray(np.swapaxes(value, -1, -2))).swapaxes(-1, -2)


def _integers(op: Any, device: Any, rng: np.random.Generator) -> None:
    a, b = rng.integers(-128, 128, (31, 65), np.int8), rng.integers(-128, 128, (65, 33), np.int8)
    found = device.get(op.MatMulInteger(device.put(a), device.put(b)))
    _equal("MatMulInteger", found, a.astype(np.int64) @ b.astype(np.int64))


def _single_precision(op: Any, device: Any, rng: np.random.Generator) -> None:
    """A product with a permutation matrix is exact in float32; TF32 keeps 11 of the 24 bits of the other factor."""
    order = rng.permutation(128)
    permutation = np.eye(128, dtype=np.float32)[:, order]
    x = rng.uniform(-1, 1, (128, 128)).astype(np.float32)
    for a, b, expected in ((x, permutation, x[:, order]), (permutation.T.copy(), x, x[order])):
        found = device.get(op.MatMul(device.put(a), device.put(b)))
        wrong = int((found != expected).sum())
        if wrong:
            error = float(np.abs(found - expected).max())
            hint = "unset NVIDIA_TF32_OVERRIDE and CUPY_TF32"
            raise Wrong(
                f"a float32 product must not be rounded to TF32, got {wrong} inexact elements (error {error:.2g}); {hint}"
            )


_FLOATS = (np.nan, np.inf, -np.inf, 3e9, -3e9, 1e20, -1e20, -0.5, 300.7, -129.0)
_LOW32, _LOW64 = np.iinfo(np.int32).min, np.iinfo(np.int64).min


def _traps() -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """Calls of operators whose results CUDA and the CPU's instructions define differently: name, operator, inputs, attributes."""
    x = np.arange(4.0, dtype=np.float32)
    for index in (-1, -4, 3, 4, -5, 2**63 - 1, -(2**63)):
        yield f"Gather of element {index} of 4", "Gather", [x, np.array([index])], {}
        yield f"GatherND of element {index} of 4", "GatherND", [x, np.array([[index]])], {}
        data = [x, np.array([index]), np.array([9], np.float32)]
        yield f"ScatterElements to element {index} of 4", "ScatterElements", data, {}
    for source, to in product((np.float32, np.float64), ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "bool")):
        attributes = {"to": helper.np_dtype_to_tensor_dtype(np.dtype(to))}
        yield f"Cast of {np.dtype(source)} to {to}", "Cast", [np.array(_FLOATS, source)], attributes
    for low, dtype in ((_LOW32, np.int32), (_LOW64, np.int64)):
        for op in ("Div", "Mod"):
            yield f"{op} of the lowest {np.dtype(dtype)} by -1", op, [np.array([low, 7], dtype), np.array([-1, -2], dtype)], {}
            yield f"{op} of {np.dtype(dtype)} by 0", op, [np.array([5, -5], dtype), np.array([0, 0], dtype)], {}
        yield f"Abs of the lowest {np.dtype(dtype)}", "Abs", [np.array([low], dtype)], {}
        yield f"Neg of the lowest {np.dtype(dtype)}", "Neg", [np.array([low], dtype)], {}
    floats = np.array([1, -1, 0, np.nan], np.float32)
    yield "Div of float32 by 0", "Div", [floats, np.zeros(4, np.float32)], {}
    yield "Mod of float32 by 0", "Mod", [floats, np.zeros(4, np.float32)], {"fmod": 1}
    for direction in ("LEFT", "RIGHT"):
        words = [np.full(5, 0xFFFFFFFF, np.uint32), np.array([0, 31, 32, 63, 200], np.uint32)]
        yield f"BitShift {direction} by 32 and more", "BitShift", words, {"direction": direction}
    yield "Pow of int32 to -1", "Pow", [np.array([2, 1, -1], np.int32), np.array([-1, -1, -1], np.int32)], {}
    nan = np.array([[1, np.nan, 3], [np.nan, 0, -1]])
    for op in ("ReduceMax", "ReduceMin"):
        yield f"{op} with NaN", op, [nan, np.array([1])], {}
    for op in ("Max", "Min"):
        yield f"{op} with NaN", op, [nan, np.ones_like(nan)], {}
    yield "Clip of NaN", "Clip", [nan, np.array(0.0), np.array(2.0)], {}
    yield "Sign of NaN", "Sign", [nan], {}
    yield "Round of halves", "Round", [np.array([0.5, 1.5, 2.5, -0.5, -1.5])], {}
    yield "TopK of equal elements", "TopK", [np.array([[2, 2, 1, 2]], np.float32), np.array([3])], {}
    for reduction in ("max", "min"):
        data = [np.array([[0.0, 5.0, -1.0]]), np.array([[0, 0, 2]]), np.array([[np.nan, 7.0, -3.0]])]
        yield f"ScatterElements {reduction} of float64 with NaN", "ScatterElements", data, {"axis": 1, "reduction": reduction}
    yield "ReduceSum of no elements", "ReduceSum", [np.zeros((2, 0), np.float32), np.array([1])], {}


_TINY = np.array([1e-40, -1e-40, 3e-45, 0.5, -0.0, 2e-38], np.float32)
"""Numbers of which the first three are subnormal, and the products of the last one with numbers below 0.5."""
_DOUBLE, _SINGLE = (helper.np_dtype_to_tensor_dtype(np.dtype(t)) for t in ("float64", "float32"))


def _kept() -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """Calls whose results have subnormal numbers on every device: they move bits, scatter, or compute in another dtype."""
    places, one = np.array([0, 2, 0, 1, 2, 5]), np.zeros(6, np.float32)
    yield "Gather of subnormal numbers", "Gather", [_TINY, np.array([2, 0])], {}
    yield "Concat of subnormal numbers", "Concat", [_TINY, _TINY], {"axis": 0}
    yield "Transpose of subnormal numbers", "Transpose", [_TINY.reshape(2, 3)], {}
    yield "Where of subnormal numbers", "Where", [_TINY > 0, _TINY, one], {}
    for reduction in ("none", "add", "mul", "max", "min"):
        data = [_TINY if reduction == "mul" else one, places, np.full(6, 0.3, np.float32) if reduction == "mul" else _TINY]
        yield f"ScatterElements {reduction} of subnormal numbers", "ScatterElements", data, {"reduction": reduction}
    for dtype in (np.float16, np.float64):
        x: np.ndarray = np.array([1, -3, 5]) * float(np.finfo(dtype).smallest_subnormal)
        x = x.astype(dtype)
        for op in ("Add", "Sub", "Max"):
            yield f"{op} of subnormal {np.dtype(dtype)}", op, [x, x[::-1].copy()], {}
        yield f"Neg of subnormal {np.dtype(dtype)}", "Neg", [x], {}
    yield "Cast of subnormal float16 to float32", "Cast", [np.array([6e-8, -6e-8], np.float16)], {"to": _SINGLE}


def _flushing() -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """Calls of float32 operators whose subnormal inputs and outputs CuPy's kernels flush to zeros of their signs."""
    for op in ("Add", "Sub", "Mul", "Div", "Greater", "Equal"):
        yield f"{op} of subnormal numbers", op, [_TINY, np.array([0.25, 3e-40, 0.5, 1e-39, 4.0, 0.25], np.float32)], {}
    for op in ("Neg", "Abs", "Ceil", "Floor", "Sqrt", "Log", "Relu"):
        yield f"{op} of subnormal numbers", op, [_TINY], {}
    yield "Exp with a subnormal result", "Exp", [np.array([-100.0, -90.0], np.float32)], {}
    yield "Cast of subnormal float32 to float64", "Cast", [_TINY], {"to": _DOUBLE}
    yield "Cast of float64 to subnormal float32", "Cast", [_TINY.astype(np.float64)], {"to": _SINGLE}
    yield "ReduceSum of subnormal numbers", "ReduceSum", [np.full((2, 100), 1e-41, np.float32), np.array([1])], {}


def _flushed(x: np.ndarray) -> np.ndarray:
    """Float32 numbers, subnormal ones replaced by zeros of their signs."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _subnormal(device: str) -> tuple[list[str], int, int, int]:
    """Compare results that may be flushed.

    Returns:
        What is wrong, and the numbers of calls, of those that returned the flushed result, and of those that kept it.
    """
    wrong, count, flushes, keeps = [], 0, 0, 0
    for name, op, inputs, attributes in _flushing():
        count += 1
        there, kept = (_result(op, inputs, attributes, d) for d in (device, "CPU"))
        replaced = [_flushed(x) for x in inputs]
        lost = _result(op, replaced, attributes, "CPU")
        if isinstance(kept, SonnxError) or isinstance(lost, SonnxError) or isinstance(there, SonnxError):
            wrong.append(f"{name}: {there}")
            continue
        is_lost, is_kept = (
            not verdict.strict(there, want, tolerances.DEVICE.bound(want[0].dtype).rtol, 0)
            for want in ([_flushed(x) for x in lost], kept)
        )
        flushes, keeps = flushes + (is_lost and not is_kept), keeps + (is_kept and not is_lost)
        if not is_lost and not is_kept:
            wrong.append(f"{name}: {there[0].tolist()}, on the CPU {kept[0].tolist()}, flushed {lost[0].tolist()}")
    return wrong, count, flushes, keeps


def traps(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Compare with the CPU what CUDA defines otherwise: indices that wrap, NaN as an integer, division by 0, NaN in maxima.

    Subnormal float32 numbers may be flushed by arithmetic (docs/gpu.md), and must be kept by all else.
    """
    resolve(setup.device)
    wrong, count, flushes, keeps = _subnormal(setup.device)
    details["subnormal float32"] = f"flushed in {flushes} calls, kept in {keeps}"
    for name, op, inputs, attributes in chain(_traps(), _kept()):
        count += 1
        there, here = (_result(op, inputs, attributes, device) for device in (setup.device, "CPU"))
        if why := _unlike(there, here):
            wrong.append(f"{name}: {why}")
    details["calls"], details["wrong"] = count, wrong[:_SHOWN]
    if wrong:
        raise Wrong(f"{len(wrong)} of {count} calls must do what they do on the CPU: {'; '.join(wrong[:3])}")


def _result(op: str, inputs: list[Any], attributes: dict[str, Any], device: str) -> Any:
    """The outputs of a node, or its error."""
    names = [f"x{i}" for i in range(len(inputs))]
    node = helper.make_node(op, names, ["y", "z"] if op == "TopK" else ["y"], **attributes)
    try:
        return list(SingaBackend.run_node(node, inputs, device, opset_version=21))
    except SonnxError as error:
        return error


def _unlike(there: Any, here: Any) -> str:
    """Compare two results of `_result`; "" if they agree."""
    if isinstance(here, SonnxError) or isinstance(there, SonnxError):
        codes = [f"the error {r.code}" if isinstance(r, SonnxError) else verdict.brief(r[0]) for r in (there, here)]
        return "" if codes[0] == codes[1] else f"{codes[0]}, on the CPU {codes[1]}"
    return verdict.strict(there, here, 0, 0)


# --- ONNX's cases -------------------------------------------------------------------------------------------------------


class _Late(Exception):
    """The time of a stage is nearly over."""


def _last_call(setup: CheckSetup) -> float:
    """When a stage stops by itself, so that it can report what it has done."""
    return time.monotonic() + 0.95 * setup.deadline


def _chosen(setup: CheckSetup) -> list[cases.Case]:
    return cases.load()[:: setup.every]


def kernels(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Compile the kernels of ONNX's cases in several processes, which share CuPy's cache; no result is judged.

    The cases of one operator, which need the same kernels, are a request to one process.
    """
    resolve(setup.device)
    end = _last_call(setup)
    groups: dict[str, list[cases.Case]] = defaultdict(list)
    for case in _chosen(setup):
        groups[load_model_from_string(case.model).graph.node[0].op_type].append(case)
    details["kernels_before"] = _cached()
    lost: list[str] = []
    done = 0
    names = list(groups)
    for i, answer in worker.answers(
        list(groups.values()), _warming, setup.device, jobs=setup.processes, timeout=max(1.0, setup.deadline)
    ):
        done += 1
        if isinstance(answer, ChildFailure):
            lost.append(f"{names[i]}: {answer}")
        if time.monotonic() > end and done < len(groups):
            break
    details["kernels_after"] = _cached()
    details["operators"], details["of"], details["lost"] = done, len(groups), lost[:_SHOWN]
    if done < len(groups):
        raise Wrong(f"deadline: the kernels of {done} of {len(groups)} operators were compiled")
    if lost:
        raise Wrong(f"{len(lost)} processes were lost: {'; '.join(lost[:3])}")


def _warming(device: str) -> Callable[[list[cases.Case]], None]:
    def warm(chosen: list[cases.Case]) -> None:
        for case in chosen:
            with suppress(Exception):  # the suite judges
                rep = SingaBackend.prepare(load_model_from_string(case.model), device)
                for inputs, _ in case.data:
                    rep.run(inputs)

    warnings.simplefilter("ignore")
    return warm


def _cached() -> int:
    """The number of kernels in CuPy's cache."""
    folder = cuda.kernel_cache()
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def suite(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Run ONNX's cases under the strict verdict; what fails must be in gaps.txt.  A case may take half of the deadline."""
    resolve(setup.device)
    end, chosen = _last_call(setup), _chosen(setup)
    found: list[worker.Result] = []

    def note(result: worker.Result) -> None:
        found.append(result)
        if time.monotonic() > end and len(found) < len(chosen):
            raise _Late

    with suppress(_Late):
        worker.run(chosen, worker.OURS, setup.device, setup.processes, setup.deadline / 2, note)
    judged = gaps.judge(found, gaps.read(cases.data_file("gaps.txt"), setup.device))
    details["cases"], details["of"] = len(found), len(chosen)
    details["strict"] = sum(r.strict == "passed" for r in found)
    details["official"] = sum(r.official == "passed" for r in found)
    details["gaps"] = judged.explained
    details["unexpected"] = {r.name: f"{r.strict}: {(r.reason or r.official_reason)[:400]}" for r in judged.unexpected[:_SHOWN]}
    details["closed_gaps"] = judged.closed
    bad = [*(f"{r.name} ({r.strict})" for r in judged.unexpected), *(f"{n} (a gap that passes)" for n in judged.closed)]
    if bad:
        raise Wrong(f"{len(bad)} of {len(found)} cases differ from gaps.txt: {', '.join(bad[:5])}")
    if len(found) < len(chosen):
        raise Wrong(f"deadline: {len(found)} of {len(chosen)} cases ran, and none failed")


# --- gradients ----------------------------------------------------------------------------------------------------------


def gradient(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Compare the gradients of operator versions, one point each, by the tape and as a graph, with those on the CPU."""
    resolve(setup.device)
    end = _last_call(setup)
    rows = [row for row in gradient_matrix.listed() if needs_judging(row)][:: setup.every]
    wrong, done, points = {}, 0, 0
    for i, answer in worker.answers(
        [row.key for row in rows], _differentiating, setup.device, jobs=setup.processes, timeout=setup.deadline / 2
    ):
        done += 1
        failed = isinstance(answer, ChildFailure)
        points += failed or answer is not None
        if answer:
            wrong[rows[i].name] = str(answer)
        if time.monotonic() > end and done < len(rows):
            break
    details["operator_versions"], details["of"], details["points"] = done, len(rows), points
    details["wrong"] = dict(list(wrong.items())[:_SHOWN])
    if wrong:
        raise Wrong(f"{len(wrong)} of {done} gradients differ from those on the CPU: {', '.join(list(wrong)[:5])}")
    if done < len(rows):
        raise Wrong(f"deadline: {done} of {len(rows)} gradients were computed, and none is wrong")
    if not points:
        raise Wrong(f"none of {done} operator versions has a point: no gradient was compared")


def _differentiating(device: str) -> Callable[[tuple[str, str, int]], str | None]:
    """Return, in the child, the function that compares the gradients of a version: "" if they agree, None without a point."""
    warnings.simplefilter("ignore")
    there = resolve(device)

    def compare(key: tuple[str, str, int]) -> str | None:
        point = next(gradients.points(*key, count=1), None)
        if point is None:
            return None
        moved = replace(point, device=there)
        try:
            pairs: Iterable[tuple[str, Any, Any]] = (
                ("tape", moved.eager(), point.eager()),
                ("graph", moved.through_graph(), point.through_graph()),
            )
            return next((f"{form}: {why}" for form, a, b in pairs if (why := unlike(a, b))), "")
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return compare


def unlike(there: Any, here: Any) -> str:
    """Compare values of a device with those of the CPU, within the tolerances for devices.

    Args:
        there: An array of the device on the host, a list of such values, or None.
        here: The same of the CPU.

    Returns:
        How they differ; "" if they agree.
    """
    if there is None or here is None:
        return "" if there is here else f"{verdict.brief(there)}, on the CPU {verdict.brief(here)}"
    if isinstance(here, (list, tuple)):
        if len(there) != len(here):
            return f"{len(there)} values, on the CPU {len(here)}"
        return next((why for a, b in zip(there, here, strict=True) if (why := unlike(a, b))), "")
    there, here = np.asarray(there), np.asarray(here)
    size = float(np.abs(here[np.isfinite(here)]).max(initial=tolerances.DEVICE_LEAST)) if here.dtype.kind == "f" else 0.0
    return verdict.strict(there, here, 0, tolerances.DEVICE.bound(here.dtype).rtol * size, "value")


# --- memory -------------------------------------------------------------------------------------------------------------


def out_of_memory(setup: CheckSetup, details: dict[str, Any]) -> None:
    """Run a model that needs more memory than is free: a typed error must name it, and the device must be usable afterwards."""
    device = resolve(setup.device)
    import cupy

    with device.active():
        free, total = cupy.cuda.runtime.memGetInfo()
    details["free"], details["total"] = free, total
    text = '<ir_version: 10, opset_import: ["": 21]> g (int64[1] n) => (float[m] y) { c = ConstantOfShape(n) y = Exp(c) }'
    most = Limits(tensor_bytes=1 << 62, live_bytes=1 << 62)  # so that the device refuses, not the budget
    rep = SingaBackend.prepare(parser.parse_model(text), setup.device, limits=most)
    try:
        rep.run([np.array([free // 4 + (1 << 20)])])
    except SonnxError as error:
        details["error"] = str(error)
        if error.code != "SX613":  # that of a device; a limit that refuses the model does not test the device
            raise Wrong(f"a model that needs too much memory must raise ResourceExhausted, got {error}") from None
    else:
        raise Wrong(f"a tensor of more than the free {free} bytes must be refused, got a result")
    for _ in range(2):
        _equal("a small run after it", rep.run([np.array([3])])[0], np.ones(3, np.float32))
    smoke(setup, {})
    with device.active():
        cupy.get_default_memory_pool().free_all_blocks()
        details["free_afterwards"] = cupy.cuda.runtime.memGetInfo()[0]
