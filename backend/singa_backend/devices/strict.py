"""NumPy restricted to CuPy's functions: finds, without a GPU, what would fail on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

import numpy as np

from ..dtypes import HOST_ONLY, DTypeLike
from .namespaces import Array, Namespace, numpy


@cache
def _cupy_names() -> dict[str, frozenset[str]]:
    """The names in CuPy 14.2, its arrays and the modules that operators use."""
    return {part: frozenset(names) for part, names in _cupy().items() if part != "parameters"}


@cache
def _cupy_parameters(part: str) -> dict[str, list[str]]:
    """The parameters of the functions or methods whose signature is known."""
    parameters: dict[str, list[str]] = _cupy()["parameters"][part]
    return parameters


@cache
def _cupy() -> Any:
    return json.loads(resources.files(__package__).joinpath("cupy_names.json").read_text())


class StrictArray:
    """An array that behaves as CuPy's: no implicit copy to the host, reductions return arrays of rank 0, CuPy's methods only."""

    __slots__ = ("_a",)
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]  # arrays compare element by element

    def __init__(self, a: Any) -> None:
        self._a = np.asarray(a)
        if self._a.dtype in HOST_ONLY:
            raise TypeError(f"cupy has no arrays of {self._a.dtype}; keep such values on the host")

    def __getattr__(self, name: str) -> Any:
        if name not in _cupy_names()["ndarray"]:
            raise AttributeError(f"cupy.ndarray has no attribute {name!r}")
        if name in ("get", "item", "tolist", "tobytes", "__array__"):
            raise TypeError(f"ndarray.{name} copies to the host; use xp.to_host(x)")
        value = getattr(self._a, name)
        return _strict_call(value, name, _cupy_parameters("ndarray").get(name)) if callable(value) else _wrap(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._a[_unwrap(key)] = _unwrap(value)

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Iterator[StrictArray]:
        return (StrictArray(a) for a in self._a)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion of a device array to the host; use xp.to_host(x)")

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
        raise TypeError("all arrays must be on the device, got a host array; use xp.from_host(a)")
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
    """`function` on strict arrays.  parameters: those of CuPy's function of this name; None if they are not known."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if parameters is not None and not kwargs.keys() <= set(parameters):
            unknown = ", ".join(kwargs.keys() - set(parameters))
            raise TypeError(f"the parameters of cupy's {name} must be {', '.join(parameters)}, got {unknown}")
        return _wrap(function(*_unwrap(args), **_unwrap(kwargs)))

    return call


class _StrictUfunc:
    """A ufunc: callable, with the methods that CuPy's ufuncs have."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _strict_call(self._ufunc, self._ufunc.__name__, ["out", "casting", "dtype"])(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # CuPy's ufuncs also have reduce, accumulate and reduceat, but most of them only raise; no operator uses them.
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


# Functions of dtypes and shapes, which access no data and accept any argument.
_PLAIN = frozenset({"dtype", "finfo", "iinfo", "result_type", "promote_types", "can_cast", "issubdtype", "broadcast_shapes"})


def _where(condition: np.ndarray, x: Any, y: Any) -> Any:
    """CuPy's `where` has no bfloat16 loop and returns float32."""
    z = np.where(condition, x, y)
    return z.astype(np.float32) if z.dtype.name == "bfloat16" else z


class StrictNamespace(Namespace):
    """NumPy with CuPy's names, parameters and restrictions."""

    def __init__(self) -> None:
        known = _cupy_names()
        shared = [n for n in known["cupy"] if hasattr(np, n)]
        own = _cupy_parameters("cupy")
        names = {n: getattr(np, n) if n in _PLAIN else _strict(getattr(np, n), n, own) for n in shared}
        for part in ("linalg", "fft"):
            names[part] = _StrictModule(getattr(np, part), known[part], f"cupy.{part}", _cupy_parameters(part))
        tricks = frozenset({"as_strided", "sliding_window_view"})
        lib: Any = ModuleType("cupy.lib")
        lib.stride_tricks = _StrictModule(np.lib.stride_tricks, tricks, "cupy.lib.stride_tricks", {})
        names["lib"] = lib
        names["ndarray"] = StrictArray
        names["where"] = _strict_call(_where)
        names["result_type"] = lambda *a: np.result_type(*(_unwrap(v) for v in a))
        super().__init__(np, names)

    def from_host(self, a: np.ndarray) -> Array:
        return StrictArray(a)

    def asarray(self, a: Any, dtype: DTypeLike | None = None) -> Array:
        """As cupy.asarray, accepts host data."""
        return StrictArray(np.asarray(a._a if isinstance(a, StrictArray) else _unwrap_list(a), dtype))

    def array(self, a: Any, dtype: DTypeLike | None = None) -> Array:
        """As cupy.array, accepts host data."""
        return StrictArray(np.array(a._a if isinstance(a, StrictArray) else _unwrap_list(a), dtype))

    def to_host(self, x: Array) -> np.ndarray:
        if not isinstance(x, StrictArray):
            raise TypeError(f"to_host requires an array on the device, got a {type(x).__name__}")
        return x._a.copy()

    def isarray(self, x: Any) -> bool:
        return isinstance(x, StrictArray)

    def sums_are_large(self, x: Array, w: Array, count: int) -> bool:
        return numpy.sums_are_large(_unwrap(x), _unwrap(w), count)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        numpy.scatter(out._a, _unwrap(index), _unwrap(values), reduction)


def _unwrap_list(a: Any) -> Any:
    return type(a)(_unwrap_list(v) for v in a) if isinstance(a, (list, tuple)) else a._a if isinstance(a, StrictArray) else a
