"""`sonnx sweep`: run one task on every model of a folder, in child processes, and continue where a sweep was interrupted."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.choices import TASKS

from ._common import (
    MEMORY,
    NO,
    OUTPUT,
    OUTPUT_FOLDER,
    SECONDS,
    SEED,
    check_places,
    collected,
    echo,
    err,
    exit_codes,
    expression,
    json_option,
    processes_option,
    show,
    write_json,
    wrote,
)
from ._progress import progress
from ._tables import NAME, NUMBER, WHOLE, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.sweep import Sweep, SweepReport, SweepRow, SweepSettings

_FILES = Columns({"file": NAME, "status": WHOLE, "s": NUMBER, "": WORDS})

_SHOWN = 30
"""The most files of which those that passed have a row without --all."""

_STYLES = {"passed": "green", "partial": "yellow", "skipped": "yellow"}

_OPTIONS = (
    click.option("--task", type=click.Choice(list(TASKS)), required=True,
                 help="check: valid and supported; run: on drawn inputs; compare: every value with another engine on drawn "
                 "inputs; conform: the outputs of the test_data_set_* folders next to the models."),
    click.option("--select", "-k", default="", callback=expression, help="Only files whose name matches this expression."),
    click.option("--results", type=OUTPUT_FOLDER, help="Store each result here when it is finished; a later sweep runs only "
                 "files without a result for their content and these versions."),
    click.option("--again", is_flag=True, help="Run files again whose results are stored."),
    click.option("--against", type=click.Choice(["onnxruntime", "reference"]), default="onnxruntime", show_default=True,
                 help="compare: the other engine, in a child process."),
    click.option("--random", "seed", type=SEED, default=0, show_default=True, metavar="SEED",
                 help="run, compare: the seed of the inputs."),
    click.option("--timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds that one file may take."),
    click.option("--memory", type=MEMORY, metavar="MIB", help="The maximum address space of a child process (default: no "
                 "limit)."),
    processes_option("--processes", "-n", help="Child processes (default: one per core)."),
    click.option("--junit", type=OUTPUT, help="Write JUnit XML to this file."),
    click.option("--allow-skipped", is_flag=True, help="Exit with 0 also if files were not, or not completely, judged."),
    click.option("--all", "every", is_flag=True, help="Show also the files that passed, however many."),
)  # fmt: skip


@dataclass(frozen=True)
class SweepOptions:
    """The options, by the names of their parameters."""

    task: str
    select: str
    results: Path | None
    again: bool
    against: str
    seed: int
    timeout: float
    memory: int | None
    processes: int | None
    junit: Path | None
    allow_skipped: bool
    every: bool


@click.command("sweep")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@lambda command: collected("options", SweepOptions, _OPTIONS)(command)
@json_option
@exit_codes
def command(folder: Path, options: SweepOptions, as_json: bool) -> None:
    """Run one task on every model of FOLDER and of the folders in it, each in a child process with limits.

    A file that kills its process twice, is too slow or needs too much memory is a row of the table, and the sweep goes on.
    Ctrl-C keeps what is finished. The exit code is 1 unless all files passed.
    """
    from singa_backend.sweep import Sweep, find_files

    settings = _settings(options)
    check_places(options.junit, folders=(options.results,))
    files = find_files(folder, options.task, options.select)
    sweep = Sweep(files, settings, options.results, again=options.again)
    try:
        with progress(len(files), f"sweep {options.task}", unit="files", quiet=as_json) as step:
            found = sweep.run(options.processes, step)
    except KeyboardInterrupt:
        _tell(sweep, sweep.report, options, as_json)
        if not as_json and options.results:
            err.print("the same command continues", highlight=False, soft_wrap=True)
        raise
    if options.junit:
        found.write_junit(options.junit)
    _tell(sweep, found, options, as_json)
    if not as_json:
        wrote(options.junit)
    if not found.good(skipped=options.allow_skipped):
        sys.exit(NO)


def _settings(options: SweepOptions) -> SweepSettings:
    from singa_backend.sweep import SweepSettings

    context = click.get_current_context()
    source = click.core.ParameterSource
    for name, tasks in (("against", ("compare",)), ("seed", ("run", "compare"))):
        if context.get_parameter_source(name) is not source.DEFAULT and options.task not in tasks:
            option = next(p.opts[0] for p in context.command.params if p.name == name)
            raise click.UsageError(f"{option} is for --task {' and '.join(tasks)}, got {options.task}")
    if options.again and options.results is None:
        raise click.UsageError("--again needs --results FOLDER: without it, all files run")
    memory = None if options.memory is None else options.memory << 20
    return SweepSettings(options.task, options.against, options.seed, options.timeout, memory)


def _tell(sweep: Sweep, found: SweepReport, options: SweepOptions, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        write_json(found.to_dict())
        return
    every = options.every or len(found.rows) <= _SHOWN
    rows = [r for r in found.rows if every or r.status != "passed"]
    if rows:
        table = _FILES.table()
        for row in rows:
            table.add(row.file, row.status, row.seconds, _words(row), style=_STYLES.get(row.status, "red"))
        show(table)
    counts = ", ".join(f"{n} {status}" for status, n in reversed(found.counts.items())) or "no result"
    kept = f"; {sweep.kept} were finished before" if sweep.kept else ""
    missing = f"; {len(found.missing)} have no result yet" if found.missing else ""
    good = found.good(skipped=options.allow_skipped)
    echo(f"{len(sweep.files)} files: {counts}{kept}{missing}", style="green" if good else "red")


def _words(row: SweepRow) -> str:
    """What a row shows of a result."""
    if row.status != "passed":
        return row.reason
    facts: dict[str, Any] = row.facts
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if value is not None)
