"""Padding before a convolution."""

from __future__ import annotations

from ...ir.graph import ABSENT
from ..region import Call
from .view import RegionView


def padding(edit: RegionView) -> int:
    """For any calls of the form Conv(Pad(x, pads), ...), where Pad adds zeros on spatial axes only, add pads to those of Conv."""
    count = 0
    for conv in edit.named("Conv"):
        pad = edit.made_by(conv.inputs[0], "Pad")
        weight = edit.facts.shape(conv.inputs[1])
        if (
            pad is None
            or weight is None
            or not edit.once(pad.outputs[0])
            or _mode(conv, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        ):
            continue
        added = _pads(edit, pad, len(weight))
        if added is None:
            continue
        n = len(weight) - 2
        own = conv.attributes.get("pads") if _mode(conv, "auto_pad", "NOTSET") == "NOTSET" else None
        own = own or [0] * (2 * n)
        total = [a + b for a, b in zip(own, [*added[2 : n + 2], *added[n + 4 :]], strict=True)]
        given = {k: conv.attributes[k] for k in conv.node.given if k not in ("pads", "auto_pad")}
        edit.put(conv, edit.call("Conv", (pad.inputs[0], *conv.inputs[1:]), [pad, conv], conv.outputs, pads=total, **given))
        count += 1
    return count


def _mode(call: Call, name: str, default: str) -> str:
    value = call.attributes.get(name) or default
    return value.decode() if isinstance(value, bytes) else str(value)


def _pads(edit: RegionView, pad: Call, rank: int) -> list[int] | None:
    """The pads for each axis if they are zeros on the spatial axes; None otherwise."""
    if _mode(pad, "mode", "constant") != "constant":
        return None
    pads = pad.attributes.get("pads") or pad.attributes.get("paddings")
    if pads is not None:
        if pad.attributes.get("value", 0.0):
            return None
    else:
        pads = edit.ints(pad.inputs[1]) if len(pad.inputs) > 1 else None
        if len(pad.inputs) > 2 and pad.inputs[2] != ABSENT:
            value = edit.constant(pad.inputs[2])
            if value is None or value.any():
                return None
    if pads is None:
        return None
    full = [0] * (2 * rank)
    axes = list(range(rank))
    if len(pad.inputs) > 3 and pad.inputs[3] != ABSENT:
        given = edit.ints(pad.inputs[3])
        if given is None or not all(-rank <= a < rank for a in given):
            return None
        axes = [a % rank for a in given]
    if len(pads) != 2 * len(axes) or any(p < 0 for p in pads):
        return None
    for i, axis in enumerate(axes):
        full[axis], full[axis + rank] = int(pads[i]), int(pads[i + len(axes)])
    return full if not any(full[:2]) and not any(full[rank : rank + 2]) else None
