"""Builds the libraries of the emulation, once, into a cache whose keys contain the sources and versions.

Kernels have a folder of their own, whose key has only the sources that change how g++ compiles them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import CUPY, Unavailable

try:
    from elftools.elf.elffile import ELFFile  # type: ignore[import-untyped]
except ImportError:
    raise Unavailable("pyelftools is not installed") from None

HERE = Path(__file__).parent
HEADERS = "nvidia-cuda-runtime"

# library: its file name, the module of CuPy that calls it, the prefix of its functions, its status "not supported"
LIBRARIES = {
    "cublas": ("libcublas.so.13", "cupy_backends.cuda.libs.cublas", "cublas", 15),
    "cusolver": ("libcusolver.so.12", "cupy_backends.cuda.libs.cusolver", "cusolver", 9),
    "cufft": ("libcufft.so.12", "cupy.cuda.cufft", "cufft", 16),
}
_FUNCTIONS = (*re.findall(r"NARY\((\w+)\)", (HERE / "functions.h").read_text()), "fmaf", "ldexpf", "scalbnf", "frexpf", "modff")
FLUSHES = ("-Wa,--defsym,FAKE_FLUSHES=1", *(f"-Wl,--wrap={name}" for name in _FUNCTIONS))
"""Options of g++ for a kernel that NVRTC would compile with -ftz=true; see device.h."""
_WITHOUT_SANITIZER = ("-nodefaultlibs", "-lm", "-lc")  # whose calls the driver answers, and which brings libstdc++
_INLINED = {
    "cuda_fp16.h": (r"static (__attribute__ \(\(unused\)\))", r"static inline \1"),
    "cuda_bf16.h": (r"static (__attribute__ \(\(unused\)\))", r"static inline \1"),
    **{f"cupy/{name}.cuh": (r"^__device__", "inline __device__") for name in ("atomics", "bfloat16", "carray", "float16")},
}
"""Headers whose functions must be inline: g++ -O0 writes every other function into each kernel, two thirds of its time."""
_OF_KERNELS = ("build.py", "compiler.py", "cub.h", "device.h", "functions.h", "kernel.h")
"""The sources on which compiled kernels depend."""
_NOT_SUPPORTED = 801  # the status of the runtime


@dataclass(frozen=True)
class Libraries:
    """The built libraries and what is known of CuPy's runtime module.

    Attributes:
        folder: the libraries.
        kernels: the compiled kernels, in its folder `built`, with their sources; the headers that they include; CuPy's cache.
        runtime: the file of CuPy's module that contains CUDA's runtime.
        functions: the offsets of the runtime's functions in this file.
        compiler: the command that compiles one kernel, without the names of files.
    """

    folder: Path
    kernels: Path
    runtime: Path
    functions: dict[str, int]
    compiler: tuple[str, ...]


def module_file(name: str) -> Path:
    """Return the file of a module of CuPy without importing it.

    Args:
        name: the name of the module.

    Returns:
        The path.

    Raises:
        Unavailable: the module is absent.
    """
    parts = name.split(".")
    top = importlib.util.find_spec(parts[0])
    if top is None or not top.submodule_search_locations:
        raise Unavailable(f"CuPy is not installed (cupy-cuda13x=={CUPY})")
    folder = Path(top.submodule_search_locations[0]).joinpath(*parts[1:-1])
    found = sorted(folder.glob(f"{parts[-1]}.*.so"))
    if not found:
        raise Unavailable(f"CuPy has no module {name}")
    return found[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(f"{package} is not installed") from None


def _include_folders() -> list[Path]:
    cupy = module_file("cupy._core.core").parent / "include"
    cccl = cupy / "cupy" / "_cccl"
    header = next((f for f in importlib.metadata.files(HEADERS) or () if f.name == "cuda_runtime_api.h"), None)
    if header is None:
        raise Unavailable(f"{HEADERS} contains no cuda_runtime_api.h")
    return [Path(str(header.locate())).parent, cupy, cccl, cccl / "libcudacxx", cccl / "cub", cccl / "thrust"]


def _inline(folder: Path) -> None:
    """Write the headers of `_INLINED` into a folder, which comes first in the path of headers."""
    for name, (pattern, replacement) in _INLINED.items():
        header = next(path / name for path in _include_folders() if (path / name).exists())
        text, count = re.subn(pattern, replacement, header.read_text(), flags=re.M)
        if not count:
            raise RuntimeError(f"{header} has no function to declare inline; _INLINED was made for another version")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _cache(prefix: str, sources: Iterable[Path], compiler: str) -> Path:
    """Return the folder of the cache for these sources and this compiler."""
    key = hashlib.sha256("\n".join([compiler, CUPY, _version(HEADERS)]).encode())
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("SONNX_FAKECUDA_CACHE") or caches / "sonnx-fakecuda") / (prefix + key.hexdigest()[:24])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"the cache {folder} cannot be written ({error.strerror}); set SONNX_FAKECUDA_CACHE") from None
    return folder


@cache
def libraries() -> Libraries:
    """Build the libraries, or find them in the cache.

    Returns:
        Where they are.

    Raises:
        Unavailable: a requirement is absent; the message names it.
        RuntimeError: a source does not compile, or CuPy lacks a function that a stand-in replaces.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable(f"the emulation needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    gxx = shutil.which("g++")
    if gxx is None:
        raise Unavailable("g++ is not installed")
    if _version("cupy-cuda13x") != CUPY:
        raise Unavailable(f"the stand-ins are made for CuPy {CUPY}, installed is {_version('cupy-cuda13x')}")
    version = _run([gxx, "--version"])
    folder = _cache("", sorted(HERE.glob("*.*")), version)
    kernels = _cache("kernels-", [HERE / name for name in _OF_KERNELS], version)
    includes = [f"-I{include}" for include in _include_folders()]
    compiler = f"{gxx} -std=c++17 -shared -fPIC -pipe -O0 -w -fpermissive -ffp-contract=off -fno-strict-aliasing -fwrapv".split()
    compiler += [
        "-fsanitize=thread",
        "--param=tsan-instrument-func-entry-exit=0",
        "-fno-threadsafe-statics",
    ]  # calls at each access to memory: watch.h
    compiler += [f"-I{kernels}", f"-I{kernels / 'include'}", *includes]
    runtime = module_file("cupy_backends.cuda.api.runtime")
    done = folder / "done.json"
    with _locked(folder / "lock"):
        if not done.exists():
            functions = _functions(runtime)
            host = [gxx, *["-std=c++17", "-shared", "-fPIC", "-O2", "-w"], *includes]
            _build_driver(folder, host, functions)
            for name in LIBRARIES:
                _build_library(folder, host, name)
            _run([*host, "-x", "c++", os.devnull, "-Wl,-soname,libcublasLt.so.13", "-o", str(folder / "libcublasLt.so.13")])
            done.write_text(json.dumps(functions))
    with _locked(kernels / "lock"):
        header = kernels / "device.h"  # which every kernel includes, compiled once
        if not (kernels / "built").exists():
            for name in ("device.h", "kernel.h", "cub.h"):
                shutil.copy(HERE / name, kernels)
            _inline(kernels / "include")
            _run([*compiler, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
            (kernels / "built").mkdir()
    command = (*compiler, *_WITHOUT_SANITIZER, "-include", "device.h")
    return Libraries(folder, kernels, runtime, json.loads(done.read_text()), command)


def _functions(runtime: Path) -> dict[str, int]:
    """The functions of CUDA's runtime that CuPy's module contains, with their offsets."""
    with runtime.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        if table is None:
            raise RuntimeError(f"{runtime} has no symbol table; the emulation redirects CUDA's functions by their names")
        return {
            s.name: int(s["st_value"])
            for s in table.iter_symbols()
            if s.name.startswith("cuda")
            and s["st_info"]["type"] == "STT_FUNC"
            and s["st_shndx"] != "SHN_UNDEF"
            and "." not in s.name
        }


def _compiled(folder: Path, compiler: list[str], name: str) -> tuple[str, set[str]]:
    """Compile the source of a library; return the object file, and the functions that the library will export."""
    made = folder / f"{name}.o"
    _run([*compiler, f"-I{HERE}", "-c", str(HERE / f"{name}.cpp"), "-o", str(made)])
    with made.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        ours = {s.name for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["bind"] != "STB_LOCAL"}
    return str(made), ours


def _traps(path: Path, symbols: Iterable[str], status: int) -> str:
    """Write functions that report their names and return `status`."""
    lines = (f'EXPORT int {s}() {{ fake_trap("{s.removeprefix("fake_")}"); return {status}; }}\n' for s in sorted(symbols))
    path.write_text('#include "library.h"\nextern "C" void fake_trap(const char*);\n' + "".join(lines))
    return str(path)


_PURE = {
    "cudaGetErrorName",
    "cudaGetErrorString",
    "cudaCreateChannelDesc",
    "cudaRuntimeGetVersion",
}  # tables in the runtime itself


def _build_driver(folder: Path, compiler: list[str], functions: dict[str, int]) -> None:
    """Build libcuda.so.1, with a function that fails by name for each one of the runtime that has no stand-in."""
    made, exported = _compiled(folder, compiler, "runtime")
    ours = {n.removeprefix("fake_") for n in exported if n.startswith("fake_cuda")}
    if absent := sorted(ours - set(functions)):
        raise RuntimeError(f"CuPy {CUPY} has no {', '.join(absent)} to redirect; the stand-ins were made for another build of it")
    traps = _traps(folder / "runtime_traps.cpp", (f"fake_{n}" for n in set(functions) - ours - _PURE), _NOT_SUPPORTED)
    _run([*compiler, f"-I{HERE}", made, traps, "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")])


def _build_library(folder: Path, compiler: list[str], name: str) -> None:
    """Build the stand-in of a library, with a function that fails by name for each other one that CuPy's module names."""
    file, module, prefix, status = LIBRARIES[name]
    with module_file(module).open("rb") as source:
        wanted = {
            s.name
            for s in ELFFile(source).get_section_by_name(".dynsym").iter_symbols()
            if s["st_shndx"] == "SHN_UNDEF" and s.name.startswith(prefix)
        }
    made, exported = _compiled(folder, compiler, name)
    traps, versions = _traps(folder / f"{name}_traps.cpp", wanted - exported, status), folder / f"{name}.map"
    versions.write_text(f"{file} {{ global: *; }};\n")
    link = [f"-Wl,-soname,{file}", f"-Wl,--version-script={versions}", "-o", str(folder / file)]
    _run([*compiler, f"-I{HERE}", made, traps, *link])
