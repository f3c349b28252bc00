"""Values that their effect confirms: a small constant equals many by chance, and a value may have no partner at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..ir.graph import Value
from .alignment import ValuePair
from .model import ComparedModel, result_names


def confirmed(
    source: ComparedModel, still: Collection[str], equal: Collection[str], pairs: Mapping[str, ValuePair],
    replaced: Collection[str], reads: Callable[[str, str], bool],
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

    def read_there(name: str) -> bool:
        after = [o for node in source.values[name].users for o in result_names(node)]
        return any(reads(pairs[o].other, name) for o in after if o in pairs and (o not in still or o in replaced))

    found = set[Value]()
    waiting = _read_by(source, equal, still)
    waiting += [source.values[n] for n in still if n in pairs and n in equal and read_there(n)]
    while waiting:
        value = waiting.pop()
        known = value.name in equal or value.name not in pairs
        if value.producer is not None and value.name in still and value not in found and known:
            found.add(value)
            waiting += value.producer.reads
    return {v.name for v in found} - _after(source, replaced)


def _read_by(source: ComparedModel, names: Collection[str], still: Collection[str]) -> list[Value]:
    """The values that the nodes of these values read, without those of constants."""
    nodes = [node for node in source.graph.nodes if any(o in names and o not in still for o in result_names(node))]
    return [value for node in nodes for value in node.reads]


def _after(source: ComparedModel, names: Collection[str]) -> set[str]:
    """Values, and all that are computed from them."""
    found = set(names)
    for node in source.graph.nodes:
        if any(v.name in found for v in node.reads):
            found.update(result_names(node))
    return found


def used(source: ComparedModel, still: Collection[str], agreed: Collection[str], pairs: Collection[str]) -> set[str]:
    """The values without a partner that are not constants, and from which values that agree are computed.

    Args:
        source: the judged model.
        still: its values that are the same on all draws.
        agreed: its values that agree with a partner, with no other value in their place.
        pairs: its values that have a partner.
    """
    found = set[str]()
    waiting = _read_by(source, agreed, still)
    while waiting:
        value = waiting.pop()
        if value.producer is not None and value.name not in pairs and value.name not in still and value.name not in found:
            found.add(value.name)
            waiting += value.producer.reads
    return found
