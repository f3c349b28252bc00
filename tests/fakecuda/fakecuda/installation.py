"""Puts the stand-ins in their places in this process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from . import described, host
from .build import LIBRARIES, Libraries, libraries
from .compiler import compile_kernels


@cache
def driver() -> Any:
    """Return the driver, libcuda.so.1 of the emulation."""
    library = ctypes.CDLL(str(libraries().folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    library.fake_count.restype = ctypes.c_long
    library.fake_used.restype = ctypes.c_long
    library.fake_graph_nodes.restype = ctypes.c_long
    library.fake_graph_nodes.argtypes = [ctypes.c_long]
    library.fake_host_call.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_double, ctypes.c_void_p,
    ]  # fmt: skip
    library.fake_report.restype = library.fake_work.restype = ctypes.c_char_p
    return library


def order() -> ctypes.c_int:
    """Return the variable of the driver that chooses the order of threads."""
    return ctypes.c_int.in_dll(driver(), "fake_order")


def copies() -> ctypes.c_int:
    """Return the variable of the driver that chooses when copies from pinned memory are made."""
    return ctypes.c_int.in_dll(driver(), "fake_late")


class _Loaded:
    """What `cuda.pathfinder` returns for a library."""

    abs_path = "emulated"
    was_already_loaded_from_elsewhere = True
    found_via = "emulation"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._handle_uint = library._handle


@contextlib.contextmanager
def around_import() -> Iterator[None]:
    """Install the emulation around the import of CuPy: the libraries before, what replaces CuPy's functions after."""
    built = libraries()
    os.environ["CUPY_ACCELERATORS"] = "cub"  # CuPy's default on CUDA
    null = bool(os.environ.get("FAKECUDA_NULL"))
    os.environ["CUPY_CACHE_DIR"] = str(built.folder / "cupy-null" if null else built.kernels / "cupy")
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # CuPy's modules name functions of libraries that have no stand-in
    driver()
    absent = set(os.environ.get("FAKECUDA_WITHOUT", "").split(","))  # libraries that a machine may lack
    _load_libraries(built, absent)
    redirect(built)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)
    compiler: Any = importlib.import_module("cupy.cuda.compiler")
    if "nvrtc" not in absent:
        for name in ("compile_using_nvrtc", "_compile_using_nvrtc_no_warning"):
            _replace(compiler, name, described.compile_kernels if null else compile_kernels)
    ctypes.CDLL(str(built.folder / LIBRARIES["cufft"][0])).fake_set_transform(host.TRANSFORM)
    thrust: Any = importlib.import_module("cupy.cuda.thrust")
    for function in (host.sort, host.argsort, host.lexsort):
        _replace(thrust, function.__name__, function)
    cub: Any = importlib.import_module("cupy.cuda.cub")
    for function in (host.device_reduce, host.device_segmented_reduce, host.device_scan, host.device_histogram):
        _replace(cub, function.__name__, function)
    memory: Any = importlib.import_module("cupy.cuda.memory")
    if not os.environ.get("FAKECUDA_POOL"):
        memory.set_allocator(_allocate)


def install() -> None:
    """Install the emulation; see the package."""
    if "cupy" in sys.modules:
        raise RuntimeError("fakecuda.install() must be called before CuPy is imported")
    with around_import():
        importlib.import_module("cupy")


def _allocate(size: int) -> Any:
    """Allocate exactly `size` bytes, so that the end of an array is that of its memory: CuPy's pool would round up and reuse."""
    memory, runtime = _modules()
    try:
        return memory.MemoryPointer(memory.Memory(size), 0)
    except runtime.CUDARuntimeError as error:
        if error.status != 2:  # cudaErrorMemoryAllocation
            raise
        free, total = runtime.memGetInfo()
        raise memory.OutOfMemoryError(size, total - free) from None


@cache
def _modules() -> tuple[Any, Any]:
    """CuPy's memory and runtime; an import in each allocation would be a part of the time that the null device measures."""
    return importlib.import_module("cupy.cuda.memory"), importlib.import_module("cupy_backends.cuda.api.runtime")


def _replace(module: Any, name: str, value: Any) -> None:
    if not hasattr(module, name):
        raise RuntimeError(f"{module.__name__} has no {name} to replace; the stand-ins were made for another CuPy")
    setattr(module, name, value)


def _load_libraries(built: Libraries, absent: set[str]) -> None:
    """Let `cuda.pathfinder` find the stand-ins."""
    import cuda.pathfinder as pathfinder

    find = pathfinder.load_nvidia_dynamic_lib
    loaded = {
        name: _Loaded(ctypes.CDLL(str(built.folder / file), mode=ctypes.RTLD_GLOBAL))
        for name, file in {"cublasLt": "libcublasLt.so.13", **{n: f[0] for n, f in LIBRARIES.items()}}.items()
        if name not in absent
    }

    def load(name: str) -> Any:
        if name in absent:
            raise pathfinder.DynamicLibNotFoundError(f'Failure finding "lib{name}.so"')
        return loaded[name] if name in loaded else find(name)

    _replace(pathfinder, "load_nvidia_dynamic_lib", load)


_ALL = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC


def redirect(built: Libraries) -> None:
    """Write a jump over each function of CUDA's runtime in CuPy's module."""
    importlib.import_module("cupy_backends.cuda.api.runtime")
    file = os.path.realpath(built.runtime)
    with open("/proc/self/maps") as maps:
        base = min(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(file))
    libc = ctypes.CDLL(None)
    for name, offset in built.functions.items():
        try:
            target = getattr(driver(), f"fake_{name}")
        except AttributeError:
            continue  # a table of the runtime itself
        at = base + offset
        page = at // mmap.PAGESIZE * mmap.PAGESIZE
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), _ALL):
            raise OSError(ctypes.get_errno(), f"the memory of {name} cannot be made writable")
        jump = b"\xff\x25\0\0\0\0" + struct.pack("<Q", ctypes.cast(target, ctypes.c_void_p).value or 0)
        ctypes.memmove(at, jump, len(jump))
