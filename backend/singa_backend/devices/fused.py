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

_ROUNDED = ("--fmad=false",)
"""The options of kernels whose every operation is rounded: those of joined nodes then have the bits of single ones."""

_NAN = """
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
"""
"""As CuPy's functions have it: NVRTC does not define it."""

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def fits(*arrays: Array) -> bool:
    """Whether the kernels take these arrays."""
    dtype = arrays[0].dtype
    return dtype in _FLOATS and all(a.dtype == dtype for a in arrays)


def softmax(cp: Any, x: Array, axis: int) -> Array:
    """As `composed.softmax`, in three passes."""
    high = x.max(axis=axis, keepdims=True)
    return _kernel(cp, "softmax")(x, high, _kernel(cp, "exponentials")(x, high, axis=axis, keepdims=True))


def log_softmax(cp: Any, x: Array, axis: int) -> Array:
    """As `composed.log_softmax`, in three passes."""
    high = x.max(axis=axis, keepdims=True)
    return _kernel(cp, "log_softmax")(x, high, _kernel(cp, "exponentials")(x, high, axis=axis, keepdims=True))


def standardized(cp: Any, x: Array, middle: Array, var: Array, epsilon: float, scale: Array, b: Array) -> Array:
    """As `composed.standardized`, in one pass."""
    return _kernel(cp, "standardized")(x, middle, var, epsilon, scale, b)


def mean(cp: Any, x: Array, axes: Axes, keepdims: bool) -> Array:
    """The mean over `axes`, in one pass."""
    return _kernel(cp, "mean")(x, _count(x, axes), axis=axes, keepdims=keepdims)


def batch_normalized(cp: Any, x: Array, axes: Axes, epsilon: float, scale: Array, b: Array) -> tuple[Array, Array, Array]:
    """As `composed.batch_normalized`, in three passes."""
    middle = mean(cp, x, axes, True)
    var = _kernel(cp, "variance")(x, middle, _count(x, axes), axis=axes, keepdims=True)
    return standardized(cp, x, middle, var, epsilon, scale, b), middle, var


def blended(cp: Any, old: Array, new: Array, momentum: float) -> Array:
    """As `composed.blended`, in one kernel."""
    return _kernel(cp, "blended")(old, new, momentum, 1 - momentum)


def layer_normalized(cp: Any, x: Array, axes: Axes, epsilon: float, scale: Array, b: Array | None) -> tuple[Array, Array, Array]:
    """As `composed.layer_normalized` for the dtype of x, in three passes."""
    middle = mean(cp, x, axes, True)
    inverse = _kernel(cp, "inverse")(x, middle, _count(x, axes), epsilon, axis=axes, keepdims=True)
    y = _kernel(cp, "scaled")(x, middle, inverse, scale) if b is None else _kernel(cp, "shifted")(x, middle, inverse, scale, b)
    return y, middle, inverse


def _count(x: Array, axes: Axes) -> int:
    """The number of elements of each sum over `axes`."""
    return math.prod([x.shape[a] for a in axes])


def clip(cp: Any, x: Array, low: Array, high: Array) -> Array:
    """The minimum of `high` and the maximum of `low` and x; NaN if one of the three is NaN."""
    return _kernel(cp, "clip")(x, low, high)


def erf(cp: Any, x: Array) -> Array:
    """The error function of CUDA."""
    return _kernel(cp, "erf")(x)


def erfc(cp: Any, x: Array) -> Array:
    """1 - erf(x), of CUDA."""
    return _kernel(cp, "erfc")(x)


def philox_words(cp: Any, key: Array, count: int) -> Array:
    """The words of Philox-4x32-10 for a key (seed, draw) of int64, which each thread computes by its block of four."""
    words = cp.empty(count, np.uint32)
    if count:
        _philox(cp)(key, words)
    return words


@cache
def _philox(cp: Any) -> Any:
    text = """
    const unsigned long long block = i / 4, seed = key[0], draw = key[1];
    unsigned c0 = block, c1 = block >> 32, c2 = draw, c3 = draw >> 32, k0 = seed, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
        const unsigned long long a = 0xD2511F53ULL * c0, b = 0xCD9E8D57ULL * c2;
        c0 = unsigned(b >> 32) ^ c1 ^ k0;
        c2 = unsigned(a >> 32) ^ c3 ^ k1;
        c1 = unsigned(b);
        c3 = unsigned(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    y = i % 4 == 0 ? c0 : i % 4 == 1 ? c1 : i % 4 == 2 ? c2 : c3;
    """
    return cp.ElementwiseKernel("raw int64 key", "uint32 y", text, "sonnx_philox")


def lstm_cell(cp: Any, projected: Array, recurrent: Array, c: Array) -> tuple[Array, Array]:
    """A step of an LSTM with the functions sigmoid and tanh.

    Args:
        cp: CuPy.
        projected: the input of the gates i, o, f and c, with the bias, of shape batch x 4 n.
        recurrent: the product of the state with their weights, of the same shape.
        c: the cell, of shape batch x n.

    Returns:
        The state and the cell.
    """
    made: tuple[Array, Array] = _lstm(cp)(cp.ascontiguousarray(projected), cp.ascontiguousarray(recurrent), c, c.shape[1])
    return made


@cache
def _lstm(cp: Any) -> Any:
    text = """
    const long long at = i / n0 * 4 * n0 + i % n0;
    const T in = T(1) / (T(1) + T(exp(-(x[at] + r[at]))));
    const T out = T(1) / (T(1) + T(exp(-(x[at + n0] + r[at + n0]))));
    const T forget = T(1) / (T(1) + T(exp(-(x[at + 2 * n0] + r[at + 2 * n0]))));
    const T now = tanh(x[at + 3 * n0] + r[at + 3 * n0]);
    const T cell = forget * c + in * now;
    h = out * T(tanh(cell));
    next = cell;
    """
    takes = "raw T x, raw T r, T c, int64 n0"
    return cp.ElementwiseKernel(takes, "T h, T next", text, "sonnx_lstm_cell", options=_ROUNDED)


COUNTS = tuple(np.dtype(kind) for kind in (np.int32, np.uint32, np.int64, np.uint64))
"""The dtypes of `count`."""


def count(cp: Any, out: Array, places: Array, values: Array | int) -> None:
    """Add integers to the elements of a vector at these places, in any order; places outside it are passed over."""
    kernel = _count_kernel(cp, "unsigned int" if out.dtype.itemsize == 4 else "unsigned long long")
    kernel(places, cp.asarray(values, out.dtype), np.int64(out.size), out)


@cache
def _count_kernel(cp: Any, word: str) -> Any:
    text = f"""
    if (place >= 0 && place < size)
        atomicAdd(const_cast<{word}*>(reinterpret_cast<const {word}*>(&out[place])), static_cast<{word}>(value));
    """
    return cp.ElementwiseKernel("P place, T value, int64 size", "raw T out", text, "sonnx_count")


_ELEMENTWISE = {
    "softmax": ("x high sum", "y = exp(x - high) / sum"),
    "log_softmax": ("x high sum", "y = x - high - log(sum)"),
    "standardized": ("x middle var epsilon scale b", "y = (x - middle) * (scale / T(sqrt(var + epsilon))) + b"),
    "blended": ("old now kept taken", "y = old * kept + now * taken"),
    "scaled": ("x middle inverse scale", "y = (x - middle) * inverse * scale"),
    "shifted": ("x middle inverse scale b", "y = (x - middle) * inverse * scale + b"),
    "clip": ("x low high", "y = x; if (!(y >= low)) y = y == y ? low : y; if (!(y <= high)) y = y == y ? high : y;"),
    "erf": ("x", "y = erf(x)"),
    "erfc": ("x", "y = erfc(x)"),
}
"""The operands of each elementwise kernel, and what it computes."""

_SUMS = {
    "exponentials": ("x high", "exp(x - high)", "a"),
    "mean": ("x count", "x", "a / count"),
    "variance": ("x middle count", "(x - middle) * (x - middle)", "a / count"),
    "inverse": ("x middle count epsilon", "(x - middle) * (x - middle)", "T(1) / sqrt(a / count + epsilon)"),
}
"""The operands of each sum, what it adds, and the result for the sum a."""


@cache
def _kernel(cp: Any, name: str) -> Any:
    """A kernel, compiled at its first use."""
    operands, text, *rest = _SUMS[name] if name in _SUMS else _ELEMENTWISE[name]
    takes = ", ".join(f"T {operand}" for operand in operands.split())
    if rest:
        return cp.ReductionKernel(takes, "T y", text, "a + b", f"y = {rest[0]}", "0", f"sonnx_{name}")
    return cp.ElementwiseKernel(takes, "T y", text, f"sonnx_{name}", options=_ROUNDED)


@cache
def elementwise(cp: Any, takes: str, results: str, text: str) -> Any:
    """A kernel of elementwise operations with the rounding of each: no multiplication is fused with an addition.

    Args:
        cp: CuPy.
        takes: the types and names of the operands, as `cupy.ElementwiseKernel` reads them.
        results: those of the results.
        text: assigns the results.
    """
    return cp.ElementwiseKernel(takes, results, text, "sonnx_joined", options=_ROUNDED, preamble=_NAN)
