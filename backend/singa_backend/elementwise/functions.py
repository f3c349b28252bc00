"""Functions in IR from +, -, *, /, fma, sqrt, comparisons, selections and steps on integers only: all processors have equal bits.

exp, expm1, log, log1p and tanh have a form for float32; the others compute float32 in float64 and round once.
NaN, infinities, -0 and subnormal numbers are as IEEE 754 has them in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .builder import INTEGER, LANES, Builder, Vector

BOUNDS: dict[str, tuple[float, float]] = {
    "exp": (1.1, 1.0), "expm1": (1.6, 1.9), "log": (0.8, 0.8), "log1p": (0.9, 0.9), "tanh": (1.5, 2.7),
    "sin": (0.51, 1.6), "cos": (0.51, 1.6), "tan": (0.51, 3.1), "asin": (0.51, 3.1), "acos": (0.51, 3.2), "atan": (0.51, 1.8),
    "sinh": (0.51, 2.5), "cosh": (0.51, 1.5), "asinh": (0.51, 1.8), "acosh": (0.51, 2.7), "atanh": (0.51, 2.1),
    "pow": (0.51, 1.3),
}  # fmt: skip
"""The largest errors in units in the last place of float32 and of float64, which tests measure."""

# The coefficients, lowest power first: tests/helpers/fit.py
_EXP = {
    "float": (0.5, 0.16666576305560638, 0.041666553762567638, 0.0083632927530306023, 0.0013926325618133462),
    "double": (
        0.5, 0.16666666666666671, 0.04166666666666667, 0.008333333333326025, 0.001388888888888367, 0.00019841269875205077,
        2.4801587325822282e-5, 2.7557254913486702e-6, 2.7557273295539724e-7, 2.5105419192016336e-8, 2.0914831351380411e-9,
    ),
}  # fmt: skip
_LOG = (
    0.33333331180030048, -0.24999996957950882, 0.20000715748892102, -0.16667802319501254, 0.1424905764569748,
    -0.12425687331451106, 0.11685419923486739, -0.11479733846637636, 0.069716114714511778,
)  # fmt: skip
_LOG_WIDE = (
    0.66666666666666666, 0.40000000000000877, 0.28571428570803612, 0.22222222391713917, 0.18181795640132906,
    0.15386239702814658, 0.13268773138656885, 0.13086626147840102,
)  # fmt: skip
_TANH = (-0.33333330313216938, 0.13332913230492303, -0.053873596274885372, 0.021109144015030187, -0.0062662546510456054)
_ATAN = (
    -0.3333333333333333, 0.19999999999995521, -0.14285714284666543, 0.11111111015256362, -0.090909045781239019,
    0.076921831908260866, -0.06664511447381948, 0.058581489128022099, -0.050854497379402599, 0.039231658295587191,
    -0.019176887119062259,
)  # fmt: skip
_SIN = (
    -0.16666666666666667, 0.0083333333333333315, -0.00019841269841265065, 2.7557319219339167e-6, -2.5052106232447577e-8,
    1.6058531618986147e-10, -7.586697117706918e-13,
)  # fmt: skip
_COS = (
    0.041666666666666667, -0.0013888888888888888, 2.4801587301584646e-5, -2.7557319221402824e-7, 2.0876755791080424e-9,
    -1.1470460887609959e-11, 4.7458719020432915e-14,
)  # fmt: skip
TWO_OVER_PI = (
    0, 11743562013128004905, 18169587780923219392, 15808362127397457985, 18325537948574664033, 13196794004601950944,
    452944820249399836, 18311050168422213438, 16754012890938950788, 16833452818741296705, 4148332274289687028,
    11278244420634880059, 2303758334597371919, 17235013589178936607, 7869616827067468215, 5712322887342352941,
    8441921394348257659, 4397547296490951402, 7780917995555872008, 6197850593633725355, 17352294737506481693,
)  # fmt: skip
"""64 zero bits and the fraction of 2 / pi, in words."""

_LN2 = {"float": (0.693145751953125, 1.4286068203094172e-6), "double": (0.69314718036912381649, 1.9082149292705877e-10)}
_PIO2 = tuple(map(float.fromhex, ("0x1.921fb54442d18p+0", "0x1.1a62633145c06p-54", "0x1.c1cd129000000p-107")))
_ROUND = {"float": 1.5 * 2.0**23, "double": 1.5 * 2.0**52}
_THIRD = 2 / 3, 3.7007434154171886e-17
"""2 / 3 as the sum of two numbers."""

_HUGE = 2.0**27
"""From here on the angle is reduced by the bits of 2 / pi."""


def _words(values: tuple[int, ...]) -> str:
    return ", ".join(f"i64 {v}" for v in values)


_ANGLE = f"""
@two_over_pi = internal unnamed_addr constant [{len(TWO_OVER_PI)} x i64] [{_words(TWO_OVER_PI)}]
declare i64 @llvm.fshl.i64(i64, i64, i64)
declare i128 @llvm.ctlz.i128(i128, i1)
declare double @llvm.fma.f64(double, double, double)
define internal double @huge_angle(double %x, ptr %low, ptr %quarter) noinline nounwind {{
  %bits = bitcast double %x to i64
  %below1 = and i64 %bits, 4503599627370495
  %mantissa = or i64 %below1, 4503599627370496
  %above = lshr i64 %bits, 52
  %exponent = and i64 %above, 2047
  %place = sub i64 %exponent, 1013
  %word = lshr i64 %place, 6
  %shift = and i64 %place, 63
  %p0 = getelementptr i64, ptr @two_over_pi, i64 %word
  %p1 = getelementptr i64, ptr %p0, i64 1
  %p2 = getelementptr i64, ptr %p0, i64 2
  %p3 = getelementptr i64, ptr %p0, i64 3
  %w0 = load i64, ptr %p0
  %w1 = load i64, ptr %p1
  %w2 = load i64, ptr %p2
  %w3 = load i64, ptr %p3
  %a0 = call i64 @llvm.fshl.i64(i64 %w0, i64 %w1, i64 %shift)
  %a1 = call i64 @llvm.fshl.i64(i64 %w1, i64 %w2, i64 %shift)
  %a2 = call i64 @llvm.fshl.i64(i64 %w2, i64 %w3, i64 %shift)
  %m = zext i64 %mantissa to i128
  %b1 = zext i64 %a1 to i128
  %b2 = zext i64 %a2 to i128
  %c2 = mul i128 %b2, %m
  %carry2 = lshr i128 %c2, 64
  %d1 = mul i128 %b1, %m
  %c1 = add i128 %d1, %carry2
  %carry1 = lshr i128 %c1, 64
  %carried = trunc i128 %carry1 to i64
  %d0 = mul i64 %a0, %mantissa
  %c0 = add i64 %d0, %carried
  %e0 = zext i64 %c0 to i128
  %e1 = shl i128 %e0, 64
  %e2 = and i128 %c1, 18446744073709551615
  %product = or i128 %e1, %e2
  %fraction = shl i128 %product, 2
  %below = icmp slt i128 %fraction, 0
  %up = zext i1 %below to i64
  %whole = lshr i64 %c0, 62
  %q = add i64 %whole, %up
  %minus = sub i128 0, %fraction
  %size = select i1 %below, i128 %minus, i128 %fraction
  %zeros = call i128 @llvm.ctlz.i128(i128 %size, i1 false)
  %left = shl i128 %size, %zeros
  %top = lshr i128 %left, 64
  %t = trunc i128 %top to i64
  %t0 = and i64 %t, -2048
  %t1 = and i64 %t, 2047
  %f0 = uitofp i64 %t0 to double
  %f1 = uitofp i64 %t1 to double
  %r0 = fmul double %f0, 0x3FF921FB54442D18
  %n0 = fneg double %r0
  %r1 = call double @llvm.fma.f64(double %f0, double 0x3FF921FB54442D18, double %n0)
  %r2 = call double @llvm.fma.f64(double %f0, double 0x3C91A62633145C06, double %r1)
  %r3 = call double @llvm.fma.f64(double %f1, double 0x3FF921FB54442D18, double %r2)
  %r4 = fadd double %r0, %r3
  %l0 = fsub double %r0, %r4
  %l1 = fadd double %l0, %r3
  %zeros64 = trunc i128 %zeros to i64
  %power = sub i64 959, %zeros64
  %scalebits = shl i64 %power, 52
  %scale = bitcast i64 %scalebits to double
  %r = fmul double %r4, %scale
  %l = fmul double %l1, %scale
  %negative = icmp slt i64 %bits, 0
  %turned = xor i1 %negative, %below
  %rn = fneg double %r
  %angle = select i1 %turned, double %rn, double %r
  %ln = fneg double %l
  %rest = select i1 %turned, double %ln, double %l
  store double %rest, ptr %low
  %qn = sub i64 0, %q
  %quarters = select i1 %negative, i64 %qn, i64 %q
  store i64 %quarters, ptr %quarter
  ret double %angle
}}
"""
"""x = quarter pi / 2 + angle + low for |x| of 2**27 or more: x times 192 bits of 2 / pi, from the first whose product is not a
multiple of 4."""


def polynomial(k: Builder, x: Vector, coefficients: tuple[float, ...]) -> Vector:
    """A polynomial by Horner's rule, each step one fma."""
    y = k.vector(coefficients[-1], x.type)
    for c in coefficients[-2::-1]:
        y = k.fma(y, x, c)
    return y


def _abs(k: Builder, x: Vector) -> Vector:
    return k.call("fabs", x)


def _power(n: Vector, kind: str) -> Vector:
    """2**n from the integer n + bias, whatever its bits above the exponent's."""
    return n.two(INTEGER[kind][1], "shl").to("bitcast", kind)


def _remainder(k: Builder, x: Vector, up: float) -> tuple[Vector, Vector]:
    """The integer n + up, and r of x = n ln2 + r."""
    big = _ROUND[x.type] + up
    t = k.fma(x, 1 / math.log(2), big)
    n = t - big
    high, rest = _LN2[x.type]
    return t.bits(), k.fma(n, -rest, k.fma(n, -high, x))


def _reduced(k: Builder, x: Vector, up: float) -> tuple[Vector, Vector]:
    """The integer n + up and exp(r) - 1, where x = n ln2 + r."""
    n, r = _remainder(k, x, up)
    return n, k.fma(r * r, polynomial(k, r, _EXP[x.type]), r)


def exp(k: Builder, x: Vector, nonpositive: bool = False) -> Vector:
    """By a step on the exponent while the result is normal, and for x <= 0 in float32 by a scale that keeps it so."""
    if nonpositive and x.type == "float":
        n, r = _remainder(k, x.bound("gt", -104.0), INTEGER[x.type][2] + 64)
        return polynomial(k, r, (1.0, 1.0, *_EXP[x.type])) * _power(n, x.type) * 2.0**-64
    n, r = _remainder(k, x, 0)
    y = polynomial(k, r, (1.0, 1.0, *_EXP[x.type]))
    result = k.kept((y.bits() + n.two(INTEGER[x.type][1], "shl")).to("bitcast", x.type))  # not of NaN
    normal = _abs(k, x) < (86.0 if x.type == "float" else 707.0)
    k.if_any(normal ^ -1, lambda: k.put(exp_sum(k, x), result))
    return k.get(result, x.type)


def exp_sum(k: Builder, x: Vector, low: Vector | None = None, halved: bool = False) -> Vector:
    """Of x + low, or its half; two factors as scale: exact subnormal results, infinity above."""
    lowest, highest = (-104.0, 89.0) if x.type == "float" else (-746.0, 711.0)
    n, r = _remainder(k, x.bound("gt", lowest).bound("lt", highest), 2 * INTEGER[x.type][2])
    y, half = polynomial(k, r if low is None else r + low, (1.0, 1.0, *_EXP[x.type])), n.two(1, "lshr")
    return (y * 0.5 if halved else y) * _power(half, x.type) * _power(n - half, x.type)


def expm1(k: Builder, x: Vector) -> Vector:
    """By half of the scale, which itself would overflow."""
    low, high, tiny = (-20.0, 89.0, 1e-10) if x.type == "float" else (-40.0, 710.0, 1e-20)
    n, p = _reduced(k, x.bound("gt", low).bound("lt", high), INTEGER[x.type][2] - 1)
    s = _power(n, x.type)
    y = k.fma(s, p, s - 0.5)
    return x.where(_abs(k, x) < tiny, y + y)


def _split(k: Builder, u: Vector) -> tuple[Vector, Vector]:
    """The numbers n and f with u = 2**n (1 + f), f from sqrt(1/2) - 1 to sqrt(2) - 1, for u > 0."""
    integer, mantissa, bias = INTEGER[u.type]
    small = u < 2.0 ** (1 - bias)
    u = (u * 2.0 ** (mantissa + 1)).where(small, u)
    e = (u.bits() - k.vector(math.sqrt(0.5), u.type).bits()).two(mantissa, "ashr")
    f = (u.bits() - e.two(mantissa, "shl")).to("bitcast", u.type) - 1.0
    n = e.to("sitofp", u.type) if integer == "i32" else e.to("trunc", "i32").to("sitofp", u.type)
    return (n - (mantissa + 1.0)).where(small, n), f


def _log(k: Builder, u: Vector, correction: Vector | None = None) -> Vector:
    """log(u) + correction / u for u > 0."""
    n, f = _split(k, u)
    square = f * f * 0.5
    if u.type == "float":
        rest = f * f * f * polynomial(k, f, _LOG)
    else:
        s = f / (f + 2.0)
        rest = s * (square + s * s * polynomial(k, s * s, _LOG_WIDE))
    high, low = _LN2[u.type]
    small = k.fma(n, low, rest)
    small = small if correction is None else small + correction / u
    return k.fma(n, high, f - (square - small))


def _with_poles(k: Builder, x: Vector, y: Vector, pole: float) -> Vector:
    """A logarithm with its values at infinity, NaN, the pole and below."""
    y = y.where(x < math.inf, x)
    y = k.vector(-math.inf, x.type).where(x.compare("eq", pole), y)
    return k.vector(math.nan, x.type).where(x < pole, y)


def log(k: Builder, x: Vector) -> Vector:
    """By f - (f**2 / 2 - ..) with f = x / 2**n - 1."""
    return _with_poles(k, x, _log(k, x), 0.0)


def log1p(k: Builder, x: Vector) -> Vector:
    """log(u) with u = 1 + x, and what the rounding of u lost divided by u."""
    u = x + 1.0
    y = _log(k, u, (x - (u - 1.0)).where(u < 2.0, 1.0 - (u - x)))
    return _with_poles(k, x, x.where(_abs(k, x) < (2.0**-25 if x.type == "float" else 2.0**-54), y), -1.0)


def tanh(k: Builder, x: Vector) -> Vector:
    """By t / (t + 2) with t = exp(2 |x|) - 1; in float32 an odd polynomial below 0.6."""
    a = _abs(k, x)
    n, p = _reduced(k, a.bound("lt", 20.0 if x.type == "float" else 44.0) * 2.0, INTEGER[x.type][2])
    s = _power(n, x.type)
    t = k.fma(s, p, s - 1.0)
    y = t / (t + 2.0)
    if x.type == "float":
        z = x * x
        y = k.fma(z * a, polynomial(k, z, _TANH), a).where(a < 0.6, y)
    else:
        y = a.where(a < 2.0**-28, y)  # exact for subnormal numbers
    return k.call("copysign", y, x)


def _angle(k: Builder, x: Vector, pair: bool) -> list[Vector]:
    """The number of quarter turns, modulo 4, the angle that is left, and for a pair what its rounding lost."""
    t = k.fma(x, 2 / math.pi, _ROUND["double"])
    n = t - _ROUND["double"]
    first = k.fma(n, -_PIO2[0], x)
    if pair:
        product = n * -_PIO2[1]
        second = first + product
        back = second - first
        lost = (first - (second - back)) + (product - back)
        rest = k.fma(n, -_PIO2[2], lost + k.fma(n, -_PIO2[1], -product))
        r = second + rest
        results = [t.bits(), r, (second - r) + rest]
    else:
        results = [t.bits(), k.fma(n, -_PIO2[2], k.fma(n, -_PIO2[1], first))]
    places, a = [k.kept(v) for v in results], _abs(k, x)
    huge = (a >= _HUGE) & (a < math.inf)

    def exact() -> None:
        k.declared.add(_ANGLE)
        spots = [k.place(f"[{LANES} x i64]") for _ in range(3)]
        k.put(x.where(huge, _HUGE), spots[1])

        def one(i: str) -> None:
            quarter, place, low = (k.raw(f"getelementptr i64, ptr {spot}, i64 {i}") for spot in spots)
            value = k.raw(f"load double, ptr {place}")
            angle = k.raw(f"call double @huge_angle(double {value}, ptr {low}, ptr {quarter})")
            k.emit(f"store double {angle}, ptr {place}")

        k.loop(str(LANES), 1, one)
        for spot, place, v in zip(spots, places, results, strict=False):
            k.put(k.get(spot, v.type).where(huge, v), place)

    k.if_any(huge, exact)
    return [k.get(p, v.type) for p, v in zip(places, results, strict=True)]


def _turned(k: Builder, x: Vector, quarter: int, ratio: bool = False) -> Vector:
    """The sine of x and a number of quarter turns, or the tangent of x."""
    turns, r, *low = _angle(k, x, ratio)
    q, z = turns + quarter, r * r
    third, fourth = polynomial(k, z, _SIN), polynomial(k, z, _COS)
    if ratio:
        s = r + k.fma(r * z, third, low[0])
        c = k.fma(z, -0.5, 1.0) + k.fma(z * z, fourth, -(r * low[0]))
    else:
        s, c = k.fma(r * z, third, r), k.fma(z * z, fourth, k.fma(z, -0.5, 1.0))
    even = (q & 1).compare("eq", 0)
    y = s.where(even, -c) / c.where(even, s) if ratio else s.where(even, c)
    y = y if ratio else y.where((q & 2).compare("eq", 0), -y)
    return y if quarter else x.where(x.compare("eq", 0.0), y)  # -0


def sin(k: Builder, x: Vector) -> Vector:
    """Right for all finite x."""
    return _turned(k, x, 0)


def cos(k: Builder, x: Vector) -> Vector:
    """Right for all finite x."""
    return _turned(k, x, 1)


def tan(k: Builder, x: Vector) -> Vector:
    """Right for all finite x."""
    return _turned(k, x, 0, ratio=True)


def _slope(k: Builder, rise: Vector, run: Vector) -> Vector:
    """The angle of a slope from 0 to infinity: the sides are swapped above 1 and turned by pi / 4 above sqrt(2) - 1."""
    steep = rise > run
    low, high = run.where(steep, rise), rise.where(steep, run)
    turned = low > high * (math.sqrt(2) - 1)
    t = (low - high).where(turned, low) / (low + high).where(turned, high)
    y = k.fma(t * (t * t), polynomial(k, t * t, _ATAN), t)
    y = (y + math.pi / 4).where(turned, y)
    return (math.pi / 2 - y).where(steep, y)


def atan(k: Builder, x: Vector) -> Vector:
    """The angle of a slope of |x|."""
    return k.call("copysign", _slope(k, _abs(k, x), k.vector(1.0, x.type)), x)


def asin(k: Builder, x: Vector) -> Vector:
    """The angle in the right triangle whose hypotenuse is 1."""
    return k.call("copysign", _slope(k, _abs(k, x), k.call("sqrt", k.fma(-x, x, 1.0))), x)


def acos(k: Builder, x: Vector) -> Vector:
    """Twice the angle of half the arc."""
    return _slope(k, k.call("sqrt", (1.0 - x) / (x + 1.0)), k.vector(1.0, x.type)) * 2.0


def sinh(k: Builder, x: Vector) -> Vector:
    """(t + t / (t + 1)) / 2 with t = exp(|x|) - 1, all of it divided by 4 against overflow."""
    a = _abs(k, x)
    n, p = _reduced(k, a.bound("lt", 710.7), INTEGER[x.type][2] - 2)
    s = _power(n, x.type)
    t = k.fma(s, p, s - 0.25)
    y = t + t / k.fma(t, 4.0, 1.0)
    return k.call("copysign", a.where(a < 2.0**-28, y + y), x)


def cosh(k: Builder, x: Vector) -> Vector:
    """By h + 1 / (4 h) with h = exp(|x|) / 2."""
    h = exp_sum(k, _abs(k, x), halved=True)
    return h + 0.25 / h


def asinh(k: Builder, x: Vector) -> Vector:
    """By log1p(a + a**2 / (1 + sqrt(a**2 + 1))); log1p(a) + ln2 where the square would overflow."""
    a = _abs(k, x)
    square, huge = a * a, a > 1e150
    y = log1p(k, a.where(huge, a + square / (k.call("sqrt", square + 1.0) + 1.0)))
    return k.call("copysign", (y + math.log(2)).where(huge, y), x)


def acosh(k: Builder, x: Vector) -> Vector:
    """By log1p(t + sqrt(t (t + 2))) with t = x - 1; log1p(x) + ln2 where the square would overflow."""
    t, huge = x - 1.0, x > 1e150
    y = log1p(k, x.where(huge, t + k.call("sqrt", t * (t + 2.0))))
    return k.vector(math.nan, x.type).where(x < 1.0, (y + math.log(2)).where(huge, y))


def atanh(k: Builder, x: Vector) -> Vector:
    """Half of log1p(2 a / (1 - a))."""
    a = _abs(k, x)
    return k.call("copysign", log1p(k, (a + a) / (1.0 - a)) * 0.5, x)


def _log_pair(k: Builder, a: Vector) -> tuple[Vector, Vector]:
    """The logarithm of a > 0 as the sum of two numbers, right to about 2**-64."""
    n, f = _split(k, a)
    d = f + 2.0
    s = f / d
    s_low = (k.fma(-s, d, f) - s * (f - (d - 2.0))) / d
    z = s * s
    z_low = k.fma(s, s, -z) + (s + s) * s_low
    c = z * polynomial(k, z, _LOG_WIDE[1:])
    q = c + _THIRD[0]
    q_low = (_THIRD[0] - q) + c + _THIRD[1]
    u = s * z
    u_low = k.fma(s, z, -u) + k.fma(s, z_low, s_low * z)
    v = u * q
    v_low = k.fma(u, q, -v) + k.fma(u, q_low, u_low * q)
    high, low = _LN2[a.type]
    n_high, twice = n * high, s + s
    first = n_high + twice
    second = first + v
    rest = ((n_high - first) + twice) + (v_low + k.fma(n, low, s_low + s_low))
    rest = ((first - second) + v) + rest
    total = second + rest
    return total, (second - total) + rest


def power(k: Builder, x: Vector, y: Vector, narrow: bool = False) -> Vector:
    """exp(y log|x|) with the special values of C's pow; narrow: the result is rounded to float32."""
    a, one = _abs(k, x), k.vector(1.0, x.type)
    whole, half = k.call("roundeven", y).compare("eq", y), y * 0.5
    odd = whole & k.call("roundeven", half).compare("ne", half)
    if narrow:
        z = exp_sum(k, y * log(k, a))
    else:
        high, low = _log_pair(k, a)
        low = low.where((a > 0.0) & (a < math.inf), 0.0)
        high = _with_poles(k, a, high, 0.0)
        product = y * high
        rest = k.fma(y, high, -product) + y * low
        z = exp_sum(k, product, rest.where(_abs(k, product) < 1000.0, 0.0))
    z = one.where(a.compare("eq", 1.0) & (_abs(k, y) > 1e300), z)
    z = k.vector(math.nan, x.type).where((x < 0.0) & (a < math.inf) & (whole ^ -1), z)
    z = (-z).where((x.bits() < 0) & odd, z)
    z = one.where(x.compare("eq", -1.0) & _abs(k, y).compare("eq", math.inf), z)
    return one.where(y.compare("eq", 0.0) | x.compare("eq", 1.0), z)


NARROW: dict[str, Callable[[Builder, Vector], Vector]] = {"exp": exp, "expm1": expm1, "log": log, "log1p": log1p, "tanh": tanh}
"""The functions that have a form for float32."""

WIDE: dict[str, Callable[[Builder, Vector], Vector]] = {
    "sin": sin, "cos": cos, "tan": tan, "asin": asin, "acos": acos, "atan": atan, "sinh": sinh, "cosh": cosh, "asinh": asinh,
    "acosh": acosh, "atanh": atanh,
}  # fmt: skip
"""The functions that are computed in float64."""

COSTLY = frozenset(["poly", "pow", *NARROW, *WIDE])
"""The primitives whose values are kept rather than computed again."""


def function(k: Builder, name: str, args: list[Vector]) -> Vector:
    """A function of real numbers by its name."""
    kind = args[0].type
    if name in NARROW:
        return NARROW[name](k, args[0])
    wide = [a if a.type == "double" else a.to("fpext", "double") for a in args]
    y = power(k, wide[0], wide[1], kind == "float") if name == "pow" else WIDE[name](k, wide[0])
    return y if kind == "double" else y.to("fptrunc", kind)
