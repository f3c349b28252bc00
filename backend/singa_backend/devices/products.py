"""Products of matrices on CuPy arrays.

`cupy.matmul` makes arrays of pointers by extra kernels where an operand is a matrix or broadcasts, copies transposed ones, and
cannot be captured.  Here every product of floats is one strided batched product: an operand that broadcasts has the stride 0, a
transposed one is read as it is, and the rows of a stack times one matrix are multiplied as one matrix.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import limits
from . import blas

Array = Any  # of CuPy

_INT = 2**31


def matmul(cp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """As `cupy.matmul`, also for stacks of bfloat16."""
    product = _chosen(_strided(a), _strided(b), None if out is None else _strided(out))
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


class _Strided(NamedTuple):
    """The shape, the strides and the dtype of an array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def matrices(self, row: bool, column: bool) -> _Strided:
        """With an axis for the rows, for the columns, or both."""
        shape, strides = ((*self.shape, 1), (*self.strides, 0)) if column else (self.shape, self.strides)
        if row:
            shape, strides = (*shape[:-1], 1, shape[-1]), (*strides[:-1], 0, strides[-1])
        return _Strided(shape, strides, self.dtype)


def _strided(x: Array) -> _Strided:
    return _Strided(x.shape, x.strides, x.dtype)


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
class _StackProduct:
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
def _chosen(a: _Strided, b: _Strided, out: _Strided | None) -> _StackProduct | None:
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
    return _StackProduct(shape, dtype, (count, m, n, k), x, z, None if y is None or y.transposed else y)


def _dense(shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Strided:
    """Those of a contiguous array."""
    return _Strided(shape, tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype)


def _operand(x: _Strided, dtype: np.dtype[Any], lead: tuple[int, ...]) -> _Stack:
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


def _stack(x: _Strided, dtype: np.dtype[Any], lead: tuple[int, ...]) -> _Stack | None:
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


def einsum(xp: Any, equation: str, xs: tuple[Array, ...]) -> Array:
    """As `cupy.einsum` of several arrays: two at a time, whose common axes `xp.matmul` sums.  `xp` is the namespace."""
    path, _ = np.einsum_path(equation, *(np.broadcast_to(np.int8(0), x.shape) for x in xs), optimize="greedy")  # which checks it
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    free = [x.ndim - len(t) + 3 if "..." in t else 0 for x, t in zip(xs, terms, strict=True)]
    spare = [c for c in string.ascii_letters if c not in equation][: max(free)]
    implied = "..." + "".join(sorted(c for c in left if c.isalpha() and left.count(c) == 1))
    result = (result if arrow else implied).replace("...", "".join(spare))
    sizes: dict[str, int] = {}
    factors = []
    for x, term, n in zip(xs, terms, free, strict=True):
        factor = _Factor(x, term.replace("...", "".join(spare[max(free) - n :]))).plain(xp)
        sizes |= dict(zip(factor.axes, factor.array.shape, strict=True))
        factors.append(factor)
    for step in path[1:]:
        first, *others = (factors.pop(i) for i in sorted(step, reverse=True))
        while others:
            other = others.pop()
            first = first.times(xp, other, {*result}.union(*(f.axes for f in (*factors, *others))), sizes)
        factors.append(first)
    array = factors[0].ordered(xp, [c for c in result if c in factors[0].axes])
    return array.reshape([sizes.get(c, 1) for c in result])


@dataclass(frozen=True, slots=True)
class _Factor:
    """A term of an Einstein sum: an array and the letters of its axes."""

    array: Array
    axes: str

    def plain(self, xp: Any) -> _Factor:
        """Without repeated letters, of which the diagonal remains, and axes of size 1, which broadcast."""
        axes = "".join(dict.fromkeys(self.axes))
        x = self.array if axes == self.axes else xp.module.einsum(f"{self.axes}->{axes}", self.array)
        kept = [(c, n) for c, n in zip(axes, x.shape, strict=True) if n != 1]
        return _Factor(x.reshape([n for _, n in kept]), "".join(c for c, _ in kept))

    def ordered(self, xp: Any, axes: list[str]) -> Array:
        """The sum over other axes, with these ones in this order."""
        x = xp.sum_over(self.array, tuple(i for i, c in enumerate(self.axes) if c not in axes))
        left = [c for c in self.axes if c in axes]
        return x.transpose([left.index(c) for c in axes])

    def times(self, xp: Any, other: _Factor, needed: set[str], sizes: dict[str, int]) -> _Factor:
        """The product, summed over the axes that are not needed."""
        common = [c for c in self.axes if c in other.axes]
        stack, summed = [c for c in common if c in needed], [c for c in common if c not in needed]
        rows, columns = ([c for c in f.axes if c in needed and c not in common] for f in (self, other))
        stacks, m, n, k = (math.prod(sizes[c] for c in axes) for axes in (stack, rows, columns, summed))
        limits.current().admit((stacks, m, n), self.array.dtype.itemsize)
        a = self.ordered(xp, stack + rows + summed).reshape(stacks, m, k)
        b = other.ordered(xp, stack + summed + columns).reshape(stacks, k, n)
        axes = stack + rows + columns
        return _Factor((xp.matmul(a, b) if summed else a * b).reshape([sizes[c] for c in axes]), "".join(axes))
