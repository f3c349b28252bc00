"""The picture of the differences of two models: both graphs in one, with a mark on what is added, removed or changed.

Values have their names in the second model.  A node that was removed is drawn with the values that it read and made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..inspection import Inspection, inspect
from ..inspection.picture import Mark, Marks, draw
from ..inspection.table import Call, Table
from ..proto.load import ModelSource
from ..proto.values import Value
from .diff import Change, GraphDifference, diff, paired
from .model import ComparedModel

_FIRST = "first model"


def diff_page(first: ModelSource, second: ModelSource, found: GraphDifference | None = None) -> str:
    """Draw the differences of two models.

    Args:
        first: a path, a ModelProto or bytes.
        second: the other model.
        found: the result of `diff` for these models; None to compare them here.

    Returns:
        The text of a self-contained HTML page.

    Raises:
        InvalidModel: a model breaks a rule of ONNX.
    """
    a, b = ComparedModel.of(first), ComparedModel.of(second)
    found = diff(a, b) if found is None else found
    pairs, names = paired(a, b)
    before, after = inspect(first), inspect(second)
    merged = _Merged(before, after, {a.indices[c]: b.indices[d] for c, d in pairs}, names, found)
    details = after.details() | {
        "file": f"{before.details()['file']} and {after.details()['file']}",
        "changes": [c.to_dict() | {"at": merged.place(c)} for c in found.changes],
    }
    return draw(merged.tables, details, merged.marks)


class _Merged:
    """The tables of both models as those of one, and the marks on its main graph."""

    def __init__(
        self, before: Inspection, after: Inspection, pairs: Mapping[int, int], names: Mapping[str, str], found: GraphDifference
    ) -> None:
        self.before, self.after, self.pairs = before, after, pairs
        self.partners = {j: i for i, j in pairs.items()}
        taken = {n for c in after.main.nodes for n in c.outputs} | {v.name for v in after.main.inputs}
        taken |= {s.value.name for s in after.main.states}
        removed = [
            c for c in before.main.nodes if c.index not in pairs and c.outputs and c.outputs[0] not in before.main.constants
        ]
        self.names = dict(names)
        for call in removed:
            for n in filter(None, call.outputs):
                self.names[n] = _unused(n, taken)
        self.weights = {self.names.get(c.name, c.name): c for c in found.changes if c.kind == "weight"}
        self.changes: dict[int | None, list[Change]] = {}
        for change in found.changes:
            if change.kind == "node" and change.how == "changed":
                self.changes.setdefault(change.index, []).append(change)
        self.bodies = {t.path for t in before.graphs[1:] if not t.depth}  # paths of the first model's functions
        self.functions = {f"function:{c.name}": c for c in found.changes if c.kind == "function"}
        self.readers: dict[str, int] = {}  # changed weight -> index of its first reader in the first model
        self.places: dict[tuple[str, int | None], int] = {}  # ("first" or "second", index in that model) -> merged index
        self.extra = [  # graphs of the first model that are drawn next to those of the second
            replace(t, path=self._first_path(t.path), title=f"{t.title} in the {_FIRST}", nodes=self._nodes(t))
            for t in before.graphs
            if self._body(t.path) in self.functions
        ]
        self.marks = Marks()
        main = self._main(removed)
        self.marks.values = {c.name: _mark([c]) for c in found.changes if c.kind in ("input", "output")}
        self.tables = [main, *after.graphs[1:], *self.extra]

    def place(self, change: Change) -> int | None:
        """The index in the merged graph of a changed node, or of a node that reads a changed weight; None for other changes."""
        if change.kind == "weight":
            return self.places.get(("first", self.readers.get(change.name)))
        return self.places.get(("second" if change.how == "added" else "first", change.index)) if change.kind == "node" else None

    def _main(self, removed: Sequence[Call]) -> Table:
        before, after = self.before.main, self.after.main
        nodes: list[Call] = []
        marks: dict[int, Mark] = {}
        waiting = list(removed)

        def add(call: Call, mark: Mark | None, side: str, index: int) -> None:
            if mark is not None:
                marks[len(nodes)] = mark
            self.places[side, index] = len(nodes)
            nodes.append(replace(call, index=len(nodes)))

        for call in after.nodes:
            partner = self.partners.get(call.index)
            if partner is None:
                constant = bool(call.outputs) and call.outputs[0] in after.constants
                add(
                    call,
                    None if constant else Mark("added", (("node", f"{call.index} of the second model"),)),
                    "second",
                    call.index,
                )
                continue
            while waiting and waiting[0].index < partner:
                gone = waiting.pop(0)
                add(*self._removed(gone), "first", gone.index)
            add(*self._both(before.nodes[partner], call), "first", partner)
        for call in waiting:
            add(*self._removed(call), "first", call.index)
        self.marks.changes = marks
        constants = {self.names.get(n, n): text for n, text in before.constants.items()} | after.constants
        known = [s.value.name for s in after.states]
        states = [s for s in before.states if self.names.get(s.value.name, s.value.name) not in known]
        return replace(
            after,
            inputs=_union(before.inputs, after.inputs),
            outputs=_union(before.outputs, after.outputs),
            states=[*after.states, *states],
            nodes=nodes,
            values={self.names.get(n, n): v for n, v in before.values.items()} | after.values,
            constants=constants,
        )

    def _removed(self, call: Call) -> tuple[Call, Mark]:
        inputs, outputs = ([self.names.get(n, n) for n in side] for side in (call.inputs, call.outputs))
        made = replace(call, inputs=inputs, outputs=outputs, graphs=self._inner(call))
        return made, Mark("removed", (("node", f"{call.index} of the first model"),))

    def _both(self, first: Call, second: Call) -> tuple[Call, Mark | None]:
        """A node of both models; its weights and subgraphs count as parts of it."""
        changes = list(self.changes.get(first.index, ()))
        changes += [self.functions[p] for p in second.graphs if p in self.functions]
        weights = [self.weights[n] for n in dict.fromkeys(second.inputs) if n in self.weights]
        self.readers |= {c.name: first.index for c in weights if c.name not in self.readers}
        changes += weights
        if not changes:
            return second, None
        where = ("node", f"{first.index} of the first model, {second.index} of the second")
        same = first.graphs and all(p in self.bodies and p not in self.functions for p in first.graphs)
        graphs = second.graphs if same else [*second.graphs, *self._inner(first)]
        return replace(second, graphs=graphs), Mark("changed", (where, *_mark(changes).rows))

    def _inner(self, call: Call) -> list[str]:
        """Add the subgraphs of a node of the first model, and return their paths."""
        for path in call.graphs:
            for table in self.before.graphs:
                if table.depth and (table.path == path or table.path.startswith(f"{path}/")):
                    title = f"{table.title} in the {_FIRST}"
                    self.extra.append(replace(table, path=self._first_path(table.path), title=title, nodes=self._nodes(table)))
        return [self._first_path(p) for p in call.graphs]

    def _nodes(self, table: Table) -> list[Call]:
        return [replace(c, graphs=[self._first_path(p) for p in c.graphs]) for c in table.nodes]

    def _body(self, path: str) -> str:
        """The path of the function of the first model that contains a graph; "" if none does."""
        return next((b for b in self.bodies if path == b or path.startswith(f"{b}/")), "")

    def _first_path(self, path: str) -> str:
        """The path of a graph of the first model among those of both; a function that did not change has one for both."""
        body = self._body(path)
        return path if body and body not in self.functions else f"{_FIRST}:{path}"


def _mark(changes: Sequence[Change]) -> Mark:
    """The mark of a node, an input or an output with these changes."""
    rows = []
    for c in changes:
        what = c.what or c.how
        if c.max_abs is not None:
            what = f"max abs {c.max_abs:.6g}; {c.differing:,} of {c.elements:,} elements differ; {what}"
        rows.append((c.kind if c.kind != "weight" else f"weight {c.name}", what))
    return Mark(changes[0].how if len(changes) == 1 and changes[0].kind != "weight" else "changed", tuple(rows))


def _union(before: Iterable[Value], after: Sequence[Value]) -> list[Value]:
    there = {v.name for v in after}
    return [*after, *(v for v in before if v.name not in there)]


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += f" ({_FIRST})"
    taken.add(name)
    return name
