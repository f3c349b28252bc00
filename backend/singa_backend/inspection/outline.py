"""The parts of the graph page that are text: the outline of its graphs, and the nodes with the largest figures.

They need no script: every node occurs once, in closed groups if it is in a repeated block or a subgraph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..rendering import html

TOP = 10
"""The number of nodes in the lists of the slowest nodes and of the largest errors."""

SIGNS = {"added": "+", "removed": "−", "changed": "≠"}

_Graphs = Sequence[Mapping[str, Any]]


def outline(graphs: _Graphs) -> str:
    """The nested lists of all nodes: the main graph, then the bodies of functions."""
    found: list[str] = []
    for i, graph in enumerate(graphs):
        if not graph["depth"]:
            count = sum("x" in v for v in graph["vertices"])
            found.append(f'<h3 id="g{i}">{html(graph["title"])} <span class="soft">{_count(count)}</span></h3>')
            found += _graph(graphs, i)
    return "".join(found)


def _count(nodes: int) -> str:
    return f"{nodes:,} node{'s' * (nodes != 1)}"


def _graph(graphs: _Graphs, i: int) -> Iterator[str]:
    yield "<ul>"
    yield from _scene(graphs, i, 0)
    yield "</ul>"


def _scene(graphs: _Graphs, i: int, number: int) -> Iterator[str]:
    graph = graphs[i]
    for kind, at, *_ in graph["scenes"][number]["items"]:
        if kind == "v":
            yield from _vertex(graphs, i, at)
        elif kind == "g":
            group = graph["groups"][at]
            under = f' <span class="soft">{html(group["n"])}</span>' if group["n"] else ""
            title = f"{_sign(group)}{html(group['t'])}{under}{_inline_figures(group)}"
            yield f'<li><details data-key="{i}-g{at}"><summary>{title}</summary><ul>'
            yield from _scene(graphs, i, group["scene"])
            yield "</ul></details></li>"


def _vertex(graphs: _Graphs, i: int, at: int) -> Iterator[str]:
    vertex = graphs[i]["vertices"][at]
    yield f'<li id="n{i}-{at}">{_link(i, at, vertex)}{_inline_figures(vertex)}'
    inner = [j for j in vertex.get("g", ()) if graphs[j]["depth"]]
    if inner:
        what = f"{len(inner)} subgraph{'s' * (len(inner) != 1)} of {vertex['n']}"
        yield f'<details data-key="{i}-v{at}"><summary>{html(what)}</summary><ul>'
        for j in inner:
            count = sum("x" in v for v in graphs[j]["vertices"])
            yield f'<li>{html(graphs[j]["title"])} <span class="soft">{_count(count)}</span>'
            yield from _graph(graphs, j)
            yield "</li>"
        yield "</ul></details>"
    yield "</li>"


def _link(i: int, at: int, vertex: Mapping[str, Any]) -> str:
    return (
        f'<button type="button" class="link" data-at="{i}-{at}">{_sign(vertex)}{html(vertex["t"])}'
        f' <span class="soft">{html(vertex["n"])}</span></button>'
    )


def _sign(item: Mapping[str, Any]) -> str:
    if "d" not in item:
        return ""
    how = item["d"]["how"]
    return f'<span class="sign {how}" role="img" aria-label="{how}">{SIGNS[how]}</span> '


def _inline_figures(item: Mapping[str, Any]) -> str:
    """The share of time and the error of a node or a group, after its title."""
    shown = ""
    if "m" in item and item["m"]["seconds"]:
        shown += f' <span class="figure">{item["m"]["share"]:.1%}</span>'
    if "e" in item:
        shown += f' <span class="figure{"" if item["e"]["ok"] else " wrong"}">{_error(item["e"])}</span>'
    return shown


def _error(error: Mapping[str, Any]) -> str:
    return f"{'first wrong: ' if error['first'] else ''}{'' if error['ok'] else '✗ '}{error['words']} tolerance"


def figures(graphs: _Graphs, details: Mapping[str, Any]) -> str:
    """The tables of the slowest nodes, the largest errors, and the changes, as far as the page has them."""
    every = [(i, at, v) for i, graph in enumerate(graphs) for at, v in enumerate(graph["vertices"])]
    found = ""
    if "time" in details:
        timed = sorted((e for e in every if e[2].get("m", {}).get("seconds")), key=lambda e: -e[2]["m"]["seconds"])
        rows = ([_link(*e), f"{e[2]['m']['seconds'] * 1e3:.4g}", f"{e[2]['m']['share']:.1%}"] for e in timed[:TOP])
        found += _table("slowest", "Slowest nodes", ("node", "ms", "share"), rows)
    if "error" in details:
        wrong = sorted(
            (e for e in every if "e" in e[2]),
            key=lambda e: (
                not e[2]["e"]["first"],
                e[2]["e"]["ok"],
                -(math.inf if e[2]["e"]["excess"] is None else e[2]["e"]["excess"]),
            ),
        )
        rows = (
            [
                _link(*e),
                "–" if e[2]["e"]["abs"] is None else f"{e[2]['e']['abs']:.6g}",
                html(_error(e[2]["e"]).removesuffix(" tolerance")),
            ]
            for e in wrong[:TOP]
        )
        found += _table("largest", "Largest errors", ("node", "max abs", "of tolerance"), rows)
    if "changes" in details:
        main = graphs[0]["vertices"]
        places = {v.get("x", v["t"]): at for at, v in enumerate(main)}
        rows = (
            [
                f'<span class="sign {c["how"]}" aria-hidden="true">{SIGNS[c["how"]]}</span> {c["how"]}',
                _change(c, places.get(c["name"] if c["kind"] in ("input", "output") else c["at"])),
            ]
            for c in details["changes"]
        )
        found += _table("changes", f"Changes: {len(details['changes']):,}", ("how", "what"), rows)
    return found


def _change(change: Mapping[str, Any], place: int | None) -> str:
    what = html(change["what"], 1000)
    if change["max_abs"] is not None:
        what = f"max abs {change['max_abs']:.6g}; {change['differing']:,} of {change['elements']:,} elements differ"
    name = f"{change['operator'] or change['kind']} {change['name']}"
    part = html(name) if place is None else f'<button type="button" class="link" data-at="0-{place}">{html(name)}</button>'
    return part + (f"<br>{what}" if what else "")


def _table(name: str, title: str, head: Sequence[str], rows: Iterator[list[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    heads = "".join(f'<th scope="col">{html(h)}</th>' for h in head)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>" if body else '<p class="soft">None.</p>'
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{html(title)}</h2>{table}</section>'
