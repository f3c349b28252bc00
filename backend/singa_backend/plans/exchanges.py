"""Exchanges with other processes in a plan: their order, and the values of any size that are only sent."""

from __future__ import annotations

from collections import Counter

from ..ir import graph as ir
from ..ir.declaration import has_trait


def exchanges(graph: ir.Graph) -> list[ir.Value]:
    """The first results of the calls that exchange values with other processes, in order."""
    return [c.results[0] for c in graph.nodes if has_trait(c.domain, c.op_type, "exchanges")]


def only_sent(graph: ir.Graph) -> frozenset[ir.Value]:
    """The values on whose sizes nothing in the graph depends: they are sent, or what is computed from them is.

    Their sizes may differ between runs of one plan, which does not end a segment there.
    """
    readers = Counter(i for c in graph.nodes for i in set(c.reads))
    readers.update(graph.outputs)
    found: set[ir.Value] = set()
    sent: Counter[ir.Value] = Counter()
    for call in reversed(graph.nodes):
        made = set(call.results)
        found |= {o for o in made if readers[o] and sent[o] == readers[o]}
        if has_trait(call.domain, call.op_type, "sends") or (made and made <= found and not call.bodies):
            sent.update(set(call.reads))
    return frozenset(found)
