"""`merge_duplicates` and `remove_dead`: what is computed twice, and what nobody needs."""

from __future__ import annotations

import hashlib
from typing import Any

from onnx import AttributeProto, TensorProto

from ..proto.schemas import plain_domain
from .graph import GraphEditor, Node, nbytes
from .model import ModelEditor
from .operator_facts import deterministic

MERGED = 1 << 20
"""Bytes up to which constants are compared: to compare is to copy."""


def merge_duplicates(net: GraphEditor) -> int:
    """Merge nodes of the same operator, inputs and attributes, and constants of the same dtype and value.

    Random operators and Identity stay, and so does a node that makes an output of the graph: another that is like it goes.
    """
    count = _constants(net)
    known: dict[Any, Node] = {}
    for node in list(net.nodes):
        key = _key(net, node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is node:
            continue
        stays, goes = first, node
        if any(_named(net, o) for o in goes.outputs):
            stays, goes = node, first
            known[key] = node
        if any(_named(net, o) for o in goes.outputs):
            continue
        for old, new in zip(goes.outputs, stays.outputs, strict=True):
            if old:
                net.replace(old, new)
        net.remove(goes)
        count += 1
    net.sort()  # where the second of two stayed, it may stand behind those who read the first
    return count


def _named(net: GraphEditor, name: str) -> bool:
    return name in net.outputs or name in net.pinned


def _key(net: GraphEditor, node: Node) -> Any:
    if node.graphs or node.is_("Identity") or not (deterministic(net, node) or _referring(net, node)):
        return None
    attributes = []
    for name, a in sorted(node.attributes.items()):
        if a.HasField("t") and nbytes(a.t) > MERGED:
            return None
        attributes.append((name, _bare(a)))
    present = tuple(bool(o) for o in node.outputs)
    return node.domain, node.op_type, node.overload, tuple(node.inputs), tuple(attributes), present


def _referring(net: GraphEditor, node: Node) -> bool:
    """Whether only a reference to an attribute of the function keeps it from being plain."""
    if node.plain or (node.domain, node.op_type) in net.context.function_names:
        return False
    bare = Node(node.op_type, node.inputs, node.outputs, node.attributes, node.domain)
    return deterministic(net, bare) and not bare.is_("Dropout")


def _bare(a: AttributeProto) -> bytes:
    """The attribute's content without names and comments."""
    if a.doc_string or a.t.name:
        copy = AttributeProto()
        copy.CopyFrom(a)
        copy.ClearField("doc_string")
        if copy.HasField("t"):
            copy.t.ClearField("name")
        a = copy
    return a.SerializeToString(deterministic=True)


def _constants(net: GraphEditor) -> int:
    """Initializers of this graph with the same dtype, shape and bytes become one."""
    known: dict[Any, str] = {}
    count = 0
    for name, tensor in list(net.initializers.items()):
        if nbytes(tensor) > MERGED or net.tensor(name) is None or _named(net, name):
            continue
        first = known.setdefault(_content(tensor), name)
        if first != name and net.users(name):
            net.replace(name, first)
            if name not in net.inputs:
                del net.initializers[name]
            count += 1
    return count


def _content(tensor: TensorProto) -> Any:
    if tensor.data_location == TensorProto.EXTERNAL:
        where = tuple(sorted((e.key, e.value) for e in tensor.external_data if e.key != "checksum"))
        return tensor.data_type, tuple(tensor.dims), where
    copy = TensorProto()
    copy.CopyFrom(tensor)
    for field in ("name", "doc_string"):
        copy.ClearField(field)
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()


def remove_dead(net: GraphEditor) -> int:
    """Take away nodes whose values nobody needs, and initializers; inputs of the graph stay."""
    gone = []
    for node in reversed(net.nodes):
        if not any(o and net.used(o) for o in node.outputs):
            net.release(node)
            gone.append(node)
    net.remove(*gone)
    count = len(gone)
    for tensors in (net.initializers, net.sparse):
        for name in list(tensors):
            if net.used(name):
                continue
            if name in net.inputs:
                if net.context.ir_version >= 4 or net.outer is not None:
                    continue  # its value may be given by the caller
                net.inputs.remove(name)  # before IR version 4 every initializer had to be listed as an input
            del tensors[name]
            count += 1
    return count


def remove_dead_functions(edit: ModelEditor) -> int:
    """Take away functions of the model that nobody calls; none where two have one name."""
    protos: list[Any] = [net.proto for net in edit.functions]
    keys = [(plain_domain(f.domain), f.name, f.overload) for f in protos]
    if len(set(keys)) < len(keys):
        return 0
    calls = dict(zip(keys, map(_called, edit.functions), strict=True))
    pending, alive = list(_called(edit.main)), set()
    while pending:
        key = pending.pop()
        if key not in alive:
            alive.add(key)
            pending += calls.get(key, ())
    edit.functions = [net for net, key in zip(edit.functions, keys, strict=True) if key in alive]
    return len(keys) - len(edit.functions)


def _called(net: GraphEditor) -> set[tuple[str, str, str]]:
    return {(n.domain, n.op_type, n.overload) for inner in net.walk() for n in inner.nodes}
