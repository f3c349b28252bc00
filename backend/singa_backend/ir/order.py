"""An order in which nodes can run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter


def runnable_order(needs: Sequence[set[int]]) -> list[int]:
    """A stable order of nodes in which each follows those that it needs; nodes in or after a cycle are omitted."""
    if all(max(need, default=-1) < i for i, need in enumerate(needs)):
        return list(range(len(needs)))
    sorter = TopologicalSorter(dict(enumerate(needs)))
    with suppress(CycleError):  # the nodes before a cycle are still sorted
        sorter.prepare()
    ready = sorted(sorter.get_ready())  # sorted, so it is a heap
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
    return order


def cycle(needs: Sequence[set[int]], stuck: set[int]) -> list[int]:
    """A cycle among the nodes that cannot be ordered."""
    at, path = min(stuck), dict[int, None]()
    while at not in path:  # follow unmet dependencies: eventually a node is met twice
        path[at] = None
        at = min(needs[at] & stuck)
    found = list(path)
    return found[found.index(at) :][::-1]
