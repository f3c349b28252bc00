"""Values that their effect confirms: a small constant equals many by chance, and a value may have no partner at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from .alignment import ValuePair
from .submodel import NodeCall, Source


def confirmed(
    source: Source, still: Collection[str], equal: Collection[str], pairs: Mapping[str, ValuePair], replaced: Collection[str],
    reads: Callable[[str, str], bool],
) -> set[str]:  # fmt: skip
    """The constants that are computed from the inputs, and are right by their effect.

    A value that agrees and is not a constant is computed from them, or the partner of a node that reads them reads their partner.

    Args:
        source: the judged model.
        still: its values that are the same on all draws.
        equal: its values that agree with a partner.
        pairs: its values that have a partner.
        replaced: values that differ; what is computed from them is not confirmed.
        reads: a function that returns whether the node of a value of the other side reads what equals a value of `source`.
    """
    readers = defaultdict[str, list[NodeCall]](list)
    for call in source.calls:
        for name in call.uses:
            readers[name].append(call)

    def read_there(name: str) -> bool:
        after = [o for call in readers[name] for o in call.outputs if o in pairs and (o not in still or o in replaced)]
        return any(reads(pairs[o].other, name) for o in after)

    found = set[str]()
    waiting = [n for call in source.calls if any(o in equal and o not in still for o in call.outputs) for n in call.uses]
    waiting += [n for n in still if n in pairs and n in equal and read_there(n)]
    while waiting:
        name = waiting.pop()
        if name in still and name not in found and name in source.makers and (name in equal or name not in pairs):
            found.add(name)
            waiting += source.makers[name].uses
    return found - _after(source, replaced)


def _after(source: Source, names: Collection[str]) -> set[str]:
    """Values, and all that are computed from them."""
    found = set(names)
    for call in source.calls:
        if any(n in found for n in call.uses):
            found.update(call.outputs)
    return found


def used(source: Source, still: Collection[str], agreed: Collection[str], pairs: Collection[str]) -> set[str]:
    """The values without a partner that are not constants, and from which values that agree are computed.

    Args:
        source: the judged model.
        still: its values that are the same on all draws.
        agreed: its values that agree with a partner, with no other value in their place.
        pairs: its values that have a partner.
    """
    found = set[str]()
    waiting = [n for call in source.calls if any(o in agreed and o not in still for o in call.outputs) for n in call.uses]
    while waiting:
        name = waiting.pop()
        if name in source.makers and name not in pairs and name not in still and name not in found:
            found.add(name)
            waiting += source.makers[name].uses
    return found
