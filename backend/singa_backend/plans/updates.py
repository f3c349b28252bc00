"""Updates in a region: elementwise expressions whose results are outputs, such as new parameters and states of an optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..kernels.updates import OPERATORS
from .region import RegionCall


def updates(calls: Sequence[RegionCall], outputs: Sequence[int]) -> list[list[int]]:
    """Find the groups of elementwise calls that compute outputs, each with all that only they read.

    Args:
        calls: the calls, each after those that it reads.
        outputs: the ids of the outputs.

    Returns:
        The indices of the calls of each group of two or more, in order.  Nothing before the last call of a group reads its
        results, so that the group can take the place of its last call.
    """
    results = set(outputs)
    maker: dict[int, int] = {}
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for index, call in enumerate(calls):
        maker.update(dict.fromkeys(call.outputs, index))
        for i in call.reads:
            readers[i].add(index)
    elementwise = {i for i, c in enumerate(calls) if c.is_(*OPERATORS) and len(c.outputs) == 1 and c.gradient < 0}
    taken: set[int] = set()
    found = []
    for last in sorted(elementwise, reverse=True):
        if last in taken or calls[last].outputs[0] not in results:
            continue
        group, pending = {last}, {maker[i] for i in calls[last].reads if i in maker}
        while pending:
            at = max(pending)  # all its readers that may join have done so
            pending.remove(at)
            if at not in elementwise or at in taken:
                continue
            (made,) = calls[at].outputs
            if all(r in group or (r > last and made in results) for r in readers[made]):
                group.add(at)
                pending |= {maker[i] for i in calls[at].reads if i in maker}
        if len(group) > 1:
            taken |= group
            found.append(sorted(group))
    return found[::-1]
