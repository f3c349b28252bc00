"""Names the first wrong node of a check, and writes it as a model of one node."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...comparison.difference import Difference, Tolerance, difference
from ...engines.command import EngineCommand
from ...engines.local import FailedRun, Ours
from ...errors import SonnxError
from ...ir.graph import Node
from .. import repro
from ..bisect import bisect
from ..lockstep import attempt
from ..model import ComparedModel, nodes_for, read_names, result_names
from ..setting import DEFINITION
from .choose import attributes_hash, between, makers, weight_hash
from .document import Guard, GuardNode
from .write import inputs_of


@dataclass
class Culprit:
    """The first wrong node, or the nodes of which one is wrong.

    Attributes:
        node: the name of the node; the last one if there are several.
        operator: of the node.
        case: the inputs with which it was found.
        value: the first value that differs.
        why: its difference, or the message of the engine that failed.
        among: the number of nodes that may be wrong: 1 if the node is known.
        found: what named it: "values" (those around it were compared), "hashes" (of the nodes between compared values it is the
            only one that is not the guard's), "bisect" (the model was run node by node) or "failure".
        notes: what differs from the guard's node.
        folder: of model.onnx and test_data_set_0 of this node alone; None if they were not written.
        alone: whether the node alone was run and differs again; None if it was not run.
    """

    node: str
    operator: str
    case: str
    value: str
    why: str
    among: int
    found: str
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    alone: bool | None = None

    def __str__(self) -> str:
        """Return the node, the value and its difference in one line."""
        count = "" if self.among == 1 else f"; one of {self.among} nodes is the cause"
        return f"{self.operator} {self.node!r}: {self.value!r}: {self.why} (case {self.case!r}{count})"

    def to_dict(self) -> dict[str, Any]:
        """Return the node as plain data.

        Returns:
            A dict of the attributes.
        """
        return vars(self) | {"folder": str(self.folder) if self.folder else None}


@dataclass(frozen=True)
class GuardOrigin:
    """A value that differs although those that it is computed from agree.

    Attributes:
        case: the name of the case.
        value: the name of the value.
        nodes: the nodes that make it from values that agree, the last one first.
    """

    case: str
    value: str
    nodes: list[GuardNode]


States = Mapping[str, Mapping[str, Difference]]
"""The differences of the compared values, by case."""


def origin_of(guard: Guard, states: States) -> GuardOrigin | None:
    """The first origin in the order of the values, over all cases; of one value, that with the fewest nodes."""
    by_value = makers(guard.nodes)
    for value in guard.values:
        found = []
        for case, known in states.items():
            if value.name in known and not known[value.name].agrees:
                nodes = between(by_value, value.name, known.keys() - {value.name})
                if not any(n in known and not known[n].agrees for node in nodes for n in node.reads if n != value.name):
                    found.append(GuardOrigin(case, value.name, nodes))
        if found:
            return min(found, key=lambda o: len(o.nodes))
    return None


class GuardSearch:
    """Finds the node of an origin.

    Args:
        guard: the guard.
        source: the checked model; None if there is none.
        against: the engine that computed the values; None if they are of a file.
        timeout: seconds for one chunk on the engine.
        to: the folder to write; None to name it after the node.
    """

    def __init__(
        self, guard: Guard, source: ComparedModel | None, against: str | EngineCommand | None, timeout: float, to: Path | None
    ) -> None:
        self.guard, self.source, self.against, self.timeout, self.to = guard, source, against, timeout, to

    def culprit(self, origin: GuardOrigin, apart: Difference) -> Culprit:
        """The node of an origin, by the values, by the hashes, or by running the model node by node."""
        node = origin.nodes[0]
        made = Culprit(node.name, node.operator, origin.case, origin.value, str(apart), len(origin.nodes), "values")
        if self.source is None:
            return made
        changed = {n.name: notes for n in origin.nodes if (notes := self.changes(n))}
        if changed:
            names = self.causes(changed)
            made.notes = [f"{n}: {note}" if len(names) > 1 else note for n in names for note in changed[n]][:8]
            if len(names) == 1:
                self._named(made, next(n for n in origin.nodes if n.name == names[0]), "hashes" if made.among > 1 else "values")
            if made.among == 1:
                self._write(made)
            return made
        again = self._bisected(origin)
        if again is not None:
            made.node, made.operator, made.among, made.found, made.alone = *again[:2], 1, "bisect", True
            made.folder, made.notes = again[2:]
            return made
        earlier = self._earlier(origin)
        if len(earlier) == 1:
            (node, notes) = earlier[0]
            self._named(made, node, "hashes")
            made.notes = [*notes, "its own values agree where they are stored"]
        if made.among == 1:
            self._write(made)
        return made

    def _named(self, made: Culprit, node: GuardNode, found: str) -> None:
        made.node, made.operator, made.among, made.found = node.name, node.operator, 1, found

    def changes(self, node: GuardNode) -> list[str]:
        """How a node of the checked model differs from the guard's."""
        source = self.source
        assert source is not None
        call = next(filter(None, map(source.producer, node.makes)), None)
        if call is None:
            return ["it is not in this model"]
        notes = []
        if call.op_type != node.operator:
            notes.append(f"it is a {call.op_type} in this model")
        elif attributes_hash(source, call) != node.attributes:
            notes.append("its attributes, or the defaults of this opset, are others")
        if read_names(call) != node.reads:
            notes.append(f"it reads {', '.join(read_names(call))} and not {', '.join(node.reads)}"[:200])
        for name in read_names(call):
            known = self.guard.weights.get(name)
            if known is not None and name not in source.weights:
                notes.append(f"{name!r} is not a weight in this model")
            elif known is not None and (now := weight_hash(source, name)) != known:
                notes.append(f"the weight {name!r} is another: {now}, in the guard {known}")
        return notes

    def causes(self, changed: Mapping[str, Sequence[str]]) -> list[str]:
        """The changed nodes, without those that only read other values because a node is gone."""
        gone = [n for n, notes in changed.items() if notes == ["it is not in this model"]]
        if len(gone) == 1 and all(n == gone[0] or (len(w) == 1 and w[0].startswith("it reads ")) for n, w in changed.items()):
            return gone
        return list(changed)

    def _earlier(self, origin: GuardOrigin) -> list[tuple[GuardNode, list[str]]]:
        """The changed nodes among all that the value depends on."""
        nodes = between(makers(self.guard.nodes), origin.value, ())
        found = [(n, notes) for n in nodes if (notes := self.changes(n))]
        if len(found) > 1:
            names = self.causes({n.name: notes for n, notes in found})
            found = [f for f in found if f[0].name in names]
        return found

    def _feeds(self, case: str) -> dict[str, np.ndarray]:
        return inputs_of(next(c for c in self.guard.cases if c.name == case))

    def _bisected(self, origin: GuardOrigin) -> tuple[str, str, Path, list[str]] | None:
        """The node that differs from the definitions when it runs alone, its operator, files and differences; or None."""
        if self.against is None or self.against == DEFINITION or self.source is None:
            return None
        against = DEFINITION if self.against == "sonnx" else self.against
        before = {n.name for n in between(makers(self.guard.nodes), origin.value, ())}
        with tempfile.TemporaryDirectory(prefix="sonnx-") as place:
            try:
                found = bisect(self.source, self._feeds(origin.case), against=against, to=place, timeout=self.timeout)
            except SonnxError:  # the definitions, or the engine, cannot run this model node by node
                return None
            if found is None or not found.alone or found.node.among > 1 or found.node.node not in before:
                return None
            part, feeds, theirs = repro.read(Path(place))
            folder, right = self._folder(found.node.node), Ours().run(part.proto, part.folder, feeds)
            repro.write(folder, part, part.graph.nodes, feeds, part.outputs, right)
        tolerance = part.widened_by(Tolerance(), part.graph.nodes)
        wrong = theirs if self.against != "sonnx" else {}
        notes = [f"alone, {n!r}: {d}" for n, v in wrong.items() if not (d := difference(v, right[n], tolerance)).agrees]
        notes += [f"alone: {found.failure}"] if found.failure else []
        return found.node.node, found.node.operator, folder, notes

    def _folder(self, node: str) -> Path:
        assert self.source is not None
        return repro.folder_for(self.to, self.source, node)

    def _write(self, made: Culprit) -> None:
        """Write the node with the inputs that the definitions compute, and the outputs that the guard stores whole."""
        source = self.source
        call = next((c for c in source.graph.nodes if c.name == made.node), None) if source else None
        if source is None or call is None:
            return
        feeds = self._feeds(made.case)
        values = read_values(source, call, feeds)
        if values is None:
            return
        stored = {v.name: v.cases.get(made.case, {}).get("") for v in self.guard.values}
        results = {n: s.elements.reshape(s.shape) for n in result_names(call) if (s := stored.get(n)) is not None and s.whole}
        made.folder = self._folder(call.name)
        repro.write(made.folder, source, [call], values, result_names(call), results)
        if not results:
            made.notes.append("the guard does not store its outputs whole: the data set has inputs only")


def read_values(source: ComparedModel, call: Node, feeds: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """The values that a node reads, computed by definitions; None if they cannot be."""
    names = [n for n in read_names(call) if source.producer(n)]
    before = nodes_for(names, source.graph.nodes[: source.graph.nodes.index(call)])
    found = attempt(Ours(), source, before, dict(feeds), names) if names else {}
    if isinstance(found, FailedRun):
        return None
    return {n: v for n, v in {**feeds, **found}.items() if n in read_names(call)}
