"""Calls of onnxruntime's operators that cannot fail, in ONNX's operators, so that they fuse with the calls around them."""

from __future__ import annotations

from ...interpreters.given import Given
from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...kernels.table import kernels_of
from ..bodies import Bodies, has_body, rounds_once
from .rewriter import PlanRewriter


def bodies(edit: PlanRewriter) -> int:
    """For any call with a body that computes every tensor of its dtypes, as Gelu, replace it by the body.

    A body may compute with inputs that the definition of its operator refuses, so other calls are left: a trace, which runs the
    definition, replaces them (trace/bodies.py).
    """
    made, count = Bodies(), 0
    for call in edit.graph.nodes:
        if not call.domain or not has_trait(call.domain, call.op_type, "cannot_fail") or not has_body(call):
            continue
        assert call.operator is not None
        if not kernels_of(call.domain, call.op_type, call.operator.version):
            count += _replaced(edit, call, made)
    return count


def _replaced(edit: PlanRewriter, call: ir.Node, made: Bodies) -> bool:
    types = [None if i is None else edit.dtype(i) for i in call.inputs]
    if any(t is None and i is not None for t, i in zip(types, call.inputs, strict=True)):
        return False
    given = [None if t is None else Given(t) for t in types]
    if rounds_once(call, given):
        return False
    found = made.inlined(call, given, call.inputs)
    if found is None:
        return False
    nodes, outputs = found
    computed = {o for node in nodes for o in node.outputs}
    if not computed.issuperset(outputs) or len(set(outputs)) < len(outputs):
        return False
    names = dict(zip(outputs, call.outputs, strict=True))
    for node in nodes:
        node.inputs, node.outputs = ([names.get(v, v) for v in values] for values in (node.inputs, node.outputs))
    return edit.put(call, *nodes)
