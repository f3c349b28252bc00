"""Calls whose result is their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .. import dtypes
from ..ir.graph import Node, Value
from ..ir.shapes import broadcast
from .rewriter import Rewriter

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
"""Operators that change the shape only."""
SMALL = 1 << 20
"""The maximum bytes of a constant that is compared with a neutral element."""
WHOLE = (1 << 31) - 1
"""An end of a Slice that is at least this takes everything."""


def identity(edit: Rewriter) -> int:
    """For any call of the form y = f(x), where f returns x for every x of its dtype and shape, replace y by x.

    f is Identity, Dropout that drops nothing and whose mask is not used, Cast and CastLike to the dtype of x, Concat, Sum, Mean,
    Max or Min of one value, Split into one part, Add or Sub of 0, Mul, Div or Pow by 1, And with true, Or with false, Clip
    without bounds, Expand, Slice, Reshape, Squeeze, Unsqueeze, Tile and Pad that keep the shape, Transpose that keeps the axes,
    Gather of all indices of an axis in order.
    """
    count = 0
    for call in edit.named(*TESTS):
        source = TESTS[edit.operator(call)](edit, call)
        if source is not None:
            count += edit.alias(call.outputs[0], source)
    return count


def drops_nothing(edit: Rewriter, call: Node) -> bool:
    """Whether a Dropout returns its input: always in version 7 or later, unless the input `training_mode` may be true."""
    version, source = edit.version(call), call.input(2)
    if version < 7:
        return bool(edit.attribute(call, "is_test", 0))
    if version < 12 or source is None:
        return True
    mode = edit.constant(source)
    return mode is not None and not mode.any()


def holds_only(array: np.ndarray | None, value: float) -> bool:
    """Whether an array is not empty and every element equals this number, sign of zero included."""
    if array is None or not array.size or array.dtype == dtypes.STRING or array.dtype.kind == "c":
        return False
    whole = array.dtype.kind in "iub"
    for part in (array.reshape(-1)[:1], array):  # the first element tells most arrays from a neutral one
        wide = part if whole else part.astype(np.float64)
        if not (wide == value).all() or not (value or whole or (np.signbit(wide) == np.signbit(value)).all()):
            return False
    return True


def same_shape(edit: Rewriter, call: Node) -> Value | None:
    """The value before a chain of calls that change the shape only, if the last one restores it."""
    x = call.inputs[0]
    shape = edit.shape(call.outputs[0])
    for _ in range(4):
        if shape is not None and edit.shape(x) == shape:
            return x
        before = x.producer if x is not None and edit.operator(call) in VIEWS else None
        if before is None or edit.operator(before) not in VIEWS:
            return None
        x = before.inputs[0]
    return None


def _identity(edit: Rewriter, call: Node) -> Value | None:
    return call.input(0)


def _dropout(edit: Rewriter, call: Node) -> Value | None:
    mask = call.outputs[1] if len(call.outputs) > 1 else None
    used = mask is not None and mask.is_used
    return call.inputs[0] if not used and drops_nothing(edit, call) else None


def _cast(edit: Rewriter, call: Node) -> Value | None:
    to, dtype = edit.attribute(call, "to"), edit.dtype(call.inputs[0])
    return call.inputs[0] if dtype is not None and dtypes.is_code(to) and dtypes.numpy_dtype(to) == dtype else None


def _cast_like(edit: Rewriter, call: Node) -> Value | None:
    dtype, like = edit.dtype(call.inputs[0]), edit.dtype(call.inputs[1])
    return call.inputs[0] if dtype is not None and like is not None and like == dtype else None  # NumPy: None == float64


def _concat(edit: Rewriter, call: Node) -> Value | None:
    """A Concat of one value; its shape is not known if the axis is not valid."""
    valid = edit.is_valid or edit.shape(call.outputs[0]) is not None
    return _of_one(edit, call) if valid else None


def _of_one(edit: Rewriter, call: Node) -> Value | None:
    return call.inputs[0] if len(call.inputs) == 1 else None


def _neutral(edit: Rewriter, call: Node) -> Value | None:
    """An operand of a binary call for which the other one is the neutral element and keeps its shape.

    x * 1, x / 1, x - 0 and x + -0.0 equal x, including the sign of a zero; x + 0.0 turns -0.0 into 0.0, and x * 0 is NaN for NaN.
    """
    name = edit.operator(call)
    neutral, commutes = NEUTRAL[name]
    for at in (1, 0) if commutes else (1,):
        x = call.inputs[1 - at]
        array = edit.constant(call.inputs[at], SMALL)
        if array is None or not holds_only(array, neutral) or (name == "Pow" and not _has_dtype(edit, x, array)):
            continue
        if _keeps_shape(edit, x, array):
            return x
    return None


def _has_dtype(edit: Rewriter, x: Value | None, array: np.ndarray) -> bool:
    dtype = edit.dtype(x)
    return dtype is not None and dtype == array.dtype  # for NumPy None equals float64


def _keeps_shape(edit: Rewriter, x: Value | None, array: np.ndarray) -> bool:
    """Whether x has the same shape after broadcasting with an array."""
    if array.ndim == 0:
        return True
    shape = edit.shape(x)
    if shape is None or len(shape) < array.ndim:
        return False
    return all(broadcast(a, b) == a for a, b in zip(shape[::-1], array.shape[::-1], strict=False) if b != 1)


def _transpose(edit: Rewriter, call: Node) -> Value | None:
    perm, x = edit.attribute(call, "perm"), call.inputs[0]
    if perm is None:
        shape = edit.shape(x)
        return x if shape is not None and len(shape) < 2 else None
    return x if list(perm) == list(range(len(perm))) and _fits(edit, x, len(perm)) else None


def _reshape(edit: Rewriter, call: Node) -> Value | None:
    """A Reshape to the sizes of x, or to those with one -1 if none of the others can be 0: [-1, 3] of [n, 3]."""
    x = call.inputs[0]
    shape, target = edit.shape(x), edit.listed(call, "shape", 1)[1]
    if shape is not None and target is not None and len(shape) == len(target):
        copies = not edit.attribute(call, "allowzero", 0)
        left = [i for i, (d, t) in enumerate(zip(shape, target, strict=True)) if not (d == t or (t == 0 and copies))]
        if not left or (len(left) == 1 and target[left[0]] == -1 and 0 not in shape):
            return x
    return same_shape(edit, call)


def _flatten(edit: Rewriter, call: Node) -> Value | None:
    x = call.inputs[0]
    return x if edit.rank(x) == 2 and edit.attribute(call, "axis", 1) in (1, -1) else same_shape(edit, call)


def _unsqueeze(edit: Rewriter, call: Node) -> Value | None:
    return call.inputs[0] if edit.listed(call, "axes", 1)[1] == () else same_shape(edit, call)


def _fits(edit: Rewriter, x: Value | None, count: int) -> bool:
    """Whether a list of numbers has one for each axis of x."""
    shape = edit.shape(x)
    return edit.is_valid or (shape is not None and len(shape) == count)


def _tile(edit: Rewriter, call: Node) -> Value | None:
    repeats = edit.ints(call.inputs[1]) if edit.version(call) >= 6 else None  # before 6 one axis was repeated
    ones = repeats is not None and all(r == 1 for r in repeats) and _fits(edit, call.inputs[0], len(repeats))
    return call.inputs[0] if ones else None


def _pad(edit: Rewriter, call: Node) -> Value | None:
    pads = edit.listed(call, "pads", 1)[1]
    if pads is None or any(pads) or (not edit.is_valid and call.input(3) is not None):
        return None
    return call.inputs[0] if _fits(edit, call.inputs[0], len(pads) // 2) else None


def _slice(edit: Rewriter, call: Node) -> Value | None:
    """A Slice of everything, from 0 to the end in steps of 1."""
    x = call.inputs[0]
    (_, starts), (_, ends), (_, axes), (stepped, steps) = (
        edit.listed(call, name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    if starts is None or ends is None or any(starts) or (stepped and (steps is None or any(s != 1 for s in steps))):
        return None
    if all(e >= WHOLE for e in ends):
        return x
    shape = edit.shape(x)
    if shape is None or (axes is None and edit.listed(call, "axes", 3)[0]):
        return None
    sizes = [shape[a] if -len(shape) <= a < len(shape) else "" for a in (range(len(ends)) if axes is None else axes)]
    whole = all(e >= WHOLE or (isinstance(d, int) and e >= d) for d, e in zip(sizes, ends, strict=False))
    return x if whole else None


def _gather(edit: Rewriter, call: Node) -> Value | None:
    x = call.inputs[0]
    shape, axis = edit.shape(x), edit.attribute(call, "axis", 0)
    size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if not isinstance(size, int):
        return None
    indices = edit.constant(call.inputs[1], SMALL)
    return x if indices is not None and indices.shape == (size,) and np.array_equal(indices, np.arange(size)) else None


def _split(edit: Rewriter, call: Node) -> Value | None:
    if len(call.outputs) > 1:
        return None
    return call.inputs[0] if edit.is_valid else same_shape(edit, call)


def _clip(edit: Rewriter, call: Node) -> Value | None:
    """Before version 11 the bounds had finite defaults, which clip infinities."""
    unbounded = edit.version(call) >= 11 and call.input(1) is None and call.input(2) is None
    return call.inputs[0] if unbounded else None


NEUTRAL = {
    "Add": (-0.0, True), "Sub": (0.0, False), "Mul": (1, True), "Div": (1, False), "Pow": (1, False), "And": (1, True),
    "Or": (0, True),
}  # fmt: skip
"""The neutral element of an operator, and whether its operands commute."""

_Test: TypeAlias = Callable[[Rewriter, Any], Any]
TESTS: dict[str, _Test] = {
    "Identity": _identity, "Dropout": _dropout, "Cast": _cast, "CastLike": _cast_like, "Concat": _concat, "Sum": _of_one,
    "Mean": _of_one, "Max": _of_one, "Min": _of_one, **dict.fromkeys(NEUTRAL, _neutral), "Transpose": _transpose,
    "Slice": _slice, "Expand": same_shape, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": same_shape,
    "Unsqueeze": _unsqueeze, "Tile": _tile, "Pad": _pad, "Split": _split, "Clip": _clip,
    "Gather": _gather,
}  # fmt: skip
