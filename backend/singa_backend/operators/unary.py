"""Functions of one number: rounding, roots, exponentials, trigonometry, and what a float can be besides a number."""

from __future__ import annotations

import numpy as np

from ..operator import Array, Xp, operator


@operator("Ceil", 1, 6, 13)
def ceil(xp: Xp, x: Array) -> Array:
    return xp.ceil(x)


@operator("Floor", 1, 6, 13)
def floor(xp: Xp, x: Array) -> Array:
    return xp.floor(x)


@operator("Round", 11, 22)
def round_(xp: Xp, x: Array) -> Array:
    """Halves go to the even neighbour."""
    return xp.rint(x)


@operator("Sqrt", 1, 6, 13)
def sqrt(xp: Xp, x: Array) -> Array:
    return xp.sqrt(x)


@operator("Exp", 1, 6, 13)
def exp(xp: Xp, x: Array) -> Array:
    return xp.exp(x)


@operator("Log", 1, 6, 13)
def log(xp: Xp, x: Array) -> Array:
    return xp.log(x)


@operator("Reciprocal", 1, 6, 13)
def reciprocal(xp: Xp, x: Array) -> Array:
    return 1 / x


@operator("Sin", 7, 22)
def sin(xp: Xp, x: Array) -> Array:
    return xp.sin(x)


@operator("Cos", 7, 22)
def cos(xp: Xp, x: Array) -> Array:
    return xp.cos(x)


@operator("Tan", 7, 22)
def tan(xp: Xp, x: Array) -> Array:
    return xp.tan(x)


@operator("Asin", 7, 22)
def asin(xp: Xp, x: Array) -> Array:
    return xp.arcsin(x)


@operator("Acos", 7, 22)
def acos(xp: Xp, x: Array) -> Array:
    return xp.arccos(x)


@operator("Atan", 7, 22)
def atan(xp: Xp, x: Array) -> Array:
    return xp.arctan(x)


@operator("Sinh", 9, 22)
def sinh(xp: Xp, x: Array) -> Array:
    return xp.sinh(x)


@operator("Cosh", 9, 22)
def cosh(xp: Xp, x: Array) -> Array:
    return xp.cosh(x)


@operator("Tanh", 1, 6, 13)
def tanh(xp: Xp, x: Array) -> Array:
    return xp.tanh(x)


@operator("Asinh", 9, 22)
def asinh(xp: Xp, x: Array) -> Array:
    return xp.arcsinh(x)


@operator("Acosh", 9, 22)
def acosh(xp: Xp, x: Array) -> Array:
    return xp.arccosh(x)


@operator("Atanh", 9, 22)
def atanh(xp: Xp, x: Array) -> Array:
    return xp.arctanh(x)


@operator("Erf", 9, 13)
def erf(xp: Xp, x: Array) -> Array:
    """Of an integer (opset 9 to 12), what truncation leaves: 0, and 1 from 6 on, where float64 holds nothing nearer."""
    return xp.erf(x) if x.dtype.kind == "f" else xp.erf(x.astype(np.float64)).astype(x.dtype)


@operator("IsNaN", 9, 13, 20)
def is_nan(xp: Xp, x: Array) -> Array:
    return xp.isnan(x)


@operator("IsInf", 10, 20)
def is_inf(xp: Xp, x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    if detect_negative and detect_positive:
        return xp.isinf(x)
    if detect_negative or detect_positive:
        return x == (np.inf if detect_positive else -np.inf)
    return xp.zeros(x.shape, bool)
