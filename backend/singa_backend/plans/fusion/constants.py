"""Calls whose results are constants, and Ifs whose conditions are."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ...rewriting import constants as rule
from ..region import Region, RegionCall, branch_of, branches_fit
from .facts import operator
from .view import RegionView


def constants(graph: RegionView) -> int:
    """For any deterministic call of constants, except of custom operators and of quantized weights, replace its results."""
    return rule.constants(graph, partial(_stays, graph))


def branches(graph: RegionView) -> int:
    """For any call of the form If(c), where c is a constant, replace it by the calls of its branch."""
    count = 0
    for call in graph.named("If"):
        condition = graph.constant(call.inputs[0])
        if condition is None or condition.size != 1 or condition.dtype != np.bool_ or not branches_fit(call):
            continue
        taken = call.attributes["then_branch" if condition.reshape(-1)[0] else "else_branch"]
        inner = Region(constants=graph.region.constants, names=graph.region.names, size=graph.region.size)
        outputs = branch_of(inner, taken, call.scope)
        graph.region.size = inner.size
        graph.put(call, *inner.calls)
        for old, new in zip(call.outputs, outputs, strict=False):
            if old != ABSENT:
                graph.alias(old, new)
        count += 1
    if count:
        graph.flush()
        graph.facts.infer_all(graph.calls())
    return count


def _stays(graph: RegionView, call: RegionCall) -> bool:
    """Whether a call of constants is left: one of a custom operator, or the DequantizeLinear of a product's weights."""
    return call.node.domain not in ("", "ai.onnx.ml") or (call.is_("DequantizeLinear") and _multiplied(graph, call))


def _multiplied(graph: RegionView, call: RegionCall) -> bool:
    """Whether a product reads the result of a call, or a view of it."""
    users = graph.users(call.outputs[0])
    return any(
        has_trait("", operator(u), "reads_quantized") or (has_trait("", operator(u), "view") and _multiplied(graph, u))
        for u in users
    )
