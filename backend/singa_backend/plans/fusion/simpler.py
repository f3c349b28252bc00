"""Calls that have a simpler form."""

from __future__ import annotations

import numpy as np

from .view import RegionView


def squares(graph: RegionView) -> int:
    """For any calls of the form Pow(x, 2), where x is float32, replace Pow by Mul(x, x)."""
    count = 0
    for call in graph.named("Pow"):
        exponent, x = graph.constant(call.inputs[1]), call.inputs[0]
        if exponent is None or exponent.size != 1 or exponent.reshape(-1)[0] != 2 or graph.facts.dtype(x) != np.float32:
            continue
        if graph.facts.rank_at_least(x, exponent.ndim):
            graph.put(call, graph.call("Mul", (x, x), [call], call.outputs))
            count += 1
    return count


def sums(graph: RegionView) -> int:
    """For any calls of the form Sum(a, b), replace Sum by Add."""
    count = 0
    for call in graph.named("Sum"):
        if len(call.inputs) == 2:
            graph.put(call, graph.call("Add", call.inputs, [call], call.outputs))
            count += 1
    return count
