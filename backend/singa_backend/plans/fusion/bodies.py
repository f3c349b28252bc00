"""Calls of onnxruntime's operators that cannot fail, in ONNX's operators, so that they fuse with the calls around them."""

from __future__ import annotations

from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ...kernels.table import kernels_of
from ..bodies import Bodies, Given, has_body, rounds_once
from ..region import Region, RegionCall
from .view import RegionView


def bodies(graph: RegionView) -> int:
    """For any call with a body that computes every tensor of its dtypes, as Gelu, replace it by the body.

    A body may compute with inputs that the definition of its operator refuses, so other calls are left: a trace, which runs the
    definition, replaces them (trace/bodies.py).
    """
    made, count = Bodies(), 0
    for call in graph.named(""):
        if not has_trait(call.node.domain, call.name, "cannot_fail") or not has_body(call):
            continue
        assert call.node.operator is not None
        if not kernels_of(call.node.domain, call.name, call.node.operator.version):
            count += _replaced(graph, call, made)
    return count


def _replaced(graph: RegionView, call: RegionCall, made: Bodies) -> bool:
    types = [None if i == ABSENT else graph.dtype(i) for i in call.inputs]
    if any(t is None and i != ABSENT for t, i in zip(types, call.inputs, strict=True)):
        return False
    given = [None if t is None else Given(t) for t in types]
    if rounds_once(call, given):
        return False
    region = graph.region
    inner = Region(constants=region.constants, names=region.names, size=region.size)
    outputs = made.append(inner, call, given)
    region.size = inner.size
    computed = {o for c in inner.calls for o in c.outputs}
    if outputs is None or not computed.issuperset(outputs) or len(set(outputs)) < len(outputs):
        return False
    names = dict(zip(outputs, call.outputs, strict=True))
    for c in inner.calls:
        c.inputs, c.outputs = (tuple(names.get(i, i) for i in ids) for ids in (c.inputs, c.outputs))
    return graph.put(call, *inner.calls)
