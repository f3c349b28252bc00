"""The strict namespace has what CuPy has: the same names, parameters and loops, and the same results of calls.

The calls run on both, as operators see them.  A call that differs is in a table of its own, with the reason.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers import cupy_names

from singa_backend.devices import guards
from singa_backend.devices.namespaces import CupyNamespace
from singa_backend.devices.strict import StrictNamespace

pytestmark = [pytest.mark.fakecuda, pytest.mark.filterwarnings("ignore")]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STRICT = StrictNamespace()

# The arrays that a call may use.  c is contiguous in Fortran's order; s has rank 0, e no elements.
ARRAYS: dict[str, np.ndarray] = {
    "x": np.array([[1.5, -2.0, 0.25], [3.0, 0.0, -1.25]], np.float32),
    "y": np.array([2.0, -0.5, 4.0], np.float32),
    "c": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "q": np.array([[2.0, 1.0], [1.0, 3.0]], np.float32),
    "z": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "n": np.array([1.0, np.nan, -np.inf, np.inf, -0.0], np.float32),
    "d": np.array([0.5, -1.5, 2.5], np.float64),
    "i": np.array([[4, -3, 0], [7, 2, -9]], np.int64),
    "k": np.array([2, 0, 1], np.int64),
    "b": np.array([100, -7, 3], np.int8),
    "u": np.array([200, 7, 0], np.uint8),
    "t": np.array([True, False, True]),
    "m": np.array([[True, False, True], [False, False, True]]),
    "h": np.array([0.1, 1000.0, -3.0], np.float16),
    "g": np.array([[0.5, 1.0, -2.0], [4.0, 0.0, 3.0]], ml_dtypes.bfloat16),
    "w": np.array([1 + 2j, -1j, 3], np.complex64),
    "s": np.array(2.5, np.float32),
    "r": np.array(3, np.int64),
    "e": np.zeros((0, 3), np.float32),
}

# Calls of which the result is equal: dtype, shape, values, and whether it shares memory with the arrays.
# What precedes the last semicolon are statements.
EXACT = """
x[0]
y[0]
y[-1]
y[k]
y[[0, 2]]
x[r - 2]
x[r - 2, 1:]
x[1, 2]
x[1, ...]
x[..., 1]
x[0, 1:]
x[:, ::-1]
x[::-2, 1]
x[None]
x[:, None, 1]
x[m]
x[t[:2]]
x[k[:2] - 1]
x[k[1:], k[:2]]
x[1, k]
x[:, k]
z[0, :, k]
z[:, k[1:]]
z[k[1:], :, 0]
z[k[1:], None, k[1:]]
s[()]
s[...]
s[None]
list(y)[1]
list(x)[1]
len(x)
c[1]
y[0] = 7; y
x[0] = y; x
x[0] = s; x
x[:, 1] = 5; x
x[...] = 2.5; x
x[0] = i[0]; x
i[0] = x[0]; i
x[m] = 0; x
x[m] = s; x
x[k[1:]] = 1; x
x[k[1:], 1] = y[:2]; x
x[x > 0] = -1; x
x[None] = 3; x
v = y[0]; y[0] = 9; v
v = x[1, 2]; v[...] = 8; x
v = x[1]; v += 1; x
v = y[1]; v += 1; y
for v in y: v[...] = 0
x.T
x.mT
x.reshape(3, 2)
x.reshape((6,))
x.reshape(-1, order="C")
c.reshape(6)
c.T.reshape(6)
x.T.reshape(6)
x.ravel()
c.ravel()
x.flatten()
x.squeeze()
x[None].squeeze(0)
x.transpose()
z.transpose(2, 0, 1)
z.transpose((1, 0, 2))
z.swapaxes(0, 2)
x.view(np.int32)
x.astype(np.float32)
x.astype(np.float32, copy=False)
x.astype(np.float64)
x.astype(np.int64)
x.astype(bool)
x.copy()
xp.asarray(x)
xp.array(x)
xp.ascontiguousarray(x)
xp.ascontiguousarray(x.T)
xp.expand_dims(x, 1)
xp.squeeze(x[None])
xp.transpose(z, (2, 0, 1))
xp.moveaxis(z, 0, -1)
xp.swapaxes(z, 0, 1)
xp.reshape(x, (3, 2))
xp.ravel(x)
xp.flip(x, 1)
xp.rot90(x)
xp.roll(x, 1, 1)
xp.roll(x, (1, 2), (0, 1))
xp.split(x, 3, 1)
xp.split(x, [1], 1)
xp.array_split(y, 2)
xp.atleast_2d(y)
xp.atleast_1d(s)
xp.broadcast_to(y, (2, 3))
xp.broadcast_arrays(x, y)
xp.diagonal(q)
xp.diag(q)
xp.diag(y)
xp.trace(q)
xp.real(x)
xp.lib.stride_tricks.sliding_window_view(x, 2, 1)
xp.lib.stride_tricks.as_strided(y, (2, 2), (4, 4))
xp.concatenate([x, x], 1)
xp.concatenate([x, e])
xp.concatenate([y, d])
xp.concatenate([y, k])
xp.stack([y, y], -1)
xp.hstack([y, y])
xp.vstack([y, y])
xp.tile(y, (2, 2))
xp.repeat(y, 2)
xp.repeat(x, [2, 0, 1], 1)
xp.pad(x, ((1, 0), (0, 2)))
xp.pad(x, 1, constant_values=2.5)
xp.pad(x, ((0, 0), (2, 2)), "reflect")
xp.pad(x, ((0, 0), (2, 2)), mode="edge")
xp.take(x, k[:2], 1)
xp.take(x, k)
xp.take(y, r - 2)
xp.take_along_axis(x, k[None], 1)
xp.where(m, x, 0)
xp.where(m, x, y)
xp.where(m, 1, 0)
xp.where(m, x, 1.5)
xp.where(t, b, u)
xp.where(m)
xp.nonzero(m)
xp.argwhere(m)
xp.sort(x, 1)
xp.sort(n)
xp.argsort(x, axis=1)
xp.argmax(x, 1)
xp.argmax(x)
xp.argmin(x, axis=0)
xp.argmax(n)
xp.unique(k)
xp.unique(k[k], return_index=True, return_inverse=True, return_counts=True)
xp.searchsorted(xp.sort(y), y)
xp.sum(i)
xp.sum(i, axis=(0, 1))
xp.sum(i, 1, keepdims=True)
xp.sum(t)
xp.sum(b)
xp.sum(u)
i.sum(axis=0)
i.sum(axis=())
o = xp.empty(2, np.int64); xp.sum(i, 1, out=o); o
xp.prod(k)
xp.max(x)
xp.max(x, (0, 1), keepdims=True)
x.min(axis=-1)
xp.max(n)
xp.any(m, axis=1)
xp.all(m)
xp.count_nonzero(m)
xp.cumsum(i, 1)
xp.cumsum(t)
xp.cumprod(k)
xp.bincount(k, minlength=5)
xp.sum(e, 0)
xp.prod(e, 0)
xp.ptp(x, 1)
x + y
x + 1
x + True
x + s
x + 1.5
x + d
x + i
x + np.float64(1)
x + np.float32(1)
1 - x
np.float32(1) - x
i + 1.5
b + 1
b + 27
b * b
b + u
u - 1
u + np.int64(1)
t + 1
t + t
t * 1.5
t & (t | ~t)
h + 1e6
h * h
h + np.float64(1)
h + y
g + 1
g + 1.5
g + g
g + y
g + h
g + k
w * 2
w + 1j
y + 1j
s + 1
s + s
r + 1
r / 2
i // 3
i % 3
i // 0
i % -4
y // 2
y // 0.1
n // 2
y % 3
y % -3
divmod(i, 4)
i / 2
b / b
i ** 2
k ** k
b ** 3
y ** 2
i & 6
i ^ k
i << 2
i >> 1
~i
-x
+x
abs(i)
abs(b)
x > 0
x == x
i != 4
u < 300
u > -1
b == 1000
xp.array([2**63], np.uint64) > i
n == n
x += y; x
x *= 2; x
i += 1; i
i //= 2; i
h += 1.5; h
xp.add(x, y)
o = xp.empty((2, 3), np.float32); xp.add(x, y, out=o); o
o = xp.empty((2, 3), np.float64); xp.add(x, y, out=o); o
xp.add(b, b, dtype=np.int32)
xp.add.at(x, k[1:], 1); x
xp.subtract.outer(y, y)
xp.maximum(x, 0)
xp.maximum(n, 0)
xp.minimum(1, 2)
xp.minimum(k, 1)
xp.fmod(i, 4)
xp.fmod(y, 3)
xp.fmod(xp.array([2**62 + 1]), xp.array([3]))
xp.remainder(n, 2)
xp.floor(y)
xp.ceil(x)
xp.trunc(x)
xp.rint(x)
xp.round(d)
xp.round(x, 1)
xp.sign(n)
xp.signbit(n)
xp.isnan(n)
xp.isnan(i)
xp.isinf(b)
xp.isfinite(g)
xp.sqrt(y)
xp.square(x)
xp.reciprocal(y)
xp.logical_not(x)
xp.logical_and(x, y)
xp.modf(x)
xp.frexp(x)
xp.copysign(x, -1)
xp.clip(x, 0, 1)
xp.clip(i, -2, 2)
xp.clip(n, -1, 1)
xp.clip(x, 1, -1)
xp.clip(x, y, s)
xp.clip(g, 0, 1)
xp.clip(w, 0, 1)
x.clip(None, 1)
x.clip(0, None)
i.clip(0, 3)
xp.nan_to_num(n)
xp.isclose(x, x)
xp.tril(q)
xp.triu(x, 1)
xp.eye(3, k=1, dtype=np.float32)
xp.arange(5)
xp.arange(1, 2, 0.25, dtype=np.float32)
xp.linspace(0, 1, 5)
xp.zeros((2, 0))
xp.ones((), np.int32)
xp.full(3, 2.5)
xp.full((2,), 3, np.int8)
xp.full_like(x, 4)
xp.zeros_like(i)
xp.empty_like(x)
xp.empty(3, np.float32)
xp.empty(2, np.int64)
xp.empty(2, np.float16)
a = np.zeros(3); v = xp.from_host(a); a[0] = 1; v
a = np.zeros(3); v = xp.asarray(a); a[0] = 1; v
v = xp.to_host(x); v[0] = 5; x
v = xp.asarray(y); v[0] = 5; y
v = xp.array(y); v[0] = 5; y
xp.meshgrid(y, k)
xp.meshgrid(y, k, indexing="ij")
xp.indices(k - 1, 3)
xp.clip(x, None, 1)
xp.clip(x, 0, None)
xp.cast(n, np.int32)
xp.cast(x, bool)
xp.gradient(y)
xp.ix_(k, k)
xp.tri(3)
xp.einsum("ij->ji", x)
xp.can_cast(np.int8, np.float32)
x.size + x.ndim + x.nbytes
xp.isarray(x)
x.dtype
xp.result_type(x, i)
xp.shape(x)
g[0]
g[0, 0]
g.astype(np.float32)
xp.where(g > 0, g, g)
xp.where(g > 0, g, 1.5)
xp.max(g, 1)
xp.concatenate([g, g])
xp.take(g, k, 1)
"""

# Calls whose values are rounded in another order, or by another library.
ROUNDED = """
xp.sum(x)
xp.sum(x, 0)
xp.sum(h)
xp.sum(g, 1)
xp.sum(x, dtype=np.float64)
xp.mean(x, 1)
xp.mean(i)
xp.mean(h)
xp.mean(g)
x.mean(axis=(0, 1), keepdims=True)
xp.var(x)
xp.std(x, 0, ddof=1)
xp.prod(y)
xp.cumsum(x, 1)
xp.exp(x)
xp.exp(b)
xp.exp(i)
xp.log(y)
xp.tanh(x)
xp.sin(x)
xp.arctan2(x, y)
y ** 0.5
y ** y
g ** 2
x @ y
x @ x.T
z @ z.swapaxes(1, 2)
i @ k
xp.matmul(x[None], x.T[None])
xp.dot(x, y)
xp.dot(y, y)
xp.dot(g, g.T)
g @ g.T
xp.tensordot(z, x, ((0, 1), (0, 1)))
xp.einsum("bij,bkj->bik", z, z)
xp.einsum("ij,j", x, y)
xp.einsum("ii", q)
xp.inner(y, y)
xp.outer(y, k)
xp.linalg.det(q)
xp.linalg.slogdet(q)
xp.linalg.norm(x, axis=1)
xp.fft.fft(y)
xp.fft.fft(d)
xp.fft.fft(h)
xp.fft.fft(k)
xp.fft.ifft(w)
xp.fft.rfft(x, axis=0)
xp.fft.irfft(w, 4)
xp.fft.fft(y, 8, norm="ortho")
xp.fft.fft2(x)
xp.erf(y)
xp.fmax(n, 0)
"""

# Calls that CuPy refuses: its error, and that of STRICT where it is of another type.
ERRORS = {
    "x[5]": "IndexError",
    "y[3]": "IndexError",
    "x[0, 0, 0]": "IndexError",
    "y[:] = [1, 2, 3]; y": "ValueError",
    "y[0:2] = (1, 2); y": "ValueError",
    "y[:] = k[:2]; y": "ValueError",
    "y[0] = 1j; y": "TypeError",
    "b[0] = 300; b": "OverflowError",
    "float(x)": "TypeError",
    "np.asarray(x)": "TypeError",
    "bool(y)": ("ValueError", "TypeError"),
    "list(s)": "TypeError",
    "len(s)": "TypeError",
    "x + [1, 2, 3]": "TypeError",
    "x + np.ones(3)": "TypeError",
    "x + None": "TypeError",
    "x + 'a'": "TypeError",
    "xp.add(x, [1, 2, 3])": "TypeError",
    "xp.add(x, np.ones(3))": "TypeError",
    "xp.add(x)": ("TypeError", "TypeError"),
    "xp.add(x, y, axis=0)": "TypeError",
    "b + 300": "OverflowError",
    "u + -1": "OverflowError",
    "xp.where(m, 300, b[:3])": "OverflowError",
    "t - t": "TypeError",
    "-t": "TypeError",
    "y & 1": "TypeError",
    "y << 1": "TypeError",
    "~y": "TypeError",
    "i += 1.5; i": "TypeError",
    "i /= 2; i": "TypeError",
    "y += z; y": "ValueError",
    "x + k[:2]": "ValueError",
    "xp.bitwise_and(x, x)": "TypeError",
    "xp.sum([1, 2])": ("AttributeError", "TypeError"),
    "xp.sum(1)": ("AttributeError", "TypeError"),
    "xp.sum(x, where=m)": "TypeError",
    "xp.sum(x, initial=1)": "TypeError",
    "xp.sum(x, 5)": "AxisError",
    "xp.max(e)": "ValueError",
    "xp.argmax(e)": "ValueError",
    "xp.max(x, initial=0)": "TypeError",
    "xp.where(True, x, 0)": ("AttributeError", "TypeError"),
    "xp.concatenate([x, np.ones((2, 3))])": "TypeError",
    "xp.concatenate([x, y])": "ValueError",
    "xp.concatenate([])": "ValueError",
    "xp.stack([x, y])": "ValueError",
    "xp.reshape([1, 2], (2, 1))": ("AttributeError", "TypeError"),
    "xp.reshape(x, shape=(3, 2))": "TypeError",
    "x.reshape(shape=(3, 2))": "TypeError",
    "x.reshape(4, 2)": "ValueError",
    "x.reshape(k)": "TypeError",
    "x.transpose(axes=(1, 0))": "TypeError",
    "x.transpose(0, 0)": "ValueError",
    "xp.transpose([[1]])": ("AttributeError", "TypeError"),
    "xp.pad(x, 1, mode='constant', end_values=1, foo=1)": ("ValueError", "TypeError"),
    "xp.einsum('ij', x, casting='safe')": "TypeError",
    "xp.meshgrid(y, y, order='C')": "TypeError",
    "xp.atleast_2d(y, ndim=3)": "TypeError",
    "xp.gradient(y, order=1)": "TypeError",
    "xp.clip([1, 2], 0, 1)": ("TypeError", "TypeError"),
    "x.clip(0, 1, casting='unsafe')": "TypeError",
    "xp.round([1.5], 0, foo=1)": "TypeError",
    "x.sum(foo=1)": "TypeError",
    "x.foo": "AttributeError",
    "xp.einsum_path": "AttributeError",
    "xp.linalg.multi_dot": "AttributeError",
    "x @ x": "ValueError",
    "x @ s": "ValueError",
    "g[None] @ g.T[None]": "TypeError",
    "xp.linalg.det(x)": "LinAlgError",
    "xp.linalg.det(q.astype(np.float16))": "TypeError",
    "xp.broadcast_to(x, (3, 2))": "ValueError",
    "xp.split(y, 2)": "ValueError",
    "xp.expand_dims(x, 5)": "AxisError",
    "xp.moveaxis(x, 3, 0)": "AxisError",
    "xp.squeeze(x, 0)": "ValueError",
    "xp.arange(3, step=0)": "ZeroDivisionError",
    "xp.maximum.reduce(x)": ("NotImplementedError", "AttributeError"),
    "xp.zeros(-1)": "ValueError",
    "x.view(np.float64)": "ValueError",
    "hash(x)": "TypeError",
    "xp.cumsum(x, axis=4)": "AxisError",
    "xp.sort(x, axis=4)": "AxisError",
    "xp.select([m], [m], 0)": "TypeError",
    "xp.interp(t, y, y)": "TypeError",
    "xp.sort(x, order='a')": "TypeError",
    "x['a']": ("ValueError", "IndexError"),
    "xp.isnan(y, where=t)": "TypeError",
    "xp.stack([1, 2])": "AttributeError",
    "x @ 2": "TypeError",
    "xp.tile([1, 2], 2)": "AttributeError",
    "xp.take([1, 2], k)": "AttributeError",
    "w.clip(0, 1)": "TypeError",
    "range(r)": "TypeError",
    "[1, 2][k[1]]": "TypeError",
    "xp.zeros(r)": "TypeError",
    "xp.zeros((2, r))": "TypeError",
    "x.reshape(r, 2)": "TypeError",
    "xp.sum(x, axis=r)": "TypeError",
    "xp.tile(y, r)": "TypeError",
    "xp.roll(y, 1, r)": "TypeError",
    "xp.broadcast_to(y, (r, 3))": "TypeError",
    "xp.arctan2(w, w)": ("CompileException", "TypeError"),
    "xp.cumsum(g)": ("CompileException", "TypeError"),
}

# Calls that CuPy computes and STRICT refuses.
STRICTER = {
    "x[k[:1] + 8]": "CuPy wraps an index that is out of range; operators check theirs by xp.indices",
    "xp.take(y, k + 8)": "CuPy wraps an index that is out of range",
    "xp.take_along_axis(x, k[None] + 8, 1)": "CuPy wraps an index that is out of range",
    "y[k + 8] = 1; y": "CuPy wraps an index that is out of range",
    "v = xp.broadcast_to(y, (2, 3)); v[0] = 1; v": "CuPy writes to memory that elements share",
    "v = xp.lib.stride_tricks.sliding_window_view(y, 2); v[0] = 1; v": "CuPy writes to memory that elements share",
    "v = xp.diagonal(q); v[...] = 1; q": "NumPy's diagonal is read-only",
    "xp.repeat(y, k)": "CuPy copies the counts to the host",
    "y[np.array([0, 1])]": "CuPy copies the index to the device",
    "y[0] = np.array(1.0); y": "CuPy copies the value to the device",
    "xp.einsum('ij,kj->ik', g, g)": "CuPy has no kernel for stacks of bfloat16, and no body needs them",
    "xp.matmul(g[None], g.T[None])": "CuPy has no kernel for stacks of bfloat16, and no body needs them",
    "k ** -1": "NumPy has no integer powers of negative exponents; CuPy's are 0",
    "k ** (k - 2)": "NumPy has no integer powers of negative exponents; CuPy's are 0",
    "float(s)": "CuPy copies to the host",
    "bool(s)": "CuPy copies to the host",
    "s.item()": "CuPy copies to the host",
    "y.tolist()": "CuPy copies to the host",
    "y.flat[0]": "an element of a host's flat is not an array",
    "xp.round([1.5, 2.5])": "the array must be on the device",
    "xp.diff([1.0, 2.0])": "the array must be on the device",
    "xp.add(w, w, dtype=np.float32)": "NumPy discards no imaginary parts",
    "xp.fft.fft(g)": "NumPy's result would be complex64, CuPy's is complex128",
    "xp.fft.rfft(w)": "NumPy discards no imaginary parts",
    "y[1.5]": "CuPy truncates the index",
    "xp.sum(np.ones(2))": "CuPy calls the method of the host's array",
    "xp.maximum.at(x, k[1:], 1); x": "no operator uses it",
    "np.exp(x)": "NumPy's function calls CuPy's",
}

# Calls of which the values differ, because the result is not defined.
UNDEFINED = {
    "xp.var(g)": "CuPy rounds the mean to bfloat16",
    "k << 64": "a shift by the width or more",
}


@pytest.fixture(scope="module")
def on_cuda() -> Any:
    pytest.importorskip("cupy")
    return CupyNamespace()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


class Call:
    """What a call does on one namespace."""

    def __init__(self, row: str, xp: Any) -> None:
        names = {n.id for n in ast.walk(ast.parse(row)) if isinstance(n, ast.Name)} & ARRAYS.keys()
        self.arrays = {n: xp.asarray(ARRAYS[n], **({"order": "F"} if n == "c" and xp is not STRICT else {})) for n in names}
        scope: dict[str, Any] = {"xp": xp, "np": np, **self.arrays}
        *statements, last = row.split("; ")
        self.error: Exception | None = None
        self.values: list[Any] = []
        try:
            exec("\n".join(statements) if not last.startswith("for ") else last, scope)
            result = eval(last, scope) if not last.startswith("for ") else self.arrays
        except Exception as error:
            self.error = error
            return
        result = list(result.values()) if isinstance(result, dict) else result
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        self.kind = [xp.isarray(v) for v in results]
        self.values = [xp.to_host(v) if xp.isarray(v) else v for v in results]
        for array in self.arrays.values():
            changed = np.full(array.shape, 77, array.dtype)
            array.set(changed) if hasattr(type(array), "set") else array._a.__setitem__(..., changed)
        later = [xp.to_host(v) if xp.isarray(v) else v for v in results]
        self.views = [different(a, b) for a, b in zip(self.values, later, strict=True)]


def different(a: Any, b: Any) -> bool:
    return isinstance(a, np.ndarray) and a.tobytes() != b.tobytes()


def agree(strict: Call, cuda: Call, rounded: bool = False, values: bool = True) -> None:
    for call in (cuda, strict):
        if call.error is not None:
            raise AssertionError(f"{type(call.error).__name__}: {call.error}") from call.error
    assert strict.kind == cuda.kind
    for ours, theirs in zip(strict.values, cuda.values, strict=True):
        if not isinstance(theirs, np.ndarray):
            assert ours == theirs
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if not values:
            continue
        if rounded:
            wide = np.complex128 if theirs.dtype.kind == "c" else np.float64
            unit = {2: 2e-3, 4: 2e-6}.get(theirs.dtype.itemsize if wide == np.float64 else 4, 1e-12)
            unit = 2e-2 if theirs.dtype == BFLOAT16 else unit
            np.testing.assert_allclose(ours.astype(wide), theirs.astype(wide), rtol=unit, atol=unit)
        else:
            np.testing.assert_array_equal(ours, theirs)
            if theirs.dtype.kind == "f":
                np.testing.assert_array_equal(np.signbit(ours[ours == 0]), np.signbit(theirs[theirs == 0]))
    assert strict.views == cuda.views


@pytest.mark.parametrize("row", rows(EXACT))
def test_a_call_has_the_same_result(row: str, on_cuda: Any) -> None:
    agree(Call(row, STRICT), Call(row, on_cuda))


@pytest.mark.parametrize("row", rows(ROUNDED))
def test_a_call_has_nearly_the_same_result(row: str, on_cuda: Any) -> None:
    agree(Call(row, STRICT), Call(row, on_cuda), rounded=True)


@pytest.mark.parametrize("row", UNDEFINED)
def test_a_call_without_a_defined_result_has_the_same_dtype_and_shape(row: str, on_cuda: Any) -> None:
    agree(Call(row, STRICT), Call(row, on_cuda), values=False)


@pytest.mark.parametrize("row", ERRORS)
def test_what_cupy_refuses_is_refused(row: str, on_cuda: Any) -> None:
    want = ERRORS[row]
    theirs, ours = (want, want) if isinstance(want, str) else want
    strict, cuda = Call(row, STRICT), Call(row, on_cuda)
    assert theirs in [c.__name__ for c in type(cuda.error).__mro__], f"CuPy: {cuda.error!r}"
    assert ours in [c.__name__ for c in type(strict.error).__mro__], f"STRICT: {strict.error!r}"


@pytest.mark.parametrize("row", STRICTER)
def test_what_strict_alone_refuses(row: str, on_cuda: Any) -> None:
    assert Call(row, on_cuda).error is None
    assert Call(row, STRICT).error is not None


# ---- Dtypes: arrays without elements launch no kernel, so every combination is compared

DTYPES = [np.dtype(c) for c in "?bBhHiIqQefdF"] + [BFLOAT16]
NUMBERS = [True, 1, 1.5, 1j, np.float32(1), np.int64(1), np.float64(1)]
# Where CuPy has a loop of complex numbers that does not compile, and NumPy has none.
COMPLEX = {"arctan2", "atan2", "copysign", "hypot", "nextafter", "i0"}


def outcome(function: Callable[[], Any]) -> Any:
    """The dtypes and shapes of the results, or "error"."""
    try:
        result = function()
    except Exception:
        return "error"
    results = result if isinstance(result, (tuple, list)) else [result]
    return [(np.dtype(r.dtype).name, r.shape) if hasattr(r, "dtype") else r for r in results]


def called(function: Callable[..., Any], xp: Any, kinds: tuple[Any, ...]) -> Callable[[], Any]:
    """A call with an array of each dtype, and with the numbers."""
    return lambda: function(*(xp.zeros(0, k) if isinstance(k, np.dtype) else k for k in kinds))


@pytest.mark.parametrize("name", cupy_names.names("loops"))
def test_a_ufunc_has_the_same_dtypes(name: str, on_cuda: Any) -> None:
    theirs, ours = getattr(on_cuda, name), getattr(STRICT, name)
    if name == "where":
        theirs, ours = (lambda x, y, xp=xp: xp.where(xp.zeros(0, np.bool_), x, y) for xp in (on_cuda, STRICT))  # type: ignore[misc]
    wrong = []
    for kinds in itertools.product([*DTYPES, *NUMBERS], repeat=2 if name == "where" else theirs.nin):
        if not any(isinstance(k, np.dtype) for k in kinds) or (name == "ldexp" and not isinstance(kinds[0], np.dtype)):
            continue
        of = [outcome(called(f, xp, kinds)) for f, xp in ((theirs, on_cuda), (ours, STRICT))]
        complex_ = any(np.result_type(k).kind == "c" for k in kinds)
        if of[0] != of[1] and not (name in COMPLEX and complex_ and of[1] == "error"):
            wrong.append((kinds, *of))
    assert wrong == []


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda xp, x: xp.sum(x, axis=1),
    "prod": lambda xp, x: xp.prod(x, axis=1),
    "mean": lambda xp, x: xp.mean(x, axis=1),
    "var": lambda xp, x: xp.var(x, axis=1),
    "std": lambda xp, x: xp.std(x, axis=1),
    "x.sum": lambda xp, x: x.sum(axis=1),
    "max": lambda xp, x: xp.max(x, axis=1),
    "min": lambda xp, x: xp.amin(x, axis=1),
    "argmax": lambda xp, x: xp.argmax(x, axis=1),
    "argmin": lambda xp, x: xp.argmin(x, axis=1),
    "any": lambda xp, x: xp.any(x, axis=1),
    "all": lambda xp, x: xp.all(x, axis=1),
    "ptp": lambda xp, x: xp.ptp(x, axis=1),
    "median": lambda xp, x: xp.median(x, axis=1),
    "cumsum": lambda xp, x: xp.cumsum(x, axis=1),
    "cumprod": lambda xp, x: xp.cumprod(x, axis=1),
    "clip": lambda xp, x: xp.clip(x, 0, 1),
    "clip by floats": lambda xp, x: xp.clip(x, 0.5, 1.5),
    "clip by arrays": lambda xp, x: xp.clip(x, x, x),
    "x.clip": lambda xp, x: x.clip(0, 1),
    "where": lambda xp, x: xp.where(x != 0, x, x),
    "where int": lambda xp, x: xp.where(x != 0, x, 0),
    "where float": lambda xp, x: xp.where(x != 0, x, 1.5),
    "where float32": lambda xp, x: xp.where(x != 0, x, xp.zeros((0, 3), "f")),
    "where int64": lambda xp, x: xp.where(x != 0, x, xp.zeros((0, 3), "q")),
    "round": lambda xp, x: xp.round(x),
    "round(2)": lambda xp, x: xp.round(x, 2),
    "x.round": lambda xp, x: x.round(),
    "around": lambda xp, x: xp.around(x),
    "tril": lambda xp, x: xp.tril(x),
    "triu": lambda xp, x: xp.triu(x),
    "diag": lambda xp, x: xp.diagonal(x),
    "trace": lambda xp, x: xp.trace(x),
    "concat": lambda xp, x: xp.concatenate([x, x]),
    "concatenate float32": lambda xp, x: xp.concatenate([x, xp.zeros((0, 3), "f")]),
    "stack": lambda xp, x: xp.stack([x, x]),
    "take": lambda xp, x: xp.take(x, xp.zeros(2, "q"), axis=1),
    "tal": lambda xp, x: xp.take_along_axis(x, xp.zeros((0, 2), "q"), axis=1),
    "tile": lambda xp, x: xp.tile(x, (2, 2)),
    "repeat": lambda xp, x: xp.repeat(x, 2, 1),
    "pad": lambda xp, x: xp.pad(x, ((0, 0), (1, 1))),
    "nan_to_num": lambda xp, x: xp.nan_to_num(x),
    "isclose": lambda xp, x: xp.isclose(x, x),
    "sort": lambda xp, x: xp.sort(x, axis=1),
    "argsort": lambda xp, x: xp.argsort(x, axis=1),
    "unique": lambda xp, x: xp.unique(x),
    "nonzero": lambda xp, x: xp.nonzero(x),
    "argwhere": lambda xp, x: xp.argwhere(x),
    "count_nonzero": lambda xp, x: xp.count_nonzero(x, axis=1),
    "full": lambda xp, x: xp.full((0, 2), 1, x.dtype),
    "full_like": lambda xp, x: xp.full_like(x, 2),
    "zeros_like": lambda xp, x: xp.zeros_like(x),
    "ones": lambda xp, x: xp.ones((0, 2), x.dtype),
    "eye": lambda xp, x: xp.eye(0, dtype=x.dtype),
    "arange": lambda xp, x: xp.arange(0, 0, 1, dtype=x.dtype),
    "linspace": lambda xp, x: xp.linspace(0, 1, 0, dtype=x.dtype),
    "real": lambda xp, x: xp.real(x),
    "imag": lambda xp, x: xp.imag(x),
    "x.real": lambda xp, x: x.real,
    "x.imag": lambda xp, x: x.imag,
    "conj": lambda xp, x: x.conj(),
    "angle": lambda xp, x: xp.angle(x),
    "diff": lambda xp, x: xp.diff(x),
    "average": lambda xp, x: xp.average(x, axis=1),
    "dot": lambda xp, x: xp.dot(x, x.T),
    "matmul": lambda xp, x: x @ x.T,
    "matmul of stacks": lambda xp, x: x[None] @ x.T[None],
    "tensordot": lambda xp, x: xp.tensordot(x, x, ((1,), (1,))),
    "einsum": lambda xp, x: xp.einsum("ij,kj->ik", x, x),
    "inner": lambda xp, x: xp.inner(x, x),
    "outer": lambda xp, x: xp.outer(x[:, 0], x[:, 0]),
    "vdot": lambda xp, x: xp.vdot(x, x),
    "kron": lambda xp, x: xp.kron(x, x),
    "roll": lambda xp, x: xp.roll(x, 1, 1),
    "flip": lambda xp, x: xp.flip(x),
    "searchsorted": lambda xp, x: xp.searchsorted(xp.zeros(3, x.dtype), x),
    "bincount": lambda xp, x: xp.bincount(x.ravel()),
    "interp": lambda xp, x: xp.interp(x, xp.arange(3.0), xp.arange(3.0)),
    "sign": lambda xp, x: xp.sign(x),
    "nansum": lambda xp, x: xp.nansum(x, axis=1),
    "nanmax": lambda xp, x: xp.nanmax(x, axis=1),
    "fft": lambda xp, x: xp.fft.fft(x, axis=1),
    "rfft": lambda xp, x: xp.fft.rfft(x, axis=1),
    "irfft": lambda xp, x: xp.fft.irfft(x, axis=1),
    "ifft": lambda xp, x: xp.fft.ifft(x, axis=1),
    "det": lambda xp, x: xp.linalg.det(xp.zeros((0, 2, 2), x.dtype)),
    "norm": lambda xp, x: xp.linalg.norm(x, axis=1),
    "+=": lambda xp, x: x.__iadd__(1),
    "+= float": lambda xp, x: x.__iadd__(1.5),
    "-=": lambda xp, x: x.__isub__(x),
    "/=": lambda xp, x: x.__itruediv__(2),
    "+= float64": lambda xp, x: x.__iadd__(xp.zeros((0, 3), "d")),
    "x[:] = float64": lambda xp, x: x.__setitem__(slice(None), xp.zeros((0, 3), "d")),
    "astype float32": lambda xp, x: x.astype("f"),
    "astype bool": lambda xp, x: x.astype("?"),
    "astype bfloat16": lambda xp, x: x.astype(BFLOAT16),
    "sum of dtype": lambda xp, x: xp.sum(x, axis=1, dtype="f"),
    "mean of dtype": lambda xp, x: xp.mean(x, axis=1, dtype="d"),
    "sum out": lambda xp, x: xp.sum(x, axis=1, out=xp.zeros(0, "i")),
    "add out": lambda xp, x: xp.add(x, x, out=xp.zeros((0, 3), "i")),
    "add of dtype": lambda xp, x: xp.add(x, x, dtype="f"),
    "divide of dtype": lambda xp, x: xp.divide(x, x, dtype="d"),
    "select": lambda xp, x: xp.select([x != 0], [x], 0),
    "piecewise": lambda xp, x: xp.piecewise(x, [x != 0], [1, 0]),
    "hstack": lambda xp, x: xp.hstack([x, x]),
    "i0": lambda xp, x: xp.i0(x),
    "meshgrid": lambda xp, x: xp.meshgrid(x[:, 0], x[:, 0]),
    "gradient": lambda xp, x: xp.gradient(xp.zeros((3, 3), x.dtype)[:, :0], axis=0),
    "convolve": lambda xp, x: xp.convolve(xp.zeros(3, x.dtype), xp.zeros(2, x.dtype)),
    "cross": lambda xp, x: xp.cross(x, x),
    "tri": lambda xp, x: xp.tri(0, dtype=x.dtype),
    "histogram": lambda xp, x: xp.histogram(x.ravel(), 2),
    "isin": lambda xp, x: xp.isin(x, x),
    "lexsort": lambda xp, x: xp.lexsort(x),
    "digitize": lambda xp, x: xp.digitize(x, xp.zeros(2)),
    "partition": lambda xp, x: xp.partition(x, 1, axis=1),
    "argpartition": lambda xp, x: xp.argpartition(x, 1, axis=1),
    "cov": lambda xp, x: xp.cov(x.T),
    "polyval": lambda xp, x: xp.polyval(xp.ones(2, x.dtype), x),
    "fill": lambda xp, x: x.fill(1),
    "packbits": lambda xp, x: xp.packbits(x),
    "unpackbits": lambda xp, x: xp.unpackbits(x),
    "broadcast": lambda xp, x: xp.broadcast_to(x, (2, 0, 3)),
    "minimum of a NumPy number": lambda xp, x: xp.minimum(x, np.float32(1)),
    "NumPy number -": lambda xp, x: np.float32(1) - x,
    "NumPy number *": lambda xp, x: np.float64(2) * x,
    "NumPy integer +": lambda xp, x: np.int64(2) + x,
}
# The dtypes for which STRICT refuses what CuPy computes, or would compute: an array without elements launches no kernel.
REFUSED = {
    "round(2)": "?",
    "matmul of stacks": "E",
    "einsum": "E",
    "bincount": "efdFDE",
    "fft": "E",
    "ifft": "E",
    "rfft": "FDE",
    "add of dtype": "FD",
    "divide of dtype": "FD",
    "i0": "FD",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_same_dtypes(name: str, on_cuda: Any) -> None:
    call, wrong = FUNCTIONS[name], []
    for dtype in [*DTYPES, np.dtype(np.complex128)]:
        theirs, ours = (outcome(partial(call, xp, xp.zeros((0, 3), dtype))) for xp in (on_cuda, STRICT))
        if theirs != ours and not (ours == "error" and dtype.char in REFUSED.get(name, "")):
            wrong.append((dtype.name, theirs, ours))
    assert wrong == []


# ---- Names and parameters


def test_the_names_the_parameters_and_the_loops_are_those_of_the_installed_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    described = cupy_names.describe()
    assert described == json.loads(cupy_names.PATH.read_text()), "run python tests/helpers/cupy_names.py"
    assert described["version"] == cupy.__version__


def test_every_name_of_the_strict_namespace_exists_on_cuda(on_cuda: Any) -> None:
    assert {n for n in dir(STRICT) if not n.startswith("_")} - set(dir(on_cuda.module)) <= set(dir(on_cuda))
    for part, theirs in (("ndarray", on_cuda.ndarray), ("linalg", on_cuda.linalg), ("fft", on_cuda.fft)):
        assert set(cupy_names.names(part)) <= set(dir(theirs))


def test_a_keyword_that_cupy_lacks_is_refused() -> None:
    for part, owner in (("cupy", STRICT), ("linalg", STRICT.linalg), ("fft", STRICT.fft), ("ndarray", STRICT.zeros(3))):
        for name in cupy_names.names("parameters")[part]:
            if name in UNCHECKED or name in guards.SIZES or (part == "ndarray" and name in HOST):
                continue
            with pytest.raises(TypeError, match=r"no_such_parameter|unexpected keyword"):
                getattr(owner, name)(no_such_parameter=1)


# Functions of dtypes and shapes, which are NumPy's.
UNCHECKED = {"result_type", "broadcast_shapes", "promote_types", "can_cast", "issubdtype"}
HOST = {"item", "tolist", "tobytes", "tofile", "dump", "dumps"}
