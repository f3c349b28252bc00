"""`sonnx foreign`: compare models of other frameworks with onnxruntime, value by value."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from ._common import NO, OUTPUT_FOLDER, check_places, echo, exit_codes, expression, json_option, write_json, wrote
from ._progress import progress


@click.command("foreign")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--select", "-k", default="", callback=expression, help="Only models whose name matches this regular expression.")
@click.option("--light/--no-light", "with_light", default=True, help="Include the light models of onnx with random weights.")
@click.option("--to", "target", type=OUTPUT_FOLDER, help="Write foreign.json and foreign.md here.")
@json_option
@exit_codes
def command(folder: Path | None, select: str, with_light: bool, target: Path | None, as_json: bool) -> None:
    """Compare every value of exported models with onnxruntime; both engines run in child processes.

    The models are the nine light models of onnx, with random instead of constant weights, and the exported models of FOLDER,
    which are also compared with what their framework computed (NET-*.onnx and NET.npz with the arrays x0_0, ..., y0_0, ...).
    """
    from singa_backend.conform import foreign as foreigners
    from singa_backend.sweep.run import settle_all
    from singa_backend.sweep.tasks import FOREIGN

    check_places(pages=(target, foreigners.FILES))
    wanted = foreigners.requests(folder, select, light=with_light)
    found: dict[int, dict[str, Any]] = {}
    with (
        progress(len(wanted), "foreign models", unit="models", quiet=as_json) as step,
        closing(settle_all(wanted, FOREIGN, None, processes=1)) as answers,
    ):
        for at, answer in answers:
            found[at] = answer
            step(note=wanted[at].name)
    failed = {wanted[i].name: found[i] for i in sorted(found) if found[i]["status"] != "passed"}
    rows = [c for i in sorted(found) for c in found[i]["facts"].get("comparisons", ())]
    document = foreigners.document(rows)
    if failed:
        document["failed"] = {name: f"{a['status']}: {a['reason']}" for name, a in failed.items()}
    pages = foreigners.write(document, target) if target and not failed else []
    if as_json:
        write_json(document)
    else:
        _show(document, select)
        wrote(*pages)
    sys.exit(0 if rows and not failed and all(c["good"] for c in rows) else NO)


def _show(document: dict[str, Any], select: str) -> None:
    """Print a line for each comparison, and for each model without one."""
    rows, failed = document["comparisons"], document.get("failed", {})
    for c in rows:
        worst = c["worst"]
        output = max(c["outputs"].values(), key=lambda e: float("inf") if isinstance(e, str) else e)
        echo(
            f"{'ok  ' if c['good'] else 'OFF '} {c['model']:24} {c['peer']:12} outputs {output}  "
            f"{c['values']:4} values, worst {worst['error']} {worst['value']} {worst['operator']}"
        )
    for name, why in failed.items():
        echo(f"OFF  {name:24} {why}", style="red")
    if failed:
        echo("no report is written: some models were not compared", style="red")
    if not rows and not failed:
        echo(f"no model was compared: none matches {select!r}" if select else "no model was compared", style="red")
