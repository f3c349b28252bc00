"""`merge_duplicates` and `remove_dead`: merge equal nodes and constants, remove unused ones."""

from __future__ import annotations

import hashlib
from typing import Any

from onnx import AttributeProto, TensorProto

from ..ir.graph import Graph, Node, Value
from ..proto.schemas import plain_domain
from .model import ModelEditor
from .operator_facts import deterministic
from .rewriter import ModelRewriter
from .values import nbytes

MERGED = 1 << 20
"""Maximum bytes of constants that are compared: a comparison copies them."""


def merge_duplicates(rewriter: ModelRewriter) -> int:
    """Merge nodes of the same operator, inputs and attributes, and constants of the same dtype and value.

    Random operators and Identity are kept.  Of two equal nodes, the one that produces a graph output is kept.
    """
    count = _constants(rewriter)
    known: dict[Any, Node] = {}
    for node in rewriter.graph.nodes:
        key = _key(rewriter, node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is node:
            continue
        stays, goes = first, node
        if any(o.is_output for o in goes.results):
            stays, goes = node, first
            known[key] = node
        if any(o.is_output for o in goes.results):
            continue
        for old, new in zip(goes.results, stays.results, strict=True):
            old.replace_all_uses_with(new)
        rewriter.graph.remove(goes)
        count += 1
    rewriter.graph.sort()  # if the second of two was kept, it may come after the readers of the first
    return count


def _key(rewriter: ModelRewriter, node: Node) -> Any:
    if node.bodies or node.is_("Identity") or not (deterministic(rewriter, node) or _referring(rewriter, node)):
        return None
    attributes = []
    for name, a in sorted(node.attributes.items()):
        if a.HasField("t") and nbytes(a.t) > MERGED:
            return None
        attributes.append((name, _bare(a)))
    present = tuple(bool(o) for o in node.outputs)
    inputs = tuple(None if v is None else v.original for v in node.inputs)
    return node.domain, node.op_type, node.overload, inputs, tuple(attributes), present


def _referring(rewriter: ModelRewriter, node: Node) -> bool:
    """Whether a node is not plain only because it refers to an attribute of its function."""
    if node.plain or (node.domain, node.op_type) in rewriter.editor.function_names:
        return False
    bare = Node(node.op_type, node.inputs, node.outputs, node.attributes, node.domain)
    return deterministic(rewriter, bare) and not bare.is_("Dropout")


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


def _constants(rewriter: ModelRewriter) -> int:
    """Merge initializers of this graph with equal dtype, shape and bytes."""
    known: dict[Any, Value] = {}
    graph, merged = rewriter.graph, list[Value]()
    for value in graph.initializers.values():
        tensor = rewriter.editor.tensor(value)
        if not isinstance(tensor, TensorProto) or nbytes(tensor) > MERGED or value.is_output:
            continue
        first = known.setdefault(_content(tensor), value)
        if first is not value and value.is_used:
            value.replace_all_uses_with(first)
            merged.append(value)
    listed = set(graph.optional_inputs)  # before IR version 4
    graph.remove_initializer(*(value for value in merged if value not in listed))
    return len(merged)


def _content(tensor: TensorProto) -> Any:
    if tensor.data_location == TensorProto.EXTERNAL:
        where = tuple(sorted((e.key, e.value) for e in tensor.external_data if e.key != "checksum"))
        return tensor.data_type, tuple(tensor.dims), where
    copy = TensorProto()
    copy.CopyFrom(tensor)
    for field in ("name", "doc_string"):
        copy.ClearField(field)
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()


def remove_dead(rewriter: ModelRewriter) -> int:
    """Remove unused nodes and initializers; inputs of the graph are kept."""
    graph = rewriter.graph
    count = graph.remove_unused()
    unused = {value for value in graph.initializers.values() if not value.is_used}
    if rewriter.editor.ir_version < 4 and graph.owner is None:  # every initializer had to be listed as an input
        graph.remove_inputs(unused)
    else:
        unused.difference_update(graph.optional_inputs)  # which the caller may override
    graph.remove_initializer(*unused)
    return count + len(unused)


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
    before = editor.functions
    editor.functions = [graph for graph, key in zip(before, keys, strict=True) if key in alive]
    if editor.main.journal is not None:

        def undo() -> None:
            editor.functions = before

        editor.main.journal.add(undo)
    return len(before) - len(editor.functions)


def _called(graph: Graph) -> set[tuple[str, str, str]]:
    return {(n.domain, n.op_type, n.overload) for inner in graph.walk() for n in inner.nodes}
