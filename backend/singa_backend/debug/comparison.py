"""The result of `compare`: the values of both sides, and the nodes that diverge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..comparison.difference import Difference
from ..engines.local import FailedRun
from ..runtime.origins import Origin
from .alignment import Alignment


@dataclass
class Row:
    """One value of the main graph on both sides.

    Attributes:
        value: its name.
        node: the name of its node.
        operator: of the node.
        index: of the node.
        difference: between the two sides; in local mode of the node alone, with the trusted side's inputs.
        carried: in local mode, the difference that includes errors of earlier nodes.
        judged: False for random values, which cannot be compared.
        adds_up: whether the value is beyond the tolerance, although its node agrees if it reads the trusted side's inputs: the
            rounding errors of earlier nodes add up.
        output: whether it is an output of the graph.
    """

    value: str
    node: str
    operator: str
    index: int
    difference: Difference
    carried: Difference | None = None
    judged: bool = True
    adds_up: bool = False
    output: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the value is within the tolerance, or is not compared."""
        return self.difference.agrees or not self.judged

    @property
    def harmless(self) -> bool:
        """Whether the value agrees, or is not an output and differs only because rounding errors add up."""
        return self.agrees or (self.adds_up and not self.output)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data.

        Returns:
            A dict of the attributes, with those of `difference` inline.
        """
        return {
            "value": self.value, "node": self.node, "operator": self.operator, "index": self.index, "judged": self.judged,
            "adds_up": self.adds_up, "output": self.output,
            **self.difference.to_dict(), "carried": self.carried.to_dict() if self.carried else None,
        }  # fmt: skip


@dataclass
class NotCompared:
    """A node without values on one side.

    Attributes:
        node: its name.
        operator: of the node.
        index: of the node.
        side: "mine" or "theirs".
        failure: the reason.
    """

    node: str
    operator: str
    index: int
    side: str
    failure: FailedRun

    def to_dict(self) -> dict[str, Any]:
        """Return the node as plain data.

        Returns:
            A dict of the attributes, with those of `failure` inline.
        """
        return {"node": self.node, "operator": self.operator, "index": self.index, "side": self.side, **self.failure.to_dict()}


@dataclass
class Divergence:
    """A node whose outputs differ, or that one side cannot compute.

    Attributes:
        node: its name.
        operator: of the node.
        index: of the node.
        values: its outputs that differ.
        why: the largest difference, or the failure.
        inputs_agreed: whether all its inputs were compared and agree; None if some could not be compared.
        notes: differences between the nodes of two models (attributes, weights), if the inputs agree.
        unknown: its inputs that could not be compared.
        among: the number of nodes that may be the cause: this one, and those between it and values that were compared, or those
            that one plan computes with it.
        submodule: the path of the PyTorch submodule that computes the value, "" for the module itself; None without PyTorch.
        like: the node of this model by which this one was found, if the other model has no value of it: the nodes up to `like`,
            in the place of those between the values that agree and the first that differs, compute the right value, and the
            inputs of this node are theirs; otherwise "".
    """

    node: str
    operator: str
    index: int
    values: list[str]
    why: str
    inputs_agreed: bool | None
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    among: int = 1
    submodule: str | None = None
    like: str = ""

    def __str__(self) -> str:
        """Return the node, the difference and the state of its inputs in one line."""
        inputs = {True: "its inputs agree", False: "its inputs already differ", None: self._unknown()}
        return f"{self.operator} {self.node!r}: {self.why} ({inputs[self.inputs_agreed]})"

    def _unknown(self) -> str:
        names = ", ".join(map(repr, self.unknown[:3])) + (f" and {len(self.unknown) - 3} more" if self.unknown[3:] else "")
        return f"not compared: its input{'s' * (len(self.unknown) > 1)} {names}; one of {self.among} nodes is the cause"

    @property
    def headline(self) -> str:
        """The divergence with its title: a node is called the cause only if its inputs were compared, or if it failed."""
        located = self.inputs_agreed is not None
        return f"{'first diverging node' if located else 'first value that differs, of'}{': ' if located else ' '}{self}"

    def to_dict(self) -> dict[str, Any]:
        """Return the divergence as plain data.

        Returns:
            A dict of the attributes.
        """
        return dict(vars(self))


@dataclass
class Comparison:
    """The result of `compare`.

    Attributes:
        mine: the name of this side.
        theirs: the name of the trusted side.
        rows: all values that both sides have, in the order of the nodes.
        not_compared: nodes that one side refused, crashed at, did not reach or does not have.
        first: the first diverging node in that order.
        accumulated: the first output that is beyond the tolerance although no node diverges; None if a node does, or all agree.
        origins: the nodes that diverge although their inputs do not differ, and are not computed from values that do.
        nonfinite: where the first NaN or infinity of this side comes from; None if no node made one.
        alignment: how the values were paired, if not by name.
        refusal: why the other model cannot run, if therefore values of it could not be compared; otherwise "".
    """

    mine: str
    theirs: str
    rows: list[Row] = field(default_factory=list)
    not_compared: list[NotCompared] = field(default_factory=list)
    first: Divergence | None = None
    accumulated: Divergence | None = None
    origins: list[Divergence] = field(default_factory=list)
    nonfinite: Origin | None = None
    alignment: Alignment | None = None
    refusal: str = ""

    @property
    def both_nan(self) -> list[Row]:
        """The values that hold NaN on both sides."""
        return [r for r in self.rows if min(r.difference.nan) > 0]

    @property
    def failed(self) -> list[NotCompared]:
        """The nodes that an engine did not compute."""
        return [n for n in self.not_compared if n.failure.how != "absent"]

    @property
    def is_empty(self) -> bool:
        """Whether no element was compared."""
        return all(0 in (r.difference.shapes[0] or ()) for r in self.rows)

    @property
    def agrees(self) -> bool:
        """Whether both sides computed all nodes, at least one element was compared, no node diverges, and all outputs agree."""
        return not self.is_empty and self.first is None and not self.failed and all(r.harmless for r in self.rows)

    @property
    def mixed(self) -> list[Row]:
        """The values that have floats of different dtypes on the two sides, and were compared."""
        return [r for r in self.rows if r.difference.mixed]

    def worst(self, count: int) -> list[Row]:
        """Return the rows with the largest errors in relation to their tolerance.

        Args:
            count: the maximum number of rows.

        Returns:
            The rows that differ first, those in which errors add up next, largest error first.
        """
        return sorted(self.rows, key=lambda r: (r.agrees, r.harmless, -r.difference.excess, r.index))[:count]

    def worst_layers(self, count: int) -> list[Row]:
        """Return the rows with the largest errors of their own, in relation to the value.

        Args:
            count: the maximum number of rows.

        Returns:
            In local mode of a comparison of two models: the layers in the order of what they add to the error.
        """

        def share(row: Row) -> float:
            rms = row.difference.rms
            return rms if rms is not None else 0.0 if row.agrees else math.inf

        return sorted(self.rows, key=lambda r: (-share(r), r.index))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data, for ``--json``.

        Returns:
            A dict of the attributes, `agrees`, and the names of the values that hold NaN on both sides.
        """
        return {
            "mine": self.mine, "theirs": self.theirs, "agrees": self.agrees,
            "first": self.first.to_dict() if self.first else None,
            "accumulated": self.accumulated.to_dict() if self.accumulated else None,
            "origins": [d.to_dict() for d in self.origins],
            "rows": [r.to_dict() for r in self.rows], "not_compared": [n.to_dict() for n in self.not_compared],
            "nonfinite": self.nonfinite.to_dict() if self.nonfinite else None, "both_nan": [r.value for r in self.both_nan],
            "alignment": self.alignment.to_dict() if self.alignment else None, "refusal": self.refusal,
        }  # fmt: skip
