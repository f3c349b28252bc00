"""NumPy in the place of CUDA's libraries: thrust's sorts and cub's reductions, which CuPy's wheel contains as device code, and
cuFFT's transforms."""

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


def _called(name: str, *addresses: int) -> bool:
    """Report a call to the driver, with the arrays that it was passed; return whether it is the null device."""
    import cupy

    from .installation import driver

    driver().fake_library_stream(ctypes.c_void_p(cupy.cuda.get_current_stream().ptr))
    return bool(driver().fake_library_call(name.encode(), (ctypes.c_void_p * len(addresses))(*addresses), len(addresses)))


def sort(dtype: Any, data: int, keys: int, shape: Sequence[int]) -> None:
    """Sort along the last axis, in place."""
    if _called("thrust::sort", data):
        return
    x = _array(data, dtype, shape)
    x[...] = np.sort(x, axis=-1, kind="stable")


def argsort(dtype: Any, indices: int, data: int, keys: int, shape: Sequence[int]) -> None:
    """Write the order along the last axis; thrust sorts `data` too."""
    if _called("thrust::argsort", indices, data):
        return
    x = _array(data, dtype, shape)
    order = np.argsort(x, axis=-1, kind="stable")
    _array(indices, np.intp, shape)[...] = order
    x[...] = np.take_along_axis(x, order, -1)


def lexsort(dtype: Any, indices: int, keys: int, rows: int, count: int) -> None:
    """Write the order of columns, the last row first."""
    if _called("thrust::lexsort", indices, keys):
        return
    _array(indices, np.intp, (count,))[...] = np.lexsort(_array(keys, dtype, (rows, count)))


def _view(x: Any) -> np.ndarray:
    """An array of a device, as memory of the host."""
    base = _array(x.data.ptr, np.uint8, (x.nbytes,))  # contiguous, in C's order or Fortran's
    return np.ndarray(x.shape, x.dtype, base, strides=x.strides)


_REDUCTIONS = ("sum", "min", "max", "argmin", "argmax", "cumsum", "cumprod", "prod")
"""The reductions of cub, in the order of CuPy's numbers."""


def _computed(kind: str, values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """A reduction by NumPy."""
    with np.errstate(all="ignore"):
        if kind.startswith("arg"):
            return np.asarray(getattr(values.reshape(-1), kind)())
        wide = {"dtype": np.float32} if values.dtype == np.float16 and kind in ("sum", "prod") else {}
        return np.asarray(getattr(values, kind)(axis=axes, **wide)).astype(values.dtype)


def _reduced(name: str, kernels: int, x: Any, op: int, axes: Sequence[int], out: Any, keepdims: bool) -> Any:
    """Reduce `axes`; cub would run this number of kernels.  Sums of float16 are float32's, rounded."""
    import cupy

    from .installation import driver

    kind = _REDUCTIONS[op]
    left = tuple(1 if a in axes else n for a, n in enumerate(x.shape) if keepdims or a not in axes)
    y = cupy.ndarray(left, np.int64 if kind.startswith("arg") else x.dtype)
    null = _called(name, x.data.ptr, y.data.ptr)
    driver().fake_count_launches(kernels)
    if not null:
        _view(y)[...] = _computed(kind, _view(x), tuple(axes)).reshape(left)
    if out is None:
        return y
    out[...] = y.reshape(out.shape)
    return out


def device_reduce(
    x: Any, op: int, reduce_axis: Sequence[int], out_axis: Sequence[int], out: Any = None, keepdims: bool = False
) -> Any:
    """Reduce a whole array."""
    return _reduced("cub::DeviceReduce", 2, x, int(op), range(x.ndim), out, keepdims)


def device_segmented_reduce(
    x: Any,
    op: int,
    reduce_axis: Sequence[int],
    out_axis: Sequence[int],
    out: Any = None,
    keepdims: bool = False,
    contiguous_size: int = 0,
) -> Any:
    """Reduce the axes that are contiguous in memory."""
    return _reduced("cub::DeviceSegmentedReduce", 1, x, int(op), reduce_axis, out, keepdims)


def device_scan(x: Any, op: int) -> Any:
    """Sums or products of all elements before each one and itself, in place."""
    from .installation import driver

    driver().fake_count_launches(2)
    if _called("cub::DeviceScan", x.data.ptr):
        return x
    values = _view(x).reshape(-1)
    with np.errstate(all="ignore"):
        values[...] = getattr(np, _REDUCTIONS[op])(values)
    return x


def device_histogram(x: Any, y: Any, bins: Any) -> Any:
    """Count the elements between each two of the sorted `bins`; cub has no kernel for bfloat16."""
    from .installation import driver

    if x.dtype.kind == "V":
        raise ValueError(f"Unsupported dtype ({x.dtype})")
    driver().fake_count_launches(2)
    if not _called("cub::DeviceHistogram", x.data.ptr, bins.data.ptr, y.data.ptr):
        _view(y)[...] = np.histogram(_view(x), _view(bins))[0]
    return y


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int, ctypes.c_int)
def TRANSFORM(address: int, shape: Any, rank: int, wide: int, sign: int) -> None:
    """Transform a complex array in place, without a factor; cufft.cpp calls it."""
    x = _array(address, np.complex128 if wide else np.complex64, shape[:rank])
    x[...] = np.fft.fftn(x) if sign < 0 else np.fft.ifftn(x, norm="forward")
