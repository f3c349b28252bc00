"""`sonnx gradients`: compare every gradient rule with differences, with its graph form, and with onnxruntime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import _operators
from ._common import (
    NO,
    OUTPUT_FOLDER,
    SECONDS,
    check_matrix,
    check_places,
    echo,
    exit_codes,
    expression,
    json_option,
    processes_option,
    show,
    witness,
    write_json,
    wrote,
)
from ._progress import progress
from ._tables import NUMBER, WHOLE, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.conform import gradient_matrix

_ROWS = Columns({"operator": WHOLE, "verdict": WHOLE, "by": WORDS, "points": NUMBER, "kinks": NUMBER, "worst": NUMBER,
                 "graph": WHOLE, "onnxruntime": WORDS})  # fmt: skip
_VERDICTS = Columns({"verdict": WHOLE, "operator versions": NUMBER})


@click.command("gradients")
@click.argument("select", default="", callback=expression)
@click.option("--points", default=20, show_default=True, type=click.IntRange(1), help="Points per operator version.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="The points of a seed are always the same.")
@click.option(
    "--oracle",
    default="onnxruntime",
    show_default=True,
    type=click.Choice(["onnxruntime", "none"]),
    help="The engine that runs the same graph in float32.",
)
@processes_option("--jobs", "-j", help="Child processes (default: one per core).")
@click.option("--timeout", default=120.0, show_default=True, type=SECONDS, help="Seconds that one operator version may take.")
@click.option(
    "--to",
    "folder",
    type=OUTPUT_FOLDER,
    help="Write gradients.json and gradients.md into this folder (of com.microsoft, microsoft.json and microsoft.md); rows that"
    " are not selected are kept.",
)
@click.option("--second", is_flag=True, help="Judge the gradients of the gradients; onnxruntime does not run.")
@click.option("--check", is_flag=True, help="Judge nothing; exit with 1 if the matrix in --to (default: reports) is stale.")
@json_option
@exit_codes
def command(
    select: str,
    points: int,
    seed: int,
    oracle: str,
    jobs: int | None,
    timeout: float,
    folder: Path | None,
    second: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Compare the gradients of operator versions that match SELECT ('Softmax-13', '^Reduce') with differences in float64.

    The exit code is 1 if one is wrong, or if one is missing, drawn too rarely or contradicted by onnxruntime without a reason
    in gradients.toml.  SELECT names the domain of an operator that ONNX lacks ('ai.singa:Philox', 'com.microsoft:Gelu').
    With --operators, those of the modules are compared.
    """
    from singa_backend.conform import gradient_matrix, microsoft
    from singa_backend.conform.gradient_matrix import page
    from singa_backend.proto.schemas import MICROSOFT

    onnxruntimes = MICROSOFT in select
    if check:
        folder = folder or Path("reports")
        what, name = (
            ("the report of onnxruntime's operators", f"gradients {MICROSOFT}")
            if onnxruntimes
            else ("the gradient matrix", "gradients")
        )
        check_matrix(what, name, folder, microsoft.stale(folder) if onnxruntimes else gradient_matrix.stale(folder), as_json)
        return
    if second and folder:
        raise click.UsageError("--second writes no matrix: leave out --to")
    check_places(pages=(folder, microsoft.FILES if onnxruntimes else page.FILES))
    entries = gradient_matrix.read()
    custom = [(one.domain, one.name, one.version) for one in _operators.loaded()]
    rows = gradient_matrix.listed(select, custom)
    if not rows:
        raise click.UsageError(f"no operator version{' of --operators' if custom else ''} matches {select!r}")
    if folder and not onnxruntimes and any(r.domain not in gradient_matrix.DOMAINS for r in rows):
        raise click.UsageError("--to keeps rows of ONNX's operators and com.microsoft only: leave it out for other domains")
    engine = None if second else witness(oracle, as_json)
    found: list[gradient_matrix.MatrixRow] = []
    with progress(len(rows), "gradients", unit="versions", quiet=as_json) as step:
        bad = 0
        for row in gradient_matrix.run(rows, points, seed, engine, jobs, timeout, second):
            found.append(row)
            bad += row.verdict in ("wrong", "died", "timeout")
            step(note=f"{bad} wrong")
    document = page.to_json(found, points, seed, entries)
    pages: list[Path] = []
    if folder and onnxruntimes:
        whole = {r.key: r for r in (*microsoft.kept_rows(folder), *found)}
        pages = microsoft.write(folder, gradients=microsoft.differentiated(whole.values(), points, seed))
    elif folder:
        kept = {r.key: r for r in map(gradient_matrix.MatrixRow.from_dict, page.read(folder).get("rows", ()))} if select else {}
        whole = {**kept, **{r.key: r for r in found}}
        pages = page.write(page.to_json(whole.values(), points, seed, entries), folder)
    if as_json:
        write_json(document)
    else:
        _show(document, bool(select or custom))
        wrote(*pages)
    sys.exit(NO if (bad if second else document["unexplained"]) else 0)


def _show(document: dict[str, Any], each: bool) -> None:
    t = document["totals"]
    if each:
        table = _ROWS.table()
        for r in document["rows"]:
            witness = ", ".join(f"{w} {n}" for w, n in r["witness"].items())
            graph = {True: "agrees", False: "differs", None: ""}[r["graph"]]
            table.add(
                f"{r['operator']}-{r['version']}",
                r["verdict"],
                r["how"],
                r["agreed"],
                r["kinks"],
                r["worst"],
                graph,
                witness,
            )
    else:
        table = _VERDICTS.table("gradients")
        for verdict, count in t["verdicts"].items():
            table.add(verdict, count)
    show(table)
    echo(
        f"{t['points_agreed']:,} points agree, {t['points_at_kinks']:,} at kinks; checked without the second witness:"
        f" {t['checked_without_witness']}; missing: {', '.join(t['operators_missing']) or 'none'}"
    )
    for r in document["rows"]:
        if r["operator"] and r["says"]:
            echo(f"{r['operator']}-{r['version']}: {r['verdict']}", style="red" if r["verdict"] == "wrong" else "yellow")
            for text in r["says"]:
                echo(f"    {text}")
    for name in document["unused"] if not each else ():
        echo(f"unused entry of gradients.toml: {name}", style="yellow")
