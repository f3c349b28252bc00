"""The strict comparison of a run's outputs with the expected ones, which checks more than ONNX's own test runner.

`strict` requires as many outputs as expected; sequences of equal length and kind; maps with equal keys; None if None is expected;
equal dtypes and shapes; equal integers, bools, strings and floats of 8 and fewer bits; other floats within the
case's tolerance, bfloat16 within two of its steps.  With `same_bits` the callers also require unchanged inputs, and a second run
that is equal to the first bit for bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .. import dtypes
from . import tolerances

_BITS: dict[int, Any] = {2: np.int16, 4: np.int32, 8: np.int64}
_EXACT_FLOATS = dtypes.FLOAT8 | dtypes.FLOAT6 | dtypes.FLOAT4


def strict(actual: Any, expected: Any, rtol: float, atol: float, where: str = "outputs") -> str:
    """Compare values strictly; return the first place where they differ, and how; "" if they agree."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)):
            return f"{where}: a {type(actual).__name__}, expected a sequence"
        if len(actual) != len(expected):
            return f"{where}: length {len(actual)}, expected {len(expected)}"
        pairs = enumerate(zip(actual, expected, strict=True))
        return next((why for i, (a, e) in pairs if (why := strict(a, e, rtol, atol, f"{where}[{i}]"))), "")
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or actual.keys() != expected.keys():
            return f"{where}: {brief(actual)}, expected {brief(expected)}"
        entries = ((k, element(actual[k]), element(e)) for k, e in expected.items())
        return next((why for k, a, e in entries if (why := strict(a, e, rtol, atol, f"{where}[{k!r}]"))), "")
    if expected is None or actual is None:
        return "" if expected is actual else f"{where}: {brief(actual)}, expected {brief(expected)}"
    if not isinstance(actual, np.ndarray):
        return f"{where}: a {type(actual).__name__}, expected an array"
    expected = np.asarray(expected)
    if expected.dtype.kind in "US":
        expected = expected.astype(object)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{where}: {brief(actual)}, expected {brief(expected)}"
    return _values(actual, expected, rtol, atol, where)


def _values(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float, where: str) -> str:
    dtype = expected.dtype
    floating = dtype.kind in "fc" or dtype == ml_dtypes.bfloat16
    if floating and dtype not in _EXACT_FLOATS:
        if dtype == ml_dtypes.bfloat16:
            rtol = max(rtol, tolerances.CASES.bound(dtype).rtol)
        wide = np.complex128 if dtype.kind == "c" else np.float64
        with np.errstate(all="ignore"):
            close = np.isclose(actual.astype(wide), expected.astype(wide), rtol=rtol, atol=atol, equal_nan=True)
    elif dtype.kind == "O":
        close = np.asarray(actual == expected)
    else:
        a, e = _codes(actual), _codes(expected)
        close = np.asarray(a == e)
        if dtype in _EXACT_FLOATS:  # all codes of NaN are equal
            close |= np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    if close.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~close)[0]) if close.ndim else ()
    count = int((~close).sum())
    return f"{where}{list(at) if at else ''}: {actual[at]!s}, expected {expected[at]!s} ({count} of {close.size} differ)"


def _codes(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, order="C").view(np.uint8) if x.dtype in _EXACT_FLOATS else x


def element(value: Any) -> np.ndarray:
    """A value of a map as an array; a Python float becomes float32."""
    x = np.asarray(value, np.float32 if type(value) is float else None)
    return x.astype(object) if x.dtype.kind == "U" else x


def brief(value: Any) -> str:
    """A short description of a value: its dtype and shape, or the keys of a map."""
    if isinstance(value, dict):
        keys = [repr(k) for k in value]
        return f"a map of {', '.join(keys[:8])}{', ...' if len(keys) > 8 else ''}"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


def ulps(actual: Any, expected: Any) -> float | None:
    """The maximum difference of float values in units in the last place; None if no values are floats."""
    if isinstance(expected, (list, tuple)):
        found = [u for a, e in zip(actual, expected, strict=False) if (u := ulps(a, e)) is not None]
        return max(found, default=None)
    if not isinstance(expected, (np.ndarray, np.generic)) or not isinstance(actual, np.ndarray):
        return None
    expected = np.asarray(expected)
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return None
    if not _counted(actual.dtype):
        return None
    return steps(actual, expected, np.asarray(np.isfinite(actual) & np.isfinite(expected)))


def steps(x: np.ndarray, y: np.ndarray, where: np.ndarray) -> float | None:
    """The largest number of steps between the elements of two arrays of one dtype, of those that `where` selects.

    The number is exact up to 2**53, and rounded to a float beyond.  None for values that are not floats of 16, 32 or 64 bits.
    """
    if not _counted(x.dtype):
        return None
    return float(np.where(where, apart(_ordered(x), _ordered(y)), np.uint64(0)).max(initial=0))


def apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The absolute differences of two arrays of integers of one dtype, exactly, as uint64."""
    a, b = (v if v.dtype == np.uint64 else v.astype(np.int64) for v in (x, y))
    return np.asarray(np.where(a > b, a - b, b - a)).astype(np.uint64)  # int64 wraps beyond 2**63: its bits are those of uint64


def _counted(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize in _BITS and (dtype.kind == "f" or dtype == ml_dtypes.bfloat16)


def _ordered(x: np.ndarray) -> np.ndarray:
    """Map floats to integers that count the representable values from zero."""
    kind = _BITS[x.dtype.itemsize]
    bits = np.asarray(x, x.dtype.newbyteorder("="), order="C").view(kind).astype(np.int64)
    negative = bits >> 63  # -1 or 0
    return np.asarray((bits ^ (negative & np.iinfo(kind).max)) - negative)


def same_bits(first: Any, second: Any) -> bool:
    """Whether two results are equal bit for bit."""
    if isinstance(first, (list, tuple)):
        return isinstance(second, (list, tuple)) and len(first) == len(second) and all(map(same_bits, first, second))
    if isinstance(first, dict):
        return isinstance(second, dict) and list(first) == list(second) and same_bits([*first.values()], [*second.values()])
    if isinstance(first, (np.ndarray, np.generic)):
        a, b = np.asarray(first), np.asarray(second)
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool((a == b).all()) if a.dtype.kind in "OUS" else a.tobytes() == b.tobytes()
    return bool(first == second or (first != first and second != second))
