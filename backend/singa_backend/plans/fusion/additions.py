"""Constants that are added one after another, such as the biases and masks of windows."""

from __future__ import annotations

import numpy as np

from ...ir import graph as ir
from ..flat import once
from .rewriter import PlanRewriter

LARGEST = 1 << 24
"""The maximum bytes of a constant that is made."""


def additions(edit: PlanRewriter) -> int:
    """For any calls of the form (x + a) + b, with constants a and b, replace the last one by x + (a + b), if they do not cancel.

    A bias of channels is left where it is: a product adds it by itself.
    """
    count = 0
    for call in edit.named("Add"):
        b, inner = _operands(edit, call)
        before = edit.made_by(inner, "Add") if b is not None and once(inner) else None
        a, x = _operands(edit, before) if before is not None else (None, None)
        if a is None or b is None or before is None or a.dtype != b.dtype or a.dtype != np.float32 or min(a.ndim, b.ndim) < 2:
            continue
        with np.errstate(all="ignore"):
            try:
                total = a + b
            except ValueError:
                continue
        largest = np.maximum(abs(a), abs(b))
        if total.nbytes > LARGEST or not (np.isfinite(a) & np.isfinite(b) & (abs(total) >= largest / 2)).all():
            continue
        edit.put(call, edit.call("Add", (x, edit.add_constant(total)), [before, call], call.outputs))
        count += 1
    return count


def windows(edit: PlanRewriter) -> int:
    """For any calls of the form Reshape(Reshape(x) + a), where a is constant and the shape that of x, replace them by x + b.

    b has the elements of a at their new places.  The shapes must be known.
    """
    count = 0
    for call in edit.named("Reshape"):
        add = edit.made_by(call.inputs[0], "Add")
        total = call.inputs[0]
        array, inner = _operands(edit, add) if add is not None and once(total) else (None, None)
        first = edit.made_by(inner, "Reshape") if array is not None else None
        if first is None or add is None or array is None or not once(inner):
            continue
        shape, middle = edit.shape(first.inputs[0]), edit.shape(inner)
        if shape is None or middle is None or edit.shape(call.outputs[0]) != shape or edit.shape(add.outputs[0]) != middle:
            continue
        made = _moved(array, middle, shape)
        if made is not None:
            inputs = (first.inputs[0], edit.add_constant(made))
            edit.put(call, edit.call("Add", inputs, [first, add, call], call.outputs))
            count += 1
    return count


def _operands(edit: PlanRewriter, add: ir.Node) -> tuple[np.ndarray | None, ir.Value | None]:
    """The constant operand of an Add, and the other one."""
    for at in (0, 1):
        array = edit.constant(add.inputs[at])
        if array is not None:
            return array, add.inputs[1 - at]
    return None, add.inputs[0]


def _moved(array: np.ndarray, middle: tuple[int | str, ...], shape: tuple[int | str, ...]) -> np.ndarray | None:
    """A constant that broadcasts to one shape, as one that broadcasts to another shape of the same elements."""
    sizes, target = ([d for d in s if isinstance(d, int)] for s in (middle, shape))
    if len(sizes) != len(middle) or len(target) != len(shape) or np.prod(sizes, dtype=float) * array.itemsize > LARGEST:
        return None
    full = np.broadcast_to(array, sizes).reshape(target)
    for axis in range(full.ndim):  # equal along an axis: one element is enough
        first = full[(slice(None),) * axis + (slice(0, 1),)]
        if full.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, full.shape), full):
            full = first
    return np.ascontiguousarray(full)
