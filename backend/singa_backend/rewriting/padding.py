"""Padding before a convolution."""

from __future__ import annotations

from ..ir.graph import Node
from .rewriter import Rewriter


def padding(edit: Rewriter) -> int:
    """For any calls of the form Conv(Pad(x, pads), ...), where Pad adds zeros on spatial axes only, add pads to those of Conv."""
    count = 0
    for conv in edit.named("Conv"):
        padded, auto = conv.inputs[0], edit.attribute(conv, "auto_pad")
        pad, dims = edit.made_by(padded, "Pad"), edit.rank(conv.inputs[1])
        if padded is None or pad is None or dims is None or not padded.is_used_once or auto not in (None, "", "NOTSET", "VALID"):
            continue
        added = _pads(edit, pad, dims)
        if added is None:
            continue
        own = (None if auto == "VALID" else edit.attribute(conv, "pads")) or [0] * (2 * dims - 4)
        total = [a + b for a, b in zip(own, [*added[2:dims], *added[dims + 2 :]], strict=False)]
        if len(total) == len(own) == 2 * dims - 4:
            inputs = [pad.inputs[0], *conv.inputs[1:]]
            count += edit.put(conv, edit.again(conv, inputs, conv.outputs, [pad, conv], pads=total, auto_pad=None))
    return count


def _pads(edit: Rewriter, pad: Node, dims: int) -> list[int] | None:
    """The pads for each axis if they are zeros on the spatial axes; None otherwise."""
    if edit.attribute(pad, "mode", "constant") != "constant" or edit.attribute(pad, "value", 0.0):
        return None
    old = edit.attribute(pad, "paddings")  # the name in version 1
    pads = edit.listed(pad, "pads", 1)[1] if old is None else tuple(old)
    value, given = pad.input(2), pad.input(3)
    array = None if value is None else edit.constant(value)
    axes = tuple(range(dims)) if given is None else edit.ints(given)
    if pads is None or (value is not None and (array is None or array.any())):
        return None
    if axes is None or len(pads) != 2 * len(axes) or min(pads, default=0) < 0 or not all(-dims <= a < dims for a in axes):
        return None
    full = [0] * (2 * dims)
    for i, axis in enumerate(axes):
        full[axis % dims], full[axis % dims + dims] = pads[i], pads[i + len(axes)]
    return full if not any(full[:2]) and not any(full[dims : dims + 2]) else None
