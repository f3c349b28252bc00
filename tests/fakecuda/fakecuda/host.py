"""NumPy in the place of CUDA's libraries: thrust's sorts and cub's reductions, which CuPy's wheel contains as device code, and
cuFFT's transforms."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _size(dtype: Any, shape: Sequence[int]) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _array(address: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    size = _size(dtype, shape)
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


_COMPUTE = ctypes.CFUNCTYPE(None)
_recorded: list[Any] = []
"""What graphs call at each launch; the driver does not say when the last one is destroyed."""


def _call(name: str, addresses: Sequence[int], compute: Callable[[], None], kernels: int = 0, size: float = -1) -> None:
    """Call a library's function on the current stream: now, or at each launch of the graph that the stream captures.

    Args:
        name: the function.
        addresses: the arrays that it is passed; the last one is written.
        compute: what it does; it must not depend on the arrays of CuPy, which a graph does not keep.
        kernels: the number of kernels that the device would run.
        size: the bytes that it reads and writes; -1: the whole allocations of its arrays.
    """
    import cupy

    from .installation import driver

    stream = ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)
    later = _COMPUTE(compute) if driver().fake_capturing(stream) else None
    if later is not None:
        _recorded.append(later)
    arrays = (ctypes.c_void_p * len(addresses))(*addresses)
    error = driver().fake_host_call(stream, name.encode(), arrays, len(addresses), kernels, size, later)
    if error > 1:
        raise cupy.cuda.runtime.CUDARuntimeError(error - 1)
    if not error:
        compute()


def sort(dtype: Any, data: int, keys: int, shape: Sequence[int]) -> None:
    """Sort along the last axis, in place."""

    def compute() -> None:
        x = _array(data, dtype, shape)
        x[...] = np.sort(x, axis=-1, kind="stable")

    _call("thrust::sort", (data,), compute, size=2 * _size(dtype, shape))


def argsort(dtype: Any, indices: int, data: int, keys: int, shape: Sequence[int]) -> None:
    """Write the order along the last axis; thrust sorts `data` too."""

    def compute() -> None:
        x = _array(data, dtype, shape)
        order = np.argsort(x, axis=-1, kind="stable")
        _array(indices, np.intp, shape)[...] = order
        x[...] = np.take_along_axis(x, order, -1)

    _call("thrust::argsort", (indices, data), compute, size=2 * _size(dtype, shape) + _size(np.intp, shape))


def lexsort(dtype: Any, indices: int, keys: int, rows: int, count: int) -> None:
    """Write the order of columns, the last row first."""

    def compute() -> None:
        _array(indices, np.intp, (count,))[...] = np.lexsort(_array(keys, dtype, (rows, count)))

    _call("thrust::lexsort", (indices, keys), compute, size=_size(dtype, (rows, count)) + _size(np.intp, (count,)))


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

    kind = _REDUCTIONS[op]
    left = tuple(1 if a in axes else n for a, n in enumerate(x.shape) if keepdims or a not in axes)
    y = cupy.ndarray(left, np.int64 if kind.startswith("arg") else x.dtype)
    values, result = _view(x), _view(y)

    def compute() -> None:
        result[...] = _computed(kind, values, tuple(axes)).reshape(left)

    _call(name, (x.data.ptr, y.data.ptr), compute, kernels, x.nbytes + y.nbytes)
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
    values = _view(x).reshape(-1)

    def compute() -> None:
        with np.errstate(all="ignore"):
            values[...] = getattr(np, _REDUCTIONS[op])(values)

    _call("cub::DeviceScan", (x.data.ptr,), compute, 2, 2 * x.nbytes)
    return x


def device_histogram(x: Any, y: Any, bins: Any) -> Any:
    """Count the elements between each two of the sorted `bins`; cub has no kernel for bfloat16."""
    if x.dtype.kind == "V":
        raise ValueError(f"Unsupported dtype ({x.dtype})")
    values, limits, result = _view(x), _view(bins), _view(y)

    def compute() -> None:
        result[...] = np.histogram(values, limits)[0]

    _call("cub::DeviceHistogram", (x.data.ptr, bins.data.ptr, y.data.ptr), compute, 2, x.nbytes + bins.nbytes + y.nbytes)
    return y


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int, ctypes.c_int)
def TRANSFORM(address: int, shape: Any, rank: int, wide: int, sign: int) -> None:
    """Transform a complex array in place, without a factor; cufft.cpp calls it."""
    x = _array(address, np.complex128 if wide else np.complex64, shape[:rank])
    x[...] = np.fft.fftn(x) if sign < 0 else np.fft.ifftn(x, norm="forward")
