"""`sonnx foreign`: compare models of other frameworks with onnxruntime, value by value."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from singa_backend.conform import foreign as foreigners
from singa_backend.conform import light_models
from singa_backend.engines.oracle import Oracle

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
    """Compare every value of exported models with onnxruntime, which runs in a child process.

    The models are the nine light models of onnx, with random instead of constant weights, and the exported models of FOLDER,
    which are also compared with what their framework computed (NET-*.onnx and NET.npz with the arrays x0_0, ..., y0_0, ...).
    """
    check_places(folders=(target,))
    found: list[foreigners.PeerComparison] = []
    count = sum(bool(re.search(select, n)) for n in light_models.names()) if with_light else 0
    count += 2 * sum(len(s.data) for s in foreigners.stored(folder, select)) if folder else 0
    with Oracle("onnxruntime") as oracle, progress(count, "foreign models", unit="models", quiet=as_json) as step:
        for made in foreigners.light_comparisons(oracle, select) if with_light else ():
            found.append(made)
            step(note=made.model)
        for made in foreigners.stored_comparisons(folder, oracle, select) if folder else ():
            found.append(made)
            step(note=made.model)
    document = foreigners.document(found)
    pages = foreigners.write(document, target) if target else []
    if as_json:
        write_json(document)
    else:
        for c in found:
            value, operator, worst = c.worst
            output = max(c.outputs.values())
            echo(
                f"{'ok  ' if c.good else 'OFF '} {c.model:24} {c.peer:12} outputs {output:.1e}  "
                f"{len(c.values):4} values, worst {worst:.1e} {value} {operator}"
            )
        if not found:
            echo(f"no model was compared: none matches {select!r}" if select else "no model was compared", style="red")
        wrote(*pages)
    sys.exit(0 if found and all(c.good for c in found) else NO)
