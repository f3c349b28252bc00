"""`sonnx inspect`: show a model as tables or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.io.places import check

from ._common import OUTPUT, SECONDS, echo, err, exit_codes, json_option, model_argument, show, write_json
from ._tables import NAME, NUMBER, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.inspection import Inspection, State
    from singa_backend.inspection import Table as GraphTable
    from singa_backend.proto.values import Value

_MODEL = Columns({"model": NAME, "": WORDS})
_INPUTS = Columns({"inputs": NAME, "type": WORDS})
_OUTPUTS = Columns({"outputs": NAME, "type": WORDS})
_STATES = Columns({"state": NAME, "type": WORDS, "bytes": NUMBER})
_STATS = Columns({**_STATES.kinds, "min": NUMBER, "max": NUMBER, "NaN": NUMBER, "Inf": NUMBER})
_OPERATORS = Columns({"operator": NAME, "nodes": NUMBER})
_GRAPHS = Columns({"graph": NAME, "nodes": NUMBER, "inputs": NAME, "outputs": NAME})
_NODES = Columns({"#": NUMBER, "node": NAME, "operator": WORDS, "inputs": NAME, "outputs": NAME, "types": WORDS})

FEW = 20


@click.command("inspect")
@model_argument
@click.option("--nodes", is_flag=True, help="List every node, including those of subgraphs and functions.")
@click.option("--states", is_flag=True, help=f"List every state (initializer), not only the {FEW} largest.")
@click.option("--stats", is_flag=True, help="Read the states and show their min, max and number of NaN and Inf.")
@click.option(
    "--html",
    "page",
    type=OUTPUT,
    help="Write a picture of the graph to this file, as a self-contained page.",
)
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the times of this output of `sonnx profile --json` on the nodes of the picture.",
)
@click.option(
    "--compare",
    "comparison",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the differences of this output of `sonnx compare --json` on the nodes of the picture.",
)
@click.option("--timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds that onnx's shape inference may take.")
@json_option
@exit_codes
def command(
    model: Path,
    nodes: bool,
    states: bool,
    stats: bool,
    page: Path | None,
    profile: Path | None,
    comparison: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Show the inputs, outputs, states, operators and nodes of MODEL.  Nothing is executed."""
    from singa_backend.inspection import inspect as inspect_model
    from singa_backend.inspection.measures import CODE
    from singa_backend.io.documents import read_document
    from singa_backend.io.files import write_text

    if not page and (profile or comparison):
        raise click.UsageError("--profile and --compare are drawn on the picture: add --html FILE")
    if not as_json and err.is_terminal:
        err.print(f"reading {model.name} ...", style="dim")
    if page:
        check(page, parents=True, keeps=(model, profile, comparison))
    seen = inspect_model(model, stats=stats, timeout=timeout)
    if page:
        times, errors = (read_document(p, CODE).value if p else None for p in (profile, comparison))
        write_text(page, seen.html(times, errors))
    if as_json:
        write_json(seen.to_dict())
        return
    _show(seen, states)
    if nodes:
        for graph in seen.graphs:
            _show_nodes(graph)
    if page:
        echo(f"wrote {page}")


def _show(seen: Inspection, every_state: bool) -> None:
    main = seen.main
    opsets = ", ".join(f"{domain} {version}" for domain, version in seen.opsets.items())
    facts = {"IR": seen.ir_version, "opsets": opsets, "producer": seen.producer,
             "nodes": sum(len(g.nodes) for g in seen.graphs), "parameters": f"{seen.parameters:,}", "bytes": f"{seen.bytes:,}",
             "functions": ", ".join(seen.functions), **seen.metadata}  # fmt: skip
    _table(_MODEL, [["file", seen.file]] + [[k, str(v)] for k, v in facts.items() if v not in ("", None)])
    for columns, values in ((_INPUTS, main.inputs), (_OUTPUTS, main.outputs)):
        _table(columns, [[v.name, _type(main, v)] for v in values])
    states = [(g, s) for g in seen.graphs for s in g.states]
    if states:
        shown = states if every_state else sorted(states, key=lambda p: -p[1].bytes)[:FEW]
        stats = any(s.stats is not None for _, s in states)
        _table(_STATS if stats else _STATES, [_state(g, s, stats) for g, s in shown])
        if len(shown) < len(states):
            echo(f"{len(shown)} of {len(states)} states, the largest; --states shows all", style="dim")
    _table(_OPERATORS, [[name, count] for name, count in seen.operators().most_common()])
    if len(seen.graphs) > 1:
        _table(
            _GRAPHS,
            [
                [
                    "  " * g.depth + g.title,
                    len(g.nodes),
                    "\n".join(v.name for v in g.inputs),
                    "\n".join(v.name for v in g.outputs),
                ]
                for g in seen.graphs
            ],
        )
    if seen.opinion.inference:
        echo(f"types are incomplete; shape inference reports: {seen.opinion.inference.splitlines()[0][:300]}", style="yellow")


def _show_nodes(graph: GraphTable) -> None:
    _table(
        _NODES,
        [
            [
                call.index,
                "  " * graph.depth + call.name,
                call.title + ("" if call.status == "supported" else f" ({call.status})"),
                "\n".join(call.inputs),
                "\n".join(call.outputs),
                "\n".join(graph.shown(n) for n in call.outputs),
            ]
            for call in graph.nodes
        ],
        title=graph.title,
    )


def _state(graph: GraphTable, state: State, stats: bool) -> list[Any]:
    name = state.value.name if not graph.depth else f"{state.value.name} (in {graph.title})"
    row = [name, str(state.value).removeprefix(f"{state.value.name}: "), f"{state.bytes:,}"]
    if not stats:
        return row
    found = state.stats or {}
    if "error" in found:
        return [row[0], f"{row[1]}\n{found['error']}", row[2], None, None, None, None]
    return [*row, *(found.get(k) for k in ("min", "max", "nan", "inf"))]


def _type(graph: GraphTable, value: Value) -> str:
    return graph.shown(value.name) or "?"


def _table(columns: Columns, rows: list[list[Any]], title: str = "") -> None:
    table = columns.table(title)
    for row in rows:
        table.add(*row)
    show(table)
