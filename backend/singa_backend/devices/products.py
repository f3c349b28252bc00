"""Products of matrices on CuPy arrays.

`cupy.matmul` makes arrays of pointers by extra kernels where an operand is a matrix or broadcasts, copies transposed ones, and
cannot be captured.  Here every product of floats is one strided batched product: an operand that broadcasts has the stride 0, a
transposed one is read as it is, and the rows of a stack times one matrix are multiplied as one matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import blas

Array = Any  # of CuPy

_INT = 2**31


def matmul(cp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """As `cupy.matmul`, also for stacks of bfloat16."""
    product = _chosen(_place(a), _place(b), None if out is None else _place(out))
    if product is None:
        return cp.matmul(a, b) if out is None else cp.matmul(a, b, out=out)
    if out is not None and (product.y is None or cp.may_share_memory(out, a) or cp.may_share_memory(out, b)):
        out[...] = matmul(cp, a, b)
        return out
    assert product.y is not None
    x, z = product.a.ready(cp, a, product.dtype), product.b.ready(cp, b, product.dtype)
    y = cp.empty(product.shape, product.dtype) if out is None else out
    blas.multiply(cp, product.dtype, product.sizes, product.a.at(x), product.b.at(z), product.y.at(y))
    return y


class Place(NamedTuple):
    """Where the elements of an array are, but for its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def matrices(self, row: bool, column: bool) -> Place:
        """With an axis for the rows, for the columns, or both."""
        shape, strides = ((*self.shape, 1), (*self.strides, 0)) if column else (self.shape, self.strides)
        if row:
            shape, strides = (*shape[:-1], 1, shape[-1]), (*strides[:-1], 0, strides[-1])
        return Place(shape, strides, self.dtype)


def _place(x: Array) -> Place:
    return Place(x.shape, x.strides, x.dtype)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Matrices at equal distances.

    Attributes:
        transposed: whether the columns are contiguous, not the rows.
        leading: the elements between rows, or between columns.
        stride: the elements between matrices; 0 if all are the same.
        broadcast: the shape to which an array is brought before it is copied; None if it is copied as it is.
        copied: whether an array must be copied first.
    """

    transposed: bool
    leading: int
    stride: int
    broadcast: tuple[int, ...] | None = None
    copied: bool = False

    def ready(self, cp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
        """The array that holds the matrices."""
        if not self.copied:
            return x
        return cp.ascontiguousarray(x if self.broadcast is None else cp.broadcast_to(x, self.broadcast), dtype)

    def at(self, x: Array) -> blas.Matrices:
        """Where the matrices of an array are."""
        return x.data.ptr, self.transposed, self.leading, self.stride

    def joined(self, rows: int) -> _Stack | None:
        """The rows of all matrices as those of one; None if they are not at equal distances."""
        leading = self.stride if rows == 1 else self.leading
        if self.transposed or leading < self.leading or self.stride != rows * leading:
            return None
        return replace(self, leading=leading, stride=0)


@dataclass(frozen=True, slots=True)
class _Product:
    """One strided batched product.

    Attributes:
        shape: that of the result.
        dtype: that of the result, to which operands are converted.
        sizes: the number of products, the rows of the left matrices, the columns of the right ones, and what they have in common.
        a, b: the operands.
        y: the result; None if it cannot be written where it was requested.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sizes: tuple[int, int, int, int]
    a: _Stack
    b: _Stack
    y: _Stack | None


@lru_cache(4096)
def _chosen(a: Place, b: Place, out: Place | None) -> _Product | None:
    """How arrays are multiplied; None if CuPy does it: integers, results without elements or terms, shapes that do not match."""
    dtype = np.promote_types(a.dtype, b.dtype)
    if dtype not in blas.DTYPES or not (a.shape and b.shape):
        return None
    row, column = len(a.shape) == 1, len(b.shape) == 1
    a, b = a.matrices(row, False), b.matrices(False, column)
    (*left, m, k), (*right, terms, n) = a.shape, b.shape
    if k != terms:
        return None
    lead = np.broadcast_shapes(tuple(left), tuple(right))
    shape = lead + (m,) * (not row) + (n,) * (not column)
    if out is not None and out.shape != shape:
        raise ValueError(f"the result must have the shape {shape}, got {out.shape}")
    count = math.prod(lead)
    if not (count * m * n * k):
        return None
    x, z = _operand(a, dtype, lead), _operand(b, dtype, lead)
    y = _stack((out or _dense(shape, dtype)).matrices(row, column), dtype, lead)
    if y is not None and count > 1 and not z.stride and count * m < _INT:
        rows, results = x.joined(m), y.joined(m)
        if rows is not None and results is not None:
            count, m, x, y = 1, count * m, rows, results
    if max(count, m, n, k, x.leading, z.leading, y.leading if y else 0) >= _INT:
        return None
    return _Product(shape, dtype, (count, m, n, k), x, z, None if y is None or y.transposed else y)


def _dense(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Place:
    """The place of a contiguous array."""
    return Place(shape, tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype)


def _operand(x: Place, dtype: np.dtype[Any], lead: tuple[int, ...]) -> _Stack:
    """An operand without a copy if its dtype and its strides allow it."""
    stack = _stack(x, dtype, lead)
    if stack is not None:
        return stack
    shape, broadcast = x.shape, None
    if math.prod(shape[:-2]) not in (1, math.prod(lead)):  # some of its axes broadcast, and others do not
        broadcast = shape = (*lead, *shape[-2:])
    stack = _stack(_dense(shape, dtype), dtype, lead)
    assert stack is not None
    return replace(stack, broadcast=broadcast, copied=True)


def _stack(x: Place, dtype: np.dtype[Any], lead: tuple[int, ...]) -> _Stack | None:
    """The matrices of an array, broadcast to the axes `lead`; None if they are not at equal distances or of another dtype."""
    shape, strides, item = x.shape, x.strides, dtype.itemsize
    (rows, columns), (down, across) = shape[-2:], strides[-2:]
    if x.dtype != dtype:
        return None
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
    return None if stride < 0 else _Stack(transposed, leading, stride // item)
