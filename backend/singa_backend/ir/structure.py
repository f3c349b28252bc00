"""Reads messages into graphs for editing, without resolving operators; `write` in ir/writer.py writes them back.

Attributes stay messages, and initializers are values whose `constant` is the message of the tensor.  A value that no graph
defines is in the `captured` of the outermost graph.  `check_messages` must have accepted the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from onnx import FunctionProto, GraphProto, NodeProto

from ..errors import InvalidModel
from ..machine import without_collector
from ..proto.messages import TRAINING_GRADIENT
from ..proto.schemas import plain_domain
from .graph import Graph, Node, Value


def read_structure(
    proto: GraphProto | FunctionProto, opsets: Mapping[str, int], functions: Collection[tuple[str, str]] = ()
) -> Graph:
    """Read a graph, or the body of a function, with all graphs within.

    Args:
        proto: the message, which the writer changes.
        opsets: the imported opset of each domain.
        functions: (domain, name) of the model's functions.

    Returns:
        The graph; its nodes are sorted.

    Raises:
        InvalidModel: nodes have a cycle (SX101), or a value is defined twice (SX102).
    """
    with without_collector():
        return _Level(proto, Graph(proto.name, opsets), None, functions).read()


class _Level:
    """The values of a graph by name, and the scope around it."""

    def __init__(
        self, proto: GraphProto | FunctionProto, graph: Graph, outer: _Level | None, functions: Collection[tuple[str, str]]
    ) -> None:
        self.proto, self.graph, self.outer, self.functions = proto, graph, outer, functions
        self.values: dict[str, Value] = {}
        graph.proto = proto

    def read(self) -> Graph:
        graph, proto = self.graph, self.proto
        if isinstance(proto, GraphProto):
            for tensor in proto.initializer:
                graph.add_initializer(self.define(tensor.name, tensor))
            for sparse in proto.sparse_initializer:
                graph.add_initializer(self.define(sparse.values.name, sparse))
        for declared in proto.input:
            name = declared if isinstance(declared, str) else declared.name
            graph.add_input(self.define(name), optional=name in graph.initializers)
        self._define_outputs()
        if isinstance(proto, GraphProto):
            for note in proto.quantization_annotation:
                for name in (note.tensor_name, *(e.value for e in note.quant_parameter_tensor_names)):
                    self._pin(name)
        for message in proto.node:
            graph.append(self._node(message))
        graph.set_outputs(self.value(o if isinstance(o, str) else o.name) for o in proto.output)
        graph.sort()
        return graph

    def define(self, name: str, constant: Any = None) -> Value:
        value = self.values.setdefault(name, Value(name, graph=self.graph))
        value.constant = value.constant if constant is None else constant
        return value

    def _define_outputs(self) -> None:
        """Define what the nodes return, which earlier ones may read if they are not in order."""
        values, graph = self.values, self.graph
        for message in self.proto.node:
            for name in message.output:
                if name and name in values:
                    title = node_title(message.name, message.op_type, message.output)
                    raise InvalidModel(f"value {name!r} is defined more than once", code="SX102", node=title)
                if name:
                    values[name] = Value(name, graph=graph)

    def _pin(self, name: str) -> None:
        scope: _Level | None = self
        while scope is not None and name not in scope.values:
            scope = scope.outer
        if scope is not None:
            scope.values[name].pinned = True

    def value(self, name: str) -> Value:
        """The value of this graph that has a name here."""
        value = self.values.get(name)
        if value is None:
            value = self.define(name)
            self.graph.add_captured(value)
            if self.outer is not None and self.graph.owner is not None:
                self.graph.owner.captures[value] = self.outer.value(name)
        return value

    def _node(self, message: NodeProto) -> Node:
        domain, values = plain_domain(message.domain), self.values
        node = Node(
            message.op_type,
            [values.get(name) or self.value(name) if name else None for name in message.input],
            [values[name] if name else None for name in message.output],
            domain=domain, name=message.name, overload=message.overload, proto=message,
            plain=(domain, message.op_type) not in self.functions,
        )  # fmt: skip
        for a in message.attribute:
            if a.graphs:
                node.attributes[a.name] = tuple(self._body(g, node) for g in ((a.g, *a.graphs) if a.HasField("g") else a.graphs))
            else:
                node.attributes[a.name] = self._body(a.g, node) if a.HasField("g") else a
            if a.ref_attr_name:
                node.plain = False
        if (domain, message.op_type) == TRAINING_GRADIENT:
            self._pin(node.get("y", ""))
        return node

    def _body(self, proto: GraphProto, owner: Node) -> Graph:
        graph = Graph(proto.name, self.graph.opsets)
        graph.owner = owner
        return _Level(proto, graph, self, self.functions).read()


def node_title(name: str, operator: str, outputs: Any) -> str:
    """The name of a node, or its operator and outputs."""
    return name or f"{operator} of {', '.join(repr(o) for o in outputs if o)}"


def hidden_name(graph: Graph, around: tuple[Collection[str], ...] = ()) -> str:
    """A name that a body defines although a graph around it defines it; "" if there is none."""
    own = {v.name for v in defined_values(graph)}
    again = {name for name in own if any(name in outer for outer in around)}
    if again:
        return min(again)
    around = (*around, own)
    return next((hidden for n in graph.nodes for g in n.bodies if (hidden := hidden_name(g, around))), "")


def defined_values(graph: Graph) -> Iterator[Value]:
    """The values that a graph defines: inputs, initializers, what nodes return.

    Yields:
        The values; an input that has an initializer twice.
    """
    yield from graph.inputs
    yield from graph.optional_inputs
    yield from graph.initializers.values()
    for node in graph.nodes:
        yield from node.results


def check_structure(graph: Graph) -> None:
    """Check that every value is defined, and sort the nodes.

    Raises:
        InvalidModel: an input or output has no name, a value is not defined, the nodes have a cycle (SX101), or a value is
            defined twice (SX102).
    """
    if any(not v.name for v in (*graph.inputs, *graph.optional_inputs, *graph.outputs)):
        raise InvalidModel("an input or output of a graph has no name", code="SX101")
    graph.sort()
    defined = {*defined_values(graph), *(graph.captured if graph.owner is not None else ())}
    for reader, values in (*((n.title, n.reads) for n in graph.nodes), ("the graph's outputs", graph.outputs)):
        for v in values:
            if v not in defined:
                raise InvalidModel(f"value {v.name!r}, which {reader} reads, is not defined", code="SX101", node=reader)
