"""The graph of a plan: the nodes of a model's graph, functions inlined, which passes rewrite and the planner compiles.

Initializers and the tensors of Constant nodes are values with a constant.  A fused operator is a node of a standard ONNX operator
at its newest version, whatever opset the model has, so the graph still runs by the definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..devices.namespaces import numpy
from ..ir import graph as ir
from ..ir.gradient import GRADIENT
from ..ir.versioned import versioned
from ..kernels.table import TRAINING
from ..machine import without_collector

MOST = 200_000
"""The maximum number of nodes of a plan: a model whose functions call functions may have more, and runs node by node."""
ORIGINS = 32
"""The number of nodes that a node of a pass names as those that it replaces."""


class NotFlat(Exception):
    """A plan cannot hold the functions of a model: they have too many nodes, or a body captures an absent input."""


@dataclass(eq=False)
class Roles:
    """What a plan needs to know of the values of its graph.

    Attributes:
        is_step: whether the graph is a recorded step, which has gradients.
        replaced: the input that a result replaces, by the result.
        last: the index of the first node that only makes such results; those that follow it do the same.
        only_sent: the values that other processes receive, and on whose sizes nothing in the graph depends.
    """

    is_step: bool = False
    replaced: dict[ir.Value, ir.Value] = field(default_factory=dict)
    last: int | None = None
    only_sent: frozenset[ir.Value] = frozenset()


class Inliner:
    """Copies the nodes of graphs, with the bodies of functions in place of their calls.

    Args:
        states: constants that replace those of initializers.
        origins: the nodes in whose place the copies are, for reports; each copy is in place of its own node if there are none,
            or if it has bodies, which definitions compute over the numbers of that node's graph.

    Attributes:
        nodes: the copies, which are in no graph yet.
    """

    def __init__(self, states: Mapping[ir.Value, Any] | None = None, origins: tuple[ir.Node, ...] = ()) -> None:
        self.nodes: list[ir.Node] = []
        self._states, self._origins = states or {}, origins
        self._left = MOST

    def inline(self, graph: ir.Graph, copies: dict[ir.Value, ir.Value]) -> list[ir.Value | None]:
        """Copy the nodes of a graph; return its outputs.

        Args:
            graph: the graph.
            copies: what takes the place of its inputs and captured values; it is completed.
        """
        self._left -= 1 + len(graph)
        if self._left < 0:
            raise NotFlat
        for name, value in graph.initializers.items():
            copies[value] = ir.Value(name, constant=self._states.get(value, value.constant))
        for node in graph.nodes:
            inputs = [None if v is None else copies.get(v) for v in node.inputs]
            function = node.function
            if function is not None and node.gradient is None:
                inner = {v: i for v, i in zip(function.inputs, inputs, strict=False) if i is not None}
                results = zip(node.outputs, self.inline(function, inner), strict=False)
                copies |= {o: result for o, result in results if o is not None and result is not None}
                continue
            constant = node.attributes.get("value") if node.is_("Constant") else None
            if isinstance(constant, np.ndarray):
                copies[node.results[0]] = ir.Value(node.results[0].name, constant=constant)
                continue
            copies |= {o: ir.Value(o.name) for o in node.results}
            outputs = [None if o is None else copies[o] for o in node.outputs]
            if not copies.keys() >= set(node.captures.values()):
                raise NotFlat  # a body captures an input that the call of the function omits
            origins = (not node.bodies and self._origins) or (node,)
            self.nodes.append(node.copy(inputs, outputs, origins, copies))
        return [copies.get(v) for v in graph.outputs]


def flat(
    graph: ir.Graph,
    states: Mapping[ir.Value, Any] | None = None,
    captured: Mapping[ir.Value, Any] | None = None,
    copies: dict[ir.Value, ir.Value] | None = None,
) -> ir.Graph:
    """A copy of a graph with the bodies of functions in place of their calls.

    The values that a body captures are inputs of the copy, after those of the graph, or constants.

    Args:
        graph: the graph, or the body of a node.
        states: constants that replace those of its initializers.
        captured: the captured values that are constant: a value with the constant, or the constant itself.
        copies: the copy of each value is added to it.
    """
    copy, constants = ir.Graph(graph.name, graph.opsets), captured or {}
    copies = {} if copies is None else copies
    for v in (*graph.inputs, *graph.captured):
        if v in constants:
            copies[v] = constants[v] if isinstance(constants[v], ir.Value) else ir.Value(v.name, constant=constants[v])
        else:
            copies[v] = copy.add_input(ir.Value(v.name, declared=v.declared))
    inliner = Inliner(states)
    with without_collector():
        outputs = inliner.inline(graph, copies)
        for node in inliner.nodes:
            copy.append(node)
    copy.set_outputs(v for v in outputs if v is not None)
    return copy


def read_from(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Let a graph, which no pass rewrites any more, read values of another one in place of its inputs."""
    for own, value in zip(graph.inputs, values, strict=True):
        own.replace_all_uses_with(value)
    graph.inputs = []


def call_of(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value | None],
    origins: Sequence[ir.Node],
    domain: str = "",
    **attributes: Any,
) -> ir.Node:
    """A node of an operator's newest version in place of others.

    Args:
        op_type: the operator.
        inputs: the values that it reads.
        outputs: the values that it returns; a new one if there are none.
        origins: the nodes that it replaces; errors name the last of them.
        domain: of the operator.
        **attributes: those that differ from the defaults.
    """
    operator, last = versioned(domain, op_type), origins[-1]
    return ir.Node(
        op_type,
        list(inputs),
        list(outputs) or [ir.Value()],
        operator.arguments({}) | attributes,
        domain,
        last.name,
        "",
        last.opset,
        given=frozenset(attributes),
        operator=operator,
        origins=tuple(n for node in origins for n in node.origins)[-ORIGINS:],
    )


def origins_of(nodes: Sequence[ir.Node]) -> tuple[ir.Node, ...]:
    """The nodes of the model in whose place some nodes are, each once."""
    return tuple(dict.fromkeys(n for node in nodes for n in node.origins))


def model_node(node: ir.Node) -> ir.Node:
    """The node of the model that a node is a copy of; the node itself if a pass has made it."""
    return node.origins[0] if len(node.origins) == 1 and node.origins[0].attributes is node.attributes else node


def operator(node: ir.Node | None) -> str:
    """The operator of ONNX's domain that a node calls in its present meaning; "" for any other."""
    if node is None or node.domain or (node.operator is not None and not node.operator.is_modern):
        return ""
    return node.op_type


def once(value: ir.Value | None) -> bool:
    """Whether one input of one node is the only use of a value."""
    return value is not None and value.is_used_once


def run(node: ir.Node, values: Sequence[Any]) -> list[Any]:
    """The results of a node without bodies for these inputs by the definition, on the host."""
    assert node.operator is not None
    return node.operator.run(numpy, values, node.attributes, [o is not None for o in node.outputs])


def has_kernel_only(node: ir.Node) -> bool:
    """Whether only kernels compute a node, and there is no definition: a gradient, or a node in training form."""
    return node.domain in (GRADIENT, TRAINING)


def branches_fit(node: ir.Node) -> bool:
    """Whether both branches of an If have the same number of outputs, as many as the If; its definition refuses others."""
    counts = {len(node.attributes[name].outputs) for name in ("then_branch", "else_branch")}
    return len(counts) == 1 and counts.pop() >= len(node.outputs)
