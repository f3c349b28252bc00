"""cuBLAS's product of matrices, called by ctypes: CuPy refuses its own calls of cuBLAS while a stream captures a graph.

There is one handle for each device, used by one thread at a time, and one workspace for each stream, which orders the products
that use it.  cuBLAS's own workspace is shared by all streams: bits could depend on what else runs, and a graph would refer to
memory that it does not own.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from .graphs import stream_owner

_32F, _64F = 68, 70
"""Values of cublasComputeType_t: the precision of the sums."""
_TF32 = _32F if os.environ.get("CUPY_TF32", "0") in ("", "0") else 77  # a variable of CuPy

_ONES = {np.dtype(d): (np.array(1, d), np.array(0, d)) for d in (np.float32, np.float64, np.complex64, np.complex128)}
_FORMS = {
    np.dtype(dtype): (number, compute, *(scalar.ctypes.data for scalar in _ONES[np.dtype(scalars)]))
    for dtype, number, compute, scalars in (
        (np.float16, 2, _32F, np.float32), (ml_dtypes.bfloat16, 14, _32F, np.float32), (np.float32, 0, _TF32, np.float32),
        (np.float64, 1, _64F, np.float64), (np.complex64, 4, _TF32, np.complex64), (np.complex128, 5, _64F, np.complex128),
    )
}  # fmt: skip
"""The cudaDataType of a dtype, how it is computed, and the addresses of 1 and 0 in the dtype of the scalars."""

DTYPES = frozenset(_FORMS)
"""The dtypes of which `multiply` computes products."""

_BEST = -1  # cublasGemmAlgo_t
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_OPERAND = (_POINTER, _INT, _INT, _LONG)

Matrices = tuple[int, int, int, int]
"""A stack of matrices: its address, whether its columns are contiguous, the elements between those, and between matrices."""


class _Cublas:
    """cuBLAS on the current device."""

    def __init__(self, cp: Any) -> None:
        from cupy_backends.cuda.libs import cublas

        library = ctypes.CDLL(cublas.__file__)  # which has the functions of the library to which CuPy is linked
        self._set_stream, self._set_workspace = library.cublasSetStream_v2, library.cublasSetWorkspace_v2
        self._multiply = library.cublasGemmStridedBatchedEx
        self._set_stream.argtypes = (_POINTER, _POINTER)
        self._set_workspace.argtypes = (_POINTER, _POINTER, ctypes.c_size_t)
        sizes, ends = (_INT,) * 5, (_INT,) * 3
        self._multiply.argtypes = (_POINTER, *sizes, _POINTER, *_OPERAND * 2, _POINTER, *_OPERAND, *ends)
        self._check = cublas.check_status
        self._handle = _POINTER()
        self._check(library.cublasCreate_v2(ctypes.byref(self._handle)))
        self._bytes = (32 if int(cp.cuda.Device().compute_capability) >= 90 else 4) << 20  # what NVIDIA recommends
        self._workspaces: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def multiply(self, cp: Any, *arguments: int) -> None:
        """Compute on the current stream; its workspace is freed with the object of the stream, or with the thread that has it."""
        stream = cp.cuda.get_current_stream()
        owner = stream_owner(stream)
        with self._lock:
            workspace = self._workspaces.get(owner)
            if workspace is None:
                workspace = self._workspaces[owner] = cp.cuda.alloc(self._bytes)
            self._check(self._set_stream(self._handle, stream.ptr))  # which forgets the workspace
            self._check(self._set_workspace(self._handle, workspace.ptr, self._bytes))
            self._check(self._multiply(self._handle, *arguments))


@cache
def _handle(cp: Any, ordinal: int) -> _Cublas:
    return _Cublas(cp)


def multiply(cp: Any, dtype: np.dtype[Any], sizes: tuple[int, int, int, int], a: Matrices, b: Matrices, y: Matrices) -> None:
    """Compute products of matrices, whose rows are contiguous in the result.

    Args:
        cp: CuPy.
        dtype: that of all arrays, one of DTYPES; sums of float16 and bfloat16 are float32.
        sizes: the number of products, the rows of the left matrices, the columns of the right ones, and what they have in common.
        a: the left matrices.
        b: the right matrices.
        y: the results.
    """
    (count, m, n, k), (kind, compute, one, zero) = sizes, _FORMS[dtype]
    # cuBLAS has the columns first, so that Y' = B' A'.
    _handle(cp, cp.cuda.runtime.getDevice()).multiply(
        cp, b[1], a[1], n, m, k, one, b[0], kind, *b[2:], a[0], kind, *a[2:], zero, y[0], kind, *y[2:], count, compute, _BEST
    )  # fmt: skip
