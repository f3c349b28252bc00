"""Updates in a region: elementwise expressions whose results are outputs, such as new parameters and states of an optimizer.

The calls that only make results which replace inputs are moved to the end of a region.  All calls that may fail or refuse a value
run before them, so that a run either leaves every input as it was or replaces all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..ir.declaration import has_trait
from ..ir.graph import ABSENT
from ..kernels.updates import OPERATORS
from .region import Region, RegionCall


class NotInPlace(Exception):
    """Inputs cannot be replaced in place; the message is the reason."""


def place_last(region: Region, replaced: Mapping[int, int], numbers: Iterable[int]) -> None:
    """Move the calls that only make results which replace inputs to the end of a region.

    Args:
        region: the region, whose `calls`, `replaced` and `last` are set.
        replaced: the place of the replaced input by that of the result.
        numbers: the ids of the inputs of one element.
    """
    _take_types_of_inputs(region)
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
    kept = {*region.constants, *states, *numbers}  # and what only they make, such as a rate
    for c in calls:
        if kept.issuperset(c.reads):
            kept.update(c.outputs)
    needed = {i for at, c in enumerate(calls) if last[at] for i in c.reads}
    for at in reversed(range(len(calls))):  # a state is read where it is replaced, and so is what costs no further memory
        c = calls[at]
        more = set(c.reads) - kept - needed
        if may[at] and followed(at, last) and (of_states[at] or (c.is_("CastLike", *OPERATORS) and len(more) < 2)):
            last[at] = True
            needed.update(c.reads)
    region.calls = [*(c for at, c in enumerate(calls) if not last[at]), *(c for at, c in enumerate(calls) if last[at])]
    region.last = last.count(False)


def _take_types_of_inputs(region: Region) -> None:
    """Let CastLike read the type from what an expression reads, not from its result: the expression can then be one step."""
    makers = {c.outputs[0]: c for c in region.calls if c.is_(*OPERATORS)}
    for call in region.calls:
        if call.is_("CastLike"):
            x, like = call.inputs
            while like in makers:  # whose results have the type of their operands
                like = makers[like].inputs[0]
            call.inputs = (x, like)


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
