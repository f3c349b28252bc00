"""The `xp` that operators are written on: NumPy, CuPy, or NumPy that offers only what CuPy offers.

An operator body may use every name that NumPy and CuPy share, and the extras below, in which their differences are met:

    xp.from_host(a)  xp.to_host(x)             the only ways between the device and the host
    xp.cast(x, dtype)                          astype with one answer for floats that no integer can hold
    xp.indices(i, size)                        integer indices, negative ones wrapped, checked against the size
    xp.scatter(out, index, values, reduction)  in place on `out`: "none", "add", "mul", "max", "min"
    xp.windows(x, shape, axis)                 a sliding-window view
    xp.as_strided(x, shape, strides)           the view behind every pooling
    xp.erf(x)
    xp.isarray(x)                              is it an array of this namespace?
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

import numpy as np

from .errors import OperatorError

Array = Any  # an array of the namespace at hand
Xp = Any  # a namespace of this module

_REDUCTIONS = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


class Namespace:
    """What is common to the namespaces; names that are not here are the array module's own."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self.__dict__.update((n, v) for n, v in names.items() if not hasattr(type(self), n))
        self.module = module

    def cast(self, x: Array, dtype: Any) -> Array:
        """`x.astype(dtype)`; a float that int64 cannot hold becomes its minimum, then wraps into narrower integers.

        ONNX leaves these casts undefined; NumPy's answer depends on the processor and CuPy saturates.
        """
        dtype = np.dtype(dtype)
        if dtype.kind not in "iu" or x.dtype.kind not in "f":
            return x.astype(dtype)
        wide = np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
        low, high = (0.0, 2.0**64) if wide == np.uint64 else (-(2.0**63), 2.0**63)
        whole = self.trunc(x.astype(np.float64))  # type: ignore[attr-defined]
        inside = (whole >= low) & (whole < high)
        held = self.where(inside, whole, 0).astype(wide)  # type: ignore[attr-defined]
        outside = wide.type(0 if wide == np.uint64 else -(2**63))
        return self.where(inside, held, outside).astype(dtype)  # type: ignore[attr-defined]

    def indices(self, i: Array, size: int, *, negative: bool = True) -> Array:
        """`i` with negative indices counted from the end; raises OperatorError for one outside [-size, size)."""
        low = -size if negative else 0
        if i.size and (self.to_host(i.min()) < low or self.to_host(i.max()) >= size):
            at = self.to_host(i)
            wrong = at[(at < low) | (at >= size)].flat[0]
            raise OperatorError(f"index {wrong} is outside [{low}, {size})", code="SX401")
        return self.where(i < 0, i + size, i) if negative and i.dtype.kind == "i" else i  # type: ignore[attr-defined]

    def erf(self, x: Array) -> Array:
        """The error function, to about 2e-16 (float64): a Taylor series near 0, a continued fraction beyond 2.5."""
        return _erf(self, x)

    def erfc(self, x: Array) -> Array:
        return 1 - _erf(self, x)

    def windows(self, x: Array, shape: Any, axis: Any) -> Array:
        """A read-only view of every window of `shape` along `axis`; the window's axes come last."""
        return self.lib.stride_tricks.sliding_window_view(x, shape, axis)  # type: ignore[attr-defined]

    def as_strided(self, x: Array, shape: Any, strides: Any) -> Array:
        """A view of `x` with this shape and these strides in bytes."""
        return self.lib.stride_tricks.as_strided(x, shape, strides)  # type: ignore[attr-defined]

    # What a namespace of its own must say.

    def from_host(self, a: np.ndarray) -> Array:
        raise NotImplementedError

    def to_host(self, x: Array) -> np.ndarray:
        raise NotImplementedError

    def isarray(self, x: Any) -> bool:
        raise NotImplementedError

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        raise NotImplementedError


class NumpyNamespace(Namespace):
    """NumPy: the definition."""

    def __init__(self) -> None:
        super().__init__(np, {n: getattr(np, n) for n in dir(np) if not n.startswith("_")})

    def from_host(self, a: np.ndarray) -> Array:
        return a

    def to_host(self, x: Array) -> np.ndarray:
        return np.asarray(x)

    def isarray(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        if reduction == "none":
            out[index] = values
        else:
            getattr(np, _REDUCTIONS[reduction]).at(out, index, values)


class CupyNamespace(Namespace):
    """CuPy, with NumPy's meaning where the two differ.

    Float16, integer-narrow, multiplying and 64-bit max/min scatters go through the host: CuPy has no multiply, and its
    float64 maximum passes through float32.  Scatters that write one place twice are done on the host too, because
    the winner is undefined on the device.
    """

    _ON_DEVICE = frozenset(np.dtype(t) for t in (np.float32, np.float64, np.int32, np.int64, np.uint32, np.uint64))

    def __init__(self) -> None:
        import cupy

        names = {n: getattr(cupy, n) for n in dir(cupy) if not n.startswith("_")}
        super().__init__(cupy, names)

    def from_host(self, a: np.ndarray) -> Array:
        return self.module.asarray(a)

    def to_host(self, x: Array) -> np.ndarray:
        return np.asarray(self.module.asnumpy(x))

    def isarray(self, x: Any) -> bool:
        return isinstance(x, self.module.ndarray)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        if reduction == "add" and out.dtype in self._ON_DEVICE:
            self.module.add.at(out, index, values)
            return
        here = self.to_host(out)
        there = tuple(self.to_host(i) if self.isarray(i) else i for i in index)
        numpy.scatter(here, there, self.to_host(values) if self.isarray(values) else values, reduction)
        out[...] = self.from_host(here)


# --- NumPy that offers only what CuPy offers: finds, without a GPU, what would break on one -------------------------


@cache
def _cupy_names() -> dict[str, frozenset[str]]:
    text = resources.files(__package__).joinpath("cupy_names.json").read_text()
    return {part: frozenset(names) for part, names in json.loads(text).items()}


class StrictArray:
    """An array that behaves as CuPy's do: no implicit way to the host, reductions of rank 0, CuPy's methods only."""

    __slots__ = ("_a",)
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, a: Any) -> None:
        self._a = np.asarray(a)

    def __getattr__(self, name: str) -> Any:
        if name not in _cupy_names()["ndarray"]:
            raise AttributeError(f"cupy.ndarray has no attribute {name!r}")
        if name in ("get", "item", "tolist", "tobytes", "__array__"):
            raise TypeError(f"ndarray.{name} copies to the host: write xp.to_host(x)")
        value = getattr(self._a, name)
        return _strict_call(value) if callable(value) else _wrap(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._a[_unwrap(key)] = _unwrap(value)

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Iterator[StrictArray]:
        return (StrictArray(a) for a in self._a)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion of a device array to the host: write xp.to_host(x)")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __array__ = _refuse

    def __repr__(self) -> str:
        return f"StrictArray({self._a!r})"


def _operator(name: str) -> Callable[..., Any]:
    def method(self: StrictArray, *others: Any) -> Any:
        result = getattr(self._a, name)(*(_unwrap(o) for o in others))
        return result if result is NotImplemented else self if name.startswith("__i") and name != "__invert__" else _wrap(result)

    return method


_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or", "xor", "matmul"]
for _name in [f"__{r}{b}__" for b in _BINARY for r in ("", "r")]:
    setattr(StrictArray, _name, _operator(_name))
for _name in [f"__i{b}__" for b in _BINARY if b not in ("divmod", "matmul")]:
    setattr(StrictArray, _name, _operator(_name))
for _name in ["neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem"]:
    setattr(StrictArray, f"__{_name}__", _operator(f"__{_name}__"))


def _unwrap(value: Any) -> Any:
    if isinstance(value, StrictArray):
        return value._a
    if isinstance(value, np.ndarray):
        raise TypeError("a host array met a device array: write xp.from_host(a)")
    if isinstance(value, (tuple, list)):
        return type(value)(_unwrap(v) for v in value)
    if isinstance(value, dict):
        return {k: _unwrap(v) for k, v in value.items()}
    return value


def _wrap(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return StrictArray(value)
    if isinstance(value, tuple) and any(isinstance(v, (np.ndarray, np.generic)) for v in value):
        return type(value)(_wrap(v) for v in value) if type(value) is tuple else tuple(_wrap(v) for v in value)
    if isinstance(value, list):
        return [_wrap(v) for v in value]
    return value


def _strict_call(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _wrap(function(*_unwrap(args), **_unwrap(kwargs)))

    return call


class _StrictUfunc:
    """A ufunc: callable, with the methods that CuPy's ufuncs have."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _strict_call(self._ufunc)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name not in ("reduce", "accumulate", "reduceat", "at", "outer", "nin", "nout", "identity"):
            raise AttributeError(f"cupy's ufuncs have no attribute {name!r}")
        value = getattr(self._ufunc, name)
        return _strict_call(value) if callable(value) else value


class _StrictModule:
    def __init__(self, module: ModuleType, allowed: frozenset[str], label: str) -> None:
        self._module, self._allowed, self._label = module, allowed, label

    def __getattr__(self, name: str) -> Any:
        if name not in self._allowed:
            raise AttributeError(f"module {self._label!r} has no attribute {name!r}")
        return _strict(getattr(self._module, name))


def _strict(value: Any) -> Any:
    if isinstance(value, np.ufunc):
        return _StrictUfunc(value)
    if isinstance(value, type) or not callable(value):
        return value
    return _strict_call(value)


# These describe dtypes and shapes; they touch no data and take whatever they get.
_PLAIN = frozenset({"dtype", "finfo", "iinfo", "result_type", "promote_types", "can_cast", "issubdtype", "broadcast_shapes"})


class StrictNamespace(Namespace):
    """NumPy behind CuPy's face."""

    def __init__(self) -> None:
        known = _cupy_names()
        names = {n: getattr(np, n) if n in _PLAIN else _strict(getattr(np, n)) for n in known["cupy"] if hasattr(np, n)}
        names["linalg"] = _StrictModule(np.linalg, known["linalg"], "cupy.linalg")
        names["fft"] = _StrictModule(np.fft, known["fft"], "cupy.fft")
        tricks = frozenset({"as_strided", "sliding_window_view"})
        lib = ModuleType("cupy.lib")
        lib.stride_tricks = _StrictModule(np.lib.stride_tricks, tricks, "cupy.lib.stride_tricks")  # type: ignore[attr-defined]
        names["lib"] = lib
        names["ndarray"] = StrictArray
        names["result_type"] = lambda *a: np.result_type(*(_unwrap(v) for v in a))
        super().__init__(np, names)

    def from_host(self, a: np.ndarray) -> Array:
        return StrictArray(a)

    def asarray(self, a: Any, dtype: Any = None) -> Array:
        """Like cupy.asarray, this one may be given host data."""
        return StrictArray(np.asarray(a._a if isinstance(a, StrictArray) else _unwrap_list(a), dtype))

    def array(self, a: Any, dtype: Any = None) -> Array:
        """Like cupy.array, this one may be given host data."""
        return StrictArray(np.array(a._a if isinstance(a, StrictArray) else _unwrap_list(a), dtype))

    def to_host(self, x: Array) -> np.ndarray:
        if not isinstance(x, StrictArray):
            raise TypeError(f"to_host of a {type(x).__name__}, which is not on the device")
        return x._a.copy()

    def isarray(self, x: Any) -> bool:
        return isinstance(x, StrictArray)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        numpy.scatter(out._a, _unwrap(index), _unwrap(values), reduction)


def _unwrap_list(a: Any) -> Any:
    return type(a)(_unwrap_list(v) for v in a) if isinstance(a, (list, tuple)) else a._a if isinstance(a, StrictArray) else a


def _erf(xp: Any, x: Array) -> Array:
    """Erf by its Taylor series (|x| < 2.5) and the continued fraction of erfc (above); formulas 7.1.6 and 7.1.14
    of Abramowitz and Stegun, Handbook of Mathematical Functions."""
    z = xp.asarray(x).astype(np.float64)
    a = xp.minimum(xp.abs(z), 6.5)
    near = xp.minimum(a, 2.5)
    term = near.copy()
    total = near.copy()
    for n in range(1, 60):
        term = term * (2 * near * near / (2 * n + 1))
        total = total + term
    series = total * xp.exp(-near * near) * (2 / math.sqrt(math.pi))
    far = xp.maximum(a, 2.5)
    fraction = far
    for n in range(60, 0, -1):
        fraction = far + (n / 2) / fraction
    tail = 1 - xp.exp(-far * far) / (fraction * math.sqrt(math.pi))
    y = xp.where(a < 2.5, series, tail)
    y = xp.where(xp.isnan(z), z, xp.copysign(xp.minimum(y, 1.0), z))
    return y.astype(x.dtype) if x.dtype.kind == "f" else y


numpy = NumpyNamespace()
