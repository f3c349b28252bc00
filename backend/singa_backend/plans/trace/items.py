"""The work of a trace: chains of calls, branches to choose, copies into the arena, and values that get other names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...elementwise.compile import available
from ...ir import graph as ir
from ..chains import chains, joined
from ..flat import Roles
from ..updates import updates


@dataclass(eq=False)
class Branch:
    """An If whose branch is chosen when it is reached.

    Attributes:
        call: the If.
        chosen: whether the segment begins with it: its condition is the key of the segment.
    """

    call: ir.Node
    chosen: bool = False


@dataclass(eq=False)
class CopyIn:
    """Copies arrays whose shapes are the key of the segment, the results of a call, into its arena."""

    values: tuple[ir.Value, ...]
    call: ir.Node


@dataclass(eq=False)
class Rename:
    """Lets values stand for others: the outputs of a branch become those of its If."""

    sources: tuple[ir.Value, ...]
    targets: tuple[ir.Value, ...]


@dataclass(eq=False)
class UpdateBegin:
    """What follows only makes results that replace inputs."""


@dataclass(eq=False)
class Update:
    """Elementwise calls that compute outputs, such as the new values of a parameter and of its states."""

    calls: tuple[ir.Node, ...]


PLAIN = Roles()
"""The roles of the values of a body."""

Item = tuple[ir.Node, ...] | Branch | Rename | CopyIn | Update | UpdateBegin


def items_of(graph: ir.Graph, roles: Roles = PLAIN, fuses: bool = False) -> list[Item]:
    """The work of a graph in order.

    Args:
        graph: the graph.
        roles: of its values.
        fuses: whether elementwise calls are joined; in a training step, which has gradients or replaces inputs, to updates.
    """
    finds = fuses and (roles.is_step or roles.last is not None)
    if roles.last is None:
        return _items(graph.nodes, graph.outputs, fuses, finds)
    calls, last = graph.nodes[: roles.last], graph.nodes[roles.last :]
    before = _items(calls, [*graph.outputs, *(i for c in last for i in c.reads)], fuses, False)
    return [*before, UpdateBegin(), *_items(last, graph.outputs, fuses, finds)]


def _items(calls: Sequence[ir.Node], outputs: Sequence[ir.Value], fuses: bool, finds: bool) -> list[Item]:
    groups = updates(calls, outputs) if finds else []
    taken = {i for group in groups for i in group}
    made: list[tuple[int, Item]] = [(group[-1], Update(tuple(calls[i] for i in group))) for group in groups]
    places = {c: i for i, c in enumerate(calls)}
    read = [r for i in taken for r in calls[i].reads]
    rest = [c for i, c in enumerate(calls) if i not in taken]
    found = chains(rest, [*outputs, *read])
    for chain in joined(found, [*outputs, *read]) if fuses and not available() else found:
        made.append((places[chain[-1]], Branch(chain[0]) if chain[0].is_("If") else chain))
    return [item for _, item in sorted(made, key=lambda pair: pair[0])]
