"""The array namespaces `xp` of operator bodies: NumPy, CuPy, or NumPy restricted to CuPy's functions.

An operator body may use every name that NumPy and CuPy share, and these functions, which hide their differences:

    xp.from_host(a)  xp.to_host(x)             the only ways between the device and the host
    xp.cast(x, dtype)                          astype with a defined result for floats outside the integer range
    xp.indices(i, size)                        integer indices, negative ones wrapped, checked against the size
    xp.refuse(bad, error)                      raises error() if an element of `bad` is true
    xp.may_hold_nan(x)                         False only if floats hold no NaN
    xp.scatter(out, index, values, reduction)  in place on `out`: "none", "add", "mul", "max", "min"
    xp.windows(x, shape, axis)                 a sliding-window view
    xp.as_strided(x, shape, strides)           a strided view, used by pooling
    xp.erf(x)  xp.erfc(x)                      the error function, and 1 minus it
    xp.polynomial(x, coefficients)             of floats, the coefficients from the lowest power to the highest
    xp.sum_over(x, axes)                       a sum whose rounding errors hardly grow with the number of terms (sums.py)
    xp.running_sum(x, axis)                    the sums of the elements up to each one, likewise
    xp.softmax(x, axis), ...                   the functions of composed.py, which a device computes by fewer kernels
    xp.isarray(x)                              whether x is an array of this namespace
    xp.block_elements(n, itemsize, host)       how many of n elements to compute at a time

Functions whose result may be larger than their arguments (zeros, tile, take, ...) check the limits of the call first (guards.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import resources
from typing import Any

import ml_dtypes
import numpy as np

from .. import limits
from ..dtypes import DTypeLike
from ..errors import OperatorError
from . import composed, fused, graphs, spatial
from .checks import checking
from .cuda import memory
from .guards import SIZES, guarded
from .spatial import WindowPlaces
from .special import erf, erfc, in_pieces, with_float
from .transforms import Transforms

Array = Any  # an array of the current namespace
Xp = Any  # a Namespace

_REDUCTIONS = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


class Namespace(ABC):
    """Functions of all namespaces; other names are those of the array module."""

    joins = False
    """Whether `elementwise` makes kernels."""

    records = False
    """Whether calls are recorded, not computed."""

    multiplies_halves = False
    """Whether products of float16 are added in float32 and rounded once."""

    lib: Any
    zeros: Callable[..., Array]
    trunc: Callable[..., Array]
    where: Callable[..., Array]

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self.__dict__.update((n, guarded(n, v)) for n, v in names.items() if not hasattr(type(self), n))
        self.module = module

    def cast(self, x: Array, dtype: DTypeLike) -> Array:
        """`x.astype(dtype)`; a float outside int64 becomes its minimum, which then wraps into narrower integers.

        ONNX leaves these casts undefined; NumPy's result depends on the processor, and CuPy saturates.
        """
        dtype = np.dtype(dtype)
        if dtype.kind not in "iu" or x.dtype.kind not in "f":
            return x.astype(dtype)
        wide = np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
        low, high = (0.0, 2.0**64) if wide == np.uint64 else (-(2.0**63), 2.0**63)
        whole = self.trunc(x.astype(np.float64))
        inside = (whole >= low) & (whole < high)
        held = self.where(inside, whole, 0).astype(wide)
        outside = wide.type(0 if wide == np.uint64 else -(2**63))
        return self.where(inside, held, outside).astype(dtype)

    def indices(self, i: Array, size: int, *, negative: bool = True) -> Array:
        """`i` with negative indices counted from the end; raises OperatorError for an index outside [-size, size)."""
        low = -size if negative else 0
        if not i.size:
            return i
        minimum = self.to_host(i.min())
        if minimum < low or self.to_host(i.max()) >= size:
            at = self.to_host(i)
            wrong = at[(at < low) | (at >= size)].flat[0]
            raise OperatorError(f"an index must be in [{low}, {size}), got {wrong}", code="SX401")
        return self.where(i < 0, i + size, i) if minimum < 0 else i

    def refuse(self, bad: Array, error: Callable[[], OperatorError]) -> None:
        """Raise an error if an element of `bad` is true; on CUDA, in a run, when the run ends."""
        if self.to_host(bad.any()):
            raise error()

    def largest(self, x: Array) -> int:
        """The largest absolute value of integers, by which a definition chooses between ways that return the same."""
        return max(int(self.to_host(x.max())), -int(self.to_host(x.min())))

    def may_hold_nan(self, x: Array) -> bool:
        """Whether floats hold a NaN; always True on a device, which would have to synchronize."""
        return bool(x.dtype.kind == "f")

    def polynomial(self, x: Array, coefficients: Sequence[float]) -> Array:
        """A polynomial of degree 1 or higher at floats; the coefficients from the lowest power to the highest."""
        y = x * coefficients[-1]
        for c in coefficients[-2:0:-1]:
            y += c
            y *= x
        y += coefficients[0]
        return y

    def erf(self, x: Array) -> Array:
        """The error function, to about 1 unit in the last place of float32 or float64."""
        return erf(self, x)

    def erfc(self, x: Array) -> Array:
        """1 - erf(x), small results to about 2 * x * x units in the last place."""
        return erfc(self, x)

    def softmax(self, x: Array, axis: int) -> Array:
        """As `composed.softmax`."""
        return composed.softmax(self, x, axis)

    def log_softmax(self, x: Array, axis: int) -> Array:
        """As `composed.log_softmax`."""
        return composed.log_softmax(self, x, axis)

    def standardized(self, x: Array, mean: Array, var: Array, epsilon: float, scale: Array, b: Array) -> Array:
        """As `composed.standardized`."""
        return composed.standardized(self, x, mean, var, epsilon, scale, b)

    def batch_normalized(
        self, x: Array, axes: tuple[int, ...], epsilon: float, scale: Array, b: Array
    ) -> tuple[Array, Array, Array]:
        """As `composed.batch_normalized`."""
        return composed.batch_normalized(self, x, axes, epsilon, scale, b)

    def blended(self, old: Array, new: Array, momentum: float) -> Array:
        """As `composed.blended`."""
        return composed.blended(old, new, momentum)

    def layer_normalized(
        self, x: Array, axes: tuple[int, ...], epsilon: float, scale: Array, b: Array | None, dtype: DTypeLike
    ) -> tuple[Array, Array, Array]:
        """As `composed.layer_normalized`."""
        return composed.layer_normalized(self, x, axes, epsilon, scale, b, dtype)

    def sum_over(self, x: Array, axes: tuple[int, ...], keepdims: bool = False) -> Array:
        """The sum over `axes`, which are counted from the front, in the dtype of x."""
        from . import sums  # plans have kernels for most sums

        return sums.total(self, x, axes, keepdims)

    def running_sum(self, x: Array, axis: int) -> Array:
        """The sum of the elements up to each one along an axis, which is counted from the front, in the dtype of x."""
        from . import sums

        return sums.running(self, x, axis)

    def mean_over(self, x: Array, axes: tuple[int, ...], keepdims: bool = True) -> Array:
        """The mean of floats over `axes`."""
        return composed.mean(self, x, axes, keepdims)

    def count(self, x: Array, axes: tuple[int, ...]) -> Any:
        """The number of elements along `axes`."""
        return math.prod(x.shape[a] for a in axes)

    def place_of(self, x: Array, pick: str, axis: int, last: bool) -> Array:
        """The index of the first or the last "max" or "min" along an axis, counted from the front; NaN is the extremum."""
        i = getattr(self.module, f"arg{pick}")(self.module.flip(x, axis) if last else x, axis=axis)
        return x.shape[axis] - 1 - i if last else i

    def columns(self, x: Array, at: WindowPlaces) -> Array | None:
        """Every window of x by one kernel, as `spatial.columns`; None without one."""
        return None

    def folded(self, parts: Array, sizes: tuple[int, ...], at: WindowPlaces) -> Array | None:
        """The sums of windows by one kernel, as `spatial.folded`; None without one."""
        return None

    def maxima(self, x: Array, at: WindowPlaces, *, places: bool) -> tuple[Array, Array | None] | None:
        """The maxima of windows by one kernel, as `spatial.maxima`; None without one."""
        return None

    def lstm_cell(self, projected: Array, recurrent: Array, c: Array) -> tuple[Array, Array] | None:
        """A step of an LSTM by one kernel, as `fused.lstm_cell`; None without one."""
        return None

    def philox_words(self, key: Array, count: int) -> Array | None:
        """Words of Philox by one kernel, as `fused.philox_words`; None without one."""
        return None

    def windows(self, x: Array, shape: Any, axis: Any) -> Array:
        """A read-only view of every window of `shape` along `axis`; the window's axes come last."""
        return self.lib.stride_tricks.sliding_window_view(x, shape, axis)

    def as_strided(self, x: Array, shape: Any, strides: Any) -> Array:
        """A view of `x` with this shape and these strides in bytes."""
        return self.lib.stride_tricks.as_strided(x, shape, strides)

    def block_elements(self, elements: int, itemsize: int, host: int) -> int:
        """How many of these elements, of `itemsize` bytes with all temporary arrays, to compute at a time.

        On the host `host`, which is made for the processor's cache.  On a device all of them, if its memory allows it.
        """
        return host

    def sums_are_large(self, x: Array, w: Array, count: int) -> bool:
        """Whether sums of `count` products of x and w may exceed 2**24, above which float32 cannot represent every integer.

        The host's BLAS kernels may then round equal rows differently.  Always False on a device, which would have to synchronize.
        """
        return False

    @abstractmethod
    def from_host(self, a: np.ndarray) -> Array: ...

    @abstractmethod
    def to_host(self, x: Array) -> np.ndarray: ...

    @abstractmethod
    def isarray(self, x: Any) -> bool: ...

    @abstractmethod
    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        """Write `values` into `out`, or combine them with it, one after the other in the order of the indices.

        `index` has integer arrays for the first axes of `out`, which broadcast, after `indices`.
        """


_MANY = 1 << 12
"""The number of elements from which `_where` selects by bits."""


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """As NumPy's; of many elements by bits, which takes a quarter of the time if the condition is random."""
    if x is None:
        return np.where(condition)
    if np.size(condition) >= _MANY and condition.dtype == np.bool_ and condition.flags.c_contiguous:
        dtype = np.result_type(x, y)
        if dtype.char in "?bBhHiIlLqQefd" and {np.shape(x), np.shape(y)} <= {(), condition.shape}:
            made = np.empty(condition.shape, dtype)
            p, q, bits = (np.asarray(v, dtype).view(f"i{dtype.itemsize}") for v in (x, y, made))
            np.bitwise_xor(p, q, out=bits)
            np.multiply(bits, condition, out=bits)
            np.bitwise_xor(bits, q, out=bits)
            return made
    return np.where(condition, x, y)


def _largest(x: np.ndarray) -> float:
    """The largest absolute value."""
    return max(float(x.max()), -float(x.min()))


def _norm(x: np.ndarray) -> float:
    """The square root of the sum of the squares."""
    elements = x.reshape(-1)
    return math.sqrt(elements @ elements)


class NumpyNamespace(Namespace):
    """NumPy, which defines the results of the other namespaces."""

    def __init__(self) -> None:
        names = {n: v for n, v in vars(np).items() if not n.startswith("_")}  # dir(np) would load f2py, testing and others
        super().__init__(np, {**names, "fft": np.fft, "linalg": np.linalg, "where": _where})

    def from_host(self, a: np.ndarray) -> Array:
        return a

    def to_host(self, x: Array) -> np.ndarray:
        return np.asarray(x)

    def isarray(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def cast(self, x: Array, dtype: DTypeLike) -> Array:
        """As `Namespace.cast`; only `astype` if all values are in range."""
        dtype = np.dtype(dtype)
        if dtype.kind in "iu" and x.dtype.kind == "f" and x.size:
            info = np.iinfo(dtype)
            if info.min <= float(x.min()) and float(x.max()) <= info.max:  # false of NaN
                return x.astype(dtype)
        return super().cast(x, dtype)

    def may_hold_nan(self, x: Array) -> bool:
        return x.dtype.kind == "f" and bool((x != x).any())

    def sums_are_large(self, x: Array, w: Array, count: int) -> bool:
        if not (x.size and w.size) or _norm(x) * _norm(w) < 2.0**23:  # which no sum exceeds; one pass over x in place of two
            return False
        return count * _largest(x) * _largest(w) > 2.0**24

    def erf(self, x: Array) -> Array:
        return in_pieces(super().erf, x)

    def erfc(self, x: Array) -> Array:
        return in_pieces(super().erfc, x)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        if reduction == "none":
            out[index] = values
        else:
            getattr(np, _REDUCTIONS[reduction]).at(out, index, values)


class CupyNamespace(Namespace):
    """CuPy, with NumPy's results where the two differ."""

    joins = multiplies_halves = True

    def __init__(self) -> None:
        import cupy

        names = {n: getattr(cupy, n) for n in dir(cupy) if not n.startswith("_")}
        super().__init__(cupy, names)

    def from_host(self, a: np.ndarray) -> Array:
        kept = graphs.tables()
        return self.module.asarray(a) if kept is None else kept.put(self.module, a)

    def asarray(self, a: Any, dtype: DTypeLike | None = None, **order: Any) -> Array:
        """As CuPy's; what is on the host is copied by `from_host`."""
        if isinstance(a, (np.ndarray, np.generic, int, float)) and not order:
            return self.from_host(np.asarray(a, dtype))
        return self.module.asarray(a, dtype, **order)

    @property
    def fft(self) -> Any:
        """CuPy's transforms; in a run that may be captured, by plans that its record keeps."""
        kept = graphs.tables()
        return self.module.fft if kept is None else Transforms(self.module, kept)

    def to_host(self, x: Array) -> np.ndarray:
        graphs.refuse_capture("reads values of the device on the host")
        return np.asarray(self.module.asnumpy(x))

    def isarray(self, x: Any) -> bool:
        return isinstance(x, self.module.ndarray)

    def indices(self, i: Array, size: int, *, negative: bool = True) -> Array:
        """As `Namespace.indices`; in a run the error is raised when the run ends (checks.py), until then wrong indices are 0."""
        if not i.size:
            return i
        with checking(self.module) as checks:
            return checks.indices(i, size, -size if negative else 0)

    def windows(self, x: Array, shape: Any, axis: Any) -> Array:
        """As `Namespace.windows`; CuPy's function computes the sizes on the device."""
        sizes, axes = (shape, axis) if isinstance(shape, tuple) else ((shape,), (axis,))
        counts = list(x.shape)
        for n, a in zip(sizes, axes, strict=True):
            counts[a] -= n - 1
        if min(counts, default=1) < 0:
            raise ValueError(f"windows of {list(sizes)} along axes {list(axes)} exceed an array of shape {list(x.shape)}")
        return self.as_strided(x, (*counts, *sizes), (*x.strides, *(x.strides[a] for a in axes)))

    def refuse(self, bad: Array, error: Callable[[], OperatorError]) -> None:
        with checking(self.module) as checks:
            checks.refuse(bad, error)

    def clip(self, x: Array, low: Any, high: Any) -> Array:
        """`high` if low > high, and NaN if a bound is NaN; CuPy's own clip returns `low` and `x` in these cases."""
        if low is None and high is None:
            return x.copy()
        if low is not None and high is not None and self.isarray(x) and _are_alike(x, low, high):
            return fused.clip(self.module, x, low, high)
        raised = x if low is None else self.module.maximum(x, low)
        return raised if high is None else self.module.minimum(raised, high)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        """As NumPy's, on the device: equal indices are combined in their order (scatter.cu).

        The bits are NumPy's, except the sign of a zero that is a maximum or a minimum, which NumPy leaves to the processor.
        """
        xp = self.module
        if reduction == "add" and len(index) == 1 and out.ndim == 1 and out.dtype in fused.COUNTS:
            fused.count(xp, out, index[0], values)  # the sum of integers does not depend on the order
            return
        place = index[0].astype(np.int64, copy=False)
        for i, size in zip(index[1:], out.shape[1:], strict=False):
            place = place * size + i.astype(np.int64, copy=False)
        row = out.shape[len(index) :]
        values = xp.ascontiguousarray(xp.broadcast_to(xp.asarray(values, out.dtype), place.shape + row))
        if not values.size:
            return
        place, inner = xp.ravel(place), math.prod(row)
        target = xp.ascontiguousarray(out)
        kernel = self._kernels.get_function(_kernel(out.dtype, reduction))
        sizes = (np.int64(n) for n in (out.size // inner, place.size, inner))
        kernel((-(-values.size // _THREADS),), (_THREADS,), (target, place, xp.argsort(place), values, *sizes))
        if target is not out:
            out[...] = target

    def block_elements(self, elements: int, itemsize: int, host: int) -> int:
        """As `Namespace.block_elements`; the driver is asked only if the elements need more than a part of all memory.

        The number is a power of two that seldom depends on what else is allocated: two runs then add in the same order.
        """
        if elements * itemsize <= _SMALL:
            return elements
        small = elements * itemsize <= memory(self.module.cuda.runtime.getDevice()) // _PART
        if small and limits.room(elements * itemsize) == elements * itemsize:
            return elements
        free, total = self.module.cuda.runtime.memGetInfo()
        free += self.module.get_default_memory_pool().free_bytes()
        room = limits.room(min(elements * itemsize, total // 16, free // 4)) // itemsize
        return elements if room >= elements else max(host, 1 << max(room, 1).bit_length() - 1)

    def bincount(self, x: Array, weights: Array | None = None, minlength: int = 0) -> Array:
        """As NumPy's for values below `minlength`; CuPy's reads them on the host, and adds weights in no order."""
        counts = self.zeros(minlength, np.int64 if weights is None else np.float64)
        self.scatter(counts, (x,), 1 if weights is None else weights, "add")
        return counts

    def matmul(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """As CuPy's, without arrays of pointers and copies of transposed operands where cuBLAS needs none."""
        limits.current().admit(*SIZES["matmul"](a, b, out))
        from . import products  # of CUDA only

        return products.matmul(self.module, a, b, out)

    def einsum(self, equation: str, *xs: Array, optimize: bool = False) -> Array:
        """As CuPy's, whose products are those of `matmul`."""
        from . import products

        return products.einsum(self, equation, xs) if len(xs) > 1 else self.module.einsum(equation, *xs)

    def erf(self, x: Array) -> Array:
        return with_float(lambda z: fused.erf(self.module, z), x)

    def erfc(self, x: Array) -> Array:
        return with_float(lambda z: fused.erfc(self.module, z), x)

    def softmax(self, x: Array, axis: int) -> Array:
        return fused.softmax(self.module, x, axis) if fused.fits(x) else super().softmax(x, axis)

    def log_softmax(self, x: Array, axis: int) -> Array:
        return fused.log_softmax(self.module, x, axis) if fused.fits(x) else super().log_softmax(x, axis)

    def columns(self, x: Array, at: WindowPlaces) -> Array | None:
        return spatial.columns(self.module, x, at) if spatial.fits(x, at) else None

    def folded(self, parts: Array, sizes: tuple[int, ...], at: WindowPlaces) -> Array | None:
        return spatial.folded(self.module, parts, sizes, at) if spatial.fits(parts, at) else None

    def maxima(self, x: Array, at: WindowPlaces, *, places: bool) -> tuple[Array, Array | None] | None:
        return spatial.maxima(self.module, x, at, places=places) if spatial.fits(x, at) else None

    def lstm_cell(self, projected: Array, recurrent: Array, c: Array) -> tuple[Array, Array] | None:
        if not fused.fits(projected, recurrent, c):
            return None
        return fused.lstm_cell(self.module, projected, recurrent, c)

    def philox_words(self, key: Array, count: int) -> Array | None:
        return fused.philox_words(self.module, key, count)

    def sum_over(self, x: Array, axes: tuple[int, ...], keepdims: bool = False) -> Array:
        """As `Namespace.sum_over`: CuPy computes a sum by up to 512 threads; those that would add many terms add in float64."""
        if not axes:
            return x
        if x.dtype != np.float32 or math.prod(x.shape[a] for a in axes) < _LONG:
            return x.sum(axis=axes, dtype=x.dtype, keepdims=keepdims)
        return x.sum(axis=axes, dtype=np.float64, keepdims=keepdims).astype(x.dtype)

    def running_sum(self, x: Array, axis: int) -> Array:
        """As CuPy's, whose threads add in pairs."""
        return self.module.cumsum(x, axis=axis, dtype=x.dtype)

    def mean_over(self, x: Array, axes: tuple[int, ...], keepdims: bool = True) -> Array:
        if axes and x.size and fused.fits(x) and math.prod(x.shape[a] for a in axes) < _LONG:
            return fused.mean(self.module, x, axes, keepdims)
        return super().mean_over(x, axes, keepdims)

    def elementwise(self, takes: str, results: str, text: str) -> Callable[..., Any]:
        """A kernel of elementwise operations, as `fused.elementwise`."""
        made: Callable[..., Any] = fused.elementwise(self.module, takes, results, text)
        return made

    def standardized(self, x: Array, mean: Array, var: Array, epsilon: float, scale: Array, b: Array) -> Array:
        if fused.fits(x, mean, var, scale, b):
            return fused.standardized(self.module, x, mean, var, epsilon, scale, b)
        return super().standardized(x, mean, var, epsilon, scale, b)

    def batch_normalized(
        self, x: Array, axes: tuple[int, ...], epsilon: float, scale: Array, b: Array
    ) -> tuple[Array, Array, Array]:
        if x.size and fused.fits(x, scale, b):
            return fused.batch_normalized(self.module, x, axes, epsilon, scale, b)
        return super().batch_normalized(x, axes, epsilon, scale, b)

    def blended(self, old: Array, new: Array, momentum: float) -> Array:
        return fused.blended(self.module, old, new, momentum) if fused.fits(old, new) else super().blended(old, new, momentum)

    def layer_normalized(
        self, x: Array, axes: tuple[int, ...], epsilon: float, scale: Array, b: Array | None, dtype: DTypeLike
    ) -> tuple[Array, Array, Array]:
        if axes and x.size and x.dtype == dtype and fused.fits(*(v for v in (x, scale, b) if v is not None)):
            return fused.layer_normalized(self.module, x, axes, epsilon, scale, b)
        return super().layer_normalized(x, axes, epsilon, scale, b, dtype)

    @cached_property
    def _kernels(self) -> Any:
        return self.module.RawModule(code=scatter_source(), options=COMPILED_WITH)


_THREADS = 256
_LONG = 1 << 16  # terms of a sum that CuPy's threads add in float64
_SMALL = 1 << 24  # bytes that a device is assumed to have
_PART = 64  # a device of which less is free is nearly out of memory
_TYPES: dict[np.dtype[Any], str] = {
    np.dtype(name): kind
    for name, kind in (
        ("bool", "bool"), ("int8", "signed char"), ("int16", "short"), ("int32", "int"), ("int64", "long long"),
        ("uint8", "unsigned char"), ("uint16", "unsigned short"), ("uint32", "unsigned"), ("uint64", "unsigned long long"),
        (ml_dtypes.bfloat16, "__nv_bfloat16"), ("float16", "__half"), ("float32", "float"), ("float64", "double"),
        ("complex64", "Complex<float>"), ("complex128", "Complex<double>"),
    )
}  # fmt: skip
COMPILED_WITH = ("--fmad=false",)
"""The options of NVRTC."""


def _are_alike(x: Array, *bounds: Any) -> bool:
    """Whether bounds have the dtype of x, or are numbers that a float x takes; `fused.clip` compares in that dtype."""
    kind = x.dtype.kind
    if kind not in "iuf" or (kind == "f" and x.dtype.itemsize < 4):
        return False
    return all(getattr(v, "dtype", None) == x.dtype or (kind == "f" and isinstance(v, (int, float))) for v in bounds)


def scatter_source() -> str:
    """Return the text of the kernels that scatter: scatter.cu, and one kernel for each dtype and reduction."""
    source = resources.files(__package__).joinpath("scatter.cu").read_text()
    head = 'extern "C" __global__ void'
    return source + "".join(
        f"{head} {_kernel(dtype, mode)}(PARAMETERS({kind})) {{ scatter<{kind}, {mode.upper()}>(ARGUMENTS); }}\n"
        for dtype, kind in _TYPES.items()
        for mode in ("none", *_REDUCTIONS)
    )


def _kernel(dtype: np.dtype[Any], mode: str) -> str:
    return f"scatter_{dtype}_{mode}"


numpy = NumpyNamespace()
host: Xp = numpy
"""NumPy for the constants that gradient rules, decompositions and adapters make: its functions check the limits first."""
