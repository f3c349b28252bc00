"""Calls functions of products on arrays, at the levels that this processor has, and shows their instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.helpers.elementwise_frames import gomp

from singa_backend.elementwise import compile as machine
from singa_backend.elementwise.compile import LEVELS, target
from singa_backend.gemm.frame import FrameFunction

LIMITS = {"avx2": "AVX2", "avx512": "AVX512_CORE", "vnni": "AVX512_CORE_VNNI"}
"""The limit of oneDNN's instructions that is each level."""


OTHERS = {"macos": ("arm64-apple-macosx11.0.0", "apple-m1", ""), "windows": ("x86_64-pc-windows-msvc", *LEVELS["avx2"][1:])}
"""Systems on which no test runs, as `LEVELS` has those on which some do."""


class Frame:
    """A call of a function; its arrays end at pages that may not be read, if they are given so."""

    def __init__(self, function: FrameFunction, sizes: dict[str, int], arrays: dict[str, np.ndarray], threads: int = 1) -> None:
        layout, self.arrays = function.layout, arrays
        numbers = [0, threads, gomp() if threads > 1 else 0, 1, *(sizes[n] for n in layout.numbers)]
        self.frame = np.array([*numbers, *(arrays[p].ctypes.data if p in arrays else 0 for p in layout.pointers)], np.int64)
        self.function = function.compiled()

    def __call__(self) -> None:
        self.function.call(self.frame.ctypes.data)


def assembly(function: FrameFunction, name: str) -> str:
    """The instructions of a function for a level, or for another system."""
    triple, cpu, features = {**LEVELS, **OTHERS}[name]
    target("avx2")  # which initializes all
    llvm: Any = machine._llvm()
    module = llvm.parse_assembly(function.text("f"))
    found = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic")
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(found, options)
    builder.getModulePassManager().run(module, builder)
    return str(found.emit_assembly(module))
