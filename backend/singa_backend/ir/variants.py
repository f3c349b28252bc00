"""Graphs that differ from another one in a part: in constants, inputs, nodes or outputs.

Each is a copy; bodies, constants and messages are shared.
"""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..proto.values import Value as Declared
from .graph import ABSENT, Graph, Node, Value

_FIELDS = (
    "attributes", "domain", "name", "overload", "opset", "plain", "given", "operator", "function", "forward_graph", "gradient",
)  # fmt: skip
"""The fields of a node that a copy shares."""


def copied(graph: Graph) -> Graph:
    """Return a graph of new nodes and values; bodies are shared, and belong to the nodes of the original.

    Args:
        graph: the graph.

    Returns:
        The copy.
    """
    return _rebuilt(*_flat(graph))


def _flat(graph: Graph) -> tuple[Any, ...]:
    """A graph in numbers instead of references, from which `_rebuilt` makes an equal one."""
    number: dict[Value, int] = {}

    def at(values: Iterable[Value | None]) -> list[int]:
        return [ABSENT if v is None else number.setdefault(v, len(number)) for v in values]

    ends = [at(v) for v in (graph.inputs, graph.optional_inputs, graph.initializers.values(), graph.captured)]
    nodes = []
    for n in graph.nodes:
        outer = at(n.captures[c] for body in n.bodies for c in body.captured)
        nodes.append((n.op_type, {f: getattr(n, f) for f in _FIELDS}, at(n.inputs), at(n.outputs), outer))
    ends.append(at(graph.outputs))
    values = [(v.name, v.constant, v.declared, v.pinned) for v in number]
    facts = graph.name, graph.opsets, graph.declared_outputs, graph.warnings, graph.marked, graph.is_step
    return facts, values, nodes, ends


def _rebuilt(facts: tuple[Any, ...], values: list[Any], nodes: list[Any], ends: list[list[int]]) -> Graph:
    graph = Graph(*facts[:2])
    graph.declared_outputs, graph.warnings, graph.marked, graph.is_step = facts[2:]
    made: list[Any] = []
    for name, constant, declared, pinned in values:
        made.append(Value(name, graph=graph, constant=constant, declared=declared))
        made[-1].pinned = pinned
    made.append(None)  # ABSENT
    inputs, optional, initializers, captured, outputs = ([made[i] for i in end] for end in ends)
    graph.inputs, graph.optional_inputs, graph.captured = inputs, optional, captured
    graph.initializers = {v.name: v for v in initializers}
    for op_type, fields, takes, makes, outer in nodes:
        node = Node(op_type, [made[i] for i in takes], [made[i] for i in makes], **fields)
        inner = [c for body in node.bodies for c in body.captured]
        node.captures = {c: made[i] for c, i in zip(inner, outer, strict=True)}
        for body in node.bodies:
            if body.owner is None:
                body.owner = node
        graph.append(node)
    graph.set_outputs(outputs)
    return graph


def _reduced(graph: Graph) -> tuple[Any, ...]:
    for node in graph.nodes:
        node.body()
    return _rebuilt, _flat(graph)


copyreg.pickle(Graph, _reduced)  # without recursion from node to node


def with_states(graph: Graph, states: Mapping[str, Any]) -> Graph:
    """Return a copy of this graph with other constants.

    Args:
        graph: the graph.
        states: those that differ, by the names of their initializers.

    Returns:
        The copy.
    """
    made = copied(graph)
    for name, constant in states.items():
        made.initializers[name].constant = constant
    return made


def with_inputs(graph: Graph, names: Sequence[str]) -> Graph:
    """Return a copy of this graph with initializers as required inputs, after the others.

    Args:
        graph: the graph.
        names: the names of the initializers.

    Returns:
        The copy.
    """
    made = copied(graph)
    for name in names:
        value = made.initializers.pop(name)
        if value.declared is None:
            value.declared = Declared(name, "tensor", value.constant.dtype, value.constant.shape)
        value.constant = None
        made.inputs.append(value)
    made.optional_inputs = [v for v in made.optional_inputs if v.name not in names]
    return made


def with_weights(graph: Graph) -> Graph:
    """Return a graph whose weights are initializers: some exporters write weights as Constant nodes.

    A scalar constant (the bound of a Clip), and one that is read on the host (the scales of a Resize), remains a node.

    Returns:
        This graph if any initializer is of floats, or no constant is a weight; otherwise a copy.
    """
    if any(dtypes.is_float(v.constant.dtype) for v in graph.initializers.values()):
        return graph
    if not any(map(_is_weight, graph.nodes)):
        return graph
    made = copied(graph)
    for node in filter(_is_weight, made.nodes):
        (value,) = node.results
        made.remove(node)
        value.constant = node.attributes["value"]
        made.add_initializer(value)
    return made


def select(graph: Graph, nodes: Collection[Node], outputs: Sequence[str]) -> Graph:
    """Return a copy of this graph with a part of its nodes and other outputs.

    Args:
        graph: the graph.
        nodes: the nodes to keep.
        outputs: the names of the values to return.

    Returns:
        The copy.
    """
    made, kept = copied(graph), set(nodes)
    made.remove(*(n for n, own in zip(made.nodes, graph.nodes, strict=True) if own not in kept))
    known = made.values
    made.set_outputs(known[name] for name in outputs)
    declared = {v.name: v for v in (*(v.declared for v in (*made.inputs, *made.optional_inputs)), *made.declared_outputs) if v}
    made.declared_outputs = tuple(declared.get(name, Declared(name)) for name in outputs)
    return made


def _is_weight(node: Node) -> bool:
    """Whether a node is a Constant of floats with axes that no operator reads on the host."""
    value = node.attributes.get("value") if (node.domain, node.op_type) == ("", "Constant") else None
    if not isinstance(value, np.ndarray) or not value.ndim or not dtypes.is_float(value.dtype) or node.outputs[0] is None:
        return False
    for user, place in node.outputs[0].uses:
        declared = user.operator.declaration.inputs if isinstance(user, Node) and user.operator else ()
        if declared and type(place) is int and declared[min(place, len(declared) - 1)].host is not None:
            return False
    return True
