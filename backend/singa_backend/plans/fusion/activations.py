"""Activations out of their primitive forms: Gelu, Swish, HardSwish, HardSigmoid, Mish, LeakyRelu, Softplus.

The forms differ in the order of their products.  So the pass starts at the function in the middle (Erf, Tanh, Sigmoid, Clip),
follows its only reader as long as the value is scale * f(x) + shift, or that times x, and compares the numbers that it has then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...ir.graph import ABSENT
from ..region import Call
from .facts import operator
from .view import RegionView

STEPS = 8
"""The number of calls that are followed."""

Polynomial = dict[int, float]


@dataclass(frozen=True)
class Form:
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
    attributes: Callable[[float], dict[str, object]] = lambda factor: {}


ROOT = math.sqrt(2 / math.pi)
ERF = (Form("Gelu", {1: math.sqrt(0.5)}, 0.5, 0.5),)
TANH = (Form("Gelu", {1: ROOT, 3: ROOT * 0.044715}, 0.5, 0.5, lambda factor: {"approximate": "tanh"}),)
SIGMOID = (
    Form("Gelu", {1: 2 * ROOT, 3: 2 * ROOT * 0.044715}, 0.0, 1.0, lambda factor: {"approximate": "tanh"}),
    Form("Swish", None, 0.0, 1.0, lambda factor: {} if factor == 1 else {"alpha": factor}),
)
CLIP = (Form("HardSwish", {0: 3.0, 1: 1.0}, 0.0, 1 / 6),)
CLIP_6 = (Form("HardSwish", {0: 0.5, 1: 1 / 6}, 0.0, 1.0),)
MISH = (Form("Mish", {1: 1.0}, 0.0, 1.0),)
HARD_SIGMOID = (Form("HardSwish", {1: 1.0}, 0.0, 1.0),)


def activations(edit: RegionView) -> int:
    """For any calls of the form x * (shift + scale * f(p(x))), in any order of the products, replace the last one by one call.

    Erf of x / sqrt(2) and Tanh or Sigmoid of the polynomial of the approximation form Gelu; Sigmoid of a multiple of x Swish;
    Clip of x + 3 to 0 and 6, divided by 6, and HardSigmoid form HardSwish; Tanh of Softplus forms Mish.  The constants must be
    scalars of float32, and the values in the middle must not be used elsewhere.
    """
    count = 0
    for call in edit.named("Erf"):
        count += _match(edit, call, call.inputs[0], ERF)
    for call in edit.named("Tanh"):
        before = edit.made_by(call.inputs[0], "Softplus")
        if before is not None and edit.once(call.inputs[0]) and edit.alive(call):
            count += _match(edit, call, before.inputs[0], MISH, (before,))
        elif edit.alive(call):
            count += _match(edit, call, call.inputs[0], TANH)
    for call in edit.named("Sigmoid"):
        count += _match(edit, call, call.inputs[0], SIGMOID)
    for call in edit.named("Clip", "Min"):
        bounds = _bounds(edit, call)
        if bounds is not None:
            low, high, source, inner = bounds
            if (low, high) in ((0.0, 6.0), (0.0, 1.0)):
                count += _match(edit, call, source, CLIP if high == 6 else CLIP_6, inner)
    for call in edit.named("HardSigmoid"):
        if _near(call.attributes["alpha"], 1 / 6) and call.attributes["beta"] == 0.5:
            count += _match(edit, call, call.inputs[0], HARD_SIGMOID)
    return count


def hard_sigmoids(edit: RegionView) -> int:
    """For any calls of the form Clip(x + 3, 0, 6) / 6, replace Div, or Mul by 1 / 6, by HardSigmoid(x, 1 / 6, 1 / 2)."""
    count = 0
    for call in edit.named("Clip", "Min"):
        bounds = _bounds(edit, call)
        root = edit.only_user(call.outputs[0])
        if (
            bounds is None
            or bounds[:2] != (0.0, 6.0)
            or operator(root) not in ("Mul", "Div")
            or root is None
            or not edit.once(call.outputs[0])
        ):
            continue
        add = edit.made_by(bounds[2], "Add")
        at = None if add is None else next((i for i in (0, 1) if edit.number(add, add.inputs[1 - i]) == 3), None)
        factor = _factor(edit, root, call.outputs[0])
        if add is None or at is None or factor is None or not _near(factor, 1 / 6) or not edit.once(add.outputs[0]):
            continue
        made = edit.call("HardSigmoid", (add.inputs[at],), [add, *bounds[3], call, root], root.outputs, alpha=1 / 6, beta=0.5)
        edit.put(root, made)
        count += 1
    return count


def leaky_relus(edit: RegionView) -> int:
    """For any calls of the form Max(x, a * x), a between 0 and 1, or Where(x > 0, x, a * x), replace the last by LeakyRelu."""
    count = 0
    for root in edit.named("Max", "Where"):
        if root.name == "Max":
            found = _leaky(edit, root, root.inputs, True) if len(root.inputs) == 2 else None
        else:
            found = None
            test = edit.made_by(root.inputs[0], "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
            if test is not None and edit.number(test, test.inputs[1]) == 0:
                yes, no = root.inputs[1:] if test.name.startswith("Greater") else root.inputs[:0:-1]
                found = _leaky(edit, root, (yes, no), False) if test.inputs[0] == yes else None
        if found is not None:
            x, alpha, calls = found
            edit.put(root, edit.call("LeakyRelu", (x,), [*calls, root], root.outputs, alpha=alpha))
            count += 1
    return count


def _leaky(edit: RegionView, root: Call, pair: tuple[int, ...], between: bool) -> tuple[int, float, list[Call]] | None:
    for x, product in (pair, pair[::-1]) if between else (pair,):
        call = edit.made_by(product, "Mul")
        if call is None or x not in call.inputs or not edit.once(product) or not edit.is_float32(x):
            continue
        alpha = _factor(edit, call, x)
        if alpha is not None and math.isfinite(alpha) and (0 < alpha < 1 or not between):
            return x, alpha, [call]
    return None


def prelus(edit: RegionView) -> int:
    """For any calls of the form Relu(x) - a * Relu(-x), replace Sub, or Add for -a, by PRelu(x, a); a is a constant."""
    count = 0
    for root in edit.named("Add", "Sub"):
        for at in (0, 1) if root.name == "Add" else (0,):
            found = _prelu(edit, root, root.inputs[at], root.inputs[1 - at])
            if found is not None:
                x, slope, calls = found
                inputs = (x, edit.region.constant(slope if root.name == "Sub" else -slope))
                edit.put(root, edit.call("PRelu", inputs, [*calls, root], root.outputs))
                count += 1
                break
    return count


def _prelu(edit: RegionView, root: Call, above: int, below: int) -> tuple[int, np.ndarray, list[Call]] | None:
    relu, product = edit.made_by(above, "Relu"), edit.made_by(below, "Mul")
    if relu is None or product is None:
        return None
    for at in (0, 1):
        slope, other = edit.constant(product.inputs[1 - at]), edit.made_by(product.inputs[at], "Relu")
        minus = edit.made_by(other.inputs[0], "Neg") if other is not None else None
        if slope is None or slope.dtype != np.float32 or other is None or minus is None or minus.inputs[0] != relu.inputs[0]:
            continue
        calls, shape = [relu, minus, other, product], edit.facts.shape(relu.inputs[0])
        fits = shape is not None and slope.ndim <= len(shape)
        fits = fits and all(d in (1, s) for d, s in zip(slope.shape[::-1], (shape or ())[::-1], strict=False))
        if fits and edit.inside([c.outputs[0] for c in calls], [*calls, root]):
            return relu.inputs[0], slope, calls
    return None


def softplus(edit: RegionView) -> int:
    """For any calls of the form Where(x > c, x, Softplus(x)), where c is at least 18, replace Where by Softplus."""
    count = 0
    for root in edit.named("Where"):
        test, soft = edit.made_by(root.inputs[0], "Greater"), edit.made_by(root.inputs[2], "Softplus")
        if test is None or soft is None or not root.inputs[1] == test.inputs[0] == soft.inputs[0]:
            continue
        bound = edit.number(test, test.inputs[1])
        if bound is not None and bound >= 18:
            edit.put(root, edit.call("Softplus", soft.inputs, [test, soft, root], root.outputs))
            count += 1
    return count


def _near(a: float, b: float, tolerance: float = 1e-6) -> bool:
    return abs(a - b) <= tolerance * abs(b)


def _bounds(edit: RegionView, call: Call) -> tuple[float, float, int, tuple[Call, ...]] | None:
    """The bounds of Clip(x), of Min(Relu(x), c) and of Min(Max(x, 0), c), x, and the inner call; None for other calls."""
    if call.name == "Clip":
        if "min" in call.attributes:  # before version 11
            first, last = call.attributes["min"], call.attributes["max"]
            return None if first is None or last is None else (float(first), float(last), call.inputs[0], ())
        if len(call.inputs) < 3 or ABSENT in call.inputs[1:]:
            return None
        low, high = (edit.scalar(i) for i in call.inputs[1:3])
        return None if low is None or high is None else (low, high, call.inputs[0], ())
    if len(call.inputs) != 2:
        return None
    for at in (0, 1):
        bound, inner = edit.number(call, call.inputs[1 - at]), edit.made_by(call.inputs[at], "Relu")
        if bound is not None and inner is not None and edit.once(inner.outputs[0]):
            return 0.0, bound, inner.inputs[0], (inner,)
    return None


def _factor(edit: RegionView, call: Call, value: int) -> float | None:
    """The constant by which a Mul or a Div multiplies a value; None for other calls."""
    if operator(call) == "Mul":
        return edit.number(call, call.inputs[1] if call.inputs[0] == value else call.inputs[0])
    if operator(call) == "Div" and call.inputs[0] == value:
        divisor = edit.number(call, call.inputs[1])
        return 1 / divisor if divisor else None
    return None


def _bases(edit: RegionView, value: int) -> list[int]:
    """A value, and those of which it is a multiple."""
    found = [value]
    for _ in range(2):
        call = edit.made_by(found[-1], "Mul", "Div")
        source = None
        if call is not None:
            source = next((i for i in call.inputs if i not in edit.region.constants and _factor(edit, call, i) is not None), None)
        if source is None:
            break
        found.append(source)
    return found


def _match(edit: RegionView, call: Call, argument: int, forms: tuple[Form, ...], inner: tuple[Call, ...] = ()) -> int:
    """Follow the only reader of the function's value until one of the forms is complete; return the number of rewrites."""
    if not edit.alive(call) or not edit.is_float32(call.outputs[0]):
        return 0
    shift, scale, x = 0.0, 1.0, None
    value, calls = call.outputs[0], [*inner, call]
    for _ in range(STEPS):
        user = edit.only_user(value)
        if user is None or not edit.once(value):
            return 0
        name, factor = operator(user), _factor(edit, user, value)
        others = [i for i in user.inputs if i != value]
        if factor is not None:
            shift, scale = shift * factor, scale * factor
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
            x, factor, more = found
            shift, scale = shift * factor, scale * factor
            calls += more
        else:
            return 0
        calls.append(user)
        value = user.outputs[0]
        if x is not None and _finish(edit, x, argument, forms, shift, scale, calls):
            return 1
    return 0


def _addend(edit: RegionView, add: Call, other: int, x: int | None) -> tuple[float | None, list[Call]]:
    """The number that is added: a constant, or the factor of x if the value was multiplied by x."""
    if x is None:
        return edit.number(add, other), []
    calls: list[Call] = []
    found = polynomial(edit, other, x, calls)
    return (found[1] if found is not None and found.keys() == {1} else None), calls


def _multiplier(edit: RegionView, other: int, argument: int, forms: tuple[Form, ...]) -> tuple[int, float, list[Call]] | None:
    """The x of a factor that is a multiple of it, so that the argument is a polynomial of x that one of the forms has."""
    for x in _bases(edit, other):
        calls: list[Call] = []
        multiple = polynomial(edit, other, x, calls)
        found = polynomial(edit, argument, x, [])
        if multiple is not None and found is not None and any(_argument_fits(found, f) for f in forms):
            return x, multiple[1], calls
    return None


def _argument_fits(found: Polynomial, form: Form) -> bool:
    if form.argument is None:
        return found.keys() == {1} and math.isfinite(found[1])
    return found.keys() == form.argument.keys() and all(_near(v, form.argument[k], 1e-5) for k, v in found.items())


def _finish(
    edit: RegionView, x: int, argument: int, forms: tuple[Form, ...], shift: float, scale: float, calls: list[Call]
) -> bool:
    inner: list[Call] = []
    found = polynomial(edit, argument, x, inner)
    if found is None:
        return False
    for form in forms:
        same = _near(scale, form.scale) and (_near(shift, form.shift) if form.shift else shift == 0)
        pattern = [*inner, *calls]
        if same and _argument_fits(found, form) and edit.inside([c.outputs[0] for c in pattern[:-1]], pattern):
            root = pattern[-1]
            edit.put(root, edit.call(form.op, (x,), pattern, root.outputs, **form.attributes(found.get(1, 0.0))))
            return True
    return False


def polynomial(edit: RegionView, value: int, x: int, calls: list[Call], depth: int = 6) -> Polynomial | None:
    """A value as a polynomial of x of degree 3 at most: {degree: coefficient}; the calls that compute it are added to `calls`."""
    if value == x:
        return {1: 1.0}
    number = edit.scalar(value)
    if number is not None:
        return {0: number}
    call = edit.producer(value)
    name = operator(call)
    if call is None or depth == 0 or name not in ("Add", "Sub", "Mul", "Div", "Pow", "Neg"):
        return None
    if any(i in edit.region.constants and edit.number(call, i) is None for i in call.inputs) and name != "Pow":
        return None
    found = [polynomial(edit, i, x, calls, depth - 1) for i in call.inputs[: 1 if name == "Pow" else None]]
    if any(p is None for p in found):
        return None
    calls.append(call)
    a = found[0] or {}
    b = (found[1] if len(found) > 1 else None) or {}
    made: Polynomial | None = None
    if name == "Neg":
        made = {k: -v for k, v in a.items()}
    elif name in ("Add", "Sub"):
        sign = 1 if name == "Add" else -1
        made = {k: a.get(k, 0.0) + sign * b.get(k, 0.0) for k in a.keys() | b.keys()}
    elif name == "Mul":
        made = {}
        for i, p in a.items():
            for j, q in b.items():
                made[i + j] = made.get(i + j, 0.0) + p * q
    elif name == "Div" and b.keys() == {0} and b[0]:
        made = {k: v / b[0] for k, v in a.items()}
    elif name == "Pow" and a.keys() == {1}:
        exponent = edit.constant(call.inputs[1])
        if exponent is not None and exponent.size == 1 and edit.facts.rank_at_least(call.inputs[0], exponent.ndim):
            power = np.asarray(exponent, np.float64).reshape(-1)[0]
            made = {int(power): a[1] ** int(power)} if power in (2, 3) else None
    return made if made is not None and max(made, default=0) <= 3 else None
