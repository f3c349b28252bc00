"""RotaryEmbedding out of its primitive form."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.graph import Node, Value
from ..ir.shapes import Shape, valid_axes
from .match import Anything, Match, Rule, Rules, op
from .rewriter import Rewriter

STEPS = 6
"""The number of elementwise calls between the angles and their cosines."""

X, COS, SIN = Anything(), Anything(), Anything()
LOW = op.Split(X, ..., output=0).shared() | op.Slice(X, ...).shared()
HIGH = op.Split(X, ..., output=1).shared() | op.Slice(X, ...).shared()
TURNED = op.Concat(op.Neg(HIGH).shared(), LOW)


def rotary_embeddings(edit: Rewriter) -> int:
    """For any calls of the form x * cos + Concat(-b, a) * sin, where a and b are the halves of x, replace Add by RotaryEmbedding.

    x has the axes (batch, heads, positions, size) of known or named sizes.  cos and sin have one axis of size 1 for the heads,
    and two equal halves: they are constants, or elementwise functions of Concat(f, f).
    """
    return ROTARY.run(edit)


def _rotary(edit: Rewriter, match: Match) -> bool:
    x, shape = match[X], edit.shape(match[X])
    size = shape[-1] if shape is not None and len(shape) == 4 else None
    if shape is None or not isinstance(size, int) or size % 2 or edit.dtype(x) != np.float32:
        return False
    if not edit.offers("RotaryEmbedding") or edit.attribute(match[TURNED].producer, "axis") not in (-1, 3):
        return False
    if not _is_half(edit, match[LOW], 0, size // 2) or not _is_half(edit, match[HIGH], size // 2, size // 2):
        return False
    if not all(_halves_are_equal(edit, match[part], shape, size) for part in (COS, SIN)):
        return False
    (cos, before), (sin, after) = (_cache(edit, match[part], size // 2, match.root) for part in (COS, SIN))
    made = edit.call("RotaryEmbedding", (x, cos, sin), match.origins, match.root.outputs)
    return edit.put(match.root, *before, *after, made)


ROTARY = Rules(Rule(TURNED * SIN + X * COS, _rotary))


def _is_half(edit: Rewriter, value: Value, start: int, half: int) -> bool:
    """Whether an output of a Split or a Slice is a half of the last of 4 axes."""
    call, shape = value.producer, edit.shape(value)
    if call is None or shape is None or shape[-1] != half:
        return False
    if edit.operator(call) == "Split":
        return len(call.outputs) == 2 and edit.attribute(call, "axis") in (-1, 3)
    places = [edit.listed(call, name, index)[1] for name, index in (("starts", 1), ("axes", 3))]
    steps = call.input(4)
    return places[0] == (start,) and places[1] in ((-1,), (3,)) and (steps is None or edit.ints(steps) == (1,))


def _halves_are_equal(edit: Rewriter, value: Value, shape: Shape, size: int) -> bool:
    """Whether a cosine or sine has the shape (batch, 1, positions, size), and its halves are known to be equal."""
    array = edit.constant(value)
    if array is None:
        return edit.shape(value) == (shape[0], 1, shape[2], size) and _repeats(edit, value)
    if edit.trains(value) or (1,) * (4 - array.ndim) + array.shape != (1, 1, shape[2], size) or shape[0] != 1:
        return False
    return np.array_equal(array[..., : size // 2], array[..., size // 2 :])


def _cache(edit: Rewriter, value: Value, half: int, root: Any) -> tuple[Any, list[Any]]:
    """The first half of a cosine or sine as (batch, positions, size / 2), and the calls that compute it."""
    array = edit.constant(value)
    if array is not None:
        return edit.add_constant(np.ascontiguousarray(array.reshape(1, -1, 2 * half)[..., :half]), value), []
    part = edit.call("Slice", (value, *(edit.add_constant(np.array([n])) for n in (0, half, 3))), [root])
    flat = edit.call("Squeeze", (part.outputs[0], edit.add_constant(np.array([1]))), [root])
    return flat.outputs[0], [part, flat]


def _repeats(edit: Rewriter, value: Value | None) -> bool:
    """Whether the halves of the last axis are equal: elementwise calls after Concat(f, f)."""
    for _ in range(STEPS):
        call = None if value is None else value.producer
        if call is None:
            return False
        name = edit.operator(call)
        if name == "Concat":
            shape, axis = edit.shape(value), edit.attribute(call, "axis")
            last = axis == -1 or (shape is not None and axis == len(shape) - 1)
            return last and len(call.inputs) == 2 and call.inputs[0] == call.inputs[1]
        if name in ("Mul", "Div"):
            others = [i for i in call.inputs if edit.number(call, i) is None]
            if len(others) != 1:
                return False
            value = others[0]
        elif name in ("Cos", "Sin", "Cast", "Identity") or (name == "Unsqueeze" and _keeps_last(edit, call)):
            value = call.inputs[0]
        else:
            return False
    return False


def _keeps_last(edit: Rewriter, call: Node) -> bool:
    axes, shape = edit.listed(call, "axes", 1)[1], edit.shape(call.outputs[0])
    return axes is not None and shape is not None and len(shape) - 1 not in (valid_axes(axes, len(shape)) or (len(shape) - 1,))
