"""Transposes that meet other Transposes."""

from __future__ import annotations

from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...ir.shapes import Shape
from ...rewriting.transposes import invert, permutation
from ..flat import operator
from .rewriter import PlanRewriter

LENGTH = 8
"""The number of elementwise calls between two Transposes that cancel."""


def cancelled(edit: PlanRewriter) -> int:
    """For any calls of the form Transpose(f(Transpose(x))), where f is elementwise and the Transposes cancel, remove both.

    f is a chain of unary operators, and of operators with a constant of one element.
    """
    count = 0
    for call in edit.named("Transpose"):
        perm = permutation(edit, call)
        chain = _chain(edit, call.inputs[0]) if perm is not None and call in edit.graph else []
        before = edit.made_by(_source(edit, chain[-1]), "Transpose") if chain else None
        if perm is None or before is None or permutation(edit, before) != invert(perm):
            continue
        value, old = before.inputs[0], before.outputs[0]
        made: list[ir.Node] = []
        for step in reversed(chain):
            outputs = call.outputs if step is chain[0] else [ir.Value()]
            made.append(step.copy([value if i is old else i for i in step.inputs], outputs, step.origins))
            value, old = outputs[0], step.outputs[0]
        edit.put(call, *made)
        count += 1
    return count


def _chain(edit: PlanRewriter, value: ir.Value | None) -> list[ir.Node]:
    """The elementwise calls of one value before a Transpose, the last one first."""
    found: list[ir.Node] = []
    while len(found) < LENGTH:
        step = value.producer if value is not None and value.is_used_once else None
        before = None if step is None or len(step.results) != 1 else _source(edit, step)
        if step is None or before is None:
            return found
        found.append(step)
        value = before
    return []


def _source(edit: PlanRewriter, step: ir.Node) -> ir.Value | None:
    """The one value of which a call is an elementwise function; None for other calls."""
    name = operator(step)
    if not name or step.bodies:
        return None
    if has_trait("", name, "unary"):
        return step.inputs[0] if all(i is None or i.constant is not None for i in step.inputs[1:]) else None
    if has_trait("", name, "broadcasting") and len(step.inputs) == 2:
        for at in (0, 1):
            array = edit.constant(step.inputs[1 - at])
            if array is not None and array.size == 1 and edit.facts.rank_at_least(step.inputs[at], array.ndim):
                return step.inputs[at]
    return None


def through_reshapes(edit: PlanRewriter) -> int:
    """For any calls of the form Reshape(Transpose(Reshape(x))), where the last splits what the first joins, use one Transpose.

    The shapes must be known, if only by the names of their sizes.
    """
    count = 0
    for last in edit.named("Reshape"):
        middle = edit.made_by(last.inputs[0], "Transpose")
        first = edit.made_by(middle.inputs[0], "Reshape") if middle is not None else None
        perm = permutation(edit, middle)
        if first is None or middle is None or perm is None:
            continue
        shape, joined, result = (edit.shape(v) for v in (first.inputs[0], first.outputs[0], last.outputs[0]))
        groups = None if shape is None or joined is None else _groups(shape, joined)
        if groups is None or shape is None or len(groups) != len(perm):
            continue
        axes = [a for i in perm for a in groups[i]]
        if result == tuple(shape[a] for a in axes):
            edit.put(last, edit.call("Transpose", first.inputs[:1], [first, middle, last], last.outputs, perm=axes))
            count += 1
    return count


def _groups(shape: Shape, joined: Shape) -> list[list[int]] | None:
    """The axes of a shape that each axis of a joined shape holds, if only one of those holds several; None otherwise."""
    if len(joined) >= len(shape):
        return None
    after = 0
    while after < len(joined) - 1 and joined[-1 - after] == shape[-1 - after]:
        after += 1
    before = len(joined) - 1 - after
    if joined[:before] != shape[:before]:
        return None
    middle = list(range(before, len(shape) - after))
    return [*([i] for i in range(before)), middle, *([i] for i in range(len(shape) - after, len(shape)))]
