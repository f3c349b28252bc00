"""NumPy in the place of CUDA's libraries: thrust's sorts, which CuPy's wheel contains as device code, and cuFFT's transforms."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np


def _array(address: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def _called(name: str, *addresses: int) -> None:
    """Report a call to the driver, with the arrays that it was passed."""
    import cupy

    from .installation import driver

    driver().fake_library_stream(ctypes.c_void_p(cupy.cuda.get_current_stream().ptr))
    driver().fake_library_call(name.encode(), (ctypes.c_void_p * len(addresses))(*addresses), len(addresses))


def sort(dtype: Any, data: int, keys: int, shape: Sequence[int]) -> None:
    """Sort along the last axis, in place."""
    _called("thrust::sort", data)
    x = _array(data, dtype, shape)
    x[...] = np.sort(x, axis=-1, kind="stable")


def argsort(dtype: Any, indices: int, data: int, keys: int, shape: Sequence[int]) -> None:
    """Write the order along the last axis; thrust sorts `data` too."""
    _called("thrust::argsort", indices, data)
    x = _array(data, dtype, shape)
    order = np.argsort(x, axis=-1, kind="stable")
    _array(indices, np.intp, shape)[...] = order
    x[...] = np.take_along_axis(x, order, -1)


def lexsort(dtype: Any, indices: int, keys: int, rows: int, count: int) -> None:
    """Write the order of columns, the last row first."""
    _called("thrust::lexsort", indices, keys)
    _array(indices, np.intp, (count,))[...] = np.lexsort(_array(keys, dtype, (rows, count)))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int, ctypes.c_int)
def TRANSFORM(address: int, shape: Any, rank: int, wide: int, sign: int) -> None:
    """Transform a complex array in place, without a factor; cufft.cpp calls it."""
    x = _array(address, np.complex128 if wide else np.complex64, shape[:rank])
    x[...] = np.fft.fftn(x) if sign < 0 else np.fft.ifftn(x, norm="forward")
