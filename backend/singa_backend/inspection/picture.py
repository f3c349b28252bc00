"""A self-contained HTML page of a model's graphs: pan, zoom, search, click a node for details; works offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..ir.declaration import declarations
from ..plans.profile import Profile
from ..proto.schemas import plain_domain
from .graph_drawing import LAYER, layered
from .html import fill
from .table import Call, Table

TEMPLATE = Path(__file__).with_name("templates") / "graph.html"
_FAMILIES = {
    "heavy": {"conv", "linalg", "attention", "flex_attention", "linear_attention", "recurrent", "signal"},
    "norm": {"activation", "normalization", "pool", "loss", "reduction"},
    "move": {"shape", "gather", "pad_slice", "creation", "cast", "sequence", "resize", "quantize"},
    "flow": {"control"},
}
"""Color -> its operator families (modules)."""


def page(tables: Sequence[Table], details: dict[str, Any], profile: Profile | None = None) -> str:
    """Create the page of an inspected model from its graphs, the details of the whole model, and the times of a run."""
    index = {table.path: i for i, table in enumerate(tables)}
    times = _times(profile) if profile is not None else {}
    if profile is not None:
        details = details | {"time": {"seconds": profile.seconds, "by": profile.by}}
    return fill(
        TEMPLATE,
        {
            **details,
            "layer": LAYER,
            "graphs": [_graph(table, index, _captured(tables, table), times) for table in tables],
        },
    )


def _times(profile: Profile) -> dict[tuple[bool, str], dict[str, Any]]:
    """What the details of a node list, by whether it is in the main graph, and by the name of its first output."""
    longest = max((n.share for n in profile.nodes), default=0.0) or 1.0
    found = {}
    for n in profile.nodes:
        if n.steps:
            rows = [["time", f"{n.seconds * 1e3:.4g} ms, {n.share:.1%}"], *(["kernel", k] for k in n.kernels)]
            rows.append(["work", f"{n.flops / 1e9:.3g} GFLOP, {n.bytes / 1e6:.3g} MB" if n.flops else f"{n.bytes / 1e6:.3g} MB"])
            rows += [] if n.roofline is None else [["of roofline", f"{n.roofline:.0%}"]]
            rows += [["note", text] for text in n.notes]
        else:
            rows = [["computed with", n.part_of]] if n.part_of else [["time", "none: a constant, or a view"]]
        for value in n.values[:1]:
            found[n.main, value] = {"b": round(n.share / longest, 4), "r": rows}
    return found


def _captured(tables: Sequence[Table], table: Table) -> dict[int, set[str]]:
    """Node -> the values of this graph that its subgraphs capture."""
    made = {n for c in table.nodes for n in c.outputs} | {v.name for v in table.inputs}
    inner = {t.path: t for t in tables}
    out: dict[int, set[str]] = {}
    for call in table.nodes:
        pending = [inner[p] for p in call.graphs if not p.startswith("function:")]
        while pending:
            graph = pending.pop()
            names = {n for c in graph.nodes for n in c.inputs} | {v.name for v in graph.outputs}
            own = {n for c in graph.nodes for n in c.outputs} | {v.name for v in graph.inputs}
            out.setdefault(call.index, set()).update((names - own) & made)
            pending += [inner[p] for c in graph.nodes for p in c.graphs if not p.startswith("function:")]
    return out


def _graph(
    table: Table, index: dict[str, int], captured: dict[int, set[str]], times: dict[tuple[bool, str], dict[str, Any]]
) -> dict[str, Any]:
    """Vertices with positions, edges with routes, and the details of vertices.

    Constant nodes and initializers are not vertices: the details of the nodes that read them show them.
    """
    vertices: list[dict[str, Any]] = []
    makers: dict[str, int] = {}
    for value in table.inputs:
        makers[value.name] = len(vertices)
        vertices.append({"k": "in", "t": value.name, "n": "input", "o": [value.name], "w": len(table.shown(value.name))})
    for call in table.nodes:
        if call.outputs and call.outputs[0] in table.constants:
            continue
        at = len(vertices)
        makers.update((n, at) for n in call.outputs if n)
        vertices.append(_vertex(call, index))
        time = times.get((not table.path, next(filter(None, call.outputs), "")))
        if time is not None:
            vertices[-1]["m"] = time
    outputs = []
    for value in table.outputs:
        outputs.append(len(vertices))
        vertices.append({"k": "out", "t": value.name, "n": "output", "i": [value.name], "w": len(table.shown(value.name))})
    pairs: dict[tuple[int, int], list[str]] = {}
    for at, vertex in enumerate(vertices):
        uses = [*vertex.get("i", ()), *sorted(captured.get(vertex["x"], ()) if "x" in vertex else ())]
        for name in uses:
            if name in makers:
                pairs.setdefault((makers[name], at), []).append(name)
    found = layered([_width(v) for v in vertices], list(pairs), frozenset(outputs))
    for vertex, x, row in zip(vertices, found.x, found.layer, strict=True):
        vertex["p"] = [x, row, _width(vertex)]
    edges = [
        [a, b, found.routes.get((a, b)), names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"]
        for (a, b), names in pairs.items()
    ]
    states = {s.value.name: [table.shown(s.value.name), s.bytes] for s in table.states}
    used = {n for v in vertices for n in (*v.get("i", ()), *v.get("o", ()))}
    types = {n: t for n in used if (t := table.shown(n))}
    return {"title": table.title, "depth": table.depth, "vertices": vertices, "edges": edges, "states": states, "types": types,
            "constants": table.constants, "width": found.width, "layers": found.layers}  # fmt: skip


def _vertex(call: Call, index: dict[str, int]) -> dict[str, Any]:
    vertex = {"k": _colour(call), "t": call.title, "n": call.name, "s": call.status, "x": call.index,
              "i": call.inputs, "o": call.outputs, "a": call.attributes}  # fmt: skip
    if call.graphs:
        vertex["g"] = [index[p] for p in call.graphs if p in index]
    return vertex


def _colour(call: Call) -> str:
    if call.status == "function":
        return "flow"
    declared = declarations.get((plain_domain(call.domain), call.operator), {}).get(call.version or 0)
    family = declared.body.__module__.rpartition(".")[2] if declared else ""
    return next((colour for colour, families in _FAMILIES.items() if family in families), "plain")


def _width(vertex: dict[str, Any]) -> float:
    title, under = 7.6 * len(vertex["t"]) + 24, 5.8 * max(int(vertex.get("w", 0)), min(20, len(vertex["n"]))) + 22
    return round(min(210.0, max(84.0, title, under)), 1)
