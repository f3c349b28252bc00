"""Activations and the error function as NumPy functions that write into the arena, as `elementwise` describes.

Relu returns a negative zero for a negative zero, where the definition returns a positive one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices import special
from ..elementwise.numpy_form import bits, selection
from .elementwise import (
    BOOL,
    FLOATS,
    SIGNED,
    bounded,
    broadcast,
    chain,
    clip,
    compute,
    floats,
    maximum,
    minimum,
    nan_of_infinite,
    number,
    same,
)
from .table import Site, kernel, worst
from .values import Bound, Value


@kernel("Relu", 1, 6, 13, 14, on="numpy")
def relu(site: Site, x: Value) -> Value:
    site.require(x.dtype in FLOATS | SIGNED, f"elements of {x.dtype}")
    zero = number(0, x.dtype)
    top = number(np.inf if x.dtype in FLOATS else np.iinfo(x.dtype).max, x.dtype)
    return compute(site, (x,), x.dtype, lambda y, a: [(clip, (a, zero, top, y))], "numpy.clip", x.finiteness)


@kernel("LeakyRelu", 1, 6, 16, on="numpy")
def leaky_relu(site: Site, x: Value) -> Value:
    alpha = site.attributes["alpha"]
    site.require(0 < alpha <= 1, "alpha is not in (0, 1]")
    slope = number(alpha, floats(site, x))
    return chain(site, x, lambda y, a, t: [(np.multiply, (a, slope, t)), (maximum(y), (a, t))], "maximum", same)


@kernel("PRelu", 7, 9, 16, on="numpy")
def prelu(site: Site, x: Value, slope: Value) -> Value:
    dtype = floats(site, x, slope)
    site.require(slope.ndim <= x.ndim and broadcast(site, (x, slope)) == x.shape, "the slope does not broadcast to x")
    zero = number(0, dtype)

    def recipe(y: Any, a: Any, s: Any, t: Any, m: Any) -> Bound:
        return [(np.multiply, (s, a, t)), (np.greater_equal, (a, zero, m)), *selection(y, m, a, t)]

    finiteness = nan_of_infinite(worst(x, slope))
    return compute(site, (x, slope), dtype, recipe, "numpy.prelu", finiteness, (dtype, BOOL), (0,))


@kernel("ThresholdedRelu", 10, 22, on="numpy")
def thresholded_relu(site: Site, x: Value) -> Value:
    alpha = number(site.attributes["alpha"], floats(site, x))

    def recipe(y: Any, a: Any, m: Any) -> Bound:
        return [(np.greater, (a, alpha, m)), (np.multiply, (bits(a), m, bits(y)))]

    return chain(site, x, recipe, "threshold", same, 0, True)


@kernel("HardSigmoid", 1, 6, 22, on="numpy")
def hard_sigmoid(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    alpha, beta, zero, one = (number(v, dtype) for v in (site.attributes["alpha"], site.attributes["beta"], 0, 1))

    def recipe(y: Any, a: Any) -> Bound:
        return [(np.multiply, (a, alpha, y)), (np.add, (y, beta, y)), (clip, (y, zero, one, y))]

    return chain(site, x, recipe, "hardsigmoid", bounded, 0)


@kernel("HardSwish", 14, 22, on="numpy")
def hard_swish(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    alpha, beta, zero, one = (number(v, dtype) for v in (1 / 6, 0.5, 0, 1))

    def recipe(y: Any, a: Any, t: Any) -> Bound:
        return [(np.multiply, (a, alpha, t)), (np.add, (t, beta, t)), (clip, (t, zero, one, t)), (np.multiply, (a, t, y))]

    return chain(site, x, recipe, "hardswish", nan_of_infinite)


@kernel("Elu", 1, 6, 22, on="numpy")
def elu(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    alpha, zero = number(site.attributes["alpha"], dtype), number(0, dtype)

    def recipe(y: Any, a: Any, t: Any, m: Any) -> Bound:
        calls = [(np.expm1, (a, t)), (np.multiply, (t, alpha, t)), (np.greater_equal, (a, zero, m))]
        return [*calls, *selection(y, m, a, t)]

    return chain(site, x, recipe, "elu", same, 1, True)


@kernel("Selu", 1, 6, 22, on="numpy")
def selu(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    gamma, both = site.attributes["gamma"], site.attributes["gamma"] * site.attributes["alpha"]
    scale, below, zero = number(gamma, dtype), number(both, dtype), number(0, dtype)

    def recipe(y: Any, a: Any, t: Any, m: Any) -> Bound:
        calls = [(np.expm1, (a, t)), (np.multiply, (t, below, t)), (np.greater, (a, zero, m)), (np.multiply, (a, scale, y))]
        return [*calls, *selection(y, m, y, t)]

    return chain(site, x, recipe, "selu", same, 1, True)


@kernel("Celu", 12, 28, on="numpy")
def celu(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    site.require(dtype == np.float32 or site.version > 12, "Celu-12 returns float32")
    alpha, zero = number(site.attributes["alpha"], dtype), number(0, dtype)

    def recipe(y: Any, a: Any, t: Any) -> Bound:
        calls = [(np.divide, (a, alpha, t)), (np.expm1, (t, t)), (np.multiply, (t, alpha, t)), (minimum(t), (t, zero))]
        return [*calls, (maximum(y), (a, zero)), (np.add, (y, t, y))]

    return chain(site, x, recipe, "celu", same)


def logistic(a: Any, t: Any, u: Any, y: Any, zero: Any, one: Any) -> Bound:
    """The calls for 1 / (1 + exp(-a)) in a form without overflow; `a` is not read after `y` is written."""
    return [
        (np.absolute, (a, t)),
        (np.negative, (t, t)),
        (np.exp, (t, t)),
        (np.greater_equal, (a, zero, u)),
        (maximum(u), (t, u)),
        (np.add, (t, one, t)),
        (np.divide, (u, t, y)),
    ]


@kernel("Sigmoid", 1, 6, 13, on="numpy")
def sigmoid(site: Site, x: Value) -> Value:
    zero, one = (number(v, floats(site, x)) for v in (0, 1))
    return chain(site, x, lambda y, a, t: logistic(a, t, y, y, zero, one), "sigmoid", bounded)


@kernel("Swish", 24, on="numpy")
def swish(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    zero, one, alpha = (number(v, dtype) for v in (0, 1, site.attributes["alpha"]))

    def recipe(y: Any, a: Any, t: Any, u: Any) -> Bound:
        return [(np.multiply, (a, alpha, u)), *logistic(u, t, u, u, zero, one), (np.multiply, (a, u, y))]

    return chain(site, x, recipe, "swish", nan_of_infinite, 2)


@kernel("Softplus", 1, 22, on="numpy")
def softplus(site: Site, x: Value) -> Value:
    zero = number(0, floats(site, x))

    def recipe(y: Any, a: Any, t: Any) -> Bound:
        calls = [(np.absolute, (a, t)), (np.negative, (t, t)), (np.exp, (t, t)), (np.log1p, (t, t))]
        return [*calls, (maximum(y), (a, zero)), (np.add, (y, t, y))]

    return chain(site, x, recipe, "softplus", same)


@kernel("Softsign", 1, 22, on="numpy")
def softsign(site: Site, x: Value) -> Value:
    one = number(1, floats(site, x))

    def recipe(y: Any, a: Any, t: Any) -> Bound:
        return [(np.absolute, (a, t)), (np.add, (t, one, t)), (np.divide, (a, t, y))]

    return chain(site, x, recipe, "softsign", nan_of_infinite)


@kernel("Mish", 18, 22, on="numpy")
def mish(site: Site, x: Value) -> Value:
    most, two = (number(v, floats(site, x)) for v in (20, 2))

    def recipe(y: Any, a: Any, t: Any, u: Any) -> Bound:
        calls = [(minimum(t), (a, most)), (np.exp, (t, t)), (np.add, (t, two, u)), (np.multiply, (t, u, t))]
        return [*calls, (np.add, (t, two, u)), (np.divide, (t, u, t)), (np.multiply, (a, t, y))]

    return chain(site, x, recipe, "mish", nan_of_infinite, 2)


def _polynomial(y: Any, a: Any, coefficients: Sequence[np.ndarray]) -> Bound:
    """The calls for a polynomial in `a`, its coefficients from the lowest power to the highest."""
    *_, before, last = coefficients
    calls: list[Any] = [(np.multiply, (a, last, y)), (np.add, (y, before, y))]
    for c in coefficients[-3::-1]:
        calls += [(np.multiply, (y, a, y)), (np.add, (y, c, y))]
    return calls


@kernel("Erf", 9, 13, on="numpy")
def erf(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    bound, coefficients = special.ERF[dtype.type]
    last, terms = number(bound, dtype), [number(c, dtype) for c in coefficients]

    def recipe(y: Any, z: Any, a: Any, t: Any) -> Bound:
        calls = [(np.absolute, (z, a)), (minimum(a), (a, last)), *_polynomial(t, a, terms)]
        calls += [(np.negative, (a, a)), (np.multiply, (a, t, t)), (np.expm1, (t, t)), (np.negative, (t, t))]
        return [*calls, (np.copysign, (t, z, y))]

    return chain(site, x, recipe, "erf", bounded, 2)


@kernel("Gelu", 20, on="numpy")
def gelu(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    how = site.attributes["approximate"]
    site.require(how in ("none", "tanh"), "not a valid approximation")
    zero, one, half, three = (number(v, dtype) for v in (0, 1, 0.5, 3))
    if how == "tanh":
        factor, cubic = number(math.sqrt(8 / math.pi), dtype), number(0.044715, dtype)

        def tanh_recipe(y: Any, x: Any, t: Any, u: Any) -> Bound:
            calls = [(np.multiply, (x, cubic, u)), (np.multiply, (u, x, u)), (np.multiply, (u, x, u)), (np.add, (x, u, u))]
            return [*calls, (np.multiply, (u, factor, u)), *logistic(u, t, u, u, zero, one), (np.multiply, (x, u, y))]

        return chain(site, x, tanh_recipe, "gelu", nan_of_infinite, 2)
    bound, coefficients = special.ERFC[dtype.type]
    last, terms, scale, two = (
        number(bound, dtype),
        [number(c, dtype) for c in coefficients],
        number(-math.sqrt(0.5), dtype),
        number(2, dtype),
    )

    def recipe(y: Any, x: Any, z: Any, a: Any, r: Any, p: Any, below: Any) -> Bound:
        calls = [(np.multiply, (x, scale, z)), (np.absolute, (z, a)), (minimum(a), (a, last))]
        calls += [(np.add, (a, three, r)), (np.divide, (one, r, r)), (np.subtract, (a, three, p)), (np.multiply, (p, r, p))]
        calls += [(np.multiply, (a, a, a)), (np.negative, (a, a)), (np.exp, (a, a)), (np.less, (z, zero, below))]
        calls += [*_polynomial(z, p, terms), (np.multiply, (z, r, z)), (np.multiply, (z, a, z))]
        calls += [(np.multiply, (below, two, p)), (np.subtract, (p, z, z)), (np.absolute, (z, z))]
        return [*calls, (np.multiply, (x, half, p)), (np.multiply, (p, z, y))]

    return chain(site, x, recipe, "gelu", nan_of_infinite, 4, True)
