"""Transposes that meet other Transposes."""

from __future__ import annotations

from collections.abc import Sequence

from .view import C, GraphView, V, rank


def transposes(view: GraphView[V, C]) -> int:
    """For any calls of the form Transpose(Transpose(x)), replace the last one by one Transpose of x, or by x."""
    count = 0
    for call in view.named("Transpose"):
        before = view.made_by(call.inputs[0], "Transpose")
        first, second = permutation(view, before), permutation(view, call)
        if before is None or first is None or second is None or len(first) != len(second):
            continue
        both = compose(first, second)
        if view.is_valid and both == tuple(range(len(both))) and view.alias(call.outputs[0], before.inputs[0]):
            count += 1
        else:
            count += view.put(call, view.again(call, before.inputs, call.outputs, [call], perm=list(both)))
    view.flush()
    return count


def permutation(view: GraphView[V, C], call: C | None) -> tuple[int, ...] | None:
    """The permutation of a Transpose; None if it is not known, or `perm` is not a permutation."""
    if call is None:
        return None
    perm = view.attribute(call, "perm")
    if perm is None:
        axes = rank(view, call.inputs[0])
        return None if axes is None else tuple(reversed(range(axes)))
    return tuple(perm) if sorted(perm) == list(range(len(perm))) else None


def compose(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """The permutation of Transpose(Transpose(x, first), second)."""
    return tuple(first[i] for i in second)


def invert(perm: Sequence[int]) -> tuple[int, ...]:
    """The inverse permutation."""
    return tuple(perm.index(i) for i in range(len(perm)))
