"""NumPy restricted to CuPy's functions: finds, without a GPU, what would fail on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from ..dtypes import HOST_ONLY, DTypeLike
from .namespaces import Array, Namespace, numpy


@cache
def _cupy_names() -> dict[str, frozenset[str]]:
    """The names in CuPy 14.2, its arrays and the modules that operators use."""
    return {part: frozenset(_cupy()[part]) for part in ("cupy", "ndarray", "linalg", "fft")}


@cache
def _cupy_parameters(part: str) -> dict[str, list[str]]:
    """The parameters of the functions or methods whose signature is known."""
    parameters: dict[str, list[str]] = _cupy()["parameters"][part]
    return parameters


@cache
def _cupy() -> Any:
    """What tests/helpers/cupy_names.py found in CuPy."""
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
        if name in ("get", "item", "tolist", "tobytes", "tofile", "dump", "dumps", "__array__"):
            raise TypeError(f"ndarray.{name} copies to the host; use xp.to_host(x)")
        if name in ("data", "device", "flat"):
            raise AttributeError(f"ndarray.{name} differs between numpy and cupy")
        value = getattr(self._a, name)
        return _strict_call(value, name, _cupy_parameters("ndarray").get(name)) if callable(value) else _wrap(value)

    def __getitem__(self, key: Any) -> StrictArray:
        """A view, also of one element, unless the key has arrays or lists."""
        key = _unwrap(key)
        value = self._a[key]
        if isinstance(value, np.generic):
            value = self._a[(*key, ...) if isinstance(key, tuple) else (key, ...)]
        return StrictArray(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            raise ValueError("cupy assigns arrays and single numbers only, got a sequence")
        self._a[_unwrap(key)] = _unwrap(value)

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Iterator[StrictArray]:
        if not self._a.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self._a)))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion of a device array to the host; use xp.to_host(x)")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __array__ = _refuse

    def __repr__(self) -> str:
        return f"StrictArray({self._a!r})"


def _operator(name: str, function: str, place: str = "") -> Callable[..., Any]:
    """The operator `name` by a ufunc.  place: "r" if the array is on the right, "i" if it also holds the result."""

    def method(self: StrictArray, *others: Any) -> Any:
        if any(not isinstance(o, (StrictArray, np.generic, bool, int, float, complex)) for o in others):
            _unwrap(others)  # raises TypeError for a host array
            return NotImplemented
        args = (*others, self) if place == "r" else (self, *others)
        return _ufuncs()[function](*args, **({"out": self} if place == "i" else {}))

    method.__name__ = name
    return method


_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide", "mod": "remainder",
    "divmod": "divmod", "pow": "power", "lshift": "left_shift", "rshift": "right_shift", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "matmul": "matmul",
}  # fmt: skip
_OTHERS = {
    "neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert",
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip
for _name, _function in _BINARY.items():
    for _place in ("", "r", "i"):
        if (_name, _place) not in {("divmod", "i"), ("matmul", "i")}:
            setattr(StrictArray, f"__{_place}{_name}__", _operator(f"__{_place}{_name}__", _function, _place))
for _name, _function in _OTHERS.items():
    setattr(StrictArray, f"__{_name}__", _operator(f"__{_name}__", _function))


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


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# What CuPy's functions do with bfloat16 where NumPy differs: the dtype of the result, or None if they have no kernel for it.
_OF_BFLOAT16: dict[str, Any] = {
    **dict.fromkeys(("clip", "round", "around", "tril", "triu"), np.float32),
    **dict.fromkeys(("var", "std"), np.float64),
    **dict.fromkeys(("dot", "tensordot", "inner"), _BFLOAT16),
    **dict.fromkeys(("cumsum", "cumprod", "einsum", "fft", "ifft", "rfft", "fft2", "ifft2", "rfft2", "fftn", "ifftn", "rfftn")),
}
# The kinds of dtypes for which CuPy's functions have no kernel.
_REFUSED_KINDS = {"clip": "c", "histogram": "cV", "interp": "b"}
# Parameters for which CuPy takes no device array.  (It copies `repeats` to the host, without telling.)
_ON_HOST = frozenset(
    {"shape", "newshape", "new_shape", "dimensions", "reps", "repeats", "axis", "axes", "axis1", "axis2", "source", "destination"}
    | {"k", "n", "N", "M", "num", "start", "stop", "step", "shift", "pad_width", "decimals", "minlength"}
)
_FIRST_IS_ARRAY = frozenset(
    {"a", "x", "m", "v", "arr", "ary", "array", "ar", "a1", "ar1", "arr1", "condition", "dst", "prototype"}
)
# Functions whose first argument may be any value.
_ANY_FIRST = frozenset(
    {"array_repr", "array_str", "iscomplexobj", "isrealobj", "isreal", "iscomplex", "isneginf", "isposinf", "ndim", "shape"}
    | {"require"}
)


def _strict_call(function: Callable[..., Any], name: str = "", parameters: list[str] | None = None) -> Callable[..., Any]:
    """`function` on strict arrays.  parameters: those of CuPy's function of this name; None if they are not known."""
    array_first = (
        not _FIRST_IS_ARRAY.isdisjoint((parameters or [])[:1]) and name not in _ANY_FIRST and not hasattr(function, "__self__")
    )
    positions = ["shape"] * 8 if name in ("reshape", "transpose") and hasattr(function, "__self__") else parameters or []
    own = name in _OF_BFLOAT16
    refused = _REFUSED_KINDS.get(name, "")

    def call(*args: Any, **kwargs: Any) -> Any:
        if parameters is not None and not kwargs.keys() <= set(parameters):
            unknown = ", ".join(kwargs.keys() - set(parameters))
            raise TypeError(f"the parameters of cupy's {name} must be {', '.join(parameters)}, got {unknown}")
        for parameter, value in (*zip(positions, args, strict=False), *kwargs.items()):
            if parameter in _ON_HOST and _has_arrays(value):
                raise TypeError(f"{parameter} of cupy's {name} must be on the host, got a device array")
        hosts, named = _unwrap(args), _unwrap(kwargs)
        if array_first and args and not isinstance(args[0], StrictArray):
            raise TypeError(f"cupy's {name} must be called with a device array, got a {type(args[0]).__name__}")
        if not own and not refused:
            return _wrap(function(*hosts, **named))
        dtypes = {v.dtype for v in (getattr(function, "__self__", None), *hosts) if isinstance(v, np.ndarray)}
        for dtype in dtypes:
            if dtype.kind in refused or (dtype == _BFLOAT16 and own and _OF_BFLOAT16[name] is None):
                raise TypeError(f"cupy's {name} has no kernel for {dtype}")
        result = function(*hosts, **named)
        if own and _BFLOAT16 in dtypes and named.get("dtype") is None and result.dtype in (_BFLOAT16, np.float32):
            dtype = _OF_BFLOAT16[name]
            result = result.astype(np.result_type(dtype, *dtypes) if dtype == _BFLOAT16 else dtype)
        return _wrap(result)

    return call


def _has_arrays(value: Any) -> bool:
    return isinstance(value, StrictArray) or (isinstance(value, (tuple, list)) and any(map(_has_arrays, value)))


def _matmul(*args: Any, **kwargs: Any) -> Any:
    """CuPy multiplies matrices of bfloat16, but not stacks of them."""
    if len(args) < 2 or not all(isinstance(a, StrictArray) for a in args[:2]):
        raise TypeError("cupy's matmul must be called with two device arrays")
    a, b = (x._a for x in args[:2])
    if _BFLOAT16 not in (a.dtype, b.dtype):
        return _strict_call(np.matmul, "matmul", ["x1", "x2", "out", "axes", "axis", "keepdims", "casting", "dtype", "order"])(
            *args, **kwargs
        )
    if max(a.ndim, b.ndim) > 2:
        raise TypeError("cupy's matmul has no kernel for stacks of bfloat16 matrices")
    return StrictArray(np.matmul(a, b, **_unwrap(kwargs)).astype(np.result_type(a, b)))


def _floor_divide(x: Any, y: Any) -> Any:
    """CuPy rounds the quotient of floats down; NumPy's is exact."""
    return np.floor_divide(x, y) if np.result_type(x, y).kind in "iu" else np.floor(np.true_divide(x, y))


def _fmod(x: Any, y: Any) -> Any:
    """CuPy computes integers in float64."""
    dtype = np.result_type(x, y)
    if dtype.kind not in "iu":
        return np.fmod(x, y)
    with np.errstate(invalid="ignore"):
        return np.fmod(np.asarray(x, np.float64), np.asarray(y, np.float64)).astype(dtype)


_OWN_UFUNCS = {"floor_divide": _floor_divide, "fmod": _fmod}
_SCALARS = (bool, int, float, complex)
_RANK_OF_KIND = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 2, "V": 2}


def _dtype(char: str) -> np.dtype[Any]:
    """The dtype of a character in CuPy's loops, where E is bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if char == "E" else char)


@cache
def _loops(name: str) -> tuple[tuple[tuple[np.dtype[Any], ...], tuple[np.dtype[Any], ...]], ...]:
    """The loops of CuPy's ufunc: the dtypes of its inputs and of its outputs, in CuPy's order."""
    loops = [loop.split("->") for loop in _cupy()["loops"][name] if "V" not in loop]
    return tuple((tuple(map(_dtype, i)), tuple(map(_dtype, o))) for i, o in loops)


@cache
def _loop(name: str, inputs: tuple[Any, ...]) -> tuple[tuple[np.dtype[Any], ...], tuple[np.dtype[Any], ...]]:
    """The loop that CuPy takes: the first to which the inputs can be cast.  inputs: dtypes, and the types of Python numbers.

    A Python number has no dtype of its own, unless all arrays are of a lower kind.
    """
    weak = [_RANK_OF_KIND[np.dtype(t).kind] for t in inputs if isinstance(t, type)]
    strong = [_RANK_OF_KIND[t.kind] for t in inputs if not isinstance(t, type)]
    weaks = bool(weak and strong) and max(strong) >= max(weak)
    for loop in _loops(name):
        for given, needed in zip(inputs, loop[0], strict=True):
            if np.can_cast(np.dtype(given), needed):
                continue
            if not (weaks and isinstance(given, type) and _holds(given, needed)):
                break
        else:
            return loop
    raise TypeError(f"cupy's {name} has no loop for {', '.join(np.dtype(t).name for t in inputs)}")


def _holds(kind: Any, dtype: np.dtype[Any]) -> bool:
    try:
        return bool(np.result_type(kind(0), dtype) == dtype)
    except TypeError:
        return False


class _StrictUfunc:
    """A ufunc: callable, with the loops and the methods that CuPy's ufunc of this name has."""

    def __init__(self, ufunc: Callable[..., Any], name: str) -> None:
        self._name, self._function = name, _OWN_UFUNCS.get(name, ufunc)
        self.nin, self.nout = (len(types) for types in _loops(name)[0])
        self._tests = all(t == np.bool_ for loop in _loops(name) for t in loop[1])
        self._allowed = {"out", "casting", "dtype"}
        self._numpy = ufunc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= self._allowed:
            unknown = ", ".join(kwargs.keys() - self._allowed)
            raise TypeError(f"the parameters of cupy's {self._name} must be out, casting, dtype, got {unknown}")
        given, out = args[: self.nin], args[self.nin :] or kwargs.get("out")
        if len(given) < self.nin or len(args) > self.nin + self.nout:
            raise TypeError(f"cupy's {self._name} requires {self.nin} arguments, got {len(args)}")
        arrays = [_operand(a) for a in given]
        inputs = tuple(type(a) if type(a) in _SCALARS else a.dtype for a in arrays)
        if kwargs.get("dtype") is None:
            types, results = _loop(self._name, inputs)
        else:
            types, results = self._loop_of(np.dtype(kwargs["dtype"]), arrays)
        if not self._tests:
            # Of a Python number, NumPy refuses what the dtype cannot hold.
            arrays = [
                np.asarray(a, t) if type(a) in _SCALARS else a.astype(t, copy=False) for a, t in zip(arrays, types, strict=True)
            ]
        values = self._function(*arrays)
        values = values if isinstance(values, tuple) else (values,)
        values = tuple(np.asarray(v).astype(t, copy=False) for v, t in zip(values, results, strict=True))
        if out is not None:
            return _into(out, values, kwargs.get("casting", "same_kind"))
        return StrictArray(values[0]) if self.nout == 1 else tuple(StrictArray(v) for v in values)

    def _loop_of(self, dtype: np.dtype[Any], arrays: list[Any]) -> Any:
        for inputs, outputs in _loops(self._name):
            castable = all(
                type(a) in _SCALARS or np.can_cast(a.dtype, t, "same_kind") for a, t in zip(arrays, inputs, strict=True)
            )
            if castable and all(t == dtype for t in outputs):
                return inputs, outputs
        raise TypeError(f"cupy's {self._name} has no loop of these arguments for {dtype}")

    def __getattr__(self, name: str) -> Any:
        # CuPy's ufuncs also have reduce, accumulate and reduceat, but most of them only raise; no operator uses them.
        if name == "outer" and isinstance(self._numpy, np.ufunc):
            return _strict_call(self._numpy.outer)
        if (name, self._name) == ("at", "add"):
            return _strict_call(np.add.at)
        raise AttributeError(f"cupy's ufunc {self._name} has no {name!r}")


def _operand(value: Any) -> Any:
    """What a ufunc computes with: an array's elements, a NumPy number, or a Python number."""
    if isinstance(value, (StrictArray, np.ndarray)):
        return _unwrap(value)
    if isinstance(value, np.generic) or type(value) in _SCALARS:
        return value
    raise TypeError(f"a device function must be called with device arrays and numbers, got a {type(value).__name__}")


def _into(out: Any, values: tuple[np.ndarray, ...], casting: Any) -> Any:
    outs = out if isinstance(out, tuple) else (out,)
    if len(outs) != len(values) or not all(isinstance(o, StrictArray) for o in outs):
        raise TypeError(f"out must be {len(values)} device arrays")
    for o, value in zip(outs, values, strict=True):
        if value.shape != o._a.shape and np.broadcast_shapes(value.shape, o._a.shape) != o._a.shape:
            raise ValueError(f"out must have the shape {value.shape}, got {o._a.shape}")
        np.copyto(o._a, value, casting=casting)
    return outs[0] if len(outs) == 1 else outs


@cache
def _ufuncs() -> dict[str, Callable[..., Any]]:
    ufuncs: dict[str, Callable[..., Any]] = {n: _StrictUfunc(getattr(np, n), n) for n in _cupy()["loops"]}
    return {**ufuncs, "matmul": _matmul}


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if not isinstance(condition, StrictArray):
        raise TypeError(f"the condition of cupy's where must be a device array, got a {type(condition).__name__}")
    if x is None and y is None:
        return condition.nonzero()
    return _ufuncs()["where"](condition.astype(np.bool_), x, y)


def _diag(v: np.ndarray, k: int = 0) -> np.ndarray:
    """CuPy's diag copies; NumPy's is a view of a matrix."""
    return np.diag(v, k).copy()


def _select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    """CuPy casts the default to the choices' dtype."""
    result = np.select(_unwrap(condlist), _unwrap(choicelist), _unwrap(default))
    if result.dtype != np.result_type(*_unwrap(choicelist)):
        raise TypeError("cupy's select cannot cast its default to the dtype of the choices")
    return StrictArray(result)


class _StrictModule:
    def __init__(self, module: ModuleType, allowed: frozenset[str], label: str, parameters: dict[str, list[str]]) -> None:
        self._module, self._allowed, self._label, self._parameters = module, allowed, label, parameters

    def __getattr__(self, name: str) -> Any:
        if name not in self._allowed:
            raise AttributeError(f"module {self._label!r} has no attribute {name!r}")
        return _strict(getattr(self._module, name), name, self._parameters)


def _strict(value: Any, name: str, parameters: dict[str, list[str]]) -> Any:
    if isinstance(value, type) or not callable(value):
        return value
    return _strict_call(value, name, parameters.get(name))


# Functions of dtypes and shapes, which access no data and accept any argument.
_PLAIN = frozenset({"dtype", "finfo", "iinfo", "result_type", "promote_types", "can_cast", "issubdtype", "broadcast_shapes"})


def _garbage(function: Callable[..., StrictArray]) -> Callable[..., StrictArray]:
    """An array that nothing has written: each byte is 0xCD, and each bool is True."""

    def call(*args: Any, **kwargs: Any) -> StrictArray:
        y = function(*args, **kwargs)
        y._a[...] = True if y._a.dtype == np.bool_ else np.frombuffer(b"\xcd" * y._a.itemsize, y._a.dtype)[0]
        return y

    return call


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
        names.update(_ufuncs(), where=_where, select=_select, diag=_strict_call(_diag, "diag", own["diag"]))
        names.update({n: _garbage(names[n]) for n in ("empty", "empty_like")})
        names["result_type"] = lambda *a: np.result_type(*(_unwrap(v) for v in a))
        super().__init__(np, names)

    def from_host(self, a: np.ndarray) -> Array:
        return StrictArray(np.array(a))  # the host's array and the device's are two

    def asarray(self, a: Any, dtype: DTypeLike | None = None) -> Array:
        """As cupy.asarray, accepts host data."""
        if isinstance(a, StrictArray):
            return StrictArray(np.asarray(a._a, dtype))
        return self.array(a, dtype)

    def array(self, a: Any, dtype: DTypeLike | None = None) -> Array:
        """As cupy.array, accepts host data."""
        return StrictArray(np.array(a._a if isinstance(a, StrictArray) else _unwrap_list(a), dtype))

    def to_host(self, x: Array) -> np.ndarray:
        if not isinstance(x, StrictArray):
            raise TypeError(f"to_host requires an array on the device, got a {type(x).__name__}")
        return x._a.copy()

    def isarray(self, x: Any) -> bool:
        return isinstance(x, StrictArray)

    def clip(self, x: Array, low: Any, high: Any) -> Array:
        """As on CuPy; None: no bound."""
        ufuncs = _ufuncs()
        x = x if low is None else ufuncs["maximum"](x, low)
        return x if high is None else ufuncs["minimum"](x, high)

    def sums_are_large(self, x: Array, w: Array, count: int) -> bool:
        return numpy.sums_are_large(_unwrap(x), _unwrap(w), count)

    def scatter(self, out: Array, index: tuple[Array, ...], values: Array, reduction: str = "none") -> None:
        numpy.scatter(out._a, _unwrap(index), _unwrap(values), reduction)


def _unwrap_list(a: Any) -> Any:
    return type(a)(_unwrap_list(v) for v in a) if isinstance(a, (list, tuple)) else a._a if isinstance(a, StrictArray) else a
