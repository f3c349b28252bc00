"""Updates in place: the results of a step that replace its inputs, such as the parameters and states of a training step.

The calls that only make such results are moved to the end of a region.  All calls that may fail or refuse a value run before
them, so that a run either leaves every input as it was or replaces all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..ir.declaration import has_trait
from ..ir.graph import ABSENT
from .region import Region, RegionCall


class NotInPlace(Exception):
    """Inputs cannot be replaced in place; the message is the reason."""


def place_last(region: Region, replaced: Mapping[int, int]) -> None:
    """Move the calls that only make results which replace inputs to the end of a region.

    Args:
        region: the region, whose `calls`, `replaced` and `last` are set.
        replaced: the place of the replaced input by that of the result.
    """
    times = Counter(region.outputs)
    region.replaced = {
        region.outputs[o]: region.inputs[i]
        for o, i in replaced.items()
        if times[region.outputs[o]] == 1 and not times[region.inputs[i]]
    }
    made, states = set(region.replaced), set(region.replaced.values())
    calls = region.calls
    makers = {o: at for at, c in enumerate(calls) for o in c.outputs if o != ABSENT}
    readers: dict[int, list[int]] = {}
    for at, c in enumerate(calls):
        for i in c.reads:
            readers.setdefault(i, []).append(at)
    others = set(region.outputs) - made

    def followed(at: int, by: Sequence[bool]) -> bool:
        return all(by[r] for o in calls[at].outputs for r in readers.get(o, ()))

    may = [False] * len(calls)  # whether a call leads to such results only
    for at in reversed(range(len(calls))):
        may[at] = not others & set(calls[at].outputs) and _cannot_fail(calls[at]) and followed(at, may)
    last = [False] * len(calls)
    of_states = [False] * len(calls)
    for at, c in enumerate(calls):
        before = [makers[i] for i in c.reads if i in makers]
        last[at] = may[at] and (bool(made & set(c.outputs)) or any(last[m] for m in before))
        of_states[at] = has_trait("", c.name, "epilogue") and (bool(states & set(c.reads)) or any(of_states[m] for m in before))
    for at in reversed(range(len(calls))):  # a state is read where it is replaced
        last[at] |= may[at] and of_states[at] and followed(at, last)
    region.calls = [*(c for at, c in enumerate(calls) if not last[at]), *(c for at, c in enumerate(calls) if last[at])]
    region.last = last.count(False)


def _cannot_fail(call: RegionCall) -> bool:
    """Whether a call cannot fail if a kernel computes it: it neither exchanges values nor has a body."""
    return not call.node.graphs and not has_trait(call.node.domain, call.name, "exchanges")


def require_apart(arrays: Sequence[np.ndarray]) -> None:
    """Raise NotInPlace unless each array can be written, is contiguous and shares no memory with the others."""
    places = []
    for a in arrays:
        if not a.flags.c_contiguous or not a.flags.writeable:
            raise NotInPlace("an array is not contiguous, or cannot be written")
        start = a.ctypes.data
        places.append((start, start + a.nbytes))
    places.sort()
    if any(first[1] > second[0] for first, second in pairwise(places)):
        raise NotInPlace("two arrays share memory")
