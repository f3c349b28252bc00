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


_ELEMENTWISE = {
    "softmax": ("x high sum", "y = exp(x - high) / sum"),
    "log_softmax": ("x high sum", "y = x - high - log(sum)"),
    "standardized": ("x middle var epsilon scale b", "y = (x - middle) * (scale / sqrt(var + epsilon)) + b"),
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
    return cp.ElementwiseKernel(takes, "T y", text, f"sonnx_{name}")


@cache
def elementwise(cp: Any, takes: str, results: str, text: str) -> Any:
    """A kernel of elementwise operations with the rounding of each: no multiplication is fused with an addition.

    Args:
        cp: CuPy.
        takes: the types and names of the operands, as `cupy.ElementwiseKernel` reads them.
        results: those of the results.
        text: assigns the results.
    """
    return cp.ElementwiseKernel(takes, results, text, "sonnx_joined", options=("--fmad=false",))
