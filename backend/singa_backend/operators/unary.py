"""Elementwise functions of one input: rounding, roots, exponentials, trigonometry, tests for NaN and infinity."""

from __future__ import annotations

import math

import numpy as np

from ..devices.namespaces import Xp
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ._api import Array


@operator("Ceil", 1, 6, 13, traits=("unary", "cannot_fail", "idempotent", "finite"))
def ceil(xp: Xp, x: Array) -> Array:
    return xp.ceil(x)


ceil.no_gradient("zero")


@operator("Floor", 1, 6, 13, traits=("unary", "cannot_fail", "idempotent", "finite"))
def floor(xp: Xp, x: Array) -> Array:
    return xp.floor(x)


floor.no_gradient("zero")


@operator("Round", 11, 22, traits=("unary", "cannot_fail", "idempotent", "finite", "epilogue"))
def round_(xp: Xp, x: Array) -> Array:
    """Round half to even."""
    return xp.rint(x)


round_.no_gradient("zero")


@operator("Sqrt", 1, 6, 13, traits=("unary", "cannot_fail", "epilogue"))
def sqrt(xp: Xp, x: Array) -> Array:
    return xp.sqrt(x)


@sqrt.gradient
def sqrt_gradient(op: Op, dy: V, y: V) -> V:
    return op.Div(dy, op.Add(y, y))


@operator("Exp", 1, 6, 13, traits=("unary", "cannot_fail", "finite", "epilogue"))
def exp(xp: Xp, x: Array) -> Array:
    return xp.exp(x)


@exp.gradient
def exp_gradient(op: Op, dy: V, y: V) -> V:
    return op.Mul(dy, y)


@operator("Log", 1, 6, 13, traits=("unary", "cannot_fail", "epilogue"))
def log(xp: Xp, x: Array) -> Array:
    return xp.log(x)


@log.gradient
def log_gradient(op: Op, dy: V, x: V) -> V:
    return op.Div(dy, x)


@operator("Reciprocal", 1, 6, 13, traits=("unary", "cannot_fail"))
def reciprocal(xp: Xp, x: Array) -> Array:
    return 1 / x


@reciprocal.gradient
def reciprocal_gradient(op: Op, dy: V, y: V) -> V:
    return op.Neg(op.Mul(dy, op.Mul(y, y)))


@operator("Sin", 7, 22, traits=("unary", "cannot_fail", "finite"))
def sin(xp: Xp, x: Array) -> Array:
    return xp.sin(x)


@sin.gradient
def sin_gradient(op: Op, dy: V, x: V) -> V:
    return op.Mul(dy, op.Cos(x))


@operator("Cos", 7, 22, traits=("unary", "cannot_fail", "finite"))
def cos(xp: Xp, x: Array) -> Array:
    return xp.cos(x)


@cos.gradient
def cos_gradient(op: Op, dy: V, x: V) -> V:
    return op.Neg(op.Mul(dy, op.Sin(x)))


@operator("Tan", 7, 22, traits=("unary", "cannot_fail"))
def tan(xp: Xp, x: Array) -> Array:
    return xp.tan(x)


@tan.gradient
def tan_gradient(op: Op, dy: V, y: V) -> V:
    return op.Mul(dy, op.Add(op.Mul(y, y), 1))


@operator("Asin", 7, 22, traits=("unary", "cannot_fail"))
def asin(xp: Xp, x: Array) -> Array:
    return xp.arcsin(x)


@asin.gradient
def asin_gradient(op: Op, dy: V, x: V) -> V:
    return op.Div(dy, op.Sqrt(op.Sub(1, op.Mul(x, x))))


@operator("Acos", 7, 22, traits=("unary", "cannot_fail"))
def acos(xp: Xp, x: Array) -> Array:
    return xp.arccos(x)


@acos.gradient
def acos_gradient(op: Op, dy: V, x: V) -> V:
    return op.Neg(op.Div(dy, op.Sqrt(op.Sub(1, op.Mul(x, x)))))


@operator("Atan", 7, 22, traits=("unary", "cannot_fail"))
def atan(xp: Xp, x: Array) -> Array:
    return xp.arctan(x)


@atan.gradient
def atan_gradient(op: Op, dy: V, x: V) -> V:
    return op.Div(dy, op.Add(op.Mul(x, x), 1))


@operator("Sinh", 9, 22, traits=("unary", "cannot_fail"))
def sinh(xp: Xp, x: Array) -> Array:
    return xp.sinh(x)


@sinh.gradient
def sinh_gradient(op: Op, dy: V, x: V) -> V:
    return op.Mul(dy, op.Cosh(x))


@operator("Cosh", 9, 22, traits=("unary", "cannot_fail"))
def cosh(xp: Xp, x: Array) -> Array:
    return xp.cosh(x)


@cosh.gradient
def cosh_gradient(op: Op, dy: V, x: V) -> V:
    return op.Mul(dy, op.Sinh(x))


@operator("Tanh", 1, 6, 13, traits=("unary", "cannot_fail", "finite", "epilogue"))
def tanh(xp: Xp, x: Array) -> Array:
    return xp.tanh(x)


@tanh.gradient
def tanh_gradient(op: Op, dy: V, y: V) -> V:
    return op.Mul(dy, op.Sub(1, op.Mul(y, y)))


@operator("Asinh", 9, 22, traits=("unary", "cannot_fail"))
def asinh(xp: Xp, x: Array) -> Array:
    return xp.arcsinh(x)


@asinh.gradient
def asinh_gradient(op: Op, dy: V, x: V) -> V:
    return op.Div(dy, op.Sqrt(op.Add(op.Mul(x, x), 1)))


@operator("Acosh", 9, 22, traits=("unary", "cannot_fail"))
def acosh(xp: Xp, x: Array) -> Array:
    return xp.arccosh(x)


@acosh.gradient
def acosh_gradient(op: Op, dy: V, x: V) -> V:
    return op.Div(dy, op.Sqrt(op.Sub(op.Mul(x, x), 1)))


@operator("Atanh", 9, 22, traits=("unary", "cannot_fail"))
def atanh(xp: Xp, x: Array) -> Array:
    return xp.arctanh(x)


@atanh.gradient
def atanh_gradient(op: Op, dy: V, x: V) -> V:
    return op.Div(dy, op.Sub(1, op.Mul(x, x)))


@operator("Erf", 9, 13, traits=("unary", "cannot_fail", "finite"))
def erf(xp: Xp, x: Array) -> Array:
    """Compute erf. For integers (opset 9 to 12) it is truncated to 0, or to 1 or -1 for |x| >= 6."""
    return xp.erf(x) if x.dtype.kind == "f" else xp.erf(x.astype(np.float64)).astype(x.dtype)


@erf.gradient
def erf_gradient(op: Op, dy: V, x: V) -> V:
    return op.Mul(dy, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2 / math.sqrt(math.pi)))


@operator("IsNaN", 9, 13, 20, traits=("unary", "cannot_fail"))
def is_nan(xp: Xp, x: Array) -> Array:
    return xp.isnan(x)


@operator("IsInf", 10, 20, traits=("unary", "cannot_fail"))
def is_inf(xp: Xp, x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    if detect_negative and detect_positive:
        return xp.isinf(x)
    if detect_negative or detect_positive:
        return x == (np.inf if detect_positive else -np.inf)
    return xp.zeros(x.shape, bool)
