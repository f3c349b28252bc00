"""Products of stacks of matrices on CuPy arrays.

`cupy.matmul` makes arrays of pointers by extra kernels where an operand is a matrix or broadcasts, and copies transposed ones.
Here a stack times a matrix is one product of matrices, and other stacks of floats are one strided batched product:
an operand that broadcasts has the stride 0, and a transposed one is read as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

Array = Any  # of CuPy

_HALF = np.dtype(np.float16)
_BATCHED: dict[np.dtype[Any], str] = {
    np.dtype(np.float32): "sgemmStridedBatched",
    np.dtype(np.float64): "dgemmStridedBatched",
    _HALF: "gemmStridedBatchedEx",
}
_SCALARS: dict[np.dtype[Any], tuple[Any, Any]] = {
    d: (np.array(1, s), np.array(0, s)) for d in _BATCHED for s in (np.float32 if d == _HALF else d,)
}
_R_16F, _COMPUTE_32F, _ANY_ALGORITHM = 2, 68, 99
"""Values of CUDA's cudaDataType, cublasComputeType_t and cublasGemmAlgo_t: sums of float16 are float32."""

_INT = 2**31


def matmul(cp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """As `cupy.matmul`."""
    if a.ndim == b.ndim == 2:
        return _plain(cp, a, b, out)
    there = None if out is None else (out.shape, out.strides, out.dtype)
    found = _chosen(a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype, there)
    if found is None:
        return _plain(cp, a, b, out)
    if isinstance(found, tuple):  # one matrix on the right
        return cp.matmul(a.reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:])).reshape(found)
    return found.compute(cp, a, b, out)


def _plain(cp: Any, a: Array, b: Array, out: Array | None) -> Array:
    return cp.matmul(a, b) if out is None else cp.matmul(a, b, out=out)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Matrices at equal distances.

    Attributes:
        transposed: whether the columns are contiguous, not the rows.
        leading: the elements between rows, or between columns.
        stride: the elements between matrices; 0 if all are the same.
        count: the number of matrices.
        broadcast: the shape to which an array is brought before it is copied; None if it is copied as it is.
        copied: whether an array must be copied first.
    """

    transposed: bool
    leading: int
    stride: int
    count: int
    broadcast: tuple[int, ...] | None = None
    copied: bool = False

    def ready(self, cp: Any, x: Array) -> Array:
        """The array that holds the matrices."""
        if not self.copied:
            return x
        return cp.ascontiguousarray(x if self.broadcast is None else cp.broadcast_to(x, self.broadcast))


@dataclass(frozen=True, slots=True)
class _Batched:
    """One strided batched product.

    Attributes:
        name: the function of cuBLAS.
        shape: that of the result.
        dtype: that of all arrays.
        sizes: the rows of the left matrices, the columns of the right ones, and what they have in common.
        a, b, y: the operands and the result.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sizes: tuple[int, int, int]
    a: _Stack
    b: _Stack
    y: _Stack

    def compute(self, cp: Any, a: Array, b: Array, out: Array | None) -> Array:
        """Compute the products."""
        x, z, y = self.a.ready(cp, a), self.b.ready(cp, b), cp.empty(self.shape, self.dtype) if out is None else out
        (m, n, k), (one, zero) = self.sizes, _SCALARS[self.dtype]
        # cuBLAS has the columns first, so that Y' = B' A'.
        half = self.dtype == _HALF
        kind = (_R_16F,) if half else ()
        getattr(_cublas(), self.name)(
            cp.cuda.device.get_cublas_handle(), int(self.b.transposed), int(self.a.transposed), n, m, k,
            one.ctypes.data, z.data.ptr, *kind, self.b.leading, self.b.stride,
            x.data.ptr, *kind, self.a.leading, self.a.stride,
            zero.ctypes.data, y.data.ptr, *kind, self.y.leading, self.y.stride,
            self.y.count, *((_COMPUTE_32F, _ANY_ALGORITHM) if half else ()),
        )  # fmt: skip
        return y


@cache
def _cublas() -> Any:
    from cupy_backends.cuda.libs import cublas

    return cublas


@lru_cache(4096)
def _chosen(
    a: tuple[int, ...],
    a_strides: tuple[int, ...],
    dtype: np.dtype[Any],
    b: tuple[int, ...],
    b_strides: tuple[int, ...],
    b_dtype: np.dtype[Any],
    out: tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]] | None,
) -> _Batched | tuple[int, ...] | None:
    """How arrays of these shapes, strides and dtypes are multiplied: at once, with this result of one product, or by CuPy."""
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    if out is None and math.prod(b[:-2]) == 1 and len(a) > 2 and math.prod(a) > 0:
        return (*(1,) * (len(b) - len(a)), *a[:-1], b[-1])
    if dtype not in _BATCHED or b_dtype != dtype:
        return None
    lead = np.broadcast_shapes(a[:-2], b[:-2])
    (m, k), n = a[-2:], b[-1]
    shape = (*lead, m, n)
    if not (math.prod(shape) and k) or (out is not None and (out[0] != shape or out[2] != dtype)):
        return None
    item = dtype.itemsize
    y = _stack(shape, _dense(shape, item) if out is None else out[1], item, lead)
    if y is None or y.transposed:
        return None
    x, z = _operand(a, a_strides, item, lead), _operand(b, b_strides, item, lead)
    if max(m, n, k, y.count, x.leading, z.leading, y.leading) >= _INT:
        return None
    return _Batched(_BATCHED[dtype], shape, dtype, (m, n, k), x, z, y)


def _dense(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """The strides of a contiguous array, in bytes."""
    return tuple(item * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _operand(shape: tuple[int, ...], strides: tuple[int, ...], item: int, lead: tuple[int, ...]) -> _Stack:
    """An operand without a copy if its strides allow it."""
    found = _stack(shape, strides, item, lead)
    if found is not None:
        return found
    broadcast = None
    if math.prod(shape[:-2]) not in (1, math.prod(lead)):  # some of its axes broadcast, and others do not
        broadcast = shape = (*lead, *shape[-2:])
    found = _stack(shape, _dense(shape, item), item, lead)
    assert found is not None
    return replace(found, broadcast=broadcast, copied=True)


def _stack(shape: tuple[int, ...], strides: tuple[int, ...], item: int, lead: tuple[int, ...]) -> _Stack | None:
    """The matrices of an array that broadcasts to the axes `lead`; None if they are not at equal distances."""
    (rows, columns), (down, across) = shape[-2:], strides[-2:]
    if (across == item or columns == 1) and (rows == 1 or down >= columns * item):
        transposed, leading = False, max(columns, 1) if rows == 1 else down // item
    elif (down == item or rows == 1) and (columns == 1 or across >= rows * item):
        transposed, leading = True, max(rows, 1) if columns == 1 else across // item
    else:
        return None
    absent = len(lead) + 2 - len(shape)
    sizes, steps = (1,) * absent + shape[:-2], (0,) * absent + strides[:-2]
    stride, count = 0, 1
    for size, own, step in zip(reversed(lead), reversed(sizes), reversed(steps), strict=True):
        if size == 1:
            continue
        step = step if own == size else 0
        if count == 1:
            stride = step
        elif step != stride * count:
            return None
        count *= size
    return None if stride < 0 else _Stack(transposed, leading, stride // item, count)
