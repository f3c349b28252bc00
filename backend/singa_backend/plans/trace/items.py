"""The work of a trace: chains of calls, branches to choose, copies into the arena, and values that get other names."""

from __future__ import annotations

from dataclasses import dataclass

from ..chains import chains
from ..region import Region, RegionCall


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
class Updates:
    """What follows only makes results that replace inputs."""


Item = tuple[RegionCall, ...] | Branch | Rename | CopyIn | Updates


def items_of(region: Region) -> list[Item]:
    """The work of a region in order."""
    made: list[Item] = []
    calls, last = region.calls[: region.last], region.calls[len(region.calls) if region.last is None else region.last :]
    for group in chains(calls, [*region.outputs, *(i for c in last for i in c.reads)]):
        if group[0].is_("If"):
            made.append(Branch(group[0]))
        else:
            made.append(group)
    if region.last is not None:
        made += [Updates(), *chains(last, region.outputs)]
    return made
