"""Exchanges with other processes in a region: their order, and the values of any size that are only sent."""

from __future__ import annotations

from collections import Counter

from ..ir.declaration import has_trait
from ..ir.graph import ABSENT
from .region import Region


def exchanges(region: Region) -> list[int]:
    """The first results of the calls that exchange values with other processes, in order."""
    return [c.outputs[0] for c in region.calls if has_trait(c.node.domain, c.name, "exchanges")]


def only_sent(region: Region) -> frozenset[int]:
    """The values on whose sizes nothing in the region depends: they are sent, or what is computed from them is.

    Their sizes may differ between runs of one plan, which does not end a segment there.
    """
    readers = Counter(i for c in region.calls for i in set(c.reads))
    readers.update(region.outputs)
    found: set[int] = set()
    sent: Counter[int] = Counter()
    for call in reversed(region.calls):
        made = {o for o in call.outputs if o != ABSENT}
        found |= {o for o in made if readers[o] and sent[o] == readers[o]}
        if has_trait(call.node.domain, call.name, "sends") or (made and made <= found and not call.node.graphs):
            sent.update(set(call.reads))
    return frozenset(found)
