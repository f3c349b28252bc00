"""The result of an alignment: which values of two models are the same, and where none are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..rendering import printable
from .sketch import ValueLayout


@dataclass(frozen=True)
class ValuePair:
    """The value of the other model that a value is compared with.

    Attributes:
        other: its name in the other model.
        layout: its arrangement as in this model; None if the shapes are equal.
        how: "given", "name", "position" (of a graph output), "value" (equal on all draws), "constant" (equal, and the same on
            all draws), "structure" (the same operator reads equal values, but the dtype or the size differs), or "repair" (equal
            after earlier values were replaced by those of the other model, or such an earlier value).
    """

    other: str
    layout: ValueLayout | None = None
    how: str = "value"

    def to_dict(self) -> dict[str, Any]:
        """Return the pair as plain data.

        Returns:
            A dict of the attributes; the layout is text.
        """
        return {"other": self.other, "layout": str(self.layout) if self.layout else None, "how": self.how}


@dataclass(frozen=True)
class Gap:
    """Connected nodes whose values have no partner in the other model.

    Attributes:
        before: the matched values that they read.
        after: the matched values that are computed from theirs, or graph outputs.
        nodes: the names of the nodes, in order.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        """Return the gap in one line."""
        count = len(self.nodes)
        ends = [printable(names[0]) if names else "nothing" for names in (self.before, self.after)]
        more = ["" if len(n) < 2 else f" (and {len(n) - 1} more)" for n in (self.before, self.after)]
        return f"between {ends[0]}{more[0]} and {ends[1]}{more[1]}: {count} node{'s' * (count != 1)} unmatched"

    def to_dict(self) -> dict[str, Any]:
        """Return the gap as plain data.

        Returns:
            A dict of the attributes.
        """
        return {"before": list(self.before), "after": list(self.after), "nodes": list(self.nodes)}


@dataclass
class Alignment:
    """Which values of two sides are the same.

    Attributes:
        pairs: the values of this model that have a partner.
        matched: the numbers of nodes of this model and of the other side that have an equal value there.
        nodes: the numbers of nodes, without those whose values are the same on all draws.
        gaps: the nodes of this model without a partner.
        draws: the number of draws of inputs on which the pairs were verified.
        culprits: the values that differ although the values before them agree, in order of their discovery, and their partners:
            with the value of the other side in their place, the values after them agree.
        inserted: values that equal their partners, and the values of the other side with which the nodes that read them agree:
            the other side has a node more before these nodes.
        neutral: constants that a culprit reads and that have no partner, but have the same effect as those of the other side.
        confirmed: constants, with a partner or without, from which a value that agrees is computed.
        doubtful: constants that equal their partner, perhaps by chance: no effect of them confirms it.
        unit: what the other side consists of: "nodes", or "values" of a module.
        used: values without a partner from which values that agree are computed.
        alike: all values of the other side that agree with a value, if there are several.
    """

    pairs: dict[str, ValuePair] = field(default_factory=dict)
    matched: tuple[int, int] = (0, 0)
    nodes: tuple[int, int] = (0, 0)
    gaps: list[Gap] = field(default_factory=list)
    draws: int = 0
    unit: str = "nodes"
    culprits: dict[str, str] = field(default_factory=dict)
    inserted: dict[str, str] = field(default_factory=dict)
    neutral: dict[str, str] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    alike: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return how much was matched, in one line."""
        of = "of the other model" if self.unit == "nodes" else "of the module"
        return (
            f"{self.matched[0]} of {self.nodes[0]} nodes matched with {self.matched[1]} of {self.nodes[1]} {self.unit} {of},"
            f" on {self.draws} draw{'s' * (self.draws != 1)} of inputs"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the alignment as plain data, for ``--json``.

        Returns:
            A dict of the attributes.
        """
        return {
            "matched": list(self.matched), "nodes": list(self.nodes), "draws": self.draws, "unit": self.unit,
            "culprits": self.culprits, "inserted": self.inserted, "neutral": self.neutral,
            "confirmed": sorted(self.confirmed), "doubtful": sorted(self.doubtful),
            "gaps": [g.to_dict() for g in self.gaps], "pairs": {n: p.to_dict() for n, p in self.pairs.items()},
        }  # fmt: skip
