"""CuPy kernels of `composed`: one for each pass over the data, instead of one for each operation.

They take arrays of one dtype, float32 or float64; `fits` tells which.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

Array = Any  # of CuPy
Axes = tuple[int, ...]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def fits(*arrays: Array) -> bool:
    """Whether the kernels take these arrays."""
    dtype = arrays[0].dtype
    return dtype in _FLOATS and all(a.dtype == dtype for a in arrays)


def softmax(cp: Any, x: Array, axis: int) -> Array:
    """As `composed.softmax`, in three passes."""
    high = x.max(axis=axis, keepdims=True)
    return _softmax(cp)(x, high, _exponentials(cp)(x, high, axis=axis, keepdims=True))


def log_softmax(cp: Any, x: Array, axis: int) -> Array:
    """As `composed.log_softmax`, in three passes."""
    high = x.max(axis=axis, keepdims=True)
    return _log_softmax(cp)(x, high, _exponentials(cp)(x, high, axis=axis, keepdims=True))


def standardized(cp: Any, x: Array, middle: Array, var: Array, epsilon: float, scale: Array, b: Array) -> Array:
    """As `composed.standardized`, in one pass."""
    return _standardized(cp)(x, middle, var, epsilon, scale, b)


def batch_normalized(cp: Any, x: Array, axes: Axes, epsilon: float, scale: Array, b: Array) -> tuple[Array, Array, Array]:
    """As `composed.batch_normalized`, in three passes."""
    middle = x.mean(axis=axes, keepdims=True)
    var = _squares(cp)(x, middle, axis=axes, keepdims=True)
    var /= math.prod(x.shape[a] for a in axes)
    return standardized(cp, x, middle, var, epsilon, scale, b), middle, var


def blended(cp: Any, old: Array, new: Array, momentum: float) -> Array:
    """As `composed.blended`, in one kernel."""
    return _blended(cp)(old, new, momentum, 1 - momentum)


def layer_normalized(cp: Any, x: Array, axes: Axes, epsilon: float, scale: Array, b: Array | None) -> tuple[Array, Array, Array]:
    """As `composed.layer_normalized` for the dtype of x, in three passes and a kernel of the inverse."""
    middle = x.mean(axis=axes, keepdims=True)
    squares = _squares(cp)(x, middle, axis=axes, keepdims=True)
    inverse = _inverse(cp)(squares, math.prod(x.shape[a] for a in axes), epsilon)
    y = _scaled(cp)(x, middle, inverse, scale) if b is None else _shifted(cp)(x, middle, inverse, scale, b)
    return y, middle, inverse


def clip(cp: Any, x: Array, low: Array, high: Array) -> Array:
    """The minimum of `high` and the maximum of `low` and x; NaN if one of the three is NaN."""
    return _clip(cp)(x, low, high)


def erf(cp: Any, x: Array) -> Array:
    """The error function of CUDA."""
    return _erf(cp)(x)


def erfc(cp: Any, x: Array) -> Array:
    """1 - erf(x), of CUDA."""
    return _erfc(cp)(x)


@cache
def _exponentials(cp: Any) -> Any:
    return cp.ReductionKernel("T x, T high", "T y", "exp(x - high)", "a + b", "y = a", "0", "sonnx_exponentials")


@cache
def _squares(cp: Any) -> Any:
    return cp.ReductionKernel("T x, T middle", "T y", "(x - middle) * (x - middle)", "a + b", "y = a", "0", "sonnx_squares")


@cache
def _softmax(cp: Any) -> Any:
    return cp.ElementwiseKernel("T x, T high, T sum", "T y", "y = exp(x - high) / sum", "sonnx_softmax")


@cache
def _log_softmax(cp: Any) -> Any:
    return cp.ElementwiseKernel("T x, T high, T sum", "T y", "y = x - high - log(sum)", "sonnx_log_softmax")


@cache
def _standardized(cp: Any) -> Any:
    takes = "T x, T middle, T var, T epsilon, T scale, T b"
    return cp.ElementwiseKernel(takes, "T y", "y = (x - middle) * (scale / sqrt(var + epsilon)) + b", "sonnx_standardized")


@cache
def _blended(cp: Any) -> Any:
    return cp.ElementwiseKernel("T old, T now, T kept, T taken", "T y", "y = old * kept + now * taken", "sonnx_blended")


@cache
def _inverse(cp: Any) -> Any:
    return cp.ElementwiseKernel("T sum, T count, T epsilon", "T y", "y = T(1) / sqrt(sum / count + epsilon)", "sonnx_inverse")


@cache
def _scaled(cp: Any) -> Any:
    return cp.ElementwiseKernel("T x, T middle, T inverse, T scale", "T y", "y = (x - middle) * inverse * scale", "sonnx_scaled")


@cache
def _shifted(cp: Any) -> Any:
    takes = "T x, T middle, T inverse, T scale, T b"
    return cp.ElementwiseKernel(takes, "T y", "y = (x - middle) * inverse * scale + b", "sonnx_shifted")


@cache
def _clip(cp: Any) -> Any:
    text = """
    y = x;
    if (!(y >= low)) y = y == y ? low : y;
    if (!(y <= high)) y = y == y ? high : y;
    """
    return cp.ElementwiseKernel("T x, T low, T high", "T y", text, "sonnx_clip")


@cache
def _erf(cp: Any) -> Any:
    return cp.ElementwiseKernel("T x", "T y", "y = erf(x)", "sonnx_erf")


@cache
def _erfc(cp: Any) -> Any:
    return cp.ElementwiseKernel("T x", "T y", "y = erfc(x)", "sonnx_erfc")
