"""Products of stacks of matrices on CuPy arrays.

`cupy.matmul` makes arrays of pointers by extra kernels where an operand is a matrix or broadcasts, and copies transposed ones.
Here a stack times a matrix is one product of matrices, and other stacks of float32 and float64 are one strided batched product:
an operand that broadcasts has the stride 0, and a transposed one is read as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # of CuPy

_BATCHED: dict[np.dtype[Any], str] = {np.dtype(np.float32): "sgemmStridedBatched", np.dtype(np.float64): "dgemmStridedBatched"}
_SCALARS: dict[np.dtype[Any], tuple[Any, Any]] = {d: (np.array(1, d), np.array(0, d)) for d in _BATCHED}
_INT = 2**31


def matmul(cp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """As `cupy.matmul`."""
    if a.ndim < 2 or b.ndim < 2 or (a.ndim == b.ndim == 2) or a.shape[-1] != b.shape[-2]:
        return _plain(cp, a, b, out)
    if out is None and b.size == b.shape[-1] * b.shape[-2] and a.ndim > 2 and a.size:  # one matrix on the right
        lead = (1,) * (b.ndim - a.ndim) + a.shape[:-1]
        rows = a.reshape(-1, a.shape[-1])
        return cp.matmul(rows, b.reshape(b.shape[-2:])).reshape(*lead, b.shape[-1])
    dtype = a.dtype
    if dtype not in _BATCHED or b.dtype != dtype:
        return _plain(cp, a, b, out)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (m, k), n = a.shape[-2:], b.shape[-1]
    shape = (*lead, m, n)
    if not (math.prod(shape) and k) or (out is not None and (out.shape != shape or out.dtype != dtype)):
        return _plain(cp, a, b, out)
    y = cp.empty(shape, dtype) if out is None else out
    target = _stack(y, lead)
    if target is None or target.transposed:
        return _plain(cp, a, b, out)
    if not _multiply(cp, _operand(cp, a, lead), _operand(cp, b, lead), target, m, n, k, dtype):
        return _plain(cp, a, b, out)
    return y


def _plain(cp: Any, a: Array, b: Array, out: Array | None) -> Array:
    return cp.matmul(a, b) if out is None else cp.matmul(a, b, out=out)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Matrices at equal distances.

    Attributes:
        array: holds them.
        transposed: whether the columns are contiguous, not the rows.
        leading: the elements between rows, or between columns.
        stride: the elements between matrices; 0 if all are the same.
        count: the number of matrices.
    """

    array: Array
    transposed: bool
    leading: int
    stride: int
    count: int


def _operand(cp: Any, x: Array, lead: tuple[int, ...]) -> _Stack:
    """An operand without a copy if its strides allow it."""
    found = _stack(x, lead)
    if found is None:
        own = math.prod(x.shape[:-2])
        if own not in (1, math.prod(lead)):  # some of its axes broadcast, and others do not
            x = cp.broadcast_to(x, (*lead, *x.shape[-2:]))
        found = _stack(cp.ascontiguousarray(x), lead)
        assert found is not None
    return found


def _stack(x: Array, lead: tuple[int, ...]) -> _Stack | None:
    """The matrices of an array that broadcasts to the axes `lead`; None if they are not at equal distances."""
    item = x.itemsize
    (rows, columns), (down, across) = x.shape[-2:], x.strides[-2:]
    if (across == item or columns == 1) and (rows == 1 or down >= columns * item):
        transposed, leading = False, max(columns, 1) if rows == 1 else down // item
    elif (down == item or rows == 1) and (columns == 1 or across >= rows * item):
        transposed, leading = True, max(rows, 1) if columns == 1 else across // item
    else:
        return None
    sizes, steps = (1,) * (len(lead) + 2 - x.ndim) + x.shape[:-2], (0,) * (len(lead) + 2 - x.ndim) + x.strides[:-2]
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
    return None if stride < 0 else _Stack(x, transposed, leading, stride // item, count)


def _multiply(cp: Any, a: _Stack, b: _Stack, y: _Stack, m: int, n: int, k: int, dtype: np.dtype[Any]) -> bool:
    """Compute the products; False if a size is too large for cuBLAS."""
    if max(m, n, k, y.count, a.leading, b.leading, y.leading) >= _INT:
        return False
    from cupy_backends.cuda.libs import cublas

    one, zero = _SCALARS[dtype]
    # cuBLAS has the columns first, so that Y' = B' A'.
    getattr(cublas, _BATCHED[dtype])(
        cp.cuda.device.get_cublas_handle(), int(b.transposed), int(a.transposed), n, m, k,
        one.ctypes.data, b.array.data.ptr, b.leading, b.stride, a.array.data.ptr, a.leading, a.stride,
        zero.ctypes.data, y.array.data.ptr, y.leading, y.stride, y.count,
    )  # fmt: skip
    return True
