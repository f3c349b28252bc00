"""Updates in a plan: elementwise expressions whose results are outputs, such as new parameters and states of an optimizer.

The calls that only make results which replace inputs are moved to the end of its graph.  All calls that may fail or refuse a
value run before them, so that a run either leaves every input as it was or replaces all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..ir import graph as ir
from ..ir.declaration import has_trait
from ..proto.schemas import schemas
from .chains import is_elementwise
from .flat import Roles


class NotInPlace(Exception):
    """Inputs cannot be replaced in place; the message is the reason."""


def place_last(graph: ir.Graph, roles: Roles, replaced: Mapping[int, int], numbers: Iterable[ir.Value]) -> None:
    """Move the calls that only make results which replace inputs to the end of a graph.

    Args:
        graph: the graph, whose nodes are put in another order.
        roles: of its values; `replaced` and `last` are set.
        replaced: the place of the replaced input by that of the result.
        numbers: the inputs of one element.
    """
    _take_types_of_inputs(graph)
    times = Counter(graph.outputs)
    roles.replaced = {
        graph.outputs[o]: graph.inputs[i]
        for o, i in replaced.items()
        if times[graph.outputs[o]] == 1 and not times[graph.inputs[i]]
    }
    made, states = set(roles.replaced), set(roles.replaced.values())
    calls = graph.nodes
    places = {c: at for at, c in enumerate(calls)}
    others = set(graph.outputs) - made

    def followed(at: int, by: Sequence[bool]) -> bool:
        return all(by[places[user]] for o in calls[at].results for user in o.users)

    may = [False] * len(calls)  # whether a call leads to such results only
    for at in reversed(range(len(calls))):
        may[at] = not others & set(calls[at].outputs) and _cannot_fail(calls[at]) and followed(at, may)
    last = [False] * len(calls)
    of_states = [False] * len(calls)
    for at, c in enumerate(calls):
        before = [places[i.producer] for i in c.reads if i.producer is not None]
        last[at] = may[at] and (bool(made & set(c.outputs)) or any(last[m] for m in before))
        of_states[at] = has_trait("", c.op_type, "epilogue") and (
            bool(states & set(c.reads)) or any(of_states[m] for m in before)
        )
    kept = {*states, *numbers}  # and constants, and what only they make, such as a rate
    for c in calls:
        if all(i in kept or i.constant is not None for i in c.reads):
            kept.update(c.results)
    needed = {i for at, c in enumerate(calls) if last[at] for i in c.reads}
    for at in reversed(range(len(calls))):  # a state is read where it is replaced, and so is what costs no further memory
        c = calls[at]
        more = {i for i in c.reads if i.constant is None} - kept - needed
        if may[at] and followed(at, last) and (of_states[at] or (is_elementwise(c) and len(more) < 2)):
            last[at] = True
            needed.update(c.reads)
    graph.arrange([*(c for at, c in enumerate(calls) if not last[at]), *(c for at, c in enumerate(calls) if last[at])])
    roles.last = last.count(False)


def _take_types_of_inputs(graph: ir.Graph) -> None:
    """Let CastLike read the type from what an expression reads, not from its result: the expression can then be one step."""
    for call in graph.nodes:
        if call.is_("CastLike"):
            like = call.inputs[1]
            while (before := ir.producer(like)) is not None and is_elementwise(before) and _keeps_type(before):
                like = before.inputs[0]
            call.put(1, like)


def _keeps_type(call: ir.Node) -> bool:
    """Whether the result has the type of the first input."""
    if call.operator is None:
        return False
    schema = schemas[call.domain, call.op_type][call.operator.version]
    return bool(schema.inputs[0].type_str == schema.outputs[0].type_str)


def _cannot_fail(call: ir.Node) -> bool:
    """Whether a call cannot fail if a kernel computes it: it neither exchanges values nor has a body."""
    return not call.bodies and not has_trait(call.domain, call.op_type, "exchanges")


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


def updates(calls: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[list[int]]:
    """Find the groups of elementwise calls that compute outputs, each with all that only they read.

    Args:
        calls: the calls, each after those that it reads.
        outputs: the outputs.

    Returns:
        The indices of the calls of each group of two or more, in order.  Nothing before the last call of a group reads its
        results, so that the group can take the place of its last call.
    """
    results = set(outputs)
    maker: dict[ir.Value, int] = {}
    readers: defaultdict[ir.Value, set[int]] = defaultdict(set)
    for index, call in enumerate(calls):
        maker.update(dict.fromkeys(call.results, index))
        for i in call.reads:
            readers[i].add(index)
    elementwise = {i for i, c in enumerate(calls) if is_elementwise(c)}
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
            (made,) = calls[at].results
            if all(r in group or (r > last and made in results) for r in readers[made]):
                group.add(at)
                pending |= {maker[i] for i in calls[at].reads if i in maker}
        if len(group) > 1:
            taken |= group
            found.append(sorted(group))
    return found[::-1]
