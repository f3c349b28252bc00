"""`sonnx report`: render the support report from the JSON of runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._common import NO, OUTPUT_FOLDER, echo, exit_codes, json_option, write_json, wrote


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--to",
    "folder",
    default="reports",
    show_default=True,
    type=OUTPUT_FOLDER,
    help="The folder of the report.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the report there is stale.")
@json_option
@exit_codes
def command(runs: tuple[Path, ...], folder: Path, check: bool, as_json: bool) -> None:
    """Render the support report from the JSON of RUNS (`sonnx conform --results`), one run per device or old release.

    Runs of old releases and of GPUs are kept in runs/ of the report's folder and stay in the report until they are run again,
    those of GPUs also without runs/; fuzz.json there, if it exists, supplies the cells judged with generated models.
    """
    from singa_backend.conform import report

    documents = [report.read_run(p) for p in runs]
    built = report.build(documents, folder)
    why, written = "", []
    if check:
        why = report.stale(built, folder)
    else:
        written = [*report.keep(documents, folder), *report.write(built, folder)]
    if as_json:
        write_json(
            {
                "folder": str(folder),
                "stale": why,
                "versions": built["versions"],
                "totals": built["totals"],
                "written": [str(p) for p in written],
            }
        )
    elif check:
        echo(f"stale: {why}" if why else "the report is up to date", style="red" if why else None)
    else:
        wrote(*written)
    if why:
        sys.exit(NO)
