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
    kept = {id(net.proto) for net in functions}
    for net in functions:
        _write(net)
    _arrange(model.functions, [f for f in model.functions if id(f) in kept])


def _write(net: GraphEditor) -> None:
    for node in net.nodes:
        for graph in node.graphs.values():
            _write(graph)
    messages: list[NodeProto] = []
    for node in net.nodes:
        if node.proto is None:
            node.proto = net.proto.node.add()
            node.proto.CopyFrom(node_proto(node))
        else:
            _update(node.proto, node)
        messages.append(node.proto)
    _arrange(net.proto.node, messages)
    if isinstance(net.proto, GraphProto):
        _graph(net, net.proto)
    if isinstance(net.proto, FunctionProto):
        _types(net, net.proto.value_info)


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


def _graph(net: GraphEditor, proto: GraphProto) -> None:
    there = {id(t) for t in (*proto.initializer, *proto.sparse_initializer)}
    fields: list[tuple[Any, dict[str, Any]]] = [
        (proto.initializer, net.initializers),
        (proto.sparse_initializer, net.sparse),
    ]
    for tensors, now in fields:
        kept: list[Any] = []
        for name, tensor in list(now.items()):
            if id(tensor) not in there:
                tensors.append(tensor)
                now[name] = tensor = tensors[-1]
            kept.append(tensor)
        _arrange(tensors, kept)
    if list(net.inputs) != [i.name for i in proto.input]:  # before IR version 4 initializers are listed here too
        listed = {i.name: i for i in proto.input}
        for name in net.inputs:
            if name not in listed:
                tensor = net.initializers[name]
                proto.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
                listed[name] = proto.input[-1]
        _arrange(proto.input, [listed[name] for name in net.inputs])
    for i, name in enumerate(net.outputs):
        if proto.output[i].name != name:
            proto.output[i].name = name
        if i in net.retyped:
            proto.output[i].type.CopyFrom(net.retyped[i])
    _types(net, proto.value_info)


def _types(net: GraphEditor, infos: Any) -> None:
    """Keep the annotations of values that still exist: a name never changes its value."""
    names = {o for n in net.nodes for o in n.outputs}
    _arrange(infos, [v for v in infos if v.name in names or v.name in net.initializers])


def _arrange(messages: Any, wanted: Iterable[Any]) -> None:
    """Reorder the messages of a repeated field and delete the others; pointers move, contents are not copied."""
    there = list(messages)  # keeps every wrapper alive: their ids are the keys
    wanted = list(wanted)
    if len(there) == len(wanted) and all(a is b for a, b in zip(there, wanted, strict=True)):
        return
    place = {id(m): i for i, m in enumerate(wanted)}
    messages.sort(key=lambda m: place.get(id(m), len(there)))
    del messages[len(wanted) :]
