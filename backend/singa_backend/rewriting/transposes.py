"""Transposes that meet other Transposes."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph import Node
from .rewriter import Rewriter


def transposes(edit: Rewriter) -> int:
    """For any calls of the form Transpose(Transpose(x)), replace the last one by one Transpose of x, or by x."""
    count = 0
    for call in edit.named("Transpose"):
        before = edit.made_by(call.inputs[0], "Transpose")
        first, second = permutation(edit, before), permutation(edit, call)
        if before is None or first is None or second is None or len(first) != len(second):
            continue
        both = compose(first, second)
        if edit.is_valid and both == tuple(range(len(both))) and edit.alias(call.outputs[0], before.inputs[0]):
            count += 1
        else:
            count += edit.put(call, edit.again(call, before.inputs, call.outputs, [call], perm=list(both)))
    return count


def permutation(edit: Rewriter, call: Node | None) -> tuple[int, ...] | None:
    """The permutation of a Transpose; None if it is not known, or `perm` is not a permutation."""
    if call is None:
        return None
    perm = edit.attribute(call, "perm")
    if perm is None:
        axes = edit.rank(call.inputs[0])
        return None if axes is None else tuple(reversed(range(axes)))
    return tuple(perm) if sorted(perm) == list(range(len(perm))) else None


def compose(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """The permutation of Transpose(Transpose(x, first), second)."""
    return tuple(first[i] for i in second)


def invert(perm: Sequence[int]) -> tuple[int, ...]:
    """The inverse permutation."""
    return tuple(perm.index(i) for i in range(len(perm)))
