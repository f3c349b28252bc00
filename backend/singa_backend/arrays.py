"""The `xp` that operators are written on: NumPy, CuPy, or NumPy that offers only what CuPy offers.

An operator body may use every name that NumPy and CuPy share, and the extras below, in which their differences are met:

    xp.from_host(a)  xp.to_host(x)             the only ways between the device and the host
    xp.cast(x, dtype)                          astype with one answer for floats that no integer can hold
    xp.indices(i, size)                        integer indices, negative ones wrapped, checked against the size
    xp.scatter(out, index, values, reduction)  in place on `out`: "none", "add", "mul", "max", "min"
    xp.windows(x, shape, axis)                 a sliding-window view
    xp.as_strided(x, shape, strides)           the view behind every pooling
    xp.erf(x)  xp.erfc(x)                      the error function, and what it lacks to 1
    xp.isarray(x)                              is it an array of this namespace?

The functions that make much of little (zeros, tile, take, ...) ask the limits of the call first: see limits.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

import numpy as np

from . import limits
from .dtypes import HOST_ONLY
from .errors import OperatorError

Array = Any  # an array of the namespace at hand
Xp = Any  # a namespace of this module

_REDUCTIONS = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


class Namespace(ABC):
    """What is common to the namespaces; names that are not here are the array module's own."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self.__dict__.update((n, limits.guarded(n, v)) for n, v in names.items() if not hasattr(type(self), n))
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
        if not i.size:
            return i
        least = self.to_host(i.min())
        if least < low or self.to_host(i.max()) >= size:
            at = self.to_host(i)
            wrong = at[(at < low) | (at >= size)].flat[0]
            raise OperatorError(f"index {wrong} is outside [{low}, {size})", code="SX401")
        return self.where(i < 0, i + size, i) if least < 0 else i  # type: ignore[attr-defined]

    def erf(self, x: Array) -> Array:
        """The error function, to about 1 unit in the last place of float32 or float64."""
        return _erf(self, x)

    def erfc(self, x: Array) -> Array:
        """1 - erf(x), small results to about 2 * x * x units in the last place."""
        return _erfc(self, x)

    def windows(self, x: Array, shape: Any, axis: Any) -> Array:
        """A read-only view of every window of `shape` along `axis`; the window's axes come last."""
        return self.lib.stride_tricks.sliding_window_view(x, shape, axis)  # type: ignore[attr-defined]

    def as_strided(self, x: Array, shape: Any, strides: Any) -> Array:
        """A view of `x` with this shape and these strides in bytes."""
        return self.lib.stride_tricks.as_strided(x, shape, strides)  # type: ignore[attr-defined]

    @abstractmethod
    def from_host(self, a: np.ndarray) -> Array: ...

    @abstractmethod
    def to_host(self, x: Array) -> np.ndarray: ...

    @abstractmethod
    def isarray(self, x: Any) -> bool: ...

    @abstractmethod
    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None: ...


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

    def cast(self, x: Array, dtype: Any) -> Array:
        """As above; where all values fit, `astype` alone."""
        dtype = np.dtype(dtype)
        if dtype.kind in "iu" and x.dtype.kind == "f" and x.size:
            info = np.iinfo(dtype)
            if info.min <= float(x.min()) and float(x.max()) <= info.max:  # false of NaN
                return x.astype(dtype)
        return super().cast(x, dtype)

    def erf(self, x: Array) -> Array:
        return _in_pieces(super().erf, x)

    def erfc(self, x: Array) -> Array:
        return _in_pieces(super().erfc, x)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        if reduction == "none":
            out[index] = values
        else:
            getattr(np, _REDUCTIONS[reduction]).at(out, index, values)


class CupyNamespace(Namespace):
    """CuPy, with NumPy's meaning where the two differ.

    Only additions of 4 and 8 bytes are scattered on the device.  Everything else goes through the host: CuPy has no multiply,
    its float64 maximum passes through float32, and where a place is written twice the winner is undefined.
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

    def clip(self, x: Array, low: Any, high: Any) -> Array:
        """`high` where low > high, and NaN where a bound is; CuPy's own clip gives `low`, and `x`."""
        return self.module.minimum(self.module.maximum(x, low), high)

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
    """What CuPy 14.2, its arrays and the modules that operators use name."""
    return {part: frozenset(names) for part, names in _cupy().items() if part != "parameters"}


@cache
def _cupy_parameters(part: str) -> dict[str, list[str]]:
    """The parameters of those of these functions or methods that say which they have."""
    parameters: dict[str, list[str]] = _cupy()["parameters"][part]
    return parameters


@cache
def _cupy() -> Any:
    return json.loads(resources.files(__package__).joinpath("cupy_names.json").read_text())


class StrictArray:
    """An array that behaves as CuPy's do: no implicit way to the host, reductions of rank 0, CuPy's methods only."""

    __slots__ = ("_a",)
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, a: Any) -> None:
        self._a = np.asarray(a)
        if self._a.dtype in HOST_ONLY:
            raise TypeError(f"cupy has no arrays of {self._a.dtype}: such values stay on the host")

    def __getattr__(self, name: str) -> Any:
        if name not in _cupy_names()["ndarray"]:
            raise AttributeError(f"cupy.ndarray has no attribute {name!r}")
        if name in ("get", "item", "tolist", "tobytes", "__array__"):
            raise TypeError(f"ndarray.{name} copies to the host: write xp.to_host(x)")
        value = getattr(self._a, name)
        return _strict_call(value, name, _cupy_parameters("ndarray").get(name)) if callable(value) else _wrap(value)

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


def _strict_call(function: Callable[..., Any], name: str = "", parameters: list[str] | None = None) -> Callable[..., Any]:
    """`function` on strict arrays.  parameters: what CuPy's function of this name takes; None where it does not say."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if parameters is not None and not kwargs.keys() <= set(parameters):
            raise TypeError(f"cupy's {name} takes {', '.join(parameters)}; not {', '.join(kwargs.keys() - set(parameters))}")
        return _wrap(function(*_unwrap(args), **_unwrap(kwargs)))

    return call


class _StrictUfunc:
    """A ufunc: callable, with the methods that CuPy's ufuncs have."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _strict_call(self._ufunc, self._ufunc.__name__, ["out", "casting", "dtype"])(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # CuPy's ufuncs have reduce, accumulate and reduceat too, but most of them only raise; nobody needs them.
        if name not in ("outer", "nin", "nout") and (name, self._ufunc.__name__) != ("at", "add"):
            raise AttributeError(f"cupy's ufunc {self._ufunc.__name__} has no {name!r}")
        value = getattr(self._ufunc, name)
        return _strict_call(value) if callable(value) else value


class _StrictModule:
    def __init__(self, module: ModuleType, allowed: frozenset[str], label: str, parameters: dict[str, list[str]]) -> None:
        self._module, self._allowed, self._label, self._parameters = module, allowed, label, parameters

    def __getattr__(self, name: str) -> Any:
        if name not in self._allowed:
            raise AttributeError(f"module {self._label!r} has no attribute {name!r}")
        return _strict(getattr(self._module, name), name, self._parameters)


def _strict(value: Any, name: str, parameters: dict[str, list[str]]) -> Any:
    if isinstance(value, np.ufunc):
        return _StrictUfunc(value)
    if isinstance(value, type) or not callable(value):
        return value
    return _strict_call(value, name, parameters.get(name))


# These describe dtypes and shapes; they touch no data and take whatever they get.
_PLAIN = frozenset({"dtype", "finfo", "iinfo", "result_type", "promote_types", "can_cast", "issubdtype", "broadcast_shapes"})


def _where(condition: np.ndarray, x: Any, y: Any) -> Any:
    """CuPy's has no loop for bfloat16: it answers in float32."""
    z = np.where(condition, x, y)
    return z.astype(np.float32) if z.dtype.name == "bfloat16" else z


class StrictNamespace(Namespace):
    """NumPy behind CuPy's face."""

    def __init__(self) -> None:
        known = _cupy_names()
        shared = [n for n in known["cupy"] if hasattr(np, n)]
        own = _cupy_parameters("cupy")
        names = {n: getattr(np, n) if n in _PLAIN else _strict(getattr(np, n), n, own) for n in shared}
        for part in ("linalg", "fft"):
            names[part] = _StrictModule(getattr(np, part), known[part], f"cupy.{part}", _cupy_parameters(part))
        tricks = frozenset({"as_strided", "sliding_window_view"})
        lib = ModuleType("cupy.lib")
        lib.stride_tricks = _StrictModule(np.lib.stride_tricks, tricks, "cupy.lib.stride_tricks", {})  # type: ignore[attr-defined]
        names["lib"] = lib
        names["ndarray"] = StrictArray
        names["where"] = _strict_call(_where)
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


# erf(x) = 1 - exp(-x * p(x)) for 0 <= x, and erfc(x) = exp(-x * x) * q(t) / (x + 3) with t = (x - 3) / (x + 3).  The polynomials,
# lowest power first, are least in the greatest relative error they leave: 4e-9 and 3e-9 (float32), 7e-17 and 7e-18 (float64).
# erf is 1, or erfc 0, from the bound on that stands before each.
_ERF = {
    np.float32: (4.0, (
        1.128379172, 0.636619382, 0.1027778308, -0.01915306625, -0.0001603897153, 0.001667018699, -0.0006328303106,
        0.0001176388181, -9.255911292e-06,
    )),
    np.float64: (6.0, (
        1.1283791670955126, 0.6366197723676116, 0.10277260330005952, -0.01912844696305003, -0.00020919523046740508,
        0.0016962105310236327, -0.0005901468176880316, 2.5955221433075416e-05, 6.428997609609923e-05,
        -2.9323472408179907e-05, 2.7957649298677515e-06, 3.564798970816897e-06, -2.4298982167350693e-06,
        8.537837506145426e-07, -1.741296039119686e-07, 8.385611741624913e-09, 7.778072282436206e-09,
        -3.152099362421681e-09, 6.809139387127237e-10, -9.54588589920976e-11, 8.718957192471213e-12,
        -4.753703059609676e-13, 1.179706162506552e-14,
    )),
}  # fmt: skip
_ERFC = {
    np.float32: (11.0, (
        1.074006908, -0.8833944972, 0.5902282405, -0.3104657096, 0.1195299774, -0.02684159855, -0.0012314781,
        0.003081950199, -0.0004740216106, -0.0003205091483,
    )),
    np.float64: (28.0, (
        1.0740069070883398, -0.8833944531698835, 0.5902283571040994, -0.3104672619005751, 0.11952776128744148,
        -0.026827234624271855, -0.001212416630723521, 0.003034061998500589, -0.0005483096502871543,
        -0.00027677782494498187, 0.00010756120439412006, 3.0398045662354787e-05, -1.7469383334947886e-05,
        -4.748754796237903e-06, 2.762250596117233e-06, 9.975493446243912e-07, -4.0270097821261456e-07,
        -2.3089715578726004e-07, 4.0727959781593355e-08, 4.7298456095462126e-08, 1.8550521865617685e-09,
        -5.952391901882899e-09, -1.3846146371334817e-09,
    )),
}  # fmt: skip


def _erf(xp: Any, x: Array) -> Array:
    z, kind = _float(x)
    last, p = _ERF[kind]
    a = xp.minimum(xp.abs(z), last)
    return _like(x, xp.copysign(xp.expm1(-a * _polynomial(a, p)), z))


def _erfc(xp: Any, x: Array) -> Array:
    z, kind = _float(x)
    last, q = _ERFC[kind]
    a = xp.minimum(xp.abs(z), last)
    r = 1 / (a + 3)
    y = _polynomial((a - 3) * r, q) * r * xp.exp(-a * a)
    return _like(x, xp.abs(2 * (z < 0).astype(kind) - y))  # of a negative number it is 2 - y


def _float(x: Array) -> tuple[Array, Any]:
    kind = np.float32 if x.dtype == np.float32 or x.dtype == np.float16 else np.float64
    return x.astype(kind, copy=False), kind


def _like(x: Array, y: Array) -> Array:
    return y.astype(x.dtype, copy=False) if x.dtype.kind == "f" else y


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    y = x * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        y += c
        y *= x
    y += coefficients[0]
    return y


def _in_pieces(function: Callable[[Array], Array], x: np.ndarray, size: int = 1 << 13) -> Array:
    """`function`, elementwise with many temporaries, of pieces that stay in the processor's cache."""
    if x.size <= size:
        return function(x)
    flat = x.reshape(-1)
    pieces = [function(flat[i : i + size]) for i in range(0, flat.size, size)]
    return np.concatenate(pieces).reshape(x.shape)


numpy = NumpyNamespace()
