"""The compiler of kernels: g++ in the place of NVRTC."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from .build import FLUSHES, libraries

_KERNEL = re.compile(r"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(?:void\s+)?(\w+)\s*\(")
_WAITS = re.compile(r"__sync|__shfl|__ballot|__any_sync|__all_sync|#include\s*<cub")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w:<>, ]+?)\s+(\w+)\s*\[\s*\]\s*;")

_CUB = re.compile(r"#include\s*<cub/block/block_(?:reduce|load)\.cuh>")
_PTX = re.compile(r'asm\("([^"]*)"\s*:\s*"=[fr]"\((\w+)\)\s*:\s*"f"\((\w+)\),\s*"f"\((\w+)\)\)')
_INSTRUCTIONS = {
    "add.rn.f32 %0, %1, %2;": "add",
    "sub.rn.f32 %0, %1, %2;": "sub",
    "mul.rn.f32 %0, %1, %2;": "mul",
    "{ .reg .pred p; setp.ge.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }": "ge",
}
"""The PTX that kernels may contain, and the functions of device.h that have its results."""


def _without_ptx(found: re.Match[str]) -> str:
    text, result, a, b = found.groups()
    return f"{result} = fake_ptx_{_INSTRUCTIONS[text]}({a}, {b})" if text in _INSTRUCTIONS else found[0]


def compile_kernels(
    source: str,
    options: Sequence[str] = (),
    arch: str | None = None,
    filename: str = "kern.cu",
    name_expressions: Sequence[str] | None = None,
    log_stream: Any = None,
    cache_in_memory: bool = False,
    jitify: Any = None,
    method: str | None = None,
) -> tuple[bytes, dict[str, str]]:
    """Compile CUDA C++; the parameters and the result are those of CuPy's `compile_using_nvrtc`.

    Args:
        source: the text.
        options: options of NVRTC: those that define names, and -ftz, which flushes subnormal float32 numbers.
        arch: ignored.
        filename: named in messages.
        name_expressions: kernels that are instances of templates.
        log_stream: ignored.
        cache_in_memory: ignored; every kernel is kept in the cache.
        jitify: ignored.
        method: ignored.

    Returns:
        The path of a shared library with a zero byte, which the driver loads in the place of a cubin, and the names of the
        kernels of templates.

    Raises:
        CompileException: the text is wrong.
    """
    built = libraries()
    defines = [o for o in options if o.startswith("-D")]
    flushes = [o for o in options if o.lstrip("-").startswith("ftz=")][-1:] in (["-ftz=true"], ["--ftz=true"])
    names = {expression: f"template_{i}" for i, expression in enumerate(name_expressions or ())}
    key = hashlib.sha256("\0".join([source, *defines, *names, *(["flushes"] if flushes else [])]).encode()).hexdigest()[:32]
    library = built.kernels / "built" / f"{key}.so"
    if not library.exists():
        kernels = names or {name: name for name in dict.fromkeys(_KERNEL.findall(source))}
        waits = "true" if _WAITS.search(source) else "false"
        text = _CUB.sub('#include "cub.h"', source)
        text = _PTX.sub(_without_ptx, _DYNAMIC.sub(r"\1* \2 = (\1*)fake::shared_memory;", text))
        ends = "".join(f"FAKE_KERNEL({symbol}, ({expression}), {waits})\n" for expression, symbol in kernels.items())
        own = library.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        command = [*built.compiler, *(FLUSHES if flushes else ()), *defines, "-x", "c++", "-", "-o", str(own)]
        done = subprocess.run(command, input=f'#line 1 "{filename}"\n{text}\n{ends}', capture_output=True, text=True, check=False)
        if done.returncode:
            from cupy.cuda.compiler import CompileException

            raise CompileException(done.stderr, source, filename, tuple(options), "g++")
        kept = {"source": source, "options": list(options), "names": list(name_expressions or ())}
        text_of = own.with_name(f"{own.name}.text")
        text_of.write_text(json.dumps(kept))
        text_of.rename(library.with_suffix(".json"))  # for nvrtc.py
        own.rename(library)
    return os.fsencode(library) + b"\0", names
