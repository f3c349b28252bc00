"""Completes the domains of a model that calls onnxruntime's operators: those of nodes, and the imports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import FunctionProto, ModelProto, NodeProto, helper

from ..proto.messages import graphs, imported
from ..proto.schemas import ASSUMED, MICROSOFT, lax, load_domain, plain_domain, schemas


def add_domains(model: ModelProto) -> int:
    """Complete the domains of a model, in place.

    A node of ONNX's main domain whose operator com.microsoft has, and ONNX does not have at the imported opset, receives that
    domain; a domain that is called without an
    import, and that onnxruntime reads so, receives one.

    Args:
        model: the model.

    Returns:
        The number of nodes whose domain, or the import of whose domain, was added.
    """
    load_domain(MICROSOFT)
    functions = {(plain_domain(f.domain), f.name) for f in model.functions}
    changed = 0
    holders: list[ModelProto | FunctionProto] = [model, *model.functions]
    for holder in holders:
        there = imported(holder.opset_import)
        missing: dict[str, int] = {}
        for node in _nodes(holder.graph.node if isinstance(holder, ModelProto) else holder.node):
            key = (plain_domain(node.domain), node.op_type)
            there_now = key in schemas and min(schemas[key]) <= there.get("", 0)
            lacks = not key[0] and key not in functions and not there_now and node.op_type not in lax
            if lacks and (MICROSOFT, node.op_type) in schemas:
                node.domain = MICROSOFT
                changed += 1
            elif node.domain in ASSUMED and node.domain not in there:
                changed += 1
            if node.domain in ASSUMED and node.domain not in there:
                missing[node.domain] = ASSUMED[node.domain]
        holder.opset_import.extend(helper.make_opsetid(d, v) for d, v in missing.items())
    return changed


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for graph in graphs(node):
            yield from _nodes(graph.node)
