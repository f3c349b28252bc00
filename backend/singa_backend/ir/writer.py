"""Writes graphs back to the messages that they were read from: what did not change stays as it is, and no weights are copied.

So unknown fields, comments, sparse tensors, and the types of values that still exist are kept.  A graph that was built, not read,
is written by `graph_message`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper
from onnx.numpy_helper import from_array

from ..proto.messages import FreshNames
from ..proto.schemas import plain_domain, public_domain
from .graph import Graph, Node, Value

FORM = "_form"
"""What precedes the number in the names of functions of one operator, in files that have no overloads."""

OVERLOADS = 10
"""The IR version from which functions have overloads."""


def write_model(model: ModelProto, main: Graph, functions: Sequence[Graph]) -> None:
    """Write the main graph and the bodies of functions to their messages; functions that are not listed are removed."""
    write(main)
    kept = {id(graph.proto) for graph in functions}
    for graph in functions:
        write(graph)
    _arrange(model.functions, [f for f in model.functions if id(f) in kept])


def write(graph: Graph) -> None:
    """Write a graph and those within it to the messages that they were read from."""
    proto = graph.proto
    if graph.owner is None and isinstance(proto, GraphProto):
        _name_outputs(graph, proto)
    nodes, before = graph.nodes, _computed(proto) if proto.value_info else set[str]()
    for node in nodes:
        for body in node.bodies if node.attributes else ():
            write(body)
    for node in nodes:
        if node.proto is None:
            node.proto = proto.node.add()
            node.proto.CopyFrom(node_message(node))
        else:
            _update(node.proto, node, graph)
    _arrange(proto.node, [node.proto for node in nodes])
    if isinstance(proto, GraphProto):
        _values(graph, proto)
    if before:
        gone = before.difference(graph.initializers, (o.name for n in nodes for o in n.results))
        _arrange(proto.value_info, [v for v in proto.value_info if v.name not in gone])


def _computed(proto: GraphProto | FunctionProto) -> set[str]:
    """The names of a message's initializers and of what its nodes return."""
    names = {o for p in proto.node for o in p.output}
    if isinstance(proto, GraphProto):
        names |= {t.name for t in proto.initializer} | {t.values.name for t in proto.sparse_initializer}
    return names


def _name_outputs(graph: Graph, proto: GraphProto) -> None:
    """Let each output have its declared name: rename its value, or return it by an Identity if others know the value's name."""
    for i, (value, declared) in enumerate(zip(graph.outputs, proto.output, strict=True)):
        if value.name == declared.name:
            continue
        others = {v.name for k, v in enumerate(graph.outputs) if k != i}
        holder = next((o for n in graph.nodes for o in n.results if o.name == declared.name), None)
        may_rename = value.producer is not None and not value.pinned and value.name not in others
        if holder is not None and may_rename:
            holder.name, value.name = value.name, declared.name
            continue
        if holder is not None:
            holder.name = FreshNames({v.name for inner in graph.walk() for v in inner.values.values()}).new(declared.name)
        if may_rename:
            value.name = declared.name
        else:
            returned = Value(declared.name)
            graph.append(Node("Identity", [value], [returned], name=f"Identity_of_{declared.name}"))
            graph.put(i, returned)


def value_names(values: Iterable[Value | None], graph: Graph) -> list[str]:
    """The names of values of a graph, "" for an absent one; a captured value has the name of what it stands for."""
    if graph.owner is None:
        return [v.name if v is not None else "" for v in values]
    return [v.original.name if v is not None else "" for v in values]


def _update(proto: NodeProto, node: Node, graph: Graph) -> None:
    if proto.op_type != node.op_type:
        proto.op_type = node.op_type
    if plain_domain(proto.domain) != node.domain:
        proto.domain = node.domain
    for names, values in ((proto.input, node.inputs), (proto.output, node.outputs)):
        now = value_names(values, graph)
        if list(names) != now:
            del names[:]
            names.extend(now)
    there, attributes = list(proto.attribute), list(node.attributes.values())
    if len(there) == len(attributes) and all(a is b for a, b in zip(there, attributes, strict=True)):
        return
    present = {id(a) for a in there}
    new = {name: a for name, a in node.attributes.items() if isinstance(a, AttributeProto) and id(a) not in present}
    _arrange(proto.attribute, [a for a in there if a.name in node.attributes and a.name not in new])
    proto.attribute.extend(new.values())


def node_message(
    node: Node, graph: Graph | None = None, attribute: Callable[[AttributeProto], AttributeProto] | None = None,
    body: Callable[[Graph], GraphProto] | None = None,
) -> NodeProto:  # fmt: skip
    """Create the message of a node; `attribute` and `body` return what it contains in place of a message or a graph."""
    domain = public_domain(node.domain) or None
    proto = NodeProto(op_type=node.op_type, domain=domain, name=node.name or None, overload=node.overload or None)
    graph = node.graph if graph is None else graph
    assert graph is not None
    proto.input.extend(value_names(node.inputs, graph))
    proto.output.extend(value_names(node.outputs, graph))
    messages: Mapping[str, Any] = node.given if node.operator is not None and isinstance(node.given, Mapping) else node.attributes
    for name, value in messages.items():
        if isinstance(value, AttributeProto):
            proto.attribute.append(value if attribute is None else attribute(value))
        elif body is not None and isinstance(value, Graph):
            proto.attribute.add(name=name, type=AttributeProto.GRAPH).g.CopyFrom(body(value))
        elif body is not None:
            proto.attribute.add(name=name, type=AttributeProto.GRAPHS).graphs.extend(map(body, value))
    return proto


def graph_message(graph: Graph, tensor: Callable[[Value], TensorProto] | None = None) -> GraphProto:
    """Create the message of a graph that was built; `tensor` returns that of an initializer."""
    proto = GraphProto(name=graph.name)
    for node in graph.nodes:
        message = node_message(node, graph, body=graph_message)
        for field in ("domain", "overload"):  # an empty one is written if the proto of the node has it, or for any other call
            if field == "domain" if node.proto is None else node.proto.HasField(field):
                setattr(message, field, getattr(message, field))
        proto.node.append(message)
    proto.initializer.extend(map(tensor or (lambda v: from_array(v.constant, v.name)), graph.initializers.values()))
    for v in graph.declared_inputs:
        proto.input.add(name=v.name, type=v.type)
    for name, v in zip(value_names(graph.outputs, graph), graph.declared_outputs, strict=True):
        proto.output.add(name=name, type=v.type)
    return proto


def form_name(name: str, number: int, opset: int) -> tuple[str, str]:
    """The name and the overload of the function of a form, in a file of an opset."""
    if helper.find_min_ir_version_for([helper.make_opsetid("", opset)]) >= OVERLOADS:
        return name, f"form{number}"
    return f"{name}{FORM}{number}", ""


def function_message(graph: Graph, domain: str, opset: int, **fields: Any) -> FunctionProto:
    """Create the message of a function from a graph that was built; its constants become nodes.

    Args:
        graph: the body, whose name is that of the function.
        domain: of the function.
        opset: of the body.
        **fields: further arguments of `onnx.helper.make_function`.
    """
    proto = graph_message(graph)
    constants = [helper.make_node("Constant", [], [t.name], name=t.name, value=t) for t in proto.initializer]
    inputs, outputs = [v.name for v in proto.input], [v.name for v in proto.output]
    nodes, imports = [*constants, *proto.node], [helper.make_opsetid("", opset)]
    return helper.make_function(public_domain(domain), graph.name, inputs, outputs, nodes, imports, **fields)


def _values(graph: Graph, proto: GraphProto) -> None:
    """Write the initializers, inputs and outputs of a graph."""
    place = {name: i for i, name in enumerate(graph.initializers)}
    written = {id(t) for t in (*proto.initializer, *proto.sparse_initializer)}
    new = {name: v for name, v in graph.initializers.items() if id(v.constant) not in written}
    for tensors, name_of in ((proto.initializer, _name), (proto.sparse_initializer, _sparse_name)):
        messages: Any = tensors
        _arrange(messages, [t for t in messages if name_of(t) in place and name_of(t) not in new])
        added = [v for v in new.values() if isinstance(v.constant, SparseTensorProto) is (name_of is _sparse_name)]
        for value in added:
            messages.append(value.constant)
            value.constant = messages[-1]
        if added:
            messages.sort(key=lambda t, name_of=name_of: place[name_of(t)])
    inputs = {v.name: v for v in (*graph.inputs, *graph.optional_inputs)}
    listed = {v.name for v in proto.input}
    for name, value in inputs.items():
        if name not in listed:  # before IR version 4 initializers are listed here too
            proto.input.append(helper.make_tensor_value_info(name, value.constant.data_type, list(value.constant.dims)))
    _arrange(proto.input, [v for v in proto.input if v.name in inputs])
    for declared, name in zip(proto.output, value_names(graph.outputs, graph), strict=True):
        if declared.name != name:
            declared.name = name


def _name(tensor: TensorProto) -> str:
    return tensor.name


def _sparse_name(tensor: SparseTensorProto) -> str:
    return tensor.values.name


def _arrange(messages: Any, wanted: Iterable[Any]) -> None:
    """Reorder the messages of a repeated field and delete the others; pointers move, contents are not copied."""
    there = list(messages)  # keeps every wrapper alive: their ids are the keys
    wanted = list(wanted)
    if len(there) == len(wanted) and all(a is b for a, b in zip(there, wanted, strict=True)):
        return
    place = {id(m): i for i, m in enumerate(wanted)}
    messages.sort(key=lambda m: place.get(id(m), len(there)))
    del messages[len(wanted) :]
