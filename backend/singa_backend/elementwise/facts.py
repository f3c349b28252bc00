"""What follows from an expression: the range of its values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .expression import FUNCTIONS, Term, order

MOST = sys.float_info.max
"""The bound of values that are finite and not otherwise bounded: nothing is assumed to overflow."""


@dataclass(frozen=True)
class Range:
    """The values that a term may have.

    Attributes:
        low: the lowest one, NaN aside.
        high: the highest one.
        nan: whether it may be NaN.
        zero: whether it may be 0.
    """

    low: float
    high: float
    nan: bool = False
    zero: bool = True

    def __post_init__(self) -> None:
        if self.low > 0 or self.high < 0:
            object.__setattr__(self, "zero", False)

    @property
    def is_finite(self) -> bool:
        """Whether no value is an infinity or NaN."""
        return not self.nan and -math.inf < self.low and self.high < math.inf

    @property
    def has_infinity(self) -> bool:
        """Whether a value may be an infinity."""
        return self.low == -math.inf or self.high == math.inf


FINITE = Range(-MOST, MOST)
UNKNOWN = Range(-math.inf, math.inf, True)
_BOOL = Range(0, 1)
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "signbit"])
_MONOTONIC: dict[str, tuple[Callable[[float], float], float, float]] = {
    "exp": (math.exp, -math.inf, math.inf), "expm1": (math.expm1, -math.inf, math.inf), "log": (math.log, 0, math.inf),
    "log1p": (math.log1p, -1, math.inf), "sqrt": (math.sqrt, 0, math.inf), "tanh": (math.tanh, -math.inf, math.inf),
    "sinh": (math.sinh, -math.inf, math.inf), "asinh": (math.asinh, -math.inf, math.inf),
    "atan": (math.atan, -math.inf, math.inf), "asin": (math.asin, -1, 1),
    "acosh": (math.acosh, 1, math.inf), "atanh": (math.atanh, -1, 1),
}  # fmt: skip
"""Increasing functions, and where each is defined."""

_POLES: dict[tuple[str, float], float] = {
    ("log", 0): -math.inf, ("log1p", -1): -math.inf, ("atanh", -1): -math.inf, ("atanh", 1): math.inf,
}  # fmt: skip


def _bounded(value: float, finite: bool) -> float:
    """A bound of a result: nothing overflows, so that finite operands have a finite result."""
    return math.copysign(MOST, value) if finite and math.isinf(value) else value


def _value(name: str, function: Callable[[float], float], x: float) -> float:
    """A function at a bound, where Python raises for poles and overflow."""
    if (name, x) in _POLES:
        return _POLES[name, x]
    try:
        return function(x)
    except OverflowError:
        return math.copysign(MOST if abs(x) < math.inf else math.inf, x)


def _monotonic(name: str, x: Range) -> Range:
    function, start, end = _MONOTONIC[name]
    low, high = max(x.low, start), min(x.high, end)
    nan = x.nan or low != x.low or high != x.high
    if low > high:  # nowhere defined
        return UNKNOWN
    at = (-1, MOST) if name == "sqrt" and x.low < 0 else (_value(name, function, low), _value(name, function, high))
    return Range(_bounded(at[0], abs(low) < MOST and (name, low) not in _POLES), _bounded(at[1], high <= MOST), nan)


def _corners(x: Range, y: Range, function: Callable[[float, float], float]) -> Range:
    """A function that increases or decreases in each operand; a NaN at a corner is one of the values."""
    pairs = [(p, q) for p in (x.low, x.high) for q in (y.low, y.high)]
    ends = [_bounded(function(p, q), math.isfinite(p) and math.isfinite(q)) for p, q in pairs]
    known = [e for e in ends if not math.isnan(e)] or [-math.inf, math.inf]
    return Range(min(known), max(known), x.nan or y.nan or len(known) < len(ends))


def _product(x: Range, y: Range) -> Range:
    made = _corners(x, y, lambda p, q: p * q if math.isnan(p * q) or p * q else 0.0)
    nan = made.nan or (x.has_infinity and y.zero) or (y.has_infinity and x.zero)
    return Range(made.low, made.high, nan, x.zero or y.zero or not made.is_finite)


def _quotient(x: Range, y: Range) -> Range:
    if y.nan or y.has_infinity or y.zero:
        return UNKNOWN
    if y.low < 0 < y.high:  # a constant array without zeros
        return Range(x.low if x.has_infinity else -MOST, x.high if x.has_infinity else MOST, x.nan, x.zero)
    return _corners(x, y, lambda p, q: p / q if q else math.copysign(math.inf, p))


def _power(x: Range, y: Term, of_y: Range) -> Range:
    """A power: a negative base needs an integer exponent, and a base of 0 one that is not negative."""
    if not x.is_finite or not of_y.is_finite:
        return UNKNOWN
    positive = of_y.low >= 0
    if x.low >= 0 or (y.op == "const" and float(y.number).is_integer()):
        return FINITE if positive or not x.zero else Range(-math.inf, math.inf)
    return UNKNOWN


def _sum(t: Term, x: Range, y: Range) -> Range:
    made = _corners(x, y, lambda p, q: p + q)
    return Range(made.low, made.high, x.nan) if t.args[0] is t.args[1] else made


def _difference(t: Term, x: Range, y: Range) -> Range:
    made = _corners(x, y, lambda p, q: p - q)
    most = t.args[1]
    if most.op == "reduce" and most.args[0] is t.args[0] and most.extra[0] == "max":  # x - max(x)
        return Range(made.low, 0.0, made.nan)
    return made


def _multiplied(t: Term, x: Range, y: Range) -> Range:
    made = _product(x, y)
    return Range(0.0, made.high, x.nan, x.zero) if t.args[0] is t.args[1] else made


def _reduced(t: Term, x: Range, y: Range) -> Range:
    if t.extra[0] in ("max", "min"):
        return Range(x.low, x.high, x.nan)
    if t.extra[0] == "sum" and (x.low >= 0 or not x.has_infinity):
        return Range(0.0 if x.low >= 0 else -MOST, math.inf if x.high == math.inf else MOST, x.nan)
    return FINITE if x.is_finite else UNKNOWN


def _rounded(t: Term, x: Range, y: Range) -> Range:
    low, high = (float(FUNCTIONS[t.op](b)) for b in (x.low, x.high))
    return Range(low, high, x.nan)


def _extreme(t: Term, x: Range, y: Range) -> Range:
    pick = max if t.op == "max" else min
    return Range(pick(x.low, y.low), pick(x.high, y.high), x.nan or y.nan)


def _copied_sign(t: Term, x: Range, y: Range) -> Range:
    most = max(abs(x.low), abs(x.high))
    return Range(-most, most, x.nan, x.zero)


_RULES: dict[str, Callable[[Term, Range, Range], Range]] = {
    **dict.fromkeys(("reshape", "expand", "cast"), lambda t, x, y: x),
    **dict.fromkeys(_MONOTONIC, lambda t, x, y: _monotonic(t.op, x)),
    **dict.fromkeys(("floor", "ceil", "rint", "trunc"), _rounded),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("fmax", "fmin"), lambda t, x, y: Range(min(x.low, y.low), max(x.high, y.high), x.nan and y.nan)),
    **dict.fromkeys(("sin", "cos"), lambda t, x, y: Range(-1, 1, x.nan or x.has_infinity)),
    "neg": lambda t, x, y: Range(-x.high, -x.low, x.nan, x.zero),
    "abs": lambda t, x, y: Range(max(x.low, -x.high, 0.0), max(abs(x.low), abs(x.high)), x.nan, x.zero),
    "sign": lambda t, x, y: Range(-1, 1, x.nan),
    "tan": lambda t, x, y: Range(-MOST, MOST, x.nan or x.has_infinity),
    "cosh": lambda t, x, y: Range(1, math.inf if x.has_infinity else MOST, x.nan),
    "acos": lambda t, x, y: Range(0, math.pi, x.nan or x.low < -1 or x.high > 1),
    "erf": lambda t, x, y: Range(-1, 1, x.nan),
    "erfc": lambda t, x, y: Range(0, 2, x.nan),
    "add": _sum,
    "sub": _difference,
    "mul": _multiplied,
    "div": lambda t, x, y: _quotient(x, y),
    "pow": lambda t, x, y: _power(x, t.args[1], y),
    "copysign": _copied_sign,
    "poly": lambda t, x, y: FINITE if x.is_finite else UNKNOWN,
    "size": lambda t, x, y: Range(1, MOST),
    "reduce": _reduced,
}
"""The range of a term by those of its first and its last operand; of fmod and bits nothing is known."""


def _range(t: Term, args: tuple[Range, ...]) -> Range:
    """The range of a term by those of its operands."""
    if t.dtype.kind == "b" or t.op in _COMPARISONS:
        return _BOOL
    if t.dtype.kind != "f":
        return args[0] if t.op in ("reshape", "expand") else FINITE
    if t.op == "const":
        number = float(t.number)
        return UNKNOWN if math.isnan(number) else Range(number, number)
    if t.op == "where":
        _, x, y = args
        return Range(min(x.low, y.low), max(x.high, y.high), x.nan or y.nan, x.zero or y.zero)
    rule = _RULES.get(t.op)
    return UNKNOWN if rule is None else rule(t, args[0], args[-1])


@lru_cache(maxsize=1024)
def ranges(results: tuple[Term, ...], inputs: tuple[Range, ...]) -> Mapping[int, Range]:
    """The range of every term on which results depend.

    Args:
        results: the results.
        inputs: the range of each input.

    Returns:
        The ranges, by the id of the term.
    """
    found: dict[int, Range] = {}
    for t in order(results):
        if t.op == "input":
            known = inputs[t.extra]
            found[id(t)] = known if t.dtype.kind in "f" else _BOOL if t.dtype.kind == "b" else FINITE
        else:
            found[id(t)] = _range(t, tuple(found[id(a)] for a in t.args))
    return found


def number_of(x: Any) -> Range:
    """The range of the elements of a constant array."""
    with np.errstate(all="ignore"):
        plain = np.asarray(x, np.float64)
        if not plain.size or np.isnan(plain).any():
            return UNKNOWN
        return Range(float(plain.min()), float(plain.max()), False, bool((plain == 0).any()))
