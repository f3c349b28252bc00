"""`sonnx optimize`: rewrite a model by graph passes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from singa_backend.errors import SonnxError
from singa_backend.io.places import check

from ._common import NO, LateChoice, echo, exit_codes, json_option, model_output, show, write_json
from ._progress import progress
from ._tables import NUMBER, WHOLE, WORDS, Columns

if TYPE_CHECKING:
    from onnx import ModelProto

    from singa_backend.passes import Report

FEW = 6
"""The passes, and the notes, that are shown without -v."""

_PASSES = Columns({"pass": WHOLE, "changes": NUMBER, "nodes by operator": WORDS})


def _passes() -> list[str]:
    from singa_backend.passes import FUSIONS, PASSES

    return [*PASSES, *FUSIONS]


@click.command("optimize")
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path), required=False)
@model_output(required=False)
@click.option(
    "--pass",
    "names",
    multiple=True,
    metavar="NAME",
    type=LateChoice(_passes),
    help="Run only this pass (repeatable, in the given order).",
)
@click.option(
    "--fuse",
    is_flag=True,
    help="Also replace primitive forms by operators that the model's opset has, such as Gelu; results round differently.",
)
@click.option("--list", "listed", is_flag=True, help="List the passes, in the order in which they run.")
@click.option(
    "--rounds", default=20, show_default=True, type=click.IntRange(1), help="The maximum number of rounds over all passes."
)
@click.option("--verbose", "-v", is_flag=True, help="Show every pass and note.")
@json_option
@exit_codes
def command(
    model: Path | None,
    target: Path | None,
    names: tuple[str, ...],
    fuse: bool,
    listed: bool,
    rounds: int,
    verbose: bool,
    as_json: bool,
) -> None:
    """Rewrite MODEL by graph passes until none changes anything, and write it to OUT.

    Names and order of inputs and outputs are kept.  OUT may be MODEL; it is written only if onnx's checker accepts it, or if it
    refused MODEL too.  The exit code is 1 if a pass failed (its changes are undone; the others ran).
    """
    from singa_backend.passes import FUSIONS
    from singa_backend.passes import optimize as rewrite
    from singa_backend.proto.checker import check_model
    from singa_backend.proto.load import load_model
    from singa_backend.proto.save import save

    if listed:
        _list(fuse, as_json)
        return
    if model is None or target is None:
        raise click.UsageError("MODEL and -o OUT are required (or --list)")
    check(target)
    start = time.perf_counter()
    proto, folder = load_model(model)
    checked = check_model(proto)
    with progress(None, "optimizing", quiet=as_json) as step:
        trained = _parameters(proto, folder) if fuse or any(n in FUSIONS for n in names) else None
        report = rewrite(proto, names or None, fuse=fuse, parameters=trained, rounds=rounds, folder=folder, progress=step)
    if not checked.valid:
        first = (checked.message.splitlines() or [""])[0][:300]
        why = "did not answer for" if checked.valid is None else "refused"
        report.notes.append(f"the result was not checked, because onnx's checker {why} the original model: {first}")
    written = save(proto, target, folder=folder, check=bool(checked.valid))
    seconds = time.perf_counter() - start
    if as_json:
        facts = {"written": [str(p) for p in written], "seconds": round(seconds, 3)}
        write_json(report.to_dict() | facts)
    else:
        _show(report, verbose)
        echo(f"wrote {' and '.join(map(str, written))} in {seconds:.1f} s")
    if report.failures:
        raise SystemExit(NO)


def _parameters(proto: ModelProto, folder: Path | None) -> list[str] | None:
    """The float constants of a model that train by their roles; None, for all initializers, if it cannot be read."""
    from singa_backend.autodiff.roles import PARAMETER, roles
    from singa_backend.ir.reader import read
    from singa_backend.ir.variants import with_weights

    try:
        graph = with_weights(read(proto, folder))
    except SonnxError:
        return None
    return [name for name, role in roles(graph).items() if role.kind == PARAMETER]


def _list(fuse: bool, as_json: bool) -> None:
    from singa_backend.passes import FUSIONS, PASSES

    passes = [*PASSES.values(), *(FUSIONS.values() if fuse else ())]
    if as_json:
        write_json({"passes": [{"pass": p.name, "summary": p.summary} for p in passes]}, name="optimize.passes")
        return
    for p in passes:
        echo(f"{p.name:26} {p.summary}")


def _show(report: Report, verbose: bool) -> None:
    effective = sorted((p for p in report.passes if p.changes), key=lambda p: -p.changes)
    chosen = report.passes if verbose else effective[:FEW]
    table = _PASSES.table()
    for did in chosen:
        changed = ", ".join(f"{n} {b - a:+d} ({a} -> {b})" for n, (a, b) in did.operators.items())
        table.add(did.name, did.changes, changed)
    if chosen:
        show(table)
    if not verbose and len(effective) > FEW:
        echo(f"and {len(effective) - FEW} more passes changed something; -v shows all", style="dim")
    echo(
        f"{report.before.total()} -> {report.after.total()} nodes in {report.rounds} rounds"
        + ("" if report.settled else "; the last round still changed something")
    )
    for failure in report.failures:
        echo(str(failure), style="red")
    for note in report.notes if verbose else report.notes[:FEW]:
        echo(note, style="yellow")
    if not verbose and len(report.notes) > FEW:
        echo(f"and {len(report.notes) - FEW} more notes; -v shows all", style="dim")
