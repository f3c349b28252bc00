"""Calls whose results are constants, and Ifs whose conditions are."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...rewriting import constants as rule
from ..flat import Inliner, branches_fit, operator
from .rewriter import PlanRewriter


def constants(edit: PlanRewriter) -> int:
    """For any deterministic call of constants, except of custom operators and of quantized weights, replace its results."""
    return rule.constants(edit, partial(_stays, edit))


def branches(edit: PlanRewriter) -> int:
    """For any call of the form If(c), where c is a constant, replace it by the calls of its branch."""
    count = 0
    for call in edit.named("If"):
        condition = edit.constant(call.inputs[0])
        if condition is None or condition.size != 1 or condition.dtype != np.bool_ or not branches_fit(call):
            continue
        taken = call.attributes["then_branch" if condition.reshape(-1)[0] else "else_branch"]
        inliner = Inliner()
        outputs = inliner.inline(taken, {inner: call.captures[inner] for inner in taken.captured})
        for node in inliner.nodes:
            edit.insert(node, call)
        for old, new in zip(call.outputs, outputs, strict=False):
            edit.alias(old, new)
        count += 1
    if count:
        edit.facts.infer_all(edit.graph.nodes)
    return count


def _stays(edit: PlanRewriter, call: ir.Node) -> bool:
    """Whether a call of constants is left: one of a custom operator, or the DequantizeLinear of a product's weights."""
    return call.domain not in ("", "ai.onnx.ml") or (call.is_("DequantizeLinear") and _multiplied(edit, call))


def _multiplied(edit: PlanRewriter, call: ir.Node) -> bool:
    """Whether a product reads the result of a call, or a view of it."""
    return any(
        has_trait("", operator(u), "reads_quantized") or (has_trait("", operator(u), "view") and _multiplied(edit, u))
        for o in call.outputs[:1]
        if o is not None
        for u in o.users
    )
