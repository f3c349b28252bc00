"""Memory between pages that cannot be accessed: a read or a write outside of it ends the process with SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

PAGE = mmap.PAGESIZE
NO_ACCESS, READ_ONLY = 0, 1
"""Protections of the pages around a buffer; one that can be read tells a write from a read."""

CANARY = 0xA5
"""The byte that fills what is between a buffer and its pages."""

FILLS = ("nan", "big", "random", "zero")
"""What memory holds before a run that must not depend on it: bytes of 255 (NaN of every type), 1e30, random bytes, 0."""

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that hold so many bytes."""
    return -(-max(nbytes, 1) // PAGE) * PAGE


def spread(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The first byte of pages for each size, with a page before and after each, and the bytes of all."""
    starts, at = [], PAGE
    for size in sizes:
        starts.append(at)
        at += whole_pages(size) + PAGE
    return starts, at


def guarded(sizes: Sequence[int], protection: int = NO_ACCESS) -> np.ndarray:
    """The memory that `spread` describes, without access to the pages between."""
    starts, total = spread(sizes)
    memory = np.frombuffer(mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:] = CANARY
    ends = [0, *(start + whole_pages(size) for start, size in zip(starts, sizes, strict=True))]
    for at in ends:
        if _mprotect(memory.ctypes.data + at, PAGE, protection):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    return memory


def fill(memory: np.ndarray, how: str, rng: np.random.Generator) -> None:
    """Fill bytes with one of `FILLS`."""
    if how == "random":
        memory[:] = rng.integers(0, 256, memory.size, np.uint8)
    elif how == "big":
        whole = memory.size // 4 * 4
        memory[:whole].view(np.float32)[:] = 1e30
        memory[whole:] = 0
    else:
        memory[:] = 255 if how == "nan" else 0
