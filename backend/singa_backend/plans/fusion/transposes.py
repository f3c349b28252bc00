"""Transposes that meet other Transposes."""

from __future__ import annotations

from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ...ir.shapes import Shape
from ...rewriting.transposes import invert, permutation
from ..region import RegionCall
from .facts import operator
from .view import RegionView

LENGTH = 8
"""The number of elementwise calls between two Transposes that cancel."""


def cancelled(graph: RegionView) -> int:
    """For any calls of the form Transpose(f(Transpose(x))), where f is elementwise and the Transposes cancel, remove both.

    f is a chain of unary operators, and of operators with a constant of one element.
    """
    count = 0
    for call in graph.named("Transpose"):
        perm = permutation(graph, call)
        chain = _chain(graph, call.inputs[0]) if perm is not None and graph.alive(call) else []
        before = graph.made_by(_source(graph, chain[-1]), "Transpose") if chain else None
        if perm is None or before is None or permutation(graph, before) != invert(perm):
            continue
        value, made = before.inputs[0], []
        old = before.outputs[0]
        for step in reversed(chain):
            outputs = call.outputs if step is chain[0] else (graph.region.new(),)
            node = step.node
            made.append(
                RegionCall(
                    node, tuple(value if i == old else i for i in step.inputs), tuple(outputs), step.scope, (*step.origins, node)
                )
            )
            value, old = outputs[0], step.outputs[0]
        graph.put(call, *made)
        count += 1
    return count


def _chain(graph: RegionView, value: int) -> list[RegionCall]:
    """The elementwise calls of one value before a Transpose, the last one first."""
    found: list[RegionCall] = []
    while len(found) < LENGTH:
        step = graph.producer(value)
        if (
            step is None
            or not graph.once(value)
            or len([o for o in step.outputs if o != ABSENT]) != 1
            or _source(graph, step) == ABSENT
        ):
            return found
        found.append(step)
        value = _source(graph, step)
    return []


def _source(graph: RegionView, step: RegionCall) -> int:
    """The one value of which a call is an elementwise function; ABSENT for other calls."""
    name = operator(step)
    if not name or step.node.graphs:
        return ABSENT
    if has_trait("", name, "unary"):
        return step.inputs[0] if all(i == ABSENT or i in graph.region.constants for i in step.inputs[1:]) else ABSENT
    if has_trait("", name, "broadcasting") and len(step.inputs) == 2:
        for at in (0, 1):
            array = graph.constant(step.inputs[1 - at])
            if array is not None and array.size == 1 and graph.facts.rank_at_least(step.inputs[at], array.ndim):
                return step.inputs[at]
    return ABSENT


def through_reshapes(graph: RegionView) -> int:
    """For any calls of the form Reshape(Transpose(Reshape(x))), where the last splits what the first joins, use one Transpose.

    The shapes must be known, if only by the names of their sizes.
    """
    count = 0
    for last in graph.named("Reshape"):
        middle = graph.made_by(last.inputs[0], "Transpose")
        first = graph.made_by(middle.inputs[0], "Reshape") if middle is not None else None
        perm = permutation(graph, middle)
        if first is None or middle is None or perm is None:
            continue
        shape, joined, result = (graph.facts.shape(v) for v in (first.inputs[0], first.outputs[0], last.outputs[0]))
        groups = None if shape is None or joined is None else _groups(shape, joined)
        if groups is None or shape is None or len(groups) != len(perm):
            continue
        axes = [a for i in perm for a in groups[i]]
        if result == tuple(shape[a] for a in axes):
            graph.put(last, graph.call("Transpose", first.inputs[:1], [first, middle, last], last.outputs, perm=axes))
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
