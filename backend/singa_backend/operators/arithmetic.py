"""Elementwise arithmetic: the four operations, powers, sums, extrema and clipping."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ._api import Array
from ._common import aligned, legacy, same_shapes
from ._shapes import computed


@operator("Add", 7, 13, 14, traits=("broadcasting", "finite", "epilogue", "arithmetic"), meaning_since=7, symbol="+")
def add(xp: Xp, a: Array, b: Array) -> Array:
    return a + b


add.sizes(computed(lambda a, b: a + b))


@add.gradient
def add_gradient(op: Op, dy: V, a: V, b: V) -> tuple[V, V]:
    return op.sum_to(dy, a), op.sum_to(dy, b)


@operator("Add", 1, 6)
def add_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return add(xp, a, aligned(a, b, broadcast, axis))


@add_1.decomposition
def add_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Add(a, legacy(op, a, b, broadcast, axis))


@operator("Sub", 7, 13, 14, traits=("broadcasting", "finite", "epilogue", "arithmetic"), meaning_since=7, symbol="-")
def sub(xp: Xp, a: Array, b: Array) -> Array:
    return a - b


sub.sizes(computed(lambda a, b: a - b))


@sub.gradient
def sub_gradient(op: Op, dy: V, a: V, b: V) -> tuple[V, V]:
    return op.sum_to(dy, a), op.sum_to(op.Neg(dy), b)


@operator("Sub", 1, 6)
def sub_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return sub(xp, a, aligned(a, b, broadcast, axis))


@sub_1.decomposition
def sub_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Sub(a, legacy(op, a, b, broadcast, axis))


@operator("Mul", 7, 13, 14, traits=("broadcasting", "finite", "epilogue", "arithmetic"), meaning_since=7, symbol="*")
def mul(xp: Xp, a: Array, b: Array) -> Array:
    return a * b


mul.sizes(computed(lambda a, b: a * b))


@mul.gradient
def mul_gradient(op: Op, dy: V, a: V, b: V, needs: tuple[bool, ...]) -> tuple[V, V]:
    return (op.sum_to(op.Mul(dy, b), a) if needs[0] else None, op.sum_to(op.Mul(dy, a), b) if needs[1] else None)


@operator("Mul", 1, 6)
def mul_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return mul(xp, a, aligned(a, b, broadcast, axis))


@mul_1.decomposition
def mul_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Mul(a, legacy(op, a, b, broadcast, axis))


# --- division ---------------------------------------------------------------------------------------------------------


@operator("Div", 7, 13, 14, traits=("broadcasting", "epilogue", "arithmetic"), meaning_since=7, symbol="/")
def div(xp: Xp, a: Array, b: Array) -> Array:
    """Integers truncate: -7 / 2 is -3."""
    if a.dtype.kind == "f":
        return a / b
    _no_zero(xp, a, b)
    if a.dtype.kind == "u":
        return a // b
    # The minimum divided by -1 overflows its type and traps on some processors: negate instead, which wraps around.
    negated = b == -1
    b = xp.where(negated, 1, b)
    q = a // b
    inexact = (q * b != a) & ((a < 0) != (b < 0))
    return xp.where(negated, -a, q + inexact)


div.sizes(computed(lambda a, b: a // b if b > 0 and a >= 0 else None))


@div.gradient
def div_gradient(op: Op, dy: V, a: V, b: V, y: V, needs: tuple[bool, ...]) -> tuple[V, V]:
    da = op.Div(dy, b)
    return (op.sum_to(da, a), op.sum_to(op.Neg(op.Mul(da, y)), b) if needs[1] else None)


@operator("Div", 1, 6)
def div_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return div(xp, a, aligned(a, b, broadcast, axis))


@div_1.decomposition
def div_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Div(a, legacy(op, a, b, broadcast, axis))


@operator("Mod", 10, 13, 28, traits=("broadcasting",))
def mod(xp: Xp, a: Array, b: Array, *, fmod: int = 0) -> Array:
    """Compute a - floor(a / b) * b, which has the sign of b; with fmod, a - trunc(a / b) * b, which has the sign of a.

    Before opset 28, floats require fmod=1; a test case of that time omits it and expects the result of opset 28.
    """
    if fmod not in (0, 1):
        raise OperatorError(f"fmod must be 0 or 1, got {fmod}", code="SX404")
    if a.dtype.kind != "f":
        _no_zero(xp, a, b)
        if a.dtype.kind == "i":
            b = xp.where(b == -1, 1, b)  # the remainder is 0 for both, and the minimum modulo -1 traps on some processors
        r = xp.remainder(a, b)
        # CuPy's fmod converts integers to float64.
        return xp.where((r != 0) & ((a < 0) != (b < 0)), r - b, r) if fmod else r
    r = xp.fmod(a, b)
    if fmod:
        return r
    # CuPy's remainder is NaN for an infinite b, but -1 mod inf is inf.  A zero has the sign of b.
    return xp.where(r == 0, xp.copysign(r, b), xp.where((r < 0) != (b < 0), r + b, r))


@mod.gradient
def mod_gradient(op: Op, dy: V, a: V, b: V, y: V) -> tuple[V, V]:
    """Differentiate y = a - q b, where q is an integer and therefore constant almost everywhere."""
    q = op.Round(op.Div(op.Sub(a, y), b))
    return op.sum_to(dy, a), op.sum_to(op.Neg(op.Mul(dy, q)), b)


def _no_zero(xp: Xp, a: Array, b: Array) -> None:
    """Raise OperatorError if an integer would be divided by zero."""
    if 0 not in np.broadcast_shapes(a.shape, b.shape):
        xp.refuse(b == 0, lambda: OperatorError("the divisor of integers must not be zero", code="SX403"))


# --- powers -----------------------------------------------------------------------------------------------------------


@operator("Pow", 7, 12, 13, 15, traits=("broadcasting",), meaning_since=7, symbol="**")
def pow_(xp: Xp, x: Array, y: Array) -> Array:
    """The result has the type of the base: it is an integer if the base is one."""
    whole = y.dtype.kind in "iu"
    if x.dtype.kind in "iu":
        return _integer_pow(xp, x, y) if whole else xp.cast(xp.power(x.astype(np.float64), y.astype(np.float64)), x.dtype)
    if not whole:
        return xp.power(x, y)
    # A float cannot represent every integer, and the parity of y decides the sign: (-1) ** (2**53 + 1) is -1.
    size = xp.power(xp.abs(x), y.astype(x.dtype))
    return xp.where(xp.signbit(x) & (y % 2 == 1), -size, size)


@pow_.gradient
def pow_gradient(op: Op, dy: V, x: V, y: V, ys: list[V], needs: tuple[bool, ...]) -> tuple[V, V]:
    """The gradient by x is n x^(n-1), and 0 for n = 0 at every x; the gradient by the exponent is 0 where x is 0."""
    n = op.cast(y, x)
    constant = op.Equal(n, 0)
    lower = op.Where(constant, 0, op.Sub(n, 1))  # at 0 the power -1 is infinite, and so would be the gradient of this product
    dx = op.Where(constant, 0, op.Mul(dy, op.Mul(n, op.Pow(x, lower))))
    if not needs[1]:
        return op.sum_to(dx, x), None
    zero = op.Equal(x, 0)
    dn = op.Where(zero, 0, op.Mul(op.Mul(dy, ys[0]), op.Log(op.Where(zero, 1, x))))
    return op.sum_to(dx, x), op.sum_to(op.cast(dn, y), y)


@operator("Pow", 1)
def pow_1(xp: Xp, x: Array, y: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return pow_(xp, x, aligned(x, y, broadcast, axis))


@pow_1.decomposition
def pow_1_decomposition(op: Op, x: V, y: V, axis: int | None, broadcast: int) -> V:
    return op.Pow(x, legacy(op, x, y, broadcast, axis))


def _integer_pow(xp: Xp, x: Array, y: Array) -> Array:
    """Compute the exact power modulo 2**64: in two's complement the signed and the unsigned power have the same bits."""
    up = y if y.dtype.kind == "u" else xp.maximum(y, 0)
    z = xp.power(x.astype(np.uint64), up.astype(np.uint64)).astype(x.dtype)
    if y.dtype.kind == "u":
        return z
    down = y < 0
    xp.refuse(down & (x == 0), lambda: OperatorError("the exponent of an integer 0 must not be negative", code="SX403"))
    # 1 / x**n truncates to 0 except for x = 1 and x = -1, which are their own inverses.
    unit = xp.where(y % 2 == 1, x, 1)
    return xp.where(down, xp.where((x == 1) | (x == -1), unit, 0), z).astype(x.dtype)


# --- of one input -----------------------------------------------------------------------------------------------------


@operator("Neg", 1, 6, 13, traits=("unary", "cannot_fail", "involution", "finite", "keeps_finite", "epilogue"))
def neg(xp: Xp, x: Array) -> Array:
    return -x


@neg.gradient
def neg_gradient(op: Op, dy: V) -> V:
    return op.Neg(dy)


@operator("Abs", 1, 6, 13, traits=("unary", "cannot_fail", "idempotent", "finite", "keeps_finite", "epilogue"))
def abs_(xp: Xp, x: Array) -> Array:
    return xp.abs(x)


@abs_.gradient
def abs_gradient(op: Op, dy: V, x: V) -> V:
    """The gradient at 0 is 0."""
    return op.Mul(dy, op.Sign(x))


@operator("Sign", 9, 13, traits=("unary", "cannot_fail", "idempotent", "finite"))
def sign(xp: Xp, x: Array) -> Array:
    return xp.sign(x)


sign.no_gradient("zero")


# --- of any number of inputs ------------------------------------------------------------------------------------------


@operator("Sum", 8, 13, traits=("broadcasting", "finite", "epilogue", "arithmetic"), meaning_since=8)
def sum_(xp: Xp, *xs: Array) -> Array:
    return reduce(xp.add, xs)


@sum_.gradient
def sum_gradient(op: Op, dy: V, xs: list[V]) -> list[V]:
    return [op.sum_to(dy, x) for x in xs]


@operator("Sum", 1, 6)
def sum_1(xp: Xp, *xs: Array) -> Array:
    same_shapes(xs)
    return sum_(xp, *xs)


@sum_1.decomposition
def sum_1_decomposition(op: Op, xs: list[V]) -> V:
    return op.Sum(*xs)


@operator("Mean", 8, 13, traits=("broadcasting",), meaning_since=8)
def mean(xp: Xp, *xs: Array) -> Array:
    return sum_(xp, *xs) / len(xs)


@mean.gradient
def mean_gradient(op: Op, dy: V, xs: list[V]) -> list[V]:
    dx = op.Div(dy, len(xs))
    return [op.sum_to(dx, x) for x in xs]


@operator("Mean", 1, 6)
def mean_1(xp: Xp, *xs: Array) -> Array:
    same_shapes(xs)
    return mean(xp, *xs)


@mean_1.decomposition
def mean_1_decomposition(op: Op, xs: list[V]) -> V:
    return op.Mean(*xs)


@operator("Max", 8, 12, 13, traits=("broadcasting", "finite", "keeps_finite", "epilogue"), meaning_since=8)
def max_(xp: Xp, *xs: Array) -> Array:
    """The result is NaN if an operand is NaN."""
    return reduce(xp.maximum, xs)


@max_.gradient
def max_gradient(op: Op, dy: V, xs: list[V], y: V) -> list[V]:
    return _shared(op, dy, xs, y)


def _shared(op: Op, dy: V, xs: list[V], y: V) -> list[V]:
    """Divide the gradient equally among the inputs that equal the result."""
    here = [op.cast(op.Equal(x, y), y) for x in xs]
    part = op.Div(dy, op.Sum(*here))
    return [op.sum_to(op.Mul(part, h), x) for x, h in zip(xs, here, strict=True)]


@operator("Max", 1, 6)
def max_1(xp: Xp, *xs: Array) -> Array:
    same_shapes(xs)
    return max_(xp, *xs)


@max_1.decomposition
def max_1_decomposition(op: Op, xs: list[V]) -> V:
    return op.Max(*xs)


@operator("Min", 8, 12, 13, traits=("broadcasting", "finite", "keeps_finite", "epilogue"), meaning_since=8)
def min_(xp: Xp, *xs: Array) -> Array:
    """The result is NaN if an operand is NaN."""
    return reduce(xp.minimum, xs)


@min_.gradient
def min_gradient(op: Op, dy: V, xs: list[V], y: V) -> list[V]:
    return _shared(op, dy, xs, y)


@operator("Min", 1, 6)
def min_1(xp: Xp, *xs: Array) -> Array:
    same_shapes(xs)
    return min_(xp, *xs)


@min_1.decomposition
def min_1_decomposition(op: Op, xs: list[V]) -> V:
    return op.Min(*xs)


# --- clipping ---------------------------------------------------------------------------------------------------------


@operator("Clip", 11, 12, 13, traits=("unary", "finite", "keeps_finite", "epilogue"))
def clip(xp: Xp, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    """Compute Min(high, Max(x, low)): if low > high, the result is high everywhere.  An absent bound has no effect."""
    for name, bound in (("min", low), ("max", high)):
        if bound is not None and bound.size != 1:
            raise OperatorError(f"{name!r} must be a scalar, got shape {bound.shape}", code="SX404")
    return _clip(xp, x, None if low is None else low.reshape(()), None if high is None else high.reshape(()))


@clip.gradient
def clip_gradient(op: Op, dy: V, x: V, low: V, high: V) -> tuple[V, V, V]:
    """The gradient at the bounds is 1.

    The gradient of a clipped value goes to its bound; if low > high, every gradient goes to the upper bound.
    """
    dx, dlow, dhigh = dy, None, None
    if high is not None:
        above = op.Greater(x, high)
        if low is not None:
            above = op.Or(above, op.Greater(low, high))
        dx, dhigh = op.Where(above, 0, dx), op.sum_to(op.Where(above, dy, 0), high)
    if low is not None:
        below = op.Less(x, low)
        dx, dlow = op.Where(below, 0, dx), op.sum_to(op.Where(below, dx, 0), low)
    return dx, dlow, dhigh


@operator("Clip", 1)
def clip_1(xp: Xp, x: Array, *, max: float | None = None, min: float | None = None) -> Array:
    return _clip(xp, x, min, max)


@clip_1.decomposition
def clip_1_decomposition(op: Op, x: V, max: float | None, min: float | None) -> V:
    low, high = (None if b is None else op.constant(b, op.dtype(x)) for b in (min, max))
    return op.Clip(x, low, high)


@operator("Clip", 6)
def clip_6(xp: Xp, x: Array, *, max: float = 3.4028234663852886e38, min: float = -3.4028234663852886e38) -> Array:
    return _clip(xp, x, min, max)


@clip_6.decomposition
def clip_6_decomposition(op: Op, x: V, max: float, min: float) -> V:
    return op.Clip(x, op.constant(min, op.dtype(x)), op.constant(max, op.dtype(x)))


def _clip(xp: Xp, x: Array, low: Any, high: Any) -> Array:
    if low is not None and high is not None:
        return xp.clip(x, low, high)
    return xp.maximum(x, low) if low is not None else xp.minimum(x, high) if high is not None else x
