"""Calls that have a simpler form."""

from __future__ import annotations

import numpy as np

from .rewriter import PlanRewriter


def squares(rewriter: PlanRewriter) -> int:
    """For any calls of the form Pow(x, 2), where x is float32, replace Pow by Mul(x, x)."""
    count = 0
    for call in rewriter.named("Pow"):
        exponent, x = rewriter.constant(call.inputs[1]), call.inputs[0]
        if exponent is None or exponent.size != 1 or exponent.reshape(-1)[0] != 2 or rewriter.dtype(x) != np.float32:
            continue
        if rewriter.facts.rank_at_least(x, exponent.ndim):
            rewriter.put(call, rewriter.call("Mul", (x, x), [call], call.outputs))
            count += 1
    return count


def sums(rewriter: PlanRewriter) -> int:
    """For any calls of the form Sum(a, b), replace Sum by Add."""
    count = 0
    for call in rewriter.named("Sum"):
        if len(call.inputs) == 2:
            rewriter.put(call, rewriter.call("Add", call.inputs, [call], call.outputs))
            count += 1
    return count
