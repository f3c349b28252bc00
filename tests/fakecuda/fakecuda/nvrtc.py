"""Compiles by NVRTC what g++ has compiled: `python -m fakecuda.nvrtc`, after the tests, which fill the cache with sources.

g++ accepts what NVRTC refuses.  NVRTC needs no device.  What it has compiled is noted in a cache, by source, options, versions
and architecture, so that a source costs its time once: 0.1 s for most kernels, more than 1 s for a reduction by cub.  The headers
are those of this environment, wherever the environment was in which CuPy wrote a source.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from . import CUPY
from .build import libraries

ARCHITECTURES = ("75", "80", "90", "100")
"""The compute capabilities for which all kernels are compiled."""


@cache
def library() -> tuple[Any, Path]:
    """Return NVRTC of the package nvidia-cuda-nvrtc, and the folder of CUDA's headers."""
    spec = importlib.util.find_spec("nvidia")
    assert spec is not None and spec.submodule_search_locations
    toolkit = Path(spec.submodule_search_locations[0]) / "cu13"
    return ctypes.CDLL(str(toolkit / "lib" / "libnvrtc.so.13")), toolkit / "include"


def version() -> str:
    """Return the version of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library()[0].nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compiled(source: str, options: list[str], names: list[str], architecture: str) -> str:
    """Compile a source to a cubin.

    Args:
        source: CUDA C++.
        options: the options that CuPy has passed.
        names: instances of templates.
        architecture: the compute capability, such as "90".

    Returns:
        "" if NVRTC compiles it, otherwise what it reports.
    """
    nvrtc, headers = library()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    kept = [*options, f"-I{headers}", f"--gpu-architecture=sm_{architecture}"]
    failed = nvrtc.nvrtcCompileProgram(program, len(kept), (ctypes.c_char_p * len(kept))(*map(str.encode, kept)))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return (log.value.decode() or f"NVRTC: status {failed}") if failed else ""


def _here(option: str) -> str:
    """An option of CuPy, whose folder of headers is that of this environment."""
    folder, found, rest = option.partition("/site-packages/")
    if not found or not folder.startswith("-I"):
        return option
    package, _, rest = rest.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return f"-I{Path(spec.submodule_search_locations[0]) / rest}"


def _key(kept: dict[str, Any], architecture: str) -> str:
    """The name of a note, whatever the folder of the environment is."""
    options = [o if not o.startswith("-I") else o.rpartition("/site-packages/")[2] for o in kept["options"]]
    noted = [kept["source"], options, kept["names"], architecture, version(), CUPY]
    return hashlib.sha256(json.dumps(noted).encode()).hexdigest()[:32]


def check(kept: dict[str, Any], architecture: str) -> tuple[str, bool]:
    """Compile a source that compiler.py has kept, unless the cache notes that NVRTC has compiled it.

    Args:
        kept: its source, options and names.
        architecture: the compute capability.

    Returns:
        What NVRTC reports, "" if nothing is wrong; and whether it ran.
    """
    note = libraries().kernels.parent / "nvrtc" / _key(kept, architecture)
    if note.exists():
        return "", False
    wrong = compiled(kept["source"], [_here(o) for o in kept["options"]], kept["names"], architecture)
    if not wrong:
        note.parent.mkdir(exist_ok=True)
        note.touch()
    return wrong, True


def main() -> int:
    """Compile all sources of the cache; return 1 if NVRTC refuses one, or if there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="sources at a time (2)")
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES, help="compute capabilities")
    options = parser.parse_args()
    sources = [json.loads(f.read_text()) for f in sorted((libraries().kernels / "built").glob("*.json"))]
    if not sources:
        print("the cache has no kernels: run tox -e cuda first", file=sys.stderr)
        return 1
    work = [(s, a) for s in sources for a in options.architectures]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda pair: check(*pair), work))
    refused = {s["source"]: f"sm_{a}: {wrong}\n{s['source']}" for (s, a), (wrong, _) in zip(work, results, strict=True) if wrong}
    for text in refused.values():
        print(text, file=sys.stderr)
    ran = sum(ran for _, ran in results)
    print(f"{len(sources)} sources for {', '.join(options.architectures)}: {ran} compiled now, {len(refused)} refused")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
