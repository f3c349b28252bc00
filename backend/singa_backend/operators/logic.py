"""Boolean operators, comparisons, bitwise operators and Where."""

from __future__ import annotations

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ._api import Array
from ._common import aligned, legacy


@operator("And", 7, traits=("broadcasting",), meaning_since=7)
def and_(xp: Xp, a: Array, b: Array) -> Array:
    return xp.logical_and(a, b)


@operator("And", 1)
def and_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return and_(xp, a, aligned(a, b, broadcast, axis))


@and_1.decomposition
def and_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.And(a, legacy(op, a, b, broadcast, axis))


@operator("Or", 7, traits=("broadcasting",), meaning_since=7)
def or_(xp: Xp, a: Array, b: Array) -> Array:
    return xp.logical_or(a, b)


@operator("Or", 1)
def or_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return or_(xp, a, aligned(a, b, broadcast, axis))


@or_1.decomposition
def or_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Or(a, legacy(op, a, b, broadcast, axis))


@operator("Xor", 7, traits=("broadcasting",), meaning_since=7)
def xor(xp: Xp, a: Array, b: Array) -> Array:
    return xp.logical_xor(a, b)


@operator("Xor", 1)
def xor_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return xor(xp, a, aligned(a, b, broadcast, axis))


@xor_1.decomposition
def xor_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Xor(a, legacy(op, a, b, broadcast, axis))


@operator("Not", 1, traits=("unary", "cannot_fail", "involution"))
def not_(xp: Xp, x: Array) -> Array:
    return xp.logical_not(x)


# --- comparisons: false for NaN, except "not equal" --------------------------------------------------------------------


@operator("Equal", 7, 11, 13, 19, traits=("broadcasting",), meaning_since=7)
def equal(xp: Xp, a: Array, b: Array) -> Array:
    """Compare; strings are supported in opset 19 or later."""
    return xp.equal(a, b)


@operator("Equal", 1)
def equal_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return equal(xp, a, aligned(a, b, broadcast, axis))


@equal_1.decomposition
def equal_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Equal(a, legacy(op, a, b, broadcast, axis))


@operator("Greater", 7, 9, 13, traits=("broadcasting",), meaning_since=7)
def greater(xp: Xp, a: Array, b: Array) -> Array:
    return a > b


@operator("Greater", 1)
def greater_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return greater(xp, a, aligned(a, b, broadcast, axis))


@greater_1.decomposition
def greater_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Greater(a, legacy(op, a, b, broadcast, axis))


@operator("Less", 7, 9, 13, traits=("broadcasting",), meaning_since=7)
def less(xp: Xp, a: Array, b: Array) -> Array:
    return a < b


@operator("Less", 1)
def less_1(xp: Xp, a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return less(xp, a, aligned(a, b, broadcast, axis))


@less_1.decomposition
def less_1_decomposition(op: Op, a: V, b: V, axis: int | None, broadcast: int) -> V:
    return op.Less(a, legacy(op, a, b, broadcast, axis))


@operator("GreaterOrEqual", 12, 16, traits=("broadcasting",))
def greater_or_equal(xp: Xp, a: Array, b: Array) -> Array:
    return a >= b


@operator("LessOrEqual", 12, 16, traits=("broadcasting",))
def less_or_equal(xp: Xp, a: Array, b: Array) -> Array:
    return a <= b


# --- bits -------------------------------------------------------------------------------------------------------------


@operator("BitShift", 11, 28, traits=("broadcasting",))
def bit_shift(xp: Xp, x: Array, y: Array, *, direction: str) -> Array:
    """Shift bits; bits shifted out are lost.

    A negative amount, or one of at least the number of bits, leaves only fill bits: zeros, or ones for a right shift of
    a negative number.  Before opset 28 there are no signed types, and such an amount is undefined.
    """
    if direction not in ("LEFT", "RIGHT"):
        raise OperatorError(f"direction must be 'LEFT' or 'RIGHT', got {direction!r}", code="SX404")
    inside = (y >= 0) & (y < 8 * x.dtype.itemsize)
    y = xp.where(inside, y, 0)
    if direction == "LEFT":
        return xp.where(inside, x << y, 0)
    fill = xp.where(x < 0, -1, 0).astype(x.dtype) if x.dtype.kind == "i" else 0
    return xp.where(inside, x >> y, fill)


@operator("BitwiseAnd", 18, traits=("broadcasting",))
def bitwise_and(xp: Xp, a: Array, b: Array) -> Array:
    return a & b


@operator("BitwiseOr", 18, traits=("broadcasting",))
def bitwise_or(xp: Xp, a: Array, b: Array) -> Array:
    return a | b


@operator("BitwiseXor", 18, traits=("broadcasting",))
def bitwise_xor(xp: Xp, a: Array, b: Array) -> Array:
    return a ^ b


@operator("BitwiseNot", 18, traits=("unary", "cannot_fail"))
def bitwise_not(xp: Xp, x: Array) -> Array:
    return ~x


@operator("Where", 9, 16, traits=("broadcasting", "finite", "keeps_finite", "moves"))
def where(xp: Xp, condition: Array, x: Array, y: Array) -> Array:
    return xp.where(condition, x, y)


@where.gradient
def where_gradient(op: Op, dy: V, condition: V, x: V, y: V) -> tuple[V, V, V]:
    return None, op.sum_to(op.Where(condition, dy, 0), x), op.sum_to(op.Where(condition, 0, dy), y)
