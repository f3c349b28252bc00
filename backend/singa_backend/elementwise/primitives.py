"""The primitives of an expression in IR: each is rounded once, and no value of an operand traps or is undefined."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .builder import SUFFIX, Builder, Vector, type_of
from .expression import Term
from .functions import COSTLY, exp, function, polynomial

_MOVES = frozenset(["input", "const", "cast", "where", "bits", "reshape", "expand"])
"""The primitives of float16: all others compute in float32."""


_KNOWN = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
_LONG = frozenset(["i4", "i8", "u4", "u8"])
"""The integers that float32 does not hold exactly."""


class NotEmitted(Exception):
    """An expression has no machine code; the message names the reason."""


def refusal(term: Term) -> str:
    """Why a term cannot be lowered; empty if it can."""
    op, dtypes = term.op, {term.dtype, *(a.dtype for a in term.args)}
    if odd := [d for d in dtypes if d.str[1:] not in _KNOWN or not d.isnative or (d == np.float16 and op not in _MOVES)]:
        return f"{op} of {odd[0]}"
    if op == "cast" and term.dtype == np.float16 and term.args[0].dtype.str[1:] in _LONG:
        return f"cast of {term.args[0].dtype} to float16"
    kind = (term.args[0] if term.args else term).dtype.kind
    if kind == "f" and op in ("fmod", "mod", "floordiv", "and", "or", "xor", "not", "shl", "shr"):
        return f"{op} of real numbers"
    if kind != "f" and op in COSTLY - {"pow"} | {"div", "sqrt", "copysign", "signbit"}:
        return f"{op} of {term.args[0].dtype}"
    if op == "bits" and "b" in (kind, term.dtype.kind):
        return "bits of logical values"
    if kind == "b" and op in ("sub", "neg", "pow", "floordiv", "mod", "fmod", "sign", "shl", "shr"):
        return f"{op} of logical values"
    return ""


def lowered(k: Builder, t: Term, args: list[Vector]) -> Vector:
    """The vector of a term from those of its operands."""
    op = t.op
    if op in ("reshape", "expand"):
        return args[0]
    if op == "cast":
        return cast(k, args[0], t.args[0].dtype, t.dtype)
    if op == "bits":
        return args[0] if type_of(t.dtype) == args[0].type else args[0].to("bitcast", type_of(t.dtype))
    if op == "where":
        return args[1].where(args[0], args[2])
    if op == "poly":
        return polynomial(k, args[0], t.extra)
    if op == "exp":
        return exp(k, args[0], sign(t.args[0]) < 0)
    if op == "pow" and not args[0].real:
        return _integer_power(k, args[0], args[1])
    if op in COSTLY:
        return function(k, op, args)
    unsigned = t.args[0].dtype.kind in "ub"
    if op in _SHARED:
        return _SHARED[op](k, args, unsigned)
    if op in ("max", "min") and args[0].real and t.args[1].op == "const" and not np.isnan(t.args[1].number):
        return args[0].bound("gt" if op == "max" else "lt", t.args[1].number)
    special = (_REAL if args[0].real else _INTEGER).get(op)
    if special is None:
        raise NotEmitted(f"{op} of {t.args[0].dtype}")
    return special(k, args, unsigned)


_Lowering = Callable[[Builder, list[Vector], bool], Vector]


def _arithmetic(words: str, real: str, logical: str) -> _Lowering:
    def lower(k: Builder, a: list[Vector], unsigned: bool) -> Vector:
        return a[0].two(a[1], real if a[0].real else logical if a[0].type == "i1" else words)

    return lower


def _comparison(how: str) -> _Lowering:
    return lambda k, a, unsigned: a[0].compare(how, a[1], unsigned)


def _extreme(how: str, loses: bool) -> _Lowering:
    """The larger or the smaller; a NaN of either stays, or loses."""

    def lower(k: Builder, a: list[Vector], unsigned: bool) -> Vector:
        x, y = a
        chosen, nan = x.where(x.compare(how, y, unsigned), y), y if loses else x
        return x.where(nan.compare("uno", nan), chosen) if x.real else chosen

    return lower


_SHARED: dict[str, _Lowering] = {
    "add": _arithmetic("add", "fadd", "or"),
    "sub": _arithmetic("sub", "fsub", "xor"),
    "mul": _arithmetic("mul", "fmul", "and"),
    "neg": lambda k, a, unsigned: -a[0],
    "max": _extreme("gt", False),
    "min": _extreme("lt", False),
    "fmax": _extreme("gt", True),
    "fmin": _extreme("lt", True),
    **{how: _comparison(how) for how in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def _real_sign(k: Builder, a: list[Vector], unsigned: bool) -> Vector:
    x = a[0]
    y = k.vector(1.0, x.type).where(x > 0.0, k.vector(-1.0, x.type).where(x < 0.0, 0.0))
    return x.where(x.compare("uno", x), y)


def _intrinsic(name: str) -> _Lowering:
    return lambda k, a, unsigned: k.call(name, *a)


_REAL: dict[str, _Lowering] = {
    "div": lambda k, a, unsigned: a[0] / a[1],
    "sqrt": _intrinsic("sqrt"),
    "abs": _intrinsic("fabs"),
    "copysign": _intrinsic("copysign"),
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "rint": _intrinsic("roundeven"),
    "trunc": _intrinsic("trunc"),
    "sign": _real_sign,
    "signbit": lambda k, a, unsigned: a[0].bits() < 0,
    "isnan": lambda k, a, unsigned: a[0].compare("uno", a[0]),
    "isinf": lambda k, a, unsigned: k.call("fabs", a[0]).compare("eq", math.inf),
    "isfinite": lambda k, a, unsigned: k.call("fabs", a[0]) < math.inf,
}


def _integer_sign(k: Builder, a: list[Vector], unsigned: bool) -> Vector:
    x = a[0]
    below = k.vector(0, x.type) if unsigned else k.vector(-1, x.type).where(x < 0, 0)
    return k.vector(1, x.type).where(x.compare("gt", 0, unsigned), below)


def _quotient(k: Builder, a: list[Vector], unsigned: bool) -> tuple[Vector, Vector]:
    """The truncated quotient and the remainder; both are 0 for a divisor of 0, and the smallest number / -1 wraps."""
    x, b = a
    none, one = b.compare("eq", 0), k.vector(1, x.type)
    if unsigned:
        safe = one.where(none, b)
        q, r = x.two(safe, "udiv"), x.two(safe, "urem")
    else:
        minus = b.compare("eq", -1)
        safe = one.where(none | minus, b)
        q, r = x.two(safe, "sdiv"), x.two(safe, "srem")
        q = (-x).where(minus, q)
    return k.vector(0, x.type).where(none, q), r


def _floored(quotient: bool) -> _Lowering:
    def lower(k: Builder, a: list[Vector], unsigned: bool) -> Vector:
        q, r = _quotient(k, a, unsigned)
        if unsigned:
            return q if quotient else r
        off = r.compare("ne", 0) & ((r ^ a[1]) < 0)
        return (q - 1).where(off, q) if quotient else (r + a[1]).where(off, r)

    return lower


def _shifted(left: bool) -> _Lowering:
    """A shift; by the width or more, nothing of the value is left but the sign."""

    def lower(k: Builder, a: list[Vector], unsigned: bool) -> Vector:
        x, by = a
        width = int(x.type[1:])
        inside = by.compare("lt", width, unsigned=True)
        if left or unsigned:
            return x.two(by.where(inside, 0), "shl" if left else "lshr").where(inside, 0)
        return x.two(by.where(inside, width - 1), "ashr")

    return lower


def _integer_power(k: Builder, x: Vector, y: Vector) -> Vector:
    """By squaring; a check refuses negative powers before."""
    result, base, left = k.kept(k.vector(1, x.type)), k.kept(x), k.kept(y)

    def step(_: str) -> None:
        z, b, n = (k.get(p, x.type) for p in (result, base, left))
        k.put((z * b).where((n & 1).compare("ne", 0), z), result)
        k.put(b * b, base)
        k.put(n.two(1, "lshr"), left)

    k.loop(x.type[1:], 1, step)
    return k.get(result, x.type)


def _same(k: Builder, a: list[Vector], unsigned: bool) -> Vector:
    return a[0]


_INTEGER: dict[str, _Lowering] = {
    "abs": lambda k, a, unsigned: a[0] if unsigned else (-a[0]).where(a[0] < 0, a[0]),
    "sign": _integer_sign,
    "floordiv": _floored(True),
    "mod": _floored(False),
    "fmod": lambda k, a, unsigned: _quotient(k, a, unsigned)[1],
    "and": lambda k, a, unsigned: a[0] & a[1],
    "or": lambda k, a, unsigned: a[0] | a[1],
    "xor": lambda k, a, unsigned: a[0] ^ a[1],
    "not": lambda k, a, unsigned: a[0] ^ -1,
    "shl": _shifted(True),
    "shr": _shifted(False),
    "floor": _same,
    "ceil": _same,
    "rint": _same,
    "trunc": _same,
    "isnan": lambda k, a, unsigned: k.vector(0, "i1"),
    "isinf": lambda k, a, unsigned: k.vector(0, "i1"),
    "isfinite": lambda k, a, unsigned: k.vector(1, "i1"),
}


def cast(k: Builder, x: Vector, old: np.dtype[Any], new: np.dtype[Any]) -> Vector:
    """As NumPy's casts on x86: what is out of range becomes the smallest number, and narrower integers wrap."""
    kind = type_of(new)
    if x.type == kind:
        return x
    x = x.to("fpext", "float") if x.type == "half" else x
    if new.kind == "b":
        return x.compare("ne", 0)
    if kind == "half":
        x = _to_odd(k, x) if x.type == "double" else x if x.real else cast(k, x, old, np.dtype(np.float32))
        return x.to("fptrunc", kind)
    if x.real and kind in SUFFIX:
        return x if kind == x.type else x.to("fpext" if kind == "double" else "fptrunc", kind)
    if x.real:
        return _to_integer(k, x, new)
    if kind in SUFFIX:
        return x.to("uitofp" if old.kind in "ub" else "sitofp", kind)
    return x.to("trunc" if new.itemsize < old.itemsize else "zext" if old.kind in "ub" else "sext", kind)


def _to_odd(k: Builder, x: Vector) -> Vector:
    """To float32, of which the last bit is 1 if that is not exact: a second rounding then is as one."""
    y = x.to("fptrunc", "float")
    size = k.call("fabs", y).to("fpext", "double")
    bits, inexact = y.bits(), size.compare("ne", k.call("fabs", x)) & (x.compare("uno", x) ^ 1)
    below = (bits - 1).where(size > k.call("fabs", x), bits)
    return (below | 1).where(inexact, bits).to("bitcast", "float")


def _to_integer(k: Builder, x: Vector, new: np.dtype[Any]) -> Vector:
    wide, kind = "i64" if new.itemsize == 8 or new == np.uint32 else "i32", type_of(new)
    limit = 2.0 ** (int(wide[1:]) - 1)
    upper = x >= limit if new == np.uint64 else None
    low = x if upper is None else (x - limit).where(upper, x)
    inside = (low >= -limit) & (low < limit)
    least = k.vector(-int(limit), wide)
    y = low.where(inside, 0.0).to("fptosi", wide).where(inside, least)
    if upper is not None:
        y = (y ^ least).where(upper, y)
    return y if wide == kind else y.to("trunc", kind)


def sign(t: Term) -> int:
    """-1 if no element is above 0, 1 if none is below, 0 if that is not known; NaN aside."""
    if t.op == "const":
        return 0 if np.isnan(t.number) else 1 if t.number > 0 else -1
    if t.op in ("reshape", "expand"):
        return sign(t.args[0])
    if t.op in ("abs", "exp", "sqrt") or (t.op == "mul" and t.args[0] is t.args[1]):
        return 1 if t.dtype.kind == "f" else 0
    if t.op == "sub":  # x - max(x)
        second = t.args[1]
        while second.op in ("reshape", "expand"):
            second = second.args[0]
        return -1 if second.op == "reduce" and second.extra[0] == "max" and second.args[0] is t.args[0] else 0
    return -sign(t.args[0]) if t.op == "neg" else -1 if t.op == "min" and -1 in map(sign, t.args) else 0


NEUTRAL: dict[str, Callable[[np.dtype[Any]], float]] = {
    "sum": lambda d: 0,
    "prod": lambda d: 1,
    "any": lambda d: 0,
    "max": lambda d: -math.inf if d.kind == "f" else 0 if d.kind == "b" else int(np.iinfo(d).min),
    "min": lambda d: math.inf if d.kind == "f" else 1 if d.kind == "b" else int(np.iinfo(d).max),
}
"""What a reduction begins with."""


def combined(k: Builder, kind: str, a: Vector, b: Vector, unsigned: bool) -> Vector:
    """One step of a reduction; max and min keep a NaN of either."""
    step = {"sum": "add", "prod": "mul"}.get(kind, kind)
    return a | b if kind == "any" else _SHARED[step](k, [a, b], unsigned)
