"""Executions of primitives during which no thread handles a signal.

Before 3.11.2, oneDNN's generated code for products of float32 matrices, in "gemm:jit" and in recurrent layers, lets the stack
pointer point to a buffer in the heap.  The system stores the registers of an interrupted thread below its stack pointer: a signal
that has a handler overwrites what precedes the buffer (issue 4845 of oneDNN).  Signals therefore wait, in the calling thread for
the end of the execution, which handlers in Python do anyway, and in the threads of OpenMP for ever: other threads receive them.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from ctypes import c_int, c_uint, c_void_p
from typing import Any

MENDED = (3, 11, 2)
"""The first version whose code keeps the stack pointer."""

HAS_MASKS = hasattr(signal, "pthread_sigmask")
"""Whether the system has signals that a thread can block."""

RECURRENT = ("lstm_", "gru_", "lbr_gru_", "vanilla_rnn_")
"""With what the kinds of recurrent layers begin."""

_ERRORS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT", "SIGSYS")

_SET_BYTES = 128
"""The bytes of a set of signals: as many as glibc's, the largest."""


def moves_stack(kind: str, implementation: str, version: tuple[int, int, int]) -> bool:
    """Whether the code of a primitive may let the stack pointer point to the heap."""
    return version < MENDED and (kind.startswith(RECURRENT) or any(p.startswith("gemm") for p in implementation.split(":")))


class SignalBlock:
    """The function `execute` of a library, while signals wait that do not report errors of the code itself.

    Args:
        execute: the function.
        dll: the library.
        max_threads: returns the number of threads of a parallel region; None without OpenMP.
    """

    def __init__(self, execute: Callable[..., int], dll: ctypes.CDLL, max_threads: Callable[[], int] | None) -> None:
        self._execute, self._max_threads = execute, max_threads
        c = ctypes.CDLL(None)
        self._set_mask = c.pthread_sigmask
        self._set_mask.argtypes = [c_int, c_void_p, c_void_p]
        self._blocked = ctypes.create_string_buffer(_SET_BYTES)
        c.sigfillset(self._blocked)
        errors = [int(getattr(signal, name)) for name in _ERRORS]
        for number in errors:
            c.sigdelset(self._blocked, c_int(number))
        self._parallel: Callable[..., Any] | None = None
        if hasattr(dll, "GOMP_parallel") and hasattr(c, "sigblock"):
            self._parallel = parallel = dll["GOMP_parallel"]
            parallel.argtypes = [c_void_p, c_void_p, c_uint, c_uint]
            parallel.restype = None
            self._sigblock = ctypes.cast(c.sigblock, c_void_p)  # of signals up to 31, one bit each
        self._bits = 0x7FFFFFFF & ~sum(1 << (number - 1) for number in errors)

    def __call__(self, threads: int, *arguments: Any) -> int:
        """Execute a primitive that was created for a number of threads; return the status."""
        before = ctypes.create_string_buffer(_SET_BYTES)
        self._set_mask(signal.SIG_BLOCK, None, before)
        try:
            self._set_mask(signal.SIG_BLOCK, self._blocked, None)
            count = max(threads, 1 if self._max_threads is None else self._max_threads())
            if count > 1 and self._parallel is not None:  # OpenMP may have started threads since the last time
                self._parallel(self._sigblock, self._bits, count, 0)
            return self._execute(*arguments)
        finally:
            self._set_mask(signal.SIG_SETMASK, before, None)
