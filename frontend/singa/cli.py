"""The command line: `sonnx run`, `sonnx conform`, `sonnx report`.

Exit codes: 0 done and as it should be; 1 a comparison, a conformance run or a report says no; 2 the command was written
wrongly; 3 a model or an input is not accepted (the error says why).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from singa_backend import DeviceUnavailable, SingaBackend, SonnxError
from singa_backend.backend import load_model
from singa_backend.conform import cases, gaps, report, results, verdict, worker

from . import _feeding

NO, REFUSED = 1, 3

out = Console()
err = Console(stderr=True)


def _typed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print a SonnxError as it wants to be read (as JSON with --json) and leave with REFUSED."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SonnxError as error:
            if kwargs.get("as_json"):
                click.echo(json.dumps(error.to_dict()))
            else:
                err.print(f"[red]{type(error).__name__}[/red]", end=" ")
                err.print(str(error), markup=False, highlight=False, soft_wrap=True)
            sys.exit(REFUSED)

    return run


_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_device_option = click.option("--device", default="CPU", show_default=True, help="CPU, CUDA, CUDA:1, or STRICT (for tests).")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sonnx")
def main() -> None:
    """Run ONNX models, hold the backend to ONNX's own suite, and write the support report.

    Exit codes: 0 as it should be, 1 a check says no, 2 wrong usage, 3 a model or input was refused.
    """


# --- run --------------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--input", "-i", "files", multiple=True, metavar="NAME=FILE", help="An input from a .npy, .npz or .pb file.")
@click.option("--inputs", "archive", type=click.Path(path_type=Path), help="All inputs by name from a .npz file.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Inputs, and outputs to compare with, from a test_data_set folder.",
)
@click.option("--random", "seed", type=int, metavar="SEED", help="Random inputs by the declared shapes.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=SIZE", help="A symbolic size, for --random (1 if not given).")
@click.option("--output", "-o", "target", type=click.Path(path_type=Path), help="Write the outputs by name to this .npz file.")
@click.option("--aux", multiple=True, metavar="NAME", help="Return this intermediate value too.")
@click.option("--rtol", default=1e-3, show_default=True, help="Relative tolerance for --data.")
@click.option("--atol", default=1e-7, show_default=True, help="Absolute tolerance for --data.")
@_device_option
@_json_option
@_typed
def run(model: Path, files: tuple[str, ...], archive: Path | None, data: Path | None, seed: int | None, sizes: tuple[str, ...],
        target: Path | None, aux: tuple[str, ...], rtol: float, atol: float, device: str, as_json: bool) -> None:  # fmt: skip
    """Run MODEL once and show, save or compare its outputs."""
    rep = SingaBackend.prepare(model, device)
    expected: list[Any] | None = None
    feeds: Any = _feeding.random_inputs(rep, seed, _feeding.sizes_of(sizes)) if seed is not None else {}
    if archive:
        feeds |= _feeding.from_npz(archive)
    if data:
        values, expected = _data_set(data, model)
        feeds |= dict(zip((v.name for v in rep.inputs), values, strict=False))
    for pair in files:
        name, _, file = pair.partition("=")
        if not file:
            raise click.BadParameter(f"{pair!r} is not NAME=FILE", param_hint="--input")
        feeds[name] = _feeding.from_file(Path(file))
    outputs = rep.run(feeds, aux_output=aux)
    if target:
        arrays: dict[str, Any] = {n: v for n, v in outputs.to_dict().items() if isinstance(v, np.ndarray)}
        np.savez(target, **arrays)
    why = verdict.strict(list(outputs)[: len(expected)], expected, rtol, atol) if expected is not None else ""
    rows = [_feeding.summary(n, v) for n, v in outputs.to_dict().items()]
    if as_json:
        click.echo(json.dumps({"outputs": rows, "compared": expected is not None, "difference": why}))
    else:
        _show_outputs(rows)
        if expected is not None:
            out.print(
                f"[red]differs[/red] {why}" if why else "[green]equal to the expected outputs[/green]",
                highlight=False,
                soft_wrap=True,
            )
    if why:
        sys.exit(NO)


def _data_set(folder: Path, model: Path) -> tuple[list[Any], list[Any]]:
    return cases.data_set(folder, load_model(model)[0])


def _show_outputs(rows: list[dict[str, Any]]) -> None:
    table = Table("output", "type", "min", "max", "NaN", "Inf", "first values")
    for r in rows:
        kind = f"{r['dtype']}{r['shape']}" if r["kind"] == "tensor" else f"{r['kind']} of {r['length']}"
        numbers = [str(r.get(k, "–")) for k in ("min", "max", "nan", "inf")]
        table.add_row(r["name"], kind, *numbers, " ".join(r.get("first", [])))
    out.print(table)


# --- conform ----------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--select", "-k", default="", help="Only cases whose name matches this regular expression.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(cases.KINDS), help="Only cases of this kind (repeatable).")
@click.option("--processes", "-n", type=int, help="Child processes (default: one per core).")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds that one case may take.")
@click.option("--backend", default="singa_backend:SingaBackend", show_default=True, help="The backend under test, MODULE:CLASS.")
@click.option("--results", "target", type=click.Path(path_type=Path), help="Write everything to this JSON file.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML to this file.")
@click.option(
    "--report", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write the support report into this folder."
)
@click.option("--renew-manifest", is_flag=True, help="Write the manifest of the installed onnx instead of running.")
@_device_option
@_json_option
@_typed
def conform(select: str, kinds: tuple[str, ...], processes: int | None, timeout: float, backend: str, target: Path | None,
            junit: Path | None, folder: Path | None, renew_manifest: bool, device: str, as_json: bool) -> None:  # fmt: skip
    """Run ONNX's own suite; every failure must stand in gaps.txt with its reason."""
    if folder and (select or kinds):
        raise click.UsageError("--report needs the whole suite: leave out --select and --kind")
    if not worker.resolve(backend).supports_device(device):
        raise DeviceUnavailable(f"{backend} has no device {device!r} here", hint="sonnx run --device says why")
    if not as_json:
        err.print("building the cases of the installed onnx ...", style="dim")
    chosen = cases.load(kinds or cases.KINDS, select)
    if renew_manifest:
        results.save(cases.manifest_of(chosen), cases.held("manifest.json"))
        click.echo(f"wrote {cases.held('manifest.json')}")
        return
    whole = not (select or kinds)
    manifest = cases.check_manifest(chosen) if whole else ""
    with _progress(len(chosen), as_json) as step:
        found = worker.run(chosen, backend, device, processes, timeout, step)
    ours = backend == "singa_backend:SingaBackend"
    judged = gaps.judge(found, gaps.read(cases.held("gaps.txt")) if ours else {})
    document = results.to_json(found, judged, backend, device, manifest)
    if target:
        results.save(document, target)
    if junit:
        results.write_junit(found, judged, junit)
    if folder:
        report.write(report.build([document]), folder)
    if as_json:
        click.echo(
            json.dumps({k: document[k] for k in ("totals", "gaps", "unexpected", "closed_gaps", "environment", "manifest")})
        )
    else:
        _show_conformance(found, judged, document["totals"])
    sys.exit(0 if judged.good and found else NO)


def _progress(total: int, quiet: bool) -> AbstractContextManager[Callable[[worker.Result], None]]:
    """A bar on a terminal, a line every tenth elsewhere, nothing with --json."""
    if quiet:
        return nullcontext(lambda _: None)
    return _Bar(total) if err.is_terminal else nullcontext(_Lines(total))


class _Lines:
    def __init__(self, total: int) -> None:
        self.total, self.done, self.failed = total, 0, 0

    def __call__(self, result: worker.Result) -> None:
        self.done += 1
        self.failed += result.strict != "passed"
        if self.done == self.total or self.done % max(1, self.total // 10) == 0:
            click.echo(f"{self.done}/{self.total} cases, {self.failed} not passed", err=True)


class _Bar(AbstractContextManager[Callable[[worker.Result], None]]):
    def __init__(self, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=err, transient=True)
        self.total, self.failed = total, 0

    def __enter__(self) -> Callable[[worker.Result], None]:
        self.bar.start()
        self.task = self.bar.add_task("conformance", total=self.total)
        return self._step

    def _step(self, result: worker.Result) -> None:
        self.failed += result.strict != "passed"
        self.bar.update(self.task, advance=1, description=f"conformance, {self.failed} not passed")

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _show_conformance(found: list[worker.Result], judged: gaps.Judgement, totals: dict[str, Any]) -> None:
    table = Table("kind", "cases", "strict", "official", title="ONNX conformance")
    for kind, t in totals["by_kind"].items():
        table.add_row(kind, str(t["cases"]), str(t["strict"]), str(t["official"]))
    table.add_row("all", str(totals["cases"]), str(totals["strict"]), str(totals["official"]), style="bold")
    out.print(table)
    if judged.explained:
        out.print(f"{len(judged.explained)} known gaps, each with its reason in gaps.txt", highlight=False, soft_wrap=True)
    for r in judged.unexpected[:40]:
        out.print(f"[red]{r.strict}[/red] {r.name}", highlight=False, soft_wrap=True)
        out.print(f"    {(r.reason or r.official_reason)[:400]}", markup=False, highlight=False, soft_wrap=True)
    if len(judged.unexpected) > 40:
        out.print(f"... and {len(judged.unexpected) - 40} more; --results FILE has all of them")
    for name in judged.closed:
        out.print(f"[red]closed gap[/red] {name}: it passes now; delete its line from gaps.txt", highlight=False, soft_wrap=True)


# --- report -----------------------------------------------------------------------------------------------------------


@main.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--to",
    "folder",
    default="reports",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the report stands.",
)
@click.option("--check", is_flag=True, help="Write nothing; leave with 1 when the report there is stale.")
@_json_option
@_typed
def write_report(runs: tuple[Path, ...], folder: Path, check: bool, as_json: bool) -> None:
    """Render the support report from the JSON of RUNS (`sonnx conform --results`), one run per device."""
    built = report.build([json.loads(p.read_text()) for p in runs])
    why = ""
    if check:
        why = report.stale(built, folder)
    else:
        report.write(built, folder)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "stale": why, "versions": built["versions"], "totals": built["totals"]}))
    elif check:
        out.print(f"[red]stale[/red] {why}" if why else "the report is up to date", highlight=False, soft_wrap=True)
    else:
        out.print(f"wrote {folder / 'support.md'} and {folder / 'support.json'}", highlight=False, soft_wrap=True)
    if why:
        sys.exit(NO)


if __name__ == "__main__":
    main()
