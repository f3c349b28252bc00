"""Calls whose result is their input."""

from __future__ import annotations

import numpy as np

from ... import dtypes
from ...ir.graph import ABSENT
from ...passes.operator_facts import holds_only
from ..region import Call
from .facts import broadcast, operator
from .view import RegionView

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
"""Operators that change the shape only."""


def identity(edit: RegionView) -> int:
    """For any calls of the form y = f(x), where f returns x for every x of its dtype and shape, replace y by x.

    f is Identity, Dropout that drops nothing and whose mask is not used, Cast to the dtype of x, Concat, Sum, Mean, Max or Min of
    one value, Add or Sub of 0, Mul, Div or Pow by 1, Expand, Slice, Reshape, Squeeze and Unsqueeze that keep the shape, Transpose
    that keeps the axes.
    """
    count = 0
    for name, test in TESTS.items():
        for call in edit.named(name):
            source = test(edit, call)
            if source is not None:
                edit.alias(call.outputs[0], source)
                count += 1
    edit.flush()
    return count


def drops_nothing(edit: RegionView, call: Call) -> bool:
    """Whether a Dropout returns its input: always in version 7 or later, unless the input `training_mode` may be true."""
    version = call.node.version or 0
    if version < 7:
        return bool(call.attributes.get("is_test", 0))
    if version < 12 or len(call.inputs) < 3 or call.inputs[2] == ABSENT:
        return True
    mode = edit.constant(call.inputs[2])
    return mode is not None and not mode.any()


def _identity(edit: RegionView, call: Call) -> int | None:
    return call.inputs[0]


def _dropout(edit: RegionView, call: Call) -> int | None:
    mask = call.outputs[1] if len(call.outputs) > 1 else ABSENT
    used = mask != ABSENT and (mask in edit.outputs or bool(edit.users(mask)))
    return call.inputs[0] if not used and drops_nothing(edit, call) else None


def _cast(edit: RegionView, call: Call) -> int | None:
    to = call.attributes.get("to")
    dtype = edit.facts.dtype(call.inputs[0])
    return call.inputs[0] if isinstance(to, int) and dtype is not None and dtypes.numpy_dtype(to) == dtype else None


def _of_one(edit: RegionView, call: Call) -> int | None:
    return call.inputs[0] if len(call.inputs) == 1 else None


def _neutral(edit: RegionView, call: Call) -> int | None:
    """An operand of Add, Sub, Mul, Div or Pow for which the other one is the neutral element and keeps its shape."""
    neutral = 0 if call.name in ("Add", "Sub") else 1
    for at in (1, 0) if call.name in ("Add", "Mul") else (1,):
        array, x = edit.constant(call.inputs[at]), call.inputs[1 - at]
        if array is None or not holds_only(array, -0.0 if call.name == "Add" and array.dtype.kind not in "iu" else neutral):
            continue  # of floats, -0 is the neutral element of Add: -0 + 0 is 0
        if call.name == "Pow" and edit.facts.dtype(x) != array.dtype:
            continue
        if _keeps_shape(edit, x, array):
            return x
    return None


def _keeps_shape(edit: RegionView, x: int, array: np.ndarray) -> bool:
    """Whether x has the same shape after broadcasting with an array."""
    if array.ndim == 0:
        return True
    shape = edit.facts.shape(x)
    if shape is None or len(shape) < array.ndim:
        return False
    return all(broadcast(a, b) == a for a, b in zip(shape[::-1], array.shape[::-1], strict=False) if b != 1)


def _same_shape(edit: RegionView, call: Call) -> int | None:
    """The value before a chain of calls that change the shape only, if the last one restores it."""
    shape, x = edit.facts.shape(call.outputs[0]), call.inputs[0]
    for _ in range(4):
        if shape is not None and edit.facts.shape(x) == shape:
            return x
        before = edit.producer(x) if operator(call) in VIEWS else None
        if before is None or operator(before) not in VIEWS:
            return None
        x = before.inputs[0]
    return None


def _transpose(edit: RegionView, call: Call) -> int | None:
    """A Transpose that keeps the order; of another rank than its permutation it is invalid, and the definition reports that."""
    perm, x = call.attributes.get("perm"), call.inputs[0]
    return x if perm is not None and tuple(perm) == tuple(range(len(perm))) and edit.facts.rank(x) == len(perm) else None


def _slice(edit: RegionView, call: Call) -> int | None:
    """A Slice of everything, from 0 to the end in steps of 1."""
    starts, ends = (call.attributes.get(n) for n in ("starts", "ends"))
    steps = None
    if starts is None:
        starts, ends = (edit.ints(i) for i in call.inputs[1:3])
        if len(call.inputs) > 4 and call.inputs[4] != ABSENT:
            steps = edit.ints(call.inputs[4])
            if steps is None:
                return None
    if starts is None or ends is None or any(starts) or any(s != 1 for s in steps or ()):
        return None
    return call.inputs[0] if all(e >= (1 << 31) - 1 for e in ends) or _same_shape(edit, call) is not None else None


TESTS = {
    "Identity": _identity, "Dropout": _dropout, "Cast": _cast, "Concat": _of_one, "Sum": _of_one, "Mean": _of_one, "Max": _of_one,
    "Min": _of_one, "Add": _neutral, "Sub": _neutral, "Mul": _neutral, "Div": _neutral, "Pow": _neutral, "Transpose": _transpose,
    "Slice": _slice, "Expand": _same_shape, "Reshape": _same_shape, "Flatten": _same_shape, "Squeeze": _same_shape,
    "Unsqueeze": _same_shape,
}  # fmt: skip


def squares(edit: RegionView) -> int:
    """For any calls of the form Pow(x, 2), where x is float32, replace Pow by Mul(x, x)."""
    count = 0
    for call in edit.named("Pow"):
        exponent, x = edit.constant(call.inputs[1]), call.inputs[0]
        if exponent is None or exponent.size != 1 or exponent.reshape(-1)[0] != 2 or edit.facts.dtype(x) != np.float32:
            continue
        if edit.facts.rank_at_least(x, exponent.ndim):
            edit.put(call, edit.call("Mul", (x, x), [call], call.outputs))
            count += 1
    return count


def sums(edit: RegionView) -> int:
    """For any calls of the form Sum(a, b), replace Sum by Add."""
    count = 0
    for call in edit.named("Sum"):
        if len(call.inputs) == 2:
            edit.put(call, edit.call("Add", call.inputs, [call], call.outputs))
            count += 1
    return count
