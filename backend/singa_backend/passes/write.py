"""Writes a ModelEditor back to its ModelProto, in place: unchanged messages are kept, and no weights are copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper

from .graph import GraphEditor
from .index import NodeEditor
from .type_inference import node_proto


def write(model: ModelProto, main: GraphEditor, functions: Sequence[GraphEditor]) -> None:
    """Write the nodes, initializers and types of every graph to the messages that they were read from."""
    _write(main)
    kept = {id(graph.proto) for graph in functions}
    for graph in functions:
        _write(graph)
    _arrange(model.functions, [f for f in model.functions if id(f) in kept])


def _write(graph: GraphEditor) -> None:
    for node in graph.nodes:
        for inner in node.graphs.values():
            _write(inner)
    messages: list[NodeProto] = []
    for node in graph.nodes:
        if node.proto is None:
            node.proto = graph.proto.node.add()
            node.proto.CopyFrom(node_proto(node))
        else:
            _update(node.proto, node)
        messages.append(node.proto)
    _arrange(graph.proto.node, messages)
    if isinstance(graph.proto, GraphProto):
        _graph(graph, graph.proto)
    if isinstance(graph.proto, FunctionProto):
        _types(graph, graph.proto.value_info)


def _update(proto: NodeProto, node: NodeEditor) -> None:
    if proto.op_type != node.op_type:
        proto.op_type = node.op_type
    for names, now in ((proto.input, node.inputs), (proto.output, node.outputs)):
        if list(names) != now:
            del names[:]
            names.extend(now)
    ours = {id(a) for a in node.attributes.values()}
    there = list(proto.attribute)
    stay = [a for a in there if id(a) in ours or a.HasField("g") or a.graphs]
    _arrange(proto.attribute, stay)
    known = {id(a) for a in stay}
    proto.attribute.extend(a for a in node.attributes.values() if id(a) not in known)


def _graph(graph: GraphEditor, proto: GraphProto) -> None:
    there = {id(t) for t in (*proto.initializer, *proto.sparse_initializer)}
    fields: list[tuple[Any, dict[str, Any]]] = [
        (proto.initializer, graph.initializers),
        (proto.sparse_initializer, graph.sparse),
    ]
    for tensors, now in fields:
        kept: list[Any] = []
        for name, tensor in list(now.items()):
            if id(tensor) not in there:
                tensors.append(tensor)
                now[name] = tensor = tensors[-1]
            kept.append(tensor)
        _arrange(tensors, kept)
    if list(graph.inputs) != [i.name for i in proto.input]:  # before IR version 4 initializers are listed here too
        listed = {i.name: i for i in proto.input}
        for name in graph.inputs:
            if name not in listed:
                tensor = graph.initializers[name]
                proto.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
                listed[name] = proto.input[-1]
        _arrange(proto.input, [listed[name] for name in graph.inputs])
    for i, name in enumerate(graph.outputs):
        if proto.output[i].name != name:
            proto.output[i].name = name
        if i in graph.retyped:
            proto.output[i].type.CopyFrom(graph.retyped[i])
    _types(graph, proto.value_info)


def _types(graph: GraphEditor, infos: Any) -> None:
    """Keep the annotations of values that still exist: a name never changes its value."""
    names = {o for n in graph.nodes for o in n.outputs}
    _arrange(infos, [v for v in infos if v.name in names or v.name in graph.initializers])


def _arrange(messages: Any, wanted: Iterable[Any]) -> None:
    """Reorder the messages of a repeated field and delete the others; pointers move, contents are not copied."""
    there = list(messages)  # keeps every wrapper alive: their ids are the keys
    wanted = list(wanted)
    if len(there) == len(wanted) and all(a is b for a, b in zip(there, wanted, strict=True)):
        return
    place = {id(m): i for i, m in enumerate(wanted)}
    messages.sort(key=lambda m: place.get(id(m), len(there)))
    del messages[len(wanted) :]
