"""The work of a trace: chains of calls, branches to choose, copies into the arena, and values that get other names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..chains import chains
from ..region import Region, RegionCall
from ..updates import updates


@dataclass(eq=False)
class Branch:
    """An If whose branch is chosen when it is reached.

    Attributes:
        call: the If.
        chosen: whether the segment begins with it: its condition is the key of the segment.
    """

    call: RegionCall
    chosen: bool = False


@dataclass(eq=False)
class CopyIn:
    """Copies arrays whose shapes are the key of the segment, the results of a call, into its arena."""

    ids: tuple[int, ...]
    call: RegionCall


@dataclass(eq=False)
class Rename:
    """Gives values other ids: the outputs of a branch become those of its If."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(eq=False)
class UpdateBegin:
    """What follows only makes results that replace inputs."""


@dataclass(eq=False)
class Update:
    """Elementwise calls that compute outputs, such as the new values of a parameter and of its states."""

    calls: tuple[RegionCall, ...]


Item = tuple[RegionCall, ...] | Branch | Rename | CopyIn | Update | UpdateBegin


def items_of(region: Region, find_updates: bool = False) -> list[Item]:
    """The work of a region in order.

    Args:
        region: the region.
        find_updates: whether updates are found, if it is a training step: it has gradients, or replaces inputs.
    """
    finds = find_updates and (bool(region.ids) or region.last is not None)
    if region.last is None:
        return _items(region.calls, region.outputs, finds)
    calls, last = region.calls[: region.last], region.calls[region.last :]
    before = _items(calls, [*region.outputs, *(i for c in last for i in c.reads)], False)
    return [*before, UpdateBegin(), *_items(last, region.outputs, finds)]


def _items(calls: Sequence[RegionCall], outputs: Sequence[int], finds: bool) -> list[Item]:
    groups = updates(calls, outputs) if finds else []
    taken = {i for group in groups for i in group}
    made: list[tuple[int, Item]] = [(group[-1], Update(tuple(calls[i] for i in group))) for group in groups]
    places = {id(c): i for i, c in enumerate(calls)}
    read = [r for i in taken for r in calls[i].reads]
    for chain in chains([c for i, c in enumerate(calls) if i not in taken], [*outputs, *read]):
        made.append((places[id(chain[-1])], Branch(chain[0]) if chain[0].is_("If") else chain))
    return [item for _, item in sorted(made, key=lambda pair: pair[0])]
