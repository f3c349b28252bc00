"""What an alignment knows of constants: a small one equals many by chance, so that only its effect confirms it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from .align import Made
from .alignment import ValuePair
from .submodel import NodeCall, Source


def confirmed(
    source: Source, still: Collection[str], equal: Collection[str], pairs: Mapping[str, ValuePair], theirs: Mapping[str, Made]
) -> set[str]:  # fmt: skip
    """The constants that are computed from the inputs, and are right by their effect.

    A value that agrees and is no constant is computed from them, or the partner of a node that reads them reads their partner.

    Args:
        source: the judged model.
        still: its values that are the same on all draws.
        equal: its values that agree with a partner.
        pairs: its values that have a partner.
        theirs: how the other side computes its values.
    """
    readers = defaultdict[str, list[NodeCall]](list)
    for call in source.calls:
        for name in call.uses:
            readers[name].append(call)

    def read_there(name: str) -> bool:
        partners = [theirs.get(pairs[o].other) for call in readers[name] for o in call.outputs if o in pairs and o not in still]
        return any(pairs[name].other in p.uses for p in partners if p is not None)

    found = set[str]()
    waiting = [n for call in source.calls if any(o in equal and o not in still for o in call.outputs) for n in call.uses]
    waiting += [n for n in still if n in pairs and n in equal and read_there(n)]
    while waiting:
        name = waiting.pop()
        if name in still and name not in found and name in source.makers and (name in equal or name not in pairs):
            found.add(name)
            waiting += source.makers[name].uses
    return found
