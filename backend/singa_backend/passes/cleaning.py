"""`merge_duplicates` and `remove_dead`: merge equal nodes and constants, remove unused ones."""

from __future__ import annotations

import hashlib
from typing import Any

from onnx import AttributeProto, TensorProto

from ..proto.schemas import plain_domain
from .graph import GraphEditor
from .index import NodeEditor
from .model import ModelEditor
from .operator_facts import deterministic
from .ordering import NameList
from .typed_graph import nbytes

MERGED = 1 << 20
"""Maximum bytes of constants that are compared: a comparison copies them."""


def merge_duplicates(graph: GraphEditor) -> int:
    """Merge nodes of the same operator, inputs and attributes, and constants of the same dtype and value.

    Random operators and Identity are kept.  Of two equal nodes, the one that produces a graph output is kept.
    """
    count = _constants(graph)
    known: dict[Any, NodeEditor] = {}
    for node in list(graph.nodes):
        key = _key(graph, node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is node:
            continue
        stays, goes = first, node
        if any(_named(graph, o) for o in goes.outputs):
            stays, goes = node, first
            known[key] = node
        if any(_named(graph, o) for o in goes.outputs):
            continue
        for old, new in zip(goes.outputs, stays.outputs, strict=True):
            if old:
                graph.replace(old, new)
        graph.remove(goes)
        count += 1
    graph.sort()  # if the second of two was kept, it may come after the readers of the first
    return count


def _named(graph: GraphEditor, name: str) -> bool:
    return name in graph.outputs or name in graph.pinned


def _key(graph: GraphEditor, node: NodeEditor) -> Any:
    if node.graphs or node.is_("Identity") or not (deterministic(graph, node) or _referring(graph, node)):
        return None
    attributes = []
    for name, a in sorted(node.attributes.items()):
        if a.HasField("t") and nbytes(a.t) > MERGED:
            return None
        attributes.append((name, _bare(a)))
    present = tuple(bool(o) for o in node.outputs)
    return node.domain, node.op_type, node.overload, tuple(node.inputs), tuple(attributes), present


def _referring(graph: GraphEditor, node: NodeEditor) -> bool:
    """Whether a node is not plain only because it refers to an attribute of its function."""
    if node.plain or (node.domain, node.op_type) in graph.context.function_names:
        return False
    bare = NodeEditor(node.op_type, node.inputs, node.outputs, node.attributes, node.domain)
    return deterministic(graph, bare) and not bare.is_("Dropout")


def _bare(a: AttributeProto) -> bytes:
    """Serialize an attribute without names and comments."""
    if a.doc_string or a.t.name:
        copy = AttributeProto()
        copy.CopyFrom(a)
        copy.ClearField("doc_string")
        if copy.HasField("t"):
            copy.t.ClearField("name")
        a = copy
    return a.SerializeToString(deterministic=True)


def _constants(graph: GraphEditor) -> int:
    """Merge initializers of this graph with equal dtype, shape and bytes."""
    known: dict[Any, str] = {}
    count = 0
    for name, tensor in list(graph.initializers.items()):
        if nbytes(tensor) > MERGED or graph.tensor(name) is None or _named(graph, name):
            continue
        first = known.setdefault(_content(tensor), name)
        if first != name and graph.has_users(name):
            graph.replace(name, first)
            if name not in graph.inputs:
                del graph.initializers[name]
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


def remove_dead(graph: GraphEditor) -> int:
    """Remove unused nodes and initializers; inputs of the graph are kept."""
    gone = []
    for node in reversed(graph.nodes):
        if not any(o and graph.used(o) for o in node.outputs):
            graph.release(node)
            gone.append(node)
    graph.remove(*gone)
    count = len(gone)
    listed = graph.context.ir_version < 4 and graph.outer is None  # then every initializer had to be listed as an input
    for tensors in (graph.initializers, graph.sparse):
        unused = {name for name in tensors if not graph.used(name)}
        if not listed:
            unused = {name for name in unused if name not in graph.inputs}  # the caller may override the others
        elif unused:
            graph.inputs = NameList(name for name in graph.inputs if name not in unused)
        for name in unused:
            del tensors[name]
        count += len(unused)
    return count


def remove_dead_functions(editor: ModelEditor) -> int:
    """Remove functions of the model that are not called; none if two have the same name."""
    protos: list[Any] = [graph.proto for graph in editor.functions]
    keys = [(plain_domain(f.domain), f.name, f.overload) for f in protos]
    if len(set(keys)) < len(keys):
        return 0
    calls = dict(zip(keys, map(_called, editor.functions), strict=True))
    pending, alive = list(_called(editor.main)), set()
    while pending:
        key = pending.pop()
        if key not in alive:
            alive.add(key)
            pending += calls.get(key, ())
    editor.functions = [graph for graph, key in zip(editor.functions, keys, strict=True) if key in alive]
    return len(keys) - len(editor.functions)


def _called(graph: GraphEditor) -> set[tuple[str, str, str]]:
    return {(n.domain, n.op_type, n.overload) for inner in graph.walk() for n in inner.nodes}
