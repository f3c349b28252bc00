"""`sonnx fuzz`: compare generated models of one operator, or of many, with onnxruntime and other witnesses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.errors import first_line

from ._common import (
    NO,
    OUTPUT_FOLDER,
    OUTPUT_PATH,
    check_places,
    echo,
    exit_codes,
    expression,
    json_option,
    processes_option,
    show,
    write_json,
    wrote,
)
from ._progress import progress
from ._tables import NUMBER, WHOLE, Columns

if TYPE_CHECKING:
    from singa_backend.conform.fuzz import ledger, run

_VERDICTS = Columns({"verdict": WHOLE, "cases": NUMBER})


@click.command("fuzz")
@click.option("--count", default=1000, show_default=True, type=click.IntRange(1), help="The number of cases.")
@click.option("--graphs", type=click.IntRange(1), help="The number of graphs of 5 to 30 nodes, instead of single operators.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Case i of a seed is always the same.")
@click.option(
    "--select",
    "-k",
    default="",
    callback=expression,
    help="Only operator versions that match this expression: '^Conv', 'Softmax-13'.",
)
@click.option("--only", type=click.IntRange(0), help="Only the case or the graph of this index, in detail.")
@click.option(
    "--write",
    "folder",
    type=OUTPUT_FOLDER,
    help="With --only: write the case as model.onnx and test_data_set_0, with a witness's outputs; a failing graph is reduced.",
)
@processes_option("--processes", "-n", help="Pairs of child processes (default: one per core).")
@click.option(
    "--ledger",
    "book",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The ledger of known differences of operators (default: sonnx's own).",
)
@click.option("--results", "target", type=OUTPUT_PATH, help="Write everything to this JSON file.")
@click.option(
    "--report",
    "reports",
    type=OUTPUT_FOLDER,
    help="Write fuzz.json and fuzz.md into this folder; with --graphs, graphs.json and graphs.md; with --select com.microsoft,"
    " microsoft.json and microsoft.md.",
)
@json_option
@exit_codes
def command(
    count: int,
    graphs: int | None,
    seed: int,
    select: str,
    only: int | None,
    folder: Path | None,
    processes: int | None,
    book: Path | None,
    target: Path | None,
    reports: Path | None,
    as_json: bool,
) -> None:
    """Draw valid models of one node and compare the results with independent witnesses.

    With --graphs, draw models of many nodes, and compare each as it is, optimized, converted, exported, as a SONNXModel and as a
    program, and with onnxruntime.

    Every difference must be in ledger.toml, or of graphs in graphs.toml, with its class and reason. Otherwise, and if a process
    of ours dies, hangs or raises a foreign exception, the exit code is 1.
    """
    from singa_backend.conform import microsoft, results
    from singa_backend.conform.cases import data_file
    from singa_backend.conform.fuzz import ledger, run, summary
    from singa_backend.proto.schemas import MICROSOFT

    entries = ledger.read(book or data_file("ledger.toml"))
    if folder and only is None:
        raise click.UsageError("--write needs --only")
    if graphs and select:
        raise click.UsageError("use only one of --graphs and --select")
    whole = select == MICROSOFT
    if reports and MICROSOFT in select and not whole:
        raise click.UsageError(f"the report of onnxruntime's operators has all of them: use --select {MICROSOFT}")
    check_places(target, folders=(folder,), pages=(reports, microsoft.FILES if whole else summary.FILES))
    if graphs:
        from singa_backend.conform.fuzz.graphs import summary as graphs_summary

        from ._graphs import detail, many

        check_places(pages=(reports, graphs_summary.FILES))
        if only is not None:
            sys.exit(0 if detail(only, seed, entries, folder, as_json) else NO)
        sys.exit(0 if many(graphs, seed, entries, processes, target, reports, as_json) else NO)
    if only is not None:
        sys.exit(0 if _one(only, seed, select, entries, folder, as_json) else NO)
    with progress(count, "generated models", unit="cases", quiet=as_json) as step:
        bad = 0

        def note(judged: run.JudgedCase) -> None:
            nonlocal bad
            bad += not judged.good
            step(note=f"{bad} unexplained or worse")

        found = run.run(range(count), seed, entries, select=select, processes=processes, progress=note)
    document = summary.to_json(found, seed, select)
    if target:
        results.save(document, target)
    pages: list[Path] = []
    if reports:
        pages = (
            microsoft.write(reports, drawn=microsoft.drawn(found, seed, select)) if whole else summary.write(document, reports)
        )
    if as_json:
        write_json({k: document[k] for k in ("count", "seed", "select", "totals", "ledger", "bad", "environment")})
    else:
        _show(document)
        wrote(target, *pages)
    sys.exit(0 if all(r.good for r in found) else NO)


def _show(document: dict[str, Any]) -> None:
    from singa_backend.conform.fuzz import summary

    t = document["totals"]
    table = _VERDICTS.table("generated models")
    for state in summary.STATES:
        table.add(state, f"{t[state]:,}")
    show(table)
    echo(
        f"{len(document['cells']):,} dtype cells judged; differences by class: "
        + (", ".join(f"{c} {n}" for c, n in t["by_class"].items()) or "none")
        + f"; deaths of witnesses: {t['deaths_of_witnesses']}"
    )
    if document["environment"]["onnxruntime"] == "absent":
        echo("onnxruntime is not installed, so only the other witnesses judged: pip install 'sonnx[oracle]'", style="yellow")
    for b in document["bad"][:30]:
        echo(f"{b['status']}: case {b['index']}: {b['case']}", style="red")
        for d in b["differences"]:
            echo(f"    {d['witness']}: {first_line(d['says'])[:300]}")
        if b["says"]:
            echo("    " + first_line(b["says"])[:300])
    if document["bad"]:
        echo(f"one case in detail: sonnx fuzz --seed {document['seed']} --only INDEX" + _selected(document["select"]))


def _selected(select: str) -> str:
    return f" --select '{select}'" if select else ""


def _one(index: int, seed: int, select: str, entries: list[ledger.KnownDifference], folder: Path | None, as_json: bool) -> bool:
    from singa_backend.conform.fuzz import generate, run

    judged, answer, seen = run.one(index, seed, entries, select)
    case = answer.case if answer else None
    differences = [
        {
            "witness": d.witness,
            "kind": d.kind,
            "says": d.says,
            "class": d.entry.blame if d.entry else None,
            "why": d.entry.why if d.entry else None,
        }
        for d in judged.differences
    ]
    if folder and case is not None and answer is not None:
        generate.write(case, next(iter(seen.values()), answer.ours or []), folder)
    if as_json:
        write_json(
            {
                "index": index,
                "seed": seed,
                "status": judged.status,
                "case": judged.describe,
                "says": judged.says,
                "witnesses": judged.witnesses,
                "differences": differences,
                "deaths": judged.deaths,
                "max_ulp": judged.ulps,
                "written": str(folder) if folder and case is not None else None,
            },
            name="fuzz.case",
        )
        return judged.good
    echo(f"{judged.status}: {judged.describe or 'no valid node of the drawn types'}")
    if judged.says:
        echo(judged.says)
    if case is not None:
        for name, value in case.inputs.items():
            echo(f"  {name}: {value!r}")
    if answer is not None and answer.ours is not None:
        echo(f"  ours: {answer.ours!r}")
    for witness, outputs in seen.items():
        echo(f"  {witness}: {outputs!r}")
    for d in differences:
        echo(f"  {d['witness']} differs: {d['says']}")
        echo(f"    {d['class']}: {d['why']}" if d["class"] else "    not in the ledger")
    if folder and case is not None:
        echo(f"wrote {folder / 'model.onnx'} and {folder / 'test_data_set_0'}")
    return judged.good
