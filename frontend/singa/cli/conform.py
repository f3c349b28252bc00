"""`sonnx conform`: run ONNX's own suite."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.choices import KINDS, OURS

from ._common import (
    NO,
    OUTPUT_FOLDER,
    OUTPUT_PATH,
    SECONDS,
    check_places,
    device_option,
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
from ._tables import NUMBER, WHOLE, Columns

if TYPE_CHECKING:
    from singa_backend.conform import gaps, worker

    from . import _releases

_LISTED = 30
"""The operators that are listed."""

_OPERATORS = Columns({"operator": WHOLE, "cases": NUMBER, "passed": NUMBER, "not supported": NUMBER})
_KINDS = Columns({"kind": WHOLE, "cases": NUMBER, "strict": NUMBER, "official": NUMBER})


@click.command("conform")
@click.option("--select", "-k", default="", callback=expression, help="Only cases whose name matches this regular expression.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only cases of this kind (repeatable).")
@processes_option("--processes", "-n", help="Child processes (default: one per core).")
@click.option("--timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds that one case may take.")
@click.option("--backend", default=OURS, show_default=True, help="The backend under test, MODULE:CLASS.")
@click.option("--results", "target", type=OUTPUT_PATH, help="Write everything to this JSON file.")
@click.option("--junit", type=OUTPUT_PATH, help="Write JUnit XML to this file.")
@click.option("--report", "folder", type=OUTPUT_FOLDER, help="Write the support report into this folder.")
@click.option("--renew-manifest", is_flag=True, help="Write the manifest of the installed onnx, or of --release, and stop.")
@click.option(
    "--release",
    "older",
    multiple=True,
    metavar="VERSION|all",
    help="Run the cases of an older onnx release, 1.2.1 to 1.22.0: its wheel is fetched from PyPI as data (repeatable; all: "
    "every release of the manifest). With more than one release, --results is their summary.",
)
@click.option("--cache", type=OUTPUT_FOLDER, help="Where fetched wheels are kept (default: the user's cache).")
@device_option
@json_option
@exit_codes
def command(
    select: str,
    kinds: tuple[str, ...],
    processes: int | None,
    timeout: float,
    backend: str,
    target: Path | None,
    junit: Path | None,
    folder: Path | None,
    renew_manifest: bool,
    older: tuple[str, ...],
    cache: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Run ONNX's own suite; every failure must be listed in gaps.txt with its reason."""
    from singa_backend.conform import cases, gaps, report, results, worker

    from . import _releases
    from ._verdicts import show_meaning

    if folder and (select or kinds or older):
        raise click.UsageError("--report needs the whole suite: leave out --select, --kind and --release")
    check_places(target, junit, folders=(cache,), pages=(folder, report.FILES))
    if older:
        request = _releases.Request(kinds, select, backend, device, processes, timeout, quiet=as_json)
        _older(older, cache, request, target, junit, renew_manifest)
        return
    _check_backend(backend, device)
    if not as_json:
        err.print("loading the cases of the installed onnx ...", style="dim")
    chosen = cases.load(kinds or KINDS, select)
    if renew_manifest:
        results.save(cases.manifest_of(chosen), cases.data_file("manifest.json"))
        click.echo(f"wrote {cases.data_file('manifest.json')}")
        return
    whole = not (select or kinds)
    manifest = cases.check_manifest(chosen) if whole else ""
    with progress(len(chosen), "conformance", unit="cases", quiet=as_json) as step:
        failed: list[str] = []

        def note(result: worker.Result) -> None:
            if result.strict != "passed":
                failed.append(result.name)
            step(note=f"{len(failed)} not passed")

        found = worker.run(chosen, backend, device, processes, timeout, note)
    ours = backend == OURS
    judged = gaps.judge(found, gaps.read(cases.data_file("gaps.txt"), device) if ours else {})
    document = results.to_json(found, judged, backend, device, manifest)
    if target:
        results.save(document, target)
    if junit:
        results.write_junit(found, judged, junit)
    pages = report.write(report.build([document], folder), folder) if folder else []
    if as_json:
        keys = ("totals", "gaps", "unexpected", "reasons", "closed_gaps", "environment", "manifest")
        write_json({k: document[k] for k in keys} | {"operators": results.failing_operators(document)})
    else:
        _show_conformance(found, judged, document["totals"])
        _show_operators(results.failing_operators(document))
        if found:
            show_meaning(judged, whole and not pages)
        wrote(target, junit, *pages)
        if pages:
            echo(f"open {pages[-1]}: does an operator work at an opset, and what does each figure mean?")
    sys.exit(0 if judged.good and found else NO)


def _check_backend(backend: str, device: str) -> None:
    from singa_backend import DeviceUnavailable
    from singa_backend.conform import worker

    supports = getattr(worker.resolve(backend), "supports_device", None)
    if supports is not None and not supports(device):
        hint = "sonnx run --device shows why" if backend == OURS else "its supports_device(device) returned False"
        raise DeviceUnavailable(f"{backend} does not support the device {device!r} on this machine", hint=hint)


def _older(
    names: tuple[str, ...],
    cache: Path | None,
    request: _releases.Request,
    target: Path | None,
    junit: Path | None,
    renew_manifest: bool,
) -> None:
    from singa_backend.conform import releases, results

    from . import _releases

    chosen = list(releases.manifest()) if "all" in names else list(dict.fromkeys(names))
    if junit and len(chosen) > 1:
        raise click.UsageError("--junit needs exactly one --release")
    _check_backend(request.backend, request.device)
    if renew_manifest:
        click.echo(f"wrote {_releases.renew(chosen, cache)}")
        return
    runs, seen = _releases.run(chosen, cache, request)
    several = len(runs) > 1
    document = _releases.document(runs, seen, request) if several else _releases.one(chosen[0], runs[chosen[0]], request)
    if target:
        (releases if several else results).save(document, target)
    if junit:
        results.write_junit(runs[chosen[0]].results, runs[chosen[0]].judged, junit)
    if request.quiet:
        write_json(
            {k: v for k, v in document.items() if k not in ("cases", "executed")}, name="conform.releases" if several else ""
        )
    else:
        _releases.show(runs, seen)
        wrote(target, junit)
    sys.exit(0 if seen and all(r.judged.good for r in runs.values()) else NO)


def _show_conformance(found: list[worker.Result], judged: gaps.Judgement, totals: dict[str, Any]) -> None:
    from singa_backend.conform import cases

    from ._verdicts import show_counts, show_failures

    table = _KINDS.table("ONNX conformance")
    for kind, t in totals["by_kind"].items():
        table.add(kind, t["cases"], t["strict"], t["official"])
    table.add("all", totals["cases"], totals["strict"], totals["official"], style="bold")
    show(table)
    show_counts(found, judged, cases.data_file("gaps.txt"))
    show_failures(judged)


def _show_operators(rows: list[dict[str, Any]]) -> None:
    """Print the operator versions of which a case does not pass."""
    if not rows:
        return
    table = _OPERATORS.table("operators with cases that do not pass")
    for row in rows[:_LISTED]:
        table.add(row["operator"], row["cases"], row["passed"], row["unsupported"])
    show(table)
    if len(rows) > _LISTED:
        echo(f"... and {len(rows) - _LISTED} others; --results FILE lists all of them, --report FOLDER writes their pages")
