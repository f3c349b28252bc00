"""`sonnx opsets`: write every operator at every opset; the values must be equal, or the error must name the minimum opset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._common import (
    NO,
    OUTPUT_FOLDER,
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
from ._tables import NUMBER, WHOLE, Columns

if TYPE_CHECKING:
    from singa_backend.conform import opset_matrix as matrix

_OUTCOMES = Columns({"outcome": WHOLE, "models and opsets": NUMBER})


@click.command("opsets")
@click.argument("select", default="", callback=expression)
@click.option(
    "--oracle",
    default="onnxruntime",
    show_default=True,
    type=click.Choice(["onnxruntime", "none"]),
    help="The engine that also runs the written models.",
)
@processes_option("--jobs", "-j", help="Child processes (default: one per core).")
@click.option(
    "--to",
    "folder",
    type=OUTPUT_FOLDER,
    help="Write opsets.json and opsets.md into this folder; all operators must be selected.",
)
@click.option("--check", is_flag=True, help="Judge nothing; exit with 1 if the matrix in --to (default: reports) is stale.")
@json_option
@exit_codes
def command(select: str, oracle: str, jobs: int | None, folder: Path | None, check: bool, as_json: bool) -> None:
    """Write the models of operators that match SELECT ('^Softmax$', '^Reduce') at every opset, check, run and compare them.

    The exit code is 1 if a written model is refused by onnx's checker, does not run or returns other values, if an error names
    a wrong minimum opset, or if the models contradict `supported_ops`.
    """
    from singa_backend.conform import opset_matrix as matrix
    from singa_backend.conform.opset_matrix import page

    if check:
        folder = folder or Path("reports")
        check_matrix("the opset matrix", "opsets", folder, matrix.stale(folder), as_json)
        return
    if select and folder:
        raise click.UsageError("--to writes the whole matrix: leave out SELECT")
    operators = matrix.listed(select)
    if not operators:
        raise click.UsageError(f"no operator matches {select!r}")
    check_places(pages=(folder, page.FILES))
    models = list(matrix.models(select))
    found: list[matrix.JudgedProblem] = []
    with progress(len(models), "opsets", unit="models", quiet=as_json) as step:
        wrong = 0
        for judged in matrix.run(models, witness(oracle, as_json), jobs):
            found.append(judged)
            wrong += any(o.status == "wrong" for o in judged.outcomes.values())
            step(note=f"{wrong} wrong")
    document = page.to_json(found, operators)
    against = matrix.contradictions(document)
    pages = matrix.write(document, folder) if folder else []
    if as_json:
        write_json(document | {"contradictions": against})
    else:
        _show(document, against)
        wrote(*pages)
    sys.exit(NO if document["wrong"] or against else 0)


def _show(document: dict[str, object], against: list[str]) -> None:
    totals = document["totals"]
    assert isinstance(totals, dict)
    table = _OUTCOMES.table("opsets")
    for status, count in totals["outcomes"].items():
        table.add(status, f"{count:,}")
    show(table)
    echo(f"confirmed by onnxruntime: {totals['witness'].get('agree', 0):,}, differs: {totals['witness'].get('differs', 0)}")
    for part, style in (("wrong", "red"), ("differs", "yellow")):
        found = document[part]
        assert isinstance(found, dict)
        for name, why in found.items():
            echo(f"{name}: {why}", style=style)
    for text in against:
        echo(text, style="red")
