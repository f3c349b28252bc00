"""Activations out of their primitive forms: Gelu, Swish, HardSwish, HardSigmoid, Mish, LeakyRelu, Softplus.

The forms differ in the order of their products.  So the pass starts at the function in the middle (Erf, Tanh, Sigmoid, Clip),
follows its only reader as long as the value is scale * f(x) + shift, or that times x, and compares the numbers that it has then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.graph import Node, Value
from .match import FEW, Anything, ConstantValue, Match, Multiple, Number, Pattern, Rule, Rules, factor, matches, number, op
from .rewriter import Rewriter

STEPS = 8
"""The number of calls that are followed."""
NEAR = 1e-6
"""How far numbers may differ, relative to them."""

Polynomial = dict[int, float]


@dataclass(frozen=True)
class ActivationForm:
    """A result: `op` of x is (shift + scale * f(argument)), times x if `times`.

    Attributes:
        op: the operator.
        argument: the argument of the function, a polynomial of x without a constant term; None for any multiple of x.
        shift: what is added to the function.
        scale: the factor of the function.
        attributes: the attributes of the operator, from the factor of x in the argument.
    """

    op: str
    argument: Polynomial | None
    shift: float
    scale: float
    attributes: Callable[[float], dict[str, object]] = lambda times: {}


ROOT = math.sqrt(2 / math.pi)
ERF = (ActivationForm("Gelu", {1: math.sqrt(0.5)}, 0.5, 0.5),)
TANH = (ActivationForm("Gelu", {1: ROOT, 3: ROOT * 0.044715}, 0.5, 0.5, lambda times: {"approximate": "tanh"}),)
SIGMOID = (
    ActivationForm("Gelu", {1: 2 * ROOT, 3: 2 * ROOT * 0.044715}, 0.0, 1.0, lambda times: {"approximate": "tanh"}),
    ActivationForm("Swish", None, 0.0, 1.0, lambda times: {} if times == 1 else {"alpha": times}),
)
CLIP = (ActivationForm("HardSwish", {0: 3.0, 1: 1.0}, 0.0, 1 / 6),)
CLIP_6 = (ActivationForm("HardSwish", {0: 0.5, 1: 1 / 6}, 0.0, 1.0),)
MISH = (ActivationForm("Mish", {1: 1.0}, 0.0, 1.0),)
HARD_SIGMOID = (ActivationForm("HardSwish", {1: 1.0}, 0.0, 1.0),)


X, CONSTANT = Anything(), ConstantValue()
MULTIPLE = Multiple(X, least=1, most=1)
ABOVE, BELOW = op.Relu(X), op.Relu(-X) * CONSTANT
BOUND = Number()


def _clipped(x: Pattern, high: float) -> Pattern:
    """A value clipped to 0 and another number; before version 11 the bounds of a Clip were attributes."""
    return op.Clip(x, 0, high) | op.Clip(x, min=0.0, max=high) | op.Min(op.Relu(x), high)


CLIPS = ((_clipped(X, 6), CLIP), (_clipped(X, 1), CLIP_6))


def activations(edit: Rewriter) -> int:
    """For any calls of the form x * (shift + scale * f(p(x))), in any order of the products, replace the last one by one call.

    Erf of x / sqrt(2) and Tanh or Sigmoid of the polynomial of the approximation form Gelu; Sigmoid of a multiple of x Swish;
    Clip of x + 3 to 0 and 6, divided by 6, and HardSigmoid form HardSwish; Tanh of Softplus forms Mish.  The constants must be
    scalars of float32, and the values in the middle must not be used elsewhere.
    """
    count = 0
    for call in edit.named("Erf"):
        count += _match(edit, call, call.inputs[0], ERF)
    for call in edit.named("Tanh"):
        x = call.inputs[0]
        before = edit.made_by(x, "Softplus")
        if before is not None and x is not None and x.is_used_once and call in edit.graph:
            count += _match(edit, call, before.inputs[0], MISH, (before,))
        elif call in edit.graph:
            count += _match(edit, call, call.inputs[0], TANH)
    for call in edit.named("Sigmoid"):
        count += _match(edit, call, call.inputs[0], SIGMOID)
    for call in edit.named("Clip", "Min"):
        for pattern, forms in CLIPS:
            found = next(matches(edit, pattern, call), None)
            if found is not None:
                count += _match(edit, call, found[X], forms, found.calls[1:])
    for call in edit.named("HardSigmoid"):
        if _near(edit.attribute(call, "alpha", 0.2), 1 / 6) and edit.attribute(call, "beta", 0.5) == 0.5:
            count += _match(edit, call, call.inputs[0], HARD_SIGMOID)
    return count


def hard_sigmoids(edit: Rewriter) -> int:
    """For any calls of the form Clip(x + 3, 0, 6) / 6, replace Div, or Mul by 1 / 6, by HardSigmoid(x, 1 / 6, 1 / 2)."""
    return HARD_SIGMOIDS.run(edit)


def _hard_sigmoid(edit: Rewriter, match: Match) -> bool:
    made = edit.call("HardSigmoid", (match[X],), match.origins, match.root.outputs, alpha=1 / 6, beta=0.5)
    return edit.put(match.root, made)


CLIPPED_6 = _clipped(X + 3, 6)
HARD_SIGMOIDS = Rules(Rule(CLIPPED_6 / Number(6, NEAR) | CLIPPED_6 * Number(1 / 6, NEAR), _hard_sigmoid))


def leaky_relus(edit: Rewriter) -> int:
    """For any calls of the form Max(x, a * x), a between 0 and 1, or Where(x > 0, x, a * x), replace the last by LeakyRelu."""
    return LEAKY_RELUS.run(edit)


def _leaky_relu(edit: Rewriter, match: Match) -> bool:
    alpha = match[MULTIPLE]
    if not math.isfinite(alpha) or not _is_float32(edit, match[X]) or (edit.operator(match.root) == "Max" and not 0 < alpha < 1):
        return False
    return edit.put(match.root, edit.call("LeakyRelu", (match[X],), match.origins, match.root.outputs, alpha=alpha))


POSITIVE = op.Greater(X, 0).shared() | op.GreaterOrEqual(X, 0).shared()
NEGATIVE = op.Less(X, 0).shared() | op.LessOrEqual(X, 0).shared()
LEAKY_RELUS = Rules(
    Rule(op.Max(X, MULTIPLE) | op.Where(POSITIVE, X, MULTIPLE) | op.Where(NEGATIVE, MULTIPLE, X), _leaky_relu),
)


def prelus(edit: Rewriter) -> int:
    """For any calls of the form Relu(x) - a * Relu(-x), replace Sub, or Add for -a, by PRelu(x, a); a is a constant."""
    return PRELUS.run(edit)


def _prelu(edit: Rewriter, match: Match) -> bool:
    slope, shape = edit.constant(match[CONSTANT]), edit.shape(match[X])
    if slope is None or slope.dtype != np.float32 or shape is None or slope.ndim > len(shape):
        return False
    if any(d not in (1, s) for d, s in zip(slope.shape[::-1], shape[::-1], strict=False)):
        return False
    if edit.operator(match.root) == "Add" and edit.trains(match[CONSTANT]):
        return False
    value = match[CONSTANT] if edit.operator(match.root) == "Sub" else edit.add_constant(-slope, match[CONSTANT])
    return edit.put(match.root, edit.call("PRelu", (match[X], value), match.origins, match.root.outputs))


PRELUS = Rules(Rule(ABOVE - BELOW | ABOVE + BELOW, _prelu))


def softplus(edit: Rewriter) -> int:
    """For any calls of the form Where(x > c, x, Softplus(x)), where c is at least 18, replace Where by Softplus."""
    return SOFTPLUS.run(edit)


def _softplus(edit: Rewriter, match: Match) -> bool:
    if match[BOUND] < 18:
        return False
    return edit.put(match.root, edit.call("Softplus", (match[X],), match.origins, match.root.outputs))


SOFTPLUS = Rules(Rule(op.Where(op.Greater(X, BOUND).shared(), X, op.Softplus(X).shared()), _softplus))


def _near(a: float, b: float, tolerance: float = NEAR) -> bool:
    return abs(a - b) <= tolerance * abs(b)


def _is_float32(edit: Rewriter, value: Value | None) -> bool:
    """Whether a value is float32, or a tensor of a dtype that is not known."""
    return edit.dtype(value) in (None, np.float32)


def _multiplied(edit: Rewriter, call: Node, value: Value | None) -> float | None:
    """The number by which a Mul or a Div multiplies a value; None for other calls."""
    found = factor(edit, call, value)
    return None if found is None else found[1]


def _bases(edit: Rewriter, value: Value | None) -> list[Any]:
    """A value, and those of which it is a multiple."""
    found = [value]
    for _ in range(2):
        call = edit.made_by(found[-1], "Mul", "Div")
        source = None
        if call is not None:
            source = next((i for i in call.inputs if not edit.is_constant(i) and _multiplied(edit, call, i) is not None), None)
        if source is None:
            break
        found.append(source)
    return found


def _match(edit: Rewriter, call: Node, argument: Any, forms: tuple[ActivationForm, ...], inner: tuple[Any, ...] = ()) -> int:
    """Follow the only reader of the function's value until one of the forms is complete; return the number of rewrites."""
    if call not in edit.graph or not _is_float32(edit, call.outputs[0]):
        return 0
    shift, scale, x = 0.0, 1.0, None
    value, calls = call.outputs[0], [*inner, call]
    for _ in range(STEPS):
        if value is None or not value.is_used_once:
            return 0
        (user,) = value.users
        name, times = edit.operator(user), _multiplied(edit, user, value)
        others = [i for i in user.inputs if i != value]
        if times is not None:
            shift, scale = shift * times, scale * times
        elif name == "Add" and len(others) == 1:
            term, more = _addend(edit, user, others[0], x)
            if term is None:
                return 0
            shift += term
            calls += more
        elif name == "Mul" and len(others) == 1 and x is None:
            found = _multiplier(edit, others[0], argument, forms)
            if found is None:
                return 0
            x, times, more = found
            shift, scale = shift * times, scale * times
            calls += more
        else:
            return 0
        calls.append(user)
        value = user.outputs[0]
        if x is not None and _finish(edit, x, argument, forms, shift, scale, calls):
            return 1
    return 0


def _addend(edit: Rewriter, add: Any, other: Any, x: Any) -> tuple[float | None, list[Any]]:
    """The number that is added: a constant, or the factor of x if the value was multiplied by x."""
    if x is None:
        return number(edit, add, other), []
    calls: list[Any] = []
    found = polynomial(edit, other, x, calls)
    return (found[1] if found is not None and found.keys() == {1} else None), calls


def _multiplier(
    edit: Rewriter, other: Any, argument: Any, forms: tuple[ActivationForm, ...]
) -> tuple[Any, float, list[Any]] | None:
    """The x of a factor that is a multiple of it, so that the argument is a polynomial of x that one of the forms has."""
    for x in _bases(edit, other):
        calls: list[Any] = []
        multiple = polynomial(edit, other, x, calls)
        found = polynomial(edit, argument, x, [])
        if multiple is not None and found is not None and any(_argument_fits(found, f) for f in forms):
            return x, multiple[1], calls
    return None


def _argument_fits(found: Polynomial, form: ActivationForm) -> bool:
    if form.argument is None:
        return found.keys() == {1} and math.isfinite(found[1])
    return found.keys() == form.argument.keys() and all(_near(v, form.argument[k], 1e-5) for k, v in found.items())


def _finish(
    edit: Rewriter, x: Any, argument: Any, forms: tuple[ActivationForm, ...], shift: float, scale: float, calls: list[Any]
) -> bool:
    inner: list[Any] = []
    found = polynomial(edit, argument, x, inner)
    if found is None:
        return False
    for form in forms:
        same = _near(scale, form.scale) and (_near(shift, form.shift) if form.shift else shift == 0)
        pattern = [*inner, *calls]
        if same and _argument_fits(found, form) and edit.inside([c.outputs[0] for c in pattern[:-1]], pattern):
            root = pattern[-1]
            return edit.put(root, edit.call(form.op, (x,), pattern, root.outputs, **form.attributes(found.get(1, 0.0))))
    return False


def polynomial(edit: Rewriter, value: Value | None, x: Any, calls: list[Any], depth: int = 6) -> Polynomial | None:
    """A value as a polynomial of x of degree 3 at most: {degree: coefficient}; the calls that compute it are added to `calls`."""
    if value == x:
        return {1: 1.0}
    if edit.is_constant(value):
        array = None if edit.trains(value) else edit.constant(value, FEW)
        return {0: float(array.reshape(-1)[0])} if array is not None and array.size == 1 and array.dtype == np.float32 else None
    call = None if value is None else value.producer
    name = edit.operator(call)
    if call is None or depth == 0 or name not in ("Add", "Sub", "Mul", "Div", "Pow", "Neg"):
        return None
    if name != "Pow" and any(edit.is_constant(i) and number(edit, call, i) is None for i in call.inputs):
        return None
    found = [polynomial(edit, i, x, calls, depth - 1) for i in call.inputs[: 1 if name == "Pow" else None]]
    terms = [p for p in found if p is not None]
    if len(terms) < len(found):
        return None
    calls.append(call)
    made = _power(edit, call, terms[0]) if name == "Pow" else _combined(name, terms[0], terms[-1])
    return made if made is not None and max(made, default=0) <= 3 else None


def _power(edit: Rewriter, call: Node, a: Polynomial) -> Polynomial | None:
    """The square or cube of a multiple of x."""
    exponent = edit.constant(call.inputs[1]) if a.keys() == {1} else None
    if exponent is None or exponent.size != 1 or len(edit.shape(call.inputs[0]) or ()) < exponent.ndim:
        return None
    power = np.asarray(exponent, np.float64).reshape(-1)[0]
    return {int(power): a[1] ** int(power)} if power in (2, 3) else None


def _combined(name: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    """The polynomial of a sum, product or quotient by a number; Neg has no b."""
    made: Polynomial = {}
    if name == "Neg":
        return {k: -v for k, v in a.items()}
    if name == "Div":
        return {k: v / b[0] for k, v in a.items()} if b.keys() == {0} and b[0] else None
    if name == "Mul":
        for i, p in a.items():
            for j, q in b.items():
                made[i + j] = made.get(i + j, 0.0) + p * q
        return made
    sign = 1 if name == "Add" else -1
    return {k: a.get(k, 0.0) + sign * b.get(k, 0.0) for k in a.keys() | b.keys()}
