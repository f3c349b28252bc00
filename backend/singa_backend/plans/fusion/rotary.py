"""RotaryEmbedding out of its primitive form."""

from __future__ import annotations

import numpy as np

from ...ir.graph import ABSENT
from ...rewriting.view import Shape
from ..region import Call
from .facts import operator
from .view import RegionView

STEPS = 6
"""The number of elementwise calls between the angles and their cosines."""


def rotary_embeddings(edit: RegionView) -> int:
    """For any calls of the form x * cos + Concat(-b, a) * sin, where a and b are the halves of x, replace Add by RotaryEmbedding.

    x has the axes (batch, heads, positions, size) of known or named sizes.  cos and sin have one axis of size 1 for the heads,
    and two equal halves: they are constants, or elementwise functions of Concat(f, f).
    """
    count = 0
    for root in edit.named("Add"):
        if edit.alive(root) and any(_rotary(edit, root, *pair) for pair in (root.inputs, root.inputs[::-1])):
            count += 1
    return count


def _rotary(edit: RegionView, root: Call, plain: int, turned: int) -> bool:
    first, second = edit.made_by(plain, "Mul"), edit.made_by(turned, "Mul")
    if first is None or second is None or not edit.once(plain) or not edit.once(turned):
        return False
    for at in (0, 1):
        concat = edit.made_by(second.inputs[at], "Concat")
        x = _source(edit, concat) if concat is not None and edit.once(second.inputs[at]) else ABSENT
        if concat is None or x == ABSENT or x not in first.inputs:
            continue
        cos = first.inputs[1] if first.inputs[0] == x else first.inputs[0]
        shape = edit.facts.shape(x)
        if shape is None or edit.facts.dtype(x) != np.float32:
            return False
        caches = [_cache(edit, value, shape, root) for value in (cos, second.inputs[1 - at])]
        if any(c is None for c in caches):
            return False
        (left, before), (right, after) = (c for c in caches if c is not None)
        made = edit.call("RotaryEmbedding", (x, left, right), [concat, first, second, root], root.outputs)
        edit.put(root, *before, *after, made)
        return True
    return False


def _source(edit: RegionView, concat: Call) -> int:
    """The x of Concat(-b, a), where a and b are the halves of its last axis; ABSENT for other calls."""
    minus = edit.made_by(concat.inputs[0], "Neg")
    if minus is None or len(concat.inputs) != 2:
        return ABSENT
    b, a = edit.producer(minus.inputs[0]), edit.producer(concat.inputs[1])
    if a is None or b is None or operator(a) != operator(b) or a.inputs[:1] != b.inputs[:1]:
        return ABSENT
    x = a.inputs[0] if a.inputs else ABSENT
    shape = edit.facts.shape(x)
    size = shape[-1] if shape is not None and len(shape) == 4 else None
    if not isinstance(size, int) or size % 2 or concat.attributes.get("axis") not in (-1, 3):
        return ABSENT
    half = size // 2
    if any(edit.facts.last(v) != half for v in (minus.inputs[0], concat.inputs[1])):
        return ABSENT
    if operator(a) == "Split":
        whole = a is b and len(a.outputs) == 2 and a.attributes.get("axis") in (-1, 3)
        return x if whole and a.outputs == (concat.inputs[1], minus.inputs[0]) else ABSENT
    if operator(a) != "Slice" or not _from(edit, a, 0) or not _from(edit, b, half):
        return ABSENT
    return x


def _from(edit: RegionView, call: Call, start: int) -> bool:
    """Whether a Slice begins at a place of the last axis, and has no steps."""
    if call.attributes.get("starts") is not None:
        return tuple(call.attributes["starts"]) == (start,) and tuple(call.attributes.get("axes") or ()) in ((-1,), (3,))
    if len(call.inputs) < 4 or edit.ints(call.inputs[1]) != (start,) or edit.ints(call.inputs[3]) not in ((-1,), (3,)):
        return False
    return len(call.inputs) < 5 or call.inputs[4] == ABSENT or edit.ints(call.inputs[4]) == (1,)


def _cache(edit: RegionView, value: int, shape: Shape, root: Call) -> tuple[int, list[Call]] | None:
    """The first half of a cosine or sine as (batch, positions, size / 2), and the calls that compute it; None if it differs."""
    wide, size = edit.facts.shape(value), shape[3]
    assert isinstance(size, int)
    array = edit.constant(value)
    if array is not None:
        array = array.reshape((1,) * (4 - array.ndim) + array.shape) if array.ndim < 4 else array
        if (
            array.shape != (1, 1, shape[2], size)
            or shape[0] != 1
            or not np.array_equal(array[..., : size // 2], array[..., size // 2 :])
        ):
            return None
        return edit.region.constant(np.ascontiguousarray(array[0, :, :, : size // 2])), []
    if wide != (shape[0], 1, shape[2], size) or not _repeats(edit, value):
        return None
    half = edit.call("Slice", (value, *(edit.region.constant(np.array([n])) for n in (0, size // 2, 3))), [root])
    flat = edit.call("Squeeze", (half.outputs[0], edit.region.constant(np.array([1]))), [root])
    return flat.outputs[0], [half, flat]


def _repeats(edit: RegionView, value: int) -> bool:
    """Whether the halves of the last axis are equal: elementwise calls after Concat(f, f)."""
    for _ in range(STEPS):
        call = edit.producer(value)
        name = operator(call)
        if call is None:
            return False
        if name == "Concat":
            rank = edit.facts.rank(value)
            last = call.attributes.get("axis") == -1 or (rank is not None and call.attributes.get("axis") == rank - 1)
            return last and len(call.inputs) == 2 and call.inputs[0] == call.inputs[1]
        if name in ("Mul", "Div"):
            source = next((i for i in call.inputs if edit.number(call, i) is None), ABSENT)
            if source == ABSENT or all(edit.number(call, i) is None for i in call.inputs):
                return False
            value = source
        elif name in ("Cos", "Sin", "Cast", "Identity") or (name == "Unsqueeze" and _keeps_last(edit, call)):
            value = call.inputs[0]
        else:
            return False
    return False


def _keeps_last(edit: RegionView, call: Call) -> bool:
    axes, rank = edit.axes(call), edit.facts.rank(call.outputs[0])
    return axes is not None and rank is not None and all(a % rank != rank - 1 for a in axes)
