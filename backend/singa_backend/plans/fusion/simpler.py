"""Calls that have a simpler form."""

from __future__ import annotations

import numpy as np

from .rewriter import PlanRewriter


def squares(edit: PlanRewriter) -> int:
    """For any calls of the form Pow(x, 2), where x is float32, replace Pow by Mul(x, x)."""
    count = 0
    for call in edit.named("Pow"):
        exponent, x = edit.constant(call.inputs[1]), call.inputs[0]
        if exponent is None or exponent.size != 1 or exponent.reshape(-1)[0] != 2 or edit.dtype(x) != np.float32:
            continue
        if edit.facts.rank_at_least(x, exponent.ndim):
            edit.put(call, edit.call("Mul", (x, x), [call], call.outputs))
            count += 1
    return count


def sums(edit: PlanRewriter) -> int:
    """For any calls of the form Sum(a, b), replace Sum by Add."""
    count = 0
    for call in edit.named("Sum"):
        if len(call.inputs) == 2:
            edit.put(call, edit.call("Add", call.inputs, [call], call.outputs))
            count += 1
    return count
