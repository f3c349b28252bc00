"""Whether two graphs compute the same: their nodes are alike in order, whatever the names of nodes and values are."""

from __future__ import annotations

from typing import Any

import numpy as np

from .graph import Graph, Node, Value


def same_graphs(a: Graph, b: Graph, stands: dict[Value, Value] | None = None) -> bool:
    """Whether two graphs have the same nodes, attributes and constants, and the same inputs and outputs in order.

    Args:
        a: a graph.
        b: the other one.
        stands: for values of a, those of b in their place: those that a body captures.
    """
    pairs = dict(stands or {})

    def same(x: Value | None, y: Value | None) -> bool:
        if x is None or y is None:
            return x is y
        return pairs[x] is y if x in pairs else x.constant is not None and _same(x.constant, y.constant, pairs)

    def node(m: Node, n: Node) -> bool:
        own, its = (_fields(one) for one in (m, n))
        sizes = [(len(one.inputs), len(one.outputs), len(one.captures)) for one in (m, n)]
        if sizes[0] != sizes[1] or own.keys() != its.keys():
            return False
        if not all(map(same, [*m.inputs, *m.captures.values()], [*n.inputs, *n.captures.values()])):
            return False
        inner = {**pairs, **dict(zip(m.captures, n.captures, strict=True))}
        if not all(_same(v, its[k], inner) for k, v in own.items()):
            return False
        pairs.update((x, y) for x, y in zip(m.outputs, n.outputs, strict=True) if x is not None and y is not None)
        return [x is None for x in m.outputs] == [y is None for y in n.outputs]

    if (len(a.inputs), len(a), len(a.outputs)) != (len(b.inputs), len(b), len(b.outputs)):
        return False
    pairs.update(zip(a.inputs, b.inputs, strict=True))
    return all(map(node, a.nodes, b.nodes)) and all(map(same, a.outputs, b.outputs))


def _fields(node: Node) -> dict[str, Any]:
    """What a node is, besides its values."""
    gradient, operator = node.gradient, node.operator
    version = None if operator is None else operator.version
    fields = {"": (node.domain, node.op_type, node.overload, version), **node.attributes}
    if gradient is not None:
        fields |= {f"gradient {k}": v for k, v in gradient.attributes.items()}
        fields["gradient"] = (gradient.function_name, gradient.outputs, gradient.places)
    return fields


def _same(x: Any, y: Any, pairs: dict[Value, Value]) -> bool:
    """Whether two attributes or constants are equal."""
    if isinstance(x, Graph):
        return isinstance(y, Graph) and same_graphs(x, y, pairs)
    if isinstance(x, np.ndarray):
        alike = isinstance(y, np.ndarray) and (x.dtype, x.shape) == (y.dtype, y.shape)
        return alike and (x is y or x.tobytes() == y.tobytes() if x.dtype != object else x.tolist() == y.tolist())
    if isinstance(x, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(_same(v, w, pairs) for v, w in zip(x, y, strict=True))
    return type(x) is type(y) and bool(x == y)
