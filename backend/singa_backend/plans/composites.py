"""Gradients of activations in primitive form: the calls of several rules as the gradient of one operator.

Files of PyTorch hold Gelu as Div, Erf, Add and two Mul, of which each has a gradient.  If all that reads x is such a form, the
gradient of x is that of Gelu, given the gradient of the result of the form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..ir import graph as ir
from ..ir.gradient_calls import GradientCall
from ..kernels.table import gradient_kernels
from ..rewriting.activations import activations
from .flat import scratch
from .fusion.rewriter import PlanRewriter

MIDDLES = frozenset(["Erf", "Tanh", "Sigmoid"])
"""The functions that the forms have in the middle."""


def composites(graph: ir.Graph, known: Sequence[GradientCall], ids: dict[str, ir.Value]) -> list[GradientCall]:
    """The gradients of activations in primitive form, as calls of a rule.

    Args:
        graph: the graph as it was read.
        known: the calls of gradient rules.
        ids: each value by its name.
    """
    if not any(c.op_type in MIDDLES and not c.domain for c in known):
        return []
    names = {i: name for name, i in reversed(list(ids.items()))}
    given: dict[ir.Value, str] = {}
    for one in known:
        given |= {ids[y]: dy for y, dy in zip(one.outputs, one.dys, strict=False) if y in ids and dy in ids}
    differentiated = {ids[n] for one in known for n in one.outputs if n in ids}
    forward = [c for c in graph.nodes if differentiated.intersection(c.outputs)]
    copied, originals = scratch(forward)
    before = set(copied.nodes)
    activations(PlanRewriter(copied))
    outputs, places = set(graph.outputs), {v: place for place, v in enumerate(ids.values())}
    made: list[GradientCall] = []
    for call in [c for c in copied.nodes if c not in before]:
        x, y = (originals[v] for v in (call.inputs[0], call.outputs[0]) if v is not None)
        form, operator = _between(forward, x, y), call.operator
        if operator is None or ("", call.op_type) not in gradient_kernels or any(c not in form for c in forward if x in c.reads):
            continue
        if x in outputs or x not in given or y not in given or not {x, y} <= names.keys():
            continue
        ends = (names[x],), (names[y],), (given[y],), (given[x],)
        made.append(GradientCall("", call.op_type, operator.version, call.attributes, *ends))
    return sorted(made, key=lambda c: places[ids[c.outputs[0]]])


def _between(nodes: Collection[ir.Node], x: ir.Value, y: ir.Value) -> set[ir.Node]:
    """The nodes that compute y from x and constants."""
    among, found = set(nodes), set[ir.Node]()
    pending = [y]
    while pending:
        value = pending.pop()
        node = None if value is x else value.producer
        if node in among and node is not None and node not in found:
            found.add(node)
            pending += node.reads
    return found
