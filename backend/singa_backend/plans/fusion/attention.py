"""Attention out of its primitive form."""

from __future__ import annotations

import math

import numpy as np

from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ..region import Call
from .editing import Editor
from .facts import Dim, Shape, operator

LOWEST = float(np.finfo(np.float32).max)
ANYTHING = (-math.inf, math.inf)
STEPS = 24
"""The number of calls that are visited to find that a mask is finite."""


def attentions(edit: Editor) -> int:
    """For any calls of the form MatMul(Softmax(scale * MatMul(q, Transpose(k)) + mask), v), replace the last one by Attention.

    The Softmax is over the last axis, the scales are constants that multiply or divide q, k or the product, and the mask is
    optional.  The values have 4 axes: the batches are known to be equal, and the numbers of heads too, or k and v have one head,
    or repeat their heads by Expand.  The mask is known to broadcast to the product without changing its shape, and that no row of
    it is all negative infinity: Attention returns 0 there, Softmax NaN.  For the same reason a Where in place of the mask stays:
    it hides NaN in the product.  Values in the middle must not be used elsewhere.
    """
    count = 0
    for soft in edit.named("Softmax"):
        if edit.alive(soft):
            count += _attention(edit, soft)
    return count


def _attention(edit: Editor, soft: Call) -> bool:
    root = edit.only_user(soft.outputs[0])
    if root is None or operator(root) != "MatMul" or root.inputs[0] != soft.outputs[0] or not edit.once(soft.outputs[0]):
        return False
    axis, rank = soft.attributes.get("axis", -1 if (soft.node.version or 0) >= 13 else 1), edit.facts.rank(soft.inputs[0])
    if not (axis == -1 or (rank is not None and axis == rank - 1)) or edit.facts.dtype(root.inputs[1]) != np.float32:
        return False
    calls, value, mask = [soft, root], soft.inputs[0], ABSENT
    add = edit.made_by(value, "Add")
    product = None
    if add is not None and edit.once(value):
        for at in (0, 1):
            product, scale, scales = _product(edit, add.inputs[at])
            if product is not None:
                mask = add.inputs[1 - at]
                calls = [*scales, add, *calls]
                break
    else:
        product, scale, scales = _product(edit, value)
        calls = [*scales, *calls]
    if product is None:
        return False
    q, scale_q = _scaled(edit, product.inputs[0])
    transposed, scale_k = _scaled(edit, product.inputs[1])
    scale *= scale_q * scale_k
    shapes = [edit.facts.shape(i) for i in (q, transposed, root.inputs[1])]
    if not math.isfinite(scale) or any(s is None or len(s) != 4 for s in shapes):
        return False
    of_q, of_k, of_v = (s for s in shapes if s is not None)
    of_k = (of_k[0], of_k[1], of_k[3], of_k[2])
    if not of_q[0] == of_k[0] == of_v[0] or of_k[1] != of_v[1] or of_k[1] not in (1, of_q[1]):
        return False
    if mask != ABSENT and not (_fits(edit, mask, (*of_q[:3], of_k[2])) and _visible(edit, mask)):
        return False
    k, new = _keys(edit, transposed, [product, root])
    v = root.inputs[1]
    short_k, short_v = (_repeated(edit, x) for x in (k if not new else _straight(edit, transposed), v))
    if short_k is not None and short_v is not None and edit.facts.shape(short_k[0]) and short_k[1] == short_v[1]:
        k, v, new = short_k[0], short_v[0], []
    inputs = (q, k, v) if mask == ABSENT else (q, k, v, mask)
    edit.put(root, *new, edit.call("Attention", inputs, [product, *calls], root.outputs, scale=scale))
    return True


def _product(edit: Editor, value: int) -> tuple[Call | None, float, list[Call]]:
    """The MatMul that a value is a multiple of, the factor, and the calls between them; all are read once."""
    calls: list[Call] = []
    scale = 1.0
    for _ in range(3):
        call = edit.producer(value)
        if call is None or not edit.once(value):
            break
        if operator(call) == "MatMul":
            return call, scale, calls
        source, factor = _multiple(edit, call)
        if source == ABSENT:
            break
        calls.insert(0, call)
        value, scale = source, scale * factor
    return None, 1.0, []


def _scaled(edit: Editor, value: int) -> tuple[int, float]:
    """The value of which another one is a multiple, and the factor."""
    scale = 1.0
    for _ in range(3):
        call = edit.producer(value)
        if call is None or not edit.once(value):
            break
        source, factor = _multiple(edit, call)
        if source == ABSENT:
            break
        value, scale = source, scale * factor
    return value, scale


def _multiple(edit: Editor, call: Call) -> tuple[int, float]:
    """The value that a Mul or a Div multiplies by a constant, and the constant; ABSENT for other calls."""
    if operator(call) == "Mul":
        for at in (0, 1):
            factor = edit.number(call, call.inputs[1 - at])
            if factor is not None:
                return call.inputs[at], factor
    if operator(call) == "Div":
        factor = edit.number(call, call.inputs[1])
        if factor:
            return call.inputs[0], 1 / factor
    return ABSENT, 1.0


def _swapped(edit: Editor, call: Call) -> list[int] | None:
    perm = call.attributes.get("perm")
    return None if perm is None or len(perm) != 4 else [perm[0], perm[1], perm[3], perm[2]]


def _straight(edit: Editor, transposed: int) -> int:
    """The keys, if they are transposed on the last two axes only; ABSENT otherwise."""
    call = edit.made_by(transposed, "Transpose")
    return call.inputs[0] if call is not None and _swapped(edit, call) == [0, 1, 2, 3] else ABSENT


def _keys(edit: Editor, transposed: int, origins: list[Call]) -> tuple[int, list[Call]]:
    """The keys as (batch, heads, length, size), and the calls that compute them: a Transpose, or nothing."""
    call = edit.made_by(transposed, "Transpose")
    perm = None if call is None else _swapped(edit, call)
    if call is not None and perm == [0, 1, 2, 3]:
        return call.inputs[0], []
    source = transposed if call is None or perm is None else call.inputs[0]
    made = edit.call("Transpose", (source,), origins, perm=perm or [0, 1, 3, 2])
    return made.outputs[0], [made]


def _repeated(edit: Editor, value: int) -> tuple[int, Dim] | None:
    """The heads before they are repeated by Reshape(Expand(Unsqueeze(x, 2))), and how often."""
    last = edit.made_by(value, "Reshape")
    expand = edit.made_by(last.inputs[0], "Expand") if last is not None else None
    first = edit.made_by(expand.inputs[0], "Unsqueeze", "Reshape") if expand is not None else None
    if last is None or expand is None or first is None:
        return None
    x, one, wide, full = (edit.facts.shape(v) for v in (first.inputs[0], first.outputs[0], expand.outputs[0], last.outputs[0]))
    if x is None or wide is None or full is None or len(x) != 4 or len(wide) != 5 or len(full) != 4:
        return None
    same = one == (*x[:2], 1, *x[2:]) and wide == (*x[:2], wide[2], *x[2:]) and (full[0], *full[2:]) == (x[0], *x[2:])
    return (first.inputs[0], wide[2]) if same and isinstance(x[1], int) and isinstance(wide[2], int) else None


def _fits(edit: Editor, mask: int, product: Shape) -> bool:
    """Whether a mask broadcasts to the product and does not change its shape."""
    shape = edit.facts.shape(mask)
    if shape is None or len(shape) > 4:
        return False
    lead = all(m in (1, s) for m, s in zip(shape[-2::-1], product[-2::-1], strict=False))
    keys = not shape or shape[-1] == product[-1] or (isinstance(shape[-1], int) and shape[-1] > 1)
    return lead and keys


def _visible(edit: Editor, mask: int) -> bool:
    """Whether each row of a mask is known to have an element above negative infinity."""
    array = edit.constant(mask)
    if array is not None and array.ndim and array.size:
        return bool((array.max(axis=-1) != -np.inf).all())
    low, high = bounds(edit, mask, [STEPS])
    return low >= -LOWEST and high <= LOWEST


def _moves_elements(name: str) -> bool:
    """Whether each element of the results is one of the first input; a MaxPool may have indices and windows of padding only."""
    return has_trait("", name, "elements_of_first") and name != "MaxPool"


def bounds(edit: Editor, value: int, left: list[int]) -> tuple[float, float]:
    """Bounds on the elements that are not NaN; infinities if none are known.  `left`: the number of calls that may be visited."""
    array = edit.constant(value)
    if array is not None:
        return _range(array)
    dtype, call = edit.facts.dtype(value), edit.producer(value)
    name = operator(call)
    found = ANYTHING
    if call is not None and left[0] > 0:
        left[0] -= 1
        if name in ("Add", "Sub", "Mul", "Where"):
            (a, b), (c, d) = (bounds(edit, i, left) for i in call.inputs[-2:])
            test = edit.made_by(call.inputs[0], "Cast") if name == "Where" else None
            if test is not None and test.inputs[0] == call.inputs[2] and edit.facts.dtype(test.outputs[0]) == np.bool_:
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


def scales(edit: Editor) -> int:
    """For any calls of the form MatMul(a * x, b * y), with constants a and b, replace it by MatMul((a * b) * x, y).

    The scaled values must not be used elsewhere.
    """
    count = 0
    for call in edit.named("MatMul"):
        found = []
        for value in call.inputs:
            before = edit.producer(value)
            source, factor = _multiple(edit, before) if before is not None and edit.once(value) else (ABSENT, 1.0)
            found.append((before, source, factor))
        (left, x, a), (right, y, b) = found
        if left is None or right is None or ABSENT in (x, y) or not math.isfinite(a * b) or abs(a * b) < 1e-30:
            continue
        factor_id = edit.region.constant(np.asarray(a * b, np.float32))
        product = edit.call("Mul", (x, factor_id), [left])
        edit.put(call, product, edit.call("MatMul", (product.outputs[0], y), [left, right, call], call.outputs))
        count += 1
    return count
