"""Attention out of its primitive form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..ir.declaration import has_trait
from ..ir.graph import Value
from ..ir.shapes import Dim, Shape
from .match import Anything, Match, Multiple, Rule, Rules, op
from .rewriter import Rewriter

LOWEST = float(np.finfo(np.float32).max)
ANYTHING = (-math.inf, math.inf)
STEPS = 24
"""The number of calls that are visited to find that a mask is finite."""

Q, K, V, MASK = Anything(), Anything(), Anything(), Anything()
SCALED_Q, SCALED_K = Multiple(Q), Multiple(K)
SCORES = Multiple(op.MatMul(SCALED_Q, SCALED_K))
MASKED = SCORES + MASK
WEIGHTS = op.Softmax(MASKED) | op.Softmax(SCORES)


def attentions(edit: Rewriter) -> int:
    """For any calls of the form MatMul(Softmax(scale * MatMul(q, Transpose(k)) + mask), v), replace the last one by Attention.

    The Softmax is over the last axis, the scales are constants that multiply or divide q, k or the product, and the mask is
    optional.  The values have 4 axes: the batches are known to be equal, and the numbers of heads too, or k and v have one head,
    or repeat their heads by Expand.  The mask is known to broadcast to the product without changing its shape, and that no row of
    it is all negative infinity: Attention returns 0 there, Softmax NaN.  For the same reason a Where in place of the mask stays:
    it hides NaN in the product.  Values in the middle must not be used elsewhere.
    """
    return ATTENTIONS.run(edit)


def _attention(edit: Rewriter, match: Match) -> bool:
    q, k, v, soft = match[Q], match[K], match[V], match[WEIGHTS].producer
    shape, axis = edit.shape(soft.inputs[0]), edit.attribute(soft, "axis", -1 if edit.version(soft) >= 13 else 1)
    if not (axis == -1 or (shape is not None and axis == len(shape) - 1)) or edit.dtype(v) != np.float32:
        return False
    scale = match[SCALED_Q] * match[SCALED_K] * match[SCORES]
    shapes = [s for s in map(edit.shape, (q, k, v)) if s is not None and len(s) == 4]
    if not math.isfinite(scale) or len(shapes) < 3:
        return False
    of_q, of_k, of_v = shapes
    if not of_q[0] == of_k[0] == of_v[0] or of_k[1] != of_v[1] or of_k[1] not in (1, of_q[1]):
        return False
    mask = (match[MASK],) if MASK in match else ()
    if mask and not (_fits(edit, mask[0], (*of_q[:3], of_k[3])) and _visible(edit, mask[0])):
        return False
    perm, new = _perm(edit, k), []
    short_k, short_v = (_repeated(edit, x) for x in (k.producer.inputs[0] if perm == [0, 1, 2, 3] else None, v))
    if short_k is not None and short_v is not None and edit.shape(short_k[0]) and short_k[1] == short_v[1]:
        k, v = short_k[0], short_v[0]
    elif perm == [0, 1, 2, 3]:
        k = k.producer.inputs[0]
    else:
        source = k if perm is None else k.producer.inputs[0]
        new = [edit.call("Transpose", (source,), match.origins, perm=perm or [0, 1, 3, 2])]
        k = new[0].outputs[0]
    made = edit.call("Attention", (q, k, v, *mask), match.origins, match.root.outputs, scale=scale)
    return edit.put(match.root, *new, made)


ATTENTIONS = Rules(Rule(op.MatMul(WEIGHTS, V), _attention))


def _perm(edit: Rewriter, transposed: Any) -> list[int] | None:
    """The axes of a Transpose that returns transposed keys, the last two in the order of the keys; None for other calls."""
    call = edit.made_by(transposed, "Transpose")
    perm = None if call is None else edit.attribute(call, "perm")
    return None if perm is None or len(perm) != 4 else [perm[0], perm[1], perm[3], perm[2]]


def _repeated(edit: Rewriter, value: Value | None) -> tuple[Any, Dim] | None:
    """The heads before they are repeated by Reshape(Expand(Unsqueeze(x, 2))), and how often."""
    last = None if value is None else edit.made_by(value, "Reshape")
    expand = edit.made_by(last.inputs[0], "Expand") if last is not None else None
    first = edit.made_by(expand.inputs[0], "Unsqueeze", "Reshape") if expand is not None else None
    if last is None or expand is None or first is None:
        return None
    x, one, wide, full = (edit.shape(v) for v in (first.inputs[0], first.outputs[0], expand.outputs[0], last.outputs[0]))
    if x is None or wide is None or full is None or len(x) != 4 or len(wide) != 5 or len(full) != 4:
        return None
    same = one == (*x[:2], 1, *x[2:]) and wide == (*x[:2], wide[2], *x[2:]) and (full[0], *full[2:]) == (x[0], *x[2:])
    return (first.inputs[0], wide[2]) if same and isinstance(x[1], int) and isinstance(wide[2], int) else None


def _fits(edit: Rewriter, mask: Any, product: Shape) -> bool:
    """Whether a mask broadcasts to the product and does not change its shape."""
    shape = edit.shape(mask)
    if shape is None or len(shape) > 4:
        return False
    lead = all(m in (1, s) for m, s in zip(shape[-2::-1], product[-2::-1], strict=False))
    keys = not shape or shape[-1] == product[-1] or (isinstance(shape[-1], int) and shape[-1] > 1)
    return lead and keys


def _visible(edit: Rewriter, mask: Any) -> bool:
    """Whether each row of a mask is known to have an element above negative infinity."""
    array = edit.constant(mask)
    if array is not None and array.ndim and array.size:
        return bool((array.max(axis=-1) != -np.inf).all())
    low, high = bounds(edit, mask, [STEPS])
    return low >= -LOWEST and high <= LOWEST


def _moves_elements(name: str) -> bool:
    """Whether each element of the results is one of the first input; a MaxPool may have indices and windows of padding only."""
    return has_trait("", name, "elements_of_first") and name != "MaxPool"


def bounds(edit: Rewriter, value: Value | None, left: list[int]) -> tuple[float, float]:
    """Bounds on the elements that are not NaN; infinities if none are known.  `left`: the number of calls that may be visited."""
    array = edit.constant(value)
    if array is not None:
        return _range(array)
    dtype, call = edit.dtype(value), None if value is None else value.producer
    name = edit.operator(call)
    found = ANYTHING
    if call is not None and left[0] > 0:
        left[0] -= 1
        if name in ("Add", "Sub", "Mul", "Where"):
            (a, b), (c, d) = (bounds(edit, i, left) for i in call.inputs[-2:])
            test = edit.made_by(call.inputs[0], "Cast") if name == "Where" else None
            if test is not None and test.inputs[0] == call.inputs[2] and edit.dtype(test.outputs[0]) == np.bool_:
                c = d = 0.0  # the places where it is not zero are replaced
            if name == "Mul":
                ends = [x * y for x in (a, b) for y in (c, d)]
                found = ANYTHING if any(map(math.isnan, ends)) else (min(ends), max(ends))
            else:
                found = {"Add": (a + c, b + d), "Sub": (a - d, b - c), "Where": (min(a, c), max(b, d))}[name]
        elif name == "Trilu":
            a, b = bounds(edit, call.inputs[0], left)
            found = min(a, 0.0), max(b, 0.0)
        elif name == "Concat" or _moves_elements(name) or (name == "Cast" and dtype == np.float32):
            ranges = [bounds(edit, i, left) for i in (call.inputs if name == "Concat" else call.inputs[:1])]
            found = min(a for a, _ in ranges), max(b for _, b in ranges)
    if dtype is not None and dtype.kind in "iub":
        info = (0.0, 1.0) if dtype.kind == "b" else (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max))
        # the results of integers may be taken modulo 2^n
        found = found if info[0] <= found[0] and found[1] <= info[1] else info
    return found


def _range(array: np.ndarray) -> tuple[float, float]:
    if array.dtype.kind not in "fiub":
        return ANYTHING
    if not array.size:
        return 0.0, 0.0
    low, high = float(array.min()), float(array.max())
    return ANYTHING if math.isnan(low) else (low, high)


LEFT, RIGHT = Multiple(Q, least=1, most=1), Multiple(K, least=1, most=1)


def scales(edit: Rewriter) -> int:
    """For any calls of the form MatMul(a * x, b * y), with constants a and b, replace it by MatMul((a * b) * x, y).

    The scaled values must not be used elsewhere.
    """
    return SCALES.run(edit)


def _scale(edit: Rewriter, match: Match) -> bool:
    scale = match[LEFT] * match[RIGHT]
    if not math.isfinite(scale) or abs(scale) < 1e-30:
        return False
    product = edit.call("Mul", (match[Q], edit.add_constant(np.asarray(scale, np.float32))), match.origins[-2:-1])
    return edit.put(match.root, product, edit.call("MatMul", (product.outputs[0], match[K]), match.origins, match.root.outputs))


SCALES = Rules(Rule(op.MatMul(LEFT, RIGHT), _scale))
