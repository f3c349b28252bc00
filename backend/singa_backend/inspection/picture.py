"""A self-contained HTML page of a model's graphs: an outline, and a picture to pan, zoom, search and open; works offline."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..ir.declaration import declarations
from ..proto.schemas import plain_domain
from .blocks import Items, Repeat, common, fold, members, moved, scope, scoped
from .graph_drawing import LAYER, layered
from .html import fill
from .measures import Document, Error, Key, Time, errors_of, key_of, ratio, seconds_of, times_of
from .outline import figures, outline
from .table import Call, Table

TEMPLATE = Path(__file__).with_name("templates") / "graph.html"
_FAMILIES = {
    "heavy": {"conv", "linalg", "attention", "flex_attention", "linear_attention", "recurrent", "signal"},
    "norm": {"activation", "normalization", "pool", "loss", "reduction"},
    "move": {"shape", "gather", "pad_slice", "creation", "cast", "sequence", "resize", "quantize"},
    "flow": {"control"},
}
"""Color -> its operator families (modules)."""


@dataclass(frozen=True)
class Mark:
    """How a node, an input or an output differs between two models.

    Attributes:
        how: "added", "removed" or "changed".
        rows: the changes, for the details.
    """

    how: str
    rows: tuple[tuple[str, str], ...] = ()


@dataclass
class Marks:
    """What is drawn on the nodes of a page.

    Attributes:
        times: of nodes.
        errors: of the main graph's nodes, by index.
        changes: of the main graph's nodes, by index.
        values: changes of the main graph's inputs and outputs, by name.
    """

    times: Mapping[Key, Time] = field(default_factory=dict)
    errors: Mapping[int, Error] = field(default_factory=dict)
    changes: Mapping[int, Mark] = field(default_factory=dict)
    values: Mapping[str, Mark] = field(default_factory=dict)


def page(
    tables: Sequence[Table], details: dict[str, Any], profile: Document | None = None, comparison: Document | None = None
) -> str:
    """Create the page of an inspected model.

    Args:
        tables: its graphs.
        details: of the whole model.
        profile: the times of a run.
        comparison: the differences from a trusted side.

    Returns:
        The text of the page.

    Raises:
        InvalidInput: the profile or the comparison is of another model (SX398).
    """
    marks = Marks()
    if profile is not None:
        marks.times = times_of(profile, tables)
        details = details | {"time": {"seconds": seconds_of(profile), "by": str(profile.get("by", ""))}}
    if comparison is not None:
        marks.errors = errors_of(comparison, tables[0])
        details = details | {"error": {"mine": str(comparison.get("mine", "")), "theirs": str(comparison.get("theirs", ""))}}
    return draw(tables, details, marks)


def draw(tables: Sequence[Table], details: dict[str, Any], marks: Marks) -> str:
    """Create the page of these graphs, with what `marks` has for their nodes."""
    index = {table.path: i for i, table in enumerate(tables)}
    signatures: dict[str, Hashable] = {}
    for table in reversed(tables):  # subgraphs follow their graph
        if table.depth:
            signatures[table.path] = tuple(_labels(table.nodes, table, signatures))
    free = _free(tables)
    fixed: dict[int, set[str]] = {}  # by depth, the states and constants of the graphs that are less deep
    for depth in {t.depth for t in tables}:
        fixed[depth] = {n for t in tables if t.depth < depth for n in (*(s.value.name for s in t.states), *t.constants)}
    graphs = []
    for table in tables:
        outer = [n for n in free.get(table.path, ()) if n not in fixed[table.depth]]
        graphs.append(_Graph(table, index, outer, free, marks, signatures).data())
    data = {**details, "layer": LAYER, "graphs": graphs}
    return fill(TEMPLATE, data, {"OUTLINE": outline(graphs), "FIGURES": figures(graphs, data)})


def _free(tables: Sequence[Table]) -> dict[str, list[str]]:
    """The values of outer graphs that each subgraph reads, itself or in its own subgraphs, by its path."""
    free: dict[str, list[str]] = {}
    for table in reversed(tables):  # subgraphs follow their graph
        own = {n for c in table.nodes for n in c.outputs} | {v.name for v in table.inputs} | {s.value.name for s in table.states}
        names = [n for c in table.nodes for n in (*c.inputs, *_captured(c, free))] + [v.name for v in table.outputs]
        if table.depth:
            free[table.path] = [n for n in dict.fromkeys(names) if n and n not in own]
    return free


def _captured(call: Call, free: Mapping[str, Sequence[str]]) -> list[str]:
    """The values that the subgraphs of a node read from outside."""
    return [n for p in call.graphs for n in free.get(p, ())]


def _labels(calls: Sequence[Call], table: Table, signatures: Mapping[str, Hashable]) -> list[Hashable]:
    """What nodes at the same place of repeated blocks have in common, by node; subgraphs by their own nodes."""
    states = {s.value.name for s in table.states}

    def label(call: Call) -> Hashable:
        kinds = tuple("" if not n else table.shown(n) if n in states else table.constants.get(n, "value") for n in call.inputs)
        inner = tuple(signatures.get(p, p) for p in call.graphs)
        return call.title, tuple(sorted(call.attributes.items())), kinds, len(call.outputs), inner

    return [label(c) for c in calls]


@dataclass(frozen=True)
class _Block:
    """One block of a repeat."""

    index: int
    items: tuple[int | Repeat, ...]

    def nodes(self) -> list[int]:
        """The positions of all nodes."""
        return members(self.items)


_Item = int | Repeat | _Block


def _alone(index: int, block: tuple[int | Repeat, ...]) -> _Item:
    """A block as an item of a scene: a block of one node is that node."""
    return block[0] if len(block) == 1 else _Block(index, block)


class _Graph:
    """The vertices, edges, groups and scenes of one graph.

    Constant nodes and initializers are not vertices: the details of the nodes that read them show them.  A scene is what is drawn
    at one place: the graph itself, or the inside of a group.  A group is a repeat, or one block of a repeat.

    Vertices and groups are dicts with short keys, which templates/graph.html reads:

        t, n, w       the title, the text under it, and the number of characters of the type that may replace that text
        k             of a vertex: "in", "out", or the color of the node
        c             of a value from outside: its name
        x, s          of a node: its index and its status
        i, o, a, g    of a node: inputs, outputs, attributes, and the indices of its subgraphs
        m, e, d       the time, the error and the change, with the rows `r` of the details
        u, up         the group that contains the vertex, or the group
    """

    def __init__(
        self,
        table: Table,
        index: Mapping[str, int],
        outer: Sequence[str],
        free: Mapping[str, Sequence[str]],
        marks: Marks,
        signatures: Mapping[str, Hashable],
    ) -> None:
        self.table, self.index, self.marks = table, index, marks
        self.longest = max((t.share for t in marks.times.values()), default=0.0) or 1.0
        self.vertices: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.scenes: list[dict[str, Any]] = []
        makers: dict[str, int] = {}
        main = not table.path
        for name in outer:
            makers[name] = len(self.vertices)
            self.vertices.append({"k": "in", "t": name, "n": "from outside", "w": len(table.shown(name)), "c": name})
        for value in table.inputs:
            makers[value.name] = len(self.vertices)
            self.vertices.append(self._end("in", value.name, "input", {"o": [value.name]}))
        first = len(self.vertices)
        calls = [c for c in table.nodes if not (c.outputs and c.outputs[0] in table.constants)]
        for call in calls:
            makers.update((n, len(self.vertices)) for n in call.outputs if n)
            self.vertices.append(self._vertex(call, main))
        last = len(self.vertices)
        for value in table.outputs:
            self.vertices.append(self._end("out", value.name, "output", {"i": [value.name]}))
        self.pairs: dict[tuple[int, int], list[str]] = {}
        for at, vertex in enumerate(self.vertices):
            reads = _captured(table.nodes[vertex["x"]], free) if "g" in vertex else ()
            for name in dict.fromkeys((*vertex.get("i", ()), *reads)):
                if name in makers:
                    self.pairs.setdefault((makers[name], at), []).append(name)
        self.keys = list(self.pairs)
        labels = [
            (label, self.marks.changes[c.index].how if main and c.index in self.marks.changes else "")
            for c, label in zip(calls, _labels(calls, table, signatures), strict=True)
        ]
        sources = [
            [makers[n] - first if first <= makers.get(n, -1) < last else -1 for n in (*c.inputs, *_captured(c, free))]
            for c in calls
        ]
        names = [c.name for c in calls]
        items = scoped(fold(labels, sources, names), names)
        items = [moved(item, first) for item in items]
        self._scene([*range(first), *items, *range(last, len(self.vertices))], range(len(self.keys)), -1)

    def data(self) -> dict[str, Any]:
        """The graph for the page."""
        table = self.table
        states = {s.value.name: [table.shown(s.value.name), s.bytes] for s in table.states}
        used = {n for v in self.vertices for n in (*v.get("i", ()), *v.get("o", ()))}
        edges = [
            [a, b, names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"]
            for (a, b), names in self.pairs.items()
        ]
        types = {n: t for n in used if (t := table.shown(n))}
        return {"path": table.path, "title": table.title, "depth": table.depth, "vertices": self.vertices, "edges": edges,
                "groups": self.groups, "scenes": self.scenes, "states": states, "types": types,
                "constants": table.constants}  # fmt: skip

    def _end(self, kind: str, name: str, words: str, ends: dict[str, Any]) -> dict[str, Any]:
        vertex = {"k": kind, "t": name, "n": words, "w": len(self.table.shown(name)), **ends}
        mark = None if self.table.path else self.marks.values.get(name)
        return vertex if mark is None else vertex | {"d": {"how": mark.how, "r": mark.rows}}

    def _vertex(self, call: Call, main: bool) -> dict[str, Any]:
        vertex = {"k": _colour(call), "t": call.title, "n": call.name, "s": call.status, "x": call.index,
                  "i": call.inputs, "o": call.outputs, "a": call.attributes}  # fmt: skip
        if call.graphs:
            vertex["g"] = [self.index[p] for p in call.graphs if p in self.index]
        time = self.marks.times.get(key_of(self.table, call))
        if time is not None:
            vertex["m"] = {"seconds": time.seconds, "share": time.share, "b": round(time.share / self.longest, 4), "r": time.rows}
        if main and (error := self.marks.errors.get(call.index)) is not None:
            vertex["e"] = {"excess": None if error.excess == float("inf") else error.excess, "words": ratio(error.excess),
                           "abs": error.max_abs, "ok": error.agrees, "first": error.first, "r": error.rows}  # fmt: skip
        if main and (mark := self.marks.changes.get(call.index)) is not None:
            vertex["d"] = {"how": mark.how, "r": mark.rows}
        return vertex

    def _scene(self, items: Sequence[_Item], edges: Sequence[int], owner: int) -> int:
        """Add a scene of these items, and the scenes within it; `edges` are those that touch its nodes.  Returns its number."""
        number = len(self.scenes)
        self.scenes.append({})
        owners: dict[int, int] = {}
        drawn: list[list[Any]] = []
        widths: list[float] = []
        inside: dict[int, list[int]] = {}
        for item in items:
            place = len(drawn)
            if isinstance(item, int):
                owners[item] = place
                drawn.append(["v", item])
                widths.append(_width(self.vertices[item]))
                if owner >= 0:
                    self.vertices[item]["u"] = owner
            else:
                owners.update(dict.fromkeys(item.nodes(), place))
                inside[place] = []
                drawn.append(["g", -1])
                widths.append(0.0)
        ports: dict[tuple[str, str], int] = {}
        made: dict[tuple[int, int], list[int]] = {}
        for e in edges:
            a, b = self.keys[e]
            ends = [(owners[a], owners[b])] if a in owners and b in owners else []
            for name in () if ends else self.pairs[self.keys[e]]:
                port = ("in", name) if b in owners else ("out", name)
                if port not in ports:
                    ports[port] = len(drawn)
                    drawn.append(["p", name, port[0]])
                    widths.append(_width({"t": name, "n": "", "w": 0}))
                ends.append((ports[port], owners[b]) if b in owners else (owners[a], ports[port]))
            for end in ends:
                if end[0] != end[1]:
                    made.setdefault(end, []).append(e)
                for place in {*end} & inside.keys():
                    inside[place].append(e)
        for place, item in enumerate(items):
            if not isinstance(item, int):
                drawn[place][1] = self._group(item, list(dict.fromkeys(inside[place])), owner)
                widths[place] = _width(self.groups[drawn[place][1]])
        sinks = frozenset(i for i, d in enumerate(drawn) if d[-1] == "out" or (d[0] == "v" and self.vertices[d[1]]["k"] == "out"))
        found = layered(widths, list(made), sinks)
        self.scenes[number] = {
            "items": [[*d[:2], x, row, w, *d[2:]] for d, x, row, w in zip(drawn, found.x, found.layer, widths, strict=True)],
            "edges": [[a, b, found.routes.get((a, b)), flat] for (a, b), flat in made.items()],
            "width": found.width,
            "layers": found.layers,
        }
        return number

    def _group(self, item: Repeat | _Block, edges: Sequence[int], owner: int) -> int:
        number, nodes = len(self.groups), item.nodes()
        if isinstance(item, Repeat) and len(item.blocks) == 1:
            item = _Block(0, item.blocks[0])
        if isinstance(item, Repeat):
            count = len(item.blocks)
            contents: Sequence[_Item] = [_alone(i, block) for i, block in enumerate(item.blocks)]
            title, under = (
                self._title(item.blocks),
                f"{count} blocks of {len(nodes) // count} nodes" if len(nodes) > count else "",
            )
            title = f"{title} ×{count}"
        else:
            count, contents, title, under = 1, item.items, self._scope(nodes) or f"block {item.index}", f"{len(nodes)} nodes"
        self.groups.append({"t": title, "n": under, "count": count, "up": owner, **self._totals(nodes)})
        self.groups[number]["scene"] = self._scene(contents, edges, number)
        return number

    def _scope(self, nodes: Sequence[int]) -> str:
        """The part with which the names of these nodes begin; "" if there is none."""
        return "/".join(common([scope(self.vertices[n]["n"])[:-1] for n in nodes]))

    def _title(self, blocks: Sequence[Items]) -> str:
        """The scopes of the blocks as a range, such as "layer/0-11", or their operators."""
        scopes = [self._scope(members(b)).split("/") for b in blocks]
        first, last = scopes[0], scopes[-1]
        places = [i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b]
        if len({len(s) for s in scopes}) == 1 and len(places) == 1 and len({*map(tuple, scopes)}) == len(scopes):
            first[places[0]] += f"-{last[places[0]]}"
            return "/".join(first)
        titles = [str(self.vertices[n]["t"]).partition("-")[0] for n in members(blocks[0])]
        return ", ".join(titles[:3]) + (", ..." if len(titles) > 3 else "")

    def _totals(self, nodes: Sequence[int]) -> dict[str, Any]:
        """The number of nodes, the sum of times, the worst error and the kinds of changes of a group."""
        inside = [self.vertices[n] for n in nodes]
        found: dict[str, Any] = {"nodes": len(nodes)}
        times = [v["m"] for v in inside if "m" in v]
        if times:
            seconds, share = (sum(t[k] for t in times) for k in ("seconds", "share"))
            found["m"] = {"seconds": seconds, "share": share, "b": min(1.0, round(share / self.longest, 4)),
                          "r": [["time", f"{seconds * 1e3:.4g} ms, {share:.1%}"]]}  # fmt: skip
        errors = [v["e"] for v in inside if "e" in v]
        if errors:
            found["e"] = max(
                errors, key=lambda e: (e["first"], not e["ok"], float("inf") if e["excess"] is None else e["excess"])
            )
        changes = [v["d"]["how"] for v in inside if "d" in v]
        if changes:
            same = len(set(changes)) == 1 and len(changes) == len(nodes)
            rows = [["nodes " + how, str(changes.count(how))] for how in dict.fromkeys(changes)]
            found["d"] = {"how": changes[0] if same else "changed", "r": rows}
        return found


def _colour(call: Call) -> str:
    if call.status == "function":
        return "flow"
    declared = declarations.get((plain_domain(call.domain), call.operator), {}).get(call.version or 0)
    family = declared.body.__module__.rpartition(".")[2] if declared else ""
    return next((colour for colour, families in _FAMILIES.items() if family in families), "plain")


def _width(vertex: dict[str, Any]) -> float:
    title, under = 7.6 * len(vertex["t"]) + 24, 5.8 * max(int(vertex.get("w", 0)), min(20, len(vertex["n"]))) + 22
    signs = (20 if "g" in vertex or "count" in vertex else 0) + (16 if "d" in vertex else 0)
    return round(min(210.0, max(84.0, title, under) + signs), 1)
