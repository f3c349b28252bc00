"""Choose the rule of a call, and return the output types as TypeProtos."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from onnx import NodeProto, TypeProto, defs

from ...ir.declaration import has_trait
from . import elementwise, movement, networks  # noqa: F401  their rules
from .call import RULES, Rule, TypedCall, Unsure, form_of, to_proto


def infer(
    schema: defs.OpSchema, node: NodeProto, inputs: Sequence[TypeProto | None], values: Sequence[np.ndarray | None]
) -> dict[str, TypeProto] | None:
    """The types of a node's outputs by name; None if no rule covers the call, or if the call is not valid.

    Args:
        schema: the schema of the node, of ONNX's main domain.
        node: the node.
        inputs: the complete type of each input; None for an absent one.
        values: the known value of each input; None if it is not known.
    """
    rule = rule_of(schema.name)
    if rule is None:
        return None
    form = form_of(schema.name, schema.since_version, schema)
    if not form.infers:
        return {}
    try:
        call = TypedCall(schema.name, schema.since_version, form, node, inputs, values)
        made = rule(call)
        if len(made) < len(node.output):
            return None
        return {
            name: to_proto(t, form.returns(i)) for i, (name, t) in enumerate(zip(node.output, made, strict=False)) if name and t
        }
    except Unsure:
        return None


@cache
def rule_of(name: str) -> Rule | None:
    """The rule of an operator of ONNX's main domain, by its name or by a trait; None if there is none."""
    if name in RULES:
        return RULES[name]
    traits = {"unary": elementwise.of_first, "broadcasting": elementwise.broadcasting, "reduction": movement.reduction}
    return next((rule for trait, rule in traits.items() if has_trait("", name, trait)), None)
